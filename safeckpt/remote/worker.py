"""The thread that copies committed checkpoints into the store, newest first, while training goes on.

What is in the directory and not in the store is what there is to do; no list of jobs could disagree with that. Each
round looks at both, sends one checkpoint, looks whether the prefix is still this run's, and deletes what no rule keeps
any more. A failure is told at once and tried again; losing the prefix to another writer is final.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from safeckpt.errors import (
    DamagedCheckpointError,
    DirectoryInUseError,
    LoadError,
    MirrorBehindError,
    MirrorTakenError,
    MirrorUnsafeError,
    SafeckptError,
    SafeckptWarning,
)
from safeckpt.remote import keys
from safeckpt.remote.client import Client
from safeckpt.remote.epochs import NOTHING, Epochs, RemoteCheckpoint, View
from safeckpt.remote.options import Mirror
from safeckpt.remote.transfer import Upload, open_remote
from safeckpt.store import CheckpointDirectory, KeepLast, Policy, to_prune
from safeckpt.system.threads import start
from safeckpt.system.warn import warn_caller

__all__ = ["Header", "Worker"]

Header = Mapping[str, Any]
Policies = Callable[[Callable[[int], Header]], Sequence[Policy]]

_HISTORY_SECONDS = 60.0  # how old the record of losses in the store may be
_LOOK_SECONDS = 0.5  # how often a thread that waits looks whether the main thread has ended
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0  # between two tries
_LAST_WAIT_SECONDS = 2.0  # for a request that is under way when the worker is closed
_PEERS_SECONDS = 30.0  # without a new file of another rank, before rank 0 sends those that are missing
_SHARD = re.compile(r"__([0-9]+)_[0-9]+\.distcp")  # the name that torch.distributed.checkpoint gives a rank's file

_log = logging.getLogger("safeckpt")


class _AbandonedError(SafeckptError):
    """An upload that nobody waits for any more."""


class _Place(NamedTuple):
    """Which of the processes of a run this is."""

    rank: int = 0
    size: int = 1


class Worker:
    """Keeps a store up to date with a directory.

    Args:
        epochs: The prefix in the store.
        directory: The directory.
        mirror: What the caller wants.
        policies: Returns what is kept, given a function from step to header.
        take: Claims the prefix where that could not be done yet; called in the thread.
        event: Notes something in the history of the run.

    Attributes:
        durable_step: The newest step that is in the store, checked, and counts; None where there is none.
        is_taken: Whether the prefix is claimed, and the store knows where this run goes on: only then is anything sent.
    """

    def __init__(
        self,
        epochs: Epochs,
        directory: CheckpointDirectory,
        mirror: Mirror,
        *,
        policies: Policies,
        take: Callable[[], None],
        event: Callable[..., object],
    ) -> None:
        self.durable_step: int | None = None
        self.is_taken = False
        self._epochs = epochs
        self._client: Client = epochs.client
        self._directory = directory
        self._mirror = mirror
        self._policies = policies
        self._take = take
        self._event = event
        self._place = _Place()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._saved_step: int | None = None
        self._first_step: int | None = None  # from which on the lag is counted where nothing is durable
        self._is_asked = False
        self._is_busy = False
        self._is_swept = False
        self._is_closing = False
        self._is_abandoned = False
        self._back_to: int | None = None  # a step to which the run has gone back, until an epoch says so
        self._described: dict[int, int] = {}  # steps whose header has changed, and how often
        self._unsendable: dict[int, str] = {}
        self._fatal: BaseException | None = None
        self._refused: BaseException | None = None
        self._trouble: str | None = None
        self._headers: dict[tuple[int, int], Header] = {}
        self._sent: set[tuple[int, int]] = set()
        self._histories: dict[str, tuple[int, int]] = {}
        self._history_at = 0.0
        _at_exit(self)

    # -- what the training thread calls ------------------------------------------------------------------------------

    def committed(self, step: int, *, rank: int = 0, size: int = 1) -> None:
        """Have a checkpoint copied that is in the directory."""
        with self._changed:
            self._place = _Place(rank, size)
            self._first_step = step if self._first_step is None else self._first_step
            self._saved_step = step
            self._ask()

    def described(self, step: int) -> None:
        """Have a checkpoint copied again: its header has changed."""
        with self._changed:
            self._described[step] = self._described.get(step, 0) + 1
            self._ask()

    def went_back_to(self, step: int) -> None:
        """Note that the run went back: what is above this step belongs to a timeline that was left."""
        with self._changed:
            self._back_to = step if self._back_to is None else min(step, self._back_to)
            self._saved_step = step
            if self.durable_step is not None and self.durable_step > step:
                self.durable_step = None
            self._ask()

    def ask(self) -> None:
        """Have the store compared with the directory."""
        with self._changed:
            self._ask()

    def check(self) -> None:
        """Raise what has gone wrong for good.

        Raises:
            MirrorTakenError: Another writer has the prefix.
            MirrorBehindError: The store is further behind than the caller allows.
            SafeckptWarning: A warning of the thread, where warnings are errors.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        if self._fatal is not None:
            raise self._fatal
        most, saved = self._mirror.max_lag_steps, self._saved_step
        known = self._first_step if self.durable_step is None else self.durable_step
        if most is not None and saved is not None and known is not None and saved - known > most:
            raise self._behind(saved, f"max_lag_steps={most}")

    def wait(self, seconds: float) -> None:
        """Return when the newest checkpoint is in the store.

        Raises:
            MirrorBehindError: It is not, after so long.
            MirrorTakenError: Another writer has the prefix.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_done():
                left = end - time.monotonic()
                if self._fatal is not None or left <= 0 or not self._runs():
                    break
                self._changed.wait(min(left, _LOOK_SECONDS))
            saved, done = self._saved_step, self._is_done()
        if self._fatal is not None:
            raise self._fatal
        if not done and saved is not None:
            raise self._behind(saved, f"waited {seconds:g} s")

    def close(self, seconds: float) -> None:
        """Send what is missing, for so long at most, and end.

        Raises:
            BaseException: As `wait` and `check`. The thread has ended all the same, or ends at the next part it sends.
        """
        if self._pid != os.getpid():
            return
        try:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            if seconds > 0:
                self.wait(seconds)
        finally:
            thread = self._thread
            if thread is not None and seconds > 0 and self._fatal is None and self._is_done():
                thread.join(min(seconds, 10.0))  # the history
            with self._changed:
                self._is_abandoned = True
                self._changed.notify_all()
            if thread is not None:
                thread.join(_LAST_WAIT_SECONDS)
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def _behind(self, saved: int, why: str) -> MirrorBehindError:
        return MirrorBehindError(
            url=self._client.url,
            saved_step=saved,
            durable_step=self.durable_step,
            why="; ".join(filter(None, (why, self._trouble or self._unsendable.get(saved)))),
        )

    def _is_done(self) -> bool:
        if self._place.rank:
            return not self._is_asked and not self._is_busy
        return self._saved_step is None or (
            self.durable_step is not None and self.durable_step >= self._saved_step and not self._described
        )

    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _ask(self) -> None:
        self._is_asked = True
        if not self._runs() and not self._is_closing and self._fatal is None:
            # A daemon, with an end of its own at the exit: a request that hangs must not keep the process.
            self._thread = threading.Thread(target=self._run, name="safeckpt-mirror", daemon=True)
            if not start(self._thread):
                self._thread = None
                self._trouble = "no thread could be started"
        self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_seconds = _FIRST_WAIT_SECONDS
        while self._await_work():
            try:
                self._round()
                if self._trouble is not None:
                    _log.info("%s can be written again", self._client.url)
                self._trouble = None
                wait_seconds = _FIRST_WAIT_SECONDS
            except _AbandonedError:
                return
            except (MirrorTakenError, MirrorUnsafeError, DirectoryInUseError) as error:
                self._end_with(error)
                return
            except (LoadError, OSError, RuntimeError) as error:
                self._tell(error)
                self._rest(wait_seconds)
                wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)
            except BaseException as error:  # noqa: BLE001 - kept, and raised where the caller can see it
                self._end_with(error)
                return

    def _end_with(self, error: BaseException) -> None:
        _log.error("%s", error)
        with self._changed:
            self._fatal = error  # raised by the next save, and by `close`
            self._changed.notify_all()

    def _await_work(self) -> bool:
        """Wait until there is something to do, and return whether there is. Meanwhile send the losses now and then."""
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                if self._is_abandoned:
                    return False
                if self._is_asked:
                    self._is_asked, self._is_busy = False, True
                    return True
                is_last = self._is_closing
                due = self._history_at + _HISTORY_SECONDS - time.monotonic()
                if not is_last and due > 0:
                    self._changed.wait(due)
                    continue
            with contextlib.suppress(OSError, LoadError):  # MirrorUnreachableError is one: the next upload tells
                if self.is_taken and self._place.rank == 0:
                    self._send_histories()
            if is_last:
                return False
            self._history_at = time.monotonic()

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._is_asked = True
            if not self._is_abandoned:
                self._changed.wait(seconds)

    def _tell(self, error: BaseException) -> None:
        """Warn of a failure, once for each that is new."""
        text = str(error).partition("\n")[0]
        if text == self._trouble:
            return
        self._trouble = text
        then = "It is not sent" if isinstance(error, DamagedCheckpointError) else "It is tried again"
        self._warn(f"The copy in {self._client.url} is not up to date: {text} {then}; training goes on.")

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        try:
            warn_caller(text, SafeckptWarning)
        except SafeckptWarning as refused:
            self._refused = refused

    def _round(self) -> None:
        """Bring the store one step further, and ask for another round where there is more to do."""
        if self._place.rank:
            self._send_shards()
            return
        if not self.is_taken:
            self._take()
        if not self._is_swept:  # before anything of ours is under way
            self._is_swept = True
            self._client.abort_stale("epoch-")
        view = self._epochs.look()
        if self._back_to is not None:
            view = self._begin_again(view)
        with self._changed:
            if view.head == self._epochs.number and view.checkpoints:
                self.durable_step = view.last if self.durable_step is None else max(self.durable_step, view.last)
            self._changed.notify_all()
        step = self._next(view)
        if step is None:
            return
        if self._send(step, view):
            self.ask()  # for what is older and to be kept

    def _begin_again(self, view: View) -> View:
        """Claim another epoch, whose past ends at the step to which the run went back."""
        with self._changed:
            step = self._back_to
        assert step is not None
        if view.last > step:
            assert self._epochs.number is not None
            token = view.newest.token if view.newest is not None else ""
            self._epochs.claim(token, self._epochs.number)
            view = self._epochs.look()
            past = {at: one for at, one in view.checkpoints.items() if at <= step}
            self._epochs.begin(max(past, default=NOTHING), past)
            self._directory.note_mirror(self._client.url, epoch=self._epochs.number)
            view = self._epochs.look()
        with self._changed:
            if self._back_to == step:
                self._back_to = None
            self.durable_step = view.last if view.checkpoints else None
        return view

    def _next(self, view: View) -> int | None:
        """Return the step to send: the newest, else the newest that is missing and that a rule keeps."""
        local = self._directory.steps()
        with self._changed:
            self._described = {step: count for step, count in self._described.items() if step in local}
            again = set(self._described)
        local = [step for step in local if step not in self._unsendable]
        there = view.checkpoints if view.head == self._epochs.number else ()
        missing = [step for step in local if step not in there or step in again]
        if not missing:
            return None
        if missing[-1] in again or missing[-1] > max(there, default=NOTHING):
            return missing[-1]
        both = sorted({*local, *view.checkpoints})
        doomed = set(to_prune(both, self._policies(lambda step: self._header(step, view)), is_good=lambda _: True))
        return next((step for step in reversed(missing) if step not in doomed), None)

    def _send(self, step: int, view: View) -> bool:
        """Send a checkpoint, and count it as durable when the prefix is still ours."""
        number = self._epochs.number
        assert number is not None
        place = self._place
        changes = self._described.get(step)
        began = time.monotonic()
        try:
            upload = Upload(self._directory, step, number, None if place.size == 1 else _files_of(place))
        except FileNotFoundError:
            return True  # pruned: look again
        with contextlib.closing(upload):
            there = _sizes_in(view, number, step)
            if upload.names:
                self._directory.note_mirror(self._client.url, epoch=number, step=step)
            try:
                upload.send_parts(self._watched(), lambda key: there.get(key) == upload.names.get(key))
                self._await_peers(upload)
                upload.finish(self._watched())
                header = upload.header()
            except DamagedCheckpointError as error:
                self._unsendable[step] = str(error).partition("\n")[0]
                raise
        self._epochs.check()
        with self._changed:
            if self._back_to is not None and step > self._back_to:
                return True  # left behind while it was sent
            if changes is not None and self._described.get(step) == changes:
                del self._described[step]
            self._sent.add((number, step))
            self._headers[number, step] = header
            self.durable_step = step if self.durable_step is None else max(self.durable_step, step)
            self._changed.notify_all()
        _log.info("step %d is in %s", step, self._client.url)
        self._event("mirrored", step, url=self._client.url, seconds=round(time.monotonic() - began, 3))
        self._send_histories()
        self._prune()
        return True

    def _watched(self) -> Client:
        return _Watched(self._client, self)

    def _await_peers(self, upload: Upload) -> None:
        """Wait until the files of the other ranks are there; send those that do not come."""
        if self._place.size == 1 or not upload.names:
            return
        end = time.monotonic() + _PEERS_SECONDS
        missing = dict(upload.names)
        while missing:
            there = {one.key: one.size_bytes for one in self._client.listing(upload.key.rpartition("/")[0] + "/")}
            left = {key: size for key, size in missing.items() if there.get(key) != size}
            if len(left) < len(missing):
                end = time.monotonic() + _PEERS_SECONDS
            missing = left
            if missing and time.monotonic() > end:
                with contextlib.closing(Upload(self._directory, upload.step, keys_epoch(upload.key))) as rest:
                    rest.send_parts(self._watched(), set(upload.names).difference(missing).__contains__)
                return
            if missing:
                self._pause(_LOOK_SECONDS)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)
            if self._is_abandoned:
                raise _AbandonedError("the upload was given up")

    def _send_shards(self) -> None:
        """Send this rank's files of a sharded checkpoint, once rank 0 has noted where they belong."""
        step = self._saved_step
        if step is None or not self._directory.path_of(step).is_dir():
            return
        end = time.monotonic() + _PEERS_SECONDS
        while (noted := self._directory.mirror_note(self._client.url)).get("step") != step:
            if time.monotonic() > end or self._saved_step != step:
                return  # overtaken; and if not, rank 0 sends them
            self._pause(_LOOK_SECONDS / 5)
        try:
            upload = Upload(self._directory, step, int(noted["epoch"]), _files_of(self._place))
        except FileNotFoundError:
            return
        with contextlib.closing(upload):
            upload.send_parts(self._watched())

    # -- history, pruning --------------------------------------------------------------------------------------------

    def _send_histories(self) -> None:
        self._history_at = time.monotonic()
        number = self._epochs.number
        assert number is not None
        for name, data, identity in self._directory.histories(self._histories):
            self._client.put(keys.epoch_prefix(number) + name, data)
            self._histories[name] = identity

    def _header(self, step: int, view: View) -> Header:
        """Return the header of a checkpoint; empty where it has none."""
        one = view.checkpoints.get(step)
        if one is None:
            return self._local_header(step)
        return self._header_of(one)

    def _local_header(self, step: int) -> Header:
        try:
            with contextlib.closing(Upload(self._directory, step, 1)) as upload:
                return upload.header()
        except (LoadError, OSError):
            return {}

    def _header_of(self, one: RemoteCheckpoint) -> Header:
        at = one.epoch, one.step
        if at not in self._headers:
            try:
                with open_remote(self._client, one) as file:
                    self._headers[at] = file.header() or {}
            except (LoadError, FileNotFoundError):
                return {}
        return self._headers[at]

    def _is_good(self, one: RemoteCheckpoint) -> bool:
        """Return whether a checkpoint is one: sent by this process, or whole by trailer and header."""
        return (one.epoch, one.step) in self._sent or bool(self._header_of(one))

    def _prune(self) -> None:
        """Delete from the store what no rule keeps. Called after an upload that counts."""
        view = self._epochs.look()
        found = view.checkpoints
        policies = self._policies(lambda step: self._header(step, view))
        doomed = to_prune(sorted(found), policies, is_good=lambda step: self._is_good(found[step]))
        stays = sorted(set(found).difference(doomed))
        kept_last = next((one.count for one in policies if isinstance(one, KeepLast)), 1)
        for step in doomed:
            self._delete(found[step])
        for one in view.hidden:  # what was left behind goes when this timeline has outrun it, as in a directory
            if sum(step > one.step for step in stays) >= kept_last:
                self._delete(one)
        number = self._epochs.number or 0
        for (epoch, step), loose in view.loose.items():
            if (epoch < number and step < view.last) or (epoch == number and step < (self.durable_step or 0)):
                self._client.delete(loose)

    def _delete(self, one: RemoteCheckpoint) -> None:
        self._client.delete([one.key, *(key for key in one.objects if key != one.key)])
        self._headers.pop((one.epoch, one.step), None)


