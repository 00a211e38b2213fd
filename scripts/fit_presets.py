"""Fit the workload presets of conf/trace/ to public data and write them.

    python scripts/fit_presets.py DATA [--out conf/trace]

DATA is a folder with the data sets that the presets name as their source, one folder each:

- ``gsm8k``: question and reference answer lengths, lengths of four models' solutions
  (github.com/openai/grade-school-math, MIT);
- ``verl_getting_started_ppo``, ``verl_gpg_qwen2_7b``: console logs of three training runs (verl's PPO
  notebook, Apache-2.0; github.com/diqiuzhuanzhuan/verldata, MIT);
- ``polytrace_lengths``: per-response lengths of RL rollouts (github.com/Zhou-jiecheng/PolyTrace);
- ``servegen_deepseek_r1``: output length histogram of a served reasoning model (github.com/alibaba/ServeGen,
  Apache-2.0).

Lengths are fitted by maximum likelihood: whole tokens and histogram bins count as intervals, responses at the
cap as longer than it. The dependence between samples of one prompt is set so that the intraclass correlation
of log lengths is the data's. Without ``--out`` the presets are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from scipy.optimize import minimize, minimize_scalar
from scipy.special import ndtr

from rlhfless.traces.errors import InputError
from rlhfless.traces.lengths import intraclass_correlation
from rlhfless.traces.synthetic import LengthComponent, Synthetic, generate
from rlhfless.traces.trace import FloatArray, Trace
from rlhfless.traces.verl_log import read_verl_log

#: RLHFless (arXiv 2602.22718), sec. 4.3: share of prompts whose length changes by at most so many tokens from
#: one epoch to the next (PPO, GSM8K, Qwen2.5-3B, at most 2048 response tokens).
STABILITY = {50: 0.7, 100: 0.9}

LOGS = (
    "verl_getting_started_ppo/qwen25_05b_gsm8k_ppo.log.gz",
    "verl_gpg_qwen2_7b/qwen2_7b_gsm8k_megatron.log.gz",
    "verl_gpg_qwen2_7b/qwen2_7b_gsm8k_math_fsdp.log.gz",
)
#: Steps of the notebook's first pass over GSM8K: 7,473 training questions, 256 a step.
NOTEBOOK_EPOCH_STEPS = 29

POLYTRACE = "polytrace_lengths/single_turn_lengths.parquet"
SAMPLES = 8  # responses a prompt in the PolyTrace tables

#: Tokens of Qwen2.5's chat template before the question (system prompt and role marks). With the 20 behind it
#: (instruction and generation prompt) they are the 44 by which the notebook log's mean prompt, 103.6, exceeds
#: GSM8K's mean question, 59.6.
QWEN25_SYSTEM_TOKENS = 24

Fit = Callable[[Path], Synthetic]


def fit_components(
    low: FloatArray, high: FloatArray, weight: FloatArray, components: int
) -> tuple[LengthComponent, ...]:
    """Fit a lognormal mixture to lengths known to lie between ``low`` and ``high`` (inf: above the cap).

    Maximises the weighted likelihood of the intervals; components come ordered by median.
    """
    weight = weight / weight.sum()
    log_low = np.log(np.maximum(low, 1e-9))
    log_high = np.log(high, out=np.full(len(high), np.inf), where=np.isfinite(high))

    def unpack(x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        logits = np.append(x[: components - 1], 0.0)
        shares = np.exp(logits - logits.max())
        return shares / shares.sum(), x[components - 1 : 2 * components - 1], np.exp(x[2 * components - 1 :])

    def loss(x: FloatArray) -> float:
        shares, medians, spreads = unpack(x)
        mass = ndtr((log_high[:, None] - medians) / spreads) - ndtr((log_low[:, None] - medians) / spreads)
        return -float(weight @ np.log(np.maximum(mass @ shares, 1e-300)))

    order = np.argsort(log_low)
    below = np.cumsum(weight[order])
    at = (np.arange(components) + 0.5) / components
    start = log_low[order][np.minimum(np.searchsorted(below, at), len(order) - 1)]
    x0 = np.concatenate((np.zeros(components - 1), start, np.full(components, np.log(0.5))))
    bounds = [(-6, 6)] * (components - 1) + [(0, 12)] * components + [(np.log(0.05), np.log(3))] * components
    best = minimize(loss, x0, method="L-BFGS-B", bounds=bounds, options={"maxiter": 2000, "ftol": 1e-13})
    shares, medians, spreads = unpack(best.x)
    return tuple(
        LengthComponent(_round(shares[i], 3), _round(np.exp(medians[i]), 3), _round(spreads[i], 3))
        for i in np.argsort(medians)
    )


def changes(trace: Trace) -> FloatArray:
    """Return how far each prompt's mean response length moves between consecutive epochs, in tokens."""
    means = pl.DataFrame({"epoch": trace.epoch, "prompt": trace.prompt, "tokens": trace.response_tokens})
    means = means.group_by("epoch", "prompt").agg(pl.col("tokens").mean())
    after = means.with_columns(epoch=pl.col("epoch") - 1)
    pairs = means.join(after, on=["epoch", "prompt"], suffix="_after")
    return (pairs["tokens_after"] - pairs["tokens"]).abs().to_numpy()


