"""One step, and the next, second by second: every number here is worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import batch, profile

from rlhfless.models.checks import check
from rlhfless.models.cluster import Cluster
from rlhfless.models.plan import ActorPlan, Learner, Migration, Plan, Prefill, Prewarm
from rlhfless.models.profile import Profile
from rlhfless.models.replay import Billing, Replay, ReplayOptions, StepOutcome
from rlhfless.traces.errors import InputError
from rlhfless.traces.trace import Trace

GRPO = ("reward", "reference", "update_actor")
PPO = ("reward", "reference", "value", "update_critic", "update_actor")
TWO_NODES = Cluster(nodes=2, gpus_per_node=8)


def costs(**changes: Any) -> Profile:
    """Half a second a decode iteration, no prefill; weights take 2 s within a node and 4 s between nodes."""
    values: dict[str, Any] = {
        "decode": {"batch": [1], "base_seconds": [0.5], "kv_token_seconds": [0.0]},
        "prefill": {"gpus": 2, "token_seconds": 0.0, "max_batch_tokens": 4096},
        "memory": {"weight_bytes": 20.0, "kv_bytes_per_token": 1.0},
        "links": {
            "within_node": {"bytes_per_second": 10.0},
            "between_nodes": {"bytes_per_second": 5.0},
        },
        "functions": {"cold_start_seconds": 5.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 100.0},
        "stages": {
            "reward": {"gpus": 0, "fixed_seconds": 0.25},
            "reference": {"gpus": 2, "fixed_seconds": 1.0},
            "value": {"gpus": 2, "fixed_seconds": 1.5},
            "update_critic": {"gpus": 4, "fixed_seconds": 3.0},
            "update_actor": {"gpus": 4, "fixed_seconds": 2.0},
        },
    }
    return profile(**values | changes)


def actor(*rows: int, node: int = 0, colocated: bool = False, prewarm: float = 0.0) -> ActorPlan:
    return ActorPlan(2, node, np.array(rows, dtype=np.int64), prewarm, colocated)


def plan(*actors: ActorPlan, step: int = 0, **rest: Any) -> Plan:
    values: dict[str, Any] = {"platform": "serverless", "learner": Learner(gpus=4)}
    return Plan(step=step, policy="by hand", actors=actors, **values | rest)


def replayed(
    steps: list[tuple[Plan, Trace]],
    cost: Profile | None = None,
    cluster: Cluster = TWO_NODES,
    stages: tuple[str, ...] = GRPO,
    **options: Any,
) -> list[StepOutcome]:
    run = Replay(cost or costs(), cluster, stages, ReplayOptions(**options))
    return [check(run.step(made, step), run.profile) for made, step in steps]


def one(made: Plan, step: Trace, *rest: Any, **options: Any) -> StepOutcome:
    return replayed([(made, step)], *rest, **options)[0]


def starts(outcome: StepOutcome) -> list[float]:
    return [outcome.stage_times[f"decode.{number}"][0] for number in range(outcome.actors)]


FOUR = batch([10, 10, 10, 10], [4, 6, 2, 2])


def test_colocated_serverful_step() -> None:
    """Actors decode for 4 and 6 iterations, then the learner's four GPUs do one stage after the other."""
    made = plan(
        actor(0, colocated=True), actor(1, 2, 3, colocated=True), platform="serverful", preparation="learner"
    )
    outcome = one(made, FOUR, None, Cluster(nodes=1, gpus_per_node=4))
    assert outcome.stage_times["decode.0"] == (0.0, 2.0)
    assert outcome.stage_times["decode.1"] == (0.0, 3.0)
    assert outcome.stage_times["reward"] == (3.0, 3.25)
    assert outcome.stage_times["reference"] == (3.0, 4.0)
    assert outcome.stage_times["update_actor"] == (4.0, 6.0)
    assert (outcome.generation_seconds, outcome.learning_seconds, outcome.step_seconds) == (3.0, 2.0, 6.0)
    assert outcome.gpu_seconds == 4 * 6
    assert outcome.busy_gpu_seconds == 2 * 2 + 2 * 3 + 4 * 1 + 4 * 2
    assert outcome.by_function["held"] == 24 - 22
    assert outcome.finish.tolist() == [2.0, 3.0, 1.0, 1.0]


