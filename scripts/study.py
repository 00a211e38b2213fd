"""tail_isolated against RLHFless: prints the tables of docs/tail_isolated.md, in Markdown.

    python -m rlhfless.scripts.study              # all settings, seeds 0 to 4
    python -m rlhfless.scripts.study --seeds 2    # a shorter look
    python -m rlhfless.scripts.study --ablation   # what each part contributes

Every row is one workload on one cluster, both policies on the same traces, paired by seed. The bound is
:func:`rlhfless.solver.bounds.step_lower_bound` on the true lengths: what no plan can go below in generation
time and in decode GPU seconds, prefill and transfers left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from rlhfless.models.scores import Interval95
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.simulate import view_of
from rlhfless.scripts.reproduce_lab import NO_MIGRATION, TESTBED, Cell, Lab, Runs
from rlhfless.solver.bounds import step_lower_bound

_SMALLER = ("trace.prompts=1024", "trace.prompts_per_step=256")
_H100 = "h100_4x8"

#: The settings, by name.
SETTINGS = {
    "gsm8k_grpo, 3B": Cell("gsm8k_grpo", "l40s_qwen2.5-3b_tp2", TESTBED),
    "gsm8k_ppo, 3B": Cell("gsm8k_ppo", "l40s_qwen2.5-3b_tp2", TESTBED),
    "gsm8k_grpo, 7B": Cell("gsm8k_grpo", "l40s_qwen2.5-7b_tp4", TESTBED),
    "gsm8k_ppo, 7B": Cell("gsm8k_ppo", "l40s_qwen2.5-7b_tp4", TESTBED),
    "gsm8k_grpo, 3B, 256 prompts a step": Cell("gsm8k_grpo", "l40s_qwen2.5-3b_tp2", TESTBED, _SMALLER),
    "dapo_math, 3B": Cell("dapo_math", "l40s_qwen2.5-3b_tp2", TESTBED),
    "gsm8k_grpo, 7B on H100": Cell("gsm8k_grpo", "h100_qwen2.5-7b_tp2", _H100),
    "deepcoder_16k, 7B on H100": Cell("deepcoder_16k", "h100_qwen2.5-7b_tp2", _H100),
    "deepcoder_16k, 14B on H100": Cell("deepcoder_16k", "h100_qwen2.5-14b_tp2", _H100),
    "dapo_math, 7B on H100": Cell("dapo_math", "h100_qwen2.5-7b_tp2", _H100),
    "dapo_math, 14B on H100": Cell("dapo_math", "h100_qwen2.5-14b_tp2", _H100),
    "long_reasoning, 7B on H100": Cell("long_reasoning", "h100_qwen2.5-7b_tp2", _H100),
    "long_reasoning, 14B on H100": Cell("long_reasoning", "h100_qwen2.5-14b_tp2", _H100),
}

_RLHFLESS_PLACE = "place={_target_: rlhfless.policies.ByDistance, order: nearest}"
_RLHFLESS_CUT = "migration={_target_: rlhfless.policies.Migration, rule: local, threshold: 0.7}"
_OWN_PLACE = "place={_target_: rlhfless.policies.LearnerFirst}"
_OWN_CUT = "migration={_target_: rlhfless.policies.Migration, rule: local, threshold: 0.9, slots: engine}"

#: Comparisons: the changes to tail_isolated and to rlhfless.
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "as shipped": ((), ()),
    "both with the exact estimate": (("scale.reference.estimate=exact",), ("scale.estimate=exact",)),
    "both without migration": ((NO_MIGRATION, f"scale.reference_{NO_MIGRATION}"), (NO_MIGRATION,)),
}

#: What each part contributes: a policy and its changes, against rlhfless as shipped.
ABLATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "tail_isolated": ("tail_isolated", ()),
    "planned on the predicted lengths alone": ("tail_isolated", ("scale.plan_on=point",)),
    "RLHFless's placement": ("tail_isolated", (_RLHFLESS_PLACE,)),
    "RLHFless's placement and cut": ("tail_isolated", (_RLHFLESS_PLACE, _RLHFLESS_CUT)),
    "rlhfless with our placement": ("rlhfless", (_OWN_PLACE,)),
    "rlhfless with our placement and cut": ("rlhfless", (_OWN_PLACE, _OWN_CUT)),
    "score: cheapest": ("tail_isolated", ("scale.score=cheapest",)),
    "score: minmax": ("tail_isolated", ("scale.score=minmax",)),
    "score: ratio": ("tail_isolated", ("scale.score=ratio",)),
}


def study(lab: Lab) -> str:
    """Return the tables: every variant on every setting."""
    head = "setting | actors | speed-up | cost reduction, % | generation / bound | decode / bound"
    return "\n\n".join(
        f"**{title}**\n\n"
        + markdown_table(head, [_row(lab, name, cell, own, other) for name, cell in SETTINGS.items()])
        for title, (own, other) in VARIANTS.items()
    )


def ablation(lab: Lab) -> str:
    """Return the table of the parts: each against rlhfless as shipped, over all settings."""
    head = "policy | better in both | worse in one | speed-up, mean (least) | cost reduction, %, mean (least)"
    return markdown_table(head, [_ablation(lab, title, *what) for title, what in ABLATION.items()])


def _row(lab: Lab, name: str, cell: Cell, own: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    ours, theirs = lab.runs(cell, "tail_isolated", *own), lab.runs(cell, "rlhfless", *other)
    comparison = ours.against(theirs)
    generation, decode = _bounds(lab, cell)
    pairs = [
        (
            runs.each("actors").mean(),
            runs.each("generation_seconds").mean() / generation,
            _decode(runs) / decode,
        )
        for runs in (theirs, ours)
    ]
    actors, time, cost = zip(*pairs, strict=True)
    return [
        name,
        f"{actors[0]:.1f} → {actors[1]:.1f}",
        _interval(comparison.speedup, 1.0, 3),
        _interval(comparison.cost_reduction, 100.0, 1),
        f"{time[0]:.2f} → {time[1]:.2f}",
        f"{cost[0]:.2f} → {cost[1]:.2f}",
    ]


def _ablation(lab: Lab, title: str, policy: str, changes: tuple[str, ...]) -> list[str]:
    comparisons = [
        lab.runs(cell, policy, *changes).against(lab.runs(cell, "rlhfless")) for cell in SETTINGS.values()
    ]
    time = [c.speedup for c in comparisons]
    cost = [c.cost_reduction for c in comparisons]
    better = sum(t.low > 1 and c.low > 0 for t, c in zip(time, cost, strict=True))
    worse = sum(t.high < 1 or c.high < 0 for t, c in zip(time, cost, strict=True))
    return [
        title,
        f"{better} of {len(comparisons)}",
        str(worse),
        f"{np.mean([t.mean for t in time]):.3f} ({min(t.mean for t in time):.3f})",
        f"{100 * np.mean([c.mean for c in cost]):.1f} ({100 * min(c.mean for c in cost):.1f})",
    ]


def _decode(runs: Runs) -> float:
    return float(runs.function("decode").mean())


def _bounds(lab: Lab, cell: Cell) -> tuple[float, float]:
    """Return the mean bounds of a step on generation seconds and decode GPU seconds."""
    workload = lab.workload(cell)
    bounds = [
        step_lower_bound(
            view_of(
                batch,
                workload.setting,
                LengthHistory(len(trace.prompt_ids)),
                max_response_tokens=int(batch.response_tokens.max()),
            ),
            batch.response_tokens,
        )
        for trace in workload.traces
        for batch in trace.batches()
    ]
    return (
        float(np.mean([bound.generation_seconds for bound in bounds])),
        float(np.mean([bound.gpu_seconds for bound in bounds])),
    )


def _interval(value: Interval95, factor: float, digits: int) -> str:
    mean, low, high = (f"{factor * x:.{digits}f}" for x in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def markdown_table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; ``head`` is its first line without the outer bars."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + " --- |" * columns, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs with seeds 0, 1, ... (default 5)")
    parser.add_argument("--ablation", action="store_true", help="print the table of the parts instead")
    given = parser.parse_args(arguments)
    print((ablation if given.ablation else study)(Lab(given.seeds)))


if __name__ == "__main__":
    main()
