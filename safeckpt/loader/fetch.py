"""What runs where the samples are read, in a worker or in the training process: one seeded piece of work per batch.

These objects stand in the place of the dataset of an inner DataLoader. They are asked for one task at a time,
fetch and collate, and give back the finished batch together with its number: the position is counted from what
arrived, never from what was sent.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

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

from safeckpt.loader.private_generators import find_generators, reseed
from safeckpt.loader.streams import mix, restore_streams, save_streams, seed_streams
from safeckpt.state.random_streams import GeneratorComponent

__all__ = ["IterableFetch", "MapFetch", "StartWorker", "inner_loader"]

T = TypeVar("T")


def _identity(batch: T) -> T:
    return batch


def _draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Return whether only torch's own code, known to draw nothing, makes a batch: then no stream needs care."""
    if collate_fn is not default_collate and collate_fn is not default_convert:
        return False
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset, collate_fn)
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part, collate_fn) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)


class _Seeded:
    """Runs work on seeded streams: the global ones, and the private generators found in dataset and collate_fn."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}
        self._generators: dict[str, Any] | None = None  # looked for once per process: a worker has its own copies

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
            None if _draws_nothing(self.dataset, self._collate_fn) else _Seeded(self.dataset, self._collate_fn)
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset of this process, once per epoch: a persistent worker has a copy of its own."""
        if epoch != self.epoch:
            self.epoch = epoch
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)

    def __getitems__(self, task: tuple[int, int, int, Any]) -> tuple[int, Any]:
        epoch, number, seed, index = task
        if epoch != self.epoch:
            self.set_epoch(epoch)
        if self._seeded is None:
            return number, self._batch(index)
        return number, self._seeded.run(seed, lambda: self._batch(index))

    def _batch(self, index: Any) -> Any:
        if not self._batched:
            return self._collate_fn(self.dataset[index])
        many = getattr(self.dataset, "__getitems__", None)
        return self._collate_fn(many(index) if many else [self.dataset[i] for i in index])


class IterableFetch:
    """Draws from an iterable dataset, which every worker iterates for itself.

    Task: (run, epoch, seed, start), or None for a turn that is passed over. `start` is None in the middle of a run
    and at an epoch's ordinary start, else where this worker goes on: {"drawn": its batches, "state": its dataset's,
    "ended": whether that was all}. Result: (worker, the same for after this batch, batch), or (worker, None, None)
    when this worker's stream has ended.
    """

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self.dataset: Any = dataloader.dataset
        self.epoch = 0
        self.stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        self._batch_size = dataloader.batch_size
        self._drop_last = dataloader.drop_last
        self._collate_fn = dataloader.collate_fn
        # A dataset that has a state_dict keeps its generators itself.
        self._seeded = _Seeded(None if self.stateful else self.dataset, self._collate_fn)
        self.drawn = 0
        self._run = -1
        self._iterator: Any = None
        self._unused: Any = None
        self._ended = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset of this process, once per epoch."""
        MapFetch.set_epoch(cast("MapFetch", self), epoch)  # the same two attributes, and not a MapFetch otherwise

    def state(self) -> Any:
        """Return a copy of the dataset's state, or its iterator's, or None when neither has one."""
        if self.stateful:
            return copy.deepcopy(self.dataset.state_dict())
        if hasattr(self._iterator, "state_dict") and hasattr(self._iterator, "load_state_dict"):
            return copy.deepcopy(self._iterator.state_dict())
        return None

    def __getitems__(self, task: tuple[int, int, int, dict[str, Any] | None] | None) -> Any:
        if task is None:
            return None
        run, epoch, seed, start = task
        info = get_worker_info()
        worker = 0 if info is None else info.id
        seed = mix(seed, worker)
        if run != self._run:
            self._run = run
            self.set_epoch(epoch)
            self.drawn = 0 if start is None else start["drawn"]
            self._ended = start is not None and start["ended"]
            self._seeded.run(mix(seed, 0), lambda: self._start(start))
            if start is not None and start["state"] is None and not start["ended"]:
                self._discard(seed, start["drawn"])
        if self._ended:
            return worker, None, None
        self.drawn += 1
        batch = self._seeded.run(mix(seed, self.drawn), lambda: self._batch(collate=True))
        if batch is self:
            return worker, None, None
        # The state after a short batch may be that of a new beginning: the dataset has seen its end already.
        state = None if info is None or self._ended else self.state()
        return worker, {"drawn": self.drawn, "state": state, "ended": self._ended}, batch

    def _start(self, start: dict[str, Any] | None) -> None:
        if self.stateful and self._unused is None:
            self._unused = copy.deepcopy(self.dataset.state_dict())
        state = None if start is None or start["ended"] else start["state"]
        if start is not None and self.stateful:
            # With nothing to go on from, a dataset that was rewound has to begin again.
            self.dataset.load_state_dict(copy.deepcopy(self._unused if state is None else state))
        if self._ended:
            return
        self._iterator = iter(self.dataset)
        if state is not None and not self.stateful:
            self._iterator.load_state_dict(copy.deepcopy(state))

    def _discard(self, seed: int, count: int) -> None:
        """Draw batches again and throw them away: their samples are read, nothing is collated."""
        for number in range(1, count + 1):
            self._seeded.run(mix(seed, number), lambda: self._batch(collate=False))

    def _batch(self, *, collate: bool) -> Any:
        """Return the next batch, or this object itself at the end of the stream."""
        if self._batch_size is None:
            samples = next(self._iterator, self)
            self._ended = nothing = samples is self
        else:
            samples = list(itertools.islice(self._iterator, self._batch_size))
            self._ended = len(samples) < self._batch_size
            nothing = not samples or (self._ended and self._drop_last)
        if nothing:
            return self
        collate_fn: Any = self._collate_fn
        return collate_fn(samples) if collate else None


class StartWorker:
    """Runs first in every worker: shows the user's dataset in `get_worker_info()`, then the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Set a worker up, with the user's own dataset in its place."""
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
