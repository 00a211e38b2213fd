"""Rows about the gains of the whole of RLHFless over its base lines (1, 2, 15)."""

from __future__ import annotations

import numpy as np

from rlhfless.models.scores import interval
from rlhfless.scripts.reproduce_lab import (
    MODELS,
    PAPER_ESTIMATE,
    TESTBED,
    Cell,
    Lab,
    Runs,
    gsm8k,
    where_time_goes,
)
from rlhfless.scripts.reproduce_verdicts import (
    Figure,
    Finding,
    Point,
    Row,
    as_percent,
    as_times,
    claim,
    effect,
    falling,
    less,
    shifted,
    signed,
)
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray

#: What stands in for the paper's data sets; no lengths of GPQA and LiveCodeBench are public.
DATA = ("GSM8K", "dapo_math", "deepcoder_16k")
ALGORITHMS = ("ppo", "grpo")
#: The paper's baseline, and verl's placements and bare functions beside it.
BASELINES = ("rlhfless_naive", "serverless_fixed", "verl", "verl_split", "verl_standalone")


def grid_cell(data: str, model: str, algorithm: str) -> Cell:
    """Return a cell of the testbed grid: 512 prompts a step, 3 steps an epoch, responses of at most 2048."""
    preset = f"gsm8k_{algorithm}" if data == "GSM8K" else data
    changes = [
        "trace.prompts=1536",
        "trace.prompts_per_step=512",
        "trace.max_response_tokens=2048",
        "trace.max_prompt_tokens=1024",
        f"trace.algorithm={algorithm}",
        f"trace.responses_per_prompt={1 if algorithm == 'ppo' else 3}",
    ]
    return Cell(preset, MODELS[model], TESTBED, tuple(changes))


def grid() -> dict[tuple[str, str, str], Cell]:
    """Return the testbed grid: data, model and algorithm to the cell."""
    return {
        (data, model, algorithm): grid_cell(data, model, algorithm)
        for data in DATA
        for model in MODELS
        for algorithm in ALGORITHMS
    }


def maxima(lab: Lab) -> Row:
    """Row 1: the largest speed-up and the largest cost reduction over the testbed grid (fig. 10)."""
    cells = grid()
    findings: list[Finding] = []
    points: dict[str, list[Point]] = {"speed-up over naive RLHFless": [], "cost reduction against it": []}
    for baseline in BASELINES:
        pairs: dict[tuple[str, str, str], tuple[Runs, Runs]] = {}
        for key, cell in cells.items():
            ours = lab.runs(cell, "rlhfless")
            try:
                base = lab.runs(cell, baseline)
            except InputError:
                # Its parts do not fit the GPUs beside each other.
                continue
            # With less room than for three actors it is not the paper's static base line.
            if base.each("actors").min() == 3:
                pairs[key] = (ours, base)
        findings += _best(baseline, pairs, len(cells))
        if baseline == "rlhfless_naive":
            for (data, model, algorithm), (ours, base) in pairs.items():
                against = ours.against(base)
                series = f"{model} {algorithm.upper()}"
                for panel, value in zip(points, (against.speedup, against.cost_reduction), strict=True):
                    points[panel].append(Point(series, data, value))
    return Row(
        1,
        "up to 1.35x faster and 44.8 % cheaper",
        "2 x 8 L40S, Qwen2.5 3B (2 GPUs an actor) and 7B (4), PPO and GRPO (3 responses), 512 prompts a "
        "step; GSM8K, and in place of GPQA and LiveCodeBench the lengths of dapo_math and deepcoder_16k cut "
        "at 2048 tokens",
        tuple(findings),
        (
            Figure(
                "10",
                "Gains of RLHFless over naive RLHFless",
                "data set or stand-in",
                {panel: tuple(values) for panel, values in points.items()},
                kind="bar",
            ),
        ),
    )


