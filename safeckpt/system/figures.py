"""Pictures: matplotlib, which is an extra, without a display."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ENDINGS", "new_figure", "wants_log_scale"]

ENDINGS = (".png", ".svg", ".pdf")

_WIDE = 30.0  # largest to smallest value from which on a log scale shows more


def new_figure(width_inches: float, height_inches: float, what: str) -> Figure:
    """Return an empty figure; `savefig` writes it, 120 dots an inch.

    Args:
        width_inches: Its width.
        height_inches: Its height.
        what: What needs it, for the text of the error.

    Raises:
        ImportError: matplotlib is not installed; the text says how to get it.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(f'{what} needs matplotlib: pip install "safeckpt[plot]"') from error
    return Figure(figsize=(width_inches, height_inches), dpi=120, layout="constrained")


def wants_log_scale(values: Iterable[float]) -> bool:
    """Return whether values, those that are finite, are shown better on a log scale, and can be."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > _WIDE * min(finite)
