"""What a position needs to know about where batches come from."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from typing import Any, Protocol

from safeckpt.loader.streams import mix

__all__ = ["BATCHES", "ORDER", "WORKERS", "Snapshot", "Source", "logger", "seed_for"]

logger = logging.getLogger("safeckpt")

Snapshot = dict[str, Any]  # plain values and tensors, different for each source

# What a derived seed is for.
ORDER, BATCHES, WORKERS = 1, 2, 3


def seed_for(purpose: int, seed: int, epoch: int, rank: int = 0) -> int:
    """Return a seed of its own for each purpose, epoch and rank."""
    return mix(mix(mix(seed, purpose), epoch), rank)


class Source(Protocol):
    """Begins an epoch anywhere, and says what is needed to begin there again.

    A snapshot is what a position depends on besides seed, epoch and batch number. `place` is what `place()` returned
    behind that batch, None before the first one of a pass.
    """

    kind: str
    told: int | None  # the epoch that `set_epoch` was called with last, by us

    def inputs(self, epoch: int | None = None) -> dict[str, Any]:
        """Return what must not change between save and resume, as plain values; as they are in an epoch."""

    def check(self, snapshot: Snapshot) -> list[str]:
        """Return what keeps `snapshot` from being used here, one sentence each."""

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Return an iterator over (number, batch) from number `batch` of an epoch on.

        `snapshot` is None at the ordinary start of the next epoch. Batches in `left_out` may come all the same.
        """

    def place(self) -> Any:
        """Return, in next to no time, what `within` needs to go on behind the batch that came last."""

    def between(self) -> Snapshot:
        """Return what an epoch that began now would begin from. Changes nothing."""

    def within(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return what the rest of an epoch begins from; `start` is what its pass began from. Changes nothing."""

    def after(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return what the next epoch begins from when this one ends behind `batch` batches. Changes nothing."""

    def beginning(self, start: Snapshot) -> Snapshot:
        """Return what the whole epoch begins from, of which a pass began from `start`.

        Raises:
            RuntimeError: This source cannot read an epoch twice.
        """

    def finish(self) -> None:
        """Raise RuntimeError when the iterator has stopped for another reason than the end of the epoch."""
