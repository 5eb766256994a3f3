"""Values as something that `==` compares bit for bit, and as something that a person can read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from safeckpt.file import encode, write_file
from safeckpt.state.tree import join

__all__ = ["Leaf", "flatten", "leaf"]

_SHOWN = 48  # characters of a value in a text
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range,
    torch.dtype, torch.device, torch.Size, torch.layout,
)  # fmt: skip


class Leaf(NamedTuple):
    """One value at one moment.

    Attributes:
        kind: What role it plays: one of the kinds in `safeckpt.proof.captured` and `safeckpt.proof.live`.
        key: Equal for equal bits.
        shown: The value for people; for a tensor its dtype and shape.
    """

    kind: str
    key: str
    shown: str


def leaf(kind: str, value: Any) -> Leaf:
    """Return a value as a leaf. NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(value, torch.Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.size())}"
        one = _is_plain(value) and value.numel() == 1
        return Leaf(kind, shape + _hash(_bytes_of(value)), repr(value.detach().item()) if one else shape)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        shape = f"{array.dtype}{list(array.shape)}"
        return Leaf(kind, shape + _hash(array.tobytes()), repr(array.item()) if array.size == 1 else shape)
    if isinstance(value, set | frozenset):
        text = "{" + ", ".join(sorted(leaf(kind, item).key for item in value)) + "}"
    elif isinstance(value, _PLAIN):
        text = repr(value)
    else:
        text = f"<{type(value).__qualname__}>"  # its repr may hold an address
    if len(text) <= _SHOWN:
        return Leaf(kind, text, text)
    return Leaf(kind, _hash(text.encode(errors="backslashreplace")), text[: _SHOWN - 3] + "...")


def _is_plain(tensor: torch.Tensor) -> bool:
    lazy = torch.nn.parameter.is_lazy(tensor)
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not lazy


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    t = tensor.detach()
    if not _is_plain(t):
        sink = _Sink()
        write_file(encode(t), sink)  # the file format is deterministic and knows every layout
        return sink.digest()
    flat = t.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class _Sink:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        return memoryview(data).nbytes

    def digest(self) -> bytes:
        return self._hash.digest()


def _hash(data: bytes | memoryview) -> str:
    return " #" + hashlib.sha256(data).hexdigest()[:24]


def flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything in nested mappings, lists and tuples that is none of them.

    A container is visited once, under its first name, since it may hold itself. An empty one is a value.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(prefix, tree)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, Mapping):
            items = [(join(name, key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            items = [(join(name, index), item) for index, item in enumerate(value)]
        else:
            yield name, value
            continue
        if not items:
            yield name, "{}" if isinstance(value, Mapping) else "[]"
        elif id(value) not in seen:
            seen.add(id(value))
            stack.extend(reversed(items))
