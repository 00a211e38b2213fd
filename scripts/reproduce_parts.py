"""Rows about single mechanisms: redundant prefill (3, 4), stable lengths (5), actor scaling (8)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rlhfless.models.profile import Profile
from rlhfless.models.scores import Interval95, interval
from rlhfless.policies import Composed
from rlhfless.policies.assign import Groups
from rlhfless.policies.scale import MinMaxScore, Split, Work
from rlhfless.scripts.reproduce_lab import (
    NO_WAVES,
    ONE_PREFILL,
    PAPER_ESTIMATE,
    PAPER_WEIGHT,
    Cell,
    Lab,
    Runs,
    changed_policy,
    gsm8k,
    scaled,
)
from rlhfless.scripts.reproduce_verdicts import (
    TIE,
    Figure,
    Finding,
    Point,
    Row,
    as_change,
    as_number,
    as_percent,
    change,
    claim,
    effect,
    less,
)
from rlhfless.traces.trace import FloatArray

#: A step's tokens do not depend on the epoch: three steps are enough where only tokens count.
ONE_EPOCH = ("trace.epochs=1", "trace.prompts=3072")
NO_CACHE = "options.engine.prefix_caching=false"


def redundant_seconds(profile: Profile, runs: Runs) -> FloatArray:
    """Return the GPU seconds a step of redundant prefill, one value a seed, at the profile's cost of a token.

    The quadratic part is left out: at 100 tokens a prompt it is below 1 %.
    """
    gpu_seconds: FloatArray = (
        runs.each("redundant_prefill_tokens") * profile.prefill.token_seconds * profile.prefill.gpus
    )
    return gpu_seconds


def redundant_share(lab: Lab) -> Row:
    """Row 3: redundant KV computation as a share of all GPU time, four responses a prompt (fig. 3c)."""
    base = gsm8k("grpo").but(*ONE_EPOCH)

    def share(cell: Cell) -> tuple[Interval95, Interval95, Runs]:
        """Return the redundant share of the step's and of generation's GPU time."""
        runs = lab.runs(cell, "rlhfless_naive")
        redundant = redundant_seconds(lab.workload(cell).setting.profile, runs)
        return (
            interval(redundant / runs.each("gpu_seconds")),
            interval(redundant / runs.function("decode")),
            runs,
        )

    four = base.but("trace.responses_per_prompt=4")
    whole, generation, runs = share(four.but(NO_CACHE))

    def prompt_tokens(cell: Cell) -> float:
        return float(lab.workload(cell).traces[0].prompt_tokens.mean())

    prompt = prompt_tokens(four)
    response = float(lab.workload(four).traces[0].response_tokens.mean())
    cached, _, cached_runs = share(four)
    left = float(
        (cached_runs.each("redundant_prefill_tokens") / runs.each("redundant_prefill_tokens")).mean()
    )
    panel: list[Point] = []
    for responses in (1, 2, 4, 8):
        for series, change_ in (("no prefix cache", (NO_CACHE,)), ("prefix cache", ())):
            value, *_ = share(base.but(f"trace.responses_per_prompt={responses}", *change_))
            panel.append(Point(series, responses, value))
    longer: list[tuple[float, Interval95]] = []
    for question in (56, 200, 400, 800):
        cell = four.but(NO_CACHE, f"trace.question_median_tokens={question}")
        longer.append((prompt_tokens(cell), share(cell)[0]))
    means = [value.mean for _, value in longer]
    needed = (
        f"{np.interp(0.22, means, [tokens for tokens, _ in longer]):.0f} tokens would give 22 %"
        if means[0] < 0.22 < means[-1]
        else f"even {longer[-1][0]:.0f} tokens give {means[-1]:.0%}"
    )
    reason = (
        f"Prompts have {prompt:.0f} tokens and responses {response:.0f}; prefill computes thousands of "
        f"tokens at once, decoding one a response. With longer prompts: {needed}."
    )
    return Row(
        3,
        "about 22 % of all GPU time is redundant KV computation",
        "GSM8K, GRPO, 3B, 4 responses a prompt, three actors, every actor prefills its own",
        (
            effect(
                "share of the step's GPU time",
                "no prefix cache in the engine",
                ("22 %", 0.22),
                as_percent(whole),
                whole,
                whole,
                reason,
            ),
            effect(
                "share of generation's GPU time",
                "no prefix cache in the engine",
                ("22 %", 0.22),
                as_percent(generation),
                generation,
                generation,
                "If the paper's total is that of generation. " + reason,
            ),
            effect(
                "share of the step's GPU time",
                "prefix cache (today's engines)",
                ("22 %", 0.22),
                as_percent(cached),
                cached,
                cached,
                f"Responses to a prompt that run together share its KV; {left:.0%} of the redundant tokens "
                "are left.",
            ),
        ),
        (
            Figure(
                "3c",
                "Redundant KV computation",
                "responses a prompt",
                {"share of all GPU time": tuple(panel)},
            ),
            Figure(
                "3c_prompts",
                "Redundant KV, 4 responses a prompt",
                "tokens a prompt",
                {"share of all GPU time": tuple(Point("no prefix cache", x, y) for x, y in longer)},
            ),
        ),
    )


def deduplicated_prefill(lab: Lab) -> Row:
    """Row 4: what deduplicated prefill saves with three responses a prompt (fig. 13b)."""
    cell = gsm8k("grpo").but(*ONE_EPOCH)
    cases = {
        "prefill tokens": (
            "no prefix cache, no prefix shared between prompts",
            cell.but("trace.block_tokens=null", NO_CACHE),
        ),
        "prefill tokens, system prompt shared": ("no prefix cache", cell.but(NO_CACHE)),
        "prefill tokens, with a prefix cache": ("prefix cache (today's engines)", cell),
    }
    reasons = {
        "prefill tokens": "1 - 1/3, exactly: every prompt is prefilled once in place of three times.",
        "prefill tokens, system prompt shared": "The first {block} tokens are the same in all prompts.",
        "prefill tokens, with a prefix cache": "The engine has most of the saving already.",
    }
    findings, panel = [], []
    for what, (options, at) in cases.items():
        local = lab.runs(at, "rlhfless_naive")
        once = lab.runs(at, "rlhfless_naive", ONE_PREFILL)
        saved = change(once.each("prefill_tokens"), local.each("prefill_tokens"))
        block = lab.workload(at).traces[0].block_tokens
        reason = reasons[what].format(block=block)
        findings.append(
            effect(
                what,
                options,
                ("-66 %", -2 / 3),
                as_change(saved),
                saved,
                saved,
                reason,
            )
        )
        panel += [
            Point("every actor its own", what, local.mean("prefill_tokens")),
            Point("one prefill actor", what, once.mean("prefill_tokens")),
        ]
    at = cases["prefill tokens, system prompt shared"][1]
    local, once = lab.runs(at, "rlhfless_naive"), lab.runs(at, "rlhfless_naive", ONE_PREFILL)
    prefill = lab.workload(at).setting.profile.prefill
    spent = local.each("prefill_tokens") * prefill.token_seconds * prefill.gpus
    cost = change(once.function("prefill"), spent)
    startup = lab.workload(at).setting.profile.functions.warm_start_seconds
    step = change(once.each("gpu_seconds"), local.each("gpu_seconds"))
    findings.append(
        effect(
            "GPU seconds of prefill",
            "no prefix cache",
            ("-66 % (theory; the bar is not known)", -2 / 3),
            as_change(cost),
            cost,
            cost,
            f"From {spent.mean():.1f} to {once.function('prefill').mean():.1f} GPU s a step. The prefill "
            f"actor sits on the learner and is billed no start-up ({startup:g} s); the whole step's bill "
            f"changes by {step.mean:+.1%}.",
        )
    )
    return Row(
        4,
        "66 % less prefill with three responses a prompt",
        "GSM8K, GRPO, 3B, three actors",
        tuple(findings),
        (Figure("13b", "Prefill tokens a step", "", {"tokens": tuple(panel)}, kind="bar"),),
    )


def stable_lengths(lab: Lab) -> Row:
    """Row 5: how much a prompt's length changes from one epoch to the next (sec. 4.3)."""
    changes = []
    for trace in lab.workload(gsm8k("ppo")).traces:
        per_epoch = [
            dict(
                zip(
                    trace.prompt[trace.epoch == e].tolist(),
                    trace.response_tokens[trace.epoch == e].tolist(),
                    strict=True,
                )
            )
            for e in np.unique(trace.epoch)
        ]
        changes.append(
            np.concatenate(
                [
                    [abs(later[prompt] - earlier[prompt]) for prompt in later.keys() & earlier.keys()]
                    for earlier, later in pairwise(per_epoch)
                ]
            )
        )
    findings = []
    for tokens, paper in ((50, 0.7), (100, 0.9)):
        share = interval([float(np.mean(change_ <= tokens)) for change_ in changes])
        findings.append(
            effect(
                f"prompts that change by at most {tokens} tokens",
                "none",
                (f"{paper:.0%}", paper),
                as_percent(share),
                share,
                share,
                "A check and no finding: the spread of a prompt's lengths in the preset was set to meet "
                "these two shares.",
            )
        )
    steps = (10, 25, 50, 75, 100, 150, 200, 300)
    curve = [
        Point("gsm8k_ppo", step, interval([float(np.mean(c <= step)) for c in changes])) for step in steps
    ]
    return Row(
        5,
        "70 % of prompts change by at most 50 tokens an epoch, 90 % by at most 100",
        "GSM8K, PPO, 3B, at most 2048 tokens",
        tuple(findings),
        (Figure("row5", "Change of a prompt's length", "tokens", {"share of prompts": tuple(curve)}),),
    )


