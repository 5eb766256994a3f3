"""Hand a file to ``torch.load`` once its claims are checked, and turn torch's many kinds of failure into one."""

from __future__ import annotations

import json
import mmap as mmap_module
import os
import pickle
import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._weights_only_unpickler import _get_user_allowed_globals

from safeckpt.errors import DamagedCheckpointError, UntrustedTypeError
from safeckpt.file.archive import PACKS_RECORD
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from safeckpt.file.reading.central_directory import check_local_headers
from safeckpt.file.reading.placement import Placement, Records, own_storages
from safeckpt.file.reading.unpickle import is_simple, unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safeckpt.file.pickle_scan import Scan
    from safeckpt.file.reading.central_directory import Directory
    from safeckpt.file.reading.source import Source

__all__ = ["load_records", "scan_records"]

_MOST_PICKLE_BYTES: Final = 1 << 30  # a million tensors take about 150 MB
_FAILURES: Final = (
    RuntimeError, OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError,
    ArithmeticError, pickle.UnpicklingError,
)  # fmt: skip
_USUAL: Final = {  # what torch looks at besides the pickle; with anything else in there it is torch that decides
    "byteorder": sys.byteorder.encode("ascii"), "version": b"3\n", ".format_version": b"1", ".storage_alignment": b"64"
}  # fmt: skip
_NO_MEMORY: Final = ("allocate memory", "not enough memory", "out of memory")


def load_records(
    source: Source, directory: Directory, map_location: Any, *, mmap: bool, own: bool
) -> tuple[Any, int | None]:
    """Load everything; see :meth:`safeckpt.file.reading.checkpoint_file.CheckpointFile.load`.

    Args:
        source: The file.
        directory: Its records.
        map_location: As in ``torch.load``.
        mmap: Map the file instead of reading it.
        own: Whether safeckpt wrote it.

    Returns:
        The object, and where in memory the file begins, if it was mapped.
    """
    if torch.serialization._serialization_tls.skip_data:
        raise RuntimeError("inside torch.serialization.skip_data() a load would return memory that was never filled")
    with no_collection():
        data, scan = scan_records(source, directory)
        _check_devices(source, scan, map_location)
        offsets = {directory.short_name(entry): entry.data_offset for entry in directory.entries if mmap}
        placement = Placement(scan, _packed_keys(source, directory), map_location, offsets)
        _check_packed(source, scan, placement.shared_keys)
        by_c = placement.shared_keys and _fits_the_fast_reader(source, directory, scan, placement)
        if own:
            check_local_headers(source, directory)
        mapped_path = _readable(source, mmap=mmap) if mmap else None
        with _modes(scan, mmap=mmap):
            try:
                if by_c:
                    records = Records(source, directory, scan, placement, mapped_path)
                    loaded, exact = unpickle(data, scan, placement.shared_keys, records.storage)
                    if exact:
                        return loaded, placement.address
                readable = mapped_path or _readable(source, mmap=mmap)
                loaded = torch.load(readable, placement.map_location, weights_only=True, mmap=mmap)
            except _FAILURES as error:
                if placement.failed or _is_innocent(error, scan):
                    raise
                raise _damaged(source, f"torch cannot load it: {_first_line(error)}", "data.pkl") from error
        own_storages(loaded, placement.shared)
        return loaded, placement.address


def _fits_the_fast_reader(source: Source, directory: Directory, scan: Scan, placement: Placement) -> bool:
    usual = all(
        (entry := directory.find(name)) is not None and source.read(entry.data_offset, entry.size) == content
        for name, content in _USUAL.items()
    )
    log = directory.find(".data/serialization_id")  # torch decodes it
    usual = usual and log is not None and source.read(log.data_offset, log.size).isascii()
    faked = placement.meta or torch._guards.detect_fake_mode(None) is not None
    return usual and not faked and not scan.builds and is_simple(scan.globals)


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


def scan_records(source: Source, directory: Directory) -> tuple[bytes, Scan]:
    """Return the pickle of a file and what is in it, once what it says about storages agrees with the records.

    Raises:
        DamagedCheckpointError: A safe load would not survive the pickle, or a record is missing or of another size.
        UntrustedTypeError: The pickle asks for a class or function that is not allowed.
    """
    entry = directory.find("data.pkl")
    if entry is None or entry.size > _MOST_PICKLE_BYTES:
        raise _damaged(source, "its pickle is missing, or larger than any state needs", "data.pkl")
    data = source.read(entry.data_offset, entry.size)
    try:
        scan = scan_pickle(data)
    except UntrustedGlobalError as error:
        raise UntrustedTypeError(path=source.path, type_name=error.name) from None
    except PickleError as error:
        raise _damaged(source, str(error), "data.pkl") from None
    sizes = {directory.short_name(entry): entry.size for entry in directory.entries}
    for key, claim in scan.claims.items():
        size = sizes.get(f"data/{key}")
        if size != claim.nbytes:
            has = "is missing" if size is None else f"has {size} bytes"
            raise _damaged(source, f"a tensor needs {claim.nbytes} bytes of a record which {has}", f"data/{key}")
    return data, scan


def _damaged(source: Source, reason: str, record: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(path=source.path, reason=reason, record=record)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _is_innocent(error: Exception, scan: Scan) -> bool:
    """Tell whether the file cannot be blamed: memory ran out, the disk failed, or a registered type refused."""
    if isinstance(error, OSError):
        return error.errno is not None and error.errno != 22  # EINVAL: torch seeks to a place that is not there
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY):
        return True
    return not scan.globals.isdisjoint(_get_user_allowed_globals())


def _readable(source: Source, *, mmap: bool) -> Any:
    """Return what torch can open and which is the open file itself, whatever its name means by now."""
    if source.descriptor is not None:
        name = f"/proc/self/fd/{source.descriptor}"
        if os.path.exists(name):  # noqa: PTH110  a link that only the kernel can follow
            return name
        if mmap and os.path.samestat(os.stat(source.path), os.fstat(source.descriptor)):  # noqa: PTH116
            return source.path
    if mmap:
        raise ValueError(f"{source.path} cannot be mapped into memory: it is no file on disk under its own name")
    source.file.seek(0)
    return source.file


def _packed_keys(source: Source, directory: Directory) -> frozenset[str]:
    entry = directory.find(PACKS_RECORD)
    if entry is None:
        return frozenset()
    try:
        keys = json.loads(source.read(entry.data_offset, entry.size))
    except (ValueError, RecursionError):
        keys = None
    if type(keys) is not list or not all(type(key) is int for key in keys):
        raise _damaged(source, "the list of records with many tensors is not whole", PACKS_RECORD)
    return frozenset(map(str, keys))


def _check_packed(source: Source, scan: Scan, shared_keys: frozenset[str]) -> None:
    """Check that tensors which are copied out of shared records need no more memory than those records.

    Raises:
        DamagedCheckpointError: Some of them overlap or repeat their elements, which no writer does.
    """
    for key in shared_keys & scan.claims.keys():
        claim = scan.claims[key]
        if claim.taken_bytes > claim.nbytes:
            raise _damaged(source, f"tensors need {claim.taken_bytes} bytes of {claim.nbytes}", f"data/{key}")


def _check_devices(source: Source, scan: Scan, map_location: Any) -> None:
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
                raise _damaged(source, f"it names a device {location!r}", "data.pkl") from None
        if str(target) not in ("cpu", "meta"):
            torch.serialization.default_restore_location(torch.UntypedStorage(0), str(target))
