"""`end_step` guards every loss, saves when a save is due, and honours a request to stop at the next step."""

from __future__ import annotations

import datetime as dt
import errno
import math
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests import children
from tests.faults import Fault, contents, intercept
from tests.manager.helpers import checkpoint_files, events_in, manager_of, save_steps, steps_in
from tests.training import Marked

# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "saved"),
    [
        (None, range(1, 8), []),
        (1, range(1, 5), [1, 2, 3, 4]),
        (3, range(1, 10), [3, 6, 9]),
        (5, [2, 4, 6, 8, 10, 12], [6, 10]),
        (10, [1, 9, 35, 36, 40], [35, 40]),
        (4, [0, 1, 4], [4]),
    ],
)
def test_save_is_due_when_a_multiple_is_reached_or_passed(tmp_path: Path, every: Any, steps: Any, saved: Any) -> None:
    """With a number of steps a save comes at each multiple, also when it is stepped over."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=every, keep_last=9) as manager:
        found = []
        for step in steps:
            checkpoint = manager.end_step(step, loss=0.5)
            assert manager.step == step
            if checkpoint is not None:
                assert checkpoint.step == step
                found.append(step)
        assert found == saved
        assert [checkpoint.step for checkpoint in manager.checkpoints()] == saved


def test_save_by_hand_counts(tmp_path: Path) -> None:
    """A checkpoint that was saved by hand at a multiple is not asked for again, one before it changes nothing."""
    with manager_of(tmp_path, Marked(), save_every=5, keep_last=9) as manager:
        manager.save(4)
        assert manager.end_step(5) is not None
        manager.end_step(9)
        manager.save(10)
        assert manager.end_step(11) is None
        assert manager.end_step(15) is not None
    assert steps_in(tmp_path) == [4, 5, 10, 15]


@pytest.mark.parametrize("every", [1, 2])
def test_checkpoint_saved_by_hand_has_the_loss_of_its_step(tmp_path: Path, every: int) -> None:
    """What end_step was told need not be said again, whether or not it has saved; what is said counts, step by step."""
    with manager_of(tmp_path, Marked(), save_every=every, keep_last=9) as manager:
        manager.end_step(1, loss=0.5)
        assert manager.save(1, metrics={"val": 0.25}).loss == 0.5
        manager.end_step(3, loss=0.75, save=False)
        assert manager.save(3, loss=0.125).loss == 0.125
        assert manager.save(4).loss is None
    assert [one.loss for one in manager.checkpoints()] == [0.5, 0.125, None]


def test_restored_step_counts(tmp_path: Path) -> None:
    """After a restore the next multiple above its step is due, not one that lies behind."""
    save_steps(tmp_path, 17)
    with manager_of(tmp_path, Marked(), save_every=10) as manager:
        manager.restore()
        assert manager.end_step(18) is None
        assert manager.end_step(20) is not None


def test_save_that_failed_is_due_again(tmp_path: Path) -> None:
    """A save that the disk refused is tried at the next step, not a whole interval later."""
    with manager_of(tmp_path, Marked(), save_every=5) as manager:
        fault = Fault(1, errno.ENOSPC, {"sync"})
        with intercept(fault), pytest.raises(OSError, match="No space"):
            manager.end_step(5)
        assert fault.fired is not None
        assert checkpoint_files(tmp_path) == {}
        assert manager.step == 5  # it was trained, whatever the disk says
        assert manager.end_step(6) is not None
        assert manager.end_step(7) is None
        assert steps_in(tmp_path) == [6]


def test_time_since_the_last_save_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timedelta a save comes at the first step after that time since the last save, restore or start."""
    now = [1000.0]
    monkeypatch.setattr("safeckpt.run.schedule.time.monotonic", lambda: now[0])
    run = Marked()
    with manager_of(tmp_path, run, save_every=dt.timedelta(minutes=1), keep_last=9) as manager:
        for step, seconds, due in [(1, 59.9, False), (2, 0.2, True), (3, 59, False), (4, 300, True), (5, 10, False)]:
            now[0] += seconds
            assert (manager.end_step(step) is not None) == due
        now[0] += 55
        manager.save(6)
        now[0] += 55
        assert manager.end_step(7) is None
        now[0] += 5
        assert manager.end_step(8) is not None
        now[0] += 59
        manager.restore()
        now[0] += 59
        assert manager.end_step(9) is None


# -- steps and losses ------------------------------------------------------------------------------------------------


