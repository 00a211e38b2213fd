"""Which response decodes on which actor, and which actors there are, as an integer program for CP-SAT.

Two models of one :class:`~rlhfless.solver.problem.Problem`:

* **Columns**, for few responses. Every group that an actor could get is one column, its time taken from the
  replay's kernel, so that queues, KV capacity, prefill and tables of any shape are exact. The program chooses
  columns that cover each response once.
* **Assignment**, for many. A slot is an actor that may be used; integers say how many responses of each type it
  gets. A slot's time is bounded from below by planes under the iteration time (:func:`_planes`), so the program's
  bound is a bound of the true problem. For an affine iteration time without queues there is one plane and it is
  exact. Otherwise every solution is evaluated by the kernel as it is found, and the best by its true
  value is returned; a gap between the two models stays visible as the gap of the solution.

Responses that differ in nothing that a model sees are one type with a count. Equal actors are ordered by their
longest response. Coefficients are rounded down to integers, about 1e-6 of the horizon each.

Beyond a thousand or so variables the whole program finds little in seconds. Parts of it come first (large
neighbourhood search, Shaw 1998): a few groups, of each some responses free and the rest in tied runs. Beyond
20,000 variables only parts are solved, and the bound is the one that was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from math import ceil, floor, inf, isfinite, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from rlhfless.models.profile import Profile
from rlhfless.solver.objective import Objective
from rlhfless.solver.partition import even_splits
from rlhfless.solver.problem import Partition, Problem, Solution
from rlhfless.solver.relaxation import planes, readable_tokens
from rlhfless.traces.trace import FloatArray, IntArray

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

#: Up to so many groups, the program has a column for each.
MOST_COLUMNS = 4096

#: Variables from which on parts of the program are solved before the whole, and beyond which the whole is not.
_SMALL, _LARGE = 1500, 20_000

#: Groups and free responses of a part, its deterministic seconds, what a round counts beside them, and after how
#: many rounds without success it is over.
_GROUPS, _FREE, _ROUND_LIMIT, _ROUND, _FAILURES = 4, 48, 0.2, 0.01, 40

#: Integer steps of the horizon, and of the largest weight in the objective.
_STEPS, _WEIGHT = 2**26, 2**20

#: Upper end of ticks: far beyond any horizon, and times a weight still an integer of 64 bits.
_TOP = 2**40


@dataclass(frozen=True)
class GpuLimit:
    """Actors of these kinds together hold at most ``gpus`` GPUs, as those of one node do; ``name`` is for messages."""

    kinds: tuple[int, ...]
    gpus: int
    name: str


def solve_assignment(
    problem: Problem,
    objective: Objective,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    workers: int = 2,
    hint: Partition | None = None,
    bound: float | None = None,
    limits: Sequence[GpuLimit] = (),
    resolution: float = 1e-6,
    work: float | None = None,
    columns: int = MOST_COLUMNS,
) -> Solution:
    """Return the best partition found, and a proven bound of all.

    Parameters
    ----------
    problem, objective
        What to solve.
    seconds
        Wall time from the call on; 0 returns the best of the hint and the simple plans, without a search.
    seed, workers
        CP-SAT's seed and threads.
    hint
        A partition to start from, beside even splits and splits under a threshold. The result is never worse.
    bound
        A proven lower bound of the objective, added as a constraint.
    limits
        GPUs that several kinds share.
    resolution
        Relative gap up to which a solution counts as optimal.
    work
        CP-SAT's deterministic seconds, a limit beside ``seconds`` (they resemble seconds of a fast core). Where they
        end the search, the same call gives the same result on any machine.
    columns
        Up to so many possible groups the column model is taken.

    """
    if seconds > 0:
        # Loading the solver takes a second or more the first time; the limit is on solving.
        import_module("ortools.sat.python.cp_model")
    call = _Call(problem, objective, tuple(limits), -inf if bound is None else bound, resolution)
    call.offer_simple(hint)
    if call.settled() or seconds <= 0:
        return call.solution()
    search = _Search(call, seconds, seed, workers, work)
    types = _types_of_columns(problem)
    few = prod(len(rows) + 1 for rows in types) <= columns
    alike = _identical([problem.response_tokens, problem.prompt_tokens], problem.order)
    units = [_Unit(rows, len(rows)) for rows in alike]
    slots = [k for k, kind in enumerate(problem.kinds) for _ in range(min(kind.count, len(problem)))]
    size = len(units) * len(slots)
    if not few and size > _SMALL and call.partition is not None:
        _improve(call, search, share=1.0 if size > _LARGE else 0.5)
    if call.settled() or search.over() or (not few and size > _LARGE):
        return call.solution()

    def model(*, explain: bool) -> _Model:
        return _Columns(call, types, explain=explain) if few else _Slots(call, units, slots, explain=explain)

    status = search.run(model(explain=False), proves=True)
    if status == "INFEASIBLE" and call.partition is None:
        return call.solution(model(explain=True).clash(), infeasible=True)
    return call.solution()


class _Call:
    """The best partition so far, the bound so far, and how both came about."""

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        limits: tuple[GpuLimit, ...],
        bound: float,
        resolution: float,
    ) -> None:
        self.problem = problem
        self.objective = objective
        self.limits = limits
        self.bound = bound
        self.resolution = resolution
        self.value = inf
        self.partition: Partition | None = None
        self.progress: list[tuple[float, float, float]] = []
        self._began = time.perf_counter()
        self.planes = [_planes(problem, kind.profile) for kind in problem.kinds]

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def offer(self, partition: Partition) -> float:
        """Take the partition if it is the best; return its value."""
        if not self._allowed(partition):
            return inf
        value = float(self.objective.value(*self.problem.evaluate(partition)))
        if value < self.value:
            self.value, self.partition = value, partition
            self._note()
        return value

    def prove(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            self._note()

    def _note(self) -> None:
        self.progress.append((self.elapsed(), self.value, self.bound))

    def settled(self) -> bool:
        return self.partition is not None and self._gap() <= self.resolution

    def _gap(self) -> float:
        return max(self.objective.gap(self.value, self.bound), 0.0)

    def _allowed(self, partition: Partition) -> bool:
        used = np.bincount(partition.kinds, minlength=len(self.problem.kinds))
        kinds = self.problem.kinds
        return all(used[k] <= kind.count for k, kind in enumerate(kinds)) and all(
            sum(used[k] * kinds[k].profile.actor.gpus for k in limit.kinds) <= limit.gpus
            for limit in self.limits
        )

    def offer_simple(self, hint: Partition | None) -> None:
        """Offer the hint, even splits (over a dozen counts), filled ones, and all on the roomiest actor."""
        problem = self.problem
        if hint is not None:
            self.offer(hint)
        counts = np.unique(np.rint(np.geomspace(1, problem.actors, min(problem.actors, 12))).astype(np.int64))
        for partition in even_splits(problem, counts.tolist()):
            self.offer(partition)
        for kind in range(len(problem.kinds)):
            for partition in filled(problem, self.objective, kind):
                self.offer(partition)
        rooms = [kind.profile.actor.kv_capacity_tokens if kind.count else 0 for kind in problem.kinds]
        self.offer(Partition((problem.order,), (int(np.argmax(rooms)),)))

    def solution(self, reason: str = "", *, infeasible: bool = False) -> Solution:
        if self.partition is not None:
            return Solution.of(
                self.problem,
                self.objective,
                self.partition,
                self.bound,
                self.elapsed(),
                self.progress,
                self.resolution,
            )
        return Solution(
            status="infeasible" if infeasible else "unknown",
            partition=None,
            seconds=inf,
            gpu_seconds=inf,
            value=inf,
            bound=inf if infeasible else self.bound,
            gap=inf,
            solve_seconds=self.elapsed(),
            progress=tuple(self.progress),
            reason=reason,
        )


def filled(problem: Problem, objective: Objective, kind: int) -> list[Partition]:
    """Return up to six partitions over actors of one kind: filled under a threshold, then balanced.

    By falling length each response goes to the first actor whose end stays under the threshold, all by the first
    of :func:`_planes`; an actor's leader is then as short as the threshold allows. 96 thresholds are tried, the
    best six are balanced by moves and swaps that change no leader.
    """
    order, used = problem.order, problem.kinds[kind]
    most = min(used.count, len(problem))
    if most < 1 or not problem.fits(kind, order):
        return []
    plane = _planes(problem, used.profile)[0]
    fixed = plane[0] * problem.response_tokens[order]
    work = _own_work(problem, plane, order) + _prefill_work(problem, used.profile, order)
    least, high = 0.0, float(fixed.max() + work.sum())
    enough = high
    while enough - least > 1e-5 * enough:
        threshold = (least + enough) / 2
        fits, _ = _first_fit(fixed, work, most, threshold)
        least, enough = (least, threshold) if fits else (threshold, enough)
    found = []
    for threshold in np.geomspace(enough, high, 96).tolist():
        fits, owner = _first_fit(fixed, work, most, threshold)
        if fits:
            ends = _ends(fixed, work, owner)
            cost = used.profile.actor.gpus * float(ends.sum())
            found.append((objective.time_weight * float(ends.max()) + objective.cost_weight * cost, owner))
    found.sort(key=lambda candidate: candidate[0])
    partitions = []
    for _, owner in found[:6]:
        _balance(fixed, work, owner, 2 * 10**7 // len(work) ** 2 + 4)
        groups = tuple(order[owner == actor] for actor in range(int(owner.max()) + 1))
        partitions.append(Partition(groups, (kind,) * len(groups)))
    return partitions


@njit(cache=True)
def _ends(fixed, work, owner):  # type: ignore[no-untyped-def]  # pragma: no cover
    ends = np.zeros(owner.max() + 1)
    seen = np.zeros(len(ends), dtype=np.bool_)
    for row in range(len(work)):
        if not seen[owner[row]]:
            seen[owner[row]] = True
            ends[owner[row]] = fixed[row]
        ends[owner[row]] += work[row]
    return ends


@njit(cache=True)
def _first_fit(fixed, work, actors, threshold):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Return whether all rows, longest first, fit ``actors`` actors under the threshold, and their owners."""
    owner = np.zeros(len(work), dtype=np.int64)
    loads = np.zeros(actors)
    used = 0
    for row in range(len(work)):
        actor = 0
        while actor < used and loads[actor] + work[row] > threshold:
            actor += 1
        if actor == used:
            if actor == actors or fixed[row] + work[row] > threshold:
                return False, owner
            used += 1
            loads[actor] = fixed[row]
        loads[actor] += work[row]
        owner[row] = actor
    return True, owner


