"""Importer of per-response length tables in the form that the PolyTrace project publishes.

Columns: ``workload, run, step, rank, local_index, prompt_len, sample, resp_len``, one row a response, lengths
in tokens. A prompt is (workload, run, step, rank, local_index); the tables do not say which prompts come back
in a later step, so that every prompt has epoch 0.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from rlhfless.traces.errors import InputError
from rlhfless.traces.files import read_table
from rlhfless.traces.trace import Trace

COLUMNS = {
    "workload": pl.String(),
    "run": pl.Int64(),
    "step": pl.Int64(),
    "rank": pl.Int64(),
    "local_index": pl.Int64(),
    "prompt_len": pl.Int64(),
    "sample": pl.Int64(),
    "resp_len": pl.Int64(),
}


def read_polytrace(
    path: str | os.PathLike[str],
    workload: str | None = None,
    run: int | None = None,
    max_response_tokens: int | None = None,
) -> Trace:
    """Read one run of one workload (Parquet, CSV or JSON Lines).

    Parameters
    ----------
    path
        The table.
    workload, run
        Which one; each may be left out where the file has a single one.
    max_response_tokens
        The cap, which the table does not state; responses at it count as truncated.

    Raises
    ------
    InputError
        For a table that breaks a rule, and where an option is needed or names nothing; the message then
        lists what there is.

    """
    path = Path(path)
    table, _ = read_table(path, COLUMNS)
    table, chosen = _only(path, table, "workload", workload)
    table, number = _only(path, table, "run", run)
    table = table.sort("step", maintain_order=True)
    key = ["step", "rank", "local_index"]
    prompts = table.select(key).unique(maintain_order=True).with_row_index("code")
    code = table.select(key).join(prompts, on=key, how="left", maintain_order="left")["code"]
    response_tokens = table["resp_len"].to_numpy()
    trace = Trace(
        name=f"{chosen}-{number}",
        step=table["step"].to_numpy(),
        epoch=(table["step"] * 0).to_numpy(),
        prompt=code.cast(pl.Int64).to_numpy(),
        prompt_ids=tuple(f"{chosen}-{number}-{s}-{r}-{i}" for s, r, i in prompts.select(key).iter_rows()),
        sample=table["sample"].to_numpy(),
        prompt_tokens=table["prompt_len"].to_numpy(),
        response_tokens=response_tokens,
        truncated=None if max_response_tokens is None else response_tokens >= max_response_tokens,
        source=f"PolyTrace table {path.name}, workload {chosen}, run {number}",
        max_response_tokens=max_response_tokens,
    )
    return trace.checked(str(path))


def _only(
    path: Path, table: pl.DataFrame, name: str, wanted: str | int | None
) -> tuple[pl.DataFrame, str | int]:
    """Return the rows of the wanted value of a column, or of its only one, and the value."""
    there = table[name].unique().sort().to_list()
    listed = ", ".join(map(str, there))
    if wanted is None:
        if len(there) > 1:
            raise InputError(f"{path}: the table has several values of {name}, choose one of: {listed}")
        wanted = there[0]
    if wanted not in there:
        raise InputError(f"{path}: no rows have {name} {wanted}; the table has: {listed}")
    return table.filter(pl.col(name) == wanted), wanted
