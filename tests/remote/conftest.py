"""A store in memory in the place of every real one, for the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from safeckpt.remote import Mirror, looking, worker
from safeckpt.run import mirroring
from tests.remote.memory_store import MemoryStore

URL = "s3://bucket/run"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """What every manager of the test has behind `mirror=URL`."""
    memory = MemoryStore()

    def client(mirror: Mirror) -> object:
        return memory.client(memory.hook, mirror.url)

    monkeypatch.setattr(mirroring, "open_client", client)
    monkeypatch.setattr(looking, "open_client", client)
    monkeypatch.setattr(worker, "_LAST_WAIT_SECONDS", 0.1)  # a request that waits for the gate ends with the test
    yield memory
    memory.gate.set()
