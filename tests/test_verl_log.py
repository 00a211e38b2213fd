"""verl console logs: what a log states is read, and a log that lost part of itself is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless.traces.errors import InputError
from rlhfless.traces.verl_log import read_verl_log

PREFIX = "\x1b[36m(TaskRunner pid=4711)\x1b[0m "
STEPS = 8
RESPONSES = 640
GPUS = 4


def values_of(step: int) -> dict[str, float]:
    """Return the metrics of one step as a run with 640 responses on 4 GPUs would print them."""
    mean, prompt_mean, seconds = 200.0 + step, 90.0, 100.0 + step
    total = RESPONSES * (mean + prompt_mean)
    values = {
        "global_seqlen/mean": total / GPUS,
        "actor/entropy": 0.3,
        "training/epoch": float(step // 4),
        "critic/score/mean": 0.5,
        "response_length/mean": mean,
        "response_length/max": 1024.0,
        "response_length/min": 12.0,
        "response_length/clip_ratio": 0.025,
        "prompt_length/mean": prompt_mean,
        "prompt_length/max": 300.0,
        "prompt_length/min": 40.0,
        "timing_s/gen": 40.0 + step,
        "timing_s/old_log_prob": 10.0,
        "timing_s/update_actor": 30.0,
        "timing_s/step": seconds,
        "timing_per_token_ms/gen": 0.1,
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds / GPUS,
    }
    if step % 5 == 0:
        before = list(values).index("timing_s/step")
        items = list(values.items())
        return dict([*items[:before], ("timing_s/testing", 20.0), *items[before:]])
    return values


def line_of(step: int, values: dict[str, float] | None = None) -> str:
    values = values_of(step) if values is None else values
    return f"{PREFIX}step:{step} - " + " - ".join(f"{key}:{value:.3f}" for key, value in values.items())


def log_lines() -> list[str]:
    validation = f"{PREFIX}step:0 - val-core/gsm8k/reward/mean@1:0.221 - val-aux/gsm8k/mean@1:0.100"
    return [validation, *(line_of(step) for step in range(1, STEPS + 1))]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_verl_log(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_lengths_stages_and_sizes_are_read(tmp_path: Path) -> None:
    log = read_verl_log(write(tmp_path / "run.log", log_lines()))
    assert log.name == "run"
    assert log.step.tolist() == list(range(1, STEPS + 1))
    assert log.epoch.tolist() == [step // 4 for step in range(1, STEPS + 1)]
    np.testing.assert_allclose(log.response_mean, 200.0 + log.step)
    np.testing.assert_allclose(log.stages["generation"], 40.0 + log.step)
    np.testing.assert_allclose(log.clip_ratio, 0.025)
    assert (log.gpus, log.responses) == (GPUS, RESPONSES)


def test_a_stage_that_a_step_lacks_is_nan(tmp_path: Path) -> None:
    lines = log_lines()
    values = values_of(3)
    del values["timing_s/update_actor"]  # the critic warms up
    lines[3] = line_of(3, values)
    log = read_verl_log(write(tmp_path / "run.log", lines))
    assert np.isnan(log.stages["update_actor"]).tolist() == [step == 3 for step in log.step]
    assert np.isnan(log.stages["testing"]).tolist() == [step != 5 for step in log.step]


def test_dress_and_packing_of_a_log_do_not_matter(tmp_path: Path) -> None:
    plain = read_verl_log(write(tmp_path / "plain.log", log_lines()))
    bare = [line.replace(PREFIX, "") for line in log_lines()]
    old = [line.replace("TaskRunner", "main_task").replace("timing_s/", "timing/") for line in log_lines()]
    on_host = [line.replace("pid=4711", "pid=4711, ip=10.0.0.2") for line in log_lines()]
    with_bar = [f"Training:  3%|▎ | 1/30 [00:01<00:30]\r{line}\r" for line in log_lines()]
    noise = [part for line in log_lines() for part in (line, "INFO: step done", "let's go step by step:")]
    for name, lines in {"bare": bare, "old": old, "host": on_host, "bar": with_bar, "noise": noise}.items():
        log = read_verl_log(write(tmp_path / f"{name}.log", lines))
        assert log.stages.keys() == plain.stages.keys(), name
        for stage, seconds in plain.stages.items():
            np.testing.assert_array_equal(log.stages[stage], seconds, err_msg=name)
    packed = tmp_path / "plain.log.gz"
    packed.write_bytes(gzip.compress((tmp_path / "plain.log").read_bytes()))
    np.testing.assert_array_equal(read_verl_log(packed).response_mean, plain.response_mean)


def test_old_names_of_stages_become_the_toolkits(tmp_path: Path) -> None:
    text = "step:1 - response_length/mean:5.0 - response_length/max:9.0 - response_length/min:1.0"
    text += "".join(
        f" - timing/{name}:1.000" for name in ("gen", "ref", "values", "update_critic", "reshard")
    )
    log = read_verl_log(write(tmp_path / "old.log", [text]))
    assert list(log.stages) == ["generation", "reference", "value", "update_critic", "reshard"]
    assert log.epoch.tolist() == [-1]
    assert (log.gpus, log.responses) == (None, None)
    assert np.isnan(log.clip_ratio).all()


def test_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    def repr_line(step: int) -> str:
        parts = [f"{key}:np.float64({value!r})" for key, value in values_of(step).items()]
        return f"step:{step} - " + " - ".join([*parts[:-1], parts[-1].replace("float64", "float32")])

    plain = read_verl_log(write(tmp_path / "plain.log", log_lines()))
    log = read_verl_log(write(tmp_path / "numpy.log", [repr_line(step) for step in range(1, STEPS + 1)]))
    np.testing.assert_allclose(log.response_mean, plain.response_mean)
    assert log.gpus == GPUS


def test_a_line_cut_behind_a_key_that_only_it_has_is_refused(tmp_path: Path) -> None:
    lines = [line for line in log_lines() if "timing_s/testing" not in line or "step:5 " in line]
    cut = next(i for i, line in enumerate(lines) if "timing_s/testing" in line)
    lines[cut] = lines[cut].split(" - timing_s/step")[0]
    assert refusal(write(tmp_path / "cut.log", lines)) == (
        f"line {cut + 1}: step 5: the line was cut after timing_s/testing; other steps go on with timing_s/step"
    )


@given(step=st.integers(1, STEPS), data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_training_line_cut_anywhere_is_refused_with_its_place(
    tmp_path: Path, step: int, data: st.DataObject
) -> None:
    lines = log_lines()
    whole = lines[step]
    kept = data.draw(st.integers(len(PREFIX) + len("step:1"), len(whole) - 1))
    lines[step] = whole[:kept]
    message = refusal(write(tmp_path / "cut.log", lines))
    assert message.startswith(f"line {step + 1}: step {step}: ")


def test_a_line_that_ends_between_two_entries_names_what_is_missing(tmp_path: Path) -> None:
    lines = log_lines()
    whole = lines[2]
    for last, reason in (
        ("timing_s/old_log_prob", "other steps go on with timing_s/update_actor"),
        ("perf/time_per_step", "other steps go on with perf/throughput"),
        ("response_length/mean", "response_length/max is missing"),
        ("actor/entropy", "response_length/mean is missing"),
        ("response_length/min", "no stage has a time"),
    ):
        end = whole.index(" - ", whole.index(last))
        message = refusal(write(tmp_path / "cut.log", [*lines[:2], whole[:end], *lines[3:]]))
        assert message.startswith("line 3: step 2: ")
        assert reason in message


def test_one_of_two_lines_cut_is_found(tmp_path: Path) -> None:
    whole = line_of(2)
    cut = whole[: whole.index(" - perf/throughput")]
    assert "line 2: step 2" in refusal(write(tmp_path / "two.log", [line_of(1), cut]))


def test_a_validation_line_cut_in_half_is_refused(tmp_path: Path) -> None:
    lines = log_lines()
    lines[0] = lines[0][: lines[0].index("-aux") + 4]
    assert refusal(write(tmp_path / "cut.log", lines)).startswith("line 1: step 0: 'val-aux' has no value")


def test_a_line_that_lost_its_beginning_is_refused(tmp_path: Path) -> None:
    lines = log_lines()
    lines[4] = lines[4][lines[4].index("ponse_length/max") :]
    assert "line 5: training values without their step:N" in refusal(write(tmp_path / "cut.log", lines))


def test_two_lines_run_together_are_refused(tmp_path: Path) -> None:
    lines = log_lines()
    lines[3:5] = [lines[3][:300] + lines[4]]
    assert refusal(write(tmp_path / "glued.log", lines)).startswith("line 4: step 3: ")


def test_a_step_logged_twice_is_refused(tmp_path: Path) -> None:
    lines = [*log_lines(), line_of(2)]
    assert (
        refusal(write(tmp_path / "twice.log", lines)) == f"lines 3 and {len(lines)}: step 2 is logged twice"
    )
    # A validation-only line of the same step is no second step.
    assert (
        len(read_verl_log(write(tmp_path / "val.log", [*log_lines(), "step:8 - val-core/x:0.1"])).step) == 8
    )


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    lines = log_lines()
    lines[1] = lines[1].replace("timing_s/gen:41.000", "timing_s/gen:fast")
    assert "'timing_s/gen:fast' is not key:number" in refusal(write(tmp_path / "bad.log", lines))


def test_files_without_a_step_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.log") == "no such file"
    assert refusal(write(tmp_path / "empty.log", [])) == "the file is empty"
    assert "no training step" in refusal(write(tmp_path / "other.log", ["hello", log_lines()[0]]))
    packed = tmp_path / "early.log.gz"
    packed.write_bytes(gzip.compress("\n".join(log_lines()).encode())[:-30])
    assert refusal(packed) == "the gzip file ends early"


def test_sizes_are_unknown_where_the_steps_disagree(tmp_path: Path) -> None:
    lines = log_lines()
    values = values_of(4)
    values["perf/throughput"] /= 2
    values["perf/total_num_tokens"] *= 1.5
    lines[4] = line_of(4, values)
    log = read_verl_log(write(tmp_path / "run.log", lines))
    assert (log.gpus, log.responses) == (None, None)


@pytest.mark.parametrize(
    ("name", "steps", "gpus", "responses"),
    [
        ("verl_gpg_qwen2_7b/qwen2_7b_gsm8k_math_fsdp", 210, 8, 5120),
        ("verl_gpg_qwen2_7b/qwen2_7b_gsm8k_megatron", 105, 8, 5120),
        ("verl_getting_started_ppo/qwen25_05b_gsm8k_ppo", 61, None, None),
    ],
)
def test_real_logs_equal_their_published_tables(
    data_dir: Path, name: str, steps: int, gpus: int | None, responses: int | None
) -> None:
    log = read_verl_log(data_dir / f"{name}.log.gz")
    table = pl.read_csv(data_dir / f"{name}_steps.csv")
    assert len(log.step) == steps
    assert (log.gpus, log.responses) == (gpus, responses)
    np.testing.assert_array_equal(log.step, table["step"].to_numpy())
    names = {"generation": "gen", "reference": "ref", "value": "values"}
    columns = {f"t_{names.get(stage, stage)}": seconds for stage, seconds in log.stages.items()}
    columns |= {"resp_mean": log.response_mean, "resp_max": log.response_max, "prompt_min": log.prompt_min}
    for column, values in columns.items():
        np.testing.assert_array_equal(values, table[column].cast(pl.Float64).fill_null(np.nan).to_numpy())
    assert {column for column in table.columns if column.startswith("t_")} == {
        column for column in columns if column.startswith("t_")
    }


def test_real_lines_cut_anywhere_are_refused(data_dir: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in (
        "verl_gpg_qwen2_7b/qwen2_7b_gsm8k_megatron",
        "verl_getting_started_ppo/qwen25_05b_gsm8k_ppo",
    ):
        lines = gzip.decompress((data_dir / f"{name}.log.gz").read_bytes()).decode().splitlines()
        training = [i for i, line in enumerate(lines) if "response_length/mean" in line]
        for i in rng.choice(training, 60):
            start = lines[i].index("step:") + 8
            kept = int(rng.integers(start, len(lines[i])))
            cut = [*lines[:i], lines[i][:kept], *lines[i + 1 :]]
            assert f"line {i + 1}: step" in refusal(write(tmp_path / "cut.log", cut))
