"""Decides which checkpoints may be deleted. Nothing is deleted here.

A policy says which steps it wants to keep; a step is pruned only when no policy wants it, it is not the newest good
one, and it is known to be good. What is not good never counts as kept and is never deleted: it may hold the only trace
of what went wrong, and a newer version may be able to read it.
"""

from __future__ import annotations

import datetime as dt
import functools
import heapq
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from safeckpt.system.arguments import checked_int

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from safeckpt.store.directory import Aside

__all__ = ["Best", "KeepBest", "KeepEvery", "KeepLast", "KeepPeriod", "Policy", "asides_to_prune", "to_prune"]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MODES = ("min", "max")


class Policy(Protocol):
    """Chooses the steps to keep."""

    def keeps(self, steps: Sequence[int], is_good: Callable[[int], bool]) -> Collection[int]:
        """Return the steps to keep, out of `steps` in ascending order; ask `is_good` as seldom as possible."""


@dataclass(frozen=True)
class Best:
    """Rule that ranks checkpoints by a metric.

    Attributes:
        metric: Name of the metric that is given to ``save``; ``"loss"`` is the loss.
        mode: Whether a small (``"min"``) or a large (``"max"``) value is good.
        count: How many of the best are kept, 1 or more.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise TypeError(f"metric must be the name of a metric, not {type(self.metric).__name__}")
        if not self.metric:
            raise ValueError("metric must be the name of a metric, not an empty string")
        if self.mode not in _MODES:
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")
        checked_int("count", self.count, least=1)

    def rank(self, scores: Iterable[tuple[int, float | None]]) -> Iterator[int]:
        """Go through the steps of (step, value) pairs, best first.

        A step without a value, or with one that is not finite, is left out. Of equal values the earlier step is
        better, so that a metric which has reached its bound does not replace its checkpoint for ever.
        """
        sign = 1 if self.mode == "min" else -1
        heap = [(sign * value, step) for step, value in scores if value is not None and math.isfinite(value)]
        heapq.heapify(heap)  # only the first few are ever asked for
        while heap:
            yield heapq.heappop(heap)[1]


class KeepLast:
    """Keep the newest `count` good steps."""

    def __init__(self, count: int) -> None:
        self.count = checked_int("keep_last", count, least=1)

    def keeps(self, steps: Sequence[int], is_good: Callable[[int], bool]) -> Collection[int]:
        """Return the steps to keep."""
        if len(steps) <= self.count:  # nothing can be too many, so no file has to be looked at
            return steps
        return list(islice(filter(is_good, reversed(steps)), self.count))


class KeepEvery:
    """Keep the steps that are multiples of `interval`, for good."""

    def __init__(self, interval: int) -> None:
        self.interval = checked_int("keep_every", interval, least=1)

    def keeps(self, steps: Sequence[int], is_good: Callable[[int], bool]) -> Collection[int]:
        """Return the steps to keep."""
        return [step for step in steps if step % self.interval == 0]


class KeepPeriod:
    """Keep the newest good step of each period, for good: of each hour or day, counted from the epoch in UTC.

    Args:
        period: How long a period is.
        created_at: When a step was saved, by what its file says; None when that is not known.
    """

    def __init__(self, period: dt.timedelta, created_at: Callable[[int], dt.datetime | None]) -> None:
        if period <= dt.timedelta(0):
            raise ValueError(f"keep_every must be positive; got {period!r}")
        self.period = period
        self.created_at = created_at

    def keeps(self, steps: Sequence[int], is_good: Callable[[int], bool]) -> Collection[int]:
        """Return the steps to keep."""
        periods: dict[int, list[int]] = {}
        for step in steps:
            created = self.created_at(step)
            if created is not None:
                periods.setdefault((created - _EPOCH) // self.period, []).append(step)
        # A step that is alone in its period competes with none, so its file is not read.
        chosen = (
            group[0] if len(group) == 1 else next(filter(is_good, reversed(group)), None) for group in periods.values()
        )
        return [step for step in chosen if step is not None]


class KeepBest(NamedTuple):
    """Keep the best good steps.

    Attributes:
        best: What good means.
        score_of: Value of the metric at a step, None when it has none.
    """

    best: Best
    score_of: Callable[[int], float | None]

    def keeps(self, steps: Sequence[int], is_good: Callable[[int], bool]) -> Collection[int]:
        """Return the steps to keep."""
        ranked = self.best.rank((step, self.score_of(step)) for step in steps)
        return list(islice(filter(is_good, ranked), self.best.count))


def to_prune(
    steps: Sequence[int],
    policies: Iterable[Policy],
    *,
    is_good: Callable[[int], bool],
    protected: Collection[int] = (),
) -> list[int]:
    """Return the steps to delete, oldest first.

    Args:
        steps: Every step that has a file, ascending.
        policies: Each keeps some; the newest good step is kept without any.
        is_good: Whether a step's file is good. Asked at most once for a step, newest first where the order is free,
            and only for steps that decide something.
        protected: Steps never to be deleted whatever the policies say.
    """
    good = functools.cache(is_good)
    candidates = set(steps).difference(protected)
    for policy in (*policies, KeepLast(1)):
        if candidates:
            candidates.difference_update(policy.keeps(steps, good))
    return sorted(filter(good, sorted(candidates, reverse=True)))


def asides_to_prune(
    asides: Iterable[Aside],
    steps: Sequence[int],
    *,
    keep_last: int,
    is_good: Callable[[int], bool],
    is_good_aside: Callable[[Aside], bool],
) -> list[Aside]:
    """Return the set-aside checkpoints to delete.

    One goes only when the current timeline has outrun it: at least `keep_last` good checkpoints have a higher step.
    Until then it may be the furthest that training ever got.

    Args:
        asides: Every set-aside checkpoint.
        steps: Every step on the current timeline that has a file, ascending.
        keep_last: How many checkpoints are kept, 1 or more.
        is_good: Whether a step's file is good.
        is_good_aside: Whether a set-aside file is good; one that is not stays.
    """
    checked_int("keep_last", keep_last, least=1)
    lowest = min((aside.step for aside in asides), default=None)
    if lowest is None or len(steps) < keep_last or steps[-keep_last] <= lowest:
        return []
    newest_good: Iterator[int] = filter(is_good, reversed(steps))
    outrun = next(islice(newest_good, keep_last - 1, None), None)
    if outrun is None:
        return []
    return [aside for aside in asides if aside.step < outrun and is_good_aside(aside)]
