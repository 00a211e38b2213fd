"""How far the partition solvers are from the proven bound, over time. Run by ``make bench``; asserts nothing."""

from __future__ import annotations

import argparse

import numpy as np
from factories import profile
from rich.console import Console
from rich.table import Table

from rlhfless.models.profile import Profile
from rlhfless.scripts.workload import named_profile
from rlhfless.solver.assignment import solve_assignment
from rlhfless.solver.objective import Goal
from rlhfless.solver.partition import reference, solve
from rlhfless.solver.problem import ActorKind, Problem, Solution
from rlhfless.solver.relaxation import Relaxation

#: Seconds at which gaps are shown.
MOMENTS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZES = ((64, 4), (512, 8), (1024, 16), (5120, 80))
#: Log-normal response lengths: median and spread of the logarithm. Mean 295 at most 2,048, and GSM8K's.
LENGTHS = {"mean 295": (220.0, 0.8), "GSM8K": (198.9, 0.422)}


def affine() -> Profile:
    """Return iteration times of 20 ms and 0.1 ms a response, without limits."""
    return profile(
        name="affine 20 + 0.1 b ms",
        actor={"gpus": 1, "max_running": 8192, "kv_capacity_tokens": 10**9},
        decode={"batch": [1, 8192], "base_seconds": [0.0201, 0.8392], "kv_token_seconds": [0.0, 0.0]},
    )


def drawn(cost: Profile, n: int, actors: int, median: float, spread: float) -> Problem:
    """Return a problem with drawn lengths."""
    rng = np.random.default_rng(0)
    length = np.clip(np.exp(rng.normal(np.log(median), spread, n)), 1, 2048).astype(np.int64)
    return Problem(rng.integers(60, 200, n), length, (ActorKind(cost, actors),))


def gaps(found: Solution, offset: float) -> list[str]:
    """Return the gap at each moment."""
    shown = []
    for moment in MOMENTS:
        known = [(value, bound) for at, value, bound in found.progress if at <= moment]
        if not known:
            shown.append("")
        elif moment > found.solve_seconds * 1.5 and shown:
            shown.append(shown[-1])
        else:
            value, bound = known[-1]
            shown.append(f"{(value - bound) / (bound - offset):.3%}")
    return shown


def main() -> None:
    """Print the table. On measured iteration times, half of the time goes to the tighter bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit of a search (default 30)")
    parser.add_argument("--profile", nargs="+", default=["l40s_qwen2.5-3b_tp2", "h100_qwen2.5-7b_tp2"])
    options = parser.parse_args()
    table = Table(
        "solver", "iteration times", "lengths", "size", "goal", *(f"{m:g} s" for m in MOMENTS), "end s"
    )
    for cost in (affine(), *map(named_profile, options.profile)):
        for name, (median, spread) in LENGTHS.items():
            for n, actors in SIZES if cost.name.startswith("affine") else SIZES[2:]:
                problem = drawn(cost, n, actors, median, spread)
                # Compiled kernels are cached on disk, but the first call loads them.
                objective = Goal("ratio").resolve(*reference(problem))
                solve(problem, objective, seconds=0)
                found = solve(problem, objective, seconds=options.seconds, tighten=True)
                where = (cost.name, name, f"{n} x {actors}", "ratio 0.7")
                table.add_row(
                    "partition", *where, *gaps(found, objective.offset), f"{found.solve_seconds:.1f}"
                )
                if n <= 512:
                    hint = solve(problem, objective, seconds=0)
                    bound, _ = Relaxation(problem).minimum(objective, precision=1e-6)
                    exact = solve_assignment(
                        problem,
                        objective,
                        seconds=min(options.seconds, 5.0),
                        hint=hint.partition,
                        bound=bound,
                    )
                    table.add_row(
                        "CP-SAT",
                        *where,
                        *gaps(exact, objective.offset),
                        f"{exact.solve_seconds:.1f} {exact.status}",
                    )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
