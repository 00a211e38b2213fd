"""The timeline: what it says of a step, its file in the trace event format, and its drawing."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from factories import Case, batch, cases, setting
from hypothesis import HealthCheck, assume, given, settings

from rlhfless.models.plan import ActorPlan, Learner, Plan
from rlhfless.models.replay import Billing
from rlhfless.policies import Migration, SimulatedStep, StepView, simulate
from rlhfless.scripts import draw_timeline
from rlhfless.scripts.timeline import (
    HOLDING,
    LOOKS,
    RunTimeline,
    Span,
    StepTimeline,
    look_of,
    read_trace_events,
    trace_events,
)
from rlhfless.traces.errors import InputError

SCHEMA = json.loads(Path(__file__).with_name("trace_events.schema.json").read_text())

quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class TwoActors:
    """Two actors beside each other; the first has the short responses, and sends what is left to the second."""

    name = "two_actors"

    def plan(self, view: StepView) -> Plan:
        """Cut the batch in halves."""
        halves = np.array_split(np.arange(len(view)), 2)
        return Plan(
            step=view.step,
            policy=self.name,
            platform="serverless",
            actors=tuple(ActorPlan(gpus=2, node=1, responses=rows) for rows in halves),
            learner=Learner(gpus=4),
            migration=Migration(rule="local", threshold=0.5, keep_first=False),
        )


def two_actors() -> tuple[list[SimulatedStep], RunTimeline]:
    """Return a run in which responses migrate, and its timeline."""
    lengths = [5, 6, 300, 90, 100, 400]
    trace = batch([20] * 12, lengths + lengths[::-1], step=[0] * 6 + [1] * 6, algorithm="grpo")
    on = setting()
    steps = list(simulate(trace, TwoActors(), on))
    assert sum(step.outcome.migrations for step in steps) > 0
    return steps, RunTimeline.of(steps, on.cluster, "two_actors", seed=3)


def gpu_seconds(step: StepTimeline, *kinds: str) -> float:
    """Add up GPUs times seconds of some kinds of spans."""
    return sum(len(s.gpus) * (s.end - s.start) for s in step.spans if s.kind in kinds) / 1e6


def slack(step: StepTimeline) -> float:
    """Return what rounding every end of every span to a microsecond can add up to."""
    return 1e-6 * (1 + sum(len(span.gpus) + 1 for span in step.spans)) * 2


def replayed(case: Case, **changes: Any) -> list[SimulatedStep]:
    """Replay a drawn run; those whose policy finds no room for an actor on the drawn GPUs are not of interest."""
    try:
        return case.steps(**changes)
    except InputError as error:
        assume("does not fit the GPUs" not in str(error) and "GPUs of their own" not in str(error))
        raise


def timeline_of(case: Case, steps: list[SimulatedStep]) -> RunTimeline:
    """Return the timeline of a drawn case."""
    return RunTimeline.of(steps, case.setting.cluster, case.policy.name)


@quick
@given(cases())
def test_what_is_held_adds_up_to_the_billed_gpu_seconds(case: Case) -> None:
    options = replace(case.setting.options, billing=Billing())
    steps = replayed(case, setting=replace(case.setting, options=options))
    for step, drawn in zip(steps, timeline_of(case, steps).steps, strict=True):
        assert gpu_seconds(drawn, *HOLDING) == pytest.approx(step.outcome.gpu_seconds, abs=slack(drawn))
        assert gpu_seconds(drawn, "busy") == pytest.approx(step.outcome.busy_gpu_seconds, abs=slack(drawn))
        assert (drawn.ended - drawn.began) / 1e6 == pytest.approx(step.outcome.step_seconds, abs=2e-6)


@quick
@given(cases())
def test_the_file_meets_its_schema_and_nothing_overlaps_on_a_thread(case: Case) -> None:
    run = timeline_of(case, replayed(case))
    document = json.loads(trace_events(run))
    jsonschema.validate(document, SCHEMA)
    events = document["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for held in threads.values():
        assert all(second[0] >= first[1] for first, second in pairwise(sorted(held)))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            pairs[event["cat"], event["id"]].append(event)
    for pair in pairs.values():
        assert [event["ph"] for event in pair] == ["b", "e"]
        assert pair[0]["ts"] <= pair[1]["ts"]


@quick
@given(cases())
def test_reading_the_file_gives_the_run_back(case: Case) -> None:
    run = timeline_of(case, replayed(case))
    assert read_trace_events(trace_events(run), "timeline.json") == run


@quick
@given(cases())
def test_actors_complete_what_they_were_assigned_and_sent_less_what_left(case: Case) -> None:
    steps = replayed(case)
    for step, drawn in zip(steps, timeline_of(case, steps).steps, strict=True):
        assert sum(actor.assigned for actor in drawn.actors) == step.outcome.launched
        assert sum(move.responses for move in drawn.moves) == step.outcome.migrations
        for number, actor in enumerate(drawn.actors):
            arrived = sum(move.responses for move in drawn.moves if move.target == number)
            left = sum(move.responses for move in drawn.moves if move.source == number)
            if actor.completed is not None and step.plan.deliver_prompts is None:
                assert actor.completed == actor.assigned + arrived - left
        if step.plan.migration.rule != "dispatch" and step.outcome.delivered.all():
            assert sum(actor.tokens or 0 for actor in drawn.actors) == step.outcome.response_tokens


def test_a_transfer_lies_in_the_time_in_which_its_actor_waits() -> None:
    steps, run = two_actors()
    sent = [span for step in run.steps for span in step.spans if span.kind == "weights"]
    assert len(sent) == 2 * len(steps)
    for step in run.steps:
        waits = [span for span in step.spans if span.kind == "wait"]
        for span in (span for span in step.spans if span.kind == "weights"):
            held = [w for w in waits if w.gpus == span.gpus and w.start <= span.start and span.end <= w.end]
            assert len(held) == 1, span


def test_a_migration_is_an_event_between_its_actors() -> None:
    _, run = two_actors()
    moves = [move for step in run.steps for move in step.moves]
    events = json.loads(trace_events(run))["traceEvents"]
    told = [event for event in events if event.get("cat") == "migration" and event["ph"] == "b"]
    assert [(e["args"]["source"], e["args"]["target"], e["args"]["responses"]) for e in told] == [
        move[:3] for move in moves
    ]
    assert [event["ts"] for event in told] == [move.sent for move in moves]


def test_stages_are_drawn_as_what_they_are() -> None:
    names = {
        function: LOOKS[look_of(Span(function, "busy", (0,), 0, 1))].name
        for function in ("prefill", "decode.3", "reference", "reward.early", "update_actor", "update_critic")
    }
    assert list(names.values()) == ["prefill", "decode", "preparation", "preparation", "learning", "learning"]
    assert LOOKS[look_of(Span("decode.3", "wait", (0,), 0, 1))].name == "wait"
    assert len({(look.color, look.pattern, look.thin) for look in LOOKS}) == len(LOOKS)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"traceEvents": []}', '{"otherData": {"nodes": 1}, "traceEvents": [{"ph": "X"}]}']
)
def test_a_file_of_another_kind_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^there\.json: no timeline written by rlhfless: .*$"):
        read_trace_events(text, "there.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a run's timeline."""
    (tmp_path / "timeline.json").write_text(trace_events(two_actors()[1]))
    return tmp_path


def test_a_step_is_drawn_twice_to_the_same_bytes(folder: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_timeline.main([str(folder), "--step", "1", "--out", str(folder / name)])
    drawn = (folder / "a.svg").read_text()
    assert drawn == (folder / "b.svg").read_text()
    assert "two_actors, step 1" in drawn
    draw_timeline.main([str(folder / "timeline.json"), str(folder), "--out", str(folder / "a.png")])
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "7", "--out", "a.svg"], "no step 7, steps are 0 to 1"),
        (["--out", "a.pdf"], "must end in .svg or .png"),
    ],
)
def test_a_drawing_that_cannot_be_is_refused(
    arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        draw_timeline.main([str(folder), *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
