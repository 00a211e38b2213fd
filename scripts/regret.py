"""What knowing lengths is worth to a planner: prints the tables of docs/uncertainty.md, in Markdown.

    python -m rlhfless.scripts.regret                      # the presets, seeds 0 to 4
    python -m rlhfless.scripts.regret --data DATA          # and the PolyTrace lengths in the folder DATA
    python -m rlhfless.scripts.regret --calibration        # how well past lengths foretell the next ones
    python -m rlhfless.scripts.regret --cut                # what the threshold of the cut changes

One search plans every step four times, and the replay scores each plan on the true lengths: on the predicted
lengths (``saa_point``), on a distribution from the run's history (``saa``), on the distribution that the
lengths really come from (``exact``: for synthetic presets the generator's, given the same history; for recorded
runs without returning prompts the run's own), and on the true lengths (``oracle_saa``). No planner that does not
see the lengths can be expected to beat ``exact`` by more than the search leaves on the table. The first step of
a run, about which nothing is known, is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from rlhfless.models.scores import Interval95, interval
from rlhfless.policies import Composed, Setting, StepView, simulate
from rlhfless.policies.assign import Groups
from rlhfless.policies.guess import FromHistory, LengthModel
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.predict import Ewma
from rlhfless.policies.scale import Split, Work
from rlhfless.policies.simulate import view_of
from rlhfless.scripts.common import guarded
from rlhfless.scripts.reproduce_lab import TESTBED, Cell, Lab, changed_policy, shipped
from rlhfless.scripts.study import markdown_table
from rlhfless.solver.scenarios import SampleAverage, Score, Search, optimality_gap
from rlhfless.traces.errors import InputError
from rlhfless.traces.lengths import hermite_weights, latent_correlation, normal_scores
from rlhfless.traces.polytrace import read_polytrace
from rlhfless.traces.synthetic import Synthetic
from rlhfless.traces.trace import FloatArray, IntArray, Trace

_H100 = "h100_4x8"

#: The synthetic settings, by name.
PRESETS = {
    "gsm8k_grpo, 3B": Cell("gsm8k_grpo", "l40s_qwen2.5-3b_tp2", TESTBED),
    "gsm8k_grpo, 3B, 256 prompts a step": Cell(
        "gsm8k_grpo", "l40s_qwen2.5-3b_tp2", TESTBED, ("trace.prompts=1024", "trace.prompts_per_step=256")
    ),
    "dapo_math, 14B on H100": Cell("dapo_math", "h100_qwen2.5-14b_tp2", _H100),
    "long_reasoning, 14B on H100": Cell("long_reasoning", "h100_qwen2.5-14b_tp2", _H100),
}

#: Recorded lengths: the cell that gives costs and GPUs, workload, run, and the cap (the longest where unknown).
POLYTRACE = {
    "DAPO": (Cell("dapo_math", "h100_qwen2.5-14b_tp2", _H100), "dapo_qwen25_32b_math", 0, 20480),
    "DeepCoder": (
        Cell("deepcoder_16k", "h100_qwen2.5-14b_tp2", _H100),
        "deepcoder_14b_code_16k",
        None,
        16000,
    ),
}
POLYTRACE_FILE = Path("polytrace_lengths", "single_turn_lengths.parquet")

#: What is minimised, as overrides of a policy.
GOALS = {
    "ratio 0.7": ("scale.goal.kind=ratio",),
    "minmax 0.7": ("scale.goal.kind=minmax",),
    "cost within 1.1 of the least time": ("scale.goal.kind=cost", "scale.goal.limit=1.1"),
}

#: So many times the scenarios of ``saa`` are drawn of the true distribution, which is to be a limit.
_EXACT_SCENARIOS = 2

#: Thresholds of the cut; 1 cuts nothing.
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Case:
    """Runs to plan, one a seed.

    ``exact`` gives the distribution of a run's lengths, where one is known. ``repeated``: all runs have the same
    lengths, so that only their steps count as observations, each a mean over the seeds.
    """

    name: str
    traces: tuple[Trace, ...]
    setting: Setting
    exact: Callable[[Trace], LengthModel] | None = None
    repeated: bool = False


class Generator:
    """The distribution from which a synthetic trace's lengths are drawn, given what came before: a length model.

    The scores of a prompt are a Gaussian state that moves from epoch to epoch
    (:mod:`rlhfless.traces.synthetic`); past lengths and the reference answer are linear observations of it with
    normal errors, so that a Kalman filter gives its exact distribution. Lengths at the cap count as runaways;
    where responses reach the cap by themselves as well, the filter leaves those out and is not exact.
    """

    def __init__(self, params: Synthetic, trace: Trace) -> None:
        self._params, self._trace = params, trace
        self._scores = normal_scores(8192)
        self._log_lengths = np.log(params.length_quantiles(ndtr(self._scores)))
        self._alike = latent_correlation(self._log_lengths, params.icc)
        # Of one response's log length with the prompt's effect.
        self._effect_correlation = float(np.sqrt(self._alike * hermite_weights(self._log_lengths)[0]))
        # A whole number of tokens stands for a range of scores: its mean.
        self._seen, first = np.unique(self._log_lengths, return_index=True)
        ends = np.append(first[1:], len(self._scores))
        sums = np.concatenate(([0.0], np.cumsum(self._scores)))
        self._seen_scores = (sums[ends] - sums[first]) / (ends - first)

    def __call__(self, view: StepView, predicted_tokens: IntArray, draws: int) -> IntArray:
        """Return lengths of the step, shape (draws, responses)."""
        params, rng, group = self._params, view.rng, view.tree.group
        mean, variance = self.effects(view.epoch)
        prompt = view.prompt[np.unique(group, return_index=True)[1]]
        effect = mean[prompt] + np.sqrt(variance[prompt]) * rng.standard_normal((draws, len(prompt)))
        own = rng.standard_normal((draws, len(view)))
        score = np.sqrt(self._alike) * effect[:, group] + np.sqrt(1 - self._alike) * own
        tokens = np.exp(np.interp(score, self._scores, self._log_lengths)) * (1 + params.drift) ** view.epoch
        tokens[rng.random(tokens.shape) < params.runaway_share] = params.max_response_tokens
        lengths: IntArray = np.clip(np.rint(tokens), 1, params.max_response_tokens).astype(np.int64)
        return lengths

    def effects(self, epoch: int) -> tuple[FloatArray, FloatArray]:
        """Return mean and variance of each prompt's effect in an epoch, given all epochs before."""
        params, trace, prompts = self._params, self._trace, len(self._trace.prompt_ids)
        mean, variance = np.zeros(prompts), np.ones(prompts)
        if params.answer_median_tokens is not None and trace.answer_tokens is not None:
            answered = np.log(trace.answer_tokens / params.answer_median_tokens) / params.answer_log_sd
            known = params.answer_correlation / self._effect_correlation
            mean[trace.prompt], variance[trace.prompt] = known * answered, 1 - known**2
        for past in range(epoch):
            rows = np.flatnonzero(
                (trace.epoch == past) & (trace.response_tokens < params.max_response_tokens)
            )
            level = np.log(trace.response_tokens[rows] / (1 + params.drift) ** past)
            score = np.interp(level, self._seen, self._seen_scores)
            count = np.bincount(trace.prompt[rows], minlength=prompts)
            total = np.bincount(trace.prompt[rows], weights=score, minlength=prompts)
            precision = 1 / variance + count * self._alike / (1 - self._alike)
            mean = (mean / variance + np.sqrt(self._alike) * total / (1 - self._alike)) / precision
            mean = params.persistence * mean
            variance = params.persistence**2 / precision + 1 - params.persistence**2
        return mean, variance


