"""With `async_save` training goes on while a thread writes, and no promise of a synchronous save is given up."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safeckpt
from safeckpt.state import transfer
from safeckpt.state.tree import named_tensors
from tests import children
from tests.comparing import bits
from tests.faults import Fault, Interrupt, Kill, Operation, Recorder, in_child, intercept
from tests.manager.helpers import checkpoint_files, events_in, manager_of, steps_in, temps_in
from tests.training import Marked, Run, state_of


class Gate:
    """Holds the first operation of a kind on a file that is being written until it is opened.

    Attributes:
        reached: Set when the operation is about to be made.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == self.kind and operation.path.endswith(".tmp"):
            self.reached.set()
            assert self._opened.wait(120)
        return call()

    def open(self) -> None:
        self._opened.set()


@contextmanager
def gate(kind: str) -> Iterator[Gate]:
    """Hold writes in the background back while the block runs."""
    held = Gate(kind)
    with intercept(held):
        try:
            yield held
        finally:
            held.open()


class Large(Marked):
    """A state of several pieces, so that it is copied by threads and written in more than one call."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Module()
        self.large.register_buffer("value", torch.zeros(3 << 20))
        self.components = {**self.components, "large": self.large}

    def fill(self, step: int) -> None:
        self.step = step
        self.large.value.copy_(torch.arange(3 << 20)).add_(step)


def other_run() -> Run:
    """Return a run that began from other numbers."""
    return Run(seed=99)


def without_gradients(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of a run as it is after a restore."""
    return {**state, "model grad": dict.fromkeys(state["model grad"])}


def restored(path: Path, step: int, kind: Callable[[], Any]) -> Any:
    """Return the state of a checkpoint, as a new run has it afterwards."""
    run = kind()
    with manager_of(path, run) as manager:
        manager.restore(step)
    return state_of(run.components)


# -- what is in the file ---------------------------------------------------------------------------------------------


def test_saves_in_a_row_hold_the_state_of_their_own_step(tmp_path: Path) -> None:
    """Each of several saves that share one buffer equals the live state at its call, and no other."""
    run = Run()
    states = {}
    with manager_of(tmp_path, run, async_save=True, keep_last=5) as manager:
        for step in range(1, 4):
            run.step()
            states[step] = run.state
            manager.save(step)
    assert len({str(state) for state in states.values()}) == 3
    for step, state in states.items():
        assert restored(tmp_path, step, other_run) == without_gradients(state)


def test_tensors_changed_before_the_write_begins_are_not_in_the_file(tmp_path: Path) -> None:
    """Every live tensor is overwritten before the first byte is on the disk, and the file has none of it."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager, gate("create") as held:
        run.fill(1)
        expected = state_of(run.components)
        manager.save(1)
        assert held.reached.wait(60)
        run.fill(7)
        run.counters["step"] = 7
        held.open()
        manager.wait()
    assert restored(tmp_path, 1, Large) == expected


def test_copy_shares_no_memory_with_live_tensors(tmp_path: Path) -> None:
    """What the thread writes from is memory of its own, for every tensor of every component."""
    run = Run()
    run.steps(2)
    live = {
        tensor.untyped_storage().data_ptr()
        for name in ("model", "optimizer")
        for _, tensor in named_tensors(run.components[name].state_dict())
    }
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.save(2)
        assert manager._saver._memory is not None
        copies = [tensor for _, tensor in named_tensors(manager._saver._memory[1])]
        assert len(copies) >= len(live)
        assert live.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in copies)


def test_file_has_the_bytes_of_a_synchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of saving give the same payload, byte for byte, tied and overlapping tensors included."""
    shared = torch.arange(600_000.0)
    model = nn.Linear(8, 8)
    model.register_buffer("low", shared[:400_000])
    model.register_buffer("high", shared[200_000:])
    model.register_buffer("gaps", shared[::2])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    files = []
    for name, async_save in (("now", False), ("later", True)):
        with safeckpt.CheckpointManager(
            tmp_path / name, {"model": model, "optimizer": optimizer}, async_save=async_save
        ) as manager:
            path = manager.save(1).path
        files.append(path.read_bytes())
    now, later = (data[data.index(b"data.pkl") : data.index(b"data.pkl") + 4096] for data in files)
    assert len(files[0]) == len(files[1])
    assert now == later