def test_steps_rise_from_call_to_call(tmp_path: Path) -> None:
    """A step that was ended, saved or restored cannot be ended again; one that was ended can be saved."""
    save_steps(tmp_path, 3)
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore()
        for step in (3, 1):
            with pytest.raises(ValueError, match=f"step {step} is not higher than step 3"):
                manager.end_step(step)
        manager.end_step(5)
        with pytest.raises(ValueError, match="step 5 is not higher than step 5"):
            manager.end_step(5)
        with pytest.raises(ValueError, match="step 4 is lower than step 5"):
            manager.save(4)
        manager.save(5)
        with pytest.raises(ValueError, match="not higher"):
            manager.end_step(5)
        manager.end_step(6)


def test_step_zero_can_be_ended_once(tmp_path: Path) -> None:
    """Step 0 is a step like any other: it can be ended first, and not twice."""
    with manager_of(tmp_path, Marked()) as manager:
        manager.end_step(0)
        with pytest.raises(ValueError, match="step 0 is not higher than step 0"):
            manager.end_step(0)
        manager.end_step(1)


@pytest.mark.parametrize("loss", [math.nan, torch.tensor(math.inf), {"aux": -math.inf}])
@pytest.mark.parametrize("due", [False, True])
def test_bad_loss_is_refused_also_when_no_save_is_due(tmp_path: Path, loss: Any, due: bool) -> None:
    """A loss that is not finite raises at its own step, writes no checkpoint, and the step does not count."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=1 if due else 100) as manager:
        manager.save(1)
        before = checkpoint_files(tmp_path)
        with pytest.raises(safeckpt.NonFiniteError) as caught:
            manager.end_step(2, loss=loss)
        assert caught.value.step == 2
        assert caught.value.loss is not None
        assert manager.step == 1
        assert checkpoint_files(tmp_path) == before
        assert [event["step"] for event in events_in(tmp_path, "refused")] == [2]
        manager.end_step(2, loss=0.5)


def test_bad_weights_are_refused_when_a_save_is_due(tmp_path: Path) -> None:
    """The weights are looked at when a save is due: the refusal comes from there, and is repeated until it is over."""
    run = Marked()
    with manager_of(tmp_path, run, save_every=3) as manager:
        manager.end_step(1, loss=0.5)
        run.poison()
        manager.end_step(2, loss=0.5)
        for step in (3, 4):
            with pytest.raises(safeckpt.NonFiniteError) as caught:
                manager.end_step(step, loss=0.5)
            assert [tensor.name for tensor in caught.value.tensors] == ["model.value"]
        run.step = 5
        assert manager.end_step(5, loss=0.5) is not None


@pytest.mark.parametrize("metrics", [3, {"a": "0.5"}, {"a": None}, {3: 0.5}, {"a": torch.ones(2)}, {"a": 1j}, [0.5]])
def test_metrics_that_are_none_are_refused_at_once(tmp_path: Path, metrics: Any) -> None:
    """What is no mapping from name to number is a TypeError, whether a save is due or not, and nothing is written."""
    with manager_of(tmp_path, Marked()) as manager:
        for call in (manager.end_step, manager.save):
            with pytest.raises(TypeError, match="metrics"):
                call(1, metrics=metrics)
        assert manager.step == 0
    assert contents(tmp_path) == {}


def test_metrics_of_many_kinds_become_floats(tmp_path: Path) -> None:
    """Numbers, NumPy scalars and one-element tensors are metrics."""
    metrics = {"a": 1, "b": torch.tensor([0.5]), "c": True, "d": torch.tensor(2, dtype=torch.int8)}
    with manager_of(tmp_path, Marked(), save_every=1) as manager:
        checkpoint = manager.end_step(1, metrics=metrics)
        assert checkpoint is not None
        assert checkpoint.metrics == {"a": 1.0, "b": 0.5, "c": 1.0, "d": 2.0}
        assert all(type(value) is float for value in checkpoint.metrics.values())


# -- signals ---------------------------------------------------------------------------------------------------------


def _train_until_stopped(connection: Connection, path: Path) -> tuple[int | None, bool, str]:
    run = Marked()
    signals = (signal.SIGTERM, signal.SIGUSR1)
    with manager_of(path, run, save_every=1000, stop_signals=signals) as manager:
        for step in range(1, 10_000):
            run.step = step
            checkpoint = manager.end_step(step, loss=0.5)
            connection.send(step)
            connection.recv()
            if manager.stop_requested:
                saved = None if checkpoint is None else checkpoint.step
                if saved is not None:
                    break
    return saved, manager.stop_requested, str(signal.getsignal(signal.SIGTERM))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_real_signal_saves_at_the_next_step(tmp_path: Path, number: int) -> None:
    """SIGTERM or SIGUSR1 from outside is honoured at the next step boundary: a checkpoint, and the flag is set."""
    with children.Child(_train_until_stopped, tmp_path) as child:
        for step in (1, 2):
            assert child.receive() == step
            if step == 2:
                child.signal(number)
            child.connection.send("go on")
        assert child.receive() == 3
        child.connection.send("go on")
        ended = child.ended()
    assert ended.error is None
    assert ended.signal is None
    assert ended.value == (3, True, str(signal.SIG_DFL))
    assert steps_in(tmp_path) == [3]
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.restore()
    assert run.step == 3


def _poisoned_when_stopped(path: Path) -> tuple[bool, bool]:
    run = Marked()
    with manager_of(path, run, stop_signals=[signal.SIGUSR1]) as manager:
        manager.save(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        run.poison()
        try:
            manager.end_step(2)
        except safeckpt.NonFiniteError:
            return True, manager.stop_requested
    return False, manager.stop_requested


def test_checkpoint_of_a_stop_passes_the_same_guard(tmp_path: Path) -> None:
    """A run that is asked to stop with NaN in its weights saves nothing and says so."""
    assert children.run(_poisoned_when_stopped, tmp_path).value == (True, True)
    assert steps_in(tmp_path) == [1]


def _without_signals(path: Path) -> None:
    with manager_of(path, Marked()):
        os.kill(os.getpid(), signal.SIGTERM)


def test_signals_are_left_alone_unless_asked_for(tmp_path: Path) -> None:
    """A manager without `stop_signals` changes no handler: SIGTERM kills as always."""
    assert children.run(_without_signals, tmp_path).signal == signal.SIGTERM


def _after_close(path: Path, order: str) -> str:
    managers = [manager_of(path / str(n), Marked(), stop_signals=[signal.SIGTERM]) for n in range(2)]
    os.kill(os.getpid(), signal.SIGTERM)
    assert all(manager.stop_requested for manager in managers)
    for manager in managers if order == "first in first out" else reversed(managers):
        manager.close()
    os.kill(os.getpid(), signal.SIGTERM)
    return "survived"


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
def test_signal_kills_again_after_close(tmp_path: Path, order: str) -> None:
    """Two managers both hear a signal; when both are closed, in either order, SIGTERM ends the process again."""
    ended = children.run(_after_close, tmp_path, order)
    assert ended.signal == signal.SIGTERM


def _with_handler(path: Path) -> list[str]:
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("theirs"))
    with manager_of(path, Marked(), stop_signals=[signal.SIGUSR1]) as manager:
        os.kill(os.getpid(), signal.SIGUSR1)
        heard.append(f"ours {manager.stop_requested}")
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with manager_of(path, Marked(), stop_signals=[signal.SIGUSR1]):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    return heard


def test_handler_that_was_there_before_still_hears_the_signal(tmp_path: Path) -> None:
    """A handler of the caller's runs as well, and is the only one again after `close`."""
    assert children.run(_with_handler, tmp_path).value == ["theirs", "ours True", "theirs"]


