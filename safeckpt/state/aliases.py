"""One object in several places: noted when the components are captured, made one again when they are restored.

A step that writes into one of these places changes what the others see. So an average that is also the "best" of a
meter, a list in two dicts, or a parameter that a dict holds beside its model has to be one object after a restore,
whatever the script has put there at its start.

A place in a plain dict can be given any object. What is in an object with a `state_dict` of its own, in a loader or in
the options of an optimizer is for their `load_state_dict` to decide: a dict whose entry was apart when the script began
is given what they have made of it. What was one when the script began, and has parted in the load, is told, and so is a
tensor or an array of two such objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from safeckpt.state.component import Captured, Component
from safeckpt.state.tree import clusters_of, join, tensors_in
from safeckpt.system.tensor_kind import is_plain, span_of

__all__ = ["ALIASES", "Aliases", "find_aliases"]

ALIASES = "aliases"  # the key of a component's record

Place = tuple[Any, ...]  # the name of a component, and the keys from there on

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_ENTERED = (dict, list, tuple, deque)
_OWN_CODE = ("stateful", "loader")  # kinds whose state is of any form


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
        place: The place; in a plain dict, where one of the two is.
        origin: The other one.
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
    kind: str  # of its component

    @property
    def rank(self) -> int:
        """Who stays where several hold one object: what is lower."""
        return ("module", "optimizer", *_OWN_CODE, "counters").index(self.kind)


def find_aliases(components: Mapping[str, Component], state_of: Callable[[str], Any]) -> list[Alias]:
    """Return the places whose object, or whose memory, is in another place as well.

    What modules alone share are ties, what one object holds twice is its own affair, and containers that only objects
    with a state of their own share, such as a configuration, are mostly never changed: none of these is among them.

    Args:
        components: All of them.
        state_of: Gives the state of one that is no plain dict.

    Cost:
        One walk over the plain dicts and the states of objects; where tensors are in them, a look at the address of
        each tensor of the modules and optimizers.
    """
    held = [
        _Holder(place, obj, component.kind)
        for component in components.values()
        if component.kind in ("counters", *_OWN_CODE)
        for place, obj in _places_in(component, state_of)
    ]
    tensors = [holder for holder in held if isinstance(holder.obj, torch.Tensor) and is_plain(holder.obj)]
    by_memory = {id(holder) for holder in tensors}
    found = _same_objects([holder for holder in held if id(holder) not in by_memory])
    tensors += _options_of_optimizers(components, state_of)
    if tensors:
        found += _same_memory([*_in_storages_of(tensors, components, state_of), *tensors])
    return found


def _places_in(component: Component, state_of: Callable[[str], Any]) -> Iterator[tuple[Place, Any]]:
    if component.kind == "counters":
        yield from _places((component.name,), component.obj, set())
        return
    known: set[Any] = set()
    for place, obj in _places((component.name,), state_of(component.name), set()):
        if len(place) > 1 and (one := _identity(obj)) not in known:
            known.add(one)
            yield place, obj


def _places(place: Place, value: Any, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    """Yield (place, object) of everything that can be changed; what is met again is not entered again.

    Args:
        place: The place of `value`.
        value: The object.
        seen: What was met.
    """
    yield place, value
    if id(value) in seen or not isinstance(value, _ENTERED):
        return
    seen.add(id(value))
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
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
        # The root of a component has to stay.
        origin = min(group, key=lambda holder: (len(holder.place) > 1, holder.rank))
        found += [Alias(holder.place, origin.place) for holder in group if _is_alias(holder, origin)]
    return found


def _is_alias(holder: _Holder, origin: _Holder) -> bool:
    """Return whether it is noted: in a dict, or numbers in two components of which not both are modules."""
    is_apart = holder.place[0] != origin.place[0] and {holder.kind, origin.kind} != {"module"}
    is_numbers = isinstance(holder.obj, torch.Tensor | np.ndarray)
    return holder is not origin and (holder.kind == "counters" or (is_apart and is_numbers))


def _identity(obj: Any) -> Any:
    if isinstance(obj, np.ndarray) and obj.nbytes:
        return obj.__array_interface__["data"][0], obj.dtype.str, obj.shape, obj.strides
    if isinstance(obj, torch.Tensor) and is_plain(obj) and obj.numel():
        return obj.data_ptr(), obj.dtype, obj.size(), obj.stride()
    return id(obj)


def _options_of_optimizers(components: Mapping[str, Component], state_of: Callable[[str], Any]) -> list[_Holder]:
    """Return the tensors among the options, such as a learning rate that two optimizers share."""
    return [
        _Holder((name, *place), obj, "optimizer")
        for name, component in components.items()
        if component.kind == "optimizer" and isinstance(state := state_of(name), dict)
        for place, obj in _places(("param_groups",), state.get("param_groups"), set())
        if isinstance(obj, torch.Tensor) and is_plain(obj)
    ]


def _in_storages_of(
    tensors: Collection[_Holder], components: Mapping[str, Component], state_of: Callable[[str], Any]
) -> Iterator[_Holder]:
    """Yield the tensors of modules, and the moments of optimizers, that share a storage with one of these."""
    storages = {holder.obj.untyped_storage().data_ptr() for holder in tensors}

    def is_one(tensor: Any) -> bool:
        plain = isinstance(tensor, torch.Tensor) and is_plain(tensor)
        return plain and tensor.untyped_storage().data_ptr() in storages

    for name, component in components.items():
        if component.kind in ("module", "optimizer"):
            state = state_of(name)
            path, tree = (("state",), state.get("state")) if component.kind == "optimizer" else ((), state)
            if any(map(is_one, tensors_in(tree))):  # nearly never: the names of all would take ten times as long
                found = _places((name, *path), tree, set())
                yield from (_Holder(place, tensor, component.kind) for place, tensor in found if is_one(tensor))


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
        if whole:
            origin = min(whole, key=lambda holder: (holder.rank, not holder.obj.requires_grad))
            found += [_alias(holder, origin) for holder in members if _is_alias(holder, origin)]
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
    that of the other place. Afterwards `unite` makes one what was one, where one of the places is in a plain dict.

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
        self._live_states: dict[str, Any] = {}
        concerned = {end[0] for alias in saved for end in alias[:2]}
        # A loader starts its workers to say where it is, and an optimizer's own state_dict may make its state.
        asked = {
            name: one
            for name, one in self._components.items()
            if one.kind not in ("loader", "optimizer") or name in concerned
        }
        live = find_aliases(asked, self._state_of)
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
        self._was_one: set[Alias] = set()  # of the checkpoint's, before the objects are filled

    def check(self) -> list[str]:
        """Return what keeps the places of the checkpoint from being made one, one sentence each."""
        ends = [end for alias in self._saved for end in alias[:2] if not self._is_saved(end)]
        found = [f"{_name_of(end)}: the checkpoint says that it is in two places, and does not hold it" for end in ends]
        for alias in self._saved if not found else ():
            both = [self._live_at(end) for end in alias[:2]]
            if all(map(_is_trained, both)) and not _is_same(*both):
                found.append(f"{_and(alias)}: one tensor in the checkpoint, separate tensors now")
        tied = [
            alias for alias in self._only_live if self._is_free(alias.place) and _is_trained(self._live_at(alias.place))
        ]
        self._live_states.clear()
        return found + [f"{_and(alias)}: separate tensors in the checkpoint, one tensor now" for alias in tied]

    def notices(self) -> list[str]:
        """Return which places will hold an object of their own, one sentence each."""
        return [
            f"{_name_of(alias.place)}: it was {_name_of(alias.origin)} in the run that saved, which is not restored"
            for alias in self._parted
        ]

    def let_go(self) -> None:
        """Empty the places that share an object now, and did not in the run that saved."""
        self._was_one = set(filter(self._is_one, self._saved))
        for alias in sorted(self._only_live, key=lambda alias: -len(alias.place)):  # what is inside first
            if self._is_free(alias.place):
                self._displace(alias.place, None)

    def take_back(self) -> None:
        """Undo what was done, where the objects are given the state from before."""
        while self._displaced:
            place, obj = self._displaced.pop()
            _put_at(place, self._components[place[0]].obj, obj)

    def _displace(self, place: Place, obj: Any) -> None:
        self._displaced.append((place, self._live_at(place)))
        _put_at(place, self._components[place[0]].obj, obj)

    def unite(self) -> tuple[list[str], list[str]]:
        """Put one object into the places that had one.

        Returns:
            A sentence for each place of a dict whose object is laid out otherwise now; and one for all that other
            components share, or share no longer, unlike in the run that saved.
        """
        self._live_states.clear()
        changed, parted = [], []
        for alias in self._saved:
            if self._is_one(alias):
                continue
            value = self._value_of(alias)
            is_filled = self._components[alias.origin[0]].kind in ("module", "counters")
            # The script may hold what is in its dict under another name, and goes on with that.
            keeps_own = not self._is_free(alias.place) or (not is_filled and alias in self._was_one)
            if keeps_own or not (is_filled or _is_equal(value, self._live_at(alias.place))):
                parted.append(self._describe_parted(alias))
            elif value is None:
                changed.append(
                    f"{_name_of(alias.place)}: it was a part of {_name_of(alias.origin)} in the run that saved, whose "
                    "memory is laid out differently now"
                )
            else:
                self._displace(alias.place, value)
        joined = [alias for alias in self._only_live if not self._is_free(alias.place) and self._is_one(alias)]
        parted += [
            f"{_and(alias)}: separate in the run that saved, and one now, so the state of one has overwritten that of "
            "the other. Make them separate before the restore"
            for alias in joined
        ]
        self._displaced.clear()
        self._live_states.clear()
        return changed, parted

    def _describe_parted(self, alias: Alias) -> str:
        own_code = {end[0] for end in alias[:2] if self._components[end[0]].kind in _OWN_CODE}
        in_place = f"Let load_state_dict of {' and '.join(sorted(own_code))} fill in place what it holds, or let"
        return (
            f"{_and(alias)}: one object in the run that saved, and two now, so that a change of one does not reach the "
            f"other. {in_place if own_code else 'Let'} one component alone hold it, and give it to the other after the "
            "restore"
        )

    def _is_free(self, place: Place) -> bool:
        """Return whether any object can be put there."""
        return self._components[place[0]].kind == "counters"

    def _is_one(self, alias: Alias) -> bool:
        value = self._value_of(alias)
        return value is not None and _is_same(value, self._live_at(alias.place))

    def _value_of(self, alias: Alias) -> Any:
        trained = _name_of(alias.place) in self._trained
        return _value_of(alias, self._live_at(alias.origin), is_trained=trained)

    def _is_saved(self, place: Place) -> bool:
        try:
            _object_at(place, self._states[place[0]])
        except (LookupError, TypeError):
            return False
        return True

    def _live_at(self, place: Place) -> Any:
        """Return the live object at a place; None where there is no such place."""
        component = self._components[place[0]]
        if component.kind == "module" and (parameter := component.parameter_names().get(_name_of(place))) is not None:
            return parameter
        try:
            return _object_at(place, self._tree_of(place))
        except (LookupError, TypeError):
            return None

    def _tree_of(self, place: Place) -> Any:
        component = self._components[place[0]]
        return component.obj if component.kind == "counters" else self._state_of(component.name)

    def _state_of(self, name: str) -> Any:
        if name not in self._live_states:
            self._live_states[name] = self._components[name].capture().state
        return self._live_states[name]


def _alias_of_record(record: list[Any]) -> Alias:
    place, origin, view = record
    made = None if view is None else _View(view[0], *map(tuple, view[1:]))
    return Alias(tuple(place), tuple(origin), made)


def _is_fresh(place: Place, fresh: Mapping[str, Collection[str]]) -> bool:
    return len(place) > 1 and str(place[1]) in fresh.get(place[0], ())


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two places hold one object already, or tensors or arrays of the same memory."""
    return one is other or bool(_identity(one) == _identity(other))


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two tensors or arrays have the same values; anything else is taken for equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.size() == other.size() and bool(torch.equal(one, other.to(one.device)))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other)


def _and(alias: Alias) -> str:
    return " and ".join(sorted((_name_of(alias.place), _name_of(alias.origin))))


def _name_of(place: Place) -> str:
    """Return what messages call a place."""
    name = ""
    for key in place:
        name = join(name, key)
    return name


def _object_at(place: Place, tree: Any) -> Any:
    """Return the object at a place in the tree of its component.

    Raises:
        LookupError, TypeError: There is no such place.
    """
    for key in place[1:]:
        tree = tree[key]
    return tree


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
