"""Learn a policy over the steps of a run: actor count, cut threshold, and how many actors stay warm.

    rlhfless train trace=gsm8k_grpo goal.kind=ratio out=out/train
    rlhfless train trace=dapo_math goal.weight=0.5 learner.generations=500 out=out/dapo
    rlhfless train learner=sb3_ppo out=out/ppo     # pip install 'rlhfless[rl]'
    rlhfless compare policy=[rlhfless,learned] policies.learned.path=out/train/policy.json

Trains on runs with seeds 1000 on, chooses by runs with seeds 2000 on, and judges by runs with seeds 0 on, which
are those of compare. Writes policy.json, curve.csv, curve.png, curve.pdf, evaluation.md, evaluation.json and
checkpoint.json, from which the same command goes on where it was stopped.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless.scripts.arguments import hydra_parser, parse

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfless.scripts.workload import Workload
    from rlhfless.solver.evaluation import Standing
    from rlhfless.solver.horizon import DecisionSpace, HorizonTables, Rule
    from rlhfless.solver.learned import NetworkRule, ScoreRule
    from rlhfless.solver.learner import Learning
    from rlhfless.solver.objective import Objective
    from rlhfless.solver.ppo import Ppo

#: First seed of each part; compare and replay use the first ones.
_FIRST_SEED = {"training": 1000, "validation": 2000, "heldout": 0}

#: Columns of the curve.
_COLUMNS = {
    "evolution": ("generation", "population_least", "population_mean", "training", "validation"),
    "sb3_ppo": ("environment_steps", "training", "validation"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the verb."""
    given = sys.argv[1:] if arguments is None else arguments
    _, overrides = parse(hydra_parser("train", __doc__), given)
    from rlhfless.scripts.common import hydra_verb
    from rlhfless.scripts.compare import cluster_profile

    hydra_verb("train", train, [*cluster_profile(overrides), *overrides])


@dataclass(frozen=True)
class _Task:
    """What is trained: tables of the parts' runs, the space, the objective, and how to learn."""

    workload: Workload
    runs: dict[str, list[HorizonTables]]
    space: DecisionSpace
    objective: Objective
    how: Learning | Ppo


def train(config: DictConfig) -> None:
    """Run the training that a configuration describes, and write its files."""
    from rlhfless.scripts.common import console, write_files
    from rlhfless.solver.episodes import relative_objective
    from rlhfless.solver.evaluation import standings
    from rlhfless.solver.learned import FORECAST_WEIGHTS, ScoreRule, policy_document
    from rlhfless.solver.rolling import RollingRule
    from rlhfless.traces.errors import InputError

    if config.out is None:
        raise InputError("out: a training needs a folder to write to")
    out = Path(str(config.out))
    task = _prepare(config)
    rule, curve, kind = _learn(task, out, resume=bool(config.resume))
    others: dict[str, Rule] = {
        "forecast, nothing learned": ScoreRule(
            FORECAST_WEIGHTS, relative_objective(task.runs["training"], task.objective)
        )
    }
    if config.goal.kind == "ratio":
        others["rolling horizon, 3 steps"] = RollingRule(3, float(config.goal.weight))
    rows = standings(task.runs["heldout"], rule, others, task.objective)
    replayed = _replayed(task, rule, len(task.runs["heldout"]))
    trained = {
        "trace": task.workload.name,
        "profile": task.workload.setting.profile.name,
        "cluster": task.workload.setting.cluster.name,
        "goal": dict(config.goal),
        "learner": kind,
        **asdict(task.how),
        **{f"{part}_runs": len(runs) for part, runs in task.runs.items()},
    }
    evaluation = {
        "objective": asdict(task.objective),
        "runs": len(task.runs["heldout"]),
        "standings": [asdict(row) for row in rows],
        "replayed_value": replayed,
    }
    write_files(
        out,
        {
            "policy.json": _json(policy_document(rule, task.space, trained)),
            "curve.csv": _csv(_COLUMNS[kind], curve),
            **_figures(kind, curve),
            "evaluation.json": _json(evaluation),
            "evaluation.md": _markdown(task, rows, replayed),
        },
    )
    console().print(_markdown(task, rows, replayed), markup=False)
    console().print(f"policy: {out / 'policy.json'}")


def _prepare(config: DictConfig) -> _Task:
    """Build the runs' tables and the objective."""
    from rlhfless.scripts.common import advance, progress
    from rlhfless.scripts.workload import build_workloads, plain
    from rlhfless.solver.episodes import refuse_limit, run_objective
    from rlhfless.solver.horizon import DecisionSpace, horizon_tables
    from rlhfless.solver.learner import Learning
    from rlhfless.solver.objective import Goal
    from rlhfless.solver.ppo import Ppo
    from rlhfless.traces.errors import InputError

    how = plain(config.learner, "learner")
    kinds: dict[str, type[Learning] | type[Ppo]] = {"evolution": Learning, "sb3_ppo": Ppo}
    kind = str(how.pop("kind", None))
    if kind not in kinds:
        raise InputError(f"learner.kind is {kind}, must be {' or '.join(kinds)}")
    learner, goal = _built(kinds[kind], how, "learner"), _built(Goal, plain(config.goal, "goal"), "goal")
    refuse_limit(goal)
    space = DecisionSpace(thresholds=tuple(config.thresholds), most=config.most, guesses=int(config.guesses))
    seeds = {part: int(config[f"{part}_seeds"]) for part in _FIRST_SEED}
    for part, count in seeds.items():
        if count < 1:
            raise InputError(f"{part}_seeds is {count}, must be at least 1")
    numbers = [first + n for part, first in _FIRST_SEED.items() for n in range(seeds[part])]
    workloads = build_workloads(config, numbers)
    if len(workloads) > 1:
        raise InputError("train takes one log; compare takes several")
    workload = workloads[0]
    tables = []
    with progress(len(numbers), f"replaying all decisions of {workload.name}") as bar:
        for trace, seed in zip(workload.traces, numbers, strict=True):
            tables.append(horizon_tables(trace, workload.setting, space, seed=seed))
            advance(bar)
    runs, first = {}, 0
    for part, count in seeds.items():
        runs[part] = tables[first : first + count]
        first += count
    return _Task(workload, runs, space, run_objective(runs["training"], goal), learner)


