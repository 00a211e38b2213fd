"""Scaling: how many decode actors a step gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlhfless.models.decode import block_times
from rlhfless.policies.assign import Groups
from rlhfless.policies.base import StepView
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: Splits the batch over so many actors.
Split = Callable[[int], Groups]


@dataclass(frozen=True)
class Work:
    """What a scaling rule plans on: predicted lengths, and the KV that prefill brings along."""

    view: StepView
    predicted_tokens: IntArray
    cached_tokens: IntArray
    prefill_seconds: float

    def exact_seconds(self, groups: Sequence[IntArray]) -> FloatArray:
        """Return each group's decode time on the predicted lengths, by the replay's own kernel."""
        view = self.view
        return block_times(
            view.profile,
            view.prompt_tokens,
            self.predicted_tokens,
            view.tree.group,
            groups,
            self.cached_tokens,
            view.options.engine,
        )

    def paper_seconds(self, groups: Sequence[IntArray]) -> FloatArray:
        """Return each group's TPOT times its longest predicted length (RLHFless, sec. 4.4 and 4.5).

        The paper profiles TPOT with dummy batches at several maximum lengths and prints no formula. Here it
        is the iteration time at the group's initial batch, all of it half way to the longest length; a group
        beyond ``max_running`` takes several such waves.
        """
        base, kv = self.view.profile.decode_tables
        rows, first, count = _flat(groups)
        running = np.minimum(count, self.view.profile.actor.max_running)
        longest = np.maximum.reduceat(self.predicted_tokens[rows], first).astype(np.float64)
        prompt = np.add.reduceat(self.view.prompt_tokens[rows], first) / count
        tpot = base[running] + kv[running] * running * (prompt + longest / 2)
        seconds: FloatArray = tpot * longest * np.ceil(count / running)
        return seconds

    def prefix_tokens(self, groups: Sequence[IntArray]) -> IntArray:
        """Return the KV tokens that prefill sends to each group's actor, every prompt once."""
        rows, _, count = _flat(groups)
        own = np.repeat(np.arange(len(groups)), count)
        prompts = len(self.view.tree.prompt_tokens)
        _, once = np.unique(own * prompts + self.view.tree.group[rows], return_index=True)
        sums = np.bincount(own[once], weights=self.cached_tokens[rows[once]], minlength=len(groups))
        return sums.astype(np.int64)


def _flat(groups: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Return all groups' rows one after the other, where each group begins, and its size."""
    count = np.fromiter(map(len, groups), dtype=np.int64, count=len(groups))
    return np.concatenate(groups), np.cumsum(count) - count, count


class Scaling(Protocol):
    """Chooses the number of actors, and with it the groups."""

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the chosen split; ``most`` is how many actors the GPUs allow."""
        ...


@dataclass(frozen=True)
class FixedActors:
    """Always ``actors`` actors, or as many as the GPUs allow if those are fewer; null takes all they allow."""

    actors: int | None = None

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise InputError(f"FixedActors: actors is {self.actors}, must be at least 1")

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the split over the fixed number."""
        if most < 1:
            raise InputError(f"an actor of profile {work.view.profile.name} does not fit the GPUs")
        return split(min(self.actors or most, most, len(work.view)))


@dataclass(frozen=True)
class MinMaxScore:
    """The count that minimises ``weight * time + (1 - weight) * cost``, each scaled to 0..1 over the counts.

    RLHFless, sec. 4.4: time is the slowest actor's, cost the GPU seconds of all, and the default weight
    (lambda) 0.7. The scaling to 0..1 makes the choice depend on the range of counts; counts that break the
    locality condition are left out before it, and where all break it, the smallest is taken. Ties go to the
    smaller count. Where the learner's GPUs are billed while they wait, they count in the cost until the slowest
    actor ends.

    Parameters
    ----------
    weight
        The weight of time.
    estimate
        ``paper``: TPOT at the initial batch times the longest length, which overstates large batches, so that
        cost may fall as actors are added; ``exact``: the decode time on the predicted lengths.
    least, most
        Range of counts; null ``most`` is what the GPUs allow.
    locality
        Which condition keeps transfers hidden (sec. 4.5), with actors placed by falling load from the
        learner outwards, the first of them on its GPUs: ``none``; ``printed``, model transfer + KV transfer +
        decode of every other actor <= prefill + decode of the first; or ``exact``, in which the KV transfer
        cannot begin before the prefill has ended, and one link sends it to the actors in turn.

    """

    weight: float = 0.7
    estimate: Literal["paper", "exact"] = "exact"
    least: int = 1
    most: int | None = None
    locality: Literal["none", "printed", "exact"] = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise InputError(f"MinMaxScore: weight is {self.weight}, must be 0 to 1")
        if self.least < 1:
            raise InputError(f"MinMaxScore: least is {self.least}, must be at least 1")

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the split with the best score."""
        highest = min(most if self.most is None else min(self.most, most), len(work.view))
        if self.least > highest:
            raise InputError(f"scaling from {self.least} actors on, the GPUs allow {highest}")
        splits = [split(actors) for actors in range(self.least, highest + 1)]
        flat = [group for groups in splits for group in groups]
        seconds = work.exact_seconds(flat) if self.estimate == "exact" else work.paper_seconds(flat)
        ends = np.cumsum([len(groups) for groups in splits])
        times = np.split(seconds, ends[:-1])
        allowed = list(range(len(splits)))
        if self.locality != "none":
            sent = np.split(work.prefix_tokens(flat), ends[:-1])
            allowed = [i for i in allowed if self._hidden(work, sent[i], times[i])] or [0]
        slowest = np.array([times[i].max() for i in allowed])
        cost = np.array([times[i].sum() for i in allowed]) * work.view.profile.actor.gpus
        if work.view.options.billing.learner_waiting:
            cost = cost + slowest * work.view.learner_gpus
        score = self.weight * _scaled(slowest) + (1 - self.weight) * _scaled(cost)
        return splits[allowed[int(np.argmin(score))]]

    def _hidden(self, work: Work, sent: IntArray, decode: FloatArray) -> bool:
        """Tell whether every other actor ends no later than the one beside the learner."""
        view = work.view
        memory, links = view.profile.memory, view.profile.links
        per_node = view.cluster.gpus_per_node // view.profile.actor.gpus
        near = per_node * -(-view.learner_gpus // view.cluster.gpus_per_node)
        falling = np.argsort(-decode, kind="stable")
        limit = work.prefill_seconds + decode[falling[0]]
        # By rank: those within the learner's nodes, then those on other ones.
        for link, numbers in (
            (links.within_node, falling[1:near]),
            (links.between_nodes, falling[max(near, 1) :]),
        ):
            model = link.seconds(memory.weight_bytes)
            size = sent[numbers] * memory.kv_bytes_per_token
            kv = np.where(size > 0, link.latency_seconds + size / link.bytes_per_second, 0.0)
            if self.locality == "printed":
                start = model + kv
            else:
                start = max(model, work.prefill_seconds) + np.cumsum(kv)
            if (start + decode[numbers] > limit).any():
                return False
        return True


def _scaled(values: FloatArray) -> FloatArray:
    spread = values.max() - values.min()
    if spread <= 0:
        return np.zeros_like(values)
    scaled: FloatArray = (values - values.min()) / spread
    return scaled
