"""How fast the replay is: run ``make bench``. Nothing here is asserted; the tests assert the ratios.

Prints the event-driven decode against the token-by-token one of the tests, its growth with the number of
responses, and the time of whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from factories import profile
from reference import Response, TokenByToken
from rlhfless.models.decode import DecodePool, decode_one


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of several runs."""
    best = np.inf
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def batch(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return prompt tokens, response tokens (mean 500) and groups of four."""
    rng = np.random.default_rng(0)
    return rng.integers(50, 200, n), rng.geometric(1 / 500, n), np.arange(n) // 4


def main() -> None:
    """Measure and print."""
    cost = profile(actor__max_running=256, actor__kv_capacity_tokens=10_000_000)
    prompt, length, group = batch(5000)
    decode_one(cost, prompt, length, group)  # compile
    fast = seconds(lambda: decode_one(cost, prompt, length, group))

    def token_by_token() -> None:
        rows = zip(prompt.tolist(), length.tolist(), group.tolist(), strict=True)
        TokenByToken(cost).run([Response(*row) for row in rows])

    slow = seconds(token_by_token, repeats=1)
    print(
        f"one actor, 5,000 responses of mean length 500: {fast * 1e3:.2f} ms by events, "
        f"{slow * 1e3:.0f} ms token by token, ratio {slow / fast:.0f}"
    )
    for n in (10_000, 100_000, 1_000_000):
        prompt, length, group = batch(n)

        def run(n: int = n) -> None:
            pool = DecodePool(cost, prompt, length, group, 64)
            for actor in range(64):
                pool.add(actor, np.arange(actor, n, 64))
                pool.run(actor)

        print(f"64 actors, {n:,} responses: {seconds(run, repeats=3):.3f} s")


if __name__ == "__main__":
    main()
