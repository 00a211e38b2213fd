"""Synthetic traces: lengths drawn from a stated distribution with a stated dependence between responses.

A response's length is a quantile of the marginal distribution (a mixture of components), taken at the normal
score ``z``. Scores of one prompt are alike:

    z = sqrt(r) * u[prompt, epoch] + sqrt(1 - r) * noise[response]
    u[prompt, epoch + 1] = persistence * u[prompt, epoch] + sqrt(1 - persistence^2) * change[prompt, epoch]

with independent standard normal ``noise`` and ``change``. ``u`` is the per-prompt effect and ``r`` follows
from the intraclass correlation asked for (:func:`rlhfless.traces.lengths.latent_correlation`). ``change`` is
lasting, ``noise`` is not; both move a prompt's length between epochs. On top, ``drift`` scales all lengths
from epoch to epoch, and a ``runaway_share`` of responses never ends and is cut at the cap, whatever the
prompt.

Every random number belongs to a stream of its own (purpose, epoch), so that more epochs leave the earlier
ones as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from scipy.special import ndtr, ndtri

from rlhfless.traces.errors import InputError, first_problem
from rlhfless.traces.lengths import Family, hermite_weights, latent_correlation, normal_scores, unit_length
from rlhfless.traces.trace import FloatArray, IntArray, PrefixBlocks, Trace

Count = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

# Streams of the generator: one a purpose (and epoch), so that one draw does not move another.
_EFFECTS, _CHANGE, _ORDER, _NOISE, _RUNAWAY, _QUESTIONS, _ANSWERS, _SHOTS = range(8)

#: Entries of the tabulated marginal, and the normal scores that the table covers.
_TABLE, _SCORE_LIMIT = 4096, 6.0

_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class LengthComponent:
    """One component of the response lengths: its median in tokens, and the spread of the log length."""

    weight: Positive
    median_tokens: Positive
    log_sd: Positive


@dataclass(frozen=True, config=_CONFIG)
class Synthetic:
    """Parameters of a synthetic trace; lengths in tokens.

    Attributes
    ----------
    name, algorithm, model, source
        Kept beside the trace's rows; ``source`` says where the parameters come from.
    prompts, prompts_per_step, responses_per_prompt, epochs
        Size. An epoch takes the prompts in a new order and has ``prompts // prompts_per_step`` steps; the
        rest is left out, as data loaders do that drop the last batch.
    max_response_tokens
        The cap; responses that would be longer have this length and are truncated.
    family
        ``lognormal`` or ``gamma``, for all components.
    lengths
        Components of the response lengths of epoch 0; the weights are relative.
    icc
        Intraclass correlation of the log lengths (after the cap, without runaways) of one step's responses:
        the share of the variance that lies between prompts. Real data lie between 0.06 and 0.92.
    persistence
        Correlation of a prompt's effect with its effect one epoch later.
    drift
        Relative change of all lengths from one epoch to the next: 0.02 makes them 2 % longer each time.
    runaway_share
        Share of responses that never end by themselves.
    question_median_tokens, question_log_sd
        The prompts' own part, lognormal.
    system_tokens, suffix_tokens
        Tokens before the question that every prompt has in common, and behind it (instruction, template).
    shot_groups, shot_tokens
        Prompts fall into this many groups; each group's prompts go on with the same ``shot_tokens`` tokens
        (few-shot examples) after the system tokens.
    max_prompt_tokens
        Longer prompts are cut to it.
    block_tokens
        Size of the blocks of ``prefix_blocks``; None writes none. Only whole blocks of a prompt count.
    answer_median_tokens, answer_log_sd
        Length of the reference answers, lognormal; None writes none.
    answer_correlation
        Correlation of the log reference answer length with the log length of one response in epoch 0.

    """

    name: str
    prompts: Count
    prompts_per_step: Count
    responses_per_prompt: Count
    max_response_tokens: Count
    lengths: Annotated[tuple[LengthComponent, ...], Field(min_length=1)]
    icc: Share
    question_median_tokens: Positive
    question_log_sd: Positive
    max_prompt_tokens: Count
    epochs: Count = 3
    persistence: Share = 1.0
    drift: Annotated[float, Field(gt=-1, allow_inf_nan=False)] = 0.0
    runaway_share: Share = 0.0
    family: Family = "lognormal"
    system_tokens: Tokens = 0
    suffix_tokens: Tokens = 0
    shot_groups: Count = 1
    shot_tokens: Tokens = 0
    block_tokens: Count | None = None
    answer_median_tokens: Positive | None = None
    answer_log_sd: Positive = 0.4
    answer_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    algorithm: str = "grpo"
    model: str = ""
    source: str = "synthetic"

    @model_validator(mode="after")
    def _consistent(self) -> Synthetic:
        if self.prompts_per_step > self.prompts:
            raise ValueError(f"prompts_per_step {self.prompts_per_step} is more than prompts {self.prompts}")
        fixed = self.system_tokens + self.shot_tokens + self.suffix_tokens
        if fixed >= self.max_prompt_tokens:
            raise ValueError(
                f"{fixed} fixed prompt tokens leave none of max_prompt_tokens {self.max_prompt_tokens}"
            )
        if self.answer_median_tokens is not None and abs(self.answer_correlation) > (
            most := self._best_correlation()
        ):
            raise ValueError(
                f"answer_correlation {self.answer_correlation:g} is beyond {most:.3f}, the most at this icc"
            )
        return self

    def _best_correlation(self) -> float:
        """Return the correlation of one response's log length with the prompt's effect in epoch 0."""
        log_lengths = np.log(self.length_quantiles(ndtr(normal_scores(_TABLE))))
        return float(np.sqrt(latent_correlation(log_lengths, self.icc) * hermite_weights(log_lengths)[0]))

    def length_quantiles(self, q: FloatArray) -> IntArray:
        """Return quantiles of epoch 0's response lengths (whole tokens, capped), runaways left out."""
        return _capped(_length_at(self, np.asarray(ndtri(q))), self.max_response_tokens)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Synthetic:
        """Build parameters from plain values; ``where`` (a file or option) opens the message of an error.

        Keys that start with an underscore (``_target_``) are left out.

        Raises
        ------
        InputError
            One line that names the place, the key and the rule.

        """
        own = {key: value for key, value in values.items() if not key.startswith("_")}
        try:
            return TypeAdapter(cls).validate_python(own)
        except ValidationError as error:
            raise InputError(f"{where}: {first_problem(error)}") from None


