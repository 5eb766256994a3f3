"""A sharded checkpoint: a directory of files that torch.distributed.checkpoint wrote, and an index that proves them.

The index is a file as any other of ours, and proves itself. It holds size and digest of every other file, so that one
that is cut, flipped, missing or of another checkpoint is found.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.checksum import CHUNK_BYTES, ChunkDigest, digest_of
from safeckpt.file.file_report import FileReport
from safeckpt.file.reading.checkpoint_file import CheckpointFile, open_file
from safeckpt.file.reading.opened import Opened
from safeckpt.file.reading.source import source_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from safeckpt.file.reading.mapping import Mapped
    from safeckpt.file.reading.source import SourceState
    from safeckpt.file.reading.whole_tensors import ShardTensorReader
    from safeckpt.system.threads import Progress

__all__ = ["INDEX", "CheckpointFolder", "ShardFile", "is_folder", "open_checkpoint", "open_folder", "shard_of_bytes"]

INDEX = "safeckpt.pt"

ShardFile = tuple[str, int, str]  # name, size in bytes, digest in hex


def shard_of_bytes(name: str, data: bytes) -> ShardFile:
    """Return what the index says about a file with this content."""
    digest = ChunkDigest()
    digest.add(data)
    return name, digest.size_bytes, digest.hexdigest()


def _writer_of(name: str) -> int:
    """Return the number of the rank that has written a file, which will most likely read it; 0 for other files."""
    match = re.fullmatch(r"__([0-9]+)_[0-9]+\.distcp", name)
    return int(match[1]) if match else 0


def _shard_of(path: Path, progress: Progress | None = None) -> tuple[ShardFile, SourceState | None]:
    """Return name, size and digest of a file, which is read once in a few threads, and what the file was then."""
    source = source_of(path)
    try:
        size = source.size_bytes
        chunks = [(start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]
        return (path.name, size, digest_of(source.crcs(chunks, progress), size)), source.state
    finally:
        source.close()


def is_folder(f: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Return whether this is a sharded checkpoint, or what is left of one; an open file is none."""
    if not isinstance(f, (str, os.PathLike)):
        return False
    path = Path(f)
    return (
        bool(os.fspath(f))
        and path.is_dir()
        and ((path / INDEX).exists() or next(path.glob("*.distcp"), None) is not None)
    )


def open_checkpoint(f: str | os.PathLike[str] | IO[bytes]) -> CheckpointFile | CheckpointFolder:
    """Open a file, or the directory of a sharded checkpoint; use it as a context manager.

    Raises:
        LoadError, OSError: What `open_file` and `open_folder` raise.
    """
    if is_folder(f):
        return open_folder(f)  # type: ignore[arg-type]  # no open file is one
    if isinstance(f, (str, os.PathLike)) and os.fspath(f) and Path(f).is_dir():  # Path("") is the current directory
        text = f"Is a directory and no checkpoint; safeckpt.latest({os.fspath(f)!r}) finds the newest in it"
        raise IsADirectoryError(errno.EISDIR, text, os.fspath(f))
    return open_file(f)


def open_folder(path: str | os.PathLike[str]) -> CheckpointFolder:
    """Open a sharded checkpoint; use it as a context manager.

    Raises:
        DamagedCheckpointError: It has no index, or the index is no file of ours.
        FormatVersionError: It was written in a newer format.
        FileNotFoundError: There is no such directory.
        OSError: From the system, as it is.
    """
    path = Path(path)
    try:
        return CheckpointFolder(path, open_file(path / INDEX))
    except FileNotFoundError:
        if not path.is_dir():
            raise
        raise DamagedCheckpointError(path=path, reason=f"it has no {INDEX}", record=INDEX) from None