def test_only_colocated_serverful_steps_pay_the_switch() -> None:
    shared = plan(actor(0, 1, 2, 3, colocated=True), platform="serverful")
    apart = plan(actor(0, 1, 2, 3), platform="serverful")
    functions = plan(actor(0, 1, 2, 3, colocated=True))
    for made, extra in ((shared, 0.5), (apart, 0.0), (functions, 0.0)):
        without, with_switch = one(made, FOUR), one(made, FOUR, switch_seconds=0.5)
        assert with_switch.step_seconds - without.step_seconds == extra


def test_every_actor_pays_the_generation_overhead() -> None:
    made = plan(actor(0, 1, colocated=True), actor(2, 3))
    outcome = one(made, FOUR, generation_overhead_seconds=0.25)
    assert starts(outcome) == [0.25, 3.25]
    # The function beside the learner is billed for it too: 0.25 s, then 3 s of decode, on two GPUs.
    held = [i for i in outcome.intervals if i.function == "decode.0"]
    assert sum(i.gpu_seconds for i in held) == 2 * 3.25


def test_weights_by_broadcast_or_in_turn() -> None:
    """Functions are ready at 1. Two take 2 s each from within the node, one takes 4 s from outside."""
    made = plan(actor(0, colocated=True), actor(1), actor(2), actor(3, node=1))
    assert starts(one(made, FOUR)) == [0.0, 3.0, 3.0, 5.0]
    assert starts(one(made, FOUR, weight_transfer="in_turn")) == [0.0, 3.0, 5.0, 5.0]


def test_two_links_with_equal_numbers_are_two_links() -> None:
    same = {"bytes_per_second": 10.0}
    made = plan(actor(0, colocated=True), actor(1), actor(2), actor(3, node=1))
    cost = costs(links={"within_node": same, "between_nodes": same})
    assert starts(one(made, FOUR, cost, weight_transfer="in_turn")) == [0.0, 3.0, 5.0, 3.0]


def test_a_link_serves_first_who_asks_first() -> None:
    """In step 2 actor 0 is cold and asks at 5, actor 1 is warm and asks at 1; both are on other nodes."""
    first = plan(actor(0, 1, 2, 3, node=2))
    second = plan(actor(0, 1, node=1), actor(2, 3, node=2), step=1)
    outcomes = replayed(
        [(first, FOUR), (second, FOUR)],
        None,
        Cluster(nodes=3, gpus_per_node=8),
        warm_at_start=False,
        weight_transfer="in_turn",
    )
    assert starts(outcomes[1]) == [9.0, 5.0]


PREFILL = {"gpus": 2, "fixed_seconds": 0.5, "token_seconds": 0.1, "max_batch_tokens": 4096}
TWO_PROMPTS = batch([30, 30, 30, 30], [4, 6, 2, 2], [0, 0, 1, 1])


def test_prefill_on_the_learner_and_kv_transfers() -> None:
    """60 distinct tokens at 0.1 s on 2 GPUs take 3 s on 4, and 0.5 s for the batch: prefill ends at 3.5.

    Actor 1 needs the KV of both prompts, 6 s on the link; actor 2 that of one, 3 s; both have weights at 3.
    """
    made = plan(
        actor(0, colocated=True), actor(1, 2), actor(3), prefill=Prefill(mode="deduplicated", gpus=4, node=0)
    )
    cost = costs(prefill=PREFILL)
    outcome = one(made, TWO_PROMPTS, cost)
    assert outcome.stage_times["prefill"] == (0.0, 3.5)
    assert starts(outcome) == [3.5, 9.5, 12.5]
    assert starts(one(made, TWO_PROMPTS, cost, kv_transfer="parallel")) == [3.5, 9.5, 6.5]
    assert outcome.prefill_tokens == 60
    assert outcome.redundant_prefill_tokens == 0
    assert outcome.by_function["prefill"] == 4 * 3.5


def test_prefill_on_some_of_the_learners_gpus() -> None:
    """On two GPUs the profile's numbers hold as they are: 6 s and 0.5 s."""
    made = plan(actor(0, 1, 2, 3, colocated=True), prefill=Prefill(mode="deduplicated", gpus=2, node=0))
    assert one(made, TWO_PROMPTS, costs(prefill=PREFILL)).stage_times["prefill"] == (0.0, 6.5)


