"""Predictors of a chosen quality have that quality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import batch, setting, view
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from rlhfless.policies import Answers, Composed, LengthBucket, NoisyRank, PromptLength, StepView, simulate
from rlhfless.policies.history import LengthHistory
from rlhfless.traces.errors import InputError


def step(
    lengths: np.ndarray,
    *,
    samples: int = 1,
    seed: int = 0,
    prompts: np.ndarray | None = None,
    history: LengthHistory | None = None,
    cap: int = 10**6,
    **rest: Any,
) -> StepView:
    """Return the view of a batch, true lengths included."""
    n = len(lengths)
    tokens = [100] * n if prompts is None else prompts.tolist()
    trace = batch(tokens, lengths.tolist(), (np.arange(n) // samples).tolist(), **rest)
    seen = view(trace, setting(), history, cap=cap)
    return replace(seen, true_tokens=lengths, rng=np.random.default_rng(seed))


def lognormal(n: int, seed: int = 0) -> np.ndarray:
    return np.rint(np.random.default_rng(seed).lognormal(6, 1, n)).astype(np.int64) + 1


@pytest.mark.parametrize("n", [64, 512, 4096])
@pytest.mark.parametrize("spearman", [-0.6, 0.0, 0.3, 0.8, 0.95])
def test_noisy_ranks_have_the_chosen_correlation(n: int, spearman: float) -> None:
    """The noise is orthogonal to the scores, so that only the rank transform's residual is left."""
    for seed in range(5):
        lengths = lognormal(n, seed)
        predicted = NoisyRank(spearman)(step(lengths, seed=seed))
        assert spearmanr(predicted, lengths).statistic == pytest.approx(spearman, abs=0.8 / np.sqrt(n))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), spearman=st.floats(-1, 1))
@settings(max_examples=60, deadline=None)
def test_noisy_ranks_permute_the_true_lengths(lengths: list[int], spearman: float) -> None:
    predicted = NoisyRank(spearman)(step(np.array(lengths)))
    assert sorted(predicted.tolist()) == sorted(lengths)


def test_perfect_and_reversed_ranks() -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 201))
    assert NoisyRank(1.0)(step(lengths)).tolist() == lengths.tolist()
    assert NoisyRank(-1.0)(step(lengths)).tolist() == (201 - lengths).tolist()


