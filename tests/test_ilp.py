"""Solvers as policies, and actors of several sizes in one plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import batch, profile, setting, view

from rlhfless.models.cluster import Cluster
from rlhfless.models.decode import decode_one
from rlhfless.models.plan import ActorPlan, Learner, Migration, Plan
from rlhfless.models.profile import Profile
from rlhfless.models.replay import Replay
from rlhfless.policies import Composed, Oracle, Setting, check_policy, simulate
from rlhfless.policies.scale import Work
from rlhfless.solver.ilp import Optimize, OptimizeSizes, ScheduleStep
from rlhfless.solver.objective import Goal
from rlhfless.solver.partition import even_splits
from rlhfless.solver.problem import Problem
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import Trace

GRPO = ("reward", "reference", "update_actor")


def sized(gpus: int, speed: float, capacity: int = 1_000_000, **changes: object) -> Profile:
    """Return costs of an actor with so many GPUs, so many times as fast as the usual one."""
    return profile(
        name=f"tp{gpus}",
        actor={"gpus": gpus, "max_running": 64, "kv_capacity_tokens": capacity},
        decode={
            "batch": [1, 8, 64],
            "base_seconds": [0.010 / speed, 0.012 / speed, 0.020 / speed],
            "kv_token_seconds": [1.0e-7 / speed, 1.2e-7 / speed, 1.5e-7 / speed],
        },
        **changes,
    )


def steps(n: int = 60, count: int = 2, seed: int = 0, samples: int = 3) -> Trace:
    """Return so many steps on the same prompts."""
    rng = np.random.default_rng(seed)
    prompts = np.tile(np.repeat(np.arange(n // samples), samples), count)
    number = np.repeat(np.arange(count), n)
    lengths = np.minimum(rng.lognormal(5, 0.8, n * count), 3000).astype(np.int64) + 1
    return batch(rng.integers(10, 60, n // samples)[prompts], lengths, prompts, step=number, epoch=number)


def work(on: Setting, step: Trace) -> Work:
    seen = view(step, on, cap=4000)
    return Work(seen, step.response_tokens, np.zeros(len(step), dtype=np.int64), 0.0)


@pytest.mark.parametrize("method", ["cp_sat", "partition"])
@pytest.mark.parametrize("most", [1, 4, 8])
def test_not_worse_than_the_best_even_split(method: str, most: int) -> None:
    """Queues are the rule here: an actor runs 16 of 300 responses."""
    on = setting(profile(actor__max_running=16))
    todo = work(on, steps(300, 1))
    goal = Goal("ratio", 0.7)
    groups = Optimize(method, goal, work=0.05)(todo, lambda count: (), most)  # type: ignore[arg-type]
    assert sorted(np.concatenate(groups).tolist()) == list(range(300))
    assert len(groups) <= most
    problem = Problem.of(todo.view, todo.predicted_tokens, todo.cached_tokens, most)
    even = np.array([problem.evaluate(split) for split in even_splits(problem)])
    objective = goal.resolve(even[:, 0], even[:, 1])
    ends = todo.exact_seconds(groups)
    ours = objective.value(ends.max(), ends.sum() * 2)
    assert ours <= objective.value(even[:, 0], even[:, 1]).min() * (1 + 1e-12)


@pytest.mark.parametrize(
    "policy",
    [
        Composed(name="ilp", scale=Optimize(work=0.02, seconds=60)),
        Composed(name="partition", scale=Optimize("partition", work=1.0, seconds=60)),
        OptimizeSizes(work=0.02, seconds=60),
        ScheduleStep(),
        ScheduleStep(platform="serverless"),
    ],
    ids=lambda policy: policy.name,
)
def test_policies_pass_the_checker_and_repeat_themselves(policy: Composed) -> None:
    check_policy(policy)
    trace = steps(60, 2)
    on = setting_with(sized(4, 1.8))
    first, second = (
        [step.plan.document(step.batch) for step in simulate(trace, policy, on)] for _ in range(2)
    )
    assert first == second


def test_sizes_are_chosen_together() -> None:
    """One straggler among short responses: it gets the large, fast actor where time counts, and none where cost does."""
    trace = batch([20] * 41, [3000, *[30] * 40])
    on = replace(setting(sized(1, 1.0)), variants=(sized(4, 3.0),))
    oracle = {"predict": Oracle(), "work": 0.1}

    class Seeing(OptimizeSizes):
        sees_true_lengths = True

    (fast,) = simulate(trace, Seeing("oracle_time", goal=Goal("time"), **oracle), on)  # type: ignore[arg-type]
    (cheap,) = simulate(trace, Seeing("oracle_cost", goal=Goal("cost"), **oracle), on)  # type: ignore[arg-type]
    by_row = {int(r): actor.gpus for actor in fast.plan.actors for r in actor.responses}
    assert by_row[0] == 4
    assert {actor.gpus for actor in cheap.plan.actors} == {1}
    assert fast.outcome.generation_seconds < cheap.outcome.generation_seconds
    assert fast.outcome.gpu_seconds > cheap.outcome.gpu_seconds
    # What it predicts of the true lengths, the replay confirms.
    assert fast.plan.predicted is not None
    assert fast.outcome.generation_seconds == pytest.approx(fast.plan.predicted.generation_seconds, rel=1e-9)


def test_gpus_of_a_node_are_kept() -> None:
    """On two nodes of four GPUs, two of them the learner's, no mix of sizes asks for more than there are."""
    trace = steps(90, 1)
    variants = (sized(2, 1.5), sized(4, 2.0))
    on = replace(setting(sized(1, 1.0), gpus_per_node=4, learner_gpus=2), variants=variants)
    (step,) = simulate(trace, OptimizeSizes(goal=Goal("time"), work=0.1), on)
    for node in range(2):
        assert sum(actor.gpus for actor in step.plan.actors if actor.node == node) <= 4
    assert sum(actor.gpus for actor in step.plan.actors if actor.colocated) <= 2


