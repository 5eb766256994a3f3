"""Note which records hold nothing but tensors that the guard has found finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from safeckpt.file.writing.second_look import Bits
from safeckpt.file.writing.spans import view_of
from safeckpt.system.tensor_kind import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safeckpt.file.writing.spans import Span

__all__ = ["mark_guarded"]

_HALF: Final = Bits("u2", 0x7FFF, 0x7C00)
_SINGLE: Final = Bits("u4", 0x7FFFFFFF, 0x7F800000, "f4")
_DOUBLE: Final = Bits("u8", (1 << 63) - 1, 0x7FF << 52, "f8")
_BITS: Final = {
    torch.float16: _HALF,
    torch.bfloat16: Bits("u2", 0x7FFF, 0x7F80),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex64: _SINGLE._replace(parts=2),
    torch.complex128: _DOUBLE._replace(parts=2),
}


def mark_guarded(
    finite: Iterable[tuple[str, torch.Tensor]],
    by_id: Mapping[int, Span],
    whole: Mapping[int, Span],
    spans: Iterable[Span],
) -> None:
    """Note which records hold nothing but elements of tensors that the guard found finite.

    Args:
        finite: Names and tensors that the guard has looked at.
        by_id: Records by the identity of their tensors.
        whole: The same for tensors that are all of their storage.
        spans: All records.
    """
    others: list[tuple[str, torch.Tensor]] = []
    for name, tensor in finite:
        bits = _BITS.get(tensor.dtype)
        if bits is None:
            continue
        span = whole.get(id(tensor))
        if span is None:
            others.append((name, tensor))
        elif span.bits is None and span.nbytes:  # nearly always: the tensor is all of the record
            span.guard(name, tensor, bits)
    if others:
        _mark_joined(others, by_id, spans)


def _mark_joined(finite: Iterable[tuple[str, torch.Tensor]], by_id: Mapping[int, Span], spans: Iterable[Span]) -> None:
    """Note the records that several tensors fill together, and those of tensors that are known by address alone."""
    by_address: dict[int, Span] | None = None  # for tensors made of NumPy arrays, each time anew
    found: dict[Span, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in finite:
        if not is_plain(tensor) or not tensor.numel():
            continue
        span = by_id.get(id(tensor))
        if span is None:
            if by_address is None:
                by_address = {one.storage.data_ptr() + one.low: one for one in spans if one.nbytes}
            span = by_address.get(tensor.data_ptr())
        if span is not None and span.bits is None:
            found.setdefault(span, []).append((name, tensor))
    for span, tensors in found.items():
        if _fill(span, [tensor for _, tensor in tensors]):
            _guard(span, tensors)


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


def _guard(span: Span, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    whole = [(name, tensor) for name, tensor in tensors if tensor.nbytes == span.nbytes]
    name, tensor = whole[0] if whole else (", ".join(name for name, _ in tensors[:3]), tensors[0][1])
    span.guard(name, tensor, _BITS[tensor.dtype])
