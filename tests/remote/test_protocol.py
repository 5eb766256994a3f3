"""The protocol of the epochs, tried in every order of the requests of two or three writers.

A reader that comes at any moment, between any two requests, is a new machine after everything else has died. So each
check below is also a crash at that moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from safeckpt.errors import DirectoryInUseError, MirrorTakenError
from safeckpt.remote import epochs as epochs_module
from safeckpt.remote.epochs import NOTHING, Epochs, RemoteCheckpoint, View
from safeckpt.store import KeepLast, to_prune
from tests.remote.memory_store import MemoryStore
from tests.remote.schedules import Actor, every_order


class ViolationError(AssertionError):
    """The protocol let something happen that it rules out."""


@dataclass
class World:
    """A store and what its writers were promised.

    Attributes:
        durable: Steps that a writer has counted as durable, in order.
        holds: Epoch to the writer that believes to have claimed it.
        started: Writer to its epoch and base, once it has begun.
        went_back: Whether a writer leaves checkpoints behind on purpose.
    """

    store: MemoryStore = field(default_factory=MemoryStore)
    durable: list[tuple[str, int]] = field(default_factory=list)
    holds: dict[int, str] = field(default_factory=dict)
    started: dict[str, tuple[int, int]] = field(default_factory=dict)
    went_back: bool = False

    def view(self) -> View:
        return Epochs(self.store.client()).look()

    def check(self) -> None:
        view = self.view()
        owners = {step: self.store.objects[one.key].decode() for step, one in view.checkpoints.items()}
        promised = max((step for _, step in self.durable), default=NOTHING)
        if not self.went_back and view.last < promised:
            raise ViolationError(f"step {promised} was durable, and {owners} is what is there")
        if view.head is not None and view.head in self.holds and self.holds[view.head] in self.started:
            writer = self.holds[view.head]
            _, base = self.started[writer]
            foreign = [step for step, owner in owners.items() if owner != writer and step > base]
            if foreign:
                raise ViolationError(f"{writer} went on from {base}, and {foreign} of another is listed")
        if self.went_back and view.last == NOTHING:
            raise ViolationError("nothing is left")


class Writer:
    """What a run does to a store, with the order of `Worker` and `RunMirror`; its files say who wrote them."""

    def __init__(self, world: World, actor: Actor | None, name: str) -> None:
        self.world = world
        self.name = name
        self.epochs = Epochs(world.store.client(None if actor is None else actor.hook))
        self.seen: View | None = None
        self.base = NOTHING

    def restore(self, step: int | None = None) -> None:
        self.seen = self.epochs.look()
        self.base = self.seen.last if step is None else step

    def take(self) -> None:
        self.epochs.take(self.name, agree=self._agree, own_past=self._own_past)
        number = self.epochs.number
        assert number is not None
        self.world.started[self.name] = number, self.base

    def _agree(self, view: View) -> int | None:
        newest = None if view.newest is None else view.newest.epoch
        seen = None if self.seen is None or self.seen.newest is None else self.seen.newest.epoch
        if newest != seen:
            assert view.newest is not None
            raise self.epochs.taken(view.newest)
        return newest

    def _own_past(self, view: View) -> Mapping[int, RemoteCheckpoint]:
        if self.epochs.number is not None:
            holder = self.world.holds.setdefault(self.epochs.number, self.name)
            if holder != self.name:
                raise ViolationError(f"{holder} and {self.name} both claimed epoch {self.epochs.number}")
        seen = {} if self.seen is None else self.seen.checkpoints
        unseen = [step for step in view.checkpoints if step > self.base and step not in seen]
        if unseen:
            raise DirectoryInUseError(directory="store", steps=unseen)
        return {step: one for step, one in view.checkpoints.items() if step <= self.base}

    def upload(self, step: int, keep: int = 1) -> None:
        number = self.epochs.number
        self.epochs.client.put(f"epoch-{number:08d}/step-{step:08d}.pt", self.name.encode())
        self.epochs.check()
        self.world.durable.append((self.name, step))
        view = self.epochs.look()
        doomed = to_prune(sorted(view.checkpoints), [KeepLast(keep)], is_good=lambda _: True)
        for one in doomed:
            self.epochs.client.delete([view.checkpoints[one].key])


def prepared() -> World:
    """Return a store in which A holds the prefix and has step 1."""
    world = World()
    first = Writer(world, None, "A")
    first.take()
    first.upload(1)
    return world


def holder(world: World, actor: Actor) -> Writer:
    """Return A as it goes on: its claim stands."""
    writer = Writer(world, actor, "A")
    writer.epochs.number = 1
    return writer


Begin = Callable[[], tuple[list[Actor], Callable[[], None]]]


def taken_over(uploads: int, *, back: bool = False) -> Begin:
    """A uploads on while B restores on an empty disk, takes the prefix and uploads."""

    def begin() -> tuple[list[Actor], Callable[[], None]]:
        world = prepared()
        world.went_back = back
        if back:
            holder(world, _idle()).upload(2, keep=2)

        def go_on(actor: Actor) -> None:
            writer = holder(world, actor)
            for step in range(2 + back, 2 + back + uploads):
                writer.upload(step)

        def take(actor: Actor) -> None:
            writer = Writer(world, actor, "B")
            writer.restore(1 if back else None)
            writer.take()
            writer.upload(writer.base + 10)

        return [Actor("A", go_on), Actor("B", take)], world.check

    return begin


def racing() -> tuple[list[Actor], Callable[[], None]]:
    """B and C restore at the same time, and both try to take the prefix."""
    world = prepared()

    def take(actor: Actor) -> None:
        writer = Writer(world, actor, actor.name)
        writer.restore()
        writer.take()
        writer.upload(writer.base + 10)

    return [Actor("B", take), Actor("C", take)], world.check


def _idle() -> Actor:
    actor = Actor("idle", lambda _: None)
    actor._is_free = True
    return actor


def violations(begin: Begin, most: int | None = None) -> tuple[int, str | None]:
    """Return how many orders were tried, and what the first bad one did."""
    count = 0
    last: list[list[Actor]] = []

    def kept() -> tuple[list[Actor], Callable[[], None]]:
        actors, check = begin()
        last[:] = [actors]
        return actors, check

    try:
        for _ in itertools.islice(every_order(kept), most):
            count += 1
            for actor in last[0]:
                if isinstance(actor.error, ViolationError):
                    raise actor.error
                if actor.error is not None and not isinstance(actor.error, MirrorTakenError | DirectoryInUseError):
                    raise actor.error
    except ViolationError as error:
        return count, str(error)
    return count, None


def test_take_over_of_a_writer_that_goes_on_is_safe_in_every_order() -> None:
    """Whatever was durable is there or newer, and nothing that the zombie sends afterwards is listed."""
    count, violation = violations(taken_over(1))
    assert violation is None
    assert count > 300


@pytest.mark.slow
def test_take_over_of_a_writer_that_sends_twice_is_safe_in_every_order() -> None:
    """The same with a longer history."""
    count, violation = violations(taken_over(2))
    assert violation is None
    assert count > 3_000


@pytest.mark.slow
def test_going_back_while_the_one_before_deletes_leaves_something_in_every_order() -> None:
    """A taker that went back to an older step loses it to a deletion under way, and the newer one counts instead."""
    count, violation = violations(taken_over(1, back=True))
    assert violation is None
    assert count > 300


@pytest.mark.slow
def test_of_two_racing_takers_one_wins_in_every_order() -> None:
    """Both never hold one epoch; the loser knows, before or after its first upload."""
    count, violation = violations(racing, 5_000)
    assert violation is None
    assert count > 1_000


def _list_everything(number: int, start: object, files: Mapping[tuple[int, int], RemoteCheckpoint]) -> object:
    """List what each epoch sent, also after it had lost the prefix."""
    return dict(sorted((step, one) for (_, step), one in sorted(files.items())))


STORIES: dict[str, Begin] = {
    "a writer that goes on is taken over": taken_over(1),
    "a writer that sends twice is taken over": taken_over(2),
    "a taker goes back while the one before deletes": taken_over(1, back=True),
    "two takers race": racing,
}
QUICK = "a writer that goes on is taken over"  # in a plain run; the others are slow

# What is broken, by name: where, by what, the story that finds it, and what that says.
MUTATIONS: dict[str, tuple[object, str, object, str, str]] = {
    "no look for a newer claim": (
        Epochs, "check", lambda _: None,
        "a writer that sends twice is taken over", "step 3 was durable, and {2: 'A'} is what is there",
    ),
    "a claim replaces another": (
        Epochs, "_creates", lambda self, key, data: self.client.put(key, data) or True,
        "two takers race", "B and C both claimed epoch 2",
    ),
    "a start is written without a second look": (
        Epochs, "_second_look", lambda _, view: view,
        "a writer that goes on is taken over", "step 2 was durable, and {1: 'A'} is what is there",
    ),
    "what a zombie sent is listed": (
        epochs_module, "_lineage", _list_everything,
        "a writer that goes on is taken over", "B went on from 1, and [2] of another is listed",
    ),
    "a past is taken for granted": (
        epochs_module, "_is_there", lambda *_: True,
        "a taker goes back while the one before deletes", "nothing is left",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "name", "broken", "story", "finding"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[3] != QUICK), id=f"{mutation}, {row[3]}")
        for mutation, row in MUTATIONS.items()
    ],
)
def test_broken_protocol_is_found(  # noqa: PLR0917 - pytest passes them by name
    where: object, name: str, broken: object, story: str, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of the protocol is needed: without it some order of requests in its story loses or mixes something."""
    assert hasattr(where, name)
    monkeypatch.setattr(where, name, broken)
    assert violations(STORIES[story])[1] == finding
