"""Assignment: which actor decodes which responses, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.traces.trace import FloatArray, IntArray

Groups = tuple[IntArray, ...]


class Assignment(Protocol):
    """Splits a step's responses over a number of actors: rows of the batch, in admission order."""

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor, none empty; fewer where there is too little to split."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """An assignment that cuts one order of the batch into even blocks, whatever the number of actors."""

    @property
    def unit(self) -> str:
        """What the blocks hold equally many of: ``response`` or ``prompt``."""
        ...

    def order(self, view: StepView, predicted: FloatArray) -> IntArray:
        """Return the rows in the order in which they are cut."""
        ...


def splitter(assign: Assignment, view: StepView, predicted: FloatArray) -> Callable[[int], Groups]:
    """Return the assignment as a function of the number of actors; what does not depend on it is done once."""
    if isinstance(assign, Ordered):
        order, unit = assign.order(view, predicted), assign.unit
        return lambda actors: even_blocks(view, order, actors, unit)
    return lambda actors: assign(view, predicted, actors)


@dataclass(frozen=True)
class SortedEven:
    """Sort by predicted length and cut into blocks of equal counts, longest first (RLHFless, sec. 4.3).

    ``unit``: count single responses, or whole prompts with all their responses.
    """

    unit: Literal["response", "prompt"] = "response"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return contiguous blocks of the sorted batch."""
        return even_blocks(view, self.order(view, predicted), actors, self.unit)

    def order(self, view: StepView, predicted: FloatArray) -> IntArray:
        """Return the rows by falling length, a prompt's side by side."""
        return np.lexsort((view.sample, view.prompt, -predicted))


@dataclass(frozen=True)
class Chunked:
    """Cut the batch as it comes into blocks of equal counts, as verl hands prompts to its workers."""

    unit: Literal["response", "prompt"] = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return contiguous blocks of the batch."""
        return even_blocks(view, self.order(view, predicted), actors, self.unit)

    def order(self, view: StepView, predicted: FloatArray) -> IntArray:
        """Return the rows as they come."""
        return np.arange(len(view))


def even_blocks(view: StepView, order: IntArray, actors: int, unit: str) -> Groups:
    """Cut ``order`` into ``actors`` blocks that hold equally many responses or prompts, within one.

    There are never more blocks than responses or prompts.
    """
    if unit == "response":
        actors = min(actors, len(order))
        size, rest = divmod(len(order), actors)
        ends = np.arange(1, actors + 1) * size + np.minimum(np.arange(1, actors + 1), rest)
        starts = [0, *ends[:-1].tolist()]
        return tuple(order[a:b] for a, b in zip(starts, ends.tolist(), strict=True))
    group = view.tree.group[order]
    _, first = np.unique(group, return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    by_prompt = order[np.argsort(rank[group], kind="stable")]
    counts = np.bincount(rank[group])
    actors = min(actors, len(counts))
    ends = np.cumsum([counts[block].sum() for block in np.array_split(np.arange(len(counts)), actors)])
    return tuple(np.split(by_prompt, ends[:-1]))