def _built(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """Return a dataclass built from plain values; an unknown key or a wrong value is refused."""
    from pydantic import TypeAdapter, ValidationError

    from rlhfless.traces.errors import InputError, first_problem

    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise InputError(f"{where}: no key {key}; keys are {', '.join(known)}")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise InputError(f"{where}: {first_problem(error)}") from None


def _learn(
    task: _Task, out: Path, *, resume: bool
) -> tuple[ScoreRule | NetworkRule, list[Sequence[float]], str]:
    """Learn; return the rule, its curve, and the learner's name."""
    from rlhfless.scripts.common import advance, progress, write_files
    from rlhfless.solver.episodes import Episodes
    from rlhfless.solver.learner import Learning, Progress, learn, learned_rule
    from rlhfless.solver.ppo import learn_ppo

    training, validation = task.runs["training"], task.runs["validation"]
    if not isinstance(task.how, Learning):
        network, steps = learn_ppo(training, validation, task.objective, task.how)
        return network, list(steps), "sb3_ppo"
    own = Episodes.of(training, task.objective)
    other = Episodes.of(validation, task.objective, own.relative)
    key = json.dumps([own.digest(), other.digest(), {**asdict(task.how), "generations": None}])
    file = out / "checkpoint.json"
    state = None
    if resume and file.is_file():
        state = Progress.load(file.read_text(encoding="utf-8"), key, str(file))
    total = -(-task.how.generations // task.how.checkpoint_every)
    with progress(total, "learning") as bar:

        def save(reached: Progress) -> None:
            write_files(out, {file.name: reached.dump(key)})
            advance(bar)

        reached = learn(own, other, task.how, resume=state, save=save)
    return learned_rule(reached, own), list(reached.curve), "evolution"


def _replayed(task: _Task, rule: Rule, runs: int) -> dict[str, float]:
    """Return the objective of a mean step by whole replays of the held-out runs, not by the tables."""
    import numpy as np

    from rlhfless.policies import simulate
    from rlhfless.solver.horizon import FixedRule, HorizonPolicy

    policies = {
        "judged": HorizonPolicy("learned", rule, task.space),
        "min-max": HorizonPolicy(
            "minmax", FixedRule(None, len(task.space.thresholds) // 2, None), task.space
        ),
    }
    traces = task.workload.traces[-runs:]
    values = {}
    for name, policy in policies.items():
        means = [
            np.mean(
                [
                    (step.outcome.step_seconds, step.outcome.gpu_seconds)
                    for step in simulate(trace, policy, task.workload.setting, seed=seed)
                ],
                axis=0,
            )
            for seed, trace in enumerate(traces, start=_FIRST_SEED["heldout"])
        ]
        values[name] = float(np.mean([task.objective.value(*mean) for mean in means]))
    return values


def _json(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"


def _csv(columns: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _figures(kind: str, curve: Sequence[Sequence[float]]) -> dict[str, bytes]:
    """Draw the training curve, where matplotlib is installed."""
    try:
        from rlhfless.scripts.figures_style import legend, looks, rendered, sheet, styled
    except ImportError:
        return {}
    columns = _COLUMNS[kind]
    draw: Callable[[int], list[float]] = lambda column: [row[column] for row in curve]  # noqa: E731
    with styled():
        figure, (axes,) = sheet(1, width=4.5)
        names = columns[-2:]
        for name, look in looks(names).items():
            axes.plot(draw(0), draw(columns.index(name)), color=look.color, linestyle=look.line, label=name)
        axes.set_xlabel(columns[0].replace("_", " "))
        axes.set_ylabel("objective a step")
        legend(figure, axes)
    return {f"curve.{form}": rendered(figure, form) for form in ("png", "pdf")}


def _markdown(task: _Task, rows: Sequence[Standing], replayed: dict[str, float]) -> str:
    """Return the evaluation as a table."""
    runs = len(task.runs["heldout"])
    lines = [
        f"{task.workload.name}, {task.workload.setting.profile.name}, {task.workload.setting.cluster.name}: "
        f"{runs} held-out runs, means of a step; differences with 95 % intervals over paired runs.",
        "",
        "| rule | step s | GPU s | objective | judged is less by | of the distance closed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        less = row.judged_less
        rest = (
            "| |"
            if row.name in ("judged", "offline optimum")
            else f"{less.mean:.4f} [{less.low:.4f}, {less.high:.4f}] | {100 * row.closed:.0f} % |"
        )
        lines.append(f"| {row.name} | {row.seconds:.2f} | {row.gpu_seconds:.1f} | {row.value:.4f} | {rest}")
    lines += ["", *(f"By whole replays, {name}: {value:.4f}." for name, value in replayed.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
