"""The report of a comparison in headless Chromium: it opens alone, its timeline reacts, its numbers are right.

Needs the packages ``playwright`` and, of the system, ``chromium``; skipped where one is missing. RLHFLESS_CHROMIUM
may name the browser's program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl
import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: no browser tests"
)
PROGRAM = os.environ.get("RLHFLESS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed: no browser tests")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
POLICIES = ["verl", "serverless_fixed", "rlhfless"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a comparison of three policies and two seeds, in which responses migrate."""
    out = tmp_path_factory.mktemp("compared")
    small = ["trace.prompts=192", "trace.prompts_per_step=64", "trace.epochs=2", "seeds=2"]
    import_module("rlhfless.scripts.compare").main([*small, f"policy=[{','.join(POLICIES)}]", f"out={out}"])
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=PROGRAM, headless=True, args=FLAGS)
        yield started
        started.close()


@dataclass
class Opened:
    """A page, and what it said and asked for since it was opened."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def plot(self, number: int = 0) -> Any:
        """Return a timeline's chart."""
        return self.page.locator(".timeline-plot").nth(number)

    def shown_range(self, number: int = 0) -> list[float]:
        """Return the ends of a timeline's axis of time."""
        limits: list[float] = self.plot(number).evaluate("plot => plot._fullLayout.xaxis.range")
        return limits

    def choose(self, name: str, value: object) -> None:
        """Choose in one of the timeline's lists."""
        self.page.select_option(f"select[name={name}]", str(value))

    def title(self, number: int = 0) -> str:
        """Return a timeline's heading."""
        return str(self.page.locator(".run h3").nth(number).inner_text())

    def point_at(self, text: str, function: str) -> str:
        """Move the mouse over the bar that bears a text, and return the details of the function that appear."""
        plot = self.plot()
        plot.scroll_into_view_if_needed()
        box = plot.locator(".bartext", has_text=re.compile(f"^{text}$")).first.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2 - 2, box["y"] + box["height"] / 2)
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        label = plot.locator(".hoverlayer .hovertext", has_text=function)
        label.wait_for(timeout=5000)
        return str(label.text_content())


@pytest.fixture(scope="module", params=[1000, 1600], ids=lambda width: f"{width}px")
def loaded(request: pytest.FixtureRequest, browser: Any, folder: Path) -> Iterator[Opened]:
    """Open the report at a width, and wait until its timelines are drawn."""
    page = browser.new_page(viewport={"width": request.param, "height": 1000})
    result = Opened(page)
    page.on("console", lambda message: result.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: result.said.append(str(error)))
    page.on("request", lambda asked: result.asked.append(asked.url))
    page.goto((folder / "report.html").as_uri())
    page.locator(".timeline-plot .barlayer").nth(1).wait_for(state="attached")
    yield result
    page.close()


@pytest.fixture
def opened(loaded: Opened, folder: Path) -> Iterator[Opened]:
    """Return the opened report with its first choices; whatever a test does there, it says and asks for nothing."""
    for name, value in (("policy", "verl"), ("second", "rlhfless"), ("seed", 0), ("step", 0)):
        loaded.choose(name, value)
    yield loaded
    assert loaded.said == []
    assert [url for url in loaded.asked if not url.startswith("data:")] == [(folder / "report.html").as_uri()]


def test_it_opens_with_two_policies_beside_each_other(loaded: Opened) -> None:
    assert [loaded.title(number) for number in (0, 1)] == ["verl, step 0, seed 0", "rlhfless, step 0, seed 0"]
    assert (
        loaded.page.title()
        == loaded.page.locator("h1").inner_text()
        == "Comparison of policies on gsm8k_grpo"
    )


def test_nothing_is_wider_than_the_page(opened: Opened) -> None:
    wide, room = opened.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= room
    drawn = opened.plot().evaluate("plot => [plot._fullLayout.width, plot.parentElement.clientWidth]")
    assert drawn[0] == pytest.approx(drawn[1], abs=1)


def test_pointing_at_a_bar_shows_what_it_is(opened: Opened, folder: Path) -> None:
    assert opened.title() == "verl, step 0, seed 0"
    told = opened.point_at("decode 1", "decode.1")
    assert "GPU 2, 3" in told
    assert re.search(r"\d responses assigned", told)
    assert re.search(r"\d+ completed here, of [\d,]+ tokens", told)
    first = pl.read_csv(folder / "steps.csv").row(0, named=True)
    stage = opened.point_at("update_actor", "update_actor")
    assert "learning" in stage
    assert float(re.findall(r"to (\d+\.\d+) s", stage)[0]) == pytest.approx(first["step_seconds"], abs=0.006)


