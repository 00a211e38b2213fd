"""The figures over sweeps, each a function from cells to drawings.

A drawing function takes the cells and returns a figure for each setting (a workload on its GPUs), by a title.
Where the cells do not hold what it needs, it says in one line what to sweep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from rlhfless.models.scores import Interval95, interval
from rlhfless.scripts.figures_style import (
    Look,
    from_zero,
    legend,
    looks,
    points,
    sheet,
    spread,
    styled,
)
from rlhfless.scripts.records import LATENCY, WAIT
from rlhfless.scripts.results import GROUPS, Sweep, Value, order_of
from rlhfless.scripts.scoreboard import SCORES, Board, Row, boards, label, value_text
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray

#: Stages of a step in the order of the pipeline, as the split of its time names them, with shade and hatch;
#: what is no work is white or light, and with the hatches all differ in grey too.
_STAGES = {
    "planning": ("#000000", ""),
    WAIT: ("#FFFFFF", ""),
    "weight_sync": ("#CFE8F5", "||||"),
    "prefill": ("#56B4E9", "...."),
    "kv_transfer": ("#CFE8F5", "----"),
    "decode": ("#0072B2", ""),
    "reward": ("#F7E6B5", "xxxx"),
    "old_log_prob": ("#F0C862", "////"),
    "reference": ("#F0C862", "\\\\\\\\"),
    "value": ("#F0C862", "oo"),
    "update_critic": ("#D9D9D9", "++++"),
    "update_actor": ("#E69F00", ""),
}

_TIME, _COST = "step_seconds", "gpu_seconds"
_CURVES = (_TIME, "generation_seconds", _COST)

#: What cells lack that a replay of an earlier version or a comparison wrote.
_OLD = "cells of rlhfless replay -m with details.csv, actors.csv and lengths.csv (comparisons have none)"


class NotInSweepError(InputError):
    """The cells do not hold what a figure needs; the message says what to sweep."""


@dataclass(frozen=True)
class Drawing:
    """A figure of one setting."""

    title: str
    figure: Figure


@dataclass(frozen=True)
class Request:
    """What is drawn: the cells, which swept key (None: every one), and whether measured times may be shown."""

    sweep: Sweep
    key: str | None = None
    timings: bool = False


def _titled(board: Board, figure: Figure) -> Drawing:
    figure.suptitle(board.title)
    return Drawing(board.title, figure)


def _named(board: Board) -> list[tuple[str, Row, Look]]:
    """Return a board's rows with their names and looks; a star marks those that train on other responses."""
    names = [row.label if row.delivers_all else f"{row.label} *" for row in board.rows]
    look = looks(names)
    return [(name, row, look[name]) for name, row in zip(names, board.rows, strict=True)]


def _axis(score: str) -> str:
    known = SCORES[score]
    return f"{known.title} ({known.unit})" if known.unit else known.title


def cost_time(request: Request) -> list[Drawing]:
    """Cost against time: a small point a step, a large one a policy's mean with its interval (the paper's fig. 11)."""
    drawn = []
    for board in boards(request.sweep, scores=(_TIME, _COST)):
        figure, (axes,) = sheet(1, width=4.6, height=3.2)
        for name, row, look in _named(board):
            if not row.delivers_all:
                continue
            steps = pl.concat([cell.steps.select(_TIME, _COST) for cell in row.cells])
            axes.plot(
                steps[_TIME],
                steps[_COST],
                look.marker,
                color=look.color,
                alpha=0.3,
                markersize=2.5,
                markeredgewidth=0,
            )
            time, cost = row.scores[_TIME], row.scores[_COST]
            axes.errorbar(
                time.mean,
                cost.mean,
                xerr=spread([time]),
                yerr=spread([cost]),
                label=name,
                color=look.color,
                marker=look.marker,
                markersize=7,
                markeredgecolor="white",
                linestyle="none",
                elinewidth=0.8,
                zorder=3,
            )
        axes.set_xlabel(_axis(_TIME))
        axes.set_ylabel(_axis(_COST))
        legend(figure, axes, 3)
        drawn.append(_titled(board, figure))
    return drawn


