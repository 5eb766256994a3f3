"""A request to stop that arrives as a signal and is honoured at the next step boundary."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]


class StopSignals:
    """Notes that one of the signals came, and calls the handler that was there before, if it was Python code.

    Args:
        signals: Signals to listen to; none leaves every handler alone.

    Raises:
        ValueError: Not in the main thread, where Python allows handlers, or no such signal.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        before = self._before.get(number)
        # SIG_DFL would kill the process before its checkpoint is written, which is what was to be prevented.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def restore(self) -> None:
        """Put back the handlers that were there before, unless somebody has replaced ours since."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note and before is not None:
                signal.signal(number, before)
        self._before.clear()
