"""A tighter, slower lower bound: responses get prices, and each group pays at least what its leader's best group does.

Give every response a price ``v``. For a group ``S`` with longest response ``l`` that ends by ``M``, let ``A_l`` be a lower
bound on ``T(S) - v(S)`` over all such groups: then ``T(S) >= A_l + v(S)``, and the walk over leaders of
:mod:`~rlhfless.solver.relaxation` holds with ``A`` in place of the levels: the first ``j`` groups together take at
least the sum of their ``A`` and the prices of all responses longer than the next leader.

``A_l`` is found exactly up to a Lagrangean: in falling order, the j-th response adds an amount that depends on its
length and ``j`` alone, so a dynamic program over (response, how many are taken) minimises ``(1 + mu) T(S) - v(S)`` over
all groups of every leader at once, and less ``mu M`` that bounds ``A_l`` for every ``mu >= 0``. Groups that run at once are
timed by the iteration time itself, groups that queue by the slack over each plane's prices.

Any prices give a bound. Good ones are the duals of a linear program: cover every response with groups that end by
``M``, as cheaply as possible. Prices are piecewise linear in the length, so it has few rows; groups are generated
by the same dynamic program (column generation, smoothed as in Wentges 1997).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numba import njit
from scipy.optimize import linprog
from scipy.sparse import csc_matrix

from rlhfless.solver.problem import Partition
from rlhfless.solver.relaxation import Relaxation, held
from rlhfless.traces.trace import BoolArray, FloatArray, IntArray

#: Multipliers of the time limit.
_MULTIPLIERS = (0.0, 0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.2, 3.5, 6.0)

#: Places at which prices may bend, evenly spread over the responses and again over the logarithm of their lengths.
_BENDS = 16

#: Shares of the best prices, and of a plane's iterations turned into prices, that are tried as well.
_SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)
_TURNED = (0.0, 0.3, 0.6, 1.0)

#: Weight of the best prices so far in the next ones, and groups generated at most in one round.
_SMOOTHING, _GROUPS = 0.8, 16

#: More numbers than this in the tables of a problem are too many to price with.
_LARGEST = 3_000_000


@njit(cache=True)
def _sums(length, knots, values):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return, for each response and b, the sum over its levels of the lines through ``values[knot, b]``."""
    n, width = len(length), values.shape[1]
    sums = np.zeros((n, width))
    for i in range(n):
        if i > 0 and length[i] == length[i - 1]:
            sums[i] = sums[i - 1]
            continue
        for b in range(1, width):
            sums[i, b] = values[0, b]
        for g in range(len(knots) - 1):
            count = min(length[i], knots[g + 1]) - knots[g]
            if count <= 0:
                break
            share = 1.0 / (knots[g + 1] - knots[g])
            for b in range(1, width):
                slope = (values[g + 1, b] - values[g, b]) * share
                sums[i, b] += count * values[g, b] + slope * count * (count + 1) / 2
    return sums


@njit(cache=True)
def _best_groups(sums, own, price, multiplier, queues, taken):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the least ``(1 + multiplier) T - v`` of groups by their leader, shape (n,).

    ``sums[i, j]`` less ``sums[i, j - 1]``, and ``own[i]``, is what response i adds as the j-th. Column j of ``taken``
    receives whether the response after j taken ones is taken as well. ``queues``: 0, groups of at most
    max_running; 1, only larger ones; 2, of any size.
    """
    n, most = len(own), sums.shape[1] - 1
    best = np.zeros(most + 2)
    if queues == 1:
        best[: most + 1] = np.inf
    led = np.full(n, np.inf)
    for i in range(n - 1, -1, -1):
        alone = (1.0 + multiplier) * own[i] - price[i]
        led[i] = alone + (1.0 + multiplier) * sums[i, 1] + best[1]
        for j in range(most):
            value = alone + (1.0 + multiplier) * (sums[i, j + 1] - sums[i, j]) + best[j + 1]
            taken[i, j] = value < best[j]
            if taken[i, j]:
                best[j] = value
        taken[i, most] = taken[i, most + 1] = False
        if queues > 0:
            taken[i, most] = alone + best[most + 1] < best[most]
            if taken[i, most]:
                best[most] = alone + best[most + 1]
            taken[i, most + 1] = alone < 0.0
            best[most + 1] += min(alone, 0.0)
    return led


@njit(cache=True)
def _follow(taken, leader, last):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the responses of a leader's best group."""
    rows = np.empty(len(taken), dtype=np.int64)
    rows[0] = leader
    count, j = 1, 1
    for i in range(leader + 1, len(taken)):
        if taken[i, j]:
            rows[count] = i
            count += 1
            j = min(j + 1, last)
    return rows[:count].copy()


