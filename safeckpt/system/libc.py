"""Hints to the operating system that Python has no function for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["linux_call"]


def linux_call(name: str, *argument_types: Any) -> Callable[..., int] | None:
    """Return a function of the C library that takes these types and returns an int; None where there is none such.

    Elsewhere than on Linux a call of the same name may do nothing, or more than a hint.
    """
    if sys.platform != "linux":
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except AttributeError:  # a C library without it
        return None
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]
