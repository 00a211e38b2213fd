"""Stage times predicted one step ahead, as a live planner would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlhfless.models.features import last_known, measured, stage_features
from rlhfless.models.fit import matrix, nonnegative_least_squares
from rlhfless.traces.trace import BoolArray, FloatArray, RunLog

# What the predictor chooses from, by its past errors alone.
_FORGETTING = (1.0, 0.95)
_LEVEL_RATES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
_LEVEL_STEPS = 48
_ERROR_FORGETTING = 0.95
_FIRST_PREDICTED = 4


def one_step_ahead(log: RunLog, stage: str, *, last_lengths: bool = False) -> FloatArray:
    """Predict each step's time from the steps before it, shape (steps,), NaN for the first steps.

    Before every step each of a fixed set of predictors is refitted: non-negative least squares of relative
    errors on the past with forgetting, times a level, the exponentially weighted geometric mean of
    measured / fitted over the past. They differ in forgetting, level rate and, for generation, in whether a
    preceding validation counts. The step's prediction is that of the predictor whose past one-step-ahead
    errors, discounted, are least. Nothing of the step or of later ones enters, except the step's own length
    statistics; with ``last_lengths`` these are replaced by the last step's.
    """
    seconds = measured(log, stage)
    features = stage_features(log, stage, responses=1, actors=1)
    designs: list[tuple[str, ...]] = [("tokens", "fixed")]
    if features.get("after_validation", np.zeros(1)).any():
        designs.append(("tokens", "fixed", "after_validation"))
    now = dict(features)
    if last_lengths:
        now["tokens"] = last_known(features["tokens"])
    candidates = [
        prediction
        for names in designs
        for prediction in _candidates(matrix(features, names), matrix(now, names), seconds)
    ]
    return _follow_best(np.stack(candidates), seconds)


def _candidates(past: FloatArray, now: FloatArray, seconds: FloatArray) -> Iterator[FloatArray]:
    """Yield predictions of every forgetting factor and level rate, shape (steps,) each."""
    n, width = past.shape
    known = np.isfinite(seconds) & np.isfinite(past).all(axis=1)
    y = np.where(known, seconds, 1.0)
    x = np.where(known[:, None], past / y[:, None], 0.0)
    for forgetting in _FORGETTING:
        # Entry t sums the rows before t.
        gram, moment = np.zeros((n, width, width)), np.zeros((n, width))
        for t in range(1, n):
            gram[t] = forgetting * gram[t - 1] + x[t - 1][:, None] * x[t - 1]
            moment[t] = forgetting * moment[t - 1] + x[t - 1]
        coefficients = nonnegative_least_squares(gram, moment)
        fitted = np.einsum("tj,tj->t", now, coefficients)
        log_ratio, lag = _past_log_ratios(x, known, coefficients)
        for rate in _LEVEL_RATES:
            if rate == 0:
                yield fitted
                continue
            weight = np.where(np.isfinite(log_ratio), (1 - rate) ** lag, 0.0)
            total = weight.sum(axis=1)
            level = (weight * np.nan_to_num(log_ratio)).sum(axis=1) / np.where(total > 0, total, 1.0)
            yield fitted * np.exp(level)


def _past_log_ratios(
    x: FloatArray, known: BoolArray, coefficients: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return log(measured / fitted) of the steps before each step by that step's fit, nearest first.

    Shape (steps, window) each: the log ratios, NaN where unknown, and how many known steps lie between.
    """
    n = len(x)
    log_ratio = np.full((n, _LEVEL_STEPS), np.nan)
    for back in range(1, min(_LEVEL_STEPS, n - 1) + 1):
        relative = np.einsum("tj,tj->t", x[:-back], coefficients[back:])
        log_ratio[back:, back - 1] = np.where(
            known[:-back] & (relative > 0), -np.log(np.maximum(relative, 1e-300)), np.nan
        )
    finite = np.isfinite(log_ratio)
    return log_ratio, np.cumsum(finite, axis=1) - finite.astype(np.float64)


def _follow_best(candidates: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return at each step the candidate (first axis) with the least discounted past errors."""
    n = len(seconds)
    error = np.abs(candidates / seconds - 1)
    score = np.zeros(len(candidates))
    result = np.full(n, np.nan)
    seen = 0
    for t in range(n):
        if seen >= _FIRST_PREDICTED:
            result[t] = candidates[int(np.argmin(score)), t]
            if np.isfinite(error[:, t]).all():
                score = _ERROR_FORGETTING * score + error[:, t]
        seen += bool(np.isfinite(seconds[t]))
    return result
