"""Sweeps: many runs of a verb, each whole or absent, finished ones not run again.

Hydra composes the configuration of each run and its launchers spread them: ``hydra/launcher=basic`` (one after
the other), ``joblib``, ``submitit_local``, ``submitit_slurm``, ``ray``. This module gives Hydra a sweeper that
passes over finished cells and goes on past failed ones, and the job that it launches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlhfless.scripts.common import console, fail, in_sweep, reason
from rlhfless.scripts.sweep_cells import (
    ELSEWHERE,
    FAILURE,
    RUN,
    cell_name,
    clear_drafts,
    description,
    is_finished,
    publish,
    read_run,
    to_yaml,
    write_run,
)
from rlhfless.traces.errors import InputError

#: Libraries that would start a thread a core; in a sweep the cells keep the cores busy.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS")


@dataclass(frozen=True)
class Run:
    """What a run gives: its files by name, and the lines to print of it, the last of them saying most.

    ``scores`` are what a search can minimise.
    """

    contents: Mapping[str, str | bytes]
    lines: tuple[str, ...]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """A run of a sweep that failed, with the line that says why."""

    cell: str
    error: str


@dataclass(frozen=True)
class Job:
    """The function that Hydra runs, once for each configuration."""

    verb: str
    task: Callable[[DictConfig], Run | None]
    directory: str

    def __call__(self, config: DictConfig) -> Any:
        """Check the configuration and run it; in a sweep a failure is returned, otherwise it ends the command."""
        # A worker on its way from another process or machine: relative paths and own classes are found again.
        with contextlib.suppress(OSError):
            os.chdir(self.directory)
        if self.directory not in sys.path:
            sys.path.append(self.directory)
        if in_sweep():
            return self._cell(config)
        try:
            check(self.verb, config)
            run = self.task(config)
            if run is not None:
                self._single(config, run)
        except InputError as error:
            # An error that leaves a job, Hydra announces in lines of its own.
            fail(str(error))
        return None

    def _single(self, config: DictConfig, run: Run) -> None:
        for line in run.lines:
            _say(line)
        if config.out is None:
            return
        folder = Path(config.out)
        told = description(self.verb, config, list(HydraConfig.get().overrides.task))
        write_run(folder, {RUN: to_yaml(told), **run.contents})
        _say(f"written: {', '.join(str(folder / name) for name in (RUN, *run.contents))}")

    def _cell(self, config: DictConfig) -> Any:
        overrides = list(HydraConfig.get().overrides.task)
        cell = " ".join(override.removeprefix("++") for override in overrides)
        folder = None
        try:
            told = description(self.verb, config, overrides)
            if self.verb in CELL_VERBS:
                folder = Path(HydraConfig.get().sweep.dir, cell_name(told))
                if is_finished(folder, told["key"]):
                    scores = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["mean"]
                    return objective(config, scores)
            check(self.verb, config)
            run = self.task(config)
            if run is None or folder is None:
                return None
            publish(folder, {RUN: to_yaml(told), **run.contents})
            _say(f"{folder.name}: {run.lines[-1]}")
            return objective(config, run.scores)
        except Exception as error:
            # A user's policy may raise anything; the sweep goes on and the cell says what happened.
            line = refusal(error)
            if folder is not None:
                failure = {"error": line, **told}
                if not isinstance(error, InputError):
                    failure["traceback"] = traceback.format_exc()
                publish(folder, {FAILURE: json.dumps(failure, indent=2, default=str) + "\n"})
            return Failed(cell if folder is None else f"{folder.name} ({cell})", line)


def _say(line: str) -> None:
    console().print(line, highlight=False, markup=False, soft_wrap=True)


def refusal(error: BaseException) -> str:
    """Return the one line of an error, with its kind where it is not one of input."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return reason(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def objective(config: DictConfig, scores: Mapping[str, float]) -> Any:
    """Return the scores that a search minimises: one number, several, or none."""
    chosen = config.get("optimize")
    if chosen is None:
        return None
    if isinstance(chosen, str):
        return scores[chosen]
    return tuple(scores[name] for name in chosen)


