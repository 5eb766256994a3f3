"""Connections between the ranks of a group, along a tree: one to the parent, and one to each child.

The tree is binomial: the parent of a rank is its number without the lowest bit that is set. So a rank has at most
log2(size) children, the tree is that deep, and below a rank are the ranks that follow it. Ranks find each other by what
they write into the store of the process group, under names that no earlier start of the job has used.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch

from safeckpt.errors import listed
from safeckpt.system.threads import start

__all__ = ["Link", "NotMetError", "children_of", "meet", "parent_of", "ranks_below"]

_SLICE_SECONDS = 1.0  # for which the store, which other threads need as well, is waited for at a time
_DIAL_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_ACCEPT_SECONDS = 0.05
_PROOF_BYTES = 32
_HERE = b"here"
_STUCK = "it takes nothing more of a message"
_LENGTH = struct.Struct("!Q")
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # neither needs a descriptor
_MOST_RECEIVED_BYTES = 1 << 20  # at a time
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")  # kept for documentation: there is nothing


class NotMetError(Exception):
    """Ranks did not come, or could not be reached.

    Attributes:
        missing: Those that did not come.
    """

    def __init__(self, text: str, missing: list[int]) -> None:
        super().__init__(text)
        self.missing = missing


class Link:
    """A connection to a neighbour, over which whole messages go.

    Args:
        connected: The socket.
        seconds: How long to wait for a neighbour that takes nothing more of a message.
    """

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        connected.setblocking(False)
        self._socket = connected
        weakref.finalize(self, connected.close).atexit = False  # one that was lost is closed without a warning
        self._seconds = seconds
        self._taken_in = bytearray()
        self._is_ended = False
        self._error: OSError | None = None
        self._is_stuck = False

    def fileno(self) -> int:
        """Return the descriptor; it can be read when there is something to take in."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it. What was sent still arrives."""
        self._socket.close()

    def send(self, message: bytes, links: Iterable[Link]) -> None:
        """Send a message, and return when the system has all of it.

        Args:
            message: The message.
            links: All connections of this rank. What comes over them is taken in meanwhile: a neighbour may have
                something large to say as well, and would take nothing in before it has said it.

        Raises:
            TimeoutError: The neighbour takes nothing more of it.
            OSError: The connection is closed.
        """
        if self._is_stuck:  # in the middle of another one
            raise TimeoutError(_STUCK)
        left = memoryview(_LENGTH.pack(len(message)) + message)
        left = left[self._send_some(left) :]
        if left:
            self._is_stuck = (
                True  # until all of it is sent, whatever is raised: what came next would be read as its end
            )
            self._send_rest(left, links)
            self._is_stuck = False

    def _send_rest(self, left: memoryview, links: Iterable[Link]) -> None:
        end = time.monotonic() + self._seconds
        while left:
            can_send = self._wait_to_send({self, *links}, end - time.monotonic())
            sent = self._send_some(left) if can_send else 0
            left = left[sent:]
            if sent:
                end = time.monotonic() + self._seconds
            elif time.monotonic() >= end:
                raise TimeoutError(_STUCK)

    def _wait_to_send(self, links: Iterable[Link], seconds: float) -> bool:
        """Wait for something to happen, take in what has come, and return whether something can be sent."""
        with _Selector() as selector:
            for link in links:
                events = 0 if link._is_ended else selectors.EVENT_READ
                if events | (link is self):
                    selector.register(link, events | (selectors.EVENT_WRITE if link is self else 0))
            happened = {key.fileobj: events for key, events in selector.select(max(0.0, seconds))}
        for link in links:
            if happened.get(link, 0) & selectors.EVENT_READ:
                link.take_in()
        return bool(happened.get(self, 0) & selectors.EVENT_WRITE)

    def _send_some(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def take_in(self) -> None:
        """Take in what has come, without waiting."""
        try:
            data = self._socket.recv(_MOST_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._is_ended, self._error = True, error
            return
        self._taken_in += data
        self._is_ended = not data

    @property
    def has_news(self) -> bool:
        """Whether `next_message` has something to return or to raise."""
        return self._is_ended or self._length is not None

    def next_message(self) -> bytes | None:
        """Return the next message that was taken in; None when it has not come yet.

        Raises:
            EOFError: The neighbour has closed the connection, and there is no other message.
            OSError: The connection is broken, and there is no other message.
        """
        length = self._length
        if length is not None:
            end = _LENGTH.size + length
            message = bytes(self._taken_in[_LENGTH.size : end])
            del self._taken_in[:end]
            return message
        if self._error is not None:
            raise self._error
        if self._is_ended:
            raise EOFError
        return None

    @property
    def _length(self) -> int | None:
        """The length of the next message, when all of it was taken in."""
        if len(self._taken_in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._taken_in)
        return length if len(self._taken_in) >= _LENGTH.size + length else None


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
) -> dict[int, Link]:
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
    links: dict[int, Link] = {}
    try:
        with _listening(bool(children_of(rank, size))) as listener:
            token = secrets.token_hex(16)
            port = 0 if listener is None else listener.getsockname()[1]
            store.set(str(rank), json.dumps({"port": port, "token": token, "hosts": _hosts(store) if port else []}))
            # Children first: who waits for its parent is then answered at once, if that is there at all.
            if listener is not None:
                links = meeting.accept(listener, token)
        if rank:
            links[parent_of(rank)] = meeting.dial(parent_of(rank))
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


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

    def accept(self, listener: socket.socket, token: str) -> dict[int, Link]:
        """Return the connections of all children, when they have dialled.

        Each caller is answered in a thread of its own, so that one that says nothing keeps nobody waiting.
        """
        links: dict[int, Link] = {}
        wanted = set(children_of(self._rank, self._size))
        arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        listener.settimeout(_ACCEPT_SECONDS)
        try:
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
                        links[child] = self._as_link(caller)
                    else:
                        caller.close()
        except BaseException:
            for link in links.values():
                link.close()
            raise
        return links

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

    def dial(self, rank: int) -> Link:
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
            return self._as_link(called)

    def _as_link(self, connected: socket.socket) -> Link:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(connected, self._seconds)

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
