"""Passes over a loader: what each began from and how far it has got, and the iterators that users hold."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from safeckpt.system.for_loops import is_asked_by_for_loop

__all__ = ["BeforeNext", "Enumeration", "EpochEnded", "Iteration", "Mark", "Pass"]

_ticks = itertools.count()


class Mark(NamedTuple):
    """A place between two batches of a pass.

    Attributes:
        number: Of the batch that comes next.
        place: What the source needs to go on from here.
    """

    number: int
    place: Any


class Pass:
    """One pass over the batches of an epoch. It outlives the iterator, since a state may be saved after a `break`.

    Args:
        epoch: Of which epoch.
        first: Number of its first batch.
        start: The snapshot that it began from.
        ahead: How many batches are fetched before the one that is trained.
        is_look: Whether it reads an epoch a second time, and moves no position.

    Attributes:
        asked: How many batches were asked for, the one that did not come included.
        count: How many were handed out.
        count_at_step: How many when the last step ended.
        steps: How many steps have ended.
        marks: The places behind the batches handed out lately. The first is that of the batch being trained.
        trained: The place behind the last batch whose step has ended.
        finished: Whether it came to the end of the epoch.
        began: When it began, on the clock that all loaders share; it ticks with every batch.
        last_tick: When it handed out its last batch.
        interrupted_at: `count` when a pass of another loader, that took turns with this one, came to its end.
    """

    __slots__ = (
        "_per_step",
        "_trained_count",
        "asked",
        "began",
        "count",
        "count_at_step",
        "epoch",
        "finished",
        "first",
        "interrupted_at",
        "is_look",
        "last_tick",
        "marks",
        "start",
        "steps",
        "thread",
        "trained",
    )

    def __init__(self, epoch: int, first: int, start: Any, *, ahead: int, is_look: bool = False) -> None:
        self.epoch = epoch
        self.first = first
        self.start = start
        self.is_look = is_look
        self.asked = self.count = self.count_at_step = self.steps = 0
        self._trained_count = self._per_step = 0
        self.marks: deque[Mark] = deque([Mark(first, None)], maxlen=ahead + 1)
        self.trained: Mark | None = None
        self.finished = False
        self.interrupted_at = -1
        self.began = self.last_tick = next(_ticks)
        self.thread = threading.get_ident()

    @property
    def next_number(self) -> int:
        """The number of the batch that is fetched next."""
        return self.marks[-1].number

    @property
    def since_step(self) -> int:
        """How many batches were handed out since the last step ended."""
        return self.count - self.count_at_step

    @property
    def fetched_ahead(self) -> int:
        """How many of the batches handed out are not being trained yet."""
        return min(len(self.marks) - 1, self.count)

    def hand_out(self, number: int, place: Any) -> None:
        """Note that batch `number` was handed out, and where its source is now."""
        self.count += 1
        self.last_tick = next(_ticks)
        self.marks.append(Mark(number + 1, place))

    def takes_turns_with(self, other: Pass) -> bool:
        """Return whether this pass, which is at its end, was iterated side by side with another."""
        return not self.count or other.last_tick > self.began

    def end_micro_step(self) -> None:
        """Count the batches handed out as trained, in the middle of a step."""
        self.trained = self.marks[0]

    def end_step(self) -> None:
        """Count the batches handed out as trained, but for those that were fetched ahead."""
        behind = self.count - self.fetched_ahead
        if self.finished:
            # Nothing is fetched any more: what was ahead is used up, as many batches a step as before.
            behind = min(self.count, max(behind, self._trained_count + max(self._per_step, 1)))
            while self.count - behind < len(self.marks) - 1:
                self.marks.popleft()
        self._per_step = behind - self._trained_count
        self._trained_count = behind
        self.trained = self.marks[0]
        self.count_at_step = self.count
        self.steps += 1


class EpochEnded(StopIteration):
    """The end of an epoch. A `for` takes it as any other; a `next` of the user's shows its text."""

    def __init__(self, progress: Pass) -> None:
        super().__init__()
        self._epoch = progress.epoch
        self._is_empty = not progress.count

    def __str__(self) -> str:
        """Return what has happened, and how to go on."""
        if not self._is_empty:
            return (
                f"epoch {self._epoch} of this ResumableLoader is at its end; the next iter(loader) begins another one"
            )
        return (
            f"no batch of epoch {self._epoch} of this ResumableLoader is left: the restored position is at its end, as "
            "that of a run which was saved at the last batch is. Nothing was changed. A loop "
            "(for epoch in loader.epochs(n): for batch in loader: ...) goes on with what follows the inner loop, and "
            "then with the next epoch, whose batches another iter(loader) gives as well. To look at a batch for its "
            "shape, do it before the restore"
        )


class BeforeNext(Protocol):
    """Called when a loader is asked for its next batch, before it is fetched."""

    def __call__(self, *, in_loop: bool) -> None:
        """Take notice; `in_loop` where a `for` that has handed out batches before is at its head again."""


class Position(Protocol):
    """What an iteration asks of the position it moves."""

    running: Pass | None
    before_next: BeforeNext | None

    def enter(self, iteration: Iteration) -> tuple[Pass, Iterator[tuple[int, Any]]]:
        """Begin the pass of an iteration, or go on with it; return it and its (number, batch)."""

    def hands_out(self, progress: Pass, number: int) -> bool:
        """Note that a batch has come, and return whether it is to be handed out."""

    def finish(self, progress: Pass) -> None:
        """Note that no more batches come."""


class Iteration:
    """One `for` over the loader. It follows the loader's position when that is set from within the loop.

    Its pass begins with the first batch that is asked for: only then can be said whether it is the next epoch, the
    rest of one or a second look at the same.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self._deliveries: Iterator[tuple[int, Any]] = iter(())
        self.progress: Pass | None = None
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        position, progress = self._position, self.progress
        if position.before_next is not None:
            goes_on = progress is not None and position.running is progress
            position.before_next(in_loop=goes_on and is_asked_by_for_loop())
        if progress is None or position.running is not progress:
            self._deliveries = iter(())  # ends the old workers and what they had prefetched before new ones begin
            progress, self._deliveries = position.enter(self)
            self.progress = progress
        progress.asked += 1
        while True:
            try:
                number, batch = next(self._deliveries)
            except StopIteration:
                position.finish(progress)
                self.ended = True
                self._deliveries = iter(())
                raise EpochEnded(progress) from None
            if position.hands_out(progress, number):
                return batch


class Enumeration:
    """Yields (number within the epoch, batch)."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        batch = next(self._iteration)
        progress = self._iteration.progress
        return (0 if progress is None else progress.next_number - 1), batch
