"""The parts that policies are composed of, each against its definition, and the checker for policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from factories import batch, profile, setting, shipped_policies, traces, view
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhfless.models.decode import decode_one
from rlhfless.models.plan import ActorPlan, Learner, Plan, Prefill, Prewarm
from rlhfless.models.profile import Profile
from rlhfless.policies import (
    ByDistance,
    Chunked,
    Composed,
    DeduplicatedPrefill,
    Ewma,
    FixedActors,
    MinMaxScore,
    OnLearner,
    Oracle,
    ShortestPast,
    SortedEven,
    StepView,
    simulate,
)
from rlhfless.policies.assign import Groups
from rlhfless.policies.check import check_policy
from rlhfless.policies.history import LengthHistory
from rlhfless.policies.scale import Work
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import Trace

# Prediction.


def seen(*epochs: list[int], prompt: list[int], answers: list[int] | None = None) -> LengthHistory:
    """Return the history of four prompts' epochs, in which the responses had these lengths."""
    history = LengthHistory(4)
    for epoch, lengths in enumerate(epochs):
        tokens = None if answers is None else np.array(answers)
        history.record(
            batch([5] * len(prompt), lengths, prompt, step=epoch, epoch=epoch, answer_tokens=tokens)
        )
    return history


PAIRS = [0, 0, 1, 1]
STEP = batch([5] * 4, [1] * 4, PAIRS, step=9, epoch=9)


def test_window_one_is_the_last_epochs_mean() -> None:
    history = seen([90, 90, 90, 90], [10, 20, 40, 41], prompt=PAIRS)
    assert Ewma(window=1)(view(STEP, setting(), history)).tolist() == [15, 15, 40.5, 40.5]


def test_a_prompt_counts_by_its_mean_or_its_longest_response() -> None:
    history = seen([10, 20, 40, 41], prompt=PAIRS)
    assert Ewma(statistic="max")(view(STEP, setting(), history)).tolist() == [20, 20, 41, 41]


def test_window_two_weighs_the_newer_epoch_three_to_one() -> None:
    """Alpha = 2 / 3: weights 2/3 and 2/9, which are 3/4 and 1/4 of their sum."""
    history = seen([999] * 4, [40, 40, 80, 80], [20, 20, 20, 20], prompt=PAIRS)
    predicted = Ewma(window=2)(view(STEP, setting(), history))
    np.testing.assert_allclose(predicted, [25, 25, 35, 35], rtol=1e-12)


def test_a_given_alpha_and_three_epochs() -> None:
    """Alpha = 1/2: weights 1/2, 1/4, 1/8 of 7/8."""
    history = seen([70] * 4, [14] * 4, [28] * 4, prompt=PAIRS)
    predicted = Ewma(window=3, alpha=0.5)(view(STEP, setting(), history))
    np.testing.assert_allclose(predicted, (4 * 28 + 2 * 14 + 70) / 7, rtol=1e-12)


def test_fewer_epochs_than_the_window_weigh_what_there_is() -> None:
    history = seen([30] * 4, prompt=PAIRS)
    np.testing.assert_allclose(Ewma(window=4)(view(STEP, setting(), history)), 30, rtol=1e-12)


def test_the_first_epoch_takes_reference_answers_in_the_runs_proportion() -> None:
    """Before any response the answer's length itself; then times 120 response tokens by 60 answer tokens."""
    step = batch([5] * 2, [1] * 2, [2, 3], step=9, answer_tokens=np.array([7, 11]))
    nothing = LengthHistory(4)
    assert Ewma()(view(step, setting(), nothing)).tolist() == [7, 11]
    history = seen([20, 20, 40, 40], prompt=PAIRS, answers=[10, 10, 20, 20])
    assert Ewma()(view(step, setting(), history)).tolist() == [14, 22]
    assert Ewma(rescale_answers=False)(view(step, setting(), history)).tolist() == [7, 11]


def test_without_answers_the_runs_mean_and_before_it_the_cap() -> None:
    step = batch([5] * 2, [1] * 2, [2, 3], step=9)
    assert Ewma()(view(step, setting(), LengthHistory(4), cap=300)).tolist() == [300, 300]
    assert Ewma()(view(step, setting(), seen([10, 20, 30, 40], prompt=PAIRS))).tolist() == [25, 25]


