"""Every option of a DataLoader with the wrapper around it, and loaders that cannot be wrapped."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import random
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
    random_split,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight
from tests.loader.test_streams import positions
from tests.loader.workloads import Augmented, StatefulStream, Stream, collate, convert, dataloader, sizes

OPTIONS = {
    "no workers": {"workers": 0},
    "1 worker": {"workers": 1},
    "2 workers": {"workers": 2},
    "4 workers": {"workers": 4},
    "persistent": {"workers": 2, "persistent_workers": True},
    "prefetch": {"workers": 2, "prefetch_factor": 5},
    "timeout": {"workers": 2, "timeout": 60},
    "context object": {"workers": 1, "multiprocessing_context": multiprocessing.get_context("fork")},
    "spawn": {"workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
}


@pytest.fixture(scope="module")
def run():
    return straight(functools.partial(dataloader, "shuffle"), epochs=2)


@pytest.mark.parametrize(
    "options", [pytest.param(OPTIONS[one], id=one, marks=[pytest.mark.slow] * (one == "spawn")) for one in OPTIONS]
)
def test_any_workers_give_the_same_batches_as_none(options, run):
    """Whatever fetches, from the start and from the middle, order and draws are those of a run without workers."""
    assert resumed(functools.partial(dataloader, "shuffle", **options), run.states[0, 3], epochs=2) == run.rest((0, 3))


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["custom batches", "replacement, own generator", "no batching", "distributed"])
def test_any_order_comes_the_same_with_workers(order, workers):
    """Samplers that are drawn ahead of the batch at hand resume at the batch at hand."""
    run = straight(functools.partial(dataloader, order, workers), epochs=2)
    for position in [(0, 2), (1, 0), (1, 1)]:
        rest = resumed(functools.partial(dataloader, order, 5 - workers), run.states[position], epochs=2)
        assert rest == run.rest(position)


class Stamped(Augmented):
    """Shows what a `worker_init_fn` did to the dataset, and what the global streams were before it was seeded."""

    stamp = 0.0

    def __getitem__(self, index):
        return [float(index), self.stamp, random.random()]


def stamp(worker_id):
    info = get_worker_info()
    assert type(info.dataset) in (Stamped, StatefulStream)
    assert info.id == worker_id
    info.dataset.stamp = info.dataset.length + worker_id + np.random.rand() + torch.rand(()).item()
    random.seed(1)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_sees_the_users_dataset_and_seeds_that_depend_on_the_epoch(persistent):
    """It runs first, on the dataset itself; what it draws is repeatable, what it seeds does not reach the batches."""

    def make():
        return dataloader("sequential", 2, dataset=Stamped(), worker_init_fn=stamp, persistent_workers=persistent)

    run = straight(make, epochs=2)
    first, second = ([batch[0][1] for batch in batches] for batches in run.batches)
    assert len(set(first)) == 2  # one stamp for each worker
    assert (first == second) is persistent
    assert len({row[2] for batches in run.batches for batch in batches for row in batch}) == 26
    again = ResumableLoader(make(), seed=1)
    assert [list(again) for _ in range(2)] == run.batches


def test_worker_init_fn_sees_an_iterable_dataset_too():
    """The usual sharding by `get_worker_info().dataset` works on streams."""
    loader = DataLoader(StatefulStream(), batch_size=3, num_workers=2, worker_init_fn=stamp, collate_fn=list)
    assert len(sizes(ResumableLoader(loader))) == 23


def streaming(workers):
    return DataLoader(Stream(), num_workers=workers, collate_fn=collate)


@pytest.mark.parametrize("make", [dataloader, streaming])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_the_training_process_never_move(make, workers):
    """Constructing with a seed, iterating, saving, restoring, leaving: the training draws what it would have drawn."""
    before = positions()
    loader = ResumableLoader(make(workers=workers), seed=1)
    for _ in loader:
        assert positions() == before
        state = loader.state_dict()
        if loader.batch == 3:
            break
    loader.load_state_dict(state)
    list(loader)
    assert positions() == before


def test_seed_is_one_draw_from_torchs_stream_at_construction():
    """Without `seed=` the order follows `torch.manual_seed`, and two loaders do not share it."""
    torch.manual_seed(5)
    first, second = ResumableLoader(dataloader()), ResumableLoader(dataloader())
    after = torch.get_rng_state()
    torch.manual_seed(5)
    again = ResumableLoader(dataloader())
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)
    assert (first.seed, list(first)) == (again.seed, list(again))
    assert second.seed != first.seed


def test_ranks_that_share_a_seed_draw_different_augmentation():
    """The same batch number on two ranks is augmented differently; the private stream of the order is the same."""
    from torch.utils.data import DistributedSampler

    rows = []
    for rank in range(2):
        data = Augmented(8)
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        rows.append(next(iter(ResumableLoader(dataloader("sequential", dataset=data, sampler=sampler), seed=1))))
    assert [[row[0] for row in batch] for batch in rows] == [[0, 2, 4], [1, 3, 5]]
    assert not {value for row in rows[0] for value in row[1:]} & {value for row in rows[1] for value in row[1:]}


class Many(Dataset):
    """Fetches a whole batch at once, as Subset does."""

    def __len__(self):
        return 9

    def __getitems__(self, indices):
        assert type(indices) is list
        return [[float(index), torch.rand(()).item()] for index in indices]


@pytest.mark.parametrize(
    "make_dataset",
    [
        Many,
        lambda: random_split(Augmented(), [10, 3], generator=torch.Generator().manual_seed(1))[0],
        lambda: ConcatDataset([Augmented(5), Augmented(6)]),
        lambda: [[float(i)] for i in range(9)],
    ],
    ids=["getitems", "random_split", "concat", "list"],
)
def test_datasets_made_of_datasets_resume(make_dataset):
    """Fetching in one call, through subsets and concatenations, is as exact as fetching one by one."""
    run = straight(lambda: dataloader(dataset=make_dataset()), epochs=2)
    assert resumed(lambda: dataloader(dataset=make_dataset()), run.states[1, 1], epochs=2) == run.rest((1, 1))


def test_torchs_own_datasets_are_fetched_without_touching_any_stream(monkeypatch):
    """Where nothing can draw nothing is seeded, and the batches are those of the bare DataLoader."""
    from safeckpt.loader import fetch

    data = TensorDataset(torch.arange(12), torch.arange(12) * 2)
    parts = ConcatDataset([Subset(data, [3, 1, 2]), data])
    bare = list(DataLoader(parts, batch_size=4))
    loader = ResumableLoader(DataLoader(parts, batch_size=4))

    def fail():
        raise AssertionError

    monkeypatch.setattr(fetch, "save_streams", fail)
    torch.testing.assert_close(list(loader), bare)
    with pytest.raises(AssertionError):
        list(ResumableLoader(DataLoader(Subset(Augmented(), [1]), collate_fn=default_collate)))


def test_default_collate_and_convert_give_what_the_bare_dataloader_gives():
    """Tensors, nested samples and unbatched ones have the types they have without the wrapper."""
    data = [{"x": torch.ones(2) * i, "y": (i, str(i))} for i in range(5)]
    for options in ({"batch_size": 2}, {"batch_size": None}, {}, {"batch_size": 2, "drop_last": True}):
        bare, wrapped = list(DataLoader(data, **options)), list(ResumableLoader(DataLoader(data, **options)))
        assert str(wrapped) == str(bare)


def test_pin_memory_is_passed_on():
    """The inner loader pins when the user's does; without an accelerator torch says that it does not."""
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4)), pin_memory=True))
    if torch.accelerator.is_available():
        assert next(iter(loader))[0].is_pinned()
    else:
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator"):
            assert len(list(loader)) == 4


