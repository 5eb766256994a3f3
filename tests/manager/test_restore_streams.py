"""Random streams that are restored later than everything else, for a trainer that draws before its first batch."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safeckpt
from tests import children
from tests.manager.helpers import checkpoint_files, manager_of, save_steps
from tests.training import Marked, Run, streams


def draw() -> Any:
    return random.random(), np.random.rand(), torch.rand(()).item()


def train(path: Path, kill_at: int | None) -> tuple[int, list[float]]:
    """Train as a trainer that draws numbers between restoring and the first batch does; return the losses."""
    run = Run()
    with manager_of(path, run, save_every=2) as manager:
        if manager.restore(streams=False) is not None:
            draw()  # a sanity check, a look at a batch: what the run that saved did before its first step
            manager.restore_streams()
        first, losses = manager.step, []
        for step in range(first + 1, 9):
            losses.append(run.step())
            manager.end_step(step, loss=losses[-1])
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return first, losses


def test_killed_run_resumes_exactly(tmp_path: Path) -> None:
    """What is drawn between `restore` and `restore_streams` leaves no trace."""
    _, straight = children.run(train, tmp_path / "straight", None).value
    assert children.run(train, tmp_path / "killed", 5).signal == signal.SIGKILL
    assert children.run(train, tmp_path / "killed", None).value == (4, straight[4:])


def test_streams_stay_until_they_are_restored(tmp_path: Path) -> None:
    """`restore(streams=False)` sets everything but the streams; then they are those of the checkpoint, bit for bit."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.step()
        manager.save(1)
        saved = streams()
    fresh = Run(seed=5)
    draw()
    with manager_of(tmp_path, fresh) as manager:
        before = streams()
        checkpoint = manager.restore(streams=False)
        assert checkpoint is not None
        assert manager.step == 1
        assert streams() == before
        draw()
        manager.restore_streams()
        assert streams() == saved
        assert fresh.state["model"] == run.state["model"]


@pytest.mark.parametrize("call", ["save", "end_step", "end_step(save=False)"])
def test_nothing_is_saved_before(tmp_path: Path, call: str) -> None:
    """Without the streams a step is of another run: it neither ends nor is saved, and the error says what to call."""
    save_steps(tmp_path, 1)
    before = checkpoint_files(tmp_path)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.restore(streams=False)
        calls = {
            "save": lambda: manager.save(2),
            "end_step": lambda: manager.end_step(2),
            "end_step(save=False)": lambda: manager.end_step(2, save=False),
        }
        with pytest.raises(ValueError, match=r"manager\.restore_streams\(\) before the first step"):
            calls[call]()
        assert manager.step == 1
        assert checkpoint_files(tmp_path) == before
        manager.restore_streams()
        calls[call]()
        assert manager.step == 2


def test_leaving_the_block_without_the_streams_saves_nothing(tmp_path: Path) -> None:
    """No step has ended, so there is nothing to save and no error."""
    save_steps(tmp_path, 1)
    before = checkpoint_files(tmp_path)
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore(streams=False)
    assert checkpoint_files(tmp_path) == before


def test_streams_are_restored_once(tmp_path: Path) -> None:
    """Without a restore, behind one that found nothing, after a usual one and a second time it is an error."""
    wrong = pytest.raises(RuntimeError, match="there are no random streams to restore")
    with manager_of(tmp_path, Marked()) as manager:
        with wrong:
            manager.restore_streams()
        assert manager.restore(streams=False) is None
        with wrong:
            manager.restore_streams()
        manager.save(1)
        manager.restore()
        with wrong:
            manager.restore_streams()
        manager.restore(streams=False)
        manager.restore_streams()
        now = streams()
        draw()
        drawn = streams()
        with wrong:
            manager.restore_streams()
        assert streams() == drawn != now


@pytest.mark.parametrize("how", ["restore", "rollback", "async rollback"])
def test_going_back_sets_them_at_once(tmp_path: Path, how: str) -> None:
    """A later restore or rollback sets the streams itself, and nothing is left to be set."""
    run = Run()
    with manager_of(tmp_path, run, async_save=how == "async rollback") as manager:
        run.step()
        manager.save(1)
        manager.wait()
        saved = streams()
        manager.restore(streams=False)
        draw()
        manager.restore() if how == "restore" else manager.rollback(changed=True)
        assert streams() == saved
        with pytest.raises(RuntimeError, match="no random streams"):
            manager.restore_streams()
        manager.end_step(2, loss=run.step())


def test_restore_that_fails_leaves_them_waiting(tmp_path: Path) -> None:
    """A second restore that does not fit changes nothing: the streams of the first can still be set."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        saved = streams()
        manager.restore(streams=False)
        draw()
        with pytest.raises(safeckpt.CheckpointNotFoundError):
            manager.restore(7)
        manager.restore_streams()
        assert streams() == saved


def test_part_without_streams_leaves_nothing_to_set(tmp_path: Path) -> None:
    """`only=` names them or not: where it does not, there is nothing to be set later."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        saved = streams()
        manager.restore(only=("model",), streams=False)
        with pytest.raises(RuntimeError, match="no random streams"):
            manager.restore_streams()
        manager.restore(only=("model", "rng"), streams=False)
        draw()
        manager.restore_streams()
        assert streams() == saved


def test_closed_manager_and_wrong_argument(tmp_path: Path) -> None:
    """`streams` is a bool, and a closed manager sets nothing."""
    manager = manager_of(tmp_path, Marked())
    with pytest.raises(TypeError, match="streams must be True or False"):
        manager.restore(streams=None)  # type: ignore[arg-type]
    manager.close()
    with pytest.raises(ValueError, match="closed"):
        manager.restore_streams()
