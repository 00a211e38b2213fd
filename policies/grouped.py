"""Assignment by length groups: which lengths share an actor, and how many actors a range of lengths gets.

These parts look at costs. :func:`decode_seconds` takes them from the replay's own kernel on the predicted
lengths; :func:`token_seconds` is the iteration time that StreamRL and Heddle multiply with a length.

``unit`` of a part says whether responses are dealt over actors one by one, or prompts with all their responses
as far as they are in the same group (the default, since a prompt's responses then share its KV). Times are
estimated as if responses were dealt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless.models.decode import block_times
from rlhfless.policies import partition
from rlhfless.policies.assign import Groups
from rlhfless.policies.balanced import Unit, by_owner, deal, loads, longest_first
from rlhfless.policies.base import StepView
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: Seconds of a tail's actor and of the last other one, by the number of responses in the tail.
Sides = Callable[[int], FloatArray]


def decode_seconds(view: StepView, predicted: FloatArray, groups: Sequence[IntArray]) -> FloatArray:
    """Return each group's decode time on the predicted lengths, with the prompts' KV in place."""
    tokens = np.maximum(np.rint(predicted), 1).astype(np.int64)
    return block_times(
        view.profile,
        view.prompt_tokens,
        tokens,
        view.tree.group,
        groups,
        view.prompt_tokens,
        view.options.engine,
    )


def running_at_once(view: StepView, size: FloatArray | IntArray, length: float) -> IntArray:
    """Return how many of ``size`` responses of a length an actor runs at once: slots and KV limit it."""
    per_response = float(view.prompt_tokens.mean()) + length
    most = min(view.profile.actor.max_running, int(view.profile.actor.kv_capacity_tokens // per_response))
    return np.minimum(np.ceil(size), max(most, 1)).astype(np.int64)


def token_seconds(view: StepView, size: FloatArray | IntArray, length: float) -> FloatArray:
    """Return the seconds a token of each of ``size`` responses takes on an actor, 0 for none.

    It is the iteration time with as many running as fit, all half way to ``length``, times the waves that the
    responses need.
    """
    running = running_at_once(view, size, length)
    base, kv = view.profile.decode_tables
    resident = running * (float(view.prompt_tokens.mean()) + length / 2)
    seconds: FloatArray = (base[running] + kv[running] * resident) * np.maximum(
        size / np.maximum(running, 1), 1
    )
    return np.where(running > 0, seconds, 0.0)


@dataclass(frozen=True)
class ContiguousDp:
    """Cut the sorted batch into blocks of free sizes at the least cost ``TPOT(size) * longest`` (Heddle).

    TPOT is the iteration time with the block's responses running, its rise with the size the interference of
    responses on each other. ``objective``: the ``sum`` of the blocks' costs, the ``max`` (Heddle's, the
    makespan), or ``mix``, ``weight * max + (1 - weight) * sum / actors``; ``most_responses`` limits a block.

    The program is exact up to ``resolution`` responses and takes O(actors * resolution^2). In larger batches
    cuts are allowed at about so many places only, dense among the longest responses and wider apart towards
    the shortest. ``mix`` solves several such programs (:func:`rlhfless.policies.partition.contiguous`, with a
    front step of 2 %).
    """

    objective: partition.Objective = "max"
    weight: float = 0.5
    most_responses: int | None = None
    resolution: int = 256

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return contiguous blocks of the sorted batch."""
        n = len(view)
        actors = min(actors, n)
        order = longest_first(view, predicted)
        places = max(self.resolution, 2 * actors)
        edges = np.arange(n + 1)
        if n > places:
            edges = np.unique(np.rint(n * np.linspace(0, 1, places + 1) ** 2).astype(np.int64))
        size_cost = token_seconds(view, np.arange(n + 1), float(predicted.mean()))
        try:
            bounds = partition.contiguous(
                size_cost,
                predicted[order],
                actors,
                self.objective,
                weight=self.weight,
                most=self.most_responses,
                edges=edges,
                front_step=0.02,
            )
        except ValueError as error:
            raise InputError(f"contiguous assignment: {error}") from None
        return tuple(np.split(order, bounds[1:-1]))


