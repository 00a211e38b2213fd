"""Learning a rule by evolution: CMA-ES on the weights of a :class:`~rlhfless.solver.learned.ScoreRule`.

The covariance matrix adaptation evolution strategy (Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv
1604.00772, with its default constants) needs no gradient, which a choice among candidates does not have. It
begins at the weights at which the score is the forecast objective, so that what is learned is what the forecast
gets wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless.solver.episodes import Episodes
from rlhfless.solver.learned import FORECAST_WEIGHTS, Features, ScoreRule, features, scores
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray, IntArray


def play(episodes: Episodes, weights: FloatArray) -> FloatArray:
    """Return the mean objective a step of every candidate in every run, shape (candidates, runs).

    ``weights`` has shape (candidates, features).
    """
    candidates = len(weights)
    shape = (candidates, episodes.runs)
    each = np.arange(episodes.runs)
    warm = np.zeros(shape, dtype=np.int64)
    total = np.zeros(shape)
    actors, generation = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    for step in range(episodes.steps):
        scored = scores(_features(episodes, step, generation, actors), weights[:, None, :])
        at_warm = np.take_along_axis(scored.warm, warm[..., None, None], axis=-2)[..., 0, :]
        best = (scored.count + at_warm).argmin(axis=-1)
        threshold = np.take_along_axis(scored.threshold, best[..., None], axis=-1)[..., 0]
        keep = np.take_along_axis(scored.keep, best[..., None], axis=-1)[..., 0]
        total += episodes.values[each, step, best, threshold, warm, keep]
        generation = episodes.generation[each, step, best, threshold, warm]
        actors, warm = best + 1, np.minimum(keep, episodes.actors[:, step])
    return total / episodes.steps


def _features(episodes: Episodes, step: int, generation: FloatArray, actors: IntArray) -> Features:
    # The surprise depends on what each candidate did before: its axis is the first.
    forecast = episodes.seen(step, generation, actors)
    broadcast = {
        name: np.broadcast_to(value, (len(actors), *value.shape))
        for name, value in vars(episodes.forecasts[step]).items()
        if name not in ("last_generation", "last_actors")
    }
    return features(type(forecast)(**{**vars(forecast), **broadcast}), episodes.costs, episodes.relative)


@dataclass
class Evolution:
    """CMA-ES under way. Its state is plain numbers: :meth:`dump` and :meth:`load` take it up bit for bit.

    Attributes
    ----------
    mean, sigma, covariance, path, step_path
        The search distribution and its two evolution paths (tutorial, fig. 6).
    generation
        How many generations are over.

    """

    mean: FloatArray
    sigma: float
    population: int
    rng: np.random.Generator
    covariance: FloatArray = field(init=False)
    path: FloatArray = field(init=False)
    step_path: FloatArray = field(init=False)
    generation: int = 0

    def __post_init__(self) -> None:
        n = len(self.mean)
        self.covariance, self.path, self.step_path = np.eye(n), np.zeros(n), np.zeros(n)

    def advance(self, cost: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Draw a population, rank it by cost, move the distribution; return the costs, shape (population,)."""
        n, size = len(self.mean), self.population
        parents = size // 2
        weight = np.log((size + 1) / 2) - np.log(np.arange(1, parents + 1))
        weight /= weight.sum()
        mass = 1 / float((weight**2).sum())
        c_sigma = (mass + 2) / (n + mass + 5)
        damping = 1 + 2 * max(0.0, np.sqrt((mass - 1) / (n + 1)) - 1) + c_sigma
        c_path = (4 + mass / n) / (n + 4 + 2 * mass / n)
        c_one = 2 / ((n + 1.3) ** 2 + mass)
        c_rank = min(1 - c_one, 2 * (mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass))
        expected = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))

        eigenvalues, basis = np.linalg.eigh(self.covariance)
        spread = np.sqrt(np.maximum(eigenvalues, 1e-20))
        draws = self.rng.standard_normal((size, n)) * spread @ basis.T
        costs = cost(self.mean + self.sigma * draws)
        best = draws[np.argsort(costs, kind="stable")[:parents]]
        move = weight @ best
        self.mean = self.mean + self.sigma * move
        whitened = basis @ ((basis.T @ move) / spread)
        self.step_path = (1 - c_sigma) * self.step_path + np.sqrt(c_sigma * (2 - c_sigma) * mass) * whitened
        self.generation += 1
        length = float(np.linalg.norm(self.step_path))
        scaled = length / np.sqrt(1 - (1 - c_sigma) ** (2 * self.generation))
        steady = float(scaled < (1.4 + 2 / (n + 1)) * expected)
        self.path = (1 - c_path) * self.path + steady * np.sqrt(c_path * (2 - c_path) * mass) * move
        lost = (1 - steady) * c_path * (2 - c_path)
        self.covariance = (
            (1 - c_one - c_rank + c_one * lost) * self.covariance
            + c_one * np.outer(self.path, self.path)
            + c_rank * (best.T * weight) @ best
        )
        self.covariance = (self.covariance + self.covariance.T) / 2
        self.sigma *= float(np.exp((c_sigma / damping) * (length / expected - 1)))
        return costs

    def dump(self) -> dict[str, Any]:
        """Return the state as plain values; JSON keeps every bit of them."""
        return {
            "mean": self.mean.tolist(),
            "sigma": self.sigma,
            "population": self.population,
            "covariance": self.covariance.tolist(),
            "path": self.path.tolist(),
            "step_path": self.step_path.tolist(),
            "generation": self.generation,
            "rng": self.rng.bit_generator.state,
        }

    @classmethod
    def load(cls, values: dict[str, Any]) -> Evolution:
        """Return the state that :meth:`dump` gave."""
        rng = np.random.default_rng()
        rng.bit_generator.state = values["rng"]
        search = cls(np.array(values["mean"]), values["sigma"], values["population"], rng)
        search.covariance = np.array(values["covariance"])
        search.path, search.step_path = np.array(values["path"]), np.array(values["step_path"])
        search.generation = values["generation"]
        return search


