"""A process that does nothing but write the content of files: checksums and writes take no turn of training's.

It gets an open file, and memory that both processes have; it does to them what a thread would do here, by the same
code, and says how large the file is and what its digest is. Everything else stays with this process: the name of the
file, the sync, the check that it can be read, the commit.

It starts as a fresh interpreter, which sees neither the user's script nor torch nor a device, and ends when this
process does, however that ends: the connection between them is closed then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from mmap import PROT_READ, mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from safeckpt.errors import WritingProcessError
from safeckpt.file.writing.second_look import Bits, Guarded
from safeckpt.file.writing.stable_copies import Content, Memory
from safeckpt.file.writing.write import JoinedFile, PreparedFile, WrittenFile
from safeckpt.store.commit import NewFile
from safeckpt.system.host_memory import copy_small
from safeckpt.system.shared_memory import IS_SHARING_POSSIBLE, SharedMemory, shared_memory_at
from safeckpt.system.threads import Progress

__all__ = ["WritingProcess", "serve", "why_impossible"]

_PACKAGE_PARENT = str(Path(__file__).parents[2])
_START = (
    "import sys, json; number, sys.path[:] = sys.argv[1], json.loads(sys.argv[2]); "
    "from safeckpt.run.writing_process import serve; serve(int(number))"
)
# Of those that a scheduler or a terminal sends to every process of a job: what is done about them the trainer decides.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGTSTP")
    if hasattr(signal, name)
)  # fmt: skip
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_MOST_DESCRIPTORS = 64  # Linux hands over 253 at once
_GOODBYE_SECONDS = 5.0
_LOOKS_MILLISECONDS = 1000
_NOT_GUARDED = Guarded("", ())


def why_impossible() -> str | None:
    """Return why there can be no such process here; None when there can."""
    if not IS_SHARING_POSSIBLE:
        return "it needs memory that two processes share without a file, which only Linux has"
    if not sys.executable or getattr(sys, "frozen", False):
        return "it needs a Python interpreter to start, and this program is none"
    return None


@dataclasses.dataclass(frozen=True)
class _SharedBytes:
    """Bytes in memory that both processes have; a `Memory`."""

    memory: mmap | bytes
    low: int
    nbytes: int
    bits: Bits | None
    guarded: Guarded
    is_on_host: bool = True

    def copy_to(self, address: int) -> None:
        copy_small(address, np.frombuffer(self.view(), np.uint8).ctypes.data, self.nbytes)

    def view(self) -> memoryview:
        return memoryview(self.memory)[self.low : self.low + self.nbytes]

    def staged(self, low: int, high: int) -> memoryview:
        return memoryview(bytes(self.view()[low:high]))


# -- here ------------------------------------------------------------------------------------------------------------


class WritingProcess:
    """Writes files in a process of its own, which is started when it is first needed."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def write(self, prepared: PreparedFile | JoinedFile, f: IO[bytes], progress: Progress | None = None) -> WrittenFile:
        """Write a prepared file, see `PreparedFile.write`.

        Args:
            prepared: The file. What of it is not in shared memory is copied there first.
            f: Where to write; it has a descriptor.
            progress: As there, called in this thread.

        Raises:
            WritingProcessError: The process has ended before it was done; the next write starts another one.
            BaseException: What was raised there, or by `progress`.
        """
        shared = prepared.with_contents(_in_shared_memory(prepared.contents))
        packed = io.BytesIO()
        packer = _Packer(packed)
        packer.dump((shared, progress is not None))
        child = self._running()
        try:
            child.send([f.fileno(), *(memory.descriptor for memory in packer.memories)], packed.getbuffer())
            while True:
                kind, message = child.receive()
                if kind == "progress" and progress is not None:
                    progress(*message)
                elif kind == "written":
                    return message  # type: ignore[no-any-return]
                elif kind == "raised":
                    break
        except BaseException:
            self._end()  # it may be in the middle of a write
            raise
        raise message

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _running(self) -> _Child:
        if self._child is None or not self._child.is_running:
            self.close()
            self._child = _Child()
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
        self.close()


class _Child:
    """The process, and the connection to it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._socket, other = socket.socketpair()
        for one in (self._socket, other):
            one.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        self._connection = Connection(os.dup(self._socket.fileno()))
        path = json.dumps([*(one for one in sys.path if isinstance(one, str)), _PACKAGE_PARENT])
        # A new process has the signals blocked that the thread has which starts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with other:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own code
                    [sys.executable, "-P", "-c", _START, str(other.fileno()), path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    env={**os.environ, **_ONE_THREAD},
                )
        except BaseException:
            self.hang_up()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._ending = weakref.finalize(self, _end, self._pid, self._process, self._socket, self._connection)
        _of_this_process.add(self)

    @property
    def is_running(self) -> bool:
        """Whether it is a process of this one, and there."""
        return self._pid == os.getpid() and self._process.poll() is None

    def send(self, descriptors: Sequence[int], message: Any) -> None:
        """Send a message with descriptors."""
        try:
            socket.send_fds(self._socket, [b"\0"], descriptors)
            self._connection.send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._lost() from None

    def receive(self) -> Any:
        """Return what it says next."""
        # A process that was forked while this one was started may hold the other end open.
        while not self._connection.poll(_LOOKS_MILLISECONDS / 1000):
            if self._process.poll() is not None and not self._connection.poll():
                raise self._lost()
        try:
            message = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise self._lost() from None
        return pickle.loads(message)  # from our own code

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Let it end, which it does when there is nobody at the other end of its connection."""
        self._ending()

    def hang_up(self) -> None:
        """Close the connection."""
        _hang_up(self._socket, self._connection)

    def _lost(self) -> WritingProcessError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECONDS)
        self.kill()  # where it is there and cannot be talked to
        return WritingProcessError(pid=self._process.pid, exit_code=self._process.wait())


