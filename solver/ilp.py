"""Solvers as policies: groups, actors and their sizes, or the whole mapping of a step, on predicted lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from rlhfless.models.plan import ActorPlan, Learner, Plan, Platform, Predicted, Preparation
from rlhfless.models.profile import Profile
from rlhfless.models.replay import profiles_by_size
from rlhfless.policies.assign import Groups
from rlhfless.policies.base import StepView
from rlhfless.policies.predict import Ewma, Predictor
from rlhfless.policies.prewarm import Prewarming, ShortestPast
from rlhfless.policies.scale import Split, Work
from rlhfless.solver.assignment import GpuLimit, solve_assignment
from rlhfless.solver.objective import Goal, Objective
from rlhfless.solver.partition import even_splits, solve
from rlhfless.solver.problem import ActorKind, Partition, Problem
from rlhfless.solver.schedule import PREPARATIONS, Pool, Schedule, solve_schedule
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import IntArray


def _tokens(view: StepView, predict: Predictor) -> IntArray:
    """Return whole predicted lengths, cut to what the roomiest actor holds."""
    room = max(p.actor.kv_capacity_tokens for p in (view.profile, *view.variants)) - view.prompt_tokens
    tokens = np.maximum(np.rint(predict(view)), 1).astype(np.int64)
    if view.generated is not None:
        tokens = np.maximum(tokens, view.generated + 1)
    return np.minimum(tokens, np.maximum(room, 1))


@dataclass(frozen=True)
class Optimize:
    """Scaling and assignment in one: the partition that a solver finds for the predicted lengths.

    It takes the place of a scaling part; the policy's assignment is not asked. The search starts from the best
    even split over all counts of actors, so that by its own objective on the predicted lengths the plan is never
    worse. What plans differ in beside decode time (start-up, transfers, migration) is not in the objective.

    Parameters
    ----------
    method
        ``cp_sat``: the integer program (:func:`~rlhfless.solver.assignment.solve_assignment`). ``partition``: threshold
        sweep and annealing (:func:`~rlhfless.solver.partition.solve`).
    goal
        What is minimised, scaled by the even splits.
    seconds
        Most wall time of the search in a step: a net, since a search that it ends cannot be repeated exactly.
    work
        What ends the search otherwise: CP-SAT's deterministic seconds, or for ``partition`` moves per response.
    seed
        Of the search.

    """

    method: Literal["cp_sat", "partition"] = "cp_sat"
    goal: Goal = field(default_factory=Goal)
    seconds: float = 5.0
    work: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in ("cp_sat", "partition"):
            raise InputError(f"Optimize: method is {self.method}, must be cp_sat or partition")
        if self.seconds < 0 or self.work < 0:
            raise InputError(f"Optimize: seconds is {self.seconds} and work {self.work}, must be at least 0")

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the groups of the best partition found."""
        if most < 1:
            raise InputError(f"an actor of profile {work.view.profile.name} does not fit the GPUs")
        problem = Problem.of(work.view, work.predicted_tokens, work.cached_tokens, most)
        splits = even_splits(problem)
        seconds, cost = np.array([problem.evaluate(even) for even in splits]).T
        objective = self.goal.resolve(seconds, cost)
        hint = splits[int(np.argmin(objective.value(seconds, cost)))]
        if self.method == "cp_sat":
            found = solve_assignment(
                problem,
                objective,
                seconds=self.seconds,
                work=self.work,
                workers=1,
                seed=self.seed,
                hint=hint,
                resolution=1e-4,
            )
        else:
            found = solve(
                problem,
                objective,
                seconds=self.seconds,
                moves=int(self.work * len(problem)),
                seed=self.seed,
                hint=hint,
            )
        if found.partition is None:
            raise InputError(f"step {work.view.step}: no partition within the goal's limits: {found.reason}")
        return tuple(rows[np.argsort(problem.rank[rows], kind="stable")] for rows in found.partition.groups)


