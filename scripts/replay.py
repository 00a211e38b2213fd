"""Replay a workload under one policy; write its scores, steps, plans and timeline.

    rlhfless replay policy=verl trace=gsm8k_ppo out=out/verl
    rlhfless replay policy._target_=my_package.MyPolicy
    rlhfless replay plans=plans.jsonl trace=file trace.path=run.parquet
    rlhfless replay -m policy=verl,rlhfless trace=gsm8k_ppo,dapo_math 'seed=range(10)' out=out/sweep
    rlhfless replay --from out/verl/run.yaml     # the same run again; overrides change it

Writes run.yaml (version, seed and the whole configuration), summary.json (means over the steps), steps.csv (a row
a step), plans.jsonl (a plan a step), timeline.json (opens in Perfetto), timings.json (measured planning times,
which cannot repeat), and the tables that figures are drawn from.

-m sweeps: a folder a cell, appearing whole. The same command again goes on where it was stopped.
hydra/launcher=joblib, submitit_local, submitit_slurm or ray spreads the cells; hydra/sweeper=optuna with
optimize=step_seconds searches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless.scripts.arguments import from_option
from rlhfless.scripts.compare import log_overrides

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfless.models.plan import Plan
    from rlhfless.policies import StepView
    from rlhfless.scripts.sweep import Run
    from rlhfless.traces.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    recorded, rest = from_option(sys.argv[1:] if arguments is None else arguments)
    overrides = log_overrides(rest, __doc__ or "", "replay")
    from rlhfless.scripts.common import hydra_verb

    hydra_verb("replay", replay, own_policy(overrides), recorded)


def own_policy(overrides: Sequence[str]) -> list[str]:
    """Let ``policy._target_=`` stand alone: a class of the user's own, without another policy's arguments."""
    result = list(overrides)
    if any(o.startswith("policy._target_=") for o in overrides):
        if not any(o.startswith("policy=") for o in overrides):
            result.insert(0, "policy=own")
        result = [f"++{o}" if o.startswith("policy.") else o for o in result]
    return result


@dataclass(frozen=True)
class RecordedPlans:
    """Plans from a file, given back step by step."""

    path: str
    trace: Trace = field(repr=False)
    plans: dict[int, tuple[int, dict[str, Any]]] = field(repr=False)
    name: str = "recorded"

    @classmethod
    def read(cls, path: str, trace: Trace) -> RecordedPlans:
        """Read a JSON Lines file with one plan a step."""
        from rlhfless.traces.errors import InputError
        from rlhfless.traces.files import read_bytes

        plans: dict[int, tuple[int, dict[str, Any]]] = {}
        for number, line in enumerate(read_bytes(Path(path)).decode().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{path}: line {number}: no JSON: {error.msg} at column {error.colno}"
                ) from None
            if not isinstance(values, dict) or not isinstance(values.get("step"), int):
                raise InputError(f"{path}: line {number}: a plan is an object with a step")
            if values["step"] in plans:
                raise InputError(f"{path}: line {number}: step {values['step']} is planned twice")
            plans[values["step"]] = (number, values)
        return cls(path, trace, plans)

    def plan(self, view: StepView) -> Plan:
        """Return the step's plan."""
        import numpy as np

        from rlhfless.models.plan import parse_plan
        from rlhfless.traces.errors import InputError

        if view.step not in self.plans:
            raise InputError(f"{self.path}: no plan for step {view.step}")
        number, values = self.plans[view.step]
        rows = self.trace.rows_of(int(np.searchsorted(self.trace.steps, view.step)))
        batch = self.trace.select(np.arange(rows.start, rows.stop))
        return parse_plan(values, batch, f"{self.path}: line {number}")


def replay(config: DictConfig) -> Run:
    """Run the replay that a configuration describes, and return its files."""
    from rlhfless.models.scores import RunScores
    from rlhfless.policies import simulate
    from rlhfless.scripts.common import advance, progress
    from rlhfless.scripts.report import replay_files, setting_lines
    from rlhfless.scripts.sweep import Run
    from rlhfless.scripts.workload import build_policy, build_workloads
    from rlhfless.solver.bounds import step_lower_bound
    from rlhfless.traces.errors import InputError

    seed = int(config.seed)
    workloads = build_workloads(config, [seed])
    if len(workloads) > 1:
        raise InputError("replay takes one log; compare takes several")
    workload = workloads[0]
    trace = workload.traces[0]
    if config.plans is None:
        policy = build_policy(config.policy, "policy")
    else:
        policy = RecordedPlans.read(str(config.plans), trace)
    steps = []
    with progress(len(trace.steps), f"replaying {workload.name}") as bar:
        for step in simulate(trace, policy, workload.setting, seed=seed, bound=step_lower_bound):
            steps.append(step)
            advance(bar)
    scores = RunScores.of([step.outcome for step in steps])
    mean = scores.mean
    told = (
        f"{policy.name}: {mean['step_seconds']:.2f} s and {mean['gpu_seconds']:.1f} GPU s a step over "
        f"{scores.steps} steps, {mean['busy_gpu_seconds'] / mean['gpu_seconds']:.0%} busy, {mean['actors']:.1f} actors"
    )
    return Run(
        contents=replay_files(workload, policy.name, seed, steps),
        lines=(*setting_lines(workload), told),
        scores=mean,
    )


if __name__ == "__main__":
    main()
