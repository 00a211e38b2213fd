"""Guesses of a step's response lengths: draws from what came of responses that looked the same before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from rlhfless.policies.base import StepView
from rlhfless.policies.history import Known
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import BoolArray, FloatArray, IntArray

#: Fewer past outcomes than this say too little about a spread.
_FEWEST_OUTCOMES = 64

#: How far a draw reaches, as a share of the past outcomes to either side; less towards both ends, but at
#: least this many.
_REACH, _LEAST_REACH = 0.02, 4

#: Table of :class:`FromHistory`: values of what was known, quantiles of what came, and the fewest neighbours of
#: a value to either side.
_KNOTS, _LEVELS, _LEAST_NEIGHBOURS = 48, 101, 16

#: Fewer excesses than this say nothing about the shape of a tail.
_FEWEST_EXCESSES = 20


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
    for rows, source, known in _known(view):
        lengths[:, rows] = _draw(*view.history.outcomes(source), known, guesses, view.rng)
    least = 1 if view.generated is None else view.generated + 1
    return np.clip(lengths, least, view.max_response_tokens)


def _known(view: StepView) -> Iterator[tuple[BoolArray, Known, FloatArray]]:
    """Yield responses, the kind of past outcomes that tell of them, and what is known of each in that kind.

    Returning prompts go by their last appearance, new ones by the reference answer; responses of which too few
    outcomes tell are left out.
    """
    last = view.history.recent(view.prompt, 1)[0]
    answer = np.zeros(len(view)) if view.answer_tokens is None else view.answer_tokens.astype(np.float64)
    seen = ~np.isnan(last)
    returning: tuple[tuple[Known, FloatArray], ...] = (("last", last), ("others", last), ("answer", answer))
    for rows, sources in ((seen, returning), (~seen, returning[2:])):
        for source, known in sources:
            if len(view.history.outcomes(source)[1]) >= _FEWEST_OUTCOMES and rows.any():
                yield rows, source, known[rows]
                break


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


class LengthModel(Protocol):
    """Draws what the lengths of a step may be."""

    def __call__(self, view: StepView, predicted_tokens: IntArray, draws: int) -> IntArray:
        """Return possible response tokens, shape (draws, responses), by chance from ``view.rng``."""
        ...


@dataclass(frozen=True)
class Point:
    """No distribution: the predicted lengths, once, however many draws are asked for."""

    def __call__(self, view: StepView, predicted_tokens: IntArray, draws: int) -> IntArray:
        """Return the prediction, shape (1, responses)."""
        least = 1 if view.generated is None else view.generated + 1
        return np.clip(predicted_tokens, least, view.max_response_tokens)[None]


@dataclass(frozen=True)
class FromHistory:
    """Lengths by what came of responses that looked the same before, alike within a prompt, tail included.

    What is known of a response, and of past ones before they came, is that of :func:`guess_lengths`. Three
    things differ:

    * **The body.** A response's quantiles up to ``body`` are those of the past outcomes nearest in rank of
      what was known, at least ``reach`` of all to either side (fewer towards both ends, at least 16).
    * **The tail.** Above it, a few dozen outcomes say nothing. The excess ``log(length / quantile)`` of all
      outcomes above their own neighbours' quantile is pooled, and follows a generalised Pareto distribution
      fitted by probability-weighted moments (Hosking and Wallis, Technometrics 29, 1987). Outcomes at the cap
      are left out of the fit; those that it does not explain (responses that never end) are an atom at the
      cap. Draws beyond the cap are at the cap.
    * **Correlation.** Samples of one prompt are drawn by a Gaussian copula. With r the correlation of two
      samples of a prompt and q that of a sample with what was known, theirs given what is known is the
      partial correlation ``(r - q^2) / (1 - q^2)``. Both are measured on normal scores; r from the
      correlation h of a sample with the mean of its k siblings, ``h^2 (1 + (k - 1) r) = k r^2``.

    As long as too few outcomes are known, all draws are the prediction.

    Parameters
    ----------
    body
        The quantile at which the pooled tail begins.
    reach
        How far neighbours reach, as a share of the past outcomes to either side.
    correlated, tail
        Whether samples of a prompt are alike, and whether the tail is pooled; without, they are drawn
        independently, and never beyond a neighbour.

    """

    body: float = 0.9
    reach: float = 0.02
    correlated: bool = True
    tail: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.body < 1:
            raise InputError(f"FromHistory: body is {self.body}, must be above 0 and below 1")
        if not 0 < self.reach <= 1:
            raise InputError(f"FromHistory: reach is {self.reach}, must be above 0 and at most 1")

    def __call__(self, view: StepView, predicted_tokens: IntArray, draws: int) -> IntArray:
        """Return possible response tokens, shape (draws, responses)."""
        return self.quantiles(view, predicted_tokens, self._uniforms(view, draws))

    def quantiles(self, view: StepView, predicted_tokens: IntArray, at: FloatArray) -> IntArray:
        """Return each response's length at the probabilities ``at``, shape (draws, responses)."""
        lengths = np.tile(predicted_tokens, (len(at), 1))
        for rows, source, known in _known(view):
            before, came = view.history.outcomes(source)
            fit = _Neighbours.of(before, came, view.max_response_tokens, self.body, self.reach)
            lengths[:, rows] = np.rint(fit(known, at[:, rows], pooled=self.tail))
        least = 1 if view.generated is None else view.generated + 1
        return np.clip(lengths, least, view.max_response_tokens)

    def _uniforms(self, view: StepView, draws: int) -> FloatArray:
        """Return probabilities, alike within a prompt, shape (draws, responses)."""
        own = view.rng.standard_normal((draws, len(view)))
        if not self.correlated:
            return np.asarray(ndtr(own))
        shared = view.rng.standard_normal((draws, len(view.tree.prompt_tokens)))[:, view.tree.group]
        alike = np.zeros(len(view))
        for rows, source, _ in _known(view):
            alike[rows] = sibling_correlation(view, source)
        return np.asarray(ndtr(np.sqrt(alike) * shared + np.sqrt(1 - alike) * own))


