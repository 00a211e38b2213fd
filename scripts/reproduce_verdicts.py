"""Verdicts on the numbers of a paper: the rules, and what a row of the reproduction holds.

Every verdict is computed from the numbers by one of four rules, whatever the row:

* a **point** (:func:`point`) is a number of the paper, as an effect: a speed-up of 1.35x is +35 %, a cost
  reduction is itself. *Matches*: the paper's effect lies within our 95 % interval, or ours within a tenth of
  it. *Same direction*: our interval lies on the paper's side of zero. Else it *differs*.
* a **statement** (:func:`statement`) is an order or a fact that holds or does not, in each of many
  comparisons (pairs of a sweep, steps, pairs of cells). Ours is the share in which it holds; a difference of
  less than :data:`TIE` counts as half. *Matches*: the 95 % interval over seeds of that share lies above one
  half. *Same direction*: its mean does. Else it *differs*.
* **alike** (:func:`alike`): the values of a sweep are claimed to be about equal. Ours is the spread, the
  largest over the smallest less 1. *Matches*: at most :data:`ALIKE`. *Same direction*: at most twice that.
  Else it *differs*.
* a **limit** (:func:`limit`) is a bound from above. *Matches*: the interval ends below it. *Same direction*:
  the mean is below it. Else it *differs*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlhfless.models.scores import Interval95, interval
from rlhfless.traces.trace import FloatArray

Verdict = Literal["matches", "same direction", "differs"]

#: Relative difference below which two values count as equal; no bar of the paper's figures shows less.
TIE = 0.005
#: Spread up to which values count as about equal.
ALIKE = 0.05
#: How near a point must come, relative to the paper's effect.
NEAR = 0.1


@dataclass(frozen=True)
class Finding:
    """One number or statement of the paper, and ours.

    Attributes
    ----------
    what
        What is counted.
    options
        The choices of the cost model that are on.
    paper, ours
        Both as text.
    estimate
        What the verdict was computed from; ``ours`` may show it in another form.
    verdict, reason
        The verdict, and why.
    measured
        It holds a measured time: it cannot repeat and stays out of the files that do.

    """

    what: str
    options: str
    paper: str
    ours: str
    estimate: Interval95
    verdict: Verdict
    reason: str
    measured: bool = False


@dataclass(frozen=True)
class Point:
    """One point of a figure; ``x`` is a number or a name."""

    series: str
    x: float | str
    y: Interval95


@dataclass(frozen=True)
class Figure:
    """The points of one figure of the paper, as we find them; panels have one quantity each.

    ``panels`` maps the quantity (with its unit) to its points. ``measured``: as for :class:`Finding`.
    """

    name: str
    title: str
    x_label: str
    panels: dict[str, tuple[Point, ...]] = field(repr=False)
    kind: Literal["line", "bar"] = "line"
    measured: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the reproduction: its setting, what was found, and the figures."""

    number: int
    title: str
    setting: str
    findings: tuple[Finding, ...]
    figures: tuple[Figure, ...] = ()


def point(paper: float, ours: Interval95) -> Verdict:
    """Judge an effect against the paper's."""
    if ours.low <= paper <= ours.high or abs(ours.mean - paper) <= NEAR * abs(paper):
        return "matches"
    same = ours.low > 0 if paper > 0 else ours.high < 0
    return "same direction" if same else "differs"


def statement(share: Interval95) -> Verdict:
    """Judge a statement by the share of comparisons in which it holds."""
    if share.low > 0.5:
        return "matches"
    return "same direction" if share.mean > 0.5 else "differs"


def alike(spread: Interval95) -> Verdict:
    """Judge whether values are about equal, by their spread."""
    if spread.high <= ALIKE:
        return "matches"
    return "same direction" if spread.mean <= 2 * ALIKE else "differs"


def limit(most: float, ours: Interval95) -> Verdict:
    """Judge a bound from above."""
    if ours.high <= most:
        return "matches"
    return "same direction" if ours.mean <= most else "differs"


def effect(
    what: str,
    options: str,
    paper: tuple[str, float],
    ours: str,
    estimate: Interval95,
    value: Interval95,
    reason: str,
) -> Finding:
    """Return a point, judged: the paper's text and effect, our text, the number shown, and our effect."""
    return Finding(what, options, paper[0], ours, estimate, point(paper[1], value), reason)


def claim(what: str, options: str, ours: str, share: Interval95, reason: str, paper: str = "yes") -> Finding:
    """Return a statement, judged by the share of comparisons in which it holds."""
    return Finding(what, options, paper, ours, share, statement(share), reason)


def likeness(
    what: str, options: str, ours: str, spread: Interval95, reason: str, paper: str = "yes"
) -> Finding:
    """Return the finding that values are alike, judged by their spread."""
    return Finding(what, options, paper, ours, spread, alike(spread), reason)


def less(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return, value by value, 1 where left is below right, 0 where it is above, a half where they tie."""
    scale = TIE * np.maximum(np.abs(left), np.abs(right))
    difference = right - left
    return np.where(np.abs(difference) <= scale, 0.5, (difference > 0).astype(np.float64))


@dataclass(frozen=True)
class Order:
    """How far a sweep keeps an order: the share of pairs that do, a tie counting half, and of ties."""

    share: Interval95
    ties: float

    def __str__(self) -> str:
        tied = "" if not self.ties else " (all tie)" if self.ties == 1 else f" ({self.ties:.0%} tie)"
        return f"in {as_percent(self.share)} of the pairs{tied}"


def rising(values: Sequence[FloatArray]) -> Order:
    """Compare all pairs of a sweep, earlier below later: sweep points, each with one value a seed."""
    table = np.asarray(values)
    i, j = np.triu_indices(len(table), 1)
    pairs = less(table[i], table[j])
    return Order(interval(pairs.mean(axis=0)), float(np.mean(pairs == 0.5)))


def falling(values: Sequence[FloatArray]) -> Order:
    """Compare all pairs of a sweep, earlier above later."""
    return rising(values[::-1])


def spread(values: Sequence[FloatArray]) -> Interval95:
    """Return the largest over the smallest value of a sweep, less 1."""
    table = np.asarray(values)
    return interval(table.max(axis=0) / table.min(axis=0) - 1)


def change(ours: FloatArray, base: FloatArray) -> Interval95:
    """Return the relative change from base to ours, seed by seed."""
    return interval(ours / base - 1)


def shifted(value: Interval95, by: float) -> Interval95:
    """Return the interval with a constant added."""
    return Interval95(value.mean + by, value.low + by, value.high + by)


def as_times(value: Interval95) -> str:
    """Return a ratio as text."""
    return _text(value, lambda v: f"{v:.2f}x")


def as_percent(value: Interval95) -> str:
    """Return a share or a change as text."""
    digits = 1 if abs(value.mean) < 0.1 else 0
    return _text(value, lambda v: f"{v:.{digits}%}")


def as_change(value: Interval95) -> str:
    """Return a relative change as text, with its sign."""
    return _text(value, signed)


def signed(change: float) -> str:
    """Return a relative change as text; what rounds to nothing has no sign."""
    return f"{change:+.1%}" if abs(change) >= 5e-4 else "0.0%"


def as_number(value: Interval95, unit: str = "", digits: int = 1) -> str:
    """Return a number with its unit as text."""
    return _text(value, lambda v: f"{v:.{digits}f}{unit}")


def _text(value: Interval95, form: Callable[[float], str]) -> str:
    mean, low, high = form(value.mean), form(value.low), form(value.high)
    return mean if low == high else f"{mean} [{low}, {high}]"
