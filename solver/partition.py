"""Partitions of responses over actors: heuristics with proven gaps, and exact searches for small problems.

:func:`solve` is the one to use: the best of even splits, threshold sweeps and the best contiguous split, improved by
annealing, with the bound of :class:`~rlhfless.solver.relaxation.Relaxation`. :func:`exhaustive` tabulates all
subsets of up to thirteen responses; :func:`branch_and_bound` goes a little further. All of them time groups by the
replay's kernel, so that waves, preemption and any iteration time are in the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from numba import njit

from rlhfless.models.decode import block_ends, kernel_costs
from rlhfless.solver.objective import Objective
from rlhfless.solver.pricing import PricedRelaxation
from rlhfless.solver.problem import Partition, Problem, Solution
from rlhfless.solver.relaxation import Relaxation, planes, readable_tokens
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: Largest problem for which every subset's time is tabulated.
EXHAUSTIVE = 13

#: Times that the threshold sweep looks at.
_SWEEP = 32

#: Places of cuts that the best contiguous split is found among.
_EDGES = 256

#: Times near which a tighter bound is sought.
_ROUNDS = 2

#: Moves between two looks at the clock.
_CHUNK = 1000

#: Temperature of the annealing at its start, relative to the objective, for up to so many responses; more get a tenth.
_HEAT, _FEW_RESPONSES = 1e-3, 2048


def even_splits(problem: Problem, counts: Iterable[int] | None = None) -> list[Partition]:
    """Return, for each count of actors, the sorted batch cut into equal counts (RLHFless, sec. 4.3).

    Actors of the first kinds come first. ``counts`` are all that are possible by default.
    """
    kinds = _slots(problem)
    counts = range(1, len(kinds) + 1) if counts is None else counts
    return [
        Partition(tuple(np.array_split(problem.order, count)), tuple(kinds[:count].tolist()))
        for count in counts
        if _all_fit(problem, kinds[:count], np.array_split(problem.order, count))
    ]


def reference(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Return seconds and GPU seconds of the even splits, which :meth:`Goal.resolve` scales by."""
    pairs = np.array([problem.evaluate(split) for split in even_splits(problem)])
    if not len(pairs):
        raise InputError("no even split fits the actors' memory; the goal needs one to scale by")
    return pairs[:, 0], pairs[:, 1]


def _slots(problem: Problem) -> IntArray:
    """Return the kind of every actor there may be."""
    counts = [kind.count for kind in problem.kinds]
    return np.repeat(np.arange(len(counts)), counts)


def _all_fit(problem: Problem, kinds: IntArray, groups: Sequence[IntArray]) -> bool:
    return all(problem.fits(kind, rows) for kind, rows in zip(kinds.tolist(), groups, strict=True))


@njit(cache=True)
def _group_seconds(rows, tokens, costs):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the decode seconds of rows in admission order; ``tokens``: prompt, response, group, cached."""
    if len(rows) == 0:
        return 0.0
    prompt, length, cached = tokens[0][rows], tokens[1][rows], tokens[3][rows]
    if (prompt + length).max() > costs[3]:
        return np.inf
    bounds = np.array([0, len(rows)])
    return block_ends(bounds, np.arange(len(rows)), prompt, length, tokens[2][rows], cached, costs)[0]


@njit(cache=True)
def _fill(cap, tokens, costs, start, ends):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Fill actors in turn with the longest responses left, as many as end by ``cap``; False if some are left.

    ``tokens`` are in admission order; ``ends`` receives where each actor's block ends.
    """
    n, first, size = len(tokens[0]), 0, 1
    for actor in range(len(start)):
        low, high = first, n
        # A block is likely about as long as the one before.
        reach = min(first + size, n)
        while low < reach and start[actor] + _group_seconds(np.arange(first, reach), tokens, costs) <= cap:
            low = reach
            reach = min(first + 2 * (reach - first), n)
        if low == n:
            ends[actor:] = n
            return True
        high = reach
        while high - low > 1:
            middle = (low + high) // 2
            if start[actor] + _group_seconds(np.arange(first, middle), tokens, costs) <= cap:
                low = middle
            else:
                high = middle
        size = max(low - first, 1)
        ends[actor] = low
        first = low
        if first == n:
            ends[actor:] = n
            return True
    return False


