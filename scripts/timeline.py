"""Who ran where: the timeline of a run, and its file in the trace event format.

Times are whole microseconds since the run began. The file opens in Perfetto and chrome://tracing; the format is
described in "Trace Event Format" (the Chromium project) and, as far as Perfetto reads it, in Perfetto's page
"External trace formats". It holds all that a timeline does: :func:`read_trace_events` gives it back.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.plan import allocate
from rlhfless.models.profile import LEARNING_STAGES
from rlhfless.policies import SimulatedStep
from rlhfless.traces.errors import InputError

Gpus = tuple[int, ...]
#: What GPUs are held for: work, a function's start-up, a function's waiting (for inputs, or until what leaves it is
#: sent), a serverful pool's idle time; and what is on its way to an actor meanwhile.
Kind = Literal["busy", "startup", "wait", "idle", "weights", "kv"]
#: The kinds that hold GPUs; no two of them overlap on one GPU.
HOLDING = ("busy", "startup", "wait", "idle")

_MICRO = 1e6


class Span(NamedTuple):
    """A function on some GPUs from ``start`` to ``end``; without GPUs it runs on the CPU."""

    function: str
    kind: Kind
    gpus: Gpus
    start: int
    end: int


class Migrated(NamedTuple):
    """So many responses that left actor ``source`` at ``sent`` and could go on at ``target`` from ``ready``."""

    source: int
    target: int
    responses: int
    kv_bytes: int
    sent: int
    ready: int


class ActorWork(NamedTuple):
    """An actor's GPUs, the responses that it was assigned, those that it completed, and all of their tokens.

    The last two are None under online dispatch, where the replay does not say who completed what.
    """

    gpus: Gpus
    assigned: int
    completed: int | None
    tokens: int | None


@dataclass(frozen=True)
class StepTimeline:
    """One step: when its weights existed, when generation and the step ended, and what went on."""

    step: int
    began: int
    generated: int
    ended: int
    actors: tuple[ActorWork, ...] = field(repr=False)
    spans: tuple[Span, ...] = field(repr=False)
    moves: tuple[Migrated, ...] = field(repr=False)


@dataclass(frozen=True)
class RunTimeline:
    """The steps of one policy's run on ``nodes`` nodes."""

    policy: str
    seed: int
    nodes: int
    gpus_per_node: int
    steps: tuple[StepTimeline, ...] = field(repr=False)

    @classmethod
    def of(cls, steps: Iterable[SimulatedStep], cluster: Cluster, policy: str, seed: int = 0) -> RunTimeline:
        """Take the timeline of simulated steps."""
        taken = tuple(step_timeline(step, cluster) for step in steps)
        return cls(policy, seed, cluster.nodes, cluster.gpus_per_node, taken)


#: Threads of the run's own process, and the category of what moves between actors.
_STEPS, _GENERATION = 1, 2
_MIGRATION = "migration"


class Look(NamedTuple):
    """How a kind of span is drawn: fill, pattern (in the letters of Plotly and matplotlib) and its ink.

    Fills differ in lightness too, so that grey print tells them apart. ``thin`` ones lie over what waits for them.
    """

    name: str
    label: str
    color: str
    pattern: str = ""
    ink: str = "#555555"
    busy: bool = False
    thin: bool = False


LOOKS = (
    Look("prefill", "prefill", "#5e3c99", busy=True),
    Look("decode", "decode", "#8fbfe4", busy=True),
    Look("preparation", "preparation", "#6fbfae", ".", "#45998a", busy=True),
    Look("learning", "learning", "#e0983c", "-", "#b06f1c", busy=True),
    Look("startup", "start-up of a function", "#f3e79b", "x", "#a89b3a"),
    Look("wait", "held, waiting", "#ffffff", "/", "#777777"),
    Look("idle", "pool held, idle", "#ffffff", "\\", "#b0b0b0"),
    Look("weights", "weights on their way", "#222222", thin=True),
    Look("kv", "KV on its way", "#c2185b", thin=True),
)
#: The colour of responses that migrate.
MIGRATION_COLOR = "#b2182b"


