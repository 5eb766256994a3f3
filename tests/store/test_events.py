"""The history of a run."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from safeckpt.errors import SafeckptWarning
from safeckpt.store import EventLog
from tests.faults import Fault, Recorder, contents, descriptor_count, intercept, names_in

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl")


def test_event_is_one_line_with_its_time(log: EventLog) -> None:
    """An event is one JSON object with UTC time, kind and step first, written with one call."""
    recorder = Recorder()
    with intercept(recorder):
        assert log.append("saved", step=7, path="a\nb", seconds=0.5)
    assert recorder.kinds == ["append"]
    line = log.path.read_text()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    record = json.loads(line)
    assert list(record) == ["time", "kind", "step", "path", "seconds"]
    assert (record["kind"], record["step"], record["path"], record["seconds"]) == ("saved", 7, "a\nb", 0.5)
    assert len(record["time"]) == len("2024-01-01T00:00:00.000000Z")
    assert record["time"].endswith("Z")


def test_events_are_read_in_order(log: EventLog) -> None:
    """What was appended is read back, oldest first; without a file there is nothing."""
    assert log.read() == []
    for step in range(5):
        log.append("saved", step=step)
    assert [record["step"] for record in log.read()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_loss_that_is_not_finite_stays_valid_json(log: EventLog, value: float) -> None:
    """A loss that JSON has no word for becomes a string that float reads."""
    log.append("refused", step=1, loss=value, more={"a": [value, (value, 1.0)]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(log.path.read_bytes(), parse_constant=refuse)
    assert repr(float(record["loss"])) == repr(value)
    assert record["more"] == {"a": [str(value), [str(value), 1.0]]}


def test_value_that_json_does_not_know_becomes_text(log: EventLog, tmp_path: Path) -> None:
    """An event is never lost because of what is in it."""
    assert log.append("saved", path=tmp_path, bad="\udcff", kinds={2: {3}}, time="x", kind="y")
    (record,) = log.read()
    assert record["path"] == str(tmp_path)
    assert record["bad"] == "\udcff"
    assert record["kinds"] == {"2": [3]}
    assert record["kind"] == "saved"
    assert record["time"] != "x"


@pytest.mark.parametrize("cut", range(1, 20))
def test_cut_last_line_costs_only_itself(log: EventLog, cut: int) -> None:
    """A line that a crash cut is passed over, and the next event starts on a line of its own."""
    log.append("saved", step=1)
    whole = log.path.read_bytes()
    log.append("saved", step=2)
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    assert [record["step"] for record in log.read()] == ([1, 2] if cut == 1 else [1])
    log.append("saved", step=3)
    assert log.path.read_bytes().startswith(whole)
    assert [record["step"] for record in log.read()] == ([1, 2, 3] if cut == 1 else [1, 3])


def test_garbage_is_passed_over(log: EventLog) -> None:
    """Lines that are not JSON objects are nobody's events."""
    log.path.write_bytes(b'\n{"kind": "saved"}\n[]\n3\n\xff\xfe\n{"kind": "refused"}\nnull\n{"kin')
    assert [record["kind"] for record in log.read()] == ["saved", "refused"]


@pytest.mark.parametrize("levels", [20, 30, 500, 900, 100_000])
def test_deeply_nested_line_is_passed_over(log: EventLog, levels: int) -> None:
    """A line that nests deeper than any of ours is nobody's event, and stops nobody from reading the others."""
    log.append("saved", step=1)
    with log.path.open("ab") as file:
        file.write(b'{"kind": ' + b"[" * levels + b"]" * levels + b"}\n")
        file.write(b'{"kind": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b"}\n")
    log.append("saved", step=2)
    assert [record["step"] for record in log.read()] == [1, 2]


def test_deeply_nested_loss_is_cut(log: EventLog) -> None:
    """A loss nested thousands of levels deep costs its inner levels and not the event; nineteen levels are kept."""
    loss: object = 0.5
    for _ in range(18):
        loss = [loss]
    kept = loss
    for _ in range(5000):
        loss = [loss]
    assert log.append("saved", step=1, loss=loss, kept=kept)
    (record,) = log.read()
    assert record["kept"] == kept
    assert "..." in str(record["loss"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE])
def test_event_that_cannot_be_written_is_a_warning(log: EventLog, number: int) -> None:
    """A full or broken disk costs the event and a warning, and the next event is written."""
    log.append("saved", step=1)
    before = contents(log.path.parent)
    fault = Fault(1, number, {"append"})
    with intercept(fault), pytest.warns(SafeckptWarning, match=os.strerror(number)):
        assert not log.append("saved", step=2)
    assert fault.fired is not None
    assert contents(log.path.parent) == before
    assert log.append("saved", step=3)
    assert [record["step"] for record in log.read()] == [1, 3]


def test_half_written_event_is_a_warning(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk takes only a part of the line the event counts as not written, and the next one is whole."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:9]))
    with pytest.warns(SafeckptWarning, match="only a part"):
        assert not log.append("saved", step=1)
    monkeypatch.undo()
    assert log.append("saved", step=2)
    assert [record["step"] for record in log.read()] == [2]


def test_missing_directory_is_a_warning(tmp_path: Path) -> None:
    """No directory is made for an event."""
    with pytest.warns(SafeckptWarning, match="No such file"):
        assert not EventLog(tmp_path / "no" / "events.jsonl").append("saved")
    assert names_in(tmp_path) == []


def test_directory_in_the_place_of_the_file_is_reported(log: EventLog) -> None:
    """Something that is not a file is a warning to the writer and an error to the reader."""
    log.path.mkdir()
    with pytest.warns(SafeckptWarning, match="Is a directory"):
        assert not log.append("saved")
    with pytest.raises(IsADirectoryError):
        log.read()


def test_mode_follows_the_umask(log: EventLog) -> None:
    """The history is readable by whom the umask allows and executable by nobody."""
    before = os.umask(0o022)
    try:
        log.append("saved")
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o644


def test_many_threads_lose_no_event(log: EventLog) -> None:
    """Events of several threads come out whole, each once, and leave no descriptor open."""
    before = descriptor_count()
    threads = [
        threading.Thread(target=lambda k=k: [log.append("saved", step=100 * k + i) for i in range(100)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["step"] for record in log.read()) == list(range(400))
    assert descriptor_count() == before
