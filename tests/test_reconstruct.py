"""Reconstruction: every figure of the log is met, and only what the log cannot say is drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlhfless.traces.errors import InputError
from rlhfless.traces.lengths import Family, Gamma, Lognormal, intraclass_correlation, unit_length
from rlhfless.traces.reconstruct import LengthFigures, length_set, reconstruct
from rlhfless.traces.trace import RunLog, Trace
from rlhfless.traces.verl_log import read_verl_log

CAP = 1024


def log_of(steps: int = 6, **columns: Any) -> RunLog:
    """Return a log of plausible figures; ``columns`` replaces some."""
    default: dict[str, Any] = {
        "response_mean": 240.0 - 4 * np.arange(steps),
        "response_max": np.full(steps, float(CAP)),
        "response_min": 20.0 + np.arange(steps),
        "clip_ratio": np.full(steps, 0.02),
        "prompt_mean": 95.0 + np.arange(steps) % 3,
        "prompt_max": np.full(steps, 300.0),
        "prompt_min": np.full(steps, 40.0),
        "epoch": np.arange(steps) // 3,
    }
    values = default | columns
    return RunLog(
        name="log",
        source="made up",
        step=np.arange(1, steps + 1),
        total_tokens=np.full(steps, np.nan),
        stages={},
        gpus=None,
        responses=None,
        **values,
    )


def per_step(trace: Trace) -> np.ndarray:
    return trace.response_tokens.reshape(len(trace.steps), -1)


@pytest.mark.parametrize("family", ["lognormal", "gamma"])
def test_every_figure_of_every_step_is_met(family: Family) -> None:
    log = log_of()
    trace = reconstruct(log, prompts_per_step=200, responses_per_prompt=4, family=family)
    lengths, prompts = per_step(trace), trace.prompt_tokens.reshape(len(log.step), -1)
    assert lengths.shape == (6, 800)
    np.testing.assert_array_equal(lengths.sum(axis=1), np.rint(log.response_mean * 800))
    np.testing.assert_array_equal(lengths.max(axis=1), log.response_max)
    np.testing.assert_array_equal(lengths.min(axis=1), log.response_min)
    np.testing.assert_array_equal((lengths == CAP).sum(axis=1), 16)
    np.testing.assert_array_equal(prompts.sum(axis=1), log.prompt_mean * 800)
    np.testing.assert_array_equal(prompts.max(axis=1), log.prompt_max)
    np.testing.assert_array_equal(prompts.min(axis=1), log.prompt_min)
    assert trace.reconstructed
    assert trace.max_response_tokens == CAP
    np.testing.assert_array_equal(trace.truncated, trace.response_tokens == CAP)


@st.composite
def figures(draw: st.DrawFn) -> tuple[LengthFigures, np.ndarray]:
    """Draw figures that some set of lengths has, with that set."""
    n = draw(st.integers(2, 300))
    low = draw(st.integers(1, 100))
    high = low + draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.floats(0.05, 8.0))
    lengths = low + np.floor((high - low) * rng.random(n) ** shape).astype(np.int64)
    lengths[0], lengths[1] = low, high
    exact = draw(st.booleans())
    lengths[2 : 2 + draw(st.integers(0, n - 2))] = high if exact else low
    top = int((lengths == high).sum()) if exact else 1
    return LengthFigures(n, float(lengths.mean()), high, low, top, exact), lengths


@given(case=figures(), family=st.sampled_from(["lognormal", "gamma"]))
@settings(max_examples=300, deadline=None)
def test_figures_that_some_lengths_have_are_always_met(
    case: tuple[LengthFigures, np.ndarray], family: Family
) -> None:
    want, lengths = case
    got = length_set(want, family, "here")
    assert len(got) == want.count
    assert (np.diff(got) >= 0).all()
    assert got.sum() == lengths.sum()
    assert (got[0], got[-1]) == (want.smallest, want.largest)
    if want.exact_top:
        assert (got == want.largest).sum() == want.at_largest


@pytest.mark.parametrize("unit", [Lognormal(0.6), Gamma(0.6)])
def test_lengths_of_a_family_are_found_again(unit: Lognormal | Gamma) -> None:
    # The figures of a large sample of the family, and nothing else, go in.
    rng = np.random.default_rng(1)
    sample = np.clip(np.rint(300 * unit.ppf(rng.random(20_000))), 1, CAP).astype(np.int64)
    at_cap = int((sample == CAP).sum())
    want = LengthFigures(len(sample), float(sample.mean()), CAP, int(sample.min()), at_cap, True)
    got = length_set(want, "lognormal" if isinstance(unit, Lognormal) else "gamma", "here")
    assert stats.ks_2samp(got, sample).statistic < 0.02


def test_families_agree_with_scipy() -> None:
    x, q = np.array([0.2, 0.9, 1.7, 5.0]), np.array([0.01, 0.3, 0.5, 0.99])
    for log_sd in (0.3, 1.2):
        gamma = Gamma(log_sd)
        frozen = {
            "lognormal": stats.lognorm(log_sd),
            "gamma": stats.gamma(gamma.shape, scale=1 / stats.gamma(gamma.shape).median()),
        }
        for family, reference in frozen.items():
            unit = unit_length(family, log_sd)  # type: ignore[arg-type]
            np.testing.assert_allclose(unit.cdf(x), reference.cdf(x), rtol=1e-10)
            np.testing.assert_allclose(unit.ppf(q), reference.ppf(q), rtol=1e-10)
            np.testing.assert_allclose(
                unit.mean_below(x), [reference.expect(lambda v: v, lb=0, ub=b) for b in x], rtol=1e-6
            )
            log_second = reference.expect(lambda v: np.log(v) ** 2) - reference.expect(np.log) ** 2
            assert np.sqrt(log_second) == pytest.approx(log_sd, rel=1e-4)


@pytest.mark.parametrize("effect", [0.0, 0.06, 0.5, 0.92, 1.0])
@pytest.mark.parametrize("family", ["lognormal", "gamma"])
def test_the_effect_of_a_prompt_has_the_size_asked_for(effect: float, family: Family) -> None:
    log = log_of(12, clip_ratio=np.full(12, 0.1), response_mean=np.full(12, 320.0))
    trace = reconstruct(
        log, prompts_per_step=400, responses_per_prompt=5, prompt_effect=effect, family=family
    )
    found = [intraclass_correlation(np.log(lengths), 5) for lengths in per_step(trace)]
    assert np.mean(found) == pytest.approx(effect, abs=0.02)


def test_the_same_prompts_come_back_every_epoch_with_their_effect() -> None:
    log = log_of(6)
    trace = reconstruct(log, prompts_per_step=300, responses_per_prompt=1, prompt_effect=0.8)
    assert len(trace.prompt_ids) == 900
    first, second = (trace.select(np.flatnonzero(trace.epoch == e)) for e in (0, 1))
    assert sorted(first.prompt) == sorted(second.prompt) == list(range(900))
    assert (first.prompt != second.prompt).any()

    def by_prompt(trace: Trace, values: np.ndarray) -> np.ndarray:
        return values[np.argsort(trace.prompt)]

    lengths = [np.log(by_prompt(t, t.response_tokens)) for t in (first, second)]
    assert np.corrcoef(*lengths)[0, 1] == pytest.approx(0.8, abs=0.04)
    prompts = [by_prompt(t, t.prompt_tokens) for t in (first, second)]
    # Lengths of prompts move a little, because each step's figures are met.
    assert np.median(np.abs(prompts[0] - prompts[1])) <= 5
    assert np.corrcoef(*prompts)[0, 1] > 0.9


def test_the_set_of_lengths_does_not_depend_on_seed_or_effect() -> None:
    log = log_of()
    one = reconstruct(log, prompts_per_step=50, responses_per_prompt=4, seed=1, prompt_effect=0.1)
    other = reconstruct(log, prompts_per_step=50, responses_per_prompt=4, seed=2, prompt_effect=0.9)
    np.testing.assert_array_equal(np.sort(per_step(one)), np.sort(per_step(other)))
    assert (one.response_tokens != other.response_tokens).any()
    again = reconstruct(log, prompts_per_step=50, responses_per_prompt=4, seed=1, prompt_effect=0.1)
    np.testing.assert_array_equal(one.response_tokens, again.response_tokens)
    np.testing.assert_array_equal(one.prompt, again.prompt)


def test_size_of_the_prompt_set() -> None:
    def prompts(log: RunLog, size: int | None) -> Trace:
        return reconstruct(log, prompts_per_step=10, responses_per_prompt=2, prompt_set_size=size)

    share = np.full(6, 0.05)
    without, with_epochs = log_of(epoch=np.full(6, -1), clip_ratio=share), log_of(clip_ratio=share)
    run = prompts(without, None)
    assert len(np.unique(run.prompt)) == 60
    assert run.epoch.max() == 0
    # 25 prompts fill two steps of 10; five prompts wait, other ones each epoch.
    partial = prompts(without, 25)
    assert np.unique(partial.epoch).tolist() == [0, 1, 2]
    assert len(partial.prompt_ids) == 25
    for epoch in range(3):
        assert len(np.unique(partial.prompt[partial.epoch == epoch])) == 20
    assert len(prompts(with_epochs, None).prompt_ids) == 30
    assert len(prompts(with_epochs, 37).prompt_ids) == 37
    with pytest.raises(InputError, match="more than prompt_set_size 29"):
        prompts(with_epochs, 29)


def test_a_missing_line_leaves_the_other_steps_their_prompts() -> None:
    log = log_of(6, epoch=np.full(6, -1), clip_ratio=np.full(6, 0.05))
    keep = np.array([0, 1, 3, 4, 5])
    names = [field.name for field in dataclasses.fields(RunLog)]
    cut = dataclasses.replace(
        log,
        **{name: getattr(log, name)[keep] for name in names if isinstance(getattr(log, name), np.ndarray)},
    )
    options = {"prompts_per_step": 10, "responses_per_prompt": 2, "prompt_set_size": 30}
    whole, less = reconstruct(log, **options), reconstruct(cut, **options)
    kept = whole.select(np.flatnonzero(whole.step != 3))
    np.testing.assert_array_equal(kept.prompt, less.prompt)
    np.testing.assert_array_equal(kept.response_tokens, less.response_tokens)


def test_a_hidden_share_at_the_cap_is_estimated_from_mean_and_smallest() -> None:
    # A log of a lognormal run whose clip ratio was not logged.
    rng = np.random.default_rng(5)
    runs = np.clip(np.rint(220 * np.exp(0.4 * rng.standard_normal((30, 1000)))), 1, 256)
    log = log_of(
        30,
        response_mean=runs.mean(axis=1),
        response_max=runs.max(axis=1),
        response_min=runs.min(axis=1),
        clip_ratio=np.full(30, np.nan),
        epoch=np.full(30, -1),
    )
    trace = reconstruct(log, prompts_per_step=1000, responses_per_prompt=1)
    assert trace.max_response_tokens == 256
    shares = (per_step(trace) == 256).mean(axis=1)
    assert shares.mean() == pytest.approx((runs == 256).mean(), abs=0.05)


def test_without_a_sign_of_a_cap_there_is_none() -> None:
    log = log_of(clip_ratio=np.zeros(6), response_max=900.0 + np.arange(6))
    trace = reconstruct(log, prompts_per_step=50, responses_per_prompt=2)
    assert trace.max_response_tokens is None
    assert trace.truncated is None
    capped = reconstruct(log, prompts_per_step=50, responses_per_prompt=2, max_response_tokens=2048)
    assert capped.max_response_tokens == 2048
    assert not capped.truncated.any()


@pytest.mark.parametrize(
    ("column", "value", "part"),
    [
        ("response_mean", 1100.0, "mean 1100 is not between min"),
        ("response_mean", 4.0, "mean 4 is not between min"),
        ("response_mean", np.nan, "response_length/mean is missing"),
        ("response_min", 0.0, "min 0 and max 1024 are no lengths"),
        ("clip_ratio", 0.5, "mean 228 is impossible with 100 of 200 lengths at max 1024"),
        ("clip_ratio", 1.5, "clip_ratio is 1.5"),
        ("clip_ratio", -0.1, "clip_ratio is -0.1"),
        ("clip_ratio", 0.0, "clip_ratio 0 of 200 responses contradicts max 1024"),
        ("response_max", 800.0, "clip_ratio 0.02 of 200 responses contradicts max 800"),
        ("prompt_mean", 301.0, "prompt_length: mean 301"),
        ("prompt_max", np.nan, "prompt_length/max is missing"),
    ],
)
def test_figures_that_no_lengths_have_are_refused_with_the_step(column: str, value: float, part: str) -> None:
    log = log_of()
    values = getattr(log, column).copy()
    values[3] = value
    with pytest.raises(InputError) as caught:
        reconstruct(
            dataclasses.replace(log, **{column: values}), prompts_per_step=100, responses_per_prompt=2
        )
    message = str(caught.value)
    assert message.startswith("log: step 4: ")
    assert part in message
    assert "\n" not in message


def test_options_out_of_range_are_refused() -> None:
    log = dataclasses.replace(log_of(), responses=5120)
    with pytest.raises(InputError, match=r"5120 responses a step, not 1024 prompts x 4"):
        reconstruct(log, prompts_per_step=1024, responses_per_prompt=4)
    with pytest.raises(InputError, match=r"prompt_effect is 1\.2"):
        reconstruct(log_of(), prompts_per_step=10, responses_per_prompt=1, prompt_effect=1.2)
    with pytest.raises(InputError, match="at least 1"):
        reconstruct(log_of(), prompts_per_step=0, responses_per_prompt=1)
    with pytest.raises(InputError, match="step 1: response_length/max 1024 is above the cap 512"):
        reconstruct(log_of(), prompts_per_step=50, responses_per_prompt=1, max_response_tokens=512)


@pytest.mark.parametrize(
    ("name", "prompts", "responses", "size"),
    [
        ("verl_gpg_qwen2_7b/qwen2_7b_gsm8k_math_fsdp", 1024, 5, None),
        ("verl_gpg_qwen2_7b/qwen2_7b_gsm8k_megatron", 1024, 5, None),
        ("verl_getting_started_ppo/qwen25_05b_gsm8k_ppo", 256, 1, 7473),
    ],
)
def test_real_logs_are_met_in_every_step(
    data_dir: Path, name: str, prompts: int, responses: int, size: int | None
) -> None:
    log = read_verl_log(data_dir / f"{name}.log.gz")
    trace = reconstruct(log, prompts_per_step=prompts, responses_per_prompt=responses, prompt_set_size=size)
    n = prompts * responses
    lengths = per_step(trace)
    assert np.abs(lengths.sum(axis=1) - log.response_mean * n).max() <= 0.5
    np.testing.assert_array_equal(lengths.max(axis=1), log.response_max)
    np.testing.assert_array_equal(lengths.min(axis=1), log.response_min)
    if np.isfinite(log.clip_ratio).all():
        at_cap = (lengths == trace.max_response_tokens).sum(axis=1)
        hidden = (log.response_max == trace.max_response_tokens) & (log.clip_ratio == 0)
        assert np.abs(at_cap - log.clip_ratio * n)[~hidden].max() <= 0.5
        assert (at_cap[hidden] == 1).all()
    own = trace.prompt_tokens.reshape(len(log.step), -1)[:, ::responses]
    assert np.abs(own.sum(axis=1) - log.prompt_mean * prompts).max() <= 0.5 * prompts
    np.testing.assert_array_equal(own.max(axis=1), log.prompt_max)
    np.testing.assert_array_equal(own.min(axis=1), log.prompt_min)


@given(case=figures(), family=st.sampled_from(["lognormal", "gamma"]))
@settings(max_examples=200, deadline=None)
def test_a_hidden_share_at_the_cap_never_contradicts_the_figures(
    case: tuple[LengthFigures, np.ndarray], family: Family
) -> None:
    want, lengths = case
    log = log_of(
        2,
        response_mean=np.full(2, want.mean),
        response_max=np.full(2, float(want.largest)),
        response_min=np.full(2, float(want.smallest)),
        clip_ratio=np.full(2, np.nan),
        prompt_max=np.full(2, 95.0),
        prompt_min=np.full(2, 95.0),
        prompt_mean=np.full(2, 95.0),
    )
    trace = reconstruct(log, prompts_per_step=want.count, responses_per_prompt=1, family=family)
    got = per_step(trace)
    assert (np.abs(got.mean(axis=1) - lengths.mean()) <= 0.5).all()
    assert (got.max(axis=1) == want.largest).all()
    assert (got.min(axis=1) == want.smallest).all()