def look_of(span: Span) -> int:
    """Return the position in ``LOOKS`` of what a span is drawn as."""
    stage = span.function.split(".", 1)[0]
    name = str(span.kind)
    if span.kind == "busy":
        name = "learning" if stage in LEARNING_STAGES else "preparation"
        name = stage if stage in ("prefill", "decode") else name
    return next(number for number, look in enumerate(LOOKS) if look.name == name)


def step_timeline(step: SimulatedStep, cluster: Cluster) -> StepTimeline:
    """Take the timeline of one step.

    Idle spans are the times in which GPUs of a serverful pool are held and nothing runs on them; they and the
    replay's intervals add up to the billed GPU seconds (with the default billing).
    """
    plan, outcome = step.plan, step.outcome
    allocation = allocate(plan, cluster, f"step {plan.step}")
    spans = [Span(i.function, i.kind, i.gpus, _micro(i.start), _micro(i.end)) for i in outcome.intervals]
    on_gpus = {span.function for span in spans}
    for name, (start, end) in outcome.stage_times.items():
        function, _, actor = name.partition(".")
        at = (_micro(outcome.began + start), _micro(outcome.began + end))
        if function in _TRANSFERS:
            spans.append(Span(f"decode.{actor}", _TRANSFERS[function], allocation.actors[int(actor)], *at))
        elif name not in on_gpus and name != "cut":
            spans.append(Span(name, "busy", (), *at))
    began, ended = _micro(outcome.began), _micro(outcome.began + outcome.step_seconds)
    if plan.platform == "serverful":
        held = {*allocation.learner, *(g for gpus in allocation.actors for g in gpus)}
        held.update(g for span in spans for g in span.gpus)
        spans += _gaps(spans, sorted(held), began, ended)
    return StepTimeline(
        step=plan.step,
        began=began,
        generated=_micro(outcome.began + outcome.generation_seconds),
        ended=ended,
        actors=tuple(_actor_work(step, allocation.actors)),
        spans=tuple(sorted((span for span in spans if span.end > span.start), key=_order)),
        moves=tuple(
            Migrated(m.source, m.target, len(m.responses), round(m.kv_bytes), _micro(m.sent), _micro(m.ready))
            for m in outcome.moves
        ),
    )


_TRANSFERS: dict[str, Kind] = {"weight_sync": "weights", "kv_transfer": "kv"}


def _order(span: Span) -> tuple[int, Gpus, str, str]:
    return span.start, span.gpus, span.kind, span.function


def _micro(seconds: float) -> int:
    return round(float(seconds) * _MICRO)


def _gaps(spans: Sequence[Span], held: Sequence[int], began: int, ended: int) -> Iterator[Span]:
    """Yield when nothing runs on the held GPUs; GPUs with the same gaps share a span."""
    gaps: dict[tuple[int, int], list[int]] = defaultdict(list)
    for gpu in held:
        taken = sorted((s.start, s.end) for s in spans if s.kind in HOLDING and gpu in s.gpus)
        for (_, end), (start, _) in pairwise([(began, began), *taken, (ended, ended)]):
            if start > end:
                gaps[end, start].append(gpu)
    for (start, end), gpus in gaps.items():
        yield Span("pool", "idle", tuple(gpus), start, end)


def _actor_work(step: SimulatedStep, gpus: Sequence[Gpus]) -> Iterator[ActorWork]:
    plan, outcome = step.plan, step.outcome
    owner = np.empty(len(step.batch), dtype=np.int64)
    for number, actor in enumerate(plan.actors):
        owner[actor.responses] = number
    for move in outcome.moves:
        owner[move.responses] = move.target
    told = plan.migration.rule != "dispatch"
    complete = np.isfinite(outcome.finish)
    for number, actor in enumerate(plan.actors):
        own = complete & (owner == number)
        tokens = int(step.batch.response_tokens[own].sum())
        yield ActorWork(
            gpus[number], len(actor.responses), int(own.sum()) if told else None, tokens if told else None
        )


