"""Straggler rules whose parameters follow from the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless.models.decode import DecodePool
from rlhfless.models.migration import decode_actors
from rlhfless.models.plan import Migration
from rlhfless.models.profile import PREPARATION_STAGES
from rlhfless.policies.assign import Groups
from rlhfless.policies.base import StepView
from rlhfless.traces.trace import IntArray


class Migrating(Protocol):
    """Chooses the straggler rule of a step, given the predicted lengths and the actors' responses."""

    def __call__(self, view: StepView, predicted_tokens: IntArray, groups: Groups) -> Migration:
        """Return the migration part of the plan."""
        ...


@dataclass(frozen=True)
class RefittedCut:
    """RLHFuse's global cut, with the threshold that would have been best on the predicted lengths.

    RLHFuse finds the share of the batch at which it cuts by simulating the length distribution, and again as
    that drifts. Here each candidate is decoded on the predicted lengths; the estimated end of preparation decides,
    in which the complete responses are prepared on the freed GPUs from the cut on, and the rest after
    generation. Links are left out of the estimate. Ties go to the later cut.

    ``thresholds`` are shares of the batch complete; ``keep`` as in :class:`Migration`.
    """

    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    keep: int | None = None

    def __call__(self, view: StepView, predicted_tokens: IntArray, groups: Groups) -> Migration:
        """Return the cut with the earliest estimated end."""
        rules = [Migration(rule="global", threshold=share, keep=self.keep) for share in self.thresholds[::-1]]
        ends = [self._end(view, predicted_tokens, groups, rule) for rule in rules]
        return rules[int(np.argmin(ends))]

    def _end(self, view: StepView, predicted: IntArray, groups: Groups, rule: Migration) -> float:
        room = np.maximum(view.profile.actor.kv_capacity_tokens - view.prompt_tokens, 1)
        lengths = np.minimum(predicted, room)
        pool = DecodePool(
            view.profile, view.prompt_tokens, lengths, view.tree.group, len(groups), view.options.engine
        )
        for actor, rows in enumerate(groups):
            pool.add(actor, rows)
        decoded = decode_actors(pool, rule, lambda source, target, size: 0.0, 0.0)
        tokens = view.prompt_tokens + lengths
        generated = float(pool.finish.max())
        costs = [view.profile.stages[s] for s in view.stages if s in PREPARATION_STAGES]
        if decoded.cut is None or not decoded.freed:
            return generated + sum(cost.seconds(float(tokens.sum())) for cost in costs)
        complete = float(tokens[pool.finish <= decoded.cut].sum())
        freed = len(decoded.freed) * view.profile.actor.gpus
        early = decoded.cut + sum(cost.seconds(complete, freed) for cost in costs)
        return max(generated, early) + sum(cost.seconds(float(tokens.sum()) - complete) for cost in costs)
