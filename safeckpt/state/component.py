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

from safeckpt.errors import SaveError
from safeckpt.state.guard import Guard, guarded_tensors
from safeckpt.state.transfer import Transfer
from safeckpt.state.tree import detached

__all__ = ["Captured", "Component", "Order", "class_name", "has_attribute", "is_library_code"]


class Order:
    """Order in which kinds are applied. A scheduler's load may touch the lr, so optimizers come after schedulers."""

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
        transfer: How the values of the state's tensors are read; a file's need not go through its mapping.
        fault: Why no restore could give it back; None where one can. A save raises it, and so does the building of a
            manager; a restore and a rollback do not, since they may let go of what is live.
    """

    state: Any
    record: dict[str, Any] = field(default_factory=dict)
    transfer: Transfer = field(default_factory=Transfer, compare=False)
    fault: SaveError | None = field(default=None, compare=False)

    def savable(self) -> Captured:
        """Return it.

        Raises:
            SaveError: Its fault.
        """
        if self.fault is not None:
            raise self.fault
        return self


def has_attribute(obj: object, name: str) -> bool:
    """Return whether an object has an attribute; one that answers to any name (a metric of Ignite, a mock) has not."""
    return hasattr(obj, name) and not hasattr(obj, f"{name}_of_nobody")


def class_name(obj: object) -> str:
    """Return the qualified name of the object's class, without its module: `__main__` changes between scripts."""
    kind = type(obj)
    if kind.__bases__[0].__name__ == "FSDPModule" and len(kind.__bases__) > 1:
        kind = kind.__bases__[1]  # fully_shard() makes a class of its own for every module's
    return kind.__qualname__


def is_library_code(kind: type, method: str) -> bool:
    """Return whether a method of a class is torch's, NumPy's or safeckpt's."""
    module = getattr(getattr(kind, method, None), "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "numpy", "safeckpt")


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
        """Return the state, detached; tensors may alias the live ones. Changes nothing.

        Random numbers that a user's `state_dict` draws are put back by the caller.
        """
        return Captured(detached(self.obj.state_dict()), {"class": class_name(self.obj)})

    def state(self) -> Any:
        """Return the state alone, where nothing of what `capture` puts beside it is needed.

        Raises:
            SaveError: It cannot be saved.
        """
        return self.capture().savable().state

    def check(self, captured: Captured) -> list[str]:
        """Return what keeps `captured` from being applied, one sentence each. Changes nothing."""
        difference = self._class_difference(captured)
        return [] if difference is None or self._was_renamed(captured) else [difference]

    def notices(self, captured: Captured) -> list[str]:
        """Return differences that do not keep `captured` from being applied, one sentence each."""
        difference = self._class_difference(captured)
        return [difference] if difference is not None and self._was_renamed(captured) else []

    def _class_difference(self, captured: Captured) -> str | None:
        saved, live = captured.record.get("class"), class_name(self.obj)
        return None if saved == live else f"{self.name}: saved class {saved}, live class {live}"

    def _was_renamed(self, captured: Captured) -> bool:
        """Return whether the two classes may be one of the user's that has a new name."""
        return False

    def apply(self, captured: Captured) -> None:
        """Put `captured` into the live object, which keeps no alias of it."""
        raise NotImplementedError

    @property
    def loads_by_own_code(self) -> bool:
        """Whether code that is neither torch's nor safeckpt's takes part in `apply`, and may fail half-way."""
        return not is_library_code(type(self.obj), "load_state_dict")

    def replaced(self, captured: Captured) -> list[str]:
        """Return the hyper-parameters in which file and script disagree: `name: live value -> saved value`."""
        return []

    def hyperparameters(self, captured: Captured) -> Collection[str]:
        """Return the names that `keep` takes; none for most kinds."""
        return ()

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these hyper-parameters.

        Raises:
            KeyError: One of them is not a hyper-parameter of this component.
        """
        for hyperparameter in hyperparameters:
            raise KeyError(hyperparameter)
        return captured

    def keep_entries(self, captured: Captured, entries: Collection[str]) -> Captured:
        """Return `captured` with the live values of some entries of the state.

        Raises:
            KeyError: An entry is not there, or the kind has none that stand for themselves.
        """
        for entry in entries:
            raise KeyError(entry)
        return captured

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of everything in `captured` that has to be finite."""
        yield from guarded_tensors(captured.state, self.name)

    def parameter_names(self) -> dict[str, torch.Tensor]:
        """Return the parameters this component owns, by qualified name including its own; empty for most kinds."""
        return {}
