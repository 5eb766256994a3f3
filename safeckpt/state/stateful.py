"""Components with a `state_dict` of their own making, and plain dicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from safeckpt.state.component import Captured, Component, Order, class_name
from safeckpt.state.guard import Guard
from safeckpt.state.options import overruled
from safeckpt.state.tree import copy_tree, detached, join, named_tensors

__all__ = ["CountersComponent", "LoaderComponent", "ScalerComponent", "StatefulComponent"]


class StatefulComponent(Component):
    """Any object with `state_dict` and `load_state_dict`; with `check_state` it can refuse a state by itself."""

    kind = "stateful"

    def check(self, captured: Captured) -> list[str]:
        """Ask the object itself, when it can tell, whether the state fits."""
        found = super().check(captured)
        if not found and hasattr(self.obj, "check_state"):
            found = [f"{self.name}: {difference}" for difference in self.obj.check_state(captured.state)]
        return found

    def apply(self, captured: Captured) -> None:
        """Hand a copy of the state to `load_state_dict`."""
        self.obj.load_state_dict(copy_tree(captured.state))


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

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these options."""
        live = _scaler_options(self.obj.state_dict())
        kept = {key: live[key] for key in hyperparameters}
        first = {**captured.record["first"], **kept}
        return Captured({**captured.state, **kept}, {**captured.record, "first": first})

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the scale, which is a plain float in the state."""
        scale = captured.state.get("scale")
        if scale is not None:
            yield join(self.name, "scale"), torch.as_tensor(scale, dtype=torch.float64)


def _scaler_options(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval") if key in state}


class LoaderComponent(StatefulComponent):
    """A data loader that knows its position."""

    kind = "loader"
    order = Order.LOADER

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: a position holds no weights."""
        yield from ()


class CountersComponent(Component):
    """A plain dict, restored in place: whoever holds it, or a tensor in it, sees the restored values."""

    kind = "counters"
    loads_by_own_code = False

    def __init__(self, name: str, obj: dict[Any, Any]) -> None:
        super().__init__(name, obj)
        self._expected = set(obj)  # what the script puts in it; the rest is added while training

    def parameter_names(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are trained, such as a learned temperature that belongs to no module."""
        return {name: tensor for name, tensor in named_tensors(self.obj, self.name) if tensor.requires_grad}

    def capture(self) -> Captured:
        """Return the dict itself."""
        return Captured(detached(self.obj), {"trained": list(self.parameter_names())})

    def check(self, captured: Captured) -> list[str]:
        """Refuse a file without an entry that the script has, or with another form of something that is trained.

        Entries added while training come back, or go when the file is from before.
        """
        found = []
        for key, live in self.obj.items():
            if key not in captured.state and key in self._expected:
                found.append(f"{self.name}: entry {key!r} is not in the checkpoint")
            elif isinstance(live, torch.Tensor) and live.requires_grad and not _fits(live, captured.state.get(key)):
                before, now = _kind_of(captured.state.get(key)), _kind_of(live)
                found.append(f"{self.name}: entry {key!r}, which is trained, was {before}, now it is {now}")
        return found

    def apply(self, captured: Captured) -> None:
        """Replace the contents, those of inner dicts, lists, sets and tensors in place as well."""
        _fill(self.obj, copy_tree(captured.state))

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is trained, nothing else: the best loss so far starts at infinity."""
        trained = captured.record["trained"]
        yield from ((name, tensor) for name, tensor in named_tensors(captured.state, self.name) if name in trained)


def _fits(live: torch.Tensor, saved: Any) -> bool:
    if not isinstance(saved, torch.Tensor):
        return False
    return saved.size() == live.size() and saved.dtype == live.dtype and saved.layout == live.layout


def _kind_of(value: Any) -> str:
    return f"{value.dtype} {list(value.size())}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _fill(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        old = live.get(key)
        if type(old) is dict and type(value) is dict:
            _fill(old, value)
        elif type(old) is list and type(value) is list:
            old[:] = value
        elif type(old) is set and type(value) is set:
            old.clear()
            old.update(value)
        elif isinstance(old, torch.Tensor) and _fits(old, value):
            with torch.no_grad():
                old.copy_(value)
        else:
            live[key] = value
