"""Classes of others that wrap a component, and what is inside: an object of one stands for the object that it wraps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["register_wrapper", "unwrapped"]

_inner_of: dict[type, Callable[[Any], Any]] = {}


def register_wrapper(cls: type, inner: Callable[[Any], Any]) -> None:
    """Let objects of a class stand for what they wrap, as those of DDP and `torch.compile` do.

    Given as a component, such an object is taken off: the checkpoint holds what is inside, and is read with or without
    the wrapper. The wrapper's own state is not saved. Holds in the whole process, for managers that are made later,
    for subclasses too, and for wrappers inside wrappers.

    Args:
        cls: The wrapper's class.
        inner: Called as `inner(obj)`; returns the object inside.

    Raises:
        TypeError: `cls` is no class, or `inner` cannot be called.
        ValueError: The class is registered with another `inner`. The same one may be registered again.

    Example:
        >>> class Tuned:
        ...     def __init__(self, optimizer):
        ...         self.optimizer = optimizer
        >>> def optimizer_of(tuned):
        ...     return tuned.optimizer
        >>> register_wrapper(Tuned, optimizer_of)
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_wrapper takes a class; got {cls!r}")
    if not callable(inner):
        raise TypeError(f"inner must be callable as inner(obj); got {inner!r}")
    if _inner_of.setdefault(cls, inner) != inner:
        raise ValueError(
            f"{cls.__qualname__} is registered with another function already, {_inner_of[cls]!r}; that one stays"
        )


def unwrapped(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components with registered wrappers taken off.

    Raises:
        TypeError: A wrapper has itself inside.
    """
    if not _inner_of:  # nearly always
        return dict(components)
    return {name: _unwrapped(name, obj) for name, obj in components.items()}


def _unwrapped(name: str, obj: Any) -> Any:
    seen: list[Any] = []
    while (inner := next((_inner_of[kind] for kind in type(obj).__mro__ if kind in _inner_of), None)) is not None:
        if any(obj is one for one in seen):
            kind = type(obj).__qualname__
            raise TypeError(f"{name!r} is a {kind}, and what register_wrapper was told is inside leads back to it")
        seen.append(obj)
        obj = inner(obj)
    return obj
