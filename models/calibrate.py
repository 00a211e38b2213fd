"""Calibration: costs fitted to the step times that a training log records, and how far they can be trusted.

Every stage is linear in its unknowns with non-negative coefficients. A log gives only step aggregates, so

* generation from aggregates is ``tokens * per-actor response tokens + fixed + after_validation``,
* generation as the decode model has it is ``iterations * I + tokens * S + resident * K + fixed``, where a
  reconstructed trace gives an actor's iterations ``I``, their running responses summed ``S`` (its response
  tokens) and their resident KV tokens summed ``K``. With everything admitted at once ``I = max L``,
  ``S = sum L`` and ``K = sum(p L + L (L - 1) / 2)``; with waiting queues the decode kernel counts them, which
  does not need the costs as long as the KV capacity does not bind,
* every other stage is ``tokens * total tokens + fixed``.

Two errors are stated: *fixed* (fitted on the first part of the log, judged on the rest) and *one step ahead*
(refitted before every step on the steps before it). docs/calibration.md has the formulas, their sources and
the figures on public logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlhfless.models.ahead import one_step_ahead
from rlhfless.models.decode import DecodePool
from rlhfless.models.disturbance import Stretch, disturbed_rows, find_disturbances, second_differences
from rlhfless.models.features import after_validation, last_known, measured, stage_features, usable
from rlhfless.models.fit import LEAST_STEPS, StageFit, fit_linear
from rlhfless.models.profile import (
    LEARNING_STAGES,
    PREPARATION_STAGES,
    ActorShape,
    DecodeCost,
    Link,
    Links,
    Memory,
    PrefillCost,
    Profile,
    StageCost,
)
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import BoolArray, FloatArray, IntArray, RunLog, Trace

#: Stages of a log that are fitted; all but generation are stages of a profile too.
STAGES = ("generation", *PREPARATION_STAGES, *LEARNING_STAGES)
# Fewest steps of the first part that a fixed fit can stand on: as many as a stage has unknowns.
_LEAST_FITTED = 2


@dataclass(frozen=True)
class RunShape:
    """How the logged run was laid out.

    ``responses`` is per step over all ``actors``; each actor has ``actor_gpus`` GPUs and runs at most
    ``max_running`` responses at once. ``gpus`` is the whole run's.
    """

    gpus: int
    actors: int
    actor_gpus: int
    responses: int
    max_running: int

    def __post_init__(self) -> None:
        for name in ("gpus", "actors", "actor_gpus", "responses", "max_running"):
            if getattr(self, name) < 1:
                raise InputError(f"run shape: {name} is {getattr(self, name)}, must be at least 1")
        if self.actors * self.actor_gpus > self.gpus:
            raise InputError(
                f"run shape: {self.actors} actors of {self.actor_gpus} GPUs need "
                f"{self.actors * self.actor_gpus} GPUs, the run has {self.gpus}"
            )


@dataclass(frozen=True)
class Errors:
    """Errors of predicted seconds, relative to the measured ones (0.05 is 5 %); NaN over no steps.

    ``bias`` is the mean of (predicted - measured) / measured, ``p90`` the 90th percentile of its size.
    """

    mape: float
    bias: float
    p90: float
    steps: int

    @classmethod
    def of(cls, predicted: FloatArray, seconds: FloatArray, rows: BoolArray) -> Errors:
        """Compare with measured ``seconds`` on the given rows; those where either is missing are left out."""
        relative = predicted[rows] / seconds[rows] - 1.0
        relative = relative[np.isfinite(relative)]
        if not len(relative):
            return cls(np.nan, np.nan, np.nan, 0)
        size = np.abs(relative)
        return cls(float(size.mean()), float(relative.mean()), float(np.quantile(size, 0.9)), len(size))


@dataclass(frozen=True)
class StageReport:
    """A stage's fit and errors; all errors are over the steps after the fitted part.

    ``fixed_undisturbed`` and ``fixed`` judge the fixed fit on undisturbed and on all steps. ``ahead`` is one
    step ahead with the lengths of the step known (the cost model is judged, not the length prediction),
    ``forecast`` the same with the lengths of the last step, ``repeat_last`` the baseline that repeats the last
    step's time. ``noise_floor`` estimates the MAPE that noise leaves to any predictor.
    """

    fit: StageFit
    fixed_undisturbed: Errors
    fixed: Errors
    ahead: Errors
    forecast: Errors
    repeat_last: Errors
    noise_floor: float


@dataclass(frozen=True)
class DecodeReport:
    """The decode model's fit to generation, and the errors of the fixed fit."""

    fit: StageFit
    fixed_undisturbed: Errors
    fixed: Errors


