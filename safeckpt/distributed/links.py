"""Connections between the ranks of a group, along a tree: one to the parent, and one to each child.

The tree is binomial: the parent of a rank is its number without the lowest bit that is set. So a rank has at most
log2(size) children, the tree is that deep, and below a rank are the ranks that follow it. Ranks find each other by what
they write into the store of the process group, under names that no earlier start of the job has used.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from safeckpt.errors import RankLostError, listed
from safeckpt.system.threads import start

__all__ = ["Link", "children_of", "meet", "parent_of", "ranks_below"]

_log = logging.getLogger("safeckpt")

_SLICE_SECONDS = 1.0  # for which the store, which other threads need as well, is waited for at a time
_DIAL_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_ACCEPT_SECONDS = 0.05
_PROOF_BYTES = 32
_HERE = b"here"
_LENGTH = struct.Struct("!Q")
_MOST_RECEIVED_BYTES = 1 << 20  # at a time
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")  # kept for documentation: there is nothing


class Link:
    """A connection to a neighbour, over which whole messages go. Nothing here waits.

    Args:
        connected: The socket.

    Attributes:
        sent_at: When the neighbour last took something of a message, or was first asked to.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        weakref.finalize(self, connected.close).atexit = False  # one that was lost is closed without a warning
        self._taken_in = bytearray()
        self._to_send = bytearray()
        self.sent_at = 0.0

    def fileno(self) -> int:
        """Return the descriptor; it can be read when there is something to take in."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it. What was sent still arrives."""
        self._socket.close()

    @property
    def is_sending(self) -> bool:
        """Whether the system has not taken all of what there is to send."""
        return bool(self._to_send)

    def send(self, message: bytes) -> None:
        """Send a message, after those before it."""
        if not self._to_send:
            self.sent_at = time.monotonic()
        self._to_send += _LENGTH.pack(len(message)) + message
        self.send_some()

    def send_some(self) -> None:
        """Send what the system takes now."""
        try:
            sent = self._socket.send(self._to_send)
        except BlockingIOError:
            return
        except OSError:  # it is gone; what it has said before, such as a reply or that it leaves, is still to be read
            sent = len(self._to_send)
        self.sent_at = time.monotonic()
        del self._to_send[:sent]

    def take_in(self) -> Iterator[bytes]:
        """Take in what has come, and yield the messages that are complete.

        Raises:
            EOFError: The neighbour has closed the connection, and there is no other message.
            OSError: The connection is broken, and there is no other message.
        """
        try:
            data = self._socket.recv(_MOST_RECEIVED_BYTES)
        except BlockingIOError:
            return
        self._taken_in += data
        while len(self._taken_in) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._taken_in)[0]
            if len(self._taken_in) < end:
                break
            message = bytes(self._taken_in[_LENGTH.size : end])
            del self._taken_in[:end]
            yield message
        if not data:
            raise EOFError


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


def meet(store: Any, rank: int, size: int, seconds: float) -> dict[int, Link]:
    """Return the connections of a rank to its parent and its children, by rank. Called by all ranks.

    Args:
        store: Where they leave word for each other; nobody else uses its names.
        rank: This rank.
        size: How many there are.
        seconds: How long to wait for the others. Rank 0 logs meanwhile who is not there.

    Raises:
        RankLostError: Some did not come in time, or the store is gone.
    """
    links: dict[int, Link] = {}
    try:
        _Meeting(store, rank, size, seconds).connect(links)
    except BaseException as error:
        for link in links.values():
            link.close()
        if isinstance(error, RuntimeError) and not isinstance(error, RankLostError):
            raise _not_met([], str(error).partition("\n")[0], seconds) from error
        raise
    return links


def _not_met(missing: list[int], reason: str, seconds: float) -> RankLostError:
    what = "the ranks were meeting for the first time"
    return RankLostError(what=what, lost=missing, timeout_seconds=seconds, reason=reason, late=bool(missing))


def _proof(token: str, part: str, child: int) -> bytes:
    """Return what one end of a connection says to the other, which knows the token as well, and nobody else."""
    return hmac.digest(token.encode(), f"{part} {child}".encode(), "sha256")


