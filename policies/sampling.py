"""Which prompts a step launches, and how many it waits for.

Most policies take the trace's steps as they are. Over-provisioning ones launch more prompts than a step trains on
and stop when enough are complete: they change which responses a step trains on. Their scores count delivered
responses only and are marked in every table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless.traces.trace import BoolArray, IntArray, Trace


@dataclass(frozen=True)
class Launch:
    """What a step sets out with: rows of the trace, and the tokens they have already.

    ``prompts`` is how many prompts must be complete for the step to go on to training; None: all.
    """

    rows: IntArray
    generated: IntArray
    prompts: int | None = None


class Sampler(Protocol):
    """Hands out launches one after the other. Holds the state of one run."""

    def launch(self) -> Launch | None:
        """Return the next step's launch, or None when everything has been delivered."""
        ...

    def settle(self, launch: Launch, delivered: BoolArray, generated: IntArray) -> None:
        """Take back what the step did not deliver; arrays have one entry per launched row."""
        ...


class Sampling(Protocol):
    """Makes the sampler of a run."""

    #: Whether steps train on other responses than the trace's.
    changes_batches: bool

    def start(self, trace: Trace) -> Sampler:
        """Return a sampler for a run of the trace."""
        ...


@dataclass(frozen=True)
class AsRecorded:
    """The trace's own steps, each to its end."""

    changes_batches = False

    def start(self, trace: Trace) -> Sampler:
        """Return a sampler of the trace's steps."""
        return _Recorded(trace)


class _Recorded:
    def __init__(self, trace: Trace) -> None:
        self._rows = iter([trace.rows_of(position) for position in range(len(trace.steps))])

    def launch(self) -> Launch | None:
        rows = next(self._rows, None)
        if rows is None:
            return None
        index = np.arange(rows.start, rows.stop)
        return Launch(index, np.zeros(len(index), dtype=np.int64))

    def settle(self, launch: Launch, delivered: BoolArray, generated: IntArray) -> None:
        """Everything was delivered."""


@dataclass(frozen=True)
class OverProvision:
    """Launch ``factor`` times the prompts of a step, wait for a step's worth, resume the rest first (APRIL).

    Aborted responses keep their tokens; their KV is gone, since the weights change, and is prefilled again. The
    prompts come in the trace's order, those of later steps early. ``factor`` 2 is the example of APRIL's
    implementation (32 prompts become 64); its default is no over-provision.
    """

    factor: float = 2.0
    changes_batches = True

    def start(self, trace: Trace) -> Sampler:
        """Return a sampler that carries aborted prompts over."""
        return _Resumed(trace, self.factor)


@dataclass(frozen=True)
class LongRounds:
    """Short rounds that drop their stragglers, and long rounds for those (RollPacker).

    A short round launches ``factor`` times the prompts of a step and takes the first step's worth; the others
    lose their tokens and join the long queue. When that holds a step's worth, a long round runs it to the end.
    RollPacker also launches more responses for a prompt than it keeps; a trace has no spare ones, so that is
    left out.
    """

    factor: float = 1.25
    changes_batches = True

    def start(self, trace: Trace) -> Sampler:
        """Return a sampler of short and long rounds."""
        return _ShortAndLong(trace, self.factor)


class _Appearances:
    """Appearances of prompts in order: each the rows of one prompt in one recorded step.

    A launch holds a prompt once; a second appearance stays for a later launch.
    """

    def __init__(self, trace: Trace) -> None:
        self._prompt = trace.prompt
        self._waiting: deque[IntArray] = deque()

    @classmethod
    def of(cls, trace: Trace) -> _Appearances:
        """Return all appearances of a trace."""
        whole = cls(trace)
        for position in range(len(trace.steps)):
            rows = trace.rows_of(position)
            whole.put(np.arange(rows.start, rows.stop))
        return whole

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, rows: IntArray) -> None:
        """Append the appearances that the rows of one launch or step make up."""
        for members in self.split(rows):
            self._waiting.append(rows[members])

    def split(self, rows: IntArray) -> list[IntArray]:
        """Return the positions of each prompt's rows, prompts in order of their first row."""
        if not len(rows):
            return []
        _, first, group = np.unique(self._prompt[rows], return_index=True, return_inverse=True)
        members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
        return [members[g] for g in np.argsort(first, kind="stable")]

    def take(self, count: int, beside: Sequence[IntArray] = ()) -> list[IntArray]:
        """Remove and return up to ``count`` appearances of different prompts, none of them in ``beside``."""
        present = {int(self._prompt[rows[0]]) for rows in beside}
        taken: list[IntArray] = []
        later: list[IntArray] = []
        while self._waiting and len(taken) < count:
            rows = self._waiting.popleft()
            code = int(self._prompt[rows[0]])
            if code in present:
                later.append(rows)
            else:
                present.add(code)
                taken.append(rows)
        self._waiting.extendleft(reversed(later))
        return taken


def _step_prompts(trace: Trace) -> int:
    """Return the prompts of the trace's first step."""
    return len(np.unique(trace.prompt[trace.rows_of(0)]))


class _Resumed:
    def __init__(self, trace: Trace, factor: float) -> None:
        self._new = _Appearances.of(trace)
        self._size = _step_prompts(trace)
        self._launched = round(factor * self._size)
        self._carried: list[tuple[IntArray, IntArray]] = []

    def launch(self) -> Launch | None:
        old = [rows for rows, _ in self._carried]
        new = self._new.take(self._launched - len(old), beside=old)
        if not old and not new:
            return None
        zeros = [np.zeros(len(rows), dtype=np.int64) for rows in new]
        generated = np.concatenate([*(tokens for _, tokens in self._carried), *zeros])
        return Launch(np.concatenate([*old, *new]), generated, min(self._size, len(old) + len(new)))

    def settle(self, launch: Launch, delivered: BoolArray, generated: IntArray) -> None:
        left = np.flatnonzero(~delivered)
        parts = [left[members] for members in self._new.split(launch.rows[left])]
        self._carried = [(launch.rows[part], generated[part]) for part in parts]


class _ShortAndLong:
    def __init__(self, trace: Trace, factor: float) -> None:
        self._new = _Appearances.of(trace)
        self._long = _Appearances(trace)
        self._size = _step_prompts(trace)
        self._launched = round(factor * self._size)

    def launch(self) -> Launch | None:
        if len(self._long) < self._size and len(self._new):
            short = self._new.take(self._launched)
            return self._of(short, min(self._size, len(short)))
        rest = self._long.take(self._size)
        return self._of(rest, None) if rest else None

    def settle(self, launch: Launch, delivered: BoolArray, generated: IntArray) -> None:
        self._long.put(launch.rows[~delivered])

    @staticmethod
    def _of(appearances: Sequence[IntArray], prompts: int | None) -> Launch:
        rows = np.concatenate(list(appearances))
        return Launch(rows, np.zeros(len(rows), dtype=np.int64), prompts)
