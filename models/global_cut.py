"""Global cut: at one instant all actors stop, and the responses that are left gather on a few of them.

RLHFuse (arXiv 2409.13221, NSDI'25) cuts when a share of the batch is left, best about a fifth, and frees the
other actors' GPUs for the preparation stages; Weave (RollMux, arXiv 2512.11306) moves the rest to a few GPUs
when about 80 % are done.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from rlhfless.models.decode import DecodePool
from rlhfless.models.moves import Decoded, Move, Transfer, run_to_end, send
from rlhfless.models.plan import Migration

#: RLHFuse keeps a batch in the range in which decode latency stays flat, and gives no number. Ours: until an
#: iteration takes twice that of one response, where the roofline bends from reading weights to computing.
FLAT = 2.0


def global_cut(pool: DecodePool, rule: Migration, transfer: Transfer, kv_bytes_per_token: float) -> Decoded:
    """Run all actors; when ``rule.threshold`` of the batch is complete, gather the rest on ``rule.keep`` actors.

    The actors that stay are those with most unfinished responses, which moves least. Every other actor stops
    at its next iteration boundary, sends its responses one target after the other, and is released. Targets
    fill evenly. Nothing happens when the actors with unfinished responses are no more than those that stay.
    """
    n = len(pool)
    rows = np.flatnonzero(pool.owner >= 0)
    ahead = pool.copy()
    release = np.array([ahead.run(actor) for actor in range(n)])
    needed = math.ceil(rule.threshold * len(rows) - 1e-9)
    now = float(np.sort(ahead.finish[rows])[max(needed, 1) - 1])
    left = rows[ahead.finish[rows] > now]
    unfinished = np.bincount(pool.owner[left], minlength=n)
    clocks = [pool.run(actor, until=now) for actor in range(n)]
    keep = rule.keep or survivors(pool, left)
    if keep >= np.count_nonzero(unfinished):
        return run_to_end(pool)
    stay = np.argsort(-unfinished, kind="stable")[:keep].tolist()
    load = [(int(unfinished[actor]), actor) for actor in stay]
    heapq.heapify(load)
    moves: list[Move] = []
    for source in range(n):
        if source in stay:
            continue
        active, waiting = pool.remove(source)
        moved = np.concatenate((active, waiting))
        if not len(moved):
            continue
        chosen = np.empty(len(moved), dtype=np.int64)
        for place in range(len(moved)):
            count, chosen[place] = load[0]
            heapq.heapreplace(load, (count + 1, int(chosen[place])))
        sending = send(
            pool,
            rule,
            transfer,
            kv_bytes_per_token,
            source,
            (active, waiting),
            chosen,
            max(clocks[source], now),
        )
        release[source] = sending[-1].ready
        moves += sending
    for move in sorted(moves, key=lambda move: move.ready):
        pool.add(move.target, move.responses, ready=move.ready)
    for actor in stay:
        release[actor] = pool.run(actor)
    freed = tuple(actor for actor in range(n) if actor not in stay)
    return Decoded(release, tuple(moves), now, freed)


def survivors(pool: DecodePool, left: np.ndarray) -> int:
    """Return how many actors RLHFuse keeps for the responses that are left.

    The larger of what keeps each one's batch where an iteration takes at most :data:`FLAT` times that of one
    response, and what the KV of the responses needs at the instant of the cut.
    """
    (profile, *_) = pool.profiles
    base, _ = profile.decode_tables
    flat = int(np.flatnonzero(base[1:] <= FLAT * base[1])[-1]) + 1
    tokens = int((pool.prompt_tokens[left] + pool.generated[left]).sum())
    return max(math.ceil(len(left) / flat), math.ceil(tokens / profile.actor.kv_capacity_tokens), 1)
