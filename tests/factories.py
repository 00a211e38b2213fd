"""Small profiles, batches and runs for tests, and hypothesis strategies that draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from hydra.utils import instantiate
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlhfless.models.cluster import Cluster
from rlhfless.models.decode import EngineOptions
from rlhfless.models.profile import Profile
from rlhfless.models.replay import Billing, ReplayOptions
from rlhfless.policies import (
    ByDistance,
    Chunked,
    Composed,
    DeduplicatedPrefill,
    Ewma,
    FixedActors,
    LocalPrefill,
    Migration,
    MinMaxScore,
    NoPrewarm,
    OnLearner,
    Oracle,
    Policy,
    Setting,
    ShortestPast,
    SimulatedStep,
    SortedEven,
    StepView,
    simulate,
)
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.simulate import view_of
from rlhfless.traces.trace import PrefixBlocks, Trace


def profile(**changes: Any) -> Profile:
    """Return a small profile; a change is ``part__key=value`` or ``key=value``."""
    values: dict[str, Any] = {
        "name": "test",
        "model": "Test-1B",
        "gpu": "T",
        "kind": "measured",
        "actor": {"gpus": 2, "max_running": 64, "kv_capacity_tokens": 1_000_000},
        "decode": {
            "batch": [1, 8, 64],
            "base_seconds": [0.010, 0.012, 0.020],
            "kv_token_seconds": [1.0e-7, 1.2e-7, 1.5e-7],
        },
        "prefill": {
            "gpus": 2,
            "fixed_seconds": 0.005,
            "token_seconds": 1.0e-5,
            "token2_seconds": 1.0e-9,
            "max_batch_tokens": 4096,
        },
        "stages": {
            "reward": {"gpus": 0, "fixed_seconds": 0.1},
            "reference": {"gpus": 2, "fixed_seconds": 0.2, "token_seconds": 1.0e-6},
            "value": {"gpus": 2, "fixed_seconds": 0.2, "token_seconds": 1.0e-6},
            "update_actor": {"gpus": 4, "fixed_seconds": 0.5, "token_seconds": 1.0e-5},
            "update_critic": {"gpus": 4, "fixed_seconds": 0.5, "token_seconds": 8.0e-6},
        },
        "memory": {"weight_bytes": 2.0e9, "kv_bytes_per_token": 3.0e4},
        "links": {
            "within_node": {"bytes_per_second": 2.0e10, "latency_seconds": 1.0e-5},
            "between_nodes": {"bytes_per_second": 1.0e10, "latency_seconds": 3.0e-5},
        },
        "functions": {"cold_start_seconds": 20.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 600.0},
        "source": {"decode": "made up for tests"},
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            values[part][name] = value
        else:
            values[part] = value
    return Profile.parse(values, "test profile")


def batch(
    prompt_tokens: Sequence[int],
    response_tokens: Sequence[int],
    prompt: Sequence[int] | None = None,
    *,
    step: int | Sequence[int] = 0,
    epoch: int | Sequence[int] = 0,
    blocks: Sequence[Sequence[int]] | None = None,
    **rest: Any,
) -> Trace:
    """Return a trace with one entry per response; ``prompt`` numbers their prompts (default: all differ).

    ``blocks`` are the block hashes of each response's prompt. Responses to one prompt in one step are
    numbered in the order given.
    """
    n = len(prompt_tokens)
    prompts = np.arange(n) if prompt is None else np.asarray(prompt, dtype=np.int64)
    steps = np.broadcast_to(np.asarray(step, dtype=np.int64), (n,)).copy()
    seen: dict[tuple[int, int], int] = {}
    sample = np.empty(n, dtype=np.int64)
    for row, key in enumerate(zip(steps.tolist(), prompts.tolist(), strict=True)):
        sample[row] = seen[key] = seen.get(key, -1) + 1
    prefix = None
    if blocks is not None:
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in blocks]))).astype(np.int64)
        prefix = PrefixBlocks(offsets, np.array([h for row in blocks for h in row], dtype=np.int64))
    return Trace(
        name="test",
        step=steps,
        epoch=np.broadcast_to(np.asarray(epoch, dtype=np.int64), (n,)).copy(),
        prompt=prompts,
        prompt_ids=tuple(f"p{number}" for number in range(int(prompts.max()) + 1)),
        sample=sample,
        prompt_tokens=np.asarray(prompt_tokens, dtype=np.int64),
        response_tokens=np.asarray(response_tokens, dtype=np.int64),
        prefix_blocks=prefix,
        **rest,
    ).checked("test trace")


def view(step: Trace, setting: Setting, history: LengthHistory | None = None, cap: int = 1000) -> StepView:
    """Return the view of a step, with an empty history by default."""
    return view_of(step, setting, history or LengthHistory(len(step.prompt_ids)), max_response_tokens=cap)


def setting(
    cost: Profile | None = None,
    *,
    nodes: int = 2,
    gpus_per_node: int = 8,
    learner_gpus: int = 4,
    **options: Any,
) -> Setting:
    """Return a setting on two nodes of eight GPUs, four of them the learner's, unless told otherwise."""
    return Setting(
        cost or profile(),
        Cluster(nodes=nodes, gpus_per_node=gpus_per_node),
        ReplayOptions(**options),
        learner_gpus,
    )


