"""Fixtures of the state's tests: one thread, and a directory in memory for hundreds of saves."""

import pytest
import torch

from tests.fixtures import memory_path, one_thread

__all__ = ["memory_path", "one_thread", "same_streams"]


@pytest.fixture(autouse=True)
def same_streams():
    """Start every test from the same seed: none depends on those before it."""
    torch.manual_seed(0)
