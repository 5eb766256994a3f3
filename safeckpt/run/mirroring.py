"""The copy of a run in an object store: taken when the run first writes, looked at when it restores."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from safeckpt.errors import (
    DirectoryInUseError,
    LoadError,
    MirrorError,
    MirrorUnreachableError,
    SafeckptWarning,
)
from safeckpt.file import INDEX
from safeckpt.file.trailer import TRAILER_BYTES
from safeckpt.remote import (
    NOTHING,
    Epochs,
    Mirror,
    RemoteCheckpoint,
    View,
    Worker,
    fetch,
    open_client,
    open_remote,
    trailer_of,
)
from safeckpt.run.catalog import Catalog
from safeckpt.store import CheckpointDirectory, Policy, WriterLock, names
from safeckpt.system.threads import Progress
from safeckpt.system.warn import warn_caller

__all__ = ["RunMirror", "mirror_of"]

_log = logging.getLogger("safeckpt")


def mirror_of(value: str | Mirror) -> Mirror:
    """Return the mirror that a caller asked for.

    Raises:
        TypeError: It is neither a URL nor a `Mirror`.
    """
    if isinstance(value, Mirror):
        return value
    if not isinstance(value, str):
        raise TypeError(f"mirror must be a URL, such as 's3://bucket/runs/x', or a Mirror; got {type(value).__name__}")
    return Mirror(value)


class RunMirror:
    """The copy of a run's checkpoints in an object store: `CheckpointManager.mirror`.

    Args:
        mirror: What the caller wants.
        files: The directory that is copied.
        lock: The right to write into it.
        policies: What is kept, given a function from step to header.
        event: Notes something in the history of the run.
        progress: Told how far a fetch is.
    """

    def __init__(
        self,
        mirror: Mirror,
        files: CheckpointDirectory,
        lock: WriterLock,
        *,
        policies: Callable[[Callable[[int], Mapping[str, Any]]], Sequence[Policy]],
        event: Callable[..., object],
        progress: Progress | None = None,
    ) -> None:
        self._mirror = mirror
        self._files = files
        self._lock = lock
        self._progress = progress
        self._client = open_client(mirror)
        self._epochs = Epochs(self._client, lock=mirror.lock)
        self._worker = Worker(self._epochs, files, mirror, policies=policies, take=self._take, event=event)
        self._view: View | None = None  # when the run restored
        self._was_empty = False  # the directory, then
        self._base: int | None = None
        self._is_entered = False

    # -- for callers -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The prefix in the store, without anything secret."""
        return self._client.url

    @property
    def durable_step(self) -> int | None:
        """The newest step of this run that is whole in the store, as it was checked here; None where there is none.

        Known after the first save. In a process group rank 0 knows it.
        """
        return self._worker.durable_step

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the newest checkpoint is in the store.

        Args:
            timeout_seconds: How long to wait at most; None for the `timeout_seconds` of the `Mirror`.

        Raises:
            MirrorBehindError: It is not there by then. It is in the directory, and still being sent.
            MirrorTakenError: Another writer has taken the prefix.
        """
        self._worker.wait(self._mirror.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def __repr__(self) -> str:
        return f"<mirror {self.url}, durable step {self.durable_step}>"

    # -- restoring ---------------------------------------------------------------------------------------------------

    def look(self) -> Collection[int]:
        """Look at the store for a restore, and return the steps that count there; none where it cannot be reached.

        Raises:
            MirrorUnreachableError: It cannot be reached, and the directory is empty: a fresh start must not look like
                a resume.

        Warns:
            SafeckptWarning: It cannot be reached, and the directory has checkpoints.
        """
        local = self._files.steps()
        self._was_empty = not local
        try:
            self._view = self._epochs.look()
        except MirrorUnreachableError as error:
            self._view = None
            if not local:
                raise
            warn_caller(
                f"{error.args[0].partition(chr(10))[0]} Going on with the directory, whose newest checkpoint is step "
                f"{local[-1]}. If the run went on elsewhere, the store says so when it can be reached.",
                SafeckptWarning,
            )
            return ()
        for number in self._view.lost:
            warn_caller(
                f"In {self.url} the start of epoch {number} is missing: of what was saved before it, nothing counts.",
                SafeckptWarning,
            )
        return self._view.checkpoints.keys()

    def name_of(self, step: int) -> str:
        """Return the URL of a checkpoint that `look` has found."""
        assert self._view is not None
        return f"{self.url}/{self._view.checkpoints[step].name}"

    def fetch(self, step: int) -> None:
        """Bring a checkpoint that `look` has found into the directory, and the history of the run where it has none.

        A checkpoint of that step that is there is set aside: it is not good.

        Raises:
            DirectoryInUseError: The directory holds another run.
            DirectoryLockedError: Another process writes into it.
            LoadError: It is not what was saved.
            FileNotFoundError: It is gone.
            MirrorUnreachableError: The store did not answer.
        """
        view = self._view
        assert view is not None
        self._refuse_other_run(view.checkpoints[step])
        self._files.create()
        held = self._lock.held
        if not held:
            self._lock.acquire()
        try:
            self._files.sweep()
            if step in self._files.steps():
                self._files.set_aside([step])
            _log.info("fetching step %d from %s", step, self.url)
            fetch(self._client, view.checkpoints[step], self._files, self._progress)
            self._fetch_history(view)
            if self._was_empty:
                self._files.note_mirror(self.url, epoch=view.newest.epoch if view.newest else 0)
        finally:
            if not held:
                self._lock.release()

    def _refuse_other_run(self, remote: RemoteCheckpoint) -> None:
        """Refuse to mix two runs in one directory."""
        catalog = Catalog(self._files)
        for local in reversed(self._files.steps()):
            try:
                mine = catalog.peek(local).run_id
            except (LoadError, OSError):
                continue  # an older one may tell
            with open_remote(self._client, remote) as file:
                theirs = (file.header() or {}).get("run_id")
            if theirs != mine:
                raise DirectoryInUseError(directory=self.url, steps=[remote.step])
            return

    def _fetch_history(self, view: View) -> None:
        """Bring the newest history here. It decides nothing: that there is none is no error."""
        for name, epochs in view.histories.items():
            if name == names.EVENTS and self._files.events.read():
                continue
            with contextlib.suppress(FileNotFoundError, MirrorUnreachableError):
                data = bytes(self._client.read(f"epoch-{max(epochs):08d}/{name}"))
                self._files.replace_history(name, data)

    # -- writing -----------------------------------------------------------------------------------------------------

    def enter(self, base: int | None, *, went_back: bool) -> None:
        """Take the prefix before the first write, and raise what has gone wrong since the last one.

        Args:
            base: The step that the run goes on from; None for a new run.
            went_back: Whether checkpoints above it were set aside just now.

        Raises:
            MirrorTakenError: Another run has it.
            MirrorUnsafeError: The store cannot keep two writers apart.
            MirrorBehindError: It is further behind than the caller allows.
            DirectoryInUseError: It holds checkpoints that this run did not restore from.
        """
        self._worker.check()
        if self._is_entered:
            if went_back and base is not None:
                self._worker.went_back_to(base)
            return
        self._base = base
        if self._view is None and not self._files.steps():
            self._was_empty = True
        try:
            self._take()
        except MirrorUnreachableError as error:
            self._is_entered = True
            text = error.args[0].partition("\n")[0]
            warn_caller(f"{text} It is tried again; training goes on.", SafeckptWarning)
        self._is_entered = True
        self._worker.ask()

    def _take(self) -> None:
        """Claim the prefix, and say where this run goes on in it."""
        newest = self._epochs.take(self._files.mirror_token(), agree=self._agreed_epoch, own_past=self._own_past)
        self._files.note_mirror(self.url, epoch=self._epochs.number or 0)
        self._worker.durable_step = None if newest == NOTHING else newest
        self._worker.is_taken = True
        _log.info("%s is mirrored to %s, epoch %d", self._files.path, self.url, self._epochs.number)

    def _refuse_unseen(self, view: View, base: int) -> None:
        """Refuse to leave checkpoints behind that were not there when the run restored."""
        seen = {} if self._view is None else self._view.checkpoints
        unseen = [
            step
            for step, one in view.checkpoints.items()
            if step > base and (step not in seen or seen[step].epoch != one.epoch)
        ]
        if unseen:
            raise DirectoryInUseError(directory=self.url, steps=unseen)

    def _agreed_epoch(self, view: View) -> int | None:
        """Return the newest epoch, where this run may follow it.

        Raises:
            MirrorTakenError: It is of another directory, which may be training now.
        """
        newest = view.newest
        if newest is None:
            return None
        seen = None if self._view is None or self._view.newest is None else self._view.newest.epoch
        allowed = (
            self._mirror.take_over
            or not self._mirror.lock
            or newest.token == self._files.mirror_token()
            or newest.epoch == self._files.mirror_note(self.url).get("epoch")
            or (self._was_empty and (self._view is None or newest.epoch == seen))
        )
        if not allowed:
            raise self._epochs.taken(newest)
        return newest.epoch

    def _own_past(self, view: View) -> dict[int, RemoteCheckpoint]:
        """Return what is there of this run: not what another timeline left below the step that it goes on from.

        Raises:
            DirectoryInUseError: There is more above that step than when the run restored.
        """
        base = NOTHING if self._base is None else self._base
        self._refuse_unseen(view, base)
        past = {step: one for step, one in view.checkpoints.items() if step <= base}
        for step in sorted(past, reverse=True):
            mine = self._trailer(step)
            if mine is None or mine == trailer_of(self._client, past[step]):
                return past
            del past[step]
        return past

    def _trailer(self, step: int) -> bytes | None:
        """Return the trailer of a step's file; None where it is not there any more."""
        path = self._files.path_of(step)
        try:
            with (path / INDEX if path.is_dir() else path).open("rb") as file:
                file.seek(-TRAILER_BYTES, 2)
                return file.read()
        except OSError:
            return None

    def committed(self, step: int, *, rank: int, size: int) -> None:
        """Have a checkpoint copied: on every rank, what is its own."""
        self._worker.committed(step, rank=rank, size=size)

    @property
    def stop_seconds(self) -> float:
        """How long `close` may wait at a stop, for what no save has waited for."""
        return min(self._mirror.timeout_seconds, self._mirror.stop_seconds) if self._mirror.wait == "close" else 0.0

    @property
    def waits_at_saves(self) -> bool:
        """Whether a save returns only when the checkpoint is in the store."""
        return self._mirror.wait == "save"

    def described(self, step: int) -> None:
        """Have a checkpoint copied again, whose header was changed."""
        self._worker.described(step)

    def close(self, *, hurried: bool) -> None:
        """Finish what the caller wants to wait for, and say what is durable.

        Args:
            hurried: Whether a stop signal has come, so that there is little time, or an error, which is more important:
                what is missing is a warning then.

        Raises:
            MirrorBehindError: The newest checkpoint did not get there.
            MirrorTakenError: Another writer has the prefix.
        """
        seconds = 0.0 if self._mirror.wait == "never" else self._mirror.timeout_seconds
        if hurried:
            seconds = min(seconds, self._mirror.stop_seconds)
        try:
            self._worker.close(seconds)
        except MirrorError as error:
            if not hurried:
                raise
            warn_caller(str(error), SafeckptWarning)
        if self._is_entered:
            _log.info("%s: step %s is durable", self.url, self.durable_step)
