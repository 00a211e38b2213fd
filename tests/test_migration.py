"""Local cut-and-migrate against actors that iterate side by side, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from factories import migrations, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Actor, LocalCut, Response

from rlhfless.models.decode import DecodePool, EngineOptions
from rlhfless.models.migration import decode_actors
from rlhfless.models.moves import Decoded, Transfer
from rlhfless.models.plan import Migration
from rlhfless.models.profile import Profile

#: Sums of these are exact in floating point, so that events at one instant are so in both implementations.
EXACT = {
    "decode__batch": [1, 65],
    "decode__base_seconds": [2.0**-6, 2.0**-6 + 2.0**-4],
    "decode__kv_token_seconds": [2.0**-20, 2.0**-20],
    "prefill__fixed_seconds": 2.0**-7,
    "prefill__token_seconds": 2.0**-12,
    "prefill__token2_seconds": 0.0,
}
KV_BYTES = 1024.0


def link(source: int, target: int, sent_bytes: float) -> float:
    return 2.0**-8 * (1 + abs(source - target)) + sent_bytes * 2.0**-24


def slow_link(source: int, target: int, sent_bytes: float) -> float:
    return 2.0**6 * link(source, target, sent_bytes)


def both(
    cost: Profile,
    rule: Migration,
    actors: list[list[tuple[int, int, int]]],
    starts: list[float],
    options: EngineOptions,
    transfer: Transfer = link,
) -> tuple[DecodePool, Decoded, LocalCut]:
    """Run actors of (prompt, length, group) responses under the product and the reference."""
    rows = [row for actor in actors for row in actor]
    prompt, length, group = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    pool = DecodePool(cost, prompt, length, group, len(actors), options)
    slow = []
    first = 0
    for number, actor in enumerate(actors):
        pool.start(number, starts[number])
        pool.add(number, np.arange(first, first + len(actor)))
        first += len(actor)
        own = [Response(p, n, g) for p, n, g in actor]
        slow.append(
            Actor(cost, options.prefix_caching, options.share_prompt_kv, clock=starts[number], own=own)
        )
    reference = LocalCut(slow, rule, transfer, KV_BYTES)
    responses = [r for actor in slow for r in actor.own]
    for row, response in enumerate(responses):
        response.number = row
    reference.run()
    decoded = decode_actors(pool, rule, transfer, KV_BYTES)
    np.testing.assert_allclose(pool.finish, [r.finish for r in responses], rtol=1e-9)
    np.testing.assert_allclose(decoded.release, [actor.release for actor in slow], rtol=1e-9)
    assert [(m.source, m.target, m.responses.tolist()) for m in decoded.moves] == [
        (s.source, s.target, [r.number for r in s.responses]) for s in reference.sent
    ]
    assert [m.kv_bytes for m in decoded.moves] == [s.tokens * KV_BYTES for s in reference.sent]
    for field in ("sent", "ready"):
        np.testing.assert_allclose(
            [getattr(m, field) for m in decoded.moves],
            [getattr(s, field) for s in reference.sent],
            rtol=1e-9,
        )
    for number, actor in enumerate(slow):
        counts = pool.counts(number)
        assert (counts.tokens, counts.preemptions) == (actor.tokens, actor.preemptions)
        assert counts.prefill_tokens == actor.prefill_tokens
    return pool, decoded, reference


@settings(max_examples=400, deadline=None)
@given(
    actors=st.lists(
        st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=8), min_size=2, max_size=4
    ).filter(any),
    rule=migrations(),
    max_running=st.sampled_from([1, 3, 8, 64]),
    slack=st.sampled_from([0, 30, 100_000]),
    exact=st.booleans(),
    caching=st.booleans(),
    share=st.booleans(),
    late=st.sampled_from([0.0, 0.5]),
    transfer=st.sampled_from([link, slow_link]),
)
def test_events_equal_tokens_on_several_actors(
    actors: list[list[tuple[int, int]]],
    rule: Migration,
    max_running: int,
    slack: int,
    exact: bool,
    caching: bool,
    share: bool,
    late: float,
    transfer: Transfer,
) -> None:
    """Finish times, releases, who moved where and when, KV bytes, tokens by actor: the same to 1e-9."""
    prompt = [5, 9, 14, 30]
    given_rows = [[(prompt[group], length, group) for length, group in actor] for actor in actors]
    largest = max(p + n for actor in given_rows for p, n, _ in actor)
    cost = profile(
        actor__max_running=max_running,
        actor__kv_capacity_tokens=largest + slack,
        **(EXACT if exact else {}),
    )
    # Unequal starts keep sums that are equal on paper apart, where they are not exact.
    offset = 0.0 if exact else 0.0137
    starts = [(late + offset) * number for number in range(len(actors))]
    both(cost, rule, given_rows, starts, EngineOptions(caching, share), transfer)


PLAIN = profile(
    **EXACT | {"decode__base_seconds": [1.0, 1.0], "decode__kv_token_seconds": [0.0, 0.0]}
    | {"prefill__fixed_seconds": 0.0, "prefill__token_seconds": 0.0}
)  # fmt: skip
"""Every iteration takes one second and prefill none, so that times count tokens."""


def plain(lengths: list[list[int]], rule: Migration) -> tuple[DecodePool, Decoded]:
    group = iter(range(100))
    actors = [[(4, length, next(group)) for length in own] for own in lengths]
    pool, decoded, _ = both(PLAIN, rule, actors, [0.0] * len(actors), EngineOptions())
    return pool, decoded


LOCAL = Migration(rule="local", threshold=0.5)


def test_an_actor_is_cut_at_its_threshold_and_released_after_the_transfer() -> None:
    """Actor 1 is half done at 3; actor 0 has a free slot from 2 on; 4 + 3 tokens of KV move."""
    pool, decoded = plain([[2, 20], [3, 10]], LOCAL)
    (move,) = decoded.moves
    assert (move.source, move.target, move.responses.tolist(), move.sent) == (1, 0, [3], 3.0)
    assert move.kv_bytes == (4 + 3) * KV_BYTES
    assert move.ready == 3.0 + link(1, 0, move.kv_bytes)
    assert decoded.release.tolist() == [20.0, move.ready]
    # It is admitted at the first boundary after its arrival, 4, and needs 7 more tokens.
    assert pool.finish.tolist() == [2.0, 20.0, 3.0, 11.0]


def test_a_cut_waits_for_slots_or_is_dropped() -> None:
    """At actor 1's threshold, 3, actor 0 is full; its first slot opens at 6."""
    waiting = plain([[6, 20], [3, 10]], LOCAL)[1]
    assert [move.sent for move in waiting.moves] == [6.0]
    dropped = plain([[6, 20], [3, 10]], LOCAL.model_copy(update={"wait_for_slots": False}))[1]
    assert dropped.moves == ()
    assert dropped.release.tolist() == [20.0, 10.0]


