"""Learning-rate schedulers: their own state, and a report of constructor arguments that the file overrules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from safeckpt.state.component import Captured, Component, Order
from safeckpt.state.guard import Guard, nonfinite_floats
from safeckpt.state.options import overruled, plain, same
from safeckpt.state.tree import copy_tree, detached, join
from safeckpt.system.torch_private import (
    LAST_RATES,
    SCALE_FUNCTION,
    SCHEDULE_PHASES,
    SCHEDULERS_INSIDE,
    closed_form_rates,
)

__all__ = ["SchedulerComponent"]

# Arguments that say where the schedule stands or whom it drives, not how it runs.
_NOT_OPTIONS = frozenset({"optimizer", "optimizers", "last_epoch", "schedulers", "verbose"})
# What constructors of torch compute from arguments that they do not keep.
_COMPUTED = frozenset({"base_lrs", "total_size", "step_ratio", SCHEDULE_PHASES})
_COMPUTED_FROM = {"total_steps": (SCHEDULE_PHASES,)}
_FUNCTIONS = frozenset({"lr_lambdas", SCALE_FUNCTION})  # of which a state holds a part, or none
_RATES = frozenset({"base_lrs", LAST_RATES})


class SchedulerComponent(Component):
    """A `torch.optim.lr_scheduler.LRScheduler`, composed ones included."""

    kind = "scheduler"
    order = Order.SCHEDULER

    def __init__(self, name: str, obj: Any) -> None:
        super().__init__(name, obj)
        self._first = plain(_options(obj, obj.state_dict()))

    def capture(self) -> Captured:
        """Return the scheduler's `state_dict`."""
        groups = getattr(getattr(self.obj, "optimizer", None), "param_groups", ())
        record = {"class": _class(self.obj), "groups": len(groups), "first": self._first}
        return Captured(detached(self.obj.state_dict()), record)

    def notices(self, captured: Captured) -> list[str]:
        """Return whether kept arguments leave a rate that belongs to the saved ones; another class is no notice."""
        if captured.record.get("rates", ()) is not None:
            return []
        text = "computes each rate from the one before, so the rate now is still that of the saved arguments"
        cure = "set param_groups[i]['lr'] after the restore if it should be another"
        return [f"{self.name}: a {captured.record['class']} {text}; {cure}"]

    def check(self, captured: Captured) -> list[str]:
        """Compare the classes, of composed schedulers too, and the number of parameter groups."""
        saved, live = captured.record, self.capture().record
        found = []
        if saved["class"] != live["class"]:
            found.append(f"{self.name}: saved class {saved['class']}, live class {live['class']}")
        if saved["groups"] != live["groups"]:
            found.append(
                f"{self.name}: saved for {saved['groups']} parameter group(s), the live optimizer has {live['groups']}"
            )
        return found

    def apply(self, captured: Captured) -> None:
        """Load the state; no step is made."""
        self.obj.load_state_dict(copy_tree(captured.state))
        self._first = copy_tree(captured.record["first"])

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield floats that are NaN, and rates that are infinite; ReduceLROnPlateau's best starts at infinity."""
        yield from nonfinite_floats(captured.state, self.name, infinite=False)
        for key in _RATES & captured.state.keys():
            floats = nonfinite_floats(captured.state[key], join(self.name, key))
            yield from ((name, value) for name, value in floats if not value.isnan())

    def replaced(self, captured: Captured) -> list[str]:
        """Return the constructor arguments in which file and script disagree, of composed schedulers too."""
        live, saved = (plain(_options(self.obj, state)) for state in (self.obj.state_dict(), captured.state))
        return [f"{self.name}.{key}: {change}" for key, change in overruled(live, saved, captured.record["first"])]

    def hyperparameters(self, captured: Captured) -> Collection[str]:
        """Return the constructor arguments, of composed schedulers too."""
        return list(_options(self.obj, self.obj.state_dict()))

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these constructor arguments and what follows from them."""
        live = self.obj.state_dict()
        options = _options(self.obj, live)
        state, first = copy_tree(captured.state), dict(captured.record["first"])
        for name in hyperparameters:
            if name not in options:
                raise KeyError(name)
            first[name] = copy_tree(options[name])
            path, _, key = name.rpartition(".")
            source, target = _value(live, path), _value(state, path)
            for entry in (key, *_COMPUTED_FROM.get(key, ())):
                if entry in source:
                    target[entry] = copy_tree(source[entry])
        record = {**captured.record, "first": first}
        # What Plateau is given decides about later rates only.
        if not isinstance(self.obj, ReduceLROnPlateau) and any(
            not same(options[name], _value(captured.state, name)) for name in hyperparameters
        ):
            record["rates"] = self._rates(state)
            if record["rates"] is not None:
                state[LAST_RATES] = copy_tree(record["rates"])
        return Captured(state, record)

    def _rates(self, state: Mapping[str, Any]) -> list[Any] | None:
        """Return the rates of a schedule with this state at its step; None where they follow from earlier ones."""
        scheduler = copy.copy(self.obj)
        vars(scheduler).update({key: value for key, value in state.items() if key not in _FUNCTIONS})
        return closed_form_rates(scheduler)


def _value(state: Any, path: str) -> Any:
    """Return what a dotted name stands for in a state."""
    for part in path.split(".") if path else ():
        state = state[int(part) if part.isdigit() else part]
    return state


def _class(scheduler: Any) -> str:
    inner = getattr(scheduler, SCHEDULERS_INSIDE, ())
    name = type(scheduler).__qualname__
    return f"{name}({', '.join(map(_class, inner))})" if inner else name


def _options(scheduler: Any, state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return what a scheduler was constructed with, as far as its state shows it, by dotted name."""
    if not isinstance(state, Mapping):
        return {}
    arguments = inspect.signature(type(scheduler)).parameters.keys() - _NOT_OPTIONS
    # An argument is kept under its own name, with an underscore before it, or as a list over the groups.
    found = {
        join(path, key): value
        for key, value in state.items()
        if key in _COMPUTED or key.strip("_") in arguments or key.strip("_").removesuffix("s") in arguments
    }
    for index, inner in enumerate(getattr(scheduler, SCHEDULERS_INSIDE, ())):
        states = state.get(SCHEDULERS_INSIDE, ())
        if index < len(states):
            found |= _options(inner, states[index], join(path, f"{SCHEDULERS_INSIDE}.{index}"))
    return found
