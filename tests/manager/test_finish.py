"""The end of a run, the first step of one, and a step that is saved twice."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.run.capturing import Capturer
from safeckpt.store import WriterLock
from tests.faults import Fault, intercept
from tests.manager.helpers import Marked, checkpoint_files, contents, manager_of, save_steps, steps_in


def test_leaving_the_block_saves_the_last_step(tmp_path: Path) -> None:
    """The steps after the last save are not lost when the script ends, with their loss and metrics."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=5) as manager:
        for step in range(1, 8):
            run.step = step
            manager.end_step(step, loss=1 / step, metrics={"accuracy": step / 10})
    newest = safeckpt.latest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.loss, newest.metrics) == (7, 1 / 7, {"accuracy": 0.7})
    again = Marked()
    with manager_of(tmp_path, again) as manager:
        manager.restore()
    assert again.step == 7


def test_leaving_the_block_saves_once(tmp_path: Path) -> None:
    """A step that is saved already, by end_step or by save, is not written again."""
    with manager_of(tmp_path, Marked(), save_every=2) as manager:
        manager.end_step(1)
        manager.end_step(2)
        before = checkpoint_files(tmp_path)
    assert checkpoint_files(tmp_path) == before
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore()
        manager.end_step(3)
        manager.save(3)
        before = checkpoint_files(tmp_path)
    assert checkpoint_files(tmp_path) == before


def test_leaving_the_block_waits_for_an_asynchronous_save(tmp_path: Path) -> None:
    """The last step is on disk when the block is left, also where a thread writes it."""
    with manager_of(tmp_path, Marked(), save_every=2, async_save=True) as manager:
        for step in (1, 2, 3):
            manager.end_step(step)
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("how", ["error", "option", "closed", "nothing ended"])
def test_leaving_the_block_saves_nothing(tmp_path: Path, how: str) -> None:
    """Not after an error, not when told not to, not when closed, not without a step."""
    run = Marked()
    manager = manager_of(tmp_path, run, save_on_exit=how != "option")
    with pytest.raises(KeyError) if how == "error" else manager:
        if how == "error":
            with manager:
                manager.end_step(1)
                raise KeyError
        if how != "nothing ended":
            manager.end_step(1)
        if how == "closed":
            manager.close()
    assert checkpoint_files(tmp_path) == {}


def test_leaving_the_block_behind_a_refused_step_saves_nothing(tmp_path: Path) -> None:
    """The weights are no longer those of the last step that ended."""
    manager = manager_of(tmp_path, Marked())
    manager.end_step(1)
    with pytest.raises(safeckpt.NonFiniteError):
        manager.end_step(2, loss=float("nan"))
    with (
        pytest.warns(safeckpt.SafeckptWarning, match="Step 1 is not saved at the end of the run: a later step"),
        manager,
    ):
        pass
    assert checkpoint_files(tmp_path) == {}


def train_half_a_step_too_far(path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with safeckpt.CheckpointManager(path, {"model": model, "optimizer": optimizer}) as manager:
        for step in (1, 2, 3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step == 3:
                break
            manager.end_step(step)


def test_leaving_the_block_in_the_middle_of_a_step_saves_nothing(tmp_path: Path) -> None:
    """A `break` between optimizer.step() and end_step would put the weights of step 3 under the number 2."""
    with pytest.warns(safeckpt.SafeckptWarning, match="Step 2 is not saved at the end of the run: an optimizer step"):
        train_half_a_step_too_far(tmp_path)
    assert checkpoint_files(tmp_path) == {}


def test_state_that_is_not_finite_is_refused_when_the_block_is_left(tmp_path: Path) -> None:
    """The error of the last save comes out of the with statement, and the manager is closed all the same."""
    run = Marked()
    manager = manager_of(tmp_path, run)
    manager.save(1)
    manager.end_step(2)
    run.weight.value[0] = float("nan")
    with pytest.raises(safeckpt.NonFiniteError), manager:
        pass
    with pytest.raises(ValueError, match="closed"):
        manager.save(3)
    assert steps_in(tmp_path) == [1]


def test_finished_script_that_runs_again_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Restored at its last step, it trains nothing, says so, and leaves every byte as it was."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.end_step(3)
    before = checkpoint_files(tmp_path)
    with caplog.at_level(logging.INFO, "safeckpt"), manager_of(tmp_path, Marked()) as manager:
        manager.restore()
    assert caplog.records[-1].getMessage() == "step 3 is saved, and no step has ended since"
    assert checkpoint_files(tmp_path) == before


def test_saved_step_with_new_metrics_is_described(tmp_path: Path) -> None:
    """A validation after the save adds its metrics to the checkpoint, which keep_best then sees."""
    run = Marked()
    best = safeckpt.Best("accuracy", "max")
    with manager_of(tmp_path, run, keep_last=1, keep_best=best, save_every=1) as manager:
        for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.7), (4, 0.6)]:
            run.step = step
            manager.end_step(step, loss=float(step))
            described = manager.save(step, metrics={"accuracy": accuracy})
            assert (described.step, described.loss, described.metrics) == (step, float(step), {"accuracy": accuracy})
            assert described == manager.latest()
        assert manager.save(4).metrics == {"accuracy": 0.6}
    assert steps_in(tmp_path) == [2, 4]
    again = Marked()
    with manager_of(tmp_path, again) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.metrics == {"accuracy": 0.6}
    assert again.step == 4
    safeckpt.verify(restored.path)


