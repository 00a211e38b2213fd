r"""Put the cells of sweeps together to tables: Markdown, CSV and LaTeX.

    rlhfless table multirun/replay
    rlhfless table multirun/replay --baseline verl --out out/table
    rlhfless table multirun/lambda --by policy.scale.weight --baseline 0.7 --scores step_seconds,gpu_seconds
    rlhfless table out/compare --baseline serverless_fixed

One table for each workload on its GPUs, a row a policy; every key in which the cells differ becomes a column
(keys of the policy) or a table of its own (all others). Means over steps and seeds with their 95 % bootstrap
interval over seeds; with --baseline also the paired differences on the same seeds, with a sign-flip
permutation test and Holm's correction over the rows. The same cells give the same bytes, whatever their order
and folders; only --timings shows measured planning times.

--out writes table.md, table.csv (a line a row), table.tex (for \input, with booktabs and graphicx), document.tex
(a whole document around it), cells.csv (a line a cell) and report.html (tables, figures, timelines and
configuration in one page that opens without a network).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless.scripts.figures import NAMES

if TYPE_CHECKING:
    from rich.table import Table

    from rlhfless.models.scores import Interval95
    from rlhfless.scripts.results import Sweep
    from rlhfless.scripts.scoreboard import Board, Row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    parser = argparse.ArgumentParser(
        prog="rlhfless table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="+", help="folders with results of replay -m, replay or compare")
    parser.add_argument("--baseline", metavar="ROW", help="the row that the others are compared with")
    parser.add_argument(
        "--by", default="policy", metavar="KEY[,KEY]", help="keys that make the rows (default policy)"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="rows to show, in this order: a name, or key=value[,key=value]",
    )
    parser.add_argument("--scores", metavar="NAME[,NAME]", help="scores to show; a wrong name lists them all")
    parser.add_argument(
        "--timings", action="store_true", help="show measured planning times, which cannot repeat"
    )
    parser.add_argument("--out", metavar="FOLDER", help="where to write the tables")
    given = parser.parse_args(arguments)

    from rlhfless.scripts.common import guarded

    guarded(lambda: table(given))


def table(given: argparse.Namespace) -> None:
    """Print the tables, and write them where a folder is given."""
    from rlhfless.scripts.common import console, write_files
    from rlhfless.scripts.results import read_results
    from rlhfless.scripts.scoreboard import DEFAULT_SCORES, boards

    sweep = read_results(given.folder)
    scores = DEFAULT_SCORES if given.scores is None else tuple(given.scores.split(","))
    if given.timings and "planning_seconds" not in scores:
        scores = (*scores, "planning_seconds")
    made = boards(sweep, by=given.by.split(","), baseline=given.baseline, rows=given.rows, scores=scores)
    out = console()
    for board in made:
        for sheet in sheets(board):
            out.print(_rich(sheet))
        for line in notes(board, made):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        out.print()
    if sweep.outdated:
        out.print(outdated_line(sweep), highlight=False)
    if given.out is not None:
        folder = Path(given.out)
        contents = {**files(sweep, made), "report.html": _page(sweep, made, given.timings)}
        write_files(folder, contents)
        out.print(
            f"written: {', '.join(str(folder / name) for name in contents)}", highlight=False, soft_wrap=True
        )


def _page(sweep: Sweep, made: Sequence[Board], timings: bool) -> str:
    """Return the HTML report, with all figures that can be drawn where matplotlib is installed."""
    from rlhfless.scripts.page_table import table_page

    images = []
    with contextlib.suppress(ImportError):
        from rlhfless.scripts.figures_draw import FIGURES, NotInSweepError, Request, draw
        from rlhfless.scripts.figures_style import rendered

        for name in FIGURES:
            with contextlib.suppress(NotInSweepError):
                for drawing in draw(name, Request(sweep, timings=timings)):
                    svg = rendered(drawing.figure, "svg").decode()
                    images.append((f"{name}: {drawing.title}", svg, NAMES[name]))
    return table_page(sweep, made, images)


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table: a text, an interval after it, and whether it is marked."""

    text: str
    interval: str = ""
    best: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table as text: a title, ``columns`` of headings with their units, and rows of entries."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Entry, ...], ...]
    names: int

    @property
    def headings(self) -> list[str]:
        """Headings with their units, one text a column."""
        return [f"{name} ({unit})" if unit else name for name, unit in self.columns]


