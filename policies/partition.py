"""Splitting numbers into groups: classical heuristics for equal sums, and exact contiguous partitions.

All functions are pure: arrays in, arrays out. A split into ``parts`` is an array of owners, one part per item,
or, where parts are contiguous, an array of ``parts + 1`` bounds. No part is empty as long as there are at least
as many items as parts. Ties go to the part with fewer items and then to the lower number, so that equal input
gives equal output.
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np
from numba import njit

from rlhfless.traces.trace import FloatArray, IntArray

Objective = Literal["sum", "max", "mix"]


def lpt(loads: FloatArray, parts: int) -> IntArray:
    """Longest processing time first: each item, from the largest down, to the part with the least sum.

    The largest sum is at most 4/3 - 1/(3 parts) times the least possible (Graham 1969). O(n log n).
    """
    return np.asarray(_greedy(loads.astype(np.float64), np.argsort(-loads, kind="stable"), parts))


def list_schedule(loads: FloatArray, parts: int) -> IntArray:
    """Each item, as it comes, to the part with the least sum: at most 2 - 1/parts (Graham 1966)."""
    return np.asarray(_greedy(loads.astype(np.float64), np.arange(len(loads)), parts))


@njit(cache=True)
def _greedy(loads, order, parts):  # type: ignore[no-untyped-def]  # pragma: no cover
    owner = np.empty(len(loads), dtype=np.int64)
    heap = [(0.0, np.int64(0), np.int64(part)) for part in range(parts)]
    for item in order:
        load, count, part = heap[0]
        owner[item] = part
        heapq.heapreplace(heap, (load + loads[item], count + 1, part))
    return owner


def multifit(loads: FloatArray, parts: int, iterations: int = 7) -> IntArray:
    """Bisect on a capacity that first-fit decreasing packs into ``parts`` bins.

    The largest sum is at most 13/11 + 2^-iterations times the least possible (Coffman, Garey and Johnson
    1978; Yue 1990). The search begins at the LPT split, so it is never worse than that either.
    O(iterations n log n).
    """
    order = np.argsort(-loads, kind="stable")
    values = loads.astype(np.float64)
    owner = np.asarray(_greedy(values, order, parts))
    high = float(np.bincount(owner, weights=values, minlength=parts).max())
    low = max(float(values.sum()) / parts, float(values.max(initial=0.0)))
    for _ in range(iterations):
        capacity = (low + high) / 2
        packed = np.empty(len(values), dtype=np.int64)
        if _first_fit(values, order, parts, capacity, packed):
            owner, high = packed, capacity
        else:
            low = capacity
    return _without_empty(owner, parts)


@njit(cache=True)
def _first_fit(loads, order, parts, capacity, owner):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Pack each item into the first bin with room for it; a tree holds the most room below each node."""
    leaves = 1
    while leaves < parts:
        leaves *= 2
    room = np.full(2 * leaves, -1.0)
    room[leaves : leaves + parts] = capacity
    for node in range(leaves - 1, 0, -1):
        room[node] = max(room[2 * node], room[2 * node + 1])
    for item in order:
        if room[1] < loads[item]:
            return False
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < loads[item]:
                node += 1
        owner[item] = node - leaves
        room[node] -= loads[item]
        node //= 2
        while node > 0:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2
    return True


def _without_empty(owner: IntArray, parts: int) -> IntArray:
    """Give each empty part an item of a part that has several; no sum but the empty ones' grows."""
    count = np.bincount(owner, minlength=parts)
    for part in np.flatnonzero(count == 0).tolist():
        if count.max() < 2:
            break
        item = int(np.flatnonzero(owner == np.argmax(count))[-1])
        count[owner[item]] -= 1
        owner[item] = part
        count[part] = 1
    return owner


def karmarkar_karp(loads: FloatArray, parts: int, *, equal_size: bool = False) -> IntArray:
    """Largest differencing (Karmarkar and Karp 1982): merge the two states with the largest spread.

    A state holds ``parts`` subsets with their sums. Two states merge largest with smallest subset. With
    ``equal_size`` every state begins with ``parts`` consecutive items of the ascending list, one in each
    subset, so that the counts of the result differ by at most one (verl's sequence balancing, which needs the
    number of items to be a multiple of ``parts``; here the first state may lack some). Otherwise every state
    begins with one item, and the largest sum is at most 4/3 - 1/(3 parts) times the least possible, 7/6 for
    two parts (Fischetti and Martello 1987; Michiels et al. 2007).

    O(n log n) for a given number of parts, and n * parts numbers of memory unless ``equal_size``.
    """
    values = loads.astype(np.float64)
    ascending = np.argsort(values, kind="stable")
    return np.asarray(_difference(values, ascending, parts, equal_size))


