"""Write one file: an ordinary torch file that proves itself.

torch's own writer is not used. It aborts the process when ``write()`` raises inside its destructor, hides
KeyboardInterrupt and errno behind a RuntimeError, and takes its CRC-32s in the writing thread. Here an error of
``write()`` surfaces as it is, and checksums are computed in other threads while the caller's thread writes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol
from zlib import crc32

from safeckpt.errors import UnsavableStateError
from safeckpt.file import archive
from safeckpt.file.archive import ALIGNMENT_BYTES, MOST_HEADER_BYTES
from safeckpt.file.checksum import ChunkDigest, CrcPool, combine
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from safeckpt.file.trailer import TRAILER_BYTES, Trailer
from safeckpt.file.writing.pickling import pickle_payload
from safeckpt.file.writing.readback import check_written
from safeckpt.file.writing.second_look import SecondLook
from safeckpt.file.writing.spans import StorageTypeConflictError
from safeckpt.file.writing.stable_copies import SMALL_BYTES, StableCopies, stable_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from safeckpt.file.archive import Buffer, Entry
    from safeckpt.file.writing.pickling import Pickled
    from safeckpt.file.writing.stable_copies import Content
    from safeckpt.system.threads import Progress

__all__ = ["PreparedFile", "Writable", "WrittenFile", "header_bytes", "prepare", "write_file", "write_joined"]

_JOINED_BYTES = 1 << 20  # small pieces are joined up to about this before they are written
_ID_BYTES = 40


class Writable(Protocol):
    """Anything that takes bytes."""

    def write(self, data: Any, /) -> Any:
        """Write bytes and return how many, or None when all were taken."""


@dataclass(frozen=True)
class WrittenFile:
    """The size and digest of a file that was written.

    Attributes:
        size_bytes: Length of the file, trailer included.
        digest: The one in the trailer, in hex.
        records: Number of records in the archive.
    """

    size_bytes: int
    digest: str
    records: int


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return the header record: JSON in ASCII, on one line, keys in the order given."""
    data = json.dumps(dict(header), separators=(",", ":")).encode("ascii") + b"\n"
    if len(data) > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {len(data)} bytes; {MOST_HEADER_BYTES} are the most")
    return data


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
            return _Writer(f, pool, progress, self.size_bytes).write(self._entries, self._contents)

    def check(self, f: IO[bytes]) -> None:
        """Check that what was written can be read back; for `safeckpt.store.commit`, before the file has its name.

        Args:
            f: The file, open for reading.

        Raises:
            UnsavableStateError: A load would refuse it, or it is not what was written.

        Cost:
            About 5 us for a tensor; the data of tensors is not read.
        """
        records = list(zip(self._entries, self._contents, strict=False))
        with no_collection():
            check_written(f, self.size_bytes, records, is_plain=self._is_plain)


def prepare(
    payload: object,
    *,
    header: Mapping[str, Any] | None = None,
    pickle_protocol: int = 2,
    trailer: bool = True,
    finite: Iterable[tuple[str, torch.Tensor]] = (),
) -> PreparedFile:
    """Pickle a payload and lay the file out; nothing is written.

    The bytes depend on the payload and the header alone.

    Args:
        payload: What :func:`safeckpt.file.writing.encoding.encode` returned.
        header: JSON values to be found without unpickling, see :meth:`CheckpointFile.header`.
        pickle_protocol: 2, or 3.
        trailer: Whether it proves itself; a part of another file, see :func:`write_joined`, has none.
        finite: Names and tensors of this very payload that the guard has found finite. They are looked at once more
            in what is written, since something else may write to them meanwhile.

    Raises:
        UnsavableStateError: A load would refuse it: the payload did not come from ``encode``.
    """
    with no_collection():
        try:
            pickled = pickle_payload(payload, pickle_protocol, finite)
        except StorageTypeConflictError as error:
            raise UnsavableStateError(location="payload", type_name="torch.Tensor", reason=str(error)) from None
        if not pickled.plain:
            _check_readable(pickled)
        contents: list[Content] = [] if header is None else [header_bytes(header)]
        byteorder = sys.byteorder.encode("ascii")
        contents += [pickled.data, b"1", b"%d" % ALIGNMENT_BYTES, byteorder, *pickled.spans, b"3\n"]
        names = archive.record_names(len(pickled.spans), header=header is not None)
        entries, directory_offset = archive.layout(list(zip(names, [*map(_size_of, contents), _ID_BYTES], strict=True)))
        size_bytes = directory_offset + archive.tables_bytes(entries) + (TRAILER_BYTES if trailer else 0)
        return PreparedFile(size_bytes, entries, contents, pickled.plain)


