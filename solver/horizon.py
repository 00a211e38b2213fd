"""Actor counts over a whole run: the decision, its exact offline optimum, and rules that follow it.

Starting a function costs time and GPU seconds, keeping it warm costs GPU seconds, and both are decided before
the next step is known. A step's decision is an :class:`Action`: how many actors decode, at which share of
complete responses stragglers are cut, and how many of the actors stay warm for the next step. Everything
else is a :class:`DecisionSpace`: prediction, assignment, prefill and placement are those of a composed policy.

**The model.** Actors are numbered by falling work and get the same GPUs at every count (*slots*), none of the
learner's. A plan is made when the learning stage before its step begins: it invokes a warm slot its warm
start-up, a cold one its cold start-up before the expected end of that stage, but none before the plan exists.
A slot that is kept stays warm until the next plan calls or retires it. Preparation and learning run on the
learner's GPUs. Then what a step does depends on its action and on the number ``m`` of warm slots alone:

* Predictions, expected learning times and learning times depend on earlier lengths, not on earlier actions.
* A function is invoked at most one learning stage before its step, when its GPUs are free whatever the step
  before did with them.
* Slots are called from the first on, so that of ``k`` kept ones the first ``min(k, n)`` are warm in a step with
  ``n`` actors; the rest is retired, and who is warm later depends on that step's own ``keep``.
* What a kept slot is billed up to the end of its step is known in that step (``keep``), and what it is billed
  less for being invoked before the next step begins is known in the next (part of ``gpu_seconds``).

So a run is a path through ``m``, its time and cost are sums over the path, and the tables of these sums are
filled by the replay itself. :func:`offline_optimum` is the shortest path. It is a lower bound for every rule
of this space, online or not, since each of them takes some path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rlhfless.models.plan import Migration, Plan, Prewarm, allocate
from rlhfless.models.replay import Gpus, Replay, StepOutcome
from rlhfless.policies.assign import Groups, SortedEven
from rlhfless.policies.base import PastStep, StepView
from rlhfless.policies.composed import Composed
from rlhfless.policies.forecast import Forecast
from rlhfless.policies.guess import guess_lengths
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.place import Apart
from rlhfless.policies.prefill import DeduplicatedPrefill
from rlhfless.policies.prewarm import shortest_past
from rlhfless.policies.sampling import AsRecorded
from rlhfless.policies.scale import FixedActors, MinMaxScore, Split, Work
from rlhfless.policies.simulate import Setting, view_of
from rlhfless.solver.objective import Objective
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray, Trace

#: A kept slot stays warm until the next plan; longer than any step.
_KEPT_SECONDS = 1e7


@dataclass(frozen=True)
class Action:
    """A step's decision: ``actors`` decode, ``threshold`` indexes the space's, the first ``keep`` stay warm."""

    actors: int
    threshold: int
    keep: int


@dataclass(frozen=True)
class StepTable:
    """What each decision takes and costs in one step, on the true lengths or as forecast.

    Attributes
    ----------
    seconds
        Step time by actors - 1, threshold and warm slots, shape (N, T, N + 1).
    gpu_seconds
        Billed GPU seconds, without what kept slots are billed after their release; same shape.
    keep
        GPU seconds billed until the step ends for keeping so many slots, shape (N, T, N + 1, N + 1).
    generation
        Generation seconds, same shape as ``seconds``.
    actors
        The most actors there can be: fewer than N in a step with fewer responses.

    """

    seconds: FloatArray
    gpu_seconds: FloatArray
    keep: FloatArray
    generation: FloatArray
    actors: int

    def warm_after(self, action: Action) -> int:
        """Return how many slots are warm after a decision."""
        return min(action.keep, action.actors, self.actors)

    def values(self, objective: Objective) -> FloatArray:
        """Return the objective of every decision, shape (N, T, N + 1, N + 1): warm slots, then kept ones."""
        cost = self.gpu_seconds[..., None] + self.keep
        return objective.time_weight * self.seconds[..., None] + objective.cost_weight * cost


@dataclass(frozen=True)
class StepForecast:
    """What a policy expects of a step; arrays by actors - 1 and threshold have shape (N, T).

    Side by side (:class:`~rlhfless.solver.episodes.Episodes`) every field has a leading axis of runs.

    Attributes
    ----------
    generation, held
        Generation seconds and GPU seconds of decoding with all slots warm, means over guesses of the lengths.
    minmax
        The count that the space's own scaling rule chooses.
    learning, expected_learning
        Seconds of this step's learning stage, by its predicted tokens, and what is expected of the one before;
        0 when there is no expectation.
    rest
        Seconds from the end of generation to the end of the step.
    new_prompts
        Share of the responses whose prompt the history does not know.
    steps
        How many steps are over.
    last_generation, last_actors
        Generation seconds and actors of the step before; 0 in the first.

    """

    generation: FloatArray
    held: FloatArray
    minmax: int | IntArray
    learning: float | FloatArray
    expected_learning: float | FloatArray
    rest: float | FloatArray
    new_prompts: float | FloatArray
    steps: int | IntArray
    last_generation: float | FloatArray
    last_actors: int | IntArray


@dataclass(frozen=True)
class Costs:
    """What forecasts need of a setting: an actor's GPUs, start-up seconds, and which times are billed."""

    actor_gpus: int
    learner_gpus: int
    cold_seconds: float
    warm_seconds: float
    startup_billed: bool
    keep_billed: bool
    learner_functions: int

    @classmethod
    def of(cls, view: StepView) -> Costs:
        """Return those of a view."""
        functions, billing = view.profile.functions, view.options.billing
        on_gpus = sum(view.profile.stages[stage].gpus > 0 for stage in view.stages)
        return cls(
            actor_gpus=view.profile.actor.gpus,
            learner_gpus=view.learner_gpus,
            cold_seconds=functions.cold_start_seconds,
            warm_seconds=functions.warm_start_seconds,
            startup_billed=billing.startup,
            keep_billed=billing.keep_alive,
            learner_functions=on_gpus,
        )


