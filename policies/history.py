"""The response lengths that a run has seen so far."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray, Trace

#: What was known of a response before it came: see :meth:`LengthHistory.outcomes`.
Known = Literal["last", "others", "answer"]


class LengthHistory:
    """Per prompt, the mean and the longest response of its last few appearances; and what came of what was known.

    Parameters
    ----------
    prompts
        How many prompts the run has.
    depth
        How many appearances are kept.
    outcomes
        How many responses are kept of each kind of :meth:`outcomes`.

    """

    def __init__(self, prompts: int, depth: int = 16, outcomes: int = 4096) -> None:
        self.depth = depth
        self._kept = outcomes
        self._outcomes: dict[Known, FloatArray] = {
            known: np.empty((2, 0)) for known in ("last", "others", "answer")
        }
        self._mean = np.full((depth, prompts), np.nan)
        self._max = np.full((depth, prompts), np.nan)
        self._tokens = 0
        self._responses = 0
        self._answered_tokens = 0
        self._answer_tokens = 0

    def record(self, batch: Trace) -> None:
        """Add a step's true lengths, once the step is over."""
        prompts, group = np.unique(batch.prompt, return_inverse=True)
        count = np.bincount(group)
        mean = np.bincount(group, weights=batch.response_tokens) / count
        longest = np.zeros(len(prompts))
        np.maximum.at(longest, group, batch.response_tokens)
        self._keep_outcomes(batch, mean[group], count[group])
        for store, values in ((self._mean, mean), (self._max, longest)):
            store[1:, prompts] = store[:-1, prompts]
            store[0, prompts] = values
        self._tokens += int(batch.response_tokens.sum())
        self._responses += len(batch)
        if batch.answer_tokens is not None:
            self._answered_tokens += int(batch.response_tokens.sum())
            self._answer_tokens += int(batch.answer_tokens.sum())

    def _keep_outcomes(self, batch: Trace, mean: FloatArray, size: IntArray) -> None:
        tokens = batch.response_tokens.astype(np.float64)
        last = self._mean[0, batch.prompt]
        answer = np.zeros(len(batch)) if batch.answer_tokens is None else batch.answer_tokens
        others = (mean * size - tokens) / np.maximum(size - 1, 1)
        returning = ~np.isnan(last)
        known: Known
        for known, before, rows in (
            ("last", last, returning),
            ("others", others, size > 1),
            ("answer", answer, ~returning),
        ):
            new = np.stack((before[rows], tokens[rows]))
            self._outcomes[known] = np.concatenate((self._outcomes[known], new), axis=1)[:, -self._kept :]

    def outcomes(self, known: Known) -> tuple[FloatArray, FloatArray]:
        """Return what was known of the latest responses before they came, and their tokens, oldest first.

        ``last``: the mean of the prompt's appearance before, for prompts that returned. ``others``: the mean
        of the prompt's other responses in the same step. ``answer``: the tokens of the reference answer, for
        prompts that were new; 0 where there is none.
        """
        before, tokens = self._outcomes[known]
        return before, tokens

    def recent(self, prompt: IntArray, appearances: int, statistic: str = "mean") -> FloatArray:
        """Return the given prompts' last lengths, newest first, shape (appearances, len(prompt)); NaN if none.

        ``statistic`` is ``mean`` or ``max`` over the prompt's responses of one appearance.

        Raises
        ------
        InputError
            When more appearances are asked for than the history keeps.

        """
        if appearances > self.depth:
            raise InputError(f"the history keeps {self.depth} appearances of a prompt, not {appearances}")
        store = self._mean if statistic == "mean" else self._max
        return store[:appearances, prompt]

    @property
    def mean_tokens(self) -> float | None:
        """Mean length of all responses so far, or None before the first."""
        return self._tokens / self._responses if self._responses else None

    @property
    def tokens_per_answer_token(self) -> float | None:
        """Response tokens per token of the reference answer so far, or None before the first."""
        return self._answered_tokens / self._answer_tokens if self._answer_tokens else None
