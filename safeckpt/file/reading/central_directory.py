"""Read the table of contents of a torch file, and refuse what torch would misread.

``torch.load`` trusts the central directory. A flipped bit in it can make torch skip a record and return memory that
was never filled, and a crafted one can claim records that overlap, are compressed a thousandfold or lie outside the
file. So everything that torch writes in one fixed way has to be that way here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import archive
from safeckpt.file.archive import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_BYTES,
    END_SIGNATURE,
    FOLDER,
    HEADER_RECORD,
    LIMIT32,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR64,
    LOCATOR64_SIGNATURE,
    Entry,
)
from safeckpt.file.reading.foreign import NAME_ANOTHER, describe_foreign
from safeckpt.file.trailer import MAGIC, TRAILER_BYTES, Trailer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safeckpt.file.reading.source import Source

__all__ = ["Archive", "check_local_headers", "read_archive", "read_trailer"]

_USUAL_FLAGS = 0x808  # names are UTF-8, sizes follow the data
_DOS_ATTRIBUTES = 0xFF  # the upper bits are Unix modes, which other zip tools leave there
_FIXED_RECORDS = 6  # that every file has besides its storages
_DIRECTORY = "central directory"
_END_RECORD = "end record"


class Archive(NamedTuple):
    """An open file and the records in it, their places checked.

    Attributes:
        source: The file.
        trailer: With which it proves itself; None for a file that plain torch wrote.
        entries: The records, in the order in which they lie in the file.
        folder: Name of the top folder that all of them are in.
    """

    source: Source
    trailer: Trailer | None
    entries: tuple[Entry, ...]
    folder: str

    def find(self, name: str) -> Entry | None:
        """Return a record by its name without the folder."""
        wanted = f"{self.folder}/{name}".encode()
        return next((entry for entry in self.entries if entry.name == wanted), None)

    def short_name(self, entry: Entry) -> str:
        """Return the name of a record without the folder."""
        return entry.name.decode()[len(self.folder) + 1 :]

    def read(self, entry: Entry) -> bytes:
        """Return the data of a record."""
        return self.source.read(entry.data_offset, entry.size)

    def damaged(self, reason: str, record: str | None = None, *, tensors: Sequence[str] = ()) -> DamagedCheckpointError:
        """Return the error for this file."""
        return DamagedCheckpointError(path=self.source.path, reason=reason, record=record, tensors=tensors)


def read_trailer(source: Source) -> Trailer | None:
    """Return the trailer, None when the file is a zip that never had one.

    Raises:
        DamagedCheckpointError: There is a trailer and it is not whole, or the file is longer or shorter than it says,
            or this is no zip file at all.
        FormatVersionError: The trailer is of a newer format.
    """
    tail = source.read(
        max(0, source.size_bytes - END_BYTES - TRAILER_BYTES), min(source.size_bytes, END_BYTES + TRAILER_BYTES)
    )
    end, text = tail[:-TRAILER_BYTES], tail[-TRAILER_BYTES:]
    is_ours = text.startswith(MAGIC)
    if len(tail) == END_BYTES + TRAILER_BYTES and (is_ours or _is_end(end, TRAILER_BYTES)):
        trailer = Trailer.parse(text, source.path)
        expected = trailer.size_bytes + TRAILER_BYTES
        if expected != source.size_bytes:
            raise DamagedCheckpointError(
                path=source.path,
                reason=f"it has {source.size_bytes} bytes, its trailer says {expected}",
                record="trailer",
            )
        if not _is_end(end, TRAILER_BYTES):
            raise DamagedCheckpointError(path=source.path, reason="its end record is not whole", record=_END_RECORD)
        return trailer
    if _is_end(tail[-END_BYTES:], 0):
        return None
    raise describe_foreign(source)


def _is_end(data: bytes, comment_bytes: int) -> bool:
    if len(data) != END_BYTES:
        return False
    fields = END.unpack(data)
    return bool(fields[0] == END_SIGNATURE and fields[-1] == comment_bytes)


def read_archive(source: Source, trailer: Trailer | None) -> Archive:
    """Read and check the table of contents.

    Raises:
        DamagedCheckpointError: Anything in it differs from how torch and safeckpt write it.
    """
    end_offset = source.size_bytes - END_BYTES - (TRAILER_BYTES if trailer else 0)
    offset, length, count = _locate(source, end_offset)
    data = source.read(offset, length)
    if trailer is None and b"/constants.pkl" in data:
        raise DamagedCheckpointError(
            path=source.path, reason="it is a TorchScript archive", next_step="load it with torch.jit.load"
        )
    entries = _entries(source, data, count)
    if trailer is not None:
        _check_own_layout(source, entries, offset, data, end_offset)
        return Archive(source, trailer, tuple(entries), FOLDER)
    folder = _check_names(source, entries)
    _check_torch_layout(source, entries, offset)
    return Archive(source, None, tuple(entries), folder)


def _damaged(source: Source, reason: str, record: str = _DIRECTORY) -> DamagedCheckpointError:
    return DamagedCheckpointError(path=source.path, reason=reason, record=record)


def _locate(source: Source, end_offset: int) -> tuple[int, int, int]:
    """Return offset, length and number of entries of the central directory."""
    _, disk, first_disk, here, count, length, offset, _ = END.unpack(source.read(end_offset, END_BYTES))
    end = end_offset
    locator_offset = end_offset - LOCATOR64.size
    if locator_offset >= 0:
        signature, _, end64_offset, disks = LOCATOR64.unpack(source.read(locator_offset, LOCATOR64.size))
        if signature == LOCATOR64_SIGNATURE:
            if disks != 1 or end64_offset != locator_offset - END64.size:
                raise _damaged(source, "the end of the archive is not where it says", _END_RECORD)
            signature, _, _, _, disk, first_disk, here, count, length, offset = END64.unpack(
                source.read(end64_offset, END64.size)
            )
            if signature != END64_SIGNATURE:
                raise _damaged(source, "the end of the archive is not whole", _END_RECORD)
            end = end64_offset
    if disk or first_disk or here != count or offset + length != end:
        raise _damaged(source, "the table of contents is not where the end of the archive says", _END_RECORD)
    if count * CENTRAL.size > length:
        raise _damaged(source, f"{count} records do not fit into a table of contents of {length} bytes", _END_RECORD)
    return offset, length, count


def _entries(source: Source, data: bytes, count: int) -> list[Entry]:
    entries = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > len(data):
            raise _damaged(source, "the table of contents is cut")
        fields = CENTRAL.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length = fields[:13]
        disk, _, attributes, header_offset = fields[13:]
        if signature != CENTRAL_SIGNATURE:
            raise _damaged(source, "an entry of the table of contents does not start as one")
        at += CENTRAL.size
        name = data[at : at + name_length]
        extra = data[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        shown = name.decode("ascii", "backslashreplace")
        if not _is_stored(method, flags):
            how = "compressed" if method else "encrypted" if flags & 1 else "stored in a way that torch does not use"
            raise _damaged(source, f"record {shown} is {how}")
        if attributes & _DOS_ATTRIBUTES or disk:
            # Torch returns memory that was never filled for a record whose attributes say "directory".
            raise _damaged(source, f"record {shown} has file attributes")
        size, packed, header_offset = _wide(source, shown, extra, (size, packed, header_offset))
        if not _is_whole(size, packed):
            raise _damaged(source, f"record {shown} is {size} bytes stored in {packed}")
        entries.append(Entry(name, size, header_offset, -1, crc))
    if at != len(data):
        raise _damaged(source, "the table of contents has an unexpected length")
    return entries


def _is_stored(method: int, flags: int) -> bool:
    """Return whether a record is as it is, neither compressed nor encrypted."""
    return method == 0 and flags & ~_USUAL_FLAGS == 0


def _is_whole(size: int, stored_size: int) -> bool:
    return size == stored_size


def _wide(source: Source, name: str, extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """Replace the values that did not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            fields = iter(
                struct.unpack(f"<{length // 8}Q", extra[at : at + length // 8 * 8].ljust(length // 8 * 8, b"\0"))
            )
            try:
                size, packed, offset = (next(fields) if value == LIMIT32 else value for value in values)
            except RuntimeError:
                raise _damaged(source, f"record {name} lacks its size") from None
            return size, packed, offset
        at += length
    return values


def _check_names(source: Source, entries: list[Entry]) -> str:
    if not any(entry.name.endswith(b"/data.pkl") for entry in entries):
        reason = "it is a zip archive, but no torch file: there is no data.pkl in it"
        raise DamagedCheckpointError(path=source.path, reason=reason, record=_DIRECTORY, next_step=NAME_ANOTHER)
    folders = set()
    seen = set()
    for entry in entries:
        try:
            name = entry.name.decode()
        except UnicodeDecodeError:
            raise _damaged(source, f"a record has the name {entry.name!r}") from None
        parts = name.split("/")
        inner = name.partition("/")[2]
        if not _is_inside(parts) or "\\" in inner or not inner.isprintable():
            raise _damaged(source, f"a record has the name {name!r}")
        if _folded(name) in seen:
            raise _damaged(source, f"there are two records with the name {name!r}")
        seen.add(_folded(name))
        folders.add(parts[0])
    if len(folders) != 1:
        raise _damaged(source, "it is a zip archive, but no torch file: there is more than one folder in it")
    folder: str = folders.pop()
    return folder


def _is_inside(parts: list[str]) -> bool:
    """Return whether a path stays in its top folder."""
    return len(parts) >= 2 and all(parts) and not {".", ".."} & set(parts)


def _folded(name: str) -> str:
    return name.lower()  # torch does not tell upper from lower case when it looks for a record


def _check_own_layout(source: Source, entries: list[Entry], offset: int, data: bytes, end_offset: int) -> None:
    """Lay the file out again from names and sizes; everything must be where it was."""
    found = {entry.name for entry in entries}
    header = f"{FOLDER}/{HEADER_RECORD}".encode() in found
    names = archive.record_names(max(0, len(entries) - _FIXED_RECORDS - header), header=header)
    if len(names) != len(entries):
        raise _damaged(source, "records are missing")
    expected, end = archive.layout([(name, entry.size) for name, entry in zip(names, entries, strict=True)])
    for entry, own in zip(entries, expected, strict=True):
        own.crc = entry.crc
        if entry.name != own.name:
            raise _damaged(source, f"a record is called {entry.name!r} and should be {own.name.decode()}")
        entry.data_offset = own.data_offset
    tail = source.read(offset + len(data), end_offset + END_BYTES - offset - len(data))
    if offset != end or archive.central_directory(expected) != data:
        raise _damaged(source, "the table of contents is not what was written")
    if tail != archive.end_of_archive(len(entries), offset, len(data), TRAILER_BYTES):
        raise _damaged(source, "the end of the archive is not what was written", _END_RECORD)


def check_local_headers(file: Archive) -> None:
    """Compare the headers of all records of an own file with what was written.

    Torch finds the data of a record by them, and the scan by the layout: a digest that somebody computed anew does
    not vouch for both being the same bytes.

    Raises:
        DamagedCheckpointError: One of them differs.
    """
    for entry in file.entries:
        header = file.source.read(entry.header_offset, entry.data_offset - entry.header_offset)
        if header != archive.local_header(entry):
            where = f"header of {file.short_name(entry)}"
            raise file.damaged("bytes around the records are not those written", where)


def _check_torch_layout(source: Source, entries: list[Entry], directory_offset: int) -> None:
    """Find the data of every record; records must not overlap, so that their sizes add up to less than the file."""
    entries.sort(key=lambda entry: entry.header_offset)
    end = 0
    for entry in entries:
        where = f"header of {entry.name.decode()}"
        if entry.header_offset < end or entry.header_offset + LOCAL.size > directory_offset:
            raise _damaged(source, "records overlap or lie outside the file", where)
        fields = LOCAL.unpack(source.read(entry.header_offset, LOCAL.size))
        signature, _, flags, method, *_, name_length, extra_length = fields
        start = entry.header_offset + LOCAL.size
        if (
            signature != LOCAL_SIGNATURE
            or not _is_stored(method, flags)
            or source.read(start, name_length) != entry.name
        ):
            raise _damaged(source, "it differs from the table of contents", where)
        entry.data_offset = start + name_length + extra_length
        end = _end_of(entry)
        if end > directory_offset:
            raise _damaged(source, "records overlap or lie outside the file", where)


def _end_of(entry: Entry) -> int:
    return entry.data_offset + entry.size
