"""Random numbers that are drawn behind the end of a saved step are told once, and nothing else is."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt
from tests.training import endless


def _components() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(12, 4)), batch_size=2, shuffle=True), seed=0)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}


def _train(parts: dict[str, Any], batch: list[torch.Tensor]) -> None:
    loss = parts["model"](batch[0]).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()
    parts["optimizer"].step()


def _nothing() -> None:
    pass


def _generator(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:  # as progress bars do
        yield 0, batch


def _told(path: Path, draw: Callable[[], object], **options: Any) -> list[str]:
    """Train two epochs with a body that draws behind `end_step`, and return the texts of the warnings."""
    parts = _components()
    manager = safeckpt.CheckpointManager(path, parts, **{"save_every": 2, **options})
    with manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in parts["loader"].epochs(2):
            for batch in parts["loader"]:
                _train(parts, batch)
                manager.end_step(manager.step + 1)
                draw()
    assert all(warning.filename == __file__ for warning in caught)
    assert all(warning.category is safeckpt.UncapturedStateWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("draw", "streams"),
    [
        (lambda: torch.randn(3), "torch"),
        (np.random.rand, "numpy"),
        (random.random, "python"),
        (lambda: (random.random(), torch.rand(1)), "python, torch"),
        (lambda: list(DataLoader([1, 2])), "torch"),  # which draws the seed of its workers, and has none
    ],
)
def test_draw_behind_the_end_of_a_saved_step_is_told_once(
    tmp_path: Path, draw: Callable[[], object], streams: str
) -> None:
    """The warning names the streams and the step, points at the loop, and comes once for a manager."""
    (text,) = _told(tmp_path, draw)
    assert text == (
        f"end_step was not the last statement of the body: random numbers were drawn after it ({streams}). A resume "
        "from step 2 does not draw them again, so it is another run. Move what draws them, such as validation or "
        "sampling, before end_step."
    )


def _zipped(loader: Iterable[Any]) -> Iterator[Any]:
    return zip(range(99), loader, strict=False)


@pytest.mark.parametrize("wrap", [enumerate, _generator, _zipped, endless, safeckpt.ResumableLoader.enumerate])
def test_draw_is_seen_through_what_wraps_the_loader(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    """Progress bars, `enumerate` and the like stand between the loop and the loader, and do not hide the draw."""
    parts = _components()
    manager = safeckpt.CheckpointManager(tmp_path, parts, save_every=2)
    with manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for item in wrap(parts["loader"]):
            _train(parts, item if isinstance(item, list) else item[1])
            manager.end_step(manager.step + 1)
            torch.randn(3)
            if manager.step == 5:
                break
    assert len(caught) == 1


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"save_every": None}])
def test_draws_of_the_steps_themselves_are_not_told(tmp_path: Path, options: dict[str, Any]) -> None:
    """Dropout draws in every forward pass, behind the next batch; that is part of the next step."""
    assert _told(tmp_path, _nothing, **options) == []


def test_draws_between_two_epochs_are_not_told(tmp_path: Path) -> None:
    """What stands behind the inner loop is run again by a resume, and draws again."""
    parts = _components()
    with safeckpt.CheckpointManager(tmp_path, parts, save_every=1) as manager:
        for _ in parts["loader"].epochs(2):
            for batch in parts["loader"]:
                _train(parts, batch)
                manager.end_step(manager.step + 1)
            torch.randn(3)


@pytest.mark.parametrize("wrap", [iter, endless])
def test_draws_before_a_batch_that_is_fetched_by_hand_are_not_told(
    tmp_path: Path, wrap: Callable[[Any], Iterator[Any]]
) -> None:
    """Code before `next(batches)` belongs to the step that begins: a resume runs it again."""
    parts = _components()
    with safeckpt.CheckpointManager(tmp_path, parts, save_every=1) as manager:
        batches = wrap(parts["loader"])
        for step in range(1, 6):
            torch.randn(3)
            _train(parts, next(batches))
            manager.end_step(step)


def test_draw_in_a_loop_that_was_left_is_not_told(tmp_path: Path) -> None:
    """After a `break` a resume goes on behind the loop as well."""
    parts = _components()
    with safeckpt.CheckpointManager(tmp_path, parts, save_every=1) as manager:
        for _ in parts["loader"].epochs(2):
            for index, batch in enumerate(parts["loader"]):
                _train(parts, batch)
                manager.end_step(manager.step + 1)
                if index == 1:
                    break
            torch.randn(3)


def test_draw_before_a_restore_is_not_told(tmp_path: Path) -> None:
    """A restore in the body puts the streams back, and the loop goes on from there."""
    parts = _components()
    with safeckpt.CheckpointManager(tmp_path, parts, save_every=1) as manager:
        restored = False
        for batch in parts["loader"]:
            _train(parts, batch)
            manager.end_step(manager.step + 1)
            if not restored:
                restored = True
                torch.randn(3)
                manager.restore()
    assert parts["loader"].epoch == 1


def test_step_after_a_draw_can_be_resumed_exactly_once_it_is_moved(tmp_path: Path) -> None:
    """With the draw before `end_step`, as the warning says, the resumed run has the uninterrupted one's weights."""

    def run(path: Path, stop: int | None) -> torch.Tensor:
        parts = _components()
        manager = safeckpt.CheckpointManager(path, parts, save_every=2, save_on_exit=False)
        with manager:
            manager.restore()
            for _ in parts["loader"].epochs(1):
                for batch in parts["loader"]:
                    _train(parts, [batch[0] + torch.randn(2, 4)])
                    torch.randn(3)
                    manager.end_step(manager.step + 1)
                    if manager.step == stop:
                        return parts["model"][0].weight.detach()
        return parts["model"][0].weight.detach()

    run(tmp_path / "cut", 4)
    assert torch.equal(run(tmp_path / "cut", None), run(tmp_path / "whole", None))
