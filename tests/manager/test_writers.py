"""One writer a directory: a second one is told who holds it, and nothing of either is lost."""

from __future__ import annotations

import gc
import os
import platform
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt.store import names
from tests import children
from tests.faults import contents
from tests.manager.helpers import checkpoint_files, manager_of, save_steps, step_path, steps_in, temps_in
from tests.training import Marked


def writer(connection: Connection, path: Path, *, restore: bool) -> None:
    """Save the steps that are asked for, each with a fresh answer: the step, or the error."""
    run = Marked()
    with manager_of(path, run) as manager:
        if restore:
            manager.restore()
        while (step := connection.recv()) is not None:
            try:
                run.step = step
                connection.send(manager.save(step).step)
            except safeckpt.SafeckptError as error:
                connection.send(error)


def check_refused(error: Any, path: Path, pid: int) -> None:
    assert isinstance(error, safeckpt.DirectoryLockedError)
    assert isinstance(error, TimeoutError)
    assert (error.pid, error.host, error.path) == (pid, platform.node(), str(path))
    assert f"pid {pid}" in str(error)
    assert "reading needs no lock" in str(error).lower()


def test_restore_beside_another_writer_is_told_at_once(tmp_path: Path) -> None:
    """A manager that is going to save names pid, host and cure when it restores; one that only reads does not."""
    with children.Child(writer, tmp_path, restore=True) as other:
        assert other.ask(1) == 1
        for only, options in ((None, {}), (("model",), {"save_every": 1})):
            with manager_of(tmp_path, Marked(), **options) as manager:
                manager.restore(only=only)
        with manager_of(tmp_path, Marked(), save_every=1) as manager:
            with pytest.warns(
                safeckpt.SafeckptWarning, match=f"pid {other.pid} on {platform.node()}, since 20"
            ) as told:
                assert manager.restore() is not None
            assert f"kill {other.pid} on" in str(told[0].message)
            assert told[0].filename == __file__
            manager.restore()
        other.kill()
        with manager_of(tmp_path, Marked(), save_every=1) as manager:
            assert manager.restore() is not None
            manager.save(2)


def test_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    """A second process is refused with pid and host of the first, may read, and takes over when the first is done."""
    save_steps(tmp_path, 1)
    run = Marked()
    with children.Child(writer, tmp_path, restore=True) as other:
        assert other.ask(2) == 2
        with manager_of(tmp_path, run) as manager:
            restored = manager.restore()
            assert restored is not None
            assert restored.step == run.step == 2
            before = checkpoint_files(tmp_path)
            with pytest.raises(safeckpt.DirectoryLockedError) as caught:
                manager.save(3)
            check_refused(caught.value, tmp_path, other.pid)
            assert checkpoint_files(tmp_path) == before
            with pytest.raises(safeckpt.DirectoryLockedError):
                manager.rollback()
            assert other.ask(3) == 3
            # Now the directory holds a step that this manager has not seen: it is no longer its run's newest.
            with pytest.raises(safeckpt.DirectoryInUseError):
                manager.save(4)
            other.connection.send(None)
            assert other.ended().error is None
            manager.restore()
            assert run.step == 3
            manager.save(4)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_killed_writer_frees_the_directory_at_once(tmp_path: Path) -> None:
    """After SIGKILL of the holder the next process writes without waiting, and sweeps what the dead one left."""
    with children.Child(writer, tmp_path, restore=False) as other:
        assert other.ask(1) == 1
        other.signal(signal.SIGKILL)
        assert other.ended().signal == signal.SIGKILL
    stale = tmp_path / f".{names.step_name(2)}.0123456789abcdef.tmp"
    stale.write_bytes(b"half a checkpoint")
    foreign = tmp_path / ".somebody.0123456789abcdef.tmp"
    foreign.write_bytes(b"not a checkpoint's")
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.restore()
        assert stale.exists()  # a reader deletes nothing
        manager.save(2)
    assert temps_in(tmp_path) == [foreign.name]
    assert steps_in(tmp_path) == [1, 2]


def test_second_manager_in_one_process_is_refused(tmp_path: Path) -> None:
    """A second manager of the same process is refused too, and the text says that it is this process's own."""
    first, second = manager_of(tmp_path, Marked()), manager_of(tmp_path, Marked())
    with first, second:
        first.save(1)
        second.restore()
        with pytest.raises(safeckpt.DirectoryLockedError, match="this same process") as caught:
            second.save(2)
        check_refused(caught.value, tmp_path, os.getpid())
        first.close()
        second.save(2)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("step", [None, 2])
