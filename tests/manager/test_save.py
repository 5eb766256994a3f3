"""`save` commits a finite, whole checkpoint of a higher step, or changes nothing and says what to do."""

from __future__ import annotations

import errno
import json
import math
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safeckpt
from safeckpt.store import names
from tests.comparing import bits
from tests.faults import Fault, Interrupt, Recorder, contents, intercept, names_in
from tests.manager.helpers import (
    checkpoint_files,
    events_in,
    manager_of,
    save_steps,
    step_path,
    steps_in,
    temps_in,
    truncate,
)
from tests.training import Marked, Run

# -- the file --------------------------------------------------------------------------------------------------------


def test_file_is_an_ordinary_torch_file(tmp_path: Path) -> None:
    """Plain torch reads a checkpoint: the components under their names, the library's own data under one key."""
    run = Run()
    run.steps(2)
    with manager_of(tmp_path / "deep" / "er", run) as manager:
        path = manager.save(2, loss=0.5).path
    loaded = torch.load(path, weights_only=True)
    assert list(loaded) == ["model", "optimizer", "scheduler", "counters", "safeckpt"]
    assert bits(loaded["model"]) == bits(run.model.state_dict())
    assert loaded["counters"] == {"steps": 2}
    assert not any(value.requires_grad for value in loaded["model"].values())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert safeckpt.verify(path).self_proving
    run.model.load_state_dict(loaded["model"])


def test_bytes_depend_on_state_and_time_only(tmp_path: Path) -> None:
    """Two files of the same state are of one size, and differ in nothing but the run's name and the time."""
    run = Run()
    run.steps(1)
    for name in ("a", "b"):
        with manager_of(tmp_path / name, run) as manager:
            manager.save(1)
    one, other = (step_path(tmp_path / name, 1) for name in ("a", "b"))
    assert one.stat().st_size == other.stat().st_size
    assert bits(safeckpt.load(one)) == bits(safeckpt.load(other))


def test_save_changes_nothing(tmp_path: Path) -> None:
    """A save leaves weights, gradients, moments, modes and random streams as they were."""
    run = Run()
    run.steps(2)
    run.model[1].eval()
    before = run.state
    with manager_of(tmp_path, run) as manager:
        manager.save(2)
        assert run.state == before


def test_saved_state_does_not_follow_the_live_one(tmp_path: Path) -> None:
    """Two saves hold two states, and what is saved stays when training goes on."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        for step in (1, 2):
            run.step = step
            manager.save(step)
        run.step = 3
        values = [safeckpt.load(step_path(tmp_path, step))["model"]["value"].tolist() for step in (1, 2)]
    assert values == [[1.0] * 3, [2.0] * 3]


def test_first_write_makes_the_directory(tmp_path: Path) -> None:
    """Neither building a manager nor a refused save makes the directory; the first save does, with its parents."""
    run = Marked()
    path = tmp_path / "runs" / "one"
    with manager_of(path, run) as manager:
        assert manager.directory == path
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(1, loss=math.nan)
        assert names_in(tmp_path) == []
        manager.save(1)
    assert steps_in(path) == [1]


def test_relative_directory_is_fixed_when_the_manager_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the working directory moves nothing."""
    monkeypatch.chdir(tmp_path)
    with manager_of(Path("runs"), Marked()) as manager:
        manager.save(1)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(2)
    assert steps_in(tmp_path / "runs") == [1, 2]


# -- steps -----------------------------------------------------------------------------------------------------------