def _best(baseline: str, pairs: dict[tuple[str, str, str], tuple[Runs, Runs]], cells: int) -> list[Finding]:
    """Return the largest gains over one baseline, and where they fall."""
    against = {key: ours.against(base) for key, (ours, base) in pairs.items()}
    fastest = max(against, key=lambda key: against[key].speedup.mean)
    cheapest = max(against, key=lambda key: against[key].cost_reduction.mean)
    ours, base = pairs[fastest]
    speedup, reduction = against[fastest].speedup, against[cheapest].cost_reduction
    left = "" if len(pairs) == cells else f" Three actors fit in {len(pairs)} of {cells} cells."
    told = "" if baseline == "rlhfless_naive" else " (against naive)"
    ours_low, base_low = pairs[cheapest]
    bill = base_low.each("gpu_seconds")
    decode, held = (float((base_low.function(name) / bill).mean()) for name in ("decode", "held"))
    return [
        effect(
            f"largest speed-up over {baseline}",
            PAPER_ESTIMATE,
            (f"1.35x{told}", 0.35),
            f"{as_times(speedup)} in {' '.join(fastest)}",
            speedup,
            shifted(speedup, -1),
            f"{where_time_goes(ours, base)}{left}",
        ),
        effect(
            f"largest cost reduction against {baseline}",
            PAPER_ESTIMATE,
            (f"44.8 %{told}", 0.448),
            f"{as_percent(reduction)} in {' '.join(cheapest)}",
            reduction,
            reduction,
            f"Of that cell's baseline bill decoding is {decode:.0%} and held GPUs without work {held:.0%}, "
            f"the most that can be saved; RLHFless runs {ours_low.each('actors').mean():.1f} actors.{left}",
        ),
    ]


def workloads(lab: Lab) -> Row:
    """Row 2: GRPO gains more than PPO, larger workloads gain more, GSM8K is slowest (fig. 10)."""
    cells = grid()
    ours = {key: lab.runs(cell, "rlhfless") for key, cell in cells.items()}
    naive = {key: lab.runs(cell, "rlhfless_naive") for key, cell in cells.items()}

    def ratio(key: tuple[str, str, str], column: str) -> FloatArray:
        """Return ours over naive; a smaller one is a larger gain."""
        return ours[key].each(column) / naive[key].each(column)

    pairs = [(data, model) for data in DATA for model in MODELS]
    key = ("GSM8K", "3B", "ppo")
    generation = [1 - np.mean([naive[*pair, a].training_share for pair in pairs]) for a in ALGORITHMS]
    told = (
        f"Generation is {generation[1]:.0%} of a naive step with GRPO and {generation[0]:.0%} with PPO. "
        f"{' '.join(key)}: {where_time_goes(ours[key], naive[key])}"
    )
    findings = []
    for what, column in (("time", "step_seconds"), ("cost", "gpu_seconds")):
        shares = np.array(
            [less(ratio((*pair, "grpo"), column), ratio((*pair, "ppo"), column)) for pair in pairs]
        )
        share = interval(shares.mean(axis=0))
        means = [float(np.mean([1 - ratio((*pair, a), column).mean() for pair in pairs])) for a in ALGORITHMS]
        findings.append(
            claim(
                f"GRPO gains more {what} than PPO",
                PAPER_ESTIMATE,
                f"in {as_percent(share)} of {len(pairs)} pairs of cells",
                share,
                f"Mean reduction of {what} {means[1]:.1%} with GRPO, {means[0]:.1%} with PPO. {told}",
            )
        )
    sizes = (128, 256, 512, 1024, 2048)
    swept = [
        gsm8k("grpo").but(f"trace.prompts={2 * size}", f"trace.prompts_per_step={size}") for size in sizes
    ]
    speedups = [lab.runs(c, "rlhfless").against(lab.runs(c, "rlhfless_naive")) for c in swept]
    panels: dict[str, list[Point]] = {"speed-up over naive RLHFless": [], "cost reduction against it": []}
    for size, against in zip(sizes, speedups, strict=True):
        panels["speed-up over naive RLHFless"].append(Point("3B GRPO", size, against.speedup))
        panels["cost reduction against it"].append(Point("3B GRPO", size, against.cost_reduction))

    def share_of_generation(position: int) -> float:
        return 1 - lab.runs(swept[position], "rlhfless_naive").training_share

    for what, column in (("time", "step_seconds"), ("cost", "gpu_seconds")):
        ratios = [
            lab.runs(c, "rlhfless").each(column) / lab.runs(c, "rlhfless_naive").each(column) for c in swept
        ]
        order = falling(ratios)
        findings.append(
            claim(
                f"gain in {what} grows with the batch ({sizes[0]} to {sizes[-1]} prompts)",
                PAPER_ESTIMATE,
                str(order),
                order.share,
                f"From {signed(1 - ratios[0].mean())} to {signed(1 - ratios[-1].mean())}; generation goes "
                f"from {share_of_generation(0):.0%} to {share_of_generation(-1):.0%} of the step.",
            )
        )
    slower = np.array(
        [
            less(ours[data, model, a].each("step_seconds"), ours["GSM8K", model, a].each("step_seconds"))
            for data in DATA[1:]
            for model in MODELS
            for a in ALGORITHMS
        ]
    )
    share = interval(slower.mean(axis=0))
    lengths = [
        float(lab.workload(grid_cell(data, "3B", "ppo")).traces[0].response_tokens.mean()) for data in DATA
    ]
    findings.append(
        claim(
            "GSM8K has the longest steps",
            PAPER_ESTIMATE,
            f"in {as_percent(share)} of the pairs",
            share,
            f"Public GSM8K runs have mean responses of {lengths[0]:.0f} tokens, the stand-ins "
            f"{lengths[1]:.0f} and {lengths[2]:.0f} at the same batch; the paper's lengths and batches are "
            "not known.",
            "yes, long responses",
        )
    )
    return Row(
        2,
        "gains are larger with GRPO and with larger workloads",
        "The grid of row 1; batch sweep with GSM8K, GRPO, 3B, 3 responses a prompt",
        tuple(findings),
        (
            Figure(
                "10_workload",
                "Gains against the batch size",
                "prompts a step",
                {k: tuple(v) for k, v in panels.items()},
            ),
        ),
    )


