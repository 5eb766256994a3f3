"""A file system without locks: the file that names the holder stands in."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from typing import TYPE_CHECKING

import pytest

from safeckpt.errors import DirectoryLockedError, SafeckptWarning
from safeckpt.store import WriterLock, holder, names
from tests.faults import contents, descriptor_count, in_child, names_in
from tests.store.processes import Process

if TYPE_CHECKING:
    from pathlib import Path

NO_FLOCK = """
import errno, fcntl, warnings
warnings.simplefilter("ignore")
def flock(file, operation): raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = flock
"""


@pytest.fixture(autouse=True, params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lustre without the flock option, NFS without a lock daemon and some FUSE file systems answer."""

    def flock(file: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def take(path: Path, timeout_seconds: float = 0) -> WriterLock:
    lock = WriterLock(path, timeout_seconds)
    with pytest.warns(SafeckptWarning, match="has no file locks"):
        lock.acquire()
    return lock


def replace_holder(path: Path, **changes: object) -> None:
    record = holder.describe() | changes
    (path / names.HOLDER).write_text(json.dumps(record))


def test_directory_is_taken_with_a_warning_and_given_back(tmp_path: Path) -> None:
    """Without locks a writer is warned and works; what it leaves is the empty lock file."""
    before = descriptor_count()
    for _ in range(2):
        lock = take(tmp_path)
        assert lock.held
        lock.check()
        lock.acquire()
        assert names_in(tmp_path) == [names.HOLDER, names.LOCK]
        lock.release()
        assert not lock.held
        assert names_in(tmp_path) == [names.LOCK]
    assert descriptor_count() == before


def test_second_process_is_refused_by_name(tmp_path: Path) -> None:
    """A second writer on this host learns who holds the directory, and gets it once it is given back."""
    with Process(NO_FLOCK + f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        assert other.ask("lock.acquire()") == "None"
        before = contents(tmp_path)
        with pytest.raises(DirectoryLockedError, match=f"pid {other.pid} on") as caught:
            WriterLock(tmp_path, 0.1).acquire()
        assert "If it has ended, delete" in str(caught.value)
        assert contents(tmp_path) == before
        assert other.ask("lock.check()") == "None"
        other.ask("lock.release()")
        lock = take(tmp_path)
        assert "DirectoryLockedError" in other.ask("lock.acquire()")
        lock.release()


def test_killed_holder_on_this_host_is_replaced(tmp_path: Path) -> None:
    """A process that was killed is known to be gone, and its file makes way."""
    with Process(NO_FLOCK + f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        other.ask("lock.acquire()")
        other.kill()
    lock = take(tmp_path)
    assert json.loads((tmp_path / names.HOLDER).read_text())["pid"] == os.getpid()
    lock.release()
    assert names_in(tmp_path) == [names.LOCK]


def test_process_id_that_was_used_again_is_no_holder(tmp_path: Path) -> None:
    """A live process with the number of the dead one, and another start, does not hold the directory."""
    replace_holder(tmp_path, pid=os.getppid(), started=1)
    take(tmp_path).release()
    replace_holder(tmp_path, started=1)
    take(tmp_path).release()


@pytest.mark.parametrize("record", [{"host": "elsewhere"}, {"pid": os.getppid(), "started": None}])
def test_holder_that_may_live_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    """A process on another host, or one of which only the number is known, is not taken for dead."""
    replace_holder(tmp_path, **record)
    before = contents(tmp_path)
    with pytest.raises(DirectoryLockedError, match="delete"):
        WriterLock(tmp_path, 0).acquire()
    assert contents(tmp_path) | {names.LOCK: b""} == before | {names.LOCK: b""}


def test_half_written_holder_is_refused_and_says_what_to_delete(tmp_path: Path) -> None:
    """A record that a crash cut names nobody: it is not guessed that its process is gone."""
    (tmp_path / names.HOLDER).write_text('{"pid": 1')
    with pytest.raises(DirectoryLockedError, match="delete") as caught:
        WriterLock(tmp_path, 0).acquire()
    assert (caught.value.pid, caught.value.host) == (None, None)


@pytest.mark.parametrize("deleted", [False, True])
def test_second_writer_that_came_in_is_noticed_at_the_next_check(tmp_path: Path, deleted: bool) -> None:
    """Somebody deleted the file and another process took the directory: the first one stops at its next save."""
    lock = take(tmp_path)
    (tmp_path / names.HOLDER).unlink()
    if not deleted:
        replace_holder(tmp_path, host="elsewhere", pid=77)
    before = contents(tmp_path)
    with pytest.raises(DirectoryLockedError, match="was deleted or replaced") as caught:
        lock.check()
    assert (caught.value.pid, caught.value.host) == ((None, None) if deleted else (77, "elsewhere"))
    lock.release()
    assert contents(tmp_path) == before


def test_second_object_in_this_process_is_refused_at_once(tmp_path: Path) -> None:
    """Two managers in one process are told apart without a lock as well."""
    lock = take(tmp_path)
    with pytest.raises(DirectoryLockedError, match="this same process has not closed it"):
        WriterLock(tmp_path, float("inf")).acquire()
    lock.release()


def test_writer_that_was_dropped_without_closing_is_replaced(tmp_path: Path) -> None:
    """The file that a dropped manager of this process left is not waited for."""
    lock = take(tmp_path)
    del lock
    take(tmp_path).release()


def test_forked_child_owns_nothing(tmp_path: Path) -> None:
    """A forked child does not hold the directory, cannot free it and is refused."""
    lock = take(tmp_path)

    def child() -> tuple[bool, int | None]:
        held = lock.held
        lock.release()
        with pytest.raises(DirectoryLockedError) as caught:
            lock.acquire()
        return held, caught.value.pid

    ended = in_child(child)
    assert ended.error is None
    assert ended.value == (False, os.getpid())
    lock.check()
    lock.release()


def test_two_processes_that_take_over_at_once_do_not_both_go_on(tmp_path: Path) -> None:
    """Of two that found a dead process's file, the one that was overtaken finds out before it writes."""
    replace_holder(tmp_path, started=1)
    first = take(tmp_path)
    with Process(NO_FLOCK + f"lock = WriterLock({str(tmp_path)!r}, 0)") as other:
        assert other.ask("lock._replace_holder(holder.describe())") == "None"
        with pytest.raises(DirectoryLockedError, match="was deleted or replaced"):
            first.check()
    first.release()


def test_host_is_the_one_of_the_error_text() -> None:
    """The record names this process."""
    assert (holder.describe()["pid"], holder.describe()["host"]) == (os.getpid(), platform.node())
    assert holder.is_own(holder.describe())
    assert not holder.is_gone(holder.describe())
