"""Reads what replays, sweeps and comparisons wrote: the one place that knows how results lie in folders.

A *cell* is one policy on one workload with one seed. A replay writes one a folder (``run.yaml`` with its
configuration beside ``summary.json``, ``steps.csv``, ...), a sweep a folder of such folders, a comparison
one folder with all policies and seeds. A cell that failed left ``failure.json``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhfless.models.scores import STEP_COLUMNS, RunScores
from rlhfless.scripts.timeline import RunTimeline, read_trace_events
from rlhfless.traces.errors import InputError, first_problem

#: A configured value; lists and the like are written out as JSON.
Value = str | int | float | bool | None

#: Keys that name a file of ``conf/``: a cell is told by the names, and by single keys where those say more.
GROUPS = ("policy", "trace", "profile", "cluster")

#: Keys of a configuration that say nothing of what a cell computes.
_NO_FACTOR = {"seed", "seeds", "out", "hydra", "optimize"}

_TARGET = "_target_"
# The parser in C reads a cell's configuration ten times faster, where it is there.
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Cell:
    """One policy on one workload with one seed.

    ``settings`` maps each of ``GROUPS`` to its name and every other key of the configuration, dotted, to its
    value. ``scores`` are the means over the steps, ``code`` says which version of the package, and which code,
    computed them.
    """

    folder: Path
    seed: int
    settings: dict[str, Value] = field(repr=False)
    scores: RunScores = field(repr=False)
    nodes: int
    usd_per_gpu_hour: float | None
    planning_seconds: float | None
    code: str | None
    steps: pl.DataFrame = field(repr=False)

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return str(self.settings["policy"])

    def details(self) -> pl.DataFrame | None:
        """Return a row a step (``records.detail_rows``), or None where the run wrote none."""
        return self._table("details.csv")

    def actors(self) -> pl.DataFrame | None:
        """Return a row an actor and step (``records.actor_rows``), or None where the run wrote none."""
        return self._table("actors.csv")

    def lengths(self) -> pl.DataFrame | None:
        """Return the histogram of each epoch (``records.length_rows``), or None where the run wrote none."""
        return self._table("lengths.csv")

    def timeline(self) -> RunTimeline | None:
        """Return who ran where, or None where the run wrote no timeline."""
        path = self.folder / "timeline.json"
        return read_trace_events(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None

    def _table(self, name: str) -> pl.DataFrame | None:
        path = self.folder / name
        return _read_csv(path) if path.is_file() else None


@dataclass(frozen=True)
class Failure:
    """A cell that failed, with what it said."""

    folder: Path
    seed: int
    settings: dict[str, Value] = field(repr=False)
    error: str


@dataclass(frozen=True)
class Sweep:
    """Cells and failures in an order that depends on nothing but what they are.

    ``factors`` are the names of ``GROUPS`` and the configuration's keys in which the cells differ. ``outdated``
    counts results that a newer one of the same configuration, from other code, took the place of.
    """

    cells: tuple[Cell, ...]
    failures: tuple[Failure, ...]
    factors: tuple[str, ...]
    outdated: int = 0


_Model = TypeVar("_Model", bound=BaseModel)


class _Run(BaseModel):
    model_config = ConfigDict(extra="ignore")

    config: dict[str, Any]
    version: str | None = None
    code: str = ""
    policies_code: dict[str, str] = {}

    @property
    def made_by(self) -> str | None:
        """The package's version, and what tells its code and that of other policies."""
        digests = [self.code, *(f"{name} {digest}" for name, digest in sorted(self.policies_code.items()))]
        told = ", ".join(filter(None, digests))
        return f"{self.version} ({told})" if told else self.version


class _Failure(BaseModel):
    model_config = ConfigDict(extra="ignore")

    error: str
    config: dict[str, Any] = {}


