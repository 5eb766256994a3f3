"""The loss of a step: a number, a tensor, a NumPy value, or dicts and lists of them, read once.

A training loop may give it at every step, and five places need it: the guard, the error text, the record that a
restart is compared with, the header of the checkpoint, and the proof. All take it from one `Loss`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from safeckpt.system.tensor_kind import TensorKind, describe_missing_memory, kind_of

__all__ = ["MOST_BYTES", "Loss", "refuse_long"]

MOST_BYTES = 400_000  # of a loss, and of the metrics, as JSON: both are in the header, which 1 MiB bounds
_NUMBER_BYTES = 26  # of the longest float, and what stands between two
_MOST_LEVELS = 20  # of nesting; a deeper one is data and no loss
_MOST_VALUES = 16  # whose text is recorded; more are recorded by their digest
_WIDEST = {"f": 8, "c": 16}  # bytes of the widest NumPy number of each kind that Python has too
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_UNREADABLE = {
    TensorKind.META: "is on the meta device and has no values",
    TensorKind.UNINITIALIZED: "is not initialized and has no values",
    TensorKind.TRANSFORMED: "exists only inside a transform of torch.func",
    TensorKind.NESTED: "is nested",
}


class Loss:
    """A loss in Python numbers. Tensors are read from their device once, when this is made.

    Attributes:
        numbers: The loss with every tensor and NumPy value as Python numbers.
        nonfinite: What is not finite in it and where, None when all of it is finite.
    """

    __slots__ = ("nonfinite", "numbers")

    def __init__(self, numbers: Any, nonfinite: str | None) -> None:
        self.numbers = numbers
        self.nonfinite = nonfinite

    @classmethod
    def read(cls, loss: Any, name: str = "loss") -> Loss:
        """Return a loss in whatever form the caller has it; one that is a `Loss` already as it is.

        Args:
            loss: None, a number, a tensor, a NumPy scalar or array, or a dict, list or tuple of them.
            name: How to call the value in errors and descriptions.

        Raises:
            TypeError: `loss` is something else, or a tensor whose values cannot be read.
            ValueError: It holds more than the header of a checkpoint takes, is nested too deeply, or holds an
                integer that no float can hold.

        Cost:
            Below a microsecond for a finite float; one device synchronization for each tensor.
        """
        if type(loss) is float and math.isfinite(loss):
            return cls(loss, None)
        if isinstance(loss, Loss):
            return loss
        reader = _Reader(name)
        return cls(reader.read(loss, name, 0), reader.nonfinite)

    @property
    def floats(self) -> Any:
        """The loss as a float, or as dicts and lists of floats: what a checkpoint's header holds."""
        return _floats(self.numbers)

    @property
    def largest(self) -> float | None:
        """The largest number in it; None where there is none."""
        return self.numbers if type(self.numbers) is float else max(_values(self.numbers), default=None)

    @property
    def exact(self) -> str:
        """The loss as text that holds every bit: hexadecimal, several values separated by commas."""
        if type(self.numbers) is float:
            return self.numbers.hex()
        values = [value.hex() for value in _values(self.numbers)]
        if len(values) > _MOST_VALUES:
            return "sha256:" + hashlib.sha256(",".join(values).encode()).hexdigest()
        return ",".join(values)


