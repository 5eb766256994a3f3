"""Rolling back: which batches are left out, and when going back again would not help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safeckpt.errors import RollbackLoopError
from safeckpt.run.timeline import Timeline
from safeckpt.state import Component

__all__ = ["Rollbacks"]


class Rollbacks:
    """Decides about rollbacks; `CheckpointManager.rollback` says what it promises.

    Args:
        run: The run.
        components: The live objects.
        most: Rollbacks allowed without a new checkpoint in between.
    """

    def __init__(self, run: Timeline, components: Mapping[str, Component], most: int) -> None:
        self._run = run
        self._components = components
        self._most = most

    def refuse_loop(self, failing: int, *, changes: bool) -> None:
        """Refuse a rollback that would lead here again."""
        attempts = len(self._run.rollbacks)
        if attempts >= self._most:
            reason = f"max_rollbacks={self._most} without a new checkpoint in between"
        elif not changes and (failing, False) in self._run.rollbacks:
            reason = "the last rollback changed nothing, and neither would this one"
        else:
            return
        raise RollbackLoopError(step=failing, attempts=attempts, reason=reason, path=self._run.files.path)

    def batches_to_leave_out(self, count: int) -> dict[str, Any]:
        """Return the positions that each loader is to leave out when it goes on, also from earlier rollbacks."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"skip_batches must be an int, 0 or more; got {count!r}")
        able = {name: c.obj for name, c in self._components.items() if hasattr(c.obj, "leave_out")}
        if count and not able:
            raise ValueError(
                "skip_batches needs a loader that can leave out batches among the components: wrap the DataLoader in "
                "safeckpt.ResumableLoader and register it"
            )
        # What was left out before stays out: the checkpoint may be older than that decision.
        left_out = {
            name: sorted({*getattr(loader, "left_out", ()), *(loader.last_batches(count) if count else ())})
            for name, loader in able.items()
        }
        return {name: positions for name, positions in left_out.items() if positions}
