"""Partition solvers and the relaxation: never below what is possible, and exact where they say so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from factories import profile
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.models.decode import EngineOptions
from rlhfless.models.profile import Profile
from rlhfless.scripts.workload import named_profile
from rlhfless.solver.assignment import solve_assignment
from rlhfless.solver.objective import Goal, Objective, pareto
from rlhfless.solver.partition import (
    EXHAUSTIVE,
    branch_and_bound,
    contiguous,
    even_splits,
    exhaustive,
    reference,
    solve,
    threshold_sweep,
)
from rlhfless.solver.pricing import PricedRelaxation
from rlhfless.solver.problem import ActorKind, Partition, Problem
from rlhfless.solver.relaxation import Relaxation, highest_plane
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray

BELOW = 1 + 1e-7


def partitions(n: int, parts: int) -> Iterator[list[list[int]]]:
    """Yield every way to put n items into at most so many groups, none empty."""
    groups: list[list[int]] = []

    def place(item: int) -> Iterator[list[list[int]]]:
        if item == n:
            yield [list(group) for group in groups]
            return
        for group in groups:
            group.append(item)
            yield from place(item + 1)
            group.pop()
        if len(groups) < parts:
            groups.append([item])
            yield from place(item + 1)
            groups.pop()

    yield from place(0)


def every_outcome(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Return seconds and GPU seconds of all partitions over all choices of actors."""
    counts = [kind.count for kind in problem.kinds]
    outcomes = []
    for groups in partitions(len(problem), problem.actors):
        rows = tuple(np.array(group) for group in groups)
        outcomes += [
            problem.evaluate(Partition(rows, kinds))
            for kinds in itertools.product(range(len(counts)), repeat=len(groups))
            if all(kinds.count(kind) <= count for kind, count in enumerate(counts))
        ]
    seconds, gpu_seconds = np.array(outcomes).T
    return seconds, gpu_seconds


def table(base: list[float], kv: list[float], max_running: int, capacity: int, gpus: int = 1) -> Profile:
    """Return a profile with the given iteration times by running responses."""
    return profile(
        name=f"{gpus} GPUs",
        actor={"gpus": gpus, "max_running": max_running, "kv_capacity_tokens": capacity},
        decode={
            "batch": list(range(1, len(base) + 1)),
            "base_seconds": base,
            "kv_token_seconds": kv,
            "host_overhead_seconds": 0.0,
        },
    )


def affine(alone: float, each: float, running: int, gpus: int = 1) -> Profile:
    """Return a profile whose iteration takes ``alone + each * b``, without KV reads or limits."""
    return profile(
        name="affine",
        actor={"gpus": gpus, "max_running": running, "kv_capacity_tokens": 10**9},
        decode={
            "batch": [1, running],
            "base_seconds": [alone + each, alone + each * running],
            "kv_token_seconds": [0.0, 0.0],
            "host_overhead_seconds": 0.0,
        },
    )


