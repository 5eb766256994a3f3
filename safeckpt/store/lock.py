"""One writer a directory. Readers never lock."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import platform
import stat
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from safeckpt.errors import DirectoryLockedError, SafeckptWarning
from safeckpt.store import disk, holder, names
from safeckpt.system.arguments import checked_number
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import filelock

__all__ = ["WriterLock"]

_FOREVER_SECONDS = 1e9
_POLL_SECONDS = 0.05

# Lustre mounted without flock, NFS without a lock daemon, some FUSE file systems; flock(2).
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})

_Place = tuple[int, int]  # device and inode

_in_this_process: weakref.WeakSet[WriterLock] = weakref.WeakSet()  # those that were taken and not released


class WriterLock:
    """The right to write checkpoints into a directory.

    It belongs to this object in this process: a second object is refused, in this process too, and a forked child
    owns nothing. The system frees it when the process ends, however it ends. The lock file stays, since deleting it
    would let a waiting process and a new one lock two different files of the same name.

    Where the file system has no locks, the file that names the holder stands in for it: it is created exclusively, and
    `check` finds out when it has become another's. A process that was killed leaves that file behind; it is replaced
    when the process is known to be gone, which it is on its own host only.

    Where the file system grants locks without enforcing them (NFS mounted with ``nolock``), two writers are possible;
    random temporary names and the atomic rename then still keep every file whole.

    Attributes:
        directory: The directory.
        timeout_seconds: How long `acquire` waits for another process, 0 or more.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_seconds: float = 10.0) -> None:
        self.directory = Path(names.expand_user(directory)).absolute()
        self.timeout_seconds = checked_number("timeout_seconds", timeout_seconds)
        self._lock: filelock.BaseFileLock | None = None
        self._identity: _Place | None = None  # of the lock file
        self._place: _Place | None = None  # of the directory
        self._stand_in: holder.Holder | None = None  # our record, where there are no locks

    @property
    def held(self) -> bool:
        """True from `acquire` to `release`, in that process only; `check` says whether other processes see the lock."""
        if self._stand_in is not None:
            return bool(self._stand_in["pid"] == os.getpid())
        return self._lock is not None and self._lock.is_locked  # filelock knows about forks

    def acquire(self) -> None:
        """Take the lock; one that is held already is checked.

        Raises:
            DirectoryLockedError: Another process has it and kept it for the whole timeout, or another object in this
                process has it, which is not waited for.
            FileNotFoundError: There is no such directory.
            OSError: The lock file cannot be opened.

        Warns:
            SafeckptWarning: The file system has no locks.
        """
        import filelock  # noqa: PLC0415 - takes as long to import as all of the store, and reading needs no lock

        if self.held:
            self.check()
            return
        self._place = _place(self.directory)  # filelock would make a missing one, without syncing it
        self._refuse_own_process()
        self._stand_in = None
        # Kept before it is taken: an interrupt at any moment leaves something that release() can release.
        # thread_local=False: a background thread may release what the training loop took.
        # preserve_lock_file=True: no deletion on Windows, and no fall-back to a marker file, which a kill leaves.
        self._lock = filelock.FileLock(
            self.directory / names.LOCK,
            mode=_lock_mode(self.directory),
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
            if error.errno not in _NO_LOCKS:
                self._explain(error)
                raise
            self._lock = None
            self._acquire_stand_in(error)
        except BaseException:
            self.release()
            raise
        _in_this_process.add(self)

    def check(self) -> None:
        """Check that the lock is still what other processes see.

        The lock file may have been deleted, and a second writer may have locked a new one of that name. After a failed
        check, `release` and `acquire` start over.

        Raises:
            DirectoryLockedError: This process does not hold the lock, or the lock file is not the one that it locked.
            OSError: The lock file cannot be looked at.
        """
        if not self.held:
            reason = "this process does not hold its writer lock"
            raise DirectoryLockedError(directory=self.directory, reason=reason, lost=True)
        if self._is_valid():
            return
        if _place(self.directory, missing=True) != self._place:
            raise DirectoryLockedError(
                directory=self.directory,
                lost=True,
                reason="the directory was deleted, renamed or replaced while this process was writing into it",
                next_step="find out what happened to it, and put it back if its checkpoints are needed. The next save "
                "makes the directory again where it is missing.",
            )
        if self._stand_in is not None:
            raise self._refusal(
                reason=f"{names.HOLDER}, which stands in for the lock, was deleted or replaced, so that another writer "
                "may have taken the directory",
                lost=True,
            )
        raise DirectoryLockedError(
            directory=self.directory,
            reason=f"{names.LOCK} was deleted or replaced while this process held it, so that another writer may "
            "have taken the directory",
            lost=True,
        )

    def other_holder(self) -> holder.Holder:
        """Return the record of another process that holds the directory now; empty when there is none.

        The lock is not taken for it, and no file is made.
        """
        if self.held:
            return {}
        found = holder.read(self.directory / names.HOLDER)
        if holder.is_own(found) or holder.is_gone(found) or disk.is_locked(self.directory / names.LOCK) is False:
            return {}
        return found

    def release(self) -> None:
        """Give the lock back; in a process that does not hold it, do nothing."""
        if not self.held:
            return
        _in_this_process.discard(self)
        try:
            # While the lock is held, and only if no other writer can have put its own record there.
            with contextlib.suppress(OSError):
                if self._is_valid():
                    disk.unlink(self.directory / names.HOLDER)
        finally:
            self._stand_in = None
            if self._lock is not None:
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

    def _is_valid(self) -> bool:
        """Tell whether other processes see the lock that this object holds."""
        if self._stand_in is not None:
            return bool(holder.read(self.directory / names.HOLDER).get("token") == self._stand_in["token"])
        return _place(self.directory / names.LOCK, missing=True) == self._identity

    def _refuse_own_process(self) -> None:
        """Refuse without waiting: the other manager cannot be closed while this call waits."""
        if not self._others():
            return
        gc.collect()  # a notebook's cell that is run again has dropped the only name of the manager before
        if self._others():
            raise DirectoryLockedError(
                directory=self.directory,
                pid=os.getpid(),
                host=platform.node(),
                reason="another CheckpointManager of this same process has not closed it",
                next_step="call close() of the other manager first, or use it in a `with` block, which closes it; in "
                "a notebook restart the kernel if no variable holds it any more. Reading needs no lock.",
            )

    def _others(self) -> bool:
        return any(
            lock is not self and lock._place == self._place and lock.held and lock._is_valid()
            for lock in list(_in_this_process)
        )

    def _acquire_stand_in(self, error: OSError) -> None:
        """Take the directory by creating the holder's file, where the file system has no locks."""
        path = self.directory / names.HOLDER
        record = holder.describe()
        end = time.monotonic() + self.timeout_seconds
        while True:
            try:
                holder.write(path, record)
            except FileExistsError:
                current = holder.read(path)
                # A record of this process belongs to a manager that was dropped without close().
                if holder.is_gone(current) or holder.is_own(current):
                    self._replace_holder(record)
                    break
                if time.monotonic() >= end:
                    raise self._refusal(
                        current, next_step=f"wait for that process or stop it. If it has ended, delete {path}."
                    ) from None
                time.sleep(_POLL_SECONDS)
            else:
                break
        self._stand_in = record
        self.check()  # when two writers replaced the record of a dead one, the later one holds the directory
        warn_caller(
            f"The file system of {self.directory} has no file locks ({error.strerror}). {names.HOLDER} stands in for "
            "the lock: a second writer is refused, or noticed at the next save. A process that is killed leaves this "
            "file; on another host it has to be deleted by hand before the next run.",
            SafeckptWarning,
        )

    def _replace_holder(self, record: holder.Holder) -> None:
        temp = self.directory / names.temp_name(names.HOLDER)
        holder.write(temp, record)
        disk.replace(temp, self.directory / names.HOLDER)

    def _write_holder(self) -> None:
        """Record who holds the lock, for the error of another process; a failure to do so is ignored."""
        path = self.directory / names.HOLDER
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
            holder.write(path, holder.describe())

    def _refusal(
        self,
        current: holder.Holder | None = None,
        *,
        reason: str = "another process is saving checkpoints into it",
        next_step: str | None = None,
        lost: bool = False,
    ) -> DirectoryLockedError:
        if current is None:
            current = holder.read(self.directory / names.HOLDER)
        pid, host, since = (current.get(name) for name in ("pid", "host", "since"))
        return DirectoryLockedError(
            directory=self.directory,
            pid=pid if isinstance(pid, int) else None,
            host=host if isinstance(host, str) else None,
            since=since if isinstance(since, str) else None,
            reason=reason,
            next_step=next_step,
            lost=lost,
        )

    def _explain(self, error: OSError) -> None:
        """Complete the system's error in place, so that its class, errno and traceback stay what they are."""
        error.add_note(f"The writer lock of {self.directory} could not be taken; nothing was written there.")
        if not isinstance(error, PermissionError) or sys.platform == "win32":
            return
        with contextlib.suppress(OSError):
            owner = (self.directory / names.LOCK).lstat().st_uid
            if owner != os.geteuid():
                error.strerror = (
                    f"{error.strerror} (user id {owner} made this lock file and may write it; that user, or the owner "
                    "of the directory, can delete it when no process writes into the directory, or chmod g+w it)"
                )
                error.args = (error.errno, error.strerror)  # what pickling keeps


def _place(path: Path, *, missing: bool = False) -> _Place | None:
    try:
        status = path.stat() if not missing else path.lstat()
    except FileNotFoundError:
        if not missing:
            raise
        return None
    return status.st_dev, status.st_ino


def _lock_mode(directory: Path) -> int:
    """Return the mode of a new lock file: every user who may write into the directory may lock it."""
    writers = directory.stat().st_mode & 0o222
    return writers | writers << 1 | 0o600
