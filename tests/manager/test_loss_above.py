"""`Guard(loss_above=...)`: a spike is refused as a loss that is not finite is, and decided alike after a restart."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests import children
from tests.manager.helpers import checkpoint_files, events_in, manager_of, steps_in
from tests.training import Marked, Run

RULE = safeckpt.TimesMedian(3, steps=5)


def guarded(path: Path, run: Any, rule: Any = RULE, **options: Any) -> safeckpt.CheckpointManager:
    return manager_of(path, run, guard=safeckpt.Guard(loss_above=rule), **options)


def test_spike_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """Step, loss, limit and median are in the error; the directory is as it was, and the next step works."""
    run = Marked()
    with guarded(tmp_path, run, save_every=2) as manager:
        for step in range(1, 7):
            run.step = step
            manager.end_step(step, loss=float(step))
        before = checkpoint_files(tmp_path)
        run.step = 7
        with pytest.raises(safeckpt.LossSpikeError, match=r"loss 12\.5 is above 12, 3 times the median 4") as caught:
            manager.end_step(7, loss=12.5)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.step, error.loss, error.limit, error.median) == (7, 12.5, 12.0, 4.0)
        assert "rollback" in str(error)
        assert isinstance(error, ValueError | safeckpt.SaveError)
        assert checkpoint_files(tmp_path) == before
        assert manager.step == 6
        (event,) = events_in(tmp_path, "refused")
        assert (event["step"], event["loss"], event["limit"], event["median"]) == (7, 12.5, 12.0, 4.0)
        manager.end_step(7, loss=12.0)
        assert manager.step == 7


def test_number_is_a_limit_from_the_first_step_on(tmp_path: Path) -> None:
    """Without a median."""
    with guarded(tmp_path, Marked(), 10.0) as manager:
        with pytest.raises(safeckpt.LossSpikeError, match=r"loss 10\.5 is above 10\.") as caught:
            manager.end_step(1, loss=torch.tensor(10.5))
        assert caught.value.median is None


def test_save_refuses_a_spike_as_well(tmp_path: Path) -> None:
    """The loss of a `save` that ends a step is judged; one of a step that has ended is not."""
    run = Marked()
    with guarded(tmp_path, run, safeckpt.TimesMedian(2, steps=2), keep_last=9) as manager:
        for step in (1, 2):
            run.step = step
            manager.save(step, loss=1.0)
        run.step = 3
        with pytest.raises(safeckpt.LossSpikeError):
            manager.save(3, loss=5.0)
        assert steps_in(tmp_path) == [1, 2]
        manager.end_step(3, loss=1.5)
        assert manager.save(3, loss=5.0).loss == 5.0  # the mean of an epoch, for one


def test_first_losses_are_not_judged(tmp_path: Path) -> None:
    """Until there are as many as the median is of."""
    with guarded(tmp_path, Marked()) as manager:
        for step in range(1, 6):
            manager.end_step(step, loss=10.0**step)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollback_takes_the_losses_back_too(tmp_path: Path, *, asynchronous: bool) -> None:
    """The run is where it was, its median included; the same spike is refused again."""
    run = Marked()
    with guarded(tmp_path, run, async_save=asynchronous) as manager:
        for step, loss in enumerate((1.0, 1.0, 1.0, 1.0, 1.0), start=1):
            run.step = step
            manager.end_step(step, loss=loss)
        manager.save(5)
        for step, loss in enumerate((3.0, 3.0, 3.0), start=6):
            run.step = step
            manager.end_step(step, loss=loss)
        run.step = 9
        with pytest.raises(safeckpt.LossSpikeError, match="the median 3 "):
            manager.end_step(9, loss=10.0)
        assert manager.rollback(changed=True).step == 5
        assert run.step == 5
        with pytest.raises(safeckpt.LossSpikeError, match="the median 1 "):
            manager.end_step(6, loss=3.5)


def test_failing_step_again_is_a_loop(tmp_path: Path) -> None:
    """A spike that comes again after a rollback that changed nothing is told, as NaN is."""
    run = Marked()
    with guarded(tmp_path, run, 2.0) as manager:
        run.step = 1
        manager.save(1, loss=1.0)
        for attempt in range(2):
            with pytest.raises(safeckpt.LossSpikeError):
                manager.end_step(2, loss=3.0)
            if attempt == 0:
                manager.rollback()
        with pytest.raises(safeckpt.RollbackLoopError):
            manager.rollback()


def test_rule_of_another_run_begins_anew(tmp_path: Path) -> None:
    """A checkpoint without losses is restored by a manager with the rule, and one with them by one without."""
    run = Marked()
    for rule, step in ((None, 1), (RULE, 2), (4.0, 3)):
        with guarded(tmp_path, run, rule) as manager:
            manager.restore()
            run.step = step
            manager.end_step(step, loss=1.0)


# -- a restart --------------------------------------------------------------------------------------------------------


def _refused(path: Path, last: int, die_at: int | None) -> list[int]:
    """Train to a step, and return the steps that are refused."""
    run = Run()
    found: list[int] = []
    with guarded(path, run, safeckpt.TimesMedian(1.2, steps=10), save_every=7) as manager:
        manager.restore()
        while manager.step < last:
            loss = run.step()
            try:
                manager.end_step(manager.step + 1, loss=loss)
            except safeckpt.LossSpikeError as error:
                found.append(error.step)
                manager.end_step(manager.step + 1)  # it is trained all the same
            if manager.step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_killed_run_refuses_what_the_uninterrupted_one_refuses(memory_path: Path) -> None:
    """The window is part of the checkpoint: from the one it goes on from, the same losses are refused."""
    straight = _refused(memory_path / "straight", 70, None)
    killed = memory_path / "killed"
    assert children.run(_refused, killed, 70, 27).signal is not None
    assert [step for step in straight if step > 21] == (resumed := _refused(killed, 70, None))
    assert len(resumed) > 1
