"""Modules: weights, buffers, extra state, the `training` flag of every submodule, `requires_grad`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safeckpt.state.component import Captured, Component, Order, class_name
from safeckpt.state.guard import Guard
from safeckpt.state.tree import join, named_tensors

__all__ = ["ModuleComponent", "clean_modules", "unwrap"]

_EXTRA_STATE = "_extra_state"  # the last part of a key that holds what get_extra_state() returned


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return (attribute, inner module) of a wrapper that adds a prefix to every name, None for a real module."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module", module.module
    # torch.compile's wrapper. By attribute: its class lives in a private module.
    inner = module.__dict__.get("_orig_mod", module._modules.get("_orig_mod"))
    return ("_orig_mod", inner) if isinstance(inner, nn.Module) else None


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
        if (wrapped := _wrapped(current)) is not None:
            found[raw] = (clean, unwrap(current))
            visit(join(raw, wrapped[0]), clean, wrapped[1])
            return
        found[raw] = (clean, current)
        for name, child in current._modules.items():
            if child is not None:
                visit(join(raw, name), join(clean, name), child)

    visit("", "", module)
    return found


def _clean_key(key: str, modules: Mapping[str, tuple[str, nn.Module]]) -> str:
    """Return a `state_dict` key without wrapper prefixes: its longest part that is a module path decides."""
    parts = key.split(".")
    for cut in range(len(parts) - 1, -1, -1):
        raw = ".".join(parts[:cut])
        if raw in modules:
            return join(modules[raw][0], ".".join(parts[cut:]))
    return key


class ModuleComponent(Component):
    """An `nn.Module`, with DataParallel, DDP and compiled wrappers taken off at any depth."""

    kind = "module"
    order = Order.MODULE

    def __init__(self, name: str, obj: nn.Module) -> None:
        super().__init__(name, unwrap(obj))

    def parameter_names(self) -> dict[str, nn.Parameter]:
        """Return every parameter under every name it has, as `component.qualified.name`."""
        modules = clean_modules(self.obj)
        names = self.obj.named_parameters(remove_duplicate=False)
        return {join(self.name, _clean_key(key, modules)): parameter for key, parameter in names}

    def capture(self) -> Captured:
        """Return the `state_dict` under clean names, and flags and classes beside it."""
        modules = clean_modules(self.obj)
        raw = self.obj.state_dict()
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in raw.items():
            # A lazy parameter has no values to detach; it is refused by name when the payload is encoded.
            plain = not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value)
            state[_clean_key(key, modules)] = value if plain else value.detach()
        metadata = getattr(raw, "_metadata", None)
        if metadata is not None:
            state._metadata = OrderedDict(  # type: ignore[attr-defined] # torch puts its versions there
                (modules[path][0] if path in modules else path, dict(versions)) for path, versions in metadata.items()
            )
        return Captured(state, self._record())

    def _record(self) -> dict[str, Any]:
        return {
            "classes": {clean: class_name(module) for clean, module in clean_modules(self.obj).values()},
            "training": {clean: module.training for clean, module in clean_modules(self.obj).values()},
            "requires_grad": {
                name.removeprefix(self.name + "."): parameter.requires_grad
                for name, parameter in self.parameter_names().items()
            },
        }

    def check(self, captured: Captured) -> list[str]:
        """Compare names, shapes, dtypes and classes of both sides."""
        live = self.capture()
        found = _different_names(self.name, captured.state, live.state)
        for key in captured.state.keys() & live.state.keys():
            found += self._check_entry(key, captured.state[key], live.state[key])
        classes = live.record["classes"]
        for path, saved in captured.record["classes"].items():
            if path in classes and classes[path] != saved:
                where = join(self.name, path)
                found.append(f"{where}: saved from a {saved}, the live one is a {classes[path]}")
        return found

    def _check_entry(self, key: str, saved: Any, live: Any) -> list[str]:
        where = join(self.name, key)
        if nn.parameter.is_lazy(live):
            return [f"{where}: the live parameter is uninitialised; run one forward pass before restoring"]
        if not isinstance(saved, torch.Tensor) or not isinstance(live, torch.Tensor):
            return [] if key.rpartition(".")[2] == _EXTRA_STATE else _different_types(where, saved, live)
        if live.is_meta:
            return [f"{where}: the live tensor is on the meta device and has no memory; materialise it first"]
        if saved.size() != live.size():
            return [f"{where}: saved shape {list(saved.size())}, live shape {list(live.size())}"]
        if saved.dtype != live.dtype:
            return [f"{where}: saved dtype {saved.dtype}, live dtype {live.dtype}"]
        if saved.layout != live.layout:
            return [f"{where}: saved layout {saved.layout}, live layout {live.layout}"]
        return []

    def apply(self, captured: Captured) -> None:
        """Copy the values into the live tensors, then set each flag by itself: `train()` would set them all."""
        modules = clean_modules(self.obj)
        state: OrderedDict[str, Any] = OrderedDict(
            (key, captured.state[_clean_key(key, modules)]) for key in self.obj.state_dict()
        )
        versions = getattr(captured.state, "_metadata", {})
        state._metadata = OrderedDict(  # type: ignore[attr-defined] # read by load_state_dict
            (raw, versions[clean]) for raw, (clean, _) in modules.items() if clean in versions
        )
        self.obj.load_state_dict(state, strict=True)
        for clean, module in modules.values():
            module.training = captured.record["training"].get(clean, module.training)
        flags = captured.record["requires_grad"]
        for name, parameter in self.parameter_names().items():
            wanted = flags[name.removeprefix(self.name + ".")]
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, and buffers and extra state when the guard looks at buffers."""
        parameters = captured.record["requires_grad"]
        for key, value in captured.state.items():
            if guard.buffers or key in parameters:
                yield from named_tensors(value, join(self.name, key))


def _different_names(name: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    found = [f"{join(name, key)}: not in the checkpoint" for key in live if key not in saved]
    return found + [f"{join(name, key)}: only in the checkpoint" for key in saved if key not in live]


def _different_types(where: str, saved: object, live: object) -> list[str]:
    if type(saved) is type(live):
        return []
    return [f"{where}: saved as a {type(saved).__name__}, the live one is a {type(live).__name__}"]
