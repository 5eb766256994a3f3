"""With `async_save` the manager's own books stay right while a thread writes."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from tests.faults import Fault, Operation, intercept
from tests.manager.helpers import events_in, manager_of, steps_in, temps_in
from tests.training import Marked


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let writes in the background wait at their rename until the event is set."""
    go = threading.Event()

    def wait(operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == "replace":
            assert go.wait(60)
        return call()

    with intercept(wait):
        try:
            yield go
        finally:
            go.set()


def test_pending_save_is_in_no_listing_until_it_is_committed(tmp_path: Path) -> None:
    """While it is written a checkpoint is neither listed nor latest; after `wait` it is both, with the right size."""
    with manager_of(tmp_path, Marked(), async_save=True) as manager, held_back() as go:
        pending = manager.save(1, loss=0.5)
        assert manager.checkpoints() == ()
        assert manager.latest() is None
        go.set()
        manager.wait()
        assert manager.checkpoints() == (pending,)
        assert manager.checkpoints()[0].size_bytes == pending.path.stat().st_size
        assert manager.latest() == pending


def test_steps_that_end_while_a_save_is_written_are_not_forgotten(tmp_path: Path) -> None:
    """The step count does not fall back to the saved step when its write is done, and no second save is asked for."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True, save_every=10) as manager:
        with held_back() as go:
            assert manager.end_step(10) is not None
            assert manager.end_step(11) is None
            assert manager.end_step(12) is None
            go.set()
            manager.wait()
        assert manager.step == 12
        with pytest.raises(ValueError, match="not higher than step 12"):
            manager.end_step(12)
        manager.end_step(20)
    assert steps_in(tmp_path) == [10, 20]


def test_refusal_while_a_save_is_written_is_not_forgotten(tmp_path: Path) -> None:
    """A step that is refused before the save of an earlier one is done is the one that the rollback is about."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        with held_back() as go:
            manager.save(10)
            with pytest.raises(safeckpt.NonFiniteError):
                manager.end_step(11, loss=math.inf)
            go.set()
            manager.wait()
        assert manager.rollback(changed=True).step == 10
    (event,) = events_in(tmp_path, "rolled_back")
    assert (event["failed_step"], event["why"]) == (11, "loss = inf")


def test_state_is_that_of_the_call_not_of_the_write(tmp_path: Path) -> None:
    """What training changes while a thread writes is not in the file."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        with held_back() as go:
            run.step = 1
            manager.save(1)
            run.step = 2
            go.set()
        manager.wait()
        manager.restore()
        assert run.step == 1


def test_failed_write_is_raised_once_and_the_next_save_works(tmp_path: Path) -> None:
    """What a write in the background raised comes out of the next call, keeps its errno, and then the run goes on."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.save(1)
        manager.wait()
        fault = Fault(1, errno.ENOSPC, {"sync"})
        with intercept(fault):
            manager.save(2)
            with pytest.raises(OSError, match="No space") as caught:
                manager.wait()
        assert fault.fired is not None
        assert caught.value.errno == errno.ENOSPC
        assert (steps_in(tmp_path), temps_in(tmp_path)) == ([1], [])
        manager.wait()
        run.step = 3
        manager.save(3)
    assert steps_in(tmp_path) == [1, 3]


def test_refusal_comes_from_save_itself(tmp_path: Path) -> None:
    """The guard has run before `save` returns; nothing is written for a state that is not finite."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=True) as manager:
        manager.save(1)
        run.poison()
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(2)
        assert manager.rollback(changed=True).step == 1
        assert run.step == 0
    assert steps_in(tmp_path) == [1]
