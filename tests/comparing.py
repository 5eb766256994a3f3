"""The one comparer: a value as a flat dict, path to leaf, in which every bit and every type shows.

`bits` sees values alone: two are the same when theirs are equal. `photograph` sees live objects: identities, addresses
and version counters count too, so that two are equal only when nothing whatsoever was touched in between.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import struct
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

Bits = dict[str, Any]

_PLAIN = (type(None), bool, int, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_VALUES = (*_PLAIN, float, complex, np.generic)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, weakref.ref, functools.partial)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_STORAGES = (torch.TypedStorage, torch.UntypedStorage)
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
# The compiler's own objects: large, lazily filled, and no part of training state.
_OPAQUE = ("torch._dynamo", "torch._inductor", "torch._C", "torch.distributed", "torch._functorch")


def bits(value: Any, *, ties: bool = True) -> Bits:
    """Return a value so that `==` compares it bit for bit: types, dtypes, shapes, NaN payloads, signs of zeros.

    The order of a dict counts, and so do the attributes of tensors and of subclasses of dict. The strides of a tensor
    do not: where they are promised, a test looks at them.

    Args:
        value: Whatever a checkpoint may hold.
        ties: Whether it counts which places hold one and the same object.
    """
    walk = _Walk(identities=False, ties=ties)
    walk.add("", value)
    return walk.found


def photograph(*roots: Any, **named: Any) -> Bits:
    """Return everything reachable from live objects, and the process's random streams and modes.

    Includes the identity, the memory and the version counter of every tensor: a value written over itself shows.
    """
    walk = _Walk(identities=True, ties=True)
    walk.found["process"] = (streams(), torch.is_grad_enabled(), torch.get_default_dtype())
    for number, root in enumerate(roots):
        walk.add(f"{number}", root)
    for name, root in named.items():
        walk.add(name, root)
    return walk.found


def streams() -> Bits:
    """Return where the process's random streams are."""
    return bits([repr(random.getstate()), np.random.get_state(legacy=False), torch.get_rng_state()])


def changes(before: Bits, after: Bits) -> list[str]:
    """Return the paths at which two of these differ."""
    missing = object()
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path, missing) != after.get(path, missing)
    )


def assert_same(got: Any, want: Any, *, ties: bool = True) -> None:
    """Assert that two values are equal in types, values and bits, and that what is one object in one is one in both."""
    got, want = bits(got, ties=ties), bits(want, ties=ties)
    changed = changes(want, got)
    first = [f"{path or 'all of it'}: {got.get(path)}, not {want.get(path)}" for path in changed[:5]]
    assert not changed, f"{len(changed)} of {len(want)} differ\n" + "\n".join(first)


