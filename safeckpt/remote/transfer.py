"""The bytes of checkpoints on their way: up as they are read, down into a file of the directory, and checked on both.

A transfer holds a few parts of 8 MiB in memory, whatever the size of the checkpoint. Going up, the digest is taken of
what is sent, and compared before the last part: a file that was damaged on the local disk does not become an object.
Going down, it is taken of what arrives, and compared before the file gets its name.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import INDEX, open_checkpoint, open_file
from safeckpt.file.checksum import ChunkDigest
from safeckpt.file.reading.source import Readable
from safeckpt.file.trailer import TRAILER_BYTES, Trailer
from safeckpt.remote import keys
from safeckpt.remote.client import PART_BYTES, Client
from safeckpt.remote.epochs import RemoteCheckpoint
from safeckpt.store import CheckpointDirectory

if TYPE_CHECKING:
    from safeckpt.file import CheckpointFile
    from safeckpt.system.threads import Progress

__all__ = ["RemoteFile", "Upload", "download", "fetch", "open_remote", "trailer_of"]

_AHEAD = 4  # parts that are read ahead of the one that is written
_FIRST_BYTES = 64 << 10  # of a look at a header or a trailer


# -- up --------------------------------------------------------------------------------------------------------------


class _Part:
    """One local file that is going up: open, so that it can be pruned meanwhile."""

    def __init__(self, path: Path, key: str, digest: str | None = None) -> None:
        self.key = key
        self.path = path
        self.file = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115 - closed by `Upload.close`
        self.size_bytes = os.fstat(self.file.fileno()).st_size
        self._digest = digest
        self._covered = self.size_bytes

    def send(self, client: Client) -> None:
        """Write the object: whole, or not at all.

        Raises:
            DamagedCheckpointError: The file is not what was saved.
        """
        self.file.seek(0)
        if self._digest is None:
            if self.size_bytes < TRAILER_BYTES:
                raise DamagedCheckpointError(path=self.path, reason=f"it has {self.size_bytes} bytes")
            trailer = Trailer.parse(
                os.pread(self.file.fileno(), TRAILER_BYTES, self.size_bytes - TRAILER_BYTES), self.path
            )
            self._digest, self._covered = trailer.digest, self.size_bytes - TRAILER_BYTES
        if self.size_bytes <= PART_BYTES:
            client.put(self.key, b"".join(self._pieces()))
        else:
            client.put(self.key, self._pieces(), self.size_bytes)

    def _pieces(self) -> Iterator[memoryview]:
        digest = ChunkDigest()
        sent = 0
        while sent < self.size_bytes:
            # A new buffer each: the parts before may still be under way. A bytearray would be filled with zeros first,
            # and training could not take a step meanwhile.
            piece = np.empty(min(PART_BYTES, self.size_bytes - sent), np.uint8).data
            filled = 0
            while filled < len(piece):
                taken = self.file.readinto(piece[filled:])
                if not taken:
                    raise DamagedCheckpointError(path=self.path, reason=f"it ends at byte {sent + filled}")
                filled += taken
            digest.add(piece[: max(0, self._covered - sent)])
            sent += len(piece)
            if sent == self.size_bytes and digest.hexdigest() != self._digest:
                raise DamagedCheckpointError(path=self.path, reason="its bytes are not those that were written")
            yield piece


class Upload:
    """A checkpoint in the directory on its way up. Its files are held open, so that pruning does not cut it off.

    Args:
        directory: The directory.
        step: The step.
        epoch: The epoch it belongs to.
        mine: Tells of a file of a sharded checkpoint whether this process sends it; None for all.

    Raises:
        FileNotFoundError: It was pruned.
        DamagedCheckpointError: It is not one of ours.
    """

    def __init__(
        self, directory: CheckpointDirectory, step: int, epoch: int, mine: Callable[[str], bool] | None = None
    ) -> None:
        path = directory.path_of(step)
        prefix = keys.epoch_prefix(epoch) + path.name
        self.step = step
        self.key = prefix
        self.names: dict[str, int] = {}  # of a sharded one: every file and its size, but the index
        self._parts: list[_Part] = []
        self._last: _Part | None = None
        try:
            if path.is_dir():
                self._open_folder(path, prefix, mine)
            else:
                self._last = _Part(path, prefix)
        except BaseException:
            self.close()
            raise

    def _open_folder(self, path: Path, prefix: str, mine: Callable[[str], bool] | None) -> None:
        self.key = f"{prefix}/{INDEX}"
        with open_checkpoint(path) as folder:
            shards = folder.shards()  # type: ignore[union-attr]  # a directory
        for name, size, digest in shards:
            if keys.parse(f"{prefix}/{name}") is None:
                raise DamagedCheckpointError(path=path, reason=f"its index names {name!r}", record=INDEX)
            self.names[f"{prefix}/{name}"] = size
            if mine is None or mine(name):
                self._parts.append(_Part(path / name, f"{prefix}/{name}", digest))
        if mine is None or mine(INDEX):
            self._last = _Part(path / INDEX, self.key)

    def send_parts(self, client: Client, there: Callable[[str], bool] = lambda _: False) -> None:
        """Send all but what makes it a checkpoint; what is there already, by its key, is not sent again."""
        for part in self._parts:
            if not there(part.key):
                part.send(client)

    def finish(self, client: Client) -> None:
        """Send the file, or the index: from here on it is a checkpoint."""
        if self._last is not None:
            self._last.send(client)

    def header(self) -> dict[str, Any]:
        """Return the header of the checkpoint; empty where this process does not hold it."""
        if self._last is None:
            return {}
        with contextlib.closing(os.fdopen(os.dup(self._last.file.fileno()), "rb")) as copy, open_file(copy) as file:
            return file.header() or {}

    @property
    def size_bytes(self) -> int:
        """Bytes that this process sends."""
        return sum(part.size_bytes for part in (*self._parts, *([self._last] if self._last else [])))

    def close(self) -> None:
        """Close the files."""
        for part in (*self._parts, *([self._last] if self._last else [])):
            part.file.close()


# -- down ------------------------------------------------------------------------------------------------------------


def download(
    client: Client, key: str, size: int, write: Callable[[memoryview], object], progress: Progress | None = None
) -> ChunkDigest:
    """Read an object by several ranges at a time, write it in order, and return the digest of all before a trailer.

    Raises:
        DamagedCheckpointError: The store has less than it said.
        FileNotFoundError: It is gone.
    """
    digest = ChunkDigest()
    covered = size - TRAILER_BYTES
    done = 0
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="safeckpt-fetch") as pool:
        under_way: deque[tuple[int, Future[memoryview]]] = deque()
        starts = iter(range(0, size, PART_BYTES))
        try:
            while True:
                while len(under_way) < _AHEAD and (start := next(starts, None)) is not None:
                    length = min(PART_BYTES, size - start)
                    under_way.append((length, pool.submit(client.read, key, start, length)))
                if not under_way:
                    return digest
                length, one = under_way.popleft()
                data = one.result().cast("B")
                if len(data) != length:
                    raise DamagedCheckpointError(
                        path=f"{client.url}/{key}", reason=f"the store sent {len(data)} of {length} bytes"
                    )
                digest.add(data[: max(0, covered - done)])
                write(data)
                done += length
                if progress is not None:
                    progress(done, size)
        finally:
            for _, one in under_way:
                one.cancel()


def _save_to(
    client: Client, key: str, size: int, digest: str | None, progress: Progress | None
) -> Callable[[BinaryIO], None]:
    """Return what writes an object into a file and refuses it when it is not what was saved.

    The digest is that of the whole object, None for one that has it in its trailer.
    """
    path = f"{client.url}/{key}"

    def write(file: BinaryIO) -> None:
        tail = b""
        whole = ChunkDigest()

        def take(data: memoryview) -> None:
            nonlocal tail
            if digest is not None:
                whole.add(data)
            file.write(data)
            tail = (tail + bytes(data[-TRAILER_BYTES:]))[-TRAILER_BYTES:]

        found = download(client, key, size, take, progress)
        if digest is not None:
            good = whole.hexdigest() == digest
        else:
            trailer = Trailer.parse(tail, path)
            good = trailer.size_bytes == size - TRAILER_BYTES and trailer.digest == found.hexdigest()
        if not good:
            raise DamagedCheckpointError(path=path, reason="its bytes are not those that were written")

    return write


def fetch(
    client: Client, remote: RemoteCheckpoint, directory: CheckpointDirectory, progress: Progress | None = None
) -> Path:
    """Bring a checkpoint into a directory whose writer lock is held: under its name when every byte is checked.

    Raises:
        DamagedCheckpointError: It is not what was saved; nothing is left of it.
        FormatVersionError: It is of a newer format.
        FileNotFoundError: It is gone.
        MirrorUnreachableError: The store did not answer.
        OSError: The local disk refused.
    """
    directory.create()
    size = remote.objects[remote.key]
    whole = None if progress is None else lambda done, _: progress(min(done, remote.size_bytes), remote.size_bytes)
    if not remote.is_folder:
        directory.commit_step(
            remote.step, _save_to(client, remote.key, size, None, whole), check=_check_file(remote), size_bytes=size
        )
        return directory.path_of(remote.step)
    temp = directory.begin_folder(remote.step)
    try:
        directory.write_inside(temp / INDEX, _save_to(client, remote.key, size, None, None), size_bytes=size)
        with open_checkpoint(temp) as folder:
            shards = folder.shards()  # type: ignore[union-attr]  # a directory
        prefix = remote.name
        done = size
        for name, length, digest in shards:
            key = f"{prefix}/{name}"
            _check_listed(f"{client.url}/{prefix}", name, remote.objects.get(key) if keys.parse(key) else None, length)
            told = None if whole is None else lambda now, _, before=done: whole(before + now, 0)
            directory.write_inside(temp / name, _save_to(client, key, length, digest, told), size_bytes=length)
            done += length
        directory.commit_folder(remote.step, temp)
    except BaseException:
        directory.drop_folder(temp)
        raise
    return directory.path_of(remote.step)


def _check_listed(path: str, name: str, found: int | None, size: int) -> None:
    if found != size:
        reason = f"{name} is missing" if found is None else f"{name} has {found} bytes, {size} were written"
        raise DamagedCheckpointError(path=path, reason=reason, record=name)


def _check_file(remote: RemoteCheckpoint) -> Callable[[BinaryIO, object], None]:
    def check(file: BinaryIO, _: object) -> None:
        with open_file(file) as opened:
            opened.check_structure()
            step = (opened.header() or {}).get("step")
        if step != remote.step:
            raise DamagedCheckpointError(
                path=remote.key, reason=f"it is named as step {remote.step} and holds step {step}"
            )

    return check


# -- looks -----------------------------------------------------------------------------------------------------------


class RemoteFile(Readable):
    """An object as a file to read: small reads fetch little, and reading on fetches ever more, up to a part.

    Args:
        client: The store.
        key: The object.
        size: Its size.
    """

    def __init__(self, client: Client, key: str, size: int) -> None:
        super().__init__(size)
        self.name = f"{client.url}/{key}"
        self._client = client
        self._key = key
        self._windows: list[tuple[int, memoryview]] = []  # the one that is read, and one that was: a trailer
        self._ahead = _FIRST_BYTES

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, as much as one request gives."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._position >= self._size_bytes:
            return 0
        start, data = self._window()
        piece = data[self._position - start :][: len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _window(self) -> tuple[int, memoryview]:
        at = self._position
        for start, data in self._windows:
            if start <= at < start + len(data):
                return start, data
        reads_on = any(at == start + len(data) for start, data in self._windows)
        self._ahead = min(2 * self._ahead, PART_BYTES) if reads_on else _FIRST_BYTES
        length = min(self._ahead, self._size_bytes - at)
        data = self._client.read(self._key, at, length).cast("B")
        if not len(data):
            raise DamagedCheckpointError(path=self.name, reason=f"it ends at byte {at}")
        self._windows = [(at, data), *self._windows[:1]]
        return at, data


def open_remote(client: Client, remote: RemoteCheckpoint) -> CheckpointFile:
    """Open the file of a checkpoint in a store, or its index, to look at it or to check all of it.

    Raises:
        DamagedCheckpointError: It is no file of ours.
        FormatVersionError: It is of a newer format.
    """
    return open_file(io.BufferedReader(RemoteFile(client, remote.key, remote.objects[remote.key]), 1 << 16))


def trailer_of(client: Client, remote: RemoteCheckpoint) -> bytes:
    """Return the last bytes of a checkpoint: equal ones belong to equal checkpoints."""
    size = remote.objects[remote.key]
    return bytes(client.read(remote.key, max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES)))
