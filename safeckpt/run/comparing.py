"""Comparing a captured state with a checkpoint, for a save of the step that was just saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safeckpt.distributed.fingerprint import holds_same
from safeckpt.state import RESERVED_KEY, Plan
from safeckpt.state.component import has_attribute

__all__ = ["is_equal"]


def is_equal(saved: Plan, captured: Mapping[str, Any]) -> bool:
    """Return whether a state that was read is the captured one, bit for bit.

    Cost:
        Two passes of SHA-256 over the state.
    """
    reserved = captured[RESERVED_KEY]
    before = {component.name: (one.state, one.record) for component, one in saved.pairs}
    ended = {component.name for component, one in saved.pairs if _has_ended_epoch(component.obj, one.state)}
    records = {
        name: {key: value for key, value in record.items() if key != "kind"}
        for name, record in reserved["components"].items()
    }
    now = {name: (captured[name], records[name]) for name in records}
    return before.keys() == now.keys() and all(
        holds_same(one, other)
        for one, other in (
            *((before[name], now[name]) for name in now if name not in ended),
            (saved.rng, reserved["rng"]),
            (saved.gradients, reserved["gradients"]),
        )
    )


def _has_ended_epoch(obj: Any, state: Any) -> bool:
    """Return whether a loader has done no more since this state than end its epoch, as it does after the inner loop."""
    return has_attribute(obj, "is_at_end_of") and bool(obj.is_at_end_of(state))
