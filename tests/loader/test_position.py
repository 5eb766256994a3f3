"""Epoch and batch: what they are in the loop, after it, and after leaving it in every way there is."""

from __future__ import annotations

import gc

import pytest
from torch.utils.data import DataLoader

from safeckpt.loader import ResumableLoader
from tests.loader.workloads import Augmented, collate, dataloader, sizes

BATCHES = 5


def fresh(**options):
    return ResumableLoader(DataLoader(range(10), batch_size=2, **options), seed=0)


def position(loader):
    """Return the position as the loader says it and as it saves it."""
    state = loader.state_dict()
    assert (loader.epoch, loader.batch) == (state["epoch"], state["batch"])
    return loader.epoch, loader.batch


def rest(state, epochs=2):
    """Return how many batches each epoch has after a resume."""
    loader = fresh()
    loader.load_state_dict(state)
    return [(epoch, len(list(loader))) for epoch in loader.epochs(epochs)]


def test_batch_counts_what_was_handed_out():
    """In the body of the first batch it is 1, of the last the length; after the loop the next epoch is at 0."""
    loader = fresh()
    assert position(loader) == (0, 0)
    seen = [position(loader) for _ in loader]
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert position(loader) == (1, 0)
    assert len(loader) == BATCHES


def test_state_of_the_last_body_resumes_into_an_empty_rest():
    """What follows the inner loop runs once more for that epoch; a state saved after the loop is the next epoch."""
    loader = fresh()
    for _ in loader:
        last = loader.state_dict()
    assert rest(last) == [(0, 0), (1, BATCHES)]
    assert rest(loader.state_dict()) == [(1, BATCHES)]
    assert rest(last, epochs=1) == [(0, 0)]
    assert rest(loader.state_dict(), epochs=1) == []


def test_only_the_first_iteration_after_a_restore_goes_on_in_the_middle():
    """The rest of the epoch comes once, whole epochs follow."""
    loader = fresh()
    it = iter(loader)
    next(it), next(it)
    other = fresh()
    other.load_state_dict(loader.state_dict())
    assert sizes_of(other) == [3, 5, 5]


def sizes_of(loader, times=3):
    return [len(list(loader)) for _ in range(times)]


def test_break_ends_the_epoch_when_the_next_one_begins():
    """As with a bare DataLoader the next iteration is a whole epoch; a state saved before it is where the loop was."""
    loader = fresh()
    for _ in loader:
        if loader.batch == 2:
            break
    assert position(loader) == (0, 2)
    assert rest(loader.state_dict()) == [(0, 3), (1, BATCHES)]
    it = iter(loader)
    next(it)
    assert position(loader) == (1, 1)
    assert len(list(it)) == BATCHES - 1
    assert position(loader) == (2, 0)


def test_end_epoch_after_a_break_ends_the_epoch_at_once():
    """A loop that is left because the epoch is over says so, and the resume begins with the next one."""
    loader = fresh()
    for _ in loader:
        break
    loader.end_epoch()
    assert position(loader) == (1, 0)
    assert rest(loader.state_dict()) == [(1, BATCHES)]
    loader.end_epoch()
    assert position(loader) == (2, 0)


def test_return_ends_the_epoch_as_a_break_does():
    """Leaving by return keeps the position until the next epoch begins."""
    loader = fresh()

    def train():
        for _ in loader:
            if loader.batch == 2:
                return

    train()
    assert position(loader) == (0, 2)
    train()
    assert position(loader) == (1, 2)


def test_iterator_that_is_kept_keeps_the_epoch_open():
    """As long as an iterator lives the position is inside its epoch, and so it is when that one is dropped."""
    loader = fresh()
    it = iter(loader)
    next(it), next(it)
    assert position(loader) == (0, 2)
    assert rest(loader.state_dict()) == [(0, 3), (1, 5)]
    del it
    gc.collect()
    assert position(loader) == (0, 2)


def test_iteration_without_a_batch_leaves_no_trace():
    """Making an iterator and taking nothing from it moves neither the position nor the order."""
    loader, other = fresh(shuffle=True), fresh(shuffle=True)
    iter(loader), iter(loader)
    assert position(loader) == (0, 0)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in other]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_state_saved_while_an_exception_is_handled_resumes_where_it_struck(error):
    """An emergency save in `except`, `finally` or `__exit__` keeps the middle of the epoch."""
    saved = []

    class Saving:
        def __enter__(self):
            return self

        def __exit__(self, *args):
            saved.append(position(loader))

    loader = fresh()
    try:
        try:
            with Saving():
                for _ in loader:
                    if loader.batch == 3:
                        raise error
        finally:
            saved.append(position(loader))
    except error:
        saved.append(position(loader))
        state = loader.state_dict()
    assert saved == [(0, 3)] * 3
    assert rest(state) == [(0, 2), (1, 5)]
    assert len(list(loader)) == BATCHES  # the same process goes on as with a bare DataLoader
    assert position(loader) == (2, 0)


