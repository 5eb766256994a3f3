"""What a state is that another tool has saved, by its form: of an optimizer, a scheduler, a scaler, or of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from safeckpt.state.tree import named_leaves
from safeckpt.system.text import size

__all__ = ["described", "is_optimizer_state", "steps_counted", "why_not"]

# The names that everybody gives, with a number where there are several; any other name may be of anything.
_USUAL = re.compile(r"(model|optimizer|scheduler|scaler)[_0-9]*")
_FORMS = {
    "model": "tensors by name, as of a model",
    "optimizer": "the state of an optimizer",
    "scheduler": "the state of a scheduler",
    "scaler": "the state of a scaler",
}


def is_optimizer_state(state: Any) -> bool:
    """Return whether a state has the form of that of an optimizer."""
    return (
        isinstance(state, Mapping)
        and isinstance(state.get("param_groups"), list)
        and isinstance(state.get("state"), Mapping)
    )


def _form_of(state: Any) -> str | None:
    """Return which of `_FORMS` a state has; None where it may be of anything."""
    if not isinstance(state, Mapping) or not state:
        return None
    if is_optimizer_state(state):
        return "optimizer"
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        return "model"
    if "last_epoch" in state:
        return "scheduler"
    return "scaler" if {"scale", "growth_factor"} <= state.keys() else None


def why_not(name: str, key: str, state: Any) -> str | None:
    """Return why something cannot be the state of a component, as a sentence; None where it can.

    Args:
        name: Of the component.
        key: Of what would be its state, in the source.
        state: That.
    """
    if state is None or isinstance(state, bool | int | float | complex | str | bytes | np.generic):
        return (
            f"{name}: {key!r} is {_shown(state)}, which is no state; an entry of a dict of counters is given as one, "
            f"counters.{key.rpartition('.')[2]}={key}"
        )
    usual, form = _USUAL.fullmatch(name), _form_of(state)
    if usual is None or form is None or form == usual[1]:
        return None
    if form == "model" and usual[1] != "optimizer":  # a scheduler or a scaler may keep its values in tensors, too
        return None
    return f"{name}: {key!r} is {_FORMS[form]}; where that is meant, give the component another name"


def steps_counted(state: Any) -> int | None:
    """Return how many steps the state of an optimizer has counted; None where it counts none, or is none."""
    if not is_optimizer_state(state):
        return None
    entries = (_number_in(entry.get("step")) for entry in state["state"].values() if isinstance(entry, Mapping))
    return max((int(step) for step in entries if math.isfinite(step)), default=None)


def _number_in(step: Any) -> float:
    """Return a count, which torch keeps as a number or in a tensor; NaN where it is neither."""
    if isinstance(step, torch.Tensor) and step.numel() == 1 and not step.is_complex():
        return float(step)
    return step if isinstance(step, int | float) else math.nan


def described(state: Any) -> str:
    """Return what there is in a state: its form, its tensors, its plain values, the steps it has counted."""
    leaves = [leaf for _, leaf in named_leaves(state)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    if not isinstance(state, Mapping | list | tuple) and not tensors:
        return _shown(state)
    form, steps = _form_of(state), steps_counted(state)
    values = 0 if form == "optimizer" else len(leaves) - len(tensors)
    parts = [] if form in (None, "model") else [_FORMS[form]]
    parts += [f"{_counted(len(tensors), 'tensor')}, {size(sum(one.nbytes for one in tensors))}"] if tensors else []
    parts += [_counted(values, "plain value")] if values or not parts else []
    parts += [] if steps is None else [f"at step {steps}"]
    return ", ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}" if value is not None else "None"