@dataclass(frozen=True)
class Learning:
    """How an evolution is run.

    Parameters
    ----------
    generations, population
        Length and width of the search.
    sigma
        First standard deviation of the weights.
    seed
        Of the search.
    checkpoint_every
        Generations between two checkpoints.

    """

    generations: int = 300
    population: int = 24
    sigma: float = 0.3
    seed: int = 0
    checkpoint_every: int = 20

    def __post_init__(self) -> None:
        for name, least in (("generations", 1), ("population", 4), ("checkpoint_every", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"learner.{name} is {getattr(self, name)}, must be at least {least}")
        if not self.sigma > 0:
            raise InputError(f"learner.sigma is {self.sigma}, must be above 0")


@dataclass
class Progress:
    """What a training has reached: the search, the best mean by validation, and the curve.

    A row of ``curve`` is generation, least and mean cost of the population, training and validation cost of the mean.
    """

    search: Evolution
    best: FloatArray
    best_cost: float
    curve: list[tuple[int, float, float, float, float]] = field(default_factory=list)

    def dump(self, key: str) -> str:
        """Return the checkpoint; ``key`` names what it belongs to."""
        return json.dumps(
            {
                "key": key,
                "search": self.search.dump(),
                "best": self.best.tolist(),
                "best_cost": self.best_cost,
                "curve": self.curve,
            }
        )

    @classmethod
    def load(cls, text: str, key: str, where: str) -> Progress:
        """Return the state of a checkpoint.

        Raises
        ------
        InputError
            When it is none, or belongs to other data or another configuration.

        """
        try:
            values = json.loads(text)
            found = values["key"]
            curve = [tuple(row) for row in values["curve"]]
            state = cls(
                Evolution.load(values["search"]), np.array(values["best"]), values["best_cost"], curve
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{where}: no checkpoint of a training: {error}") from None
        if found != key:
            raise InputError(
                f"{where}: the checkpoint is of other data or options; remove it, or set resume=false"
            )
        return state


def learn(
    training: Episodes,
    validation: Episodes,
    learning: Learning,
    *,
    resume: Progress | None = None,
    save: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Evolve the weights on the training runs; keep the mean that is best on the validation runs.

    Deterministic: a training that was stopped and taken up again from a checkpoint ends with the same bits.
    ``save`` is called every ``checkpoint_every`` generations and at the end.
    """
    if resume is None:
        rng = np.random.default_rng(learning.seed)
        search = Evolution(FORECAST_WEIGHTS.copy(), learning.sigma, learning.population, rng)
        start = FORECAST_WEIGHTS[None]
        resume = Progress(search, FORECAST_WEIGHTS.copy(), float(play(validation, start).mean()))
        resume.curve.append((0, *(float(play(training, start).mean()),) * 3, resume.best_cost))
    search = resume.search
    while search.generation < learning.generations:
        costs = search.advance(lambda weights: play(training, weights).mean(axis=1))
        centre = search.mean[None]
        own, other = float(play(training, centre).mean()), float(play(validation, centre).mean())
        if other < resume.best_cost:
            resume.best, resume.best_cost = search.mean.copy(), other
        resume.curve.append((search.generation, float(costs.min()), float(costs.mean()), own, other))
        if search.generation % learning.checkpoint_every == 0 or search.generation == learning.generations:
            save(resume)
    return resume


def learned_rule(progress: Progress, episodes: Episodes) -> ScoreRule:
    """Return the rule that a training found."""
    return ScoreRule(progress.best, episodes.relative)
