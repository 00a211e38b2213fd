"""The replay: what a plan does on the true lengths, second by second.

A run is a sequence of steps on one cluster. Times inside a step count from the instant the learner's new
weights exist. Every stage starts when its inputs are there and its GPUs are free; a serverless function holds
its GPUs from its invocation to its release. ``docs/model.md`` lists the approximations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.decode import DecodePool, EngineOptions
from rlhfless.models.migration import Move, decode_actors
from rlhfless.models.plan import Allocation, Plan, allocate, check_responses
from rlhfless.models.prefix import PrefixTree
from rlhfless.models.profile import LEARNING_STAGES, PREPARATION_STAGES, Link, Profile
from rlhfless.models.stages import step_graph
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray, Trace

Gpus = tuple[int, ...]


@dataclass(frozen=True)
class Billing:
    """Which times of a serverless function are billed beside its work; all sums are reported either way."""

    startup: bool = True
    prewarmed_waiting: bool = True
    keep_alive: bool = False


@dataclass(frozen=True)
class ReplayOptions:
    """Choices of the replay that neither the plan nor the profile makes.

    ``weight_transfer``: new weights reach all actors at once (a broadcast), or the learner's links serve them
    in turn. ``kv_transfer``: the same for the prefill actor's KV, which differs from actor to actor.
    ``switch_seconds``: what a co-located serverful run pays once a step to change between learning and
    generation.
    ``generation_overhead_seconds``: what every actor pays before it decodes, on any platform (waking the engine,
    scattering the batch); a calibration finds it as the part of generation that no token explains.
    ``warm_at_start``: every function is warm when the run begins, as in the middle of a long run; otherwise
    its first start is cold.
    """

    engine: EngineOptions = EngineOptions()
    billing: Billing = Billing()
    weight_transfer: Literal["broadcast", "in_turn"] = "broadcast"
    kv_transfer: Literal["in_turn", "parallel"] = "in_turn"
    switch_seconds: float = 0.0
    generation_overhead_seconds: float = 0.0
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
    ``finish`` is when each response was complete, shape (responses,); ``stage_times`` maps each node of
    ``graph`` to its start and end.
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
    responses: int
    response_tokens: int
    decoded_tokens: int
    finish: FloatArray
    release: FloatArray
    moves: tuple[Move, ...]
    intervals: tuple[Interval, ...]
    stage_times: dict[str, tuple[float, float]]
    graph: nx.DiGraph = field(repr=False)

    @property
    def idle_gpu_seconds(self) -> float:
        """Billed GPU seconds in which nothing was computed."""
        return self.gpu_seconds - self.busy_gpu_seconds


@dataclass(frozen=True)
class _Invocation:
    """A function that has been called: GPUs held from ``invoked``, ready to work at ``ready``."""

    function: str
    gpus: Gpus
    invoked: float
    ready: float
    cold: bool


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

    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        stages: Sequence[str],
        options: ReplayOptions | None = None,
    ) -> None:
        self.profile = profile
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
        self._released: dict[tuple[str, Gpus], float] = {}

    def step(
        self, plan: Plan, batch: Trace, where: str = "plan", tree: PrefixTree | None = None
    ) -> StepOutcome:
        """Replay one step and move the clock to its end; ``tree`` is the batch's, where it is known already.

        Raises
        ------
        InputError
            When the plan leaves out or repeats a response, asks for GPUs that do not exist, or a response
            cannot fit an actor; the state of the replay is unchanged then.

        """
        check_responses(plan, batch, where)
        for number, actor in enumerate(plan.actors):
            if actor.gpus != self.profile.actor.gpus:
                raise InputError(
                    f"{where}: actor {number} has {actor.gpus} GPUs, profile {self.profile.name} holds for "
                    f"{self.profile.actor.gpus}"
                )
        allocation = allocate(plan, self.cluster, where)
        tree = tree or PrefixTree.of(batch)
        pool = DecodePool(
            self.profile,
            batch.prompt_tokens,
            batch.response_tokens,
            tree.group,
            len(plan.actors),
            self.options.engine,
        )
        return _Step(self, plan, batch, allocation, tree, pool).run()

    def _link(self, source: Sequence[int], target: Sequence[int]) -> Link:
        nodes = {gpu // self.cluster.gpus_per_node for gpu in source}
        near = target[0] // self.cluster.gpus_per_node in nodes
        return self.profile.links.within_node if near else self.profile.links.between_nodes

    def _startup(self, function: str, gpus: Gpus, at: float) -> tuple[float, bool]:
        """Return the start-up seconds of a function invoked at ``at``, and whether it is cold."""
        functions = self.profile.functions
        first = 0.0 if self.options.warm_at_start else None
        released = self._released.get((function, gpus), first)
        if released is not None and at - released <= functions.keep_alive_seconds:
            return functions.warm_start_seconds, False
        return functions.cold_start_seconds, True


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
    ) -> None:
        self.run_ = run
        self.plan = plan
        self.batch = batch
        self.allocation = allocation
        self.tree = tree
        self.pool = pool
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
        switch = 0.0 if self.serverless else run.options.switch_seconds
        prefilled, prefill_tokens = self._prefill(self.began + switch)
        starts, calls = self._start_actors(self.began + switch, prefilled)
        for actor, start in enumerate(starts):
            self.pool.start(actor, start)
            self.pool.add(actor, plan.actors[actor].responses)
        decoded = decode_actors(
            self.pool, plan.migration, self._transfer, run.profile.memory.kv_bytes_per_token
        )
        for actor, gpus in enumerate(self.allocation.actors):
            counts = self.pool.counts(actor)
            end = max(counts.clock, starts[actor])
            self.times[f"decode.{actor}"] = (starts[actor], end)
            release = max(float(decoded.release[actor]), end)
            self._hold(f"decode.{actor}", "busy", gpus, starts[actor], end)
            self._hold(f"decode.{actor}", "wait", gpus, end, release)
            if calls[actor] is not None:
                self._release(calls[actor], gpus, release)
        generated = max(end for name, (_, end) in self.times.items() if name.startswith("decode."))
        ended = self._after_generation(generated)
        return self._outcome(decoded.release, decoded.moves, generated, ended, prefill_tokens)

    def _prefill(self, now: float) -> tuple[float, int]:
        """Prefill distinct prefixes on the learner's GPUs; return when they are there, and their tokens."""
        if not self.deduplicated:
            return now, 0
        limit = self.plan.prefill.shared_prefix_tokens
        gpus = self.allocation.learner
        seconds = self.tree.prefill_seconds(self.run_.profile, len(gpus), limit)
        self.times["prefill"] = (now, now + seconds)
        self._hold("prefill", "busy", gpus, now, now + seconds)
        self.pool.cached[:] = self.tree.truncated(limit)[self.tree.group]
        return now + seconds, self.tree.distinct_tokens(limit)

    def _start_actors(self, now: float, prefilled: float) -> tuple[list[float], list[_Invocation | None]]:
        """Invoke the actors and bring them weights and KV; return when each starts to decode."""
        run, plan = self.run_, self.plan
        learner = self.allocation.learner
        memory = run.profile.memory
        late = self._prewarm_error()
        starts: list[float] = []
        calls: list[_Invocation | None] = []
        # When each of the learner's links (within its nodes, between nodes) is free again.
        weight_link: dict[Link, float] = defaultdict(lambda: now)
        kv_link: dict[Link, float] = defaultdict(lambda: prefilled)
        for number, (actor, gpus) in enumerate(zip(plan.actors, self.allocation.actors, strict=True)):
            link = run._link(learner, gpus)
            call = None
            ready = now
            if self.serverless and not actor.colocated:
                lead = max(actor.prewarm_seconds + late, 0.0) if plan.prewarm is not None else 0.0
                call = self._invoke("decode", gpus, now, lead, name=f"decode.{number}")
                ready = max(call.ready, now)
            weights = ready
            if not actor.colocated:
                begin = ready
                if run.options.weight_transfer == "in_turn":
                    begin = max(begin, weight_link[link])
                weights = begin + link.seconds(memory.weight_bytes)
                weight_link[link] = weights
                self.times[f"weight_sync.{number}"] = (begin, weights)
            else:
                self.times[f"weight_sync.{number}"] = (ready, ready)
            start = weights
            if self.deduplicated:
                begin = max(weights, prefilled)
                arrival = begin
                sent = self._prefix_bytes(actor.responses)
                if not actor.colocated and sent:
                    if run.options.kv_transfer == "in_turn":
                        begin = max(begin, kv_link[link])
                    arrival = begin + link.seconds(sent)
                    kv_link[link] = arrival
                self.times[f"kv_transfer.{number}"] = (begin, arrival)
                start = arrival
            start = max(start, *(run._free[list(gpus)].tolist())) + run.options.generation_overhead_seconds
            if call is not None:
                self._hold(f"decode.{number}", "startup", gpus, call.invoked, call.ready)
                self._hold(f"decode.{number}", "wait", gpus, call.ready, start)
            starts.append(start)
            calls.append(call)
        return starts, calls

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
        link = self.run_._link(self.allocation.actors[source], self.allocation.actors[target])
        return link.seconds(sent_bytes)

    def _after_generation(self, generated: float) -> float:
        """Run preparation and learning; return when the step ends."""
        run = self.run_
        tokens = float(self.batch.prompt_tokens.sum() + self.batch.response_tokens.sum())
        for stage in run.stages:
            cost = run.profile.stages[stage]
            needs = [self.times[name][1] for name in self.graph.predecessors(stage)]
            need = max([generated, *needs])
            learner = self.allocation.learner
            if cost.gpus == 0:
                self.times[stage] = (need, need + cost.seconds(tokens))
                continue
            if stage == "update_actor" or self.plan.preparation == "learner":
                gpus = learner
            else:
                gpus = self._least_busy(cost.gpus, need)
            seconds = cost.seconds(tokens, len(gpus))
            if self.serverless:
                lead = run.profile.functions.cold_start_seconds if self.plan.prewarm is not None else 0.0
                call = self._invoke(stage, gpus, need, lead, exact=True)
                start = max(call.ready, need)
                self._hold(stage, "startup", gpus, call.invoked, call.ready)
                self._hold(stage, "wait", gpus, call.ready, start)
                self._hold(stage, "busy", gpus, start, start + seconds)
                self._release(call, gpus, start + seconds)
            else:
                start = max(need, float(run._free[list(gpus)].max()))
                self._hold(stage, "busy", gpus, start, start + seconds)
            self.times[stage] = (start, start + seconds)
        return max(end for _, end in self.times.values())

    def _least_busy(self, count: int, need: float) -> Gpus:
        """Choose GPUs for a stage: those free in time first, the learner's last among them."""
        free = self.run_._free
        startup = self.run_.profile.functions.warm_start_seconds
        learner = np.isin(np.arange(len(free)), self.allocation.learner)
        late = np.maximum(free - (need - startup), 0.0)
        order = np.lexsort((np.arange(len(free)), learner, late))
        return tuple(sorted(order[:count].tolist()))

    def _invoke(
        self, function: str, gpus: Gpus, need: float, lead: float, *, exact: bool = False, name: str = ""
    ) -> _Invocation:
        """Call a function ``lead`` seconds before it is needed, or as soon as its GPUs are free.

        With ``exact``, a lead above the function's start-up is cut to it.
        """
        run = self.run_
        free = float(run._free[list(gpus)].max())
        startup, cold = run._startup(function, gpus, max(need, free))
        if exact:
            lead = min(lead, startup)
        invoked = max(need - lead, free, 0.0)
        released = run._released.get((function, gpus))
        if released is not None:
            idle = min(invoked - released, run.profile.functions.keep_alive_seconds)
            self.keep_alive += len(gpus) * max(idle, 0.0)
        call = _Invocation(name or function, gpus, invoked, invoked + startup, cold)
        self.invoked.append(call)
        return call

    def _release(self, call: _Invocation | None, gpus: Gpus, at: float) -> None:
        if call is not None:
            function = call.function.split(".", 1)[0]
            self.run_._released[(function, gpus)] = at

    def _hold(
        self, function: str, kind: Literal["startup", "wait", "busy"], gpus: Gpus, start: float, end: float
    ) -> None:
        if end > start:
            self.intervals.append(Interval(function, kind, gpus, start, end))
        index = list(gpus)
        self.run_._free[index] = np.maximum(self.run_._free[index], end)

    def _outcome(
        self,
        release: FloatArray,
        moves: tuple[Move, ...],
        generated: float,
        ended: float,
        prefill_tokens: int,
    ) -> StepOutcome:
        run, plan, batch = self.run_, self.plan, self.batch
        counts = [self.pool.counts(actor) for actor in range(len(plan.actors))]
        prefill_tokens += sum(c.prefill_tokens for c in counts)
        learning = [self.times[stage] for stage in run.stages if stage in LEARNING_STAGES]
        learning_seconds = max(end for _, end in learning) - min(start for start, _ in learning)
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
        if not self.serverless:
            held = set(self.allocation.learner).union(*self.allocation.actors)
            held.update(gpu for i in self.intervals for gpu in i.gpus)
            by_function["held"] = len(held) * (ended - self.began) - busy
        run.now = ended
        run.learning_seconds = learning_seconds
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
            redundant_prefill_tokens=prefill_tokens - self.tree.distinct_tokens(),
            migrations=sum(len(move.responses) for move in moves),
            migrated_kv_bytes=sum(move.kv_bytes for move in moves),
            preemptions=sum(c.preemptions for c in counts),
            cold_starts=sum(call.cold for call in self.invoked),
            actors=len(plan.actors),
            responses=len(batch),
            response_tokens=int(batch.response_tokens.sum()),
            decoded_tokens=sum(c.tokens for c in counts),
            finish=self.pool.finish - self.began,
            release=release - self.began,
            moves=moves,
            intervals=tuple(self.intervals),
            stage_times={name: (a - self.began, b - self.began) for name, (a, b) in self.times.items()},
            graph=self.graph,
        )
