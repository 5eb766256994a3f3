"""With `async_save="process"` another process writes, and keeps every promise that a thread keeps."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safeckpt
from safeckpt.state.tree import named_tensors
from safeckpt.system.shared_memory import shared_memory_at
from tests import children
from tests.comparing import bits
from tests.manager.helpers import checkpoint_files, manager_of, steps_in, temps_in
from tests.training import Marked, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no such process on other systems")

SECONDS = 60.0


class Large(Marked):
    """A state of several pieces; a sparse tensor and an array in it have no place in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Module()
        self.large.register_buffer("value", torch.zeros(3 << 20))
        self.large.register_buffer("small", torch.zeros(3, dtype=torch.bfloat16))
        self.large.register_buffer("none", torch.zeros(0))
        self.large.register_buffer("few", torch.eye(4).to_sparse())
        self.extra: dict[str, Any] = {"array": np.arange(5), "empty": b""}
        self.components = {**self.components, "large": self.large, "extra": self.extra}

    def fill(self, step: int) -> None:
        self.step = step
        self.large.value.copy_(torch.arange(3 << 20)).add_(step)
        self.extra["array"] = np.arange(5) + step


def process_of(manager: safeckpt.CheckpointManager) -> int:
    """Return the process that writes for a manager."""
    return manager._saver._process._child._process.pid  # type: ignore[union-attr]  # there is one


def is_there(pid: int) -> bool:
    """Return whether there is a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is another's child."""
    end = time.monotonic() + SECONDS
    while is_there(pid):
        assert time.monotonic() < end, f"process {pid} goes on"
        time.sleep(0.01)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold a process while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[safeckpt.CheckpointManager, Large]]:
    """A manager whose process has written step 1."""
    run = Large()
    with manager_of(tmp_path, run, async_save="process") as manager:
        run.fill(1)
        manager.save(1)
        manager.wait()
        yield manager, run


# -- what it writes ----------------------------------------------------------------------------------------------------


def test_file_has_the_bytes_that_a_thread_writes(tmp_path: Path) -> None:
    """Tied, overlapping, empty and sparse tensors, arrays, small and large: the same payload, byte for byte."""
    shared = torch.arange(600_000.0)
    run = Large()
    run.fill(3)
    run.large.register_buffer("low", shared[:400_000])
    run.large.register_buffer("high", shared[200_000:])
    run.large.register_buffer("gaps", shared[::2])
    files = []
    for name, async_save in (("thread", True), ("process", "process")):
        with manager_of(tmp_path / name, run, async_save=async_save) as manager:
            path = manager.save(1).path
        data = path.read_bytes()
        first = data.index(b"data.pkl")
        files.append((data[first : data.index(b".data/serialization_id")], len(data)))
        assert safeckpt.verify(path).self_proving
    assert files[0] == files[1]


def test_saves_in_a_row_hold_the_state_of_their_own_step(tmp_path: Path) -> None:
    """Each of several saves from one piece of memory equals the live state at its call; moments come in between."""
    run, states = Run(), {}
    with manager_of(tmp_path, run, async_save="process", keep_last=5) as manager:
        for step in range(4):
            states[step] = run.state
            manager.save(step)
            run.step()
    for step, state in states.items():
        again = Run(seed=99)
        with manager_of(tmp_path, again) as manager:
            manager.restore(step)
        assert again.state == {**state, "model grad": dict.fromkeys(state["model grad"])}


def test_copy_lies_in_shared_memory_that_is_used_again(saved: tuple[safeckpt.CheckpointManager, Large]) -> None:
    """Large tensors are read by the process where they were staged, and the next copy takes the same place."""
    manager, run = saved
    places = []
    for step in (2, 3):
        run.fill(step)
        manager.save(step)
        assert manager._saver._memory is not None
        (value,) = (one for name, one in named_tensors(manager._saver._memory[1]["large"]) if name == "value")
        assert shared_memory_at(value.data_ptr()) is not None
        places.append(value.data_ptr())
    assert places[0] == places[1]


def test_process_has_neither_torch_nor_the_script(saved: tuple[safeckpt.CheckpointManager, Large]) -> None:
    """It maps no library of torch, and with it none of a device."""
    maps = Path(f"/proc/{process_of(saved[0])}/maps").read_text()
    assert "numpy" in maps
    assert not [line for line in maps.splitlines() if "libtorch" in line or "cuda" in line]