def check(verb: str, config: DictConfig) -> None:
    """Check keys and values of a configuration, and that its parts can be built.

    Raises
    ------
    InputError
        One line that names the wrong part and the right ones.

    """
    from rlhfless.scripts import schema
    from rlhfless.scripts.workload import build_cluster, build_policy, build_profile, build_setting

    try:
        schema.check(verb, config)
        if "policy" in config and config.get("plans") is None:
            build_policy(config.policy, "policy")
        if "cluster" in config and config.get("trace", {}).get("_target_") != "log":
            build_setting(config, build_profile(config), build_cluster(config))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(reason(error)) from None


#: Verbs of which every run of a sweep is a cell.
CELL_VERBS = ("replay",)


def prepare(verb: str, arguments: Sequence[str], recorded: str | None) -> tuple[str, list[str]]:
    """Tell Hydra of this package's sweeper and launcher; return the configuration's name and the arguments.

    Values are given as ``++key=value``, which Hydra takes whatever the key: that keys exist is checked once, for all
    parts of a configuration, by :func:`check`.
    """
    from rlhfless.scripts.sweep_ray import RayLauncher

    # Hydra takes plugins of the namespace hydra_plugins only and looks for them in folders of that name, which an
    # editable install does not have; so they are registered under such a name.
    for plugin in (CellSweeper, RayLauncher):
        Plugins.instance().class_name_to_class[f"hydra_plugins.rlhfless.{plugin.__name__}"] = plugin
    groups = {item.name for item in files("rlhfless.conf").iterdir() if item.is_dir()}
    given = [_forced(argument, groups) for argument in arguments]
    if is_multirun(given):
        # Hydra's parser takes overrides on one side of its flags only.
        given = ["--multirun", *(a for a in given if not is_multirun([a]))]
        given = [f"hydra.sweep.dir={a.split('=', 1)[1]}" if a.startswith("++out=") else a for a in given]
    if recorded is None:
        return verb, given
    ConfigStore.instance().store(name="recorded", node=_recorded(verb, Path(recorded)), provider="rlhfless")
    return "recorded", given