@dataclass
class _Noting:
    """A fixed count that keeps the work it was shown."""

    actors: int
    work: Work | None = None

    def __call__(self, work: Work, split: Split, most: int) -> Groups:
        self.work = work
        return FixedActors(self.actors)(work, split, most)


@dataclass(frozen=True)
class StepChoices:
    """A step's plans, one a count, and the slots' GPUs."""

    view: StepView
    space: DecisionSpace
    plans: tuple[Plan, ...]
    slots: tuple[Gpus, ...]
    work: Work
    expected_learning: float | None

    @property
    def warm(self) -> int:
        """How many slots, from the first on, are warm and stay so until they would be called."""
        needed = self.expected_learning or 0.0
        cold = (slot for slot, gpus in enumerate(self.slots) if self.view.warm(gpus) <= needed)
        return next(cold, len(self.slots))

    def plan(self, action: Action, warm: int) -> Plan:
        """Return the plan of a decision when so many slots are warm.

        Raises
        ------
        InputError
            When the action is none of the space.

        """
        if not 1 <= action.actors <= len(self.plans):
            raise InputError(
                f"step {self.view.step}: {action.actors} actors, the space has 1 to {len(self.plans)}"
            )
        plan = self.plans[action.actors - 1]
        functions, most = self.view.profile.functions, self.expected_learning or 0.0
        actors = tuple(
            replace(
                actor,
                prewarm_seconds=min(
                    functions.warm_start_seconds if slot < warm else functions.cold_start_seconds, most
                ),
                keep_alive_seconds=_KEPT_SECONDS if slot < action.keep else 0.0,
            )
            for slot, actor in enumerate(plan.actors)
        )
        threshold = self.space.thresholds[action.threshold]
        return replace(
            plan,
            actors=actors,
            migration=plan.migration.model_copy(update={"threshold": threshold}),
            prewarm=Prewarm(learning_seconds=self.expected_learning),
            preparation="learner",
            retire_unused=True,
        )

    def forecast(self) -> StepForecast:
        """Return what to expect of every count and threshold, on guesses of the lengths."""
        view, space = self.view, self.space
        lengths = guess_lengths(view, self.work.predicted_tokens, space.guesses)
        splits = [[actor.responses for actor in plan.actors] for plan in self.plans]
        forecast = Forecast(
            view,
            self.work.cached_tokens,
            self.work.prefill_seconds,
            space.base.place,
            min(view.profile.functions.warm_start_seconds, self.expected_learning or 0.0),
        )
        shape = (len(self.plans), len(space.thresholds))
        generation, held = np.empty(shape), np.empty(shape)
        for column, threshold in enumerate(space.thresholds):
            migration = self.plans[0].migration.model_copy(update={"threshold": threshold})
            seconds, gpu_seconds = forecast(splits, lengths, migration)
            generation[:, column], held[:, column] = seconds.mean(axis=1), gpu_seconds.mean(axis=1)
        tokens = float(view.prompt_tokens.sum() + lengths.mean(axis=0).sum())
        seconds_of = {
            stage: view.profile.stages[stage].seconds(tokens, view.learner_gpus) for stage in view.stages
        }
        learning = sum(seconds for stage, seconds in seconds_of.items() if stage.startswith("update"))
        last = view.past[-1] if view.past else PastStep(0, 0.0, 0.0)
        return StepForecast(
            generation=generation,
            held=held,
            minmax=len(space.base.plan(view).actors),
            learning=learning,
            expected_learning=self.expected_learning or 0.0,
            rest=sum(seconds_of.values()) + view.profile.functions.warm_start_seconds,
            new_prompts=float(np.isnan(view.history.recent(view.prompt, 1)[0]).mean()),
            steps=len(view.past),
            last_generation=last.generation_seconds,
            last_actors=last.actors,
        )


