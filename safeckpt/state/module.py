"""Modules: weights, buffers, extra state, the `training` flag of every submodule, `requires_grad`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safeckpt.state.component import Captured, Component, Order, class_name
from safeckpt.state.guard import Guard, guarded_tensors
from safeckpt.state.tree import copy_tree, join
from safeckpt.system.tensor_kind import has_own_copies, is_plain

__all__ = ["ModuleComponent", "clean_modules", "unwrap"]

_EXTRA_STATE = "_extra_state"  # the last part of a key that holds what get_extra_state() returned
# Attributes in which torch.compile's and activation checkpointing's wrappers hold the module; both classes are private.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return (attribute, inner module) of a wrapper that adds a prefix to every name, None for a real module."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module", module.module
    for attribute in _WRAPPERS:
        inner = module._modules.get(attribute)
        if inner is not None and len(module._modules) == 1:
            return attribute, inner
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile, however they are nested."""
    while (wrapped := _wrapped(module)) is not None:
        module = wrapped[1]
    return module


def clean_modules(module: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Return every submodule by its torch path: (path without the prefixes of wrappers, unwrapped submodule).

    A child that is really called `module` (as in AveragedModel) keeps its name: only wrappers lose theirs.
    """
    found: dict[str, tuple[str, nn.Module]] = {}

    def visit(raw: str, clean: str, current: nn.Module) -> None:
        found[raw] = (clean, unwrap(current))
        if (wrapped := _wrapped(current)) is not None:
            visit(join(raw, wrapped[0]), clean, wrapped[1])
            return
        for name, child in current._modules.items():
            if child is not None:
                visit(join(raw, name), join(clean, name), child)

    visit("", "", module)
    return found


def _clean_key(key: str, modules: Mapping[str, tuple[str, nn.Module]]) -> str:
    """Return a `state_dict` key without wrapper prefixes: its longest part that is a module path decides."""
    path, _, last = key.rpartition(".")
    while path not in modules:
        path, _, more = path.rpartition(".")
        last = f"{more}.{last}"
    return join(modules[path][0], last)


class ModuleComponent(Component):
    """An `nn.Module`, with DataParallel, DDP and compiled wrappers taken off at any depth.

    Attributes:
        outermost: The module as it was registered.
    """

    kind = "module"
    order = Order.MODULE

    def __init__(self, name: str, obj: nn.Module) -> None:
        super().__init__(name, unwrap(obj))
        self.outermost = obj

    def parameter_names(self) -> dict[str, torch.Tensor]:
        """Return every parameter under every name it has, as `component.qualified.name`."""
        modules = clean_modules(self.obj)
        names = self.obj.named_parameters(remove_duplicate=False)
        return {join(self.name, _clean_key(key, modules)): parameter for key, parameter in names}

    def _flags(self) -> dict[str, bool]:
        names = self.parameter_names().items()
        return {name.removeprefix(f"{self.name}."): parameter.requires_grad for name, parameter in names}

    def capture(self) -> Captured:
        """Return the `state_dict` under clean names, and flags and classes beside it."""
        modules = clean_modules(self.obj)
        raw = self.obj.state_dict()
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in raw.items():
            # Torch has detached nearly all of them. A lazy parameter has no values to detach; it is refused by name
            # when the payload is encoded.
            attached = isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter))
            state[_clean_key(key, modules)] = value.detach() if attached and not nn.parameter.is_lazy(value) else value
        metadata = getattr(raw, "_metadata", None)
        if metadata is not None:
            state._metadata = OrderedDict(  # type: ignore[attr-defined] # torch puts its versions there
                (modules[path][0] if path in modules else path, dict(versions)) for path, versions in metadata.items()
            )
        record = {
            "classes": {clean: class_name(module) for clean, module in modules.values()},
            "training": {clean: module.training for clean, module in modules.values()},
            "requires_grad": self._flags(),
        }
        return Captured(state, record)

    def check(self, captured: Captured) -> list[str]:
        """Compare names, shapes, dtypes and classes of both sides."""
        live = self.capture()
        found = self._one_sided(captured.state, live.state)
        for key, value in live.state.items():
            if key in captured.state:
                found += _unlike(join(self.name, key), captured.state[key], value)
        strangers = self._one_sided(captured.record["requires_grad"], live.record["requires_grad"])
        found += [difference for difference in strangers if difference not in found]
        return found + self._check_classes(captured.record["classes"], live.record["classes"], found)

    def _one_sided(self, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
        found = [f"{join(self.name, key)}: not in the checkpoint" for key in live if key not in saved]
        return found + [f"{join(self.name, key)}: only in the checkpoint" for key in saved if key not in live]

    def _check_classes(self, saved: Mapping[str, str], live: Mapping[str, str], known: list[str]) -> list[str]:
        """Compare the submodules: a dropout or an activation has no weights, and makes another run all the same."""
        found = []
        for path in dict.fromkeys([*live, *saved]):
            where = join(self.name, path)
            if path in saved and path in live:
                if saved[path] != live[path]:
                    found.append(f"{where}: saved from a {saved[path]}, the live one is a {live[path]}")
            elif not any(difference.startswith(f"{where}.") for difference in known):
                side = f"the checkpoint has no such {live[path]}" if path in live else f"no such {saved[path]} now"
                found.append(f"{where}: {side}")
        return found

    def apply(self, captured: Captured) -> None:
        """Copy the values into the live tensors, then set each flag by itself: `train()` would set them all."""
        modules = clean_modules(self.obj)
        own: dict[str, torch.Tensor] = dict(self.obj.named_parameters(remove_duplicate=False))
        own.update(self.obj.named_buffers(remove_duplicate=False))
        at_once = self._loads_as_torch_does()
        state: OrderedDict[str, Any] = OrderedDict()
        filled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for key in self.obj.state_dict():
            saved = captured.state[_clean_key(key, modules)]
            if key not in own:
                state[key] = copy_tree(saved)  # extra state may keep what it is given
            elif at_once and _is_ordinary(own[key]) and _is_ordinary(saved):
                # Loading a tensor into itself copies nothing, and does all the rest that there is to loading.
                state[key] = own[key]
                filled[id(own[key])] = own[key].detach(), saved
            else:
                state[key] = saved  # parameters and buffers take a copy by themselves
        captured.transfer.copy(filled.values())
        versions = getattr(captured.state, "_metadata", {})
        state._metadata = OrderedDict(  # type: ignore[attr-defined] # read by load_state_dict
            (raw, versions[clean]) for raw, (clean, _) in modules.items() if clean in versions
        )
        self.obj.load_state_dict(state)
        for clean, module in modules.values():
            module.training = captured.record["training"][clean]
        for wrapper in self.outermost.modules():
            wrapper.training = unwrap(wrapper).training
        flags = captured.record["requires_grad"]
        for name, parameter in self.parameter_names().items():
            wanted = flags[name.removeprefix(f"{self.name}.")]
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    def _loads_as_torch_does(self) -> bool:
        """Tell whether no code of the user's own looks at the saved values, which it could not tell from live ones."""
        return type(self.obj).load_state_dict is nn.Module.load_state_dict and all(
            not module._load_state_dict_pre_hooks
            and type(module)._load_from_state_dict.__module__.partition(".")[0] == "torch"
            for module in self.obj.modules()
        )

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, and buffers and extra state when the guard looks at buffers."""
        parameters = captured.record["requires_grad"]
        for key, value in captured.state.items():
            if guard.buffers or key in parameters:
                yield from guarded_tensors(value, join(self.name, key))


def _is_ordinary(value: Any) -> bool:
    """Return whether a value is a tensor that a copy of its elements makes equal to another."""
    return isinstance(value, torch.Tensor) and is_plain(value) and has_own_copies(value)


def _unlike(where: str, saved: Any, live: Any) -> Iterator[str]:
    if not isinstance(saved, torch.Tensor) or not isinstance(live, torch.Tensor):
        if where.rpartition(".")[2] != _EXTRA_STATE and type(saved) is not type(live):
            yield f"{where}: saved as a {type(saved).__name__}, the live one is a {type(live).__name__}"
    elif nn.parameter.is_lazy(live):
        yield f"{where}: the live parameter is uninitialised; run one forward pass before restoring"
    elif live.is_meta:
        yield f"{where}: the live tensor is on the meta device and has no memory; materialise it first"
    else:
        for what in ("shape", "dtype", "layout"):
            before, now = getattr(saved, what), getattr(live, what)
            if before != now:
                shown = (list(before), list(now)) if what == "shape" else (before, now)
                yield f"{where}: saved {what} {shown[0]}, live {what} {shown[1]}"
                return
