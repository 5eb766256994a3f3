"""What a checkpoint does not hold: attributes, non-persistent buffers, globals, closures, found in the live objects.

Nothing here is run but `vars` and torch's own `state_dict`: no property, no method of the user's. What is found is a
suspect, not a culprit: much that is not captured (logs, caches) has no part in the next loss.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from safeckpt.proof.captured import stream_key
from safeckpt.proof.leaves import Leaf, flatten, leaf
from safeckpt.state.module import clean_modules, unwrap
from safeckpt.state.random_streams import GeneratorComponent, RngStreams
from safeckpt.state.tree import join
from safeckpt.system.torch_private import batches_yielded, hidden_buffers, version_of

__all__ = ["BUFFER", "MAIN_AGAIN", "LiveObjects"]

MAIN_AGAIN = "__mp_main__"  # what multiprocessing, too, calls the script when another process imports it
BUFFER = "non-persistent buffer"
ATTRIBUTE = "attribute"
GLOBAL = "global"
CLOSURE = "closure variable"

_MOST_LEAVES = 5000
_MOST_ITEMS = 200  # of a container; a longer one is known by its length
_DEEPEST = 6
_MOST_ARRAY_BYTES = 1 << 22  # NumPy arrays do not tell whether they were written to, so each is read at every step
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, np.generic, itertools.count)
_OWN_OF_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = sys.stdlib_module_names | {
    "torch", "numpy", "safeckpt", "matplotlib", "_pytest", "pytest", "accelerate", "datasets", "ignite", "lightning",
    "torchmetrics", "transformers", "trl",
}  # fmt: skip
_Read = tuple[weakref.ref[torch.Tensor], tuple[Any, ...], Leaf]  # a tensor, what its last write was, and its leaf
_CAPTURED_WHOLE = (LRScheduler, torch.amp.GradScaler, *GeneratorComponent.types)
_CODE = (type, types.ModuleType, types.FunctionType)


@functools.cache
def _own_of_optimizer() -> frozenset[str]:
    """Return the attributes that every optimizer has. Not at import: the first optimizer imports torch's compiler."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


class LiveObjects:
    """Everything reachable from the components and from the two functions that no component captures.

    Args:
        components: What `build` returned.
        functions: `build` and `train_step`: their globals, closures, defaults and attributes are looked at.
    """

    def __init__(self, components: Mapping[str, Any], functions: Iterable[Callable[..., Any]]) -> None:
        self._components = components
        self._functions = list(functions)
        self._tensors: dict[int, _Read] = {}

    def leaves(self) -> dict[str, Leaf]:
        """Return each of them by name, as it is now. Changes nothing, draws nothing."""
        with RngStreams.untouched():
            return _Walk(self._components, self._functions, self._tensors).found


