"""Trace and stage files: what is written comes back, and what breaks a rule is refused in one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless.traces.errors import InputError
from rlhfless.traces.files import (
    SUFFIXES,
    StageTimes,
    read_stage_times,
    read_trace,
    write_stage_times,
    write_trace,
)
from rlhfless.traces.trace import PrefixBlocks, RunLog, Trace

ROWS = [
    {"step": 0, "epoch": 0, "prompt_id": "a", "sample": 0, "prompt_tokens": 5, "response_tokens": 7},
    {"step": 0, "epoch": 0, "prompt_id": "a", "sample": 1, "prompt_tokens": 5, "response_tokens": 9},
    {"step": 1, "epoch": 0, "prompt_id": "b", "sample": 0, "prompt_tokens": 6, "response_tokens": 3},
]


def example(rows: int = 6, *, optional: bool = True) -> Trace:
    counts = np.arange(rows) % 3
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return Trace(
        name="run, with a comma",
        step=np.arange(rows) // 2,
        epoch=np.arange(rows) // 4,
        prompt=np.arange(rows) // 2 % 2,
        prompt_ids=("p,0", 'p"1'),
        sample=np.arange(rows) % 2,
        prompt_tokens=np.arange(rows) // 2 + 10,
        response_tokens=np.arange(rows) * 3 + 1,
        answer_tokens=np.arange(rows) + 1 if optional else None,
        prefix_blocks=PrefixBlocks(offsets, np.arange(offsets[-1]) * 7 - 3) if optional else None,
        truncated=np.arange(rows) % 2 == 1 if optional else None,
        algorithm="ppo",
        model="Modell-ü",
        source="made up",
        max_response_tokens=1000,
        block_tokens=16 if optional else None,
        reconstructed=True,
    )


def assert_same(one: Trace, other: Trace) -> None:
    for field in dataclasses.fields(Trace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif isinstance(a, PrefixBlocks):
            np.testing.assert_array_equal(a.offsets, b.offsets)
            np.testing.assert_array_equal(a.values, b.values)
        else:
            assert a == b, field.name


def write_text(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.name.endswith(".csv"):
        header = list(rows[0])
        lines = [",".join(header)] + [",".join(str(row.get(name, "")) for name in header) for row in rows]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message.replace(str(path), "FILE")


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_trace_comes_back(tmp_path: Path, suffix: str, optional: bool) -> None:
    path = tmp_path / f"run{suffix}"
    write_trace(example(optional=optional), path)
    assert_same(read_trace(path), example(optional=optional))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_same_trace_same_bytes_and_nothing_left_over(tmp_path: Path, suffix: str) -> None:
    contents = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_trace(example(), tmp_path / folder / f"run{suffix}")
        contents.append({file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()})
    assert contents[0] == contents[1]
    assert len(contents[0]) == (1 if suffix == ".parquet" else 2)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trace_comes_back_in_step_order(tmp_path: Path, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    big = st.integers(1, 2**62)
    ids = data.draw(
        st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=n, max_size=n, unique=True)
    )
    steps = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    trace = Trace(
        name="any",
        step=np.sort(np.array(steps)),
        epoch=np.zeros(n, dtype=np.int64),
        prompt=np.arange(n),
        prompt_ids=tuple(ids),
        sample=np.zeros(n, dtype=np.int64),
        prompt_tokens=np.array(data.draw(st.lists(big, min_size=n, max_size=n))),
        response_tokens=np.array(data.draw(st.lists(big, min_size=n, max_size=n))),
    )
    shuffled = trace.select(np.random.default_rng(n).permutation(n))
    for suffix in (".parquet", ".csv", ".jsonl"):
        path = tmp_path / f"any{suffix}"
        write_trace(shuffled, path)
        back = read_trace(path)
        assert (np.diff(back.step) >= 0).all()
        key = {
            (int(s), trace.prompt_ids[p], int(x), int(y))
            for s, p, x, y in zip(
                trace.step, trace.prompt, trace.prompt_tokens, trace.response_tokens, strict=True
            )
        }
        assert key == {
            (int(s), back.prompt_ids[p], int(x), int(y))
            for s, p, x, y in zip(
                back.step, back.prompt, back.prompt_tokens, back.response_tokens, strict=True
            )
        }


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_what_stands_beside_the_rows_is_optional(tmp_path: Path, suffix: str) -> None:
    trace = read_trace(write_text(tmp_path / f"bare{suffix}", ROWS))
    assert trace.name == "bare"
    assert trace.max_response_tokens is None
    assert not trace.reconstructed
    assert trace.prompt_ids == ("a", "b")
    assert trace.response_tokens.tolist() == [7, 9, 3]


def test_missing_empty_and_unknown_files_are_refused(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        assert refusal(tmp_path / f"none{suffix}") == "FILE: no such file"
        empty = tmp_path / f"empty{suffix}"
        empty.touch()
        assert refusal(empty) == "FILE: the file is empty"
    assert "unknown suffix" in refusal(tmp_path / "run.xlsx")
    headed = tmp_path / "headed.csv"
    headed.write_text(",".join(ROWS[0]) + "\n")
    assert refusal(headed) == "FILE: the table has no rows"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_tokens": -4}, "FILE: row 3: response_tokens is -4, must be at least 1"),
        ({"step": -1}, "FILE: row 3: step is -1, must be at least 0"),
        ({"prompt_tokens": 0}, "FILE: row 3: prompt_tokens is 0, must be at least 1"),
        (
            {"step": 0, "prompt_id": "a", "sample": 7, "prompt_tokens": 99},
            "FILE: rows 2 and 3: prompt a has 5 and 99 prompt_tokens in one step",
        ),
        (
            {"step": 0, "prompt_id": "a", "sample": 1},
            "FILE: rows 2 and 3: two rows for one response (step 0, prompt a, sample 1)",
        ),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(
    tmp_path: Path, suffix: str, change: dict[str, object], message: str
) -> None:
    rows = [*ROWS[:2], {**ROWS[2], **change}]
    path = tmp_path / f"bad{suffix}"
    if suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    else:
        write_text(path, rows)
    assert refusal(path) == message


@pytest.mark.parametrize("name", list(ROWS[0]))
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_missing_column_is_named(tmp_path: Path, suffix: str, name: str) -> None:
    rows = [{key: value for key, value in row.items() if key != name} for row in ROWS]
    path = tmp_path / f"lacking{suffix}"
    if suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    else:
        write_text(path, rows)
    assert f"column {name} is missing" in refusal(path)


@pytest.mark.parametrize("value", ["seven", 7.5, "7", True])
def test_a_length_that_is_no_integer_is_refused(tmp_path: Path, value: object) -> None:
    rows = [*ROWS[:2], {**ROWS[2], "response_tokens": value}]
    message = refusal(write_text(tmp_path / "wrong.jsonl", rows))
    rule = "which is not of the type of the lines before" if value is True else "must be an integer"
    where = "line 3" if value is True else "row 3"
    assert message == f"FILE: {where}: response_tokens is {json.dumps(value)}, {rule}"
    if value != "7":
        message = refusal(write_text(tmp_path / "wrong.csv", rows))
        assert message == f"FILE: row 3: response_tokens is {str(value)!r}, must be an integer"


def test_types_of_a_parquet_file_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "typed.parquet"
    pl.DataFrame(ROWS).with_columns(pl.col("response_tokens").cast(pl.Float64)).write_parquet(path)
    assert refusal(path) == "FILE: column response_tokens has type Float64, must be an integer"
    pl.DataFrame(ROWS).with_columns(prompt_id=pl.int_range(3)).write_parquet(path)
    assert refusal(path) == "FILE: column prompt_id has type Int64, must be a string"
    narrow = pl.DataFrame(ROWS).with_columns(pl.col("response_tokens", "step").cast(pl.UInt16))
    narrow.write_parquet(path)
    assert read_trace(path).response_tokens.dtype == np.int64


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_missing_value_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"null{suffix}"
    rows = [ROWS[0], {**ROWS[1], "prompt_tokens": None}, ROWS[2]]
    if suffix == ".parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif suffix == ".csv":
        write_text(path, [ROWS[0], {**ROWS[1], "prompt_tokens": ""}, ROWS[2]])
    else:
        write_text(path, rows)
    assert refusal(path) == "FILE: row 2: prompt_tokens is missing"


@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl.gz"])
@pytest.mark.parametrize("left", [0.3, 0.9])
def test_a_gzip_that_ends_early_is_refused(tmp_path: Path, suffix: str, left: float) -> None:
    path = tmp_path / f"run{suffix}"
    write_trace(example(200), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    assert refusal(path) == "FILE: the gzip file ends early"
    path.write_bytes(b"step,epoch\n")
    assert "the gzip file is damaged" in refusal(path)


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    write_trace(example(200), path)
    path.write_bytes(path.read_bytes()[:-40])
    assert "not a whole Parquet file" in refusal(path)


def test_a_json_line_cut_in_half_is_named(tmp_path: Path) -> None:
    path = write_text(tmp_path / "run.jsonl", ROWS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], lines[2]]) + "\n")
    assert refusal(path).startswith("FILE: line 2 is not JSON")
    path.write_text("\n".join([lines[0], "[1, 2]", lines[2]]) + "\n")
    assert refusal(path) == "FILE: line 2 is not a JSON object"


def test_a_csv_row_of_another_width_is_refused(tmp_path: Path) -> None:
    path = write_text(tmp_path / "run.csv", ROWS)
    text = path.read_text()
    path.write_text(text + "1,0,b,1,6\n")
    assert refusal(path) == "FILE: row 4: response_tokens is missing"
    path.write_text(text + "1,0,b,1,6,3,9\n")
    assert "more fields" in refusal(path)
    path.write_text(text.replace("epoch", "step", 1))
    assert refusal(path) == "FILE: column step stands twice"


def test_prefix_blocks_must_be_lists_of_integers(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    header = ",".join([*ROWS[0], "prefix_blocks"])
    path.write_text(f'{header}\n0,0,a,0,5,7,"[1,2]"\n0,0,a,1,5,7,"[1,x]"\n')
    assert refusal(path) == "FILE: row 2: prefix_blocks is '[1,x]', must be a list of integers"
    rows = [{**row, "prefix_blocks": [1, "x"] if i == 1 else [1]} for i, row in enumerate(ROWS)]
    assert "row 2: prefix_blocks" in refusal(write_text(tmp_path / "run.jsonl", rows))
    rows = [{**row, "prefix_blocks": [1]} for row in ROWS]
    assert "prefix_blocks needs block_tokens" in refusal(write_text(tmp_path / "run.jsonl", rows))


def test_the_sidecar_is_checked(tmp_path: Path) -> None:
    path = write_text(tmp_path / "run.csv", ROWS)
    sidecar = tmp_path / "run.csv.meta.json"
    sidecar.write_text('{"max_response_tokens": 8}')
    assert refusal(path) == "FILE: row 2: response_tokens is 9, above max_response_tokens 8"
    for text, part in (
        ('{"max_response_tokens": "8"}', "max_response_tokens"),
        ('{"colour": 1}', "colour"),
        ('{"name": "x"', "Invalid JSON"),
    ):
        sidecar.write_text(text)
        with pytest.raises(InputError, match=r"run\.csv\.meta\.json: .*") as caught:
            read_trace(path)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_refused_write_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    bad = dataclasses.replace(example(), response_tokens=np.zeros(6, dtype=np.int64))
    for suffix in SUFFIXES:
        path = tmp_path / f"run{suffix}"
        with pytest.raises(InputError, match="response_tokens is 0"):
            write_trace(bad, path)
    with pytest.raises(InputError, match="unknown suffix"):
        write_trace(example(), tmp_path / "run.txt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(example(), tmp_path / "no" / "such" / "folder.csv")


def stages() -> StageTimes:
    return StageTimes(
        step=np.array([1, 1, 2]),
        stage=("generation", "update_actor", "generation"),
        seconds=np.array([1.5, 2.25, 0.125]),
        gpus=np.array([8, 8, 4]),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_written_stage_times_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stages{suffix}"
    write_stage_times(stages(), path)
    back = read_stage_times(path)
    assert back.stage == stages().stage
    for name in ("step", "seconds", "gpus"):
        np.testing.assert_array_equal(getattr(back, name), getattr(stages(), name))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,generation,-1,8", "row 1: seconds is -1.0, must be at least 0"),
        ("1,generation,nan,8", "row 1: seconds is nan, must be at least 0"),
        ("1,generation,1,8\n1,generation,2,8", "row 2: stage generation of step 1 stands twice"),
        ("1,generation,soon,8", "row 1: seconds is 'soon', must be a number"),
        ("1,generation,2,", "row 1: gpus is missing"),
    ],
)
def test_stage_times_that_break_a_rule_are_refused(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "stages.csv"
    path.write_text(f"step,stage,seconds,gpus\n{rows}\n")
    with pytest.raises(InputError) as caught:
        read_stage_times(path)
    assert str(caught.value) == f"{path}: {message}"


def test_stage_times_of_a_log_leave_out_what_a_step_lacks() -> None:
    nothing = np.full(2, np.nan)
    log = RunLog(
        name="log",
        source="",
        step=np.array([4, 5]),
        epoch=np.array([0, 0]),
        response_mean=nothing,
        response_max=nothing,
        response_min=nothing,
        clip_ratio=nothing,
        prompt_mean=nothing,
        prompt_max=nothing,
        prompt_min=nothing,
        total_tokens=nothing,
        stages={"generation": np.array([3.0, 4.0]), "testing": np.array([np.nan, 9.0])},
        gpus=2,
        responses=None,
    )
    times = StageTimes.of_log(log, gpus=2).checked("log")
    assert list(zip(times.step.tolist(), times.stage, times.seconds.tolist(), strict=True)) == [
        (4, "generation", 3.0),
        (5, "generation", 4.0),
        (5, "testing", 9.0),
    ]


def test_gzip_content_is_the_plain_content(tmp_path: Path) -> None:
    write_trace(example(), tmp_path / "a.csv")
    write_trace(example(), tmp_path / "a.csv.gz")
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == (tmp_path / "a.csv").read_bytes()