def _default_base() -> Composed:
    return Composed(
        name="horizon",
        assign=SortedEven(),
        scale=MinMaxScore(estimate="paper"),
        prefill=DeduplicatedPrefill(),
        migration=Migration(rule="local", threshold=0.7),
        place=Apart(),
    )


@dataclass(frozen=True)
class DecisionSpace:
    """What is decided in every step, and what is not.

    Parameters
    ----------
    base
        How responses are predicted, split and placed. Its placement must give actor ``i`` the same GPUs at
        every count, none of the learner's, as :class:`~rlhfless.policies.Apart` does; its scaling is the rule that
        others are compared with.
    thresholds
        Shares of complete responses at which stragglers may be cut; 1: never.
    most
        The largest count; null: what the GPUs allow.
    guesses
        On how many guesses of the lengths a step is forecast.

    """

    base: Composed = field(default_factory=_default_base)
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)
    most: int | None = None
    guesses: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "thresholds", tuple(self.thresholds))
        if not self.thresholds or not all(0 < t <= 1 for t in self.thresholds):
            raise InputError(f"thresholds are {self.thresholds}, must be above 0 and at most 1, at least one")
        if self.guesses < 1:
            raise InputError(f"guesses is {self.guesses}, must be at least 1")
        if self.most is not None and self.most < 1:
            raise InputError(f"most is {self.most}, must be at least 1")
        if not isinstance(self.base.migration, Migration) or self.base.migration.rule != "local":
            raise InputError("base.migration: must be a Migration with rule local")
        if self.base.sampling != AsRecorded() or self.base.platform != "serverless":
            raise InputError("base: must be serverless and launch the steps as recorded")

    def largest(self, view: StepView) -> int:
        """Return the largest count in a setting."""
        most = self.base.place.most(view)
        if most < 1:
            raise InputError(
                f"an actor of profile {view.profile.name} does not fit the GPUs beside the learner"
            )
        return most if self.most is None else min(most, self.most)

    def choices(self, view: StepView) -> StepChoices:
        """Return the plans of a step.

        With fewer responses than slots, larger counts stand for one response an actor.

        Raises
        ------
        InputError
            When no actor fits beside the learner, or slots move with the count.

        """
        noted = [_Noting(count) for count in range(1, self.largest(view) + 1)]
        plans = tuple(replace(self.base, scale=scale).plan(view) for scale in noted)
        where = f"policy {self.base.name}"
        given = [allocate(plan, view.cluster, where) for plan in plans]
        slots = given[-1].actors
        if any(one.actors != slots[: len(one.actors)] for one in given) or any(
            actor.colocated for actor in plans[-1].actors
        ):
            raise InputError(
                f"{where}: the placement must give an actor the same GPUs at every count, none of the learner's"
            )
        work = noted[-1].work
        assert work is not None
        return StepChoices(view, self, plans, slots, work, shortest_past(view))


