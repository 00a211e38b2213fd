"""The HTML report of a table: its tables, the figures, a timeline of each row, and the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhfless.scripts.page import (
    ImageSection,
    LinesSection,
    Section,
    TableSection,
    TextSection,
    TimelineSection,
    report_page,
)
from rlhfless.scripts.results import GROUPS, Sweep
from rlhfless.scripts.scoreboard import Board, value_text
from rlhfless.scripts.table import Entry, notes, outdated_line, sheets


def table_page(sweep: Sweep, made: Sequence[Board], images: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return the report; ``images`` are titles, SVG texts and captions.

    Timelines are those of the first seed of every row.
    """
    sections: list[Section] = [LinesSection("What was replayed", [board.title for board in made])]
    for board in made:
        pair = sheets(board)
        for number, sheet in enumerate(pair):
            sections.append(
                TableSection(
                    sheet.title,
                    [dict(zip(sheet.headings, map(_text, row), strict=True)) for row in sheet.rows],
                    text_columns=sheet.names,
                    bold={
                        (n, heading)
                        for n, row in enumerate(sheet.rows)
                        for heading, entry in zip(sheet.headings, row, strict=True)
                        if entry.best
                    },
                    notes=notes(board, made) if number == len(pair) - 1 else (),
                )
            )
        if not pair:
            sections.append(LinesSection(board.title, notes(board, made)))
    if sweep.outdated:
        sections.append(LinesSection("Left out", [outdated_line(sweep)]))
    sections += [ImageSection(*image) for image in images]
    for board in made:
        runs = [(row.label, row.cells[0].timeline()) for row in board.rows]
        shown = [replace(run, policy=name) for name, run in runs if run is not None]
        if shown:
            sections.append(TimelineSection(f"Timeline of a step: {board.title}", shown))
    sections.append(TextSection("Configuration", configuration(sweep), folded=True))
    return report_page("Policies compared", sections)


def _text(entry: Entry) -> str:
    return f"{entry.text} {entry.interval}".strip()


def configuration(sweep: Sweep) -> str:
    """Return the configuration of all cells, a line a key: what differs with all its values, then the rest."""
    lines = ["# differs between cells"]
    for name in (*sweep.factors, "seed"):
        found = [cell.seed if name == "seed" else cell.settings.get(name) for cell in sweep.cells]
        lines.append(f"{name}: {', '.join(dict.fromkeys(map(value_text, found)))}")
    lines += ["", "# the same in all cells"]
    same = {key: value_text(value) for key, value in sweep.cells[0].settings.items()} if sweep.cells else {}
    for key in sorted(same, key=lambda key: (key not in GROUPS, key)):
        if all(key in c.settings and value_text(c.settings[key]) == same[key] for c in sweep.cells):
            lines.append(f"{key}: {same[key]}")
    return "\n".join(lines) + "\n"
