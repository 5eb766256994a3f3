"""Files in the format of safetensors: a JSON header with name, dtype, shape and place of each tensor, then the bytes.

Such a file has no checksum: what can be checked is that it is as long as its header says, without gaps or overlaps.
"""

from __future__ import annotations

import json
import os
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self

import torch

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.reading.source import source_of

__all__ = ["DTYPE_NAMES", "SafetensorsEntry", "SafetensorsFile"]

DTYPE_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MOST_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors package


class SafetensorsEntry(NamedTuple):
    """A tensor in such a file.

    Attributes:
        dtype: Its dtype.
        shape: Its extents.
        offset: Its first byte in the file.
        size_bytes: How many there are.
    """

    dtype: torch.dtype
    shape: torch.Size
    offset: int
    size_bytes: int


class SafetensorsFile:
    """One open file; use it as a context manager.

    Attributes:
        path: What it was opened as.
        entries: Its tensors by name.

    Raises:
        DamagedCheckpointError: It is no such file, or not whole.
        OSError: From the system, as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = source_of(path)
        self.path = self._source.path
        try:
            self.entries = self._read_header()
        except BaseException:
            self._source.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._source.close()

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own."""
        entry = self.entries[name]
        values = torch.empty(entry.size_bytes, dtype=torch.uint8)
        if entry.size_bytes:
            self._source.read_into(memoryview(values.numpy()), entry.offset)  # type: ignore[arg-type] # NumPy's stubs
        return values.view(entry.dtype).reshape(entry.shape)

    def check_unchanged(self) -> None:
        """Check that nobody has written into the file since it was opened.

        Raises:
            DamagedCheckpointError: Somebody has.
        """
        self._source.check_unchanged()

    def _read_header(self) -> dict[str, SafetensorsEntry]:
        size = self._source.size_bytes
        length = int.from_bytes(self._source.read(0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            self._refuse("it does not begin with the header of a safetensors file, or is cut off within it")
        try:
            header = json.loads(self._source.read(8, length))
            described = {name: one for name, one in header.items() if name != "__metadata__"}
            entries = {name: _entry_of(one, 8 + length) for name, one in described.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            self._refuse("its header cannot be read")
        end = 8 + length
        for entry in sorted(entries.values(), key=lambda one: (one.offset, one.size_bytes)):
            if entry.offset != end:
                self._refuse("the tensors in its header overlap, or leave a gap")
            end += entry.size_bytes
        if end != size:
            self._refuse(f"its tensors end at byte {end}, and it has {size}")
        return entries

    def _refuse(self, reason: str) -> NoReturn:
        raise DamagedCheckpointError(path=self.path, reason=reason, next_step="fetch or write the file again")


def _entry_of(described: Any, start: int) -> SafetensorsEntry:
    dtype = _DTYPES[described["dtype"]]
    shape = torch.Size(described["shape"])
    first, end = described["data_offsets"]
    if not all(type(one) is int and one >= 0 for one in (first, end, *shape)):
        raise ValueError
    if end - first != shape.numel() * dtype.itemsize:
        raise ValueError
    return SafetensorsEntry(dtype, shape, start + first, end - first)
