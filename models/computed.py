"""Cost profiles computed from data sheets: for a GPU or model that no measurement covers.

A roofline: an operator takes a launch floor plus the longer of moving its bytes and doing its operations,
each at a stated share of the data-sheet peak (Williams, Waterman and Patterson, "Roofline", CACM 2009).
Everything here is an estimate before any run. Fit a profile to a log as soon as there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfless.models.hardware import BF16_BYTES, Gpu, Model, find_gpu, find_model
from rlhfless.models.profile import (
    ActorShape,
    Count,
    DecodeCost,
    Functions,
    Link,
    Links,
    Memory,
    Part,
    Positive,
    PrefillCost,
    Profile,
    Seconds,
    StageCost,
)
from rlhfless.traces.errors import InputError

Share = Annotated[float, Field(gt=0, le=1)]

#: Batch sizes of a decode table. 1024 is four times vLLM's usual cap, so that larger caps need no new profile.
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

_OPERATORS_PER_LAYER = 5  # query-key-value, attention, output, gate with up, down
_TRAINING_BYTES_PER_PARAMETER = 16  # bfloat16 weight and gradient, fp32 copy, two Adam moments
_ACTORS_OF_STATIC_RUN = 3  # decode actors of the static baseline: RLHFless (arXiv 2602.22718), sec. 6.1


class Assumptions(Part):
    """What is assumed where nothing was measured; every profile names in ``source`` what it used.

    Attributes
    ----------
    memory_utilization: Share of the device memory that the engine may fill with weights and KV cache. 0.6
        is what verl's examples give an engine that shares its GPUs with the training.
    bandwidth_efficiency, compute_efficiency: Share of peak memory bandwidth and of peak operations that
        decode and prefill operators reach.
    link_efficiency: Share of the data-sheet bandwidth that a transfer between GPUs reaches.
    link_latency_seconds, node_latency_seconds: Latency of a transfer within a node and between nodes.
    operator_floor_seconds: Time of an operator on no data (launch, tail of the previous one).
    training_efficiency: Share of peak operations that the stages around generation reach, recomputation
        counted as work. A public verl run of Qwen2-7B (GPG, FSDP, 8 GPUs of unstated type) logs 0.23 to
        0.37 without it, median 0.24, which is 0.33 with it: 0.4 is on the optimistic side.
    recompute: Activations are recomputed in the backward pass (verl's default), which adds a forward.
    reward_token_seconds: Rule-based reward on the CPU. The same run took 8.0e-7 s a token (median).
    max_batch_tokens: Tokens of one prefill batch (verl's default ``max_num_batched_tokens``).
    start_seconds: Container and engine start of a cold function, before any weight is read.
    load_bytes_per_second: Rate at which a cold function reads weights. The default is the slope of load time
        over size in 90 safetensors loads of 8B and 32B models that ServerlessLLM published (one H100
        server with NVMe); its own format loads six times faster.
    warm_start_seconds, keep_alive_seconds: Start of a function that is still there, and how long it stays.
        Weights of a warm function come with the weight sync and are not counted here.

    """

    memory_utilization: Share = 0.6
    bandwidth_efficiency: Share = 0.8
    compute_efficiency: Share = 0.7
    link_efficiency: Share = 0.8
    link_latency_seconds: Seconds = 1e-5
    node_latency_seconds: Seconds = 3e-5
    operator_floor_seconds: Seconds = 5e-6
    training_efficiency: Share = 0.4
    recompute: bool = True
    reward_token_seconds: Seconds = 8.0e-7
    max_batch_tokens: Count = 8192
    start_seconds: Seconds = 10.0
    load_bytes_per_second: Positive = 3.3e9
    warm_start_seconds: Seconds = 1.0
    keep_alive_seconds: Seconds = 600.0


def profile_name(gpu: Gpu, model: Model, tensor_parallel: int) -> str:
    """Return the name of a profile, which is also its file name: ``l40s_qwen2.5-3b_tp2``."""
    return f"{gpu.name}_{model.name}_tp{tensor_parallel}".lower().replace(" ", "-")


def kv_capacity_tokens(gpu: Gpu, model: Model, tensor_parallel: int, memory_utilization: float) -> int:
    """Return the KV tokens that an actor holds: memory it may fill, less weights, over the bytes of a token.

    Activations are not subtracted; the share that ``memory_utilization`` leaves has to hold them.

    Raises
    ------
    InputError
        If the weights leave no room.

    """
    room = memory_utilization * gpu.memory_bytes - model.weight_bytes / tensor_parallel
    tokens = math.floor(room / model.kv_bytes_per_token_on_gpu(tensor_parallel))
    if tokens < 1:
        raise InputError(
            f"tensor_parallel: {model.name} has {model.weight_bytes / 1e9:.1f} GB of weights, {tensor_parallel} "
            f"{gpu.name} at memory_utilization {memory_utilization:g} hold "
            f"{memory_utilization * gpu.memory_bytes * tensor_parallel / 1e9:.1f} GB"
        )
    return tokens


def default_learner_gpus(gpu: Gpu, model: Model, actor_gpus: int) -> int:
    """Return the GPUs of three actors (RLHFless, arXiv 2602.22718, sec. 6.1), or more where training needs it.

    More are needed if 16 bytes a parameter (bfloat16 weight and gradient, fp32 copy, two Adam moments) do
    not fit in 0.9 of their memory; then the count is the next multiple of an actor's.
    """
    needed = _TRAINING_BYTES_PER_PARAMETER * model.parameters / (0.9 * gpu.memory_bytes)
    return max(_ACTORS_OF_STATIC_RUN, math.ceil(needed / actor_gpus)) * actor_gpus


def stage_costs(gpu: Gpu, model: Model, learner_gpus: int, assumptions: Assumptions) -> dict[str, StageCost]:
    """Return the stages around generation from operation counts.

    A forward pass takes 2 operations a weight and token, a backward pass twice as many (Kaplan et al.,
    arXiv 2001.08361, sec. 2.1), and recomputation one more forward. Attention over the context, optimizer
    and communication are left to the efficiency. The critic is a model of the actor's size.
    """
    rate = gpu.flops * assumptions.training_efficiency * learner_gpus
    forward = StageCost(gpus=learner_gpus, token_seconds=model.forward_flops_per_token / rate)
    passes = 4 if assumptions.recompute else 3
    update = StageCost(gpus=learner_gpus, token_seconds=passes * forward.token_seconds)
    return {
        "reward": StageCost(gpus=0, token_seconds=assumptions.reward_token_seconds),
        "old_log_prob": forward,
        "reference": forward,
        "value": forward,
        "update_critic": update,
        "update_actor": update,
    }


def assemble_profile(
    gpu: Gpu,
    model: Model,
    tensor_parallel: int,
    *,
    kind: Literal["measured", "computed"],
    decode: DecodeCost,
    prefill: PrefillCost,
    source: Mapping[str, str],
    assumptions: Assumptions,
    max_running: int = 256,
    learner_gpus: int | None = None,
    within_node: Link | None = None,
) -> Profile:
    """Complete decode and prefill costs with what is computed for every profile alike.

    ``source`` names the origin of what the caller brings; the rest is added here.

    Raises
    ------
    InputError
        If the heads cannot be divided or the weights do not fit.

    """
    learners = learner_gpus or default_learner_gpus(gpu, model, tensor_parallel)
    capacity = kv_capacity_tokens(gpu, model, tensor_parallel, assumptions.memory_utilization)
    node_rate = gpu.node_bytes_per_second * assumptions.link_efficiency
    computed_source = {
        "actor": f"computed: {assumptions.memory_utilization:g} of memory (assumed) less weights; "
        f"max_running is {'an engine default' if max_running == 256 else 'an option'}",
        "stages": f"computed from model FLOPs, efficiency {assumptions.training_efficiency:g} assumed, "
        f"{'with' if assumptions.recompute else 'no'} recomputation; reward: CPU, fitted to a public verl log",
        "memory": "computed from the model's public configuration, bfloat16",
        "links": f"computed: data sheet times {assumptions.link_efficiency:g} (assumed), latencies assumed",
        "functions": f"assumed: container and engine start {assumptions.start_seconds:g} s, warm start, keep-alive; "
        f"weights at {assumptions.load_bytes_per_second / 1e9:.3g} GB/s "
        "(default: safetensors loads that ServerlessLLM published for an H100 server)",
        "usd_per_gpu_hour": "assumed list price",
        "gpu": gpu.source,
    }
    return Profile(
        name=profile_name(gpu, model, tensor_parallel),
        model=model.name,
        gpu=gpu.name,
        kind=kind,
        actor=ActorShape(gpus=tensor_parallel, max_running=max_running, kv_capacity_tokens=capacity),
        decode=decode,
        prefill=prefill,
        stages=stage_costs(gpu, model, learners, assumptions),
        memory=Memory(weight_bytes=model.weight_bytes, kv_bytes_per_token=model.kv_bytes_per_token),
        links=Links(
            within_node=within_node or link_within_node(gpu, assumptions),
            between_nodes=Link(bytes_per_second=node_rate, latency_seconds=assumptions.node_latency_seconds),
        ),
        functions=Functions(
            cold_start_seconds=assumptions.start_seconds
            + model.weight_bytes / assumptions.load_bytes_per_second,
            warm_start_seconds=assumptions.warm_start_seconds,
            keep_alive_seconds=assumptions.keep_alive_seconds,
        ),
        usd_per_gpu_hour=gpu.usd_per_gpu_hour,
        source={**computed_source, **source},
    )


def link_within_node(gpu: Gpu, assumptions: Assumptions) -> Link:
    """Return the link between two GPUs of a node, from the data sheet."""
    return Link(
        bytes_per_second=gpu.link_bytes_per_second * assumptions.link_efficiency,
        latency_seconds=assumptions.link_latency_seconds,
    )


def roofline_decode(gpu: Gpu, model: Model, tensor_parallel: int, assumptions: Assumptions) -> DecodeCost:
    """Return the decode iteration of one actor by roofline.

    ``base(b)`` is the longer of reading the weights and multiplying ``b`` tokens with them, plus the floor
    of each operator and two all-reduces a layer; ``kv`` is the time to read the keys and values of a token.
    """
    bandwidth = gpu.memory_bytes_per_second * assumptions.bandwidth_efficiency
    rate = gpu.flops * assumptions.compute_efficiency
    # The embedding is looked up, not read; where it is tied it counts once, as output projection.
    read = BF16_BYTES * model.matmul_parameters / tensor_parallel / bandwidth
    multiply = model.forward_flops_per_token / tensor_parallel / rate
    floor = _OPERATORS_PER_LAYER * model.layers * assumptions.operator_floor_seconds
    latency, per_token = _all_reduce(gpu, model, tensor_parallel, assumptions)
    kv = model.kv_bytes_per_token_on_gpu(tensor_parallel) / bandwidth
    return DecodeCost(
        batch=BATCHES,
        base_seconds=tuple(max(read, b * multiply) + floor + latency + b * per_token for b in BATCHES),
        kv_token_seconds=(kv,) * len(BATCHES),
    )


def roofline_prefill(gpu: Gpu, model: Model, tensor_parallel: int, assumptions: Assumptions) -> PrefillCost:
    """Return the prefill cost of one actor by roofline.

    A batch adds the time to read the weights once. That makes a small batch up to twice as slow as the
    longer of reading and multiplying, and is below 5 % on a full one.
    """
    bandwidth = gpu.memory_bytes_per_second * assumptions.bandwidth_efficiency
    rate = gpu.flops * assumptions.compute_efficiency * tensor_parallel
    read = BF16_BYTES * model.matmul_parameters / tensor_parallel / bandwidth
    floor = _OPERATORS_PER_LAYER * model.layers * assumptions.operator_floor_seconds
    latency, per_token = _all_reduce(gpu, model, tensor_parallel, assumptions)
    # Only the last token of a prompt passes the output projection.
    body = model.forward_flops_per_token - 2.0 * model.vocab * model.hidden
    return PrefillCost(
        gpus=tensor_parallel,
        fixed_seconds=read + floor + latency,
        token_seconds=body / rate + per_token,
        # A causal mask leaves half of the m^2 pairs of a prompt.
        token2_seconds=model.attention_flops_per_token_pair / 2 / rate,
        max_batch_tokens=assumptions.max_batch_tokens,
    )


def _all_reduce(
    gpu: Gpu, model: Model, tensor_parallel: int, assumptions: Assumptions
) -> tuple[float, float]:
    """Return seconds a pass and a token of two ring all-reduces a layer over the hidden state."""
    if tensor_parallel == 1:
        return 0.0, 0.0
    link = link_within_node(gpu, assumptions)
    volume = 2 * (tensor_parallel - 1) / tensor_parallel * BF16_BYTES * model.hidden
    reductions = 2 * model.layers
    return reductions * link.latency_seconds, reductions * volume / link.bytes_per_second


def computed_profile(
    gpu: str | None,
    model: str | None,
    tensor_parallel: int = 1,
    *,
    learner_gpus: int | None = None,
    max_running: int = 256,
    assumptions: Assumptions | Mapping[str, Any] | None = None,
) -> Profile:
    """Return a profile of any known model on any known GPU, computed from data sheets.

    Parameters
    ----------
    gpu, model :
        Names in :data:`rlhfless.models.hardware.GPUS` and ``MODELS``, spelled freely.
    tensor_parallel :
        GPUs of one decode actor.
    learner_gpus :
        GPUs on which the stages around generation are stated; see :func:`default_learner_gpus`.
    max_running :
        Responses that an actor runs at once.
    assumptions :
        Values that replace the defaults of :class:`Assumptions`.

    Raises
    ------
    InputError
        If a name is unknown or missing, the heads cannot be divided, or the weights do not fit.

    Examples
    --------
    >>> computed_profile("H20", "Qwen2.5-7B", 2).label()
    'h20_qwen2.5-7b_tp2 [computed]'

    """
    if not gpu or not model:
        raise InputError("profile=computed: needs gpu=NAME and model=NAME")
    for option, value in (("max_running", max_running), ("learner_gpus", learner_gpus)):
        if value is not None and value < 1:
            raise InputError(f"{option}: must be at least 1 (got {value})")
    sheet, shape = find_gpu(gpu), find_model(model)
    shape.heads_per_gpu(tensor_parallel)  # refuses what the rooflines would divide by
    if assumptions is None:
        assumed = Assumptions()
    elif isinstance(assumptions, Assumptions):
        assumed = assumptions
    else:
        assumed = Assumptions.parse(dict(assumptions), "assumptions")
    return assemble_profile(
        sheet,
        shape,
        tensor_parallel,
        kind="computed",
        decode=roofline_decode(sheet, shape, tensor_parallel, assumed),
        prefill=roofline_prefill(sheet, shape, tensor_parallel, assumed),
        source={
            "decode": f"computed: roofline of the data sheet, {assumed.bandwidth_efficiency:g} of bandwidth, "
            f"{assumed.compute_efficiency:g} of FLOPs and {assumed.operator_floor_seconds * 1e6:g} us an operator "
            "assumed; no host overhead",
            "prefill": f"computed: roofline of the data sheet, {assumed.compute_efficiency:g} of FLOPs assumed",
        },
        assumptions=assumed,
        max_running=max_running,
        learner_gpus=learner_gpus,
    )
