"""What several processes agree on at the ends of steps: whether to save or to stop, without standing still for it.

Every few steps they agree, and no rank waits for the others even then: what came of it is read at the next time. How
often they do, they agree on as well, by how long a step takes. The first agreement after a start or a restore is waited
for, since it says how often there are others; so is each one where a step takes so long that it does not matter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from safeckpt.distributed.group import Section
from safeckpt.run.run import Run

__all__ = ["HEEDED_SECONDS", "Agreed", "StepAgreement"]

HEEDED_SECONDS = 5.0  # from a stop signal to the step that heeds it, or one step where that takes longer
_LONG_STEP_SECONDS = 0.5


class Agreed(NamedTuple):
    """What all ranks do.

    Attributes:
        is_due: Save.
        stop_requested: Save, and stop.
        pace: Go on agreeing like this.
    """

    is_due: bool
    stop_requested: bool
    pace: _Pace

    @property
    def saves(self) -> bool:
        """Whether they save."""
        return self.is_due or self.stop_requested


class _Pace(NamedTuple):
    """How ranks agree.

    Attributes:
        steps: How many steps until they agree again.
        waits: Whether they then wait for each other, since that takes no time beside a step.
    """

    steps: int
    waits: bool


class _Answer(NamedTuple):
    """What ranks say at the end of a step.

    Attributes:
        is_due: Whether rank 0 asks for a save, by clock or since the last one has failed.
        stop_requested: Whether one of them was asked to stop.
        step_seconds: How long rank 0 takes for a step; None where that is not known.
    """

    is_due: bool
    stop_requested: bool
    step_seconds: float | None


_FIRST_PACE = _Pace(1, waits=True)  # while it is not known how long a step takes


class StepAgreement:
    """Has the ranks of a run agree at the end of some steps.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked: Section | None = None  # what they agreed on last, and have not read yet
        self._pace = _FIRST_PACE
        self._next_step = 0  # at which they agree again
        self._last_asked = 0, 0.0  # step and time

    def forget(self) -> None:
        """Begin anew, after a restore."""
        self._asked, self._next_step, self._pace = None, 0, _FIRST_PACE

    def is_next(self, step: int) -> bool:
        """Return whether the ranks agree at the end of this step."""
        return step >= self._next_step

    def ask(self, step: int, raise_refused: Callable[[], None], is_asked_to_stop: Callable[[], bool]) -> Agreed | None:
        """Read what the ranks have agreed on, and say what is to be agreed on next. Called by all ranks at once.

        Args:
            step: The step that has ended.
            raise_refused: Raises what this rank has refused, for all of them to know.
            is_asked_to_stop: Returns whether this process was asked to stop.

        Returns:
            What they do now; None where nothing was agreed on before, and nothing is waited for.

        Raises:
            BaseException: See `read`.
        """
        timeline = self._run.timeline
        before = self.read()
        last_step, last_time = self._last_asked
        now = time.monotonic()
        seconds = (now - last_time) / max(1, step - last_step) if self._next_step else None
        self._last_asked = step, now
        waits = self._pace.waits
        decide = functools.partial(_decide, self._run.membership.ranks.agree_every)
        with self._run.group.section(f"ending step {step}", _both, decide, waits=False) as section:
            raise_refused()
            is_saved_now = timeline.is_due_by_count(step) or (before is not None and before.saves)
            section.answer = _Answer(timeline.is_due(step) and not is_saved_now, is_asked_to_stop(), seconds)
        self._asked = section
        agreed = self.read() if waits else before
        self._next_step = step + self._pace.steps
        return agreed

    def read(self) -> Agreed | None:
        """Return, once, what the ranks have agreed on last; None where that was read, or there was nothing.

        Raises:
            BaseException: What one of them has refused since the time before, on all of them.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        asked.finish()
        agreed: Agreed = asked.result
        self._pace = agreed.pace
        return agreed


def _both(one: _Answer, other: _Answer) -> _Answer:
    return one._replace(stop_requested=one.stop_requested or other.stop_requested)


def _decide(most_steps: int, answer: _Answer) -> Agreed:
    seconds, pace = answer.step_seconds, _FIRST_PACE
    if seconds is not None:
        steps = int(HEEDED_SECONDS / 2 / max(seconds, 1e-9))
        pace = _Pace(max(1, min(most_steps, steps)), waits=seconds > _LONG_STEP_SECONDS)
    return Agreed(answer.is_due, answer.stop_requested, pace)
