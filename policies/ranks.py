"""Length predictors of a chosen quality, and the simplest ones.

:class:`NoisyRank` and :class:`LengthBucket` are made from the true lengths, as a yardstick for predictors that
do not exist here; a policy that uses them declares ``sees_true_lengths`` and says ``oracle`` in its name. The
length of the last epoch is :class:`rlhfless.policies.predict.Ewma` with window 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri

from rlhfless.policies.base import StepView
from rlhfless.policies.predict import Oracle, first_estimate
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray


@dataclass(frozen=True)
class Answers:
    """The length of the reference answer in every epoch, whatever was seen since.

    ``rescale`` multiplies it with the response tokens per answer token seen so far. Without answers it is the
    run's mean so far, and before the first step the cap.
    """

    rescale: bool = True

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        return np.clip(first_estimate(view, rescale=self.rescale), 1.0, view.max_response_tokens)


@dataclass(frozen=True)
class PromptLength:
    """In proportion to the prompt's tokens, with the run's mean length so far (before the first step, 1:1)."""

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        prompt = view.prompt_tokens.astype(np.float64)
        mean = view.history.mean_tokens
        factor = 1.0 if mean is None else mean / prompt.mean()
        return np.clip(prompt * factor, 1.0, view.max_response_tokens)


@dataclass(frozen=True)
class NoisyRank:
    """The step's true lengths handed out in a wrong order, at a chosen Spearman correlation with the truth.

    The distribution of lengths is right, only the order is noisy: normal scores z of the true ranks are mixed
    with noise e that is made uncorrelated with them, ``r z + sqrt(1 - r^2) e``. For normal scores Spearman's
    correlation is ``6 / pi asin(r / 2)`` (Pearson 1907), which gives r. Equal lengths are ranked by chance.
    """

    spearman: float

    def __post_init__(self) -> None:
        if not -1 <= self.spearman <= 1:
            raise InputError(f"noisy rank: spearman is {self.spearman}, must lie between -1 and 1")

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        true = Oracle()(view)
        n = len(true)
        order = np.lexsort((view.rng.random(n), true))
        score = ndtri((np.arange(n) + 0.5) / n)
        noise = view.rng.standard_normal(n)
        if n > 1:
            noise -= noise.mean() + score * (noise @ score) / (score @ score)
            noise *= np.sqrt((score @ score) / max(float(noise @ noise), np.finfo(np.float64).tiny))
        r = 2 * np.sin(np.pi / 6 * self.spearman)
        mixed = r * score + np.sqrt(1 - r**2) * noise
        predicted = np.empty(n)
        # The response with the i-th smallest score is said to have the i-th smallest length.
        predicted[order[np.argsort(mixed, kind="stable")]] = true[order]
        return predicted


@dataclass(frozen=True)
class LengthBucket:
    """A classifier of length ranges that names the right one with a chosen accuracy.

    RLHFless compares with a model-based predictor of 44 % accuracy (fig. 14) and states neither its classes
    nor its errors; both are choices here. The prediction is the mean true length of the named bucket.

    Parameters
    ----------
    accuracy
        Chance that the right bucket is named.
    buckets
        A number: buckets of equal counts of the step's lengths, as far as equal lengths allow. Or the tokens
        at which a new bucket begins, rising.
    wrong
        Otherwise one of the two ``neighbour`` buckets (or the one, at an end), or any other one at ``random``.
    unit
        ``prompt``: one answer for all responses to a prompt, the right one being that of their mean length, as
        a model has it that reads the prompt only. ``response``: one for each.

    """

    accuracy: float = 0.44
    buckets: int | Sequence[float] = 5
    wrong: Literal["neighbour", "random"] = "neighbour"
    unit: Literal["prompt", "response"] = "prompt"

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise InputError(f"length bucket: accuracy is {self.accuracy}, must lie between 0 and 1")
        if isinstance(self.buckets, int):
            if self.buckets < 1:
                raise InputError(f"length bucket: buckets is {self.buckets}, must be at least 1")
        elif any(b <= a for a, b in zip(self.buckets, self.buckets[1:], strict=False)):
            raise InputError("length bucket: the starts of buckets must rise")

    def __call__(self, view: StepView) -> FloatArray:
        """Return the predicted lengths."""
        true = Oracle()(view)
        item = view.tree.group if self.unit == "prompt" else np.arange(len(true))
        length = np.bincount(item, weights=true) / np.bincount(item)
        return self.named_lengths(length, view.rng)[item]

    def named_lengths(self, length: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return the mean length of the bucket named for each item of the given true length."""
        bucket = self._bucket(length)
        named = self._name(bucket, int(bucket.max()) + 1, rng)
        mean = np.bincount(bucket, weights=length) / np.bincount(bucket)
        predicted: FloatArray = mean[named]
        return predicted

    def _bucket(self, length: FloatArray) -> IntArray:
        """Return each length's bucket, numbered from 0 without gaps."""
        if isinstance(self.buckets, int):
            starts = np.quantile(length, np.arange(1, self.buckets) / self.buckets, method="higher")
        else:
            starts = np.asarray(self.buckets, dtype=np.float64)
        _, bucket = np.unique(np.searchsorted(starts, length, side="right"), return_inverse=True)
        return bucket.astype(np.int64)

    def _name(self, bucket: IntArray, count: int, rng: np.random.Generator) -> IntArray:
        right = rng.random(len(bucket)) < self.accuracy
        if self.wrong == "random":
            other = (bucket + rng.integers(1, max(count, 2), len(bucket))) % count
        else:
            step = rng.choice([-1, 1], len(bucket))
            other = bucket + np.where((bucket + step < 0) | (bucket + step >= count), -step, step)
            other = np.clip(other, 0, count - 1)
        return np.where(right, bucket, other)
