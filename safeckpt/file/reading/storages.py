"""The storages of a file: its records, read or mapped, each on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from safeckpt.system.torch_private import restore_location_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from safeckpt.file.pickle_calls import Claim
    from safeckpt.file.reading.central_directory import Archive

__all__ = ["MapLocation", "Storages"]


class MapLocation:
    """Puts storages where the argument `map_location` of `torch.load` says.

    Attributes:
        failed: Whether the caller's function raised: then the file cannot be blamed.
        for_torch: What to give to `torch.load`.
        is_meta: Whether everything goes to the meta device.
    """

    def __init__(self, map_location: Any) -> None:
        self.failed = False
        self.is_meta = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "meta"
        self._restore: Callable[[Any, str], Any] = restore_location_of(map_location)
        # Torch treats some values specially, so only a function is replaced.
        self.for_torch: Any = self.put if callable(map_location) else map_location

    def put(self, storage: torch.UntypedStorage, location: str) -> Any:
        """Put a storage where it belongs."""
        try:
            return self._restore(storage, location)
        except BaseException:
            self.failed = True
            raise


class Storages:
    """Gives the records of a file as storages.

    Args:
        file: The file.
        map_location: Where they go.
        mapped_path: A path at which the open file can be mapped; None to read it.
        checked: Whether what is read has to have the CRC-32 of its record.

    Attributes:
        address: Where in memory the file begins, when it is mapped.
    """

    def __init__(self, file: Archive, map_location: MapLocation, mapped_path: str | None, *, checked: bool) -> None:
        self._file = file
        self._entries = {file.short_name(entry): entry for entry in file.entries}
        self._map_location = map_location
        self._checked = checked
        self._mapped: Any = None
        self.address: int | None = None
        if mapped_path is not None:
            self._mapped = torch.UntypedStorage.from_file(mapped_path, False, file.source.size_bytes)
            self.address = self._mapped.data_ptr()

    def get(self, claim: Claim) -> Any:
        """Return the storage that a pickle refers to.

        Raises:
            DamagedCheckpointError: Its bytes have changed since they were verified.
        """
        name = f"data/{claim.key}"
        entry = self._entries[name]
        if self._mapped is not None:
            storage = self._mapped[entry.data_offset : entry.data_offset + entry.size]
        else:
            storage = torch.UntypedStorage(entry.size)
            if entry.size:
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (entry.size,), (1,))
                memory = memoryview(whole.numpy())  # type: ignore[arg-type]  # NumPy's stubs
                if not self._checked:
                    self._file.source.read_into(memory, entry.data_offset)
                elif self._file.source.read_with_crc(memory, entry.data_offset) != entry.crc:
                    raise self._file.damaged("its bytes have changed since they were verified", name)
        return self._map_location.put(storage, claim.location)
