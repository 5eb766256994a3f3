"""Faults at the one place where the store meets the operating system, and ways to look at what they leave.

`intercept(handler)` puts a handler between `safeckpt.store.disk` and its callers. Handlers: `Recorder` writes down
every operation, `Fault` makes one fail, `Kill` kills the process at one, `Interrupt` raises KeyboardInterrupt at one.
`in_child` runs a function in a forked process, for whatever ends a process or changes its limits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safeckpt.store import disk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

ALL_KINDS = frozenset(disk.__all__)


@dataclass(frozen=True)
class Operation:
    """One call of the seam: enough of it to do it again to a model of a disk."""

    kind: str
    path: str
    target: str | None = None  # replace: the new name
    offset: int | None = None  # write: where; an append goes to the end, whatever that is
    data: bytes | None = None  # write, append


def describe(kind: str, arguments: tuple[Any, ...]) -> Operation:
    """Describe a call that is about to be made."""
    first = arguments[0]
    path = str(first if isinstance(first, Path) else first.path if isinstance(first, disk.Handle) else first.name)
    if kind == "write":
        return Operation(kind, path, offset=first.tell(), data=bytes(arguments[1]))
    if kind == "append":
        return Operation(kind, path, data=bytes(arguments[1]))
    if kind == "replace":
        return Operation(kind, path, target=str(arguments[1]))
    return Operation(kind, path)


class Handler(Protocol):
    """Stands between the store and one operation."""

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any: ...


@contextlib.contextmanager
def intercept(handler: Handler) -> Iterator[None]:
    """Send every operation of the store through a handler, which makes the call or does not."""
    originals = {kind: getattr(disk, kind) for kind in ALL_KINDS}

    def route(kind: str, *arguments: Any) -> Any:
        return handler(describe(kind, arguments), functools.partial(originals[kind], *arguments))

    for kind in ALL_KINDS:
        setattr(disk, kind, functools.partial(route, kind))
    try:
        yield
    finally:
        for kind, original in originals.items():
            setattr(disk, kind, original)


class Recorder:
    """Makes every call and keeps what succeeded, in order; a write as what was really taken."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        result = call()
        if operation.kind == "write" and operation.data is not None:
            operation = Operation("write", operation.path, offset=operation.offset, data=operation.data[:result])
        self.operations.append(operation)
        return result

    @property
    def kinds(self) -> list[str]:
        return [operation.kind for operation in self.operations]


class _Nth:
    def __init__(self, number: int, kinds: Collection[str] = ALL_KINDS) -> None:
        assert set(kinds) <= ALL_KINDS
        self.number = number
        self.kinds = kinds
        self.seen = 0
        self.fired: Operation | None = None

    def is_due(self, operation: Operation) -> bool:
        if operation.kind not in self.kinds:
            return False
        self.seen += 1
        if self.seen == self.number:
            self.fired = operation
        return self.seen == self.number


class Fault(_Nth):
    """Fails call `number` (from 1) of the given kinds with an errno; with `for_good` every one after it too.

    `part_bytes` of a failing write reach the disk first. A failing close still closes, as close(2) does on Linux.
    After the block `fired` says which operation failed; a test that does not look at it may have tested nothing.
    """

    def __init__(
        self,
        number: int,
        error: int,
        kinds: Collection[str] = ALL_KINDS,
        *,
        part_bytes: int = 0,
        for_good: bool = False,
    ) -> None:
        super().__init__(number, kinds)
        self.error = error
        self.part_bytes = part_bytes
        self.for_good = for_good

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        due = self.is_due(operation)
        if not due and not (self.for_good and self.fired and operation.kind in self.kinds):
            return call()
        if operation.kind == "close":
            call()
        if operation.kind == "write" and self.part_bytes and isinstance(call, functools.partial):
            file, data = call.args
            file.write(data[: self.part_bytes])
        path = None if operation.kind in {"write", "sync", "sync_directory", "close"} else operation.path
        raise OSError(self.error, os.strerror(self.error), *([path] if path else []))


class Interrupt(_Nth):
    """Raises KeyboardInterrupt before or after call `number`."""

    def __init__(self, number: int, when: str, kinds: Collection[str] = ALL_KINDS) -> None:
        super().__init__(number, kinds)
        self.when = when

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if not self.is_due(operation):
            return call()
        if self.when == "after":
            call()
        raise KeyboardInterrupt


class Kill(_Nth):
    """Kills this process with SIGKILL before or after call `number`."""

    def __init__(self, number: int, when: str, kinds: Collection[str] = ALL_KINDS) -> None:
        super().__init__(number, kinds)
        self.when = when

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if not self.is_due(operation):
            return call()
        if self.when == "after":
            call()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Tracing:
    """Has `_trace` called by the interpreter while the block runs; what traced before goes on afterwards."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        raise NotImplementedError


class LineInterrupt(Tracing):
    """Raises KeyboardInterrupt at line event `number` (from 1) of the modules in a folder, while the block runs.

    `fired` says whether there were that many. Finalizers are left out: Python swallows whatever is raised in one.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = str(folder)
        self.seen = 0

    @property
    def fired(self) -> bool:
        return self.seen >= self.number

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder) or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.number:
                raise KeyboardInterrupt
        return self._trace


@dataclass(frozen=True)
class Ended:
    """How a child process ended: by a signal, or with what its function returned or raised."""

    signal: int | None
    value: Any = None
    error: BaseException | None = None


def in_child(function: Callable[[], Any]) -> Ended:
    """Run a function in a forked child, wait for its end, and return how it ended."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Threads of other tests' libraries may be running; the child touches none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(function, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Ended(os.WTERMSIG(status))
    value, error = pickle.loads(data)
    return Ended(None, value, error)


def _run_child(function: Callable[[], Any], write_end: int) -> None:
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = (function(), None)
    except BaseException as error:
        outcome = (None, error)
    try:
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(pickle.dumps(outcome))
    finally:
        os._exit(0)  # nothing of the parent's pytest may run twice


def as_nobody(function: Callable[[], Any]) -> Any:
    """Call a function without root's right to do everything; for a child process."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setuid(65534)
    return function()


def contents(directory: Path) -> dict[str, bytes]:
    """Return the exact content of a directory: every name below it, with its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def descriptor_count() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
