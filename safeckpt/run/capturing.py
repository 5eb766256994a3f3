"""Capturing one rank's part of a checkpoint, and refusing what is not finite."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from safeckpt.distributed.rank_state import digests_of, layout_digests_of
from safeckpt.distributed.shards import ShardTensors, extract_shards, is_sharded
from safeckpt.errors import LossSpikeError, NonFiniteError, UncapturedStateWarning, UnsavableStateError
from safeckpt.file import encode
from safeckpt.run.arguments import checked_metrics, checked_step
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.run import Run
from safeckpt.state import (
    Baseline,
    Gradients,
    Guard,
    GuardResult,
    HiddenState,
    Staging,
    StrayOptimizers,
    capture,
    refuse_unreduced,
)
from safeckpt.state.component import has_attribute
from safeckpt.state.loss import Loss
from safeckpt.system.warn import warn_caller

__all__ = ["Capturer", "Draft", "MemoryCopy"]


class MemoryCopy(NamedTuple):
    """A copy of the whole state of this rank in memory, as an asynchronous save left it."""

    step: int
    payload: Mapping[str, Any]


class Draft(NamedTuple):
    """One rank's part of a checkpoint, captured and guarded; its tensors alias the live ones, or those of a copy.

    Attributes:
        checkpoint: The checkpoint to be.
        captured: The payload as it was captured.
        payload: The payload as it is written: encoded, with placeholders for the shards.
        shards: What this rank writes into a directory: the tensors behind the placeholders.
        is_sharded: Whether the checkpoint is a directory.
        guard: What the guard let pass, for the header.
        digests: What the ranks are compared by; empty for a process by itself. Where the state is copied, those of its
            values are made of the copy.
    """

    checkpoint: Checkpoint
    captured: Mapping[str, Any]
    payload: Any
    shards: ShardTensors
    is_sharded: bool
    guard: dict[str, Any]
    digests: dict[str, str]

    def staged(self, staging: Staging, *, is_rank_zero: bool) -> Draft:
        """Return the draft over a copy of its tensors, which nobody changes."""
        captured = staging.copy(self.captured)
        if self.payload is self.captured:  # nothing in it had to be encoded, nor has anything in its copy
            return self._replace(captured=captured, payload=captured)
        payload, shards = _as_written(captured, is_sharded=self.is_sharded, is_rank_zero=is_rank_zero)
        return self._replace(captured=captured, payload=payload, shards=shards)


def _as_written(payload: Mapping[str, Any], *, is_sharded: bool, is_rank_zero: bool) -> tuple[Any, ShardTensors]:
    """Return a payload, encoded and with placeholders, and the shards behind them that this rank writes."""
    shards: ShardTensors = {}
    if is_sharded:
        payload, shards = extract_shards(payload, is_rank_zero=is_rank_zero)
    return encode(payload, root="payload"), shards


class Capturer:
    """Captures the state of this process, and refuses a loss or a state that is not finite.

    Args:
        run: The run.
        guard: What has to be finite.
        given: The mapping of components that the caller gave, and may change.
        is_staged: Whether what is captured is copied before ranks compare its values.
    """

    def __init__(self, run: Run, guard: Guard, given: Mapping[str, Any], *, is_staged: bool = False) -> None:
        self._run = run
        self._given = given
        self._objects = dict(given)
        self._guard = guard
        self._is_staged = is_staged
        self._baseline = Baseline(run.components)
        self._hidden = HiddenState(run.components)
        self._stray = StrayOptimizers(run.components)
        self._gradients = Gradients(run.components)
        components = run.components.items()
        self._loaders = [
            component.obj for _, component in components if has_attribute(component.obj, "expect_end_step")
        ]
        for loader in self._loaders:
            loader.expect_end_step()

    def capture(self, step: int, loss: Loss, metrics: Mapping[str, Any] | None) -> Draft:
        """Return what this process has to save for a step.

        Raises:
            NonFiniteError: The loss or a guarded tensor is not finite; the refusal is noted.
            LossSpikeError: The loss is above the limit; the refusal is noted.
            UnsavableStateError: A value could not be loaded again.
            ValueError: The step is too low, or the objects are a mixture of two states.
        """
        with torch.inference_mode(mode=False):  # in which tensors have no versions, and DTensors no parts
            return self._capture(step, loss, metrics)

    def _capture(self, step: int, loss: Loss, metrics: Mapping[str, Any] | None) -> Draft:
        run, files = self._run, self._run.directory.files
        step = checked_step(step)
        run.timeline.check_save(step)
        self._refuse_replaced()
        metrics = checked_metrics(metrics)
        refuse_unreduced(run.components)
        gradients = self._gradients.pending()
        if self._is_interrupted(step):
            gradients = {}  # its batches come again, and their gradients with them
        else:
            self._assign_batches(step, between_micro_steps=bool(gradients))
        if self._ends(step) and loss.nonfinite is None:
            self._refuse_spike(step, loss)
            run.loss_limit.add(step, loss)
        recent = run.loss_limit.capture()
        whole = capture(run.components, gradients=gradients, recent_losses=recent)
        verdict = self._baseline.check(whole.pairs, self._guard)
        verdict.bad.extend(self._gradients.check(gradients, self._guard))
        if loss.nonfinite is not None or verdict.bad:
            raise self._refusal(step, loss, verdict)
        for line in (*self._stray.found(), *self._hidden.changed(whole.pairs)):
            warn_caller(f"Not captured: {line}.", UncapturedStateWarning)
        sharded = is_sharded(whole.payload)
        payload, shards = _as_written(whole.payload, is_sharded=sharded, is_rank_zero=run.is_rank_zero)
        digests: dict[str, str] = {}
        if run.group.size > 1:
            digests = (layout_digests_of if self._is_staged else digests_of)(whole.payload)
        checkpoint = Checkpoint(
            step=step,
            path=files.folder_of(step) if sharded else files.path_of(step),
            loss=loss.floats,
            metrics=metrics,
            created_at=dt.datetime.now(dt.UTC),
            size_bytes=0,
            run_id=run.timeline.run_id or secrets.token_hex(8),  # the system's entropy: no random stream is touched
            notes=run.notes,
        )
        return Draft(
            checkpoint,
            captured=whole.payload,
            payload=payload,
            shards=shards,
            is_sharded=sharded,
            guard=verdict.record(self._guard),
            digests=digests,
        )

    @property
    def optimizer_steps(self) -> int:
        """How many steps the optimizers have made, all together."""
        return self._gradients.optimizer_steps

    def check_savable(self) -> None:
        """Check that the state could be saved, as far as that is known without looking at its values.

        Raises:
            UnsavableStateError: A value could not be loaded again.
        """
        self._refuse_replaced()
        with torch.inference_mode(mode=False):
            payload = capture(self._run.components).payload
            _as_written(payload, is_sharded=is_sharded(payload), is_rank_zero=self._run.is_rank_zero)

    def _refuse_replaced(self) -> None:
        """Refuse to save an object in whose place the caller's mapping holds a different one now."""
        for name, obj in self._objects.items():
            if self._given.get(name) is not obj:
                raise UnsavableStateError(
                    location=name,
                    type_name=type(obj).__name__,
                    reason="the components mapping now holds a different object under this name, and the manager still "
                    "has the first one",
                    cure=f"build a new CheckpointManager with the new {name} and call restore(fresh=({name!r},)) on "
                    "it; or change the first object in place.",
                )

    def refuse_loss(self, step: int, loss: Loss) -> None:
        """Refuse a loss that is not finite, or above the limit.

        Raises:
            NonFiniteError: It is not finite; the refusal is noted.
            LossSpikeError: It is above the limit; the refusal is noted.
        """
        if loss.nonfinite is not None:
            raise self._refusal(step, loss, GuardResult([], []))
        self._refuse_spike(step, loss)

    def _refuse_spike(self, step: int, loss: Loss) -> None:
        run = self._run
        spike = run.loss_limit.spike(step, loss)
        if spike is None:
            return
        loss_above, limit, median = spike
        good, next_step = self._way_out()
        error = LossSpikeError(
            step=step, loss=loss_above, limit=limit, median=median, good=good, next_step=next_step,
            path=run.directory.path,
        )  # fmt: skip
        run.timeline.refuse(step, f"loss = {loss_above:.6g}, above {limit:.6g}")
        run.directory.add_event("refused", step, loss=loss_above, limit=limit, median=median)
        raise error

    @contextlib.contextmanager
    def refusing_late(self, step: int) -> Iterator[None]:
        """Have NaN or Inf refused as the guard does that came in after it, and is found in what is written.

        It is noted when the caller gets the error: in a thread, the steps that end meanwhile would forget it.
        """
        try:
            yield
        except NonFiniteError as error:
            raise self._error_of(step, Loss.read(None), GuardResult(list(error.tensors), [])) from error

    def close(self) -> None:
        """Let go of the optimizers that are watched."""
        self._gradients.close()
        self._stray.close()

    def end_loader_step(self, step: int) -> None:
        """Let the loaders know that a step has ended: the batches handed out until now belong to it."""
        for loader in self._loaders:
            loader.end_step(step)

    def count_batches(self, step: int) -> None:
        """Let the loaders know of the step that a save would have ended, had it not been refused."""
        if isinstance(step, int) and self._ends(step):
            self.end_loader_step(step)

    def _ends(self, step: int) -> bool:
        """Return whether a save ends a step, which no `end_step` has done before."""
        timeline = self._run.timeline
        return step > timeline.step or not timeline.has_progress

    def _is_interrupted(self, step: int) -> bool:
        """Return whether the last step is saved while the next one has begun and an exception has come in between."""
        has_begun = any(loader.since_step for loader in self._loaders)
        return not self._ends(step) and has_begun and sys.exception() is not None  # in an `except` or `finally`

    def _assign_batches(self, step: int, *, between_micro_steps: bool) -> None:
        """Let the loaders know which of the batches handed out are trained in what is saved."""
        if self._ends(step):
            self.end_loader_step(step)
        elif between_micro_steps:
            for loader in self._loaders:
                loader.end_micro_step()

    def _refusal(self, step: int, loss: Loss, verdict: GuardResult) -> NonFiniteError:
        """Note a refusal and return the error to raise."""
        found = [] if loss.nonfinite is None else [f"loss = {loss.nonfinite}"]
        self._run.timeline.refuse(step, "; ".join([*found, *(str(tensor) for tensor in verdict.bad[:1])]))
        return self._error_of(step, loss, verdict)

    def _error_of(self, step: int, loss: Loss, verdict: GuardResult) -> NonFiniteError:
        names = [tensor.name for tensor in verdict.bad]
        bad_loss = loss.nonfinite
        self._run.directory.add_event("refused", step, loss=bad_loss, tensors=names[:20], tensors_total=len(names))
        good, next_step = self._way_out()
        return NonFiniteError(
            step=step,
            loss=None if bad_loss is None else loss.numbers,
            loss_text=bad_loss,
            tensors=verdict.bad,
            good=good,
            next_step=next_step,
            path=self._run.directory.path,
        )

    def _way_out(self) -> tuple[str, str]:
        """Return what is still safe after a refusal, and what to call."""
        saved = self._run.timeline.saved_step
        if saved is None:
            return (
                "nothing was written; this run has no checkpoint yet.",
                "stop, and start again from a lower learning rate or cleaner data.",
            )
        if self._run.timeline.is_imported:
            call = "start the script again, from a lower learning rate or cleaner data: it goes on from that step."
        elif any(has_attribute(component.obj, "leave_out") for component in self._run.components.values()):
            call = f"manager.rollback(skip_batches=1) goes back to step {saved} without the last batch."
        else:
            call = (
                f"manager.rollback(changed=True) goes back to step {saved}; change what led here (the batch, "
                "the learning rate) before you go on, since an exact replay fails again."
            )
        return f"nothing was written or rotated; step {saved} is in {self._run.directory.files.path_of(saved)}.", call
