"""Shared prefixes against a trie written down token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from factories import batch, profile
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.models.prefix import PrefixTree
from rlhfless.traces.trace import Trace

texts = st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=8)


def trace_of(prompts: list[str], block: int, samples: int = 1, *, hashes: bool = True) -> Trace:
    """Return a step of prompts, one token a letter, whose whole blocks are hashed each by itself."""
    rows = [text for text in prompts for _ in range(samples)]
    blocks = [[hash_of(text[i : i + block]) for i in range(0, len(text) - block + 1, block)] for text in rows]
    return batch(
        [len(text) for text in rows],
        [1] * len(rows),
        [number for number in range(len(prompts)) for _ in range(samples)],
        blocks=blocks if hashes else None,
        block_tokens=block if hashes else None,
    )


def hash_of(text: str) -> int:
    return int("1" + text.replace("a", "0").replace("b", "1"), 2)


def known(prompts: list[str], number: int, position: int, block: int) -> tuple[object, ...]:
    """Return what is known of the prefix up to a token: hashes, and past them only whose prompt it is."""
    text = prompts[number]
    end = (position // block + 1) * block
    return (text[:end],) if end <= len(text) else (text[: len(text) // block * block], number)


def trie(prompts: list[str], block: int, limit: int | None) -> set[tuple[object, ...]]:
    """Return the nodes of the trie, one a token."""
    return {
        (position, *known(prompts, number, position, block))
        for number, text in enumerate(prompts)
        for position in range(len(text) if limit is None else min(len(text), limit))
    }


@settings(max_examples=200, deadline=None)
@given(
    prompts=texts, block=st.integers(1, 4), limit=st.none() | st.integers(0, 15), samples=st.integers(1, 3)
)
def test_distinct_tokens_are_the_nodes_of_the_trie(
    prompts: list[str], block: int, limit: int | None, samples: int
) -> None:
    tree = PrefixTree.of(trace_of(prompts, block, samples))
    assert tree.distinct_tokens(limit) == len(trie(prompts, block, limit))


@settings(max_examples=200, deadline=None)
@given(prompts=texts, block=st.integers(1, 4), limit=st.integers(1, 15))
def test_distinct_prefixes_are_the_ends_of_the_cut_prompts(
    prompts: list[str], block: int, limit: int
) -> None:
    ends = set()
    for number, text in enumerate(prompts):
        last = min(len(text), limit) - 1
        ends.add((last, *known(prompts, number, last, block)))
    assert PrefixTree.of(trace_of(prompts, block)).distinct_prefixes(limit) == len(ends)


@settings(max_examples=100, deadline=None)
@given(prompts=texts)
def test_with_blocks_of_one_token_prefixes_are_exact(prompts: list[str]) -> None:
    tree = PrefixTree.of(trace_of(prompts, 1))
    for limit in range(1, 16):
        assert tree.distinct_prefixes(limit) == len({text[:limit] for text in prompts})
        assert tree.distinct_tokens(limit) == len(
            {text[:end] for text in prompts for end in range(1, min(len(text), limit) + 1)}
        )


@settings(max_examples=100, deadline=None)
@given(prompts=texts, block=st.integers(1, 4))
def test_longer_prefixes_are_never_fewer(prompts: list[str], block: int) -> None:
    """RLHFless, sec. 4.2, says the opposite; the map from (L + 1)-prefixes to L-prefixes is onto."""
    tree = PrefixTree.of(trace_of(prompts, block))
    counts = [tree.distinct_prefixes(limit) for limit in range(16)]
    assert all(before <= after for before, after in itertools.pairwise(counts))


def test_the_example_of_five_prompts() -> None:
    """aX, aY, b, abcd and abce have 2, 4, 4 and 5 distinct prefixes of 1 to 4 tokens."""
    code = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "X": 6, "Y": 7}
    prompts = ["aX", "aY", "b", "abcd", "abce"]
    step = batch(
        [len(p) for p in prompts],
        [1] * 5,
        blocks=[[code[letter] for letter in p] for p in prompts],
        block_tokens=1,
    )
    tree = PrefixTree.of(step)
    assert [tree.distinct_prefixes(limit) for limit in (1, 2, 3, 4)] == [2, 4, 4, 5]
    assert tree.distinct_tokens() == 8  # a X Y b | b c d e below a


@settings(max_examples=60, deadline=None)
@given(prompts=texts, block=st.integers(1, 4), limit=st.none() | st.integers(0, 15), seed=st.integers(0, 99))
def test_the_order_of_responses_does_not_matter(
    prompts: list[str], block: int, limit: int | None, seed: int
) -> None:
    step = trace_of(prompts, block, 2)
    mixed = step.select(np.random.default_rng(seed).permutation(len(step)))
    one, other = PrefixTree.of(step), PrefixTree.of(mixed)
    assert one.distinct_tokens(limit) == other.distinct_tokens(limit)
    assert one.prompt_tokens[one.group].tolist() == step.prompt_tokens.tolist()
    assert other.prompt_tokens[other.group].tolist() == mixed.prompt_tokens.tolist()


def test_without_hashes_only_equal_prompts_share() -> None:
    tree = PrefixTree.of(trace_of(["aab", "aab", "ab"], 1, samples=4, hashes=False))
    assert tree.distinct_tokens() == 3 + 3 + 2
    assert tree.distinct_tokens(2) == 2 + 2 + 2
    assert tree.distinct_prefixes(1) == 3
    assert tree.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_prefill_seconds_by_hand() -> None:
    """aaab, aaba, in blocks of 2: 4 + 2 new tokens, the last 2 on 2 cached ones; batches of 4; 4 of 2 GPUs."""
    cost = profile(
        prefill={
            "gpus": 2,
            "fixed_seconds": 0.5,
            "token_seconds": 0.1,
            "token2_seconds": 0.01,
            "max_batch_tokens": 4,
        }
    )
    tree = PrefixTree.of(trace_of(["aaab", "aaba"], 2, samples=3))
    work = 0.1 * 4 + 0.01 * 16 + 0.1 * 2 + 0.01 * (16 - 4)
    assert tree.prefill_seconds(cost, 2) == pytest.approx(2 * 0.5 + work, rel=1e-12)
    assert tree.prefill_seconds(cost, 4) == pytest.approx(2 * 0.5 + work / 2, rel=1e-12)


def test_the_tree_cannot_be_written_to() -> None:
    """It goes to policies, and the replay uses it after them."""
    tree = PrefixTree.of(trace_of(["ab", "aa"], 1))
    for array in (tree.group, tree.prompt_tokens, *tree.node, *tree.owner):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
