"""Where a step of Lightning's loops is over, and how the loops are entered there again.

There are two kinds of safe points. Within an epoch it is behind `on_advance_end` of the inner loop: the batch, the
validation behind it and the schedules that wait for that have run. Behind the last batch it is `on_advance_end` of the
outer loop: the hooks of the epoch's end and its schedules have run as well, and the next epoch comes.

Lightning's own way into the middle of an epoch leaves out a validation here and a schedule there, so the loops are
entered with their counters alone, and go on as if nothing had been between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["RolledBack", "SafePoints"]


class RolledBack(BaseException):
    """Leaves the loops of a step that was given up: everything is at an earlier step again."""


class Listener(Protocol):
    """What is called at the safe points; each may raise `RolledBack` or end the run."""

    def on_start(self) -> None:
        """Before the first epoch, or the rest of one."""

    def on_step_over(self) -> None:
        """Behind a batch, within an epoch."""

    def on_epoch_over(self) -> None:
        """Behind an epoch."""

    def on_run_over(self) -> None:
        """Behind the last epoch, before the hooks of the end of training."""


class SafePoints:
    """Stands around the loops of a trainer from `install` to `remove`.

    Args:
        trainer: The trainer.
        listener: Is told of the safe points.

    Attributes:
        between_epochs: Whether the last safe point was one between two epochs.
    """

    def __init__(self, trainer: Any, listener: Listener) -> None:
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._listener = listener
        self._loaders: list[Any] = []
        self._installed: list[tuple[Any, str]] = []
        self._has_begun = False
        self.between_epochs = True
        self._enters_between = True

    def install(self, loaders: list[Any]) -> None:
        """Stand around the loops, which read these `ResumableLoader`s."""
        self._loaders = loaders
        self._around(self._fit, "on_advance_start", self._begin_epoch)
        self._around(self._fit, "advance", self._run_epoch)
        self._around(self._fit, "on_advance_end", self._end_epoch)
        self._around(self._fit, "on_run_end", self._end_run)
        self._around(self._epoch, "on_run_start", self._begin_batches)
        self._around(self._epoch, "advance", self._run_batch)
        self._around(self._epoch, "on_advance_end", self._end_batch)

    def remove(self) -> None:
        """Leave the loops as they were."""
        while self._installed:
            loop, name = self._installed.pop()
            delattr(loop, name)

    def enter(self, *, between_epochs: bool) -> None:
        """Have the loops go on at a safe point, whose counters they have been given."""
        self.between_epochs = self._enters_between = between_epochs
        self._fit._restarting = not between_epochs
        self._epoch.restarting = not between_epochs
        self._epoch.val_loop.restarting = True  # no sanity check: the run had its own

    def iterate_again(self) -> None:
        """Begin to read the loaders where they are now: what was fetched before is of another position."""
        iter(self._fit._data_fetcher)

    def _around(self, loop: Any, name: str, method: Callable[..., None]) -> None:
        setattr(loop, name, functools.partial(method, getattr(loop, name)))
        self._installed.append((loop, name))

    def _begin_epoch(self, original: Callable[[], None]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._listener.on_start()
        original()

    def _run_epoch(self, original: Callable[[], None]) -> None:
        while True:
            try:
                original()
            except RolledBack:
                self._enter_again()
            else:
                return

    def _end_epoch(self, original: Callable[[], None]) -> None:
        while True:
            original()
            for loader in self._loaders:
                if loader.batch:  # Lightning counts, and has not asked for the batch behind the last
                    loader.end_epoch()
            self.between_epochs = True
            try:
                self._listener.on_epoch_over()
            except RolledBack:
                self._enter_again()
                self._fit.advance()
            else:
                return

    def _enter_again(self) -> None:
        """Go to the epoch that the counters say, as at the start of a resumed run."""
        self.enter(between_epochs=self._enters_between)  # the inner loop has forgotten it on its way out
        self._fit.reset()
        self._fit.on_advance_start()

    def _end_run(self, original: Callable[[], None]) -> None:
        self._listener.on_run_over()
        original()

    def _begin_batches(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        self._epoch.restarting = False  # from here on all is as if nothing had been between
        self._fit._restarting = False

    def _run_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        if self._is_left_out(fetcher):
            self._pass_over(fetcher)
        else:
            original(fetcher)

    def _end_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        if not self._epoch.done:
            self.between_epochs = False
            self._listener.on_step_over()

    def _is_left_out(self, fetcher: Any) -> bool:
        """Return whether the next batch is one that a rollback has left out, which its loader will not hand out."""
        if fetcher.length is None or len(self._loaders) != 1:
            return False
        (loader,) = self._loaders
        return (loader.epoch, self._epoch.batch_progress.current.ready) in loader.left_out

    def _pass_over(self, fetcher: Any) -> None:
        """Count a batch that is left out, so that the epoch ends where it does, with its validation and schedules."""
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        self._epoch.batch_progress.increment_by(1, is_last_batch=fetcher.done)
        if self._epoch._num_ready_batches_reached():
            self._epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