def _read(connected: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connected.recv(count - len(found))
        if not more:
            raise ConnectionResetError("the other end has closed the connection")
        found += more
    return found


class _Meeting:
    """The ranks of a group on their way to each other."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._next_word = time.monotonic() + _SLICE_SECONDS

    def connect(self, links: dict[int, Link]) -> None:
        """Add the connections to the neighbours."""
        with _listening(bool(children_of(self._rank, self._size))) as listener:
            token = secrets.token_hex(16)
            port = 0 if listener is None else listener.getsockname()[1]
            hosts = _hosts(self._store) if port else []
            self._store.set(str(self._rank), json.dumps({"port": port, "token": token, "hosts": hosts}))
            # Children first: who waits for its parent is then answered at once, if that is there at all.
            if listener is not None:
                self._accept(listener, token, links)
        if self._rank:
            parent = parent_of(self._rank)
            links[parent] = self._dial(parent)

    def _accept(self, listener: socket.socket, token: str, links: dict[int, Link]) -> None:
        """Add the connections of all children, when they have dialled.

        Each caller is answered in a thread of its own, so that one that says nothing keeps nobody waiting.
        """
        wanted = set(children_of(self._rank, self._size))
        arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        listener.settimeout(_ACCEPT_SECONDS)
        while wanted:
            self._look_at_the_clock(f"rank(s) {listed(sorted(wanted))} did not connect to rank {self._rank}")
            with contextlib.suppress(TimeoutError, ConnectionError):
                caller = listener.accept()[0]
                thread = threading.Thread(target=self._answer, args=(caller, token, arrived), daemon=True)
                if not start(thread):
                    caller.close()
            while not arrived.empty():
                child, caller = arrived.get()
                if child in wanted:
                    wanted.remove(child)
                    links[child] = _as_link(caller)
                else:
                    caller.close()

    def _answer(self, caller: socket.socket, token: str, arrived: queue.SimpleQueue[tuple[int, socket.socket]]) -> None:
        """Find out which child calls. Nothing is read of a caller but a proof that it knows the token."""
        proofs = {_proof(token, "child", child): child for child in children_of(self._rank, self._size)}
        with contextlib.suppress(OSError):
            caller.settimeout(_ANSWER_SECONDS)
            said = _read(caller, _PROOF_BYTES)
            for proof, child in proofs.items():
                if hmac.compare_digest(said, proof):
                    caller.settimeout(self._seconds)
                    caller.sendall(_proof(token, "parent", child))
                    if _read(caller, len(_HERE)) == _HERE:  # it may have given up, and call again
                        arrived.put((child, caller))
                        return
        caller.close()

    def _dial(self, rank: int) -> Link:
        """Return a connection to another rank. What is written of it may be of an earlier start: it is read again."""
        tried = "nothing"
        while True:
            self._look_at_the_clock(f"rank {rank} could not be reached at {tried}")
            try:
                self._store.wait([str(rank)], timedelta(seconds=_SLICE_SECONDS))
            except torch.distributed.DistStoreError:  # it is not there yet; a store that is gone raises another error
                continue
            there = json.loads(self._store.get(str(rank)))
            hosts = list(dict.fromkeys([*there["hosts"], *_host_of(self._store)]))
            tried = f"port {there['port']} of {', '.join(hosts)}"
            for host in hosts:
                with contextlib.suppress(OSError):
                    link = self._call(host, there["port"], there["token"])
                    if link is not None:
                        return link
            time.sleep(0.05)

    def _call(self, host: str, port: int, token: str) -> Link | None:
        """Return a connection to a parent; None where something else answers."""
        with contextlib.ExitStack() as closing:
            called = closing.enter_context(socket.create_connection((host, port), _DIAL_SECONDS))
            called.settimeout(_ANSWER_SECONDS)
            called.sendall(_proof(token, "child", self._rank))
            if not hmac.compare_digest(_read(called, _PROOF_BYTES), _proof(token, "parent", self._rank)):
                return None
            called.sendall(_HERE)
            closing.pop_all()
            return _as_link(called)

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
            raise _not_met(missing, text, self._seconds)
        if missing:
            _log.warning(
                "waiting for rank(s) %s, which have not called their managers yet. Every rank has to make one and call "
                "it: not under `if rank == 0:`, as one does with torch.save",
                listed(missing),
            )


def _as_link(connected: socket.socket) -> Link:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(connected)


@contextlib.contextmanager
def _listening(wanted: bool) -> Iterator[socket.socket | None]:
    if not wanted:
        yield None
        return
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    except (OSError, ValueError):  # there is no IPv6 here, or not in the same socket
        listener = socket.create_server(("", 0), backlog=64)
    with listener:
        yield listener


def _host_of(store: Any) -> list[str]:
    """Return where the store is, if that is a host: another name of the rank that runs there, usually the first."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return [host] if host else []


def _hosts(store: Any) -> list[str]:
    """Return the addresses under which the other ranks may reach this one, the likeliest first.

    That is the one from which it reaches the store, which they reach as well, and then the one from which it reaches
    the world; a host may not be able to resolve its own name, or only to an address of its own. All of them are tried.
    """
    found = []
    for place in (*_host_of(store), *_FAR_AWAY):
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # of a datagram socket: nothing is sent
                    found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [address[0] for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([str(one) for one in found] + ["127.0.0.1", "::1"]))
