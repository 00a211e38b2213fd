"""Tables over cells: their statistics, what they mark, and that the same cells give the same bytes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from cells import SMALL, write_cell, write_failure, write_sweep
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.models.scores import RunScores, interval
from rlhfless.scripts.results import Cell, Failure, Sweep, Value, read_results
from rlhfless.scripts.scoreboard import boards, holm, sign_flip_test
from rlhfless.scripts.table import DOCUMENT, files, latex_text, markdown_text, notes
from rlhfless.traces.errors import InputError

NASTY = r"a_b %&#$ ^~\ {x} <é|ß> 50-60"


def cell(policy: str, seed: int, seconds: float, delivered: int = 10, **settings: Value) -> Cell:
    """Return a cell with made-up scores."""
    mean = {
        "step_seconds": seconds,
        "generation_seconds": seconds / 2,
        "gpu_seconds": 8.0,
        "busy_gpu_seconds": 4.0,
        "actors": 3.0,
        "migrations": 0.0,
        "launched": 10.0,
        "responses": float(delivered),
    }
    return Cell(
        folder=Path(policy, str(seed)),
        seed=seed,
        settings={"policy": policy, "trace": "t", "profile": "p", "cluster": "c", **settings},
        scores=RunScores(policy, 1, mean, {}),
        nodes=1,
        usd_per_gpu_hour=None,
        planning_seconds=0.01,
        code="1",
        steps=pl.DataFrame(),
    )


def sweep_of(
    *cells: Cell, failures: tuple[Failure, ...] = (), factors: tuple[str, ...] = ("policy",)
) -> Sweep:
    """Return made-up cells as a sweep."""
    return Sweep(tuple(cells), failures, factors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep of three policies on two workloads with four seeds, and one failure."""
    made = tmp_path_factory.mktemp("sweep")
    policies = ["verl", "rlhfless", "oracle"]
    write_sweep(made, SMALL, policy=policies, trace=["gsm8k_grpo", "gsm8k_ppo"], seed=range(4))
    write_failure(made / "failed", "step 1: no room", *SMALL, "policy=seer", "trace=gsm8k_ppo", "seed=2")
    return made


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), st.floats(0.01, 0.2))
def test_holm_rejects_what_the_step_down_procedure_rejects(p: list[float], level: float) -> None:
    # The procedure as Holm states it: from the smallest p on, reject until one exceeds level / (those left).
    rejected = set()
    for place, number in enumerate(sorted(range(len(p)), key=lambda n: p[n])):
        if p[number] > level / (len(p) - place):
            break
        rejected.add(number)
    corrected = holm(p)
    for number, value in enumerate(corrected):
        if abs(value - level) > 1e-9:
            assert (value < level) == (number in rejected)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=7))
def test_the_sign_flip_test_counts_all_assignments_of_signs(differences: list[int]) -> None:
    data = np.array(differences, dtype=np.float64)
    observed = abs(sum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= observed for sign in signs
    )
    assert sign_flip_test(data) == pytest.approx(extreme / len(signs))


def test_ten_seeds_that_all_agree_are_significant_and_five_cannot_be() -> None:
    assert sign_flip_test(np.ones(10)) == pytest.approx(2**-9)
    assert sign_flip_test(np.ones(5)) == pytest.approx(2**-4)
    assert sign_flip_test(np.zeros(10)) == 1.0


def test_rows_hold_means_intervals_and_paired_differences_of_the_cells(folder: Path) -> None:
    sweep = read_results([folder])
    made = boards(sweep, baseline="verl")
    assert [board.setting["trace"] for board in made] == ["gsm8k_grpo", "gsm8k_ppo"]
    for board in made:
        of = {
            policy: [
                c.scores.mean
                for c in sweep.cells
                if c.policy == policy and c.settings["trace"] == board.setting["trace"]
            ]
            for policy in ("verl", "rlhfless", "oracle")
        }
        assert [row.label for row in board.rows] == ["verl", "rlhfless", "oracle"]
        for row in board.rows:
            own, base = (np.array([m["gpu_seconds"] for m in of[p]]) for p in (row.label, "verl"))
            assert row.scores["gpu_seconds"] == interval(own)
            if row.label == "verl":
                assert row.against is None
                continue
            assert row.against is not None
            assert row.against.seeds == (0, 1, 2, 3)
            assert row.against.cost_reduction.mean == pytest.approx(np.mean(1 - own / base))
            assert row.against.differences["gpu_seconds"].value.mean == pytest.approx((own - base).mean())
            time = [
                b["step_seconds"] / o["step_seconds"] for o, b in zip(of[row.label], of["verl"], strict=True)
            ]
            assert row.against.speedup.mean == pytest.approx(np.mean(time))
            for difference in row.against.differences.values():
                assert difference.p <= difference.p_holm <= 1


