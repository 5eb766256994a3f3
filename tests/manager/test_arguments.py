"""Nonsense is refused at once, with the values that are allowed, and leaves nothing behind."""

from __future__ import annotations

import datetime as dt
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import safeckpt
from safeckpt import Best, CheckpointManager, Guard
from tests.faults import contents
from tests.manager.helpers import checkpoint_files
from tests.training import Marked

NONSENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep_last": 0}, ValueError, "keep_last must be an int, 1 or more"),
    ({"keep_last": -3}, ValueError, "keep_last must be an int, 1 or more"),
    ({"keep_last": None}, TypeError, "keep_last must be an int"),
    ({"keep_last": 2.0}, TypeError, "keep_last must be an int"),
    ({"keep_last": True}, TypeError, "keep_last must be an int"),
    ({"keep_every": 0}, ValueError, "keep_every must be an int, 1 or more"),
    ({"keep_every": "10"}, TypeError, "keep_every must be an int"),
    ({"keep_best": "loss"}, TypeError, r"keep_best takes a Best.*got 'loss'"),
    ({"keep_best": 3}, TypeError, "keep_best takes a Best"),
    ({"keep_best": [Best("a"), "b"]}, TypeError, "keep_best takes a Best"),
    ({"save_every": 0}, ValueError, "save_every must be positive"),
    ({"save_every": -1}, ValueError, "save_every must be positive"),
    ({"save_every": dt.timedelta(0)}, ValueError, "save_every must be positive"),
    ({"save_every": dt.timedelta(seconds=-1)}, ValueError, "save_every must be positive"),
    ({"save_every": 2.5}, TypeError, "save_every must be a number of steps, a timedelta or None"),
    ({"save_every": True}, TypeError, "save_every must be a number of steps, a timedelta or None"),
    ({"save_every": "10 steps"}, TypeError, "save_every must be a number of steps, a timedelta or None"),
    ({"guard": None}, TypeError, "guard must be a Guard"),
    ({"guard": True}, TypeError, "guard must be a Guard"),
    ({"on_saved": "print"}, TypeError, "on_saved must be callable"),
    ({"lock_timeout_seconds": -1}, ValueError, "timeout_seconds must be a number, 0 or more"),
    ({"lock_timeout_seconds": math.nan}, ValueError, "timeout_seconds must be a number, 0 or more"),
    ({"lock_timeout_seconds": "10"}, TypeError, "timeout_seconds must be a number"),
    ({"lock_timeout_seconds": None}, TypeError, "timeout_seconds must be a number"),
    ({"on_replay_mismatch": "raise"}, ValueError, "on_replay_mismatch must be one of 'warn', 'error', 'ignore'"),
    ({"async_save": 1}, TypeError, 'async_save must be True, False or "process"'),
]


@pytest.mark.parametrize(("options", "error", "text"), NONSENSE, ids=[str(row[0]) for row in NONSENSE])
def test_option_that_is_nonsense_is_refused(tmp_path: Path, options: Any, error: type[Exception], text: str) -> None:
    """An option out of range or of another type is refused when the manager is built, with what is allowed."""
    with pytest.raises(error, match=text):
        CheckpointManager(tmp_path / "run", Marked().components, **options)
    assert contents(tmp_path) == {}
    CheckpointManager(tmp_path / "run", Marked().components).close()


model = nn.Linear(1, 1).requires_grad_(requires_grad=False)
COMPONENTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "components must be a mapping"),
    (model, TypeError, "components must be a mapping"),
    ([model], TypeError, "components must be a mapping"),
    ({}, ValueError, "components is empty"),
    ({3: model}, TypeError, "component names must be strings"),
    ({"": model}, ValueError, "cannot name a component"),
    ({"a.b": model}, ValueError, "cannot name a component"),
    ({"safeckpt": model}, ValueError, "none of safeckpt, rng"),
    ({"rng": model}, ValueError, "none of safeckpt, rng"),
    ({"a": model, "b": model}, ValueError, "same object"),
    ({"model": model, "lr": 0.1}, TypeError, "'lr' is a float"),
    ({"model": model, "none": None}, TypeError, "'none' is a NoneType"),
    ({"model": model.state_dict}, TypeError, "has no state that can be captured"),
    ({"loader": DataLoader([1, 2])}, TypeError, r"safeckpt\.ResumableLoader"),
    ({"random": random}, TypeError, "always captured"),
    ({"random": np.random}, TypeError, "'random'"),
    ({"list": [1, 2]}, TypeError, "'list' is a list"),
]


