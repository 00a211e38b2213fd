"""Replay a workload under several policies; print what each costs and how long it takes.

    rlhfless compare trace=deepcoder_16k cluster=h100_4x8 profile=h100_qwen2.5-14b_tp2
    rlhfless compare policy=all cluster=a100_2x8   # without a profile: Qwen2.5-3B on the cluster's GPUs
    rlhfless compare --log run.log.gz --gpus 8 --responses-per-prompt 5 --batch 1024

With ``out`` it writes report.md, report.html (opens without a network: tables, charts, the timeline of every
step), summary.json, steps.csv and timings.json.

With a log, its lengths and stage times are the workload: a cost profile is fitted to its first quarter, the
errors on the rest are stated, and every policy is replayed on it. Everything else is a Hydra override; -m
sweeps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from rlhfless.scripts.arguments import add_log_options, given_log_options, hydra_parser, parse

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    overrides = log_overrides(sys.argv[1:] if arguments is None else arguments, __doc__ or "", "compare")
    from rlhfless.scripts.common import hydra_verb

    hydra_verb("compare", compare, policy_overrides(overrides))


def log_overrides(arguments: Sequence[str], description: str, verb: str) -> list[str]:
    """Turn the plain options about a log into Hydra overrides; the rest is passed on."""
    parser = hydra_parser(verb, description)
    parser.add_argument("--log", nargs="+", metavar="FILE", help="verl console logs, plain or .gz")
    add_log_options(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where to write the results")
    parsed, overrides = parse(parser, arguments)
    about_log = given_log_options(parsed)
    given = [] if parsed.log else cluster_profile(overrides)
    if parsed.log:
        given += ["trace=log", f"trace.path=[{','.join(map(quoted, parsed.log))}]"]
        chosen = {override.split("=")[0] for override in overrides}
        given += [f"{group}={name}" for group, name in LOG_DEFAULTS.items() if group not in chosen]
    elif about_log:
        parser.error(f"--{next(iter(about_log)).replace('_', '-')} goes with --log")
    given += [f"trace.{key}={value}" for key, value in about_log.items()]
    if parsed.out:
        given.append(f"out={quoted(parsed.out)}")
    return [*given, *overrides]


def cluster_profile(overrides: Sequence[str]) -> list[str]:
    """Return the profile that goes with the chosen cluster's GPUs, where none is chosen: the default's model."""
    chosen = dict(override.split("=", 1) for override in overrides if "=" in override)
    if "cluster" not in chosen or "profile" in chosen:
        return []
    name = f"{chosen['cluster'].split('_')[0]}_{DEFAULT_MODEL}"
    known = files("rlhfless.conf").joinpath("profile", f"{name}.yaml").is_file()
    return [f"profile={name}"] if known else []


#: Model and actor size of the default profile, in the names of profiles.
DEFAULT_MODEL = "qwen2.5-3b_tp2"

#: What a log does not say: the profile gives the actor's size, memory, links and functions.
LOG_DEFAULTS = {"profile": "h100_qwen2.5-7b_tp2", "cluster": "custom"}


def quoted(text: str) -> str:
    """Return a string as Hydra's override grammar takes it whole."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def policy_overrides(overrides: Sequence[str]) -> list[str]:
    """Let ``policy=`` choose from the policies; ``policy.<key>=`` changes the one that is chosen.

    Where none or several are chosen, ``policy._target_=`` and its arguments add one of the user's own.
    """
    chosen = [o.removeprefix("policy=") for o in overrides if o.startswith("policy=")]
    named = chosen[-1].strip("[]") if chosen else ""
    added = any(o.startswith("policy._target_=") for o in overrides)
    one = bool(named) and "," not in named and named != "all" and not added
    own = f"policies.{named}." if one else "++policies.own."
    renamed = {"policy=": "select=", "policy.": own}

    def rename(override: str) -> str:
        for old, new in renamed.items():
            if override.startswith(old):
                return new + override.removeprefix(old)
        return override

    return [rename(override) for override in overrides]


def compare(config: DictConfig) -> None:
    """Run the comparison that a configuration describes."""
    from rlhfless.scripts.common import console, output_folder, write_files
    from rlhfless.scripts.comparison import run_comparison
    from rlhfless.scripts.page_comparison import comparison_page
    from rlhfless.scripts.report import comparison_files, print_comparison
    from rlhfless.scripts.workload import build_workloads, first_seeds

    out = output_folder(config)
    workloads = build_workloads(config, first_seeds(int(config.seeds)))
    for workload in workloads:
        result = run_comparison(config, workload)
        print_comparison(console(), result)
        if out is not None:
            folder = out / workload.name if len(workloads) > 1 else out
            write_files(
                folder, {**comparison_files(result), "report.html": comparison_page(result, settings(config))}
            )
            console().print(f"report: {folder / 'report.md'}, {folder / 'report.html'}", soft_wrap=True)


def settings(config: DictConfig) -> str:
    """Return the configuration of a comparison as YAML, without the policies that it does not select."""
    import yaml
    from omegaconf import OmegaConf

    from rlhfless.scripts.comparison import selected

    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    values["policies"] = {name: values["policies"][name] for name in selected(config)}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


if __name__ == "__main__":
    main()
