"""Tables and files of a comparison and of a single replay."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from rlhfless.models.calibrate import Calibration, Errors
from rlhfless.models.scores import Interval95, RunScores, interval, step_record
from rlhfless.policies.simulate import SimulatedStep
from rlhfless.scripts.comparison import ComparisonResult, PolicyRuns, function_rows, overhead_rows
from rlhfless.scripts.records import actor_rows, detail_rows, length_rows
from rlhfless.scripts.timeline import RunTimeline, trace_events
from rlhfless.scripts.workload import Workload
from rlhfless.traces.trace import RunLog

#: Decimal digits that are written; more would carry rounding noise between machines.
_DIGITS = 12


def setting_lines(workload: Workload) -> list[str]:
    """Say in a few lines what was replayed on what."""
    trace, setting = workload.traces[0], workload.setting
    cluster, profile = setting.cluster, setting.profile
    epochs = len(np.unique(trace.epoch))
    mark = " (response lengths reconstructed from the log's aggregates)" if trace.reconstructed else ""
    return [
        f"workload {workload.name}: {trace.algorithm}, {len(trace.steps)} steps in {epochs} epochs, "
        f"{len(trace) / len(trace.steps):g} responses a step, mean {trace.response_tokens.mean():.0f} tokens, "
        f"longest {trace.response_tokens.max()}{mark}",
        f"profile {profile.label()}: {profile.source.get('decode', 'source not stated')}",
        f"cluster {cluster.name}: {cluster.nodes} x {cluster.gpus_per_node} GPUs, "
        f"{profile.actor.gpus} GPUs an actor, {setting.learner_gpus} for the learner; "
        f"{len(workload.traces)} seeds, mean [95 % interval]",
    ]


def print_comparison(console: Console, result: ComparisonResult) -> None:
    """Print what was compared, the calibration where there is one, and the table."""
    for line in setting_lines(result.workload):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    workload = result.workload
    if workload.calibration is not None and workload.log is not None:
        print_calibration(console, workload.calibration, workload.log)
        for line in replayed_lines(result):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    planning = [f"{1e3 * float(np.median(run.planning_seconds)):.1f}" for run in result.runs]
    rows = [{**row, "plan ms": ms} for row, ms in zip(score_rows(result), planning, strict=True)]
    console.print(_table(rows))
    if result.comparisons:
        console.print(_table(against_rows(result)))
    for line in delivery_lines(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def score_rows(result: ComparisonResult) -> list[dict[str, str]]:
    """Return each policy's scores as rows of text."""
    profile = result.workload.setting.profile
    rows = []
    for run in result.runs:
        cost = run.summary("gpu_seconds")
        row = {
            "policy": run.name if run.delivers_all else f"{run.name} *",
            "actors": f"{run.summary('actors').mean:.1f}",
            "step s": _text(run.summary("step_seconds")),
            "generation s": _text(run.summary("generation_seconds")),
            "GPU s a step": _text(cost),
            "busy": f"{run.summary('busy_gpu_seconds').mean / cost.mean:.0%}",
            "moved": f"{run.summary('migrations').mean:.0f}",
        }
        if run.above_bound:
            time, decode = (interval(values) for values in zip(*run.above_bound, strict=True))
            row["generation above bound"] = f"{time.mean:.0%}"
            # A serverful pool is billed whole, decoding or not.
            row["decode above bound"] = "" if decode.mean <= -1 else f"{decode.mean:.0%}"
        elif any(other.above_bound for other in result.runs):
            row |= {"generation above bound": "", "decode above bound": ""}
        if profile.usd_per_gpu_hour and profile.kind != "fitted":
            row["USD a step"] = f"{cost.mean * profile.usd_per_gpu_hour / 3600:.4f}"
        rows.append(row)
    return rows


def against_rows(result: ComparisonResult) -> list[dict[str, str]]:
    """Return each policy against each baseline as rows of text."""
    return [
        {
            "policy": f"{c.policy} *" if c.delivered_only else c.policy,
            "against": c.baseline,
            "speed-up": _text(c.speedup, "x"),
            "cost reduction": _percent(c.cost_reduction),
        }
        for c in result.comparisons
    ]


def delivery_lines(result: ComparisonResult) -> list[str]:
    """Explain the mark of policies that change which responses a step trains on."""
    marked = [run for run in result.runs if not run.delivers_all]
    if not marked:
        return []
    said = "; ".join(
        f"{run.name} delivers {run.summary('responses').mean:.0f} of {run.summary('launched').mean:.0f} launched "
        f"responses a step, {run.summary('stale_tokens').mean / run.summary('response_tokens').mean:.0%} of their "
        f"tokens from earlier steps"
        for run in marked
    )
    return [
        f"* trains on other responses in other steps than the trace, which no time or cost here judges: {said}. "
        f"Speed-up and cost are per delivered response."
    ]


