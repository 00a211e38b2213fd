"""Importer of verl console logs: the lines ``step:N - key:value - key:value ...`` of a training run.

verl prints one such line a step with statistics of the lengths (mean, max, min, share at the cap) and the
seconds of each stage; no single response is logged. Read are plain and gzipped logs, with or without
terminal colours and Ray's ``(TaskRunner pid=1)`` prefixes, with the keys of old versions (``timing/gen``)
and of new ones (``timing_s/gen``), and values printed as numpy scalars (``np.float64(1.5)``).

A line that carries only validation scores is skipped, lines of other kinds are ignored, and a step line that
was cut is refused. Four signs tell a cut line: a last entry without a value; a last number that is not
written like the line's others; a training line without its response lengths; and an end before the keys
with which most other training lines go on (a stage that a step leaves out is missing in the middle of its
line, a cut line misses everything from some key on).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from rlhfless.traces.errors import InputError
from rlhfless.traces.files import read_bytes, stem
from rlhfless.traces.trace import FloatArray, RunLog

#: verl's stage names that differ from the toolkit's.
STAGE_NAMES = {"gen": "generation", "ref": "reference", "values": "value"}

#: Statistics without which a training line cannot be used.
REQUIRED_KEYS = ("response_length/mean", "response_length/max", "response_length/min")

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\s*(?:\([^()]*pid=[^()]*\)\s*)*")
_STEP = re.compile(r"^step:(\d+)(?:\s+-\s+|\s*-?\s*$)")
_HEADLESS = re.compile(r"(?:^|\s)(?:response_length|prompt_length|timing_s|timing|perf)/\w+:\S+\s+-\s+\S+:\S")
_NUMPY = re.compile(r"^(?:np|numpy)\.\w+\((.*)\)$")
_NUMBER = re.compile(r"^[+-]?(?:\d+(?:\.(\d+))?(?:[eE][+-]?\d+)?|nan|inf)$")
_STAGE = re.compile(r"^timing(?:_s)?/(\w+)$")


@dataclass(frozen=True)
class _Line:
    """One training line: its place in the file, its step, and its values in the order they stand."""

    number: int
    step: int
    values: dict[str, float]


def read_verl_log(path: str | os.PathLike[str]) -> RunLog:
    """Read a verl console log, plain or ``.gz``.

    ``gpus`` follows from verl's throughput (tokens per second and GPU) where every step gives the same
    number, ``responses`` from the total tokens and the mean lengths likewise; otherwise they are None. The
    stage ``step`` contains ``testing`` and ``save_checkpoint`` where a step has them.

    Raises
    ------
    InputError
        With file, line and reason: a step line that was cut, a step logged twice, a value that is no number,
        a gzip file that ends early, a file without a training step.

    """
    path = Path(path)
    text = read_bytes(path).decode("utf-8", errors="replace")
    lines = list(_training_lines(path, text))
    if not lines:
        raise InputError(f"{path}: no training step is logged (no line step:N - key:value - ...)")
    _refuse_early_ends(path, lines)
    lines.sort(key=lambda line: line.step)
    for one, next_one in pairwise(lines):
        if one.step == next_one.step:
            raise InputError(
                f"{path}: lines {one.number} and {next_one.number}: step {one.step} is logged twice"
            )

    def column(key: str) -> FloatArray:
        return np.array([line.values.get(key, np.nan) for line in lines])

    epoch = column("training/epoch")
    stages = {
        STAGE_NAMES.get(match[1], match[1]): column(key)
        for key in dict.fromkeys(key for line in lines for key in line.values)
        if (match := _STAGE.match(key))
    }
    total, mean = column("perf/total_num_tokens"), column("response_length/mean")
    prompt_mean = column("prompt_length/mean")
    return RunLog(
        name=stem(path),
        source=f"verl console log {path.name}",
        step=np.array([line.step for line in lines], dtype=np.int64),
        epoch=np.where(np.isfinite(epoch), epoch, -1).astype(np.int64),
        response_mean=mean,
        response_max=column("response_length/max"),
        response_min=column("response_length/min"),
        clip_ratio=column("response_length/clip_ratio"),
        prompt_mean=prompt_mean,
        prompt_max=column("prompt_length/max"),
        prompt_min=column("prompt_length/min"),
        total_tokens=total,
        stages=stages,
        gpus=_constant(total, column("perf/time_per_step") * column("perf/throughput")),
        responses=_constant(total, mean + prompt_mean),
    )


def _training_lines(path: Path, text: str) -> Iterator[_Line]:
    for number, raw in enumerate(text.split("\n"), start=1):
        # A progress bar that shares the line ends in a carriage return.
        line = _PREFIX.sub("", _COLOUR.sub("", raw).rstrip("\r").rsplit("\r", 1)[-1]).rstrip()
        where = f"{path}: line {number}"
        match = _STEP.match(line)
        if match is None:
            if _HEADLESS.search(line):
                raise InputError(f"{where}: training values without their step:N (the line was cut)")
            continue
        step = int(match[1])
        where = f"{where}: step {step}"
        entries = line[match.end() :].split(" - ")
        if entries == [""]:
            raise InputError(f"{where}: the step has no values (the line was cut)")
        values = _parse(where, entries)
        if all(key.startswith("val") for key in values):
            continue
        for key in REQUIRED_KEYS:
            if not np.isfinite(values.get(key, np.nan)):
                raise InputError(
                    f"{where}: {key} is missing (the line was cut after {next(reversed(values))})"
                )
        if not any(_STAGE.match(key) for key in values):
            raise InputError(
                f"{where}: no stage has a time (the line was cut after {next(reversed(values))})"
            )
        yield _Line(number, step, values)


def _parse(where: str, entries: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    decimals: list[int] = []
    for entry in map(str.strip, entries):
        key, colon, text = entry.rpartition(":")
        if not colon or not text:
            raise InputError(f"{where}: {entry.rstrip(':')!r} has no value (the line was cut)")
        bare = _NUMPY.sub(r"\1", text)
        number = _NUMBER.match(bare)
        if number is None or re.search(r"[\s()]", key):
            raise InputError(f"{where}: {entry!r} is not key:number (the line was cut)")
        values[key] = float(bare)
        decimals.append(len(number[1] or ""))
    # verl prints every number of a line with the same decimals; then a last one with fewer lost its end.
    if len(decimals) > 2 and len(set(decimals[:-1])) == 1 and decimals[-1] < decimals[0]:
        raise InputError(f"{where}: {entries[-1].strip()!r} ends early (the line was cut)")
    return values


def _refuse_early_ends(path: Path, lines: Sequence[_Line]) -> None:
    """Refuse a line that stops where most of the others go on with keys that it lacks."""
    layouts = Counter(tuple(line.values) for line in lines)
    for line in lines:
        own = tuple(line.values)
        others = layouts - Counter([own])
        # The last key that others have too: a rare one (a validation's time) may stand behind it.
        last = next((key for key in reversed(own) if any(key in one for one in others)), own[-1])
        tails = Counter[tuple[str, ...]]()
        for one, count in others.items():
            if last in one:
                tails[one[one.index(last) + 1 :]] += count
        going_on = [tail for tail in tails if tail and not line.values.keys() & set(tail)]
        if 2 * sum(tails[tail] for tail in going_on) > tails.total():
            raise InputError(
                f"{path}: line {line.number}: step {line.step}: the line was cut after {own[-1]}; "
                f"other steps go on with {going_on[0][0]}"
            )


def _constant(total: FloatArray, unit: FloatArray) -> int | None:
    """Return the whole number that ``total / unit`` is in every step that states both, if there is one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = total / unit
    ratio = ratio[np.isfinite(ratio)]
    if not len(ratio):
        return None
    number = round(float(np.median(ratio)))
    return number if number >= 1 and bool(np.all(np.abs(ratio - number) < 0.01 * number)) else None
