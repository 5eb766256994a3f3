"""What a file has no word for, in the state of an object: noted when it is captured, made again when it is restored.

A file holds dicts, lists and tensors. A deque, a defaultdict and a NumPy array are written as these, and a note beside
the state says where they were: a replay buffer that gets a tensor for its array fails at its next step. A member of an
Enum is written as a text, `Mode.MAX`. No class can be in a file that a safe load reads, so it becomes a member again of
the class that the live object uses.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.state.tree import join

__all__ = ["Members", "from_plain", "members_in", "to_plain", "unknown_members", "uses_members"]

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, list, dict, set, tuple)}

Notes = list[list[Any]]  # [keys on the way there, what is there, its detail] each
Members = Mapping[str, enum.Enum]  # by the texts that stand for them


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
    if isinstance(value, enum.Enum) and value in _members_of(kind).values():
        notes.append([path, "enum", None])
        return _text_of(value)
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
        location = _location(name, path)
        raise UnsavableStateError(
            location=location,
            type_name="defaultdict with a factory of its own",
            reason="a file cannot hold the function",
            cure=f"save dict({location}), or use one of {', '.join(_FACTORIES)}.",
        )
    return known


def _members_of(kind: type[enum.Enum]) -> dict[str, enum.Enum]:
    """Return the members of a class by their texts, without the aliases and combinations that have no name."""
    return {_text_of(member): member for member in kind.__members__.values()}


def _text_of(member: enum.Enum) -> str:
    return f"{type(member).__qualname__}.{member.name}"


def members_in(live: Any) -> Members:
    """Return all members of the Enum classes that a live state uses. Two classes of one name have none."""
    kinds: dict[str, set[type[enum.Enum]]] = {}
    for kind in _enums_in(live, set()):
        kinds.setdefault(kind.__qualname__, set()).add(kind)
    only = [next(iter(same)) for same in kinds.values() if len(same) == 1]
    return {text: member for kind in only for text, member in _members_of(kind).items()}


def _enums_in(value: Any, seen: set[int]) -> Iterator[type[enum.Enum]]:
    if isinstance(value, enum.Enum):
        yield type(value)
    elif isinstance(value, dict | list | tuple | deque) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _enums_in(item, seen)


def uses_members(notes: Notes) -> bool:
    """Return whether `from_plain` needs to know the members of Enum classes."""
    return any(kind == "enum" for _, kind, _ in notes)


def unknown_members(tree: Any, notes: Notes, members: Members, name: str) -> Iterator[str]:
    """Yield what keeps members of Enum classes from being made again, one sentence each."""
    for path, kind, _ in notes:
        if kind == "enum":
            value = tree
            for key in path:
                value = value[key]
            if value not in members:
                yield (
                    f"{_location(name, path)}: saved as {value}, and the live object uses no class of which that is a "
                    "member; give it any member of that class before the restore"
                )


def _location(name: str, path: list[Any]) -> str:
    for key in path:
        name = join(name, key)
    return name


def from_plain(tree: Any, notes: Notes, members: Members) -> Any:
    """Return a state with the containers, arrays and Enum members that it had. Containers of `tree` are changed."""
    for path, kind, detail in reversed(notes):  # what is inside first
        tree = _with(tree, path, kind, members if kind == "enum" else detail)
    return tree


def _with(tree: Any, path: list[Any], kind: str, detail: Any) -> Any:
    if path:
        key, *rest = path
        made = _with(tree[key], rest, kind, detail)
        if isinstance(tree, tuple):
            return (*tree[:key], made, *tree[key + 1 :])
        tree[key] = made
        return tree
    if kind == "enum":
        return detail[tree]
    if kind == "array":
        values = tree.numpy() if isinstance(tree, torch.Tensor) else tree
        return np.array(values, dtype=np.dtype(detail))
    if kind == "deque":
        return deque(tree, detail)
    return defaultdict(None if detail is None else _FACTORIES[detail], tree)