def trace_events(run: RunTimeline) -> str:
    """Return a run in the trace event format.

    A process a node with a thread a GPU, and one process for the run with its steps and their generation. Spans
    that hold GPUs are complete events, so that those of one thread never overlap; transfers, migrations and work
    on the CPU are asynchronous ones, since several may be under way at once.
    """
    own = run.nodes + 1
    events: list[dict[str, Any]] = []
    threads = {(own, _STEPS): "steps", (own, _GENERATION): "generation"}
    whole, part = ({"pid": own, "tid": thread} for thread in (_STEPS, _GENERATION))
    for step in run.steps:
        work = [_document(actor) for actor in step.actors]
        about: dict[str, Any] = {"step": step.step, "actors": work}
        events.append(_complete(f"step {step.step}", "step", step.began, step.ended, whole, about))
        events.append(
            _complete("generation", "generation", step.began, step.generated, part, {"step": step.step})
        )
        for span in step.spans:
            args: dict[str, Any] = {"step": step.step}
            times = (span.start, span.end)
            if span.kind not in HOLDING or not span.gpus:
                at = _place(run, span.gpus[0]) if span.gpus else whole
                args["gpus"] = list(span.gpus)
                events += _asynchronous(span.function, span.kind, len(events), times, at, args)
                continue
            actor = actor_of(span)
            if actor is not None and span.kind == "busy":
                args |= work[actor]
            for gpu in span.gpus:
                at = _place(run, gpu)
                threads[at["pid"], at["tid"]] = f"GPU {gpu}"
                events.append(_complete(span.function, span.kind, *times, at, args))
        for move in step.moves:
            name = f"decode.{move.source} to decode.{move.target}"
            at = _place(run, step.actors[move.source].gpus[0])
            args = {"step": step.step, **move._asdict()}
            times = (args.pop("sent"), args.pop("ready"))
            events += _asynchronous(name, _MIGRATION, len(events), times, at, args)
    processes = {pid: "run" if pid == own else f"node {pid - 1}" for pid, _ in sorted(threads)}
    names = [_named("process_name", name, {"pid": pid}) for pid, name in processes.items()]
    names += [
        _named("thread_name", name, {"pid": pid, "tid": tid}) for (pid, tid), name in sorted(threads.items())
    ]
    about = {field: getattr(run, field) for field in ("policy", "seed", "nodes", "gpus_per_node")}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": names + events}
    return json.dumps(document, separators=(",", ":")) + "\n"


def actor_of(span: Span) -> int | None:
    """Return the number of the decode actor that a span belongs to, or None."""
    function, _, actor = span.function.partition(".")
    return int(actor) if function == "decode" else None


def _document(actor: ActorWork) -> dict[str, Any]:
    return {name: value for name, value in actor._asdict().items() if value is not None}


def _place(run: RunTimeline, gpu: int) -> dict[str, int]:
    # Perfetto takes thread 0 for a processor's idle thread.
    return {"pid": gpu // run.gpus_per_node + 1, "tid": gpu + 1}


def _complete(
    name: str, category: str, start: int, end: int, at: dict[str, int], args: dict[str, Any]
) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, **at, "args": args}


def _asynchronous(
    name: str, category: str, number: int, times: tuple[int, int], at: dict[str, int], args: dict[str, Any]
) -> list[dict[str, Any]]:
    event = {"name": name, "cat": category, "id": str(number), **at}
    return [{**event, "ph": "b", "ts": times[0], "args": args}, {**event, "ph": "e", "ts": times[1]}]


def _named(what: str, name: str, at: dict[str, int]) -> dict[str, Any]:
    return {"name": what, "ph": "M", **at, "args": {"name": name}}