def actor_work(request: Request) -> list[Drawing]:
    """What each actor is given, and when it ends (the paper's fig. 12); means over the steps that have the actor."""
    drawn = []
    panels = (
        ("responses", "responses given", 1.0),
        ("tokens", "tokens given (thousands)", 1e-3),
        ("released", "released after (s)", 1.0),
    )
    for board in boards(request.sweep, scores=(_TIME,)):
        rows = [item for item in _named(board) if any(cell.actors() is not None for cell in item[1].cells)]
        if not rows:
            continue
        figure, every = sheet(len(panels), width=2.6)
        for name, row, look in rows:
            actors = pl.concat([frame for cell in row.cells if (frame := cell.actors()) is not None])
            means = actors.group_by("actor").agg(pl.col(key).mean() for key, _, _ in panels).sort("actor")
            for axes, (key, _, factor) in zip(every, panels, strict=True):
                axes.plot(
                    means["actor"],
                    means[key] * factor,
                    color=look.color,
                    marker=look.marker,
                    linestyle=look.line,
                    label=name,
                )
        for axes, (_, title, _) in zip(every, panels, strict=True):
            axes.set_xlabel("actor")
            axes.set_ylabel(title)
            axes.xaxis.get_major_locator().set_params(integer=True)
            from_zero(axes)
        legend(figure, every[0])
        drawn.append(_titled(board, figure))
    return drawn or _refuse(_OLD)


