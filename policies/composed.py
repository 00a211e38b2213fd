"""A policy put together from parts: prediction, assignment, scaling, prefill, migration, placement, prewarming."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlhfless.models.plan import (
    ActorPlan,
    Learner,
    Migration,
    Plan,
    Platform,
    Predicted,
    Prefill,
    Preparation,
)
from rlhfless.policies.assign import Assignment, Chunked, splitter
from rlhfless.policies.base import StepView
from rlhfless.policies.migrate import Migrating
from rlhfless.policies.place import ByDistance, Placement
from rlhfless.policies.predict import Ewma, Predictor
from rlhfless.policies.prefill import LocalPrefill, Prefilling
from rlhfless.policies.prewarm import NoPrewarm, Prewarming
from rlhfless.policies.sampling import AsRecorded, Sampling
from rlhfless.policies.scale import FixedActors, Scaling, Work
from rlhfless.traces.trace import IntArray


@dataclass(frozen=True)
class Composed:
    """Plans a step by parts. A published system is a set of parts, written down in ``conf/policy/``.

    Parameters
    ----------
    name
        Stands in plans and tables.
    platform
        ``serverless``: functions are billed from invocation to release. ``serverful``: all GPUs in use are
        held for the whole step.
    predict, assign, scale, prefill, migration, place, prewarm
        The parts.
    preparation, overlap_preparation
        Where the stages between generation and learning run, and whether they begin at a global cut
        (:class:`~rlhfless.models.plan.Plan`).
    sampling
        Which prompts a step launches; all but the default change what a step trains on.
    sees_true_lengths
        The predictor gets the true lengths; only for oracles.

    """

    name: str
    platform: Platform = "serverless"
    predict: Predictor = field(default_factory=Ewma)
    assign: Assignment = field(default_factory=Chunked)
    scale: Scaling = field(default_factory=FixedActors)
    prefill: Prefilling = field(default_factory=LocalPrefill)
    migration: Migration | Migrating = field(default_factory=Migration)
    place: Placement = field(default_factory=ByDistance)
    prewarm: Prewarming = field(default_factory=NoPrewarm)
    preparation: Preparation = "separate"
    overlap_preparation: bool = False
    sampling: Sampling = field(default_factory=AsRecorded)
    sees_true_lengths: bool = False

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        predicted = self.predict(view)
        tokens = np.maximum(np.rint(predicted), 1).astype(np.int64)
        if view.generated is not None:
            tokens = np.maximum(tokens, view.generated + 1)
        prefill = self.prefill(view)
        cached, prefill_seconds = _prefilled(view, prefill)
        work = Work(view, tokens, cached, prefill_seconds)

        split = splitter(self.assign, view, predicted)
        groups = self.scale(work, split, self.place.most(view))
        load = work.exact_seconds(groups)
        # Actors are numbered by falling load, so that number 0 is the one beside the learner.
        falling = np.argsort(-load, kind="stable")
        groups, load = tuple(groups[number] for number in falling), load[falling]
        migration = self.migration
        if not isinstance(migration, Migration):
            migration = migration(view, tokens, groups)
        prewarm, lead = self.prewarm(view)
        gpus = view.profile.actor.gpus
        actors = tuple(
            ActorPlan(gpus=gpus, node=node, responses=rows, prewarm_seconds=lead, colocated=colocated)
            for rows, (node, colocated) in zip(groups, self.place(view, load), strict=True)
        )
        generation = prefill_seconds + float(load.max())
        billed = generation * gpus * len(actors) if self.platform == "serverful" else float(load.sum()) * gpus
        return Plan(
            step=view.step,
            policy=self.name,
            platform=self.platform,
            actors=actors,
            learner=Learner(gpus=view.learner_gpus),
            prefill=prefill,
            migration=migration,
            preparation=self.preparation,
            overlap_preparation=self.overlap_preparation,
            prewarm=prewarm,
            predicted=Predicted(generation_seconds=generation, gpu_seconds=billed),
            predicted_tokens=tokens,
        )


def _prefilled(view: StepView, prefill: Prefill) -> tuple[IntArray, float]:
    """Return the KV tokens each response finds on its actor, and the prefill actor's seconds."""
    if prefill.mode == "local":
        return np.zeros(len(view), dtype=np.int64), 0.0
    tree, limit = view.tree, prefill.shared_prefix_tokens
    return tree.truncated(limit)[tree.group], tree.prefill_seconds(view.profile, prefill.gpus, limit)
