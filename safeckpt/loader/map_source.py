"""A DataLoader over a map-style dataset: indices are drawn again up to the position.

They come from streams and generators as they were at the epoch's start, so that is all a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch.utils.data import DataLoader

from safeckpt.loader.fetch import MapFetch, inner_loader
from safeckpt.loader.inputs import describe_dataloader, rank_of
from safeckpt.loader.order import EpochOrder, sampler_chain
from safeckpt.loader.source import BATCHES, ORDER, Snapshot, seed_for
from safeckpt.loader.streams import PrivateStreams, mix
from safeckpt.loader.tasks import Plan, start

__all__ = ["MapSource"]


class MapSource:
    """A DataLoader over a map-style dataset."""

    kind = "map"

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._dataloader = dataloader
        self.chain = sampler_chain(dataloader)
        self._order = EpochOrder(dataloader)
        self._fetch = MapFetch(dataloader)
        self._plan = Plan()
        self._inner = inner_loader(dataloader, self._fetch, self._plan)
        self.told: int | None = None

    def inputs(self, epoch: int | None = None) -> dict[str, Any]:
        """Return what must not change, with lengths as they are in an epoch when one is given."""
        if epoch is None or epoch == self.told:
            return describe_dataloader(self._dataloader, self.chain)
        told = self.told or 0

        def described() -> dict[str, Any]:
            try:
                self._set_epoch(epoch)
                return describe_dataloader(self._dataloader, self.chain)
            finally:
                self._set_epoch(told)

        return PrivateStreams(0).run(described)

    def check(self, snapshot: Snapshot) -> list[str]:
        """Return what keeps the samplers' saved state from being set."""
        return self._order.check(snapshot)

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Draw the order from its start, pass over `batch` batches of it, and fetch the rest."""
        if snapshot is not None:
            self._order.restore(snapshot)
        self._set_epoch(epoch)
        base = seed_for(BATCHES, seed, epoch, rank_of(self.chain))
        order = self._order.draw(seed_for(ORDER, seed, epoch), epoch, batch)
        wanted = ((number, indices) for number, indices in order if (epoch, number) not in left_out)
        if not self._plan.assign((epoch, number, mix(base, number), indices) for number, indices in wanted):
            return iter(())
        return start(self._inner, seed, epoch)

    def _set_epoch(self, epoch: int) -> None:
        self.told = epoch
        self._fetch.epoch = -1
        self._fetch.set_epoch(epoch)
        for sampler in self.chain:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def place(self) -> None:
        """Return nothing: what was drawn in an epoch is drawn again from its start."""

    def between(self) -> Snapshot:
        """Return the samplers' state as it is."""
        return self._order.state()

    def within(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return what the pass began from: the order is drawn again from there."""
        return start

    def after(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return the samplers' state after exactly `batch` batches, however far ahead they were drawn."""
        return self._order.after(start, seed_for(ORDER, seed, epoch), epoch, batch)

    def beginning(self, start: Snapshot) -> Snapshot:
        """Return what the pass began from, counted from the first sample."""
        return start | {"offset": None}

    def finish(self) -> None:
        """Raise when the order broke off."""
        self._plan.finish()