def test_state_that_changes_its_shape_is_copied_into_new_memory(tmp_path: Path) -> None:
    """The optimizer has no moments at the first save and has them at the second; both are whole."""
    run = Run()
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.save(0)
        run.step()
        expected = run.state
        manager.save(1)
    assert restored(tmp_path, 1, other_run)["optimizer"] == expected["optimizer"]
    assert restored(tmp_path, 0, other_run)["optimizer"] == bits(other_run().optimizer.state_dict())


def test_second_save_into_the_same_memory_allocates_none(tmp_path: Path) -> None:
    """A state that keeps its shape is copied into the memory of the copy before."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager:
        places = []
        for step in (1, 2):
            run.fill(step)
            manager.save(step)
            assert manager._saver._memory is not None
            places.append([tensor.data_ptr() for _, tensor in named_tensors(manager._saver._memory[1]["large"])])
    assert places[0] == places[1]


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.save(2),
        lambda manager: manager.wait(),
        lambda manager: manager.close(),
        lambda manager: manager.restore(),
        lambda manager: manager.rollback(changed=True),
    ],
    ids=["save", "wait", "close", "restore", "rollback"],
)
def test_failure_in_the_background_is_logged_at_once_and_raised_by_the_next_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Callable[[safeckpt.CheckpointManager], object]
) -> None:
    """A failed write is in the log as soon as it has failed, and comes out of whatever is called next, with errno."""
    run = Marked()
    manager = manager_of(tmp_path, run, async_save=True)
    manager.save(1)
    manager.wait()
    before = checkpoint_files(tmp_path)
    fault = Fault(1, errno.EIO, {"sync"})
    with intercept(fault), caplog.at_level(logging.ERROR, "safeckpt"):
        manager.save(3)
        manager._saver._background._thread.join()  # type: ignore[union-attr]  # there is one
        assert "the save of step 3 failed in the background" in caplog.text
        with pytest.raises(OSError, match="Input/output error") as caught:
            call(manager)
    assert fault.fired is not None
    assert caught.value.errno == errno.EIO
    assert checkpoint_files(tmp_path) == before
    manager.close()
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.restore()
        manager.save(4)
    assert steps_in(tmp_path) == [1, 4]


def test_step_whose_write_failed_can_be_saved_again(tmp_path: Path) -> None:
    """A save that was not committed leaves its step free."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        with intercept(Fault(1, errno.ENOSPC, {"sync"})):
            run.step = 1
            manager.save(1)
            with pytest.raises(OSError, match="No space"):
                manager.wait()
        assert checkpoint_files(tmp_path) == {}
        manager.save(1)
    assert restored(tmp_path, 1, Marked) == state_of(run.components)


def test_nothing_is_pruned_before_the_new_file_is_durable(tmp_path: Path) -> None:
    """The old checkpoint is there as long as the new one is not synced under its name, and goes afterwards."""
    run = Marked()
    recorder = Recorder()
    with manager_of(tmp_path, run, async_save=True, keep_last=1) as manager:
        manager.save(1)
        manager.wait()
        with gate("sync") as held:
            manager.save(2)
            assert held.reached.wait(60)
            assert steps_in(tmp_path) == [1]
            held.open()
            manager.wait()
        assert steps_in(tmp_path) == [2]
        with intercept(recorder):
            manager.save(3)
            manager.wait()
    order = [operation.kind for operation in recorder.operations if operation.kind != "append"]
    assert order.index("sync") < order.index("replace") < order.index("sync_directory") < order.index("unlink")


def test_save_during_a_write_waits_and_says_so(tmp_path: Path) -> None:
    """At most one write is in flight: a second save waits for the first to be committed, and the history has it."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager, gate("sync") as held:
        manager.save(1)
        assert held.reached.wait(60)

        def open_when_waited_for() -> None:
            while not events_in(tmp_path, "waited"):
                time.sleep(0.001)
            held.open()

        helper = threading.Thread(target=open_when_waited_for)
        helper.start()
        manager.save(2)
        helper.join()
        manager.wait()
    assert [event["kind"] for event in events_in(tmp_path, "waited", "saved")] == ["waited", "saved", "saved"]
    assert steps_in(tmp_path) == [1, 2]


# -- the end of a process --------------------------------------------------------------------------------------------

_SCRIPT = """
import sys, threading, torch, safeckpt
from safeckpt.store import disk

sync = disk.sync

def late(file):
    threading.main_thread().join()  # goes on once the interpreter has begun to exit
    {then}