def is_multirun(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for a sweep."""
    return any(argument in ("-m", "--multirun") for argument in arguments)


def _forced(argument: str, groups: set[str]) -> str:
    key, equals, _ = argument.partition("=")
    plain_key = bool(equals) and key.replace(".", "").replace("_", "").isalnum()
    return f"++{argument}" if plain_key and key not in groups and key.split(".")[0] != "hydra" else argument


def _recorded(verb: str, path: Path) -> dict[str, Any]:
    """Return the configuration of a ``run.yaml`` as one that Hydra can start from."""
    run = read_run(path)
    if run["verb"] != verb:
        raise InputError(f"{path}: the run is one of {run['verb']}, not of {verb}")
    base = yaml.safe_load(files("rlhfless.conf").joinpath(f"{verb}.yaml").read_text(encoding="utf-8"))
    launching = [
        d for d in base["defaults"] if isinstance(d, dict) and next(iter(d)).startswith("override hydra/")
    ]
    return {
        "defaults": ["_self_", *launching],
        **run["config"],
        **{key: base[key] for key in ELSEWHERE if key in base},
        "hydra": base["hydra"],
    }


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Let this process's children use one thread each, unless the user's environment says otherwise."""
    added = {name: "1" for name in _THREADS if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class CellSweeper(Sweeper):
    """Runs every combination of the swept values, except those whose cell is finished.

    A cell that fails does not end the sweep. The command ends with status 1 when cells failed, and with status 2,
    nothing run, when no cell's configuration is right or a group has no such choice.
    """

    def __init__(self, max_batch_size: int | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.launcher: Launcher
        self.config: DictConfig
        self.context: HydraContext
        self.verb = ""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives a sweeper."""
        self.config, self.context = config, hydra_context
        assert isinstance(task_function, Job)
        self.verb = task_function.verb
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep of the overrides."""
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        overrides = parser.parse_overrides(arguments)
        for override in overrides:
            self._check_choice(override)
        jobs = combinations(overrides)
        composer = Composer(self.context, self.config, parser)
        self._check(jobs, composer)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        clear_drafts(folder)
        missing = self._missing(jobs, composer, folder)
        failed = self._launch(missing)
        if self.verb in CELL_VERBS:
            told = f"{len(missing) - len(failed)} computed, {len(jobs) - len(missing)} finished before"
            _say(f"sweep {folder}: {len(jobs)} cells, {told}, {len(failed)} failed")
        if failed:
            for failure in failed:
                print(f"rlhfless: failed: {failure.cell}: {' '.join(failure.error.split())}", file=sys.stderr)
            raise SystemExit(1)

    def _check_choice(self, override: Override) -> None:
        """Refuse a choice that a group of configurations does not have."""
        group = override.key_or_group
        options = self.context.config_loader.get_group_options(group)
        swept = override.is_sweep_override() and override.is_discrete_sweep()
        for name in (override.sweep_iterator() if swept else [override.value()]) if options else []:
            if isinstance(name, str) and name not in options:
                raise MissingConfigException("", f"{group}/{name}", options)

    def _check(self, jobs: Sequence[Sequence[str]], composer: Composer) -> None:
        """Refuse a sweep of which no configuration is right."""
        refused: InputError | None = None
        for job in jobs:
            try:
                check(self.verb, composer(job))
                return
            except InputError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _missing(self, jobs: Sequence[list[str]], composer: Composer, folder: Path) -> list[list[str]]:
        if self.verb not in CELL_VERBS or not any(folder.glob(f"*/{RUN}")):
            return list(jobs)
        missing = []
        for job in jobs:
            try:
                told = description(self.verb, composer(job), job)
            except OmegaConfBaseException:  # its job will say so
                missing.append(job)
                continue
            if not is_finished(folder / cell_name(told), told["key"]):
                missing.append(job)
        return missing

    def _launch(self, jobs: Sequence[list[str]]) -> list[Failed]:
        size = self.max_batch_size
        if size is None and type(self.launcher).__name__ == "LocalLauncher":
            size = os.cpu_count()  # submitit's local executor starts a process for every job at once
        failed: list[Failed] = []
        for start in range(0, len(jobs), size or max(len(jobs), 1)):
            batch = jobs[start : start + (size or len(jobs))]
            try:
                results: Sequence[JobReturn] = self.launcher.launch(batch, initial_job_idx=start)
            except InputError:
                raise
            except Exception as error:
                # A worker that was killed takes the launcher with it; what has finished is kept.
                fail(f"the launcher stopped: {refusal(error)}; the same command again goes on", status=1)
            for job, result in zip(batch, results, strict=True):
                if result.status != JobStatus.COMPLETED:
                    failed.append(Failed(" ".join(job), refusal(result._return_value)))
                elif isinstance(result.return_value, Failed):
                    failed.append(result.return_value)
        return failed


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of every job: the product of the swept values, the last of them changing fastest.

    Raises
    ------
    HydraException
        For a sweep over an interval, which only a search can do.

    """
    values: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}" if "~" not in key else key]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise HydraException(f"{key}: an interval needs a search: hydra/sweeper=optuna")
    return [list(job) for job in itertools.product(*values.values())]


class Composer:
    """Composes the configurations of a sweep's jobs, much faster than one by one.

    Configurations of one choice of groups differ in single values only: they are composed once for each choice.
    """

    def __init__(self, context: HydraContext, master: DictConfig, parser: OverridesParser) -> None:
        self.loader, self.master, self.parser = context.config_loader, master, parser
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, job: Sequence[str]) -> DictConfig:
        """Return the configuration of a job, without Hydra's own part."""
        single, rest = self._split(job)
        config = deepcopy(self._base(rest))
        with open_dict(config):
            for override in single:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
        return config

    def _split(self, job: Sequence[str]) -> tuple[list[Override], tuple[str, ...]]:
        overrides = self.parser.parse_overrides(list(job))
        single = [o for o in overrides if o.type == OverrideType.FORCE_ADD]
        return single, tuple(o.input_line or "" for o in overrides if o.type != OverrideType.FORCE_ADD)

    def _base(self, rest: tuple[str, ...]) -> DictConfig:
        if rest not in self.composed:
            config = self.loader.load_sweep_config(self.master, list(rest))
            with open_dict(config):
                del config["hydra"]
            self.composed[rest] = config
        return self.composed[rest]
