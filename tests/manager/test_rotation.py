"""What is kept and what makes way: newest, best and chosen steps stay; only our own good files are ever deleted."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt import Best
from safeckpt.run import catalog
from tests.faults import Recorder, intercept
from tests.manager.helpers import (
    checkpoint_files,
    each_damage,
    flip,
    foreign,
    manager_of,
    save_steps,
    spoil,
    step_path,
    steps_in,
    truncate,
)
from tests.training import Marked


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 11, 12]),
        ({"keep_last": 1}, [12]),
        ({"keep_last": 100}, list(range(13))),
        ({"keep_last": 1, "keep_every": 5}, [0, 5, 10, 12]),
        ({"keep_last": 2, "keep_every": 1}, list(range(13))),
        ({"keep_last": 1, "keep_best": Best("loss")}, [4, 12]),
        ({"keep_last": 1, "keep_best": Best("loss", "max", 2)}, [0, 3, 12]),
        ({"keep_last": 2, "keep_best": Best("accuracy", mode="max", count=3)}, [6, 8, 10, 11, 12]),
        ({"keep_last": 1, "keep_best": [Best("loss"), Best("accuracy", "max")]}, [4, 8, 12]),
        ({"keep_last": 1, "keep_best": Best("nobody has this")}, [12]),
        ({"keep_last": 1, "keep_every": 6, "keep_best": (Best("loss"),)}, [0, 4, 6, 12]),
    ],
    ids=str,
)
def test_policies_keep_what_they_say(tmp_path: Path, options: dict, kept: list[int]) -> None:
    """After thirteen saves exactly the newest, the best and the chosen steps have a file."""
    losses = [9.0, 2.0, 2.0, 9.0, 0.5, 3.0, 3.0, 0.5, 3.0, 3.0, 3.0, 3.0, 3.0]
    accuracies = [0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.7, 0.5, 0.9, 0.1, 0.6, 0.2, 0.1]
    run = Marked()
    with manager_of(tmp_path, run, **options) as manager:
        for step, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
            run.step = step
            manager.save(step, loss=loss, metrics={"accuracy": accuracy})
        assert [checkpoint.step for checkpoint in manager.checkpoints()] == kept
    assert steps_in(tmp_path) == kept


def test_metric_that_is_not_finite_is_recorded_and_never_best(tmp_path: Path) -> None:
    """NaN and infinite metrics are kept in the checkpoint and never keep one alive, in either direction."""
    run = Marked()
    values = [0.5, math.nan, math.inf, -math.inf, 0.4, math.nan]
    best = [Best("a", "min"), Best("a", "max")]
    with manager_of(tmp_path, run, keep_last=1, keep_best=best) as manager:
        for step, value in enumerate(values):
            saved = manager.save(step, metrics={"a": value})
            assert math.isnan(saved.metrics["a"]) or saved.metrics["a"] == value
        listed = manager.checkpoints()
    assert [checkpoint.step for checkpoint in listed] == [0, 4, 5]
    assert [math.isnan(checkpoint.metrics["a"]) for checkpoint in listed] == [False, False, True]


def test_loss_of_several_values_is_never_best(tmp_path: Path) -> None:
    """A loss that is a dict or a list has no order: it is recorded, and the best of the plain ones is kept."""
    with manager_of(tmp_path, Marked(), keep_last=1, keep_best=Best("loss")) as manager:
        for step, loss in enumerate([{"a": 0.1}, 0.5, [0.1, 0.2], None, 0.7]):
            manager.save(step, loss=loss)
    assert steps_in(tmp_path) == [1, 4]


def test_best_survives_a_restart(tmp_path: Path) -> None:
    """The best of the run before a restart is still kept after it: metrics are read from the files."""
    options = {"keep_last": 1, "keep_best": Best("accuracy", "max")}
    run = Marked()
    for step, accuracy in enumerate([0.2, 0.9, 0.1, 0.3, 0.4]):
        with manager_of(tmp_path, run, **options) as manager:
            manager.restore()
            manager.save(step, metrics={"accuracy": accuracy})
    assert steps_in(tmp_path) == [1, 4]


@each_damage
def test_damaged_file_neither_counts_nor_goes(tmp_path: Path, damage: str) -> None:
    """A file that is not good does not take the place of a good one, and is not deleted."""
    save_steps(tmp_path, 1, 2, 3)
    spoil(tmp_path, 2, damage)
    run = Marked()
    with manager_of(tmp_path, run, keep_last=2) as manager:
        manager.restore()
        for step, kept in ((4, [2, 3, 4]), (5, [2, 4, 5])):
            run.step = step
            manager.save(step)
            assert steps_in(tmp_path) == kept


def test_damage_during_the_run_is_seen_before_a_good_file_goes(tmp_path: Path) -> None:
    """A bit that flips in a file of this very process keeps an older good file alive in its place."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=2) as manager:
        for step in (1, 2):
            run.step = step
            manager.save(step)
        flip(step_path(tmp_path, 2))
        run.step = 3
        manager.save(3)
        assert steps_in(tmp_path) == [1, 2, 3]
        run.step = 4
        manager.save(4)
        assert steps_in(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize(("keep_best", "left"), [(None, [1, 4, 5]), ((), [5]), (Best("accuracy", "min"), [3, 5])])
def test_keep_best_left_out_at_a_resume_keeps_the_best(tmp_path: Path, keep_best: Any, left: list[int]) -> None:
    """The rule is the run's own until the script gives another one: what was best is not deleted by forgetting it."""
    run = Marked()
    best = Best("accuracy", "max", count=2)
    with manager_of(tmp_path, run, keep_last=1, keep_best=best) as manager:
        for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.0)):
            manager.save(step, metrics={"accuracy": accuracy})
    for step, accuracy in ((4, 0.8), (5, 0.2)):  # the second time it is the adopted rule that is recorded
        with manager_of(tmp_path, run, keep_last=1, keep_best=keep_best) as manager:
            manager.restore()  # without a word: it may be an evaluation, which deletes nothing
            if keep_best is None:
                text = (
                    r"This run keeps its best.*Write keep_best=\[Best\(metric='accuracy', mode='max', count=2\)\], or"
                )
                with pytest.warns(safeckpt.SafeckptWarning, match=text):
                    manager.save(step, metrics={"accuracy": accuracy})
            else:
                manager.save(step, metrics={"accuracy": accuracy})
    assert steps_in(tmp_path) == left


