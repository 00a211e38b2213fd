"""What the rules about stragglers have in common: moves of responses between actors, and their result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhfless.models.decode import DecodePool
from rlhfless.models.plan import Migration
from rlhfless.traces.trace import FloatArray, IntArray

#: Seconds to send so many bytes from one actor to another.
Transfer = Callable[[int, int, float], float]


@dataclass(frozen=True)
class Move:
    """Responses that left ``source`` for ``target``.

    ``sent`` is when they stopped, ``ready`` when the target can admit them; ``kv_bytes`` went over the link.
    """

    source: int
    target: int
    responses: IntArray
    kv_bytes: float
    sent: float
    ready: float


@dataclass(frozen=True)
class Decoded:
    """When every actor is released, in seconds, and what moved.

    ``cut`` is when a global cut happened, if one did, and ``freed`` the actors that it ended.
    """

    release: FloatArray
    moves: tuple[Move, ...]
    cut: float | None = None
    freed: tuple[int, ...] = ()


def run_to_end(pool: DecodePool) -> Decoded:
    """Run all actors to their end; nothing moves."""
    return Decoded(np.array([pool.run(actor) for actor in range(len(pool))]), ())


def send(
    pool: DecodePool,
    rule: Migration,
    transfer: Transfer,
    kv_bytes_per_token: float,
    source: int,
    removed: tuple[IntArray, IntArray],
    chosen: IntArray,
    sent: float,
) -> list[Move]:
    """Send responses that were removed from an actor at ``sent`` to their targets, one target after the other.

    ``removed`` are the running and the waiting ones (:meth:`DecodePool.remove`), ``chosen`` the target of each of
    both in that order. With ``transfer`` running ones bring the KV of prompt and tokens and waiting ones what
    the actor was sent for them; what is still on its way to the source cannot leave it yet. The caller adds
    the responses to their targets.
    """
    active, waiting = removed
    moved = np.concatenate((active, waiting))
    moves = []
    clock = sent
    for target in np.unique(chosen).tolist():
        rows = moved[chosen == target]
        tokens = np.zeros(len(rows), dtype=np.int64)
        if rule.kv == "transfer":
            whole = pool.prompt_tokens[rows] + pool.generated[rows]
            tokens = np.where(np.isin(rows, active), whole, pool.cached[rows])
        sent_bytes = float(tokens.sum()) * kv_bytes_per_token
        clock = max(clock, float(pool.ready[rows].max()))
        if sent_bytes:
            clock += transfer(source, target, sent_bytes)
        moves.append(Move(source, target, rows, sent_bytes, sent, clock))
        pool.cached[rows] = tokens
    return moves