class _Watched:
    """A client whose uploads end when nobody waits for them any more."""

    def __init__(self, client: Client, worker: Worker) -> None:
        self._client = client
        self._worker = worker

    def put(self, key: str, data: bytes | Iterator[memoryview], size_bytes: int | None = None) -> None:
        """See `Client`."""
        self._client.put(key, data if isinstance(data, bytes) else self._pieces(data), size_bytes)

    def _pieces(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            if self._worker._is_abandoned:
                raise _AbandonedError("the upload was given up")
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def keys_epoch(key: str) -> int:
    """Return the epoch of a key of a checkpoint."""
    found = keys.parse(key)
    assert isinstance(found, keys.Part)
    return found.epoch


def _sizes_in(view: View, epoch: int, step: int) -> dict[str, int]:
    """Return the objects of a checkpoint that are there, key to size."""
    one = view.checkpoints.get(step)
    return dict(one.objects) if one is not None and one.epoch == epoch else {}


def _files_of(place: _Place) -> Callable[[str], bool]:
    """Return what tells of a file of a sharded checkpoint whether this rank sends it; the index is rank 0's."""

    def mine(name: str) -> bool:
        match = _SHARD.fullmatch(name)
        return (int(match[1]) % place.size if match else 0) == place.rank

    return mine


_live: weakref.WeakSet[Worker] = weakref.WeakSet()


def _at_exit(worker: Worker) -> None:
    if not _live:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _live.add(worker)


def _close_all() -> None:
    """Finish the uploads of managers that nobody closed, as far as each may wait."""
    for worker in list(_live):
        if worker._runs() and not worker._is_abandoned and worker._pid == os.getpid():
            try:
                worker.close(0.0 if worker._mirror.wait == "never" else worker._mirror.timeout_seconds)
            except (SafeckptError, SafeckptWarning) as error:
                _log.error("%s", error)