def test_rollback_takes_the_copy_in_memory(saved: tuple[safeckpt.CheckpointManager, Large]) -> None:
    """The copy that the process has read is this process's as well."""
    manager, run = saved
    expected = bits(run.large.value)
    run.fill(9)
    assert manager.rollback(changed=True).step == 1
    assert bits(run.large.value) == expected


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_process_that_is_killed_is_a_failed_save_and_the_next_one_works(
    tmp_path: Path, saved: tuple[safeckpt.CheckpointManager, Large]
) -> None:
    """The error says what happened to it; nothing is left, nothing else is lost, and the next save starts another."""
    manager, run = saved
    first, before = process_of(manager), checkpoint_files(tmp_path)
    child: Any = manager._saver._process._child  # type: ignore[union-attr]  # there is one
    receive, is_asked = child.receive, threading.Event()
    child.receive = lambda: (is_asked.set(), receive())[1]
    with stopped(first):
        run.fill(2)
        manager.save(2)
        assert is_asked.wait(SECONDS)
        assert steps_in(tmp_path) == [1]
        os.kill(first, signal.SIGKILL)
        with pytest.raises(safeckpt.WritingProcessError, match=f"pid {first}. was killed by signal 9") as caught:
            manager.wait()
    assert caught.value.exit_code == -signal.SIGKILL
    assert checkpoint_files(tmp_path) == before
    manager.save(2)
    manager.wait()
    assert process_of(manager) != first
    assert steps_in(tmp_path) == [1, 2]


def test_process_that_ended_between_saves_is_replaced(saved: tuple[safeckpt.CheckpointManager, Large]) -> None:
    """It was not at work: nothing has failed."""
    manager, _ = saved
    manager._saver._process._child._process.kill()  # type: ignore[union-attr]
    manager._saver._process._child._process.wait()  # type: ignore[union-attr]
    manager.save(2)
    manager.wait()
    assert manager.latest() is not None


def test_error_of_the_system_comes_back_as_it_is(
    tmp_path: Path, saved: tuple[safeckpt.CheckpointManager, Large]
) -> None:
    """A write that the system refuses there is an OSError here, with errno, from the next call."""
    manager, run = saved
    before = checkpoint_files(tmp_path)
    pid = process_of(manager)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    run.fill(2)
    manager.save(2)
    with pytest.raises(OSError, match="File too large") as caught:
        manager.wait()
    assert caught.value.errno == errno.EFBIG
    assert checkpoint_files(tmp_path) == before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    manager.save(2)
    manager.wait()
    assert process_of(manager) == pid
    assert steps_in(tmp_path) == [1, 2]


def test_nan_that_comes_after_the_guard_is_refused(
    tmp_path: Path, saved: tuple[safeckpt.CheckpointManager, Large]
) -> None:
    """The process looks once more at what it writes, and the refusal names the tensor and its step."""
    manager, run = saved
    with stopped(process_of(manager)):
        run.fill(2)
        manager.save(2)
        assert manager._saver._memory is not None
        manager._saver._memory[1]["large"]["value"][7] = float("nan")
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        manager.wait()
    assert caught.value.step == 2
    assert [(one.name, one.first_index) for one in caught.value.tensors] == [("large.value", (7,))]
    assert (steps_in(tmp_path), temps_in(tmp_path)) == ([1], [])


def test_progress_is_told_and_may_stop_the_write(tmp_path: Path) -> None:
    """It is called here with what is done there; what it raises ends the save, and the next one works."""
    run = Large()
    seen: list[tuple[int, int]] = []
    refuses = [False]

    def progress(_: str, done: int, total: int) -> None:
        seen.append((done, total))
        if refuses[0]:
            raise TimeoutError("that is enough")

    with manager_of(tmp_path, run, async_save="process", progress=progress) as manager:
        manager.save(1)
        manager.wait()
        assert len(seen) > 3
        assert seen[-1] == (seen[0][1], (tmp_path / "step-00000001.pt").stat().st_size)
        refuses[0] = True
        manager.save(2)
        with pytest.raises(TimeoutError, match="enough"):
            manager.wait()
        assert (steps_in(tmp_path), temps_in(tmp_path)) == ([1], [])
        refuses[0] = False
        manager.save(2)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
def test_signals_to_the_whole_job_are_the_trainers_to_answer(
    saved: tuple[safeckpt.CheckpointManager, Large], number: int
) -> None:
    """A Ctrl-C or a scheduler's signal does not end the process in the middle of a write."""
    manager, _ = saved
    pid = process_of(manager)
    os.kill(pid, number)
    manager.save(2)
    manager.wait()
    assert process_of(manager) == pid


# -- its end -----------------------------------------------------------------------------------------------------------


def test_process_ends_with_the_manager(tmp_path: Path) -> None:
    """Closed or forgotten, a manager leaves no process behind."""
    run = Marked()
    with manager_of(tmp_path / "closed", run, async_save="process") as manager:
        manager.save(1)
        manager.wait()
        pid = process_of(manager)
    assert not is_there(pid)
    manager = manager_of(tmp_path / "forgotten", run, async_save="process")
    manager.save(1)
    manager.wait()
    child = manager._saver._process._child
    pid = process_of(manager)
    assert child is not None
    manager._saver._process = manager._saver._output = child = None  # type: ignore[assignment]
    assert not is_there(pid)
    manager.close()


