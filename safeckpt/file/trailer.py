r"""The 128 bytes with which a file proves itself.

They are the zip comment, so torch, ``zipfile`` and ``unzip`` read over them::

    SAFECKPT 0001 chunk=4194304 size=000000123456789 root=<64 hex digits> <8 hex digits>\n

magic, format version, bytes per chunk, bytes of the file before the trailer, digest over those bytes
(:mod:`safeckpt.file.checksum`), CRC-32 of the trailer's own first 118 bytes. The last field is there so that a
flipped bit in the version is damage, and not a newer format. All of it is ASCII, so it can never hold the
signature ``PK\5\6`` that would hide the zip's real end record. Later versions keep length, magic, version and CRC where
they are and may change what is between them.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from zlib import crc32

from safeckpt.errors import DamagedCheckpointError, FormatVersionError
from safeckpt.file.checksum import CHUNK_BYTES

__all__ = ["FORMAT_VERSION", "MAGIC", "TRAILER_BYTES", "Trailer"]

FORMAT_VERSION = 1
TRAILER_BYTES = 128
MAGIC = b"SAFECKPT "

_VERSION = re.compile(rb"SAFECKPT (\d{4}) .{104} [0-9a-f]{8}\n", re.DOTALL)
_FIELDS = re.compile(rb"chunk=(\d{7}) size=(\d{15}) root=([0-9a-f]{64})")


class Trailer(NamedTuple):
    """The content of a trailer.

    Attributes:
        digest: Digest over everything before the trailer, in hex.
        size_bytes: Length of everything before the trailer.
    """

    digest: str
    size_bytes: int

    def to_bytes(self) -> bytes:
        """Return the trailer as it stands in a file."""
        text = f"SAFECKPT {FORMAT_VERSION:04d} chunk={CHUNK_BYTES:07d} size={self.size_bytes:015d} root={self.digest}"
        return b"%s %08x\n" % (text.encode("ascii"), crc32(text.encode("ascii")))

    @classmethod
    def parse(cls, data: bytes, path: object) -> Trailer:
        """Read a trailer.

        Raises:
            FormatVersionError: It is whole, and of a newer format.
            DamagedCheckpointError: It is not what any version of safeckpt writes.
        """
        found = _VERSION.fullmatch(data)
        if found is None or b"%08x\n" % crc32(data[:118]) != data[119:]:
            raise DamagedCheckpointError(path=path, reason="its trailer is not whole", record="trailer")
        version = int(found[1])
        if version > FORMAT_VERSION:
            raise FormatVersionError(path=path, found=version, supported=(FORMAT_VERSION,))
        fields = _FIELDS.fullmatch(data[14:118])
        if version != FORMAT_VERSION or fields is None or int(fields[1]) != CHUNK_BYTES:
            raise DamagedCheckpointError(path=path, reason="its trailer holds impossible values", record="trailer")
        return cls(digest=fields[3].decode("ascii"), size_bytes=int(fields[2]))
