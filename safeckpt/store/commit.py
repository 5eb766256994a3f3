"""Makes a file appear under its final name all at once, whole and durable, or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from safeckpt.errors import DurabilityUnknownError, SafeckptWarning
from safeckpt.store import deferred, disk, names
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from typing_extensions import Buffer

    T = TypeVar("T")

__all__ = ["commit", "commit_several", "write_new"]


def commit(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], T],
    *,
    check: Callable[[BinaryIO, T], None] | None = None,
    step: int | None = None,
    size_bytes: int | None = None,
) -> T:
    """Write a file and give it its final name in one atomic, durable step.

    Whatever happens, `path` holds its old content (or nothing) or the whole new content, also when the process is
    killed or the power fails at any moment. A symlink or one of several hard links is replaced by a new regular file.

    Args:
        path: The final name. The directory has to exist.
        write: Writes the content into the unbuffered file that it is given, and may read it back. Each ``write`` call
            takes all of its data or raises; after a failed one nothing can be committed any more.
        check: Looks at the content, from its start, before it is synced, and at what `write` has returned; refuses it
            by raising.
        step: The step, when the file is a checkpoint in a directory whose writer lock is held. Without it, temporary
            files that dead processes left for this very path are removed first.
        size_bytes: Size that the file will have, when it is known: for the text when the disk is full.

    Returns:
        What `write` returned.

    Raises:
        IsADirectoryError: `path` is a directory.
        OSError: Anything the system refused, with its errno. Nothing was committed, the temporary file is gone.
        DurabilityUnknownError: The file has its final name, but a power loss may still take it back.
        BaseException: Whatever `write` or `check` raised. Nothing was committed, the temporary file is gone.

    Cost:
        One pass of writing, one fsync of the file, one of the directory.
    """
    target = _target(path)
    deferred.wait()
    temp: Path | None = None
    file: NewFile | None = None
    claim: disk.Handle | None = None
    # The directory is opened before anything is written: once the rename is done it is too late to find out that
    # there are no descriptors left, or that this directory can be written but not opened.
    with disk.open_directory(target.parent) as directory:
        if step is None:
            _sweep_own(target)
        try:
            while file is None or claim is None:
                # In the same directory, since a rename is atomic only inside one file system; under a random name,
                # since two writers of one path must not write into each other's file.
                temp = target.with_name(names.temp_name(target.name))
                try:
                    file = NewFile(disk.create(temp))
                except FileExistsError:
                    temp = None  # not ours to remove
                    raise
                # From here to the rename no other process's sweep takes this file for a dead one's.
                claim = disk.claim(file.raw)
                if claim is None:  # a sweep came between the two lines above
                    file.close()
            result = _fill(file, write, check)
            deferred.replace(temp, target)  # type: ignore[arg-type]  # a file has its temporary name
            claim.close()
        except BaseException as error:
            _discard(file, claim, temp, error)
            if isinstance(error, OSError):
                _explain(error, target, 0 if file is None else file.written_bytes, size_bytes)
            raise
        # The commit point: until this has succeeded a power loss may undo the rename, so nothing older goes before.
        try:
            durable = disk.sync_directory(directory)
        except OSError as error:
            raise DurabilityUnknownError(path=target, number=error.errno, reason=str(error), step=step) from error
    if not durable:
        warn_caller(
            f"The file system of {target.parent} cannot sync directories: a power loss may take the newest files.",
            SafeckptWarning,
        )
    return result


def commit_several(files: Sequence[tuple[Path, Callable[[BinaryIO], object], int]]) -> None:
    """Write files of which the last one says that the others belong together, each as `commit` does.

    When the process is killed half-way the last one is missing, and the others are of no meaning.

    Args:
        files: Final name, what writes the content, and size in bytes of each.

    Raises:
        OSError, BaseException: As `commit`. What was written is removed again.
    """
    done: list[Path] = []
    try:
        for path, write, size_bytes in files:
            commit(path, write, size_bytes=size_bytes)
            done.append(path)
    except BaseException as error:
        for path in done:
            try:
                disk.unlink(path)
            except OSError as failure:
                error.add_note(f"{path} could not be removed ({failure}).")
        raise


def write_new(path: Path, write: Callable[[BinaryIO], T], *, size_bytes: int | None = None) -> T:
    """Write a file that did not exist, into a directory that is not listed before it is committed as a whole.

    Its content is durable when this returns, its name when its directory is synced.

    Args:
        path: Where.
        write: As for `commit`.
        size_bytes: As for `commit`.

    Returns:
        What `write` returned.

    Raises:
        OSError: Anything the system refused, with its errno. The file is gone.
        BaseException: Whatever `write` raised. The file is gone.
    """
    file = NewFile(disk.create(path))
    try:
        return _fill(file, write, None)
    except BaseException as error:
        _discard(file, None, path, error)
        if isinstance(error, OSError):
            _explain(error, path, file.written_bytes, size_bytes)
        raise


def _fill(file: NewFile, write: Callable[[BinaryIO], T], check: Callable[[BinaryIO, T], None] | None) -> T:
    """Write the content, and put it on the disk."""
    result = write(cast("BinaryIO", file))
    if file.failure is not None:  # a writer that swallows errors must not commit a file with a hole
        raise file.failure
    if check is not None:
        file.seek(0)
        check(cast("BinaryIO", file), result)
    # Content before name: a file system may put the rename on the disk long before the data. A failure is final for
    # this file, since the kernel may have marked the lost pages clean (fsyncgate).
    disk.sync(file.raw)
    # Closed before the rename: the last chance to hear of a failed write, and Windows renames no open file.
    file.close()
    return result


class NewFile(io.RawIOBase):
    """A file being written: unbuffered, every write takes all of its data or raises.

    Attributes:
        raw: The file object underneath.
        failure: What the first failed write raised; every later write raises it again.
        written_bytes: How much was written.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.failure: BaseException | None = None
        self.written_bytes = 0

    def write(self, data: Buffer) -> int:
        """Write all of the data."""
        if self.failure is not None:
            raise self.failure
        view = memoryview(data).cast("B")
        done = 0
        try:
            # One call takes at most 2 GiB on Linux, and may take less near a limit or after a signal, write(2).
            while done < len(view):
                taken = disk.write(self.raw, view[done:])
                if not taken:
                    raise OSError(errno.EIO, "the file system accepts no more data")  # noqa: TRY301
                done += taken
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.written_bytes += done
        return done

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer."""
        return self.raw.readinto(buffer)  # type: ignore[attr-defined, no-any-return]  # unbuffered files have it

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        return self.raw.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self.raw.tell()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.raw.fileno()

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file, once."""
        if not self.closed:
            try:
                disk.close(self.raw)
            finally:
                super().close()