def _arrays(problem: Problem) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return prompt, response, prompt number and cached tokens in admission order."""
    order = problem.order
    whole = (problem.prompt_tokens, problem.response_tokens, problem.group, problem.cached_tokens)
    prompt, response, group, cached = (np.asarray(values, dtype=np.int64)[order] for values in whole)
    return prompt, response, group, cached


def threshold_sweep(problem: Problem, times: Iterable[float]) -> list[Partition]:
    """Return, for each time, the contiguous partition that fills actors from the longest response down.

    Each actor takes as many of the longest responses left as it ends with by that time; nothing is returned for a
    time by which not all responses fit. For additive times ``a * longest + own work`` with work that can be cut,
    no partition that ends by the time has shorter leaders, so none is cheaper. Only for actors of one
    profile; those that start earliest are filled first.
    """
    profiles = {id(kind.profile): kind.profile for kind in problem.kinds if kind.count}
    if len(profiles) > 1:
        return []
    (profile,) = profiles.values()
    kinds = _slots(problem)
    start = np.array([problem.kinds[kind].start_seconds for kind in kinds.tolist()])
    order = np.argsort(start, kind="stable")
    tokens, costs = _arrays(problem), kernel_costs(profile, problem.engine)
    found = []
    for cap in times:
        ends = np.zeros(len(kinds), dtype=np.int64)
        if _fill(float(cap), tokens, costs, start[order], ends):
            blocks = np.split(problem.order, ends[:-1])
            used = [g for g in range(len(blocks)) if len(blocks[g])]
            found.append(Partition(tuple(blocks[g] for g in used), tuple(int(kinds[order[g]]) for g in used)))
    return found


def contiguous(
    problem: Problem, objective: Objective, *, edges: int = 192, latest: float = inf
) -> Partition | None:
    """Return the best partition into contiguous blocks of the sorted responses; None where there is none.

    Exact by dynamic programming over the places of the cuts, one pass a point of the front of cost against
    time: the cheapest blocks of which none ends after ``M``, for ever smaller ``M``. The blocks' times are the
    kernel's, so any iteration time and queueing are allowed (for processor sharing, ``a * longest + work``, sorted
    blocks are best for the sum but not always for the maximum). For actors of one profile; the first
    blocks get the earliest starts. O(edges^2) block times.

    Parameters
    ----------
    problem, objective
        What is split, and what is minimised.
    edges
        Places where cuts are allowed: all, if there are no more responses, else the longest responses one by one
        and then in equal steps.
    latest
        Blocks that end later are not looked at.

    """
    profiles = {id(kind.profile): kind.profile for kind in problem.kinds if kind.count}
    if len(profiles) > 1:
        return None
    (profile,) = profiles.values()
    n, kinds = len(problem), _slots(problem)
    start = np.array([problem.kinds[kind].start_seconds for kind in kinds.tolist()])
    order = np.argsort(start, kind="stable")
    near = np.arange(min(n, edges // 3) + 1)
    at = np.unique(np.concatenate((near, np.linspace(near[-1], n, edges - len(near) + 1).astype(np.int64))))
    if n <= edges:
        at = np.arange(n + 1)
    latest = min(latest, objective.time_limit)
    tokens, costs = _arrays(problem), kernel_costs(profile, problem.engine)
    seconds = _block_seconds(at, tokens, costs, latest)
    held = np.array([problem.kinds[kinds[a]].held_seconds for a in order.tolist()])
    best, value, cap = None, inf, latest
    while True:
        cuts = _cheapest_cuts(seconds, start[order], held, cap)
        if len(cuts) == 0:
            return best
        blocks = [problem.order[at[i] : at[j]] for i, j in pairwise(cuts.tolist())]
        found = Partition(tuple(blocks), tuple(int(kinds[order[k]]) for k in range(len(blocks))))
        time, cost = problem.evaluate(found)
        trial = float(objective.value(time, cost))
        if trial < value:
            best, value = found, trial
        # Whatever ends earlier costs no less.
        if objective.offset + objective.cost_weight * cost >= value or objective.time_weight == 0:
            return best
        cap = float(np.nextafter(time, 0.0)) * (1 - 1e-9)


@njit(cache=True)
def _block_seconds(edges, tokens, costs, latest):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the seconds of every block between two edges; infinite where it takes longer than ``latest``."""
    seconds = np.full((len(edges), len(edges)), np.inf)
    for i in range(len(edges) - 1):
        for j in range(i + 1, len(edges)):
            time = _group_seconds(np.arange(edges[i], edges[j]), tokens, costs)
            if time > latest:
                break
            seconds[i, j] = time
    return seconds


