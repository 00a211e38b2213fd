"""tail_isolated: unequal groups found by a threshold sweep, weighed on a distribution of lengths.

RLHFless cuts the sorted batch into equal counts and varies their number. The group of the longest responses
then sets the step's time, since it is as large as the others. Here the longest responses get small groups of
their own and the bulk is balanced or filled up behind them. :class:`TailIsolated` is the search over such
splits, a scaling part; :class:`LearnerFirst` is the placement that goes with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Literal

import numpy as np

from rlhfless.models.plan import Migration
from rlhfless.policies.assign import Groups
from rlhfless.policies.base import StepView
from rlhfless.policies.forecast import Forecast
from rlhfless.policies.guess import guess_lengths
from rlhfless.policies.place import Apart, ByDistance, OnLearner, Placement, Places
from rlhfless.policies.prewarm import NoPrewarm, Prewarming
from rlhfless.policies.scale import MinMaxScore, Scaling, Split, Work
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: Actor counts of the sweep, relative to the reference's count.
_COUNTS = (0.35, 0.5, 0.65, 0.8, 1.0, 1.2)

#: Shares of the batch that are isolated on one actor, and first sizes of growing groups relative to the mean.
_ISOLATED, _FIRST_SIZES = (0.05, 0.1, 0.2), (0.2, 0.4)

#: Splits with more than this of the reference's time or cost by the affine estimate are not looked at.
_HOPELESS = 1.3


@dataclass(frozen=True)
class TailIsolated:
    """Sweeps splits with an isolated tail and takes the one with the best forecast.

    The sweep, over the batch sorted by predicted length:

    * for each of ``bounds`` makespans M, from the lower bound to the time of one actor: groups filled from
      the longest response down as far as M allows, by the affine time ``a * longest + sum of the responses'
      own work``; all of the batch so, or the first none, one or two groups so and the rest dealt in turn over
      the fewest actors that M allows;
    * for some actor counts around the reference's: equal counts (RLHFless), dealt in turn, a share of the
      longest on one actor and the rest dealt, and groups that grow evenly from the longest to the shortest.

    The affine time drops the hopeless ones. The others are forecast (:class:`Forecast`: starts, transfers,
    waiting, migration) on one guess of the lengths, the best ``finalists`` on all ``guesses``
    (:func:`guess_lengths`), and the mean time and cost over the guesses are scored. The reference's own split
    is always among the finalists.

    Parameters
    ----------
    score
        ``dominate``: the least ``max(time / reference's, cost / reference's)``; both fall by as much as
        possible at once. ``cheapest``: the least cost among those not slower than the reference. ``minmax``:
        ``weight * time + (1 - weight) * cost``, each scaled to 0..1 over the finalists (RLHFless, sec. 4.4).
        ``ratio``: the same of time and cost over their least.
    weight
        The weight of time in ``minmax`` and ``ratio``.
    reference, reference_migration, reference_place
        What the score compares with: a scaling part, its rule for stragglers and its placement; RLHFless's by
        default.
    migration, place, prewarm
        The parts of the policy that this one plans for; the same as its own.
    margin
        By how much time counts more than forecast, in ``dominate`` and ``cheapest``. The split that is chosen is
        one whose time was guessed too low rather than too high: by 1 to 2 % of generation, measured on noisy
        workloads.
    plan_on
        ``distribution``: guesses of the lengths; ``point``: the predicted lengths alone.
    bounds, finalists, guesses
        Size of the search. Fewer guesses are made of more than 512 responses, whose means vary less, but at
        least three.

    """

    score: Literal["dominate", "cheapest", "minmax", "ratio"] = "dominate"
    weight: float = 0.7
    reference: Scaling = field(default_factory=lambda: MinMaxScore(estimate="paper"))
    reference_migration: Migration = field(default_factory=lambda: Migration(rule="local", threshold=0.7))
    reference_place: Placement = field(default_factory=ByDistance)
    migration: Migration = field(default_factory=Migration)
    place: Placement = field(default_factory=ByDistance)
    prewarm: Prewarming = field(default_factory=NoPrewarm)
    margin: float = 0.03
    plan_on: Literal["distribution", "point"] = "distribution"
    bounds: int = 8
    finalists: int = 6
    guesses: int = 6

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise InputError(f"TailIsolated: weight is {self.weight}, must be 0 to 1")
        for name in ("bounds", "finalists", "guesses"):
            if getattr(self, name) < 1:
                raise InputError(f"TailIsolated: {name} is {getattr(self, name)}, must be at least 1")

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the split with the best score, its groups in falling order of predicted time."""
        view = work.view
        if most < 1:
            raise InputError(f"an actor of profile {view.profile.name} does not fit the GPUs")
        lengths = self._lengths(work)
        lead = self.prewarm(view)[1]

        def forecast(place: Placement) -> Forecast:
            return Forecast(view, work.cached_tokens, work.prefill_seconds, place, lead)

        most_reference = min(most, self.reference_place.most(view))
        reference = by_load(work, [tuple(self.reference(work, split, most_reference))])
        times, costs = forecast(self.reference_place)(reference, lengths, self.reference_migration)
        own = forecast(self.place)
        sweep = Sweep(work, min(most, len(view)))
        candidates = sweep.splits(self.bounds, len(reference[0]))
        candidates = sweep.hopeful(candidates, reference[0], 4 * self.finalists)
        seconds, gpu_seconds = own(candidates, lengths[:1], self.migration)
        scores = self._scores(seconds[:, 0], gpu_seconds[:, 0], times[0, 0], costs[0, 0])
        best = np.argsort(scores, kind="stable")[: self.finalists]
        finalists = [*reference, *by_load(work, [candidates[i] for i in best])]
        seconds, gpu_seconds = own(finalists, lengths, self.migration)
        scores = self._scores(seconds.mean(axis=1), gpu_seconds.mean(axis=1), times.mean(), costs.mean())
        return finalists[int(np.argmin(scores))]

    def _lengths(self, work: Work) -> IntArray:
        if self.plan_on == "point":
            return work.predicted_tokens[None]
        few = max(3, self.guesses * 512 // max(len(work.view), 512))
        return guess_lengths(work.view, work.predicted_tokens, min(few, self.guesses))

    def _scores(
        self,
        seconds: FloatArray,
        gpu_seconds: FloatArray,
        reference_seconds: float,
        reference_gpu_seconds: float,
    ) -> FloatArray:
        time, cost = seconds / reference_seconds, gpu_seconds / reference_gpu_seconds
        safe = time * (1 + self.margin)
        scores: FloatArray
        if self.score == "dominate":
            scores = np.maximum(safe, cost)
        elif self.score == "cheapest":
            # Where all are slower, the fastest.
            scores = np.where(safe <= 1, cost, cost.max() + time)
        elif self.score == "minmax":
            scores = self.weight * _scaled(time) + (1 - self.weight) * _scaled(cost)
        else:
            scores = self.weight * time / time.min() + (1 - self.weight) * cost / cost.min()
        return scores


@dataclass(frozen=True)
class LearnerFirst:
    """Actors in order of falling load: on the learner's GPUs as many as fit, then beside them, then elsewhere.

    RLHFless puts one actor on the learner's GPUs and the next ones near it, where they cannot be prewarmed
    because the learner still works. But all GPUs of the learner hold the new weights: what sits there needs
    no start-up, no weights and no KV. Further nodes are taken from the last one backwards, which leaves the
    GPUs next to the learner to the stages between generation and learning.
    """

    def most(self, view: StepView) -> int:
        """Return how many actors the cluster holds."""
        return view.most_actors

    def __call__(self, view: StepView, load: FloatArray) -> Places:
        """Return node and co-location of each actor."""
        per_node = view.cluster.gpus_per_node // view.profile.actor.gpus
        beside, apart = OnLearner().nodes(view), Apart().nodes(view)
        slots = [(node, True) for node in beside]
        learner_nodes = -(-view.learner_gpus // view.cluster.gpus_per_node)
        slots += [(node, False) for node in apart if node < learner_nodes]
        slots += [(node, False) for node in reversed(apart) if node >= learner_nodes]
        # What is left of a node is partly the learner's and waits for it.
        slots += [
            (node, False)
            for node in range(learner_nodes)
            for _ in range(per_node - beside.count(node) - apart.count(node))
        ]
        places: list[tuple[int, bool]] = [(0, False)] * len(load)
        for rank, actor in enumerate(np.argsort(-load, kind="stable").tolist()):
            places[actor] = slots[rank]
        return places


def by_load(work: Work, splits: Sequence[Groups]) -> list[Groups]:
    """Return the splits with their groups in falling order of the predicted decode time, as actors are numbered."""
    load = work.exact_seconds([rows for groups in splits for rows in groups])
    ends = np.cumsum([len(groups) for groups in splits])
    return [
        tuple(groups[i] for i in np.argsort(-own, kind="stable"))
        for groups, own in zip(splits, np.split(load, ends[:-1]), strict=True)
    ]


class Sweep:
    """The splits of one step that are worth a look, by an affine estimate of their times.

    Shared by the searches over splits: this module's, and the one over scenarios of the lengths.

    With iteration time ``a + beta * b + kv * resident``, decoding a group takes ``a * longest`` plus the
    group's own work ``sum of beta * L + kv * (p * L + L * (L - 1) / 2)``, for prompts of p tokens.
    """

    def __init__(self, work: Work, most: int) -> None:
        self.most = most
        base, kv = work.view.profile.decode_tables
        running = np.arange(1, len(base))
        # Least squares of relative errors.
        design = np.stack((np.ones(len(running)), running), axis=1) / base[1:, None]
        (alone, each), *_ = np.linalg.lstsq(design, np.ones(len(running)), rcond=None)
        length = work.predicted_tokens.astype(np.float64)
        self._longest = max(alone, 0.0) * length
        self._own = max(each, 0.0) * length + kv[len(kv) // 4] * length * (
            work.view.prompt_tokens + (length - 1) / 2
        )
        self._order = np.lexsort((work.view.sample, work.view.prompt, -work.predicted_tokens))

    def splits(self, bounds: int, count: int) -> list[Groups]:
        """Return the splits of the sweep; ``count`` is the reference's number of actors."""
        n, most, order = len(self._order), self.most, self._order
        # Lists: single numbers are looked up, some hundred times.
        longest = self._longest[order].tolist()
        own = [0.0, *np.cumsum(self._own[order]).tolist()]
        #: Where the groups of the longest responses end, and over how many actors the rest is dealt.
        found: dict[tuple[tuple[int, ...], int], None] = {}
        low = max(longest[0] + own[1], own[-1] / most)
        for bound in np.geomspace(low, max(longest[0] + own[-1], low), bounds).tolist():
            cuts = [0]
            while cuts[-1] < n and len(cuts) <= most:
                fits = bisect_right(own, own[cuts[-1]] + bound - longest[cuts[-1]]) - 1
                cuts.append(min(max(fits, cuts[-1] + 1), n))
            if cuts[-1] == n:
                found[tuple(cuts), 0] = None
            for isolated in range(min(3, len(cuts))):
                rest = cuts[isolated]
                room = bound - longest[rest] if rest < n else 0.0
                if room > 0:
                    dealt = min(ceil((own[-1] - own[rest]) / room), n - rest)
                    if isolated + dealt <= most:
                        found[tuple(cuts[: isolated + 1]), dealt] = None
        for actors in sorted({min(max(round(count * share), 1), most) for share in _COUNTS}):
            found[tuple(_even(n, np.ones(actors))), 0] = None
            found[(0,), actors] = None
            for share in _ISOLATED:
                tail = max(int(share * n), 1)
                if tail < n / actors and actors > 1:
                    found[(0, tail), min(actors - 1, n - tail)] = None
            for first in _FIRST_SIZES:
                found[tuple(_even(n, np.linspace(first, 2 - first, actors))), 0] = None
        return [self._groups(cuts, dealt) for cuts, dealt in found]

    def _groups(self, cuts: tuple[int, ...], dealt: int) -> Groups:
        rest = self._order[cuts[-1] :]
        return tuple(self._order[i:j] for i, j in pairwise(cuts)) + tuple(
            rest[actor::dealt] for actor in range(dealt)
        )

    def hopeful(self, splits: Sequence[Groups], reference: Groups, most: int) -> list[Groups]:
        """Return up to ``most`` splits that may be as good as the reference, with groups in falling order."""
        ordered, time, cost = self.estimate([reference, *splits])
        rating = np.maximum(time / time[0], cost / cost[0])[1:]
        best = np.argsort(rating, kind="stable")[:most]
        kept = [i + 1 for i in best.tolist() if rating[i] <= _HOPELESS] or [int(best[0]) + 1]
        return [ordered[i] for i in kept]

    def estimate(self, splits: Sequence[Groups]) -> tuple[list[Groups], FloatArray, FloatArray]:
        """Return splits with their groups in falling order of time, and time and cost of each, all affine.

        Time is that of the slowest group in seconds, cost the sum of all.
        """
        counts = [len(groups) for groups in splits]
        rows = np.concatenate([rows for groups in splits for rows in groups])
        sizes = np.array([len(rows) for groups in splits for rows in groups])
        starts = np.cumsum(sizes) - sizes
        load = np.maximum.reduceat(self._longest[rows], starts) + np.add.reduceat(self._own[rows], starts)
        first = np.cumsum(counts) - np.array(counts)
        ordered = [
            tuple(groups[j] for j in np.argsort(-load[start : start + count], kind="stable"))
            for groups, start, count in zip(splits, first.tolist(), counts, strict=True)
        ]
        return ordered, np.maximum.reduceat(load, first), np.add.reduceat(load, first)


def _even(n: int, sizes: FloatArray) -> list[int]:
    """Return where groups begin and end that share n responses in proportion to sizes that do not fall."""
    ends = np.floor(np.cumsum(sizes / sizes.sum()) * n + 1e-6).astype(np.int64)
    # None is empty: sizes below one come first, and a size of one or more moves the floor.
    return [0, *np.maximum(ends, np.arange(1, len(sizes) + 1)).tolist()]


def _scaled(values: FloatArray) -> FloatArray:
    spread = float(np.ptp(values))
    return (values - values.min()) / spread if spread > 0 else np.zeros_like(values)
