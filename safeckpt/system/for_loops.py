"""Who asks an iterator for its next item: a `for` statement, or a call of `next`."""

from __future__ import annotations

import inspect
import opcode
import sys
from types import FrameType

from safeckpt.system.warn import is_library

__all__ = ["is_asked_by_for_loop"]

_FOR = opcode.opmap["FOR_ITER"]
_YIELD_FROM = opcode.opmap["SEND"]


def is_asked_by_for_loop() -> bool:
    """Return whether a `for` of the caller is at its head, through generators that wrap the iterator as well.

    Then everything in its body is behind. Of `next(iterator)` nobody can say what the code before it belongs to.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    while frame is not None:
        code = frame.f_code
        at = code.co_code[frame.f_lasti]  # a copy without what the interpreter has specialised
        if not code.co_flags & inspect.CO_GENERATOR:
            return at == _FOR
        if at not in (_FOR, _YIELD_FROM):
            return False
        frame = frame.f_back
    return False