@cache
def shipped_policies() -> dict[str, Policy]:
    """Return the policies of ``conf/policy``, as the command line builds them."""
    folder = files("rlhfless.conf").joinpath("policy")
    configs = {
        item.name.removesuffix(".yaml"): OmegaConf.create(item.read_text(encoding="utf-8"))
        for item in folder.iterdir()
        if item.name.endswith(".yaml") and item.name != "own.yaml"
    }
    return {name: instantiate(configs[name], _convert_="all") for name in sorted(configs)}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a small run: up to 5 prompts a step with up to 4 responses each, one to three epochs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="trace seed"))
    prompts, samples = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    steps, epochs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    longest = draw(st.sampled_from([1, 8, 120]))
    question = rng.integers(1, 60, prompts * steps)
    order = np.concatenate([rng.permutation(prompts * steps) for _ in range(epochs)])
    prompt = np.repeat(order, samples)
    n = len(prompt)
    block = 4
    blocks = None
    if draw(st.booleans()):
        # Few hashes, so that prompts share prefixes; a prompt has the same ones in every epoch.
        hashes = [rng.integers(0, 2, tokens // block).tolist() for tokens in question]
        blocks = [hashes[p] for p in prompt]
    return batch(
        question[prompt],
        rng.integers(1, longest + 1, n),
        prompt,
        step=np.repeat(np.arange(steps * epochs), prompts * samples),
        epoch=np.repeat(np.arange(epochs), prompts * samples * steps),
        blocks=blocks,
        block_tokens=None if blocks is None else block,
        answer_tokens=rng.integers(1, 50, prompts * steps)[prompt] if draw(st.booleans()) else None,
        max_response_tokens=draw(st.sampled_from([None, longest, 2 * longest])),
        algorithm=draw(st.sampled_from(["ppo", "grpo"])),
    )


@st.composite
def profiles(draw: st.DrawFn, largest: int) -> Profile:
    """Draw a profile whose actors hold at least ``largest`` KV tokens, so that a response of it fits alone."""
    return profile(
        actor__gpus=draw(st.sampled_from([1, 2, 3])),
        actor__max_running=draw(st.sampled_from([1, 2, 5, 64])),
        actor__kv_capacity_tokens=largest + draw(st.sampled_from([0, 40, 400, 1_000_000])),
        prefill__max_batch_tokens=draw(st.sampled_from([16, 4096])),
        memory__weight_bytes=draw(st.sampled_from([1.0, 2.0e9, 2.0e10])),
        functions={
            "cold_start_seconds": draw(st.sampled_from([0.5, 20.0])),
            "warm_start_seconds": draw(st.sampled_from([0.0, 0.25])),
            "keep_alive_seconds": draw(st.sampled_from([0.0, 2.0, 600.0])),
        },
    )


@st.composite
def replay_options(draw: st.DrawFn) -> ReplayOptions:
    """Draw choices of the replay."""
    return ReplayOptions(
        engine=EngineOptions(draw(st.booleans()), draw(st.booleans())),
        billing=Billing(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
        weight_transfer=draw(st.sampled_from(["broadcast", "in_turn"])),
        kv_transfer=draw(st.sampled_from(["in_turn", "parallel"])),
        switch_seconds=draw(st.sampled_from([0.0, 0.5])),
        generation_overhead_seconds=draw(st.sampled_from([0.0, 0.125])),
        warm_at_start=draw(st.booleans()),
    )


@st.composite
def migrations(draw: st.DrawFn) -> Migration:
    """Draw a rule for stragglers, with every choice that the paper leaves open."""
    return Migration(
        rule=draw(st.sampled_from(["none", "local", "local"])),
        threshold=draw(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 1.0])),
        partial=draw(st.booleans()),
        wait_for_slots=draw(st.booleans()),
        kv=draw(st.sampled_from(["transfer", "recompute"])),
        slots=draw(st.sampled_from(["assigned", "engine"])),
        target=draw(st.sampled_from(["most_slots", "most_unfinished"])),
        count_moved=draw(st.booleans()),
        keep_first=draw(st.booleans()),
    )


@st.composite
def compositions(draw: st.DrawFn) -> Composed:
    """Draw a policy put together from any parts."""
    unit = draw(st.sampled_from(["response", "prompt"]))
    oracle = draw(st.booleans())
    scale = draw(
        st.sampled_from(
            [FixedActors(None), FixedActors(1), FixedActors(3)]
            + [
                MinMaxScore(weight=weight, estimate=estimate, locality=locality)
                for weight in (0.0, 0.7)
                for estimate in ("paper", "exact")
                for locality in ("none", "printed", "exact")
            ]
        )
    )
    return Composed(
        name="drawn_oracle" if oracle else "drawn",
        platform=draw(st.sampled_from(["serverless", "serverful"])),
        predict=Oracle() if oracle else Ewma(window=draw(st.integers(1, 3))),
        assign=draw(st.sampled_from([SortedEven(unit), Chunked(unit)])),
        scale=scale,
        prefill=draw(
            st.sampled_from(
                [
                    LocalPrefill(),
                    DeduplicatedPrefill(),
                    DeduplicatedPrefill(max_prefixes=2),
                    DeduplicatedPrefill(max_prefixes=3, rule="printed"),
                ]
            )
        ),
        migration=draw(migrations()),
        place=draw(st.sampled_from([ByDistance("nearest"), ByDistance("farthest"), OnLearner()])),
        prewarm=draw(st.sampled_from([NoPrewarm(), ShortestPast(), ShortestPast(0.3, 2.0)])),
        preparation=draw(st.sampled_from(["learner", "separate"])),
        sees_true_lengths=oracle,
    )


def policies() -> st.SearchStrategy[Policy]:
    """Draw a shipped policy or a random composition."""
    return st.one_of(st.sampled_from(list(shipped_policies().values())), compositions())


@dataclass(frozen=True)
class Case:
    """A run to replay."""

    trace: Trace
    policy: Policy
    setting: Setting

    def steps(self, **changes: Any) -> list[SimulatedStep]:
        """Replay the run, or a changed one."""
        case = replace(self, **changes)
        return list(simulate(case.trace, case.policy, case.setting))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a run: a trace, a policy, and what it runs on."""
    trace = draw(traces())
    cost = draw(profiles(int((trace.prompt_tokens + trace.response_tokens).max())))
    nodes, per_node = draw(st.sampled_from([(1, 8), (2, 4), (2, 8), (3, 5)]))
    return Case(
        trace,
        draw(policies()),
        Setting(
            cost,
            Cluster(nodes=nodes, gpus_per_node=per_node),
            draw(replay_options()),
            draw(st.sampled_from([3, 4, 6, 8])),
        ),
    )