def sibling_correlation(view: StepView, source: Known) -> float:
    """Return the correlation of two samples of a prompt, given what ``source`` says of it (0 to 0.99).

    See :class:`FromHistory`. All samples of a prompt are taken to come in one step, as many as in this one.
    """
    siblings = len(view) / len(view.tree.prompt_tokens) - 1
    others = view.history.outcomes("others")
    if siblings <= 0 or len(others[0]) < _FEWEST_OUTCOMES:
        return 0.0
    h2 = max(_score_correlation(*others), 0.0) ** 2
    k = max(siblings, 1.0)
    alike = (h2 * (k - 1) + np.sqrt(h2**2 * (k - 1) ** 2 + 4 * k * h2)) / (2 * k)
    q2 = _score_correlation(*view.history.outcomes(source)) ** 2
    return float(np.clip((alike - q2) / max(1 - q2, 1e-9), 0.0, 0.99))


def _score_correlation(x: FloatArray, y: FloatArray) -> float:
    """Return the correlation of the normal scores of two samples; 0 where one of them does not vary."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(_normal_scores(x), _normal_scores(y))[0, 1])


def _normal_scores(values: FloatArray) -> FloatArray:
    """Return the standard normal quantiles of the values' ranks; equal values share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2
    return np.asarray(ndtri((rank[place] - 0.5) / len(values)))


