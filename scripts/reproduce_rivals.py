"""Rows against rivals and against RLHFless without some of its mechanisms (6, 7, 9)."""

from __future__ import annotations

import numpy as np

from rlhfless.models.scores import Interval95, interval
from rlhfless.scripts.reproduce_lab import (
    CHUNKED,
    LOCAL_PREFILL,
    NO_MIGRATION,
    NO_WAVES,
    PAPER_ESTIMATE,
    THREE_ACTORS,
    Lab,
    Runs,
    gsm8k,
    shares,
    where_time_goes,
)
from rlhfless.scripts.reproduce_verdicts import (
    Figure,
    Finding,
    Point,
    Row,
    as_change,
    as_percent,
    as_times,
    change,
    claim,
    effect,
    less,
    likeness,
    shifted,
    spread,
)


def against_global_cut(lab: Lab) -> Row:
    """Row 6: cost against RLHFuse's global cut without ranking, three actors (fig. 12)."""
    cell = gsm8k("ppo")
    ours = lab.runs(cell, "rlhfless", THREE_ACTORS)
    alone = (THREE_ACTORS, CHUNKED, LOCAL_PREFILL)
    cut = "migration={_target_: rlhfless.policies.Migration, rule: global, threshold: 0.8, kv: transfer}"
    rivals = {
        "rlhfuse as shipped": lab.runs(cell, "rlhfuse"),
        "the same cut with RLHFless's placement and prewarming": lab.runs(cell, "rlhfless", *alone, cut),
    }
    findings = []
    for name, rival in rivals.items():
        saved = change(ours.each("gpu_seconds"), rival.each("gpu_seconds"))
        decode = float((rival.function("decode") / rival.each("gpu_seconds")).mean())
        generation = change(ours.function("decode") + ours.function("prefill"), rival.function("decode"))
        findings.append(
            effect(
                f"cost against {name}",
                "256 slots an actor",
                ("-12.8 %", -0.128),
                as_change(saved),
                saved,
                saved,
                f"Decoding is {decode:.0%} of the rival's bill. Prefill and decoding together change by "
                f"{generation.mean:+.0%}; the paper's number asks for {-0.128 / decode:.0%}, since the rest is "
                "training.",
            )
        )

    def early(runs: Runs) -> Interval95:
        """Return how much earlier actors 2 and 3 are released than the last one, as a share of its time."""
        return interval(
            [float(np.mean([1 - np.sort(r)[:-1].mean() / r.max() for r in seed])) for seed in runs.release]
        )

    gap = early(ours)
    share = interval(
        [float(np.mean([np.sort(r)[-2] < (1 - 0.05) * r.max() for r in seed])) for seed in ours.release]
    )
    fused = early(rivals["rlhfuse as shipped"])
    findings.append(
        claim(
            "actors 2 and 3 end early (by 5 % of generation or more)",
            "256 slots an actor",
            f"in {as_percent(share)} of the steps",
            share,
            f"They are released {gap.mean:.0%} of generation before the last one on average, "
            f"{fused.mean:.0%} under the global cut.",
        )
    )
    panel = []
    for series, runs in (("rlhfless", ours), ("rlhfuse", rivals["rlhfuse as shipped"])):
        ends = np.array([[np.sort(r)[::-1] for r in seed] for seed in runs.release]).mean(axis=1)
        panel += [Point(series, f"actor {k + 1}", interval(ends[:, k])) for k in range(3)]
    return Row(
        6,
        "12.8 % cheaper than a global cut without ranking",
        "GSM8K, PPO, 3B, three actors, tau 0.7 against a cut with 20 % left",
        tuple(findings),
        (
            Figure(
                "12",
                "When actors are released",
                "actors, latest first",
                {"seconds": tuple(panel)},
                kind="bar",
            ),
        ),
    )


#: The mechanisms of the ablation, each added to those before it.
ABLATION = {
    "none": (CHUNKED, THREE_ACTORS, LOCAL_PREFILL, NO_MIGRATION),
    "+DP": (CHUNKED, THREE_ACTORS, NO_MIGRATION),
    "+PA": (THREE_ACTORS,),
    "+AS": (),
}


def ablation(lab: Lab) -> Row:
    """Row 7: deduplicated prefill, then prompt assignment with cuts, then actor scaling (fig. 11)."""
    findings: list[Finding] = []
    panels: dict[str, list[Point]] = {"seconds a step": [], "GPU seconds a step": []}
    for options, cell, extra in (
        (PAPER_ESTIMATE, gsm8k("grpo"), ()),
        ("exact estimate, no slot waves", gsm8k("grpo").but(NO_WAVES), ("scale.estimate=exact",)),
    ):
        runs = {
            name: lab.runs(cell, "rlhfless", *parts, *(extra if name == "+AS" else ()))
            for name, parts in ABLATION.items()
        }
        findings += _steps_of_ablation(options, runs)
        for name, r in runs.items():
            panels["seconds a step"].append(Point(options, name, r.mean("step_seconds")))
            panels["GPU seconds a step"].append(Point(options, name, r.mean("gpu_seconds")))
    return Row(
        7,
        "ablation: +DP and +PA cut cost, +AS cuts time",
        "GSM8K, GRPO, 3B, 3 responses a prompt; none is rlhfless with every mechanism but placement and "
        "prewarming off",
        tuple(findings),
        (Figure("11", "Ablation", "mechanisms", {k: tuple(v) for k, v in panels.items()}, kind="bar"),),
    )


