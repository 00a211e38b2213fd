"""Synthetic traces have the distribution, the dependence and the sharing that their parameters state."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from scipy import stats

import rlhfless.conf
from rlhfless.scripts.fit_presets import (
    POLYTRACE,
    PRESETS,
    STABILITY,
    answer_correlation,
    histogram,
    polytrace_icc,
    stability,
    to_yaml,
)
from rlhfless.traces.errors import InputError
from rlhfless.traces.lengths import hermite_weights, intraclass_correlation, latent_correlation
from rlhfless.traces.synthetic import LengthComponent, Synthetic, generate
from rlhfless.traces.trace import Trace

PRESET_FOLDER = Path(rlhfless.conf.__file__).parent / "trace"
QUANTILES = (0.1, 0.5, 0.9, 0.99)


def params(**changes: Any) -> Synthetic:
    default: dict[str, Any] = {
        "name": "test",
        "prompts": 3000,
        "prompts_per_step": 500,
        "responses_per_prompt": 4,
        "epochs": 2,
        "max_response_tokens": 4096,
        "lengths": (LengthComponent(1.0, 200.0, 0.5),),
        "icc": 0.6,
        "question_median_tokens": 60.0,
        "question_log_sd": 0.3,
        "max_prompt_tokens": 512,
    }
    return Synthetic(**(default | changes))


def by_prompt(trace: Trace, epoch: int = 0) -> np.ndarray:
    """Return the response lengths of an epoch, one row a prompt."""
    own = trace.select(np.flatnonzero(trace.epoch == epoch))
    order = np.lexsort((own.sample, own.prompt))
    return own.response_tokens[order].reshape(-1, int(own.sample.max()) + 1)


def arrays(trace: Trace) -> dict[str, np.ndarray]:
    return {
        field.name: value
        for field in dataclasses.fields(Trace)
        if isinstance(value := getattr(trace, field.name), np.ndarray) and not field.name.startswith("_")
    }


def test_every_epoch_has_every_prompt_once_in_a_new_order() -> None:
    trace = generate(params(), 0).checked("test")
    assert len(trace) == 2 * 3000 * 4
    assert trace.steps.tolist() == list(range(12))
    orders = [trace.prompt[(trace.epoch == e) & (trace.sample == 0)] for e in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(3000))
    assert (orders[0] != orders[1]).any()
    partial = generate(params(prompts=1100), 0)
    assert len(partial.steps) == 4
    assert len(partial) == 4 * 500 * 4


def test_a_seed_repeats_and_another_does_not() -> None:
    full = params(block_tokens=16, answer_median_tokens=100.0)
    for name, values in arrays(generate(full, 3)).items():
        np.testing.assert_array_equal(values, arrays(generate(full, 3))[name])
    assert (generate(full, 3).response_tokens != generate(full, 4).response_tokens).any()
    with pytest.raises(InputError, match="seed is -1"):
        generate(full, -1)


def test_more_epochs_leave_the_earlier_ones() -> None:
    full = params(block_tokens=16, answer_median_tokens=100.0, persistence=0.9, drift=0.1, runaway_share=0.01)
    short, long = generate(full, 1), generate(dataclasses.replace(full, epochs=4), 1)
    assert long.epoch.max() == 3
    for name, values in arrays(short).items():
        np.testing.assert_array_equal(values, arrays(long)[name][: len(values)], err_msg=name)


@pytest.mark.parametrize("family", ["lognormal", "gamma"])
def test_lengths_have_the_stated_median_and_spread(family: str) -> None:
    trace = generate(params(prompts=20_000, responses_per_prompt=1, epochs=1, family=family), 0)
    logs = np.log(trace.response_tokens)
    assert np.median(trace.response_tokens) == pytest.approx(200, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.03)
    skew = stats.skew(logs)
    assert abs(skew) < 0.1 if family == "lognormal" else skew < -0.3


def test_a_mixture_has_its_components() -> None:
    mixture = (LengthComponent(3.0, 100.0, 0.2), LengthComponent(1.0, 2000.0, 0.2))
    tokens = generate(params(prompts=20_000, lengths=mixture, epochs=1), 0).response_tokens
    assert (tokens > 450).mean() == pytest.approx(0.25, abs=0.02)
    assert np.median(tokens[tokens < 450]) == pytest.approx(100, rel=0.02)
    assert np.median(tokens[tokens > 450]) == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize("icc", [0.0, 0.06, 0.5, 0.92, 1.0])
@pytest.mark.parametrize("cap", [4096, 250])
def test_samples_of_a_prompt_have_the_stated_intraclass_correlation(icc: float, cap: int) -> None:
    mixture = (LengthComponent(0.9, 200.0, 0.5), LengthComponent(0.1, 15.0, 0.9))
    trace = generate(params(prompts=10_000, icc=icc, epochs=1, max_response_tokens=cap, lengths=mixture), 2)
    found = intraclass_correlation(np.log(by_prompt(trace).ravel()), 4)
    assert found == pytest.approx(icc, abs=0.02)


def test_the_latent_correlation_predicts_that_of_transformed_scores() -> None:
    # Against a two-dimensional normal sample, for a transformation with a jump and a saturation.
    def transform(z: np.ndarray) -> np.ndarray:
        return np.where(z > 1, 3.0, np.exp(np.minimum(z, 0.5)))

    rng = np.random.default_rng(0)
    scores = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    for icc in (0.2, 0.7):
        r = latent_correlation(transform(scores), icc)
        a = rng.standard_normal(400_000)
        b = r * a + np.sqrt(1 - r**2) * rng.standard_normal(400_000)
        assert np.corrcoef(transform(a), transform(b))[0, 1] == pytest.approx(icc, abs=0.01)
    assert hermite_weights(2 * scores + 5)[0] == pytest.approx(1.0, abs=2e-3)


def test_intraclass_correlation_of_known_variances() -> None:
    rng = np.random.default_rng(0)
    values = 3 * rng.standard_normal((20_000, 1)) + rng.standard_normal((20_000, 5))
    assert intraclass_correlation(values.ravel(), 5) == pytest.approx(0.9, abs=0.005)
    assert intraclass_correlation(rng.standard_normal(50_000), 5) == pytest.approx(0.0, abs=0.02)


def test_a_persistent_effect_stays_and_a_changing_one_fades() -> None:
    def correlation(persistence: float, later: int) -> float:
        trace = generate(params(icc=0.8, persistence=persistence, epochs=3, prompts=10_000), 0)
        first, other = (np.log(by_prompt(trace, epoch)[:, 0]) for epoch in (0, later))
        return float(np.corrcoef(first, other)[0, 1])

    assert correlation(1.0, 2) == pytest.approx(0.8, abs=0.02)
    assert correlation(0.7, 1) == pytest.approx(0.8 * 0.7, abs=0.02)
    assert correlation(0.7, 2) == pytest.approx(0.8 * 0.49, abs=0.02)
    assert correlation(0.0, 1) == pytest.approx(0.0, abs=0.03)


def test_drift_scales_each_epoch() -> None:
    trace = generate(params(epochs=4, drift=-0.1, prompts=10_000), 0)
    medians = [np.median(by_prompt(trace, epoch)) for epoch in range(4)]
    np.testing.assert_allclose(medians, 200 * 0.9 ** np.arange(4), rtol=0.03)


def test_runaways_stand_at_the_cap_whatever_the_prompt() -> None:
    trace = generate(params(runaway_share=0.1, prompts=10_000, epochs=1, icc=0.9), 0)
    at_cap = by_prompt(trace) == 4096
    assert at_cap.mean() == pytest.approx(0.1, abs=0.01)
    assert intraclass_correlation(at_cap.ravel().astype(float), 4) == pytest.approx(0, abs=0.02)
    np.testing.assert_array_equal(trace.truncated, trace.response_tokens == 4096)


def test_reference_answers_go_with_the_prompts_responses() -> None:
    full = params(answer_median_tokens=110.0, answer_log_sd=0.4, answer_correlation=0.6, prompts=10_000)
    trace = generate(full, 0)
    assert trace.answer_tokens is not None
    first = trace.epoch == 0
    logs = np.log(trace.answer_tokens[first]), np.log(trace.response_tokens[first])
    assert np.corrcoef(*logs)[0, 1] == pytest.approx(0.6, abs=0.02)
    assert np.median(trace.answer_tokens) == pytest.approx(110, rel=0.02)
    for prompt in (0, 17):
        assert len(np.unique(trace.answer_tokens[trace.prompt == prompt])) == 1
    assert generate(params(), 0).answer_tokens is None


def test_prompts_share_exactly_the_leading_blocks_that_they_have_in_common() -> None:
    full = params(
        prompts=60,
        prompts_per_step=60,
        system_tokens=40,
        shot_groups=3,
        shot_tokens=60,
        suffix_tokens=10,
        block_tokens=16,
    )
    trace = generate(full, 0).checked("test")
    blocks = trace.prefix_blocks
    assert blocks is not None
    rows = np.flatnonzero((trace.epoch == 0) & (trace.sample == 0))
    shared: dict[int, int] = {}
    for i in rows:
        own = blocks.row(i)
        assert len(own) == trace.prompt_tokens[i] // 16
        for j in rows:
            other = blocks.row(j)
            n = min(len(own), len(other))
            common = int((own[:n] != other[:n]).argmax()) if (own[:n] != other[:n]).any() else n
            if i != j:
                shared[common] = shared.get(common, 0) + 1
    # 40 system tokens fill 2 blocks; the 100 tokens that a group has in common fill 6.
    assert set(shared) == {2, 6}
    # All samples of a prompt, in every epoch, have the same blocks.
    same = np.flatnonzero(trace.prompt == trace.prompt[0])
    assert len(same) == 8
    assert all((blocks.row(i) == blocks.row(same[0])).all() for i in same)


def test_prompt_lengths_have_their_fixed_part_and_their_limit() -> None:
    trace = generate(params(system_tokens=30, suffix_tokens=12, max_prompt_tokens=120, prompts=5000), 0)
    assert np.median(trace.prompt_tokens) == pytest.approx(102, abs=2)
    assert trace.prompt_tokens.min() > 42
    assert trace.prompt_tokens.max() == 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"icc": 1.5}, "icc: Input should be less than or equal to 1 (got 1.5)"),
        ({"colour": 1}, "colour: Unexpected keyword argument (got 1)"),
        ({"prompts_per_step": 5000}, "prompts_per_step 5000 is more than prompts 3000"),
        ({"lengths": []}, "lengths: Tuple should have at least 1 item after validation, not 0"),
        ({"system_tokens": 512}, "512 fixed prompt tokens leave none of max_prompt_tokens 512"),
        ({"answer_median_tokens": 9.0, "answer_correlation": 0.9}, "answer_correlation 0.9 is beyond 0.77"),
        ({"family": "normal"}, "family: Input should be 'lognormal' or 'gamma' (got 'normal')"),
    ],
)
def test_parameters_that_break_a_rule_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    values = dataclasses.asdict(params()) | {"_target_": "ignored"} | change
    with pytest.raises(InputError) as caught:
        Synthetic.parse(values, "trace")
    assert str(caught.value).startswith(f"trace: {message}")
    assert "\n" not in str(caught.value)


def preset(name: str) -> Synthetic:
    path = PRESET_FOLDER / f"{name}.yaml"
    return Synthetic.parse(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))


@cache
def large(name: str) -> Trace:
    """Return a preset's trace with so many prompts that its sampling error is small."""
    own = preset(name)
    return generate(
        dataclasses.replace(own, prompts=16_384, prompts_per_step=4096, epochs=1, block_tokens=None), 0
    )


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_generates_a_valid_trace_with_its_source(name: str) -> None:
    own = preset(name)
    trace = generate(own, 0).checked(name)
    assert own.name == trace.name == name
    assert own.source in trace.source
    assert "assumed" in trace.source
    assert trace.epoch.max() >= 2


