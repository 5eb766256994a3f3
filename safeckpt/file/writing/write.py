"""Write one file: an ordinary torch file that proves itself.

torch's own writer is not used. It aborts the process when ``write()`` raises inside its destructor, hides
KeyboardInterrupt and errno behind a RuntimeError, and takes its CRC-32s in the writing thread. Here an error of
``write()`` surfaces as it is, and checksums are computed in other threads while the caller's thread writes.

Nothing of torch is needed for it, so that a process which does nothing else is there in no time.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from safeckpt.file import archive
from safeckpt.file.archive import ALIGNMENT_BYTES
from safeckpt.file.checksum import ChunkDigest, CrcPool, combine
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.trailer import TRAILER_BYTES, Trailer
from safeckpt.file.writing.small_records import SmallRecords
from safeckpt.file.writing.stable_copies import SMALL_BYTES, StableCopies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safeckpt.file.archive import Buffer, Entry
    from safeckpt.file.writing.stable_copies import Content
    from safeckpt.system.threads import Progress

__all__ = ["ID_BYTES", "JoinedFile", "PreparedFile", "Writable", "Write", "WrittenFile", "write_here"]

ID_BYTES = 40  # of the serialization id


class Writable(Protocol):
    """Anything that takes bytes."""

    def write(self, data: Any, /) -> Any:
        """Write bytes and return how many, or None when all were taken."""


class WrittenFile(NamedTuple):
    """The size and digest of a file that was written.

    Attributes:
        size_bytes: Length of the file, trailer included.
        digest: The one in the trailer, in hex.
        offsets: At which byte each of its archives begins.
        tail: What stands after its last record: the table of contents and the trailer.
    """

    size_bytes: int
    digest: str
    offsets: tuple[int, ...]
    tail: bytes


@dataclass(frozen=True)
class PreparedFile:
    """A file that is all decided and not yet written: its pickle is made and checked, its length is known.

    It refers to the tensors of its payload. Those that change while it is written are in the file as they were at some
    moment, and the file verifies: its digest is of the bytes that went into it.

    Attributes:
        size_bytes: Length that the file will have, trailer included.
    """

    size_bytes: int
    _entries: Sequence[Entry]
    _contents: Sequence[Content]
    _is_plain: bool
    _has_trailer: bool

    def write(self, f: Writable, progress: Progress | None = None) -> WrittenFile:
        """Write it.

        Args:
            f: Where to write; raw files that write short are fine.
            progress: Called with bytes written and bytes in all, after each piece of some megabytes.

        Returns:
            Size and digest.

        Raises:
            OSError: From ``f``, as it is; what was written so far is not a whole file.
            NonFiniteError: A tensor that was finite when the save began holds NaN or Inf by now; what was written so
                far is not a whole file.

        Cost:
            One pass over the data and its bytes written once, through a few buffers of a megabyte that stay in the
            cache.
        """
        with CrcPool() as pool:
            writer = _Writer(f, pool, progress, self.size_bytes)
            writer.archive(self._entries, self._contents, comment_bytes=TRAILER_BYTES if self._has_trailer else 0)
            return writer.finish(trailer=self._has_trailer)

    @property
    def contents(self) -> Sequence[Content]:
        """What is in its records: bytes, or where in memory they are."""
        return self._contents

    def with_contents(self, others: Mapping[int, Content]) -> PreparedFile:
        """Return the same file with other contents in the place of some, which are known by their identity."""
        contents = [others.get(id(content), content) for content in self._contents]
        return dataclasses.replace(self, _contents=contents)

    def check(self, f: IO[bytes], written: WrittenFile) -> None:
        """Check that what was written can be read back; for `safeckpt.store.commit`, before the file has its name.

        Args:
            f: The file, open for reading.
            written: What `write` has returned.

        Raises:
            UnsavableStateError: A load would refuse it, or it is not what was written.

        Cost:
            About 3 us for a tensor; the data of tensors is not read.
        """
        from safeckpt.file.writing.readback import check_written  # noqa: PLC0415 - it needs torch

        records = list(zip(self._entries, self._contents, strict=False))
        with no_collection():
            check_written(f, self.size_bytes, records, written.tail, is_plain=self._is_plain)


class JoinedFile(NamedTuple):
    """Files one after the other in one, without a trailer.

    Attributes:
        parts: Made by `safeckpt.file.writing.prepare.prepare` with ``trailer=False``.
    """

    parts: Sequence[PreparedFile]

    @property
    def size_bytes(self) -> int:
        """Length that the file will have at least."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def contents(self) -> Sequence[Content]:
        """See `PreparedFile`."""
        return [content for part in self.parts for content in part.contents]

    def with_contents(self, others: Mapping[int, Content]) -> JoinedFile:
        """See `PreparedFile`."""
        return JoinedFile([part.with_contents(others) for part in self.parts])

    def write(self, f: Writable, progress: Progress | None = None) -> WrittenFile:
        """Write it, see `PreparedFile.write`."""
        with CrcPool() as pool:
            writer = _Writer(f, pool, progress, self.size_bytes)
            for part in self.parts:
                writer.archive(part._entries, part._contents, comment_bytes=0)
            return writer.finish(trailer=False)