def test_checkpoint_that_another_writer_saves_during_a_restore_is_not_set_aside(
    tmp_path: Path, step: int | None
) -> None:
    """What comes between the choice of a checkpoint and the end of its restore is another writer's: no save on top."""

    class Slow:
        during: Callable[[], object] | None = None

        def state_dict(self) -> dict[str, int]:
            return {"number": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.during is not None:
                self.during()

    run, other, slow = Marked(), Marked(), Slow()
    run.components["slow"], other.components["slow"] = slow, Slow()
    with manager_of(tmp_path, run) as manager:
        for first in (1, 2):
            run.step = first
            manager.save(first)
    with manager_of(tmp_path, run) as manager, manager_of(tmp_path, other) as second:
        second.restore()
        other.step = 3

        def save() -> None:
            slow.during = None
            second.save(3)
            second.close()

        slow.during = save
        restored = manager.restore(step)
        assert restored is not None
        assert restored.step == 2
        assert steps_in(tmp_path) == [1, 2, 3]
        before = checkpoint_files(tmp_path)
        with pytest.raises(safeckpt.DirectoryInUseError) as caught:
            manager.save(4)
        assert list(caught.value.steps) == [3]
        assert checkpoint_files(tmp_path) == before
        manager.restore()
        run.step = 4
        manager.save(4)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_waiting_writer_takes_over_when_the_holder_is_done(tmp_path: Path) -> None:
    """A requeued job that starts while its predecessor dies waits for the lock and then gets it."""
    with children.Child(writer, tmp_path, restore=False) as other:
        assert other.ask(1) == 1
        run = Marked()
        with manager_of(tmp_path, run, lock_timeout_seconds=60) as manager:
            manager.restore()
            other.connection.send(None)  # it closes at some moment while the save below waits
            manager.save(2)
    assert steps_in(tmp_path) == [1, 2]


def test_refusal_comes_after_the_timeout_not_before(tmp_path: Path) -> None:
    """`lock_timeout_seconds` is how long a writer waits for another process."""
    with children.Child(writer, tmp_path, restore=False) as other:
        assert other.ask(1) == 1
        with manager_of(tmp_path, Marked(), lock_timeout_seconds=0.3) as manager:
            manager.restore()
            begun = time.monotonic()
            with pytest.raises(safeckpt.DirectoryLockedError):
                manager.save(2)
            assert time.monotonic() - begun >= 0.3


def test_writer_that_finds_another_runs_files_after_waiting_lets_go(tmp_path: Path) -> None:
    """Where the first writer's files appear while a second one waits, the second is refused and holds no lock."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        real = manager._run.directory.lock.acquire

        def acquire() -> None:  # the other writer saves and closes in the moment before this one gets the lock
            save_steps(tmp_path, 1)
            real()

        manager._run.directory.lock.acquire = acquire  # type: ignore[method-assign]
        with pytest.raises(safeckpt.DirectoryInUseError):
            manager.save(1)
        with manager_of(tmp_path, Marked()) as third:
            third.restore()
            third.save(2)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_lock_file_that_is_deleted_while_held_is_noticed(tmp_path: Path, how: str) -> None:
    """A lock that no other process sees is refused at the next save, and the save after that takes a new one."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        (tmp_path / names.LOCK).unlink()
        if how == "replaced":
            (tmp_path / names.LOCK).touch()
        before = checkpoint_files(tmp_path)
        with pytest.raises(safeckpt.DirectoryLockedError, match="deleted or replaced"):
            manager.save(2)
        assert checkpoint_files(tmp_path) == before
        run.step = 2
        manager.save(2)
        assert children.run(_try_to_save, tmp_path, 3).value == "DirectoryLockedError"
        manager.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_second_writer_that_came_through_a_deleted_lock_is_not_overwritten(tmp_path: Path) -> None:
    """When a second writer took the directory after the lock file was deleted, the first one stops, for good."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        (tmp_path / names.LOCK).unlink()
        with children.Child(writer, tmp_path, restore=True) as other:
            assert other.ask(2) == 2
            data = step_path(tmp_path, 2).read_bytes()
            with pytest.raises(safeckpt.DirectoryLockedError, match="deleted or replaced"):
                manager.save(2)
            for _ in range(2):
                with pytest.raises(safeckpt.DirectoryInUseError):
                    manager.save(3)
            assert other.ask(3) == 3
    assert step_path(tmp_path, 2).read_bytes() == data
    assert steps_in(tmp_path) == [1, 2, 3]


def _try_to_save(path: Path, step: int) -> str:
    run = Marked()
    with manager_of(path, run) as manager:
        manager.restore()
        try:
            manager.save(step)
        except safeckpt.SafeckptError as error:
            return type(error).__name__
    return "saved"


def test_manager_that_only_reads_takes_no_lock(tmp_path: Path) -> None:
    """Restore, latest and checkpoints create no lock file and leave a free directory free."""
    save_steps(tmp_path, 1)
    (tmp_path / names.LOCK).unlink()
    with manager_of(tmp_path, Marked()) as reader:
        reader.restore()
        reader.checkpoints()
        reader.latest()
        assert not (tmp_path / names.LOCK).exists()
        with manager_of(tmp_path, Marked()) as manager:
            manager.restore()
            manager.save(2)


def test_forgotten_manager_gives_the_directory_back(tmp_path: Path) -> None:
    """A manager that was dropped without `close` does not hold the directory for ever."""
    manager = manager_of(tmp_path, Marked())
    manager.save(1)
    del manager
    gc.collect()
    with manager_of(tmp_path, Marked()) as other:
        other.restore()
        other.save(2)


def test_lock_file_is_left_as_it_is(tmp_path: Path) -> None:
    """The lock file stays after `close`, since deleting it would let two writers lock two files of one name."""
    save_steps(tmp_path, 1)
    assert (tmp_path / names.LOCK).exists()
    assert names.HOLDER not in contents(tmp_path)