def named_buckets(part: LengthBucket, lengths: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the true and the named bucket of each response, with starts given in tokens."""
    assert not isinstance(part.buckets, int)
    predicted = part(step(lengths, seed=seed))
    starts = np.array(part.buckets)
    return np.searchsorted(starts, lengths, "right"), np.searchsorted(starts, predicted, "right")


STARTS = (200.0, 400.0, 700.0)


@pytest.mark.parametrize("accuracy", [0.0, 0.44, 0.9, 1.0])
@pytest.mark.parametrize("wrong", ["neighbour", "random"])
def test_the_right_bucket_is_named_as_often_as_chosen(accuracy: float, wrong: Any) -> None:
    n = 20_000
    part = LengthBucket(accuracy, STARTS, wrong, unit="response")
    true, named = named_buckets(part, lognormal(n), seed=1)
    hits = int((true == named).sum())
    # Five standard deviations of the binomial count.
    assert abs(hits - accuracy * n) <= 5 * np.sqrt(n * accuracy * (1 - accuracy))


def test_errors_go_to_neighbours_evenly_or_anywhere() -> None:
    lengths = lognormal(20_000)
    true, named = named_buckets(LengthBucket(0.4, STARTS, "neighbour", unit="response"), lengths, seed=2)
    assert np.abs(named - true).max() == 1
    inner = (true == 1) & (named != 1)
    assert (named[inner] == 0).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(inner.sum()))
    true, named = named_buckets(LengthBucket(0.4, STARTS, "random", unit="response"), lengths, seed=2)
    errors = named[(true == 0) & (named != 0)]
    share = np.bincount(errors, minlength=4)[1:] / len(errors)
    assert share == pytest.approx([1 / 3] * 3, abs=5 * 0.5 / np.sqrt(len(errors)))


def test_a_named_bucket_says_its_mean_true_length() -> None:
    lengths = np.array([10, 20, 30, 250, 350, 900])
    predicted = LengthBucket(1.0, STARTS, unit="response")(step(lengths))
    assert predicted.tolist() == [20.0, 20.0, 20.0, 300.0, 300.0, 900.0]


@pytest.mark.parametrize("buckets", [1, 2, 5, 8])
def test_a_number_of_buckets_means_equal_counts(buckets: int) -> None:
    lengths = np.random.default_rng(3).permutation(np.arange(1, 401))
    predicted = LengthBucket(1.0, buckets, unit="response")(step(lengths))
    _, counts = np.unique(predicted, return_counts=True)
    assert len(counts) == buckets
    assert np.ptp(counts) <= 1


def test_by_default_a_prompts_responses_share_one_answer() -> None:
    lengths = lognormal(600, 4)
    predicted = LengthBucket()(step(lengths, samples=3)).reshape(-1, 3)
    assert (predicted == predicted[:, :1]).all()
    means = np.repeat(lengths.reshape(-1, 3).mean(axis=1), 3)
    right = LengthBucket(1.0)(step(lengths, samples=3))
    assert spearmanr(right, means).statistic > 0.95


def test_a_better_classifier_ranks_better() -> None:
    lengths = lognormal(3000, 5)
    ranks = [
        spearmanr(LengthBucket(accuracy, unit="response")(step(lengths)), lengths).statistic
        for accuracy in (0.2, 0.44, 0.8, 1.0)
    ]
    assert ranks == sorted(ranks)


def test_answers_are_used_whatever_was_seen() -> None:
    answers = np.array([10, 30, 20, 40])
    lengths = np.array([100, 90, 80, 70])
    history = LengthHistory(4)
    trace = batch([100] * 4, lengths.tolist(), answer_tokens=answers)
    first = view(trace, setting(), history)
    assert Answers()(first).tolist() == answers.tolist()
    history.record(trace)
    later = view(trace, setting(), history)
    assert Answers()(later).tolist() == pytest.approx(answers * 340 / 100)
    assert Answers(rescale=False)(later).tolist() == answers.tolist()
    assert Answers()(view(trace, setting(), history, cap=50)).tolist() == pytest.approx([34, 50, 50, 50])


def test_prompt_lengths_are_scaled_to_the_runs_mean() -> None:
    prompts = np.array([10, 20, 30, 60])
    lengths = np.array([400, 300, 200, 300])
    history = LengthHistory(4)
    assert PromptLength()(step(lengths, prompts=prompts)).tolist() == prompts.tolist()
    history.record(batch(prompts.tolist(), lengths.tolist()))
    later = PromptLength()(step(lengths, prompts=prompts, history=history))
    assert later.tolist() == pytest.approx([100, 200, 300, 600])
    assert PromptLength()(step(lengths, prompts=prompts, history=history, cap=250)).max() == 250


@pytest.mark.parametrize("part", [NoisyRank(0.5), LengthBucket()], ids=["rank", "bucket"])
def test_the_same_generator_gives_the_same_prediction(part: Any) -> None:
    lengths = lognormal(200)
    assert part(step(lengths, seed=7)).tolist() == part(step(lengths, seed=7)).tolist()
    assert part(step(lengths, seed=7)).tolist() != part(step(lengths, seed=8)).tolist()


@pytest.mark.parametrize("part", [NoisyRank(0.5), LengthBucket()], ids=["rank", "bucket"])
def test_true_lengths_are_for_oracles_only(part: Any) -> None:
    lengths = lognormal(20)
    with pytest.raises(InputError, match="sees_true_lengths"):
        part(replace(step(lengths), true_tokens=None))
    trace = batch([100] * 20, lengths.tolist())
    hidden = Composed(name="rlhfless_bucket", predict=part, sees_true_lengths=True)
    with pytest.raises(InputError, match="must say oracle"):
        next(simulate(trace, hidden, setting()))
    named = Composed(name="oracle_bucket", predict=part, sees_true_lengths=True)
    assert len(list(simulate(trace, named, setting()))) == 1


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: NoisyRank(1.5), "spearman is 1.5"),
        (lambda: LengthBucket(accuracy=-0.1), "accuracy is -0.1"),
        (lambda: LengthBucket(buckets=0), "buckets is 0"),
        (lambda: LengthBucket(buckets=(5.0, 5.0)), "must rise"),
    ],
)
def test_a_quality_out_of_range_is_refused(build: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        build()
