"""Looking at the loader moves nothing: peeks before training, second passes, evaluations inside the loop."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from safeckpt.loader import ResumableLoader
from safeckpt.state.random_streams import RngStreams
from tests.loader.workloads import Private, StatefulStream, Stream, collate, dataloader

WORKERS = pytest.mark.parametrize("workers", [0, 2])
ORDERS = pytest.mark.parametrize("order", ["shuffle", "custom", "custom, own generator", "custom, stateful"])


def straight(order, epochs=3):
    loader = ResumableLoader(dataloader(order), seed=1)
    return [list(loader) for _ in loader.epochs(epochs)]


def train(loader, epochs=3, *, before=None, inside=None, after=None, announce=True):
    """Return what was trained in each epoch, with looks at the places given."""
    trained, step = [], 0
    if announce:
        loader.expect_end_step()
    for _ in loader.epochs(epochs):
        trained.append([])
        if before:
            before(loader)
        for batch in loader:
            trained[-1].append(batch)
            if inside and len(trained[-1]) == 2:
                inside(loader)
            if announce:
                loader.end_step(step := step + 1)
        if after:
            after(loader)
    return trained


def glance(loader):
    return next(iter(loader), None)


def read_all(loader):
    return list(loader)


LOOKS = pytest.mark.parametrize("look", [glance, read_all])


@ORDERS
@LOOKS
@pytest.mark.parametrize("announce", [True, False])
def test_look_before_training_moves_nothing(order, look, announce):
    """Statistics or one batch, before the first epoch and before `epochs` is entered."""
    loader = ResumableLoader(dataloader(order), seed=1)
    if announce:
        loader.expect_end_step()
    look(loader)
    assert train(loader, announce=announce) == straight(order)


@ORDERS
@LOOKS
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_look_in_the_body_moves_nothing(order, look, place):
    """Before, within and after the training loop of every epoch: n bodies, each trained on its own epoch."""
    loader = ResumableLoader(dataloader(order), seed=1)
    assert train(loader, **{place: look}) == straight(order)
    assert (loader.epoch, loader.batch) == (3, 0)


@WORKERS
@pytest.mark.parametrize("place", ["inside", "after"])
@pytest.mark.parametrize("persistent", [False, True])
def test_look_reads_the_same_epoch_whole_and_leaves_the_streams_alone(workers, place, persistent):
    """A second pass gives the batches of that epoch from its first one, and training draws what it would have."""
    seen, before = [], []

    def look(loader):
        before.append(RngStreams.capture()["torch"])
        seen.append(list(loader))
        assert torch.equal(RngStreams.capture()["torch"], before[-1])

    options = {"persistent_workers": True} if workers and persistent else {}
    loader = ResumableLoader(dataloader("shuffle", workers, **options), seed=1)
    assert train(loader, **{place: look}) == straight("shuffle")
    assert seen == straight("shuffle")


@pytest.mark.parametrize("place", ["before", "inside", "after"])
@pytest.mark.parametrize("at", [(0, 1), (1, 2), (1, 5), (2, 0)])
@LOOKS
def test_resumed_run_that_looks_trains_the_rest(place, at, look):
    """The same looks after a resume in the middle of an epoch cost no batch."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    loader.expect_end_step()
    states, step = {(0, 0): loader.state_dict()}, 0
    for epoch in loader.epochs(3):
        for batch, _ in enumerate(loader, start=1):
            loader.end_step(step := step + 1)
            states[epoch, batch] = loader.state_dict()
        states[epoch + 1, 0] = loader.state_dict()
    again = ResumableLoader(dataloader("shuffle"))
    again.load_state_dict(states[at])
    look(again)
    rest = straight("shuffle")
    rest = [rest[at[0]][at[1] :], *rest[at[0] + 1 :]]
    assert train(again, **{place: look}) == rest


def test_position_saved_while_a_look_is_under_way_is_that_of_the_training():
    """In the middle of an evaluation on the training set the state is behind the last step."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    it = iter(loader)
    next(it), next(it)
    loader.end_step(1)
    look = iter(loader)
    next(look), next(look), next(look)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    assert (loader.epoch, loader.batch) == (0, 2)
    again = ResumableLoader(dataloader("shuffle"))
    again.load_state_dict(state)
    assert list(again) == straight("shuffle")[0][2:]


def test_iterator_kept_from_a_look_does_not_disturb():
    """A peek whose iterator lives on is a peek."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    it = iter(loader)
    next(it)
    assert train(loader) == straight("shuffle")


