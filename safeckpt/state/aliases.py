"""One object in several places of plain dicts: noted when they are captured, made one again when they are restored.

A step that writes into one of these places changes what the others see. So an average that is also the "best" of a
meter, a list in two dicts, or a parameter that a dict holds beside its model has to be one object after a restore,
whatever the script has put there at its start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from safeckpt.state.component import Captured, Component
from safeckpt.state.tree import clusters_of, join
from safeckpt.system.tensor_kind import is_plain, span_of

__all__ = ["ALIASES", "Aliases", "find_aliases"]

ALIASES = "aliases"  # the key of a component's record

Place = tuple[Any, ...]  # the name of a component, and the keys from there on

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


class _View(NamedTuple):
    """How a tensor looks at the memory of another one.

    Attributes:
        offset: Elements between the beginnings of the two.
        size: Its size.
        stride: Its stride.
        of: The stride of the other one.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    of: tuple[int, ...]


class Alias(NamedTuple):
    """A place that holds what another place holds.

    Attributes:
        place: The place, in a plain dict.
        origin: The other one, in a plain dict or a module.
        view: Which part of the other tensor it is; None where it is all of the object.
    """

    place: Place
    origin: Place
    view: _View | None = None

    def as_record(self) -> list[Any]:
        """Return it as plain values."""
        view = None if self.view is None else [self.view.offset, *map(list, self.view[1:])]
        return [list(self.place), list(self.origin), view]


class _Holder(NamedTuple):
    place: Place
    obj: Any
    in_module: bool


def find_aliases(components: Mapping[str, Component], state_of: Callable[[str], Any]) -> list[Alias]:
    """Return the places of plain dicts whose object, or whose memory, is in another place as well.

    Args:
        components: All of them.
        state_of: Gives the state of a module among them.

    Cost:
        One walk over the plain dicts; where tensors are in them, a look at the address of each tensor of the modules.
    """
    held = [
        _Holder(place, obj, in_module=False)
        for name, component in components.items()
        if component.kind == "counters"
        for place, obj in _places((name,), component.obj, set())
    ]
    tensors = [holder for holder in held if isinstance(holder.obj, torch.Tensor) and is_plain(holder.obj)]
    by_memory = {id(holder) for holder in tensors}
    found = _same_objects([holder for holder in held if id(holder) not in by_memory])
    if tensors:
        found += _same_memory([*_of_modules(tensors, components, state_of), *tensors])
    return found


def _places(place: Place, value: Any, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    """Yield (place, object) of everything that can be changed; what is met again is not entered again."""
    yield place, value
    if id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | deque):
        items = enumerate(value)
    for key, item in items:
        if type(item) not in _ATOMS and _can_change(item):
            yield from _places((*place, key), item, seen)


def _can_change(value: Any) -> bool:
    if type(value) is tuple:
        return any(type(item) not in _ATOMS for item in value)
    return isinstance(value, dict | list | deque | set | torch.Tensor | np.ndarray)


def _same_objects(held: Iterable[_Holder]) -> list[Alias]:
    groups: dict[Any, list[_Holder]] = {}
    for holder in held:
        groups.setdefault(_identity(holder.obj), []).append(holder)
    found = []
    for group in groups.values():
        origin = min(group, key=lambda holder: len(holder.place) > 1)  # the root of a component has to stay
        found += [Alias(holder.place, origin.place) for holder in group if holder is not origin]
    return found


def _identity(obj: Any) -> Any:
    if isinstance(obj, np.ndarray) and obj.nbytes:
        return obj.__array_interface__["data"][0], obj.dtype.str, obj.shape, obj.strides
    return id(obj)


def _of_modules(
    tensors: Collection[_Holder], components: Mapping[str, Component], state_of: Callable[[str], Any]
) -> Iterator[_Holder]:
    """Yield the tensors of modules that share a storage with one of these."""
    storages = {holder.obj.untyped_storage().data_ptr() for holder in tensors}
    for name in (name for name, component in components.items() if component.kind == "module"):
        for key, tensor in state_of(name).items():
            plain = isinstance(tensor, torch.Tensor) and is_plain(tensor)
            if plain and tensor.untyped_storage().data_ptr() in storages:
                yield _Holder((name, key), tensor, in_module=True)


