"""How fast the replay is: run ``make bench``. Nothing here is asserted; the tests assert the ratios.

Prints the event-driven decode against the token-by-token one of the tests, its growth with the number of
responses, and, where RLHFLESS_DATA names the public data, the closed batch that Vidur simulated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from factories import profile
from reference import Response, TokenByToken

from rlhfless.models.decode import DecodePool, decode_one
from rlhfless.models.profile import Profile
from rlhfless.scripts.build_profiles import vidur_profile


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


def token_by_token(cost: Profile, prompt: np.ndarray, length: np.ndarray, group: np.ndarray) -> None:
    """Run the tests' reference on one actor."""
    rows = zip(prompt.tolist(), length.tolist(), group.tolist(), strict=True)
    TokenByToken(cost).run([Response(*row) for row in rows])


def on_actors(cost: Profile, prompt: np.ndarray, length: np.ndarray, group: np.ndarray, actors: int) -> float:
    """Deal a batch round robin over actors and return when the last one ends."""
    pool = DecodePool(cost, prompt, length, group, actors)
    for actor in range(actors):
        pool.add(actor, np.arange(actor, len(prompt), actors))
    return max(pool.run(actor) for actor in range(actors))


def closed_batch(folder: Path) -> None:
    """Replay the batch that Vidur simulated, on its own cost tables."""
    table = pl.read_csv(folder / "closed_batch_512.csv")
    prompt, length = table["num_prefill_tokens"].to_numpy(), table["num_decode_tokens"].to_numpy()
    group = np.arange(len(prompt))
    for row in pl.read_csv(folder / "makespans.csv").iter_rows(named=True):
        device, model, parallel = row["name"].split("_")[:3]
        cost, _ = vidur_profile(
            folder, device, f"meta-llama/Llama-2-{model}-hf", int(parallel.removeprefix("tp"))
        )
        replicas = row["replicas"]
        work = partial(on_actors, cost, prompt, length, group, replicas)
        makespan, fast = work(), seconds(work)
        started = time.perf_counter()
        for r in range(replicas):
            token_by_token(cost, prompt[r::replicas], length[r::replicas], group[r::replicas])
        slow = time.perf_counter() - started
        print(
            f"{row['name']}: {makespan:.2f} s, Vidur {row['makespan_s']:.2f} s "
            f"({makespan / row['makespan_s'] - 1:+.2%}); {fast * 1e3:.2f} ms by events, {slow * 1e3:.0f} ms token "
            f"by token, ratio {slow / fast:.0f}"
        )


def main() -> None:
    """Measure and print."""
    cost = profile(actor__max_running=256, actor__kv_capacity_tokens=10_000_000)
    one = batch(5000)
    decode_one(cost, *one)  # compile
    fast = seconds(partial(decode_one, cost, *one))
    slow = seconds(partial(token_by_token, cost, *one), repeats=1)
    print(
        f"one actor, 5,000 responses of mean length 500: {fast * 1e3:.2f} ms by events, "
        f"{slow * 1e3:.0f} ms token by token, ratio {slow / fast:.0f}"
    )
    for n in (10_000, 100_000, 1_000_000):
        print(
            f"64 actors, {n:,} responses: {seconds(partial(on_actors, cost, *batch(n), 64), repeats=3):.3f} s"
        )
    data = os.environ.get("RLHFLESS_DATA")
    if data:
        closed_batch(Path(data) / "vidur_closed_batch")


if __name__ == "__main__":
    main()
