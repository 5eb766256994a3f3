"""Rolling back: which batches are left out, and when going back again would not help."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from safeckpt.errors import CheckpointNotFoundError, RollbackError, RollbackLoopError
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.checking import Wanted
from safeckpt.run.restoring import Restored, Restorer
from safeckpt.run.run import Run
from safeckpt.run.saving import Saver
from safeckpt.run.steps import Steps
from safeckpt.run.timeline import Refusal, RollbackRecord
from safeckpt.state.component import has_attribute
from safeckpt.system.arguments import checked_int

__all__ = ["Rollback"]

_log = logging.getLogger("safeckpt")


class Rollback:
    """Takes a run back to its newest checkpoint; `CheckpointManager.rollback` says what it promises.

    Args:
        run: The run.
        restorer: Puts the checkpoint into the live objects.
        saver: Has a copy of the newest checkpoint in memory, perhaps.
        steps: Knows which batches belong to a step.
    """

    def __init__(self, run: Run, restorer: Restorer, saver: Saver, steps: Steps) -> None:
        self._run = run
        self._restorer = restorer
        self._saver = saver
        self._steps = steps

    def roll_back(self, *, skip_batches: int, changed: bool, most: int) -> Checkpoint:
        """Go back to the newest checkpoint."""
        checked_int("max_rollbacks", most, least=1)
        run, group = self._run, self._run.group
        changes = changed or bool(skip_batches)
        with group.section("rolling back") as section:
            section.same = {"skip_batches": skip_batches, "changed": changed, "max_rollbacks": most}
            left_out = self._batches_to_leave_out(skip_batches)
            section.answer = self._check_possible(changes=changes, most=most)
            if group.is_rank_zero:
                run.directory.enter()
        failing: Refusal = section.result

        def note(restored: Restored) -> None:
            self._note(restored, failing, left_out, changed=changed, changes=changes)

        restored = self._restorer.apply_memory(self._saver.memory, note)
        if restored is None:
            restored = self._restorer.apply_newest(Wanted(), note)
        if restored is None:
            raise CheckpointNotFoundError(directory=run.directory.path)
        _log.info("rolled back from step %d to step %d", failing.step, restored.checkpoint.step)
        return restored.checkpoint

    def _note(
        self, restored: Restored, failing: Refusal, left_out: dict[str, Any], *, changed: bool, changes: bool
    ) -> None:
        """Leave out the batches, note where the run stands, and set aside what is newer."""
        run = self._run
        for component, positions in left_out.items():
            run.components[component].obj.leave_out(positions)
        self._restorer.adopt(restored)
        if run.is_rank_zero:
            run.replay.on_restored(restored.checkpoint.step, same=not changes)
        run.timeline.rolled_back(failing.step, changed=changes)
        if run.is_rank_zero and run.timeline.superseded_steps:
            run.directory.enter()
        self._restorer.report(
            restored,
            "rolled_back",
            failed_step=failing.step,
            why=failing.why,
            left_out={name: positions for name, positions in left_out.items() if positions},
            changed=changed,
            source=restored.source,
        )

    def _check_possible(self, *, changes: bool, most: int) -> Refusal:
        """Return the step that failed.

        Raises:
            RollbackLoopError: A rollback would lead to the same failure again, or there were too many.
            CheckpointNotFoundError: The run has no checkpoint.
            RollbackError: It has none but one that was imported.
        """
        timeline, path = self._run.timeline, self._run.directory.path
        failing = timeline.refusal or Refusal(timeline.step + 1, "no save or step was refused")
        attempts = len(timeline.rollbacks)
        if attempts >= most:
            reason = f"max_rollbacks={most} without a new checkpoint in between"
            raise RollbackLoopError(step=failing.step, attempts=attempts, reason=reason, path=path)
        if not changes and RollbackRecord(failing.step, changed=False) in timeline.rollbacks:
            reason = "the last rollback changed nothing, and neither would this one"
            raise RollbackLoopError(step=failing.step, attempts=attempts, reason=reason, path=path)
        if timeline.saved_step is None:
            raise CheckpointNotFoundError(directory=path)
        if timeline.is_imported:
            raise RollbackError(
                f"The run has no checkpoint of its own yet: step {timeline.saved_step} in {path} was imported, and has "
                "neither the random streams nor what else its source had not saved, such as the position of the data.",
                "no object was changed, and the imported checkpoint is untouched.",
                f"start the script again, which goes on from step {timeline.saved_step}, with what has to change. From "
                "the first save on, rollback() is exact.",
                path=path,
            )
        return failing

    def _batches_to_leave_out(self, count: int) -> dict[str, Any]:
        """Return the positions that each loader is to leave out when it goes on, also from earlier rollbacks."""
        checked_int("skip_batches", count)
        components = self._run.components.items()
        loaders = {name: component.obj for name, component in components if has_attribute(component.obj, "leave_out")}
        if count and not loaders:
            raise ValueError(
                "skip_batches needs a loader that can leave out batches among the components: wrap the DataLoader in "
                "safeckpt.ResumableLoader and register it"
            )
        # Several processes learn of a refused step some steps later: the batches since then are not to blame.
        refusal = self._run.timeline.refusal
        last = self._steps.batches_handed_out(None if refusal is None else refusal.step)
        # What was left out before stays out: the checkpoint may be older than that decision.
        return {
            name: sorted({*getattr(loader, "left_out", ()), *_last_batches(loader, count, last.get(name, ()))})
            for name, loader in loaders.items()
        }


def _last_batches(loader: Any, count: int, up_to: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the last `count` batches handed out, or those up to one of them."""
    if not count:
        return ()
    if not up_to:
        return cast("Sequence[tuple[int, int]]", loader.last_batches(count))
    since = 1
    while (batches := loader.last_batches(since))[:1] and batches[0] > up_to[0] and len(batches) == since:
        since += 1
    return cast("Sequence[tuple[int, int]]", loader.last_batches(since - 1 + count)[:count])
