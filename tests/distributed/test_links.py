"""Ranks that meet, take leave and fork: what is at the two ends of a connection, in one process or two."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from safeckpt.distributed import links
from safeckpt.distributed.agreement import Agreements, Combined, Reply, Side, said
from safeckpt.distributed.group import lowest
from safeckpt.distributed.links import Link, meet
from safeckpt.distributed.rank_group import RankGroup
from tests.distributed import groups
from tests.distributed.scenarios import outcome

SECONDS = 60.0


def _begun(agreements: Agreements, *, waits: bool = True) -> Side:
    """Begin an agreement and say something in it."""
    part = agreements.begin(0, "counting", lowest, lambda found: found, is_waited_for=waits)
    part.combined = said(agreements._rank, "counting", {}, 1, None)
    agreements.end(part)
    return part


def _pair() -> tuple[Link, Link]:
    """Return the two ends of a connection."""
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


_heard_before: weakref.WeakKeyDictionary[Link, list[bytes]] = weakref.WeakKeyDictionary()


def _heard(link: Link) -> bytes:
    """Return the next message."""
    messages = _heard_before.setdefault(link, [])
    while not messages:
        assert wait([link.fileno()], SECONDS)
        messages += link.take_in()
    return messages.pop(0)


def _message(link: Link) -> Any:
    """Return the next message that is no sign of life."""
    while True:
        found = pickle.loads(_heard(link))
        if found[0] != "alive":
            return found


def test_reply_of_a_rank_that_has_ended_since_is_read() -> None:
    """What is sent to it meanwhile fails; that it has replied and taken leave before counts all the same."""
    ours, theirs = _pair()
    agreements = Agreements({0: ours}, 1, 2, SECONDS)
    part = _begun(agreements)
    assert _message(theirs)[0] == "said"
    is_held, may_go_on = threading.Event(), threading.Event()

    def talk() -> None:
        is_held.set()
        may_go_on.wait(SECONDS)
        for _ in range(3):
            agreements._send(0, "alive", (0, 1), [])

    agreements._call(talk)
    assert is_held.wait(SECONDS)
    for message in (("reply", (0, 1), Reply(None, 7)), ("left", None, None)):
        theirs.send(pickle.dumps(message))
    theirs.close()
    may_go_on.set()
    assert part.replies.get(timeout=SECONDS) == Reply(None, 7)
    agreements.close()
    agreements._thread.join(SECONDS)
    assert agreements.lost is not None
    assert agreements.lost.ranks == []


def test_rank_takes_leave_when_what_it_has_said_is_replied_to() -> None:
    """It may end a long time before the others come to the same place; they agree with it all the same."""
    ours, theirs = _pair()
    agreements = Agreements({1: ours}, 0, 2, SECONDS)
    _begun(agreements, waits=False)
    closing = threading.Thread(target=agreements.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    theirs.send(pickle.dumps(("said", (0, 1), said(1, "counting", {}, 1, None))))
    assert _message(theirs) == ("reply", (0, 1), Reply(None, 1))
    assert _message(theirs) == ("left", None, None)
    closing.join(SECONDS)
    assert not closing.is_alive()


def test_rank_that_fails_takes_leave_at_once() -> None:
    """The others may be waiting for it in a collective of the training, and never come to agree."""
    ours, theirs = _pair()
    agreements = Agreements({1: ours}, 0, 2, SECONDS)
    _begun(agreements, waits=False)
    agreements.close(is_failing=True)
    assert _message(theirs) == ("left", None, None)
    theirs.close()


def test_rank_that_was_interrupted_within_an_agreement_is_lost_at_the_next() -> None:
    """It can never say what it had to say there, and nobody waits for that."""
    ours, theirs = _pair()
    agreements = Agreements({1: ours}, 0, 2, SECONDS)
    agreements.begin(0, "counting", lowest, lambda found: found, is_waited_for=True)
    _begun(agreements)
    kind, _, lost = _message(theirs)
    assert (kind, lost.ranks, lost.reason) == ("lost", [0], "it was interrupted while counting")
    agreements._thread.join(SECONDS)


def _tree(size: int, seconds: float) -> list[Agreements]:
    """Return the agreements of so many ranks, connected in this process."""
    links: list[dict[int, Any]] = [{} for _ in range(size)]
    for rank in range(1, size):
        links[rank][0], links[0][rank] = _pair()
    return [Agreements(one, rank, size, seconds) for rank, one in enumerate(links)]


@pytest.mark.parametrize("size", [2, 3])
def test_large_messages_cross_each_other(size: int) -> None:
    """Every rank has something large to say to a neighbour that is saying something large: all of it arrives."""
    tree = _tree(size, 5.0)
    everyone = list(tree)
    back = {one: one.begin(1, "writing", lowest, lambda found: found, is_waited_for=True) for one in everyone}
    for one, part in back.items():
        part.combined = said(one._rank, "writing", {}, one._rank, None)
        one.end(part)
    answers = back[everyone[0]].replies.get(timeout=SECONDS)  # of all: rank 0 decides
    assert isinstance(answers, Combined)
    held, go = threading.Semaphore(0), threading.Event()
    for one in everyone:  # all begin to talk at one moment
        one._call(lambda: held.release() or go.wait(SECONDS))  # type: ignore[func-returns-value]
    for _ in everyone:
        assert held.acquire(timeout=SECONDS)
    large = os.urandom(16 << 20)
    front = {one: one.begin(0, "counting", lowest, lambda found: found, is_waited_for=False) for one in everyone}
    replying = threading.Thread(target=everyone[0].reply, args=(back[everyone[0]], Reply(None, large)))
    replying.start()
    while everyone[0]._inbox.empty():
        time.sleep(0.01)
    for one, part in front.items():
        part.combined = said(one._rank, "counting", {}, large, None)
        one.end(part)
    go.set()
    for one in everyone[1:]:
        assert back[one].replies.get(timeout=SECONDS) == Reply(None, large)
    for one in everyone:
        assert front[one].replies.get(timeout=SECONDS) == Reply(None, large)
    replying.join(SECONDS)
    for one in reversed(everyone):
        one.close()


def _forked(path: Path) -> Any:
    group = RankGroup(SECONDS)
    with group.section("counting"):
        pass
    child = os.fork()
    if child == 0:
        found = outcome(lambda: group.section("in a child").__enter__())
        group.close()
        os._exit(0 if found["error"] == "RankLostError" and "forked" in found["text"] else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with group.section("going on"):
        pass
    group.close()
    return code


def test_forked_child_is_in_no_group(tmp_path: Path) -> None:
    """A call in it is an error at once, its end is no news to the others, and the rank itself goes on."""
    assert groups.results(2, _forked, tmp_path) == [0, 0]


Links = dict[int, Link]


def _meeting(pool: ThreadPoolExecutor, store: Any, rank: int, size: int) -> Future[Links]:
    return pool.submit(meet, store, rank, size, SECONDS)


def _talk(parent: Future[Links], child: Future[Links], rank: int) -> str:
    """Return what a child hears that its parent says, and close what they have."""
    parent.result()[rank].send(b"hello")
    heard = _heard(child.result()[0])
    for link in (*parent.result().values(), *child.result().values()):
        link.close()
    return heard.decode()


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as found:
        yield found


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_meet_in_a_store_of_any_kind(pool: ThreadPoolExecutor, tmp_path: Path, kind: str) -> None:
    """A file says nothing of a host; each rank comes when it comes."""
    stores: dict[str, Callable[[], Any]] = {
        "hash": torch.distributed.HashStore,
        "file": lambda: torch.distributed.FileStore(str(tmp_path / "store"), 2),
        "tcp": lambda: torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
    }
    store = stores[kind]()
    child = _meeting(pool, store, 1, 2)
    assert _talk(_meeting(pool, store, 0, 2), child, 1) == "hello"


def test_callers_that_are_no_ranks_are_turned_away(pool: ThreadPoolExecutor) -> None:
    """Whether they say nothing, too little or something wrong, they keep no rank waiting, and nothing is read of it."""
    store = torch.distributed.HashStore()
    parent = _meeting(pool, store, 0, 2)
    store.wait(["0"])
    port = json.loads(store.get("0"))["port"]
    with contextlib.ExitStack() as callers:
        for words in (b"", b"1", b"[" * 2000, pickle.dumps(print)) * 5:
            caller = callers.enter_context(socket.create_connection(("127.0.0.1", port)))
            caller.sendall(words)
        child = _meeting(pool, store, 1, 2)
        assert _talk(parent, child, 1) == "hello"


def test_child_that_has_given_up_may_call_again(pool: ThreadPoolExecutor) -> None:
    """A parent counts it when it has heard the answer."""
    store = torch.distributed.HashStore()
    parent = _meeting(pool, store, 0, 2)
    store.wait(["0"])
    there = json.loads(store.get("0"))
    with socket.create_connection(("127.0.0.1", there["port"])) as caller:
        caller.sendall(links._proof(there["token"], "child", 1))
    assert _talk(parent, _meeting(pool, store, 1, 2), 1) == "hello"


def test_address_of_an_earlier_start_is_not_taken_for_the_parent(pool: ThreadPoolExecutor) -> None:
    """What listens there now cannot show that it knows the token: the child reads the address again."""
    store = torch.distributed.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as other:
        there = {"port": other.getsockname()[1], "token": "old", "hosts": ["127.0.0.1"]}
        store.set("0", json.dumps(there))
        child = _meeting(pool, store, 1, 2)
        called, _ = other.accept()
        called.sendall(bytes(32))
        parent = _meeting(pool, store, 0, 2)
        assert _talk(parent, child, 1) == "hello"
        called.close()


def test_host_that_cannot_resolve_its_own_name_is_reached(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is known from the way that its messages would take."""

    def refused(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("no such name")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", refused)
        store = torch.distributed.HashStore()
        child = _meeting(pool, store, 1, 2)
        assert _talk(_meeting(pool, store, 0, 2), child, 1) == "hello"


def test_store_that_is_gone_is_told_at_once(pool: ThreadPoolExecutor) -> None:
    """Nobody waits for the time that a rank has to come."""
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = torch.distributed.TCPStore("127.0.0.1", master.port, is_master=False)
    del master
    with pytest.raises(RuntimeError):
        meet(store, 1, 2, 10 * SECONDS)
