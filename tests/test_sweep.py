"""Sweeps: cells whole or absent, finished ones not run again, the same results whatever runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from rlhfless.scripts import sweep_cells
from rlhfless.scripts.sweep_cells import clear_drafts, publish, write_run

SMALL = ("trace.prompts=24", "trace.prompts_per_step=8", "trace.epochs=2")
SWEEP = (*SMALL, "policy=verl,rlhfless,tail_isolated", "seed=range(2)")


def run(*arguments: str) -> None:
    """Run ``rlhfless replay`` in this process."""
    import_module("rlhfless.scripts.replay").main(list(arguments))


def failing(*arguments: str) -> int:
    """Run ``rlhfless replay``, which ends with a status, and return the status."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def command(*arguments: str) -> list[str]:
    """Return the command of a replay in a process of its own."""
    code = "import sys; from rlhfless.scripts import cli; sys.argv[0] = 'rlhfless'; cli.main()"
    return [sys.executable, "-c", code, "replay", *arguments]


def in_process(*arguments: str) -> str:
    """Run a replay in a process of its own and return what it printed."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(folder: Path) -> dict[str, Path]:
    """Return the folders of a sweep, hidden ones left out."""
    return {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}


def results(folder: Path) -> dict[tuple[str, str], bytes]:
    """Return the content of every file of every cell, measured wall times left out."""
    return {
        (name, file.name): file.read_bytes()
        for name, cell in cells(folder).items()
        for file in cell.iterdir()
        if file.name != "timings.json"
    }


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep that ran one cell after the other."""
    folder = tmp_path_factory.mktemp("serial")
    run("-m", *SWEEP, f"out={folder}")
    return folder


def test_a_cell_says_what_it_ran(serial: Path) -> None:
    assert len(cells(serial)) == 6
    for cell in cells(serial).values():
        assert {"run.yaml", "summary.json", "steps.csv", "plans.jsonl", "timeline.json"} <= set(
            os.listdir(cell)
        )
        told = yaml.safe_load((cell / "run.yaml").read_text())
        summary = json.loads((cell / "summary.json").read_text())
        assert told["version"] == import_module("importlib.metadata").version("rlhfless")
        assert told["verb"] == "replay"
        assert (told["seed"], told["config"]["policy"]["name"]) == (summary["seed"], summary["policy"])
        assert told["config"]["trace"]["prompts"] == 24
        assert f"seed={told['seed']}" in told["overrides"]
        assert cell.name.endswith(told["key"][:16])


def test_a_recorded_run_runs_again(serial: Path, tmp_path: Path) -> None:
    for cell in list(cells(serial).values())[:2]:
        run("--from", str(cell / "run.yaml"), f"out={tmp_path / cell.name}")
        for name in ("summary.json", "steps.csv", "plans.jsonl"):
            assert (tmp_path / cell.name / name).read_bytes() == (cell / name).read_bytes()
        again = yaml.safe_load((tmp_path / cell.name / "run.yaml").read_text())
        told = yaml.safe_load((cell / "run.yaml").read_text())
        assert {k: again[k] for k in ("key", "config")} == {k: told[k] for k in ("key", "config")}


def test_a_recorded_run_is_refused_where_it_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("verb: replay\n")
    assert failing("--from", str(tmp_path / "run.yaml")) == 2
    assert "a run says key, verb and config" in capsys.readouterr().err
    assert failing("--from", str(tmp_path / "none.yaml")) == 2


def test_the_same_sweep_again_computes_nothing(serial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for cell in cells(serial).values() for path in cell.iterdir()}
    run("-m", "seed=0,1", *SMALL, "policy=rlhfless,tail_isolated,verl", f"out={serial}")  # in another order
    assert "6 cells, 0 computed, 6 finished before, 0 failed" in capsys.readouterr().out
    assert before == {
        path: path.stat().st_mtime_ns for cell in cells(serial).values() for path in cell.iterdir()
    }


def test_a_changed_file_or_policy_never_takes_an_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.yaml"
    shipped = Path(import_module("rlhfless.conf").__file__).parent / "profile" / "l40s_qwen2.5-3b_tp2.yaml"  # type: ignore[arg-type]
    values = yaml.safe_load(shipped.read_text())
    profile.write_text(yaml.safe_dump(values))
    own = tmp_path / "own_sweep_policy.py"
    source = (
        "from rlhfless.policies import Composed, FixedActors\n"
        "class Mine(Composed):\n    def __init__(self): super().__init__(name='mine', scale=FixedActors(ACTORS))\n"
    )
    own.write_text(source.replace("ACTORS", "1"))
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "profile=file", f"profile.file={profile}", "policy._target_=own_sweep_policy.Mine"]

    def computed() -> int:
        capsys.readouterr()
        run("-m", *arguments, "seed=0", f"out={tmp_path / 'out'}")
        return int(capsys.readouterr().out.split(" computed")[0].rsplit(" ", 1)[1])

    assert (computed(), computed()) == (1, 0)
    values["decode"]["host_overhead_seconds"] = 0.001
    profile.write_text(yaml.safe_dump(values))
    assert (computed(), computed()) == (1, 0)
    own.write_text(source.replace("ACTORS", "2"))
    assert (computed(), computed()) == (1, 0)
    monkeypatch.setattr(sweep_cells, "package_digest", lambda: "other code")
    assert (computed(), computed()) == (1, 0)
    assert len(cells(tmp_path / "out")) == 4


