"""Large files are deleted at once, and their space comes back without anybody waiting for it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from safeckpt.store import commit, deferred, disk
from tests.faults import Fault, descriptor_count, in_child, intercept

LARGE = 16 << 20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(LARGE)
    return path


def freeing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "safeckpt-free"]


def test_deleted_file_is_gone_at_once_and_its_space_after_the_wait(large: Path) -> None:
    """The name goes before the call returns; no descriptor is left when the wait is over."""
    before = descriptor_count()
    deferred.delete(large)
    assert not large.exists()
    deferred.wait()
    assert descriptor_count() == before
    assert freeing_threads() == []


def test_space_is_freed_by_another_thread(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not close the last descriptor itself."""
    closed_by = []
    close = disk.Handle.close

    def noting(handle: disk.Handle) -> None:
        closed_by.append(threading.current_thread().name)
        close(handle)

    monkeypatch.setattr(disk.Handle, "close", noting)
    deferred.delete(large)
    deferred.wait()
    assert closed_by == ["safeckpt-free"]


def test_replaced_file_is_freed_the_same_way(large: Path) -> None:
    """A commit over a large file holds it until the rename is done; the next commit waits for its space."""
    before = descriptor_count()
    commit(large, lambda file: file.write(b"new"))
    assert large.read_bytes() == b"new"
    commit(large, lambda file: file.write(b"newer"))
    assert descriptor_count() == before
    assert freeing_threads() == []


@pytest.mark.parametrize("kind", ["unlink", "replace"])
def test_file_that_cannot_be_removed_is_let_go(large: Path, kind: str) -> None:
    """The error comes out, the file stays, and no descriptor is left open."""
    before = descriptor_count()
    other = large.with_name("other")
    other.write_bytes(b"")
    with intercept(Fault(1, errno.EACCES, {kind})), pytest.raises(PermissionError):
        deferred.delete(large) if kind == "unlink" else deferred.replace(other, large)
    assert large.stat().st_size == LARGE
    assert descriptor_count() == before


def test_small_missing_and_linked_files_are_deleted_as_they_are(tmp_path: Path, large: Path) -> None:
    """Where there is nothing to gain no descriptor is opened: small files, other names of a file, links."""
    small, twin, link = tmp_path / "small", tmp_path / "twin", tmp_path / "link"
    small.write_bytes(b"x")
    twin.hardlink_to(large)
    link.symlink_to(large)
    for path in (small, twin, link):
        assert disk.hold(path) is None
        deferred.delete(path)
        assert not os.path.lexists(path)
    assert large.exists()
    assert freeing_threads() == []
    with pytest.raises(FileNotFoundError):
        deferred.delete(small)


def test_forked_child_does_not_keep_the_space(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process forked while a file is being freed has no descriptor of it."""
    may_close = threading.Event()
    close = deferred._close

    def late(handle: disk.Handle) -> None:
        may_close.wait()
        close(handle)

    def open_names() -> list[str]:
        return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]

    monkeypatch.setattr(deferred, "_close", late)
    deferred.delete(large)
    try:
        assert any(name.startswith(str(large)) for name in open_names())
        ended = in_child(open_names)
    finally:
        may_close.set()
        deferred.wait()
    assert ended.error is None
    assert not any(name.startswith(str(large)) for name in ended.value)