class _Walk:
    """Collects what is found at each path.

    Attributes:
        found: Path to leaf; for an object that was met before, a reference to its first path.
    """

    def __init__(self, *, identities: bool, ties: bool) -> None:
        self.found: Bits = {}
        self._identities = identities
        self._ties = ties
        self._seen: dict[int, tuple[str, Any]] = {}  # with the object, so that no other one gets its id

    def add(self, path: str, value: Any) -> None:
        """Add a value, and all that is in it."""
        if isinstance(value, _VALUES):
            self.found[path] = (type(value), _number(value))
            return
        if isinstance(value, types.MethodType):  # a new object at each look
            self.found[path] = (type(value), value.__func__)
            return
        # Two empty tuples are one object or two, as the interpreter likes.
        if self._identities or (self._ties and not isinstance(value, tuple)):
            first, _ = self._seen.setdefault(id(value), (path, value))
            if first != path:
                self.found[path] = ("the same as", first)
                return
        self.found[path] = (type(value), *self._leaf(value))
        for name, part in self._parts(value):
            self.add(path + name, part)

    def _leaf(self, value: Any) -> tuple[Any, ...]:
        """Return what a value is but for its parts."""
        leaf: tuple[Any, ...] = (id(value),) if self._identities else ()
        if isinstance(value, torch.Tensor):
            leaf += (self._memory(value),) if self._identities else ()
            return (*leaf, *_tensor(value))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return (*leaf, value.dtype.str, value.shape, value.tobytes())
        if isinstance(value, _STORAGES):
            typed = isinstance(value, torch.TypedStorage)
            return (*leaf, value.dtype if typed else None, (value._untyped_storage if typed else value).tolist())
        if isinstance(value, set | frozenset):
            elements = sorted(map(repr, value)) if self._identities else sorted(repr(bits(one)) for one in value)
            return (*leaf, elements)
        if isinstance(value, _GENERATORS):
            return (*leaf, bits(_position(value)))
        if isinstance(value, bytearray):
            return (*leaf, bytes(value))
        if isinstance(value, dict | list | tuple | deque | np.ndarray):
            return (*leaf, len(value), getattr(value, "maxlen", None), getattr(value, "default_factory", None))
        if _has_parts(value):
            return leaf
        return leaf or (value,)

    @staticmethod
    def _memory(tensor: torch.Tensor) -> Any:
        """Return where a tensor is and how often it was written."""
        lazy = is_lazy(tensor)
        address = tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta and not lazy else None
        return address, tensor._version, tensor.grad_fn is None

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the name, as it is written in code, and the value of each part."""
        if isinstance(value, dict):
            for number, (key, item) in enumerate(value.items()):
                name = repr(key) if isinstance(key, _VALUES) else f"key {number}"
                yield f"<{number}>", key
                yield f"[{name}]", item
        elif isinstance(value, list | tuple | deque):
            for number, item in enumerate(value):
                yield f"[{number}]", item
        elif isinstance(value, np.ndarray) and value.dtype.hasobject:
            yield ".tolist()", value.tolist()
        is_leaf = isinstance(value, torch.Tensor) and value.is_leaf and not is_lazy(value)
        if self._identities and is_leaf and value.grad is not None:
            yield ".grad", value.grad
        if _has_parts(value):
            for name, item in getattr(value, "__dict__", {}).items():
                yield f".{name}", item


def _has_parts(value: Any) -> bool:
    """Say whether an object is what is in it, and not only itself."""
    if isinstance(value, torch.Tensor):
        return not value.is_nested  # whose attributes are caches
    opaque = type(value).__module__.startswith(_OPAQUE) and not isinstance(value, torch.nn.Module)
    return hasattr(value, "__dict__") and not isinstance(value, (*_CODE, *_STORAGES)) and not opaque


def _number(value: Any) -> Any:
    """Return a plain value so that NaN equals NaN of the same bits, and 0.0 is not -0.0."""
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return (_number(value.real), _number(value.imag))
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, float):
        return value.hex() if value == value else struct.pack(">d", value)  # noqa: PLR0124 - not NaN
    return value


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor is, without its identity."""
    if is_lazy(tensor):
        return (tensor.dtype, "lazy", tensor.requires_grad)
    size = [tuple(part.size()) for part in tensor.unbind()] if tensor.is_nested else tuple(tensor.size())
    return (tensor.dtype, size, tensor.layout, tensor.device, tensor.requires_grad, _elements(tensor.detach()))


def _elements(tensor: torch.Tensor) -> Any:
    """Return a digest of every bit that a tensor shows, in logical order, whatever its layout."""
    if tensor.is_meta:
        return None
    if tensor.is_nested:
        return [_elements(part) for part in tensor.unbind()]
    if tensor.layout in _SPARSE:
        return [_elements(getattr(tensor, part)()) for part in _SPARSE[tensor.layout]]
    if tensor.layout is not torch.strided:
        return _elements(tensor.to_dense())
    if tensor.is_quantized:
        if tensor.qscheme() is torch.per_tensor_affine:
            scale = [tensor.q_scale(), tensor.q_zero_point()]
        else:
            channels = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            scale = [*map(_elements, channels), tensor.q_per_channel_axis()]
        return [_elements(tensor.int_repr()), tensor.qscheme(), scale]
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper, which has no memory of its own
        return [(name, _tensor(getattr(tensor, name))) for name in tensor.__tensor_flatten__()[0]]
    flags = tensor.is_conj(), tensor.is_neg()
    if tensor.is_conj():
        tensor = tensor.conj()  # undone: the elements as they lie in memory
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    flat = tensor.cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return (*flags, hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest())


def _position(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state
