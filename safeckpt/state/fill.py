"""Live tensors into which torch does not copy: made under inference mode, expanded, or of a dtype without copy_.

Persistent buffers may be such tensors (a mask that is expanded, an embedding made under `torch.inference_mode`).
`load_state_dict` fails on them after it has changed others, so they are filled here, and found before that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safeckpt.state.transfer import Transfer, has_no_copy
from safeckpt.system.tensor_kind import is_plain

__all__ = ["cannot_fill", "fill_special", "is_special"]


def is_special(live: torch.Tensor) -> bool:
    """Return whether torch cannot copy into a tensor."""
    return is_plain(live) and (live.is_inference() or bool(_expanded_dims(live)) or has_no_copy(live.dtype))


def cannot_fill(live: torch.Tensor, saved: torch.Tensor) -> Iterator[str]:
    """Yield why values of the same shape cannot be written into a tensor that `is_special`."""
    if is_plain(live) and not _agrees_along(saved, _expanded_dims(live)):
        yield (
            f"the live tensor is expanded (strides {list(live.stride())}), so that elements share memory, and the "
            "saved values differ there; make it contiguous before the manager is built"
        )


def fill_special(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Write values that `cannot_fill` had nothing against."""
    for dim in _expanded_dims(live):
        live, saved = live.narrow(dim, 0, 1), saved.narrow(dim, 0, 1)
    with torch.inference_mode(mode=live.is_inference()), torch.no_grad():
        Transfer().copy([(live, saved)])


def _expanded_dims(tensor: torch.Tensor) -> list[int]:
    return [dim for dim, (size, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)) if size > 1 > step]


def _agrees_along(values: torch.Tensor, dims: list[int]) -> bool:
    """Return whether values are equal along some dimensions."""
    for dim in dims:
        first = values.narrow(dim, 0, 1)
        if values.stride(dim) != 0 and not torch.equal(values, first.expand_as(values)):
            return False
        values = first
    return True
