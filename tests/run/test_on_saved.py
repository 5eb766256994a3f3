"""`on_saved`: called after each commit, in order, in a thread, and never in the way of training."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

import safeckpt
from tests.manager.helpers import manager_of, steps_in
from tests.training import Marked


@pytest.mark.parametrize("asynchronous", [False, True])
def test_on_saved_is_called_with_each_committed_checkpoint_in_order(tmp_path: Path, *, asynchronous: bool) -> None:
    """Every commit is told of once, when the file is there, in another thread than the training loop's."""
    seen: list[tuple[int, bool, bool]] = []

    def note(checkpoint: safeckpt.Checkpoint) -> None:
        is_other = threading.current_thread() is not threading.main_thread()
        seen.append((checkpoint.step, checkpoint.path.stat().st_size == checkpoint.size_bytes, is_other))

    with manager_of(tmp_path, Marked(), on_saved=note, async_save=asynchronous, keep_last=9) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    assert seen == [(step, True, True) for step in (1, 2, 3)]


def test_on_saved_that_fails_is_a_warning_and_the_next_call_is_made(tmp_path: Path) -> None:
    """What the caller's function raises names the checkpoint, and neither save nor later calls are affected."""
    seen: list[int] = []

    def fail(checkpoint: safeckpt.Checkpoint) -> None:
        seen.append(checkpoint.step)
        raise KeyError("no such artifact")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with manager_of(tmp_path, Marked(), on_saved=fail) as manager:
            manager.save(1)
            manager.save(2)
    assert seen == steps_in(tmp_path) == [1, 2]
    texts = [str(one.message) for one in caught if one.category is safeckpt.SafeckptWarning]
    assert [text.partition(".")[0] for text in texts] == [f"on_saved failed for step-0000000{step}" for step in seen]
    assert all("KeyError: 'no such artifact'" in text for text in texts)


def test_failed_on_saved_is_raised_at_close_where_warnings_are_errors(tmp_path: Path) -> None:
    """A warning that is an error in a thread would be lost there: `close` raises it, with every checkpoint saved."""

    def fail(_: safeckpt.Checkpoint) -> None:
        raise OSError(5, "no space in the other place")

    manager = manager_of(tmp_path, Marked(), on_saved=fail)
    manager.save(1)
    with pytest.raises(safeckpt.SafeckptWarning, match="no space in the other place"):
        manager.close()
    assert steps_in(tmp_path) == [1]


def test_slow_on_saved_does_not_hold_up_saves_and_close_waits_for_it(tmp_path: Path) -> None:
    """Saves go on while the first call has not returned; at `close` all calls have been made."""
    go_on = threading.Event()
    seen: list[int] = []

    def wait(checkpoint: safeckpt.Checkpoint) -> None:
        assert go_on.wait(60)
        seen.append(checkpoint.step)

    with manager_of(tmp_path, Marked(), on_saved=wait) as manager:
        for step in (1, 2, 3):
            manager.save(step)
        assert seen == []
        go_on.set()
    assert seen == [1, 2, 3]


def test_refused_save_is_not_told(tmp_path: Path) -> None:
    """What is not committed is no checkpoint."""
    seen: list[safeckpt.Checkpoint] = []
    run = Marked()
    with manager_of(tmp_path, run, on_saved=seen.append) as manager:
        run.poison()
        with pytest.raises(safeckpt.NonFiniteError):
            manager.save(1)
    assert seen == []