disk.sync = late
model = torch.nn.Linear(1024, 2048).requires_grad_(False)
manager = safeckpt.CheckpointManager(sys.argv[1], {{"model": model}}, async_save=True)
manager.save(1)
print("end of the script")
"""


def _script(path: Path, then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT.format(then=then), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_interpreter_that_exits_finishes_the_write(tmp_path: Path) -> None:
    """A script that ends without `wait` or `close` leaves the checkpoint whole and good."""
    done = _script(tmp_path, "sync(file)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the script\n", "")
    found = safeckpt.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert torch.load(found.path)["model"]["weight"].shape == (2048, 1024)
    assert temps_in(tmp_path) == []


_AT_EXIT = """
import atexit, sys, torch, safeckpt

model = torch.nn.Linear(4, 4)
manager = safeckpt.CheckpointManager(sys.argv[1], {"model": model}, async_save=True)
atexit.register(lambda: manager.save(1))
"""


@pytest.mark.slow
def test_save_in_an_exit_handler_is_written(tmp_path: Path) -> None:
    """A save that an `atexit` handler begins is whole on disk, though no thread can be started any more."""
    command = [sys.executable, "-W", "ignore", "-c", _AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = safeckpt.latest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.slow
def test_write_that_fails_while_the_interpreter_exits_is_reported(tmp_path: Path) -> None:
    """Nobody can be handed the error any more, so it is on the standard error stream; no part of a file is left."""
    done = _script(tmp_path, "raise OSError(5, 'Input/output error')")
    assert done.stdout == "end of the script\n"
    assert "the save of step 1 failed in the background" in done.stderr
    assert "Input/output error" in done.stderr
    assert checkpoint_files(tmp_path) == {}


def _save_two(connection: Any, path: Path) -> None:
    run = Large()
    manager = manager_of(path, run, async_save=True)
    run.fill(1)
    manager.save(1)
    manager.wait()
    with gate("sync") as held:
        run.fill(2)
        manager.save(2)
        assert held.reached.wait(60)
        connection.send("writing")
        connection.recv()


def test_kill_during_the_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """SIGKILL while a thread writes: the earlier checkpoint restores, and the next save sweeps what was left."""
    with children.Child(_save_two, tmp_path) as child:
        assert child.receive() == "writing"
        child.kill()
    assert steps_in(tmp_path) == [1]
    assert len(temps_in(tmp_path)) == 1
    run, expected = Large(), Large()
    expected.fill(1)
    with manager_of(tmp_path, run) as manager:
        assert manager.restore() is not None
        assert state_of(run.components) == state_of(expected.components)
        manager.save(3)
    assert temps_in(tmp_path) == []


def _save_and_die(path: Path, number: int, when: str) -> None:
    run = Marked()
    with manager_of(path, run, async_save=True, keep_last=1) as manager:
        manager.restore()
        with intercept(Kill(number, when)):
            run.step = 2
            manager.save(2)
            manager.wait()


def test_kill_at_any_operation_of_the_write_leaves_one_whole_checkpoint(memory_path: Path) -> None:
    """SIGKILL before each operation of an asynchronous save: the old checkpoint is restored or the new one."""
    found = []
    for number in range(1, 100):
        path = memory_path / str(number)
        with manager_of(path, Marked()) as manager:
            manager.save(1)
        ended = children.run(_save_and_die, path, number, "before")
        run = Marked()
        with manager_of(path, run) as manager:
            checkpoint = manager.restore()
            assert checkpoint is not None
            assert run.step in (0, 2)
            found.append(checkpoint.step)
            manager.save(5)
        assert temps_in(path) == []
        if ended.signal is None:
            break
    assert ended.error is None
    assert found == sorted(found)
    assert {1, 2} == set(found)


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_interrupted_wait_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the main thread waits is a KeyboardInterrupt there; the write goes on and is committed."""
    main = threading.get_ident()
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager, gate("sync") as held:
        manager.save(1)

        def interrupt() -> None:
            assert held.reached.wait(60)
            signal.pthread_kill(main, signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come between two lines
            helper.start()
            manager.wait()
            helper.join()
        helper.join()
        assert steps_in(tmp_path) == []
        held.open()
        manager.wait()
    assert steps_in(tmp_path) == [1]


def test_interrupt_in_the_writing_thread_is_raised_by_the_next_call(tmp_path: Path) -> None:
    """An interrupt at any operation of the write leaves no part of a file and is not lost."""
    for number in range(1, 12):
        path = tmp_path / str(number)
        run = Marked()
        with manager_of(path, run, async_save=True) as manager:
            manager.save(1)
            manager.wait()
            fault = Interrupt(number, "before", {"create", "claim", "write", "sync", "replace"})
            with intercept(fault):
                manager.save(2)
                if manager._saver._background._thread is not None:
                    manager._saver._background._thread.join()
            if fault.fired is None:
                assert number > 6
                return
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
            assert (steps_in(path), temps_in(path)) == ([1], [])
            manager.save(3)
        assert steps_in(path) == [1, 3]
    pytest.fail("the write has more operations than this test knows")


def test_interrupted_copy_is_never_rolled_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the copy: nothing is written, and a rollback reads the disk, not half of a copy."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.fill(1)
        manager.save(1)
        manager.wait()
        expected = state_of(run.components)
        copied = iter(range(100))

        def interrupted(into: Any, source: Any) -> None:
            if next(copied) == 1:
                raise KeyboardInterrupt
            np.copyto(into, source)

        run.fill(2)
        with monkeypatch.context() as patch:
            patch.setattr(transfer, "np", _Numpy(interrupted))
            with pytest.raises(KeyboardInterrupt):
                manager.save(2)
        assert steps_in(tmp_path) == [1]
        assert manager.rollback(changed=True).step == 1
        assert state_of(run.components) == expected
        assert events_in(tmp_path, "rolled_back")[-1]["source"] == "disk"
        manager.save(3)
    assert steps_in(tmp_path) == [1, 3]


class _Numpy:
    """NumPy with another `copyto`."""

    def __init__(self, copyto: Callable[[Any, Any], None]) -> None:
        self.copyto = copyto


# -- forks -----------------------------------------------------------------------------------------------------------


def _save_in_child(manager: safeckpt.CheckpointManager) -> None:
    manager.wait()  # the thread is the parent's: there is nothing to wait for
    manager.save(9)


def test_fork_during_the_write_owns_nothing_and_harms_nothing(tmp_path: Path) -> None:
    """A child forked while a thread writes is refused the directory; the parent's checkpoint is good."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager, gate("write") as held:
        run.fill(1)
        expected = state_of(run.components)
        manager.save(1)
        assert held.reached.wait(60)
        ended = in_child(lambda: _save_in_child(manager))
        assert isinstance(ended.error, safeckpt.DirectoryLockedError)
        assert in_child(os.getpid).value != os.getpid()
        held.open()
        manager.wait()
    assert (steps_in(tmp_path), temps_in(tmp_path)) == ([1], [])
    assert restored(tmp_path, 1, Large) == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_loader_workers_started_during_the_write_work(tmp_path: Path) -> None:
    """Worker processes that are forked while a thread writes hand out their batches; the checkpoint is good."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager, gate("write") as held:
        run.fill(1)
        manager.save(1)
        assert held.reached.wait(60)
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=1, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        held.open()
        manager.wait()
    assert safeckpt.verify(tmp_path / "step-00000001.pt").self_proving


# -- rollback from memory --------------------------------------------------------------------------------------------


def test_rollback_from_memory_equals_rollback_from_disk(tmp_path: Path) -> None:
    """Both give the state of the save bit for bit and the same losses afterwards; the history says which one it was."""
    run = Run()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.steps(3)
        manager.save(3)
        manager.wait()
        expected = without_gradients(run.state)
        tail = run.steps(4)
        for source in ("memory", "disk", "memory"):
            if source == "disk":
                kept, manager._saver._memory = manager._saver._memory, None
            manager.rollback(changed=True)
            assert events_in(tmp_path, "rolled_back")[-1]["source"] == source
            assert run.state == expected
            assert run.steps(4) == tail
            if source == "disk":
                manager._saver._memory = kept


def test_copy_in_memory_survives_training_after_a_rollback_from_it(tmp_path: Path) -> None:
    """What was restored from the copy is not the copy: training on does not change what the next rollback gives."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.fill(1)
        manager.save(1)
        manager.wait()
        for _ in range(2):
            run.fill(5)
            manager.rollback(changed=True)
            assert run.step == 1
            assert bits(run.large.value) == bits(torch.arange(3 << 20).float() + 1)


def test_refused_save_leaves_the_copy_of_the_good_state(tmp_path: Path) -> None:
    """The guard looks before anything is copied: after a NaN the rollback needs no disk."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.fill(1)
        manager.save(1)
        manager.wait()
        run.large.value[-1] = float("nan")
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(2)
        manager.rollback(changed=True)
        assert events_in(tmp_path, "rolled_back")[-1]["source"] == "memory"
        assert run.step == 1


def test_copy_of_a_save_that_failed_is_not_rolled_back_to(tmp_path: Path) -> None:
    """The copy is of a step that never got onto the disk, so the rollback goes to the checkpoint before it."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.step = 1
        manager.save(1)
        manager.wait()
        run.step = 2
        with intercept(Fault(1, errno.EIO, {"sync"})):
            manager.save(2)
            with pytest.raises(OSError, match="Input/output"):
                manager.wait()
        assert manager.rollback(changed=True).step == 1
        assert run.step == 1


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_device_state_is_that_of_the_call(tmp_path: Path, async_save: bool) -> None:
    """Tensors on a device are changed right after `save` returns; the file has them as they were, for the CPU."""
    run = Large()
    run.large.cuda()
    with manager_of(tmp_path, run, async_save=async_save) as manager:
        run.fill(1)
        manager.save(1)
        run.fill(2)
    loaded = torch.load(tmp_path / "step-00000001.pt")["large"]["value"]
    assert loaded.device.type == "cpu"
    assert bits(loaded) == bits(torch.arange(3 << 20).float() + 1)


@pytest.mark.gpu
def test_save_is_ordered_behind_the_stream_of_the_caller(tmp_path: Path) -> None:
    """Work queued before `save` on the stream it is called from is in the file, work queued after it is not."""
    run = Large()
    run.large.cuda()
    run.step = 1
    stream = torch.cuda.Stream()
    with manager_of(tmp_path, run, async_save=True) as manager, torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        run.large.value.fill_(1)
        manager.save(1)
        run.large.value.fill_(2)
    loaded = torch.load(tmp_path / "step-00000001.pt")["large"]["value"]
    assert loaded.unique().tolist() == [1]


@pytest.mark.gpu
def test_synchronous_save_copies_no_whole_state_to_the_host(tmp_path: Path) -> None:
    """A state on a device is staged piece by piece: the host needs less than a quarter of its size."""
    model = nn.Linear(16_384, 8_192, bias=False, device="cuda").requires_grad_(requires_grad=False)
    with safeckpt.CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.save(1)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        manager.save(2)
        assert _resident("VmHWM") - before < model.weight.nbytes / 4


@pytest.mark.gpu
def test_device_state_restores_and_rolls_back(tmp_path: Path) -> None:
    """A run on a device restores from disk and rolls back from memory to the same bits, moments on the device."""
    run = Run()
    run.model.cuda()
    run._data, run._target = run._data.cuda(), run._target.cuda()
    with manager_of(tmp_path, run, async_save=True) as manager:
        run.steps(2)
        manager.save(2)
        manager.wait()
        expected = without_gradients(run.state)
        run.steps(3)
        manager.rollback(changed=True)
        assert run.state == expected
        run.steps(3)
        manager.restore()
        assert run.state == expected
        moments = [entry["exp_avg"].device.type for entry in run.optimizer.state.values()]
        assert moments == ["cuda"] * len(moments)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@pytest.mark.parametrize("first", ["save", "end_step"])
def test_inference_mode_leaves_ordinary_memory_for_the_next_copy(tmp_path: Path, first: str) -> None:
    """Whether the first save is made inside of it does not decide what kind of tensors later ones copy into."""
    run = Large()
    with manager_of(tmp_path, run, async_save=True, save_every=100) as manager:
        with torch.inference_mode():
            if first == "end_step":
                manager.end_step(1)
            manager.save(2)
        run.fill(3)
        manager.save(3)
        manager.wait()
    again = Large()
    with manager_of(tmp_path, again) as manager:
        manager.restore()
    assert again.step == 3


def test_interrupt_of_a_write_without_a_thread_comes_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started the caller writes, and a Ctrl-C is the caller's, as in a synchronous save."""
    run = Marked()
    monkeypatch.setattr("safeckpt.run.background.start", lambda _: False)
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.save(1)
        run.step = 2
        with intercept(Interrupt(1, "before", {"sync"})), pytest.raises(KeyboardInterrupt):
            manager.save(2)
        assert steps_in(tmp_path) == [1]
        manager.wait()  # it was raised, and is not raised once more
        manager.save(2)
        manager.wait()
        assert steps_in(tmp_path) == [1, 2]
