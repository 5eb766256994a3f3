"""What an inner DataLoader is asked to do in one epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from safeckpt.loader.fetch import StartWorker
from safeckpt.loader.source import WORKERS, seed_for
from safeckpt.loader.worker_signals import worker_signals, workers_start

__all__ = ["Plan", "start"]


class _Tasks:
    """Tasks of one epoch; `complete` says that they came to their end and did not just break off."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._broken = False
        self.complete = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._tasks)
        except StopIteration:
            self.complete = not self._broken
            raise
        except BaseException:
            # A generator that has raised says StopIteration ever after, as if it had come to its end.
            self._broken = True
            raise


class Plan:
    """Stands in the place of an inner DataLoader's batch sampler and gives it the tasks of one epoch at a time.

    torch calls `iter` on it twice when there are workers, so it must not begin anew. No object here may be part of
    a reference cycle: workers that the garbage collector finds take torch five seconds each to end.
    """

    def __init__(self) -> None:
        self._tasks = _Tasks(iter(()))

    def assign(self, tasks: Iterator[Any]) -> bool:
        """Take these tasks and return whether there is at least one."""
        first = list(itertools.islice(tasks, 1))
        self._tasks = _Tasks(itertools.chain(first, tasks))
        self._tasks.complete = not first
        return bool(first)

    def __iter__(self) -> Iterator[Any]:
        return self._tasks

    def finish(self) -> None:
        """Raise RuntimeError when tasks were left: a generator that raised before looks like one that has ended."""
        if not self._tasks.complete:
            raise RuntimeError(
                "the iteration broke off before the end of the epoch, after an error in the sampler or a StopIteration "
                "in the dataset; the position is where it broke off, iterate the loader again to begin the next epoch"
            )


def start(inner: DataLoader[Any], seed: int, epoch: int) -> Iterator[Any]:
    """Return an iterator over an inner DataLoader, whose workers depend on seed and epoch only.

    That is `worker_info.seed`, and with it what a `worker_init_fn` draws.
    """
    if isinstance(inner.generator, torch.Generator):
        inner.generator.manual_seed(seed_for(WORKERS, seed, epoch))
    signals = worker_signals() if inner.num_workers else None
    if isinstance(inner.worker_init_fn, StartWorker):
        inner.worker_init_fn.signals = signals
    with workers_start(signals):
        return iter(inner)
