"""What the engine planned for the save before, so that a save of the same tensors plans nothing.

The engine plans on rank 0, for all ranks, at every save: which rank writes which part of which tensor. That takes
longer the more ranks there are, and comes to the same result as long as names, shapes, dtypes and layouts stay as they
are. Each rank keeps the plan that it proposed and the one that was decided, rank 0 those of all ranks. A rank whose
proposal has not changed sends nothing; when one has, rank 0 plans anew for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["PlanCache"]


@dataclass
class PlanCache:
    """The plans of the saves of one manager.

    Attributes:
        belongs_to: The process group and the policy that it was planned for; for another one it is of no use.
        proposed: What this rank proposed.
        decided: What this rank writes.
        results: Where in its file this rank wrote the parts.
        proposals: What all ranks proposed. On rank 0, as the rest.
        metadata: What the engine says about the tensors.
        places: Where the parts of all ranks are.
        document: The content of the engine's metadata file.
    """

    belongs_to: tuple[Any, bool] | None = None
    proposed: SavePlan | None = None
    decided: SavePlan | None = None
    results: list[WriteResult] | None = None
    proposals: list[SavePlan] = field(default_factory=list)
    metadata: Metadata | None = None
    places: dict[MetadataIndex, Any] = field(default_factory=dict)
    document: bytes | None = None

    def use_for(self, process_group: Any, *, drifted: bool) -> None:
        """Forget everything that was planned for another group or by another policy."""
        if self.belongs_to is None or self.belongs_to[0] is not process_group or self.belongs_to[1] != drifted:
            self.clear()
            self.belongs_to = process_group, drifted

    def clear(self) -> None:
        """Forget everything. After a failed save all ranks do, so that none relies on what another no longer has."""
        vars(self).update(vars(PlanCache()))