def sheets(board: Board) -> list[Sheet]:
    """Return the table of the scores, and where there is a baseline that of the differences."""
    if not board.rows:
        return []
    both = [_score_sheet(board)]
    if any(row.against for row in board.rows):
        both.append(_against_sheet(board))
    return both


def _score_sheet(board: Board) -> Sheet:
    from rlhfless.scripts.scoreboard import SCORES

    columns: list[tuple[tuple[str, str], list[Entry]]] = _name_columns(board, board.rows)
    columns.append((("seeds", ""), [Entry(str(len(row.seeds))) for row in board.rows]))
    for name in board.scores:
        score = SCORES[name]
        values = [row.scores.get(name) for row in board.rows]
        entries = _entries(values, score.factor)
        marked = [
            Entry(e.text, e.interval, name in row.best) for e, row in zip(entries, board.rows, strict=True)
        ]
        columns.append(((score.title, score.unit), marked))
    return _sheet(board.title, columns, len(board.by))


def _against_sheet(board: Board) -> Sheet:
    from rlhfless.scripts.scoreboard import SCORES

    rows = [row for row in board.rows if row.against]
    against = [row.against for row in rows if row.against]
    columns = _name_columns(board, rows)
    columns.append((("pairs", ""), [Entry(str(len(a.seeds))) for a in against]))
    columns.append((("speed-up", "×"), _entries([a.speedup for a in against], digits=3)))
    columns.append((("cost reduction", "%"), _entries([a.cost_reduction for a in against], 100.0, digits=1)))
    for name in board.scores:
        differences = [a.differences.get(name) for a in against]
        if any(differences):
            score = SCORES[name]
            values = [None if d is None else d.value for d in differences]
            columns.append(((f"Δ {score.title}", score.unit), _entries(values, score.factor, signed=True)))
            columns.append(
                ((f"p, {score.title}", ""), [Entry("–" if d is None else _p(d.p_holm)) for d in differences])
            )
    baseline = board.baseline.label if board.baseline else "the baseline"
    return _sheet(f"{board.title}: against {baseline}", columns, len(board.by))


def _name_columns(board: Board, rows: Sequence[Row]) -> list[tuple[tuple[str, str], list[Entry]]]:
    from rlhfless.scripts.scoreboard import value_text

    def text(row: Row, number: int, key: str) -> str:
        value = row.values[key]
        mark = "" if row.delivers_all or number else " *"
        return "–" if value is None and number else f"{value_text(value)}{mark}"

    return [((key, ""), [Entry(text(row, n, key)) for row in rows]) for n, key in enumerate(board.by)]


def _sheet(title: str, columns: Sequence[tuple[tuple[str, str], list[Entry]]], names: int) -> Sheet:
    return Sheet(
        title,
        tuple(heading for heading, _ in columns),
        tuple(zip(*(entries for _, entries in columns), strict=True)),
        names,
    )


