"""The record of losses."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from safeckpt.errors import SafeckptWarning
from safeckpt.store import LossLog, losses
from tests.faults import Fault, Recorder, contents, descriptor_count, intercept, names_in

if TYPE_CHECKING:
    from pathlib import Path


def value_of(step: int) -> str:
    return (1.0 / (step + 1)).hex()


@pytest.fixture
def log(tmp_path: Path) -> LossLog:
    return LossLog(tmp_path / "losses.log")


def test_losses_are_read_back_by_step(log: LossLog) -> None:
    """What was appended, in this object or in an earlier one, is read back above the step that is asked for."""
    assert log.read(-1) == {}
    assert log.append([(1, "0x1.8p+1"), (2, "0x1p+0,-0x0.0p+0")])
    log.close()
    assert LossLog(log.path).append([(3, "0x0.0p+0")])
    assert log.read(-1) == {1: "0x1.8p+1", 2: "0x1p+0,-0x0.0p+0", 3: "0x0.0p+0"}
    assert log.read(2) == {3: "0x0.0p+0"}


def test_many_losses_are_one_write_to_an_open_file(log: LossLog) -> None:
    """Appending opens the file once and then is one operation for any number of lines."""
    recorder = Recorder()
    with intercept(recorder):
        for start in range(0, 100, 50):
            log.append((step, value_of(step)) for step in range(start, start + 50))
    assert recorder.kinds == ["open_append", "append", "append"]
    assert len(log.read(-1)) == 100


def test_later_line_of_a_step_counts(log: LossLog) -> None:
    """A step that was computed again has its newest loss."""
    log.append([(1, "0x1p+0"), (2, "0x1p+1"), (1, "0x1p+2")])
    assert log.read(-1) == {1: "0x1p+2", 2: "0x1p+1"}


def test_left_timeline_is_forgotten_from_its_step_on(log: LossLog) -> None:
    """After `back_to` the earlier losses above that step are gone, later ones count."""
    log.append((step, value_of(step)) for step in range(10))
    log.back_to(4)
    log.append([(7, "0x1p+3")])
    assert log.read(2) == {3: value_of(3), 4: value_of(4), 7: "0x1p+3"}


def test_timelines_that_were_left_are_told_apart(log: LossLog) -> None:
    """What no longer counts is there for a picture, one part for each time that the run went back."""
    log.append((step, f"a{step}") for step in range(1, 8))
    log.back_to(5)
    log.append((step, f"b{step}") for step in range(6, 10))
    log.back_to(3)
    log.append((step, f"c{step}") for step in range(4, 6))
    log.append([(5, "c5"), (4, "d4")])  # computed again without going back, the second one with another loss
    current, left = log.timelines()
    assert list(current.items()) == [(1, "a1"), (2, "a2"), (3, "a3"), (4, "d4"), (5, "c5")]
    assert left == [
        {step: f"a{step}" for step in range(4, 8)},
        {step: f"b{step}" for step in range(6, 10)},
        {4: "c4"},
    ]
    assert log.read(-1) == current
    assert LossLog(log.path.with_name("none")).timelines() == ({}, [])


def test_record_cut_anywhere_gives_no_wrong_loss(log: LossLog) -> None:
    """A record cut at any byte gives the losses of its whole lines, and goes on after the cut."""
    log.append((step, value_of(step)) for step in range(4))
    log.close()
    whole = log.path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        log.path.write_bytes(whole[:cut])
        log.append([(9, "0x1p+0")])
        log.close()
        # A line that lacks nothing but its newline is whole.
        lines = sum(1 for end in ends if end - 1 <= cut)
        assert log.read(-1) == {step: value_of(step) for step in range(lines)} | {9: "0x1p+0"}


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_gives_no_wrong_loss(log: LossLog, bit: int) -> None:
    """A damaged line is passed over, whichever of its bits has flipped."""
    log.append((step, value_of(step)) for step in range(3))
    log.close()
    whole = log.path.read_bytes()
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << bit
        log.path.write_bytes(damaged)
        for step, value in log.read(-1).items():
            assert value == value_of(step)


def test_record_of_ten_million_steps_stays_small(log: LossLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred times as many steps as fit leave a file below its limit, with the newest losses in it."""
    monkeypatch.setattr(losses, "_MOST_BYTES", 4000)
    steps = 20_000
    largest = 0
    for start in range(0, steps, 50):
        if log.is_long:
            log.shorten()
        log.append((10_000_000 - steps + step, value_of(step)) for step in range(start, start + 50))
        largest = max(largest, log.path.stat().st_size)
    assert largest < 4000 + 50 * 50
    kept = log.read(-1)
    assert len(kept) >= 40
    assert list(kept) == list(range(10_000_000 - len(kept), 10_000_000))
    assert names_in(log.path.parent) == ["losses.log"]


def test_shortened_record_has_forgotten_what_was_left(log: LossLog) -> None:
    """Rewriting the record keeps what it says."""
    log.append((step, value_of(step)) for step in range(10))
    log.back_to(5)
    before = log.read(-1)
    log.shorten()
    assert log.read(-1) == before
    log.append([(6, "0x1p+0")])
    assert log.read(-1) == before | {6: "0x1p+0"}


def test_open_record_does_not_leak_descriptors(log: LossLog) -> None:
    """Closing and shortening give the descriptor back."""
    before = descriptor_count()
    for _ in range(5):
        log.append([(1, "0x1p+0")])
        log.shorten()
        log.append([(2, "0x1p+0")])
        log.close()
    assert descriptor_count() == before


@pytest.mark.parametrize("kind", ["open_append", "append"])
def test_failed_append_is_a_warning_and_the_next_one_works(log: LossLog, kind: str) -> None:
    """A full disk costs the lines and a warning with the reason; what was recorded before stays."""
    log.append([(1, "0x1p+0")])
    log.close()
    before = contents(log.path.parent)
    fault = Fault(1, errno.ENOSPC, {kind})
    with intercept(fault), pytest.warns(SafeckptWarning, match=os.strerror(errno.ENOSPC)):
        assert not log.append([(2, "0x1p+1")])
    assert fault.fired is not None
    assert contents(log.path.parent) == before
    assert log.append([(3, "0x1p+2")])
    assert log.read(-1) == {1: "0x1p+0", 3: "0x1p+2"}
