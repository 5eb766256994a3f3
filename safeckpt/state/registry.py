"""What an object is decides how it is captured: from the user's mapping to components, and what it leaves out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from safeckpt.state.component import (
    Component,
    CountersComponent,
    LoaderComponent,
    ScalerComponent,
    StatefulComponent,
    class_name,
)
from safeckpt.state.generators import GeneratorComponent
from safeckpt.state.module import ModuleComponent
from safeckpt.state.optimizer import OptimizerComponent
from safeckpt.state.scheduler import SchedulerComponent

__all__ = ["RESERVED_NAMES", "register", "uncaptured"]

RESERVED_NAMES = ("safeckpt", "rng")  # the library's own key in the file, and the process's streams in `only=`

_ACCEPTED = (
    "a module, an optimizer, a scheduler, a gradient scaler, a loader with state_dict, a generator (torch, NumPy or "
    "random.Random), any object with state_dict and load_state_dict, or a plain dict"
)


def register(components: Mapping[str, Any]) -> dict[str, Component]:
    """Return a component for each named object, in the order given.

    Raises:
        TypeError: `components` is no mapping, a name is no string, or an object is of no kind that can be captured.
        ValueError: There is no component, a name is empty, reserved or has a dot in it, or one object has two names.
    """
    if not isinstance(components, Mapping):
        raise TypeError(
            "components must be a mapping from name to object, for example {'model': model, 'optimizer': optimizer}; "
            f"got {type(components).__name__}"
        )
    if not components:
        raise ValueError("components is empty: there would be nothing to save. Give at least {'model': model}.")
    _check_names(components)
    modules = {name: ModuleComponent(name, obj) for name, obj in components.items() if isinstance(obj, nn.Module)}
    names: dict[int, list[str]] = {}
    for module in modules.values():
        for name, parameter in module.parameter_names().items():
            names.setdefault(id(parameter), []).append(name)
    driven = {id(optimizer) for obj in components.values() for optimizer in _driven_by(obj)}
    registered: dict[str, Component] = {}
    for name, obj in components.items():
        if isinstance(obj, Optimizer):
            registered[name] = OptimizerComponent(name, obj, names, scheduled=id(obj) in driven)
        else:
            registered[name] = modules.get(name) or _component(name, obj)
    return registered


def _check_names(components: Mapping[str, Any]) -> None:
    seen: dict[int, str] = {}
    for name, obj in components.items():
        if not isinstance(name, str):
            raise TypeError(f"component names must be strings; got {name!r}")
        if not name or name in RESERVED_NAMES or "." in name:
            raise ValueError(
                f"{name!r} cannot name a component: names are not empty, have no dot in them (tensor names are "
                f"'component.qualified.name') and are none of {', '.join(RESERVED_NAMES)}"
            )
        if id(obj) in seen:
            raise ValueError(f"{name!r} and {seen[id(obj)]!r} are the same object: give it one name")
        seen[id(obj)] = name


def _component(name: str, obj: Any) -> Component:
    if isinstance(obj, LRScheduler):
        return SchedulerComponent(name, obj)
    if isinstance(obj, torch.amp.GradScaler):
        return ScalerComponent(name, obj)
    if isinstance(obj, GeneratorComponent.types):
        return GeneratorComponent(name, obj)
    if type(obj) is dict:
        return CountersComponent(name, obj)
    stateful = callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
    if stateful:
        is_loader = isinstance(obj, DataLoader) or (hasattr(obj, "__iter__") and hasattr(obj, "__len__"))
        return LoaderComponent(name, obj) if is_loader else StatefulComponent(name, obj)
    if isinstance(obj, DataLoader):
        raise TypeError(
            f"{name!r} is a plain DataLoader, which has no position to save: a run resumed in the middle of an epoch "
            f"would see samples twice or never. Wrap it: {{'{name}': safeckpt.ResumableLoader({name})}}."
        )
    if obj is random:
        raise TypeError(f"{name!r}: the module-wide streams are always captured and need no name")
    raise TypeError(f"{name!r} is a {class_name(obj)}, which has no state that can be captured; give {_ACCEPTED}")


def _driven_by(obj: Any) -> Iterator[Optimizer]:
    """Yield the optimizers that a scheduler moves; composed schedulers may hold several."""
    if isinstance(obj, LRScheduler):
        optimizer = getattr(obj, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            yield optimizer
        for inner in getattr(obj, "_schedulers", ()):
            yield from _driven_by(inner)


def uncaptured(components: Mapping[str, Any]) -> list[str]:
    """Return what training visibly depends on and `components` leaves out, one sentence each.

    Every one of these is a resume that is silently another run: parameters that are trained by an optimizer
    nobody registered, a schedule that starts over, moments of parameters that are saved nowhere.
    """
    optimizers = {name: obj for name, obj in components.items() if isinstance(obj, Optimizer)}
    modules = {name: ModuleComponent(name, obj) for name, obj in components.items() if isinstance(obj, nn.Module)}
    held = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
    owned = {id(p) for module in modules.values() for p in module.parameter_names().values()}
    found = []
    for name, module in modules.items():
        if isinstance(module.obj, AveragedModel):
            continue  # moved by update_parameters(), not by an optimizer
        loose = [key for key, p in module.parameter_names().items() if p.requires_grad and id(p) not in held]
        if loose:
            found.append(f"{name}: no registered optimizer holds {_listed(loose)} (trainable: requires_grad is True)")
    for name, optimizer in optimizers.items():
        strangers = [
            f"group {index} position {position} {list(p.size())}"
            for index, group in enumerate(optimizer.param_groups)
            for position, p in enumerate(group["params"])
            if id(p) not in owned
        ]
        if strangers:
            found.append(f"{name}: it trains parameters of no registered module: {_listed(strangers)}")
    found += _unregistered_schedulers(components, optimizers)
    return found


def _unregistered_schedulers(components: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> list[str]:
    driven = {id(optimizer) for obj in components.values() for optimizer in _driven_by(obj)}
    found = [
        f"{name}: a scheduler drives it and no registered scheduler does; its schedule would start over"
        for name, optimizer in optimizers.items()
        # torch wraps `step` when a scheduler attaches itself
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in driven
    ]
    registered = {id(optimizer) for optimizer in optimizers.values()}
    for name, obj in components.items():
        if any(id(optimizer) not in registered for optimizer in _driven_by(obj)):
            found.append(f"{name}: the optimizer it drives is not registered; its moments and lr would be lost")
    return found


def _listed(names: list[str], shown: int = 5) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
