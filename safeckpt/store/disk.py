"""The seam between the store and the operating system: every call that touches a file system, one function each.

Callers always go through the module (``disk.replace(...)``), never through an imported name. A test that replaces
the functions named in ``__all__`` therefore sees every operation in order, with its data, and can make any one fail.
"""

# The system calls under their own names, where pathlib has others:
# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH112, PTH114, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import os
import stat
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from safeckpt.system.libc import linux_call

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

if sys.platform != "win32":
    import fcntl

__all__ = [
    "append",
    "claim",
    "close",
    "create",
    "listing",
    "make_directory",
    "open_append",
    "open_directory",
    "remove_tree",
    "replace",
    "sync",
    "sync_directory",
    "unlink",
    "unlink_unclaimed",
    "write",
]

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | _BINARY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# A virus scanner or a reader may hold the target open for a moment; only Windows refuses the replace for that.
_REPLACE_WAITS_SECONDS = (0.01, 0.05, 0.2, 0.5) if sys.platform == "win32" else ()

_WRITE_BACK_BYTES = 32 << 20  # enough for the disk to be busy with, little enough to be nearly done at the end
_SYNC_FILE_RANGE_WRITE = 2
_HELD_BYTES = 16 << 20  # a smaller file is deleted faster than a thread starts

# What a file system answers that has no sync for directories at all (some network and FUSE ones), fsync(2).
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


class Handle:
    """An open descriptor that is closed with this object, even when an interrupt loses the object.

    Attributes:
        path: What was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []
        # Not __del__: that runs for a closed handle as well, and Python swallows a Ctrl-C that arrives in it.
        self._finalizer = weakref.finalize(self, _close_all, self._descriptors)
        self._finalizer.atexit = False  # a save in another thread may still be under way

    def open(self, flags: int) -> None:
        """Open the path with these flags; a file that this creates gets ``0666 & ~umask``."""
        # One call into C: a signal handler cannot raise between the open and the moment the number is kept.
        self._descriptors.extend(map(os.open, (self.path,), (flags | _CLOEXEC,), (0o666,)))

    def duplicate(self, descriptor: int) -> None:
        """Hold a second descriptor of an open file."""
        self._descriptors.extend(map(os.dup, (descriptor,)))

    def fileno(self) -> int:
        """Return the descriptor."""
        if not self._descriptors:
            raise ValueError(f"{self.path} is not open")
        return self._descriptors[0]

    def close(self) -> None:
        """Close the descriptor; nothing was written through it, so a failure has nothing to say."""
        with contextlib.suppress(OSError):
            _close_all(self._descriptors)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _close_all(descriptors: list[int]) -> None:
    # One call into C again: what is popped is closed.
    collections.deque(map(os.close, map(descriptors.pop, (-1,) * len(descriptors))), maxlen=0)


def listing(directory: Path) -> list[str]:
    """Return the names in a directory, in no order."""
    return os.listdir(directory)


def make_directory(path: Path) -> None:
    """Make one directory; its parent is not synced."""
    os.mkdir(path)


def open_directory(path: Path) -> Handle:
    """Open a directory for `sync_directory`.

    Raises:
        OSError: Missing, not a directory, or not readable.
    """
    handle = Handle(path)
    if sys.platform != "win32":  # Windows has no descriptors of directories, and logs its renames
        handle.open(os.O_RDONLY | os.O_DIRECTORY)
    elif not os.path.isdir(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return handle


def sync_directory(directory: Handle) -> bool:
    """Make the names in a directory durable; return False where the file system offers no such thing."""
    if sys.platform == "win32":
        return True
    try:
        os.fsync(directory.fileno())
    except OSError as error:
        if error.errno in _NO_DIRECTORY_SYNC:
            return False
        raise
    return True


def create(path: Path) -> BinaryIO:
    """Create a file that did not exist, unbuffered, for writing and reading back; mode is ``0666 & ~umask``."""
    # tempfile's 0600 would hide the checkpoint from the group.
    return cast("BinaryIO", open(path, "x+b", buffering=0))


def claim(file: BinaryIO) -> Handle | None:
    """Mark an open file as belonging to a live process, until the handle is closed or the process is gone.

    Returns:
        The claim, or None when another process took the file for a dead one's in the moment since its creation.
    """
    handle = Handle(Path(file.name))
    if sys.platform != "win32":
        # On a descriptor of its own, so that it outlives the file's close and lasts until the rename.
        handle.duplicate(file.fileno())
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            return handle  # no locks on this file system: unlink_unclaimed removes nothing there
        if os.fstat(file.fileno()).st_nlink == 0:
            return None
    return handle


def write(file: BinaryIO, data: memoryview) -> int:
    """Write once and return the number of bytes taken, which may be fewer than given.

    The disk is told to start with what has gathered: otherwise the system begins when it is asked to sync, and a file
    of some gigabytes takes twice as long.
    """
    taken = file.write(data)
    if taken and _sync_file_range is not None and file.seekable():
        end = file.tell()
        start = (end - taken) // _WRITE_BACK_BYTES * _WRITE_BACK_BYTES
        full = end // _WRITE_BACK_BYTES * _WRITE_BACK_BYTES
        if full > start:
            # Only a hint, which takes no error away from the sync: without the flags that wait, sync_file_range(2)
            # leaves the file's error state as it is.
            _sync_file_range(file.fileno(), start, full - start, _SYNC_FILE_RANGE_WRITE)
    return taken


_sync_file_range = linux_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync(file: BinaryIO) -> None:
    """Make a file's content durable. After a failure the kernel may have dropped the data: never call it again."""
    if sys.platform == "darwin":
        # fsync there leaves the data in the drive's cache, fsync(2).
        try:
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in {errno.ENOTSUP, errno.EINVAL, errno.ENOTTY}:
                raise
        else:
            return
    os.fsync(file.fileno())


