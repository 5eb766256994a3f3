"""Look for NaN and Inf once more, in what is written.

The guard has looked at the live tensors a moment before. Where another thread trains meanwhile, or a process with
shared memory, a NaN can arrive after it, and the file would push the last finite checkpoint out. So the private copies
that are written are looked at as well, while they are in the cache, by the thread that has just made the copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from safeckpt.errors import NonFiniteError, NonFiniteTensor

if TYPE_CHECKING:
    from safeckpt.file.writing.stable_copies import Memory

__all__ = ["Bits", "Guarded", "SecondLook", "refuse_nonfinite"]

_JOINED_BYTES: Final = 1 << 20  # small tensors are joined up to this before they are looked at


class Bits(NamedTuple):
    """How a dtype says NaN and Inf.

    Attributes:
        unsigned: Integers of the same width.
        magnitude: All bits but the sign.
        infinite: The magnitude of Inf; that of every NaN is larger.
        number: The type of NumPy that adds them up at the speed of memory, where there is one.
        parts: Numbers in an element.
    """

    unsigned: str
    magnitude: int
    infinite: int
    number: str | None = None
    parts: int = 1


class Guarded(NamedTuple):
    """A tensor that was found finite and is all of a record.

    Attributes:
        name: What the guard calls it.
        shape: Its shape, when its elements lie in the order of their indices; else their number.
        bits: How its dtype, also where the file calls its elements bytes, says NaN and Inf.
    """

    name: str
    shape: tuple[int, ...]
    bits: Bits


class SecondLook:
    """Looks at small records together: for one at a time, the calls would cost more than the work."""

    def __init__(self) -> None:
        self._waiting: dict[Bits, list[tuple[Memory, bytes]]] = {}
        self._bytes = 0

    def add(self, memory: Memory, data: bytes) -> None:
        """Take in a small record.

        Raises:
            NonFiniteError: One of those taken in holds NaN or Inf.
        """
        if memory.guarded is None:
            return
        self._waiting.setdefault(memory.guarded.bits, []).append((memory, data))
        self._bytes += len(data)
        if self._bytes >= _JOINED_BYTES:
            self.finish()

    def finish(self) -> None:
        """Look at what is left.

        Raises:
            NonFiniteError: One of those taken in holds NaN or Inf.
        """
        for bits, records in self._waiting.items():
            if not _is_finite(b"".join(data for _, data in records), bits):
                for memory, data in records:
                    refuse_nonfinite(memory, 0, data)
        self._waiting.clear()
        self._bytes = 0


def refuse_nonfinite(memory: Memory, start: int, data: bytes | memoryview) -> None:
    """Look at a piece of a record, which begins at a byte of it.

    Raises:
        NonFiniteError: It holds NaN or Inf, and was found finite by the guard.
    """
    if memory.guarded is None or _is_finite(data, memory.guarded.bits):
        return
    name, shape, bits = memory.guarded
    magnitudes = _magnitudes(data, bits).reshape(-1, bits.parts)
    nan = (magnitudes > bits.infinite).any(axis=1)
    inf = (magnitudes == bits.infinite).any(axis=1) & ~nan
    first = start // (bits.parts * magnitudes.itemsize) + int((nan | inf).argmax())
    index = tuple(int(place) for place in np.unravel_index(first, shape))
    raise NonFiniteError(
        tensors=[NonFiniteTensor(name, int(nan.sum()), int(inf.sum()), math.prod(shape), index)],
        next_step="save while nothing else changes the state: it was finite when the save began, and another thread or "
        "process has written to it since.",
    )


def _is_finite(data: bytes | memoryview, bits: Bits) -> bool:
    if bits.number is not None:
        with np.errstate(all="ignore"):
            if math.isfinite(np.frombuffer(data, bits.number).sum()):
                return True  # nearly always; a sum that overflows says nothing
    return int(_magnitudes(data, bits).max(initial=0)) < bits.infinite


def _magnitudes(data: bytes | memoryview, bits: Bits) -> np.ndarray:
    numbers = np.frombuffer(data, bits.unsigned)
    magnitudes: np.ndarray = numbers & numbers.dtype.type(bits.magnitude)
    return magnitudes
