"""The end of every step: guard the loss, record it, and save when a checkpoint is due.

Several processes do not stand still at each step, see `step_agreement`. A rank that refuses a loss goes on with the
others until all ranks know and raise the refusal: alone, it would leave them waiting in their next collective.

A step may end before everything that belongs to it has run: validation, schedulers, what a trainer does at the end of
an epoch. Then a checkpoint that is due is owed, and saved at the next safe point.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from safeckpt.distributed.group import in_group
from safeckpt.errors import REFUSALS, SafeckptError, SafeckptWarning
from safeckpt.run.arguments import checked_metrics, checked_step
from safeckpt.run.capturing import Capturer
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.observing import tell_ended, wants_checkpoint
from safeckpt.run.run import Run
from safeckpt.run.saving import Saver
from safeckpt.run.step_agreement import HEEDED_SECONDS, Agreed, StepAgreement
from safeckpt.run.stop_request import StopRequest
from safeckpt.run.stream_watch import StreamWatch
from safeckpt.state.component import has_attribute
from safeckpt.state.loss import Loss
from safeckpt.system.warn import warn_caller

__all__ = ["Steps"]

_log = logging.getLogger("safeckpt")

# What ending a step may raise on one rank alone.
_OF_ONE_RANK = (SafeckptError, SafeckptWarning, OSError, TypeError, ValueError, RuntimeError)


class _Ended(NamedTuple):
    """A step that ended and is not saved yet.

    Attributes:
        step: Its number.
        loss: Its loss.
        metrics: Its metrics.
        optimizer_steps: Steps of the optimizers until then: one more, and the weights are no longer those of this step.
    """

    step: int
    loss: Loss
    metrics: Mapping[str, Any] | None
    optimizer_steps: int


class Steps:
    """Ends the steps of a run; `CheckpointManager.end_step` says what it promises.

    Args:
        run: The run.
        capturer: Refuses a loss that is not finite.
        saver: Saves what is due.
        stop_request: Whether this process has to stop.
    """

    def __init__(self, run: Run, capturer: Capturer, saver: Saver, stop_request: StopRequest) -> None:
        self._run = run
        self._capturer = capturer
        self._saver = saver
        self._stop_request = stop_request
        self._agreed_to_stop = False
        self._pending: BaseException | None = None
        self._unsaved: _Ended | None = None
        self._is_owed = False  # a checkpoint was due, and its step has ended without it
        self._was_tried = False  # and somebody has tried to save it since
        self._agreement = StepAgreement(run)
        self._ended_at: float | None = None  # when the last step had ended, and was saved
        self._step_seconds = 0.0  # how long it took, without a save
        self._loaders = {name: one.obj for name, one in run.components.items() if has_attribute(one.obj, "leave_out")}
        self._watch = StreamWatch(component.obj for component in run.components.values())
        self._handed_out: deque[tuple[int, dict[str, Any]]] = deque(maxlen=2 * run.membership.ranks.agree_every + 2)

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop; in a group, whether all ranks know that one of them was."""
        return self._agreed_to_stop if in_group() else self._is_asked_to_stop()

    def _is_asked_to_stop(self) -> bool:
        """Return whether this process was asked to stop, or has no time for one more step and its save."""
        return self._stop_request.is_made(self._needed_seconds)

    def _needed_seconds(self) -> float:
        """Return how long one more step takes, with its save and what ranks need to agree."""
        heeded = HEEDED_SECONDS if in_group() else 0.0
        return self._step_seconds + self._saver.longest_seconds + heeded

    def _time_step(self) -> None:
        now = time.monotonic()
        self._step_seconds = 0.0 if self._ended_at is None else now - self._ended_at
        self._ended_at = now

    @property
    def is_owed(self) -> bool:
        """Whether a checkpoint was due when the last step ended, and was put off."""
        return self._is_owed

    @property
    def is_due(self) -> bool:
        """Whether `save_due` has something to save; a group agrees on a stop, and owes for it, at a step's end."""
        is_late = not in_group() and self._is_asked_to_stop() and self._unsaved is not None and not self._is_saved()
        return self._is_owed or is_late

    def take_pending_refusal(self) -> BaseException | None:
        """Return, once, what this rank has refused since the ranks agreed last, and the others do not know."""
        pending, self._pending = self._pending, None
        return pending

    def batches_handed_out(self, step: int | None) -> Mapping[str, Any]:
        """Return the last batch that each loader had handed out when a recent step ended; empty when not known."""
        return next((positions for ended, positions in reversed(self._handed_out) if ended == step), {})

    def on_restored(self) -> None:
        """Forget what was between the restored step and the moment of the restore."""
        self._handed_out.clear()
        self._pending = None
        self._unsaved = None
        self._is_owed = False
        self._ended_at = None
        self._agreement.forget()
        self._watch.end()

    def save(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Checkpoint:
        """Save now, after what ranks have refused was raised on all of them."""
        self._read_agreement()
        self._was_tried = True
        if loss is None and self._unsaved is not None and self._unsaved.step == step:
            loss = self._unsaved.loss  # which end_step was given
        checkpoint = self._save(step, loss, metrics)
        self._is_owed = False
        self._watch.begin(checkpoint.step)
        return checkpoint

    def _save(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Checkpoint:
        pending, self._pending = self._pending, None
        try:
            return self._saver.save(step, loss, metrics, pending)
        finally:
            self._ended_at = time.monotonic()

    def save_due(self, metrics: Mapping[str, Any] | None) -> Checkpoint | None:
        """Save the last step that ended, where that was put off or a stop was requested since."""
        more = checked_metrics(metrics)
        unsaved = self._unsaved
        self._run.timeline.refuse_closed()
        if unsaved is None or not self.is_due:
            return None
        if self._capturer.optimizer_steps != unsaved.optimizer_steps:
            raise RuntimeError(
                f"step {unsaved.step} can be saved no more: an optimizer step was made since end_step({unsaved.step}), "
                "so the weights are no longer its own. Nothing was written. Call save_due() before the next "
                "optimizer.step(), and one end_step for each of them"
            )
        self._was_tried = True
        self._read_agreement()
        checkpoint = self._save(unsaved.step, unsaved.loss, {**(unsaved.metrics or {}), **more})
        self._is_owed = False
        self._watch.begin(unsaved.step)
        return checkpoint

    def end(self, step: int, loss: Any, metrics: Mapping[str, Any] | None, *, save: bool) -> Checkpoint | None:
        """Guard and record a loss; when a save is due or a stop was requested, save, or owe it."""
        run = self._run
        step = checked_step(step)
        self._refuse_debt()
        run.timeline.check_end(step)
        self._time_step()
        if run.group.size > 1:
            value = self._note_loss(step, loss, metrics)
            is_due = self._end_in_group(step)
        else:
            value = self._take_loss(step, loss, metrics)
            self._agreed_to_stop = self._is_asked_to_stop()  # a group of one agrees with itself
            is_due = run.timeline.is_due(step) or self._agreed_to_stop or wants_checkpoint(step)
        ended = _Ended(step, value, metrics, self._capturer.optimizer_steps)
        tell_ended(run, step, value)
        if is_due and save:
            try:
                checkpoint = self._save(step, value, metrics)
            except OSError:
                run.timeline.end(step)  # it was trained, whatever the disk says; the next one tries to save again
                self._unsaved, self._is_owed = ended, False
                raise
            self._unsaved = ended  # a thread may still be writing it
            self._is_owed = False
            self._watch.begin(step)
            return checkpoint
        self._saver.check_first(step)
        run.timeline.end(step)
        self._unsaved, self._is_owed, self._was_tried = ended, is_due, False
        if self._pending is None:
            run.timeline.forget_refusal()  # the caller went on without a rollback
        self._saver.warm()
        return None

    def _take_loss(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Loss:
        """Guard and record a loss, and return it."""
        checked_metrics(metrics)
        self._capturer.end_loader_step(step)
        value = Loss.read(loss)
        self._capturer.refuse_loss(step, value)
        if self._run.is_rank_zero:
            self._run.replay.end_step(step, value)
        self._run.loss_limit.add(step, value)
        return value

    def _note_loss(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Loss:
        """Guard and record a loss; what is refused here is raised when all ranks know, and this rank goes on."""
        try:
            if self._pending is None:
                return self._take_loss(step, loss, metrics)
            self._capturer.end_loader_step(step)
        except _OF_ONE_RANK as error:
            self._pending = self._pending or error
        return Loss.read(None)

    def _refuse_debt(self) -> None:
        """Refuse to end a step while the checkpoint of the one before is owed: nobody may ever come to save it.

        Raises:
            RuntimeError: It is owed, and nobody has tried to save it.
        """
        if self._is_owed and not self._was_tried and self._unsaved is not None:
            raise RuntimeError(
                f"the checkpoint of step {self._unsaved.step} was due, and end_step(save=False) has put it off: call "
                "manager.save_due() when everything that belongs to a step has run, before the next end_step. The "
                "step has ended; nothing was written, and earlier checkpoints are untouched"
            )

    def _is_saved(self) -> bool:
        """Return whether the last step that ended is saved."""
        saved = self._run.timeline.saved_step
        return self._unsaved is not None and saved is not None and self._unsaved.step <= saved

    def finish(self) -> Checkpoint | None:
        """Save the last step that ended, unless it is saved.

        Warns:
            SafeckptWarning: It cannot be saved any more: a step after it was refused, or begun and not ended.
        """
        run, unsaved = self._run, self._unsaved
        failure: OSError | None = None
        try:
            self._saver.wait()
        except OSError as error:
            failure = error  # of an older step, perhaps: it is in the log, and the disk may have room again
        self._saver.tell_drift()
        saved = run.timeline.saved_step
        if unsaved is None or self._is_saved():
            if failure is not None:
                raise failure
            if saved is not None:
                _log.info("step %d is saved, and no step has ended since", saved)
            return None
        if run.group.size > 1:  # what one rank has refused is raised on all, which would wait for it in the save
            self._read_agreement()
            self._raise_refusals(unsaved.step)
        if (refusal := run.timeline.refusal) is not None:
            which = "it" if refusal.step == unsaved.step else "a later step"
            self._warn_unsaved(unsaved.step, f"{which} was refused")
            return None
        if self._capturer.optimizer_steps != unsaved.optimizer_steps:
            self._warn_unsaved(
                unsaved.step, "an optimizer step was made after it, and end_step was not called for that"
            )
            return None
        return self._save(unsaved.step, unsaved.loss, unsaved.metrics)

    def close(self) -> None:
        """Let go of the loaders that are watched."""
        self._watch.end()

    def _warn_unsaved(self, step: int, why: str) -> None:
        saved = self._run.timeline.saved_step
        resumed = "a resume starts anew" if saved is None else f"a resume goes on from step {saved}"
        text = f"Step {step} is not saved at the end of the run: {why}. Nothing is lost on disk; {resumed}."
        warn_caller(text, SafeckptWarning)

    def _end_in_group(self, step: int) -> bool:
        """Return whether to save.

        That a number of steps makes a save due, all ranks know by themselves. What else can, a clock or a signal,
        they learn from each other.
        """
        run = self._run
        self._handed_out.append((step, {name: loader.last_batches(1) for name, loader in self._loaders.items()}))
        agreed = self._agree(step) if self._agreement.is_next(step) else None
        return run.timeline.is_due_by_count(step) or (agreed is not None and agreed.saves)

    def _agree(self, step: int) -> Agreed | None:
        with self._raising_refusals():
            agreed = self._agreement.ask(step, self._raise_pending, self._is_asked_to_stop)
        self._note_stop(agreed)
        return agreed

    def _read_agreement(self) -> None:
        """Note what the ranks have agreed on last; what one of them has refused is raised on all."""
        with self._raising_refusals():
            agreed = self._agreement.read()
        self._note_stop(agreed)

    def _note_stop(self, agreed: Agreed | None) -> None:
        if agreed is not None:
            self._agreed_to_stop = agreed.stop_requested

    def _raise_refusals(self, step: int) -> None:
        """Raise on all ranks what one of them has refused since the last agreement."""
        with self._raising_refusals(), self._run.group.section(f"saving step {step} at the end"):
            self._raise_pending()

    @contextlib.contextmanager
    def _raising_refusals(self) -> Iterator[None]:
        """Note a refusal that comes out here, of this rank or another: it is raised once."""
        try:
            yield
        except BaseException as error:
            self._pending = None
            if isinstance(error, REFUSALS):
                self._saver.note_refusal(error)
            raise

    def _raise_pending(self) -> None:
        if self._pending is not None:
            raise self._pending