def write_joined(parts: Sequence[PreparedFile], f: Writable) -> tuple[list[int], WrittenFile]:
    """Write files one after the other into one.

    Args:
        parts: Made by :func:`prepare` with ``trailer=False``.
        f: Where to write.

    Returns:
        At which byte each begins, and size and digest of all of it.

    Raises:
        OSError: From ``f``, as it is.
    """
    with CrcPool() as pool:
        writer = _Writer(f, pool)
        offsets = [writer.archive(part._entries, part._contents, comment_bytes=0) for part in parts]
        return offsets, writer.finish(len(parts))


def write_file(
    payload: object, f: Writable, *, header: Mapping[str, Any] | None = None, pickle_protocol: int = 2
) -> WrittenFile:
    """Prepare a payload and write it, see :func:`prepare` and :meth:`PreparedFile.write`."""
    return prepare(payload, header=header, pickle_protocol=pickle_protocol).write(f)


def _size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.nbytes


def _check_readable(pickled: Pickled) -> None:
    """Read the pickle as a load will, before a byte of it is on the disk.

    Raises:
        UnsavableStateError: A load would refuse it: the payload did not come from encode(), or changed since.
    """
    try:
        scan_pickle(pickled.data)
    except UntrustedGlobalError as error:
        raise UnsavableStateError(location="payload", type_name=error.name) from None
    except PickleError as error:
        raise UnsavableStateError(location="payload", type_name="structure", reason=str(error)) from None


class _Writer:
    """The sink: counts, digests, joins small writes."""

    def __init__(self, f: Writable, pool: CrcPool, progress: Progress | None = None, size_bytes: int = 0) -> None:
        self._progress = progress
        self._size_bytes = size_bytes
        self._sent_bytes = 0
        self._f = f
        self._pool = pool
        self._small = bytearray()
        self._digest = ChunkDigest()

    def write(self, entries: Sequence[Entry], contents: Sequence[Content]) -> WrittenFile:
        """Write a file with its trailer."""
        self.archive(entries, contents, comment_bytes=TRAILER_BYTES)
        written = self.finish(len(entries))
        self._send(Trailer(digest=written.digest, size_bytes=written.size_bytes).to_bytes())
        return WrittenFile(written.size_bytes + TRAILER_BYTES, written.digest, written.records)

    def archive(self, entries: Sequence[Entry], contents: Sequence[Content], *, comment_bytes: int) -> int:
        """Write the records, the last of which is the serialization id, and the tables; return where they begin."""
        self._small += bytes(-(self._digest.size_bytes + len(self._small)) % ALIGNMENT_BYTES)
        start = self._digest.size_bytes + len(self._small)
        records = list(zip(entries, contents, strict=False))
        copies = StableCopies(self._pool, records, start)
        second_look = SecondLook()
        for entry, content in records:
            if entry.size < SMALL_BYTES:
                data = stable_copy(content)
                if not isinstance(content, bytes):
                    second_look.add(content, data)
                self._small_record(entry, data)
            else:
                self._large_record(entry, copies)
        second_look.finish()
        self._small_record(entries[-1], _serialization_id(entries))
        directory = archive.central_directory(entries)
        directory_offset = self._digest.size_bytes + len(self._small) - start
        self._put(directory)
        self._put(archive.end_of_archive(len(entries), directory_offset, len(directory), comment_bytes))
        return start

    def finish(self, records: int) -> WrittenFile:
        """Write what is left, and return size and digest of all so far."""
        self._flush()
        return WrittenFile(self._digest.size_bytes, self._digest.hexdigest(), records)

    def _small_record(self, entry: Entry, data: bytes) -> None:
        entry.crc = crc32(data)
        self._put(archive.local_header(entry) + data + archive.descriptor(entry))

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

    def _put(self, data: Buffer) -> None:
        self._small += data
        if len(self._small) >= _JOINED_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._small:
            data, self._small = self._small, bytearray()
            self._digest.add(data)
            self._send(data)

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
    digest = hashlib.sha256()
    for entry in entries[:-1]:
        digest.update(b"%s\0%d\0%08x\n" % (entry.name, entry.size, entry.crc))
    return b"%0*d" % (_ID_BYTES, int.from_bytes(digest.digest(), "big") % 10**_ID_BYTES)
