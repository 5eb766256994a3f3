"""One file appears whole under its final name, or not at all."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

from safeckpt.errors import DamagedCheckpointError, DurabilityUnknownError, SafeckptWarning
from safeckpt.store import commit, disk, names
from tests.faults import Recorder, contents, descriptor_count, in_child, intercept, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD = b"old" * 100
NEW = b"new" * 1000
TEMP = ".{}.0123456789abcdef.tmp"


def writer(data: bytes = NEW) -> Callable[[BinaryIO], int]:
    def write(file: BinaryIO) -> int:
        half = len(data) // 2
        return file.write(data[:half]) + file.write(data[half:])

    return write


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_missing_file_is_created(tmp_path: Path) -> None:
    """A commit leaves exactly the new file and returns what the writer returned."""
    assert commit(tmp_path / "model.pt", writer()) == len(NEW)
    assert contents(tmp_path) == {"model.pt": NEW}


def test_existing_file_is_replaced(tmp_path: Path) -> None:
    """A commit replaces the old file and leaves nothing else."""
    (tmp_path / "model.pt").write_bytes(OLD)
    commit(str(tmp_path / "model.pt"), writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_relative_path_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare file name means the working directory."""
    monkeypatch.chdir(tmp_path)
    commit("model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_operations_come_in_the_durable_order(tmp_path: Path) -> None:
    """Content is synced before the rename, the directory after it, and nothing comes after that."""
    recorder = Recorder()
    with intercept(recorder):
        commit(tmp_path / "model.pt", writer(), check=lambda *_: None)
    assert recorder.kinds == [
        "open_directory", "listing", "create", "claim", "write", "write", "sync", "close", "replace", "sync_directory",
    ]  # fmt: skip
    create, replace = recorder.operations[2], recorder.operations[8]
    assert replace.path == create.path
    assert replace.target == str(tmp_path / "model.pt")
    writes = [operation for operation in recorder.operations if operation.kind == "write"]
    assert [operation.offset for operation in writes] == [0, len(NEW) // 2]
    assert b"".join(operation.data or b"" for operation in writes) == NEW


def test_temporary_file_is_in_the_same_directory(tmp_path: Path) -> None:
    """The file is written beside its final name, under a hidden name that is not a checkpoint's."""
    seen = []

    def write(file: BinaryIO) -> None:
        file.write(NEW)
        seen.extend(names_in(tmp_path))

    commit(tmp_path / "step-00000001.pt", write, step=1)
    assert [names.temp_final(name) for name in seen] == ["step-00000001.pt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0o777, 0o000)])
def test_mode_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    """A committed file has the mode that a plain open would have given it."""
    with umask(mask):
        commit(tmp_path / "model.pt", writer())
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == mode


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), OSError(errno.EIO, "io")])
def test_writer_that_raises_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    """Whatever the writer raises comes out as it is, the old file stays, the temporary one goes."""
    (tmp_path / "model.pt").write_bytes(OLD)

    def write(file: BinaryIO) -> None:
        file.write(NEW)
        raise error

    before = descriptor_count()
    with pytest.raises(type(error)) as caught:
        commit(tmp_path / "model.pt", write)
    assert caught.value is error
    assert contents(tmp_path) == {"model.pt": OLD}
    assert descriptor_count() == before
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_writer_that_swallows_a_failed_write_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a hole is not committed, even when its writer says that all went well."""
    real = disk.write
    calls = []

    def second_fails(file: BinaryIO, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        return real(file, data)

    def write(file: BinaryIO) -> None:
        for _ in range(4):
            with contextlib.suppress(OSError):
                file.write(b"1234")

    monkeypatch.setattr(disk, "write", second_fails)
    with pytest.raises(OSError, match="full") as caught:
        commit(tmp_path / "model.pt", write)
    assert caught.value.errno == errno.ENOSPC
    assert len(calls) == 2
    assert contents(tmp_path) == {}
    monkeypatch.undo()
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_failed_write_keeps_nothing_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed save the payload is freed at once, not whenever the garbage collector comes by."""

    class Payload:
        pass

    def fail(file: BinaryIO, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "full")

    def save() -> weakref.ref[Payload]:
        payload = Payload()

        def write(file: BinaryIO) -> Payload:
            file.write(b"x")
            return payload

        with pytest.raises(OSError, match="full"):
            commit(tmp_path / "model.pt", write)
        return weakref.ref(payload)

    monkeypatch.setattr(disk, "write", fail)
    gc.disable()
    try:
        assert save()() is None
    finally:
        gc.enable()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes a few bytes at a time still gets all of them."""
    real = disk.write
    monkeypatch.setattr(disk, "write", lambda file, data: real(file, data[:7]))
    assert commit(tmp_path / "model.pt", writer()) == len(NEW)
    assert contents(tmp_path) == {"model.pt": NEW}


def test_system_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes no bytes raises instead of going on for ever."""
    monkeypatch.setattr(disk, "write", lambda *_: 0)
    with pytest.raises(OSError, match="accepts no more") as caught:
        commit(tmp_path / "model.pt", writer())
    assert caught.value.errno == errno.EIO
    assert contents(tmp_path) == {}