@dataclass(frozen=True)
class OptimizeSizes:
    """A policy: actors of several sizes, their number, places and responses from one integer program.

    Sizes are those of the setting's profile and its variants (tensor-parallel choices of one model on one GPU
    type). An actor is on the learner's GPUs, where weights are at once; beside them on the learner's nodes; or on
    another node. What lies beside counts against the GPUs of its node. Each decodes from the end of its weight
    transfer on, and is billed from its start. Actors prefill their own prompts; nothing migrates. The plan is, by
    its goal on the predicted lengths, at least as good as even splits over actors of any one kind.

    Parameters
    ----------
    predict, prewarm
        As in :class:`~rlhfless.policies.Composed`.
    goal
        What is minimised, scaled by the even splits.
    seconds, work, seed
        As in :class:`Optimize`.

    """

    name: str = "ilp_sizes"
    predict: Predictor = field(default_factory=Ewma)
    prewarm: Prewarming = field(default_factory=ShortestPast)
    goal: Goal = field(default_factory=Goal)
    seconds: float = 5.0
    work: float = 0.1
    seed: int = 0

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        prewarm, lead = self.prewarm(view)
        tokens = _tokens(view, self.predict)
        startup = 0.0 if prewarm is not None else view.profile.functions.warm_start_seconds
        places = _places(view)
        kinds = tuple(_kind(view, place, startup) for place in places)
        limits = _limits(view, places)
        problem = Problem(
            prompt_tokens=view.prompt_tokens,
            response_tokens=tokens,
            kinds=kinds,
            group=view.tree.group,
            cached_tokens=np.zeros(len(view), dtype=np.int64),
            engine=view.options.engine,
        )
        splits = [
            Partition(tuple(np.array_split(problem.order, actors)), (kind,) * actors)
            for kind in range(len(kinds))
            if problem.fits(kind, problem.order)
            for actors in range(1, min(kinds[kind].count, len(view)) + 1)
        ]
        if not splits:
            raise InputError(
                f"step {view.step}, policy {self.name}: no actor size holds all predicted lengths"
            )
        seconds, cost = np.array([problem.evaluate(even) for even in splits]).T
        objective = self.goal.resolve(seconds, cost)
        found = solve_assignment(
            problem,
            objective,
            seconds=self.seconds,
            work=self.work,
            workers=1,
            seed=self.seed,
            hint=splits[int(np.argmin(objective.value(seconds, cost)))],
            limits=limits,
            resolution=1e-4,
        )
        if found.partition is None:
            raise InputError(f"step {view.step}: no partition within the goal's limits: {found.reason}")
        actors = _actors(view, problem, found.partition, places, lead)
        return Plan(
            step=view.step,
            policy=self.name,
            platform="serverless",
            actors=actors,
            learner=Learner(gpus=view.learner_gpus),
            prewarm=prewarm,
            predicted=Predicted(generation_seconds=found.seconds, gpu_seconds=found.gpu_seconds),
            predicted_tokens=tokens,
        )


@dataclass(frozen=True)
class _Place:
    """Actors of one size on one part of one node, or on any of several equal nodes."""

    profile: Profile
    nodes: tuple[int, ...]
    colocated: bool
    room: int  # GPUs of the part, on each node


def _places(view: StepView) -> list[_Place]:
    per_node = view.cluster.gpus_per_node
    whole, rest = divmod(view.learner_gpus, per_node)
    learner = [per_node] * whole + [rest] * (rest > 0)
    near = [(node, per_node - count) for node, count in enumerate(learner) if count < per_node]
    far = tuple(range(len(learner), view.cluster.nodes))
    profiles = list(profiles_by_size(view.profile, view.variants).values())
    found = []
    for profile in profiles:
        parts: list[tuple[tuple[int, ...], bool, int]] = [
            ((node,), True, count) for node, count in enumerate(learner)
        ]
        parts += [((node,), False, count) for node, count in near]
        # Sizes that divide each other and the node pack equal nodes without a gap: all of them are one place.
        sizes = [*sorted(other.actor.gpus for other in profiles), per_node]
        even = all(larger % size == 0 for size, larger in pairwise(sizes))
        parts += [(far, False, per_node)] if even and far else [((node,), False, per_node) for node in far]
        found += [
            _Place(profile, nodes, colocated, room)
            for nodes, colocated, room in parts
            if room >= profile.actor.gpus
        ]
    if not found:
        raise InputError(f"an actor of profile {view.profile.name} does not fit the GPUs")
    return found


