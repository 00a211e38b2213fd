"""Write the measured cost profiles of conf/profile from tables of operator latencies.

A decode iteration is the sum over layers of measured operators: query-key-value, output, gate with up, and
down projection (GEMM), attention by batch and context, two all-reduces with tensor parallelism, and once
the output projection. Element-wise kernels, sampling, scheduling and host overhead are in none of the
tables. Each profile states in ``source`` how far the fitted line is from that sum.

A benchmark that repeats one operator finds weights or keys and values in the cache, which an engine that
walks through all layers does not. So no operator counts as faster than its bytes at peak bandwidth.

Usage: ``python scripts/build_profiles.py FOLDER [--out conf/profile] [--only TEXT]``. FOLDER holds, per GPU,
``<gpu>_gemm_bf16.parquet`` (m, n, k, latency_us), ``<gpu>_generation_attention_bf16.parquet`` (batch_size,
step, num_heads, num_key_value_heads, head_dim, latency_us), ``<gpu>_context_attention_bf16.parquet`` (isl in
place of step), and ``nccl_half_latency_us.csv`` (gpu, op_name, num_gpus, message_size in elements,
latency_us): the layout of NVIDIA's aiconfigurator data (PyPI aiconfigurator-core, Apache-2.0).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from numpy.typing import NDArray
from scipy.optimize import nnls

from rlhfless.models.computed import BATCHES, Assumptions, assemble_profile, kv_capacity_tokens, profile_name
from rlhfless.models.hardware import BF16_BYTES, Model, find_gpu, find_model
from rlhfless.models.profile import DecodeCost, Link, PrefillCost, Profile
from rlhfless.traces.errors import InputError

Array = NDArray[np.float64]

#: Prefix of a GPU's files in the folder of tables.
TABLE_NAMES = {"L40S": "l40s", "A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm"}
MEASURED_MODELS = (
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen2.5-7B",
    "Qwen2.5-14B",
    "Llama-3.1-8B",
)
TENSOR_PARALLEL = (1, 2, 4)
#: GPU, model, GPUs of an actor and share of memory of what stands beside the grid. At 0.6 of two H100 the
#: weights of the 70B model do not fit; that actor is taken as one that shares its GPUs with nothing.
BESIDE_THE_GRID = (
    ("H100", "Llama-2-70B", 2, 0.95),
    ("H100", "Llama-2-70B", 4, 0.6),
    ("H100", "Llama-2-70B", 8, 0.6),
)

# Contexts of the decode fit: below, attention is a small part of an iteration; above, RLHF runs are rare.
_CONTEXTS = (127, 8191)
# An engine that has the GPU alone; beyond it, contexts cannot occur and do not count in a fit.
_LARGEST_UTILIZATION = 0.9
_FEWEST_POINTS = 3
_SMALLEST_PREFILL = 128
_NCCL_LARGE = 2**24  # elements; from here on a transfer's time is its bandwidth
_VIDUR_CONTEXT = 1024  # 96 % of the closed batch's responses end within it
_SIGNIFICANT_DIGITS = 5


@dataclass(frozen=True)
class Fit:
    """Relative errors of a fit over its points."""

    rms: float
    largest: float

    def __str__(self) -> str:
        """Return both errors in per cent."""
        return f"rms {100 * self.rms:.1f} %, max {100 * self.largest:.1f} %"


def fit_relative(columns: Array, seconds: Array) -> tuple[Array, Array]:
    """Fit ``seconds ~ columns @ x`` with ``x >= 0``, least squares of the relative error.

    Parameters
    ----------
    columns :
        Points by unknowns.
    seconds :
        Measured times, positive, one a point.

    Returns
    -------
    The unknowns, and the signed relative errors of the points.

    """
    scale = columns.max(axis=0)
    solution, _ = nnls(columns / scale / seconds[:, None], np.ones_like(seconds))
    unknowns = solution / scale
    return unknowns, columns @ unknowns / seconds - 1.0


def _error(errors: Array) -> Fit:
    return Fit(float(np.sqrt(np.mean(errors**2))), float(np.abs(errors).max()))


def _at(axis: Array, table: Array, x: float) -> Array:
    """Interpolate ``table`` linearly along its first axis; a missing neighbour of weight 0 does no harm."""
    if not axis[0] <= x <= axis[-1]:
        raise ValueError(f"{x} lies outside the measured {axis[0]:g}..{axis[-1]:g}")
    high = int(np.searchsorted(axis, x))
    if axis[high] == x:
        return np.asarray(table[high], dtype=np.float64)
    share = (x - axis[high - 1]) / (axis[high] - axis[high - 1])
    return np.asarray((1 - share) * table[high - 1] + share * table[high], dtype=np.float64)


def _cube(frame: pl.DataFrame, axes: Sequence[str]) -> tuple[list[Array], Array]:
    """Return the distinct values of each axis, and latencies in seconds; NaN where nothing was measured."""
    values = [frame[axis].unique().sort().to_numpy() for axis in axes]
    cube = np.full([len(v) for v in values], np.nan)
    where = tuple(np.searchsorted(v, frame[axis].to_numpy()) for axis, v in zip(axes, values, strict=True))
    cube[where] = frame["latency_us"].to_numpy() * 1e-6
    return [v.astype(np.float64) for v in values], cube


class OperatorTables:
    """Measured operators of one GPU type, interpolated linearly between the measured shapes."""

    def __init__(self, folder: Path, gpu: str) -> None:
        """Read the tables of ``gpu``; raise InputError where one is missing or has other columns."""
        if gpu not in TABLE_NAMES:
            raise InputError(f"gpu: no operator tables of {gpu} (there are {', '.join(TABLE_NAMES)})")
        prefix = TABLE_NAMES[gpu]
        self.gpu = gpu
        self.bytes_per_second = find_gpu(gpu).memory_bytes_per_second
        shape = ["num_key_value_heads", "head_dim", "num_heads", "batch_size"]
        gemm = _read(folder / f"{prefix}_gemm_bf16.parquet", ["m", "n", "k"])
        self._gemm_axes, self._gemm = _cube(gemm, ("m", "n", "k"))
        self._attention = {
            "step": _read(folder / f"{prefix}_generation_attention_bf16.parquet", [*shape, "step"]),
            "isl": _read(folder / f"{prefix}_context_attention_bf16.parquet", [*shape, "isl"]),
        }
        nccl = _read(folder / "nccl_half_latency_us.csv", ["gpu", "op_name", "num_gpus", "message_size"])
        self._nccl = nccl.filter((pl.col("gpu") == prefix) & (pl.col("op_name") == "all_reduce"))

    def gemm(self, m: int, n: int, k: int) -> float:
        """Return seconds of (m, k) activations times (k, n) weights, which are read from memory.

        Beyond the widest measured ``n`` the time grows in proportion.
        """
        ms, ns, ks = self._gemm_axes
        widest = float(ns[-1])
        plane = _at(ms, self._gemm, m)
        seconds = float(_at(ks, _at(ns, plane, min(n, widest)), k)) * max(1.0, n / widest)
        if np.isnan(seconds):
            raise ValueError(f"GEMM {m} x {n} x {k} has a neighbour that was not measured on {self.gpu}")
        return max(seconds, BF16_BYTES * n * k / self.bytes_per_second)

    def attention(self, axis: str, heads: int, kv_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
        """Return batch sizes, contexts (``step``) or prompt lengths (``isl``), and seconds by both.

        Raises
        ------
        InputError
            If that head shape was not measured.

        """
        frame = self._attention[axis].filter(
            (pl.col("num_key_value_heads") == kv_heads) & (pl.col("head_dim") == head_dim)
        )
        at = frame["num_heads"].unique().sort().to_numpy().astype(np.float64)
        if not len(at) or not at[0] <= heads <= at[-1]:
            raise InputError(
                f"{self.gpu}: no measured attention with {heads} heads, {kv_heads} KV heads of {head_dim}"
            )
        (head_axis, batches, lengths), cube = _cube(frame, ("num_heads", "batch_size", axis))
        return batches, lengths, _at(head_axis, cube, heads)

    def all_reduce(self, gpus: int, elements: float) -> float:
        """Return seconds of one all-reduce of 2-byte elements over ``gpus`` GPUs; 0 on one."""
        if gpus == 1:
            return 0.0
        sizes, seconds = self._all_reduce_table(gpus)
        return float(np.interp(elements, sizes, seconds))

    def measured_link(self) -> Link:
        """Return the link between two GPUs as their all-reduce shows it.

        With two GPUs a ring all-reduce sends each byte once in each direction, so bytes over seconds of
        large messages is the bandwidth of the link.
        """
        sizes, seconds = self._all_reduce_table(2)
        large = sizes >= _NCCL_LARGE
        rate = float(np.median(2 * sizes[large] / seconds[large]))
        return Link(bytes_per_second=rate, latency_seconds=float(seconds[0]))

    def _all_reduce_table(self, gpus: int) -> tuple[Array, Array]:
        rows = self._nccl.filter(pl.col("num_gpus") == gpus).sort("message_size")
        if not rows.height:
            raise InputError(f"{self.gpu}: no measured all-reduce over {gpus} GPUs")
        return (
            rows["message_size"].to_numpy().astype(np.float64),
            rows["latency_us"].to_numpy().astype(np.float64) * 1e-6,
        )


def _read(path: Path, columns: Sequence[str]) -> pl.DataFrame:
    try:
        frame = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    missing = [c for c in (*columns, "latency_us") if c not in frame.columns]
    if missing:
        raise InputError(f"{path}: column {missing[0]} is missing")
    return frame.select(*columns, "latency_us")


def _grow_with_batch(batches: Array, seconds: Array) -> Array:
    """Fill times that were not measured, from the largest measured batch of that context in proportion.

    The tables end where a batch holds many tokens; there the time is that of reading them.
    """
    filled = seconds.copy()
    for i in range(1, len(batches)):
        grown = filled[i - 1] * batches[i] / batches[i - 1]
        filled[i] = np.where(np.isnan(filled[i]), grown, filled[i])
    return filled


class Composition:
    """Times of one model on one actor, composed of measured operators."""

    def __init__(self, tables: OperatorTables, model: Model, tensor_parallel: int) -> None:
        """Take the head shape of each GPU; raise InputError where it does not divide or was not measured."""
        self.model = model
        self.tensor_parallel = tensor_parallel
        self._tables = tables
        self._heads, self._kv_heads = model.heads_per_gpu(tensor_parallel)
        shape = (self._heads, self._kv_heads, model.head_dim)
        batches, contexts, seconds = tables.attention("step", *shape)
        self._decode_attention = batches, contexts, _grow_with_batch(batches, seconds)
        self._prefill_attention = tables.attention("isl", *shape)

    def projections(self, tokens: int, logits: int) -> float:
        """Return seconds of all GEMMs and all-reduces: ``tokens`` rows, ``logits`` of them to the output."""
        m, gpus = self.model, self.tensor_parallel
        width = m.head_dim
        shard = -(-m.intermediate // gpus)
        layer = (
            self._tables.gemm(tokens, (self._heads + 2 * self._kv_heads) * width, m.hidden)
            + self._tables.gemm(tokens, m.hidden, self._heads * width)
            + self._tables.gemm(tokens, 2 * shard, m.hidden)
            + self._tables.gemm(tokens, m.hidden, shard)
            + 2 * self._tables.all_reduce(gpus, tokens * m.hidden)
        )
        return m.layers * layer + self._tables.gemm(logits, -(-m.vocab // gpus), m.hidden)

    def decode(self, batch: int) -> tuple[Array, Array]:
        """Return the measured contexts (tokens a response) and the seconds of an iteration at each."""
        batches, contexts, seconds = self._decode_attention
        attention = _at(batches, seconds, batch)
        known = ~np.isnan(attention)
        kv_bytes = self.model.kv_bytes_per_token_on_gpu(self.tensor_parallel) * batch * contexts[known]
        read = kv_bytes / self._tables.bytes_per_second
        total = np.maximum(self.model.layers * attention[known], read) + self.projections(batch, batch)
        return contexts[known], total

    def prefill(self, largest: int) -> tuple[Array, Array, Array]:
        """Return prompts a batch, tokens a prompt and seconds, for batches of up to ``largest`` tokens."""
        batches, lengths, seconds = self._prefill_attention
        at = [
            (i, j)
            for i, b in enumerate(batches)
            for j, n in enumerate(lengths)
            if _SMALLEST_PREFILL <= b * n <= largest and n > 1 and not np.isnan(seconds[i, j])
        ]
        prompts = np.array([batches[i] for i, _ in at])
        tokens = np.array([lengths[j] for _, j in at])
        total = np.array(
            [
                self.model.layers * seconds[i, j]
                + self.projections(int(batches[i] * lengths[j]), int(batches[i]))
                for i, j in at
            ]
        )
        return prompts, tokens, total


def measured_decode(composition: Composition, capacity: int) -> tuple[DecodeCost, Fit]:
    """Fit ``base(b) + kv(b) * k`` at every batch size over the contexts that fit ``capacity`` tokens."""
    base, kv, errors = [], [], []
    for batch in BATCHES:
        contexts, seconds = composition.decode(batch)
        usual = (contexts >= _CONTEXTS[0]) & (contexts <= _CONTEXTS[1])
        contexts, seconds = contexts[usual], seconds[usual]
        fits = max(_FEWEST_POINTS, int(np.sum(batch * contexts <= capacity)))
        tokens, seconds = batch * contexts[:fits], seconds[:fits]
        (b, k), error = fit_relative(np.column_stack((np.ones_like(tokens), tokens)), seconds)
        base.append(b)
        kv.append(k)
        errors.append(error)
    cost = DecodeCost(batch=BATCHES, base_seconds=tuple(base), kv_token_seconds=tuple(kv))
    return cost, _error(np.concatenate(errors))


def measured_prefill(composition: Composition, largest: int) -> tuple[PrefillCost, Fit]:
    """Fit ``fixed + token * m + token2 * m^2`` over batches of equal prompts."""
    prompts, tokens, seconds = composition.prefill(largest)
    columns = np.column_stack((np.ones_like(tokens), prompts * tokens, prompts * tokens**2))
    (fixed, token, token2), errors = fit_relative(columns, seconds)
    cost = PrefillCost(
        gpus=composition.tensor_parallel,
        fixed_seconds=fixed,
        token_seconds=token,
        token2_seconds=token2,
        max_batch_tokens=largest,
    )
    return cost, _error(errors)


def measured_profile(
    tables: OperatorTables, model: Model, tensor_parallel: int, assumptions: Assumptions
) -> Profile:
    """Return the profile of ``model`` on an actor of ``tensor_parallel`` GPUs.

    Raises
    ------
    InputError
        If heads do not divide, weights do not fit, or an operator was not measured.

    """
    gpu = find_gpu(tables.gpu)
    kv_capacity_tokens(gpu, model, tensor_parallel, assumptions.memory_utilization)
    utilization = max(_LARGEST_UTILIZATION, assumptions.memory_utilization)
    largest = kv_capacity_tokens(gpu, model, tensor_parallel, utilization)
    composition = Composition(tables, model, tensor_parallel)
    decode, decode_fit = measured_decode(composition, largest)
    prefill, prefill_fit = measured_prefill(composition, assumptions.max_batch_tokens)
    reduced = ", NCCL all-reduce" if tensor_parallel > 1 else ""
    origin = (
        f"composed of measured operators (aiconfigurator-core 0.12.0 {TABLE_NAMES[tables.gpu]}: vLLM GEMM and "
        f"attention{reduced}), not measured end to end"
    )
    link = tables.measured_link()
    return assemble_profile(
        gpu,
        model,
        tensor_parallel,
        kind="measured",
        decode=decode,
        prefill=prefill,
        assumptions=assumptions,
        within_node=link,
        source={
            "decode": f"{origin}; linear fit over contexts {_CONTEXTS[0]}..{_CONTEXTS[1]}: {decode_fit}; "
            "no operator faster than its bytes at peak bandwidth; element-wise kernels, sampling and host overhead "
            "left out",
            "prefill": f"{origin}; fit over {_SMALLEST_PREFILL}..{assumptions.max_batch_tokens} tokens: {prefill_fit}",
            "links": "within node: measured NCCL all-reduce over 2 GPUs; between nodes: data sheet times "
            f"{assumptions.link_efficiency:g} and latency assumed",
        },
    )


def vidur_profile(folder: Path, device: str, model: str, tensor_parallel: int) -> tuple[Profile, list[Fit]]:
    """Return a profile of the cost tables that a Vidur run used, and the fit error of each batch size.

    ``folder`` holds ``decode_iteration_ms.csv`` (device, model, tp, batch, context_tokens a running response,
    total_time_ms) and ``prefill_ms.csv`` (device, model, tp, prompt_tokens, model_time_ms). Names are Vidur's
    (``h100``, ``meta-llama/Llama-2-7b-hf``).
    """
    chosen = (pl.col("device") == device) & (pl.col("model") == model) & (pl.col("tp") == tensor_parallel)
    usual = pl.col("context_tokens") <= _VIDUR_CONTEXT
    rows = pl.read_csv(folder / "decode_iteration_ms.csv").filter(chosen & usual)
    prompts = pl.read_csv(folder / "prefill_ms.csv").filter(chosen)
    if not rows.height or not prompts.height:
        raise InputError(f"{folder}: no rows of {device}, {model}, tp {tensor_parallel}")
    batches, base, kv, fits = [], [], [], []
    for (batch,), group in rows.sort("batch", "context_tokens").group_by("batch", maintain_order=True):
        context = group["context_tokens"].to_numpy().astype(np.float64)
        seconds = group["total_time_ms"].to_numpy() / 1e3
        tokens = int(str(batch)) * context
        (b, k), error = fit_relative(np.column_stack((np.ones_like(tokens), tokens)), seconds)
        batches.append(int(str(batch)))
        base.append(b)
        kv.append(k)
        fits.append(_error(error))
    m = prompts["prompt_tokens"].to_numpy().astype(np.float64)
    (fixed, token, token2), _ = fit_relative(
        np.column_stack((np.ones_like(m), m, m**2)), prompts["model_time_ms"].to_numpy() / 1e3
    )
    profile = assemble_profile(
        find_gpu(device),
        find_model(model),
        tensor_parallel,
        kind="measured",
        decode=DecodeCost(batch=tuple(batches), base_seconds=tuple(base), kv_token_seconds=tuple(kv)),
        prefill=PrefillCost(
            gpus=tensor_parallel,
            fixed_seconds=fixed,
            token_seconds=token,
            token2_seconds=token2,
            max_batch_tokens=4096,
        ),
        assumptions=Assumptions(memory_utilization=_LARGEST_UTILIZATION),
        source={"decode": "cost tables exported from Vidur", "prefill": "cost tables exported from Vidur"},
    )
    return profile, fits


def plain(value: Any) -> Any:
    """Return a profile's values as YAML holds them: five significant digits, whole numbers without a point."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        if value.is_integer() and value:
            return int(value)
        rounded = float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
        return int(rounded) if rounded.is_integer() and rounded else rounded
    return value


