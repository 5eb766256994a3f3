"""`rollback` brings the run back to its last finite checkpoint, asks what will be different, and never loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safeckpt
from tests.faults import contents
from tests.manager.helpers import (
    asides_in,
    checkpoint_files,
    events_in,
    flip,
    manager_of,
    save_steps,
    skipping,
    step_path,
    steps_in,
    truncate,
)
from tests.training import Marked, Run


class Loader:
    """Hands out numbers, and can leave some out: what a manager needs of a loader."""

    def __init__(self) -> None:
        self.batch = 0
        self.left: list[tuple[int, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]
        self.left = [tuple(position) for position in state["left"]]

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        while self.batch < len(self):
            self.batch += 1
            if (0, self.batch - 1) not in self.left:
                yield self.batch - 1

    def last_batches(self, k: int) -> list[tuple[int, int]]:
        return [(0, batch) for batch in range(max(0, self.batch - k), self.batch)]

    def leave_out(self, positions: list[tuple[int, int]]) -> None:
        self.left = [*self.left, *positions]


def test_poisoned_run_comes_back_whole(tmp_path: Path) -> None:
    """After a poisoned step everything is as at the last checkpoint, gradients are None, and the run goes on finite."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(4)
        saved = manager.save(4)
        expected = run.state
        straight = run.steps(6)
        manager.restore()
        assert run.step(poison=True) == math.inf
        assert all(parameter.isnan().all() for parameter in run.model.parameters())
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(5)
        assert manager.rollback(changed=True) == saved
        assert manager.step == 4
        assert all(parameter.grad is None for parameter in run.model.parameters())
        assert {**run.state, "model grad": None} == {**expected, "model grad": None}
        assert run.steps(6) == straight
        manager.save(10)
    assert steps_in(tmp_path) == [4, 10]


def test_rollback_is_on_record(tmp_path: Path) -> None:
    """The event says from which step to which, why, and what is different now."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        manager.save(2)
        with pytest.raises(safeckpt.NonFiniteError):
            manager.end_step(7, loss=math.inf)
        manager.rollback(changed=True)
        run.step(poison=True)
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(8)
        manager.rollback()
        manager.rollback()
    events = [event for event in events_in(tmp_path) if event["kind"] in ("refused", "rolled_back")]
    assert [event["kind"] for event in events] == ["refused", "rolled_back"] * 2 + ["rolled_back"]
    first, second, third = events_in(tmp_path, "rolled_back")
    assert (first["step"], first["failed_step"], first["changed"]) == (2, 7, True)
    assert first["why"] == "loss = inf"
    assert (second["step"], second["failed_step"], second["changed"]) == (2, 8, False)
    assert "model.0.weight: 128 NaN" in second["why"]
    assert (third["failed_step"], third["why"]) == (3, "no save or step was refused")
    assert events_in(tmp_path, "refused")[0]["loss"] == "inf"


def test_loader_is_rewound_and_leaves_out_the_failing_batch(tmp_path: Path) -> None:
    """With `skip_batches` the batches handed out last are left out, the earlier ones come again, inside the loop."""
    run, loader = Marked(), Loader()
    run.components["loader"] = loader
    seen = []
    with manager_of(tmp_path, run, save_every=4) as manager:
        for number, batch in enumerate(loader):
            seen.append(batch)
            if batch == 6:
                with pytest.raises(safeckpt.NonFiniteError, match=r"rollback\(skip_batches=1\)"):
                    manager.end_step(manager.step + 1, loss=math.nan)
                checkpoint = manager.rollback(skip_batches=1)
                assert checkpoint.step == 4
            else:
                manager.end_step(manager.step + 1, loss=0.5)
            if number == 9:
                break
    assert seen == [0, 1, 2, 3, 4, 5, 6, 4, 5, 7]
    (event,) = events_in(tmp_path, "rolled_back")
    assert event["left_out"] == {"loader": [[0, 6]]}
    assert (event["failed_step"], event["step"]) == (7, 4)


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True])
def test_number_of_batches_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    """`skip_batches` is a number from 0; anything else is an error and nothing is changed."""
    run = Marked()
    run.components["loader"] = Loader()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.step = 2
        with pytest.raises((TypeError, ValueError), match="skip_batches must be an int, 0 or more"):
            manager.rollback(skip_batches=value)
        assert run.step == 2


def test_skipping_without_a_loader_that_can_is_refused(tmp_path: Path) -> None:
    """Without a loader among the components there are no batches to leave out: an error, nothing is changed."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.step = 2
        before = contents(tmp_path)
        with pytest.raises(ValueError, match="ResumableLoader"):
            manager.rollback(skip_batches=1)
        assert run.step == 2
        assert contents(tmp_path) == before


