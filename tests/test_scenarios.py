"""Plans under uncertainty: the distribution of lengths against the truth, the search against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import batch, profile, setting, view
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlhfless.models.plan import Migration
from rlhfless.policies import Composed, Setting, StepView, check_policy, simulate
from rlhfless.policies.guess import (
    FromHistory,
    LengthModel,
    Point,
    _excess,
    _pareto,
    _survival,
    sibling_correlation,
)
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.scale import Work
from rlhfless.scripts import regret
from rlhfless.scripts.regret import Case, Generator, Population, foretold, play, ratio_interval, sampled_twice
from rlhfless.scripts.reproduce_lab import Lab, changed_policy
from rlhfless.solver.objective import Goal
from rlhfless.solver.scenarios import SampleAverage, Score, Search, optimality_gap, worst_mean
from rlhfless.traces.errors import InputError
from rlhfless.traces.synthetic import Synthetic, generate
from rlhfless.traces.trace import FloatArray, IntArray, Trace

CUT = Migration(rule="local", threshold=0.8, slots="engine")
POLICIES = ("saa", "saa_point", "oracle_saa")


def workload(**changes: Any) -> Synthetic:
    """Return a small run: 4 samples of each prompt, prompts that come back, lognormal lengths."""
    values: dict[str, Any] = {
        "name": "test",
        "prompts": 256,
        "prompts_per_step": 64,
        "responses_per_prompt": 4,
        "max_response_tokens": 4000,
        "lengths": [{"weight": 1.0, "median_tokens": 200.0, "log_sd": 0.6}],
        "icc": 0.6,
        "persistence": 0.9,
        "epochs": 4,
        "question_median_tokens": 60.0,
        "question_log_sd": 0.3,
        "max_prompt_tokens": 512,
    }
    return Synthetic.parse(values | changes, "test")


def last_step(trace: Trace, where: Setting | None = None) -> tuple[StepView, IntArray]:
    """Return the view of a run's last step, and its lengths."""
    history = LengthHistory(len(trace.prompt_ids))
    *before, last = trace.batches()
    for step in before:
        history.record(step)
    cap = trace.max_response_tokens or 4000
    return view(last, where or setting(), history, cap=cap), last.response_tokens


def work_of(seen: StepView, predicted: IntArray) -> Work:
    """Return what a scaling part gets when every actor prefills its own prompts."""
    return Work(seen, predicted, np.zeros(len(seen), dtype=np.int64), 0.0)


def partitions(rows: list[int], most: int) -> Iterator[list[list[int]]]:
    """Yield every partition into at most ``most`` groups."""
    if not rows:
        yield []
        return
    for smaller in partitions(rows[1:], most):
        for i, group in enumerate(smaller):
            yield [*smaller[:i], [rows[0], *group], *smaller[i + 1 :]]
        if len(smaller) < most:
            yield [[rows[0]], *smaller]


# The distribution of lengths.


@pytest.mark.parametrize("icc", [0.2, 0.6, 0.9])
def test_lengths_and_means_of_prompts_are_as_often_below_a_quantile_as_it_says(icc: float) -> None:
    case = Case("", (generate(workload(icc=icc), 0),), setting())
    single, means = foretold(case, FromHistory(), 200)
    for pit in (single, means):
        for level in (0.1, 0.5, 0.9):
            assert (pit <= level).mean() == pytest.approx(level, abs=0.05)


def test_independent_draws_understate_how_far_means_of_prompts_lie_apart() -> None:
    case = Case("", (generate(workload(), 0),), setting())
    _, alike = foretold(case, FromHistory(), 200)
    _, independent = foretold(case, FromHistory(correlated=False), 200)
    outside = [(np.abs(pit - 0.5) > 0.45).mean() for pit in (alike, independent)]
    assert outside[0] == pytest.approx(0.1, abs=0.05)
    assert outside[1] > 1.8 * outside[0]


