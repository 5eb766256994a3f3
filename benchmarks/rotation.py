"""P7: does a save get slower in a directory that already holds thousands of checkpoints?"""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks.harness import DURABLE, Contestant, Options, Report, race, settle
from safeckpt.file import open_file, write_file

_FILES = 10_000
_EMPTY = "empty directory"
_FULL = f"{_FILES} older checkpoints"
_BEST = f"{_FILES} older checkpoints, keep_best"
_LISTED = f"checkpoints() of {_FILES}"


def run(options: Options) -> Iterator[Report]:
    """Save into an empty directory and into one with 10,000 older checkpoints that are kept for good.

    Every other save deletes one, so that each has to be compared with all of the others where the best are kept.
    """
    notes: list[str] = []
    with TemporaryDirectory(dir=options.disk) as name, TemporaryDirectory(dir=options.memory) as draft:
        directory = Path(name)
        _fill(Path(draft) / "full")
        for copy in ("full", "best"):
            shutil.copytree(Path(draft) / "full", directory / copy)
        best = safeckpt.Best("accuracy", mode="max", count=3)
        empty = _manager(directory / "empty", keep_last=3)
        full = _manager(directory / "full", keep_last=3, keep_every=2)
        ranked = _manager(directory / "best", keep_last=3, keep_every=2, keep_best=best)
        settle()
        rows = race(
            [
                _saver(_EMPTY, empty),
                _saver(_FULL, full),
                _saver(_BEST, ranked),
                Contestant(_LISTED, full.checkpoints, "reads no tensor"),
            ],
            4 * options.repeats,
        )
        for manager in (empty, full, ranked):
            manager.close()
    report = Report("rotation", f"save into a directory with {_FILES} older checkpoints", rows, notes=notes)
    for what in (_FULL, _BEST):
        extra = (rows[what].median - rows[_EMPTY].median) * 1e3
        report.target(f"P7 {what}, more than empty", extra, 20, unit="ms")
    yield report


def _components() -> dict[str, Any]:
    return {"model": torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)}


def _fill(path: Path) -> None:
    """Make 10,000 real checkpoints: one is saved, the others are written as it was, each with its own step."""
    with _manager(path, keep_last=3) as manager:
        first = manager.save(2, metrics={"accuracy": 0.0}).path
    with open_file(first) as file:
        payload, header = file.load(), file.header() or {}
    for step in range(4, 2 * _FILES + 1, 2):
        with (path / f"step-{step:08d}.pt").open("xb") as file:
            write_file(payload, file, header={**header, "step": step, "metrics": {"accuracy": step % 97 / 97}})


def _manager(path: Path, **options: Any) -> safeckpt.CheckpointManager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.UncapturedStateWarning)
        manager = safeckpt.CheckpointManager(path, _components(), **options)
    manager.restore()
    return manager


def _saver(name: str, manager: safeckpt.CheckpointManager) -> Contestant:
    steps = itertools.count(2 * _FILES + 1)
    return Contestant(name, lambda: manager.save(next(steps), metrics={"accuracy": 0.5}), DURABLE)