def test_failure_while_a_step_is_described_leaves_it_as_it_was(tmp_path: Path) -> None:
    """A full disk while metrics are added costs nothing but the metrics."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1, metrics={"a": 1.0})
        before = checkpoint_files(tmp_path)
        with intercept(Fault(1, errno.ENOSPC, {"write"})), pytest.raises(OSError, match="No space"):
            manager.save(1, metrics={"b": 2.0})
        assert checkpoint_files(tmp_path) == before
        assert manager.save(1, metrics={"b": 2.0}).metrics == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("part", ["weight", "rng", "counter", "mode"])
def test_saved_step_with_another_state_is_refused(tmp_path: Path, part: str) -> None:
    """One bit of a weight, one random number, one count or one flag is enough."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    components: dict[str, Any] = {"model": model, "optimizer": optimizer, "meter": {"sum": 0.0, "seen": [1, 2]}}
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        saved = manager.save(1)
        assert manager.save(1) == saved
        with torch.no_grad():
            if part == "weight":
                bits = model[0].weight.view(torch.int32)
                bits[0, 0] ^= 1
            elif part == "rng":
                torch.rand(1)
            elif part == "counter":
                components["meter"]["sum"] = -0.0
            else:
                model[1].eval()
        with pytest.raises(safeckpt.StepExistsError):
            manager.save(1)