def test_presets_are_the_files_in_the_folder() -> None:
    target = "_target_: rlhfless.traces.synthetic.Synthetic\n"
    written = {path.stem for path in PRESET_FOLDER.glob("*.yaml") if target in path.read_text()}
    assert written == set(PRESETS)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gsm8k_ppo_has_the_stability_that_the_paper_measured(seed: int) -> None:
    # RLHFless (arXiv 2602.22718), sec. 4.3: about 70 % of prompts within 50 tokens, about 90 % within 100.
    found = stability(generate(preset("gsm8k_ppo"), seed))
    for bound, share in STABILITY.items():
        assert found[bound] == pytest.approx(share, abs=0.04)


def test_means_of_groups_are_more_stable_than_single_responses() -> None:
    # The paper's figures are of single responses; the mean of three moves less.
    trace = generate(preset("gsm8k_grpo"), 0)
    means = stability(trace)
    one = stability(trace.select(np.flatnonzero(trace.sample == 0)))
    assert one[50] == pytest.approx(0.7, abs=0.04)
    assert means[50] == pytest.approx(0.86, abs=0.04)
    assert means[100] == pytest.approx(0.98, abs=0.02)


@pytest.mark.parametrize("name", list(PRESETS))
def test_committed_presets_are_what_the_script_writes(data_dir: Path, name: str) -> None:
    committed = yaml.safe_load((PRESET_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    written = yaml.safe_load(to_yaml(PRESETS[name](data_dir)))
    numbers = {key for key, value in written.items() if isinstance(value, float)}
    for key in numbers:
        # Another version of the optimiser may move a last digit.
        assert committed[key] == pytest.approx(written[key], rel=0.02), key
    for one, other in zip(committed["lengths"], written["lengths"], strict=True):
        assert one == pytest.approx(other, rel=0.02)
    for key in written.keys() - numbers - {"lengths"}:
        assert committed[key] == written[key], key


def test_gsm8k_presets_match_solutions_logs_and_questions(data_dir: Path) -> None:
    trace = large("gsm8k_ppo")
    solutions = pl.read_csv(data_dir / "gsm8k/example_model_solution_lengths.csv")["resp_tokens"].to_numpy()
    tokens = trace.response_tokens / np.median(trace.response_tokens)
    want = np.quantile(solutions / np.median(solutions), QUANTILES)
    np.testing.assert_allclose(np.quantile(tokens, QUANTILES), want, rtol=0.08)
    # The level is the mean of three runs' first epochs: 220, 176 and 254 tokens.
    assert trace.response_tokens.mean() == pytest.approx(216, rel=0.03)
    assert 0.0003 < np.mean(trace.truncated) < 0.0012
    lengths = pl.read_csv(data_dir / "gsm8k/prompt_lengths.csv")
    train = lengths.filter(pl.col("split") == "train")
    own = trace.prompt_tokens - 44
    np.testing.assert_allclose(
        np.quantile(own, QUANTILES), np.quantile(train["question_tokens"], QUANTILES), rtol=0.06
    )
    assert trace.answer_tokens is not None
    np.testing.assert_allclose(
        np.quantile(trace.answer_tokens, QUANTILES),
        np.quantile(train["reference_answer_tokens"], QUANTILES),
        rtol=0.08,
    )
    calm = trace.response_tokens < 2048
    found = np.corrcoef(np.log(trace.answer_tokens[calm]), np.log(trace.response_tokens[calm]))[0, 1]
    test = lengths.filter(pl.col("split") == "test")
    assert found == pytest.approx(answer_correlation(data_dir, test), abs=0.02)


@pytest.mark.parametrize(
    ("name", "workload"),
    [("deepcoder_16k", "deepcoder_14b_code_16k"), ("dapo_math", "dapo_qwen25_32b_math")],
)
def test_rollout_presets_match_the_measured_lengths(data_dir: Path, name: str, workload: str) -> None:
    rows = pl.read_parquet(data_dir / POLYTRACE).filter(pl.col("workload") == workload)
    real, trace = rows["resp_len"].to_numpy(), large(name)
    tokens, cap = trace.response_tokens, preset(name).max_response_tokens
    assert tokens.mean() == pytest.approx(real.mean(), rel=0.03)
    np.testing.assert_allclose(np.quantile(tokens, QUANTILES), np.quantile(real, QUANTILES), rtol=0.06)
    assert (tokens == cap).mean() == pytest.approx((real >= cap).mean(), abs=0.01)
    found = intraclass_correlation(np.log(by_prompt(trace).ravel()), 8)
    assert found == pytest.approx(polytrace_icc(rows), abs=0.02)
    prompts = rows.filter(pl.col("sample") == 0)["prompt_len"].to_numpy()
    np.testing.assert_allclose(
        np.quantile(trace.prompt_tokens, (0.1, 0.5, 0.9)), np.quantile(prompts, (0.1, 0.5, 0.9)), rtol=0.12
    )


def test_long_reasoning_matches_the_served_model(data_dir: Path) -> None:
    start, weight = histogram(data_dir / "servegen_deepseek_r1/output_tokens_hist.csv")
    trace = large("long_reasoning")
    middle, weight = start + 7.5, weight / weight.sum()
    assert trace.response_tokens.mean() == pytest.approx(weight @ middle, rel=0.03)
    want = middle[np.searchsorted(np.cumsum(weight), QUANTILES)]
    np.testing.assert_allclose(np.quantile(trace.response_tokens, QUANTILES), want, rtol=0.06)
    assert np.mean(trace.truncated) < 0.001