def test_nothing_to_go_back_to_is_an_error(tmp_path: Path) -> None:
    """Before the first checkpoint of this run a rollback is a CheckpointNotFoundError and changes nothing."""
    run = Marked()
    run.step = 3
    with manager_of(tmp_path / "new", run) as manager:
        with pytest.raises(safeckpt.CheckpointNotFoundError) as caught:
            manager.rollback(changed=True)
        assert caught.value.directory == str(tmp_path / "new")
        assert run.step == 3
    save_steps(tmp_path / "other", 1)
    before = contents(tmp_path / "other")
    with manager_of(tmp_path / "other", run) as manager, pytest.raises(safeckpt.CheckpointNotFoundError):
        manager.rollback(changed=True)  # the checkpoints of another run are not this run's past
    assert contents(tmp_path / "other") == before
    assert run.step == 3


def test_checkpoints_that_went_bad_are_set_aside(tmp_path: Path) -> None:
    """A rollback walks over newer files that are damaged by now, and renames them so that they are never latest."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=5) as manager:
        for step in (1, 2, 3):
            run.step = step
            manager.save(step)
        flip(step_path(tmp_path, 3))
        truncate(step_path(tmp_path, 2))
        before = checkpoint_files(tmp_path)
        run.poison()
        with skipping(step_path(tmp_path, 3), step_path(tmp_path, 2)):
            checkpoint = manager.rollback(changed=True)
        assert checkpoint.step == run.step == manager.step == 1
        assert steps_in(tmp_path) == [1]
        after = checkpoint_files(tmp_path)
        assert after["aside-00000003.1.pt"] == before["step-00000003.pt"]
        assert after["aside-00000002.1.pt"] == before["step-00000002.pt"]
        passed = events_in(tmp_path, "passed_over")
        assert [event["file"] for event in passed] == ["step-00000003.pt", "step-00000002.pt"]
        run.step = 2
        assert manager.save(2) == manager.latest()
    assert steps_in(tmp_path) == [1, 2]


def test_rollback_after_a_rewind_stays_on_the_new_timeline(tmp_path: Path) -> None:
    """Checkpoints above a restored older step are not come back to."""
    save_steps(tmp_path, 1, 2, 3)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.restore(1)
        run.poison()
        assert manager.rollback(changed=True).step == run.step == 1
        assert steps_in(tmp_path) == [1]
        assert asides_in(tmp_path) == [(2, 1), (3, 1)]


def test_all_checkpoints_gone_is_an_error(tmp_path: Path) -> None:
    """Where every file was deleted or damaged meanwhile the rollback fails and changes no object."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        truncate(step_path(tmp_path, 1))
        run.step = 5
        with skipping(step_path(tmp_path, 1)), pytest.raises(safeckpt.NoGoodCheckpointError):
            manager.rollback(changed=True)
        step_path(tmp_path, 1).unlink()
        with pytest.raises(safeckpt.CheckpointNotFoundError):
            manager.rollback(changed=True)
        assert run.step == 5
        manager.save(5)


# -- loops -----------------------------------------------------------------------------------------------------------


def refuse(manager: safeckpt.CheckpointManager, step: int) -> None:
    with pytest.raises(safeckpt.NonFiniteError):
        manager.end_step(step, loss=math.nan)


