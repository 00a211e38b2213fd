"""Proximal policy optimisation (Stable-Baselines3) as another learner: ``pip install 'rlhfless[rl]'``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless.solver.episodes import relative_objective
from rlhfless.solver.evaluation import step_values
from rlhfless.solver.horizon import HorizonTables
from rlhfless.solver.learned import NetworkRule
from rlhfless.solver.objective import Objective
from rlhfless.traces.errors import InputError


@dataclass(frozen=True)
class Ppo:
    """How PPO is run.

    Parameters
    ----------
    timesteps
        Environment steps in all.
    rollout
        Environment steps between two updates; the rule is looked at after each.
    hidden
        Units of both hidden layers.
    learning_rate
        Adam's.
    seed
        Of networks, actions and episodes.

    """

    timesteps: int = 60_000
    rollout: int = 2_048
    hidden: int = 64
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("timesteps", 1), ("rollout", 64), ("hidden", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"learner.{name} is {getattr(self, name)}, must be at least {least}")


def learn_ppo(
    training: Sequence[HorizonTables],
    validation: Sequence[HorizonTables],
    objective: Objective,
    how: Ppo,
) -> tuple[NetworkRule, list[tuple[int, float, float]]]:
    """Train on the training runs; return the rule that is best on the validation runs, and the curve.

    A row of the curve is environment steps, training and validation objective a step of the most likely actions.

    Raises
    ------
    InputError
        Without the packages.

    """
    try:
        import torch
        from stable_baselines3 import PPO
    except ImportError:
        raise InputError("learner sb3_ppo needs Stable-Baselines3: pip install 'rlhfless[rl]'") from None
    from rlhfless.solver.environment import ActorScalingEnv

    torch.set_num_threads(1)
    relative = relative_objective(training, objective)
    model = PPO(
        "MlpPolicy",
        ActorScalingEnv(training, objective),
        n_steps=how.rollout,
        batch_size=64,
        gamma=1.0 - 1.0 / len(training[0]),
        learning_rate=how.learning_rate,
        policy_kwargs={"net_arch": [how.hidden, how.hidden]},
        seed=how.seed,
        device="cpu",
    )
    best: NetworkRule | None = None
    least, curve = np.inf, []
    while model.num_timesteps < how.timesteps:
        model.learn(how.rollout, reset_num_timesteps=False)
        rule = _rule(model, relative)
        own = float(step_values(training, rule, objective).mean())
        other = float(step_values(validation, rule, objective).mean())
        curve.append((int(model.num_timesteps), own, other))
        if best is None or other < least:
            best, least = rule, other
    assert best is not None
    return best, curve


def _rule(model: Any, relative: Objective) -> NetworkRule:
    policy = model.policy
    linear = [
        layer for layer in [*policy.mlp_extractor.policy_net, policy.action_net] if hasattr(layer, "weight")
    ]
    layers = tuple(
        (
            layer.weight.detach().numpy().astype(np.float64),
            layer.bias.detach().numpy().astype(np.float64),
        )
        for layer in linear
    )
    return NetworkRule(layers, relative)
