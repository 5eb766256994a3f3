"""A photograph of everything live: two are equal when nothing whatsoever has changed, not a bit, not an identity."""

from __future__ import annotations

import functools
import hashlib
import random
import types
import weakref
from collections import deque

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
# The compiler's own objects: large, lazily filled, and no part of training state.
OPAQUE = ("torch._dynamo", "torch._inductor", "torch._C", "torch.distributed", "torch._functorch")


def bytes_of(tensor):
    """Return a digest of the memory that a tensor shows, of any dtype and layout."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return "no memory"
    t = tensor.detach()
    if t.is_nested:
        return [bytes_of(part) for part in t.unbind()]
    if t.layout is torch.sparse_coo:
        return [bytes_of(t._indices()), bytes_of(t._values())]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [bytes_of(t.crow_indices()), bytes_of(t.col_indices()), bytes_of(t.values())]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [bytes_of(t.ccol_indices()), bytes_of(t.row_indices()), bytes_of(t.values())]
    if t.layout is not torch.strided:
        return bytes_of(t.to_dense())
    if t.is_quantized:
        scale = t.q_scale() if t.qscheme() is torch.per_tensor_affine else bytes_of(t.q_per_channel_scales())
        return [bytes_of(t.int_repr()), str(scale)]
    flat = t.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


def bits(tensor):
    """Return what a tensor is, without its identity."""
    size = [tuple(part.size()) for part in tensor.unbind()] if tensor.is_nested else tuple(tensor.size())
    return (str(tensor.dtype), size, str(tensor.layout), str(tensor.device), str(bytes_of(tensor)))


def streams():
    """Return the state of every process-wide random stream."""
    return {
        "python": random.getstate(),
        "numpy": _numbers(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def photograph(*roots, **named):
    """Return path -> value of everything reachable from the objects, and of the process's random streams.

    Includes the identity, the memory and the version counter of every tensor: a value written over itself shows.
    """
    photo = {"streams": streams(), "grad": torch.is_grad_enabled(), "dtype": str(torch.get_default_dtype())}
    seen = {}
    for number, root in enumerate(roots):
        _walk(f"{number}", root, photo, seen)
    for name, root in named.items():
        _walk(name, root, photo, seen)
    return photo


def _walk(path, value, photo, seen):
    if isinstance(value, float | np.floating):
        photo[path] = (type(value).__name__, float(value).hex())
        return
    if value is None or isinstance(value, bool | int | str | bytes | complex | torch.dtype | torch.device | np.generic):
        photo[path] = (type(value).__name__, repr(value))
        return
    if id(value) in seen:
        photo[path] = ("the same as", seen[id(value)][0])
        return
    seen[id(value)] = (path, value)
    if isinstance(value, torch.Tensor):
        lazy = torch.nn.parameter.is_lazy(value)
        memory = value.data_ptr() if value.layout is torch.strided and not value.is_meta and not lazy else None
        shape = None if lazy else (tuple(value.size()), value.layout)
        photo[path] = (
            type(value).__name__, id(value), memory, value._version, value.dtype, shape, value.requires_grad,
            str(bytes_of(value)), value.grad_fn is None,
        )  # fmt: skip
        if value.is_leaf and not lazy and value.grad is not None:
            _walk(f"{path}.grad", value.grad, photo, seen)
        items = vars(value).items() if hasattr(value, "__dict__") else ()
        _items(path, items, photo, seen)
    elif isinstance(value, np.ndarray):
        photo[path] = (id(value), value.dtype.str, value.shape, value.tobytes())
    elif isinstance(value, GENERATORS):
        photo[path] = (id(value), _position(value))
    elif isinstance(value, dict):
        photo[path] = (type(value).__name__, id(value), len(value))
        _items(path, ((_key(key, index), item) for index, (key, item) in enumerate(value.items())), photo, seen)
        if hasattr(value, "__dict__"):
            _items(f"{path}.__dict__", vars(value).items(), photo, seen)
    elif isinstance(value, list | tuple | deque):
        photo[path] = (type(value).__name__, id(value), len(value))
        _items(path, enumerate(value), photo, seen)
    elif isinstance(value, set | frozenset):
        photo[path] = (type(value).__name__, id(value), sorted(map(repr, value)))
    elif isinstance(value, weakref.ref | types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type):
        photo[path] = (type(value).__name__, id(value))
    elif isinstance(value, types.MethodType):
        photo[path] = ("method", value.__func__.__qualname__)
    elif isinstance(value, functools.partial):
        photo[path] = ("partial", id(value))
    else:
        photo[path] = (type(value).__qualname__, id(value))
        if not type(value).__module__.startswith(OPAQUE) or isinstance(value, torch.nn.Module):
            _items(path, getattr(value, "__dict__", {}).items(), photo, seen)


def _items(path, items, photo, seen):
    for key, item in items:
        _walk(f"{path}.{key}", item, photo, seen)


def _key(key, index):
    return f"<{type(key).__name__} {index}>" if isinstance(key, torch.Tensor) else repr(key)


def _position(generator):
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _numbers(generator.get_state(legacy=False))
    return _numbers(getattr(generator, "bit_generator", generator).state)


def _numbers(state):
    if isinstance(state, dict):
        return {key: _numbers(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def changes(before, after):
    """Return the paths at which two photographs differ."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def likeness(tree):
    """Return a comparable form of nested state: every bit and type, no identity."""
    if isinstance(tree, torch.Tensor):
        return bits(tree)
    if isinstance(tree, np.ndarray):
        return (tree.dtype.str, tree.shape, tree.tobytes())
    if isinstance(tree, dict):
        return {key: likeness(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(likeness, tree)]
    if isinstance(tree, float):
        return tree.hex()
    return tree