class Population:
    """The lengths of a recorded run as a distribution: each prompt draws all lengths of one of the run's prompts.

    What a planner knows that has seen the whole population of prompts, this step's included, and cannot tell them
    apart. For runs in which no prompt returns.
    """

    def __init__(self, trace: Trace) -> None:
        order = np.argsort(trace.prompt, kind="stable")
        self._lengths = trace.response_tokens[order]
        _, self._first, self._count = np.unique(trace.prompt[order], return_index=True, return_counts=True)

    def __call__(self, view: StepView, predicted_tokens: IntArray, draws: int) -> IntArray:
        """Return lengths of the step, shape (draws, responses)."""
        group = view.tree.group
        chosen = view.rng.integers(0, len(self._first), (draws, len(view.tree.prompt_tokens)))[:, group]
        # A random sample of the prompt each, all different where it has as many.
        turn = view.rng.integers(0, 1 << 30, (draws, len(view.tree.prompt_tokens)))[:, group] + view.sample
        lengths: IntArray = self._lengths[self._first[chosen] + turn % self._count[chosen]]
        return lengths


@dataclass(frozen=True)
class _Kept:
    """A scaling part that keeps the work of every step, to score plans on the same goal afterwards."""

    scale: SampleAverage
    works: list[Work]

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        self.works.append(work)
        return self.scale(work, split, most)


