"""A warning names the line of the script, from whatever depth of the library it comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import safeckpt
from safeckpt.store import names
from tests.manager.helpers import manager_of
from tests.training import Marked


def test_event_that_cannot_be_written_warns_at_the_line_that_saves(tmp_path: Path) -> None:
    """What the history cannot take is told at the call of `save`, not at a line of the store."""
    (tmp_path / names.EVENTS).mkdir()
    with manager_of(tmp_path, Marked()) as manager:
        with pytest.warns(safeckpt.SafeckptWarning, match="The event 'saved' is not in") as caught:
            manager.save(1)
        assert [warning.filename for warning in caught] == [__file__]


def test_loader_that_stands_still_warns_at_the_line_that_ends_a_step(tmp_path: Path) -> None:
    """What the loader finds out at the end of a step is told at that line of the script."""
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(4)), batch_size=2))
    loader.expect_end_step()
    for step in range(1, 20):
        loader.end_step(step)
    with pytest.warns(safeckpt.UncapturedStateWarning, match="its position stands still") as caught:
        loader.end_step(20)
    assert [warning.filename for warning in caught] == [__file__]
