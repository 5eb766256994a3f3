"""`stop_before`: a run that stops by itself before its time is over, as a stop signal stops it."""

from __future__ import annotations

import datetime as dt
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt.run.stop_time import StopTime
from tests import children
from tests.faults import Operation, contents, intercept
from tests.manager.helpers import manager_of, steps_in
from tests.training import Marked

HOUR = 3600.0
_VARIABLES = ("SLURM_JOB_END_TIME", "CI_JOB_STARTED_AT", "CI_JOB_TIMEOUT")


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


def in_seconds(seconds: float) -> dt.datetime:
    return dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds)


def train(path: Path, steps: int, **options: Any) -> tuple[int, list[int]]:
    """Train until the manager says stop; return the last step and those that `end_step` has saved."""
    run, saved = Marked(), []
    with manager_of(path, run, save_on_exit=False, **options) as manager:
        for step in range(1, steps + 1):
            run.step = step
            if manager.end_step(step, loss=0.5) is not None:
                saved.append(step)
            if manager.stop_requested:
                break
    return step, saved


# -- whose time it is ------------------------------------------------------------------------------------------------


def test_time_that_is_over_stops_after_the_first_step(tmp_path: Path) -> None:
    """The step is trained, saved, and the loop told to leave."""
    assert train(tmp_path, 5, stop_before=in_seconds(-10)) == (1, [1])
    assert steps_in(tmp_path) == [1]


def test_time_that_is_far_away_stops_nothing(tmp_path: Path) -> None:
    """Nothing is saved but what is due."""
    assert train(tmp_path, 6, stop_before=in_seconds(HOUR), save_every=4) == (6, [4])


@pytest.mark.parametrize(("left", "stops"), [(10 * HOUR, False), (HOUR, True), (-HOUR, True)])
def test_end_of_a_slurm_job_less_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, *, stops: bool
) -> None:
    """`SLURM_JOB_END_TIME` is in seconds since 1970; a timedelta is taken off it."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left)))
    assert train(tmp_path, 3, stop_before=dt.timedelta(hours=2)) == ((1, [1]) if stops else (3, []))


@pytest.mark.parametrize(("seconds", "stops"), [(10 * HOUR, False), (HOUR, True)])
def test_end_of_a_gitlab_job_less_the_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, *, stops: bool
) -> None:
    """GitLab tells the start and the limit."""
    monkeypatch.setenv("CI_JOB_STARTED_AT", in_seconds(0).strftime("%Y-%m-%dT%H:%M:%SZ"))
    monkeypatch.setenv("CI_JOB_TIMEOUT", str(int(seconds)))
    assert train(tmp_path, 3, stop_before=dt.timedelta(hours=2)) == ((1, [1]) if stops else (3, []))


def test_datetime_is_the_end_whatever_a_scheduler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be told to end before its allocation does."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 10 * HOUR)))
    assert train(tmp_path, 3, stop_before=in_seconds(-1)) == (1, [1])


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "environment", "error", "text"),
    [
        (dt.timedelta(minutes=5), {}, ValueError, r"nothing tells.*SLURM_JOB_END_TIME.*datetime"),
        (dt.timedelta(minutes=5), {"CI_JOB_TIMEOUT": "60"}, ValueError, "nothing tells"),
        (dt.timedelta(minutes=5), {"SLURM_JOB_END_TIME": "nan"}, ValueError, "SLURM_JOB_END_TIME='nan'"),
        (dt.timedelta(minutes=5), {"SLURM_JOB_END_TIME": "soon"}, ValueError, "SLURM_JOB_END_TIME='soon'.*datetime"),
        (
            dt.timedelta(minutes=5),
            {"CI_JOB_STARTED_AT": "2026-01-01T00:00:00", "CI_JOB_TIMEOUT": "60"},
            ValueError,
            "CI_JOB_STARTED_AT='2026-01-01T00:00:00'",
        ),
        (dt.timedelta(seconds=-1), {"SLURM_JOB_END_TIME": "0"}, ValueError, "0 or more"),
        (dt.datetime(2026, 1, 1), {}, ValueError, "no time zone"),  # noqa: DTZ001 - the mistake
        (300, {}, TypeError, "must be a timedelta"),
        ("08:00", {}, TypeError, "must be a timedelta"),
    ],
)
def test_end_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, value: Any, environment: dict[str, str], error: Any, text: str
) -> None:
    """At construction, with what to write; no handler and no file stays."""
    for name, told in environment.items():
        monkeypatch.setenv(name, told)
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(error, match=text):
        manager_of(tmp_path, Marked(), stop_before=value, stop_signals=[signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before
    assert contents(tmp_path) == {}


# -- what is taken off ------------------------------------------------------------------------------------------------


def test_what_takes_longer_than_is_left_is_not_begun() -> None:
    """And once it is said, it stays said, whatever becomes of the clock."""
    stop = StopTime(in_seconds(HOUR))
    assert not stop.is_reached(60)
    assert not stop.reached
    assert stop.is_reached(2 * HOUR)
    assert stop.reached
    assert stop.is_reached(0)


def test_without_an_end_nothing_is_too_long() -> None:
    """None is no limit."""
    assert not StopTime(None).is_reached(1e12)


class _Slow:
    """Makes the sync of a file take a while."""

    seconds = 0.2

    def __call__(self, operation: Operation, call: Any) -> Any:
        if operation.kind == "sync":
            time.sleep(self.seconds)
        return call()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_longest_save_until_it_is_durable_is_taken_off(tmp_path: Path, *, asynchronous: bool) -> None:
    """A thread's work counts as well; a shorter save after it does not make it shorter."""
    run = Marked()
    with manager_of(tmp_path, run, async_save=asynchronous, stop_before=in_seconds(HOUR)) as manager:
        asked: list[float] = []
        manager._stop_request._time.is_reached = lambda seconds: asked.append(seconds) or False  # type: ignore[assignment,func-returns-value]
        with intercept(_Slow()):
            manager.save(1)
            manager.wait()
        run.step = 2
        manager.save(2)
        manager.wait()
        run.step = 3
        manager.end_step(3)
    assert min(asked) >= _Slow.seconds


