"""One look for all figures: legible in print, in grey, and to colour-blind readers; the same bytes every time.

Every series differs from the others in colour, marker and line, every bar in colour and hatch. Importing this
module needs matplotlib (``pip install 'rlhfless[plot]'``).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from rlhfless.models.scores import Interval95

#: Okabe and Ito's palette for colour-blind readers without its yellow, in an order in which neighbours differ in
#: lightness too.
COLORS = ("#000000", "#E69F00", "#0072B2", "#CC79A7", "#D55E00", "#56B4E9", "#009E73")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oo", "++++", "||||", "**", "//..")

#: What a file may be, and the keys of its metadata that would hold the date or the machine.
FORMS: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "figure.titlesize": 8,
    "font.size": 8,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "rlhfless",
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
}


def styled() -> AbstractContextManager[None]:
    """Return the context in which figures are made: fonts, lines, grids."""
    return matplotlib.rc_context(_SETTINGS)


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    color: str
    marker: str
    line: Any
    hatch: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Give every name its look, by its place in the order."""
    return {
        name: Look(
            COLORS[n % len(COLORS)],
            MARKERS[n % len(MARKERS)],
            LINES[n % len(LINES)],
            HATCHES[n % len(HATCHES)],
        )
        for n, name in enumerate(dict.fromkeys(names))
    }


def sheet(panels: int, *, rows: int = 1, width: float = 3.4, height: float = 2.7) -> tuple[Figure, list[Any]]:
    """Return a figure with its panels, left to right and then down; sizes in inches a panel."""
    columns = -(-panels // rows)
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for empty in axes[panels:]:
        empty.set_visible(False)
    return figure, axes[:panels]


def points(
    axes: Any, x: Sequence[float], y: Sequence[Interval95], look: Look, name: str, **extra: Any
) -> None:
    """Draw a series of means with their intervals."""
    mean = [value.mean for value in y]
    axes.errorbar(
        x,
        mean,
        yerr=spread(y),
        label=name,
        color=look.color,
        marker=look.marker,
        linestyle=look.line,
        capsize=2,
        elinewidth=0.8,
        **extra,
    )


def spread(values: Sequence[Interval95]) -> list[list[float]]:
    """Return how far intervals reach below and above their means."""
    return [[max(v.mean - v.low, 0.0) for v in values], [max(v.high - v.mean, 0.0) for v in values]]


def legend(figure: Figure, axes: Any, columns: int = 4) -> None:
    """Put the legend of some panel below all panels."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), columns))


def from_zero(axes: Any) -> None:
    """Let the y axis begin at 0, so that heights compare."""
    axes.set_ylim(bottom=0)


def rendered(figure: Figure, form: str) -> bytes:
    """Return a figure's file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=form, dpi=200, metadata=FORMS[form])
    return buffer.getvalue()
