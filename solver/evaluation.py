"""How far a rule is from the offline optimum, and from rules that were there before, on runs it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.models.scores import Interval95, interval
from rlhfless.solver.horizon import Course, FixedRule, HorizonTables, Rule, follow, offline_optimum
from rlhfless.solver.objective import Objective
from rlhfless.traces.trace import FloatArray


@dataclass(frozen=True)
class Standing:
    """A rule beside the one that is judged; all numbers are of a mean step.

    Attributes
    ----------
    name
        What it is.
    seconds, gpu_seconds, value
        Step time, billed GPU seconds and objective, means over the runs.
    judged_less
        How much less the judged rule's objective is, over paired runs; positive says it is better.
    closed
        Which share of the distance from this rule to the offline optimum the judged rule closes.

    """

    name: str
    seconds: float
    gpu_seconds: float
    value: float
    judged_less: Interval95
    closed: float


def step_values(runs: Sequence[HorizonTables], rule: Rule, objective: Objective) -> FloatArray:
    """Return the objective of a mean step under a rule, one value a run."""
    return np.array([_mean(follow(run, rule, objective), objective)[2] for run in runs])


def _mean(course: Course, objective: Objective) -> tuple[float, float, float]:
    seconds = course.seconds / len(course.actions)
    gpu_seconds = course.gpu_seconds / len(course.actions)
    return seconds, gpu_seconds, float(objective.value(seconds, gpu_seconds))


def standings(
    runs: Sequence[HorizonTables], judged: Rule, others: dict[str, Rule], objective: Objective
) -> tuple[Standing, ...]:
    """Return the judged rule, the offline optimum, other rules, the min-max rule and every fixed count.

    The min-max rule and the fixed counts come twice: as the paper has them, cut at the middle threshold with all
    actors kept warm; and with the threshold and the number of kept slots that are best for these very runs,
    in hindsight, which no rule can know.
    """
    rows: dict[str, list[Course]] = {
        "judged": [follow(run, judged, objective) for run in runs],
        "offline optimum": [offline_optimum(run, objective) for run in runs],
    }
    rows |= {name: [follow(run, rule, objective) for run in runs] for name, rule in others.items()}
    most, thresholds = runs[0].most, len(runs[0].thresholds)
    for count in (None, *range(1, most + 1)):
        name = "min-max" if count is None else f"{count} actors"
        rows[name] = [follow(run, FixedRule(count, thresholds // 2, None), objective) for run in runs]
        variants = [
            [follow(run, FixedRule(count, threshold, keep), objective) for run in runs]
            for threshold in range(thresholds)
            for keep in (*range(count or most), None)
        ]
        rows[f"{name}, best cut and keep in hindsight"] = min(
            variants, key=lambda courses: sum(course.value for course in courses)
        )
    means = {
        name: np.array([_mean(course, objective) for course in courses]) for name, courses in rows.items()
    }
    own, least = means["judged"][:, 2], means["offline optimum"][:, 2]
    result = []
    for name, numbers in means.items():
        seconds, gpu_seconds, value = numbers.mean(axis=0).tolist()
        less, closed = interval(numbers[:, 2] - own), _closed(numbers[:, 2], own, least)
        result.append(Standing(name, seconds, gpu_seconds, value, less, closed))
    return tuple(result)


def _closed(other: FloatArray, own: FloatArray, least: FloatArray) -> float:
    distance = float((other - least).mean())
    return float((other - own).mean()) / distance if distance > 0 else 0.0
