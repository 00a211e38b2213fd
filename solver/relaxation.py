"""Lower bounds on partitions: what no assignment of responses to actors can undercut.

All bounds hold for a :class:`~rlhfless.solver.problem.Problem`: known lengths, one group an actor, admitted in
falling order of tokens, nothing migrates. (:mod:`~rlhfless.solver.bounds` holds what is true of any plan.) Throughout,
an iteration with ``b`` running responses and ``R`` resident KV tokens takes ``f(b, R) = base(b) + kv(b) R``
seconds; ``level t`` of a response is its t-th token, during which it has ``p + t - 1`` resident tokens; ``N_t``
counts the responses with at least ``t`` tokens. Three lemmas carry the module.

**Planes.** If ``a + beta b + gamma R <= f(b, R)`` for all iterations that can occur, with ``a, beta, gamma >= 0``,
then an actor with ``I`` iterations takes at least ``a I`` plus its tokens' prices, where a token of level ``t`` has the
price ``beta + gamma (p + t - 1)``. An iteration makes at most ``max_running`` tokens and reads at most
``kv_capacity_tokens``, new tokens included; so ``I >= tokens / max_running`` and ``I >= (tokens + resident) /
capacity``, and ``a`` may be turned into prices: ``beta + a / max_running``, or ``beta + a / capacity`` and
``gamma + a / capacity``. (Sum of the inequality over the actor's iterations.)

**Levels.** Responses start in falling order and the latest admitted is preempted first. So in the actor's t-th
iteration, for ``t`` up to its longest response, the ``min(N_t, B_t)`` longest of its responses that have ``t`` tokens
are at level ``t``, where ``B_t = min(max_running, capacity / (longest prompt + t))`` of them fit whatever else
runs. Every other token made then has a level of at most ``t``. With prices taken from a plane, the iteration takes at
least its tokens' prices plus ``psi_t(min(N_t, B_t))``, where ``psi_t(b)`` is the least of ``f(b + x, R)`` less
prices over all ``x >= 0`` further tokens; iterations beyond the longest response take at least their prices.
``psi_t`` is made non-decreasing in ``b`` (the least over all larger ones), so that a group's cost never falls below
what any part of it costs. In ``t`` it is a least of linear functions, so concave, and the line between two
knots is below it. Where nothing can ever wait, because all responses fit one actor at once, ``x = 0`` and
``f`` itself takes the place of ``psi`` (no prices).

**Leaders.** Number the groups by falling longest response, ``l_1 >= l_2 >= ...``. All responses longer than
``l_{j+1}`` are in the first ``j`` groups, each of which has a response at every level up to ``l_{j+1}``. So these
groups take together at least ``F_j(l_{j+1})``, the sum over levels of the least cost of ``N_t`` responses on the
groups that are alive, and no more than ``j M`` if every actor ends by ``M``. The smallest ``l_{j+1}`` for which that
is possible bounds the j+1-th leader from below, and with it every later sum. The same argument with a
budget: the remaining responses either join the first ``j`` groups, at their prices, as long as ``j M`` allows, or
pay the price of a plane without ``a`` elsewhere; if that exceeds a budget ``c``, again ``l_{j+1}`` must be
larger. Taking each leader as short as it may be is best for all later sums, so a walk down the levels decides
whether time ``M`` and cost ``c`` can be had together in the relaxation, and bisection on ``c`` gives a lower
bound on the cost of all partitions that end by ``M``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappush, heapreplace
from math import inf

import numpy as np
from numba import njit
from scipy.optimize import linprog

from rlhfless.models.decode import EngineOptions
from rlhfless.solver.objective import Objective
from rlhfless.solver.problem import Problem
from rlhfless.traces.trace import FloatArray, IntArray

#: Of up to so many groups that are alive at a level, the least cost over all integer shares is tabulated; for
#: more, each is taken at its cheapest.
_FEW = 6

#: Knots of the levels, half of them evenly and half geometrically spaced.
_KNOTS = 24

#: Running responses around which planes are fitted.
_ANCHORS = (2, 4, 8, 16, 32, 64, 128, 256)

#: Relative width at which a bisection ends.
_PRECISION = 1e-5

#: Largest number of running responses for which levels are looked at one by one.
_TABULATED = 512


def highest_plane(
    base: FloatArray, kv: FloatArray, capacity: float, low: int, high: int, weights: FloatArray
) -> FloatArray:
    """Return the plane ``(a, beta, gamma)`` under the iteration time with the largest ``weights @ plane``.

    For ``b`` in ``1..max_running`` and ``R`` between ``b * low`` and the lesser of ``b * high`` and
    ``capacity - b``, ``a + beta b + gamma R <= base(b) + kv(b) R``. Since ``f`` is linear in ``R``, its ends
    suffice. A linear program; what its solution exceeds by rounding is taken off.

    Parameters
    ----------
    base, kv
        Seconds by running responses, shape (max_running + 1,); entry 0 is not used.
    capacity
        KV tokens that an actor can read in an iteration, new ones included; inf: no limit.
    low, high
        Least and most resident tokens of one response.
    weights
        Iterations, tokens, and resident tokens summed over iterations, shape (3,).

    """
    b = np.arange(1, len(base), dtype=np.float64)
    ends = [b * low, np.maximum(np.minimum(b * high, capacity - b), b * low)]
    # Resident tokens in thousands, so that the columns have like sizes.
    scale = np.array([1.0, 1.0, 1e3])
    rows = np.concatenate([np.stack((np.ones_like(b), b, r / scale[2]), axis=1) for r in ends])
    limit = np.concatenate([base[1:] + kv[1:] * r for r in ends])
    best = linprog(-weights / scale / weights[0], A_ub=rows, b_ub=limit, bounds=[(0, None)] * 3)
    excess = max(float(np.max(rows @ best.x - limit)), 0.0)
    plane: FloatArray = best.x / scale * (max(1 - excess / max(limit.min(), 1e-300), 0.0))
    return plane


def readable_tokens(capacity: int, engine: EngineOptions) -> float:
    """Return the KV tokens that an iteration may read, new ones included: the actor's capacity.

    Without limit where responses to one prompt share its KV, since each of them still reads all of it.
    """
    return inf if engine.share_prompt_kv else float(capacity)


def planes(
    base: FloatArray, kv: FloatArray, capacity: float, low: int, high: int, tokens: float, resident: float
) -> FloatArray:
    """Return the highest planes at some numbers of running responses with mean resident tokens, shape (planes, 3).

    ``tokens`` and ``resident`` are those of all responses, the latter summed over their levels; the rest as for
    :func:`highest_plane`.
    """
    anchors = sorted({min(anchor, len(base) - 1) for anchor in _ANCHORS})
    found = [
        highest_plane(base, kv, capacity, low, high, np.array([1.0, b, b * resident / tokens]))
        for b in anchors
    ]
    _, first = np.unique(np.round(found, 12), axis=0, return_index=True)
    return np.array(found)[np.sort(first)]


def work_seconds(
    base: FloatArray,
    kv: FloatArray,
    capacity: float,
    first: IntArray,
    tokens: FloatArray,
    resident: FloatArray,
) -> float:
    """Return what all responses take together at least, in seconds of actors, however they are spread or moved.

    The longest response needs an iteration for each of its tokens, an iteration makes at most ``max_running``
    tokens and reads at most ``capacity``: so many iterations there are at least, and the highest plane at that
    number bounds their time.

    Parameters
    ----------
    base, kv, capacity
        As for :func:`highest_plane`.
    first
        Resident tokens of each response in its first iteration, shape (n,).
    tokens, resident
        Tokens that each response makes, and its resident tokens summed over its iterations, shape (n,).

    """
    made, read = float(tokens.sum()), float(resident.sum())
    iterations = max(float(tokens.max()), made / (len(base) - 1), (made + read) / capacity)
    weights = np.array([iterations, made, read])
    low, high = int(first.min()), int((first + tokens).max())
    return float(highest_plane(base, kv, capacity, low, high, weights) @ weights)


def alone_seconds(
    base: FloatArray, kv: FloatArray, first: IntArray, last: IntArray, shortest: int
) -> FloatArray:
    """Return what each response takes at least, whatever runs beside it, shape (n,).

    It has ``first`` resident tokens in its first iteration and ``last`` after its last one. Each iteration has
    some ``b`` responses running, of which the other ones read at least their prompts: with ``r`` resident
    tokens of its own it takes at least the least over ``b`` of ``f(b, r + (b - 1) * shortest)``. That is a least of
    lines in ``r``, so concave, and the line between two knots is below it.
    """
    running = np.arange(1, len(base))
    knots = np.unique(np.geomspace(1, int(last.max()), 4 * _KNOTS).astype(np.int64))
    time = np.min(base[1:] + kv[1:] * (knots[:, None] + (running - 1) * shortest), axis=1)
    until = np.concatenate(([0.0], np.cumsum(np.interp(np.arange(int(last.max())), knots, time))))
    seconds: FloatArray = until[last] - until[first]
    return seconds


@njit(cache=True)
def _least_slack(base, kv, slots, capacity, shortest, longest, knots, plane, few):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return psi summed over the best shares: entry [m, knot, N] is the least over m or more groups with N alive."""
    beta, gamma = plane[1], plane[2]
    most = len(base) - 1
    size = most + few + 2
    shares = np.full((few + 2, len(knots), size), np.inf)
    psi = np.zeros((len(knots), most + 1))
    for g in range(len(knots)):
        level = knots[g]
        resident = shortest + level - 1.0
        following = knots[min(g + 1, len(knots) - 1)]
        fit = max(min(slots, int(capacity // (longest + following))), 1)
        for b in range(1, fit + 1):
            least = np.inf
            for running in range(b, most + 1):
                x = running - b
                for own in (float(shortest), resident):
                    time = base[running] + kv[running] * (b * resident + x * own)
                    least = min(least, time - x * (beta + gamma * own))
            psi[g, b] = least - b * (beta + gamma * resident)
        for b in range(fit - 1, 0, -1):
            psi[g, b] = min(psi[g, b], psi[g, b + 1])
        psi[g, fit + 1 :] = psi[g, fit]
        for n in range(1, size):
            shares[1, g, n] = psi[g, min(n, most)]
        for m in range(2, few + 1):
            for n in range(m, size):
                least = np.inf
                for b in range(1, min(n - m + 1, most) + 1):
                    least = min(least, psi[g, b] + shares[m - 1, g, n - b])
                shares[m, g, n] = least
        for n in range(1, size):
            shares[few + 1, g, n] = (few + 1) * psi[g, 1]
            for m in range(few, 0, -1):
                shares[m, g, n] = min(shares[m, g, n], shares[m + 1, g, n])
    return psi, shares


@njit(cache=True)
def _slack(psi, shares, few, m, knot, n):  # type: ignore[no-untyped-def]  # pragma: no cover
    if m > few:
        return m * psi[knot, 1]
    return shares[m, knot, min(n, shares.shape[2] - 1)]


@njit(cache=True)
def _below(level, knots, values):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the sum over levels 1..level of the line through the values at the knots."""
    total = values[0]
    for g in range(len(knots) - 1):
        count = min(level, knots[g + 1]) - knots[g]
        if count <= 0:
            break
        slope = (values[g + 1] - values[g]) / (knots[g + 1] - knots[g])
        total += count * values[g] + slope * count * (count + 1) / 2
    return total


@njit(cache=True)
def _climbing(base, kv, slots, columns, capacity, shortest, longest, knots, top):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return what b responses take together up to a level, shape (segments, columns + 1).

    By the lemma on levels, without prices, as the segments end. Entry 0 is what each response takes at least.
    """
    most = len(base) - 1
    time = np.zeros((len(knots), most + 1))
    for g in range(len(knots)):
        resident = shortest + knots[g] - 1.0
        following = knots[min(g + 1, len(knots) - 1)]
        fit = max(min(slots, int(capacity // (longest + following))), 1)
        for b in range(1, fit + 1):
            time[g, b] = np.inf
            for running in range(b, most + 1):
                reads = b * resident + (running - b) * shortest
                time[g, b] = min(time[g, b], base[running] + kv[running] * reads)
        for b in range(fit - 1, 0, -1):
            time[g, b] = min(time[g, b], time[g, b + 1])
        time[g, fit + 1 :] = time[g, fit]
        time[g, 0] = np.inf
        for b in range(1, most + 1):
            time[g, 0] = min(time[g, 0], base[b] / b + kv[b] * resident)
    climbed = np.zeros((len(top), columns + 1))
    for e in range(len(top)):
        for b in range(columns + 1):
            climbed[e, b] = _below(top[e], knots, time[:, b])
    return climbed


@njit(cache=True)
def held(climbed, e, leaders, j, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return how many responses of at least segment e's level groups with these leaders can hold by ``end``."""
    most, count = climbed.shape[1] - 1, 0
    for k in range(j):
        left = end - (climbed[leaders[k], 1] - climbed[e, 1])
        if left * (1 + 1e-9) < climbed[e, 1]:
            return 0
        # Beyond those that run at once, others wait, and share the leader's later iterations.
        waiting = (end - climbed[leaders[k], 0]) / max(climbed[e, 0], 1e-300)
        limit = 1 + int(min(waiting * (1 + 1e-9), 1e9))
        if climbed[e, most] > left * (1 + 1e-9):
            low, high = 1, most
            while high - low > 1:
                middle = (low + high) // 2
                if climbed[e, middle] <= left * (1 + 1e-9):
                    low = middle
                else:
                    high = middle
            limit = min(limit, low)
        count += max(limit, 1)
    return count


@njit(cache=True)
def _queueing(  # type: ignore[no-untyped-def]  # pragma: no cover
    ends, cost, top, alive, knots, segment, climbed, psi, shares, few, most, forced, joining, elsewhere, saving
):  # fmt: skip
    """Tell whether groups that end by ``ends`` in turn may hold all responses for ``cost`` actor seconds.

    ``ends[j]`` is what the first j groups may take together. Arrays run down the levels in segments
    ``(top[e + 1], top[e]]`` with ``alive[e]`` responses; ``forced``, ``joining`` and ``elsewhere`` are prices of
    the ``alive[e]`` longest responses, of the others where they join, and elsewhere; ``saving`` is the most
    that a second spent on joining saves elsewhere.
    """
    acc = np.zeros(len(psi))
    values = np.zeros(len(knots))
    leaders = np.zeros(most, dtype=np.int64)
    j, e = 1, 0
    while e < len(top):
        refused = alive[e] > held(climbed, e, leaders, j, ends[1])
        for z in range(len(psi)):
            if refused:
                break
            for g in range(len(knots)):
                values[g] = _slack(psi[z], shares[z], few, j, g, alive[e])
                if knots[g] >= top[e]:
                    break
            taken = acc[z] + forced[z, e] + _below(top[e], knots, values)
            if taken > ends[j] * (1 + 1e-12):
                refused = True
                break
            room = min(ends[j] - taken, joining[z, e])
            rest = 0.0
            for k in range(len(elsewhere)):
                rest = max(rest, elsewhere[k, e] - room * saving[z, k])
            if taken + rest > cost * (1 + 1e-12):
                refused = True
                break
        if refused:
            j += 1
            if j > most:
                return False
            leaders[j - 1] = e
            continue
        g = segment[e]
        low = top[e + 1] if e + 1 < len(top) else 0
        share = ((low + 1 + top[e]) / 2 - knots[g]) / (knots[g + 1] - knots[g])
        for z in range(len(psi)):
            near = _slack(psi[z], shares[z], few, j, g, alive[e])
            far = _slack(psi[z], shares[z], few, j, g + 1, alive[e])
            acc[z] += (top[e] - low) * ((1 - share) * near + share * far)
        e += 1
    return True


@njit(cache=True)
def _envelope(values):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the largest convex function below ``values`` (Andrew's monotone chain)."""
    hull = np.empty(len(values), dtype=np.int64)
    kept = 0
    for i in range(len(values)):
        while kept > 1:
            a, b = hull[kept - 2], hull[kept - 1]
            if (values[b] - values[a]) * (i - a) < (values[i] - values[a]) * (b - a):
                break
            kept -= 1
        hull[kept] = i
        kept += 1
    result = values.copy()
    for k in range(kept - 1):
        a, b = hull[k], hull[k + 1]
        for i in range(a, b + 1):
            result[i] = values[a] + (values[b] - values[a]) * (i - a) / (b - a)
    return result


@njit(cache=True)
def _together(base, kv, shortest, knots, few, monotone):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return by knot the convex envelope of an iteration's time over 1.., and its least sums over few groups."""
    most = len(base) - 1
    envelopes = np.zeros((len(knots), most))
    sums = np.full((len(knots), few + 1, few * most + 1), np.inf)
    for g in range(len(knots)):
        time = np.zeros(most)
        for b in range(1, most + 1):
            time[b - 1] = base[b] + b * kv[b] * (shortest + knots[g] - 1.0)
        if monotone:
            for b in range(most - 2, -1, -1):
                time[b] = min(time[b], time[b + 1])
        envelopes[g] = _envelope(time)
        for n in range(1, min(most, few * most) + 1):
            sums[g, 1, n] = time[n - 1]
        for m in range(2, few + 1):
            for n in range(m, few * most + 1):
                least = np.inf
                for b in range(1, min(n - m + 1, most) + 1):
                    least = min(least, time[b - 1] + sums[g, m - 1, n - b])
                sums[g, m, n] = least
    return envelopes, sums


@njit(cache=True)
def _share(envelopes, sums, m, knot, n):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the least time of one iteration on each of m groups with n running in all."""
    if n < m:
        return np.inf
    if m < sums.shape[1]:
        return sums[knot, m, n] if n < sums.shape[2] else np.inf
    mean = n / m
    whole = int(mean)
    if whole >= envelopes.shape[1]:
        return m * envelopes[knot, -1] if mean <= envelopes.shape[1] else np.inf
    low = envelopes[knot, whole - 1]
    return m * (low + (mean - whole) * (envelopes[knot, whole] - low))


@njit(cache=True)
def _segment_costs(top, alive, knots, segment, envelopes, sums, most):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the least cost of each segment's levels on m or more groups, shape (segments, most + 2)."""
    costs = np.full((len(top), most + 2), np.inf)
    for e in range(len(top)):
        g = segment[e]
        low = top[e + 1] if e + 1 < len(top) else 0
        share = ((low + 1 + top[e]) / 2 - knots[g]) / (knots[g + 1] - knots[g])
        for m in range(min(most, alive[e]), 0, -1):
            near = _share(envelopes, sums, m, g, alive[e])
            far = _share(envelopes, sums, m, g + 1, alive[e])
            costs[e, m] = min(costs[e, m + 1], (top[e] - low) * ((1 - share) * near + share * far))
    return costs


@njit(cache=True)
def _all_running(ends, top, alive, knots, climbed, costs, envelopes, sums, extra, most):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the least actor seconds of groups that end by ``ends`` in turn, nothing ever waiting; inf: none."""
    values = np.zeros(len(knots))
    leaders = np.zeros(most, dtype=np.int64)
    acc, j, e = 0.0, 1, 0
    while e < len(top):
        for g in range(len(knots)):
            values[g] = _share(envelopes, sums, j, g, alive[e])
            if knots[g] >= top[e]:
                break
        taken = acc + extra[e] + _below(top[e], knots, values)
        if taken > ends[j] * (1 + 1e-12) or alive[e] > held(climbed, e, leaders, j, ends[1]):
            j += 1
            if j > most:
                return np.inf
            leaders[j - 1] = e
            continue
        acc += costs[e, j]
        e += 1
    return acc + extra[-1]


@dataclass(frozen=True)
class Relaxation:
    """Lower bounds on the partitions of a problem; built once, asked for many times and budgets.

    Where the problem has actors of several profiles, an iteration is taken to last as long as on the fastest of
    them and to cost as much as on the cheapest: valid, but loose. Start-up: the first ``j`` groups have at most
    the ``j`` earliest starts.
    """

    problem: Problem

    @cached_property
    def _tables(self) -> tuple[FloatArray, FloatArray, int, float, int]:
        """Base and kv seconds that no kind undercuts, the capacity, what an iteration may read, the fewest GPUs.

        The least capacity is what surely fits; the largest is what may be read, without limit where responses to
        one prompt share its KV but each reads all of it.
        """
        profiles = [kind.profile for kind in self.problem.kinds if kind.count]
        most = max(profile.actor.max_running for profile in profiles)
        base, kv = np.full((2, most + 1), inf)
        for profile in profiles:
            own_base, own_kv = profile.decode_tables
            base[: len(own_base)] = np.minimum(base[: len(own_base)], own_base)
            kv[: len(own_kv)] = np.minimum(kv[: len(own_kv)], own_kv)
        most = min(most, len(self.problem))
        capacities = [profile.actor.kv_capacity_tokens for profile in profiles]
        reads = readable_tokens(max(capacities), self.problem.engine)
        gpus = min(profile.actor.gpus for profile in profiles)
        return base[: most + 1], kv[: most + 1], min(capacities), reads, gpus

    @cached_property
    def _slots(self) -> int:
        """How many responses every actor runs at once, if they fit."""
        most = min(kind.profile.actor.max_running for kind in self.problem.kinds if kind.count)
        return min(most, len(self.problem))

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray]:
        """Response and prompt tokens in falling order of the former."""
        order = self.problem.order
        return (
            self.problem.response_tokens[order].astype(np.int64),
            self.problem.prompt_tokens[order].astype(np.int64),
        )

    @cached_property
    def _starts(self) -> FloatArray:
        """Entry j: what the j earliest actors lose to start-up together, seconds."""
        kinds = self.problem.kinds
        starts = np.sort(np.repeat([k.start_seconds for k in kinds], [k.count for k in kinds]))
        return np.concatenate(([0.0], np.cumsum(starts)))[: self.problem.actors + 1]

    @cached_property
    def _held(self) -> FloatArray:
        """Entry j: the least GPU seconds that j actors are billed before they decode."""
        kinds = self.problem.kinds
        each = [k.held_seconds * k.profile.actor.gpus for k in kinds]
        held = np.sort(np.repeat(each, [k.count for k in kinds]))
        return np.concatenate(([0.0], np.cumsum(held)))[: self.problem.actors + 1]

    @cached_property
    def _levels(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Knots, and the segments of levels: their upper ends, responses alive, and the knot below."""
        length = self._sorted[0]
        longest = int(length[0])
        half = _KNOTS // 2
        spread = np.concatenate((np.geomspace(1, longest, half), np.linspace(1, longest, half)))
        knots = np.unique(np.concatenate((np.round(spread).astype(np.int64), [1, longest])))
        if len(knots) == 1:
            knots = np.array([1, 2])
        top = np.unique(np.concatenate((length, knots[knots <= longest])))[::-1].copy()
        alive = np.searchsorted(-length, -top, side="right")
        segment = np.clip(np.searchsorted(knots, top, side="left") - 1, 0, len(knots) - 2)
        return knots, top, alive, segment

    @cached_property
    def _climbed(self) -> FloatArray:
        base, kv, capacity = self._tables[:3]
        prompt = self._sorted[1]
        knots, top, _, _ = self._levels
        shortest, longest = int(prompt.min()), int(prompt.max())
        most = len(base) - 1
        # With more than can be tabulated, only the rate and one response alone count.
        slots, columns = (self._slots, most) if most <= _TABULATED else (1, 1)
        table: FloatArray = _climbing(base, kv, slots, columns, capacity, shortest, longest, knots, top)
        return table

    @cached_property
    def never_waits(self) -> bool:
        """Whether all responses together would run at once on any actor, so that no group ever queues."""
        length, prompt = self._sorted
        profiles = [kind.profile.actor for kind in self.problem.kinds if kind.count]
        whole = int((length + prompt).sum())
        return all(len(length) <= p.max_running and whole <= p.kv_capacity_tokens for p in profiles)

    @cached_property
    def _reads(self) -> FloatArray:
        """Resident tokens of each response summed over its levels, every prompt counted as the shortest."""
        length, prompt = self._sorted
        tokens = length.astype(np.float64)
        reads: FloatArray = int(prompt.min()) * tokens + tokens * (tokens - 1) / 2
        return reads

    @cached_property
    def _fitted(self) -> FloatArray:
        """Planes under the iteration time."""
        base, kv, _, reads, _ = self._tables
        length, prompt = self._sorted
        high = int((prompt + length).max())
        resident = float((self._reads + (prompt - prompt.min()) * length).sum())
        return planes(base, kv, reads, int(prompt.min()), high, float(length.sum()), resident)

    @cached_property
    def _joining(self) -> FloatArray:
        """Prices of the responses by plane, in a group with levels; what a prompt is longer pays the least kv rate."""
        length, prompt = self._sorted
        beyond = self._tables[1][1:].min() * (prompt - prompt.min()) * length
        join: FloatArray = self._fitted[:, 1:2] * length + self._fitted[:, 2:] * self._reads + beyond
        return join

    @cached_property
    def _priced(self):  # type: ignore[no-untyped-def]
        """Prices and slack tables of the relaxation with waiting."""
        base, kv, capacity, reads, _ = self._tables
        length, prompt = self._sorted
        knots, _, alive, _ = self._levels
        shortest, longest, most = int(prompt.min()), int(prompt.max()), len(base) - 1
        fitted, join = self._fitted, self._joining
        bare = np.concatenate((fitted[:, :1] * 0, fitted[:, 1:]), axis=1)
        by_tokens = bare + fitted[:, :1] * np.array([0.0, 1 / most, 0.0])
        by_capacity = bare + fitted[:, :1] * np.array([0.0, 1 / reads, 1 / reads])
        without = np.concatenate((by_tokens, by_capacity))
        resident = self._reads + (prompt - shortest) * length
        other = without[:, 1:2] * length + without[:, 2:] * resident
        other = other[np.argsort(-other.sum(axis=1), kind="stable")[:3]]
        few = min(_FEW, self.problem.actors)
        tables = [
            _least_slack(base, kv, self._slots, capacity, shortest, longest, knots, plane, few)
            for plane in fitted
        ]
        before = np.concatenate((np.zeros((len(join), 1)), np.cumsum(join, axis=1)), axis=1)
        others = np.concatenate((np.zeros((len(other), 1)), np.cumsum(other, axis=1)), axis=1)
        # Joining may be free; a floor keeps what it saves finite, and rounding errs on the safe side.
        paid = np.maximum(join, 1e-12)
        saving = np.array([[np.max(o / j) for o in other] for j in paid])
        joined = np.concatenate((np.zeros((len(join), 1)), np.cumsum(paid, axis=1)), axis=1)
        return (
            np.array([psi for psi, _ in tables]),
            np.array([shares for _, shares in tables]),
            before[:, alive],
            joined[:, -1:] - joined[:, alive],
            others[:, -1:] - others[:, alive],
            np.maximum(saving - 1, 0.0),
        )

    @cached_property
    def _unpriced(self):  # type: ignore[no-untyped-def]
        """Tables of the relaxation in which nothing waits."""
        base, kv = self._tables[:2]
        length, prompt = self._sorted
        knots, top, alive, segment = self._levels
        shortest = int(prompt.min())
        few = min(_FEW, self.problem.actors) if len(base) - 1 <= _TABULATED else 0
        exact = _together(base, kv, shortest, knots, few, False)
        rising = _together(base, kv, shortest, knots, few, True)
        extra = np.cumsum(kv[1:].min() * (prompt - shortest) * length)
        envelopes, sums = exact
        costs = _segment_costs(top, alive, knots, segment, envelopes, sums, self.problem.actors)
        return costs, *rising, extra[alive - 1]

    @cached_property
    def alone_seconds(self) -> float:
        """What the slowest response takes at least, wherever it runs, start-up included."""
        base, kv = self._tables[:2]
        length, prompt = self._sorted
        own = alone_seconds(base, kv, prompt, prompt + length, int(prompt.min()))
        return float(own.max() + self._starts[1])

    def _ends(self, seconds: float) -> FloatArray:
        """Return what the first 0, 1, ... groups may take together, if all are to end by ``seconds``."""
        usable = int(np.searchsorted(np.diff(self._starts), seconds, side="right"))
        ends: FloatArray = np.arange(usable + 1) * seconds - self._starts[: usable + 1]
        return ends

    def _actor_seconds(self, seconds: float) -> float:
        """Return a lower bound on the actor seconds of groups that end by ``seconds``; inf: there are none."""
        ends, most = self._ends(seconds), len(self._tables[0]) - 1
        if len(ends) == 1 or seconds < self.alone_seconds * (1 - 1e-12):
            return inf
        knots, top, alive, segment = self._levels
        if self.never_waits:
            costs, envelopes, sums, extra = self._unpriced
            tables = (self._climbed, costs, envelopes, sums, extra)
            return float(_all_running(ends, top, alive, knots, *tables, len(ends) - 1))
        if most > _TABULATED:
            return self._planes_alone if self._planes_alone <= ends[-1] * (1 + 1e-12) else inf
        psi, shares, *prices = self._priced
        few = shares.shape[1] - 2

        def possible(cost: float) -> bool:
            tables = (self._climbed, psi, shares, few, len(ends) - 1)
            return bool(_queueing(ends, cost, top, alive, knots, segment, *tables, *prices))

        if not possible(inf):
            return inf
        low, high = 0.0, self._plenty
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if possible(middle) else (middle, high)
        return low

    @cached_property
    def _planes_alone(self) -> float:
        """Actor seconds that all partitions take, by one plane alone."""
        base, kv, _, reads, _ = self._tables
        length, prompt = self._sorted
        tokens = length.astype(np.float64)
        resident = prompt * tokens + tokens * (tokens - 1) / 2
        return work_seconds(base, kv, reads, prompt, tokens, resident)

    def gpu_seconds(self, seconds: float = inf) -> float:
        """Return a lower bound on the GPU seconds of partitions that end by ``seconds``; inf: there are none."""
        if not np.isfinite(seconds):
            seconds = 2 * self._plenty
        least = self._actor_seconds(seconds)
        if not np.isfinite(least):
            return inf
        # j actors have so much time together; fewer than it takes cannot do.
        used = max(int(np.argmax(self._ends(seconds) >= least * (1 - 1e-12))), 1)
        return least * self._tables[4] + float(self._held[used])

    @cached_property
    def _plenty(self) -> float:
        """Actor seconds that suffice: every iteration alone, at the largest times."""
        base, kv, capacity = self._tables[:3]
        length, _ = self._sorted
        return float(length.sum()) * float(base[1:].max() + kv[1:].max() * capacity) + float(self._starts[-1])

    @cached_property
    def seconds(self) -> float:
        """A lower bound on the time of all partitions: the least for which the relaxation has groups."""
        return self._first(
            lambda time: bool(np.isfinite(self._actor_seconds(time))), self.alone_seconds, self._plenty
        )

    def bound(self, objective: Objective) -> float:
        """Return a lower bound on the objective over all partitions; inf where the limits allow none."""
        return self.minimum(objective)[0]

    def minimum(
        self, objective: Objective, upper: float = inf, precision: float = 1e-4, steps: int = 400
    ) -> tuple[float, float]:
        """Return a lower bound on the objective, and the time at which the relaxation is at its best.

        A partition that takes ``M`` costs at least ``gpu_seconds(M)``, which falls as ``M`` grows. On an
        interval of times the objective is at least that of its earliest time with the least cost at its latest;
        the interval with the least such value is halved until it is within ``precision`` of a value that the
        relaxation attains, or after ``steps`` halvings. Times at which the time alone exceeds ``upper``, the value
        of a known partition, are not looked at. Both are infinite where the limits allow no partition.
        """
        earliest = self.seconds
        limit = min(objective.time_limit, 2 * self._plenty)
        if earliest > limit * (1 + _PRECISION):
            return inf, inf
        cheapest = self.gpu_seconds(limit)
        if cheapest > objective.cost_limit * (1 + _PRECISION):
            return inf, inf
        if objective.time_weight == 0:
            enough = cheapest * (1 + precision)
            seconds = self._first(lambda time: self.gpu_seconds(time) <= enough, earliest, limit)
            return objective.offset + objective.cost_weight * cheapest, seconds
        if objective.cost_limit < inf:
            most = objective.cost_limit
            earliest = self._first(lambda time: self.gpu_seconds(time) <= most, earliest, limit)
        if objective.cost_weight == 0:
            return objective.offset + objective.time_weight * earliest, earliest
        latest = limit
        if upper < inf:
            worth = (upper - objective.offset - objective.cost_weight * cheapest) / objective.time_weight
            latest = min(latest, max(worth, earliest))

        def value(seconds: float, cost: float) -> float:
            return objective.offset + objective.time_weight * seconds + objective.cost_weight * cost

        # Equal ratios at first, so that the far end does not draw all the halvings. The least value of an
        # interval, its ends, and the cost at its end.
        edges = np.geomspace(earliest, max(latest, earliest * (1 + 1e-9)), 12).tolist()
        costs = [self.gpu_seconds(edge) for edge in edges]
        attained = min((value(edge, cost), edge) for edge, cost in zip(edges, costs, strict=True))
        heap = [(value(edges[k], costs[k + 1]), edges[k], edges[k + 1], costs[k + 1]) for k in range(11)]
        heapify(heap)
        for _ in range(steps):
            least, low, high, at_high = heap[0]
            if attained[0] - least <= precision * abs(attained[0] - objective.offset):
                break
            if high - low <= 1e-9 * high:
                break
            middle = (low + high) / 2
            cost = self.gpu_seconds(middle)
            attained = min(attained, (value(middle, cost), middle))
            heapreplace(heap, (value(low, cost), low, middle, cost))
            heappush(heap, (value(middle, at_high), middle, high, at_high))
        beyond = value(latest, cheapest) if latest < limit else inf
        return min(heap[0][0], beyond), attained[1]

    def front(self, points: int = 24) -> tuple[FloatArray, FloatArray]:
        """Return times and the GPU seconds that no partition which ends by then undercuts, both shape (points,).

        The times rise from the least possible, in equal ratios, to where more of it saves nothing.
        """
        cheapest = self.gpu_seconds()
        enough = self._first(
            lambda seconds: self.gpu_seconds(seconds) <= cheapest * (1 + 1e-4), self.seconds, self._plenty
        )
        times: FloatArray = np.geomspace(self.seconds, max(enough, self.seconds), points)
        return times, np.array([self.gpu_seconds(float(time)) for time in times])

    def _first(self, reached: Callable[[float], bool], low: float, high: float) -> float:
        """Return a time before which ``reached`` does not hold; it holds from some time on."""
        if reached(low):
            return low
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if reached(middle) else (middle, high)
        return low
