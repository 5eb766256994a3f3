"""Which bytes of which storages the tensors of a payload need.

A view must not drag its storage into the file: of a slice of 10 elements out of a million, 10 are written. Tensors
that share memory must still share it afterwards. So the byte ranges that the views of one storage touch are merged
into *segments*, and each segment becomes one record. Where the views together need the whole storage, which is the
rule, the only segment is the storage itself and the file is what torch writes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from safeckpt.file.writing.record_content import Dense, Span

if TYPE_CHECKING:
    from safeckpt.file.writing.record_content import Content

__all__ = ["Place", "Segment", "StorageTypeConflictError", "Use", "UsedStorage"]

_MASK_ELEMENTS = 1 << 24  # larger segments of several views are kept as they are, not searched element by element


class StorageTypeConflictError(Exception):
    """Two views with different dtypes share memory, which the format cannot express."""

    def __init__(self, first: Use, second: Use) -> None:
        names = (str(use.dtype or "a newer dtype") for use in (first, second))
        super().__init__(f"tensors of {' and '.join(names)} share memory")
        self.first = first
        self.second = second


class Use(NamedTuple):
    """One view of a storage.

    Attributes:
        dtype: Element type by which the file calls the storage; None for bytes, which any torch dtype that is newer
            than the format is stored as.
        itemsize: Bytes per element, by which offset and stride count.
        offset: First element.
        size: Extent of each dimension.
        stride: Elements between neighbours in each dimension.
        low: First byte touched.
        high: One past the last byte touched.
    """

    dtype: torch.dtype | None
    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    low: int
    high: int

    @classmethod
    def of(
        cls, dtype: torch.dtype | None, itemsize: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> Use:
        """Describe a strided view."""
        low = offset * itemsize
        if 0 in size:
            return cls(dtype, itemsize, offset, size, stride, low, low)
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        return cls(dtype, itemsize, offset, size, stride, low, (last + 1) * itemsize)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the elements themselves, those of a broadcast dimension once."""
        touched = prod(extent for extent, step in zip(self.size, self.stride, strict=True) if step)
        return min(touched * self.itemsize, self.high - self.low)

    def dense_stride(self) -> tuple[int, ...]:
        """Return the strides without gaps, dimensions in the same order in memory, broadcast ones still broadcast."""
        order = sorted(range(len(self.size)), key=lambda axis: (self.stride[axis], self.size[axis]))
        dense = [0] * len(self.size)
        step = 1
        for axis in order:
            if self.stride[axis]:
                dense[axis] = step
                step *= self.size[axis]
        return tuple(dense)


@dataclass(slots=True, eq=False)
class Segment:
    """One record to be: the content, and the name it gets when it is first referred to."""

    content: Content
    storage: torch.UntypedStorage
    packed: bool = field(default=False)
    key: str | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the file a view finds its elements."""

    segment: Segment
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class UsedStorage:
    """A storage and every view of it, then the segments they need.

    Segments are in the order of their origins: the byte of the storage that is the first one of the record. Views
    that share nothing, though the bytes between them interleave, have a record each.
    """

    storage: torch.UntypedStorage
    uses: list[Use] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    alone: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], Place] = field(default_factory=dict)

    def _add(self, content: Content, origin: int) -> None:
        self.segments.append(Segment(content, self.storage))
        self.origins.append(origin)

    def plan(self) -> None:
        """Cut the storage into segments.

        Raises:
            StorageTypeConflictError: Views of different dtypes share bytes.
        """
        for group in _groups(self.uses):
            low, high = group[0].low, max(use.high for use in group)
            unit = max(use.itemsize for use in group)
            if {use.dtype for use in group} == {None}:  # widths may differ: start where all of them can count from
                low -= low % unit
            if not self._without_gaps(group, low, high):
                self._add(Span(self.storage, low, high), low)
        if not self.segments and not self.alone:  # only views without elements
            self._add(Span(self.storage, 0, 0), 0)

    def _without_gaps(self, group: list[Use], low: int, high: int) -> bool:
        """Give each view a record of its own when they share nothing and the segment has gaps."""
        views = {(use.itemsize, use.offset, use.size, use.stride): use for use in group}
        needed = sum(use.needed_bytes for use in views.values())
        if needed >= high - low or not _disjoint(list(views.values()), low, high):
            return False
        for key, use in views.items():
            self.alone[key] = self._place_alone(use)
        return True

    def _place_alone(self, use: Use) -> Place:
        if use.needed_bytes == use.high - use.low:
            return Place(Segment(Span(self.storage, use.low, use.high), self.storage), 0, use.stride)
        stride = use.dense_stride()
        content = Dense(self.storage, use.itemsize, use.offset, use.size, use.stride, stride)
        return Place(Segment(content, self.storage), 0, stride)

    def place(self, use: Use) -> Place:
        """Tell where a view that was planned for is found."""
        alone = self.alone.get((use.itemsize, use.offset, use.size, use.stride))
        if alone is not None:
            return alone
        if not self.segments:  # a view without elements of a storage whose other views have a record each
            return Place(next(iter(self.alone.values())).segment, 0, use.stride)
        index = max(0, bisect_right(self.origins, use.low) - 1)
        segment, start = self.segments[index], use.low - self.origins[index]
        if use.low == use.high and not 0 <= start <= segment.content.nbytes:
            start = 0
        return Place(segment, start // use.itemsize, use.stride)


def _groups(uses: list[Use]) -> list[list[Use]]:
    """Group the views that share bytes, or touch and are of one dtype."""
    groups: list[list[Use]] = []
    high = 0
    for use in sorted(dict.fromkeys(uses), key=lambda use: (use.low, use.high)):
        if use.low == use.high:
            continue
        same = bool(groups) and groups[-1][0].dtype == use.dtype
        if groups and (use.low < high or (use.low == high and same)):
            if not same:
                raise StorageTypeConflictError(groups[-1][0], use)
            groups[-1].append(use)
        else:
            groups.append([use])
        high = max(high, use.high)
    return groups


def _disjoint(views: list[Use], low: int, high: int) -> bool:
    """Tell whether no element belongs to two views."""
    if len(views) == 1:
        return True
    itemsize = views[0].itemsize
    elements = (high - low) // itemsize
    if elements > _MASK_ELEMENTS or any(use.itemsize != itemsize for use in views):
        return False
    taken = torch.zeros(elements, dtype=torch.bool, device="cpu")
    for use in views:
        mine = taken.as_strided(use.size, use.stride, use.offset - low // itemsize)
        if bool(mine.any()):
            return False
        mine.fill_(True)
    return True
