"""A step that ends before all that belongs to it has run: its checkpoint is owed, and saved at the next safe point."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt
from tests import children
from tests.faults import Fault, intercept
from tests.manager.helpers import checkpoint_files, events_in, manager_of, save_steps, steps_in
from tests.training import Marked, Run

EPOCHS, LENGTH = 3, 4

# -- a trainer that calls hooks --------------------------------------------------------------------------------------


class Trainer:
    """Calls `on_step_end` when a step is done, then validates and steps a schedule, both of which draw numbers."""

    def __init__(self) -> None:
        run = Run()
        self.model, self.optimizer, self.scheduler = run.model, run.optimizer, run.scheduler
        data = torch.randn(8 * LENGTH, 8, generator=torch.Generator().manual_seed(2))
        self.loader = safeckpt.ResumableLoader(DataLoader(data.tolist(), batch_size=8, shuffle=True, collate_fn=list))
        self.components = {**run.components, "loader": self.loader}
        self.losses: list[float] = []

    def fit(self, on_step_end: Callable[[float], Any], when_safe: Callable[[float], Any]) -> None:
        for _ in self.loader.epochs(EPOCHS):
            validated = 0.0
            for batch in self.loader:
                x = torch.tensor(batch)
                loss = torch.nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                on_step_end(loss.item())
                self.scheduler.step()
                validated = torch.rand(()).item()
                if self.loader.batch < LENGTH:
                    when_safe(validated)
            self.model(torch.rand(4, 8))  # what is done at the end of an epoch moves the statistics of the batch norm
            when_safe(validated)


def train(path: Path, every: int, kill_at: int | None) -> tuple[int, list[float]]:
    """Train, or die behind the end of a step, and return the first step and the losses from there."""
    trainer = Trainer()
    with manager_of(path, trainer, save_every=every) as manager:
        manager.restore()
        first = manager.step

        def end(loss: float) -> None:
            manager.end_step(manager.step + 1, loss=loss, save=False)
            if manager.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.fit(end, lambda validated: manager.save_due(metrics={"val": validated}))
        report = manager.replay
        assert report is None or report.mismatch is None
    return first, trainer.losses


@pytest.mark.parametrize(
    ("every", "kill_at", "at"),
    [(1, 6, 5), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 8, 6), (4, 9, 8), (4, 5, 4)))],
)
def test_killed_run_resumes_exactly(tmp_path: Path, every: int, kill_at: int, at: int) -> None:
    """Inside an epoch and at its border: validation, schedule and the end of the epoch are in the checkpoint."""
    straight = children.run(train, tmp_path / "straight", 1, None).value
    assert children.run(train, tmp_path / "killed", every, kill_at).signal == signal.SIGKILL
    first, losses = children.run(train, tmp_path / "killed", every, None).value
    assert first == at
    assert losses == straight[1][at:]
    newest = safeckpt.latest(tmp_path / "killed")
    assert newest is not None
    assert "val" in newest.metrics


# -- debts -----------------------------------------------------------------------------------------------------------


def end(manager: safeckpt.CheckpointManager, run: Marked, step: int, **options: Any) -> Any:
    run.step = step
    return manager.end_step(step, loss=1 / step, save=False, **options)


def test_checkpoint_that_is_due_is_owed_and_then_saved(tmp_path: Path) -> None:
    """It holds the step, its loss and all metrics; what is not due is not owed."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=2) as manager:
        assert not manager.is_due
        assert manager.save_due() is None
        assert end(manager, run, 1) is None
        assert not manager.is_due
        assert manager.save_due() is None
        assert end(manager, run, 2, metrics={"train": 0.5}) is None
        assert manager.is_due
        assert checkpoint_files(tmp_path) == {}
        assert manager.step == 2
        saved = manager.save_due(metrics={"val": 0.25})
        assert saved is not None
        assert (saved.step, saved.loss, saved.metrics) == (2, 0.5, {"train": 0.5, "val": 0.25})
        assert not manager.is_due
        assert manager.save_due() is None
        assert end(manager, run, 3) is None
        assert not manager.is_due
    assert steps_in(tmp_path) == [2, 3]  # the last step, when the block is left


