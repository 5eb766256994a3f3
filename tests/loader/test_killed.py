"""Processes really killed in the middle of an epoch, and resumed by fresh ones with other numbers of workers."""

from __future__ import annotations

import functools
import itertools
import json
import signal

import pytest
import torch

from safeckpt.state.random_streams import RngStreams
from tests import children
from tests.loader.runner import POSITIONS, main
from tests.loader.workloads import ORDERS, Augmented, dataloader

FEW = ("shuffle", "replacement, own generator", "custom batches")


def start(mode, folder, workers, cases, persistent=False):
    ended = children.run(main, mode, folder, workers, list(cases), persistent)
    if ended.error is not None:
        raise ended.error
    return ended.signal


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What every case sees in a run that is never interrupted and has no workers."""
    folder = tmp_path_factory.mktemp("straight")
    assert start("straight", folder, 0, [(order, "") for order in ORDERS]) is None
    return (folder / "straight.json").read_text()


@pytest.mark.parametrize(
    ("before", "after", "persistent", "orders"),
    [
        pytest.param(0, 0, False, ORDERS, id="0 to 0 workers"),
        pytest.param(4, 1, False, FEW, id="4 to 1 workers", marks=pytest.mark.slow),
        pytest.param(1, 4, True, FEW, id="1 to 4 persistent workers", marks=pytest.mark.slow),
        pytest.param(4, 0, True, FEW[:1], id="4 persistent to 0 workers", marks=pytest.mark.slow),
    ],
)
def test_killed_run_sees_the_batches_and_losses_of_the_uninterrupted_one(  # noqa: PLR0917 - pytest passes them by name
    before, after, persistent, orders, straight, tmp_path
):
    """First, middle, last batch and epoch border, each kind of sampler: lists of batches and losses are equal."""
    (tmp_path / "straight.json").write_text(straight)
    cases = list(itertools.product(orders, POSITIONS))
    assert start("killed", tmp_path, before, cases, persistent) == signal.SIGKILL
    assert len(list(tmp_path.glob("*.pt"))) == len(cases)
    assert start("resumed", tmp_path, after, cases, persistent) is None
    resumed = json.loads((tmp_path / "resumed.json").read_text())
    expected = {order: result["seen"] for order, result in json.loads(straight).items()}
    wrong = [case for case in resumed if resumed[case] != expected[case.split(".")[0]]]
    assert len(resumed) == len(cases)
    assert wrong == []


def bare_resume(make_before, make_after, position):
    """Resume as scripts do: all streams restored as they were saved, batches skipped. Return (expected, resumed)."""
    torch.manual_seed(0)
    iterator = iter(make_before())
    for _ in range(position):
        next(iterator)
    saved = RngStreams.capture()
    expected = list(iterator)
    RngStreams.apply(saved)
    return expected, list(itertools.islice(make_after(), position, None))


def column(batches, name):
    number = Augmented.COLUMNS.index(name)
    return [row[number] for batch in batches for row in batch]


@pytest.mark.parametrize("order", [order for order in ORDERS if order not in ("sequential", "list", "distributed")])
def test_without_the_wrapper_the_order_is_another_one(order):
    """A bare DataLoader that skips to its position draws a new order: each random sampler fails without us."""
    make = functools.partial(dataloader, order)
    if "own generator" in order or "stateful" in order:
        kept = make()  # its sampler goes on where it is, as an object that was restored by itself would
        expected, resumed = bare_resume(lambda: kept, lambda: kept, 2)
    else:
        expected, resumed = bare_resume(make, make, 2)
    assert column(expected, "index") != column(resumed, "index")


@pytest.mark.parametrize("name", Augmented.COLUMNS[1:])
@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 0), (2, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (2, 2), (1, 4)))],
)
def test_without_the_wrapper_the_augmentation_is_another_one(name, before, after):
    """With a sequential order, where batches agree, every stream of the augmentation differs after the resume."""
    if name == "private numpy" and before == after:
        pytest.skip("skipping by fetching moves a dataset's own generator as before, as long as the workers agree")
    expected, resumed = bare_resume(
        functools.partial(dataloader, "sequential", before), functools.partial(dataloader, "sequential", after), 2
    )
    assert column(expected, "index") == column(resumed, "index")
    assert column(expected, name) != column(resumed, name)
