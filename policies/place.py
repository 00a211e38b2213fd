"""Placement: which node each actor goes to, and which one sits on the learner's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.traces.trace import FloatArray

#: Node of each actor, and whether it sits on the learner's GPUs.
Places = Sequence[tuple[int, bool]]


class Placement(Protocol):
    """Gives every actor a node; ``load`` is each actor's predicted decode time."""

    def most(self, view: StepView) -> int:
        """Return how many actors the placement has room for."""
        ...

    def __call__(self, view: StepView, load: FloatArray) -> Places:
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

    def most(self, view: StepView) -> int:
        """Return how many actors the cluster holds."""
        return view.most_actors

    def __call__(self, view: StepView, load: FloatArray) -> Places:
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

    def __call__(self, view: StepView, load: FloatArray) -> Places:
        """Return node and co-location of each actor."""
        return [(node, True) for node in self.nodes(view)[: len(load)]]

    def most(self, view: StepView) -> int:
        """Return how many actors fit the learner's GPUs."""
        return len(self.nodes(view))

    def nodes(self, view: StepView) -> list[int]:
        """Return the node of every actor that fits the learner's GPUs; an actor sits on one node."""
        per_node, gpus = view.cluster.gpus_per_node, view.profile.actor.gpus
        whole, rest = divmod(view.learner_gpus, per_node)
        own = [per_node] * whole + [rest]
        return [node for node, learners in enumerate(own) for _ in range(learners // gpus)]


@dataclass(frozen=True)
class Apart:
    """Actors on GPUs that the learner does not have, on the nodes from the learner's outwards."""

    def most(self, view: StepView) -> int:
        """Return how many actors fit beside the learner."""
        return len(self.nodes(view))

    def __call__(self, view: StepView, load: FloatArray) -> Places:
        """Return node and co-location of each actor."""
        return [(node, False) for node in self.nodes(view)[: len(load)]]

    def nodes(self, view: StepView) -> list[int]:
        """Return the node of every actor that fits beside the learner."""
        per_node, gpus = view.cluster.gpus_per_node, view.profile.actor.gpus
        whole, rest = divmod(view.learner_gpus, per_node)
        own = [0] * whole + [per_node - rest] + [per_node] * view.cluster.nodes
        return [node for node, left in enumerate(own[: view.cluster.nodes]) for _ in range(left // gpus)]
