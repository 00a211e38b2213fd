"""Plans under uncertain lengths: sample-average approximation over scenarios, with the local cut as recourse.

A step is split over actors before its lengths are known; what happens then, stragglers cut and moved included,
follows from the lengths. With f(x, L) the objective of split x on lengths L, the split sought minimises
``E f(x, L)``, or the mean of the worst share of it. The expectation is replaced by the mean over scenarios,
draws of all lengths of the step, the same for every split (common random numbers; Kleywegt, Shapiro and
Homem-de-Mello, SIAM J. Optim. 12, 2002).

:class:`SampleAverage` is the planner, a scaling part of a policy. What it knows is a part of its own
(:class:`~rlhfless.policies.guess.LengthModel`): a distribution; the predicted lengths alone (planning on point
predictions); or, with an oracle for a predictor, the true lengths (the clairvoyant). Search, budget, placement
and cut are the same, so that plans differ by the information alone. :func:`optimality_gap` estimates what more
search could gain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, sqrt

import numpy as np
from scipy.special import stdtrit

from rlhfless.models.plan import Migration
from rlhfless.policies.assign import Groups, SortedEven
from rlhfless.policies.forecast import Forecast
from rlhfless.policies.guess import FromHistory, LengthModel
from rlhfless.policies.place import ByDistance, Placement
from rlhfless.policies.prewarm import NoPrewarm, Prewarming
from rlhfless.policies.scale import Split, Work
from rlhfless.policies.tail_isolated import Sweep, by_load
from rlhfless.solver.objective import Goal
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import BoolArray, FloatArray, IntArray

#: Even splits that a goal is resolved on: at most so many actor counts.
_REFERENCE_COUNTS = 6

#: Scenarios become fewer for more responses than this.
_MANY = 4096

#: Chance of one more move before a neighbour is looked at, so that a split that no single move improves can be left.
_ANOTHER_MOVE = 0.25

#: Scenarios on which the candidates of the sweep are first looked at, and how many of them.
_FIRST_SCENARIOS, _FIRST_CANDIDATES = 4, 32


@dataclass(frozen=True)
class Score:
    """A goal's value in each of several scenarios; all arrays have one entry a scenario.

    A limit cannot hold for sure when lengths are not known. Each part by which a limit is exceeded
    therefore costs ``overrun`` times as much: the value of ``cost`` is the cost over the reference's least plus
    ``overrun * max(time / limit - 1, 0)``, and that of ``time`` the same with the two exchanged.
    """

    time_weight: FloatArray
    cost_weight: FloatArray
    offset: FloatArray
    time_limit: FloatArray
    cost_limit: FloatArray
    overrun: float

    @classmethod
    def of(cls, goal: Goal, seconds: FloatArray, gpu_seconds: FloatArray, overrun: float) -> Score:
        """Resolve a goal, given the reference's times and costs in each scenario, shape (candidates, scenarios)."""
        objectives = [goal.resolve(s, c) for s, c in zip(seconds.T, gpu_seconds.T, strict=True)]
        unit = np.ones(seconds.shape[1])
        if goal.kind == "cost":
            unit = gpu_seconds.min(axis=0)
        elif goal.kind == "time":
            unit = seconds.min(axis=0)
        return cls(
            time_weight=np.array([one.time_weight for one in objectives]) / unit,
            cost_weight=np.array([one.cost_weight for one in objectives]) / unit,
            offset=np.array([one.offset for one in objectives]),
            time_limit=np.array([one.time_limit for one in objectives]),
            cost_limit=np.array([one.cost_limit for one in objectives]),
            overrun=overrun,
        )

    def __call__(self, seconds: FloatArray, gpu_seconds: FloatArray) -> FloatArray:
        """Return the values; times and costs have shape (..., scenarios)."""
        over = np.maximum(seconds / self.time_limit - 1, 0) + np.maximum(gpu_seconds / self.cost_limit - 1, 0)
        value: FloatArray = (
            self.offset + self.time_weight * seconds + self.cost_weight * gpu_seconds + self.overrun * over
        )
        return value

    def first(self, scenarios: int) -> Score:
        """Return the score of the first scenarios alone."""
        arrays = ("time_weight", "cost_weight", "offset", "time_limit", "cost_limit")
        return replace(self, **{name: getattr(self, name)[:scenarios] for name in arrays})