def generate(params: Synthetic, seed: int) -> Trace:
    """Draw a trace. The same parameters and seed give the same trace; more epochs leave the earlier ones.

    Raises
    ------
    InputError
        For a negative seed.

    """
    if seed < 0:
        raise InputError(f"seed is {seed}, must be at least 0")

    def stream(purpose: int, epoch: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, epoch))))

    log_lengths = np.log(params.length_quantiles(ndtr(normal_scores(_TABLE))))
    r = latent_correlation(log_lengths, params.icc)
    effect = first_effect = stream(_EFFECTS).standard_normal(params.prompts)
    steps = params.prompts // params.prompts_per_step
    per_epoch = steps * params.prompts_per_step
    rows = per_epoch * params.responses_per_prompt
    prompts: list[IntArray] = []
    lengths: list[IntArray] = []
    for epoch in range(params.epochs):
        if epoch:
            change = stream(_CHANGE, epoch).standard_normal(params.prompts)
            effect = params.persistence * effect + np.sqrt(1 - params.persistence**2) * change
        batch = np.repeat(
            stream(_ORDER, epoch).permutation(params.prompts)[:per_epoch], params.responses_per_prompt
        )
        score = np.sqrt(r) * effect[batch] + np.sqrt(1 - r) * stream(_NOISE, epoch).standard_normal(rows)
        tokens = _length_at(params, score) * (1 + params.drift) ** epoch
        tokens[stream(_RUNAWAY, epoch).random(rows) < params.runaway_share] = params.max_response_tokens
        prompts.append(batch)
        lengths.append(_capped(tokens, params.max_response_tokens))
    prompt = np.concatenate(prompts)
    response_tokens = np.concatenate(lengths)
    per_step = params.prompts_per_step * params.responses_per_prompt
    prompt_tokens, blocks = _prompts(params, stream(_QUESTIONS), stream(_SHOTS))
    answers = None
    if params.answer_median_tokens is not None:
        share = params.answer_correlation / params._best_correlation() if params.answer_correlation else 0.0
        own = stream(_ANSWERS).standard_normal(params.prompts)
        score = share * first_effect + np.sqrt(1 - share**2) * own
        answers = _whole(params.answer_median_tokens * np.exp(params.answer_log_sd * score))[prompt]
    width = len(str(params.prompts - 1))
    return Trace(
        name=params.name,
        step=np.repeat(np.arange(params.epochs * steps), per_step),
        epoch=np.repeat(np.arange(params.epochs), rows),
        prompt=prompt,
        prompt_ids=tuple(f"{params.name}-{i:0{width}d}" for i in range(params.prompts)),
        sample=np.tile(np.arange(params.responses_per_prompt), len(prompt) // params.responses_per_prompt),
        prompt_tokens=prompt_tokens[prompt],
        response_tokens=response_tokens,
        answer_tokens=answers,
        prefix_blocks=None if blocks is None else blocks.take(prompt),
        truncated=response_tokens == params.max_response_tokens,
        algorithm=params.algorithm,
        model=params.model,
        source=f"synthetic, seed {seed}: {params.source}",
        max_response_tokens=params.max_response_tokens,
        block_tokens=params.block_tokens,
    )


def _length_at(params: Synthetic, score: FloatArray) -> FloatArray:
    """Return the lengths (not yet whole, without cap) at normal scores, by the tabulated mixture.

    The table holds the mixture's distribution function on log-spaced lengths; linear interpolation of the
    log length in the score is exact for a single lognormal component.
    """
    ends = ndtr(np.array([-_SCORE_LIMIT, _SCORE_LIMIT]))
    units = [unit_length(params.family, component.log_sd) for component in params.lengths]
    medians = [component.median_tokens for component in params.lengths]
    edges = np.array([median * unit.ppf(ends) for median, unit in zip(medians, units, strict=True)])
    low = max(edges[:, 0].min(), 1e-3)
    tokens = np.geomspace(low, edges[:, 1].max(), _TABLE)
    weights = np.array([component.weight for component in params.lengths])
    below = sum(
        weight * unit.cdf(tokens / median)
        for weight, unit, median in zip(weights / weights.sum(), units, medians, strict=True)
    )
    scores = np.clip(ndtri(below), -_SCORE_LIMIT, _SCORE_LIMIT)
    return np.asarray(np.exp(np.interp(score, scores, np.log(tokens))))


def _whole(tokens: FloatArray) -> IntArray:
    return np.maximum(np.rint(tokens), 1).astype(np.int64)


def _capped(tokens: FloatArray, cap: int) -> IntArray:
    return np.minimum(_whole(tokens), cap)


def _prompts(
    params: Synthetic, questions: np.random.Generator, shots: np.random.Generator
) -> tuple[IntArray, PrefixBlocks | None]:
    """Return each prompt's length, and its leading blocks where they are asked for."""
    n = params.prompts
    own = params.question_median_tokens * np.exp(params.question_log_sd * questions.standard_normal(n))
    fixed = params.system_tokens + params.shot_tokens + params.suffix_tokens
    tokens = np.minimum(_whole(own) + fixed, params.max_prompt_tokens)
    size = params.block_tokens
    if size is None:
        return tokens, None
    group = shots.integers(params.shot_groups, size=n)
    count = tokens // size
    offsets = np.concatenate(([0], np.cumsum(count))).astype(np.int64)
    owner = np.repeat(np.arange(n), count)
    place = np.arange(offsets[-1]) - offsets[owner]
    everyone = params.system_tokens // size
    in_group = (params.system_tokens + params.shot_tokens) // size
    # Numbers of blocks: everyone's, then each group's, then each prompt's own.
    groups_end = everyone + params.shot_groups * (in_group - everyone)
    value = np.where(
        place < everyone,
        place,
        np.where(
            place < in_group,
            place + group[owner] * (in_group - everyone),
            groups_end + np.arange(offsets[-1]),
        ),
    )
    return tokens, PrefixBlocks(offsets, value.astype(np.int64))