# What writes such a file: where to, and what is told how far it is.
Write: TypeAlias = Callable[["PreparedFile | JoinedFile", IO[bytes], "Progress | None"], WrittenFile]


def write_here(prepared: PreparedFile | JoinedFile, f: IO[bytes], progress: Progress | None = None) -> WrittenFile:
    """Write a file in this process, see `PreparedFile.write`."""
    return prepared.write(f, progress)


class _Writer:
    """The sink: counts, digests, joins small writes."""

    def __init__(self, f: Writable, pool: CrcPool, progress: Progress | None = None, size_bytes: int = 0) -> None:
        self._progress = progress
        self._size_bytes = size_bytes
        self._sent_bytes = 0
        self._f = f
        self._pool = pool
        self._joined = SmallRecords(0)  # not written yet, nor in the digest
        self._digest = ChunkDigest()
        self._offsets: list[int] = []
        self._tail = b""

    def archive(self, entries: Sequence[Entry], contents: Sequence[Content], *, comment_bytes: int) -> None:
        """Write the records, the last of which is the serialization id, and the tables."""
        self._put(bytes(-self._position % ALIGNMENT_BYTES))
        start = self._position
        self._offsets.append(start)
        records = list(zip(entries, contents, strict=False))
        copies = StableCopies(self._pool, records, start)
        for entry, content in records:
            if entry.size < SMALL_BYTES:
                self._small_record(entry, content)
            else:
                self._large_record(entry, copies)
        self._joined.finish()
        self._small_record(entries[-1], _serialization_id(entries))
        self._joined.finish()
        directory = archive.central_directory(entries)
        directory_offset = self._position - start
        end = archive.end_of_archive(len(entries), directory_offset, len(directory), comment_bytes)
        self._tail = directory + end
        self._put(self._tail)

    def finish(self, *, trailer: bool) -> WrittenFile:
        """Write what is left, and return size and digest of what comes before the trailer."""
        self._flush()
        size_bytes, digest, tail = self._digest.size_bytes, self._digest.hexdigest(), self._tail
        if trailer:
            own = Trailer(digest=digest, size_bytes=size_bytes).to_bytes()
            self._send(own)
            size_bytes, tail = size_bytes + len(own), tail + own
        return WrittenFile(size_bytes, digest, tuple(self._offsets), tail)

    @property
    def _position(self) -> int:
        return self._digest.size_bytes + self._joined.nbytes

    def _small_record(self, entry: Entry, content: Content) -> None:
        if not self._joined.add_record(entry, content):
            self._flush()
            self._joined.add_record(entry, content)

    def _large_record(self, entry: Entry, copies: StableCopies) -> None:
        self._put(archive.local_header(entry))
        self._flush()
        entry.crc = 0
        left = entry.size
        while left:
            with copies.next() as (piece, crc):
                self._send(piece)
            left -= len(piece)
            self._digest.add_crc(crc, len(piece))
            entry.crc = combine(entry.crc, crc, len(piece))
        self._put(archive.descriptor(entry))

    def _put(self, data: bytes) -> None:
        """Have bytes written, together with what comes before and after them where there is room."""
        if not self._joined.add(data):
            self._flush()
            self._digest.add(data)
            self._send(data)
            self._joined.clear(self._position)

    def _flush(self) -> None:
        if self._joined.nbytes:
            self._send(self._joined.digested(self._digest))
        self._joined.clear(self._digest.size_bytes)

    def _send(self, data: Buffer) -> None:
        """Write all of it: a raw file may take less than it is given."""
        view = memoryview(data)
        while len(view) > 0:
            taken = self._f.write(view)
            if taken is None:
                if isinstance(self._f, io.RawIOBase):
                    raise BlockingIOError(errno.EAGAIN, "the file is in non-blocking mode and takes no bytes", taken)
                break  # objects of the caller's own need not count
            view = view[taken:]
        self._sent_bytes += len(data)
        if self._progress is not None:
            self._progress(self._sent_bytes, self._size_bytes)


def _serialization_id(entries: Sequence[Entry]) -> bytes:
    """Return 40 digits that depend on names and data, as torch's do; torch logs them and checks nothing."""
    lines = b"".join([b"%s\0%d\0%08x\n" % (entry.name, entry.size, entry.crc) for entry in entries[:-1]])
    return b"%0*d" % (ID_BYTES, int.from_bytes(hashlib.sha256(lines).digest(), "big") % 10**ID_BYTES)
