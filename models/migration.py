"""Decoding a step on several actors, with the rules that move stragglers between them.

Actors are independent between two moves. A rule therefore looks ahead: it runs every actor to its end,
searches the completion times for the first instant at which it acts, rewinds the actors concerned to it,
moves the responses, and looks ahead again. It decides from what a controller can see at that instant:
completions so far and tokens generated, never a length that is still to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from rlhfless.models.decode import DecodePool
from rlhfless.models.plan import Migration
from rlhfless.traces.trace import FloatArray, IntArray


@dataclass(frozen=True)
class Move:
    """Responses that left ``source`` for ``target``: ``sent`` is when they stopped, ``ready`` when the target can take them."""

    source: int
    target: int
    responses: IntArray
    kv_bytes: float
    sent: float
    ready: float


@dataclass(frozen=True)
class Decoded:
    """When every actor is released, in seconds, and what moved."""

    release: FloatArray
    moves: tuple[Move, ...]


#: Seconds to send so many bytes from one actor to another.
Transfer = Callable[[int, int, float], float]


def decode_actors(
    pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float
) -> Decoded:
    """Run all actors of the pool to their end under a migration rule."""
    n = len(pool)
    if rule.rule == "none" or n < 2:
        return Decoded(np.array([pool.run(actor) for actor in range(n)]), ())
    return _local_cut(pool, rule, transfer, kv_bytes_per_token)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_cut(owner, assigned, needed, slots, cuttable, since, times):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return the first completion from ``since`` on at which some actor may be cut, and that actor.

    ``owner`` is each completion's actor in time order. An actor may be cut from its ``needed``-th completion
    on, as soon as the open slots of the other running actors hold its unfinished responses. Among several,
    the one with the fewest left goes first.
    """
    n = len(assigned)
    left = assigned.copy()
    done = np.zeros(n, dtype=np.int64)
    free = 0
    for j in range(n):
        if left[j] > 0:
            free += max(slots[j] - left[j], 0)
    due = 0
    for event in range(len(owner)):
        j = owner[event]
        free -= max(slots[j] - left[j], 0)
        left[j] -= 1
        done[j] += 1
        if left[j] > 0:
            free += max(slots[j] - left[j], 0)
        if cuttable[j] and done[j] == needed[j]:
            due += 1
        if due == 0 or times[event] < since:
            continue
        best = -1
        for i in range(n):
            if cuttable[i] and done[i] >= needed[i] and left[i] > 0:
                own = max(slots[i] - left[i], 0)
                if left[i] <= free - own and (best < 0 or left[i] < left[best]):
                    best = i
        if best >= 0:
            return event, best
    return -1, -1


def _local_cut(pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float) -> Decoded:
    n = len(pool)
    original = np.bincount(pool.owner, minlength=n)
    assigned = original.copy()
    slots = (
        np.minimum(original, pool.profile.actor.max_running)
        if rule.slots == "assigned"
        else np.full(n, pool.profile.actor.max_running)
    )
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
        if rule.wait_for_slots:
            event, source = _first_cut(owner, assigned, needed, slots, cuttable, since, times)
        else:
            event, source = _cut_at_threshold(owner, assigned, needed, slots, cuttable)
        if event < 0:
            break
        now = float(times[event])
        left = assigned - np.bincount(owner[: event + 1], minlength=n)
        cuttable[source] = False
        since = now
        sent = pool.run(source, until=now)
        active, waiting = pool.remove(source)
        moved = np.concatenate((active, waiting))
        if not len(moved):
            # What was left ended in the iteration under way.
            release[source] = sent
            finish[pool.owner == source] = pool.finish[pool.owner == source]
            continue
        open_slots = np.where(left > 0, np.maximum(slots - left, 0), 0)
        open_slots[source] = 0
        chosen = _targets(pool, rule, moved, open_slots, left)
        clock = sent
        for target in np.unique(chosen):
            rows = moved[chosen == target]
            if rule.kv == "transfer":
                tokens = np.where(
                    np.isin(rows, active), pool.prompt_tokens[rows] + pool.generated[rows], pool.cached[rows]
                )
            else:
                tokens = np.zeros(len(rows), dtype=np.int64)
            sent_bytes = float(tokens.sum()) * kv_bytes_per_token
            # One sender: its transfers take turns.
            clock += transfer(source, int(target), sent_bytes) if sent_bytes else 0.0
            moves.append(Move(source, int(target), rows, sent_bytes, sent, clock))
            pool.run(int(target), until=now)
            pool.cached[rows] = tokens
            pool.add(int(target), rows, ready=clock)
            assigned[target] += len(rows)
        assigned[source] -= len(moved)
        release[source] = clock
        ahead = pool.copy()
        for target in np.unique(chosen):
            release[target] = ahead.run(int(target))
            own = pool.owner == target
            finish[own] = ahead.finish[own]
    for actor in range(n):
        pool.run(actor)
    return Decoded(release, tuple(moves))


def _cut_at_threshold(
    owner: IntArray, assigned: IntArray, needed: IntArray, slots: IntArray, cuttable: np.ndarray
) -> tuple[int, int]:
    """Return the first completion that reaches an actor's threshold while slots are open, and that actor."""
    left = assigned.copy()
    done = np.zeros(len(assigned), dtype=np.int64)
    for event, j in enumerate(owner.tolist()):
        left[j] -= 1
        done[j] += 1
        if not (cuttable[j] and done[j] == needed[j]):
            continue
        free = np.where(left > 0, np.maximum(slots - left, 0), 0)
        if left[j] > 0 and left[j] <= free.sum() - free[j]:
            return event, j
        cuttable[j] = False
    return -1, -1


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
