"""Learning-rate schedulers: their own state, and a report of constructor arguments that the file overrules."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from safeckpt.state.component import Captured, Component, Order
from safeckpt.state.guard import Guard
from safeckpt.state.tree import copy_tree

__all__ = ["SchedulerComponent"]

# Arguments that say where the schedule stands or whom it drives, not how it runs.
_NOT_OPTIONS = frozenset({"self", "optimizer", "last_epoch", "schedulers", "verbose"})


class SchedulerComponent(Component):
    """A `torch.optim.lr_scheduler.LRScheduler`, composed ones included."""

    kind = "scheduler"
    order = Order.SCHEDULER

    def capture(self) -> Captured:
        """Return the scheduler's `state_dict`."""
        groups = getattr(getattr(self.obj, "optimizer", None), "param_groups", ())
        return Captured(self.obj.state_dict(), {"class": _class(self.obj), "groups": len(groups)})

    def check(self, captured: Captured) -> list[str]:
        """Compare the classes, of composed schedulers too, and the number of parameter groups."""
        saved, live = captured.record, self.capture().record
        found = []
        if saved["class"] != live["class"]:
            found.append(f"{self.name}: saved from a {saved['class']}, the live one is a {live['class']}")
        if saved["groups"] != live["groups"]:
            found.append(
                f"{self.name}: saved for {saved['groups']} parameter group(s), the live optimizer has {live['groups']}"
            )
        return found

    def apply(self, captured: Captured) -> None:
        """Load the state; no step is made."""
        self.obj.load_state_dict(copy_tree(captured.state))

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield nothing: ReduceLROnPlateau's best starts at infinity."""
        yield from ()

    def replaced(self, captured: Captured) -> list[str]:
        """Return the constructor arguments that differ, of composed schedulers too."""
        live = self.capture().state
        return [f"{self.name}.{line}" for line in _differences(_options(self.obj), live, captured.state)]

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these constructor arguments."""
        live, options = self.obj.state_dict(), _options(self.obj)
        kept = dict(captured.state)
        for key in hyperparameters:
            if key not in options or key not in live:
                raise KeyError(key)
            kept[key] = copy_tree(live[key])
        return Captured(kept, captured.record)


def _class(scheduler: Any) -> str:
    inner = getattr(scheduler, "_schedulers", ())
    name = type(scheduler).__qualname__
    return f"{name}({', '.join(_class(one) for one in inner)})" if inner else name


def _options(scheduler: Any) -> frozenset[str]:
    return frozenset(inspect.signature(type(scheduler)).parameters) - _NOT_OPTIONS


def _differences(options: Collection[str], live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(options):
        if key in live and key in saved and not _same(live[key], saved[key]):
            yield f"{key}: {live[key]!r} -> {saved[key]!r}"


def _same(live: Any, saved: Any) -> bool:
    if isinstance(live, torch.Tensor) or isinstance(saved, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(live).cpu(), torch.as_tensor(saved).cpu()))
    return bool(live == saved)