def test_a_failing_cell_is_named_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that breaks, and a value that only one policy has, fail in their cells alone."""
    monkeypatch.setenv("BROKEN", "1")
    (tmp_path / "broken_policy.py").write_text(
        "import os\nfrom rlhfless.policies import Composed\n"
        "class Mine(Composed):\n"
        "    def __init__(self, at): super().__init__(name='mine'); object.__setattr__(self, 'at', at)\n"
        "    def plan(self, view):\n"
        "        if view.step == self.at and os.environ['BROKEN'] == '1': raise KeyError('lost')\n"
        "        return super().plan(view)\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ("-m", *SMALL, "policy._target_=broken_policy.Mine", "policy.at=2,99", "out=out")
    assert failing(*arguments) == 1
    printed = capsys.readouterr()
    assert "2 cells, 1 computed, 0 finished before, 1 failed" in printed.out
    assert printed.err.count("\n") == 1
    assert "policy.at=2" in printed.err
    assert "KeyError: 'lost'" in printed.err
    failed = [cell for cell in cells(tmp_path / "out").values() if (cell / "failure.json").is_file()]
    assert len(failed) == 1
    assert os.listdir(failed[0]) == ["failure.json"]
    told = json.loads((failed[0] / "failure.json").read_text())
    assert told["error"] == "KeyError: 'lost'"
    assert told["config"]["policy"]["at"] == 2
    monkeypatch.setenv("BROKEN", "0")
    run(*arguments)
    assert "1 computed, 1 finished before, 0 failed" in capsys.readouterr().out
    assert not (failed[0] / "failure.json").exists()
    assert (failed[0] / "summary.json").is_file()


def test_bad_input_of_the_whole_sweep_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (("policy=verl,verk",), "policy verk does not exist: did you mean verl?"),
        (("policy.migration.treshold=0.5,0.7",), "did you mean threshold?"),
        (("polcy=verl,rlhfuse",), "did you mean policy?"),
        (("policy.scale.weight=interval(0,1)",), "needs a search"),
    ):
        assert failing("-m", *SMALL, *arguments, f"out={tmp_path / 'out'}") == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1, printed.err
        assert message in printed.err
        assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_killed_sweep_goes_on_where_it_stopped(serial: Path, tmp_path: Path) -> None:
    arguments = ("-m", *SWEEP, f"out={tmp_path}")
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, start_new_session=True)
    while len(cells(tmp_path)) < 2 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = cells(tmp_path)
    assert 2 <= len(done) < 6
    for name, cell in done.items():
        assert sorted(os.listdir(cell)) == sorted(os.listdir(serial / name))
    left = tmp_path / f"{sweep_cells._DRAFT}dead"
    left.mkdir()
    (left / "run.yaml").write_text("half a ")
    printed = in_process(*arguments)
    assert f"6 cells, {6 - len(done)} computed, {len(done)} finished before, 0 failed" in printed
    assert results(tmp_path) == results(serial)
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        ("joblib", "hydra_plugins.hydra_joblib_launcher"),
        ("submitit_local", "hydra_plugins.hydra_submitit_launcher"),
        ("ray", "ray"),
    ],
)
def test_every_launcher_gives_the_same_cells(
    serial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, module: str
) -> None:
    package, _, _ = module.rpartition(".")
    if (package and importlib.util.find_spec(package) is None) or importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Ray keeps a token there
    one = "seed=0" if launcher == "submitit_local" else "seed=range(2)"  # a process each
    printed = in_process("-m", *SWEEP[:-1], one, f"hydra/launcher={launcher}", f"out={tmp_path / 'out'}")
    assert f"{3 if one == 'seed=0' else 6} computed, 0 finished before, 0 failed" in printed
    own = results(tmp_path / "out")
    assert own == {key: value for key, value in results(serial).items() if key in own}
    assert {name for name, _ in own} == {n for n in cells(serial) if one == "seed=range(2)" or "-seed0-" in n}


@pytest.mark.slow
def test_a_search_minimises_a_score_and_repeats(tmp_path: Path) -> None:
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("optuna is not installed")
    arguments = (
        *("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1"),
        *(*SMALL, "policy.scale.most=range(1,5)", "optimize=step_seconds", f"out={tmp_path}"),
    )
    in_process(*arguments)
    scores = [
        json.loads((cell / "summary.json").read_text())["mean"]["step_seconds"]
        for cell in cells(tmp_path).values()
        if cell.is_dir()
    ]
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())["best_value"]
    assert best == pytest.approx(min(scores), rel=1e-9)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/run.yaml")}
    in_process(*arguments)  # the same trials, found finished
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/run.yaml")}


def test_a_folder_appears_whole_and_replaces_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    publish(folder, {"failure.json": "{}"})
    publish(folder, {"run.yaml": "key: 1", "a.csv": "1"})
    assert sorted(os.listdir(folder)) == ["a.csv", "run.yaml"]
    assert os.listdir(tmp_path) == ["cell"]


def test_a_draft_in_use_is_left_alone(tmp_path: Path) -> None:
    draft, lock = sweep_cells._locked_draft(tmp_path)
    clear_drafts(tmp_path)
    assert draft.is_dir()
    os.close(lock)
    clear_drafts(tmp_path)
    assert not draft.exists()


def test_a_run_leaves_other_files_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_run(folder, {"run.yaml": "key: 1", "a.csv": "1", "old.csv": "1"})
    write_run(folder, {"run.yaml": "key: 2", "a.csv": "2", "old.csv": "2"})
    (folder / "notes.txt").write_text("mine")
    write_run(folder, {"run.yaml": "key: 3", "a.csv": "3"})
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "run.yaml").read_text() == "key: 3"
    assert (folder / "a.csv").read_text() == "3"
