"""What a replay writes of each step beside its scores: where its time went, its actors, its lengths, a bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfless.models.plan import LowerBound
from rlhfless.models.replay import StepOutcome
from rlhfless.policies import Setting
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.simulate import SimulatedStep, view_of
from rlhfless.solver.bounds import step_lower_bound
from rlhfless.traces.trace import Trace

#: Prefix of the columns that split a step's time (:func:`critical_path`), and what no stage explains of it.
LATENCY = "latency."
WAIT = "wait"

#: Bins of lengths in an octave: neighbouring edges differ by 9 %.
_BINS_PER_OCTAVE = 8


def critical_path(outcome: StepOutcome) -> dict[str, float]:
    """Split a step's time over the stages of the path that decides it, in seconds.

    The path goes backwards from the stage that ends last, each time to what it waited for: the input, or the stage
    on some of its GPUs, that ended last. Where a stage starts later still, the time between is ``wait``: a
    function's start-up, an overhead before decoding. Actors' stages count under one name (``decode.3`` as
    ``decode``). The parts sum to ``step_seconds``.
    """
    times, graph = outcome.stage_times, outcome.graph
    gpus: dict[str, set[int]] = defaultdict(set)
    for interval in outcome.intervals:
        gpus[interval.function].update(interval.gpus)
    spent: dict[str, float] = defaultdict(float)
    until = outcome.step_seconds

    def there(name: str) -> float:
        return min(times[name][1], until)

    stage: str | None = max(times, key=there)
    while stage is not None:
        start, end = times[stage][0], there(stage)
        spent[WAIT] += until - end
        spent[stage.split(".", 1)[0]] += end - start
        until = start
        inputs = set(graph.predecessors(stage))
        if stage == "cut":
            # A global cut is no work: what was decoding leads to it.
            inputs.update(name for name in times if name.startswith("decode."))
        inputs.update(name for name in times if gpus[name] & gpus[stage])
        before = [name for name in times if name in inputs and times[name][0] < until]
        stage = max(before, key=there, default=None)
    spent[WAIT] += until
    spent.pop("cut", None)
    return dict(spent)


def detail_rows(steps: Sequence[SimulatedStep], setting: Setting) -> list[dict[str, Any]]:
    """Return a row a step: lengths, the split of its time, decode GPU seconds, and the bound on true lengths.

    The bound is :func:`rlhfless.solver.bounds.step_lower_bound` for the lengths that the step's responses
    really had, which no policy but an oracle knows: nothing goes below it in generation seconds and decode
    GPU seconds. It is left empty where a step continues or leaves unfinished responses, since it counts whole ones.
    """
    paths = [critical_path(step.outcome) for step in steps]
    stages = list(dict.fromkeys(name for path in paths for name in path))
    rows = []
    for step, path in zip(steps, paths, strict=True):
        outcome, tokens = step.outcome, step.batch.response_tokens
        bound = true_bound(step.batch, setting) if is_whole(outcome) else None
        rows.append(
            {
                "step": outcome.step,
                "epoch": outcome.epoch,
                "length_mean": float(tokens.mean()),
                **{f"length_p{q}": float(np.percentile(tokens, q)) for q in (50, 90, 99)},
                "length_max": int(tokens.max()),
                "decode_gpu_seconds": outcome.by_function.get("decode", 0.0),
                "bound_generation_seconds": bound and bound.generation_seconds,
                "bound_decode_gpu_seconds": bound and bound.gpu_seconds,
                **{f"{LATENCY}{name}": path.get(name, 0.0) for name in stages},
            }
        )
    return rows


def is_whole(outcome: StepOutcome) -> bool:
    """Tell whether a step made all of its responses, from their first token to their last."""
    return outcome.carried_tokens == 0 and bool(outcome.delivered.all())


def true_bound(batch: Trace, setting: Setting) -> LowerBound:
    """Return what no plan of a step can go below, on the lengths that the step really had."""
    cap = int(batch.response_tokens.max())
    view = view_of(batch, setting, LengthHistory(len(batch.prompt_ids)), max_response_tokens=cap)
    return step_lower_bound(view, batch.response_tokens)


def actor_rows(steps: Sequence[SimulatedStep]) -> list[dict[str, Any]]:
    """Return a row an actor and step: where it ran, what it was assigned, and when it worked.

    ``responses`` and ``tokens`` are those that the plan gave it (with their true lengths), ``moved_in`` and
    ``moved_out`` how many came and went. ``start``, ``end`` and ``released`` are seconds since the step began:
    decoding starts, its last iteration ends, its GPUs are released.
    """
    rows = []
    for step in steps:
        outcome = step.outcome
        moved_in: dict[int, int] = defaultdict(int)
        moved_out: dict[int, int] = defaultdict(int)
        for move in outcome.moves:
            moved_out[move.source] += len(move.responses)
            moved_in[move.target] += len(move.responses)
        for number, actor in enumerate(step.plan.actors):
            start, end = outcome.stage_times[f"decode.{number}"]
            rows.append(
                {
                    "step": outcome.step,
                    "actor": number,
                    "node": actor.node,
                    "gpus": actor.gpus,
                    "responses": len(actor.responses),
                    "tokens": int(step.batch.response_tokens[actor.responses].sum()),
                    "moved_in": moved_in[number],
                    "moved_out": moved_out[number],
                    "start": start,
                    "end": end,
                    "released": max(float(outcome.release[number]), end),
                }
            )
    return rows


def length_rows(steps: Sequence[SimulatedStep]) -> list[dict[str, Any]]:
    """Return the histogram of response lengths of each epoch.

    Bins hold the lengths from ``from_tokens`` to below ``to_tokens``; their edges depend on nothing but the
    longest response, so that histograms of different runs can be laid over each other. Empty bins are left out.
    """
    tokens: dict[int, list[Any]] = defaultdict(list)
    for step in steps:
        tokens[step.outcome.epoch].append(step.batch.response_tokens)
    longest = max(int(lengths.max()) for parts in tokens.values() for lengths in parts)
    octaves = int(np.ceil(np.log2(longest + 1)))
    edges = np.unique(np.round(2.0 ** (np.arange(octaves * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE)))
    rows = []
    for epoch in sorted(tokens):
        counts, _ = np.histogram(np.concatenate(tokens[epoch]), edges)
        rows += [
            {
                "epoch": epoch,
                "from_tokens": int(edges[b]),
                "to_tokens": int(edges[b + 1]),
                "responses": int(counts[b]),
            }
            for b in np.flatnonzero(counts).tolist()
        ]
    return rows
