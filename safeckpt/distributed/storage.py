"""The files of a sharded checkpoint, for torch.distributed.checkpoint to write and to read.

The engine plans which rank writes which part of which tensor, and which rank reads it; how bytes come onto the disk and
back is the same here as for a single file: one write that tells of a full disk what it needs, a digest taken on the
way, and a reader that executes nothing. The files are those that the engine's own reader expects: `__0_0.distcp` holds
what rank 0 has written, one torch file after the other, and `.metadata` says where each begins.

Imported only where there are shards, since the engine is large.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlanner, WriteItem

from safeckpt.distributed.plans import Places, Plans, planner_of
from safeckpt.distributed.shards import narrowed
from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import (
    METADATA,
    JoinedFile,
    MappedFiles,
    PreparedFile,
    ShardFile,
    ShardParts,
    Write,
    encode,
    prepare,
    unpickle_metadata,
)
from safeckpt.state.tree import local_part
from safeckpt.system.torch_private import metadata_classes

__all__ = ["ShardReader", "write_shards"]

WriteInside = Callable[..., Any]

_PlaceInFile, _MemoryFormat = metadata_classes()

# What the engine's metadata is made of. Its own reader takes anything else that a pickle can name, and runs it.
_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex,
        StorageMeta, _PlaceInFile, _MemoryFormat,
    )
}  # fmt: skip


def write_shards(
    shards: Mapping[str, torch.Tensor],
    rank_state: Mapping[str, torch.Tensor],
    target: Path,
    write_inside: WriteInside,
    plans: Plans,
    *,
    write: Write,
    finite: Mapping[str, str],
) -> tuple[list[ShardFile], Places]:
    """Write what this rank writes of some tensors into one file, durably; a rank that has nothing writes none.

    Args:
        shards: The tensors that this rank has proposed to write.
        rank_state: What it writes beside them, by key.
        target: The file.
        write_inside: Writes a file into a directory durably, see `CheckpointDirectory.write_inside`.
        plans: What was decided.
        write: Writes the content of one.
        finite: Key to name, for the tensors that the guard has found finite. They are looked at once more in what is
            written.

    Returns:
        The file, and what rank 0 has to know of it.

    Raises:
        NonFiniteError: One of `finite` holds NaN or Inf by now.

    Cost:
        Bytes of this rank's part: one pass for digest and write, and one fsync.
    """
    planner = planner_of({**shards, **rank_state})
    beside = planner_of(rank_state).create_local_plan()
    plan = plans.own_part()
    plan = replace(plan, items=plan.items + beside.items, planner_data={**plan.planner_data, **beside.planner_data})
    if not plan.items:
        return [], []
    # Laid out before anything is written, so that a full disk can be told how much was needed.
    parts = [_prepared(_tensor_of(planner, item), item.index.fqn, finite) for item in plan.items]
    joined = JoinedFile(parts)
    written = write_inside(target, lambda f: write(joined, f, None), size_bytes=joined.size_bytes)
    places = [
        _PlaceInFile(target.name, offset, part.size_bytes) for part, offset in zip(parts, written.offsets, strict=True)
    ]
    return [(target.name, written.size_bytes, written.digest)], plans.note_places(plan, places)


def _prepared(tensor: torch.Tensor, key: str, finite: Mapping[str, str]) -> PreparedFile:
    return prepare(encode(tensor), trailer=False, finite=[(finite[key], tensor)] if key in finite else [])


def _tensor_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{item.index.fqn} is no tensor")
    data = data.detach()
    # Expanded, a file would hold less than the tensor claims.
    return data.contiguous() if data.layout is torch.strided and data.numel() > 1 and 0 in data.stride() else data


class ShardReader:
    """Reads what this rank needs of a directory: as views of its files, where a tensor lies now as it did then.

    Nothing is executed, no other rank is asked, and what the engine says about the tensors is read once.

    Args:
        place: The directory.
        names: The files that belong to it; what refers to another one is refused.
        verified: Those of which this process has checked every byte, and what they were then.
        mapped: What is to be told of the files that are mapped.

    Attributes:
        path: The directory.
        failure: What the system refused to read.

    Raises:
        OSError: From the system, as it is.
        DamagedCheckpointError: The engine's metadata cannot be read, or asks for something that no metadata holds.
    """

    def __init__(self, place: Path, names: Collection[str], verified: Mapping[str, Any], mapped: MappedFiles) -> None:
        self.path = place
        self.failure: OSError | None = None
        self._mapped = mapped
        self._parts = ShardParts(place, names, verified, mapped)
        if METADATA not in names:
            self._refuse(f"its {METADATA} does not belong to it")
        metadata = unpickle_metadata(place, _TYPES)
        if type(metadata) is not Metadata or not isinstance(metadata.storage_data, dict):
            self._refuse(f"its {METADATA} holds something else")
        self._metadata = metadata

    def close(self) -> None:
        """Close the files."""
        self._parts.close()

    def whole(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is in one part, in host memory.

        Raises:
            DamagedCheckpointError: It is not there.
            OSError: From the system, as it is.
        """
        stored = self._metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            self._refuse(f"{key} is not in its shards")
        return self.read({key: torch.empty(stored.size, dtype=dtype, device="cpu")})[key]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this process has to hold of some tensors, by key.

        Args:
            tensors: Of the layout that is wanted, in host memory and not filled. Where a tensor is put together from
                several parts, it is filled and its local part returned; any other is a view.

        Raises:
            DamagedCheckpointError: A tensor is not there, or not what the metadata says.
            OSError: From the system, as it is.
        """
        try:
            plan = create_default_local_load_plan(dict(tensors), self._metadata)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._refuse(f"its shards cannot be read ({error})")
        items: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[item.dest_index.fqn].append(item)
        try:
            return {key: self._read(key, local_part(tensor), items[key]) for key, tensor in tensors.items()}
        except OSError as error:
            self.failure = error
            raise

    def _read(self, key: str, target: torch.Tensor, items: list[ReadItem]) -> torch.Tensor:
        count = sum(math.prod(item.lengths) for item in items)
        if count != target.numel():
            self._refuse(f"{count} of {target.numel()} elements of {key} are in it")
        if len(items) == 1 and items[0].lengths == target.size():
            return self._view(key, items[0], target.dtype)
        for item in items:
            view = self._view(key, item, target.dtype)
            narrowed(target, item.dest_offsets, item.lengths).copy_(view)
            self._mapped.forget(view)
        return target

    def _view(self, key: str, item: ReadItem, dtype: torch.dtype) -> torch.Tensor:
        try:
            info = self._metadata.storage_data[item.storage_index]
            where = str(info.relative_path), int(info.offset), int(info.length)
        except (LookupError, TypeError, ValueError, AttributeError):
            self._refuse(f"a part of {key} is nowhere")
        part = self._parts.part(*where)
        ends = [low + length for low, length in zip(item.storage_offsets, item.lengths, strict=True)]
        if part.dim() != len(ends) or part.dtype != dtype or any(map(int.__gt__, ends, part.size())):
            self._refuse(f"a part of {key} is {part.dtype} {list(part.size())}")
        return narrowed(part, item.storage_offsets, item.lengths)

    def _refuse(self, reason: str) -> NoReturn:
        raise DamagedCheckpointError(path=self.path, reason=reason, record=METADATA)
