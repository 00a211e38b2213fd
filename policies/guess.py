"""Guesses of a step's response lengths: draws from what came of responses that looked the same before."""

from __future__ import annotations

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.policies.history import Known
from rlhfless.traces.trace import FloatArray, IntArray

#: Fewer past outcomes than this say too little about a spread.
_FEWEST_OUTCOMES = 64

#: How far a draw reaches, as a share of the past outcomes to either side; less towards both ends, but at
#: least this many.
_REACH, _LEAST_REACH = 0.02, 4


def guess_lengths(view: StepView, predicted_tokens: IntArray, guesses: int) -> IntArray:
    """Return possible response tokens of the step, shape (guesses, responses).

    A prediction is one number; a plan stands or falls with the spread around it. For each response, outcomes
    of past responses are drawn about which the same was known: the mean length of the prompt's last
    appearance; before any prompt has returned, the mean of its other responses in one step; for a prompt
    never seen, the length of its reference answer (without answers: nothing, so that any response may come).
    Draws come from the nearest outcomes in rank, so that the spread may differ between short and long
    prompts, regression to the mean is part of it, and no family of distributions is assumed. Responses are
    drawn independently of each other. As long as too few outcomes are known, the guess is the prediction.
    """
    lengths = np.tile(predicted_tokens, (guesses, 1))
    last = view.history.recent(view.prompt, 1)[0]
    answer = np.zeros(len(view)) if view.answer_tokens is None else view.answer_tokens.astype(np.float64)
    seen = ~np.isnan(last)
    returning: tuple[tuple[Known, FloatArray], ...] = (("last", last), ("others", last), ("answer", answer))
    for rows, sources in ((seen, returning), (~seen, returning[2:])):
        for source, known in sources:
            before, came = view.history.outcomes(source)
            if len(came) >= _FEWEST_OUTCOMES and rows.any():
                lengths[:, rows] = _draw(before, came, known[rows], guesses, view.rng)
                break
    least = 1 if view.generated is None else view.generated + 1
    return np.clip(lengths, least, view.max_response_tokens)


def _draw(
    before: FloatArray, came: FloatArray, known: FloatArray, guesses: int, rng: np.random.Generator
) -> IntArray:
    """Return outcomes near ``known`` in the rank of what was known before, shape (guesses, len(known))."""
    order = np.argsort(before, kind="stable")
    before, came = before[order], came[order]
    n = len(came)
    # Equal values have equal claims: all of them are within reach.
    first, last = np.searchsorted(before, known, "left"), np.searchsorted(before, known, "right")
    middle = (first + last) / 2
    reach = np.maximum(4 * _REACH * middle * (1 - middle / n), _LEAST_REACH)
    low = np.maximum(np.minimum(first, middle - reach), 0)
    high = np.minimum(np.maximum(last, middle + reach), n)
    index = (low + (high - low) * rng.random((guesses, len(known)))).astype(np.int64)
    return came[np.minimum(index, n - 1)].astype(np.int64)