def test_what_lies_beyond_the_shared_prefix_is_prefilled_by_the_decode_actors() -> None:
    """20 tokens of each prompt are prefilled once, the other 10 by every actor that has the prompt."""
    shared = Prefill(mode="deduplicated", gpus=4, node=0, shared_prefix_tokens=20)
    made = plan(actor(0, 2, colocated=True), actor(1, 3), prefill=shared)
    outcome = one(made, TWO_PROMPTS, costs(prefill=PREFILL))
    assert outcome.prefill_tokens == 2 * 20 + 2 * 2 * 10
    assert outcome.redundant_prefill_tokens == 2 * 10
    # Prefill of 40 tokens on 4 GPUs: 2 s and 0.5 s. Then 20 tokens on 2 GPUs, 2 s and 0.5 s, and 4 iterations.
    assert outcome.stage_times["decode.0"] == (2.5, 2.5 + 2.5 + 2.0)


def test_local_prefill_stalls_the_actor_first() -> None:
    """Two prompts of 30 tokens, the second response of each free while the first runs: 6 s and 0.5 s."""
    outcome = one(plan(actor(0, 1, 2, 3, colocated=True)), TWO_PROMPTS, costs(prefill=PREFILL))
    assert outcome.finish.tolist() == [8.5, 9.5, 7.5, 7.5]
    assert outcome.prefill_tokens == 60


def test_serverless_functions_start_up_when_they_are_needed_or_before() -> None:
    """Without prewarming each stage waits 1 s for its function; with it, start-ups are hidden."""
    made = plan(actor(0, 1, 2, 3, colocated=True))
    outcome = one(made, FOUR)
    assert outcome.stage_times["decode.0"] == (0.0, 3.0)
    assert outcome.stage_times["reference"] == (4.0, 5.0)
    assert outcome.stage_times["update_actor"] == (6.0, 8.0)
    assert outcome.by_function == {"decode": 2 * 3.0, "reference": 2 * 2.0, "update_actor": 4 * 3.0}
    assert outcome.startup_gpu_seconds == 2 + 4
    warmed = one(plan(actor(0, 1, 2, 3, colocated=True), prewarm=Prewarm()), FOUR)
    assert warmed.stage_times["reference"] == (3.0, 4.0)
    assert warmed.stage_times["update_actor"] == (4.0, 6.0)
    assert warmed.by_function == outcome.by_function


@pytest.mark.parametrize(
    ("expected", "lead", "start"),
    [
        (2.0, 1.0, 2.0),  # the learning stage takes 2 s, as expected: ready as the weights appear
        (1.5, 1.5, 2.0),  # expected too short: called early, waits half a second
        (2.5, 0.5, 2.5),  # expected too long: called late, half a second is missing
        (9.0, 0.0, 3.0),  # far too long: called when it is needed
    ],
)
def test_prewarming_counts_back_from_the_expected_end(expected: float, lead: float, start: float) -> None:
    first = plan(actor(0, 1, 2, 3))
    second = plan(actor(0, 1, 2, 3, prewarm=1.0), step=1, prewarm=Prewarm(learning_seconds=expected))
    before, after = replayed([(first, FOUR), (second, FOUR)])
    assert before.learning_seconds == 2.0
    assert starts(after) == [start]
    call = next(i for i in after.intervals if i.function == "decode.0" and i.kind == "startup")
    assert after.began - call.start == lead
    assert after.prewarmed_waiting_gpu_seconds == 2 * max(lead - 1.0, 0.0)


def test_cold_and_warm_starts() -> None:
    """The run begins cold; a second step's functions are warm if the first's release was not too long ago."""
    steps = [(plan(actor(0, 1, 2, 3)), FOUR), (plan(actor(0, 1, 2, 3), step=1), FOUR)]
    cold, warm = replayed(steps, warm_at_start=False)
    assert (cold.cold_starts, warm.cold_starts) == (3, 0)
    # 5 s start-up, 2 s weights, 3 s decode; reference 5 + 1; learning 5 + 2.
    assert cold.stage_times["decode.0"] == (7.0, 10.0)
    assert cold.step_seconds == 10 + 6 + 7
    assert warm.stage_times["decode.0"] == (3.0, 6.0)
    assert warm.step_seconds == 6 + 2 + 3
    # Released at 10 and called again at 23 by the decode function.
    forgotten = costs(
        functions={"cold_start_seconds": 5.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 12.9}
    )
    again = replayed(steps, forgotten, warm_at_start=False)[1]
    assert starts(again) == [7.0]


