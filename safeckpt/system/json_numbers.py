"""Floats in JSON, which has no word for NaN and infinities."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["from_json", "to_json"]


def to_json(value: Any) -> Any:
    """Return floats, and dicts and lists of them, with NaN and infinities as strings: JSON has no word for them."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return float(value) if isinstance(value, str | int) else value
