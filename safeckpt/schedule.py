"""When a checkpoint is due, and which ones make way afterwards."""

from __future__ import annotations

import datetime as dt
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

from safeckpt.catalog import Catalog
from safeckpt.errors import LoadError
from safeckpt.file import open_file
from safeckpt.store import (
    Aside,
    Best,
    CheckpointDirectory,
    KeepBest,
    KeepEvery,
    KeepLast,
    Policy,
    asides_to_prune,
    to_prune,
)

__all__ = ["Pruning", "SaveSchedule"]


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

    def at(self, step: int, saved: int) -> bool:
        """Return whether a save is due at this step, when the last one was at `saved`."""
        if isinstance(self._every, dt.timedelta):
            return time.monotonic() - self._since >= self._every.total_seconds()
        # Passing a multiple counts as reaching it: a step may be skipped by a rollback.
        return self._every is not None and step // self._every > saved // self._every

    def saved(self) -> None:
        """Start the clock again."""
        self._since = time.monotonic()


class Pruning:
    """Deletes the checkpoints that no policy keeps.

    Args:
        files: The directory.
        catalog: Tells which of its files are good, and their metrics.
        keep_last: Newest good ones to keep.
        keep_best: Best ones to keep, for one metric or several.
        keep_every: Steps to keep for good: its multiples.
    """

    def __init__(
        self,
        files: CheckpointDirectory,
        catalog: Catalog,
        keep_last: int,
        keep_best: Best | Sequence[Best] | None,
        keep_every: int | None,
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._keep_last = keep_last
        self._policies: list[Policy] = [KeepLast(keep_last)]
        if keep_every is not None:
            self._policies.append(KeepEvery(keep_every))
        for best in [keep_best] if isinstance(keep_best, Best) else keep_best or ():
            if not isinstance(best, Best):
                raise TypeError(f"keep_best takes a Best or a sequence of them; got {best!r}")
            self._policies.append(KeepBest(best, functools.partial(self._score, best.metric)))

    def prune(self) -> list[int]:
        """Delete what no policy keeps and return the steps. A file that cannot be deleted is a warning."""
        steps = self._files.steps()
        pruned = [
            step for step in to_prune(steps, self._policies, is_good=self._catalog.is_good) if self._files.remove(step)
        ]
        outrun = asides_to_prune(
            self._files.asides(),
            steps,
            keep_last=self._keep_last,
            is_good=self._catalog.is_good,
            is_good_aside=_is_good_aside,
        )
        for aside in outrun:
            self._files.remove_aside(aside)
        return pruned

    def _score(self, metric: str, step: int) -> float | None:
        if not self._catalog.is_good(step):
            return None
        checkpoint = self._catalog.peek(step)
        value: Any = checkpoint.metrics.get(metric)
        if value is None and metric == "loss":
            value = checkpoint.loss
        return value if isinstance(value, float) and math.isfinite(value) else None


def _is_good_aside(aside: Aside) -> bool:
    try:
        with open_file(aside.path) as file:
            file.check_structure()
    except (LoadError, FileNotFoundError):
        return False
    return True
