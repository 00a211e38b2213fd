"""Several policies on one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from omegaconf import DictConfig, ListConfig

from rlhfless.models.plan import LowerBound
from rlhfless.models.replay import StepOutcome
from rlhfless.models.scores import Comparison, Interval95, RunScores, compare, interval, step_record
from rlhfless.policies import Policy, simulate
from rlhfless.scripts.common import advance, progress
from rlhfless.scripts.records import is_whole, true_bound
from rlhfless.scripts.timeline import RunTimeline, step_timeline
from rlhfless.scripts.workload import Workload, build_policy
from rlhfless.traces.errors import InputError


@dataclass(frozen=True)
class PolicyRuns:
    """One policy's runs, one a seed: scores, timelines, and the measured planning seconds of every step."""

    name: str
    scores: tuple[RunScores, ...]
    steps: tuple[dict[str, float], ...] = field(repr=False)
    planning_seconds: tuple[float, ...] = field(repr=False)
    timelines: tuple[RunTimeline, ...] = field(repr=False, default=())
    above_bound: tuple[tuple[float, float], ...] = ()
    """By seed: how far generation seconds and decode GPU seconds were above the bound on the true lengths, relative;
    empty for a policy that changes which responses a step makes."""

    def summary(self, column: str) -> Interval95:
        """Return a score's mean and interval over seeds."""
        return interval([scores.mean[column] for scores in self.scores])

    @property
    def delivers_all(self) -> bool:
        """Whether every response that was launched is trained on in its own step."""
        return all(scores.mean["launched"] == scores.mean["responses"] for scores in self.scores)

    def function_means(self) -> dict[str, float]:
        """Return the billed GPU seconds a step by function, averaged over seeds."""
        names = sorted({name for scores in self.scores for name in scores.by_function})
        return {
            name: sum(s.by_function.get(name, 0.0) for s in self.scores) / len(self.scores) for name in names
        }


@dataclass(frozen=True)
class ComparisonResult:
    """All policies' runs of a workload, and each policy against each baseline."""

    workload: Workload
    runs: tuple[PolicyRuns, ...]
    comparisons: tuple[Comparison, ...]


def selected(config: DictConfig) -> list[str]:
    """Return the names of the policies that the configuration selects, a user's own one last."""
    chosen = config.select
    if chosen == "all":
        return [str(name) for name in config.policies]
    names = [str(name) for name in chosen] if isinstance(chosen, ListConfig) else [str(chosen)]
    if "own" in config.policies and "own" not in names:
        names.append("own")
    for name in names:
        if name not in config.policies:
            raise InputError(
                f"policy {name} does not exist; policies are {', '.join(map(str, config.policies))}"
            )
    return names


def run_comparison(config: DictConfig, workload: Workload) -> ComparisonResult:
    """Replay the workload under every selected policy and seed."""
    policies = [build_policy(config.policies[name], f"policies.{name}") for name in selected(config)]
    runs = []

    @cache
    def bounds(seed: int) -> list[LowerBound]:
        trace = workload.traces[seed]
        batches = (trace.select(np.flatnonzero(trace.step == step)) for step in trace.steps.tolist())
        return [true_bound(batch, workload.setting) for batch in batches]

    with progress(len(policies) * len(workload.traces), f"replaying {workload.name}") as bar:
        for policy in policies:
            scores: list[RunScores] = []
            steps: list[dict[str, float]] = []
            planning: list[float] = []
            timelines: list[RunTimeline] = []
            above: list[tuple[float, float]] = []
            for seed in range(len(workload.traces)):
                outcomes, seconds, timeline = _run(workload, policy, seed)
                if all(map(is_whole, outcomes)):
                    above.append(_above(outcomes, bounds(seed)))
                scores.append(RunScores.of(outcomes))
                steps += [{"seed": seed, **step_record(outcome)} for outcome in outcomes]
                planning += seconds
                timelines.append(timeline)
                advance(bar)
            runs.append(
                PolicyRuns(
                    policy.name, tuple(scores), tuple(steps), tuple(planning), tuple(timelines), tuple(above)
                )
            )
    by_name = {run.name: run for run in runs}
    comparisons = tuple(
        compare(run.scores, by_name[str(baseline)].scores)
        for run in runs
        for baseline in config.baselines
        if str(baseline) in by_name and run.name != str(baseline)
    )
    return ComparisonResult(workload, tuple(runs), comparisons)


def _run(workload: Workload, policy: Policy, seed: int) -> tuple[list[StepOutcome], list[float], RunTimeline]:
    outcomes, planning, timelines = [], [], []
    cluster = workload.setting.cluster
    for step in simulate(workload.traces[seed], policy, workload.setting, seed=seed):
        outcomes.append(step.outcome)
        planning.append(step.planning_seconds)
        timelines.append(step_timeline(step, cluster))
    timeline = RunTimeline(policy.name, seed, cluster.nodes, cluster.gpus_per_node, tuple(timelines))
    return outcomes, planning, timeline


def _above(outcomes: Sequence[StepOutcome], bounds: Sequence[LowerBound]) -> tuple[float, float]:
    seconds = sum(o.generation_seconds for o in outcomes) / sum(b.generation_seconds for b in bounds)
    decode = sum(o.by_function.get("decode", 0.0) for o in outcomes) / sum(b.gpu_seconds for b in bounds)
    return seconds - 1, decode - 1


def function_rows(result: ComparisonResult) -> list[dict[str, str]]:
    """Return each policy's billed GPU seconds a step by function, as rows of text."""
    means = {run.name: run.function_means() for run in result.runs}
    functions = list(dict.fromkeys(name for split in means.values() for name in split))
    return [
        {"policy": name, **{function: f"{split.get(function, 0.0):.1f}" for function in functions}}
        for name, split in means.items()
    ]


def overhead_rows(result: ComparisonResult) -> list[dict[str, str]]:
    """Return each policy's GPU seconds a step beside the work, billed or not, as rows of text."""
    return [
        {"policy": run.name, **{label: f"{run.summary(name).mean:.1f}" for name, label in _OVERHEADS.items()}}
        for run in result.runs
    ]


_OVERHEADS = {
    "startup_gpu_seconds": "start-up",
    "prewarmed_waiting_gpu_seconds": "prewarmed waiting",
    "keep_alive_gpu_seconds": "keep-alive",
}