def test_the_same_cells_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for number, own in enumerate(sorted(folder.iterdir(), reverse=True)):
        moved = tmp_path / f"x{number:02}" / "y"
        shutil.copytree(own, moved)
        if (moved / "timings.json").is_file():
            timings = {"planning_seconds_median": float(number + 1), "planning_seconds_max": 99.0}
            (moved / "timings.json").write_text(json.dumps(timings))
    one, two = read_results([folder]), read_results([tmp_path])
    made = [files(sweep, boards(sweep, baseline="verl")) for sweep in (one, two)]
    assert made[0] == made[1]
    timed = [files(s, boards(s, scores=("planning_seconds",))) for s in (one, two)]
    assert timed[0]["table.csv"] != timed[1]["table.csv"]


def test_the_csv_holds_the_rows_and_the_cells(folder: Path) -> None:
    sweep = read_results([folder])
    contents = files(sweep, boards(sweep, baseline="verl"))
    rows, cells = (pl.read_csv(contents[name].encode()) for name in ("table.csv", "cells.csv"))
    assert len(rows) == 6
    assert len(cells) == 24
    grouped = cells.group_by("trace", "policy").agg(pl.col("step_seconds").mean(), pl.len())
    joined = rows.join(grouped, on=("trace", "policy"), suffix="_mean")
    np.testing.assert_allclose(joined["step_seconds"], joined["step_seconds_mean"], rtol=1e-9)
    assert joined["seeds"].to_list() == joined["len"].to_list()
    assert rows.filter(pl.col("policy") == "verl")["speedup"].is_null().all()


def test_failures_stand_at_the_foot_of_their_table(folder: Path) -> None:
    sweep = read_results([folder])
    first, second = boards(sweep)
    assert not any("no room" in line for line in notes(first))
    assert [line for line in notes(second) if "no room" in line] == ["Failed: seer, seed 2: step 1: no room"]


def test_missing_seeds_are_said_and_pairs_are_those_that_both_have() -> None:
    cells = [*(cell("base", s, 10.0 + s) for s in range(4)), *(cell("other", s, 5.0) for s in (1, 2, 3, 7))]
    (board,) = boards(sweep_of(*cells), baseline="base")
    _, other = board.rows
    assert other.against is not None
    assert other.against.seeds == (1, 2, 3)
    assert other.against.differences["step_seconds"].value.mean == pytest.approx(5.0 - 12.0)
    said = notes(board)
    assert "base: no result for seed 7." in said
    assert any(line.startswith("other: no result for seed 0") for line in said)
    assert "other: seed 7 has no partner in base, and is not paired." in said


def test_best_rows_are_those_that_seeds_cannot_tell_from_the_best() -> None:
    noise = (0.0, 0.5, -0.5, 0.2, -0.2, 0.0)
    cells = []
    for seed, extra in enumerate(noise):
        # The workload's own luck is shared by all policies: only paired differences may decide.
        luck = 10.0 * seed
        cells += [
            cell("best", seed, 10.0 + luck),
            cell("tied", seed, 10.05 + luck + extra),
            cell("worse", seed, 10.4 + luck),
            cell("oracle", seed, 9.0 + luck),
            cell("partial", seed, 1.0 + luck, delivered=2),
        ]
    (board,) = boards(sweep_of(*cells))
    marked = {row.label for row in board.rows if "step_seconds" in row.best}
    assert marked == {"best", "tied"}
    # Where nothing tells the rows apart, nothing is marked.
    assert not any("gpu_seconds" in row.best for row in board.rows)
    assert "**" in markdown_text([board])
    assert "| partial * |" in markdown_text([board])


