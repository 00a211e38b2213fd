"""What must hold of every replayed step, whatever the policy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rlhfless.models.replay import StepOutcome

#: Relative slack for sums of floating-point times.
TOLERANCE = 1e-9


class ConservationError(AssertionError):
    """A replay broke one of its own rules: a fault of the toolkit, not of the input."""


def violations(outcome: StepOutcome) -> list[str]:
    """Return the rules that a step's outcome breaks, one line each (docs/invariants.md numbers them)."""
    found = []
    slack = TOLERANCE * max(outcome.began + outcome.step_seconds, 1.0)
    if outcome.decoded_tokens != outcome.response_tokens:
        found.append(f"decoded {outcome.decoded_tokens} tokens of {outcome.response_tokens}")
    if not np.isfinite(outcome.finish).all():
        found.append(f"{int((~np.isfinite(outcome.finish)).sum())} responses never finish")
    if outcome.busy_gpu_seconds > outcome.gpu_seconds * (1 + TOLERANCE) + slack:
        found.append(f"busy {outcome.busy_gpu_seconds} GPU seconds exceed billed {outcome.gpu_seconds}")
    if outcome.redundant_prefill_tokens < 0:
        found.append(f"{-outcome.redundant_prefill_tokens} distinct prompt tokens were never prefilled")
    for before, after in outcome.graph.edges:
        end, start = outcome.stage_times[before][1], outcome.stage_times[after][0]
        if start < end - slack:
            found.append(f"{after} starts at {start}, before {before} ends at {end}")
    by_gpu: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for interval in outcome.intervals:
        for gpu in interval.gpus:
            by_gpu[gpu].append((interval.start, interval.end, f"{interval.function} ({interval.kind})"))
    for gpu, held in by_gpu.items():
        held.sort()
        for (_, end, first), (start, _, second) in zip(held, held[1:], strict=False):
            if start < end - slack:
                found.append(f"GPU {gpu}: {second} starts at {start}, before {first} ends at {end}")
    return found


def check(outcome: StepOutcome) -> StepOutcome:
    """Return the outcome, or raise ConservationError with every broken rule."""
    broken = violations(outcome)
    if broken:
        raise ConservationError(f"step {outcome.step}, policy {outcome.policy}: " + "; ".join(broken))
    return outcome
