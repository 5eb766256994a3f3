"""Where the storages of a file end up: read or mapped, moved to a device, on their own or shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from safeckpt.file.writing.record_content import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from safeckpt.file.pickle_scan import Scan
    from safeckpt.file.reading.central_directory import Directory
    from safeckpt.file.reading.source import Source

__all__ = ["Placement", "Records", "own_storages"]

_LEAVES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Placement:
    """Follows where each storage is put: which ones hold many tensors, and whether the caller's function failed.

    Attributes:
        shared_keys: Keys of the records that hold many tensors.
        shared: Addresses of their storages, once torch has loaded them.
        failed: Whether the caller's ``map_location`` raised.
        meta: Whether everything goes to the meta device.
        address: Of the first byte of the file, when it is mapped and something of it was loaded.
        map_location: What to give to torch.

    Args:
        scan: What the pickle refers to.
        shared_keys: Keys of the records that hold many tensors.
        map_location: As in ``torch.load``.
        offsets: Where the records are, by name, when the file is mapped.
    """

    def __init__(
        self,
        scan: Scan,
        shared_keys: frozenset[str],
        map_location: Any,
        offsets: Mapping[str, int] | None = None,
    ) -> None:
        self.shared_keys = shared_keys
        self.shared: set[int] = set()
        self.failed = False
        self.address: int | None = None
        self._offsets = offsets or {}
        named = isinstance(map_location, (str, torch.device))
        self.meta = named and str(map_location).partition(":")[0] == "meta"
        self._keys: Iterator[str] = iter([key for key, claim in scan.claims.items() if claim.nbytes])
        self._restore: Callable[[Any, str], Any] = torch.serialization._get_restore_location(map_location)
        # Torch treats some values of map_location specially, so it is replaced only where there is a need to.
        wrapped = ((shared_keys or offsets) and not self.meta) or callable(map_location)
        self.map_location: Any = self._follow if wrapped else map_location

    def put(self, storage: torch.UntypedStorage, location: str) -> Any:
        """Put a storage where it belongs."""
        try:
            return self._restore(storage, location)
        except BaseException:
            self.failed = True
            raise

    def _follow(self, storage: torch.UntypedStorage, location: str) -> Any:
        placed = self.put(storage, location)
        # Torch asks once for each storage that is not empty, in the order in which the pickle refers to them.
        key = next(self._keys, None) if storage.nbytes() else None
        if key in self.shared_keys:
            self.shared.add(placed._cdata)
        record = f"data/{key}"
        if self.address is None and record in self._offsets:
            self.address = storage.data_ptr() - self._offsets[record]
        return placed


class Records:
    """The records of a file as storages."""

    def __init__(
        self, source: Source, directory: Directory, scan: Scan, placement: Placement, mapped_path: str | None
    ) -> None:
        self._source = source
        self._entries = {directory.short_name(entry): entry for entry in directory.entries}
        self._scan = scan
        self._placement = placement
        self._mapped: torch.UntypedStorage | None = None
        if mapped_path is not None:
            self._mapped = torch.UntypedStorage.from_file(mapped_path, False, source.size_bytes)  # type: ignore[assignment]
            placement.address = self._mapped.data_ptr()  # type: ignore[union-attr]

    def storage(self, key: str) -> Any:
        """Read or map a record, and put it on its device."""
        entry = self._entries[f"data/{key}"]
        if self._mapped is not None:
            storage = self._mapped[entry.data_offset : entry.data_offset + entry.size]
        else:
            storage = torch.UntypedStorage(entry.size)
            if entry.size:
                memory = memoryview(storage_bytes(storage, 0, entry.size).numpy())  # type: ignore[arg-type]
                self._source.read_into(memory, entry.data_offset)
        return self._placement.put(storage, self._scan.claims[key].location)


def own_storages(tree: Any, packed: Collection[int]) -> None:
    """Move every tensor whose storage is packed, by address, into a storage of its own.

    A tensor that shares memory with unrelated ones would keep all of them alive, drag them into the file of the next
    plain ``torch.save``, and could be grown into its neighbour by ``resize_``.
    """
    if not packed:
        return
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            # No writer packs a conjugate or negative view, and a copy of one would be another view of the same values.
            plain = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
            if plain and value.untyped_storage()._cdata in packed:
                value.data = value.data.clone()
        elif isinstance(value, dict):
            todo.extend(value.keys())
            todo.extend(value.values())
        elif kind in (list, tuple, set):
            todo.extend(value)
            continue
        if getattr(value, "__dict__", None):
            todo.extend(value.__dict__.values())
