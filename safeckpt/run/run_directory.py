"""The directory of one run: the right to write into it, which checkpoints in it are this run's, and its history."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safeckpt.distributed.group import Group
from safeckpt.errors import DirectoryInUseError, DirectoryLockedError, DirectoryNotSharedError, SafeckptWarning
from safeckpt.run.catalog import Catalog, Checkpoint
from safeckpt.run.membership import Membership
from safeckpt.run.timeline import Timeline
from safeckpt.store import WriterLock
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from safeckpt.run.mirroring import RunMirror

__all__ = ["Place", "RunDirectory"]

_SEEN_SECONDS = 60.0  # NFS shows a new name after the 60 seconds of its acdirmax at the latest, nfs(5)
_LOOKS_SECONDS = 0.05


class Place(NamedTuple):
    """What rank 0 has made in the directory for a save, for the others to see.

    Attributes:
        name: Of the folder or the mark; None where there is nothing to be seen.
        of_rank_zero: The directory, as rank 0 calls it.
        is_folder: Whether it is the folder of the shards.
    """

    name: str | None
    of_rank_zero: str
    is_folder: bool


class RunDirectory:
    """A directory as one run uses it. Of several processes only rank 0 writes, holds the lock and keeps the history.

    Args:
        catalog: Its checkpoints.
        lock: The right to write.
        timeline: Where the run stands.
        membership: The processes of the run.

    Attributes:
        catalog: Its checkpoints.
        files: Its files, under the names that checkpoints have.
        lock: The right to write.
        mirror: Its copy in a store; None where there is none.
    """

    def __init__(self, catalog: Catalog, lock: WriterLock, timeline: Timeline, membership: Membership) -> None:
        self.catalog = catalog
        self.files = catalog.files
        self.lock = lock
        self.mirror: RunMirror | None = None
        self._timeline = timeline
        self._membership = membership
        self._is_looked_for = False
        self._shared_by: Group | None = None  # the ranks that are known to see one directory

    @property
    def path(self) -> Path:
        """The absolute path."""
        return self.files.path

    def enter(self) -> None:
        """Take the directory for writing: create it, lock it, find only this run's checkpoints, set aside the newer.

        Raises:
            DirectoryInUseError: It holds checkpoints that this manager did not restore from, or of which it restored a
                part.
            DirectoryLockedError: Another writer holds it.
            OSError: It cannot be made.
        """
        if self._timeline.restored_only is not None:
            raise DirectoryInUseError(
                directory=self.path, steps=self.files.steps(), restored_only=self._timeline.restored_only
            )
        if not self.lock.held:
            self._refuse_unknown_steps()  # before the lock, so that a wrong directory is left without a trace
            self.files.create()
            self.lock.acquire()
            try:
                self._refuse_unknown_steps()  # another writer may have had it meanwhile
                self.files.sweep()
            except BaseException:
                self.lock.release()
                raise
        try:
            self.lock.check()
        except DirectoryLockedError:
            self.lock.release()  # it protects nothing any more; the next save takes the lock that others see
            raise
        self._refuse_unknown_steps()
        superseded = self._timeline.superseded_steps
        if superseded:
            paths = self.files.set_aside(superseded)
            self.add_event("set_aside", self._timeline.saved_step, files=[path.name for path in paths])
            self._timeline.set_aside()
        if self.mirror is not None:
            self.mirror.enter(self._timeline.saved_step, went_back=bool(superseded))

    def warn_of_other_writer(self) -> None:
        """Warn, once, of a process that writes here while this one, which is going to write, begins. On rank 0.

        At the first save it is an error: many steps later, and with what it has saved meanwhile in the directory.
        """
        if self._is_looked_for or not self._timeline.saves_by_itself:
            return
        self._is_looked_for = True
        other = self.lock.other_holder()
        if other:
            pid, host, since = (other.get(name) for name in ("pid", "host", "since"))
            warn_caller(
                f"Another process is saving checkpoints into {self.path}: pid {pid} on {host}, since {since}. What it "
                "saves from now on is not part of what is restored here, and saves here fail as long as it runs.\n"
                f"Next: if it is left over from an earlier start of this job, end it (kill {pid} on {host}), and start "
                "again.",
                SafeckptWarning,
            )

    def unknown_steps(self) -> list[int]:
        """Return the steps of checkpoints in the directory that are not this run's, ascending."""
        return [step for step in self.files.steps() if step not in self._timeline.known_steps]

    def _refuse_unknown_steps(self) -> None:
        unknown = self.unknown_steps()
        if unknown:
            raise DirectoryInUseError(directory=self.path, steps=unknown)

    def add_event(self, kind: str, step: int | None, **data: Any) -> None:
        """Append to the history of this run; a directory that is missing, not readable or not writable has none."""
        if not self._membership.is_rank_zero:
            return
        try:
            is_own = self._timeline.saved_step is not None or not self.unknown_steps()
        except OSError:
            return  # what is being noted matters more than the note
        if is_own and os.access(self.path, os.W_OK):
            self.files.events.append(kind, step=step, **data)

    def add_saved_event(self, checkpoint: Checkpoint) -> None:
        """Append that a checkpoint was saved."""
        self.add_event("saved", checkpoint.step, loss=checkpoint.loss, size_bytes=checkpoint.size_bytes)

    def wait_for(self, path: Path, path_of_rank_zero: str | None = None) -> None:
        """Wait until a path that rank 0 has made is seen here: some file systems show it late.

        Raises:
            DirectoryNotSharedError: It is not seen in time.
        """
        # Not as long as rank 0 waits for an answer, which then would not get to it.
        most_seconds = min(_SEEN_SECONDS, self._membership.ranks.timeout_seconds / 2)
        end = time.monotonic() + most_seconds
        while not os.path.lexists(path):
            if time.monotonic() > end:
                raise DirectoryNotSharedError(
                    directory=self.path,
                    rank=self._membership.group.rank,
                    name=path.name,
                    waited_seconds=most_seconds,
                    of_rank_0=path_of_rank_zero,
                )
            with contextlib.suppress(OSError):
                self.files.steps()  # a listing makes NFS look again
            time.sleep(_LOOKS_SECONDS)

    def make_place(self, step: int, *, is_folder: bool) -> Place:
        """Make what the other ranks look for before a save: the folder of its shards, or a mark. On rank 0.

        A mark is made once for a group: whoever has seen it shares this directory.
        """
        if is_folder:
            return Place(self.files.begin_folder(step).name, str(self.path), is_folder=True)
        if self._membership.group.size == 1 or self._shared_by is self._membership.group:
            return Place(None, str(self.path), is_folder=False)
        return Place(self.lock.mark(), str(self.path), is_folder=False)

    def see(self, place: Place) -> None:
        """See what rank 0 has made.

        Raises:
            DirectoryNotSharedError: It is not there.
        """
        if place.name is not None:
            self.wait_for(self.path / place.name, place.of_rank_zero)

    def note_shared(self, place: Place) -> None:
        """Note that every rank has seen a mark, and take it away. On rank 0, in the thread that writes as well."""
        if place.name is not None and not place.is_folder:  # each sharded save has a folder of its own
            self._shared_by = self._membership.group
            self.drop(place)

    def drop(self, place: Place) -> None:
        """Take away what was made for a save, on rank 0."""
        if place.name is None or not self._membership.is_rank_zero:
            return
        if not place.is_folder:
            self.lock.unmark(place.name)
        elif os.path.lexists(self.path / place.name):
            self.files.drop_folder(self.path / place.name)

    def close(self) -> None:
        """Give back the lock, and wait for deletions that are still going on."""
        self.lock.release()
        self.files.settle()
