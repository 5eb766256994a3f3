"""Host memory that another process can map, under a descriptor that is handed over to it.

Not in `/dev/shm`: in a container that often holds 64 MiB, and who writes more into it is ended with SIGBUS. Such memory
belongs to no file and no name, so nothing is left when the last process that has it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Final, Self

__all__ = ["IS_SHARING_POSSIBLE", "SharedMemory", "shared_memory_at"]

IS_SHARING_POSSIBLE: Final = sys.platform == "linux" and hasattr(os, "memfd_create")

_of_this_process: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


class SharedMemory(mmap.mmap):
    """Some host memory; it lives as long as anything that was made of its buffer.

    Attributes:
        descriptor: What another process maps.
        address: Where it is in this process.
        before_release: Called with the address while the memory is still mapped, in the process that made it.
    """

    descriptor: int
    address: int
    before_release: Callable[[int], object] | None = None
    _pid = 0

    def __new__(cls, nbytes: int) -> Self:
        """Make memory, all zeros.

        Args:
            nbytes: How much, 1 or more.

        Raises:
            OSError: From the system; a limit of file sizes holds for it, too.
        """
        descriptor = os.memfd_create("safeckpt")
        try:
            with open(descriptor, "r+b", closefd=False) as memory:
                memory.truncate(nbytes)
            self = super().__new__(cls, descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.descriptor = descriptor
        self._pid = os.getpid()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with contextlib.suppress(OSError):  # only a hint: most systems have no large pages for it
            self.madvise(mmap.MADV_HUGEPAGE)
        _of_this_process.add(self)
        return self

    def __del__(self) -> None:
        """Tell who has to know; a callback of a weak reference would come when nothing is mapped there any more."""
        if self.before_release is not None and self._pid == os.getpid() and not sys.is_finalizing():
            self.before_release(self.address)


def shared_memory_at(address: int) -> SharedMemory | None:
    """Return the shared memory in which an address is."""
    found = (one for one in list(_of_this_process) if one.address <= address < one.address + len(one))
    return next(found, None)
