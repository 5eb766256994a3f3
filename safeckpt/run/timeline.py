"""One run in one directory: which files are its own, where it stands, and the right to write."""

from __future__ import annotations

import os
from typing import Any

from safeckpt.arguments import checked_step
from safeckpt.catalog import Catalog, Checkpoint
from safeckpt.errors import DirectoryInUseError, DirectoryLockedError, StepExistsError
from safeckpt.schedule import SaveSchedule
from safeckpt.store import CheckpointDirectory, EventLog, WriterLock

__all__ = ["Timeline"]


class Timeline:
    """What a manager knows of its run. Memory follows the disk: it is updated when something is committed.

    Attributes:
        files: The directory.
        catalog: Which of its files are checkpoints.
        lock: The right to write.
        due: When `end_step` saves.
        run_id: Name of the run; None before its first checkpoint.
        step: The last step that was saved, restored or ended.
        saved: The step of the newest checkpoint on this timeline.
        begun: Whether a step was ended, saved or restored.
        failed: The step that was refused last, and why.
        rollbacks: (failing step, whether something was changed) of each rollback since a new save.
        left: Known steps above the restored one: set aside before the next save.
        closed: Whether the manager is closed.
    """

    def __init__(self, files: CheckpointDirectory, lock: WriterLock, due: SaveSchedule) -> None:
        self.files = files
        self.catalog = Catalog(files)
        self.lock = lock
        self.due = due
        self.run_id: str | None = None
        self.step = 0
        self.saved: int | None = None
        self.begun = False
        self.failed: tuple[int, str] | None = None
        self.rollbacks: list[tuple[int, bool]] = []
        self.left: set[int] = set()
        self.closed = False
        self._events = EventLog(files.path / "events.jsonl")
        self._known: set[int] = set()  # steps in the directory that belong to this run

    def refuse_closed(self) -> None:
        """Refuse to go on after `close`."""
        if self.closed:
            raise ValueError("this manager is closed; build a new one and restore() to go on")

    def next_step(self, step: int) -> int:
        """Return a step that may be saved now."""
        step = checked_step(step)
        self.refuse_closed()
        if step == self.saved:
            raise StepExistsError(step=step, path=self.files.path_of(step))
        if step < self.step or (self.saved is not None and step < self.saved):
            raise ValueError(f"step {step} is lower than step {self.step}; steps count completed optimizer steps")
        return step

    def enter_directory(self) -> None:
        """Take the directory for writing: create it, hold its lock, find only this run's files in it."""
        if not self.lock.held:
            self._refuse_strangers()  # before the lock, so that a wrong directory is left without a trace
            self.files.create()
            self.lock.acquire()
            try:
                self._refuse_strangers()  # another writer may have had it meanwhile
                self.files.sweep()
            except BaseException:
                self.lock.release()
                raise
        try:
            self.lock.check()
        except DirectoryLockedError:
            self.lock.release()  # it protects nothing any more; the next save takes the lock that others see
            raise
        self._refuse_strangers()
        if self.left:
            paths = self.files.set_aside(self.left)
            self.event("set_aside", self.saved, files=[path.name for path in paths])
            self._known -= self.left
            self.left = set()

    def _strangers(self) -> list[int]:
        return [step for step in self.files.steps() if step not in self._known]

    def _refuse_strangers(self) -> None:
        strangers = self._strangers()
        if strangers:
            raise DirectoryInUseError(directory=self.files.path, steps=strangers)

    def committed(self, checkpoint: Checkpoint) -> None:
        """Note a new checkpoint; memory is updated after the disk. Interrupted, it can be called again."""
        self.run_id = checkpoint.run_id
        self.saved = checkpoint.step
        self.step = max(self.step, checkpoint.step)  # written in the background, training may be further
        self.begun = True
        self._known.add(checkpoint.step)
        self.catalog.wrote(checkpoint.step)
        if self.failed is not None and self.failed[0] <= checkpoint.step:
            self.failed = None
        self.rollbacks.clear()
        self.due.saved(checkpoint.step)

    def note_saved(self, checkpoint: Checkpoint) -> None:
        """Tell the history of a new checkpoint."""
        self.event("saved", checkpoint.step, loss=checkpoint.loss, size_bytes=checkpoint.size_bytes)

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: the directory's files are this run's, those above the checkpoint will make way."""
        self.run_id = checkpoint.run_id
        self.step = self.saved = checkpoint.step
        self.begun = True
        self._known = set(self.files.steps())
        self.left = {step for step in self._known if step > checkpoint.step}
        self.failed = None
        self.due.saved(checkpoint.step)

    def event(self, kind: str, step: int | None, **data: Any) -> None:
        """Append to the history of this run; a directory that is not there yet, or not writable, has none."""
        mine = self.saved is not None or not self._strangers()
        if mine and os.access(self.files.path, os.W_OK):
            self._events.append(kind, step=step, **data)
