"""Deletion of old checkpoints after a save."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safeckpt.errors import LoadError, SafeckptWarning
from safeckpt.run.catalog import Catalog, Checkpoint, score
from safeckpt.store import (
    Best,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPeriod,
    Policy,
    asides_to_prune,
    to_prune,
)
from safeckpt.system.warn import warn_caller

__all__ = ["Pruning"]


def _bests(keep_best: Any) -> list[Best]:
    if keep_best is None:
        return []
    if isinstance(keep_best, Best):
        return [keep_best]
    if not isinstance(keep_best, Sequence) or not all(isinstance(best, Best) for best in keep_best):
        raise TypeError(f"keep_best takes a Best, such as Best('accuracy', 'max'), or several; got {keep_best!r}")
    return list(keep_best)


def _by_step(
    keep_last: int, keep_every: int | dt.timedelta | None, created_at: Callable[[int], dt.datetime | None]
) -> list[Policy]:
    policies: list[Policy] = [KeepLast(keep_last)]
    if isinstance(keep_every, dt.timedelta):
        policies.append(KeepPeriod(keep_every, created_at))
    elif keep_every is not None:
        policies.append(KeepEvery(keep_every))
    return policies


class Pruning:
    """Deletes the checkpoints that no policy keeps.

    Args:
        catalog: The checkpoints of the directory.
        keep_last: Newest good ones to keep.
        keep_best: Best ones to keep, for one metric or several.
        keep_every: What to keep for good: steps that are its multiples, or the newest good one of each period.
    """

    def __init__(
        self,
        catalog: Catalog,
        keep_last: int,
        keep_best: Best | Sequence[Best] | None,
        keep_every: int | dt.timedelta | None,
    ) -> None:
        self._files = catalog.files
        self._catalog = catalog
        self._keep_last = keep_last
        # What a file under our name says does not change while we hold the directory: not even its status is looked
        # at again, since thousands may have to be compared at every save.
        self._scores: dict[tuple[str, int], float | None] = {}
        self._times: dict[int, dt.datetime] = {}
        self._keep_every = keep_every
        self._policies = _by_step(keep_last, keep_every, self._created_at)
        self._is_silent = keep_best is None
        self._is_unannounced = False
        self._bests: list[Best] = []
        self._keep_bests(_bests(keep_best))

    def _keep_bests(self, bests: Sequence[Best]) -> None:
        self._bests.extend(bests)
        self._policies.extend(KeepBest(best, functools.partial(self._score, best.metric)) for best in bests)

    @property
    def rules(self) -> dict[str, Any]:
        """What is kept for its metrics, for the header of a checkpoint; nothing where that is nothing."""
        return {"keep_best": [[best.metric, best.mode, best.count] for best in self._bests]} if self._bests else {}

    def adopt(self, header: Mapping[str, Any]) -> None:
        """Keep the best ones as the run did that saved, where this process was told nothing.

        Args:
            header: Of the checkpoint that was restored.
        """
        if self._is_silent and not self._bests:
            self._keep_bests([Best(*one) for one in header.get("keep_best", ())])
            self._is_unannounced = bool(self._bests)

    def announce(self) -> None:
        """Warn, once and before a save, that the best ones stay though this process was not told to keep them."""
        if self._is_unannounced:
            self._is_unannounced = False
            warn_caller(
                "This run keeps its best checkpoints, and this manager was made without keep_best: they are kept as "
                f"before. Write keep_best={self._bests!r}, or keep_best=() if they may be deleted.",
                SafeckptWarning,
            )

    def policies_for(self, header_of: Callable[[int], Mapping[str, Any]]) -> list[Policy]:
        """Return the same rules for copies of the checkpoints elsewhere.

        Args:
            header_of: Returns the header of a copy; empty where it has none.
        """

        def described(step: int) -> Checkpoint | None:
            try:
                return Checkpoint.from_header(header_of(step), self._files.path_of(step), 0)
            except LoadError:
                return None

        def value(metric: str, step: int) -> float | None:
            one = described(step)
            return None if one is None else score(one, metric)

        def created_at(step: int) -> dt.datetime | None:
            one = described(step)
            return None if one is None else one.created_at

        return [
            *_by_step(self._keep_last, self._keep_every, created_at),
            *(KeepBest(best, functools.partial(value, best.metric)) for best in self._bests),
        ]

    def prune(self, saved: int) -> list[int]:
        """Delete what no policy keeps and return the steps. What cannot be listed or deleted is a warning.

        Args:
            saved: The step that was committed just now.
        """
        self._scores = {key: score for key, score in self._scores.items() if key[1] < saved}
        self._times = {step: time for step, time in self._times.items() if step < saved}
        try:
            return self._prune()
        except OSError as error:  # the save has succeeded, and an error would say that it has not
            text = f"Nothing more was deleted in {self._files.path}: {error}. It is tried again at the next save."
            warn_caller(text, SafeckptWarning)
            return []

    def unread(self, saving: int) -> list[int]:
        """Return the steps that `prune` would have to read before it deletes, when this step is saved; newest first."""
        asked: list[int] = []

        def is_good(step: int) -> bool:
            if step != saving and not self._catalog.is_cached(step):
                asked.append(step)
            return True  # as nearly all of them are; what else has to be read then, is read by one process

        to_prune(sorted({*self._files.steps(), saving}), self._policies, is_good=is_good)
        return asked

    def _prune(self) -> list[int]:
        steps, asides = self._files.steps_and_asides()
        pruned = [
            step for step in to_prune(steps, self._policies, is_good=self._catalog.is_good) if self._files.remove(step)
        ]
        outrun = asides_to_prune(
            asides,
            steps,
            keep_last=self._keep_last,
            is_good=self._catalog.is_good,
            is_good_aside=lambda aside: self._catalog.is_good_file(aside.path, aside.step),
        )
        for aside in outrun:
            if self._files.remove_aside(aside):
                self._catalog.forget(aside.path)
        gone = set(pruned)
        for step in gone:
            self._catalog.forget(self._files.path_of(step))
        self._scores = {key: score for key, score in self._scores.items() if key[1] not in gone}
        self._times = {step: time for step, time in self._times.items() if step not in gone}
        return pruned

    def _created_at(self, step: int) -> dt.datetime | None:
        if step not in self._times:
            try:
                self._times[step] = self._catalog.peek(step).created_at
            except (LoadError, OSError):
                return None
        return self._times[step]

    def _score(self, metric: str, step: int) -> float | None:
        key = metric, step
        if key not in self._scores:
            try:
                self._scores[key] = score(self._catalog.peek(step), metric)
            except (LoadError, OSError):
                return None
        return self._scores[key]
