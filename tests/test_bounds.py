"""Lower bounds: below every plan there is, and reached where they should be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from factories import Case, batch, cases, profile, setting, view
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlhfless.models.decode import decode_one
from rlhfless.models.plan import LowerBound
from rlhfless.models.profile import Profile
from rlhfless.solver.bounds import step_lower_bound
from rlhfless.traces.errors import InputError

FREE_PREFILL = {"gpus": 2, "token_seconds": 0.0, "max_batch_tokens": 4096}
BELOW = 1 + 1e-9


def bound_of(cost: Profile, prompt: list[int], length: list[int], actors: int) -> LowerBound:
    """Return the bound for a step on a cluster that holds so many actors."""
    where = setting(cost, nodes=1, gpus_per_node=actors * cost.actor.gpus, learner_gpus=1)
    step = batch(prompt, length)
    return step_lower_bound(view(step, where), step.response_tokens)


def optimum(cost: Profile, prompt: list[int], length: list[int], actors: int) -> tuple[float, float]:
    """Return the least generation time and the least GPU seconds over all assignments and orders."""
    prompts, lengths = np.array(prompt), np.array(length)
    fastest, cheapest = np.inf, np.inf
    seen: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(length))):
        for chosen in itertools.product(range(actors), repeat=len(length)):
            times = []
            for actor in range(actors):
                rows = tuple(r for r, j in zip(order, chosen, strict=True) if j == actor)
                if rows not in seen:
                    index = list(rows)
                    _, counts = decode_one(cost, prompts[index], lengths[index], np.arange(len(rows)))
                    seen[rows] = counts.clock
                times.append(seen[rows])
            fastest = min(fastest, max(times))
            cheapest = min(cheapest, sum(times) * cost.actor.gpus)
    return fastest, cheapest


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=4),
    actors=st.integers(1, 3),
    max_running=st.sampled_from([1, 2, 3, 8]),
    base=st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3),
    kv=st.lists(st.floats(0.0, 0.01), min_size=3, max_size=3),
    slack=st.sampled_from([0, 20, 10_000]),
)
def test_no_assignment_beats_the_bound(
    rows: list[tuple[int, int]],
    actors: int,
    max_running: int,
    base: list[float],
    kv: list[float],
    slack: int,
) -> None:
    """Any iteration times, even falling or concave ones, with waiting queues and preemptions."""
    prompt, length = [list(column) for column in zip(*rows, strict=True)]
    cost = profile(
        decode={"batch": [1, 2, 4], "base_seconds": base, "kv_token_seconds": kv},
        prefill=FREE_PREFILL,
        actor={
            "gpus": 2,
            "max_running": max_running,
            "kv_capacity_tokens": max(p + n for p, n in rows) + slack,
        },
    )
    bound = bound_of(cost, prompt, length, actors)
    fastest, cheapest = optimum(cost, prompt, length, actors)
    assert bound.generation_seconds <= fastest * BELOW
    assert bound.gpu_seconds <= cheapest * BELOW


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_no_policy_beats_the_bound(case: Case) -> None:
    """Prefill and transfers cost nothing here, so that only decoding counts."""
    assume(not getattr(getattr(case.policy, "sampling", None), "changes_batches", False))
    cost = case.setting.profile.model_copy(
        update={"prefill": case.setting.profile.prefill.model_validate(FREE_PREFILL)}
    )
    where = replace(case.setting, profile=cost)
    try:
        steps = case.steps(setting=where)
    except InputError as error:
        assume("does not fit the GPUs" not in str(error))
        raise
    for step in steps:
        bound = step_lower_bound(view(step.batch, where), step.batch.response_tokens)
        decode = [i for i in step.outcome.intervals if i.function.startswith("decode") and i.kind == "busy"]
        assert bound.generation_seconds <= step.outcome.generation_seconds * BELOW
        assert bound.gpu_seconds <= sum(i.gpu_seconds for i in decode) * BELOW


@pytest.mark.parametrize("n", [1, 5, 64])
def test_equal_lengths_on_one_actor_reach_the_bound(n: int) -> None:
    """All run from the first to the last iteration, so that no iteration's base time is saved."""
    cost = profile(
        prefill=FREE_PREFILL,
        decode={"batch": [1, 64], "base_seconds": [0.01, 0.02], "kv_token_seconds": [1e-6, 1e-6]},
    )
    prompt, length = [7] * n, [40] * n
    _, counts = decode_one(cost, np.array(prompt), np.array(length), np.arange(n))
    bound = bound_of(cost, prompt, length, 1)
    assert bound.generation_seconds == pytest.approx(counts.clock, rel=1e-12)
    assert bound.gpu_seconds == pytest.approx(2 * counts.clock, rel=1e-12)


def test_full_waves_reach_the_bound() -> None:
    """Twelve equal responses, four at a time: three full waves."""
    cost = profile(
        prefill=FREE_PREFILL,
        actor={"gpus": 2, "max_running": 4, "kv_capacity_tokens": 10_000},
        decode={"batch": [1, 4], "base_seconds": [0.01, 0.02], "kv_token_seconds": [0.0, 0.0]},
    )
    bound = bound_of(cost, [7] * 12, [40] * 12, 1)
    assert bound.generation_seconds == pytest.approx(3 * 40 * 0.02, rel=1e-12)


def test_the_longest_response_alone_bounds_the_time() -> None:
    """With as many actors as responses, generation takes what the longest one does."""
    cost = profile(prefill=FREE_PREFILL)
    _, counts = decode_one(cost, np.array([9]), np.array([500]), np.array([0]))
    bound = bound_of(cost, [9, 9, 9], [500, 3, 2], 3)
    assert bound.generation_seconds == pytest.approx(counts.clock, rel=1e-12)
