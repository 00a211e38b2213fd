"""The JSON form of a plan: it goes out and comes back, follows its schema, and is refused in one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from factories import Case, batch, cases
from hypothesis import HealthCheck, assume, given, settings

from rlhfless.models.plan import (
    ActorPlan,
    Learner,
    Migration,
    Plan,
    PlanDocument,
    Predicted,
    Prefill,
    Prewarm,
    parse_plan,
    plan_schema,
)
from rlhfless.traces.errors import InputError

STEP = batch([10, 10, 10], [4, 6, 2], [0, 0, 1], step=12)
PLAN = Plan(
    step=12,
    policy="by hand",
    platform="serverless",
    actors=(
        ActorPlan(2, 0, np.array([1, 0]), prewarm_seconds=1.5, colocated=True),
        ActorPlan(2, 1, np.array([2])),
    ),
    learner=Learner(gpus=4, node=0),
    prefill=Prefill(mode="deduplicated", gpus=4, node=0, shared_prefix_tokens=8),
    migration=Migration(rule="local", threshold=0.7, kv="recompute"),
    preparation="learner",
    prewarm=Prewarm(learning_seconds=20.0),
    predicted=Predicted(generation_seconds=18.0, gpu_seconds=210.0),
)


def same(one: Plan, other: Plan) -> bool:
    """Tell whether two plans decide the same (what was predicted of single responses is no decision)."""
    return one.document(STEP) == other.document(STEP)


def test_a_plan_comes_back_from_json() -> None:
    text = json.dumps(PLAN.document(STEP), allow_nan=False)
    back = parse_plan(json.loads(text), STEP, "plans.jsonl: line 1")
    assert same(back, PLAN)
    assert [a.responses.tolist() for a in back.actors] == [[1, 0], [2]]
    assert back.migration == PLAN.migration
    assert back.prefill == PLAN.prefill
    assert back.prewarm == PLAN.prewarm
    assert back.predicted == PLAN.predicted


def test_responses_are_named_by_prompt_and_sample_in_admission_order() -> None:
    document = PLAN.document(STEP)
    assert document["schema"] == "rlhfless.plan/1"
    assert [a["responses"] for a in document["actors"]] == [[["p0", 1], ["p0", 0]], [["p1", 0]]]
    assert "predicted_tokens" not in json.dumps(document)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_plans_of_all_policies_follow_the_schema_and_come_back(case: Case) -> None:
    try:
        steps = case.steps()
    except InputError as error:
        assume("does not fit the GPUs" not in str(error))
        raise
    for step in steps:
        document = json.loads(json.dumps(step.plan.document(step.batch), allow_nan=False))
        jsonschema.validate(document, plan_schema())
        back = parse_plan(document, step.batch, "test")
        assert back.document(step.batch) == step.plan.document(step.batch)


def test_the_shipped_schema_is_that_of_the_document() -> None:
    """After a change: json.dumps(PlanDocument.model_json_schema(), indent=2) is the text of the file."""
    assert plan_schema() == PlanDocument.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(plan_schema())


def test_the_shortest_plan_needs_no_options() -> None:
    """What has a default may be left out, by the schema and by the parser."""
    document = {
        "schema": "rlhfless.plan/1",
        "step": 12,
        "policy": "own",
        "platform": "serverful",
        "actors": [{"id": 0, "gpus": 2, "node": 0, "responses": [["p0", 0], ["p0", 1], ["p1", 0]]}],
        "learner": {"gpus": 4},
    }
    jsonschema.validate(document, plan_schema())
    plan = parse_plan(document, STEP, "test")
    assert plan.prefill == Prefill(mode="local")
    assert plan.migration == Migration(rule="none")


def set_in(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a document that sets the value at a path."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        del document[key]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("schema", to="rlhfless.plan/2"), "schema: Input should be 'rlhfless.plan/1'"),
        (without("schema"), "schema: Field required"),
        (without("learner"), "learner: Field required"),
        (set_in("colour", to="red"), "colour: Extra inputs are not permitted"),
        (set_in("migration", "colour", to="red"), "migration.colour: Extra inputs are not permitted"),
        (set_in("actors", 0, "speed", to=2), "actors.0.speed: Extra inputs are not permitted"),
        (set_in("actors", to=[]), "actors: "),
        (set_in("actors", 0, "gpus", to=0), "actors.0.gpus: Input should be greater than or equal to 1"),
        (set_in("actors", 0, "node", to=-1), "actors.0.node: Input should be greater than or equal to 0"),
        (set_in("actors", 0, "prewarm_seconds", to=-0.5), "actors.0.prewarm_seconds: "),
        (set_in("migration", "threshold", to=1.5), "migration.threshold: "),
        (set_in("migration", "threshold", to=0.0), "migration.threshold: "),
        (set_in("platform", to="cloud"), "platform: "),
        (set_in("step", to=13), "the plan is for step 13, the batch is of step 12"),
        (set_in("actors", 1, "id", to=0), "actors.id must count from 0 on, is 0, 0"),
        (set_in("actors", 0, "id", to=2), "actors.id must count from 0 on, is 2, 1"),
        (
            set_in("actors", 1, "responses", to=[["p1", 0], ["p0", 1]]),
            "response [p0, 1] is named 2 times; every response must stand in exactly one actor",
        ),
        (
            set_in("actors", 1, "responses", to=[]),
            "response [p1, 0] stands in no actor; every response must stand in exactly one actor",
        ),
        (
            set_in("actors", 1, "responses", to=[["p1", 7]]),
            "actor 1: response [p1, 7] is not in step 12",
        ),
        (
            set_in("actors", 1, "responses", to=[["nobody", 0]]),
            "actor 1: response [nobody, 0] is not in step 12",
        ),
        (set_in("actors", 1, "responses", to=[["p1"]]), "actors.1.responses.0.1: Field required"),
    ],
)
def test_wrong_plans_are_refused_in_one_line(change: Callable[[dict[str, Any]], None], message: str) -> None:
    document = copy.deepcopy(PLAN.document(STEP))
    change(document)
    with pytest.raises(InputError) as error:
        parse_plan(document, STEP, "plans.jsonl: line 4")
    assert str(error.value).startswith("plans.jsonl: line 4: " + message)
    assert "\n" not in str(error.value)
