"""The loss of a step: a number, a tensor, a NumPy value, or dicts and lists of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["as_floats", "as_numbers"]


def as_numbers(loss: Any) -> Any:
    """Return a loss with the tensors and NumPy values in it as Python numbers, each device read once."""
    if type(loss) is float:
        return loss
    if isinstance(loss, torch.Tensor | np.ndarray | np.generic):
        return loss.tolist()
    if isinstance(loss, Mapping):
        return {key: as_numbers(value) for key, value in loss.items()}
    if isinstance(loss, list | tuple):
        return [as_numbers(value) for value in loss]
    return loss


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
