"""Random numbers that are drawn after a step was saved and before its body is over: a resume does not draw them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safeckpt.distributed.fingerprint import holds_same
from safeckpt.errors import UncapturedStateWarning
from safeckpt.state.component import has_attribute
from safeckpt.state.random_streams import RngStreams
from safeckpt.system.warn import warn_caller

__all__ = ["StreamWatch"]


class StreamWatch:
    """Compares the random streams at a save with those at the head of the loop, where the next batch is asked for.

    Only there can one tell: what the next step draws comes after its batch. Without a loader nothing is said, and
    neither where `next(iterator)` is called by hand, since what stands before that call is run again after a resume.

    Args:
        loaders: The loaders among the components.
    """

    def __init__(self, loaders: Iterable[Any]) -> None:
        self._loaders = [loader for loader in loaders if has_attribute(loader, "before_next_batch")]
        self._step = 0
        self._streams: dict[str, Any] | None = None
        self._has_warned = False

    def begin(self, step: int) -> None:
        """Look at the streams now, when a step was saved, and again before the next batch."""
        if self._loaders and not self._has_warned:
            self._step, self._streams = step, RngStreams.capture()
            for loader in self._loaders:
                loader.before_next_batch(self._compare)

    def end(self) -> None:
        """Do not look again: the position was set, or the run is over."""
        self._streams = None
        for loader in self._loaders:
            loader.before_next_batch(None)

    def _compare(self, *, in_loop: bool) -> None:
        saved = self._streams
        self.end()  # another loader's next batch may come after draws of the next step
        if saved is None or not in_loop:
            return
        moved = [name for name, state in RngStreams.capture().items() if not holds_same(state, saved[name])]
        if moved:
            self._has_warned = True
            warn_caller(
                "end_step was not the last statement of the body: random numbers were drawn after it "
                f"({', '.join(moved)}). A resume from step {self._step} does not draw them again, so it is another "
                "run. Move what draws them, such as validation or sampling, before end_step.",
                UncapturedStateWarning,
            )