@njit(cache=True)
def _walk(ends, cost, leads, paid, elsewhere, saving, segments, climbed):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Tell whether groups that end by ``ends`` in turn may hold all responses for ``cost`` actor seconds.

    ``leads[v, r]`` is what a group led by response r or a longer one adds to its prices, ``paid[v, r]`` the prices of
    the r longest responses, ``elsewhere[k, r]`` those of the others by prices that no group undercuts.
    """
    prices, n = leads.shape
    lead = leads[:, 0].copy()
    leaders = np.zeros(len(ends), dtype=np.int64)
    j, r = 1, 0
    while r < n:
        refused = r + 1 > held(climbed, segments[r], leaders, j, ends[1])
        for v in range(prices):
            if refused:
                break
            taken = lead[v] + paid[v, r + 1]
            refused = taken > ends[j] * (1 + 1e-12)
            room = min(ends[j] - taken, paid[v, n] - paid[v, r + 1])
            for k in range(len(elsewhere)):
                if taken + max(elsewhere[k, r + 1] - room * saving[v, k], 0.0) > cost * (1 + 1e-12):
                    refused = True
                    break
        if refused:
            j += 1
            if j >= len(ends):
                return False
            leaders[j - 1] = segments[r]
            lead += leads[:, r]
            continue
        r += 1
    return True


@dataclass(frozen=True)
class PricedRelaxation(Relaxation):
    """The relaxation, tightened by prices that are good near some times; valid for all times.

    Attributes
    ----------
    times
        Times at which prices are sought, such as that of a good partition.
    known
        A partition whose groups begin the search for prices.
    search_seconds
        Wall time of the search at each time.

    """

    times: tuple[float, ...] = ()
    known: Partition | None = field(default=None, repr=False)
    search_seconds: float = 5.0

    @cached_property
    def _families(self) -> list[tuple[FloatArray, FloatArray, int]]:
        """What responses add as the j-th of a group, what they add anyway, and of which groups it holds."""
        base, kv = self._tables[:2]
        length, prompt = self._sorted
        knots = self._levels[0]
        shortest = int(prompt.min())
        running = np.arange(len(base))
        reads = shortest + knots[:, None] - 1.0
        whole = np.where(running > 0, base + running * kv * reads, 0.0)
        beyond = kv[1:].min() * (prompt - shortest) * length
        psi, join = self._priced[0], self._joining
        families = [(_sums(length, knots, whole), beyond.astype(np.float64), 0)]
        most_tokens = np.sort(length + prompt)[::-1][: len(base) - 1].sum()
        queues = 2 if most_tokens > self._tables[2] or self._slots < len(base) - 1 else 1
        families += [(_sums(length, knots, own), join[z], queues) for z, own in enumerate(psi)]
        return families

    @cached_property
    def worth_it(self) -> bool:
        """Whether the problem is of a kind and size that prices can tighten."""
        most = len(self._tables[0]) - 1
        return not self.never_waits and most <= 512 and len(self.problem) * most <= _LARGEST

    def _bases(self, rows: IntArray) -> FloatArray:
        """Return how much a group covers of each bend's share of the responses."""
        at, share, bends = self._hats
        covered = np.zeros(bends)
        np.add.at(covered, at[rows], 1 - share[rows])
        np.add.at(covered, np.minimum(at[rows] + 1, bends - 1), share[rows])
        return covered

    @cached_property
    def _hats(self) -> tuple[IntArray, FloatArray, int]:
        """The bend below each response, its way to the next one, and how many bends there are."""
        length = self._sorted[0].astype(np.float64)
        even = np.quantile(length, np.linspace(0, 1, _BENDS))
        bends = np.unique(
            np.concatenate((even, np.geomspace(length[-1], length[0], _BENDS), length[[0, -1]]))
        )
        at = np.clip(np.searchsorted(bends, length, side="right") - 1, 0, max(len(bends) - 2, 0))
        gap = bends[np.minimum(at + 1, len(bends) - 1)] - bends[at]
        share = np.clip((length - bends[at]) / np.where(gap > 0, gap, 1.0), 0.0, 1.0)
        return at, share, len(bends)

    def _leads(self, price: FloatArray) -> tuple[FloatArray, FloatArray, list[list[BoolArray]]]:
        """Return values by family, multiplier and leader, the multipliers, and the choices behind them."""
        multipliers = np.array(_MULTIPLIERS)
        n, most = len(price), len(self._tables[0]) - 1
        values = np.empty((len(self._families), len(multipliers), n))
        choices: list[list[BoolArray]] = []
        for f, (sums, own, queues) in enumerate(self._families):
            choices.append([])
            for k, multiplier in enumerate(multipliers):
                taken = np.zeros((n, most + 2), dtype=np.bool_)
                values[f, k] = _best_groups(sums, own, price, multiplier, queues, taken)
                choices[f].append(taken)
        return values, multipliers, choices

    @staticmethod
    def _least(values: FloatArray, multipliers: FloatArray, seconds: float) -> FloatArray:
        """Return the lower bound on ``T - v`` by leader, for groups that end by ``seconds``."""
        by_family = (values - multipliers[:, None] * seconds).max(axis=1)
        least: FloatArray = np.minimum(by_family[0], by_family[1:].max(axis=0))
        return least

    def _duals(self, limit: float) -> FloatArray:
        """Return prices from the linear program at a time limit, lowered where a group would undercut them."""
        n = len(self.problem)
        at, share, bends = self._hats
        demand = self._bases(np.arange(n))
        columns, costs = [], []
        groups = (
            [] if self.known is None else [np.sort(self.problem.rank[rows]) for rows in self.known.groups]
        )
        for rows in [*groups, *(np.array([i]) for i in range(0, n, max(n // 60, 1)))]:
            columns.append(self._bases(rows))
            costs.append(self._family_seconds(rows))
        began, best, worth, smoothing = time.perf_counter(), np.zeros(n), 0.0, _SMOOTHING
        first = True
        while first or time.perf_counter() - began < self.search_seconds:
            covers: Any = -csc_matrix(np.array(columns).T)
            program = linprog(costs, A_ub=covers, b_ub=-demand, method="highs")
            if program.x is None:
                break
            theta = -program.ineqlin.marginals
            price = (1 - share) * theta[at] + share * theta[np.minimum(at + 1, bends - 1)]
            if not first:
                price = smoothing * best + (1 - smoothing) * price
            first = False
            values, multipliers, choices = self._leads(price)
            least = self._least(values, multipliers, limit)
            lowered = np.maximum(price + np.minimum(least, 0.0), 0.0)
            total = float(price.sum() + np.minimum(least, 0.0).sum())
            if total > worth:
                best, worth = lowered, total
            if worth >= (1 - 1e-3) * float(program.fun or 0.0):
                break
            found = self._columns(limit, least, values, multipliers, choices)
            if not found and smoothing < 0.02:
                break
            smoothing *= 1.0 if found else 0.5
            for column, cost in found:
                columns.append(column)
                costs.append(cost)
        return best

    def _family_seconds(self, rows: IntArray) -> float:
        """Return a group's time as the families bound it."""
        most = len(self._tables[0]) - 1
        j = np.minimum(np.arange(1, len(rows) + 1), most)
        before = np.minimum(np.arange(len(rows)), most)
        usable = self._families[:1] if len(rows) <= most else self._families[1:]
        return max(float((s[rows, j] - s[rows, before]).sum() + own[rows].sum()) for s, own, _ in usable)

    def _columns(
        self,
        limit: float,
        least: FloatArray,
        values: FloatArray,
        multipliers: FloatArray,
        choices: list[list[BoolArray]],
    ) -> list[tuple[FloatArray, float]]:
        """Return columns of groups that the prices do not pay for; where one is too late, mixed with an earlier."""
        chosen: list[int] = []
        for leader in np.argsort(least).tolist():
            if least[leader] >= -1e-9 or len(chosen) == _GROUPS:
                break
            if all(abs(leader - other) > len(least) // 200 for other in chosen):
                chosen.append(leader)
        by_family = (values - multipliers[:, None] * limit).max(axis=1)
        most = len(self._tables[0]) - 1
        found = []
        for leader in chosen:
            queueing = 1 + int(np.argmax(by_family[1:, leader]))
            for f in (0, queueing):
                if by_family[f, leader] >= -1e-9:
                    continue
                sums, own, _ = self._families[f]
                late: tuple[FloatArray, float] | None = None
                for taken in choices[f]:
                    rows = _follow(taken, leader, most if f == 0 else most + 1)
                    j, before = np.arange(1, len(rows) + 1), np.arange(len(rows))
                    added = sums[rows, np.minimum(j, most)] - sums[rows, np.minimum(before, most)]
                    seconds, column = float(added.sum() + own[rows].sum()), self._bases(rows)
                    if seconds > limit * (1 + 1e-9):
                        late = (column, seconds)
                        continue
                    if late is not None:
                        share = (limit - seconds) / (late[1] - seconds)
                        found.append((share * late[0] + (1 - share) * column, limit))
                    found.append((column, seconds))
                    break
        return found

    @cached_property
    def _price_lists(self) -> tuple[FloatArray, list[FloatArray], FloatArray, FloatArray, FloatArray]:
        """Prices, their values, prices paid by rank, and those elsewhere with what joining saves."""
        base = self._tables[0]
        tokens = self._sorted[0].astype(np.float64)
        lists = [
            (beta + turned * a / (len(base) - 1)) * tokens + gamma * self._reads
            for a, beta, gamma in self._fitted
            for turned in _TURNED
        ]
        for limit in self.times:
            duals = self._duals(limit)
            if duals.max() > 0:
                lists += [share * duals for share in _SHARES]
        price = np.maximum(np.array(lists), 1e-12)
        found = [self._leads(own)[:2] for own in price]
        values = [value for value, _ in found]
        paid = np.concatenate((np.zeros((len(price), 1)), np.cumsum(price, axis=1)), axis=1)
        # Elsewhere, prices must hold for groups of all times.
        safe = [k for k, value in enumerate(values) if self._safe(value)]
        elsewhere = paid[safe, -1:] - paid[safe]
        saving = np.array([[max(float(np.max(price[k] / own)) - 1, 0.0) for k in safe] for own in price])
        return price, values, paid, elsewhere, saving.reshape(len(price), len(safe))

    @staticmethod
    def _safe(values: FloatArray) -> bool:
        """Tell whether no group at all takes less than its prices."""
        free = values[:, 0]
        return bool(np.minimum(free[0], free[1:].max(axis=0)).min() >= -1e-12)

    def _actor_seconds(self, seconds: float) -> float:
        """Return the better of both bounds."""
        least = super()._actor_seconds(seconds)
        if not np.isfinite(least) or not self.worth_it:
            return least
        _, values, paid, elsewhere, saving = self._price_lists
        multipliers = np.array(_MULTIPLIERS)
        ends = self._ends(seconds)
        leads = np.array([np.minimum.accumulate(self._least(v, multipliers, ends[1])) for v in values])
        top = self._levels[1]
        segments = np.searchsorted(-top, -self._sorted[0])

        def possible(cost: float) -> bool:
            return bool(_walk(ends, cost, leads, paid, elsewhere, saving, segments, self._climbed))

        if not possible(inf):
            return inf
        low, high = least, self._plenty
        if possible(low):
            return low
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if possible(middle) else (middle, high)
        return low