def test_the_correlation_of_siblings_is_that_of_what_the_past_leaves_unexplained() -> None:
    trace = generate(workload(prompts=1024, prompts_per_step=256, epochs=3), 1)
    seen, lengths = last_step(trace)
    before = np.log(seen.history.recent(seen.prompt, 1)[0])
    left = np.log(lengths) - np.polyval(np.polyfit(before, np.log(lengths), 1), before)
    by_prompt = left[np.argsort(seen.prompt, kind="stable")].reshape(-1, 4)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    measured = np.mean([np.corrcoef(by_prompt[:, i], by_prompt[:, j])[0, 1] for i, j in pairs])
    assert sibling_correlation(seen, "last") == pytest.approx(measured, abs=0.1)


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.3])
def test_the_tail_is_a_generalised_pareto_distribution(shape: float) -> None:
    law = stats.genpareto(shape, scale=0.4)
    level = np.linspace(0.01, 0.99, 50)
    np.testing.assert_allclose(_excess(level, shape, 0.4), law.ppf(level))
    np.testing.assert_allclose(_survival(law.ppf(level), shape, 0.4), law.sf(law.ppf(level)))
    fitted = _pareto(np.asarray(law.rvs(20_000, random_state=0)))
    assert fitted == pytest.approx((shape, 0.4), abs=0.03)


def test_every_response_may_run_away_whether_or_not_a_neighbour_did() -> None:
    trace = generate(workload(runaway_share=0.01, prompts=1024, prompts_per_step=256), 0)
    seen, lengths = last_step(trace)
    drawn = FromHistory()(seen, lengths, 4000)
    share = (drawn == trace.max_response_tokens).mean(axis=0)
    known = np.concatenate([b.response_tokens for b in list(trace.batches())[4:-1]]) == 4000
    assert share.mean() == pytest.approx(known.mean(), rel=0.3)
    assert share.min() > known.mean() / 5
    assert share.max() < known.mean() * 5


@given(seed=st.integers(0, 99), cap=st.sampled_from([150, 400, 4000]), pooled=st.booleans())
@settings(max_examples=25, deadline=None)
def test_draws_stay_between_what_is_generated_and_the_cap(seed: int, cap: int, pooled: bool) -> None:
    seen, lengths = last_step(generate(workload(max_response_tokens=cap, epochs=2), seed))
    done = np.random.default_rng(seed).integers(0, cap, len(lengths))
    drawn = FromHistory(tail=pooled)(replace(seen, generated=done), lengths, 5)
    assert drawn.shape == (5, len(lengths))
    assert (drawn > done).all()
    assert (drawn <= cap).all()


def test_without_outcomes_all_draws_are_the_prediction() -> None:
    seen = view(batch([10] * 8, [50] * 8), setting())
    predicted = np.arange(1, 9)
    assert (FromHistory()(seen, predicted, 3) == predicted).all()
    assert (Point()(seen, predicted, 3) == predicted[None]).all()


# The value of a plan.


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0.02, 1.0))
def test_the_mean_of_the_worst_is_the_conditional_value_at_risk(values: list[float], share: float) -> None:
    data = np.array(values)
    # Rockafellar and Uryasev: the least over t of t + E max(x - t, 0) / share, found at one of the values.
    expected = min(t + np.maximum(data - t, 0).mean() / share for t in values)
    assert worst_mean(data, share) == pytest.approx(expected, abs=1e-9)


def test_the_mean_of_the_worst_is_the_mean_for_all_and_the_worst_for_few() -> None:
    data = np.array([[3.0, 1.0, 2.0], [6.0, 6.0, 0.0]])
    assert worst_mean(data, 1.0) == pytest.approx(data.mean(axis=1))
    assert worst_mean(data, 0.1) == pytest.approx(data.max(axis=1))


@pytest.mark.parametrize("kind", ["ratio", "minmax"])
def test_a_goal_has_the_same_value_in_a_scenario_as_with_known_lengths(kind: Any) -> None:
    rng = np.random.default_rng(0)
    reference, plan = rng.uniform(1, 2, (2, 5, 3)), rng.uniform(1, 2, (2, 3))
    score = Score.of(Goal(kind), reference[0], reference[1], 5.0)(plan[0], plan[1])
    for i in range(3):
        objective = Goal(kind).resolve(reference[0][:, i], reference[1][:, i])
        assert score[i] == pytest.approx(float(objective.value(plan[0, i], plan[1, i])))


