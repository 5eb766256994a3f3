"""One writer a directory, across objects, threads, processes, forks and deaths."""

from __future__ import annotations

import errno
import json
import os
import pickle
import platform
import threading
import time
from typing import TYPE_CHECKING

import filelock
import pytest

from safeckpt.errors import DirectoryLockedError
from safeckpt.store import WriterLock, names
from tests.faults import Fault, as_nobody, contents, descriptor_count, in_child, intercept, names_in
from tests.store.processes import Process

if TYPE_CHECKING:
    from pathlib import Path


def test_lock_is_taken_and_given_back(tmp_path: Path) -> None:
    """A lock is held from acquire to release, twice in a row, and leaves only its file."""
    lock = WriterLock(tmp_path)
    before = descriptor_count()
    for _ in range(2):
        assert not lock.held
        lock.acquire()
        assert lock.held
        lock.check()
        assert names_in(tmp_path) == [names.HOLDER, names.LOCK]
        lock.release()
        lock.release()
        assert names_in(tmp_path) == [names.LOCK]
        assert descriptor_count() == before


def test_lock_that_is_held_is_acquired_again_for_free(tmp_path: Path) -> None:
    """Taking a lock twice needs one release only."""
    with WriterLock(tmp_path) as lock:
        lock.acquire()
    assert not lock.held
    with WriterLock(tmp_path, 0):
        pass


def test_holder_is_written_for_people(tmp_path: Path) -> None:
    """The holder's file says which process on which host, and none of its arguments."""
    with WriterLock(tmp_path):
        holder = json.loads((tmp_path / names.HOLDER).read_text())
    assert holder.keys() == {"pid", "host", "since", "started", "command", "token"}
    assert (holder["pid"], holder["host"]) == (os.getpid(), platform.node())


def test_second_object_in_this_process_is_refused_at_once(tmp_path: Path) -> None:
    """A second writer in the same process is told so without any waiting and leaves the first one's lock alone."""
    with WriterLock(tmp_path) as first:
        with pytest.raises(DirectoryLockedError, match="this same process has not closed it") as caught:
            WriterLock(tmp_path, float("inf")).acquire()  # would wait for ever
        assert "call close() of the other manager" in str(caught.value)
        assert (caught.value.pid, caught.value.host) == (os.getpid(), platform.node())
        assert caught.value.path == str(tmp_path)
        first.check()
        assert names_in(tmp_path) == [names.HOLDER, names.LOCK]
    with WriterLock(tmp_path, 0):
        pass


