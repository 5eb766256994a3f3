"""P10: how much memory does a save take above the live objects? Each contestant in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import safeckpt
from benchmarks import peers
from benchmarks.harness import (
    DURABLE,
    MB,
    NOTHING,
    Contestant,
    Options,
    Report,
    forget_peak,
    fresh,
    peak_bytes,
    race,
    resident_bytes,
)
from benchmarks.workloads import Training

_PROMISES = {
    "CheckpointManager.save": DURABLE,
    "CheckpointManager(async_save=True)": DURABLE,
    "safeckpt.save": DURABLE,
    "torch.save": NOTHING,
}
_SAVES = 3


def run(options: Options) -> Iterator[Report]:
    """Save a training state of each size and look at the peak of resident memory."""
    for size_mb in options.sizes_mb:
        peaks: dict[str, list[float]] = {name: [] for name in _PROMISES}
        nbytes = [1.0]

        def child(way: str, size_mb: int = size_mb, peaks: dict[str, list[float]] = peaks,
                  nbytes: list[float] = nbytes) -> None:  # fmt: skip
            with TemporaryDirectory(dir=options.disk) as name:
                found = fresh("memory:peak_of", way=way, size_mb=size_mb, directory=name)
            peaks[way].append(found["peak"])
            nbytes[0] = found["state"]

        contestants = [
            Contestant(name, lambda name=name: child(name), promises)  # type: ignore[misc]
            for name, promises in _PROMISES.items()
        ]
        rows = race(contestants, options.repeats, warm=0)
        for name, values in peaks.items():
            rows[name].extra["peak MB"] = sorted(values)[len(values) // 2] / MB
            rows[name].extra["of the state"] = rows[name].extra["peak MB"] * MB / nbytes[0]
        title = f"resident memory above the live objects, {_SAVES} saves of {nbytes[0] / MB:.0f} MB"
        report = Report("memory", title, rows, notes=["times are of whole processes"])
        report.target("P10 synchronous save", rows["CheckpointManager.save"].extra["peak MB"], 64, unit="MB")
        share = rows["CheckpointManager(async_save=True)"].extra["of the state"]
        report.target("P10 asynchronous save / state", round(share, 2), 1.0)
        yield report


def peak_of(way: str, size_mb: float, directory: str) -> dict[str, float]:
    """Save a few times in this process, which has to be a fresh one, and return the peak above what was there."""
    training = Training(size_mb)
    place = Path(directory)
    save, close = _WAYS[way](training, place)
    small = Training(1)
    with peers.quiet():
        torch.save(small.state(), place / "small.pt")
        safeckpt.save(small.state(), place / "small.pt")  # whatever is imported and started at the first save
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    before = resident_bytes()
    forget_peak()
    for step in range(1, _SAVES + 1):
        save(step)
    close()
    return {"peak": float(peak_bytes() - before), "state": float(training.nbytes)}


def _manager(*, async_save: bool) -> Callable[[Training, Path], tuple[Callable[[int], object], Callable[[], None]]]:
    def build(training: Training, directory: Path) -> tuple[Callable[[int], object], Callable[[], None]]:
        manager = safeckpt.CheckpointManager(
            directory / "manager", training.components, keep_last=1, async_save=async_save
        )
        return manager.save, manager.close

    return build


def _drop_in(training: Training, directory: Path) -> tuple[Callable[[int], object], Callable[[], None]]:
    return lambda _: safeckpt.save(training.state(), directory / "ours.pt"), lambda: None


def _torch(training: Training, directory: Path) -> tuple[Callable[[int], object], Callable[[], None]]:
    return lambda _: torch.save(training.state(), directory / "torch.pt"), lambda: None


_WAYS = {
    "CheckpointManager.save": _manager(async_save=False),
    "CheckpointManager(async_save=True)": _manager(async_save=True),
    "safeckpt.save": _drop_in,
    "torch.save": _torch,
}
