"""Read one file: check it, say what is wrong with it, load it. Everything goes through one open handle."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, Self
from zlib import crc32

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import archive
from safeckpt.file.archive import HEADER_RECORD, MOST_HEADER_BYTES
from safeckpt.file.checksum import CHUNK_BYTES, root_of
from safeckpt.file.file_report import FileReport
from safeckpt.file.reading.central_directory import read_directory, read_trailer
from safeckpt.file.reading.damage import check_records, find_damage
from safeckpt.file.reading.mapping import Mapped
from safeckpt.file.reading.source import source_of
from safeckpt.file.trailer import FORMAT_VERSION

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from safeckpt.file.reading.central_directory import Directory
    from safeckpt.file.reading.source import Source
    from safeckpt.file.trailer import Trailer
    from safeckpt.system.threads import Progress

__all__ = ["CheckpointFile", "open_file", "verify"]

_HEADER_BYTES = 4096  # the first read; a header record of usual size is within it
_NAME_OFFSET = 30  # of the name in a local header


def open_file(f: str | os.PathLike[str] | IO[bytes]) -> CheckpointFile:
    """Open a file that safeckpt or torch wrote; use it as a context manager.

    Cost: one open and one read of 150 bytes.

    Raises:
        DamagedCheckpointError: It is no torch file, or not as long as its trailer says.
        FormatVersionError: It was written in a newer format.
        OSError: From the system, as it is.
    """
    source = source_of(f)
    try:
        return CheckpointFile(source, read_trailer(source))
    except BaseException:
        source.close()
        raise


def verify(f: str | os.PathLike[str] | IO[bytes], progress: Progress | None = None) -> FileReport:
    """Check every byte of a file, see :meth:`CheckpointFile.verify`."""
    with open_file(f) as file:
        return file.verify(progress)


class CheckpointFile:
    """One open file.

    Attributes:
        path: What it was opened as.
        size_bytes: Its length.
        trailer: With which it proves itself; None for a file that plain torch wrote.
    """

    def __init__(self, source: Source, trailer: Trailer | None) -> None:
        self._source = source
        self._directory: Directory | None = None
        self.path = source.path
        self.size_bytes = source.size_bytes
        self.trailer = trailer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def root(self) -> str | None:
        """The digest in its trailer; None for a file that plain torch wrote."""
        return None if self.trailer is None else self.trailer.root

    def close(self) -> None:
        """Close the file, if it was given by path."""
        self._source.close()

    def check_structure(self) -> Directory:
        """Check the table of contents; no data is read.

        Raises:
            DamagedCheckpointError: It is not what torch and safeckpt write, or names records outside the file.
        """
        if self._directory is None:
            self._directory = read_directory(self._source, self.trailer)
        return self._directory

    def header(self) -> dict[str, Any] | None:
        """Return the header, None when the file has none.

        It is the first record, so that this needs one read, and no look at the table of contents; its CRC-32 is
        checked.

        Raises:
            DamagedCheckpointError: The record is not whole.
        """
        if self.trailer is None:
            return None
        entry = archive.layout([(HEADER_RECORD, 1)])[0][0]
        head = self._source.read(0, min(_HEADER_BYTES, self.size_bytes))
        if not head.startswith(entry.name, _NAME_OFFSET):
            return None
        end = head.find(b"\n", entry.data_offset)
        if end < 0:  # longer than usual
            head = self._source.read(0, min(entry.data_offset + MOST_HEADER_BYTES, self.size_bytes))
            end = head.find(b"\n", entry.data_offset)
        data = head[entry.data_offset : end + 1]
        entry.size, entry.crc = len(data), crc32(data)
        if not data or self._source.read(end + 1, archive.descriptor_bytes(entry)) != archive.descriptor(entry):
            raise self._damaged_header()
        try:
            header = json.loads(data)
        except (ValueError, RecursionError):
            header = None
        if type(header) is not dict:
            raise self._damaged_header()
        return header

    def _damaged_header(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(path=self.path, reason="its header is not what was written", record=HEADER_RECORD)

    def verify(self, progress: Progress | None = None) -> FileReport:
        """Check every byte.

        A file of safeckpt is compared with the digest in its trailer. A file that plain torch wrote has only the
        CRC-32 of each record, and the report says so.

        Args:
            progress: Called with bytes done and bytes in all as the check goes on; at its end with both equal.

        Raises:
            DamagedCheckpointError: Naming the record or the region that is damaged.

        Cost:
            One pass over the file, in a few threads.
        """
        directory = self.check_structure()
        if self.trailer is None:
            check_records(self._source, directory)
        else:
            size = self.trailer.size_bytes
            chunks = [(start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]
            if root_of(self._source.crcs(chunks, progress), size) != self.trailer.root:
                raise find_damage(self._source, directory)
        if progress is not None:
            progress(self.size_bytes, self.size_bytes)
        return FileReport(
            path=self.path,
            size_bytes=self.size_bytes,
            records=len(directory.entries),
            self_proving=self.trailer is not None,
            format_version=FORMAT_VERSION if self.trailer else None,
            root=self.trailer.root if self.trailer else None,
            header=self.header(),
        )

    def load(self, map_location: Any = None, *, mmap: bool = False) -> Any:
        """Return the object that was saved.

        Nothing in the file is executed (``weights_only=True``, always), and nothing in it is verified: call
        :meth:`verify` first.

        Args:
            map_location: As in ``torch.load``.
            mmap: Map the file instead of reading it; needs a file with a descriptor.

        Raises:
            DamagedCheckpointError: It cannot be read.
            UntrustedTypeError: It asks for a class or function that is not allowed.
        """
        return self._load(map_location, mmap=mmap)[0]

    def load_mapped(self) -> tuple[Any, Mapped]:
        """Return the object that was saved, on the CPU and mapped to the file, and the way around the mapping.

        Raises:
            LoadError: As :meth:`load`.
        """
        loaded, address = self._load("cpu", mmap=True)
        return loaded, Mapped(self._source, address)

    def _load(self, map_location: Any, *, mmap: bool) -> tuple[Any, int | None]:
        from safeckpt.file.reading.loading import load_records  # noqa: PLC0415 - torch, which a check does without

        own = self.trailer is not None
        return load_records(self._source, self.check_structure(), map_location, mmap=mmap, own=own)
