"""How long planning takes: run ``python tests/bench_planning.py``. Nothing here is asserted.

Prints the median time of a whole plan (prediction, assignment, decode times of the chosen actors) for every
shipped policy's assignment, at 512 responses and 80 actors, with the number of actors given and with a sweep
over 1 to 80 actors; then the curve of each policy up to 100,000 responses.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from factories import batch, profile, setting, shipped_policies, view

from rlhfless.policies import Composed, FixedActors, MinMaxScore, Policy, StepView

SIZES = (512, 2048, 8192, 32_768, 100_000)


def step(n: int) -> StepView:
    """Return the view of a step with four responses to each prompt and room for 80 actors."""
    lengths = np.random.default_rng(0).lognormal(6, 0.8, n).astype(np.int64) + 1
    trace = batch([100] * n, lengths.tolist(), (np.arange(n) // 4).tolist(), answer_tokens=lengths)
    cost = profile(actor__max_running=256, actor__kv_capacity_tokens=10_000_000)
    seen = view(trace, setting(cost, nodes=20, learner_gpus=8), cap=int(lengths.max()))
    return replace(seen, true_tokens=lengths)


def milliseconds(policy: Policy, seen: StepView, repeats: int) -> float:
    """Return the median time of a plan."""
    policy.plan(seen)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        policy.plan(seen)
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e3


def main() -> None:
    """Measure and print."""
    policies = {name: p for name, p in shipped_policies().items() if isinstance(p, Composed)}
    small = step(512)
    print("median ms of a plan at 512 responses:  80 actors   sweep over 1..80")
    for name, policy in policies.items():
        fixed = replace(policy, scale=FixedActors(80))
        swept = replace(policy, scale=MinMaxScore())
        print(f"{name:36} {milliseconds(fixed, small, 21):11.2f} {milliseconds(swept, small, 5):18.2f}")
    print("\nmedian ms of a plan as shipped, by responses: " + "".join(f"{n:>10,}" for n in SIZES))
    views = [step(n) for n in SIZES]
    for name, policy in policies.items():
        times = "".join(f"{milliseconds(policy, seen, 3):10.1f}" for seen in views)
        print(f"{name:46}{times}")


if __name__ == "__main__":
    main()