def test_predictions_stay_within_the_cap() -> None:
    history = seen([90, 90, 3, 3], prompt=PAIRS)
    assert Ewma()(view(STEP, setting(), history, cap=50)).tolist() == [50, 50, 3, 3]


@pytest.mark.parametrize("wrong", [{"window": 0}, {"alpha": 0.0}, {"alpha": 1.5}])
def test_windows_and_weights_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        Ewma(**wrong)


def test_a_window_longer_than_the_history_is_refused() -> None:
    with pytest.raises(InputError, match="keeps 16 appearances of a prompt, not 17"):
        Ewma(window=17)(view(STEP, setting()))


def test_only_oracles_see_true_lengths() -> None:
    with pytest.raises(InputError, match="sees_true_lengths"):
        Oracle()(view(STEP, setting()))
    sly = Composed(name="clever", predict=Oracle(), sees_true_lengths=True)
    with pytest.raises(InputError, match="policy clever asks for the true lengths: its name must say oracle"):
        list(simulate(STEP, sly, setting()))


# Assignment.


@settings(max_examples=100, deadline=None)
@given(trace=traces(), actors=st.integers(1, 9), unit=st.sampled_from(["response", "prompt"]))
def test_sorted_blocks_are_even_contiguous_and_whole(trace: Trace, actors: int, unit: Any) -> None:
    step = next(trace.batches())
    seen_step = view(step, setting())
    predicted = (step.prompt_tokens % 7).astype(np.float64)
    groups = SortedEven(unit)(seen_step, predicted, actors)
    units = len(step) if unit == "response" else len(np.unique(step.prompt))
    assert len(groups) == min(actors, units)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(step)))
    counts = [len(g) if unit == "response" else len(np.unique(step.prompt[g])) for g in groups]
    assert max(counts) - min(counts) <= 1
    longest_first = [predicted[r] for group in groups for r in group]
    assert longest_first == sorted(longest_first, reverse=True)
    if unit == "prompt":
        homes = [set(step.prompt[g].tolist()) for g in groups]
        assert sum(map(len, homes)) == units


def test_ties_keep_the_order_of_prompts_and_samples() -> None:
    step = batch([5] * 6, [1] * 6, [2, 2, 0, 0, 1, 1])
    groups = SortedEven()(view(step, setting()), np.array([8.0, 8, 8, 8, 9, 9]), 2)
    named = [[(int(step.prompt[r]), int(step.sample[r])) for r in group] for group in groups]
    assert named == [[(1, 0), (1, 1), (0, 0)], [(0, 1), (2, 0), (2, 1)]]


def test_prompts_stand_by_their_longest_predicted_response() -> None:
    step = batch([5] * 6, [1] * 6, [0, 0, 1, 1, 2, 2])
    groups = SortedEven("prompt")(view(step, setting()), np.array([5.0, 6, 9, 1, 7, 7]), 3)
    assert [step.prompt[group].tolist() for group in groups] == [[1, 1], [2, 2], [0, 0]]