def test_state_is_that_of_the_safe_point(tmp_path: Path) -> None:
    """What changes between the end of the step and `save_due` is in the checkpoint."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1) as manager:
        run.step = 1
        manager.end_step(1, save=False)
        run.counters["step"] = 7
        run.weight.value.fill_(7.0)
        manager.save_due()
    again = Marked()
    with manager_of(tmp_path, again) as manager:
        manager.restore()
    assert (again.step, manager.step) == (7, 1)


@pytest.mark.parametrize("save", [True, False])
def test_next_step_with_a_debt_is_refused(tmp_path: Path, save: bool) -> None:
    """A loop that never calls `save_due` learns of it at the first step after the debt, and can still pay."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=2) as manager:
        end(manager, run, 1)
        end(manager, run, 2)
        with pytest.raises(RuntimeError, match=r"checkpoint of step 2 was due.*manager\.save_due\(\)"):
            manager.end_step(3, save=save)
        assert manager.step == 2
        assert checkpoint_files(tmp_path) == {}
        assert manager.save_due() is not None
        assert end(manager, run, 3) is None


def test_save_of_the_step_pays(tmp_path: Path) -> None:
    """After `save` nothing is owed."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1) as manager:
        end(manager, run, 1)
        manager.save(1)
        assert not manager.is_due
        assert manager.save_due() is None
        end(manager, run, 2)


@pytest.mark.parametrize("save_on_exit", [True, False])
def test_leaving_the_block_pays(tmp_path: Path, save_on_exit: bool) -> None:
    """What was due is on disk in the end, also where the last step is not saved otherwise."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1, save_on_exit=save_on_exit) as manager:
        end(manager, run, 1, metrics={"accuracy": 0.5})
    newest = safeckpt.latest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.loss, newest.metrics) == (1, 1.0, {"accuracy": 0.5})


def test_restore_and_rollback_forget_the_debt(tmp_path: Path) -> None:
    """What was owed belongs to a step that the run has gone back behind."""
    save_steps(tmp_path, 1)
    for go_back in ("restore", "rollback"):
        run = Marked()
        with manager_of(tmp_path, run, save_every=1) as manager:
            manager.restore()
            end(manager, run, 2)
            assert manager.is_due
            manager.restore() if go_back == "restore" else manager.rollback(changed=True)
            assert not manager.is_due
            assert manager.step == run.step == 1


def test_asynchronous_save_pays(tmp_path: Path) -> None:
    """With a thread that writes, the debt is paid when the state is copied."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1, async_save=True) as manager:
        for step in (1, 2, 3):
            end(manager, run, step)
            saved = manager.save_due()
            assert saved is not None
            assert saved.step == step
    assert steps_in(tmp_path) == [1, 2, 3]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_loss_is_guarded_at_once(tmp_path: Path) -> None:
    """The step of a loss that is NaN does not end, and nothing is owed for it."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1) as manager:
        end(manager, run, 1)
        manager.save_due()
        with pytest.raises(safeckpt.NonFiniteError):
            manager.end_step(2, loss=float("nan"), save=False)
        assert not manager.is_due
        assert manager.step == 1
        assert [event["step"] for event in events_in(tmp_path, "refused")] == [2]


def test_loss_is_compared_with_the_record_at_once(tmp_path: Path) -> None:
    """A loss that differs from the recorded one is found when its step ends, not when it is saved."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        end(manager, run, 2)
        manager.close()
    with manager_of(tmp_path, run, save_every=1, on_replay_mismatch="error") as manager:
        manager.restore()
        with pytest.raises(safeckpt.ReplayMismatchError):
            manager.end_step(2, loss=0.75, save=False)


def test_weights_are_guarded_when_they_are_saved(tmp_path: Path) -> None:
    """A NaN that came since the step ended is refused, a rollback goes on, and so does the next step."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1) as manager:
        end(manager, run, 1)
        manager.save_due()
        for go_on in ("rollback", "step"):
            step = manager.step + 1
            end(manager, run, step)
            run.weight.value[0] = float("nan")
            with pytest.raises(safeckpt.NonFiniteError):
                manager.save_due()
            assert steps_in(tmp_path) == [1]
            if go_on == "rollback":
                manager.rollback(changed=True)
                assert run.step == 1
        end(manager, run, 3)
        manager.save_due()
    assert steps_in(tmp_path) == [1, 3]


