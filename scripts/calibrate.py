"""Fit a cost profile to a training log and state its error, stage by stage.

    rlhfless calibrate run.log.gz --batch 1024 --responses-per-prompt 5 --out fitted.yaml

The file can be replayed: rlhfless compare profile=file profile.file=fitted.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhfless.scripts.arguments import add_log_options, given_log_options
from rlhfless.scripts.compare import LOG_DEFAULTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    parser = argparse.ArgumentParser(
        prog="rlhfless calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log", help="verl console log, plain or .gz")
    parser.add_argument(
        "--profile",
        default=LOG_DEFAULTS["profile"],
        metavar="NAME",
        help="profile or YAML file that gives the actor's size and what a log cannot tell (default %(default)s)",
    )
    add_log_options(parser)
    parser.add_argument("--name", help="name of the fitted profile (default: the log's)")
    parser.add_argument("--out", metavar="FILE", help="write the fitted profile as YAML")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    from rlhfless.scripts.common import guarded

    guarded(lambda: calibrate(options))


def calibrate(options: argparse.Namespace) -> None:
    """Fit, print the errors, and write the profile."""
    import yaml

    from rlhfless.scripts.common import console, write_files
    from rlhfless.scripts.report import print_calibration
    from rlhfless.scripts.workload import calibrate_log, log_defaults, named_profile

    base = named_profile(options.profile)
    fitted = calibrate_log(options.log, log_defaults() | given_log_options(options), base, seeds=[0])
    profile = fitted.calibration.profile(base, name=options.name)
    out = console()
    print_calibration(out, fitted.calibration, fitted.log)
    if options.out:
        path = Path(options.out)
        text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=110)
        write_files(path.parent, {path.name: text})
        overhead = fitted.calibration.overhead_seconds
        out.print(
            f"profile: {path}; a profile has no place for the seconds that no token explains: replay it with "
            f"options.generation_overhead_seconds={overhead:.4g}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
