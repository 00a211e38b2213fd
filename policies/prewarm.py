"""Prewarming: when functions are invoked ahead of their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhfless.models.plan import Prewarm
from rlhfless.policies.base import StepView


class Prewarming(Protocol):
    """Decides when the actors' functions are invoked."""

    def __call__(self, view: StepView) -> tuple[Prewarm | None, float]:
        """Return the plan's prewarm part, and how early actors are invoked, in seconds."""
        ...


@dataclass(frozen=True)
class NoPrewarm:
    """Functions are invoked when they are needed."""

    def __call__(self, view: StepView) -> tuple[Prewarm | None, float]:
        """Return no prewarming."""
        return None, 0.0


@dataclass(frozen=True)
class ShortestPast:
    """Expect the shortest learning stage so far plus a buffer, and start up in time for it (RLHFless, sec. 5).

    The paper gives no value for the buffer. ``start_seconds`` is how long before the expected end actors are
    invoked; null takes the profile's warm start-up.
    """

    buffer_seconds: float = 0.0
    start_seconds: float | None = None

    def __call__(self, view: StepView) -> tuple[Prewarm | None, float]:
        """Return the expected learning time, and the lead."""
        expected = shortest_past(view, self.buffer_seconds)
        lead = self.start_seconds
        if lead is None:
            lead = view.profile.functions.warm_start_seconds
        return Prewarm(learning_seconds=expected), 0.0 if expected is None else lead


def shortest_past(view: StepView, buffer_seconds: float = 0.0) -> float | None:
    """Return the shortest learning stage so far plus a buffer; None before the first is known."""
    return min(view.learning_seconds) + buffer_seconds if view.learning_seconds else None
