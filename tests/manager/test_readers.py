"""Readers need no lock: they never see half a file, a wrong order, or an error because a writer prunes."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests import children
from tests.faults import Operation, intercept
from tests.manager.helpers import manager_of, newer_format, save_steps, skipping, spoil, step_path
from tests.training import Marked


def _save_until_told(connection: Connection, path: Path) -> int:
    run = Marked()
    step = 0
    with manager_of(path, run, keep_last=1) as manager:
        while not connection.poll():
            step += 1
            run.step = step
            manager.save(step)
            if step == 1:
                connection.send("begun")
    return step


def test_readers_never_see_a_bad_state_while_a_writer_prunes(memory_path: Path) -> None:
    """While another process saves and prunes all the time, every latest, listing and restore is whole and rises."""
    run = Marked()
    with children.Child(_save_until_told, memory_path) as writer, manager_of(memory_path, run) as reader:
        assert writer.receive() == "begun"
        seen = [0]
        while len(set(seen)) < 15:
            for ask in (reader.latest, lambda: safeckpt.latest(memory_path)):
                checkpoint = ask()
                assert checkpoint is not None
                assert checkpoint.step >= seen[-1]
                seen.append(checkpoint.step)
            listed = [checkpoint.step for checkpoint in reader.checkpoints()]
            assert listed == sorted(listed)
            restored = reader.restore()
            assert restored is not None
            assert restored.step == run.step
            assert restored.step >= seen[-1]
            seen.append(restored.step)
        writer.connection.send("stop")
        ended = writer.ended()
    assert ended.error is None
    assert ended.value >= 15


@pytest.mark.parametrize("ask", ["latest", "without verify", "checkpoints", "restore"])
def test_file_that_is_pruned_between_listing_and_opening_is_looked_for_again(tmp_path: Path, ask: str) -> None:
    """A reader that comes too late for a file finds the newer one that took its place."""
    save_steps(tmp_path, 1)
    listings = []

    def late(operation: Operation, call: Callable[[], Any]) -> Any:
        result = call()
        if operation.kind == "listing":
            listings.append(result)
            if len(listings) == 1:  # between this listing and the open a writer saves step 2 and prunes step 1
                step_path(tmp_path, 1).unlink()
                save_steps(tmp_path, 2)
        return result

    with manager_of(tmp_path, Marked()) as manager, intercept(late):
        found = _ask(tmp_path, ask) if ask == "without verify" else getattr(manager, ask)()
    if ask == "checkpoints":
        (found,) = found
    assert found.step == 2
    assert len(listings) > 1


def test_pruned_file_stays_readable_for_who_has_it_open(tmp_path: Path) -> None:
    """Tensors mapped from a checkpoint outlive the file's name."""
    run = Marked()
    with manager_of(tmp_path, run, keep_last=1) as manager:
        run.step = 1
        loaded = safeckpt.load(manager.save(1).path, mmap=True)
        run.step = 2
        manager.save(2)
    assert not step_path(tmp_path, 1).exists()
    assert loaded["model"]["value"].tolist() == [1.0, 1.0, 1.0]


def test_latest_needs_no_objects_and_writes_nothing(tmp_path: Path) -> None:
    """`safeckpt.latest` reads a directory that a writer holds, and changes nothing in it."""
    with manager_of(tmp_path, Marked()) as manager:
        saved = manager.save(1, loss=0.5, metrics={"a": 1})
        before = sorted(path.name for path in tmp_path.iterdir())
        assert safeckpt.latest(tmp_path) == safeckpt.latest(str(tmp_path)) == saved
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_latest_without_verify_is_the_newest_that_looks_whole(tmp_path: Path) -> None:
    """What shows at once is passed over; a flipped bit is not seen, and the restore goes back behind it."""
    save_steps(tmp_path, 1, 2, 3)
    expected = safeckpt.latest(tmp_path)
    assert safeckpt.latest(tmp_path, verify=False) == expected
    spoil(tmp_path, 3, "truncated")
    with skipping(step_path(tmp_path, 3)):
        found = safeckpt.latest(tmp_path, verify=False)
    assert found is not None
    assert found.step == 2
    spoil(tmp_path, 2, "flipped")
    with skipping(step_path(tmp_path, 3)):
        found = safeckpt.latest(tmp_path, verify=False)
    assert found is not None
    assert found.step == 2
    with skipping(step_path(tmp_path, 3), step_path(tmp_path, 2)):
        assert safeckpt.latest(tmp_path).step == 1  # type: ignore[union-attr]
    run = Marked()
    with manager_of(tmp_path, run) as manager, skipping(step_path(tmp_path, 3), step_path(tmp_path, 2)):
        manager.restore()
    assert run.step == 1


def test_latest_without_verify_reads_next_to_nothing(tmp_path: Path) -> None:
    """The cost does not grow with the state: the bytes of the tensors are not read."""
    state = {"model": torch.nn.Linear(1024, 1024)}
    with safeckpt.CheckpointManager(tmp_path, state) as manager:
        size = manager.save(1).size_bytes

    def bytes_read(call: Callable[[], Any]) -> int:
        before = int(Path("/proc/self/io").read_text().split()[1])
        call()
        return int(Path("/proc/self/io").read_text().split()[1]) - before

    assert bytes_read(lambda: safeckpt.latest(tmp_path, verify=False)) < size / 10


def test_latest_without_verify_refuses_a_newer_format(tmp_path: Path) -> None:
    """Going back behind a file of a later version would throw progress away in silence, here as well."""
    save_steps(tmp_path, 1, 2)
    newer_format(step_path(tmp_path, 2))
    with pytest.raises(safeckpt.FormatVersionError):
        safeckpt.latest(tmp_path, verify=False)
    with pytest.raises(TypeError, match="verify must be True or False"):
        safeckpt.latest(tmp_path, verify="no")  # type: ignore[arg-type]


def _ask(path: Path, ask: str) -> object:
    if ask == "safeckpt.latest":
        return safeckpt.latest(path)
    if ask == "without verify":
        return safeckpt.latest(path, verify=False)
    with manager_of(path, Marked()) as manager:
        return getattr(manager, ask)()


@pytest.mark.parametrize("ask", ["restore", "latest", "safeckpt.latest", "without verify"])
def test_directory_that_lost_its_checkpoints_is_not_taken_for_a_new_one(tmp_path: Path, ask: str) -> None:
    """None is returned, as on a new directory, with a warning that says what the history knows and what to do."""
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        step_path(tmp_path, step).unlink()
    with pytest.warns(safeckpt.SafeckptWarning, match="2 were saved, the last one of step 2 at ") as caught:
        assert _ask(tmp_path, ask) is None
    assert "put them back; if not, delete events.jsonl as well" in str(caught[0].message)
    (tmp_path / "events.jsonl").unlink()
    assert _ask(tmp_path, ask) is None  # a warning is an error here


@pytest.mark.parametrize("ask", ["restore", "latest", "safeckpt.latest", "without verify"])
def test_new_directory_is_no_lost_one(tmp_path: Path, ask: str) -> None:
    """A directory that is missing, empty, or whose run was refused before its first checkpoint gives no warning."""
    assert _ask(tmp_path / "missing", ask) is None
    assert _ask(tmp_path, ask) is None
    with manager_of(tmp_path, Marked()) as manager, pytest.raises(safeckpt.NonFiniteError):
        manager.save(1, loss=float("nan"))
    assert _ask(tmp_path, ask) is None
