"""Checks of what callers pass in, shared by the methods of the manager."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["as_floats", "checked_metrics", "checked_step"]


def checked_step(step: Any) -> int:
    """Return a step as an int; a bool or a tensor is a mistake, a NumPy integer is fine."""
    if isinstance(step, bool | np.bool_ | torch.Tensor):
        raise TypeError(f"step must be an int, 0 or more; got {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, 0 or more; got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be an int, 0 or more; got {number}")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics must be a mapping from name to number; got {metrics!r}")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"metrics must be numbers or one-element tensors: {error}") from None


def as_floats(loss: Any) -> Any:
    """Return a loss as a float, or as dicts and lists of floats."""
    if loss is None:
        return None
    if isinstance(loss, Mapping):
        return {str(key): as_floats(value) for key, value in loss.items()}
    if isinstance(loss, list | tuple):
        return [as_floats(value) for value in loss]
    if isinstance(loss, torch.Tensor | np.ndarray):
        return as_floats(loss.tolist())
    return loss.real if isinstance(loss, complex) else float(loss)
