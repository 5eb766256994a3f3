"""Private generators wherever they are kept and whenever they are made: seeded for each batch."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safeckpt.errors import UncapturedStateWarning
from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight

SHARED = np.random.default_rng(3)


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return [index, self.draw(index)]


class Lazy(Data):
    """One for each worker, made at the first read."""

    rng = None

    def draw(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        return self.rng.random()


class LazyEntropy(Data):
    """Made from the system's entropy."""

    rng = None

    def draw(self, index):
        if self.rng is None:
            self.rng = random.Random()
        return self.rng.random()


class Replaced(Data):
    """Replaced in the process that reads."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.ready = False

    def draw(self, index):
        if not self.ready:
            self.rng, self.ready = np.random.default_rng(1), True
        return self.rng.random()


class EveryEpoch(Data):
    """Replaced by `set_epoch`."""

    def set_epoch(self, epoch):
        self.rng = np.random.default_rng(epoch)

    def draw(self, index):
        return self.rng.random()


class Slots(Data):
    """A transform with slots."""

    class Noise:
        __slots__ = ("__rng", "unused")

        def __init__(self):
            self.__rng = np.random.default_rng(2)

        def __call__(self):
            return self.__rng.random()

    def __init__(self):
        self.noise = self.Noise()

    def draw(self, index):
        return self.noise()


class OfClass(Data):
    """One for all objects of the class."""

    rng = np.random.default_rng(4)

    def draw(self, index):
        return self.rng.random()


class OfModule(Data):
    """A global of the module."""

    def draw(self, index):
        return SHARED.random()


def of_module(index):
    return SHARED.random()


class InFunction(Data):
    """A global of the module, in a function that the dataset holds."""

    def __init__(self):
        self.transform = of_module

    def draw(self, index):
        return self.transform(index)


KINDS = [Lazy, LazyEntropy, Replaced, EveryEpoch, Slots, OfClass, OfModule, InFunction]
WORKERS = {"0": {}, "2": {"num_workers": 2}, "2 persistent": {"num_workers": 2, "persistent_workers": True}}


def make(kind, **options):
    return DataLoader(kind(), batch_size=2, shuffle=True, collate_fn=list, **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # Workers that begin anew at each position are left to the slow run, but for the kind that changes the most.
        pytest.param(
            kind, WORKERS[one], id=f"{kind.__name__}-{one}",
            marks=[pytest.mark.slow] * (one == "2" and kind is not LazyEntropy),
        )
        for one in WORKERS
        for kind in KINDS
    ],
)  # fmt: skip
def test_draws_of_any_generator_come_again(kind, options):
    """From every position, by any number of workers, the numbers are those of the uninterrupted run."""
    run = straight(functools.partial(make, kind), epochs=2)
    assert len({draw for batches in run.batches for batch in batches for _, draw in batch}) == 24
    for position in [(0, 0), (0, 1), (0, 4), (1, 0), (1, 3)]:
        assert resumed(functools.partial(make, kind, **options), run.states[position], epochs=2) == run.rest(position)


def test_generator_of_a_module_stands_for_the_training_where_it_stood():
    """Seeding it for a batch is undone in the training process."""
    before = SHARED.bit_generator.state
    list(ResumableLoader(make(OfModule), seed=1))
    assert SHARED.bit_generator.state == before


def test_batch_is_read_once_where_no_generator_is_made():
    """Reading again is for the batch that made a generator only."""

    class Counted(Lazy):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    class Ready(Counted):
        def __init__(self):
            self.rng = np.random.default_rng(0)

    for kind, reads in [(Ready, 12), (Counted, 14)]:
        loader = ResumableLoader(make(kind), seed=1)
        list(loader)
        assert loader.dataset.reads == reads


@pytest.mark.parametrize("workers", [0, 2])
def test_generator_made_by_a_stream_comes_again(workers):
    """A stream that makes its generator when it is iterated gives the same numbers in each of its epochs' resumes."""

    class Stream(IterableDataset):
        def __iter__(self):
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
            for index in range(8):
                yield [index, self.rng.random()]

    def one():
        return DataLoader(Stream(), batch_size=2, collate_fn=list, num_workers=workers)

    run = straight(one, epochs=2)
    for position in [(0, 1), (0, 3), (1, 0), (1, 2)]:
        assert resumed(one, run.states[position], epochs=2) == run.rest(position)


def test_more_than_can_be_looked_through_is_named():
    """A generator that may sit where nobody looks is a warning at construction."""

    class Node:
        def __init__(self):
            self.value = 0

    class Large(Data):
        def __init__(self):
            self.nodes = [[[Node() for _ in range(30)] for _ in range(30)] for _ in range(30)]

    with pytest.warns(UncapturedStateWarning, match=r"dataset\.nodes\..* is not looked through for random generators"):
        ResumableLoader(DataLoader(Large()))