def _same_memory(held: Iterable[_Holder]) -> list[Alias]:
    """Return which of some tensors are others, or look at a part of their memory."""
    holders: dict[int, list[_Holder]] = {}
    for holder in held:
        holders.setdefault(id(holder.obj), []).append(holder)
    found = []
    for cluster in clusters_of(group[0].obj for group in holders.values()):
        members = [holder for tensor in cluster.members for holder in holders[id(tensor)]]
        all_of_it = (cluster.start, cluster.start + cluster.numel)
        whole = [holder for holder in members if span_of(holder.obj) == all_of_it]
        if whole and not all(holder.in_module for holder in members):
            origin = min(whole, key=lambda holder: (not holder.in_module, not holder.obj.requires_grad))
            found += [_alias(holder, origin) for holder in members if holder is not origin and not holder.in_module]
    return found


def _alias(holder: _Holder, origin: _Holder) -> Alias:
    one, other = holder.obj, origin.obj
    offset = int(one.storage_offset() - other.storage_offset())
    if (offset, one.size(), one.stride()) == (0, other.size(), other.stride()):
        return Alias(holder.place, origin.place)
    return Alias(holder.place, origin.place, _View(offset, tuple(one.size()), one.stride(), other.stride()))


class Aliases:
    """The aliases of a checkpoint, and those of the live objects that take its state.

    Before the objects are filled, `let_go` separates what the checkpoint has separate: a value would be written over by
    that of the other place. Afterwards `unite` makes one what was one.

    Args:
        pairs: What will be applied, by component.
        fresh: Entries that keep their live state, by component.
    """

    def __init__(self, pairs: Iterable[tuple[Component, Captured]], fresh: Mapping[str, Collection[str]]) -> None:
        pairs = list(pairs)
        self._components = {component.name: component for component, _ in pairs}
        self._states = {component.name: captured.state for component, captured in pairs}
        self._trained = {name for _, captured in pairs for name in captured.record.get("trained", ())}
        records = [record for _, captured in pairs for record in captured.record.get(ALIASES, ())]
        saved = [one for one in map(_alias_of_record, records) if not any(_is_fresh(end, fresh) for end in one[:2])]
        self._saved = [alias for alias in saved if alias.origin[0] in self._components]
        self._parted = [alias for alias in saved if alias.origin[0] not in self._components]
        live = find_aliases(self._components, self._module_state)
        known = {component.name for component, captured in pairs if ALIASES in captured.record}
        exact, heads = set(self._saved), {one.place: one.origin for one in self._saved if one.view is None}
        self._only_live = [
            alias
            for alias in live
            if alias.place[0] in known
            and alias not in exact
            and (alias.view is not None or heads.get(alias.place, alias.place) != heads.get(alias.origin, alias.origin))
            and self._is_saved(alias.place)
        ]
        self._displaced: list[tuple[Place, Any]] = []

    def check(self) -> list[str]:
        """Return what keeps the places of the checkpoint from being made one, one sentence each."""
        ends = [end for alias in self._saved for end in alias[:2] if not self._is_saved(end)]
        found = [f"{_name_of(end)}: the checkpoint says that it is in two places, and does not hold it" for end in ends]
        for alias in self._saved if not found else ():
            both = [self._live_at(end) for end in alias[:2]]
            if all(map(_is_trained, both)) and not _is_same(*both):
                found.append(f"{_and(alias)}: one tensor in the checkpoint, separate tensors now")
        tied = [alias for alias in self._only_live if _is_trained(self._live_at(alias.place))]
        return found + [f"{_and(alias)}: separate tensors in the checkpoint, one tensor now" for alias in tied]

    def notices(self) -> list[str]:
        """Return which places will hold an object of their own, one sentence each."""
        return [
            f"{_name_of(alias.place)}: it was {_name_of(alias.origin)} in the run that saved, which is not restored"
            for alias in self._parted
        ]

    def let_go(self) -> None:
        """Empty the places that share an object now, and did not in the run that saved."""
        for alias in sorted(self._only_live, key=lambda alias: -len(alias.place)):  # what is inside first
            self._displace(alias.place, None)

    def take_back(self) -> None:
        """Undo what was done, where the objects are given the state from before."""
        while self._displaced:
            place, obj = self._displaced.pop()
            _put_at(place, self._components[place[0]].obj, obj)

    def _displace(self, place: Place, obj: Any) -> None:
        self._displaced.append((place, self._live_at(place)))
        _put_at(place, self._components[place[0]].obj, obj)

    def unite(self) -> list[str]:
        """Put one object into the places that had one; return a sentence for each place that keeps its own."""
        found = []
        for alias in self._saved:
            value = _value_of(alias, self._live_at(alias.origin), is_trained=_name_of(alias.place) in self._trained)
            if value is None:
                found.append(
                    f"{_name_of(alias.place)}: it was a part of {_name_of(alias.origin)} in the run that saved, whose "
                    "memory is laid out differently now"
                )
            elif not _is_same(value, self._live_at(alias.place)):
                self._displace(alias.place, value)
        self._displaced.clear()
        return found

    def _is_saved(self, place: Place) -> bool:
        try:
            _object_at(place, self._states.__getitem__)
        except (LookupError, TypeError):
            return False
        return True

    def _live_at(self, place: Place) -> Any:
        """Return the live object at a place; None where there is no such place."""
        component = self._components[place[0]]
        if component.kind == "module":
            parameter = component.parameter_names().get(f"{place[0]}.{place[1]}")
            return self._module_state(place[0]).get(place[1]) if parameter is None else parameter
        try:
            return _object_at(place, lambda name: self._components[name].obj)
        except (LookupError, TypeError):
            return None

    def _module_state(self, name: str) -> Any:
        return self._components[name].capture().state