def test_timeout_of_a_worker_is_raised_and_resumes_with_that_batch(tmp_path):
    """A batch that takes too long is an error from torch and was not handed out."""
    ready = tmp_path / "ready"

    def wait(rows):
        while rows[0][0] == 6.0 and get_worker_info() is not None and not ready.exists():
            time.sleep(0.01)
        return collate(rows)

    options = {"workers": 1, "collate_fn": wait, "timeout": 1, "multiprocessing_context": "fork"}
    loader = ResumableLoader(dataloader("sequential", **options), seed=1)
    it = iter(loader)
    seen = [next(it), next(it)]
    with pytest.raises(RuntimeError, match="timed out"):
        next(it)
    state = loader.state_dict()
    ready.touch()
    seen += it  # the worker was only late: nothing is lost when the same iterator goes on
    whole = list(ResumableLoader(dataloader("sequential"), seed=1))
    assert (state["epoch"], state["batch"]) == (0, 2)
    assert resumed(lambda: dataloader("sequential"), state, epochs=1) == [whole[2:]]
    assert seen == whole


def test_attributes_of_the_wrapped_loader_are_found():
    """Training code that looks at `dataset`, `batch_size` or `len` finds what it found before."""
    bare = dataloader("shuffle")
    loader = ResumableLoader(bare)
    assert (loader.dataset, loader.batch_size, loader.sampler) == (bare.dataset, 3, bare.sampler)
    assert (loader.dataloader, len(loader), loader.num_workers) == (bare, 5, 0)
    with pytest.raises(AttributeError, match="nonsense"):
        loader.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="_private"):
        loader._private  # noqa: B018


