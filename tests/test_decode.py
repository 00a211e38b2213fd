"""The event-driven decode actor against its definition."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from factories import profile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import Response, TokenByToken

from rlhfless.models.decode import DecodePool, EngineOptions, block_times, decode_one
from rlhfless.traces.errors import InputError

responses = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt tokens by group below
        st.integers(1, 90),  # response tokens
        st.integers(0, 6),  # group
        st.booleans(),  # prompt KV already there
        st.floats(0.0, 2.0),  # arrival
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    rows=responses,
    max_running=st.sampled_from([1, 2, 5, 64]),
    slack=st.sampled_from([0, 3, 40, 400, 100_000]),
    budget=st.sampled_from([16, 64, 4096]),
    caching=st.booleans(),
    share=st.booleans(),
    arrivals=st.booleans(),
)
@example(
    rows=[(10, 50, g, False, 0.0) for g in range(6)],
    max_running=64, slack=40, budget=64, caching=True, share=False, arrivals=False,
)  # fmt: skip
def test_events_equal_tokens(
    rows: list[tuple[int, int, int, bool, float]],
    max_running: int,
    slack: int,
    budget: int,
    caching: bool,
    share: bool,
    arrivals: bool,
) -> None:
    """Waiting queues, tight KV capacity, preemptions and arrivals: the same times to 1e-9."""
    prompt_of = {group: prompt for prompt, _, group, _, _ in rows}
    prompt = np.array([prompt_of[row[2]] for row in rows])
    length = np.array([row[1] for row in rows])
    group = np.array([row[2] for row in rows])
    cached = np.where([row[3] for row in rows], prompt, 0)
    ready = np.sort([row[4] for row in rows]) if arrivals else np.zeros(len(rows))
    cost = profile(
        actor__max_running=max_running,
        actor__kv_capacity_tokens=int((prompt + length).max()) + slack,
        prefill__max_batch_tokens=budget,
    )

    slow = TokenByToken(cost, caching, share)
    expected = [
        Response(int(p), int(n), int(g), int(c), float(t))
        for p, n, g, c, t in zip(prompt, length, group, cached, ready, strict=True)
    ]
    slow.run(expected)

    pool = DecodePool(cost, prompt, length, group, 1, EngineOptions(caching, share))
    pool.cached[:] = cached
    for row in range(len(rows)):
        pool.add(0, np.array([row]), float(ready[row]))
    pool.run(0)

    np.testing.assert_allclose(pool.finish, [r.finish for r in expected], rtol=1e-9)
    counts = pool.counts(0)
    assert counts.preemptions == slow.preemptions
    assert counts.prefill_tokens == slow.prefill_tokens
    assert counts.iterations == slow.iterations
    assert counts.clock == pytest.approx(slow.clock, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=60),
    cuts=st.lists(st.floats(0.001, 5.0), max_size=6),
    slack=st.sampled_from([0, 60, 100_000]),
)
def test_pausing_changes_nothing(lengths: list[int], cuts: list[float], slack: int) -> None:
    """An actor stopped at any boundaries and resumed ends at the same times."""
    n = len(lengths)
    length = np.array(lengths)
    prompt = np.full(n, 20)
    group = np.arange(n)
    cost = profile(actor__max_running=8, actor__kv_capacity_tokens=int(length.max()) + 20 + slack)
    whole, _ = decode_one(cost, prompt, length, group)
    pool = DecodePool(cost, prompt, length, group, 1)
    pool.add(0, np.arange(n))
    for until in sorted(cuts):
        clock = pool.run(0, until=until)
        assert clock >= until or not np.isinf(pool.finish).any()
    for finished in range(1, n + 1, 3):
        pool.run(0, finished=finished)
        assert pool.counts(0).finished >= finished
    pool.run(0)
    np.testing.assert_allclose(pool.finish, whole, rtol=1e-9)


def test_iteration_counts_give_the_decode_time_of_affine_costs() -> None:
    """Base + slope b + gamma k: decode seconds are linear in iterations, tokens, and resident tokens."""
    rng = np.random.default_rng(1)
    length = rng.integers(1, 400, 300)
    prompt = rng.integers(1, 100, 300)
    cost = profile(
        decode__batch=[1, 101], decode__base_seconds=[0.010, 0.020], decode__kv_token_seconds=[2e-7, 2e-7]
    )
    _, counts = decode_one(cost, prompt, length, np.arange(300))
    slope = 0.010 / 100
    expected = (0.010 - slope) * counts.iterations + slope * counts.tokens + 2e-7 * counts.resident_sum
    assert counts.tokens == length.sum()
    assert counts.decode_seconds == pytest.approx(expected, rel=1e-9)


def test_exact_time_of_a_batch_admitted_whole() -> None:
    """sum_j tau(j) (L_j - L_{j+1}), the closed form for sorted lengths without a KV term or prefill."""
    length = np.array([3, 50, 7, 20, 20])
    cost = profile(
        decode__kv_token_seconds=[0, 0, 0], prefill__fixed_seconds=0, prefill__token_seconds=0,
        prefill__token2_seconds=0,
    )  # fmt: skip
    base, _ = cost.decode_tables
    descending = np.append(np.sort(length)[::-1], 0)
    expected = sum(base[j] * (descending[j - 1] - descending[j]) for j in range(1, 6))
    finish, _ = decode_one(cost, np.full(5, 9), length, np.arange(5))
    assert finish.max() == pytest.approx(expected, rel=1e-12)


def test_a_response_that_cannot_fit_alone_is_refused() -> None:
    cost = profile(actor__kv_capacity_tokens=100)
    with pytest.raises(InputError, match="response 1 needs 101 KV tokens"):
        DecodePool(cost, np.array([10, 20]), np.array([5, 81]), np.array([0, 1]), 1)


def test_the_kernel_is_500_times_faster_than_tokens() -> None:
    """5,000 responses of mean length 500 on one actor, both measured in this run."""
    rng = np.random.default_rng(0)
    length = rng.geometric(1 / 500, 5000)
    prompt = rng.integers(50, 200, 5000)
    group = np.arange(5000)
    cost = profile(actor__max_running=256)
    decode_one(cost, prompt, length, group)  # compile

    started = time.perf_counter()
    slow = TokenByToken(cost)
    expected = [Response(int(p), int(n), int(g)) for p, n, g in zip(prompt, length, group, strict=True)]
    slow.run(expected)
    slow_seconds = time.perf_counter() - started

    fast_seconds = np.inf
    for _ in range(5):
        started = time.perf_counter()
        finish, _ = decode_one(cost, prompt, length, group)
        fast_seconds = min(fast_seconds, time.perf_counter() - started)
    np.testing.assert_allclose(finish, [r.finish for r in expected], rtol=1e-9)
    assert slow_seconds / fast_seconds > 500


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 120)), min_size=1, max_size=40),
    falling=st.booleans(),
    prefilled=st.booleans(),
    max_running=st.sampled_from([4, 64]),
    slack=st.sampled_from([0, 100_000]),
)
def test_planning_times_are_the_replays(
    rows: list[tuple[int, int]], falling: bool, prefilled: bool, max_running: int, slack: int
) -> None:
    """Block times, with their short cut for blocks that run whole, equal the replay of each block."""
    rows = sorted(rows, key=lambda row: -row[1]) if falling else rows
    prompt, length = (np.array(column) for column in zip(*rows, strict=True))
    group = np.arange(len(rows))
    cached = prompt if prefilled else np.zeros_like(prompt)
    cost = profile(
        actor__max_running=max_running, actor__kv_capacity_tokens=int((prompt + length).max()) + slack
    )
    blocks = np.array_split(np.arange(len(rows)), min(3, len(rows)))
    ends = block_times(cost, prompt, length, group, blocks, cached)
    for block, end in zip(blocks, ends, strict=True):
        finish, _ = decode_one(cost, prompt[block], length[block], group[block], cached_tokens=cached[block])
        assert end == pytest.approx(finish.max(), rel=1e-9)


def test_memory_grows_linearly_up_to_a_million_responses() -> None:
    """64 actors with waiting queues: four times the responses take at most four times the memory, and a bit."""

    def peak(n: int) -> int:
        rng = np.random.default_rng(0)
        length, prompt = rng.geometric(1 / 500, n), rng.integers(50, 200, n)
        tracemalloc.start()
        pool = DecodePool(cost, prompt, length, np.arange(n) // 4, 64)
        for actor in range(64):
            pool.add(actor, np.arange(actor, n, 64))
            pool.run(actor)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.isfinite(pool.finish).all()
        return most

    cost = profile(actor__max_running=256)
    peak(1000)  # compile
    assert peak(1_000_000) < 4.2 * peak(250_000)