class _Cluster(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    nodes: int


class _Summary(BaseModel):
    """What replay and compare both write; a replay adds the rest."""

    model_config = ConfigDict(extra="ignore")

    workload: str
    profile: str
    cluster: _Cluster
    policy: str | None = None
    seed: int = 0
    steps: int = 0
    mean: dict[str, float] = {}
    gpu_seconds_by_function: dict[str, float] = {}


def read_results(paths: Sequence[str | Path]) -> Sweep:
    """Read all cells in and below the given folders; hidden folders (drafts of a run) are passed over.

    A cell that is found twice counts once; where changed code gave it different results, the newest file counts. A
    failure counts where the cell has no result.

    Raises
    ------
    InputError
        When a folder does not exist or holds no results, when a file breaks the format, or when the same code
        gave the same cell two results that differ.

    """
    cells: list[Cell] = []
    failures: list[Failure] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise InputError(f"{path}: no such folder")
        before = len(cells) + len(failures)
        for file in _found(path, "summary.json"):
            cells += _cells(file)
        failures += [_failure(file) for file in _found(path, "failure.json")]
        if len(cells) + len(failures) == before:
            raise InputError(
                f"{path}: no results here: no summary.json of a replay, a sweep or a comparison, and no failure.json"
            )
    once, outdated = _once(cells)
    failures = [f for f in failures if (f.seed, _key(f.settings)) not in once]
    factors = _factors([c.settings for c in once.values()] + [f.settings for f in failures])

    def order(cell: Cell | Failure) -> tuple[Any, ...]:
        return (*(order_of(cell.settings.get(name)) for name in factors), cell.seed)

    unique = {(f.seed, _key(f.settings)): f for f in failures}
    return Sweep(
        cells=tuple(sorted(once.values(), key=order)),
        failures=tuple(sorted(unique.values(), key=order)),
        factors=factors,
        outdated=outdated,
    )


def order_of(value: Value) -> tuple[int, float, str]:
    """Return a key that orders values of any kind: none, numbers by size, then text."""
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, str):
        return (2, 0.0, value)
    return (1, float(value), "")


def _found(folder: Path, name: str) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob(name)
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _cells(file: Path) -> Iterator[Cell]:
    """Read the cell of a replay's folder, or all cells of a comparison's."""
    folder = file.parent
    values = _read_json(file)
    summary = _parsed(_Summary, values, file)
    run = _run(folder)
    steps = _read_csv(folder / "steps.csv")
    planning = _planning(folder)
    common: dict[str, Any] = {
        "folder": folder,
        "nodes": summary.cluster.nodes,
        "usd_per_gpu_hour": _usd(run, values),
        "code": None if run is None else run.made_by,
    }
    if summary.policy is not None:
        scores = RunScores(summary.policy, summary.steps, summary.mean, summary.gpu_seconds_by_function)
        yield Cell(
            seed=summary.seed,
            settings=_settings(summary, summary.policy, run),
            scores=scores,
            planning_seconds=planning.get("planning_seconds_median"),
            steps=steps,
            **common,
        )
        return
    if not {"policy", "seed"} <= set(steps.columns):
        raise InputError(
            f"{folder / 'steps.csv'}: no columns policy and seed, and summary.json names no policy"
        )
    for (policy, seed), own in steps.group_by("policy", "seed", maintain_order=True):
        means = {name: float(own[name].mean()) for name in STEP_COLUMNS[2:] if name in own.columns}  # type: ignore[arg-type]
        yield Cell(
            seed=int(seed),
            settings=_settings(summary, str(policy), _compared(run, str(policy))),
            scores=RunScores(str(policy), len(own), means, {}),
            planning_seconds=planning.get(str(policy), {}).get("planning_seconds_median"),
            steps=own.drop("policy", "seed"),
            **common,
        )


def _compared(run: _Run | None, policy: str) -> _Run | None:
    """Return a comparison's configuration as that of one of its policies."""
    if run is None:
        return None
    config = {
        key: value for key, value in run.config.items() if key not in ("policies", "select", "baselines")
    }
    policies = [p for p in (run.config.get("policies") or {}).values() if _name(p) == policy]
    return run.model_copy(update={"config": {**config, "policy": policies[0] if policies else {}}})


def _failure(file: Path) -> Failure:
    values = _read_json(file)
    failure = _parsed(_Failure, values, file)
    run = _run(file.parent)
    config = failure.config or ({} if run is None else run.config)
    names = {group: _name(config.get(group)) for group in GROUPS}
    return Failure(
        file.parent, int(config.get("seed") or 0), {**names, **_flat(config)}, " ".join(failure.error.split())
    )


