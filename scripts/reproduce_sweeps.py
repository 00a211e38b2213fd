"""Rows that sweep a setting (10, 11, 12, 14), and measured planning times (13, 16)."""

from __future__ import annotations

import numpy as np

from rlhfless.models.scores import interval
from rlhfless.scripts.reproduce_lab import NO_WAVES, PAPER_ESTIMATE, THREE_ACTORS, Cell, Lab, Runs, gsm8k
from rlhfless.scripts.reproduce_parts import estimated_costs
from rlhfless.scripts.reproduce_verdicts import (
    Figure,
    Finding,
    Point,
    Row,
    as_change,
    as_number,
    as_percent,
    change,
    claim,
    falling,
    less,
    likeness,
    limit,
    rising,
    signed,
    spread,
)

TIME, COST = "step_seconds", "gpu_seconds"
PANELS = {"seconds a step": TIME, "GPU seconds a step": COST}

#: Planning may take this share of a step and still be called negligible (ours; the paper gives no number).
NEGLIGIBLE = 0.01


def panels_of(
    sweeps: dict[str, dict[float, Runs]], base: float | None = None
) -> dict[str, tuple[Point, ...]]:
    """Return time and cost of sweeps as panels, a series a sweep; relative to the point ``base`` if given."""
    panels = {}
    for panel, column in PANELS.items():
        points = []
        for name, sweep in sweeps.items():
            scale = 1.0 if base is None else sweep[base].each(column)
            points += [Point(name, x, interval(runs.each(column) / scale)) for x, runs in sweep.items()]
        panels[panel if base is None else f"{panel}, relative to {base:g}"] = tuple(points)
    return panels


def ewma_windows(lab: Lab) -> Row:
    """Row 10: the window of the length history (fig. 15a)."""
    windows = (1, 2, 3, 4)
    findings, sweeps = [], {}
    for algorithm in ("ppo", "grpo"):
        cell = gsm8k(algorithm).but("trace.prompts=1024", "trace.prompts_per_step=512", "trace.epochs=15")
        runs = {w: lab.runs(cell, "rlhfless", f"predict.window={w}") for w in windows}
        sweeps[algorithm.upper()] = {float(w): r for w, r in runs.items()}
        for what, column in (("time", TIME), ("cost", COST)):
            values = [r.each(column) for r in runs.values()]
            even = spread(values)
            findings.append(
                likeness(
                    f"{what} with windows 1 to 4, {algorithm.upper()}",
                    PAPER_ESTIMATE,
                    f"spread {as_percent(even)}",
                    even,
                    f"From window 1 to 4 {signed(change(values[-1], values[0]).mean)}. Only the order of the "
                    "prompts matters, and a prompt's own spread, which an average removes, moves it little.",
                    "marginal differences",
                )
            )
    return Row(
        10,
        "EWMA windows 1 to 4 differ marginally",
        "GSM8K, 3B, 15 epochs of 2 steps with 512 prompts; alpha = 2 / (window + 1)",
        tuple(findings),
        (Figure("15a", "Window of the length history", "window", panels_of(sweeps, 1)),),
    )


THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def cut_thresholds(lab: Lab) -> Row:
    """Row 11: the threshold of the local cut (fig. 15b)."""
    cell = gsm8k("ppo")
    cases: dict[str, tuple[Cell, tuple[str, ...]]] = {
        "scaled actors, slots as assigned": (cell, ()),
        "scaled actors, slots as assigned, GRPO": (gsm8k("grpo"), ()),
        "3 actors, slots as assigned": (cell, (THREE_ACTORS,)),
        "scaled actors, 256 slots": (cell, ("migration.slots=engine",)),
    }
    findings, sweeps = [], {}
    for name, (at, parts) in cases.items():
        runs = {t: lab.runs(at, "rlhfless", *parts, f"migration.threshold={t}") for t in THRESHOLDS}
        sweeps[name] = runs
        time, cost = ([r.each(column) for r in runs.values()] for column in (TIME, COST))
        moved = [r.each("migrations").mean() for r in runs.values()]
        cheap, slow = rising(cost), falling(time)
        decode = change(runs[0.3].function("decode"), runs[0.9].function("decode"))
        even = spread(cost[:3])
        findings += [
            claim(
                "a smaller tau costs less",
                name,
                f"{cheap}; {as_change(change(cost[0], cost[-1]))} from 0.9 to 0.3",
                cheap.share,
                f"{moved[0]:.0f} responses a step move at 0.3 and {moved[-1]:.0f} at 0.9, and decoding costs "
                f"{signed(decode.mean)}; the rest of the bill does not change.",
            ),
            claim(
                "a smaller tau makes steps longer",
                name,
                f"{slow}; {as_change(change(time[0], time[-1]))} from 0.9 to 0.3",
                slow.share,
                "The actors that take the moved responses run larger batches; generation is "
                f"{1 - runs[0.7].training_share:.0%} of a step.",
            ),
            likeness(
                "the cost is flat for tau up to 0.5",
                name,
                f"spread {as_percent(even)}",
                even,
                "A cut waits until all that is left fits the open slots: from 0.3 to 0.5 the moved "
                f"responses a step go from {moved[0]:.0f} to {moved[2]:.0f}.",
            ),
        ]
    return Row(
        11,
        "a smaller tau costs less and takes longer, without effect up to 0.5",
        "GSM8K, 3B, PPO (where not said otherwise), 3 epochs, tau 0.3 to 0.9; all or nothing, waiting for "
        "slots, KV transfer",
        tuple(findings),
        (Figure("15b", "Threshold of the cut", "tau", panels_of(sweeps, 0.9)),),
    )


