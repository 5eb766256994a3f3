"""Workers outlive a request to stop: it comes to the whole process group, and the step in progress needs its batches.

A batch system signals every process of a job. A worker that dies of it makes torch raise in the training process at
any moment, in the middle of the save as well. So workers leave these signals to their parent, and end with it.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing.sharedctypes
import multiprocessing.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from safeckpt.system.stop_requests import stop_requests

__all__ = ["WorkerSignals", "worker_signals", "workers_start"]


@functools.cache
def _ending(pid: int) -> Any:
    """Return a flag in shared memory that is set when this process, `pid`, exits and ends its workers by a signal."""
    flag = multiprocessing.sharedctypes.RawValue(ctypes.c_bool, False)
    # Not `atexit`, which a process that multiprocessing has started passes over, as each rank of a spawned group does.
    multiprocessing.util.Finalize(None, setattr, (flag, "value", True), exitpriority=0)
    return flag


class WorkerSignals(NamedTuple):
    """What a worker is given.

    Attributes:
        numbers: The signals that it leaves to its parent.
        ending: Whether the parent is at its end.
    """

    numbers: tuple[int, ...]
    ending: Any

    def outlive(self) -> None:
        """Leave the signals to the parent, as long as there is one that goes on."""
        parent = os.getppid()

        def outlive(number: int, _: object) -> None:
            if self.ending.value or os.getppid() != parent:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in self.numbers:
            signal.signal(number, outlive)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)


def worker_signals() -> WorkerSignals | None:
    """Return what the workers that start now are given, None when no signal asks this process to stop."""
    numbers = stop_requests()
    return WorkerSignals(numbers, _ending(os.getpid())) if numbers else None


@contextmanager
def workers_start(signals: WorkerSignals | None) -> Iterator[None]:
    """Hold the signals back while workers start, which until they are ready would die of them."""
    if signals is None:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
