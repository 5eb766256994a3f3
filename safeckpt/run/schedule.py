"""When a checkpoint is due."""

from __future__ import annotations

import datetime as dt
import time

__all__ = ["SaveSchedule"]


class SaveSchedule:
    """Tells when `end_step` has to save.

    Args:
        every: A number of steps, a `timedelta`, or None for never.
    """

    def __init__(self, every: int | dt.timedelta | None) -> None:
        number = isinstance(every, int) and not isinstance(every, bool)
        if every is not None and not number and not isinstance(every, dt.timedelta):
            raise TypeError(f"save_every must be a number of steps, a timedelta or None; got {every!r}")
        if (number and every < 1) or (isinstance(every, dt.timedelta) and every <= dt.timedelta(0)):  # type: ignore[operator] # an int
            raise ValueError(f"save_every must be positive; got {every!r}")
        self._every = every
        self._since = time.monotonic()
        self._step = 0
        self._is_asked = False

    @property
    def is_set(self) -> bool:
        """Whether it ever asks for a save by itself."""
        return self._every is not None

    def is_due(self, step: int) -> bool:
        """Return whether a save is due at this step."""
        if self._is_asked:
            return True
        if isinstance(self._every, dt.timedelta):
            return time.monotonic() - self._since >= self._every.total_seconds()
        return self.is_due_by_count(step)

    def is_due_by_count(self, step: int) -> bool:
        """Return whether a save is due at this step by the number of steps alone, as every rank knows by itself."""
        # Passing a multiple counts as reaching it: a step may be skipped by a rollback.
        return isinstance(self._every, int) and step // self._every > self._step // self._every

    def restart(self, step: int) -> None:
        """Count from this step and this moment: it was saved, is being saved, or was restored."""
        self._step = step
        self._since = time.monotonic()
        self._is_asked = False

    def ask(self) -> None:
        """Ask for a save at the next step."""
        self._is_asked = True