def lognormal(n: int, seed: int, median: float = 220, spread: float = 0.8, cap: int = 2048) -> Any:
    """Return response tokens with a long tail."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(median), spread, n))
    return np.clip(drawn, 1, cap).astype(np.int64)


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> Problem:
    """Draw problems with any iteration times, tight memory, waves, start-up and actors of two sizes."""
    rows = draw(st.lists(st.tuples(st.integers(1, 25), st.integers(1, 60)), min_size=1, max_size=most))
    width = draw(st.integers(1, 6))
    base = draw(st.lists(st.floats(0.005, 0.02), min_size=width, max_size=width))
    kv = draw(st.lists(st.floats(0.0, 5e-5), min_size=width, max_size=width))
    room = max(p + r for p, r in rows) + draw(st.sampled_from([0, 30, 10_000]))
    first = table(base, kv, draw(st.sampled_from([1, 2, 3, 16])), room)
    start, held = draw(st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)))
    kinds = [ActorKind(first, draw(st.integers(1, 3)), *draw(st.sampled_from([(0.0, 0.0), (start, held)])))]
    if draw(st.booleans()):
        other = first
        if draw(st.booleans()):
            faster = [0.6 * seconds for seconds in base]
            other = table(faster, kv, draw(st.sampled_from([1, 2, 16])), room, gpus=2)
        kinds.append(ActorKind(other, 1, 0.1, 0.05))
    prompt, response = (np.array(column) for column in zip(*rows, strict=True))
    shared = draw(st.booleans())
    group = np.array([draw(st.integers(0, 2)) for _ in rows]) if shared else np.arange(len(rows))
    # Responses to one prompt have its length.
    prompt = prompt[[int(np.flatnonzero(group == g)[0]) for g in group]]
    room_left = room - prompt
    _, group = np.unique(group, return_inverse=True)
    return Problem(
        prompt_tokens=prompt,
        response_tokens=np.minimum(response, room_left),
        kinds=tuple(kinds),
        group=group,
        engine=EngineOptions(share_prompt_kv=draw(st.booleans())),
    )


def objectives(seconds: FloatArray, gpu_seconds: FloatArray) -> list[Objective]:
    """Return one objective of every form, with limits that some partitions break."""
    least, cheapest = float(seconds.min()), float(gpu_seconds.min())
    return [
        Goal("ratio", 0.7).resolve(seconds, gpu_seconds),
        Goal("minmax", 0.4).resolve(seconds, gpu_seconds),
        Goal("cost", limit=1.1).resolve(seconds, gpu_seconds),
        Goal("time", limit=1.2).resolve(seconds, gpu_seconds),
        Objective(1 / least, 1 / cheapest, time_limit=least * 1.3, cost_limit=cheapest * 1.3),
    ]


@settings(max_examples=25, deadline=None)
@given(problem=problems(most=6))
def test_no_partition_beats_the_relaxation(problem: Problem) -> None:
    """Against all partitions: its time, its cost, its cost at every time, and every objective."""
    seconds, gpu_seconds = every_outcome(problem)
    relaxation = Relaxation(problem)
    assert relaxation.seconds <= seconds.min() * BELOW
    assert relaxation.gpu_seconds() <= gpu_seconds.min() * BELOW
    for time in np.unique(seconds)[:: max(len(seconds) // 8, 1)]:
        assert relaxation.gpu_seconds(time * (1 + 1e-9)) <= gpu_seconds[seconds <= time].min() * BELOW
    for objective in objectives(seconds, gpu_seconds):
        least = float(objective.value(seconds, gpu_seconds).min())
        if np.isfinite(least):
            assert relaxation.bound(objective) - objective.offset <= (least - objective.offset) * BELOW


@settings(max_examples=15, deadline=None)
@given(problem=problems(most=6))
def test_no_partition_beats_the_priced_relaxation(problem: Problem) -> None:
    """Prices that are sought at two times hold at all times."""
    seconds, gpu_seconds = every_outcome(problem)
    times = (float(seconds.min()), float(np.median(seconds)))
    relaxation = PricedRelaxation(problem, times, search_seconds=0.05)
    assert relaxation.seconds <= seconds.min() * BELOW
    for time in np.unique(seconds)[:: max(len(seconds) // 8, 1)]:
        assert relaxation.gpu_seconds(time * (1 + 1e-9)) <= gpu_seconds[seconds <= time].min() * BELOW


def test_prices_tighten_a_measured_table() -> None:
    """H100 iteration times rise in steps; prices close part of what levels leave open at a good partition."""
    cost = named_profile("h100_qwen2.5-7b_tp2")
    length = lognormal(600, 0, median=400, cap=8192)
    prompt = np.random.default_rng(1).integers(60, 200, 600)
    problem = Problem(prompt, length, (ActorKind(cost, 8),))
    found = solve(problem, Goal("ratio").resolve(*reference(problem)), seconds=120, moves=2000)
    relaxation = PricedRelaxation(problem, (found.seconds,), found.partition, search_seconds=10.0)
    left = found.gpu_seconds - Relaxation(problem).gpu_seconds(found.seconds)
    assert 0 <= found.gpu_seconds - relaxation.gpu_seconds(found.seconds) <= 0.8 * left


@settings(max_examples=15, deadline=None)
@given(problem=problems(most=6))
def test_exact_solvers_equal_brute_force(problem: Problem) -> None:
    """Whatever a group's time depends on; and a proven bound says optimal."""
    seconds, gpu_seconds = every_outcome(problem)
    for objective in objectives(seconds, gpu_seconds):
        least = float(objective.value(seconds, gpu_seconds).min())
        for solver in (exhaustive, branch_and_bound):
            found = solver(problem, objective)
            if np.isfinite(least):
                assert found.status == "optimal"
                assert found.value == pytest.approx(least, rel=1e-9, abs=1e-12)
                assert found.partition is not None
                assert problem.evaluate(found.partition) == (found.seconds, found.gpu_seconds)
            else:
                assert found.status == "infeasible"
                assert "limit" in found.reason


