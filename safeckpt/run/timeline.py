"""One run in one directory: which files are its own, where it stands, and the right to write."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safeckpt.distributed import Group, group_of_this_process, in_group, same_on_all
from safeckpt.errors import (
    DirectoryInUseError,
    DirectoryLockedError,
    DirectoryNotSharedError,
    GroupDestroyedError,
    StepExistsError,
)
from safeckpt.run.arguments import checked_step
from safeckpt.run.catalog import Catalog, Checkpoint
from safeckpt.run.schedule import SaveSchedule
from safeckpt.store import CheckpointDirectory, EventLog, WriterLock

__all__ = ["Timeline"]

_SEEN_SECONDS = 60.0  # NFS shows a new name after the 60 seconds of its acdirmax at the latest, nfs(5)
_LOOKS_SECONDS = 0.05


class Timeline:
    """What a manager knows of its run. Memory follows the disk: it is updated when something is committed.

    Of several processes only rank 0 writes into the directory, holds its lock and keeps its history; the others
    know the same steps.

    Args:
        files: The directory.
        lock: The right to write.
        due: When `end_step` saves.
        rank_timeout_seconds: How long a process of the group is waited for.
        settings: What has to be the same on every rank, by the name of the argument.

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
        half_restored: Whether the objects may be a mixture of two states, or not those of the step noted here.
        left: Known steps above the restored one: set aside before the next save.
        closed: Whether the manager is closed.
    """

    def __init__(
        self,
        files: CheckpointDirectory,
        lock: WriterLock,
        due: SaveSchedule,
        rank_timeout_seconds: float,
        settings: Mapping[str, Any],
    ) -> None:
        self.files = files
        self.catalog = Catalog(files)
        self.lock = lock
        self.due = due
        self.run_id: str | None = None
        self.step = 0
        self.saved: int | None = None
        self.begun = False
        self.half_restored = False
        self.failed: tuple[int, str] | None = None
        self.rollbacks: list[tuple[int, bool]] = []
        self.left: set[int] = set()
        self.closed = False
        self._events = EventLog(files.path / "events.jsonl")
        self._known: set[int] = set()  # steps in the directory that belong to this run
        self._rank_timeout_seconds = rank_timeout_seconds
        self._settings = settings
        self._group: Group | None = None
        self._agreed = False  # that all ranks were given the same settings
        self._seen = False  # that the directory is one for all ranks

    @property
    def group(self) -> Group:
        """The processes of this run. Making it is something that all of them do at once.

        Raises:
            GroupDestroyedError: There was one of several processes, and this process has destroyed it.
            RanksDisagreeError: The managers of the ranks were made with different arguments.
        """
        if self._group is None or not self._group.current:
            if self._group is not None and not in_group():
                raise GroupDestroyedError(what="coming back to it", path=self.files.path)
            self._group = group_of_this_process(self._rank_timeout_seconds)
            self._seen = self._agreed = False
        if not self._agreed:
            if self._group.size > 1:
                self._group.together("making managers", lambda: self._settings, same_on_all)
            self._agreed = True
        return self._group

    def close(self) -> None:
        """Give back lock and group."""
        self.closed = True
        self.lock.release()
        self.files.settle()
        if self._group is not None:
            self._group.close()

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.group.leads if in_group() else self.has_led

    @property
    def has_led(self) -> bool:
        """Whether this process was the one, as far as it ever met the others; nobody is asked."""
        return self._group is None or self._group.leads

    def look_for(self, path: Path, of_rank_0: object = None) -> None:
        """Wait until a path that rank 0 has made is seen here: some file systems show it late.

        Args:
            path: The path.
            of_rank_0: What rank 0 calls its directory, when it is known.

        Raises:
            DirectoryNotSharedError: It is not seen in good time.
        """
        # Not as long as rank 0 waits for an answer, which then would not get to it.
        most_seconds = min(_SEEN_SECONDS, self._rank_timeout_seconds / 2)
        end = time.monotonic() + most_seconds
        while not os.path.lexists(path):
            if time.monotonic() > end:
                raise DirectoryNotSharedError(
                    directory=self.files.path,
                    rank=self.group.rank,
                    name=path.name,
                    waited_seconds=most_seconds,
                    of_rank_0=of_rank_0,
                )
            with contextlib.suppress(OSError):
                self.files.steps()  # a listing makes NFS look again
            time.sleep(_LOOKS_SECONDS)

    def refuse_unshared(self, what: str) -> None:
        """Refuse a directory that is another one for other ranks: rank 0 marks it, and every rank looks for the mark.

        Done once. Called by all ranks at once.
        """
        if self._seen or self.group.size == 1:
            return

        def marked() -> tuple[str | None, str]:
            return self.lock.mark() if self.leads else None, str(self.files.path)

        mark, place = self.group.together(what, marked, lambda marks: marks[0])
        try:
            self.group.together(what, lambda: self.look_for(self.files.path / mark, place) if mark else None)
            self._seen = True
        finally:
            if self.leads and mark:
                self.lock.unmark(mark)

    def refuse_closed(self) -> None:
        """Refuse to go on after `close`."""
        if self.closed:
            raise ValueError("this manager is closed; build a new one and restore() to go on")

    def refuse_mixture(self) -> None:
        """Refuse to go on after a restore that stopped half-way."""
        if self.half_restored:
            raise ValueError(
                "the last restore stopped half-way, by an interrupt or an error in a component's load_state_dict: the "
                "objects may be a mixture of two states; call restore() or rollback() again before going on"
            )

    def next_step(self, step: int) -> int:
        """Return a step that may be saved now."""
        step = checked_step(step)
        self.refuse_closed()
        self.refuse_mixture()
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
        self.catalog.judged(checkpoint.step)
        if self.failed is not None and self.failed[0] <= checkpoint.step:
            self.failed = None
        self.rollbacks.clear()
        self.due.saved(checkpoint.step)

    def note_saved(self, checkpoint: Checkpoint) -> None:
        """Tell the history of a new checkpoint."""
        self.event("saved", checkpoint.step, loss=checkpoint.loss, size_bytes=checkpoint.size_bytes)

    def adopt(self, checkpoint: Checkpoint, there: Collection[int]) -> None:
        """Go on from a checkpoint: the directory's files are this run's, those above the checkpoint will make way.

        Args:
            checkpoint: The one that was restored.
            there: The steps before it was looked for. A higher one that came meanwhile is another writer's newest.
        """
        self.run_id = checkpoint.run_id
        self.step = self.saved = checkpoint.step
        self.begun = True
        listed = self.files.steps() if self.leads else ()  # the others write nothing
        self._known = {step for step in listed if step <= checkpoint.step or step in there}
        self.left = {step for step in self._known if step > checkpoint.step}
        self.failed = None
        self.due.saved(checkpoint.step)

    def event(self, kind: str, step: int | None, **data: Any) -> None:
        """Append to the history of this run; a directory that is not there yet, or not writable, has none."""
        if not self.leads:
            return
        mine = self.saved is not None or not self._strangers()
        if mine and os.access(self.files.path, os.W_OK):
            self._events.append(kind, step=step, **data)
