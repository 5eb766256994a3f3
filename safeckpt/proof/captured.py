"""What a checkpoint holds, value by value: the part of a run's state that a resume is responsible for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from safeckpt.proof.leaves import Leaf, flatten, leaf
from safeckpt.state.component import Captured, Component
from safeckpt.state.run_state import RESERVED_KEY, capture
from safeckpt.state.tree import join

__all__ = ["CAPTURED", "FIRST_TO_BLAME", "GRADIENT", "SOFT", "captured_leaves", "named_values", "stream_key"]

GRADIENT = "gradient"
STREAM = "random stream"
_POSITION = "its position"
# When several parts differ after the same step, the earlier kind is the cause: a mode, a random stream or an lr
# changes what is computed; weights and moments only show it.
FIRST_TO_BLAME = (
    "mode", "flag", "position", STREAM, "counter", "schedule", "state", "option", "buffer", GRADIENT,
    "weight", "moment",
)  # fmt: skip
# A foreign loader may describe one and the same position in two ways: it is named, and never decides.
FOREIGN_POSITION = "loader state"
SOFT = frozenset({FOREIGN_POSITION})
CAPTURED = frozenset(FIRST_TO_BLAME) | SOFT


def captured_leaves(components: Mapping[str, Component]) -> dict[str, Leaf]:
    """Return everything that a checkpoint would hold now, and the gradients, by dotted name. Changes nothing."""
    state = capture(components)
    reserved = state.payload[RESERVED_KEY]
    found = {name: leaf(kind, value) for name, kind, value in named_values(state.pairs)}
    found |= {name: one._replace(shown=_POSITION) for name, one in found.items() if one.kind == STREAM}
    for stream, state in reserved["rng"].items():
        if stream == "devices":
            for kind, states in state.items():
                for index, one in enumerate(states):
                    found[f"rng.{kind}:{index}"] = _stream(one)
        else:
            found[f"rng.{stream}"] = _stream(state)
    for component in components.values():
        for name, parameter in component.parameter_names().items():
            if parameter.grad is not None:
                found[f"{name}.grad"] = leaf(GRADIENT, parameter.grad)
    return found


def stream_key(state: Any) -> str:
    """Return a key for a whole state of a generator: its words mean nothing to a person."""
    return " ".join(f"{name}={leaf(STREAM, value).key}" for name, value in flatten(state, ""))


def _stream(state: Any) -> Leaf:
    return Leaf(STREAM, stream_key(state), _POSITION)


def named_values(pairs: list[tuple[Component, Captured]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted name, kind, value) of captured components, from the live objects or from a file."""
    for component, one in pairs:
        yield from _KINDS.get(component.kind, _stateful)(component, one)


def _module(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
    for path, training in one.record["training"].items():
        yield join(join(component.name, path), "training"), "mode", training
    for path, requires_grad in one.record["requires_grad"].items():
        yield f"{component.name}.{path}.requires_grad", "flag", requires_grad
    for key, value in one.state.items():
        kind = "weight" if key in one.record["requires_grad"] else "buffer"
        for name, inner in flatten(value, join(component.name, key)):
            yield name, kind, inner


def _optimizer(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
    names: dict[Any, str] = {}
    groups = one.state["param_groups"]
    for index, (group, slots) in enumerate(zip(groups, one.record["slots"], strict=True)):
        names.update((number, slot["name"]) for number, slot in zip(group["params"], slots, strict=True))
        where = component.name if len(groups) == 1 else f"{component.name}.group {index}"
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, value in flatten(options, where):
            yield name, "option", value
    for number, entry in one.state["state"].items():
        for name, value in flatten(entry, join(component.name, names.get(number, number))):
            yield name, "moment", value
    for key, value in one.state.items():
        if key not in ("param_groups", "state"):
            for name, inner in flatten(value, join(component.name, key)):
                yield name, "state", inner


def _generator(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
    yield component.name, STREAM, stream_key(one.state["state"])


def _loader(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
    position = _position_of(one.state)
    kind = FOREIGN_POSITION if position is None else "position"
    for name, value in flatten(one.state if position is None else position, component.name):
        yield name, kind, value


def _position_of(state: Any) -> dict[str, Any] | None:
    """Return where a `ResumableLoader` stands; None for the state of another loader.

    What else is in its state says how to get there, and differs between an epoch that was begun and one that was
    gone on with.
    """
    fields = ("epoch", "batch", "seed", "left_out")
    if not isinstance(state, Mapping) or not all(field in state for field in fields):
        return None
    return {field: state[field] for field in fields}


def _kind_of(kind: str) -> Any:
    def values(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
        for name, value in flatten(one.state, component.name):
            yield name, kind, value

    return values


def _stateful(component: Component, one: Captured) -> Iterator[tuple[str, str, Any]]:
    for name, value in flatten(one.state, component.name):
        yield name, "weight" if isinstance(value, torch.Tensor) and value.numel() > 1 else "state", value


_KINDS = {
    "module": _module,
    "optimizer": _optimizer,
    "scheduler": _kind_of("schedule"),
    "generator": _generator,
    "loader": _loader,
    "counters": _kind_of("counter"),
    "scaler": _kind_of("state"),
}
