"""Order and random numbers after a resume, for every kind of sampler, in one process without workers."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from safeckpt.errors import StateMismatchError
from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight
from tests.loader.workloads import BATCH_SIZE, ORDERS, Augmented, Private, collate, dataloader, seeded, sizes


@pytest.mark.parametrize("order", ORDERS)
def test_resume_at_every_position_gives_the_rest_of_the_uninterrupted_run(order):
    """From every position of two epochs, first, last and between epochs included, order and draws are the same."""
    make = functools.partial(dataloader, order)
    run = straight(make, epochs=2)
    assert all(len(batches) > 2 for batches in run.batches)
    for position, state in run.states.items():
        assert resumed(make, state, epochs=2) == (run.rest(position) if position[0] < 2 else []), position


@pytest.mark.parametrize("order", ORDERS)
def test_epochs_and_loaders_with_other_seeds_differ(order):
    """What is random in the order differs from epoch to epoch, and so does every draw of the augmentation."""
    run = straight(functools.partial(dataloader, order))
    first, second = ([row for batch in batches for row in batch] for batches in run.batches[:2])
    if order not in ("sequential", "list"):
        assert [row[0] for row in first] != [row[0] for row in second]
    for column in range(1, len(Augmented.COLUMNS)):
        assert not {row[column] for row in first} & {row[column] for row in second}


@pytest.mark.parametrize("order", ORDERS)
def test_epoch_left_by_break_does_not_change_how_the_next_resumes(order):
    """After leaving two epochs early the third resumes as it ran, though samplers had been drawn ahead."""
    make = functools.partial(dataloader, order)
    loader = ResumableLoader(make(), seed=1)
    for stop in (3, 2):
        for _ in loader:
            if loader.batch == stop:
                break
    loader.end_epoch()
    between = loader.state_dict()
    expected, states = [], []
    for batch in loader:
        expected.append(batch)
        states.append(loader.state_dict())
    assert (between["epoch"], between["batch"]) == (2, 0)
    assert resumed(make, between) == [expected]
    assert resumed(make, states[0]) == [expected[1:]]


@pytest.mark.parametrize(
    "arguments",
    [
        lambda _: {"shuffle": True, "generator": seeded()},
        lambda data: {"sampler": RandomSampler(data, generator=seeded())},
        lambda data: {"sampler": RandomSampler(data, replacement=True, generator=seeded()), "generator": seeded(9)},
        lambda data: {"sampler": DistributedSampler(data, num_replicas=2, rank=0)},
        lambda _: {"sampler": Private()},
        lambda _: {},
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_order_that_owns_its_generator_is_the_order_of_the_bare_dataloader(arguments, workers):
    """A script that seeds its sampler sees with the wrapper the order it saw without."""

    def make():
        data = Augmented()
        return DataLoader(data, batch_size=BATCH_SIZE, collate_fn=collate, num_workers=workers, **arguments(data))

    bare, loader = make(), ResumableLoader(make())
    for epoch in range(2):
        if hasattr(bare.sampler, "set_epoch"):
            bare.sampler.set_epoch(epoch)
        # A sampler that is iterated twice for each epoch, as torch does with workers, must not have moved twice.
        assert sizes(loader) == sizes(bare)


def test_set_epoch_is_called_for_sampler_and_dataset_before_anything_is_drawn():
    """The epoch's number reaches sampler, batch sampler and dataset once, ahead of the first index."""
    calls = []

    class Told(Augmented):
        def set_epoch(self, epoch):
            calls.append(("dataset", epoch))

    class Order(DistributedSampler):
        def set_epoch(self, epoch):
            calls.append(("sampler", epoch))
            super().set_epoch(epoch)

        def __iter__(self):
            calls.append(("drawn", self.epoch))
            return super().__iter__()

    class Batches(Sampler):
        def __init__(self, sampler):
            self.sampler = sampler

        def set_epoch(self, epoch):
            calls.append(("batch sampler", epoch))

        def __iter__(self):
            yield list(self.sampler)

    data = Told()
    batches = Batches(Order(data, num_replicas=1, rank=0))
    loader = ResumableLoader(DataLoader(data, batch_sampler=batches, collate_fn=collate))
    for _ in loader.epochs(2):
        list(loader)
    for epoch in range(2):
        *told, drawn = calls[4 * epoch : 4 * epoch + 4]
        assert sorted(told) == [("batch sampler", epoch), ("dataset", epoch), ("sampler", epoch)]
        assert drawn == ("drawn", epoch)