def test_same_step_that_fails_again_unchanged_is_a_loop(tmp_path: Path) -> None:
    """After a rollback that changed nothing the same failure raises, and says what would help; that then works."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        refuse(manager, 4)
        manager.rollback()
        refuse(manager, 4)
        run.step = 3
        before = contents(tmp_path)
        with pytest.raises(safeckpt.RollbackLoopError, match="changed nothing") as caught:
            manager.rollback()
        assert (caught.value.step, caught.value.attempts) == (4, 1)
        assert caught.value.path == str(tmp_path)
        assert "skip_batches=1" in str(caught.value)
        assert contents(tmp_path) == before
        assert run.step == 3
        assert manager.rollback(changed=True).step == 1
        assert run.step == 0


def test_another_step_that_fails_is_no_loop(tmp_path: Path) -> None:
    """A failure at another step may be gone back from once more without a change."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.save(1)
        for step in (4, 3):
            refuse(manager, step)
            manager.rollback()
        refuse(manager, 4)
        with pytest.raises(safeckpt.RollbackLoopError):
            manager.rollback()


def test_number_of_rollbacks_is_bounded_also_with_changes(tmp_path: Path) -> None:
    """However much is changed, more than `max_rollbacks` without a new checkpoint raise; a checkpoint starts anew."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.save(1)
        for round_ in range(2):
            for step in (4, 5):
                refuse(manager, step)
                manager.rollback(changed=True, max_rollbacks=2)
            refuse(manager, 6)
            with pytest.raises(safeckpt.RollbackLoopError, match="max_rollbacks=2") as caught:
                manager.rollback(changed=True, max_rollbacks=2)
            assert caught.value.attempts == 2
            manager.save(2 + round_)


def test_run_that_always_fails_ends(tmp_path: Path) -> None:
    """A loop that rolls back on every error, without looking, comes to an end by itself."""
    run = Marked()
    rollbacks = 0
    with manager_of(tmp_path, run, save_every=2) as manager, pytest.raises(safeckpt.RollbackLoopError):  # noqa: PT012
        for _ in range(1000):
            step = manager.step + 1
            try:
                manager.end_step(step, loss=math.nan if step == 5 else 0.5)
            except safeckpt.NonFiniteError:
                manager.rollback()
                rollbacks += 1
    assert rollbacks == 1


def test_failure_that_training_went_on_from_is_forgotten(tmp_path: Path) -> None:
    """The failing step of a later rollback is the one after the last that was ended, not an old refusal."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.save(1)
        refuse(manager, 2)
        for step in range(2, 6):
            manager.end_step(step, loss=0.5)
        manager.rollback(changed=True)
    (event,) = events_in(tmp_path, "rolled_back")
    assert (event["failed_step"], event["why"]) == (6, "no save or step was refused")


# -- what else has to be said ----------------------------------------------------------------------------------------


def test_lowered_learning_rate_that_is_undone_is_a_warning(tmp_path: Path) -> None:
    """A learning rate lowered before the rollback is the file's again afterwards, and the caller is told so."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
        optimizer.param_groups[0]["lr"] = 0.01
        with pytest.warns(
            safeckpt.HyperparameterReplacedWarning, match=r"optimizer\.lr.*0\.01.*0\.1.*\nSet them again"
        ):
            manager.rollback(changed=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
    (event,) = events_in(tmp_path, "rolled_back")
    assert len(event["replaced"]) == 1


def test_bad_gradients_between_micro_steps_are_refused(tmp_path: Path) -> None:
    """Gradients that the next step will use are part of the state: NaN in them refuses the save, by name."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1)
        model(torch.tensor([[math.inf, 1.0]])).sum().backward()
        with pytest.raises(safeckpt.NonFiniteError) as caught:
            manager.save(2)
        assert [tensor.name for tensor in caught.value.tensors] == ["model.weight.grad"]
        manager.rollback(changed=True)
        assert model.weight.grad is None
        manager.save(2)
