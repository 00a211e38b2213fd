"""The rules of docs/invariants.md, each by its number, on random runs: traces, profiles, clusters, policies."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from factories import (
    Case,
    batch,
    cases,
    policies,
    profile,
    setting,
    shipped_policies,
    traces,
    view,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlhfless.models.checks import TOLERANCE, violations
from rlhfless.models.decode import DecodePool, EngineOptions, decode_one
from rlhfless.models.plan import Plan, allocate
from rlhfless.models.profile import LEARNING_STAGES, Link, Profile
from rlhfless.models.replay import Billing, Interval, Replay
from rlhfless.models.scores import step_record
from rlhfless.policies import (
    Composed,
    DeduplicatedPrefill,
    LocalPrefill,
    Policy,
    SimulatedStep,
    StepView,
    simulate,
)
from rlhfless.solver.bounds import step_lower_bound
from rlhfless.solver.horizon import HorizonPolicy
from rlhfless.solver.learned import Learned
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import Trace

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SLACK = 1e-9


def run(case: Case, **changes: Any) -> list[SimulatedStep]:
    """Replay a drawn run; those whose policy finds no room for an actor on the drawn GPUs are not of interest."""
    try:
        return case.steps(**changes)
    except InputError as error:
        assume("does not fit the GPUs" not in str(error) and "GPUs of their own" not in str(error))
        raise


def changes_batches(policy: Policy) -> bool:
    """Tell whether a policy's steps launch other prompts than the trace's steps."""
    return bool(getattr(getattr(policy, "sampling", None), "changes_batches", False))


def slack(step: SimulatedStep) -> float:
    return SLACK * max(1.0, step.outcome.began + step.outcome.step_seconds)


@MANY
@given(case=cases())
def test_invariant_01_tokens_are_conserved(case: Case) -> None:
    for step in run(case):
        outcome = step.outcome
        lengths = step.batch.response_tokens
        assert (outcome.generated <= lengths).all()
        assert (outcome.generated[outcome.delivered] == lengths[outcome.delivered]).all()
        assert outcome.decoded_tokens == outcome.generated.sum() - outcome.carried_tokens
        if not changes_batches(case.policy):
            assert outcome.decoded_tokens == lengths.sum()


@MANY
@given(case=cases())
def test_invariant_02_every_response_finishes_exactly_once(case: Case) -> None:
    for step in run(case):
        outcome, plan = step.outcome, step.plan
        # Where each response is in the end: where the plan put it, or where it was last sent.
        home = np.full(len(step.batch), -1)
        for number, actor in enumerate(plan.actors):
            assert (home[actor.responses] == -1).all()
            home[actor.responses] = number
        for move in sorted(outcome.moves, key=lambda move: move.sent):
            home[move.responses] = move.target
        for r in np.flatnonzero(outcome.delivered):
            begin, end = outcome.stage_times[f"decode.{home[r]}"]
            # With one queue for all, a response that has no KV yet goes anywhere and counts as no move.
            if plan.migration.rule != "dispatch" and not changes_batches(case.policy):
                assert begin < outcome.finish[r] <= end + slack(step)
            assert outcome.finish[r] <= outcome.generation_seconds + slack(step)
        if not changes_batches(case.policy):
            assert outcome.delivered.all()
            assert outcome.responses == len(step.batch)


@MANY
@given(case=cases())
def test_invariant_03_stages_follow_their_inputs(case: Case) -> None:
    for step in run(case):
        times, graph = step.outcome.stage_times, step.outcome.graph
        assert set(times) == set(graph.nodes)
        for before, after in graph.edges:
            assert times[before][1] <= times[after][0] + slack(step)
        for stage in step.outcome.graph.nodes:
            if stage.startswith("decode."):
                assert f"weight_sync.{stage.removeprefix('decode.')}" in graph.predecessors(stage)
        # What the GPUs do and what the graph says is the same.
        for interval in step.outcome.intervals:
            if interval.kind == "busy":
                expected = np.array(times[interval.function]) + step.outcome.began
                np.testing.assert_allclose((interval.start, interval.end), expected, atol=slack(step))


@MANY
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.7])),
        min_size=1,
        max_size=20,
    ),
    max_running=st.sampled_from([1, 3, 64]),
    spare=st.sampled_from([0, 20, 100, 10_000]),
    share=st.booleans(),
)
def test_invariant_04_actors_stay_within_their_limits(
    rows: list[tuple[int, int, float]], max_running: int, spare: int, share: bool
) -> None:
    """Looked at from outside at every boundary: who runs, and how much KV they hold."""
    prompts = np.array([7, 3, 20, 11])
    length, group = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    prompt = prompts[group]
    capacity = int((prompt + length).max()) + spare
    cost = profile(actor__max_running=max_running, actor__kv_capacity_tokens=capacity)
    pool = DecodePool(cost, prompt, length, group, 1, EngineOptions(share_prompt_kv=share))
    for r, (_, _, ready) in sorted(enumerate(rows), key=lambda row: row[1][2]):
        pool.add(0, np.array([r]), ready)
    seen = -1.0
    while not np.isfinite(pool.finish).all():
        clock = pool.run(0, until=np.nextafter(max(seen, pool.counts(0).clock), np.inf))
        assert clock > seen or pool.counts(0).tokens == 0
        seen = clock
        running, _ = pool.copy().remove(0)
        held = int(pool.generated[running].sum()) + (
            int(sum(prompts[g] for g in set(group[running].tolist())))
            if share
            else int(prompt[running].sum())
        )
        assert len(running) <= max_running
        assert held <= capacity
        if not len(running) and not np.isfinite(pool.finish).all():
            seen = min(ready for r, (_, _, ready) in enumerate(rows) if not np.isfinite(pool.finish[r]))
            pool.run(0, until=np.nextafter(seen, np.inf))
    counts = pool.counts(0)
    assert counts.peak_running <= max_running
    assert counts.peak_kv_tokens <= capacity


@MANY
@given(case=cases())
def test_invariant_05_a_gpu_does_one_thing_at_a_time(case: Case) -> None:
    """Over the whole run, since prewarmed functions start in the step before theirs."""
    steps = run(case)
    held: dict[int, list[Interval]] = defaultdict(list)
    for step in steps:
        for interval in step.outcome.intervals:
            assert interval.start < interval.end
            assert len(set(interval.gpus)) == len(interval.gpus)
            for gpu in interval.gpus:
                held[gpu].append(interval)
    assert set(held) <= set(range(case.setting.cluster.gpus))
    for intervals in held.values():
        for one, other in pairwise(sorted(intervals, key=lambda i: (i.start, i.end))):
            assert one.end <= other.start + slack(steps[-1])


@MANY
@given(case=cases())
def test_invariant_06_busy_is_at_most_billed(case: Case) -> None:
    for step in run(case):
        outcome = step.outcome
        busy = sum(i.gpu_seconds for i in outcome.intervals if i.kind == "busy")
        assert busy == pytest.approx(outcome.busy_gpu_seconds, rel=SLACK)
        assert outcome.busy_gpu_seconds <= outcome.gpu_seconds * (1 + SLACK) + slack(step)
        assert all(value >= -slack(step) for value in outcome.by_function.values())


@MANY
@given(case=cases())
def test_invariant_07_functions_add_up_to_the_bill(case: Case) -> None:
    for step in run(case):
        outcome = step.outcome
        assert sum(outcome.by_function.values()) == pytest.approx(outcome.gpu_seconds, rel=SLACK, abs=SLACK)
        named = {i.function.split(".", 1)[0] for i in outcome.intervals}
        beside = {"held"} if step.plan.platform == "serverful" else {"keep_alive", "learner_waiting"}
        assert set(outcome.by_function) <= named | beside


@MANY
@given(case=cases())
def test_invariant_08_serverful_gpus_are_held_for_the_whole_step(case: Case) -> None:
    for step in run(case):
        outcome, plan = step.outcome, step.plan
        if plan.platform != "serverful":
            continue
        allocation = allocate(plan, case.setting.cluster, "test")
        held = set(allocation.learner).union(*allocation.actors)
        held |= {gpu for interval in outcome.intervals for gpu in interval.gpus}
        assert outcome.gpu_seconds == pytest.approx(len(held) * outcome.step_seconds, rel=SLACK)
        assert outcome.cold_starts == 0
        assert outcome.startup_gpu_seconds == 0


@MANY
@given(case=cases())
def test_invariant_09_billing_switches_change_only_what_they_name(case: Case) -> None:
    assume(not changes_batches(case.policy))
    # Policies that plan keep-alive by what it costs decide otherwise under other switches.
    assume(not isinstance(case.policy, Learned | HorizonPolicy))
    names = {
        "startup": "startup_gpu_seconds",
        "prewarmed_waiting": "prewarmed_waiting_gpu_seconds",
        "keep_alive": "keep_alive_gpu_seconds",
    }

    def billed(billing: Billing) -> list[SimulatedStep]:
        options = replace(case.setting.options, billing=billing)
        return run(case, setting=replace(case.setting, options=options))

    none = Billing(**dict.fromkeys((field.name for field in fields(Billing)), False))
    least = billed(none)
    for switch, name in names.items():
        for off, on in zip(least, billed(replace(none, **{switch: True})), strict=True):
            extra = getattr(off.outcome, name) if off.plan.platform == "serverless" else 0.0
            assert on.outcome.gpu_seconds - off.outcome.gpu_seconds == pytest.approx(extra, abs=slack(on))
            same = {"gpu_seconds", "idle_gpu_seconds"}
            before, after = step_record(off.outcome), step_record(on.outcome)
            assert {k: v for k, v in before.items() if k not in same} == {
                k: v for k, v in after.items() if k not in same
            }
            assert off.outcome.intervals == on.outcome.intervals


@MANY
@given(case=cases())
def test_invariant_10_clocks_only_move_forward(case: Case) -> None:
    now = 0.0
    for step in run(case):
        outcome = step.outcome
        assert outcome.began == pytest.approx(now, rel=SLACK)
        now = outcome.began + outcome.step_seconds
        assert 0 < outcome.generation_seconds <= outcome.step_seconds
        for begin, end in outcome.stage_times.values():
            assert -slack(step) <= begin <= end <= outcome.step_seconds + slack(step)
        for interval in outcome.intervals:
            # Only a function that was called before its step can hold GPUs before the step begins.
            if interval.kind == "busy":
                assert interval.start >= outcome.began - slack(step)
            assert interval.start >= 0
            assert interval.end <= now + slack(step)
        assert (outcome.release <= outcome.generation_seconds + slack(step)).all()


def bytes_of(steps: list[SimulatedStep]) -> bytes:
    """Return everything that a run writes down, as bytes."""
    return b"\n".join(
        json.dumps(
            [
                step_record(step.outcome),
                step.plan.document(step.batch),
                step.outcome.finish.tolist(),
                [(i.function, i.kind, i.gpus, i.start, i.end) for i in step.outcome.intervals],
                step.outcome.by_function,
            ]
        ).encode()
        for step in steps
    )


@MANY
@given(case=cases())
def test_invariant_11_same_seed_same_bytes(case: Case) -> None:
    assert bytes_of(run(case)) == bytes_of(run(case))


@MANY
@given(case=cases(), others=st.lists(policies(), min_size=1, max_size=2))
def test_invariant_12_policies_do_not_disturb_each_other(case: Case, others: list[Policy]) -> None:
    """Alone, or after other policies and in turn with them on the same objects: the same numbers."""
    alone = bytes_of(run(case))
    for other in others:
        run(case, policy=other)
    assert bytes_of(run(case)) == alone


@MANY
@given(case=cases(), first=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_invariant_13_no_policy_sees_true_lengths(case: Case, first: int, seed: int) -> None:
    """Other lengths from some step on: the plans up to that step are the same."""
    assume(not getattr(case.policy, "sees_true_lengths", False))
    # Over-provisioned steps launch responses of later steps, so only their first plan is free of lengths.
    first = 0 if changes_batches(case.policy) else min(first, len(case.trace.steps) - 1)
    rng = np.random.default_rng(seed)
    later = case.trace.step >= case.trace.steps[first]
    room = case.setting.profile.actor.kv_capacity_tokens - int(case.trace.prompt_tokens.max())
    most = min(case.trace.max_response_tokens or room, room)
    drawn = rng.integers(1, most + 1, len(case.trace))
    other = replace(case.trace, response_tokens=np.where(later, drawn, case.trace.response_tokens))

    def decided(trace: Trace) -> Iterator[dict[str, Any]]:
        steps = simulate(trace, case.policy, case.setting)
        for _ in range(first + 1):
            step = next(steps)
            yield step.plan.document(step.batch)

    try:
        assert list(decided(case.trace)) == list(decided(other))
    except InputError as error:
        assume("does not fit the GPUs" not in str(error) and "GPUs of their own" not in str(error))
        raise


@MANY
@given(case=cases())
def test_invariant_13_oracles_say_so(case: Case) -> None:
    """The view holds true lengths only for a policy that asks for them, and its name says oracle."""

    class Spy:
        def __init__(self, policy: Policy, name: str) -> None:
            self.name, self.policy = name, policy
            self.views: list[StepView] = []

        def plan(self, view: StepView) -> Plan:
            self.views.append(view)
            return self.policy.plan(view)

    spy = Spy(Composed(name="blind"), "spy")
    list(simulate(case.trace, spy, replace(case.setting, learner_gpus=4)))
    assert all(seen.true_tokens is None for seen in spy.views)
    if getattr(case.policy, "sees_true_lengths", False):
        assert "oracle" in case.policy.name


@MANY
@given(
    trace=traces(),
    samples=st.integers(1, 6),
    actors=st.integers(1, 4),
    kv=st.booleans(),
)
def test_invariant_14_deduplicated_prefill_removes_what_is_repeated(
    trace: Trace, samples: int, actors: int, kv: bool
) -> None:
    """K responses a prompt: 1 - 1/k of what actors prefill that cache nothing."""
    prompts = 5
    tokens = np.arange(3, 3 + prompts).repeat(samples)
    lengths = np.random.default_rng(samples).integers(1, 30, prompts * samples)
    step = batch(tokens, lengths, np.arange(prompts).repeat(samples))
    where = setting(profile(), engine=EngineOptions(prefix_caching=False, share_prompt_kv=kv))
    scale = shipped_policies()["serverless_fixed"].scale  # type: ignore[attr-defined]

    def prefilled(prefill: Any) -> SimulatedStep:
        return next(simulate(step, Composed(name="test", scale=scale, prefill=prefill), where))

    local = prefilled(LocalPrefill()).outcome
    once = prefilled(DeduplicatedPrefill()).outcome
    assert local.preemptions == 0
    assert local.prefill_tokens == tokens.sum()
    assert once.prefill_tokens * samples == local.prefill_tokens
    assert local.redundant_prefill_tokens == local.prefill_tokens - once.prefill_tokens
    assert once.redundant_prefill_tokens == 0


@MANY
@given(case=cases())
def test_invariant_15_every_distinct_prompt_token_is_prefilled(case: Case) -> None:
    assume(not changes_batches(case.policy))
    for step in run(case):
        outcome = step.outcome
        distinct = view(step.batch, case.setting).tree.distinct_tokens()
        assert outcome.prefill_tokens == distinct + outcome.redundant_prefill_tokens
        assert outcome.redundant_prefill_tokens >= 0
        again = step.plan.migration.kv == "recompute" and outcome.migrations
        if step.plan.prefill.mode == "local" and not outcome.preemptions and not again:
            # At most every response's prompt; nothing more without preemptions and moves.
            assert outcome.prefill_tokens <= step.batch.prompt_tokens.sum() or outcome.moves


@MANY
@given(case=cases())
def test_invariant_16_moves_bring_what_was_generated(case: Case) -> None:
    for step in run(case):
        outcome, batch_ = step.outcome, step.batch
        per_token = case.setting.profile.memory.kv_bytes_per_token
        rule = step.plan.migration
        assert outcome.migrations == sum(len(move.responses) for move in outcome.moves)
        assert outcome.migrated_kv_bytes == pytest.approx(sum(m.kv_bytes for m in outcome.moves))
        for move in outcome.moves:
            whole = (batch_.prompt_tokens + batch_.response_tokens)[move.responses]
            tokens = move.kv_bytes / per_token
            assert tokens == pytest.approx(round(tokens), abs=1e-6)
            # The last token of a response is never sent: the response is complete with it.
            assert tokens <= (whole - 1).sum()
            if rule.kv == "recompute":
                assert move.kv_bytes == 0
            assert (outcome.finish[move.responses] + outcome.began > move.sent - slack(step)).all()


@MANY
@given(case=cases())
def test_invariant_17_moves_go_to_running_actors_with_open_slots(case: Case) -> None:
    for step in run(case):
        outcome, rule = step.outcome, step.plan.migration
        if rule.rule != "local":
            continue
        most = case.setting.profile.actor.max_running
        home = {int(r): number for number, a in enumerate(step.plan.actors) for r in a.responses}
        given_to = [len(a.responses) for a in step.plan.actors]
        closed: set[int] = set()
        for move in outcome.moves:
            assert move.source != move.target
            assert move.sent <= move.ready + slack(step)
            assert outcome.release[move.target] + outcome.began >= move.ready - slack(step)
            # An actor that has sent its own away takes nothing in any more.
            assert move.target not in closed
            closed.add(move.source)
            for r in move.responses.tolist():
                assert home[r] == move.source
                home[r] = move.target
            slots = min(given_to[move.target], most) if rule.slots == "assigned" else most
            own = [r for r, number in home.items() if number == move.target]
            unfinished = sum(outcome.finish[r] + outcome.began > move.sent + slack(step) for r in own)
            assert unfinished <= slots


@MANY
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_invariant_18_a_refused_plan_changes_nothing(case: Case, seed: int) -> None:
    """A plan that forgets or repeats a response, or asks for a GPU too many, is refused before it runs."""
    assume(not changes_batches(case.policy))
    steps = run(case)
    rng = np.random.default_rng(seed)
    where = case.setting
    replay = Replay(where.profile, where.cluster, where.stages(case.trace), where.options)
    for step in steps:
        plan, number = step.plan, int(rng.integers(len(step.plan.actors)))
        actor = plan.actors[number]
        assert sorted(np.concatenate([a.responses for a in plan.actors])) == list(range(len(step.batch)))
        wrong = [
            replace(actor, responses=actor.responses[1:]),
            replace(actor, responses=np.append(actor.responses, actor.responses[0])),
            replace(actor, node=where.cluster.nodes),
            replace(actor, gpus=actor.gpus + 1),
        ]
        for changed in wrong:
            others = (*plan.actors[:number], changed, *plan.actors[number + 1 :])
            with pytest.raises(InputError):
                replay.step(replace(plan, actors=others), step.batch)
        again = replay.step(plan, step.batch)
        assert again.intervals == step.outcome.intervals
        assert again.finish.tolist() == step.outcome.finish.tolist()


@MANY
@given(case=cases())
def test_invariant_19_no_policy_beats_the_lower_bound(case: Case) -> None:
    assume(not changes_batches(case.policy))
    for step in run(case):
        bound = step_lower_bound(view(step.batch, case.setting), step.batch.response_tokens)
        decode = [i for i in step.outcome.intervals if i.function.startswith("decode.") and i.kind == "busy"]
        assert bound.generation_seconds <= step.outcome.generation_seconds * (1 + SLACK)
        assert bound.gpu_seconds <= sum(i.gpu_seconds for i in decode) * (1 + SLACK)


def slower(cost: Profile, factor: float) -> Profile:
    """Return the profile with every time multiplied by a factor."""

    def times(part: Any) -> Any:
        names = [name for name in type(part).model_fields if name.endswith("_seconds")]
        scaled = {}
        for name in names:
            value = getattr(part, name)
            scaled[name] = tuple(factor * v for v in value) if isinstance(value, tuple) else factor * value
        return part.model_copy(update=scaled)

    def link(part: Link) -> Link:
        return Link(
            bytes_per_second=part.bytes_per_second / factor, latency_seconds=part.latency_seconds * factor
        )

    return Profile.model_validate(
        cost.model_dump()
        | {
            "decode": times(cost.decode).model_dump(),
            "prefill": times(cost.prefill).model_dump(),
            "functions": times(cost.functions).model_dump(),
            "stages": {name: times(stage).model_dump() for name, stage in cost.stages.items()},
            "links": {
                "within_node": link(cost.links.within_node),
                "between_nodes": link(cost.links.between_nodes),
            },
        }
    )


@MANY
@given(case=cases(), power=st.sampled_from([-3, 1, 4]))
def test_invariant_20_time_has_no_unit(case: Case, power: int) -> None:
    """A power of two, so that floating point scales exactly and not even a tie turns out otherwise."""
    factor = 2.0**power
    options = case.setting.options
    options = replace(
        options,
        switch_seconds=options.switch_seconds * factor,
        generation_overhead_seconds=options.generation_overhead_seconds * factor,
    )
    policy = case.policy
    prewarm = getattr(policy, "prewarm", None)
    if hasattr(prewarm, "buffer_seconds"):
        start = prewarm.start_seconds
        prewarm = replace(
            prewarm,
            buffer_seconds=prewarm.buffer_seconds * factor,
            start_seconds=None if start is None else start * factor,
        )
        policy = replace(policy, prewarm=prewarm)  # type: ignore[type-var]
    other = replace(case.setting, profile=slower(case.setting.profile, factor), options=options)
    for one, two in zip(run(case), run(case, setting=other, policy=policy), strict=True):
        before, after = step_record(one.outcome), step_record(two.outcome)
        expected = {k: v * factor if k.endswith("_seconds") else v for k, v in before.items()}
        assert after == expected
        assert (two.outcome.finish == one.outcome.finish * factor).all()


@MANY
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    max_running=st.sampled_from([1, 4, 64]),
    spare=st.sampled_from([0, 30, 10_000]),
    base=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    kv=st.lists(st.floats(0.0, 0.01), min_size=3, max_size=3),
    faster=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
    prefill=st.floats(0.0, 1.0),
)
def test_invariant_21_faster_iterations_delay_no_response(
    lengths: list[int],
    max_running: int,
    spare: int,
    base: list[float],
    kv: list[float],
    faster: list[float],
    prefill: float,
) -> None:
    """What an actor does, and when in its count of iterations, does not depend on how long they take."""
    n = len(lengths)
    length, prompt = np.array(lengths), np.full(n, 9)
    shape = {"gpus": 2, "max_running": max_running, "kv_capacity_tokens": int(length.max()) + 9 + spare}

    def finish(base: list[float], kv: list[float], scale: float) -> np.ndarray:
        cost = profile(
            actor=shape,
            decode={"batch": [1, 4, 64], "base_seconds": base, "kv_token_seconds": kv},
            prefill__token_seconds=1e-3 * scale,
        )
        return decode_one(cost, prompt, length, np.arange(n) // 2)[0]

    slow = finish(base, kv, 1.0)
    fast = finish(
        [b * f for b, f in zip(base, faster, strict=False)],
        [k * f for k, f in zip(kv, faster[3:], strict=True)],
        prefill,
    )
    assert (fast <= slow * (1 + SLACK) + SLACK).all()


@MANY
@given(case=cases())
def test_invariant_22_functions_are_cold_unless_released_recently(case: Case) -> None:
    """Recomputed from the intervals: a start-up is cold where the last release is out of reach."""
    functions = case.setting.profile.functions
    first = 0.0 if case.setting.options.warm_at_start else -np.inf
    released: dict[tuple[str, tuple[int, ...]], float] = {}
    for step in run(case):
        if step.plan.platform == "serverful":
            continue
        cold = 0
        calls: dict[tuple[str, tuple[int, ...]], list[Interval]] = defaultdict(list)
        for interval in sorted(step.outcome.intervals, key=lambda i: i.start):
            calls[interval.function, interval.gpus].append(interval)
        for (name, gpus), held in sorted(calls.items(), key=lambda item: item[1][0].start):
            key = (name.split(".", 1)[0], gpus)
            if held[0].kind == "startup":
                seconds = held[0].end - held[0].start
                warm = held[0].start - released.get(key, first) <= functions.keep_alive_seconds
                expected = functions.warm_start_seconds if warm else functions.cold_start_seconds
                assert seconds == pytest.approx(expected, abs=slack(step))
                cold += not warm
            if held[0].kind == "startup" or key in released or functions.warm_start_seconds == 0:
                released[key] = held[-1].end
        if functions.warm_start_seconds > 0:
            assert step.outcome.cold_starts == cold


@MANY
@given(case=cases())
def test_invariant_23_parts_sit_where_the_plan_puts_them(case: Case) -> None:
    per_node = case.setting.cluster.gpus_per_node
    for step in run(case):
        plan, outcome = step.plan, step.outcome
        first = plan.learner.node * per_node
        learner = tuple(range(first, first + plan.learner.gpus))
        taken: set[int] = set()
        by_function = {i.function: set(i.gpus) for i in outcome.intervals if i.kind == "busy"}
        for number, actor in enumerate(plan.actors):
            gpus = by_function.get(f"decode.{number}", set())
            assert not gpus & taken
            taken |= gpus
            if gpus:
                assert len(gpus) == actor.gpus
                assert {g // per_node for g in gpus} == {actor.node}
                assert not actor.colocated or gpus & set(learner)
        assert by_function.get("update_actor", set(learner)) == set(learner)
        assert by_function.get("prefill", set()) <= set(learner)
        assert all(by_function[s] for s in LEARNING_STAGES if s in by_function)


@MANY
@given(case=cases())
def test_invariant_24_the_replay_checks_itself(case: Case) -> None:
    """What is checked on every replay holds, and a tampered outcome is found out."""
    for step in run(case):
        outcome = step.outcome
        assert violations(outcome, case.setting.profile) == []
        tampered = [
            replace(outcome, decoded_tokens=outcome.decoded_tokens + 1),
            replace(outcome, finish=np.where(outcome.delivered, np.inf, outcome.finish)),
            replace(outcome, finish=outcome.finish + outcome.step_seconds),
            replace(outcome, busy_gpu_seconds=outcome.gpu_seconds * 2),
            replace(outcome, gpu_seconds=outcome.gpu_seconds * 2 + 1),
            replace(outcome, redundant_prefill_tokens=-1),
            replace(outcome, intervals=outcome.intervals * 2),
            replace(outcome, peak_running=case.setting.profile.actor.max_running + 1),
            replace(outcome, peak_kv_tokens=case.setting.profile.actor.kv_capacity_tokens + 1),
            replace(
                outcome,
                stage_times={name: (end, begin - 1) for name, (begin, end) in outcome.stage_times.items()},
            ),
        ]
        for changed in tampered:
            assert violations(changed, case.setting.profile)
    assert TOLERANCE <= 1e-9


def test_every_rule_of_the_page_has_a_test_and_every_test_a_rule() -> None:
    """docs/invariants.md and this file count the same rules."""
    import re
    from pathlib import Path

    here = Path(__file__)
    page = (here.parent.parent / "docs" / "invariants.md").read_text(encoding="utf-8")
    rules = {int(number) for number in re.findall(r"^(\d+)\. ", page, flags=re.MULTILINE)}
    tested = {
        int(number) for number in re.findall(r"def test_invariant_(\d+)_", here.read_text(encoding="utf-8"))
    }
    assert rules == tested == set(range(1, len(rules) + 1))
