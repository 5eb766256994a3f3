"""What an object is decides how it is captured: from the user's mapping to components, and what it leaves out."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from safeckpt.errors import listed
from safeckpt.state.component import Component, class_name, has_attribute
from safeckpt.state.fsdp import reshard
from safeckpt.state.module import ModuleComponent, unwrap
from safeckpt.state.optimizer import OptimizerComponent
from safeckpt.state.random_streams import GeneratorComponent, RngStreams
from safeckpt.state.scheduler import SchedulerComponent
from safeckpt.state.stateful import CountersComponent, LoaderComponent, ScalerComponent, StatefulComponent
from safeckpt.state.wrappers import unwrapped
from safeckpt.system.torch_private import communication_states, is_driven, is_initialized

__all__ = ["RESERVED_NAMES", "inner_parts", "register", "uncaptured"]

RESERVED_NAMES = ("safeckpt", "rng")  # the library's own key in the file, and the process's streams in `only=`

_OF_LOADERS = ("dataset", "dataloader", "sampler", "batch_sampler", "leave_out")  # attributes that loaders have
_ACCEPTED = (
    "a module, an optimizer, a scheduler, a gradient scaler, a loader with state_dict, a generator (torch, NumPy or "
    "random.Random), any object with state_dict and load_state_dict, or a plain dict"
)


_DICTS = (dict, defaultdict, Counter)  # an OrderedDict is a state_dict() where the object itself was meant


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
    components = unwrapped(components)
    _check_names(components)
    registered: dict[str, Component] = {}
    driven = {id(inner) for obj in components.values() if not isinstance(obj, Optimizer) for inner in inner_parts(obj)}

    def names() -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for component in registered.values():
            for name, parameter in component.parameter_names().items():
                found.setdefault(id(parameter), []).append(name)
        return found

    with RngStreams.untouched():  # a user's state_dict may draw
        for name, obj in components.items():
            _refuse_hidden_parts(name, obj)
            if isinstance(obj, Optimizer):
                registered[name] = OptimizerComponent(name, obj, names, scheduled=id(obj) in driven)
            else:
                registered[name] = _component(name, obj)
    reshard(registered)
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
        one = id(unwrap(obj) if isinstance(obj, nn.Module) else obj)
        if one in seen:
            raise ValueError(f"{name!r} and {seen[one]!r} are the same object: give it one name")
        seen[one] = name


# By the name of the class, since nothing of these is imported here.
_IN_PIECES = {
    "FullyShardedDataParallel": (
        " (FSDP1), which cuts parameters and moments into flat pieces, another one on each rank. Use "
        "torch.distributed.fsdp.fully_shard (FSDP2), whose parameters keep their names"
    ),
    "ZeroRedundancyOptimizer": (
        ", which keeps a part of the moments on each rank and has the whole on one of them only. Use "
        "fully_shard(model) with a plain optimizer, which shards the moments as well"
    ),
} | dict.fromkeys(
    ("DeepSpeedEngine", "DeepSpeedOptimizer", "DeepSpeedOptimizerWrapper", "MegatronModule", "MegatronOptimizer"),
    ", which keeps weights and moments in pieces of its own that only its own checkpoints put together. Use "
    "fully_shard(model) (FSDP2) with a plain optimizer, or those checkpoints",
)


def _refuse_hidden_parts(name: str, obj: Any) -> None:
    """Refuse what keeps its state in pieces on each rank that no name tells apart.

    Raises:
        TypeError: It does.
    """
    for one in obj.modules() if isinstance(obj, nn.Module) else (obj,):
        for kind in type(one).__mro__:
            if kind.__name__ in _IN_PIECES:
                raise TypeError(f"{name!r} holds a {kind.__name__}{_IN_PIECES[kind.__name__]}")
    if isinstance(obj, Optimizer) and not is_initialized(obj):
        raise TypeError(
            f"{name!r} is a {class_name(obj)}, which does not call Optimizer.__init__; register the optimizer inside it"
        )


def _component(name: str, obj: Any) -> Component:
    if type(obj) in (dict, list, tuple):
        _refuse_hidden_components(name, obj)
    if isinstance(obj, nn.Module):
        return ModuleComponent(name, obj)
    if isinstance(obj, LRScheduler):
        return SchedulerComponent(name, obj)
    if isinstance(obj, torch.amp.GradScaler):
        return ScalerComponent(name, obj)
    if isinstance(obj, random.SystemRandom):
        raise TypeError(f"{name!r} is a {class_name(obj)}: it draws from the system, which cannot be made to repeat")
    if isinstance(obj, GeneratorComponent.types):
        return GeneratorComponent(name, obj)
    if type(obj) in _DICTS:
        return CountersComponent(name, obj)
    if isinstance(obj, list | set | deque):
        raise TypeError(
            f"{name!r} is a {class_name(obj)}, which is a component only inside a dict, where it is restored in place: "
            f"{{{name!r}: {{'items': {name}}}}}"
        )
    if has_attribute(obj, "base_dataloader"):
        raise TypeError(
            f"{name!r} is a loader that Accelerate has prepared, a {class_name(obj)}: it fetches a batch ahead and "
            "moves the process's random streams, so its position cannot be kept. Write manager, loader = "
            "safe(accelerator, directory, loader), with safe from safeckpt.integrations.accelerate"
        )
    stateful = callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
    if stateful:
        return LoaderComponent(name, obj) if _is_loader(obj) else StatefulComponent(name, obj)
    if isinstance(obj, DataLoader):
        raise TypeError(
            f"{name!r} is a plain DataLoader, which has no position to save: a run resumed in the middle of an epoch "
            f"would see samples twice or never. Wrap it: {{'{name}': safeckpt.ResumableLoader({name})}}."
        )
    if obj is random or obj is np.random:
        raise TypeError(f"{name!r}: the module-wide streams are always captured and need no name")
    raise TypeError(f"{name!r} is a {class_name(obj)}, which has no state that can be captured; give {_ACCEPTED}")


def _is_loader(obj: Any) -> bool:
    """Return whether an object with a state hands out batches; a replay buffer has the same methods and holds data."""
    if isinstance(obj, DataLoader):
        return True
    names = (kind.__name__.lower() for kind in type(obj).__mro__)
    named = any("loader" in name for name in names) or any(has_attribute(obj, name) for name in _OF_LOADERS)
    return named and has_attribute(obj, "__iter__") and has_attribute(obj, "__len__")


def _refuse_hidden_components(name: str, obj: Any) -> None:
    """Refuse a dict or list of objects that are components themselves: as plain values they cannot be saved.

    Raises:
        TypeError: Naming the first, and what to write.
    """
    items = obj.items() if isinstance(obj, Mapping) else enumerate(obj) if isinstance(obj, list | tuple) else ()
    for key, value in items:
        if isinstance(value, nn.Module | Optimizer | LRScheduler | torch.amp.GradScaler):
            values = f"{name}.items()" if isinstance(obj, Mapping) else f"enumerate({name})"
            raise TypeError(
                f"{name!r} holds a {class_name(value)} at {key!r}, which has to be a component by itself: "
                f"{{..., **{{f'{name}_{{key}}': value for key, value in {values}}}}}"
            )


def inner_parts(obj: Any) -> Iterator[Optimizer | LRScheduler]:
    """Yield the optimizers and schedulers that an object holds, in its attributes or in lists and dicts there."""
    seen = {id(obj)}
    stack = [obj]
    while stack:
        for value in getattr(stack.pop(), "__dict__", {}).values():
            inside = value.values() if isinstance(value, dict) else value
            for held in inside if isinstance(inside, list | tuple) or isinstance(value, dict) else (value,):
                one = unwrapped({"": held})[""]
                if isinstance(one, Optimizer | LRScheduler) and id(one) not in seen:
                    seen.add(id(one))
                    yield one
                    if isinstance(one, LRScheduler):
                        stack.append(one)


def uncaptured(components: Mapping[str, Any], registered: Mapping[str, Component]) -> list[str]:
    """Return what training visibly depends on and `components` leaves out, one sentence each.

    Every one of these is a resume that is silently another run: a schedule that starts over, moments of parameters
    that are saved nowhere. Optimizers that are not registered are found when they step, see `StrayOptimizers`.

    Args:
        components: The objects by name.
        registered: What `register` has made of them.
    """
    components = unwrapped(components)
    optimizers = {name: obj for name, obj in components.items() if isinstance(obj, Optimizer)}
    owned = {id(p) for component in registered.values() for p in component.parameter_names().values()}
    found: list[str] = []
    for component in registered.values():
        if isinstance(component, ModuleComponent):
            found += _uncaptured_of_module(component)
    for name, optimizer in optimizers.items():
        strangers = [
            f"group {index} position {position} {list(p.size())}"
            for index, group in enumerate(optimizer.param_groups)
            for position, p in enumerate(group["params"])
            if id(p) not in owned
        ]
        if strangers:
            found.append(f"{name}: it trains parameters of no registered module: {listed(strangers)}")
    return [*found, *_uncaptured_inner(components), *_unregistered_schedulers(components, optimizers)]


def _uncaptured_of_module(module: ModuleComponent) -> Iterator[str]:
    trainable = {name: p for name, p in module.parameter_names().items() if p.requires_grad}
    with RngStreams.untouched():  # a user's state_dict may draw
        state = module.state()
    saved = {f"{module.name}.{key}" for key in state}
    left_out = [name for name in trainable if name not in saved]
    if left_out:  # a wrapper, such as Fabric's, may save them under the names they have in the module that it wraps
        places = {_place(value) for value in state.values() if isinstance(value, torch.Tensor)} - {None}
        left_out = [name for name in left_out if _place(trainable[name]) not in places]
    if left_out:
        yield f"{module.name}: its state_dict leaves out {listed(left_out)} (trainable: requires_grad is True)"
    hooks = [state for one in module.outermost.modules() for state in communication_states(one)]
    for state in hooks:
        if hasattr(type(state), "__slots__") or getattr(state, "__dict__", None):  # a process group has neither
            yield (
                f"{module.name}: the {class_name(state)} of its communication hook, such as the error feedback of "
                "PowerSGD; the first steps after a resume differ"
            )


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size] | None:
    """Return where a tensor's values are; None where it has no memory of its own."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return None
    return None if tensor.is_meta else (tensor.data_ptr(), tensor.size())