def test_what_exceeds_a_limit_is_paid_for_in_proportion() -> None:
    seconds, cost = np.array([[10.0], [20.0]]), np.array([[40.0], [20.0]])
    by_cost = Score.of(Goal("cost", limit=1.5), seconds, cost, 4.0)
    assert by_cost(np.array([15.0]), np.array([30.0])) == pytest.approx(1.5)
    assert by_cost(np.array([30.0]), np.array([30.0])) == pytest.approx(1.5 + 4.0)
    by_time = Score.of(Goal("time", limit=2.0), seconds, cost, 4.0)
    assert by_time(np.array([20.0]), np.array([60.0])) == pytest.approx(2.0 + 4.0 * 0.5)


# The search.


@pytest.mark.parametrize("kind", ["ratio", "minmax", "cost"])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_of_all_partitions_for_its_scenarios(kind: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, most = 6, 3
    seen = view(
        batch(rng.integers(10, 80, n).tolist(), [1] * n), setting(profile(actor__max_running=2)), cap=4000
    )
    lengths = rng.lognormal(6, 0.8, (4, n)).astype(np.int64) + 1
    planner = SampleAverage(goal=Goal(kind, limit=1.2 if kind == "cost" else None), migration=CUT, rounds=150)
    search = Search(planner, work_of(seen, lengths[0]), most)
    scenarios = search.scenarios(lengths)
    found = search.values(search.run(scenarios), scenarios)
    rows = np.argsort(search.rank).tolist()
    every = [tuple(np.array(group) for group in groups) for groups in partitions(rows, most)]
    best = search.values(search.sweep.estimate(every)[0], scenarios).min()
    # Actors are numbered by the predicted load, which decides equal cases; nothing else may differ.
    assert best - 1e-9 <= found.min() <= best + 0.01 * abs(best)


def test_the_chosen_split_is_better_on_new_lengths_than_the_one_for_the_prediction() -> None:
    params = workload(lengths=[{"weight": 1.0, "median_tokens": 200.0, "log_sd": 1.0}], icc=0.3)
    gain = []
    for seed in range(4):
        trace = generate(params, seed)
        seen, _ = last_step(trace)
        last = seen.history.recent(seen.prompt, 1)[0].astype(np.int64)
        judge = Search(SampleAverage(migration=CUT, lengths=Generator(params, trace)), work_of(seen, last), 8)
        new = judge.scenarios(judge.planner.lengths(seen, last, 64))
        models: tuple[LengthModel, ...] = (Point(), FromHistory())
        plans = [
            SampleAverage(migration=CUT, lengths=model)(work_of(seen, last), lambda _: (), 8)
            for model in models
        ]
        point, own = judge.values(plans, new)
        gain.append(point - own)
    assert np.mean(gain) > 0.02
    assert min(gain) > -0.01


def test_planning_on_points_is_clairvoyant_when_the_prediction_is_true() -> None:
    class Knows:
        def __call__(self, seen: StepView) -> FloatArray:
            return lengths.astype(np.float64)

    seen, lengths = last_step(generate(workload(), 3))
    point, oracle = changed_policy("saa_point"), changed_policy("oracle_saa")
    assert isinstance(point, Composed)
    plans = [
        policy.plan(replace(seen, rng=np.random.default_rng(0), true_tokens=lengths))
        for policy in (replace(point, predict=Knows()), oracle)
    ]
    responses = [[actor.responses.tolist() for actor in plan.actors] for plan in plans]
    assert responses[0] == responses[1]


def test_no_time_leaves_the_best_of_the_sweep() -> None:
    seen, lengths = last_step(generate(workload(), 0))
    work = work_of(seen, lengths)
    none, swept = (
        SampleAverage(lengths=Point(), migration=CUT, **more)(work, lambda _: (), 8)
        for more in ({"seconds": 0.0}, {"rounds": 0})
    )
    assert [rows.tolist() for rows in none] == [rows.tolist() for rows in swept]
    assert sorted(np.concatenate(none).tolist()) == list(range(len(seen)))


def test_the_gap_of_a_bad_split_is_wider_and_none_is_negative() -> None:
    seen, lengths = last_step(generate(workload(), 0))
    search = Search(SampleAverage(migration=CUT), work_of(seen, lengths), 8)
    found = search.run(search.draw(12))[-1]
    good = optimality_gap(search, found, 4)
    bad = optimality_gap(search, (np.argsort(search.rank),), 4)
    assert 0 <= good.mean <= good.high < bad.mean


# Whole policies.


@pytest.mark.parametrize("name", POLICIES)
def test_the_policies_keep_the_contract(name: str) -> None:
    check_policy(changed_policy(name))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("goal", ["ratio", "minmax", "cost", "time"])
@pytest.mark.parametrize(
    "lengths", [[7], [40] * 12, [1, 900], [30, 20, 10]], ids=["one", "equal", "far apart", "few"]
)
def test_small_steps_without_any_history_get_a_plan(name: str, goal: str, lengths: list[int]) -> None:
    policy = changed_policy(name, f"scale.goal.kind={goal}")
    trace = batch([20] * len(lengths), lengths, max_response_tokens=1000)
    (step,) = simulate(trace, policy, setting())
    assert step.outcome.responses == len(lengths)
    assert step.outcome.actors <= len(lengths)


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: SampleAverage(share=0.0), "share is 0.0"),
        (lambda: SampleAverage(overrun=-1.0), "overrun is -1.0"),
        (lambda: SampleAverage(scenarios=0), "scenarios is 0, must be at least 1"),
        (lambda: SampleAverage(seconds=-0.5), "seconds is -0.5"),
        (lambda: FromHistory(body=1.0), "body is 1.0"),
        (lambda: FromHistory(reach=0.0), "reach is 0.0"),
    ],
)
def test_impossible_parameters_are_refused(build: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        build()


def test_an_actor_that_fits_no_gpus_is_refused() -> None:
    seen = view(batch([10], [5]), setting())
    with pytest.raises(InputError, match="does not fit the GPUs"):
        SampleAverage()(work_of(seen, np.array([5])), lambda _: (), 0)


# The study.


def test_the_generator_knows_of_a_prompt_what_its_past_lengths_say() -> None:
    params = workload(
        prompts=40, prompts_per_step=40, answer_median_tokens=100.0, answer_log_sd=0.4, answer_correlation=0.5
    )
    trace = generate(params, 0)
    r, rho, epoch = 0.6, params.persistence, 3
    share = params.answer_correlation / np.sqrt(r)
    mean, variance = Generator(params, trace).effects(epoch)
    for prompt in range(0, 40, 13):
        rows = np.flatnonzero((trace.prompt == prompt) & (trace.epoch < epoch))
        when = trace.epoch[rows]
        answer = np.log(trace.answer_tokens[rows[0]] / 100.0) / 0.4  # type: ignore[index]
        seen = np.append(np.log(trace.response_tokens[rows] / 200.0) / 0.6, answer)
        # Condition the joint normal distribution of all observations and the effect.
        shared = r * rho ** np.abs(when[:, None] - when) + (1 - r) * np.eye(len(rows))
        with_answer = np.sqrt(r) * share * rho**when
        joint = np.block([[shared, with_answer[:, None]], [with_answer[None], np.ones((1, 1))]])
        cross = np.append(np.sqrt(r) * rho ** (epoch - when), share * rho**epoch)
        weights = np.linalg.solve(joint, cross)
        assert mean[prompt] == pytest.approx(float(weights @ seen), abs=0.03)
        assert variance[prompt] == pytest.approx(float(1 - weights @ cross), abs=0.01)


def test_lengths_drawn_by_the_generator_are_calibrated() -> None:
    params = workload(runaway_share=0.02, drift=0.05)
    trace = generate(params, 0)
    for pit in foretold(Case("", (trace,), setting()), Generator(params, trace), 200):
        for level in (0.1, 0.5, 0.75):
            assert (pit <= level).mean() == pytest.approx(level, abs=0.04)


def test_a_population_draws_whole_prompts() -> None:
    trace = batch([10] * 6, [1, 2, 30, 40, 500, 600], [0, 0, 1, 1, 2, 2])
    drawn = Population(trace)(view(trace, setting()), np.ones(6, dtype=np.int64), 50).reshape(50, 3, 2)
    assert {tuple(sorted(pair)) for pair in drawn.reshape(-1, 2).tolist()} == {(1, 2), (30, 40), (500, 600)}


def test_a_run_sampled_twice_has_every_response_once_and_half_of_each_prompt_in_each_epoch() -> None:
    trace = generate(workload(epochs=1), 0)
    twice = sampled_twice(trace, 1)
    assert sorted(
        zip(twice.prompt.tolist(), twice.sample.tolist(), twice.response_tokens.tolist(), strict=True)
    ) == (
        sorted(zip(trace.prompt.tolist(), trace.sample.tolist(), trace.response_tokens.tolist(), strict=True))
    )
    for epoch in (0, 1):
        assert set(np.bincount(twice.prompt[twice.epoch == epoch]).tolist()) == {2}
    assert len(twice.steps) == 2 * len(trace.steps)


def test_a_ratio_of_means_has_an_interval_around_it() -> None:
    rng = np.random.default_rng(0)
    whole = rng.uniform(1, 2, 200)
    found = ratio_interval(0.4 * whole + rng.normal(0, 0.1, 200), whole)
    assert found.low < 0.4 < found.high
    assert found.high - found.low < 0.1


@pytest.mark.parametrize("name", ["DAPO, as recorded", "DAPO, sampled twice", "DeepCoder, sampled twice"])
def test_distributions_close_part_of_the_regret_on_recorded_lengths(name: str, data_dir: Path) -> None:
    (case,) = [case for case in regret.polytrace(Lab(1), data_dir) if case.name == name]
    steps, _ = play(replace(case, exact=None), regret.GOALS["ratio 0.7"])
    point, own, clairvoyant = (steps[key].value.mean() for key in ("saa_point", "saa", "oracle_saa"))
    assert clairvoyant < own < point


@pytest.mark.parametrize("keep_alive", [0.0, 1.5, 1000.0])
def test_the_forecast_knows_which_functions_have_cooled_down(keep_alive: float) -> None:
    functions = {"cold_start_seconds": 20.0, "warm_start_seconds": 1.0, "keep_alive_seconds": keep_alive}
    where = setting(profile(functions=functions))
    searches: list[Search] = []

    class Keeps:
        def __call__(self, work: Work, split: Any, most: int) -> Any:
            searches.append(Search(planner, work, most))
            return split(most)

    policy = changed_policy("oracle_saa", "migration={_target_: rlhfless.policies.Migration, rule: none}")
    assert isinstance(policy, Composed)
    assert isinstance(policy.scale, SampleAverage)
    planner = policy.scale
    steps = list(simulate(generate(workload(), 0), replace(policy, scale=Keeps()), where))
    # From the third step on, a learning stage is known. It lasts as long each time, but for the tokens trained on.
    for search, step in list(zip(searches, steps, strict=True))[2:]:
        groups = tuple(actor.responses for actor in step.plan.actors)
        seconds, gpu_seconds = search.forecast([groups], step.batch.response_tokens[None], planner.migration)
        assert seconds[0, 0] == pytest.approx(step.outcome.generation_seconds, rel=0.02)
        assert gpu_seconds[0, 0] == pytest.approx(step.outcome.by_function["decode"], rel=0.05)
    assert (steps[-1].outcome.cold_starts > 0) == (keep_alive < 1000.0)
