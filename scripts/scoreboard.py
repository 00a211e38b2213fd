"""The numbers of a table over cells: means over seeds, paired differences with their significance, the best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from rlhfless.models.scores import Interval95, compare, interval
from rlhfless.scripts.results import GROUPS, Cell, Failure, Sweep, Value, order_of
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import FloatArray

#: Sign changes that a permutation test tries: with up to 13 pairs all there are, and the test is exact.
PERMUTATIONS = 9999


@dataclass(frozen=True)
class Score:
    """A column of a table: its heading, unit, and which way is better (None: neither).

    Shown is the mean times ``factor``. ``extensive``: it grows with the responses of a step, so that a policy
    that delivers fewer is compared per delivered response.
    """

    title: str
    unit: str
    better: Literal["lower", "higher"] | None = "lower"
    factor: float = 1.0
    extensive: bool = True


#: What a table can show. Keys are columns of ``steps.csv``, but for the last three.
SCORES = {
    "actors": Score("actors", "", None, extensive=False),
    "step_seconds": Score("step", "s"),
    "generation_seconds": Score("generation", "s"),
    "learning_seconds": Score("learning", "s"),
    "gpu_seconds": Score("cost", "GPU s a step"),
    "busy_gpu_seconds": Score("busy GPUs", "GPU s a step", None),
    "idle_gpu_seconds": Score("idle GPUs", "GPU s a step"),
    "startup_gpu_seconds": Score("start-up", "GPU s a step"),
    "prewarmed_waiting_gpu_seconds": Score("prewarmed waiting", "GPU s a step"),
    "keep_alive_gpu_seconds": Score("keep-alive", "GPU s a step"),
    "prefill_tokens": Score("prefill", "tokens a step"),
    "redundant_prefill_tokens": Score("redundant prefill", "tokens a step"),
    "migrations": Score("moved", "responses a step", None),
    "migrated_kv_bytes": Score("moved KV", "GB a step", None, factor=1e-9),
    "preemptions": Score("preemptions", "a step"),
    "cold_starts": Score("cold starts", "a step"),
    "responses": Score("delivered", "responses a step", None, extensive=False),
    "response_tokens": Score("delivered", "tokens a step", None, extensive=False),
    "busy_share": Score("busy", "%", "higher", factor=100.0, extensive=False),
    "usd": Score("price", "USD a step"),
    "planning_seconds": Score("planning, median", "ms", "lower", factor=1e3, extensive=False),
}

DEFAULT_SCORES = ("actors", "step_seconds", "generation_seconds", "gpu_seconds", "busy_share", "migrations")


@dataclass(frozen=True)
class Difference:
    """A row less its baseline on the same seeds; ``p`` from :func:`sign_flip_test`, ``p_holm`` corrected."""

    value: Interval95
    p: float
    p_holm: float


@dataclass(frozen=True)
class Against:
    """A row against the baseline, on the seeds that both have."""

    seeds: tuple[int, ...]
    speedup: Interval95
    cost_reduction: Interval95
    differences: dict[str, Difference]


@dataclass(frozen=True)
class Row:
    """One line of a table: the values of its factors, and every score over its seeds.

    ``best`` are the scores in which the row is the best, or cannot be told from it. ``delivers_all`` is false
    for a policy that trains on other responses than the trace has in a step.
    """

    values: dict[str, Value]
    cells: tuple[Cell, ...] = field(repr=False)
    scores: dict[str, Interval95]
    best: frozenset[str]
    delivers_all: bool
    against: Against | None

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the row, ascending."""
        return tuple(cell.seed for cell in self.cells)

    @property
    def label(self) -> str:
        """The row's values in one line."""
        return label(self.values)