def print_calibration(console: Console, calibration: Calibration, log: RunLog) -> None:
    """Print what a calibration found: disturbances, and the errors of every stage."""
    for line in calibration_lines(calibration, log):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_table(calibration_rows(calibration)))


def calibration_lines(calibration: Calibration, log: RunLog) -> list[str]:
    """Say which steps were fitted, and what disturbed the log."""
    return [
        f"calibration of {log.name}: fitted on the first {calibration.fitted_steps} of {len(log.step)} steps; "
        f"errors on the rest, mean absolute percentages",
        *(
            f"disturbance: {stretch.stage} takes {stretch.slowdown:+.0%} at unchanged lengths in steps "
            f"{stretch.first_step} to {stretch.last_step}; kept out of the fixed fit"
            for stretch in calibration.stretches
        ),
        *([] if calibration.stretches else ["disturbances: none found"]),
        *_decode_lines(calibration),
    ]


def _decode_lines(calibration: Calibration) -> list[str]:
    """Say how well the log tells the parts of the decode cost."""
    if calibration.decode is None:
        return []
    fit = calibration.decode.fit
    units = {
        "iterations": ("ms an iteration", 1e3),
        "tokens": ("us a token", 1e6),
        "resident": ("ns a KV token", 1e9),
    }
    told = []
    for name, (unit, scale) in units.items():
        i = fit.features.index(name)
        value = (
            f"{fit.coefficients[i] * scale:.3g} {unit} [{fit.low[i] * scale:.3g}, {fit.high[i] * scale:.3g}]"
        )
        told.append(value if fit.identified(name) else f"{value}, not identified")
    return [
        f"decode cost: {'; '.join(told)}; {calibration.overhead_seconds:.1f} s a step that no token explains "
        f"(every policy pays them); intervals 95 %"
    ]


def replayed_lines(result: ComparisonResult) -> list[str]:
    """Say how the replay of the logged run compares with the log."""
    log = result.workload.log
    if log is None:
        return []
    logged = float(np.nanmean(log.stages["generation"]))
    return [
        f"the logged run, replayed (policy verl): generation {run.summary('generation_seconds').mean:.2f} s a step; "
        f"the log's mean is {logged:.2f} s, disturbances included"
        for run in result.runs
        if run.name == "verl"
    ]


def calibration_rows(calibration: Calibration) -> list[dict[str, str]]:
    """Return the errors of every stage as rows of text."""
    rows = []
    for stage, report in calibration.stages.items():
        rows.append(
            {
                "stage": stage,
                "fixed": _error(report.fixed),
                "fixed, undisturbed": _error(report.fixed_undisturbed),
                "one step ahead": _error(report.ahead),
                "ahead, last lengths": _error(report.forecast),
                "repeat last time": _error(report.repeat_last),
                "noise floor": f"{report.noise_floor:.1%}",
            }
        )
    decode = calibration.decode
    if decode is not None:
        rows.append(
            {
                "stage": "generation, replayed",
                "fixed": _error(decode.fixed),
                "fixed, undisturbed": _error(decode.fixed_undisturbed),
                **dict.fromkeys(list(rows[0])[3:], ""),
            }
        )
    return rows


def comparison_files(result: ComparisonResult) -> dict[str, str]:
    """Return the files of a comparison by name; ``timings.json`` alone cannot repeat."""
    steps = [{"policy": run.name, **step} for run in result.runs for step in run.steps]
    return {
        "report.md": _report(result),
        "summary.json": to_json(summary(result)),
        "steps.csv": csv_text(steps),
        "timings.json": to_json({run.name: timing(run.planning_seconds) for run in result.runs}),
    }


def replay_files(
    workload: Workload, policy: str, seed: int, steps: Sequence[SimulatedStep]
) -> dict[str, str]:
    """Return the files of a replay by name; ``timings.json`` alone cannot repeat.

    ``summary.json`` holds the means over the steps, ``steps.csv`` the scores of each, ``details.csv`` where its
    time went, its lengths and a bound, ``actors.csv`` a row an actor and step, ``lengths.csv`` the histogram of
    each epoch, ``plans.jsonl`` a plan a step, ``timeline.json`` the GPUs' intervals.
    """
    outcomes = [step.outcome for step in steps]
    scores = RunScores.of(outcomes)
    return {
        "summary.json": to_json(
            {
                **workload_values(workload),
                "policy": policy,
                "seed": seed,
                "steps": scores.steps,
                "mean": scores.mean,
                "gpu_seconds_by_function": scores.by_function,
            }
        ),
        "steps.csv": csv_text([step_record(outcome) for outcome in outcomes]),
        "details.csv": csv_text(detail_rows(steps, workload.setting)),
        "actors.csv": csv_text(actor_rows(steps)),
        "lengths.csv": csv_text(length_rows(steps)),
        "plans.jsonl": "".join(to_json(step.plan.document(step.batch), indent=None) for step in steps),
        "timeline.json": trace_events(RunTimeline.of(steps, workload.setting.cluster, policy, seed)),
        "timings.json": to_json(timing([step.planning_seconds for step in steps])),
    }