def test_policies_that_deliver_less_are_compared_per_delivered_response() -> None:
    cells = [cell("base", s, 10.0) for s in range(3)] + [cell("half", s, 6.0, delivered=5) for s in range(3)]
    (board,) = boards(sweep_of(*cells), baseline="base")
    against = board.rows[1].against
    assert against is not None
    assert against.speedup.mean == pytest.approx(10 / 12)
    assert against.differences["step_seconds"].value.mean == pytest.approx(12 - 10)


def test_rows_can_be_any_swept_key() -> None:
    cells = [
        cell("p", seed, 10.0 * weight + seed, **{"policy.w": weight, "options.x": x})
        for seed in range(3)
        for weight in (0.5, 1.0)
        for x in (True, False)
    ]
    sweep = sweep_of(*cells, factors=("options.x", "policy.w"))
    made = boards(sweep, by=("policy",), baseline="policy.w=0.5")
    assert len(made) == 2
    assert [row.values for row in made[0].rows] == [
        {"policy": "p", "policy.w": 0.5},
        {"policy": "p", "policy.w": 1.0},
    ]
    assert "options.x = false" in made[0].title
    flipped = boards(sweep, by=("options.x",), rows=["true"])
    assert [[row.label for row in board.rows] for board in flipped] == [["options.x=true"]] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"baseline": "nobody"}, "no row nobody; rows are"),
        ({"by": ("policy.v",)}, "cells do not differ in it"),
        ({"scores": ("seconds",)}, "no such score; scores are actors, step_seconds"),
        ({"rows": ["trace=x"]}, "rows have no trace; they have policy"),
        ({"baseline": "p"}, "the baseline must be one row, 2 match"),
    ],
)
def test_wrong_names_are_refused_with_the_right_ones(arguments: dict[str, object], said: str) -> None:
    cells = [cell("p", s, 1.0, **{"policy.w": w}) for s in range(2) for w in (0.5, 1.0)]
    with pytest.raises(InputError, match=re.escape(said)):
        boards(sweep_of(*cells, factors=("policy.w",)), **arguments)  # type: ignore[arg-type]


def test_two_results_of_one_row_and_seed_are_refused() -> None:
    with pytest.raises(InputError, match="both have p, seed 0; leave one out"):
        boards(sweep_of(cell("p", 0, 1.0), cell("p", 0, 2.0)))


def test_the_latex_tables_compile_whatever_the_names(folder: Path, tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed: the LaTeX table is not compiled")
    sweep = read_results([folder])
    odd = sweep_of(
        *(cell(name, s, 1.0 + s * len(name)) for s in range(3) for name in (NASTY, "base")),
        failures=(Failure(Path("f"), 1, {"policy": NASTY, "trace": "t"}, f"{NASTY} 漢"),),
    )
    text = latex_text([*boards(sweep, baseline="verl"), *boards(odd, baseline="base")])
    (tmp_path / "table.tex").write_text(text)
    (tmp_path / "document.tex").write_text(DOCUMENT)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull \\hbox" not in done.stdout


def test_the_verb_prints_the_tables_and_writes_its_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module("rlhfless.scripts.table").main
    main([str(folder), "--baseline", "verl", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "gsm8k_ppo on l40s_2x8, profile l40s_qwen2.5-3b_tp2: against verl" in printed
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"table.md", "table.csv", "table.tex", "document.tex", "cells.csv", "report.html"}
    page = (tmp_path / "out" / "report.html").read_text()
    sweep = read_results([folder])
    for entry in re.findall(r"\*\*([\d.]+)\*\*", markdown_text(boards(sweep, baseline="verl"))):
        assert entry in page
    with pytest.raises(SystemExit) as stopped:
        main([str(folder), "--baseline", "nobody", "--out", str(tmp_path / "none")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_one_seed_has_no_interval_and_no_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cell(tmp_path / "a", *SMALL, "policy=verl")
    write_cell(tmp_path / "b", *SMALL, "policy=rlhfless")
    sweep = read_results([tmp_path])
    (board,) = boards(sweep, baseline="verl")
    assert "Mean over the steps of one seed (0): no interval." in notes(board)
    against = board.rows[1].against
    assert against is not None
    assert all(difference.p == 1.0 for difference in against.differences.values())
