"""Tables, files and plots of a reproduction."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rlhfless.scripts.report import csv_text, markdown, to_json
from rlhfless.scripts.reproduce_verdicts import Figure, Finding, Point, Row

#: What stands in the files that repeat in place of a measured time.
MEASURED = "measured, in timings.json"

RULES = """\
Verdicts are computed from the numbers:

- a point (a speed-up counts as its gain, 1.35x as 35 %): *matches* if the paper's value lies within our 95 %
  interval or ours within a tenth of it, *same direction* if our interval lies on the paper's side of zero;
- a statement, by the share of comparisons (pairs of a sweep, steps, seeds) in which it holds, differences
  below 0.5 % counting as half: *matches* if the 95 % interval over seeds lies above one half, *same
  direction* if the mean does;
- values said to be alike, by the largest over the smallest less 1: *matches* up to 5 %, *same direction* up
  to 10 %;
- an upper limit: *matches* if the interval ends below it, *same direction* if the mean does;
- else it *differs*.
"""

#: A sweep over such a range is drawn on a logarithmic axis.
_LOG_FROM = 16

_COLORS = ("#1f6fb4", "#d1642a", "#3b9a57", "#8a56a8", "#8c6d31", "#c23b6b")


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print every row with its findings, and how many of each verdict there are."""
    table = Table(show_lines=False)
    for name, width in (
        ("row", 3),
        ("number", 30),
        ("cost model", 24),
        ("paper", 14),
        ("ours", 30),
        ("verdict", 9),
    ):
        table.add_column(name, max_width=width, overflow="fold")
    table.add_column("why")
    for row in rows:
        table.add_row(str(row.number), row.title, "", "", "", "", f"Setting: {row.setting}.", style="bold")
        for f in row.findings:
            table.add_row("", f.what, f.options, f.paper, f.ours, f.verdict, f.reason)
        table.add_section()
    console.print(table)
    console.print(tally(rows), highlight=False)


def tally(rows: Sequence[Row]) -> str:
    """Count the verdicts."""
    counts = Counter(f.verdict for row in rows for f in row.findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("matches", "same direction", "differs"))


def report(rows: Sequence[Row], command: str, seeds: int) -> str:
    """Return the rows as Markdown; measured times are left out, so that the text repeats."""
    parts = [
        "# The paper's numbers and ours",
        "",
        f"`{command}`, {seeds} seeds, mean [95 % interval].",
        "",
        RULES,
    ]
    for row in rows:
        parts += [f"## {row.number}. {row.title}", "", f"{row.setting}.", ""]
        shown = [without_times(f) for f in row.findings]
        table = markdown(
            [
                {
                    "number": f.what,
                    "cost model": f.options,
                    "paper": f.paper,
                    "ours": f.ours,
                    "verdict": MEASURED if f.measured else f.verdict,
                    "why": f.reason,
                }
                for f in shown
            ]
        )
        # Text reads from the left.
        parts += [table[0], "|" + " --- |" * 6, *table[2:]]
        parts.append("")
    return "\n".join(parts)


def without_times(finding: Finding) -> Finding:
    """Return a finding without what cannot repeat."""
    if not finding.measured:
        return finding
    return replace(finding, ours=MEASURED, reason="A wall time of the machine that it ran on.")


