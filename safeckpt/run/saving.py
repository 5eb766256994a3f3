"""Saving: capture, guard, write, commit, and only then prune."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch

from safeckpt.arguments import as_floats, as_numbers, checked_metrics, checked_step
from safeckpt.background import BackgroundWriter
from safeckpt.catalog import Checkpoint
from safeckpt.errors import NonFiniteError, StepExistsError
from safeckpt.file import PreparedFile, encode, prepare
from safeckpt.replay import Replay
from safeckpt.run.timeline import Timeline
from safeckpt.schedule import Pruning
from safeckpt.state import Baseline, Component, Gradients, Guard, Staging, Verdict, capture, nonfinite_loss, to_cpu

__all__ = ["Saver"]


class Saver:
    """Saves the checkpoints of a run; `CheckpointManager.save` and `end_step` say what it promises.

    Args:
        run: The run.
        components: What is captured.
        guard: What has to be finite.
        grads: Which gradients are part of the state.
        pruning: Deletes what is no longer needed.
        replay: Records the losses.
        asynchronous: Whether a thread writes.

    Attributes:
        writer: The thread.
        copied: Step and payload that the staging memory holds.
        gradients: Watches the optimizers.
    """

    def __init__(
        self,
        run: Timeline,
        components: Mapping[str, Component],
        *,
        guard: Guard,
        grads: bool | None,
        pruning: Pruning,
        replay: Replay,
        asynchronous: bool,
    ) -> None:
        self._run = run
        self._components = components
        self._guard = guard
        self._grads = grads
        self._pruning = pruning
        self._replay = replay
        self._staging = Staging() if asynchronous else None
        self._warmed = False
        self.writer = BackgroundWriter()
        self.copied: tuple[int, dict[str, Any]] | None = None
        self._baseline = Baseline(components)
        self.gradients = Gradients(components)

    def save(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Save everything as the checkpoint of a step."""
        if self.writer.busy:
            self._run.event("waited", step, reason="the save before is still being written")
        self.writer.wait()
        step = self._run.next_step(step)
        metrics = checked_metrics(metrics)
        bad_loss = nonfinite_loss(loss)
        gradients = self._captured_gradients()
        snapshot = capture(self._components, gradients=gradients)
        verdict = self._baseline.judge(snapshot.parts, self._guard)
        verdict.bad.extend(self.gradients.judge(gradients, self._guard))
        if bad_loss is not None or verdict.bad:
            raise self._refusal(step, loss, bad_loss, verdict)
        payload = encode(snapshot.payload, root="payload")
        checkpoint = Checkpoint(
            step=step,
            path=self._run.files.path_of(step),
            loss=as_floats(loss),
            metrics=metrics,
            created_at=dt.datetime.now(dt.UTC),
            size_bytes=0,
            run_id=self._run.run_id or secrets.token_hex(8),  # the system's entropy: no random stream is touched
        )
        header = checkpoint.header(guard=verdict.record(self._guard))
        self._run.enter_directory()
        if self._staging is None:
            return self._write(checkpoint, prepare(to_cpu(payload), header=header))
        self.copied = None
        copied = self._staging.copy(payload)
        self.copied = (step, copied)
        self._run.due.saved(step)  # so that the next steps do not ask for it again while it is written
        self.writer.start(lambda: self._write(checkpoint, prepare(copied, header=header)), f"the save of step {step}")
        self._run.step = step
        self._run.begun = True
        return checkpoint

    def _write(self, checkpoint: Checkpoint, prepared: PreparedFile) -> Checkpoint:
        """Commit, and only then forget what is no longer needed."""
        checkpoint = dataclasses.replace(checkpoint, size_bytes=prepared.size_bytes)
        try:
            with self._replay.committing(checkpoint.step):
                self._run.files.commit_step(checkpoint.step, prepared.write, size_bytes=prepared.size_bytes)
            self._run.committed(checkpoint)
        except StepExistsError:
            raise
        except BaseException:
            if os.path.lexists(checkpoint.path):  # interrupted after the rename, or not known to be durable: saved
                self._run.committed(checkpoint)
                self._run.note_saved(checkpoint)
            raise
        self._run.note_saved(checkpoint)
        self._pruning.prune(checkpoint.step)
        return checkpoint

    def end_step(
        self, step: int, *, loss: Any, metrics: Mapping[str, Any] | None, stop_requested: Callable[[], bool]
    ) -> Checkpoint | None:
        """Guard and record a loss, and save when it is due or a stop was requested."""
        step = checked_step(step)
        checked_metrics(metrics)
        self._run.refuse_closed()
        if step <= self._run.step and self._run.begun:
            raise ValueError(
                f"step {step} is not higher than step {self._run.step}, the last one ended, saved or restored"
            )
        loss = as_numbers(loss)  # read from the device once
        self._refuse_loss(step, loss)
        self._replay.ended(step, loss)
        if self._run.due.at(step) or stop_requested():
            return self.save(step, loss=loss, metrics=metrics)
        self._run.step = step
        self._run.begun = True
        self._run.failed = None  # the caller went on without a rollback
        if self._staging is not None and not self._warmed:
            self._warm(self._staging)
        return None

    def _warm(self, staging: Staging) -> None:
        """Have memory for the copy made ready while training goes on: after a step, the optimizer's state is there."""
        self._warmed = True
        large = {name: one for name, one in self._components.items() if one.kind in ("module", "optimizer")}
        staging.warm(capture(large).payload)

    def _refuse_loss(self, step: int, loss: Any) -> None:
        if type(loss) is float and math.isfinite(loss):
            return  # most of the time a step of training takes of ours
        bad_loss = nonfinite_loss(loss)
        if bad_loss is not None:
            raise self._refusal(step, loss, bad_loss, Verdict([], []))

    def _captured_gradients(self) -> Mapping[str, torch.Tensor]:
        if self._grads is None:
            return self.gradients.pending()
        return self.gradients.all() if self._grads else {}

    def _refusal(self, step: int, loss: Any, bad_loss: str | None, verdict: Verdict) -> NonFiniteError:
        """Note a refusal and return the error to raise."""
        names = [tensor.name for tensor in verdict.bad]
        found = ([] if bad_loss is None else [f"loss = {bad_loss}"]) + [str(tensor) for tensor in verdict.bad[:1]]
        self._run.failed = (step, "; ".join(found))
        self._run.event("refused", step, loss=bad_loss, tensors=names[:20], tensors_total=len(names))
        good, next_step = self._way_out()
        return NonFiniteError(
            step=step,
            loss=None if bad_loss is None else as_numbers(loss),
            loss_text=bad_loss,
            tensors=verdict.bad,
            good=good,
            next_step=next_step,
            path=self._run.files.path,
        )

    def _way_out(self) -> tuple[str, str]:
        """Return what is still safe after a refusal, and what to call."""
        if self._run.saved is None:
            return (
                "nothing was written; this run has no checkpoint yet.",
                "stop, and start again from a lower learning rate or cleaner data.",
            )
        if any(hasattr(component.obj, "leave_out") for component in self._components.values()):
            call = f"manager.rollback(skip_batches=1) goes back to step {self._run.saved} without the last batch."
        else:
            call = (
                f"manager.rollback(changed=True) goes back to step {self._run.saved}; change what led here (the batch, "
                "the learning rate) before you go on, since an exact replay fails again."
            )
        return (
            f"nothing was written or rotated; step {self._run.saved} is in {self._run.files.path_of(self._run.saved)}.",
            call,
        )
