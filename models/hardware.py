"""Data sheets: what a GPU can do, and what a language model asks of it.

Vendors' data-sheet numbers are peaks. What share of a peak a kernel reaches is not stated here but where a
cost is computed (:mod:`rlhfless.models.computed`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless.traces.errors import InputError

#: Bytes of one number in bfloat16, the precision of weights and KV cache throughout.
BF16_BYTES = 2


@dataclass(frozen=True)
class Gpu:
    """One GPU type.

    Attributes
    ----------
    name: Name in profiles and options.
    flops: Dense bfloat16 floating-point operations per second (no structured sparsity).
    memory_bytes: Device memory; a data sheet's GB counts as 1e9 bytes.
    memory_bytes_per_second: Bandwidth of the device memory.
    link_bytes_per_second: Bandwidth to a GPU of the same node, one direction (half of a vendor's total).
    node_bytes_per_second: Network bandwidth of one GPU to another node, one direction. It belongs to the
        server and not to the GPU: the usual server of that GPU is assumed.
    usd_per_gpu_hour: Assumed on-demand price, for orientation only.
    source: Data sheet, and what is assumed beside it.

    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    node_bytes_per_second: float
    usd_per_gpu_hour: float
    source: str


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Attributes
    ----------
    name: Name in profiles and options.
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: Shape, as in the model's public
        configuration file.
    tied: The output projection shares the weights of the embedding.
    qkv_bias: The query, key and value projections have a bias (Qwen2 and Qwen2.5).
    qk_norm: Queries and keys pass an RMS norm over the head (Qwen3).

    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: projections of all layers and the output projection."""
        attention = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, counted once: what a checkpoint holds."""
        norms = (2 * self.layers + 1) * self.hidden
        if self.qk_norm:
            norms += 2 * self.layers * self.head_dim
        bias = self.layers * self.qkv_width if self.qkv_bias else 0
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.matmul_parameters + norms + bias + embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of one bfloat16 copy of the weights."""
        return BF16_BYTES * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * BF16_BYTES * self.layers * self.kv_heads * self.head_dim

    @property
    def forward_flops_per_token(self) -> float:
        """Two operations a weight and token; attention over the context is not in it."""
        return 2.0 * self.matmul_parameters

    @property
    def attention_flops_per_token_pair(self) -> float:
        """Operations of one query on one key: a product with the key and one with the value, all layers."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def heads_per_gpu(self, tensor_parallel: int) -> tuple[int, int]:
        """Return the query and KV heads that one of ``tensor_parallel`` GPUs holds.

        Query heads are divided. KV heads are divided, or replicated where there are fewer than GPUs (as
        vLLM does).

        Raises
        ------
        InputError
            If the heads cannot be divided.

        """
        if tensor_parallel < 1:
            raise InputError(f"tensor_parallel: must be at least 1 (got {tensor_parallel})")
        divides = self.kv_heads % tensor_parallel == 0 or tensor_parallel % self.kv_heads == 0
        if self.heads % tensor_parallel or not divides:
            raise InputError(
                f"tensor_parallel: {self.name} has {self.heads} query and {self.kv_heads} KV heads, "
                f"which {tensor_parallel} GPUs do not divide"
            )
        return self.heads // tensor_parallel, max(1, self.kv_heads // tensor_parallel)

    def kv_bytes_per_token_on_gpu(self, tensor_parallel: int) -> int:
        """Return the KV bytes of a token on each GPU of an actor; replicated heads count on every one."""
        return 2 * BF16_BYTES * self.layers * self.heads_per_gpu(tensor_parallel)[1] * self.head_dim


_PCIE4 = 32e9
_GBIT = 1e9 / 8
_PRICE = "price assumed"

_GPUS = (
    Gpu("L40S", 362.05e12, 48e9, 864e9, _PCIE4, 100 * _GBIT, 1.9,
        f"NVIDIA L40S data sheet; PCIe 4.0 x16, 100 Gbit/s a GPU pair assumed (4 such cards a server); {_PRICE}"),
    Gpu("L40", 181.05e12, 48e9, 864e9, _PCIE4, 100 * _GBIT, 1.0,
        f"NVIDIA L40 data sheet; PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("L20", 119.5e12, 48e9, 864e9, _PCIE4, 100 * _GBIT, 1.0,
        f"NVIDIA L20 figures as published by resellers; PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("L4", 121e12, 24e9, 300e9, _PCIE4, 100 * _GBIT, 0.8,
        f"NVIDIA L4 data sheet, half of the sparse figure; PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("A10", 125e12, 24e9, 600e9, _PCIE4, 100 * _GBIT, 0.9,
        f"NVIDIA A10 data sheet; PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("A40", 149.7e12, 48e9, 696e9, _PCIE4, 100 * _GBIT, 0.8,
        f"NVIDIA A40 data sheet; PCIe 4.0 x16 without NVLink bridge, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("RTX A6000", 154.8e12, 48e9, 768e9, _PCIE4, 100 * _GBIT, 0.8,
        f"NVIDIA RTX A6000 data sheet, half of the sparse figure; PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("RTX 3090", 71e12, 24e9, 936e9, _PCIE4, 100 * _GBIT, 0.3,
        f"NVIDIA GA102 whitepaper (FP32 accumulation); PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("RTX 4090", 165.2e12, 24e9, 1008e9, _PCIE4, 100 * _GBIT, 0.5,
        f"NVIDIA Ada whitepaper (FP32 accumulation); PCIe 4.0 x16, 100 Gbit/s assumed; {_PRICE}"),
    Gpu("A100-40G", 312e12, 40e9, 1555e9, 300e9, 100 * _GBIT, 1.5,
        f"NVIDIA A100 data sheet, SXM 40 GB; 100 Gbit/s assumed; {_PRICE}"),
    Gpu("A100", 312e12, 80e9, 2039e9, 300e9, 200 * _GBIT, 2.0,
        f"NVIDIA A100 data sheet, SXM 80 GB; 200 Gbit/s assumed; {_PRICE}"),
    Gpu("A800", 312e12, 80e9, 2039e9, 200e9, 200 * _GBIT, 1.6,
        f"NVIDIA A800 figures, SXM 80 GB: an A100 with 400 GB/s of NVLink; 200 Gbit/s assumed; {_PRICE}"),
    Gpu("H100", 989.4e12, 80e9, 3350e9, 450e9, 400 * _GBIT, 3.0,
        f"NVIDIA H100 data sheet, SXM, half of the sparse figure; 400 Gbit/s assumed; {_PRICE}"),
    Gpu("H800", 989.4e12, 80e9, 3350e9, 200e9, 400 * _GBIT, 2.5,
        f"NVIDIA H800 figures, SXM: an H100 with 400 GB/s of NVLink; 400 Gbit/s assumed; {_PRICE}"),
    Gpu("H200", 989.4e12, 141e9, 4800e9, 450e9, 400 * _GBIT, 3.8,
        f"NVIDIA H200 data sheet, SXM, half of the sparse figure; 400 Gbit/s assumed; {_PRICE}"),
    Gpu("H20", 148e12, 96e9, 4000e9, 450e9, 400 * _GBIT, 1.5,
        f"NVIDIA H20 figures as published by resellers, 96 GB; 400 Gbit/s assumed; {_PRICE}"),
    Gpu("B200", 2250e12, 180e9, 7700e9, 900e9, 400 * _GBIT, 5.5,
        f"NVIDIA HGX B200 data sheet, an eighth of the board, half of the sparse figure; 400 Gbit/s assumed; {_PRICE}"),
    Gpu("MI300X", 1307.4e12, 192e9, 5300e9, 64e9, 400 * _GBIT, 3.0,
        f"AMD Instinct MI300X data sheet; 64 GB/s a direction and GPU pair, 400 Gbit/s assumed; {_PRICE}"),
)  # fmt: skip

_MODELS = (
    Model("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
    Model("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
    Model("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, tied=True, qkv_bias=True),
    Model("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    Model("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, qkv_bias=True),
    Model("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
    Model("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, qkv_bias=True),
    Model("Qwen2-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    Model("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, tied=True, qk_norm=True),
    Model("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    Model("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, qk_norm=True),
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, qk_norm=True),
    Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256),
    Model("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000),
    Model("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000),
)

#: Data sheets by name, in the order of a listing.
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}
MODELS: Mapping[str, Model] = {model.name: model for model in _MODELS}

# Names that other tools use for the same thing; both sides as `_key` writes them.
_ALIASES = {
    "a10080g": "a100", "a10080gb": "a100", "a100sxm": "a100", "a10080gsxm": "a100", "a100sxm480gb": "a100",
    "a10040gb": "a10040g", "h100sxm": "h100", "h10080g": "h100", "h10080gb": "h100", "h200sxm": "h200",
    "h200141gb": "h200", "h2096gb": "h20", "b200sxm": "b200", "a6000": "rtxa6000", "4090": "rtx4090",
    "3090": "rtx3090", "llama27bhf": "llama27b", "llama270bhf": "llama270b",
}  # fmt: skip


def _key(name: str) -> str:
    """Reduce a name to what distinguishes it: no case, vendor, organisation, signs or tuning suffix."""
    short = name.rsplit("/", 1)[-1].lower()
    short = re.sub(r"^nvidia[ _-]*", "", short)
    short = re.sub(r"[ _-](instruct|base|chat)$", "", short)
    short = re.sub(r"^meta[ _-]", "", short)
    short = re.sub(r"[^a-z0-9]", "", short)
    return _ALIASES.get(short, short)


def _known_name(kind: str, name: str, known: Mapping[str, object]) -> str:
    keys = {_key(candidate): candidate for candidate in known}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted]
    close = difflib.get_close_matches(wanted, keys, n=1)
    hint = f", closest is {keys[close[0]]}" if close else ""
    raise InputError(f"{kind}: no data sheet of {name!r}{hint} (known: {', '.join(known)})")


def find_gpu(name: str) -> Gpu:
    """Return the data sheet of a GPU; spelling of case, spaces, hyphens and common suffixes is free.

    Raises
    ------
    InputError
        One line with the closest name and all known ones.

    """
    return GPUS[_known_name("gpu", name, GPUS)]


def find_model(name: str) -> Model:
    """Return the shape of a model; an organisation (``Qwen/``) and ``-Instruct`` may stand in the name.

    Raises
    ------
    InputError
        One line with the closest name and all known ones.

    """
    return MODELS[_known_name("model", name, MODELS)]
