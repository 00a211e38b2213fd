"""The horizon as a Gymnasium environment. Needs the package gymnasium; everything else works without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlhfless.solver.episodes import Episodes, observation, surprise_of
from rlhfless.solver.horizon import HorizonTables
from rlhfless.solver.objective import Objective

Observation = NDArray[np.float32]

#: Observations are cut here; they are of the order of 1.
_BOUND = 100.0


class ActorScalingEnv(gym.Env[Observation, NDArray[np.int64]]):
    """Actor count, cut threshold and kept slots, step by step of a training run.

    An episode is one run; a seeded reset draws which. Rewards are exact: they come from tables that the replay
    filled (:mod:`rlhfless.solver.horizon`), so an episode's return is what a replay of its plans costs, and a step
    takes microseconds.

    **Action**, ``MultiDiscrete([N, T, N + 1])``: actors - 1, which threshold, how many actors stay warm (more than
    there are count as all).

    **Observation**, all of the order of 1 (:func:`~rlhfless.solver.episodes.observation`): share of new prompts,
    progress, warm slots, how the last step's generation compares to the forecast, expected learning time, rest of the
    step, what a cold start takes longer, the min-max rule's count; then forecast generation time and decode cost
    by count and threshold. Forecasts come from history and predictions; nothing tells of true lengths.

    **Reward**: minus the step's objective.

    Parameters
    ----------
    runs
        Tables of equally long runs in one setting, one a seed.
    objective
        Of a mean step (:func:`~rlhfless.solver.episodes.run_objective`).

    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (the name and type are Gymnasium's)

    def __init__(self, runs: Sequence[HorizonTables], objective: Objective) -> None:
        self.episodes = Episodes.of(runs, objective)
        self._forecasts = [run.forecasts for run in runs]
        most, thresholds = self.episodes.most, len(self.episodes.thresholds)
        self.action_space = gym.spaces.MultiDiscrete([most, thresholds, most + 1])
        size = 8 + 2 * most * thresholds
        self.observation_space = gym.spaces.Box(-_BOUND, _BOUND, (size,), dtype=np.float32)
        # What does not depend on the actions is observed once; warm slots and surprise are filled in.
        self._seen = [
            [self._observe(run, step) for step in range(self.episodes.steps)]
            for run in range(self.episodes.runs)
        ]
        self._run = self._step = self._warm = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a run: the one that ``options["run"]`` numbers, or one by chance."""
        super().reset(seed=seed)
        chosen = (options or {}).get("run")
        self._run = int(self.np_random.integers(self.episodes.runs) if chosen is None else chosen)
        self._step = self._warm = 0
        return self._seen[self._run][0].copy(), {"run": self._run}

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take a step's decision."""
        count, threshold = int(action[0]), int(action[1])
        keep = min(int(action[2]), count + 1)
        run, step, warm = self._run, self._step, self._warm
        reward = -float(self.episodes.values[run, step, count, threshold, warm, keep])
        generation = float(self.episodes.generation[run, step, count, threshold, warm])
        self._step, self._warm = step + 1, min(keep, int(self.episodes.actors[run, step]))
        ended = self._step == self.episodes.steps
        seen = self._seen[run][min(self._step, self.episodes.steps - 1)].copy()
        seen[2] = self._warm / self.episodes.most
        if not ended:
            expected = self._forecasts[run][self._step].generation[count, len(self.episodes.thresholds) // 2]
            seen[3] = surprise_of(generation, float(expected))
        return seen, reward, ended, False, {}

    def _observe(self, run: int, step: int) -> Observation:
        forecast = self._forecasts[run][step]
        seen = observation(forecast, self.episodes.costs, self.episodes.relative, 0)
        return np.clip(seen, -_BOUND, _BOUND).astype(np.float32)