@dataclass(frozen=True)
class Steps:
    """A planner's steps of all runs: the goal's value by the replay, seconds, GPU seconds of decoding, actors."""

    value: FloatArray
    seconds: FloatArray
    gpu_seconds: FloatArray
    actors: FloatArray
    planning_seconds: FloatArray


@dataclass(frozen=True)
class Regret:
    """Regret of planning on points and on a distribution, per step against the clairvoyant.

    ``closed`` is the share of the point's regret that the distribution closes, ``attainable`` the share that
    the true distribution does, ``of_attainable`` the first over the second, where that is safely above 0.
    """

    point: Interval95
    distribution: Interval95
    closed: Interval95
    attainable: Interval95 | None
    of_attainable: Interval95 | None

    @classmethod
    def of(cls, steps: dict[str, Steps]) -> Regret:
        """Compare planners on the same steps."""
        value = {name: one.value for name, one in steps.items()}
        point = value["saa_point"] - value["oracle_saa"]
        own = value["saa"] - value["oracle_saa"]
        closed = ratio_interval(point - own, point)
        if "exact" not in value:
            return cls(interval(point), interval(own), closed, None, None)
        exact = value["saa_point"] - value["exact"]
        attainable = ratio_interval(exact, point)
        of_attainable = ratio_interval(point - own, exact) if attainable.low > 0 else None
        return cls(interval(point), interval(own), closed, attainable, of_attainable)


def ratio_interval(part: FloatArray, whole: FloatArray) -> Interval95:
    """Return the ratio of two means over the same steps, with its 95 % bootstrap interval (percentiles, paired).

    Draws in which the whole is 0 are left out.
    """
    value = float(part.mean() / whole.mean())
    if len(part) < 2:
        return Interval95(value, value, value)
    draws = np.random.default_rng(0).integers(0, len(part), (4000, len(part)))
    parts, wholes = part[draws].mean(axis=1), whole[draws].mean(axis=1)
    some = wholes != 0
    low, high = np.quantile(parts[some] / wholes[some], (0.025, 0.975))
    return Interval95(value, float(low), float(high))


def presets(lab: Lab) -> Iterator[Case]:
    """Yield the synthetic settings."""
    for name, cell in PRESETS.items():
        workload = lab.workload(cell)
        values = shipped("trace", cell.trace)
        values |= {
            key.removeprefix("trace."): int(value)
            for key, _, value in (c.partition("=") for c in cell.changes)
        }
        yield Case(
            name, workload.traces, workload.setting, partial(Generator, Synthetic.parse(values, cell.trace))
        )


def polytrace(lab: Lab, data: Path) -> Iterator[Case]:
    """Yield the recorded lengths, as recorded and sampled twice.

    The tables do not say which prompts come back. As recorded, none does, and nothing but the lengths of other
    prompts is known of one. Sampled twice: a random half of a prompt's samples comes in a first epoch, the other
    half in a second one.
    """
    for name, (cell, workload, run, cap) in POLYTRACE.items():
        trace = read_polytrace(data / POLYTRACE_FILE, workload, run, max_response_tokens=cap)
        setting = lab.workload(cell).setting
        yield Case(f"{name}, as recorded", (trace,) * lab.seeds, setting, Population, repeated=True)
        halves = tuple(sampled_twice(trace, seed) for seed in range(lab.seeds))
        yield Case(f"{name}, sampled twice", halves, setting, repeated=True)