def train_and_validate(directory: Path, epochs: int) -> list[tuple[int, int]]:
    """Save every step within the epochs, and give metrics after each; return (epoch, step) of the validations."""
    model = torch.nn.Linear(2, 1)
    loader = safeckpt.ResumableLoader(torch.utils.data.DataLoader(torch.zeros(6, 2), batch_size=2), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    components = {"model": model, "optimizer": optimizer, "loader": loader}
    validated = []
    best = safeckpt.Best("accuracy", "max")
    with safeckpt.CheckpointManager(directory, components, save_every=1, keep_last=1, keep_best=best) as manager:
        manager.restore()
        for epoch in loader.epochs(epochs):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                manager.end_step(manager.step + 1)
            manager.save(manager.step, metrics={"accuracy": 1 / manager.step})
            validated.append((epoch, manager.step))
    return validated


def test_metrics_after_an_epoch_are_recorded_in_its_last_step(tmp_path: Path) -> None:
    """The loader has ended its epoch since the save, which a resumed run does again, so it is the same state."""
    assert train_and_validate(tmp_path, 2) == [(0, 3), (1, 6)]
    assert [(one.step, one.metrics) for one in _checkpoints(tmp_path)] == [
        (3, {"accuracy": 1 / 3}),
        (6, {"accuracy": 1 / 6}),
    ]
    assert train_and_validate(tmp_path, 3) == [(1, 6), (2, 9)]
    assert steps_in(tmp_path) == [3, 9]


def _checkpoints(directory: Path) -> tuple[safeckpt.Checkpoint, ...]:
    with safeckpt.CheckpointManager(directory, {"model": torch.nn.Linear(2, 1)}) as manager:
        return manager.checkpoints()


@pytest.mark.parametrize("where", ["epoch left early", "at another epoch", "with a batch left out"])
def test_saved_step_with_a_loader_elsewhere_is_refused(tmp_path: Path, where: str) -> None:
    """Only the end of the epoch in which the step was saved is the same place."""
    loader = safeckpt.ResumableLoader(torch.utils.data.DataLoader(torch.zeros(6, 2), batch_size=2), seed=0)
    with safeckpt.CheckpointManager(tmp_path, {"loader": loader}) as manager:
        for number, _ in loader.enumerate():
            manager.save(number + 1)
            if number == 1 and where == "epoch left early":
                break
        if where == "epoch left early":
            loader.end_epoch()
        if where == "at another epoch":
            loader.seek(2)
        if where == "with a batch left out":
            loader.leave_out([(1, 0)])
        with pytest.raises(safeckpt.StepExistsError):
            manager.save(manager.step)


def test_directory_in_use_is_reported_at_the_first_step(tmp_path: Path) -> None:
    """A forgotten restore() is an error at the first step, not at the first save, many steps later."""
    save_steps(tmp_path, 1)
    with manager_of(tmp_path, Marked(), save_every=100) as manager, pytest.raises(safeckpt.DirectoryInUseError):
        manager.end_step(1, loss=1.0)


def test_lock_of_another_writer_is_reported_at_the_first_step(tmp_path: Path) -> None:
    """Two jobs in one directory do not train for hours before one of them learns of the other."""
    lock = WriterLock(tmp_path, 1.0)
    lock.acquire()
    try:
        with (
            manager_of(tmp_path, Marked(), save_every=100, lock_timeout_seconds=0.01) as manager,
            pytest.raises(safeckpt.DirectoryLockedError),
        ):
            manager.end_step(1, loss=1.0)
    finally:
        lock.release()


def test_value_that_cannot_be_saved_is_reported_at_the_first_step(tmp_path: Path) -> None:
    """A lambda among the counters is found by its key path before training has begun in earnest."""
    run = Marked()
    run.components["counters"]["schedule"] = lambda step: step
    with manager_of(tmp_path, run, save_every=100) as manager:
        with pytest.raises(safeckpt.UnsavableStateError) as caught:
            manager.end_step(1, loss=1.0)
        assert "['counters']['schedule']" in caught.value.location
        del run.components["counters"]["schedule"]
        assert manager.end_step(1, loss=1.0) is None


def test_first_step_after_a_save_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save has found out all that the check of a first step would."""
    checks: list[int] = []
    monkeypatch.setattr(Capturer, "check_savable", lambda _: checks.append(1))
    with manager_of(tmp_path, Marked(), save_every=100) as manager:
        manager.save(1)
        manager.end_step(2)
    assert checks == []
    with manager_of(tmp_path, Marked(), save_every=100) as manager:
        manager.restore()
        manager.save(manager.step)  # saved already: nothing was written, and the directory was not taken
        manager.end_step(manager.step + 1)
    assert checks == [1]


def test_first_step_without_a_schedule_writes_nothing(tmp_path: Path) -> None:
    """A manager that is not to save by itself makes no directory."""
    with manager_of(tmp_path / "run", Marked(), save_on_exit=False) as manager:
        manager.end_step(1, loss=1.0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_component_replaced_in_the_mapping_is_refused(tmp_path: Path, how: str) -> None:
    """The optimizer that the script uses now is not the one that would be saved."""
    model = torch.nn.Linear(2, 2)
    components: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        manager.save(1)
        if how == "replaced":
            components["optimizer"] = torch.optim.Adam(model.parameters())
        else:
            del components["optimizer"]
        with pytest.raises(safeckpt.UnsavableStateError, match=r"restore\(fresh=\('optimizer',\)\)") as caught:
            manager.save(2)
        assert caught.value.location == "optimizer"
    assert steps_in(tmp_path) == [1]


def test_manager_of_fewer_components_does_not_save_into_the_run(tmp_path: Path) -> None:
    """An evaluation script that restores the model alone cannot write its step between those of the training."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(10)
    before = contents(tmp_path)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    with safeckpt.CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.restore(only=("model",))
        with pytest.raises(safeckpt.DirectoryInUseError, match="restored only model"):
            manager.save(11)
    assert contents(tmp_path) == before


def test_part_restored_into_a_run_stops_its_saves(tmp_path: Path) -> None:
    """The weights of one step with the moments of another are no state of any run; a whole restore mends it."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.step = 2
        manager.save(2)
        manager.restore(1, only=("model",))
        with pytest.raises(safeckpt.DirectoryInUseError) as caught:
            manager.save(3)
        assert caught.value.restored_only == ("model",)
        manager.restore()
        run.step = 3
        assert manager.save(3).step == 3


def test_partial_restore_keeps_the_live_modes(tmp_path: Path) -> None:
    """A model in eval mode stays there: dropout does not come back with the weights."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
        model.eval()
        manager.restore(only=("model",))
        assert not any(module.training for module in model.modules())
        manager.restore()
        assert all(module.training for module in model.modules())


def test_scheduler_is_not_restored_without_its_optimizer(tmp_path: Path) -> None:
    """The rate that a scheduler goes on from stands in the optimizer."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        manager.save(1)
        with pytest.raises(safeckpt.StateMismatchError, match="its learning rate is in optimizer"):
            manager.restore(only=("scheduler",))
        manager.restore(only=("scheduler", "optimizer"))


def test_fresh_component_keeps_its_state_and_the_run_goes_on(tmp_path: Path) -> None:
    """A scheduler and a counter that are new in this run stay as they are; all else is restored, and saves work."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with safeckpt.CheckpointManager(
        tmp_path, {"model": model, "optimizer": optimizer, "counters": {"seen": 7}}
    ) as manager:
        manager.save(1)
    weight = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    counters = {"seen": 0, "best": 0.25}
    components = {"model": model, "optimizer": optimizer, "counters": counters, "scheduler": scheduler}
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        with pytest.raises(safeckpt.ComponentMismatchError):
            manager.restore()
        with pytest.raises(safeckpt.StateMismatchError, match="'best'"):
            manager.restore(fresh=("scheduler",))
        manager.restore(fresh=("scheduler", "counters.best"))
        assert torch.equal(model.weight, weight)
        assert counters == {"seen": 7, "best": 0.25}
        manager.save(2)
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 2


