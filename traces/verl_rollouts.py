"""Importer of verl rollout dumps: JSON Lines with the text of every response (``trainer.rollout_data_dir``).

Read are ``input`` (or ``prompt``), ``output`` (or ``response``) and ``step``; a dump without a ``step``
column takes it from its file name, ``{step}.jsonl``. Text is not kept, only its length.

Token counts come from the first of these that is there: integer columns (``prompt_tokens`` and
``response_tokens``, ...); a tokenizer file; a number of characters per token, which is an approximation and
is named as one in the trace's ``source``.

A prompt is its text: ``prompt_id`` is the start of its SHA-256. ``sample`` counts the rows of one prompt in
one step in file order. ``epoch`` counts the earlier steps in which the prompt occurred, so that the first
time a prompt is seen is its epoch 0, whatever the data loader did.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import polars as pl

from rlhfless.traces.errors import InputError
from rlhfless.traces.files import integer_column, read_bytes, read_json_lines, stem
from rlhfless.traces.trace import IntArray, Trace

#: Characters per token of GSM8K questions under the Qwen BPE vocabulary: 3.93 over the 7,473 training
#: questions, 3.24 to 4.58 between the 5th and the 95th percentile. Text that is mostly digits and signs has
#: fewer (the questions' reference answers with their calculator notes: 2.36), so that its tokens are
#: underestimated.
CHARACTERS_PER_TOKEN = 3.93

PROMPT_TEXT = ("input", "prompt")
RESPONSE_TEXT = ("output", "response")
PROMPT_COUNTS = ("prompt_tokens", "prompt_length", "prompt_len", "input_tokens")
RESPONSE_COUNTS = ("response_tokens", "response_length", "resp_len", "output_tokens")

Counter = Callable[[pl.Series], IntArray]


def read_verl_rollouts(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    characters_per_token: float = CHARACTERS_PER_TOKEN,
    max_response_tokens: int | None = None,
    algorithm: str = "grpo",
    model: str = "",
) -> Trace:
    """Read a dump: one file, or a folder of files ``{step}.jsonl[.gz]``.

    Parameters
    ----------
    path
        The file or the folder.
    tokenizer
        A ``tokenizer.json`` of the Hugging Face ``tokenizers`` package, which must be installed then.
    characters_per_token
        Used where there are neither count columns nor a tokenizer.
    max_response_tokens
        The cap of the run, which a dump does not state; responses at it count as truncated.
    algorithm, model
        Kept beside the rows.

    Raises
    ------
    InputError
        In one line with the file, the line, and what is wrong.

    """
    path = Path(path)
    files = _files(path)
    rows = pl.concat([_read_file(file) for file in files], how="diagonal")
    for name in (PROMPT_COUNTS[0], RESPONSE_COUNTS[0]):
        if name in rows.columns and rows[name].null_count():
            raise InputError(f"{path}: {name} stands in some files of the folder and not in others")
    count, how = _counter(path, tokenizer, characters_per_token)
    counted = {
        "prompt": rows[PROMPT_COUNTS[0]].to_numpy() if PROMPT_COUNTS[0] in rows.columns else None,
        "response": rows[RESPONSE_COUNTS[0]].to_numpy() if RESPONSE_COUNTS[0] in rows.columns else None,
    }
    texts = rows["prompt"].unique(maintain_order=True)
    code = rows.select("prompt").join(
        texts.to_frame().with_row_index("code"), on="prompt", how="left", maintain_order="left"
    )["code"]
    keyed = pl.DataFrame({"step": rows["step"], "code": code})
    seen = keyed.unique().sort("step").with_columns(epoch=pl.int_range(pl.len()).over("code"))
    keyed = keyed.with_columns(sample=pl.int_range(pl.len()).over("step", "code"))
    keyed = keyed.join(seen, on=["step", "code"], how="left", maintain_order="left")
    prompt = code.cast(pl.Int64).to_numpy()
    prompt_tokens = count(texts)[prompt] if counted["prompt"] is None else counted["prompt"]
    response_tokens = count(rows["response"]) if counted["response"] is None else counted["response"]
    if counted["prompt"] is not None and counted["response"] is not None:
        how = "columns of the dump"
    if max_response_tokens is not None and counted["response"] is None:
        # A count that is approximate, or that includes no end-of-sequence token, can pass the cap.
        response_tokens = np.minimum(response_tokens, max_response_tokens)
    trace = Trace(
        name=stem(path) if path.is_file() else path.name,
        step=rows["step"].to_numpy(),
        epoch=keyed["epoch"].cast(pl.Int64).to_numpy(),
        prompt=prompt,
        prompt_ids=tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts),
        sample=keyed["sample"].cast(pl.Int64).to_numpy(),
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        truncated=None if max_response_tokens is None else response_tokens >= max_response_tokens,
        algorithm=algorithm,
        model=model,
        source=f"verl rollout dump {path.name}; token counts from {how}",
        max_response_tokens=max_response_tokens,
    )
    return trace.checked(str(path))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz"))]
    if not files:
        raise InputError(f"{path}: the folder holds no .jsonl or .jsonl.gz file")
    return sorted(files, key=lambda file: (len(stem(file)), stem(file)))


def _read_file(file: Path) -> pl.DataFrame:
    content = read_bytes(file)
    table = read_json_lines(file, content)

    def first(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in table.columns), None)

    out: dict[str, pl.Series] = {}
    for wanted, names in (("prompt", PROMPT_TEXT), ("response", RESPONSE_TEXT)):
        name = first(names)
        if name is None:
            raise InputError(f"{file}: column {names[0]} (or {names[1]}) is missing")
        texts = table[name]
        if texts.dtype != pl.String or texts.null_count():
            row = f"row {int(texts.is_null().arg_max() or 0) + 1}: " if texts.null_count() else ""
            raise InputError(f"{file}: {row}{name} must be a string")
        out[wanted] = texts
    if "step" in table.columns:
        out["step"] = integer_column(file, table["step"], content)
    elif stem(file).isdecimal():
        out["step"] = pl.Series([int(stem(file))] * table.height, dtype=pl.Int64)
    else:
        raise InputError(f"{file}: column step is missing, and the file's name is no step number")
    for counts in (PROMPT_COUNTS, RESPONSE_COUNTS):
        name = first(counts)
        if name is not None:
            out[counts[0]] = integer_column(file, table[name], content)
    return pl.DataFrame(out)


def _counter(
    path: Path, tokenizer: str | os.PathLike[str] | None, characters_per_token: float
) -> tuple[Counter, str]:
    """Return what counts the tokens of texts, and how to call it."""
    if tokenizer is None:
        if not characters_per_token > 0:
            raise InputError(f"{path}: characters_per_token is {characters_per_token:g}, must be above 0")

        def by_characters(texts: pl.Series) -> IntArray:
            tokens = np.ceil(texts.str.len_chars().to_numpy() / characters_per_token)
            # An empty response still holds its end-of-sequence token.
            return np.maximum(tokens, 1).astype(np.int64)

        return by_characters, f"an approximation, {characters_per_token:g} characters per token"
    try:
        tokenizers = import_module("tokenizers")
    except ImportError:
        raise InputError(
            f"{tokenizer}: reading a tokenizer needs the package tokenizers (pip install tokenizers)"
        ) from None
    if not Path(tokenizer).is_file():
        raise InputError(f"{tokenizer}: no such file")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises bare Exception for a file that it cannot read
        raise InputError(f"{tokenizer}: not a tokenizer file ({' '.join(str(error).split())})") from None

    def by_tokenizer(texts: pl.Series) -> IntArray:
        encodings = encoder.encode_batch(texts.to_list(), add_special_tokens=False)
        return np.maximum(np.fromiter((len(e.ids) for e in encodings), np.int64, len(encodings)), 1)

    return by_tokenizer, f"tokenizer {Path(tokenizer).name}"
