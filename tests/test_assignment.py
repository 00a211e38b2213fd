"""The assignment program: equal to brute force on small cases, never worse than its hint, bounds that hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from factories import profile

from rlhfless.models.decode import EngineOptions
from rlhfless.models.profile import Profile
from rlhfless.solver.assignment import GpuLimit, solve_assignment
from rlhfless.solver.objective import Goal, Objective
from rlhfless.solver.partition import even_splits, reference
from rlhfless.solver.problem import ActorKind, Partition, Problem
from rlhfless.solver.relaxation import Relaxation


def affine(per_response: float = 1e-4, gpus: int = 1, running: int = 1024, capacity: int = 10**9) -> Profile:
    """Return costs of 20 ms an iteration, so much a running response, and 50 ns a resident token."""
    return profile(
        actor={"gpus": gpus, "max_running": running, "kv_capacity_tokens": capacity},
        decode={
            "batch": [1, 1024],
            "base_seconds": [0.02 + per_response, 0.02 + 1024 * per_response],
            "kv_token_seconds": [5e-8, 5e-8],
        },
    )


def kneed(gpus: int = 1, running: int = 64, capacity: int = 10**6) -> Profile:
    """Return costs whose table is neither convex nor affine."""
    return profile(
        actor={"gpus": gpus, "max_running": running, "kv_capacity_tokens": capacity},
        decode={
            "batch": [1, 2, 3, 4, 64],
            "base_seconds": [0.010, 0.0145, 0.015, 0.021, 0.060],
            "kv_token_seconds": [1e-6, 0.5e-6, 2e-6, 1.5e-6, 2e-6],
        },
    )


def every_partition(n: int, kinds: int, most: int) -> Iterator[Partition]:
    """Yield every partition of n rows into at most ``most`` groups, on every choice of kinds."""

    def owners(row: int, used: int) -> Iterator[list[int]]:
        if row == n:
            yield []
            return
        for owner in range(min(used + 1, most)):
            for rest in owners(row + 1, max(used, owner + 1)):
                yield [owner, *rest]

    for owner in owners(0, 0):
        groups = tuple(np.flatnonzero(np.array(owner) == g) for g in range(max(owner) + 1))
        for kind in product(range(kinds), repeat=len(groups)):
            yield Partition(groups, kind)


def brute_force(problem: Problem, objective: Objective, limits: tuple[GpuLimit, ...] = ()) -> float:
    """Return the least value over all partitions."""
    least = np.inf
    kinds = problem.kinds
    for partition in every_partition(len(problem), len(kinds), problem.actors):
        used = np.bincount(partition.kinds, minlength=len(kinds))
        gpus = used * [kind.profile.actor.gpus for kind in kinds]
        if (used > [kind.count for kind in kinds]).any():
            continue
        if any(gpus[list(limit.kinds)].sum() > limit.gpus for limit in limits):
            continue
        least = min(least, float(objective.value(*problem.evaluate(partition))))
    return least


def drawn(rng: np.random.Generator, n: int, kinds: tuple[ActorKind, ...], **rest: object) -> Problem:
    return Problem(
        prompt_tokens=rng.integers(1, 40, n),
        response_tokens=rng.integers(1, 200, n),
        kinds=kinds,
        **rest,  # type: ignore[arg-type]
    )


CASES = {
    "affine": (ActorKind(affine(2e-3), 3),),
    "measured table": (ActorKind(kneed(), 3),),
    "queues": (ActorKind(kneed(running=2), 3),),
    "tight KV": (ActorKind(kneed(capacity=300), 3),),
    "two kinds": (ActorKind(kneed(gpus=2), 2, 0.3, 0.1), ActorKind(affine(1e-3), 1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("columns", [4096, 0])
def test_equals_brute_force(case: str, columns: int) -> None:
    """The column model equals brute force always, the assignment model where the time is affine.

    Elsewhere the assignment model's bound still holds, and its partition is as good as it says.
    """
    for seed, n in enumerate([1, 5, 7]):
        rng = np.random.default_rng(seed)
        problem = drawn(rng, n, CASES[case])
        objective = Goal("ratio", 0.7).resolve(*reference(problem))
        least = brute_force(problem, objective)
        found = solve_assignment(problem, objective, seconds=60, workers=1, columns=columns, resolution=1e-6)
        assert found.partition is not None
        assert found.value == float(objective.value(*problem.evaluate(found.partition)))
        assert found.bound <= least * (1 + 1e-9)
        if columns or case == "affine":
            assert found.status == "optimal"
            assert found.value == pytest.approx(least, rel=1e-6)


def test_nine_responses_on_three_actors() -> None:
    rng = np.random.default_rng(5)
    problem = drawn(rng, 9, CASES["tight KV"])
    objective = Goal("minmax", 0.5).resolve(*reference(problem))
    found = solve_assignment(problem, objective, seconds=60, workers=1)
    assert found.status == "optimal"
    assert found.value == pytest.approx(brute_force(problem, objective), rel=1e-6)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("columns", [4096, 0])
def test_prefill_and_shared_prompts(shared: bool, caching: bool, columns: int) -> None:
    """Responses that look alike are not alike where they share a prompt with others."""
    rng = np.random.default_rng(3)
    group = np.array([0, 0, 0, 1, 1, 2])
    problem = Problem(
        prompt_tokens=np.array([30, 30, 30, 30, 30, 70]),
        response_tokens=rng.integers(20, 60, 6),
        kinds=(ActorKind(kneed(capacity=320), 3),),
        group=group,
        cached_tokens=np.zeros(6, dtype=np.int64),
        engine=EngineOptions(prefix_caching=caching, share_prompt_kv=shared),
    )
    objective = Objective(1.0, 0.4)
    least = brute_force(problem, objective)
    found = solve_assignment(problem, objective, seconds=60, workers=1, columns=columns)
    assert found.bound <= least * (1 + 1e-9)
    if columns:
        assert found.status == "optimal"
        assert found.value == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("columns", [4096, 0])
def test_equals_brute_force_under_shared_gpus_and_limits(columns: int) -> None:
    """Two sizes on one node of three GPUs; time limited, cost minimised, and the reverse."""
    kinds = (ActorKind(affine(2e-3, gpus=2), 2, 0.5, 0.5), ActorKind(affine(6e-3, gpus=1), 3))
    node = (GpuLimit((0, 1), 3, "node 0"),)
    problem = drawn(np.random.default_rng(8), 6, kinds)
    free = [problem.evaluate(p) for p in every_partition(6, 2, 3)]
    times, costs = np.array(free).T
    for objective in (
        Objective(0.0, 1.0, time_limit=float(np.quantile(times, 0.3))),
        Objective(1.0, 0.0, cost_limit=float(np.quantile(costs, 0.3))),
        Objective(0.7, 0.2),
    ):
        least = brute_force(problem, objective, node)
        found = solve_assignment(
            problem, objective, seconds=60, workers=1, limits=node, columns=columns, resolution=1e-6
        )
        assert found.status == "optimal"
        assert found.value == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("columns", [4096, 0])
def test_infeasible_names_what_clashes(columns: int) -> None:
    """Three limits, of which two are enough; the third is not named."""
    small, large = affine(gpus=1, capacity=150), affine(gpus=4, capacity=10**6)
    kinds = (ActorKind(small, 4), ActorKind(large, 1))
    prompt, length = np.full(4, 50), np.array([200, 60, 60, 60])
    problem = Problem(prompt, length, kinds)
    node = (GpuLimit((0, 1), 3, "node 0"),)
    found = solve_assignment(
        problem, Objective(1.0, 1.0, cost_limit=1e6), seconds=60, workers=1, limits=node, columns=columns
    )
    assert found.status == "infeasible"
    assert found.partition is None
    assert "node 0 has 3 GPUs" in found.reason
    assert "cost" not in found.reason
    assert "\n" not in found.reason
    late = solve_assignment(
        problem, Objective(0.0, 1.0, time_limit=0.5), seconds=60, workers=1, columns=columns
    )
    assert late.status == "infeasible"
    assert late.reason == "time is limited to 0.5 s"


def test_without_time_the_hint_comes_back_with_its_bound() -> None:
    problem = drawn(np.random.default_rng(0), 40, CASES["measured table"])
    objective = Objective(1.0, 0.3)
    hint = even_splits(problem, [2])[0]
    found = solve_assignment(problem, objective, seconds=0, hint=hint, bound=0.01)
    assert found.status == "feasible"
    assert found.bound == 0.01
    assert found.value <= float(objective.value(*problem.evaluate(hint)))


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_one_response_more_actors_than_responses_equal_lengths(n: int) -> None:
    problem = Problem(np.full(n, 10), np.full(n, 100), (ActorKind(affine(1e-3), 8),))
    objective = Objective(1.0, 0.05)
    found = solve_assignment(problem, objective, seconds=60, workers=1)
    # Equal responses: only the sizes of the groups matter, and even ones are best for a given number.
    even = [float(objective.value(*problem.evaluate(split))) for split in even_splits(problem)]
    assert found.value == pytest.approx(min(even), rel=1e-5)
    assert found.status == "optimal"


@pytest.mark.parametrize("case", CASES)
def test_bounds_and_progress_on_a_hundred_responses(case: str) -> None:
    """The bound is below what any partition found takes; values only fall and bounds only rise."""
    rng = np.random.default_rng(1)
    kinds = CASES[case]
    problem = drawn(rng, 100, kinds)
    objective = Objective(1.0, 0.3)
    found = solve_assignment(problem, objective, seconds=60, workers=1, work=0.3)
    assert found.partition is not None
    assert sorted(np.concatenate(found.partition.groups).tolist()) == list(range(100))
    assert found.value == float(objective.value(*problem.evaluate(found.partition)))
    owners = rng.integers(0, problem.actors, (200, 100))
    for owner in owners:
        groups = tuple(np.flatnonzero(owner == g) for g in range(problem.actors))
        kind = np.repeat(np.arange(len(kinds)), [k.count for k in kinds])
        used = [g for g in range(problem.actors) if len(groups[g])]
        drawn_one = Partition(tuple(groups[g] for g in used), tuple(int(kind[g]) for g in used))
        assert found.bound <= float(objective.value(*problem.evaluate(drawn_one)))
    values, bounds = np.array(found.progress)[:, 1], np.array(found.progress)[:, 2]
    assert (np.diff(values) <= 0).all()
    assert (np.diff(bounds[np.isfinite(bounds)]) >= 0).all()


def test_work_makes_a_search_repeatable() -> None:
    problem = drawn(np.random.default_rng(4), 120, (ActorKind(kneed(running=16), 6),))
    objective = Goal("ratio", 0.7).resolve(*reference(problem))
    first, second = (solve_assignment(problem, objective, seconds=60, work=0.1, seed=7) for _ in range(2))
    assert first.value == second.value
    assert first.partition is not None
    assert second.partition is not None
    for one, other in zip(first.partition.groups, second.partition.groups, strict=True):
        np.testing.assert_array_equal(one, other)


def test_512_responses_on_eight_actors_are_optimal_to_a_ten_thousandth() -> None:
    """With the relaxation's bound; affine, lognormal lengths, 20 ms and 0.1 ms."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(250), 0.6, 512), 2048).astype(np.int64) + 1
    problem = Problem(rng.integers(50, 150, 512), lengths, (ActorKind(affine(), 8),))
    objective = Goal("ratio", 0.7).resolve(*reference(problem))
    bound = Relaxation(problem).minimum(objective, precision=1e-5)[0]
    found = solve_assignment(problem, objective, seconds=60, work=5, bound=bound, resolution=1e-4)
    assert found.status == "optimal"
    assert found.gap <= 1e-4
