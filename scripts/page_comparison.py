"""The HTML report of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfless.scripts.comparison import ComparisonResult, function_rows, overhead_rows
from rlhfless.scripts.page import (
    ChartSection,
    LinesSection,
    Section,
    TableSection,
    TextSection,
    TimelineSection,
    report_page,
)
from rlhfless.scripts.report import (
    against_rows,
    calibration_lines,
    calibration_rows,
    delivery_lines,
    replayed_lines,
    score_rows,
    setting_lines,
)

#: Symbols, dashes and patterns beside colour, so that grey print tells policies and functions apart.
_SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "cross"),
    *("x", "star", "triangle-down", "hexagon", "bowtie"),
)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_COLORS = ("#1f77b4", "#d98c2b", "#2a8c7c", "#5e3c99", "#c2185b", "#8a8a8a", "#222222")
#: Colour and pattern of what GPU seconds are billed for, in the order of a step.
_FUNCTIONS = {
    "prefill": ("#5e3c99", ""),
    "decode": ("#8fbfe4", ""),
    "reference": ("#6fbfae", "."),
    "old_log_prob": ("#6fbfae", "/"),
    "reward": ("#b5d99c", "."),
    "value": ("#b5d99c", "/"),
    "update_critic": ("#f0c98a", "-"),
    "update_actor": ("#e0983c", "-"),
    "held": ("#ffffff", "\\"),
    "learner_waiting": ("#ffffff", "x"),
    "keep_alive": ("#ffffff", "+"),
}


def comparison_page(result: ComparisonResult, configuration: str) -> str:
    """Return the report of a comparison; ``configuration`` is the YAML that it ran with."""
    workload = result.workload
    scores = TableSection(
        f"Scores, mean and 95 % interval over {len(workload.traces)} seeds",
        score_rows(result),
        notes=delivery_lines(result),
    )
    sections: list[Section] = [LinesSection("What was replayed", setting_lines(workload)), scores]
    if result.comparisons:
        sections.append(TableSection("Against the baselines", against_rows(result), text_columns=2))
    timelines = [timeline for run in result.runs for timeline in run.timelines]
    sections += [_cost_against_time(result), TimelineSection("Timeline of a step", timelines)]
    if workload.calibration is not None and workload.log is not None:
        told = (*calibration_lines(workload.calibration, workload.log), *replayed_lines(result))
        sections.append(TableSection("Calibration", calibration_rows(workload.calibration), notes=told))
    sections += [_step_times(result), _by_function(result)]
    sections.append(TableSection("Billed GPU seconds a step, by function", function_rows(result)))
    sections.append(TableSection("GPU seconds a step beside the work, billed or not", overhead_rows(result)))
    sources = [f"{key}: {text}" for key, text in workload.setting.profile.source.items()]
    sections.append(LinesSection("Sources", [*sources, f"trace: {workload.traces[0].source}"]))
    sections.append(TextSection("Configuration", configuration, folded=True))
    return report_page(f"Comparison of policies on {workload.name}", sections)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": "#e8e8e8", "zeroline": False, "showline": True, **more}


def _layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"xaxis": x, "yaxis": y, "height": 400, "margin": {"l": 70, "r": 20, "t": 20, "b": 50}, **more}


def _cost_against_time(result: ComparisonResult) -> ChartSection:
    """Draw GPU seconds against seconds of a step, with the intervals of both."""
    traces = []
    for number, run in enumerate(result.runs):
        trace: dict[str, Any] = {"type": "scatter", "mode": "markers", "name": run.name}
        for axis, column in (("x", "step_seconds"), ("y", "gpu_seconds")):
            value = run.summary(column)
            trace[axis] = [value.mean]
            trace[f"error_{axis}"] = {
                "array": [value.high - value.mean],
                "arrayminus": [value.mean - value.low],
                "color": "#888",
                "thickness": 1,
            }
        color = _COLORS[number % len(_COLORS)]
        line = {"color": "#222", "width": 1}
        marker = {"size": 12, "symbol": _SYMBOLS[number % len(_SYMBOLS)], "color": color, "line": line}
        traces.append({**trace, "marker": marker})
    layout = _layout(_axis("seconds a step"), _axis("billed GPU seconds a step"), showlegend=True)
    return ChartSection(
        "Cost against time",
        traces,
        layout,
        "Billed GPU seconds against seconds of a step, mean and 95 % interval over seeds; lower left is better.",
    )


def _step_times(result: ComparisonResult) -> ChartSection:
    """Draw the seconds of each step of the first seed."""
    traces = []
    for number, run in enumerate(result.runs):
        own = [step for step in run.steps if step["seed"] == 0]
        line = {"color": _COLORS[number % len(_COLORS)], "dash": _DASHES[number % len(_DASHES)], "width": 2}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": run.name,
                "x": [step["step"] for step in own],
                "y": [round(step["step_seconds"], 6) for step in own],
                "line": line,
            }
        )
    layout = _layout(_axis("step"), _axis("seconds"), showlegend=True)
    return ChartSection("Seconds of every step", traces, layout, "Seconds of every step, seed 0.")


def _by_function(result: ComparisonResult) -> ChartSection:
    """Draw where the billed GPU seconds of each policy go."""
    means = {run.name: run.function_means() for run in result.runs}
    named = {name for split in means.values() for name in split}
    traces = []
    for function, (color, pattern) in _FUNCTIONS.items():
        if function in named:
            marker = {
                "color": color,
                "line": {"color": "#444", "width": 0.6},
                "pattern": {
                    "shape": pattern,
                    "bgcolor": color,
                    "fgcolor": "#555",
                    "size": 7,
                    "solidity": 0.2,
                },
            }
            x = [round(split.get(function, 0.0), 6) for split in means.values()]
            bar = {"type": "bar", "orientation": "h", "name": function, "y": list(means), "x": x}
            traces.append({**bar, "marker": marker})
    layout = _layout(
        _axis("billed GPU seconds a step"),
        {"autorange": "reversed", "automargin": True},
        barmode="stack",
        showlegend=True,
        legend={"traceorder": "normal"},
        height=140 + 34 * len(means),
    )
    return ChartSection(
        "Where the GPU seconds go", traces, layout, "Billed GPU seconds a step by function, mean over seeds."
    )
