"""The multi-step decision: keep-alive in the replay, exact tables, the offline optimum and the rolling program."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from factories import batch, profile, setting
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rlhfless.models.plan import ActorPlan, Learner, Plan, Prewarm, parse_plan
from rlhfless.models.replay import Billing, Replay, ReplayOptions
from rlhfless.policies import Composed, OnLearner, Setting, simulate
from rlhfless.policies.place import Apart
from rlhfless.solver.horizon import (
    Action,
    DecisionSpace,
    FixedRule,
    HorizonPolicy,
    HorizonTables,
    SchedulePolicy,
    StepTable,
    course,
    follow,
    horizon_tables,
    offline_optimum,
)
from rlhfless.solver.objective import Objective
from rlhfless.solver.rolling import RollingRule, best_window, rolling
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import Trace

OBJECTIVE = Objective(0.7 / 30, 0.3 / 300)


def run_of(seed: int, steps: int = 3, responses: int = 12, largest: int = 400) -> Trace:
    """Return a run with random lengths; every prompt returns in every step."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(4.5, 0.7, steps * responses).astype(np.int64).clip(1, largest)
    return batch(
        rng.integers(20, 80, steps * responses).tolist(),
        lengths.tolist(),
        np.tile(np.arange(responses), steps).tolist(),
        step=np.repeat(np.arange(steps), responses).tolist(),
        algorithm="grpo",
    )


def cold_setting(keep_alive: bool = True, learning_seconds: float = 6.0, nodes: int = 2) -> Setting:
    """Return two nodes of four GPUs, the learner on half of the first, with functions that start cold."""
    costs = profile()
    stages = {
        **costs.stages,
        "update_actor": costs.stages["update_actor"].model_copy(update={"fixed_seconds": learning_seconds}),
    }
    options = ReplayOptions(billing=Billing(keep_alive=keep_alive), warm_at_start=False)
    base = setting(costs.model_copy(update={"stages": stages}), nodes=nodes, learner_gpus=2)
    cluster = base.cluster.model_copy(update={"gpus_per_node": 4})
    return replace(base, cluster=cluster, options=options)


SPACE = DecisionSpace(thresholds=(0.6, 1.0), guesses=2)


@cache
def tables_of(
    seed: int, keep_alive: bool = True, learning_seconds: float = 6.0, steps: int = 3
) -> HorizonTables:
    """Return a small run's tables."""
    return horizon_tables(run_of(seed, steps), cold_setting(keep_alive, learning_seconds), SPACE, seed=seed)


def actions_of(tables: HorizonTables) -> list[Action]:
    """Return all decisions of a step."""
    return [
        Action(n, t, k)
        for n in range(1, tables.most + 1)
        for t in range(len(tables.thresholds))
        for k in range(n + 1)
    ]


# Keep-alive in the replay


def one_actor(step: int, node: int, keep_alive: float | None, retire: bool = False) -> Plan:
    """Return a plan with one actor on a node."""
    actor = ActorPlan(2, node, np.arange(2), keep_alive_seconds=keep_alive)
    return Plan(
        step, "test", "serverless", (actor,), Learner(gpus=2), preparation="learner", retire_unused=retire
    )


def two_steps(first: Plan, second: Plan) -> tuple[int, float, float]:
    """Return cold decode starts and keep-alive GPU seconds of the second step, and how long the first actor waited."""
    world = cold_setting()
    run = Replay(world.profile, world.cluster, ("reward", "reference", "update_actor"), world.options)
    one = run.step(first, batch([50, 50], [100, 200], step=0))
    waited = one.step_seconds - float(one.release[0])
    two = run.step(second, batch([50, 50], [100, 200], step=1))
    return two.cold_starts, two.by_function["keep_alive"], waited


def test_a_kept_actor_starts_warm_and_its_wait_is_billed() -> None:
    cold, without, _ = two_steps(one_actor(0, 1, 0.0), one_actor(1, 1, None))
    warm, with_it, waited = two_steps(one_actor(0, 1, 50.0), one_actor(1, 1, None))
    assert (cold, warm) == (1, 0)
    # The cold start delays the second step and with it the next call of the learner's two functions.
    delay = 20.0 - 1.0
    assert with_it - without == pytest.approx(2 * waited - 2 * 2 * delay)


def test_a_lapsed_keep_alive_is_billed_whole_and_starts_cold() -> None:
    cold, billed, waited = two_steps(one_actor(0, 1, 0.5), one_actor(1, 1, None))
    _, without, _ = two_steps(one_actor(0, 1, 0.0), one_actor(1, 1, None))
    assert waited > 0.5
    assert cold == 1
    assert billed - without == pytest.approx(2 * 0.5)