def test_all_or_nothing() -> None:
    """Two are left on actor 1; one slot on actor 0 is not enough, a second one is."""
    pool, decoded = plain([[2, 8, 30, 30], [3, 3, 20, 20]], LOCAL)
    assert [move.sent for move in decoded.moves] == [8.0]
    assert len(decoded.moves[0].responses) == 2
    assert pool.finish.max() == 30.0


def test_a_partial_cut_sends_the_most_advanced_and_goes_on() -> None:
    """At 3 actor 0 has one slot for the two that actor 1 has left: one goes, the other when a slot opens at 8."""
    lengths = [[2, 8, 30, 30], [3, 3, 20, 21]]
    pool, decoded = plain(lengths, LOCAL.model_copy(update={"partial": True}))
    assert [(m.sent, m.responses.tolist()) for m in decoded.moves] == [(3.0, [6]), (8.0, [7])]
    assert pool.finish.max() == 30.0
    assert decoded.release[1] == decoded.moves[1].ready


def test_a_partial_cut_of_an_actor_that_is_ending_moves_nothing() -> None:
    """A slot opens at 2.5 inside actor 1's iteration from 2 to 3, in which its last two responses end."""
    actors = [[(4, 2, 0), (4, 20, 1)], [(4, 1, 2), (4, 3, 3), (4, 3, 4)]]
    rule = LOCAL.model_copy(update={"partial": True, "threshold": 0.3})
    _, decoded, _ = both(PLAIN, rule, actors, [0.5, 0.0], EngineOptions())
    assert decoded.moves == ()
    assert decoded.release.tolist() == [20.5, 3.0]


def test_the_first_actor_is_kept_unless_the_rule_says_otherwise() -> None:
    """At 3 both actors have one of two left and a slot open: the lower number goes first."""
    lengths = [[2, 20], [3, 30]]
    kept = plain(lengths, LOCAL)[1].moves
    cut = plain(lengths, LOCAL.model_copy(update={"keep_first": False}))[1].moves
    assert [(move.source, move.target) for move in kept] == [(1, 0)]
    assert [(move.source, move.target) for move in cut] == [(0, 1)]


def test_an_actor_that_was_cut_takes_nothing_in() -> None:
    """No response goes to an actor after it sent its own away."""
    lengths = [[9, 9, 30], [1, 1, 2, 25], [1, 1, 3, 26], [1, 4, 4, 27]]
    _, decoded = plain(lengths, LOCAL.model_copy(update={"slots": "engine"}))
    sent_at = {}
    for move in decoded.moves:
        assert move.target not in sent_at
        sent_at[move.source] = move.sent
    assert len(sent_at) == 3


