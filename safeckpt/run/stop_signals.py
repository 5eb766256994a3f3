"""A request to stop that arrives as a signal and is honoured at the next step boundary."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from safeckpt.system.libc import set_default_action
from safeckpt.system.stop_requests import ignore_stop_requests, listen_to_stop_requests

__all__ = ["StopSignals"]


class StopSignals:
    """Notes that one of the signals came, and calls the handler that was there before, if it was Python code.

    A process that is forked from this one is ended by the signal as if nobody listened; but workers of a
    `ResumableLoader` leave it to this process, and end with it.

    Attributes:
        requested: Whether one of them has come.

    Args:
        signals: Signals to listen to; none leaves every handler alone.

    Raises:
        TypeError: What is given is no sequence of signals.
        ValueError: There is no such signal, or none that a process can handle; or this is not the main thread, where
            alone Python allows handlers.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.requested = False
        self._pid = os.getpid()
        self._listening = True
        self._before: dict[int, Any] = {}
        numbers = _checked(signals)
        if numbers and not _in_main_thread():
            raise ValueError("stop_signals: Python allows signal handlers only in the main thread; build it there")
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)
                listen_to_stop_requests([number])
        except BaseException:
            self.restore()
            raise

    def give_up(self) -> None:
        """Let a signal end this process again where it would without us: no checkpoint can be written any more.

        In any thread, when a process of the group is lost: the main thread may wait for it in a collective, where no
        handler in Python runs, and who restarts the group would wait half a minute for this process.
        """
        for number, before in self._before.items():
            if self._listening and before is signal.SIG_DFL and signal.getsignal(number) == self._note:
                set_default_action(number)

    def restore(self) -> None:
        """Put back the handlers that were there before, unless somebody has put another one on top of ours.

        Ours then stays below it, passes signals on and listens no more.
        """
        if self._listening:
            ignore_stop_requests(self._before)
        self._listening = False
        if not _in_main_thread():
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._note and before is not None:
                signal.signal(number, before)
                del self._before[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._hear(number, frame):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _hear(self, number: int, frame: FrameType | None) -> bool:
        """Note the signal and pass it on; return False when nobody wants it, so that its default is to happen."""
        heard = self._listening and os.getpid() == self._pid
        self.requested |= heard
        before = self._before.get(number, signal.SIG_DFL)
        below = getattr(before, "__self__", None)
        if isinstance(below, StopSignals):
            return below._hear(number, frame) or heard
        # The default of SIGINT raises KeyboardInterrupt, that of SIGTERM kills: before the checkpoint is written,
        # which is what was to be prevented.
        if callable(before) and not (heard and before is signal.default_int_handler):
            before(number, frame)
            return True
        return heard or before is not signal.SIG_DFL


def _checked(signals: Any) -> list[int]:
    wanted = "stop_signals takes signals that a process can handle, such as (signal.SIGTERM, signal.SIGUSR1)"
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        raise TypeError(f"{wanted}; got {signals!r}")
    numbers = list(signals)
    never = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{wanted}; got {number!r}")
        if number not in signal.valid_signals() or number in never:
            raise ValueError(f"{wanted}; got {number!r}")
    return numbers


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
