"""Rolling back: which batches are left out, and when going back again would not help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from safeckpt.errors import RollbackLoopError
from safeckpt.run.timeline import Timeline
from safeckpt.state import Component
from safeckpt.system.arguments import checked_int

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

    def batches_to_leave_out(
        self, count: int, handed_out: Iterable[tuple[int, Mapping[str, Any]]] = ()
    ) -> dict[str, Any]:
        """Return the positions that each loader is to leave out when it goes on, also from earlier rollbacks.

        Args:
            count: How many of the batches handed out last.
            handed_out: For steps that ended lately, the last batch that each loader had handed out by then: several
                processes learn of a refused step some steps later, and the batches since then are not to blame.
        """
        checked_int("skip_batches", count)
        able = {name: c.obj for name, c in self._components.items() if hasattr(c.obj, "leave_out")}
        if count and not able:
            raise ValueError(
                "skip_batches needs a loader that can leave out batches among the components: wrap the DataLoader in "
                "safeckpt.ResumableLoader and register it"
            )
        # What was left out before stays out: the checkpoint may be older than that decision.
        failing = None if self._run.failed is None else self._run.failed[0]
        newest_first = reversed(list(handed_out))
        last: Mapping[str, Any] = next((positions for step, positions in newest_first if step == failing), {})
        left_out = {
            name: sorted({*getattr(loader, "left_out", ()), *_last(loader, count, last.get(name, ()))})
            for name, loader in able.items()
        }
        return {name: positions for name, positions in left_out.items() if positions}


def _last(loader: Any, count: int, upto: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the last `count` batches handed out, or those up to one of them."""
    if not count:
        return ()
    if not upto:
        return cast("Sequence[tuple[int, int]]", loader.last_batches(count))
    since = 1
    while (batches := loader.last_batches(since))[:1] and batches[0] > upto[0] and len(batches) == since:
        since += 1
    return cast("Sequence[tuple[int, int]]", loader.last_batches(since - 1 + count)[:count])
