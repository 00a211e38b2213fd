"""The loop of a run: view, plan, replay, history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.models.checks import check
from rlhfless.models.cluster import Cluster
from rlhfless.models.plan import LowerBound, Plan
from rlhfless.models.prefix import PrefixTree
from rlhfless.models.profile import Profile
from rlhfless.models.replay import Replay, ReplayOptions, StepOutcome
from rlhfless.models.stages import stages_of
from rlhfless.policies.base import PastStep, Policy, StepView
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.sampling import AsRecorded, Sampling
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import IntArray, Trace

#: Proves a lower bound for a step of which these lengths are predicted.
Bound = Callable[[StepView, IntArray], LowerBound]


@dataclass(frozen=True)
class Setting:
    """What a run happens on: costs, GPUs, the learner's share of them, and the choices of the replay.

    ``variants`` are profiles of the same model and GPU type for actors of other sizes than the profile's.
    """

    profile: Profile
    cluster: Cluster
    options: ReplayOptions
    learner_gpus: int
    variants: tuple[Profile, ...] = ()

    def stages(self, trace: Trace) -> tuple[str, ...]:
        """Return the stages after generation for the trace's algorithm."""
        return stages_of(trace.algorithm, self.profile)


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a run: its batch, the plan, what it did, and the measured wall time of the policy."""

    batch: Trace
    plan: Plan
    outcome: StepOutcome
    planning_seconds: float


def view_of(
    batch: Trace,
    setting: Setting,
    history: LengthHistory,
    *,
    max_response_tokens: int,
    learning_seconds: tuple[float, ...] = (),
    seed: int = 0,
) -> StepView:
    """Return what a policy sees of a step's batch: nothing of its response lengths, and nothing to write to."""
    step = int(batch.step[0])
    for array in (batch.prompt, batch.sample, batch.prompt_tokens, batch.answer_tokens):
        if array is not None:
            array.setflags(write=False)
    return StepView(
        step=step,
        epoch=int(batch.epoch[0]),
        prompt=batch.prompt,
        sample=batch.sample,
        prompt_tokens=batch.prompt_tokens,
        answer_tokens=batch.answer_tokens,
        tree=PrefixTree.of(batch),
        max_response_tokens=max_response_tokens,
        profile=setting.profile,
        cluster=setting.cluster,
        stages=setting.stages(batch),
        options=setting.options,
        variants=setting.variants,
        learner_gpus=setting.learner_gpus,
        history=history,
        learning_seconds=learning_seconds,
        rng=np.random.default_rng([seed, step]),
    )


def simulate(
    trace: Trace, policy: Policy, setting: Setting, *, seed: int = 0, bound: Bound | None = None
) -> Iterator[SimulatedStep]:
    """Replay a trace under a policy, step by step, and yield each step.

    The policy sees earlier steps' true lengths only (an oracle sees the step's own). Where the trace states
    no cap on a response, the policy is told what fits an actor beside the longest prompt. Every outcome passes
    the conservation checks.

    Raises
    ------
    InputError
        When the policy's plan is refused.

    """
    stages = setting.stages(trace)
    replay = Replay(setting.profile, setting.cluster, stages, setting.options, setting.variants)
    history = LengthHistory(len(trace.prompt_ids))
    learning: list[float] = []
    past: list[PastStep] = []
    room = setting.profile.actor.kv_capacity_tokens - int(trace.prompt_tokens.max())
    cap = trace.max_response_tokens or max(room, 1)
    oracle = bool(getattr(policy, "sees_true_lengths", False))
    if oracle and "oracle" not in policy.name:
        raise InputError(f"policy {policy.name} asks for the true lengths: its name must say oracle")
    sampler = sampling_of(policy).start(trace)
    position = 0
    while (launch := sampler.launch()) is not None:
        batch = trace.select(launch.rows)
        step = int(trace.steps[min(position, len(trace.steps) - 1)]) + max(position - len(trace.steps) + 1, 0)
        batch = replace(batch, step=np.full(len(batch), step, dtype=np.int64))
        position += 1
        view = replace(
            view_of(
                batch,
                setting,
                history,
                max_response_tokens=cap,
                learning_seconds=tuple(learning[:-1]),
                seed=seed,
            ),
            past=tuple(past),
            warm=replay.warm_functions(),
            generated=launch.generated,
            true_tokens=batch.response_tokens.copy() if oracle else None,
        )
        started = time.perf_counter()
        plan = policy.plan(view)
        planning_seconds = time.perf_counter() - started
        where = f"step {step}, policy {policy.name}"
        if not isinstance(plan, Plan):
            raise InputError(f"{where}: plan returned {type(plan).__name__}, must return a Plan")
        plan = replace(plan, deliver_prompts=launch.prompts)
        if bound is not None and plan.predicted is not None and len(plan.predicted_tokens):
            lower = bound(view, plan.predicted_tokens)
            plan = replace(plan, predicted=plan.predicted.model_copy(update={"lower_bound": lower}))
        outcome = replay.step(plan, batch, where, view.tree, launch.generated)
        check(outcome, setting.profile, *setting.variants)
        history.record(batch if outcome.delivered.all() else batch.select(np.flatnonzero(outcome.delivered)))
        learning.append(outcome.learning_seconds)
        past.append(PastStep(outcome.actors, outcome.generation_seconds, outcome.gpu_seconds))
        sampler.settle(launch, outcome.delivered, outcome.generated)
        yield SimulatedStep(batch, plan, outcome, planning_seconds)


def sampling_of(policy: Policy) -> Sampling:
    """Return which prompts a policy's steps launch: its attribute ``sampling``, or the trace's own steps."""
    sampling: Sampling = getattr(policy, "sampling", None) or AsRecorded()
    return sampling
