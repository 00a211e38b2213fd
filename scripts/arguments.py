"""What the verbs' command lines have in common, and the options that say what a console log leaves open."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

#: Hydra's own flags with two dashes that stay available.
HYDRA_FLAGS = ("--multirun", "--cfg", "--resolve", "--package", "--config-dir", "--info")

#: The option that starts from a recorded run.
FROM = "--from"

#: Option, type and help. The defaults are those of ``conf/trace/log.yaml``, where the keys have underscores.
LOG_OPTIONS: dict[str, tuple[type, str]] = {
    "gpus": (int, "GPUs of the run (default: from the log)"),
    "batch": (int, "prompts a step (default: from the log)"),
    "responses-per-prompt": (int, "responses to each prompt (default 1)"),
    "actor-gpus": (int, "GPUs of a decode actor (default: the profile's, or all if there are fewer)"),
    "max-running": (int, "responses that an actor runs at once (default 256)"),
    "max-response-tokens": (int, "cap on a response (default: from the log)"),
    "prompt-set": (int, "prompts in the data set (default: from the log's epochs)"),
    "prompt-effect": (float, "share of the length variance that lies between prompts (default 0.5)"),
    "family": (str, "distribution of the rebuilt lengths: gamma or lognormal (default gamma)"),
}


def hydra_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a verb that takes Hydra overrides beside its options."""
    return argparse.ArgumentParser(
        prog=f"rlhfless {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Configuration and its values: rlhfless {verb} --cfg job",
        allow_abbrev=False,
    )


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the overrides; an option that neither the verb nor Hydra knows is refused."""
    options, overrides = parser.parse_known_args(arguments)
    unknown = [o for o in overrides if o.startswith("--") and o.split("=")[0] not in HYDRA_FLAGS]
    if unknown:
        parser.error(f"no option {unknown[0]}")
    return options, overrides


def from_option(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``--from FILE``, a ``run.yaml`` to start from, out of the arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog="rlhfless")
    parser.add_argument(FROM, dest="recorded", metavar="FILE")
    options, rest = parser.parse_known_args(arguments)
    return options.recorded, rest


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; one that is not given is None."""
    for name, (kind, text) in LOG_OPTIONS.items():
        metavar = {int: "N", float: "X", str: "NAME"}[kind]
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)


def given_log_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by their key in ``conf/trace/log.yaml``."""
    keys = [name.replace("-", "_") for name in LOG_OPTIONS]
    return {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
