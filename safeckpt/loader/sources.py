"""Where batches come from: a map-style dataset, an iterable one, or a loader that keeps its own position.

Each source begins an epoch anywhere and says what is needed to begin there again. The three answers:

- map: indices are drawn again up to the position, from streams and generators as they were at the epoch's start;
- iterable: each worker's dataset gets its state back, or draws as many batches as before and throws them away;
- loader: its own `state_dict`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from safeckpt.loader.fetch import IterableFetch, MapFetch, inner_loader
from safeckpt.loader.inputs import describe_dataloader, describe_loader, rank_of
from safeckpt.loader.order import EpochOrder, sampler_chain
from safeckpt.loader.streams import PrivateStreams, mix, restore_streams, save_streams, seed_streams
from safeckpt.state.component import class_name

__all__ = ["INSIDE", "LEFT", "OUTSIDE", "Source", "make_source"]

logger = logging.getLogger("safeckpt")

# Where in an epoch a snapshot is taken: within one, between two, or after one that was left early.
INSIDE, OUTSIDE, LEFT = "inside", "outside", "left"

Snapshot = dict[str, Any]  # plain values and tensors, different for each source

# What a derived seed is for.
_ORDER, _BATCHES, _WORKERS = 1, 2, 3


def _seed_for(purpose: int, seed: int, epoch: int, rank: int = 0) -> int:
    return mix(mix(mix(seed, purpose), epoch), rank)


class Source(Protocol):
    """What ResumableLoader needs to know about where its batches come from."""

    kind: str

    def inputs(self) -> dict[str, Any]:
        """Return what must not change between save and resume, as plain values."""

    def check(self, snapshot: Snapshot) -> list[str]:
        """Return what keeps `snapshot` from being used here, one sentence each."""

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Return an iterator over (number, batch) from number `batch` of an epoch on.

        `snapshot` is None at the ordinary start of the next epoch. Batches in `left_out` may come all the same.
        """

    def snapshot(self, where: str, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return what `begin` needs to go on from here. Changes nothing, draws nothing from the process's streams."""

    def finish(self) -> None:
        """Raise RuntimeError when the iterator has stopped for another reason than the end of the epoch."""


class _Tasks:
    """Tasks of one epoch; `complete` says that they came to their end and did not just break off."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks = tasks
        self._broken = False
        self.complete = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._tasks)
        except StopIteration:
            self.complete = not self._broken
            raise
        except BaseException:
            # A generator that has raised says StopIteration ever after, as if it had come to its end.
            self._broken = True
            raise


class _Plan:
    """Stands in the place of an inner DataLoader's batch sampler and gives it the tasks of one epoch at a time.

    torch calls `iter` on it twice when there are workers, so it must not begin anew. No object here may be part of
    a reference cycle: workers that the garbage collector finds take torch five seconds each to end.
    """

    def __init__(self) -> None:
        self._tasks = _Tasks(iter(()))

    def assign(self, tasks: Iterator[Any]) -> bool:
        """Take these tasks and return whether there is at least one."""
        first = list(itertools.islice(tasks, 1))
        self._tasks = _Tasks(itertools.chain(first, tasks))
        self._tasks.complete = not first
        return bool(first)

    def __iter__(self) -> Iterator[Any]:
        return self._tasks

    def finish(self) -> None:
        """Raise RuntimeError when tasks were left: a generator that raised before looks like one that has ended."""
        if not self._tasks.complete:
            raise RuntimeError(
                "the iteration broke off before the end of the epoch, after an error in the sampler or a StopIteration "
                "in the dataset; the position is where it broke off, iterate the loader again to begin the next epoch"
            )


class MapSource:
    """A DataLoader over a map-style dataset."""

    kind = "map"

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._dataloader = dataloader
        self.chain = sampler_chain(dataloader)
        self._order = EpochOrder(dataloader)
        self._fetch = MapFetch(dataloader)
        self._plan = _Plan()
        self._inner = inner_loader(dataloader, self._fetch, self._plan)
        self._start: dict[str, Any] = {}

    def inputs(self) -> dict[str, Any]:
        return describe_dataloader(self._dataloader, self.chain)

    def check(self, snapshot: Snapshot) -> list[str]:
        return self._order.check(snapshot)

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        if snapshot is not None:
            self._order.restore(snapshot)
        self._start = self._order.state()
        self._set_epoch(epoch)
        base = _seed_for(_BATCHES, seed, epoch, rank_of(self.chain))
        order = self._order.draw(_seed_for(_ORDER, seed, epoch), epoch, batch)
        wanted = ((number, indices) for number, indices in order if (epoch, number) not in left_out)
        if not self._plan.assign((epoch, number, mix(base, number), indices) for number, indices in wanted):
            return iter(())
        _seed_workers(self._inner, seed, epoch)
        return iter(self._inner)

    def _set_epoch(self, epoch: int) -> None:
        self._fetch.epoch = -1
        self._fetch.set_epoch(epoch)
        for sampler in self.chain:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def snapshot(self, where: str, seed: int, epoch: int, batch: int) -> Snapshot:
        if where == INSIDE:
            return self._start
        if where == LEFT:
            return self._order.after(self._start, _seed_for(_ORDER, seed, epoch), epoch, batch)
        return self._order.state()

    def finish(self) -> None:
        self._plan.finish()


def _seed_workers(inner: DataLoader[Any], seed: int, epoch: int) -> None:
    """Let `worker_info.seed`, and with it what a `worker_init_fn` draws, depend on seed and epoch only."""
    if isinstance(inner.generator, torch.Generator):
        inner.generator.manual_seed(_seed_for(_WORKERS, seed, epoch))


@dataclass
class _Progress:
    """How far each worker's stream has been handed out, and whose turn is next."""

    workers: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0

    @property
    def complete(self) -> bool:
        return all(worker["ended"] for worker in self.workers)


def _turns(task: tuple[int, int, int], *, turn: int, count: int, starts: dict[int, dict[str, Any]]) -> Iterator[Any]:
    """Yield tasks without end. torch gives task n to worker n modulo their count, beginning at worker 0."""
    yield from itertools.repeat(None, turn)
    for number in itertools.count(turn):
        yield (*task, starts.pop(number % count, None))


class _Turns:
    """Hands out the batches of workers that take turns."""

    def __init__(self, items: Iterator[Any], number: int, progress: _Progress) -> None:
        self._items = items
        self._number = number
        self._progress = progress

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        progress = self._progress
        while not progress.complete:
            item = next(self._items)
            if item is None:
                continue
            index, worker, batch = item
            progress.turn = (index + 1) % len(progress.workers)
            if worker is None:
                progress.workers[index]["ended"] = True
                continue
            progress.workers[index] = worker
            self._number += 1
            return self._number - 1, batch
        raise StopIteration


class IterableSource:
    """A DataLoader over an iterable dataset. The sharding between workers is the dataset's own affair."""

    kind = "iterable"

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._dataloader = dataloader
        self._fetch = IterableFetch(dataloader)
        self._plan = _Plan()
        self._inner = inner_loader(dataloader, self._fetch, self._plan)
        self._count = max(dataloader.num_workers, 1)
        self._run = 0
        self._progress = _Progress()

    def inputs(self) -> dict[str, Any]:
        return describe_dataloader(self._dataloader, []) | {"workers": self._count}

    def check(self, snapshot: Snapshot) -> list[str]:
        if snapshot["stateful"] and not self._fetch.stateful:
            return ["the saved position is a state of the dataset, which has no load_state_dict now"]
        return []

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        fresh = [{"drawn": 0, "state": None, "ended": False} for _ in range(self._count)]
        workers = fresh if snapshot is None else [dict(worker) for worker in snapshot["workers"]] or fresh
        turn = 0 if snapshot is None else snapshot["turn"]
        self._tell_of_discarding(workers, epoch, batch)
        self._run += 1
        self._fetch.epoch = -1
        self._fetch.set_epoch(epoch)
        base = _seed_for(_BATCHES, seed, epoch, rank_of([]))
        starts = {} if snapshot is None else dict(enumerate(workers))
        self._plan.assign(_turns((self._run, epoch, base), turn=turn, count=self._count, starts=starts))
        _seed_workers(self._inner, seed, epoch)
        self._progress = _Progress(workers, turn)
        return _Turns(iter(self._inner), batch, self._progress)

    def _tell_of_discarding(self, workers: list[dict[str, Any]], epoch: int, batch: int) -> None:
        count = sum(worker["drawn"] for worker in workers if worker["state"] is None and not worker["ended"])
        if count:
            logger.warning(
                "%s has no state_dict: %d batches are drawn and thrown away to reach batch %d of epoch %d",
                class_name(self._fetch.dataset), count, batch, epoch,
            )  # fmt: skip

    def snapshot(self, where: str, seed: int, epoch: int, batch: int) -> Snapshot:
        if where != INSIDE:
            return {"workers": [], "turn": 0, "stateful": self._fetch.stateful}
        workers = [dict(worker) for worker in self._progress.workers]
        in_process = self._dataloader.num_workers == 0
        # A fetch that raised half-way has moved the dataset past the last batch that was handed out.
        if in_process and not workers[0]["ended"] and workers[0]["drawn"] == self._fetch.drawn:
            workers[0]["state"] = self._fetch.state()
        return {"workers": workers, "turn": self._progress.turn, "stateful": self._fetch.stateful}

    def finish(self) -> None:
        if not self._progress.complete:
            self._plan.finish()


class LoaderSource:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does.

    What it does in the training process is seeded like everything else; what it does in workers is its own affair.
    """

    kind = "loader"

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def inputs(self) -> dict[str, Any]:
        return describe_loader(self._loader)

    def check(self, snapshot: Snapshot) -> list[str]:
        return []

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        def start() -> Iterator[Any]:
            if snapshot is not None:
                self._loader.load_state_dict(snapshot["state"])
            iterator = iter(self._loader)
            # An epoch that was left early is left again: the loader itself knows what it starts with next.
            return iter(self._loader) if snapshot is not None and snapshot["left"] else iterator

        iterator = PrivateStreams(_seed_for(_ORDER, seed, epoch)).run(start)
        return _SeededSteps(iterator, _seed_for(_BATCHES, seed, epoch, rank_of([])), batch)

    def snapshot(self, where: str, seed: int, epoch: int, batch: int) -> Snapshot:
        # Before its first iteration StatefulDataLoader makes the iterator when asked for its state.
        state = PrivateStreams(_seed_for(_ORDER, seed, epoch)).run(self._loader.state_dict)
        return {"state": state, "left": where == LEFT}

    def finish(self) -> None:
        pass


class _SeededSteps:
    """Takes the batches of an iterator, each on streams of its own."""

    def __init__(self, iterator: Iterator[Any], seed: int, number: int) -> None:
        self._iterator = iterator
        self._seed = seed
        self._number = number

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        number = self._number
        outside = save_streams()
        try:
            seed_streams(mix(self._seed, number))
            batch = next(self._iterator)
        finally:
            restore_streams(outside)
        self._number += 1
        return number, batch


def make_source(loader: Any) -> Source:
    """Return the source for what the user gave.

    Raises:
        TypeError: It is neither a DataLoader nor a loader with state_dict and load_state_dict.
        ValueError: Its batches come in no defined order.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and hasattr(loader, "__iter__"):
        return LoaderSource(loader)
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "ResumableLoader takes a torch.utils.data.DataLoader, or a loader with state_dict and load_state_dict; "
            f"got {class_name(loader)}"
        )
    cls = type(loader)
    if cls.__iter__ is not DataLoader.__iter__ or cls._get_iterator is not DataLoader._get_iterator:
        raise TypeError(
            f"{cls.__qualname__} iterates in its own way, which ResumableLoader would bypass: wrap a plain DataLoader, "
            "then put the rest around the ResumableLoader"
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise TypeError(
            "the dataset is a DataPipe, which keeps shuffle state that no loader can reach: use a plain Dataset or "
            "IterableDataset, or a loader with state_dict"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError("in_order=False gives batches in the order of arrival, which no resume can repeat")
    return IterableSource(loader) if isinstance(loader.dataset, IterableDataset) else MapSource(loader)
