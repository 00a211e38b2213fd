"""Learning: the search finds what is there, the same bits after a stop, and files that say what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_horizon import SPACE, cold_setting, run_of, tables_of

from rlhfless.policies import check_policy, simulate
from rlhfless.solver.episodes import Episodes, relative_objective, run_objective
from rlhfless.solver.evaluation import standings, step_values
from rlhfless.solver.horizon import HorizonPolicy, follow, offline_optimum
from rlhfless.solver.learned import (
    FEATURES,
    FORECAST_WEIGHTS,
    Learned,
    NetworkRule,
    ScoreRule,
    policy_document,
)
from rlhfless.solver.learner import Evolution, Learning, Progress, learn, learned_rule
from rlhfless.solver.objective import Goal
from rlhfless.traces.errors import InputError

HOW = Learning(generations=12, population=8, checkpoint_every=5)


@cache
def episodes() -> tuple[Episodes, Episodes]:
    """Return three training runs and one for validation."""
    runs = [tables_of(seed, True, 6.0, 4) for seed in range(4)]
    objective = run_objective(runs[:3], Goal())
    return Episodes.of(runs[:3], objective), Episodes.of(
        runs[3:], objective, relative_objective(runs[:3], objective)
    )


def test_the_search_finds_the_least_of_a_skewed_bowl() -> None:
    """CMA-ES learns the scales of an ellipsoid with condition 10^8, which a fixed step would not get down."""
    scale = 100.0 ** np.linspace(-1, 1, 6)
    target = np.arange(6.0)
    search = Evolution(np.zeros(6), 1.0, 12, np.random.default_rng(0))
    for _ in range(300):
        search.advance(lambda x: (((x - target) * scale) ** 2).sum(axis=1))
    assert np.allclose(search.mean, target, atol=1e-3)


def test_learning_is_never_worse_than_the_forecast_on_the_validation_runs() -> None:
    own, other = episodes()
    reached = learn(own, other, HOW)
    runs = [tables_of(3, True, 6.0, 4)]
    before = step_values(runs, ScoreRule(FORECAST_WEIGHTS, own.relative), own.objective).mean()
    after = step_values(runs, learned_rule(reached, own), own.objective).mean()
    assert after <= before
    assert after == pytest.approx(reached.best_cost + own.objective.offset)


def test_a_stopped_training_ends_with_the_same_bits() -> None:
    """Stop at every checkpoint, take up from its text alone, and compare with a training that ran through."""
    own, other = episodes()
    texts: list[str] = []
    whole = learn(own, other, HOW, save=lambda reached: texts.append(reached.dump("key")))
    assert len(texts) == 3
    for text in texts:
        again = learn(own, other, HOW, resume=Progress.load(text, "key", "checkpoint"))
        assert again.best.tobytes() == whole.best.tobytes()
        assert again.search.dump() == whole.search.dump()
        assert again.curve == whole.curve


def test_a_foreign_checkpoint_is_refused() -> None:
    own, other = episodes()
    text = learn(own, other, replace(HOW, generations=1)).dump("key")
    with pytest.raises(InputError, match="of other data or options"):
        Progress.load(text, "another", "checkpoint")
    with pytest.raises(InputError, match="no checkpoint"):
        Progress.load("{}", "key", "checkpoint")
    changed = replace(own, values=own.values + 1e-9)
    assert changed.digest() != own.digest()


def test_standings_are_paired_and_bounded_by_the_optimum() -> None:
    runs = [tables_of(seed, True, 6.0, 4) for seed in range(3)]
    objective = run_objective(runs, Goal())
    rows = {row.name: row for row in standings(runs, ScoreRule(FORECAST_WEIGHTS, objective), {}, objective)}
    least = rows["offline optimum"].value
    assert least == pytest.approx(np.mean([offline_optimum(run, objective).value for run in runs]) / 4)
    assert all(row.value >= least - 1e-12 for row in rows.values())
    for row in rows.values():
        assert row.judged_less.mean == pytest.approx(row.value - rows["judged"].value)
    assert rows["2 actors, best cut and keep in hindsight"].value <= rows["2 actors"].value


def network() -> NetworkRule:
    """Return a random network for the small setting."""
    rng, most, thresholds = np.random.default_rng(0), 3, 2
    sizes = (8 + 2 * most * thresholds, 5, most + thresholds + most + 1)
    layers = tuple((rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in pairwise(sizes))
    return NetworkRule(layers, episodes()[0].relative)


@pytest.mark.parametrize("kind", ["score", "network"])
def test_a_policy_file_decides_as_its_rule(kind: str, tmp_path: Path) -> None:
    """What a file's policy does in the replay is what its rule does in the model."""
    objective, relative = episodes()[0].objective, episodes()[0].relative
    rule = network() if kind == "network" else ScoreRule(FORECAST_WEIGHTS * 0.9, relative)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy_document(rule, SPACE, {"trace": "test"})))
    tables = tables_of(2, True, 6.0, 4)
    expected = follow(tables, rule, objective)
    outcomes = [s.outcome for s in simulate(run_of(2, 4), Learned(str(file)), cold_setting(), seed=2)]
    assert [o.actors for o in outcomes] == [action.actors for action in expected.actions]
    assert sum(o.gpu_seconds for o in outcomes) == pytest.approx(expected.gpu_seconds, rel=1e-12)


def test_the_shipped_policy_works_out_of_the_box() -> None:
    check_policy(Learned())
    for step in simulate(run_of(0), Learned(), cold_setting()):
        assert step.plan.policy == "learned"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other"}, "schema"),
        ({"weights": {"time": 1.0}}, r"weights\.\w+ is missing"),
        ({"weights": {**dict.fromkeys(FEATURES, 0.0), "luck": 1.0}}, r"weights\.luck is unknown"),
        ({"weights": None}, "either weights or layers"),
        ({"thresholds": []}, "thresholds"),
        ({"guesses": 0}, "guesses"),
        ({"objective": {"time_weight": -1.0, "cost_weight": 1.0}}, "time_weight"),
        ({"weights": None, "layers": [{"weight": [[1.0], [1.0]], "bias": [0.0]}]}, r"layers\.0 does not fit"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_policy_file_is_refused_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rule = ScoreRule(FORECAST_WEIGHTS, episodes()[0].relative)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({**policy_document(rule, SPACE, {}), **change}))
    with pytest.raises(InputError, match=message) as refused:
        Learned(str(file))
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Learned(str(tmp_path / "missing.json"))
    file = tmp_path / "policy.json"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="no JSON"):
        Learned(str(file))


def test_a_network_for_other_slots_is_refused() -> None:
    wide = replace(SPACE, most=2)
    with pytest.raises(InputError, match="2 slots"):
        list(simulate(run_of(0), HorizonPolicy("network", network(), wide), cold_setting()))


def test_ppo_trains_a_network() -> None:
    """A short training of the alternative learner: its curve, and a rule that decides."""
    pytest.importorskip("stable_baselines3")
    from rlhfless.solver.ppo import Ppo, learn_ppo

    runs = [tables_of(seed, True, 6.0, 4) for seed in range(3)]
    objective = run_objective(runs, Goal())
    rule, curve = learn_ppo(runs[:2], runs[2:], objective, Ppo(timesteps=1024, rollout=256))
    assert [row[0] for row in curve] == [256, 512, 768, 1024]
    assert step_values(runs[2:], rule, objective).mean() == pytest.approx(min(row[2] for row in curve))