def simulated_cell(nodes: int) -> Cell:
    """Return GSM8K lengths with Llama-2-70B on a number of H100 nodes, 512 responses a step."""
    return Cell(
        "gsm8k_ppo",
        "h100_llama-2-70b_tp2",
        "h100_20x8",
        (
            f"cluster.nodes={nodes}",
            "trace.prompts=1536",
            "trace.prompts_per_step=512",
            "trace.model=Llama-2-70B",
        ),
    )


def simulated_average(lab: Lab) -> Row:
    """Row 15: the average gain in simulation (fig. 16b)."""
    nodes = (4, 8, 12, 16, 20)
    findings = []
    panels: dict[str, list[Point]] = {"speed-up": [], "cost reduction": []}
    for baseline in BASELINES:
        pairs = [
            (lab.runs(simulated_cell(n), "rlhfless"), lab.runs(simulated_cell(n), baseline)) for n in nodes
        ]
        speed = np.array([b.each("step_seconds") / o.each("step_seconds") for o, b in pairs])
        saved = np.array([1 - o.each("gpu_seconds") / b.each("gpu_seconds") for o, b in pairs])
        for n, s, c in zip(nodes, speed, saved, strict=True):
            panels["speed-up"].append(Point(f"over {baseline}", n, interval(s)))
            panels["cost reduction"].append(Point(f"over {baseline}", n, interval(c)))
        told = "" if baseline == "rlhfless_naive" else " (against naive)"
        mean_speed, mean_saved = interval(speed.mean(axis=0)), interval(saved.mean(axis=0))
        worst, best = nodes[int(np.argmin(saved.mean(axis=1)))], nodes[int(np.argmax(saved.mean(axis=1)))]
        actors = [o.each("actors").mean() for o, _ in pairs]
        findings += [
            effect(
                f"average speed-up over {baseline}",
                PAPER_ESTIMATE,
                (f"1.23x{told}", 0.23),
                as_times(mean_speed),
                mean_speed,
                shifted(mean_speed, -1),
                f"From {speed.mean(axis=1).min():.2f}x to {speed.mean(axis=1).max():.2f}x over the node "
                f"counts. On {nodes[-1]} nodes: " + where_time_goes(*pairs[-1]),
            ),
            effect(
                f"average cost reduction against {baseline}",
                PAPER_ESTIMATE,
                (f"38.7 %{told}", 0.387),
                as_percent(mean_saved),
                mean_saved,
                mean_saved,
                f"From {saved.mean(axis=1).min():.0%} on {worst} nodes to {saved.mean(axis=1).max():.0%} on "
                f"{best}. More nodes widen the range of counts over which the score is scaled, so it takes "
                f"{actors[0]:.0f} actors on {nodes[0]} nodes and {actors[-1]:.0f} on {nodes[-1]}.",
            ),
        ]
    return Row(
        15,
        "on average 1.23x and 38.7 % in simulation",
        "GSM8K lengths, PPO, Llama-2-70B, 512 responses a step, 2 H100 an actor, 4 to 20 nodes of 8; the "
        "paper does not list its settings",
        tuple(findings),
        (Figure("16b", "Gains in simulation", "nodes of 8 H100", {k: tuple(v) for k, v in panels.items()}),),
    )
