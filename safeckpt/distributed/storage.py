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
from collections.abc import Callable, Collection, Mapping
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

from safeckpt.distributed.plan_cache import PlanCache
from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import (
    METADATA,
    Part,
    PreparedFile,
    ShardFile,
    encode,
    open_file,
    prepare,
    shard_of_bytes,
    source_of,
    unpickle_metadata,
    write_joined,
)

__all__ = ["CachingPlanner", "ShardReader", "ShardWriter", "WriteInside"]

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
        plans: What was planned and written the time before.
        finite: Key to name, for the tensors that the guard has found finite.

    Attributes:
        written: The files that this rank has written.
    """

    def __init__(
        self, place: Path, write_inside: WriteInside, plans: PlanCache, finite: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(place)
        self._finite = finite or {}
        self._place = place
        self._write_inside = write_inside
        self._plans = plans
        self.written: list[ShardFile] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; the directory was made by who commits it."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the parts of a plan; a rank that has none writes no file.

        Raises:
            NonFiniteError: A tensor that was finite when the save began holds NaN or Inf by now.
        """
        prefix: _StoragePrefix = plan.storage_data
        name = f"{prefix.prefix}0.distcp"
        # Laid out before anything is written, so that a full disk can be told how much was needed.
        parts = [self._prepare(_tensor_of(planner, item), item.index.fqn) for item in plan.items]
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
        # Rank 0 has what it was told the last time: thousands of ranks would tell it the same again.
        news = [] if results == self._plans.results else results
        self._plans.results = results
        future: Future[list[WriteResult]] = Future()
        future.set_result(news)
        return future

    def _prepare(self, tensor: torch.Tensor, key: str) -> PreparedFile:
        finite = [(self._finite[key], tensor)] if key in self._finite else []
        return prepare(encode(tensor), trailer=False, finite=finite)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the engine's metadata; on the coordinating rank, when all have written.

        Args:
            metadata: Not used, see `CachingPlanner.create_global_plan`.
            results: What each rank has written elsewhere than the time before.
        """
        plans = self._plans
        assert plans.metadata is not None
        if plans.document is None or any(results):
            metadata = plans.metadata
            plans.places.update((one.index, one.storage_data) for some in results for one in some)
            metadata.storage_data = plans.places
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # as the engine does, since 2.11
            metadata.storage_meta = StorageMeta()  # not the temporary name of the directory
            plans.document = pickle.dumps(metadata)
        data = plans.document

        def write(f: BinaryIO) -> None:
            f.write(data)

        self._write_inside(self._place / METADATA, write, size_bytes=len(data))
        self.written.append(shard_of_bytes(METADATA, data))


class CachingPlanner(DefaultSavePlanner):
    """The engine's planner, which plans nothing when the save before had the same to plan.

    The engine has a cache of its own (`enable_plan_caching`). It is one for all managers of a process, keyed by the
    name of the planner's class and never emptied; after a save that failed on some ranks only, it relies on plans that
    a rank does not have.

    Args:
        plans: What was planned before, by this very policy.
        drifted: Whether copies of a part differ; then all are taken from the lowest rank.
    """

    def __init__(self, plans: PlanCache, *, drifted: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=drifted)
        self._plans = plans
        self._proposal: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        """Return what this rank would write; an unusable plan where that is what it was the time before."""
        self._proposal = super().create_local_plan()
        known = self._plans.decided is not None and self._plans.proposed == self._proposal
        return SavePlan([], usable=False) if known else self._proposal

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Decide for all ranks, or that all do as the time before.

        Returns:
            A plan for each rank, and metadata that says nothing: the engine sends it to all ranks, and none needs it.
        """
        plans = self._plans
        nothing = Metadata({})
        if plans.metadata is not None and not any(plan.usable for plan in all_plans):
            return all_plans, nothing
        if plans.proposals:
            all_plans = [
                plan if plan.usable else before for plan, before in zip(all_plans, plans.proposals, strict=True)
            ]
        if not all(plan.usable for plan in all_plans):
            raise RuntimeError(
                "a rank goes by a plan that rank 0 no longer has"
            )  # all forget theirs: the next save can
        decided, metadata = super().create_global_plan(all_plans)
        plans.proposals, plans.metadata, plans.places, plans.document = all_plans, metadata, {}, None
        return decided, nothing

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes."""
        plans = self._plans
        if new_plan.usable:
            plans.proposed, plans.decided, plans.results = self._proposal, new_plan, None
        assert plans.decided is not None
        return super().finish_plan(plans.decided)


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
