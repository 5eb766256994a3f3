"""What goes wrong on one rank, one scenario a function; each runs on every rank of one group and says what it saw."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import functools
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import safeckpt
from safeckpt.run.background import BackgroundWriter
from safeckpt.run.restoring import Restorer
from safeckpt.store import disk
from tests.distributed import groups
from tests.distributed.training import Kind, Run, manager_of
from tests.faults import Fault, Interrupt, intercept

SCENARIOS: dict[str, Callable[[Path, Kind], Any]] = {}


def scenario(function: Callable[[Path, Kind], Any]) -> Callable[[Path, Kind], Any]:
    SCENARIOS[function.__name__] = function
    return function


def all_of(path: Path, kind: Kind, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Run scenarios one after the other in one group."""

    def run(name: str, path: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return SCENARIOS[name](path, kind)

    return groups.run_cases({name: functools.partial(run, name) for name in wanted}, path)


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what became of a call: its result, or what there is to know about its error."""
    started = time.monotonic()
    try:
        value = call()
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "errno": getattr(error, "errno", None),
            "step": getattr(error, "step", None),
            "tensors": [one.name for one in getattr(error, "tensors", ())],
            "seconds": time.monotonic() - started,
        }
    return {"error": None, "step": getattr(value, "step", value), "seconds": time.monotonic() - started}


def caught(call: Callable[[], Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the outcome of a call, and the warnings of safeckpt that it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = outcome(call)
    return found, [
        f"{one.category.__name__}: {one.message}" for one in given if issubclass(one.category, safeckpt.SafeckptWarning)
    ]


def rank() -> int:
    return torch.distributed.get_rank()


def latest(path: Path) -> int | None:
    found = safeckpt.latest(path)
    return None if found is None else found.step


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@scenario
def nan_loss_on_one_rank_at_save(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        found = outcome(lambda: manager.save(4, loss=float("nan") if rank() == 1 else 0.5))
        again = outcome(lambda: manager.save(5))
        return found, again, sorted(one.step for one in manager.checkpoints())


@scenario
def nan_tensor_on_one_rank(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        weight = local(next(iter(run.model.parameters())).detach())
        before = weight.clone()
        if rank() == 1:
            weight[0, 0] = float("nan")
        found = outcome(lambda: manager.save(4))
        weight.copy_(before)
        return found, outcome(lambda: manager.save(5)), latest(path)


@scenario
def nan_between_guard_and_write(path: Path, kind: Kind) -> Any:
    """What arrives when the guard has looked: in a shard of rank 1, and in what rank 0 writes into the index."""
    run = Run(kind)
    real = disk.create
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        weight = next(iter(run.model.parameters()))
        targets = {
            4: (1, local(run.optimizer.state[weight]["exp_avg"])),
            5: (0, local(run.optimizer.state[weight]["step"]).reshape(1)),
        }
        found = {}
        for step, (where, tensor) in targets.items():
            before = tensor.clone()

            def poisoned(target: Path, where: int = where, tensor: torch.Tensor = tensor) -> Any:
                if rank() == where:
                    tensor.view(-1)[-1] = float("nan")
                return real(target)

            with mock.patch.object(disk, "create", poisoned):
                found[step] = outcome(functools.partial(manager.save, step))
            tensor.copy_(before)
        torch.distributed.barrier()
        left = sorted(one.name for one in path.iterdir() if one.name.endswith(".tmp"))
        return found[4], found[5], left, outcome(lambda: manager.save(6)), latest(path)


@scenario
def refusal_of_one_rank_at_the_end(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    manager = manager_of(run, path, ranks=safeckpt.Ranks(20.0, agree_every=100))

    def end() -> None:
        with manager:
            manager.save(1)
            manager.end_step(2, loss=float("nan") if rank() == 1 else 0.5)

    return outcome(end), latest(path)


@scenario
def nan_loss_on_one_rank_at_a_step(path: Path, kind: Kind) -> Any:
    """The rank with the bad loss goes on with the others until all of them meet, and then all refuse that step."""
    run = Run(kind)
    run.bad = (1, 5)
    with manager_of(run, path, save_every=4, ranks=safeckpt.Ranks(agree_every=7)) as manager:
        found = outcome(lambda: run.train(manager, 20))
        at = run.scheduler.last_epoch
        batches = run.loader.last_batches(99)
        manager.rollback(skip_batches=1)
        left_out = run.loader.left_out
        run.bad = None
        losses = run.train(manager, 10)
        return found, at, batches, left_out, manager.step, len(losses)


@scenario
def note_that_fails_on_one_rank(path: Path, kind: Kind) -> Any:
    """The others have noted where the run stands when rank 1 fails, from the disk and from memory."""
    found = {}
    for source, options in {"disk": {}, "memory": {"async_save": True}}.items():
        run = Run(kind)
        with manager_of(run, path / source, save_on_exit=False, **options) as manager:
            run.train(manager, 2)
            manager.save(3)
            manager.wait()

            def failing(*_: Any, **__: Any) -> None:
                if rank() == 1:
                    raise OSError(errno.EIO, "no note")

            with mock.patch.object(Restorer, "report", failing):
                failed = outcome(lambda: manager.rollback(changed=True))
            mixed = sorted(manager._run.timeline.mixture.names)
            again = outcome(lambda: manager.rollback(changed=True))
            found[source] = (failed, mixed, again, outcome(lambda: manager.save(9)))
    return found


@scenario
def disk_full_on_rank_0(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        fault = Fault(1, errno.ENOSPC, {"write"})
        with intercept(fault) if rank() == 0 else contextlib.nullcontext():
            found = outcome(lambda: manager.save(4))
        fired = fault.fired is not None
        left = sorted(one.name for one in path.iterdir() if one.name.endswith(".tmp")) if rank() == 0 else []
        return found, fired, left, outcome(lambda: manager.save(5)), latest(path)


@scenario
def disk_full_on_rank_1(path: Path, kind: Kind) -> Any:
    """A real limit: the shard of rank 1 does not fit."""
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        found = outcome(lambda: manager.save(4))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
        torch.distributed.barrier()
        left = sorted(one.name for one in path.iterdir() if one.name.endswith(".tmp"))
        return found, left, outcome(lambda: manager.save(5)), latest(path)


@scenario
def interrupt_on_rank_0(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        interrupt = Interrupt(1, "before", {"replace"})
        with intercept(interrupt) if rank() == 0 else contextlib.nullcontext():
            found = outcome(lambda: manager.save(4))
        return found, outcome(lambda: manager.save(5)), latest(path)


@scenario
def interrupt_when_the_thread_has_begun(path: Path, kind: Kind) -> Any:
    """Ctrl-C comes to rank 0 out of the start of its thread, which writes only when the save has surfaced it."""
    run = Run(kind)
    surfaced = threading.Event()
    start = BackgroundWriter.start

    def interrupted(self: BackgroundWriter, job: Callable[[], object], what: str) -> None:
        def held() -> None:
            assert surfaced.wait(60)
            job()

        start(self, held, what)
        raise KeyboardInterrupt

    with manager_of(run, path, async_save=True) as manager:
        run.train(manager, 2)
        with mock.patch.object(BackgroundWriter, "start", interrupted) if rank() == 0 else contextlib.nullcontext():
            found = outcome(lambda: manager.save(3))
        surfaced.set()
        return found, outcome(manager.wait), latest(path)


@scenario
def drifted_replica(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(3)
        if rank() == 1:
            with torch.no_grad():
                run.model.module.head.bias[0] += 1e-3
        found = caught(lambda: manager.save(4))
    with manager_of(run, path, ranks=safeckpt.Ranks(on_drift="error")) as manager:
        manager.restore(step=4)
        clean = caught(lambda: manager.save(5))
        if rank() == 1:
            with torch.no_grad():
                run.model.module.head.bias[0] += 1e-3
        refused = caught(lambda: manager.save(6))
        return found, clean, refused, latest(path)


@scenario
def different_calls(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        manager.save(1)
        return outcome(lambda: manager.save(2 + rank())), outcome(lambda: manager.save(4)), latest(path)


@scenario
def file_that_one_rank_cannot_read(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        manager.save(1)
        manager.save(2)
    again = Run(kind)
    with manager_of(again, path) as manager:
        real = manager._run.directory.catalog.open_step

        def opened(step: int, **part: int) -> Any:
            if rank() == 1 and step == 2:
                raise safeckpt.DamagedCheckpointError(path=path, reason="it is not what was written")
            return real(step, **part)

        manager._run.directory.catalog.open_step = opened  # type: ignore[method-assign]
        found = caught(manager.restore)
        return found, outcome(lambda: manager.restore(step=2)), manager.step


@scenario
def directory_of_each_rank(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    mine = path / f"node-{rank()}"
    with manager_of(run, mine, ranks=safeckpt.Ranks(timeout_seconds=6.0)) as manager:
        found = outcome(lambda: manager.save(1))
        names = sorted(one.name for one in mine.iterdir() if one.name.startswith("step")) if mine.is_dir() else []
        return found, names


@scenario
def rename_that_is_seen_late(path: Path, kind: Kind) -> Any:
    """Rank 1 comes to the directory through a link that appears a second after the checkpoint does."""
    run = Run(kind)
    with manager_of(run, path / "real") as manager:
        manager.save(1)
    place = path / "real"
    if rank() == 1:
        place = path / "late"
        threading.Timer(1.0, lambda: place.symlink_to(path / "real")).start()
    again = Run(kind)
    with manager_of(again, place) as manager:
        return outcome(manager.restore), outcome(lambda: manager.save(2))


def _until_stopped(manager: safeckpt.CheckpointManager, step: Callable[[int], float]) -> tuple[list[int], int]:
    """Train until the run is asked to stop; return the steps that were saved, and the last one."""
    saved = []
    for number in range(1, 30):
        if manager.end_step(number, loss=step(number)) is not None:
            saved.append(number)
        if manager.stop_requested:
            break
    return saved, number


@scenario
def signal_to_one_rank(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path, stop_signals=(signal.SIGUSR1,), ranks=safeckpt.Ranks(agree_every=3)) as manager:

        def step(number: int) -> float:
            if number == 4 and rank() == 1:
                signal.raise_signal(signal.SIGUSR1)
            return run.step(number)

        return _until_stopped(manager, step)


@scenario
def time_limit_of_one_rank(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    now, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    end = now - hour if rank() == 1 else now + hour
    with manager_of(run, path, stop_before=end, ranks=safeckpt.Ranks(agree_every=3)) as manager:
        return _until_stopped(manager, run.step)


@scenario
def spike_on_one_rank(path: Path, kind: Kind) -> Any:
    """Rank 1 has a median of its own, which comes back with the checkpoint; its spike is one for all."""
    guard = safeckpt.Guard(loss_above=safeckpt.TimesMedian(2, steps=3))
    run = Run(kind)
    with manager_of(run, path, guard=guard) as manager:
        for number in range(1, 5):
            run.step(number)
            manager.end_step(number, loss=1.0 + 9.0 * rank())
        manager.save(4)
    again = Run(kind)
    with manager_of(again, path, guard=guard, ranks=safeckpt.Ranks(agree_every=1)) as manager:
        manager.restore()
        found = []
        for number in range(5, 12):  # it may be told one step later
            again.step(number)
            loss = 25.0 if (rank(), number) == (1, 6) else 1.0 + 9.0 * rank()
            found.append(outcome(lambda: manager.end_step(number, loss=loss)))  # noqa: B023 - called at once
            if found[-1]["error"] is not None:
                break
        back = outcome(lambda: manager.rollback(changed=True))
        good = outcome(lambda: manager.save(5, loss=1.0))
    return found, back, good


@scenario
def checkpoint_that_is_owed(path: Path, kind: Kind) -> Any:
    """The ranks owe the same checkpoint, by count and by a signal to one of them, and pay it together."""
    run = Run(kind)
    ranks = safeckpt.Ranks(agree_every=2)
    with manager_of(run, path, save_every=3, stop_signals=(signal.SIGUSR1,), ranks=ranks, keep_last=9) as manager:
        due, saved = [], []
        for number in range(1, 30):
            if number == 4 and rank() == 1:
                signal.raise_signal(signal.SIGUSR1)
            manager.end_step(number, loss=run.step(number), save=False)
            if manager.is_due:
                due.append(number)
                refused = outcome(lambda: manager.end_step(number + 1, save=False))  # noqa: B023 - called at once
            checkpoint = manager.save_due()
            if checkpoint is not None:
                saved.append(checkpoint.step)
            if manager.stop_requested:
                break
        return due, saved, refused["error"], number


@scenario
def nothing_there(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        none = outcome(manager.restore)
        missing = outcome(lambda: manager.restore(step=7))
        return none, missing, outcome(manager.rollback)


@scenario
def other_shape_on_one_rank(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path) as manager:
        manager.save(1)
    again = Run(kind)
    before = again.full_state()
    if rank() == 1:
        again.components["noise"] = np.random.default_rng(0)
    with manager_of(again, path) as manager:
        found = outcome(manager.restore)
    after = again.full_state()
    return found, [name for name in before if not torch.equal(before[name], after[name])]


@scenario
def rotation(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path, keep_last=2, keep_every=10) as manager:
        for step in (8, 10, 11, 12, 13):
            manager.save(step)
        return [one.step for one in manager.checkpoints()]


@scenario
def rewind(path: Path, kind: Kind) -> Any:
    """After a restore of an older step the newer ones are set aside at the next save."""
    run = Run(kind)
    with manager_of(run, path) as manager:
        run.train(manager, 2)
        manager.save(2)
        run.train(manager, 4)
        manager.save(4)
        manager.restore(step=2)
        manager.save(3)
        asides = sorted(one.name for one in path.iterdir() if one.name.startswith("aside")) if rank() == 0 else []
        return asides, [one.step for one in manager.checkpoints()], manager.step


@scenario
def pending_gradients(path: Path, kind: Kind) -> Any:
    """A save between two micro-steps of gradient accumulation."""
    run = Run(kind)
    batch = next(iter(run.loader))
    torch.nn.functional.cross_entropy(run.model(batch[0]), batch[1]).backward()
    before = {name: local(p.grad).clone() for name, p in run.model.named_parameters() if p.grad is not None}
    with manager_of(run, path) as manager:
        manager.save(1)
    again = Run(kind)
    with manager_of(again, path) as manager:
        manager.restore()
    after = {name: local(p.grad) for name, p in again.model.named_parameters() if p.grad is not None}
    return len(before), [name for name in before if name not in after or not torch.equal(before[name], after[name])]