def _entries(
    values: Sequence[Interval95 | None],
    factor: float = 1.0,
    *,
    signed: bool = False,
    digits: int | None = None,
) -> list[Entry]:
    """Return a column of means with their intervals, all with the same decimals."""
    largest = max((abs(v.mean * factor) for v in values if v is not None), default=0.0)
    if digits is None:
        digits = 2 if largest < 100 else 1 if largest < 10_000 else 0
    sign = "+" if signed else ""

    def number(value: float) -> str:
        text = f"{value * factor:{sign}.{digits}f}"
        # What rounds to nothing has no sign.
        return text if float(text) else f"{0.0:.{digits}f}"

    return [
        Entry("–")
        if value is None
        else Entry(
            number(value.mean),
            "" if value.low == value.high else f"[{number(value.low)}, {number(value.high)}]",
        )
        for value in values
    ]


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def notes(board: Board, boards: Sequence[Board] = ()) -> list[str]:
    """Say below a table what its numbers are, what is marked, what is missing, and what failed."""
    from rlhfless.scripts.scoreboard import PERMUTATIONS, label, value_text

    seeds = sorted({seed for row in board.rows for seed in row.seeds})
    lines = []
    if board.rows:
        lines.append(
            f"Mean over the steps and over seeds {_span(seeds)}; [95 % bootstrap interval over seeds (BCa)]."
            if len(seeds) > 1
            else f"Mean over the steps of one seed ({_span(seeds)}): no interval."
        )
    if any(row.best for row in board.rows):
        lines.append(
            "Bold: the best mean of a column, and every row whose paired difference to it has a 95 % interval "
            "that contains 0."
            + (
                " Policies that know the true lengths (oracle) are not marked."
                if any("oracle" in str(row.values.get("policy")) for row in board.rows)
                else ""
            )
        )
    if any(row.against for row in board.rows):
        most = max(len(row.against.seeds) for row in board.rows if row.against)
        exact = "exact" if 2**most <= PERMUTATIONS else f"{PERMUTATIONS:,} permutations"
        lines.append(
            f"Δ is the row less the baseline on the same seeds. p: two-sided sign-flip permutation test ({exact}), "
            f"corrected over the rows of the column (Holm); with {most} pairs p is at least {2.0 ** (1 - most):.2g} "
            "before the correction."
        )
    elif board.rows and any(other.baseline for other in boards):
        lines.append("The baseline has no result here.")
    if not all(row.delivers_all for row in board.rows):
        lines.append(
            "* trains on other responses in other steps than the trace, which no time or cost here judges; not "
            "marked, and compared per delivered response."
        )
    for row in board.rows:
        missing = sorted(set(seeds) - set(row.seeds))
        if missing:
            paired = " (paired on the seeds that both have)" if row.against else ""
            lines.append(f"{row.label}: no result for seed {_span(missing)}{paired}.")
    base = board.baseline
    for row in board.rows:
        alone = sorted(set(row.seeds) - set(row.against.seeds)) if row.against and base else []
        if alone:
            lines.append(
                f"{row.label}: seed {_span(alone)} has no partner in {base.label if base else ''}, and is not paired."
            )
    for failure in board.failures:
        values = {key: failure.settings.get(key) for key in board.by}
        lines.append(f"Failed: {label(values) or value_text(None)}, seed {failure.seed}: {failure.error}")
    code = sorted({cell.code for row in board.rows for cell in row.cells if cell.code})
    if len(code) > 1:
        lines.append(f"The results come from different code: rlhfless {'; '.join(code)}.")
    return lines


def outdated_line(sweep: Sweep) -> str:
    """Say that results of changed code are there twice."""
    return f"{sweep.outdated} older results of the same configurations, from other code, are left out: the newest count."


def _span(seeds: Sequence[int]) -> str:
    """Return ascending numbers in short: ``0-4, 7``."""
    parts: list[list[int]] = []
    for seed in seeds:
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def files(sweep: Sweep, made: Sequence[Board]) -> dict[str, str]:
    """Return the files of the tables by name."""
    from rlhfless.scripts.report import csv_text

    return {
        "table.md": markdown_text(made),
        "table.csv": csv_text(_uniform(row_records(made))),
        "table.tex": latex_text(made),
        "document.tex": DOCUMENT,
        "cells.csv": csv_text(_uniform(cell_records(sweep, made))),
    }


def row_records(made: Sequence[Board]) -> list[dict[str, Any]]:
    """Return a record a row: what it is, each score with its interval, and how it stands against the baseline."""
    records = []
    for board in made:
        for row in board.rows:
            record: dict[str, Any] = {**board.setting, **row.values, "seeds": len(row.seeds)}
            for name, value in row.scores.items():
                record |= _interval_record(name, value)
            against = row.against
            if board.baseline and against:
                record |= {"baseline": board.baseline.label, "pairs": len(against.seeds)}
                record |= _interval_record("speedup", against.speedup)
                record |= _interval_record("cost_reduction", against.cost_reduction)
                for name, difference in against.differences.items():
                    record |= _interval_record(f"{name}_difference", difference.value)
                    record |= {f"{name}_p": difference.p, f"{name}_p_holm": difference.p_holm}
            records.append(record)
    return records


def _interval_record(name: str, value: Interval95) -> dict[str, float]:
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def cell_records(sweep: Sweep, made: Sequence[Board]) -> list[dict[str, Any]]:
    """Return a record a cell of the tables: its factors, its seed, and its means over the steps."""
    factors = dict.fromkeys(name for board in made for name in (*board.setting, *board.by))
    shown = {id(cell) for board in made for row in board.rows for cell in row.cells}
    return [
        {**{f: cell.settings.get(f) for f in factors}, "seed": cell.seed, **cell.scores.mean}
        for cell in sweep.cells
        if id(cell) in shown
    ]


