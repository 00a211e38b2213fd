"""Deduplicated prefill on the block hashes of real requests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rlhfless.models.prefix import PrefixTree
from rlhfless.traces.trace import PrefixBlocks, Trace

BLOCK = 512


def requests(path: Path, first: int, count: int) -> list[tuple[int, list[int]]]:
    """Return prompt tokens and block hashes of consecutive requests."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for _, line in zip(range(first + count), lines, strict=False)]
    return [(row["input_length"], row["hash_ids"]) for row in rows[first:]]


def as_batch(rows: list[tuple[int, list[int]]], samples: int) -> Trace:
    """Return one step with ``samples`` responses to each request."""
    n = len(rows)
    prompt = np.repeat(np.arange(n), samples)
    counts = np.array([len(blocks) for _, blocks in rows])
    blocks = PrefixBlocks(
        np.concatenate(([0], np.cumsum(counts))), np.array([h for _, hashes in rows for h in hashes])
    )
    return Trace(
        name="requests",
        step=np.zeros_like(prompt),
        epoch=np.zeros_like(prompt),
        prompt=prompt,
        prompt_ids=tuple(map(str, range(n))),
        sample=np.tile(np.arange(samples), n),
        prompt_tokens=np.array([tokens for tokens, _ in rows])[prompt],
        response_tokens=np.ones_like(prompt),
        prefix_blocks=blocks.take(prompt),
        block_tokens=BLOCK,
    )


def trie_tokens(rows: list[tuple[int, list[int]]], limit: int | None = None) -> int:
    """Count the distinct prefix tokens with a dictionary of dictionaries."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    total = 0
    for tokens, hashes in rows:
        longest = tokens if limit is None else min(tokens, limit)
        node, covered = root, 0
        for h in hashes:
            here = min(BLOCK, longest - covered)
            if here <= 0:
                break
            if h not in node:
                node[h] = {}
                total += here
            node = node[h]
            covered += here
        total += max(longest - covered, 0)
    return total


@pytest.mark.parametrize("name", ["conversation_trace", "synthetic_trace"])
@pytest.mark.parametrize("first", [0, 1000])
def test_distinct_prefix_tokens_equal_a_trie(data_dir: Path, name: str, first: int) -> None:
    rows = requests(data_dir / "mooncake" / f"{name}.jsonl.gz", first, 512)
    tree = PrefixTree.of(as_batch(rows, samples=3))
    whole = sum(tokens for tokens, _ in rows)
    assert tree.distinct_tokens() == trie_tokens(rows) < whole
    for limit in (BLOCK, 4 * BLOCK):
        assert tree.distinct_tokens(limit) == trie_tokens(rows, limit)
