"""Optimizers: state and options of every parameter, matched by the parameter's name, never by position alone.

Each saved position carries the parameter's qualified name, shape and dtype, and the saved groups are put in the live
order before torch sees them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from safeckpt.state.component import Captured, Component, Order, class_name, is_library_code
from safeckpt.state.guard import Guard, guarded_tensors, nonfinite_floats
from safeckpt.state.matching import Matching, Slot, match, positional
from safeckpt.state.options import overruled, plain, same
from safeckpt.state.tree import copy_tree, detached, join, local_part, map_tensors
from safeckpt.system.tensor_kind import has_own_copies, is_plain
from safeckpt.system.torch_private import has_hooks_on_loading, has_stepped, mark_stepped

__all__ = ["NOT_OPTIONS", "OptimizerComponent"]

# Keys of a param group that describe the group, not how it is optimised.
NOT_OPTIONS = frozenset({"params", "param_names"})
_DRIVEN = frozenset({"lr"})  # what any scheduler moves
_CYCLED = frozenset({"momentum", "betas", "base_momentum", "max_momentum"})  # and what a cyclic one moves as well


class OptimizerComponent(Component):
    """A `torch.optim.Optimizer`.

    Args:
        name: Name under which the user registered it.
        obj: The optimizer.
        names: Gives the qualified names of every parameter that a registered module owns, by id of the parameter.
        scheduled: True when a registered scheduler drives it, so that a moving lr is no news.
    """

    kind = "optimizer"
    order = Order.OPTIMIZER

    def __init__(
        self, name: str, obj: Optimizer, names: Callable[[], Mapping[int, Sequence[str]]], *, scheduled: bool
    ) -> None:
        super().__init__(name, obj)
        self._names = names
        self._scheduled = scheduled
        self._first = [plain(_options(group)) for group in obj.param_groups]
        self._matching: tuple[Captured, Matching] | None = None  # of the state that was checked last

    def _slots(self) -> list[list[Slot]]:
        """Return (names, parameter) for each position of each group.

        A parameter of no registered module is called by its position, which its shape and dtype then have to confirm.
        """
        names = self._names()
        return [
            [
                (names.get(id(parameter)) or [f"group {index} position {position}"], parameter)
                for position, parameter in enumerate(group["params"])
            ]
            for index, group in enumerate(self.obj.param_groups)
        ]

    def capture(self) -> Captured:
        """Return torch's own `state_dict`, and name, shape and dtype of every position beside it."""
        groups = self.obj.param_groups
        # Groups may be added while training. A new list: an earlier capture may still hold the old one.
        self._first = [*self._first, *(plain(_options(group)) for group in groups[len(self._first) :])]
        slots = [
            [
                {"name": names[0], "shape": list(parameter.size()), "dtype": str(parameter.dtype)}
                for names, parameter in group
            ]
            for group in self._slots()
        ]
        # A scheduler warns, wrongly, after a restart when it cannot see that a step was made before.
        stepped = has_stepped(self.obj)
        record = {"class": class_name(self.obj), "stepped": stepped, "slots": slots, "first": self._first}
        return Captured(detached(self.obj.state_dict()), record)

    def check(self, captured: Captured) -> list[str]:
        """Compare classes, and find for every live parameter the saved one of its name, shape and dtype."""
        slots = captured.record["slots"]
        matching = match(slots, self._slots())
        self._matching = (captured, matching)
        found = list(matching.differences)
        if not found and matching.reordered:
            spans = positional(slots, captured.state) if _is_usual(captured) else "a state_dict of its own form"
            if spans:
                found.append(f"the parameters are in another order, and {spans} depends on the order")
        return super().check(captured) + [f"{self.name}: {difference}" for difference in found]

    def _matched(self, captured: Captured) -> Matching:
        """Return where the live parameters are in a state that has passed `check`."""
        if self._matching is None or self._matching[0].record["slots"] is not captured.record["slots"]:
            self._matching = (captured, match(captured.record["slots"], self._slots()))
        return self._matching[1]

    def _was_renamed(self, captured: Captured) -> bool:
        """Return whether a class of the user's has a new name: its groups have the same options."""
        names = (str(captured.record.get("class")), class_name(self.obj))
        if not _is_usual(captured) or any(hasattr(torch.optim, name) for name in names):
            return False
        saved, live = captured.state["param_groups"], self.obj.param_groups
        return {frozenset(_options(group)) for group in saved} == {frozenset(_options(group)) for group in live}

    @property
    def loads_by_own_code(self) -> bool:
        """Whether a hook, or a method of the user's own, takes part in loading."""
        methods = all(is_library_code(type(self.obj), method) for method in ("load_state_dict", "__setstate__"))
        return not methods or has_hooks_on_loading(self.obj)

    def apply(self, captured: Captured) -> None:
        """Load through the optimizer's own method, then undo its casts: moments keep the dtype they were saved with."""
        mapped = copy_tree(captured.state, captured.transfer, self._targets(captured))
        if _is_usual(captured):
            mapped["param_groups"] = self._mapped_groups(captured)
        self.obj.load_state_dict(mapped)
        if _is_usual(captured):
            self._undo_casts(mapped)
        matching = self._matched(captured)
        first = captured.record["first"]
        self._first = [copy_tree(first[source]) for source in matching.sources]
        self._matching = None  # holds the whole state
        if captured.record["stepped"]:
            mark_stepped(self.obj)

    def _targets(self, captured: Captured) -> dict[int, torch.Tensor]:
        """Return where saved tensors can go at once, by their id: into the live state, or onto their device."""
        targets: dict[int, torch.Tensor] = {}
        taken: set[int] = set()
        if not _is_usual(captured):
            return targets
        matching = self._matched(captured)
        for source, row, live in zip(matching.sources, matching.rows, self.obj.param_groups, strict=True):
            numbers = captured.state["param_groups"][source]["params"]
            for position, parameter in zip(row, live["params"], strict=True):
                entry = captured.state["state"].get(numbers[position])
                now = self.obj.state.get(parameter, {})
                for key, saved in entry.items() if isinstance(entry, dict) else ():
                    target = _target(key, saved, now.get(key) if isinstance(now, dict) else None, parameter)
                    if target is not None and local_part(target).data_ptr() not in taken:
                        taken.add(local_part(target).data_ptr())
                        targets[id(saved)] = target
        return targets

    def _mapped_groups(self, captured: Captured) -> list[dict[str, Any]]:
        """Return the saved groups in the live order; each parameter keeps the number that its state is saved under."""
        matching = self._matched(captured)
        groups = []
        for source, row, live in zip(matching.sources, matching.rows, self.obj.param_groups, strict=True):
            saved = captured.state["param_groups"][source]
            group = {**copy_tree(_options(live)), **map_tensors(_options(saved), _like(live), copy.deepcopy)}
            for key in NOT_OPTIONS & saved.keys():
                group[key] = [saved[key][position] for position in row]
            if "param_names" in live:
                group["param_names"] = list(live["param_names"])
            groups.append(group)
        return groups

    def _undo_casts(self, mapped: Mapping[str, Any]) -> None:
        for group, live in zip(mapped["param_groups"], self.obj.param_groups, strict=True):
            for number, parameter in zip(group["params"], live["params"], strict=True):
                entry, now = mapped["state"].get(number), self.obj.state.get(parameter)
                if isinstance(entry, dict) and isinstance(now, dict):
                    for key in entry.keys() & now.keys() - {
                        "step"
                    }:  # its device and dtype follow `fused`, as torch set them
                        now[key] = _uncast(entry[key], now[key])

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `optimizer.<parameter name>.<key>` for state, `optimizer.param_groups.<n>.<option>` for options."""
        if not guard.optimizer:
            return
        yield from nonfinite_floats(captured.state.get("param_groups"), join(self.name, "param_groups"))
        if not _is_usual(captured):
            yield from guarded_tensors(captured.state, self.name)
            return
        names: dict[Any, str] = {}
        for group, slots in zip(captured.state["param_groups"], captured.record["slots"], strict=True):
            names.update((number, slot["name"]) for number, slot in zip(group["params"], slots, strict=True))
        for number, entry in captured.state["state"].items():
            yield from guarded_tensors(entry, join(self.name, names.get(number, number)))
        yield from guarded_tensors({key: item for key, item in captured.state.items() if key != "state"}, self.name)

    def replaced(self, captured: Captured) -> list[str]:
        """Return the options in which file and script disagree and that no scheduler moves."""
        if not _is_usual(captured):
            return []
        groups = captured.state["param_groups"]
        moving = set(_DRIVEN) if self._scheduled else set()
        if self._scheduled and any("max_momentum" in group for group in groups):
            moving |= _CYCLED
        sources = self._matched(captured).sources
        lines = []
        for index, (source, live) in enumerate(zip(sources, self.obj.param_groups, strict=True)):
            where = f" (group {index})" if len(sources) > 1 else ""
            first, saved = captured.record["first"][source], _options(groups[source])
            # What a scheduler began from is the script's rate too, for a script that makes the scheduler only later.
            begun = {"lr"} if "initial_lr" in saved and same(live.get("lr"), saved["initial_lr"]) else set()
            for key, change in overruled(_options(live), saved, first, moving | begun):
                lines.append(f"{self.name}.{key}{where}: {change}")
        return lines

    def with_rates(self, captured: Captured, rates: Sequence[Any]) -> Captured:
        """Return `captured` with the learning rates of a schedule that the script has changed, one for each group."""
        groups = list(captured.state["param_groups"])
        for source, rate in zip(self._matched(captured).sources, rates, strict=True):
            groups[source] = {**groups[source], "lr": copy_tree(rate)}
        return Captured({**captured.state, "param_groups": groups}, captured.record, captured.transfer)

    def hyperparameters(self, captured: Captured) -> Collection[str]:
        """Return the options of the live groups; none where a `state_dict` has a form of its own."""
        live = dict.fromkeys(key for group in self.obj.param_groups for key in _options(group))
        return list(live) if _is_usual(captured) else ()

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these options, in every group that has them."""
        if not hyperparameters:
            return captured
        live = [_options(group) for group in self.obj.param_groups]
        for key in hyperparameters:
            if not _is_usual(captured) or not any(key in options for options in live):
                raise KeyError(key)
        groups, first = list(captured.state["param_groups"]), list(captured.record["first"])
        for source, options in zip(self._matched(captured).sources, live, strict=True):
            kept = {key: options[key] for key in hyperparameters if key in options}
            groups[source] = {**groups[source], **copy_tree(kept)}
            first[source] = {**first[source], **copy_tree(kept)}
        record = {**captured.record, "first": first}
        return Captured({**captured.state, "param_groups": groups}, record, captured.transfer)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _is_usual(captured: Captured) -> bool:
    """Tell whether a `state_dict` has torch's form, which some optimizers replace by their own."""
    state, slots = captured.state, captured.record["slots"]
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and [len(group["params"]) for group in groups] == [len(row) for row in slots]


