"""Iterable datasets: position by the dataset's own state, or by drawing again and throwing away."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from safeckpt import CheckpointManager
from safeckpt.errors import StateMismatchError, UncapturedStateWarning
from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight
from tests.loader.workloads import StatefulStream, Stream, collate, convert

KINDS = pytest.mark.parametrize("kind", [Stream, StatefulStream])
OPTIONS = {
    "no workers": {},
    "short batch dropped": {"drop_last": True},
    "no batching": {"batch_size": None, "collate_fn": convert},
    "3 workers": {"num_workers": 3},
    "3 workers, short batches dropped": {"num_workers": 3, "drop_last": True},
    "3 persistent workers": {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 4},
}


def make(kind, options):
    return DataLoader(kind(), **{"batch_size": 3, "collate_fn": collate} | OPTIONS[options])


@KINDS
@pytest.mark.parametrize("options", [name for name in OPTIONS if "workers" not in name or name == "no workers"])
def test_stream_resumes_at_every_position(kind, options):
    """In one process every position of two epochs gives the rest of the uninterrupted run."""
    run = straight(functools.partial(make, kind, options), epochs=2)
    for position, state in run.states.items():
        expected = run.rest(position) if position[0] < 2 else []
        assert resumed(functools.partial(make, kind, options), state, epochs=2) == expected, position


@KINDS
@pytest.mark.parametrize(
    "options",
    ["3 workers", pytest.param("3 workers, short batches dropped", marks=pytest.mark.slow), "3 persistent workers"],
)
def test_stream_in_workers_resumes_with_the_turn_of_the_same_worker(kind, options):
    """Workers whose shares end at different times take the same turns after a resume, at the end too."""
    run = straight(functools.partial(make, kind, options), epochs=2)
    batches = len(run.batches[0])
    assert batches == 6 if "dropped" in options else 9
    for position in [(0, 1), (0, batches - 2), (1, 0), (1, 3), (1, batches)]:
        assert resumed(functools.partial(make, kind, options), run.states[position], epochs=2) == run.rest(position)


@KINDS
def test_stream_gives_the_samples_of_the_bare_dataloader(kind):
    """Sharding, the order of turns and the short batches are those of the bare DataLoader."""
    for options in OPTIONS:
        if kind is StatefulStream:  # its order is the same without randomness
            wrapped = [[row[0] for row in batch] for batch in ResumableLoader(make(kind, options))]
            assert wrapped == [[row[0] for row in batch] for batch in make(kind, options)]
        else:
            wrapped = {row[0] for batch in ResumableLoader(make(kind, "no workers")) for row in batch}
            assert wrapped == set(range(23))


@KINDS
@pytest.mark.parametrize("options", ["no workers", "3 persistent workers"])
def test_stream_is_rewound_within_the_loop(kind, options):
    """A rewind in the body starts the streams again, also at the beginning of an epoch."""
    run = straight(functools.partial(make, kind, options), epochs=2)
    for target in [(0, 0), (0, 2), (1, 0), (1, 1)]:
        loader = ResumableLoader(make(kind, options), seed=1)
        seen, done = [], False
        for _ in loader.epochs(2):
            for batch in loader:
                seen.append(batch)
                if (loader.epoch, loader.batch) == (1, 4) and not done:
                    loader.load_state_dict(run.states[target])
                    seen, rest, done = [], run.rest(target), True
        assert seen == [batch for batches in rest for batch in batches]


@pytest.mark.parametrize(("kind", "said"), [(Stream, True), (StatefulStream, False)])
@pytest.mark.parametrize("options", ["no workers", "3 workers"])
def test_drawing_and_discarding_is_said_with_its_count(kind, said, options, caplog):
    """One log line tells how many batches are drawn again, and none when the dataset has a state."""
    run = straight(functools.partial(make, kind, options), epochs=1)
    with caplog.at_level(logging.WARNING, logger="safeckpt"):
        resumed(functools.partial(make, kind, options), run.states[0, 4], epochs=1)
    lines = ["Stream has no state_dict: 4 batches are drawn and thrown away to reach batch 4 of epoch 0"]
    assert caplog.messages == (lines if said else [])


def test_state_of_the_dataset_is_read_without_drawing_again():
    """A dataset with a state is asked for no sample before the position."""
    loader = ResumableLoader(make(StatefulStream, "no workers"), seed=1)
    it = iter(loader)
    for _ in range(5):
        next(it)
    other = ResumableLoader(make(StatefulStream, "no workers"))
    other.load_state_dict(loader.state_dict())
    next(iter(other))
    assert other.dataset.reads == 3


@KINDS
@pytest.mark.parametrize("options", ["no workers", "3 persistent workers"])
def test_stream_left_by_break_begins_anew(kind, options):
    """The next epoch is a whole one, the same for the process that left and for one resumed after it."""
    loader = ResumableLoader(make(kind, options), seed=1)
    for _ in loader:
        if loader.batch == 2:
            break
    loader.end_epoch()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    rest = list(loader)
    assert sorted(row[0] for batch in rest for row in batch) == list(range(23))
    assert resumed(functools.partial(make, kind, options), state, epochs=2) == [rest]


class Iterating(IterableDataset):
    """Keeps its state in its iterator, as a class of its own."""

    class Iterator:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == 8:
                raise StopIteration
            self.at += 1
            return [float(self.at), torch.rand(()).item()]

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def __iter__(self):
        return self.Iterator()


@pytest.mark.parametrize("workers", [0, 1])
def test_state_of_the_iterator_serves_as_well(workers, caplog):
    """A dataset whose iterator has the state goes on from there, between no worker and one."""

    def one(count=workers):
        return DataLoader(Iterating(), batch_size=3, collate_fn=collate, num_workers=count)

    run = straight(one)
    for position in [(0, 1), (0, 3), (1, 2)]:
        assert resumed(functools.partial(one, 1 - workers), run.states[position]) == run.rest(position)
    assert caplog.messages == []


def test_failed_fetch_does_not_let_the_state_run_ahead():
    """A state saved while a fetch has failed half-way goes on with the batch that failed."""
    failing = True

    def fails(rows):
        if failing and rows[0][0] == 6.0:
            raise ZeroDivisionError
        return collate(rows)

    def one():
        return DataLoader(StatefulStream(), batch_size=3, collate_fn=fails)

    failing = False
    whole = list(ResumableLoader(one(), seed=1))
    failing = True
    loader = ResumableLoader(one(), seed=1)
    try:
        list(loader)
    except ZeroDivisionError:
        state = loader.state_dict()
    failing = False
    assert resumed(one, state, epochs=1) == [whole[2:]]


def test_epoch_reaches_datasets_in_persistent_workers():
    """`set_epoch` is called on the copy that each worker keeps, not only on the original."""

    class Epochs(IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield [float(self.epoch), float(get_worker_info().id)]

    dataset = Epochs()
    loader = ResumableLoader(DataLoader(dataset, num_workers=2, persistent_workers=True, collate_fn=list))
    seen = [[row for batch in loader for row in batch] for _ in loader.epochs(3)]
    assert seen == [[[float(epoch), 0.0], [float(epoch), 1.0]] for epoch in range(3)]
    assert dataset.epoch == 2


def test_other_number_of_workers_is_refused_for_a_stream():
    """Shards of two workers are not those of three, and the message says which numbers there are."""
    run = straight(functools.partial(make, Stream, "3 workers"), epochs=1)
    loader = ResumableLoader(DataLoader(Stream(), batch_size=3, num_workers=2, collate_fn=collate))
    with pytest.raises(StateMismatchError, match=r"number of workers .*: 3 in the saved state, 2 now"):
        loader.load_state_dict(run.states[0, 2])
    assert (loader.epoch, loader.batch) == (0, 0)


def test_stream_that_lost_its_state_dict_is_refused():
    """A position that only the dataset understands is no position for another dataset."""
    run = straight(functools.partial(make, StatefulStream, "no workers"), epochs=1)
    loader = ResumableLoader(make(Stream, "no workers"))
    with pytest.raises(StateMismatchError, match="which has no load_state_dict now"):
        loader.load_state_dict(run.states[0, 2])


class Passes(IterableDataset):
    """Counts its passes, which make its samples, and says so: `style` is what happens to the place at the end."""

    def __init__(self, style):
        self.style = style
        self.at, self.passes, self.resume = 0, 0, None

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self.style == "keeps its place":
            self.at, self.resume = self.resume or 0, None
        mine = range(worker, 11, workers)
        while self.at < len(mine):
            self.at += 1
            yield [float(mine[self.at - 1] + 100 * self.passes), random.random()]
        self.passes += 1
        if self.style == "resets its place":
            self.at = 0

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at = self.resume = state["at"]
        self.passes = state["passes"]


class LateState(Passes):
    """Has a state only once it is iterated."""

    def __iter__(self):
        self.begun = True
        yield from super().__iter__()

    def state_dict(self):
        assert self.style
        return {"at": self.at, "passes": self.passes, "begun": self.begun}


def passes(style, kind=Passes, size=3, **options):
    return DataLoader(kind(style), batch_size=size, collate_fn=list, **options)


PASSES = {
    "0": {},
    "0, one batch": {"size": 11},
    "0, no short batch": {"size": 1},
    "2": {"num_workers": 2},
    "3 persistent": {"num_workers": 3, "persistent_workers": True},
}
# Each position of each epoch starts workers: a kind is tried with all styles in one process, with workers in one style.
MOST_PASSES = {("2", Passes, "resets its place"), ("3 persistent", LateState, "keeps its place")}


@pytest.mark.parametrize(
    ("options", "kind", "style"),
    [
        pytest.param(
            PASSES[one], kind, style, id=f"{one}-{kind.__name__}-{style}",
            marks=[pytest.mark.slow] * (one[0] != "0" and (one, kind, style) not in MOST_PASSES),
        )
        for one, kind, style in itertools.product(PASSES, [Passes, LateState], ["resets its place", "keeps its place"])
    ],
)  # fmt: skip
def test_state_that_lives_across_epochs_comes_back(options, kind, style):
    """Between two epochs and within them, what the dataset says at the end of an epoch is where the next begins."""
    make = functools.partial(passes, style, kind, **options)
    run = straight(make)
    numbers = [sorted(row[0] for batch in batches for row in batch) for batches in run.batches]
    assert numbers == [[float(index + 100 * epoch) for index in range(11)] for epoch in range(3)]
    batches = len(run.batches[0])
    for position in [(0, 0), (0, 1), (0, batches), (1, 0), (1, 1), (1, batches - 1), (1, batches), (2, 0), (2, 1)]:
        if position in run.states:
            assert resumed(make, run.states[position]) == run.rest(position), position


def test_workers_that_live_on_and_those_that_do_not_give_the_same_epochs():
    """What a dataset carries from epoch to epoch does not depend on how long its workers live."""
    runs = [
        straight(functools.partial(passes, "resets its place", num_workers=2, persistent_workers=persistent)).batches
        for persistent in (False, True)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", [Passes, LateState])
def test_stream_with_a_state_across_epochs_is_rewound(kind):
    """Going back to any epoch within the process brings its samples, the first epoch's as well."""
    make = functools.partial(passes, "resets its place", kind)
    run = straight(make)
    loader = ResumableLoader(make(), seed=1)
    list(loader)
    for target in [(1, 2), (2, 0), (1, 0), (0, 2)]:
        loader.load_state_dict(run.states[target])
        assert [list(loader) for _ in loader.epochs(3)] == run.rest(target)


