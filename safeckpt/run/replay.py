"""Every real restart proves itself: losses that are computed a second time are compared with the recorded ones.

After a crash a run resumes from a checkpoint that is older than its last step, so it computes again what it has
computed before. What the record holds always belongs to the newest checkpoint on disk: after a rollback or a restore
that changed something, losses are kept in memory until the next checkpoint is committed, since a crash before that
would resume from a checkpoint that does not lead to them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from safeckpt.errors import ReplayMismatchError, ReplayMismatchWarning, SafeckptWarning
from safeckpt.state.loss import Loss
from safeckpt.store import LossLog
from safeckpt.system.arguments import checked_choice
from safeckpt.system.notebooks import html_table
from safeckpt.system.warn import warn_caller

__all__ = ["Replay", "ReplayMismatch", "ReplayPolicy", "ReplayReport"]

ReplayPolicy = Literal["warn", "error", "ignore"]

_POLICIES = ("warn", "error", "ignore")
_MOST_KEPT = 100_000  # losses in memory before the first checkpoint
_BATCH = 512  # losses a write at most
_BATCH_SECONDS = 0.01  # a run with longer steps than this loses none of them to a kill

_log = logging.getLogger("safeckpt")


@dataclass(frozen=True)
class ReplayMismatch:
    """The first loss that came out differently.

    Attributes:
        step: Its step.
        recorded: The value on record in Python's hexadecimal notation; several are separated by commas.
        recomputed: The value after the restart.
        changed: Fields of the environment that differ from the run that saved, `field: saved -> now`.
    """

    step: int
    recorded: str
    recomputed: str
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayReport:
    """How a resumed run compares with the one that it replays.

    Attributes:
        restored_step: Step of the checkpoint it resumed from.
        recorded: Losses that were on record after that step.
        compared: How many of them have been computed again.
        finished: Whether the run has passed the last recorded step, or differed.
        mismatch: The first one that differs; None as long as all are equal.
    """

    restored_step: int
    recorded: int
    compared: int
    finished: bool
    mismatch: ReplayMismatch | None = None

    @property
    def verified(self) -> bool:
        """Whether losses were compared, and all of them equal so far."""
        return self.compared > 0 and self.mismatch is None

    def __str__(self) -> str:
        if self.mismatch is not None:
            equal = self.compared - 1
            return f"resume differs: {equal} of {self.recorded} replayed losses equal, step {self.mismatch.step} is not"
        if not self.recorded:
            return f"resume from step {self.restored_step}: no later loss is on record, so there is nothing to compare"
        return f"resume verified: {self.compared} of {self.recorded} replayed losses equal"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        differs = self.mismatch
        rows: list[tuple[str, object]] = [
            ("restored step", self.restored_step),
            ("losses on record after it", self.recorded),
            ("computed again so far" if not self.finished else "computed again", self.compared),
        ]
        if differs is not None:
            rows += [
                ("first other loss", f"step {differs.step}"),
                ("recorded", _shown(differs.recorded)),
                ("computed now", _shown(differs.recomputed)),
                ("changed since", "\n".join(differs.changed)),
            ]
        good = None if not self.compared else self.verified
        return html_table(str(self), rows, good=good)


class Replay:
    """Records the losses of a run and compares those that come a second time.

    Args:
        log: The record.
        policy: What a difference is: a warning, an error, or of no interest.
        event: Notes something in the history of the run.
        locked: Tells whether this process holds the directory's writer lock.

    Raises:
        ValueError: The policy is none of the three.
    """

    def __init__(
        self, log: LossLog, policy: ReplayPolicy, event: Callable[..., None], locked: Callable[[], bool]
    ) -> None:
        checked_choice("on_replay_mismatch", policy, _POLICIES)
        self._log = log
        self._policy = policy
        self._event = event
        self._locked = locked
        # An asynchronous save commits in another thread. Re-entrant, since a Ctrl-C at its end may leave it held.
        self._mutex = threading.RLock()
        self._waiting: deque[tuple[int, str]] = deque(maxlen=_MOST_KEPT)
        self._flushed_at = time.monotonic()
        self._broken = False
        # The step up to which the record stays valid, when what is computed now does not follow from the newest
        # checkpoint on disk; None when it does.
        self._diverged_at: int | None = -1
        self._expected: dict[int, str] = {}
        self._last_expected = -1
        self._changed: tuple[str, ...] = ()
        self._report: ReplayReport | None = None

    @property
    def report(self) -> ReplayReport | None:
        """How the run compares since the last restore; None before one."""
        return self._report

    def on_restored(self, step: int, *, same: bool, changed: Sequence[str] = ()) -> None:
        """Note that the run goes on from a checkpoint.

        Args:
            step: The checkpoint's step.
            same: Whether the run is to be the one that was recorded. Not after something was changed on purpose.
            changed: Fields of the environment that differ from the run that saved.
        """
        self._end()
        with self._mutex:
            if self._diverged_at is None:
                self._flush()
            self._waiting.clear()
            self._diverged_at = None if same else step
            self._expected = self._log.read(step) if same and self._policy != "ignore" else {}
            self._last_expected = max(self._expected, default=-1)
            self._changed = tuple(changed)
            self._report = ReplayReport(step, len(self._expected), 0, finished=not self._expected)

    def on_diverged(self, step: int | None) -> None:
        """Note that the state was changed by hand: what comes now follows from no checkpoint.

        Args:
            step: The newest checkpoint's; None when there is none.
        """
        self.on_restored(-1 if step is None else step, same=False)
        self._report = None

    def end_step(self, step: int, loss: Loss) -> None:
        """Take the finite loss of a step: compare it when it is on record, else record it.

        Raises:
            ReplayMismatchError: It differs, and the policy is to say so with an error. The record is as it was.

        Cost:
            A few microseconds; a write of some lines every 10 ms.
        """
        if loss.numbers is None:
            return
        value = loss.exact
        if self._last_expected >= 0 and self._is_on_record(step, value):
            return
        with self._mutex:
            self._waiting.append((step, value))
            if self._diverged_at is None and (
                len(self._waiting) >= _BATCH or time.monotonic() - self._flushed_at > _BATCH_SECONDS
            ):
                self._flush()

    @contextmanager
    def committing(self, step: int) -> Iterator[None]:
        """Surround the commit of a checkpoint: afterwards it is the one that the record belongs to."""
        with self._mutex:
            if self._diverged_at is not None and self._log.path.exists():
                # Before the commit: a crash in between leaves a record that is too short, not one that is wrong.
                self._broken = not self._log.back_to(self._diverged_at)
            elif self._diverged_at is None:
                self._flush()
        yield
        with self._mutex:
            if self._diverged_at is not None:
                if self._diverged_at >= 0:  # before the first checkpoint there is none that they do not follow from
                    self._waiting = deque((one for one in self._waiting if one[0] > step), maxlen=_MOST_KEPT)
                self._diverged_at = None

    def close(self) -> None:
        """Write what is waiting, and say how far the comparison came."""
        self._end()
        with self._mutex:
            if self._diverged_at is None:
                self._flush()
            self._waiting.clear()
            self._log.close()

    def _is_on_record(self, step: int, value: str) -> bool:
        """Compare a loss with the record; True when it is there already and need not be written again."""
        report = self._report
        assert report is not None
        recorded = self._expected.pop(step, None)
        if recorded is not None:
            if recorded != value:
                self._differs(ReplayMismatch(step, recorded, value, self._changed))
                return False
            self._report = report = ReplayReport(
                report.restored_step, report.recorded, report.compared + 1, finished=False
            )
        if step >= self._last_expected:
            self._report = ReplayReport(report.restored_step, report.recorded, report.compared, finished=True)
            self._report_end()
        return recorded is not None

    def _differs(self, mismatch: ReplayMismatch) -> None:
        report = self._report
        assert report is not None
        self._report = ReplayReport(
            report.restored_step, report.recorded, report.compared + 1, finished=True, mismatch=mismatch
        )
        self._expected, self._last_expected = {}, -1
        self._event("replay_differs", mismatch.step, recorded=mismatch.recorded, recomputed=mismatch.recomputed)
        text = _format_mismatch(self._report, mismatch)
        if self._policy == "error":
            with self._mutex:
                self._diverged_at = (
                    mismatch.step - 1
                )  # of what comes now nothing is recorded until a checkpoint is saved
                self._waiting.clear()
            raise ReplayMismatchError(
                step=mismatch.step, recorded=mismatch.recorded, recomputed=mismatch.recomputed,
                changed=mismatch.changed, happened=text, path=self._log.path.parent,
            )  # fmt: skip
        with self._mutex:
            self._flush()
            self._broken = not self._log.back_to(mismatch.step - 1)  # from here on the record is that of this run
        warn_caller(text, ReplayMismatchWarning)

    def _report_end(self) -> None:
        """Report the end of a comparison that found nothing."""
        report = self._report
        self._expected, self._last_expected = {}, -1
        if report is not None and report.compared:
            _log.info("%s", report)
            self._event("replay_verified", report.restored_step, compared=report.compared, recorded=report.recorded)

    def _end(self) -> None:
        if self._last_expected >= 0:
            self._report_end()

    def _flush(self) -> None:
        if self._waiting and not self._broken:
            if self._log.is_long and self._locked():
                try:
                    self._log.shorten()
                except OSError as error:
                    self._broken = True
                    text = f"{self._log.path} could not be shortened: {error}. Losses are no longer recorded."
                    warn_caller(text, SafeckptWarning)
            # Without the lock the file cannot be rewritten, and it must not grow for ever.
            if not self._broken and not self._log.is_long:
                self._broken = not self._log.append(self._waiting)
        self._waiting.clear()
        self._flushed_at = time.monotonic()


def _shown(value: str) -> str:
    if value.startswith("sha256:"):
        return value[:20]
    numbers = ", ".join(repr(float.fromhex(one)) for one in value.split(","))
    return f"{numbers} ({value})"


def _format_mismatch(report: ReplayReport, mismatch: ReplayMismatch) -> str:
    if mismatch.changed:
        why = "Changed in the environment since that checkpoint: " + "; ".join(mismatch.changed) + "."
    else:
        why = "The environment is that of the run that saved it, as far as it is recorded."
    return (
        f"Step {mismatch.step} has another loss than before the restart: it was {_shown(mismatch.recorded)} and is now "
        f"{_shown(mismatch.recomputed)}. Resumed from step {report.restored_step}; {report.compared - 1} of "
        f"{report.recorded} replayed losses were equal before it, so this is no longer the same run. {why} "
        "safeckpt.prove_resume(build, train_step) finds the part that differs."
    )
