"""Choose the bytes of each storage that go into the file.

A view must not drag its storage into the file: of a slice of 10 elements out of a million, 10 are written. Tensors
that share memory must still share it afterwards. So a storage becomes one record, from the first byte that a tensor of
the payload touches to the last. Nearly always that is all of it, and the file is what torch writes.

The format gives a record one element type. Where tensors of several types lie in one storage, as in a buffer that holds
all of a model's state, each type has a record; tensors of two types that share bytes cannot be expressed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.file.writing.second_look import Bits, Guarded
from safeckpt.file.writing.stable_copies import as_view
from safeckpt.system.host_memory import copy_small
from safeckpt.system.tensor_kind import span_of
from safeckpt.system.torch_private import BYTES_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Span", "StorageTypeConflictError", "UsedStorages", "View", "stored_dtype", "view_of"]


class View(NamedTuple):
    """The stretch of a storage that one tensor touches.

    Attributes:
        dtype: Element type by which the file calls the storage; None for bytes.
        itemsize: Bytes per element of the tensor, by which its offset counts.
        low: First byte.
        high: One past the last byte; `low` when the tensor has no elements.
    """

    dtype: torch.dtype | None
    itemsize: int
    low: int
    high: int


class StorageTypeConflictError(Exception):
    """Two tensors with different dtypes share memory, which the format cannot express."""

    def __init__(self, storage: torch.UntypedStorage, first: View, second: View) -> None:
        names = (str(view.dtype or "a newer dtype") for view in (first, second))
        super().__init__(f"tensors of {' and '.join(names)} share memory")
        self.storage = storage
        self.first = first
        self.second = second


def stored_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the element type by which the file calls the storage of a tensor; None for bytes.

    Tensors of the newer types, for which the format has no name, carry their dtype beside the storage.
    """
    return None if tensor.dtype in BYTES_DTYPES else tensor.dtype


def view_of(tensor: torch.Tensor) -> View:
    """Return the stretch of its storage that a strided tensor touches."""
    itemsize = tensor.element_size()
    low, high = span_of(tensor)
    return View(stored_dtype(tensor), itemsize, low * itemsize, high * itemsize)


