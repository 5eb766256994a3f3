"""A restart is compared with the losses that it replays."""

from __future__ import annotations

import errno
import logging
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safeckpt
from safeckpt.state.loss import Loss
from safeckpt.store import LossLog
from tests.children import Child
from tests.digits import Digits
from tests.faults import Fault, contents, intercept
from tests.training import Run

OPTIONS: dict[str, Any] = {"lock_timeout_seconds": 0}


def manager_of(run: Run, path: Path, **options: Any) -> safeckpt.CheckpointManager:
    """Return a manager that leaves what was not saved unsaved at the end, as a crash does."""
    return safeckpt.CheckpointManager(path, run.components, **(OPTIONS | {"save_on_exit": False} | options))


def train(run: Run, manager: safeckpt.CheckpointManager, stop: int, *, save_every: int = 10) -> list[float]:
    """Train up to step `stop`, saving at multiples; return the losses."""
    losses = []
    for step in range(manager.step + 1, stop + 1):
        losses.append(run.step())
        manager.end_step(step, loss=losses[-1])
        if step % save_every == 0:
            manager.save(step)
    return losses


def crashed(path: Path, steps: int = 37, *, save_every: int = 10) -> list[float]:
    """Leave a directory as a run does that dies after `steps` steps; return its losses."""
    run = Run()
    with manager_of(run, path) as manager:
        return train(run, manager, steps, save_every=save_every)


