"""What runs where the samples are read, in a worker or in the training process: one seeded piece of work per batch.

These objects stand in the place of the dataset of an inner DataLoader. They are asked for one task at a time,
fetch and collate, and give back the finished batch together with its number: the position is counted from what
arrived, never from what was sent.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from safeckpt.loader.digest import digest_of
from safeckpt.loader.private_generators import find_generators, reseed, warn_of_unreachable
from safeckpt.loader.streams import mix, restore_streams, save_streams, seed_streams
from safeckpt.loader.worker_signals import WorkerSignals
from safeckpt.state.options import same
from safeckpt.state.random_streams import GeneratorComponent

__all__ = ["IterableFetch", "MapFetch", "Start", "StartWorker", "inner_loader"]

T = TypeVar("T")

END = object()  # in the place of a batch, where a stream has ended

# What a dataset raises that has a state only once it is iterated.
_NOT_ITERATED = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class Start(NamedTuple):
    """Where a worker goes on in an iterable dataset.

    Attributes:
        record: Its record there, None at the beginning of an epoch.
        ends: How the epoch before ended: its number, its seed and the records of all workers.
    """

    record: dict[str, Any] | None
    ends: tuple[int, int, list[dict[str, Any]]] | None


def _identity(batch: T) -> T:
    return batch


def _rest_of(iterator: Iterator[T]) -> Iterator[T]:
    """Yield what comes, without asking for `iter`: a dataset that is its own iterator would begin anew."""
    with contextlib.suppress(StopIteration):
        while True:
            yield next(iterator)


def _draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Return whether only torch's own code, known to draw nothing, makes a batch: then no stream needs care."""
    if collate_fn is not default_collate and collate_fn is not default_convert:
        return False
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset, collate_fn)
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part, collate_fn) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)


class Seeded:
    """Runs work on seeded streams: the global ones, and the private generators found in dataset and collate_fn.

    A generator may be made at the first read, or replaced in a worker, so they are looked for again behind the first
    piece of work of each epoch.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}
        self._generators: dict[str, Any] | None = None  # of this process: a worker has its own copies
        warn_of_unreachable(self._roots)

    def begin_epoch(self) -> None:
        """Look for generators again at the next piece of work."""
        self._generators = None

    def look_again(self) -> bool:
        """Return whether there are other generators than before; they are seeded from now on."""
        before, self._generators = self._generators or {}, find_generators(self._roots)
        return any(before.get(path) is not generator for path, generator in self._generators.items())

    def run_repeatable(self, seed: int, work: Callable[[], T]) -> T:
        """Return `work()`, as `run` does; done a second time when the first has made generators."""
        first = self._generators is None
        result = self.run(seed, work)
        return self.run(seed, work) if first and self.look_again() else result

    def run(self, seed: int, work: Callable[[], T]) -> T:
        """Return `work()`; in the training process every stream is afterwards where it was before."""
        if self._generators is None:
            self._generators = find_generators(self._roots)
        if get_worker_info() is None:
            return self._run_apart(seed, work)
        seed_streams(seed)
        if self._generators:
            reseed(self._generators, seed)
        return work()

    def _run_apart(self, seed: int, work: Callable[[], T]) -> T:
        private = [GeneratorComponent(path, generator) for path, generator in (self._generators or {}).items()]
        captured = [component.capture() for component in private]
        saved = save_streams()
        try:
            seed_streams(seed)
            if private:
                reseed(self._generators or {}, seed)
            return work()
        finally:
            restore_streams(saved)
            for component, state in zip(private, captured, strict=True):
                component.apply(state)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_generators": None}


class MapFetch:
    """Fetches from a map-style dataset. Task: (epoch, number, seed, indices); result: (number, batch)."""

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.dataset: Any = dataloader.dataset
        self.epoch = 0
        self._collate_fn = dataloader.collate_fn
        self._batched = dataloader.batch_sampler is not None
        self._seeded = (
            None if _draws_nothing(self.dataset, self._collate_fn) else Seeded(self.dataset, self._collate_fn)
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset of this process, once per epoch: a persistent worker has a copy of its own."""
        if epoch != self.epoch:
            self.epoch = epoch
            if self._seeded is not None:
                self._seeded.begin_epoch()
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)

    def __getitems__(self, task: tuple[int, int, int, Any]) -> tuple[int, Any]:
        epoch, number, seed, index = task
        if epoch != self.epoch:
            self.set_epoch(epoch)
        if self._seeded is None:
            return number, self._batch(index)
        return number, self._seeded.run_repeatable(seed, lambda: self._batch(index))

    def _batch(self, index: Any) -> Any:
        if not self._batched:
            return self._collate_fn(self.dataset[index])
        many = getattr(self.dataset, "__getitems__", None)
        return self._collate_fn(many(index) if many else [self.dataset[i] for i in index])