class Buffered(IterableDataset):
    """Shuffles through a buffer with a generator that nobody can reach."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        order = random.Random(self.seed()).sample(range(30), 30)
        yield from ([float(index), {"text": str(index)}, torch.full((40,), float(index))] for index in order)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("other", [True, False])
def test_samples_drawn_again_that_are_others_are_named(workers, other):
    """A stream that gives another order when it is drawn again is a warning, with the count; the same order is none."""
    seeds = iter([1, 2 if other else 1])

    def make():
        seed = next(seeds)
        return DataLoader(Buffered(lambda: seed), batch_size=4, collate_fn=list, num_workers=workers)

    loader = ResumableLoader(make(), seed=1)
    it = iter(loader)
    for _ in range(3):
        next(it)
    again = ResumableLoader(make())
    again.load_state_dict(loader.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(again)) == 5
    found = [str(one.message) for one in caught if one.category is UncapturedStateWarning]
    assert len(found) == int(other)
    assert all(text.startswith("the first 3 batches of a worker's stream were drawn again") for text in found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_seek_in_a_stream_passes_over_its_batches(kind, workers):
    """A run that comes from elsewhere goes on behind the batches it has seen."""

    def one():
        return ResumableLoader(DataLoader(kind(), batch_size=3, collate_fn=collate, num_workers=workers), seed=1)

    whole = list(one())
    loader = one()
    loader.seek(0, 4)
    assert list(loader) == whole[4:]
    assert (loader.epoch, loader.batch) == (1, 0)
    loader.seek(0, 40)
    with pytest.raises(StateMismatchError, match="the position is batch 40, and the stream ends after"):
        list(loader)


class OwnIterator(IterableDataset):
    """Is its own iterator, with a place that `style` says how `__iter__` treats."""

    def __init__(self, style):
        self.style = style
        self.at, self.resume = 0, None
        if style != "has no place before":
            self.place = {"at": 0}

    def __iter__(self):
        info = get_worker_info()
        self.worker, self.workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self.style == "takes what was loaded":
            self.place, self.resume = {"at": self.resume or 0}, None
        else:
            self.place = {"at": 0}
        return self

    def __next__(self):
        mine = range(self.worker, 13, self.workers)
        if self.place["at"] >= len(mine):
            raise StopIteration
        self.place["at"] += 1
        return [float(mine[self.place["at"] - 1]), random.random()]

    def state_dict(self):
        return {"at": self.place["at"]}

    def load_state_dict(self, state):
        self.place["at"] = self.resume = state["at"]


@pytest.mark.parametrize(
    ("style", "workers"),
    [
        *((style, 0) for style in ("begins anew", "has no place before", "takes what was loaded")),
        ("begins anew", 2),
        pytest.param("has no place before", 2, marks=pytest.mark.slow),
        pytest.param("takes what was loaded", 2, marks=pytest.mark.slow),
    ],
)
def test_dataset_that_is_its_own_iterator_resumes_at_every_position(style, workers):
    """Its `__iter__` may set the place back, or take the one that was loaded: the same batches come in every epoch."""

    def one():
        return DataLoader(OwnIterator(style), batch_size=3, collate_fn=list, num_workers=workers)

    run = straight(one)
    assert sorted(row[0] for batch in run.batches[0] for row in batch) == list(range(13))
    for position in [(0, 1), (0, 3), (1, 0), (1, 2), (2, 4)]:
        assert resumed(one, run.states[position]) == run.rest(position)


@pytest.mark.parametrize("read", [4, 100])
@pytest.mark.parametrize("place", [(0, 0), (0, 3), (0, "left")])
@pytest.mark.parametrize("options", ["no workers", "3 workers", "3 persistent workers"])
def test_dataset_that_was_read_from_before_the_loader_was_made_goes_to_its_position(options, place, read):
    """A dataset with a state is taken to where the run's own was, wherever somebody else has left it."""
    loader = ResumableLoader(make(StatefulStream, options), seed=1)
    if place[1] == "left":
        next(iter(loader))
        loader.end_epoch()
    batches = iter(loader)
    for _ in range(place[1] if place[1] != "left" else 0):
        next(batches)
    state = loader.state_dict()
    expected = list(batches)
    dataset = StatefulStream()
    samples = iter(dataset)
    for _ in range(min(read, 23)):
        next(samples)
    other = ResumableLoader(DataLoader(dataset, **{"batch_size": 3, "collate_fn": collate} | OPTIONS[options]))
    other.load_state_dict(state)
    assert list(other) == expected
    assert expected


