"""What a caller wants to do with each checkpoint after its commit: in a thread, in order, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from safeckpt.errors import SafeckptWarning
from safeckpt.run.catalog import Checkpoint
from safeckpt.system.threads import start
from safeckpt.system.warn import warn_caller

__all__ = ["SavedHook"]

_log = logging.getLogger("safeckpt")


class SavedHook:
    """Calls a function of the caller's with each committed checkpoint.

    The thread is no daemon and lives while there is something to do: an interpreter that exits finishes it first.

    Args:
        call: The function.

    Raises:
        TypeError: It cannot be called.
    """

    def __init__(self, call: Callable[[Checkpoint], object]) -> None:
        if not callable(call):
            raise TypeError(f"on_saved must be callable as on_saved(checkpoint); got {call!r}")
        self._call = call
        self._mutex = threading.Lock()
        self._waiting: deque[Checkpoint] = deque()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._refused: Warning | None = None

    def committed(self, checkpoint: Checkpoint) -> None:
        """Have the function called, after the calls before it; where no thread can be started, here and now."""
        with self._mutex:
            self._waiting.append(checkpoint)
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name="safeckpt-on-saved")
        if not threading.main_thread().is_alive() or not start(thread):
            self._run()

    def close(self) -> None:
        """Return when every call has returned.

        Raises:
            SafeckptWarning: A call has failed, and warnings are errors.
        """
        thread = self._thread
        if thread is not None and self._pid == os.getpid() and thread.is_alive():
            thread.join()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return
                checkpoint = self._waiting.popleft()
            try:
                self._call(checkpoint)
            except BaseException as error:  # noqa: BLE001 - the save has succeeded, whatever the caller's code does
                self._warn(checkpoint, error)

    def _warn(self, checkpoint: Checkpoint, error: BaseException) -> None:
        text = (
            f"on_saved failed for {checkpoint.path.name} ({type(error).__name__}: {error}). The checkpoint is saved, "
            "and training goes on."
        )
        _log.warning("%s", text, exc_info=error)
        try:
            warn_caller(text, SafeckptWarning)
        except SafeckptWarning as refused:
            self._refused = refused
