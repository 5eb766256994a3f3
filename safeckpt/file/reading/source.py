"""One open file to read from, at any offset and from several threads.

A checkpoint is opened once: what is verified is what is loaded, also when its name goes to another file meanwhile
or is removed.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections import deque
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any
from zlib import crc32

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.checksum import CHUNK_BYTES, combine
from safeckpt.system.threads import Progress, in_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Part", "Readable", "Source", "SourceState", "source_of"]

_READ_BYTES = 1 << 20  # at a time and thread: stays in the cache between the read and its checksum
_SMALL_BYTES = 256 << 10
_ALONE_BYTES = 2 * CHUNK_BYTES  # less than this is read faster than a thread starts

SourceState = tuple[int, int, int, int]


class Source:
    """Bytes of one file.

    Attributes:
        path: What to call it in messages.
        size_bytes: Its length when it was opened.
        state: What changes when somebody writes into it or puts another one in its place, as it was then; None when it
            has no descriptor.
        descriptor: Of the open file, None when there is none.
    """

    def __init__(self, file: IO[bytes], path: str, *, owned: bool) -> None:
        self.file = file
        self.path = path
        self._owned = owned
        self.descriptor = _descriptor(file)
        self._lock = threading.Lock()
        self.size_bytes = (
            os.fstat(self.descriptor).st_size if self.descriptor is not None else file.seek(0, os.SEEK_END)
        )
        self.state = self._state_now()

    def _state_now(self) -> SourceState | None:
        if self.descriptor is None:
            return None
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Check that nobody has written into the file since it was opened: what was verified is what is read.

        Only size and times are looked at; a disk that answers differently the second time is not found.

        Raises:
            DamagedCheckpointError: Somebody has.
        """
        now = self._state_now()
        if now != self.state:
            raise DamagedCheckpointError(path=self.path, reason="it was written to while it was read")

    def map(self) -> torch.UntypedStorage:
        """Return memory that is mapped to the file; nothing is read yet.

        Raises:
            ValueError: It is no file on disk under its own name.
        """
        import torch  # noqa: PLC0415 - a check does without

        return torch.UntypedStorage.from_file(self.mappable_path(), False, self.size_bytes)  # type: ignore[return-value]  # of its own class

    def mappable_path(self) -> str:
        """Return a path at which the open file can be mapped, whatever its own name means by now.

        Raises:
            ValueError: There is none.
        """
        path = self.descriptor_path()
        if path is not None:
            return path
        if self.descriptor is not None and os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):  # noqa: PTH116
            return self.path
        raise ValueError(f"{self.path} cannot be mapped into memory: it is no file on disk under its own name")

    def descriptor_path(self) -> str | None:
        """Return a path that only the kernel can follow, to the open file itself; None where there is none."""
        path = f"/proc/self/fd/{self.descriptor}"
        return path if self.descriptor is not None and os.path.exists(path) else None  # noqa: PTH110

    def close(self) -> None:
        """Close the file if it was opened here."""
        if self._owned:
            self.file.close()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from an offset.

        Raises:
            DamagedCheckpointError: The file ends before.
        """
        filled = 0
        while filled < len(buffer):
            rest = buffer[filled:]
            if self.descriptor is not None:
                count = os.preadv(self.descriptor, [rest], offset + filled)
            else:
                with self._lock:
                    self.file.seek(offset + filled)
                    data = self.file.read(len(rest))
                count = len(data)
                rest[:count] = data
            if not count:
                raise DamagedCheckpointError(
                    path=self.path, reason=f"it ends at byte {offset + filled} while it is read"
                )
            filled += count

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from an offset."""
        if self.descriptor is None:
            with self._lock:
                self.file.seek(offset)
                data = self.file.read(length)
        else:
            data = os.pread(self.descriptor, length, offset)
        if len(data) == length:
            return data
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_with_crc(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer from an offset and return the CRC-32 of what was read, in a few threads where that pays.

        Raises:
            DamagedCheckpointError: The file ends before.
        """
        if len(buffer) <= _ALONE_BYTES or self.descriptor is None:
            return self._fill(buffer, offset)
        starts = list(range(0, len(buffer), CHUNK_BYTES))
        crcs = [0] * len(starts)
        todo = deque(range(len(starts)))

        def work() -> None:
            while todo:
                try:
                    index = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                start = starts[index]
                crcs[index] = self._fill(buffer[start : start + CHUNK_BYTES], offset + start)

        in_threads(work, todo.clear, name="safeckpt-read")
        whole = 0
        for start, crc in zip(starts, crcs, strict=True):
            whole = combine(whole, crc, min(CHUNK_BYTES, len(buffer) - start))
        return whole

    def _fill(self, buffer: memoryview, offset: int) -> int:
        crc = 0
        for start in range(0, len(buffer), _READ_BYTES):
            piece = buffer[start : start + _READ_BYTES]
            self.read_into(piece, offset + start)
            crc = crc32(piece, crc)
        return crc

    def crcs(self, ranges: Sequence[tuple[int, int]], progress: Progress | None = None) -> list[int]:
        """Return the CRC-32 of each (offset, length), computed in a few threads where that pays."""
        total = sum(length for _, length in ranges)
        if total <= _ALONE_BYTES or self.descriptor is None:
            if total <= _SMALL_BYTES:
                return [crc32(self.read(offset, length)) for offset, length in ranges]
            buffer = memoryview(bytearray(_READ_BYTES))
            return [self._crc(offset, length, buffer) for offset, length in ranges]
        pieces = [
            (index, start, min(CHUNK_BYTES, offset + length - start))
            for index, (offset, length) in enumerate(ranges)
            for start in range(offset, offset + length, CHUNK_BYTES)
        ]
        crcs = [0] * len(ranges)
        for (index, _, length), crc in zip(pieces, self._crcs_in_threads(pieces, progress), strict=True):
            crcs[index] = combine(crcs[index], crc, length)
        return crcs

    def _crcs_in_threads(self, pieces: Sequence[tuple[int, int, int]], progress: Progress | None) -> list[int]:
        crcs = [0] * len(pieces)
        todo = deque(range(len(pieces)))
        asking = threading.get_ident()
        ends = list(accumulate(length for _, _, length in pieces))

        def work() -> None:
            buffer = memoryview(bytearray(_READ_BYTES))
            while todo:
                try:
                    index = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                crcs[index] = self._crc(*pieces[index][1:], buffer)
                if progress is not None and threading.get_ident() == asking:
                    progress(ends[index], ends[-1])

        in_threads(work, todo.clear, name="safeckpt-verify")
        return crcs

    def _crc(self, offset: int, length: int, buffer: memoryview) -> int:
        crc = 0
        end = offset + length
        while offset < end:
            piece = buffer[: min(len(buffer), end - offset)]
            self.read_into(piece, offset)
            crc = crc32(piece, crc)
            offset += len(piece)
        return crc


class Readable(io.RawIOBase):
    """So many bytes as a file to read. What is derived from it has `readinto`.

    Args:
        size_bytes: How many there are.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


class Part(Readable):
    """A part of an open file, as a file to read.

    Args:
        source: The file.
        offset: Where the part begins.
        length: Its length.

    Raises:
        DamagedCheckpointError: The file does not have so many bytes.
    """

    def __init__(self, source: Source, offset: int, length: int) -> None:
        if not 0 <= offset <= offset + length <= source.size_bytes:
            raise DamagedCheckpointError(path=source.path, reason=f"it has no bytes {offset} to {offset + length}")
        super().__init__(length)
        self.name = source.path
        self._source = source
        self._offset = offset

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, as much as there is."""
        view = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._position)]
        self._source.read_into(view, self._offset + self._position)
        self._position += len(view)
        return len(view)


def _descriptor(file: IO[bytes]) -> int | None:
    """Return the descriptor of a regular file that is read as it stands on disk."""
    if not isinstance(file, (io.FileIO, io.BufferedReader, io.BufferedRandom)) or not hasattr(os, "preadv"):
        return None  # an object of the caller's own may have a descriptor and transform what it reads
    try:
        descriptor = file.fileno()
    except OSError:
        return None
    return descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def source_of(f: str | os.PathLike[str] | IO[bytes]) -> Source:
    """Open a path, or take an open file.

    Raises:
        OSError: From the system, as it is: FileNotFoundError, PermissionError, IsADirectoryError, ...
    """
    if isinstance(f, (str, os.PathLike)):
        path = os.fspath(f)
        mode = os.stat(path).st_mode  # noqa: PTH116  text stays text in the error
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would wait for whoever writes into it
            raise OSError(errno.EINVAL, "Not a regular file; open it, read it into an io.BytesIO and load that", path)
        return Source(open(path, "rb", buffering=0), path, owned=True)  # noqa: PTH123  closed by its owner
    if isinstance(f, io.BufferedRandom):
        f.flush()  # what was written to it and is not in the file yet
    name = getattr(f, "name", None)
    return Source(f, name if isinstance(name, str) else f"<{type(f).__name__}>", owned=False)