class Between(IterableDataset):
    """The numbers from `start` to `end`, and where it is; each worker is given a part of them by a function."""

    def __init__(self):
        self.start, self.end, self.place = 0, 8, None

    def __iter__(self):
        number = self.start if self.place is None else self.place
        while number < self.end:
            self.place = number + 1
            yield torch.tensor(number)
            number += 1
        self.place = None

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def give_part(worker):
    dataset = get_worker_info().dataset
    half = (dataset.end - dataset.start) // 2
    dataset.start, dataset.end = dataset.start + worker * half, dataset.start + (worker + 1) * half


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_part_that_a_function_gives_to_a_worker_is_its_part(persistent, tmp_path):
    """Before a restore and after one: what the dataset was at first is that of this process, not that of a worker."""

    def made():
        options = {"num_workers": 2, "worker_init_fn": give_part, "persistent_workers": persistent}
        return ResumableLoader(DataLoader(Between(), batch_size=2, **options))

    wanted = [[0, 1], [4, 5], [2, 3], [6, 7]]
    loader = made()
    with CheckpointManager(tmp_path, {"loader": loader}, save_on_exit=False) as manager:
        manager.save(0)
        assert [batch.tolist() for batch in loader] == wanted
    loader = made()
    with CheckpointManager(tmp_path, {"loader": loader}, save_on_exit=False) as manager:
        for _ in range(2):
            manager.restore()
            assert [batch.tolist() for batch in loader] == wanted


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_dataset_that_the_script_changes_before_the_first_epoch_stays_so(workers, tmp_path):
    """A save looks at it, and puts nothing back."""
    dataset = Between()
    loader = ResumableLoader(DataLoader(dataset, batch_size=2, num_workers=workers))
    with CheckpointManager(tmp_path, {"loader": loader}, save_on_exit=False) as manager:
        manager.restore()
        manager.save(0)
        dataset.start = 4
        assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]
