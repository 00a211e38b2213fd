"""A policy in a file outside the repository, as a user would write it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless.scripts import cli

SOURCE = '''
import numpy as np
from rlhfless.policies import ActorPlan, Learner, Plan


class Halves:
    """Two actors; the responses of even and of odd position."""

    def __init__(self, name="halves", forget=0):
        self.name = name
        self.forget = forget

    def plan(self, view):
        rows = np.arange(len(view))[self.forget:]
        actors = tuple(
            ActorPlan(gpus=view.profile.actor.gpus, node=0, responses=rows[part::2]) for part in (0, 1)
        )
        return Plan(step=view.step, policy=self.name, platform="serverless", actors=actors,
                    learner=Learner(gpus=view.learner_gpus))
'''
SMALL = ["trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that holds the policy."""
    (tmp_path / "my_policies.py").write_text(SOURCE)
    return tmp_path


def rlhfless(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder, as a user does."""
    command = [sys.executable, str(Path(cli.__file__)), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)


def test_compare_and_replay_take_a_class_by_its_name(folder: Path) -> None:
    done = rlhfless(
        folder, "compare", *SMALL, "seeds=2", "policy._target_=my_policies.Halves", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    policies = json.loads((folder / "out" / "summary.json").read_text())["policies"]
    assert policies["halves"]["mean"]["actors"]["mean"] == 2
    assert "rlhfless" in policies  # beside the others

    arguments = ["policy._target_=my_policies.Halves", "policy.name=mine", "out=alone"]
    done = rlhfless(folder, "replay", *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    plans = [json.loads(line) for line in (folder / "alone" / "plans.jsonl").read_text().splitlines()]
    assert {plan["policy"] for plan in plans} == {"mine"}
    assert all(len(plan["actors"]) == 2 for plan in plans)


def test_the_readmes_policy_passes_the_checker(folder: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (folder / "readme_policy.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "readme_policy.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = rlhfless(folder, "replay", *SMALL, "policy._target_=readme_policy.OneActor", "out=out")
    assert done.returncode == 0, done.stderr


def test_what_is_wrong_with_it_is_one_line(folder: Path) -> None:
    cases = {
        "policy._target_=my_policies.NoSuch": "my_policies.NoSuch",
        "policy._target_=no_such_module.Halves": "no_such_module",
    }
    for target, message in cases.items():
        done = rlhfless(folder, "replay", *SMALL, target, "out=out")
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    done = rlhfless(
        folder, "replay", *SMALL, "policy._target_=my_policies.Halves", "policy.forget=1", "out=out"
    )
    assert done.returncode == 2
    assert "stands in no actor; every response must stand in exactly one actor" in done.stderr
    assert not (folder / "out").exists()
