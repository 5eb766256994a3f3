"""Going back from within the loop: the same `for` goes on, and what is to be left out stays out."""

from __future__ import annotations

import functools

import pytest
from torch.utils.data import DataLoader

from safeckpt.loader import ResumableLoader
from tests.loader.runs import straight
from tests.loader.workloads import ORDERS, Augmented, Stream, collate, dataloader

WORKERS = pytest.mark.parametrize(
    "options",
    [{}, {"workers": 2}, {"workers": 2, "persistent_workers": True}],
    ids=["no workers", "2 workers", "persistent workers"],
)


@WORKERS
@pytest.mark.parametrize("target", [(0, 0), (0, 2), (0, 5), (1, 0), (1, 1)])
def test_rewind_in_the_body_goes_on_in_the_same_for(options, target):
    """The batches after the rewind are those after the saved position, in epochs before the current one too."""
    run = straight(functools.partial(dataloader, "shuffle"))
    loader = ResumableLoader(dataloader("shuffle", **options), seed=1)
    seen, rewound = [], False
    for _ in loader.epochs(3):
        for batch in loader:
            seen.append((loader.epoch, loader.batch - 1, batch))
            if (loader.epoch, loader.batch) == (1, 3) and not rewound:
                loader.load_state_dict(run.states[target])
                assert (loader.epoch, loader.batch) == target
                rewound = True
    order = [(epoch, number) for epoch in range(3) for number in range(5)]
    expected = order[:8] + order[5 * target[0] + target[1] :]
    assert [(epoch, number) for epoch, number, _ in seen] == expected
    assert all(batch == run.batches[epoch][number] for epoch, number, batch in seen)
    assert (loader.epoch, loader.batch) == (3, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_rewind_for_every_kind_of_sampler(order):
    """Samplers with memory of their own go back with the position."""
    make = functools.partial(dataloader, order)
    run = straight(make)
    loader = ResumableLoader(make(), seed=1)
    list(loader)
    for target in [(1, 2), (0, 1), (2, 0)]:
        next(iter(loader))
        loader.load_state_dict(run.states[target])
        assert [list(loader) for _ in loader.epochs(3)] == run.rest(target)


def test_rewind_outside_the_inner_loop_repeats_that_epoch():
    """A rollback after the inner loop, in the evaluation say, makes `epochs` yield the rewound epoch again."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    state, seen = None, []
    for epoch in loader.epochs(3):
        seen.append(epoch)
        for _ in loader:
            if (loader.epoch, loader.batch) == (1, 4) and state is None:
                state = loader.state_dict()
        if epoch == 2 and seen.count(1) == 1:
            loader.load_state_dict(state)
    assert seen == [0, 1, 2, 1, 2]


def test_rewind_followed_by_break_goes_on_from_the_rewound_position():
    """Leaving the loop right after a rewind does not end the epoch that was just restored."""
    loader = ResumableLoader(dataloader("shuffle"), seed=1)
    for _ in loader:
        if loader.batch == 2:
            state = loader.state_dict()
        if loader.batch == 4:
            loader.load_state_dict(state)
            break
    assert loader.state_dict() == state
    assert len(list(loader)) == 3


def test_rewind_during_enumerate_and_zip_is_followed():
    """Iterators of the standard library between the loop and the loader pass the rewound batches on."""
    loader = ResumableLoader(dataloader("sequential"), seed=1)
    state, seen = loader.state_dict(), []
    for (_, batch), _ in zip(enumerate(loader), range(8), strict=False):
        seen.append(int(batch[0][0]))
        if len(seen) == 3:
            loader.load_state_dict(state)
    assert seen == [0, 3, 6, 0, 3, 6, 9, 12]


def test_last_batches_crosses_epochs_and_forgets_what_was_undone():
    """The history is the sequence handed out as it stands: rewinding takes away what it has undone."""
    loader = ResumableLoader(dataloader("sequential"), seed=1)
    assert loader.last_batches(3) == []
    list(loader)
    it = iter(loader)
    next(it), next(it)
    state = loader.state_dict()
    assert loader.last_batches(1) == [(1, 1)]
    assert loader.last_batches(4) == [(0, 3), (0, 4), (1, 0), (1, 1)]
    assert len(loader.last_batches(100)) == 7
    assert loader.last_batches(0) == []
    next(it), next(it)
    loader.load_state_dict(state)
    assert loader.last_batches(2) == [(1, 0), (1, 1)]
    next(it)
    assert loader.last_batches(2) == [(1, 1), (1, 2)]
    loader.load_state_dict(state | {"epoch": 0, "batch": 3})
    assert loader.last_batches(2) == [(0, 1), (0, 2)]
    loader.load_state_dict(state | {"seed": 9})
    assert loader.last_batches(2) == []


@WORKERS
def test_left_out_batches_are_not_handed_out_and_not_fetched(options):
    """After a rewind the poisoned batches are missing, across an epoch's border, and everything else is as it was."""

    class Poisoned(Augmented):
        def __getitem__(self, index):
            if poison and index == 12:
                raise ZeroDivisionError
            return super().__getitem__(index)

    poison = False
    run = straight(functools.partial(dataloader, "sequential"), epochs=2)
    poison = True
    loader = ResumableLoader(dataloader("sequential", dataset=Poisoned(), **options), seed=1)
    loader.leave_out([(0, 4), (1, 0), (1, 4)])
    seen = [(loader.epoch, loader.batch, batch) for _ in loader.epochs(2) for batch in loader]
    numbers = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert seen == [(epoch, number + 1, run.batches[epoch][number]) for epoch, number in numbers]
    assert (loader.epoch, loader.batch) == (2, 0)


@WORKERS
def test_left_out_batches_that_were_prefetched_are_dropped(options):
    """Leaving out what a worker has already fetched works as well, without a rewind."""
    loader = ResumableLoader(dataloader("sequential", **options), seed=1)
    seen = []
    for batch in loader:
        seen.append(int(batch[0][0]))
        if loader.batch == 1:
            loader.leave_out([(0, 1), (0, 3)])
    assert seen == [0, 6, 12]
    assert loader.last_batches(3) == [(0, 0), (0, 2), (0, 4)]


def test_left_out_batches_are_in_the_state_until_they_are_behind():
    """A resumed process leaves out the same batches; restoring an older state restores its set."""
    loader = ResumableLoader(dataloader("sequential"), seed=1)
    before = loader.state_dict()
    loader.leave_out([(0, 1), (1, 2)])
    assert loader.left_out == [(0, 1), (1, 2)]
    other = ResumableLoader(dataloader("sequential"))
    other.load_state_dict(loader.state_dict())
    assert other.left_out == [(0, 1), (1, 2)]
    assert [len(list(other)), len(list(other))] == [4, 4]
    assert other.state_dict()["left_out"] == []
    other.load_state_dict(before)
    assert other.left_out == []


def test_rollback_as_the_manager_does_it_skips_exactly_the_failing_batches():
    """Take the last batches, rewind, leave them out: the rest is replayed, the failing ones are gone for good."""
    run = straight(functools.partial(dataloader, "shuffle"))
    loader = ResumableLoader(dataloader("shuffle", 2), seed=1)
    seen, state = [], None
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch)
            if (loader.epoch, loader.batch) == (0, 3):
                state = loader.state_dict()
            if (loader.epoch, loader.batch) == (1, 1) and not loader.left_out:
                bad = loader.last_batches(2)
                loader.load_state_dict(state)
                loader.leave_out(bad)
    assert bad == [(0, 4), (1, 0)]
    first, second = run.batches[:2]
    assert seen == first + second[:1] + first[3:4] + second[1:]


def test_iterable_dataset_draws_what_is_left_out_and_hands_out_the_rest():
    """Batches of a stream have to be drawn to be passed over; their neighbours do not change."""

    def make():
        return ResumableLoader(DataLoader(Stream(), batch_size=3, collate_fn=collate), seed=1)

    whole, loader = list(make()), make()
    loader.leave_out([(0, 2), (0, 7)])
    assert list(loader) == whole[:2] + whole[3:7]