def test_responses_that_end_in_the_iteration_under_way_stay() -> None:
    """A slot opens at 2.5 inside actor 1's iteration from 2 to 3, in which its last response ends."""
    actors = [[(4, 2, 0), (4, 20, 1)], [(4, 1, 2), (4, 3, 3)]]
    _, decoded, _ = both(PLAIN, LOCAL, actors, [0.5, 0.0], EngineOptions())
    assert decoded.moves == ()
    assert decoded.release.tolist() == [20.5, 3.0]


def test_what_is_on_its_way_is_sent_on_when_it_has_arrived() -> None:
    """Actor 1's response leaves for actor 2 at 2 and needs 16 s; actor 2 ends its own at 9 and waits for it.

    At 12 a slot opens on actor 0 and actor 2 is cut: the response goes on when it has arrived, at 18.
    """
    lengths = [[12, 30], [1, 4], [2, 9]]
    group = iter(range(100))
    actors = [[(4, length, next(group)) for length in own] for own in lengths]

    def very_slow(source: int, target: int, sent_bytes: float) -> float:
        return 16.0

    rule = LOCAL.model_copy(update={"count_moved": False})
    pool, decoded, _ = both(PLAIN, rule, actors, [0.0] * 3, EngineOptions(), very_slow)
    assert [(m.source, m.target, m.sent, m.ready) for m in decoded.moves] == [
        (1, 2, 2.0, 18.0),
        (2, 0, 12.0, 34.0),
    ]
    # Actor 0 has ended its own by then, at 30. The response has 2 of its 4 tokens.
    assert pool.finish[3] == 36.0
    assert decoded.release.tolist() == [36.0, 18.0, 34.0]


def test_targets_by_open_slots_or_by_unfinished_work() -> None:
    """At 4, actor 0 has 3 of 4 slots open and one response left; actor 1 has 1 of 4 open and three left."""
    lengths = [[1, 1, 1, 20], [1, 30, 30, 30], [4, 10]]
    rule = LOCAL.model_copy(update={"threshold": 0.5, "count_moved": False})
    by_slots = plain(lengths, rule)[1].moves
    by_work = plain(lengths, rule.model_copy(update={"target": "most_unfinished"}))[1].moves
    assert [move.target for move in by_slots if move.source == 2] == [0]
    assert [move.target for move in by_work if move.source == 2] == [1]


def test_what_moved_in_counts_towards_the_threshold_or_not() -> None:
    """Actor 1 takes one in at 2. Of its then five, three must be complete (at 6); of its own four, two (at 4)."""
    lengths = [[1, 1, 40, 40], [1, 4, 6, 50], [2, 30]]
    rule = LOCAL.model_copy(update={"target": "most_unfinished", "slots": "engine"})
    counted = plain(lengths, rule)[1].moves
    own = plain(lengths, rule.model_copy(update={"count_moved": False}))[1].moves
    assert [(m.source, m.target, m.sent) for m in counted][:1] == [(2, 1, 2.0)]
    assert [m.sent for m in counted if m.source == 1] == [6.0]
    assert [m.sent for m in own if m.source == 1] == [4.0]


def test_recomputing_sends_nothing_and_prefills_prompt_and_tokens_again() -> None:
    cost = profile(**EXACT | {"prefill__fixed_seconds": 0.0})
    actors = [[(4, 2, 0), (4, 20, 1)], [(4, 3, 2), (4, 10, 3)]]
    rule = LOCAL.model_copy(update={"kv": "recompute"})
    pool, decoded, _ = both(cost, rule, actors, [0.0, 0.0], EngineOptions())
    (move,) = decoded.moves
    assert move.kv_bytes == 0
    assert move.ready == move.sent
    assert pool.counts(0).prefill_tokens == 4 + 4 + (4 + 3)


def test_no_rule_moves_nothing() -> None:
    pool, decoded = plain([[2, 20], [3, 10]], Migration())
    assert decoded.moves == ()
    assert decoded.release.tolist() == [20.0, 10.0]
    assert pool.finish.tolist() == [2.0, 20.0, 3.0, 10.0]


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_float_thresholds_count_whole_responses(threshold: float) -> None:
    """0.7 of ten responses is seven, although 0.7 * 10 is above seven in floating point."""
    need = round(threshold * 10)
    lengths = [[1] * 10 + [40] * 10, [*range(1, 10), 30]]
    rule = Migration(rule="local", threshold=threshold, slots="engine")
    (first, *_) = plain(lengths, rule)[1].moves
    assert first.sent == need
