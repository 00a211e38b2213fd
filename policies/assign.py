"""Assignment: which actor decodes which responses, and in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.traces.trace import FloatArray, IntArray

Groups = tuple[IntArray, ...]


class Assignment(Protocol):
    """Splits a step's responses over a number of actors: rows of the batch, in admission order."""

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor, none empty; fewer where there is too little to split."""
        ...


@dataclass(frozen=True)
class SortedEven:
    """Sort by predicted length and cut into blocks of equal counts, longest first (RLHFless, sec. 4.3).

    ``unit``: count single responses, or whole prompts with all their responses.
    """

    unit: Literal["response", "prompt"] = "response"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return contiguous blocks of the sorted batch."""
        order = np.lexsort((view.sample, view.prompt, -predicted))
        return even_blocks(view, order, actors, self.unit)


@dataclass(frozen=True)
class Chunked:
    """Cut the batch as it comes into blocks of equal counts, as verl hands prompts to its workers."""

    unit: Literal["response", "prompt"] = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return contiguous blocks of the batch."""
        return even_blocks(view, np.arange(len(view)), actors, self.unit)


def even_blocks(view: StepView, order: IntArray, actors: int, unit: str) -> Groups:
    """Cut ``order`` into ``actors`` blocks that hold equally many responses or prompts, within one.

    There are never more blocks than responses or prompts.
    """
    if unit == "response":
        return tuple(np.array_split(order, min(actors, len(order))))
    group = view.tree.group[order]
    _, first = np.unique(group, return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    by_prompt = order[np.argsort(rank[group], kind="stable")]
    counts = np.bincount(rank[group])
    actors = min(actors, len(counts))
    ends = np.cumsum([counts[block].sum() for block in np.array_split(np.arange(len(counts)), actors)])
    return tuple(np.split(by_prompt, ends[:-1]))
