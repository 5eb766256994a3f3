"""SIGKILL at every request to an object store, zombies at every point, racing takers; a real server and a proxy."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import safeckpt
from safeckpt.remote import Client, RemoteCheckpoint, open_client
from tests.campaign.outcome import Outcome, Scale, quiet, scratch
from tests.children import Child
from tests.crash.stories import WrongBitsError
from tests.distributed import groups, training
from tests.manager.helpers import manager_of
from tests.remote import servers
from tests.remote.proxy import Fault, Proxy, Request, proxy_of

_SIZE = 2_200_000  # floats: two parts of an upload
_FOREIGN = {"notes.txt": b"mine", "epoch-1/step-00000001.pt": b"mine too", "epoch-00000001/weights.bin": b"and this"}
_TRIES = {"fast": 6, "full": 10_000}  # moments for each act
_RACES = {"fast": 1, "full": 10}
_RANK_KILLS = {"fast": 1, "full": 40}


class Filled:
    """A run whose every number is its step."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.register_buffer("value", torch.zeros(_SIZE))
        self.counters = {"step": 0}
        self.components: dict[str, Any] = {"model": self.model, "counters": self.counters}

    def fill(self, step: int) -> None:
        self.model.value.fill_(step)
        self.counters["step"] = step

    @property
    def step(self) -> int:
        step = self.counters["step"]
        if not bool((self.model.value == step).all()):
            raise WrongBitsError(f"not all of the state is that of step {step}")
        return step


# -- what is done in processes that are killed -----------------------------------------------------------------------


def _restore(_: Connection, path: Path, mirror: safeckpt.Mirror) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with manager_of(path, Filled(), mirror=mirror, save_on_exit=False) as manager:
            manager.restore()


def _save(connection: Connection, path: Path, mirror: safeckpt.Mirror, keep: int = 3) -> None:
    """Restore, save the next step, and say when it is durable."""
    run = Filled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with manager_of(path, run, mirror=mirror, save_on_exit=False, keep_last=keep) as manager:
            manager.restore()
            step = manager.step + 1
            run.fill(step)
            manager.save(step)
            assert manager.mirror is not None
            manager.mirror.wait(60)
            connection.send(manager.mirror.durable_step)


def _save_keeping_one(connection: Connection, path: Path, mirror: safeckpt.Mirror) -> None:
    _save(connection, path, mirror, keep=1)


ACTS: dict[str, tuple[Callable[..., None], bool]] = {  # what is done, and whether on the machine that saved before
    "upload": (_save, True),
    "prune": (_save_keeping_one, True),
    "take-over": (_save, False),
    "fetch": (_restore, False),
}


# -- the world around them -------------------------------------------------------------------------------------------


class World:
    """A server, a proxy in front of it, and prefixes that hold the steps 1 to 3 of a run."""

    def __init__(self, server: servers.Server, proxy: Proxy, folder: Path) -> None:
        self.server = server
        self.proxy = proxy
        self._proxied = dataclasses.replace(server, options={**server.options, "endpoint": proxy.endpoint})
        self.folder = folder
        self._numbers = itertools.count()
        self._machine = folder / "template"
        template = self.mirror("template", wait="save")
        run = Filled()
        with manager_of(self._machine, run, mirror=template) as manager:
            for step in (1, 2, 3):
                run.fill(step)
                manager.save(step)
        client = open_client(template)
        self._objects = {one.key: bytes(client.read(one.key)) for one in client.listing()}

    def mirror(self, run: str, *, proxied: bool = False, **more: Any) -> safeckpt.Mirror:
        return (self._proxied if proxied else self.server).mirror(run, **more)

    def fresh(self) -> tuple[str, Path]:
        """Return a new prefix, and the directory of the machine that wrote it."""
        run = f"runs/{next(self._numbers)}"
        client = open_client(self.mirror(run))
        for key, data in {**self._objects, **_FOREIGN}.items():
            client.put(key, data)
        machine = self.folder / run / "machine"
        shutil.copytree(self._machine, machine)
        notes = machine / ".mirror.json"
        notes.write_text(notes.read_text().replace("/template", f"/{run}"))
        return run, machine

    def client(self, run: str) -> Client:
        return open_client(self.mirror(run))


def _check(world: World, outcome: Outcome, where: str, *, run: str, allowed: set[int], durable: int) -> None:
    """A new machine restores what was durable or something newer, goes on, and nothing foreign is gone."""
    path = world.folder / run / "afterwards"
    world.proxy.settle()  # what comes in between a look and a save is refused, and this is about what is there
    with outcome.judging(where):
        state = Filled()
        with manager_of(path, state, mirror=world.mirror(run, wait="save"), save_on_exit=False) as manager:
            found = manager.restore()
            assert found is not None, "a fresh start"
            assert state.step == found.step
            assert found.step in allowed, f"restored step {found.step}"
            assert found.step >= durable, f"step {durable} was durable, {found.step} is restored"
            state.fill(found.step + 1)
            manager.save(found.step + 1)
        client = world.client(run)
        view = open_epochs(client)
        assert max(view) == found.step + 1
        for key, data in _FOREIGN.items():
            assert bytes(client.read(key)) == data, f"{key} is another"
    shutil.rmtree(world.folder / run, ignore_errors=True)


