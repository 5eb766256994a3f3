"""Connections between the ranks of a group, along a tree: one to the parent, and one to each child.

The tree is binomial: the parent of a rank is its number without the lowest bit that is set. So a rank has at most
log2(size) children, the tree is that deep, and below a rank are the ranks that follow it. Ranks find each other by what
they write into the store of the process group, under names that no earlier start of the job has used.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from safeckpt.errors import listed

__all__ = ["NotMetError", "children_of", "meet", "parent_of", "ranks_below"]

_SLICE_SECONDS = 1.0  # for which the store, which other threads need as well, is waited for at a time
_DIAL_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_MOST_HELLO_BYTES = 1000


class NotMetError(Exception):
    """Ranks did not come, or could not be reached.

    Attributes:
        missing: Those that did not come.
    """

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


def parent_of(rank: int) -> int:
    """Return the parent of a rank other than 0."""
    return rank & (rank - 1)


def children_of(rank: int, size: int) -> list[int]:
    """Return the children of a rank, ascending."""
    most = rank & -rank or size  # the lowest bit; rank 0 has none
    steps = (1 << bit for bit in range(most.bit_length()))
    return [rank + step for step in steps if step < most and rank + step < size]


def ranks_below(rank: int, size: int) -> range:
    """Return a rank and all whose way to rank 0 leads over it."""
    return range(rank, min(size, rank + (rank & -rank or size)))


def meet(
    store: Any, rank: int, size: int, seconds: float, still_waiting: Callable[[list[int]], None]
) -> dict[int, Connection]:
    """Return the connections of a rank to its parent and its children, by rank.

    Called by all ranks.

    Args:
        store: Where they leave word for each other; nobody else uses its names.
        rank: This rank.
        size: How many there are.
        seconds: How long to wait for the others.
        still_waiting: Called now and then with those that did not come yet.

    Raises:
        NotMetError: Some did not come in time.
    """
    meeting = _Meeting(store, rank, size, seconds, still_waiting)
    links: dict[int, Connection] = {}
    try:
        with _listening(bool(children_of(rank, size))) as listener:
            token = secrets.token_hex(16)
            port = 0 if listener is None else listener.getsockname()[1]
            store.set(str(rank), json.dumps({"port": port, "token": token, "hosts": _hosts(store) if port else []}))
            # Children first: who waits for its parent is then answered at once, if that is there at all.
            for _ in children_of(rank, size):
                assert listener is not None
                child, link = meeting.accept(listener, token, links)
                links[child] = link
        if rank:
            links[parent_of(rank)] = meeting.dial(parent_of(rank))
    except BaseException:
        for link in links.values():
            link.close()
        raise
    _of_this_process.update(links.values())
    return links


class _Meeting:
    """The ranks of a group on their way to each other."""

    def __init__(
        self, store: Any, rank: int, size: int, seconds: float, still_waiting: Callable[[list[int]], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._next_word = time.monotonic() + _SLICE_SECONDS
        self._still_waiting = still_waiting

    def accept(self, listener: socket.socket, token: str, known: dict[int, Connection]) -> tuple[int, Connection]:
        """Return the next child that dials, and its connection."""
        wanted = set(children_of(self._rank, self._size)) - known.keys()
        while True:
            self._look_at_the_clock(f"rank(s) {listed(sorted(wanted))} did not connect to rank {self._rank}")
            listener.settimeout(_SLICE_SECONDS)
            try:
                link = self._as_link(listener.accept()[0])
            except TimeoutError:
                continue
            with contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError):
                if link.poll(_ANSWER_SECONDS):
                    hello = json.loads(link.recv_bytes(_MOST_HELLO_BYTES))
                    if hello["rank"] in wanted and hmac.compare_digest(hello["token"], token):
                        link.send_bytes(b"welcome")
                        return hello["rank"], link
            link.close()

    def dial(self, rank: int) -> Connection:
        """Return a connection to another rank. What is written of it may be of an earlier start: it is read again."""
        tried = "nothing"
        while True:
            self._look_at_the_clock(f"rank {rank} could not be reached at {tried}")
            try:
                self._store.wait([str(rank)], timedelta(seconds=_SLICE_SECONDS))
            except RuntimeError:  # of the store, for a timeout
                continue
            there = json.loads(self._store.get(str(rank)))
            tried = f"port {there['port']} of {', '.join(there['hosts'])}"
            for host in there["hosts"]:
                with contextlib.suppress(OSError, EOFError):
                    link = self._as_link(socket.create_connection((host, there["port"]), _DIAL_SECONDS))
                    link.send_bytes(json.dumps({"rank": self._rank, "token": there["token"]}).encode())
                    if link.poll(_ANSWER_SECONDS) and link.recv_bytes(_MOST_HELLO_BYTES) == b"welcome":
                        return link
                    link.close()
            time.sleep(0.05)

    def _as_link(self, connected: socket.socket) -> Connection:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a message that has begun; the process at the other end may be stopped.
        limit = struct.pack("ll", int(self._seconds) + 1, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        return Connection(connected.detach())

    def _look_at_the_clock(self, otherwise: str) -> None:
        now = time.monotonic()
        if now < min(self._next_word, self._end):
            return
        self._next_word = now + max(1.0, self._seconds / 10)
        is_over = now >= self._end
        if not is_over and self._rank:
            return  # one rank asks for all
        missing = [rank for rank in range(self._size) if not self._store.check([str(rank)])]
        if is_over:
            text = f"they are not there {self._seconds:g} seconds after rank {self._rank}" if missing else otherwise
            raise NotMetError(text, missing)
        self._still_waiting(missing)


@contextlib.contextmanager
def _listening(wanted: bool) -> Iterator[socket.socket | None]:
    if not wanted:
        yield None
        return
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=64, dualstack_ipv6=both) as listener:
        yield listener


def _hosts(store: Any) -> list[str]:
    """Return the addresses under which the other ranks may reach this one, the likeliest first.

    That is the one from which it reaches the store, which they reach as well.
    """
    found = []
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    with contextlib.suppress(OSError):
        ways = socket.getaddrinfo(host, store.port, type=socket.SOCK_DGRAM) if host else []
        for family, kind, protocol, _, address in ways:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: nothing is sent
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [address[0] for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([str(one) for one in found] + ["127.0.0.1"]))


_of_this_process: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close what a forked child has inherited, such as a loader's worker: it would outlive the rank for the others."""
    for link in list(_of_this_process):
        link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
