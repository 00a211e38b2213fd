"""Scores of runs: means over steps, ratios against a baseline, intervals over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from factories import Case, cases
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlhfless.models.scores import STEP_COLUMNS, RunScores, compare, interval, step_record
from rlhfless.traces.errors import InputError


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_a_runs_scores_are_the_means_of_its_steps(case: Case) -> None:
    try:
        outcomes = [step.outcome for step in case.steps()]
    except InputError as error:
        assume("does not fit the GPUs" not in str(error) and "GPUs of their own" not in str(error))
        raise
    scores = RunScores.of(outcomes)
    records = [step_record(outcome) for outcome in outcomes]
    assert scores.steps == len(outcomes)
    for name in STEP_COLUMNS[2:]:
        assert scores.mean[name] == pytest.approx(sum(r[name] for r in records) / len(records), rel=1e-12)
    assert sum(scores.by_function.values()) == pytest.approx(scores.mean["gpu_seconds"], rel=1e-9)
    for record in records:
        assert record["idle_gpu_seconds"] == record["gpu_seconds"] - record["busy_gpu_seconds"]


def scores(step_seconds: float, gpu_seconds: float, policy: str, responses: float = 8.0) -> RunScores:
    mean = dict.fromkeys(("launched", "responses"), responses)
    mean |= {"step_seconds": step_seconds, "gpu_seconds": gpu_seconds}
    return RunScores(policy, 1, mean, {})


def test_speedup_and_cost_reduction_compare_seed_by_seed() -> None:
    """Twice and four times as fast is three times on average, whatever the seeds' own levels."""
    baseline = [scores(10.0, 100.0, "verl"), scores(80.0, 800.0, "verl")]
    policy = [scores(5.0, 60.0, "own"), scores(20.0, 640.0, "own")]
    result = compare(policy, baseline)
    assert (result.policy, result.baseline) == ("own", "verl")
    assert result.speedup.mean == pytest.approx(3.0)
    assert result.cost_reduction.mean == pytest.approx((0.4 + 0.2) / 2)
    assert 2.0 <= result.speedup.low < 3.0 < result.speedup.high <= 4.0
    with pytest.raises(ValueError, match="argument 2 is longer"):
        compare(policy[:1], baseline)


def test_steps_of_other_sizes_compare_by_response() -> None:
    """Half the responses in half the time for the same bill: as fast, and twice as expensive."""
    result = compare([scores(5.0, 100.0, "own", 4.0)], [scores(10.0, 100.0, "verl", 8.0)])
    assert result.speedup.mean == pytest.approx(1.0)
    assert result.cost_reduction.mean == pytest.approx(-1.0)


def test_a_policy_against_itself() -> None:
    runs = [scores(10.0, 100.0, "verl"), scores(80.0, 800.0, "verl")]
    result = compare(runs, runs)
    assert (result.speedup.mean, result.speedup.low, result.speedup.high) == (1.0, 1.0, 1.0)
    assert (result.cost_reduction.low, result.cost_reduction.high) == (0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, -3.0, 1e-9, 1e6]), min_size=1, max_size=7))
def test_intervals_lie_around_the_mean_and_within_the_values(values: list[float]) -> None:
    found = interval(values)
    assert found.mean == pytest.approx(float(np.mean(values)))
    rounding = 1e-9 * max(abs(v) for v in values)
    assert min(values) - rounding <= found.low <= found.mean + rounding
    assert found.mean - rounding <= found.high <= max(values) + rounding
    assert interval(values) == found


def test_one_value_or_equal_ones_have_no_width() -> None:
    for values in ([2.5], [2.5] * 5):
        found = interval(values)
        assert (found.mean, found.low, found.high) == (2.5, 2.5, 2.5)


def test_the_interval_covers_the_mean_nineteen_times_in_twenty() -> None:
    """A bootstrap of 30 normal values covers a little less than its nominal 95 %."""
    rng = np.random.default_rng(3)
    found = [interval(rng.normal(7.0, 2.0, 30)) for _ in range(120)]
    covered = sum(one.low <= 7.0 <= one.high for one in found)
    assert 0.88 <= covered / len(found) <= 0.99
    widths = [one.high - one.low for one in found]
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 2.0 / np.sqrt(30), rel=0.1)
