"""Reading and writing traces and stage tables: Parquet, CSV and JSON Lines, the last two also gzipped.

The suffix of the path says the format: ``.parquet``, ``.csv``, ``.csv.gz``, ``.jsonl``, ``.jsonl.gz``. What
stands beside a trace's rows (name, algorithm, cap, ...) is kept in a Parquet file's own metadata, and for CSV
and JSON Lines in a second file ``<file>.meta.json``, which a reader may lack. A file is read whole or refused
with an :class:`~rlhfless.traces.errors.InputError`; rows count from 1, without a header. Columns that the
format does not know are ignored.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path

import numpy as np
import polars as pl
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from rlhfless.traces.errors import InputError, first_problem
from rlhfless.traces.trace import FloatArray, IntArray, PrefixBlocks, RunLog, Trace

#: Key of the trace's metadata in a Parquet file.
METADATA_KEY = "rlhfless.trace"

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz")

INT_LIST = pl.List(pl.Int64)
REQUIRED: Mapping[str, pl.DataType] = {
    "step": pl.Int64(),
    "epoch": pl.Int64(),
    "prompt_id": pl.String(),
    "sample": pl.Int64(),
    "prompt_tokens": pl.Int64(),
    "response_tokens": pl.Int64(),
}
OPTIONAL: Mapping[str, pl.DataType] = {
    "answer_tokens": pl.Int64(),
    "prefix_blocks": INT_LIST,
    "truncated": pl.Boolean(),
}
STAGE_COLUMNS: Mapping[str, pl.DataType] = {
    "step": pl.Int64(),
    "stage": pl.String(),
    "seconds": pl.Float64(),
    "gpus": pl.Int64(),
}


@validated(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class _Beside:
    """What stands beside a trace's rows; the field names are :class:`Trace`'s."""

    name: str = ""
    algorithm: str = "grpo"
    model: str = ""
    source: str = ""
    max_response_tokens: int | None = None
    block_tokens: int | None = None
    reconstructed: bool = False


@dataclass(frozen=True)
class StageTimes:
    """How long each stage of a real run took: one entry per step and stage, in seconds on ``gpus`` GPUs."""

    step: IntArray
    stage: tuple[str, ...]
    seconds: FloatArray
    gpus: IntArray

    @classmethod
    def of_log(cls, log: RunLog, gpus: int) -> StageTimes:
        """Return the stage times that a log states, by step and then by stage; ``gpus`` held all of them."""
        names = list(log.stages)
        seconds = np.array([log.stages[name] for name in names]).reshape(len(names), len(log.step)).T
        step, column = np.nonzero(np.isfinite(seconds))
        return cls(
            step=log.step[step],
            stage=tuple(names[i] for i in column),
            seconds=seconds[step, column],
            gpus=np.full(len(step), gpus, dtype=np.int64),
        )

    def checked(self, where: str) -> StageTimes:
        """Return the table itself if it keeps every rule of the format.

        Raises
        ------
        InputError
            Naming the first row that breaks a rule, and the rule.

        """
        if not len(self.step):
            raise InputError(f"{where}: the table has no rows")
        rules = {
            "step": (self.step, self.step < 0),
            "seconds": (self.seconds, ~(np.isfinite(self.seconds) & (self.seconds >= 0))),
            "gpus": (self.gpus, self.gpus < 0),
        }
        for name, (values, bad) in rules.items():
            if bad.any():
                row = int(np.flatnonzero(bad)[0])
                raise InputError(f"{where}: row {row + 1}: {name} is {values[row]}, must be at least 0")
        keys = pl.DataFrame({"step": self.step, "stage": list(self.stage)})
        second = np.flatnonzero(
            ~keys.select(pl.struct("step", "stage").is_first_distinct()).to_series().to_numpy()
        )
        if len(second):
            row = int(second[0])
            raise InputError(
                f"{where}: row {row + 1}: stage {self.stage[row]} of step {self.step[row]} stands twice"
            )
        return self


def read_trace(path: str | os.PathLike[str], *, lengths_known: bool = True) -> Trace:
    """Read a trace from Parquet, CSV or JSON Lines.

    Without ``lengths_known`` the responses are still to come: the column ``response_tokens`` is not read, and
    every length is 1.

    Raises
    ------
    InputError
        In one line with the file, the row or line, and the rule that it breaks.

    """
    path = Path(path)
    required = REQUIRED if lengths_known else {k: v for k, v in REQUIRED.items() if k != "response_tokens"}
    present, metadata = read_table(path, required, OPTIONAL)
    if not lengths_known:
        present = present.with_columns(response_tokens=pl.lit(1, dtype=pl.Int64))
    beside = _parse_beside(path, metadata)
    ids = present["prompt_id"].unique(maintain_order=True)
    codes = present.select("prompt_id").join(
        ids.to_frame().with_row_index("code"), on="prompt_id", how="left", maintain_order="left"
    )
    blocks = present["prefix_blocks"] if "prefix_blocks" in present.columns else None
    trace = Trace(
        step=present["step"].to_numpy(),
        epoch=present["epoch"].to_numpy(),
        prompt=codes["code"].cast(pl.Int64).to_numpy(),
        prompt_ids=tuple(ids.to_list()),
        sample=present["sample"].to_numpy(),
        prompt_tokens=present["prompt_tokens"].to_numpy(),
        response_tokens=present["response_tokens"].to_numpy(),
        answer_tokens=present["answer_tokens"].to_numpy() if "answer_tokens" in present.columns else None,
        truncated=present["truncated"].to_numpy() if "truncated" in present.columns else None,
        prefix_blocks=None if blocks is None else _to_blocks(blocks),
        **asdict(beside) | {"name": beside.name or stem(path)},
    )
    return trace.checked(str(path))


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; the suffix says the format. The file appears whole or not at all.

    Raises
    ------
    InputError
        For a suffix that is no format, or a trace that breaks a rule of the format.

    """
    path = Path(path)
    kind = _kind(path)
    trace = trace.checked(str(path))
    columns: dict[str, pl.Series] = {
        "step": pl.Series(trace.step),
        "epoch": pl.Series(trace.epoch),
        "prompt_id": pl.Series(trace.prompt_ids, dtype=pl.String).gather(trace.prompt),
        "sample": pl.Series(trace.sample),
        "prompt_tokens": pl.Series(trace.prompt_tokens),
        "response_tokens": pl.Series(trace.response_tokens),
    }
    if trace.answer_tokens is not None:
        columns["answer_tokens"] = pl.Series(trace.answer_tokens)
    if trace.prefix_blocks is not None:
        columns["prefix_blocks"] = _from_blocks(trace.prefix_blocks)
    if trace.truncated is not None:
        columns["truncated"] = pl.Series(trace.truncated)
    beside = {field.name: getattr(trace, field.name) for field in fields(_Beside)}
    text = json.dumps(beside, ensure_ascii=False)
    if kind != ".parquet":
        _write(_sidecar(path), json.dumps(beside, ensure_ascii=False, indent=2).encode() + b"\n")
    _write(path, _encode(pl.DataFrame(columns), kind, {METADATA_KEY: text}))


