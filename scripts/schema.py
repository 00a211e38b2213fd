"""What a configuration may say: every key and value is checked against the type that takes it.

The top level of a verb is described by a dataclass of this module; each part below it by what it builds: the
signature of its ``_target_``, or the model of a profile, a cluster or the replay's options. One walk over the
configuration compares both and refuses the first wrong key or value with the right ones beside it.
"""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from rlhfless.models.cluster import Cluster
from rlhfless.models.profile import Profile
from rlhfless.models.replay import ReplayOptions
from rlhfless.scripts.common import close_to
from rlhfless.scripts.workload import plain
from rlhfless.traces.errors import InputError, first_problem

#: A score that a search can minimise; the columns of ``mean`` in summary.json.
Objective = Literal[
    "step_seconds", "generation_seconds", "gpu_seconds", "busy_gpu_seconds", "idle_gpu_seconds", "actors"
]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Seed: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class LogTrace:
    """Keys of ``trace=log``; None: taken from the log, where it says so."""

    path: str | list[str]
    gpus: Count | None
    batch: Count | None
    responses_per_prompt: Count | None
    prompt_set: Count | None
    max_response_tokens: Count | None
    actor_gpus: Count | None
    max_running: Count
    prompt_effect: Annotated[float, Field(ge=0, le=1)]
    family: Literal["gamma", "lognormal"]


@dataclass(frozen=True)
class ProfileFile:
    """Keys of ``profile=file``."""

    file: str


@dataclass(frozen=True)
class Machine:
    """What the verbs that plan or replay share: costs, GPUs and the replay's choices."""

    profile: Profile
    cluster: Cluster
    options: ReplayOptions
    variants: list[str]
    gpu: str | None
    model: str | None
    tensor_parallel: Count
    learner_gpus: Count | None
    out: str | None


@dataclass(frozen=True)
class Replay(Machine):
    """Keys of ``rlhfless replay``."""

    trace: dict[str, Any]
    policy: dict[str, Any]
    plans: str | None
    seed: Seed
    optimize: Objective | list[Objective] | None


@dataclass(frozen=True)
class Plan(Machine):
    """Keys of ``rlhfless plan``."""

    policy: dict[str, Any]
    batch: str
    history: str | None
    max_response_tokens: Count | None
    seed: Seed


@dataclass(frozen=True)
class Compare(Machine):
    """Keys of ``rlhfless compare``."""

    trace: dict[str, Any]
    policies: dict[str, Any]
    select: str | list[str]
    baselines: list[str]
    seeds: Count


@dataclass(frozen=True)
class Train(Machine):
    """Keys of ``rlhfless train``; what goal and learner hold, they check themselves."""

    trace: dict[str, Any]
    learner: dict[str, Any]
    goal: dict[str, Any]
    thresholds: list[float]
    most: Count | None
    guesses: Count
    training_seeds: Count
    validation_seeds: Count
    heldout_seeds: Count
    resume: bool


@dataclass(frozen=True)
class Reproduce:
    """Keys of ``rlhfless reproduce``."""

    options: ReplayOptions
    row: int | list[int] | None
    figure: str | int | list[str | int] | None
    seeds: Count
    format: Literal["svg", "png"]
    out: str | None


#: The keys of each verb that Hydra configures.
VERBS: dict[str, type] = {
    "replay": Replay,
    "plan": Plan,
    "compare": Compare,
    "reproduce": Reproduce,
    "train": Train,
}

#: Where a symbol of RLHFless (arXiv 2602.22718) lies in a policy.
SYMBOLS = {"lambda": "scale.weight", "tau": "migration.threshold", "alpha": "predict.alpha"}

#: Keys of a node that say how to build it.
_BUILDING = ("_target_", "_convert_", "_partial_", "_recursive_", "_args_")


def check(verb: str, config: DictConfig) -> None:
    """Check the configuration of a verb: every key, the type and range of every value.

    Raises
    ------
    InputError
        One line that names the wrong part and the right ones.

    """
    known = [field.name for field in fields(VERBS[verb])]
    for key in map(str, config):
        if key not in known:
            meant = _meant(key, known, OmegaConf.to_container(config))
            raise InputError(f"no key {key}{meant}; keys are {', '.join(sorted(known))}")
    values = plain(config, "configuration")
    for key, value in values.items():
        if key in ("policy", "trace"):
            _check_part(value, key)
        elif key == "policies":
            for name, policy in value.items():
                _check_part(policy, f"policies.{name}")
        elif key == "profile" and isinstance(value, Mapping) and "_target_" in value:
            _check_part(value, key)
        elif key == "profile" and isinstance(value, Mapping) and "file" in value:
            _check_call(ProfileFile, value, key)
        else:
            _check_value(get_type_hints(VERBS[verb], include_extras=True)[key], value, key)


