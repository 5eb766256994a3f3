"""The files of one run in one directory. What the listing shows is the truth: there is no index beside it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from safeckpt.errors import DurabilityUnknownError, SafeckptWarning, StepExistsError
from safeckpt.store import deferred, disk, names
from safeckpt.store.commit import commit, write_new
from safeckpt.store.events import EventLog
from safeckpt.store.losses import LossLog
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Aside", "CheckpointDirectory"]

T = TypeVar("T")

_MOST_NOTE_BYTES = 1 << 16


class Aside(NamedTuple):
    """A checkpoint of a timeline that was left.

    Attributes:
        step: Its step.
        path: Where it is now.
    """

    step: int
    path: Path


class CheckpointDirectory:
    """Lists, commits, removes and sets aside the checkpoints of one directory.

    Everything that changes the directory expects its writer lock to be held. Listing needs no lock: a file that is
    there is whole, and one that is removed during a read stays readable through the open handle.

    Attributes:
        path: The directory, absolute, so that a change of the working directory moves nothing.
        events: The run's history in it.
        losses: The run's losses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(names.expand_user(path)).absolute()
        self.events = EventLog(self.path / names.EVENTS)
        self.losses = LossLog(self.path / names.LOSSES)
        self._is_durable = False  # the name of the directory, as far as this object has seen to it
        self._noting = threading.Lock()
        self._undeleted: set[Path] = set()  # temporary directories that could not be deleted yet

    def create(self) -> None:
        """Make the directory and its missing parents, durably.

        A directory that exists may have been made a moment ago, without a sync: its name is made durable once, where
        its parent can be opened.

        Raises:
            OSError: It cannot be made, or something else has its name.
        """
        missing = []
        place = self.path
        while not place.is_dir():
            missing.append(place)
            place = place.parent
        for place in reversed(missing):
            try:
                disk.make_directory(place)
            except FileExistsError:
                if not place.is_dir():
                    raise
            # A checkpoint is only as durable as every name on the way to it.
            with disk.open_directory(place.parent) as parent:
                disk.sync_directory(parent)
        if not missing and not self._is_durable:
            with contextlib.suppress(OSError), disk.open_directory(self.path.parent) as parent:
                disk.sync_directory(parent)
        self._is_durable = True

    def steps(self) -> list[int]:
        """Return the steps that have a file, good or not, ascending; none when there is no directory.

        Raises:
            OSError: The directory is there and cannot be read, which is not the same as being empty.
        """
        return self._steps_in(self._names())

    def asides(self) -> list[Aside]:
        """Return the checkpoints that were set aside, by step and then by age.

        Raises:
            OSError: The directory is there and cannot be read.
        """
        return self._asides_in(self._names())

    def steps_and_asides(self) -> tuple[list[int], list[Aside]]:
        """Return both from one listing: reading ten thousand names takes some milliseconds.

        Raises:
            OSError: The directory is there and cannot be read.
        """
        listing = self._names()
        return self._steps_in(listing), self._asides_in(listing)

    def _steps_in(self, listing: list[str]) -> list[int]:
        return sorted({step for step in map(names.parse_step, listing) if step is not None})

    def _asides_in(self, listing: list[str]) -> list[Aside]:
        found = [(parsed, name) for name in listing if (parsed := names.parse_aside(name)) is not None]
        return [Aside(parsed[0], self.path / name) for parsed, name in sorted(found)]

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint: its file, or its directory where only that is there."""
        path = self.path / names.step_name(step)
        folder = self.folder_of(step)
        return folder if folder.is_dir() and not os.path.lexists(path) else path

    def folder_of(self, step: int) -> Path:
        """Return the path of a step's sharded checkpoint, whether it is there or not."""
        return self.path / names.folder_name(step)

    def commit_step(
        self,
        step: int,
        write: Callable[[BinaryIO], T],
        *,
        check: Callable[[BinaryIO, T], None] | None = None,
        size_bytes: int | None = None,
    ) -> T:
        """Commit the checkpoint of a step, as `safeckpt.store.commit.commit` does.

        Raises:
            StepExistsError: The step has a file already, good or not; it is untouched.
        """
        self._refuse_existing(step)
        return commit(self.path / names.step_name(step), write, check=check, step=step, size_bytes=size_bytes)

    def rewrite_step(
        self,
        step: int,
        path: Path,
        write: Callable[[BinaryIO], T],
        *,
        check: Callable[[BinaryIO, T], None],
        size_bytes: int | None = None,
    ) -> T:
        """Replace a step's file, or the index of its directory, as `safeckpt.store.commit.commit` does.

        Raises:
            ValueError: The path is not of this step.
        """
        if self.path_of(step) not in (path, path.parent):
            raise ValueError(f"{path} does not belong to step {step} of {self.path}")
        return commit(path, write, check=check, step=step, size_bytes=size_bytes)

    def begin_folder(self, step: int) -> Path:
        """Make the directory in which the shards of a step are written, and return it; it is not listed yet.

        Raises:
            StepExistsError: The step has a checkpoint already, good or not; it is untouched.
            OSError: It cannot be made.
        """
        self._refuse_existing(step)
        deferred.wait()
        for left in list(self._undeleted):
            self._remove_tree(left)  # and tell, when that fails again
        path = self.path / names.temp_name(names.folder_name(step))
        disk.make_directory(path)
        return path

    def write_inside(self, path: Path, write: Callable[[BinaryIO], T], *, size_bytes: int | None = None) -> T:
        """Write a file into a directory that `begin_folder` made; `commit_folder` makes its name durable.

        Raises:
            OSError: The system refused, with errno. The file is gone.
        """
        return write_new(path, write, size_bytes=size_bytes)

    def commit_folder(self, step: int, temp: Path) -> None:
        """Give a directory that `begin_folder` made, and whose files are synced, its final name.

        Raises:
            StepExistsError: The step has got a checkpoint meanwhile.
            DurabilityUnknownError: It has its name, but a power loss may still take it back.
            OSError: Nothing was committed; `drop_folder` removes what was written.
        """
        self._refuse_existing(step)
        target = self.folder_of(step)
        with disk.open_directory(self.path) as parent:
            with disk.open_directory(temp) as inside:
                disk.sync_directory(inside)  # the names of the shards, before the name that makes them a checkpoint
            disk.replace(temp, target)
            try:
                durable = disk.sync_directory(parent)
            except OSError as error:
                raise DurabilityUnknownError(path=target, number=error.errno, reason=str(error), step=step) from error
        if not durable:
            _warn(f"The file system of {self.path} cannot sync directories: a power loss may take the newest files.")

    def drop_folder(self, temp: Path) -> None:
        """Delete a directory that `begin_folder` made and nothing committed; what stands in the way is a warning."""
        if names.temp_final(temp.name) is None or temp.parent != self.path:
            raise ValueError(f"{temp} is not a temporary directory of {self.path}")
        self._remove_tree(temp)

    def _refuse_existing(self, step: int) -> None:
        for path in (self.path / names.step_name(step), self.folder_of(step)):
            if os.path.lexists(path):
                raise StepExistsError(step=step, path=path)

    def remove(self, step: int) -> bool:
        """Delete a step's checkpoint and return whether it is gone; what stands in the way is a warning."""
        return self._remove(self.path_of(step))

    def remove_aside(self, aside: Aside) -> bool:
        """Delete a set-aside checkpoint and return whether it is gone; what stands in the way is a warning."""
        if names.parse_aside(aside.path.name) is None or aside.path.parent != self.path:
            raise ValueError(f"{aside.path} is not a set-aside checkpoint of {self.path}")
        return self._remove(aside.path)

    def set_aside(self, steps: Iterable[int]) -> list[Path]:
        """Rename checkpoints so that they are never latest and free their step, durably.

        To be called before the first file of the new timeline is written. Interrupted half-way it can be called again;
        what keeps its name until then is still a consistent start of the old timeline.

        Args:
            steps: Steps that have a file; one that has none any more is passed over.

        Returns:
            The new paths, highest step first.

        Raises:
            OSError: Not all were renamed, or not durably.
        """
        # Highest first: the steps that a crash leaves are then those that one run saved one after the other.
        ordered = sorted(steps, reverse=True)
        if not ordered:
            return []
        taken = {parsed for name in disk.listing(self.path) if (parsed := names.parse_aside(name)) is not None}
        moved = []
        with disk.open_directory(self.path) as directory:
            for step in ordered:
                number = 1 + max((number for other, number in taken if other == step), default=0)
                old = self.path_of(step)
                path = self.path / names.aside_name(step, number, folder=old == self.folder_of(step))
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: its step is free
                    disk.replace(old, path)
                    moved.append(path)
            disk.sync_directory(directory)
        return moved

    def sweep(self) -> list[str]:
        """Delete the temporary files that dead writers left, of checkpoints and inside them, and return their names.

        To be called when the writer lock has been taken. A temporary file in use, also by a process that saves into
        this directory without the lock, is left alone. What cannot be deleted is a warning.
        """
        swept = []
        for name in sorted(self._names()):
            if names.is_folder(name) and (self.path / name).is_dir() and not (self.path / name).is_symlink():
                swept += self._sweep_inside(self.path / name)
            final = names.temp_final(name)
            if final is None or names.parse_step(final) is None:
                continue
            if names.is_folder(final) and (self.path / name).is_dir():
                # A sharded checkpoint that was not finished, or a pruned one: only a holder of the lock makes these.
                if self._remove_tree(self.path / name):
                    swept.append(name)
                continue
            if self._sweep_file(self.path / name):
                swept.append(name)
        return swept

    def _sweep_inside(self, folder: Path) -> list[str]:
        """Delete what a writer that died left beside the index of a checkpoint, which it was about to replace."""
        try:
            listing = disk.listing(folder)
        except OSError:  # whoever reads the checkpoint says so
            return []
        stale = [name for name in sorted(listing) if names.temp_final(name) is not None]
        return [f"{folder.name}/{name}" for name in stale if self._sweep_file(folder / name)]

    def _sweep_file(self, path: Path) -> bool:
        try:
            return disk.unlink_unclaimed(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            _warn(f"The stale temporary file {path} could not be deleted: {error}.")
            return False

    # -- what a copy in a store has to know --------------------------------------------------------------------------

    def mirror_token(self) -> str:
        """Return the random name of this directory, by which a store knows it again; made at the first call."""
        token = self._mirror_notes().get("token")
        if isinstance(token, str):
            return token
        return str(self._note({"token": secrets.token_hex(8)})["token"])

    def mirror_note(self, url: str) -> dict[str, Any]:
        """Return what was noted about a store; empty when that is nothing."""
        places = self._mirror_notes().get("places")
        note = places.get(url) if isinstance(places, dict) else None
        return note if isinstance(note, dict) else {}

    def note_mirror(self, url: str, **fields: int) -> None:
        """Note something about a store, in place of what was noted before.

        Raises:
            OSError: It cannot be written.
        """
        places = self._mirror_notes().get("places")
        self._note({"places": {**(places if isinstance(places, dict) else {}), url: fields}})

    def _mirror_notes(self) -> dict[str, Any]:
        try:
            notes = json.loads(disk.read(self.path / names.MIRROR, _MOST_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _note(self, more: dict[str, Any]) -> dict[str, Any]:
        with self._noting:
            notes = {**self._mirror_notes(), **more}
            data = json.dumps(notes).encode()
            commit(self.path / names.MIRROR, lambda file: file.write(data))
        return notes

    def histories(self, known: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, bytes, tuple[int, int]]]:
        """Yield name, content and identity of each file of the history that has another identity than the known one."""
        for name in (names.EVENTS, names.LOSSES):
            path = self.path / name
            try:
                status = path.stat()
                identity = status.st_size, status.st_mtime_ns
                if known.get(name) != identity:
                    yield name, disk.read(path), identity
            except FileNotFoundError:
                continue

    def replace_history(self, name: str, data: bytes) -> None:
        """Put a history from elsewhere in the place of the one that is here. The writer lock has to be held.

        Raises:
            ValueError: It is the name of none.
            OSError: It cannot be written.
        """
        if name not in (names.EVENTS, names.LOSSES):
            raise ValueError(f"{name} is no history")
        self.losses.close()
        commit(self.path / name, lambda file: file.write(data))

    def settle(self) -> None:
        """Wait for background deletions; they would be lost at process exit."""
        deferred.wait()

    def _names(self) -> list[str]:
        try:
            return disk.listing(self.path)
        except FileNotFoundError:
            return []

    def _remove(self, path: Path) -> bool:
        if names.is_folder(path.name) and path.is_dir() and not path.is_symlink():
            # First out of the listing, at once: half a directory must not look like a damaged checkpoint.
            temp = self.path / names.temp_name(path.name)
            try:
                disk.replace(path, temp)
            except OSError as error:
                _warn(f"{path} is no longer needed and could not be deleted: {error}. The next save tries it again.")
                return False
            # Not with descriptors held: NFS keeps such files in the directory under another name.
            deferred.run(functools.partial(self._remove_quietly, temp))
            return True
        try:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                deferred.delete(path)
        except OSError as error:
            _warn(f"{path} is no longer needed and could not be deleted: {error}. It is tried again at the next save.")
            return False
        return True

    def _remove_tree(self, path: Path) -> bool:
        error = self._remove_quietly(path)
        if error is not None:
            _warn(f"{path} could not be deleted: {error}. It is tried again at the next save.")
        return error is None

    def _remove_quietly(self, path: Path) -> OSError | None:
        try:
            disk.remove_tree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._undeleted.add(path)
            return error
        self._undeleted.discard(path)
        return None


def _warn(text: str) -> None:
    warn_caller(text, SafeckptWarning)