def stability(trace: Trace) -> dict[int, float]:
    """Return the share of prompts whose mean length moves by at most each bound of STABILITY."""
    moved = changes(trace)
    return {bound: float((moved <= bound).mean()) for bound in STABILITY}


def fit_gsm8k_ppo(data: Path) -> Synthetic:
    """Fit the GSM8K preset with one response a prompt: shape, level, drift, and the paper's stability."""
    solutions = pl.read_csv(data / "gsm8k/example_model_solution_lengths.csv")["resp_tokens"].to_numpy()
    (shape,) = fit_components(solutions - 0.5, solutions + 0.5, np.ones(len(solutions)), 1)
    logs = [read_verl_log(data / name) for name in LOGS]
    first = [
        float(
            log.response_mean[
                : NOTEBOOK_EPOCH_STEPS if log.epoch[0] < 0 else int((log.epoch == 0).sum())
            ].mean()
        )
        for log in logs
    ]
    level = float(np.mean(first))
    median = level / float(np.exp(shape.log_sd**2 / 2))
    megatron = logs[1]
    epochs = np.unique(megatron.epoch)
    means = np.array([megatron.response_mean[megatron.epoch == e].mean() for e in epochs])
    drift = float(np.exp(np.polyfit(epochs, np.log(means), 1)[0])) - 1
    lengths = pl.read_csv(data / "gsm8k/prompt_lengths.csv")
    train, test = lengths.filter(pl.col("split") == "train"), lengths.filter(pl.col("split") == "test")
    question = np.log(train["question_tokens"].to_numpy())
    answer = np.log(train["reference_answer_tokens"].to_numpy())
    fixed = round(float(np.nanmean(logs[0].prompt_mean)) - float(train["question_tokens"].to_numpy().mean()))
    params = Synthetic(
        name="gsm8k_ppo",
        algorithm="ppo",
        model="Qwen2.5-3B",
        prompts=7473,
        prompts_per_step=1024,
        responses_per_prompt=1,
        epochs=3,
        max_response_tokens=2048,
        lengths=(LengthComponent(1.0, _round(median, 4), shape.log_sd),),
        icc=0.85,
        persistence=0.98,
        drift=_round(drift, 2),
        runaway_share=_round(float(megatron.clip_ratio.mean()), 2),
        question_median_tokens=_round(float(np.exp(question.mean())), 3),
        question_log_sd=_round(float(question.std()), 3),
        system_tokens=QWEN25_SYSTEM_TOKENS,
        suffix_tokens=fixed - QWEN25_SYSTEM_TOKENS,
        max_prompt_tokens=1024,
        block_tokens=16,
        answer_median_tokens=_round(float(np.exp(answer.mean())), 3),
        answer_log_sd=_round(float(answer.std()), 3),
        answer_correlation=_round(answer_correlation(data, test), 2),
        source=(
            "shape: lognormal fitted to 4 x 1319 model solutions of GSM8K; level: mean of the first epochs of three "
            "verl logs (Qwen2.5-0.5B PPO, Qwen2-7B GPG on GSM8K and on GSM8K + MATH); drift and runaways: the "
            "Qwen2-7B GSM8K log; icc: so that 70 % of prompts change by at most 50 tokens and 90 % by at most 100 "
            "between epochs (RLHFless, arXiv 2602.22718, sec. 4.3); questions and reference answers: GSM8K train; "
            "system and suffix tokens: Qwen2.5 chat template; "
            "size of the prompt set: GSM8K train; batch: verl examples for GSM8K; assumed: persistence"
        ),
    )

    def miss(icc: float) -> float:
        reached = stability(
            generate(replace(params, prompts=32768, prompts_per_step=4096, epochs=2, icc=icc), 0)
        )
        return sum((reached[bound] - share) ** 2 for bound, share in STABILITY.items())

    best = minimize_scalar(miss, bounds=(0.5, 0.99), method="bounded", options={"xatol": 1e-4})
    return replace(params, icc=_round(float(best.x), 2))


