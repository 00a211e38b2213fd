"""Placement by a platform that knows nothing of learners, weights and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.policies.place import Places
from rlhfless.traces.trace import FloatArray


@dataclass(frozen=True)
class Anywhere:
    """Every actor on a node with room, all places alike, none together with the learner.

    What RLHFless's locality-aware placement is compared with; the paper does not say where functions land
    without it.
    """

    def most(self, view: StepView) -> int:
        """Return how many actors the cluster holds."""
        return view.most_actors

    def __call__(self, view: StepView, load: FloatArray) -> Places:
        """Return node and co-location of each actor."""
        per_node = view.cluster.gpus_per_node // view.profile.actor.gpus
        slots = view.rng.permutation(np.repeat(np.arange(view.cluster.nodes), per_node))
        return [(int(node), False) for node in slots[: len(load)]]
