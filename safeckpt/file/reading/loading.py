"""Load what is in a file: read its pickle, check it, and build the object, here or by ``torch.load``."""

from __future__ import annotations

import mmap as mmap_module
import pickle
import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import torch

from safeckpt.errors import DamagedCheckpointError, UntrustedTypeError
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from safeckpt.file.reading.central_directory import check_local_headers
from safeckpt.file.reading.storages import MapLocation, Storages
from safeckpt.file.reading.unpickle import can_unpickle, unpickle
from safeckpt.system.torch_private import fake_mode_is_on, registered_globals, skip_data_is_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safeckpt.file.pickle_scan import Scan
    from safeckpt.file.reading.central_directory import Archive
    from safeckpt.file.reading.source import Source

__all__ = ["load_archive", "read_pickle"]

_MOST_PICKLE_BYTES: Final = 1 << 30  # a million tensors take about 150 MB
_FAILURES: Final = (
    RuntimeError, OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError,
    ArithmeticError, pickle.UnpicklingError,
)  # fmt: skip
_USUAL: Final = {  # what torch looks at besides the pickle; with anything else in there it is torch that decides
    "byteorder": sys.byteorder.encode("ascii"), "version": b"3\n", ".format_version": b"1", ".storage_alignment": b"64"
}  # fmt: skip
_NO_MEMORY: Final = ("allocate memory", "not enough memory", "out of memory")


def load_archive(file: Archive, map_location: Any, *, mmap: bool, checked: bool) -> tuple[Any, int | None]:
    """Load everything; see :meth:`safeckpt.file.reading.checkpoint_file.CheckpointFile.load`.

    Args:
        file: The file.
        map_location: As in ``torch.load``.
        mmap: Map the file instead of reading it.
        checked: Whether the file was verified: then what is read now has to be the same.

    Returns:
        The object, and where in memory the file begins, if it was mapped and torch's own reader was not needed.
    """
    if skip_data_is_on():
        raise RuntimeError("inside torch.serialization.skip_data() a load would return memory that was never filled")
    checked = checked and any(entry.crc for entry in file.entries)  # torch can be told to write none
    with no_collection():
        data, scan = read_pickle(file, checked=checked)
        _check_devices(file, scan, map_location)
        if file.trailer is not None:
            check_local_headers(file)
        target = MapLocation(map_location)
        mapped_path = file.source.mappable_path() if mmap else None
        try:
            if can_unpickle(scan) and _is_usual(file) and not target.is_meta and not fake_mode_is_on():
                storages = Storages(file, target, mapped_path, checked=checked)
                return unpickle(data, scan, storages.get), storages.address
            openable = mapped_path or _openable(file.source)
            with _modes(scan, mmap=mmap):
                return torch.load(openable, target.for_torch, weights_only=True, mmap=mmap), None
        except _FAILURES as error:
            if target.failed or _is_innocent(error, scan):
                raise
            raise file.damaged(f"torch cannot load it: {_first_line(error)}", "data.pkl") from error


def read_pickle(file: Archive, *, checked: bool = False) -> tuple[bytes, Scan]:
    """Return the pickle of a file and what is in it, once what it says about storages agrees with the records.

    Raises:
        DamagedCheckpointError: A safe load would not survive the pickle, or a record is missing or of another size.
        UntrustedTypeError: The pickle asks for a class or function that is not allowed.
    """
    entry = file.find("data.pkl")
    if entry is None or entry.size > _MOST_PICKLE_BYTES:
        raise file.damaged("its pickle is missing, or larger than any state needs", "data.pkl")
    data = file.read(entry)
    if checked and crc32(data) != entry.crc:
        raise file.damaged("its bytes have changed since they were verified", "data.pkl")
    try:
        scan = scan_pickle(data)
    except UntrustedGlobalError as error:
        raise UntrustedTypeError(path=file.source.path, type_name=error.name) from None
    except PickleError as error:
        raise file.damaged(str(error), "data.pkl") from None
    sizes = {file.short_name(entry): entry.size for entry in file.entries}
    for key, claim in scan.claims.items():
        size = sizes.get(f"data/{key}")
        if size != claim.nbytes:
            has = "is missing" if size is None else f"has {size} bytes"
            raise file.damaged(f"a tensor needs {claim.nbytes} bytes of a record which {has}", f"data/{key}")
    return data, scan


def _check_devices(file: Archive, scan: Scan, map_location: Any) -> None:
    """Let torch say now which device is missing: that is no damage.

    Raises:
        RuntimeError: From torch, as it is: a device is not there, with the advice to use map_location.
        DamagedCheckpointError: The file names a device that does not exist anywhere.
    """
    if callable(map_location):
        return
    for location in {claim.location for claim in scan.claims.values()}:
        target = map_location.get(location, location) if isinstance(map_location, dict) else map_location or location
        if target is location and location != "cpu":
            try:
                torch.device(location)
            except RuntimeError:
                raise file.damaged(f"it names a device {location!r}", "data.pkl") from None
        if str(target) not in ("cpu", "meta"):
            torch.serialization.default_restore_location(torch.UntypedStorage(0), str(target))


def _is_usual(file: Archive) -> bool:
    """Return whether the small records hold what every file has today."""
    usual = all((entry := file.find(name)) is not None and file.read(entry) == data for name, data in _USUAL.items())
    log = file.find(".data/serialization_id")  # torch decodes it
    return usual and log is not None and file.read(log).isascii()


@contextmanager
def _modes(scan: Scan, *, mmap: bool) -> Iterator[None]:
    """Set what torch takes from global options, where the file makes it matter."""
    with ExitStack() as modes:
        # Torch checks the indices of sparse tensors only when asked to; bad ones read outside their memory.
        if any("sparse" in name for name in scan.globals):
            modes.enter_context(torch.sparse.check_sparse_tensor_invariants(enable=True))
            modes.enter_context(warnings.catch_warnings())
            # Since 2.14 torch checks them as well, and says so each time.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        if scan.protocol != 2 or any("qtensor" in name for name in scan.globals):
            modes.enter_context(warnings.catch_warnings())
            # Torch may not know every opcode of another protocol; the scan has shown that it does.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            # Torch uses its own deprecated class to rebuild a quantized tensor.
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        if mmap and torch.serialization.get_default_mmap_options() != mmap_module.MAP_PRIVATE:
            # Through a shared mapping, training would write into the checkpoint.
            modes.enter_context(torch.serialization.set_default_mmap_options(mmap_module.MAP_PRIVATE))
        yield


def _openable(source: Source) -> Any:
    """Return what torch can open and which is the open file itself."""
    path = source.descriptor_path()
    if path is not None:
        return path
    source.file.seek(0)
    return source.file


def _is_innocent(error: Exception, scan: Scan) -> bool:
    """Return whether the file cannot be blamed: memory ran out, the disk failed, or a registered type refused."""
    if isinstance(error, (OSError, DamagedCheckpointError)):
        return not isinstance(error, OSError) or (
            error.errno is not None and error.errno != 22  # EINVAL: torch seeks to a place that is not there
        )
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY):
        return True
    return not scan.globals.isdisjoint(registered_globals())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
