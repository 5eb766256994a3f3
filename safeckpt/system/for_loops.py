"""Who asks an iterator for its next item: a `for` statement, or a call of `next`; and what loop is around it."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import opcode
import sys
import sysconfig
from types import FrameType
from typing import Final, NamedTuple

from safeckpt.system.warn import is_library

__all__ = ["RangeLoop", "enclosing_range_loop", "is_asked_by_for_loop"]

_INSTALLED: Final = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    "<frozen ",  # the standard library's too: what `python -m` runs a module from
)

_FOR = opcode.opmap["FOR_ITER"]
_YIELD_FROM = opcode.opmap["SEND"]
_BACKWARD = {number for name, number in opcode.opmap.items() if "BACKWARD" in name}


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


class RangeLoop(NamedTuple):
    """A loop `for name in range(...)` that begins at a fixed number.

    Attributes:
        text: Its head, as it is written.
        passed: How many of its bodies are behind.
    """

    text: str
    passed: int


def enclosing_range_loop() -> RangeLoop | None:
    """Return the loop around the `for` that asks for a batch, where it is one over `range(n)` or `range(1, n + 1)`.

    None where another loop is around it as well, since then nobody can say what the numbers count; or where one may be,
    in code without source.
    """
    frame: FrameType | None = sys._getframe(1)
    found: RangeLoop | None = None
    is_innermost = True  # the loop over the batches, or generators that wrap it
    while frame is not None:
        if not _is_installed(frame):
            loops = _loops_around(frame)
            if loops is None:
                return None
            for loop in loops:
                if is_innermost:
                    is_innermost = False
                    continue
                here = _range_loop(loop, frame)
                if here is None:
                    return None
                found = found or here
        frame = frame.f_back
    return found


def _is_installed(frame: FrameType) -> bool:
    """Return whether a frame is of this library or of another one."""
    return is_library(frame.f_globals.get("__name__", "")) or frame.f_code.co_filename.startswith(_INSTALLED)


def _loops_around(frame: FrameType) -> list[ast.stmt] | None:
    """Return the loops that hold the line at which a frame is, innermost first; None of a loop without source."""
    lines = linecache.getlines(frame.f_code.co_filename)
    if not lines:  # what `python -c` and `exec` run
        return None if _BACKWARD.intersection(frame.f_code.co_code[::2]) else []
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a cell of a notebook with a command in it
        return None
    line = frame.f_lineno
    blocks = (ast.For, ast.While, ast.FunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, blocks)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    around.sort(key=lambda node: node.lineno, reverse=True)
    inner = itertools.takewhile(lambda node: not isinstance(node, ast.FunctionDef), around)
    return list(inner)


def _range_loop(loop: ast.stmt, frame: FrameType) -> RangeLoop | None:
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[*start, stop])):
            first = start[0].value if len(start) == 1 and isinstance(start[0], ast.Constant) else 0
            value = {**frame.f_globals, **frame.f_locals}.get(name)
            if (start and not isinstance(start[0], ast.Constant)) or type(value) is not int or type(first) is not int:
                return None
            if any(isinstance(node, ast.Sub | ast.FloorDiv) for node in ast.walk(stop)):
                return None  # what is left, worked out by hand
            return RangeLoop(ast.unparse(loop).partition("\n")[0], value - first)
    return None
