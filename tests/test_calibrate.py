"""Calibration: known costs come back, disturbances are found, live predictions never see the future."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import factories
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from rlhfless.models.ahead import one_step_ahead
from rlhfless.models.calibrate import (
    Calibration,
    RunShape,
    calibrate,
    decode_features,
    fit_stage,
    noise_floor,
)
from rlhfless.models.decode import decode_one
from rlhfless.models.disturbance import find_disturbances
from rlhfless.models.fit import fit_linear, nonnegative_least_squares
from rlhfless.traces.errors import InputError
from rlhfless.traces.reconstruct import reconstruct
from rlhfless.traces.trace import RunLog, Trace
from rlhfless.traces.verl_log import read_verl_log

SHAPE = RunShape(gpus=8, actors=4, actor_gpus=2, responses=400, max_running=32)
TOKEN, FIXED, VALIDATION = 2e-4, 5.0, 1.5
UPDATE_TOKEN, UPDATE_FIXED = 3e-5, 4.0


def make_log(
    steps: int = 80, noise: float = 0.0, seed: int = 0, slow: tuple[int, int, float] | None = None
) -> RunLog:
    """Return a log of known costs; ``slow`` is (first row, end row, factor) of generation."""
    rng = np.random.default_rng(seed)
    mean = 250 + 80 * np.sin(np.arange(steps) / 9) + rng.uniform(-30, 30, steps)
    prompt = rng.uniform(90, 110, steps)
    testing = np.where(np.arange(steps) % 5 == 4, 20.0, np.nan)
    after = np.concatenate(([0.0], np.isfinite(testing[:-1]).astype(float)))
    total = SHAPE.responses * (mean + prompt)
    generation = (TOKEN * SHAPE.responses / SHAPE.actors * mean + FIXED + VALIDATION * after) * np.exp(
        noise * rng.standard_normal(steps)
    )
    if slow is not None:
        generation[slow[0] : slow[1]] *= slow[2]
    update = (UPDATE_TOKEN * total + UPDATE_FIXED) * np.exp(noise * rng.standard_normal(steps))
    return RunLog(
        name="synthetic",
        source="known costs",
        step=np.arange(1, steps + 1),
        epoch=np.zeros(steps, dtype=np.int64),
        response_mean=mean,
        response_max=np.full(steps, 1024.0),
        response_min=np.full(steps, 5.0),
        clip_ratio=np.zeros(steps),
        prompt_mean=prompt,
        prompt_max=np.full(steps, 200.0),
        prompt_min=np.full(steps, 50.0),
        total_tokens=total,
        stages={"generation": generation, "update_actor": update, "testing": testing},
        gpus=8,
        responses=SHAPE.responses,
    )


def make_trace(steps: int, lengths_seed: int = 0) -> Trace:
    rng = np.random.default_rng(lengths_seed)
    n = steps * SHAPE.responses
    prompts = SHAPE.responses // 4
    scale = np.repeat(rng.uniform(80, 260, steps), SHAPE.responses)
    shape = np.repeat(rng.uniform(0.8, 6.0, steps), SHAPE.responses)
    return Trace(
        name="lengths",
        step=np.repeat(np.arange(1, steps + 1), SHAPE.responses),
        epoch=np.zeros(n, dtype=np.int64),
        prompt=np.tile(np.repeat(np.arange(prompts), 4), steps),
        prompt_ids=tuple(str(i) for i in range(prompts)),
        sample=np.tile(np.arange(4), steps * prompts),
        prompt_tokens=np.repeat(rng.integers(60, 140, n // 4), 4),
        response_tokens=np.minimum(1 + rng.gamma(shape, scale / shape), 1024).astype(np.int64),
    )


def token_by_token(prompt: list[int], response: list[int], max_running: int) -> tuple[int, int, int]:
    """Count iterations, running responses and resident tokens, one iteration after the other."""
    waiting = list(zip(prompt, response, strict=True))
    running: list[list[int]] = []
    iterations = tokens = resident = 0
    while waiting or running:
        while waiting and len(running) < max_running:
            p, left = waiting.pop(0)
            running.append([p, left])
        iterations += 1
        tokens += len(running)
        resident += sum(k for k, _ in running)
        running = [[k + 1, left - 1] for k, left in running if left > 1]
    return iterations, tokens, resident


# --- One fit ---


def test_costs_without_noise_come_back_exactly() -> None:
    log = make_log()
    fit = fit_stage(log, "generation", np.ones(80, dtype=bool), SHAPE)
    assert fit.coefficient("tokens") == pytest.approx(TOKEN, rel=1e-6)
    assert fit.coefficient("fixed") == pytest.approx(FIXED, rel=1e-6)
    assert fit.coefficient("after_validation") == pytest.approx(VALIDATION, rel=1e-6)
    update = fit_stage(log, "update_actor", np.ones(80, dtype=bool), SHAPE)
    assert update.coefficient("tokens") == pytest.approx(UPDATE_TOKEN, rel=1e-6)
    assert update.coefficient("fixed") == pytest.approx(UPDATE_FIXED, rel=1e-6)


def test_intervals_hold_the_true_costs_as_often_as_they_say() -> None:
    inside = []
    for seed in range(60):
        fit = fit_stage(make_log(noise=0.03, seed=seed), "generation", np.ones(80, dtype=bool), SHAPE)
        truth = {"tokens": TOKEN, "fixed": FIXED, "after_validation": VALIDATION}
        inside += [
            low <= truth[f] <= high for f, low, high in zip(fit.features, fit.low, fit.high, strict=True)
        ]
    # 180 intervals at 95 %, less what Huber weights take: fewer than 85 % is beyond chance.
    assert 0.85 <= np.mean(inside) <= 1.0


def test_a_few_wild_steps_hardly_move_a_fit() -> None:
    log = make_log(noise=0.01)
    wild = log.stages["generation"].copy()
    wild[[3, 30, 31, 60]] *= [8.0, 5.0, 0.4, 20.0]
    fit = fit_stage(
        replace(log, stages=log.stages | {"generation": wild}), "generation", np.ones(80, bool), SHAPE
    )
    assert fit.coefficient("tokens") == pytest.approx(TOKEN, rel=0.03)
    assert fit.coefficient("fixed") == pytest.approx(FIXED, rel=0.05)


def test_costs_that_a_log_cannot_tell_apart_are_reported_as_such() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.uniform(100, 200, 50)
    features = {"iterations": np.full(50, 256.0), "tokens": tokens, "fixed": np.ones(50)}
    seconds = (0.01 * 256 + 0.02 * tokens + 3.0) * np.exp(0.01 * rng.standard_normal(50))
    fit = fit_linear("generation", features, seconds, np.ones(50, dtype=bool))
    assert fit.left_out == ("fixed",)
    assert fit.identified("tokens")
    assert not fit.identified("iterations")
    iterations, fixed = fit.features.index("iterations"), fit.features.index("fixed")
    assert fit.low[iterations] == fit.low[fixed] == 0.0
    assert fit.low[iterations] <= 0.01 <= fit.high[iterations]
    assert fit.low[fixed] <= 3.0 <= fit.high[fixed]


def test_a_least_value_holds_and_is_not_taken_for_knowledge() -> None:
    log = make_log(noise=0.01)
    features = {"tokens": log.response_mean, "fixed": np.ones(80)}
    fit = fit_linear("s", features, log.stages["generation"], np.ones(80, bool), {"fixed": 2 * FIXED})
    assert fit.coefficient("fixed") == pytest.approx(2 * FIXED)
    assert not fit.identified("fixed")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(1, 4), problems=st.integers(1, 5))
def test_batched_least_squares_equal_one_by_one(seed: int, width: int, problems: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, (problems, 12, width)) * 10.0 ** rng.integers(-4, 5, width)
    y = rng.normal(0.5, 1.0, (problems, 12))
    found = nonnegative_least_squares(np.einsum("tij,tik->tjk", x, x), np.einsum("tij,ti->tj", x, y))
    assert (found >= 0).all()
    for i in range(problems):
        _, best = nnls(x[i], y[i])
        assert np.linalg.norm(y[i] - x[i] @ found[i]) <= best * (1 + 1e-6)


# --- The decode model ---


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14),
    max_running=st.integers(1, 6),
)
def test_decode_counts_equal_token_by_token_ones(rows: list[tuple[int, int]], max_running: int) -> None:
    prompt, response = (np.array(column) for column in zip(*rows, strict=True))
    counts = decode_features(
        prompt, response, np.arange(len(rows)), np.zeros(len(rows), np.int64), max_running
    )
    assert counts.shape == (1, 4)
    assert tuple(counts[0, :3]) == token_by_token(prompt.tolist(), response.tolist(), max_running)
    assert counts[0, 3] == prompt.sum()


def test_with_all_admitted_the_counts_are_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    p, length = rng.integers(10, 50, 40), rng.integers(1, 300, 40)
    actor = np.arange(40) % 2
    counts = decode_features(p, length, np.arange(40), actor, 64)
    for i in range(2):
        q, n = p[actor == i], length[actor == i]
        assert counts[i, :3].tolist() == [n.max(), n.sum(), (q * n + n * (n - 1) // 2).sum()]


def decode_log(steps: int, noise: float) -> tuple[RunLog, Trace, tuple[float, float, float, float]]:
    """Return a log whose generation times the decode model made, token counts one by one."""
    trace = make_trace(steps)
    a, b, g, fixed = 8e-3, 3e-4, 4e-7, 6.0
    rng = np.random.default_rng(3)
    generation, mean, prompt = [], [], []
    per_actor = SHAPE.responses // SHAPE.actors
    for batch in trace.batches():
        slowest = 0.0
        for k in range(SHAPE.actors):
            rows = slice(k * per_actor, (k + 1) * per_actor)
            i, s, r = token_by_token(
                batch.prompt_tokens[rows].tolist(), batch.response_tokens[rows].tolist(), SHAPE.max_running
            )
            slowest = max(slowest, a * i + b * s + g * r)
        generation.append((slowest + fixed) * np.exp(noise * rng.standard_normal()))
        mean.append(batch.response_tokens.mean())
        prompt.append(batch.prompt_tokens.mean())
    log = make_log(steps)
    log = replace(
        log,
        response_mean=np.array(mean),
        prompt_mean=np.array(prompt),
        total_tokens=SHAPE.responses * (np.array(mean) + np.array(prompt)),
        stages={"generation": np.array(generation)},
    )
    return log, trace, (a, b, g, fixed)


def test_the_decode_model_comes_back_through_waiting_queues() -> None:
    log, trace, truth = decode_log(24, noise=0.0)
    found = calibrate(log, SHAPE, trace=trace, fit_share=0.75).decode
    assert found is not None
    costs = [found.fit.coefficient(name) for name in ("iterations", "tokens", "resident", "fixed")]
    assert costs == pytest.approx(truth, rel=1e-4)
    assert found.fixed.mape < 1e-6


def test_a_fitted_profile_replays_the_fitted_generation_time() -> None:
    log, trace, _ = decode_log(24, noise=0.02)
    prefill = 1e-5
    found = calibrate(log, SHAPE, trace=trace, fit_share=1.0, prefill_token_seconds=prefill)
    profile = found.profile(factories.profile())
    assert profile.kind == "fitted"
    assert "[fitted]" in profile.label()
    replayed = []
    per_actor = SHAPE.responses // SHAPE.actors
    for batch in trace.batches():
        chunks = [slice(k * per_actor, (k + 1) * per_actor) for k in range(SHAPE.actors)]
        finish = [
            decode_one(profile, batch.prompt_tokens[c], batch.response_tokens[c], batch.prompt[c])[0].max()
            for c in chunks
        ]
        replayed.append(max(finish) + found.overhead_seconds)
    assert np.mean(np.abs(np.array(replayed) / log.stages["generation"] - 1)) < 0.02


def test_a_profile_takes_fitted_stages_and_leaves_the_rest() -> None:
    log, trace, _ = decode_log(24, noise=0.02)
    update = UPDATE_TOKEN * log.total_tokens + UPDATE_FIXED
    log = replace(log, stages=log.stages | {"update_actor": update})
    base = factories.profile(source={"memory": "made up"})
    profile = calibrate(log, SHAPE, trace=trace, fit_share=1.0).profile(base, name="mine")
    assert profile.name == "mine"
    assert profile.stages["update_actor"].gpus == 8
    assert profile.stages["update_actor"].seconds(1e5) == pytest.approx(
        UPDATE_TOKEN * 1e5 + UPDATE_FIXED, rel=1e-5
    )
    assert (profile.memory, profile.links, profile.functions) == (base.memory, base.links, base.functions)
    assert "synthetic" in profile.source["decode"]
    assert profile.source["memory"] == "made up"


# --- Disturbances ---


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.floats(0.002, 0.03),
    first=st.integers(0, 70),
    length=st.integers(4, 40),
    slowdown=st.floats(0.3, 1.5),
)
def test_an_injected_disturbance_is_found_and_no_other(
    seed: int, noise: float, first: int, length: int, slowdown: float
) -> None:
    end = min(first + length, 80)
    if end - first < 4:
        first = end - 4
    log = make_log(noise=noise, seed=seed, slow=(first, end, 1 + slowdown))
    stretches = find_disturbances(log)
    assert len(stretches) == 1
    assert abs(stretches[0].first_step - (first + 1)) <= 1
    assert abs(stretches[0].last_step - end) <= 1
    assert stretches[0].slowdown == pytest.approx(slowdown, abs=0.03 + 4 * noise * (1 + slowdown))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.03), steps=st.integers(8, 150))
def test_no_disturbance_is_found_in_noise(seed: int, noise: float, steps: int) -> None:
    assert find_disturbances(make_log(steps, noise=noise, seed=seed)) == ()


def test_two_stretches_with_a_gap_stay_two() -> None:
    log = make_log(120, noise=0.02, slow=(40, 60, 1.4))
    generation = log.stages["generation"].copy()
    generation[70:90] *= 1.6
    stretches = find_disturbances(replace(log, stages=log.stages | {"generation": generation}))
    assert [(s.first_step, s.last_step) for s in stretches] == [(41, 60), (71, 90)]


def test_a_fixed_fit_ignores_disturbed_steps() -> None:
    slow = make_log(noise=0.01, slow=(8, 18, 1.6))
    result = calibrate(slow, SHAPE, fit_share=0.5)
    report = result.stages["generation"]
    assert [(s.first_step, s.last_step) for s in result.stretches] == [(9, 18)]
    assert report.fit.rows == 30
    assert report.fit.coefficient("tokens") == pytest.approx(TOKEN, rel=0.05)
    assert report.fixed_undisturbed.mape < 0.012


# --- One step ahead ---


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), at=st.integers(5, 78), last_lengths=st.booleans())
def test_a_prediction_never_uses_what_comes_after(seed: int, at: int, last_lengths: bool) -> None:
    log = make_log(noise=0.03, seed=seed)
    rng = np.random.default_rng(seed + 1)

    def changed_from(values: np.ndarray, row: int) -> np.ndarray:
        return np.concatenate((values[:row], values[row:] * rng.uniform(0.2, 5.0, len(values) - row)))

    other = replace(
        log,
        response_mean=changed_from(log.response_mean, at if last_lengths else at + 1),
        response_max=changed_from(log.response_max, at + 1),
        stages=log.stages
        | {
            "generation": changed_from(log.stages["generation"], at),
            "testing": changed_from(log.stages["testing"], at),
        },
    )
    before = one_step_ahead(log, "generation", last_lengths=last_lengths)
    after = one_step_ahead(other, "generation", last_lengths=last_lengths)
    assert np.array_equal(before[: at + 1], after[: at + 1], equal_nan=True)
    assert np.isfinite(before[at])


def test_a_prediction_of_a_step_does_not_change_when_the_log_grows() -> None:
    log = make_log(60, noise=0.03)
    cut = 41
    short = replace(
        log,
        **{
            name: getattr(log, name)[:cut]
            for name in [
                "step",
                "epoch",
                "response_mean",
                "response_max",
                "response_min",
                "clip_ratio",
                "prompt_mean",
                "prompt_max",
                "prompt_min",
                "total_tokens",
            ]
        },
        stages={name: seconds[:cut] for name, seconds in log.stages.items()},
    )
    long = one_step_ahead(log, "generation")
    assert np.allclose(long[:cut], one_step_ahead(short, "generation"), rtol=1e-12, equal_nan=True)


def test_without_noise_every_step_is_predicted() -> None:
    log = make_log()
    error = one_step_ahead(log, "generation")[12:] / log.stages["generation"][12:] - 1
    assert np.abs(error).max() < 1e-4


def test_the_noise_floor_is_the_noise_and_prediction_comes_near_it() -> None:
    sigma = 0.03
    floors, errors, last = [], [], []
    for seed in range(10):
        report = calibrate(make_log(160, noise=sigma, seed=seed), SHAPE).stages["generation"]
        floors.append(report.noise_floor)
        errors.append(report.ahead.mape)
        last.append(report.repeat_last.mape)
    assert np.mean(floors) == pytest.approx(sigma * np.sqrt(2 / np.pi), rel=0.1)
    assert np.mean(errors) < 1.25 * np.mean(floors)
    assert np.mean(errors) < 0.5 * np.mean(last)


def test_a_drift_is_not_taken_for_noise() -> None:
    log = make_log(160, noise=0.01)
    drift = log.stages["generation"] * np.linspace(1.0, 1.6, 160)
    rows = np.ones(160, dtype=bool)
    drifting = replace(log, stages=log.stages | {"generation": drift})
    assert noise_floor(drifting, "generation", rows, rows) == pytest.approx(
        noise_floor(log, "generation", rows, rows), rel=0.3
    )


def test_a_live_planner_follows_a_lasting_change_of_level() -> None:
    log = make_log(160, noise=0.02, slow=(80, 160, 1.5))
    predicted = one_step_ahead(log, "generation")
    error = np.abs(predicted / log.stages["generation"] - 1)
    assert error[80] > 0.25
    assert error[90:].mean() < 0.035


def test_missing_times_leave_gaps_and_no_nan_spreads() -> None:
    log = make_log(noise=0.02)
    generation = log.stages["generation"].copy()
    generation[[10, 11, 40]] = np.nan
    predicted = one_step_ahead(replace(log, stages=log.stages | {"generation": generation}), "generation")
    assert np.isfinite(predicted[5:]).all()


# --- Refusals ---


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"stages": {}}, "no generation times"),
        ({"stages": {"generation": np.full(80, np.nan)}}, "0 steps with a generation time"),
        ({"responses": 512}, "the log implies 512 responses"),
        ({"gpus": 16}, "the log implies 16 gpus"),
    ],
)
def test_a_log_that_cannot_be_calibrated_is_refused_in_one_line(change: dict[str, object], rule: str) -> None:
    with pytest.raises(InputError, match=rule) as error:
        calibrate(replace(make_log(), **change), SHAPE)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("synthetic: ")


def test_seven_steps_are_too_few_and_eight_are_enough() -> None:
    with pytest.raises(InputError, match="7 steps"):
        calibrate(make_log(7), SHAPE)
    assert calibrate(make_log(8), SHAPE).fitted_steps == 2


def test_a_disturbed_first_part_is_refused() -> None:
    with pytest.raises(InputError, match="undisturbed steps among the first 20"):
        calibrate(make_log(noise=0.01, slow=(0, 20, 1.5)), SHAPE)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="need 10 GPUs, the run has 8"):
        RunShape(gpus=8, actors=5, actor_gpus=2, responses=10, max_running=1)
    with pytest.raises(InputError, match="max_running is 0"):
        RunShape(gpus=8, actors=4, actor_gpus=2, responses=10, max_running=0)


def test_a_profile_needs_lengths_of_every_step() -> None:
    log = make_log(24)
    with pytest.raises(InputError, match="needs the decode model"):
        calibrate(log, SHAPE).profile(factories.profile())
    with pytest.raises(InputError, match="no step 24"):
        calibrate(log, SHAPE, trace=make_trace(23))
    with pytest.raises(InputError, match="has 400 responses, the run shape has 200"):
        calibrate(replace(log, responses=None), replace(SHAPE, responses=200), trace=make_trace(24))


# --- Public logs ---

FSDP = "verl_gpg_qwen2_7b/qwen2_7b_gsm8k_math_fsdp.log.gz"
MEGATRON = "verl_gpg_qwen2_7b/qwen2_7b_gsm8k_megatron.log.gz"
NOTEBOOK = "verl_getting_started_ppo/qwen25_05b_gsm8k_ppo.log.gz"
EIGHT_GPUS = RunShape(gpus=8, actors=4, actor_gpus=2, responses=5120, max_running=256)
ONE_GPU = RunShape(gpus=1, actors=1, actor_gpus=1, responses=256, max_running=256)


@pytest.fixture(scope="module")
def calibrations(data_dir: Path) -> dict[str, Calibration]:
    found = {}
    for name, shape in ((FSDP, EIGHT_GPUS), (MEGATRON, EIGHT_GPUS), (NOTEBOOK, ONE_GPU)):
        log = read_verl_log(data_dir / name)
        per_prompt = 5 if shape is EIGHT_GPUS else 1
        trace = reconstruct(
            log, prompts_per_step=shape.responses // per_prompt, responses_per_prompt=per_prompt
        )
        found[name] = calibrate(log, shape, trace=trace)
    return found


@pytest.mark.parametrize(
    ("name", "repeat_last", "ahead"),
    [(FSDP, 0.0441, 0.040), (MEGATRON, 0.0612, 0.049), (NOTEBOOK, 0.0179, 0.010)],
)
def test_generation_one_step_ahead_beats_repeating_the_last_time(
    calibrations: dict[str, Calibration], name: str, repeat_last: float, ahead: float
) -> None:
    report = calibrations[name].stages["generation"]
    assert report.repeat_last.mape == pytest.approx(repeat_last, abs=5e-5)
    assert report.ahead.mape < ahead < repeat_last
    assert report.ahead.mape > report.noise_floor


@pytest.mark.parametrize("name", [FSDP, MEGATRON, NOTEBOOK])
def test_updates_and_log_probs_are_within_two_percent_one_step_ahead(
    calibrations: dict[str, Calibration], name: str
) -> None:
    stages = calibrations[name].stages
    judged = {s for s in stages if s not in ("generation", "reward")}
    assert "update_actor" in judged
    assert judged & {"old_log_prob", "reference"}
    for stage in judged:
        assert stages[stage].ahead.mape < 0.02, stage


def test_the_disturbance_of_the_fsdp_log_is_found_and_kept_out(calibrations: dict[str, Calibration]) -> None:
    found = calibrations[FSDP]
    assert [(s.first_step, s.last_step) for s in found.stretches] == [(51, 112), (119, 139)]
    assert all(0.4 < s.slowdown < 0.6 for s in found.stretches)
    assert found.stages["generation"].fit.rows == 50
    assert found.stages["generation"].fixed_undisturbed.mape < 0.05
    assert found.decode is not None
    assert found.decode.fixed_undisturbed.mape < 0.10


@pytest.mark.parametrize("name", [MEGATRON, NOTEBOOK])
def test_no_disturbance_is_claimed_in_the_other_logs(calibrations: dict[str, Calibration], name: str) -> None:
    found = calibrations[name]
    assert found.stretches == ()
    assert found.stages["generation"].fixed.mape < 0.06
    assert found.decode is not None
    assert found.decode.fixed.mape < 0.10


def test_the_notebook_is_slower_after_a_validation(calibrations: dict[str, Calibration]) -> None:
    fit = calibrations[NOTEBOOK].stages["generation"].fit
    place = fit.features.index("after_validation")
    assert fit.low[place] > 0.4
    # All its batches run as one wave up to the cap: the iteration and the fixed part cannot be told apart.
    decode = calibrations[NOTEBOOK].decode
    assert decode is not None
    assert decode.fit.left_out == ("fixed",)
    assert not decode.fit.identified("iterations")