@njit(cache=True)
def _balance(fixed, work, owner, rounds):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Move or swap rows off the last actor to end, in place, as long as that makes it end earlier.

    No actor's first row moves and none gets a longer one, so that the sum of the fixed parts stays.
    """
    first = np.full(owner.max() + 1, -1, dtype=np.int64)
    for row in range(len(work)):
        if first[owner[row]] < 0:
            first[owner[row]] = row
    ends = _ends(fixed, work, owner)
    for _ in range(rounds):
        last = np.argmax(ends)
        best, give, take = ends[last] * (1 - 1e-9), -1, -1
        for i in range(len(work)):
            if owner[i] != last or first[last] == i:
                continue
            for j in range(-len(ends), len(work)):
                to = j + len(ends) if j < 0 else owner[j]
                if to == last or first[to] > i or (j >= 0 and (first[to] == j or j < first[last])):
                    continue
                moved = work[i] - (0.0 if j < 0 else work[j])
                end = max(ends[last] - moved, ends[to] + moved)
                if end < best:
                    best, give, take = end, i, j
        if give < 0:
            return
        to = take + len(ends) if take < 0 else owner[take]
        moved = work[give] - (0.0 if take < 0 else work[take])
        owner[give] = to
        if take >= 0:
            owner[take] = last
        ends[last] -= moved
        ends[to] += moved


def _planes(problem: Problem, profile: Profile) -> FloatArray:
    """Return planes under the profile's iteration time for groups of the problem, shape (planes, 3).

    Each bounds the decode seconds of any group by ``a * iterations + beta * tokens + gamma * resident``
    (:mod:`~rlhfless.solver.relaxation`, "Planes"): queues and preemptions change the iterations only. None has an
    ``a`` below 0, so that a lower bound of the iterations will do. For affine times one plane is the time itself.
    """
    base, kv = profile.decode_tables
    most = min(profile.actor.max_running, len(problem))
    prompt, length = problem.prompt_tokens, problem.response_tokens
    high = int((prompt + length).max())
    room = readable_tokens(profile.actor.kv_capacity_tokens, problem.engine)
    resident = float((prompt * length + length * (length - 1) / 2).sum())
    found = planes(
        base[: most + 1], kv[: most + 1], room, int(prompt.min()), high, float(length.sum()), resident
    )
    kept: FloatArray = found[found[:, 0] >= 0]
    return kept


def _own_work(problem: Problem, plane: FloatArray, rows: IntArray) -> FloatArray:
    """Return the seconds that each response adds to an actor under a plane, besides the iterations' own."""
    length = problem.response_tokens[rows].astype(np.float64)
    resident = problem.prompt_tokens[rows] * length + length * (length - 1) / 2
    own: FloatArray = plane[1] * length + plane[2] * resident
    return own


