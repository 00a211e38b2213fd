"""Decoding a step on several actors, with the rules that move stragglers between them.

Actors are independent between two moves. A rule therefore looks ahead: it runs every actor to its end,
searches the completion times for the first instant at which it acts, rewinds the actors concerned to it,
moves the responses, and looks ahead again. It decides from what a controller can see at that instant:
completions so far and tokens generated, never a length that is still to come. One exception: when another
actor's completion opens the slots, the cut actor is inside an iteration; slots are taken for the responses
that are unfinished at the end of that iteration, not at its beginning.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit

from rlhfless.models.decode import DecodePool
from rlhfless.models.dispatch import online_dispatch
from rlhfless.models.global_cut import global_cut
from rlhfless.models.moves import Decoded, Move, Transfer, run_to_end, send
from rlhfless.models.plan import Migration
from rlhfless.traces.trace import IntArray


def decode_actors(
    pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float
) -> Decoded:
    """Run all actors of the pool to their end under a migration rule."""
    if rule.rule == "none" or len(pool) < 2:
        return run_to_end(pool)
    if rule.rule == "global":
        return global_cut(pool, rule, transfer, kv_bytes_per_token)
    if rule.rule == "dispatch":
        return online_dispatch(pool, rule, transfer, kv_bytes_per_token)
    return _local_cut(pool, rule, transfer, kv_bytes_per_token)


@njit(cache=True)
def _first_cut(owner, assigned, needed, slots, capacity, cuttable, wait, partial, since, times):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the last completion of the first instant from ``since`` on at which an actor is cut, and the actor.

    ``owner`` is each completion's actor in time order. An actor may be cut from its ``needed``-th completion
    on, as soon as the open slots of the other running actors with no less ``capacity`` hold its unfinished
    responses; unless ``wait``, only at the instant of that completion. Among several, the one with the fewest
    left goes first.
    """
    n = len(assigned)
    left = assigned.copy()
    done = np.zeros(n, dtype=np.int64)
    due = 0
    for event in range(len(owner)):
        j = owner[event]
        left[j] -= 1
        done[j] += 1
        if cuttable[j] and done[j] == needed[j]:
            due += 1
        # A controller sees an instant whole: all completions at one time come before its decision.
        if due == 0 or times[event] < since or (event + 1 < len(owner) and times[event + 1] == times[event]):
            continue
        best = -1
        for i in range(n):
            if cuttable[i] and done[i] >= needed[i] and left[i] > 0:
                room = 0
                for k in range(n):
                    if k != i and left[k] > 0 and capacity[k] >= capacity[i]:
                        room += max(slots[k] - left[k], 0)
                if (left[i] <= room or (partial and room > 0)) and (best < 0 or left[i] < left[best]):
                    best = i
        if best >= 0:
            return event, best
        if not wait:
            for i in range(n):
                if cuttable[i] and done[i] >= needed[i]:
                    cuttable[i] = False
    return -1, -1


def _local_cut(pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float) -> Decoded:
    n = len(pool)
    original = np.bincount(pool.owner, minlength=n)
    assigned = original.copy()
    slots = np.minimum(original, pool.max_running) if rule.slots == "assigned" else pool.max_running
    capacity = pool.capacity
    cuttable = original > 0
    if rule.keep_first:
        cuttable[0] = False
    release = np.zeros(n)
    final = pool.copy()
    for actor in range(n):
        release[actor] = final.run(actor)
    finish = final.finish
    since = -np.inf
    moves: list[Move] = []
    while cuttable.any():
        order = np.argsort(finish, kind="stable")
        times, owner = finish[order], pool.owner[order]
        counted = assigned if rule.count_moved else original
        needed = np.maximum(np.ceil(rule.threshold * counted - 1e-9).astype(np.int64), 1)
        event, source = _first_cut(
            owner,
            assigned,
            needed,
            slots,
            capacity,
            cuttable,
            rule.wait_for_slots,
            rule.partial,
            since,
            times,
        )
        if event < 0:
            break
        since = now = float(times[event])
        left = assigned - np.bincount(owner[: event + 1], minlength=n)
        open_slots = np.where(left > 0, np.maximum(slots - left, 0), 0)
        # A response fits where as much is held as where it is.
        open_slots[capacity < capacity[source]] = 0
        open_slots[source] = 0
        whole = left[source] <= open_slots.sum()
        if whole:
            cuttable[source] = False
        # It takes nothing in any more, even while it finishes the iteration under way.
        slots[source] = 0
        # Not before now: it may have been idle, waiting for KV that is under way.
        sent = max(pool.run(source, until=now), now)
        active, waiting = pool.remove(
            source, None if whole else _most_advanced(pool, source, int(open_slots.sum()))
        )
        moved = np.concatenate((active, waiting))
        if not len(moved):
            # What was left ended in the iteration under way, and the actor with it.
            cuttable[source] = False
            slots[source] = 0
            release[source] = sent
            finish[pool.owner == source] = pool.finish[pool.owner == source]
            continue
        chosen = _targets(pool, rule, moved, open_slots, left)
        sending = send(pool, rule, transfer, kv_bytes_per_token, source, (active, waiting), chosen, sent)
        for move in sending:
            pool.run(move.target, until=now)
            pool.add(move.target, move.responses, ready=move.ready)
            assigned[move.target] += len(move.responses)
        moves += sending
        assigned[source] -= len(moved)
        ahead = pool.copy()
        changed = set(chosen.tolist()) | (set() if whole else {source})
        for actor in changed:
            release[actor] = ahead.run(actor)
            own = pool.owner == actor
            finish[own] = ahead.finish[own]
        release[source] = max(sending[-1].ready, 0.0 if whole else release[source])
    for actor in range(n):
        pool.run(actor)
    return Decoded(release, tuple(moves))


def _most_advanced(pool: DecodePool, source: int, count: int) -> IntArray:
    """Return up to ``count`` unfinished responses of an actor, those that have generated most."""
    own = np.flatnonzero((pool.owner == source) & ~np.isfinite(pool.finish))
    return own[np.argsort(-pool.generated[own], kind="stable")[:count]]


def _targets(
    pool: DecodePool, rule: Migration, moved: IntArray, open_slots: IntArray, left: IntArray
) -> IntArray:
    """Return the target of each moved response; those that have generated most choose first."""
    weight = open_slots if rule.target == "most_slots" else left
    heap = [(-int(weight[j]), int(j)) for j in np.flatnonzero(open_slots)]
    heapq.heapify(heap)
    room = open_slots.copy()
    chosen = np.empty(len(moved), dtype=np.int64)
    for position in np.argsort(-pool.generated[moved], kind="stable").tolist():
        key, j = heap[0]
        chosen[position] = j
        room[j] -= 1
        if room[j] == 0:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (key + 1, j) if rule.target == "most_slots" else (key - 1, j))
    return chosen