class CheckpointFolder(Opened):
    """One open sharded checkpoint.

    Attributes:
        path: The directory.
        index: Its index.
        size_bytes: Size of all files.
        verified: The files of which this process has checked every byte, by name, and what they were then.
    """

    def __init__(self, path: Path, index: CheckpointFile) -> None:
        self.path = str(path)
        self.index = index
        self.size_bytes = index.size_bytes
        self.verified: dict[str, SourceState | None] = {}
        self._place = path
        self._shard_tensors: ShardTensorReader | None = None
        self._payload: tuple[Any, Mapped] | None = None
        self._has_structure = False

    @property
    def digest(self) -> str | None:
        """The digest of the index, which covers those of all other files."""
        return self.index.digest

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    def header(self) -> dict[str, Any] | None:
        """Return the header of the index, see `CheckpointFile.header`."""
        return self.index.header()

    def check_structure(self) -> None:
        """Check the index and that no file is missing, once; no data is read.

        Raises:
            DamagedCheckpointError: Something is wrong with it.
        """
        if self._has_structure:
            return
        self.index.check_structure()
        header = self.header() or {}
        shards, size = header.get("shards"), header.get("shards_bytes")
        if not isinstance(shards, int) or not isinstance(size, int):
            raise self._damaged("its index is not one of a directory", INDEX)
        # Not what a killed process has left of a new index.
        found = sum(not file.name.endswith(".tmp") for file in self._place.iterdir()) - 1
        if found < shards:
            raise DamagedCheckpointError(path=self.path, reason=f"{shards - found} of its {shards} files are missing")
        self.size_bytes = self.index.size_bytes + size
        self._has_structure = True

    def load(self, map_location: Any = None, *, mmap: bool = False) -> Any:
        """Return what is in the index: the whole state but for the tensors in the other files."""
        return self.index.load(map_location, mmap=mmap)

    def load_mapped(self) -> tuple[Any, Mapped]:
        """Return the index's payload, mapped to its file and read once; see `CheckpointFile.load_mapped`."""
        if self._payload is None:
            self._payload = self.index.load_mapped()
        return self._payload

    def load_whole(self, map_location: str | torch.device | None = None) -> Any:
        """Return the whole state, with every tensor put together in this process.

        Args:
            map_location: Where tensors go; None for host memory.

        Raises:
            DamagedCheckpointError: A tensor is not in it, or the index claims more than is there.
        """
        import torch  # noqa: PLC0415 - a check does without

        from safeckpt.file.reading.whole_tensors import with_whole_tensors  # noqa: PLC0415

        self.check_structure()  # which looks at the size of the files
        device = torch.device("cpu" if map_location is None else map_location)
        return with_whole_tensors(self.load(map_location), self.shard_tensors(), self.size_bytes, device)

    def shard_tensors(self) -> ShardTensorReader:
        """Return what reads the tensors of the shards.

        Raises:
            DamagedCheckpointError: It does not say what is in them.
        """
        from safeckpt.file.reading.whole_tensors import ShardTensorReader  # noqa: PLC0415 - torch

        if self._shard_tensors is None:
            self._shard_tensors = ShardTensorReader(self._place, [name for name, *_ in self.shards()])
        return self._shard_tensors

    def shards(self) -> list[ShardFile]:
        """Return what the index says about the other files.

        Raises:
            DamagedCheckpointError: It says nothing.
        """
        try:
            files = self.load_mapped()[0]["safeckpt"]["files"]
            return [(str(name), int(size), str(digest)) for name, size, digest in files]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged("its index does not say what belongs to it", INDEX) from error

    def verify(self, share: int = 0, shares: int = 1, *, progress: Progress | None = None) -> FileReport:
        """Check every byte.

        Args:
            share: Which of the files: those of ranks whose number, divided by `shares`, leaves this one. The index is
                always checked.
            shares: How many ranks share the work.
            progress: Called with bytes done and bytes in all as the check goes on; at its end with both equal.

        Raises:
            DamagedCheckpointError: Naming the file.

        Cost:
            One pass over these files.
        """
        report = self.index.verify()
        shards = self.shards()
        self._check([shard for shard in shards if _writer_of(shard[0]) % shares == share], progress)
        self.check_structure()
        return FileReport(
            path=self.path,
            size_bytes=self.size_bytes,
            records=len(shards) + 1,
            self_proving=True,
            format_version=report.format_version,
            digest=report.digest,
            header=report.header,
        )

    def _check(self, shards: Sequence[ShardFile], progress: Progress | None) -> None:
        done, total = self.index.size_bytes, self.index.size_bytes + sum(size for _, size, _ in shards)

        def so_far(done_bytes: int, _: int = 0) -> None:
            if progress is not None:
                progress(done + done_bytes, total)

        for name, size, digest in shards:
            if Path(name).name != name:
                raise self._damaged(f"its index names {name!r}", INDEX)
            try:
                (_, found_size, found_digest), state = _shard_of(self._place / name, so_far)
            except FileNotFoundError:
                if not self._place.is_dir():
                    raise  # pruned by its writer
                raise self._damaged(f"{name} is missing", name) from None
            if found_size != size:
                raise self._damaged(f"{name} has {found_size} bytes, {size} were written", name)
            if found_digest != digest:
                raise self._damaged(f"{name} is not what was written", name)
            self.verified[name] = state
            done += size
        so_far(0)

    def _damaged(self, reason: str, record: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(path=self.path, reason=reason, record=record)
