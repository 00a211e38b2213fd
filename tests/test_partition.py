"""Partitions against brute force, against their known worst cases, and against the contiguous theorem."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.policies.partition import (
    contiguous,
    karmarkar_karp,
    list_schedule,
    lpt,
    multifit,
    two_actors,
)

FAST = settings(max_examples=60, deadline=None)

tiny = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))


def partitions(n: int, parts: int) -> Iterator[list[int]]:
    """Yield every split of n items into exactly so many non-empty parts, as an owner of each item, once."""

    def extend(owner: list[int], used: int) -> Iterator[list[int]]:
        if len(owner) == n:
            if used == parts:
                yield owner
            return
        for part in range(min(used + 1, parts)):
            yield from extend([*owner, part], max(used, part + 1))

    yield from extend([], 0)


def makespan(loads: list[int], owner: list[int] | np.ndarray) -> float:
    return float(np.bincount(owner, weights=loads).max())


def least_makespan(loads: list[int], parts: int) -> float:
    return min(makespan(loads, owner) for owner in partitions(len(loads), min(parts, len(loads))))


def array(values: list[int] | list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


ALL = {
    "lpt": lpt,
    "list": list_schedule,
    "multifit": multifit,
    "differencing": karmarkar_karp,
    "equal differencing": lambda loads, parts: karmarkar_karp(loads, parts, equal_size=True),
}


@pytest.mark.parametrize("name", ALL)
@given(case=tiny)
@FAST
def test_every_item_has_an_owner_and_no_part_is_empty(name: str, case: tuple[list[int], int]) -> None:
    loads, parts = case
    owner = ALL[name](array(loads), parts)
    assert owner.shape == (len(loads),)
    assert set(owner.tolist()) == set(range(min(parts, len(loads))))


@pytest.mark.parametrize("name", ALL)
def test_no_items_make_no_owners(name: str) -> None:
    assert len(ALL[name](np.empty(0), 3)) == 0


@given(case=tiny)
@FAST
def test_worst_case_ratios_hold(case: tuple[list[int], int]) -> None:
    loads, parts = case
    best = least_makespan(loads, parts)
    bounds = {
        "list": 2 - 1 / parts,
        "lpt": 4 / 3 - 1 / (3 * parts),
        "multifit": 13 / 11 + 2**-7,
        "differencing": 1.0 if parts == 1 else 7 / 6 if parts == 2 else 4 / 3 - 1 / (3 * parts),
    }
    for name, ratio in bounds.items():
        found = makespan(loads, ALL[name](array(loads), parts))
        assert best <= found <= ratio * best + 1e-9, name


@given(case=tiny, iterations=st.integers(0, 10))
@FAST
def test_multifit_is_never_worse_than_lpt(case: tuple[list[int], int], iterations: int) -> None:
    loads, parts = case
    packed = multifit(array(loads), parts, iterations)
    assert makespan(loads, packed) <= makespan(loads, lpt(array(loads), parts))


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_grahams_instances_are_tight(parts: int) -> None:
    """LPT on 2m-1, 2m-1, ..., m+1, m+1, m, m, m; list scheduling on m(m-1) ones before an m."""
    loads = [size for size in range(2 * parts - 1, parts, -1) for _ in range(2)] + [parts] * 3
    assert makespan(loads, lpt(array(loads), parts)) == 4 * parts - 1
    assert sum(loads) == 3 * parts * parts  # so that 3m, which a perfect split has, is the optimum
    ones = [1] * (parts * (parts - 1)) + [parts]
    assert makespan(ones, list_schedule(array(ones), parts)) == 2 * parts - 1


def test_multifit_finds_the_perfect_split_that_lpt_misses() -> None:
    loads = [3, 3, 2, 2, 2]
    assert makespan(loads, lpt(array(loads), 2)) == 7
    assert makespan(loads, multifit(array(loads), 2)) == 6


def classical_difference(numbers: list[int]) -> int:
    """Replace the two largest numbers by their difference until one is left."""
    heap = [-number for number in numbers]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, -abs(heapq.heappop(heap) - heapq.heappop(heap)))
    return -heap[0]


@given(loads=st.lists(st.integers(1, 10**6), min_size=2, max_size=40))
@FAST
def test_two_part_differencing_ends_at_the_classical_difference(loads: list[int]) -> None:
    free = np.bincount(karmarkar_karp(array(loads), 2), weights=loads, minlength=2)
    assert abs(free[0] - free[1]) == classical_difference(loads)
    equal = np.bincount(karmarkar_karp(array(loads), 2, equal_size=True), weights=loads, minlength=2)
    # Consecutive items of the ascending list, from the largest down; an odd smallest one stands alone.
    falling = sorted(loads, reverse=True) + [0] * (len(loads) % 2)
    pairs = [falling[i] - falling[i + 1] for i in range(0, len(falling), 2)]
    assert abs(equal[0] - equal[1]) == classical_difference(pairs)


@given(loads=st.lists(st.integers(1, 10**6), min_size=1, max_size=60), parts=st.integers(1, 9))
@FAST
def test_equal_differencing_gives_equal_counts(loads: list[int], parts: int) -> None:
    owner = karmarkar_karp(array(loads), parts, equal_size=True)
    count = np.bincount(owner, minlength=parts)
    assert count.max() - count.min() <= 1


def test_differencing_spreads_sums_far_less_than_chance() -> None:
    rng = np.random.default_rng(0)
    loads = rng.lognormal(6, 1, 2000)

    def spread(owner: np.ndarray) -> float:
        return float(np.ptp(np.bincount(owner, weights=loads)))

    chance = spread(rng.permutation(np.arange(2000) % 16))
    assert spread(karmarkar_karp(loads, 16)) < 1e-3 * chance
    assert spread(karmarkar_karp(loads, 16, equal_size=True)) < 0.1 * chance


def block_costs(items: list[int], owner: list[int], size_cost: list[float]) -> list[float]:
    """Return each group's cost from its members, in no order."""
    groups: dict[int, list[int]] = {}
    for item, part in zip(items, owner, strict=True):
        groups.setdefault(part, []).append(item)
    return [size_cost[len(group)] * max(group) for group in groups.values()]


