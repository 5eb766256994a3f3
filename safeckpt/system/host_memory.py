"""Copy host memory by its address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

__all__ = ["copy_small"]

# The address of `ctypes.memmove`, called as a function of Python's own is: those keep the interpreter lock.
_memmove: Final[Callable[[int, int, int], int]] = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def copy_small(to: int, origin: int, nbytes: int) -> None:
    """Copy a few bytes, at most some hundred KB, without letting other threads run meanwhile.

    `ctypes.memmove` lets go of the interpreter lock, and a thread that does so may wait for its turn beside one that is
    busy in Python: up to a switch interval, 5 ms, for a small tensor that takes microseconds to copy.

    Args:
        to: Address of host memory.
        origin: Address of other host memory.
        nbytes: How many bytes; both have as many.
    """
    _memmove(to, origin, nbytes)
