"""What a file has no word for, in the state of an object: noted when it is captured, made again when it is restored.

A file holds dicts, lists and tensors. A deque, a defaultdict and a NumPy array are written as these, and a note beside
the state says where they were: a replay buffer that gets a tensor for its array fails at its next step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.state.tree import join

__all__ = ["from_plain", "to_plain"]

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, list, dict, set, tuple)}

Notes = list[list[Any]]  # [keys on the way there, what is there, its detail] each


def to_plain(tree: Any, name: str) -> tuple[Any, Notes]:
    """Return a state of plain containers, and the notes that `from_plain` needs. `tree` is not changed.

    Args:
        tree: The state.
        name: What error texts call it.

    Raises:
        UnsavableStateError: A defaultdict makes its values with a function, which no file can hold.
    """
    notes: Notes = []
    return _plain(tree, [], notes, name, set()), notes


def _plain(value: Any, path: list[Any], notes: Notes, name: str, above: set[int]) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        notes.append([path, "array", value.dtype.str])
        return value
    if id(value) in above or kind not in (dict, list, tuple, deque, defaultdict):
        return value  # what is in itself is refused by name when it is encoded
    above = above | {id(value)}
    if kind is deque:
        notes.append([path, "deque", value.maxlen])
    elif kind is defaultdict:
        notes.append([path, "defaultdict", _name_of_factory(value, path, name)])
    if isinstance(value, dict):
        items = {key: _plain(item, [*path, key], notes, name, above) for key, item in value.items()}
        same = kind is dict and all(items[key] is item for key, item in value.items())
        return value if same else items
    parts = [_plain(item, [*path, index], notes, name, above) for index, item in enumerate(value)]
    if kind in (list, tuple) and all(map(_is, parts, value)):
        return value
    return tuple(parts) if kind is tuple else parts


def _is(one: Any, other: Any) -> bool:
    return one is other


def _name_of_factory(value: defaultdict[Any, Any], path: list[Any], name: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    known = str(getattr(factory, "__name__", ""))
    if _FACTORIES.get(known) is not factory:
        location = name
        for key in path:
            location = join(location, key)
        raise UnsavableStateError(
            location=location,
            type_name="defaultdict with a factory of its own",
            reason="a file cannot hold the function",
            cure=f"save dict({location}), or use one of {', '.join(_FACTORIES)}.",
        )
    return known


def from_plain(tree: Any, notes: Notes) -> Any:
    """Return a state with the containers and arrays that it had. Containers of `tree` are changed."""
    for path, kind, detail in reversed(notes):  # what is inside first
        tree = _with(tree, path, kind, detail)
    return tree


def _with(tree: Any, path: list[Any], kind: str, detail: Any) -> Any:
    if path:
        key, *rest = path
        made = _with(tree[key], rest, kind, detail)
        if isinstance(tree, tuple):
            return (*tree[:key], made, *tree[key + 1 :])
        tree[key] = made
        return tree
    if kind == "array":
        values = tree.numpy() if isinstance(tree, torch.Tensor) else tree
        return np.array(values, dtype=np.dtype(detail))
    if kind == "deque":
        return deque(tree, detail)
    return defaultdict(None if detail is None else _FACTORIES[detail], tree)
