"""Datasets, samplers and loaders that the loader's tests and their worker scripts build alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

SAMPLES = 13
BATCH_SIZE = 3  # 13 samples: four full batches and a single sample

Row = list[float]


class Augmented(Dataset[Row]):
    """Gives [index, draws of random, numpy.random, torch and of a generator of its own]."""

    COLUMNS = ("index", "python", "python gauss", "numpy", "numpy normal", "torch", "private numpy", "collate")

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length
        self.private = np.random.default_rng(5)
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        self.reads += 1
        return [
            float(index), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
            torch.rand(()).item(), self.private.random(),
        ]  # fmt: skip


def collate(rows: list[Row]) -> list[Row]:
    return [[*row, np.random.rand() + random.random() + torch.rand(()).item()] for row in rows]


def convert(row: Row) -> list[Row]:
    return collate([row])


class Lazy(Sampler[int]):
    """Draws from the global streams at every index."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            draw = (random.random, np.random.rand, lambda: torch.rand(()).item())[number % 3]
            yield int(draw() * self.length)

    def __len__(self) -> int:
        return self.length


class LazyBatches(Sampler[list[int]]):
    """Makes batches of random sizes, with the number of batches itself drawn."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4 + random.randrange(3)):
            yield torch.randint(SAMPLES, (1 + int(np.random.randint(4)),)).tolist()


class Private(Sampler[int]):
    """Draws each index from a NumPy generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(self.generator.integers(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Stateful(Sampler[int]):
    """Has a cursor that goes on from epoch to epoch, and says so."""

    def __init__(self) -> None:
        self.cursor = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES - 1):
            self.cursor += 5
            yield self.cursor % SAMPLES

    def __len__(self) -> int:
        return SAMPLES - 1

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What chooses the order, by name: from a dataset to the DataLoader's arguments.
ORDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda _: {"batch_size": BATCH_SIZE},
    "shuffle": lambda _: {"batch_size": BATCH_SIZE, "shuffle": True},
    "shuffle, drop_last": lambda _: {"batch_size": BATCH_SIZE, "shuffle": True, "drop_last": True},
    "shuffle, own generator": lambda _: {"batch_size": BATCH_SIZE, "shuffle": True, "generator": seeded()},
    "replacement": lambda data: {
        "batch_size": 6, "sampler": RandomSampler(data, replacement=True, num_samples=40),
    },
    "replacement, own generator": lambda data: {
        "batch_size": 16, "sampler": RandomSampler(data, replacement=True, num_samples=70, generator=seeded()),
    },
    "subset": lambda _: {"batch_size": BATCH_SIZE, "sampler": SubsetRandomSampler(range(1, SAMPLES))},
    "weighted": lambda _: {
        "batch_size": BATCH_SIZE, "sampler": WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES),
    },
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), BATCH_SIZE, drop_last=False)},
    "list": lambda _: {"batch_size": BATCH_SIZE, "sampler": [4, 2, 0, 7, 1, 9, 12, 3]},
    "distributed": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, num_replicas=2, rank=1)},
    "custom": lambda _: {"batch_size": BATCH_SIZE, "sampler": Lazy()},
    "custom batches": lambda _: {"batch_sampler": LazyBatches()},
    "custom, own generator": lambda _: {"batch_size": BATCH_SIZE, "sampler": Private()},
    "custom, stateful": lambda _: {"batch_size": BATCH_SIZE, "sampler": Stateful()},
    "no batching": lambda _: {"batch_size": None, "sampler": SubsetRandomSampler(range(6))},
}  # fmt: skip


def dataloader(order: str = "shuffle", workers: int = 0, **options: Any) -> DataLoader[Any]:
    data = options.pop("dataset", None)
    data = Augmented() if data is None else data
    arguments = ORDERS[order](data) | {"collate_fn": convert if order == "no batching" else collate} | options
    return DataLoader(data, num_workers=workers, **arguments)


def sizes(loader: Any) -> list[int]:
    """Indices only, of whatever the loader gives."""
    return [int(row[0]) for batch in loader for row in batch]


class Stream(IterableDataset[Row]):
    """Shards by worker, shuffles through a buffer with the global streams, has no state_dict."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        buffer: list[int] = []
        for index in range(worker, self.length, workers):
            buffer.append(index)
            if len(buffer) > 3:
                yield [float(buffer.pop(random.randrange(len(buffer)))), np.random.rand(), torch.rand(()).item()]
        while buffer:
            yield [float(buffer.pop()), np.random.rand(), torch.rand(()).item()]


class StatefulStream(IterableDataset[Row]):
    """Counts what it has given, and goes on from there."""

    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.given = 0
        self.reads = 0

    def __iter__(self) -> Iterator[Row]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        mine = range(worker, self.length, workers)
        while self.given < len(mine):
            self.given += 1
            self.reads += 1
            yield [float(mine[self.given - 1]), random.random(), np.random.rand(), torch.rand(()).item()]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]