def test_steps_only_rise(tmp_path: Path) -> None:
    """The last saved step with a different state is a StepExistsError, a lower one a ValueError; nothing is written."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(0)
        manager.save(5)
        before = contents(tmp_path)
        run.step = 6
        with pytest.raises(safeckpt.StepExistsError) as caught:
            manager.save(5)
        assert caught.value.step == 5
        assert caught.value.path == str(step_path(tmp_path, 5))
        assert caught.value.errno == errno.EEXIST
        assert isinstance(caught.value, FileExistsError)
        for step in (4, 0):
            with pytest.raises(ValueError, match=f"step {step} is lower than step 5"):
                manager.save(step)
        assert contents(tmp_path) == before
        assert manager.step == 5
        manager.save(6)
    assert steps_in(tmp_path) == [0, 5, 6]


def test_restored_step_counts_as_saved(tmp_path: Path) -> None:
    """After a restore its step exists, with the state that was restored, and lower ones are refused."""
    save_steps(tmp_path, 3, 7)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        restored = manager.restore()
        assert manager.save(7) == restored
        run.step = 8
        with pytest.raises(safeckpt.StepExistsError):
            manager.save(7)
        with pytest.raises(ValueError, match="step 5 is lower than step 7"):
            manager.save(5)
        manager.save(8)


@pytest.mark.parametrize("way", ["saved", "saved in the background", "restored"])
def test_newest_step_whose_file_was_deleted_is_saved_anew(tmp_path: Path, way: str) -> None:
    """There is no checkpoint to compare the state with, and nothing that a save could overwrite."""
    save_steps(tmp_path, 1)
    run = Marked()
    with manager_of(tmp_path, run, async_save=way == "saved in the background") as manager:
        manager.restore()
        if way != "restored":
            run.step = 2
            manager.save(2)
            manager.wait()
        step_path(tmp_path, manager.step).unlink()
        saved = manager.save(manager.step, metrics={"accuracy": 0.5})
        manager.wait()
        assert manager.latest() == saved
    again = Marked()
    with manager_of(tmp_path, again) as manager:
        manager.restore()
    assert again.step == run.step


def test_newest_step_whose_file_was_damaged_is_not_called_different(tmp_path: Path) -> None:
    """It is left as it is, and the error says what it is."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(5)
        truncate(step_path(tmp_path, 5))
        before = contents(tmp_path)
        with pytest.raises(safeckpt.DamagedCheckpointError):
            manager.save(5)
        assert contents(tmp_path) == before


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4)])
def test_numpy_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    """A NumPy integer is taken as the int that it is."""
    with manager_of(tmp_path, Marked()) as manager:
        assert type(manager.save(step).step) is int
        assert manager.step == 4


def test_step_of_any_size_is_saved_and_found(tmp_path: Path) -> None:
    """A step of more than eight digits is saved, listed and restored."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(10**15)
    with manager_of(tmp_path, run) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 10**15


# -- the guard -------------------------------------------------------------------------------------------------------


def check_refusal(manager: safeckpt.CheckpointManager, path: Path, step: int, **arguments: Any) -> Any:
    """Check that a save is refused, changes no checkpoint and is an event; return the error."""
    before, event_count = checkpoint_files(path), len(events_in(path, "refused"))
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        manager.save(step, **arguments)
    error = caught.value
    assert error.step == step
    assert checkpoint_files(path) == before
    refused = events_in(path, "refused")[event_count:]
    assert [event["step"] for event in refused] == [step]
    again = pickle.loads(pickle.dumps(error))
    assert (again.step, again.tensors, str(again)) == (error.step, error.tensors, str(error))
    assert bits(again.loss) == bits(error.loss)
    return error


def test_bad_tensor_is_refused_and_named(tmp_path: Path) -> None:
    """A NaN in a buffer refuses the save; the error names tensor, counts and place, and the checkpoint that is good."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.poison()
        error = check_refusal(manager, tmp_path, 2)
        assert error.loss is None
        assert [str(tensor) for tensor in error.tensors] == ["model.value: 1 NaN, 0 Inf of 3 elements, first at [1]"]
        assert "Step 2 was not saved" in str(error)
        assert str(step_path(tmp_path, 1)) in str(error)
        assert "manager.rollback(changed=True)" in str(error)
        assert manager.step == 1
        run.step = 2
        manager.save(2)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "loss", [math.nan, torch.tensor(math.inf), np.float32("-inf"), {"a": math.nan}, [1.0, math.inf]]
)
def test_bad_loss_is_refused_and_kept_in_the_error(tmp_path: Path, loss: Any) -> None:
    """A loss that is not finite refuses the save; the error keeps it as Python numbers."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.save(1)
        error = check_refusal(manager, tmp_path, 2, loss=loss)
        assert error.tensors == ()
        assert "loss = " in str(error)
        numbers = error.loss
        while isinstance(numbers, dict | list):
            numbers = list(numbers.values())[-1] if isinstance(numbers, dict) else numbers[-1]
        assert type(numbers) is float
        assert not math.isfinite(numbers)
        manager.save(2, loss=0.5)


def test_bad_loss_and_bad_weights_are_both_reported(tmp_path: Path) -> None:
    """After a poisoned step the error has the loss, every bad parameter and every bad moment."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(3)
        manager.save(3)
        loss = run.step(poison=True)
        error = check_refusal(manager, tmp_path, 4, loss=loss)
    assert error.loss == math.inf
    found = {tensor.name for tensor in error.tensors}
    assert {"model.0.weight", "model.4.bias", "optimizer.model.0.weight.exp_avg"} <= found
    assert f"and {len(found) - 5} more" in str(error)