@dataclass(frozen=True)
class HorizonTables:
    """A run's decisions: exact tables and forecasts, one a step.

    Built by :func:`horizon_tables` for one trace, setting and space.
    """

    steps: tuple[StepTable, ...]
    forecasts: tuple[StepForecast, ...]
    costs: Costs
    thresholds: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def most(self) -> int:
        """The largest count."""
        return len(self.steps[0].seconds)


@dataclass(frozen=True)
class Course:
    """A run's decisions with their sums: seconds of all steps, billed GPU seconds, and the objective of both."""

    actions: tuple[Action, ...]
    seconds: float
    gpu_seconds: float
    value: float


def horizon_tables(
    trace: Trace, setting: Setting, space: DecisionSpace | None = None, *, seed: int = 0
) -> HorizonTables:
    """Fill the tables of a trace with the replay's own outcomes on the true lengths.

    Where all functions are ready in time, warm or cold, a step's times do not depend on the warm slots and its
    cost is linear in them; then two replays a count and threshold give the row, otherwise one for each number
    of warm slots.

    Raises
    ------
    InputError
        When the run starts warm, or the learner's own functions cool down between two steps, so that a step
        would depend on more than its action and the warm slots.

    """
    space = space or DecisionSpace()
    if setting.options.warm_at_start:
        raise InputError("options.warm_at_start: must be false, the horizon begins with cold functions")
    run = Replay(setting.profile, setting.cluster, setting.stages(trace), setting.options)
    history = LengthHistory(len(trace.prompt_ids))
    room = setting.profile.actor.kv_capacity_tokens - int(trace.prompt_tokens.max())
    learning: list[float] = []
    tables, forecasts = [], []
    costs: Costs | None = None
    last = len(trace.steps) - 1
    for number, batch in enumerate(trace.batches()):
        view = view_of(
            batch,
            setting,
            history,
            max_response_tokens=trace.max_response_tokens or max(room, 1),
            learning_seconds=tuple(learning[:-1]),
            seed=seed,
        )
        # What the steps before took depends on the actions; whoever follows the tables fills it in.
        view = replace(view, past=(PastStep(0, 0.0, 0.0),) * number)
        choices = space.choices(view)
        costs = costs or Costs.of(view)
        forecasts.append(choices.forecast())
        table, run = _fill(run, choices, batch, first=number == 0, last=number == last)
        tables.append(table)
        history.record(batch)
        assert run.learning_seconds is not None
        learning.append(run.learning_seconds)
    if costs is None:
        raise InputError(f"trace {trace.name}: has no step")
    return HorizonTables(tuple(tables), tuple(forecasts), costs, space.thresholds)