def summary(result: ComparisonResult) -> dict[str, Any]:
    """Return everything that was measured over steps and seeds, as plain values."""
    return {
        **workload_values(result.workload),
        "policies": {run.name: _run_values(run) for run in result.runs},
        "comparisons": [
            {
                "policy": c.policy,
                "baseline": c.baseline,
                "speedup": _interval(c.speedup),
                "cost_reduction": _interval(c.cost_reduction),
            }
            for c in result.comparisons
        ],
    }


def workload_values(workload: Workload) -> dict[str, Any]:
    """Return what was replayed on what, as plain values."""
    trace, setting = workload.traces[0], workload.setting
    values: dict[str, Any] = {
        "workload": workload.name,
        "source": trace.source,
        "reconstructed": trace.reconstructed,
        "profile": setting.profile.name,
        "profile_kind": setting.profile.kind,
        "profile_source": dict(setting.profile.source),
        "cluster": setting.cluster.model_dump(exclude={"links"}),
        "learner_gpus": setting.learner_gpus,
        "seeds": len(workload.traces),
    }
    if workload.calibration is not None:
        values["calibration"] = calibration_rows(workload.calibration)
    return values


def _run_values(run: PolicyRuns) -> dict[str, Any]:
    return {
        "mean": {name: _interval(run.summary(name)) for name in run.scores[0].mean},
        "gpu_seconds_by_function": run.function_means(),
    }


def timing(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and maximum of measured planning times."""
    return {"planning_seconds_median": float(np.median(seconds)), "planning_seconds_max": float(max(seconds))}


def to_json(values: Any, indent: int | None = 2) -> str:
    """Return JSON text with floats rounded to a fixed number of significant digits."""
    return json.dumps(_rounded(values), indent=indent, allow_nan=False) + "\n"


def _rounded(value: Any) -> Any:
    if type(value) in (str, int):  # almost all of a plan: no need to ask what else it could be
        return value
    if isinstance(value, float | np.floating):
        return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of scores as CSV."""
    buffer = io.BytesIO()
    pl.DataFrame([_rounded(row) for row in rows], infer_schema_length=None).write_csv(buffer)
    return buffer.getvalue().decode()


def _report(result: ComparisonResult) -> str:
    parts = ["# Comparison", "", *(f"- {line}" for line in setting_lines(result.workload)), ""]
    parts += [*markdown(score_rows(result)), ""]
    if result.comparisons:
        parts += ["## Against the baselines", "", *markdown(against_rows(result)), ""]
    parts += [*delivery_lines(result), ""]
    workload = result.workload
    if workload.calibration is not None and workload.log is not None:
        told = [*calibration_lines(workload.calibration, workload.log), *replayed_lines(result)]
        parts += ["## Calibration", "", *(f"- {line}" for line in told), ""]
        parts += [*markdown(calibration_rows(workload.calibration)), ""]
    parts += ["## Billed GPU seconds a step, by function", "", *markdown(function_rows(result)), ""]
    parts += [
        "## GPU seconds a step beside the work, billed or not",
        "",
        *markdown(overhead_rows(result)),
        "",
    ]
    parts += ["## Sources", ""]
    parts += [f"- {key}: {text}" for key, text in result.workload.setting.profile.source.items()]
    parts += [f"- trace: {result.workload.traces[0].source}"]
    return "\n".join(parts) + "\n"


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return rows as a Markdown table, one string a line."""
    head = list(rows[0])
    return [
        "| " + " | ".join(head) + " |",
        "|" + "|".join([" --- ", *([" ---: "] * (len(head) - 1))]) + "|",
        *("| " + " | ".join(row[name] for name in head) + " |" for row in rows),
    ]


def _table(rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table()
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _text(value: Interval95, unit: str = "") -> str:
    digits = 2 if abs(value.mean) < 100 else 1
    if value.low == value.high:
        return f"{value.mean:.{digits}f}{unit}"
    return f"{value.mean:.{digits}f}{unit} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _percent(value: Interval95) -> str:
    if value.low == value.high:
        return f"{value.mean:.1%}"
    return f"{value.mean:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _error(errors: Errors) -> str:
    return "" if not np.isfinite(errors.mape) else f"{errors.mape:.1%}"


def _interval(value: Interval95) -> dict[str, float]:
    return {"mean": value.mean, "low": value.low, "high": value.high}
