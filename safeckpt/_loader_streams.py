"""The process-wide random streams of Python, NumPy and torch, kept apart from what the loader draws.

Order and augmentation of a batch are functions of (seed, epoch, batch) only. To get there the loader seeds the
three global streams around each piece of work, and in the training process puts them back bit for bit.

Saving and restoring happens once per batch there, so it has to cost microseconds. The public `getstate` calls
build 624 Python integers one by one (16 us for `random`, 45 us for `numpy.random`); copying the bytes takes 1 us.
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
_WORDS = 625  # Mersenne Twister: 624 words of state and the position in them
_BYTES = 4 * _WORDS
_PYTHON = random._inst  # type: ignore[attr-defined]  # the functions of the module are its methods


def mix(state: int, part: int) -> int:
    """Return a 63-bit number that depends on every bit of both: one round of SplitMix64."""
    x = ((state ^ part) + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def seed_streams(seed: int) -> None:
    """Set all three streams from one number that `mix` made.

    torch takes its low 32 bits and NumPy the others, since both start a Mersenne Twister the same way; Python
    takes all of it, in another way. `torch.manual_seed` would reseed every accelerator too, and those streams
    belong to the training.
    """
    torch.default_generator.manual_seed(seed)
    _random.Random.seed(_PYTHON, seed)
    _PYTHON.gauss_next = None
    np.random.seed(seed >> 32)  # noqa: NPY002 - the process-wide stream is the point


def _python_address() -> int | None:
    """Return where the hidden `random.Random` keeps its words, None where that cannot be proven.

    `_random.Random` is an object header followed by the position and the 624 words, in every CPython so far.
    It is believed only when the bytes at that place say the same as `getstate()`.
    """
    offset = object.__basicsize__
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < offset + _BYTES:
        return None
    for hidden in (random.Random(1), _PYTHON):  # noqa: S311 - any two with different words
        address: int = id(hidden) + offset
        position, *words = (ctypes.c_uint32 * _WORDS).from_address(address)
        if hidden.getstate()[1] != (*words, position):
            return None
    return address


_PYTHON_ADDRESS = _python_address()


def _save_python() -> Any:
    if _PYTHON_ADDRESS is None:
        return random.getstate()
    return ctypes.string_at(_PYTHON_ADDRESS, _BYTES), _PYTHON.gauss_next


def _restore_python(saved: Any) -> None:
    if _PYTHON_ADDRESS is None:
        random.setstate(saved)
        return
    words, _PYTHON.gauss_next = saved
    ctypes.memmove(_PYTHON_ADDRESS, words, _BYTES)


def _save_numpy() -> Any:
    """Return (bit generator, its bytes, the number that `standard_normal` would return without drawing, or None).

    The legacy normal draws in pairs and keeps the second half in a place that only `get_state` shows. Drawing one
    number shows it too: when the stream did not move, the number had been kept. Restoring undoes the draw.
    """
    bits = np.random.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        return bits, np.random.get_state(legacy=False), None  # noqa: NPY002
    address = bits.ctypes.state_address  # the documented C interface: 624 words, then the position
    words = ctypes.string_at(address, _BYTES)
    number = np.random.standard_normal()  # noqa: NPY002
    moved = ctypes.string_at(address + _BYTES - 4, 4) != words[-4:]
    return bits, words, None if moved else number


def _restore_numpy(saved: Any) -> None:
    bits, state, kept = saved
    np.random.set_bit_generator(bits)  # also forgets the kept half of a pair
    if isinstance(state, dict):
        np.random.set_state(state)  # noqa: NPY002
        return
    ctypes.memmove(bits.ctypes.state_address, state, _BYTES)
    if kept is not None:
        words = np.frombuffer(state, dtype=np.uint32)
        np.random.set_state(("MT19937", words[:-1], int(words[-1]), 1, kept))  # noqa: NPY002


def save_streams() -> tuple[Any, Any, Any]:
    """Return the position of the three streams, to be given to `restore_streams` before anything else draws."""
    return torch.default_generator.get_state(), _save_python(), _save_numpy()


def restore_streams(saved: tuple[Any, Any, Any]) -> None:
    """Put the three streams back, bit for bit."""
    torch.default_generator.set_state(saved[0])
    _restore_python(saved[1])
    _restore_numpy(saved[2])


class PrivateStreams:
    """Streams of its own for work that is done piece by piece: each piece goes on where the last one ended.

    Args:
        seed: Where the streams begin.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: tuple[Any, Any, Any] | None = None

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