def two_sizes(*rows: list[int], **rest: object) -> Plan:
    """Return a plan with one actor of one GPU and one of four."""
    actors = tuple(
        ActorPlan(gpus, 1, np.array(own, dtype=np.int64)) for gpus, own in zip((1, 4), rows, strict=True)
    )
    return Plan(0, "by hand", "serverful", actors, Learner(gpus=4), **rest)  # type: ignore[arg-type]


def test_each_actor_decodes_at_the_speed_of_its_size() -> None:
    small, large = sized(1, 1.0), sized(4, 3.0)
    step = batch([20] * 8, [300, 200, 100, 50, 310, 210, 110, 60])
    replay = Replay(small, Cluster(nodes=2, gpus_per_node=8), GRPO, variants=(large,))
    outcome = replay.step(two_sizes([0, 1, 2, 3], [4, 5, 6, 7]), step)
    for number, (cost, rows) in enumerate(((small, slice(0, 4)), (large, slice(4, 8)))):
        alone, _ = decode_one(cost, step.prompt_tokens[rows], step.response_tokens[rows], np.arange(4))
        start = outcome.stage_times[f"decode.{number}"][0]
        np.testing.assert_allclose(outcome.finish[rows] - start, alone, rtol=1e-12)


def test_stragglers_move_only_to_actors_that_hold_as_much() -> None:
    """Cut at half, the small actor sends its rest to the large one, and never the other way round."""
    small, large = sized(1, 1.0, capacity=1000), sized(4, 3.0, capacity=5000)
    replay = Replay(small, Cluster(nodes=2, gpus_per_node=8), GRPO, variants=(large,))
    rule = Migration(rule="local", threshold=0.5, keep_first=False, slots="engine")
    step = batch([20] * 8, [400, 50, 40, 30, 2000, 60, 50, 40])
    outcome = replay.step(two_sizes([0, 1, 2, 3], [4, 5, 6, 7], migration=rule), step)
    assert [(move.source, move.target) for move in outcome.moves] == [(0, 1)]
    assert np.isfinite(outcome.finish).all()


def test_refusals_say_where() -> None:
    small, large = sized(1, 1.0, capacity=1000), sized(4, 3.0)
    cluster, step = Cluster(nodes=2, gpus_per_node=8), batch([20] * 2, [2000, 30])
    replay = Replay(small, cluster, GRPO, variants=(large,))
    with pytest.raises(
        InputError, match=r"^plan: response 0 needs 2020 KV tokens, an actor of profile tp1 holds"
    ):
        replay.step(two_sizes([0], [1]), step)
    with pytest.raises(InputError, match="migration global needs actors of one size"):
        replay.step(two_sizes([1], [0], migration=Migration(rule="global")), step)
    with pytest.raises(InputError, match="actor 0 has 1 GPUs, profile tp4 holds for 4"):
        Replay(large, cluster, GRPO).step(two_sizes([1], [0]), step)
    with pytest.raises(InputError, match="profile other is of Other on T, profile tp1 of Test-1B on T"):
        Replay(small, cluster, GRPO, variants=(profile(name="other", model="Other"),))
    with pytest.raises(InputError, match="profiles tp1 and tp1 are both of actors with 1 GPUs"):
        Replay(small, cluster, GRPO, variants=(sized(1, 2.0),))
    with pytest.raises(InputError, match="method is simplex, must be cp_sat or partition"):
        Optimize("simplex")  # type: ignore[arg-type]


def test_variants_of_no_use_change_nothing() -> None:
    """A run on one size is the same, bit by bit, whether other sizes are there or not."""
    trace = steps(60, 2)
    policy = Composed(name="even", migration=Migration(rule="local", threshold=0.5))
    alone = list(simulate(trace, policy, setting()))
    beside = list(simulate(trace, policy, setting_with(sized(4, 1.8))))
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one.outcome.finish, other.outcome.finish)
        assert one.outcome.gpu_seconds == other.outcome.gpu_seconds


def setting_with(*variants: Profile) -> Setting:
    return replace(setting(), variants=variants)
