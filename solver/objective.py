"""What a solver minimises: a weighted sum of time and cost, under limits. Shared by all solvers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

Kind = Literal["minmax", "ratio", "cost", "time"]


@dataclass(frozen=True)
class Objective:
    """``offset + time_weight * seconds + cost_weight * gpu_seconds``, to be minimised within the limits.

    Both weights are at least 0, so that the value never falls when time or cost rises; every bound and every
    pruning rule of this package rests on that.

    Attributes
    ----------
    time_weight, cost_weight
        Per second of generation, and per GPU second.
    time_limit, cost_limit
        Seconds and GPU seconds that must not be exceeded.
    offset
        Added to every value.

    """

    time_weight: float
    cost_weight: float
    time_limit: float = inf
    cost_limit: float = inf
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.time_weight < 0 or self.cost_weight < 0 or self.time_weight + self.cost_weight == 0:
            raise InputError(
                f"objective: weights are {self.time_weight} and {self.cost_weight}, must be at least 0 and not both 0"
            )

    def value(self, seconds: FloatArray | float, gpu_seconds: FloatArray | float) -> FloatArray:
        """Return the objective, infinite where a limit is exceeded (by more than rounding)."""
        time, cost = np.asarray(seconds, dtype=np.float64), np.asarray(gpu_seconds, dtype=np.float64)
        value: FloatArray = self.offset + self.time_weight * time + self.cost_weight * cost
        within = (time <= self.time_limit * (1 + 1e-9)) & (cost <= self.cost_limit * (1 + 1e-9))
        return np.where(within, value, inf)

    def gap(self, value: float, bound: float) -> float:
        """Return how far a value may be above the least possible: relative to the bound, without the offset."""
        least = bound - self.offset
        return (value - bound) / least if least > 0 else (0.0 if value <= bound else inf)


@dataclass(frozen=True)
class Goal:
    """An objective before the step is known; ``resolve`` gives it the step's numbers.

    Parameters
    ----------
    kind
        ``minmax``: ``weight * time + (1 - weight) * cost``, each scaled to 0..1 between the least and the
        greatest of the reference's candidates (RLHFless, arXiv 2602.22718, sec. 4.4). ``ratio``: the same of
        time and cost over the reference's least. ``cost``: the least cost among plans that take at most
        ``limit`` times the reference's least time. ``time``: the least time among plans that cost at most
        ``limit`` times the reference's least cost. Without a limit, these two are cost and time alone.
    weight
        The weight of time in ``minmax`` and ``ratio``.
    limit
        Relative to the reference's least; only for ``cost`` and ``time``.

    """

    kind: Kind = "ratio"
    weight: float = 0.7
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("minmax", "ratio", "cost", "time"):
            raise InputError(f"Goal: kind is {self.kind}, must be minmax, ratio, cost or time")
        if not 0 <= self.weight <= 1:
            raise InputError(f"Goal: weight is {self.weight}, must be 0 to 1")
        if self.limit is not None and self.limit <= 0:
            raise InputError(f"Goal: limit is {self.limit}, must be above 0")

    def resolve(self, seconds: FloatArray, gpu_seconds: FloatArray) -> Objective:
        """Return the objective, given time and cost of the reference's candidates.

        Where all candidates take the same time, or cost the same, ``minmax`` leaves that term out, as the
        paper's score does.
        """
        least_time, least_cost = float(seconds.min()), float(gpu_seconds.min())
        limit = inf if self.limit is None else self.limit
        if self.kind == "cost":
            return Objective(0.0, 1.0, time_limit=limit * least_time)
        if self.kind == "time":
            return Objective(1.0, 0.0, cost_limit=limit * least_cost)
        if self.kind == "ratio":
            return Objective(self.weight / least_time, (1 - self.weight) / least_cost)
        time_spread, cost_spread = float(np.ptp(seconds)), float(np.ptp(gpu_seconds))
        time = self.weight / time_spread if time_spread > 0 else 0.0
        cost = (1 - self.weight) / cost_spread if cost_spread > 0 else 0.0
        if time + cost == 0:
            return Objective(self.weight / least_time, (1 - self.weight) / least_cost)
        return Objective(time, cost, offset=-time * least_time - cost * least_cost)


def pareto(seconds: FloatArray, gpu_seconds: FloatArray) -> IntArray:
    """Return the indices of the points that no other point beats in time and cost, by rising time.

    Of equal points the first stays.
    """
    order = np.lexsort((gpu_seconds, seconds))
    least = np.minimum.accumulate(np.concatenate(([inf], gpu_seconds[order][:-1])))
    front: IntArray = order[gpu_seconds[order] < least]
    return front
