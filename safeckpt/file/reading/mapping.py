"""A file that was mapped into memory: read it around the mapping, and let go of what was looked at.

Every page of a mapping that is touched counts as memory of this process until it is unmapped. A state of which each
tensor is looked at once and copied once would so be in memory twice.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from typing import TYPE_CHECKING

from safeckpt.system.libc import linux_call

if TYPE_CHECKING:
    import torch

    from safeckpt.file.reading.source import Source

__all__ = ["Mapped", "MappedFiles"]


class Mapped:
    """Where in memory the bytes of a file are.

    Args:
        source: The file.
        address: Of its first byte; None when nothing of it is mapped.
    """

    def __init__(self, source: Source, address: int | None) -> None:
        self._source = source
        self._address = address

    def read(self, address: int, buffer: memoryview) -> bool:
        """Fill a buffer with what is at an address, from the file; False when the address is not in it.

        Raises:
            DamagedCheckpointError: The file has become shorter.
            OSError: It could not be read.
        """
        if self._address is None or not self._address <= address <= self._end - len(buffer):
            return False
        self._source.read_into(buffer, address - self._address)
        return True

    def check_unchanged(self) -> None:
        """Check that nobody has written into the file since it was opened; see `Source.check_unchanged`.

        Raises:
            DamagedCheckpointError: Somebody has.
        """
        self._source.check_unchanged()

    def forget(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a contiguous tensor that lies in the mapping; looked at again, it is read again."""
        if self._address is None or _madvise is None or not tensor.is_cpu:
            return
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of its own
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._address <= start < end <= self._end:
            _madvise(start, end - start, mmap.MADV_DONTNEED)

    @property
    def address(self) -> int | None:
        """Of the first byte; None when nothing of the file is mapped."""
        return self._address

    @property
    def _end(self) -> int:
        return (self._address or 0) + self._source.size_bytes


class MappedFiles:
    """Several files that are mapped, as if they were one.

    Args:
        files: The files.
    """

    def __init__(self, *files: Mapped) -> None:
        self._files: list[Mapped] = []
        self._addresses: list[int] = []
        self._others: list[Mapped] = []
        for file in files:
            self.add(file)

    def add(self, file: Mapped) -> None:
        """Add a file."""
        if file.address is None:
            self._others.append(file)
        else:
            position = bisect.bisect(self._addresses, file.address)
            self._addresses.insert(position, file.address)
            self._files.insert(position, file)

    def read(self, address: int, buffer: memoryview) -> bool:
        """See `Mapped.read`."""
        file = self._at(address)
        return file is not None and file.read(address, buffer)

    def check_unchanged(self) -> None:
        """See `Mapped.check_unchanged`."""
        for file in (*self._files, *self._others):
            file.check_unchanged()

    def forget(self, tensor: torch.Tensor) -> None:
        """See `Mapped.forget`."""
        if tensor.is_cpu and (file := self._at(tensor.data_ptr())) is not None:
            file.forget(tensor)

    def _at(self, address: int) -> Mapped | None:
        """Return the file with the highest address that is not above."""
        position = bisect.bisect(self._addresses, address)
        return self._files[position - 1] if position else None


_madvise = linux_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
