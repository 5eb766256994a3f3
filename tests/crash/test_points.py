"""A run that is killed, interrupted or refused at any operation of its store loses nothing and can go on."""

from __future__ import annotations

import errno
import faulthandler
import random
import resource
import signal
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import safeckpt
from tests import children
from tests.crash.stories import STORIES, check_afterwards
from tests.faults import Fault, Interrupt, Kill, LineInterrupt, contents, descriptor_count, intercept
from tests.manager.helpers import checkpoint_files, manager_of, step_path, steps_in, temps_in
from tests.training import Marked


def _die(name: str, path: Path, number: int, when: str) -> None:
    story = STORIES[name]
    manager, run = story.manager(path)
    story.ready(manager, run)
    with intercept(Kill(number, when)):
        story.retold(manager, run)


@pytest.mark.parametrize(
    "name",
    ["first", *(pytest.param(name, marks=pytest.mark.slow) for name in ("save and prune", "rollback", "rewind"))],
)
def test_kill_at_any_operation_leaves_the_old_state_or_the_new(memory_path: Path, name: str) -> None:
    """SIGKILL before any operation (after the one before it) and after the last: the next process goes on.

    It restores the old state or the new one, bit for bit, and saves on top of it.
    """
    story = STORIES[name]
    operations, promise = story.operations(story.fresh(memory_path, "recorded"))
    points = [(number, "before") for number in range(1, len(operations) + 1)]
    points.append((max(number for number, (_, well) in enumerate(operations, 1) if well), "after"))
    found = []
    for index, (number, when) in enumerate(points):
        path = story.fresh(memory_path, index)
        assert children.run(_die, name, path, number, when).signal == signal.SIGKILL
        allowed = promise.after(number - 1 if when == "before" else len(operations))
        found.append(check_afterwards(path, story, allowed, {}))
    assert set(found) == promise.ever
    assert {found[-1]} == promise.after(len(operations))


ERRNOS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS]


@pytest.mark.parametrize("name", ["save and prune", "rewind"])
def test_error_at_any_operation_is_reported_and_the_run_goes_on(memory_path: Path, name: str) -> None:
    """Whichever operation fails, with whatever errno: the error has it or it is a warning, and the next save works.

    A checkpoint is lost in no case, and the manager that met the error is the one that saves next.
    """
    story = STORIES[name]
    operations, _ = story.operations(story.fresh(memory_path, "recorded"))
    raised_at = set()
    for number, (kind, _) in enumerate(operations, 1):
        path = story.fresh(memory_path, number)
        manager, run = story.manager(path)
        error = ERRNOS[number % len(ERRNOS)]
        fault = Fault(number, error)
        descriptors = descriptor_count()
        with manager:
            story.ready(manager, run)
            before = checkpoint_files(path)
            problem = None
            with warnings.catch_warnings(record=True) as caught, intercept(fault):
                warnings.simplefilter("always")
                try:
                    story.retold(manager, run)
                except OSError as failure:
                    problem = failure
            assert fault.fired is not None
            assert fault.fired.kind == kind
            assert temps_in(path) == []
            assert all(issubclass(warning.category, safeckpt.SafeckptWarning) for warning in caught)
            if problem is not None:
                raised_at.add(kind)
                assert problem.errno == error
                assert str(path) in str(problem) or kind == "sync_directory"
                assert set(before.values()) <= set(checkpoint_files(path).values())
            assert isinstance(problem, safeckpt.DurabilityUnknownError) <= (kind == "sync_directory")
            run.step = 60
            manager.save(60)
            fresh_run = story.manager(path)[1]
        with manager_of(path, fresh_run) as again:
            again.restore()
        assert fresh_run.step == 60
        assert descriptor_count() <= descriptors
    assert {"create", "write", "sync", "replace", "sync_directory"} <= raised_at
    assert "append" not in raised_at
    assert name == "rewind" or "unlink" not in raised_at


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_at_any_operation_leaves_a_manager_that_goes_on(memory_path: Path, when: str) -> None:
    """Ctrl-C at any operation comes out as itself; the same manager knows what is saved, and saves the next step."""
    story = STORIES["save and prune"]
    operations, _ = story.operations(story.fresh(memory_path, "recorded"))
    for number, (_, well) in enumerate(operations, 1):
        if when == "after" and not well:
            continue
        path = story.fresh(memory_path, number)
        manager, run = story.manager(path)
        with manager:
            story.ready(manager, run)
            with warnings.catch_warnings(), intercept(Interrupt(number, when)):
                warnings.simplefilter("ignore", ResourceWarning)  # the fault drops files that are open already
                with pytest.raises(KeyboardInterrupt):
                    story.retold(manager, run)
            assert temps_in(path) == []
            assert max(steps_in(path)) in (3, 4)
            assert manager.step == max(steps_in(path))
            run.step = 60
            manager.save(60)
            assert steps_in(path)[-1] == 60
            assert manager.latest() is not None


PACKAGE = Path(safeckpt.__file__).parent


