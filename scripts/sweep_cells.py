"""Cells of a sweep: one run, its key, and its folder, which appears whole or not at all.

A cell's folder holds ``run.yaml`` (what was run: enough to run it again) beside its results, or ``failure.json``
where it failed. Its key is a hash of everything that its results depend on: the resolved configuration, the
content of the files that it names, the package's version and code, and the code of policies from elsewhere. A
run writes into a hidden draft beside the folder and renames the draft, so that one that is killed leaves the
whole cell or none.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from rlhfless.scripts.common import write_files
from rlhfless.traces.errors import InputError

#: The file that marks a cell as whole, and the one of a cell that failed.
RUN, FAILURE = "run.yaml", "failure.json"

#: Keys of a configuration that results do not depend on.
ELSEWHERE = ("out", "optimize")

_DRAFT = ".rlhfless-draft-"
_ROOMS = ("traces", "models", "policies", "solver", "scripts")
_LIBRARIES = ("numpy", "scipy", "numba", "ortools")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def description(verb: str, config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what ``run.yaml`` says of a run.

    ``overrides`` are kept for the reader; the key depends on what they made of the configuration alone.
    """
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    resolved = {str(key): value for key, value in values.items() if key not in ELSEWHERE}
    identity = {
        "version": metadata.version("rlhfless"),
        "code": package_digest(),
        "verb": verb,
        "config": resolved,
        "files": _files(resolved),
        "policies_code": _foreign_code(resolved),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "key": key,
        "version": identity["version"],
        "code": identity["code"],
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "verb": verb,
        "seed": resolved.get("seed"),
        "overrides": [override.removeprefix("++") for override in overrides],
        "files": identity["files"],
        "policies_code": identity["policies_code"],
        "config": resolved,
    }


@lru_cache(maxsize=1)
def package_digest() -> str:
    """Return a digest of the package's own code, so that a changed policy never takes an old result."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        spec = importlib.util.find_spec(f"rlhfless.{room}")
        if spec is not None and spec.origin is not None:
            _add_code(digest, Path(spec.origin).parent)
    return digest.hexdigest()[:16]


def _add_code(digest: Any, folder: Path) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json") and p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())


def _leaves(node: Any) -> Iterator[tuple[str | None, str]]:
    """Yield every text of a configuration with the key that it stands under."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(value, str):
                yield str(key), value
            else:
                yield from _leaves(value)
    elif isinstance(node, list):
        for value in node:
            if isinstance(value, str):
                yield None, value
            else:
                yield from _leaves(value)


def _files(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every file that a configuration names."""
    found = {}
    for _, text in _leaves(config):
        if 0 < len(text) < 4096 and "\n" not in text and "\0" not in text and os.path.isfile(text):
            found[text] = hashlib.sha256(Path(text).read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def _foreign_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of the module or package of every target that is not of this package."""
    found = {}
    for key, text in _leaves(config):
        top = text.split(".")[0]
        if key != "_target_" or top == "rlhfless" or not top.isidentifier():
            continue
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            continue
        digest = hashlib.sha256()
        if spec.submodule_search_locations is None:
            digest.update(Path(spec.origin).read_bytes())
        else:
            _add_code(digest, Path(spec.origin).parent)
        found[top] = digest.hexdigest()[:16]
    return dict(sorted(found.items()))


def cell_name(run: Mapping[str, Any]) -> str:
    """Return the name of a cell's folder: what it runs, for the reader, and the start of its key."""
    config = run["config"]
    policy, trace = config.get("policy") or {}, config.get("trace") or {}
    told = [
        "recorded"
        if config.get("plans")
        else str(policy.get("name") or policy.get("_target_", "")).split(".")[-1],
        str(trace.get("name") or Path(str(trace.get("path", ""))).stem),
        f"seed{run['seed']}",
        str(run["key"])[:16],
    ]
    return "-".join(re.sub(r"[^\w.+]+", "_", part)[:40] for part in told if part)


def read_run(path: Path) -> dict[str, Any]:
    """Read a ``run.yaml``.

    Raises
    ------
    InputError
        When it cannot be read or says nothing of a run.

    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not {"key", "verb", "config"} <= set(values):
        raise InputError(f"{path}: a run says key, verb and config")
    return values


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, its keys in the order given."""
    return str(yaml.dump(dict(values), Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=110))


def is_finished(folder: Path, key: str) -> bool:
    """Return whether a folder holds the whole cell of a key."""
    return (folder / RUN).is_file() and read_run(folder / RUN)["key"] == key


def publish(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write a folder that appears whole or not at all, in place of what was there.

    A folder of the same run that another process has finished in the meantime stays.

    Raises
    ------
    InputError
        When the folder cannot be written.

    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_drafts(folder.parent)
        draft, lock = _locked_draft(folder.parent)
        try:
            for name, content in contents.items():
                _write_synced(draft / name, content.encode() if isinstance(content, str) else content)
            _sync(draft)
            _rename(draft, folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise InputError(f"{folder}: cannot write: {error.strerror or error}") from None


def write_run(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write a run into the user's own folder: whole, and beside whatever else lies there.

    A folder that holds nothing but a run is replaced as a whole. In another one the run's files are replaced one by
    one, and ``run.yaml``, which marks the run as whole, goes first and comes back last.
    """
    folder = folder.resolve()
    others = (
        {path.name for path in folder.iterdir()} - {*contents, RUN, FAILURE} if folder.is_dir() else set()
    )
    if not others and folder not in (here := Path.cwd(), *here.parents):
        publish(folder, contents)
        return
    (folder / RUN).unlink(missing_ok=True)
    (folder / FAILURE).unlink(missing_ok=True)
    write_files(folder, {name: contents[name] for name in sorted(contents, key=lambda name: name == RUN)})


def _rename(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)  # replaces an empty folder, too
        return
    except OSError:
        if not folder.is_dir():
            raise
    if _same_run(folder, draft):
        return
    aside, lock = _locked_draft(folder.parent)
    try:
        os.rename(folder, aside / folder.name)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _same_run(folder: Path, draft: Path) -> bool:
    both = (folder / RUN, draft / RUN)
    return all(path.is_file() for path in both) and both[0].read_bytes() == both[1].read_bytes()


def _locked_draft(parent: Path) -> tuple[Path, int]:
    """Make a draft and lock it; the lock ends with the process, and says that the draft is in use until then."""
    while True:
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=parent))
        draft.chmod(0o777 & ~_umask())
        lock = os.open(draft, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if draft.is_dir():
            return draft, lock
        os.close(lock)  # cleared away between its making and its lock


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_drafts(parent: Path) -> None:
    """Remove what killed runs left in a folder; drafts that a living process writes stay."""
    for draft in parent.glob(f"{_DRAFT}*"):
        try:
            lock = os.open(draft, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(draft, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
