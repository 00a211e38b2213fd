"""Every shipped policy on every preset and on recorded lengths, without a special case."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from rlhfless.models.cluster import Cluster
from rlhfless.models.replay import ReplayOptions
from rlhfless.policies import Policy, Setting, simulate
from rlhfless.scripts.workload import build_policy, named_profile, plain
from rlhfless.traces.polytrace import read_polytrace
from rlhfless.traces.synthetic import Synthetic, generate
from rlhfless.traces.trace import Trace

CONF = Path(__file__).parent.parent / "conf"
PRESETS = sorted(path.stem for path in (CONF / "trace").glob("*.yaml") if "Synthetic" in path.read_text())
POLICIES = sorted(path.stem for path in (CONF / "policy").glob("*.yaml") if path.stem != "own")


@cache
def policies() -> dict[str, Policy]:
    """Build every policy that ``compare`` offers."""
    with initialize_config_module("rlhfless.conf", version_base="1.3"):
        config = compose("compare")
    return {str(name): build_policy(config.policies[name], f"policies.{name}") for name in config.policies}


@cache
def preset(name: str) -> Trace:
    """Return a small trace of a preset: three epochs of two steps."""
    with initialize_config_module("rlhfless.conf", version_base="1.3"):
        parameters = Synthetic.parse(plain(compose(overrides=[f"+trace={name}"]).trace, name), name)
    return generate(replace(parameters, prompts=32, prompts_per_step=16, epochs=3), seed=0)


def setting() -> Setting:
    """Return two nodes of eight H100 and a 7B model."""
    profile = named_profile("h100_qwen2.5-7b_tp2")
    cluster = Cluster(nodes=2, gpus_per_node=8, gpu="H100")
    return Setting(cluster.adapt(profile), cluster, ReplayOptions(), profile.stages["update_actor"].gpus)


def check_run(trace: Trace, policy: Policy) -> None:
    """Replay a trace; the replay itself checks conservation. Every response is delivered once."""
    delivered: list[tuple[int, int, int]] = []
    for step in simulate(trace, policy, setting()):
        batch = step.batch.select(np.flatnonzero(step.outcome.delivered))
        delivered += zip(batch.epoch.tolist(), batch.prompt.tolist(), batch.sample.tolist(), strict=True)
    recorded = zip(trace.epoch.tolist(), trace.prompt.tolist(), trace.sample.tolist(), strict=True)
    assert sorted(delivered) == sorted(recorded)


def test_compare_offers_every_policy_file() -> None:
    assert sorted(policies()) == POLICIES


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_on_every_preset(policy: str, name: str) -> None:
    check_run(preset(name), policies()[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_on_recorded_lengths(policy: str, data_dir: Path) -> None:
    path = data_dir / "polytrace_lengths" / "single_turn_lengths.parquet"
    check_run(read_polytrace(path, "deepcoder_14b_code_16k"), policies()[policy])
