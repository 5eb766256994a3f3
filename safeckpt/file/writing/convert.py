"""NumPy values as plain ones, where nothing is lost."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EMPTY_BYTES", "converted"]


class _EmptyBytes(bytes):
    """``b""`` that a safe load can read: pickle calls ``bytes()`` for it, which is not on torch's list.

    Loaded, it is exactly ``b""``.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return codecs.encode, ("", "latin1")  # as pickle does with bytes that are not empty


EMPTY_BYTES: Final = _EmptyBytes()

_KINDS = {"b": bool, "i": int, "u": int, "f": float, "c": complex, "U": str, "S": bytes}
_WIDEST = {"f": 8, "c": 16}  # a long double holds digits that a Python number does not


def converted(value: Any) -> Any:
    """Return the plain equivalent of a NumPy value, None when there is none."""
    if isinstance(value, np.generic):
        return _scalar(value)
    if type(value) is np.ndarray or type(value) is np.memmap:
        return _array(value)
    return None


def _scalar(value: np.generic) -> Any:
    kind = value.dtype.kind
    if kind not in _KINDS or value.dtype.itemsize > _WIDEST.get(kind, value.dtype.itemsize):
        return None
    plain = _KINDS[kind](value)
    return EMPTY_BYTES if plain == b"" else plain


def _array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    kind = array.dtype.kind
    if kind not in "biufc" or array.dtype.itemsize > _WIDEST.get(kind, array.dtype.itemsize):
        return None
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    native = native.view(np.ndarray).view(f"{kind}{native.dtype.itemsize}")  # torch knows one of two equal C types
    itemsize = native.dtype.itemsize
    if (
        native.flags.writeable
        and native.flags.aligned
        and all(step >= 0 and step % itemsize == 0 for step in native.strides)
    ):
        return torch.from_numpy(native)
    # torch would warn about read-only memory and refuses negative steps.
    return torch.from_numpy(np.array(native, order="C", copy=True))
