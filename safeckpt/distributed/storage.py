"""The files of a sharded checkpoint, for torch.distributed.checkpoint to write and to read.

The engine plans which rank writes which part of which tensor, and which rank reads it; how bytes come onto the disk and
back is the same here as for a single file: one write that tells of a full disk what it needs, a digest taken on the
way, and a reader that executes nothing. The files are those that the engine's own reader expects: `__0_0.distcp` holds
what rank 0 has written, one torch file after the other, and `.metadata` says where each begins.

Imported only where there are shards, since the engine is large.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import (
    METADATA,
    Part,
    ShardFile,
    encode,
    open_file,
    prepare,
    shard_of_bytes,
    source_of,
    unpickle_metadata,
    write_joined,
)

__all__ = ["ShardReader", "ShardWriter", "WriteInside", "planner_of"]

WriteInside = Callable[..., Any]  # `CheckpointDirectory.write_inside`

# What the engine's metadata is made of. Its own reader takes anything else that a pickle can name, and runs it.
_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex,
        StorageMeta, _MEM_FORMAT_ENCODING, _StorageInfo,
    )
}  # fmt: skip


class ShardWriter(FileSystemWriter):
    """Writes this rank's parts into one file; rank 0's also the engine's metadata.

    Args:
        place: The directory.
        write_inside: Writes a file into it durably.

    Attributes:
        written: The files that this rank has written.
    """

    def __init__(self, place: Path, write_inside: WriteInside) -> None:
        super().__init__(place)
        self._place = place
        self._write_inside = write_inside
        self.written: list[ShardFile] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; the directory was made by who commits it."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of a plan; a rank that has none writes no file."""
        prefix: _StoragePrefix = plan.storage_data
        name = f"{prefix.prefix}0.distcp"
        # Laid out before anything is written, so that a full disk can be told how much was needed.
        parts = [prepare(encode(_tensor_of(planner, item)), trailer=False) for item in plan.items]
        results = []
        if parts:
            size_bytes = sum(part.size_bytes for part in parts)
            offsets, written = self._write_inside(
                self._place / name, lambda f: write_joined(parts, f), size_bytes=size_bytes
            )
            self.written.append((name, written.size_bytes, written.digest))
            results = [
                WriteResult(item.index, part.size_bytes, _StorageInfo(name, offset, part.size_bytes))
                for item, part, offset in zip(plan.items, parts, offsets, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the engine's metadata; on the coordinating rank, when all have written."""
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # as the engine does, since 2.11
        metadata.storage_meta = StorageMeta()  # not the temporary name of the directory
        data = pickle.dumps(metadata)

        def write(f: BinaryIO) -> None:
            f.write(data)

        self._write_inside(self._place / METADATA, write, size_bytes=len(data))
        self.written.append(shard_of_bytes(METADATA, data))


def planner_of(*, drifted: bool) -> SavePlanner:
    """Return the engine's planner; with copies that drifted, one that takes them all from the lowest rank."""
    return DefaultSavePlanner(dedup_save_to_lowest_rank=drifted)


def _tensor_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{item.index.fqn} is no tensor")
    data = data.detach()
    # Expanded, a file would hold less than the tensor claims.
    return data.contiguous() if data.layout is torch.strided and data.numel() > 1 and 0 in data.stride() else data


class ShardReader(FileSystemReader):
    """Reads what this rank needs of a directory.

    Args:
        place: The directory.
        names: The files that belong to it; what refers to another one is refused.

    Attributes:
        filled: Key to the number of elements that were read for it.
        error: Why the metadata could not be read.
    """

    def __init__(self, place: Path, names: Collection[str]) -> None:
        super().__init__(place)
        self._place = place
        self._names = frozenset(names)
        self.filled: defaultdict[str, int] = defaultdict(int)
        self.error: OSError | DamagedCheckpointError | None = None

    def read_metadata(self) -> Metadata:  # whoever takes more arguments is asked for metadata of this rank alone
        """Return what is in the directory; nothing is executed.

        Raises:
            OSError: It could not be read; kept in `error`, since the engine makes something else of it.
            DamagedCheckpointError: It cannot be read, or asks for something that no metadata holds.
        """
        if METADATA not in self._names:
            self._refuse(f"its {METADATA} does not belong to it")
        try:
            metadata = unpickle_metadata(self._place, _TYPES)
            if type(metadata) is not Metadata or not isinstance(metadata.storage_data, dict):
                self._refuse(f"its {METADATA} holds something else")
        except (OSError, DamagedCheckpointError) as error:
            self.error = error
            raise
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of a plan into the tensors that the planner names.

        Raises:
            DamagedCheckpointError: A part is not what the metadata says.
        """
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            by_file.setdefault(info.relative_path, []).append((info, item))
        for name, items in by_file.items():
            if name not in self._names:
                self._refuse(f"its {METADATA} refers to {name!r}, which does not belong to it")
            source = source_of(self._place / name)
            with contextlib.closing(source):
                for info, item in items:
                    with open_file(Part(source, info.offset, info.length)) as file:  # type: ignore[arg-type]
                        self._read(file.load("cpu"), item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, value: Any, item: ReadItem, planner: LoadPlanner) -> None:
        key = item.dest_index.fqn
        if item.type == LoadItemType.BYTE_IO or not isinstance(value, torch.Tensor):
            self._refuse(f"{key} is no tensor")
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dimension, offset, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != value.size():
            self._refuse(f"a part of {key} has shape {list(value.size())} instead of {list(target.size())}")
        target.copy_(value)
        planner.commit_tensor(item, target)
        self.filled[key] += target.numel()

    def _refuse(self, reason: str) -> NoReturn:
        raise DamagedCheckpointError(path=self._place, reason=reason)