@pytest.mark.parametrize(
    ("fresh", "text"),
    [
        (("modle",), "modle; there are model, counters"),
        (("model.value",), "has no entry 'value'"),
        (("counters.x",), "'x'"),
    ],
)
def test_fresh_with_an_unknown_name_is_refused(tmp_path: Path, fresh: tuple[str, ...], text: str) -> None:
    """The error lists what could have been meant, and nothing is changed."""
    save_steps(tmp_path, 1)
    run = Marked()
    with manager_of(tmp_path, run) as manager, pytest.raises(ValueError, match=text):
        manager.restore(fresh=fresh)
    assert run.step != 1


def test_save_that_failed_in_the_background_is_tried_at_the_next_step(tmp_path: Path) -> None:
    """As with a synchronous save, not a whole interval later."""
    with manager_of(tmp_path, Marked(), save_every=5, async_save=True) as manager:
        with intercept(Fault(1, errno.ENOSPC, {"sync"})):
            manager.end_step(5)
            with pytest.raises(OSError, match="No space"):
                manager.wait()
        assert manager.end_step(6) is not None
        manager.wait()
        assert steps_in(tmp_path) == [6]


def test_threads_that_save_at_once_take_turns(tmp_path: Path) -> None:
    """Several threads may call one manager: each save is whole, and none is taken for another run's."""
    run = Marked()
    errors: list[BaseException] = []
    with manager_of(tmp_path, run, async_save=True, keep_last=1000) as manager:
        steps = iter(range(1, 41))
        turn = threading.Lock()

        def save() -> None:
            try:
                for _ in range(10):
                    with turn:
                        step = next(steps)
                    try:
                        manager.save(step)
                    except ValueError as error:
                        if "is lower than" not in str(error):  # another thread was faster
                            raise
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        manager.wait()
        saved = [checkpoint.step for checkpoint in manager.checkpoints()]
    assert saved == sorted(saved)
    assert saved[-1] == 40


def test_step_whose_save_failed_is_saved_at_the_end(tmp_path: Path) -> None:
    """The disk has room again when the block is left, and the step has ended all the same."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1) as manager:
        run.step = 1
        manager.end_step(1)
        run.step = 2
        with intercept(Fault(1, errno.ENOSPC, {"sync"})), pytest.raises(OSError, match="No space"):
            manager.end_step(2)
    assert steps_in(tmp_path) == [1, 2]


def test_step_whose_background_save_failed_is_saved_at_the_end(tmp_path: Path) -> None:
    """Nobody has waited for it; the failure is in the log, and the last step on the disk."""
    with manager_of(tmp_path, Marked(), save_every=1, async_save=True) as manager:
        manager.end_step(1)
        manager.wait()
        with intercept(Fault(1, errno.ENOSPC, {"sync"})):
            manager.end_step(2)
            manager._saver._background._thread.join()  # type: ignore[union-attr]  # there is one
    assert steps_in(tmp_path) == [1, 2]


def test_restore_interrupted_behind_the_components_is_no_state_to_save(tmp_path: Path, monkeypatch: Any) -> None:
    """All components have the checkpoint's state by then, and the streams have not."""
    run = Marked()
    with manager_of(tmp_path, run, save_on_exit=False) as manager:
        manager.save(1)
        run.step = 2
        manager.save(2)

        def interrupt(self: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("safeckpt.state.run_state.Plan._set_gradients", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.restore(1)
        with pytest.raises(ValueError, match="stopped half-way"):
            manager.save(3)
        manager.restore()
        manager.save(3)


class Picky:
    """An object whose own check looks for a file of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

    def check_state(self, state: dict[str, int]) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file", "/nowhere")


def test_missing_file_of_the_users_own_is_not_taken_for_a_missing_checkpoint(tmp_path: Path) -> None:
    """A restore that found nothing would start the run anew."""
    with safeckpt.CheckpointManager(tmp_path, {"picky": Picky()}) as manager:
        manager.save(1)
    with safeckpt.CheckpointManager(tmp_path, {"picky": Picky()}) as manager:
        with pytest.raises(FileNotFoundError, match="/nowhere"):
            manager.restore()
        with pytest.raises(FileNotFoundError, match="/nowhere"):
            manager.restore(1)