def test_generator_around_the_loop_closed_by_a_break_keeps_the_position():
    """Leaving a loop over a generator that holds the loop is a break as well, in its `finally` too."""
    loader = fresh()
    seen = []

    def batches():
        try:
            yield from loader
        finally:
            seen.append(position(loader))

    for _ in batches():
        if loader.batch == 2:
            break
    assert [*seen, position(loader)] == [(0, 2), (0, 2)]


def test_older_iterator_is_refused_when_a_newer_one_has_taken_over():
    """One loader has one position: of two iterators in turn the older one raises, and nothing is handed out twice."""
    loader = fresh()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer), next(newer)
    with pytest.raises(RuntimeError, match="a newer iteration"):
        next(older)
    assert position(loader) == (0, 2)


def test_exhausted_iterator_stays_exhausted():
    """An iterator that has ended says so again, also after the loader was rewound."""
    loader = fresh()
    state = loader.state_dict()
    it = iter(loader)
    assert len(list(it)) == BATCHES
    loader.load_state_dict(state)
    assert list(it) == []
    assert position(loader) == (0, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_exception_in_getitem_resumes_at_the_batch_that_failed(workers):
    """The failed batch was not handed out; the same iterator passes over it, as a bare one does."""

    class Failing(Augmented):
        def __getitem__(self, index):
            if index == 7:
                raise ZeroDivisionError
            return super().__getitem__(index)

    def make(data):
        return ResumableLoader(dataloader("sequential", workers, dataset=data), seed=3)

    whole = list(make(Augmented()))
    loader = make(Failing())
    it = iter(loader)
    seen = [next(it), next(it)]
    try:
        next(it)
    except ZeroDivisionError:
        state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    seen.append(next(it))
    assert position(loader) == (0, 4)
    seen += it
    assert seen == whole[:2] + whole[3:]
    other = make(Augmented())
    other.load_state_dict(state)
    assert list(other) == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_interrupt_inside_the_fetch_loses_no_batch(workers):
    """A Ctrl-C that strikes while a batch is made resumes with that batch."""

    def interrupt(rows):
        if rows[0][0] == 6.0:
            raise KeyboardInterrupt
        return collate(rows)

    loader = ResumableLoader(dataloader("sequential", 0, collate_fn=interrupt), seed=3)
    seen = []
    try:
        seen.extend(loader)
    except KeyboardInterrupt:
        state = loader.state_dict()
    other = ResumableLoader(dataloader("sequential", workers))
    other.load_state_dict(state)
    assert seen + list(other) == list(ResumableLoader(dataloader("sequential"), seed=3))


@pytest.mark.parametrize("where", ["sampler", "dataset"])
def test_iteration_that_broke_off_is_not_taken_for_a_finished_epoch(where):
    """A sampler that raised, or a dataset that raises StopIteration, never ends an epoch early in silence."""

    class Sampler:
        def __iter__(self):
            yield from range(4)
            raise ZeroDivisionError

    class Ends(Augmented):
        def __getitem__(self, index):
            if index == 4:
                raise StopIteration
            return [float(index)]

    if where == "sampler":
        it = iter(ResumableLoader(DataLoader(range(9), batch_size=2, sampler=Sampler())))
        next(it)
        with pytest.raises(ZeroDivisionError):
            list(it)
    else:
        it = iter(ResumableLoader(DataLoader(Ends(), batch_size=2)))
        next(it), next(it)
    with pytest.raises(RuntimeError, match="broke off before the end of the epoch"):
        next(it)


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_dataset_gives_empty_epochs(workers):
    """Nothing to hand out is an epoch all the same."""
    loader = ResumableLoader(DataLoader([], num_workers=workers))
    assert list(loader) == []
    assert position(loader) == (1, 0)
    assert [(epoch, list(loader)) for epoch in loader.epochs(3)] == [(0, []), (1, []), (2, [])]


def test_epochs_yields_every_epoch_once_whatever_its_body_does():
    """Iterating to the end, leaving early, keeping the iterator and not iterating at all: one epoch each."""
    loader = fresh()
    kept, seen = [], []
    for epoch in loader.epochs(5):
        seen.append(epoch)
        assert position(loader) == (epoch, 0)
        if epoch == 0:
            list(loader)
        elif epoch == 1:
            next(iter(loader))
        elif epoch == 2:
            kept.append(iter(loader))
            next(kept[0])
    assert seen == [0, 1, 2, 3, 4]
    assert position(loader) == (5, 0)
    assert list(loader.epochs(5)) == []


def test_epochs_after_a_restore_goes_on_with_the_epoch_of_the_rest():
    """A restored position in epoch 1 is first yielded as epoch 1, and skipping the rest ends that epoch."""
    loader = fresh()
    for _ in loader.epochs(2):
        for _ in loader:
            if loader.epoch == 1 and loader.batch == 2:
                state = loader.state_dict()
    loader.load_state_dict(state)
    assert list(loader.epochs(3)) == [1, 2]
    loader.load_state_dict(state)
    assert rest(state, epochs=3) == [(1, 3), (2, 5)]


def test_two_loaders_zipped_keep_a_position_each():
    """Loaders of different lengths that are iterated side by side resume side by side."""

    def build():
        return (
            ResumableLoader(dataloader("shuffle"), seed=1),
            ResumableLoader(dataloader("custom", batch_size=2), seed=2),
        )

    def run(left, right):
        for pair in zip(left, right, strict=False):
            pairs.append(pair)
            states.append((left.state_dict(), right.state_dict()))

    pairs, states = [], []
    run(*build())
    straight, saved = pairs, states[2]
    assert len(straight) == 5
    pairs = []
    left, right = build()
    left.load_state_dict(saved[0])
    right.load_state_dict(saved[1])
    run(left, right)
    assert pairs == straight[3:]
    assert (left.epoch, right.epoch) == (1, 1)


def test_loader_made_anew_every_epoch_resumes_with_the_state_of_the_last_one():
    """Each new loader is an epoch 0 of its own with a new seed; the position and the seed are in its state."""
    import torch

    def run(epochs, state=None, rng=None):
        for _ in epochs:
            loader = ResumableLoader(dataloader("shuffle"))
            if state is not None:
                loader.load_state_dict(state)
                torch.set_rng_state(rng)
                state = None
            for batch in loader:
                seen.append(batch)
                states.append((loader.state_dict(), torch.get_rng_state()))

    torch.manual_seed(0)
    seen, states = [], []
    run(range(3))
    straight, saved = seen, states[6]
    assert len({str(batch) for batch in straight}) == 15
    torch.manual_seed(1)
    seen = []
    run(range(1, 3), *saved)
    assert seen == straight[7:]


def test_evaluation_loader_beside_the_training_loader_changes_nothing():
    """A wrapped or plain loader iterated in the middle of the training loop moves no batch of it."""
    import torch

    def run(evaluate):
        torch.manual_seed(0)
        loader = ResumableLoader(dataloader("shuffle"))
        held_out = ResumableLoader(dataloader("sequential"), seed=5)
        seen = []
        for batch in loader:
            seen.append((batch, torch.rand(()).item()))
            if evaluate and loader.batch == 2:
                sizes(held_out)
        return seen

    assert run(evaluate=True) == run(evaluate=False)


def test_enumerate_counts_on_in_the_resumed_epoch():
    """What is done at every k-th batch of an epoch is done at the same ones after a resume, and after a rollback."""
    loader = fresh()
    numbers = []
    for _ in loader.epochs(2):
        for number, batch in loader.enumerate():
            assert batch.tolist() == [2 * number, 2 * number + 1]
            numbers.append(number)
            if (loader.epoch, number) == (1, 2):
                state = loader.state_dict()
    assert numbers == [0, 1, 2, 3, 4] * 2
    again = fresh()
    again.load_state_dict(state)
    numbers = []
    for _ in again.epochs(3):
        for number, _ in again.enumerate():
            numbers.append(number)
            if len(numbers) == 4:
                again.load_state_dict(state)
    assert numbers == [3, 4, 0, 1, 3, 4, 0, 1, 2, 3, 4]


def test_limit_by_number_breaks_again_at_once():
    """A resume into an epoch that had been left at its limit trains nothing more of it."""

    def train(loader):
        for _ in loader.epochs(3):
            for number, batch in loader.enumerate():
                if number >= 3:
                    break
                trained.append((loader.epoch, batch.tolist()))
                loader.end_step(len(trained))
            states.append(loader.state_dict())

    trained, states = [], []
    train(fresh(shuffle=True))
    straight, saved = trained, states[1]
    assert len(straight) == 9
    again = fresh(shuffle=True)
    again.load_state_dict(saved)
    trained, states = straight[:6], []
    train(again)
    assert trained == straight


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("order", ["shuffle", "custom", "distributed"])
def test_seek_goes_where_a_run_from_elsewhere_was(order, workers):
    """An epoch and a batch are enough where the order follows from the seed."""
    straight = ResumableLoader(dataloader(order), seed=3)
    whole = [list(straight) for _ in straight.epochs(3)]
    loader = ResumableLoader(dataloader(order, workers), seed=3)
    loader.seek(1, 2)
    assert position(loader) == (1, 2)
    assert [list(loader) for _ in loader.epochs(3)] == [whole[1][2:], whole[2]]
    loader.seek(2)
    assert [list(loader) for _ in loader.epochs(3)] == [whole[2]]
    for wrong in [(-1, 0), (0, -1), (True, 0), (0, 1.0)]:
        with pytest.raises(ValueError, match="seek takes the number of an epoch and of a batch"):
            loader.seek(*wrong)
