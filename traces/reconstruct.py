"""Response lengths rebuilt from what a console log states of them.

A training log gives each step's mean, largest and smallest length and the share at the cap. Rebuilt is a set
of lengths that meets all of them, and whose shape in between is a stated family's. What a log cannot say is
which prompt had which length. That is drawn: a prompt has a persistent effect, and a step's lengths are
handed out by the rank of effect plus noise, so that the share of the variance of log lengths between prompts
(the intraclass correlation) is the one asked for. Such a trace is marked ``reconstructed``: totals, extremes
and spread of a step are the run's, the identity of the long prompts is not.

How one step's ``n`` lengths are set
------------------------------------
1. ``c`` responses stand at the largest length: ``round(clip ratio * n)`` where that is the cap, else one.
2. The family has two parameters. They follow from the mean (values above the largest count as the largest)
   and from ``P(length above the largest) = c / n``.
3. The other lengths are the family's quantiles at evenly spaced probabilities, one replaced by the smallest.
   They are bent by a power, ``low + (high - low) * u ** g`` with ``u`` the quantile's place between smallest
   and largest, which gives the mean exactly (``g`` is near 1 where the family fits), and rounded so that
   their sum stays.

A log without a clip ratio (old versions of verl) whose largest length is the cap hides ``c``. Then the family
is fitted to the mean and the smallest length, ``P(length up to the smallest) = 1 / n``; the median over the
steps of the spread that this gives is used for all of them, and ``c`` is the share above the cap of the
family with that spread and the step's mean. This is an estimate from two numbers, not a measurement.

Prompt lengths are set by the same three steps with one prompt at the largest, and handed out by the rank of
a persistent per-prompt score. As every step's figures are met exactly, a prompt's length moves a little from
epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from rlhfless.traces.errors import InputError
from rlhfless.traces.lengths import Family, UnitLength, latent_correlation, unit_length
from rlhfless.traces.trace import FloatArray, IntArray, RunLog, Trace

#: Range of the standard deviation of log lengths that a fit may take.
LOG_SD_RANGE = (0.02, 4.0)

#: How far the mean may move where whole tokens cannot meet it (a log's mean has finite precision).
MEAN_TOLERANCE = 0.5

# Streams of the generator: one a purpose, so that one draw does not move another.
_EFFECTS, _PROMPT_SCORES, _EPOCH_ORDER, _STEP_NOISE = range(4)


@dataclass(frozen=True)
class LengthFigures:
    """What a log states of one set of lengths, in tokens; ``at_largest`` of ``count`` have the largest.

    ``exact_top`` says that ``at_largest`` is known (it is the number at the cap); otherwise ties with the
    largest are allowed.
    """

    count: int
    mean: float
    largest: int
    smallest: int
    at_largest: int = 1
    exact_top: bool = False


def reconstruct(
    log: RunLog,
    *,
    prompts_per_step: int,
    responses_per_prompt: int,
    prompt_set_size: int | None = None,
    max_response_tokens: int | None = None,
    prompt_effect: float = 0.5,
    family: Family = "lognormal",
    seed: int = 0,
) -> Trace:
    """Rebuild a trace that meets a log's length figures in every step.

    In each step the number of responses, the sum of their lengths (to the nearest token), the largest, the
    smallest and the number at the cap are the log's.

    Parameters
    ----------
    log
        The figures; see :func:`rlhfless.traces.verl_log.read_verl_log`.
    prompts_per_step, responses_per_prompt
        Their product is the number of responses in a step, and must be the log's where that follows from it.
    prompt_set_size
        Prompts of the data set. Every epoch takes them in a new order, as many as fill whole steps. None:
        with an epoch column, the steps of the longest epoch times ``prompts_per_step``; without one the
        whole run counts as one epoch, in which no prompt comes back.
    max_response_tokens
        The cap. None: the largest length of the log, if a clip ratio above 0 says that it is one or, in a
        log without clip ratios, a second step reaches it; otherwise the trace has no cap.
    prompt_effect
        Intraclass correlation of log response lengths within a step, in [0, 1]. Measured values lie between
        0.06 (DAPO, Qwen2.5-32B, math) and 0.92 (DeepCoder-14B). The effects persist over the epochs.
    family
        ``lognormal`` or ``gamma``.
    seed
        Seed of the prompts' effects, the order of the epochs and the noise. The set of lengths of a step
        does not depend on it.

    Raises
    ------
    InputError
        Options out of range, or figures that no set of lengths has, with the step.

    """
    where = log.name
    _check_options(where, log, prompts_per_step, responses_per_prompt, prompt_effect)
    cap = _cap(where, log, max_response_tokens)
    epoch, place, prompts = _epochs(where, log, prompts_per_step, prompt_set_size)

    def stream(purpose: int, index: int = 0) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, index)))

    effect = stream(_EFFECTS).standard_normal(prompts)
    prompt_score = stream(_PROMPT_SCORES).standard_normal(prompts)
    order = {int(e): stream(_EPOCH_ORDER, int(e)).permutation(prompts) for e in np.unique(epoch)}
    n = prompts_per_step * responses_per_prompt
    chosen: list[IntArray] = []
    response_tokens: list[IntArray] = []
    prompt_tokens: list[IntArray] = []
    for i, figures in enumerate(_response_figures(where, log, n, cap, family)):
        at = f"{where}: step {log.step[i]}"
        batch = order[int(epoch[i])][place[i] * prompts_per_step : (place[i] + 1) * prompts_per_step]
        lengths = length_set(figures, family, f"{at}: response_length")
        r = latent_correlation(np.log(lengths), prompt_effect)
        noise = stream(_STEP_NOISE, int(log.step[i])).standard_normal(n)
        score = np.sqrt(r) * np.repeat(effect[batch], responses_per_prompt) + np.sqrt(1 - r) * noise
        response_tokens.append(_by_rank(lengths, score))
        prompt_figures = _figures(
            f"{at}: prompt_length",
            prompts_per_step,
            float(log.prompt_mean[i]),
            float(log.prompt_max[i]),
            float(log.prompt_min[i]),
        )
        own = _by_rank(length_set(prompt_figures, family, f"{at}: prompt_length"), prompt_score[batch])
        prompt_tokens.append(np.repeat(own, responses_per_prompt))
        chosen.append(np.repeat(batch, responses_per_prompt))
    responses = np.concatenate(response_tokens)
    steps = len(log.step)
    trace = Trace(
        name=log.name,
        step=np.repeat(log.step, n),
        epoch=np.repeat(epoch, n),
        prompt=np.concatenate(chosen),
        prompt_ids=tuple(f"{log.name}-{i}" for i in range(prompts)),
        sample=np.tile(np.arange(responses_per_prompt), steps * prompts_per_step),
        prompt_tokens=np.concatenate(prompt_tokens),
        response_tokens=responses,
        truncated=None if cap is None else responses == cap,
        algorithm="ppo" if "update_critic" in log.stages else "grpo",
        source=f"{log.source}; lengths reconstructed ({family}, prompt effect {prompt_effect:g}, seed {seed})",
        max_response_tokens=cap,
        reconstructed=True,
    )
    return trace.checked(where)


@lru_cache(maxsize=2048)  # the same for every seed of a log, and the quantiles are dear
def length_set(figures: LengthFigures, family: Family, where: str) -> IntArray:
    """Return the ascending lengths that meet ``figures``, shaped as the family; shape (count,), read-only.

    Raises
    ------
    InputError
        Where no set of whole tokens has these figures; ``where`` opens the message.

    """
    n, low, top, at_top = figures.count, figures.smallest, figures.largest, figures.at_largest
    if low == top:
        if figures.exact_top and at_top != n:
            raise InputError(f"{where}: {at_top} of {n} lengths at the cap, but min and max are both {top}")
        return _frozen(np.full(n, top, dtype=np.int64))
    free = n - at_top - 1
    if free < 0:
        raise InputError(f"{where}: {at_top} of {n} lengths at max {top} leave none for min {low}")
    high = top - 1 if figures.exact_top else top
    fixed = at_top * top + low
    rest = int(np.clip(round(figures.mean * n) - fixed, free * low, free * high))
    if abs(fixed + rest - figures.mean * n) > MEAN_TOLERANCE * n:
        raise InputError(
            f"{where}: mean {figures.mean:g} is impossible with {at_top} of {n} lengths at max {top} and min {low}"
        )
    lengths = np.empty(n, dtype=np.int64)
    lengths[0], lengths[n - at_top :] = low, top
    if free:
        unit, median = _fit(family, figures)
        quantiles = median * unit.ppf((np.arange(1, free + 1) + 0.5) / n)
        span = max(high - low, 1)
        place = np.clip((quantiles - low) / span, 1e-9, 1 - 1e-9)
        lengths[1 : free + 1] = _whole(low + span * _bend(place, (rest - low * free) / span), rest)
    lengths.sort()
    return _frozen(lengths)


def _frozen(values: IntArray) -> IntArray:
    values.setflags(write=False)
    return values


def _check_options(
    where: str, log: RunLog, prompts_per_step: int, responses_per_prompt: int, prompt_effect: float
) -> None:
    if prompts_per_step < 1 or responses_per_prompt < 1:
        raise InputError(f"{where}: prompts_per_step and responses_per_prompt must be at least 1")
    if not 0 <= prompt_effect <= 1:
        raise InputError(f"{where}: prompt_effect is {prompt_effect:g}, must be between 0 and 1")
    n = prompts_per_step * responses_per_prompt
    if log.responses is not None and log.responses != n:
        raise InputError(
            f"{where}: the log has {log.responses} responses a step, "
            f"not {prompts_per_step} prompts x {responses_per_prompt} = {n}"
        )


def _cap(where: str, log: RunLog, stated: int | None) -> int | None:
    largest = float(np.nanmax(log.response_max))
    if stated is not None:
        if stated < largest:
            step = log.step[int(np.nanargmax(log.response_max))]
            raise InputError(
                f"{where}: step {step}: response_length/max {largest:g} is above the cap {stated}"
            )
        return stated
    clip = log.clip_ratio[log.response_max == largest]
    return round(largest) if (clip > 0).any() or np.isnan(clip).sum() > 1 else None


def _epochs(
    where: str, log: RunLog, prompts_per_step: int, prompt_set_size: int | None
) -> tuple[IntArray, IntArray, int]:
    """Return each step's epoch, its place within the epoch, and the number of prompts."""
    # Lines missing from a log keep the others in their place.
    since_first = log.step - log.step[0]
    if (log.epoch >= 0).all():
        epoch = log.epoch
        _, first, inverse = np.unique(epoch, return_index=True, return_inverse=True)
        place = log.step - log.step[first][inverse]
        steps = int(place.max()) + 1
    elif prompt_set_size is not None:
        steps = max(prompt_set_size // prompts_per_step, 1)
        epoch, place = since_first // steps, since_first % steps
    else:
        epoch, place, steps = np.zeros_like(log.step), since_first, int(since_first[-1]) + 1
    prompts = steps * prompts_per_step if prompt_set_size is None else prompt_set_size
    if prompts < steps * prompts_per_step:
        raise InputError(
            f"{where}: an epoch has {steps} steps of {prompts_per_step} prompts, "
            f"more than prompt_set_size {prompt_set_size}"
        )
    return epoch, place, prompts


def _figures(where: str, count: int, mean: float, largest: float, smallest: float) -> LengthFigures:
    for name, value in (("mean", mean), ("max", largest), ("min", smallest)):
        if not np.isfinite(value):
            raise InputError(f"{where}/{name} is missing")
    if not 1 <= smallest <= largest:
        raise InputError(f"{where}: min {smallest:g} and max {largest:g} are no lengths (1 <= min <= max)")
    if not smallest <= mean <= largest:
        raise InputError(f"{where}: mean {mean:g} is not between min {smallest:g} and max {largest:g}")
    return LengthFigures(count, mean, round(largest), round(smallest))


def _response_figures(
    where: str, log: RunLog, n: int, cap: int | None, family: Family
) -> Iterator[LengthFigures]:
    steps = range(len(log.step))
    figures = [
        _figures(
            f"{where}: step {log.step[i]}: response_length",
            n,
            float(log.response_mean[i]),
            float(log.response_max[i]),
            float(log.response_min[i]),
        )
        for i in steps
    ]
    hidden = [i for i in steps if figures[i].largest == cap and np.isnan(log.clip_ratio[i])]
    spreads = [s for i in hidden if (s := _spread_from_smallest(family, figures[i])) is not None]
    spread = float(np.median(spreads)) if spreads else 0.5
    for i in steps:
        one, clip = figures[i], float(log.clip_ratio[i])
        at = f"{where}: step {log.step[i]}: response_length"
        if i in hidden:
            top = _top_from_spread(family, spread, one)
            yield replace(one, at_largest=top, exact_top=True)
        elif np.isnan(clip):
            yield one
        elif not 0 <= clip <= 1:
            raise InputError(f"{at}/clip_ratio is {clip:g}, must be between 0 and 1")
        else:
            # A log prints three decimals: a share of 0 can hide one response, a share of 1 the lack of one.
            top = round(clip * n)
            if one.largest == cap:
                top = int(np.clip(top, 1, n if one.smallest == cap else n - 1))
            if abs(top - clip * n) > 0.5 + 0.0005 * n or (top and one.largest != cap):
                raise InputError(
                    f"{at}: clip_ratio {clip:g} of {n} responses contradicts max {one.largest} and min "
                    f"{one.smallest} under a cap of {cap if cap is not None else 'unknown size'}"
                )
            yield replace(one, at_largest=top, exact_top=True) if one.largest == cap else one


def _fit(family: Family, figures: LengthFigures) -> tuple[UnitLength, float]:
    """Return the family's shape and median that meet the mean and the share at the largest length.

    With the quantile of the largest pinned, a wider distribution lowers every shorter quantile, so that the
    mean falls with the spread and the root is unique; a mean out of reach gives the end of the range.
    """
    edge = figures.largest - 0.5
    share = figures.at_largest / figures.count

    def parameters(log_sd: float) -> tuple[UnitLength, float]:
        unit = unit_length(family, log_sd)
        return unit, edge / float(unit.ppf(1 - share))

    def excess(log_sd: float) -> float:
        unit, median = parameters(log_sd)
        return median * float(unit.mean_below(edge / median)) + figures.largest * share - figures.mean

    return parameters(_root(excess, falling=True))


def _spread_from_smallest(family: Family, figures: LengthFigures) -> float | None:
    """Return the spread that meets the mean under the cap and the smallest length; None where none does."""
    edge = figures.smallest + 0.5
    if not edge < figures.mean < figures.largest:
        return None

    def excess(log_sd: float) -> float:
        unit = unit_length(family, log_sd)
        return _capped_mean(unit, edge / float(unit.ppf(1 / figures.count)), figures.largest) - figures.mean

    return _root(excess, falling=False)


def _top_from_spread(family: Family, log_sd: float, figures: LengthFigures) -> int:
    """Return how many of the lengths stand at the cap, for a given spread and the mean under the cap."""
    unit, n, cap = unit_length(family, log_sd), figures.count, figures.largest
    if figures.smallest == cap:
        return n
    if figures.mean >= cap - 0.5:
        return n - 1
    log_median = brentq(lambda t: _capped_mean(unit, float(np.exp(t)), cap) - figures.mean, -60.0, 60.0)
    share = 1 - float(unit.cdf((cap - 0.5) / np.exp(log_median)))
    # The mean bounds the number at the cap: all others at the smallest length, or just below the cap.
    low = figures.smallest
    most = int((figures.mean - low) * n / (cap - low))
    least = int(np.ceil((figures.mean - cap + 1) * n + cap - 1 - low))
    return int(np.clip(np.clip(round(share * n), least, most), 1, n - 1))


def _capped_mean(unit: UnitLength, median: float, cap: int) -> float:
    edge = (cap - 0.5) / median
    return median * float(unit.mean_below(edge)) + cap * (1 - float(unit.cdf(edge)))


def _root(excess: Callable[[float], float], *, falling: bool) -> float:
    """Return the spread at which a monotone ``excess`` is zero, or the nearest end of the range."""
    low, high = LOG_SD_RANGE
    sign = -1.0 if falling else 1.0
    if sign * excess(low) >= 0:
        return low
    if sign * excess(high) <= 0:
        return high
    return float(brentq(excess, low, high, xtol=1e-9))


def _bend(place: FloatArray, total: float) -> FloatArray:
    """Return ``place ** g`` with the ``g`` that makes it sum to ``total``; places lie inside (0, 1)."""
    if total <= 0:
        return np.zeros_like(place)
    if total >= len(place):
        return np.ones_like(place)
    log_g = brentq(lambda t: float((place ** np.exp(t)).sum()) - total, -25.0, 25.0, xtol=1e-13)
    return np.asarray(place ** np.exp(log_g))


def _whole(lengths: FloatArray, total: int) -> IntArray:
    """Round to whole tokens, each up or down, so that the sum is ``total`` (the sum before, to rounding)."""
    sums = np.floor(np.cumsum(lengths) + 0.5).astype(np.int64)
    sums[-1] = total
    return np.diff(sums, prepend=0)


def _by_rank(ascending: IntArray, score: FloatArray) -> IntArray:
    """Hand out ascending values by the rank of the scores."""
    out = np.empty_like(ascending)
    out[np.argsort(score, kind="stable")] = ascending
    return out
