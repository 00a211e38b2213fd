"""What a reproduction runs: cells (a workload on GPUs), policies with changed parts, and every run once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf

from rlhfless.models.scores import Comparison, Interval95, RunScores, compare, interval, step_record
from rlhfless.policies import Policy, simulate
from rlhfless.scripts.reproduce_verdicts import less
from rlhfless.scripts.workload import Workload, build_policy, build_workloads, first_seeds
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray


@dataclass(frozen=True)
class Cell:
    """A workload on GPUs, named as the command line does it.

    ``changes`` are overrides such as ``trace.prompts=1536`` or ``options.engine.prefix_caching=false``.
    """

    trace: str
    profile: str
    cluster: str
    changes: tuple[str, ...] = ()

    def but(self, *changes: str) -> Cell:
        """Return the cell with further overrides."""
        return Cell(self.trace, self.profile, self.cluster, (*self.changes, *changes))

    def __str__(self) -> str:
        return " ".join(
            (f"trace={self.trace}", f"profile={self.profile}", f"cluster={self.cluster}", *self.changes)
        )


@dataclass(frozen=True)
class Runs:
    """One policy on one cell, a run a seed.

    ``steps`` holds each run's columns (those of ``models.scores.STEP_COLUMNS``), one value a step;
    ``release`` the instant at which each actor was released, a row of actors a step;
    ``planning`` measured wall times.
    """

    scores: tuple[RunScores, ...]
    steps: tuple[dict[str, FloatArray], ...] = field(repr=False)
    release: tuple[tuple[FloatArray, ...], ...] = field(repr=False)
    planning: FloatArray = field(repr=False)

    def each(self, column: str) -> FloatArray:
        """Return a column's mean over the steps, one value a seed."""
        return np.array([steps[column].mean() for steps in self.steps])

    def mean(self, column: str) -> Interval95:
        """Return a column's mean over steps and seeds."""
        return interval(self.each(column))

    def function(self, name: str) -> FloatArray:
        """Return the GPU seconds billed for a function, a step's mean, one value a seed."""
        return np.array([scores.by_function.get(name, 0.0) for scores in self.scores])

    def against(self, baseline: Runs) -> Comparison:
        """Compare with another policy, seed by seed."""
        return compare(self.scores, baseline.scores)

    @property
    def training_share(self) -> float:
        """Share of a step that is not generation."""
        return 1 - float(self.each("generation_seconds").mean() / self.each("step_seconds").mean())


def shares(left: Runs, right: Runs, column: str) -> Interval95:
    """Return the share of steps in which the left runs' column is below the right ones'."""
    return interval([less(a[column], b[column]).mean() for a, b in zip(left.steps, right.steps, strict=True)])


def where_time_goes(ours: Runs, base: Runs) -> str:
    """Say how generation and the rest of a step change from a baseline to ours."""
    generation = [float(runs.each("generation_seconds").mean()) for runs in (base, ours)]
    rest = [
        float(runs.each("step_seconds").mean()) - g for runs, g in zip((base, ours), generation, strict=True)
    ]
    return (
        f"Generation goes from {generation[0]:.1f} to {generation[1]:.1f} s, preparation and training from "
        f"{rest[0]:.1f} to {rest[1]:.1f} s a step."
    )