def test_check_reads_the_content_from_its_start(tmp_path: Path) -> None:
    """The check sees, before the commit, every byte that was written."""
    seen = []
    commit(tmp_path / "model.pt", writer(), check=lambda file, _: seen.append((file.read(), names_in(tmp_path))))
    assert [data for data, _ in seen] == [NEW]
    assert "model.pt" not in seen[0][1]


def test_check_that_refuses_changes_nothing(tmp_path: Path) -> None:
    """A file that its check refuses is never visible."""
    (tmp_path / "model.pt").write_bytes(OLD)

    def check(file: BinaryIO, _: object) -> None:
        raise DamagedCheckpointError(path="x", reason="it is")

    with pytest.raises(DamagedCheckpointError):
        commit(tmp_path / "model.pt", writer(), check=check)
    assert contents(tmp_path) == {"model.pt": OLD}


def test_memoryview_of_any_shape_is_written(tmp_path: Path) -> None:
    """A buffer of items larger than a byte is written whole."""
    words = memoryview(bytes(range(64))).cast("d", (2, 4))
    assert commit(tmp_path / "model.pt", lambda file: file.write(words)) == 64
    assert contents(tmp_path) == {"model.pt": bytes(range(64))}


def test_file_kept_by_its_writer_is_closed(tmp_path: Path) -> None:
    """A writer that keeps the file cannot change what was committed."""
    kept = []
    commit(tmp_path / "model.pt", lambda file: kept.append(file) or file.write(NEW))
    assert kept[0].closed
    with pytest.raises(ValueError, match="closed"):
        kept[0].write(b"late")
    assert contents(tmp_path) == {"model.pt": NEW}


def test_missing_parent_is_an_error(tmp_path: Path) -> None:
    """No directory is made for a single file."""
    with pytest.raises(FileNotFoundError) as caught:
        commit(tmp_path / "no" / "model.pt", writer())
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path / "no") in str(caught.value)
    assert names_in(tmp_path) == []


def test_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """A file in the place of the directory is named and left alone."""
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(NotADirectoryError):
        commit(tmp_path / "file" / "model.pt", writer())
    assert contents(tmp_path) == {"file": OLD}


@pytest.mark.parametrize("tail", ["directory", "directory/", "link", "new/", ".", "directory/.."])
def test_directory_as_target_is_an_error(tmp_path: Path, tail: str) -> None:
    """A directory, also behind a link or a slash, is refused before anything is written."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("directory")

    def write(file: BinaryIO) -> None:
        raise AssertionError("nothing may be written")

    with pytest.raises(IsADirectoryError) as caught:
        commit(f"{tmp_path}/{tail}", write)
    assert caught.value.errno == errno.EISDIR
    assert names_in(tmp_path) == ["directory", "link"]


def test_empty_path_is_an_error() -> None:
    """An empty path is a missing file, as for open."""
    with pytest.raises(FileNotFoundError):
        commit("", writer())


def test_device_as_target_is_not_replaced(tmp_path: Path) -> None:
    """Something that is no file keeps its name, as /dev/null has to, and the message says what to do instead."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file") as caught:
        commit(tmp_path / "pipe", writer())
    assert caught.value.errno == errno.EINVAL
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("leads_to", ["real.pt", "nowhere.pt", "model.pt"])
def test_symlink_as_target_is_replaced(tmp_path: Path, leads_to: str) -> None:
    """A link, also one that dangles or points at itself, becomes a regular file and what it led to stays."""
    (tmp_path / "real.pt").write_bytes(OLD)
    (tmp_path / "model.pt").symlink_to(leads_to)
    commit(tmp_path / "model.pt", writer())
    assert not (tmp_path / "model.pt").is_symlink()
    assert contents(tmp_path) == {"model.pt": NEW, "real.pt": OLD}


def test_hard_link_as_target_is_replaced(tmp_path: Path) -> None:
    """The other name of a hard-linked target keeps the old content."""
    (tmp_path / "other.pt").write_bytes(OLD)
    os.link(tmp_path / "other.pt", tmp_path / "model.pt")
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW, "other.pt": OLD}


@pytest.mark.parametrize("name", ["m" * 255, "é" * 127, "😀" * 63])
def test_name_of_the_greatest_length_is_committed(tmp_path: Path, name: str) -> None:
    """A name that the file system takes can be committed, although the temporary name is built from it."""
    commit(tmp_path / name, writer())
    assert contents(tmp_path) == {name: NEW}


