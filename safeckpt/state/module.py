"""Modules: weights, buffers, extra state, the `training` flag of every submodule, `requires_grad`."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safeckpt.errors import UnsavableStateError
from safeckpt.state.component import Captured, Component, Order, class_name
from safeckpt.state.fill import cannot_fill, fill_special, is_special
from safeckpt.state.guard import Guard, guarded_tensors, nonfinite_floats
from safeckpt.state.module_options import changed_options, options_of
from safeckpt.state.tree import copy_tree, join, local_part
from safeckpt.system.tensor_kind import TensorKind, has_own_copies, is_plain, kind_of
from safeckpt.system.torch_private import (
    EXTRA_STATE,
    WRAPPED_MODULES,
    children_of,
    class_that_loads,
    has_hooks_after_loading,
    has_hooks_before_loading,
    loader_of_entries,
    own_tensor_names,
    set_versions,
    versions_of,
)

__all__ = ["ModuleComponent", "clean_modules", "persistent_tensors", "unwrap"]

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_NORMS = frozenset({"SyncBatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"})


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return (attribute, inner module) of a wrapper that adds a prefix to every name, None for a real module."""
    if isinstance(module, _PARALLEL):
        return "module", module.module
    children = children_of(module)
    if len(children) == 1:
        for attribute in WRAPPED_MODULES:
            # A ScriptModule's mapping of children has no get().
            if attribute in children and (inner := children[attribute]) is not None:
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
        wrapped = _wrapped(current)
        found[raw] = (clean, current if wrapped is None else unwrap(wrapped[1]))
        if wrapped is not None:
            visit(join(raw, wrapped[0]), clean, wrapped[1])
            return
        for name, child in children_of(current).items():
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


