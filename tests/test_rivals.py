"""The rivals' assignments: what each promises, against enumeration on small batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import yaml
from factories import batch, profile, setting, shipped_policies, view
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.models.decode import decode_one
from rlhfless.models.profile import Profile
from rlhfless.policies import (
    Anywhere,
    Composed,
    ContiguousDp,
    Ewma,
    FixedActors,
    GroupWorkers,
    KarmarkarKarp,
    Lpt,
    MinMaxScore,
    Multifit,
    Random,
    RoundRobin,
    StepView,
    TailSplit,
    TopK,
    simulate,
)
from rlhfless.policies.assign import Assignment, Groups
from rlhfless.policies.check import check_policy
from rlhfless.policies.partition import two_actors
from rlhfless.traces.errors import InputError
from rlhfless.traces.synthetic import Synthetic, generate

FAST = settings(max_examples=40, deadline=None)

#: No prefill and no KV term: an actor's time follows from running responses alone.
PLAIN = {"decode__kv_token_seconds": [0.0, 0.0, 0.0]}

BALANCED: dict[str, Callable[[Any], Assignment]] = {
    "random": lambda unit: Random(unit),
    "round robin": lambda unit: RoundRobin(unit),
    "lpt": lambda unit: Lpt(unit),
    "lpt by training work": lambda unit: Lpt(unit, "verl"),
    "multifit": lambda unit: Multifit(unit=unit),
    "differencing": lambda unit: KarmarkarKarp(equal_size=False, unit=unit),
    "equal differencing": lambda unit: KarmarkarKarp(equal_size=True, unit=unit),
}
GROUPED: dict[str, Callable[[Any], Assignment]] = {
    "group workers": lambda unit: GroupWorkers(unit=unit),
    "three groups, linear": lambda unit: GroupWorkers(groups=3, shape="linear", unit=unit),
    "tail split": lambda unit: TailSplit(unit=unit),
    "tail split, max": lambda unit: TailSplit(combine="max", unit=unit),
    "top k": lambda unit: TopK(unit=unit),
    "top k, controller": lambda unit: TopK(search="controller", unit=unit),
    "top k, exact": lambda unit: TopK(exact_up_to=12, unit=unit),
    "contiguous": lambda unit: ContiguousDp(),
    "contiguous, sum": lambda unit: ContiguousDp(objective="sum"),
    "contiguous, mix": lambda unit: ContiguousDp(objective="mix", resolution=16),
}
PARTS = BALANCED | GROUPED


def step(lengths: Any, samples: int = 1, *, seed: int = 0, nodes: int = 20, **changes: Any) -> StepView:
    """Return the view of a batch with ``samples`` consecutive responses to each prompt of 100 tokens."""
    n = len(lengths)
    trace = batch([100] * n, list(lengths), (np.arange(n) // samples).tolist())
    seen = view(trace, setting(profile(**changes), nodes=nodes), cap=10**6)
    return replace(seen, rng=np.random.default_rng(seed))


def predicted(lengths: Any) -> np.ndarray:
    return np.asarray(lengths, dtype=np.float64)


def end(seen: StepView, rows: np.ndarray, lengths: np.ndarray) -> float:
    """Return the seconds of one actor without prefill, by the replay."""
    finish, _ = decode_one(
        seen.profile,
        seen.prompt_tokens[rows],
        lengths[rows].astype(np.int64),
        seen.tree.group[rows],
        cached_tokens=seen.prompt_tokens[rows],
    )
    return float(finish.max())


@pytest.mark.parametrize("name", PARTS)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    samples=st.integers(1, 4),
    actors=st.integers(1, 12),
    unit=st.sampled_from(["response", "prompt"]),
)
@FAST
def test_every_row_stands_on_one_actor_and_none_is_empty(
    name: str, lengths: list[int], samples: int, actors: int, unit: str
) -> None:
    groups = PARTS[name](unit)(step(lengths, samples), predicted(lengths), actors)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    assert min(len(group) for group in groups) > 0
    assert len(groups) <= actors
    if unit == "response":
        assert len(groups) == min(actors, len(lengths))


@pytest.mark.parametrize("name", BALANCED)
def test_a_prompt_is_not_torn_apart_where_it_is_the_unit(name: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 60)
    groups = BALANCED[name]("prompt")(step(lengths, samples=4), predicted(lengths), 4)
    assert len(groups) == 4
    assert sum(len(set((group // 4).tolist())) for group in groups) == 15


@pytest.mark.parametrize("name", ["lpt", "multifit", "differencing", "equal differencing", *GROUPED])
def test_an_actor_admits_its_longest_responses_first(name: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 60)
    for group in PARTS[name]("response")(step(lengths), predicted(lengths), 5):
        assert (np.diff(lengths[group]) <= 0).all()


def test_random_depends_on_its_generator_only_and_gives_equal_counts() -> None:
    lengths = np.arange(1, 101)

    def groups(seed: int) -> list[list[int]]:
        return [
            group.tolist() for group in Random("response")(step(lengths, seed=seed), predicted(lengths), 7)
        ]

    assert groups(3) == groups(3)
    assert groups(3) != groups(4)
    assert {len(group) for group in groups(3)} == {14, 15}


def test_round_robin_deals_prompts_as_they_come() -> None:
    groups = RoundRobin("prompt")(step([5] * 10, samples=2), predicted([5] * 10), 3)
    assert [group.tolist() for group in groups] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5]]


def test_verls_workload_counts_attention_over_prompt_and_response() -> None:
    """One very long response outweighs many short ones of the same tokens, by the square of its length."""
    lengths = [60_000] + [1_000] * 60
    seen = step(lengths)
    by_tokens, by_work = (
        {len(g) for g in Lpt("response", load)(seen, predicted(lengths), 2)}  # type: ignore[arg-type]
        for load in ("tokens", "verl")
    )
    assert by_tokens == {1, 60}
    assert by_work == {1, 60}
    # 24576 * 60,100 + 60,100^2 is the work of 188 responses of 1,100 tokens: others join only beyond that.
    longer = [60_000] + [1_000] * 300
    alone = min(Lpt("response", "verl")(step(longer), predicted(longer), 2), key=len)
    work = 24576 * 1100 + 1100**2
    assert len(alone) == 1 + round((300 - (24576 * 60_100 + 60_100**2) / work) / 2)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write ``total`` as an ordered sum of so many positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("shape", ["even", "linear"])
@pytest.mark.parametrize("number", [2, 3])
def test_group_workers_are_the_best_of_all_allocations(shape: Any, number: int) -> None:
    for seed in range(4):
        lengths = predicted(np.random.default_rng(seed).lognormal(5, 1, 48).astype(int) + 1)
        seen = step(lengths)
        actors = 7
        falling = np.argsort(-lengths, kind="stable")
        ranked = np.array_split(falling, number)
        target = [1.0] * number if shape == "even" else [(number - i) / number for i in range(number)]

        def worst(counts: list[float], target: list[float] = target) -> float:
            return max(seconds / goal for seconds, goal in zip(counts, target, strict=True))

        best = min(
            worst(
                [
                    max(end(seen, group[i::count], lengths) for i in range(count))
                    for group, count in zip(ranked, counts, strict=True)
                ]
            )
            for counts in compositions(actors, number)
        )
        groups = GroupWorkers(groups=number, shape=shape, unit="response")(seen, lengths, actors)
        ends = [
            max(end(seen, rows, lengths) for rows in groups if np.isin(rows, group).all()) for group in ranked
        ]
        assert worst(ends) == pytest.approx(best)


def test_the_number_of_groups_is_the_one_that_ends_first() -> None:
    for seed in range(4):
        lengths = predicted(np.random.default_rng(seed).lognormal(5, 1.2, 64).astype(int) + 1)
        seen = step(lengths)

        def finish(groups: Groups, seen: StepView = seen, lengths: np.ndarray = lengths) -> float:
            return max(end(seen, rows, lengths) for rows in groups)

        ends = [finish(GroupWorkers(groups=g, unit="response")(seen, lengths, 8)) for g in (1, 2, 4, 8)]
        assert finish(GroupWorkers(unit="response")(seen, lengths, 8)) == pytest.approx(min(ends))


@pytest.mark.parametrize("combine", ["sum", "max"])
def test_tail_split_minimises_streamrls_latency(combine: Any) -> None:
    lengths = predicted(np.sort(np.random.default_rng(5).lognormal(6, 0.8, 200).astype(int) + 1)[::-1])
    seen = step(lengths, **PLAIN)
    groups = TailSplit(share=0.2, combine=combine, unit="response")(seen, lengths, 10)
    tail_actors = sum(bool((rows < 40).all()) for rows in groups)
    assert sum(len(rows) for rows in groups[:tail_actors]) == 40
    knots, base = seen.profile.decode.batch, seen.profile.decode.base_seconds

    def latency(responses: int, actors: int, quantile: float) -> float:
        per_actor = responses / actors
        running = min(np.ceil(per_actor), 64)
        tokens = np.percentile(lengths, quantile)
        return float(np.interp(running, knots, base) * tokens * max(per_actor / running, 1))

    pick = sum if combine == "sum" else max
    values = {n: pick((latency(40, n, 90), latency(160, 10 - n, 50))) for n in range(1, 10)}
    assert tail_actors == min(values, key=values.__getitem__)


def test_tail_split_balances_tokens_only_where_slots_limit_the_batch() -> None:
    lengths = predicted(np.sort(np.random.default_rng(6).lognormal(6, 1, 300).astype(int) + 1)[::-1])
    for slots in (64, 512):
        seen = step(lengths, actor__max_running=slots)
        groups = TailSplit(share=0.1, combine="max", unit="response")(seen, lengths, 4)
        others = [rows for rows in groups if (rows >= 30).all()]
        assert len(others) > 1
        in_turn = [np.arange(30 + i, 300, len(others)) for i in range(len(others))]
        dealt = [rows.tolist() for rows in others] == [rows.tolist() for rows in in_turn]
        assert dealt == (slots == 512)
        if not dealt:
            assert np.ptp([lengths[r].sum() for r in others]) < np.ptp([lengths[r].sum() for r in in_turn])


def test_top_k_ends_no_later_than_its_neighbours() -> None:
    for seed, actors in ((0, 2), (1, 2), (2, 4), (3, 8)):
        lengths = predicted(np.random.default_rng(seed).lognormal(5, 1.2, 150).astype(int) + 1)
        seen = step(lengths)
        falling = np.argsort(-lengths, kind="stable")

        def finish(k: int, seen: StepView = seen, lengths: np.ndarray = lengths, a: int = actors) -> float:
            falling = np.argsort(-lengths, kind="stable")
            others = [falling[k + i :: a - 1] for i in range(a - 1)]
            return max(end(seen, rows, lengths) for rows in (falling[:k], *others))

        groups = TopK(unit="response")(seen, lengths, actors)
        k = len(groups[0])
        assert groups[0].tolist() == falling[:k].tolist()
        assert finish(k) <= min(finish(other) for other in (k - 1, k + 1, 2 * k, actors, 75) if other > 0)


def test_top_k_is_close_to_the_exact_optimum_of_two_actors() -> None:
    """Measured on 40 heavy-tailed batches of 20: at most 4 % above, as TailSieve reports of its own batches."""
    for seed in range(40):
        lengths = predicted(np.random.default_rng(seed).lognormal(5, 1, 20).astype(int) + 1)
        seen = step(lengths, **PLAIN)
        falling = np.argsort(-lengths, kind="stable")
        tau = np.concatenate(([0.0], seen.profile.decode_tables[0][1:21]))
        side = two_actors(lengths[falling], tau)
        exact = max(end(seen, falling[side == actor], lengths) for actor in (0, 1))
        found = max(end(seen, rows, lengths) for rows in TopK(unit="response")(seen, lengths, 2))
        assert exact <= found * (1 + 1e-9)
        assert found <= 1.04 * exact
        same = TopK(unit="response", exact_up_to=20)(seen, lengths, 2)
        assert max(end(seen, rows, lengths) for rows in same) == pytest.approx(exact)


def test_the_controller_ends_within_two_percent_of_the_balance() -> None:
    for seed in range(8):
        lengths = predicted(np.random.default_rng(seed).lognormal(5, 0.8, 400).astype(int) + 1)
        seen = step(lengths)
        balanced, controlled = (
            max(end(seen, rows, lengths) for rows in TopK(search=search, unit="response")(seen, lengths, 2))  # type: ignore[arg-type]
            for search in ("balance", "controller")
        )
        assert balanced <= controlled * (1 + 1e-9)
        assert controlled <= 1.02 * balanced


def test_one_runaway_gets_an_actor_of_its_own() -> None:
    lengths = predicted([20_000] + [100] * 99)
    groups = TopK(unit="response")(step(lengths), lengths, 3)
    assert groups[0].tolist() == [0]
    even = np.array_split(np.arange(100), 3)
    seen = step(lengths)
    assert max(end(seen, g, lengths) for g in groups) < max(end(seen, g, lengths) for g in even)


@given(lengths=st.lists(st.integers(1, 2000), min_size=3, max_size=10), actors=st.integers(1, 3))
@FAST
def test_contiguous_cuts_have_the_least_makespan_of_interference_times_length(
    lengths: list[int], actors: int
) -> None:
    lengths = sorted(lengths, reverse=True)
    seen = step(lengths, actor__max_running=4, **PLAIN)
    knots, base = seen.profile.decode.batch, seen.profile.decode.base_seconds

    def cost(block: list[int]) -> float:
        running = min(len(block), 4)
        return float(np.interp(running, knots, base)) * max(len(block) / running, 1) * block[0]

    groups = ContiguousDp(objective="max")(seen, predicted(lengths), actors)
    found = max(cost([lengths[row] for row in rows]) for rows in groups)
    best = min(
        max(cost(lengths[a:b]) for a, b in itertools.pairwise((0, *cuts, len(lengths))))
        for cuts in itertools.combinations(range(1, len(lengths)), actors - 1)
    )
    assert found == pytest.approx(best)
    assert np.concatenate(groups).tolist() == list(range(len(lengths)))


def test_coarse_cuts_stay_close_to_the_exact_ones() -> None:
    lengths = predicted(np.sort(np.random.default_rng(7).lognormal(6, 1, 2000).astype(int) + 1)[::-1])
    seen = step(lengths, **PLAIN)
    knots, base = seen.profile.decode.batch, seen.profile.decode.base_seconds

    def worst(resolution: int) -> float:
        return max(
            float(np.interp(min(len(rows), 64), knots, base)) * max(len(rows) / 64, 1) * lengths[rows[0]]
            for rows in ContiguousDp(resolution=resolution)(seen, lengths, 12)
        )

    assert worst(2000) <= worst(256) <= 1.03 * worst(2000)


def test_a_block_limit_that_cannot_hold_the_batch_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="do not fit 2 blocks of at most 3"):
        ContiguousDp(most_responses=3)(step([5] * 10), predicted([5] * 10), 2)


def test_without_locality_actors_land_anywhere_but_fit() -> None:
    seen = step([5] * 10, nodes=3)
    places = [Anywhere()(seen, np.ones(12)) for _ in range(200)]
    assert all(not colocated for actors in places for _, colocated in actors)
    assert all(np.bincount([node for node, _ in actors]).tolist() == [4, 4, 4] for actors in places)
    first = np.bincount([actors[0][0] for actors in places], minlength=3)
    assert first.min() > 40  # 67 each expected, six standard deviations are 40


@pytest.mark.parametrize("name", sorted(shipped_policies()))
def test_shipped_policies_pass_the_checker(name: str) -> None:
    policy = shipped_policies()[name]
    assert policy.name == name
    check_policy(policy)


#: Assignments that are not exact programs, whose planning must not grow faster than n log n.
SCALABLE = {name: part for name, part in PARTS.items() if not name.startswith("contiguous")}


@pytest.mark.parametrize("name", SCALABLE)
def test_planning_grows_no_faster_than_n_log_n(name: str) -> None:
    """Time at 64k responses over time at 4k, the least of several runs in one process, with slack 3."""
    policy = Composed(
        name="timed", predict=Ewma(), assign=SCALABLE[name]("prompt"), scale=FixedActors(actors=16)
    )
    seconds = []
    for n in (4096, 65536):
        lengths = np.random.default_rng(0).lognormal(6, 0.8, n).astype(int) + 1
        trace = batch([100] * n, lengths.tolist(), (np.arange(n) // 4).tolist(), answer_tokens=lengths)
        seen = view(trace, setting(profile(actor__max_running=256), nodes=20), cap=10**6)
        policy.plan(seen)
        best = np.inf
        for _ in range(3):
            started = time.perf_counter()
            policy.plan(seen)
            best = min(best, time.perf_counter() - started)
        seconds.append(best)
    assert seconds[1] / seconds[0] <= 3 * (65536 * 16) / (4096 * 12)


def test_a_rivals_assignment_works_under_rlhfless_scaling() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 256).astype(int) + 1
    for name, part in PARTS.items():
        policy = Composed(name=name, assign=part("response"), scale=MinMaxScore(most=6))
        plan = policy.plan(step(lengths, samples=2))
        assert 1 <= len(plan.actors) <= 6


PRESETS = ["gsm8k_ppo", "gsm8k_grpo", "dapo_math", "deepcoder_16k", "long_reasoning"]


@pytest.mark.parametrize("preset", PRESETS)
def test_shipped_policies_run_on_a_small_copy_of_every_preset(preset: str) -> None:
    folder = files("rlhfless.conf")
    values = yaml.safe_load(folder.joinpath("trace", f"{preset}.yaml").read_text(encoding="utf-8"))
    small = {"prompts": 12, "prompts_per_step": 6, "epochs": 2}
    trace = generate(Synthetic.parse(values | small, preset), seed=0)
    text = folder.joinpath("profile", "l40s_qwen2.5-3b_tp2.yaml").read_text(encoding="utf-8")
    where = setting(Profile.parse(yaml.safe_load(text), "profile"), learner_gpus=6)
    for policy in shipped_policies().values():
        trained = sum(run.outcome.responses for run in simulate(trace, policy, where))
        assert trained == len(trace), policy.name