def test_name_too_long_is_refused_before_writing(tmp_path: Path) -> None:
    """A name that the file system does not take is found before the content is written."""

    def write(file: BinaryIO) -> None:
        raise AssertionError("nothing may be written")

    with pytest.raises(OSError, match="too long") as caught:
        commit(tmp_path / ("m" * 256), write)
    assert caught.value.errno == errno.ENAMETOOLONG
    assert contents(tmp_path) == {}


def test_file_open_for_reading_keeps_its_content(tmp_path: Path) -> None:
    """A reader that opened the old file goes on reading the old file."""
    (tmp_path / "model.pt").write_bytes(OLD)
    with (tmp_path / "model.pt").open("rb") as reader:
        commit(tmp_path / "model.pt", writer())
        assert reader.read() == OLD


def test_random_name_that_is_taken_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has the temporary name already is somebody else's and is not removed."""
    taken = TEMP.format("step-00000001.pt")
    (tmp_path / taken).write_bytes(OLD)
    monkeypatch.setattr(names, "temp_name", lambda _: taken)
    with pytest.raises(FileExistsError):
        commit(tmp_path / "step-00000001.pt", writer(), step=1)
    assert contents(tmp_path) == {taken: OLD}


def test_stale_temp_of_the_same_file_is_swept(tmp_path: Path) -> None:
    """What a killed save of a file left is removed by the next save of it, and nothing else is."""
    kept = [TEMP.format("other.pt"), ".model.pt.tmp", "model.pt.0123456789abcdef.tmp", "unknown"]
    for name in [TEMP.format("model.pt"), *kept]:
        (tmp_path / name).write_bytes(OLD)
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW, **dict.fromkeys(kept, OLD)}


def test_temp_of_a_save_in_flight_is_not_swept(tmp_path: Path) -> None:
    """Two saves of one path at the same time both succeed; the last one to finish wins, whole."""

    def write(file: BinaryIO) -> None:
        file.write(NEW)
        in_between = threading.Thread(target=commit, args=(tmp_path / "model.pt", writer(OLD)))
        in_between.start()
        in_between.join()
        assert (tmp_path / "model.pt").read_bytes() == OLD

    commit(tmp_path / "model.pt", write)
    assert contents(tmp_path) == {"model.pt": NEW}


def test_temp_of_another_process_is_not_swept(tmp_path: Path) -> None:
    """A save in another process is not disturbed by one of the same path."""

    def write(file: BinaryIO) -> None:
        file.write(NEW)
        assert in_child(lambda: commit(tmp_path / "model.pt", writer(OLD))).value == len(OLD)

    commit(tmp_path / "model.pt", write)
    assert contents(tmp_path) == {"model.pt": NEW}


def test_temp_swept_before_its_claim_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep between the creation and the claim costs a second try, not the save."""
    real, unlucky = disk.claim, []

    def claim(file: BinaryIO) -> disk.Handle | None:
        if not unlucky:
            unlucky.append(file.name)
            assert disk.unlink_unclaimed(Path(file.name))
        return real(file)

    monkeypatch.setattr(disk, "claim", claim)
    commit(tmp_path / "model.pt", writer())
    assert len(unlucky) == 1
    assert contents(tmp_path) == {"model.pt": NEW}


def test_unreadable_listing_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeping is a courtesy: where the listing fails the save goes on."""

    def listing(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(disk, "listing", listing)
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_directory_sync_that_really_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that could be synced and was not makes the durability unknown."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "broken")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DurabilityUnknownError, match="broken") as caught:
        commit(tmp_path / "model.pt", writer())
    assert caught.value.errno == errno.EIO
    assert contents(tmp_path) == {"model.pt": NEW}
    monkeypatch.undo()
    commit(tmp_path / "model.pt", writer(OLD))
    assert contents(tmp_path) == {"model.pt": OLD}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_directory_sync_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where directories cannot be synced at all the file is committed and the doubt is said."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "not here")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(SafeckptWarning, match="cannot sync directories"):
        commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}


def test_replace_held_up_by_a_scanner_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a replace may be refused for a moment it is tried again, a bounded number of times."""
    monkeypatch.setattr(disk, "_REPLACE_WAITS_SECONDS", (0.0, 0.0))
    real, calls = os.replace, []

    def busy(source: Path, target: Path, free_after: int) -> None:
        calls.append(source)
        if len(calls) <= free_after:
            raise PermissionError(errno.EACCES, "in use")
        real(source, target)

    monkeypatch.setattr(os, "replace", lambda source, target: busy(source, target, 2))
    commit(tmp_path / "model.pt", writer())
    assert contents(tmp_path) == {"model.pt": NEW}
    calls.clear()
    monkeypatch.setattr(os, "replace", lambda source, target: busy(source, target, 99))
    with pytest.raises(PermissionError):
        commit(tmp_path / "model.pt", writer(OLD))
    assert len(calls) == 3
    assert contents(tmp_path) == {"model.pt": NEW}