def _save_and_hang(connection: Connection, path: Path, *, forks: bool) -> None:
    run = Large()
    manager = manager_of(path, run, async_save="process")
    manager.save(1)
    manager.wait()
    child = process_of(manager)
    fork = os.fork() if forks else None
    if fork == 0:
        time.sleep(SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(child, signal.SIGSTOP)
    manager.save(2)
    while not temps_in(path):
        time.sleep(0.01)
    connection.send((child, fork))
    time.sleep(SECONDS)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("forks", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "forked"])
def test_kill_of_the_trainer_ends_the_process_in_the_middle_of_a_write(tmp_path: Path, forks: bool) -> None:
    """It does not write on for nobody: its file is swept by the next start, which needs not wait for anything."""
    with children.Child(_save_and_hang, tmp_path, forks=forks) as trainer:
        pid, fork = trainer.receive()
        trainer.kill()
        assert is_there(pid)
        os.kill(pid, signal.SIGCONT)
        wait_for_end(pid)
    if fork is not None:
        os.kill(fork, signal.SIGKILL)
    assert steps_in(tmp_path) == [1]
    assert len(temps_in(tmp_path)) == 1
    run = Large()
    with manager_of(tmp_path, run, async_save="process") as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 1
        manager.save(3)
    assert (steps_in(tmp_path), temps_in(tmp_path)) == ([1, 3], [])


SCRIPT = """
import sys, torch, safeckpt
print("begun")
model = torch.nn.Linear(500, 500)
manager = safeckpt.CheckpointManager(sys.argv[1], {"model": model}, async_save="process")
manager.save(1)
print("saved", manager.latest())
"""


def test_script_without_a_guard_that_ends_with_a_pending_save(tmp_path: Path) -> None:
    """It runs once, though it asks nobody for its name; the save is finished at its exit."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "run"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(safeckpt.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["begun", "saved"]
    assert done.stderr == ""
    assert steps_in(tmp_path / "run") == [1]
    assert safeckpt.verify(tmp_path / "run" / "step-00000001.pt").self_proving


def test_system_that_cannot_share_memory_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what it lacks, and what to write."""
    monkeypatch.setattr("safeckpt.run.writing_process.IS_SHARING_POSSIBLE", False)
    with pytest.raises(ValueError, match=r"only Linux has\. Use async_save=True"):
        manager_of(tmp_path, Marked(), async_save="process")


@pytest.mark.gpu
def test_state_on_a_device_goes_through_pinned_memory(tmp_path: Path) -> None:
    """The device copies into the memory that the process reads; the file has the state of the call."""
    run = Large()
    run.large.value = run.large.value.cuda()
    with manager_of(tmp_path, run, async_save="process") as manager:
        for step in (1, 2):
            run.fill(step)
            manager.save(step)
            assert manager._saver._memory is not None
            assert manager._saver._memory[1]["large"]["value"].is_pinned()
            run.fill(7)
            manager.wait()
            loaded = torch.load(tmp_path / f"step-{step:08}.pt")["large"]["value"]
            assert bits(loaded) == bits(torch.arange(3 << 20).float() + step)


def test_default_timeout_of_sockets_is_not_that_of_the_process(tmp_path: Path) -> None:
    """A script may set one for its downloads."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20.0)
    try:
        run = Large()
        with manager_of(tmp_path, run, async_save="process") as manager:
            run.fill(1)
            manager.save(1)
            manager.wait()
            assert steps_in(tmp_path) == [1]
    finally:
        socket.setdefaulttimeout(before)


def test_process_keeps_nothing_of_a_write_that_failed(tmp_path: Path) -> None:
    """Neither descriptors nor memory: a full disk may stay full for days."""

    def kept(pid: int) -> tuple[int, int]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        return len(list(Path(f"/proc/{pid}/fd").iterdir())), maps.count("memfd:safeckpt")

    run, found = Large(), []
    with manager_of(tmp_path, run, async_save="process", save_on_exit=False) as manager:
        for step in range(1, 9):
            run.fill(step)
            manager.save(step)
            if step % 2:  # the process is there
                manager.wait()
                found.append(kept(process_of(manager)))
                resource.prlimit(process_of(manager), resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
                continue
            with pytest.raises(OSError, match="File too large") as caught:
                manager.wait()
            assert caught.value.errno == errno.EFBIG
            resource.prlimit(
                process_of(manager), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
    assert len(set(found[1:])) == 1, found