def sampled_twice(trace: Trace, seed: int) -> Trace:
    """Return a run of two epochs from one of a single epoch: half of each prompt's samples in each, by chance."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(trace)), trace.prompt))
    _, first, count = np.unique(trace.prompt[order], return_index=True, return_counts=True)
    place = np.empty(len(trace), dtype=np.int64)
    place[order] = np.arange(len(trace)) - np.repeat(first, count)
    size = np.repeat(count, count)[np.argsort(order, kind="stable")]
    late = place >= size // 2
    rows = np.lexsort((np.arange(len(trace)), late))
    half, steps = trace.select(rows), int(trace.step.max()) + 1
    second = late[rows]
    return replace(
        half, step=half.step + steps * second, epoch=half.epoch + second, sample=half.sample
    ).checked(trace.name)


def planners(case: Case, trace: Trace, changes: Sequence[str]) -> dict[str, Composed]:
    """Return the planners of one run."""
    policies = {name: _composed(name, changes) for name in ("saa_point", "saa", "oracle_saa")}
    if case.exact is not None:
        own = _average(policies["saa"])
        more = {name: _EXACT_SCENARIOS * getattr(own, name) for name in ("scenarios", "fresh")}
        scale = replace(own, lengths=case.exact(trace), **more)
        policies["exact"] = replace(policies["saa"], name="exact", scale=scale)
    return policies


def _composed(name: str, changes: Sequence[str]) -> Composed:
    policy = changed_policy(name, *changes)
    if not isinstance(policy, Composed):
        raise InputError(f"policy {name}: must be composed of parts")
    return policy


def _average(policy: Composed) -> SampleAverage:
    if not isinstance(policy.scale, SampleAverage):
        raise InputError(f"policy {policy.name}: scale must be a SampleAverage")
    return policy.scale


def play(case: Case, changes: Sequence[str]) -> tuple[dict[str, Steps], Search]:
    """Run every planner on every trace of a case; also return the search of the last step of the last run."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    for seed, trace in enumerate(case.traces):
        policies = planners(case, trace, changes)
        works: list[Work] = []
        outcomes: dict[str, list[tuple[float, ...]]] = {}
        for name, policy in policies.items():
            kept: list[Work] = []
            played = replace(policy, scale=_Kept(_average(policy), kept))
            outcomes[name] = [
                (
                    step.outcome.generation_seconds,
                    step.outcome.by_function["decode"],
                    step.outcome.actors,
                    step.planning_seconds,
                )
                for step in simulate(trace, played, case.setting, seed=seed)
            ]
            works = kept if name == "saa" else works
        batches = list(trace.batches())
        average = _average(policies["saa"])
        searches = [
            Search(average, work, min(average.place.most(work.view), len(work.view))) for work in works
        ]
        for step in range(1, len(batches)):
            # The forecast cuts lengths to what fits an actor, as the replay demands.
            score: Score = searches[step].scenarios(batches[step].response_tokens[None]).score
            for name, played_steps in outcomes.items():
                seconds, gpu_seconds, *rest = played_steps[step]
                value = float(score(np.array([seconds]), np.array([gpu_seconds]))[0])
                rows.setdefault(name, []).append((value, seconds, gpu_seconds, *rest))
    scored = {name: np.array(own) for name, own in rows.items()}
    if case.repeated:
        scored = {
            name: own.reshape(len(case.traces), -1, own.shape[1]).mean(axis=0) for name, own in scored.items()
        }
    return {name: Steps(*own.T) for name, own in scored.items()}, searches[-1]


def study(cases: Sequence[Case]) -> str:
    """Return the tables of regret, one a goal, and of the gap that the search leaves."""
    parts, gaps = [], []
    for title, changes in GOALS.items():
        table, means = [], []
        for case in cases:
            steps, search = play(case, changes)
            regret = Regret.of(steps)
            table.append(
                [
                    case.name,
                    *map(_signed, (regret.point, regret.distribution)),
                    *map(_percent, (regret.closed, regret.attainable, regret.of_attainable)),
                ]
            )
            means.append([case.name, *_means(steps)])
            gap = optimality_gap(search, search.run(search.draw(search.planner.scenarios))[-1])
            gaps.append([title, case.name, f"{gap.mean:.4f}", f"{gap.high:.4f}"])
        head = (
            "setting | regret, point | regret, distribution | closed, % | true distribution closes, % | "
            "of that closed, %"
        )
        parts.append(f"**{title}**\n\n{markdown_table(head, table)}")
        head = "setting | value | generation, s | decode GPU seconds | actors | planning, ms (median)"
        parts.append(
            f"Point / distribution / true distribution / clairvoyant\n\n{markdown_table(head, means)}"
        )
    parts.append("**gap**\n\n" + markdown_table("goal | setting | gap (SAA) | 95 % upper limit", gaps))
    return "\n\n".join(parts)