def read_trace_events(text: str, where: str) -> RunTimeline:
    """Return the run of which :func:`trace_events` wrote this text.

    Raises
    ------
    InputError
        When the text is not such a file.

    """
    try:
        document = json.loads(text)
        return _run_of(document["otherData"], document["traceEvents"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"{where}: no timeline written by rlhfless: {type(error).__name__}: {error}"
        ) from None


def _run_of(about: dict[str, Any], events: Sequence[dict[str, Any]]) -> RunTimeline:
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    frames: dict[int, dict[str, Any]] = {}
    held: dict[int, dict[tuple[str, Kind, int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    others: dict[int, list[Span]] = defaultdict(list)
    moves: dict[int, list[Migrated]] = defaultdict(list)
    for event in events:
        if event["ph"] not in "Xb":
            continue
        args, name, category, start = event["args"], event["name"], event["cat"], event["ts"]
        step = args["step"]
        if category == "step":
            actors = tuple(
                ActorWork(tuple(a["gpus"]), a["assigned"], a.get("completed"), a.get("tokens"))
                for a in args["actors"]
            )
            end = start + event["dur"]
            frames[step] = {"step": step, "began": start, "ended": end, "actors": actors}
        elif category == "generation":
            frames[step]["generated"] = start + event["dur"]
        elif category == _MIGRATION:
            known = {key: args[key] for key in ("source", "target", "responses", "kv_bytes")}
            moves[step].append(Migrated(**known, sent=start, ready=ends[event["id"]]))
        elif event["ph"] == "b":
            others[step].append(Span(name, category, tuple(args["gpus"]), start, ends[event["id"]]))
        else:
            held[step][name, category, start, start + event["dur"]].append(event["tid"] - 1)
    steps = []
    for step, frame in frames.items():
        spans = [Span(name, kind, tuple(gpus), *times) for (name, kind, *times), gpus in held[step].items()]
        ordered = tuple(sorted(spans + others[step], key=_order))
        steps.append(StepTimeline(**frame, spans=ordered, moves=tuple(moves[step])))
    return RunTimeline(**about, steps=tuple(steps))


def compact(run: RunTimeline) -> dict[str, Any]:
    """Return a run as few plain values, as the script of a report reads them.

    Times are microseconds since the step's weights existed. ``functions`` and ``gpu_sets`` are what the spans
    name by position: a step's ``spans`` are function, position in ``LOOKS``, GPUs, start and duration, one after the other, its
    ``moves`` the fields of :class:`Migrated`, its ``actors`` those of :class:`ActorWork` with a position for the
    GPUs and -1 for what is not known.
    """
    functions: dict[str, int] = {}
    gpu_sets: dict[Gpus, int] = {}

    def position(known: dict[Any, int], value: Any) -> int:
        return known.setdefault(value, len(known))

    steps = []
    for step in run.steps:
        spans: list[int] = []
        for span in step.spans:
            function, gpus = position(functions, span.function), position(gpu_sets, span.gpus)
            spans += (function, look_of(span), gpus, span.start - step.began, span.end - span.start)
        moves: list[int] = []
        for move in step.moves:
            moves += (*move[:4], move.sent - step.began, move.ready - step.began)
        actors: list[int] = []
        for actor in step.actors:
            told = (-1 if value is None else value for value in (actor.completed, actor.tokens))
            actors += (position(gpu_sets, actor.gpus), actor.assigned, *told)
        steps.append(
            {
                "step": step.step,
                "generated": step.generated - step.began,
                "ended": step.ended - step.began,
                "spans": spans,
                "moves": moves,
                "actors": actors,
            }
        )
    return {
        "policy": run.policy,
        "seed": run.seed,
        "nodes": run.nodes,
        "gpus_per_node": run.gpus_per_node,
        "functions": list(functions),
        "gpu_sets": list(gpu_sets),
        "steps": steps,
    }
