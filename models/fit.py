"""Non-negative linear fits of stage times, with intervals that show what the data cannot tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from scipy.optimize import brentq, nnls
from scipy.stats import f as f_distribution

from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import BoolArray, FloatArray

# Two columns whose ratio varies by less than this cannot be told apart.
_REPEATS = 0.01
_HUBER = 1.345
#: Fewest steps with a time that a stage is fitted on.
LEAST_STEPS = 8
#: Gaussian consistency of the median absolute deviation.
MAD_SIGMA = 0.6744897501960817


def matrix(features: Mapping[str, FloatArray], names: Sequence[str]) -> FloatArray:
    """Return the named columns side by side, shape (steps, features)."""
    return np.stack([features[name] for name in names], axis=1)


@dataclass(frozen=True)
class StageFit:
    """Non-negative coefficients of one stage, in seconds per unit of each feature.

    ``low`` and ``high`` bound each coefficient with 95 % confidence, the others being refitted (profile
    likelihood), so that collinear features show as wide intervals. ``left_out`` names features that repeat an
    earlier one on the fitted rows; their coefficient stays at its ``least`` value and only the interval speaks.
    """

    stage: str
    features: tuple[str, ...]
    coefficients: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    least: tuple[float, ...]
    left_out: tuple[str, ...]
    rows: int

    def coefficient(self, feature: str) -> float:
        """Return a feature's coefficient, 0 if the fit has no such feature."""
        return self.coefficients[self.features.index(feature)] if feature in self.features else 0.0

    def identified(self, feature: str) -> bool:
        """Whether the log tells the coefficient.

        It does if the interval excludes the coefficient's least value and is no wider than the estimate.
        """
        i = self.features.index(feature)
        return self.low[i] > self.least[i] and self.high[i] - self.low[i] <= self.coefficients[i]

    def predict(self, features: Mapping[str, FloatArray]) -> FloatArray:
        """Return seconds, shape (steps,), from feature columns of that shape."""
        seconds: FloatArray = matrix(features, self.features) @ np.asarray(self.coefficients)
        return seconds