def _hang_up(sock: socket.socket, connection: Connection) -> None:
    sock.close()
    with contextlib.suppress(OSError):
        connection.close()


def _end(pid: int, process: subprocess.Popen[bytes], sock: socket.socket, connection: Connection) -> None:
    _hang_up(sock, connection)
    if pid != os.getpid():
        return
    try:
        process.wait(_GOODBYE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_of_this_process: weakref.WeakSet[_Child] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """Close what a forked child has inherited: the writing process would outlive the one that it belongs to."""
    for one in list(_of_this_process):
        one.hang_up()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hang_up_in_child)


def _in_shared_memory(contents: Sequence[Content]) -> dict[int, Content]:
    """Return by id what stands for contents in the other process; what is not shared yet is copied."""
    found: dict[int, Content] = {}
    left: list[tuple[Memory, memoryview]] = []
    for content in contents:
        if isinstance(content, bytes):
            continue
        if not content.nbytes:
            found[id(content)] = _of_memory(content, b"", 0)
            continue
        view = content.view() if content.is_on_host else content.staged(0, content.nbytes)
        address = np.frombuffer(view, np.uint8).ctypes.data
        memory = shared_memory_at(address)
        if memory is None:
            left.append((content, view))
        else:
            found[id(content)] = _of_memory(content, memory, address - memory.address)
    if left:
        more = SharedMemory(sum(len(view) for _, view in left))
        end = 0
        for content, view in left:
            np.copyto(np.frombuffer(more, np.uint8, len(view), end), np.frombuffer(view, np.uint8))
            found[id(content)] = _of_memory(content, more, end)
            end += len(view)
    return found


def _of_memory(content: Memory, memory: SharedMemory | bytes, low: int) -> _SharedBytes:
    guarded = _NOT_GUARDED if content.bits is None else content.guarded
    return _SharedBytes(memory, low, content.nbytes, content.bits, guarded)


class _Packer(pickle.Pickler):
    """Pickles what is to be written, with numbers in the place of memory."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.memories: list[SharedMemory] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, SharedMemory):
            return None
        if obj not in self.memories:
            self.memories.append(obj)
        return self.memories.index(obj)


# -- there -----------------------------------------------------------------------------------------------------------


class _Unpacker(pickle.Unpickler):
    """Reads what `_Packer` has made."""

    def __init__(self, data: bytes, memories: Sequence[mmap]) -> None:
        super().__init__(io.BytesIO(data))
        self._memories = memories

    def persistent_load(self, persistent_id: int) -> mmap:
        return self._memories[persistent_id]


def serve(descriptor: int) -> None:
    """Write what is asked for at a connection, until nobody is at its other end."""
    threading.Thread(target=_end_with_trainer, args=(descriptor, os.getppid()), daemon=True).start()
    with socket.socket(fileno=descriptor) as sock, Connection(os.dup(descriptor)) as connection:
        while True:
            _, descriptors, _, _ = socket.recv_fds(sock, 1, _MOST_DESCRIPTORS)
            if not descriptors:
                return
            connection.send_bytes(_answer(connection, *descriptors))
            gc.collect()  # an error and its traceback hold each other, and with them what was mapped


def _end_with_trainer(descriptor: int, parent: int) -> None:
    """End this process, also in the middle of a write, when the one that it writes for has gone."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not poll.poll(_LOOKS_MILLISECONDS) and os.getppid() == parent:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(connection: Connection, file: int, *memories: int) -> bytes:
    """Write one file, and return what came of it, pickled."""
    try:
        request = connection.recv_bytes()  # first: what is left unread would be taken for the next one
        with NewFile(open(file, "r+b", buffering=0)) as f:
            try:
                maps = [mmap(memory, 0, prot=PROT_READ) for memory in memories]
            finally:
                for memory in memories:
                    os.close(memory)
            prepared, tells = _Unpacker(request, maps).load()

            def tell(done: int, total: int) -> None:
                connection.send_bytes(pickle.dumps(("progress", (done, total))))

            return pickle.dumps(("written", prepared.write(f, tell if tells else None)))
    except BaseException as error:  # noqa: BLE001 - raised again by who asked
        return pickle.dumps(("raised", error))
