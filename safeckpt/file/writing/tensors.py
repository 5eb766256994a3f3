"""Which tensors can be saved and read back."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["is_ordinary", "why_unsavable"]

_SPARSE: Final = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_DTYPES: Final = frozenset(torch.storage._dtype_to_storage_type_map()) | frozenset(torch.storage._new_dtypes())
_QUANTIZED: Final = frozenset(
    {torch.per_tensor_affine, torch.per_channel_affine, torch.per_channel_affine_float_qparams}
)

_STRIDED: Final = torch.strided
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Tell quickly whether a tensor is of the most common kind, about which there are no more questions."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is _STRIDED
        and tensor.dtype in _DTYPES
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
        and not _is_wrapped(tensor)
        and not tensor._is_zerotensor()
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and tensor.is_contiguous()
    )


def why_unsavable(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a plain tensor or parameter cannot be saved, and what to do; None when it can."""
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data", "give it data first, as torch.nn.Module.to_empty does."
    if _is_wrapped(tensor):
        return "it exists only inside a transform of torch.func", "return it from the transform, then save it."
    if tensor.dtype not in _DTYPES:
        return f"torch has no storage type for {tensor.dtype}", "save {x}.view(torch.uint8) and its dtype."
    if tensor.layout is torch.strided:
        return _why_strided(tensor)
    if tensor.layout in _SPARSE:
        return _why_sparse(tensor)
    return f"torch cannot load the layout {tensor.layout}", "save {x}.to_dense()."


def _why_strided(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        return None
    if tensor._is_zerotensor():
        return "it stands for zeros and has no memory", "save {x}.clone()."
    if tensor.is_quantized and not _known_quantizer(tensor):
        return "torch cannot save its kind of quantization", "save {x}.dequantize()."
    have = tensor.untyped_storage().nbytes()
    last = tensor.storage_offset() + sum(
        (extent - 1) * step for extent, step in zip(tensor.size(), tensor.stride(), strict=True)
    )
    if tensor.numel() and (last + 1) * tensor.element_size() > have:
        reason = f"its storage holds {have} bytes, its shape needs {(last + 1) * tensor.element_size()}"
        return reason, "save it while its memory is there: a sharded or offloaded tensor has to be gathered first."
    return None


def _known_quantizer(tensor: torch.Tensor) -> bool:
    try:
        return tensor.qscheme() in _QUANTIZED
    except RuntimeError:
        return False


def _why_sparse(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Check the indices as a load does, since a file with bad ones is refused."""
    try:
        if tensor.layout is torch.sparse_coo:
            torch._validate_sparse_coo_tensor_args(
                tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced(), check_pinning=False
            )
            return None
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        torch._validate_sparse_compressed_tensor_args(
            tensor.crow_indices() if by_row else tensor.ccol_indices(),
            tensor.col_indices() if by_row else tensor.row_indices(),
            tensor.values(), tensor.size(), tensor.layout, check_pinning=False,
        )  # fmt: skip
    except RuntimeError as error:
        return f"its indices are not valid ({error})", "make it again from valid indices."
    return None