def close(file: BinaryIO) -> None:
    """Close a file; some file systems (NFS, quotas) report a failed write only here."""
    file.close()


def replace(source: Path, target: Path) -> None:
    """Give a file another name in the same directory, atomically, replacing what had that name."""
    for wait_seconds in _REPLACE_WAITS_SECONDS:
        try:
            os.replace(source, target)
        except PermissionError:
            time.sleep(wait_seconds)
        else:
            return
    os.replace(source, target)


def unlink(path: Path) -> None:
    """Delete a file."""
    os.unlink(path)


def hold(path: Path) -> Handle | None:
    """Open a file that is going to be deleted, when closing it later is worth it; it is not read.

    Not part of the seam: nothing is changed, and where it fails the file is deleted without.
    """
    if sys.platform == "win32":  # where a file that is open cannot be deleted
        return None
    handle = Handle(path)
    try:
        handle.open(os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        status = os.fstat(handle.fileno())
    except OSError:
        handle.close()
        return None
    if status.st_size < _HELD_BYTES or status.st_nlink != 1:
        handle.close()
        return None
    return handle


def remove_tree(path: Path) -> None:
    """Delete a directory and all that is in it; links in it are deleted, not followed.

    Raises:
        OSError: Something could not be deleted; the rest may be gone.
    """
    for place, directories, files in os.walk(path, topdown=False, onerror=_raise):
        for name in files:
            os.unlink(os.path.join(place, name))
        for name in directories:
            inner = os.path.join(place, name)
            os.unlink(inner) if os.path.islink(inner) else os.rmdir(inner)
    os.rmdir(path)


def _raise(error: OSError) -> None:
    raise error


def unlink_unclaimed(path: Path) -> bool:
    """Delete a file unless a live process has a `claim` on it; return whether it was deleted.

    Raises:
        OSError: It could not be opened or deleted, or the file system has no locks to tell.
    """
    with Handle(path) as handle:
        if sys.platform != "win32":  # there, a file that is open cannot be deleted
            handle.open(os.O_RDWR | os.O_NONBLOCK | _NOFOLLOW)
            try:
                fcntl.flock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        os.unlink(path)
    return True


def is_locked(path: Path) -> bool | None:
    """Return whether another process has locked a file; None where that cannot be told.

    Not part of the seam: nothing is changed.
    """
    if sys.platform == "win32":
        return None
    with contextlib.suppress(OSError), Handle(path) as handle:
        handle.open(os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        try:
            fcntl.flock(handle.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None


def open_regular(path: Path, flags: int) -> Handle:
    """Open a file of ours by its name, and refuse what another user may have put in its place.

    In a directory that others can write into, the name may be a link to any file of this user, or a pipe without
    another end. No link is followed, no pipe is waited for, and what was opened is examined before it is used. Windows
    has no flag that refuses links: there the name is examined first, and a link made between the two is followed.

    Not part of the seam: callers are.

    Args:
        path: The file.
        flags: As for ``os.open``. With any right to write, a file with a second name (a hard link) is refused, and in
            a sticky directory the file of another user.

    Raises:
        OSError: The system refused, or the file is not a plain file of ours; nothing was read or written.
    """
    if not _NOFOLLOW and os.path.islink(path):
        raise _link_error(path)
    handle = Handle(path)
    try:
        handle.open(flags | _NOFOLLOW | _NONBLOCK)
        _check_regular(path, os.fstat(handle.fileno()), writing=bool(flags & (os.O_WRONLY | os.O_RDWR)))
    except OSError as error:
        handle.close()
        if error.errno in {errno.ELOOP, errno.EMLINK} and os.path.islink(path):  # EMLINK: FreeBSD's answer
            raise _link_error(path) from None
        raise
    return handle


def _check_regular(path: Path, status: os.stat_result, *, writing: bool) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "This is not a regular file; delete or rename it", str(path))
    if not writing:
        return
    if status.st_nlink > 1:
        reason = f"This file has {status.st_nlink} names (hard links), and a write would change it under all of them"
        raise OSError(errno.EMLINK, f"{reason}; replace it by a copy, or delete it", str(path))
    if sys.platform != "win32" and status.st_uid not in {os.geteuid(), 0}:
        # As in /tmp, where the owner of a file keeps it from everybody else: it was put there, not shared.
        parent = os.stat(path.parent)
        if parent.st_mode & stat.S_ISVTX and parent.st_mode & _OTHERS_WRITE and parent.st_uid != status.st_uid:
            reason = f"This file belongs to user id {status.st_uid}, in a directory where other users create files"
            raise PermissionError(errno.EACCES, reason, str(path))


def _link_error(path: Path) -> OSError:
    return OSError(errno.ELOOP, "This is a symbolic link, which is not followed here; delete or rename it", str(path))


def read(path: Path, limit_bytes: int = -1) -> bytes:
    """Return the content of a file of ours, or its first bytes. Not part of the seam: nothing is changed.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, or is not a regular file.
    """
    with open_regular(path, os.O_RDONLY | _BINARY) as handle, open(handle.fileno(), "rb", closefd=False) as file:
        return file.read(limit_bytes)


def open_append(path: Path) -> tuple[Handle, int]:
    """Open a file, made if need be, for `append`, and return it with its length."""
    handle = open_regular(path, _APPEND)
    return handle, os.lseek(handle.fileno(), 0, os.SEEK_END)


def append(target: Path | Handle, lines: bytes) -> None:
    """Append whole lines to a file, in one write; a cut line before them is ended first.

    Args:
        target: A path; or what `open_append` returned, which saves most of the time when there are many calls.
        lines: Ending with a newline.

    Raises:
        OSError: Nothing, or a part that the next call will end, was written.
    """
    if isinstance(target, Handle):
        _append(target, lines)
        return
    with open_regular(target, _APPEND) as handle:
        _append(handle, lines)


def _append(handle: Handle, lines: bytes) -> None:
    descriptor = handle.fileno()
    end = os.lseek(descriptor, 0, os.SEEK_END)
    if end:
        os.lseek(descriptor, end - 1, os.SEEK_SET)
        if os.read(descriptor, 1) != b"\n":
            lines = b"\n" + lines
    if os.write(descriptor, lines) != len(lines):
        raise OSError(errno.ENOSPC, "only a part of the line was written", str(handle.path))