def _kind(view: StepView, place: _Place, startup: float) -> ActorKind:
    count = len(place.nodes) * (place.room // place.profile.actor.gpus)
    if place.colocated:
        return ActorKind(place.profile, count)
    near = place.nodes[0] * view.cluster.gpus_per_node < view.learner_gpus
    links = view.profile.links
    sync = (links.within_node if near else links.between_nodes).seconds(view.profile.memory.weight_bytes)
    return ActorKind(place.profile, count, startup + sync, startup + sync)


def _limits(view: StepView, places: Sequence[_Place]) -> list[GpuLimit]:
    parts: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for kind, place in enumerate(places):
        parts.setdefault((place.nodes, place.colocated), []).append(kind)
    limits = []
    for (nodes, colocated), kinds in parts.items():
        if colocated:
            name = f"the learner on node {nodes[0]}"
        elif len(nodes) == 1:
            beside = (
                " beside the learner" if nodes[0] * view.cluster.gpus_per_node < view.learner_gpus else ""
            )
            name = f"node {nodes[0]}{beside}"
        else:
            name = f"nodes {nodes[0]} to {nodes[-1]}"
        limits.append(GpuLimit(tuple(kinds), len(nodes) * places[kinds[0]].room, name))
    return limits


def _actors(
    view: StepView, problem: Problem, partition: Partition, places: Sequence[_Place], lead: float
) -> tuple[ActorPlan, ...]:
    """Return the actors, co-located ones first, then by falling size; on equal nodes, first fit."""
    taken: dict[int, int] = {}
    used = [places[kind] for kind in partition.kinds]
    numbers = sorted(range(len(used)), key=lambda g: (not used[g].colocated, -used[g].profile.actor.gpus))
    actors = []
    for number in numbers:
        place, gpus = used[number], used[number].profile.actor.gpus
        node = place.nodes[0]
        if not place.colocated:
            node = next(n for n in place.nodes if taken.get(n, 0) + gpus <= place.room)
            taken[node] = taken.get(node, 0) + gpus
        rows = partition.groups[number]
        rows = rows[np.argsort(problem.rank[rows], kind="stable")]
        lead_of = 0.0 if place.colocated else lead
        actors.append(ActorPlan(gpus, node, rows, prewarm_seconds=lead_of, colocated=place.colocated))
    return tuple(actors)


@dataclass(frozen=True)
class ScheduleStep:
    """A policy: each step mapped as a whole (:func:`~rlhfless.solver.schedule.solve_schedule`).

    How many actors of which size generate, on the learner's GPUs or beside them, and where preparation runs, for the
    predicted lengths. The learner keeps the GPUs that the setting gives it.

    Parameters
    ----------
    platform, resident
        As in :class:`~rlhfless.solver.schedule.Pool`.
    predict
        Lengths to plan on.
    preparations
        Which placements may be chosen.
    goal
        What is minimised, scaled by the fastest and the cheapest mapping.
    seconds, seed
        CP-SAT's time limit and seed; it proves a step's optimum long before.

    """

    name: str = "ilp_schedule"
    platform: Platform = "serverful"
    predict: Predictor = field(default_factory=Ewma)
    preparations: tuple[Preparation, ...] = PREPARATIONS
    resident: bool = False
    goal: Goal = field(default_factory=Goal)
    seconds: float = 10.0
    seed: int = 0

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        tokens = _tokens(view, self.predict)
        pool = Pool(
            profile=view.profile,
            cluster=view.cluster,
            stages=view.stages,
            options=view.options,
            platform=self.platform,
            variants=tuple(view.variants),
            resident=self.resident,
        )

        def best(objective: Objective, seconds: float) -> Schedule:
            found = solve_schedule(
                pool,
                view.prompt_tokens,
                tokens,
                view.tree.group,
                objective,
                learner_gpus=(view.learner_gpus,),
                preparations=self.preparations,
                seconds=seconds,
                seed=self.seed,
            )
            if found.mapping is None:
                raise InputError(f"step {view.step}, policy {self.name}: {found.reason}")
            return found

        ends = [best(Objective(1.0, 0.0), 0.0), best(Objective(0.0, 1.0), 0.0)]
        objective = self.goal.resolve(
            np.array([end.seconds for end in ends]), np.array([end.gpu_seconds for end in ends])
        )
        plan = best(objective, self.seconds)
        return replace(plan.plan(view.step, self.name, pool), predicted_tokens=tokens)
