"""Several runs' tables side by side, and what a rule may observe of them: the core of environment and learner."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rlhfless.solver.horizon import Costs, FixedRule, HorizonTables, StepForecast, follow
from rlhfless.solver.objective import Goal, Objective
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: A surprise beyond this factor counts as this factor.
_LARGEST_SURPRISE = 2.0


@dataclass(frozen=True)
class Episodes:
    """Runs of equally many steps in one setting, as arrays: R runs, S steps, counts to N, T thresholds.

    Attributes
    ----------
    values
        The objective of every decision, its share per step, shape (R, S, N, T, N + 1, N + 1): warm slots, then
        kept ones.
    generation
        Generation seconds, shape (R, S, N, T, N + 1).
    actors
        The most actors that a step can have, shape (R, S).
    forecasts
        One forecast a step, its fields with a leading axis R.
    costs, thresholds, objective
        As in the tables; the objective's weights are per second and GPU second of a mean step.
    relative
        The same weights relative to a step's least forecast (:func:`relative_objective`), for what rules observe.

    """

    values: FloatArray
    generation: FloatArray
    actors: IntArray
    forecasts: tuple[StepForecast, ...]
    costs: Costs
    thresholds: tuple[float, ...]
    objective: Objective
    relative: Objective

    @classmethod
    def of(
        cls, runs: Sequence[HorizonTables], objective: Objective, relative: Objective | None = None
    ) -> Episodes:
        """Stack the tables of several runs; without ``relative`` it is that of these runs.

        Raises
        ------
        InputError
            When they differ in steps, counts or costs.

        """
        if len({(len(run), run.most, run.costs, run.thresholds) for run in runs}) != 1:
            raise InputError("training runs must have equally many steps and the same setting")
        first = runs[0]
        values = np.array([[step.values(objective) for step in run.steps] for run in runs])
        generation = np.array([[step.generation for step in run.steps] for run in runs])
        actors = np.array([[step.actors for step in run.steps] for run in runs])
        forecasts = tuple(_stack([run.forecasts[step] for run in runs]) for step in range(len(first)))
        return cls(
            values,
            generation,
            actors,
            forecasts,
            first.costs,
            first.thresholds,
            objective,
            relative or relative_objective(runs, objective),
        )

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.values)

    @property
    def steps(self) -> int:
        """How many steps a run has."""
        return int(self.values.shape[1])

    @property
    def most(self) -> int:
        """The largest count."""
        return int(self.values.shape[2])

    def digest(self) -> str:
        """Return a fingerprint of all numbers, so that a checkpoint is not taken up on other data."""
        hashed = hashlib.sha256(self.values.tobytes())
        for forecast in self.forecasts:
            for field in fields(forecast):
                hashed.update(np.ascontiguousarray(getattr(forecast, field.name)).tobytes())
        return hashed.hexdigest()

    def seen(self, step: int, last_generation: FloatArray, last_actors: IntArray) -> StepForecast:
        """Return a step's forecasts with the outcome of the step before."""
        return replace(self.forecasts[step], last_generation=last_generation, last_actors=last_actors)


def _stack(forecasts: Sequence[StepForecast]) -> StepForecast:
    stacked: dict[str, Any] = {
        field.name: np.array([getattr(forecast, field.name) for forecast in forecasts])
        for field in fields(StepForecast)
    }
    return StepForecast(**stacked)


def refuse_limit(goal: Goal) -> None:
    """Refuse a goal with a limit: the steps of a run are weighed one by one."""
    if goal.limit is not None:
        raise InputError("goal.limit: decisions over a run take no limit on time or cost")


def run_objective(runs: Sequence[HorizonTables], goal: Goal) -> Objective:
    """Return the objective of a mean step: the goal, against the fixed counts' mean time and cost.

    The fixed counts cut at the middle threshold and keep no slot warm.

    Raises
    ------
    InputError
        When the goal has a limit; a run's decisions are not weighed against one.

    """
    refuse_limit(goal)
    threshold = len(runs[0].thresholds) // 2
    sums = Objective(1.0, 1.0)
    mean = np.array(
        [
            [
                (course.seconds / len(run), course.gpu_seconds / len(run))
                for run in runs
                for course in [follow(run, FixedRule(count, threshold, 0), sums)]
            ]
            for count in range(1, runs[0].most + 1)
        ]
    ).mean(axis=1)
    return goal.resolve(mean[:, 0], mean[:, 1])


def relative_objective(runs: Sequence[HorizonTables], objective: Objective) -> Objective:
    """Return the objective's weights times the runs' median of a step's least forecast time and cost.

    What rules observe is weighed by these over the least forecast of the step at hand (:func:`step_weights`), so that
    a rule has no unit: it decides the same where all times are doubled.
    """
    forecasts = [_least(forecast) for run in runs for forecast in run.forecasts]
    # A first step without any history may be forecast at the cap on responses: not the mean.
    time, cost = np.median(np.array(forecasts), axis=0).tolist()
    return Objective(objective.time_weight * time, objective.cost_weight * cost)


def step_weights(forecast: StepForecast, relative: Objective) -> tuple[FloatArray, FloatArray]:
    """Return the weights of time and cost in a step, one value a run."""
    time, cost = _least(forecast)
    return relative.time_weight / time, relative.cost_weight / cost


def _least(forecast: StepForecast) -> tuple[FloatArray, FloatArray]:
    """Return the least forecast step time and decode cost over all candidates."""
    return forecast.generation.min(axis=(-2, -1)) + forecast.rest, forecast.held.min(axis=(-2, -1))


def surprise(forecast: StepForecast, threshold: int) -> FloatArray:
    """Return log of the last step's generation time over this step's forecast at the same count.

    0 in the first step; a scalar or one value a run.
    """
    actors = np.asarray(forecast.last_actors)
    at = np.clip(actors - 1, 0, forecast.generation.shape[-2] - 1)
    expected = np.take_along_axis(forecast.generation[..., threshold], at[..., None], axis=-1)[..., 0]
    return np.where(actors > 0, surprise_of(np.asarray(forecast.last_generation), expected), 0.0)


def surprise_of(generation: FloatArray | float, expected: FloatArray | float) -> FloatArray:
    """Return log of a generation time over the expected one, within log 2 of 0."""
    limited: FloatArray = np.log(np.clip(generation / expected, 1 / _LARGEST_SURPRISE, _LARGEST_SURPRISE))
    return limited


def observation(
    forecast: StepForecast, costs: Costs, relative: Objective, warm: IntArray | int
) -> FloatArray:
    """Return what a rule may know as one vector a run, shape (..., 8 + 2 N T); everything of the order of 1."""
    shape = np.shape(forecast.rest)
    most, thresholds = forecast.generation.shape[-2:]
    time, cost = step_weights(forecast, relative)
    steps = np.asarray(forecast.steps, dtype=np.float64)
    single = [
        np.asarray(forecast.new_prompts),
        steps / (steps + 10),
        np.asarray(warm) / most,
        surprise(forecast, thresholds // 2),
        time * np.asarray(forecast.expected_learning),
        time * np.asarray(forecast.rest),
        time * (costs.cold_seconds - costs.warm_seconds),
        np.asarray(forecast.minmax) / most,
    ]
    weighed = time[..., None, None] * forecast.generation, cost[..., None, None] * forecast.held
    table = np.concatenate(weighed, axis=-1).reshape((*shape, -1))
    return np.concatenate((np.stack([np.broadcast_to(x, shape) for x in single], axis=-1), table), axis=-1)
