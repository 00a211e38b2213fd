"""Figures over sweeps: what they show is what the cells say, and the same cells give the same bytes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from cells import SMALL, write_cell, write_sweep

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'rlhfless[plot]'")

from matplotlib.colors import to_rgb

from rlhfless.scripts.figures import NAMES, file_names
from rlhfless.scripts.figures_draw import FIGURES, Drawing, NotInSweepError, Request, draw
from rlhfless.scripts.figures_style import COLORS, FORMS, looks, rendered
from rlhfless.scripts.results import Sweep, read_results
from rlhfless.scripts.scoreboard import boards
from rlhfless.traces.errors import InputError

POLICIES = ("verl", "rlhfless", "tail_isolated", "april")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sweep that every figure can be drawn from: policies, a swept key, and nodes."""
    made = tmp_path_factory.mktemp("sweep")
    write_sweep(made / "policies", SMALL, policy=POLICIES, seed=[0, 1])
    write_sweep(made / "keys", (*SMALL, "policy=rlhfless"), policy__scale__weight=[0.3, 0.9], seed=[0, 1])
    nodes = (*SMALL, "profile=h100_qwen2.5-7b_tp2", "cluster=h100_4x8", "learner_gpus=8")
    write_sweep(
        made / "nodes", nodes, policy=["rlhfless", "tail_isolated"], cluster__nodes=[1, 2, 10], seed=[0, 1]
    )
    return made


@pytest.fixture(scope="module")
def policies(folder: Path) -> Sweep:
    """Return the cells of the policies."""
    return read_results([folder / "policies"])


def only(name: str, sweep: Sweep, key: str | None = None) -> Drawing:
    """Draw a figure of a sweep over one setting."""
    (drawing,) = draw(name, Request(sweep, key))
    return drawing


def test_every_figure_has_a_name_and_is_drawn_from_a_sweep_that_has_its_data(folder: Path) -> None:
    assert set(FIGURES) == set(NAMES)
    sweep = read_results([folder / "policies", folder / "keys", folder / "nodes"])
    for name in FIGURES:
        drawings = draw(name, Request(sweep))
        assert len(set(file_names(name, drawings))) == len(drawings) > 0


@pytest.mark.parametrize("form", FORMS)
def test_the_same_cells_give_the_same_bytes(policies: Sweep, form: str) -> None:
    one, two = (rendered(only("pareto", policies).figure, form) for _ in range(2))
    assert one == two
    assert b"CreationDate" not in one
    assert b"<dc:date>" not in one


def test_cost_and_time_are_those_of_the_table(policies: Sweep) -> None:
    (axes,) = only("cost_time", policies).figure.axes
    (board,) = boards(policies)
    shown = {c.get_label(): c.lines[0].get_xydata()[0] for c in axes.containers}
    assert set(shown) == {row.label for row in board.rows if row.delivers_all} == set(POLICIES) - {"april"}
    steps = {len(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) > 1}
    assert steps == {2 * 6}
    for row in board.rows:
        if row.delivers_all:
            expected = [row.scores["step_seconds"].mean, row.scores["gpu_seconds"].mean]
            np.testing.assert_allclose(shown[row.label], expected)


def test_bars_of_the_breakdown_end_at_the_step_time(policies: Sweep) -> None:
    (axes,) = only("breakdown", policies).figure.axes
    (board,) = boards(policies)
    ends: dict[int, float] = {}
    for bar in axes.patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        ends[place] = max(ends.get(place, 0.0), bar.get_x() + bar.get_width())
    assert len(ends) == len(board.rows)
    for place, row in enumerate(board.rows):
        assert ends[place] == pytest.approx(row.scores["step_seconds"].mean)


def test_no_policy_lies_below_the_bound_of_its_figure(policies: Sweep) -> None:
    _, right = only("pareto", policies).figure.axes
    vertical, horizontal = right.patches[:2]
    least_time, least_cost = (
        vertical.get_x() + vertical.get_width(),
        horizontal.get_y() + horizontal.get_height(),
    )
    assert least_time > 0
    assert least_cost > 0
    for container in right.containers:
        time, cost = container.lines[0].get_xydata()[0]
        assert time >= least_time
        assert cost >= least_cost


