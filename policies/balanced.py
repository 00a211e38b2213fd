"""Assignment by equal loads: chance, turns, and the classical partition heuristics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless.policies import partition
from rlhfless.policies.assign import Groups
from rlhfless.policies.base import StepView
from rlhfless.traces.trace import FloatArray, IntArray

#: What is assigned as one item: a response, or a prompt with all its responses, which then share its KV.
Unit = Literal["response", "prompt"]

#: What an actor's items are summed by: predicted response tokens, or verl's training work
#: ``w(L) = 24576 L + L^2`` with L the tokens of prompt and response (linear layers and attention of a 7B model).
Workload = Literal["tokens", "verl"]


@dataclass(frozen=True)
class Random:
    """A random split into equal counts, from the view's generator."""

    unit: Unit = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor."""
        rows = np.arange(len(view))
        item = items(view, rows, self.unit)
        owner = view.rng.permutation(np.arange(int(item.max()) + 1) % actors)
        return by_owner(rows, owner[item])


@dataclass(frozen=True)
class RoundRobin:
    """The batch dealt out in turn, as it comes."""

    unit: Unit = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor."""
        return deal(view, np.arange(len(view)), actors, self.unit)


@dataclass(frozen=True)
class Lpt:
    """Longest processing time first: from the largest item down, each to the actor with the least work."""

    unit: Unit = "prompt"
    workload: Workload = "tokens"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor, longest responses first."""
        rows = longest_first(view, predicted)
        item, load = loads(view, predicted, rows, self.unit, self.workload)
        return by_owner(rows, partition.lpt(load, actors)[item])


@dataclass(frozen=True)
class Multifit:
    """MULTIFIT: bisection on a capacity that first-fit decreasing packs into the actors.

    Its counts may differ widely: it fills actors one after the other, and does not spread.
    """

    iterations: int = 7
    unit: Unit = "prompt"
    workload: Workload = "tokens"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor, longest responses first."""
        rows = longest_first(view, predicted)
        item, load = loads(view, predicted, rows, self.unit, self.workload)
        return by_owner(rows, partition.multifit(load, actors, self.iterations)[item])


@dataclass(frozen=True)
class KarmarkarKarp:
    """Largest differencing; with ``equal_size`` also equal counts of items, as verl balances its batches."""

    equal_size: bool = True
    unit: Unit = "prompt"
    workload: Workload = "tokens"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return one array of rows per actor, longest responses first."""
        rows = longest_first(view, predicted)
        item, load = loads(view, predicted, rows, self.unit, self.workload)
        return by_owner(rows, partition.karmarkar_karp(load, actors, equal_size=self.equal_size)[item])


def longest_first(view: StepView, predicted: FloatArray) -> IntArray:
    """Return the rows in falling order of predicted length, equal ones of a prompt together."""
    return np.lexsort((view.sample, view.prompt, -predicted))


def items(view: StepView, rows: IntArray, unit: Unit) -> IntArray:
    """Return the item of each of ``rows``, numbered in the order in which items appear there."""
    if unit == "response":
        return np.arange(len(rows))
    _, first, inverse = np.unique(view.tree.group[rows], return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]


def loads(
    view: StepView, predicted: FloatArray, rows: IntArray, unit: Unit, workload: Workload = "tokens"
) -> tuple[IntArray, FloatArray]:
    """Return the item of each of ``rows``, and each item's load."""
    item = items(view, rows, unit)
    load = predicted[rows]
    if workload == "verl":
        tokens = view.prompt_tokens[rows] + load
        load = 24576 * tokens + tokens**2
    return item, np.bincount(item, weights=load).astype(np.float64)


def by_owner(rows: IntArray, owner: IntArray) -> Groups:
    """Return each actor's rows, in their order; ``owner`` has an entry for each of ``rows``."""
    ends = np.cumsum(np.bincount(owner))
    return tuple(np.split(rows[np.argsort(owner, kind="stable")], ends[:-1]))


def deal(view: StepView, rows: IntArray, actors: int, unit: Unit) -> Groups:
    """Deal rows over actors in turn; of sorted rows, the first actor gets the longest."""
    return by_owner(rows, items(view, rows, unit) % actors)