def fit_linear(
    stage: str,
    features: Mapping[str, FloatArray],
    seconds: FloatArray,
    rows: BoolArray,
    at_least: Mapping[str, float] | None = None,
) -> StageFit:
    """Fit non-negative coefficients to relative errors, robustly.

    Minimises ``sum_i w_i (1 - x_i . c / y_i)^2`` over ``c >= at_least`` with Huber weights ``w`` (iterated,
    tuning constant 1.345). A row's own slowness can count at most fully, since ``y`` divides.

    Parameters
    ----------
    stage
        The name that the fit carries.
    features
        Columns of shape (steps,), in order of preference: one that repeats an earlier one on the fitted
        rows is left out of the estimate.
    seconds
        Measured times, shape (steps,); rows that are NaN are skipped.
    rows
        Which rows to fit, shape (steps,).
    at_least
        Lower bounds of coefficients, 0 where not given.

    Raises
    ------
    InputError
        When no row is left.

    """
    names = tuple(features)
    x = matrix(features, names)
    used = rows & np.isfinite(seconds) & np.isfinite(x).all(axis=1)
    if not used.any():
        raise InputError(f"{stage}: no undisturbed step with a time is left to fit")
    least = np.array([(at_least or {}).get(name, 0.0) for name in names])
    y = seconds[used]
    design = x[used] / y[:, None]
    target = 1.0 - design @ least
    left_out = _repeated(design, names)
    kept = np.array([name not in left_out for name in names])

    scale = np.where(design.any(axis=0), np.sqrt((design**2).mean(axis=0)), 1.0)
    design = design / scale
    weight = np.ones(len(y))
    for _ in range(10):
        extra = weighted_nnls(design[:, kept], target, weight)
        residual = target - design[:, kept] @ extra
        spread = np.median(np.abs(residual)) / MAD_SIGMA
        if spread <= 1e-12:
            break
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(residual), 1e-300))
    coefficients = np.zeros(len(names))
    coefficients[kept] = weighted_nnls(design[:, kept], target, weight)
    intervals = [_interval(design, target, weight, i, coefficients[i]) for i in range(len(names))]
    low, high = (np.array(ends) / scale + least for ends in zip(*intervals, strict=True))
    return StageFit(
        stage=stage,
        features=names,
        coefficients=tuple((coefficients / scale + least).tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        least=tuple(least.tolist()),
        left_out=left_out,
        rows=len(y),
    )


def _repeated(design: FloatArray, names: tuple[str, ...]) -> tuple[str, ...]:
    """Name the columns that are a multiple of an earlier one to within a hundredth."""
    repeated = []
    for i, j in combinations(range(len(names)), 2):
        a, b = design[:, i], design[:, j]
        if names[j] not in repeated and (a > 0).all() and (b > 0).all():
            ratio = b / a
            if ratio.max() <= ratio.min() * (1 + _REPEATS):
                repeated.append(names[j])
    return tuple(repeated)


def weighted_nnls(design: FloatArray, target: FloatArray, weight: FloatArray) -> FloatArray:
    """Minimise ``sum_i weight_i (target_i - design_i . c)^2`` over ``c >= 0``."""
    root = np.sqrt(weight)
    solution: FloatArray = nnls(design * root[:, None], target * root)[0]
    return solution


def _interval(
    design: FloatArray, target: FloatArray, weight: FloatArray, i: int, estimate: float
) -> tuple[float, float]:
    """Bound coefficient ``i`` where the least weighted squares, the others refitted, stay within the F limit."""
    others = np.delete(design, i, axis=1)

    def squares(value: float) -> float:
        left = target - design[:, i] * value
        if not others.shape[1]:
            return float(np.sum(weight * left**2))
        return float(np.sum(weight * (left - others @ weighted_nnls(others, left, weight)) ** 2))

    column = design[:, i]
    if not column.any():
        return 0.0, np.inf
    freedom = len(target) - design.shape[1]
    if freedom < 1:
        return 0.0, np.inf
    best = squares(estimate)
    limit: float = best * (1 + float(f_distribution.ppf(0.95, 1, freedom)) / freedom) + 1e-15

    def beyond(value: float) -> float:
        return squares(value) - limit

    low = 0.0 if beyond(0.0) <= 0 else float(brentq(beyond, 0.0, estimate, rtol=1e-4))
    # Alone, the column exceeds any limit once its own fitted value passes twice the target's norm.
    reach = estimate + 2 * float(np.sqrt(weight @ target**2) / np.sqrt(weight @ column**2))
    while beyond(reach) <= 0:
        reach *= 2
    return low, float(brentq(beyond, estimate, reach, rtol=1e-4))


def nonnegative_least_squares(gram: FloatArray, moment: FloatArray) -> FloatArray:
    """Minimise ``c . gram c - 2 moment . c`` over ``c >= 0`` for many small problems at once.

    Parameters
    ----------
    gram, moment
        Shapes (problems, features, features) and (problems, features).

    Returns
    -------
    Shape (problems, features). Exact for a few features: the optimum is the unconstrained solution on its own
    support, so the best feasible solution over all supports is it.

    """
    width = moment.shape[1]
    diagonal = np.einsum("tjj->tj", gram)
    scale = np.where(diagonal > 0, np.sqrt(diagonal), 1.0)
    normal = gram / (scale[:, :, None] * scale[:, None, :])
    right = moment / scale
    best = np.zeros_like(moment)
    least = np.zeros(len(moment))
    for support in chain.from_iterable(combinations(range(width), k) for k in range(1, width + 1)):
        index = list(support)
        # The ridge only decides between columns that repeat each other.
        block = normal[:, index][:, :, index] + 1e-9 * np.eye(len(index))
        solution = np.linalg.solve(block, right[:, index][:, :, None])[:, :, 0]
        value = np.einsum("ti,tij,tj->t", solution, block, solution) - 2 * np.einsum(
            "ti,ti->t", right[:, index], solution
        )
        better = (solution >= 0).all(axis=1) & (value < least)
        least[better] = value[better]
        best[better] = 0.0
        best[np.ix_(better, index)] = solution[better]
    return best / scale
