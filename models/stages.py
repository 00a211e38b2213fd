"""The stage graph of one training step."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from rlhfless.models.profile import LEARNING_STAGES, PREPARATION_STAGES, Profile
from rlhfless.traces.errors import InputError

#: Stages after generation, by algorithm. Critic-free variants drop value and critic; GPG has no reference
#: model and takes old log-probabilities instead.
STAGES_BY_ALGORITHM: dict[str, tuple[str, ...]] = {
    "ppo": ("reward", "reference", "value", "update_critic", "update_actor"),
    "grpo": ("reward", "reference", "update_actor"),
    "gspo": ("reward", "reference", "update_actor"),
    "rloo": ("reward", "reference", "update_actor"),
    "reinforce_plus_plus": ("reward", "reference", "update_actor"),
    "dapo": ("reward", "old_log_prob", "update_actor"),
    "gpg": ("reward", "old_log_prob", "update_actor"),
}


def stages_of(algorithm: str, profile: Profile) -> tuple[str, ...]:
    """Return the stages after generation that a step of ``algorithm`` has and the profile has costs for.

    A profile fitted to a log knows the stages that the run had: it decides.

    Raises
    ------
    InputError
        For an unknown algorithm, or a profile without a cost for a stage that the algorithm needs.

    """
    if algorithm not in STAGES_BY_ALGORITHM:
        raise InputError(
            f"algorithm {algorithm} is not known; algorithms are {', '.join(STAGES_BY_ALGORITHM)}"
        )
    known = PREPARATION_STAGES + LEARNING_STAGES
    if profile.kind == "fitted":
        return tuple(stage for stage in known if stage in profile.stages)
    stages = STAGES_BY_ALGORITHM[algorithm]
    for stage in stages:
        if stage not in profile.stages:
            raise InputError(f"profile {profile.name}: stages.{stage} is missing, {algorithm} needs it")
    return tuple(stage for stage in known if stage in stages)


def step_graph(actors: int, *, deduplicated: bool, stages: Sequence[str]) -> nx.DiGraph[str]:
    """Return the graph of one step: a node a stage, an edge where one needs the other's output.

    Weight sync, KV transfer and decode have a node for every actor, named ``decode.0`` and so on. Without
    deduplicated prefill the decode nodes hold the prefill.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    decodes = [f"decode.{actor}" for actor in range(actors)]
    for actor, decode in enumerate(decodes):
        graph.add_edge(f"weight_sync.{actor}", decode)
        if deduplicated:
            graph.add_edge("prefill", f"kv_transfer.{actor}")
            graph.add_edge(f"kv_transfer.{actor}", decode)
    preparation = [stage for stage in stages if stage in PREPARATION_STAGES]
    learning = [stage for stage in stages if stage in LEARNING_STAGES]
    for stage in preparation:
        graph.add_edges_from((decode, stage) for decode in decodes)
    for stage in learning:
        graph.add_edges_from((before, stage) for before in preparation or decodes)
    return graph
