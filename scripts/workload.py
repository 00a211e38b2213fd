"""From a configuration to what a run needs: traces, costs, GPUs, policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra.utils
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from rlhfless.models.calibrate import Calibration, RunShape, calibrate
from rlhfless.models.cluster import Cluster
from rlhfless.models.profile import Profile
from rlhfless.models.replay import ReplayOptions
from rlhfless.policies import Policy, Setting
from rlhfless.traces.errors import InputError, first_problem
from rlhfless.traces.files import read_trace
from rlhfless.traces.reconstruct import reconstruct
from rlhfless.traces.synthetic import Synthetic, generate
from rlhfless.traces.trace import RunLog, Trace
from rlhfless.traces.verl_log import read_verl_log


@dataclass(frozen=True)
class Workload:
    """A workload with one trace per seed, and what it runs on."""

    name: str
    traces: tuple[Trace, ...]
    setting: Setting
    log: RunLog | None = None
    calibration: Calibration | None = None


def plain(node: Any, where: str) -> dict[str, Any]:
    """Return a configuration node as plain values, every interpolation resolved."""
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    if not isinstance(values, dict):
        raise InputError(f"{where}: must be a mapping, is {values!r}")
    return {str(key): value for key, value in values.items()}


def build_profile(config: DictConfig) -> Profile:
    """Build the profile that the configuration names: numbers, or data sheets to compute from."""
    values = plain(config.profile, "profile")
    if "_target_" in values:
        profile = _call(values, "profile")
        if not isinstance(profile, Profile):
            raise InputError(f"profile: {values['_target_']} gave no Profile")
        return profile
    return Profile.parse(values, "profile")


def build_setting(config: DictConfig, profile: Profile, cluster: Cluster) -> Setting:
    """Put together costs, GPUs and replay options."""
    profile = cluster.adapt(profile)
    try:
        options = TypeAdapter(ReplayOptions).validate_python(plain(config.options, "options"))
    except ValidationError as error:
        raise InputError(f"options: {first_problem(error)}") from None
    learner = config.learner_gpus or profile.stages["update_actor"].gpus
    return Setting(profile=profile, cluster=cluster, options=options, learner_gpus=int(learner))


def build_cluster(config: DictConfig) -> Cluster:
    """Build the cluster that the configuration names."""
    try:
        return Cluster.model_validate(plain(config.cluster, "cluster"))
    except ValidationError as error:
        raise InputError(f"cluster: {first_problem(error)}") from None


def build_policy(node: Any, where: str) -> Policy:
    """Build a policy from its parts, or a user's own class."""
    policy = _call(plain(node, where), where)
    if not isinstance(policy, Policy):
        raise InputError(f"{where}: {type(policy).__name__} needs an attribute name and a method plan(view)")
    return policy


def _call(values: Mapping[str, Any], where: str) -> Any:
    try:
        return hydra.utils.instantiate(OmegaConf.create(dict(values)), _convert_="all")
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        if isinstance(cause, ValidationError):
            raise InputError(f"{where}: {first_problem(cause)}") from None
        raise InputError(f"{where}: {' '.join(str(cause).split())}") from None


def build_workloads(config: DictConfig, seeds: int) -> list[Workload]:
    """Build the workload of the configuration; several, where it names several logs."""
    if seeds < 1:
        raise InputError(f"seeds is {seeds}, must be at least 1")
    values = plain(config.trace, "trace")
    kind = str(values.pop("_target_", ""))
    profile, cluster = build_profile(config), build_cluster(config)
    if kind == "log":
        paths = values.pop("path")
        return [
            _log_workload(config, str(path), values, profile, cluster, seeds)
            for path in (paths if isinstance(paths, list) else [paths])
        ]
    setting = build_setting(config, profile, cluster)
    if kind.endswith("Synthetic"):
        parameters = Synthetic.parse(values, "trace")
        traces = tuple(generate(parameters, seed) for seed in range(seeds))
        return [Workload(parameters.name, traces, setting)]
    if kind.endswith("read_trace"):
        trace = read_trace(str(values["path"]))
        return [Workload(trace.name, (trace,) * seeds, setting)]
    raise InputError(f"trace._target_ is {kind!r}, must be a synthetic preset, file or log")


def _log_workload(
    config: DictConfig, path: str, options: Mapping[str, Any], base: Profile, cluster: Cluster, seeds: int
) -> Workload:
    log = read_verl_log(path)
    gpus = _known(path, "gpus", options["gpus"], log.gpus)
    per_prompt = int(options["responses_per_prompt"] or 1)
    batch = _known(path, "batch", options["batch"], log.responses and log.responses // per_prompt)
    actor_gpus = base.actor.gpus
    shape = RunShape(
        gpus=gpus,
        actors=max(gpus // actor_gpus, 1),
        actor_gpus=actor_gpus,
        responses=batch * per_prompt,
        max_running=int(options["max_running"]),
    )
    traces = tuple(
        reconstruct(
            log,
            prompts_per_step=batch,
            responses_per_prompt=per_prompt,
            prompt_set_size=options["prompt_set"],
            max_response_tokens=options["max_response_tokens"],
            prompt_effect=float(options["prompt_effect"]),
            family=options["family"],
            seed=seed,
        )
        for seed in range(seeds)
    )
    calibration = calibrate(
        log,
        shape,
        trace=traces[0],
        least_iteration_seconds=base.decode.base_seconds[0],
        prefill_token_seconds=base.prefill.token_seconds * base.prefill.gpus / actor_gpus,
    )
    profile = calibration.profile(base)
    nodes, per_node = -(-gpus // cluster.gpus_per_node), min(gpus, cluster.gpus_per_node)
    own = cluster.model_copy(update={"name": f"{gpus} GPUs", "nodes": nodes, "gpus_per_node": per_node, "gpu": None})
    setting = build_setting(config, profile, own)
    switch = replace(setting.options, switch_seconds=setting.options.switch_seconds + calibration.switch_seconds)
    return Workload(Path(path).name, traces, replace(setting, options=switch), log, calibration)


def _known(path: str, option: str, given: int | None, logged: int | None) -> int:
    value = given if given is not None else logged
    if value is None:
        raise InputError(f"{path}: the log does not say {option}: give trace.{option} (or --{option})")
    return int(value)