def _uncaptured_inner(components: Mapping[str, Any]) -> Iterator[str]:
    """Yield the optimizers inside registered ones whose state nobody saves, as in wrappers around a base optimizer."""
    registered = {id(obj) for obj in components.values()}
    for name, obj in components.items():
        if isinstance(obj, Optimizer) and type(obj).state_dict is Optimizer.state_dict:
            for inner in inner_parts(obj):
                if isinstance(inner, Optimizer) and id(inner) not in registered and inner.state is not obj.state:
                    yield (
                        f"{name}: it holds a {class_name(inner)} whose state is not in its state_dict; register that "
                        "optimizer under a name of its own as well"
                    )


def _unregistered_schedulers(components: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> Iterator[str]:
    inside = {name: list(inner_parts(obj)) for name, obj in components.items()}
    driven = {id(one) for name, found in inside.items() if name not in optimizers for one in found}
    for name, optimizer in optimizers.items():
        if is_driven(optimizer) and id(optimizer) not in driven:
            yield f"{name}: a scheduler drives it and no registered scheduler does; its schedule would start over"
    known = {id(optimizer) for optimizer in optimizers.values()}
    known |= {
        id(one) for name, found in inside.items() if not isinstance(components[name], LRScheduler) for one in found
    }
    for name, obj in components.items():
        if isinstance(obj, LRScheduler) and any(
            isinstance(one, Optimizer) and id(one) not in known for one in inside[name]
        ):
            yield f"{name}: the optimizer it drives is not registered; its moments and lr would be lost"
