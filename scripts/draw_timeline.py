"""Draw one step of one or more runs below each other, as SVG or PNG.

    rlhfless replay policy=verl out=out/verl
    rlhfless replay policy=rlhfless out=out/rlhfless
    python -m rlhfless.scripts.draw_timeline out/verl out/rlhfless --step 14 --out timeline.svg

Takes folders that ``rlhfless replay`` wrote, or their timeline.json.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless.scripts.common import guarded, write_files
from rlhfless.scripts.timeline import (
    LOOKS,
    MIGRATION_COLOR,
    RunTimeline,
    StepTimeline,
    look_of,
    read_trace_events,
)
from rlhfless.traces.errors import InputError
from rlhfless.traces.files import read_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Hatches of matplotlib for the patterns of ``LOOKS``; repeated letters make it denser.
_HATCHES = {"": "", ".": "...", "-": "---", "x": "xxx", "/": "////", "\\": "\\\\\\"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder or timeline.json")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="which step (default 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="an .svg or a .png")
    options = parser.parse_args(arguments)

    def draw() -> None:
        kind = options.out.suffix.removeprefix(".")
        if kind not in ("svg", "png"):
            raise InputError(f"{options.out}: must end in .svg or .png")
        chosen = [_step_of(path, options.step) for path in options.run]
        write_files(options.out.parent, {options.out.name: step_drawing(chosen, kind)})

    guarded(draw)


def _step_of(path: Path, number: int) -> tuple[RunTimeline, StepTimeline]:
    file = path / "timeline.json" if path.is_dir() else path
    run = read_trace_events(read_bytes(file).decode(), str(file))
    found = [step for step in run.steps if step.step == number]
    if not found:
        raise InputError(f"{file}: no step {number}, steps are {run.steps[0].step} to {run.steps[-1].step}")
    return run, found[0]


def step_drawing(steps: Sequence[tuple[RunTimeline, StepTimeline]], kind: str) -> bytes:
    """Draw steps, each with its run, below each other on one scale of time; ``kind`` is svg or png.

    The same steps give the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with mpl.rc_context({"svg.hashsalt": "rlhfless", "hatch.linewidth": 0.6, "font.size": 9}):
        rows = [run.nodes * (run.gpus_per_node + 0.5) + 1 for run, _ in steps]
        figure = Figure(figsize=(10, 0.17 * sum(rows) + 0.55 * len(steps) + 0.6), facecolor="white")
        drawn = figure.subplots(len(steps), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (run, step) in zip(drawn, steps, strict=True):
            _draw_step(axes, run, step)
        drawn[-1].set_xlabel("seconds since the new weights")
        key = [
            Patch(facecolor=look.color, hatch=_HATCHES[look.pattern], edgecolor=look.ink, label=look.label)
            for look in LOOKS
        ]
        key.append(Patch(facecolor=MIGRATION_COLOR, label="responses migrate"))
        figure.legend(handles=key, loc="lower center", ncols=5, frameon=False, handlelength=2.4)
        figure.subplots_adjust(
            left=0.105, right=0.99, top=0.96, bottom=1.05 / figure.get_figheight(), hspace=0.2
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _draw_step(axes: Axes, run: RunTimeline, step: StepTimeline) -> None:
    row = {gpu: gpu + 0.5 * (gpu // run.gpus_per_node) for gpu in range(run.nodes * run.gpus_per_node)}

    def at(time: int) -> float:
        return (time - step.began) / 1e6

    first = min(step.began, *(span.start for span in step.spans))
    axes.barh(
        list(row.values()), at(step.ended) - at(first), left=at(first), height=0.84, color="#f4f4f2", zorder=0
    )
    for span in step.spans:
        look = LOOKS[look_of(span)]
        if not span.gpus:
            continue
        axes.barh(
            [row[gpu] + 0.3 * look.thin for gpu in span.gpus],
            at(span.end) - at(span.start),
            left=at(span.start),
            height=0.24 if look.thin else 0.84,
            color=look.color,
            hatch=_HATCHES[look.pattern],
            edgecolor=look.color if look.thin else look.ink,
            linewidth=0.4,
            zorder=3 if look.thin else 2,
        )
        room = at(span.end) - at(span.start)
        name = span.function.replace("decode.", "decode ")
        if look.busy and room > 0.009 * len(name) * at(step.ended):
            around = {"facecolor": look.color, "edgecolor": "none", "pad": 0.8}
            axes.text(
                at(span.start) + 0.1, row[span.gpus[0]], name, va="center", fontsize=7, bbox=around, zorder=4
            )
    for move in step.moves:
        ends = [row[step.actors[actor].gpus[0]] for actor in (move.target, move.source)]
        axes.annotate(
            "",
            (at(move.ready), ends[0]),
            (at(move.sent), ends[1]),
            arrowprops={
                "arrowstyle": "-|>",
                "color": MIGRATION_COLOR,
                "linewidth": 1,
                "shrinkA": 0,
                "shrinkB": 0,
            },
            zorder=5,
        )
    for time in (step.began, step.generated, step.ended):
        axes.axvline(at(time), color="black", linestyle=":", linewidth=0.9, zorder=1)
    axes.set_title(
        f"{run.policy}, step {step.step}: {at(step.ended):.1f} s, generation {at(step.generated):.1f} s",
        loc="left",
        fontsize=9,
        fontweight="bold",
    )
    middles = [
        (row[node * run.gpus_per_node] + row[(node + 1) * run.gpus_per_node - 1]) / 2
        for node in range(run.nodes)
    ]
    axes.set_yticks(middles, [f"node {node}\n{run.gpus_per_node} GPUs" for node in range(run.nodes)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(row.values()) + 0.6, -0.6)
    axes.margins(x=0.005)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
