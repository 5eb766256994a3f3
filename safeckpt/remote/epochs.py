"""Who may write below a prefix, and which of the checkpoints there are the past of whom.

A writer *claims* the next epoch by creating an object that was absent: only one can. What it uploads has keys of its
epoch, which nobody else writes. After every upload it looks for a newer claim, and ends when there is one. No lease,
heart-beat or clock is involved, and no object is overwritten, renamed or compared.

Where a writer goes on is in its *start*: which checkpoints of earlier epochs are its past, up to which step. The
checkpoints that count are those of the newest epoch and its past. So whatever a writer uploads after it has lost the
prefix is in no listing, whole as it may be; and what was left behind by going back to an older step is in none either.

The order matters, and `tests/remote/test_protocol.py` tries every interleaving of two writers:

1. claim; 2. list what is there; 3. start; 4. upload, look for a newer claim, and only then count it as durable or
delete anything. Because a claim comes before the list, what the one before has counted as durable is in that list; an
epoch without a start hides nothing, so that a writer that dies between the two has changed nothing.

One thing the one before may still do is a deletion that it began before the claim. It deletes nothing newer than what
it has counted as durable. An epoch whose past it took away, and that has nothing of its own yet, therefore does not
count, and the one before it does.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from safeckpt.errors import MirrorTakenError, MirrorUnsafeError
from safeckpt.file import INDEX
from safeckpt.remote import keys
from safeckpt.remote.client import Client

__all__ = ["NOTHING", "Claim", "Epochs", "RemoteCheckpoint", "View"]

NOTHING = -1  # the step of a start that has no past

_MOST_BYTES = 1 << 20  # of a claim or a start
_PROBE = b'{"what": "shows whether this store honours create only if absent"}\n'


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a store.

    Attributes:
        epoch: Whose it is.
        step: Its step.
        size_bytes: Size of all its objects.
        objects: Key to size; of a sharded one, the index is the last.
    """

    epoch: int
    step: int
    size_bytes: int
    objects: Mapping[str, int] = field(repr=False)

    @property
    def is_folder(self) -> bool:
        """Whether it is sharded."""
        return not self.key.endswith(".pt") or len(self.key.split("/")) == 3

    @property
    def key(self) -> str:
        """The key of the object that makes it a checkpoint: the file, or the index."""
        return list(self.objects)[-1]

    @property
    def name(self) -> str:
        """Its key; of a sharded one, what the keys of its files begin with."""
        return self.key.removesuffix(f"/{INDEX}")


class Claim(NamedTuple):
    """Who has claimed an epoch; empty where its object cannot be read."""

    epoch: int
    token: str = ""
    nonce: str = ""
    host: str | None = None
    pid: int | None = None
    since: str | None = None


class _Start(NamedTuple):
    base: int
    past: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class View:
    """What was below a prefix at one moment.

    Attributes:
        newest: The newest claim; None where there is none.
        head: The epoch that counts; None where none does.
        checkpoints: Step to checkpoint: those that count, ascending.
        hidden: Those that do not count.
        histories: Epochs that have a history, by its name.
        loose: Keys of files of sharded checkpoints without an index, by epoch and step.
        lost: Epochs whose start is gone though they have checkpoints.
    """

    newest: Claim | None
    head: int | None
    checkpoints: Mapping[int, RemoteCheckpoint]
    hidden: tuple[RemoteCheckpoint, ...]
    histories: Mapping[str, list[int]]
    loose: Mapping[tuple[int, int], list[str]]
    lost: tuple[int, ...]

    @property
    def last(self) -> int:
        """The newest step that counts; NOTHING where there is none."""
        return max(self.checkpoints, default=NOTHING)


