"""A rolling-horizon integer program over actor counts: look some steps ahead, decide the first, repeat.

A window of steps is a flow of one unit through (step, warm slots). An arc from ``m`` warm slots to ``k`` kept ones
is one of the decisions of its step that lead there; those that another one beats in time and in cost are left
out. Without limits the flow is a shortest path and the program equals
:func:`~rlhfless.solver.horizon.offline_optimum`; limits on the window's time or cost tie its steps together, which
the dynamic program cannot do. Solved by OR-Tools CP-SAT, imported when it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.solver.horizon import Action, Costs, HorizonTables, StepForecast, StepTable
from rlhfless.solver.objective import Objective, pareto
from rlhfless.traces.errors import InputError

#: Integer units of the largest time and of the largest cost of a step.
_UNITS = 10**7


def best_window(
    tables: Sequence[StepTable], objective: Objective, warm: int, *, seconds_limit: float = 30.0
) -> list[Action]:
    """Return the best decisions for the steps of a window, the first of which begins with ``warm`` warm slots.

    Times and costs are rounded to a ten-millionth of the largest of a step, limits towards the safe side.
    One worker and a fixed seed: equal input gives equal output.

    Raises
    ------
    InputError
        When no decisions keep the limits, or none were found in time.

    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    most = len(tables[0].seconds)
    costs = [table.gpu_seconds[..., None] + table.keep for table in tables]
    time_unit = max(float(table.seconds.max()) for table in tables) / _UNITS
    # A slot that was invoked early is billed less than nothing for keeping it warm: costs may be negative.
    cost_unit = max(float(np.abs(cost).max()) for cost in costs) / _UNITS
    arcs: list[tuple[int, Action, cp_model.IntVar, int, int]] = []
    out: dict[tuple[int, int], list[cp_model.IntVar]] = defaultdict(list)
    into: dict[tuple[int, int], list[cp_model.IntVar]] = defaultdict(list)
    reached = {warm}
    for step, (table, cost) in enumerate(zip(tables, costs, strict=True)):
        following = set()
        for m in sorted(reached):
            for k in range(most + 1):
                least = max(k, 1)
                time = table.seconds[least - 1 :, :, m]
                paid = cost[least - 1 :, :, m, k]
                for index in pareto(time.ravel(), paid.ravel()).tolist():
                    count, threshold = np.unravel_index(index, time.shape)
                    action = Action(least + int(count), int(threshold), k)
                    chosen = model.new_bool_var("")
                    at = (count, threshold)
                    arcs.append(
                        (
                            step,
                            action,
                            chosen,
                            round(float(time[at]) / time_unit),
                            round(float(paid[at]) / cost_unit),
                        )
                    )
                    out[step, m].append(chosen)
                    into[step + 1, table.warm_after(action)].append(chosen)
                    following.add(table.warm_after(action))
        reached = following
    model.add(sum(out[0, warm]) == 1)
    for node, entering in into.items():
        if node[0] < len(tables):
            model.add(sum(entering) == sum(out[node]))
    total_time = sum(chosen * time for _, _, chosen, time, _ in arcs)
    total_cost = sum(chosen * cost for _, _, chosen, _, cost in arcs)
    for total, limit, unit in (
        (total_time, objective.time_limit, time_unit),
        (total_cost, objective.cost_limit, cost_unit),
    ):
        if np.isfinite(limit):
            model.add(total <= int(limit / unit))
    model.minimize(
        total_time * (objective.time_weight * time_unit) + total_cost * (objective.cost_weight * cost_unit)
    )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds_limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise InputError(
            f"no decisions for {len(tables)} steps keep time_limit {objective.time_limit:g} s and "
            f"cost_limit {objective.cost_limit:g} GPU s"
        )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"no decisions for {len(tables)} steps found within {seconds_limit:g} s")
    return [action for _, action, chosen, _, _ in arcs if solver.boolean_value(chosen)]


def rolling(tables: HorizonTables, objective: Objective, ahead: int) -> list[Action]:
    """Return the decisions of a rolling window of ``ahead`` steps on true tables, from a cold start on."""
    actions: list[Action] = []
    warm = 0
    for step in range(len(tables)):
        action = best_window(tables.steps[step : step + ahead], objective, warm)[0]
        actions.append(action)
        warm = tables.steps[step].warm_after(action)
    return actions


def forecast_table(forecast: StepForecast, costs: Costs) -> StepTable:
    """Return a step's table as it is forecast.

    A cold slot delays the whole step by what its start-up outlasts the expected learning stage, and is billed its
    start-up; a kept one waits as long as the actors do on average.
    """
    most, thresholds = forecast.generation.shape
    n = np.arange(1, most + 1)[:, None, None]
    m, k = np.arange(most + 1), np.arange(most + 1)
    cold = np.maximum(n - m, 0)
    lead = float(forecast.expected_learning)
    delay = max(costs.cold_seconds - lead, 0.0) - max(costs.warm_seconds - lead, 0.0)
    generation = forecast.generation[..., None] + delay * (cold > 0)
    startup = costs.actor_gpus * (costs.cold_seconds - costs.warm_seconds) * costs.startup_billed
    learner = costs.learner_functions * costs.learner_gpus * costs.keep_billed
    gpu_seconds = forecast.held[..., None] + startup * cold + learner * generation
    early = forecast.generation - forecast.held / (costs.actor_gpus * n[..., 0])
    tail = np.maximum(early, 0.0) + forecast.rest
    keep = costs.actor_gpus * costs.keep_billed * tail[..., None] * np.minimum(k, n)
    shape = (most, thresholds, most + 1, most + 1)
    return StepTable(
        generation + forecast.rest, gpu_seconds, np.broadcast_to(keep[:, :, None], shape), generation, most
    )


@dataclass(frozen=True)
class RollingRule:
    """Decides by the window program on forecasts: the steps ahead are taken to be like the one at hand.

    Parameters
    ----------
    ahead
        Steps in the window, the one at hand included.
    weight
        The weight of time, relative to the forecast's least; the rest is that of cost, as in
        :class:`~rlhfless.solver.objective.Goal` of kind ``ratio``.

    """

    ahead: int = 3
    weight: float = 0.7

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise InputError(f"RollingRule: ahead is {self.ahead}, must be at least 1")
        if not 0 <= self.weight <= 1:
            raise InputError(f"RollingRule: weight is {self.weight}, must be 0 to 1")

    def __call__(self, forecast: StepForecast, costs: Costs, warm: int) -> Action:
        """Return the first decision of the window."""
        table = forecast_table(forecast, costs)
        # All warm, none kept: what a step takes and costs beside start-up.
        time, cost = table.seconds[..., -1], table.gpu_seconds[..., -1]
        objective = Objective(self.weight / float(time.min()), (1 - self.weight) / float(cost.min()))
        return best_window([table] * self.ahead, objective, warm)[0]
