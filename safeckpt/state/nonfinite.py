"""Find the tensors that hold NaN or Inf: fast when there is none, exact when there is one.

The fast pass is `torch.sum`: it reads memory at full speed, and one NaN or Inf makes it NaN or Inf. So may a sum of
huge numbers, so a tensor that fails it is looked at again by `torch.aminmax`, at two thirds of that speed, and only
one that fails this as well element by element: `isfinite(t).all()` writes a mask and is about thirty times slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from safeckpt.errors import NonFiniteTensor, UnsavableStateError
from safeckpt.system.tensor_kind import TensorKind, describe_missing_memory, is_plain, kind_of
from safeckpt.system.torch_private import coo_parts, is_wrapper

__all__ = ["masks", "nonfinite", "scan"]

_NATIVE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})  # what aminmax knows
_SUMMED = _NATIVE - {torch.float16}  # whose sum would overflow at 65,504, and in a wider type is ten times slower
# No NaN and no Inf in the format: nothing to look for. Named by string, since an older torch may lack one.
_ALWAYS_FINITE = frozenset({"torch.float4_e2m1fn_x2"})
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_COMPRESSED = (*_BY_ROW, torch.sparse_csc, torch.sparse_bsc)

_SMALL = 1 << 12  # elements up to which tensors are joined before they are looked at
_BATCH = 1 << 18  # elements of such a joint: 1 MiB of float32 stays in cache
_PIECE = 1 << 22  # elements that are converted at a time when aminmax does not know the dtype


def scan(named: Iterable[tuple[str, torch.Tensor]]) -> list[NonFiniteTensor]:
    """Report the tensors that are not finite, in order."""
    return [report for report, _ in nonfinite(named)]


def nonfinite(
    named: Iterable[tuple[str, torch.Tensor]], release: Callable[[torch.Tensor], None] | None = None
) -> list[tuple[NonFiniteTensor, torch.Tensor]]:
    """Return (report, tensor) of the tensors that are not finite, in order; the engine of every guard.

    Args:
        named: The tensors with their names.
        release: Called with every large piece of memory once it has been examined.

    Raises:
        UnsavableStateError: A tensor's dtype or layout cannot be examined; it is named.

    Cost:
        One pass over memory, and one device synchronisation per device and dtype.
    """
    entries: list[tuple[str, torch.Tensor]] = []
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for entry, values in _examined(named):
            numbers, members = groups.setdefault((values.device, values.dtype), ([], []))
            numbers.append(len(entries))
            members.append(values)
            entries.append(entry)
        candidates = [numbers[index] for numbers, members in groups.values() for index in _candidates(members, release)]
        found = [(_report(*entries[number]), entries[number][1]) for number in sorted(candidates)]
    return [(report, tensor) for report, tensor in found if report is not None]


def _examined(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[tuple[str, torch.Tensor], torch.Tensor]]:
    """Yield what can hold NaN or Inf, by name, and the values behind it."""
    for given in named:
        tensor = given[1]
        if is_plain(tensor) and tensor.dtype in _NATIVE:  # nearly always
            if tensor.numel():
                yield given, tensor
            continue
        for entry in (given,) if is_plain(tensor) else _entries(*given):
            values = _values(*entry)
            if values is not None:
                yield entry, values


def _entries(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a tensor that is not plain consists of; each rank guards its own shard of a DTensor."""
    kind = kind_of(tensor)
    if kind is TensorKind.EMPTIED:
        raise _not_examined(name, "emptied storage", describe_missing_memory(tensor))
    if kind is TensorKind.TRANSFORMED:
        raise _not_examined(name, "a transform of torch.func", "it has no memory of its own")
    if kind is TensorKind.SHARDED:
        yield from _entries_of_any(name, tensor.to_local())  # type: ignore[attr-defined] # a DTensor
    elif kind is TensorKind.SUBCLASS and is_wrapper(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _entries_of_any(f"{name}.{attribute}", getattr(tensor, attribute))
    elif kind is TensorKind.SUBCLASS:
        try:
            yield name, tensor.as_subclass(torch.Tensor)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise _not_examined(name, f"type {type(tensor).__qualname__}", str(error)) from error
    elif kind is not TensorKind.ZEROS:
        yield name, tensor


def _entries_of_any(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if is_plain(tensor):
        yield name, tensor
    else:
        yield from _entries(name, tensor)


def _values(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real floating values behind `tensor`, without a copy; None when it cannot hold NaN or Inf."""
    if tensor.dtype in _NATIVE and is_plain(tensor):
        return tensor if tensor.numel() else None  # nearly always; the rest is below
    kind = kind_of(tensor)
    if kind in (TensorKind.META, TensorKind.UNINITIALIZED):
        return None  # no data; encoding refuses it by name
    t = tensor.detach()
    if kind is TensorKind.QUANTIZED:
        return _quantized_scales(t)
    if not (t.is_floating_point() or t.is_complex()) or str(t.dtype) in _ALWAYS_FINITE:
        return None
    if kind is TensorKind.NESTED or t.layout in _COMPRESSED:
        t = t.values().detach()  # as a view of a compressed tensor it could not be viewed again
    elif t.layout is torch.sparse_coo:
        _, t = coo_parts(t)  # values() demands a coalesced tensor, and coalescing copies
    elif t.is_mkldnn:
        t = t.to_dense()
    elif t.layout is not torch.strided:
        raise _not_examined(name, f"layout {t.layout}", "this layout is not known")
    if t.is_complex():
        t = torch.view_as_real(t.conj() if t.is_conj() else t)
    if t.dtype not in _NATIVE and (why := _why_not_widened(t.dtype, t.device)):
        raise _not_examined(name, f"dtype {t.dtype}", why)
    return t if t.numel() else None


def _quantized_scales(t: torch.Tensor) -> torch.Tensor:
    """Return the floating part of a quantised tensor: its integers are finite by nature."""
    if t.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return torch.cat([t.q_per_channel_scales().double(), t.q_per_channel_zero_points().double()])
    return torch.tensor([t.q_scale()], dtype=torch.float64)


def _candidates(values: list[torch.Tensor], release: Callable[[torch.Tensor], None] | None = None) -> list[int]:
    """Return the positions of those that may not be finite, with one synchronisation.

    Small tensors are looked at in batches: fifty thousand calls of sum cost more than reading the memory.
    """
    batches: list[list[int]] = []
    joint: list[int] = []
    room = 0
    for position, one in enumerate(values):
        size = one.numel()
        if size > _SMALL:
            batches.append([position])
            continue
        if size > room:
            joint = []
            batches.append(joint)
            room = _BATCH
        joint.append(position)
        room -= size
    marks = [_mark(_joined([values[i] for i in batch]), release) for batch in batches]
    finite = torch.isfinite(torch.stack(marks)).tolist()
    found: list[int] = []
    for batch, is_finite in zip(batches, finite, strict=True):
        if is_finite:
            continue
        if len(batch) > 1:
            found += [batch[i] for i in _bad_members([values[i] for i in batch])]
        elif not _has_finite_extremes(values[batch[0]]):
            found += batch
    return found


def _bad_members(values: list[torch.Tensor]) -> list[int]:
    """Return which of the tensors hold elements that are not finite."""
    joint = _joined(values)
    bad = (~torch.isfinite(joint if joint.dtype in _NATIVE else joint.to(torch.float32))).nonzero().flatten()
    ends = torch.tensor([one.numel() for one in values], device=joint.device).cumsum(0)
    return torch.searchsorted(ends, bad, right=True).unique().tolist()  # type: ignore[no-any-return]


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    return torch.cat([one if one.dim() == 1 else one.reshape(-1) for one in values])


def _mark(values: torch.Tensor, release: Callable[[torch.Tensor], None] | None) -> torch.Tensor:
    """Return one number that is not finite when one of the values is not."""
    flat = _in_memory_order(values)
    native = flat.dtype in _NATIVE
    if native and (release is None or flat.numel() <= _PIECE or not flat.is_contiguous()):
        mark = _mark_of(flat)
        if release is not None and flat.numel() > _SMALL and flat.is_contiguous():
            release(flat)
        return mark
    # float8 and whatever comes next is widened piece by piece, so that no copy of the whole is made.
    pieces = []
    for piece in flat.reshape(-1).split(_PIECE):
        pieces.append(_mark_of(piece if native else piece.to(torch.float32)))
        if release is not None:
            release(piece)
    return _mark_of(torch.stack(pieces))


def _mark_of(values: torch.Tensor) -> torch.Tensor:
    if values.dtype in _SUMMED:
        return values.sum()
    low, high = torch.aminmax(values)
    return high - low  # NaN when one is NaN or both are the same infinity


def _has_finite_extremes(values: torch.Tensor) -> bool:
    """Tell by the extremes that a tensor holds no NaN and no Inf: its sum may just have been too large."""
    flat = _in_memory_order(values)
    return flat.dtype in _NATIVE and bool(torch.isfinite(torch.stack(torch.aminmax(flat))).all())


@lru_cache
def _why_not_widened(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return torch's reason for not converting a dtype to float32, None when it does."""
    try:
        torch.empty(1, dtype=dtype, device=device).to(torch.float32)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return None


def _not_examined(name: str, what: str, why: str) -> UnsavableStateError:
    reason = f"the guard cannot examine it ({why})"
    return UnsavableStateError(location=name, type_name=f"tensor of {what}", reason=reason)


def _span(t: torch.Tensor) -> int:
    """Return how many elements of memory lie between the first and the last element of `t`, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.size(), t.stride(), strict=True))


def _in_memory_order(t: torch.Tensor) -> torch.Tensor:
    """Return memory that holds every element of `t`, flat where it has no holes: aminmax is fast on contiguous memory.

    Where elements share memory it is looked at once: an expanded tensor may claim 10**12 of them.
    """
    if t.is_contiguous():
        return t
    span = _span(t)
    return t.as_strided((span,), (1,)) if span <= t.numel() else t


# -- the exact look at a tensor that failed -------------------------------------------------------------------------


@dataclass
class _Count:
    nan: int
    inf: int
    numel: int
    first: tuple[int, ...]


def _report(name: str, tensor: torch.Tensor) -> NonFiniteTensor | None:
    """Count exactly; None when the elements themselves are finite (only memory between them was not)."""
    count = _count(tensor.detach())
    return None if count is None else NonFiniteTensor(name, count.nan, count.inf, count.numel, count.first)


def _count(t: torch.Tensor) -> _Count | None:
    if t.is_nested:
        return _count_nested(t)
    if t.is_quantized:
        t = t.dequantize()
    if t.layout is torch.sparse_coo or t.layout in _COMPRESSED:
        return _count_sparse(t)
    if t.layout is not torch.strided:
        t = t.to_dense()
    if _span(t) < t.numel():
        return _count_overlapping(t)
    nan, inf = masks(t)
    bad = nan | inf
    if not bool(bad.any()):
        return None
    position = int(bad.reshape(-1).view(torch.uint8).argmax())
    return _Count(int(nan.sum()), int(inf.sum()), t.numel(), _unravelled(position, t.size()))


def masks(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements are NaN and which are Inf and not NaN; a complex number can have one part of each."""
    if t.is_complex():
        t = t.resolve_conj().to(torch.promote_types(t.dtype, torch.complex64))
    elif t.dtype not in _NATIVE:
        t = t.to(torch.float32)
    nan = torch.isnan(t)
    return nan, torch.isinf(t) & ~nan


def _unravelled(position: int, size: Iterable[int]) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(tuple(size)):
        position, last = divmod(position, extent)
        index.append(last)
    return tuple(reversed(index))


def _count_nested(t: torch.Tensor) -> _Count | None:
    parts = [(number, part, _count(part)) for number, part in enumerate(t.unbind())]
    found = [(number, count) for number, _, count in parts if count is not None]
    if not found:
        return None
    numel = sum(part.numel() for _, part, _ in parts)
    first = (found[0][0], *found[0][1].first)
    return _Count(sum(count.nan for _, count in found), sum(count.inf for _, count in found), numel, first)


def _count_sparse(t: torch.Tensor) -> _Count | None:
    coo = t.layout is torch.sparse_coo
    indices, values = coo_parts(t) if coo else (None, t.values())
    nan, inf = masks(values)
    where = (nan | inf).nonzero()  # one row for each element; the first columns say which of the stored ones it is
    if not len(where):
        return None
    index = (
        torch.cat([indices.T[where[:, 0]], where[:, 1:]], dim=1) if indices is not None else _compressed_index(t, where)
    )
    for dim in range(index.size(1)):  # the first in the order of the dimensions, whatever the order of storage
        index = index[index[:, dim] == index[:, dim].min()]
    return _Count(int(nan.sum()), int(inf.sum()), values.numel(), tuple(index[0].tolist()))


def _compressed_index(t: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return where in a CSR, CSC, BSR or BSC tensor the stored elements `where` stand."""
    by_row = t.layout in _BY_ROW
    pointers, plain = (t.crow_indices(), t.col_indices()) if by_row else (t.ccol_indices(), t.row_indices())
    numbers = torch.arange(plain.size(-1), dtype=pointers.dtype, device=t.device).expand_as(plain).contiguous()
    lines = torch.searchsorted(pointers.contiguous(), numbers, right=True) - 1
    batch = plain.dim() - 1
    stored = where[:, : batch + 1].unbind(1)
    row, column = (lines[stored], plain[stored]) if by_row else (plain[stored], lines[stored])
    dense = where[:, batch + 1 :]
    if t.layout in _BLOCKED:
        height, width = t.values().shape[batch + 1 : batch + 3]
        row, column, dense = row * height + dense[:, 0], column * width + dense[:, 1], dense[:, 2:]
    return torch.cat([where[:, :batch], row[:, None], column[:, None], dense], dim=1)


def _count_overlapping(t: torch.Tensor) -> _Count | None:
    """Count a tensor whose elements share memory, in the time and space of that memory: it may claim 10**12 of them."""
    nan, inf = masks(t.as_strided((_span(t),), (1,)))
    uses = _uses(t)
    count = _Count(int(uses[nan].sum()), int(uses[inf].sum()), t.numel(), ())
    if not count.nan + count.inf:
        return None
    bad = nan | inf
    start = 0
    size = list(t.size())
    for dim in range(t.dim()):  # the lowest index of each dimension, found by halving, with the earlier ones fixed
        low, high = 1, size[dim]
        while low < high:
            middle = (low + high) // 2
            part = t.as_strided([*size[:dim], middle, *size[dim + 1 :]], t.stride())
            if bool((bad[start : start + _span(part)] & (_uses(part) > 0)).any()):
                high = middle
            else:
                low = middle + 1
        count.first += (low - 1,)
        start += (low - 1) * t.stride(dim)
        size[dim] = 1
    return count


def _uses(t: torch.Tensor) -> torch.Tensor:
    """Return for each place of the memory that `t` spans how many of its elements stand there."""
    uses = torch.ones(1, dtype=torch.int64, device=t.device)
    for size, stride in zip(t.size(), t.stride(), strict=True):
        if stride == 0:
            uses = uses * size
        elif size > 1:
            rows = math.ceil((len(uses) + (size - 1) * stride) / stride)
            padded = nn.functional.pad(uses, (0, rows * stride - len(uses))).view(rows, stride).cumsum(0)
            padded[size:] -= padded[:-size].clone()
            uses = padded.view(-1)[: len(uses) + (size - 1) * stride]
    return uses