@dataclass(frozen=True)
class Calibration:
    """All that a log says about costs.

    ``stages`` maps a stage of the log to its report, ``decode`` is the decode model's fit (none where no trace
    was given), ``stretches`` are the disturbances found in generation. ``fitted_steps`` is the number of
    steps that the fixed fits could use, disturbed ones included.
    """

    log: str
    source: str
    shape: RunShape
    fitted_steps: int
    stages: Mapping[str, StageReport]
    decode: DecodeReport | None
    prefill_token_seconds: float
    stretches: tuple[Stretch, ...]

    @property
    def overhead_seconds(self) -> float:
        """The part of generation that no token explains, in seconds a step.

        Weight resharding, cache allocation, scattering and collecting the batch: what a co-located run pays
        to switch between training and generation. The profile does not contain it.
        """
        return 0.0 if self.decode is None else self.decode.fit.coefficient("fixed")

    def profile(self, base: Profile, *, name: str | None = None) -> Profile:
        """Return a fitted profile; memory, links, functions, KV capacity and price are those of ``base``.

        The generation time that it replays is the log's less :attr:`overhead_seconds`. It has the stages that the log has.

        Raises
        ------
        InputError
            When the calibration had no trace, without which the decode model is not fitted.

        """
        if self.decode is None:
            raise InputError(
                f"{self.log}: a profile needs the decode model, which is fitted on a reconstructed trace"
            )
        fit, shape = self.decode.fit, self.shape
        iteration, token = fit.coefficient("iterations"), fit.coefficient("tokens")
        knots = (1, shape.max_running) if shape.max_running > 1 else (1,)
        stages = {}
        source = dict(base.source)
        for stage, report in self.stages.items():
            if stage != "generation":
                stages[stage] = StageCost(
                    # A log's reward is a rule that runs on the CPU.
                    gpus=0 if stage == "reward" else shape.gpus,
                    fixed_seconds=report.fit.coefficient("fixed"),
                    token_seconds=report.fit.coefficient("tokens"),
                )
        fitted = f"fitted to {self.log} ({self.source}), {fit.rows} steps"
        weak = [feature for feature in ("iterations", "tokens", "resident") if not fit.identified(feature)]
        source["decode"] = fitted + (f"; not identified by the log: {', '.join(weak)}" if weak else "")
        source["prefill"] = "given to the calibration, not fitted: the log cannot tell it from the fixed part"
        source["stages"] = fitted + ": " + ", ".join(stage for stage in self.stages if stage != "generation")
        return Profile(
            name=name or f"{self.log}-fitted",
            model=base.model,
            gpu=base.gpu,
            kind="fitted",
            actor=ActorShape(
                gpus=shape.actor_gpus,
                max_running=shape.max_running,
                kv_capacity_tokens=base.actor.kv_capacity_tokens,
            ),
            decode=DecodeCost(
                batch=knots,
                base_seconds=tuple(iteration + token * b for b in knots),
                kv_token_seconds=(fit.coefficient("resident"),) * len(knots),
            ),
            prefill=PrefillCost(
                gpus=shape.actor_gpus,
                token_seconds=self.prefill_token_seconds,
                max_batch_tokens=base.prefill.max_batch_tokens,
            ),
            stages=stages,
            memory=base.memory,
            links=base.links,
            functions=base.functions,
            usd_per_gpu_hour=base.usd_per_gpu_hour,
            source=source,
        )


