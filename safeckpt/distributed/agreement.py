"""Agreements along a tree of ranks: answers are combined on their way up, and one reply goes down.

A thread of each rank does it, so that a rank that computes, writes or waits for a disk still passes on what the others
say, and is known to be alive. An agreement has a number that every rank counts by itself; the tree compares what the
ranks believe it to be about. While one is open, each rank tells its neighbours so every few seconds, and which ranks
below it have not begun their part: so it is known who is missing, and who only takes long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pickle
import queue
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from safeckpt.distributed.failures import Failure, failure_of
from safeckpt.distributed.links import Link, children_of, parent_of, ranks_below
from safeckpt.errors import RanksDisagreeError, listed
from safeckpt.system.threads import start

__all__ = ["Agreements", "Combined", "Lost", "Reply", "Side", "reply_to", "said"]

_log = logging.getLogger("safeckpt")

_BEAT_SECONDS = 5.0
_WORD_SECONDS = 10.0  # after which it is logged that ranks are waited for
_GOODBYE_SECONDS = 5.0
_MOST_NAMED = 20

_SECTION = ""
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # neither needs a descriptor

Combine = Callable[[Any, Any], Any]
Decide = Callable[[Any], Any]
_Key = tuple[int, int]


class Combined(NamedTuple):
    """What several ranks say at the end of a section.

    Attributes:
        rank: The lowest of them.
        same: What has to be the same on all of them, by name, as the lowest has it; the section itself has no name.
        other: The lowest rank that has something else, the name of that, and what it has; None where there is none.
        failure: What is raised on all ranks, if anything.
        value: Their answers, combined; None where one of them failed.
    """

    rank: int
    same: Mapping[str, Any]
    other: tuple[int, str, Any] | None
    failure: Failure | None
    value: Any


class Reply(NamedTuple):
    """What rank 0 says to the others: what failed, or what was decided."""

    failure: Failure | None
    result: Any


class Lost(NamedTuple):
    """Why the ranks cannot agree any more: which are lost, how that was noticed, and whether they are only late."""

    ranks: list[int]
    reason: str
    late: bool


class Side:
    """This rank's side of one agreement.

    Attributes:
        key: The channel, of the loop or of the thread that writes, and the number of the agreement on it.
        decide: Makes the result of all answers, on rank 0: in the thread of the agreements where nobody waits for it.
        combined: What this rank says; None as long as it is busy.
        replies: Where the reply comes; on rank 0, where the caller decides, what all ranks say.
        ended: Set when the reply is there, and was passed on.
    """

    def __init__(self, key: _Key, what: str, combine: Combine, decide: Decide, *, is_waited_for: bool) -> None:
        self.key = key
        self.what = what
        self.combine = combine
        self.decide = decide
        self.is_waited_for = is_waited_for
        self.combined: Combined | None = None
        self.replies: queue.SimpleQueue[Combined | Reply | Lost] = queue.SimpleQueue()
        self.ended = threading.Event()

    @property
    def is_interrupted(self) -> bool:
        """Whether nobody waits for its end any more, asked by the thread that would be the one."""
        return self.combined is None or (self.is_waited_for and not self.ended.is_set())

    def end(self, news: Reply | Lost) -> None:
        """Take the reply."""
        self.ended.set()  # first: who has the reply goes on
        self.replies.put(news)


def said(rank: int, what: str, same: Mapping[str, Any], answer: Any, failure: Failure | None) -> Combined:
    """Return what one rank says; of one that failed only the section, since it may not have come to the rest."""
    return Combined(rank, {_SECTION: what, **({} if failure else same)}, None, failure, None if failure else answer)


def _together(rank: int, one: Combined, other: Combined, combine: Combine) -> Combined:
    """Return what two neighbouring parts of the tree say, the one with the lower ranks first."""
    failures = [failure for failure in (one.failure, other.failure) if failure is not None]
    # Otherwise what only one of them names is None for the other one.
    names = [name for name in one.same if name in other.same] if failures else {**one.same, **other.same}
    name = next((name for name in names if one.same.get(name) != other.same.get(name)), None)
    same = {**other.same, **one.same}
    difference = one.other or other.other
    if name is not None:
        same[name] = one.same.get(name)
        difference = one.other or (other.rank, name, other.same.get(name))
    both = Combined(one.rank, same, difference, None, None)
    if failures:
        return both._replace(failure=min(failures, key=lambda failure: failure.order))
    if difference is not None:
        return both
    try:
        return both._replace(value=combine(one.value, other.value))
    except BaseException as error:  # noqa: BLE001 - raised again when every rank knows
        return both._replace(failure=failure_of(error, rank))


def reply_to(combined: Combined, decide: Decide, rank: int) -> tuple[Reply, BaseException | None]:
    """Return the reply to all ranks, and what was raised here; on rank 0."""
    if combined.other is not None:
        other, name, value = combined.other
        texts = [one if name == _SECTION else f"{name}={one!r}" for one in (combined.same[name], value)]
        error = RanksDisagreeError(rank=other, first=texts[0], other=texts[1])
        return Reply(failure_of(error, None), None), error
    if combined.failure is not None:
        return Reply(combined.failure, None), None
    try:
        return Reply(None, decide(combined.value)), None
    except BaseException as raised:  # noqa: BLE001 - raised again when every rank knows
        return Reply(failure_of(raised, rank), None), raised


class _Open:
    """An agreement that has not ended, as one rank knows it.

    Attributes:
        side: What this rank has to do with it; None as long as it does something else.
        came: What the children say.
        missing: What the children said last of the ranks that have not begun.
        opened: When this rank first heard of it.
        is_sent: Whether everything below has been said.
        next_word: When it is next logged that it takes long.
    """

    def __init__(self) -> None:
        self.side: Side | None = None
        self.came: dict[int, Combined] = {}
        self.missing: dict[int, list[int]] = {}
        self.opened = time.monotonic()
        self.is_sent = False
        self.next_word = self.opened + _WORD_SECONDS


class Agreements:
    """The agreements of one rank with the others, and the thread that makes them.

    Args:
        links: The connections to the neighbours in the tree, by rank.
        rank: This rank.
        size: How many there are.
        timeout_seconds: How long a rank that shows no sign of taking part is waited for.
        on_lost: Called in the thread when there can be no agreement any more.

    Attributes:
        lost: Why there can be no agreement any more.
    """

    def __init__(
        self,
        links: dict[int, Link],
        rank: int,
        size: int,
        timeout_seconds: float,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.lost: Lost | None = None
        self._on_lost = on_lost
        self._links = links
        self._rank = rank
        self._size = size
        self._children = children_of(rank, size)
        self._open: dict[_Key, _Open] = {}
        self._heard = dict.fromkeys(links, time.monotonic())
        self._left: set[int] = set()
        self._next_beat = 0.0
        self._is_closed = False
        self._sends_until = 0.0  # when ranks are lost
        self._when_sent: list[Callable[[], None]] = []
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._begun: dict[int, Side] = {}  # the last one of each channel, in the threads that have something to say
        self._finished: dict[int, int] = {}  # the same, in the thread of the agreements
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="safeckpt-agreements", daemon=True)
        if not start(self._thread):
            raise RuntimeError("no thread could be started for the agreements with the other ranks")
        _of_this_process.add(self)

    # -- in the threads that have something to say -------------------------------------------------------------------

    def begin(self, channel: int, what: str, combine: Combine, decide: Decide, *, is_waited_for: bool) -> Side:
        """Return this rank's side of the next agreement of a channel; the others will know that it is at it."""
        before = self._begun.get(channel)
        if before is not None and before.is_interrupted:  # the others would wait for the rest of it for ever
            self.give_up(f"it was interrupted while {before.what}")
        number = 1 if before is None else before.key[1] + 1
        side = self._begun[channel] = Side((channel, number), what, combine, decide, is_waited_for=is_waited_for)
        self._inbox.put(lambda: self._note(side))
        return side

    def end(self, side: Side) -> None:
        """Say what this rank has to say; the reply comes into `side.replies`."""
        self._call(lambda: self._advance(side.key))
        if self.lost is not None:  # the thread may have ended before it could take this
            side.end(self.lost)

    def reply(self, side: Side, reply: Reply) -> Reply | Lost:
        """Say what was decided, on rank 0, and return when that was sent: this process may end at once."""
        self._call(lambda: self._finish(side.key, reply))
        if self.lost is not None:
            return self.lost
        sent = side.replies.get()
        assert not isinstance(sent, Combined)
        return sent

    def give_up(self, reason: str) -> None:
        """Let the others know that this rank can agree no more."""
        self._call(lambda: self._lose(Lost([self._rank], reason, late=False)))

    def close(self, *, is_failing: bool = False) -> None:
        """Take leave of the others, and return when that was said: this process may end at once.

        What this rank has said is replied to before, since the replies to others go over it.

        Args:
            is_failing: Whether that is not waited for, since this rank ends with an error, and the others may wait for
                it elsewhere.
        """
        if self.lost is not None:
            return
        for side in [] if is_failing else list(self._begun.values()):
            if side.is_interrupted:
                self.give_up(f"it was interrupted while {side.what}")
                return
            side.ended.wait()
        said_so = threading.Event()

        def say() -> None:
            self._is_closed = True
            for rank in self._links:
                self._send(rank, "left", None, None)
            self._when_sent.append(said_so.set)

        self._call(say)
        if self.lost is None:
            said_so.wait(_GOODBYE_SECONDS)

    def abandon(self) -> None:
        """Leave the group to the process that this one was forked from."""
        self.lost = Lost([], "this process was forked from one that is in the group, and is not in it", late=False)
        for link in self._links.values():
            link.close()
        self._wake_in.close()
        self._wake_out.close()

    def _call(self, job: Callable[[], object]) -> None:
        self._inbox.put(job)
        with contextlib.suppress(OSError):  # it has plenty to wake for, or has ended
            self._wake_in.send(b"x")

    # -- in the thread of the agreements -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._goes_on():
                now = time.monotonic()
                self._next_beat = min(self._next_beat, now + self._beat_seconds)
                happened = self._wait(self._next_beat - now)
                self._take_calls()
                for rank, link in list(self._links.items()):
                    if happened.get(link, 0) & selectors.EVENT_READ:
                        self._heard[rank] = now
                        self._receive(rank, link)
                    if happened.get(link, 0) & selectors.EVENT_WRITE:
                        link.send_some()
                self._look_for_lost()
                if time.monotonic() >= self._next_beat:
                    self._beat()
                self._note_sent()
        except BaseException as error:  # noqa: BLE001 - whoever waits must not wait for ever
            _log.error("the thread of the agreements failed", exc_info=error)
            self._lose(Lost([self._rank], f"its agreements ended ({type(error).__name__}: {error})", late=False))
        finally:
            if self.lost is None:
                self.lost = Lost([], "all ranks have closed their managers", late=False)
            self._take_calls()
            self._end_all(self.lost)
            for link in self._links.values():
                link.close()
            self._wake_out.close()
            self._wake_in.close()

    def _goes_on(self) -> bool:
        if self.lost is None:
            return bool(self._links) or not self._is_closed
        return self._is_sending() and time.monotonic() < self._sends_until  # what the others are told of it

    def _wait(self, seconds: float) -> dict[Any, int]:
        """Wait for something to happen, and return what, by connection."""
        with _Selector() as selector:
            selector.register(self._wake_out, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.is_sending else 0))
            return {key.fileobj: events for key, events in selector.select(max(0.0, seconds))}

    def _is_sending(self) -> bool:
        return any(link.is_sending for link in self._links.values())

    def _note_sent(self) -> None:
        """Do what waits until everything is sent; part from neighbours where both have taken leave."""
        if not self._is_sending():
            self._tell_sent()
        for rank in [one for one, link in self._links.items() if one in self._left and not link.is_sending]:
            if self._is_closed:
                self._links.pop(rank).close()

    def _tell_sent(self) -> None:
        while self._when_sent:
            self._when_sent.pop(0)()

    def _end_all(self, lost: Lost) -> None:
        self._tell_sent()
        for one in self._open.values():
            if one.side is not None:
                one.side.end(lost)

    def _take_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        while not self._inbox.empty():
            self._inbox.get()()

    def _note(self, side: Side) -> _Open:
        one = self._open.setdefault(side.key, _Open())
        one.side = side
        return one

    def _receive(self, rank: int, link: Link) -> None:
        """Take what a neighbour has sent."""
        try:
            for data in link.take_in():
                if self.lost is None:
                    self._take(rank, *pickle.loads(data))  # from a process of this very job
        except (EOFError, OSError) as error:
            self._links.pop(rank).close()
            if rank not in self._left:
                self._lose(Lost([rank], str(error) or "its connection was closed", late=False))

    def _take(self, rank: int, kind: str, key: _Key, message: Any) -> None:
        if kind == "left":
            self._left.add(rank)
        elif kind == "lost":
            self._lose(message)
        elif kind == "reply":
            self._finish(key, message)
        elif key[1] > self._finished.get(key[0], 0):  # else a sign of life that has crossed the reply
            one = self._open.setdefault(key, _Open())
            if kind == "said":
                one.came[rank] = message
                self._advance(key)
            elif message is not None:
                one.missing[rank] = message

    def _advance(self, key: _Key) -> None:
        """Say what this rank and all below it say, when that is complete."""
        one = self._open.get(key)
        if one is None or one.is_sent or one.side is None or one.side.combined is None:
            return
        if any(child not in one.came for child in self._children):
            return
        combined = one.side.combined
        for child in self._children:
            combined = _together(self._rank, combined, one.came[child], one.side.combine)
        one.is_sent = True
        if self._rank:
            self._send(parent_of(self._rank), "said", key, combined)
        elif one.side.is_waited_for:
            one.side.replies.put(combined)
        else:
            self._finish(key, reply_to(combined, one.side.decide, self._rank)[0])

    def _finish(self, key: _Key, reply: Reply) -> None:
        """Pass the reply on, and end the agreement."""
        for child in self._children:
            self._send(child, "reply", key, reply)
        self._finished[key[0]] = key[1]
        one = self._open.pop(key, None)
        if one is not None and one.side is not None:
            self._when_sent.append(functools.partial(one.side.end, reply))

    def _send(self, rank: int, kind: str, key: _Key | None, message: Any) -> None:
        if rank in self._links and (self.lost is None or kind == "lost"):
            self._links[rank].send(pickle.dumps((kind, key, message)))

    def _lose(self, lost: Lost) -> None:
        """End all agreements, once, and let the others know why."""
        if self.lost is not None:
            return
        self.lost = lost
        self._sends_until = time.monotonic() + _GOODBYE_SECONDS
        for rank in self._links:
            self._send(rank, "lost", None, lost)
        self._end_all(lost)
        self._on_lost()

    # -- who is missing ----------------------------------------------------------------------------------------------

    @property
    def _beat_seconds(self) -> float:
        return min(_BEAT_SECONDS, self.timeout_seconds / 4)

    def _beat(self) -> None:
        """Tell the neighbours what is waited for."""
        self._next_beat = time.monotonic() + self._beat_seconds
        for key, one in list(self._open.items()):
            for child in self._children:
                self._send(child, "alive", key, None)
            if self._rank:
                self._send(parent_of(self._rank), "alive", key, self._missing(one))

    def _missing(self, one: _Open) -> list[int]:
        """Return ranks from this one down that have not begun their part: not more than are named."""
        found = [] if one.side is not None else [self._rank]
        for child in self._children:
            if child not in one.came:
                everyone = [child] if self._is_silent(child, one) else ranks_below(child, self._size)
                found += one.missing.get(child, everyone)[:_MOST_NAMED]
        return found[:_MOST_NAMED]

    def _is_silent(self, rank: int, one: _Open) -> bool:
        """Return whether a neighbour that knows of an agreement gives no sign of life."""
        return time.monotonic() - max(self._heard[rank], one.opened) > 3 * self._beat_seconds

    def _look_for_lost(self) -> None:
        """Find out whether an agreement can still come about; rank 0 knows most, and decides."""
        now = time.monotonic()
        for rank, link in self._links.items():
            if link.is_sending and now - link.sent_at > self.timeout_seconds:
                self._lose(Lost([rank], "it takes nothing more of a message", late=True))
        for one in self._open.values():
            if self.lost is not None:
                return
            awaited = {child for child in self._children if child not in one.came}
            if self._rank:
                awaited.add(parent_of(self._rank))
            # A parent that has taken leave still passes on what it gets.
            gone = sorted(
                rank for rank in awaited if rank not in self._links or (rank in self._left and rank > self._rank)
            )
            if gone:
                self._lose(Lost(gone, "it has closed its manager, or ended", late=False))
            seconds = now - one.opened
            if not self._rank:
                self._look_for_missing(one, seconds)
            elif seconds > self.timeout_seconds + 3 * self._beat_seconds:
                silent = [
                    rank for rank in sorted(awaited)
                    if now - max(self._heard[rank], one.opened) > self.timeout_seconds + 2 * self._beat_seconds
                ]  # fmt: skip
                if silent:
                    self._lose(Lost(silent, "no sign of life", late=True))

    def _look_for_missing(self, one: _Open, seconds: float) -> None:
        missing = self._missing(one)
        if missing and seconds > self.timeout_seconds:
            self._lose(Lost(missing, "it has not come to this call", late=True))
        elif time.monotonic() >= one.next_word:
            one.next_word += max(_WORD_SECONDS, self.timeout_seconds / 2)
            what = one.side.what if one.side is not None else "a call of the manager"
            if missing:
                _log.warning(
                    "%s: waiting for rank(s) %s for %.0f seconds. Every rank has to make this call: not under "
                    "`if rank == 0:`, as one does with torch.save",
                    what, listed(missing), seconds,
                )  # fmt: skip
            else:
                _log.info("%s takes %.0f seconds; every rank is at work", what, seconds)


_of_this_process: weakref.WeakSet[Agreements] = weakref.WeakSet()


def _close_at_exit() -> None:
    """Take leave for scripts that end without closing their managers, with an error or without."""
    for one in list(_of_this_process):
        one.close(is_failing=hasattr(sys, "last_value"))


def _abandon_in_child() -> None:
    """Close what a forked child has inherited, such as a loader's worker: it would outlive the rank for the others."""
    for one in list(_of_this_process):
        one.abandon()
    _of_this_process.clear()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
