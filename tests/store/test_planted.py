"""What another user puts in the place of the files that the store opens by name."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from safeckpt.errors import SafeckptWarning
from safeckpt.store import CheckpointDirectory, WriterLock, disk, names
from tests.faults import as_nobody, descriptor_count, in_child, names_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PRECIOUS = b"precious\n"


def symlink(path: Path, victim: Path) -> None:
    victim.write_bytes(PRECIOUS)
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    victim.write_bytes(PRECIOUS)
    os.link(victim, path)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


PLANTED = pytest.mark.parametrize(
    ("plant", "text"),
    [
        (symlink, "symbolic link"),
        (dangling, "symbolic link"),
        (hard_link, "2 names"),
        (fifo, "not a regular file"),
    ],
)


def check_victim(victim: Path, plant: Callable[[Path, Path], None]) -> None:
    if plant in {symlink, hard_link}:
        assert victim.read_bytes() == PRECIOUS
    else:
        assert not victim.exists()


@PLANTED
def test_planted_history_is_a_warning_and_the_victim_is_untouched(
    tmp_path: Path, plant: Callable[[Path, Path], None], text: str
) -> None:
    """An event is not written through a link, nor into a pipe: the warning says what stands there."""
    directory = CheckpointDirectory(tmp_path)
    plant(directory.events.path, tmp_path / "victim")
    before = descriptor_count()
    with pytest.warns(SafeckptWarning, match=text):
        assert not directory.events.append("saved", step=1)
    check_victim(tmp_path / "victim", plant)
    assert descriptor_count() == before
    directory.events.path.unlink()
    assert directory.events.append("saved", step=1)


@PLANTED
def test_planted_losses_are_a_warning_and_the_victim_is_untouched(
    tmp_path: Path, plant: Callable[[Path, Path], None], text: str
) -> None:
    """A loss is not written through a link, nor into a pipe."""
    log = CheckpointDirectory(tmp_path).losses
    plant(log.path, tmp_path / "victim")
    with pytest.warns(SafeckptWarning, match=text):
        assert not log.append([(1, "0x1p+0")])
    check_victim(tmp_path / "victim", plant)
    log.path.unlink()
    assert log.append([(1, "0x1p+0")])
    log.close()


def test_link_planted_while_losses_are_recorded_gets_none(tmp_path: Path) -> None:
    """Lines go on into the file that was opened, and the next opening refuses the link."""
    log = CheckpointDirectory(tmp_path).losses
    log.append([(1, "0x1p+0")])
    log.path.rename(tmp_path / "moved")
    symlink(log.path, tmp_path / "victim")
    assert log.append([(2, "0x1p+0")])
    log.close()
    with pytest.warns(SafeckptWarning, match="symbolic link"):
        assert not log.append([(3, "0x1p+0")])
    assert (tmp_path / "victim").read_bytes() == PRECIOUS


@pytest.mark.parametrize("plant", [symlink, dangling, fifo])
def test_planted_losses_are_not_read(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """What stands in the place of the losses is neither followed nor waited for: there is nothing to compare with."""
    log = CheckpointDirectory(tmp_path).losses
    plant(log.path, tmp_path / "victim")
    with pytest.warns(SafeckptWarning, match="cannot be read"):
        assert log.read(-1) == {}


@pytest.mark.parametrize("plant", [symlink, dangling, fifo])
def test_planted_history_is_not_read(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """A history that is a link or a pipe is an error that names it."""
    events = CheckpointDirectory(tmp_path).events
    plant(events.path, tmp_path / "victim")
    with pytest.raises(OSError, match="This is") as caught:
        events.read()
    assert caught.value.filename == str(events.path)


def test_hard_linked_copy_of_a_run_is_read(tmp_path: Path) -> None:
    """A backup made of hard links can be read; only writing would change both."""
    events = CheckpointDirectory(tmp_path).events
    events.append("saved", step=1)
    os.link(events.path, tmp_path / "backup")
    assert [event["step"] for event in events.read()] == [1]


@pytest.mark.parametrize("plant", [symlink, dangling, hard_link, fifo])
def test_planted_holder_is_replaced(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """The holder's file is made anew, whatever had its name."""
    plant(tmp_path / names.HOLDER, tmp_path / "victim")
    with WriterLock(tmp_path, 0):
        assert json.loads((tmp_path / names.HOLDER).read_text())["pid"] == os.getpid()
    check_victim(tmp_path / "victim", plant)


@pytest.mark.parametrize("plant", [symlink, dangling, fifo])
def test_planted_lock_is_an_error_that_names_it(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """A lock file that is a link or a pipe is refused, and nothing is made behind it."""
    plant(tmp_path / names.LOCK, tmp_path / "victim")
    with pytest.raises(OSError, match=r"symbolic link|not a regular file") as caught:
        WriterLock(tmp_path, 0).acquire()
    assert caught.value.filename == str(tmp_path / names.LOCK)
    check_victim(tmp_path / "victim", plant)
    (tmp_path / names.LOCK).unlink()
    with WriterLock(tmp_path, 0):
        pass


def test_lock_replaced_by_a_link_to_itself_is_found_out(tmp_path: Path) -> None:
    """A link to the lock file, under the name of the lock file, is not the lock file."""
    with WriterLock(tmp_path, 0) as lock:
        (tmp_path / names.LOCK).rename(tmp_path / "moved")
        (tmp_path / names.LOCK).symlink_to(tmp_path / "moved")
        with pytest.raises(TimeoutError, match="deleted or replaced"):
            lock.check()


def test_endless_holder_is_not_read_whole(tmp_path: Path) -> None:
    """Of a planted holder's file no more is read than one of ours would have."""
    with (tmp_path / names.HOLDER).open("wb") as file:
        file.truncate(1 << 40)
    assert len(disk.read(tmp_path / names.HOLDER, 100)) == 100


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="needs two users")
def test_file_of_another_user_in_a_sticky_directory_is_not_written(public_path: Path) -> None:
    """In a directory like /tmp a file that another user has made under our name gets none of our lines."""
    log = CheckpointDirectory(public_path).events
    log.path.touch()
    log.path.chmod(0o666)
    os.chown(log.path, 12345, 12345)
    public_path.chmod(0o1777)

    def append() -> str:
        with pytest.warns(SafeckptWarning) as caught:
            assert not log.append("saved", step=1)
        return str(caught[0].message)

    text = in_child(lambda: as_nobody(append)).value
    assert "user id 12345" in text or os.strerror(errno.EACCES) in text  # the kernel's protected_regular
    public_path.chmod(0o777)
    assert in_child(lambda: as_nobody(lambda: log.append("saved", step=2))).value is True
    assert names_in(public_path) == ["events.jsonl"]
