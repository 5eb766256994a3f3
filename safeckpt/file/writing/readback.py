"""Check before the commit that a file which was just written can be read back.

Everything but the data of the tensors is read again, from the file: its end, its table of contents, the records that
are no tensor. They have to be those that were written. The pickle is gone through once more with nothing but sizes:
every tensor must lie inside the record that is there for it. A full scan, as a load makes it, takes five times as long.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, TYPE_CHECKING, Any

from safeckpt.errors import LoadError, UnsavableStateError
from safeckpt.file.pickle_calls import storage_dtype
from safeckpt.file.pickle_scan import python3_name
from safeckpt.file.reading.source import source_of
from safeckpt.system.torch_private import allowed_globals

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from safeckpt.file.archive import Entry
    from safeckpt.file.writing.stable_copies import Content

__all__ = ["check_written"]


def check_written(
    f: IO[bytes], size_bytes: int, records: Sequence[tuple[Entry, Content]], tail: bytes, *, is_plain: bool
) -> None:
    """Check a file that was written a moment ago.

    Args:
        f: The file, open for reading.
        size_bytes: Length that it has to have.
        records: What was written, in order.
        tail: What was written after them.
        is_plain: Whether its pickle holds nothing but plain values and tensors.

    Raises:
        UnsavableStateError: It is not what was written, or would be refused by a load.
    """
    expected = [(entry.name.decode(), entry.data_offset, data) for entry, data in records if isinstance(data, bytes)]
    expected.append(("its end", size_bytes - len(tail), tail))
    source = source_of(f)
    try:
        if source.size_bytes != size_bytes:
            raise _unreadable(f"it has {source.size_bytes} bytes instead of {size_bytes}")
        for name, offset, data in expected:
            if source.read(offset, len(data)) != data:
                raise _unreadable(f"{name} is not what was written")
    except LoadError as error:
        raise _unreadable(str(error).splitlines()[0]) from error
    finally:
        source.close()
    if is_plain:
        pickled = next(data for entry, data in records if entry.name.endswith(b"/data.pkl"))
        _SizeReader(pickled, [entry.size for entry, data in records if not isinstance(data, bytes)]).load()


def _unreadable(reason: str) -> UnsavableStateError:
    return UnsavableStateError(
        location="payload",
        type_name="structure",
        reason=f"the file that was written for it cannot be read back: {reason}",
        cure="save again; if it happens again, the disk returns other bytes than were written to it.",
    )


class _Tensor:
    """Stands for whatever is made of a tensor."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_TENSOR = _Tensor()


class _SizeReader(pickle.Unpickler):
    """Goes through a pickle of our own making and builds its plain values, but no storage and no tensor."""

    def __init__(self, data: Any, sizes: Iterable[int]) -> None:
        # Of a file without a buffer, each opcode would be read by a call of its own.
        super().__init__(io.BufferedReader(io.BytesIO(data)), encoding="utf-8")
        self._sizes = {str(key): size for key, size in enumerate(sizes)}

    def find_class(self, module: str, name: str) -> Any:
        full = ".".join(python3_name(module, name))
        dtype = storage_dtype(full)
        if dtype is not None:
            return dtype
        if full == "torch._utils._rebuild_tensor_v2":
            return self._tensor
        if full == "torch._utils._rebuild_tensor_v3":
            return self._tensor_v3
        return _Tensor if full.startswith(("torch._utils.", "torch._tensor.")) else allowed_globals()[full]

    def persistent_load(self, persistent_id: Any) -> tuple[str, int, int]:
        _, dtype, key, _, numel = persistent_id
        size = numel * dtype.itemsize
        if self._sizes.get(key) != size:
            raise _unreadable(f"a tensor needs {size} bytes of data/{key}")
        return key, size, dtype.itemsize

    def _tensor_v3(self, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> _Tensor:
        return self._tensor((*storage[:2], rest[2].itemsize), offset, size, stride)

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
        key, nbytes, itemsize = storage
        if 0 not in size:
            last = offset
            for extent, step in zip(size, stride, strict=True):
                last += (extent - 1) * step
            if (last + 1) * itemsize > nbytes:
                raise _unreadable(f"a tensor needs {(last + 1) * itemsize} bytes of data/{key}, which has {nbytes}")
        return _TENSOR
