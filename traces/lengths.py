"""Length distributions, and the two computations that reconstruction and synthesis share.

Lengths are modelled as a marginal distribution and a dependence, kept apart: a response's *normal score*
says how long it is among all responses, and the marginal distribution says how many tokens that is. Scores
of one prompt are correlated; the correlation is chosen so that the lengths that come out have a stated
intraclass correlation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincinv, ndtr, ndtri, polygamma

from rlhfless.traces.trace import FloatArray

Family = Literal["lognormal", "gamma"]

#: Hermite terms of a length's expansion in normal scores; the rest counts as one term of the next order.
HERMITE_TERMS = 30


class UnitLength(Protocol):
    """A distribution of positive lengths with median 1; a length in tokens is a median times it."""

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm, the one shape parameter."""
        ...

    def cdf(self, x: FloatArray | float) -> FloatArray:
        """Return P(X <= x)."""
        ...

    def ppf(self, q: FloatArray | float) -> FloatArray:
        """Return the quantile of ``q``."""
        ...

    def mean_below(self, x: FloatArray | float) -> FloatArray:
        """Return E[X; X <= x], the part of the mean that values up to ``x`` carry."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths: the logarithm is normal with standard deviation ``log_sd``."""

    log_sd: float

    def cdf(self, x: FloatArray | float) -> FloatArray:
        """Return P(X <= x)."""
        return np.asarray(ndtr(np.log(x) / self.log_sd))

    def ppf(self, q: FloatArray | float) -> FloatArray:
        """Return the quantile of ``q``."""
        return np.asarray(np.exp(self.log_sd * ndtri(q)))

    def mean_below(self, x: FloatArray | float) -> FloatArray:
        """Return E[X; X <= x]."""
        return np.asarray(np.exp(self.log_sd**2 / 2) * ndtr(np.log(x) / self.log_sd - self.log_sd))


@dataclass(frozen=True)
class Gamma:
    """Gamma lengths whose logarithm has standard deviation ``log_sd``.

    The variance of a gamma variable's logarithm is the trigamma function of its shape, which gives the shape.
    """

    log_sd: float

    @cached_property
    def shape(self) -> float:
        """Shape parameter whose trigamma is ``log_sd ** 2``."""
        target = self.log_sd**2
        return float(np.exp(brentq(lambda t: float(polygamma(1, np.exp(t))) - target, -14.0, 14.0)))

    @cached_property
    def _median(self) -> float:
        return float(gammaincinv(self.shape, 0.5))

    def cdf(self, x: FloatArray | float) -> FloatArray:
        """Return P(X <= x)."""
        return np.asarray(gammainc(self.shape, self._median * np.asarray(x)))

    def ppf(self, q: FloatArray | float) -> FloatArray:
        """Return the quantile of ``q``."""
        return np.asarray(gammaincinv(self.shape, q) / self._median)

    def mean_below(self, x: FloatArray | float) -> FloatArray:
        """Return E[X; X <= x]."""
        return np.asarray(self.shape / self._median * gammainc(self.shape + 1, self._median * np.asarray(x)))


def unit_length(family: Family, log_sd: float) -> UnitLength:
    """Return the distribution with median 1 of a family and a shape."""
    return Lognormal(log_sd) if family == "lognormal" else Gamma(log_sd)


@lru_cache(maxsize=16)
def normal_scores(n: int) -> FloatArray:
    """Return the ``n`` standard normal quantiles at (i + 1/2) / n, ascending. Shape (n,), read-only."""
    scores = np.asarray(ndtri((np.arange(n) + 0.5) / n), dtype=np.float64)
    scores.setflags(write=False)
    return scores


def hermite_weights(values: NDArray[np.floating]) -> FloatArray:
    """Return how the variance of ascending ``values`` divides over Hermite orders of their normal score.

    Entry ``k`` is the share of order ``k + 1``; the entries sum to 1. With two scores of correlation ``r``
    the values they stand for have correlation ``sum_k share_k r^(k+1)`` (Mehler's formula), which is at
    most ``r``. All-equal values have no variance to divide; they count as linear in the score.
    """
    n = len(values)
    centred = values - values.mean()
    variance = float(np.mean(centred**2))
    terms = max(1, min(HERMITE_TERMS, n // 8))
    shares = np.zeros(terms + 1)
    if variance == 0:
        shares[0] = 1.0
        return shares
    score = normal_scores(n)
    before, here = np.ones(n), score.copy()
    for k in range(1, terms + 1):
        shares[k - 1] = np.mean(centred * here) ** 2 / variance
        before, here = here, (score * here - np.sqrt(k) * before) / np.sqrt(k + 1)
    shares[terms] = max(1.0 - shares.sum(), 0.0)
    shares /= shares.sum()
    return shares


def latent_correlation(values: NDArray[np.floating], icc: float) -> float:
    """Return the score correlation that gives ascending ``values`` an intraclass correlation of ``icc``.

    Solves ``sum_k share_k r^(k+1) = icc`` for ``r`` in [0, 1] (:func:`hermite_weights`). For lognormal
    lengths and their logarithms the two are equal.
    """
    if icc in (0.0, 1.0):
        return icc
    polynomial = np.concatenate((hermite_weights(values)[::-1], [-icc]))
    return float(brentq(lambda r: float(np.polyval(polynomial, r)), 0.0, 1.0, xtol=1e-12))


def intraclass_correlation(values: NDArray[np.floating], group_size: int) -> float:
    """Return the one-way ANOVA estimate of the share of variance that lies between groups.

    ``values`` holds the groups one after another, ``group_size`` values each (at least 2). With mean
    squares between and within groups, ``(msb - msw) / (msb + (group_size - 1) msw)`` (Fisher).
    """
    grouped = values.reshape(-1, group_size)
    between = group_size * float(grouped.mean(axis=1).var(ddof=1))
    within = float(grouped.var(axis=1, ddof=1).mean())
    return (between - within) / (between + (group_size - 1) * within)