def test_damaged_best_is_not_the_best(tmp_path: Path) -> None:
    """When the best file is damaged the next best one is kept."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=4, keep_best=Best("loss")) as manager:
        for step, loss in enumerate([0.1, 0.2, 0.3, 0.4]):
            run.step = step
            manager.save(step, loss=loss)
    flip(step_path(tmp_path, 0))
    with manager_of(tmp_path, run, keep_last=1, keep_best=Best("loss")) as manager:
        manager.restore()
        manager.save(4, loss=0.5)
    assert steps_in(tmp_path) == [0, 1, 4]


def test_files_are_not_read_again_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process wrote or verified is not read again at every save."""
    save_steps(tmp_path, 1, 2, 3)
    read: list[str] = []
    real = safeckpt.file.CheckpointFile.verify

    def verify(file: safeckpt.file.CheckpointFile, **options: Any) -> safeckpt.FileReport:
        read.append(Path(file.path).name)
        return real(file, **options)

    monkeypatch.setattr(safeckpt.file.CheckpointFile, "verify", verify)
    run = Marked()
    with manager_of(tmp_path, run, keep_last=3) as manager:
        manager.restore()
        for step in range(4, 12):
            manager.save(step)
    assert sorted(read) == ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt"]


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    """Whatever has another name than ours stays, however much it looks like a checkpoint."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        manager.save(1)
        data = step_path(tmp_path, 1).read_bytes()
        others = [
            "best.pt", "step-1.pt", "step-000000001.pt", "step-00000001.pt.bak", "step-00000001.pth",
            "copy of step-00000001.pt", ".step-00000001.pt", "aside-1.1.pt", "model.tmp",
        ]  # fmt: skip
        for name in others:
            (tmp_path / name).write_bytes(data)
        (tmp_path / "eval").mkdir()
        (tmp_path / "eval" / "step-00000001.pt").write_bytes(data)
        for step in (2, 3):
            run.step = step
            manager.save(step)
    files = checkpoint_files(tmp_path)
    assert set(files) == {*others, "eval/step-00000001.pt", "step-00000003.pt"}
    assert all(files[name] == data for name in (*others, "eval/step-00000001.pt"))


def test_renamed_checkpoint_is_kept_for_good(tmp_path: Path) -> None:
    """A checkpoint that a person gave another name is out of the rotation."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        manager.save(1)
        step_path(tmp_path, 1).rename(tmp_path / "paper.pt")
        manager.save(2)
        manager.save(3)
    assert set(checkpoint_files(tmp_path)) == {"paper.pt", "step-00000003.pt"}
    assert safeckpt.load(tmp_path / "paper.pt")["counters"] == {"step": 0}


