"""Who watches the runs of this process: nobody, except in the processes of a proof."""

from __future__ import annotations

import types
from typing import Protocol

from safeckpt.run.run import Run
from safeckpt.state.loss import Loss

__all__ = ["Observer", "observe", "tell_committed", "tell_ended", "wants_checkpoint"]


class Observer(Protocol):
    """What is told of every run of this process."""

    def wants_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint is due at the end of this step, whatever the schedule says."""

    def ended(self, run: Run, step: int, loss: Loss) -> None:
        """A step has ended, and is not saved yet."""

    def committed(self, run: Run, step: int) -> None:
        """The checkpoint of a step is there; with `async_save` this comes from the thread that writes."""


_state = types.SimpleNamespace(observer=None)


def observe(observer: Observer | None) -> None:
    """Have one observer told from now on; None for nobody."""
    _state.observer = observer


def wants_checkpoint(step: int) -> bool:
    """Return whether the observer wants a checkpoint of this step."""
    return _state.observer is not None and _state.observer.wants_checkpoint(step)


def tell_ended(run: Run, step: int, loss: Loss) -> None:
    """Tell the observer that a step has ended."""
    if _state.observer is not None:
        _state.observer.ended(run, step, loss)


def tell_committed(run: Run, step: int) -> None:
    """Tell the observer that a checkpoint was committed."""
    if _state.observer is not None:
        _state.observer.committed(run, step)