def _interrupt_lines(path: Path, part: str, stride: int) -> tuple[int, list[str]]:
    """Interrupt a save at every stride-th line of a part of the package; return the lines and what went wrong."""
    if stride == 1:
        faulthandler.cancel_dump_traceback_later()  # this takes an hour
    run = Marked()
    wrong = []
    fired, number, step = True, 1, 0
    with manager_of(path, run, keep_last=2) as manager:
        while fired:
            step += 2
            manager.save(step - 1)  # so that every round finds as many files, and runs through the same lines
            run.step = step
            interrupt = LineInterrupt(number, PACKAGE / part)
            outcome = "no interrupt"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                try:
                    with interrupt:
                        manager.save(step)
                except KeyboardInterrupt:
                    outcome = "interrupted"
                except BaseException as error:
                    outcome = repr(error)
            fired = interrupt.fired
            if outcome != ("interrupted" if fired else "no interrupt") or temps_in(path) or run.step != step:
                wrong.append(f"line event {number}: {outcome}, {temps_in(path)}, state of step {run.step}")
            newest = manager.latest()
            if newest is None or newest.step != manager.step:
                wrong.append(f"line event {number}: {newest} while the manager is at step {manager.step}")
            number += stride
    return number, wrong


@pytest.mark.parametrize(
    ("part", "stride"),
    [
        pytest.param("run", 7, marks=pytest.mark.slow),
        ("store", 11),
        pytest.param("state", 199, marks=pytest.mark.slow),
        pytest.param("", 1, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)]),
    ],
)
def test_interrupt_at_lines_of_a_managers_save_is_survived(memory_path: Path, part: str, stride: int) -> None:
    """Ctrl-C at lines all over a save surfaces as itself, and the same manager saves the next step."""
    ended = children.run(_interrupt_lines, memory_path, part, stride)
    assert ended.signal is None
    assert ended.error is None
    count, wrong = ended.value
    assert wrong == []
    assert count > max(50, 5 * stride)


def _save_under_limits(path: Path, limits: list[int]) -> list[int | None]:
    run = Marked()
    found: list[int | None] = []
    with manager_of(path, run) as manager:
        manager.restore()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for number, limit in enumerate(limits):
            run.step = 2 + number
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                manager.save(2 + number)
                found.append(None)
            except OSError as error:
                found.append(error.errno)
    return found


def test_full_disk_stops_no_run(tmp_path: Path) -> None:
    """A real file-size limit is an EFBIG from each save and old files stay; once there is room the run saves on."""
    with manager_of(tmp_path, Marked()) as manager:
        size = manager.save(1).size_bytes
    before = checkpoint_files(tmp_path)
    limits = [size // 9, size // 2, size - 1]
    ended = children.run(_save_under_limits, tmp_path, limits)
    assert ended.error is None
    assert ended.value == [errno.EFBIG] * 3
    assert checkpoint_files(tmp_path) == before
    assert children.run(_save_under_limits, tmp_path, [*limits, 2 * size]).value == [errno.EFBIG] * 3 + [None]
    assert steps_in(tmp_path) == [1, 5]


# -- at random moments -----------------------------------------------------------------------------------------------


class Large(Marked):
    """A state whose write takes long enough to be hit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.register_buffer("large", torch.zeros(300_000))


def _save_for_ever(connection: Connection, path: Path) -> None:
    run = Large()
    with manager_of(path, run, keep_last=2) as manager:
        manager.restore()
        for step in range(manager.step + 1, 10**6):
            run.step = step
            run.weight.large.fill_(step)
            connection.send(manager.save(step).step)


def _kill_at_random(path: Path, rounds: int, seed: int) -> dict[str, int]:
    """Kill a saving process again and again; return how often which trace was found."""
    moments = random.Random(seed)
    traces = {"temporary file": 0, "unacknowledged": 0}
    acknowledged = 0
    for _ in range(rounds):
        with children.Child(_save_for_ever, path) as child:
            for _ in range(moments.randrange(1, 4)):
                acknowledged = child.receive()
            if child.connection.poll(moments.random() * 0.06):
                acknowledged = child.receive()
            child.kill()
            try:
                while True:
                    acknowledged = child.receive()
            except EOFError:
                pass
        traces["temporary file"] += bool(temps_in(path))
        run = Large()
        with manager_of(path, run) as manager:
            restored = manager.restore()  # a file that is not good would be a warning, which is an error here
        assert restored is not None
        assert restored.step == run.step
        assert restored.step - acknowledged in (0, 1)
        assert run.weight.large.eq(run.step).all()
        traces["unacknowledged"] += restored.step - acknowledged
    return traces


@pytest.mark.slow
def test_kill_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """Thirty times SIGKILL at some moment: what was acknowledged is there, nothing is half, every process goes on."""
    _kill_at_random(tmp_path, 30, seed=1)
    with manager_of(tmp_path, Large()) as manager:
        manager.restore()
        manager.save(10**6)
        assert temps_in(tmp_path) == []
        assert len(manager.checkpoints()) == len(steps_in(tmp_path))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_kill_at_very_many_random_moments_loses_nothing(tmp_path: Path, seed: int) -> None:
    """Three thousand times SIGKILL at some moment; some of them leave a temporary file, none a wrong checkpoint."""
    traces = _kill_at_random(tmp_path, 300, seed)
    assert traces["temporary file"] > 0
    assert step_path(tmp_path, max(steps_in(tmp_path))).exists()
    assert contents(tmp_path)
