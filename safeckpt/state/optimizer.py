"""Optimizers: state and options of every parameter, matched by the parameter's name, never by position alone.

Torch stores optimizer state by position. When the model registers its layers in another order, every moment
lands on another parameter of the same shape, without a word. So each saved position carries the parameter's
qualified name, shape and dtype, and the state is put in the live order before torch sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from safeckpt.state.component import Captured, Component, Order, class_name
from safeckpt.state.guard import Guard
from safeckpt.state.tree import copy_tree, join, map_tensors, named_tensors

__all__ = ["OptimizerComponent"]

# Keys of a param group that describe the group, not how it is optimised.
_NOT_OPTIONS = frozenset({"params", "param_names"})
_DRIVEN = frozenset({"lr"})  # what any scheduler moves
_CYCLED = frozenset({"momentum", "betas", "base_momentum", "max_momentum"})  # and what a cyclic one moves as well


class OptimizerComponent(Component):
    """A `torch.optim.Optimizer`.

    Args:
        name: Name under which the user registered it.
        obj: The optimizer.
        names: Qualified name of every parameter that a registered module owns, by id of the parameter; all names
            of a parameter that has several.
        scheduled: True when a registered scheduler drives it, so that a moving lr is no news.
    """

    kind = "optimizer"
    order = Order.OPTIMIZER

    def __init__(self, name: str, obj: Optimizer, names: Mapping[int, Sequence[str]], *, scheduled: bool) -> None:
        super().__init__(name, obj)
        self._names = names
        self._scheduled = scheduled

    def _slots(self) -> list[list[tuple[tuple[str, ...], torch.Tensor]]]:
        """Return (names, parameter) for each position of each group.

        A parameter of no registered module is called by its position, which its shape and dtype then have to confirm.
        """
        return [
            [
                (tuple(self._names.get(id(parameter), (f"group {index} position {position}",))), parameter)
                for position, parameter in enumerate(group["params"])
            ]
            for index, group in enumerate(self.obj.param_groups)
        ]

    def capture(self) -> Captured:
        """Return torch's own `state_dict`, and name, shape and dtype of every position beside it."""
        record = {
            "class": class_name(self.obj),
            # A scheduler warns, wrongly, after a restart when it cannot see that a step was made before.
            "stepped": bool(getattr(self.obj, "_opt_called", False)),
            "slots": [
                [
                    {"name": names[0], "shape": list(parameter.size()), "dtype": str(parameter.dtype)}
                    for names, parameter in group
                ]
                for group in self._slots()
            ],
        }
        return Captured(_without_grad(self.obj.state_dict()), record)

    def check(self, captured: Captured) -> list[str]:
        """Compare classes, and find for every live parameter the saved one of its name, shape and dtype."""
        found = super().check(captured)
        if not found:
            found = self._match(captured)[1]
        if not found:
            found = self._check_positional_state(captured)
        return found

    def _match(self, captured: Captured) -> tuple[list[list[tuple[int, int]]], list[str]]:
        """Return the saved (group, position) for each live position, and what does not match."""
        saved = {
            slot["name"]: (index, position, slot)
            for index, group in enumerate(captured.record["slots"])
            for position, slot in enumerate(group)
        }
        found: list[str] = []
        mapping: list[list[tuple[int, int]]] = []
        for group in self._slots():
            row = []
            for names, parameter in group:
                name = next((name for name in names if name in saved), None)
                if name is None:
                    found.append(f"{self.name}: no saved state for parameter {names[0]}, which the optimizer now holds")
                    continue
                index, position, slot = saved.pop(name)
                row.append((index, position))
                found += self._check_slot(name, slot, parameter)
            mapping.append(row)
        found += [f"{self.name}: saved with parameter {name}, which the optimizer no longer holds" for name in saved]
        if not found:
            found = self._check_groups(captured, mapping)
        return mapping, found

    def _check_slot(self, name: str, slot: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
        found = []
        if list(slot["shape"]) != list(parameter.size()):
            found.append(f"{self.name}: {name} had shape {slot['shape']}, now {list(parameter.size())}")
        if slot["dtype"] != str(parameter.dtype):
            found.append(f"{self.name}: {name} had dtype {slot['dtype']}, now {parameter.dtype}")
        return found

    def _check_groups(self, captured: Captured, mapping: list[list[tuple[int, int]]]) -> list[str]:
        sizes = [len(group) for group in captured.record["slots"]]
        taken = [{index for index, _ in row} for row in mapping]
        whole = all(
            len(groups) <= 1 and (not row or sizes[row[0][0]] == len(row))
            for groups, row in zip(taken, mapping, strict=True)
        )
        if len(mapping) == len(sizes) and whole:
            return []
        saved = [[slot["name"] for slot in group] for group in captured.record["slots"]]
        live = [[names[0] for names, _ in group] for group in self._slots()]
        return [f"{self.name}: the parameters were grouped as {saved}, now as {live}"]

    def _check_positional_state(self, captured: Captured) -> list[str]:
        """Refuse a new order where one tensor of state spans several parameters (LBFGS keeps flat vectors)."""
        mapping, _ = self._match(captured)
        if [row for row in mapping if row] == [
            [(index, position) for position in range(len(group))]
            for index, group in enumerate(captured.record["slots"])
            if group
        ]:
            return []
        names = [name for group in captured.record["slots"] for name in group]
        indices = [number for group in captured.state["param_groups"] for number in group["params"]]
        for number, slot in zip(indices, names, strict=True):
            numel = 1
            for size in slot["shape"]:
                numel *= size
            for key, tensor in named_tensors(captured.state["state"].get(number, {})):
                if tensor.numel() > numel:
                    where = f"{key} of {slot['name']} spans several of them"
                    return [f"{self.name}: the parameters are in another order, and {where}"]
        return []

    def _mapped(self, captured: Captured) -> dict[str, Any]:
        """Return the saved state in the live order, sharing nothing with `captured`."""
        mapping, _ = self._match(captured)
        saved_groups = captured.state["param_groups"]
        live_groups = self.obj.state_dict()["param_groups"]
        # An empty group has no name to be found by; it keeps its place.
        sources = [row[0][0] if row else index for index, row in enumerate(mapping)]
        numbers: dict[int, int] = {}
        groups = []
        for source, row, live in zip(sources, mapping, live_groups, strict=True):
            group = {
                key: copy.deepcopy(value) for key, value in saved_groups[source].items() if key not in _NOT_OPTIONS
            }
            group["params"] = list(live["params"])
            if "param_names" in live:
                group["param_names"] = list(live["param_names"])
            groups.append(group)
            for (saved_group, position), number in zip(row, live["params"], strict=True):
                numbers[saved_groups[saved_group]["params"][position]] = number
        state = {numbers.get(key, key): value for key, value in captured.state["state"].items()}
        extra = {key: value for key, value in captured.state.items() if key not in ("state", "param_groups")}
        return {**copy_tree({**extra, "state": state}), "param_groups": groups}

    def apply(self, captured: Captured) -> None:
        """Load through the optimizer's own method, then undo its casts: moments keep the dtype they were saved with."""
        mapped = self._mapped(captured)
        devices = [
            {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
            for group in self.obj.param_groups
        ]
        for group, where in zip(mapped["param_groups"], devices, strict=True):
            for key, device in where.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key] = group[key].to(device)  # torch moves state to the device, tensor options it does not
        self.obj.load_state_dict(mapped)
        parameters = [parameter for group in self.obj.param_groups for parameter in group["params"]]
        numbers = [number for group in mapped["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in mapped["state"]:
                live = self.obj.state[parameter]
                for key, value in mapped["state"][number].items():
                    if key != "step":  # its device follows `fused` and `capturable`, which torch has handled
                        live[key] = _uncast(value, live.get(key), parameter.device)
        if captured.record["stepped"]:
            self.obj._opt_called = True

    def guarded(self, captured: Captured, guard: Guard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `optimizer.<parameter name>.<key>` for state, `optimizer.<group>.<option>` for tensor options."""
        if not guard.optimizer:
            return
        state = dict(captured.state)
        names: dict[Any, str] = {}
        for group, slots in zip(state.get("param_groups", ()), captured.record["slots"], strict=False):
            names.update((number, slot["name"]) for number, slot in zip(group["params"], slots, strict=True))
        for number, entry in state.pop("state", {}).items():
            yield from named_tensors(entry, join(self.name, names.get(number, number)))
        yield from named_tensors(state, self.name)

    def _options(self, captured: Captured) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield (option, name for people, live value, saved value) for every option of every group."""
        mapping, _ = self._match(captured)
        several = len(mapping) > 1
        for index, (row, live) in enumerate(zip(mapping, self.obj.param_groups, strict=True)):
            saved = captured.state["param_groups"][row[0][0] if row else index]
            for key in (saved.keys() | live.keys()) - _NOT_OPTIONS:
                name = f"{self.name}.{key} (group {index})" if several else f"{self.name}.{key}"
                yield key, name, live.get(key), saved.get(key)

    def replaced(self, captured: Captured) -> list[str]:
        """Return the options that differ and that no scheduler moves."""
        moving = set(_DRIVEN) if self._scheduled else set()
        if self._scheduled and any("max_momentum" in group for group in captured.state["param_groups"]):
            moving |= _CYCLED
        # `initial_lr` is what a scheduler's constructor noted down: absent from the file when it came later.
        if not self._scheduled:
            moving.add("initial_lr")
        return sorted(
            f"{name}: {_shown(live)} -> {_shown(saved)}"
            for key, name, live, saved in self._options(captured)
            if key not in moving and not _same(live, saved)
        )

    def keep(self, captured: Captured, hyperparameters: Collection[str]) -> Captured:
        """Return `captured` with the live values of these options in every group."""
        mapping, _ = self._match(captured)
        groups = list(captured.state["param_groups"])
        for index, (row, live) in enumerate(zip(mapping, self.obj.param_groups, strict=True)):
            source = row[0][0] if row else index
            for key in hyperparameters:
                if key in _NOT_OPTIONS or key not in live:
                    raise KeyError(key)
                groups[source] = {**groups[source], key: copy.deepcopy(live[key])}
        return Captured({**captured.state, "param_groups": groups}, captured.record)


def _without_grad(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with tensors detached: they would come back requiring gradients."""
    return map_tensors(state, lambda tensor: tensor.detach())  # type: ignore[no-any-return]


def _uncast(saved: Any, live: Any, device: torch.device) -> Any:
    if isinstance(saved, torch.Tensor):
        if isinstance(live, torch.Tensor) and live.dtype == saved.dtype:
            return live
        return saved.to(live.device if isinstance(live, torch.Tensor) else device)
    if isinstance(saved, dict) and isinstance(live, dict):
        return {key: _uncast(value, live.get(key), device) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        return [_uncast(value, other, device) for value, other in zip(saved, live, strict=True)]
    return saved  # torch rebuilds any iterable, a string becomes a generator's text


def _same(live: Any, saved: Any) -> bool:
    if isinstance(live, torch.Tensor) or isinstance(saved, torch.Tensor):
        return (
            live is not None and saved is not None and bool(torch.as_tensor(live).cpu().equal(torch.as_tensor(saved)))
        )
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        return list(live) == list(saved)
    return bool(live == saved)


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
