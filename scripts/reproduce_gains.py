"""Rows about the whole of RLHFless: its gains over the base lines (1, 2, 6, 7, 9, 15)."""

from __future__ import annotations

import numpy as np

from rlhfless.models.scores import Interval95, interval
from rlhfless.scripts.reproduce_lab import (
    CHUNKED,
    LOCAL_PREFILL,
    MODELS,
    NO_MIGRATION,
    NO_WAVES,
    TESTBED,
    THREE_ACTORS,
    Cell,
    Lab,
    Runs,
    gsm8k,
    shares,
)
from rlhfless.scripts.reproduce_verdicts import (
    Figure,
    Finding,
    Point,
    Row,
    alike,
    as_change,
    as_percent,
    as_times,
    change,
    falling,
    less,
    point,
    shifted,
    spread,
    statement,
)
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray

#: What stands in for the paper's data sets; no lengths of GPQA and LiveCodeBench are public.
DATA = {"GSM8K": "gsm8k", "GPQA": "dapo_math", "LiveCodeBench": "deepcoder_16k"}
ALGORITHMS = ("ppo", "grpo")
#: The paper's baseline, and verl's placements and bare functions beside it.
BASELINES = ("rlhfless_naive", "serverless_fixed", "verl", "verl_split", "verl_standalone")

PAPER_ESTIMATE = "paper's estimate, 256 slots an actor"


