"""The contract of a policy, and what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from rlhfless.models.cluster import Cluster
from rlhfless.models.plan import Plan
from rlhfless.models.prefix import PrefixTree
from rlhfless.models.profile import Profile
from rlhfless.models.replay import ReplayOptions, WarmFunctions
from rlhfless.policies.history import LengthHistory
from rlhfless.traces.trace import IntArray


@dataclass(frozen=True)
class PastStep:
    """What a policy knows of an earlier step: actors, generation seconds, billed GPU seconds."""

    actors: int
    generation_seconds: float
    gpu_seconds: float


@dataclass(frozen=True)
class StepView:
    """What a policy sees when it plans a step: everything but the lengths that are still to come.

    Arrays have one entry per response of the step.

    Attributes
    ----------
    step, epoch
        Numbers of the step and of the pass over the prompts.
    prompt, sample, prompt_tokens
        Which prompt (a number that is stable over the run), which of its responses, and the prompt's tokens.
    answer_tokens
        Tokens of the dataset's reference answer, where the trace has them.
    tree
        Which prompts are the same or share a prefix; ``tree.group`` numbers the step's prompts from 0.
    max_response_tokens
        The cap on a response.
    profile, cluster, stages, options
        Costs, GPUs, stages after generation, and the choices of the replay.
    variants
        Costs of actors of other sizes than the profile's, where there may be such.
    learner_gpus
        How many GPUs the learner has; they begin at GPU 0.
    history
        Lengths of the responses seen in earlier steps.
    learning_seconds
        How long the learning stage of each earlier step took, in order. That of the step just before is not
        among them: it is still under way when a step is planned.
    past
        What earlier steps took and cost, in order.
    warm
        For how many seconds more the decode function on given GPUs stays warm, counted from the start of the
        learning stage under way. Where actors get their GPUs: :func:`~rlhfless.models.plan.allocate`.
    rng
        The only source of chance, seeded by run and step.
    generated
        Tokens that each response has already, from an earlier step that was cut short; None: none.
    true_tokens
        None, except for a policy that declares ``sees_true_lengths``.

    """

    step: int
    epoch: int
    prompt: IntArray
    sample: IntArray
    prompt_tokens: IntArray
    answer_tokens: IntArray | None
    tree: PrefixTree
    max_response_tokens: int
    profile: Profile
    cluster: Cluster
    stages: tuple[str, ...]
    options: ReplayOptions
    learner_gpus: int
    history: LengthHistory
    learning_seconds: Sequence[float]
    rng: np.random.Generator = field(repr=False)
    past: Sequence[PastStep] = ()
    warm: WarmFunctions = field(default_factory=lambda: WarmFunctions({}, 0.0))
    variants: Sequence[Profile] = ()
    generated: IntArray | None = None
    true_tokens: IntArray | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def most_actors(self) -> int:
        """How many actors of the profile's size the cluster holds."""
        return self.cluster.nodes * (self.cluster.gpus_per_node // self.profile.actor.gpus)


@runtime_checkable
class Policy(Protocol):
    """Plans a step. A whole policy can be this short:

    ```python
    class OneActor:
        name = "one_actor"

        def plan(self, view: StepView) -> Plan:
            rows = np.arange(len(view))
            actor = ActorPlan(gpus=view.profile.actor.gpus, node=0, responses=rows)
            return Plan(step=view.step, policy=self.name, platform="serverless", actors=(actor,),
                        learner=Learner(gpus=view.learner_gpus))
    ```

    ``plan`` must put every response of the view in exactly one actor, and must depend on nothing but the view
    (chance comes from ``view.rng``), so that a run can be repeated. An attribute ``sees_true_lengths = True``
    asks for the true lengths; such a policy says ``oracle`` in its name.
    """

    @property
    def name(self) -> str:
        """Stands in plans and tables."""
        ...

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        ...