class _Walk:
    """One pass over the live objects."""

    def __init__(
        self, components: Mapping[str, Any], functions: list[Callable[..., Any]], tensors: dict[int, _Read]
    ) -> None:
        self.found: dict[str, Leaf] = {}
        self._tensors = tensors
        self._seen: set[int] = {id(components)}
        for obj in components.values():
            self._seen.add(id(obj))
            if isinstance(obj, nn.Module):
                self._seen.update(id(one) for one in obj.modules())
                self._seen.update(id(one) for one in obj.parameters())
                self._seen.update(id(one) for one in obj.state_dict(keep_vars=True).values())
        for name, obj in components.items():
            self._component(name, obj)
        for function in functions:
            self._function(function)

    def _component(self, name: str, obj: Any) -> None:
        if isinstance(obj, nn.Module):
            for path, module in clean_modules(unwrap(obj)).values():
                self._module(join(name, path), module)
        elif isinstance(obj, Optimizer):
            self._items(
                name, {key: one for key, one in vars(obj).items() if key not in _own_of_optimizer()}, ATTRIBUTE, 0
            )
        elif isinstance(obj, _CAPTURED_WHOLE) or type(obj) is dict:
            return
        else:
            wrapped = vars(obj).get("dataloader", obj) if hasattr(obj, "__dict__") else obj
            for part in ("dataset", "sampler", "batch_sampler", "collate_fn"):
                inner = getattr(wrapped, part, None) if _is_library(wrapped) else None
                if inner is not None:
                    self._value(f"{name}.{part}", inner, ATTRIBUTE, 1)
            if not _is_library(obj):
                self._items(name, _attributes(obj), ATTRIBUTE, 0)
                self._class(name, type(obj))

    def _module(self, name: str, module: nn.Module) -> None:
        for key, buffer in hidden_buffers(module):
            self.found[join(name, key)] = self._tensor(buffer, BUFFER)
        own = {key: one for key, one in vars(module).items() if key not in _OWN_OF_MODULE}
        self._items(name, own, ATTRIBUTE, 0)
        self._class(name, type(module))

    def _class(self, name: str, cls: type) -> None:
        """Look at what a class of the user's keeps for all its instances."""
        for one in cls.__mro__:
            if not _is_library_type(one) and id(one) not in self._seen:
                self._seen.add(id(one))
                values = {key: value for key, value in vars(one).items() if not key.startswith("__")}
                self._items(f"{name}.{one.__qualname__}", values, ATTRIBUTE, 1)

    def _function(self, function: Any) -> None:
        if isinstance(function, functools.partial):
            self._items("partial", {"args": function.args, **function.keywords}, CLOSURE, 0)
            self._function(function.func)
        elif isinstance(function, types.MethodType):
            self._value("self", function.__self__, CLOSURE, 0)
            self._function(function.__func__)
        elif isinstance(function, types.FunctionType):
            name = function.__qualname__
            self._items(name, _closure(function), CLOSURE, 0)
            self._items(name, {"defaults": function.__defaults__, **(function.__kwdefaults__ or {})}, CLOSURE, 0)
            wrapped = getattr(function, "__wrapped__", None)
            self._items(name, {k: v for k, v in vars(function).items() if k != "__wrapped__"}, ATTRIBUTE, 0)
            self._globals(function.__module__, function.__globals__)
            if wrapped is not None:
                self._function(wrapped)
        elif callable(getattr(function, "__wrapped__", None)):
            self._function(function.__wrapped__)
        else:
            self._value(type(function).__qualname__, function, CLOSURE, 0)
            for cls in type(function).__mro__:
                if "__call__" in vars(cls):
                    self._function(vars(cls)["__call__"])
                    break

    def _globals(self, name: str, values: dict[str, Any]) -> None:
        if id(values) in self._seen:
            return
        self._seen.add(id(values))
        shown = "__main__" if name == MAIN_AGAIN else name
        for key, value in list(values.items()):
            if key.startswith("__"):
                continue
            if not isinstance(value, type):
                self._value(f"{shown}.{key}", value, GLOBAL, 0)
            elif value.__module__ == name:
                self._class(shown, value)

    def _items(self, name: str, values: Mapping[Any, Any], kind: str, depth: int) -> None:
        for key, value in list(values.items()):
            self._value(join(name, key), value, kind, depth + 1)

    def _value(self, name: str, value: Any, kind: str, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._add(name, leaf(kind, repr(value) if isinstance(value, itertools.count) else value))
            return
        if id(value) in self._seen or depth > _DEEPEST or len(self.found) > _MOST_LEAVES:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._add(name, self._tensor(value, kind))
        elif isinstance(value, np.ndarray):
            small = value.nbytes <= _MOST_ARRAY_BYTES
            self._add(name, leaf(kind, value if small else f"{value.dtype}{list(value.shape)}"))
        elif isinstance(value, GeneratorComponent.types):
            state = GeneratorComponent(name, value).capture().state["state"]
            self._add(name, Leaf(kind, stream_key(state), f"a {type(value).__qualname__}"))
        elif isinstance(value, Mapping):
            self._container(name, value, kind, depth)
        elif isinstance(value, list | tuple | deque):
            self._container(name, dict(enumerate(value)) if len(value) <= _MOST_ITEMS else value, kind, depth)
        elif isinstance(value, set | frozenset):
            self._add(name, leaf(kind, value))
        else:
            self._object(name, value, kind, depth)

    def _container(self, name: str, value: Any, kind: str, depth: int) -> None:
        if len(value) > _MOST_ITEMS or not value:
            self._add(name, leaf(kind, f"{len(value)} items"))
        else:
            self._items(name, value, kind, depth)

    def _object(self, name: str, value: Any, kind: str, depth: int) -> None:
        if isinstance(value, Optimizer | LRScheduler | nn.Module | torch.amp.GradScaler):
            for key, one in flatten(value.state_dict(), name):
                self._add(key, leaf(kind, one))
        elif (count := batches_yielded(value)) is not None and _is_library(value):
            self._add(name, leaf(kind, f"{count} batches handed out"))
        elif isinstance(value, functools.partial):
            self._items(name, {"args": value.args, **value.keywords}, kind, depth)
        elif isinstance(value, types.SimpleNamespace) or not (isinstance(value, _CODE) or _is_library(value)):
            self._items(name, _attributes(value), kind, depth)

    def _tensor(self, tensor: torch.Tensor, kind: str) -> Leaf:
        if tensor.is_inference():
            return leaf(kind, tensor)
        # A data set in memory is read once, not at every step: torch counts in-place writes.
        written = (version_of(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0, tuple(tensor.size()))
        held, before, known = self._tensors.get(id(tensor), (None, None, None))
        if known is not None and held is not None and held() is tensor and before == written:
            return known
        one = leaf(kind, tensor)
        self._tensors[id(tensor)] = (weakref.ref(tensor), written, one)
        return one

    def _add(self, name: str, one: Leaf) -> None:
        self.found.setdefault(name, one)


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return found


def _is_library_type(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _LIBRARIES


def _is_library(value: object) -> bool:
    return _is_library_type(type(value))


def _attributes(value: object) -> dict[str, Any]:
    """Return what an object holds, without calling anything of it."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member = vars(cls).get(slot)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[slot] = member.__get__(value)
                except AttributeError:
                    continue  # never set
    return found
