"""The files of a sharded checkpoint, for torch.distributed.checkpoint to write and to read.

The engine plans which rank writes which part of which tensor, and which rank reads it; how bytes come onto the disk and
back is the same here as for a single file: one write that tells of a full disk what it needs, a digest taken on the
way, and a reader that executes nothing. The files are those that the engine's own reader expects: `__0_0.distcp` holds
what rank 0 has written, one torch file after the other, and `.metadata` says where each begins.

Imported only where there are shards, since the engine is large.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from safeckpt.distributed.plan_cache import PlanCache
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
    shard_of_bytes,
    unpickle_metadata,
)
from safeckpt.state.tree import local_part
from safeckpt.system.torch_private import metadata_classes

__all__ = ["CachingPlanner", "ShardReader", "ShardWriter", "WriteInside"]

WriteInside = Callable[..., Any]  # `CheckpointDirectory.write_inside`

_PlaceInFile, _MemoryFormat = metadata_classes()

# What the engine's metadata is made of. Its own reader takes anything else that a pickle can name, and runs it.
_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, MetadataIndex,
        StorageMeta, _PlaceInFile, _MemoryFormat,
    )
}  # fmt: skip


class ShardWriter(FileSystemWriter):
    """Writes this rank's parts into one file; rank 0's also the engine's metadata.

    Args:
        place: The directory.
        write_inside: Writes a file into it durably.
        plans: What was planned and written the time before.
        write: Writes the content of one.
        finite: Key to name, for the tensors that the guard has found finite.

    Attributes:
        written: The files that this rank has written.
    """

    def __init__(
        self, place: Path, write_inside: WriteInside, plans: PlanCache, write: Write, finite: Mapping[str, str]
    ) -> None:
        super().__init__(place)
        self._finite = finite
        self._write = write
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
        name = f"{plan.storage_data.prefix}0.distcp"  # `__0_` of rank 0, as the engine has planned it
        # Laid out before anything is written, so that a full disk can be told how much was needed.
        parts = [self._prepare(_tensor_of(planner, item), item.index.fqn) for item in plan.items]
        results = []
        if parts:
            joined = JoinedFile(parts)
            written = self._write_inside(
                self._place / name, lambda f: self._write(joined, f, None), size_bytes=joined.size_bytes
            )
            self.written.append((name, written.size_bytes, written.digest))
            results = [
                WriteResult(item.index, part.size_bytes, _PlaceInFile(name, offset, part.size_bytes))
                for item, part, offset in zip(plan.items, parts, written.offsets, strict=True)
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


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a view of an area of a tensor."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor
