"""P2 and P3: what does a durable, guarded, checked save cost, on a disk and where the CPU is the limit?"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import safeckpt
from benchmarks import peers
from benchmarks.harness import DURABLE, LIMIT, Contestant, Options, Report, race, settle
from benchmarks.workloads import Training
from safeckpt.store import deferred

PLAIN = "plain write + fsync"
MANAGER = "CheckpointManager.save"


def run(options: Options) -> Iterator[Report]:
    """Save a training state of each size, on the disk and in memory."""
    for size_mb in options.sizes_mb:
        yield _race(options, size_mb, options.disk, "disk")
        if options.memory is not None:
            yield _race(options, size_mb, options.memory, "memory")


def _race(options: Options, size_mb: int, where: Path, kind: str) -> Report:
    training = Training(size_mb)
    notes: list[str] = []
    with TemporaryDirectory(dir=where) as name:
        directory = Path(name)
        contestants = [
            plain(training, directory),
            manager(training, directory / "manager"),
            drop_in(training, directory),
            *peers.chosen(peers.SYNC, options, notes, training, directory),
        ]
        for one in contestants:
            one.before = settle
        rows = race(contestants, options.repeats)
    # The curves of the disk and of memory are two figures.
    report = Report("save", f"save on {kind}, {training.describe()}", rows, notes=notes)
    report.axis = ("size_mb", size_mb)
    if kind == "disk":
        report.target("P2 save / plain write + fsync", report.ratio(MANAGER, PLAIN), 1.10)
        if "torch.save + fsync" in rows:
            report.target("P2 save / (torch.save + fsync)", report.ratio(MANAGER, "torch.save + fsync"), 1)
    elif "torch.save" in rows:
        report.target("P3 save in memory / torch.save", report.ratio(MANAGER, "torch.save"), 0.8)
    return report


def plain(training: Training, directory: Path) -> Contestant:
    """Write the same bytes with nothing around them, and sync them."""
    path = directory / "plain"
    views = [memoryview(tensor.reshape(-1).numpy()).cast("B") for tensor in training.tensors()]

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for view in views:
                file.write(view)
            os.fsync(file.fileno())

    return Contestant(PLAIN, write, LIMIT, after=lambda: peers.remove(path))


def manager(training: Training, directory: Path) -> Contestant:
    """Save with a manager that keeps two checkpoints, so that each save also deletes one."""
    keeper = safeckpt.CheckpointManager(directory, training.components, keep_last=1)
    steps = itertools.count(1)
    # The name of the deleted file is gone when save returns; its blocks are freed in the background, and nobody else
    # shall pay for that.
    return Contestant(MANAGER, lambda: keeper.save(next(steps)), DURABLE, after=deferred.wait, close=keeper.close)


def drop_in(training: Training, directory: Path) -> Contestant:
    """Save in torch.save's place."""
    path = directory / "drop-in.pt"
    return Contestant(
        "safeckpt.save", lambda: safeckpt.save(training.state(), path), DURABLE, after=lambda: peers.remove(path)
    )