class Epochs:
    """The epochs below a prefix.

    Args:
        client: The store.
        lock: Whether a claim has to be conditional.

    Attributes:
        client: The store.
        number: The epoch that this object has claimed; None before.
    """

    def __init__(self, client: Client, *, lock: bool = True) -> None:
        self.client = client
        self.number: int | None = None
        self._lock = lock
        self._nonce = secrets.token_hex(8)
        self._starts: dict[int, _Start | None] = {}

    # -- looking -----------------------------------------------------------------------------------------------------

    def look(self) -> View:
        """Return what is there.

        Raises:
            MirrorUnreachableError: The store did not answer.
        """
        listing = self.client.listing()
        epochs: set[int] = set()
        claims: list[int] = []
        started: set[int] = set()
        histories: dict[str, list[int]] = {}
        parts: dict[tuple[int, int], dict[str, int]] = {}
        numbers: set[int] = set()  # also of what is not ours: nobody's number is used again
        for key, size in listing:
            numbers.add(keys.parse_top(key.partition("/")[0]) or 0)
            found = keys.parse(key)
            if isinstance(found, keys.Claimed):
                claims.append(found.epoch)
            elif isinstance(found, keys.Started):
                started.add(found.epoch)
            elif isinstance(found, keys.History):
                histories.setdefault(found.name, []).append(found.epoch)
            elif isinstance(found, keys.Part):
                parts.setdefault((found.epoch, found.step), {})[key] = size
            if found is not None:
                epochs.add(found.epoch)
        files, loose = _checkpoints_in(parts)
        head, checkpoints, lost = self._head(epochs, started, files)
        chosen = {(one.epoch, one.step) for one in checkpoints.values()}
        newest = max(numbers, default=0) or None
        return View(
            newest=None if newest is None else self._claim_of(newest) if newest in claims else Claim(newest),
            head=head,
            checkpoints=checkpoints,
            hidden=tuple(one for at, one in sorted(files.items()) if at not in chosen),
            histories=histories,
            loose=loose,
            lost=lost,
        )

    def _head(
        self, epochs: set[int], started: set[int], files: Mapping[tuple[int, int], RemoteCheckpoint]
    ) -> tuple[int | None, dict[int, RemoteCheckpoint], tuple[int, ...]]:
        """Return the newest epoch whose past is there, and its checkpoints."""
        lost = []
        for number in sorted(epochs, reverse=True):
            own = {step: one for (epoch, step), one in files.items() if epoch == number}
            start = self._start_of(number) if number in started else None
            if start is None:
                if own:
                    lost.append(number)
                    return number, dict(sorted(own.items())), tuple(lost)
                continue  # claimed, and nothing more
            found = _lineage(number, start, files)
            if _is_there(found, start):
                return number, found, tuple(lost)
        return None, {}, tuple(lost)

    def _claim_of(self, number: int) -> Claim:
        record = self._record(keys.claim_key(number))
        host, pid, since = record.get("host"), record.get("pid"), record.get("since")
        return Claim(
            number,
            str(record.get("token", "")),
            str(record.get("nonce", "")),
            host if isinstance(host, str) else None,
            pid if isinstance(pid, int) else None,
            since if isinstance(since, str) else None,
        )

    def _start_of(self, number: int) -> _Start | None:
        if number not in self._starts:
            record = self._record(keys.start_key(number))
            try:
                start = _Start(int(record["base"]), tuple((int(epoch), int(limit)) for epoch, limit in record["past"]))
            except (KeyError, TypeError, ValueError):
                return None
            if not all(0 < epoch < number for epoch, _ in start.past):
                return None
            self._starts[number] = start  # it never changes
        return self._starts[number]

    def _record(self, key: str) -> dict[str, Any]:
        """Return a record of ours; empty where it is none."""
        try:
            record = json.loads(bytes(self.client.read(key, 0, _MOST_BYTES)))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    # -- writing -----------------------------------------------------------------------------------------------------

    def take(
        self,
        token: str,
        *,
        agree: Callable[[View], int | None],
        own_past: Callable[[View], Mapping[int, RemoteCheckpoint]],
    ) -> int:
        """Claim the next epoch, say where it goes on, and return the newest step of its past.

        Args:
            token: Of the directory that is mirrored.
            agree: Returns the newest epoch, where the caller may follow it; raises where not.
            own_past: Returns the checkpoints that are the caller's past; raises where others would be left behind.

        Raises:
            MirrorTakenError: Somebody else was faster.
            MirrorUnsafeError: The store does not keep two writers apart.
            MirrorUnreachableError: It did not answer. Nothing is hidden by what was done; it can be called again.
        """
        view = self.look()
        own_past(view)  # before anybody is told to make way
        seen = agree(view)
        self.probe()
        self.claim(token, seen)
        past = own_past(self._second_look(view))
        base = max(past, default=NOTHING)
        self.begin(base, past)
        return base

    def _second_look(self, before: View) -> View:
        """Return what is there after the claim: in it is all that the writer before has counted as durable."""
        return self.look()

    def probe(self) -> None:
        """Try whether the store refuses to create what is there.

        Raises:
            MirrorUnsafeError: It does not.
        """
        if self._lock and self.client.is_conditional:
            self.client.create(keys.PROBE, _PROBE)
            if self.client.create(keys.PROBE, _PROBE):
                raise MirrorUnsafeError(url=self.client.url)

    def claim(self, token: str, seen: int | None) -> int:
        """Claim the next epoch, unless somebody has since `seen`.

        Args:
            token: Of the directory that is mirrored.
            seen: The newest epoch that the caller knows of; None for none.

        Raises:
            MirrorTakenError: There is a newer one, of somebody else.
            MirrorUnreachableError: The store did not answer. Asked again, a claim that came through is found.
        """
        newest = self._newest_number()
        if newest is not None and newest != seen:
            claim = self._claim_of(newest)
            if claim.nonce == self._nonce:  # created by a request whose answer was lost
                self.number = newest
                return newest
            raise self.taken(claim)
        number = (newest or 0) + 1
        record = {
            "token": token,
            "nonce": self._nonce,
            "host": platform.node(),
            "pid": os.getpid(),
            "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
        data = json.dumps(record).encode()
        key = keys.claim_key(number)
        if not self._creates(key, data):  # by somebody else, or by a first try of ours whose answer was lost
            claim = self._claim_of(number)
            if claim.nonce != self._nonce:
                raise self.taken(claim)
        self.number = number
        return number

    def _creates(self, key: str, data: bytes) -> bool:
        if self._lock and self.client.is_conditional:
            return self.client.create(key, data)
        self.client.put(key, data)
        return True

    def begin(self, base: int, past: Mapping[int, RemoteCheckpoint]) -> None:
        """Say where the claimed epoch goes on: from here on it is what counts.

        Args:
            base: The newest step of its past, which has to be there; `NOTHING` where it has no past.
            past: The checkpoints that are its past, by step.
        """
        assert self.number is not None
        limits: dict[int, int] = {}
        for step, one in past.items():
            if one.epoch != self.number:
                limits[one.epoch] = max(step, limits.get(one.epoch, NOTHING))
        ordered = sorted(limits.items(), reverse=True)
        self.client.put(keys.start_key(self.number), json.dumps({"base": base, "past": ordered}).encode())

    def check(self) -> None:
        """Look whether the claimed epoch is the newest.

        Raises:
            MirrorTakenError: It is not.
        """
        newest = self._newest_number()
        if newest != self.number and newest is not None:
            raise self.taken(self._claim_of(newest))

    def _newest_number(self) -> int | None:
        return max((number for name in self.client.top() if (number := keys.parse_top(name))), default=None)

    def taken(self, claim: Claim) -> MirrorTakenError:
        """Return the error that says who has the prefix."""
        return MirrorTakenError(
            url=self.client.url,
            epoch=claim.epoch,
            host=claim.host,
            pid=claim.pid,
            since=claim.since,
            lost=self.number is not None,
        )


def _checkpoints_in(
    parts: Mapping[tuple[int, int], dict[str, int]],
) -> tuple[dict[tuple[int, int], RemoteCheckpoint], dict[tuple[int, int], list[str]]]:
    """Return the checkpoints by epoch and step, and the keys that belong to none yet."""
    files: dict[tuple[int, int], RemoteCheckpoint] = {}
    loose: dict[tuple[int, int], list[str]] = {}
    for at, found in parts.items():
        index = next((key for key in found if _makes_whole(key)), None)
        if index is None:
            loose[at] = sorted(found)
            continue
        # Beside one file, what else is there of the step is a sharded one of nobody.
        objects = {index: found[index]} if index.count("/") == 1 else found
        ordered = dict(sorted(objects.items(), key=lambda one: (one[0] == index, one[0])))
        files[at] = RemoteCheckpoint(*at, sum(ordered.values()), ordered)
    return files, loose


def _makes_whole(key: str) -> bool:
    return key.count("/") == 1 or key.endswith(f"/{INDEX}")


def _is_there(found: Mapping[int, RemoteCheckpoint], start: _Start) -> bool:
    """Return whether an epoch has a checkpoint of its own or the newest of its past; else it does not count."""
    return bool(found) and max(found) >= start.base


def _lineage(
    number: int, start: _Start, files: Mapping[tuple[int, int], RemoteCheckpoint]
) -> dict[int, RemoteCheckpoint]:
    """Return the checkpoints of an epoch and of its past, ascending; of two of one step, that of the later epoch."""
    limits = dict(start.past)
    found: dict[int, RemoteCheckpoint] = {}
    for (epoch, step), one in sorted(files.items()):  # a later epoch replaces
        if epoch == number or step <= limits.get(epoch, NOTHING):
            found[step] = one
    return dict(sorted(found.items()))