def _means(steps: dict[str, Steps]) -> list[str]:
    order = [steps[name] for name in ("saa_point", "saa", "exact", "oracle_saa") if name in steps]
    return [
        " / ".join(f"{one.value.mean():.3f}" for one in order),
        " / ".join(f"{one.seconds.mean():.2f}" for one in order),
        " / ".join(f"{one.gpu_seconds.mean():.1f}" for one in order),
        " / ".join(f"{one.actors.mean():.1f}" for one in order),
        " / ".join(f"{1e3 * float(np.median(one.planning_seconds)):.0f}" for one in order),
    ]


def calibration(cases: Sequence[Case], draws: int = 200) -> str:
    """Return how often lengths, and means over a prompt's samples, lie below quantiles foretold for them.

    Every step is foretold before its lengths are known; those from the second epoch on count, or where there is
    only one, all but the first step. Ties are broken at random.
    """
    models: dict[str, Callable[[], LengthModel]] = {
        "as shipped": FromHistory,
        "independent samples": lambda: FromHistory(correlated=False),
        "no pooled tail": lambda: FromHistory(tail=False),
    }
    levels = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    table = []
    for case in cases:
        for title, model in models.items():
            single, means = foretold(case, model(), draws)
            shares = [
                " ".join(f"{100 * (pit <= level).mean():.1f}" for level in levels) for pit in (single, means)
            ]
            table.append([case.name, title, *shares])
    named = " ".join(f"{100 * level:.0f}" for level in levels)
    return markdown_table(
        f"setting | model | lengths below quantile {named}, % | prompt means below, %", table
    )


def foretold(case: Case, model: LengthModel, draws: int) -> tuple[FloatArray, FloatArray]:
    """Return the probability integral transforms of lengths and of prompts' means, by draws of the model."""
    single: list[FloatArray] = []
    means: list[FloatArray] = []
    ties = np.random.default_rng(0)
    for seed, trace in enumerate(case.traces):
        history = LengthHistory(len(trace.prompt_ids))
        first = int(trace.step[trace.epoch > 0].min()) if trace.epoch.any() else int(trace.step.min()) + 1
        cap = trace.max_response_tokens or int(trace.response_tokens.max())
        for batch in trace.batches():
            view = view_of(batch, case.setting, history, max_response_tokens=cap, seed=seed)
            if view.step >= first:
                predicted = np.maximum(np.rint(Ewma()(view)), 1).astype(np.int64)
                lengths = model(view, predicted, draws)
                group, count = view.tree.group, np.bincount(view.tree.group)
                for found, drawn, true in (
                    (single, lengths, batch.response_tokens),
                    (
                        means,
                        np.stack([np.bincount(group, weights=one) / count for one in lengths]),
                        np.bincount(group, weights=batch.response_tokens) / count,
                    ),
                ):
                    below, up_to = (drawn < true).mean(axis=0), (drawn <= true).mean(axis=0)
                    found.append(below + (up_to - below) * ties.random(len(true)))
            history.record(batch)
    return np.concatenate(single), np.concatenate(means)


def cuts(cases: Sequence[Case]) -> str:
    """Return the means of the goal ``ratio`` by the threshold of the cut; each refers to even splits with its own."""
    table = []
    for case in cases:
        steps = {threshold: play(case, (f"migration.threshold={threshold}",))[0] for threshold in THRESHOLDS}
        for threshold, own in steps.items():
            table.append([case.name, f"{threshold:g}", *_means(own)[:3]])
    head = "setting | threshold | value | generation, s | decode GPU seconds"
    return markdown_table(head, table)


def _signed(value: Interval95) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _percent(value: Interval95 | None) -> str:
    if value is None:
        return "-"
    mean, low, high = (round(100 * x) for x in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs with seeds 0, 1, ... (default 5)")
    parser.add_argument("--data", type=Path, help="folder with the PolyTrace table")
    parser.add_argument("--only", help="settings whose name contains this")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--calibration", action="store_true", help="print the table of quantiles instead")
    what.add_argument("--cut", action="store_true", help="print the table of thresholds instead")
    given = parser.parse_args(arguments)
    guarded(lambda: print(_tables(given)))


def _tables(given: argparse.Namespace) -> str:
    lab = Lab(given.seeds)
    cases = [*presets(lab), *(polytrace(lab, given.data) if given.data else ())]
    chosen = [case for case in cases if given.only is None or given.only in case.name]
    if not chosen:
        raise InputError(
            f"--only: no setting contains {given.only}; there are {', '.join(c.name for c in cases)}"
        )
    if given.calibration:
        return calibration(chosen)
    return cuts(chosen) if given.cut else study(chosen)


if __name__ == "__main__":
    main()
