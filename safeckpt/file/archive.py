"""The zip layout of a torch file, byte for byte: what stands around the records.

Everything here follows torch's own writer (miniz under ``PyTorchStreamWriter``), because readers depend on it:
records are stored, never compressed; sizes and CRC-32 follow a record in a data descriptor; an extra field ``FB``
pads the local header so that data starts at a multiple of 64; 64-bit fields appear only where a size or an offset
does not fit into 32 bits. ``torch.load`` computes offsets by the same rules
(``torch.utils.serialization.config.load.calculate_storage_offsets``).

The layout is a function of the records' names, sizes and CRCs. The writer uses that to lay out a file before it
writes, and the reader to name what is damaged: it lays the file out again and compares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ALIGNMENT_BYTES",
    "CENTRAL",
    "END",
    "END64",
    "END_BYTES",
    "FOLDER",
    "HEADER_RECORD",
    "LIMIT32",
    "LOCAL",
    "LOCATOR64",
    "MOST_HEADER_BYTES",
    "Buffer",
    "Entry",
    "central_directory",
    "descriptor",
    "descriptor_bytes",
    "end_of_archive",
    "layout",
    "local_header",
    "record_names",
    "tables_bytes",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

ALIGNMENT_BYTES = 64  # torch's default; the file carries it in the record .storage_alignment
FOLDER = "archive"  # torch's name for a file that it does not open itself, so the bytes do not depend on the path
HEADER_RECORD = "safeckpt.json"
MOST_HEADER_BYTES = 1 << 20
END_BYTES = 22  # the end record without its comment

# The fixed parts of a zip file (APPNOTE.TXT), their signatures first.
LOCAL = struct.Struct("<IHHHHHIIIHH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR64 = struct.Struct("<IIQI")
END = struct.Struct("<IHHHHIIH")
LOCAL_SIGNATURE = 0x04034B50
CENTRAL_SIGNATURE = 0x02014B50
END64_SIGNATURE = 0x06064B50
LOCATOR64_SIGNATURE = 0x07064B50
END_SIGNATURE = 0x06054B50
LIMIT32 = 0xFFFFFFFF

_UTF8 = 0x800
_SIZES_FOLLOW = 0x8
_LIMIT16 = 0xFFFF


@dataclass(slots=True)
class Entry:
    """One record of the archive.

    Attributes:
        name: Full name, with the top folder.
        size: Bytes of data.
        header_offset: Where its local header starts in the file.
        data_offset: Where its data starts.
        crc: CRC-32 of the data.
    """

    name: bytes
    size: int
    header_offset: int
    data_offset: int
    crc: int = field(default=0)

    @property
    def wide(self) -> bool:
        """True when the record needs 64-bit fields."""
        return self.size >= LIMIT32 or self.header_offset >= LIMIT32

    @property
    def flags(self) -> int:
        """Return the general purpose flags; torch gives an empty record no descriptor."""
        return _UTF8 | _SIZES_FOLLOW if self.size else _UTF8


def _wide_extra(entry: Entry, stored: int) -> bytes:
    """Return the 64-bit fields; the stored size is not yet known to torch's writer in the local header."""
    if not entry.wide:
        return b""
    fields = []
    if entry.size >= LIMIT32:
        fields += [entry.size, stored]
    if entry.header_offset >= LIMIT32:
        fields.append(entry.header_offset)
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields)


def local_header(entry: Entry) -> bytes:
    """Return what stands before the data of a record, padding included."""
    wide = _wide_extra(entry, 0)
    padding = entry.data_offset - entry.header_offset - LOCAL.size - len(entry.name) - len(wide) - 4
    before, after = _around_name(entry.flags, len(entry.name), len(wide), padding)
    return b"%s%s%s%s" % (before, entry.name, wide, after)


@lru_cache(maxsize=1024)
def _around_name(flags: int, name_bytes: int, wide_bytes: int, padding: int) -> tuple[bytes, bytes]:
    """Return what of a local header stands before the name, and after it and the 64-bit fields; most are alike."""
    after = b"FB%s%s" % (struct.pack("<H", padding), b"Z" * padding)
    return LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, name_bytes, wide_bytes + len(after)), after


def descriptor_bytes(entry: Entry) -> int:
    """Return the length of what stands after the data of a record."""
    if not entry.size:
        return 0
    return 24 if entry.wide else 16


def descriptor(entry: Entry) -> bytes:
    """Return what stands after the data of a record."""
    if not entry.size:
        return b""
    return struct.pack("<IIQQ" if entry.wide else "<IIII", 0x08074B50, entry.crc, entry.size, entry.size)


def record_names(count: int, *, header: bool) -> list[str]:
    """Return the names of all records of a file with ``count`` storages, in order.

    The header comes first, so that it is found without looking for it. Torch computes the offsets of storages from
    that of the first one, so nothing may stand between them.
    """
    before = [*[HEADER_RECORD] * header, "data.pkl", ".format_version", ".storage_alignment", "byteorder"]
    return [*before, *(f"data/{key}" for key in range(count)), "version", ".data/serialization_id"]


def layout(records: list[tuple[str, int]]) -> tuple[list[Entry], int]:
    """Place records, given as (name without folder, bytes), one after the other.

    Returns:
        The entries, their CRC still 0, and the offset at which the central directory starts.
    """
    entries = []
    offset = 0
    for name, size in records:
        entry = Entry(f"{FOLDER}/{name}".encode(), size, offset, 0)
        start = offset + LOCAL.size + len(entry.name) + len(_wide_extra(entry, 0)) + 4
        entry.data_offset = start + -start % ALIGNMENT_BYTES
        offset = entry.data_offset + size + descriptor_bytes(entry)
        entries.append(entry)
    return entries, offset


def central_directory(entries: Sequence[Entry]) -> bytes:
    """Return the table of contents."""
    parts: list[bytes] = []
    for entry in entries:
        size, header_offset = entry.size, entry.header_offset
        extra = _wide_extra(entry, size)
        if extra:
            size, header_offset = min(size, LIMIT32), min(header_offset, LIMIT32)
        fixed = CENTRAL.pack(
            CENTRAL_SIGNATURE, 0, 0, entry.flags, 0, 0, 0, entry.crc, size, size,
            len(entry.name), len(extra), 0, 0, 0, 0, header_offset,
        )  # fmt: skip
        parts += (fixed, entry.name, extra)
    return b"".join(parts)


def tables_bytes(entries: Sequence[Entry]) -> int:
    """Return the length of what stands between the last record and the comment."""
    names = sum(CENTRAL.size + len(entry.name) + len(_wide_extra(entry, entry.size)) for entry in entries)
    return names + END64.size + LOCATOR64.size + END.size


def end_of_archive(count: int, directory_offset: int, directory_bytes: int, comment_bytes: int) -> bytes:
    """Return what stands between the central directory and the comment."""
    end64_offset = directory_offset + directory_bytes
    end64 = END64.pack(
        END64_SIGNATURE, END64.size - 12, 0x031E, 0x2D, 0, 0, count, count, directory_bytes, directory_offset
    )
    locator = LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, end64_offset, 1)
    end = END.pack(
        END_SIGNATURE, 0, 0, min(count, _LIMIT16), min(count, _LIMIT16),
        min(directory_bytes, LIMIT32), min(directory_offset, LIMIT32), comment_bytes,
    )  # fmt: skip
    return end64 + locator + end