def test_chunks_follow_the_batch() -> None:
    step = batch([5] * 7, [1] * 7, [3, 3, 1, 1, 1, 0, 0])
    seen_step = view(step, setting())
    unused = np.zeros(7)
    assert [g.tolist() for g in Chunked("response")(seen_step, unused, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [g.tolist() for g in Chunked("prompt")(seen_step, unused, 2)] == [[0, 1, 2, 3, 4], [5, 6]]


# Scaling.


def by_definition(work: Work, rule: MinMaxScore, most: int, assign: Any) -> list[tuple[float, Groups]]:
    """Return score and split of every allowed count, each actor decoded by itself."""
    v, cost = work.view, work.view.profile
    found = []
    for actors in range(rule.least, min(most, rule.most or most, len(v)) + 1):
        groups = assign(v, work.predicted_tokens.astype(float), actors)
        seconds = []
        for rows in groups:
            if rule.estimate == "exact":
                _, counts = decode_one(
                    cost,
                    v.prompt_tokens[rows],
                    work.predicted_tokens[rows],
                    v.tree.group[rows],
                    v.options.engine,
                    work.cached_tokens[rows],
                )
                seconds.append(counts.clock)
            else:
                base, kv = cost.decode_tables
                b = min(len(rows), cost.actor.max_running)
                longest = int(work.predicted_tokens[rows].max())
                waves = -(-len(rows) // b)
                resident = b * (float(v.prompt_tokens[rows].mean()) + longest / 2)
                seconds.append((base[b] + kv[b] * resident) * longest * waves)
        found.append((groups, seconds))
    if rule.locality != "none":
        found = [f for f in found if hidden(work, rule.locality, *f)] or found[:1]
    slowest = [max(seconds) for _, seconds in found]
    gpu_seconds = [sum(seconds) * cost.actor.gpus for _, seconds in found]

    def scaled(values: list[float], i: int) -> float:
        low, high = min(values), max(values)
        return (values[i] - low) / (high - low) if high > low else 0.0

    scores = [
        rule.weight * scaled(slowest, i) + (1 - rule.weight) * scaled(gpu_seconds, i)
        for i in range(len(found))
    ]
    return list(zip(scores, (groups for groups, _ in found), strict=True))


def hidden(work: Work, rule: str, groups: Groups, seconds: list[float]) -> bool:
    """The locality condition of RLHFless, sec. 4.5, as printed, or with KV transfers after the prefill."""
    v, cost = work.view, work.view.profile
    order = sorted(range(len(groups)), key=lambda i: (-seconds[i], i))
    end_of_first = work.prefill_seconds + seconds[order[0]]
    link_free = {"within": 0.0, "between": 0.0}
    slots = v.cluster.gpus_per_node // cost.actor.gpus
    for rank, i in enumerate(order[1:], start=1):
        name = "within" if rank < slots else "between"
        link = cost.links.within_node if name == "within" else cost.links.between_nodes
        prompts = {int(v.tree.group[r]): int(work.cached_tokens[r]) for r in groups[i]}
        model = link.seconds(cost.memory.weight_bytes)
        kv_bytes = sum(prompts.values()) * cost.memory.kv_bytes_per_token
        transfer = link.seconds(kv_bytes) if kv_bytes else 0.0
        if rule == "printed":
            if model + transfer + seconds[i] > end_of_first:
                return False
            continue
        link_free[name] = max(link_free[name], model, work.prefill_seconds) + transfer
        if link_free[name] + seconds[i] > end_of_first:
            return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    trace=traces(),
    rule=st.builds(
        MinMaxScore,
        weight=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        estimate=st.sampled_from(["paper", "exact"]),
        least=st.sampled_from([1, 2]),
        most=st.sampled_from([None, 3, 8]),
        locality=st.sampled_from(["none", "printed", "exact"]),
    ),
    assign=st.sampled_from([SortedEven(), SortedEven("prompt"), Chunked()]),
    weight_bytes=st.sampled_from([1e6, 1e9]),
    prefilled=st.sampled_from([None, 0.01, 0.5]),
    seed=st.integers(0, 99),
)
def test_the_min_max_score_picks_what_its_definition_picks(
    trace: Trace,
    rule: MinMaxScore,
    assign: Any,
    weight_bytes: float,
    prefilled: float | None,
    seed: int,
) -> None:
    """Also: decode times of overlapping splits of one batch do not disturb each other."""
    step = next(trace.batches())
    assume(len(step) >= rule.least)
    where = setting(profile(memory__weight_bytes=weight_bytes), gpus_per_node=4, learner_gpus=4)
    tokens = np.random.default_rng(seed).integers(1, 60, len(step))
    cached = np.zeros(len(step), dtype=np.int64) if prefilled is None else step.prompt_tokens
    work = Work(view(step, where), tokens, cached, prefilled or 0.0)
    chosen = rule(work, lambda actors: assign(work.view, tokens.astype(float), actors), 4)
    scored = by_definition(work, rule, 4, assign)
    best = min(score for score, _ in scored)
    # Scores that differ by rounding only are equal.
    expected = [[g.tolist() for g in groups] for score, groups in scored if score <= best + 1e-9]
    assert [g.tolist() for g in chosen] in expected


def work_of(cost: Profile, lengths: list[int], prompt: int = 5, prefill_seconds: float = 0.0) -> Work:
    n = len(lengths)
    step = batch([prompt] * n, [1] * n)
    cached = np.full(n, prompt if prefill_seconds else 0)
    return Work(view(step, setting(cost)), np.array(lengths), cached, prefill_seconds)


def picked(rule: MinMaxScore, work: Work, most: int) -> int:
    return len(rule(work, lambda n: SortedEven()(work.view, work.predicted_tokens.astype(float), n), most))


#: 2 s an iteration with two running, 1 s alone; weights take 1 s, KV 0.2 s a token.
HAND = profile(
    decode={"batch": [1, 2], "base_seconds": [1.0, 2.0], "kv_token_seconds": [0.0, 0.0]},
    prefill={"gpus": 2, "token_seconds": 0.0, "max_batch_tokens": 4096},
    memory={"weight_bytes": 10.0, "kv_bytes_per_token": 2.0},
    links={"within_node": {"bytes_per_second": 10.0}, "between_nodes": {"bytes_per_second": 10.0}},
)


def test_the_printed_locality_condition_is_too_lax() -> None:
    """Prefill 10 s, lengths 5 and 4, KV of the second actor 2 s.

    As printed: 1 + 2 + 4 <= 10 + 5. But the KV leaves at 10: 10 + 2 + 4 > 10 + 5. One actor takes 9 s.
    """
    work = work_of(HAND, [5, 4], prompt=10, prefill_seconds=10.0)
    assert picked(MinMaxScore(weight=1.0, locality="none"), work, 2) == 2
    assert picked(MinMaxScore(weight=1.0, locality="printed"), work, 2) == 2
    assert picked(MinMaxScore(weight=1.0, locality="exact"), work, 2) == 1
    short = work_of(HAND, [5, 3], prompt=10, prefill_seconds=10.0)
    assert picked(MinMaxScore(weight=1.0, locality="exact"), short, 2) == 2


def test_where_no_count_keeps_transfers_hidden_the_smallest_is_taken() -> None:
    work = work_of(HAND, [5, 5, 5], prompt=10, prefill_seconds=10.0)
    assert picked(MinMaxScore(weight=1.0, least=2, locality="exact"), work, 3) == 2


def test_ties_and_flat_scores_go_to_the_smaller_count() -> None:
    """Responses of one token each on actors that run one at a time: cost is the same for any count."""
    alone = profile(
        actor={"gpus": 2, "max_running": 1, "kv_capacity_tokens": 1000},
        decode={"batch": [1], "base_seconds": [1.0], "kv_token_seconds": [0.0]},
        prefill={"gpus": 2, "token_seconds": 0.0, "max_batch_tokens": 4096},
    )
    work = work_of(alone, [3] * 4)
    assert picked(MinMaxScore(weight=0.0), work, 4) == 1
    assert picked(MinMaxScore(weight=1.0), work, 4) == 4
    assert picked(MinMaxScore(weight=1.0), work_of(alone, [3, 3, 3]), 3) == 3
    # Two or three actors end at the same time, two blocks of one or two; three for four responses do not help.
    assert picked(MinMaxScore(weight=1.0), work, 3) == 2


def test_counts_that_the_gpus_do_not_allow_are_refused() -> None:
    work = work_of(HAND, [5, 4, 3])
    with pytest.raises(InputError, match="scaling from 4 actors on, the GPUs allow 3"):
        picked(MinMaxScore(least=4), work, 8)
    for wrong in ({"weight": 1.5}, {"weight": -0.1}, {"least": 0}):
        with pytest.raises(InputError, match="MinMaxScore"):
            MinMaxScore(**wrong)
    with pytest.raises(InputError, match="actors is 0"):
        FixedActors(0)


def test_fixed_actors_are_as_many_as_fit() -> None:
    work = work_of(HAND, [5, 4, 3, 2])
    split = [
        len(FixedActors(n)(work, lambda n: SortedEven()(work.view, np.zeros(4), n), 3)) for n in (1, 3, 9)
    ]
    assert split == [1, 3, 3]
    assert len(FixedActors()(work, lambda n: SortedEven()(work.view, np.zeros(4), n), 3)) == 3
    with pytest.raises(InputError, match="does not fit the GPUs"):
        FixedActors()(work, lambda n: (), 0)


# Placement.


def test_nearest_and_farthest_placement() -> None:
    """Two actors of four GPUs a node: the heaviest beside the learner, the others outwards."""
    where = setting(profile(actor__gpus=4), nodes=2, gpus_per_node=8)
    load = np.array([2.0, 9.0, 1.0, 5.0])
    seen_step = view(batch([5] * 4, [1] * 4), where)
    assert list(ByDistance("nearest")(seen_step, load)) == [(1, False), (0, True), (1, False), (0, False)]
    assert list(ByDistance("farthest")(seen_step, load)) == [(0, False), (1, False), (0, False), (1, False)]


def test_actors_on_the_learner_sit_on_one_node_each() -> None:
    """Twelve GPUs on nodes of eight, three an actor: two fit the first node, one the second."""
    where = setting(profile(actor__gpus=3), nodes=2, gpus_per_node=8, learner_gpus=12)
    step = batch([5] * 6, [9, 8, 7, 6, 5, 4])
    plan = Composed(name="pool", place=OnLearner()).plan(view(step, where))
    assert [(a.node, a.colocated) for a in plan.actors] == [(0, True), (0, True), (1, True)]
    assert len(list(simulate(step, Composed(name="pool", place=OnLearner()), where))) == 1


def test_actors_are_numbered_by_falling_predicted_load() -> None:
    """Chunks of short and long prompts: the long chunk becomes actor 0 and sits beside the learner."""
    history = seen([5, 5, 90, 90], prompt=PAIRS)
    made = Composed(name="chunks", scale=FixedActors(2)).plan(view(STEP, setting(), history))
    assert [a.responses.tolist() for a in made.actors] == [[2, 3], [0, 1]]
    assert [a.colocated for a in made.actors] == [True, False]


# Prewarming and prefill.


def test_prewarming_expects_the_shortest_learning_stage_so_far() -> None:
    step = view(STEP, setting())
    assert ShortestPast()(step) == (Prewarm(learning_seconds=None), 0.0)
    later = replace(step, learning_seconds=(9.0, 4.0, 6.0))
    assert ShortestPast()(later) == (Prewarm(learning_seconds=4.0), 1.0)
    assert ShortestPast(buffer_seconds=0.5, start_seconds=20.0)(later) == (
        Prewarm(learning_seconds=4.5),
        20.0,
    )


LETTERS = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "X": 6, "Y": 7}
FIVE = ["aX", "aY", "b", "abcd", "abce"]


@pytest.mark.parametrize(
    ("most", "corrected", "printed"),
    [(1, None, None), (2, 1, 1), (3, 1, 1), (4, 3, 1), (5, 4, 1), (9, 4, 1)],
)
def test_the_shared_length_as_corrected_and_as_printed(
    most: int, corrected: int | None, printed: int | None
) -> None:
    """D(1..4) = 2, 4, 4, 5. Corrected: the largest length that fits. Printed: the first one that does."""
    step = batch(
        [len(p) for p in FIVE],
        [1] * 5,
        blocks=[[LETTERS[letter] for letter in p] for p in FIVE],
        block_tokens=1,
    )
    seen_step = view(step, setting())
    for rule, limit in (("corrected", corrected), ("printed", printed)):
        prefill = DeduplicatedPrefill(max_prefixes=most, rule=rule)(seen_step)  # type: ignore[arg-type]
        assert prefill == Prefill(mode="deduplicated", gpus=4, node=0, shared_prefix_tokens=limit)


def test_without_a_bound_whole_prompts_are_prefilled() -> None:
    assert DeduplicatedPrefill()(view(STEP, setting())).shared_prefix_tokens is None


# The checker.


@dataclass
class OneActor:
    """A policy as short as the contract's docstring; subclasses do one thing wrong."""

    name: ClassVar[str] = "one"

    def rows(self, view: StepView) -> Any:
        return np.arange(len(view))

    def plan(self, view: StepView) -> Any:
        actor = ActorPlan(gpus=view.profile.actor.gpus, node=0, responses=self.rows(view))
        return Plan(
            step=view.step,
            policy=self.name,
            platform="serverless",
            actors=(actor,),
            learner=Learner(gpus=view.learner_gpus),
        )


class Forgets(OneActor):
    def rows(self, view: StepView) -> Any:
        return np.arange(len(view) - 1)


class Repeats(OneActor):
    def rows(self, view: StepView) -> Any:
        return np.append(np.arange(len(view)), 0)


class Invents(OneActor):
    def rows(self, view: StepView) -> Any:
        return np.arange(len(view) + 1)


class RollsDice(OneActor):
    dice = np.random.default_rng(1)

    def rows(self, view: StepView) -> Any:
        return self.dice.permutation(len(view))


class TakesChanceFromTheView(OneActor):
    def rows(self, view: StepView) -> Any:
        return view.rng.permutation(len(view))


class Counts(OneActor):
    calls = 0

    def rows(self, view: StepView) -> Any:
        self.calls += 1
        return np.roll(np.arange(len(view)), self.calls)


class SortsInPlace(OneActor):
    def rows(self, view: StepView) -> Any:
        view.prompt_tokens.sort()
        return np.arange(len(view))


class WritesIntoTheTree(OneActor):
    def rows(self, view: StepView) -> Any:
        view.tree.group[:] = 0
        return np.arange(len(view))


class ReturnsADict(OneActor):
    def plan(self, view: StepView) -> Any:
        return {"actors": []}


class Raises(OneActor):
    def rows(self, view: StepView) -> Any:
        raise KeyError("no such\nprompt")


class WantsANinthNode(OneActor):
    def plan(self, view: StepView) -> Any:
        plan = super().plan(view)
        return replace(plan, actors=(replace(plan.actors[0], node=8),))


class PlansAnotherStep(OneActor):
    def plan(self, view: StepView) -> Any:
        return replace(super().plan(view), step=view.step + 1)


class NeedsTheTruth(OneActor):
    def rows(self, view: StepView) -> Any:
        return view.true_tokens.argsort()  # type: ignore[union-attr]


class SaysItNeedsTheTruth(NeedsTheTruth):
    sees_true_lengths = True


class Nameless:
    def plan(self, view: StepView) -> Any:
        return OneActor().plan(view)


class Planless:
    name = "planless"


@pytest.mark.parametrize("name", ["verl", "serverless_fixed", "rlhfless", "oracle"])
def test_the_checker_accepts_shipped_policies(name: str) -> None:
    check_policy(shipped_policies()[name])


def test_the_checker_accepts_the_contracts_example_and_chance_from_the_view() -> None:
    check_policy(OneActor())
    check_policy(TakesChanceFromTheView())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Forgets(), r"step 0, policy one: response \[\S+, 2\] stands in no actor"),
        (Repeats(), r"step 0, policy one: response \[\S+, 0\] is named 2 times"),
        (Invents(), r"step 0, policy one: the plan names row 24, the batch has rows 0\.\.23"),
        (
            RollsDice(),
            "policy one: step 0: the same view gave two different plans; take chance from view.rng",
        ),
        (Counts(), "policy one: step 0: the same view gave two different plans"),
        (SortsInPlace(), "policy one: step 0: plan writes into the view"),
        (WritesIntoTheTree(), "policy one: step 0: plan writes into the view"),
        (ReturnsADict(), "policy one: step 0: plan returned dict, must return a Plan"),
        (Raises(), "policy one: step 0: plan raised KeyError: 'no such"),
        (WantsANinthNode(), r"step 0, policy one: actor 0: node 8 does not exist, nodes are 0\.\.1"),
        (PlansAnotherStep(), "policy one: step 0: the plan says step 1"),
        (NeedsTheTruth(), "policy one: step 0: plan raised AttributeError: 'NoneType' object"),
        (SaysItNeedsTheTruth(), "policy one asks for the true lengths: its name must say oracle"),
        (Nameless(), "policy Nameless: it needs an attribute name, a string"),
        (Planless(), r"policy planless: it needs a method plan\(view\)"),
    ],
)
def test_the_checker_says_what_is_wrong(policy: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        check_policy(policy)
    assert "\n" not in str(error.value)