def calibrate(
    log: RunLog,
    shape: RunShape,
    *,
    trace: Trace | None = None,
    fit_share: float = 0.25,
    least_iteration_seconds: float = 0.0,
    prefill_token_seconds: float = 0.0,
) -> Calibration:
    """Fit every stage of a log and state the errors.

    Left out are stages with a time in fewer than eight steps, or fewer than two in the fitted part.

    Parameters
    ----------
    log
        Step times and length statistics.
    shape
        The run's layout.
    trace
        Response lengths of the log's steps (reconstructed), rows in the order in which the run dealt them to
        its actors in even contiguous chunks. Without it the decode model is not fitted.
    fit_share
        The first part of the log that the fixed fits use; the errors are over the rest.
    least_iteration_seconds
        A physical least time of an iteration at any batch (the weights read once at the memory's bandwidth).
        Logs with large batches hardly tell the iteration's own part, so a bound from a data sheet helps.
    prefill_token_seconds
        Seconds an actor needs per prefilled token, taken as known: prompt tokens hardly vary between steps.

    Raises
    ------
    InputError
        When generation is missing, has fewer than eight steps, or the shape contradicts the log.

    """
    _check(log, shape)
    if not 0 < fit_share <= 1:
        raise InputError(f"{log.name}: fit_share is {fit_share}, must be above 0 and at most 1")
    n = len(log.step)
    first = np.arange(n) < int(n * fit_share)
    stretches = find_disturbances(log)
    disturbed = disturbed_rows(log, stretches)
    calm = np.ones(n, dtype=np.bool_)
    fittable = int(np.count_nonzero(first & ~disturbed & usable(log, "generation")))
    if fittable < _LEAST_FITTED:
        raise InputError(
            f"{log.name}: {fittable} undisturbed steps among the first {np.count_nonzero(first)} to fit, "
            f"at least {_LEAST_FITTED} are needed; raise fit_share (now {fit_share:g})"
        )
    stages = {}
    for stage in STAGES:
        if stage not in log.stages or np.count_nonzero(usable(log, stage)) < LEAST_STEPS:
            continue
        if np.count_nonzero(usable(log, stage) & first) >= _LEAST_FITTED:
            stages[stage] = _report(log, stage, shape, first, ~disturbed if stage == "generation" else calm)
    decode = None
    if trace is not None:
        decode = _fit_decode(
            log, shape, trace, first, ~disturbed, least_iteration_seconds, prefill_token_seconds
        )
    return Calibration(
        log=log.name,
        source=log.source,
        shape=shape,
        fitted_steps=int(np.count_nonzero(first)),
        stages=stages,
        decode=decode,
        prefill_token_seconds=prefill_token_seconds,
        stretches=stretches,
    )


def _check(log: RunLog, shape: RunShape) -> None:
    if "generation" not in log.stages:
        raise InputError(f"{log.name}: no generation times; the log needs timing_s/gen or timing/gen")
    steps = int(np.count_nonzero(usable(log, "generation")))
    if steps < LEAST_STEPS:
        raise InputError(
            f"{log.name}: {steps} steps with a generation time and a mean response length, "
            f"calibration needs at least {LEAST_STEPS}"
        )
    for name in ("responses", "gpus"):
        stated = getattr(log, name)
        if stated is not None and stated != getattr(shape, name):
            raise InputError(
                f"{log.name}: the log implies {stated} {name}, the run shape has {getattr(shape, name)}"
            )


# --- The decode model ---------------------------------------------------------------------------------


def decode_features(
    prompt_tokens: IntArray, response_tokens: IntArray, group: IntArray, actor: IntArray, max_running: int
) -> FloatArray:
    """Count what decoding a batch takes on each actor, whatever its costs.

    Parameters
    ----------
    prompt_tokens, response_tokens, group, actor
        One entry per response, in admission order; ``group`` numbers prompts and ``actor`` actors from 0.
    max_running
        Responses that an actor runs at once; the KV capacity is taken not to bind.

    Returns
    -------
    Shape (actors, 4): iterations, their running responses summed (the response tokens), their resident KV
    tokens summed, and prefilled tokens (a prompt whose KV is on the actor is not prefilled again).

    """
    capacity = int((prompt_tokens + response_tokens).sum()) + len(prompt_tokens) + 1
    actors = int(actor.max()) + 1
    pool = DecodePool(_costless(max_running, capacity), prompt_tokens, response_tokens, group, actors)
    result = np.empty((actors, 4))
    for i in range(actors):
        pool.add(i, np.flatnonzero(actor == i))
        pool.run(i)
        counts = pool.counts(i)
        result[i] = counts.iterations, counts.tokens, counts.resident_sum, counts.prefill_tokens
    return result


def _costless(max_running: int, capacity: int) -> Profile:
    link = Link(bytes_per_second=1.0)
    return Profile(
        name="costless",
        model="",
        gpu="",
        kind="computed",
        actor=ActorShape(gpus=1, max_running=max_running, kv_capacity_tokens=capacity),
        decode=DecodeCost(batch=(1,), base_seconds=(0.0,), kv_token_seconds=(0.0,)),
        prefill=PrefillCost(gpus=1, token_seconds=0.0, max_batch_tokens=1),
        stages={},
        memory=Memory(weight_bytes=1.0, kv_bytes_per_token=1.0),
        links=Links(within_node=link, between_nodes=link),
        source={},
    )


_DECODE_FEATURES = ("iterations", "tokens", "resident", "prompt_tokens")


