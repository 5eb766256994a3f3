"""Components with a `state_dict` of their own making, and plain dicts."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from safeckpt.state.component import Captured, Component, Order, class_name, has_attribute
from safeckpt.state.containers import Members, from_plain, members_in, to_plain, unknown_members, uses_members
from safeckpt.state.fill import cannot_fill, fill_special, is_special
from safeckpt.state.guard import Guard, guarded_tensors, nonfinite_floats
from safeckpt.state.options import overruled
from safeckpt.state.tree import copy_tree, detached, named_leaves, named_tensors

__all__ = ["CountersComponent", "LoaderComponent", "ScalerComponent", "StatefulComponent"]


class StatefulComponent(Component):
    """Any object with `state_dict` and `load_state_dict`; with `check_state` it can refuse a state by itself."""

    kind = "stateful"

    def capture(self) -> Captured:
        """Return the object's `state_dict`, in containers that a file can hold."""
        return _captured(self.obj.state_dict(), self.name, {"class": class_name(self.obj)})

    def check(self, captured: Captured) -> list[str]:
        """Ask the object itself, when it can tell, whether the state fits."""
        found = super().check(captured)
        members = self._members(captured)
        if not found:
            found = _unknown_members(captured, members, self.name)
        if not found and has_attribute(self.obj, "check_state"):
            found = [f"{self.name}: {difference}" for difference in self.obj.check_state(_restored(captured, members))]
        return found

    def apply(self, captured: Captured) -> None:
        """Hand a copy of the state to `load_state_dict`."""
        self.obj.load_state_dict(_restored(captured, self._members(captured)))

    def _members(self, captured: Captured) -> Members:
        return members_in(self.obj.state_dict()) if uses_members(_notes_of(captured)) else {}

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors, and plain floats that are NaN: the best loss so far may be infinite."""
        yield from super().guarded(captured, guard)
        yield from nonfinite_floats(captured.state, self.name, infinite=False)


def _captured(state: Any, name: str, record: dict[str, Any]) -> Captured:
    plain = to_plain(state, name)
    noted = {**record, "containers": plain.notes} if plain.notes else record
    return Captured(detached(plain.tree), noted, fault=plain.fault)


def _notes_of(captured: Captured) -> list[list[Any]]:
    notes: list[list[Any]] = captured.record.get("containers", [])
    return notes


def _unknown_members(captured: Captured, members: Members, name: str) -> list[str]:
    return list(unknown_members(captured.state, _notes_of(captured), members, name))


def _restored(captured: Captured, members: Members) -> Any:
    return from_plain(copy_tree(captured.state), _notes_of(captured), members)


class ScalerComponent(StatefulComponent):
    """A `torch.amp.GradScaler`: a disabled one has no state, so both sides have to agree."""

    kind = "scaler"

    def __init__(self, name: str, obj: Any) -> None:
        super().__init__(name, obj)
        self._first = _scaler_options(obj.state_dict())

    def capture(self) -> Captured:
        """Return the scaler's `state_dict`, empty when it is disabled."""
        return Captured(self.obj.state_dict(), {"class": class_name(self.obj), "first": self._first})

    def check(self, captured: Captured) -> list[str]:
        """Refuse a scaler that is enabled on one side only: its scale would be lost, or made up."""
        saved, live = bool(captured.state), bool(self.obj.is_enabled())
        if saved != live:
            words = {True: "enabled", False: "disabled"}
            return [f"{self.name}: the saved scaler is {words[saved]}, the live one is {words[live]}"]
        return super().check(captured)

    def apply(self, captured: Captured) -> None:
        """Set scale, growth and counter; a disabled scaler takes nothing."""
        super().apply(captured)
        self._first = dict(captured.record["first"])

    def replaced(self, captured: Captured) -> list[str]:
        """Return how the scale grows and shrinks, where file and script disagree."""
        live, saved = _scaler_options(self.obj.state_dict()), _scaler_options(captured.state)
        return [f"{self.name}.{key}: {change}" for key, change in overruled(live, saved, captured.record["first"])]

    def hyperparameters(self, captured: Captured) -> Collection[str]:
        """Return how the scale grows and shrinks."""
        return list(_scaler_options(self.obj.state_dict()))

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these options."""
        live = _scaler_options(self.obj.state_dict())
        kept = {key: live[key] for key in hyperparameters}
        first = {**captured.record["first"], **kept}
        return Captured({**captured.state, **kept}, {**captured.record, "first": first})

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the plain floats that are not finite: the scale, and the factors by which it moves."""
        yield from nonfinite_floats(captured.state, self.name)


