"""The reproduction of the paper: the rules of the verdicts, the trends, and what the verb writes."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.models.scores import Interval95
from rlhfless.policies import simulate
from rlhfless.scripts import reproduce
from rlhfless.scripts.reproduce import ROWS
from rlhfless.scripts.reproduce_lab import NO_WAVES, ONE_PREFILL, PAPER_ESTIMATE, Lab, changed_policy, gsm8k
from rlhfless.scripts.reproduce_report import plot
from rlhfless.scripts.reproduce_verdicts import (
    Finding,
    Row,
    alike,
    falling,
    less,
    limit,
    point,
    rising,
    spread,
    statement,
)
from rlhfless.traces.errors import InputError

TRENDS = (7, 8, 10, 11, 12, 14)


@cache
def lab(seeds: int) -> Lab:
    """Return a lab that the tests of one process share."""
    return Lab(seeds)


def computed(number: int) -> Row:
    """Return a row after checking that it is whole."""
    row = ROWS[number].compute(lab(2 if number in TRENDS else 1))
    assert row.number == number
    assert tuple(figure.name for figure in row.figures) == ROWS[number].figures
    assert row.findings
    for finding in row.findings:
        value = finding.estimate
        assert value.low <= value.mean <= value.high
        assert all((finding.what, finding.options, finding.paper, finding.ours, finding.reason))
        assert "nan" not in f"{finding.ours} {finding.reason}"
    for figure in row.figures:
        assert all(len(points) > 1 for points in figure.panels.values())
        assert plot(figure, "svg") == plot(figure, "svg")
    return row


def of(row: Row, what: str, options: str) -> Finding:
    """Return the finding with these words."""
    (found,) = (f for f in row.findings if f.what.startswith(what) and f.options == options)
    return found


# The rules


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (0.35, (0.30, 0.20, 0.36), "matches"),  # inside the interval
        (0.35, (0.32, 0.31, 0.33), "matches"),  # within a tenth
        (0.35, (0.10, 0.01, 0.20), "same direction"),
        (0.35, (0.90, 0.80, 0.99), "same direction"),
        (0.35, (0.01, -0.01, 0.03), "differs"),
        (-0.128, (-0.02, -0.03, -0.01), "same direction"),
        (-0.128, (0.02, 0.01, 0.03), "differs"),
    ],
)
def test_a_point_is_judged_as_an_effect(paper: float, ours: tuple[float, float, float], verdict: str) -> None:
    assert point(paper, Interval95(*ours)) == verdict


@pytest.mark.parametrize(
    ("share", "verdict"),
    [((0.8, 0.6, 1.0), "matches"), ((0.6, 0.5, 0.7), "same direction"), ((0.5, 0.5, 0.5), "differs")],
)
def test_a_statement_needs_more_than_half(share: tuple[float, float, float], verdict: str) -> None:
    assert statement(Interval95(*share)) == verdict


def test_alike_and_limit() -> None:
    verdicts = [alike(Interval95(m, m, m)) for m in (0.05, 0.1, 0.11)]
    assert verdicts == ["matches", "same direction", "differs"]
    verdicts = [
        limit(0.03, Interval95(*v)) for v in ((0.02, 0.01, 0.03), (0.02, 0.01, 0.04), (0.04, 0.01, 0.05))
    ]
    assert verdicts == ["matches", "same direction", "differs"]


@given(st.lists(st.lists(st.floats(1, 2), min_size=3, max_size=3), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_order_of_a_sweep_counts_every_pair(values: list[list[float]]) -> None:
    sweep = [np.array(v) for v in values]
    share, ties, pairs = 0.0, 0, 0
    for seed in range(3):
        for i in range(len(sweep)):
            for j in range(i + 1, len(sweep)):
                a, b = sweep[i][seed], sweep[j][seed]
                tied = abs(a - b) <= 0.005 * max(a, b)
                share += 0.5 if tied else float(b > a)
                ties += tied
                pairs += 1
    up, down = rising(sweep), falling(sweep)
    assert up.share.mean == pytest.approx(share / pairs)
    assert up.ties == pytest.approx(ties / pairs)
    assert down.share.mean == pytest.approx(1 - share / pairs)


def test_a_tie_is_half_per_cent_whatever_the_scale() -> None:
    left, right = np.array([1.0, 1.0, 1.0, 100.0]), np.array([1.004, 1.006, 0.99, 100.4])
    assert less(left, right).tolist() == [0.5, 1.0, 0.0, 0.5]
    assert spread([np.array([2.0]), np.array([3.0])]).mean == pytest.approx(0.5)


# The rows


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(set(ROWS) - set(TRENDS)))
def test_a_row_is_whole(number: int) -> None:
    computed(number)


@pytest.mark.slow
def test_each_mechanism_of_the_ablation_does_what_the_paper_says_where_responses_queue() -> None:
    row = computed(7)
    for what in ("+DP cuts the cost", "+PA cuts the cost", "+AS cuts the time", "+AS leaves the cost"):
        assert of(row, what, PAPER_ESTIMATE).verdict == "matches", what


@pytest.mark.slow
def test_without_queues_deduplicated_prefill_saves_no_cost_in_todays_engines() -> None:
    """The engine's prefix cache has that saving already."""
    row = computed(7)
    options = "exact estimate, no slot waves"
    assert of(row, "+DP cuts the cost", options).verdict == "differs"
    assert of(row, "+PA cuts the cost", options).verdict == "matches"
    assert of(row, "+AS cuts the time", options).verdict == "matches"