class Span:
    """One record to be: the bytes of a storage that all tensors of one type in it need.

    Until it is `cut` it is taken to be all of the storage, as it nearly always is.

    Attributes:
        storage: The storage.
        dtype: Element type by which the file calls it; None for bytes.
        low: First byte.
        high: One past the last byte.
        persistent_id: How the pickle refers to it, once it does.
        bits: How its elements say NaN and Inf, when they have to be finite.
    """

    __slots__ = (
        "_guard", "_needed", "_unit", "_views", "_whole", "bits", "dtype", "high", "low", "persistent_id", "storage",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> None:
        self.storage = storage
        self.dtype = dtype
        self.low = 0
        self.high = storage.nbytes()
        self.persistent_id: tuple[Any, ...] | None = None
        self.bits: Bits | None = None
        self._views: list[View] | None = None
        self._whole = 0  # bytes of an element of a tensor that is all of the storage
        self._needed = (0, 0)
        self._unit = 1

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.high - self.low

    @property
    def is_needed_whole(self) -> bool:
        """Whether the tensors so far need what the record is now."""
        return self._needed == (self.low, self.high)

    def guard(self, name: str, tensor: torch.Tensor, bits: Bits) -> None:
        """Have it looked at once more when it is written.

        Args:
            name: What the guard calls the tensors that it is all of.
            tensor: The first of them.
            bits: How they say NaN and Inf.
        """
        self.bits = bits
        self._guard = (name, tensor)

    @property
    def guarded(self) -> Guarded:
        """What was given to `guard`, without the tensor."""
        name, tensor = self._guard
        is_known = tensor.nbytes == self.nbytes and tensor.is_contiguous()
        shape = tuple(tensor.size()) if is_known else (self.nbytes // tensor.element_size(),)
        return Guarded(name, shape)

    @property
    def views(self) -> list[View]:
        """The stretches that tensors touch."""
        whole = [View(self.dtype, self._whole, 0, self.storage.nbytes())] if self._whole else []
        return whole + (self._views or [])

    def add_whole(self, itemsize: int) -> None:
        """Take note of a tensor that is all of the storage, as nearly every one is."""
        self._whole = itemsize
        self._unit = max(self._unit, itemsize)
        self._needed = (0, self.high)

    def add(self, view: View) -> None:
        """Take note of a tensor."""
        if self._views is None:
            self._views = []
        self._views.append(view)
        _, itemsize, low, high = view
        if low == high:
            return
        self._unit = max(self._unit, itemsize)
        if self._needed[0] != self._needed[1]:
            low, high = min(self._needed[0], low), max(self._needed[1], high)
        low -= low % self._unit  # the widths of newer dtypes differ: start where all of them can count from
        self._needed = (low, high)

    def cut(self) -> None:
        """Be no more than what the tensors need, and have no name any more."""
        self.low, self.high = self._needed
        self.persistent_id = None

    def offset_of(self, view: View) -> int | None:
        """Return at which of its own elements a tensor begins in the record, None when it is not all in there."""
        if view.low == view.high:
            return 0
        return (view.low - self.low) // view.itemsize if self.low <= view.low and view.high <= self.high else None

    @property
    def is_on_host(self) -> bool:
        """Whether the processor reads it where it is."""
        return self.persistent_id is not None and self.persistent_id[3] == "cpu"

    @property
    def address(self) -> int:
        """Where it is in host memory.

        Raises:
            UnsavableStateError: Its storage was made smaller since the file was laid out.
        """
        if self.storage.nbytes() < self.high:
            raise UnsavableStateError(
                location="payload",
                type_name="torch.Tensor",
                reason=f"its storage holds {self.storage.nbytes()} bytes and held {self.high} when the save began",
                cure="let nothing resize it during a save.",
            )
        return self.storage.data_ptr() + self.low

    def copy_to(self, address: int) -> None:
        """Copy all of it to an address in host memory; it is small."""
        if self.is_on_host:
            copy_small(address, self.address, self.nbytes)
            return
        moved = self._bytes(0, self.nbytes).cpu()  # held until it is copied
        copy_small(address, moved.data_ptr(), self.nbytes)

    def view(self) -> memoryview:
        """Return its memory, which is on the host.

        Raises:
            UnsavableStateError: As `address`.
        """
        self.address  # noqa: B018 - looks at the size
        return as_view(self._bytes(0, self.nbytes).numpy())

    def staged(self, low: int, high: int) -> memoryview:
        """Return a private copy of some of its bytes, through pinned memory where there is any."""
        # A fresh one for each piece. Pinned blocks come from torch's cache: the first few alone cost anything.
        pinned = torch.accelerator.current_accelerator() is not None and self.storage.device.type != "mps"
        data = self._bytes(low, high)
        return as_view(torch.empty(data.shape, dtype=torch.uint8, device="cpu", pin_memory=pinned).copy_(data).numpy())

    def _bytes(self, low: int, high: int) -> torch.Tensor:
        """Return some of its bytes as a tensor that shares their memory."""
        # The device is named, since a default device may be set; the grad mode does not matter for integers.
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.low + low, (high - low,), (1,))


class UsedStorages:
    """Every storage that a payload refers to.

    Storages are known by the identity of their Python objects, of which torch makes one for each; they are held, so
    that no identity comes twice.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[int, torch.dtype | None], Span] = {}
        self._is_cut = False

    @property
    def spans(self) -> Iterable[Span]:
        """The records so far."""
        return self._spans.values()

    @property
    def are_needed_whole(self) -> bool:
        """Whether every record is what the tensors so far need."""
        return all(span.is_needed_whole for span in self._spans.values())

    def cut(self) -> None:
        """Let every record be no more than what the tensors so far need."""
        self._is_cut = True
        for span in self._spans.values():
            span.cut()

    def place(self, storage: torch.UntypedStorage, view: View) -> tuple[Span, int]:
        """Return where a tensor is found: its record, and at which element it begins there."""
        span = self._spans.get((id(storage), view.dtype))
        offset = None if span is None else span.offset_of(view)
        if span is None or offset is None:
            # When the records are cut, a tensor that was not there a moment ago: something makes it anew each time it
            # is pickled.
            span = self._spans[id(storage), view.dtype] = Span(storage, view.dtype)
            offset = view.low // view.itemsize
        if not self._is_cut:
            span.add(view)
        return span, offset

    def place_whole(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, itemsize: int) -> Span:
        """Return the record of a tensor that is all of its storage, where it begins at element 0."""
        key = (id(storage), dtype)
        span = self._spans.get(key)
        if span is None or (self._is_cut and span.nbytes != storage.nbytes()):
            span = self._spans[key] = Span(storage, dtype)
        if not self._is_cut:
            span.add_whole(itemsize)
        return span

    def check_types(self) -> None:
        """Check that the file can say what is in each storage.

        Raises:
            StorageTypeConflictError: Tensors of different dtypes share bytes.
        """
        if len({identity for identity, _ in self._spans}) == len(self._spans):
            return  # nearly always: no storage has two types
        by_storage: dict[int, list[Span]] = {}
        for (identity, _), span in self._spans.items():
            by_storage.setdefault(identity, []).append(span)
        for spans in by_storage.values():
            if len(spans) > 1:
                for first, second in _overlaps([view for span in spans for view in span.views]):
                    raise StorageTypeConflictError(spans[0].storage, first, second)


def _overlaps(views: list[View]) -> Iterator[tuple[View, View]]:
    """Yield neighbours of different types that share bytes."""
    furthest: dict[torch.dtype | None, View] = {}
    for view in sorted((view for view in views if view.low < view.high), key=lambda view: view[2:]):
        for other in furthest.values():
            if other.dtype is not view.dtype and view.low < other.high:
                yield other, view
        if view.dtype not in furthest or furthest[view.dtype].high < view.high:
            furthest[view.dtype] = view
