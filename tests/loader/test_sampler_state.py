"""Plain values that samplers of one's own change while they are drawn: part of the position."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from safeckpt.errors import UncapturedStateWarning
from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight

LENGTH = 7


class Order:
    def __len__(self):
        return LENGTH


class ShuffledList(Order):
    """Shuffles its own list, as a sampler written by hand does."""

    def __init__(self):
        self.order = list(range(LENGTH))

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


class ShuffledArray(Order):
    def __init__(self):
        self.order = np.arange(LENGTH, dtype=np.int16)

    def __iter__(self):
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class ShuffledTensor(Order):
    def __init__(self):
        self.order = torch.arange(LENGTH)

    def __iter__(self):
        self.order = self.order[torch.randperm(LENGTH)]
        return iter(self.order.tolist())


class Counting(Order):
    """Counts its rounds, and goes on where it was in a queue."""

    def __init__(self):
        self.rounds = 0
        self.share = np.float32(0.5)
        self.queue = collections.deque(range(LENGTH), maxlen=LENGTH)

    def __iter__(self):
        self.rounds += 1
        self.share = self.share / 2
        for _ in range(LENGTH):
            self.queue.rotate(self.rounds)
            yield self.queue[0]


class Slotted(Order):
    __slots__ = ("__weights",)

    def __init__(self):
        self.__weights = {"easy": [0, 1, 2], "hard": [3, 4, 5, 6]}

    def __iter__(self):
        self.__weights["easy"].append(self.__weights["hard"].pop(0) if self.__weights["hard"] else 0)
        return iter((self.__weights["easy"] + self.__weights["hard"])[-LENGTH:])


class Lazily(Order):
    """Makes its state when it is first drawn."""

    def __iter__(self):
        if not hasattr(self, "seen"):
            self.seen = {3}
        else:
            self.seen.add(len(self.seen))
        return iter(sorted(self.seen) + [index for index in range(LENGTH) if index not in self.seen])


class Nested(Order):
    """Keeps its state in an object of its own, beside the dataset."""

    class Memory:
        def __init__(self, data):
            self.data = data
            self.visits = [0] * LENGTH

    def __init__(self):
        self.memory = self.Memory(range(LENGTH))

    def __iter__(self):
        for _ in range(LENGTH):
            index = min(range(LENGTH), key=lambda i: (self.memory.visits[i], -i))
            self.memory.visits[index] += 1 + index % 3
            yield index


class Batches(Order):
    """A batch sampler with a memory."""

    def __init__(self):
        self.first = 0

    def __iter__(self):
        for _ in range(3):
            self.first += 3
            yield [(self.first + number) % LENGTH for number in range(2)]

    def __len__(self):
        return 3


class Distributed(DistributedSampler):
    def __init__(self):
        super().__init__(range(2 * LENGTH), num_replicas=2, rank=0)
        self.offset = 0

    def __iter__(self):
        self.offset += 1
        return iter([(index + self.offset) % LENGTH for index in super().__iter__()])


KINDS = [ShuffledList, ShuffledArray, ShuffledTensor, Counting, Slotted, Lazily, Nested, Distributed]


def make(kind, workers=0):
    data = [torch.tensor(float(index)) for index in range(2 * LENGTH)]
    if kind is Batches:
        return DataLoader(data, batch_sampler=Batches(), num_workers=workers, collate_fn=_numbers)
    return DataLoader(data, sampler=kind(), batch_size=2, num_workers=workers, collate_fn=_numbers)


def _numbers(samples):
    return [sample.item() for sample in samples]


@pytest.mark.parametrize("kind", [*KINDS, Batches], ids=lambda kind: kind.__name__)
def test_order_with_a_memory_resumes_at_every_position(kind):
    """Lists, arrays, tensors, numbers, sets, queues and what objects of the sampler's keep come back."""
    run = straight(functools.partial(make, kind))
    for position, state in run.states.items():
        assert resumed(functools.partial(make, kind), state) == (run.rest(position) if position[0] < 3 else [])
    assert resumed(functools.partial(make, kind, 2), run.states[1, 1]) == run.rest((1, 1))


@pytest.mark.parametrize("kind", [*KINDS, Batches], ids=lambda kind: kind.__name__)
def test_order_with_a_memory_is_rewound(kind):
    """Going back within the process puts the values back as well, to what they were at first too."""
    run = straight(functools.partial(make, kind))
    loader = ResumableLoader(make(kind), seed=1)
    list(loader)
    list(loader)
    for target in [(1, 2), (0, 0), (2, 1), (0, 1)]:
        loader.load_state_dict(run.states[target])
        assert [list(loader) for _ in loader.epochs(3)] == run.rest(target)


def test_values_are_put_back_into_the_same_list():
    """Whoever shares the sampler's list sees the restored order."""
    sampler = ShuffledList()
    shared = sampler.order
    loader = ResumableLoader(DataLoader(range(LENGTH), sampler=sampler), seed=1)
    list(loader)
    state, order = loader.state_dict(), list(shared)
    list(loader)
    loader.load_state_dict(state)
    next(iter(loader))
    assert sampler.order is shared
    assert sorted(shared) == sorted(order)
    assert state["snapshot"]["values"] == {"sampler1.order": [["list", "atoms", order]]}


def test_constant_values_are_not_in_the_state():
    """A table that no epoch changes does not make the checkpoint larger."""

    class Constant(Order):
        def __init__(self):
            self.table = np.zeros(100_000)

        def __iter__(self):
            return iter(range(LENGTH))

    loader = ResumableLoader(DataLoader(range(LENGTH), sampler=Constant()), seed=1)
    list(loader)
    assert loader.state_dict()["snapshot"]["values"] == {}


def test_iterator_that_a_sampler_keeps_is_named():
    """How far an iterator has got cannot be written down, and the warning says what to do."""

    class Endless(Order):
        def __init__(self):
            self.numbers = itertools.count()

        def __iter__(self):
            return iter([next(self.numbers) % LENGTH for _ in range(LENGTH - 1)])

    loader = ResumableLoader(DataLoader(range(LENGTH), sampler=Endless()), seed=1)
    with pytest.warns(UncapturedStateWarning, match=r"how far sampler1\.numbers \(count\) has got") as caught:
        orders = [list(loader) for _ in range(2)]
    assert str(orders[0]) != str(orders[1])
    assert len(caught) == 1


def test_state_of_an_object_that_is_not_there_any_more_is_refused():
    """A sampler without the object whose values were saved is another one."""
    loader = ResumableLoader(make(Nested), seed=1)
    list(loader)
    other = make(Nested)
    del other.sampler.memory
    found = ResumableLoader(other).check_state(loader.state_dict())
    (sentence,) = found
    assert sentence.startswith("sampler1.memory.visits, which changes while the order is drawn, is in the saved state")


def test_torchs_own_samplers_have_no_values_to_keep():
    """Nothing is compared or copied where it is known that nothing changes."""
    loader = ResumableLoader(DataLoader(range(9), batch_sampler=BatchSampler(range(9), 2, drop_last=False)), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
    assert loader.state_dict()["snapshot"]["values"] == {}
    assert not loader._source._order._values.has_objects
