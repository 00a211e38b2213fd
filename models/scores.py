"""Scores of a run, and of one policy against another (means over steps, intervals over seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rlhfless.models.replay import StepOutcome
from rlhfless.traces.trace import FloatArray

#: Columns of a step's record, in order; those from ``step_seconds`` on are averaged over a run.
STEP_COLUMNS = (
    "step",
    "epoch",
    "step_seconds",
    "generation_seconds",
    "learning_seconds",
    "gpu_seconds",
    "busy_gpu_seconds",
    "idle_gpu_seconds",
    "startup_gpu_seconds",
    "prewarmed_waiting_gpu_seconds",
    "keep_alive_gpu_seconds",
    "prefill_tokens",
    "redundant_prefill_tokens",
    "migrations",
    "migrated_kv_bytes",
    "preemptions",
    "cold_starts",
    "actors",
    "launched",
    "responses",
    "response_tokens",
    "stale_tokens",
    "left_tokens",
)


def step_record(outcome: StepOutcome) -> dict[str, float]:
    """Return a step's scores by column name."""
    return {name: getattr(outcome, name) for name in STEP_COLUMNS}


@dataclass(frozen=True)
class RunScores:
    """Means over the steps of one run, by column; ``by_function`` splits the billed GPU seconds."""

    policy: str
    steps: int
    mean: dict[str, float]
    by_function: dict[str, float]

    @classmethod
    def of(cls, outcomes: Sequence[StepOutcome]) -> RunScores:
        """Average the steps of a run."""
        n = len(outcomes)
        names = sorted({name for outcome in outcomes for name in outcome.by_function})
        return cls(
            policy=outcomes[0].policy,
            steps=n,
            mean={
                name: float(np.mean([getattr(outcome, name) for outcome in outcomes]))
                for name in STEP_COLUMNS[2:]
            },
            by_function={
                name: sum(outcome.by_function.get(name, 0.0) for outcome in outcomes) / n for name in names
            },
        )


@dataclass(frozen=True)
class Interval95:
    """A mean over seeds and its 95 % bootstrap interval (BCa, paired seeds resampled together)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(values: Sequence[float] | FloatArray) -> Interval95:
    """Return mean and 95 % bootstrap interval; with one value, or equal ones, the interval is the value."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < 2 or np.ptp(data) <= 1e-12 * max(abs(mean), 1e-300):
        return Interval95(mean, mean, mean)
    result = stats.bootstrap(
        (data,), np.mean, confidence_level=0.95, n_resamples=2000, method="BCa", rng=np.random.default_rng(0)
    )
    return Interval95(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))


@dataclass(frozen=True)
class Comparison:
    """One policy against a baseline over the same seeds.

    ``speedup`` is the baseline's mean step seconds over the policy's, ``cost_reduction`` is 1 minus the
    policy's billed GPU seconds over the baseline's, each per seed and then summarised. Both are per delivered
    response, which changes nothing unless a policy over-provisions (``delivered_only``): it trains on other
    responses in other steps, and the numbers say nothing about what that does to the training.
    """

    policy: str
    baseline: str
    speedup: Interval95
    cost_reduction: Interval95
    delivered_only: bool = False


def compare(policy: Sequence[RunScores], baseline: Sequence[RunScores]) -> Comparison:
    """Compare runs of two policies, seed by seed."""
    pairs = list(zip(policy, baseline, strict=True))

    def ratio(column: str) -> list[float]:
        return [
            (p.mean[column] / p.mean["responses"]) / (b.mean[column] / b.mean["responses"]) for p, b in pairs
        ]

    return Comparison(
        policy=policy[0].policy,
        baseline=baseline[0].policy,
        speedup=interval([1 / value for value in ratio("step_seconds")]),
        cost_reduction=interval([1 - value for value in ratio("gpu_seconds")]),
        delivered_only=any(run.mean["launched"] > run.mean["responses"] for run in (*policy, *baseline)),
    )
