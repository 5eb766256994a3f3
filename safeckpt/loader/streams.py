"""The process-wide random streams of Python, NumPy and torch, kept apart from what the loader draws.

Order and augmentation of a batch are functions of (seed, epoch, batch) only. To get there the loader seeds the
three global streams around each piece of work, and in the training process puts them back bit for bit.

That happens once per batch, so it has to cost microseconds. All three are Mersenne Twisters, and the public calls
convert their 624 words one by one: `random.getstate` takes 16 us, `numpy.random.get_state` 45 us, `random.seed` 4 us.
Copying the bytes takes 0.2 us.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["PrivateStreams", "mix", "restore_streams", "save_streams", "seed_streams"]

T = TypeVar("T")

_MASK = (1 << 64) - 1
_KEY = 4 * 624  # bytes of the words; the position in them has 4 more
_USED_UP = (624).to_bytes(4, sys.byteorder)  # the position after seeding: the next draw makes new words
_BEGINNING = bytes(4)
# Any: the stubs know neither of them nor NumPy's get_bit_generator and set_bit_generator.
_PYTHON: Any = vars(random)["_inst"]  # the functions of the module are its methods
_NUMPY: Any = np.random


def mix(state: int, part: int) -> int:
    """Return a 63-bit number that depends on every bit of both: one round of SplitMix64."""
    x = ((state ^ part) + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def _memory(address: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * (_KEY // 4 + 1)).from_address(address)).cast("B")


def _numpy_memory(bits: np.random.MT19937) -> memoryview:
    """Return the words of a Mersenne Twister and then its position: NumPy documents both the address and the order."""
    return _memory(bits.ctypes.state_address)


def _python_memory() -> memoryview | None:
    """Return the position of the hidden `random.Random` and then its words, None where that cannot be proven.

    `_random.Random` is an object header followed by these, in every CPython so far. It is believed only when the
    bytes at that place say the same as `getstate()`.
    """
    offset = object.__basicsize__
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < offset + _KEY + 4:
        return None
    for hidden in (random.Random(1), _PYTHON):  # noqa: S311 - any two with different words
        memory = _memory(id(hidden) + offset)
        position, *words = memory.cast("I")
        if hidden.getstate()[1] != (*words, position):
            return None
    return memory


_PYTHON_MEMORY = _python_memory()
_SCRATCH = np.random.MT19937()  # makes words out of a seed for the other two
_SCRATCH_MEMORY = _numpy_memory(_SCRATCH)
_numpy: tuple[Any, memoryview | None] = (None, None)  # the bit generator seen last, and its memory


def _numpy_stream() -> tuple[Any, memoryview | None]:
    """Return NumPy's bit generator and its memory, None when it is no Mersenne Twister."""
    global _numpy  # noqa: PLW0603 - looking the address up costs as much as all the rest
    bits = _NUMPY.get_bit_generator()
    if bits is not _numpy[0]:
        _numpy = (bits, _numpy_memory(bits) if type(bits) is np.random.MT19937 else None)
    return _numpy


def seed_streams(seed: int) -> None:
    """Set all three streams from one number that `mix` made, each from other bits of it.

    `torch.manual_seed` would reseed every accelerator too, and those streams belong to the training.
    """
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
    _SCRATCH._legacy_seeding((seed * 0x9E3779B97F4A7C15 >> 31) & 0xFFFFFFFF)
    if _PYTHON_MEMORY is not None:
        _PYTHON_MEMORY[4:] = _SCRATCH_MEMORY[:_KEY]
        _PYTHON_MEMORY[:4] = _USED_UP
        _PYTHON.gauss_next = None
    else:
        random.setstate((3, (*_SCRATCH_MEMORY[:_KEY].cast("I"), 624), None))
    bits, memory = _numpy_stream()
    if memory is None:
        np.random.seed(seed >> 32)  # noqa: NPY002 - the process-wide stream is the point
    else:
        _SCRATCH._legacy_seeding(seed >> 32)
        memory[:] = _SCRATCH_MEMORY
        _NUMPY.set_bit_generator(bits)  # forgets the kept half of a pair of normal numbers


def save_streams() -> tuple[Any, ...]:
    """Return the position of the three streams, to be given to `restore_streams` before anything else draws.

    NumPy's legacy normal draws in pairs and keeps the second half in a place that only `get_state` shows. Drawing one
    number shows it too: when the stream did not move, the number had been kept. Restoring undoes the draw.
    """
    if _PYTHON_MEMORY is not None:
        python: Any = (_PYTHON_MEMORY.tobytes(), _PYTHON.gauss_next)
    else:
        python = random.getstate()
    bits, memory = _numpy_stream()
    if memory is None:
        return torch.default_generator.get_state(), python, bits, np.random.get_state(legacy=False), None  # noqa: NPY002
    words = memory.tobytes()
    memory[_KEY:] = _BEGINNING  # or the draw might have to make new words
    number = np.random.standard_normal()  # noqa: NPY002
    kept = number if memory[_KEY:] == _BEGINNING else None
    return torch.default_generator.get_state(), python, bits, words, kept


def restore_streams(saved: tuple[Any, ...]) -> None:
    """Put the three streams back, bit for bit."""
    state, python, bits, words, kept = saved
    torch.default_generator.set_state(state)
    if _PYTHON_MEMORY is not None:
        _PYTHON_MEMORY[:], _PYTHON.gauss_next = python
    else:
        random.setstate(python)
    _NUMPY.set_bit_generator(bits)  # forgets the kept half of a pair
    memory = _numpy_stream()[1]
    if memory is None:
        np.random.set_state(words)  # noqa: NPY002
    else:
        memory[:] = words
        if kept is not None:
            key = np.frombuffer(words, dtype=np.uint32)
            np.random.set_state(("MT19937", key[:-1], int(key[-1]), 1, kept))  # noqa: NPY002


class PrivateStreams:
    """Streams of its own for work that is done piece by piece: each piece goes on where the last one ended.

    Args:
        seed: Where the streams begin.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: tuple[Any, ...] | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, done on these streams; the process's own ones do not move."""
        outside = save_streams()
        try:
            if self._own is None:
                seed_streams(self._seed)
            else:
                restore_streams(self._own)
            result = work()
            self._own = save_streams()
        finally:
            restore_streams(outside)
        return result
