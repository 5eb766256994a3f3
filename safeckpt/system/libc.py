"""Hints to the operating system that Python has no function for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["linux_call", "set_default_action"]


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


def set_default_action(number: int) -> None:
    """Give a signal its default action. Python lets only the main thread do so."""
    call = linux_call("signal", ctypes.c_int, ctypes.c_void_p)
    if call is not None:
        call(number, None)  # SIG_DFL
