"""Plain values that the user's samplers keep: those that change while epochs are drawn are part of the position.

A sampler that shuffles its own list in `__iter__`, or counts, has no `state_dict` for it. What differs from the
moment at which the loader was made is saved, and put back into the same containers.
"""

from __future__ import annotations

import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from safeckpt.loader.private_generators import attributes_of
from safeckpt.state.component import class_name
from safeckpt.state.random_streams import GeneratorComponent

__all__ = ["PlainState"]

_ATOMS = frozenset({bool, int, float, complex, str, type(None)})
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_MAX_OBJECTS = 1_000
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, torch.nn.Module)


class _Unplain(Exception):  # noqa: N818 - never leaves this module
    """A value that cannot be written as plain ones."""


def _pack(value: Any) -> Any:
    """Return a copy of a value as plain ones and tensors: an atom as it is, everything else as [kind, ...]."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise _Unplain
        return ["tensor", value.detach().clone()]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject or value.dtype.names is not None:
            raise _Unplain
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        return ["array" if kind is np.ndarray else "scalar", value.dtype.str, list(value.shape), data]
    if kind in (list, tuple, set, frozenset, deque):
        items = list(value)
        if set(map(type, items)) <= _ATOMS:
            return [kind.__name__, "atoms", items]
        return [kind.__name__, "items", [_pack(item) for item in items]]
    if kind in _DICTS:
        return ["dict", [[_pack(key), _pack(item)] for key, item in value.items()]]
    raise _Unplain


def _unpack(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *rest = packed
    if kind == "tensor":
        return rest[0].clone()
    if kind in ("array", "scalar"):
        dtype, shape, data = rest
        array = np.frombuffer(data.numpy().tobytes(), dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_unpack(key): _unpack(item) for key, item in rest[0]}
    how, items = rest
    makers: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
    return makers[kind](items if how == "atoms" else map(_unpack, items))


def _same(one: Any, other: Any) -> bool:
    """Return whether two packed values are equal, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, list) and isinstance(other, list):
        if len(one) == 3 and one[1] == "atoms" and other[1:2] == ["atoms"]:
            return one[0] == other[0] and one[2] == other[2] and list(map(type, one[2])) == list(map(type, other[2]))
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 - NaN


class PlainState:
    """What the plain attributes of some objects are now, as far as it differs from what they were at first.

    Args:
        roots: The objects by name; those of the user's classes that they hold are looked into as well.
        skip: Objects that are not entered.

    Attributes:
        unsaved: Names of attributes that move and cannot be written as plain values.
    """

    def __init__(self, roots: dict[str, Any], skip: tuple[Any, ...] = ()) -> None:
        self._roots = roots
        self._skip = skip
        self.unsaved: list[str] = []
        self._first = dict(self._packed())

    @property
    def has_objects(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._roots)

    def capture(self) -> dict[str, Any]:
        """Return the values that differ from the first ones, by path; None in a list of its own for what has gone."""
        now = dict(self._packed())
        changed = {path: [value] for path, value in now.items() if not self._is_first(path, value)}
        there = {f"{path}.{name}" for path, obj in self._objects() for name, _ in attributes_of(obj)}
        return changed | {path: [] for path in self._first if path not in there}

    def _is_first(self, path: str, value: Any) -> bool:
        return path in self._first and _same(self._first[path], value)

    def check(self, saved: dict[str, Any]) -> list[str]:
        """Return which values have no place here."""
        objects = {path for path, _ in self._objects()}
        return [
            f"{path}, which changes while the order is drawn, is in the saved state, and there is no such object now"
            for path in saved
            if path.rpartition(".")[0] not in objects
        ]

    def restore(self, saved: dict[str, Any]) -> None:
        """Put the values back, and everything else to what it was at first."""
        if not self._roots:
            return
        now = dict(self._packed())
        objects = dict(self._objects())
        first = {path: [value] for path, value in self._first.items()}
        for path, wanted in ({path: [] for path in now} | first | saved).items():
            owner, _, name = path.rpartition(".")
            if owner not in objects or (path in now and wanted and _same(now[path], wanted[0])):
                continue
            _put(objects[owner], name, wanted)

    def _packed(self) -> Iterator[tuple[str, Any]]:
        self.unsaved = []
        for path, obj in self._objects():
            for name, value in attributes_of(obj):
                try:
                    yield f"{path}.{name}", _pack(value)
                except _Unplain:
                    if hasattr(type(value), "__next__"):
                        self.unsaved.append(f"{path}.{name} ({class_name(value)})")

    def _objects(self) -> Iterator[tuple[str, Any]]:
        seen = {id(obj) for obj in self._skip}
        queue = deque(self._roots.items())
        while queue and len(seen) < _MAX_OBJECTS:
            path, obj = queue.popleft()
            if id(obj) in seen:
                continue
            seen.add(id(obj))
            yield path, obj
            queue.extend((f"{path}.{name}", value) for name, value in attributes_of(obj) if _is_open(value))


def _is_open(value: Any) -> bool:
    """Return whether a value is an object of the user's, which may keep plain values of its own."""
    if isinstance(value, (*_CLOSED, *GeneratorComponent.types, torch.Tensor, np.ndarray, DataLoader, random.Random)):
        return False
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return False  # a dataset, or a container
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _put(obj: Any, name: str, wanted: list[Any]) -> None:
    """Give an attribute a value, in the container that is there where it can hold it."""
    live: Any = dict(attributes_of(obj)).get(name)
    if not wanted:
        object.__delattr__(obj, name)
        return
    value = _unpack(wanted[0])
    if type(live) is list and type(value) is list:
        live[:] = value
    elif type(live) in _DICTS and isinstance(value, dict):
        live.clear()
        live.update(value)
    elif type(live) is type(value) and isinstance(live, set | deque):
        live.clear()
        live.update(value) if isinstance(live, set) else live.extend(value)
    elif isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
        live.copy_(value) if live.dtype == value.dtype else object.__setattr__(obj, name, value)
    elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and _fits(live, value):
        live[...] = value
    else:
        object.__setattr__(obj, name, value)


def _fits(live: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return live.shape == value.shape and live.dtype == value.dtype and live.flags.writeable
