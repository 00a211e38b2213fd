"""A plan: what a policy decides for one step, in memory and as the JSON that external runtimes read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhfless.models.cluster import Cluster
from rlhfless.models.profile import first_problem
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import IntArray, Trace

SCHEMA = "rlhfless.plan/1"
Platform = Literal["serverless", "serverful"]
#: Where the stages between generation and learning run: on the learner's GPUs or on all actors' GPUs, one after
#: the other; each on whatever GPUs are free; or each on GPUs that it shares with nothing else.
Preparation = Literal["learner", "actors", "separate", "own"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Prefill(_Part):
    """Where prompts are prefilled.

    ``local``: every decode actor prefills its own prompts. ``deduplicated``: one prefill actor prefills each
    distinct prefix of up to ``shared_prefix_tokens`` tokens once (null: whole prompts) and sends the KV;
    decode actors prefill the rest. It takes the first ``gpus`` GPUs of the learner, where the new weights
    are, so ``node`` is the learner's.
    """

    mode: Literal["local", "deduplicated"] = "local"
    gpus: Annotated[int, Field(ge=0)] = 0
    node: Annotated[int, Field(ge=0)] = 0
    shared_prefix_tokens: Annotated[int, Field(ge=0)] | None = None


class Migration(_Part):
    """What happens to stragglers.

    ``none``: they stay where they are.

    ``global``: once ``threshold`` of the batch is complete, all unfinished responses gather on ``keep`` actors
    (null: as many as RLHFuse's rule keeps), see ``models/global_cut.py``.

    ``dispatch``: actors take their next response from one queue, in chunks of ``chunk_tokens`` (null: whole
    responses), see ``models/dispatch.py``.

    ``local``: an actor that has completed ``threshold`` of its responses ends, and all its
    unfinished ones move to other running actors with open slots (RLHFless, sec. 4.3). In detail:

    * Decisions fall at the instants at which responses complete, after all completions of the instant. An
      actor with ``n`` responses may be cut once ``ceil(threshold * n)`` are complete, if any are left and
      the open slots of the other running actors hold them all. Among several such actors the one with the
      fewest left goes first, then the one with the lower number; then the rule looks again.
    * A running actor is one with unfinished responses that has not been cut. Its open slots are its slots
      less its unfinished responses, those on their way to it included.
    * The cut actor finishes the iteration under way. What is unfinished then leaves it: first the running
      responses in order of admission, then the waiting ones, stably sorted by tokens generated, most first.
      One by one they choose their target; equal targets give way to the lower number.
    * With ``transfer`` a running response brings the KV of its prompt and tokens, a waiting one what the
      actor was sent for it, its targets being served in turn by number; the actor is released after the
      last transfer. What is still on its way to the actor leaves it no earlier than it arrives. A target
      admits what it was sent, at the end of its queue in the order of leaving, when the KV is there.

    Further fields say what the paper leaves open:

    ``partial``: where the open slots do not hold all of an actor's unfinished responses, the most advanced take
    what there is; the actor goes on with the rest, takes nothing in any more, and is cut again as slots open.
    ``wait_for_slots``: without enough open slots the cut waits for them, else it is dropped for good.
    ``kv``: moved responses bring their KV over the link, or the target prefills prompt and tokens again.
    ``slots``: an actor has as many slots as it was assigned responses (at most ``max_running``), or
    ``max_running``.
    ``target``: the actor with the most open slots, or with the most unfinished responses.
    ``count_moved``: responses that moved in count towards an actor's threshold.
    ``keep_first``: actor 0, which sits beside the learner with the most work, is never cut.
    """

    rule: Literal["none", "local", "global", "dispatch"] = "none"
    threshold: Annotated[float, Field(gt=0, le=1)] = 1.0
    partial: bool = False
    wait_for_slots: bool = True
    kv: Literal["transfer", "recompute"] = "transfer"
    slots: Literal["assigned", "engine"] = "assigned"
    target: Literal["most_slots", "most_unfinished"] = "most_slots"
    count_moved: bool = True
    keep_first: bool = True
    keep: Annotated[int, Field(ge=1)] | None = None
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None


class Learner(_Part):
    """The GPUs that train the actor: ``gpus`` consecutive ones from the first GPU of ``node``."""

    gpus: Annotated[int, Field(ge=1)]
    node: Annotated[int, Field(ge=0)] = 0


class Prewarm(_Part):
    """When functions are invoked before they are needed.

    ``learning_seconds`` is the duration that the policy expects of the learning stage before this step; an
    actor's ``prewarm_seconds`` counts back from its expected end.
    """

    learning_seconds: Annotated[float, Field(ge=0)] | None = None


class LowerBound(_Part):
    """Proven lower bounds on the predicted lengths."""

    generation_seconds: float
    gpu_seconds: float


class Predicted(_Part):
    """What the policy expects of its plan, on predicted lengths. ``gpu_seconds`` are those of generation."""

    generation_seconds: float
    gpu_seconds: float
    step_seconds: float | None = None
    lower_bound: LowerBound | None = None


class _ActorDocument(_Part):
    id: Annotated[int, Field(ge=0)]
    gpus: Annotated[int, Field(ge=1)]
    node: Annotated[int, Field(ge=0)]
    responses: tuple[tuple[str, Annotated[int, Field(ge=0)]], ...]
    prewarm_seconds: Annotated[float, Field(ge=0)] = 0.0
    keep_alive_seconds: Annotated[float, Field(ge=0)] | None = None
    colocated: bool = False


class PlanDocument(_Part):
    """The JSON form of a plan. Its JSON Schema stands in ``plan.schema.json`` beside this module."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="rlhfless plan, version 1")

    version: Literal["rlhfless.plan/1"] = Field(alias="schema")
    step: Annotated[int, Field(ge=0)]
    policy: str
    platform: Platform
    prefill: Prefill = Prefill()
    actors: Annotated[tuple[_ActorDocument, ...], Field(min_length=1)]
    migration: Migration = Migration()
    learner: Learner
    preparation: Preparation = "separate"
    overlap_preparation: bool = False
    deliver_prompts: Annotated[int, Field(ge=1)] | None = None
    prewarm: Prewarm | None = None
    retire_unused: bool = False
    predicted: Predicted | None = None


@dataclass(frozen=True)
class ActorPlan:
    """One decode actor: ``responses`` are rows of the step's batch, in admission order.

    ``colocated``: it sits on the learner's GPUs of its node, so that the new weights are there at once and it
    needs no start-up. ``prewarm_seconds``:
    how long before the expected end of the learning stage its function is invoked. ``keep_alive_seconds``: how
    long the function stays warm after its release; null: as long as the profile says.
    """

    gpus: int
    node: int
    responses: IntArray
    prewarm_seconds: float = 0.0
    colocated: bool = False
    keep_alive_seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a policy decides for one step. ``predicted_tokens`` is what it expected of each response.

    ``overlap_preparation``: after a global cut, preparation of the responses that are complete begins on the
    GPUs that the cut frees. ``deliver_prompts``: generation ends when so many prompts are complete; the
    step trains on those only. ``retire_unused``: decode functions that are still warm and that no actor of this
    plan calls end when the step begins, whatever is left of their keep-alive.
    """

    step: int
    policy: str
    platform: Platform
    actors: tuple[ActorPlan, ...]
    learner: Learner
    prefill: Prefill = field(default_factory=Prefill)
    migration: Migration = field(default_factory=Migration)
    preparation: Preparation = "separate"
    overlap_preparation: bool = False
    deliver_prompts: int | None = None
    prewarm: Prewarm | None = None
    retire_unused: bool = False
    predicted: Predicted | None = None
    predicted_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def document(self, batch: Trace) -> dict[str, Any]:
        """Return the JSON form, with responses named ``[prompt_id, sample]``."""
        ids = batch.prompt_ids
        prompts, samples = batch.prompt, batch.sample
        return {
            "schema": SCHEMA,
            "step": self.step,
            "policy": self.policy,
            "platform": self.platform,
            "prefill": self.prefill.model_dump(),
            "actors": [
                {
                    "id": number,
                    "gpus": actor.gpus,
                    "node": actor.node,
                    "responses": [[ids[prompts[r]], int(samples[r])] for r in actor.responses.tolist()],
                    "prewarm_seconds": actor.prewarm_seconds,
                    "keep_alive_seconds": actor.keep_alive_seconds,
                    "colocated": actor.colocated,
                }
                for number, actor in enumerate(self.actors)
            ],
            "migration": self.migration.model_dump(),
            "learner": self.learner.model_dump(),
            "preparation": self.preparation,
            "overlap_preparation": self.overlap_preparation,
            "deliver_prompts": self.deliver_prompts,
            "prewarm": None if self.prewarm is None else self.prewarm.model_dump(),
            "retire_unused": self.retire_unused,
            "predicted": None if self.predicted is None else self.predicted.model_dump(),
        }


def parse_plan(values: Mapping[str, Any], batch: Trace, where: str) -> Plan:
    """Build a plan from its JSON form for the given step's batch.

    Raises
    ------
    InputError
        In one line, when a key is wrong, a response is unknown, or one stands in no actor or in two.

    """
    try:
        document = PlanDocument.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error)}") from None
    ids = [actor.id for actor in document.actors]
    if ids != list(range(len(ids))):
        raise InputError(f"{where}: actors.id must count from 0 on, is {', '.join(map(str, ids))}")
    if len(batch) and document.step != int(batch.step[0]):
        raise InputError(
            f"{where}: the plan is for step {document.step}, the batch is of step {batch.step[0]}"
        )
    code = {name: number for number, name in enumerate(batch.prompt_ids)}
    row = {(int(p), int(s)): r for r, (p, s) in enumerate(zip(batch.prompt, batch.sample, strict=True))}
    actors = []
    for actor in document.actors:
        rows = []
        for prompt_id, sample in actor.responses:
            found = row.get((code.get(prompt_id, -1), sample))
            if found is None:
                raise InputError(
                    f"{where}: actor {actor.id}: response [{prompt_id}, {sample}] is not in step {document.step}"
                )
            rows.append(found)
        actors.append(
            ActorPlan(
                gpus=actor.gpus,
                node=actor.node,
                responses=np.array(rows, dtype=np.int64),
                prewarm_seconds=actor.prewarm_seconds,
                colocated=actor.colocated,
                keep_alive_seconds=actor.keep_alive_seconds,
            )
        )
    plan = Plan(
        step=document.step,
        policy=document.policy,
        platform=document.platform,
        actors=tuple(actors),
        learner=document.learner,
        prefill=document.prefill,
        migration=document.migration,
        preparation=document.preparation,
        overlap_preparation=document.overlap_preparation,
        deliver_prompts=document.deliver_prompts,
        prewarm=document.prewarm,
        retire_unused=document.retire_unused,
        predicted=document.predicted,
    )
    check_responses(plan, batch, where)
    return plan


def check_responses(plan: Plan, batch: Trace, where: str) -> None:
    """Refuse a plan in which a response of the batch does not stand in exactly one actor."""
    n = len(batch)
    if not plan.actors:
        raise InputError(f"{where}: the plan has no actors")
    rows = np.concatenate([np.asarray(actor.responses, dtype=np.int64) for actor in plan.actors])
    outside = rows[(rows < 0) | (rows >= n)]
    if len(outside):
        raise InputError(f"{where}: the plan names row {outside[0]}, the batch has rows 0..{n - 1}")
    times = np.bincount(rows, minlength=n)
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        r = int(wrong[0])
        name = f"[{batch.prompt_ids[batch.prompt[r]]}, {int(batch.sample[r])}]"
        rule = "stands in no actor" if times[r] == 0 else f"is named {times[r]} times"
        raise InputError(f"{where}: response {name} {rule}; every response must stand in exactly one actor")


@dataclass(frozen=True)
class Allocation:
    """The GPUs of a plan's parts, as numbers ``node * gpus_per_node + index``, ascending.

    ``prefill`` is empty where every actor prefills its own prompts, ``rest`` are the GPUs that neither an actor
    nor the learner has.
    """

    actors: tuple[tuple[int, ...], ...]
    learner: tuple[int, ...]
    prefill: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()


def allocate(plan: Plan, cluster: Cluster, where: str) -> Allocation:
    """Give every actor, the prefill actor and the learner their GPUs.

    An actor sits on one node. Co-located ones come first and take the learner's GPUs of their node, then
    other ones of it. The rest take the lowest free GPUs of their node, the learner's last, since a function
    cannot be prewarmed on them while the learner works.

    Raises
    ------
    InputError
        In one line, when a node or the cluster has too few GPUs, or the prefill actor is not on the learner.

    """
    per_node, total = cluster.gpus_per_node, cluster.nodes * cluster.gpus_per_node
    first = plan.learner.node * per_node
    if plan.learner.node >= cluster.nodes or first + plan.learner.gpus > total:
        raise InputError(
            f"{where}: the learner asks for {plan.learner.gpus} GPUs from node {plan.learner.node} on, "
            f"the cluster has {cluster.nodes} nodes of {per_node}"
        )
    learner = tuple(range(first, first + plan.learner.gpus))
    prefill: tuple[int, ...] = ()
    if plan.prefill.mode == "deduplicated":
        if plan.prefill.node != plan.learner.node or not 1 <= plan.prefill.gpus <= plan.learner.gpus:
            raise InputError(
                f"{where}: prefill asks for {plan.prefill.gpus} GPUs on node {plan.prefill.node}, must be 1 to "
                f"{plan.learner.gpus} of the learner's, from node {plan.learner.node} on"
            )
        prefill = learner[: plan.prefill.gpus]
    taken: set[int] = set()
    chosen: dict[int, tuple[int, ...]] = {}
    for number in sorted(range(len(plan.actors)), key=lambda number: not plan.actors[number].colocated):
        actor = plan.actors[number]
        if actor.node >= cluster.nodes:
            raise InputError(
                f"{where}: actor {number}: node {actor.node} does not exist, nodes are 0..{cluster.nodes - 1}"
            )
        free = [g for g in range(actor.node * per_node, (actor.node + 1) * per_node) if g not in taken]
        if actor.colocated and not any(g in learner for g in free):
            raise InputError(
                f"{where}: actor {number} is colocated, but node {actor.node} has no GPU of the learner free"
            )
        # Stable: the GPUs of a kind stay ascending.
        free.sort(key=lambda g: (g in learner) != plan.actors[number].colocated)
        if len(free) < actor.gpus:
            raise InputError(
                f"{where}: actor {number} asks for {actor.gpus} GPUs on node {actor.node}, "
                f"which has {len(free)} left of {per_node}"
            )
        chosen[number] = tuple(sorted(free[: actor.gpus]))
        taken.update(chosen[number])
    rest = tuple(g for g in range(total) if g not in taken and g not in learner)
    return Allocation(tuple(chosen[number] for number in range(len(plan.actors))), learner, prefill, rest)


@cache
def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan, as the package ships it."""
    text = files("rlhfless.models").joinpath("plan.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
