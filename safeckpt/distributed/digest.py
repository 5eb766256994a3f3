"""Whether two ranks hold the same: a few bytes a rank instead of the state itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from safeckpt.file import encode, write_file
from safeckpt.state.tree import named_leaves

__all__ = ["digest_of", "fingerprints"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tree: Any) -> str:
    """Return a digest that is equal for equal containers, values and bits.

    Of a sharded tensor only shape and dtype are looked at: each rank has another part of it.

    Cost:
        One pass over the tensors at the speed of memory, on their device, and one synchronisation per device.
    """
    return _joined(fingerprints(tree).items())


def _joined(items: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, text in items:
        digest.update(f"{name}\0{text}\0".encode(errors="backslashreplace"))
    return digest.hexdigest()


def fingerprints(tree: Any) -> dict[str, str]:
    """Return, for every value by its dotted name, a text that is equal for equal bits."""
    found: dict[str, str] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, leaf in named_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            found[name] = f"{type(leaf).__qualname__} {leaf!r}"
            continue
        found[name] = f"{leaf.dtype} {list(leaf.size())}"
        if hasattr(leaf, "to_local") or not leaf.numel():
            continue
        if _is_plain(leaf):
            sums.setdefault(leaf.device, []).append((name, _sum_of_bits(leaf)))
        else:
            found[name] += " " + _hash_of_file(leaf)
    for entries in sums.values():
        values = torch.stack([value for _, value in entries]).tolist()  # the device is waited for once
        for (name, _), value in zip(entries, values, strict=True):
            found[name] += f" {value}"
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    usual = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    return usual and not torch.nn.parameter.is_lazy(tensor)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's memory, read as integers that wrap: copies that drift apart differ in it."""
    t = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    t = t.reshape(-1)
    width = t.element_size()
    if t.numel() * width % 8 == 0 and t.storage_offset() * width % 8 == 0:
        width = 8  # fifteen times as fast as narrower ones
    return t.view(_INTEGERS[width]).sum(dtype=torch.int64)


class _Hash:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes


def _hash_of_file(tensor: torch.Tensor) -> str:
    sink = _Hash()
    write_file(encode(tensor), sink)  # knows every layout
    return sink.sha.hexdigest()