def _prefill_work(problem: Problem, profile: Profile, rows: IntArray) -> FloatArray:
    """Return prefill seconds to charge to each response so that no group is charged more than it needs.

    An actor prefills what a prompt's KV lacks at least once for all responses to the prompt, so each of the
    step's ``m`` responses to it carries an ``m``-th; without prefix caching, each carries all.
    """
    prompt = problem.prompt_tokens.astype(np.float64)
    cached = np.minimum(problem.cached_tokens, problem.prompt_tokens).astype(np.float64)
    cost, scale = profile.prefill, profile.prefill.gpus / profile.actor.gpus
    seconds = scale * (cost.token_seconds * (prompt - cached) + cost.token2_seconds * (prompt**2 - cached**2))
    if problem.engine.prefix_caching:
        least = np.full(int(problem.group.max()) + 1, inf)
        np.minimum.at(least, problem.group, seconds)
        seconds = least[problem.group] / np.bincount(problem.group)[problem.group]
    share: FloatArray = seconds[rows]
    return share


def _identical(columns: Sequence[IntArray], order: IntArray) -> list[IntArray]:
    """Return the rows of each distinct combination of the columns' values, types in the given order of rows."""
    _, kind = np.unique(np.stack(columns), axis=1, return_inverse=True)
    kind = kind.reshape(-1)[order]
    _, first = np.unique(kind, return_index=True)
    by_kind = np.argsort(kind, kind="stable")
    ends = np.cumsum(np.bincount(kind))
    found = np.split(order[by_kind], ends[:-1])
    return [found[i] for i in np.argsort(first, kind="stable").tolist()]


