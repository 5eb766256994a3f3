"""P4: for how long does an asynchronous save keep the training loop, and how much does its write slow it down?"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks import peers
from benchmarks.harness import DURABLE, LIMIT, Contestant, Options, Report, Row, race, settle
from benchmarks.peers import Background
from benchmarks.workloads import Training

COPY = "copy into warm memory"
MANAGER = "CheckpointManager(async_save=True)"
PROCESS = 'CheckpointManager(async_save="process")'
_CALM_SECONDS = 1.0


def run(options: Options) -> Iterator[Report]:
    """Save a training state of each size in the background."""
    for size_mb in options.sizes_mb:
        yield _race(options, size_mb)


def _race(options: Options, size_mb: int) -> Report:
    training = Training(size_mb)
    notes: list[str] = []
    busy = _Busy()
    with TemporaryDirectory(dir=options.disk) as name:
        directory = Path(name)
        savers = [
            ours(training, directory / "manager"),
            ours(training, directory / "process", in_process=True),
            *peers.chosen(peers.ASYNC, options, notes, training, directory),
        ]
        shares: dict[str, list[float]] = {one.name: [] for one in savers}
        writes: dict[str, list[float]] = {one.name: [] for one in savers}
        contestants = [_copy(training), *(_blocked(one, busy, shares[one.name], writes[one.name]) for one in savers)]
        # Two warm rounds: the first save of everybody allocates.
        rows = race(contestants, options.repeats, warm=2)
    for one in savers:
        rows[one.name].extra["write s"] = sorted(writes[one.name])[len(writes[one.name]) // 2]
        rows[one.name].extra["training while it writes"] = sorted(shares[one.name])[len(shares[one.name]) // 2]
        # What a save costs a run: the time it stands still, and the steps it does not make while the write goes on.
        slowed = [seconds * (1 - share) for seconds, share in zip(writes[one.name], shares[one.name], strict=True)]
        rows[one.name].extra["training lost s"] = rows[one.name].median + statistics.median(slowed)
    report = Report("async_save", f"training blocked by an asynchronous save, {training.describe()}", rows, notes=notes)
    report.axis = ("size_mb", size_mb)
    report.target("P4 blocked / copy", report.ratio(MANAGER, COPY), 1.5)
    report.target(
        "training while it writes, process / thread", _share(rows, PROCESS) / _share(rows, MANAGER), 1, at_least=True
    )
    if "DCP async_save" in rows:
        report.target("P4 DCP async_save / blocked", report.ratio("DCP async_save", MANAGER), 5, at_least=True)
    warm = "DCP async_save, warm DefaultStager"
    if warm in rows:
        report.target("P4 blocked / DCP with a warm DefaultStager", report.ratio(MANAGER, warm), 1)
    return report


def _share(rows: Mapping[str, Row], name: str) -> float:
    return rows[name].extra["training while it writes"]


def _copy(training: Training) -> Contestant:
    tensors = training.tensors()
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    return Contestant(COPY, lambda: torch._foreach_copy_(buffers, tensors), LIMIT)


def ours(training: Training, directory: Path, *, in_process: bool = False) -> Background:
    """Return the manager's asynchronous save, by a thread or by a process."""
    async_save: Any = "process" if in_process else True
    keeper = safeckpt.CheckpointManager(directory, training.components, keep_last=1, async_save=async_save)
    steps = itertools.count(1)
    return Background(
        PROCESS if in_process else MANAGER, lambda: keeper.save(next(steps)), keeper.wait, DURABLE, keeper.close
    )


def _blocked(saver: Background, busy: _Busy, shares: list[float], writes: list[float]) -> Contestant:
    """Time the call alone; while the write goes on, something like training goes on too."""

    def before() -> None:
        settle()
        busy.calm = busy.rate(lambda start: time.perf_counter() - start < _CALM_SECONDS)

    def after() -> None:
        start = time.perf_counter()
        waiting = threading.Thread(target=saver.wait)
        waiting.start()
        shares.append(busy.rate(lambda _: waiting.is_alive()) / busy.calm)
        writes.append(time.perf_counter() - start)
        waiting.join()

    return Contestant(saver.name, saver.start, saver.promises, before, after, saver.close)


class _Busy:
    """Small training steps, counted: the model that is saved takes too long a step to be a measure."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._batch = torch.randn(128, 512)
        self.calm = 1.0

    def rate(self, goes_on: Callable[[float], bool]) -> float:
        """Return steps a second while a condition, which is given the start, is true."""
        start = time.perf_counter()
        count = 0
        while goes_on(start):
            self._optimizer.zero_grad()
            self._model(self._batch).square().mean().backward()
            self._optimizer.step()
            count += 1
        return count / (time.perf_counter() - start)
