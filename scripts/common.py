"""What the verbs share: running a Hydra app with one-line errors, progress bars, writing files whole."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlhfless.traces.errors import InputError


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with status 2."""
    print(f"rlhfless: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def guarded(function: Callable[[], None]) -> None:
    """Run a verb; bad input becomes one line and exit status 2."""
    try:
        function()
    except InputError as error:
        fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(_reason(error))
    except BrokenPipeError:
        # The reader (head, less) has gone; let Python's exit not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reason(error: BaseException) -> str:
    """Return what an error says, with the cause that Hydra hides behind "Error in call to target"."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InputError):
            return str(cause)
        cause = cause.__cause__
    return "; ".join(line.strip(" ;") for line in str(error).splitlines() if line.strip())


def hydra_verb(config: str, task: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    """Run ``task`` as a Hydra app with the configuration ``conf/<config>.yaml`` and the given arguments.

    Bad input that the task finds ends the command inside the job: an error that leaves a job, Hydra announces in
    lines of its own.
    """

    @functools.wraps(task)
    def refusing(config: DictConfig) -> None:
        try:
            task(config)
        except InputError as error:
            fail(str(error))

    # Hydra then raises its errors instead of printing them over many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    app = hydra.main(version_base="1.3", config_path="pkg://rlhfless.conf", config_name=config)(refusing)
    # A class of the user's own is found in the folder in which the command runs.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    program = sys.argv
    sys.argv = [program[0], *arguments]
    try:
        guarded(app)
    finally:
        sys.argv = program


def output_folder(config: DictConfig) -> Path | None:
    """Return where this job writes: its own folder in a multirun, else the option ``out``, else nowhere."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
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
    """Return a progress bar on standard error, shown on a terminal only."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    bar.add_task(what, total=total)
    return bar


def advance(bar: Progress) -> None:
    """Move a bar made by :func:`progress` by one."""
    bar.advance(bar.task_ids[0])
