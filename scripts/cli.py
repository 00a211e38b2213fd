"""The command ``rlhfless``: one verb a file of this folder."""

from __future__ import annotations

import importlib
import sys

VERBS = {
    "compare": "replay a workload under several policies and print what each costs and how long it takes",
    "replay": "replay a workload under one policy and write its steps, plans and timeline",
    "plan": "plan one batch and print the plan; nothing is replayed",
    "reproduce": "print the numbers of the RLHFless paper, ours beside them, and plot its figures",
    "table": "merge replays, sweeps and comparisons into tables with intervals and significance",
    "figures": "draw figures from the results of a sweep",
    "train": "train a policy that learns to plan",
    "import": "turn a log, a rollout dump or a length table into a trace file",
    "calibrate": "fit a cost profile to a training log and state its error",
}

USAGE = """usage: rlhfless VERB [arguments]

{verbs}

rlhfless VERB --help says more.
"""


def main() -> None:
    """Hand the arguments to the verb that they name."""
    arguments = sys.argv[1:]
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        sys.stdout.write(
            USAGE.format(verbs="\n".join(f"  {v:<{width}}  {text}" for v, text in VERBS.items()))
        )
        return
    if verb not in VERBS:
        sys.stderr.write(f"rlhfless: no verb {verb!r}; verbs are {', '.join(VERBS)}\n")
        raise SystemExit(2)
    importlib.import_module(f"rlhfless.scripts.{verb}").main(arguments[1:])


if __name__ == "__main__":
    main()
