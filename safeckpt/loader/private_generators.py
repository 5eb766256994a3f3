"""Private generators inside the user's samplers, datasets and transforms: found, captured, reseeded.

A `numpy.random.Generator` kept by a transform is out of reach of the global streams. In a worker its position is
that worker's history, which no checkpoint can know, so the loader reseeds it for every batch as it does the
global streams. A generator kept by a sampler makes the order of the epoch: its position is saved instead.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from safeckpt.errors import UncapturedStateWarning
from safeckpt.loader.streams import mix
from safeckpt.state.random_streams import GeneratorComponent
from safeckpt.system.warn import warn_caller

__all__ = ["attributes_of", "find_generators", "reseed", "warn_of_unreachable"]

_MAX_OBJECTS = 10_000  # a dataset may hold millions of samples; generators sit near the top
_MAX_ITEMS = 100  # a longer list is data, not configuration
_LIBRARIES = frozenset({"builtins", "collections", "functools", "numpy", "torch", "typing", "abc", "random"})
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray)


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of what `obj` is made of, without running any code of its class."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(obj, kind):
            few = kind.__len__(obj) <= _MAX_ITEMS
            yield from ((str(index), item) for index, item in enumerate(kind.__iter__(obj) if few else ()))
    if isinstance(obj, dict):
        few = dict.__len__(obj) <= _MAX_ITEMS
        yield from ((str(key), value) for key, value in (dict.items(obj) if few else ()))
    elif isinstance(obj, functools.partial):
        yield from (("func", obj.func), ("args", obj.args), ("keywords", obj.keywords))
    elif isinstance(obj, types.MethodType | types.BuiltinMethodType):
        yield "__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    yield from attributes_of(obj)


def attributes_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what an object keeps in its `__dict__` and in slots."""
    with contextlib.suppress(AttributeError):  # has none
        yield from list(object.__getattribute__(obj, "__dict__").items())
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name
            if mangled in ("__dict__", "__weakref__"):
                continue
            try:
                yield mangled, object.__getattribute__(obj, mangled)
            except AttributeError:  # not assigned yet
                continue


def _shared(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a class of the user's keeps for all of its objects, or a module for its functions."""
    functions = [obj] if isinstance(obj, types.FunctionType) else []
    for cls in type(obj).__mro__ if not functions else ():
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in list(vars(cls).items()):
            if isinstance(value, GeneratorComponent.types):
                yield name, value
            elif isinstance(value, types.FunctionType):
                functions.append(value)
    for function in functions:
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, GeneratorComponent.types):
                yield f"{function.__module__}.{name}", value


def find_generators(roots: dict[str, Any], *, skip: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the generators that can be reached from `roots`, by dotted path, each once.

    Args:
        roots: Where to begin, by name.
        skip: Objects that are not entered.
    """
    return _search(roots, skip)[0]


def warn_of_unreachable(roots: dict[str, Any]) -> None:
    """Warn when there is more below `roots` than is looked through, so that a generator in there is not seeded."""
    _, unread = _search(roots, ())
    if unread is not None:
        warn_caller(
            f"{unread} and what comes after it is not looked through for random generators: there is too much of it. "
            "If one of them draws for a sample, a resumed run draws other numbers. Draw from torch's, NumPy's or "
            "Python's global stream in __getitem__, or keep the generator in an attribute of the dataset itself.",
            UncapturedStateWarning,
        )


def _search(roots: dict[str, Any], skip: tuple[Any, ...]) -> tuple[dict[str, Any], str | None]:
    """Return the generators, and the path at which the search stopped."""
    # The global streams under other names, as sklearn's check_random_state(None) hands them out.
    process_wide = (torch.default_generator, np.random.get_bit_generator(), np.random.mtrand._rand, random._inst)  # type: ignore[attr-defined]
    seen = {id(obj) for obj in (*process_wide, *skip)}
    found: dict[str, Any] = {}
    queue = deque(roots.items())
    while queue:
        path, obj = queue.popleft()
        if obj is None or isinstance(obj, _LEAVES) or id(obj) in seen:
            continue
        if len(seen) >= _MAX_OBJECTS:
            return found, path
        seen.add(id(obj))
        if isinstance(obj, GeneratorComponent.types):
            if not isinstance(obj, random.SystemRandom):  # has no position
                found[path] = obj
            continue
        queue.extend((f"{path}.{name}", child) for name, child in _children(obj))
        if isinstance(obj, types.FunctionType) or id(type(obj)) not in seen:
            seen.add(id(type(obj)))
            queue.extend((f"{path}.{name}", generator) for name, generator in _shared(obj))
    return found, None


def reseed(generators: dict[str, Any], seed: int) -> None:
    """Set each generator to a position of its own that depends on `seed` and its place."""
    for number, generator in enumerate(generators.values(), start=16):
        own = mix(seed, number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif isinstance(generator, np.random.RandomState):
            bits: Any = generator._bit_generator
            generator.set_state(type(bits)(own).state)
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits.state = type(bits)(own).state
