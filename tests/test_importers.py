"""Rollout dumps and per-response tables become traces; what they do not state is counted as documented."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlhfless.traces.errors import InputError
from rlhfless.traces.files import read_trace, write_trace
from rlhfless.traces.polytrace import read_polytrace
from rlhfless.traces.verl_rollouts import CHARACTERS_PER_TOKEN, read_verl_rollouts

QUESTIONS = ("How many apples?", "How many pears are there?")


def rollouts(step: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"input": question, "output": "x" * (10 * (sample + 1)), "step": step, "score": 1.0, **more}
        for question in QUESTIONS
        for sample in range(2)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_verl_rollouts(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_dump_becomes_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "dump.jsonl", rollouts(3) + rollouts(5))
    trace = read_verl_rollouts(path, max_response_tokens=500, model="m")
    assert trace.step.tolist() == [3] * 4 + [5] * 4
    assert trace.epoch.tolist() == [0] * 4 + [1] * 4
    assert trace.sample.tolist() == [0, 1] * 4
    assert trace.prompt.tolist() == [0, 0, 1, 1] * 2
    want = [max(math.ceil(len(row["output"]) / CHARACTERS_PER_TOKEN), 1) for row in rollouts(3)]
    assert trace.response_tokens.tolist() == want * 2
    assert "approximation" in trace.source
    assert not trace.reconstructed
    write_trace(trace, tmp_path / "trace.parquet")
    assert len(read_trace(tmp_path / "trace.parquet")) == 8


def test_a_folder_of_steps_is_one_dump(tmp_path: Path) -> None:
    for step in (2, 10):
        rows = [{k: v for k, v in row.items() if k != "step"} for row in rollouts(step)]
        write(tmp_path / f"{step}.jsonl{'.gz' if step == 10 else ''}", rows)
    trace = read_verl_rollouts(tmp_path)
    assert trace.steps.tolist() == [2, 10]
    assert trace.epoch.tolist() == [0] * 4 + [1] * 4


def test_a_prompt_keeps_its_id_whatever_else_the_file_holds(tmp_path: Path) -> None:
    one = read_verl_rollouts(write(tmp_path / "1.jsonl", rollouts(1)))
    other = read_verl_rollouts(write(tmp_path / "2.jsonl", rollouts(2)[::-1]))
    assert set(one.prompt_ids) == set(other.prompt_ids)
    assert len(set(one.prompt_ids)) == 2


def test_epochs_count_the_steps_in_which_a_prompt_occurred(tmp_path: Path) -> None:
    rows = [{"prompt": p, "response": "ok", "step": s} for s, p in [(7, "a"), (1, "b"), (9, "b"), (9, "c")]]
    trace = read_verl_rollouts(write(tmp_path / "dump.jsonl", rows))
    seen = {
        (int(s), trace.prompt_ids[p]): int(e)
        for s, p, e in zip(trace.step, trace.prompt, trace.epoch, strict=True)
    }
    a, b, c = (
        read_verl_rollouts(write(tmp_path / "1.jsonl", [row])).prompt_ids[0] for row in rows[:2] + rows[3:]
    )
    assert seen == {(7, a): 0, (1, b): 0, (9, b): 1, (9, c): 0}


def test_counts_in_the_dump_come_first(tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", rollouts(1, prompt_tokens=17, response_length=33))
    trace = read_verl_rollouts(path, max_response_tokens=33)
    assert set(trace.prompt_tokens) == {17}
    assert set(trace.response_tokens) == {33}
    assert trace.truncated is not None
    assert trace.truncated.all()
    assert trace.source.endswith("columns of the dump")
    assert "response_tokens is 33, above max_response_tokens 20" in refusal(path, max_response_tokens=20)
    bad = write(tmp_path / "2.jsonl", rollouts(1)[:1] + rollouts(1, response_length="many")[1:2])
    assert "row 1: response_length is missing" in refusal(bad)
    bad = write(tmp_path / "3.jsonl", rollouts(1, response_length=1.5))
    assert "row 1: response_length is 1.5, must be an integer" in refusal(bad)


def test_an_empty_response_still_has_its_end_token(tmp_path: Path) -> None:
    rows = [{"input": "a", "output": "", "step": 1}, {"input": "b", "output": "four", "step": 1}]
    trace = read_verl_rollouts(write(tmp_path / "1.jsonl", rows), characters_per_token=2.0)
    assert trace.response_tokens.tolist() == [1, 2]


def test_a_tokenizer_counts_and_its_absence_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "1.jsonl", rollouts(1))
    file = tmp_path / "tokenizer.json"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "needs the package tokenizers" in refusal(path, tokenizer=file)

    class Words:
        @staticmethod
        def from_file(name: str) -> Words:
            if Path(name).read_text() != "{}":
                raise Exception("bad\nfile")
            return Words()

        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
            assert not add_special_tokens
            return [SimpleNamespace(ids=text.split()) for text in texts]

    fake = ModuleType("tokenizers")
    fake.Tokenizer = Words  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", fake)
    assert "no such file" in refusal(path, tokenizer=file)
    file.write_text("{")
    assert "not a tokenizer file" in refusal(path, tokenizer=file)
    file.write_text("{}")
    trace = read_verl_rollouts(path, tokenizer=file)
    assert trace.prompt_tokens.tolist() == [3, 3, 5, 5]
    assert trace.source.endswith("tokenizer tokenizer.json")


def test_dumps_that_lack_something_are_refused(tmp_path: Path) -> None:
    rows = rollouts(1)
    assert "no such file" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no .jsonl" in refusal(tmp_path / "empty")
    for name in ("input", "output"):
        lacking = [{k: v for k, v in row.items() if k != name} for row in rows]
        assert f"column {name}" in refusal(write(tmp_path / "lacking.jsonl", lacking))
    stepless = [{k: v for k, v in row.items() if k != "step"} for row in rows]
    assert "column step is missing" in refusal(write(tmp_path / "dump.jsonl", stepless))
    path = write(tmp_path / "cut.jsonl", rows)
    path.write_bytes(path.read_bytes()[:-20])
    assert "line 4 is not JSON" in refusal(path)
    packed = write(tmp_path / "early.jsonl.gz", rows)
    packed.write_bytes(packed.read_bytes()[:-12])
    assert "the gzip file ends early" in refusal(packed)
    assert "row 2: output must be a string" in refusal(
        write(tmp_path / "null.jsonl", [rows[0], {**rows[1], "output": None}])
    )
    assert "characters_per_token is 0" in refusal(write(tmp_path / "1.jsonl", rows), characters_per_token=0)


def test_characters_per_token_are_those_of_gsm8k_questions(data_dir: Path) -> None:
    texts = pl.read_ndjson(gzip.decompress((data_dir / "gsm8k/train.jsonl.gz").read_bytes()))
    counts = pl.read_csv(data_dir / "gsm8k/prompt_lengths.csv").filter(pl.col("split") == "train")
    characters = texts["question"].str.len_chars().sum()
    assert characters / counts["question_tokens"].sum() == pytest.approx(CHARACTERS_PER_TOKEN, abs=0.01)
    answers = texts["answer"].str.len_chars().sum() / counts["reference_answer_tokens"].sum()
    assert answers == pytest.approx(2.36, abs=0.01)


def table(path: Path, **changes: Any) -> Path:
    rows = [
        {
            "workload": workload,
            "run": run,
            "step": step,
            "rank": rank,
            "local_index": 0,
            "prompt_len": 50 + rank,
            "sample": sample,
            "resp_len": 100 * (rank + 1) + sample,
            **changes,
        }
        for workload, run in (("math", 0), ("math", 1), ("code", 0))
        for step in (4, 2)
        for rank in range(2)
        for sample in range(3)
    ]
    frame = pl.DataFrame(rows)
    {".csv": frame.write_csv, ".parquet": frame.write_parquet, ".jsonl": frame.write_ndjson}[path.suffix](
        path
    )
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_a_polytrace_table_becomes_a_trace(tmp_path: Path, suffix: str) -> None:
    trace = read_polytrace(table(tmp_path / f"t{suffix}"), "math", 1, max_response_tokens=202)
    assert trace.steps.tolist() == [2, 4]
    assert len(trace) == 12
    assert len(trace.prompt_ids) == 4
    assert trace.prompt_ids[trace.prompt[0]] == "math-1-2-0-0"
    assert trace.response_tokens.tolist() == [100, 101, 102, 200, 201, 202] * 2
    assert trace.truncated is not None
    assert trace.truncated.sum() == 2


def test_a_polytrace_table_of_several_needs_the_choice(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    for options, message in (
        ((), "several values of workload, choose one of: code, math"),
        (("math",), "several values of run, choose one of: 0, 1"),
        (("chess",), "no rows have workload chess; the table has: code, math"),
        (("code", 3), "no rows have run 3; the table has: 0"),
    ):
        with pytest.raises(InputError) as caught:
            read_polytrace(path, *options)
        assert message in str(caught.value)
    assert len(read_polytrace(path, "code")) == 12


def test_a_polytrace_table_that_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"resp_len": -1}, "response_tokens is -1, must be at least 1"),
        ({"sample": 0}, "two rows for one response"),
        ({"step": 1.5}, "row 1: step is '1.5', must be an integer"),
    ):
        with pytest.raises(InputError) as caught:
            read_polytrace(table(tmp_path / "t.csv", **change), "code")
        assert message in str(caught.value)
    pl.read_csv(table(tmp_path / "t.csv")).drop("rank").write_csv(tmp_path / "u.csv")
    with pytest.raises(InputError, match="column rank is missing"):
        read_polytrace(tmp_path / "u.csv", "code")


def test_published_polytrace_lengths_are_read(data_dir: Path) -> None:
    path = data_dir / "polytrace_lengths/single_turn_lengths.parquet"
    trace = read_polytrace(path, "deepcoder_14b_code_16k", max_response_tokens=16_000)
    assert len(trace) == 640
    assert len(trace.prompt_ids) == 80
    assert trace.truncated is not None
    assert trace.truncated.mean() == pytest.approx(0.15)
    assert trace.response_tokens.mean() == pytest.approx(9382.475)
    assert np.unique(trace.sample).tolist() == list(range(8))