def answer_correlation(data: Path, test: pl.DataFrame) -> float:
    """Return the correlation of log solution and log reference answer length, mean of four models."""
    solutions = pl.read_csv(data / "gsm8k/example_model_solution_lengths.csv")
    joined = solutions.join(test, on="index").with_columns(
        pl.col("resp_tokens").log(), pl.col("reference_answer_tokens").log()
    )
    by_model = joined.group_by("model").agg(pl.corr("resp_tokens", "reference_answer_tokens"))
    return float(by_model["resp_tokens"].to_numpy().mean())


def fit_gsm8k_grpo(data: Path) -> Synthetic:
    """Fit the GSM8K preset with groups: the PPO preset's lengths, three responses a prompt."""
    ppo = fit_gsm8k_ppo(data)
    return replace(
        ppo,
        name="gsm8k_grpo",
        algorithm="grpo",
        prompts=7473,
        prompts_per_step=1024,
        responses_per_prompt=3,
        source=f"as gsm8k_ppo, with 3 responses a prompt (RLHFless, arXiv 2602.22718, fig. 13b). {ppo.source}",
    )


def fit_polytrace(data: Path, workload: str, components: int, cap: int, **rest: Any) -> Synthetic:
    """Fit a preset to one workload of the PolyTrace tables, all its runs together."""
    rows = pl.read_parquet(data / POLYTRACE).filter(pl.col("workload") == workload)
    tokens = rows["resp_len"].to_numpy()
    low, high = tokens - 0.5, np.where(tokens >= cap, np.inf, tokens + 0.5)
    prompt = np.log(rows.filter(pl.col("sample") == 0)["prompt_len"].to_numpy())
    return Synthetic(
        max_response_tokens=cap,
        lengths=fit_components(low, high, np.ones(len(tokens)), components),
        icc=_round(polytrace_icc(rows), 2),
        question_median_tokens=_round(float(np.exp(prompt.mean())), 3),
        question_log_sd=_round(float(prompt.std()), 3),
        responses_per_prompt=SAMPLES,
        epochs=3,
        persistence=0.9,
        algorithm="grpo",
        block_tokens=16,
        **rest,
    )


def polytrace_icc(rows: pl.DataFrame) -> float:
    """Return the intraclass correlation of log response lengths, 8 samples a prompt."""
    ordered = rows.sort("run", "step", "rank", "local_index", "sample")["resp_len"].to_numpy()
    return intraclass_correlation(np.log(ordered), SAMPLES)


def fit_deepcoder(data: Path) -> Synthetic:
    """Fit the coding preset: long responses, an effect of the prompt that leaves little to chance."""
    return fit_polytrace(
        data,
        "deepcoder_14b_code_16k",
        components=2,
        cap=16000,
        name="deepcoder_16k",
        model="DeepCoder-14B",
        prompts=64,
        prompts_per_step=16,
        max_prompt_tokens=4096,
        source=(
            "lengths, icc, prompts, batch: PolyTrace deepcoder_14b_code_16k (5 steps x 16 prompts x 8 samples, cap "
            "16000); only 80 prompts, so the marginal is rough; assumed: persistence, size of the prompt set, no "
            "shared prefix"
        ),
    )


