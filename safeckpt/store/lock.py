"""One writer a directory. Readers never lock."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import os
import platform
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from safeckpt.errors import DirectoryLockedError
from safeckpt.store import disk, names
from safeckpt.system.arguments import checked_number

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["WriterLock"]

_FOREVER_SECONDS = 1e9
_HOLDER_BYTES = 1 << 14  # of a file that is ours, all of it


class WriterLock:
    """The right to write checkpoints into a directory.

    It belongs to this object in this process: a second object is refused, in this process too, and a forked child
    owns nothing. The system frees it when the process ends, however it ends. The lock file stays, since deleting it
    would let a waiting process and a new one lock two different files of the same name.

    Where the file system grants locks without enforcing them (NFS mounted with ``nolock``), two writers are possible;
    random temporary names and the atomic rename then still keep every file whole.

    Attributes:
        directory: The directory.
        timeout_seconds: How long `acquire` waits for another writer, 0 or more.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_seconds: float = 10.0) -> None:
        self.directory = Path(directory).absolute()
        self.timeout_seconds = checked_number("timeout_seconds", timeout_seconds)
        self._lock: filelock.BaseFileLock | None = None
        self._identity: tuple[int, int] | None = None

    @property
    def held(self) -> bool:
        """Whether this process took the lock and did not release it; `check` tells whether it is still worth it."""
        return self._lock is not None and self._lock.is_locked  # filelock knows about forks

    def acquire(self) -> None:
        """Take the lock; one that is held already is checked.

        Raises:
            DirectoryLockedError: Another writer has it and kept it for the whole timeout.
            FileNotFoundError: There is no such directory.
            OSError: The lock file cannot be opened, or the file system has no locks.
        """
        if self.held:
            self.check()
            return
        self.directory.stat()  # filelock would make a missing one, without syncing it
        # Kept before it is taken: an interrupt at any moment leaves something that release() can release.
        # thread_local=False: a background thread may release what the training loop took.
        # preserve_lock_file=True: no deletion on Windows, and no fall-back to a marker file, which a kill leaves.
        self._lock = filelock.FileLock(
            self.directory / names.LOCK,
            thread_local=False,
            preserve_lock_file=True,
            on_acquired=self._remember,
        )
        try:
            self._lock.acquire(timeout=min(self.timeout_seconds, _FOREVER_SECONDS))
            self._write_holder()
        except filelock.Timeout:
            raise self._refusal() from None
        except OSError as error:
            error.add_note(f"The writer lock of {self.directory} could not be taken; nothing was written there.")
            raise
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Check that the lock is still what other processes see.

        Somebody may have deleted the lock file, and a second writer may have locked the new one of that name. After
        a failed check `release` and `acquire` start over.

        Raises:
            DirectoryLockedError: This process does not hold the lock, or the lock file is not the one that it locked.
            OSError: The lock file cannot be looked at.
        """
        if not self.held:
            raise DirectoryLockedError(directory=self.directory, reason="this process does not hold its writer lock")
        if not self._is_same_file():
            raise DirectoryLockedError(
                directory=self.directory,
                reason=f"{names.LOCK} was deleted or replaced while this process held it, so that another writer may "
                "have taken the directory",
            )

    def release(self) -> None:
        """Give the lock back; in a process that does not hold it, do nothing."""
        if not self.held or self._lock is None:
            return
        try:
            # While the lock is still held, and only if nobody else can have taken the directory and written theirs.
            with contextlib.suppress(OSError):
                if self._is_same_file():
                    disk.unlink(self.directory / names.HOLDER)
        finally:
            self._lock.release(force=True)

    def mark(self) -> str:
        """Put an empty file with a random name into the directory and return the name, for others to look for it."""
        name = names.temp_name(names.LOCK)
        disk.close(disk.create(self.directory / name))
        return name

    def unmark(self, name: str) -> None:
        """Delete what `mark` made; what stands in the way stays."""
        with contextlib.suppress(OSError):
            disk.unlink(self.directory / name)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _remember(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):  # filelock follows no link, and locks a pipe
            path = str(self.directory / names.LOCK)
            raise OSError(errno.EINVAL, "This is not a regular file; delete or rename it", path)
        self._identity = (status.st_dev, status.st_ino)

    def _is_same_file(self) -> bool:
        try:
            status = (self.directory / names.LOCK).lstat()
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _write_holder(self) -> None:
        """Say who holds the lock, for the text of somebody else's error; not being able to is no reason to stop."""
        holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            # Not its arguments: the directory may be readable by people who must not see what is in them.
            "command": sys.argv[0] if sys.argv else "",
        }
        path = self.directory / names.HOLDER
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
            file = disk.create(path)
            try:
                disk.write(file, memoryview(json.dumps(holder).encode()))
            finally:
                disk.close(file)

    def _refusal(self) -> DirectoryLockedError:
        holder = _read_holder(self.directory / names.HOLDER)
        pid, host, since = (holder.get(name) for name in ("pid", "host", "since"))
        here = pid == os.getpid() and host == platform.node()
        return DirectoryLockedError(
            directory=self.directory,
            pid=pid if isinstance(pid, int) else None,
            host=host if isinstance(host, str) else None,
            since=since if isinstance(since, str) else None,
            reason="another writer in this same process has not closed it"
            if here
            else "another process is saving checkpoints into it",
        )


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(disk.read(path, _HOLDER_BYTES))
    except (OSError, ValueError, RecursionError):  # none, half of one, or another user's
        return {}
    return holder if isinstance(holder, dict) else {}