def actor_count(request: Request) -> list[Drawing]:
    """Actors, time and cost over the steps (the paper's fig. 13); means over seeds, dotted lines begin epochs."""
    drawn = []
    panels = ("actors", _TIME, _COST)
    for board in boards(request.sweep, scores=panels):
        figure, every = sheet(len(panels), rows=len(panels), width=6.0, height=1.6)
        for name, row, look in _named(board):
            steps = pl.concat([cell.steps.select("step", "epoch", *panels) for cell in row.cells])
            by_step = steps.group_by("step").mean().sort("step")
            for axes, key in zip(every, panels, strict=True):
                axes.plot(
                    by_step["step"],
                    by_step[key],
                    color=look.color,
                    marker=look.marker,
                    linestyle=look.line,
                    label=name,
                    markevery=max(len(by_step) // 12, 1),
                    markersize=3.5,
                )
        plain = next((row for row in board.rows if row.delivers_all), board.rows[0])
        epochs = plain.cells[0].steps.group_by("epoch").agg(pl.col("step").min()).sort("epoch")
        for axes, key in zip(every, panels, strict=True):
            axes.set_ylabel(_axis(key))
            from_zero(axes)
            for first in epochs["step"].to_list()[1:]:
                axes.axvline(first - 0.5, color="0.4", linestyle=":", linewidth=0.8)
            axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in every[:-1]:
            axes.tick_params(labelbottom=False)
        every[-1].set_xlabel("step")
        every[0].yaxis.get_major_locator().set_params(integer=True)
        legend(figure, every[0])
        drawn.append(_titled(board, figure))
    return drawn


def sensitivity(request: Request) -> list[Drawing]:
    """Time and cost over the values of a swept key (the paper's figs. 14 and 15), a line for each other choice."""
    factors = request.sweep.factors
    keys = [name for name in factors if name not in GROUPS and not name.startswith("cluster.")]
    if request.key is not None:
        if request.key not in factors:
            raise InputError(
                f"--key {request.key}: cells do not differ in it; they differ in {', '.join(factors) or 'nothing'}"
            )
        keys = [request.key]
    drawn = []
    for key in keys:
        for board in boards(request.sweep, by=tuple(dict.fromkeys(("policy", key))), scores=_CURVES):
            figure = _curves(board, key, {key}, lambda row, key=key: row.values[key])  # type: ignore[misc]
            if figure is not None:
                drawn.append(Drawing(f"{key}, {board.title}", _titled(board, figure).figure))
    return drawn or _refuse(
        "two or more values of a key for the same policy and workload, such as policy=rlhfless "
        "policy.scale.weight=0.3,0.5,0.7,0.9"
    )


def scaling(request: Request) -> list[Drawing]:
    """Time and cost over the nodes of the cluster (the paper's fig. 16)."""
    sweep = request.sweep
    by = ("policy", "cluster", *(name for name in sweep.factors if name == "learner_gpus"))
    drawn = []
    for board in boards(sweep, by=by, scores=_CURVES):
        hidden = {name for name in board.by if name.split(".")[0] == "cluster"}
        learners = {(row.cells[0].nodes, row.values.get("learner_gpus")) for row in board.rows}
        if len(learners) == len({nodes for nodes, _ in learners}):
            hidden.add("learner_gpus")
        figure = _curves(board, "nodes", hidden, lambda row: row.cells[0].nodes)
        if figure is not None:
            drawn.append(_titled(board, figure))
    return drawn or _refuse("clusters of several sizes, such as cluster=h100_4x8 cluster.nodes=1,2,4,8")


def _curves(board: Board, title: str, hidden: Collection[str], x_of: Callable[[Row], Value]) -> Figure | None:
    """Draw a board's scores over a value of its rows; None where no line would have two points."""
    series: dict[str, list[Row]] = defaultdict(list)
    for row in board.rows:
        if x_of(row) is not None:
            series[label({key: v for key, v in row.values.items() if key not in hidden})].append(row)
    series = {name: rows for name, rows in series.items() if len({x_of(row) for row in rows}) > 1}
    if not series:
        return None
    places = sorted({x_of(row) for rows in series.values() for row in rows}, key=order_of)
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in places)
    at = {x: float(x) if numeric else float(n) for n, x in enumerate(places)}  # type: ignore[arg-type]
    look = looks(series)
    figure, every = sheet(len(_CURVES), width=2.6)
    for axes, score in zip(every, _CURVES, strict=True):
        for name, rows in series.items():
            rows = sorted(rows, key=lambda row: at[x_of(row)])
            points(
                axes, [at[x_of(row)] for row in rows], [row.scores[score] for row in rows], look[name], name
            )
        if numeric and min(at.values()) > 0 and max(at.values()) >= 8 * min(at.values()):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(list(at.values()), [value_text(x) for x in places])
        axes.set_xlabel(title)
        axes.set_ylabel(_axis(score))
    legend(figure, every[0], 3)
    return figure


def breakdown(request: Request) -> list[Drawing]:
    """Where a step's time goes, along the path that decides it (the paper's fig. 17)."""
    drawn = []
    for board in boards(request.sweep, scores=(_TIME,)):
        parts = {name: _latency(row, request.timings) for name, row, _ in _named(board)}
        parts = {name: part for name, part in parts.items() if part}
        if not parts:
            continue
        stages = [name for name in _STAGES if any(part.get(name, 0.0) > 0 for part in parts.values())]
        figure, (axes,) = sheet(1, width=6.4, height=0.7 + 0.3 * len(parts))
        left = np.zeros(len(parts))
        for stage in stages:
            shade, hatch = _STAGES[stage]
            seconds = np.array([part.get(stage, 0.0) for part in parts.values()])
            axes.barh(
                list(parts),
                seconds,
                left=left,
                height=0.7,
                color=shade,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.4,
                label=stage.replace("_", " "),
            )
            left += seconds
        for y, total in enumerate(left):
            axes.text(total, y, f" {total:.1f} s", va="center", fontsize=7.5)
        axes.set_xlim(0, 1.08 * left.max())
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds of a step (mean)")
        legend(figure, axes, 6)
        drawn.append(_titled(board, figure))
    return drawn or _refuse(_OLD)


