"""Plan one batch and print the plan as JSON; nothing is replayed.

    rlhfless plan batch=batch.jsonl history=run.parquet policy=rlhfless profile=h100_qwen2.5-7b_tp2 cluster=h100_1x8

The batch is a trace file with the rows of one step; its response lengths may be missing and are never read.
The history is a trace file of earlier steps, from which lengths are predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless.scripts.arguments import hydra_parser, parse
from rlhfless.scripts.compare import cluster_profile
from rlhfless.scripts.replay import own_policy

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfless.traces.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    _, overrides = parse(hydra_parser("plan", __doc__), arguments)
    from rlhfless.scripts.common import hydra_verb

    hydra_verb("plan", plan, [*cluster_profile(overrides), *own_policy(overrides)])


def plan(config: DictConfig) -> None:
    """Plan the batch that a configuration names."""
    from dataclasses import replace

    from rlhfless.models.plan import allocate, check_responses
    from rlhfless.policies.history import LengthHistory
    from rlhfless.policies.simulate import view_of
    from rlhfless.scripts.common import write_files
    from rlhfless.scripts.report import to_json
    from rlhfless.scripts.workload import build_cluster, build_policy, build_profile, build_setting
    from rlhfless.solver.bounds import step_lower_bound
    from rlhfless.traces.errors import InputError
    from rlhfless.traces.files import read_trace

    path = str(config.batch)
    batch = read_trace(path, lengths_known=False)
    if len(batch.steps) != 1:
        raise InputError(f"{path}: a batch is one step, the file has {len(batch.steps)}")
    policy = build_policy(config.policy, "policy")
    if getattr(policy, "sees_true_lengths", False):
        raise InputError(f"policy {policy.name} needs the true lengths, which a batch to be planned has not")
    past = None if config.history is None else read_trace(str(config.history))
    if past is not None:
        batch, past = with_common_prompts(batch, past)
    setting = build_setting(config, build_profile(config), build_cluster(config))
    history = LengthHistory(len(batch.prompt_ids))
    for earlier in past.batches() if past is not None else ():
        history.record(earlier)
    cap = config.max_response_tokens or batch.max_response_tokens
    if cap is None and past is not None:
        cap = past.max_response_tokens
    if cap is None:
        raise InputError(f"{path}: the batch does not say max_response_tokens: give it as an option")
    view = view_of(batch, setting, history, max_response_tokens=int(cap), seed=int(config.seed))
    made = policy.plan(view)
    check_responses(made, batch, f"policy {policy.name}")
    allocate(made, setting.cluster, f"policy {policy.name}")
    if made.predicted is not None and len(made.predicted_tokens):
        lower = step_lower_bound(view, made.predicted_tokens)
        made = replace(made, predicted=made.predicted.model_copy(update={"lower_bound": lower}))
    text = to_json(made.document(batch), indent=None)
    if config.out is None:
        sys.stdout.write(text)
    else:
        write_files(Path(config.out).parent, {Path(config.out).name: text})


def with_common_prompts(batch: Trace, past: Trace) -> tuple[Trace, Trace]:
    """Return both traces with one numbering of prompts."""
    from dataclasses import replace

    import numpy as np

    ids = list(past.prompt_ids)
    code = {name: number for number, name in enumerate(ids)}
    for name in batch.prompt_ids:
        if name not in code:
            code[name] = len(ids)
            ids.append(name)
    own = np.array([code[name] for name in batch.prompt_ids], dtype=np.int64)
    return replace(batch, prompt=own[batch.prompt], prompt_ids=tuple(ids)), replace(
        past, prompt_ids=tuple(ids)
    )


if __name__ == "__main__":
    main()
