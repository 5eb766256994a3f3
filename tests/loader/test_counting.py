"""Trainers that count batches: they never read an iterator to its end, and may have made one before the restore."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt
from tests import children

EPOCHS, LENGTH = 3, 6


def loader_of(workers=0, **options):
    data = DataLoader(range(2 * LENGTH), batch_size=2, shuffle=True, num_workers=workers)
    return safeckpt.ResumableLoader(data, seed=3, **options)


def whole_run():
    loader = loader_of()
    return [batch.tolist() for _ in loader.epochs(EPOCHS) for batch in loader]


def count(path, kill_at, *, early, workers=0, ends=False):
    """Train by counting and return (first step, batches). `early`: the iterator is made before the restore."""
    model, loader = torch.nn.Linear(1, 1), loader_of(workers)
    with safeckpt.CheckpointManager(path, {"model": model, "loader": loader}, save_every=1) as manager:
        iterator = iter(loader) if early else None
        manager.restore()
        first, seen = manager.step, []
        epoch, done = divmod(manager.step, LENGTH)
        if done == 0 and loader.batch == LENGTH:
            loader.end_epoch()
        while epoch < EPOCHS:
            if iterator is None:
                iterator = iter(loader)
            for number in range(done, LENGTH):
                seen.append(next(iterator).tolist())
                manager.end_step(manager.step + 1, save=number + 1 < LENGTH or not ends)
                if manager.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            if ends:
                loader.end_epoch()
                manager.save_due()
            epoch, done, iterator = epoch + 1, 0, None
    return first, seen


@pytest.mark.parametrize("kill_at", [6, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 5, 7, 12, 17))])
@pytest.mark.parametrize(("early", "ends"), [(False, False), (True, False), (True, True)])
def test_epoch_that_ends_by_counting_is_over(tmp_path, kill_at, early, ends):
    """Killed inside an epoch, at its last batch and behind it, the next iterator begins the next epoch."""
    assert children.run(count, tmp_path, kill_at, early=early, ends=ends).signal == signal.SIGKILL
    first, rest = children.run(count, tmp_path, None, early=early, ends=ends).value
    assert first == kill_at - (ends and kill_at % LENGTH == 0)
    assert rest == whole_run()[first:]


def test_epoch_that_ends_by_counting_with_workers(tmp_path):
    """Workers have prefetched nothing of the next epoch that is lost, and nothing of the last is handed out twice."""
    assert children.run(count, tmp_path, 8, early=True, workers=2).signal == signal.SIGKILL
    first, rest = children.run(count, tmp_path, None, early=True, workers=2).value
    assert (first, rest) == (8, whole_run()[8:])


def test_end_of_an_epoch_is_saved_as_the_next(tmp_path):
    """Without `end_epoch` the position behind the last batch is the empty rest; with it, the next epoch."""
    loader = loader_of()
    loader.expect_end_step()
    iterator = iter(loader)
    for step in range(1, LENGTH + 1):
        next(iterator)
        loader.end_step(step)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, LENGTH)
    loader.end_epoch()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    assert next(iter(loader)).tolist() == whole_run()[LENGTH]


def test_iterator_that_is_kept_is_told_of_end_epoch():
    """With the old iterator alive a new pass reads the same epoch; a step in it is an error that names the way."""
    loader = loader_of()
    loader.expect_end_step()
    kept = iter(loader)
    for step in range(1, LENGTH + 1):
        next(kept)
        loader.end_step(step)
    again = iter(loader)
    next(again)
    with pytest.raises(RuntimeError, match=r"loader\.end_epoch\(\) before the next iter\(loader\)"):
        loader.end_step(LENGTH + 1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, LENGTH)


# -- batches from before the restore ---------------------------------------------------------------------------------


def saved_at(path, step):
    """Save a run behind some steps, and return what a fresh process has: its components."""
    model, loader = torch.nn.Linear(1, 1), loader_of()
    with safeckpt.CheckpointManager(path, {"model": model, "loader": loader}) as manager:
        for number, _ in enumerate(loader, 1):
            if number == step:
                manager.save(step)
                break
    return {"model": torch.nn.Linear(1, 1), "loader": loader_of()}


@pytest.mark.parametrize("use", ["next", "end_step", "save", "save_due"])
def test_batch_taken_before_the_restore_is_an_error(tmp_path, use):
    """A trainer that has fetched ahead would train a batch of another position: it is told, and nothing is saved."""
    components = saved_at(tmp_path, 4)
    loader = components["loader"]
    with safeckpt.CheckpointManager(tmp_path, components, save_every=1, save_on_exit=False) as manager:
        iterator = iter(loader)
        next(iterator)
        manager.restore()
        calls = {
            "next": lambda: next(iterator),
            "end_step": lambda: manager.end_step(5),
            "save": lambda: manager.save(5),
            "save_due": lambda: manager.end_step(5, save=False),
        }
        with pytest.raises(RuntimeError, match="was taken before its position was restored"):
            calls[use]()
        assert [one.step for one in manager.checkpoints()] == [4]
        iterator = iter(loader)  # what the message says
        assert next(iterator).tolist() == whole_run()[4]
        manager.end_step(5)
        assert next(iterator).tolist() == whole_run()[5]


def test_look_before_the_restore_is_no_error(tmp_path):
    """A batch that was looked at, also by an iterator that is still there, is none that is trained."""
    components = saved_at(tmp_path, 4)
    loader = components["loader"]
    examples = iter(loader)
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        next(examples)
        manager.restore()
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            manager.end_step(manager.step + 1)
    assert seen == whole_run()[4:LENGTH]


def test_iterator_that_handed_out_nothing_goes_on_at_the_position(tmp_path):
    """An iterator made before the restore, as by a trainer's set-up, begins at the restored batch."""
    components = saved_at(tmp_path, 4)
    iterator = iter(components["loader"])
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        manager.restore()
        assert [batch.tolist() for batch in iterator] == whole_run()[4:LENGTH]


def test_rollback_before_the_first_step_has_ended_is_followed(tmp_path):
    """A first step that is given up before it ended, as on bad gradients, is left out, and the loop goes on."""
    model, loader = torch.nn.Linear(1, 1), loader_of()
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "loader": loader}) as manager:
        manager.save(0)
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) < 3:
                manager.rollback(skip_batches=len(seen) % 2, changed=True)
                continue
            manager.end_step(manager.step + 1)
    expected = whole_run()[:LENGTH]
    assert seen == [expected[0], expected[1], *expected[1:]]
