"""A position means something only for the inputs it was saved with: what changed is named, or converted on request."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from safeckpt.errors import StateMismatchError
from safeckpt.loader import ResumableLoader
from tests.loader.runs import plain
from tests.loader.workloads import Lazy, Private, Stream, dataloader, seeded

SAMPLES = 50


class Other(RandomSampler):
    pass


def loader(convert=(), seed=None, **options: Any):
    length = options.pop("length", SAMPLES)
    ranks = options.pop("ranks", None)
    data = range(length)
    if ranks is not None:
        options["sampler"] = DistributedSampler(data, num_replicas=ranks[0], rank=ranks[1], **options.pop("dist", {}))
    elif "sampler" in options:
        options["sampler"] = options["sampler"](data)
    return ResumableLoader(DataLoader(data, **{"batch_size": 4} | options), convert=convert, seed=seed)


def halfway(**options):
    source = loader(**options)
    it = iter(source)
    for _ in range(5):
        next(it)
    return source.state_dict()


CHANGES = {
    "dataset length": ({}, {"length": 60}, ["dataset length: 50 in the saved state, 60 now"]),
    "batch size": (
        {},
        {"batch_size": 8},
        ["batch size: 4 in the saved state, 8 now (ResumableLoader(..., convert=('batch_size',)"],
    ),
    "batching": ({}, {"batch_size": None}, ["batch size: 4 in the saved state, None now", "sampler class"]),
    "drop_last": ({}, {"drop_last": True}, ["drop_last: False in the saved state, True now"]),
    "sampler class": (
        {"shuffle": True},
        {"sampler": Other},
        ["'BatchSampler of RandomSampler' in the saved state, 'BatchSampler of Other' now"],
    ),
    "replacement": (
        {"sampler": RandomSampler},
        {"sampler": lambda data: RandomSampler(data, replacement=True)},
        ["sampler options: {'RandomSampler.replacement': False} in the saved state"],
    ),
    "samples per epoch": (
        {"sampler": lambda data: RandomSampler(data, replacement=True, num_samples=40)},
        {"sampler": lambda data: RandomSampler(data, replacement=True, num_samples=41)},
        ["samples per epoch: 40 in the saved state, 41 now"],
    ),
    "world size": (
        {"ranks": (2, 0)},
        {"ranks": (5, 0)},
        ["world size: 2 in the saved state, 5 now (ResumableLoader(..., convert=('world_size',)"],
    ),
    "seed of the order": (
        {"ranks": (2, 0)},
        {"ranks": (2, 0), "dist": {"seed": 1}},
        ["sampler options: {'DistributedSampler.shuffle': True, 'DistributedSampler.seed': 0}"],
    ),
    "own generator gone": (
        {"shuffle": True, "generator": seeded()},
        {"shuffle": True},
        ["the order drew from generator, which is not there now"],
    ),
    "own generator new": (
        {"shuffle": True},
        {"shuffle": True, "generator": seeded()},
        ["the order draws from generator, which is not in the saved state"],
    ),
    "several at once": (
        {},
        {"length": 60, "batch_size": 8, "drop_last": True},
        ["dataset length", "batch size", "drop_last"],
    ),
}


@pytest.mark.parametrize(("before", "after", "expected"), CHANGES.values(), ids=CHANGES)
def test_changed_input_is_refused_by_name_and_nothing_moves(before, after, expected):
    """Every difference is in the message and in `mismatches`, the loader stands where it stood, and goes on."""
    state, live = halfway(seed=1, **before), loader(seed=2, **after)
    next(iter(live))
    mine = plain(live.state_dict())
    found = live.check_state(state)
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert part in sentence
    with pytest.raises(StateMismatchError) as caught:
        live.load_state_dict(state)
    assert caught.value.mismatches == tuple(found)
    assert live.seed == 2
    assert plain(live.state_dict()) == mine
    assert (live.epoch, live.batch) == (0, 1)
    assert len(list(live)) == len(live)


def test_another_kind_of_state_is_refused():
    """What is no state of this loader at all, of a newer version or of another kind, is said in one sentence."""
    live = loader()
    assert live.check_state({"epoch": 1}) == ["this is not a state of a ResumableLoader"]
    assert live.check_state([]) == ["this is not a state of a ResumableLoader"]
    assert live.check_state(live.state_dict() | {"version": 3}) == [
        "the state has version 3, this safeckpt reads up to 2"
    ]
    stream = ResumableLoader(DataLoader(Stream(), batch_size=4)).state_dict()
    assert live.check_state(stream) == ["kind of loader: 'iterable' in the saved state, 'map' now"]
    assert live.check_state(live.state_dict()) == []


def test_generator_of_another_algorithm_is_refused():
    """A state of PCG64 is not set on a Philox."""
    import numpy as np

    class Philox(Private):
        def __init__(self):
            self.generator = np.random.Generator(np.random.Philox(1))

    Philox.__qualname__ = "Private"
    live = ResumableLoader(dataloader("sequential", sampler=Philox()))
    found = live.check_state(ResumableLoader(dataloader("custom, own generator")).state_dict())
    assert found == ["sampler.sampler.generator: saved algorithm PCG64, live algorithm Philox"]


def test_checking_draws_nothing_and_changes_nothing():
    """Asking whether a state fits moves neither the process's stream nor the loader's."""
    live = loader(shuffle=True, generator=seeded())
    before, mine = torch.get_rng_state(), live.generator.get_state()
    live.check_state(halfway(shuffle=True, generator=seeded(), seed=3))
    torch.testing.assert_close(live.generator.get_state(), mine)
    torch.testing.assert_close(torch.get_rng_state(), before)


def values(batches):
    return [value for batch in batches for value in batch.tolist()]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 5, 7, 10, 64])
@pytest.mark.parametrize("position", [0, 1, 5, 12, 13])
def test_batch_size_conversion_is_exact_in_samples(shuffle, batch_size, position, caplog):
    """The rest of the epoch has the same samples in the same order, in batches of the new size."""
    saving = loader(shuffle=shuffle, seed=4)
    whole = list(saving)
    state = saving.state_dict() | {"epoch": 0, "batch": position}
    live = loader(shuffle=shuffle, batch_size=batch_size, convert=("batch_size",))
    with caplog.at_level(logging.WARNING, logger="safeckpt"):
        live.load_state_dict(state)
    sample = min(4 * position, SAMPLES)
    how = f"batch {position} of epoch 0, goes on as batch {sample // batch_size} of this loader, at sample {sample}"
    assert caplog.messages == [f"the saved position, {how}"]
    rest = list(live)
    assert values(rest) == values(whole)[sample:]
    assert all(len(batch) == batch_size for batch in rest[:-1])
    assert sorted(values(live)) == list(range(SAMPLES))


def test_converted_position_can_be_saved_and_resumed_again():
    """A state saved in the converted rest of an epoch, whose batches begin at odd samples, resumes there."""
    saving = loader(shuffle=True, seed=4)
    whole = values(saving)
    state = saving.state_dict() | {"epoch": 0, "batch": 5}
    live = loader(shuffle=True, batch_size=7, convert=("batch_size",))
    live.load_state_dict(state)
    it = iter(live)
    assert next(it).tolist() == whole[20:27]
    state = live.state_dict()
    again = loader(shuffle=True, batch_size=7)
    again.load_state_dict(state)
    assert values(again) == whole[27:]
    once_more = loader(shuffle=True, batch_size=2, convert=("batch_size",))
    once_more.load_state_dict(state)
    assert values(once_more) == whole[27:]
    assert len(list(once_more)) == 25


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4), (3, 2)])
def test_world_size_conversion_is_exact_in_samples(before, after):
    """The new ranks together go on with the samples that the old ranks together had not seen, in their order."""
    length = 96  # every number of ranks divides it: no sample is repeated to make shares even
    old = [loader(length=length, ranks=(before, rank), seed=4) for rank in range(before)]
    states = []
    for rank in old:
        it = iter(rank)
        next(it), next(it)
        states.append(rank.state_dict())
    order = torch.randperm(length, generator=seeded(0)).tolist()
    seen = 2 * 4 * before
    rest = []
    for rank in range(after):
        live = loader(length=length, ranks=(after, rank), batch_size=5, convert=("batch_size", "world_size"))
        live.load_state_dict(states[-1])
        rest.append(values(live))
    assert [value for turn in zip(*rest, strict=True) for value in turn] == order[seen:]


def test_world_size_that_does_not_divide_the_position_is_refused():
    """A position that the new ranks cannot share evenly is named with its sample, not rounded."""
    state = halfway(ranks=(2, 0), length=96)
    live = loader(ranks=(3, 0), length=96, convert=("world_size",))
    assert live.check_state(state) == [
        "world size: the position is after sample 40 of the epoch, which 3 ranks cannot share evenly"
    ]


def test_what_cannot_be_converted_is_refused():
    """Custom batches, other samplers' shares, iterable datasets and positions to be left out keep their sizes."""
    both = ("batch_size", "world_size")
    state = ResumableLoader(dataloader("shuffle")).state_dict()
    ours = ResumableLoader(dataloader("shuffle", batch_size=5), convert=both)
    assert ours.check_state(state) == []
    assert ours.check_state(state | {"left_out": [[0, 3]]}) == [
        "batch size or world size changed, and batches that are to be left out cannot be converted"
    ]
    lazy = ResumableLoader(dataloader("sequential", sampler=None, batch_size=None), convert=both)
    assert lazy.check_state(ResumableLoader(dataloader("sequential")).state_dict()) != []
    stream = ResumableLoader(DataLoader(Stream(), batch_size=4)).state_dict()
    assert "batch size" in ResumableLoader(DataLoader(Stream(), batch_size=5), convert=both).check_state(stream)[0]
    world = state | {"inputs": state["inputs"] | {"world_size": 2}}
    assert ResumableLoader(dataloader("shuffle"), convert=both).check_state(world) == [
        "world size changed, and only the shares of a DistributedSampler can be converted"
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"seed": -1}, ValueError, "0 to 2\\*\\*63 - 1"),
        ({"seed": 2**63}, ValueError, "0 to 2\\*\\*63 - 1"),
        ({"seed": True}, ValueError, "seed must be an int"),
        ({"seed": 1.5}, ValueError, "seed must be an int"),
        ({"convert": "batch_size"}, ValueError, "convert takes names among batch_size, world_size"),
        ({"convert": ("drop_last",)}, ValueError, "convert takes names among batch_size, world_size"),
    ],
)
def test_nonsense_argument_is_refused_with_the_allowed_values(arguments, error, part):
    """What cannot be meant is an error at construction."""
    with pytest.raises(error, match=part):
        ResumableLoader(DataLoader(range(4)), **arguments)


