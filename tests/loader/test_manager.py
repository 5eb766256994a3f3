"""A ResumableLoader under a manager: rollbacks inside the loop leave out what failed, and go on leaving it out."""

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt


def test_batch_left_out_by_one_rollback_stays_out_at_the_next(tmp_path):
    """Two poisoned batches after one checkpoint: the second rollback does not bring the first batch back."""
    module = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(()))
    loader = safeckpt.ResumableLoader(DataLoader(range(8), batch_size=1), seed=0)
    handed_out = []
    with safeckpt.CheckpointManager(tmp_path, {"model": module, "loader": loader}) as manager:
        for batch in loader:
            number = int(batch)
            handed_out.append(number)
            if number in (4, 6):
                with pytest.raises(safeckpt.NonFiniteError):
                    manager.end_step(manager.step + 1, loss=float("nan"))
                assert manager.rollback(skip_batches=1).step == 3
            elif number == 2:
                manager.save(3, loss=0.5)
            else:
                manager.end_step(manager.step + 1, loss=0.5)
        assert loader.left_out == [(0, 4), (0, 6)]
    assert handed_out == [0, 1, 2, 3, 4, 3, 5, 6, 3, 5, 7]
