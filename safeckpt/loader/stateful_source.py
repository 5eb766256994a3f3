"""A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from safeckpt.loader.inputs import describe_loader, rank_of
from safeckpt.loader.source import BATCHES, ORDER, Snapshot, seed_for
from safeckpt.loader.streams import PrivateStreams, mix, restore_streams, save_streams, seed_streams

__all__ = ["StatefulSource"]


class StatefulSource:
    """A loader with `state_dict` and `load_state_dict`.

    What it does in the training process is seeded like everything else; what it does in workers is its own affair.
    It only says where it is now. A place further back is its state earlier in the epoch, and the batches to pass over.

    Snapshot: "state", what the loader said; "at", behind which batch; "left", whether the epoch was left there.
    """

    kind = "loader"
    told: int | None = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: _SeededBatches | None = None
        self._earlier: Snapshot | None = None  # of the pass that runs, as late in it as it is known

    def inputs(self, epoch: int | None = None) -> dict[str, Any]:
        """Return the loader's class and length."""
        return describe_loader(self._loader)

    def check(self, snapshot: Snapshot) -> list[str]:
        """Return nothing: the loader knows."""
        return []

    def begin(
        self, seed: int, epoch: int, batch: int, snapshot: Snapshot | None, left_out: Container[tuple[int, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Load the loader's state, and pass over what lies between it and the wanted batch."""

        def start() -> Iterator[Any]:
            if snapshot is not None:
                self._loader.load_state_dict(snapshot["state"])
            iterator = iter(self._loader)
            # An epoch that was left early is left again: the loader itself knows what it starts with next.
            return iter(self._loader) if snapshot is not None and snapshot["left"] else iterator

        iterator = PrivateStreams(seed_for(ORDER, seed, epoch)).run(start)
        at = 0 if snapshot is None else snapshot.get("at", batch)
        self._earlier = snapshot
        self._batches = _SeededBatches(iterator, seed_for(BATCHES, seed, epoch, rank_of([])), at, batch)
        return self._batches

    def place(self) -> None:
        """Return nothing: asking the loader takes as long as it takes."""

    def _now(self, seed: int, epoch: int, at: int, *, left: bool = False) -> Snapshot:
        # Before its first iteration StatefulDataLoader makes the iterator when asked for its state.
        state = PrivateStreams(seed_for(ORDER, seed, epoch)).run(self._loader.state_dict)
        return {"state": state, "at": at, "left": left}

    def between(self) -> Snapshot:
        """Return the loader's state as it is."""
        return self._now(0, 0, 0)

    def within(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return the loader's state, or an earlier one when it has gone further since."""
        if self._batches is not None and self._batches.number == batch:
            self._earlier = self._now(seed, epoch, batch)
            return self._earlier
        earlier = self._earlier
        return start if earlier is None or earlier["left"] or earlier["at"] > batch else earlier

    def after(self, start: Snapshot, place: Any, seed: int, epoch: int, batch: int) -> Snapshot:
        """Return the loader's state, to be left where it is."""
        return self._now(seed, epoch, 0, left=True)

    def beginning(self, start: Snapshot) -> Snapshot:
        """Refuse: the loader has one position.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "this pass would read an epoch a second time while its position is kept, which a loader that keeps its own "
            "position cannot do: make a second loader over the same dataset for it"
        )

    def finish(self) -> None:
        """Do nothing: the loader knows."""


class _SeededBatches:
    """Takes the batches of an iterator, each on streams of its own.

    Attributes:
        number: Of the batch that comes next.
    """

    def __init__(self, iterator: Iterator[Any], seed: int, number: int, wanted: int) -> None:
        self._iterator = iterator
        self._seed = seed
        self.number = number
        self._wanted = wanted

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        while True:
            number = self.number
            outside = save_streams()
            try:
                seed_streams(mix(self._seed, number))
                batch = next(self._iterator)
            finally:
                restore_streams(outside)
            self.number += 1
            if number >= self._wanted:
                return number, batch
