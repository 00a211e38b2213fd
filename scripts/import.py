"""Turn a log, a rollout dump or a length table into a trace file (.parquet, .csv, .jsonl, the last two also .gz).

rlhfless import verl-log run.log.gz run.parquet --responses-per-prompt 5 --stages stages.csv
rlhfless import verl-rollouts dump/ run.parquet --tokenizer tokenizer.json
rlhfless import lengths lengths.parquet run.parquet --workload deepcoder_14b_code_16k
rlhfless import trace run.csv run.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhfless.scripts.arguments import add_log_options, given_log_options

if TYPE_CHECKING:
    from rlhfless.traces.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    parser = argparse.ArgumentParser(
        prog="rlhfless import",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(name: str, text: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("source", help="what to read")
        sub.add_argument("target", help="trace file to write")
        return sub

    log = kind("verl-log", "verl console log; response lengths are rebuilt from the aggregates it states")
    add_log_options(log)
    log.add_argument(
        "--stages", metavar="FILE", help="also write the stage times (step, stage, seconds, gpus)"
    )
    log.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the rebuilt lengths (default 0)"
    )
    dump = kind("verl-rollouts", "verl rollout dump: a JSON Lines file, or a folder of {step}.jsonl")
    dump.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json that counts the tokens")
    dump.add_argument(
        "--characters-per-token", type=float, metavar="X", help="ratio to use without a tokenizer"
    )
    dump.add_argument("--max-response-tokens", type=int, metavar="N", help="cap on a response")
    dump.add_argument("--algorithm", default="grpo", help="ppo, grpo, ... (default %(default)s)")
    table = kind("lengths", "PolyTrace-style table of response lengths")
    table.add_argument("--workload", help="which workload of the file")
    table.add_argument("--run", type=int, metavar="N", help="which run of the workload")
    table.add_argument("--max-response-tokens", type=int, metavar="N", help="cap on a response")
    kind("trace", "a trace file, to check it or to change its format")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    from rlhfless.scripts.common import guarded

    guarded(lambda: convert(options))


def convert(options: argparse.Namespace) -> None:
    """Read, check, write, and say what was written."""
    from rlhfless.traces.files import write_stage_times, write_trace

    trace = read(options)
    if options.kind == "verl-log" and options.stages:
        from rlhfless.scripts.workload import stage_times

        write_stage_times(stage_times(options.source, options.gpus), options.stages)
    write_trace(trace, options.target)
    mark = ", lengths reconstructed" if trace.reconstructed else ""
    print(
        f"{options.target}: {len(trace)} responses to {len(trace.prompt_ids)} prompts in {len(trace.steps)} steps, "
        f"mean {trace.response_tokens.mean():.1f} tokens{mark}"
    )


def read(options: argparse.Namespace) -> Trace:
    """Read the source with the importer of its kind."""
    if options.kind == "verl-log":
        from rlhfless.scripts.workload import log_defaults, rebuilt_traces

        settings = log_defaults() | given_log_options(options)
        return next(rebuilt_traces(options.source, settings, seeds=[options.seed]))
    if options.kind == "verl-rollouts":
        from rlhfless.traces.verl_rollouts import CHARACTERS_PER_TOKEN, read_verl_rollouts

        return read_verl_rollouts(
            options.source,
            tokenizer=options.tokenizer,
            characters_per_token=options.characters_per_token or CHARACTERS_PER_TOKEN,
            max_response_tokens=options.max_response_tokens,
            algorithm=options.algorithm,
        )
    if options.kind == "lengths":
        from rlhfless.traces.polytrace import read_polytrace

        return read_polytrace(options.source, options.workload, options.run, options.max_response_tokens)
    from rlhfless.traces.files import read_trace

    return read_trace(options.source)


if __name__ == "__main__":
    main()
