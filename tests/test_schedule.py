"""The step's schedule: it predicts what the replay does, and is no worse than any fixed mapping."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from factories import batch, profile
from factories import setting as make_setting
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rlhfless.models.cluster import Cluster
from rlhfless.models.replay import Replay, ReplayOptions
from rlhfless.policies import simulate
from rlhfless.solver.objective import Objective
from rlhfless.solver.schedule import Mapping, Pool, Schedule, Shape, memory_bytes, solve_schedule
from rlhfless.traces.trace import Trace

GRPO = ("reward", "reference", "update_actor")
PPO = ("reward", "reference", "value", "update_critic", "update_actor")
NODES = Cluster(nodes=2, gpus_per_node=8)
TIME, COST, BOTH = Objective(1.0, 0.0), Objective(0.0, 1.0), Objective(1.0, 0.05)


def step(n: int = 60, seed: int = 0, samples: int = 3) -> Trace:
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(n // samples), samples)
    lengths = np.minimum(rng.lognormal(5, 0.7, n), 2000).astype(np.int64) + 1
    return batch(rng.integers(10, 60, n // samples)[prompts], lengths, prompts)


def pool(stages: tuple[str, ...] = PPO, **rest: object) -> Pool:
    values: dict[str, object] = {
        "profile": profile(),
        "cluster": NODES,
        "stages": stages,
        "options": ReplayOptions(),
        "gpu_memory_bytes": 80e9,
    }
    return Pool(**values | rest)  # type: ignore[arg-type]


def solved(
    on: Pool, work: Trace, objective: Objective, learner: tuple[int, ...] = (2, 4, 8, 12), **rest: object
) -> Schedule:
    group = np.unique(work.prompt, return_inverse=True)[1]
    return solve_schedule(
        on,
        work.prompt_tokens,
        work.response_tokens,
        group,
        objective,
        learner_gpus=learner,
        **rest,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("platform", ["serverful", "serverless"])
@pytest.mark.parametrize("objective", [TIME, COST, BOTH])
@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (GRPO, ReplayOptions()),
        (
            PPO,
            ReplayOptions(weight_transfer="in_turn", switch_seconds=0.5, generation_overhead_seconds=0.125),
        ),
    ],
)
def test_the_replay_confirms_the_schedule(
    platform: str, objective: Objective, stages: tuple[str, ...], options: ReplayOptions
) -> None:
    on, work = pool(stages, platform=platform, options=options), step()
    found = solved(on, work, objective)
    assert found.status == "optimal"
    outcome = Replay(on.profile, on.cluster, stages, options).step(found.plan(0, "scheduled", on), work)
    assert outcome.step_seconds == pytest.approx(found.seconds, rel=1e-9)
    assert outcome.gpu_seconds == pytest.approx(found.gpu_seconds, rel=1e-9)
    for stage in stages:
        # A stage of the replay begins when its function is up.
        assert outcome.stage_times[stage][1] == pytest.approx(found.stages[stage][1], rel=1e-9)


@pytest.mark.parametrize("sizes", [(2,), (2, 4)])
@pytest.mark.parametrize("stages", [GRPO, PPO])
def test_no_mapping_is_better(stages: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Against every mapping, each replayed with its own groups."""
    work = step(24)
    variants = tuple(profile(actor__gpus=size, decode__host_overhead_seconds=-0.0) for size in sizes[1:])
    on = pool(stages, variants=variants, cluster=Cluster(nodes=1, gpus_per_node=8))
    for objective in (TIME, COST, BOTH):
        found = solved(on, work, objective, learner=(2, 4))
        least = np.inf
        for learner in (2, 4):
            for preparation in ("learner", "actors", "own"):
                alone = solved(on, work, objective, (learner,), preparations=(preparation,), seconds=0)
                if alone.mapping is None:
                    continue
                outcome = Replay(on.profile, on.cluster, stages, on.options, variants).step(
                    alone.plan(0, "alone", on), work
                )
                least = min(least, float(objective.value(outcome.step_seconds, outcome.gpu_seconds)))
        assert found.value <= least * (1 + 1e-6)
        assert found.bound <= least * (1 + 1e-9)


SETTINGS = {
    "two nodes": make_setting(),
    "one node, slow links": make_setting(
        profile(
            links={"within_node": {"bytes_per_second": 1e9}, "between_nodes": {"bytes_per_second": 1e8}},
            stages={
                "reward": {"gpus": 0, "fixed_seconds": 0.1},
                "reference": {"gpus": 2, "fixed_seconds": 1.2, "token_seconds": 1.0e-4},
                "update_actor": {"gpus": 4, "fixed_seconds": 0.5, "token_seconds": 5.0e-4},
            },
        ),
        nodes=3,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("objective", [TIME, COST, BOTH])
def test_not_worse_than_fixed_mappings(name: str, objective: Objective) -> None:
    """Verl co-located, standalone and split, each with the learner that it has, and given the true lengths."""
    setting, work = SETTINGS[name], step(90, seed=3)
    on = Pool(setting.profile, setting.cluster, GRPO, setting.options, gpu_memory_bytes=80e9)
    found = solved(on, work, objective, (setting.learner_gpus,))
    outcome = Replay(setting.profile, setting.cluster, GRPO, setting.options).step(
        found.plan(0, "scheduled", on), work
    )
    ours = float(objective.value(outcome.step_seconds, outcome.gpu_seconds))
    work = replace(work, algorithm="grpo")
    for fixed in ("verl", "verl_standalone", "verl_split"):
        policy = instantiate(OmegaConf.load(str(files("rlhfless.conf").joinpath("policy", f"{fixed}.yaml"))))
        (theirs,) = simulate(work, policy, setting)
        value = float(objective.value(theirs.outcome.step_seconds, theirs.outcome.gpu_seconds))
        assert ours <= value * (1 + 1e-9)


def test_memory_decides_between_colocated_and_standalone() -> None:
    """Where trained states and an engine do not fit one GPU together, they are put on different ones."""
    work = step()
    roomy, tight = pool(GRPO, resident=True), pool(GRPO, resident=True, gpu_memory_bytes=18e9)
    both = Mapping(Shape(4, 2, 2, colocated=True), "learner")
    # 1e9 parameters: 16e9 bytes in training over 4 GPUs, 2e9 of the reference over 4; weights and KV over 2.
    assert memory_bytes(roomy, both) == pytest.approx(4e9 + 0.5e9 + (2e9 + 1e6 * 3e4) / 2)
    assert solved(roomy, work, COST, learner=(4,)).mapping.shape.colocated  # type: ignore[union-attr]
    assert not solved(tight, work, COST, learner=(4,)).mapping.shape.colocated  # type: ignore[union-attr]


def test_infeasible_says_why() -> None:
    work = step()
    none = solved(pool(GRPO, gpu_memory_bytes=1e9), work, TIME)
    assert none.status == "infeasible"
    assert none.reason == "memory: 1 GB a GPU"
    late = solved(pool(GRPO), work, Objective(0.0, 1.0, time_limit=0.1))
    assert late.status == "infeasible"
    assert late.reason.startswith("time: the fastest takes ")


def test_without_time_the_best_is_returned_without_a_bound() -> None:
    found = solved(pool(GRPO), step(), BOTH, seconds=0)
    assert found.status == "feasible"
    assert found.bound == -np.inf
    assert found.value == pytest.approx(solved(pool(GRPO), step(), BOTH).value, rel=1e-5)
