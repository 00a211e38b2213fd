"""What the verbs share: running a Hydra app with one-line errors, progress bars, writing files whole."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhfless.traces.errors import InputError


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line to standard error and exit: with status 2, which says that the input was bad, or another."""
    print(f"rlhfless: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(status)


def guarded(function: Callable[[], None]) -> None:
    """Run a verb; bad input becomes one line and exit status 2."""
    try:
        function()
    except InputError as error:
        fail(str(error))
    except MissingConfigException as error:
        fail(missing_choice(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(reason(error))
    except KeyboardInterrupt:
        fail("interrupted", status=130)
    except BrokenPipeError:
        # The reader (head, less) has gone; let Python's exit not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def reason(error: BaseException) -> str:
    """Return what an error says, with the cause that Hydra hides behind "Error in call to target"."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: needs a value"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return str(cause)
        cause = cause.__cause__
    return "; ".join(line.strip(" ;") for line in str(error).splitlines() if line.strip())


def missing_choice(error: MissingConfigException) -> str:
    """Say in one line which choice of a configuration group does not exist, and which do."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    if not group:
        return reason(error)
    return f"{group} {name} does not exist{close_to(name, options)}; {group} is one of {', '.join(options)}"


def close_to(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is nearest to a wrong one, where one is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def hydra_verb(
    verb: str, task: Callable[[DictConfig], Any], arguments: Sequence[str], recorded: str | None = None
) -> None:
    """Run a verb as a Hydra app with the configuration ``conf/<verb>.yaml`` and the given arguments.

    ``recorded`` is a ``run.yaml`` whose configuration takes the place of the verb's own. A ``task`` that returns a
    :class:`rlhfless.scripts.sweep.Run` leaves writing to the caller, which keeps runs whole and sweeps resumable.
    """
    from rlhfless.scripts.sweep import Job, is_multirun, prepare, single_threaded

    # Hydra then raises its errors instead of printing them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # A class of the user's own is found in the folder in which the command runs.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    program = sys.argv

    def app() -> None:
        name, given = prepare(verb, arguments, recorded)
        sys.argv = [program[0], *given]
        job = Job(verb, task, os.getcwd())
        with single_threaded() if is_multirun(given) else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path="pkg://rlhfless.conf", config_name=name)(job)()

    try:
        guarded(app)
    finally:
        sys.argv = program


def in_sweep() -> bool:
    """Return whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def output_folder(config: DictConfig) -> Path | None:
    """Return where this job writes: its own folder in a multirun, else the option ``out``, else nowhere."""
    if in_sweep():
        return Path(HydraConfig.get().runtime.output_dir)
    return None if config.out is None else Path(config.out)


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files into a folder, text as UTF-8; each appears whole or not at all.

    Raises
    ------
    InputError
        When the folder cannot be written to.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as draft:
            for name, content in contents.items():
                Path(draft, name).write_bytes(content.encode() if isinstance(content, str) else content)
            for name in contents:
                os.replace(Path(draft, name), folder / name)
    except OSError as error:
        raise InputError(f"{folder}: cannot write: {error.strerror or error}") from None


def console() -> Console:
    """Return a console for standard output; wide where it is not a terminal, so that tables stay whole."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def progress(total: int, what: str) -> Progress:
    """Return a progress bar on standard error, shown on a terminal only, and not by the jobs of a sweep."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=in_sweep() or not sys.stderr.isatty(),
    )
    bar.add_task(what, total=total)
    return bar


def advance(bar: Progress) -> None:
    """Move a bar made by :func:`progress` by one."""
    bar.advance(bar.task_ids[0])