class _Reader:
    """Reads one loss, and counts what it will take in a header."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self.nonfinite: str | None = None

    def read(self, value: Any, path: str, level: int) -> Any:
        if isinstance(value, Mapping | list | tuple):
            return self._container(value, path, level + 1)
        if isinstance(value, torch.Tensor):
            return self._several(_dense(value, path), path, level, "a tensor with NaN or Inf")
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" and not np.ma.isMA(value):
            return self._several(_narrow(value, path), path, level, "an array with NaN or Inf")
        if value is None:
            return None
        if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
            self._count(_NUMBER_BYTES)
            return self._number(value, path)
        raise TypeError(
            f"{path} must be a number, a tensor, a NumPy scalar, or a dict or list of them; got {type(value).__name__}"
        )

    def _container(self, value: Any, path: str, level: int) -> Any:
        self._refuse_deep(level)
        if not isinstance(value, Mapping):
            refuse_long(self._name, self._size + _NUMBER_BYTES * len(value))  # before a long list is walked
            return [self.read(item, f"{path}[{index}]", level) for index, item in enumerate(value)]
        found = {}
        for key, item in value.items():
            self._count(len(json.dumps(str(key))) + 2)
            found[key] = self.read(item, f"{path}[{key!r}]", level)
        return found

    def _several(self, values: Any, path: str, level: int, description: str) -> Any:
        """Read a tensor or an array."""
        self._refuse_deep(level + values.ndim)
        count = math.prod(values.shape)
        self._count(_NUMBER_BYTES * max(1, count))
        numbers = values.tolist()
        if count == 1:
            flat = numbers
            while isinstance(flat, list):
                (flat,) = flat
            self._number(flat, path, numbers)
        elif not all(_is_finite(number, path) for number in _values(numbers)):
            self._note(path, description)
        return numbers

    def _number(self, number: Any, path: str, shown: Any = None) -> Any:
        if not _is_finite(number, path):
            self._note(path, number if shown is None else shown)
        return number

    def _note(self, path: str, description: object) -> None:
        if self.nonfinite is None:
            self.nonfinite = f"{description}" if path == self._name else f"{description} (in {path})"

    def _count(self, size: int) -> None:
        self._size += size
        refuse_long(self._name, self._size)

    def _refuse_deep(self, level: int) -> None:
        if level > _MOST_LEVELS:
            raise ValueError(
                f"{self._name} is nested more than {_MOST_LEVELS} levels deep; give a number or a flat dict"
            )


def refuse_long(name: str, size: int) -> None:
    """Refuse what does not fit into the header of a checkpoint.

    Raises:
        ValueError: `size` bytes are too many.
    """
    if size > MOST_BYTES:
        raise ValueError(
            f"{name} is too long for the header of a checkpoint, which takes about {MOST_BYTES // _NUMBER_BYTES:,} "
            "numbers. Give a mean, and put the rest into a component: {'history': {'losses': tensor}}"
        )


def _is_finite(number: Any, path: str) -> bool:
    try:
        if isinstance(number, complex):
            return math.isfinite(number.real) and math.isfinite(number.imag)
        return math.isfinite(number)
    except OverflowError:
        raise ValueError(f"{path} is an integer of {number.bit_length():,} bits, which no float can hold") from None


def _unreadable(path: str, why: str) -> TypeError:
    return TypeError(f"{path} is a tensor that {why}; give a number")


@lru_cache
def _is_convertible(dtype: torch.dtype) -> bool:
    if dtype in _QUANTIZED:
        return True
    try:
        torch.zeros(1, dtype=torch.uint8).expand(16).clone().view(dtype).tolist()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return a tensor whose `tolist` gives its values."""
    kind = kind_of(tensor)
    if kind in _UNREADABLE:
        raise _unreadable(path, _UNREADABLE[kind])
    if not _is_convertible(tensor.dtype):
        raise _unreadable(path, f"has dtype {tensor.dtype}, which torch cannot convert to numbers")
    if kind is TensorKind.EMPTIED:
        raise _unreadable(path, f"cannot be read: {describe_missing_memory(tensor)}")
    if kind in (TensorKind.SPARSE, TensorKind.OPAQUE):
        refuse_long(path, tensor.numel() * _NUMBER_BYTES)  # before it is made dense
        return tensor.detach().to_dense()
    return tensor.detach().dequantize() if kind is TensorKind.QUANTIZED else tensor


def _narrow(value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
    """Return an array whose `tolist` gives Python numbers, also for the types that are wider than Python's."""
    if value.dtype.itemsize <= _WIDEST.get(value.dtype.kind, 8):
        return value
    with np.errstate(over="ignore"):
        narrow = np.asarray(value).astype(np.complex128 if value.dtype.kind == "c" else np.float64)
    if bool((np.isfinite(value) & ~np.isfinite(narrow)).any()):
        raise ValueError(f"{path} is larger than a float of 64 bits can hold")
    return narrow


def _floats(numbers: Any) -> Any:
    if isinstance(numbers, dict):
        return {str(key): _floats(value) for key, value in numbers.items()}
    if isinstance(numbers, list):
        return [_floats(value) for value in numbers]
    if numbers is None:
        return None
    return numbers.real if isinstance(numbers, complex) else float(numbers)


def _values(numbers: Any) -> Iterator[float]:
    """Yield every number as a float, of a complex one both parts."""
    if isinstance(numbers, dict | list):
        for value in numbers.values() if isinstance(numbers, dict) else numbers:
            yield from _values(value)
    elif isinstance(numbers, complex):
        yield from (numbers.real, numbers.imag)
    elif numbers is not None:
        yield float(numbers)
