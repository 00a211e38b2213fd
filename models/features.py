"""What a training log's stage times are explained by."""

from __future__ import annotations

import numpy as np

from rlhfless.traces.trace import BoolArray, FloatArray, RunLog


def stage_features(log: RunLog, stage: str, *, responses: int, actors: int) -> dict[str, FloatArray]:
    """Return the aggregate features of a stage, each of shape (steps,).

    Generation has the response tokens of an actor, a constant, and whether the step before was followed by a
    validation (its first generation afterwards can be slower). Other stages have the step's prompt and
    response tokens and a constant.
    """
    constant = np.ones(len(log.step))
    if stage == "generation":
        return {
            "tokens": log.response_mean * (responses / actors),
            "fixed": constant,
            "after_validation": after_validation(log),
        }
    return {"tokens": responses * (log.prompt_mean + log.response_mean), "fixed": constant}


def after_validation(log: RunLog) -> FloatArray:
    """Return 1 for steps that follow, without a gap, a step that ended with a validation, else 0."""
    testing = log.stages.get("testing")
    result = np.zeros(len(log.step))
    if testing is not None:
        follows = np.diff(log.step) == 1
        result[1:] = follows & np.isfinite(testing[:-1]) & (testing[:-1] > 0)
    return result


def usable(log: RunLog, stage: str) -> BoolArray:
    """Return the rows where the stage has a positive time and the lengths that it is explained by."""
    seconds = log.stages[stage]
    tokens = stage_features(log, stage, responses=1, actors=1)["tokens"]
    return np.isfinite(seconds) & (seconds > 0) & np.isfinite(tokens)


def measured(log: RunLog, stage: str) -> FloatArray:
    """Return the stage's seconds, shape (steps,), NaN where they are not usable."""
    return np.where(usable(log, stage), log.stages[stage], np.nan)


def last_known(values: FloatArray) -> FloatArray:
    """Return for each row the last finite value before it, NaN where there is none."""
    index = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.concatenate(([-1], np.maximum.accumulate(index)[:-1]))
    return np.where(last >= 0, values[last], np.nan)