def fit_dapo(data: Path) -> Synthetic:
    """Fit the math preset: short responses with both tails heavy, hardly any effect of the prompt."""
    return fit_polytrace(
        data,
        "dapo_qwen25_32b_math",
        components=3,
        cap=20480,
        name="dapo_math",
        model="Qwen2.5-32B",
        prompts=384,
        prompts_per_step=96,
        max_prompt_tokens=2048,
        source=(
            "lengths, icc, prompts, batch: PolyTrace dapo_qwen25_32b_math (8 steps x 96 prompts x 8 samples, longest "
            "10112); assumed: the cap (20480, verl's DAPO recipe; no response of the data reaches it), persistence, "
            "size of the prompt set, no shared prefix"
        ),
    )


def fit_long_reasoning(data: Path) -> Synthetic:
    """Fit the long-reasoning preset to a served model's output lengths."""
    folder = data / "servegen_deepseek_r1"
    low, weight = histogram(folder / "output_tokens_hist.csv")
    prompt, prompt_weight = histogram(folder / "input_tokens_hist.csv")
    (question,) = fit_components(prompt - 0.5, prompt + 15.5, prompt_weight, 1)
    return Synthetic(
        name="long_reasoning",
        model="DeepSeek-R1",
        prompts=256,
        prompts_per_step=64,
        responses_per_prompt=8,
        epochs=3,
        max_response_tokens=32768,
        lengths=fit_components(low - 0.5, low + 15.5, weight, 3),
        icc=0.5,
        persistence=0.9,
        question_median_tokens=question.median_tokens,
        question_log_sd=question.log_sd,
        max_prompt_tokens=8192,
        block_tokens=512,
        source=(
            "lengths and prompts: ServeGen's DeepSeek-R1 histograms (73 clients, about 1.38 M served requests, bins "
            "of 16 tokens, not a training run; prompts as one lognormal, which is rough); assumed: icc (real "
            "workloads lie between 0.06 and 0.92), persistence, batch, prompts cut at 8192, "
            "no shared prefix"
        ),
    )


def histogram(path: Path) -> tuple[FloatArray, FloatArray]:
    """Return the first token count and the weight of each bin of 16 tokens."""
    table = pl.read_csv(path)
    return table["bin_start_tokens"].to_numpy().astype(np.float64), table["weight"].to_numpy()


PRESETS: Mapping[str, Fit] = {
    "gsm8k_ppo": fit_gsm8k_ppo,
    "gsm8k_grpo": fit_gsm8k_grpo,
    "deepcoder_16k": fit_deepcoder,
    "dapo_math": fit_dapo,
    "long_reasoning": fit_long_reasoning,
}


def to_yaml(params: Synthetic) -> str:
    """Return a preset as the text of its file in conf/trace/."""
    values = asdict(params) | {"lengths": [asdict(component) for component in params.lengths]}
    ordered = {field.name: values[field.name] for field in fields(Synthetic)}
    head = {"_target_": f"{Synthetic.__module__}.{Synthetic.__qualname__}", "_convert_": "all"}
    body = yaml.safe_dump(head | ordered, sort_keys=False, width=110, allow_unicode=True)
    return (
        f"# Written by scripts/fit_presets.py; the parameters are described in traces/synthetic.py.\n{body}"
    )


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def main(arguments: list[str] | None = None) -> int:
    """Fit every preset; print them, or write one file each."""
    parser = argparse.ArgumentParser(description="Fit the workload presets to public data.")
    parser.add_argument("data", type=Path, help="folder with one folder a data set")
    parser.add_argument("--out", type=Path, help="folder to write PRESET.yaml into")
    options = parser.parse_args(arguments)
    try:
        texts = {name: to_yaml(fit(options.data)) for name, fit in PRESETS.items()}
    except (InputError, FileNotFoundError) as error:
        print(f"fit_presets: {error}", file=sys.stderr)
        return 2
    for name, text in texts.items():
        if options.out is None:
            print(f"--- {name}\n{text}")
        else:
            (options.out / f"{name}.yaml").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
