"""Look for NaN and Inf once more, in what is written.

The guard has looked at the live tensors a moment before. Where another thread trains meanwhile, or a process with
shared memory, a NaN can arrive after it, and the file would push the last finite checkpoint out. So the private copies
that are written are looked at as well, while they are in the cache, by the thread that has just made the copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from safeckpt.errors import NonFiniteError, NonFiniteTensor
from safeckpt.file.writing.spans import Guarded, view_of
from safeckpt.system.tensor_kind import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safeckpt.file.writing.spans import Span, View

__all__ = ["SecondLook", "mark_guarded", "refuse_nonfinite"]

_JOINED_BYTES: Final = 1 << 20  # small tensors are joined up to this before they are looked at


class _Bits(NamedTuple):
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


_HALF: Final = _Bits("u2", 0x7FFF, 0x7C00)
_SINGLE: Final = _Bits("u4", 0x7FFFFFFF, 0x7F800000, "f4")
_DOUBLE: Final = _Bits("u8", (1 << 63) - 1, 0x7FF << 52, "f8")
_BITS: Final = {
    torch.float16: _HALF,
    torch.bfloat16: _Bits("u2", 0x7FFF, 0x7F80),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex64: _SINGLE._replace(parts=2),
    torch.complex128: _DOUBLE._replace(parts=2),
}


class SecondLook:
    """Looks at small records together: for one at a time, the calls would cost more than the work."""

    def __init__(self) -> None:
        self._waiting: dict[torch.dtype, list[tuple[Span, bytes]]] = {}
        self._bytes = 0

    def add(self, span: Span, data: bytes) -> None:
        """Take in a small record.

        Raises:
            NonFiniteError: One of those taken in holds NaN or Inf.
        """
        if span.guarded is None:
            return
        self._waiting.setdefault(span.guarded.dtype, []).append((span, data))
        self._bytes += len(data)
        if self._bytes >= _JOINED_BYTES:
            self.finish()

    def finish(self) -> None:
        """Look at what is left.

        Raises:
            NonFiniteError: One of those taken in holds NaN or Inf.
        """
        for dtype, records in self._waiting.items():
            if not _is_finite(b"".join(data for _, data in records), _BITS[dtype]):
                for span, data in records:
                    refuse_nonfinite(span, 0, data)
        self._waiting.clear()
        self._bytes = 0


def refuse_nonfinite(span: Span, start: int, data: bytes | memoryview) -> None:
    """Look at a piece of a record, which begins at a byte of it.

    Raises:
        NonFiniteError: It holds NaN or Inf, and was found finite by the guard.
    """
    if span.guarded is None or _is_finite(data, _BITS[span.guarded.dtype]):
        return
    name, shape, dtype = span.guarded
    bits = _BITS[dtype]
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


def _is_finite(data: bytes | memoryview, bits: _Bits) -> bool:
    if bits.number is not None:
        with np.errstate(all="ignore"):
            if math.isfinite(np.frombuffer(data, bits.number).sum()):
                return True  # nearly always; a sum that overflows says nothing
    return int(_magnitudes(data, bits).max(initial=0)) < bits.infinite


def _magnitudes(data: bytes | memoryview, bits: _Bits) -> np.ndarray:
    numbers = np.frombuffer(data, bits.unsigned)
    magnitudes: np.ndarray = numbers & numbers.dtype.type(bits.magnitude)
    return magnitudes


def mark_guarded(
    finite: Iterable[tuple[str, torch.Tensor]], by_id: Mapping[int, tuple[Span, View]], spans: Iterable[Span]
) -> None:
    """Note which records hold nothing but elements of tensors that the guard found finite.

    Args:
        finite: Names and tensors that the guard has looked at.
        by_id: Records by the identity of their tensors, and where these are in them.
        spans: All records.
    """
    by_address: dict[int, Span] | None = None  # for tensors made of NumPy arrays, each time anew
    found: dict[Span, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in finite:
        if tensor.dtype not in _BITS or not is_plain(tensor) or not tensor.numel():
            continue
        span, _ = by_id.get(id(tensor), (None, None))
        if span is None:
            if by_address is None:
                by_address = {one.storage.data_ptr() + one.low: one for one in spans if one.nbytes}
            span = by_address.get(tensor.data_ptr())
        if span is not None:
            found.setdefault(span, []).append((name, tensor))
    for span, tensors in found.items():
        if _fill(span, [tensor for _, tensor in tensors]):
            span.guarded = _guarded(span, tensors)


def _fill(span: Span, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors of one dtype leave no byte of a record to anything else."""
    start, dtype = span.storage.data_ptr(), tensors[0].dtype
    same = [one for one in tensors if one.dtype == dtype and one.untyped_storage().data_ptr() == start]
    dense = (
        (view.low, view.high)
        for view, one in zip(map(view_of, same), same, strict=True)
        if view.high - view.low == one.nbytes
    )
    end = span.low
    for low, high in sorted(dense):
        if low > end:
            break
        end = max(end, high)
    return end == span.high


def _guarded(span: Span, tensors: Sequence[tuple[str, torch.Tensor]]) -> Guarded:
    for name, tensor in tensors:
        if tensor.nbytes == span.nbytes:
            shape = tuple(tensor.size()) if tensor.is_contiguous() else (tensor.numel(),)
            return Guarded(name, shape, tensor.dtype)
    first = tensors[0][1]
    return Guarded(", ".join(name for name, _ in tensors[:3]), (span.nbytes // first.element_size(),), first.dtype)