@njit(cache=True)
def _difference(loads, ascending, parts, equal_size):  # type: ignore[no-untyped-def]  # pragma: no cover
    n = len(loads)
    owner = np.zeros(n, dtype=np.int64)
    if n == 0:
        return owner
    states = (n + parts - 1) // parts if equal_size else n
    # A state's subsets in falling order of their sums: used[s] of them, each a linked list of items.
    sums = np.empty((states, parts))
    head = np.full((states, parts), np.int32(-1))
    tail = np.full((states, parts), np.int32(-1))
    used = np.empty(states, dtype=np.int64)
    following = np.full(n, np.int32(-1))
    missing = states * parts - n
    heap = [(0.0, np.int64(0)) for _ in range(0)]
    for state in range(states):
        if equal_size:
            used[state] = parts
            for place in range(parts):
                rank = (state + 1) * parts - 1 - place - missing
                sums[state, place] = 0.0
                if rank >= 0:
                    item = ascending[rank]
                    sums[state, place] = loads[item]
                    head[state, place] = tail[state, place] = item
        else:
            used[state] = 1
            item = ascending[n - 1 - state]
            sums[state, 0] = loads[item]
            head[state, 0] = tail[state, 0] = item
        spread = sums[state, 0] - (sums[state, parts - 1] if used[state] == parts else 0.0)
        heap.append((-spread, np.int64(state)))
    heapq.heapify(heap)

    new_sum = np.empty(parts)
    new_head = np.empty(parts, dtype=np.int32)
    new_tail = np.empty(parts, dtype=np.int32)
    while len(heap) > 1:
        a = heapq.heappop(heap)[1]
        b = heapq.heappop(heap)[1]
        count = 0
        for place in range(used[a] + min(used[b], parts - used[a])):
            # The largest of A meets the smallest of B; unused subsets are the smallest, with sum 0.
            if place < used[a]:
                total, first, last = sums[a, place], head[a, place], tail[a, place]
                opposite = parts - 1 - place
                if opposite < used[b] and head[b, opposite] >= 0:
                    total += sums[b, opposite]
                    if first >= 0:
                        following[last] = head[b, opposite]
                    else:
                        first = head[b, opposite]
                    last = tail[b, opposite]
            else:
                own = place - used[a]
                total, first, last = sums[b, own], head[b, own], tail[b, own]
            at = count
            while at > 0 and new_sum[at - 1] < total:
                new_sum[at], new_head[at], new_tail[at] = new_sum[at - 1], new_head[at - 1], new_tail[at - 1]
                at -= 1
            new_sum[at], new_head[at], new_tail[at] = total, first, last
            count += 1
        used[a] = count
        sums[a, :count], head[a, :count], tail[a, :count] = (
            new_sum[:count],
            new_head[:count],
            new_tail[:count],
        )
        spread = sums[a, 0] - (sums[a, parts - 1] if count == parts else 0.0)
        heapq.heappush(heap, (-spread, a))

    last_state = heap[0][1]
    for part in range(used[last_state]):
        item = head[last_state, part]
        while item >= 0:
            owner[item] = part
            item = following[item]
    return owner


def contiguous(
    size_cost: FloatArray,
    longest: FloatArray,
    parts: int,
    objective: Objective = "max",
    *,
    weight: float = 0.5,
    most: int | None = None,
    edges: IntArray | None = None,
    front_step: float = 0.0,
) -> IntArray:
    """Cut a falling list into blocks at the least cost, where a block costs ``size_cost[size] * its longest``.

    For any costs of size, and any objective that does not fall when a block's cost rises, no partition at all
    is better than the best contiguous one: number the groups of any partition by falling maximum and give the
    first as many of the largest items as it has, the second as many of the next, and so on; sizes stay, and
    no group's maximum grows. So for costs of this form the result is optimal among all partitions.

    Exact by dynamic programming over cuts, O(parts e^2) for e edges. ``mix`` walks the front of sum against
    maximum, one such program a point.

    Parameters
    ----------
    size_cost
        Cost factor by number of items, shape (n + 1,), at least 0.
    longest
        The items' costs in falling order, shape (n,), at least 0.
    parts
        Number of blocks, none empty.
    objective
        ``sum`` of the blocks' costs; ``max``, the largest, and among equals the least sum; or ``mix``,
        ``weight * max + (1 - weight) * sum / parts``.
    weight
        Weight of the maximum in ``mix``.
    most
        Largest block.
    edges
        Where cuts are allowed, rising from 0 to n; all places by default.
    front_step
        ``mix`` skips points of the front whose maximum is not lower than the last one's by this share; its
        result is then within 1 / (1 - front_step) of the optimum.

    Returns
    -------
    Bounds of the blocks, shape (parts + 1,).

    Raises
    ------
    ValueError
        When there is no such partition.

    """
    n = len(longest)
    at = np.arange(n + 1) if edges is None else np.asarray(edges, dtype=np.int64)
    if parts < 1 or len(at) <= parts:
        raise ValueError(f"{parts} blocks need as many places to end, there are {len(at) - 1}")
    costs = size_cost.astype(np.float64).copy()
    if most is not None:
        costs[most + 1 :] = np.inf
    heads = longest.astype(np.float64)

    def solve(cap: float, largest: bool) -> tuple[IntArray, FloatArray] | None:
        """Return the bounds with the least sum (or maximum) whose blocks cost at most ``cap``."""
        cuts, value = _cut(costs, heads, at, parts, cap, largest)
        if not np.isfinite(value):
            return None
        bounds = at[np.asarray(cuts)]
        return bounds, costs[np.diff(bounds)] * heads[bounds[:-1]]

    best = solve(np.inf, largest=objective == "max")
    if best is None:
        raise ValueError(f"{n} items do not fit {parts} blocks of at most {most}")
    if objective == "max":
        refined = solve(float(best[1].max()), largest=False)
        return (refined or best)[0]
    if objective == "sum":
        return best[0]
    point: tuple[IntArray, FloatArray] | None = best
    least = np.inf
    while point is not None:
        block = point[1]
        share = (1 - weight) * float(block.sum()) / parts
        if share >= least:  # further points only have larger sums
            break
        value = weight * float(block.max()) + share
        if value < least:
            least, best = value, point
        point = solve(float(np.nextafter(block.max() * (1 - front_step), 0.0)), largest=False)
    return best[0]


