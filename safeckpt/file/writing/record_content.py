"""The bytes of one record: where they are in memory, and how to get at them piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Content", "Dense", "Pack", "Span", "storage_bytes"]

# For moving elements about without interpreting them: a dtype of the same width that every kernel knows.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Content(Protocol):
    """The data of a record."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    def pieces(self, cuts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Give the bytes from..to of every cut, in order; each stays valid while it is referenced."""


def storage_bytes(storage: torch.UntypedStorage, low: int, high: int) -> torch.Tensor:
    """Return bytes low..high of a storage as a tensor that shares its memory."""
    # The device is named, since a default device may be set; the grad mode does not matter for integers.
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, low, (high - low,), (1,))


def _host_pieces(data: torch.Tensor, cuts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    """Give pieces of a tensor of bytes, staged through pinned memory when it is on an accelerator."""
    if data.device.type == "cpu":
        view = memoryview(data.numpy())  # type: ignore[arg-type]  # NumPy's stubs predate the buffer protocol's
        for low, high in cuts:
            yield view[low:high]
        return
    pinned = torch.accelerator.current_accelerator() is not None and data.device.type != "mps"
    for low, high in cuts:
        # A fresh tensor for each piece: the caller may still hold the last ones. Pinned blocks come from torch's
        # cache, so the cost of pinning is paid for the first few only.
        host = torch.empty(high - low, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        host.copy_(data[low:high])
        yield memoryview(host.numpy())  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes low..high of a storage, as they are."""

    storage: torch.UntypedStorage
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.high - self.low

    def pieces(self, cuts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Give the bytes of every cut."""
        return _host_pieces(storage_bytes(self.storage, self.low, self.high), cuts)


@dataclass(frozen=True, slots=True)
class Dense:
    """The elements of a view that has gaps, without the gaps."""

    storage: torch.UntypedStorage
    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dense_stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        length = self.itemsize
        for extent, stride in zip(self.size, self.stride, strict=True):
            length *= extent if stride else 1
        return length

    def pieces(self, cuts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Copy the elements together, then give the bytes of every cut; the copy lives as long as they do."""
        bits = _BITS[self.itemsize]
        device = self.storage.device
        kept = [axis for axis, stride in enumerate(self.stride) if stride]
        size = tuple(self.size[axis] for axis in kept)
        view = torch.empty(0, dtype=bits, device=device)
        view.set_(self.storage, self.offset, size, tuple(self.stride[axis] for axis in kept))
        dense = torch.empty_strided(size, tuple(self.dense_stride[axis] for axis in kept), dtype=bits, device=device)
        dense.copy_(view)
        return _host_pieces(storage_bytes(dense.untyped_storage(), 0, self.nbytes), cuts)


@dataclass(frozen=True, slots=True)
class Pack:
    """Many small tensors that are contiguous, one after the other."""

    parts: Sequence[torch.Tensor]
    nbytes: int

    def pieces(self, cuts: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Copy the tensors together, then give the bytes of every cut."""
        with torch.no_grad():
            joined = torch.cat([part if part.dim() == 1 else part.reshape(-1) for part in self.parts])
        return _host_pieces(storage_bytes(joined.untyped_storage(), 0, self.nbytes), cuts)
