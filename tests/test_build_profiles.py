"""The script that writes the measured profiles, against other compositions of the same and other data."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rlhfless.models.computed import Assumptions
from rlhfless.models.decode import decode_one
from rlhfless.models.hardware import find_model
from rlhfless.models.profile import Profile
from rlhfless.scripts.build_profiles import (
    MEASURED_MODELS,
    TABLE_NAMES,
    Composition,
    OperatorTables,
    build_all,
    fit_relative,
    main,
    plain,
    to_yaml,
    vidur_profile,
)
from rlhfless.traces.errors import InputError

CONF = Path(__file__).parent.parent / "conf" / "profile"


@pytest.fixture(scope="module")
def operators(data_dir: Path) -> Path:
    return data_dir / "gpu_op_latency"


@cache
def tables(folder: Path, gpu: str) -> OperatorTables:
    return OperatorTables(folder, gpu)


def measured(folder: Path, name: str) -> Profile:
    ((found, profile),) = build_all(folder, only=name)
    assert found == name
    assert isinstance(profile, Profile)
    return profile


def tau(profile: Profile, batch: int, tokens: float) -> float:
    base, kv = profile.decode.tables(batch)
    return float(base[batch] + kv[batch] * tokens)


# --- parts -------------------------------------------------------------------------------------------


def test_the_fit_finds_what_made_the_times() -> None:
    tokens = np.array([128.0, 512.0, 2048.0, 8192.0])
    columns = np.column_stack((np.ones(4), tokens))
    found, errors = fit_relative(columns, 0.01 + 2e-7 * tokens)
    assert found == pytest.approx([0.01, 2e-7])
    assert np.abs(errors).max() < 1e-9


def test_the_fit_is_never_negative_and_minds_relative_errors() -> None:
    tokens = np.array([1.0, 2.0, 3.0])
    falling, _ = fit_relative(np.column_stack((np.ones(3), tokens)), np.array([3.0, 2.0, 1.0]))
    assert falling[1] == 0.0
    # One unknown: sum(1/t) / sum(1/t^2) minimises sum((x/t - 1)^2); the mean would be 5.5.
    constant, errors = fit_relative(np.ones((2, 1)), np.array([1.0, 10.0]))
    assert constant == pytest.approx([1.1 / 1.01])
    assert errors == pytest.approx(constant / np.array([1.0, 10.0]) - 1)


def write_tables(folder: Path) -> None:
    """Write tables of an L40S on which every operator takes a time that can be added by hand.

    A GEMM takes 100 us, attention 10 us and 1 us a thousand tokens, an all-reduce of 2 GPUs 7 us.
    """
    sizes = [1, 1024, 65536]
    gemm = [(m, n, k, 100.0) for m in (1, 16384) for n in sizes for k in sizes]
    pl.DataFrame(gemm, schema=["m", "n", "k", "latency_us"], orient="row").write_parquet(
        folder / "l40s_gemm_bf16.parquet"
    )
    for axis, name in (("step", "generation"), ("isl", "context")):
        rows = [
            (batch, length, heads, 1, 128, 10.0 + batch * length / 1000)
            for batch in (1, 2048)
            for length in (1, 16384)
            for heads in (1, 64)
        ]
        columns = ["batch_size", axis, "num_heads", "num_key_value_heads", "head_dim", "latency_us"]
        pl.DataFrame(rows, schema=columns, orient="row").write_parquet(
            folder / f"l40s_{name}_attention_bf16.parquet"
        )
    (folder / "nccl_half_latency_us.csv").write_text(
        "gpu,op_name,num_gpus,message_size,latency_us\n"
        "l40s,all_reduce,2,256,7.0\nl40s,all_reduce,2,100000000,7.0\nl40s,all_gather,2,256,99.0\n"
    )


def test_an_iteration_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    """Qwen2.5-3B on two GPUs: 36 layers of 4 GEMMs, attention and 2 all-reduces, and an output projection."""
    write_tables(tmp_path)
    composition = Composition(OperatorTables(tmp_path, "L40S"), find_model("Qwen2.5-3B"), 2)
    contexts, seconds = composition.decode(1)
    assert list(contexts) == [1, 16384]
    attention = np.array([10.001, 26.384])
    vocabulary = 151_936 / 2 / 65_536  # wider than measured: in proportion, and not faster than its bytes
    output = max(100 * vocabulary, 2 * 151_936 / 2 * 2048 / 864e9 * 1e6)
    layer = 4 * 100 + attention + 2 * 7
    assert seconds * 1e6 == pytest.approx(36 * layer + output)


def test_no_operator_is_faster_than_its_bytes(tmp_path: Path) -> None:
    write_tables(tmp_path)
    operators = OperatorTables(tmp_path, "L40S")
    assert operators.gemm(1, 1024, 1024) == pytest.approx(100e-6)
    assert operators.gemm(1, 65_536, 65_536) == pytest.approx(2 * 65_536**2 / 864e9)


# --- against data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", TABLE_NAMES)
def test_decode_agrees_with_another_composition_of_the_tables(operators: Path, gpu: str) -> None:
    """An earlier sum of the same operators, which interpolates in its own way and knows no cache bound.

    The projections agree to 10 % everywhere, and the whole iteration to 5 % in the median of each model.
    """
    rows = pl.read_csv(operators / "derived_decode_step_ms.csv").filter(pl.col("gpu") == TABLE_NAMES[gpu])
    models = rows["model"].unique().to_list()
    assert len(models) >= 5
    for model in models:
        composition = Composition(tables(operators, gpu), find_model(model), 1)
        whole = []
        for (batch,), group in rows.filter(pl.col("model") == model).group_by("batch"):
            b = int(str(batch))
            gemm = composition.projections(b, b) * 1e3 / group["gemm_ms"][0]
            bound = 1.15 if gpu == "L40S" else 1.10  # small weights stay in the 96 MB cache of an L40S
            assert 0.90 < gemm < bound
            contexts, seconds = composition.decode(b)
            at = group["context_tokens"].to_numpy()
            whole.extend(np.interp(at, contexts, seconds) * 1e3 / group["decode_step_ms"].to_numpy())
        assert np.median(whole) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("gpu", TABLE_NAMES)
def test_prefill_agrees_with_another_composition_of_the_tables(operators: Path, gpu: str) -> None:
    rows = pl.read_csv(operators / "derived_prefill_ms.csv").filter(pl.col("gpu") == TABLE_NAMES[gpu])
    for model in rows["model"].unique():
        prompts, tokens, seconds = Composition(tables(operators, gpu), find_model(model), 1).prefill(8192)
        single = dict(zip(tokens[prompts == 1], seconds[prompts == 1], strict=True))
        ratios = [
            single[m] * 1e3 / ms
            for m, ms in rows.filter(pl.col("model") == model)
            .select("prompt_tokens", "prefill_ms")
            .iter_rows()
            if m in single
        ]
        assert len(ratios) >= 5
        assert np.median(ratios) == pytest.approx(1.0, abs=0.06)
        assert min(ratios) > 0.85
        assert max(ratios) < 1.12


def test_decode_agrees_with_measured_serving(data_dir: Path) -> None:
    """Llama-3.1-8B on an H100: time per output token of TensorRT-LLM 1.0.0rc3, 42 measured points.

    A continuous batch decodes at half its final context and prefills one prompt per response; no row was
    used in a fit. The measured time is longer by a few per cent: host overhead and small kernels.
    """
    profile = measured(data_dir / "gpu_op_latency", "h100_llama-3.1-8b_tp1")
    rows = pl.read_csv(
        data_dir / "serving_tpot" / "measured_ttft_tpot.csv.gz", infer_schema_length=None
    ).filter(
        pl.col("model_path").str.contains("Llama-3.1-8B")
        & (pl.col("system") == "h100_sxm")
        & (pl.col("tp_size") == 1)
        & (pl.col("mode") == "agg")
        & (pl.col("backend") == "trtllm")
    )
    ratios = []
    for isl, osl, batch, ms in rows.select("isl", "osl", "batch_size", "silicon_tpot_ms").iter_rows():
        decode = tau(profile, int(batch), batch * (isl + osl / 2))
        prefill = profile.prefill.token_seconds * isl + profile.prefill.token2_seconds * isl**2
        ratios.append(ms / 1e3 / (decode + prefill * batch / osl))
    assert len(ratios) == 42
    assert 1.0 < np.median(ratios) < 1.08
    assert np.mean(np.abs(1 / np.array(ratios) - 1)) < 0.06


@pytest.mark.parametrize("name", ["l40s_qwen2.5-7b_tp2", "a100_qwen2.5-7b_tp1", "h100_llama-2-70b_tp4"])
def test_decode_agrees_with_estimates_of_aiconfigurator(data_dir: Path, name: str) -> None:
    """Its estimates compose tables of the same origin with rules of their own, for three engines."""
    profile = measured(data_dir / "gpu_op_latency", name)
    gpu, model, tp = name.split("_")
    rows = pl.read_csv(data_dir / "aiconfigurator_estimates" / "decode_step_ms.csv").filter(
        pl.col("system").str.starts_with(gpu)
        & (pl.col("model").str.to_lowercase() == model)
        & (pl.col("tp") == int(tp[2:]))
        & (pl.col("batch") * pl.col("context_tokens") <= profile.actor.kv_capacity_tokens)
    )
    ratios = [
        tau(profile, batch, batch * context) * 1e3 / ms
        for batch, context, ms in rows.select("batch", "context_tokens", "decode_step_ms").iter_rows()
    ]
    assert len(ratios) > 50
    assert np.median(ratios) == pytest.approx(1.0, abs=0.06)


def test_weights_load_at_the_assumed_rate(data_dir: Path) -> None:
    """Slope of load time over size, 90 safetensors loads of ServerlessLLM on one H100 server."""
    rows = pl.read_csv(data_dir / "serverlessllm_load_times" / "load_times.csv").filter(
        (pl.col("gpu") == "h100_sxm") & (pl.col("format") == "safetensors") & (pl.col("mode") == "random")
    )
    size = {
        "meta-llama/Llama-3.1-8B-Instruct": find_model("Llama-3.1-8B").weight_bytes,
        "Qwen/Qwen3-32B": find_model("Qwen3-32B").weight_bytes,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": find_model("Qwen2.5-32B").weight_bytes,
    }
    x = np.array([size[name] for name in rows["model"]], dtype=np.float64)
    slope = np.linalg.lstsq(x[:, None], rows["loading_s"].to_numpy(), rcond=None)[0][0]
    assert len(x) == 90
    assert 1 / slope == pytest.approx(Assumptions().load_bytes_per_second, rel=0.01)


def test_rewards_cost_what_a_public_log_says(data_dir: Path) -> None:
    rows = pl.read_csv(data_dir / "verl_gpg_qwen2_7b" / "qwen2_7b_gsm8k_math_fsdp_steps.csv")
    rate = (rows["t_reward"] / rows["total_tokens"]).median()
    assert rate == pytest.approx(Assumptions().reward_token_seconds, rel=0.01)


# --- the files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["l40s_qwen2.5-3b_tp2", "a100_qwen2.5-14b_tp1", "h100_llama-2-70b_tp2", "h200_llama-3.1-8b_tp4"]
)
def test_committed_files_are_what_the_script_writes(operators: Path, name: str) -> None:
    assert (CONF / f"{name}.yaml").read_text(encoding="utf-8") == to_yaml(measured(operators, name))


def test_the_script_writes_and_says_what_it_skips(
    operators: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(operators), "--out", str(tmp_path), "--only", "0.5b"]) == 0
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {f"{gpu}_qwen2.5-0.5b_tp{gpus}" for gpu in ("l40s", "h100", "h200") for gpus in (1, 2)}
    said = capsys.readouterr().out
    assert "skipped l40s_qwen2.5-0.5b_tp4: tensor_parallel: Qwen2.5-0.5B has 14 query and 2 KV heads" in said
    assert "skipped a100_qwen2.5-0.5b_tp1: A100: no measured attention with 14 heads" in said


def test_missing_or_wrong_tables_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert f"{tmp_path / 'l40s_gemm_bf16.parquet'}: cannot be read" in capsys.readouterr().err
    write_tables(tmp_path)
    pl.DataFrame({"m": [1], "n": [1], "latency_us": [1.0]}).write_parquet(tmp_path / "l40s_gemm_bf16.parquet")
    assert main([str(tmp_path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error == f"{tmp_path / 'l40s_gemm_bf16.parquet'}: column k is missing\n"
    assert not out.exists()


def test_numbers_are_rounded_but_exact_where_whole() -> None:
    assert plain({"a": (0.123456789, 0.0), "b": 6171877376.0, "c": 7, "d": "x"}) == {
        "a": [0.12346, 0.0],
        "b": 6171877376,
        "c": 7,
        "d": "x",
    }


def test_the_grid_names_every_pair(operators: Path) -> None:
    names = [name for name, _ in build_all(operators)]
    assert len(names) == len(set(names)) == len(TABLE_NAMES) * len(MEASURED_MODELS) * 3 + 3


# --- Vidur -------------------------------------------------------------------------------------------

RUNS = {
    "h100_7b_tp1": ("h100", "meta-llama/Llama-2-7b-hf", 1),
    "a100_7b_tp1": ("a100", "meta-llama/Llama-2-7b-hf", 1),
    "h100_70b_tp4": ("h100", "meta-llama/Llama-2-70b-hf", 4),
    "h100_70b_tp8": ("h100", "meta-llama/Llama-2-70b-hf", 8),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_closed_batch_takes_as_long_as_in_vidur(data_dir: Path, run: str) -> None:
    """512 requests dealt round robin over 1, 4 and 16 replicas; each makespan within 2 % of Vidur's.

    Vidur prefills first, at most 4096 tokens at a time, and runs at most 256 requests.
    """
    folder = data_dir / "vidur_closed_batch"
    profile, _ = vidur_profile(folder, *RUNS[run])
    batch = pl.read_csv(folder / "closed_batch_512.csv")
    prompts, responses = batch["num_prefill_tokens"].to_numpy(), batch["num_decode_tokens"].to_numpy()
    spans = dict(pl.read_csv(folder / "makespans.csv").select("name", "makespan_s").iter_rows())
    for replicas in (1, 4, 16):
        makespan = 0.0
        for r in range(replicas):
            own = len(prompts[r::replicas])
            finish, _ = decode_one(profile, prompts[r::replicas], responses[r::replicas], np.arange(own))
            makespan = max(makespan, float(finish.max()))
        assert makespan == pytest.approx(spans[f"{run}_r{replicas}"], rel=0.02)


@pytest.mark.parametrize(
    ("run", "largest"), [("h100_7b_tp1", 0.03), ("a100_7b_tp1", 0.10), ("h100_70b_tp8", 0.01)]
)
def test_vidur_tables_are_fitted_to_a_stated_error(data_dir: Path, run: str, largest: float) -> None:
    _, fits = vidur_profile(data_dir / "vidur_closed_batch", *RUNS[run])
    assert 0.5 * largest < max(fit.largest for fit in fits) <= largest + 0.005


def test_a_run_that_vidur_did_not_make_is_refused(data_dir: Path) -> None:
    with pytest.raises(InputError, match="no rows of b200, meta-llama/Llama-2-7b-hf, tp 1"):
        vidur_profile(data_dir / "vidur_closed_batch", "b200", "meta-llama/Llama-2-7b-hf", 1)
