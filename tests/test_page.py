"""The HTML page: self-contained, whatever stands in it, and the report of a comparison."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from rlhfless.scripts import page as pages
from rlhfless.scripts.page import (
    ChartSection,
    ImageSection,
    LinesSection,
    TableSection,
    TextSection,
    TimelineSection,
    report_page,
)
from rlhfless.scripts.timeline import ActorWork, RunTimeline, Span, StepTimeline

SMALL = ["trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=2", "seeds=2"]
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Reader(HTMLParser):
    """Collects a page's elements, tables, headings and script data, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.data: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.data.append("")

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take text."""
        if not self.open:
            return
        self.text.setdefault(self.open[-1], []).append(data)
        if self.open[-1] == "script":
            self.data[-1] += data
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def read(page: str) -> Reader:
    """Parse a page."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def run_of(seed: int = 0, policy: str = "p") -> RunTimeline:
    """Return a run of one step."""
    span = Span("decode.0", "busy", (0, 1), 2_000_000, 3_000_000)
    step = StepTimeline(4, 2_000_000, 3_000_000, 4_000_000, (ActorWork((0, 1), 7, 7, 90),), (span,), ())
    return RunTimeline(policy, seed, 1, 2, (step,))


def test_a_page_needs_nothing_beside_itself() -> None:
    page = report_page(
        "All kinds",
        [
            TableSection("T", [{"policy": "a", "s": "1.0"}]),
            ImageSection("I", "<svg xmlns='http://www.w3.org/2000/svg'/>", "A drawing"),
            ChartSection("C", [{"type": "bar", "x": [1], "y": [2]}], {}, "A chart"),
            TimelineSection("W", [run_of()]),
            LinesSection("L", ["one"]),
            TextSection("X", "a: 1", folded=True),
        ],
    )
    reader = read(page)
    for tag, attributes in reader.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), (tag, address)
    assert "@import" not in page.split("</style>")[0]
    assert len(page) < 6_000_000


def test_a_page_without_charts_holds_no_script() -> None:
    page = report_page("Plain", [TableSection("T", [{"a": "1"}])])
    assert "<script" not in page
    assert len(page) < 20_000


def test_headings_language_and_title_are_there() -> None:
    page = report_page("A < B", [LinesSection("One", ["x"]), LinesSection("Two", ["y"])])
    reader = read(page)
    assert ("html", {"lang": "en"}) in reader.elements
    assert reader.text["title"] == ["A < B"]
    assert reader.text["h1"] == ["A < B"]
    assert reader.text["h2"] == ["One", "Two"]
    names = {attributes["id"] for _, attributes in reader.elements if "id" in attributes}
    links = [attributes["href"] for tag, attributes in reader.elements if tag == "a"]
    assert [str(link).removeprefix("#") in names for link in links] == [True, True]


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<!--", "<img src=x onerror=alert(1)>", "&amp;"]
)
def test_what_strings_say_stays_text(evil: str) -> None:
    page = report_page(
        evil,
        [
            TableSection(evil, [{evil: evil}], notes=[evil]),
            ImageSection("I", "<svg/>", evil),
            ChartSection("C", [{"name": evil}], {}, evil),
            TimelineSection("W", [run_of(policy=evil)]),
            LinesSection("L", [evil]),
            TextSection("X", evil),
        ],
    )
    reader = read(page)
    assert reader.rows[:2] == [[evil], [evil]]
    assert not any("onerror" in attributes for _, attributes in reader.elements)
    chart, timeline = (json.loads(text) for text in reader.data[:2])
    assert chart["data"][0]["name"] == timeline["runs"][0]["policy"] == evil
    assert len(reader.data) == 4  # two blocks of data, plotly.js, the page's own


def test_a_table_takes_rows_or_a_frame_and_marks_cells() -> None:
    rows = [{"policy": "a", "step s": "1.0"}, {"policy": "b", "step s": None}]
    page = report_page("T", [TableSection("T", rows, bold={(0, "step s")})])
    assert page == report_page("T", [TableSection("T", pl.DataFrame(rows), bold={(0, "step s")})])
    reader = read(page)
    assert reader.rows == [["policy", "step s"], ["a", "1.0"], ["b", ""]]
    assert reader.text["strong"] == ["1.0"]


