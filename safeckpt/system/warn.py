"""Warnings that point at the caller's line, from whatever depth of the library they come."""

from __future__ import annotations

import sys
import warnings

__all__ = ["is_library", "warn_caller"]

_BETWEEN = frozenset({"contextlib", "functools", "threading"})  # frames of Python between two of ours


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the first line on the stack that is not the library's own."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def is_library(module: str) -> bool:
    """Return whether a module is part of this library, or of what Python puts between two of its functions."""
    return module.partition(".")[0] == "safeckpt" or module in _BETWEEN