@dataclass(frozen=True)
class GroupWorkers:
    """Ranked groups of equal counts, each with as many actors as its lengths need (RhymeRL's HistoPipe).

    The number of actors of each group comes from a cost table, the decode time of the group by actors, and a
    bisection on the time of the longest group: every group takes the fewest actors that keep its time within
    its target. Actors that are left go where time exceeds the target most.

    RhymeRL searches by integer programming; its table and number of groups are not public. Here the table is
    the exact decode time of the group's actor with the longest responses, and responses are dealt over a
    group's actors in turn.

    Parameters
    ----------
    groups
        How many groups; null tries 1, 2, 4, ... up to 8 and takes the number with the earliest end.
    shape
        Targets: ``even`` lets all groups end together; ``linear`` lets times rise evenly from the group with
        the shortest responses to the one with the longest, which RhymeRL then pairs with the opposite order in
        the next step (this toolkit's steps do not overlap, so that only the waiting shows).

    """

    groups: int | None = None
    shape: Literal["even", "linear"] = "even"
    unit: Unit = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return the groups' actors, from the longest responses to the shortest."""
        order = longest_first(view, predicted)
        actors = min(actors, len(view))
        numbers = [g for g in (1, 2, 4, 8) if g <= actors]
        if self.groups is not None:
            numbers = [min(self.groups, actors)]
        options = [self._options(order, number, actors) for number in numbers]
        flat = [rows for option in options for column in option for rows in column]
        seconds = iter(decode_seconds(view, predicted, flat).tolist())
        best: tuple[float, list[IntArray], IntArray] | None = None
        for number, option in zip(numbers, options, strict=True):
            table = np.full((number, actors), np.inf)
            for group, column in enumerate(option):
                table[group, : len(column)] = [next(seconds) for _ in column]
            workers, end = self._workers(table, actors)
            if best is None or end < best[0]:
                best = (end, np.array_split(order, number), workers)
        assert best is not None
        return tuple(
            rows
            for group, count in zip(best[1], best[2].tolist(), strict=True)
            for rows in deal(view, group, count, self.unit)
        )

    def _options(self, order: IntArray, number: int, actors: int) -> list[list[IntArray]]:
        """Return, for each group and number of actors from 1 on, the rows of the actor that ends last."""
        return [
            [group[::count] for count in range(1, min(actors - number + 1, len(group)) + 1)]
            for group in np.array_split(order, number)
        ]

    def _workers(self, table: FloatArray, actors: int) -> tuple[IntArray, float]:
        """Return each group's number of actors, and when the last one ends; ``table`` is groups by actors."""
        number = len(table)
        target = np.ones(number) if self.shape == "even" else np.arange(number, 0, -1) / number
        # More actors never hurt: a group may leave one idle.
        relative = np.minimum.accumulate(table, axis=1) / target[:, None]
        values = np.unique(relative)

        def fewest(limit: float) -> IntArray:
            return np.asarray((relative > limit).sum(axis=1) + 1, dtype=np.int64)

        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if fewest(values[middle]).sum() <= actors:
                high = middle
            else:
                low = middle + 1
        workers = fewest(values[high])
        largest = np.isfinite(table).sum(axis=1)
        for _ in range(actors - int(workers.sum())):
            time = np.where(workers < largest, relative[np.arange(number), workers - 1], -np.inf)
            workers[int(np.argmax(time))] += 1
        return workers, float(table[np.arange(number), workers - 1].max())