@pytest.mark.slow
def test_a_sweet_spot_needs_a_bill_for_waiting() -> None:
    """Replayed cost only rises with the actors, waves or not; the paper's estimate sees a minimum."""
    row = computed(8)
    spot, faster = "a sweet spot", "steps in which"
    for options in (
        "exact estimate, no waves",
        "paper's estimate, no waves",
        PAPER_ESTIMATE,
        "exact estimate, KV waves (25,000 tokens an actor)",
    ):
        assert of(row, spot, options).verdict == "differs", options
        assert of(row, faster, options).verdict == "differs", options
    billed = "exact estimate, no waves, the learner's waiting billed"
    assert of(row, spot, billed).verdict == "matches"
    assert of(row, faster, billed).verdict == "differs"  # lambda 0.7 goes past the cheapest count
    assert of(row, faster, f"{billed}, lambda 0").verdict == "matches"
    (figure,) = row.figures
    estimated = figure.panels["estimated GPU s over the least"]

    def cheapest(options: str) -> float:
        own = [p for p in estimated if p.series == options]
        return float(min(own, key=lambda p: p.y.mean).x)

    assert cheapest("exact estimate, no waves") == 1
    assert cheapest("paper's estimate, no waves") > 1
    assert cheapest(PAPER_ESTIMATE) > 1


@pytest.mark.slow
def test_the_window_of_the_length_history_hardly_matters() -> None:
    assert {f.verdict for f in computed(10).findings} == {"matches"}


@pytest.mark.slow
def test_a_smaller_threshold_costs_less_and_takes_longer_where_slots_are_open() -> None:
    row = computed(11)
    cheap, slow, flat = "a smaller tau costs less", "a smaller tau makes steps longer", "the cost is flat"
    for options in ("scaled actors, slots as assigned", "scaled actors, 256 slots"):
        assert of(row, cheap, options).verdict == "matches", options
        assert of(row, slow, options).verdict == "matches", options
    # The cut waits for slots that the rest fits, and where that is late anyway, tau decides nothing.
    scarce = "scaled actors, slots as assigned, GRPO"
    assert of(row, cheap, scarce).verdict == "differs"
    assert of(row, slow, scarce).verdict == "differs"
    assert {f.verdict for f in row.findings if f.what.startswith(flat)} == {"matches"}


@pytest.mark.slow
def test_lambda_trades_time_for_cost_where_cost_rises_with_actors() -> None:
    row = computed(12)
    exact = "exact estimate, no waves"
    assert of(row, "a larger lambda shortens", exact).verdict == "matches"
    assert of(row, "a larger lambda costs more", exact).verdict == "matches"
    assert of(row, "lambda 0.7 has the second-shortest step", exact).verdict == "matches"
    # With cost rising throughout, 0.7 of 0.3, 0.5, 0.7, 0.9 cannot be second in cost as well.
    assert of(row, "lambda 0.7 has the second-lowest cost", exact).verdict == "differs"


