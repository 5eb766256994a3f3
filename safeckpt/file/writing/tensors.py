"""Find the tensors that could not be read back."""

from __future__ import annotations

from typing import Any, Final

import torch

from safeckpt.system.tensor_kind import TensorKind, describe_missing_memory, has_memory, is_plain, kind_of
from safeckpt.system.torch_private import BYTES_DTYPES, DTYPE_TO_STORAGE, coo_parts, validate_compressed, validate_coo

__all__ = ["why_unsavable"]

_DTYPES: Final = BYTES_DTYPES | frozenset(DTYPE_TO_STORAGE)
_QUANTIZED: Final = frozenset(
    {torch.per_tensor_affine, torch.per_channel_affine, torch.per_channel_affine_float_qparams}
)
_WITHOUT_DATA: Final = {
    TensorKind.META: (
        "it is on the meta device and has no data", "give it data first, as torch.nn.Module.to_empty does."
    ),
    TensorKind.TRANSFORMED: (
        "it exists only inside a transform of torch.func", "return it from the transform, then save it."
    ),
    TensorKind.ZEROS: ("it stands for zeros and has no memory", "save {x}.clone()."),
}  # fmt: skip
_GATHER: Final = "save it while its memory is there: a sharded or offloaded tensor has to be gathered first."


def why_unsavable(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a plain tensor or parameter cannot be saved, and what to do; None when it can."""
    if is_plain(tensor) and tensor.dtype in _DTYPES:
        return None
    kind = kind_of(tensor)
    if kind in _WITHOUT_DATA:
        return _WITHOUT_DATA[kind]
    if kind is TensorKind.EMPTIED or (kind is TensorKind.QUANTIZED and not has_memory(tensor)):
        return describe_missing_memory(tensor), _GATHER
    if tensor.dtype not in _DTYPES:
        return f"torch has no storage type for {tensor.dtype}", "save {x}.view(torch.uint8) and its dtype."
    if kind is TensorKind.QUANTIZED and not _is_known_quantizer(tensor):
        return "torch cannot save its kind of quantization", "save {x}.dequantize()."
    if kind is TensorKind.SPARSE:
        return _why_sparse(tensor)
    if kind is TensorKind.OPAQUE:
        return f"torch cannot load the layout {tensor.layout}", "save {x}.to_dense()."
    return None


def _is_known_quantizer(tensor: torch.Tensor) -> bool:
    try:
        return tensor.qscheme() in _QUANTIZED
    except RuntimeError:
        return False


def _why_sparse(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Check the indices as a load does, since a file with bad ones is refused."""
    coo = tensor.layout is torch.sparse_coo
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts: list[Any]
    if coo:
        parts = [*coo_parts(tensor)]
    elif by_row:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    for part in parts:
        if kind_of(part) is TensorKind.EMPTIED:
            return describe_missing_memory(part), _GATHER
    try:
        if coo:
            validate_coo(*parts, tensor.size(), tensor.is_coalesced(), check_pinning=False)  # type: ignore[call-arg, misc]
        else:
            validate_compressed(*parts, tensor.size(), tensor.layout, check_pinning=False)  # type: ignore[call-arg, misc]
    except RuntimeError as error:
        return f"its indices are not valid ({error})", "make it again from valid indices."
    return None
