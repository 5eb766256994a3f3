"""Every storage that a payload refers to, and the record that each of them goes into.

Most storages are needed as a whole and get a record of their own, as in torch. Where there are very many small ones,
those that a single tensor owns share records: one for each element type and MiB. ``torch.load`` looks up every record
by itself and reads its name, its header and its data, which takes longer than reading a small tensor's elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safeckpt.file.writing.record_content import Pack, Span
from safeckpt.file.writing.views import Segment, Use, UsedStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from safeckpt.file.writing.views import Place

__all__ = ["UsedStorages", "WholeStorage"]

_PACKED_BYTES = 8 << 10  # a storage up to this size may be packed with others
_PACK_BYTES = 1 << 20  # of one pack: what a tensor that is loaded by plain torch and kept alone holds on to
_PACK_FROM = 1024  # fewer small storages than this are written one by one, as torch does


class WholeStorage:
    """A storage that plain contiguous tensors need from the first byte to the last: the common case, kept short.

    Attributes:
        storage: The storage.
        dtype: Of the tensors.
        count: How many tensors refer to it.
        offset: At which element of its segment it starts.
    """

    __slots__ = ("_segment", "count", "dtype", "offset", "storage", "tensor")

    def __init__(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.count = 1
        self.offset = 0
        self._segment: Segment | None = None

    @property
    def packable(self) -> bool:
        """Whether it is small and one tensor alone owns it."""
        return self.count == 1 and self._segment is None and 0 < self.tensor.nbytes <= _PACKED_BYTES

    @property
    def segment(self) -> Segment:
        """The record it is found in: one of its own unless it was put into another."""
        if self._segment is None:
            self._segment = Segment(Span(self.storage, 0, self.storage.nbytes()), self.storage)
        return self._segment

    def put(self, segment: Segment, start: int = 0) -> None:
        """Have it found in another record, at a byte."""
        self._segment = segment
        self.offset = start // self.dtype.itemsize

    def use(self) -> Use:
        """Describe it as a view."""
        itemsize = self.dtype.itemsize
        return Use.of(self.dtype, itemsize, 0, (self.storage.nbytes() // itemsize,), (1,))


class UsedStorages:
    """Every storage that a payload refers to.

    Storages are known by the identity of their Python objects, of which torch makes one for each; they are held, so
    that no identity comes twice.
    """

    def __init__(self) -> None:
        self._used: dict[int, UsedStorage] = {}
        self._whole: dict[int, WholeStorage] = {}

    def add_whole(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> WholeStorage | None:
        """Take note of a tensor that needs all of its storage; None when it has to be noted as a view."""
        whole = self._whole.get(id(storage))
        if whole is None:
            whole = self._whole[id(storage)] = WholeStorage(storage, tensor)
            return whole
        if whole.dtype is not tensor.dtype:
            return None
        whole.count += 1
        return whole

    def add(self, storage: torch.UntypedStorage, use: Use) -> None:
        """Take note of a view."""
        used = self._used.get(id(storage))
        if used is None:
            used = self._used[id(storage)] = UsedStorage(storage)
        used.uses.append(use)

    def plan(self, *, pack: bool = True) -> None:
        """Decide about every storage.

        Raises:
            StorageTypeConflictError: Views of different dtypes share bytes.
        """
        for key, used in self._used.items():
            whole = self._whole.get(key)
            if whole is not None:
                whole.count += len(used.uses)
                used.uses.insert(0, whole.use())
            used.plan()
            if whole is not None:
                whole.put(used.segments[0])
        if pack and len(self._whole) >= _PACK_FROM:
            small = [whole for whole in self._whole.values() if whole.packable]
            if len(small) >= _PACK_FROM:
                for group in _packs(small):
                    _pack(group)

    def place(self, storage: torch.UntypedStorage, use: Use) -> Place:
        """Tell where a view is found."""
        used = self._used.get(id(storage))
        if used is None:
            # A tensor that exists only while it is pickled, made anew each time it is asked for, or another object
            # over a storage that is needed as a whole.
            used = self._used[id(storage)] = UsedStorage(storage)
            whole = self._whole.get(id(storage))
            if whole is not None and not whole.segment.packed:
                used.segments.append(whole.segment)
                used.origins.append(0)
            else:
                used.uses.append(Use.of(use.dtype, 1, 0, (storage.nbytes(),), (1,)))
                used.plan()
        return used.place(use)


def _packs(small: list[WholeStorage]) -> Iterator[list[WholeStorage]]:
    """Sort small storages into packs: one dtype and one device each, of bounded size, in the order of the payload."""
    open_packs: dict[tuple[torch.dtype, torch.device], tuple[list[WholeStorage], int]] = {}
    for whole in small:
        kind = (whole.dtype, whole.storage.device)
        nbytes = whole.tensor.nbytes
        group, filled = open_packs.get(kind, ([], 0))
        if filled + nbytes > _PACK_BYTES:
            yield group
            group, filled = [], 0
        group.append(whole)
        open_packs[kind] = (group, filled + nbytes)
    yield from (group for group, _ in open_packs.values())


def _pack(group: list[WholeStorage]) -> None:
    segment = Segment(
        Pack([whole.tensor for whole in group], sum(whole.tensor.nbytes for whole in group)),
        group[0].storage,
        packed=True,
    )
    start = 0
    for whole in group:
        whole.put(segment, start)
        start += whole.tensor.nbytes
