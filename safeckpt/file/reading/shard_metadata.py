"""Read what torch.distributed.checkpoint says about its files, and execute nothing.

The file `.metadata` is a pickle of the engine's own classes. Its own reader builds and runs whatever a pickle can name;
here it gets nothing but what metadata consists of. A process of the group needs the engine's classes, since the engine
works with them; a plain reader gets stand-ins, and need not import the engine.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from safeckpt.errors import DamagedCheckpointError
from safeckpt.system.torch_private import layout_named

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METADATA", "Chunk", "StoredTensor", "stored_tensors", "unpickle_metadata"]

METADATA: Final = ".metadata"  # the engine's name for it

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_FAILURES: Final = (
    pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError,
    MemoryError, NotImplementedError,
)  # fmt: skip
_PLAIN: Final[dict[tuple[str, str], Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): layout_named,
    ("pathlib", "PosixPath"): PurePosixPath,  # in what the engine itself has written
}


class Chunk(NamedTuple):
    """A part of a tensor, and where it is.

    Attributes:
        offsets: Where in the tensor it begins, one entry per dimension.
        sizes: Its extents.
        file: Name of the file that it is in.
        start: First byte of it in the file.
        length: Bytes of it in the file, where it is a torch file of its own.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor of a sharded checkpoint.

    Attributes:
        size: Its extents.
        chunks: The parts, which together are all of it.
    """

    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def unpickle_metadata(folder: Path, types: Mapping[tuple[str, str], Any]) -> Any:
    """Return what is in the engine's metadata.

    Args:
        folder: The directory.
        types: What stands for each class of the engine, by module and name. Nothing else is built.

    Raises:
        DamagedCheckpointError: It cannot be read, or asks for something that no metadata holds.
        OSError: From the system, as it is.
    """
    data = (folder / METADATA).read_bytes()
    try:
        return _Unpickler(io.BytesIO(data), types).load()
    except _FAILURES as error:
        raise _damaged(folder, str(error)) from error


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a sharded checkpoint by key, their places checked against each other.

    Raises:
        DamagedCheckpointError: The metadata cannot be read, or contradicts itself.
        OSError: From the system, as it is.
    """
    metadata = unpickle_metadata(folder, _STAND_INS)
    try:
        places = {
            (index.fqn, tuple(index.offset or ())): (info.relative_path, info.offset, info.length)
            for index, info in metadata.storage_data.items()
        }
        return {
            key: StoredTensor(tuple(tensor.size), _chunks_of(key, tensor, places))
            for key, tensor in metadata.state_dict_metadata.items()
            if hasattr(tensor, "chunks")
        }
    except _FAILURES as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from error


def _chunks_of(key: str, tensor: Any, places: Mapping[Any, tuple[Any, Any, Any]]) -> tuple[Chunk, ...]:
    """Return the parts of a tensor.

    Raises:
        ValueError: They are not inside it, or not all of it.
        LookupError: One of them is nowhere.
    """
    size = tuple(tensor.size)
    chunks = []
    for chunk in tensor.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        found = Chunk(offsets, sizes, *places[key, offsets])
        inside = len(offsets) == len(sizes) == len(size) and all(
            type(number) is int and number >= 0 for number in (*offsets, *sizes, *size, found.start, found.length)
        )
        if not inside or any(low + length > most for low, length, most in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a part of {key} is not inside it")
        chunks.append(found)
    elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    if elements != math.prod(size):
        raise ValueError(f"{elements} of {math.prod(size)} elements of {key} are in it")
    return tuple(chunks)


class _Unpickler(pickle.Unpickler):
    """Builds nothing but what metadata consists of."""

    def __init__(self, file: io.BytesIO, types: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._types = types

    def find_class(self, module: str, name: str) -> Any:
        found = self._types.get((module, name)) or _PLAIN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is never in it")
        return found


class _StandIn:
    """An object of the engine that only holds its attributes."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _MemoryFormat:
    """One of the engine's names for a memory format, which it ignores."""

    def __init__(self, number: int) -> None:
        self.number = number


_STAND_INS: Final[dict[tuple[str, str], Any]] = {
    **{
        (_MODULE, name): type(name, (_StandIn,), {})
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (_StandIn,), {}),
    (_MODULE, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
}  # fmt: skip


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        path=folder, reason=f"the engine's metadata cannot be read ({reason})", record=METADATA
    )