@njit(cache=True)
def _cut(size_cost, longest, edges, parts, cap, largest):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the places of the cuts, as positions in ``edges``, and the objective's value."""
    places = len(edges)
    best = np.full(places, np.inf)
    best[0] = 0.0
    choice = np.zeros((parts + 1, places), dtype=np.int32)
    for part in range(1, parts + 1):
        row = np.full(places, np.inf)
        for start in range(part - 1, places - 1):
            before = best[start]
            if before == np.inf:
                continue
            head = longest[edges[start]]
            # Each later block needs an edge of its own.
            for end in range(start + 1, places - parts + part):
                block = size_cost[edges[end] - edges[start]] * head
                if block > cap or block == np.inf:
                    continue
                value = max(before, block) if largest else before + block
                if value < row[end]:
                    row[end] = value
                    choice[part, end] = start
        best = row
    cuts = np.empty(parts + 1, dtype=np.int64)
    cuts[parts] = places - 1
    for part in range(parts, 0, -1):
        cuts[part - 1] = choice[part, cuts[part]]
    return cuts, best[places - 1]


def two_actors(lengths: FloatArray, iteration_seconds: FloatArray) -> IntArray:
    """Split responses over two actors so that the later one ends as early as possible. Exact.

    An actor with lengths ``L_1 >= L_2 >= ...``, all running from the start, takes
    ``sum_j L_j (tau(j) - tau(j - 1))``: with responses taken from the longest down, the j-th on an actor adds
    its own term and moves no earlier one. The program keeps, for every count on the first actor, the pairs of
    times that no other pair beats on both actors (TailSieve's Bellman recursion with Pareto pruning). The
    number of pairs can double with every response: for small batches.

    Parameters
    ----------
    lengths
        Tokens in falling order, shape (n,).
    iteration_seconds
        ``tau`` by running responses, shape at least (n + 1,), with ``tau(0) = 0``.

    Returns
    -------
    0 or 1 for each response.

    """
    step = np.diff(iteration_seconds[: len(lengths) + 1])
    on_first = np.zeros(1, dtype=np.int64)
    first = second = np.zeros(1)
    history: list[tuple[IntArray, IntArray]] = []
    for done, length in enumerate(lengths.tolist()):
        states = len(on_first)
        count = np.concatenate((on_first + 1, on_first))
        a = np.concatenate((first + length * step[on_first], first))
        b = np.concatenate((second, second + length * step[done - on_first]))
        order = np.lexsort((b, a, count))
        # Within a count, in rising order of a, a pair survives if its b is below all before it.
        _, rank = np.unique(b[order], return_inverse=True)
        key = rank - count[order] * (2 * states)
        kept = order[np.concatenate(([True], key[1:] < np.minimum.accumulate(key)[:-1]))]
        on_first, first, second = count[kept], a[kept], b[kept]
        history.append((kept % states, (kept >= states).astype(np.int64)))
    state = int(np.argmin(np.maximum(first, second)))
    owner = np.zeros(len(lengths), dtype=np.int64)
    for item in range(len(lengths) - 1, -1, -1):
        parent, side = history[item]
        owner[item] = side[state]
        state = int(parent[state])
    return owner
