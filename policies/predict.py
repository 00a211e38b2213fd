"""Length predictors: a view of a step in, one predicted length per response out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlhfless.policies.base import StepView
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray


class Predictor(Protocol):
    """Predicts the length of each response, in tokens, shape (responses,)."""

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        ...


@dataclass(frozen=True)
class Ewma:
    """Exponentially weighted mean of a prompt's last ``window`` appearances (RLHFless, sec. 4.3).

    Window 1, the paper's setting, is the length of the last epoch. The paper gives no weight; ``alpha``
    defaults to 2 / (window + 1). A prompt that was not seen yet takes the length of its reference answer,
    with ``rescale_answers`` times the response tokens per answer token seen so far (ranks stay the same);
    without an answer it takes the mean of all responses so far, and before the first the cap.

    ``statistic``: a prompt's several responses count as their ``mean`` or their ``max``.
    """

    window: int = 1
    alpha: float | None = None
    statistic: Literal["mean", "max"] = "mean"
    rescale_answers: bool = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InputError(f"Ewma: window is {self.window}, must be at least 1")
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise InputError(f"Ewma: alpha is {self.alpha}, must be above 0 and at most 1")

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        recent = view.history.recent(view.prompt, self.window, self.statistic)
        alpha = self.alpha if self.alpha is not None else 2 / (self.window + 1)
        weight = np.where(np.isnan(recent), 0.0, (alpha * (1 - alpha) ** np.arange(len(recent)))[:, None])
        total = weight.sum(axis=0)
        known = total > 0
        predicted = first_estimate(view, rescale=self.rescale_answers)
        predicted[known] = (weight * np.nan_to_num(recent)).sum(axis=0)[known] / total[known]
        clipped: FloatArray = np.clip(predicted, 1.0, view.max_response_tokens)
        return clipped


def first_estimate(view: StepView, *, rescale: bool) -> FloatArray:
    """Return a length for prompts without history: the answer's, else the run's mean, else the cap."""
    if view.answer_tokens is not None:
        factor = view.history.tokens_per_answer_token if rescale else None
        return view.answer_tokens.astype(np.float64) * (factor or 1.0)
    return np.full(len(view), view.history.mean_tokens or float(view.max_response_tokens))


@dataclass(frozen=True)
class Oracle:
    """The true lengths. Only a policy that declares ``sees_true_lengths`` gets them."""

    def __call__(self, view: StepView) -> FloatArray:
        """Return the true lengths."""
        if view.true_tokens is None:
            raise InputError("the oracle predictor needs a policy with sees_true_lengths: true")
        return view.true_tokens.astype(np.float64)
