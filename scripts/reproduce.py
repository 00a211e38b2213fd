"""Reproduce the numbers of RLHFless (arXiv 2602.22718): the paper's, ours beside them, a verdict and why.

    rlhfless reproduce             # all sixteen rows
    rlhfless reproduce row=11      # one of them, or several: row=[7,11]
    rlhfless reproduce figure=15b  # the row that the figure belongs to, swept and plotted; or figure=all

Writes reproduction.md and .csv (a line a number), runs.csv (every run behind them), figure_<name>.csv (the
points of the figures) and timings.json (measured planning times, which cannot repeat). Plots need matplotlib:
pip install 'rlhfless[plot]'. docs/reproduction.md says how verdicts are found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhfless.scripts.arguments import hydra_parser, parse
from rlhfless.traces.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfless.scripts.reproduce_lab import Lab
    from rlhfless.scripts.reproduce_verdicts import Row


@dataclass(frozen=True)
class Entry:
    """Where a row is computed, and the figures that it fills. A figure ``10_workload`` belongs to ``10``."""

    module: str
    function: str
    figures: tuple[str, ...]

    def compute(self, lab: Lab) -> Row:
        """Run the row."""
        function: Callable[[Lab], Row] = getattr(
            import_module(f"rlhfless.scripts.reproduce_{self.module}"), self.function
        )
        return function(lab)


ROWS = {
    1: Entry("gains", "maxima", ("10",)),
    2: Entry("gains", "workloads", ("10_workload",)),
    3: Entry("parts", "redundant_share", ("3c", "3c_prompts")),
    4: Entry("parts", "deduplicated_prefill", ("13b",)),
    5: Entry("parts", "stable_lengths", ("row5",)),
    6: Entry("rivals", "against_global_cut", ("12",)),
    7: Entry("rivals", "ablation", ("11",)),
    8: Entry("parts", "actor_scaling", ("13a",)),
    9: Entry("rivals", "bad_predictor", ("14",)),
    10: Entry("sweeps", "ewma_windows", ("15a",)),
    11: Entry("sweeps", "cut_thresholds", ("15b",)),
    12: Entry("sweeps", "score_weights", ("15c",)),
    13: Entry("sweeps", "planning_times", ("row13",)),
    14: Entry("sweeps", "strong_scaling", ("16a",)),
    15: Entry("gains", "simulated_average", ("16b",)),
    16: Entry("sweeps", "planning_share", ("17",)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    _, overrides = parse(hydra_parser("reproduce", __doc__), arguments)
    from rlhfless.scripts.common import hydra_verb

    hydra_verb("reproduce", reproduce, overrides)


def chosen_rows(row: Any, figure: Any) -> tuple[list[int], list[str]]:
    """Return the rows to compute and the figures to draw.

    Raises
    ------
    InputError
        For a row or figure that does not exist.

    """
    every = [name for entry in ROWS.values() for name in entry.figures]
    figures: list[str] = []
    for asked in map(str, _several(figure)):
        found = [name for name in every if asked == "all" or name == asked or name.startswith(f"{asked}_")]
        if not found:
            raise InputError(f"figure {asked} is not reproduced; figures are {', '.join(every)}")
        figures += found
    rows = {number for number, entry in ROWS.items() if set(entry.figures) & set(figures)}
    for asked in _several(row):
        if asked not in ROWS:
            raise InputError(f"row {asked} does not exist; rows are 1 to {max(ROWS)}")
        rows.add(asked)
    return sorted(rows) if rows else list(ROWS), figures


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int | float) else list(value)


def reproduce(config: DictConfig) -> None:
    """Run the reproduction that a configuration describes."""
    from rlhfless.scripts.common import advance, console, output_folder, progress, write_files
    from rlhfless.scripts.reproduce_lab import Lab
    from rlhfless.scripts.reproduce_report import files_of, plot, print_rows
    from rlhfless.scripts.workload import plain

    seeds = int(config.seeds)
    if config.format not in ("svg", "png"):
        raise InputError(f"format is {config.format!r}, must be svg or png")
    numbers, figures = chosen_rows(config.row, config.figure)
    lab = Lab(seeds, plain(config.options, "options"))
    rows = []
    with progress(len(numbers), "reproducing") as bar:
        for number in numbers:
            rows.append(ROWS[number].compute(lab))
            advance(bar)
    command = " ".join(["rlhfless reproduce", *_shown(config)])
    contents: dict[str, str | bytes] = dict(files_of(rows, command, seeds, lab.records()))
    drawn = [figure for row in rows for figure in row.figures if figure.name in figures]
    missing = ""
    try:
        contents |= {f"figure_{f.name}.{config.format}": plot(f, config.format) for f in drawn}
    except ImportError:
        missing = "no plot is drawn, since matplotlib is not installed: pip install 'rlhfless[plot]'"
    out = console()
    print_rows(out, rows)
    folder = output_folder(config)
    if folder is not None:
        write_files(folder, contents)
        shown = sorted(name for name in contents if name.startswith("figure_"))
        told = ["reproduction.md", *(shown if figures else [])]
        out.print(
            f"written: {', '.join(str(folder / name) for name in told)}", highlight=False, soft_wrap=True
        )
    if missing:
        print(f"rlhfless: {missing}", file=sys.stderr)


def _shown(config: DictConfig) -> list[str]:
    """Return the choices of rows, figures and seeds as they were given."""
    return [
        f"{key}={str(config[key]).replace(' ', '')}"
        for key in ("row", "figure", "seeds")
        if config[key] is not None
    ]


if __name__ == "__main__":
    main()