def test_keep_alive_is_counted_until_the_next_call_or_its_end() -> None:
    """Cold first step: decode is released at 10, reference at 16, the learner at 23, when the step ends.

    Step 2 calls decode after 13 s (2 GPUs), reference at 23 + 6 after 13 s (2 GPUs), the learner at 31 after
    8 s (4 GPUs). With a keep-alive of 10 s the first two count 10 s and are cold again, so that the learner
    is called at 23 + 10 + 6 = 39, after 16 s, and is cold as well.
    """
    steps = [(plan(actor(0, 1, 2, 3)), FOUR), (plan(actor(0, 1, 2, 3), step=1), FOUR)]
    first, second = replayed(steps, warm_at_start=False)
    assert first.keep_alive_gpu_seconds == 0
    assert second.keep_alive_gpu_seconds == 2 * 13 + 2 * 13 + 4 * 8
    short = costs(
        functions={"cold_start_seconds": 5.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 10.0}
    )
    second = replayed(steps, short, warm_at_start=False)[1]
    assert second.cold_starts == 3
    assert second.keep_alive_gpu_seconds == (2 + 2 + 4) * 10


def test_functions_that_are_never_called_again_cost_their_keep_alive() -> None:
    """Step 1 has two actors, the later steps one: the other one's 3 s count once, in the step after them."""
    short = costs(functions={"cold_start_seconds": 1.0, "warm_start_seconds": 1.0, "keep_alive_seconds": 3.0})
    two = plan(actor(0, 1), actor(2, 3))
    alone = [plan(actor(0, 1, 2, 3), step=step) for step in (1, 2, 3)]
    outcomes = replayed([(made, FOUR) for made in (two, *alone)], short)
    busy_again = [2 * 3.0 + 2 * 3.0 + 4 * 3.0] * 3  # decode, reference and learner are idle for over 3 s
    assert [o.keep_alive_gpu_seconds for o in outcomes] == [
        0.0, busy_again[0] + 2 * 3.0, busy_again[1], busy_again[2]
    ]  # fmt: skip


def test_the_billing_switches_change_only_what_they_name() -> None:
    """Step 2 of a prewarmed run: 8 GPU s of start-up, 1 of prewarmed waiting, and its keep-alive."""
    first = plan(actor(0, 1, 2, 3))
    second = plan(actor(0, 1, 2, 3, prewarm=1.5), step=1, prewarm=Prewarm(learning_seconds=2.0))

    def billed(startup: bool, waiting: bool, keep_alive: bool) -> StepOutcome:
        billing = Billing(startup=startup, prewarmed_waiting=waiting, keep_alive=keep_alive)
        return replayed([(first, FOUR), (second, FOUR)], billing=billing)[1]

    least = billed(False, False, False)
    assert least.startup_gpu_seconds == 2 * 1 + 2 * 1 + 4 * 1
    assert least.prewarmed_waiting_gpu_seconds == 2 * 0.5
    # Weights for 2 s and decode for 3 on two GPUs, reference for 1 s, learning for 2 on four.
    assert least.gpu_seconds == 2 * 5 + 2 * 1 + 4 * 2
    for startup in (False, True):
        for waiting in (False, True):
            for keep_alive in (False, True):
                outcome = billed(startup, waiting, keep_alive)
                assert outcome.gpu_seconds == (
                    least.gpu_seconds
                    + startup * least.startup_gpu_seconds
                    + waiting * least.prewarmed_waiting_gpu_seconds
                    + keep_alive * least.keep_alive_gpu_seconds
                )
                assert outcome.stage_times == least.stage_times


def test_the_learners_gpus_are_billed_while_they_wait_if_asked() -> None:
    """Of 11 s the four GPUs learn for 2 and start up for 1; actor and reference run on others."""
    made = plan(actor(0, 1, 2, 3))
    waiting = one(made, FOUR, billing=Billing(learner_waiting=True))
    assert waiting.by_function["learner_waiting"] == 4 * (11 - 3)
    assert waiting.gpu_seconds - one(made, FOUR).gpu_seconds == 4 * (11 - 3)


