"""A callback that tells how far a long save or restore is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import safeckpt
from tests.manager.helpers import manager_of, steps_in, temps_in


class Large:
    """Has twenty megabytes of state."""

    def __init__(self) -> None:
        self.weight = torch.nn.Linear(1000, 5000).requires_grad_(False)

    @property
    def components(self) -> dict[str, object]:
        return {"weight": self.weight}


Seen = list[tuple[str, int, int]]


def test_save_and_restore_tell_how_far_they_are(tmp_path: Path) -> None:
    """Bytes done rise to the size of the file, in several steps, first for the save and then for the check."""
    seen: Seen = []
    with manager_of(tmp_path, Large(), progress=lambda *args: seen.append(args)) as manager:
        size = manager.save(1).size_bytes
        saved = [done for what, done, total in seen if (what, total) == ("save", size)]
        assert len(saved) == len(seen) > 3
        assert saved == sorted(saved)
        assert saved[-1] == size
        seen.clear()
        manager.restore()
    assert {what for what, _, _ in seen} == {"verify"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert len(seen) > 1
    assert seen[-1][1] == seen[-1][2] == size


def test_asynchronous_save_tells_from_its_thread(tmp_path: Path) -> None:
    """The callback runs where the work is done."""
    threads = set()
    with manager_of(
        tmp_path, Large(), async_save=True, progress=lambda *_: threads.add(threading.current_thread().name)
    ) as manager:
        manager.save(1)
        manager.wait()
    assert threads == {"safeckpt-writer"}


def test_callback_that_raises_stops_the_save(tmp_path: Path) -> None:
    """The error comes out, nothing is committed and nothing is left behind; the next save works."""
    broken = [False]

    def progress(what: str, done: int, total: int) -> None:
        if broken[0]:
            raise RuntimeError("the bar fell off")

    with manager_of(tmp_path, Large(), progress=progress) as manager:
        manager.save(1)
        broken[0] = True
        with pytest.raises(RuntimeError, match="fell off"):
            manager.save(2)
        assert steps_in(tmp_path) == [1]
        assert temps_in(tmp_path) == []
        broken[0] = False
        manager.save(2)


def test_verify_tells_how_far_it_is(tmp_path: Path) -> None:
    """The drop-in's check has the same callback, which ends with everything done."""
    safeckpt.save({"x": torch.randn(3_000_000)}, tmp_path / "x.pt")
    seen: list[tuple[int, int]] = []
    report = safeckpt.verify(tmp_path / "x.pt", progress=lambda *args: seen.append(args))
    assert seen[-1] == (report.size_bytes, report.size_bytes)


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    """A progress bar object instead of its method is told at once."""
    with pytest.raises(TypeError, match="progress must be callable"):
        manager_of(tmp_path, Large(), progress=object())