@dataclass(frozen=True)
class TailSplit:
    """A share of the longest responses gets actors of its own (StreamRL's skewness-aware dispatch).

    The tail is the ``share`` of the longest predicted responses; its length is taken as the 90th percentile
    of the predicted lengths, that of the others as the median. Every split of the actors is tried; the one
    with the least latency of tail and others wins, a latency being the iteration time at the batch of an
    actor times the length. Within a part responses are dealt out in turn, or by LPT where slots or KV limit
    the batch of an actor.

    ``combine``: the ``sum`` of the two latencies, as the method is summarised, or their ``max``, which is
    when generation ends. StreamRL does not state the share; its ranker is rated on the longest 20 %.
    """

    share: float = 0.2
    combine: Literal["sum", "max"] = "sum"
    unit: Unit = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return the tail's actors, then the others'."""
        n = len(view)
        actors = min(actors, n)
        order = longest_first(view, predicted)
        if actors < 2:
            return (order,)
        tail = min(max(round(self.share * n), 1), n - 1)
        # Every actor gets a response.
        workers = np.arange(max(1, actors - (n - tail)), min(actors - 1, tail) + 1)
        long, usual = np.percentile(predicted, [90, 50]).tolist()
        tail_seconds = token_seconds(view, tail / workers, long) * long
        usual_seconds = token_seconds(view, (n - tail) / (actors - workers), usual) * usual
        if self.combine == "sum":
            seconds = tail_seconds + usual_seconds
        else:
            seconds = np.maximum(tail_seconds, usual_seconds)
        chosen = int(workers[np.argmin(seconds)])
        return (
            *self._spread(view, predicted, order[:tail], chosen, long),
            *self._spread(view, predicted, order[tail:], actors - chosen, usual),
        )

    def _spread(
        self, view: StepView, predicted: FloatArray, rows: IntArray, actors: int, length: float
    ) -> Groups:
        size = -(-len(rows) // actors)
        if size <= running_at_once(view, np.array(size), length):
            return deal(view, rows, actors, self.unit)
        item, load = loads(view, predicted, rows, self.unit)
        return by_owner(rows, partition.lpt(load, actors)[item])


@dataclass(frozen=True)
class TopK:
    """The k longest responses alone on one actor, the others balanced over the rest (TailSieve).

    k is chosen so that both sides end at the same time, on the exact decode time of the predicted lengths.
    The others are dealt out in turn.

    Parameters
    ----------
    search
        ``balance``: bisection on k. ``controller``: TailSieve's rule ``q* = n r_tail / (r_bulk + r_tail)``,
        with r the responses a second of the two sides at the present k, smoothed and repeated; TailSieve
        observes rates from step to step, here they are predicted within the step.
    smoothing
        The controller's weight of the new value.
    rounds
        The controller's rounds, from an even share on.
    exact_up_to
        With two actors and at most so many responses, the exact optimum of the two-actor problem on the
        decode table at mean context (:func:`rlhfless.policies.partition.two_actors`); 24 take 0.1 s, 40
        take 1 s.

    """

    search: Literal["balance", "controller"] = "balance"
    smoothing: float = 0.5
    rounds: int = 20
    exact_up_to: int = 0
    unit: Unit = "prompt"

    def __call__(self, view: StepView, predicted: FloatArray, actors: int) -> Groups:
        """Return the tail's actor, then the others'."""
        order = longest_first(view, predicted)
        n = len(order)
        actors = min(actors, n)
        if actors < 2:
            return (order,)
        if actors == 2 and n <= min(self.exact_up_to, view.profile.actor.max_running):
            tau = token_seconds(view, np.arange(n + 1), float(predicted.mean()))
            return by_owner(order, partition.two_actors(predicted[order], tau))

        def seconds(k: int) -> FloatArray:
            """Return the seconds of the tail's actor and of the longest other one."""
            return decode_seconds(view, predicted, [order[:k], order[k :: actors - 1]])

        most = n - (actors - 1)
        k = self._balanced(seconds, most) if self.search == "balance" else self._controlled(seconds, n, most)
        return (order[:k], *deal(view, order[k:], actors - 1, self.unit))

    def _balanced(self, seconds: Sides, most: int) -> int:
        """Return the k with the earliest end: the first at which the tail ends last, or the one before."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            tail, others = seconds(middle).tolist()
            if tail >= others:
                high = middle
            else:
                low = middle + 1
        return min((k for k in (low - 1, low) if k >= 1), key=lambda k: float(seconds(k).max()))

    def _controlled(self, seconds: Sides, n: int, most: int) -> int:
        aim = n / 2
        k = min(max(round(aim), 1), most)
        for _ in range(self.rounds):
            tail, others = seconds(k).tolist()
            tail_rate, other_rate = k / tail, (n - k) / others
            aim += self.smoothing * (n * tail_rate / (tail_rate + other_rate) - aim)
            k = min(max(round(aim), 1), most)
        return k
