"""Learned rules over the horizon's decisions: how they decide, their file, and the policy that loads one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhfless.models.plan import Plan
from rlhfless.policies.base import StepView
from rlhfless.solver.episodes import observation, step_weights, surprise
from rlhfless.solver.horizon import Action, Costs, DecisionSpace, HorizonPolicy, Rule, StepForecast
from rlhfless.solver.objective import Objective
from rlhfless.traces.errors import InputError, first_problem
from rlhfless.traces.trace import FloatArray, IntArray

SCHEMA = "rlhfless.horizon_policy/1"

#: What scores a count and a threshold; the names stand in policy files.
_COUNT_FEATURES = (
    "time",
    "cost",
    "learner_waiting",
    "time_new_prompts",
    "time_surprise",
    "count",
    "count_squared",
    "count_new_prompts",
    "minmax",
    "low_threshold",
    "high_threshold",
)
#: What scores a count, given the warm slots.
_WARM_FEATURES = ("startup", "delay", "change")
#: What scores how many slots stay warm, given the count.
_KEEP_FEATURES = ("keep_alive", "saved_startup", "saved_delay", "kept", "kept_all", "kept_new_prompts")
FEATURES = _COUNT_FEATURES + _WARM_FEATURES + _KEEP_FEATURES

#: The weights at which the score is the forecast of the objective itself, the next step taken to be like this one.
FORECAST_WEIGHTS = np.array(
    [
        1.0 if name in {"time", "cost", "learner_waiting", "startup", "delay", *_KEEP_FEATURES[:3]} else 0.0
        for name in FEATURES
    ]
)

# Features that are no part of the objective are of the order of a tenth of it.
_SCALE = 0.1


@dataclass(frozen=True)
class Features:
    """Features of every candidate, with leading axes for runs: the score is a sum of three small tables.

    Attributes
    ----------
    count
        Shape (..., N, T, features): by actors - 1 and threshold.
    warm
        Shape (..., N + 1, N, features): by warm slots and actors - 1.
    keep
        Shape (..., N, N + 1, features): by actors - 1 and kept slots; more kept than actors is ruled out by
        the rule.

    """

    count: FloatArray
    warm: FloatArray
    keep: FloatArray


def features(forecast: StepForecast, costs: Costs, relative: Objective) -> Features:
    """Return the features of every candidate of a step, or of several runs' steps at once.

    ``relative`` are the weights of :func:`~rlhfless.solver.episodes.relative_objective`.
    """
    weights = step_weights(forecast, relative)
    time, cost = (np.asarray(weight)[..., None, None] for weight in weights)
    most, thresholds = forecast.generation.shape[-2:]
    lead = np.shape(forecast.rest)

    def single(value: Any) -> FloatArray:
        """Return a number a run as (..., 1, 1)."""
        return np.asarray(value, dtype=np.float64)[..., None, None]

    n = np.arange(1.0, most + 1)[:, None]
    t = np.arange(thresholds)
    share = np.broadcast_to(n / most, (*lead, most, thresholds))
    new = single(forecast.new_prompts)
    generation = time * forecast.generation
    learner = costs.learner_functions * costs.learner_gpus * costs.keep_billed
    count = np.stack(
        [
            generation,
            cost * forecast.held,
            cost * learner * forecast.generation,
            generation * new,
            generation * single(surprise(forecast, thresholds // 2)),
            _SCALE * share,
            _SCALE * share**2,
            _SCALE * share * new,
            _SCALE * np.broadcast_to(n == single(forecast.minmax), share.shape),
            _SCALE * np.broadcast_to(t == 0, share.shape),
            _SCALE * np.broadcast_to(t == thresholds - 1, share.shape),
        ],
        axis=-1,
    )

    startup = costs.actor_gpus * (costs.cold_seconds - costs.warm_seconds) * costs.startup_billed
    slots = np.arange(most + 1.0)
    started = np.maximum(n[:, 0] - slots[:, None], 0)
    shape = (*lead, most + 1, most)
    delay = _delay(single(forecast.expected_learning), costs)
    warm = np.stack(
        [
            np.broadcast_to(cost * startup * started, shape),
            time * delay * (started > 0),
            np.broadcast_to(_SCALE * np.abs(n[:, 0] - slots[:, None]) / most, shape),
        ],
        axis=-1,
    )

    # How long a kept slot waits for the end of the step, on average over actors.
    early = forecast.generation - forecast.held / (costs.actor_gpus * n)
    tail = np.maximum(early.mean(axis=-1)[..., None], 0) + single(forecast.rest)
    steps, expected = np.asarray(forecast.steps), np.asarray(forecast.expected_learning)
    # The step after the first one has no past learning stage to expect the next by.
    ahead = np.where(steps == 0, 0.0, np.where(expected > 0, expected, forecast.learning))
    shape = (*lead, most, most + 1)
    kept_all = np.broadcast_to(slots >= n, shape)
    keep = np.stack(
        [
            cost * costs.actor_gpus * costs.keep_billed * tail * slots,
            np.broadcast_to(-cost * startup * slots, shape),
            -time * _delay(single(ahead), costs) * kept_all,
            np.broadcast_to(_SCALE * slots / n, shape),
            _SCALE * kept_all,
            _SCALE * slots / n * new,
        ],
        axis=-1,
    )
    return Features(count, warm, keep)


def _delay(lead: FloatArray, costs: Costs) -> FloatArray:
    """Return how much later a cold function is ready than a warm one when both may be invoked so early."""
    delay: FloatArray = np.maximum(costs.cold_seconds - lead, 0.0) - np.maximum(
        costs.warm_seconds - lead, 0.0
    )
    return delay


@dataclass(frozen=True)
class Scores:
    """Best thresholds and kept slots by count, and what is left to choose: the count.

    Attributes
    ----------
    count
        Score by actors - 1 without the warm slots, shape (..., N).
    warm
        Score by warm slots and actors - 1, shape (..., N + 1, N).
    threshold, keep
        The best of each count, shape (..., N).

    """

    count: FloatArray
    warm: FloatArray
    threshold: IntArray
    keep: IntArray


def scores(parts: Features, weights: FloatArray) -> Scores:
    """Return the scores under weights of shape (features,), or (candidates, 1, ..., features) for several."""
    a, b = len(_COUNT_FEATURES), len(_COUNT_FEATURES) + len(_WARM_FEATURES)
    by_threshold = (parts.count * weights[..., None, None, :a]).sum(axis=-1)
    by_keep = (parts.keep * weights[..., None, None, b:]).sum(axis=-1)
    most = by_keep.shape[-2]
    by_keep = np.where(np.arange(most + 1) > np.arange(1, most + 1)[:, None], np.inf, by_keep)
    return Scores(
        count=by_threshold.min(axis=-1) + by_keep.min(axis=-1),
        warm=(parts.warm * weights[..., None, None, a:b]).sum(axis=-1),
        threshold=by_threshold.argmin(axis=-1),
        keep=by_keep.argmin(axis=-1),
    )


@dataclass(frozen=True)
class ScoreRule:
    """Takes the candidate with the least weighted sum of features; holds for any number of slots."""

    weights: FloatArray
    relative: Objective

    def __call__(self, forecast: StepForecast, costs: Costs, warm: int) -> Action:
        """Return the decision."""
        scored = scores(features(forecast, costs, self.relative), self.weights)
        best = int(np.argmin(scored.count + scored.warm[warm]))
        return Action(best + 1, int(scored.threshold[best]), int(scored.keep[best]))


@dataclass(frozen=True)
class NetworkRule:
    """A network with tanh layers; the last one's outputs are the logits of count, threshold and kept slots."""

    layers: tuple[tuple[FloatArray, FloatArray], ...]
    relative: Objective

    def __call__(self, forecast: StepForecast, costs: Costs, warm: int) -> Action:
        """Return the most likely decision.

        Raises
        ------
        InputError
            When the network was trained for another number of slots.

        """
        signal = observation(forecast, costs, self.relative, warm)
        most, thresholds = forecast.generation.shape
        if self.layers[0][0].shape[1] != len(signal):
            raise InputError(
                f"the learned network takes {self.layers[0][0].shape[1]} observations, this setting has "
                f"{len(signal)} ({most} slots)"
            )
        for weight, bias in self.layers[:-1]:
            signal = np.tanh(weight @ signal + bias)
        logits = self.layers[-1][0] @ signal + self.layers[-1][1]
        choice = [int(part.argmax()) for part in np.split(logits, [most, most + thresholds])]
        return Action(choice[0] + 1, choice[1], min(choice[2], choice[0] + 1))


