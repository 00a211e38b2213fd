"""Shared prompt prefixes of a batch, at the granularity of hashed blocks.

Two prompts share a prefix as far as their leading block hashes are equal; what lies inside the first differing
block counts as different, since only block hashes are known. Prompts without hashes share nothing with other
prompts; responses to one prompt share it whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfless.models.profile import Profile
from rlhfless.traces.trace import BoolArray, IntArray, PrefixBlocks, Trace


@dataclass(frozen=True)
class PrefixTree:
    """The prefix tree (trie) of a batch's distinct prompts.

    ``group`` maps each response to its prompt, shape (responses,); ``prompt_tokens`` has one entry a prompt.
    Level ``l`` of the tree holds the ``l``-th block; ``node[l]`` gives each prompt's node on that level (-1
    where it has no such block) and ``owner[l]`` whether the prompt is the first of its node.
    """

    group: IntArray
    prompt_tokens: IntArray
    block_tokens: int
    node: tuple[IntArray, ...]
    owner: tuple[BoolArray, ...]

    def __post_init__(self) -> None:
        # Policies get the tree that the replay uses.
        for array in (self.group, self.prompt_tokens, *self.node, *self.owner):
            array.setflags(write=False)

    @classmethod
    def of(cls, batch: Trace) -> PrefixTree:
        """Build the tree of one step's batch."""
        _, first, group = np.unique(batch.prompt, return_index=True, return_inverse=True)
        tokens = batch.prompt_tokens[first]
        group = group.astype(np.int64)
        if batch.prefix_blocks is None or batch.block_tokens is None:
            return cls(group, tokens, 0, (), ())
        nodes, owners = _levels(batch.prefix_blocks.take(first))
        return cls(group, tokens, batch.block_tokens, nodes, owners)

    def shared_tokens(self, limit: int | None = None) -> IntArray:
        """Return, per prompt, the leading tokens that an earlier prompt of the batch already covers.

        With ``limit``, prompts count only up to that many tokens.
        """
        longest = self.truncated(limit)
        shared = np.zeros(len(self.prompt_tokens), dtype=np.int64)
        for node, owner in zip(self.node, self.owner, strict=True):
            shared[(node >= 0) & ~owner] += self.block_tokens
        return np.minimum(shared, longest)

    def truncated(self, limit: int | None) -> IntArray:
        """Return each prompt's tokens, at most ``limit`` of them."""
        return self.prompt_tokens if limit is None else np.minimum(self.prompt_tokens, limit)

    def distinct_tokens(self, limit: int | None = None) -> int:
        """Return the tokens of the tree: every distinct prefix once, prompts up to ``limit`` tokens."""
        return int((self.truncated(limit) - self.shared_tokens(limit)).sum())

    def prefill_seconds(self, profile: Profile, gpus: int, limit: int | None = None) -> float:
        """Return the seconds one prefill actor with ``gpus`` GPUs takes for every distinct prefix once."""
        cost = profile.prefill
        cached = self.shared_tokens(limit).astype(np.float64)
        whole = self.truncated(limit).astype(np.float64)
        batches = -(-self.distinct_tokens(limit) // cost.max_batch_tokens)
        work = cost.token_seconds * (whole - cached) + cost.token2_seconds * (whole**2 - cached**2)
        return cost.fixed_seconds * batches + cost.gpus / gpus * float(work.sum())

    def distinct_prefixes(self, limit: int) -> int:
        """Return D(limit): the distinct prefixes when every prompt is cut to ``limit`` tokens.

        Prompts that are shorter count as themselves, which makes D non-decreasing in the limit (the map from
        the prefixes of L + 1 tokens to those of L is onto); RLHFless, sec. 4.2, states the opposite.
        """
        prompts = len(self.prompt_tokens)
        if limit <= 0:
            return min(prompts, 1)
        if not self.node:
            return prompts
        levels = -(-limit // self.block_tokens)
        # A prompt is told apart by its deepest node within the limit; past its blocks it stands alone.
        identity = np.full(prompts, -1, dtype=np.int64)
        depth = np.zeros(prompts, dtype=np.int64)
        for level, node in enumerate(self.node[:levels]):
            reached = node >= 0
            identity[reached] = node[reached]
            depth[reached] = level + 1
        # Two prompts that end inside the same block are the same prefix only if they end at the same token.
        length = np.minimum(self.prompt_tokens, limit)
        alone = length > depth * self.block_tokens
        keys = np.stack((depth, identity, length, np.where(alone, np.arange(prompts), -1)), axis=1)
        return len(np.unique(keys, axis=0))


def _levels(blocks: PrefixBlocks) -> tuple[tuple[IntArray, ...], tuple[BoolArray, ...]]:
    counts = np.diff(blocks.offsets)
    parent = np.zeros(len(counts), dtype=np.int64)
    nodes: list[IntArray] = []
    owners: list[BoolArray] = []
    for level in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > level)
        values = blocks.values[blocks.offsets[rows] + level]
        _, first, inverse = np.unique(
            np.stack((parent[rows], values), axis=1), axis=0, return_index=True, return_inverse=True
        )
        node = np.full(len(counts), -1, dtype=np.int64)
        node[rows] = inverse.reshape(-1)
        owner = np.zeros(len(counts), dtype=np.bool_)
        owner[rows[first]] = True
        parent = node
        nodes.append(node)
        owners.append(owner)
    return tuple(nodes), tuple(owners)
