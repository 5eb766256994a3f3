"""P8: what does the manager add to a step at which nothing is saved?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks.harness import Contestant, Options, Report, race
from benchmarks.workloads import Training

_STEPS = 2_000
_READ_EVERY = 50


def run(options: Options) -> Iterator[Report]:
    """Call end_step thousands of times, with the loss in several forms."""
    training = Training(10)
    loss = torch.tensor(0.25)
    with TemporaryDirectory(dir=options.disk) as name:
        directory = Path(name)
        managers = {
            kind: safeckpt.CheckpointManager(directory / kind, training.components, save_every=10**9)
            for kind in ("number", "tensor", "sparse", "none")
        }
        managers["saved"] = safeckpt.CheckpointManager(directory / "saved", training.components, save_every=10**9)
        managers["saved"].save(0)
        rows = race(
            [
                Contestant("loss.item() alone", lambda: _per_call(lambda _: loss.item()), "the loss is read"),
                _ended("end_step(step)", managers["none"], lambda _: None),
                _ended("end_step(step, loss=float)", managers["number"], lambda _: 0.25),
                _ended("end_step(step, loss=tensor)", managers["tensor"], lambda _: loss),
                _ended("end_step, after a first save", managers["saved"], lambda _: loss),
                _ended(
                    f"end_step, loss every {_READ_EVERY} steps",
                    managers["sparse"],
                    lambda step: None if step % _READ_EVERY else loss,
                ),
            ],
            options.repeats,
        )
        for manager in managers.values():
            manager.close()
    report = Report("per_step", f"time of one call, {_STEPS} calls a run", rows)
    for what in ("end_step(step, loss=float)", "end_step(step, loss=tensor)", "end_step, after a first save"):
        report.target(f"P8 {what}", rows[what].median * 1e6, 20, unit="us")
    yield report


def _ended(name: str, manager: safeckpt.CheckpointManager, loss: Callable[[int], Any]) -> Contestant:
    steps = itertools.count(1)

    def call(_: int) -> None:
        step = next(steps)
        manager.end_step(step, loss=loss(step))

    return Contestant(name, lambda: _per_call(call), "the loss is guarded")


def _per_call(call: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    for number in range(_STEPS):
        call(number)
    return (time.perf_counter() - start) / _STEPS
