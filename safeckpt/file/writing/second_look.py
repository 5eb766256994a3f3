"""Look for NaN and Inf once more, in what is written.

The guard has looked at the live tensors a moment before. Where another thread trains meanwhile, or a process with
shared memory, a NaN can arrive after it, and the file would push the last finite checkpoint out. So the private copies
that are written are looked at as well, while they are in the cache, by the thread that has just made the copy.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from safeckpt.errors import NonFiniteError, NonFiniteTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from safeckpt.file.writing.stable_copies import Memory

__all__ = ["Bits", "Guarded", "look_at_joined", "refuse_nonfinite"]


class Bits(NamedTuple):
    """How a dtype says NaN and Inf.

    Attributes:
        unsigned: Integers of the same width.
        magnitude: All bits but the sign.
        infinite: The magnitude of Inf; that of every NaN is larger.
        number: The type of NumPy that compares them at the speed of memory, where there is one.
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
    """

    name: str
    shape: tuple[int, ...]


def look_at_joined(joined: memoryview, records: Iterable[tuple[Memory, int]]) -> None:
    """Look at small records together: for one at a time, the calls would cost more than the work.

    Args:
        joined: Bytes of a file in which the records are; what is between two of them is looked at as well. It is text,
            small numbers and zeros. Should it ever look like NaN, the records are looked at one by one.
        records: The records in order, and where in those bytes each begins.

    Raises:
        NonFiniteError: One of them holds NaN or Inf, and was found finite by the guard.
    """
    for bits, run in groupby(records, lambda record: record[0].bits):
        if bits is None:
            continue
        group = list(run)
        (_, low), (last, end) = group[0], group[-1]
        if not _is_finite(joined[low : end + last.nbytes], bits):
            for memory, start in group:
                refuse_nonfinite(memory, 0, joined[start : start + memory.nbytes])


def refuse_nonfinite(memory: Memory, start: int, data: bytes | memoryview) -> None:
    """Look at a piece of a record, which begins at a byte of it.

    Raises:
        NonFiniteError: It holds NaN or Inf, and was found finite by the guard.
    """
    bits = memory.bits
    if bits is None or _is_finite(data, bits):
        return
    name, shape = memory.guarded
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
    if not len(data):
        return True
    if bits.number is not None:
        numbers = np.frombuffer(data, bits.number)
        with np.errstate(all="ignore"):
            return math.isfinite(numbers.max()) and math.isfinite(numbers.min())  # NaN is both
    return int(_magnitudes(data, bits).max(initial=0)) < bits.infinite


def _magnitudes(data: bytes | memoryview, bits: Bits) -> np.ndarray:
    numbers = np.frombuffer(data, bits.unsigned)
    magnitudes: np.ndarray = numbers & numbers.dtype.type(bits.magnitude)
    return magnitudes