@dataclass(frozen=True)
class Board:
    """One table: a workload on GPUs, its rows, and which is the baseline."""

    setting: dict[str, Value]
    rows: tuple[Row, ...]
    baseline: Row | None
    scores: tuple[str, ...]
    by: tuple[str, ...]
    failures: tuple[Failure, ...]

    @property
    def title(self) -> str:
        """What the table is about, in one line."""
        extra = [f"{key} = {value_text(v)}" for key, v in self.setting.items() if key not in GROUPS]
        names = {key: value_text(v) for key, v in self.setting.items() if key in GROUPS}
        head = " on ".join(names[key] for key in ("trace", "cluster") if key in names)
        shown = [head] if head else []
        shown += [f"{key} {names[key]}" for key in ("policy", "profile") if key in names]
        return ", ".join([*shown, *extra])


def value_text(value: Value) -> str:
    """Return a configured value as the command line takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def label(values: Mapping[str, Value]) -> str:
    """Return factors and values in one line: the policy by its name, others with their key."""
    return ", ".join(
        value_text(value) if key in GROUPS else f"{key}={value_text(value)}"
        for key, value in values.items()
        if value is not None
    )


def score_values(cells: Sequence[Cell], score: str) -> FloatArray:
    """Return a score's mean over the steps for every cell; nan where a cell does not have it."""

    def of(cell: Cell) -> float:
        mean = cell.scores.mean
        if score == "busy_share":
            return mean["busy_gpu_seconds"] / mean["gpu_seconds"]
        if score == "usd":
            return (
                np.nan
                if cell.usd_per_gpu_hour is None
                else mean["gpu_seconds"] * cell.usd_per_gpu_hour / 3600
            )
        if score == "planning_seconds":
            return np.nan if cell.planning_seconds is None else cell.planning_seconds
        return mean.get(score, np.nan)

    return np.array([of(cell) for cell in cells], dtype=np.float64)