def test_iterator_bound_again_begins_the_next_epoch():
    """A step-based loop that makes a new iterator while the old one has its name sees a new order each time."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    it = iter(loader)
    seen = []
    for step in range(6):
        if step % 2 == 0 and step:
            it = iter(loader)
        seen.append(next(it))
        loader.end_step(step + 1)
    assert seen == [batch for batches in straight("shuffle") for batch in batches[:2]]


def test_training_in_a_second_pass_is_refused_at_its_first_step():
    """Two training passes in one body have one position between them, and the message says how to write it."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    steps = []

    def twice():
        for _ in loader.epochs(2):
            for batch in itertools.chain(loader, loader):
                steps.append(batch)
                loader.end_step(len(steps))

    with pytest.raises(RuntimeError, match=r"second pass over epoch 0.*loader\.epochs\(passes \* n\)"):
        twice()
    assert len(steps) == 6


@WORKERS
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_look_at_a_stream_moves_nothing(kind, workers, place):
    """An iterable dataset is put back to where the training is."""

    def make():
        return ResumableLoader(DataLoader(kind(), batch_size=3, collate_fn=collate, num_workers=workers), seed=1)

    assert train(make(), 2, **{place: glance}) == train(make(), 2)


@WORKERS
def test_second_pass_over_a_stream_is_the_same_epoch(workers):
    """The whole epoch comes again, from its beginning."""
    seen = []
    make = functools.partial(DataLoader, StatefulStream(), batch_size=3, collate_fn=collate, num_workers=workers)
    loader = ResumableLoader(make(), seed=1)
    trained = train(loader, 2, after=lambda loader: seen.append(list(loader)))
    assert seen == trained


def test_second_pass_over_a_loader_with_a_position_of_its_own_is_refused():
    """What keeps its position itself cannot be read twice."""

    class Counting:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            while self.at < 4:
                self.at += 1
                yield self.at
            self.at = 0

        def __len__(self):
            return 4

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = ResumableLoader(Counting(), seed=1)
    assert train(loader, 2, before=glance) == [[1, 2, 3, 4]] * 2
    with pytest.raises(RuntimeError, match="make a second loader over the same dataset"):
        train(ResumableLoader(Counting(), seed=1), 2, inside=glance)


def test_look_leaves_a_generator_of_the_sampler_where_it_was():
    """What the order of the next epoch draws from has not moved."""
    loader = ResumableLoader(dataloader("custom, own generator"), seed=1)
    sampler = loader.sampler
    assert isinstance(sampler, Private)
    before = sampler.generator.bit_generator.state
    glance(loader)
    glance(loader)
    other = ResumableLoader(dataloader("custom, own generator"), seed=1)
    assert list(loader) == list(other)
    assert before != sampler.generator.bit_generator.state == other.sampler.generator.bit_generator.state


def at_the_end():
    """Return a state that was saved at the last batch of the first epoch."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    loader.expect_end_step()
    for _ in loader.epochs(1):
        for step, _ in enumerate(loader, 1):
            loader.end_step(step)
            if loader.batch == len(loader):
                return loader.state_dict()
    raise AssertionError


def test_next_without_a_batch_left_says_so_and_how_to_go_on():
    """A glance by `next` at a loader that was restored to the end of an epoch shows more than a bare StopIteration."""
    loader = ResumableLoader(dataloader("shuffle"))
    loader.load_state_dict(at_the_end())
    with pytest.raises(StopIteration, match=r"no batch of epoch 0 .* is left.*loader\.epochs\(n\).*before the restore"):
        next(iter(loader))
    assert train(loader)[1:] == straight("shuffle")[1:]  # and it has moved nothing


def test_end_of_an_epoch_is_the_end_of_any_iterator():
    """`for`, `next` with a default, `zip`, `yield from` and a hand-written loop see an ordinary end."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    assert [len(list(loader)), len(list(zip(loader, range(100), strict=False)))] == [len(loader), len(loader)]

    def endless():
        while True:
            assert (yield from loader) is None

    batches, count = endless(), 3 * len(loader)
    assert len([next(batches) for _ in range(count)]) == count
    iterator = iter(loader)
    assert len(list(iterator)) == len(loader)
    with pytest.raises(StopIteration):
        next(iterator)
    assert next(iterator, None) is None


@pytest.mark.parametrize("announce", [True, False])
def test_hand_written_loop_goes_on_with_the_next_epoch_after_an_empty_rest(announce):
    """`except StopIteration: iterator = iter(loader)` finds the next epoch's batches there."""
    loader = ResumableLoader(dataloader("shuffle"))
    if announce:
        loader.expect_end_step()
    loader.load_state_dict(at_the_end())
    iterator = iter(loader)
    with pytest.raises(StopIteration):
        next(iterator)
    assert list(loader) == straight("shuffle")[1]
