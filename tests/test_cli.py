"""The command line: what it writes, and how it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless.scripts import cli
from rlhfless.traces.files import write_trace
from rlhfless.traces.synthetic import Synthetic, generate
from rlhfless.traces.trace import Trace

SMALL = ["trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=2"]

STEP = (
    "step:{step} - response_length/mean:{mean:.3f} - response_length/max:60.000 - response_length/min:4.000 - "
    "response_length/clip_ratio:0.000 - prompt_length/mean:20.000 - prompt_length/max:30.000 - "
    "prompt_length/min:10.000 - timing_s/gen:{gen:.3f} - timing_s/old_log_prob:1.000 - "
    "timing_s/update_actor:2.000 - timing_s/step:9.000"
)


def run(*arguments: str) -> None:
    """Run a verb in this process."""
    import_module(f"rlhfless.scripts.{arguments[0]}").main(list(arguments[1:]))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which a verb refuses, after checking that it is one and that the status is 2."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


@pytest.fixture
def trace() -> Trace:
    """Return a small trace of two steps."""
    return generate(
        Synthetic(
            name="small",
            prompts=8,
            prompts_per_step=4,
            responses_per_prompt=2,
            max_response_tokens=512,
            lengths=({"weight": 1.0, "median_tokens": 100.0, "log_sd": 0.5},),  # type: ignore[arg-type]
            icc=0.5,
            question_median_tokens=40.0,
            question_log_sd=0.3,
            max_prompt_tokens=256,
            epochs=1,
        ),
        seed=0,
    )


@pytest.fixture
def table(trace: Trace, tmp_path: Path) -> list[dict[str, str]]:
    """Return the trace's rows as text."""
    write_trace(trace, tmp_path / "good.csv")
    with (tmp_path / "good.csv").open() as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as CSV."""
    with path.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_log(path: Path, lines: list[str]) -> Path:
    """Write a console log of step lines."""
    text = "".join(f"\x1b[36m(TaskRunner pid=7)\x1b[0m {line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def log_lines(steps: int = 40) -> list[str]:
    """Return step lines with slowly falling lengths."""
    return [STEP.format(step=s, mean=30 - s / 10, gen=8 - s / 50) for s in range(1, steps + 1)]


def test_replay_writes_its_files_and_the_same_bytes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        run("replay", *SMALL, f"out={tmp_path / folder}")
    printed = capsys.readouterr()
    assert printed.err == ""  # no progress bar where nobody looks
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names > {"run.yaml", "summary.json", "steps.csv", "plans.jsonl", "timeline.json", "timings.json"}
    for name in names - {"timings.json", "run.yaml"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "planning" not in (tmp_path / "a" / "summary.json").read_text()
    assert json.loads((tmp_path / "a" / "timings.json").read_text())["planning_seconds_median"] > 0


def test_the_timeline_is_one_of_trace_events(tmp_path: Path) -> None:
    run("replay", *SMALL, f"out={tmp_path}")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == named
    for thread in named:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == thread)
        assert all(second[0] >= first[1] - 0.01 for first, second in pairwise(own))
    assert {event["name"] for event in complete} >= {"prefill", "decode.0", "reference", "update_actor"}


def test_recorded_plans_replay_to_the_same_steps(tmp_path: Path) -> None:
    run("replay", *SMALL, f"out={tmp_path / 'a'}")
    run("replay", *SMALL, f"plans={tmp_path / 'a' / 'plans.jsonl'}", f"out={tmp_path / 'b'}")
    for name in ("steps.csv", "timeline.json"):
        again = (tmp_path / "b" / name).read_text().replace('"recorded', '"rlhfless')  # the policy's name
        assert again == (tmp_path / "a" / name).read_text()


def test_compare_prints_a_row_a_policy_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare", *SMALL, "seeds=3", "policy=[verl,serverless_fixed,rlhfless,oracle]", f"out={tmp_path}")
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["policies"]) == ["verl", "serverless_fixed", "rlhfless", "oracle"]
    pairs = {(c["policy"], c["baseline"]) for c in summary["comparisons"]}
    assert {("rlhfless", "verl"), ("rlhfless", "serverless_fixed")} <= pairs
    for pair in summary["comparisons"]:
        assert pair["speedup"]["low"] <= pair["speedup"]["mean"] <= pair["speedup"]["high"]
    for name in summary["policies"]:
        assert f"│ {name} " in printed.out
        assert f"| {name} |" in (tmp_path / "report.md").read_text()


def test_compare_reads_a_log_and_states_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "run.log.gz", log_lines())
    run(
        "compare",
        "--log",
        str(log),
        "--gpus",
        "4",
        "--batch",
        "64",
        "--out",
        str(tmp_path / "out"),
        "seeds=2",
    )
    printed = capsys.readouterr().out
    assert "fitted on the first 10 of 40 steps" in printed
    assert "reconstructed" in printed
    calibration = json.loads((tmp_path / "out" / "summary.json").read_text())["calibration"]
    assert [row["stage"] for row in calibration] == [
        "generation",
        "old_log_prob",
        "update_actor",
        "generation, replayed",
    ]


def test_import_calibrate_and_plan_work_on_each_others_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path / "run.log", log_lines())
    about = ["--gpus", "4", "--batch", "16", "--responses-per-prompt", "2"]
    run(
        "import",
        "verl-log",
        str(log),
        str(tmp_path / "run.parquet"),
        *about,
        "--stages",
        str(tmp_path / "s.csv"),
    )
    run("calibrate", str(log), *about, "--out", str(tmp_path / "fitted.yaml"))
    fitted = yaml.safe_load((tmp_path / "fitted.yaml").read_text())
    assert fitted["kind"] == "fitted"
    run("import", "trace", str(tmp_path / "run.parquet"), str(tmp_path / "run.jsonl.gz"))
    with gzip.open(tmp_path / "run.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert sum(row["step"] == 1 for row in rows) == 32
    batch = [
        {key: value for key, value in row.items() if key != "response_tokens"}
        for row in rows
        if row["step"] == 40
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in batch))
    capsys.readouterr()
    run(
        "plan",
        f"batch={tmp_path / 'batch.jsonl'}",
        f"history={tmp_path / 'run.parquet'}",
        "profile=file",
        f"profile.file={tmp_path / 'fitted.yaml'}",
        "cluster=custom",
        "max_response_tokens=100",
    )
    plan = json.loads(capsys.readouterr().out)
    named = [tuple(response) for actor in plan["actors"] for response in actor["responses"]]
    assert sorted(named) == sorted((row["prompt_id"], row["sample"]) for row in batch)
    bound = plan["predicted"]["lower_bound"]
    assert bound["generation_seconds"] <= plan["predicted"]["generation_seconds"]


def test_a_log_line_cut_in_half_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log_lines()
    lines[20] = lines[20][: len(lines[20]) // 2]
    log = write_log(tmp_path / "cut.log", lines)
    out = tmp_path / "out"
    line = refusal(capsys, "compare", "--log", str(log), "--gpus", "4", "--batch", "64", "--out", str(out))
    assert f"{log}: line 21" in line
    assert not out.exists()


def test_a_log_whose_gzip_ends_early_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "run.log.gz", log_lines())
    log.write_bytes(log.read_bytes()[:-40])
    out = tmp_path / "out"
    line = refusal(capsys, "compare", "--log", str(log), "--gpus", "4", "--batch", "64", "--out", str(out))
    assert f"{log}: the gzip file ends early" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows[3].update(response_tokens="-5"),
            "row 4: response_tokens is -5, must be at least 1",
        ),
        (lambda rows: [row.pop("sample") for row in rows], "column sample is missing"),
        (lambda rows: rows[5].update(rows[2]), "two rows for one response"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: list[dict[str, str]], change: Any, message: str
) -> None:
    change(table)
    path = write_rows(tmp_path / "bad.csv", table)
    out = tmp_path / "out"
    for verb in (["compare"], ["replay"]):
        line = refusal(capsys, *verb, "trace=file", f"trace.path={path}", f"out={out}")
        assert f"{path}: " in line
        assert message in line
    assert message in refusal(capsys, "import", "trace", str(path), str(tmp_path / "copy.parquet"))
    assert not out.exists()
    assert not (tmp_path / "copy.parquet").exists()


def test_a_profile_with_decreasing_batches_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Path(__file__).parent.parent / "conf" / "profile" / "l40s_qwen2.5-3b_tp2.yaml"
    values = yaml.safe_load(good.read_text())
    values["decode"]["batch"][1:3] = [4, 2]
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    line = refusal(capsys, "replay", "profile=file", f"profile.file={path}", f"out={out}")
    assert f"{path}: decode: batch must increase, but 2 follows 4" in line
    line = refusal(capsys, "compare", "profile.decode.batch=[1,8,4]", f"out={out}")
    assert "decode: batch must increase, but 4 follows 8" in line
    assert not out.exists()


def test_a_plan_that_names_a_response_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("replay", *SMALL, f"out={tmp_path / 'a'}")
    plans = [json.loads(line) for line in (tmp_path / "a" / "plans.jsonl").read_text().splitlines()]
    twice = plans[1]["actors"][0]["responses"][0]
    plans[1]["actors"][0]["responses"][1] = twice
    path = tmp_path / "plans.jsonl"
    path.write_text("".join(json.dumps(plan) + "\n" for plan in plans))
    capsys.readouterr()
    out = tmp_path / "out"
    line = refusal(capsys, "replay", *SMALL, f"plans={path}", f"out={out}")
    assert f"{path}: line 2: response [{twice[0]}, {twice[1]}] is named 2 times" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        (["polcy=verl"], "no key polcy", "did you mean policy?; keys are cluster, gpu,"),
        (["lambda=1.5"], "no key lambda", "policy.scale.weight"),
        (["threshold=0.5"], "no key threshold", "did you mean policy.migration.threshold?"),
        (["+polcy=verl"], "no key polcy", "did you mean policy?"),
        (["policy=verk"], "policy verk does not exist", "did you mean verl?; policy is one of april,"),
        (["policy.migration.treshold=1"], "policy.migration: no key treshold", "did you mean threshold?"),
        (["policy.scale.weight=1.5"], "policy.scale: MinMaxScore: weight is 1.5", "must be 0 to 1"),
        (["policy.scale.weight=high"], "policy.scale.weight:", "should be a valid number"),
        (["policy.scale.weight='0.5'"], "policy.scale.weight:", "should be a valid number"),
        (["policy.scale.estimate=guess"], "policy.scale.estimate:", "'paper' or 'exact'"),
        (["policy.scale=3"], "policy.scale: is 3", "must be a part with _target_"),
        (["policy._target_=no.Such"], "policy: cannot find no.Such", ""),
        (["trace.iccc=0.5"], "trace: no key iccc", "did you mean icc?"),
        (["trace.icc=2"], "trace.icc:", "less than or equal to 1"),
        (["options.engine.prefix=true"], "options.engine: no key prefix", "prefix_caching, share_prompt_kv"),
        (["options.kv_transfer=serial"], "options.kv_transfer:", "'in_turn' or 'parallel'"),
        (["cluster.nodez=3"], "cluster: no key nodez", "did you mean nodes?"),
        (["cluster.nodes=0"], "cluster.nodes:", "greater than or equal to 1"),
        (["profile.decode.overhead=0"], "profile.decode: no key overhead", "host_overhead_seconds"),
        (["seed=-1"], "seed:", "greater than or equal to 0"),
        (["seed=one"], "seed:", "valid integer"),
        (["optimize=speed"], "optimize", "'step_seconds'"),
        (["trace=file"], "trace.path", "needs a value"),
        (["hydra/launcher=jobli"], "hydra/launcher jobli does not exist", "basic"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_right_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: str, right: str
) -> None:
    line = refusal(capsys, "replay", *arguments, f"out={tmp_path / 'out'}")
    assert wrong in line
    assert right in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        (["compare", "polcy=verl"], "no key polcy", "keys are baselines, cluster,"),
        (["compare", "policy=verk"], "policy verk does not exist", "policies are verl,"),
        (["compare", "lambda=0.5"], "no key lambda", "policies.rlhfless.scale.weight"),
        (["compare", "policies.rlhfless.scale.weigth=1"], "policies.rlhfless.scale: no key weigth", "weight"),
        (["compare", "seeds=0"], "seeds:", "greater than or equal to 1"),
        (["plan", "batsch=b.jsonl"], "no key batsch", "did you mean batch?"),
        (["plan"], "batch", "needs a value"),
        (["reproduce", "rows=1"], "no key rows", "did you mean row?"),
        (["reproduce", "format=pdf"], "format", "'svg' or 'png'"),
    ],
)
def test_the_other_verbs_refuse_in_the_same_way(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wrong: str, right: str
) -> None:
    line = refusal(capsys, *arguments)
    assert wrong in line
    assert right in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster.gpu=H999"], "no data sheet of 'H999'"),
        (["profile=computed", "gpu=H999", "model=Qwen2.5-7B", "cluster=custom"], "no data sheet of 'H999'"),
        (
            ["cluster=h100_1x8", "profile=l40s_qwen2.5-3b_tp2"],
            "has H100, but profile l40s_qwen2.5-3b_tp2 is of L40S",
        ),
        (["learner_gpus=99"], "the learner asks for 99 GPUs"),
        (["policy=no_such"], "no_such"),
        (["trace=no_such"], "no_such"),
        (["no_such=1"], "no_such"),
    ],
)
def test_what_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    for verb in ("replay", "compare"):
        assert message in refusal(capsys, verb, *SMALL, *arguments, f"out={out}")
    assert not out.exists()


def test_a_cluster_alone_brings_the_profile_of_its_gpus(tmp_path: Path) -> None:
    run("replay", *SMALL, "cluster=h100_1x8", f"out={tmp_path}")
    assert json.loads((tmp_path / "summary.json").read_text())["profile"] == "h100_qwen2.5-3b_tp2"


def test_a_missing_log_option_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "run.log", log_lines())
    assert "does not say batch" in refusal(capsys, "compare", "--log", str(log), "--gpus", "4")


def test_the_command_lists_its_verbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhfless", "--help"])
    cli.main()
    printed = capsys.readouterr().out
    scripts = Path(cli.__file__).parent
    for verb in cli.VERBS:
        assert f"  {verb}" in printed
        assert (scripts / f"{verb}.py").is_file()
    monkeypatch.setattr(sys, "argv", ["rlhfless", "no_such"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "no verb 'no_such'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS)
def test_each_verb_is_a_script(verb: str) -> None:
    script = Path(cli.__file__).parent / f"{verb}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"rlhfless {verb}" in done.stdout


def test_help_does_not_import_what_it_does_not_need() -> None:
    """A command that takes ten milliseconds must not spend seconds on imports."""
    code = (
        "import sys; sys.argv = ['rlhfless', '--help']\n"
        "from rlhfless.scripts import cli; cli.main()\n"
        "print([m for m in ('numpy', 'polars', 'numba', 'scipy', 'hydra', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
