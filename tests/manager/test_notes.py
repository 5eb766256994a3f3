"""Notes are kept with a checkpoint, compared at a restore and never restored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt.cli import main
from tests.manager.helpers import manager_of
from tests.training import Marked


def test_notes_that_differ_are_named_at_the_restore(tmp_path: Path) -> None:
    """Seed 1 started in the directory of seed 0 is told so, and its own notes are kept from then on."""
    with manager_of(tmp_path, Marked(), notes={"seed": 0, "lr": 0.1, "tags": ("a", "b")}) as manager:
        assert manager.save(1).notes == {"seed": 0, "lr": 0.1, "tags": ["a", "b"]}
    with manager_of(tmp_path, Marked(), notes={"seed": 1, "lr": 0.1, "out": "x"}) as manager:
        with pytest.warns(safeckpt.EnvironmentChangedWarning) as caught:
            manager.restore()
        (text,) = [str(warning.message) for warning in caught]
        assert text == (
            "The notes differ from those of the run that saved step-00000001.pt (saved -> now):\n"
            "  notes.seed: 0 -> 1\n"
            "  notes.tags: ['a', 'b'] -> not given\n"
            "  notes.out: not given -> 'x'\n"
            "What was restored is that run. To start another one, give it a directory of its own."
        )
        assert [warning.filename for warning in caught] == [__file__]
        manager.save(2)
    assert [one.notes["seed"] for one in manager.checkpoints()] == [0, 1]


def test_loss_that_differs_names_the_notes_that_differ(tmp_path: Path) -> None:
    """A replayed loss that came out differently has the other command line among its causes."""
    with manager_of(tmp_path, Marked(), notes={"seed": 0}, save_on_exit=False) as manager:
        manager.save(1)
        manager.end_step(2, loss=0.5)
    with manager_of(tmp_path, Marked(), notes={"seed": 1}) as manager:
        with pytest.warns(safeckpt.EnvironmentChangedWarning):
            manager.restore()
        with pytest.warns(safeckpt.ReplayMismatchWarning, match="notes.seed: 0 -> 1"):
            manager.end_step(2, loss=0.6)


@pytest.mark.parametrize(("saved", "now"), [({"a": 1}, {"a": 1}), ({"a": 1}, None), (None, {"a": 1})])
def test_notes_that_are_equal_or_not_given_are_no_warning(tmp_path: Path, saved: Any, now: Any) -> None:
    """Only what both runs say of themselves is compared."""
    with manager_of(tmp_path, Marked(), notes=saved) as manager:
        manager.save(1)
    with manager_of(tmp_path, Marked(), notes=now) as manager:
        manager.restore()


def test_notes_are_shown_by_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`list --json` and `show` have the notes of a checkpoint."""
    with manager_of(tmp_path, Marked(), notes={"seed": 7}) as manager:
        path = manager.save(1).path
    assert main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["notes"] == {"seed": 7}
    assert main(["show", str(path)]) == 0
    assert "note seed: 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("notes", "error", "text"),
    [
        (3, TypeError, "notes must be a mapping"),
        ({1: 2}, TypeError, "notes must be a mapping"),
        ({"out": Path("x")}, TypeError, r"notes\['out'\] is a PosixPath; notes hold text"),
        ({"x": math.nan}, ValueError, r"notes\['x'\] cannot be written as JSON"),
        ({"x": "y" * 20_000}, ValueError, r"notes take 20,00\d bytes as JSON, and 16,000 fit"),
    ],
)
def test_notes_that_are_not_plain_or_too_long_are_refused(
    tmp_path: Path, notes: Any, error: type[Exception], text: str
) -> None:
    """What the header cannot hold is an error when the manager is built, which names the note."""
    with pytest.raises(error, match=text):
        manager_of(tmp_path / "run", Marked(), notes=notes)