def test_first_refusal_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    """Before the first save the text of a refusal promises no checkpoint."""
    with manager_of(tmp_path, Marked()) as manager:
        error = check_refusal(manager, tmp_path, 1, loss=math.nan)
    assert "no checkpoint yet" in str(error)
    assert "rollback" not in str(error)


def test_refusal_in_the_directory_of_another_run_leaves_no_trace(tmp_path: Path) -> None:
    """A manager that has no business in a directory does not write its refusals into that run's history."""
    save_steps(tmp_path, 1)
    before = contents(tmp_path)
    with manager_of(tmp_path, Marked()) as manager, pytest.raises(safeckpt.NonFiniteError):
        manager.save(2, loss=math.nan)
    assert contents(tmp_path) == before


def test_old_infinity_passes_and_is_on_record(tmp_path: Path) -> None:
    """An infinite mask that was there when the manager was built passes, and the file says so; a new one does not."""
    run = Marked()
    run.weight.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    with manager_of(tmp_path, run) as manager:
        path = manager.save(1).path
        with safeckpt.file.open_file(path) as file:
            header = file.header()
        assert header is not None
        assert header["guard"]["infinite"] == ["model.mask"]
        run.weight.mask[0] = math.inf
        error = check_refusal(manager, tmp_path, 2)
        assert [tensor.name for tensor in error.tensors] == ["model.mask"]
    fresh = Marked()
    fresh.weight.register_buffer("mask", torch.zeros(2))
    with manager_of(tmp_path, fresh) as manager:
        restored = manager.restore()
    assert restored is not None
    assert fresh.weight.mask.tolist() == [0.0, -math.inf]


def test_patterns_of_the_guard_let_a_tensor_pass(tmp_path: Path) -> None:
    """`allow_nonfinite` lets named tensors pass at the save and at every later restore."""
    run = Marked()
    guard = safeckpt.Guard(allow_nonfinite=("model.val*",))
    with manager_of(tmp_path, run, guard=guard) as manager:
        run.poison()
        manager.save(1)
    with manager_of(tmp_path, Marked()) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 1


# -- what cannot be saved --------------------------------------------------------------------------------------------


def test_lambda_in_the_state_is_refused_before_the_disk_is_touched(tmp_path: Path) -> None:
    """A value that could not be read back is refused with its key path; no file changes and the next save works."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.components["counters"]["schedule"] = [lambda step: step]
        before = contents(tmp_path)
        recorder = Recorder()
        with intercept(recorder), pytest.raises(safeckpt.UnsavableStateError) as caught:
            manager.save(2)
        assert "['counters']['schedule'][0]" in caught.value.location
        assert "function" in caught.value.type_name
        assert not {"create", "write", "replace", "unlink"} & set(recorder.kinds)
        assert contents(tmp_path) == before
        del run.components["counters"]["schedule"]
        manager.save(2)


# -- the directory of another run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restored", "text"), [("nothing", r"2 checkpoint\(s\) of another run"), ("part", "restored only model from")]
)
def test_directory_of_another_run_is_not_written_into(tmp_path: Path, restored: str, text: str) -> None:
    """Checkpoints that this manager did not restore, or only a part of, are not mixed with its own."""
    save_steps(tmp_path, 1, 2)
    run = Marked()
    before = contents(tmp_path)
    with manager_of(tmp_path, run) as manager:
        if restored == "part":
            manager.restore(only=("model",))
        with pytest.raises(safeckpt.DirectoryInUseError, match=text) as caught:
            manager.save(3)
        assert (caught.value.directory, caught.value.steps) == (str(tmp_path), (1, 2))
        assert caught.value.restored_only == (("model",) if restored == "part" else None)
        assert caught.value.errno == errno.EEXIST
        assert isinstance(caught.value, FileExistsError)
        assert contents(tmp_path) == before
        manager.restore()
        manager.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_damaged_file_of_another_run_counts(tmp_path: Path, content: bytes) -> None:
    """A file with a checkpoint's name that is none still says that the directory is somebody's."""
    step_path(tmp_path, 4).write_bytes(content)
    with manager_of(tmp_path, Marked()) as manager, pytest.raises(safeckpt.DirectoryInUseError) as caught:
        manager.save(5)
    assert caught.value.steps == (4,)
    assert contents(tmp_path) == {"step-00000004.pt": content}


def test_checkpoint_that_appears_during_the_run_is_a_stranger(tmp_path: Path) -> None:
    """A file that somebody else puts into the directory is neither overwritten nor taken for this run's."""
    save_steps(tmp_path / "donor", 2)
    run = Marked()
    with manager_of(tmp_path / "mine", run) as manager:
        manager.save(1)
        data = step_path(tmp_path / "donor", 2).read_bytes()
        step_path(tmp_path / "mine", 2).write_bytes(data)
        for step in (2, 3):
            with pytest.raises(safeckpt.DirectoryInUseError) as caught:
                manager.save(step)
            assert caught.value.steps == (2,)
        assert step_path(tmp_path / "mine", 2).read_bytes() == data
        step_path(tmp_path / "mine", 2).unlink()
        manager.save(2)