@pytest.mark.parametrize(("components", "error", "text"), COMPONENTS, ids=[row[2] for row in COMPONENTS])
def test_component_that_cannot_be_captured_is_refused(
    tmp_path: Path, components: Any, error: type[Exception], text: str
) -> None:
    """What has no state, no name or a reserved one is refused when the manager is built, with the kinds accepted."""
    with pytest.raises(error, match=text):
        CheckpointManager(tmp_path, components)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, torch.tensor(1), [1], np.bool_(1), np.float64(1)])
def test_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    """A step is an int from 0: save, end_step and restore refuse anything else alike."""
    run = Marked()
    with CheckpointManager(tmp_path, run.components) as manager:
        calls: list[Any] = [manager.save, manager.end_step]
        if step is not None:
            calls.append(manager.restore)
        for call in calls:
            with pytest.raises(ValueError if step == -1 else TypeError, match="step must be an int, 0 or more"):
                call(step)
        assert manager.step == 0
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("loss", ["0.5", object(), {1}])
def test_loss_that_is_none_is_refused(tmp_path: Path, loss: Any) -> None:
    """What is no number and holds none is a TypeError with the kinds accepted."""
    with CheckpointManager(tmp_path, Marked().components) as manager:
        for call in (manager.save, manager.end_step):
            with pytest.raises(TypeError, match="loss must be a number, a tensor"):
                call(1, loss=loss)
    assert contents(tmp_path) == {}


def test_loss_too_large_for_the_header_is_refused(tmp_path: Path) -> None:
    """A loss per sample of a whole data set is no loss of a step: it is refused, and no checkpoint is written."""
    with CheckpointManager(tmp_path, Marked().components) as manager:
        with pytest.raises(ValueError, match="header"):
            manager.save(1, loss=torch.zeros(400_000))
        assert checkpoint_files(tmp_path) == {}
        assert manager.save(1, loss=torch.zeros(100)).loss == [0.0] * 100


@pytest.mark.parametrize("directory", [None, 3, b"runs", ["runs"]])
def test_directory_that_is_none_is_refused(directory: Any) -> None:
    """A directory is a str or PathLike."""
    with pytest.raises(TypeError):
        CheckpointManager(directory, Marked().components)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("",), ValueError),
        ((3,), TypeError),
        (("a", "minimum"), ValueError),
        (("a", "min", 0), ValueError),
        (("a", "min", 1.0), TypeError),
    ],
)
def test_best_that_is_nonsense_is_refused(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    """A metric has a name, a direction and a count."""
    with pytest.raises(error):
        Best(*arguments)


@pytest.mark.parametrize("patterns", ["model.mask", 3, [3], None])
def test_guard_that_is_nonsense_is_refused(patterns: Any) -> None:
    """Patterns are a sequence of strings; a lone string would be one pattern for each letter."""
    with pytest.raises(TypeError, match="allow_nonfinite takes a sequence"):
        Guard(allow_nonfinite=patterns)


def test_untrained_parameters_are_a_warning(tmp_path: Path) -> None:
    """A model whose optimizer is not registered is a silent wrong resume: the first save names the parameters."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with CheckpointManager(tmp_path, {"model": net}) as manager:
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        with pytest.warns(safeckpt.UncapturedStateWarning, match=r"model\.weight"):
            manager.save(1)


def test_refused_manager_leaves_no_hook(tmp_path: Path) -> None:
    """A manager that was refused has left the optimizer and the signal handlers alone."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = dict(optimizer.__dict__["_optimizer_step_post_hooks"])
    for options in ({"stop_signals": [9999]}, {"lock_timeout_seconds": -1}, {"on_replay_mismatch": "x"}):
        with pytest.raises(ValueError):
            CheckpointManager(tmp_path, {"model": net, "optimizer": optimizer}, **options)
        assert dict(optimizer.__dict__["_optimizer_step_post_hooks"]) == before
