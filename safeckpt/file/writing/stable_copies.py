"""Take a private copy of every byte before it is written.

A tensor may change while it is saved: another thread trains, a process with shared memory writes. A digest of one
reading and a write of another would make a file that nothing can verify. So every byte is copied once, into memory
that nobody else has, and both digest and write are of that copy: a buffer that stays in the cache, so that it costs no
second pass over memory. Here this is done for large records, see `safeckpt.file.writing.small_records` for the others.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from safeckpt.file.checksum import CHUNK_BYTES
from safeckpt.file.writing.second_look import Bits, Guarded, refuse_nonfinite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safeckpt.file.archive import Entry
    from safeckpt.file.checksum import CrcPool, CrcTask, Look

__all__ = ["SMALL_BYTES", "Content", "Memory", "StableCopies", "as_view"]


class Memory(Protocol):
    """Bytes that are somewhere in memory, where others may change them."""

    @property
    def bits(self) -> Bits | None:
        """How they say NaN and Inf, when they have to be finite; how the file calls them does not matter."""

    @property
    def guarded(self) -> Guarded:
        """The tensor that they are all of, when they have to be finite."""

    @property
    def nbytes(self) -> int:
        """How many."""

    @property
    def is_on_host(self) -> bool:
        """Whether the processor reads them where they are."""

    def copy_to(self, address: int) -> None:
        """Copy all of them to an address in host memory."""

    def view(self) -> memoryview:
        """Return them, where they are on the host."""

    def staged(self, low: int, high: int) -> memoryview:
        """Return a private copy of some of them, where they are on a device."""


Content: TypeAlias = bytes | Memory

SMALL_BYTES = 256 << 10  # below this, copying into one buffer is cheaper than a system call and a thread
_PIECE_BYTES = 1 << 20  # divides CHUNK_BYTES
_MOST_AHEAD = 3  # pieces: one is written, two are copied and checksummed; more would not stay in the cache


class StableCopies:
    """Private copies of the pieces of large records, made and checksummed a little ahead in other threads.

    Args:
        pool: What copies and computes the checksums.
        records: All records of an archive; small ones are passed over.
        start: Where in the file the archive begins; pieces do not cross the borders of its chunks.
    """

    def __init__(self, pool: CrcPool, records: Sequence[tuple[Entry, Content]], start: int) -> None:
        self._pool = pool
        self._pieces = _pieces(records, start)
        self._buffers: list[memoryview] = []
        self._ahead: deque[tuple[memoryview, CrcTask, memoryview | None]] = deque()

    @contextmanager
    def next(self) -> Iterator[tuple[memoryview, int]]:
        """Give the next piece and its CRC-32; inside the block the bytes stay as they are."""
        while len(self._ahead) < _MOST_AHEAD and (source := next(self._pieces, None)) is not None:
            memory, is_private, look = source
            if is_private:
                self._ahead.append((memory, self._pool.submit(memory, look=look), None))
            else:
                buffer = self._buffers.pop() if self._buffers else as_view(np.empty(_PIECE_BYTES, np.uint8))
                copy = buffer[: len(memory)]
                self._ahead.append((copy, self._pool.submit(copy, copy_of=memory, look=look), buffer))
        piece, task, used = self._ahead.popleft()
        yield piece, task.result()
        if used is not None:
            self._buffers.append(used)


def _pieces(records: Sequence[tuple[Entry, Content]], start: int) -> Iterator[tuple[memoryview, bool, Look | None]]:
    """Yield the pieces of all large records in order, whether nobody else can change one, and what looks at it."""
    for entry, content in records:
        if entry.size < SMALL_BYTES:
            continue
        offset = start + entry.data_offset
        if isinstance(content, bytes):
            memory = memoryview(content)
            yield from ((memory[low:high], True, None) for low, high in _cuts(offset, entry.size, CHUNK_BYTES))
        elif content.is_on_host:
            memory = content.view()
            for low, high in _cuts(offset, entry.size, _PIECE_BYTES):
                yield memory[low:high], False, _look_at(content, low)
        else:
            for low, high in _cuts(offset, entry.size, CHUNK_BYTES):
                yield content.staged(low, high), True, _look_at(content, low)


def _look_at(memory: Memory, low: int) -> Look | None:
    """Return what looks at a part of a piece that begins at a byte of a record, given where in the piece it begins."""
    return None if memory.bits is None else lambda start, data: refuse_nonfinite(memory, low + start, data)


def as_view(array: np.ndarray) -> memoryview:
    """Return the memory of an array."""
    return memoryview(array)  # type: ignore[arg-type]  # NumPy's stubs predate the buffer protocol's


def _cuts(offset: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    low = 0
    while low < size:
        high = min(size, low + most - (offset + low) % most)
        yield low, high
        low = high
