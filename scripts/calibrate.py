"""Fit a cost profile to a training log and state its error, stage by stage.

    rlhfless calibrate run.log.gz --batch 1024 --responses-per-prompt 5 --out fitted.yaml

The profile in --out can be replayed: rlhfless compare profile=file profile.file=fitted.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    parser = argparse.ArgumentParser(
        prog="rlhfless calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", help="verl console log, plain or .gz")
    parser.add_argument(
        "--profile",
        default="h100_qwen2.5-7b_tp2",
        metavar="NAME",
        help="profile (name or YAML file) that gives the actor's size and what a log cannot tell (default %(default)s)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the run (default: from the log)")
    parser.add_argument("--actor-gpus", type=int, metavar="N", help="GPUs a decode actor (default: the profile's)")
    parser.add_argument("--batch", type=int, metavar="N", help="prompts a step (default: from the log)")
    parser.add_argument("--responses-per-prompt", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--prompt-set", type=int, metavar="N", help="prompts in the data set (default: from the log's epochs)"
    )
    parser.add_argument(
        "--max-response-tokens", type=int, metavar="N", help="cap on a response (default: from the log)"
    )
    parser.add_argument(
        "--max-running",
        type=int,
        default=256,
        metavar="N",
        help="responses an actor runs at once (default %(default)s)",
    )
    parser.add_argument(
        "--prompt-effect",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the length variance between prompts (default %(default)s)",
    )
    parser.add_argument(
        "--family",
        choices=("gamma", "lognormal"),
        default="gamma",
        help="family of the rebuilt lengths (default %(default)s)",
    )
    parser.add_argument("--name", help="name of the fitted profile")
    parser.add_argument("--out", metavar="FILE", help="write the fitted profile as YAML")
    options = parser.parse_args(arguments)
    from rlhfless.scripts.common import guarded

    guarded(lambda: calibrate(options))


def calibrate(options: argparse.Namespace) -> None:
    """Fit, print the errors, and write the profile."""
    import yaml

    from rlhfless.scripts.common import console, write_files
    from rlhfless.scripts.report import print_calibration
    from rlhfless.scripts.workload import calibrate_log, named_profile

    base = named_profile(options.profile)
    fitted = calibrate_log(options.log, vars(options), base, seeds=1)
    profile = fitted.calibration.profile(base, name=options.name)
    print_calibration(console(), fitted.calibration, fitted.log)
    if options.out:
        path = Path(options.out)
        text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=110)
        write_files(path.parent, {path.name: text})
        console().print(f"profile: {path}", highlight=False)


if __name__ == "__main__":
    main()