@dataclass(frozen=True)
class Probe:
    """A scaling rule that also records what every count would cost by its estimate."""

    inner: MinMaxScore
    costs: list[FloatArray] = field(default_factory=list)

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        """Return the inner rule's choice."""
        estimate = work.paper_seconds if self.inner.estimate == "paper" else work.exact_seconds
        seconds = [estimate(split(actors)) for actors in range(1, most + 1)]
        view = work.view
        learner = view.learner_gpus if view.options.billing.learner_waiting else 0
        self.costs.append(np.array([s.sum() * view.profile.actor.gpus + s.max() * learner for s in seconds]))
        return self.inner(work, split, most)


def estimated_costs(lab: Lab, cell: Cell, policy: str, *changes: str) -> FloatArray:
    """Return what a policy's min-max score takes every count to cost a step, shape (counts, seeds)."""
    made = changed_policy(policy, *changes)
    assert isinstance(made, Composed)
    assert isinstance(made.scale, MinMaxScore)
    probe = Probe(made.scale)
    lab.replay(cell, replace(made, scale=probe))
    per_seed = np.array(probe.costs).reshape(lab.seeds, -1, len(probe.costs[0]))
    means: FloatArray = per_seed.mean(axis=1).T
    return means


#: Functions without any mechanism, and without prewarming, whose billed waiting would blur what counts cost.
BASE = "serverless_fixed"
COUNTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class CostModel:
    """Choices under which actor scaling is judged."""

    name: str
    estimate: str
    why: str
    changes: tuple[str, ...] = ()
    weight: float = PAPER_WEIGHT

    @property
    def scaling(self) -> str:
        """The override that scales under this model."""
        return scaled(self.estimate, self.weight)