def test_a_retired_function_is_billed_until_the_step_begins() -> None:
    _, kept, waited = two_steps(one_actor(0, 1, 500.0), one_actor(1, 0, None, retire=True))
    _, dropped, _ = two_steps(one_actor(0, 1, 0.0), one_actor(1, 0, None))
    assert kept - dropped == pytest.approx(2 * waited)


def test_keep_alive_and_retirement_survive_the_json_form() -> None:
    step = batch([50, 50], [100, 200], step=0)
    plan = one_actor(0, 1, 12.5, retire=True)
    again = parse_plan(plan.document(step), step, "plan")
    assert again.actors[0].keep_alive_seconds == 12.5
    assert again.retire_unused


def test_a_policy_sees_which_functions_are_warm() -> None:
    seen = []

    class Spy:
        name = "spy"

        def plan(self, view):  # type: ignore[no-untyped-def]
            seen.append(([view.warm((4, 5)), view.warm((2, 3))], [past.actors for past in view.past]))
            plan = one_actor(view.step, 1, 100.0)
            rows = np.arange(len(view))
            return replace(plan, actors=(replace(plan.actors[0], responses=rows),))

    first = next(simulate(run_of(0), Spy(), cold_setting())).outcome
    seen.clear()
    assert len(list(simulate(run_of(0), Spy(), cold_setting()))) == 3
    assert seen[0] == ([0.0, 0.0], [])
    assert seen[2][1] == [1, 1]
    # Counted from the start of the learning stage.
    gone = first.stage_times["update_actor"][0] - float(first.release[0])
    assert seen[1][0][0] == pytest.approx(100.0 - gone)
    assert seen[1][0][1] == 0.0


# The model


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("learning_seconds", [2.0, 40.0])
def test_the_model_equals_the_replay(keep_alive: bool, learning_seconds: float) -> None:
    """Any sequence of decisions costs in the replay what the tables say, whether start-ups are hidden or not."""
    world, rng = cold_setting(keep_alive, learning_seconds), np.random.default_rng(0)
    tables = tables_of(1, keep_alive, learning_seconds, steps=4)
    every = actions_of(tables)
    for _ in range(5):
        chosen = tuple(every[i] for i in rng.integers(len(every), size=4))
        expected = course(tables, chosen, OBJECTIVE)
        policy = SchedulePolicy("chosen", chosen, SPACE)
        outcomes = [step.outcome for step in simulate(run_of(1, 4), policy, world, seed=1)]
        assert sum(o.step_seconds for o in outcomes) == pytest.approx(expected.seconds, rel=1e-12)
        assert sum(o.gpu_seconds for o in outcomes) == pytest.approx(expected.gpu_seconds, rel=1e-12)


def test_a_rule_decides_the_same_in_the_model_and_in_the_replay() -> None:
    tables, world = tables_of(2), cold_setting()
    for rule in (FixedRule(None), FixedRule(2, 0, None), RollingRule(2)):
        expected = follow(tables, rule, OBJECTIVE)
        steps = list(simulate(run_of(2), HorizonPolicy("rule", rule, SPACE), world, seed=2))
        assert [len(step.plan.actors) for step in steps] == [action.actors for action in expected.actions]
        total = sum(step.outcome.gpu_seconds for step in steps)
        assert total == pytest.approx(expected.gpu_seconds, rel=1e-12)


# The optimum


def random_tables(rng: np.random.Generator, steps: int, most: int, thresholds: int) -> HorizonTables:
    """Return tables of random numbers: the dynamic program must hold for any."""
    shape = (most, thresholds, most + 1)
    known = tables_of(0)
    return HorizonTables(
        tuple(
            StepTable(
                rng.random(shape),
                rng.random(shape),
                0.3 * rng.random((*shape, most + 1)),
                rng.random(shape),
                most,
            )
            for _ in range(steps)
        ),
        known.forecasts[:1] * steps,
        known.costs,
        tuple(np.linspace(0.5, 1.0, thresholds)),
    )


@given(seed=st.integers(0, 10_000))
@hypothesis_settings(max_examples=25, deadline=None)
def test_the_optimum_is_the_least_of_all_sequences(seed: int) -> None:
    tables = random_tables(np.random.default_rng(seed), steps=3, most=2, thresholds=2)
    every = actions_of(tables)
    least = min(
        course(tables, chosen, Objective(1, 2)).value for chosen in itertools.product(every, repeat=3)
    )
    assert offline_optimum(tables, Objective(1, 2)).value == pytest.approx(least, rel=1e-12)


