"""Placement: which node each actor goes to, and which one sits on the learner's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlhfless.policies.base import StepView

#: Node of each actor, and whether it sits on the learner's GPUs.
Places = Sequence[tuple[int, bool]]


class Placement(Protocol):
    """Gives every actor a node; ``load`` is each actor's predicted decode time."""

    def __call__(self, view: StepView, load: np.ndarray) -> Places:
        """Return node and co-location of each actor."""
        ...


@dataclass(frozen=True)
class ByDistance:
    """Actors in order of falling load, on the nodes from the learner's outwards.

    ``nearest`` is the paper's placement (RLHFless, sec. 4.5): the actor with most work sits on the learner's
    GPUs, where weights and KV already are. ``farthest`` is the opposite, the worst case for transfers, with
    no actor on the learner's GPUs.
    """

    order: Literal["nearest", "farthest"] = "nearest"

    def __call__(self, view: StepView, load: np.ndarray) -> Places:
        """Return node and co-location of each actor."""
        per_node = view.cluster.gpus_per_node // view.profile.actor.gpus
        nearest = self.order == "nearest"
        nodes = list(range(view.cluster.nodes))
        slots = [node for node in (nodes if nearest else nodes[::-1]) for _ in range(per_node)]
        places: list[tuple[int, bool]] = [(0, False)] * len(load)
        for rank, actor in enumerate(np.argsort(-load, kind="stable").tolist()):
            places[actor] = (slots[rank], nearest and rank == 0)
        return places


@dataclass(frozen=True)
class OnLearner:
    """All actors on the learner's GPUs: one co-located pool."""

    def __call__(self, view: StepView, load: np.ndarray) -> Places:
        """Return node and co-location of each actor."""
        per_node = view.cluster.gpus_per_node
        return [(number * view.profile.actor.gpus // per_node, True) for number in range(len(load))]
