"""Checkpoints of a directory: list them, verify them, find the latest and the best. Reads only, without a lock."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from safeckpt.errors import (
    DamagedCheckpointError,
    FormatVersionError,
    LoadError,
    SafeckptWarning,
    SkippedCheckpointWarning,
)
from safeckpt.file import INDEX, CheckpointFile, CheckpointFolder, open_checkpoint
from safeckpt.remote.urls import is_url
from safeckpt.store import Best, CheckpointDirectory
from safeckpt.system.arguments import checked_bool
from safeckpt.system.json_numbers import from_json, to_json
from safeckpt.system.notebooks import html_table
from safeckpt.system.text import number, size
from safeckpt.system.threads import Progress
from safeckpt.system.warn import warn_caller

__all__ = [
    "Bad",
    "Catalog",
    "Checkpoint",
    "Gone",
    "OpenCheckpoint",
    "bests_in",
    "fault_of",
    "latest",
    "reason_of",
    "warn_skipped",
]


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint.

    Attributes:
        step: Optimizer steps completed when it was saved.
        path: The file; the directory of a sharded checkpoint. Of one in a store, a path whose text is its URL.
        loss: The loss given to `save`: a float, or a dict or list of floats; None when none was given.
        metrics: The metrics given to `save`, as floats.
        created_at: When it was saved, UTC.
        size_bytes: Size of the file; 0 in what an asynchronous `save` returns, before the file is laid out. It does
            not count when two are compared.
        run_id: Random name of the run; the same for all checkpoints that were resumed from each other.
        notes: The notes given to the `CheckpointManager` that saved it.
    """

    step: int
    path: Path
    loss: Any
    metrics: Mapping[str, float]
    created_at: dt.datetime
    size_bytes: int = field(compare=False)
    run_id: str
    notes: Mapping[str, Any] = field(default_factory=dict)

    def header(self, **more: Any) -> dict[str, Any]:
        """Return what is written into the file's header, which a listing reads without touching a tensor."""
        return {
            "step": self.step,
            "loss": to_json(self.loss),
            "metrics": to_json(dict(self.metrics)),
            "created_at": self.created_at.strftime(_TIME),
            "run_id": self.run_id,
            **({"notes": dict(self.notes)} if self.notes else {}),
            **more,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], path: Path, size_bytes: int) -> Checkpoint:
        """Return the checkpoint that a header describes.

        Raises:
            DamagedCheckpointError: The header is not one that `header` made.
        """
        try:
            return cls(
                step=int(header["step"]),
                path=path,
                loss=from_json(header["loss"]),
                metrics={str(name): float(value) for name, value in header["metrics"].items()},
                created_at=dt.datetime.strptime(header["created_at"], _TIME).replace(tzinfo=dt.UTC),
                size_bytes=size_bytes,
                run_id=str(header["run_id"]),
                notes=dict(header.get("notes", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(path=path, reason=f"its header is not a checkpoint's ({error!r})") from error

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        rows = [
            ("path", self.path),
            ("saved", f"{self.created_at:%Y-%m-%d %H:%M:%S} UTC"),
            ("size", size(self.size_bytes) if self.size_bytes else None),
            ("loss", number(self.loss)),
            *((f"metric {name}", number(value)) for name, value in self.metrics.items()),
            *((f"note {name}", value) for name, value in self.notes.items()),
            ("run", self.run_id),
        ]
        return html_table(f"Checkpoint of step {self.step}", rows)


_MOST_RELISTINGS = 100  # a writer that prunes faster than this process opens files
_MOST_REMEMBERED = 1 << 16  # files whose header, or verdict, is kept in memory
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"  # of fixed width, so that the size of a file does not depend on the clock


OpenCheckpoint = CheckpointFile | CheckpointFolder

_Identity = tuple[int, int, int, int]


class Catalog:
    """The checkpoints of one directory as they are on disk now.

    A file that has not changed is not read twice: device, inode, size and modification time tell.

    Args:
        files: The directory.
        progress: Told how far the check of a checkpoint is that is opened to be read.

    Attributes:
        files: The directory.
    """

    def __init__(self, files: CheckpointDirectory, progress: Progress | None = None) -> None:
        self.files = files
        self._progress = progress
        self._seen: OrderedDict[Path, tuple[_Identity, Checkpoint]] = OrderedDict()
        self._verdicts: OrderedDict[Path, tuple[_Identity, bool]] = OrderedDict()

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.files.path_of(step)

    def peek(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step after the cheap check: trailer, size and structure, not every byte.

        Raises:
            LoadError: It is not a checkpoint of ours, damaged so that it shows at once, or of a newer format.
            FileNotFoundError: It is gone.
        """
        path = self.files.path_of(step)
        identity = _identity(path)
        known = self._seen.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        with _opened(path) as file:
            checkpoint = _checkpoint_in(file, step, path)
        _remember(self._seen, path, (identity, checkpoint))
        return checkpoint

    def bests(self, step: int) -> list[Best]:
        """Return which best checkpoints the run keeps, as that of a step says.

        Raises:
            LoadError: It is damaged so that it shows at once.
            FileNotFoundError: It is gone.
        """
        path = self.files.path_of(step)
        with _opened(path) as file:
            return bests_in(file.header(), path)

    @contextlib.contextmanager
    def open_step(self, step: int, *, share: int = 0, shares: int = 1) -> Iterator[tuple[OpenCheckpoint, Checkpoint]]:
        """Open a checkpoint and verify every byte, or of the shards of a directory one of `shares` equal shares.

        Raises:
            LoadError: It is not good.
            FileNotFoundError: It is missing.
        """
        path = self.files.path_of(step)
        with _opened(path) as file:
            yield file, _verified_in(file, step, path, share=share, shares=shares, progress=self._progress)

    def is_good(self, step: int) -> bool:
        """Tell whether every byte of a step's file is as it was written; what cannot be read is not known to be."""
        return self.is_good_file(self.files.path_of(step), step)

    def is_good_file(self, path: Path, step: int) -> bool:
        """Like `is_good`, for a file under another name."""
        try:
            identity = _identity(path)
            known = self._verdicts.get(path)
            if known is None or known[0] != identity:
                known = (identity, _passes(path, step))
                _remember(self._verdicts, path, known)
        except (DamagedCheckpointError, OSError):
            return False
        return known[1]

    def is_good_share(self, step: int, share: int, shares: int) -> bool:
        """Tell whether one of some equal shares of a sharded checkpoint is good."""
        try:
            with self.open_step(step, share=share, shares=shares):
                return True
        except (LoadError, OSError):
            return False

    def is_cached(self, step: int) -> bool:
        """Tell whether a step's file was read, or written by this process, and has not changed since."""
        path = self.files.path_of(step)
        try:
            return path in self._verdicts and self._verdicts[path][0] == _identity(path)
        except (DamagedCheckpointError, OSError):
            return False

    def remember_verdict(self, step: int, *, good: bool = True) -> None:
        """Note that the file of a step was read, or that this process has just written it: nobody has to read it."""
        path = self.files.path_of(step)
        with contextlib.suppress(OSError, DamagedCheckpointError):
            _remember(self._verdicts, path, (_identity(path), good))

    def forget(self, path: Path) -> None:
        """Drop what is remembered of a file that was deleted: a long run deletes very many."""
        self._seen.pop(path, None)
        self._verdicts.pop(path, None)

    def list_all(self) -> tuple[Checkpoint, ...]:
        """Return what passes the cheap check, ascending by step; what does not is a warning each.

        Raises:
            FormatVersionError: A file is of a newer format than this version reads.
        """
        for _ in range(_MOST_RELISTINGS):
            found: list[Checkpoint] = []
            bad: list[tuple[Path, str]] = []
            vanished = False
            for step in self.files.steps():
                try:
                    found.append(self.peek(step))
                except FormatVersionError:
                    raise
                except FileNotFoundError:
                    vanished = True  # pruned a moment ago by its writer, which has then committed a newer one
                except LoadError as error:
                    bad.append((self.files.path_of(step), reason_of(error)))
            if not vanished:
                break
        for path, reason in bad:
            warn_skipped(path, reason)
        return tuple(found)

    def find_latest(self, *, verify: bool = True) -> Checkpoint | None:
        """Return the newest good checkpoint, every byte of it verified; None when there is none.

        Without `verify` it is the newest that passes the cheap check, and may turn out not to be good.

        Raises:
            FormatVersionError: A newer file is of a newer format: going back would throw progress away in silence.

        Warns:
            SkippedCheckpointWarning: A newer file was passed over, with the reason.
            SafeckptWarning: There is none, and the history of the directory says that there were.
        """
        found = self._first_good(self._newest_first(), verify=verify)
        if found is None:
            self.warn_if_emptied()
        return found

    def _newest_first(self) -> Iterator[int]:
        """Yield steps, listed anew for each: what is gone when it is opened was pruned for a newer one."""
        tried: set[int] = set()
        while (step := max((step for step in self.files.steps() if step not in tried), default=None)) is not None:
            tried.add(step)
            yield step

    def _first_good(self, steps: Iterable[int], *, verify: bool = True) -> Checkpoint | None:
        """Return the first of some checkpoints that is good; those before it are a warning each."""
        for step in steps:
            try:
                if not verify:
                    return self.peek(step)
                with self.open_step(step) as (_, checkpoint):
                    return checkpoint
            except (LoadError, OSError) as error:
                fault = fault_of(error)
            if isinstance(fault, Bad):
                warn_skipped(self.files.path_of(step), fault.reason)
        return None

    def warn_if_emptied(self) -> None:
        """Warn when a directory without checkpoints has a history that tells of some.

        They may be on a disk that is not mounted, or deleted by mistake; what begins now would pass for a resume.
        """
        try:
            saved = [event for event in self.files.events.read() if event.get("kind") == "saved"]
            is_empty = not self.files.steps()  # again: a first checkpoint may have come before this look at history
        except OSError:
            return
        if saved and is_empty:
            warn_caller(
                f"{self.files.path} holds no checkpoint, but its history says that {len(saved)} were saved, the "
                f"last one of step {saved[-1].get('step')!r} at {saved[-1].get('time')!r}. Nothing was restored: a run "
                "that goes on now starts from the beginning. If the checkpoints were moved or deleted by mistake, stop "
                f"it and put them back; if not, delete {self.files.events.path.name} as well.",
                SafeckptWarning,
            )

    def find_best(self, best: Best) -> Checkpoint | None:
        """Return the good checkpoint with the best value of a metric, every byte verified; None when there is none.

        Raises:
            FormatVersionError: A file is of a newer format than this version reads.

        Warns:
            SkippedCheckpointWarning: A better one is not good.
        """
        checkpoints = {checkpoint.step: checkpoint for checkpoint in self.list_all()}
        return self._first_good(best.rank((step, score(one, best.metric)) for step, one in checkpoints.items()))


class Gone:
    """A checkpoint that was listed and is no longer there: its writer pruned it, and has committed a newer one."""


class Bad(NamedTuple):
    """A checkpoint that is not good.

    Attributes:
        reason: Why, in one line.
    """

    reason: str


def fault_of(error: LoadError | OSError, *, is_named: bool = False) -> Gone | Bad:
    """Return what an error says about a checkpoint that is passed over for it. Raise the error where none is.

    Args:
        error: What was raised while the checkpoint was read.
        is_named: Whether the caller asked for this one: then no other is as good, and only that it is gone is no error.
    """
    if isinstance(error, FileNotFoundError) and not isinstance(error, LoadError):
        return Gone()
    if is_named or isinstance(error, FormatVersionError):  # going back would throw progress away in silence
        raise error
    if isinstance(error, LoadError):
        return Bad(reason_of(error))
    if error.errno == errno.EIO:
        return Bad(str(error))
    raise error  # another right or mount would help


def _identity(path: Path) -> _Identity:
    """Return what changes when a file does.

    Raises:
        DamagedCheckpointError: There is the name, and no regular file behind it.
        OSError: The system refused; FileNotFoundError when the name is gone.
    """
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
            raise DamagedCheckpointError(path=path, reason="it is a link that leads nowhere") from None
        raise
    if stat.S_ISDIR(status.st_mode) and (index := path / INDEX).is_file():
        return _identity(index)  # which says what every other file in it has to be
    if not stat.S_ISREG(status.st_mode):
        kind = f"a directory without {INDEX}" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise DamagedCheckpointError(path=path, reason=f"it is {kind}")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[OpenCheckpoint]:
    _identity(path)  # a pipe would be waited for for ever
    with open_checkpoint(path) as file:
        yield file


def _remember(cache: OrderedDict[Path, Any], path: Path, entry: tuple[_Identity, Any]) -> None:
    cache[path] = entry
    if len(cache) > _MOST_REMEMBERED:
        cache.popitem(last=False)


def _checkpoint_in(file: OpenCheckpoint, step: int, path: Path) -> Checkpoint:
    file.check_structure()
    header = file.header()
    if header is None:
        raise DamagedCheckpointError(path=path, reason="it was not written by a CheckpointManager")
    checkpoint = Checkpoint.from_header(header, path, file.size_bytes)
    if checkpoint.step != step:
        raise DamagedCheckpointError(
            path=path, reason=f"it is named as step {step} and holds step {checkpoint.step}: somebody renamed it"
        )
    return checkpoint


def _verified_in(
    file: OpenCheckpoint, step: int, path: Path, *, share: int = 0, shares: int = 1, progress: Progress | None = None
) -> Checkpoint:
    """Return the checkpoint in an open file after checking every byte of it, or of its shards one of equal shares."""
    checkpoint = _checkpoint_in(file, step, path)
    if isinstance(file, CheckpointFolder):
        file.verify(share, shares, progress=progress)
    else:
        file.verify(progress=progress)
    return checkpoint


def _passes(path: Path, step: int) -> bool:
    try:
        with _opened(path) as file:
            _verified_in(file, step, path)
    except LoadError:
        return False
    return True


def bests_in(header: Mapping[str, Any] | None, path: PurePath) -> list[Best]:
    """Return which best checkpoints a run keeps, as the header of one says.

    Raises:
        DamagedCheckpointError: The header says something else there.
    """
    try:
        return [Best(*one) for one in (header or {}).get("keep_best", ())]
    except (TypeError, ValueError) as error:
        raise DamagedCheckpointError(path=path, reason=f"its header is not a checkpoint's ({error!r})") from error


def reason_of(error: LoadError) -> str:
    """Return one line that says why a file was passed over."""
    return str(getattr(error, "reason", None) or str(error).partition("\n")[0])


def warn_skipped(path: PurePath, reason: str) -> None:
    """Warn that a file was passed over."""
    warn_caller(f"{path} was passed over: {reason}.", SkippedCheckpointWarning)


def latest(directory: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint | None:
    """Return the newest good checkpoint in a directory, every byte of it verified.

    Needs no objects and no lock, changes nothing, and works while a training run holds the directory.

    Args:
        directory: A directory that a `CheckpointManager` writes, or the URL of its mirror.
        verify: Whether every byte is checked. False: the newest checkpoint that passes the cheap check (name, trailer,
            size, structure) is returned, for a program that has to know the step before its objects exist and then
            restores, which reads the file anyway. That `restore` may pass it over when its bytes are not those that
            were written: compare the step of what it returns.

    Returns:
        The checkpoint, None when the directory is missing, empty or has no good one. Newer files that are not
        good are passed over with a `SkippedCheckpointWarning` each.

    Raises:
        FormatVersionError: The newest file is of a newer format: going back would throw progress away in silence.
        OSError: The directory or a file in it cannot be read.

    Cost:
        Reads the newest file once; without `verify` only its ends.
    """
    checked_bool("verify", verify)
    if is_url(directory):
        from safeckpt.run.remote_catalog import RemoteCatalog  # noqa: PLC0415 - made of what is here

        return RemoteCatalog(str(directory)).find_latest(verify=verify)
    return Catalog(CheckpointDirectory(directory)).find_latest(verify=verify)


def score(checkpoint: Checkpoint, metric: str) -> float | None:
    """Return the value of a metric that was given to `save`, or of the loss as `"loss"`; None when it has none."""
    value: Any = checkpoint.metrics.get(metric)
    if value is None and metric == "loss":
        value = checkpoint.loss
    return value if isinstance(value, float) else None  # a loss may be a dict