def files_of(
    rows: Sequence[Row], command: str, seeds: int, runs: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the files of a reproduction by name; all but timings.json repeat byte for byte."""
    contents = {
        "reproduction.md": report(rows, command, seeds),
        "reproduction.csv": csv_text(finding_rows(rows)),
    }
    if runs:
        contents["runs.csv"] = csv_text(runs)
    figures = [figure for row in rows for figure in row.figures]
    contents |= {f"figure_{f.name}.csv": csv_text(point_rows(f)) for f in figures if not f.measured}
    measured = [(row.number, f) for row in rows for f in row.findings if f.measured]
    if measured:
        contents["timings.json"] = to_json(
            {
                "findings": [
                    {"row": number, "what": f.what, "paper": f.paper, "ours": f.ours, "verdict": f.verdict}
                    | _numbers(f)
                    for number, f in measured
                ],
                "figures": {f.name: point_rows(f) for f in figures if f.measured},
            }
        )
    return contents


def finding_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a record a finding; measured times are left out."""
    records = []
    for row in rows:
        for f in map(without_times, row.findings):
            record: dict[str, Any] = {
                "row": row.number,
                "what": f.what,
                "options": f.options,
                "setting": row.setting,
                "paper": f.paper,
                "ours": f.ours,
            }
            record |= {"mean": None, "low": None, "high": None} if f.measured else _numbers(f)
            records.append(record | {"verdict": MEASURED if f.measured else f.verdict, "reason": f.reason})
    return records


def _numbers(finding: Finding) -> dict[str, float]:
    value = finding.estimate
    return {"mean": value.mean, "low": value.low, "high": value.high}


def point_rows(figure: Figure) -> list[dict[str, Any]]:
    """Return a record a point."""
    return [
        {
            "quantity": quantity,
            "series": p.series,
            "x": str(p.x),
            "mean": p.y.mean,
            "low": p.y.low,
            "high": p.y.high,
        }
        for quantity, points in figure.panels.items()
        for p in points
    ]


def plot(figure: Figure, form: str) -> bytes:
    """Draw a figure, one panel a quantity; ``form`` is svg or png.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.

    """
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    buffer = io.BytesIO()
    # Fixed identifiers and no date: the same points give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": figure.name, "font.size": 9}):
        sheet = Sheet(figsize=(1 + 4.6 * len(figure.panels), 4.2), layout="constrained")
        grid = sheet.subplots(1, len(figure.panels), squeeze=False)[0]
        for axes, (quantity, points) in zip(grid, figure.panels.items(), strict=True):
            _draw(axes, points, figure.kind)
            axes.set_xlabel(figure.x_label)
            axes.set_ylabel(quantity)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.3, linewidth=0.6)
            axes.set_axisbelow(True)
        handles, names = grid[0].get_legend_handles_labels()
        if len(names) > 1:
            sheet.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3), frameon=False)
        number = figure.name.split("_")[0]
        sheet.suptitle(f"Figure {number}: {figure.title}" if number[0].isdigit() else figure.title)
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        sheet.savefig(buffer, format=form, dpi=130, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Any, points: Sequence[Point], kind: str) -> None:
    """Draw the series of one panel with their intervals."""
    series = list(dict.fromkeys(p.series for p in points))
    places = list(dict.fromkeys(p.x for p in points))
    named = kind == "bar" or any(isinstance(x, str) for x in places)
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        own = [p for p in points if p.series == name]
        mean = np.array([p.y.mean for p in own])
        error = np.array([[p.y.mean - p.y.low for p in own], [p.y.high - p.y.mean for p in own]]).clip(min=0)
        color = _COLORS[number % len(_COLORS)]
        if kind == "bar":
            at = np.array([places.index(p.x) for p in own]) + (number - (len(series) - 1) / 2) * width
            axes.bar(at, mean, 0.9 * width, yerr=error, color=color, label=name, error_kw={"linewidth": 0.8})
        else:
            at = np.array([places.index(p.x) if named else float(p.x) for p in own])
            axes.errorbar(at, mean, yerr=error, color=color, label=name, marker="o", markersize=4, capsize=2)
    if named:
        axes.set_xticks(range(len(places)), [fill(str(x), 16) for x in places])
    else:
        numbers = [float(x) for x in places]
        if max(numbers) >= _LOG_FROM * min(numbers):
            axes.set_xscale("log")
        axes.set_xticks(numbers, [f"{x:.0f}" if x >= 10 else f"{x:g}" for x in numbers])
        axes.minorticks_off()
