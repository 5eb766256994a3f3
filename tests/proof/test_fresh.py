"""Fresh processes: how functions get there, what a kill is, and what comes back when something goes wrong."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt.proof.runs import STRAIGHT, Job
from safeckpt.proof.workers import Functions, Worker
from tests.proof import loops

MODULE = """
import os, torch
from tests.proof.loops import build_small, small_step

def step(c):
    with open(FOLDER + "/pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    print("noise on standard output")
    return small_step(c)
"""

SCRIPT = """
import safeckpt
from tests.proof.loops import build_small, small_step

COUNT = 0

def train_step(components):
    global COUNT
    COUNT += 1
    return small_step(components, scale=1.0 + 1.0 / COUNT)

if __name__ == "__main__":
    report = safeckpt.prove_resume(build_small, train_step, steps=6, kill_at=3, repeats=1)
    print(report.to_json())
"""


def module_from(path: Path, name: str) -> types.ModuleType:
    """Import a file that no path leads to."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_each_run_has_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Straight, killed and resumed run are three processes, none of them this one, and an exact loop is exact."""
    path = tmp_path / "known_by_its_file_only.py"
    path.write_text(f"FOLDER = {str(tmp_path)!r}\n" + MODULE)
    module = module_from(path, path.stem)
    seen: list[str] = []
    report = safeckpt.prove_resume(
        loops.build_small, module.step, steps=6, kill_at=4, repeats=1, in_process=False, progress=seen.append
    )
    report.assert_exact()
    assert report.in_process is None
    pids = (tmp_path / "pids").read_text().split()
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [6, 4, 2]
    assert str(os.getpid()) not in pids
    assert seen == ["straight run 1 of 1", "run to be killed after step 4", "resume after step 4"]
    assert "killed with SIGKILL after the save, resumed in a fresh process" in " ".join(str(report).split())
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_script_with_a_guard_is_proven_in_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Functions of `__main__` are found in a new process too, where a global counter starts over and is named."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    runpy.run_path(str(path), run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    assert report["in_process"] is None
    assert not report["exact"]
    assert report["first_divergence"] == 0
    assert report["diverged_component"] == "__main__.COUNT"
    assert (report["culprit"]["straight"], report["culprit"]["resumed"]) == ("3", "0")


def run_in_worker(build: Any, step: Any, folder: Path) -> Any:
    functions = Functions.of((build, step, None))
    assert isinstance(functions, Functions)
    worker = Worker()
    try:
        return worker.run(Job(STRAIGHT, 5), functions, folder / "record")
    finally:
        worker.close()


def test_error_in_a_process_is_raised_here_with_its_traceback(tmp_path: Path) -> None:
    """What the user's code raises there is raised here, and a note has run and traceback."""
    with pytest.raises(KeyError, match="no such batch") as caught:
        run_in_worker(loops.build_accumulating, functools.partial(loops.failing_step, at=2), tmp_path)
    (note,) = caught.value.__notes__
    assert note.startswith("In the proof's straight run, in a process of its own:\nTraceback")
    assert "failing_step" in note


@pytest.mark.slow
def test_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    """A process that is ended from outside proves nothing, and the error says how it ended."""
    with pytest.raises(safeckpt.ProofError, match="a last word") as caught:
        run_in_worker(loops.build_small, loops.dying_step, tmp_path)
    assert (caught.value.run, caught.value.exit_code) == ("straight run", -signal.SIGTERM)


def test_closures_are_proven_in_this_process_and_the_report_says_so() -> None:
    """A lambda cannot be imported by name: the report names the reason and what it cannot see."""
    report = safeckpt.prove_resume(loops.build_small, lambda c: loops.small_step(c), steps=4, kill_at=2)  # noqa: PLW0108
    report.assert_exact()
    assert report.in_process is not None
    assert "cannot import the functions by name" in report.in_process
    text = " ".join(str(report).split())
    assert "All in this process, with no real kill" in text
    assert "what hides in its memory is not seen" in text


def test_closures_are_refused_where_fresh_processes_were_insisted_on() -> None:
    """The error says why they are not possible."""
    with pytest.raises(ValueError, match="processes of their own, but a new process cannot import"):
        safeckpt.prove_resume(loops.build_small, lambda c: loops.small_step(c), in_process=False)  # noqa: PLW0108


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import safeckpt\ndef step(c): ...\n", 'has no `if __name__ == "__main__":`'),
        (None, "defined in a notebook or an interactive session"),
    ],
)
def test_main_that_cannot_be_imported_again_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, reason: str
) -> None:
    """A script that would do its work again, and a notebook, are no place for a new process to import from."""
    main = types.ModuleType("__main__")
    if source is not None:
        main.__file__ = str(tmp_path / "script.py")
        Path(main.__file__).write_text(source)
    exec("def step(c): ...", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = Functions.of((main.step,))
    assert isinstance(found, str)
    assert reason in found


def test_module_of_the_same_name_is_not_proven_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a new process would find another file under a module's name, that is an error, not a proof of that file."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_there.py").write_text("def step(c): ...")
    module = module_from(tmp_path / "here" / "twice_there.py", "twice_there")
    found = Functions.of((module.step,))
    assert isinstance(found, Functions)
    monkeypatch.syspath_prepend(tmp_path / "there")
    monkeypatch.delitem(sys.modules, "twice_there")
    with pytest.raises(ImportError, match="twice_there"):
        Functions(found.pickled, found.modules, list(sys.path), list(sys.argv)).load()


def test_proof_inside_an_import_of_a_proof_is_refused(tmp_path: Path) -> None:
    """A module that calls prove_resume when it is imported would start processes without end."""
    path = tmp_path / "endless.py"
    path.write_text("import safeckpt\ndef step(c): ...\nsafeckpt.prove_resume(step, step)\n")
    functions = Functions(b"", {"endless": str(path)}, list(sys.path), list(sys.argv))
    with pytest.raises(RuntimeError, match="put the call under"):
        functions.load()


def test_errors_survive_pickling() -> None:
    """They come out of a process pool as they went in."""
    import pickle

    error: Any = pickle.loads(pickle.dumps(safeckpt.ProofError(run="straight run", exit_code=1, output="x")))
    assert (error.run, error.exit_code) == ("straight run", 1)
    assert isinstance(error, RuntimeError)