def _fill(
    run: Replay, choices: StepChoices, batch: Trace, *, first: bool, last: bool
) -> tuple[StepTable, Replay]:
    """Return a step's table, and the run after one of its actions."""
    most, thresholds = len(choices.plans), len(choices.space.thresholds)
    shape = (most, thresholds, most + 1)
    seconds, gpu_seconds, generation = np.empty(shape), np.empty(shape), np.empty(shape)
    keep = np.zeros((*shape, most + 1))
    after = run
    for n in range(1, most + 1):
        actors = len(choices.plans[n - 1].actors)
        for t in range(thresholds):
            known: list[int] = []
            for m in _warm_counts(run, choices, actors, first=first):
                after = run.branch(choices.slots[:m])
                plan = choices.plan(Action(n, t, 0), m)
                outcome = after.step(plan, batch, f"step {plan.step}", choices.view.tree)
                _check_learner(outcome, actors - m, first=first)
                seconds[n - 1, t, m] = outcome.step_seconds
                gpu_seconds[n - 1, t, m] = outcome.gpu_seconds
                generation[n - 1, t, m] = outcome.generation_seconds
                if run.options.billing.keep_alive and not last:
                    tails = (outcome.step_seconds - outcome.release) * choices.view.profile.actor.gpus
                    keep[n - 1, t, m, 1 : actors + 1] = np.cumsum(tails)
                    keep[n - 1, t, m, actors + 1 :] = keep[n - 1, t, m, actors]
                known.append(m)
            warm = np.minimum(np.arange(most + 1), known[-1])
            for array in (seconds, gpu_seconds, generation):
                array[n - 1, t] = np.interp(warm, known, array[n - 1, t, known])
            # Times do not depend on the warm slots wherever some of them were left out.
            keep[n - 1, t] = keep[n - 1, t, np.array(known)[np.searchsorted(known, warm)]]
    return StepTable(seconds, gpu_seconds, keep, generation, len(choices.plans[-1].actors)), after


def _warm_counts(run: Replay, choices: StepChoices, actors: int, *, first: bool) -> list[int]:
    """Return the numbers of warm slots that must be replayed; between them, costs are linear."""
    if first:
        return [0]
    functions, most = run.profile.functions, choices.expected_learning or 0.0
    late = 0.0 if choices.expected_learning is None else (run.learning_seconds or 0.0) - most
    ready = [
        max(startup - max(min(startup, most) + late, 0.0), 0.0)
        for startup in (functions.warm_start_seconds, functions.cold_start_seconds)
    ]
    return [0, actors] if ready[0] == ready[1] else list(range(actors + 1))


def _check_learner(outcome: StepOutcome, cold_actors: int, *, first: bool) -> None:
    if not first and outcome.cold_starts != cold_actors:
        raise InputError(
            f"step {outcome.step}: a stage after generation starts cold; the horizon needs "
            "functions.keep_alive_seconds that lasts from step to step"
        )


def course(tables: HorizonTables, actions: Sequence[Action], objective: Objective) -> Course:
    """Return what decisions add up to, from a cold start on."""
    warm, seconds, gpu_seconds = 0, 0.0, 0.0
    for table, action in zip(tables.steps, actions, strict=True):
        at = (action.actors - 1, action.threshold, warm)
        seconds += float(table.seconds[at])
        gpu_seconds += float(table.gpu_seconds[at] + table.keep[(*at, action.keep)])
        warm = table.warm_after(action)
    return Course(tuple(actions), seconds, gpu_seconds, float(objective.value(seconds, gpu_seconds)))