def _alias_of_record(record: list[Any]) -> Alias:
    place, origin, view = record
    made = None if view is None else _View(view[0], *map(tuple, view[1:]))
    return Alias(tuple(place), tuple(origin), made)


def _is_fresh(place: Place, fresh: Mapping[str, Collection[str]]) -> bool:
    return len(place) > 1 and str(place[1]) in fresh.get(place[0], ())


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two places hold one object already, or tensors of the same memory."""
    if one is other:
        return True
    if not all(isinstance(value, torch.Tensor) and is_plain(value) for value in (one, other)) or not one.numel():
        return False
    return bool(
        (one.data_ptr(), one.dtype, one.size(), one.stride())
        == (other.data_ptr(), other.dtype, other.size(), other.stride())
    )


def _and(alias: Alias) -> str:
    return " and ".join(sorted((_name_of(alias.place), _name_of(alias.origin))))


def _name_of(place: Place) -> str:
    """Return what messages call a place."""
    name = ""
    for key in place:
        name = join(name, key)
    return name


def _object_at(place: Place, trees: Callable[[str], Any]) -> Any:
    """Return the object at a place; `trees` gives the tree of a component.

    Raises:
        LookupError, TypeError: There is no such place.
    """
    value = trees(place[0])
    for key in place[1:]:
        value = value[key]
    return value


def _put_at(place: Place, tree: Any, value: Any) -> None:
    """Put an object at a place below the root of its component's tree."""
    _with(tree, place[1:], value)


def _with(tree: Any, path: Place, value: Any) -> Any:
    key, *rest = path
    made = _with(tree[key], tuple(rest), value) if rest else value
    if type(tree) is tuple:
        return (*tree[:key], made, *tree[key + 1 :])
    tree[key] = made
    return tree


def _value_of(alias: Alias, origin: Any, *, is_trained: bool) -> Any:
    """Return what belongs at a place whose origin holds `origin`; None where that is laid out otherwise now."""
    if not isinstance(origin, torch.Tensor):
        return origin
    if alias.view is None:
        return origin if is_trained or not origin.requires_grad else origin.detach()
    if not is_plain(origin) or origin.stride() != alias.view.of:
        return None
    offset, size, stride, _ = alias.view
    return origin.detach().as_strided(size, stride, origin.storage_offset() + offset)
