"""What every kind of component has in common: how it is captured, checked and given its state back.

One class per kind, each in the module named after it, capture and restore side by side. Restoring has two
halves. `check` reads both sides, changes nothing and returns every difference as a sentence; `apply` is called
only after the checks of all components came back empty, and is given the same state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from safeckpt.state.guard import Guard
from safeckpt.state.tree import copy_tree, join, named_tensors

__all__ = ["Captured", "Component", "Order", "StatefulComponent", "class_name"]


class Order:
    """Turn of each kind when state is applied: a scheduler's load may touch the lr, the optimizer has the last word."""

    MODULE = 0
    STATEFUL = 1
    SCHEDULER = 2
    OPTIMIZER = 3
    LOADER = 4


@dataclass(frozen=True)
class Captured:
    """State of one component.

    Attributes:
        state: What the user finds under the component's name in the file, as plain torch would have it.
        record: What safeckpt needs besides to put it back exactly (flags, names, classes); plain values.
    """

    state: Any
    record: dict[str, Any] = field(default_factory=dict)


def class_name(obj: object) -> str:
    """Return the qualified name of the object's class, without its module: `__main__` changes between scripts."""
    return type(obj).__qualname__


class Component:
    """A named live object. Subclasses say how its kind is captured, checked and applied.

    Args:
        name: Name under which the user registered it.
        obj: The live object.
    """

    kind: ClassVar[str]
    order: ClassVar[int] = Order.STATEFUL

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.obj = obj

    def capture(self) -> Captured:
        """Return the state; tensors may alias the live ones. Changes nothing, draws no random number."""
        raise NotImplementedError

    def check(self, captured: Captured) -> list[str]:
        """Return what keeps `captured` from being applied, one sentence each. Changes nothing."""
        if captured.record.get("class") != class_name(self.obj):
            return [
                f"{self.name}: saved from a {captured.record.get('class')}, the live one is a {class_name(self.obj)}"
            ]
        return []

    def apply(self, captured: Captured) -> None:
        """Put `captured` into the live object, which keeps no alias of it."""
        raise NotImplementedError

    def replaced(self, captured: Captured) -> list[str]:
        """Return the hyper-parameters in which file and live object differ: `name: live value -> saved value`."""
        return []

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these hyper-parameters.

        Raises:
            KeyError: One of them is not a hyper-parameter of this component.
        """
        for hyperparameter in hyperparameters:
            raise KeyError(hyperparameter)
        return captured

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of everything in `captured` that has to be finite."""
        yield from named_tensors(captured.state, self.name)

    def parameter_names(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters this component owns, by qualified name including its own; empty for most kinds."""
        return {}


class StatefulComponent(Component):
    """Any object with `state_dict` and `load_state_dict`, a gradient scaler among them."""

    kind = "stateful"

    def capture(self) -> Captured:
        """Return what `state_dict()` gives."""
        state = self.obj.state_dict()
        return Captured(state, {"class": class_name(self.obj)})

    def apply(self, captured: Captured) -> None:
        """Hand a copy of the state to `load_state_dict`."""
        self.obj.load_state_dict(copy_tree(captured.state))


class ScalerComponent(StatefulComponent):
    """A `torch.amp.GradScaler`: a disabled one has no state, so both sides have to agree."""

    kind = "scaler"

    def check(self, captured: Captured) -> list[str]:
        """Refuse a scaler that is enabled on one side only: its scale would be lost, or made up."""
        saved, live = bool(captured.state), bool(self.obj.is_enabled())
        if saved != live:
            words = {True: "enabled", False: "disabled"}
            return [f"{self.name}: the saved scaler is {words[saved]}, the live one is {words[live]}"]
        return super().check(captured)

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the scale, which is a plain float in the state."""
        scale = captured.state.get("scale")
        if scale is not None:
            yield join(self.name, "scale"), torch.as_tensor(scale, dtype=torch.float64)


class LoaderComponent(StatefulComponent):
    """A data loader that knows its position."""

    kind = "loader"
    order = Order.LOADER

    def check(self, captured: Captured) -> list[str]:
        """Ask the loader itself, when it can tell, whether the position fits its data."""
        found = super().check(captured)
        if not found and hasattr(self.obj, "check_state"):
            found = [f"{self.name}: {difference}" for difference in self.obj.check_state(captured.state)]
        return found

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: a position holds no weights."""
        yield from ()


class CountersComponent(Component):
    """A plain dict of plain values, restored in place: whoever holds it sees the restored values."""

    kind = "counters"

    def capture(self) -> Captured:
        """Return the dict itself."""
        return Captured(self.obj)

    def check(self, captured: Captured) -> list[str]:
        """Refuse a file without an entry that the live dict has; entries added while training come back."""
        return [f"{self.name}: entry {key!r} is not in the checkpoint" for key in self.obj if key not in captured.state]

    def apply(self, captured: Captured) -> None:
        """Replace the contents, inner dicts and lists in place as well."""
        _fill(self.obj, copy_tree(captured.state))

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the best loss so far starts at infinity."""
        yield from ()


def _fill(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [key for key in live if key not in saved]:
        del live[key]
    for key, value in saved.items():
        old = live.get(key)
        if type(old) is dict and type(value) is dict:
            _fill(old, value)
        elif type(old) is list and type(value) is list:
            old[:] = value
        else:
            live[key] = value