class Epochs(Augmented):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return [float(index), float(self.epoch)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_epoch_reaches_the_datasets_of_workers(options):
    """A worker that lives through several epochs has a copy of the dataset, which is told as well."""
    loader = ResumableLoader(DataLoader(Epochs(), batch_size=3, collate_fn=list, **options))
    for epoch in loader.epochs(3):
        assert {row[1] for batch in loader for row in batch} == {float(epoch)}


def test_reaching_a_position_reads_no_sample():
    """A resume at batch 100,000 draws indices only; the first sample read is the first one asked for."""

    class Untouchable(Augmented):
        def __getitem__(self, index):
            self.reads += 1
            return [float(index)]

    def make():
        return DataLoader(Untouchable(400_040), batch_size=4, shuffle=True, collate_fn=list)

    loader = ResumableLoader(make(), seed=2)
    state = loader.state_dict() | {"batch": 100_000}
    loader.load_state_dict(state)
    first = next(iter(loader))
    assert loader.dataset.reads == 4
    whole = torch.randperm(400_040, generator=_generator_of(loader)).tolist()
    assert [int(row[0]) for row in first] == whole[400_000:400_004]


def _generator_of(loader):
    """Seed as RandomSampler does, from the private stream of epoch 0."""
    from safeckpt.loader.source import ORDER, seed_for
    from safeckpt.loader.streams import PrivateStreams

    streams = PrivateStreams(seed_for(ORDER, loader.seed, 0))
    return seeded(streams.run(lambda: int(torch.empty((), dtype=torch.int64).random_().item())))


def test_position_behind_the_end_of_the_order_is_an_error():
    """A position that the epoch does not have is not taken for its end."""
    loader = ResumableLoader(dataloader("sequential"))
    state = loader.state_dict() | {"batch": 6}
    loader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="batch 6 of epoch 0, and its order ends after 5"):
        next(iter(loader))
    loader.load_state_dict(state | {"batch": 5})
    assert list(loader) == []
    assert len(list(loader)) == 5


def test_generator_under_the_name_of_a_global_stream_is_not_a_private_one():
    """A dataset that keeps the process-wide NumPy or torch stream in an attribute is seeded with that stream."""

    class Alias(Augmented):
        def __init__(self):
            super().__init__()
            self.numpy, self.torch = np.random.mtrand._rand, torch.default_generator

        def __getitem__(self, index):
            return [float(index), self.numpy.random_sample(), torch.rand((), generator=self.torch).item()]

    make = functools.partial(dataloader, dataset=None)
    run = straight(lambda: make(dataset=Alias()))
    assert resumed(lambda: make(dataset=Alias()), run.states[1, 2]) == run.rest((1, 2))


class Nested(Augmented):
    """Keeps generators of every kind where datasets keep their transforms."""

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(1)
        bits = np.random.Generator(np.random.Philox(2))
        old = np.random.RandomState(3)
        self.transforms = [
            {"closure": lambda: generator.normal() + 1, "partial": functools.partial(bits.normal)},
            (random.Random(4).random, seeded(5), old.randn),
        ]

    def __getitem__(self, index):
        calls, (python, generator, old) = self.transforms
        return [
            float(index),
            calls["closure"](),
            calls["partial"](),
            python(),
            old(),
            torch.rand((), generator=generator).item(),
        ]


def test_private_generators_in_transforms_follow_the_batch():
    """Generators in closures, partials, bound methods and containers give the same numbers after a resume."""
    run = straight(lambda: dataloader(dataset=Nested()))
    assert resumed(lambda: dataloader(dataset=Nested()), run.states[1, 2]) == run.rest((1, 2))


def test_private_generators_do_not_move_for_the_training_process():
    """A generator that dataset and training share stands for the training where it stood before the fetch."""
    data = Augmented()
    before = data.private.bit_generator.state
    list(ResumableLoader(dataloader(dataset=data)))
    assert data.private.bit_generator.state == before


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_epoch_left_by_break_has_drawn_what_was_handed_out(stop):
    """A sampler's own generator goes on where a bare DataLoader leaves it, though we had drawn further ahead."""
    bare, loader = dataloader("custom, own generator"), ResumableLoader(dataloader("custom, own generator"))
    for one in (bare, loader):
        for number, _ in enumerate(one, start=1):
            if number == stop:
                break
    assert sizes(loader) == sizes(bare)


def test_saving_after_a_break_does_not_move_the_samplers_generator():
    """The state of the next epoch is worked out on the live generator, which is put back afterwards."""
    loader = ResumableLoader(dataloader("custom, own generator"))
    for _ in loader:
        if loader.batch == 2:
            break
    loader.end_epoch()
    before = loader.sampler.generator.bit_generator.state
    assert loader.state_dict()["epoch"] == 1
    assert loader.sampler.generator.bit_generator.state == before


class LazySampler(Sampler):
    """Makes its generator at the first iteration, and seeds it for each epoch."""

    def __init__(self):
        self.generator = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 6

    def __iter__(self):
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        return iter(torch.randperm(6, generator=self.generator).tolist())


def test_generator_that_a_sampler_makes_later_is_not_taken_away():
    """An attribute that was None and is an object now has not gone."""

    def loader():
        return ResumableLoader(DataLoader(range(6), 2, sampler=LazySampler()), seed=1)

    straight = loader()
    batches = [batch.tolist() for _ in range(3) for batch in straight]
    stopped = loader()
    for _ in stopped:
        pass
    iterator = iter(stopped)
    next(iterator)
    state = stopped.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for _ in range(2) for batch in resumed] == batches[4:]