def sign_flip_test(differences: FloatArray) -> float:
    """Return the two-sided p-value of paired differences whose mean would be 0 if the pairs were exchangeable.

    Every pair's difference keeps or changes its sign; p is the share of assignments with a mean at least as
    far from 0. All 2^n are tried up to n = 13 pairs, else a fixed sample of them. With n pairs it cannot
    be below 2^(1 - n).
    """
    if len(differences) < 2 or not differences.any():
        return 1.0
    result = stats.permutation_test(
        (differences,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979, step down): reject those at most the level."""
    order = np.argsort(p, kind="stable")
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(np.asarray(p)[order] * np.arange(len(p), 0, -1)), 1.0)
    return [float(value) for value in corrected]


def row_factors(sweep: Sweep, by: Sequence[str]) -> tuple[str, ...]:
    """Return the factors that tell rows apart: those named, and those below a named one.

    Raises
    ------
    InputError
        When a name is neither a group nor a key in which cells differ.

    """
    for name in by:
        if name not in GROUPS and name not in sweep.factors:
            known = dict.fromkeys((*GROUPS, *sweep.factors))
            raise InputError(f"--by {name}: cells do not differ in it; one of {', '.join(known)}")
    below = tuple(f"{name}." for name in by)
    return tuple(dict.fromkeys([*by, *(f for f in sweep.factors if f.startswith(below))]))


def boards(
    sweep: Sweep,
    *,
    by: Sequence[str] = ("policy",),
    baseline: str | None = None,
    rows: Sequence[str] | None = None,
    scores: Sequence[str] = DEFAULT_SCORES,
) -> tuple[Board, ...]:
    """Put cells together to tables: one for each combination of the factors that rows do not show.

    Parameters
    ----------
    sweep
        The cells.
    by
        Factors that make the rows, with the keys below them; everything else makes tables of its own.
    baseline, rows
        A row is named by one of its values, or by ``key=value`` pairs with commas. ``baseline``: which row the
        others are compared with. ``rows``: which ones to show, in this order.
    scores
        Keys of ``SCORES``.

    Raises
    ------
    InputError
        When a score, a factor or a row does not exist, or a baseline is not one row.

    """
    for score in scores:
        if score not in SCORES:
            raise InputError(f"--scores {score}: no such score; scores are {', '.join(SCORES)}")
    by = row_factors(sweep, by)
    fixed = [name for name in GROUPS if name not in by and name != "policy"]
    fixed += [name for name in sweep.factors if name not in by and name not in fixed]
    tables: dict[tuple[Value, ...], list[Cell]] = defaultdict(list)
    failed: dict[tuple[Value, ...], list[Failure]] = defaultdict(list)
    for cell in sweep.cells:
        tables[tuple(cell.settings.get(name) for name in fixed)].append(cell)
    for failure in sweep.failures:
        failed[tuple(failure.settings.get(name) for name in fixed)].append(failure)
    chosen = [_selector(text, by) for text in rows or ()]
    base = None if baseline is None else _selector(baseline, by)
    everything = {tuple(cell.settings.get(name) for name in by) for cell in sweep.cells}
    for text, selector in [*zip(rows or (), chosen, strict=True), *([(baseline, base)] if base else [])]:
        if not any(_matches(dict(zip(by, values, strict=True)), selector) for values in everything):
            known = [
                label(dict(zip(by, v, strict=True)))
                for v in sorted(everything, key=lambda v: [*map(order_of, v)])
            ]
            raise InputError(f"no row {text}; rows are {'; '.join(known)}")
    return tuple(
        _board(
            dict(zip(fixed, key, strict=True)),
            tables.get(key, []),
            failed.get(key, []),
            by,
            base,
            chosen,
            tuple(scores),
        )
        for key in sorted({*tables, *failed}, key=lambda key: [*map(order_of, key)])
    )


def _selector(text: str, by: Sequence[str]) -> dict[str, str]:
    """Return which values a row must have: ``verl``, or ``policy=rlhfless,policy.scale.weight=0.7``."""
    pairs = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        pairs[key if equals else by[0]] = value if equals else key
    unknown = [key for key in pairs if key not in by]
    if unknown:
        raise InputError(f"{text}: rows have no {unknown[0]}; they have {', '.join(by)}")
    return pairs


def _matches(values: Mapping[str, Value], selector: Mapping[str, str]) -> bool:
    return all(value_text(values[key]) == value for key, value in selector.items())


def _board(
    setting: dict[str, Value],
    cells: Sequence[Cell],
    failures: Sequence[Failure],
    by: tuple[str, ...],
    baseline: Mapping[str, str] | None,
    chosen: Sequence[Mapping[str, str]],
    scores: tuple[str, ...],
) -> Board:
    groups: dict[tuple[Value, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[tuple(cell.settings.get(name) for name in by)].append(cell)
    keyed = [(dict(zip(by, key, strict=True)), own) for key, own in groups.items()]
    for values, own in keyed:
        _refuse_twice(label(values), own)
    base = [own for values, own in keyed if baseline is not None and _matches(values, baseline)]
    if len(base) > 1:
        names = "; ".join(label(values) for values, _ in keyed if _matches(values, baseline or {}))
        raise InputError(f"the baseline must be one row, {len(base)} match: {names}")

    def order(item: tuple[dict[str, Value], list[Cell]]) -> tuple[object, ...]:
        values, own = item
        first = 0 if own in base else 2 if "oracle" in str(values.get("policy")) else 1
        return (first, *(order_of(values[name]) for name in by))

    keyed.sort(key=order)
    if chosen:
        keyed = [item for selector in chosen for item in keyed if _matches(item[0], selector)]
    shown = tuple(s for s in scores if np.isfinite(score_values(cells, s)).any())
    best = _best([own for _, own in keyed], shown)
    against = _against([own for _, own in keyed], base[0], shown) if base else [None] * len(keyed)
    rows = tuple(
        Row(
            values=values,
            cells=tuple(own),
            scores={
                s: interval(found[np.isfinite(found)])
                for s in shown
                if np.isfinite(found := score_values(own, s)).any()
            },
            best=frozenset(s for s in shown if number in best[s]),
            delivers_all=_delivers_all(own),
            against=compared,
        )
        for number, ((values, own), compared) in enumerate(zip(keyed, against, strict=True))
    )
    marked = next((row for row in rows if base and list(row.cells) == base[0]), None)
    return Board(setting, rows, marked, shown, by, tuple(failures))


def _refuse_twice(row: str, cells: Sequence[Cell]) -> None:
    """Refuse two cells of one row with the same seed: one of them does not say what it ran."""
    seen: dict[int, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.seed, cell)
        if other is not cell:
            raise InputError(
                f"{other.folder} and {cell.folder}: both have {row}, seed {cell.seed}; leave one out"
            )


def _delivers_all(cells: Sequence[Cell]) -> bool:
    return all(cell.scores.mean["launched"] == cell.scores.mean["responses"] for cell in cells)


def _eligible(cells: Sequence[Cell]) -> bool:
    """Tell whether a row may be the best: it plans without knowing the lengths, on the trace's own responses."""
    return _delivers_all(cells) and not any("oracle" in cell.policy for cell in cells)


def _best(groups: Sequence[Sequence[Cell]], scores: Sequence[str]) -> dict[str, set[int]]:
    """Return the rows that are best in each score, and those whose paired interval against the best holds 0."""
    best: dict[str, set[int]] = {score: set() for score in scores}
    rows = [number for number, cells in enumerate(groups) if _eligible(cells)]
    for score in scores:
        better = SCORES[score].better
        sign = {"lower": 1.0, "higher": -1.0}.get(better or "", 0.0)
        known = {n: v for n in rows if np.isfinite(v := sign * score_values(groups[n], score)).all()}
        if not sign or len(known) < 2:
            continue
        first = min(known, key=lambda n: known[n].mean())
        for number in known:
            _, own, other = _paired(groups[number], groups[first], score)
            if number == first or (len(own) and interval(sign * (own - other)).low <= 0.0):
                best[score].add(number)
        if len(best[score]) == len(known):
            best[score].clear()
    return best


def _paired(
    cells: Sequence[Cell], baseline: Sequence[Cell], score: str
) -> tuple[tuple[int, ...], FloatArray, FloatArray]:
    """Return the common seeds, and the score of both on them, scaled to the baseline's delivered responses."""
    ours, theirs = ({cell.seed: cell for cell in group} for group in (cells, baseline))
    seeds = tuple(seed for seed in ours if seed in theirs)
    own, other = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    values = score_values(own, score)
    if SCORES[score].extensive:
        values = values * score_values(other, "responses") / score_values(own, "responses")
    return seeds, values, score_values(other, score)


def _against(
    groups: Sequence[Sequence[Cell]], baseline: Sequence[Cell], scores: Sequence[str]
) -> list[Against | None]:
    """Compare every row with the baseline; p-values are corrected over the rows, score by score."""
    directed = [score for score in scores if SCORES[score].better and SCORES[score].extensive]
    values: list[dict[str, Interval95]] = []
    p: dict[str, dict[int, float]] = {score: {} for score in directed}
    for number, cells in enumerate(groups):
        values.append({})
        for score in directed:
            _, own, other = _paired(cells, baseline, score)
            difference = (own - other)[np.isfinite(own - other)]
            if cells is not baseline and len(difference):
                values[-1][score] = interval(difference)
                p[score][number] = sign_flip_test(difference)
    corrected = {
        s: dict(zip(by_row, holm(list(by_row.values())), strict=True)) for s, by_row in p.items() if by_row
    }
    result: list[Against | None] = []
    for number, cells in enumerate(groups):
        seeds, _, _ = _paired(cells, baseline, "step_seconds")
        if cells is baseline or not seeds:
            result.append(None)
            continue
        pairs = [[c.scores for c in group if c.seed in seeds] for group in (cells, baseline)]
        comparison = compare(*pairs)
        differences = {
            s: Difference(v, p[s][number], corrected[s][number]) for s, v in values[number].items()
        }
        result.append(Against(seeds, comparison.speedup, comparison.cost_reduction, differences))
    return result