def grid_cell(data: str, model: str, algorithm: str) -> Cell:
    """Return a cell of the testbed grid: 512 prompts a step, 3 steps an epoch, responses of at most 2048."""
    preset = f"gsm8k_{algorithm}" if data == "GSM8K" else DATA[data]
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
            try:
                base = lab.runs(cell, baseline)
            except InputError:
                continue
            # The paper's static base line has three actors; where they do not fit beside the learner it is another one.
            if base.each("actors").min() == 3:
                pairs[key] = (lab.runs(cell, "rlhfless"), base)
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
        "2 x 8 L40S, Qwen2.5 3B (2 GPUs an actor) and 7B (4), PPO and GRPO (3 responses), 512 prompts a step; GSM8K, and in "
        "place of GPQA and LiveCodeBench the lengths of dapo_math and deepcoder_16k cut at 2048 tokens",
        tuple(findings),
        (
            Figure(
                "10",
                "Gains of RLHFless over naive RLHFless",
                "data set (stand-ins, see docs)",
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
    free = float(1 / base.training_share)
    left = "" if len(pairs) == cells else f" Three actors fit in {len(pairs)} of {cells} cells."
    told = "" if baseline == "rlhfless_naive" else " (against naive)"
    ours_low, base_low = pairs[cheapest]
    decode = float((base_low.function("decode") / base_low.each("gpu_seconds")).mean())
    extra = float((ours_low.each("actors") - base_low.each("actors")).mean())
    return [
        Finding(
            f"largest speed-up over {baseline}",
            PAPER_ESTIMATE,
            f"1.35x{told}",
            f"{as_times(speedup)} in {' '.join(fastest)}",
            speedup,
            point(0.35, shifted(speedup, -1)),
            f"{base.training_share:.0%} of that cell's baseline step is preparation and training; with generation "
            f"at no time it would be {free:.2f}x.{left}",
        ),
        Finding(
            f"largest cost reduction against {baseline}",
            PAPER_ESTIMATE,
            f"44.8 %{told}",
            f"{as_percent(reduction)} in {' '.join(cheapest)}",
            reduction,
            point(0.448, reduction),
            f"Decoding is {decode:.0%} of that cell's baseline bill, and RLHFless runs {extra:+.1f} actors.{left}",
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
    findings = []
    for what, column in (("time", "step_seconds"), ("cost", "gpu_seconds")):
        shares = np.array(
            [less(ratio((*pair, "grpo"), column), ratio((*pair, "ppo"), column)) for pair in pairs]
        )
        share = interval(shares.mean(axis=0))
        means = [
            float(np.mean([1 - ratio((*pair, a), column).mean() for pair in pairs])) for a in ALGORITHMS
        ]
        findings.append(
            Finding(
                f"GRPO gains more {what} than PPO",
                PAPER_ESTIMATE,
                "yes",
                f"in {as_percent(share)} of {len(pairs)} pairs of cells",
                share,
                statement(share),
                f"Mean reduction of {what} {means[1]:.1%} with GRPO, {means[0]:.1%} with PPO. GRPO has three times the responses "
                "and no critic, so generation is a larger part of its step.",
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
    for what, column in (("time", "step_seconds"), ("cost", "gpu_seconds")):
        ratios = [
            lab.runs(c, "rlhfless").each(column) / lab.runs(c, "rlhfless_naive").each(column) for c in swept
        ]
        share = falling(ratios)
        findings.append(
            Finding(
                f"gain in {what} grows with the batch ({sizes[0]} to {sizes[-1]} prompts)",
                PAPER_ESTIMATE,
                "yes",
                f"in {as_percent(share)} of the pairs",
                share,
                statement(share),
                f"From {1 - ratios[0].mean():+.1%} to {1 - ratios[-1].mean():+.1%}.",
            )
        )
    slower = np.array(
        [
            less(ours[data, model, a].each("step_seconds"), ours["GSM8K", model, a].each("step_seconds"))
            for data in list(DATA)[1:]
            for model in MODELS
            for a in ALGORITHMS
        ]
    )
    share = interval(slower.mean(axis=0))
    lengths = [float(lab.workload(grid_cell(data, "3B", "ppo")).traces[0].response_tokens.mean()) for data in DATA]
    findings.append(
        Finding(
            "GSM8K has the longest steps",
            PAPER_ESTIMATE,
            "yes, long responses",
            f"in {as_percent(share)} of the pairs",
            share,
            statement(share),
            f"Public GSM8K runs have mean responses of {lengths[0]:.0f} tokens, the stand-ins {lengths[1]:.0f} and "
            f"{lengths[2]:.0f} at the same batch; the paper's lengths and batches are not known.",
        )
    )
    return Row(
        2,
        "gains are larger with GRPO and with larger workloads",
        "the grid of row 1; batch sweep with GSM8K, GRPO, 3B, 3 responses a prompt",
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


def against_global_cut(lab: Lab) -> Row:
    """Row 6: cost against RLHFuse's global cut without ranking, three actors (fig. 12)."""
    cell = gsm8k("ppo")
    ours = lab.runs(cell, "rlhfless", THREE_ACTORS)
    alone = (THREE_ACTORS, CHUNKED, LOCAL_PREFILL)
    cut = "migration={_target_: rlhfless.policies.Migration, rule: global, threshold: 0.8, kv: transfer}"
    rivals = {
        "rlhfuse as shipped": lab.runs(cell, "rlhfuse"),
        "the same cut with RLHFless's placement and prewarming": lab.runs(cell, "rlhfless", *alone, cut),
    }
    findings = []
    for name, rival in rivals.items():
        saved = change(ours.each("gpu_seconds"), rival.each("gpu_seconds"))
        decode = float((rival.function("decode") / rival.each("gpu_seconds")).mean())
        generation = change(ours.function("decode") + ours.function("prefill"), rival.function("decode"))
        findings.append(
            Finding(
                f"cost against {name}",
                "256 slots an actor",
                "-12.8 %",
                as_change(saved),
                saved,
                point(-0.128, saved),
                f"Decoding is {decode:.0%} of the rival's bill; prefill and decoding together change by "
                f"{generation.mean:+.0%}, the other stages cannot.",
            )
        )

    def early(runs: Runs) -> Interval95:
        """Return how much earlier actors 2 and 3 are released than the last one, as a share of its time."""
        return interval([float(np.mean([1 - np.sort(r)[:-1].mean() / r.max() for r in seed])) for seed in runs.release])

    gap = early(ours)
    share = interval(
        [float(np.mean([np.sort(r)[-2] < (1 - 0.05) * r.max() for r in seed])) for seed in ours.release]
    )
    fused = early(rivals["rlhfuse as shipped"])
    findings.append(
        Finding(
            "actors 2 and 3 end early (by 5 % of generation or more)",
            "256 slots an actor",
            "yes",
            f"in {as_percent(share)} of the steps",
            share,
            statement(share),
            f"They are released {gap.mean:.0%} of generation before the last one on average, {fused.mean:.0%} under the global cut.",
        )
    )
    panel = []
    for series, runs in (("rlhfless", ours), ("rlhfuse", rivals["rlhfuse as shipped"])):
        ends = np.array([[np.sort(r)[::-1] for r in seed] for seed in runs.release]).mean(axis=1)
        panel += [Point(series, f"actor {k + 1}", interval(ends[:, k])) for k in range(3)]
    return Row(
        6,
        "12.8 % cheaper than a global cut without ranking",
        "GSM8K, PPO, 3B, three actors, tau 0.7 against a cut with 20 % left",
        tuple(findings),
        (
            Figure(
                "12", "When actors are released", "actors, latest first", {"seconds": tuple(panel)}, kind="bar"
            ),
        ),
    )


#: The mechanisms of the ablation, each added to those before it.
ABLATION = {
    "none": (CHUNKED, THREE_ACTORS, LOCAL_PREFILL, NO_MIGRATION),
    "+DP": (CHUNKED, THREE_ACTORS, NO_MIGRATION),
    "+PA": (THREE_ACTORS,),
    "+AS": (),
}


def ablation(lab: Lab) -> Row:
    """Row 7: deduplicated prefill, then prompt assignment with cuts, then actor scaling (fig. 11)."""
    findings, panels = [], {"seconds a step": [], "GPU seconds a step": []}
    for options, cell, extra in (
        (PAPER_ESTIMATE, gsm8k("grpo"), ()),
        ("exact estimate, no slot waves", gsm8k("grpo").but(NO_WAVES), ("scale.estimate=exact",)),
    ):
        runs = {
            name: lab.runs(cell, "rlhfless", *parts, *(extra if name == "+AS" else ()))
            for name, parts in ABLATION.items()
        }
        findings += _steps_of_ablation(options, runs)
        for name, r in runs.items():
            panels["seconds a step"].append(Point(options, name, r.mean("step_seconds")))
            panels["GPU seconds a step"].append(Point(options, name, r.mean("gpu_seconds")))
    return Row(
        7,
        "ablation: +DP and +PA cut cost, +AS cuts time",
        "GSM8K, GRPO, 3B, 3 responses a prompt; none is rlhfless with every mechanism but placement and prewarming off",
        tuple(findings),
        (
            Figure(
                "11", "Ablation", "mechanisms", {k: tuple(v) for k, v in panels.items()}, kind="bar"
            ),
        ),
    )


def _steps_of_ablation(options: str, runs: dict[str, Runs]) -> list[Finding]:
    """Judge each step of the ablation, training step by training step."""
    none, dp, pa, scaled = (runs[name] for name in ABLATION)

    def told(ours: Runs, base: Runs) -> str:
        time, cost = (change(ours.each(c), base.each(c)) for c in ("step_seconds", "gpu_seconds"))
        return f"time {as_change(time)}, cost {as_change(cost)}"

    cheaper = shares(dp, none, "gpu_seconds")
    more = interval(
        [
            # Saving more than +DP did: cost(PA) < cost(DP) - (cost(none) - cost(DP)).
            less(p["gpu_seconds"], np.minimum(2 * d["gpu_seconds"] - n["gpu_seconds"], d["gpu_seconds"])).mean()
            for n, d, p in zip(none.steps, dp.steps, pa.steps, strict=True)
        ]
    )
    quicker = shares(scaled, pa, "step_seconds")
    even = spread([pa.each("gpu_seconds"), scaled.each("gpu_seconds")])
    tokens = 1 - float(dp.each("prefill_tokens").mean() / none.each("prefill_tokens").mean())
    decode = change(scaled.function("decode"), pa.function("decode"))
    return [
        Finding(
            "+DP cuts the cost a little",
            options,
            "yes",
            f"{told(dp, none)}; cheaper in {as_percent(cheaper)} of the steps",
            cheaper,
            statement(cheaper),
            f"It removes {tokens:.0%} of the prefill tokens (the engine's prefix cache has the rest already), and "
            f"prefill on the learner's GPUs costs {dp.function('prefill').mean():.1f} of {none.each('gpu_seconds').mean():.0f} "
            "GPU s a step, start-up included.",
        ),
        Finding(
            "+PA cuts the cost more than +DP",
            options,
            "yes",
            f"{told(pa, dp)}; in {as_percent(more)} of the steps",
            more,
            statement(more),
            f"Sorted blocks end apart and each actor is released when it ends; {pa.each('migrations').mean():.0f} responses "
            "move a step.",
        ),
        Finding(
            "+AS cuts the time",
            options,
            "yes",
            f"{told(scaled, pa)}; faster in {as_percent(quicker)} of the steps",
            quicker,
            statement(quicker),
            f"It runs {scaled.each('actors').mean():.1f} actors in place of 3; preparation and training, "
            f"{scaled.training_share:.0%} of its step, stay.",
        ),
        Finding(
            "+AS leaves the cost about equal",
            options,
            "yes",
            as_change(change(scaled.each("gpu_seconds"), pa.each("gpu_seconds"))),
            even,
            alike(even),
            f"Every further actor reads the weights once more an iteration: decoding costs {decode.mean:+.0%}.",
        ),
    ]


def bad_predictor(lab: Lab) -> Row:
    """Row 9: a length classifier of 44 % accuracy, against verl (fig. 14)."""
    cell = gsm8k("grpo")
    ours = lab.runs(cell, "oracle_length_bucket")
    best = lab.runs(cell, "oracle")
    findings = []
    for baseline in ("verl", "verl_split", "verl_standalone"):
        base = lab.runs(cell, baseline)
        against, ideal = ours.against(base), best.against(base)
        held = float(1 - (base.each("busy_gpu_seconds") / base.each("gpu_seconds")).mean())
        findings += [
            Finding(
                f"speed-up over {baseline}", PAPER_ESTIMATE, "1.22x", as_times(against.speedup), against.speedup,
                point(0.22, shifted(against.speedup, -1)),
                f"{base.training_share:.0%} of that step is preparation and training; exact lengths would give {ideal.speedup.mean:.2f}x.",
            ),
            Finding(
                f"cost reduction against {baseline}", PAPER_ESTIMATE, "28.9 %", as_percent(against.cost_reduction),
                against.cost_reduction, point(0.289, against.cost_reduction),
                f"{held:.0%} of the baseline's bill is held GPUs without work, which is all that scaling down can save; exact "
                f"lengths would give {ideal.cost_reduction.mean:.0%}.",
            ),
        ]  # fmt: skip
    panels: dict[str, list[Point]] = {"speed-up over verl": [], "cost reduction against verl": []}
    base = lab.runs(cell, "verl")
    for accuracy in (0.2, 0.44, 0.6, 0.8, 1.0):
        against = lab.runs(cell, "oracle_length_bucket", f"predict.accuracy={accuracy}").against(base)
        panels["speed-up over verl"].append(Point("length buckets", accuracy, against.speedup))
        panels["cost reduction against verl"].append(Point("length buckets", accuracy, against.cost_reduction))
    return Row(
        9,
        "1.22x and 28.9 % with a predictor of 44 % accuracy",
        "GSM8K, GRPO, 3B; five length buckets of equal counts, errors to the neighbouring one; verl in three placements, "
        "since the paper does not say which its pool is",
        tuple(findings),
        (
            Figure(
                "14",
                "A worse predictor",
                "accuracy of the classifier",
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
        (f"cluster.nodes={nodes}", "trace.prompts=1536", "trace.prompts_per_step=512", "trace.model=Llama-2-70B"),
    )


def simulated_average(lab: Lab) -> Row:
    """Row 15: the average gain in simulation (fig. 16b)."""
    nodes = (4, 8, 12, 16, 20)
    findings = []
    panels: dict[str, list[Point]] = {"speed-up": [], "cost reduction": []}
    for baseline in BASELINES:
        pairs = [(lab.runs(simulated_cell(n), "rlhfless"), lab.runs(simulated_cell(n), baseline)) for n in nodes]
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
            Finding(
                f"average speed-up over {baseline}", PAPER_ESTIMATE, f"1.23x{told}", as_times(mean_speed), mean_speed,
                point(0.23, shifted(mean_speed, -1)),
                f"From {speed.mean(axis=1).min():.2f}x to {speed.mean(axis=1).max():.2f}x over the node counts; preparation and training "
                f"take {pairs[-1][1].training_share:.0%} of the baseline's step on {nodes[-1]} nodes.",
            ),
            Finding(
                f"average cost reduction against {baseline}", PAPER_ESTIMATE, f"38.7 %{told}", as_percent(mean_saved), mean_saved,
                point(0.387, mean_saved),
                f"From {saved.mean(axis=1).min():.0%} on {worst} nodes to {saved.mean(axis=1).max():.0%} on {best}. More nodes widen the range "
                f"of counts over which the score is scaled, so it takes {actors[0]:.0f} actors on {nodes[0]} nodes and {actors[-1]:.0f} on {nodes[-1]}.",
            ),
        ]  # fmt: skip
    return Row(
        15,
        "on average 1.23x and 38.7 % in simulation",
        "GSM8K lengths, PPO, Llama-2-70B, 512 responses a step, 2 H100 an actor, 4 to 20 nodes of 8; the paper does not list its settings",
        tuple(findings),
        (
            Figure(
                "16b", "Gains in simulation", "nodes of 8 H100", {k: tuple(v) for k, v in panels.items()}
            ),
        ),
    )