def objective_value(name: str, costs: list[float], weight: float) -> float:
    if name == "sum":
        return sum(costs)
    if name == "max":
        return max(costs)
    return weight * max(costs) + (1 - weight) * sum(costs) / len(costs)


@st.composite
def block_problems(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    items = sorted(draw(st.lists(st.integers(0, 50), min_size=1, max_size=7)), reverse=True)
    # Any cost of size, not a rising one.
    factor = st.floats(0, 10, allow_nan=False)
    size_cost = [0.0, *draw(st.lists(factor, min_size=len(items), max_size=len(items)))]
    return items, size_cost, draw(st.integers(1, len(items)))


@pytest.mark.parametrize("objective", ["sum", "max", "mix"])
@given(problem=block_problems(), weight=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
@FAST
def test_some_contiguous_partition_is_the_best_of_all_and_the_program_finds_it(
    objective: str, problem: tuple[list[int], list[float], int], weight: float
) -> None:
    items, size_cost, parts = problem
    bounds = contiguous(array(size_cost), array(items), parts, objective, weight=weight)  # type: ignore[arg-type]
    assert bounds[0] == 0
    assert bounds[-1] == len(items)
    assert (np.diff(bounds) > 0).all()
    owner = np.repeat(np.arange(parts), np.diff(bounds)).tolist()
    found = objective_value(objective, block_costs(items, owner, size_cost), weight)
    best = min(
        objective_value(objective, block_costs(items, any_owner, size_cost), weight)
        for any_owner in partitions(len(items), parts)
    )
    assert found == pytest.approx(best, rel=1e-9, abs=1e-12)


@given(problem=block_problems())
@FAST
def test_the_makespan_program_takes_the_least_sum_among_equals(
    problem: tuple[list[int], list[float], int],
) -> None:
    items, size_cost, parts = problem
    bounds = contiguous(array(size_cost), array(items), parts, "max")
    owner = np.repeat(np.arange(parts), np.diff(bounds)).tolist()
    costs = block_costs(items, owner, size_cost)
    ranked = min(
        (max(c), sum(c))
        for c in (block_costs(items, any_owner, size_cost) for any_owner in partitions(len(items), parts))
    )
    assert (max(costs), sum(costs)) == pytest.approx(ranked, rel=1e-9, abs=1e-12)


@given(
    items=st.lists(st.integers(1, 500), min_size=2, max_size=40),
    owner_seed=st.integers(0, 2**32 - 1),
    parts=st.integers(1, 6),
)
@FAST
def test_sorted_blocks_of_the_same_sizes_raise_no_groups_maximum(
    items: list[int], owner_seed: int, parts: int
) -> None:
    """The step of the theorem's proof: groups by falling maximum, refilled from the longest down."""
    owner = np.random.default_rng(owner_seed).integers(0, parts, len(items))
    groups = [array(items)[owner == part] for part in range(parts) if (owner == part).any()]
    groups.sort(key=lambda group: -float(group.max()))
    falling, start = sorted(items, reverse=True), 0
    for group in groups:
        assert falling[start] <= group.max()
        start += len(group)


@pytest.mark.parametrize(("n", "parts"), [(6, 2), (6, 3), (8, 2)])
def test_even_sorted_blocks_are_the_best_equal_counts(n: int, parts: int) -> None:
    """RLHFless's split, in the model where an actor takes as long as its longest response."""
    items = np.sort(np.random.default_rng(n + parts).integers(1, 1000, n))[::-1]
    blocks = [int(block.max()) for block in np.array_split(items, parts)]
    for owner in partitions(n, parts):
        if np.ptp(np.bincount(owner)) == 0:
            maxima = [int(items[np.array(owner) == part].max()) for part in range(parts)]
            assert sum(blocks) <= sum(maxima)
            assert max(blocks) <= max(maxima)


@given(problem=block_problems(), most=st.integers(1, 7))
@FAST
def test_a_largest_block_is_kept_or_refused(problem: tuple[list[int], list[float], int], most: int) -> None:
    items, size_cost, parts = problem
    if most * parts < len(items):
        with pytest.raises(ValueError, match="do not fit"):
            contiguous(array(size_cost), array(items), parts, "sum", most=most)
        return
    bounds = contiguous(array(size_cost), array(items), parts, "sum", most=most)
    found = float(
        sum(size_cost[size] * items[start] for start, size in zip(bounds, np.diff(bounds), strict=False))
    )
    assert np.diff(bounds).max() <= most
    assert found == pytest.approx(
        min(
            sum(block_costs(items, owner, size_cost))
            for owner in partitions(len(items), parts)
            if np.bincount(owner).max() <= most
        ),
        rel=1e-9,
        abs=1e-12,
    )


def test_more_blocks_than_items_are_refused() -> None:
    with pytest.raises(ValueError, match="4 blocks"):
        contiguous(np.ones(4), np.ones(3), 4)


def test_cuts_keep_to_the_edges_and_a_finer_choice_is_no_worse() -> None:
    rng = np.random.default_rng(1)
    items = np.sort(rng.lognormal(6, 0.8, 400))[::-1]
    size_cost = 0.01 + 1e-4 * np.arange(401)

    def value(edges: np.ndarray | None) -> float:
        bounds = contiguous(size_cost, items, 6, "max", edges=edges)
        if edges is not None:
            assert set(bounds.tolist()) <= set(edges.tolist())
        return float((size_cost[np.diff(bounds)] * items[bounds[:-1]]).max())

    coarse, fine, exact = value(np.arange(0, 401, 40)), value(np.arange(0, 401, 10)), value(None)
    assert exact <= fine <= coarse
    assert exact < coarse


@pytest.mark.parametrize("front_step", [0.02, 0.2])
def test_a_coarser_front_stays_within_its_stated_factor(front_step: float) -> None:
    rng = np.random.default_rng(2)
    size_cost = 0.01 + 2e-4 * np.arange(61)
    for weight in (0.3, 0.7):
        items = np.sort(rng.lognormal(6, 1, 60))[::-1]

        def value(step: float, items: np.ndarray = items, weight: float = weight) -> float:
            bounds = contiguous(size_cost, items, 5, "mix", weight=weight, front_step=step)
            costs = size_cost[np.diff(bounds)] * items[bounds[:-1]]
            return float(weight * costs.max() + (1 - weight) * costs.mean())

        assert value(0.0) <= value(front_step) <= value(0.0) / (1 - front_step)


def actor_seconds(lengths: list[int], tau: np.ndarray) -> float:
    """Return the time of one actor, iteration by iteration."""
    return float(
        sum(tau[sum(length > done for length in lengths)] for done in range(max(lengths, default=0)))
    )


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    steps=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
)
@FAST
def test_the_two_actor_program_finds_the_best_routing(lengths: list[int], steps: list[float]) -> None:
    lengths = sorted(lengths, reverse=True)
    tau = np.concatenate(([0.0], np.cumsum(steps)))

    def end(sides: tuple[int, ...]) -> float:
        return max(
            actor_seconds([length for length, side in zip(lengths, sides, strict=True) if side == actor], tau)
            for actor in (0, 1)
        )

    found = end(tuple(two_actors(array(lengths), tau).tolist()))
    best = min(end(sides) for sides in itertools.product((0, 1), repeat=len(lengths)))
    assert found == pytest.approx(best, rel=1e-9, abs=1e-12)