def test_dragging_zooms_and_a_double_click_resets(opened: Opened) -> None:
    before = opened.shown_range()
    opened.plot().scroll_into_view_if_needed()
    area = opened.plot().locator(".nsewdrag").first.bounding_box()
    y = area["y"] + area["height"] / 2
    opened.page.mouse.move(area["x"] + 0.3 * area["width"], y)
    opened.page.mouse.down()
    opened.page.mouse.move(area["x"] + 0.5 * area["width"], y, steps=5)
    opened.page.mouse.up()
    opened.page.wait_for_timeout(200)
    zoomed = opened.shown_range()
    length = before[1] - before[0]
    assert zoomed[0] == pytest.approx(before[0] + 0.3 * length, abs=0.02 * length)
    assert zoomed[1] == pytest.approx(before[0] + 0.5 * length, abs=0.02 * length)
    opened.page.mouse.dblclick(area["x"] + 0.5 * area["width"], y)
    opened.page.wait_for_timeout(500)
    assert opened.shown_range() == pytest.approx(before)


def test_choosing_changes_what_is_drawn(opened: Opened, folder: Path) -> None:
    steps = pl.read_csv(folder / "steps.csv")

    def line() -> str:
        return str(opened.page.locator(".run p").first.inner_text())

    seen = set()
    for policy, seed, step in (
        ("verl", 0, 0),
        ("verl", 0, 3),
        ("rlhfless", 1, 3),
        ("serverless_fixed", 1, 5),
    ):
        opened.choose("policy", policy)
        opened.choose("seed", seed)
        opened.choose("step", step)
        assert opened.title() == f"{policy}, step {step}, seed {seed}"
        row = steps.row(
            by_predicate=(pl.col("policy") == policy) & (pl.col("seed") == seed) & (pl.col("step") == step),
            named=True,
        )
        told = line()
        assert float(re.findall(r"step (\S+) s", told)[0]) == pytest.approx(row["step_seconds"], abs=0.006)
        assert float(re.findall(r"(\S+) busy", told)[0]) == pytest.approx(row["busy_gpu_seconds"], abs=0.06)
        assert int(re.findall(r"(\S+) responses migrated", told)[0]) == row["migrations"]
        seen.add(opened.plot().evaluate("plot => JSON.stringify(plot.data.map(trace => trace.x))"))
    assert len(seen) == 4
    opened.page.click("button[name=back]")
    assert opened.title() == "serverless_fixed, step 4, seed 1"
    opened.page.click("button[name=forward]")
    assert opened.title() == "serverless_fixed, step 5, seed 1"
    assert opened.page.locator("button[name=forward]").is_disabled()


def test_two_policies_share_the_scale_of_time(opened: Opened) -> None:
    assert opened.shown_range(0) == opened.shown_range(1)
    opened.choose("second", "")
    assert opened.page.locator(".timeline-plot").count() == 1
    opened.choose("second", "serverless_fixed")
    assert opened.title(1) == "serverless_fixed, step 0, seed 0"


def test_a_migration_is_drawn_and_says_what_moved(opened: Opened, folder: Path) -> None:
    steps = pl.read_csv(folder / "steps.csv").filter((pl.col("policy") == "rlhfless") & (pl.col("seed") == 0))
    row = steps.filter(pl.col("migrations") > 0).row(0, named=True)
    opened.choose("policy", "rlhfless")
    opened.choose("step", row["step"])
    moves = opened.plot().evaluate("plot => plot.data.find(trace => trace.name === 'migration')")
    # Every migration has two ends with the same details.
    told = moves["customdata"][::2]
    assert told == moves["customdata"][1::2]
    assert sum(int(re.findall(r"<b>(\d+) responses", text)[0]) for text in told) == row["migrations"]
    assert opened.plot().locator(".scatterlayer .point").count() == 2 * len(told)


def test_the_tables_show_the_numbers_of_the_summary(opened: Opened, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    tables = opened.page.locator("section.table table").evaluate_all(
        "tables => tables.map(table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText)))"
    )
    head, *rows = next(table for table in tables if "step s" in table[0])
    assert [row[0] for row in rows] == POLICIES
    for header, column in (("step s", "step_seconds"), ("generation s", "generation_seconds")):
        for row in rows:
            told = [float(text) for text in re.findall(r"\d+\.\d+", row[head.index(header)])]
            value = summary["policies"][row[0]]["mean"][column]
            assert told == pytest.approx(
                [value[key] for key in ("mean", "low", "high")][: len(told)], abs=0.0051
            )
    head, *rows = next(table for table in tables if "speed-up" in table[0])
    for row, pair in zip(rows, summary["comparisons"], strict=True):
        assert row[:2] == [pair["policy"], pair["baseline"]]
        assert float(row[2].split("x")[0]) == pytest.approx(pair["speedup"]["mean"], abs=0.0051)


def test_the_charts_show_the_numbers_of_the_summary(opened: Opened, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    chart = opened.page.locator("section.chart .plot").first
    for trace in chart.evaluate("plot => plot.data"):
        mean = summary["policies"][trace["name"]]["mean"]
        assert trace["x"] == pytest.approx([mean["step_seconds"]["mean"]])
        assert trace["y"] == pytest.approx([mean["gpu_seconds"]["mean"]])


def test_the_timeline_is_there_as_a_table_too(opened: Opened) -> None:
    opened.page.click(".timeline-panel summary")
    rows = opened.page.locator(".timeline-panel details tr")
    assert rows.first.inner_text().split()[:2] == ["policy", "function"]
    assert rows.count() > 10
    assert rows.nth(1).is_visible()
