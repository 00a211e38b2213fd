"""What must hold of every replayed step, whatever the policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rlhfless.models.profile import Profile
from rlhfless.models.replay import StepOutcome

#: Relative slack for sums of floating-point times.
TOLERANCE = 1e-9


class ConservationError(AssertionError):
    """A replay broke one of its own rules: a fault of the toolkit, not of the input."""


def violations(outcome: StepOutcome, *profiles: Profile) -> list[str]:
    """Return the rules that a step's outcome breaks, one line each (docs/invariants.md numbers them).

    With the ``profiles`` that it was replayed on, the limits of the largest actor are among them.
    """
    found = []
    slack = TOLERANCE * max(outcome.began + outcome.step_seconds, 1.0)
    due = outcome.response_tokens + outcome.left_tokens - outcome.carried_tokens
    if outcome.decoded_tokens != due:
        found.append(f"decoded {outcome.decoded_tokens} tokens of {due}")
    finish = outcome.finish[outcome.delivered]
    if not np.isfinite(finish).all():
        found.append(f"{int((~np.isfinite(finish)).sum())} responses never finish")
    elif len(finish) and finish.max() > outcome.generation_seconds + slack:
        found.append(f"a response ends at {finish.max()}, generation at {outcome.generation_seconds}")
    if profiles:
        found += _beyond_limits(outcome, profiles)
    if outcome.busy_gpu_seconds > outcome.gpu_seconds * (1 + TOLERANCE) + slack:
        found.append(f"busy {outcome.busy_gpu_seconds} GPU seconds exceed billed {outcome.gpu_seconds}")
    parts = sum(outcome.by_function.values())
    if abs(parts - outcome.gpu_seconds) > TOLERANCE * outcome.gpu_seconds + slack:
        found.append(f"functions are billed {parts} GPU seconds, the step {outcome.gpu_seconds}")
    if outcome.redundant_prefill_tokens < 0:
        found.append(f"{-outcome.redundant_prefill_tokens} distinct prompt tokens were never prefilled")
    for name, (start, end) in outcome.stage_times.items():
        if start < -slack or end < start or end > outcome.step_seconds + slack:
            found.append(f"{name} runs from {start} to {end}, the step from 0 to {outcome.step_seconds}")
    for before, after in outcome.graph.edges:
        end, start = outcome.stage_times[before][1], outcome.stage_times[after][0]
        if start < end - slack:
            found.append(f"{after} starts at {start}, before {before} ends at {end}")
    for move in outcome.moves:
        if not move.sent <= move.ready or outcome.release[move.target] + outcome.began < move.ready - slack:
            found.append(
                f"responses sent from actor {move.source} reach actor {move.target} after its release"
            )
    by_gpu: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for interval in outcome.intervals:
        for gpu in interval.gpus:
            by_gpu[gpu].append((interval.start, interval.end, f"{interval.function} ({interval.kind})"))
    for gpu, held in by_gpu.items():
        held.sort()
        for (_, end, first), (start, _, second) in pairwise(held):
            if start < end - slack:
                found.append(f"GPU {gpu}: {second} starts at {start}, before {first} ends at {end}")
    return found


def _beyond_limits(outcome: StepOutcome, profiles: Sequence[Profile]) -> list[str]:
    max_running = max(profile.actor.max_running for profile in profiles)
    capacity = max(profile.actor.kv_capacity_tokens for profile in profiles)
    found = []
    if outcome.peak_running > max_running:
        found.append(f"an actor runs {outcome.peak_running} responses, may run {max_running}")
    if outcome.peak_kv_tokens > capacity:
        found.append(f"an actor holds {outcome.peak_kv_tokens} KV tokens of {capacity}")
    return found


def check(outcome: StepOutcome, *profiles: Profile) -> StepOutcome:
    """Return the outcome, or raise ConservationError with every broken rule."""
    broken = violations(outcome, *profiles)
    if broken:
        raise ConservationError(f"step {outcome.step}, policy {outcome.policy}: " + "; ".join(broken))
    return outcome
