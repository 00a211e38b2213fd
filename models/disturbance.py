"""Disturbances in a training log: steps that take longer than their lengths explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from rlhfless.models.features import measured, stage_features
from rlhfless.models.fit import LEAST_STEPS, MAD_SIGMA, matrix, weighted_nnls
from rlhfless.traces.trace import BoolArray, FloatArray, RunLog

_LEAST_SLOWDOWN = 0.10


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps in which a stage is slower than its lengths explain; ``slowdown`` 0.5 is 50 %."""

    stage: str
    first_step: int
    last_step: int
    steps: int
    slowdown: float


def find_disturbances(log: RunLog, stage: str = "generation") -> tuple[Stretch, ...]:
    """Find the stretches of steps in which a stage is slower than its lengths explain.

    The log ratio of measured to fitted time is cut into pieces of constant mean by optimal partitioning
    (Jackson et al. 2005): the partition with the least squared deviation plus ``3 log(n) sigma^2`` a piece
    (the leading term of the modified BIC, Zhang and Siegmund 2007), ``sigma`` from the median size of second
    differences. A piece at least 10 % above the undisturbed level is disturbed. The length model is fitted on
    the undisturbed steps only, so both are found in turn, from two starts: a low expectile (Newey and Powell
    1987), since disturbances only slow down, and ratios of neighbouring steps, which hardly see a level. The
    outcome with the lower BIC counts. A quarter of the steps are taken to be free of disturbances.

    Returns
    -------
    Stretches in step order, neighbouring disturbed pieces joined. It looks at the whole log; one-step-ahead
    predictions do not use it.

    """
    seconds = measured(log, stage)
    known = np.flatnonzero(np.isfinite(seconds))
    if len(known) < LEAST_STEPS:
        return ()
    features = stage_features(log, stage, responses=1, actors=1)
    design = matrix(features, tuple(features))[known] / seconds[known][:, None]
    design = design / np.where(design.any(axis=0), design.max(axis=0), 1.0)
    outcomes = [_separate(design, start) for start in (_low_expectile(design), _neighbour_ratios(design))]
    residual, disturbed, _ = min(outcomes, key=lambda outcome: outcome[2])
    edges = np.flatnonzero(np.diff(np.concatenate(([False], disturbed, [False])).astype(np.int8)))
    return tuple(
        Stretch(
            stage=stage,
            first_step=int(log.step[known[start]]),
            last_step=int(log.step[known[end - 1]]),
            steps=int(end - start),
            slowdown=float(np.expm1(residual[start:end].mean())),
        )
        for start, end in edges.reshape(-1, 2)
    )


def _log_ratio(design: FloatArray, coefficients: FloatArray) -> FloatArray:
    """Return log(measured / fitted); the rows of ``design`` are features over measured seconds."""
    ratio: FloatArray = -np.log(np.maximum(design @ coefficients, 1e-300))
    return ratio


def _low_expectile(design: FloatArray) -> FloatArray:
    """Return the log ratio to a fit in which a step above counts a twentieth of one below."""
    weight, target = np.ones(len(design)), np.ones(len(design))
    residual = np.zeros(len(design))
    for _ in range(20):
        residual = _log_ratio(design, weighted_nnls(design, target, weight))
        weight = np.where(residual > 0, 0.05, 1.0)
    return residual


def _neighbour_ratios(design: FloatArray) -> FloatArray:
    """Return the log ratio to the fit whose changes from step to step match the measured ones (soft L1)."""

    def change(shares: FloatArray) -> FloatArray:
        return np.diff(_log_ratio(design, np.concatenate(([1.0], shares))))

    scale = float(np.median(np.abs(np.diff(_log_ratio(design, np.ones(design.shape[1])))))) + 1e-9
    found = least_squares(
        change, np.full(design.shape[1] - 1, 0.5), bounds=(0.0, 1e3), loss="soft_l1", f_scale=scale
    )
    return _log_ratio(design, np.concatenate(([1.0], found.x)))


def _separate(design: FloatArray, residual: FloatArray) -> tuple[FloatArray, BoolArray, float]:
    """Fit undisturbed steps and find disturbed ones in turn; return log ratios, disturbed rows and BIC."""
    n = len(design)
    target = np.ones(n)
    level = _piecewise_level(residual)
    # A start says nothing of the level itself.
    disturbed = level - np.quantile(level, 0.25) > np.log1p(_LEAST_SLOWDOWN)
    for _ in range(20):
        residual = _log_ratio(design, weighted_nnls(design, target, (~disturbed).astype(np.float64)))
        level = _piecewise_level(residual)
        before, disturbed = disturbed, level > np.log1p(_LEAST_SLOWDOWN)
        if disturbed.all() or (before == disturbed).all():
            disturbed = before
            break
    pieces = 1 + np.count_nonzero(np.diff(level))
    bic = n * np.log(np.mean((residual - level) ** 2) + 1e-12) + 3 * pieces * np.log(n)
    return residual, disturbed, float(bic)


def disturbed_rows(log: RunLog, stretches: Sequence[Stretch]) -> BoolArray:
    """Return which steps of a log lie in one of the stretches, shape (steps,)."""
    result = np.zeros(len(log.step), dtype=np.bool_)
    for stretch in stretches:
        result |= (log.step >= stretch.first_step) & (log.step <= stretch.last_step)
    return result


def _piecewise_level(values: FloatArray) -> FloatArray:
    """Return the mean of each value's piece in the optimal partition."""
    n = len(values)
    sigma = float(np.median(np.abs(second_differences(values)))) / MAD_SIGMA
    penalty = max(3 * np.log(n) * sigma**2, 1e-12)
    total = np.concatenate(([0.0], np.cumsum(values)))
    squares = np.concatenate(([0.0], np.cumsum(values**2)))
    cost = np.zeros(n + 1)
    start = np.zeros(n + 1, dtype=np.int64)
    for end in range(1, n + 1):
        s = np.arange(end)
        piece = squares[end] - squares[s] - (total[end] - total[s]) ** 2 / (end - s)
        whole = cost[s] + piece + penalty
        start[end] = int(np.argmin(whole))
        cost[end] = whole[start[end]]
    level = np.empty(n)
    right = n
    while right > 0:
        left = int(start[right])
        level[left:right] = (total[right] - total[left]) / (right - left)
        right = left
    return level


def second_differences(values: FloatArray) -> FloatArray:
    """Return ``(v[i-1] - 2 v[i] + v[i+1]) / sqrt(6)``, which has the variance of independent noise in ``v``."""
    differences: FloatArray = (values[:-2] - 2 * values[1:-1] + values[2:]) / np.sqrt(6.0)
    return differences
