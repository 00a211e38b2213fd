"""A whole step as a schedule on a pool of GPUs: which stage runs where, on how many GPUs, and when.

The device-mapping question of HybridFlow (arXiv 2409.19256) and ReaL (arXiv 2406.14088), restricted to what a
:class:`~rlhfless.models.plan.Plan` can say:

* the learner has ``learner_gpus`` consecutive GPUs and trains the actor on them;
* generation is one malleable block, so many actors of one size, on the learner's GPUs (co-located) or beside them
  (standalone);
* the stages between run on the learner's GPUs, on the actors', or each on GPUs of its own.

Co-located or standalone is an outcome. CP-SAT chooses one combination of each kind and places every stage as an
interval: stages on the same GPUs do not overlap, a stage starts after those that it needs, and what is resident
on a GPU fits its memory. A step begins when the last one has ended, so that one step is the steady state. Times are
the profile's; the decode times of a block are the replay's kernel on the given lengths.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf, isfinite
from typing import Any, Literal

import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.hardware import find_gpu
from rlhfless.models.plan import ActorPlan, Learner, Plan, Platform, Predicted, Preparation
from rlhfless.models.profile import LEARNING_STAGES, PREPARATION_STAGES, Profile
from rlhfless.models.replay import Replay, ReplayOptions, profiles_by_size
from rlhfless.policies.partition import lpt
from rlhfless.solver.objective import Objective
from rlhfless.solver.problem import ActorKind, Partition, Problem, Status
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray

#: Bytes per parameter of a model in training with mixed-precision Adam: weights and gradients in 16 bits, master
#: weights and two moments in 32 (ZeRO, arXiv 1910.02054, sec. 3.1).
TRAINED_BYTES = 16

#: Bytes per parameter of the weights that the profiles count.
_WEIGHT_BYTES = 2

#: Integer steps a second.
_STEPS = 100_000

#: Relative gap up to which a schedule counts as optimal: what rounding to ticks and weights leaves.
RESOLUTION = 1e-5

#: Where the stages between generation and learning may run in this program.
PREPARATIONS: tuple[Preparation, ...] = ("learner", "actors", "own")


@dataclass(frozen=True)
class Pool:
    """What a step is scheduled on.

    Attributes
    ----------
    profile, variants
        Costs, and those of actors of other sizes.
    cluster
        The GPUs.
    stages
        The stages after generation.
    options
        Choices of the replay.
    platform
        ``serverful``: a step costs all GPUs in use times its duration. ``serverless``: GPUs times seconds of each
        function, its warm start and wait for weights included.
    resident
        Whether everything that runs on a GPU stays in its memory for the whole step; otherwise what does not run is
        swapped out, at no cost, and each alone must fit.
    gpu_memory_bytes
        Memory of a GPU; None: of its data sheet, and of a GPU without one, as much as is needed.

    """

    profile: Profile
    cluster: Cluster
    stages: tuple[str, ...]
    options: ReplayOptions
    platform: Platform = "serverful"
    variants: tuple[Profile, ...] = ()
    resident: bool = False
    gpu_memory_bytes: float | None = None

    @cached_property
    def by_size(self) -> dict[int, Profile]:
        """Profiles by the GPUs of an actor."""
        return profiles_by_size(self.profile, self.variants)

    @property
    def memory_bytes(self) -> float:
        """Memory of a GPU."""
        if self.gpu_memory_bytes is not None:
            return self.gpu_memory_bytes
        try:
            return find_gpu(self.profile.gpu).memory_bytes
        except InputError:
            return inf

    @property
    def startup(self) -> float:
        """Seconds before a function works: a warm start, or nothing on a serverful pool."""
        return self.profile.functions.warm_start_seconds if self.platform == "serverless" else 0.0


@dataclass(frozen=True)
class Shape:
    """The learner's GPUs, and how many actors of which size generate, on them or beside them."""

    learner_gpus: int
    actor_gpus: int
    actors: int
    colocated: bool

    def nodes(self, cluster: Cluster) -> list[int]:
        """Return the nodes on which actors of the size fit, each as often as they do, nearest first."""
        per_node = cluster.gpus_per_node
        whole, rest = divmod(self.learner_gpus, per_node)
        own = [per_node] * whole + [rest] + [0] * cluster.nodes
        room = own if self.colocated else [per_node - count for count in own]
        return [node for node in range(cluster.nodes) for _ in range(room[node] // self.actor_gpus)]


@dataclass(frozen=True)
class Mapping:
    """A shape and where preparation runs."""

    shape: Shape
    preparation: Preparation


@dataclass(frozen=True)
class Schedule:
    """What :func:`solve_schedule` returns.

    Attributes
    ----------
    status
        As in :class:`~rlhfless.solver.problem.Solution`.
    mapping, partition
        What runs where, and the actors' groups; None without a solution.
    stages
        Start and end of generation and of each stage, in seconds from the step's start.
    seconds, gpu_seconds, value
        The step's duration, cost and objective.
    bound, gap
        A proven lower bound of the objective over all mappings of this program, and the relative gap to it.
    solve_seconds
        Measured wall time.
    reason
        Where there is no solution: why.

    """

    status: Status
    mapping: Mapping | None
    partition: Partition | None
    stages: dict[str, tuple[float, float]]
    seconds: float
    gpu_seconds: float
    value: float
    bound: float
    gap: float
    solve_seconds: float
    reason: str = ""

    def plan(self, step: int, policy: str, pool: Pool) -> Plan:
        """Return the schedule as a plan, actors by falling load from the learner outwards."""
        if self.mapping is None or self.partition is None:
            raise InputError(f"policy {policy}: no schedule to plan from: {self.reason}")
        shape = self.mapping.shape
        actors = tuple(
            ActorPlan(gpus=shape.actor_gpus, node=node, responses=rows, colocated=shape.colocated)
            for rows, node in zip(self.partition.groups, shape.nodes(pool.cluster), strict=False)
        )
        generation = self.stages["generation"]
        return Plan(
            step=step,
            policy=policy,
            platform=pool.platform,
            actors=actors,
            learner=Learner(gpus=shape.learner_gpus),
            preparation=self.mapping.preparation,
            predicted=Predicted(
                generation_seconds=generation[1],
                gpu_seconds=self.gpu_seconds,
                step_seconds=self.seconds,
            ),
        )


@dataclass(frozen=True)
class _Generation:
    """A shape with its groups: when generation ends, and the GPU seconds of its actors' functions."""

    shape: Shape
    partition: Partition
    seconds: float
    gpu_seconds: float


def shapes(pool: Pool, learner_gpus: Sequence[int], most: int) -> list[Shape]:
    """Return the shapes that fit the pool's nodes, with at most ``most`` actors."""
    found = []
    for learner in learner_gpus:
        for size in pool.by_size:
            for colocated in (True, False):
                room = len(Shape(learner, size, 1, colocated).nodes(pool.cluster))
                found += [Shape(learner, size, n, colocated) for n in range(1, min(room, most) + 1)]
    return found


def memory_bytes(pool: Pool, mapping: Mapping) -> float:
    """Return the most bytes that any GPU of the learner or of an actor must hold.

    A trained model takes :data:`TRAINED_BYTES` a parameter, evenly over its GPUs; a model that only infers its
    weights, evenly over its GPUs; an actor its share of weights and KV. Parameters are counted from the actor's
    weights, the other models are taken to be as large.
    """
    shape = mapping.shape
    profile = pool.by_size[shape.actor_gpus]
    weights = pool.profile.memory.weight_bytes
    trained = weights / _WEIGHT_BYTES * TRAINED_BYTES / shape.learner_gpus
    kv = profile.actor.kv_capacity_tokens * profile.memory.kv_bytes_per_token
    engine = (profile.memory.weight_bytes + kv) / shape.actor_gpus
    on_learner, on_actors = [trained], [engine]
    if "update_critic" in pool.stages and mapping.preparation != "own":
        on_learner.append(trained)
    for stage in pool.stages:
        if stage in PREPARATION_STAGES and pool.profile.stages[stage].gpus:
            if mapping.preparation == "learner":
                on_learner.append(weights / shape.learner_gpus)
            elif mapping.preparation == "actors":
                on_actors.append(weights / (shape.actor_gpus * shape.actors))
    groups = [on_learner + on_actors] if shape.colocated else [on_learner, on_actors]
    return max(sum(parts) if pool.resident else max(parts) for parts in groups)


def solve_schedule(
    pool: Pool,
    prompt_tokens: IntArray,
    response_tokens: IntArray,
    group: IntArray,
    objective: Objective,
    *,
    learner_gpus: Sequence[int],
    preparations: Sequence[Preparation] = PREPARATIONS,
    most_actors: int | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    workers: int = 1,
) -> Schedule:
    """Return the best mapping of a step, with its schedule.

    Parameters
    ----------
    pool
        Costs and GPUs.
    prompt_tokens, response_tokens, group
        Of each response, shape (n,); ``group`` numbers the prompts from 0.
    objective
        Weights and limits on the step's seconds and GPU seconds.
    learner_gpus
        How many GPUs the learner may have.
    preparations, most_actors
        Which placements of preparation, and how many actors, may be chosen.
    seconds, seed, workers
        CP-SAT's time limit, seed and threads. With 0 seconds the best of all mappings, their stages in the order of
        the replay, is returned without a bound.

    """
    began = time.perf_counter()
    work = Problem(
        prompt_tokens, response_tokens, _kinds(pool), group, 0 * prompt_tokens, pool.options.engine
    )
    found = shapes(pool, learner_gpus, len(work) if most_actors is None else min(len(work), most_actors))
    tokens = float(prompt_tokens.sum() + response_tokens.sum())
    options, crowded, full = [], False, False
    for generation in _generations(pool, work, objective, found):
        for preparation in preparations:
            mapping = Mapping(generation.shape, preparation)
            if memory_bytes(pool, mapping) > pool.memory_bytes:
                full = True
                continue
            placed = _placed(pool, mapping, tokens)
            crowded |= placed is None
            if placed is not None:
                options.append(_option(pool, mapping, generation, placed))
    values = [float(objective.value(option.seconds, option.gpu_seconds)) for option in options]
    if not options or min(values) == inf:
        clashes = []
        if full and not options:
            clashes.append(f"memory: {pool.memory_bytes / 1e9:.0f} GB a GPU")
        if (crowded or not found) and not options:
            clashes.append(f"GPUs: {pool.cluster.nodes} nodes of {pool.cluster.gpus_per_node}")
        if options and isfinite(objective.time_limit):
            clashes.append(f"time: the fastest takes {min(o.seconds for o in options):.6g} s")
        if options and isfinite(objective.cost_limit):
            clashes.append(f"cost: the cheapest takes {min(o.gpu_seconds for o in options):.6g} GPU seconds")
        return Schedule(
            "infeasible",
            None,
            None,
            {},
            inf,
            inf,
            inf,
            inf,
            inf,
            time.perf_counter() - began,
            "; ".join(clashes),
        )
    best = options[int(np.argmin(values))]
    bound = -inf
    if seconds > 0:
        best, bound = _solve(pool, options, objective, best, seconds, seed, workers)
    value = float(objective.value(best.seconds, best.gpu_seconds))
    gap = max(objective.gap(value, bound), 0.0) if isfinite(bound) else inf
    return Schedule(
        status="optimal" if gap <= RESOLUTION else "feasible",
        mapping=best.mapping,
        partition=best.generation.partition,
        stages=best.times,
        seconds=best.seconds,
        gpu_seconds=best.gpu_seconds,
        value=value,
        bound=min(bound, value),
        gap=gap,
        solve_seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Stage:
    """A stage as a mapping places it: ``on`` GPUs of the learner, of the actors, of its own, or the CPU."""

    name: str
    on: Literal["learner", "actors", "own", "cpu"]
    gpus: int
    seconds: float


@dataclass(frozen=True)
class _Option:
    """A mapping with its stages, and what it takes with the stages in the replay's order."""

    mapping: Mapping
    generation: _Generation
    stages: tuple[_Stage, ...]
    held: int
    times: dict[str, tuple[float, float]]
    seconds: float
    gpu_seconds: float


def _kinds(pool: Pool) -> tuple[ActorKind, ...]:
    return tuple(ActorKind(profile, pool.cluster.gpus) for profile in pool.by_size.values())


def _generations(
    pool: Pool, work: Problem, objective: Objective, found: Sequence[Shape]
) -> list[_Generation]:
    """Return each shape with the best of a few splits of the responses, the longest groups near the learner."""
    sizes = list(pool.by_size)
    options = pool.options
    splits: dict[tuple[int, int], list[tuple[Partition, FloatArray]]] = {}
    generations = []
    for shape in found:
        kind = sizes.index(shape.actor_gpus)
        if not work.fits(kind, np.arange(len(work))):
            continue
        key = (kind, shape.actors)
        if key not in splits:
            splits[key] = [
                (partition, work.decode_seconds(partition.groups, partition.kinds))
                for partition in _splits(work, kind, shape.actors)
            ]
        serverful = pool.platform == "serverful"
        started = options.switch_seconds if shape.colocated and serverful else 0.0
        near = np.array(shape.nodes(pool.cluster)[: shape.actors]) < -(
            -shape.learner_gpus // pool.cluster.gpus_per_node
        )
        there = np.zeros(shape.actors)
        if not shape.colocated:
            links = pool.profile.links
            weights = pool.profile.memory.weight_bytes
            turn = options.weight_transfer == "in_turn"
            for link, reached in ((links.within_node, near), (links.between_nodes, ~near)):
                there[reached] = link.seconds(weights) * (np.arange(1, reached.sum() + 1) if turn else 1)
            there += pool.startup
        waiting = started + there + options.generation_overhead_seconds
        least: _Generation | None = None
        for partition, decode in splits[key]:
            falling = np.argsort(-decode, kind="stable")
            wait = waiting[: len(decode)]
            end = float((wait + decode[falling]).max())
            function = there[: len(decode)] + options.generation_overhead_seconds + decode[falling]
            gpu_seconds = float(function.sum()) * shape.actor_gpus
            groups = tuple(partition.groups[g] for g in falling.tolist())
            candidate = _Generation(shape, Partition(groups, partition.kinds), end, gpu_seconds)
            if least is None or _weigh(objective, candidate, serverful) < _weigh(objective, least, serverful):
                least = candidate
        if least is not None:
            generations.append(least)
    return generations


def _weigh(objective: Objective, generation: _Generation, serverful: bool) -> float:
    if serverful:
        return generation.seconds
    return objective.time_weight * generation.seconds + objective.cost_weight * generation.gpu_seconds


def _splits(work: Problem, kind: int, actors: int) -> list[Partition]:
    """Return whole prompts as they come and balanced, single responses balanced, and sorted even blocks."""
    tokens = work.response_tokens.astype(np.float64)
    prompts = int(work.group.max()) + 1
    by_prompt: FloatArray = np.bincount(work.group, weights=tokens, minlength=prompts).astype(np.float64)
    owners = [
        (np.arange(prompts) * actors // prompts)[work.group],
        lpt(by_prompt, actors)[work.group],
        lpt(tokens, actors),
        work.rank * actors // len(work),
    ]
    found = []
    for owner in owners:
        groups = [work.order[owner[work.order] == actor] for actor in range(actors)]
        if all(map(len, groups)):
            found.append(Partition(tuple(groups), (kind,) * actors))
    return found


def _placed(pool: Pool, mapping: Mapping, tokens: float) -> tuple[_Stage, ...] | None:
    """Return the stages after generation where the mapping puts them; None where there are too few GPUs."""
    shape = mapping.shape
    on_actors = shape.actors * shape.actor_gpus
    own: dict[str, tuple[int, ...]] = {}
    if mapping.preparation == "own":
        taken = max(shape.learner_gpus, on_actors) if shape.colocated else shape.learner_gpus + on_actors
        replay = Replay(pool.profile, pool.cluster, pool.stages, pool.options)
        try:
            own = replay.own_gpus(tuple(range(taken, pool.cluster.gpus)))
        except InputError:
            return None
    placed = []
    for name in pool.stages:
        cost = pool.profile.stages[name]
        if cost.gpus == 0:
            placed.append(_Stage(name, "cpu", 0, cost.seconds(tokens, 0)))
            continue
        if name in own:
            on, gpus = "own", len(own[name])
        elif mapping.preparation == "actors" and name not in LEARNING_STAGES:
            on, gpus = ("learner" if shape.colocated else "actors"), on_actors
        else:
            on, gpus = "learner", shape.learner_gpus
        placed.append(_Stage(name, on, gpus, pool.startup + cost.seconds(tokens, gpus)))  # type: ignore[arg-type]
    return tuple(placed)


def _option(pool: Pool, mapping: Mapping, generation: _Generation, stages: tuple[_Stage, ...]) -> _Option:
    """Return the option with each stage as soon as its inputs and its GPUs are there, in the replay's order."""
    shape = mapping.shape
    times = {"generation": (0.0, generation.seconds)}
    free = {"learner": 0.0, "actors": 0.0}
    free["learner" if shape.colocated else "actors"] = generation.seconds
    prepared = generation.seconds
    for stage in stages:
        need = prepared if stage.name in LEARNING_STAGES else generation.seconds
        start = max(need, free.get(stage.on, 0.0))
        times[stage.name] = (start, start + stage.seconds)
        if stage.on in free:
            free[stage.on] = start + stage.seconds
        if stage.name in PREPARATION_STAGES:
            prepared = max(prepared, start + stage.seconds)
    ended = max(end for _, end in times.values())
    held = shape.learner_gpus + sum(stage.gpus for stage in stages if stage.on == "own")
    if not shape.colocated:
        held += shape.actors * shape.actor_gpus
    if pool.platform == "serverful":
        cost = held * ended
    else:
        cost = generation.gpu_seconds + sum(stage.gpus * stage.seconds for stage in stages)
    return _Option(mapping, generation, stages, held, times, ended, cost)


def _solve(
    pool: Pool,
    options: Sequence[_Option],
    objective: Objective,
    hint: _Option,
    seconds: float,
    seed: int,
    workers: int,
) -> tuple[_Option, float]:
    """Solve the program; return the option chosen and a proven bound.

    Durations are rounded down to ticks, weights so that the objective has about 1e12 steps, also down. What stages
    on one group of GPUs may do is one optional interval each, present where the chosen option puts it there.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in options]
    model.add_exactly_one(chosen)
    horizon = 2 * sum(floor(_STEPS * o.seconds) for o in (hint,)) + floor(
        _STEPS * max(o.seconds for o in options)
    )
    end = model.new_int_var(0, horizon, "end")
    on: dict[str, list[Any]] = {"learner": [], "actors": []}

    def interval(name: str, durations: list[float], places: list[str]) -> tuple[Any, Any]:
        ticks = [floor(_STEPS * duration) for duration in durations]
        start = model.new_int_var(0, horizon, f"{name} start")
        size = model.new_int_var(0, max(ticks), f"{name} seconds")
        stop = model.new_int_var(0, horizon, f"{name} end")
        model.add(size == sum(t * literal for t, literal in zip(ticks, chosen, strict=True)))
        model.add(start + size == stop)
        for place, intervals in on.items():
            there = [literal for literal, own in zip(chosen, places, strict=True) if own == place]
            if there:
                present = model.new_bool_var("")
                model.add(sum(there) == present)
                intervals.append(model.new_optional_interval_var(start, size, stop, present, name))
        model.add(end >= stop)
        return start, stop

    _, generated = interval(
        "generation",
        [option.generation.seconds for option in options],
        ["learner" if option.mapping.shape.colocated else "actors" for option in options],
    )
    before = [generated]
    later = []
    for number, name in enumerate(pool.stages):
        placed = [option.stages[number] for option in options]
        start, stop = interval(name, [stage.seconds for stage in placed], [stage.on for stage in placed])
        model.add(start >= generated)
        if name in LEARNING_STAGES:
            later.append(start)
        else:
            before.append(stop)
    for start in later:
        for stop in before:
            model.add(start >= stop)
    for intervals in on.values():
        model.add_no_overlap(intervals)

    cost = model.new_int_var(0, horizon * pool.cluster.gpus, "cost")
    for option, literal in zip(options, chosen, strict=True):
        if pool.platform == "serverful":
            model.add(cost >= option.held * end).only_enforce_if(literal)
        else:
            model.add(cost >= floor(_STEPS * option.gpu_seconds)).only_enforce_if(literal)
    if isfinite(objective.time_limit):
        model.add(end <= floor(_STEPS * objective.time_limit * (1 + 1e-9)) + 1)
    if isfinite(objective.cost_limit):
        model.add(cost <= floor(_STEPS * objective.cost_limit * (1 + 1e-9)) + 1)
    scale = 1e6 / max(objective.time_weight, objective.cost_weight)
    model.minimize(floor(objective.time_weight * scale) * end + floor(objective.cost_weight * scale) * cost)
    for option, literal in zip(options, chosen, strict=True):
        model.add_hint(literal, option is hint)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, -inf
    found = options[[solver.value(literal) for literal in chosen].index(1)]
    bound = objective.offset + solver.best_objective_bound / scale / _STEPS
    values = [float(objective.value(option.seconds, option.gpu_seconds)) for option in (found, hint)]
    return (found if values[0] <= values[1] else hint), bound
