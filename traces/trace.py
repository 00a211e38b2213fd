"""The trace: one row per sampled response, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlhfless.traces.errors import InputError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PrefixBlocks:
    """Hashes of each row's leading prompt blocks, as one flat array with offsets.

    Row ``i`` has the hashes ``values[offsets[i]:offsets[i + 1]]``; two rows share a prefix as far as their
    leading hashes are equal.
    """

    offsets: IntArray  # (rows + 1,)
    values: IntArray  # (offsets[-1],)

    def row(self, i: int) -> IntArray:
        """Return the hashes of row ``i``."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def take(self, rows: IntArray) -> PrefixBlocks:
        """Return the blocks of the given rows, in that order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        index = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - self.offsets[rows], counts)
        return PrefixBlocks(offsets, self.values[index])


@dataclass(frozen=True)
class Trace:
    """A recorded or synthetic run: one row per response, in step order.

    All arrays have one entry per response. ``prompt`` holds indices into ``prompt_ids``, so that a prompt
    keeps its number over the epochs. Lengths are in tokens. Construct through :meth:`checked` wherever the
    values come from outside.
    """

    name: str
    step: IntArray
    epoch: IntArray
    prompt: IntArray
    prompt_ids: tuple[str, ...]
    sample: IntArray
    prompt_tokens: IntArray
    response_tokens: IntArray
    answer_tokens: IntArray | None = None
    prefix_blocks: PrefixBlocks | None = None
    truncated: BoolArray | None = None
    algorithm: str = "grpo"
    model: str = ""
    source: str = ""
    max_response_tokens: int | None = None
    block_tokens: int | None = None
    reconstructed: bool = False
    _bounds: IntArray = field(init=False, repr=False, compare=False)
    _steps: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps, first = np.unique(self.step, return_index=True)
        object.__setattr__(self, "_steps", steps)
        object.__setattr__(self, "_bounds", np.append(first, len(self.step)).astype(np.int64))

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steps(self) -> IntArray:
        """The training steps present, ascending."""
        return self._steps

    def rows_of(self, position: int) -> slice:
        """Return the rows of the ``position``-th step (not the step's number)."""
        return slice(int(self._bounds[position]), int(self._bounds[position + 1]))

    def batches(self) -> Iterator[Trace]:
        """Yield the trace of each step in order."""
        for position in range(len(self._steps)):
            yield self.select(np.arange(self._bounds[position], self._bounds[position + 1]))

    def select(self, rows: IntArray) -> Trace:
        """Return a trace of the given rows, which must be in step order."""
        return replace(
            self,
            step=self.step[rows],
            epoch=self.epoch[rows],
            prompt=self.prompt[rows],
            sample=self.sample[rows],
            prompt_tokens=self.prompt_tokens[rows],
            response_tokens=self.response_tokens[rows],
            answer_tokens=None if self.answer_tokens is None else self.answer_tokens[rows],
            truncated=None if self.truncated is None else self.truncated[rows],
            prefix_blocks=None if self.prefix_blocks is None else self.prefix_blocks.take(rows),
        )

    def checked(self, where: str) -> Trace:
        """Return the trace itself if it keeps every rule of the format, in step order.

        ``where`` names the file in the message; rows count from 1 in the order given.

        Raises
        ------
        InputError
            Naming the first row that breaks a rule, and the rule.

        """
        n = len(self.step)
        if n == 0:
            raise InputError(f"{where}: the trace has no rows")
        lower = {
            "step": (self.step, 0),
            "epoch": (self.epoch, 0),
            "sample": (self.sample, 0),
            "prompt_tokens": (self.prompt_tokens, 1),
            "response_tokens": (self.response_tokens, 1),
        }
        if self.answer_tokens is not None:
            lower["answer_tokens"] = (self.answer_tokens, 1)
        for name, (values, least) in lower.items():
            if len(values) != n:
                raise InputError(f"{where}: column {name} has {len(values)} rows, step has {n}")
            bad = np.flatnonzero(values < least)
            if len(bad):
                row = int(bad[0])
                raise InputError(f"{where}: row {row + 1}: {name} is {values[row]}, must be at least {least}")
        if self.max_response_tokens is not None:
            bad = np.flatnonzero(self.response_tokens > self.max_response_tokens)
            if len(bad):
                row = int(bad[0])
                raise InputError(
                    f"{where}: row {row + 1}: response_tokens is {self.response_tokens[row]}, "
                    f"above max_response_tokens {self.max_response_tokens}"
                )
        if self.prefix_blocks is not None:
            if self.block_tokens is None or self.block_tokens < 1:
                raise InputError(f"{where}: prefix_blocks needs block_tokens of at least 1")
            if len(self.prefix_blocks.offsets) != n + 1:
                raise InputError(
                    f"{where}: prefix_blocks has {len(self.prefix_blocks.offsets) - 1} rows, step has {n}"
                )
        order = np.lexsort((self.sample, self.prompt, self.step))
        same = (
            (np.diff(self.step[order]) == 0)
            & (np.diff(self.prompt[order]) == 0)
            & (np.diff(self.sample[order]) == 0)
        )
        if same.any():
            first, second = sorted(
                int(order[i]) for i in (np.flatnonzero(same)[0], np.flatnonzero(same)[0] + 1)
            )
            raise InputError(
                f"{where}: rows {first + 1} and {second + 1}: two rows for one response "
                f"(step {self.step[first]}, prompt {self.prompt_ids[self.prompt[first]]}, "
                f"sample {self.sample[first]})"
            )
        other = (
            (np.diff(self.step[order]) == 0)
            & (np.diff(self.prompt[order]) == 0)
            & (np.diff(self.prompt_tokens[order]) != 0)
        )
        if other.any():
            first, second = sorted(int(order[i + k]) for i in np.flatnonzero(other)[:1] for k in (0, 1))
            raise InputError(
                f"{where}: rows {first + 1} and {second + 1}: prompt {self.prompt_ids[self.prompt[first]]} has "
                f"{self.prompt_tokens[first]} and {self.prompt_tokens[second]} prompt_tokens in one step"
            )
        if (np.diff(self.step) < 0).any():
            return self.select(np.argsort(self.step, kind="stable"))
        return self


@dataclass(frozen=True)
class RunLog:
    """What a training log records of each step: length statistics and stage times, no single responses.

    Arrays have one entry per logged training step, ascending; a value that a step lacks is NaN. Seconds and
    tokens. ``stages`` maps a stage name (``generation``, ``old_log_prob``, ``reference``, ``value``,
    ``reward``, ``update_actor``, ``update_critic``, ``adv``, ``testing``, ``save_checkpoint``, ``step``, ...)
    to its seconds in each step.
    """

    name: str
    source: str
    step: IntArray
    epoch: IntArray  # -1 where the log has no epoch
    response_mean: FloatArray
    response_max: FloatArray
    response_min: FloatArray
    clip_ratio: FloatArray
    prompt_mean: FloatArray
    prompt_max: FloatArray
    prompt_min: FloatArray
    total_tokens: FloatArray  # prompts and responses of the whole step
    stages: dict[str, FloatArray]
    gpus: int | None  # derived from the log's throughput where it states one
    responses: int | None  # responses a step, derived from total_tokens and the mean lengths
