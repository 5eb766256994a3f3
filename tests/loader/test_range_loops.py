"""`for epoch in range(n)` around a loader that was restored trains too much, and is named; other loops are not."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import safeckpt

Loop = Callable[[safeckpt.ResumableLoader], None]
ARGS = SimpleNamespace(epochs=4)


def restored(epoch: int, batch: int = 0) -> safeckpt.ResumableLoader:
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=4))
    loader.seek(epoch, batch)
    again = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=4))
    again.load_state_dict(loader.state_dict())
    return again


def said(loop: Loop, loader: safeckpt.ResumableLoader) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        loop(loader)
    return [str(one.message) for one in given]


def from_zero(loader: safeckpt.ResumableLoader) -> None:
    for _epoch in range(4):
        for _ in loader:
            pass


def from_one(loader: safeckpt.ResumableLoader) -> None:
    for _epoch in range(1, ARGS.epochs + 1):
        for _ in enumerate(loader):
            pass


def in_functions(loader: safeckpt.ResumableLoader) -> None:
    def train(epoch: int) -> None:
        for _ in loader.enumerate():
            pass

    for epoch in range(ARGS.epochs):
        train(epoch)


@pytest.mark.parametrize(
    ("loop", "head"),
    [
        (from_zero, "for _epoch in range(4):"),
        (from_one, "for _epoch in range(1, ARGS.epochs + 1):"),
        (in_functions, "for epoch in range(ARGS.epochs):"),
    ],
)
@pytest.mark.parametrize("place", [(1, 0), (2, 1), (4, 0)])
def test_range_that_begins_anew_is_named_once(loop: Loop, head: str, place: tuple[int, int]) -> None:
    """The warning has the head of the loop, and the line to write."""
    (text,) = said(loop, restored(*place))
    assert head in text
    assert f"restored to epoch {place[0]}" in text
    assert "for epoch in loader.epochs(n)" in text


def test_loop_of_a_module_that_is_run_by_name_is_named(tmp_path: Path) -> None:
    """`python -m` puts frames of the interpreter's own around the loop, which have no source and hold no epochs."""
    path = tmp_path / "train.py"
    path.write_text("for epoch in range(4):\n    for _ in loader:\n        pass\n")
    (text,) = said(lambda loader: runpy.run_path(str(path), {"loader": loader}), restored(1))
    assert "for epoch in range(4):" in text


def by_epochs(loader: safeckpt.ResumableLoader) -> None:
    for _ in loader.epochs(4):
        for _ in loader:
            pass


def folds(loader: safeckpt.ResumableLoader) -> None:
    for _fold in range(2):
        for _ in loader.epochs(4):
            for _ in loader:
                pass


def from_the_position(loader: safeckpt.ResumableLoader) -> None:
    for _ in range(loader.epoch, 4):
        for _ in loader:
            pass


def what_is_left(loader: safeckpt.ResumableLoader) -> None:
    for _ in range(4 - loader.epoch):
        for _ in loader:
            pass


def passed_over(loader: safeckpt.ResumableLoader) -> None:
    for epoch in range(4):
        if epoch < loader.epoch:
            continue
        for _ in loader:
            pass


def by_steps(loader: safeckpt.ResumableLoader) -> None:
    def endless() -> object:
        while True:
            yield from loader

    batches = endless()
    for _ in range(20):
        next(batches)  # type: ignore[call-overload]


def with_next(loader: safeckpt.ResumableLoader) -> None:
    batches = iter(loader)
    for _ in range(20):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)


def passes_of_an_update(loader: safeckpt.ResumableLoader) -> None:
    updates = 0
    while updates < 3:
        for _ in range(2):
            for _ in loader:
                pass
        updates += 1


@pytest.mark.parametrize(
    "loop", [by_epochs, folds, from_the_position, what_is_left, passed_over, by_steps, with_next, passes_of_an_update]
)
@pytest.mark.parametrize("place", [(0, 0), (0, 2), (1, 0), (2, 1), (3, 3)])
def test_loops_that_count_on_are_not_named(loop: Loop, place: tuple[int, int]) -> None:
    """Neither are those of which nobody can say what they count."""
    assert said(loop, restored(*place)) == []


@pytest.mark.parametrize("loop", [from_zero, from_one, in_functions])
@pytest.mark.parametrize("place", [(0, 0), (0, 2)])
def test_range_is_right_in_the_first_epoch(loop: Loop, place: tuple[int, int]) -> None:
    """There the loop has as many epochs as the run."""
    assert said(loop, restored(*place)) == []


def test_code_without_source_is_not_judged() -> None:
    """What `exec` runs has no lines to look at."""
    namespace: dict[str, Loop] = {}
    exec("def loop(loader):\n  for epoch in range(4):\n    for x in loader: pass\n", namespace)
    assert said(namespace["loop"], restored(2)) == []


@pytest.mark.parametrize(("code", "count"), [("run()", 1), ("for fold in range(1): run()", 0)])
def test_caller_without_source_is_in_the_way_if_it_has_a_loop(code: str, count: int) -> None:
    """`python -c "main()"`, and whatever else is executed around a script, counts no epochs without a loop."""
    assert len(said(lambda loader: exec(code, {"run": lambda: from_zero(loader)}), restored(2))) == count