class IterableFetch:
    """Draws from an iterable dataset, which every worker iterates for itself.

    Task: (run, epoch, seed, start), or None for a turn that is passed over. `start` is None in the middle of a run
    and where the dataset is at the epoch's start already, else a `Start`. Result: (worker, record, batch), without
    the batch when this worker's stream has ended.

    A record says where a worker is, as plain values: "drawn", its batches of this epoch; "ended", whether that was
    all; "state", what its dataset said behind batch "at"; and "digest", of what was drawn from a dataset that says
    nothing. A dataset may begin anew when it sees its end, so of the last batch the state before it is kept: drawing
    on to the end from there leaves any dataset as the epoch left it.
    """

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.dataset: Any = dataloader.dataset
        self.epoch = 0
        self.stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        self._batch_size = dataloader.batch_size
        self._drop_last = dataloader.drop_last
        self._collate_fn = dataloader.collate_fn
        # A dataset that has a state_dict keeps its generators itself.
        self._seeded = Seeded(None if self.stateful else self.dataset, self._collate_fn)
        self._run = -1
        self._iterator: Any = None
        self._unread: Any = None
        self._used = False
        self._ended = False
        self._differs = False
        self._record: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset of this process, once per epoch."""
        MapFetch.set_epoch(cast("MapFetch", self), epoch)  # the same two attributes, and not a MapFetch otherwise

    def _state(self) -> Any:
        """Return a copy of the dataset's state, or its iterator's, or None when neither has one."""
        if self.stateful:
            return copy.deepcopy(self.dataset.state_dict())
        if hasattr(self._iterator, "state_dict") and hasattr(self._iterator, "load_state_dict"):
            return copy.deepcopy(self._iterator.state_dict())
        return None

    def early_state(self) -> Any:
        """Return the state before anything was drawn: some datasets have one only once they are iterated."""
        try:
            return self._state()
        except _NOT_ITERATED:
            return None

    def __getitems__(self, task: tuple[int, int, int, Start | None] | None) -> Any:
        if task is None:
            return None
        run, epoch, seed, start = task
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if run != self._run:
            self._run = run
            self._start(epoch, mix(seed, worker), worker, start)
        batch = END if self._ended else self._draw(mix(seed, worker), collate=True)
        record = self._record | {"differs": self._differs}
        self._differs = False
        return (worker, record) if batch is END else (worker, record, batch)

    def _start(self, epoch: int, seed: int, worker: int, start: Start | None) -> None:
        """Bring the dataset to where this worker goes on."""
        if not self._used and self.stateful:
            self._unread = self.early_state()
        record = None if start is None else start.record
        if start is not None and (record is None or (record["state"] is None and self.stateful)):
            self._end_epoch_before(start, worker)
        self.set_epoch(epoch)
        self._used = True
        if record is not None and record["ended"] and not self.stateful:
            self._ended, self._record = True, record  # nothing of it matters any more
            return
        self._begin(seed, record)
        if record is None:
            return
        while not self._ended and (self._record["drawn"] < record["drawn"] or record["ended"]):
            self._draw(seed, collate=False)
        if record["state"] is None and not record["ended"]:
            self._differs = self._ended or self._record["digest"] != record.get("digest", self._record["digest"])

    def _end_epoch_before(self, start: Start, worker: int) -> None:
        """Leave the dataset as the end of the epoch before left it, or as it was before it was ever iterated."""
        if not self.stateful:
            return
        if start.ends is None:
            # A worker's own: it holds what `worker_init_fn` has made of the copy.
            if self._used and self._unread is not None and not self._is_at(self._unread):
                self.dataset.load_state_dict(copy.deepcopy(self._unread))
            return
        epoch, seed, records = start.ends
        record = records[worker]
        if record["state"] is None:
            return
        self.set_epoch(epoch)
        self._begin(mix(seed, worker), record)
        while not self._ended:
            self._draw(mix(seed, worker), collate=False)

    def _begin(self, seed: int, record: dict[str, Any] | None) -> None:
        state = None if record is None else record["state"]
        at = 0 if record is None or state is None else record.get("at", record["drawn"])
        self._ended = False

        def begin() -> None:
            is_loaded = state is None or (self.stateful and self._load_early(state))
            self._iterator = iter(self.dataset)
            if not is_loaded or (state is not None and self._has_begun_anew(state)):
                (self.dataset if self.stateful else self._iterator).load_state_dict(copy.deepcopy(state))

        self._seeded.run(mix(seed, 0), begin)
        self._record = {"drawn": at, "at": at, "state": self.early_state(), "ended": False, "digest": 0}
        if state is not None:
            self._record["state"] = state

    def _load_early(self, state: Any) -> bool:
        """Load a state before `iter`, unless the dataset can take one only behind it."""
        try:
            self.dataset.load_state_dict(copy.deepcopy(state))
        except _NOT_ITERATED:
            return False
        return True

    def take_unread(self, state: Any) -> None:
        """Bring the dataset of this process, of which workers get copies, to where the run began to read it."""
        self._unread = state
        if not self._is_at(state):
            self.dataset.load_state_dict(copy.deepcopy(state))

    def _has_begun_anew(self, state: Any) -> bool:
        """Return whether `iter` has set back a dataset that is its own iterator, as that of a file or a list is."""
        return self.stateful and self._iterator is self.dataset and not self._is_at(state)

    def _is_at(self, state: Any) -> bool:
        """Return whether the dataset has a state already, as far as that can be told."""
        try:
            return same(state, self._state())
        except _NOT_ITERATED:  # it has none yet, or values that cannot be compared
            return False

    def _draw(self, seed: int, *, collate: bool) -> Any:
        """Return the next batch, or `END`, and note where that leads."""
        record = self._record
        drawn = record["drawn"] + 1
        batch, sample = self._seeded.run(mix(seed, drawn), lambda: self._batch(collate=collate))
        if drawn == 1 and not self.stateful and self._seeded.look_again():
            self._begin(seed, None)
            batch, sample = self._seeded.run(mix(seed, drawn), lambda: self._batch(collate=collate))
            self._seeded.look_again()  # it may make them at every beginning
        if batch is not END:
            record = record | {"drawn": drawn}
        if self._ended:
            record = record | {"ended": True}
        elif (state := self._state()) is not None:
            record = record | {"state": state, "at": drawn}
        else:
            record = record | {"digest": mix(record["digest"], digest_of(sample))}
        self._record = record
        return batch

    def _batch(self, *, collate: bool) -> tuple[Any, Any]:
        """Return the next batch, or `END` at the end of the stream, and its last sample."""
        if self._batch_size is None:
            samples = last = next(self._iterator, END)
            self._ended = nothing = samples is END
        else:
            samples = list(itertools.islice(_rest_of(self._iterator), self._batch_size))
            self._ended = len(samples) < self._batch_size
            nothing = not samples or (self._ended and self._drop_last)
            last = samples[-1] if samples else None
        if nothing:
            return END, None
        collate_fn: Any = self._collate_fn
        return (collate_fn(samples) if collate else None), last


class StartWorker:
    """Runs first in every worker: shows the user's dataset in `get_worker_info()`, then the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        self.signals: WorkerSignals | None = None

    def __call__(self, worker_id: int) -> None:
        """Set a worker up, with the user's own dataset in its place."""
        if self.signals is not None:
            self.signals.outlive()
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen, and many functions configure it there
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def inner_loader(
    dataloader: DataLoader[Any], fetch: MapFetch | IterableFetch, tasks: Iterable[list[Any]]
) -> DataLoader[Any]:
    """Return a DataLoader like the user's that hands `tasks` to `fetch` and passes on what comes back.

    An iterable dataset is asked for its batches the same way, since tasks then carry the position into the worker.
    The generator, which torch draws the workers' base seed from, is a private one: the process's stream stays put.
    """
    options: dict[str, Any] = (
        {"pin_memory_device": device} if (device := getattr(dataloader, "pin_memory_device", "")) else {}
    )
    if dataloader.num_workers > 0:
        options |= {
            "prefetch_factor": dataloader.prefetch_factor,
            "persistent_workers": dataloader.persistent_workers,
            "multiprocessing_context": dataloader.multiprocessing_context,
        }
    dataset: Any = fetch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever torch thinks of these arguments, it said when the user gave them
        return DataLoader(
            dataset,
            batch_sampler=tasks,
            collate_fn=_identity,
            num_workers=dataloader.num_workers,
            pin_memory=dataloader.pin_memory,
            timeout=dataloader.timeout,
            worker_init_fn=StartWorker(dataloader.worker_init_fn),
            generator=torch.Generator(),
            **options,
        )