def _latency(row: Row, timings: bool) -> dict[str, float]:
    """Return a row's mean seconds a step by stage, over seeds; empty where its cells do not say."""
    frames = [frame for cell in row.cells if (frame := cell.details()) is not None]
    if not frames:
        return {}
    stages = dict.fromkeys(name for frame in frames for name in frame.columns if name.startswith(LATENCY))
    means = {
        name.removeprefix(LATENCY): float(
            np.mean([float(frame[name].mean()) if name in frame.columns else 0.0 for frame in frames])  # type: ignore[arg-type]
        )
        for name in stages
    }
    planning = [cell.planning_seconds for cell in row.cells if cell.planning_seconds is not None]
    return {"planning": float(np.mean(planning)), **means} if timings and planning else means


def lengths(request: Request) -> list[Drawing]:
    """Histograms of response lengths by epoch, and their drift over the steps (mean over seeds)."""
    drawn = []
    for board in boards(request.sweep, by=("policy", "cluster", "profile"), scores=(_TIME,)):
        # Lengths are the trace's: any one policy that trains on the trace's own responses shows them.
        cells = next(
            (row.cells for row in board.rows if row.delivers_all and row.cells[0].lengths() is not None), ()
        )
        histograms = [frame for cell in cells if (frame := cell.lengths()) is not None]
        details = [frame for cell in cells if (frame := cell.details()) is not None]
        if not histograms or not details:
            continue
        figure, (left, right) = sheet(2, width=3.6, height=2.8)
        counts = (
            pl.concat(histograms).group_by("epoch", "from_tokens", "to_tokens").agg(pl.col("responses").sum())
        )
        epochs = counts["epoch"].unique().sort().to_list()
        for epoch, look in zip(epochs, looks(map(str, epochs)).values(), strict=True):
            share, edges = _density(counts.filter(pl.col("epoch") == epoch))
            left.stairs(
                share, edges, color=look.color, linestyle=look.line, linewidth=1.1, label=f"epoch {epoch}"
            )
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        left.set_xlabel("response length (tokens)")
        left.set_ylabel("share of responses per doubling")
        from_zero(left)
        _legend_below(left)
        columns = {
            "length_max": "longest",
            "length_p99": "99 %",
            "length_p90": "90 %",
            "length_mean": "mean",
            "length_p50": "median",
        }
        steps = pl.concat(
            [frame.select("step", *(pl.col(c).cast(pl.Float64) for c in columns)) for frame in details]
        )
        by_step = steps.group_by("step").mean().sort("step")
        for column, look in looks(columns).items():
            right.plot(
                by_step["step"],
                by_step[column],
                color=look.color,
                marker=look.marker,
                linestyle=look.line,
                label=columns[column],
                markersize=3,
                markevery=max(len(by_step) // 12, 1),
            )
        right.set_yscale("log", base=2)
        right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        right.xaxis.get_major_locator().set_params(integer=True)
        right.set_xlabel("step")
        right.set_ylabel("response length (tokens)")
        _legend_below(right)
        drawn.append(_titled(board, figure))
    return drawn or _refuse(_OLD)


def _density(counts: pl.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Return the share of responses per doubling of the length, and the edges of its bins, empty ones put in."""
    own = counts.sort("from_tokens")
    low, high = (own[name].to_numpy().astype(np.float64) for name in ("from_tokens", "to_tokens"))
    edges = np.unique(np.concatenate((low, high)))
    share = np.zeros(len(edges) - 1)
    share[np.searchsorted(edges, low)] = own["responses"].to_numpy() / own["responses"].sum()
    return share / np.diff(np.log2(edges)), edges


def _legend_below(axes: Any) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, handlelength=1.8, columnspacing=1.0)


def pareto(request: Request) -> list[Drawing]:
    """Which policies no other beats in both time and cost, and how far generation is from the proven bound.

    Left: a whole step, all billed GPU seconds. Right: generation seconds and decode GPU seconds, with the lower
    bound on the step's true lengths, below which no plan can be in either (``records.detail_rows``).
    """
    drawn = []
    for board in boards(request.sweep, scores=(_TIME, "generation_seconds", _COST)):
        figure, (left, right) = sheet(2, width=3.5, height=3.0)
        whole, decode = [], []
        for name, row, look in _named(board):
            if not row.delivers_all:
                continue
            time, cost = row.scores[_TIME], row.scores[_COST]
            _spot(left, time, cost, look, name)
            whole.append((time.mean, cost.mean))
            gpus = _detail(row, "decode_gpu_seconds")
            if gpus is not None:
                generation = row.scores["generation_seconds"]
                _spot(right, generation, gpus, look, name)
                decode.append((generation.mean, gpus.mean, row))
        if not decode:
            continue
        _front(left, whole)
        _front(right, [(time, cost) for time, cost, _ in decode])
        time_bound = _detail(decode[0][2], "bound_generation_seconds")
        cost_bound = _detail(decode[0][2], "bound_decode_gpu_seconds")
        if time_bound is not None and cost_bound is not None:
            right.axvspan(
                0, time_bound.mean, facecolor="0.9", hatch="////", edgecolor="0.7", linewidth=0, zorder=0
            )
            right.axhspan(
                0, cost_bound.mean, facecolor="0.9", hatch="////", edgecolor="0.7", linewidth=0, zorder=0
            )
            right.text(
                0.98, 0.02, "hatched: below the bound", transform=right.transAxes, ha="right", va="bottom"
            )
            right.set_xlim(0.85 * time_bound.mean, right.get_xlim()[1])
            right.set_ylim(0.85 * cost_bound.mean, right.get_ylim()[1])
        left.set_xlabel(_axis(_TIME))
        left.set_ylabel(_axis(_COST))
        right.set_xlabel(_axis("generation_seconds"))
        right.set_ylabel("decode (GPU s a step)")
        legend(figure, left, 4)
        drawn.append(_titled(board, figure))
    return drawn or _refuse(_OLD)


def _detail(row: Row, column: str) -> Interval95 | None:
    """Return the mean over steps of a column of ``details.csv``, over seeds; None where it is not there."""
    frames = [frame for cell in row.cells if (frame := cell.details()) is not None]
    means = [frame[column].mean() for frame in frames]
    values = [float(mean) for mean in means if mean is not None]  # type: ignore[arg-type]
    return interval(values) if values else None


def _spot(axes: Any, x: Interval95, y: Interval95, look: Look, name: str) -> None:
    axes.errorbar(
        x.mean,
        y.mean,
        xerr=spread([x]),
        yerr=spread([y]),
        label=name,
        color=look.color,
        marker=look.marker,
        markersize=6.5,
        markeredgecolor="white",
        linestyle="none",
        elinewidth=0.8,
        zorder=3,
    )


def _front(axes: Any, spots: Sequence[tuple[float, float]]) -> None:
    """Draw the stairs through the spots that no other beats in both."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(spots):
        if not front or y < front[-1][1]:
            front.append((x, y))
    axes.step(
        [x for x, _ in front], [y for _, y in front], where="post", color="0.5", linewidth=0.9, zorder=1
    )


def _refuse(what: str) -> NoReturn:
    raise NotInSweepError(what)


#: Every figure by its name.
FIGURES: dict[str, Callable[[Request], list[Drawing]]] = {
    "cost_time": cost_time,
    "actor_work": actor_work,
    "actor_count": actor_count,
    "sensitivity": sensitivity,
    "scaling": scaling,
    "breakdown": breakdown,
    "lengths": lengths,
    "pareto": pareto,
}


def draw(name: str, request: Request) -> list[Drawing]:
    """Draw one of ``FIGURES`` in the common style.

    Raises
    ------
    NotInSweepError
        When the cells do not hold what it needs.

    """
    with styled():
        return FIGURES[name](request)