def _steps_of_ablation(options: str, runs: dict[str, Runs]) -> list[Finding]:
    """Judge each step of the ablation, training step by training step."""
    none, dp, pa, scaled = (runs[name] for name in ABLATION)

    def told(ours: Runs, base: Runs) -> str:
        time, cost = (change(ours.each(c), base.each(c)) for c in ("step_seconds", "gpu_seconds"))
        return f"time {as_change(time)}, cost {as_change(cost)}"

    cheaper = shares(dp, none, "gpu_seconds")
    more = interval(
        [
            # Saving more than +DP did: cost(PA) < cost(DP) - (cost(none) - cost(DP)).
            less(
                p["gpu_seconds"], np.minimum(2 * d["gpu_seconds"] - n["gpu_seconds"], d["gpu_seconds"])
            ).mean()
            for n, d, p in zip(none.steps, dp.steps, pa.steps, strict=True)
        ]
    )
    quicker = shares(scaled, pa, "step_seconds")
    even = spread([pa.each("gpu_seconds"), scaled.each("gpu_seconds")])
    tokens = 1 - float(dp.each("prefill_tokens").mean() / none.each("prefill_tokens").mean())
    decode = change(scaled.function("decode"), pa.function("decode"))
    return [
        claim(
            "+DP cuts the cost a little",
            options,
            f"{told(dp, none)}; cheaper in {as_percent(cheaper)} of the steps",
            cheaper,
            f"It removes {tokens:.0%} of the prefill tokens (the engine's prefix cache has the rest "
            f"already), and prefill on the learner's GPUs costs {dp.function('prefill').mean():.1f} of "
            f"{none.each('gpu_seconds').mean():.0f} GPU s a step, start-up included.",
        ),
        claim(
            "+PA cuts the cost more than +DP",
            options,
            f"{told(pa, dp)}; in {as_percent(more)} of the steps",
            more,
            "Sorted blocks end apart and each actor is released when it ends; "
            f"{pa.each('migrations').mean():.0f} responses move a step.",
        ),
        claim(
            "+AS cuts the time",
            options,
            f"{told(scaled, pa)}; faster in {as_percent(quicker)} of the steps",
            quicker,
            f"It runs {scaled.each('actors').mean():.1f} actors in place of 3; preparation and training, "
            f"{scaled.training_share:.0%} of its step, stay.",
        ),
        likeness(
            "+AS leaves the cost about equal",
            options,
            as_change(change(scaled.each("gpu_seconds"), pa.each("gpu_seconds"))),
            even,
            "Every further actor reads the weights once more an iteration: decoding costs "
            f"{decode.mean:+.0%}.",
        ),
    ]


def bad_predictor(lab: Lab) -> Row:
    """Row 9: a length classifier of 44 % accuracy, against verl (fig. 14)."""
    cell = gsm8k("grpo")
    ours = lab.runs(cell, "oracle_length_bucket")
    best = lab.runs(cell, "oracle")
    findings = []
    for baseline in ("verl", "verl_split", "verl_standalone"):
        base = lab.runs(cell, baseline)
        against, ideal = ours.against(base), best.against(base)
        held = float(1 - (base.each("busy_gpu_seconds") / base.each("gpu_seconds")).mean())
        findings += [
            effect(
                f"speed-up over {baseline}",
                PAPER_ESTIMATE,
                ("1.22x", 0.22),
                as_times(against.speedup),
                against.speedup,
                shifted(against.speedup, -1),
                f"{where_time_goes(ours, base)} Exact lengths would give {ideal.speedup.mean:.2f}x.",
            ),
            effect(
                f"cost reduction against {baseline}",
                PAPER_ESTIMATE,
                ("28.9 %", 0.289),
                as_percent(against.cost_reduction),
                against.cost_reduction,
                against.cost_reduction,
                f"{held:.0%} of the baseline's bill is held GPUs without work; exact lengths would give "
                f"{ideal.cost_reduction.mean:.0%}.",
            ),
        ]
    panels: dict[str, list[Point]] = {"speed-up over verl": [], "cost reduction against verl": []}
    base = lab.runs(cell, "verl")
    for accuracy in (0.2, 0.44, 0.6, 0.8, 1.0):
        against = lab.runs(cell, "oracle_length_bucket", f"predict.accuracy={accuracy}").against(base)
        panels["speed-up over verl"].append(Point("length buckets", accuracy, against.speedup))
        panels["cost reduction against verl"].append(
            Point("length buckets", accuracy, against.cost_reduction)
        )
    return Row(
        9,
        "1.22x and 28.9 % with a predictor of 44 % accuracy",
        "GSM8K, GRPO, 3B; five length buckets of equal counts, errors to the neighbouring one; verl in "
        "three placements, since the paper does not say which its pool is",
        tuple(findings),
        (
            Figure(
                "14",
                "A worse predictor",
                "accuracy of the classifier",
                {k: tuple(v) for k, v in panels.items()},
            ),
        ),
    )
