"""A second process that works on the store: started fresh, told what to do line by line, killed when done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import safeckpt.store

if TYPE_CHECKING:
    from types import TracebackType

_PACKAGE = Path(safeckpt.store.__file__).parents[1]

# Importing the package the usual way imports torch, which takes seconds and is not needed for a file system.
PRELUDE = f"""
import sys, types
package = types.ModuleType("safeckpt")
package.__path__ = [{str(_PACKAGE)!r}]
sys.modules["safeckpt"] = package
import json, os, signal, time
from pathlib import Path
from safeckpt.errors import DirectoryLockedError
from safeckpt.store import *
from safeckpt.store import holder
"""

_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    try:
        result = eval(line)
    except BaseException as error:
        result = error
    print(repr(result), flush=True)
"""


class Process:
    """A Python process that evaluates an expression and answers with its repr, one after the other."""

    def __init__(self, setup: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + setup + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, expression: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
