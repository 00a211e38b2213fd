"""The documents: what they tell a reader to run, runs.

In every document, code fenced as ``python`` is run, and so is every line that starts with ``rlhfless`` or
``python -m rlhfless`` in an indented block or one fenced as ``sh``. The blocks of a document run in their
order in one folder. A line that is to fail says so: ``# ends with status 2``. A fenced block below
``<!-- file: NAME -->`` is a file: it is written under that name first. What is not run as it stands is named
below with the reason; anything else runs.
"""

from __future__ import annotations

import glob
import os
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = {path.name: path for path in (REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")))}

#: Commands that are not run, by how they begin, and why.
NOT_RUN = {
    "rlhfless reproduce": "takes minutes; tests/test_reproduce.py runs its rows",
    "rlhfless train": "takes minutes; tests/test_train.py trains a small policy",
    "rlhfless compare policy=all": "tests/test_all_policies.py replays every policy",
    "rlhfless compare --log run.log.gz": "a log of the reader's; docs/tutorial.md runs it step by step",
    "rlhfless replay -m hydra/launcher=": "tests/test_sweep.py runs each launcher whose extra is installed",
    "rlhfless replay -m hydra/sweeper=optuna": "tests/test_sweep.py runs a search if Optuna is installed",
    "rlhfless compare select=[saa_point": "seconds of search a step; tests/test_all_policies.py replays them",
    "python -m rlhfless.scripts.study": "takes minutes; tests/test_tail_isolated.py tests the policy",
    "python -m rlhfless.scripts.regret": "takes minutes to hours; tests/test_scenarios.py tests what it calls",
}

#: Commands that run with less than the document says, all replays on the workload below.
SMALLER = {
    "rlhfless replay -m policy=verl,serverless_fixed,rlhfless,tail_isolated,oracle": ("seed=0",),
    "rlhfless replay -m policy=rlhfless policy.scale.weight=": ("seed=0",),
    "rlhfless replay -m policy=rlhfless,tail_isolated trace=deepcoder_16k": ("seed=0",),
    "rlhfless compare select=[rlhfless,tail_isolated]": ("seeds=2",),
    "rlhfless compare trace=deepcoder_16k": ("seeds=2",),
    "rlhfless compare out=": ("seeds=2",),
    "rlhfless replay policy=verl out=out/verl": ("trace.epochs=8",),
    "rlhfless replay policy=rlhfless out=out/rlhfless": ("trace.epochs=8",),
    "rlhfless compare policy._target_=": ("seeds=2",),
    "rlhfless figures out/sweep": ("--only", "cost_time"),
    "rlhfless replay -m policy=verl,rlhfless,tail_isolated trace=gsm8k_grpo,dapo_math": ("seed=0",),
}
SMALL = ("trace.prompts=16", "trace.prompts_per_step=8", "trace.epochs=2", "trace.max_response_tokens=512")


@dataclass(frozen=True)
class Block:
    """A block of a document: its first line's number, its fence's language ("" where indented), and its text."""

    line: int
    language: str
    file: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands, lines that a backslash continues put together."""
        if self.language not in ("", "sh"):
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line.strip() for line in lines if re.match(r"\s*(rlhfless|python -m rlhfless\S*) ", line)]

    @property
    def needs_data(self) -> bool:
        """Whether it reads public data that is not in the repository."""
        return "RLHFLESS_DATA" in self.text


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document: fenced ones, and lines that are indented by four or more."""
    file = None
    lines = document.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start, line = at, lines[at]
        at += 1
        if fence := re.fullmatch(r"```(\w*)", line):
            end = lines.index("```", at)
            yield Block(start + 1, fence[1] or "text", file, "\n".join(lines[at:end]) + "\n")
            file, at = None, end + 1
        elif line.startswith("    "):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            yield Block(start + 1, "", None, "\n".join(lines[start:at]) + "\n")
        elif named := re.fullmatch(r"<!-- file: (\S+) -->", line):
            file = named[1]


def is_run(command: str) -> bool:
    """Return whether a command is not among those left out."""
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


def run_command(command: str) -> None:
    """Run a command in this process, and check the status with which it ends."""
    words = shlex.split(os.path.expandvars(command), comments=True)
    arguments = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    for beginning, fewer in SMALLER.items():
        if command.startswith(beginning):
            arguments += [*(SMALL if arguments[1] in ("compare", "replay") else ()), *fewer]
    if arguments[0] == "rlhfless":
        module, rest = f"rlhfless.scripts.{arguments[1]}", arguments[2:]
    else:
        module, rest = arguments[2], arguments[3:]
    expected = re.search(r"# ends with status (\d)$", command)
    status: object = 0
    try:
        import_module(module).main(rest)
    except SystemExit as stopped:
        status = stopped.code or 0
    assert status == (int(expected[1]) if expected else 0), command


def run_block(block: Block, folder: Path) -> None:
    """Run what a block holds, in the current folder."""
    if block.file is not None:
        (folder / block.file).write_text(block.text)
    if block.language == "python":
        name = block.file or f"block_{block.line}.py"
        (folder / name).write_text(block.text)
        runpy.run_path(name, run_name="__main__")
    for command in filter(is_run, block.commands):
        run_command(command)


def of(document: str, *, needs_data: bool) -> list[Block]:
    """Return a document's blocks that read public data, or those that do not."""
    return [block for block in blocks(DOCUMENTS[document]) if block.needs_data is needs_data]


def something_runs(document: str, *, needs_data: bool) -> bool:
    """Return whether a document has a block that runs."""
    chosen = of(document, needs_data=needs_data)
    return any(block.language == "python" or any(map(is_run, block.commands)) for block in chosen)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if something_runs(d, needs_data=False)])
def test_what_a_document_says_to_run_runs(document: str, folder: Path) -> None:
    for block in of(document, needs_data=False):
        run_block(block, folder)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if something_runs(d, needs_data=True)])
def test_what_reads_public_data_runs(
    document: str, folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHFLESS_DATA", str(data_dir))
    for block in of(document, needs_data=True):
        run_block(block, folder)


def test_what_is_not_run_as_it_stands_is_in_a_document() -> None:
    """The lists above name nothing that has gone."""
    commands = [c for path in DOCUMENTS.values() for block in blocks(path) for c in block.commands]
    for beginning in (*NOT_RUN, *SMALLER):
        assert any(command.startswith(beginning) for command in commands), beginning


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS.values():
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"