# -- errors of the disk ----------------------------------------------------------------------------------------------


def test_unknown_durability_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    """When the directory cannot be synced the file is there, nothing was pruned, and the next save works."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        manager.save(1)
        run.step = 2
        fault = Fault(1, errno.EIO, {"sync_directory"})
        with intercept(fault), pytest.raises(safeckpt.DurabilityUnknownError) as caught:
            manager.save(2)
        assert fault.fired is not None
        assert (caught.value.step, caught.value.errno) == (2, errno.EIO)
        assert steps_in(tmp_path) == [1, 2]
        assert manager.step == 2
        assert manager.save(2).step == 2
        run.step = 3
        manager.save(3)
        assert steps_in(tmp_path) == [3]
    fresh = Marked()
    with manager_of(tmp_path, fresh) as manager:
        manager.restore()
    assert fresh.step == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_around_the_rename_leaves_a_manager_that_knows(tmp_path: Path, when: str) -> None:
    """After Ctrl-C at the rename the manager knows whether the step is saved, and goes on either way."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.step = 2
        interrupt = Interrupt(1, when, {"replace"})
        with intercept(interrupt), pytest.raises(KeyboardInterrupt):
            manager.save(2)
        assert temps_in(tmp_path) == []
        assert steps_in(tmp_path) == ([1, 2] if when == "after" else [1])
        assert manager.save(2).step == 2
        assert steps_in(tmp_path) == [1, 2]
        run.step = 3
        manager.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_file_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    """A prune that fails does not fail the save, and is made up for at the next one."""
    with manager_of(tmp_path, Marked(), keep_last=1) as manager:
        manager.save(1)
        fault = Fault(1, errno.EACCES, {"unlink"})
        with (
            intercept(fault),
            pytest.warns(safeckpt.SafeckptWarning, match=r"step-00000001\.pt .*could not be deleted"),
        ):
            manager.save(2)
        assert fault.fired is not None
        assert steps_in(tmp_path) == [1, 2]
        manager.save(3)
        assert steps_in(tmp_path) == [3]


def test_history_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    """A full disk that takes no event does not turn a save that succeeded into one that failed."""
    with manager_of(tmp_path, Marked()) as manager:
        fault = Fault(1, errno.ENOSPC, {"append"}, for_good=True)
        with intercept(fault), pytest.warns(safeckpt.SafeckptWarning, match="event 'saved'"):
            manager.save(1)
        assert fault.fired is not None
        manager.save(2)
    assert [event["step"] for event in events_in(tmp_path, "saved")] == [2]


def test_history_tells_what_happened(tmp_path: Path) -> None:
    """Every save and restore is one line of JSON with its time."""
    run = Marked()
    for steps in ((1, 2), (3,)):
        with manager_of(tmp_path, run) as manager:
            manager.restore()
            for step in steps:
                run.step = step
                manager.save(step, loss={"a": 0.5})
    events = events_in(tmp_path)
    assert [(event["kind"], event["step"]) for event in events] == [
        ("saved", 1), ("saved", 2), ("restored", 2), ("saved", 3),
    ]  # fmt: skip
    assert events[0]["loss"] == {"a": 0.5}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert json.dumps(events)


