"""The end of every step: guard the loss, record it, and save when a checkpoint is due.

Several processes do not stand still at each step. A rank that refuses a loss goes on with the others to the next
agreement, where all ranks raise the refusal: alone, it would leave them waiting in their next collective.

A step may end before everything that belongs to it has run: validation, schedulers, what a trainer does at the end of
an epoch. Then a checkpoint that is due is owed, and saved at the next safe point.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from safeckpt.distributed import Group, in_group
from safeckpt.errors import NonFiniteError, ReplayMismatchError, ReplayMismatchWarning, SafeckptWarning
from safeckpt.run.arguments import checked_metrics, checked_step
from safeckpt.run.capturing import Capturer
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.run import Run
from safeckpt.run.saving import Saver
from safeckpt.run.stream_watch import StreamWatch
from safeckpt.state.loss import Loss
from safeckpt.system.warn import warn_caller

__all__ = ["Steps"]

_log = logging.getLogger("safeckpt")


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


class _Due(NamedTuple):
    """One rank's answer at the end of a step.

    Attributes:
        refused_step: The step that this rank has refused since the last agreement.
        is_due: Whether its clock or count asks for a save.
        stop_requested: Whether it was asked to stop.
    """

    refused_step: int | None
    is_due: bool
    stop_requested: bool


class _Agreed(NamedTuple):
    """The decision of all ranks: who refused the earliest step, if anybody; else what to do."""

    refusing_rank: int | None
    is_due: bool
    stop_requested: bool


def _decide(answers: list[_Due]) -> _Agreed:
    refused = [(answer.refused_step, rank) for rank, answer in enumerate(answers) if answer.refused_step is not None]
    return _Agreed(
        refusing_rank=min(refused)[1] if refused else None,
        is_due=answers[0].is_due,
        stop_requested=any(answer.stop_requested for answer in answers),
    )


class Steps:
    """Ends the steps of a run; `CheckpointManager.end_step` says what it promises.

    Args:
        run: The run.
        capturer: Refuses a loss that is not finite.
        saver: Saves what is due.
        stop_requested: Tells whether this process was asked to stop.
    """

    def __init__(self, run: Run, capturer: Capturer, saver: Saver, stop_requested: Callable[[], bool]) -> None:
        self._run = run
        self._capturer = capturer
        self._saver = saver
        self._is_asked_to_stop = stop_requested
        self._agreed_to_stop = False
        self._pending: BaseException | None = None
        self._unsaved: _Ended | None = None
        self._is_owed = False  # a checkpoint was due, and its step has ended without it
        self._was_tried = False  # and somebody has tried to save it since
        self._watch = StreamWatch(component.obj for component in run.components.values())
        self._handed_out: deque[tuple[int, dict[str, Any]]] = deque(maxlen=run.membership.ranks.agree_every + 1)

    @property
    def stop_requested(self) -> bool:
        """Whether this process was asked to stop; in a group, whether all ranks know that one of them was."""
        return self._agreed_to_stop if in_group() else self._is_asked_to_stop()

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
        self._watch.end()

    def save(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Checkpoint:
        """Save now, after what ranks have refused was raised on all of them."""
        if self._run.group.size > 1:
            self._agree(f"saving step {step}", is_due=True)
        self._was_tried = True
        checkpoint = self._saver.save(step, Loss.read(loss), metrics)
        self._is_owed = False
        self._watch.begin(step)
        return checkpoint

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
        if self._run.group.size > 1:
            self._agree(f"saving step {unsaved.step}, which was due", is_due=True)
        checkpoint = self._saver.save(unsaved.step, unsaved.loss, {**(unsaved.metrics or {}), **more})
        self._is_owed = False
        self._watch.begin(unsaved.step)
        return checkpoint

    def end(self, step: int, loss: Any, metrics: Mapping[str, Any] | None, *, save: bool) -> Checkpoint | None:
        """Guard and record a loss; when a save is due or a stop was requested, save, or owe it."""
        run = self._run
        step = checked_step(step)
        self._refuse_debt()
        checked_metrics(metrics)
        run.timeline.check_end(step)
        self._capturer.end_loader_step(step)
        value = Loss.read(loss)
        if run.group.size > 1:
            is_due = self._end_in_group(step, value)
        else:
            self._capturer.refuse_loss(step, value)
            run.replay.end_step(step, value)
            self._agreed_to_stop = self._is_asked_to_stop()  # a group of one agrees with itself
            is_due = run.timeline.is_due(step) or self._agreed_to_stop
        ended = _Ended(step, value, metrics, self._capturer.optimizer_steps)
        if is_due and save:
            try:
                checkpoint = self._saver.save(step, value, metrics)
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
        saved = run.timeline.saved_step
        if unsaved is None or self._is_saved():
            if failure is not None:
                raise failure
            if saved is not None:
                _log.info("step %d is saved, and no step has ended since", saved)
            return None
        if run.group.size > 1:  # what one rank has refused is raised on all, which would wait for it in the save
            self._agree(f"saving step {unsaved.step} at the end", is_due=True)
        if (refusal := run.timeline.refusal) is not None:
            which = "it" if refusal.step == unsaved.step else "a later step"
            self._warn_unsaved(unsaved.step, f"{which} was refused")
            return None
        if self._capturer.optimizer_steps != unsaved.optimizer_steps:
            self._warn_unsaved(
                unsaved.step, "an optimizer step was made after it, and end_step was not called for that"
            )
            return None
        return self._saver.save(unsaved.step, unsaved.loss, unsaved.metrics)

    def close(self) -> None:
        """Let go of the loaders that are watched."""
        self._watch.end()

    def _warn_unsaved(self, step: int, why: str) -> None:
        saved = self._run.timeline.saved_step
        resumed = "a resume starts anew" if saved is None else f"a resume goes on from step {saved}"
        text = f"Step {step} is not saved at the end of the run: {why}. Nothing is lost on disk; {resumed}."
        warn_caller(text, SafeckptWarning)

    def _end_in_group(self, step: int, loss: Loss) -> bool:
        """Return whether to save.

        The ranks agree when a number of steps says that a save is due, which all of them know by themselves, and at
        every multiple of `agree_every`. What else can make a save due, a clock or a signal, counts only there.
        """
        run = self._run
        loaders = {name: one.obj for name, one in run.components.items() if hasattr(one.obj, "leave_out")}
        self._handed_out.append((step, {name: loader.last_batches(1) for name, loader in loaders.items()}))
        if self._pending is None:
            try:
                self._capturer.refuse_loss(step, loss)
                if run.is_rank_zero:
                    run.replay.end_step(step, loss)
            except (NonFiniteError, ReplayMismatchError, ReplayMismatchWarning) as error:
                self._pending = error
        by_count = run.timeline.due_by_count and run.timeline.is_due(step)
        if not by_count and step % run.membership.ranks.agree_every:
            return False
        agreed = self._agree(f"ending step {step}", is_due=run.timeline.is_due(step))
        self._agreed_to_stop = agreed.stop_requested
        return agreed.is_due or agreed.stop_requested

    def _agree(self, what: str, *, is_due: bool) -> _Agreed:
        """Agree on what to do; where a rank has refused a step, all ranks raise the earliest refusal."""
        group: Group = self._run.group
        pending = self._pending
        refused_step = None if pending is None else getattr(pending, "step", None) or 0
        with group.section(what, _decide) as section:
            section.answer = _Due(refused_step, is_due, self._is_asked_to_stop())
        self._pending = None
        agreed = section.result
        if agreed.refusing_rank is not None:
            try:
                with group.section(f"{what}: refusing"):
                    if pending is not None and group.rank == agreed.refusing_rank:
                        raise pending
            except NonFiniteError as error:
                self._saver.note_refusal(error)
                raise
        return agreed