def _name(node: Any) -> str:
    values = node if isinstance(node, Mapping) else {}
    return str(values.get("name") or str(values.get(_TARGET, "?")).rsplit(".", 1)[-1])


def _settings(summary: _Summary, policy: str, run: _Run | None) -> dict[str, Value]:
    names = {
        "policy": policy,
        "trace": summary.workload,
        "profile": summary.profile,
        "cluster": summary.cluster.name,
    }
    return {**names, **({} if run is None else _flat(run.config))}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return the leaves of a configuration by their dotted key, without what does not matter for a result."""
    flat: dict[str, Value] = {}
    for key, value in config.items():
        if not prefix and key in _NO_FACTOR:
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, Value) else json.dumps(value, sort_keys=True)
    # A group that is no mapping (null) would stand in the place of its name.
    return {key: value for key, value in flat.items() if key not in GROUPS}


def _factors(settings: Sequence[Mapping[str, Value]]) -> tuple[str, ...]:
    """Return the keys in which cells differ, names of groups first.

    A key within a group says something where cells of the same group name, and the same classes around the
    key, have different values; the rest follows from the name.
    """
    varying = [name for name in GROUPS if len({s.get(name) for s in settings}) > 1]
    # Results without a configuration say nothing of its keys.
    settings = [s for s in settings if len(s) > len(GROUPS)]
    for key in sorted({key for s in settings for key in s} - set(GROUPS)):
        parts = key.split(".")
        around = [".".join((*parts[:n], _TARGET)) for n in range(1, len(parts) - (parts[-1] == _TARGET))]
        context = [parts[0] if parts[0] in GROUPS else "", *around]
        values: dict[tuple[Value, ...], set[Value]] = defaultdict(set)
        for s in settings:
            values[tuple(s.get(name) for name in context)].add(s.get(key))
        if any(len(found) > 1 for found in values.values()):
            varying.append(key)
    return tuple(varying)


def _once(cells: Iterable[Cell]) -> tuple[dict[tuple[int, str], Cell], int]:
    """Return the cells by what they are, and how many older results of other code were left out."""
    once: dict[tuple[int, str], Cell] = {}
    outdated = 0
    for cell in cells:
        key = (cell.seed, _key(cell.settings))
        other = once.setdefault(key, cell)
        if other.scores == cell.scores:
            continue
        if other.code == cell.code:
            raise InputError(
                f"{other.folder} and {cell.folder}: policy {cell.policy}, seed {cell.seed}: the same configuration "
                f"with different results; leave out one of the folders"
            )
        outdated += 1
        once[key] = max(other, cell, key=_written)
    return once, outdated


def _written(cell: Cell) -> int:
    return (cell.folder / "summary.json").stat().st_mtime_ns


def _key(settings: Mapping[str, Value]) -> str:
    return json.dumps(settings, sort_keys=True)


def _usd(run: _Run | None, summary: Mapping[str, Any]) -> float | None:
    """Return the price of a GPU hour; a profile that was fitted to a log does not say on which GPUs."""
    profile = None if run is None else run.config.get("profile")
    price = profile.get("usd_per_gpu_hour") if isinstance(profile, Mapping) else None
    if (
        not isinstance(price, int | float)
        or not math.isfinite(price)
        or summary.get("profile_kind") == "fitted"
    ):
        return None
    return float(price) or None


def _planning(folder: Path) -> dict[str, Any]:
    path = folder / "timings.json"
    return _read_json(path) if path.is_file() else {}


def _run(folder: Path) -> _Run | None:
    path = folder / "run.yaml"
    if not path.is_file():
        return None
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_YAML)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    return _parsed(_Run, values, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must be a JSON object, is {type(values).__name__}")
    return values


def _parsed(model: type[_Model], values: Any, path: Path) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error)}") from None


def _read_csv(path: Path) -> pl.DataFrame:
    try:
        return pl.read_csv(path, infer_schema_length=None)
    except OSError:
        raise InputError(f"{path}: missing, though summary.json beside it is there") from None
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: no table: {' '.join(str(error).split())}") from None