def test_partial_restore_leaves_the_other_runs_directory_as_it_is(tmp_path: Path) -> None:
    """A warm start from another run's directory writes nothing there, not even into its history."""
    save_steps(tmp_path, 1)
    before = contents(tmp_path)
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore(only=("model",))
    assert contents(tmp_path) == before


def test_directory_that_cannot_be_written_can_be_restored_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading needs no right to write: a restore from a read-only directory works, without an event."""
    save_steps(tmp_path, 1)
    before = contents(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)  # what a read-only directory answers; root may write anyway
    run = Marked()
    with manager_of(tmp_path, run) as manager, warnings.catch_warnings():
        assert manager.restore() is not None
    assert run.step == 1
    assert contents(tmp_path) == before


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closed_manager_refuses_and_still_reads(tmp_path: Path) -> None:
    """After `close`, which may be called twice, nothing is saved or restored; listing still works."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        saved = manager.save(1)
        assert isinstance(manager, safeckpt.CheckpointManager)
    manager.close()
    manager.wait()
    before = contents(tmp_path)
    for call in (lambda: manager.save(2), lambda: manager.end_step(2), manager.restore, manager.rollback):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert contents(tmp_path) == before
    assert manager.checkpoints() == (saved,)
    assert manager.latest() == saved


def test_close_gives_the_directory_back(tmp_path: Path) -> None:
    """After `close`, also one by an exception, another manager takes the directory at once."""

    def fail() -> None:
        with manager_of(tmp_path, Marked()) as manager:
            manager.save(1)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore()
        manager.save(2)
    assert not (tmp_path / names.HOLDER).exists()


# -- what happens during a save --------------------------------------------------------------------------------------


def test_nan_that_arrives_after_the_guard_is_refused_and_can_be_rolled_back(tmp_path: Path) -> None:
    """The last finite checkpoint stays, the refusal is in the history, and the run goes on from there."""
    run = Marked()

    def poison(operation: Any, call: Any) -> Any:
        if operation.kind == "create":
            run.poison()
        return call()

    with manager_of(tmp_path, run, keep_last=1) as manager:
        run.step = 1
        manager.save(1)
        before = checkpoint_files(tmp_path)
        run.step = 2
        with intercept(poison), pytest.raises(safeckpt.NonFiniteError, match="Step 2 was not saved") as caught:
            manager.save(2)
        assert [tensor.name for tensor in caught.value.tensors] == ["model.value"]
        assert "step 1 is in" in str(caught.value)
        assert checkpoint_files(tmp_path) == before
        assert [event["step"] for event in events_in(tmp_path, "refused")] == [2]
        manager.rollback(changed=True)
        assert run.step == 1
        run.step = 2
        manager.save(2)
    assert steps_in(tmp_path) == [2]


def test_nan_that_reaches_a_gradient_after_the_guard_is_refused(tmp_path: Path) -> None:
    """A gradient that the next step will use is part of the state, in what is written as well."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()

    def poison(operation: Any, call: Any) -> Any:
        if operation.kind == "create":
            model.weight.grad.fill_(float("nan"))
        return call()

    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as manager:
        with intercept(poison), pytest.raises(safeckpt.NonFiniteError) as caught:
            manager.save(1)
        assert [tensor.name for tensor in caught.value.tensors] == ["model.weight.grad"]
    assert checkpoint_files(tmp_path) == {}


def test_file_that_cannot_be_read_back_is_not_committed(tmp_path: Path) -> None:
    """Where the disk returns other bytes than were written, the checkpoint before stays."""
    run = Marked()

    def flip_the_end(operation: Any, call: Any) -> Any:
        if operation.kind == "write" and operation.data is not None and b"SAFECKPT" in operation.data:
            file, data = call.args
            return file.write(bytes([*bytes(data)[:-30], bytes(data)[-30] ^ 1, *bytes(data)[-29:]]))
        return call()

    with manager_of(tmp_path, run, keep_last=1) as manager:
        manager.save(1)
        before = checkpoint_files(tmp_path)
        with intercept(flip_the_end), pytest.raises(safeckpt.UnsavableStateError, match="cannot be read back"):
            manager.save(2)
        assert checkpoint_files(tmp_path) == before
        manager.save(2)
    assert steps_in(tmp_path) == [2]
