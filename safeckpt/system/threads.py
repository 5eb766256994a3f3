"""A few threads for work that leaves the interpreter alone: copies, checksums, reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["Progress", "in_threads", "start", "worker_count"]

Progress = Callable[[int, int], object]  # told of bytes done and bytes in all, in the thread that asked for the work

_MOST_WORKERS = 4  # a checksum reads about 2.4 GB/s a core; more than four cores would wait for memory


def worker_count() -> int:
    """Return how many threads are worth having on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_WORKERS, cores))


def start(thread: threading.Thread) -> bool:
    """Start a thread, and return whether there is one: an interpreter that exits, or a full process, has none left.

    Raises:
        KeyboardInterrupt: Ctrl-C. The thread may have begun, may yet begin, or never will.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # Python waits for the thread's first sign of life, and a Ctrl-C between two lines of that wait comes out as
        # "release unlocked lock" (threading.Condition.wait).
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        return False
    return True


def in_threads(work: Callable[[], None], stop: Callable[[], None], *, name: str) -> None:
    """Run `work` in this thread and in helpers at the same time, and return when all of them have returned.

    Args:
        work: Takes jobs from wherever they are kept until there are none left. Each thread calls it once.
        stop: Leaves no job to take; called when this thread is interrupted.
        name: Of the helpers.

    Raises:
        BaseException: What `work` has raised in this thread, else what it raised first in a helper.
    """
    errors: list[BaseException] = []

    def helper() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)

    started: list[threading.Thread] = []
    try:
        for _ in range(worker_count() - 1):
            thread = threading.Thread(target=helper, name=name, daemon=True)
            started.append(thread)  # first, since an interrupted start may leave it running
            if not start(thread):
                break  # this one does it all
        work()
    except BaseException:
        stop()
        raise
    finally:
        for thread in started:
            if thread.is_alive():  # one that begins after this finds nothing to do
                thread.join()
    if errors:
        raise errors[0]