LEARNER_BILLED = "options.billing.learner_waiting=true"

COST_MODELS = (
    CostModel(
        "exact estimate, no waves",
        "exact",
        "Every further actor adds weight reads to the bill and takes nothing off it.",
        (NO_WAVES,),
    ),
    CostModel(
        "paper's estimate, no waves",
        "paper",
        "The estimate keeps a batch at its initial size and so sees savings that the replay does not.",
        (NO_WAVES,),
    ),
    CostModel(
        PAPER_ESTIMATE,
        "paper",
        "Few actors have responses queue for slots; more of them shorten the queue, at less extra cost than "
        "without waves.",
    ),
    CostModel(
        "exact estimate, KV waves (25,000 tokens an actor)",
        "exact",
        "Few actors have responses queue for KV and lose it to preemption; more of them shorten the queue.",
        (NO_WAVES, "profile.actor.kv_capacity_tokens=25000"),
    ),
    CostModel(
        "exact estimate, no waves, the learner's waiting billed",
        "exact",
        "A shorter generation spares the learner's idle GPUs, but the score weighs time so much that it "
        "goes past the cheapest count.",
        (NO_WAVES, LEARNER_BILLED),
    ),
    CostModel(
        "exact estimate, no waves, the learner's waiting billed, lambda 0",
        "exact",
        "A shorter generation spares the learner's idle GPUs, and the score takes the cheapest count.",
        (NO_WAVES, LEARNER_BILLED),
        0.0,
    ),
)


