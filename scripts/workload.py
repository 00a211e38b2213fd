"""From a configuration to what a run needs: traces, costs, GPUs, policies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra.utils
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from rlhfless.models.calibrate import Calibration, RunShape, calibrate
from rlhfless.models.cluster import Cluster
from rlhfless.models.profile import Profile
from rlhfless.models.replay import ReplayOptions
from rlhfless.policies import Policy, Setting
from rlhfless.scripts.common import advance, progress
from rlhfless.traces.errors import InputError, first_problem
from rlhfless.traces.files import StageTimes, read_trace
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
    """Build the profile that the configuration names: numbers, data sheets to compute from, or a file."""
    values = plain(config.profile, "profile")
    if set(values) == {"file"}:
        return profile_from_file(str(values["file"]))
    if "_target_" in values:
        profile = _call(values, "profile")
        if not isinstance(profile, Profile):
            raise InputError(f"profile: {values['_target_']} gave no Profile")
        return profile
    return Profile.parse(values, "profile")


def profile_from_file(path: str) -> Profile:
    """Read a profile from a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a profile is a mapping, this is {type(values).__name__}")
    return Profile.parse(values, path)


def named_profile(name: str) -> Profile:
    """Return a profile that ships with the package, or one from a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return profile_from_file(name)
    with initialize_config_module("rlhfless.conf", version_base="1.3"):
        try:
            return build_profile(compose(overrides=[f"+profile={name}"]))
        except HydraException:
            raise InputError(f"profile {name} does not exist; see conf/profile/") from None


def build_setting(config: DictConfig, profile: Profile, cluster: Cluster) -> Setting:
    """Put together costs, GPUs and replay options."""
    profile = cluster.adapt(profile)
    try:
        options = TypeAdapter(ReplayOptions).validate_python(plain(config.options, "options"))
    except ValidationError as error:
        raise InputError(f"options: {first_problem(error)}") from None
    learner = config.learner_gpus or profile.stages["update_actor"].gpus
    variants = tuple(cluster.adapt(named_profile(str(name))) for name in config.get("variants") or ())
    return Setting(
        profile=profile, cluster=cluster, options=options, learner_gpus=int(learner), variants=variants
    )


def build_cluster(config: DictConfig) -> Cluster:
    """Build the cluster that the configuration names."""
    return Cluster.parse(plain(config.cluster, "cluster"), "cluster")


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
        # Hydra names the part of the node that failed in the last line of its own message.
        part = re.search(r"^full_key: (\S+)", str(error), re.MULTILINE)
        place = f"{where}.{part[1]}" if part else where
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        if isinstance(cause, ValidationError):
            raise InputError(f"{place}: {first_problem(cause)}") from None
        raise InputError(f"{place}: {' '.join(str(cause).split())}") from None


def first_seeds(count: int) -> range:
    """Return the seeds 0, 1, ... of ``count`` runs."""
    if count < 1:
        raise InputError(f"seeds is {count}, must be at least 1")
    return range(count)


def build_workloads(config: DictConfig, seeds: Sequence[int]) -> list[Workload]:
    """Build the workload of the configuration, a trace for each seed; several, where it names several logs."""
    if min(seeds) < 0:
        raise InputError(f"seed is {min(seeds)}, must be at least 0")
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
        traces = tuple(generate(parameters, seed) for seed in seeds)
        return [Workload(parameters.name, traces, setting)]
    if kind.endswith("read_trace"):
        trace = read_trace(str(values["path"]))
        return [Workload(trace.name, (trace,) * len(seeds), setting)]
    raise InputError(f"trace._target_ is {kind!r}, must be a synthetic preset, file or log")


def log_defaults() -> dict[str, Any]:
    """Return the keys of ``conf/trace/log.yaml`` with their defaults, without the path."""
    text = files("rlhfless.conf").joinpath("trace", "log.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    return {key: value for key, value in values.items() if key not in ("_target_", "path")}


def stage_times(path: str, gpus: int | None) -> StageTimes:
    """Return the stage times of a log."""
    log = read_verl_log(path)
    return StageTimes.of_log(log, _known(path, "gpus", gpus, log.gpus))


def _batch(path: str, options: Mapping[str, Any], log: RunLog) -> tuple[int, int]:
    """Return prompts a step and responses a prompt."""
    per_prompt = int(options["responses_per_prompt"] or 1)
    return _known(path, "batch", options["batch"], log.responses and log.responses // per_prompt), per_prompt


def rebuilt_traces(
    path: str, options: Mapping[str, Any], seeds: Iterable[int], log: RunLog | None = None
) -> Iterator[Trace]:
    """Rebuild a log's response lengths, once for each seed; ``options`` are the keys of the log's configuration.

    The algorithm follows from the stages: a critic says ppo, a reference model grpo, neither gpg.
    """
    log = log or read_verl_log(path)
    batch, per_prompt = _batch(path, options, log)
    algorithm = "ppo" if "update_critic" in log.stages else "grpo" if "reference" in log.stages else "gpg"
    for seed in seeds:
        trace = reconstruct(
            log,
            prompts_per_step=batch,
            responses_per_prompt=per_prompt,
            prompt_set_size=options["prompt_set"],
            max_response_tokens=options["max_response_tokens"],
            prompt_effect=float(options["prompt_effect"]),
            family=options["family"],
            seed=seed,
        )
        yield replace(trace, algorithm=algorithm)


@dataclass(frozen=True)
class CalibratedLog:
    """A log with its traces, one a seed, and the costs fitted to it."""

    log: RunLog
    shape: RunShape
    traces: tuple[Trace, ...]
    calibration: Calibration


def calibrate_log(
    path: str, options: Mapping[str, Any], base: Profile, seeds: Sequence[int]
) -> CalibratedLog:
    """Read a log, rebuild its lengths and fit costs to its stage times.

    ``options`` are the keys of ``conf/trace/log.yaml``; ``base`` gives the actor's size and what a log cannot
    tell (memory, links, functions, prefill, the least time of an iteration). The fit is on seed 0's lengths.
    """
    log = read_verl_log(path)
    gpus = _known(path, "gpus", options["gpus"], log.gpus)
    batch, per_prompt = _batch(path, options, log)
    actor_gpus = int(options["actor_gpus"] or min(base.actor.gpus, gpus))
    shape = RunShape(
        gpus=gpus,
        actors=max(gpus // actor_gpus, 1),
        actor_gpus=actor_gpus,
        responses=batch * per_prompt,
        max_running=int(options["max_running"]),
    )
    needed = dict.fromkeys([0, *seeds])
    traces = {}
    with progress(len(needed), f"rebuilding the lengths of {log.name}") as bar:
        for seed, trace in zip(needed, rebuilt_traces(path, options, needed, log), strict=True):
            traces[seed] = trace
            advance(bar)
    calibration = calibrate(
        log,
        shape,
        trace=traces[0],
        least_iteration_seconds=base.decode.base_seconds[0],
        prefill_token_seconds=base.prefill.token_seconds * base.prefill.gpus / actor_gpus,
    )
    return CalibratedLog(log, shape, tuple(traces[seed] for seed in seeds), calibration)


def _log_workload(
    config: DictConfig,
    path: str,
    options: Mapping[str, Any],
    base: Profile,
    cluster: Cluster,
    seeds: Sequence[int],
) -> Workload:
    fitted = calibrate_log(path, options, base, seeds)
    gpus, calibration = fitted.shape.gpus, fitted.calibration
    per_node = min(gpus, cluster.gpus_per_node)
    own = cluster.model_copy(
        update={"name": "of the log", "nodes": -(-gpus // per_node), "gpus_per_node": per_node, "gpu": None}
    )
    setting = build_setting(config, calibration.profile(base), own)
    overhead = setting.options.generation_overhead_seconds + calibration.overhead_seconds
    setting = replace(setting, options=replace(setting.options, generation_overhead_seconds=overhead))
    return Workload(Path(path).name, fitted.traces, setting, fitted.log, calibration)


def _known(path: str, option: str, given: int | None, logged: int | None) -> int:
    value = given if given is not None else logged
    if value is None:
        raise InputError(f"{path}: the log does not say {option}: give trace.{option} (or --{option})")
    return int(value)
