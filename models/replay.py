"""The replay: what a plan does on the true lengths, second by second.

A run is a sequence of steps on one cluster. Times inside a step count from the instant the learner's new
weights exist. Every stage starts when its inputs are there and its GPUs are free; a serverless function holds
its GPUs from its invocation to its release. ``docs/model.md`` lists the approximations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.decode import DecodePool, EngineOptions
from rlhfless.models.delivery import deliver_first
from rlhfless.models.migration import decode_actors
from rlhfless.models.moves import Decoded, Move
from rlhfless.models.plan import Allocation, Plan, allocate, check_responses
from rlhfless.models.prefix import PrefixTree
from rlhfless.models.profile import LEARNING_STAGES, PREPARATION_STAGES, Link, Profile, Seconds
from rlhfless.models.stages import step_graph
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import BoolArray, FloatArray, IntArray, Trace

Gpus = tuple[int, ...]


@dataclass(frozen=True)
class Billing:
    """Which times of a serverless function are billed beside its work; all sums are reported either way.

    ``startup``: from its invocation until it is ready. ``prewarmed_waiting``: from then to the new weights, of
    a function that was called before they existed; waiting for transfers is always billed.
    ``keep_alive``: while it stays warm after its release, until the next call or the end of its keep-alive
    (the profile's, or for decode the plan's).
    ``learner_waiting``: the learner's GPUs in the rest of the step, in which no function holds them.
    """

    startup: bool = True
    prewarmed_waiting: bool = True
    keep_alive: bool = False
    learner_waiting: bool = False


@dataclass(frozen=True)
class ReplayOptions:
    """Choices of the replay that neither the plan nor the profile makes.

    ``weight_transfer``: new weights reach all actors at once (a broadcast), or the learner's links, one within
    its nodes and one out of them, serve them in turn: first come, first served, then by number.
    ``kv_transfer``: the same for the prefill actor's KV, which differs from actor to actor.
    ``switch_seconds``: what a serverful run with actors on the learner's GPUs pays once a step to change
    between learning and generation.
    ``generation_overhead_seconds``: what every actor pays before it decodes, on any platform (waking the engine,
    scattering the batch); a calibration finds it as the part of generation that no token explains.
    ``warm_at_start``: every function is warm when the run begins, as in the middle of a long run; otherwise
    its first start is cold.
    """

    engine: EngineOptions = field(default_factory=EngineOptions)
    billing: Billing = field(default_factory=Billing)
    weight_transfer: Literal["broadcast", "in_turn"] = "broadcast"
    kv_transfer: Literal["in_turn", "parallel"] = "in_turn"
    switch_seconds: Seconds = 0.0
    generation_overhead_seconds: Seconds = 0.0
    warm_at_start: bool = True


@dataclass(frozen=True)
class Interval:
    """GPUs held by one function from ``start`` to ``end``, in seconds since the run began."""

    function: str
    kind: Literal["startup", "wait", "busy"]
    gpus: Gpus
    start: float
    end: float

    @property
    def gpu_seconds(self) -> float:
        """GPUs times seconds."""
        return len(self.gpus) * (self.end - self.start)


@dataclass(frozen=True)
class StepOutcome:
    """What one step did. Seconds are relative to ``began`` (since the run began), except in ``intervals``.

    ``gpu_seconds`` is billed; ``by_function`` splits it (``held`` is the idle part of a serverful pool).
    ``keep_alive_gpu_seconds`` counts a warm function's idle time in the step of its next call, or, where none
    came, its whole keep-alive in the first step that begins after it. ``peak_running`` and
    ``peak_kv_tokens`` are the most that any actor ran and held at once. ``finish`` is when each response was
    complete, shape (responses,), ``release`` when each actor was; ``stage_times`` maps each node of ``graph``
    to its start and end.
    """

    step: int
    epoch: int
    policy: str
    began: float
    step_seconds: float
    generation_seconds: float
    learning_seconds: float
    gpu_seconds: float
    busy_gpu_seconds: float
    startup_gpu_seconds: float
    prewarmed_waiting_gpu_seconds: float
    keep_alive_gpu_seconds: float
    by_function: dict[str, float]
    prefill_tokens: int
    redundant_prefill_tokens: int
    migrations: int
    migrated_kv_bytes: float
    preemptions: int
    cold_starts: int
    actors: int
    launched: int
    responses: int
    response_tokens: int
    carried_tokens: int
    stale_tokens: int
    left_tokens: int
    decoded_tokens: int
    peak_running: int
    peak_kv_tokens: int
    finish: FloatArray
    delivered: BoolArray
    generated: IntArray
    release: FloatArray
    moves: tuple[Move, ...]
    intervals: tuple[Interval, ...]
    stage_times: dict[str, tuple[float, float]]
    graph: nx.DiGraph[str] = field(repr=False)

    @property
    def idle_gpu_seconds(self) -> float:
        """Billed GPU seconds in which nothing was computed."""
        return self.gpu_seconds - self.busy_gpu_seconds


@dataclass(frozen=True)
class WarmFunctions:
    """Which decode functions are warm when the learning stage before a step begins.

    Attributes
    ----------
    seconds_left
        By GPUs: for how many seconds more each function that has run stays warm unless it is called; 0 for one
        that has cooled down.
    others
        The same of functions that have never run.

    """

    seconds_left: Mapping[Gpus, float]
    others: float

    def __call__(self, gpus: Gpus) -> float:
        """Return for how many seconds more the decode function on these GPUs stays warm."""
        return self.seconds_left.get(gpus, self.others)


@dataclass(frozen=True)
class _Invocation:
    """A function that has been called: GPUs held from ``invoked``, ready to work at ``ready``."""

    function: str
    gpus: Gpus
    invoked: float
    ready: float
    cold: bool


def profiles_by_size(profile: Profile, variants: Sequence[Profile]) -> dict[int, Profile]:
    """Return the profiles by the GPUs of their actors, the first one's first.

    Raises
    ------
    InputError
        When a variant is of another model or GPU type, or two have actors of one size.

    """
    found = {profile.actor.gpus: profile}
    for variant in variants:
        if (variant.model, variant.gpu) != (profile.model, profile.gpu):
            raise InputError(
                f"profile {variant.name} is of {variant.model} on {variant.gpu}, "
                f"profile {profile.name} of {profile.model} on {profile.gpu}"
            )
        if variant.actor.gpus in found:
            other = found[variant.actor.gpus].name
            raise InputError(
                f"profiles {other} and {variant.name} are both of actors with {variant.actor.gpus} GPUs"
            )
        found[variant.actor.gpus] = variant
    return found


class Replay:
    """Replays the steps of a run one after another.

    Holds what carries over from step to step: the clock, when each GPU is free, which functions are warm.

    Parameters
    ----------
    profile, cluster
        Costs, and the GPUs there are.
    stages
        The stages after generation (``models.stages.stages_of``).
    options
        Choices of the replay.
    variants
        Profiles of the same model and GPU type for actors of other sizes. Their decode and prefill costs and
        actor shapes count, all else is ``profile``'s.

    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        stages: Sequence[str],
        options: ReplayOptions | None = None,
        variants: Sequence[Profile] = (),
    ) -> None:
        self.profile = profile
        self.by_size = profiles_by_size(profile, variants)
        self.cluster = cluster
        self.stages = tuple(stages)
        self.options = options or ReplayOptions()
        self.now = 0.0
        self.learning_seconds: float | None = None
        total = cluster.nodes * cluster.gpus_per_node
        for stage in self.stages:
            if profile.stages[stage].gpus > total:
                raise InputError(
                    f"profile {profile.name}: stages.{stage}.gpus is {profile.stages[stage].gpus}, "
                    f"the cluster has {total} GPUs"
                )
        self._free = np.zeros(total)
        # Functions that have run: when each was last released, its keep-alive where that is not the profile's,
        # and which of them have cooled down since.
        self._released: dict[tuple[str, Gpus], float] = {}
        self._kept: dict[tuple[str, Gpus], float] = {}
        self._cooled: set[tuple[str, Gpus]] = set()
        self._learning_began = 0.0

    def step(
        self,
        plan: Plan,
        batch: Trace,
        where: str = "plan",
        tree: PrefixTree | None = None,
        generated: IntArray | None = None,
    ) -> StepOutcome:
        """Replay one step and move the clock to its end.

        ``tree`` is the batch's, where it is known already. ``generated`` are tokens that responses have from an
        earlier step; their KV is gone, since the weights have changed.

        Raises
        ------
        InputError
            When the plan leaves out or repeats a response, asks for GPUs that do not exist, or a response
            cannot fit an actor; the state of the replay is unchanged then.

        """
        check_responses(plan, batch, where)
        for number, actor in enumerate(plan.actors):
            if actor.gpus not in self.by_size:
                known = ", ".join(own.name for own in self.by_size.values())
                sizes = ", ".join(map(str, self.by_size))
                raise InputError(
                    f"{where}: actor {number} has {actor.gpus} GPUs, profile {known} holds for {sizes}"
                )
        profiles = [self.by_size[actor.gpus] for actor in plan.actors]
        if plan.migration.rule in ("global", "dispatch") and len({actor.gpus for actor in plan.actors}) > 1:
            raise InputError(
                f"{where}: actors of several sizes: migration {plan.migration.rule} needs actors of one size"
            )
        allocation = allocate(plan, self.cluster, where)
        tree = tree or PrefixTree.of(batch)
        try:
            pool = DecodePool(
                profiles,
                batch.prompt_tokens,
                batch.response_tokens,
                tree.group,
                len(plan.actors),
                self.options.engine,
            )
            for number, actor in enumerate(plan.actors):
                pool.refuse(actor.responses, number)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if generated is not None:
            pool.generated[:] = generated
        own = self.own_gpus(allocation.rest, where) if plan.preparation == "own" else {}
        return _Step(self, plan, batch, allocation, tree, pool, own).run()

    def warm_functions(self) -> WarmFunctions:
        """Return the decode functions that are warm when the last learning stage begins (at first: the run)."""
        at = self._learning_began
        first = self.profile.functions.keep_alive_seconds - at if self.options.warm_at_start else 0.0
        return WarmFunctions(
            {
                gpus: max(released + self._keep_alive((function, gpus)) - at, 0.0)
                for (function, gpus), released in self._released.items()
                if function == "decode"
            },
            max(first, 0.0),
        )

    def branch(self, warm: Sequence[Gpus] | None = None) -> Replay:
        """Return a copy of the run where it stands, to see what other plans would have done.

        Parameters
        ----------
        warm
            The decode functions that are warm in the copy, until they are called or retired, their keep-alive
            billed from now on; all others are cold. None: those of the run.

        """
        other = Replay(
            self.profile, self.cluster, self.stages, self.options, tuple(self.by_size.values())[1:]
        )
        other.now, other.learning_seconds = self.now, self.learning_seconds
        other._learning_began = self._learning_began
        other._free = self._free.copy()
        other._released, other._kept = dict(self._released), dict(self._kept)
        other._cooled = set(self._cooled)
        if warm is not None:
            for key in [key for key in other._released if key[0] == "decode"]:
                del other._released[key]
                other._kept.pop(key, None)
                other._cooled.discard(key)
            for gpus in warm:
                other._released["decode", gpus] = self.now
                other._kept["decode", gpus] = np.inf
        return other

    def own_gpus(self, rest: Gpus, where: str = "plan") -> dict[str, Gpus]:
        """Share out the GPUs that neither actors nor the learner have among the other stages.

        Each stage gets what its profile says, or if those are too many, a share in proportion, at least one.

        Raises
        ------
        InputError
            When there are fewer GPUs than stages.

        """
        wanted = {s: self.profile.stages[s].gpus for s in self.stages if s != "update_actor"}
        wanted = {stage: count for stage, count in wanted.items() if count}
        scale = min(1.0, len(rest) / max(sum(wanted.values()), 1))
        shares, first = {}, 0
        for stage, count in wanted.items():
            own = max(int(count * scale), 1)
            shares[stage] = rest[first : first + own]
            first += own
        if first > len(rest):
            raise InputError(
                f"{where}: preparation on GPUs of its own does not fit the GPUs that actors and learner leave "
                f"({len(rest)} for {', '.join(wanted)})"
            )
        return shares

    def _near(self, source: Gpus, target: Gpus) -> bool:
        """Tell whether the target, which sits on one node, shares it with some GPU of the source."""
        return target[0] // self.cluster.gpus_per_node in {g // self.cluster.gpus_per_node for g in source}

    def _link(self, near: bool) -> Link:
        links = self.profile.links
        return links.within_node if near else links.between_nodes

    def _warm(self, function: str, gpus: Gpus, at: float) -> bool:
        """Tell whether a function that is invoked at ``at`` is still warm."""
        first = 0.0 if self.options.warm_at_start else None
        released = self._released.get((function, gpus), first)
        return released is not None and at - released <= self._keep_alive((function, gpus))

    def _keep_alive(self, key: tuple[str, Gpus]) -> float:
        return self._kept.get(key, self.profile.functions.keep_alive_seconds)