def to_yaml(profile: Profile) -> str:
    """Return the file of a profile."""
    values = plain(profile.model_dump())
    source = {"source": values.pop("source")}
    return (
        "# Written by scripts/build_profiles.py from measured operator tables; see docs/profiles.md.\n"
        + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)
        + yaml.safe_dump(source, sort_keys=False, width=110)
    )


def build_all(folder: Path, only: str = "") -> Iterator[tuple[str, Profile | InputError]]:
    """Yield every profile by name, or the reason why it cannot be built."""
    assumptions = Assumptions()
    grid = [
        (gpu, model, gpus, assumptions.memory_utilization)
        for gpu in TABLE_NAMES
        for model in MEASURED_MODELS
        for gpus in TENSOR_PARALLEL
    ]
    tables = cache(lambda gpu: OperatorTables(folder, gpu))
    for gpu, model_name, gpus, utilization in (*grid, *BESIDE_THE_GRID):
        model = find_model(model_name)
        name = profile_name(find_gpu(gpu), model, gpus)
        if only not in name:
            continue
        operators = tables(gpu)
        assumed = assumptions.model_copy(update={"memory_utilization": utilization})
        try:
            yield name, measured_profile(operators, model, gpus, assumed)
        except InputError as reason:
            yield name, reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profiles; return 2 after one line on standard error where the tables are not as stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of operator tables")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "conf" / "profile")
    parser.add_argument("--only", default="", help="build only profiles whose name holds this text")
    options = parser.parse_args(arguments)
    try:
        built = list(build_all(options.folder, options.only))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for name, result in built:
        if isinstance(result, InputError):
            print(f"skipped {name}: {result}")
            continue
        (options.out / f"{name}.yaml").write_text(to_yaml(result), encoding="utf-8")
        print(f"{name}: decode {_errors(result, 'decode')}; prefill {_errors(result, 'prefill')}")
    return 0


def _errors(profile: Profile, part: str) -> str:
    text = profile.source[part]
    return text[text.index("rms") :].split(";")[0]


if __name__ == "__main__":
    raise SystemExit(main())
