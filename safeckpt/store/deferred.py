"""Delete and replace large files, and directories of them, in the background.

A name goes at once. The pages and blocks behind it go when the last descriptor is closed, and for a large file that
takes a third of the time that writing it took. So a descriptor is opened before the name is removed, and a thread
closes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING

from safeckpt.store import disk
from safeckpt.system.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["delete", "replace", "run", "wait"]

_held: set[disk.Handle] = set()  # of files without a name, in this process
_threads: list[threading.Thread] = []


def delete(path: Path) -> None:
    """Delete a file; its space comes back a moment later.

    Raises:
        OSError: It could not be deleted, and is as it was.
    """
    with _freed_later(path):
        disk.unlink(path)


def run(work: Callable[[], object]) -> None:
    """Do something in a thread, or at once where none can be started; it must not raise."""
    thread = threading.Thread(target=work, name="safeckpt-free", daemon=True)
    _threads.append(thread)  # first, since an interrupted start may leave it running
    if not start(thread):
        work()


def replace(source: Path, target: Path) -> None:
    """Give a file another name, atomically; the space of what had that name comes back a moment later.

    Raises:
        OSError: Nothing has changed.
    """
    with _freed_later(target):
        disk.replace(source, target)


def wait() -> None:
    """Return when all space has come back: a disk that looks full may not be."""
    while _threads:
        with contextlib.suppress(IndexError, ValueError):  # another thread waited for it too
            thread = _threads[-1]
            if thread.is_alive():  # one that begins after this finds its file closed
                thread.join()
            _threads.remove(thread)


@contextlib.contextmanager
def _freed_later(path: Path) -> Iterator[None]:
    handle = disk.hold(path)
    if handle is None:
        yield
        return
    _held.add(handle)
    with contextlib.ExitStack() as closing:
        closing.callback(_close, handle)
        yield
        run(functools.partial(_close, handle))
        closing.pop_all()


def _close(handle: disk.Handle) -> None:
    with contextlib.suppress(KeyError):  # closed by the other of the two that may call this, after an interrupt
        _held.remove(handle)
        handle.close()


def _forget() -> None:
    """Let go of what the parent is about to free: a forked loader worker would keep the space for its lifetime."""
    _threads.clear()
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
