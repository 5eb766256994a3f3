"""Fixtures that several folders of tests share: one thread, and a directory in memory for hundreds of saves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory whose syncs cost nothing, where there is one."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=shared))
    yield path
    shutil.rmtree(path)
