"""The Gymnasium environment: its contract, exact rewards, and nothing that tells of true lengths."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_horizon import SPACE, cold_setting, run_of, tables_of

from rlhfless.policies import simulate
from rlhfless.solver.episodes import Episodes, observation, relative_objective, run_objective
from rlhfless.solver.horizon import Action, SchedulePolicy, follow, horizon_tables
from rlhfless.solver.learned import FORECAST_WEIGHTS, ScoreRule
from rlhfless.solver.learner import play
from rlhfless.solver.objective import Goal

pytest.importorskip("gymnasium")
from gymnasium.utils.env_checker import check_env

from rlhfless.solver.environment import ActorScalingEnv

SEEDS = (0, 1, 2)


@cache
def environment() -> ActorScalingEnv:
    """Return an environment over three small runs."""
    runs = [tables_of(seed, True, 6.0, 4) for seed in SEEDS]
    return ActorScalingEnv(runs, run_objective(runs, Goal()))


def test_it_passes_gymnasiums_own_checker() -> None:
    check_env(environment(), skip_render_check=True)


def test_an_episode_returns_what_the_replay_of_its_plans_costs() -> None:
    env = environment()
    env.action_space.seed(0)
    for run, seed in enumerate(SEEDS):
        env.reset(options={"run": run})
        actions, total, ended = [], 0.0, False
        while not ended:
            action = env.action_space.sample()
            _, reward, ended, _, _ = env.step(action)
            total += reward
            actions.append(
                Action(int(action[0]) + 1, int(action[1]), min(int(action[2]), int(action[0]) + 1))
            )
        policy = SchedulePolicy("sampled", tuple(actions), SPACE)
        outcomes = [step.outcome for step in simulate(run_of(seed, 4), policy, cold_setting(), seed=seed)]
        objective = env.episodes.objective
        value = sum(float(objective.value(o.step_seconds, o.gpu_seconds)) for o in outcomes)
        assert -total == pytest.approx(value - objective.offset * len(outcomes), rel=1e-12)


def test_observations_are_those_of_the_rules() -> None:
    """What the environment keeps up to date equals the observation built anew."""
    env = environment()
    seen, info = env.reset(seed=3)
    forecasts, table = env._forecasts[info["run"]], tables_of(SEEDS[info["run"]], True, 6.0, 4)
    seen, *_ = env.step(np.array([1, 1, 1]))
    expected = env.episodes.seen(1, np.full(3, table.steps[0].generation[1, 1, 0]), np.full(3, 2))
    fresh = observation(expected, env.episodes.costs, env.episodes.relative, np.ones(3, dtype=np.int64))
    assert np.allclose(seen, fresh[info["run"]], atol=1e-6)
    assert len(forecasts) == env.episodes.steps


def test_a_seed_decides_the_episode() -> None:
    env = environment()
    drawn = [
        [env.reset(seed=seed)[1]["run"], *(env.reset()[1]["run"] for _ in range(5))] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_nothing_observed_tells_of_the_lengths_to_come() -> None:
    """Two runs that differ in the last step's lengths alone are observed alike."""
    run = run_of(7)
    other = run.response_tokens.copy()
    other[run.step == 2] = other[run.step == 2][::-1] + 17
    changed = replace(run, response_tokens=other)
    a, b = (horizon_tables(trace, cold_setting(), SPACE) for trace in (run, changed))
    objective = relative_objective([a], run_objective([a], Goal()))
    for one, two in zip(a.forecasts, b.forecasts, strict=True):
        assert np.array_equal(
            observation(one, a.costs, objective, 1), observation(two, b.costs, objective, 1)
        )
    assert not np.array_equal(a.steps[2].seconds, b.steps[2].seconds)


def test_the_learners_runs_are_those_of_the_rule() -> None:
    """Playing candidates on all runs at once costs what following each rule step by step does."""
    runs = [tables_of(seed, True, 6.0, 4) for seed in SEEDS]
    episodes = Episodes.of(runs, run_objective(runs, Goal("minmax", 0.4)))
    rng = np.random.default_rng(0)
    weights = FORECAST_WEIGHTS + rng.normal(0, 1.0, (6, len(FORECAST_WEIGHTS)))
    together = play(episodes, weights)
    objective = episodes.objective
    for candidate, row in zip(weights, together, strict=True):
        for run, value in zip(runs, row, strict=True):
            course = follow(run, ScoreRule(candidate, episodes.relative), objective)
            total = objective.time_weight * course.seconds + objective.cost_weight * course.gpu_seconds
            assert value == pytest.approx(total / len(run), rel=1e-12)
    assert np.ptp(together, axis=0).min() > 0


def test_it_steps_faster_than_the_replay() -> None:
    """At least ten times the steps of a replay of so small a batch, in the same run."""
    env, chosen = environment(), np.array([1, 1, 1])
    policy = SchedulePolicy("same", (Action(2, 1, 1),) * 4, SPACE)
    env.reset(seed=0)
    started = time.perf_counter()
    for _ in range(500):
        if env.step(chosen)[2]:
            env.reset()
    fast = (time.perf_counter() - started) / 500
    started = time.perf_counter()
    steps = len(list(simulate(run_of(0, 4), policy, cold_setting())))
    assert fast < (time.perf_counter() - started) / steps / 10