def persistent_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the live parameters and persistent buffers by clean name, and the names of what else is in its state.

    A tensor is there under every name that it has.
    """
    module = unwrap(module)
    modules = clean_modules(module)
    live: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    live.update(module.named_buffers(remove_duplicate=False))
    keys = list(module.state_dict())
    found = {_clean_key(key, modules): live[key] for key in keys if key in live}
    return found, [_clean_key(key, modules) for key in keys if key not in live]


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
        return {join(self.name, key): parameter for key, parameter in self._parameters().items()}

    def _parameters(self) -> dict[str, torch.Tensor]:
        modules = clean_modules(self.obj)
        names = self.obj.named_parameters(remove_duplicate=False)
        return {_clean_key(key, modules): parameter for key, parameter in names}

    def capture(self) -> Captured:
        """Return the `state_dict` under clean names, and flags and classes beside it."""
        modules = clean_modules(self.obj)
        state = self.state()
        record = {
            "classes": _classes_in(modules),
            "training": {clean: module.training for clean, module in modules.values()},
            "requires_grad": {key: parameter.requires_grad for key, parameter in self._parameters().items()},
            "options": options_of(dict(modules.values())),
        }
        return Captured(state, record)

    def state(self) -> OrderedDict[str, Any]:
        """Return the `state_dict` under clean names."""
        modules = clean_modules(self.obj)
        raw = self.obj.state_dict()
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in raw.items():
            if isinstance(value, torch.Tensor) and value.is_nested and kind_of(value) is TensorKind.NESTED:
                raise UnsavableStateError(
                    location=join(self.name, _clean_key(key, modules)),
                    type_name="nested tensor in a module",
                    reason="load_state_dict of torch cannot load it",
                    cure="keep its values and its lengths as two buffers.",
                )
            # Torch has detached nearly all of them. A lazy parameter has no values to detach; it is refused by name
            # when the payload is encoded.
            attached = isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter))
            state[_clean_key(key, modules)] = value.detach() if attached and not nn.parameter.is_lazy(value) else value
        metadata = versions_of(raw)
        if metadata is not None:
            clean = ((modules[path][0] if path in modules else path, dict(one)) for path, one in metadata.items())
            set_versions(state, OrderedDict(clean))
        return state

    def keep_modes(self, captured: Captured) -> Captured:
        """Return `captured` with the live `training` flags."""
        live = {clean: module.training for clean, module in clean_modules(self.obj).values()}
        return dataclasses.replace(captured, record={**captured.record, "training": live})

    def check(self, captured: Captured) -> list[str]:
        """Compare names, shapes, dtypes and classes of both sides."""
        live = self.capture()
        found = self._one_sided(captured.state, live.state)
        modules = clean_modules(self.obj)
        own = {_clean_key(key, modules): tensor for key, tensor in self._own_tensors().items()}
        self_loading = _self_loading(self.obj)
        sized = {_clean_key(key, modules) for key in _tensor_keys(self_loading)}
        for key, value in live.state.items():
            if key in captured.state and not (key in sized and isinstance(captured.state[key], torch.Tensor)):
                where = join(self.name, key)
                different = list(_unlike(where, captured.state[key], value))
                if not different and key in own and isinstance(captured.state[key], torch.Tensor):
                    different = [f"{where}: {why}" for why in cannot_fill(own[key], captured.state[key])]
                found += different
        unknown = self._one_sided(captured.record["requires_grad"], live.record["requires_grad"])
        found += [difference for difference in unknown if difference not in found]
        if self._loads_as_torch_does() and not self_loading:
            known = own.keys() | set(_extra_state_keys(modules))
            found += [
                f"{join(self.name, key)}: in its state_dict, and load_state_dict does not know it"
                for key in live.state
                if key not in known
            ]
        return found + self._check_classes(captured.record["classes"], live.record["classes"], found)

    def notices(self, captured: Captured) -> list[str]:
        """Return renamed classes and the like: differences with which every tensor still fits."""
        saved, modules = captured.record, clean_modules(self.obj)
        classes, live_options = _classes_in(modules), options_of(dict(modules.values()))
        differences = self._class_differences(saved["classes"], classes)
        found = [text for text, refused in differences if not refused]
        for path, options in saved.get("options", {}).items():
            if saved["classes"].get(path) == classes.get(path):
                where = f"{join(self.name, path)} ({saved['classes'][path]})"
                texts = changed_options(options, live_options.get(path, ""))
                found.extend(f"{where}: {text}" for text in texts)
        return found

    def _one_sided(self, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
        found = [f"{join(self.name, key)}: not in the checkpoint" for key in live if key not in saved]
        return found + [f"{join(self.name, key)}: only in the checkpoint" for key in saved if key not in live]

    def _check_classes(self, saved: Mapping[str, str], live: Mapping[str, str], known: list[str]) -> list[str]:
        """Compare the submodules: a dropout or an activation has no weights, and makes a different run."""
        differences = [text for text, refused in self._class_differences(saved, live) if refused]
        paths = {text: text.partition(": ")[0] for text in differences}
        return [text for text in differences if not any(one.startswith(f"{paths[text]}.") for one in known)]

    def _class_differences(self, saved: Mapping[str, str], live: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield (difference, whether it is refused) of the classes of submodules."""
        for path in dict.fromkeys([*live, *saved]):
            where = join(self.name, path)
            before, now = saved.get(path), live.get(path)
            if before is None or now is None:
                side = f"the checkpoint has no such {now}" if before is None else f"no such {before} now"
                yield f"{where}: {side}", (now or before) != "Identity"
            elif before != now:
                yield f"{where}: saved class {before}, live class {now}", not _may_be_renamed(before, now)

    @property
    def loads_by_own_code(self) -> bool:
        """Whether code of the user's, or a tensor that is not plain, decides how the state is loaded."""
        return (
            not self._loads_as_torch_does()
            or any(has_hooks_after_loading(module) for module in self.obj.modules())
            or any(type(module).set_extra_state is not nn.Module.set_extra_state for module in self.obj.modules())
            or bool(_self_loading(self.obj))
            or not all(_is_ordinary(tensor) for tensor in self._own_tensors().values())
        )

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = dict(self.obj.named_parameters(remove_duplicate=False))
        own.update(self.obj.named_buffers(remove_duplicate=False))
        return own

    def apply(self, captured: Captured) -> None:
        """Copy the values into the live tensors, then set each flag by itself: `train()` would set them all."""
        modules = clean_modules(self.obj)
        own = self._own_tensors()
        at_once = self._loads_as_torch_does()
        sized = set(_tensor_keys(_self_loading(self.obj)))
        state: OrderedDict[str, Any] = OrderedDict()
        filled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for key in self.obj.state_dict():
            saved = captured.state[_clean_key(key, modules)]
            if key not in own:
                state[key] = copy_tree(saved)  # extra state may keep what it is given
            elif at_once and is_special(own[key]):
                fill_special(own[key].detach(), saved)
            elif at_once and key not in sized and _is_ordinary(own[key]) and _lies_alike(own[key], saved):
                # Loading a tensor into itself copies nothing, and does all the rest that there is to loading.
                state[key] = own[key]
                filled[id(own[key])] = local_part(own[key]).detach(), local_part(saved)
            else:
                state[key] = saved  # parameters and buffers take a copy by themselves
        captured.transfer.copy(filled.values())
        versions = versions_of(captured.state) or {}
        known = ((raw, versions[clean]) for raw, (clean, _) in modules.items() if clean in versions)
        set_versions(state, OrderedDict(known))
        self._load(state, own)
        for clean, module in modules.values():
            # An Identity that was added has none.
            module.training = captured.record["training"].get(clean, module.training)
        for wrapper in self.outermost.modules():
            wrapper.training = unwrap(wrapper).training
        flags = captured.record["requires_grad"]
        for key, parameter in self._parameters().items():
            if parameter.requires_grad != flags[key]:
                parameter.requires_grad_(flags[key])

    def _load(self, state: OrderedDict[str, Any], own: Mapping[str, torch.Tensor]) -> None:
        """Load a state. Torch's own method may find that entries are missing: those that `state_dict` leaves out.

        Raises:
            RuntimeError: It found anything else that does not fit.
        """
        if type(self.obj).load_state_dict is not nn.Module.load_state_dict:
            self.obj.load_state_dict(state)
            return
        expected = self.obj.state_dict().keys()
        missing, unexpected = self.obj.load_state_dict(state, strict=False)
        missing = [key for key in missing if key in expected and not (key in own and is_special(own[key]))]
        if missing or unexpected:
            raise RuntimeError(f"load_state_dict of {self.name} misses {missing} and does not know {unexpected}")

    def _loads_as_torch_does(self) -> bool:
        """Return whether no code of the user's own looks at the saved values: it could not tell them from live ones."""
        return type(self.obj).load_state_dict is nn.Module.load_state_dict and all(
            not has_hooks_before_loading(module)
            and loader_of_entries(type(module)).__module__.partition(".")[0] == "torch"
            for module in self.obj.modules()
        )

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, and buffers and extra state when the guard looks at buffers."""
        for key, value in captured.state.items():
            if guard.buffers or key in captured.record["requires_grad"]:
                yield from guarded_tensors(value, join(self.name, key))
                if not isinstance(value, torch.Tensor):  # extra state
                    yield from nonfinite_floats(value, join(self.name, key), infinite=False)


def _classes_in(modules: Mapping[str, tuple[str, nn.Module]]) -> dict[str, str]:
    return {clean: class_name(module) for clean, module in modules.values()}


def _self_loading(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the submodules that have a loading of their own, which may size tensors by the data.

    Observers of quantization and memory banks do so. Torch's own layers override the same method for less.
    """
    found = []
    for path, inner in module.named_modules():
        if not class_that_loads(inner).__module__.startswith(("torch.nn.", "torch.jit.")):
            found.append((path, inner))
    return found