@njit(cache=True)
def _cheapest_cuts(seconds, start, held, cap):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the cuts of the cheapest blocks that end by ``cap``, as positions of edges; empty: there are none."""
    edges, most = len(seconds), min(len(start), len(seconds) - 1)
    cost = np.full((most + 1, edges), np.inf)
    choice = np.zeros((most + 1, edges), dtype=np.int64)
    cost[0, 0] = 0.0
    for part in range(1, most + 1):
        improved = False
        for j in range(part, edges):
            for i in range(part - 1, j):
                if start[part - 1] + seconds[i, j] <= cap:
                    trial = cost[part - 1, i] + seconds[i, j] + held[part - 1]
                    if trial < cost[part, j]:
                        cost[part, j] = trial
                        choice[part, j] = i
                        improved = True
        if not improved:
            break
    part = int(np.argmin(cost[:, -1]))
    if cost[part, -1] == np.inf:
        return np.zeros(0, dtype=np.int64)
    cuts = np.empty(part + 1, dtype=np.int64)
    cuts[part] = edges - 1
    for k in range(part, 0, -1):
        cuts[k - 1] = choice[k, cuts[k]]
    return cuts


def exhaustive(problem: Problem, objective: Objective) -> Solution:
    """Return an optimal partition of a small problem, whatever a group's time depends on.

    Every subset is timed on every kind of actor. Then, point by point of the front of cost against time: the
    cheapest cover by disjoint subsets of which none ends after ``M``, by dynamic programming over subsets
    (the group that holds the first response left is chosen next), for ever smaller ``M``. O(3^n) a point.

    Raises
    ------
    InputError
        With more than :data:`EXHAUSTIVE` responses.

    """
    began = time.perf_counter()
    n = len(problem)
    if n > EXHAUSTIVE:
        raise InputError(f"exhaustive: {n} responses, at most {EXHAUSTIVE} can be tabulated")
    members = [np.flatnonzero((mask >> np.arange(n)) & 1) for mask in range(1, 1 << n)]
    ends, costs = np.full((2, len(problem.kinds), 1 << n), inf)
    for number, kind in enumerate(problem.kinds):
        decoding = problem.decode_seconds(members, [number] * len(members))
        ends[number, 1:] = decoding + kind.start_seconds
        costs[number, 1:] = (decoding + kind.held_seconds) * kind.profile.actor.gpus
    counts = np.array([kind.count for kind in problem.kinds])
    best, value, cap = None, inf, objective.time_limit * (1 + 1e-9)
    cheapest = fastest = inf
    while True:
        masks, kinds = _cheapest_cover(ends, costs, counts, cap)
        if len(masks) == 0:
            break
        found = Partition(tuple(members[mask - 1] for mask in masks.tolist()), tuple(kinds.tolist()))
        seconds, gpu_seconds = problem.evaluate(found)
        cheapest, fastest = min(cheapest, gpu_seconds), seconds
        trial = float(objective.value(seconds, gpu_seconds))
        if trial < value:
            best, value = found, trial
        cap = float(ends[kinds, masks].max()) * (1 - 1e-12)
    took = time.perf_counter() - began
    if best is None and fastest == inf:
        return _infeasible(began, f"time limit: no partition ends by {objective.time_limit:.6g} s")
    if best is None:
        return _infeasible(
            began,
            f"cost limit: within the time limit no partition costs less than {cheapest:.6g} GPU seconds, "
            f"the limit is {objective.cost_limit:.6g}",
        )
    return Solution.of(problem, objective, best, value, took)


@njit(cache=True)
def _cheapest_cover(ends, costs, counts, cap):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the groups, as bit masks, and kinds of the cheapest cover that ends by ``cap``; empty: none."""
    kinds, subsets = ends.shape
    # States: how many actors of each kind are used, mixed radix.
    states = 1
    for kind in range(kinds):
        states *= counts[kind] + 1
    whole = subsets - 1
    cost = np.full((states, subsets), np.inf)
    group = np.zeros((states, subsets), dtype=np.int64)
    taken = np.zeros((states, subsets), dtype=np.int64)
    cost[0, 0] = 0.0
    for state in range(states):
        for covered in range(subsets - 1):
            before = cost[state, covered]
            if before == np.inf:
                continue
            left = whole & ~covered
            first = left & -left
            others = left & ~first
            step = 1
            for kind in range(kinds):
                if (state // step) % (counts[kind] + 1) < counts[kind]:
                    rest = others
                    while True:
                        own = rest | first
                        if ends[kind, own] <= cap:
                            trial = before + costs[kind, own]
                            if trial < cost[state + step, covered | own]:
                                cost[state + step, covered | own] = trial
                                group[state + step, covered | own] = own
                                taken[state + step, covered | own] = kind
                        if rest == 0:
                            break
                        rest = (rest - 1) & others
                step *= counts[kind] + 1
    state = int(np.argmin(cost[:, whole]))
    masks = np.zeros(0, dtype=np.int64)
    chosen = np.zeros(0, dtype=np.int64)
    if cost[state, whole] == np.inf:
        return masks, chosen
    covered = whole
    while covered:
        own, kind = group[state, covered], taken[state, covered]
        masks = np.append(masks, own)
        chosen = np.append(chosen, kind)
        covered &= ~own
        step = 1
        for k in range(kind):
            step *= counts[k] + 1
        state -= step
    return masks, chosen


def branch_and_bound(
    problem: Problem,
    objective: Objective,
    *,
    seconds: float = 10.0,
    hint: Partition | None = None,
    nodes: int | None = None,
) -> Solution:
    """Search all partitions, longest responses first, and cut off what cannot be better. Exact if it ends in time.

    A node has the longest responses assigned. A group takes at least the highest of its planes
    (:mod:`~rlhfless.solver.relaxation`), and every response left adds at least its least price; whole partitions
    are timed by the kernel. Of equal actors that are still empty only the first is tried, and of equal responses the
    later one never goes to an earlier equal actor than its twin. Any iteration time, capacity and mix of actors.

    Parameters
    ----------
    problem, objective
        What is split, and what is minimised.
    seconds
        Time limit.
    hint
        A partition to begin with; by default that of a short :func:`solve`.
    nodes
        Most nodes; None: as many as the time allows.

    """
    began = time.perf_counter()
    quick = solve(problem, objective, seconds=min(seconds, 1.0), moves=2000, hint=hint, gap=1e-9)
    if quick.status == "infeasible" or quick.status == "optimal":
        return quick
    kinds = _slots(problem)
    tokens = _arrays(problem)
    costs = tuple(kernel_costs(kind.profile, problem.engine) for kind in problem.kinds)
    leads, prices = _group_planes(problem)
    starts, helds, gpus = _kind_values(problem)
    weights = np.array([objective.time_weight, objective.cost_weight])
    limits = np.array([objective.time_limit, objective.cost_limit]) * (1 + 1e-9)
    n = len(problem)
    twin = np.zeros(n, dtype=np.bool_)
    prompt, length, group, cached = tokens
    # Where nothing of a prompt is shared on an actor, its number does not matter.
    shares = problem.engine.share_prompt_kv or bool((cached < prompt).any())
    twin[1:] = (np.diff(prompt) == 0) & (np.diff(length) == 0) & (np.diff(cached) == 0)
    twin[1:] &= (np.diff(group) == 0) | (not shares)
    upper = quick.value - objective.offset if quick.partition is not None else inf
    owner, stack = np.full(n, -1, dtype=np.int64), np.full(n + 1, -1, dtype=np.int64)
    state = np.zeros(2, dtype=np.int64)
    best, visited = np.zeros(0, dtype=np.int64), 0
    done = False
    while not done and (visited == 0 or time.perf_counter() - began < seconds):
        if nodes is not None and visited >= nodes:
            break
        chunk = 200_000 if nodes is None else min(200_000, nodes - visited)
        done, upper, found = _branch(
            chunk, owner, stack, state, upper, kinds, starts, helds, gpus, weights, limits, tokens, costs,
            leads, prices, twin,
        )  # fmt: skip
        visited += chunk
        if len(found):
            best = found
    partition = _partition(problem, best, kinds) if len(best) else quick.partition
    took = time.perf_counter() - began
    if partition is None:
        reason = "no partition within the limits exists" if done else "none was found in the time"
        return Solution(
            "infeasible" if done else "unknown", None, inf, inf, inf, quick.bound, inf, took, (), reason
        )
    bound = upper + objective.offset if done else quick.bound
    return Solution.of(problem, objective, partition, bound, took, quick.progress)


def _kind_values(problem: Problem) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return start seconds, held seconds and GPUs of each kind."""
    rows = [(k.start_seconds, k.held_seconds, float(k.profile.actor.gpus)) for k in problem.kinds]
    starts, helds, gpus = np.array(rows).T.copy()
    return starts, helds, gpus


def _group_planes(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Return by kind what a group takes per token of its longest response, and prices of responses by plane.

    Shapes (kinds, planes) and (kinds, planes, n), in admission order.
    """
    prompt, length, _, _ = _arrays(problem)
    tokens = length.astype(np.float64)
    resident = prompt * tokens + tokens * (tokens - 1) / 2
    leads, prices = [], []
    for kind in problem.kinds:
        base, kv = kind.profile.decode_tables
        capacity = readable_tokens(kind.profile.actor.kv_capacity_tokens, problem.engine)
        fitted = planes(
            base, kv, capacity, int(prompt.min()), int((prompt + length).max()), tokens.sum(), resident.sum()
        )
        spread = fitted[:, 1:] + fitted[:, :1] * np.array([1 / (len(base) - 1), 0.0])
        leads.append(np.concatenate((fitted[:, 0], np.zeros(len(fitted)))))
        each = np.concatenate((fitted[:, 1:], spread))
        prices.append(each[:, :1] * tokens + each[:, 1:] * resident)
    width = max(len(lead) for lead in leads)
    padded = [np.pad(lead, (0, width - len(lead))) for lead in leads]
    rows = [np.pad(price, ((0, width - len(price)), (0, 0))) for price in prices]
    return np.array(padded), np.array(rows)


@njit(cache=True)
def _branch(  # type: ignore[no-untyped-def]  # pragma: no cover
    nodes, owner, stack, state, upper, kinds, starts, helds, gpus, weights, limits, tokens, costs, leads, prices,
    twin,
):  # fmt: skip
    """Go on with a depth-first search for so many nodes; return whether it ended, the best value, its owners.

    ``stack[d]`` is the actor that the d-th response was given last, ``state[0]`` the depth.
    """
    n, actors, forms = len(owner), len(kinds), leads.shape[1]
    best = np.zeros(0, dtype=np.int64)
    # What all responses from i on add at least, in GPU seconds, whichever plane bounds their groups.
    adding = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        least = np.inf
        for kind in range(len(starts)):
            least = min(least, prices[kind, :, i].min() * gpus[kind])
        adding[i] = adding[i + 1] + least
    depth = state[0]
    for _ in range(nodes):
        if depth < 0:
            return True, upper, best
        if depth == n:
            time = cost = 0.0
            for actor in range(actors):
                rows = np.flatnonzero(owner == actor)
                if len(rows):
                    kind = kinds[actor]
                    seconds = _group_seconds(rows, tokens, costs[kind])
                    time = max(time, starts[kind] + seconds)
                    cost += gpus[kind] * (helds[kind] + seconds)
            value = weights[0] * time + weights[1] * cost
            if value < upper * (1 - 1e-12) and time <= limits[0] and cost <= limits[1]:
                upper = value
                best = owner.copy()
            depth -= 1
            continue
        # The next actor for this response.
        last = stack[depth]
        if last >= 0:
            owner[depth] = -1
        actor = last + 1
        if last < 0 and twin[depth] and depth > 0:
            while actor < owner[depth - 1] and kinds[actor] == kinds[owner[depth - 1]]:
                actor += 1
        while actor < actors:
            empty = True
            for i in range(depth):
                if owner[i] == actor:
                    empty = False
                    break
            if empty and actor > 0 and kinds[actor - 1] == kinds[actor]:
                before = False
                for i in range(depth):
                    if owner[i] == actor - 1:
                        before = True
                        break
                if not before:
                    actor += 1
                    continue
            break
        if actor >= actors:
            stack[depth] = -1
            depth -= 1
            continue
        stack[depth] = actor
        owner[depth] = actor
        time = cost = 0.0
        for a in range(actors):
            kind, bound, first = kinds[a], 0.0, -1
            for i in range(depth + 1):
                if owner[i] == a:
                    first = i
                    break
            if first >= 0:
                for z in range(forms):
                    total = leads[kind, z] * tokens[1][first]
                    for i in range(first, depth + 1):
                        if owner[i] == a:
                            total += prices[kind, z, i]
                    bound = max(bound, total)
                time = max(time, starts[kind] + bound)
                cost += gpus[kind] * (helds[kind] + bound)
        cost += adding[depth + 1]
        if (
            weights[0] * time + weights[1] * cost >= upper * (1 - 1e-12)
            or time > limits[0]
            or cost > limits[1]
        ):
            continue
        depth += 1
        stack[depth] = -1
    state[0] = depth
    return False, upper, best


@njit(cache=True)
def _merge(a, b):  # type: ignore[no-untyped-def]  # pragma: no cover
    merged = np.empty(len(a) + len(b), dtype=np.int64)
    i = j = 0
    for k in range(len(merged)):
        if j == len(b) or (i < len(a) and a[i] < b[j]):
            merged[k] = a[i]
            i += 1
        else:
            merged[k] = b[j]
            j += 1
    return merged


@njit(cache=True)
def _run(rng, size):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return a random run's place and length, the length uniform in its logarithm."""
    length = min(int(np.exp(rng.random() * np.log(size + 1.0))), size)
    return rng.integers(0, size - length + 1), length


@njit(cache=True)
def _anneal(rng, moves, owner, kinds, starts, helds, gpus, weights, limits, tokens, costs, heat):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Move and swap runs of the sorted responses between actors.

    ``owner`` is the actor of each response in admission order, ``heat`` the temperature relative to the
    objective. Returns the best owners seen within the limits, and the last ones.
    """
    actors, n = len(kinds), len(owner)
    members = np.zeros((actors, n), dtype=np.int64)
    size = np.zeros(actors, dtype=np.int64)
    for r in range(n):
        members[owner[r], size[owner[r]]] = r
        size[owner[r]] += 1
    seconds = np.zeros(actors)
    for a in range(actors):
        seconds[a] = _group_seconds(members[a, : size[a]], tokens, costs[kinds[a]])
    value, over = _value(seconds, size, kinds, starts, helds, gpus, weights, limits)
    best_owner, best = owner.copy(), value if over <= 1e-9 else np.inf
    for _ in range(moves):
        a, b = rng.integers(0, actors), rng.integers(0, actors)
        if a == b or size[a] == 0:
            continue
        at, length = _run(rng, size[a])
        given = members[a, at : at + length]
        mine = np.concatenate((members[a, :at], members[a, at + length : size[a]]))
        theirs = members[b, : size[b]]
        if size[b] > 0 and rng.random() < 0.5:
            at, length = _run(rng, size[b])
            mine = _merge(mine, members[b, at : at + length])
            theirs = np.concatenate((members[b, :at], members[b, at + length : size[b]]))
        theirs = _merge(theirs, given)
        seconds_a, seconds_b, size_a, size_b = seconds[a], seconds[b], size[a], size[b]
        seconds[a] = _group_seconds(mine, tokens, costs[kinds[a]])
        seconds[b] = _group_seconds(theirs, tokens, costs[kinds[b]])
        size[a], size[b] = len(mine), len(theirs)
        trial, over = _value(seconds, size, kinds, starts, helds, gpus, weights, limits)
        if trial > value and rng.random() >= np.exp((value - trial) / (heat * value)):
            seconds[a], seconds[b], size[a], size[b] = seconds_a, seconds_b, size_a, size_b
            continue
        value = trial
        members[a, : size[a]] = mine
        members[b, : size[b]] = theirs
        if over <= 1e-9 and value < best:
            best = value
            best_owner = _owners_of(members, size, n)
    return best_owner, _owners_of(members, size, n)


@njit(cache=True)
def _value(seconds, size, kinds, starts, helds, gpus, weights, limits):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the objective, steeply higher beyond the limits, and by how much these are exceeded."""
    time = cost = 0.0
    for a in range(len(size)):
        if size[a] > 0:
            time = max(time, starts[kinds[a]] + seconds[a])
            cost += gpus[kinds[a]] * (helds[kinds[a]] + seconds[a])
    over = max(time / limits[0] - 1.0, 0.0) + max(cost / limits[1] - 1.0, 0.0)
    return (weights[0] * time + weights[1] * cost) * (1.0 + 20.0 * over), over


@njit(cache=True)
def _owners_of(members, size, n):  # type: ignore[no-untyped-def]  # pragma: no cover
    owner = np.empty(n, dtype=np.int64)
    for a in range(len(size)):
        owner[members[a, : size[a]]] = a
    return owner


def _owners(problem: Problem, partition: Partition, kinds: IntArray) -> IntArray:
    """Return the actor of each response in admission order, for a partition over the given actors."""
    free = {kind: np.flatnonzero(kinds == kind).tolist() for kind in set(kinds.tolist())}
    owner = np.zeros(len(problem), dtype=np.int64)
    for rows, kind in zip(partition.groups, partition.kinds, strict=True):
        owner[problem.rank[rows]] = free[kind].pop(0)
    return owner


def _partition(problem: Problem, owner: IntArray, kinds: IntArray) -> Partition:
    groups = [problem.order[owner == actor] for actor in range(len(kinds))]
    used = [actor for actor in range(len(kinds)) if len(groups[actor])]
    return Partition(tuple(groups[a] for a in used), tuple(int(kinds[a]) for a in used))


def solve(
    problem: Problem,
    objective: Objective,
    *,
    seconds: float = 5.0,
    moves: int | None = None,
    seed: int = 0,
    hint: Partition | None = None,
    gap: float = 1e-4,
    tighten: bool = False,
) -> Solution:
    """Search a partition with a small objective, and prove how far it is from the best.

    Even splits and threshold sweeps begin, annealing over moves and swaps of runs of the sorted responses goes on,
    every group timed by the replay's kernel. The bound is that of :class:`Relaxation`.

    Parameters
    ----------
    problem, objective
        What is split, and what is minimised.
    seconds
        Time limit of the search; the first partition and its bound are always computed. With 0, that is all.
    moves
        Moves of the annealing; None: as many as the time allows. Given, and with time enough, the result
        depends on the seed alone.
    seed
        Of the annealing.
    hint
        A partition to start from as well.
    gap
        The search ends at this gap.
    tighten
        Spend half of the time on a tighter bound (:class:`~rlhfless.solver.pricing.PricedRelaxation`), where
        there is more to gain than from the search: iteration times that are not affine, and waves.

    """
    began = time.perf_counter()
    relaxation = Relaxation(problem)
    progress: list[tuple[float, float, float]] = []
    kinds = _slots(problem)
    known = even_splits(problem) + ([] if hint is None else [hint])
    earliest = relaxation.seconds
    if earliest > objective.time_limit * (1 + 1e-4):
        return _infeasible(
            began,
            f"time limit: no partition ends before {earliest:.6g} s, the limit is {objective.time_limit:.6g} s",
        )
    latest = min(max((problem.evaluate(p)[0] for p in known), default=2 * earliest), objective.time_limit)
    known += threshold_sweep(problem, np.geomspace(earliest, max(latest, earliest), _SWEEP))
    if not known:
        known = [_first_fit(problem, kinds)]
    values = [float(objective.value(*problem.evaluate(p))) for p in known]
    best, value = known[int(np.argmin(values))], min(values)
    bound, promising = relaxation.minimum(objective, upper=value, precision=min(max(gap, 1e-7), 1e-4))
    if bound == inf:
        cheapest = relaxation.gpu_seconds(objective.time_limit)
        return _infeasible(
            began,
            f"cost limit: within the time limit no partition costs less than {cheapest:.6g} GPU seconds, "
            f"the limit is {objective.cost_limit:.6g}",
        )
    # Where the relaxation is at its best, and a little later: items cannot be cut.
    later = promising * (1 + np.concatenate(([0.0], np.geomspace(1e-5, 0.03, 16))))
    for split in threshold_sweep(problem, np.minimum(later, objective.time_limit)):
        trial = float(objective.value(*problem.evaluate(split)))
        if trial < value:
            best, value = split, trial
    progress.append((time.perf_counter() - began, value, bound))

    def good_enough() -> bool:
        return value < inf and objective.gap(value, bound) <= gap

    if seconds > 0 and not good_enough():
        # Later than this, time alone makes a partition worse than the best known.
        cheapest = objective.cost_weight * relaxation.gpu_seconds(objective.time_limit)
        spare = value - objective.offset - cheapest
        worth = spare / objective.time_weight if objective.time_weight else inf
        edges = _EDGES if len(problem) <= _FEW_RESPONSES else 3 * _EDGES // 4
        blocks = contiguous(problem, objective, edges=edges, latest=worth)
        trial = inf if blocks is None else float(objective.value(*problem.evaluate(blocks)))
        if blocks is not None and trial < value:
            best, value = blocks, trial
            progress.append((time.perf_counter() - began, value, bound))

    tokens = _arrays(problem)
    costs = tuple(kernel_costs(kind.profile, problem.engine) for kind in problem.kinds)
    starts, helds, gpus = _kind_values(problem)
    weights = np.array([objective.time_weight, objective.cost_weight])
    limits = np.array([objective.time_limit, objective.cost_limit])
    owner, done, rng = _owners(problem, best, kinds), 0, np.random.default_rng(seed)
    searching = seconds / 2 if tighten else seconds
    while not good_enough() and (moves is None or done < moves) and time.perf_counter() - began < searching:
        chunk = _CHUNK if moves is None else min(_CHUNK, moves - done)
        spent = time.perf_counter() - began
        # The temperature ends a thousand times lower, after all moves or at the end of the time.
        share = done / moves if moves is not None else spent / searching
        heat = (_HEAT if len(problem) <= _FEW_RESPONSES else 0.1 * _HEAT) * 1e-3**share
        found, owner = _anneal(
            rng, chunk, owner, kinds, starts, helds, gpus, weights, limits, tokens, costs, heat
        )
        done += chunk
        partition = _partition(problem, found, kinds)
        trial = float(objective.value(*problem.evaluate(partition)))
        if trial < value:
            best, value = partition, trial
            progress.append((time.perf_counter() - began, value, bound))
    times: tuple[float, ...] = (problem.evaluate(best)[0],)
    left, round_seconds = began + seconds - time.perf_counter(), 0.1 * seconds
    while tighten and not good_enough() and left > round_seconds and len(times) <= _ROUNDS:
        # Prices near the best partition first, then wherever the bound is lowest.
        priced = PricedRelaxation(problem, times, best, search_seconds=left / (2 * _ROUNDS))
        if not priced.worth_it:
            break
        tighter, promising = priced.minimum(objective, upper=value, precision=5e-4)
        bound = max(bound, tighter)
        progress.append((time.perf_counter() - began, value, bound))
        times = (*times, promising)
        before, left = left, began + seconds - time.perf_counter()
        round_seconds = before - left
    if value == inf:
        return Solution(
            "unknown", None, inf, inf, inf, bound, inf, time.perf_counter() - began, tuple(progress),
            "no partition within the limits was found in the time",
        )  # fmt: skip
    return Solution.of(problem, objective, best, bound, time.perf_counter() - began, progress, resolution=gap)


def _infeasible(began: float, reason: str) -> Solution:
    return Solution("infeasible", None, inf, inf, inf, inf, inf, time.perf_counter() - began, (), reason)


def _first_fit(problem: Problem, kinds: IntArray) -> Partition:
    """Return everything on the actor with most memory, which holds every response."""
    rooms = [problem.kinds[kind].profile.actor.kv_capacity_tokens for kind in kinds.tolist()]
    return Partition((problem.order,), (int(kinds[int(np.argmax(rooms))]),))