def open_epochs(client: Client) -> dict[int, RemoteCheckpoint]:
    from safeckpt.remote import Epochs

    return dict(Epochs(client, lock=False).look().checkpoints)


def _run_until_end(child: Child) -> tuple[int, BaseException | None, bool]:
    """Return the step that the child called durable (0 for none), its error, and whether it was killed."""
    durable = 0
    with contextlib.suppress(EOFError):
        while True:
            answer = child.receive()
            if isinstance(answer, tuple):
                return durable, answer[1], False
            durable = answer
    return durable, None, True


def _count(world: World, act: Callable[..., None], *, at_home: bool) -> int:
    run, machine = world.fresh()
    world.proxy.plan, before = lambda _: None, len(world.proxy.requests)
    path = machine if at_home else machine.with_name("empty")
    with Child(act, path, world.mirror(run, proxied=True)) as child:
        _, error, killed = _run_until_end(child)
    assert error is None, error
    assert not killed
    return len(world.proxy.requests) - before


def _moments(world: World, act: Callable[..., None], choose: random.Random, most: int, *, at_home: bool) -> list[Any]:
    total = _count(world, act, at_home=at_home)
    moments = [(number, when) for number in range(1, total + 1) for when in ("before", "after")]
    return moments if len(moments) <= most else choose.sample(moments, most)


def _kill_everywhere(world: World, outcome: Outcome, choose: random.Random, scale: Scale) -> None:
    for name, (act, at_home) in ACTS.items():
        for number, when in _moments(world, act, choose, _TRIES[scale], at_home=at_home):
            run, machine = world.fresh()
            path = machine if at_home else machine.with_name("empty")
            start = len(world.proxy.requests)
            child = Child(act, path, world.mirror(run, proxied=True))

            def plan(
                request: Request, at: int = start + number, when: str = when, child: Child = child
            ) -> Fault | None:
                return Fault(kill=when, pid=child.pid) if request.number == at else None

            world.proxy.plan = plan
            with child:
                durable, error, _ = _run_until_end(child)
            world.proxy.plan = lambda _: None
            outcome.tried += 1
            where = f"{name}: SIGKILL {when} request {number}"
            if error is not None:
                outcome.lose(f"{where}: {type(error).__name__}: {error}")
            if path.exists() and at_home:
                _check_home(path, outcome, where)
            _check(world, outcome, where, run=run, allowed={3, 4}, durable=max(durable, 3))


def _check_home(path: Path, outcome: Outcome, where: str) -> None:
    """The machine itself, too, has a good checkpoint, and nothing half under a checkpoint's name."""
    with outcome.judging(f"{where}, in the directory"):
        newest = safeckpt.latest(path)
        assert newest is not None
        assert newest.step in (3, 4)


def _zombies(world: World, outcome: Outcome, choose: random.Random, scale: Scale) -> None:
    """While a writer is held up before one of its requests, another machine takes the prefix and saves."""
    for number, _ in _moments(world, _save, choose, _TRIES[scale], at_home=True)[:: 1 if scale == "fast" else 2]:
        run, machine = world.fresh()
        start = len(world.proxy.requests)
        taken: list[tuple[int, BaseException | None]] = []

        def plan(request: Request, at: int = start + number, run: str = run, taken: Any = taken) -> Fault | None:
            if request.number == at:
                with Child(_save, world.folder / run / "taker", world.mirror(run)) as taker:
                    taken.append(_run_until_end(taker)[:2])
            return None

        world.proxy.plan = plan
        with Child(_save, machine, world.mirror(run, proxied=True)) as zombie:
            durable, error, _ = _run_until_end(zombie)
        world.proxy.plan = lambda _: None
        outcome.tried += 1
        where = f"a taker while the writer waits before request {number}"
        refusals = (safeckpt.MirrorTakenError, safeckpt.DirectoryInUseError)
        others = [
            one for one in (error, *(one[1] for one in taken)) if one is not None and not isinstance(one, refusals)
        ]
        if others:
            outcome.lose(f"{where}: {type(others[0]).__name__}: {others[0]}")
        promised = max([durable, 3, *(one[0] for one in taken)])
        _check(world, outcome, where, run=run, allowed=set(range(3, 7)), durable=promised)


