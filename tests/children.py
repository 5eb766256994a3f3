"""Child processes that share nothing with this one but files: each is forked from a server that has imported torch.

Importing torch takes seconds and a fork takes milliseconds. The server has built no object, drawn no random number
and touched no device, so that a child is as good as a fresh process. Functions are found by name in the child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import warnings
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import _utils as torch_data

import safeckpt  # noqa: F401  the server imports this module so that its children need not
from tests.faults import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_MOST_SECONDS = 120

_context = multiprocessing.get_context("forkserver")
# What most children import sooner or later: each would take its seconds for it.
_preloaded = [
    __name__, "pytest", "sklearn.datasets", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.profiler", "filelock", "safeckpt.manager", "safeckpt.functional", "safeckpt.loader", "tests.training",
]  # fmt: skip
_context.set_forkserver_preload(_preloaded)


def preload(*modules: str) -> None:
    """Have the server import more modules, where it has not started yet; without it each child imports them itself."""
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Let the server find this module from any working directory."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def look_often_for_workers() -> None:
    """Have DataLoaders look often whether a worker or its parent is there, and wait as long for one that has to end.

    By torch's own interval of five seconds the workers of a killed child hold its connection; two that hang take 20.
    """
    torch_data.MP_STATUS_CHECK_INTERVAL = 0.5


def _main(connection: Connection, function: Callable[..., Any], arguments: Any, options: Any, *, talks: bool) -> None:
    gc.freeze()  # what the server has imported is no garbage, and a collection would copy its pages
    torch.set_num_threads(1)
    look_often_for_workers()
    # As in a script on Linux. By the way in which this child was started each worker would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork")
    faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)  # one that hangs says where
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = (function(*([connection] if talks else []), *arguments, **options), None)
    except BaseException as error:
        outcome = (None, error)
    connection.send(outcome)


class Child:
    """A process that runs `function(connection, *arguments)`; the other end of its connection is here."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, talks: bool = True, **options: Any) -> None:
        self.connection, other = _context.Pipe()
        self._process = _context.Process(
            target=_main, args=(other, function, arguments, options), kwargs={"talks": talks}
        )
        with _importable():
            forkserver.ensure_running()
        self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def receive(self) -> Any:
        """Return what the child sent; EOFError when it is dead, whoever else has its end of the connection still."""
        wait([self.connection, self._process.sentinel])
        if not self.connection.poll():
            raise EOFError
        try:
            return self.connection.recv()
        except OSError:  # also in the middle of a message
            raise EOFError from None

    def ask(self, question: Any) -> Any:
        self.connection.send(question)
        return self.receive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def ended(self) -> Ended:
        """Wait for the end; what it sent before is passed over."""
        outcome: Any = (None, None)
        with contextlib.suppress(EOFError):
            while True:
                outcome = self.receive()
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        if code < 0:
            return Ended(signal.Signals(-code))
        assert code == 0, "the child hung, or ended by itself"
        value, error = outcome
        return Ended(None, value, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self.connection.close()
        self._process.close()


def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Ended:
    """Run a function in a child, wait for its end, and return how it ended."""
    with Child(function, *arguments, talks=False, **options) as child:
        return child.ended()