def _fork_while_listening(path: Path) -> int:
    with manager_of(path, Marked(), stop_signals=[signal.SIGTERM]) as manager:
        pid = os.fork()
        if pid == 0:  # a worker process that a pool ends with SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert not manager.stop_requested
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_forked_worker_dies_of_the_signal_as_before(tmp_path: Path) -> None:
    """A process forked from the training run, such as a loader's worker, is ended by SIGTERM like any other."""
    assert children.run(_fork_while_listening, tmp_path).value == signal.SIGTERM


@pytest.mark.parametrize(
    ("signals", "error"),
    [
        (signal.SIGTERM, TypeError),
        ("SIGTERM", TypeError),
        (["SIGTERM"], TypeError),
        ([9999], ValueError),
        ([0], ValueError),
        ([signal.SIGUSR1, signal.SIGKILL], ValueError),
        ([signal.SIGUSR1, signal.SIGSTOP], ValueError),
        ([True], TypeError),
    ],
    ids=str,
)
def test_signals_that_are_none_are_refused_and_no_handler_stays(tmp_path: Path, signals: Any, error: Any) -> None:
    """What is no signal, or none that can be handled, is refused with an example, and every handler is as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with pytest.raises(error, match=r"stop_signals.*signal\.SIGTERM"):
        manager_of(tmp_path, Marked(), stop_signals=signals)
    assert {number: signal.getsignal(number) for number in before} == before


def test_signals_outside_the_main_thread_are_refused(tmp_path: Path) -> None:
    """Python allows handlers only in the main thread; elsewhere the error says so and no manager is built."""
    found: list[BaseException] = []

    def build() -> None:
        try:
            manager_of(tmp_path, Marked(), stop_signals=[signal.SIGUSR1])
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert sys.version_info >= (3, 11)
