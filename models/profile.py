"""What things cost: one model on one GPU type with one decode-actor size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhfless.traces.errors import InputError
from rlhfless.traces.errors import first_problem as first_problem

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = NonNegative
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

#: Stages that can stand between generation and the next weights, in the order a co-located run takes them.
PREPARATION_STAGES = ("reward", "old_log_prob", "reference", "value")
LEARNING_STAGES = ("update_critic", "update_actor")


class Part(BaseModel):
    """A frozen part of a profile; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Self:
        """Build the part from plain values; ``where`` (a file or option) opens the message of an error.

        Raises
        ------
        InputError
            One line that names the place, the key and the rule.

        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{where}: {first_problem(error)}") from None


class ActorShape(Part):
    """One decode actor: its GPUs, how many responses it runs at once, and how many KV tokens it holds."""

    gpus: Count
    max_running: Count
    kv_capacity_tokens: Count


class DecodeCost(Part):
    """Iteration time ``tau(b, k) = base(b) + kv(b) * k + host_overhead``, in seconds.

    ``b`` is the number of running responses and ``k`` the resident KV tokens at the start of the iteration.
    ``base`` and ``kv`` are tabulated on ``batch`` and interpolated linearly in ``b``; below the first entry
    they keep the first value, above the last the last slope.
    """

    batch: tuple[Count, ...] = Field(min_length=1)
    base_seconds: tuple[Seconds, ...]
    kv_token_seconds: tuple[Seconds, ...]
    host_overhead_seconds: Seconds = 0.0

    @model_validator(mode="after")
    def _tables_agree(self) -> DecodeCost:
        for previous, following in zip(self.batch, self.batch[1:], strict=False):
            if following <= previous:
                raise ValueError(f"batch must increase, but {following} follows {previous}")
        for name in ("base_seconds", "kv_token_seconds"):
            if len(getattr(self, name)) != len(self.batch):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, batch has {len(self.batch)}"
                )
        return self

    def tables(self, max_running: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return base (host overhead included) and kv seconds for ``b`` in ``0..max_running``."""
        running = np.arange(max_running + 1, dtype=np.float64)
        base = _piecewise_linear(running, self.batch, self.base_seconds) + self.host_overhead_seconds
        return base, _piecewise_linear(running, self.batch, self.kv_token_seconds)


def _piecewise_linear(
    x: NDArray[np.float64], knots: tuple[int, ...], values: tuple[float, ...]
) -> NDArray[np.float64]:
    at = np.asarray(knots, dtype=np.float64)
    y = np.asarray(values, dtype=np.float64)
    result = np.interp(x, at, y)
    if len(at) > 1:
        slope = (y[-1] - y[-2]) / (at[-1] - at[-2])
        beyond = x > at[-1]
        # A falling last slope must not carry a time below zero.
        result[beyond] = np.maximum(y[-1] + slope * (x[beyond] - at[-1]), 0.0)
    return result


class PrefillCost(Part):
    """Seconds to prefill ``m`` new tokens on ``c`` cached ones: ``token*m + token2*((c+m)^2 - c^2)``.

    Every batch adds ``fixed_seconds`` and holds at most ``max_batch_tokens``. The numbers hold on ``gpus``
    GPUs.
    """

    gpus: Count
    fixed_seconds: Seconds = 0.0
    token_seconds: Seconds
    token2_seconds: Seconds = 0.0
    max_batch_tokens: Count


class StageCost(Part):
    """A stage that takes ``fixed + token * tokens`` seconds on ``gpus`` GPUs; 0 GPUs is a CPU function."""

    gpus: Annotated[int, Field(ge=0)]
    fixed_seconds: Seconds = 0.0
    token_seconds: Seconds = 0.0

    def seconds(self, tokens: float, gpus: int | None = None) -> float:
        """Return the stage's time for ``tokens`` prompt and response tokens.

        On another GPU count than the profile's, the token part scales inversely with it (perfect data
        parallelism, an approximation named in docs/model.md).
        """
        scale = 1.0 if gpus is None or not self.gpus or not gpus else self.gpus / gpus
        return self.fixed_seconds + self.token_seconds * tokens * scale


class Memory(Part):
    """Bytes of one copy of the weights, and KV bytes of one token."""

    weight_bytes: Positive
    kv_bytes_per_token: Positive


class Link(Part):
    """A transfer of ``x`` bytes takes ``latency + x / bytes_per_second`` seconds."""

    bytes_per_second: Positive
    latency_seconds: Seconds = 0.0

    def seconds(self, transferred_bytes: float) -> float:
        """Return the seconds of one transfer that has the link alone."""
        return self.latency_seconds + transferred_bytes / self.bytes_per_second


class Links(Part):
    """The links between two GPUs of one node, and of two nodes."""

    within_node: Link
    between_nodes: Link


class Functions(Part):
    """Start-up of a serverless function, and how long it stays warm after its release, in seconds."""

    cold_start_seconds: Seconds = 0.0
    warm_start_seconds: Seconds = 0.0
    keep_alive_seconds: Seconds = 0.0


class Profile(Part):
    """Costs of one model on one GPU type with one decode-actor size.

    ``kind`` says where the decode numbers come from: ``measured`` operators, ``fitted`` to a log, or
    ``computed`` from a data sheet. ``source`` says it for every part; an assumed number says so.
    """

    name: str
    model: str
    gpu: str
    kind: Literal["measured", "fitted", "computed"]
    actor: ActorShape
    decode: DecodeCost
    prefill: PrefillCost
    stages: Mapping[str, StageCost]
    memory: Memory
    links: Links
    functions: Functions = Functions()
    usd_per_gpu_hour: NonNegative = 0.0
    source: Mapping[str, str]

    @model_validator(mode="after")
    def _known_stages(self) -> Profile:
        known = PREPARATION_STAGES + LEARNING_STAGES
        for name in self.stages:
            if name not in known:
                raise ValueError(f"stages.{name} is not a stage; stages are {', '.join(known)}")
        return self

    @cached_property
    def decode_tables(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Base and kv seconds by running responses, ``0..max_running`` (host overhead included)."""
        return self.decode.tables(self.actor.max_running)

    def label(self) -> str:
        """Name the profile for an output, with a mark unless its decode numbers were measured."""
        return self.name if self.kind == "measured" else f"{self.name} [{self.kind}]"
