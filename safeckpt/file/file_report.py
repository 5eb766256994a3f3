"""The result of verifying a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FileReport"]


@dataclass(frozen=True)
class FileReport:
    """The result of verifying a file in which nothing is wrong.

    Attributes:
        path: The file.
        size_bytes: Its length.
        records: Number of records in the archive.
        self_proving: True when a digest over every byte was checked. False for a file that plain torch wrote: there
            only the records' own CRC-32s could be checked, which do not cover headers and table of contents.
        format_version: Of the trailer, None without one.
        digest: In hex, None without a trailer.
        header: The values to be found without unpickling, None when the file has none.
    """

    path: str
    size_bytes: int
    records: int
    self_proving: bool
    format_version: int | None = None
    digest: str | None = None
    header: Mapping[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        checked = "every byte checked" if self.self_proving else "written by plain torch: only record CRCs checked"
        return f"{self.path}: good, {self.size_bytes} bytes, {self.records} records, {checked}"
