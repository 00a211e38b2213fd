"""One problem object that every partition solver takes, and one solution object that all return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Literal

import numpy as np

from rlhfless.models.decode import EngineOptions, block_times
from rlhfless.models.profile import Profile
from rlhfless.policies.base import StepView
from rlhfless.solver.objective import Objective
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class ActorKind:
    """Up to ``count`` decode actors of one size and one place.

    Attributes
    ----------
    profile
        What an actor costs; ``profile.actor.gpus`` is its size.
    count
        How many of them there may be.
    start_seconds
        When such an actor begins to decode (start-up, weights and KV transfer included), from the step's start.
    held_seconds
        How long its GPUs are billed before it begins to decode.

    """

    profile: Profile
    count: int
    start_seconds: float = 0.0
    held_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError(f"actor kind {self.profile.name}: count is {self.count}, must be at least 0")


@dataclass(frozen=True)
class Problem:
    """Which actor decodes which response: known lengths, kinds of actors, and how many of each.

    The time of a group is what the replay's kernel says of it on an actor of its own, admitted in falling order
    of tokens; groups cost nothing but their GPUs. The step takes until the last actor ends; it costs, over the
    actors used, GPUs times (decode seconds + ``held_seconds``).

    Attributes
    ----------
    prompt_tokens, response_tokens
        Tokens of each response, shape (n,).
    kinds
        The actors there may be.
    group
        Prompts numbered from 0: responses to one prompt share its KV. By default all prompts differ.
    cached_tokens
        Prompt tokens whose KV each response finds on its actor, shape (n,); by default all (prefill is apart).
    engine
        How the engine treats prompt KV.

    """

    prompt_tokens: IntArray
    response_tokens: IntArray
    kinds: tuple[ActorKind, ...]
    group: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    cached_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        n = len(self.response_tokens)
        if n == 0:
            raise InputError("a partition problem needs at least one response")
        if len(self.group) == 0:
            object.__setattr__(self, "group", np.arange(n, dtype=np.int64))
        if len(self.cached_tokens) == 0:
            object.__setattr__(self, "cached_tokens", np.asarray(self.prompt_tokens, dtype=np.int64))
        if self.actors < 1:
            raise InputError("a partition problem needs at least one actor")
        whole = self.prompt_tokens + self.response_tokens
        room = max(kind.profile.actor.kv_capacity_tokens for kind in self.kinds if kind.count)
        if int(whole.max()) > room:
            raise InputError(
                f"response {int(np.argmax(whole))} needs {int(whole.max())} KV tokens, the largest actor holds {room}"
            )

    @classmethod
    def of(
        cls, view: StepView, tokens: IntArray, cached_tokens: IntArray | None = None, most: int | None = None
    ) -> Problem:
        """Return the problem of a step on the given lengths: equal actors, as many as the cluster holds.

        Lengths that would not fit an actor are cut to its capacity, since a prediction may exceed it.
        """
        profile = view.profile
        room = np.maximum(profile.actor.kv_capacity_tokens - view.prompt_tokens, 1)
        actors = view.most_actors if most is None else min(most, view.most_actors)
        return cls(
            prompt_tokens=view.prompt_tokens,
            response_tokens=np.minimum(tokens, room),
            kinds=(ActorKind(profile, min(actors, len(view))),),
            group=view.tree.group,
            cached_tokens=view.prompt_tokens if cached_tokens is None else cached_tokens,
            engine=view.options.engine,
        )

    def __len__(self) -> int:
        return len(self.response_tokens)

    @property
    def actors(self) -> int:
        """How many actors there may be, of all kinds; never more than responses are of use."""
        return min(sum(kind.count for kind in self.kinds), len(self))

    @cached_property
    def order(self) -> IntArray:
        """Rows by falling response tokens, then falling prompt tokens, then number."""
        return np.lexsort((np.arange(len(self)), -self.prompt_tokens, -self.response_tokens))

    @cached_property
    def rank(self) -> IntArray:
        """Place of each row in ``order``."""
        rank = np.empty(len(self), dtype=np.int64)
        rank[self.order] = np.arange(len(self))
        return rank

    def fits(self, kind: int, rows: IntArray) -> bool:
        """Tell whether each of the rows fits an actor of the kind alone."""
        room = self.kinds[kind].profile.actor.kv_capacity_tokens
        return bool((self.prompt_tokens[rows] + self.response_tokens[rows] <= room).all())

    def decode_seconds(self, groups: Sequence[IntArray], kinds: Sequence[int]) -> FloatArray:
        """Return each group's decode seconds on an actor of its kind, shape (groups,), by the replay's kernel.

        A group that holds a response which does not fit takes infinitely long.
        """
        of = np.asarray(kinds, dtype=np.int64)
        ordered = [rows[np.argsort(self.rank[rows], kind="stable")] for rows in groups]
        seconds = np.full(len(ordered), inf)
        for number, kind in enumerate(self.kinds):
            own = [g for g in np.flatnonzero(of == number).tolist() if self.fits(number, ordered[g])]
            if own:
                seconds[own] = block_times(
                    kind.profile,
                    self.prompt_tokens,
                    self.response_tokens,
                    self.group,
                    [ordered[g] for g in own],
                    self.cached_tokens,
                    self.engine,
                )
        return seconds

    def evaluate(self, partition: Partition) -> tuple[float, float]:
        """Return seconds to the last actor's end, and GPU seconds."""
        seconds = self.decode_seconds(partition.groups, partition.kinds)
        kinds = [self.kinds[number] for number in partition.kinds]
        ends = seconds + np.array([kind.start_seconds for kind in kinds])
        held = seconds + np.array([kind.held_seconds for kind in kinds])
        return float(ends.max()), float(held @ np.array([kind.profile.actor.gpus for kind in kinds]))