def worst_mean(values: FloatArray, share: float) -> FloatArray:
    """Return the mean of the worst ``share`` of the last axis: the expectation for 1, else CVaR.

    Conditional value at risk of equally likely scenarios (Rockafellar and Uryasev, J. Risk 2, 2000): the
    scenario on the border counts in part.
    """
    n = values.shape[-1]
    weight = np.clip(share * n - np.arange(n), 0.0, 1.0)
    mean: FloatArray = -np.sort(-values, axis=-1) @ weight / weight.sum()
    return mean


@dataclass(frozen=True)
class SampleAverage:
    """The split with the least sample average of a goal over scenarios of the lengths.

    1. Draw ``scenarios`` of the lengths; resolve the goal in each on even splits of its own sorted lengths.
    2. Forecast the splits of :class:`~rlhfless.policies.tail_isolated.Sweep` (on the predicted lengths), first
       the most promising by the affine estimate on four scenarios, then the best ``finalists`` on all.
    3. Descend from the best by random moves, ``rounds`` times the best of ``neighbours``: rows of one actor
       to another, rows exchanged, an actor split, two merged, two cut anew. Which rows is decided by chance
       and by the order of the predictions, never by a scenario.
    4. Score the last ``finalists`` splits of the descent on ``fresh`` new scenarios and take the best: the value
       by which a split was found is biased towards good (optimiser's curse).

    Parameters
    ----------
    goal
        What is minimised.
    lengths
        What is known of the lengths.
    share
        1: the expectation; less: the mean of the worst share of the scenarios (CVaR).
    overrun
        What exceeding a limit of the goal costs (:class:`Score`).
    migration, place, prewarm
        The parts of the policy that this one plans for; the same as its own. ``migration`` is the recourse.
    scenarios, fresh, finalists, rounds, neighbours
        Size of the search. Above 4,096 responses, scenarios become fewer in proportion, at least a quarter.
    seconds
        Wall time after which no round begins; 0 takes the best of the sweep. Plans under a time limit
        cannot be repeated exactly, so the default is none.

    """

    goal: Goal = field(default_factory=Goal)
    lengths: LengthModel = field(default_factory=FromHistory)
    share: float = 1.0
    overrun: float = 5.0
    migration: Migration = field(default_factory=Migration)
    place: Placement = field(default_factory=ByDistance)
    prewarm: Prewarming = field(default_factory=NoPrewarm)
    scenarios: int = 12
    fresh: int = 16
    finalists: int = 6
    rounds: int = 6
    neighbours: int = 4
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"SampleAverage: share is {self.share}, must be above 0 and at most 1")
        if self.overrun < 0:
            raise InputError(f"SampleAverage: overrun is {self.overrun}, must be at least 0")
        for name, least in (
            ("scenarios", 1), ("fresh", 1), ("finalists", 1), ("rounds", 0), ("neighbours", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise InputError(f"SampleAverage: {name} is {getattr(self, name)}, must be at least {least}")
        if self.seconds is not None and self.seconds < 0:
            raise InputError(f"SampleAverage: seconds is {self.seconds}, must be at least 0")

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the chosen split, its groups in falling order of predicted time."""
        if most < 1:
            raise InputError(f"an actor of profile {work.view.profile.name} does not fit the GPUs")
        search = Search(self, work, min(most, len(work.view)))
        found = search.run(search.draw(self.scenarios))
        if len(found) == 1:
            return found[0]
        fresh = search.values(found, search.draw(self.fresh))
        return found[int(np.argmin(fresh))]


@dataclass(frozen=True)
class Scenarios:
    """Lengths of a step, shape (scenarios, responses), and the goal resolved in each."""

    lengths: IntArray
    score: Score

    def first(self, count: int) -> Scenarios:
        """Return the first scenarios alone."""
        return Scenarios(self.lengths[:count], self.score.first(count))


@dataclass(frozen=True)
class Search:
    """The search of one step."""

    planner: SampleAverage
    work: Work
    most: int

    @cached_property
    def forecast(self) -> Forecast:
        """Times and costs of splits on lengths."""
        work, place = self.work, self.planner.place
        prewarm, lead = self.planner.prewarm(work.view)
        learning = None if prewarm is None else prewarm.learning_seconds
        return Forecast(work.view, work.cached_tokens, work.prefill_seconds, place, lead, learning)

    @cached_property
    def reference(self) -> Forecast:
        """The same with all functions warm, whatever the run has done before: for the splits a goal refers to."""
        return replace(self.forecast, learning_seconds=None)

    @cached_property
    def sweep(self) -> Sweep:
        """Candidate splits on the predicted lengths."""
        return Sweep(self.work, self.most)

    @cached_property
    def rank(self) -> IntArray:
        """Place of each response by falling prediction."""
        view = self.work.view
        rank = np.empty(len(view), dtype=np.int64)
        rank[SortedEven().order(view, self.work.predicted_tokens.astype(np.float64))] = np.arange(len(view))
        return rank

    def draw(self, count: int) -> Scenarios:
        """Draw scenarios and resolve the goal in each."""
        view = self.work.view
        count = max(count * _MANY // max(len(view), _MANY), -(-count // 4))
        return self.scenarios(self.planner.lengths(view, self.work.predicted_tokens, count))

    def scenarios(self, lengths: IntArray) -> Scenarios:
        """Resolve the goal on given lengths, shape (scenarios, responses)."""
        counts = np.unique(np.geomspace(1, self.most, _REFERENCE_COUNTS).astype(np.int64)).tolist()
        forecasts = []
        for own in lengths:
            order = np.argsort(-own, kind="stable")
            even = [tuple(np.array_split(order, count)) for count in counts]
            forecasts.append(self.reference(even, own[None], self.planner.migration))
        seconds, gpu_seconds = (np.concatenate([one[part] for one in forecasts], axis=1) for part in (0, 1))
        return Scenarios(lengths, Score.of(self.planner.goal, seconds, gpu_seconds, self.planner.overrun))

    def values(self, splits: Sequence[Groups], scenarios: Scenarios) -> FloatArray:
        """Return the sample average of each split, shape (splits,)."""
        seconds, gpu_seconds = self.forecast(splits, scenarios.lengths, self.planner.migration)
        return worst_mean(scenarios.score(seconds, gpu_seconds), self.planner.share)

    def run(self, scenarios: Scenarios) -> list[Groups]:
        """Return the last splits of the descent from the best of the sweep, each better than the one before."""
        planner = self.planner
        started = time.perf_counter()
        starts = self._starts(scenarios)
        values = self.values(starts, scenarios)
        best = int(np.argmin(values))
        found, value = [starts[best]], float(values[best])
        for _ in range(planner.rounds):
            if planner.seconds is not None and time.perf_counter() - started >= planner.seconds:
                break
            moved = [
                groups
                for _ in range(planner.neighbours)
                if (groups := self._neighbour(found[-1], self.work.view.rng)) is not None
            ]
            if not moved:
                break
            ordered = self.sweep.estimate(moved)[0]
            values = self.values(ordered, scenarios)
            best = int(np.argmin(values))
            if values[best] < value:
                found.append(ordered[best])
                value = float(values[best])
        return by_load(self.work, found[-planner.finalists :])

    def _starts(self, scenarios: Scenarios) -> list[Groups]:
        candidates = self.sweep.splits(8, -(-self.most // 2))
        ordered, seconds, cost = self.sweep.estimate(candidates)
        score = Score.of(self.planner.goal, seconds[:, None], cost[:, None], self.planner.overrun)
        rough = score(seconds[:, None], cost[:, None])[:, 0]
        ordered = [ordered[i] for i in np.argsort(rough, kind="stable")[:_FIRST_CANDIDATES]]
        values = self.values(ordered, scenarios.first(_FIRST_SCENARIOS))
        return [ordered[i] for i in np.argsort(values, kind="stable")[: self.planner.finalists]]

    def _neighbour(self, groups: Groups, rng: np.random.Generator) -> Groups | None:
        """Return the split after one random move, or rarely more; None where there is no other split."""
        moved = self._moved(groups, rng)
        while moved is not None and rng.random() < _ANOTHER_MOVE:
            moved = self._moved(moved, rng)
        return moved

    def _moved(self, groups: Groups, rng: np.random.Generator) -> Groups | None:
        n = len(groups)
        a = int(rng.integers(n))
        rows = groups[a]
        may_split, may_merge = n < self.most and len(rows) > 1, n > 1
        if not may_split and not may_merge:
            return None
        kind = rng.random()
        if may_split and (kind < 0.15 or not may_merge):
            return (*groups[:a], *_parted(rows, _some(rows, rng)), *groups[a + 1 :])
        b = int(rng.integers(n - 1))
        b += b >= a
        rest = tuple(group for number, group in enumerate(groups) if number not in (a, b))
        both = self._sorted(np.concatenate((rows, groups[b])))
        if kind < 0.3 and n > 1:
            return (*rest, both)
        if kind < 0.5:
            # Cut anew: the longest on one actor.
            return (*rest, *_parted(both, np.arange(len(both)) < rng.integers(1, len(both))))
        chosen = _some(rows, rng)
        if kind < 0.65:
            other = _some(groups[b], rng)
            pairs = ((rows[~chosen], groups[b][other]), (groups[b][~other], rows[chosen]))
            return (*rest, *(self._sorted(np.concatenate(pair)) for pair in pairs))
        left = rows[~chosen]
        moved = (*rest, self._sorted(np.concatenate((groups[b], rows[chosen]))))
        return (*moved, left) if len(left) else moved

    def _sorted(self, rows: IntArray) -> IntArray:
        return rows[np.argsort(self.rank[rows], kind="stable")]


@dataclass(frozen=True)
class Gap:
    """How far a split may be from the least sample average: the mean over replications, and a 95 % upper limit."""

    mean: float
    high: float
    replications: int


def optimality_gap(search: Search, groups: Groups, replications: int = 8) -> Gap:
    """Estimate how far a split is from the best one on the step's distribution of lengths.

    Mak, Morton and Wood (Operations Research Letters 24, 1999): in each replication new scenarios are drawn and
    the best split for these is sought; the given split's value on them less that one's is on average at least
    the gap, since a split that is best for a sample looks better on it than on others. The upper limit is
    Student's. The search is not exact: what it misses of the best split is missing in the gap.
    """
    gaps = []
    for _ in range(replications):
        scenarios = search.draw(search.planner.scenarios)
        values = search.values([groups, *search.run(scenarios)], scenarios)
        gaps.append(float(values[0] - values.min()))
    mean = float(np.mean(gaps))
    if replications < 2:
        return Gap(mean, inf, replications)
    error = float(np.std(gaps, ddof=1)) / sqrt(replications)
    return Gap(mean, mean + float(stdtrit(replications - 1, 0.95)) * error, replications)


def _some(rows: IntArray, rng: np.random.Generator) -> BoolArray:
    """Choose some rows of a group at random: its first, its last, or some at even distances."""
    n = len(rows)
    count = max(int(n * 0.5 ** rng.integers(1, 8)), 1)
    chosen = np.zeros(n, dtype=np.bool_)
    kind = rng.integers(3)
    if kind == 0:
        chosen[:count] = True
    elif kind == 1:
        chosen[n - count :] = True
    else:
        chosen[(rng.random() * n / count + np.arange(count) * n / count).astype(np.int64)] = True
    return chosen


def _parted(rows: IntArray, chosen: BoolArray) -> tuple[IntArray, IntArray]:
    return rows[chosen], rows[~chosen]