def test_preparation_on_the_learner_or_beside_it() -> None:
    """Reference takes 1 s and value 1.5 s: in turn on the learner's GPUs, at once on GPUs of their own."""
    serverful = {"platform": "serverful"}
    shared = one(
        plan(actor(0, 1, 2, 3, colocated=True), preparation="learner", **serverful),
        FOUR,
        None,
        TWO_NODES,
        PPO,
    )
    assert shared.stage_times["reference"] == (3.0, 4.0)
    assert shared.stage_times["value"] == (4.0, 5.5)
    apart = one(plan(actor(0, 1, 2, 3, colocated=True), **serverful), FOUR, None, TWO_NODES, PPO)
    assert apart.stage_times["reference"] == (3.0, 4.0)
    assert apart.stage_times["value"] == (3.0, 4.5)
    # The pool that is held: 4 of the learner, then 4 for reference and value, which the critic takes as well.
    assert apart.gpu_seconds == 8 * apart.step_seconds


def test_the_critic_learns_beside_the_actor_where_gpus_are_free() -> None:
    """On 8 GPUs the critic's four are free; on 4 it learns first, then the actor."""
    made = plan(actor(0, 1, 2, 3, colocated=True), platform="serverful")
    wide = one(made, FOUR, None, Cluster(nodes=1, gpus_per_node=8), PPO)
    assert wide.stage_times["update_critic"] == (4.5, 7.5)
    assert wide.stage_times["update_actor"] == (4.5, 6.5)
    assert wide.learning_seconds == 3.0
    narrow = one(made, FOUR, None, Cluster(nodes=1, gpus_per_node=4), PPO)
    # Reference on the two GPUs without an actor, value on two others: both end by 4.5 all the same.
    assert narrow.stage_times["update_critic"] == (4.5, 7.5)
    assert narrow.stage_times["update_actor"] == (7.5, 9.5)
    assert narrow.learning_seconds == 5.0


def test_stages_scale_their_token_part_with_the_learner() -> None:
    """1 s and 0.1 s a token on 4 GPUs, 52 + 14 tokens: half the token part on 8."""
    stages = {"update_actor": {"gpus": 4, "fixed_seconds": 1.0, "token_seconds": 0.1}}
    tokens = 40 + 14
    for gpus in (4, 8):
        made = plan(actor(0, 1, 2, 3, colocated=True), platform="serverful", learner=Learner(gpus=gpus))
        outcome = one(made, FOUR, costs(stages=stages), TWO_NODES, ("update_actor",))
        assert outcome.learning_seconds == pytest.approx(1.0 + 0.1 * tokens * 4 / gpus, rel=1e-12)


def test_a_step_begins_where_the_last_one_ended() -> None:
    first, second = replayed([(plan(actor(0, 1, 2, 3)), FOUR), (plan(actor(0, 1, 2, 3), step=1), FOUR)])
    assert second.began == first.step_seconds == 11.0
    assert second.stage_times == first.stage_times
    assert [i.start - 11.0 for i in second.intervals] == [i.start for i in first.intervals]


def test_migration_in_a_step() -> None:
    """Actor 1 (between nodes, ready at 5) is cut when actor 0 has an open slot and one of its two is done.

    Actor 0 decodes from 0: lengths 4 and 20, done at 2 and 10. Actor 1: lengths 2 and 8, the first done at 6.
    Its second has 10 + 2 tokens, which take 12 / 5 s between the nodes: it is there at 8.4, admitted at 8.5,
    and needs 6 more iterations.
    """
    step = batch([10, 10, 10, 10], [4, 20, 2, 8])
    made = plan(
        actor(0, 1, colocated=True), actor(2, 3, node=1), migration=Migration(rule="local", threshold=0.5)
    )
    outcome = one(made, step)
    assert outcome.stage_times["decode.0"] == (0.0, 11.5)
    assert outcome.stage_times["decode.1"] == (5.0, 6.0)
    assert outcome.release.tolist() == [11.5, pytest.approx(8.4)]
    assert outcome.finish.tolist() == [2.0, 10.0, 6.0, 11.5]
    assert (outcome.migrations, outcome.migrated_kv_bytes) == (1, 12.0)
    # Called at 0, held until its KV has left.
    assert sum(i.gpu_seconds for i in outcome.intervals if i.function == "decode.1") == pytest.approx(2 * 8.4)


