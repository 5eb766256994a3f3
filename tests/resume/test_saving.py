"""Saving is invisible: a run that saves all the time is the run that never does."""

import pytest

import safeckpt
from tests.training import Run


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_run_that_saves_at_every_step_equals_one_that_never_saves(tmp_path, async_save):
    """Weights, moments, schedule, random streams, gradients, modes and flags are the same bits, losses too."""
    silent = Run()
    losses = silent.steps(30)
    saving = Run()
    state_before = None
    with safeckpt.CheckpointManager(tmp_path, saving.components, keep_last=1, async_save=async_save) as manager:
        for step, expected in enumerate(losses, start=1):
            assert saving.step() == expected
            state_before = saving.state
            manager.save(step, loss=expected)
            assert saving.state == state_before
    final = saving.state
    del final["rng"], state_before["rng"]  # compared at every step already; the silent run's streams are gone by now
    silent_state = silent.state
    del silent_state["rng"]
    assert final == silent_state == state_before
