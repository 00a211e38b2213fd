"""Where prompts are prefilled."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Protocol

from rlhfless.models.plan import Prefill
from rlhfless.models.prefix import PrefixTree
from rlhfless.policies.base import StepView


class Prefilling(Protocol):
    """Decides how a step's prompts are prefilled."""

    def __call__(self, view: StepView) -> Prefill:
        """Return the prefill part of the plan."""
        ...


@dataclass(frozen=True)
class LocalPrefill:
    """Every decode actor prefills its own prompts."""

    def __call__(self, view: StepView) -> Prefill:
        """Return the prefill part of the plan."""
        return Prefill(mode="local")


@dataclass(frozen=True)
class DeduplicatedPrefill:
    """One prefill actor computes shared prefixes once (RLHFless, sec. 4.2).

    ``max_prefixes`` is the paper's B_prefill, the largest batch of the prefill actor; null sets no bound, and
    every distinct prompt is prefilled whole.

    ``rule``: ``corrected`` takes the largest length L with D(L) <= B_prefill, where D counts the distinct
    prefixes of L tokens (short prompts as themselves) and so never falls; when even the shortest prompt's
    length gives too many, whole prompts are prefilled in several batches. ``printed`` follows the paper's
    text, which takes D to fall with L: it sweeps L upwards and stops at the first that fits.
    """

    max_prefixes: int | None = None
    rule: Literal["corrected", "printed"] = "corrected"

    def __call__(self, view: StepView) -> Prefill:
        """Return the prefill part of the plan."""
        limit = None if self.max_prefixes is None else self._limit(view.tree, self.max_prefixes)
        return Prefill(mode="deduplicated", gpus=view.learner_gpus, node=0, shared_prefix_tokens=limit)

    def _limit(self, tree: PrefixTree, most: int) -> int | None:
        low, high = int(tree.prompt_tokens.min()), int(tree.prompt_tokens.max())
        if self.rule == "printed":
            fits = (length for length in range(low, high + 1) if tree.distinct_prefixes(length) <= most)
            return next(fits, None)
        if tree.distinct_prefixes(low) > most:
            return None
        # D never falls: the lengths that fit come first.
        lengths = range(low, high + 1)
        return lengths[bisect_right(lengths, most, key=tree.distinct_prefixes) - 1]