def refusal(made: Plan, step: Trace = FOUR, cost: Profile | None = None) -> str:
    run = Replay(cost or costs(), TWO_NODES, GRPO)
    with pytest.raises(InputError) as error:
        run.step(made, step, "plans.jsonl: line 3")
    assert "\n" not in str(error.value)
    # The replay goes on as if the plan had not been tried.
    good = plan(actor(0, 1, 2, 3))
    after = run.step(good, FOUR)
    assert after.step_seconds == one(good, FOUR).step_seconds
    return str(error.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plan(actor(0, 1, 2)), r"response [p3, 0] stands in no actor"),
        (plan(actor(0, 1, 2, 3), actor(3)), r"response [p3, 0] is named 2 times"),
        (plan(actor(0, 1, 2, 3, 4)), "the plan names row 4, the batch has rows 0..3"),
        (plan(actor(0, 1, 2, 3, -1)), "the plan names row -1, the batch has rows 0..3"),
        (plan(), "the plan has no actors"),
        (plan(actor(0, 1, 2, 3, node=2)), "actor 0: node 2 does not exist, nodes are 0..1"),
        (
            plan(*(actor(row, node=1) for row in range(4)), actor(node=1)),
            "actor 4 asks for 2 GPUs on node 1, which has 0 left of 8",
        ),
        (plan(actor(0, 1, 2, 3), learner=Learner(gpus=9, node=1)), "the learner asks for 9 GPUs from node 1"),
        (plan(actor(0, 1, 2, 3), learner=Learner(gpus=1, node=2)), "the learner asks for 1 GPUs from node 2"),
        (
            plan(actor(0, 1, 2, 3, node=1, colocated=True)),
            "actor 0 is colocated, but node 1 has no GPU of the learner free",
        ),
        (
            plan(actor(0, 1, 2, 3), prefill=Prefill(mode="deduplicated", gpus=5)),
            "prefill asks for 5 GPUs on node 0, must be 1 to 4 of the learner's",
        ),
        (
            plan(actor(0, 1, 2, 3), prefill=Prefill(mode="deduplicated", gpus=4, node=1)),
            "prefill asks for 4 GPUs on node 1, must be 1 to 4 of the learner's, from node 0 on",
        ),
        (
            plan(ActorPlan(3, 0, np.arange(4))),
            "actor 0 has 3 GPUs, profile test holds for 2",
        ),
    ],
)
def test_plans_that_are_refused(made: Plan, message: str) -> None:
    assert refusal(made).startswith("plans.jsonl: line 3: ")
    assert message in refusal(made)


def test_a_response_that_fits_no_actor_is_refused() -> None:
    message = refusal(
        plan(actor(0, 1, 2, 3)),
        batch([10, 10, 10, 10], [4, 6, 2, 2000]),
        costs(actor={"gpus": 2, "max_running": 8, "kv_capacity_tokens": 100}),
    )
    assert message == (
        "plans.jsonl: line 3: response 3 needs 2010 KV tokens, an actor of profile test holds 100"
    )


def test_a_colocated_actor_gets_the_learners_gpus_whatever_its_number() -> None:
    made = plan(actor(0, 1), actor(2), actor(3, colocated=True))
    outcome = one(made, FOUR)
    gpus = {i.function: i.gpus for i in outcome.intervals if i.kind == "busy"}
    assert gpus["decode.2"] == (0, 1)
    assert gpus["decode.0"] == (4, 5)
    assert gpus["decode.1"] == (6, 7)


def test_actors_take_the_learners_gpus_last() -> None:
    """Node 0 has four GPUs beside the learner; the third actor needs two of the learner's."""
    made = plan(actor(0), actor(1), actor(2, 3))
    gpus = {i.function: i.gpus for i in one(made, FOUR).intervals if i.kind == "busy"}
    assert [gpus[f"decode.{number}"] for number in range(3)] == [(4, 5), (6, 7), (0, 1)]


def test_stages_on_gpus_of_their_own_share_what_is_left() -> None:
    """Reference, value and critic want 8 GPUs; with 4 left they get 1, 1 and 2; with 2 left the plan is refused."""
    stages = ("reward", "reference", "value", "update_critic", "update_actor")
    whole = Replay(profile(), Cluster(nodes=2, gpus_per_node=8), stages)
    assert whole.own_gpus(tuple(range(8, 16))) == {
        "reference": (8, 9), "value": (10, 11), "update_critic": (12, 13, 14, 15),
    }  # fmt: skip
    assert whole.own_gpus((4, 5, 6, 7)) == {"reference": (4,), "value": (5,), "update_critic": (6, 7)}
    with pytest.raises(InputError, match="does not fit the GPUs that actors and learner leave"):
        whole.own_gpus((6, 7))
    assert Replay(profile(), Cluster(nodes=1, gpus_per_node=8), ("reward", "update_actor")).own_gpus(()) == {}
