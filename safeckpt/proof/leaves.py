"""Values as something that `==` compares bit for bit, and as something that a person can read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from safeckpt.file import encode, write_file
from safeckpt.state.tree import named_leaves
from safeckpt.system.tensor_kind import TensorKind, kind_of

__all__ = ["Leaf", "flatten", "leaf"]

_SHOWN = 48  # characters of a value in a text
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range,
    torch.dtype, torch.device, torch.Size, torch.layout,
)  # fmt: skip

_WITHOUT_DATA = frozenset({TensorKind.META, TensorKind.UNINITIALIZED, TensorKind.EMPTIED})
_READ_AT_ONCE = frozenset({TensorKind.PLAIN, TensorKind.FLAGGED, TensorKind.SUBCLASS})


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
        lazy = torch.nn.parameter.is_lazy(value)
        shape = f"{str(value.dtype).removeprefix('torch.')}{'' if lazy else list(value.size())}"
        memory = kind_of(value)
        if memory in _WITHOUT_DATA:
            return Leaf(kind, f"{shape} {memory.value}", shape)
        one = memory in _READ_AT_ONCE and value.numel() == 1
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


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    t = tensor.detach()
    if kind_of(t) not in _READ_AT_ONCE:
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
    """Yield (dotted name, value) of everything in nested mappings, lists and tuples; an empty one is a value."""
    for name, value in named_leaves(tree, prefix, whole=(set, frozenset, torch.Size), empty=True):
        if isinstance(value, Mapping):
            yield name, "{}"
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            yield name, "[]"
        else:
            yield name, value
