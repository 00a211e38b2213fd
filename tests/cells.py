"""Sweeps for tests: cells as ``rlhfless replay -m`` lays them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from rlhfless.policies import simulate
from rlhfless.scripts.common import write_files
from rlhfless.scripts.report import replay_files
from rlhfless.scripts.workload import build_policy, build_workloads

SMALL = ("trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=2", "trace.max_response_tokens=512")


def composed(overrides: Sequence[str]) -> Any:
    """Return the configuration of a replay."""
    with initialize_config_module("rlhfless.conf", version_base="1.3"):
        return compose("replay", overrides=list(overrides))


def description(config: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what run.yaml says of a cell."""
    return {
        "version": "0.1.0",
        "verb": "replay",
        "key": "-".join(overrides),
        "seed": int(config.seed),
        "overrides": list(overrides),
        "config": OmegaConf.to_container(config, resolve=True),
    }


def write_cell(folder: Path, *overrides: str) -> Path:
    """Replay one cell and write its folder."""
    config = composed(overrides)
    (workload,) = build_workloads(config, [config.seed])
    policy = build_policy(config.policy, "policy")
    steps = list(simulate(workload.traces[0], policy, workload.setting, seed=config.seed))
    contents = replay_files(workload, policy.name, config.seed, steps)
    write_files(folder, {"run.yaml": yaml.safe_dump(description(config, overrides)), **contents})
    return folder


def write_sweep(folder: Path, fixed: Sequence[str], **swept: Sequence[Any]) -> Path:
    """Replay every combination of the swept keys (``policy__scale__weight`` names ``policy.scale.weight``)."""
    keys = [key.replace("__", ".") for key in swept]
    for number, values in enumerate(product(*swept.values())):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        write_cell(folder / str(number), *fixed, *chosen)
    return folder


def write_failure(folder: Path, error: str, *overrides: str) -> Path:
    """Write the folder of a cell that failed."""
    told = {"error": error, **description(composed(overrides), overrides)}
    write_files(folder, {"failure.json": json.dumps(told)})
    return folder
