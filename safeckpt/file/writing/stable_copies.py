"""Take a private copy of every byte before it is written.

A tensor may change while it is saved: another thread trains, a process with shared memory writes. A digest of one
reading and a write of another would make a file that nothing can verify. So every byte is copied once, into memory
that nobody else has, and both digest and write are of that copy. Of small tensors it is what joins them into large
writes; of large ones a buffer that stays in the cache, so that it costs no second pass over memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.file.checksum import CHUNK_BYTES
from safeckpt.file.writing.second_look import refuse_nonfinite
from safeckpt.file.writing.spans import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safeckpt.file.archive import Entry
    from safeckpt.file.checksum import CrcPool, CrcTask, Look

__all__ = ["SMALL_BYTES", "Content", "StableCopies", "stable_copy"]

Content: TypeAlias = bytes | Span

SMALL_BYTES = 64 << 10  # below this, copying into one buffer is cheaper than a system call and a thread
_PIECE_BYTES = 1 << 20  # divides CHUNK_BYTES
_MOST_AHEAD = 3  # pieces: one is written, two are copied and checksummed; more would not stay in the cache


def stable_copy(content: Content) -> bytes:
    """Return a private copy of a small record."""
    if isinstance(content, bytes):
        return content
    if not content.nbytes:
        return b""
    if content.storage.device.type != "cpu":
        return _bytes_of(content, content.low, content.high).cpu().numpy().tobytes()
    return ctypes.string_at(_address(content) + content.low, content.nbytes)


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
                buffer = self._buffers.pop() if self._buffers else _view(np.empty(_PIECE_BYTES, np.uint8))
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
        elif content.storage.device.type == "cpu":
            _address(content)
            memory = _view(_bytes_of(content, content.low, content.high).numpy())
            for low, high in _cuts(offset, entry.size, _PIECE_BYTES):
                yield memory[low:high], False, _look_at(content, low)
        else:
            for low, high in _cuts(offset, entry.size, CHUNK_BYTES):
                yield _staged(_bytes_of(content, content.low + low, content.low + high)), True, _look_at(content, low)


def _look_at(span: Span, low: int) -> Look | None:
    """Return what looks at a part of a piece that begins at a byte of a record, given where in the piece it begins."""
    return None if span.guarded is None else lambda start, data: refuse_nonfinite(span, low + start, data)


def _staged(data: torch.Tensor) -> memoryview:
    """Return a copy in host memory, through pinned memory where there is any."""
    # A fresh one for each piece. Pinned blocks come from torch's cache: the first few alone cost anything.
    pinned = torch.accelerator.current_accelerator() is not None and data.device.type != "mps"
    return _view(torch.empty(data.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned).copy_(data).numpy())


def _view(array: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # NumPy's stubs predate the buffer protocol's


def _cuts(offset: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    low = 0
    while low < size:
        high = min(size, low + most - (offset + low) % most)
        yield low, high
        low = high


def _bytes_of(span: Span, low: int, high: int) -> torch.Tensor:
    """Return bytes of a storage as a tensor that shares its memory."""
    # The device is named, since a default device may be set; the grad mode does not matter for integers.
    empty = torch.empty(0, dtype=torch.uint8, device=span.storage.device)
    return empty.set_(span.storage, low, (high - low,), (1,))


def _address(span: Span) -> int:
    """Return where a storage is in host memory, once it is sure that it is still all there.

    Raises:
        UnsavableStateError: It was made smaller since the file was laid out.
    """
    if span.storage.nbytes() < span.high:
        raise UnsavableStateError(
            location="payload",
            type_name="torch.Tensor",
            reason=f"its storage holds {span.storage.nbytes()} bytes and held {span.high} when the save began",
            cure="let nothing resize it during a save.",
        )
    return span.storage.data_ptr()