def _racing(world: World, outcome: Outcome, scale: Scale) -> None:
    """Eight empty machines restore and save at once: one has the prefix, and seven are told."""
    for _ in range(_RACES[scale]):
        run, machine = world.fresh()
        racers = [Child(_save, machine.with_name(f"racer {n}"), world.mirror(run)) for n in range(8)]
        ends = []
        for racer in racers:
            with racer:
                ends.append(_run_until_end(racer))
        outcome.tried += 1
        winners = [durable for durable, error, _ in ends if error is None]
        wrong = [error for _, error, _ in ends if error is not None and not isinstance(
            error, safeckpt.MirrorTakenError | safeckpt.DirectoryInUseError)]  # fmt: skip
        if wrong:
            outcome.lose(f"racing takers: {type(wrong[0]).__name__}: {wrong[0]}")
        # One after the other, a later one may follow an earlier that has ended; at no time two.
        steps = sorted(winners)
        if not winners or len(set(steps)) != len(steps):
            outcome.lose(f"racing takers: {steps} were saved")
        newest = max(steps, default=3)
        _check(world, outcome, "racing takers", run=run, allowed={newest}, durable=newest)


# -- two ranks, of which one is killed --------------------------------------------------------------------------------


def _train(path: Path, name: str, steps: Sequence[int], mirror: safeckpt.Mirror) -> list[float]:
    """Restore, train to each of some steps and save there; rank 0 leaves a note of each step that is durable."""
    run = training.Run("fsdp")
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with training.manager_of(run, path / name, mirror=mirror, save_on_exit=False, keep_last=2) as manager:
            manager.restore()
            for step in [step for step in steps if step > manager.step]:
                losses += run.train(manager, step)
                manager.save(step)
                if torch.distributed.get_rank() == 0:
                    (path / f"durable-{step}").touch()
    return losses


def _kill_ranks(world: World, outcome: Outcome, choose: random.Random, scale: Scale) -> None:
    """One of two ranks is killed at a request; another machine goes on from what was durable, with the same losses."""
    folder, start = world.folder / "ranks", len(world.proxy.requests)
    straight = groups.results(
        2, _train, folder / "straight", "a", [2, 4, 6], world.mirror("straight", proxied=True, wait="save")
    )
    total = len(world.proxy.requests) - start
    moments = [(at, when, rank) for at in range(1, total + 1) for when in ("before", "after") for rank in (0, 1)]
    for number, (at, when, rank) in enumerate(choose.sample(moments, min(len(moments), _RANK_KILLS[scale]))):
        run = f"ranks/{number}"
        path, first = folder / str(number), len(world.proxy.requests)
        with groups.running(2, _train, path, "a", [2, 4, 6], world.mirror(run, proxied=True, wait="save")) as members:

            def plan(
                request: Request, at: int = first + at, when: str = when, pid: int = members[rank].pid
            ) -> Fault | None:
                return Fault(kill=when, pid=pid) if request.number == at else None

            world.proxy.plan = plan
            signals = [groups.end_of(one).signal for one in members]
        world.proxy.plan = lambda _: None
        outcome.tried += signals[rank] == signal.SIGKILL  # else it had ended, and the other one was sending
        durable = max((int(one.name.partition("-")[2]) for one in path.glob("durable-*")), default=0)
        world.proxy.settle()
        with outcome.judging(f"two ranks: SIGKILL of rank {rank} {when} request {at}"):
            there = max(open_epochs(world.client(run)), default=0)
            assert there >= durable, f"step {durable} was durable, the newest there is {there}"
            resumed = groups.results(2, _train, path, "b", [2, 4, 6, 8], world.mirror(run, wait="save"))
            for before, losses in zip(straight, resumed, strict=True):
                assert len(losses) <= 8 - durable, "it began before what was durable"
                assert before[8 - len(losses) :] == losses[: len(losses) - 2], "other losses"
            assert max(open_epochs(world.client(run))) == 8
        shutil.rmtree(path)


def run(scale: Scale, seed: int) -> Outcome:
    """Kill at requests, hold writers up while another takes over, race."""
    outcome = Outcome(
        "SIGKILL at requests of an upload, a prune, a take-over and a fetch, also of one of two ranks; zombies; races"
    )
    missing = [name for name in ("obstore", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        outcome.skipped = f"{', '.join(missing)} not installed"
        return outcome
    choose = random.Random(f"{seed} remote")
    with _world() as world:
        _kill_everywhere(world, outcome, choose, scale)
        _zombies(world, outcome, choose, scale)
        _racing(world, outcome, scale)
        _kill_ranks(world, outcome, choose, scale)
    return outcome


@contextlib.contextmanager
def _world() -> Iterator[World]:
    with (
        scratch() as folder,
        quiet(),
        warnings.catch_warnings(),
        servers.moto(folder) as server,
        proxy_of(server.endpoint) as proxy,
    ):
        warnings.simplefilter("error")
        torch.set_num_threads(1)  # as the processes have it that are killed
        yield World(server, proxy, folder)