def test_no_rule_gets_below_the_optimum() -> None:
    for seed in range(3):
        tables = tables_of(seed)
        least = offline_optimum(tables, OBJECTIVE).value
        rules = [FixedRule(n, t, k) for n in (None, 1, 2, 3) for t in (0, 1) for k in (0, 1, None)]
        values = [follow(tables, rule, OBJECTIVE).value for rule in (*rules, RollingRule(2))]
        assert min(values) >= least * (1 - 1e-12)
        assert max(values) > least * (1 + 1e-6)


@given(seed=st.integers(0, 10_000))
@hypothesis_settings(max_examples=10, deadline=None)
def test_a_rolling_window_over_the_whole_run_is_the_optimum(seed: int) -> None:
    tables = random_tables(np.random.default_rng(seed), steps=4, most=3, thresholds=2)
    objective = Objective(1, 2)
    found = course(tables, rolling(tables, objective, ahead=4), objective).value
    assert found == pytest.approx(offline_optimum(tables, objective).value, rel=1e-6)


def test_a_window_keeps_a_limit_that_binds_its_steps_together() -> None:
    tables = random_tables(np.random.default_rng(3), steps=3, most=2, thresholds=2)
    free = course(tables, best_window(tables.steps, Objective(0, 1), 0), Objective(0, 1))
    limit = 0.9 * free.seconds
    kept = Objective(0, 1, time_limit=limit)
    found = course(tables, best_window(tables.steps, kept, 0), kept)
    within = [
        one.gpu_seconds
        for chosen in itertools.product(actions_of(tables), repeat=3)
        if (one := course(tables, chosen, kept)).seconds <= limit
    ]
    assert found.gpu_seconds == pytest.approx(min(within), rel=1e-5)
    with pytest.raises(InputError, match="keep time_limit"):
        best_window(tables.steps, Objective(0, 1, time_limit=0.01), 0)


# Refusals


def test_what_the_model_does_not_hold_for_is_refused_in_one_line() -> None:
    world = cold_setting()
    warm = replace(world, options=replace(world.options, warm_at_start=True))
    with pytest.raises(InputError, match="warm_at_start: must be false"):
        horizon_tables(run_of(0), warm, SPACE)
    functions = world.profile.functions.model_copy(update={"keep_alive_seconds": 0.5})
    short = replace(world, profile=world.profile.model_copy(update={"functions": functions}))
    with pytest.raises(InputError, match=r"keep_alive_seconds that lasts"):
        horizon_tables(run_of(0), short, SPACE)
    moving = DecisionSpace(base=replace(SPACE.base, place=OnLearner()))
    with pytest.raises(InputError, match="none of the learner's"):
        horizon_tables(run_of(0), world, moving)
    full = replace(world, learner_gpus=world.cluster.gpus)
    with pytest.raises(InputError, match="does not fit the GPUs beside the learner"):
        horizon_tables(run_of(0), full, SPACE)
    with pytest.raises(InputError, match="takes no limit"):
        offline_optimum(tables_of(0), Objective(1, 1, time_limit=5.0))
    with pytest.raises(InputError, match="thresholds are"):
        DecisionSpace(thresholds=())
    with pytest.raises(InputError, match="rule local"):
        DecisionSpace(base=Composed(name="none", place=Apart()))


def test_more_slots_than_responses() -> None:
    """Counts beyond the responses stand for one response an actor."""
    trace = run_of(5, steps=2, responses=2)
    tables = horizon_tables(trace, cold_setting(), SPACE)
    assert tables.most == 3
    assert np.array_equal(tables.steps[1].seconds[1], tables.steps[1].seconds[2])
    for actions in (offline_optimum(tables, OBJECTIVE).actions, (Action(3, 0, 3), Action(3, 1, 0))):
        expected = course(tables, actions, OBJECTIVE)
        steps = list(simulate(trace, SchedulePolicy("given", actions, SPACE), cold_setting()))
        assert sum(s.outcome.step_seconds for s in steps) == pytest.approx(expected.seconds, rel=1e-12)
        assert sum(s.outcome.gpu_seconds for s in steps) == pytest.approx(expected.gpu_seconds, rel=1e-12)


def test_a_prewarmed_actor_is_invoked_ahead() -> None:
    """From the third step on the learning stage is expected: even cold starts are hidden in a long one."""
    policy = SchedulePolicy("cold", (Action(2, 0, 0),) * 4, SPACE)
    steps = list(simulate(run_of(4, 4), policy, cold_setting(learning_seconds=40.0)))
    assert steps[2].plan.prewarm == Prewarm(learning_seconds=steps[0].outcome.learning_seconds)
    assert steps[2].plan.actors[0].prewarm_seconds == 20.0
    # The learning stage was longer than the shortest so far by little.
    assert steps[2].outcome.stage_times["decode.0"][0] < 1.0
    assert steps[1].outcome.stage_times["decode.0"][0] > 19.0
