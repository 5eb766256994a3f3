"""Small records, and what stands around all records, joined in one buffer as they will be in the file.

The bytes of a small tensor are copied once, into this buffer. There they are looked at, there their CRC-32 is taken,
and from there they are written: with thousands of them, any further copy or call for each would take longer than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

import numpy as np

from safeckpt.file import archive
from safeckpt.file.archive import ALIGNMENT_BYTES
from safeckpt.file.checksum import COMBINED_BYTES
from safeckpt.file.writing.second_look import look_at_joined
from safeckpt.file.writing.stable_copies import SMALL_BYTES, as_view

if TYPE_CHECKING:
    from safeckpt.file.archive import Entry
    from safeckpt.file.checksum import ChunkDigest
    from safeckpt.file.writing.stable_copies import Content

__all__ = ["SmallRecords"]

_CAPACITY_BYTES: Final = 3 * SMALL_BYTES  # stays in the cache, is enough for one write, and has room for any record


class SmallRecords:
    """A buffer for a stretch of the file, filled from front to back.

    Args:
        position: Where in the file the stretch begins.
    """

    def __init__(self, position: int) -> None:
        memory = np.empty(_CAPACITY_BYTES, np.uint8)
        self._address = memory.ctypes.data
        self._view = as_view(memory)
        self.clear(position)

    def clear(self, position: int) -> None:
        """Be empty, and begin at another place of the file."""
        self._records: list[tuple[Entry, Content, int]] = []  # and where in the buffer their data are
        self._finished = 0  # of the records, how many have their CRC-32
        self._start = self._end = position % ALIGNMENT_BYTES  # numbers are aligned as they are in the file

    @property
    def nbytes(self) -> int:
        """How many bytes are in it."""
        return self._end - self._start

    def add(self, data: bytes) -> bool:
        """Take in bytes that stand around records; return whether there was room for them."""
        end = self._end + len(data)
        if end > len(self._view):
            return False
        self._view[self._end : end] = data
        self._end = end
        return True

    def add_record(self, entry: Entry, content: Content) -> bool:
        """Take in a private copy of a whole record, and return whether there was room for it.

        Its CRC-32 is known after `finish`.
        """
        header = archive.local_header(entry)
        low = self._end + len(header)
        high = low + entry.size
        end = high + archive.descriptor_bytes(entry)
        if end > len(self._view):
            return False
        self._view[self._end : low] = header
        if isinstance(content, bytes):
            self._view[low:high] = content
        elif entry.size:
            content.copy_to(self._address + low)
        self._view[high:end] = bytes(end - high)
        self._records.append((entry, content, low))
        self._end = end
        return True

    def finish(self) -> None:
        """Look at the records so far, and take their CRC-32s.

        Raises:
            NonFiniteError: One of them holds NaN or Inf, and was found finite by the guard.
        """
        view = self._view
        fresh = self._records[self._finished :]
        look_at_joined(view, [(content, low) for _, content, low in fresh if not isinstance(content, bytes)])
        for entry, _, low in fresh:
            high = low + entry.size
            entry.crc = crc32(view[low:high])
            view[high : high + archive.descriptor_bytes(entry)] = archive.descriptor(entry)
        self._finished = len(self._records)

    def digested(self, digest: ChunkDigest) -> memoryview:
        """Finish, and return all bytes, which are in the digest then."""
        self.finish()
        done = self._start
        for entry, _, low in self._records:
            if entry.size >= COMBINED_BYTES:
                digest.add(self._view[done:low])
                done = low + entry.size
                digest.add(self._view[low:done], entry.crc)
        digest.add(self._view[done : self._end])
        return self._view[self._start : self._end]