def _fit_decode(
    log: RunLog,
    shape: RunShape,
    trace: Trace,
    first: BoolArray,
    calm: BoolArray,
    least_iteration_seconds: float,
    prefill_token_seconds: float,
) -> DecodeReport:
    """Fit the decode model to the slowest actor of each step."""
    position = {int(step): i for i, step in enumerate(trace.steps)}
    missing = [int(step) for step in log.step if int(step) not in position]
    if missing:
        raise InputError(f"{trace.name}: the trace has no step {missing[0]}, which the log {log.name} has")
    counts = np.empty((len(log.step), shape.actors, len(_DECODE_FEATURES)))
    for i, step in enumerate(log.step):
        rows = trace.rows_of(position[int(step)])
        n = rows.stop - rows.start
        if n != shape.responses:
            raise InputError(
                f"{trace.name}: step {step} has {n} responses, the run shape has {shape.responses}"
            )
        counts[i] = decode_features(
            trace.prompt_tokens[rows],
            trace.response_tokens[rows],
            np.unique(trace.prompt[rows], return_inverse=True)[1],
            np.arange(n) * shape.actors // n,
            shape.max_running,
        )
    seconds = measured(log, "generation")
    context = {"fixed": np.ones(len(log.step)), "after_validation": after_validation(log)}
    at_least = {"iterations": least_iteration_seconds}
    # Which actor is slowest depends on the costs, so both are found in turn.
    slowest = counts[:, :, 0].argmax(axis=1)
    for _ in range(5):
        chosen = counts[np.arange(len(counts)), slowest]
        features = dict(zip(_DECODE_FEATURES[:3], chosen.T[:3], strict=True)) | context
        prefill = prefill_token_seconds * chosen[:, 3]
        fit = fit_linear("generation", features, seconds - prefill, first & calm, at_least)
        costs = np.array([*(fit.coefficient(name) for name in _DECODE_FEATURES[:3]), prefill_token_seconds])
        before, slowest = slowest, (counts @ costs).argmax(axis=1)
        if (before == slowest).all():
            break
    predicted = fit.predict(features) + prefill
    return DecodeReport(
        fit=fit,
        fixed_undisturbed=Errors.of(predicted, seconds, ~first & calm),
        fixed=Errors.of(predicted, seconds, ~first),
    )


# --- Errors of a stage --------------------------------------------------------------------------------


def _report(log: RunLog, stage: str, shape: RunShape, first: BoolArray, calm: BoolArray) -> StageReport:
    seconds = measured(log, stage)
    features = stage_features(log, stage, responses=shape.responses, actors=shape.actors)
    fit = fit_linear(stage, features, seconds, first & calm)
    predicted = fit.predict(features)
    return StageReport(
        fit=fit,
        fixed_undisturbed=Errors.of(predicted, seconds, ~first & calm),
        fixed=Errors.of(predicted, seconds, ~first),
        ahead=Errors.of(one_step_ahead(log, stage), seconds, ~first),
        forecast=Errors.of(one_step_ahead(log, stage, last_lengths=True), seconds, ~first),
        repeat_last=Errors.of(last_known(seconds), seconds, ~first),
        noise_floor=noise_floor(log, stage, calm, ~first),
    )


def fit_stage(log: RunLog, stage: str, rows: BoolArray, shape: RunShape) -> StageFit:
    """Fit a stage's aggregate features on the given rows (shape (steps,)); see :func:`fit_linear`."""
    features = stage_features(log, stage, responses=shape.responses, actors=shape.actors)
    return fit_linear(stage, features, measured(log, stage), rows)


def noise_floor(log: RunLog, stage: str, calm: BoolArray, rows: BoolArray) -> float:
    """Estimate the mean absolute percentage error that noise alone leaves to any predictor (0.05 is 5 %).

    The residuals ``r = log(time / fitted time)`` of a fit on all ``calm`` rows still hold slow drifts, so the
    estimate uses second differences of three neighbouring steps,
    ``mean |r[t-1] - 2 r[t] + r[t+1]| / sqrt(6)`` over ``rows``, which cancel a level and a linear drift
    (Gasser, Sroka and Jennen-Steinmetz 1986; Rice 1984 uses first differences). For independent Gaussian
    noise its expectation is the mean absolute deviation of the noise. NaN with fewer than three neighbours.
    """
    features = stage_features(log, stage, responses=1, actors=1)
    seconds = measured(log, stage)
    residual = np.log(seconds / fit_linear(stage, features, seconds, calm).predict(features))
    return _mean(np.abs(second_differences(residual))[rows[1:-1]])


def _mean(values: FloatArray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else np.nan