class _Layer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: Annotated[tuple[tuple[float, ...], ...], Field(min_length=1)]
    bias: tuple[float, ...]


class _Weights(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    time_weight: Annotated[float, Field(ge=0)]
    cost_weight: Annotated[float, Field(ge=0)]


class PolicyFile(BaseModel):
    """The file of a learned rule: JSON, numbers only.

    ``objective`` are the weights of time and cost relative to a step's least forecast.
    ``weights`` are those of a :class:`ScoreRule` by feature, ``layers`` those of a :class:`NetworkRule`; a file has one
    of them. ``trained`` says how it was made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal["rlhfless.horizon_policy/1"] = Field(alias="schema")
    objective: _Weights
    thresholds: Annotated[tuple[float, ...], Field(min_length=1)]
    guesses: Annotated[int, Field(ge=1)]
    weights: dict[str, float] | None = None
    layers: Annotated[tuple[_Layer, ...], Field(min_length=1)] | None = None
    trained: dict[str, Any] = {}

    def rule(self, where: str) -> Rule:
        """Return the rule.

        Raises
        ------
        InputError
            When a feature is missing or unknown, or layers do not fit each other.

        """
        if (self.weights is None) == (self.layers is None):
            raise InputError(f"{where}: must have either weights or layers")
        relative = Objective(self.objective.time_weight, self.objective.cost_weight)
        if self.weights is not None:
            wrong = sorted(set(FEATURES) ^ set(self.weights))
            if wrong:
                raise InputError(
                    f"{where}: weights.{wrong[0]} is {'missing' if wrong[0] in FEATURES else 'unknown'}"
                )
            return ScoreRule(np.array([self.weights[name] for name in FEATURES]), relative)
        layers: list[tuple[FloatArray, FloatArray]] = []
        for number, layer in enumerate(self.layers or ()):
            widths = {len(row) for row in layer.weight}
            before = {len(layers[-1][1])} if layers else widths
            if len(widths) != 1 or len(layer.bias) != len(layer.weight) or widths != before:
                raise InputError(f"{where}: layers.{number} does not fit its bias or the layer before")
            layers.append((np.array(layer.weight), np.array(layer.bias)))
        return NetworkRule(tuple(layers), relative)


def policy_document(
    rule: ScoreRule | NetworkRule, space: DecisionSpace, trained: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON form of a rule."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "objective": {
            "time_weight": rule.relative.time_weight,
            "cost_weight": rule.relative.cost_weight,
        },
        "thresholds": list(space.thresholds),
        "guesses": space.guesses,
    }
    if isinstance(rule, ScoreRule):
        document["weights"] = dict(zip(FEATURES, rule.weights.tolist(), strict=True))
    else:
        document["layers"] = [{"weight": w.tolist(), "bias": b.tolist()} for w, b in rule.layers]
    return {**document, "trained": trained}


def read_policy(path: str | None) -> PolicyFile:
    """Read the file of a learned rule; None is the one that ships with the package.

    Raises
    ------
    InputError
        In one line, when it cannot be read or breaks a rule.

    """
    where = path or "learned.json"
    try:
        source = files("rlhfless.solver").joinpath("learned.json") if path is None else Path(path)
        values = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{where}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{where}: no JSON: {error}") from None
    try:
        return TypeAdapter(PolicyFile).validate_python(values)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error)}") from None


@dataclass(frozen=True)
class Learned:
    """A policy that plans by a learned rule.

    Parameters
    ----------
    path
        The file that ``rlhfless train`` wrote; null: the one that ships with the package.
    name
        Stands in plans and tables.
    space
        What is decided; thresholds and guesses come from the file.

    """

    path: str | None = None
    name: str = "learned"
    space: DecisionSpace | None = None

    def __post_init__(self) -> None:
        _ = self._policy

    @cached_property
    def _policy(self) -> HorizonPolicy:
        document = read_policy(self.path)
        space = self.space or DecisionSpace()
        space = replace(space, thresholds=document.thresholds, guesses=document.guesses)
        return HorizonPolicy(self.name, document.rule(self.path or "learned.json"), space)

    def plan(self, view: StepView) -> Plan:
        """Return the plan of the step."""
        return self._policy.plan(view)
