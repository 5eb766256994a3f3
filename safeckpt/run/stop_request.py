"""Whether a run has to stop: somebody has asked for it, or its time is over."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from safeckpt.run.stop_signals import StopSignals
from safeckpt.run.stop_time import StopTime

if TYPE_CHECKING:
    from safeckpt.run.mirroring import RunMirror

__all__ = ["StopRequest"]


class StopRequest:
    """A request to stop, by a signal or by the end of the time that a job has.

    Args:
        stop_signals: See `StopSignals`.
        stop_before: See `StopTime`.
        mirror: What still has to be sent after the last save; None where nothing is.
    """

    def __init__(
        self, stop_signals: Iterable[int], stop_before: dt.timedelta | dt.datetime | None, mirror: RunMirror | None
    ) -> None:
        self._time = StopTime(stop_before)
        self._signals = StopSignals(stop_signals)
        self._mirror = mirror

    @property
    def is_heeded(self) -> bool:
        """Whether a signal has come, or the time was found to be over."""
        return self._signals.requested or self._time.reached

    def is_made(self, needed_seconds: Callable[[], float]) -> bool:
        """Return whether to stop.

        Args:
            needed_seconds: Returns how long one more step and its save take.
        """
        if self._signals.requested or not self._time.is_set:
            return self._signals.requested
        sending = 0.0 if self._mirror is None else self._mirror.stop_seconds
        return self._time.is_reached(needed_seconds() + sending)

    def give_up(self) -> None:
        """See `StopSignals`."""
        self._signals.give_up()

    def close(self) -> None:
        """Give the handlers of the signals back."""
        self._signals.restore()