def offline_optimum(tables: HorizonTables, objective: Objective) -> Course:
    """Return the best decisions for the whole run, knowing all lengths: a bound for every rule of the space.

    Dynamic programming backwards over steps: ``V_s(m)`` is the least objective of steps ``s`` and later when
    ``m`` slots are warm, and ``V_s(m) = min over (n, tau, k) of value_s(n, tau, m, k) + V_{s+1}(k)`` with ``k <= n``. By
    induction over ``s``, ``V_0(0)`` is the least over all sequences, since (module docstring) a step's value
    depends on ``n``, ``tau``, ``m`` and ``k`` alone and ``m`` in the next step on ``k`` and ``n`` alone.
    O(steps * T * N^3). Ties go to fewer actors, then to the lower threshold, then to fewer kept.

    Raises
    ------
    InputError
        When the objective has limits: they bind all steps together (``rolling.best_window`` takes them).

    """
    if np.isfinite([objective.time_limit, objective.cost_limit]).any():
        raise InputError("the offline optimum over steps takes no limit on time or cost")
    most = tables.most
    n, k = np.arange(1, most + 1), np.arange(most + 1)
    impossible = np.where(k > n[:, None], np.inf, 0.0)[:, None, None, :]
    left = np.zeros(most + 1)
    chosen: list[IntArray] = []
    for table in reversed(tables.steps):
        values = table.values(objective) + impossible + left[np.minimum(k, table.actors)]
        flat = np.moveaxis(values, 2, 0).reshape(most + 1, -1)
        best = flat.argmin(axis=1)
        left = np.take_along_axis(flat, best[:, None], axis=1)[:, 0]
        chosen.append(best)
    actions, warm = [], 0
    for table, best in zip(tables.steps, reversed(chosen), strict=True):
        count, threshold, kept = np.unravel_index(best[warm], (most, len(tables.thresholds), most + 1))
        action = Action(int(count) + 1, int(threshold), int(kept))
        actions.append(action)
        warm = table.warm_after(action)
    return course(tables, actions, objective)


class Rule(Protocol):
    """Decides a step from what may be known of it."""

    def __call__(self, forecast: StepForecast, costs: Costs, warm: int) -> Action:
        """Return the decision when so many slots are warm."""
        ...


@dataclass(frozen=True)
class FixedRule:
    """Always the same count, threshold and kept slots; a count of None is the min-max rule's.

    ``keep`` of None keeps every actor.
    """

    actors: int | None
    threshold: int = 1
    keep: int | None = 0

    def __call__(self, forecast: StepForecast, costs: Costs, warm: int) -> Action:
        """Return the decision."""
        actors = min(self.actors or int(forecast.minmax), len(forecast.generation))
        return Action(actors, self.threshold, actors if self.keep is None else min(self.keep, actors))


def follow(tables: HorizonTables, rule: Rule, objective: Objective) -> Course:
    """Return what a rule does to a run in the model, step by step."""
    actions: list[Action] = []
    warm, past = 0, PastStep(0, 0.0, 0.0)
    for table, forecast in zip(tables.steps, tables.forecasts, strict=True):
        seen = replace(forecast, last_generation=past.generation_seconds, last_actors=past.actors)
        action = rule(seen, tables.costs, warm)
        at = (action.actors - 1, action.threshold, warm)
        past = PastStep(action.actors, float(table.generation[at]), float(table.gpu_seconds[at]))
        actions.append(action)
        warm = table.warm_after(action)
    return course(tables, actions, objective)


@dataclass(frozen=True)
class HorizonPolicy:
    """A policy that plans by a rule over the decision space.

    Parameters
    ----------
    name
        Stands in plans and tables.
    rule
        Decides from forecasts and warm slots.
    space
        What is decided.

    """

    name: str
    rule: Rule
    space: DecisionSpace = field(default_factory=DecisionSpace)

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        choices = self.space.choices(view)
        warm = choices.warm
        action = self.rule(choices.forecast(), Costs.of(view), warm)
        return replace(choices.plan(action, warm), policy=self.name)


@dataclass(frozen=True)
class SchedulePolicy:
    """A policy that follows decisions made beforehand, such as the offline optimum's, one a step."""

    name: str
    actions: tuple[Action, ...]
    space: DecisionSpace = field(default_factory=DecisionSpace)

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        choices = self.space.choices(view)
        action = self.actions[len(view.past)]
        return replace(choices.plan(action, choices.warm), policy=self.name)