def _meant(key: str, known: Iterable[str], values: Any) -> str:
    """Return a hint at what a wrong key of the top level was to be."""
    where = "policy" if "policy" in values else "policies.rlhfless" if "policies" in values else None
    if where and key in SYMBOLS:
        return f": RLHFless's {key} is {where}.{SYMBOLS[key]}"
    below = [path for path in _paths(values) if path.endswith(f".{key}")]
    if below:
        return f": did you mean {min(below, key=len)}?"
    return close_to(key, known)


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _check_part(values: Any, where: str) -> None:
    """Check a node that names what it builds."""
    if not isinstance(values, Mapping) or "_target_" not in values:
        raise InputError(f"{where}: is {values!r}, must be a mapping with _target_")
    name = str(values["_target_"])
    if where == "trace" and name == "log":
        _check_call(LogTrace, values, where)
        return
    try:
        target = pydoc.locate(name)
    except pydoc.ErrorDuringImport as error:
        raise InputError(f"{where}: cannot import {name}: {error.value}") from None
    if target is None:
        raise InputError(f"{where}: cannot find {name}")
    _check_call(target, values, where)


def _check_call(target: Any, values: Mapping[str, Any], where: str) -> None:
    """Check the arguments of a call against its parameters."""
    given = {key: value for key, value in values.items() if key not in _BUILDING}
    parameters, open_ended = _parameters(target)
    for key, value in given.items():
        if key in parameters:
            _check_value(parameters[key], value, f"{where}.{key}")
        elif not open_ended:
            taken = ", ".join(parameters) or "no keys"
            name = getattr(target, "__name__", str(target))
            raise InputError(f"{where}: no key {key}{close_to(key, parameters)}; {name} takes {taken}")


@lru_cache(maxsize=512)
def _parameters(target: Any) -> tuple[dict[str, Any], bool]:
    """Return the type of each parameter of a class or function, and whether it takes any others too."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return {}, True
    data = hasattr(target, "__dataclass_fields__") or hasattr(target, "model_fields")
    typed = target if data or inspect.isfunction(target) else getattr(target, "__init__", target)
    try:
        hints = get_type_hints(typed, include_extras=True)
    except (NameError, TypeError):
        hints = {}
    parameters = {
        name: hints.get(name, Any)
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    return parameters, any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _check_value(annotation: Any, value: Any, where: str) -> None:
    members = _members(annotation)
    if isinstance(value, Mapping):
        if "_target_" in value:
            _check_part(value, where)
            return
        models = [m for m in members if hasattr(m, "__dataclass_fields__") or hasattr(m, "model_fields")]
        if models:
            _check_call(models[0], value, where)
            return
    if any(getattr(m, "_is_protocol", False) for m in members) and not (value is None and None in members):
        raise InputError(f"{where}: is {value!r}, must be a part with _target_")
    adapter = _adapter(annotation)
    if adapter is None:
        return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        # Lists stand for tuples and text for paths in a configuration; text never stands for a number.
        try:
            taken = adapter.validate_python(value)
        except ValidationError as lax:
            raise InputError(f"{where}: {first_problem(lax)}") from None
        if isinstance(value, str | bool | float) and isinstance(taken, bool | int | float):
            raise InputError(f"{where}: {first_problem(error)}") from None


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation joins; None stands for NoneType."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    arguments = get_args(annotation)
    if arguments and (get_origin(annotation) is None or not inspect.isclass(get_origin(annotation))):
        return tuple(None if a is type(None) else a for a in arguments)
    if arguments and get_origin(annotation).__name__ == "UnionType":
        return tuple(None if a is type(None) else a for a in arguments)
    return (annotation,)


@lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return what checks values of a type, or None where the type cannot be checked."""
    try:
        return TypeAdapter(annotation)
    except PydanticUserError:
        pass
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return None
