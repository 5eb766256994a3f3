"""Prepare one file: an ordinary torch file that proves itself, all decided before a byte of it is written."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from safeckpt.errors import UnsavableStateError
from safeckpt.file import archive
from safeckpt.file.archive import ALIGNMENT_BYTES, MOST_HEADER_BYTES
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from safeckpt.file.trailer import TRAILER_BYTES
from safeckpt.file.writing.pickling import pickle_payload
from safeckpt.file.writing.spans import StorageTypeConflictError
from safeckpt.file.writing.write import ID_BYTES, PreparedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from safeckpt.file.writing.pickling import Pickled
    from safeckpt.file.writing.stable_copies import Content
    from safeckpt.file.writing.write import Writable, WrittenFile

__all__ = ["header_bytes", "prepare", "write_file"]


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return the header record: JSON in ASCII, on one line, keys in the order given."""
    data = json.dumps(dict(header), separators=(",", ":")).encode("ascii") + b"\n"
    if len(data) > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {len(data)} bytes; {MOST_HEADER_BYTES} are the most")
    return data


def prepare(
    payload: object,
    *,
    header: Mapping[str, Any] | None = None,
    pickle_protocol: int = 2,
    trailer: bool = True,
    finite: Iterable[tuple[str, torch.Tensor]] = (),
) -> PreparedFile:
    """Pickle a payload and lay the file out; nothing is written.

    The bytes depend on the payload and the header alone.

    Args:
        payload: What :func:`safeckpt.file.writing.encoding.encode` returned.
        header: JSON values to be found without unpickling, see :meth:`CheckpointFile.header`.
        pickle_protocol: 2, or 3.
        trailer: Whether it proves itself; a part of another file, see `JoinedFile`, has none.
        finite: Names and tensors of this very payload that the guard has found finite. They are looked at once more
            in what is written, since something else may write to them meanwhile.

    Raises:
        UnsavableStateError: A load would refuse it: the payload did not come from ``encode``.
    """
    with no_collection():
        try:
            pickled = pickle_payload(payload, pickle_protocol, finite)
        except StorageTypeConflictError as error:
            raise UnsavableStateError(location="payload", type_name="torch.Tensor", reason=str(error)) from None
        if not pickled.plain:
            _check_readable(pickled)
        contents: list[Content] = [] if header is None else [header_bytes(header)]
        byteorder = sys.byteorder.encode("ascii")
        contents += [pickled.data, b"1", b"%d" % ALIGNMENT_BYTES, byteorder, *pickled.spans, b"3\n"]
        names = archive.record_names(len(pickled.spans), header=header is not None)
        entries, directory_offset = archive.layout(list(zip(names, [*map(_size_of, contents), ID_BYTES], strict=True)))
        size_bytes = directory_offset + archive.tables_bytes(entries) + (TRAILER_BYTES if trailer else 0)
        return PreparedFile(size_bytes, entries, contents, pickled.plain, trailer)


def write_file(
    payload: object, f: Writable, *, header: Mapping[str, Any] | None = None, pickle_protocol: int = 2
) -> WrittenFile:
    """Prepare a payload and write it, see :func:`prepare` and :meth:`PreparedFile.write`."""
    return prepare(payload, header=header, pickle_protocol=pickle_protocol).write(f)


def _size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.nbytes


def _check_readable(pickled: Pickled) -> None:
    """Read the pickle as a load will, before a byte of it is on the disk.

    Raises:
        UnsavableStateError: A load would refuse it: the payload did not come from encode(), or changed since.
    """
    try:
        scan_pickle(pickled.data)
    except UntrustedGlobalError as error:
        raise UnsavableStateError(location="payload", type_name=error.name) from None
    except PickleError as error:
        raise UnsavableStateError(location="payload", type_name="structure", reason=str(error)) from None