def _scaler_options(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval") if key in state}


class LoaderComponent(StatefulComponent):
    """A data loader that knows its position."""

    kind = "loader"
    order = Order.LOADER


class CountersComponent(Component):
    """A plain dict, restored in place: whoever holds it, or a tensor in it, sees the restored values."""

    kind = "counters"
    loads_by_own_code = False

    def __init__(self, name: str, obj: dict[Any, Any]) -> None:
        super().__init__(name, obj)
        self._members: Members = {}  # of the state that was checked last: places may be empty when it is applied
        self._expected = set(obj)  # what the script puts in it; the rest is added while training

    def parameter_names(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are trained, such as a learned temperature that belongs to no module."""
        tensors = named_tensors(self.obj, self.name)
        return {name: tensor for name, tensor in tensors if tensor.requires_grad and tensor.is_leaf}

    def capture(self) -> Captured:
        """Return the dict itself, in containers that a file can hold."""
        return _captured(self.obj, self.name, {"trained": list(self.parameter_names())})

    def check(self, captured: Captured) -> list[str]:
        """Refuse a file without an entry that the script has, or with another form of something that is trained.

        Entries added while training come back, or go when the file is from before.
        """
        missing = [key for key in self.obj if key not in captured.state and key in self._expected]
        found = [f"{self.name}: entry {key!r} is not in the checkpoint" for key in missing]
        saved = dict(named_leaves(captured.state, self.name, whole=(set, frozenset), empty=True))
        for name, live in self.parameter_names().items():
            value = saved.get(name)
            keys = name.removeprefix(f"{self.name}.")
            if not _fits(live, value) and not any(keys == str(key) for key in missing):
                before, now = _kind_of(value), _kind_of(live)
                found.append(f"{self.name}: entry {keys!r}, which is trained, was {before}, now it is {now}")
        self._members = members_in(self.obj)
        return found + _unknown_members(captured, self._members, self.name)

    def keep_entries(self, captured: Captured, entries: Collection[str]) -> Captured:
        """Return `captured` with the live values of some entries, which it may not have at all."""
        names = {str(key): key for key in self.obj}
        live = {names[entry]: self.obj[names[entry]] for entry in entries}
        own = to_plain(detached(live), self.name)
        notes = [*(note for note in _notes_of(captured) if not note[0] or note[0][0] not in live), *own.notes]
        record = {**captured.record, "containers": notes}
        return dataclasses.replace(captured, state={**captured.state, **own.tree}, record=record)

    def apply(self, captured: Captured) -> None:
        """Replace the contents in place, those of inner containers, tensors and arrays as well."""
        _filled(self.obj, _restored(captured, {**self._members, **members_in(self.obj)}))

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors; plain floats may be infinite or NaN, as a metric is before it is computed first."""
        yield from guarded_tensors(captured.state, self.name)


def _fits(live: torch.Tensor, saved: Any) -> bool:
    if not isinstance(saved, torch.Tensor):
        return False
    same = saved.size() == live.size() and saved.dtype == live.dtype and saved.layout == live.layout
    return same and not (is_special(live) and any(cannot_fill(live, saved)))


def _kind_of(value: Any) -> str:
    return f"{value.dtype} {list(value.size())}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _filled(live: Any, saved: Any) -> Any:
    """Return what takes the place of a live value: itself, with the saved contents, wherever that is possible."""
    if isinstance(live, torch.Tensor) and not live.is_leaf:
        return saved  # computed, such as a hidden state: its graph belongs to the step that made it
    if isinstance(live, torch.Tensor) and _fits(live, saved):
        with torch.no_grad():
            fill_special(live.detach(), saved) if is_special(live) else live.copy_(saved)
    elif isinstance(live, np.ndarray) and _is_same_form(live, saved):
        live[...] = saved
    elif isinstance(live, dict) and isinstance(saved, dict):
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, value in saved.items():
            live[key] = _filled(live[key], value) if key in live else value
    elif isinstance(live, list | deque) and type(saved) is type(live):
        items = [_filled(one, other) for one, other in zip(live, saved, strict=False)]
        items.extend(list(saved)[len(items) :])
        live.clear()
        live.extend(items)
    elif type(live) is tuple and type(saved) is tuple and len(live) == len(saved):
        parts = tuple(map(_filled, live, saved))
        return live if all(one is other for one, other in zip(parts, live, strict=True)) else parts
    elif type(live) is set and type(saved) is set:
        live.clear()
        live.update(saved)
    else:
        return saved
    return live


def _is_same_form(live: np.ndarray[Any, Any], saved: Any) -> bool:
    same = isinstance(saved, np.ndarray) and saved.shape == live.shape and saved.dtype == live.dtype
    return same and live.flags.writeable