def test_length_of_a_stream_without_one_is_the_error_of_the_bare_dataloader():
    """What has no length has none with the wrapper either."""
    with pytest.raises(TypeError, match="has no len"):
        len(ResumableLoader(DataLoader(Stream())))


def test_warning_about_too_many_workers_is_given_by_torch_alone():
    """Wrapping repeats no warning that the user's own DataLoader has given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = dataloader("shuffle", 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ResumableLoader(bare)


@pytest.mark.parametrize(
    "make",
    [
        dataloader,
        functools.partial(dataloader, "custom"),
        functools.partial(dataloader, workers=1, persistent_workers=True),
        lambda: DataLoader(Stream(), num_workers=1, persistent_workers=True, collate_fn=convert),
    ],
)
def test_loader_is_freed_without_the_garbage_collector(make):
    """There is no reference cycle: workers that the collector ends take torch five seconds each."""
    gc.collect()
    gc.disable()
    try:
        loader = ResumableLoader(make())
        for _ in loader:
            break
        list(loader)
        source = weakref.ref(loader._source)
        del loader
        assert source() is None
    finally:
        gc.enable()


class DataLoaderShard(DataLoader):
    """Has the shape of what Accelerate prepares: a batch ahead, and a `state_dict` that works for some loaders only."""

    def __init__(self, data):
        super().__init__(data)
        self.base_dataloader = DataLoader(data)

    def __iter__(self):
        yield from self.base_dataloader

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.dl_state_dict = state


class DataLoaderDispatcher(DataLoader):
    """The other one, without a `state_dict`."""

    def __init__(self, data):
        super().__init__(data)
        self.base_dataloader = DataLoader(data)


class Overriding(DataLoader):
    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: [1, 2], TypeError, "takes a torch.utils.data.DataLoader, or a loader with state_dict.*got list"),
        (lambda: ResumableLoader(DataLoader([1])), TypeError, "a ResumableLoader already"),
        (lambda: Overriding([1]), TypeError, "Overriding iterates in its own way"),
        (lambda: DataLoaderShard([1]), TypeError, r"DataLoaderShard .* Accelerate .*\(loader\.base_dataloader\)"),
        (lambda: DataLoaderDispatcher([1]), TypeError, "DataLoaderDispatcher is a loader that Accelerate has prepared"),
        (lambda: DataLoader([1], num_workers=1, in_order=False), ValueError, "in_order=False"),
        (lambda: DataLoader(IterableWrapper([1])), TypeError, "the dataset is a DataPipe"),
        (lambda: DataLoader(SequenceWrapper([1])), TypeError, "the dataset is a DataPipe"),
    ],
)
def test_loader_that_has_no_position_to_keep_is_refused(make, error, part):
    """What cannot be resumed exactly is refused at construction, and the message says what to do."""
    with pytest.raises(error, match=part):
        ResumableLoader(make())


def test_shares_that_accelerate_makes_are_known():
    """Rank and world size are read from its batch samplers too, so augmentation differs between ranks."""

    class BatchSamplerShard:
        def __init__(self, rank):
            self.num_processes, self.process_index = 2, rank

        def __iter__(self):
            return iter([[0, 1], [2, 3]])

        def __len__(self):
            return 2

    def one(rank):
        return ResumableLoader(DataLoader(Augmented(), batch_sampler=BatchSamplerShard(rank), collate_fn=list), seed=0)

    assert one(1).state_dict()["inputs"]["world_size"] == 2
    assert list(one(0)) != list(one(1))
    assert list(one(1)) == list(one(1))


def test_loader_that_looks_ahead_takes_a_number():
    """What is no number of batches is an error at construction."""
    for ahead in (-1, True, 1.0, "1"):
        with pytest.raises(ValueError, match="ahead is a number of batches, 0 or more"):
            ResumableLoader(DataLoader([1]), ahead=ahead)