def test_second_process_is_refused_by_name(tmp_path: Path) -> None:
    """A second process learns who holds the directory, and gets it once it is free."""
    with Process(f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        assert other.ask("lock.acquire()") == "None"
        with pytest.raises(DirectoryLockedError, match=f"pid {other.pid} on") as caught:
            WriterLock(tmp_path, 0).acquire()
        assert caught.value.pid == other.pid
        assert isinstance(caught.value, TimeoutError)
        assert pickle.loads(pickle.dumps(caught.value)).pid == other.pid
        assert json.loads((tmp_path / names.HOLDER).read_text())["pid"] == other.pid
        assert other.ask("lock.release()") == "None"
        with WriterLock(tmp_path, 0):
            assert "DirectoryLockedError" in other.ask("lock.acquire()")


def test_writer_that_was_dropped_without_closing_frees_the_directory(tmp_path: Path) -> None:
    """A manager that no variable holds any more, as after a notebook's cell is run again, is in nobody's way."""
    first = WriterLock(tmp_path)
    first.acquire()
    first.circle = first  # type: ignore[attr-defined]  # only the garbage collector finds it
    del first
    with WriterLock(tmp_path, 0) as second:
        second.check()


def test_waiting_writer_gets_the_lock_when_it_is_freed(tmp_path: Path) -> None:
    """A writer that waits takes over as soon as the other process lets go."""
    first = WriterLock(tmp_path)
    first.acquire()
    answers: list[str] = []
    with Process(f"second = WriterLock({str(tmp_path)!r}, 60)") as other:
        waiting = threading.Thread(target=lambda: answers.append(other.ask("second.acquire()")))
        waiting.start()
        first.release()
        waiting.join()
        assert answers == ["None"]
        assert other.ask("second.check()") == "None"


def test_timeout_is_waited_for(tmp_path: Path) -> None:
    """A refusal comes after the timeout, not before."""
    with Process(f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        other.ask("lock.acquire()")
        start = time.monotonic()
        with pytest.raises(DirectoryLockedError):
            WriterLock(tmp_path, 0.2).acquire()
        assert time.monotonic() - start >= 0.2


def test_killed_holder_frees_the_directory(tmp_path: Path) -> None:
    """SIGKILL frees the lock at once, and the next holder's name replaces the dead one's."""
    with Process(f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        other.ask("lock.acquire()")
        other.kill()
    with WriterLock(tmp_path, 0):
        assert json.loads((tmp_path / names.HOLDER).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("replaced", [False, True])
def test_deleted_lock_file_is_found_out(tmp_path: Path, replaced: bool) -> None:
    """When the lock file is deleted while held, and even when another writer locked a new one, the check refuses."""
    lock = WriterLock(tmp_path, 0)
    lock.acquire()
    (tmp_path / names.LOCK).unlink()
    other = WriterLock(tmp_path, 0)
    if replaced:
        other.acquire()
    for refused in (lock.check, lock.acquire):
        with pytest.raises(DirectoryLockedError, match="was deleted or replaced"):
            refused()
    before = contents(tmp_path)
    lock.release()
    if replaced:
        assert contents(tmp_path) == before
        other.check()
        with pytest.raises(DirectoryLockedError):
            lock.acquire()
        other.release()
    with lock:
        lock.check()


def test_deleted_directory_is_found_out(tmp_path: Path) -> None:
    """A lock in a directory that is gone is no longer worth anything."""
    path = tmp_path / "run"
    path.mkdir()
    lock = WriterLock(path)
    lock.acquire()
    path.rename(tmp_path / "moved")
    with pytest.raises(DirectoryLockedError, match="the directory was deleted, renamed or replaced"):
        lock.check()
    lock.release()
    with pytest.raises(FileNotFoundError):
        lock.acquire()
    assert names_in(tmp_path) == ["moved"]


def test_directory_made_again_by_somebody_else_is_found_out(tmp_path: Path) -> None:
    """A new directory of the same name, with a lock file in it too, is not the one that was locked."""
    path = tmp_path / "run"
    path.mkdir()
    lock = WriterLock(path)
    lock.acquire()
    path.rename(tmp_path / "moved")
    path.mkdir()
    (path / names.LOCK).touch()
    with pytest.raises(DirectoryLockedError, match="the directory was deleted, renamed or replaced"):
        lock.check()
    lock.release()
    with lock:
        lock.check()


def test_check_of_a_lock_not_held_refuses(tmp_path: Path) -> None:
    """A lock that was never taken, or was given back, does not allow anything."""
    lock = WriterLock(tmp_path)
    with pytest.raises(DirectoryLockedError, match="does not hold"):
        lock.check()
    with lock:
        pass
    with pytest.raises(DirectoryLockedError, match="does not hold"):
        lock.check()


def test_forked_child_owns_nothing(tmp_path: Path) -> None:
    """A forked child does not hold its parent's lock, cannot free it, and is refused like any other process."""
    lock = WriterLock(tmp_path, 0)
    lock.acquire()

    def child() -> tuple[bool, int | None]:
        held = lock.held
        lock.release()
        with pytest.raises(DirectoryLockedError, match="does not hold"):
            lock.check()
        with pytest.raises(DirectoryLockedError) as caught:
            lock.acquire()
        return held, caught.value.pid

    ended = in_child(child)
    assert ended.error is None
    assert ended.value == (False, os.getpid())
    lock.check()
    assert names_in(tmp_path) == [names.HOLDER, names.LOCK]
    lock.release()
    assert in_child(lock.acquire).error is None


def test_forked_child_does_not_outlive_its_parents_lock(tmp_path: Path) -> None:
    """When the holder is killed its forked children, DataLoader workers say, do not keep the directory locked."""
    setup = f"""
lock = WriterLock({str(tmp_path)!r}, 0)
lock.acquire()
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    os.write(write_end, b"!")  # the fork is over, with all that happens in a child first
    time.sleep(60)
    os._exit(0)
os.read(read_end, 1)
"""
    with Process(setup) as other:
        child = int(other.ask("child"))
        other.kill()
        try:
            os.kill(child, 0)
            with WriterLock(tmp_path, 0) as lock:
                lock.check()
        finally:
            os.kill(child, 9)


def test_two_processes_never_hold_it_together(tmp_path: Path) -> None:
    """Of processes that take and free the lock as fast as they can, each finds nobody else inside."""
    inside = tmp_path / "inside"
    work = (
        f"[(lock.acquire(), os.close(os.open({str(inside)!r}, os.O_CREAT | os.O_EXCL)), os.unlink({str(inside)!r}),"
        " lock.release())[0] for _ in range(100)].count(None)"
    )
    setup = f"lock = WriterLock({str(tmp_path)!r}, 60)"
    answers = []
    with Process(setup) as one, Process(setup) as two:
        threads = [threading.Thread(target=lambda p=p: answers.append(p.ask(work))) for p in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == ["100", "100"]


def test_directory_that_cannot_be_written_is_a_permission_error(public_path: Path) -> None:
    """A directory that a user may not write into is reported as such, and the lock is free afterwards."""
    public_path.chmod(0o555)
    error = in_child(lambda: as_nobody(WriterLock(public_path, 0).acquire)).error
    assert isinstance(error, PermissionError)
    assert error.errno == errno.EACCES
    assert names_in(public_path) == []
    public_path.chmod(0o777)
    assert in_child(lambda: as_nobody(WriterLock(public_path, 0).acquire)).error is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_directory_shared_by_two_users_is_locked_by_either(public_path: Path) -> None:
    """Whoever may write into the directory may lock it, whatever the umask of the one who was first."""
    public_path.chmod(0o777)
    before = os.umask(0o077)
    try:
        with WriterLock(public_path, 0):
            pass
    finally:
        os.umask(before)
    assert in_child(lambda: as_nobody(WriterLock(public_path, 0).acquire)).error is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_lock_file_of_another_user_is_an_error_that_says_whose(public_path: Path) -> None:
    """Where another user's lock file cannot be opened, the error names the file, its owner and what to do."""
    (public_path / names.LOCK).touch(mode=0o600)
    os.chown(public_path / names.LOCK, 12345, 12345)
    public_path.chmod(0o777)
    error = in_child(lambda: as_nobody(WriterLock(public_path, 0).acquire)).error
    assert isinstance(error, PermissionError)
    assert "user id 12345 made this lock file" in str(error)
    assert error.errno == errno.EACCES


def test_missing_directory_is_not_made(tmp_path: Path) -> None:
    """The lock makes no directory: that is done durably elsewhere."""
    with pytest.raises(FileNotFoundError) as caught:
        WriterLock(tmp_path / "no").acquire()
    assert caught.value.errno == errno.ENOENT
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["create", "write", "close", "unlink"])
def test_holder_that_cannot_be_written_does_not_matter(tmp_path: Path, kind: str) -> None:
    """A full disk does not keep a writer from its lock; the refused one then only learns less."""
    fault = Fault(1, errno.ENOSPC, {kind})
    lock = WriterLock(tmp_path, 0)
    with intercept(fault):
        lock.acquire()
    assert fault.fired is not None
    lock.check()
    with pytest.raises(DirectoryLockedError) as caught:
        WriterLock(tmp_path, 0).acquire()
    assert caught.value.pid in {None, os.getpid()}
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "host": 3}', "\udcff", "[" * 10_000])
def test_holder_that_cannot_be_read_does_not_matter(tmp_path: Path, text: str) -> None:
    """Whatever is in the holder's file, the refusal is the same error."""
    with Process(f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        other.ask("lock.acquire()")
        (tmp_path / names.HOLDER).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DirectoryLockedError) as caught:
            WriterLock(tmp_path, 0).acquire()
    assert (caught.value.pid, caught.value.host) == (None, None)


@pytest.mark.parametrize("point", ["before", "after"])
def test_interrupt_while_taking_it_leaves_it_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Ctrl-C around the moment when the lock is taken leaves nobody holding it."""
    real = filelock.FileLock.acquire

    def acquire(self: filelock.FileLock, timeout: float) -> None:
        if point == "after":
            real(self, timeout=timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    lock = WriterLock(tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert not lock.held
    monkeypatch.undo()
    with WriterLock(tmp_path, 0):
        pass


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_nonsense_timeout_is_refused_at_once(tmp_path: Path, timeout: float, error: type[Exception]) -> None:
    """A timeout is a number of seconds, 0 or more."""
    with pytest.raises(error, match="timeout_seconds must be"):
        WriterLock(tmp_path, timeout)


def test_endless_timeout_takes_a_free_lock(tmp_path: Path) -> None:
    """An infinite timeout is allowed."""
    with WriterLock(tmp_path, float("inf")) as lock:
        assert lock.held


def test_change_of_working_directory_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a relative path stays on the directory that it named when it was made."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = WriterLock("run")
    lock.acquire()
    monkeypatch.chdir("/")
    lock.check()
    lock.release()
    assert names_in(tmp_path / "run") == [names.LOCK]