@dataclass(frozen=True)
class Partition:
    """Groups of rows, none empty, and the kind of actor that decodes each."""

    groups: tuple[IntArray, ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[IntArray]) -> Partition:
        """Return the partition over actors of the first kind, empty groups left out."""
        kept = tuple(np.asarray(rows, dtype=np.int64) for rows in groups if len(rows))
        return cls(kept, (0,) * len(kept))


@dataclass(frozen=True)
class Solution:
    """What a solver returns.

    Attributes
    ----------
    status
        ``optimal``: the gap is 0 up to the solver's stated resolution. ``feasible``: a partition with a
        positive gap. ``infeasible``: proven that there is none; ``reason`` says what clashes. ``unknown``: time ran
        out before either.
    partition, seconds, gpu_seconds, value
        The best partition found and its numbers, as :meth:`Problem.evaluate` gives them; None and infinite
        without one.
    bound
        No partition has a lower value.
    gap
        ``(value - bound) / bound``, the objective's offset left out.
    solve_seconds
        Measured wall time.
    progress
        ``(seconds, value, bound)`` whenever one of them improved.

    """

    status: Status
    partition: Partition | None
    seconds: float
    gpu_seconds: float
    value: float
    bound: float
    gap: float
    solve_seconds: float
    progress: tuple[tuple[float, float, float], ...] = ()
    reason: str = ""

    @classmethod
    def of(
        cls,
        problem: Problem,
        objective: Objective,
        partition: Partition,
        bound: float,
        solve_seconds: float,
        progress: Sequence[tuple[float, float, float]] = (),
        resolution: float = 1e-9,
    ) -> Solution:
        """Return the solution of a partition; optimal where the gap is at most ``resolution``."""
        seconds, gpu_seconds = problem.evaluate(partition)
        value = float(objective.value(seconds, gpu_seconds))
        gap = max(objective.gap(value, bound), 0.0)
        return cls(
            status="optimal" if gap <= resolution else "feasible",
            partition=partition,
            seconds=seconds,
            gpu_seconds=gpu_seconds,
            value=value,
            bound=min(bound, value),
            gap=gap,
            solve_seconds=solve_seconds,
            progress=tuple(progress),
        )
