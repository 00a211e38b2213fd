"""Replay a workload under one policy; write its scores, steps, plans and timeline.

    rlhfless replay policy=verl trace=gsm8k_ppo out=out/verl
    rlhfless replay policy._target_=my_package.MyPolicy
    rlhfless replay plans=plans.jsonl trace=file trace.path=run.parquet

Writes summary.json (means over the steps), steps.csv (a row a step), plans.jsonl (a plan a step),
timeline.json (opens in Perfetto) and timings.json (measured planning times, which cannot repeat).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless.scripts.compare import log_overrides

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfless.models.plan import Plan
    from rlhfless.policies import StepView
    from rlhfless.traces.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    overrides = log_overrides(sys.argv[1:] if arguments is None else arguments, __doc__ or "", "replay")
    from rlhfless.scripts.common import hydra_verb

    hydra_verb("replay", replay, own_policy(overrides))


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


def replay(config: DictConfig) -> None:
    """Run the replay that a configuration describes."""
    from rlhfless.models.scores import RunScores, step_record
    from rlhfless.policies import simulate
    from rlhfless.scripts.common import advance, console, output_folder, progress, write_files
    from rlhfless.scripts.report import csv_text, setting_lines, timeline, timing, to_json, workload_values
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
    outcomes = [step.outcome for step in steps]
    scores = RunScores.of(outcomes)
    contents = {
        "summary.json": to_json(
            {
                **workload_values(workload),
                "policy": policy.name,
                "seed": seed,
                "steps": scores.steps,
                "mean": scores.mean,
                "gpu_seconds_by_function": scores.by_function,
            }
        ),
        "steps.csv": csv_text([step_record(outcome) for outcome in outcomes]),
        "plans.jsonl": "".join(to_json(step.plan.document(step.batch), indent=None) for step in steps),
        "timeline.json": timeline(outcomes, workload.setting.cluster.gpus_per_node),
        "timings.json": to_json(timing([step.planning_seconds for step in steps])),
    }
    folder = output_folder(config)
    if folder is not None:
        write_files(folder, contents)
    out = console()
    for line in setting_lines(workload):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    mean = scores.mean
    out.print(
        f"{policy.name}: {mean['step_seconds']:.2f} s and {mean['gpu_seconds']:.1f} GPU s a step over "
        f"{scores.steps} steps, {mean['busy_gpu_seconds'] / mean['gpu_seconds']:.0%} busy, "
        f"{mean['actors']:.1f} actors",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if folder is not None:
        out.print(
            f"written: {', '.join(str(folder / name) for name in contents)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
