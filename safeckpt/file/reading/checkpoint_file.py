"""Read one file: check it, say what is wrong with it, load it. Everything goes through one open handle."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any
from zlib import crc32

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.archive import HEADER_RECORD, MOST_HEADER_BYTES, descriptor, descriptor_bytes, layout
from safeckpt.file.checksum import CHUNK_BYTES, digest_of
from safeckpt.file.file_report import FileReport
from safeckpt.file.reading.central_directory import read_archive, read_trailer
from safeckpt.file.reading.damage import check_records, find_damage
from safeckpt.file.reading.mapping import Mapped
from safeckpt.file.reading.opened import Opened
from safeckpt.file.reading.source import source_of
from safeckpt.file.trailer import FORMAT_VERSION

if TYPE_CHECKING:
    import os

    from safeckpt.file.reading.central_directory import Archive
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


class CheckpointFile(Opened):
    """One open file.

    Attributes:
        path: What it was opened as.
        size_bytes: Its length.
        trailer: With which it proves itself; None for a file that plain torch wrote.
    """

    def __init__(self, source: Source, trailer: Trailer | None) -> None:
        self._source = source
        self._archive: Archive | None = None
        self._is_verified = False
        self.path = source.path
        self.size_bytes = source.size_bytes
        self.trailer = trailer

    @property
    def digest(self) -> str | None:
        """The digest in its trailer; None for a file that plain torch wrote."""
        return None if self.trailer is None else self.trailer.digest

    def close(self) -> None:
        """Close the file, if it was given by path."""
        self._source.close()

    def check_structure(self) -> None:
        """Check the table of contents; no data is read.

        Raises:
            DamagedCheckpointError: It is not what torch and safeckpt write, or names records outside the file.
        """
        self.archive()

    def archive(self) -> Archive:
        """Return its records, their places checked once."""
        if self._archive is None:
            self._archive = read_archive(self._source, self.trailer)
        return self._archive

    def header(self) -> dict[str, Any] | None:
        """Return the header, None when the file has none.

        It is the first record, so that this needs one read, and no look at the table of contents; its CRC-32 is
        checked.

        Raises:
            DamagedCheckpointError: The record is not whole.
        """
        if self.trailer is None:
            return None
        entry = layout([(HEADER_RECORD, 1)])[0][0]
        head = self._source.read(0, min(_HEADER_BYTES, self.size_bytes))
        if not head.startswith(entry.name, _NAME_OFFSET):
            return None
        end = head.find(b"\n", entry.data_offset)
        if end < 0:  # longer than usual
            head = self._source.read(0, min(entry.data_offset + MOST_HEADER_BYTES, self.size_bytes))
            end = head.find(b"\n", entry.data_offset)
        data = head[entry.data_offset : end + 1]
        entry.size, entry.crc = len(data), crc32(data)
        if not data or self._source.read(end + 1, descriptor_bytes(entry)) != descriptor(entry):
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
        records = self.archive()
        if self.trailer is None:
            check_records(records)
        elif not self._has_digest(self.trailer, progress):
            raise find_damage(records)
        self._is_verified = True
        if progress is not None:
            progress(self.size_bytes, self.size_bytes)
        return FileReport(
            path=self.path,
            size_bytes=self.size_bytes,
            records=len(records.entries),
            self_proving=self.trailer is not None,
            format_version=FORMAT_VERSION if self.trailer else None,
            digest=self.digest,
            header=self.header(),
        )

    def _has_digest(self, trailer: Trailer, progress: Progress | None) -> bool:
        """Return whether the bytes before the trailer give the digest in it."""
        size = trailer.size_bytes
        chunks = [(start, min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]
        return digest_of(self._source.crcs(chunks, progress), size) == trailer.digest

    def load(self, map_location: Any = None, *, mmap: bool = False, checked: bool = False) -> Any:
        """Return the object that was saved.

        Nothing in the file is executed (``weights_only=True``, always). It is not verified here; after :meth:`verify`
        what is read has to be what was verified, unless it is mapped.

        Args:
            map_location: As in ``torch.load``.
            mmap: Map the file instead of reading it; needs a file with a descriptor.
            checked: Compare what is read with the CRC-32 of its record, as after :meth:`verify`.

        Raises:
            DamagedCheckpointError: It cannot be read, or has changed since it was verified.
            UntrustedTypeError: It asks for a class or function that is not allowed.
        """
        return self._load(map_location, mmap=mmap, checked=checked)[0]

    def load_mapped(self) -> tuple[Any, Mapped]:
        """Return the object that was saved, on the CPU and mapped to the file, and the way around the mapping.

        Raises:
            LoadError: As :meth:`load`.
        """
        loaded, address = self._load("cpu", mmap=True)
        return loaded, Mapped(self._source, address)

    def _load(self, map_location: Any, *, mmap: bool, checked: bool = False) -> tuple[Any, int | None]:
        from safeckpt.file.reading.loading import load_archive  # noqa: PLC0415 - torch, which a check does without

        return load_archive(self.archive(), map_location, mmap=mmap, checked=checked or self._is_verified)