@dataclass(frozen=True)
class _Neighbours:
    """Quantiles of outcomes by what was known: a table at ``knots``, and the pooled tail above ``body``.

    ``table`` holds the quantiles of each knot's neighbours, shape (knots, levels), at even levels from 0 to 1;
    ``start`` their quantile at ``body``; ``shape`` and ``scale`` are those of the pooled log excess, ``atom`` is
    the share of it that lies at the cap beyond what the fit explains.
    """

    knots: FloatArray
    table: FloatArray
    start: FloatArray
    body: float
    shape: float
    scale: float
    atom: float
    cap: int

    @classmethod
    def of(cls, before: FloatArray, came: FloatArray, cap: int, body: float, reach: float) -> _Neighbours:
        """Fit to past outcomes."""
        order = np.argsort(before, kind="stable")
        before, came = before[order], came[order]
        n = len(came)
        middle = (np.arange(_KNOTS) + 0.5) * n / _KNOTS
        knots = np.unique(before[middle.astype(np.int64)])
        first, last = np.searchsorted(before, knots, "left"), np.searchsorted(before, knots, "right")
        middle = (first + last) / 2
        wide = np.maximum(4 * reach * middle * (1 - middle / n), _LEAST_NEIGHBOURS)
        low = np.maximum(np.minimum(first, middle - wide), 0).astype(np.int64)
        high = np.ceil(np.minimum(np.maximum(last, middle + wide), n)).astype(np.int64)
        levels = np.append(np.linspace(0.0, 1.0, _LEVELS), body)
        quantiles = np.stack([_quantiles(came[a:b], levels) for a, b in zip(low, high, strict=True)])
        table, start = quantiles[:, :-1], quantiles[:, -1]
        own = _at(knots, start, before)
        above = (came > own) & (own < cap)
        excess, capped = np.log(came[above] / own[above]), came[above] >= cap
        shape, scale = _pareto(excess[~capped])
        atom = 0.0
        if len(excess):
            explained = _survival(np.log(cap / own[above]), shape, scale)
            atom = max(float(capped.mean() - explained.mean()), 0.0)
        return cls(knots, table, start, body, shape, scale, atom, cap)

    def __call__(self, known: FloatArray, at: FloatArray, *, pooled: bool) -> FloatArray:
        """Return the quantiles of responses of which ``known`` is known, at ``at``, shape (draws, responses)."""
        place = np.interp(known, self.knots, np.arange(len(self.knots)))
        left = place.astype(np.int64)
        right, weight = np.minimum(left + 1, len(self.knots) - 1), place - left
        level = at * (_LEVELS - 1)
        below = np.minimum(level.astype(np.int64), _LEVELS - 2)
        part = level - below
        quantile = np.zeros(at.shape)
        for knot, share in ((left, 1 - weight), (right, weight)):
            quantile += share * (self.table[knot, below] * (1 - part) + self.table[knot, below + 1] * part)
        if pooled:
            draw, response = np.nonzero(at > self.body)
            beyond = (at[draw, response] - self.body) / (1 - self.body)
            start = _at(self.knots, self.start, known)[response]
            grown = start * np.exp(_excess(beyond / max(1 - self.atom, 1e-12), self.shape, self.scale))
            quantile[draw, response] = np.where(beyond >= 1 - self.atom, self.cap, grown)
        return np.clip(quantile, 1.0, self.cap)


def _quantiles(values: FloatArray, levels: FloatArray) -> FloatArray:
    """Return quantiles of which the i-th least of m values is the one at (i - 1/2) / m (Hazen), ends held."""
    m = len(values)
    return np.asarray(np.interp(levels * m - 0.5, np.arange(m), np.sort(values)))


def _at(knots: FloatArray, values: FloatArray, known: FloatArray) -> FloatArray:
    return np.asarray(np.interp(known, knots, values))


def _pareto(excess: FloatArray) -> tuple[float, float]:
    """Return shape and scale of a generalised Pareto distribution by probability-weighted moments.

    With a0 the mean and a1 the mean of ``x (1 - F(x))``: shape ``2 - a0 / (a0 - 2 a1)``, scale
    ``2 a0 a1 / (a0 - 2 a1)``. Too few excesses, or equal ones, count as exponential.
    """
    n = len(excess)
    if n == 0:
        return 0.0, 0.0
    mean = float(excess.mean())
    ordered = np.sort(excess)
    weighted = float((ordered * (n - 0.5 - np.arange(n)) / n).mean())
    spread = mean - 2 * weighted
    if n < _FEWEST_EXCESSES or spread <= 0:
        return 0.0, mean
    return float(np.clip(2 - mean / spread, -0.5, 0.5)), 2 * mean * weighted / spread


def _excess(at: FloatArray, shape: float, scale: float) -> FloatArray:
    """Return the generalised Pareto quantile."""
    log_survival = np.log1p(-np.clip(at, 0.0, 1 - 1e-12))
    if abs(shape) < 1e-9:
        return -scale * log_survival
    return np.asarray(scale / shape * np.expm1(-shape * log_survival))


def _survival(excess: FloatArray, shape: float, scale: float) -> FloatArray:
    """Return the generalised Pareto probability of more."""
    if scale <= 0:
        return (excess <= 0).astype(np.float64)
    if abs(shape) < 1e-9:
        return np.asarray(np.exp(-excess / scale))
    return np.asarray(np.maximum(1 + shape * excess / scale, 0.0) ** (-1 / shape))
