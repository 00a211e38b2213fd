"""One self-contained HTML page: tables, figures, timelines and configuration, opened without a network.

A page is a title and a list of sections. Everything that it needs stands in the file, plotly.js (4.8 MB)
included where a section draws with it. The same sections give the same bytes.

    page = report_page("Comparison", [TableSection("Scores", rows), ImageSection("Cost", svg, "Cost and time")])
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import polars as pl
    from markupsafe import Markup

    from rlhfless.scripts.timeline import RunTimeline

#: Bytes of timelines that a page holds at most, unless one seed alone takes more.
TIMELINE_BYTES = 4_000_000


@dataclass(frozen=True)
class TableSection:
    """A table. Cells are shown as they are (None: empty), so numbers come formatted; units stand in the header.

    ``rows`` are mappings from header to cell, or a polars frame. ``text_columns`` lead and are aligned left, the
    others right. ``bold`` names cells to mark, by row number and header. ``notes`` are lines below the table.
    """

    title: str
    rows: Sequence[Mapping[str, object]] | pl.DataFrame
    text_columns: int = 1
    bold: Collection[tuple[int, str]] = ()
    notes: Sequence[str] = ()
    kind: ClassVar[str] = "table"

    @property
    def header(self) -> list[str]:
        """Return the names of the columns."""
        records = self.records
        return list(records[0]) if records else []

    @property
    def records(self) -> list[dict[str, object]]:
        """Return the rows as mappings."""
        rows = self.rows if isinstance(self.rows, Sequence) else self.rows.to_dicts()
        return [dict(row) for row in rows]


@dataclass(frozen=True)
class ImageSection:
    """A drawing as SVG text, as matplotlib writes it; ``caption`` stands below it and is its text alternative."""

    title: str
    svg: str = field(repr=False)
    caption: str
    kind: ClassVar[str] = "image"

    @property
    def address(self) -> str:
        """Return the drawing as a data address, so that the names inside two drawings cannot clash."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


@dataclass(frozen=True)
class ChartSection:
    """A Plotly figure: its traces and layout, as plain values."""

    title: str
    traces: Sequence[Mapping[str, Any]] = field(repr=False)
    layout: Mapping[str, Any] = field(repr=False)
    caption: str
    kind: ClassVar[str] = "chart"

    @property
    def data(self) -> str:
        """Return the figure as JSON for a script element."""
        return embedded_json({"data": list(self.traces), "layout": dict(self.layout)})


@dataclass(frozen=True)
class TimelineSection:
    """Who runs where in any step of any of the runs; the reader chooses policy, seed and step.

    Where the runs take more than ``TIMELINE_BYTES``, the last seeds are left out and the page says so.
    """

    title: str
    runs: Sequence[RunTimeline] = field(repr=False)
    kind: ClassVar[str] = "timeline"

    @property
    def data(self) -> str:
        """Return the runs as JSON for a script element."""
        from rlhfless.scripts.timeline import LOOKS, MIGRATION_COLOR, compact

        kept: list[dict[str, Any]] = []
        size, seeds = 0, list(dict.fromkeys(run.seed for run in self.runs))
        for seed in seeds:
            packed = [compact(run) for run in self.runs if run.seed == seed]
            size += len(embedded_json(packed))
            if kept and size > TIMELINE_BYTES:
                break
            kept += packed
        left_out = len(seeds) - len({run["seed"] for run in kept})
        return embedded_json(
            {
                "runs": kept,
                "seeds_left_out": left_out,
                "looks": [look._asdict() for look in LOOKS],
                "migration_color": MIGRATION_COLOR,
            }
        )


@dataclass(frozen=True)
class LinesSection:
    """A list of statements."""

    title: str
    lines: Sequence[str]
    kind: ClassVar[str] = "lines"


@dataclass(frozen=True)
class TextSection:
    """Text shown as it is, in a fixed-width font: a configuration. ``folded``: behind its title until opened."""

    title: str
    text: str = field(repr=False)
    folded: bool = False
    kind: ClassVar[str] = "text"


Section = TableSection | ImageSection | ChartSection | TimelineSection | LinesSection | TextSection


def report_page(title: str, sections: Sequence[Section]) -> str:
    """Return a self-contained HTML page with a heading and the sections in order."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rlhfless.scripts"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def own(name: str) -> Markup:
        source, _, _ = environment.loader.get_source(environment, name)  # type: ignore[union-attr]
        return Markup(source)

    scripts: list[Markup] = []
    if any(isinstance(section, ChartSection | TimelineSection) for section in sections):
        scripts = [plotly_source(), own("report.js")]
    page: str = environment.get_template("report.html").render(
        title=title, sections=sections, style=own("report.css"), scripts=scripts
    )
    return page


def plotly_source() -> Markup:
    """Return the text of plotly.js, marked as safe for a script element."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())


def embedded_json(values: Any) -> Markup:
    """Return JSON that may stand inside a script element, whatever its strings say."""
    from markupsafe import Markup

    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