def actor_scaling(lab: Lab) -> Row:
    """Row 8: scaling alone against a fixed count, and where sweet spots come from (fig. 13a)."""
    findings: list[Finding] = []
    panels: dict[str, list[Point]] = {
        "seconds a step": [],
        "GPU seconds a step": [],
        "estimated GPU s over the least": [],
    }
    for model in COST_MODELS:
        cell = gsm8k("grpo").but(*model.changes)
        fixed = lab.runs(cell, BASE)
        ours = lab.runs(cell, BASE, model.scaling)
        better = interval(
            [
                float(
                    np.mean(
                        (less(o["step_seconds"], f["step_seconds"]) == 1)
                        & (less(f["gpu_seconds"], o["gpu_seconds"]) < 1)
                    )
                )
                for o, f in zip(ours.steps, fixed.steps, strict=True)
            ]
        )
        bill = change(ours.each("gpu_seconds"), fixed.each("gpu_seconds"))
        time = change(ours.each("step_seconds"), fixed.each("step_seconds"))
        findings.append(
            claim(
                "steps in which scaling is faster than 3 actors at no more cost",
                model.name,
                f"{as_percent(better)}; time {as_change(time)}, cost {as_change(bill)}",
                better,
                f"It runs {ours.each('actors').mean():.1f} actors. {model.why}",
                "most",
            )
        )
        # What a count costs does not depend on the weight.
        if model.weight == PAPER_WEIGHT:
            findings.append(_sweet_spot(lab, cell, model, panels))
    return Row(
        8,
        "scaling alone: faster than a fixed count at no more cost in most steps",
        "GSM8K, GRPO, 3B, 3 responses a prompt; bare functions with three actors, or as many as the min-max "
        "score says (lambda 0.7 where not said otherwise)",
        tuple(findings),
        (
            Figure(
                "13a",
                "Fixed counts under five cost models",
                "actors",
                {k: tuple(v) for k, v in panels.items()},
            ),
        ),
    )


def _sweet_spot(lab: Lab, cell: Cell, model: CostModel, panels: dict[str, list[Point]]) -> Finding:
    """Judge whether the cost falls at first as actors are added: replayed, and by the rule's own estimate."""
    runs = {n: lab.runs(cell, BASE, f"scale.actors={n}") for n in COUNTS}
    cost = np.array([runs[n].each("gpu_seconds") for n in COUNTS])
    estimated = estimated_costs(lab, cell, BASE, model.scaling)
    for n, values in zip(COUNTS, cost, strict=True):
        panels["seconds a step"].append(Point(model.name, n, runs[n].mean("step_seconds")))
        panels["GPU seconds a step"].append(Point(model.name, n, interval(values)))
    for n, values in enumerate(estimated / estimated.min(axis=0), start=1):
        panels["estimated GPU s over the least"].append(Point(model.name, n, interval(values)))
    falls = interval((cost[1:].min(axis=0) < (1 - TIE) * cost[0]).astype(float))
    cheapest = interval(np.array(COUNTS, dtype=float)[np.argmin(cost, axis=0)])
    by_estimate = interval(np.argmin(estimated, axis=0) + 1.0)
    growth = float((runs[COUNTS[-1]].function("decode") / runs[COUNTS[0]].function("decode")).mean())
    return claim(
        "a sweet spot: some count above 1 costs less than 1",
        model.name,
        f"in {as_percent(falls)} of the seeds",
        falls,
        f"The bill is least with {as_number(cheapest)} actors, the rule's own estimate with "
        f"{as_number(by_estimate)}; decoding on {COUNTS[-1]} actors costs {growth:.1f} times that on "
        f"{COUNTS[0]}.",
    )
