"""What a file has no word for, in the state of an object: noted when it is captured, made again when it is restored.

A file holds dicts, lists and tensors. A deque, a defaultdict and a NumPy array are written as these, and a note beside
the state says where they were: a replay buffer that gets a tensor for its array fails at its next step. A member of an
Enum is written as a text, `Mode.MAX`. No class can be in a file that a safe load reads, so it becomes a member again of
the class that the live object uses.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.state.tree import join

__all__ = ["Members", "from_plain", "members_in", "to_plain", "unknown_members", "uses_members"]

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex, str, list, dict, set, tuple)}

Notes = list[list[Any]]  # [keys on the way there, what is there, its detail] each
Members = Mapping[str, enum.Enum | None]  # by the texts that stand for them; None where it is not known which


class Plain(NamedTuple):
    """A state of plain containers.

    Attributes:
        tree: The state.
        notes: What `from_plain` needs.
        fault: Why no restore could make it again; None where one can. Only a save minds.
    """

    tree: Any
    notes: Notes
    fault: UnsavableStateError | None


def to_plain(tree: Any, name: str) -> Plain:
    """Return a state of plain containers. `tree` is not changed.

    Args:
        tree: The state.
        name: What error texts call it.
    """
    walk = _Walk(name)
    return Plain(walk.plain(tree, [], set()), walk.notes, walk.fault)


class _Walk:
    def __init__(self, name: str) -> None:
        self.notes: Notes = []
        self.fault: UnsavableStateError | None = None
        self._name = name
        self._enums: dict[str, type[enum.Enum]] = {}

    def plain(self, value: Any, path: list[Any], above: set[int]) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            self.notes.append([path, "array", value.dtype.str])
            return value
        if isinstance(value, enum.Enum) and value in _members_of(kind).values():
            self.notes.append([path, "enum", None])
            self._note_enum(kind, path)
            return _text_of(value)
        if id(value) in above or kind not in (dict, OrderedDict, list, tuple, deque, defaultdict):
            return value  # what is in itself is refused by name when it is encoded
        above = above | {id(value)}
        if kind is deque:
            self.notes.append([path, "deque", value.maxlen])
        elif kind is defaultdict:
            self.notes.append([path, "defaultdict", self._name_of_factory(value, path)])
        if isinstance(value, dict):
            items = {key: self.plain(item, [*path, key], above) for key, item in value.items()}
            same = kind is not defaultdict and all(items[key] is item for key, item in value.items())
            return value if same else OrderedDict(items) if kind is OrderedDict else items
        parts = [self.plain(item, [*path, index], above) for index, item in enumerate(value)]
        if kind in (list, tuple) and all(map(_is, parts, value)):
            return value
        return tuple(parts) if kind is tuple else parts

    def _note_enum(self, kind: type[enum.Enum], path: list[Any]) -> None:
        """Note a class; of two with one name nobody could tell whose member a text was."""
        if self._enums.setdefault(kind.__qualname__, kind) is not kind:
            other = self._enums[kind.__qualname__]
            self._refuse(
                path,
                f"member of an Enum called {kind.__qualname__}",
                f"another class of this name is in {self._name} as well, of {other.__module__} and {kind.__module__}, "
                "and a member is kept by name",
                f"rename one of the two, or save {{x}}.value. A class that was defined twice, as by a notebook cell "
                f"that was run again, has its earlier members still in {self._name}: set them anew.",
            )

    def _name_of_factory(self, value: defaultdict[Any, Any], path: list[Any]) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        known = str(getattr(factory, "__name__", ""))
        if _FACTORIES.get(known) is not factory:
            self._refuse(
                path,
                "defaultdict with a factory of its own",
                "a file cannot hold the function",
                f"save dict({{x}}), or use one of {', '.join(_FACTORIES)}.",
            )
        return known

    def _refuse(self, path: list[Any], type_name: str, reason: str, cure: str) -> None:
        location = _location(self._name, path)
        if self.fault is None:
            self.fault = UnsavableStateError(
                location=location, type_name=type_name, reason=reason, cure=cure.format(x=location)
            )


def _is(one: Any, other: Any) -> bool:
    return one is other


def _members_of(kind: type[enum.Enum]) -> dict[str, enum.Enum]:
    """Return the members of a class by their texts, without the aliases and combinations that have no name."""
    return {_text_of(member): member for member in kind.__members__.values()}


def _text_of(member: enum.Enum) -> str:
    return f"{type(member).__qualname__}.{member.name}"


def members_in(live: Any) -> Members:
    """Return all members of the Enum classes that a live state uses; None for those of two classes of one name."""
    kinds: dict[str, set[type[enum.Enum]]] = {}
    for kind in _enums_in(live, set()):
        kinds.setdefault(kind.__qualname__, set()).add(kind)
    return {
        text: member if len(same) == 1 else None
        for same in kinds.values()
        for kind in same
        for text, member in _members_of(kind).items()
    }


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
            if members.get(value) is None:
                uses = (
                    "two classes of that name; leave in it the members of one of them"
                    if value in members
                    else "no class of which that is a member; give it any member of that class"
                )
                yield f"{_location(name, path)}: saved as {value}, and the live object uses {uses} before the restore"


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