def test_samplers_of_ones_own_are_compared_by_class_name():
    """A class of the same name in another module, as after moving a script, is the same sampler."""
    state = ResumableLoader(dataloader("custom")).state_dict()
    assert state["inputs"]["sampler"] == "BatchSampler of Lazy"
    moved = type("Lazy", (Lazy,), {"__module__": "elsewhere"})
    assert ResumableLoader(dataloader("sequential", sampler=moved())).check_state(state) == []
    plain = ResumableLoader(dataloader("sequential", sampler=SequentialSampler(range(13)))).check_state(state)
    assert "sampler class: 'BatchSampler of Lazy' in the saved state, 'BatchSampler of SequentialSampler' now" in plain


class Tokens:
    """Batches of about equal size, whose number differs from epoch to epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4 - self.epoch % 2

    def __iter__(self):
        return iter([list(range(12))[first :: len(self)] for first in range(len(self))])


def test_length_that_depends_on_the_epoch_is_compared_in_that_epoch():
    """A batch sampler that is shorter in every second epoch resumes in each, and a shorter dataset is still refused."""
    one = ResumableLoader(DataLoader(range(12), batch_sampler=Tokens()), seed=0)
    states, rests = [], []
    for _ in one.epochs(3):
        for batch in one:
            states.append(one.state_dict())
            rests.append(str(batch))
        states.append(one.state_dict())
        rests.append("")
    assert len(rests) - rests.count("") == 11
    for number, state in enumerate(states):
        again = ResumableLoader(DataLoader(range(12), batch_sampler=Tokens()), seed=0)
        before = again.sampler, again.batch_sampler.epoch
        assert again.check_state(state) == []
        assert (again.sampler, again.batch_sampler.epoch) == before
        again.load_state_dict(state)
        assert [str(batch) for _ in again.epochs(3) for batch in again] == [
            rest for rest in rests[number + 1 :] if rest
        ]
    other = ResumableLoader(DataLoader(range(11), batch_sampler=Tokens()), seed=0)
    assert other.check_state(states[5]) == ["dataset length: 12 in the saved state, 11 now"]
