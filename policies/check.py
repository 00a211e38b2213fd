"""A checker for the authors of policies."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.computed import computed_profile
from rlhfless.models.plan import Plan
from rlhfless.models.replay import ReplayOptions
from rlhfless.policies.base import Policy, StepView
from rlhfless.policies.simulate import Setting, simulate
from rlhfless.traces.errors import InputError
from rlhfless.traces.synthetic import LengthComponent, Synthetic, generate
from rlhfless.traces.trace import Trace

_WORKLOAD = Synthetic(
    name="check",
    prompts=16,
    prompts_per_step=8,
    responses_per_prompt=3,
    epochs=2,
    max_response_tokens=1024,
    lengths=(LengthComponent(weight=1.0, median_tokens=200.0, log_sd=0.6),),
    icc=0.6,
    question_median_tokens=50.0,
    question_log_sd=0.4,
    max_prompt_tokens=512,
    system_tokens=32,
    block_tokens=16,
)


def check_policy(policy: object, trace: Trace | None = None, setting: Setting | None = None) -> None:
    """Run a policy on a small workload and raise an error that says what is wrong with it.

    Checked: it has a name and a method ``plan`` that returns a :class:`Plan`; every response stands in exactly
    one actor; the GPUs exist; the same view gives the same plan; the view is not written to; the replay
    accepts the plan in every step of two epochs, with and without history.

    Parameters
    ----------
    policy
        The policy, built.
    trace, setting
        The workload and what it runs on; by default 3 responses to each of 16 prompts over two epochs of two
        steps, on two nodes of eight H100.

    Raises
    ------
    InputError
        One line: the policy, the step, and the rule it breaks.

    """
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"policy {type(policy).__name__}: it needs an attribute name, a string")
    if not isinstance(policy, Policy):
        raise InputError(f"policy {name}: it needs a method plan(view)")
    if trace is None:
        trace = generate(_WORKLOAD, seed=0)
    if setting is None:
        profile = computed_profile("H100", "Qwen2.5-7B", tensor_parallel=2)
        setting = Setting(
            profile,
            Cluster(nodes=2, gpus_per_node=8, gpu="H100"),
            ReplayOptions(),
            profile.stages["update_actor"].gpus,
        )
    for _ in simulate(trace, _Watched(policy), setting):
        pass


class _Watched:
    """Passes views on to a policy and looks at what it does with them."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.sees_true_lengths = bool(getattr(policy, "sees_true_lengths", False))
        self._policy = policy

    def plan(self, view: StepView) -> Plan:
        where = f"policy {self.name}: step {view.step}"
        for field in fields(view):
            value = getattr(view, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        again = replace(view, rng=copy.deepcopy(view.rng))
        plans = []
        for given in (view, again):
            try:
                plan = self._policy.plan(given)
            except InputError:
                raise
            except Exception as error:
                text = " ".join(str(error).split())
                if isinstance(error, ValueError) and "read-only" in text:
                    raise InputError(f"{where}: plan writes into the view ({text})") from error
                raise InputError(f"{where}: plan raised {type(error).__name__}: {text}") from error
            if not isinstance(plan, Plan):
                raise InputError(f"{where}: plan returned {type(plan).__name__}, must return a Plan")
            if plan.step != view.step:
                raise InputError(f"{where}: the plan says step {plan.step}")
            plans.append(plan)
        first, second = plans
        if _decisions(first) != _decisions(second):
            raise InputError(
                f"{where}: the same view gave two different plans; take chance from view.rng only"
            )
        return first


def _decisions(plan: Plan) -> tuple[object, ...]:
    actors = tuple(
        (a.gpus, a.node, a.colocated, a.prewarm_seconds, tuple(np.asarray(a.responses).tolist()))
        for a in plan.actors
    )
    return (actors, plan.prefill, plan.migration, plan.learner, plan.platform, plan.preparation, plan.prewarm)