def test_last_step_is_taken_off(tmp_path: Path) -> None:
    """The next one is expected to take as long as the last one did."""
    run = Marked()
    with manager_of(tmp_path, run, stop_before=in_seconds(HOUR)) as manager:
        asked: list[float] = []
        manager._stop_request._time.is_reached = lambda seconds: asked.append(seconds) or False  # type: ignore[assignment,func-returns-value]
        run.step = 1
        manager.end_step(1)
        time.sleep(0.2)
        run.step = 2
        manager.end_step(2)
    assert asked[-1] >= 0.2


# -- real processes ---------------------------------------------------------------------------------------------------


def _train_against_the_clock(path: Path) -> tuple[int, list[int]]:
    run, saved = Marked(), []
    with manager_of(path, run, stop_before=in_seconds(0.5), save_on_exit=False) as manager:
        manager.restore()
        for step in range(manager.step + 1, 1_000_000):
            run.step = step
            time.sleep(0.001)
            if manager.end_step(step, loss=0.5) is not None:
                saved.append(step)
            if manager.stop_requested:
                return step, saved
    return -1, saved


def test_process_stops_by_itself_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """A limit that comes while it trains: the last step is saved, nothing else, and the next process begins there."""
    for _ in range(2):
        before = max(steps_in(tmp_path), default=0) if tmp_path.exists() else 0
        last, saved = children.run(_train_against_the_clock, tmp_path).value
        assert last > before
        assert saved == [last]
        assert max(steps_in(tmp_path)) == last


def test_checkpoint_of_a_time_limit_can_be_owed(tmp_path: Path) -> None:
    """As that of a signal: `end_step(save=False)` owes it, `save_due` pays."""
    run = Marked()
    with manager_of(tmp_path, run, stop_before=in_seconds(-1)) as manager:
        run.step = 1
        assert manager.end_step(1, save=False) is None
        assert manager.is_due
        assert manager.stop_requested
        checkpoint = manager.save_due()
        assert checkpoint is not None
        assert checkpoint.step == 1


def test_checkpoint_of_a_time_limit_passes_the_same_guard(tmp_path: Path) -> None:
    """A run that has to stop with NaN in its weights saves nothing and says so."""
    run = Marked()
    with manager_of(tmp_path, run, stop_before=in_seconds(-1)) as manager:
        run.poison()
        with pytest.raises(safeckpt.NonFiniteError):
            manager.end_step(1, loss=0.5)
        assert manager.stop_requested
        assert steps_in(tmp_path) == []
        run.step = 2
        assert manager.end_step(2, loss=0.5) is not None
