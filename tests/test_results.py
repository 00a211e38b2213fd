"""Results on disk: what a replay records of each step, and how cells are found, told apart and refused."""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from cells import SMALL, composed, write_cell, write_failure, write_sweep

from rlhfless.policies import simulate
from rlhfless.policies.simulate import SimulatedStep
from rlhfless.scripts.records import WAIT, critical_path
from rlhfless.scripts.results import read_results
from rlhfless.scripts.workload import Workload, build_policy, build_workloads
from rlhfless.traces.errors import InputError

POLICIES = ("verl", "rlhfless", "tail_isolated", "rlhfuse_overlap", "streamrl", "april")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep of two policies with two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    return write_sweep(folder, SMALL, policy=["verl", "rlhfless"], seed=[0, 1])


@pytest.fixture
def copy(sweep: Path, tmp_path: Path) -> Path:
    """Return a copy of the sweep that a test may change."""
    return Path(shutil.copytree(sweep, tmp_path / "copy"))


def simulated(policy: str, *overrides: str) -> tuple[Workload, list[SimulatedStep]]:
    """Replay a small workload, with a length cap that cuts and migrations reach."""
    config = composed(("trace.prompts=64", "trace.prompts_per_step=32", f"policy={policy}", *overrides))
    (workload,) = build_workloads(config, [0])
    return workload, list(
        simulate(workload.traces[0], build_policy(config.policy, "policy"), workload.setting)
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", ["gsm8k_grpo", "gsm8k_ppo"])
def test_the_parts_of_the_deciding_path_sum_to_the_step(policy: str, trace: str) -> None:
    _, steps = simulated(policy, f"trace={trace}")
    for step in steps:
        parts = critical_path(step.outcome)
        assert all(seconds >= -1e-9 for seconds in parts.values())
        assert sum(parts.values()) == pytest.approx(step.outcome.step_seconds)
        assert parts["decode"] <= step.outcome.generation_seconds + 1e-9


def test_a_pool_that_always_works_waits_for_nothing() -> None:
    _, steps = simulated("verl", "trace=gsm8k_ppo")
    for step in steps:
        parts = critical_path(step.outcome)
        assert parts[WAIT] == pytest.approx(0.0, abs=1e-9)
        # Preparation and learning share the learner's GPUs: all of them lie on the path, whole.
        for stage in ("reference", "value", "update_critic", "update_actor"):
            start, end = step.outcome.stage_times[stage]
            assert parts[stage] == pytest.approx(end - start)


def test_start_up_that_nobody_prewarms_is_waited_for() -> None:
    workload, steps = simulated("serverless_fixed", "trace=gsm8k_ppo")
    warm = workload.setting.profile.functions.warm_start_seconds
    assert all(critical_path(step.outcome)[WAIT] >= warm for step in steps)


@pytest.mark.parametrize("policy", ["verl", "rlhfless", "tail_isolated"])
def test_details_actors_and_lengths_agree_with_the_steps(policy: str, tmp_path: Path) -> None:
    fixed = ("trace.prompts=64", "trace.prompts_per_step=32", f"policy={policy}")
    write_cell(tmp_path / "cell", *fixed)
    (cell,) = read_results([tmp_path]).cells
    steps, details, actors, lengths = cell.steps, cell.details(), cell.actors(), cell.lengths()
    assert details is not None
    assert actors is not None
    assert lengths is not None
    latency = details.select(
        pl.sum_horizontal(name for name in details.columns if name.startswith("latency."))
    )
    np.testing.assert_allclose(latency.to_series(), steps["step_seconds"], rtol=1e-9)
    by_step = actors.group_by("step").agg(
        pl.len(), pl.col("tokens", "responses", "moved_in", "moved_out").sum()
    )
    joined = steps.join(by_step, on="step", suffix="_given")
    assert joined["tokens"].to_list() == joined["response_tokens"].to_list()
    assert joined["responses_given"].to_list() == joined["responses"].to_list()
    assert joined["len"].to_list() == joined["actors"].to_list()
    assert joined["moved_in"].to_list() == joined["moved_out"].to_list() == joined["migrations"].to_list()
    assert (actors["start"] <= actors["end"]).all()
    assert (actors["end"] <= actors["released"]).all()
    ends = actors.group_by("step").agg(pl.col("end").max()).sort("step")
    np.testing.assert_allclose(ends["end"], steps["generation_seconds"], rtol=1e-9)
    assert lengths["responses"].sum() == steps["responses"].sum()
    # No plan goes below the bound on the true lengths, prefill left out of both.
    assert (details["bound_generation_seconds"] <= steps["generation_seconds"]).all()
    assert (details["bound_decode_gpu_seconds"] <= details["decode_gpu_seconds"]).all()


def test_every_response_lies_in_a_bin_that_holds_its_length(tmp_path: Path) -> None:
    write_cell(tmp_path / "cell", *SMALL, "policy=verl")
    (workload,) = build_workloads(composed(SMALL), [0])
    (trace,) = workload.traces
    (cell,) = read_results([tmp_path]).cells
    lengths = cell.lengths()
    assert lengths is not None
    for epoch, low, high, count in lengths.iter_rows():
        own = trace.response_tokens[trace.epoch == epoch]
        assert count == int(((own >= low) & (own < high)).sum())


def test_unfinished_responses_have_no_bound(tmp_path: Path) -> None:
    write_cell(tmp_path / "cell", *SMALL, "policy=april")
    (cell,) = read_results([tmp_path]).cells
    details = cell.details()
    assert details is not None
    whole = (cell.steps["launched"] == cell.steps["responses"]) & (cell.steps["stale_tokens"] == 0)
    assert not whole.all()
    assert details["bound_generation_seconds"].is_not_null().to_list() == whole.to_list()


def test_cells_say_what_ran_and_in_what_they_differ(sweep: Path) -> None:
    found = read_results([sweep])
    assert [(cell.policy, cell.seed) for cell in found.cells] == [
        ("rlhfless", 0),
        ("rlhfless", 1),
        ("verl", 0),
        ("verl", 1),
    ]
    assert found.factors == ("policy",)
    for cell in found.cells:
        assert cell.scores.mean["step_seconds"] == pytest.approx(cell.steps["step_seconds"].mean())
        assert cell.settings["trace"] == "gsm8k_grpo"
        assert cell.settings["trace.prompts"] == 24


def test_any_swept_key_is_a_factor_and_what_follows_from_a_name_is_none(tmp_path: Path) -> None:
    fixed = (*SMALL, "policy=rlhfless")
    write_sweep(
        tmp_path / "a",
        fixed,
        policy__scale__weight=[0.3, 0.9],
        options__weight_transfer=["broadcast", "in_turn"],
    )
    write_cell(tmp_path / "b", *SMALL, "policy=verl")
    write_cell(
        tmp_path / "c",
        *SMALL,
        "policy=rlhfless",
        "~policy.scale",
        "+policy.scale={_target_: rlhfless.policies.FixedActors, actors: 2}",
    )
    factors = read_results([tmp_path]).factors
    assert set(factors) == {
        "policy",
        "options.weight_transfer",
        "policy.scale._target_",
        "policy.scale.weight",
    }


def test_neither_the_order_nor_the_names_of_folders_matter(sweep: Path, tmp_path: Path) -> None:
    for number, folder in enumerate(sorted(sweep.iterdir(), reverse=True)):
        shutil.copytree(folder, tmp_path / "other" / str(number) / "deep")
    one, two = read_results([sweep]), read_results([tmp_path])
    assert [(c.seed, c.settings, c.scores) for c in one.cells] == [
        (c.seed, c.settings, c.scores) for c in two.cells
    ]
    both = read_results([sweep, tmp_path])
    assert len(both.cells) == len(one.cells)
    assert both.outdated == 0


def test_drafts_in_hidden_folders_are_passed_over(copy: Path) -> None:
    shutil.copytree(copy / "0", copy / ".draft-1" / "0")
    (copy / ".draft-1" / "0" / "summary.json").write_text("{")
    assert len(read_results([copy]).cells) == 4


def test_a_failure_counts_until_the_cell_has_a_result(copy: Path) -> None:
    write_failure(copy / "x", "it\nbroke", *SMALL, "policy=verl", "seed=5")
    write_failure(copy / "y", "no room", *SMALL, "policy=verl", "seed=1")
    (failure,) = read_results([copy]).failures
    assert (failure.seed, failure.settings["policy"], failure.error) == (5, "verl", "it broke")


def changed(folder: Path, **description: str) -> None:
    """Give a cell another result, and another description."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["mean"]["step_seconds"] += 1
    (folder / "summary.json").write_text(json.dumps(summary))
    run = yaml.safe_load((folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **description}))


def test_the_same_code_cannot_give_a_cell_two_results(copy: Path) -> None:
    shutil.copytree(copy / "0", copy / "again")
    changed(copy / "again")
    with pytest.raises(
        InputError, match="policy verl, seed 0: the same configuration with different results"
    ):
        read_results([copy])


@pytest.mark.parametrize("newest", ["0", "again"])
def test_of_results_from_changed_code_the_newest_counts(copy: Path, newest: str) -> None:
    shutil.copytree(copy / "0", copy / "again")
    changed(copy / "again", code="abc")
    os.utime(copy / newest / "summary.json", (2e9, 2e9))
    found = read_results([copy])
    assert (len(found.cells), found.outdated) == (4, 1)
    assert newest in {cell.folder.name for cell in found.cells}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("summary.json", "{", "no JSON"),
        ("summary.json", "[]", "must be a JSON object"),
        ("summary.json", "{}", "workload: Field required"),
        ("run.yaml", "a: [", "no YAML"),
        ("run.yaml", "a: 1", "config: Field required"),
        ("steps.csv", None, "missing, though summary.json beside it is there"),
    ],
)
def test_broken_files_are_named(copy: Path, file: str, text: str | None, said: str) -> None:
    path = copy / "0" / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_results([copy])
    assert str(path) in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folders_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        read_results([tmp_path / "none"])
    with pytest.raises(InputError, match="no results here"):
        read_results([tmp_path])


def test_a_comparison_is_read_like_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compare"
    import_module("rlhfless.scripts.compare").main(
        [*SMALL, "policy=[verl,rlhfless]", "seeds=2", f"out={out}"]
    )
    capsys.readouterr()
    found = read_results([out])
    summary = json.loads((out / "summary.json").read_text())
    assert len(found.cells) == 4
    assert found.factors == ("policy",)
    for policy in ("verl", "rlhfless"):
        for column in ("step_seconds", "gpu_seconds", "actors"):
            own = [cell.scores.mean[column] for cell in found.cells if cell.policy == policy]
            assert np.mean(own) == pytest.approx(summary["policies"][policy]["mean"][column]["mean"])