WEIGHTS = (0.3, 0.5, 0.7, 0.9)


def score_weights(lab: Lab) -> Row:
    """Row 12: the weight of time in the score (fig. 15c)."""
    cell = gsm8k("grpo")
    cases: dict[str, tuple[Cell, str]] = {
        PAPER_ESTIMATE: (cell, "paper"),
        "paper's estimate, no waves": (cell.but(NO_WAVES), "paper"),
        "exact estimate, 256 slots an actor": (cell, "exact"),
        "exact estimate, no waves": (cell.but(NO_WAVES), "exact"),
    }
    findings, sweeps = [], {}
    for name, (at, estimate) in cases.items():
        runs = {
            w: lab.runs(at, "rlhfless", f"scale.weight={w}", f"scale.estimate={estimate}") for w in WEIGHTS
        }
        sweeps[name] = runs
        counts = [float(r.each("actors").mean()) for r in runs.values()]
        shorter = falling([r.each(TIME) for r in runs.values()])
        dearer = rising([r.each(COST) for r in runs.values()])
        least = estimated_costs(lab, at, "rlhfless", f"scale.estimate={estimate}").argmin(axis=0).mean() + 1
        why = (
            f"Actors with lambda {', '.join(map(str, WEIGHTS))}: {', '.join(f'{c:.1f}' for c in counts)}. "
            f"By the rule's estimate {least:.1f} are cheapest."
        )
        if max(counts) - min(counts) < 0.5:
            why += " Time and cost are least near the same count there, so lambda has little to weigh."
        findings += [
            claim(
                "a larger lambda shortens steps",
                name,
                str(shorter),
                shorter.share,
                why,
            ),
            claim(
                "a larger lambda costs more",
                name,
                str(dearer),
                dearer.share,
                why,
            ),
            _second(runs, name, COST, "second-lowest cost"),
            _second(runs, name, TIME, "second-shortest step"),
        ]
    return Row(
        12,
        "lambda 0.7 is second in cost and in time",
        "GSM8K, GRPO, 3B, 3 epochs, lambda 0.3, 0.5, 0.7, 0.9, 1 to 8 actors",
        tuple(findings),
        (Figure("15c", "Weight of time in the score", "lambda", panels_of(sweeps, 0.7)),),
    )


def _second(runs: dict[float, Runs], options: str, column: str, what: str) -> Finding:
    """Judge whether exactly one other weight is below 0.7 in a column; ties count for and against."""
    own = runs[0.7].each(column)
    below = sum((less(r.each(column), own) == 1).astype(int) for w, r in runs.items() if w != 0.7)
    tied = sum((less(r.each(column), own) == 0.5).astype(int) for w, r in runs.items() if w != 0.7)
    holds = np.where(
        below == 1, np.where(tied == 0, 1.0, 0.5), np.where((below < 1) & (below + tied >= 1), 0.5, 0.0)
    )
    share = interval(holds)
    return claim(
        f"lambda 0.7 has the {what}",
        options,
        f"in {as_percent(share)} of the seeds",
        share,
        f"Of the other three {np.mean(below):.1f} are lower and {np.mean(tied):.1f} within half a per cent."
        + (
            " With time falling and cost rising in lambda, 0.7 is second in time and third in cost."
            * (not np.any(tied))
        ),
    )


NODES = (2, 4, 8, 12, 16, 20)

#: The largest planning time of the paper, in seconds (sec. 6.6).
PLANNING_LIMIT = 0.03


def long_cell(nodes: int, *changes: str) -> Cell:
    """Return Llama-2-70B on H100 nodes: 512 responses a step, nearly all of 2k to 8k tokens."""
    return Cell(
        "gsm8k_ppo",
        "h100_llama-2-70b_tp2",
        "h100_20x8",
        (
            f"cluster.nodes={nodes}",
            "trace.prompts=1024",
            "trace.prompts_per_step=512",
            "trace.epochs=2",
            "trace.max_response_tokens=8192",
            # The middle 95 % of this lognormal lie between 2,048 and 8,192 tokens.
            "trace.lengths=[{weight: 1.0, median_tokens: 4096, log_sd: 0.354}]",
            "trace.drift=0.0",
            "trace.runaway_share=0.0",
            "trace.answer_median_tokens=null",
            "trace.answer_correlation=0.0",
            "trace.model=Llama-2-70B",
            *changes,
        ),
    )