def read_stage_times(path: str | os.PathLike[str]) -> StageTimes:
    """Read a table of stage times with the columns ``step, stage, seconds, gpus``.

    Raises
    ------
    InputError
        In one line with the file, the row or line, and the rule that it breaks.

    """
    table, _ = read_table(Path(path), STAGE_COLUMNS)
    return StageTimes(
        step=table["step"].to_numpy(),
        stage=tuple(table["stage"].to_list()),
        seconds=table["seconds"].to_numpy(),
        gpus=table["gpus"].to_numpy(),
    ).checked(str(path))


def write_stage_times(times: StageTimes, path: str | os.PathLike[str]) -> None:
    """Write a table of stage times; the suffix says the format. The file appears whole or not at all."""
    path = Path(path)
    kind = _kind(path)
    times.checked(str(path))
    table = pl.DataFrame(
        {
            "step": times.step,
            "stage": list(times.stage),
            "seconds": times.seconds,
            "gpus": times.gpus,
        }
    )
    _write(path, _encode(table, kind, {}))


def stem(path: Path) -> str:
    """Return a file's name without the suffixes of its format."""
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def read_bytes(path: Path) -> bytes:
    """Return a file's content, unpacked where its name ends in ``.gz``.

    Raises
    ------
    InputError
        For a file that is missing, empty, not readable, or a gzip file that ends early or is damaged.

    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz" and content:
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, not a file") from None
    except EOFError:
        raise InputError(f"{path}: the gzip file ends early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not content.strip():
        raise InputError(f"{path}: the file is empty")
    return content


def read_table(
    path: Path, required: Mapping[str, pl.DataType], optional: Mapping[str, pl.DataType] | None = None
) -> tuple[pl.DataFrame, dict[str, str]]:
    """Read the named columns of a table, without nulls and with the stated types.

    Returns the table and the file's own metadata (Parquet only). Raises :class:`InputError` for a missing
    column, a null, and a value of another type, with the row of the first.
    """
    optional = optional or {}
    kind = _kind(path)
    metadata: dict[str, str] = {}
    content = b""
    if kind == ".parquet":
        table, metadata = _read_parquet(path)
    else:
        content = read_bytes(path)
        table = _read_csv(path, content) if kind.startswith(".csv") else read_json_lines(path, content)
    for name in required:
        if name not in table.columns:
            raise InputError(f"{path}: column {name} is missing (columns are {', '.join(table.columns)})")
    types = {**required, **{name: kind for name, kind in optional.items() if name in table.columns}}
    if not table.height:
        raise InputError(f"{path}: the table has no rows")
    return pl.DataFrame([_typed(path, table[name], want, content) for name, want in types.items()]), metadata


def read_json_lines(path: Path, content: bytes) -> pl.DataFrame:
    """Parse JSON Lines; ``path`` names the file in the message of an error, which names the bad line."""
    try:
        # The schema follows from every line: a late value of another type is then found, not coerced.
        return pl.read_ndjson(BytesIO(content), infer_schema_length=None)
    except pl.exceptions.PolarsError as error:
        types: dict[str, type] = {}
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as problem:
                raise InputError(f"{path}: line {number} is not JSON ({problem})") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}: line {number} is not a JSON object") from None
            for key, value in row.items():
                if value is not None and types.setdefault(key, type(value)) is not type(value):
                    raise InputError(
                        f"{path}: line {number}: {key} is {json.dumps(value)}, "
                        f"which is not of the type of the lines before"
                    ) from None
        raise InputError(f"{path}: {_first_line(error)}") from None


def integer_column(path: Path, column: pl.Series, content: bytes) -> pl.Series:
    """Return a column of a JSON Lines file as integers; ``content`` is the file's text.

    Raises :class:`InputError` for a null or another type, with the row of the first.
    """
    return _typed(path, column, pl.Int64(), content)


def _kind(path: Path) -> str:
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return suffix
    raise InputError(f"{path}: unknown suffix; a table ends in one of {', '.join(SUFFIXES)}")


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def _parse_beside(path: Path, metadata: Mapping[str, str]) -> _Beside:
    if _kind(path) == ".parquet":
        where, text = f"{path}: metadata {METADATA_KEY}", metadata.get(METADATA_KEY)
    else:
        where, sidecar = str(_sidecar(path)), _sidecar(path)
        try:
            text = read_bytes(sidecar).decode() if sidecar.exists() else None
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 ({error.reason})") from None
    if text is None:
        return _Beside()
    try:
        return TypeAdapter(_Beside).validate_json(text)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error)}") from None


def _read_parquet(path: Path) -> tuple[pl.DataFrame, dict[str, str]]:
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder, not a file' if path.exists() else 'no such file'}")
    if not path.stat().st_size:
        raise InputError(f"{path}: the file is empty")
    try:
        return pl.read_parquet(path, hive_partitioning=False), pl.read_parquet_metadata(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(f"{path}: not a whole Parquet file ({_first_line(error)})") from None


def _read_csv(path: Path, content: bytes) -> pl.DataFrame:
    try:
        table = pl.read_csv(BytesIO(content), infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: {_first_line(error)}") from None
    for name in table.columns:
        if name.endswith("_duplicated_0"):
            raise InputError(f"{path}: column {name.removesuffix('_duplicated_0')} stands twice")
    return table


def _typed(path: Path, column: pl.Series, want: pl.DataType, content: bytes) -> pl.Series:
    """Return the column as ``want``; ``content`` is the text of a CSV or JSON Lines file."""
    name, have = column.name, column.dtype
    rule = _RULES[type(want)]
    if have == pl.Null or column.null_count():
        row = int(column.is_null().arg_max() or 0)
        raise InputError(f"{path}: row {row + 1}: {name} is missing")
    if have == want:
        return column
    if have == pl.String and path.name.endswith((".csv", ".csv.gz")):
        return _typed_text(path, column, want, rule)
    widens = (want == pl.Int64 and have.is_integer()) or (want == pl.Float64 and have.is_numeric())
    if want == INT_LIST and isinstance(have, pl.List):
        inner = have.inner
        widens = inner == pl.Null or (isinstance(inner, pl.DataType) and inner.is_integer())
    if widens:
        try:
            return column.cast(want)
        except pl.exceptions.PolarsError:
            raise InputError(f"{path}: column {name} holds a number beyond 64 bits") from None
    if content:
        rows = (line for line in content.splitlines() if line.strip())
        for row, line in enumerate(rows, start=1):
            value = json.loads(line)[name]
            if not _IS[type(want)](value):
                raise InputError(f"{path}: row {row}: {name} is {json.dumps(value)}, must be {rule}")
    raise InputError(f"{path}: column {name} has type {have}, must be {rule}")


def _typed_text(path: Path, column: pl.Series, want: pl.DataType, rule: str) -> pl.Series:
    """Return a column of CSV text as ``want``."""
    if want == pl.Boolean:
        lower = column.str.to_lowercase()
        typed = pl.select(pl.when(lower.is_in(["true", "false"])).then(lower == "true")).to_series()
        typed = typed.rename(column.name)
    elif want == INT_LIST:
        wellformed = column.str.contains(r"^\[\s*(-?\d+\s*(,\s*-?\d+\s*)*)?\]$")
        if wellformed.all():
            return column.str.json_decode(INT_LIST)
        typed = pl.select(pl.when(wellformed).then(0)).to_series()
    else:
        typed = column.cast(want, strict=False)
    if typed.null_count():
        row = int(typed.is_null().arg_max() or 0)
        raise InputError(f"{path}: row {row + 1}: {column.name} is {column[row]!r}, must be {rule}")
    return typed


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_RULES: Mapping[type[pl.DataType], str] = {
    pl.Int64: "an integer",
    pl.Float64: "a number",
    pl.String: "a string",
    pl.Boolean: "true or false",
    pl.List: "a list of integers",
}
_IS: Mapping[type[pl.DataType], Callable[[object], bool]] = {
    pl.Int64: _is_int,
    pl.Float64: lambda value: _is_int(value) or isinstance(value, float),
    pl.String: lambda value: isinstance(value, str),
    pl.Boolean: lambda value: isinstance(value, bool),
    pl.List: lambda value: isinstance(value, list) and all(map(_is_int, value)),
}


def _to_blocks(column: pl.Series) -> PrefixBlocks:
    counts = column.list.len().to_numpy().astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    values = column.filter(column.list.len() > 0).explode().to_numpy()
    return PrefixBlocks(offsets, values.astype(np.int64))


def _from_blocks(blocks: PrefixBlocks) -> pl.Series:
    counts = np.diff(blocks.offsets)
    rows = pl.DataFrame({"row": np.repeat(np.arange(len(counts)), counts), "value": blocks.values})
    lists = rows.group_by("row", maintain_order=True).agg("value")
    empty = pl.Series([[]], dtype=INT_LIST)
    every = pl.DataFrame({"row": np.arange(len(counts))}).join(
        lists, on="row", how="left", maintain_order="left"
    )
    return every.select(pl.col("value").fill_null(pl.lit(empty).first())).to_series()


def _encode(table: pl.DataFrame, kind: str, metadata: Mapping[str, str]) -> bytes:
    buffer = BytesIO()
    if kind == ".parquet":
        table.write_parquet(buffer, metadata=dict(metadata))
        return buffer.getvalue()
    if kind.startswith(".csv"):
        lists = [name for name, have in table.schema.items() if have == INT_LIST]
        texts = [
            pl.format("[{}]", pl.col(name).cast(pl.List(pl.String)).list.join(",")).alias(name)
            for name in lists
        ]
        table.with_columns(texts).write_csv(buffer)
    else:
        table.write_ndjson(buffer)
    # No time stamp in the gzip header: the same trace gives the same bytes.
    return (
        gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)
        if kind.endswith(".gz")
        else buffer.getvalue()
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file whole: into a temporary one beside it, which then takes its name."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes a private file; a result has the mode that the user's umask gives.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