def test_nothing_is_deleted_before_the_new_file_is_durable(tmp_path: Path) -> None:
    """Every unlink of a checkpoint comes after the sync of the directory that holds the new one."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        manager.save(1)
        recorder = Recorder()
        with intercept(recorder):
            manager.save(2)
    order = [operation.kind for operation in recorder.operations if operation.kind != "listing"]
    assert order.index("sync") < order.index("replace") < order.index("sync_directory") < order.index("unlink")
    unlinked = [operation.path for operation in recorder.operations if operation.kind == "unlink"]
    assert unlinked == [str(step_path(tmp_path, 1))]


def test_file_that_vanishes_under_the_pruner_is_fine(tmp_path: Path) -> None:
    """A checkpoint that somebody deleted by hand is no error at the next save."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=2) as manager:
        for step in (1, 2):
            manager.save(step)
        step_path(tmp_path, 1).unlink()
        step_path(tmp_path, 2).unlink()
        manager.save(3)
    assert steps_in(tmp_path) == [3]


def test_newest_good_one_stays_when_all_newer_ones_are_bad(tmp_path: Path) -> None:
    """With `keep_last=1` and only damaged newer files the last good one stays until a new one is saved."""
    save_steps(tmp_path, 1, 2, 3)
    truncate(step_path(tmp_path, 2))
    foreign(step_path(tmp_path, 3))
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        with pytest.warns(safeckpt.SkippedCheckpointWarning):
            manager.restore()
        assert run.step == 1
        run.step = 4
        manager.save(4)
    assert steps_in(tmp_path) == [4]
    assert {name for name in checkpoint_files(tmp_path) if name.startswith("aside")} == {
        "aside-00000002.1.pt", "aside-00000003.1.pt",
    }  # fmt: skip


def test_newest_checkpoint_of_each_period_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `keep_every` a time, each period keeps its newest good checkpoint, in a later process too."""
    real = catalog.Checkpoint.header
    start = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)

    def header(self: catalog.Checkpoint, **more: Any) -> dict[str, Any]:
        aged = dataclasses.replace(self, created_at=start + self.step * dt.timedelta(minutes=20))
        return real(aged, **more)

    monkeypatch.setattr(catalog.Checkpoint, "header", header)
    run = Marked()
    for first in (1, 5):
        with manager_of(tmp_path, run, keep_last=1, keep_every=dt.timedelta(hours=1)) as manager:
            manager.restore()
            for step in range(first, first + 4):
                run.step = step
                manager.save(step)
    assert steps_in(tmp_path) == [2, 5, 8]
    with pytest.raises(ValueError, match="keep_every must be positive"):
        manager_of(tmp_path, run, keep_every=dt.timedelta(0))
