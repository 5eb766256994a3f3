"""Fixtures of this folder."""

from tests.fixtures import memory_path, one_thread

__all__ = ["memory_path", "one_thread"]
