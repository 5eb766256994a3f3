"""Which rank writes which part of which tensor: planned by the engine when tensors change, and kept for later saves.

The engine plans on rank 0, for all ranks. That takes longer the more ranks there are, and comes to the same result as
long as names, shapes, dtypes and layouts stay as they are. So a rank proposes only what has changed, and where in its
file a part is it tells only when that has changed.

All of it goes with the agreements of a save. In collectives of the engine's own, ranks would wait there for one that
cannot come.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["Decision", "Places", "Plans", "Proposals", "planner_of"]

Proposals = dict[int, "SavePlan"]  # by rank: what it could write
Decision = dict[int, frozenset[int]]  # by rank: the numbers of the parts that it leaves to others
Places = list[tuple["SavePlan", list[Any]]]  # parts that were written, and where in its file each is


@dataclass
class Plans:
    """The plans of the saves of one manager.

    Attributes:
        group: The ranks that planned; for others it is of no use.
        proposed: What this rank proposed.
        left: The numbers of the parts of it that others write.
        places: Where in its file this rank wrote the others.
        proposals: What all ranks proposed. On rank 0, as the rest.
        is_drifted: By which policy was decided.
        metadata: What the engine says about the tensors, and where their parts are.
        document: The content of the engine's metadata file.
    """

    group: Any = None
    proposed: SavePlan | None = None
    left: frozenset[int] = frozenset()
    places: list[Any] | None = None
    proposals: Proposals = field(default_factory=dict)
    is_drifted: bool = False
    metadata: Metadata | None = None
    document: bytes | None = None

    def clear(self) -> None:
        """Forget everything. After a failed save all ranks do, so that none relies on what another no longer has."""
        vars(self).update(vars(Plans()))

    def use_for(self, group: Any) -> None:
        """Forget everything that was planned for other ranks."""
        if self.group is not group:
            self.clear()
            self.group = group

    def propose(self, shards: Mapping[str, torch.Tensor], rank: int) -> Proposals:
        """Return what this rank could write; nothing where that is what it was the time before."""
        with torch.device("cpu"):  # where the engine computes offsets, whatever device is the default one
            proposal = planner_of(shards).create_local_plan()
        if proposal == self.proposed:
            return {}
        self.proposed = proposal
        return {rank: proposal}

    def decide(self, proposals: Proposals, size: int, *, drifted: bool) -> Decision | None:
        """Decide who writes what; None where all do as the time before. On rank 0.

        Args:
            proposals: Those that are new.
            size: How many ranks there are.
            drifted: Whether copies of a part differ: then all are taken from the lowest rank that has them, since a
                state put together from several copies is nobody's. Otherwise the ranks share the work.
        """
        if not proposals and self.metadata is not None and self.is_drifted == drifted:
            return None
        self.proposals.update(proposals)
        if len(self.proposals) != size:  # all forget theirs: the next save can
            raise RuntimeError("a rank goes by a plan that rank 0 no longer has")
        proposed = [self.proposals[rank] for rank in range(size)]
        decided, metadata = planner_of({}, drifted=drifted).create_global_plan(proposed)
        self.metadata, self.document, self.is_drifted = replace(metadata, storage_data={}), None, drifted
        left: Decision = {}
        for rank, (plan, kept) in enumerate(zip(proposed, decided, strict=True)):
            indices = {item.index for item in kept.items}
            if len(indices) < len(plan.items):
                left[rank] = frozenset(n for n, item in enumerate(plan.items) if item.index not in indices)
        return left

    def follow(self, decision: Decision | None, rank: int) -> None:
        """Take what was decided."""
        if decision is not None:
            self.left, self.places = decision.get(rank, frozenset()), None

    def own_part(self) -> SavePlan:
        """Return what this rank writes of what all have proposed."""
        assert self.proposed is not None
        return replace(self.proposed, items=[one for n, one in enumerate(self.proposed.items) if n not in self.left])

    def note_places(self, written: SavePlan, places: list[Any]) -> Places:
        """Return what rank 0 has to be told of what this rank has written."""
        if places == self.places:  # thousands of ranks would tell it the same again
            return []
        self.places = places
        return [(written, places)]

    def describe(self, news: Places) -> bytes:
        """Return the content of the engine's metadata file. On rank 0.

        Args:
            news: What ranks have written elsewhere than the time before.
        """
        from torch.distributed.checkpoint import filesystem  # noqa: PLC0415 - large, and only for shards
        from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata  # noqa: PLC0415

        metadata = self.metadata
        assert metadata is not None
        if self.document is None or news:
            for written, places in news:
                metadata.planner_data.update(written.planner_data)
                for item, place in zip(written.items, places, strict=True):
                    metadata.storage_data[item.index] = place
                    whole: Any = item.tensor_data
                    if whole.chunk.sizes == whole.size:  # such as a rank's own state, for which nobody has planned
                        metadata.state_dict_metadata[item.index.fqn] = TensorStorageMetadata(
                            whole.properties, whole.size, [whole.chunk]
                        )
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # as the engine does, since 2.11
            metadata.storage_meta = StorageMeta()  # not the temporary name of the directory
            self.document = pickle.dumps(metadata)
        return self.document


def planner_of(tensors: Mapping[str, torch.Tensor], *, drifted: bool = False) -> DefaultSavePlanner:
    """Return the engine's planner of some tensors.

    It gets them by component, as a script of one's own would have it: it joins the two names again, and takes a while
    for every key at the top.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415 - large

    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        component, _, name = key.partition(".")
        parts.setdefault(component, {})[name] = tensor
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=drifted)
    planner.set_up_planner(parts)
    return planner