def _uniform(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give all records the same keys, and a column that mixes kinds of values text."""
    from rlhfless.scripts.scoreboard import value_text

    keys = dict.fromkeys(key for record in records for key in record)
    whole = [{key: record.get(key) for key in keys} for record in records]
    for key in keys:
        kinds = {isinstance(r[key], str | bool) for r in whole if r[key] is not None}
        if len(kinds) > 1 or any(isinstance(r[key], bool) for r in whole):
            for record in whole:
                record[key] = None if record[key] is None else value_text(record[key])
    return whole


def markdown_text(made: Sequence[Board]) -> str:
    """Return all tables in Markdown."""
    from rlhfless.scripts.report import markdown

    def text(entry: Entry) -> str:
        shown = f"**{entry.text}**" if entry.best else entry.text
        return f"{shown} {entry.interval}".strip().replace("|", "\\|")

    parts = []
    for board in made:
        parts += [f"## {board.title}", ""]
        for number, sheet in enumerate(sheets(board)):
            if number and board.baseline:
                parts += [f"Against {board.baseline.label}:", ""]
            rows = [dict(zip(sheet.headings, map(text, row), strict=True)) for row in sheet.rows]
            parts += [*markdown(rows), ""]
        parts += [*(f"- {note}" for note in notes(board, made)), ""]
    return "\n".join(parts)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
    "–": "--",
    "\n": " ",
}

DOCUMENT = r"""\documentclass[a4paper,landscape]{article}
\usepackage[margin=15mm]{geometry}
\usepackage{booktabs,graphicx}
\begin{document}
\input{table.tex}
\end{document}
"""


def latex_escaped(text: str) -> str:
    """Return a text as LaTeX sets it: special signs written out, a number's minus as one, the rest in ASCII."""
    escaped = "".join(_LATEX.get(sign) or _ascii(sign) for sign in text)
    return re.sub(r"(?<![\w-])-(?=\d)", r"$-$", escaped)


def _ascii(sign: str) -> str:
    """Return a sign without accents, or a question mark where pdfLaTeX's default fonts have none like it."""
    plain = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return plain if plain and plain.isprintable() else "?"


def latex_text(made: Sequence[Board]) -> str:
    """Return all tables in LaTeX, each a float with its notes; needs booktabs and graphicx."""
    parts = [r"% \usepackage{booktabs,graphicx}"]
    for board in made:
        made_sheets = sheets(board)
        for number, sheet in enumerate(made_sheets):
            last = number == len(made_sheets) - 1
            parts += _latex_table(sheet, notes(board, made) if last else [])
        if not made_sheets:
            parts += [latex_escaped(f"{board.title}: {line}") + r"\par" for line in notes(board, made)]
    return "\n".join(parts) + "\n"


def _latex_table(sheet: Sheet, lines: Sequence[str]) -> list[str]:
    def text(entry: Entry) -> str:
        shown = latex_escaped(entry.text)
        shown = rf"\textbf{{{shown}}}" if entry.best else shown
        return rf"{shown} {{\scriptsize {latex_escaped(entry.interval)}}}" if entry.interval else shown

    units = [latex_escaped(f"({unit})") if unit else "" for _, unit in sheet.columns]
    layout = "l" * sheet.names + "r" * (len(sheet.columns) - sheet.names)
    return [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{latex_escaped(sheet.title)}}}",
        # Narrower than the page it stays as it is, else it shrinks to fit.
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        " & ".join(latex_escaped(name) for name, _ in sheet.columns) + r" \\",
        " & ".join(units) + r" \\",
        r"\midrule",
        *(" & ".join(map(text, row)) + r" \\" for row in sheet.rows),
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par\smallskip{{\raggedright\footnotesize {latex_escaped(line)}\par}}" for line in lines),
        r"\end{table}",
    ]


def _rich(sheet: Sheet) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=sheet.title, title_justify="left")
    for number, heading in enumerate(sheet.headings):
        drawn.add_column(heading, justify="left" if number < sheet.names else "right")
    for row in sheet.rows:
        drawn.add_row(
            *(
                Text.assemble((e.text, "bold" if e.best else ""), f" {e.interval}" if e.interval else "")
                for e in row
            )
        )
    return drawn


if __name__ == "__main__":
    main()
