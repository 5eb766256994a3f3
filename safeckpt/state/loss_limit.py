"""A limit for the loss: a number, or a multiple of the median of the losses before it, which a checkpoint holds."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from safeckpt.state.loss import Loss
from safeckpt.system.arguments import checked_int, checked_number

__all__ = ["LossLimit", "Spike", "TimesMedian", "checked_limit"]

_MOST_STEPS = 10_000  # 160 kB in every checkpoint


@dataclass(frozen=True)
class TimesMedian:
    """A multiple of the median of the last losses, for `Guard(loss_above=...)`.

    The losses are those that were given to the manager; they are part of each checkpoint, so that a resumed run decides
    as the one that nothing stopped. Until there are as many as `steps` there is no limit, and none where the median is
    0 or less. Each process of a group has its own.

    Attributes:
        factor: How many times the median, more than 1.
        steps: How many of the last losses, 2 to 10,000.

    Raises:
        TypeError: A value is of another kind.
        ValueError: A value is out of range.
    """

    factor: float
    steps: int = 100

    def __post_init__(self) -> None:
        checked_number("TimesMedian: factor", self.factor)
        if not 1 < self.factor < math.inf:
            raise ValueError(f"TimesMedian: factor must be more than 1; got {self.factor!r}")
        checked_int("TimesMedian: steps", self.steps, least=2)
        if self.steps > _MOST_STEPS:
            raise ValueError(f"TimesMedian: steps must be {_MOST_STEPS:,} or less; got {self.steps!r}")


def checked_limit(above: Any) -> Any:
    """Return a limit as it is.

    Raises:
        TypeError: It is neither a number, nor a `TimesMedian`, nor None.
        ValueError: It is NaN or Inf.
    """
    if above is None or isinstance(above, TimesMedian):
        return above
    if isinstance(above, bool) or not isinstance(above, int | float):
        raise TypeError(f"loss_above must be a number, a TimesMedian or None; got {above!r}")
    if not math.isfinite(above):
        raise ValueError(f"loss_above must be finite; got {above!r}")
    return above


class Spike(NamedTuple):
    """A loss above its limit.

    Attributes:
        loss: The loss.
        limit: The limit.
        median: That of the losses before; None where the limit is a number.
    """

    loss: float
    limit: float
    median: float | None


class LossLimit:
    """Judges each loss by those before it.

    Args:
        above: The limit.
    """

    def __init__(self, above: float | TimesMedian | None) -> None:
        self._above = above
        self._recent: deque[tuple[int, float]] = deque()  # step and loss, ascending
        self._sorted: list[float] = []

    def spike(self, step: int, loss: Loss) -> Spike | None:
        """Return what is wrong with the finite loss of a step; None when nothing is.

        Of several numbers the largest counts.
        """
        above, value = self._above, loss.largest
        if above is None or value is None:
            return None
        if not isinstance(above, TimesMedian):
            return Spike(value, float(above), None) if value > above else None
        self._forget_from(step)
        if len(self._sorted) < above.steps:
            return None
        half = above.steps // 2
        middle = self._sorted[half : half + 1] if above.steps % 2 else self._sorted[half - 1 : half + 1]
        median = sum(middle) / len(middle)
        limit = above.factor * median
        return Spike(value, limit, median) if median > 0 and value > limit else None

    def add(self, step: int, loss: Loss) -> None:
        """Take the loss of a step that was not refused. One that comes again takes the place of the first."""
        value = loss.largest if isinstance(self._above, TimesMedian) else None
        if value is None:
            return
        self._forget_from(step)
        self._append(step, value)

    def capture(self) -> dict[str, torch.Tensor] | None:
        """Return the losses that the next decision depends on: int64 steps, float64 losses; None where none does."""
        if not isinstance(self._above, TimesMedian):
            return None
        steps, losses = zip(*self._recent, strict=True) if self._recent else ((), ())
        return {
            "steps": torch.tensor(steps, dtype=torch.int64),
            "losses": torch.tensor(losses, dtype=torch.float64),
        }

    def restore(self, saved: Mapping[str, torch.Tensor] | None) -> None:
        """Go on from the losses in a checkpoint; None where it has none: then the first ones are not judged."""
        self._recent.clear()
        self._sorted.clear()
        if saved is not None and isinstance(self._above, TimesMedian):
            for step, loss in zip(saved["steps"].tolist(), saved["losses"].tolist(), strict=True):
                self._append(step, loss)

    def _append(self, step: int, value: float) -> None:
        assert isinstance(self._above, TimesMedian)
        self._recent.append((step, value))
        bisect.insort(self._sorted, value)
        if len(self._recent) > self._above.steps:
            self._drop(self._recent.popleft()[1])

    def _forget_from(self, step: int) -> None:
        while self._recent and self._recent[-1][0] >= step:
            self._drop(self._recent.pop()[1])

    def _drop(self, value: float) -> None:
        del self._sorted[bisect.bisect_left(self._sorted, value)]
