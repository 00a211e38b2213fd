"""The verb ``train``: files, taking up after a kill, and one line for what is wrong."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from rlhfless.scripts.train import train
from rlhfless.solver.learned import Learned
from rlhfless.traces.errors import InputError

SMALL = (
    "trace.prompts=24",
    "trace.prompts_per_step=12",
    "trace.epochs=2",
    "most=2",
    "guesses=2",
    "thresholds=[0.7,0.9]",
    "training_seeds=2",
    "validation_seeds=1",
    "heldout_seeds=2",
    "learner.checkpoint_every=10",
)


def run(*overrides: str) -> None:
    """Train in this process."""
    with initialize_config_module("rlhfless.conf", version_base="1.3"):
        config = compose("train", overrides=[*SMALL, *overrides])
    train(config)


def read(folder: Path, name: str) -> Any:
    """Return a JSON file of a training."""
    return json.loads((folder / name).read_text())


def test_a_training_writes_a_policy_a_curve_and_an_evaluation(tmp_path: Path) -> None:
    run("learner.generations=20", f"out={tmp_path}")
    assert Learned(str(tmp_path / "policy.json")).name == "learned"
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [int(row["generation"]) for row in rows] == list(range(21))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")
    evaluation = read(tmp_path, "evaluation.json")
    value = {row["name"]: row["value"] for row in evaluation["standings"]}
    assert value["offline optimum"] <= min(value.values()) * (1 + 1e-12)
    # The tables and whole replays say the same.
    assert evaluation["replayed_value"]["judged"] == pytest.approx(value["judged"], rel=1e-12)
    assert evaluation["replayed_value"]["min-max"] == pytest.approx(value["min-max"], rel=1e-12)
    assert read(tmp_path, "policy.json")["trained"]["training_runs"] == 2


def test_a_killed_training_goes_on_to_the_same_policy(tmp_path: Path) -> None:
    """SIGKILL some time after the first checkpoint; the same command then ends with the same bits."""
    many = "learner.generations=2000"
    program = (
        "import sys; from hydra import compose, initialize_config_module; "
        "from rlhfless.scripts.train import train\n"
        "with initialize_config_module('rlhfless.conf', version_base='1.3'):\n"
        "    config = compose('train', overrides=sys.argv[1:])\n"
        "train(config)\n"
    )
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", program, *SMALL, many, f"out={folder}"])
    checkpoint = folder / "checkpoint.json"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
    reached = read(folder, "checkpoint.json")["search"]["generation"]
    assert 0 < reached < 2000
    assert not (folder / "policy.json").exists()
    generations = f"learner.generations={reached + 30}"
    run(generations, f"out={folder}")
    run(generations, f"out={tmp_path / 'whole'}")
    for name in ("policy.json", "curve.csv", "checkpoint.json"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_of_another_training_is_refused_unless_told(tmp_path: Path) -> None:
    run("learner.generations=10", f"out={tmp_path}")
    with pytest.raises(InputError, match="of other data or options"):
        run("learner.generations=10", "learner.seed=1", f"out={tmp_path}")
    run("learner.generations=10", "learner.seed=1", "resume=false", f"out={tmp_path}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("goal.limit=1.2", "limit"),
        ("goal.kind=best", "goal: kind"),
        ("learner.population=2", "learner.population is 2"),
        ("+learner.speed=2", "speed"),
        ("learner.kind=magic", "learner.kind is magic"),
        ("options.warm_at_start=true", "warm_at_start: must be false"),
        ("thresholds=[1.5]", "thresholds are"),
        ("heldout_seeds=0", "heldout_seeds is 0"),
        ("most=0", "most is 0"),
        ("out=null", "out: a training needs a folder"),
    ],
)
def test_wrong_options_are_one_line_and_write_nothing(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as refused:
        run(f"out={tmp_path / 'out'}", override)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
