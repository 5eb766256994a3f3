"""A DataLoader over an iterable dataset.

Each worker's dataset gets its state back, or draws as many batches as before and throws them away.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from safeckpt.errors import StateMismatchError, UncapturedStateWarning
from safeckpt.loader.fetch import IterableFetch, Start, inner_loader
from safeckpt.loader.inputs import describe_dataloader, rank_of
from safeckpt.loader.source import BATCHES, Snapshot, logger, seed_for
from safeckpt.loader.tasks import Plan, start
from safeckpt.state.component import class_name
from safeckpt.system.warn import warn_caller

__all__ = ["IterableSource"]


class _Progress:
    """How far each worker's stream has been handed out, and whose turn is next."""

    def __init__(self, records: list[dict[str, Any]], turn: int) -> None:
        self.records = records
        self.turn = turn

    @property
    def complete(self) -> bool:
        return all(record["ended"] for record in self.records)


class _Place(NamedTuple):
    """Where the workers are behind a batch."""

    records: list[dict[str, Any]]
    turn: int


def _turns(task: tuple[int, int, int], *, turn: int, count: int, starts: dict[int, Start]) -> Iterator[Any]:
    """Yield tasks without end. torch gives task n to worker n modulo their count, beginning at worker 0."""
    yield from itertools.repeat(None, turn)
    for number in itertools.count(turn):
        yield (*task, starts.pop(number % count, None))


class _Turns:
    """Hands out the batches of workers that take turns, from a number on."""

    def __init__(self, items: Iterator[Any], number: int, wanted: int, source: IterableSource) -> None:
        self._items = items
        self._number = number
        self._wanted = wanted
        self._source = source

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        progress = self._source.progress
        while not progress.complete:
            item = next(self._items)
            if item is None:
                continue
            worker, record, *batch = item
            progress.turn = (worker + 1) % len(progress.records)
            if record.pop("differs"):
                self._source.warn_of_other_samples(progress.records[worker]["drawn"])
            progress.records[worker] = record if batch else record | {"ended": True}
            if batch:
                self._number += 1
                if self._number > self._wanted:
                    return self._number - 1, batch[0]
        if self._number < self._wanted:
            raise StateMismatchError(
                mismatches=[f"the position is batch {self._wanted}, and the stream ends after {self._number}"]
            )
        raise StopIteration