def test_nine_responses_on_three_actors() -> None:
    """The size that the solvers promise, with a knee in the iteration time and memory for two waves."""
    rng = np.random.default_rng(5)
    cost = table([0.01, 0.011, 0.0112, 0.02, 0.021], [2e-5, 1e-5, 1e-5, 3e-5, 3e-5], 4, 130)
    for _ in range(3):
        problem = Problem(rng.integers(5, 20, 9), rng.integers(3, 80, 9), (ActorKind(cost, 3),))
        seconds, gpu_seconds = every_outcome(problem)
        objective = Goal("ratio").resolve(seconds, gpu_seconds)
        least = float(objective.value(seconds, gpu_seconds).min())
        assert exhaustive(problem, objective).value == pytest.approx(least, rel=1e-9)
        assert branch_and_bound(problem, objective).value == pytest.approx(least, rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(problem=problems(), seed=st.integers(0, 3))
def test_the_search_is_between_bound_and_start(problem: Problem, seed: int) -> None:
    """Never below its bound, never worse than an even split, and its partition is whole."""
    objective = Goal("ratio").resolve(*reference(problem))
    found = solve(problem, objective, moves=200, seed=seed)
    assert found.partition is not None
    assert found.bound <= found.value * BELOW
    assert np.array_equal(np.sort(np.concatenate(found.partition.groups)), np.arange(len(problem)))
    best = min(float(objective.value(*problem.evaluate(split))) for split in even_splits(problem))
    assert found.value <= best * BELOW
    again = solve(problem, objective, moves=200, seed=seed)
    assert again.value == found.value


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    actors=st.integers(1, 3),
    width=st.integers(1, 5),
    data=st.data(),
)
def test_the_best_contiguous_split(lengths: list[int], actors: int, width: int, data: st.DataObject) -> None:
    """Against all contiguous splits of the sorted responses."""
    base = data.draw(st.lists(st.floats(0.005, 0.02), min_size=width, max_size=width))
    cost = table(base, [1e-5] * width, data.draw(st.sampled_from([2, 16])), 10_000)
    problem = Problem(np.full(len(lengths), 4), np.array(lengths), (ActorKind(cost, actors),))
    objective = Goal("ratio").resolve(*reference(problem))
    outcomes = []
    for count in range(1, problem.actors + 1):
        for cuts in itertools.combinations(range(1, len(lengths)), count - 1):
            blocks = np.split(problem.order, list(cuts))
            outcomes.append(float(objective.value(*problem.evaluate(Partition.of(blocks)))))
    found = contiguous(problem, objective)
    assert found is not None
    assert float(objective.value(*problem.evaluate(found))) == pytest.approx(min(outcomes), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_affine_times_leave_almost_no_gap(seed: int) -> None:
    """At 5,120 responses and 80 actors the threshold sweep alone is within 0.1 % of the bound."""
    problem = Problem(np.full(5120, 100), lognormal(5120, seed), (ActorKind(affine(0.02, 1e-4, 8192), 80),))
    objective = Goal("ratio").resolve(*reference(problem))
    found = solve(problem, objective, seconds=0)
    assert found.gap <= 1e-3


@pytest.mark.parametrize(("n", "actors", "seed"), [(12, 3, 0), (24, 3, 1), (40, 4, 0), (64, 4, 2)])
def test_the_integer_program_finds_the_same_optimum(n: int, actors: int, seed: int) -> None:
    """CP-SAT proves its optimum by its own model; the search proves its own by the relaxation."""
    cost = affine(0.02, 1e-3, 512)
    problem = Problem(np.full(n, 100), lognormal(n, seed), (ActorKind(cost, actors),))
    objective = Goal("ratio").resolve(*reference(problem))
    program = solve_assignment(problem, objective, seconds=60, resolution=1e-5)
    assert program.status == "optimal"
    found = solve(problem, objective, seconds=60, moves=20_000, gap=3e-5)
    assert found.status == "optimal"
    assert program.value == pytest.approx(found.value, rel=4e-5)


def test_affine_cost_is_leaders_plus_work() -> None:
    """The sweep's groups cost ``a * longest`` each, and the work, whoever does it (a theorem of the model)."""
    length = lognormal(300, 1)
    problem = Problem(np.full(300, 100), length, (ActorKind(affine(0.02, 1e-4, 512), 8),))
    earliest = Relaxation(problem).seconds
    for split in threshold_sweep(problem, [earliest * 1.05, earliest * 1.5]):
        leaders = sum(float(length[rows].max()) for rows in split.groups)
        _, cost = problem.evaluate(split)
        assert cost == pytest.approx(0.02 * leaders + 1e-4 * float(length.sum()), rel=1e-9)


def test_planes_lie_below_the_iteration_time() -> None:
    """At every number of running responses and every KV load that can occur; and they touch it."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        base, kv = rng.uniform(0.005, 0.02, 65), rng.uniform(0, 5e-8, 65)
        low, high, capacity = 50, 900, 20_000
        weights = np.array([1.0, 20.0, 20.0 * 400.0])
        a, beta, gamma = highest_plane(base, kv, capacity, low, high, weights)
        running = np.repeat(np.arange(1, 65), 40)
        least, most = running * low, np.maximum(np.minimum(running * high, capacity - running), running * low)
        resident = least + rng.random(len(running)) * (most - least)
        above = base[running] + kv[running] * resident - (a + beta * running + gamma * resident)
        assert above.min() >= -1e-15
        touching = base[1:] + kv[1:] * np.arange(1, 65) * low - (a + (beta + gamma * low) * np.arange(1, 65))
        assert min(touching.min(), above.min()) <= 1e-3 * base[1:].min()


def test_equal_lengths_have_no_gap() -> None:
    """One group of equal lengths runs all its iterations with all its responses."""
    cost = table([0.01, 0.012, 0.013, 0.02], [0.0] * 4, 16, 10_000)
    problem = Problem(np.full(6, 5), np.full(6, 40), (ActorKind(cost, 1),))
    found = solve(problem, Objective(1.0, 0.0), seconds=0)
    assert found.status == "optimal"


def test_one_response() -> None:
    """It gets one actor, and nothing is faster or cheaper."""
    cost = table([0.01, 0.02], [1e-6, 1e-6], 8, 10_000)
    problem = Problem(np.array([9]), np.array([500]), (ActorKind(cost, 5),))
    found = solve(problem, Objective(0.5, 0.5))
    assert found.status == "optimal"
    assert found.partition is not None
    assert len(found.partition.groups) == 1


def test_more_actors_than_responses() -> None:
    """Time alone wants one response an actor."""
    cost = affine(0.01, 0.005, 64)
    problem = Problem(np.full(4, 5), np.array([40, 40, 39, 38]), (ActorKind(cost, 9),))
    found = solve(problem, Objective(1.0, 0.0))
    assert found.status == "optimal"
    assert found.seconds == pytest.approx(40 * 0.015)


def test_a_response_longer_than_any_memory_is_refused() -> None:
    """In one line that says which and by how much."""
    cost = table([0.01], [0.0], 4, 100)
    with pytest.raises(InputError, match="response 1 needs 110 KV tokens, the largest actor holds 100"):
        Problem(np.array([10, 10]), np.array([50, 100]), (ActorKind(cost, 2),))


def test_a_response_goes_where_it_fits() -> None:
    """The small actors' memory is too small for the longest response."""
    small, large = table([0.01], [0.0], 4, 100), table([0.01], [0.0], 4, 1000, gpus=2)
    problem = Problem(np.full(3, 10), np.array([500, 50, 60]), (ActorKind(small, 2), ActorKind(large, 1)))
    objective = Objective(0.0, 1.0)
    for solver in (solve, exhaustive, branch_and_bound):
        found = solver(problem, objective)
        assert found.partition is not None
        kind = [k for rows, k in zip(found.partition.groups, found.partition.kinds, strict=True) if 0 in rows]
        assert kind == [1]


def test_limits_that_clash_say_so() -> None:
    """A time limit below the slowest response, and a cost limit below what the time limit costs."""
    cost = affine(0.01, 0.001, 64)
    problem = Problem(np.full(20, 5), lognormal(20, 0), (ActorKind(cost, 4),))
    fastest = Relaxation(problem).seconds
    late = solve(problem, Objective(0.5, 0.5, time_limit=0.5 * fastest))
    assert (late.status, late.partition) == ("infeasible", None)
    assert late.reason.startswith("time limit: no partition ends before")
    dear = solve(problem, Objective(1.0, 0.0, cost_limit=1e-3))
    assert dear.status == "infeasible"
    assert dear.reason.startswith("cost limit:")


def test_too_many_responses_for_all_subsets() -> None:
    """The limit is named."""
    problem = Problem(np.full(20, 5), lognormal(20, 0), (ActorKind(affine(0.01, 0.001, 64), 4),))
    with pytest.raises(InputError, match=f"20 responses, at most {EXHAUSTIVE}"):
        exhaustive(problem, Objective(1.0, 0.0))


def test_the_front_bounds_every_partition() -> None:
    """Time and cost of any partition lie above it."""
    cost = table([0.01, 0.0105, 0.014, 0.015], [1e-6] * 4, 32, 10_000)
    problem = Problem(np.full(80, 20), lognormal(80, 3), (ActorKind(cost, 6),))
    times, costs = Relaxation(problem).front(12)
    assert (np.diff(costs) <= 1e-9).all()
    sweep = threshold_sweep(problem, np.geomspace(times[0], 3 * times[-1], 40)) + even_splits(problem)
    for split in sweep:
        seconds, gpu_seconds = problem.evaluate(split)
        assert gpu_seconds >= costs[times >= seconds][0] / BELOW if (times >= seconds).any() else True
        assert gpu_seconds >= costs[-1] / BELOW


def test_goals_scale_by_the_reference() -> None:
    """Min-max leaves out what does not vary; limits are relative; the paper's scaling is 0 to 1."""
    seconds, cost = np.array([4.0, 2.0, 1.0]), np.array([10.0, 12.0, 30.0])
    objective = Goal("minmax", 0.7).resolve(seconds, cost)
    expected = 0.7 * (seconds - 1) / 3 + 0.3 * (cost - 10) / 20
    assert objective.value(seconds, cost) == pytest.approx(expected)
    flat = Goal("minmax", 0.7).resolve(seconds, np.full(3, 5.0))
    assert flat.cost_weight == 0
    limited = Goal("cost", limit=1.5).resolve(seconds, cost)
    assert limited.value(seconds, cost).tolist() == [np.inf, np.inf, 30.0]
    assert pareto(np.array([1.0, 1.0, 2.0, 3.0]), np.array([5.0, 4.0, 4.0, 1.0])).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "fast"}, "kind is fast, must be minmax, ratio, cost or time"),
        ({"weight": 1.5}, "weight is 1.5, must be 0 to 1"),
        ({"limit": 0.0}, "limit is 0.0, must be above 0"),
    ],
)
def test_wrong_goals_are_refused(change: dict[str, Any], message: str) -> None:
    """In one line."""
    with pytest.raises(InputError, match=message):
        Goal(**change)