def _target(key: str, saved: Any, live: Any, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return memory for a saved tensor where torch will leave it; None when that is not known."""
    if hasattr(saved, "to_local"):
        same = (
            type(live) is type(saved) and live.placements == saved.placements and live.device_mesh == saved.device_mesh
        )
        return live if same and local_part(saved).numel() and _alike(local_part(live), local_part(saved)) else None
    if type(saved) is not torch.Tensor or not is_plain(saved) or not saved.numel():
        return None
    if type(live) is torch.Tensor and not live.requires_grad and _alike(live, saved):
        return live
    if key != "step" and not parameter.is_cpu and saved.is_cpu and saved.size() == parameter.size():
        return torch.empty_strided(saved.size(), saved.stride(), dtype=saved.dtype, device=parameter.device)
    return None


def _alike(live: torch.Tensor, saved: torch.Tensor) -> bool:
    return (
        is_plain(live)
        and is_plain(saved)
        and live.dtype == saved.dtype
        and live.size() == saved.size()
        and live.stride() == saved.stride()
        and has_own_copies(live)
    )


def _like(live: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what moves a tensor option to the device of the live ones; torch moves state, but not options."""
    devices = {value.device for value in live.values() if isinstance(value, torch.Tensor)}
    return lambda tensor: tensor.to(next(iter(devices), tensor.device), copy=True)


def _uncast(saved: Any, live: Any) -> Any:
    """Return `live`, or `saved` where loading changed its type: torch casts floating state to the parameter's dtype.

    What an optimizer's own `load_state_dict` has made of the state otherwise is left as it is.
    """
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        if saved.dtype == live.dtype or saved.size() != live.size() or saved.layout != live.layout:
            return live
        exact = saved.to(live.device)
        return exact if _same_bits(exact.to(live.dtype), live) else live
    if isinstance(saved, str) and isinstance(live, str):
        return saved if live.startswith("<generator object ") else live  # torch rebuilds any iterable from its parts
    if isinstance(saved, dict) and isinstance(live, dict) and saved.keys() == live.keys():
        result = saved.copy()  # an OrderedDict or Counter has become a plain dict
        for key, value in saved.items():
            result[key] = _uncast(value, live[key])
        return result
    if isinstance(saved, set | frozenset) and type(live) is type(saved) and len(live) == len(saved):
        return saved  # has no order in which its elements could be compared
    if isinstance(saved, list | tuple) and type(live) is type(saved) and len(live) == len(saved):
        return type(saved)(map(_uncast, saved, live))
    return live


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = local_part(one), local_part(other)  # between ranks, this would be something that all do at once
    if one.layout is not torch.strided:
        return True  # no view of its bytes; and nothing but a cast changes a dtype and keeps the size
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