class IterableSource:
    """A DataLoader over an iterable dataset. The sharding between workers is the dataset's own affair.

    Snapshot: "workers", the record of each (`IterableFetch`), empty at the start of an epoch; "turn", the worker
    whose batch comes next; "stateful", whether records hold states; "ends", how the epoch before this one ended, since
    a dataset with a state may carry something from epoch to epoch; "unread", its state before the first, until that has
    ended: the dataset may have been read from before a loader is made of it.
    """

    kind = "iterable"
    told: int | None = None

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._dataloader = dataloader
        self._fetch = IterableFetch(dataloader)
        self._plan = Plan()
        self._inner = inner_loader(dataloader, self._fetch, self._plan)
        self._count = max(dataloader.num_workers, 1)
        self._lives_on = dataloader.num_workers == 0 or dataloader.persistent_workers
        self._run = 0
        self._epoch = 0
        self._touched = False  # whether workers were asked for anything, and are where the last epoch left them
        self._ends: dict[str, Any] | None = None
        self._unread: Any = None
        self.progress = _Progress([], 0)

    def inputs(self, epoch: int | None = None) -> dict[str, Any]:
        """Return what must not change, the number of workers included."""
        return describe_dataloader(self._dataloader, []) | {"workers": self._count}

    def check(self, snapshot: Snapshot) -> list[str]:
        """Refuse the states of a dataset that takes none now."""
        if snapshot["stateful"] and not self._fetch.stateful:
            return ["the saved position is a state of the dataset, which has no load_state_dict now"]
        return []

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Bring each worker's dataset to its place, and hand out what they give in turn."""
        explicit = snapshot is not None or not (self._lives_on and self._touched)
        if snapshot is not None:
            self._ends, self._unread = snapshot.get("ends"), snapshot.get("unread")
        unread = self._first_state()
        if snapshot is not None and unread is not None:
            self._fetch.take_unread(unread)
        saved = [] if snapshot is None else [dict(record) for record in snapshot["workers"]]
        turn = snapshot["turn"] if snapshot is not None and saved else 0
        self._tell_of_discarding(saved, epoch, batch)
        starts: dict[int, Start] = {}
        if explicit:
            ends = None
            if self._ends is not None:
                before = self._ends["epoch"]
                ends = (before, seed_for(BATCHES, seed, before, rank_of([])), self._ends["workers"])
            starts = {worker: Start(saved[worker] if saved else None, ends) for worker in range(self._count)}
        self._run += 1
        self._epoch = epoch
        self._fetch.epoch = -1
        self._fetch.set_epoch(epoch)
        task = (self._run, epoch, seed_for(BATCHES, seed, epoch, rank_of([])))
        self._plan.assign(_turns(task, turn=turn, count=self._count, starts=starts))
        fresh = {"drawn": 0, "at": 0, "state": None, "ended": False, "digest": 0}
        self.progress = _Progress(saved or [dict(fresh) for _ in range(self._count)], turn)
        self._touched = not self.progress.complete
        return _Turns(start(self._inner, seed, epoch), batch if saved else 0, batch, self)

    def _tell_of_discarding(self, records: list[dict[str, Any]], epoch: int, batch: int) -> None:
        count = sum(record["drawn"] for record in records if record["state"] is None and not record["ended"])
        if count:
            logger.warning(
                "%s has no state_dict: %d batches are drawn and thrown away to reach batch %d of epoch %d",
                class_name(self._fetch.dataset), count, batch, epoch,
            )  # fmt: skip

    def warn_of_other_samples(self, count: int) -> None:
        """Warn that what was drawn again is not what the run had drawn before."""
        warn_caller(
            f"the first {count} batches of a worker's stream were drawn again to reach the saved position, and they "
            f"are not the ones that were drawn before it was saved: {class_name(self._fetch.dataset)} gives other "
            "samples each time. The run goes on with samples that it may have seen already. Give the dataset "
            "state_dict and load_state_dict, or let it derive its order from the random streams and set_epoch alone.",
            UncapturedStateWarning,
        )

    def place(self) -> _Place:
        """Return the records of all workers; they are replaced and never changed."""
        return _Place(list(self.progress.records), self.progress.turn)

    def between(self) -> Snapshot:
        """Return how the last epoch ended."""
        return self._snapshot([], 0, {"ends": self._ends, "unread": self._first_state()})

    def _first_state(self) -> Any:
        """Return the dataset's state before its first epoch, while that has not ended."""
        if self._unread is None and not self._touched and self._fetch.stateful:
            self._unread = self._fetch.early_state()
        return None if self._ends else self._unread

    def _snapshot(self, records: list[dict[str, Any]], turn: int, before: Mapping[str, Any]) -> Snapshot:
        """Return a snapshot; `before` says how the dataset was at the beginning of the epoch."""
        made = {"workers": records, "turn": turn, "stateful": self._fetch.stateful, "ends": before.get("ends")}
        return made if before.get("unread") is None else made | {"unread": before["unread"]}

    def within(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return the records of all workers."""
        if place is None:
            return start
        return self._snapshot([dict(record) for record in place.records], place.turn, start)

    def after(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return how this epoch ended; one that was left begins anew, from how the epoch before it had ended."""
        if place is None or not all(record["ended"] for record in place.records):
            return self.beginning(start)  # an epoch that was left begins anew
        return self._snapshot([], 0, {"ends": self._ended(epoch, place.records)})

    def _ended(self, epoch: int, records: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"epoch": epoch, "workers": records} if self._fetch.stateful else None

    def beginning(self, start: Snapshot) -> Snapshot:
        """Return how the epoch before had ended."""
        return self._snapshot([], 0, start)

    def finish(self) -> None:
        """Keep how the epoch ended; raise when it broke off."""
        if not self.progress.complete:
            self._plan.finish()
        self._ends = self._ended(self._epoch, self.progress.records)
