"""The harness can tell: a loop that resumes exactly passes, and one that forgets something is counted and named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt
from tests.integrations import harness


def train(path, record, *, forgets=()):
    """Train a loop of one's own; what it forgets is no component."""
    if forgets:
        warnings.simplefilter("ignore")
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model)
    plain = DataLoader(harness.Samples(), harness.BATCH_SIZE, shuffle=True)
    loader = safeckpt.ResumableLoader(plain, seed=3)
    components = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    components = {name: one for name, one in components.items() if name not in forgets}
    with safeckpt.CheckpointManager(
        path / "checkpoints", components, save_every=2, on_replay_mismatch="ignore"
    ) as manager:
        manager.restore()
        for _ in loader.epochs(harness.EPOCHS):
            for x, y, index in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                record("step", step=manager.step + 1, loss=loss, batch=index)
                manager.end_step(manager.step + 1, loss=loss)
            record("validation")


@pytest.mark.parametrize("place", [harness.Place("step", 9), harness.Place("write", 12), harness.Place("step", 12)])
def test_exact_loop_passes(tmp_path, place):
    """Killed in a step, in a save and at the last batch of an epoch, it is the same run."""
    (comparison,) = harness.assert_exact(train, tmp_path, place)
    assert comparison.wrong == comparison.never_trained == 0
    assert comparison.compared >= harness.STEPS - 12


def test_run_that_forgets_its_moments_is_found(tmp_path):
    """Without optimizer and schedule every loss but the first is wrong, and the assertion says where it begins."""
    place = harness.Place("step", 9)
    (comparison,) = harness.compare(train, tmp_path, place, forgets=("optimizer", "schedule"))
    assert 0 < comparison.wrong < comparison.compared
    assert comparison.never_trained == 0
    with pytest.raises(AssertionError, match="from the end, straight and resumed"):
        comparison.assert_exact()
