"""Online dispatch: actors take their next response from one queue whenever they have a free slot.

Seer (arXiv 2511.14617, OSDI'26) divides responses into chunks; between two chunks a response rests in a KV pool
that every actor reaches, and may go on anywhere. One response of every prompt, the probe, goes first, those
that have generated least before the others; the rest follow by the longest response seen of their prompt so
far, unknown ones counting as the cap. Its speculation is not modelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlhfless.models.decode import DecodePool
from rlhfless.models.moves import Decoded, Move, Transfer
from rlhfless.models.plan import Migration
from rlhfless.traces.trace import IntArray

_UNKNOWN = 2**62


class _Queue:
    """Waiting responses in Seer's order. Entries of a prompt whose estimate has changed since are skipped."""

    def __init__(self, pool: DecodePool, true_tokens: IntArray, order: IntArray, chunk: int | None) -> None:
        self._pool = pool
        self._true = true_tokens
        self._chunk = chunk
        self._rank = np.empty(len(true_tokens), dtype=np.int64)
        self._rank[order] = np.arange(len(order))
        _, first = np.unique(pool.group[order], return_index=True)
        self._probe = np.zeros(len(true_tokens), dtype=np.bool_)
        self._probe[order[first]] = True
        groups = int(pool.group.max()) + 1
        self._longest = np.zeros(groups, dtype=np.int64)
        self._version = np.zeros(groups, dtype=np.int64)
        self._members: list[set[int]] = [set() for _ in range(groups)]
        self._heap: list[tuple[int, int, int, int, int]] = []
        self.unfinished = len(order)
        self.waiting = 0
        for r in order.tolist():
            self._put(r)

    def _put(self, r: int) -> None:
        left = self._true[r]
        if self._chunk is not None:
            left = min(left, self._pool.generated[r] + self._chunk)
        self._pool.response_tokens[r] = left
        self._members[self._pool.group[r]].add(r)
        self.waiting += 1
        self._push(r)

    def _push(self, r: int) -> None:
        group = self._pool.group[r]
        if self._probe[r]:
            key = (0, int(self._pool.generated[r]))
        else:
            key = (1, -int(self._longest[group]) if self._longest[group] else -_UNKNOWN)
        heapq.heappush(self._heap, (*key, int(self._rank[r]), r, int(self._version[group])))

    def ended(self, r: int) -> None:
        """Take back a response whose chunk has ended, or note that it is complete."""
        if self._pool.generated[r] < self._true[r]:
            self._put(r)
            return
        self.unfinished -= 1
        group = self._pool.group[r]
        if self._true[r] > self._longest[group]:
            self._longest[group] = self._true[r]
            self._version[group] += 1
            for other in sorted(self._members[group]):
                self._push(other)

    def take(self, most: int) -> list[int]:
        """Return up to ``most`` responses in order of priority."""
        taken: list[int] = []
        while self.waiting and len(taken) < most:
            *_, r, version = heapq.heappop(self._heap)
            group = self._pool.group[r]
            if r in self._members[group] and (self._probe[r] or version == self._version[group]):
                self._members[group].discard(r)
                self.waiting -= 1
                taken.append(r)
        return taken


def online_dispatch(
    pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float
) -> Decoded:
    """Run all actors on one queue, into which the actors' planned responses go in turn.

    An actor runs at most its even share of what is unfinished. A chunk that goes on at another actor brings its
    KV over the link, or the new actor recomputes it; a prompt prefilled for one actor is there for that actor
    only. An actor is released when it has nothing to run and nothing waits.
    """
    starts = [pool.counts(actor).clock for actor in range(len(pool))]
    most = pool.max_running.tolist()
    queues = [pool.remove(actor)[1] for actor in range(len(pool))]
    true_tokens = pool.response_tokens
    pool.response_tokens = true_tokens.copy()
    last = np.full(len(true_tokens), -1, dtype=np.int64)
    for actor, rows in enumerate(queues):
        last[rows] = actor
    queue = _Queue(pool, true_tokens, _in_turn(queues), rule.chunk_tokens)
    running: list[list[int]] = [[] for _ in queues]
    release = np.array(starts, dtype=np.float64)
    moves: list[Move] = []
    clocks = [(start, actor) for actor, start in enumerate(starts)]
    heapq.heapify(clocks)
    while clocks:
        now, actor = heapq.heappop(clocks)
        ended = [r for r in running[actor] if np.isfinite(pool.finish[r])]
        running[actor] = [r for r in running[actor] if not np.isfinite(pool.finish[r])]
        for r in ended:
            queue.ended(r)
        share = -(-queue.unfinished // (len(clocks) + 1))
        for r in queue.take(min(share, most[actor]) - len(running[actor])):
            source, tokens, ready = int(last[r]), 0, now
            if pool.generated[r]:
                tokens = int(pool.prompt_tokens[r] + pool.generated[r])
            elif source == actor:
                tokens = int(pool.cached[r])
            if source != actor and tokens and rule.kv == "transfer":
                ready += transfer(source, actor, tokens * kv_bytes_per_token)
                moves.append(Move(source, actor, np.array([r]), tokens * kv_bytes_per_token, now, ready))
            elif source != actor:
                tokens = 0
            pool.cached[r] = tokens
            pool.finish[r] = np.inf
            pool.add(actor, np.array([r]), ready)
            running[actor].append(r)
            last[r] = actor
        if running[actor]:
            heapq.heappush(clocks, (pool.run(actor, finished=pool.counts(actor).finished + 1), actor))
        else:
            release[actor] = now
    pool.response_tokens = true_tokens
    return Decoded(release, tuple(moves))


def _in_turn(queues: Sequence[IntArray]) -> IntArray:
    """Return the rows of several queues, one from each in turn."""
    rank = np.concatenate([np.arange(len(rows)) for rows in queues])
    rows = np.concatenate(list(queues))
    return rows[np.argsort(rank, kind="stable")]