class _Step:
    """One step under way."""

    def __init__(
        self,
        run: Replay,
        plan: Plan,
        batch: Trace,
        allocation: Allocation,
        tree: PrefixTree,
        pool: DecodePool,
        own: dict[str, Gpus],
    ) -> None:
        self.run_ = run
        self.plan = plan
        self.batch = batch
        self.allocation = allocation
        self.tree = tree
        self.pool = pool
        self.own = own
        self.began = run.now
        self.serverless = plan.platform == "serverless"
        self.deduplicated = plan.prefill.mode == "deduplicated"
        self.intervals: list[Interval] = []
        self.times: dict[str, tuple[float, float]] = {}
        self.invoked: list[_Invocation] = []
        self.keep_alive = 0.0
        self.graph = step_graph(len(plan.actors), deduplicated=self.deduplicated, stages=run.stages)

    # All times in here are seconds since the run began.

    def run(self) -> StepOutcome:
        run, plan = self.run_, self.plan
        shared = not self.serverless and any(actor.colocated for actor in plan.actors)
        switch = run.options.switch_seconds if shared else 0.0
        if plan.retire_unused:
            self._retire_unused()
        prefilled, prefill_tokens = self._prefill(self.began + switch)
        starts, calls = self._start_actors(self.began + switch, prefilled)
        for actor, start in enumerate(starts):
            rows = plan.actors[actor].responses
            # Of a prompt that an earlier step cut short, some responses may be complete already.
            complete = self.pool.generated[rows] >= self.batch.response_tokens[rows]
            self.pool.finish[rows[complete]] = self.began
            self.pool.owner[rows[complete]] = actor
            self.pool.start(actor, start)
            self.pool.add(actor, rows[~complete])
        before = self.pool.generated.copy()
        delivered = np.ones(len(self.batch), dtype=np.bool_)
        if plan.deliver_prompts is None:
            kv_bytes = run.profile.memory.kv_bytes_per_token
            decoded = decode_actors(self.pool, plan.migration, self._transfer, kv_bytes)
        else:
            decoded, delivered = deliver_first(self.pool, plan.deliver_prompts)
        for actor, gpus in enumerate(self.allocation.actors):
            counts = self.pool.counts(actor)
            end = max(counts.clock, starts[actor])
            self.times[f"decode.{actor}"] = (starts[actor], end)
            release = max(float(decoded.release[actor]), end)
            self._hold(f"decode.{actor}", "busy", gpus, starts[actor], end)
            self._hold(f"decode.{actor}", "wait", gpus, end, release)
            self._release(calls[actor], gpus, release, plan.actors[actor].keep_alive_seconds)
        generated = max(end for name, (_, end) in self.times.items() if name.startswith("decode."))
        ended = self._after_generation(generated, decoded, delivered)
        return self._outcome(decoded, delivered, before, generated, ended, prefill_tokens)

    def _prefill(self, now: float) -> tuple[float, int]:
        """Prefill distinct prefixes; return when they are there, and their tokens."""
        if not self.deduplicated:
            return now, 0
        limit = self.plan.prefill.shared_prefix_tokens
        gpus = self.allocation.prefill
        seconds = self.tree.prefill_seconds(self.run_.profile, len(gpus), limit)
        self.times["prefill"] = (now, now + seconds)
        self._hold("prefill", "busy", gpus, now, now + seconds)
        self.pool.cached[:] = self.tree.truncated(limit)[self.tree.group]
        return now + seconds, self.tree.distinct_tokens(limit)

    def _start_actors(self, now: float, prefilled: float) -> tuple[list[float], list[_Invocation | None]]:
        """Invoke the actors and bring them weights and KV; return when each starts to decode."""
        run, plan = self.run_, self.plan
        late = self._prewarm_error()
        calls: list[_Invocation | None] = []
        for number, (actor, gpus) in enumerate(zip(plan.actors, self.allocation.actors, strict=True)):
            call = None
            if self.serverless and not actor.colocated:
                lead = max(actor.prewarm_seconds + late, 0.0) if plan.prewarm is not None else 0.0
                call = self._invoke("decode", gpus, now, lead, name=f"decode.{number}")
            calls.append(call)
        away = [not actor.colocated for actor in plan.actors]
        ready = [now if call is None else max(call.ready, now) for call in calls]
        sizes = [run.profile.memory.weight_bytes * moved for moved in away]
        in_turn = run.options.weight_transfer == "in_turn"
        there = self._deliver("weight_sync", self.allocation.learner, ready, sizes, in_turn)
        if self.deduplicated:
            ready = [max(weights, prefilled) for weights in there]
            sizes = [
                self._prefix_bytes(actor.responses) * moved
                for actor, moved in zip(plan.actors, away, strict=True)
            ]
            in_turn = run.options.kv_transfer == "in_turn"
            there = self._deliver("kv_transfer", self.allocation.prefill, ready, sizes, in_turn)
        starts = []
        for number, gpus in enumerate(self.allocation.actors):
            given = max(there[number], float(run._free[list(gpus)].max()))
            start = given + run.options.generation_overhead_seconds
            call = calls[number]
            if call is not None:
                self._hold(f"decode.{number}", "startup", gpus, call.invoked, call.ready)
                given = call.ready
            self._hold(f"decode.{number}", "wait", gpus, given, start)
            starts.append(start)
        return starts, calls

    def _deliver(
        self, stage: str, source: Gpus, asked: list[float], sizes: list[float], in_turn: bool
    ) -> list[float]:
        """Send so many bytes from ``source`` to each actor, asked for at these times; return their arrivals."""
        run = self.run_
        free = {True: -np.inf, False: -np.inf}
        arrivals = list(asked)
        for number in sorted(range(len(asked)), key=lambda number: asked[number]):
            begin = asked[number]
            if sizes[number]:
                near = run._near(source, self.allocation.actors[number])
                if in_turn:
                    begin = max(begin, free[near])
                arrivals[number] = begin + run._link(near).seconds(sizes[number])
                free[near] = arrivals[number]
            self.times[f"{stage}.{number}"] = (begin, arrivals[number])
        return arrivals

    def _prewarm_error(self) -> float:
        """How much longer the learning stage before this step took than the plan expected."""
        prewarm, actual = self.plan.prewarm, self.run_.learning_seconds
        if prewarm is None or prewarm.learning_seconds is None or actual is None:
            return 0.0
        return actual - prewarm.learning_seconds

    def _prefix_bytes(self, responses: IntArray) -> float:
        groups = np.unique(self.tree.group[responses])
        tokens = self.tree.truncated(self.plan.prefill.shared_prefix_tokens)[groups].sum()
        return float(tokens) * self.run_.profile.memory.kv_bytes_per_token

    def _transfer(self, source: int, target: int, sent_bytes: float) -> float:
        actors = self.allocation.actors
        return self.run_._link(self.run_._near(actors[source], actors[target])).seconds(sent_bytes)

    def _after_generation(self, generated: float, decoded: Decoded, delivered: BoolArray) -> float:
        """Run preparation and learning; return when the step ends."""
        run = self.run_
        tokens = self.batch.prompt_tokens + self.batch.response_tokens
        left = delivered.copy()
        if self.plan.overlap_preparation and decoded.cut is not None:
            complete = delivered & (self.pool.finish <= decoded.cut)
            self._prepare_early(decoded.cut, decoded.freed, float(tokens[complete].sum()))
            left &= ~complete
        for stage in run.stages:
            learning = stage in LEARNING_STAGES
            needs = [self.times[name][1] for name in self.graph.predecessors(stage)]
            work = float(tokens[delivered if learning else left].sum())
            need = max([generated, *needs])
            self._run_stage(stage, self._gpus_of(stage, need), need, work)
        return max(end for _, end in self.times.values())

    def _prepare_early(self, cut: float, freed: Sequence[int], tokens: float) -> None:
        """Run the preparation of what is complete on the GPUs that the cut frees, stage after stage."""
        gpus = tuple(sorted(g for actor in freed for g in self.allocation.actors[actor]))
        self.times["cut"] = (cut, cut)
        for stage in (stage for stage in self.run_.stages if stage in PREPARATION_STAGES):
            name = f"{stage}.early"
            self.graph.add_edge("cut", name)
            self.graph.add_edges_from((name, after) for after in list(self.graph.successors(stage)))
            on_gpus = self.run_.profile.stages[stage].gpus > 0
            self._run_stage(stage, gpus if on_gpus else (), cut, tokens, name)

    def _run_stage(self, stage: str, gpus: Gpus, need: float, tokens: float, name: str = "") -> None:
        """Run a stage on the given GPUs (none: on the CPU) from ``need`` on, or as soon as they are free."""
        run = self.run_
        name = name or stage
        seconds = run.profile.stages[stage].seconds(tokens, len(gpus))
        start = need
        if gpus and self.serverless:
            lead = run.profile.functions.cold_start_seconds if self.plan.prewarm is not None else 0.0
            call = self._invoke(stage, gpus, need, lead, exact=True)
            start = max(call.ready, need)
            self._hold(name, "startup", gpus, call.invoked, call.ready)
            self._hold(name, "wait", gpus, call.ready, start)
            self._release(call, gpus, start + seconds)
        elif gpus:
            start = max(need, float(run._free[list(gpus)].max()))
        if gpus:
            self._hold(name, "busy", gpus, start, start + seconds)
        self.times[name] = (start, start + seconds)

    def _gpus_of(self, stage: str, need: float) -> Gpus:
        """Return the GPUs that a stage after generation runs on; none for the CPU."""
        count = self.run_.profile.stages[stage].gpus
        placement, learner = self.plan.preparation, self.allocation.learner
        if count == 0:
            return ()
        if stage == "update_actor" or placement == "learner":
            return learner
        if placement == "actors":
            if stage in LEARNING_STAGES:
                return learner
            return tuple(sorted(g for gpus in self.allocation.actors for g in gpus))
        if placement == "own":
            return self.own[stage]
        return self._soonest(stage, self._least_busy(count, need), need)

    def _soonest(self, stage: str, idle: Gpus, need: float) -> Gpus:
        """Choose between idle GPUs and those on which the stage ran before, and is warm: where it starts first.

        Of equals, GPUs that the learner does not have come first, then the idle ones.
        """
        run = self.run_
        if not self.serverless:
            return idle
        functions = run.profile.functions
        learner = set(self.allocation.learner)

        def start(gpus: Gpus) -> float:
            free = float(run._free[list(gpus)].max())
            warm = run._warm(stage, gpus, max(need - functions.warm_start_seconds, free))
            startup = functions.warm_start_seconds if warm else functions.cold_start_seconds
            lead = startup if self.plan.prewarm is not None else 0.0
            return max(max(need - lead, free) + startup, need)

        used = [g for function, g in run._released if function == stage and len(g) == len(idle) and g != idle]
        return min(
            [idle, *used], key=lambda gpus: (start(gpus), bool(learner.intersection(gpus)), gpus != idle)
        )

    def _least_busy(self, count: int, need: float) -> Gpus:
        """Choose GPUs for a stage: those free when it is needed, the learner's last among them.

        Of equals, those that are free in time to prewarm the stage come first.
        """
        free = self.run_._free
        prewarmed = self.serverless and self.plan.prewarm is not None
        startup = self.run_.profile.functions.warm_start_seconds if prewarmed else 0.0
        number = np.arange(len(free))
        learner = np.isin(number, self.allocation.learner)
        late = np.maximum(free - need, 0.0)
        order = np.lexsort((number, np.maximum(free - (need - startup), 0.0), learner, late))
        return tuple(sorted(order[:count].tolist()))

    def _invoke(
        self, function: str, gpus: Gpus, need: float, lead: float, *, exact: bool = False, name: str = ""
    ) -> _Invocation:
        """Call a function ``lead`` seconds before it is needed, or as soon as its GPUs are free.

        With ``exact``, a lead above the function's start-up is cut to it.
        """
        run = self.run_
        functions = run.profile.functions
        free = float(run._free[list(gpus)].max())

        def called(lead: float) -> float:
            return max(need - lead, free, 0.0)

        invoked = called(min(lead, functions.warm_start_seconds) if exact else lead)
        if exact and not run._warm(function, gpus, invoked):
            invoked = called(min(lead, functions.cold_start_seconds))
        warm = run._warm(function, gpus, invoked)
        released = run._released.get((function, gpus))
        if released is not None and (function, gpus) not in run._cooled:
            self.keep_alive += len(gpus) * min(invoked - released, run._keep_alive((function, gpus)))
        startup = functions.warm_start_seconds if warm else functions.cold_start_seconds
        call = _Invocation(name or function, gpus, invoked, invoked + startup, not warm)
        self.invoked.append(call)
        return call

    def _release(
        self, call: _Invocation | None, gpus: Gpus, at: float, keep_alive: float | None = None
    ) -> None:
        if call is not None:
            key = (call.function.split(".", 1)[0], gpus)
            self.run_._released[key] = at
            self.run_._cooled.discard(key)
            if keep_alive is None:
                self.run_._kept.pop(key, None)
            else:
                self.run_._kept[key] = keep_alive

    def _retire_unused(self) -> None:
        """End the warm decode functions that no actor of the plan calls, as the step begins."""
        run = self.run_
        called = {
            gpus for a, gpus in zip(self.plan.actors, self.allocation.actors, strict=True) if not a.colocated
        }
        for key, released in run._released.items():
            if key[0] == "decode" and key[1] not in called and key not in run._cooled:
                run._kept[key] = min(run._keep_alive(key), self.began - released)
                run._cooled.add(key)
                self.keep_alive += len(key[1]) * run._kept[key]

    def _cool_down(self) -> None:
        """Count the keep-alive of functions that were not called again before it ended."""
        run = self.run_
        for key, released in run._released.items():
            keep = run._keep_alive(key)
            if key not in run._cooled and released + keep <= self.began:
                run._cooled.add(key)
                self.keep_alive += len(key[1]) * keep

    def _hold(
        self, function: str, kind: Literal["startup", "wait", "busy"], gpus: Gpus, start: float, end: float
    ) -> None:
        if end > start:
            self.intervals.append(Interval(function, kind, gpus, start, end))
        index = list(gpus)
        self.run_._free[index] = np.maximum(self.run_._free[index], end)

    def _unheld(self, gpus: Gpus, ended: float) -> float:
        """Return the GPU seconds of the step in which no function holds the given GPUs."""
        held = sum(
            len(set(i.gpus) & set(gpus)) * max(min(i.end, ended) - max(i.start, self.began), 0.0)
            for i in self.intervals
        )
        return max(len(gpus) * (ended - self.began) - held, 0.0)

    def _outcome(
        self,
        decoded: Decoded,
        delivered: BoolArray,
        before: IntArray,
        generated: float,
        ended: float,
        prefill_tokens: int,
    ) -> StepOutcome:
        run, plan, batch = self.run_, self.plan, self.batch
        self._cool_down()
        moves, release = decoded.moves, decoded.release
        counts = [self.pool.counts(actor) for actor in range(len(plan.actors))]
        needed_tokens = self.tree.distinct_tokens()
        admitted = np.flatnonzero(self.pool.generated > before)
        if len(admitted) < len(batch) and not self.deduplicated:
            needed_tokens = PrefixTree.of(batch.select(admitted)).distinct_tokens()
        prefill_tokens += sum(c.prefill_tokens for c in counts)
        learning = [self.times[stage] for stage in run.stages if stage in LEARNING_STAGES]
        learning_seconds = (
            max(end for _, end in learning) - min(start for start, _ in learning) if learning else 0.0
        )
        busy = sum(i.gpu_seconds for i in self.intervals if i.kind == "busy")
        startup = sum(i.gpu_seconds for i in self.intervals if i.kind == "startup")
        early = sum(
            len(i.gpus) * max(min(i.end, self.began) - i.start, 0.0)
            for i in self.intervals
            if i.kind == "wait"
        )
        by_function: dict[str, float] = defaultdict(float)
        billing = run.options.billing
        for interval in self.intervals:
            billed = interval.gpu_seconds
            if self.serverless:
                if interval.kind == "startup" and not billing.startup:
                    continue
                if interval.kind == "wait" and not billing.prewarmed_waiting:
                    billed -= len(interval.gpus) * max(min(interval.end, self.began) - interval.start, 0.0)
            elif interval.kind != "busy":
                continue
            by_function[interval.function.split(".", 1)[0]] += billed
        if self.serverless and billing.keep_alive:
            by_function["keep_alive"] += self.keep_alive
        if self.serverless and billing.learner_waiting:
            by_function["learner_waiting"] += self._unheld(self.allocation.learner, ended)
        if not self.serverless:
            held = set(self.allocation.learner).union(*self.allocation.actors)
            held.update(gpu for i in self.intervals for gpu in i.gpus)
            by_function["held"] = len(held) * (ended - self.began) - busy
        run.now = ended
        run.learning_seconds = learning_seconds
        run._learning_began = min((start for start, _ in learning), default=ended)
        return StepOutcome(
            step=plan.step,
            epoch=int(batch.epoch[0]),
            policy=plan.policy,
            began=self.began,
            step_seconds=ended - self.began,
            generation_seconds=generated - self.began,
            learning_seconds=learning_seconds,
            gpu_seconds=sum(by_function.values()),
            busy_gpu_seconds=busy,
            startup_gpu_seconds=startup,
            prewarmed_waiting_gpu_seconds=early,
            keep_alive_gpu_seconds=self.keep_alive,
            by_function=dict(by_function),
            prefill_tokens=prefill_tokens,
            redundant_prefill_tokens=prefill_tokens - needed_tokens,
            migrations=sum(len(move.responses) for move in moves),
            migrated_kv_bytes=sum(move.kv_bytes for move in moves),
            preemptions=sum(c.preemptions for c in counts),
            cold_starts=sum(call.cold for call in self.invoked),
            actors=len(plan.actors),
            launched=len(batch),
            responses=int(delivered.sum()),
            response_tokens=int(batch.response_tokens[delivered].sum()),
            carried_tokens=int(before.sum()),
            stale_tokens=int(before[delivered].sum()),
            left_tokens=int(self.pool.generated[~delivered].sum()),
            delivered=delivered,
            generated=self.pool.generated,
            decoded_tokens=sum(c.tokens for c in counts),
            peak_running=max(c.peak_running for c in counts),
            peak_kv_tokens=max(c.peak_kv_tokens for c in counts),
            finish=self.pool.finish - self.began,
            release=release - self.began,
            moves=moves,
            intervals=tuple(self.intervals),
            stage_times={name: (a - self.began, b - self.began) for name, (a, b) in self.times.items()},
            graph=self.graph,
        )