def test_resumed_run_that_is_the_same_is_verified(memory_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every loss between the checkpoint and the crash is compared, and the log says that all are equal."""
    losses = crashed(memory_path)
    run = Run(seed=5)
    with manager_of(run, memory_path) as manager, caplog.at_level(logging.INFO, "safeckpt"):
        assert manager.replay is None
        manager.restore()
        caplog.clear()
        assert manager.replay == safeckpt.ReplayReport(restored_step=30, recorded=7, compared=0, finished=False)
        assert train(run, manager, 36) == losses[30:36]
        assert manager.replay == safeckpt.ReplayReport(restored_step=30, recorded=7, compared=6, finished=False)
        assert not caplog.records
        train(run, manager, 45)
        assert manager.replay == safeckpt.ReplayReport(restored_step=30, recorded=7, compared=7, finished=True)
        assert manager.replay.verified
    assert [record.getMessage() for record in caplog.records] == ["resume verified: 7 of 7 replayed losses equal"]
    assert "replay_verified" in (memory_path / "events.jsonl").read_text()


def test_recorded_losses_are_exact(memory_path: Path) -> None:
    """The record has the bits of every loss, whatever its size and sign."""
    run = Run()
    values = [1e-320, -0.0, 1 / 3, 1.7976931348623157e308, 5, np.float32(0.1), torch.tensor(0.1), {"a": 0.1, "b": [2]}]
    with manager_of(run, memory_path) as manager:
        manager.save(0)
        for step, value in enumerate(values, 1):
            manager.end_step(step, loss=value)
    recorded = manager_of(run, memory_path)._run.directory.files.losses.read(0)
    assert [recorded[step] for step in range(1, 9)] == [
        (1e-320).hex(), "-0x0.0p+0", (1 / 3).hex(), (1.7976931348623157e308).hex(), (5.0).hex(),
        float(np.float32(0.1)).hex(), float(torch.tensor(0.1)).hex(), f"{(0.1).hex()},{(2.0).hex()}",
    ]  # fmt: skip


def test_loss_of_a_thousand_values_is_recorded_by_its_digest() -> None:
    """A long loss has a short text, which any bit of it changes."""
    values = [float(index) for index in range(1000)]
    assert len(Loss.read(values).exact) < 100
    assert Loss.read(values).exact != Loss.read([*values[:-1], 999.0000000000001]).exact


def test_run_that_goes_on_is_verified_at_every_restart(memory_path: Path) -> None:
    """Losses computed after a restart are on record for the next one."""
    straight = Run().steps(60)
    losses = crashed(memory_path, 25)
    for stop in (33, 48, 60):
        run = Run(seed=9)
        with manager_of(run, memory_path) as manager:
            restored = manager.restore()
            assert restored is not None
            losses[restored.step :] = train(run, manager, stop)
            assert manager.replay is not None
            assert manager.replay.verified
            assert manager.replay.compared == manager.replay.recorded > 0
    assert losses == straight


def test_mode_flipped_after_the_restore_is_caught_at_the_first_replayed_step(memory_path: Path) -> None:
    """A difference is a warning with the step and both values, once; the record then follows the new run."""
    losses = crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.restore()
        run.model[3].eval()  # the dropout layer
        with pytest.warns(safeckpt.ReplayMismatchWarning, match="Step 31 has another loss") as caught:
            train(run, manager, 31)
        text = str(caught[0].message)
        assert caught[0].filename == __file__
        report = manager.replay
        assert report is not None
        assert report.mismatch is not None
        assert (report.mismatch.step, report.mismatch.recorded) == (31, losses[30].hex())
        assert repr(losses[30]) in text
        assert report.mismatch.recomputed in text
        assert not report.verified
        assert report.finished
        others = train(run, manager, 35)
        assert others[0] != losses[31]
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.restore()
        run.model[3].eval()
        assert train(run, manager, 35)[1:] == others
        assert manager.replay is not None
        assert manager.replay.verified


def test_changed_environment_is_named_with_the_difference(memory_path: Path) -> None:
    """The warning says what differs between the environment of the checkpoint and this one."""
    crashed(memory_path)
    run = Run()
    torch.set_default_dtype(torch.float64)
    try:
        with manager_of(run, memory_path) as manager:
            with pytest.warns(safeckpt.EnvironmentChangedWarning):
                manager.restore()
            run.model.eval()
            with pytest.warns(
                safeckpt.ReplayMismatchWarning, match=r"default_dtype: 'torch.float32' -> 'torch.float64'"
            ):
                train(run, manager, 31)
            assert manager.replay is not None
            assert manager.replay.mismatch is not None
            assert manager.replay.mismatch.changed == ("default_dtype: 'torch.float32' -> 'torch.float64'",)
    finally:
        torch.set_default_dtype(torch.float32)


def test_difference_is_an_error_where_it_was_asked_for(memory_path: Path) -> None:
    """The error has the data, leaves the directory as it was, and the same run can be resumed right afterwards."""
    losses = crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path, on_replay_mismatch="error") as manager:
        manager.restore()
        before = {name: data for name, data in contents(memory_path).items() if name != "events.jsonl"}
        run.model.eval()
        loss = run.step()
        with pytest.raises(safeckpt.ReplayMismatchError, match="Still safe:") as caught:
            manager.end_step(31, loss=loss)
        assert (caught.value.step, caught.value.recorded, caught.value.recomputed) == (31, losses[30].hex(), loss.hex())
        assert caught.value.path == str(memory_path)
        assert manager.step == 30
    after = {name: data for name, data in contents(memory_path).items() if name != "events.jsonl"}
    assert after == before
    run = Run()
    with manager_of(run, memory_path, on_replay_mismatch="error") as manager:
        manager.restore()
        train(run, manager, 37)
        assert manager.replay is not None
        assert manager.replay.verified


def test_ignored_difference_is_recorded_over(memory_path: Path) -> None:
    """With `ignore` nothing is compared, and the record follows the new run."""
    crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path, on_replay_mismatch="ignore") as manager:
        manager.restore()
        run.model.eval()
        others = train(run, manager, 37)
        assert manager.replay is not None
        assert manager.replay.compared == 0
    assert manager._run.directory.files.losses.read(30) == {31 + index: loss.hex() for index, loss in enumerate(others)}


def test_unknown_policy_is_refused(memory_path: Path) -> None:
    """The error lists the policies there are."""
    with pytest.raises(ValueError, match="'warn', 'error', 'ignore'"):
        manager_of(Run(), memory_path, on_replay_mismatch="panic")


def resumed_without_alarm(path: Path, stop: int) -> safeckpt.ReplayReport:
    """Resume as a restart does and train on; warnings are errors, so that any alarm fails the test."""
    run = Run()
    with manager_of(run, path) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.HyperparameterReplacedWarning)
        manager.restore()
        train(run, manager, stop)
        assert manager.replay is not None
        return manager.replay


def changed_by_rollback(run: Run, manager: safeckpt.CheckpointManager) -> None:
    manager.restore()
    train(run, manager, 34)
    manager.rollback(changed=True)
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def changed_by_rewind(run: Run, manager: safeckpt.CheckpointManager) -> None:
    manager.restore(step=20)
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def changed_by_live_value(run: Run, manager: safeckpt.CheckpointManager) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.5
    manager.restore(keep_live=("optimizer.weight_decay",))


CHANGES = [changed_by_rollback, changed_by_rewind, changed_by_live_value]


@pytest.mark.parametrize("change", CHANGES)
def test_new_timeline_is_not_compared_with_the_old_one(memory_path: Path, change: Any) -> None:
    """After a change on purpose nothing is compared, and from the next checkpoint on the new timeline is verified."""
    losses = crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path) as manager:
        change(run, manager)
        start = manager.step
        others = train(run, manager, 44)
        assert others != losses[start:]
        assert manager.replay is not None
        assert manager.replay.recorded == 0
    report = resumed_without_alarm(memory_path, 50)
    assert report == safeckpt.ReplayReport(restored_step=40, recorded=4, compared=4, finished=True)


@pytest.mark.parametrize("change", CHANGES)
def test_crash_before_the_new_timeline_has_a_checkpoint_verifies_the_old_one(memory_path: Path, change: Any) -> None:
    """What was changed and not saved is gone after a crash: the restart replays, and is compared with, the old run."""
    crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path) as manager:
        change(run, manager)
        train(run, manager, 39, save_every=1000)
    report = resumed_without_alarm(memory_path, 45)
    assert report == safeckpt.ReplayReport(restored_step=30, recorded=7, compared=7, finished=True)


def test_losses_before_the_first_checkpoint_are_on_record(memory_path: Path) -> None:
    """Nothing was there that they could fail to follow from: a picture begins at the first step."""
    losses = crashed(memory_path)
    assert LossLog(memory_path / "losses.log").read(-1) == {
        step: loss.hex() for step, loss in enumerate(losses, start=1)
    }
    assert resumed_without_alarm(memory_path, 45).recorded == 7


def test_failed_first_save_of_a_new_timeline_leaves_no_false_record(memory_path: Path) -> None:
    """When the checkpoint of a new timeline could not be written, its losses are not on record either."""
    crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path) as manager:
        changed_by_rollback(run, manager)
        train(run, manager, 39, save_every=1000)
        fault = Fault(1, errno.EIO, {"sync"})
        with intercept(fault), pytest.raises(OSError, match="Input/output error"):
            manager.save(39)
        assert fault.fired is not None
        train(run, manager, 44, save_every=1000)
    assert resumed_without_alarm(memory_path, 45).recorded == 0


def test_rollback_that_changes_nothing_is_verified(memory_path: Path) -> None:
    """Going back without a change replays the same losses, and they are compared."""
    run = Run()
    with manager_of(run, memory_path) as manager:
        train(run, manager, 37)
        manager.rollback()
        train(run, manager, 39)
        assert manager.replay == safeckpt.ReplayReport(restored_step=30, recorded=7, compared=7, finished=True)


def test_partial_restore_compares_nothing(memory_path: Path) -> None:
    """A warm start is not the recorded run."""
    crashed(memory_path)
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.restore(only=("model",))
        train(run, manager, 5, save_every=1000)
        assert manager.replay is None


def test_fresh_run_in_a_used_directory_forgets_the_losses_of_the_old_one(memory_path: Path) -> None:
    """When somebody deleted the checkpoints and started over, the restart is compared with the new run only."""
    crashed(memory_path)
    for path in memory_path.glob("step-*.pt"):
        path.unlink()
    run = Run(seed=3)
    with manager_of(run, memory_path) as manager:
        train(run, manager, 13)
    assert resumed_without_alarm(memory_path, 15).compared == 3


def test_damaged_newest_checkpoint_costs_a_longer_replay(memory_path: Path) -> None:
    """Walking back to an older checkpoint of the same run, all losses since that one are verified."""
    crashed(memory_path)
    newest = memory_path / "step-00000030.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    run = Run()
    with manager_of(run, memory_path) as manager:
        with pytest.warns(safeckpt.SkippedCheckpointWarning):
            manager.restore()
        train(run, manager, 37, save_every=1000)
        assert manager.replay == safeckpt.ReplayReport(restored_step=20, recorded=17, compared=17, finished=True)


def test_run_that_ends_while_replaying_says_how_far_it_came(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing the manager logs what was compared."""
    crashed(memory_path)
    run = Run()
    with caplog.at_level(logging.INFO, "safeckpt"), manager_of(run, memory_path) as manager:
        manager.restore()
        caplog.clear()
        train(run, manager, 33)
    assert [record.getMessage() for record in caplog.records] == ["resume verified: 3 of 7 replayed losses equal"]


def test_steps_without_a_loss_are_not_compared(memory_path: Path) -> None:
    """A run that reports its loss now and then is verified where both runs did."""
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.save(0)
        for step in range(1, 10):
            loss = run.step()
            manager.end_step(step, loss=loss if step % 2 else None)
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.restore()
        for step in range(1, 12):
            loss = run.step()
            manager.end_step(step, loss=loss if step % 3 else None)
        assert manager.replay == safeckpt.ReplayReport(restored_step=0, recorded=5, compared=3, finished=True)


@pytest.mark.parametrize("stop", [11, 17, 29])
def test_asynchronous_saves_are_verified_alike(memory_path: Path, stop: int) -> None:
    """Losses of the steps during which a checkpoint was being written are on record."""
    run = Run()
    with manager_of(run, memory_path, async_save=True) as manager:
        losses = train(run, manager, stop)
    run = Run()
    with manager_of(run, memory_path, async_save=True) as manager:
        restored = manager.restore()
        assert restored is not None
        assert train(run, manager, stop) == losses[restored.step :]
        assert manager.replay is not None
        assert manager.replay.compared == stop - restored.step


def test_record_that_cannot_be_written_costs_one_warning(memory_path: Path) -> None:
    """On a full disk training goes on without a record; the checkpoints are as they were and the next save works."""
    run = Run()
    with manager_of(run, memory_path) as manager:
        train(run, manager, 10)
        before = contents(memory_path)
        fault = Fault(1, errno.ENOSPC, {"open_append", "append"}, for_good=True)
        with intercept(fault), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(11, 16):
                manager.end_step(step, loss=run.step())
                time.sleep(0.011)
        assert fault.fired is not None
        assert len([one for one in caught if "losses.log" in str(one.message)]) == 1
        assert contents(memory_path) == before
        train(run, manager, 20)
    assert [checkpoint.step for checkpoint in manager.checkpoints()] == [10, 20]


def test_step_costs_less_than_twenty_microseconds_of_python(memory_path: Path) -> None:
    """Recording adds no file operation to most steps: 1,000 quick steps make a handful of writes."""
    run = Run()
    with manager_of(run, memory_path) as manager:
        manager.save(0)
        fault = Fault(10**9, errno.EIO, {"append"})
        began = time.monotonic()
        with intercept(fault):
            for step in range(1, 1001):
                manager.end_step(step, loss=0.5)
        writes_allowed = 2 + (time.monotonic() - began) / 0.01 + 1000 / 512
        assert fault.seen <= writes_allowed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as a file."""
    path = tmp_path_factory.mktemp("digits") / "digits.pt"
    Digits.download(path)
    return path


def test_rollback_that_leaves_out_a_batch_starts_a_new_record(memory_path: Path, data: Path) -> None:
    """A poisoned batch is left out, the run goes on, and its restart is compared with what came after."""
    run = Digits(data)
    with safeckpt.CheckpointManager(memory_path, run.components, save_every=5, save_on_exit=False) as manager:
        run.train(manager, 8)
        with pytest.raises(safeckpt.NonFiniteError):
            run.train(manager, 9, poison=True)
        manager.rollback(skip_batches=1)
        run.train(manager, 13)
    run = Digits(data)
    with safeckpt.CheckpointManager(memory_path, run.components, save_every=5) as manager:
        manager.restore()
        run.train(manager, 14)
        assert manager.replay == safeckpt.ReplayReport(restored_step=10, recorded=3, compared=3, finished=True)


TOTAL = 420
SAVE_EVERY = 25


def go_on(connection: Any, path: Path, data: Path, flip: bool) -> None:
    """Resume the digits run, take a step whenever asked, and tell where it is; in a process of its own."""
    run = Digits(data)
    with safeckpt.CheckpointManager(path, run.components, save_every=SAVE_EVERY) as manager:
        manager.restore()
        if flip:
            run.model.dropout.eval()
        while manager.step < TOTAL:
            connection.recv()
            (loss,) = run.train(manager, manager.step + 1)
            connection.send((manager.step, loss, manager.replay))
            if flip:
                return


def leaves_a_loss(path: Path, step: int) -> bool:
    """Whether a kill in the step after this one leaves a loss to replay: one is on record, and no save is due."""
    checkpoint = safeckpt.latest(path)
    recorded = checkpoint is not None and LossLog(path / "losses.log").read(checkpoint.step)
    return bool(recorded) and (step + 1) % SAVE_EVERY != 0


def killed_from(child: Child, path: Path, target: int, after_seconds: float) -> tuple[dict[int, float], Any]:
    """Run up to step `target` at least and kill inside the step after it; return the losses, and the last report."""
    losses: dict[int, float] = {}
    step, report = 0, None
    while step < target or not leaves_a_loss(path, step):
        step, losses[step], report = child.ask("step")
    child.connection.send("step")
    time.sleep(after_seconds)
    child.kill()
    return losses, report


def killed_at_random(path: Path, data: Path, kills: int, seed: int) -> tuple[dict[int, float], list[Any]]:
    """Kill the run with SIGKILL inside that many random steps; return its losses and how each restart compared."""
    draw = random.Random(seed)
    losses: dict[int, float] = {}
    reports = []
    for _ in range(kills):
        # The first kill comes when there is something to resume from; each later one after all was replayed.
        target = max(losses, default=SAVE_EVERY) + draw.randint(3, TOTAL // (kills + 2))
        with Child(go_on, path, data, False) as child:
            before_kill, report = killed_from(child, path, target, draw.random() * 0.02)
        losses |= before_kill
        reports.append(report)
    with Child(go_on, path, data, False) as child:
        step = 0
        while step < TOTAL:
            step, losses[step], report = child.ask("step")
    return losses, [*reports, report]


@pytest.mark.slow
def test_digits_run_killed_at_random_is_verified_at_every_restart(memory_path: Path, data: Path) -> None:
    """Every one of twenty restarts of a real run replays losses that are on record, and all of them are equal."""
    kills = 20
    losses, (first, *reports) = killed_at_random(memory_path, data, kills, seed=4)
    assert first is None
    assert len(reports) == kills
    for report in reports:
        assert report.finished
        assert report.verified
        assert report.compared == report.recorded
    assert sum(report.compared for report in reports) > 3 * kills
    assert losses == dict(enumerate(Digits(data).losses(TOTAL), 1))


def test_digits_run_with_a_flipped_mode_is_caught_at_the_first_replayed_step(memory_path: Path, data: Path) -> None:
    """Dropout left off after a restart of a killed run is found at once, in a new process as everywhere."""
    with Child(go_on, memory_path, data, False) as child:
        killed_from(child, memory_path, 40, 0.02)
    with Child(go_on, memory_path, data, True) as child:
        child.connection.send("step")
        ended = child.ended()
    assert isinstance(ended.error, safeckpt.ReplayMismatchWarning)
    assert str(ended.error).startswith("Step 26 has another loss")
