"""Where a run stands: the steps it has done and saved, what it has refused, and which objects are of no one state."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from safeckpt.run.catalog import Checkpoint
from safeckpt.run.schedule import SaveSchedule
from safeckpt.state import Mixture

__all__ = ["Refusal", "RollbackRecord", "Timeline"]


class Refusal(NamedTuple):
    """A step that was refused, and what was not finite."""

    step: int
    why: str


class RollbackRecord(NamedTuple):
    """A rollback: the step that had failed, and whether something was changed before going on."""

    failed_step: int
    changed: bool


class Timeline:
    """The position of one run. Memory follows the disk: it changes when something is committed or applied.

    Args:
        schedule: When `end_step` saves.

    Attributes:
        mixture: The objects that are of no one state; cleared when the run stands at a checkpoint again.
        streams: The random streams of the restored checkpoint, where they are to be set later; None where they are set.
    """

    def __init__(self, schedule: SaveSchedule) -> None:
        self.mixture = Mixture()
        self.streams: dict[str, Any] | None = None
        self._is_imported = False
        self._schedule = schedule
        self._run_id: str | None = None
        self._step = 0
        self._saved_step: int | None = None
        self._has_progress = False
        self._refusal: Refusal | None = None
        self._rollbacks: list[RollbackRecord] = []
        self._known_steps: set[int] = set()
        self._superseded_steps: set[int] = set()
        self._restored_only: tuple[str, ...] | None = None
        self._is_closed = False

    # -- position ----------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str | None:
        """Name of the run; None before its first checkpoint."""
        return self._run_id

    @property
    def step(self) -> int:
        """The last step that was saved, restored or ended; 0 at first."""
        return self._step

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint on this timeline; None before the first."""
        return self._saved_step

    @property
    def has_progress(self) -> bool:
        """Whether a step was ended, saved or restored."""
        return self._has_progress

    @property
    def refusal(self) -> Refusal | None:
        """The step that was refused last and not passed since."""
        return self._refusal

    @property
    def rollbacks(self) -> tuple[RollbackRecord, ...]:
        """The rollbacks since the last new checkpoint."""
        return tuple(self._rollbacks)

    @property
    def known_steps(self) -> Collection[int]:
        """Steps whose checkpoints in the directory belong to this run."""
        return self._known_steps

    @property
    def superseded_steps(self) -> Collection[int]:
        """Known steps above the restored one: set aside before the next save."""
        return self._superseded_steps

    @property
    def is_imported(self) -> bool:
        """Whether the newest checkpoint was imported, and lacks what its source had not saved."""
        return self._is_imported

    @property
    def is_closed(self) -> bool:
        """Whether the manager is closed."""
        return self._is_closed

    @property
    def restored_only(self) -> tuple[str, ...] | None:
        """The components of the last restore where it took a part of a checkpoint; then this run is not to be saved."""
        return self._restored_only

    # -- changes -----------------------------------------------------------------------------------------------------

    def end(self, step: int) -> None:
        """Note that a step was trained."""
        self._step = step
        self._has_progress = True

    def expect_save(self, step: int) -> None:
        """Note that a step is about to be written in the background: the next steps do not ask for it again."""
        self._schedule.restart(step)

    def fail_save(self) -> None:
        """Note that a write in the background failed: the next step asks for a save again."""
        self._schedule.ask()

    def record(self, checkpoint: Checkpoint) -> None:
        """Note a checkpoint that was committed. Interrupted, it can be called again."""
        self._run_id = checkpoint.run_id
        self._saved_step = checkpoint.step
        self._step = max(self._step, checkpoint.step)  # written in the background, training may be further
        self._has_progress = True
        self._known_steps.add(checkpoint.step)
        self._is_imported = False
        if self._refusal is not None and self._refusal.step <= checkpoint.step:
            self._refusal = None
        self._rollbacks.clear()
        self._schedule.restart(checkpoint.step)

    def refuse(self, step: int, why: str) -> None:
        """Note that a step was not finite."""
        self._refusal = Refusal(step, why)

    def forget_refusal(self) -> None:
        """Note that the caller went on after a refusal."""
        self._refusal = None

    def restored_to(self, checkpoint: Checkpoint, known_steps: Collection[int], *, is_imported: bool) -> None:
        """Go on from a checkpoint that was restored whole.

        Args:
            checkpoint: The checkpoint.
            known_steps: Steps in the directory that belong to its run. Those above it are superseded.
            is_imported: Whether another tool had saved its state.
        """
        self._is_imported = is_imported
        self._run_id = checkpoint.run_id
        self._step = self._saved_step = checkpoint.step
        self._has_progress = True
        self._known_steps = set(known_steps)
        self._superseded_steps = {step for step in self._known_steps if step > checkpoint.step}
        self._refusal = None
        self._schedule.restart(checkpoint.step)
        self._restored_only = None
        self.mixture.clear()

    def restored_in_part(self, names: Collection[str]) -> None:
        """Note that some components were restored: the run stands where it stood; its state is in no checkpoint."""
        self._restored_only = tuple(names)
        self.mixture.clear()

    def rolled_back(self, failed_step: int, *, changed: bool) -> None:
        """Note a rollback from a failing step."""
        self._rollbacks.append(RollbackRecord(failed_step, changed))

    def set_aside(self) -> None:
        """Note that the superseded checkpoints were renamed."""
        self._known_steps -= self._superseded_steps
        self._superseded_steps = set()

    def close(self) -> None:
        """Note that the manager is closed."""
        self._is_closed = True

    # -- checks ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return whether the schedule asks for a save at this step."""
        return self._schedule.is_due(step)

    @property
    def saves_by_itself(self) -> bool:
        """Whether `end_step` saves without being asked."""
        return self._schedule.is_set

    def is_due_by_count(self, step: int) -> bool:
        """Return whether a save is due by the number of steps alone, which every rank knows by itself."""
        return self._schedule.is_due_by_count(step)

    def refuse_closed(self) -> None:
        """Refuse to go on after `close`."""
        if self._is_closed:
            raise ValueError("this manager is closed; build a new one and restore() to go on")

    def _refuse_other_streams(self) -> None:
        if self.streams is not None:
            raise ValueError(
                "the random streams are not those of the checkpoint yet: restore(streams=False) has left them for "
                "later, and a step trained without them is of another run. Nothing was written. Call "
                "manager.restore_streams() before the first step, or restore() again to go back to the checkpoint"
            )

    def check_save(self, step: int) -> None:
        """Check that a step may be saved now.

        Raises:
            ValueError: It is lower than one that was saved, restored or ended, the objects are a mixture, or the random
                streams are still to come.
        """
        self.refuse_closed()
        self.mixture.refuse()
        self._refuse_other_streams()
        if step < self._step:
            raise ValueError(f"step {step} is lower than step {self._step}; steps count completed optimizer steps")

    def check_end(self, step: int) -> None:
        """Check that a step may end now.

        Raises:
            ValueError: It is not higher than the last one, the objects are a mixture, or the random streams are still
                to come.
        """
        self.refuse_closed()
        self.mixture.refuse()
        self._refuse_other_streams()
        if step <= self._step and self._has_progress:
            raise ValueError(f"step {step} is not higher than step {self._step}, the last one ended, saved or restored")