def _target(path: str | os.PathLike[str]) -> Path:
    """Return the path when a file can be put there.

    A directory is refused before gigabytes are written, and a device or a pipe is refused at all: the rename would
    replace ``/dev/null`` by a file.
    """
    text = os.fspath(names.expand_user(path))
    target = Path(text)
    if not text:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
    try:
        mode = target.stat().st_mode
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and not target.is_symlink():
            raise
        mode = stat.S_IFREG  # missing, or a link that leads nowhere
    if stat.S_ISDIR(mode) or not target.name or text.endswith(("/", os.sep)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), text)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file; open it and save to the file object", text)
    return target


def _sweep_own(target: Path) -> None:
    with contextlib.suppress(OSError):
        for name in names.temps_of(target.name, disk.listing(target.parent)):
            # A file in use, of another user, or on a file system without locks stays.
            with contextlib.suppress(OSError):
                disk.unlink_unclaimed(target.with_name(name))


def _discard(file: NewFile | None, claim: disk.Handle | None, temp: Path | None, error: BaseException) -> None:
    """Close and remove the temporary file; a failure of that must not hide the error that led here."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
        file.failure = None  # its traceback holds this file and, in some frame, the whole payload
    if temp is not None:
        try:
            disk.unlink(temp)
        except FileNotFoundError:  # never created, or renamed already
            pass
        except OSError as failure:
            error.add_note(f"The temporary file {temp} could not be removed ({failure}); the next save removes it.")
    if claim is not None:
        claim.close()  # the last descriptor: only now are the blocks free


def _explain(error: OSError, target: Path, written_bytes: int, size_bytes: int | None) -> None:
    """Complete the system's error in place, so that its class, errno and traceback stay what they are."""
    if error.filename is None and error.errno is not None:
        error.filename = str(target)  # a failed write does not know its file
    needed = f"{size_bytes}" if size_bytes is not None else f"more than {written_bytes}"
    detail = None
    if error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}:
        with contextlib.suppress(OSError):
            detail = f"needs {needed} bytes, {shutil.disk_usage(target.parent).free} are free"
    elif error.errno == errno.EFBIG and sys.platform != "win32":
        import resource  # noqa: PLC0415 - POSIX only

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            detail = f"needs {needed} bytes, this process may write files of {limit}"
    if detail is not None:
        error.strerror = f"{error.strerror} ({detail})"
        error.args = (error.errno, error.strerror)  # what pickling keeps
