"""Draw the figures of a sweep: PDF and PNG (or SVG), one style, legible in print and in grey.

    rlhfless figures multirun/replay
    rlhfless figures multirun/replay --only pareto,breakdown --format svg --out out/figures
    rlhfless figures multirun/lambda --only sensitivity --key policy.scale.weight

Without --only every figure is drawn that the cells have the data for, and a line says what to sweep for each of
the others. A figure is drawn for each workload on its GPUs. docs/figures.md shows each with its sweep. Needs
matplotlib: pip install 'rlhfless[plot]'.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhfless.scripts.figures_draw import Drawing

#: The figures and what each shows.
NAMES = {
    "cost_time": "cost against time, a point a step (the paper's fig. 11)",
    "actor_work": "each actor's work and when it is released (fig. 12)",
    "actor_count": "actors, time and cost over the steps (fig. 13)",
    "sensitivity": "time and cost over the values of a swept key (figs. 14, 15)",
    "scaling": "time and cost over the nodes of the cluster (fig. 16)",
    "breakdown": "where a step's time goes (fig. 17)",
    "lengths": "histograms of response lengths by epoch, and their drift",
    "pareto": "time against cost with the front, and generation with its lower bound",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    listed = "\n".join(f"  {name:<12} {text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="rlhfless figures",
        description=__doc__,
        epilog=f"figures:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="+", help="folders with results of replay -m")
    parser.add_argument(
        "--only", metavar="NAME[,NAME]", help="which figures (default: all that can be drawn)"
    )
    parser.add_argument("--key", metavar="KEY", help="of sensitivity: the swept key (default: each one)")
    parser.add_argument(
        "--format", default="pdf,png", metavar="FORM[,FORM]", help="pdf, svg, png (default pdf,png)"
    )
    parser.add_argument(
        "--timings", action="store_true", help="show measured planning times, which cannot repeat"
    )
    parser.add_argument("--out", default="out/figures", metavar="FOLDER", help="default out/figures")
    given = parser.parse_args(arguments)

    from rlhfless.scripts.common import guarded

    guarded(lambda: figures(given))


def figures(given: argparse.Namespace) -> None:
    """Draw and write the figures."""
    from rlhfless.scripts.common import console, write_files
    from rlhfless.scripts.results import read_results
    from rlhfless.traces.errors import InputError

    asked = list(NAMES) if given.only is None else given.only.split(",")
    for name in asked:
        if name not in NAMES:
            raise InputError(f"--only {name}: no such figure; figures are {', '.join(NAMES)}")
    try:
        from rlhfless.scripts.figures_draw import NotInSweepError, Request, draw
        from rlhfless.scripts.figures_style import FORMS, rendered
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'rlhfless[plot]'") from None
    forms = given.format.split(",")
    for form in forms:
        if form not in FORMS:
            raise InputError(f"--format {form}: no such format; formats are {', '.join(FORMS)}")
    request = Request(read_results(given.folder), given.key, given.timings)
    contents: dict[str, bytes] = {}
    lacking = []
    for name in asked:
        try:
            drawings = draw(name, request)
        except NotInSweepError as error:
            if given.only is not None:
                raise InputError(f"figure {name} needs {error}") from None
            lacking.append(f"{name}: not drawn, needs {error}")
            continue
        for stem, drawing in zip(file_names(name, drawings), drawings, strict=True):
            contents |= {f"{stem}.{form}": rendered(drawing.figure, form) for form in forms}
    folder = Path(given.out)
    write_files(folder, contents)
    out = console()
    for path in contents:
        out.print(str(folder / path), highlight=False, markup=False, soft_wrap=True)
    for line in lacking:
        print(f"rlhfless: {line}", file=sys.stderr)


def file_names(name: str, drawings: Sequence[Drawing]) -> list[str]:
    """Return a file name for each drawing: the figure's, with the parts of the title in which they differ."""
    if len(drawings) == 1:
        return [name]
    parts = [re.split(r", | on ", drawing.title) for drawing in drawings]
    shared = set.intersection(*map(set, parts))
    return [
        "_".join([name, *(re.sub(r"[^\w.-]+", "-", part) for part in own if part not in shared)])
        for own in parts
    ]


if __name__ == "__main__":
    main()