LONG = (
    "Llama-2-70B, 512 responses a step of 2k to 8k tokens (lognormal, median 4096), 2 H100 an actor, 2 to "
    "20 nodes of 8"
)


def planning_times(lab: Lab) -> Row:
    """Row 13: how long planning takes at every cluster size (sec. 6.6)."""
    findings, panel = [], []
    for nodes in NODES:
        runs = lab.runs(long_cell(nodes), "rlhfless")
        per_seed = runs.planning.reshape(lab.seeds, -1)
        panel.append(Point("rlhfless", nodes, interval(1e3 * np.median(per_seed, axis=1))))
        middle = interval(np.median(per_seed, axis=1))
        most = len(lab.workload(long_cell(nodes)).traces[0].steps)
        findings.append(
            Finding(
                f"median planning time, {nodes} nodes",
                "paper's estimate",
                "at most 30 ms",
                as_number(interval(1e3 * np.median(per_seed, axis=1)), " ms"),
                middle,
                limit(PLANNING_LIMIT, middle),
                f"Up to {4 * nodes} actors are tried, each on 512 predicted lengths; measured on this "
                f"machine, one core, {most * lab.seeds} steps.",
                measured=True,
            )
        )
    return Row(
        13,
        "planning takes at most 30 ms at all cluster sizes",
        LONG,
        tuple(findings),
        (Figure("row13", "Planning time", "nodes of 8 H100", {"ms": tuple(panel)}, measured=True),),
    )


def strong_scaling(lab: Lab) -> Row:
    """Row 14: step time against the number of nodes (fig. 16a)."""
    findings, sweeps = [], {}
    for name, learner in (("learner of 16 GPUs", None), ("learner of half the GPUs", 4)):
        runs = {}
        for nodes in NODES:
            size = () if learner is None else (f"learner_gpus={learner * nodes}",)
            runs[float(nodes)] = lab.runs(long_cell(nodes, *size), "rlhfless")
        sweeps[name] = runs
        time = [r.each(TIME) for r in runs.values()]
        share = falling(time)
        generation = [r.each("generation_seconds").mean() for r in runs.values()]
        actors = [r.each("actors").mean() for r in runs.values()]
        findings.append(
            claim(
                "step time falls with the nodes",
                name,
                f"{share}; {as_change(change(time[-1], time[0]))} from {NODES[0]} to {NODES[-1]} nodes",
                share.share,
                f"Generation goes from {generation[0]:.0f} to {generation[-1]:.0f} s with {actors[0]:.0f} to "
                f"{actors[-1]:.0f} actors; an actor's KV holds about ten such responses at once, so more "
                "actors mean fewer waves.",
            )
        )
    return Row(
        14,
        "step time falls with the node count",
        LONG,
        tuple(findings),
        (Figure("16a", "Strong scaling", "nodes of 8 H100", panels_of(sweeps)),),
    )


def planning_share(lab: Lab) -> Row:
    """Row 16: planning as a share of the step (fig. 17)."""
    findings, stages = [], []
    for algorithm in ("ppo", "grpo"):
        runs = lab.runs(gsm8k(algorithm), "rlhfless")
        planning = runs.planning.reshape(lab.seeds, -1).mean(axis=1)
        share = interval(planning / runs.each(TIME))
        findings.append(
            Finding(
                f"planning as a share of the step, {algorithm.upper()}",
                PAPER_ESTIMATE,
                "negligible",
                as_number(interval(100 * planning / runs.each(TIME)), " %", 3),
                share,
                limit(NEGLIGIBLE, share),
                f"{1e3 * planning.mean():.0f} ms of {runs.each(TIME).mean():.0f} s for prediction, prefixes, "
                "assignment and the choice of actors, on this machine; negligible is taken as at most "
                f"{NEGLIGIBLE:.0%}.",
                measured=True,
            )
        )
        preparation = interval(
            runs.each(TIME) - runs.each("generation_seconds") - runs.each("learning_seconds")
        )
        for stage, value in (
            ("planning", interval(planning)),
            ("generation", runs.mean("generation_seconds")),
            ("preparation", preparation),
            ("learning", runs.mean("learning_seconds")),
        ):
            stages.append(Point(algorithm.upper(), stage, value))
    return Row(
        16,
        "planning is a negligible part of a step",
        "GSM8K, PPO and GRPO, 3B",
        tuple(findings),
        (
            Figure(
                "17", "Where a step's time goes", "", {"seconds": tuple(stages)}, kind="bar", measured=True
            ),
        ),
    )
