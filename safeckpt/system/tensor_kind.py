"""The kind of a tensor: one definition for whoever saves, checks, copies, hashes or compares one.

Nearly every tensor is plain: memory seen through offset, size and stride. Each of the others needs something else,
and forgetting one of them in one place is how a state is saved wrong, read out of bounds, or refused without need.
"""

from __future__ import annotations

import enum
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from safeckpt.system.torch_private import is_transformed, is_zero_tensor

__all__ = [
    "TensorKind",
    "describe_missing_memory",
    "fills_storage",
    "has_memory",
    "has_own_copies",
    "is_plain",
    "kind_of",
    "span_of",
]


class TensorKind(enum.Enum):
    """The answer to what a tensor is, before its memory is touched.

    Exactly one holds of any tensor; the first one in this order that fits.
    """

    PLAIN = "plain"
    """Of torch's own class, and memory seen through offset, size and stride: a copy of the memory copies the values."""
    SHARDED = "sharded"
    """A DTensor, or whatever else has `to_local()`: this process holds a part."""
    UNINITIALIZED = "uninitialized"
    """A parameter or buffer of a lazy module before its first forward pass: no shape and no data."""
    NESTED = "nested"
    """Several tensors in one, of either layout."""
    SUBCLASS = "subclass"
    """Of another class than `Tensor` and `Parameter`, which may mean anything by its memory or have none."""
    META = "meta"
    """On the meta device: a shape and no data."""
    TRANSFORMED = "transformed"
    """Exists only inside a transform of `torch.func`."""
    SPARSE = "sparse"
    """Indices and values: COO, CSR, CSC, BSR or BSC."""
    OPAQUE = "opaque"
    """Of any other layout, such as MKL-DNN's."""
    ZEROS = "zeros"
    """Stands for zeros and has no memory, as forward-mode differentiation makes them."""
    QUANTIZED = "quantized"
    """Integers with scales and zero points beside them."""
    EMPTIED = "emptied"
    """Its storage holds less than its shape needs, as after `untyped_storage().resize_(0)`: must never be read."""
    FLAGGED = "flagged"
    """As a plain one, but the conjugate or the negative of what is in memory is meant."""


_CLASSES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_SPARSE: Final = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_STRIDED: Final = torch.strided


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the kind is `TensorKind.PLAIN`.

    Cost:
        About 1 us.
    """
    return (
        type(tensor) in _CLASSES
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
        and not is_transformed(tensor)  # whose storage cannot even be asked for
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_zero_tensor(tensor)
        and (fills_storage(tensor) or has_memory(tensor))
    )


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Return the kind of any tensor; its data are not looked at."""
    if is_plain(tensor):
        return TensorKind.PLAIN
    if hasattr(tensor, "to_local"):
        return TensorKind.SHARDED
    if is_lazy(tensor):
        return TensorKind.UNINITIALIZED
    if tensor.is_nested:
        return TensorKind.NESTED
    if type(tensor) not in _CLASSES:
        return TensorKind.SUBCLASS
    if tensor.is_meta:
        return TensorKind.META
    if is_transformed(tensor):
        return TensorKind.TRANSFORMED
    if tensor.layout in _SPARSE:
        return TensorKind.SPARSE
    if tensor.layout is not _STRIDED:
        return TensorKind.OPAQUE
    if is_zero_tensor(tensor):
        return TensorKind.ZEROS
    if tensor.is_quantized:
        return TensorKind.QUANTIZED  # whose elements may be half a byte, while torch says one
    return TensorKind.FLAGGED if has_memory(tensor) else TensorKind.EMPTIED


def has_own_copies(tensor: torch.Tensor) -> bool:
    """Return whether each element of a strided tensor has memory of its own, so that all of them can be written."""
    return 0 not in tensor.stride() or tensor.numel() <= 1


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first element of its storage that a strided tensor touches, and one past the last."""
    start = int(tensor.storage_offset())
    numel = tensor.numel()
    if not numel or tensor.is_contiguous():
        return start, start + numel
    return start, start + 1 + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))


def describe_missing_memory(tensor: torch.Tensor) -> str:
    """Return what is wrong with an emptied tensor, for an error that names it."""
    needed = span_of(tensor)[1] * tensor.element_size()
    return f"its storage holds {tensor.untyped_storage().nbytes()} bytes, its shape needs {needed}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a strided tensor reaches as far as its shape needs."""
    return not tensor.numel() or span_of(tensor)[1] * tensor.element_size() <= tensor.untyped_storage().nbytes()


def fills_storage(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor is all of its storage, from the first byte to the last; nearly every one is."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and not tensor.storage_offset() and tensor.is_contiguous()