def test_step_that_was_refused_is_not_saved_at_the_end(tmp_path: Path) -> None:
    """Leaving the block says so, and writes nothing."""
    run = Marked()
    manager = manager_of(tmp_path, run, save_every=1, save_on_exit=False)
    end(manager, run, 1)
    run.weight.value[0] = float("nan")
    with pytest.raises(safeckpt.NonFiniteError):
        manager.save_due()
    with pytest.warns(safeckpt.SafeckptWarning, match="Step 1 is not saved at the end of the run: it was refused"):
        manager.__exit__(None, None, None)
    assert checkpoint_files(tmp_path) == {}


def test_full_disk_leaves_the_debt_and_lets_the_run_go_on(tmp_path: Path) -> None:
    """The system's error is raised; a second call tries again; the next step may end, and is due."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=5) as manager:
        for step in range(1, 6):
            end(manager, run, step)
        for _ in range(2):
            with intercept(Fault(1, errno.ENOSPC, {"sync"})), pytest.raises(OSError, match="No space"):
                manager.save_due()
            assert checkpoint_files(tmp_path) == {}
            assert manager.is_due
        end(manager, run, 6)
        assert manager.is_due
        assert manager.save_due() is not None
        end(manager, run, 7)
        assert not manager.is_due
        manager.save_due()
        assert steps_in(tmp_path) == [6]


def test_weights_of_a_later_step_are_not_saved(tmp_path: Path) -> None:
    """An optimizer step behind `end_step` makes the checkpoint of that step impossible; the error says what to do."""
    run = Run()
    with manager_of(tmp_path, run, save_every=1, save_on_exit=False) as manager:
        manager.end_step(1, loss=run.step(), save=False)
        run.step()
        with pytest.raises(RuntimeError, match=r"step 1 can be saved no more.*before the next optimizer\.step"):
            manager.save_due()
        assert checkpoint_files(tmp_path) == {}
        manager.save(2)
        assert not manager.is_due
    assert steps_in(tmp_path) == [2]


def test_first_step_finds_what_would_fail(tmp_path: Path) -> None:
    """A value that cannot be saved is found when the first step ends, though nothing is saved then."""
    run = Marked()
    run.counters["f"] = lambda: None  # type: ignore[assignment]
    with manager_of(tmp_path, run, save_every=1) as manager, pytest.raises(safeckpt.UnsavableStateError):
        manager.end_step(1, save=False)


def test_arguments(tmp_path: Path) -> None:
    """`save` is a bool, metrics are numbers, and a closed manager saves nothing."""
    manager = manager_of(tmp_path, Marked())
    with pytest.raises(TypeError, match="save must be"):
        manager.end_step(1, save=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metrics"):
        manager.save_due(metrics=[1])  # type: ignore[arg-type]
    manager.close()
    with pytest.raises(ValueError, match="closed"):
        manager.save_due()


# -- stop signals ----------------------------------------------------------------------------------------------------


def test_stop_signal_makes_a_checkpoint_due(tmp_path: Path) -> None:
    """Before the end of the step it is owed from there; after it, `save_due` saves the step that has ended."""
    run = Marked()
    with manager_of(tmp_path, run, stop_signals=(signal.SIGUSR1,), keep_last=9) as manager:
        end(manager, run, 1)
        assert manager.save_due() is None
        signal.raise_signal(signal.SIGUSR1)
        assert manager.is_due
        saved = manager.save_due()
        assert saved is not None
        assert saved.step == 1
        assert not manager.is_due
        end(manager, run, 2)
        assert manager.is_due
        assert manager.save_due() is not None
    assert steps_in(tmp_path) == [1, 2]


def test_stop_signal_behind_the_safe_point_is_no_debt(tmp_path: Path) -> None:
    """A signal that comes before the next batch does not make the next `end_step` an error."""
    run = Marked()
    with manager_of(tmp_path, run, stop_signals=(signal.SIGUSR1,)) as manager:
        end(manager, run, 1)
        manager.save_due()
        signal.raise_signal(signal.SIGUSR1)
        end(manager, run, 2)
        assert manager.is_due


def test_stop_signal_without_a_step_saves_nothing(tmp_path: Path) -> None:
    """There is no step to save."""
    with manager_of(tmp_path, Marked(), stop_signals=(signal.SIGUSR1,)) as manager:
        signal.raise_signal(signal.SIGUSR1)
        assert not manager.is_due
        assert manager.save_due() is None
