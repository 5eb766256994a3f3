"""Fixtures of this folder."""

from tests.fixtures import one_thread

__all__ = ["one_thread"]