def _types_of_columns(problem: Problem) -> list[IntArray]:
    """Return rows that the kernel cannot tell apart, longest responses first."""
    columns = [problem.response_tokens, problem.prompt_tokens, problem.cached_tokens]
    engine = problem.engine
    if engine.share_prompt_kv or (
        engine.prefix_caching and bool((problem.cached_tokens < problem.prompt_tokens).any())
    ):
        columns.append(problem.group)
    return _identical(columns, problem.order)


@dataclass(frozen=True)
class _Unit:
    """Rows of which the program assigns ``count`` equal parts."""

    rows: IntArray
    count: int

    def part(self, first: int, parts: int) -> IntArray:
        size = len(self.rows) // self.count
        return self.rows[first * size : (first + parts) * size]


class _Search:
    """The time that is left, and how CP-SAT is run on it."""

    def __init__(self, call: _Call, seconds: float, seed: int, workers: int, work: float | None) -> None:
        self.call = call
        self.seconds = seconds
        self.seed = seed
        self.workers = workers
        self.work = inf if work is None else work
        self.spent = 0.0

    def over(self, share: float = 1.0) -> bool:
        """Tell whether so large a share of the time or of the work is used up."""
        return self.call.elapsed() >= share * self.seconds or self.spent >= share * self.work

    def run(self, model: _Model, *, proves: bool, most: float = inf) -> str:
        """Run a model for the rest of the time, or ``most`` units of work; return CP-SAT's status.

        ``proves``: the model's bound holds for the whole problem.
        """
        from ortools.sat.python import cp_model

        call = self.call
        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.random_seed = self.seed
        parameters.num_workers = self.workers if proves else 1
        parameters.relative_gap_limit = call.resolution / 2
        # Probing a model of this shape takes seconds and finds nothing.
        parameters.cp_model_probing_level = 0
        parameters.max_presolve_iterations = 1
        parameters.max_time_in_seconds = max(self.seconds - self.call.elapsed(), 1e-3)
        if min(self.work, most) < inf:
            parameters.interleave_search = parameters.num_workers > 1
            parameters.max_deterministic_time = max(min(self.work - self.spent, most), 1e-3)

        class Watch(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                call.offer(model.partition(self.value))
                if call.settled():
                    self.stop_search()

        if proves:
            solver.best_bound_callback = lambda bound: call.prove(model.scale.value(bound))
        status = solver.status_name(solver.solve(model.model, Watch()))
        # Building and reading a model counts as well, or rounds that are solved at once would never end.
        self.spent += solver.response_proto.deterministic_time + _ROUND
        if proves and status in ("OPTIMAL", "FEASIBLE"):
            call.prove(model.scale.value(solver.best_objective_bound))
        return status


def _improve(call: _Call, search: _Search, share: float) -> None:
    """Solve the program for a few groups at a time, with a few of their responses free and the others tied.

    The last actor to end is among the groups when time counts. What is tied may move as a whole.
    """
    problem, rng = call.problem, np.random.default_rng(search.seed)
    failures = 0
    while not call.settled() and failures < _FAILURES and not search.over(share):
        current = call.partition
        assert current is not None
        ends = problem.decode_seconds(current.groups, current.kinds)
        ends += np.array([problem.kinds[k].start_seconds for k in current.kinds])
        chosen = rng.permutation(len(current.groups))
        if call.objective.time_weight > 0:
            last = int(np.argmax(ends))
            chosen = np.concatenate(([last], chosen[chosen != last]))
        chosen = chosen[:_GROUPS]
        before = call.value
        model = _Slots(call, *_neighbourhood(problem, current, chosen, rng))
        search.run(model, proves=False, most=_ROUND_LIMIT)
        failures = 0 if call.value < before else failures + 1


def _neighbourhood(
    problem: Problem, partition: Partition, chosen: IntArray, rng: np.random.Generator
) -> tuple[list[_Unit], list[int], Partition]:
    """Return units and slots of the chosen groups, and the other groups as they are."""
    units: list[_Unit] = []
    share = _FREE // len(chosen)
    for number in chosen.tolist():
        rows = partition.groups[number]
        rows = rows[np.argsort(problem.rank[rows], kind="stable")]
        # Single responses, at random or the longest, and the rest in runs of neighbours by length.
        single = min(share // 2, len(rows))
        free = rng.permutation(len(rows))[:single] if rng.random() < 0.7 else np.arange(single)
        tied = np.delete(rows, free)
        cuts = np.sort(rng.permutation(max(len(tied) - 1, 0))[: share - single - 1]) + 1
        units += [_Unit(rows[[r]], 1) for r in free.tolist()]
        units += [_Unit(run, 1) for run in np.split(tied, cuts) if len(run)]
    units.sort(key=lambda unit: int(problem.rank[unit.rows[0]]))
    used = np.bincount(partition.kinds, minlength=len(problem.kinds))
    slots = [partition.kinds[number] for number in chosen.tolist()]
    # One more actor of each kind that has one left.
    slots += [k for k, kind in enumerate(problem.kinds) if used[k] < kind.count]
    others = [number for number in range(len(partition.groups)) if number not in set(chosen.tolist())]
    rest = Partition(
        tuple(partition.groups[number] for number in others),
        tuple(partition.kinds[number] for number in others),
    )
    return units, sorted(slots), rest


class _Scale:
    """Seconds and the objective in integers, rounded down."""

    def __init__(self, call: _Call, horizon: float, alpha: float) -> None:
        objective = call.objective
        self.unit = horizon / _STEPS
        if alpha > self.unit:
            # One iteration's fixed part is a whole number of units, so that it is not rounded at all.
            self.unit = alpha / ceil(alpha / self.unit)
        weights = [w for w in (objective.time_weight, objective.cost_weight) if w > 0]
        least, largest = min(weights), max(weights)
        # The smallest weight is not rounded, the largest by 1 / _WEIGHT at most.
        self.per_value = max(floor(_WEIGHT * least / largest), 1) / (least * self.unit)
        self.time_weight = self.floor(objective.time_weight * self.unit * self.per_value)
        self.cost_weight = self.floor(objective.cost_weight * self.unit * self.per_value)
        self.offset = objective.offset

    @staticmethod
    def floor(value: float) -> int:
        """Round down, but for what is an integer up to floating-point rounding."""
        nearest = round(value)
        return nearest if abs(value - nearest) <= 1e-12 * abs(nearest) else floor(value)

    def ticks(self, seconds: float) -> int:
        return self.floor(seconds / self.unit)

    def value(self, integer: float) -> float:
        return integer / self.per_value + self.offset

    def integer(self, value: float) -> int:
        return floor((value - self.offset) * self.per_value)


class _Model:
    """What both models share: end time, cost and objective, the search, and the reasons of infeasibility.

    ``literals``, where given, switch constraints on: the name of each stands in the reason.
    """

    def __init__(self, call: _Call, horizon: float, alpha: float, *, explain: bool) -> None:
        from ortools.sat.python import cp_model

        self.call = call
        self.explain = explain
        self.scale = _Scale(call, horizon, alpha)
        self.model = cp_model.CpModel()
        self.literals: dict[str, cp_model.IntVar] = {}

    def _literal(self, name: str) -> cp_model.IntVar:
        if name not in self.literals:
            self.literals[name] = self.model.new_bool_var(name)
        return self.literals[name]

    def _post(self, constraint: Any, name: str) -> None:
        """Add a constraint that a message can name."""
        added = self.model.add(constraint)
        if self.explain:
            added.only_enforce_if(self._literal(name))

    def _limit(self, used: Sequence[Any], end: Any, cost: Any) -> None:
        """Post limits on GPUs, time and cost; ``used`` are the actors of each kind, ``cost`` GPU ticks."""
        problem, objective = self.call.problem, self.call.objective
        for limit in self.call.limits:
            held = [used[k] * problem.kinds[k].profile.actor.gpus for k in limit.kinds]
            self._post(sum(held) <= limit.gpus, f"{limit.name} has {limit.gpus} GPUs")
        if isfinite(objective.time_limit):
            allowed = ceil(objective.time_limit * (1 + 2e-9) / self.scale.unit)
            self._post(end <= allowed, f"time is limited to {objective.time_limit:g} s")
        if isfinite(objective.cost_limit):
            allowed = ceil(objective.cost_limit * (1 + 2e-9) / self.scale.unit)
            self._post(cost <= allowed, f"cost is limited to {objective.cost_limit:g} GPU seconds")

    def _minimise(self, end: Any, spent: Any) -> None:
        call, scale = self.call, self.scale
        # A variable of its own, so that no sum of upper ends overflows.
        cost = self.model.new_int_var(0, _TOP, "cost")
        self.model.add(cost >= spent)
        value = scale.time_weight * end + scale.cost_weight * cost
        self.model.minimize(value)
        if self.explain:
            return
        if isfinite(call.bound):
            self.model.add(value >= scale.integer(call.bound))
        if isfinite(call.value):
            self.model.add(value <= scale.integer(call.value) + 1)

    def partition(self, value: Callable[[Any], int]) -> Partition:
        raise NotImplementedError

    def clash(self) -> str:
        """Return the named constraints of a smallest set found that cannot hold together."""
        from ortools.sat.python import cp_model

        def core(names: list[str]) -> list[str] | None:
            self.model.clear_assumptions()
            self.model.add_assumptions([self.literals[name] for name in names])
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = 1
            solver.parameters.max_time_in_seconds = 2.0
            if solver.solve(self.model) != cp_model.INFEASIBLE:
                return None
            by_index = {self.literals[name].index: name for name in names}
            return [by_index[index] for index in solver.sufficient_assumptions_for_infeasibility()]

        names = sorted(self.literals)
        found = core(names)
        if found is None:
            return ""
        for name in list(found):
            without = [other for other in found if other != name]
            if without and core(without) is not None:
                found = without
        return "; ".join(found)


class _Columns(_Model):
    """One integer a column: how many actors of a kind decode just this group."""

    def __init__(self, call: _Call, types: list[IntArray], *, explain: bool = False) -> None:
        problem = call.problem
        counts = np.array(list(product(*(range(len(rows) + 1) for rows in types)))[1:], dtype=np.int64)
        groups = [
            np.concatenate([rows[:taken] for rows, taken in zip(types, row, strict=True)])
            for row in counts.tolist()
        ]
        times = np.stack(
            [problem.decode_seconds(groups, [k] * len(groups)) for k in range(len(problem.kinds))], axis=1
        )
        horizon = float(times[np.isfinite(times)].max())
        super().__init__(call, horizon, 0.0, explain=explain)
        self.types = types
        self.counts = counts
        self.columns: list[tuple[int, int, Any]] = []
        sizes = np.array([len(rows) for rows in types])
        model, ends = self.model, []
        used: list[list[Any]] = [[] for _ in problem.kinds]
        cost: list[Any] = []
        cover: list[list[Any]] = [[] for _ in types]
        weighed: list[list[Any]] = [[] for _ in types]
        end = model.new_int_var(0, _TOP, "end")
        for k, kind in enumerate(problem.kinds):
            most = len(problem) if explain else kind.count
            held = kind.profile.actor.gpus
            for column in np.flatnonzero(np.isfinite(times[:, k])).tolist():
                taken = counts[column]
                times_at_most = min(int((sizes[taken > 0] // taken[taken > 0]).min()), most)
                if times_at_most < 1:
                    continue
                number = model.new_int_var(0, times_at_most, "")
                chosen = number
                if times_at_most > 1:
                    chosen = model.new_bool_var("")
                    model.add(number <= times_at_most * chosen)
                self.columns.append((column, k, number))
                seconds = float(times[column, k])
                ends.append((self.scale.ticks(seconds + kind.start_seconds), chosen))
                cost.append(held * self.scale.ticks(seconds + kind.held_seconds) * number)
                used[k].append(number)
                for t in np.flatnonzero(taken).tolist():
                    cover[t].append(int(taken[t]) * number)
                    weighed[t].append(int(taken[t]) * ends[-1][0] * number)
        for t, covering in enumerate(cover):
            model.add(sum(covering) == len(types[t]))
            # The end is no earlier than the mean over a type's responses, which binds the linear relaxation.
            model.add(len(types[t]) * end >= sum(weighed[t]))
        for ticks, chosen in ends:
            model.add(end >= ticks * chosen)
        for k, kind in enumerate(problem.kinds):
            if used[k] and kind.count < len(problem):
                self._post(sum(used[k]) <= kind.count, f"at most {kind.count} actors of {kind.profile.name}")
        self._limit([sum(numbers) for numbers in used], end, sum(cost))
        self._minimise(end, sum(cost))
        if call.partition is not None:
            self._hint(call.partition)

    def _hint(self, partition: Partition) -> None:
        type_of = np.empty(len(self.call.problem), dtype=np.int64)
        for t, rows in enumerate(self.types):
            type_of[rows] = t
        held: dict[tuple[int, ...], int] = {}
        for rows, kind in zip(partition.groups, partition.kinds, strict=True):
            key = (kind, *np.bincount(type_of[rows], minlength=len(self.types)).tolist())
            held[key] = held.get(key, 0) + 1
        for column, kind, number in self.columns:
            self.model.add_hint(number, held.get((kind, *self.counts[column].tolist()), 0))

    def partition(self, value: Callable[[Any], int]) -> Partition:
        """Return the partition of a solution."""
        left = [rows.tolist() for rows in self.types]
        groups, kinds = [], []
        for column, kind, number in self.columns:
            for _ in range(value(number)):
                taken = self.counts[column].tolist()
                rows = [left[t].pop() for t, count in enumerate(taken) for _ in range(count)]
                groups.append(np.array(rows, dtype=np.int64))
                kinds.append(kind)
        return Partition(tuple(groups), tuple(kinds))


class _Slots(_Model):
    """One integer a unit and slot: how many parts of the unit the actor in the slot gets."""

    def __init__(
        self,
        call: _Call,
        units: list[_Unit],
        slots: list[int],
        rest: Partition | None = None,
        *,
        explain: bool = False,
    ) -> None:
        problem = call.problem
        self.units = units
        self.rest = rest or Partition((), ())
        if explain:
            slots = sorted([*slots, *(2 * list(range(len(problem.kinds))))])
        self.slots = slots
        every = np.arange(len(problem))
        of_kind = call.planes
        prefill = [_prefill_work(problem, kind.profile, every) for kind in problem.kinds]
        work = [
            [_own_work(problem, plane, every) + prefill[k] for plane in of_kind[k]]
            for k in range(len(problem.kinds))
        ]
        longest = problem.response_tokens[[unit.rows[0] for unit in units]]
        horizon = max(
            float(own[0, 0]) * float(longest[0]) + float(work[k][0].sum()) for k, own in enumerate(of_kind)
        )
        if call.partition is not None:
            horizon = min(horizon, problem.evaluate(call.partition)[0])
        super().__init__(call, horizon, max(float(own[0, 0]) for own in of_kind), explain=explain)
        model, scale = self.model, self.scale

        # parts[slot][unit]; lead[slot][unit]: the slot's first unit is this one or an earlier one.
        self.parts: list[list[Any]] = []
        self.lead: list[list[Any]] = []
        drop = (-np.diff(np.append(longest, 0))).tolist()
        kinds_of_rest = (
            np.bincount(self.rest.kinds, minlength=len(problem.kinds)) if rest else [0] * len(problem.kinds)
        )
        used: list[list[Any]] = [[int(count)] for count in kinds_of_rest]
        ended, spent = problem.evaluate(self.rest) if self.rest.groups else (0.0, 0.0)
        end = model.new_int_var(scale.ticks(ended), _TOP, "end")
        cost: list[Any] = [scale.ticks(spent)]
        for slot, k in enumerate(self.slots):
            kind = problem.kinds[k]
            parts = [model.new_int_var(0, unit.count, "") for unit in units]
            lead = [model.new_bool_var("") for _ in units]
            for u, unit in enumerate(units):
                if not problem.fits(k, unit.rows):
                    room = kind.profile.actor.kv_capacity_tokens
                    self._post(
                        parts[u] == 0, f"memory: an actor of {kind.profile.name} holds {room} KV tokens"
                    )
                model.add(parts[u] <= unit.count * lead[u])
                if u:
                    model.add_implication(lead[u - 1], lead[u])
            if slot and self.slots[slot - 1] == k:
                for first, second in zip(self.lead[-1], lead, strict=True):
                    model.add_implication(second, first)
            self.parts.append(parts)
            self.lead.append(lead)
            used[k].append(lead[-1])
            rounds = self._iterations(kind.profile, parts, _weighted(drop, lead))
            seconds = model.new_int_var(0, _TOP, "")
            for plane, own in zip(of_kind[k], work[k], strict=True):
                per_part = [scale.ticks(float(own[unit.rows].sum()) / unit.count) for unit in units]
                model.add(seconds >= scale.ticks(float(plane[0])) * rounds + _weighted(per_part, parts))
            model.add(end >= seconds + scale.ticks(kind.start_seconds) * lead[-1])
            held = kind.profile.actor.gpus
            cost.append(held * (seconds + scale.ticks(kind.held_seconds) * lead[-1]))
        for u, unit in enumerate(units):
            model.add(sum(parts[u] for parts in self.parts) == unit.count)
        if explain:
            for k, kind in enumerate(problem.kinds):
                self._post(sum(used[k]) <= kind.count, f"at most {kind.count} actors of {kind.profile.name}")
        self._limit([sum(numbers) for numbers in used], end, sum(cost))
        self._minimise(end, sum(cost))
        if call.partition is not None:
            self._hint(call.partition)

    def _iterations(self, profile: Profile, parts: list[Any], longest: Any) -> Any:
        """Return the least iterations of a slot: those of its longest response, more where a queue is certain.

        ``max_running`` responses make a token each in an iteration, and the tokens held, one new one for each
        running response included, stay within the KV capacity; summed over the iterations, both bound
        their number.
        """
        problem = self.call.problem
        length = problem.response_tokens.astype(np.int64)
        held = length * (length + 1) // 2
        if not problem.engine.share_prompt_kv:
            held = held + problem.prompt_tokens * length
        limits = [
            (profile.actor.max_running, length, len(problem) > profile.actor.max_running),
            (
                profile.actor.kv_capacity_tokens,
                held,
                int((problem.prompt_tokens + length).sum()) > profile.actor.kv_capacity_tokens,
            ),
        ]
        if not any(binding for _, _, binding in limits):
            return longest
        rounds = self.model.new_int_var(0, _TOP, "")
        self.model.add(rounds >= longest)
        for room, need, binding in limits:
            if binding:
                per_part = [int(need[unit.rows].sum()) // unit.count for unit in self.units]
                self.model.add(room * rounds >= _weighted(per_part, parts))
        return rounds

    def _hint(self, partition: Partition) -> None:
        problem = self.call.problem
        own = np.full(len(problem), True)
        for rows in self.rest.groups:
            own[rows] = False
        free = {
            k: [slot for slot, kind in enumerate(self.slots) if kind == k] for k in range(len(problem.kinds))
        }
        owner = np.zeros(len(problem), dtype=np.int64)
        groups = [g for g, rows in enumerate(partition.groups) if own[rows[0]]]
        for g in sorted(groups, key=lambda g: int(problem.rank[partition.groups[g]].min())):
            owner[partition.groups[g]] = free[partition.kinds[g]].pop(0)
        given = np.zeros((len(self.slots), len(self.units)), dtype=np.int64)
        for u, unit in enumerate(self.units):
            owners = owner[unit.rows] if unit.count > 1 else owner[unit.rows[:1]]
            given[:, u] = np.bincount(owners, minlength=len(self.slots))
        first = np.maximum.accumulate(given > 0, axis=1)
        for slot in range(len(self.slots)):
            for u in range(len(self.units)):
                self.model.add_hint(self.parts[slot][u], int(given[slot, u]))
                self.model.add_hint(self.lead[slot][u], bool(first[slot, u]))

    def partition(self, value: Callable[[Any], int]) -> Partition:
        """Return the partition of a solution."""
        rows: list[list[IntArray]] = [[] for _ in self.slots]
        for u, unit in enumerate(self.units):
            done = 0
            for slot, parts in enumerate(self.parts):
                taken = value(parts[u])
                if taken:
                    rows[slot].append(unit.part(done, taken))
                    done += taken
        kept = [slot for slot, own in enumerate(rows) if own]
        return Partition(
            (*(np.concatenate(rows[slot]) for slot in kept), *self.rest.groups),
            (*(self.slots[slot] for slot in kept), *self.rest.kinds),
        )


def _weighted(weights: Sequence[int], terms: Sequence[Any]) -> Any:
    """Return the weighted sum as CP-SAT's expression."""
    from ortools.sat.python import cp_model

    return cp_model.LinearExpr.weighted_sum(terms, weights)
