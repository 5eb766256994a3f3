"""The files of a sharded checkpoint, mapped into memory: the parts of tensors in them as views, not as copies.

A part is a torch file of its own inside of a larger one. To read each as such takes a millisecond, and there are
hundreds. But all parts of one shape and dtype begin with the same bytes, pickle included: what was read of the first is
known of the others.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.reading.checkpoint_file import open_file
from safeckpt.file.reading.loading import read_pickle
from safeckpt.file.reading.mapping import Mapped, MappedFiles
from safeckpt.file.reading.source import Part, source_of
from safeckpt.file.reading.unpickle import can_unpickle, unpickle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from safeckpt.file.reading.central_directory import Archive
    from safeckpt.file.reading.source import Source, SourceState

__all__ = ["ShardParts"]

_DESCRIPTOR: Final = struct.Struct("<II")  # what follows a record: a signature and its CRC-32
_DESCRIPTOR_SIGNATURE: Final = 0x08074B50
_DATA: Final = "data/0"


class _Form(NamedTuple):
    """What all parts of one kind have in common.

    Attributes:
        head: The bytes before the data.
        data_bytes: Length of the data.
        dtype: Of the tensor, as the rest.
        size: Its extents.
        stride: Its strides.
    """

    head: bytes
    data_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _File(NamedTuple):
    source: Source
    memory: torch.UntypedStorage


class ShardParts:
    """Gives parts of tensors by where they are.

    Args:
        folder: The directory.
        names: The files that belong to it; a reference to any other is refused.
        verified: Those whose every byte this process has checked, and what they were then. Of the others each part is
            checked that is used.
        mapped: What is to be told of each file that is mapped.
    """

    def __init__(
        self, folder: Path, names: Collection[str], verified: Mapping[str, SourceState | None], mapped: MappedFiles
    ) -> None:
        self._folder = folder
        self._names = frozenset(names)
        self._verified = verified
        self._mapped = mapped
        self._files: dict[str, _File] = {}
        self._forms: dict[int, list[_Form]] = {}  # by the length of the part
        self._opened = contextlib.ExitStack()

    def close(self) -> None:
        """Close the files; what is mapped stays as long as a part is used."""
        self._opened.close()

    def part(self, name: str, start: int, length: int) -> torch.Tensor:
        """Return the tensor that is a torch file of some bytes of a file, in memory that is mapped to it.

        Raises:
            DamagedCheckpointError: It is none, its bytes are not those that were written, or the file is not one of the
                checkpoint's.
            OSError: From the system, as it is.
        """
        file = self._file(name)
        known = self._known(file, name, start, length)
        value = self._read(file, name, start, length) if known is None else known
        if not isinstance(value, torch.Tensor):
            raise self._damaged(name, f"what {name} has at byte {start} is no tensor")
        return value

    def _file(self, name: str) -> _File:
        if name not in self._files:
            if name not in self._names:
                raise self._damaged(name, f"it refers to {name!r}, which does not belong to it")
            source = source_of(self._folder / name)
            self._opened.callback(source.close)
            if name in self._verified and source.state != self._verified[name]:
                raise self._damaged(name, f"{name} was written to since it was verified")
            memory = source.map()
            self._files[name] = _File(source, memory)
            self._mapped.add(Mapped(source, memory.data_ptr()))
        return self._files[name]

    def _known(self, file: _File, name: str, start: int, length: int) -> torch.Tensor | None:
        """Return a part that begins as an earlier one of its length did."""
        if not 0 <= start <= start + length <= file.source.size_bytes:
            raise self._damaged(name, f"{name} has no bytes {start} to {start + length}")
        for form in self._forms.get(length, ()):
            if file.source.read(start, len(form.head)) == form.head:
                low = start + len(form.head)
                signature, crc = _DESCRIPTOR.unpack(file.source.read(low + form.data_bytes, _DESCRIPTOR.size))
                if signature != _DESCRIPTOR_SIGNATURE:
                    return None
                self._check(file, name, low, form.data_bytes, crc)
                memory = file.memory[low : low + form.data_bytes]
                return torch.empty(0, dtype=form.dtype, device="cpu").set_(memory, 0, form.size, form.stride)
        return None

    def _read(self, file: _File, name: str, start: int, length: int) -> Any:
        """Read a part as any other file, but for its data."""
        checked = name not in self._verified
        with open_file(Part(file.source, start, length)) as opened:  # type: ignore[arg-type]
            archive = opened.archive()
            data, scan = read_pickle(archive, checked=checked)
            if not can_unpickle(scan):
                return opened.load("cpu", checked=checked)
            records = {archive.short_name(entry): entry for entry in archive.entries}

            def storage_of(claim: Any) -> torch.UntypedStorage:
                entry = records[f"data/{claim.key}"]
                low = start + entry.data_offset
                self._check(file, name, low, entry.size, entry.crc)
                memory: torch.UntypedStorage = file.memory[low : low + entry.size]
                return memory

            value = unpickle(data, scan, storage_of)
        if len(scan.claims) == 1 and type(value) is torch.Tensor:
            self._remember(file, archive, value, start, length)
        return value

    def _remember(self, file: _File, archive: Archive, value: torch.Tensor, start: int, length: int) -> None:
        entry = archive.find(_DATA)
        if entry is None or value.storage_offset() or value.requires_grad or value.layout is not torch.strided:
            return
        head = file.source.read(start, entry.data_offset)
        form = _Form(head, entry.size, value.dtype, value.size(), value.stride())
        self._forms.setdefault(length, []).append(form)

    def _check(self, file: _File, name: str, start: int, length: int, crc: int) -> None:
        if name not in self._verified and file.source.crcs([(start, length)]) != [crc]:
            raise self._damaged(name, f"{name} is not what was written")

    def _damaged(self, name: str, reason: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(path=self._folder, reason=reason, record=name)
