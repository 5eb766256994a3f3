"""One write at a time in a thread of its own, whose failure is never lost."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from safeckpt.system.threads import start

__all__ = ["BackgroundWriter"]

_log = logging.getLogger("safeckpt")


class BackgroundWriter:
    """Runs one job in the background.

    The thread is no daemon: an interpreter that exits finishes the write first. A failure is logged when it happens,
    so that it is seen even when nobody asks again, and raised by the next `wait` or `start`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        # Held until the job has ended. Not Thread.join alone: interrupted by Ctrl-C it takes the thread for ended
        # (CPython 3.11, bpo-45274), and the next one returns while the write is still going on. Not an Event: a Ctrl-C
        # while it is waited for may come out as RuntimeError("release unlocked lock").
        self._running = threading.Lock()
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._pid == os.getpid() and self._running.locked()

    def start(self, job: Callable[[], object], what: str) -> None:
        """Run a job; one that is running is waited for. Where no thread can be started it is run by the caller.

        Args:
            job: What to do.
            what: How to call it in the log when it fails.

        Raises:
            BaseException: What the job before has raised; this one is not started.
            KeyboardInterrupt: Ctrl-C, also in a job that the caller runs; `busy` tells whether the job is running.
        """
        self.wait()

        self._pid = os.getpid()
        running = self._running = threading.Lock()
        running.acquire()
        jobs = [job]  # taken by the thread, or back by whoever was interrupted while starting it

        def run(*, by_caller: bool = False) -> None:
            try:
                mine = jobs.pop()
            except IndexError:
                return
            try:
                mine()
            except BaseException as error:
                if by_caller and isinstance(error, KeyboardInterrupt):
                    raise  # it is meant for the caller
                self._failure = error
                _log.error("%s failed in the background: %s", what, error)
            finally:
                running.release()

        thread = threading.Thread(target=run, name="safeckpt-writer")
        try:
            self._thread = thread
            # After the main thread has ended, a new thread would be cut down with the interpreter.
            if not threading.main_thread().is_alive() or not start(thread):
                run(by_caller=True)
        except BaseException:
            with contextlib.suppress(IndexError):
                jobs.pop()
                self._thread = None  # it will never begin, or find nothing to do
            raise

    def wait(self) -> None:
        """Return when nothing is running.

        Raises:
            BaseException: What the job has raised, once.
        """
        if self._thread is not None:
            if self._pid == os.getpid():  # a forked child has no such thread, and would wait for ever
                with self._running:
                    if self._thread.is_alive():
                        self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