class Lab:
    """Runs policies on cells, each combination once.

    Parameters
    ----------
    seeds
        Every run is repeated with seeds 0, 1, ...
    options
        Choices of the replay (``conf/options``) that hold wherever a cell says nothing else.

    """

    def __init__(self, seeds: int, options: Mapping[str, Any] | None = None) -> None:
        self.seeds = seeds
        self._options = dict(options) if options is not None else shipped("options", "default")
        self._workloads: dict[Cell, Workload] = {}
        self._runs: dict[tuple[Cell, str, tuple[str, ...]], Runs] = {}

    def workload(self, cell: Cell) -> Workload:
        """Return a cell's traces, one a seed, and what they run on."""
        if cell not in self._workloads:
            config = OmegaConf.create(
                {
                    "trace": shipped("trace", cell.trace),
                    "profile": shipped("profile", cell.profile),
                    "cluster": shipped("cluster", cell.cluster),
                    "options": self._options,
                    "learner_gpus": None,
                }
            )
            _override(config, cell.changes, str(cell))
            self._workloads[cell] = build_workloads(config, first_seeds(self.seeds))[0]
        return self._workloads[cell]

    def runs(self, cell: Cell, policy: str, *changes: str) -> Runs:
        """Return a shipped policy's runs on a cell.

        ``changes`` override its parts; one that names a ``_target_`` replaces the whole part.

        Raises
        ------
        InputError
            When the replay refuses the policy's plans.

        """
        key = (cell, policy, changes)
        if key not in self._runs:
            self._runs[key] = self.replay(cell, changed_policy(policy, *changes))
        return self._runs[key]

    def replay(self, cell: Cell, policy: Policy) -> Runs:
        """Run a policy on a cell; nothing is remembered."""
        workload = self.workload(cell)
        scores, steps, release, planning = [], [], [], []
        for seed, trace in enumerate(workload.traces):
            outcomes = []
            for step in simulate(trace, policy, workload.setting, seed=seed):
                outcomes.append(step.outcome)
                planning.append(step.planning_seconds)
            scores.append(RunScores.of(outcomes))
            rows = [step_record(outcome) for outcome in outcomes]
            steps.append({name: np.array([row[name] for row in rows]) for name in rows[0]})
            release.append(tuple(outcome.release for outcome in outcomes))
        return Runs(tuple(scores), tuple(steps), tuple(release), np.array(planning))

    def records(self) -> list[dict[str, Any]]:
        """Return all runs so far: cell, policy, overrides, and the mean scores with their intervals."""
        rows = []
        for (cell, policy, changes), runs in self._runs.items():
            row: dict[str, Any] = {"cell": str(cell), "policy": policy, "overrides": " ".join(changes)}
            for column in ("step_seconds", "generation_seconds", "gpu_seconds", "actors", "migrations"):
                value = runs.mean(column)
                row |= {column: value.mean, f"{column}_low": value.low, f"{column}_high": value.high}
            rows.append(row)
        return rows


def shipped(group: str, name: str) -> dict[str, Any]:
    """Return a configuration file of the package as plain values.

    Raises
    ------
    InputError
        When there is no such file.

    """
    path = files("rlhfless.conf").joinpath(group, f"{name}.yaml")
    if not path.is_file():
        raise InputError(f"{group} {name} does not exist; see conf/{group}/")
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def changed_policy(name: str, *changes: str) -> Policy:
    """Return a policy of ``conf/policy`` with overrides such as ``migration.threshold=0.3``."""
    config = OmegaConf.create(shipped("policy", name))
    _override(config, changes, f"policy {name}")
    return build_policy(config, f"policy {name}")


def _override(config: DictConfig, changes: tuple[str, ...], where: str) -> None:
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise InputError(f"{where}: {change!r} is no override key=value")
        OmegaConf.update(config, key, yaml.safe_load(value), merge=False)


#: The physical testbed of RLHFless (arXiv 2602.22718, sec. 6.1), and the actors of its models there.
TESTBED = "l40s_2x8"
MODELS = {"3B": "l40s_qwen2.5-3b_tp2", "7B": "l40s_qwen2.5-7b_tp4"}

#: Parts of a policy, switched off or set, as overrides.
CHUNKED = "assign={_target_: rlhfless.policies.Chunked}"
THREE_ACTORS = "scale={_target_: rlhfless.policies.FixedActors, actors: 3}"
LOCAL_PREFILL = "prefill={_target_: rlhfless.policies.LocalPrefill}"
ONE_PREFILL = "prefill={_target_: rlhfless.policies.DeduplicatedPrefill}"
NO_MIGRATION = "migration={_target_: rlhfless.policies.Migration, rule: none}"

#: What scaling and engine are by default: an actor runs at most 256 responses at once.
PAPER_ESTIMATE = "paper's estimate, 256 slots an actor"

#: The weight of time in the score (lambda).
PAPER_WEIGHT = 0.7

#: No queue for slots: an actor takes all its responses at once.
NO_WAVES = "profile.actor.max_running=4096"


def gsm8k(algorithm: str, model: str = "3B") -> Cell:
    """Return the GSM8K-like workload of an algorithm on the testbed, cut to 3 steps an epoch."""
    return Cell(f"gsm8k_{algorithm}", MODELS[model], TESTBED, ("trace.prompts=3072",))


def scaled(estimate: str, weight: float = PAPER_WEIGHT) -> str:
    """Return the override that scales by the min-max score; the default weight is the paper's."""
    return f"scale={{_target_: rlhfless.policies.MinMaxScore, weight: {weight}, estimate: {estimate}}}"
