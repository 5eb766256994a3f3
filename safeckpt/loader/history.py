"""Which batches were handed out in this process, so that a rollback can leave out the last ones."""

from __future__ import annotations

__all__ = ["History"]


class History:
    """The sequence of batches that led to the position, as runs of consecutive ones: it stays short."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []  # epoch, first, last + 1

    def add(self, epoch: int, number: int) -> None:
        """Note that a batch was handed out."""
        last = self._runs[-1] if self._runs else None
        if last is not None and last[2] == number and last[0] == epoch:
            last[2] = number + 1
        else:
            self._runs.append([epoch, number, number + 1])

    def forget(self, epoch: int, batch: int) -> None:
        """Take out what comes at or after a position that has been gone back to."""
        kept = [[run[0], run[1], min(run[2], batch) if run[0] == epoch else run[2]] for run in self._runs]
        self._runs = [run for run in kept if (run[0], run[1]) < (epoch, batch) and run[1] < run[2]]

    def clear(self) -> None:
        """Forget everything."""
        self._runs = []

    def last(self, count: int) -> list[tuple[int, int]]:
        """Return (epoch, number) of the last `count` batches, oldest first."""
        found: list[tuple[int, int]] = []
        for epoch, first, last in reversed(self._runs):
            wanted = count - len(found)
            found += [(epoch, number) for number in reversed(range(max(first, last - wanted), last))]
            if len(found) >= count:
                break
        return found[::-1]