def test_the_front_passes_through_what_nothing_beats(policies: Sweep) -> None:
    left, _ = only("pareto", policies).figure.axes
    spots = [tuple(c.lines[0].get_xydata()[0]) for c in left.containers]
    best = {s for s in spots if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in spots)}
    (front,) = [line for line in left.lines if line.get_drawstyle() == "steps-post"]
    assert {tuple(point) for point in front.get_xydata()} == best


def test_sensitivity_shows_the_mean_at_every_value(folder: Path) -> None:
    sweep = read_results([folder / "keys"])
    every = only("sensitivity", sweep, "policy.scale.weight").figure.axes
    (board,) = boards(sweep)
    for axes, score in zip(every, ("step_seconds", "generation_seconds", "gpu_seconds"), strict=True):
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.3", "0.9"]
        shown = axes.containers[0].lines[0].get_ydata(orig=False)
        np.testing.assert_allclose(shown, [row.scores[score].mean for row in board.rows])


def test_scaling_has_a_line_a_policy_over_the_nodes(folder: Path) -> None:
    axes = only("scaling", read_results([folder / "nodes"])).figure.axes[0]
    assert [c.get_label() for c in axes.containers] == ["rlhfless", "tail_isolated"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "10"]


def test_histograms_hold_every_response_once(policies: Sweep) -> None:
    left = only("lengths", policies).figure.axes[0]
    assert len(left.patches) == 2
    for stairs in left.patches:
        values, edges, _ = stairs.get_data()
        assert (values * np.diff(np.log2(edges))).sum() == pytest.approx(1.0)


def test_actors_are_counted_step_by_step(policies: Sweep) -> None:
    axes = only("actor_count", policies).figure.axes[0]
    own = [cell.steps["actors"].to_numpy() for cell in policies.cells if cell.policy == "rlhfless"]
    (line,) = [line for line in axes.lines if line.get_label() == "rlhfless"]
    np.testing.assert_allclose(line.get_ydata(), np.mean(own, axis=0))


def test_actor_work_sums_to_the_responses_of_a_step(policies: Sweep) -> None:
    axes = only("actor_work", policies).figure.axes[0]
    (line,) = [line for line in axes.lines if line.get_label() == "verl"]
    assert line.get_ydata().sum() == pytest.approx(8 * 3)


def test_series_differ_in_grey() -> None:
    chosen = list(looks(map(str, range(9))).values())
    assert len({look.marker for look in chosen}) == 9
    assert len({(look.marker, str(look.line)) for look in looks(map(str, range(45))).values()}) == 45
    lightness = [np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)) for color in COLORS]
    assert min(abs(np.diff(lightness))) > 0.08


def test_what_a_sweep_lacks_is_said_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module("rlhfless.scripts.figures").main
    with pytest.raises(SystemExit) as stopped:
        main([str(folder / "policies"), "--only", "scaling", "--out", str(tmp_path / "none")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cluster.nodes=1,2,4,8" in said
    assert not (tmp_path / "none").exists()
    main([str(folder / "policies"), "--out", str(tmp_path / "out"), "--format", "svg"])
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(NAMES) - {"scaling", "sensitivity"}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["sensitivity", "scaling"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "figure11"], "no such figure; figures are cost_time"),
        (["--format", "gif"], "no such format; formats are pdf, svg, png"),
        (["--only", "sensitivity", "--key", "x"], "cells do not differ in it; they differ in policy"),
    ],
)
def test_wrong_names_are_refused(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        import_module("rlhfless.scripts.figures").main([str(folder / "policies"), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("rlhfless.scripts.figures_")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as stopped:
        import_module("rlhfless.scripts.figures").main([str(folder / "policies")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "rlhfless: figures need matplotlib: pip install 'rlhfless[plot]'\n"


def test_cells_without_the_tables_of_a_figure_are_refused(tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", *SMALL, "policy=verl")
    for name in ("details.csv", "actors.csv", "lengths.csv"):
        (cell / name).unlink()
    request = Request(read_results([tmp_path]))
    for name in ("actor_work", "breakdown", "lengths", "pareto"):
        with pytest.raises(NotInSweepError, match=r"details\.csv"):
            draw(name, request)
    with pytest.raises(InputError):
        draw("sensitivity", Request(request.sweep, "policy.scale.weight"))