def test_an_image_is_the_drawing_that_was_given() -> None:
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><text>ä</text></svg>"
    reader = read(report_page("I", [ImageSection("I", svg, "What it shows")]))
    image = dict(reader.elements)["img"]
    assert base64.b64decode(str(image["src"]).split(",")[1]).decode() == svg
    assert image["alt"] == "What it shows"


def test_seeds_that_make_the_page_too_big_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of(seed, policy) for policy in "ab" for seed in range(4)]
    whole = len(TimelineSection("W", runs).data)
    monkeypatch.setattr(pages, "TIMELINE_BYTES", whole // 2)
    block = json.loads(TimelineSection("W", runs).data)
    assert 0 < block["seeds_left_out"] < 4
    kept = [(run["policy"], run["seed"]) for run in block["runs"]]
    assert set(kept) == {(policy, seed) for policy in "ab" for seed in range(4 - block["seeds_left_out"])}
    monkeypatch.setattr(pages, "TIMELINE_BYTES", 1)
    assert json.loads(TimelineSection("W", runs).data)["seeds_left_out"] == 3


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small comparison."""
    out = tmp_path_factory.mktemp("compared")
    import_module("rlhfless.scripts.compare").main(
        [*SMALL, "policy=[verl,serverless_fixed,rlhfless]", f"out={out}"]
    )
    return out


def numbers(cell: str) -> list[float]:
    """Return the numbers in a cell: a mean and the ends of its interval."""
    return [float(text) for text in re.findall(r"-?\d+(?:\.\d+)?", cell)]


def test_the_tables_of_a_report_say_what_the_summary_says(compared: Path) -> None:
    summary = json.loads((compared / "summary.json").read_text())
    rows = read((compared / "report.html").read_text()).rows
    seen = 0
    for header, columns in {"step s": "step_seconds", "GPU s a step": "gpu_seconds"}.items():
        scores = next(i for i, row in enumerate(rows) if header in row)
        place = rows[scores].index(header)
        for name, row in zip(summary["policies"], rows[scores + 1 :], strict=False):
            value = summary["policies"][name]["mean"][columns]
            told = numbers(row[place])
            assert row[0] == name
            assert told == pytest.approx(
                [value[key] for key in ("mean", "low", "high")][: len(told)], abs=0.051
            )
            seen += 1
    against = next(i for i, row in enumerate(rows) if "speed-up" in row)
    for pair, row in zip(summary["comparisons"], rows[against + 1 :], strict=False):
        assert row[:2] == [pair["policy"], pair["baseline"]]
        assert numbers(row[2])[0] == pytest.approx(pair["speedup"]["mean"], abs=0.0051)
        assert numbers(row[3])[0] == pytest.approx(100 * pair["cost_reduction"]["mean"], abs=0.051)
        seen += 1
    assert seen == 6 + len(summary["comparisons"])


def test_the_timelines_of_a_report_take_as_long_as_the_steps(compared: Path) -> None:
    steps = pl.read_csv(compared / "steps.csv")
    reader = read((compared / "report.html").read_text())
    block = next(data for data in map(json.loads, reader.data[:-2]) if "runs" in data)
    told = {
        (run["policy"], run["seed"], step["step"]): step["ended"] / 1e6
        for run in block["runs"]
        for step in run["steps"]
    }
    assert len(told) == len(steps) == 3 * 2 * 6
    for row in steps.iter_rows(named=True):
        assert told[row["policy"], row["seed"], row["step"]] == pytest.approx(row["step_seconds"], abs=2e-6)


def test_a_report_names_its_configuration_and_only_the_policies_that_ran(compared: Path) -> None:
    text = "".join(read((compared / "report.html").read_text()).text["pre"])
    assert "prompts_per_step: 8" in text
    assert re.findall(r"^  (\w+):\n    _target_", text, re.MULTILINE) == [
        "verl",
        "serverless_fixed",
        "rlhfless",
    ]


def test_the_same_comparison_gives_the_same_page(compared: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "policy=[verl,serverless_fixed,rlhfless]"]
    import_module("rlhfless.scripts.compare").main([*arguments, f"out={tmp_path}"])
    first, second = ((folder / "report.html").read_text() for folder in (compared, tmp_path))
    assert first.replace(str(compared), "OUT") == second.replace(str(tmp_path), "OUT")


def test_headings_follow_each_other_in_order(compared: Path) -> None:
    levels = [
        int(tag[1])
        for tag, _ in read((compared / "report.html").read_text()).elements
        if re.fullmatch("h[1-6]", tag)
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(second <= first + 1 for first, second in pairwise(levels))