def _tensor_keys(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield the keys of the tensors that modules hold themselves, by their paths."""
    return (join(path, key) for path, inner in modules for key in own_tensor_names(inner))


def _extra_state_keys(modules: Mapping[str, tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield the clean keys under which modules have a state of their own making."""
    for clean, inner in modules.values():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield join(clean, EXTRA_STATE)


def _may_be_renamed(saved: str, live: str) -> bool:
    """Return whether two classes may stand for each other where every tensor fits.

    A class of the user's may have a new name; another class of torch's own at the same place computes something else.
    """
    if {saved, live} <= _NORMS and "SyncBatchNorm" in (saved, live):
        return True
    return not (_is_of_torch(saved) and _is_of_torch(live))


def _is_of_torch(name: str) -> bool:
    return hasattr(nn, name)


def _is_ordinary(value: Any) -> bool:
    """Return whether a value is a tensor, or a sharded one, that a copy of its elements makes equal to another."""
    if not isinstance(value, torch.Tensor):
        return False
    part = local_part(value)
    return is_plain(part) and has_own_copies(part)


def _lies_alike(live: Any, saved: Any) -> bool:
    """Return whether the elements of a value can be copied one by one into an ordinary live tensor."""
    if not _is_ordinary(saved) or hasattr(live, "to_local") != hasattr(saved, "to_local"):
        return False
    return not hasattr(live, "to_local") or (
        live.placements == saved.placements and live.device_mesh == saved.device_mesh
    )


def _unlike(where: str, saved: Any, live: Any) -> Iterator[str]:
    if not isinstance(saved, torch.Tensor) or not isinstance(live, torch.Tensor):
        if where.rpartition(".")[2] != EXTRA_STATE and type(saved) is not type(live):
            yield f"{where}: saved as a {type(saved).__name__}, the live one is a {type(live).__name__}"
    elif nn.parameter.is_lazy(live):
        yield f"{where}: the live parameter is uninitialised; run one forward pass before restoring"
    elif live.is_meta:
        yield f"{where}: the live tensor is on the meta device and has no memory; materialise it first"
    else:
        before, now = _properties(saved), _properties(live)
        for name in before:
            if before[name] != now.get(name):
                yield f"{where}: saved {name} {before[name]}, live {name} {now.get(name)}"
                return


def _properties(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what two tensors have to have in common for one to take the values of the other."""
    found = {"shape": list(tensor.shape), "dtype": tensor.dtype, "layout": tensor.layout}
    if tensor.is_quantized:
        found["quantization"] = tensor.qscheme()
    elif tensor.layout in _COMPRESSED:
        found["number of stored elements"] = tensor.values().size(0)
    return found