@pytest.mark.slow
def test_lambda_does_nothing_where_the_estimate_falls_with_actors() -> None:
    """By the paper's estimate sorted blocks cost less on more actors, so every lambda takes as many."""
    row = computed(12)
    for options in (PAPER_ESTIMATE, "paper's estimate, no waves"):
        assert of(row, "a larger lambda shortens", options).ours == "in 50% of the pairs (all tie)"


@pytest.mark.slow
def test_steps_shorten_with_the_nodes() -> None:
    assert {f.verdict for f in computed(14).findings} == {"matches"}


def test_three_responses_a_prompt_save_two_thirds_of_the_prefill() -> None:
    cell = gsm8k("grpo").but(
        "trace.prompts=64",
        "trace.prompts_per_step=32",
        "trace.epochs=1",
        "trace.block_tokens=null",
        "options.engine.prefix_caching=false",
    )
    local, once = (lab(1).runs(cell, "rlhfless_naive", *parts) for parts in ((), (ONE_PREFILL,)))
    assert (local.steps[0]["prefill_tokens"] == 3 * once.steps[0]["prefill_tokens"]).all()
    trace = lab(1).workload(cell).traces[0]
    for step, tokens in zip(trace.steps, once.steps[0]["prefill_tokens"], strict=True):
        rows = trace.step == step
        distinct = dict(zip(trace.prompt[rows].tolist(), trace.prompt_tokens[rows].tolist(), strict=True))
        assert tokens == sum(distinct.values())


def test_overrides_change_the_cell_and_the_policy() -> None:
    cell = gsm8k("grpo").but("trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=1", NO_WAVES)
    workload = lab(1).workload(cell)
    assert workload.setting.profile.actor.max_running == 4096
    runs = lab(1).runs(cell, "serverless_fixed", "scale.actors=2")
    steps = list(
        simulate(workload.traces[0], changed_policy("serverless_fixed", "scale.actors=2"), workload.setting)
    )
    assert runs.steps[0]["gpu_seconds"].tolist() == [step.outcome.gpu_seconds for step in steps]
    assert set(runs.steps[0]["actors"]) == {2}
    with pytest.raises(InputError, match="no override"):
        changed_policy("serverless_fixed", "scale.actors")
    with pytest.raises(InputError, match="policy no_such does not exist"):
        changed_policy("no_such")


# The verb


def test_a_row_and_a_figure_are_written_and_the_same_bytes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        reproduce.main(["row=13", "figure=3c", "seeds=1", f"out={tmp_path / folder}"])
    printed = capsys.readouterr()
    assert printed.err == ""
    names = {path.name for path in (tmp_path / "a").iterdir()}
    figures = {"figure_3c.csv", "figure_3c.svg", "figure_3c_prompts.csv", "figure_3c_prompts.svg"}
    assert names == figures | {"reproduction.md", "reproduction.csv", "runs.csv", "timings.json"}
    for name in names - {"timings.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    with (tmp_path / "a" / "reproduction.csv").open() as file:
        records = list(csv.DictReader(file))
    assert {record["row"] for record in records} == {"3", "13"}
    for record in records:
        measured = record["row"] == "13"
        assert (record["mean"] == "") == measured
        assert record["verdict"] in ("matches", "same direction", "differs") or measured
    counted = Counter(record["verdict"] for record in records)
    timings = json.loads((tmp_path / "a" / "timings.json").read_text())
    assert [f["row"] for f in timings["findings"]] == [13] * 6
    assert all(0 < f["low"] <= f["high"] for f in timings["findings"])
    counted.update(f["verdict"] for f in timings["findings"])
    last = [line for line in printed.out.splitlines() if "same direction, " in line][-1]
    assert last.endswith(f"{counted['differs']} differs")


def test_without_matplotlib_the_points_are_there_and_one_line_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reproduce.main(["figure=row5", "seeds=1", f"out={tmp_path}"])
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "pip install 'rlhfless[plot]'" in printed.err
    assert (tmp_path / "figure_row5.csv").is_file()
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("row=17", "row 17 does not exist; rows are 1 to 16"),
        ("figure=15d", "figure 15d is not reproduced; figures are 10, "),
        ("format=gif", "format: Input should be 'svg' or 'png' (got 'gif')"),
        ("seeds=0", "seeds: Input should be greater than or equal to 1 (got 0)"),
        ("options.engine.no_such=1", "no_such"),
    ],
)
def test_what_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        reproduce.main([argument, f"out={tmp_path / 'out'}"])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "out").exists()
