"""Several policies on one workload."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import DictConfig, ListConfig

from rlhfless.models.replay import StepOutcome
from rlhfless.models.scores import Comparison, Interval95, RunScores, compare, interval, step_record
from rlhfless.policies import Policy, simulate
from rlhfless.scripts.common import advance, progress
from rlhfless.scripts.workload import Workload, build_policy
from rlhfless.traces.errors import InputError


@dataclass(frozen=True)
class PolicyRuns:
    """One policy's runs, one a seed, and the measured planning seconds of every step."""

    name: str
    scores: tuple[RunScores, ...]
    steps: tuple[dict[str, float], ...] = field(repr=False)
    planning_seconds: tuple[float, ...] = field(repr=False)

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
    with progress(len(policies) * len(workload.traces), f"replaying {workload.name}") as bar:
        for policy in policies:
            scores: list[RunScores] = []
            steps: list[dict[str, float]] = []
            planning: list[float] = []
            for seed in range(len(workload.traces)):
                outcomes, seconds = _run(workload, policy, seed)
                scores.append(RunScores.of(outcomes))
                steps += [{"seed": seed, **step_record(outcome)} for outcome in outcomes]
                planning += seconds
                advance(bar)
            runs.append(PolicyRuns(policy.name, tuple(scores), tuple(steps), tuple(planning)))
    by_name = {run.name: run for run in runs}
    comparisons = tuple(
        compare(run.scores, by_name[str(baseline)].scores)
        for run in runs
        for baseline in config.baselines
        if str(baseline) in by_name and run.name != str(baseline)
    )
    return ComparisonResult(workload, tuple(runs), comparisons)


def _run(workload: Workload, policy: Policy, seed: int) -> tuple[list[StepOutcome], list[float]]:
    outcomes, planning = [], []
    for step in simulate(workload.traces[seed], policy, workload.setting, seed=seed):
        outcomes.append(step.outcome)
        planning.append(step.planning_seconds)
    return outcomes, planning
