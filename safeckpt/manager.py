"""CheckpointManager: joins the state of a run, the bytes of a file and the files of a directory."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import math
import os
import secrets
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from safeckpt.arguments import as_floats, as_numbers, checked_metrics, checked_names, checked_step
from safeckpt.background import BackgroundWriter
from safeckpt.catalog import Catalog, Checkpoint, reason_of, skipped
from safeckpt.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DirectoryInUseError,
    DirectoryLockedError,
    EnvironmentChangedWarning,
    HyperparameterReplacedWarning,
    LoadError,
    NoGoodCheckpointError,
    NonFiniteError,
    RollbackLoopError,
    StepExistsError,
    UncapturedStateWarning,
)
from safeckpt.file import CheckpointFile, PreparedFile, encode, prepare
from safeckpt.replay import Replay, ReplayPolicy, ReplayReport
from safeckpt.schedule import Pruning, SaveSchedule
from safeckpt.signals import StopSignals
from safeckpt.state import (
    RESERVED_KEY,
    Baseline,
    Gradients,
    Guard,
    Plan,
    Staging,
    Verdict,
    capture,
    guard_from_record,
    nonfinite_loss,
    plan,
    register,
    to_cpu,
    uncaptured,
)
from safeckpt.store import Best, CheckpointDirectory, EventLog, WriterLock

__all__ = ["CheckpointManager"]

_log = logging.getLogger("safeckpt")


class CheckpointManager:
    """Saves, restores and rolls back everything that a training run depends on, in one directory.

    The directory is made at the first write. A writing manager holds the directory's writer lock until `close`.

    Args:
        directory: Where the checkpoints are: `step-00001200.pt` and so on, each an ordinary torch file.
        components: Name to object: modules, optimizers, schedulers, gradient scalers, loaders, generators, objects
            with `state_dict` and `load_state_dict`, plain dicts of plain values. The random streams of the process
            (Python, NumPy, torch on every device) are always captured.
        keep_last: Newest good checkpoints to keep, 1 or more.
        keep_best: Which checkpoints to keep for their metrics, one `Best` or several.
        keep_every: Checkpoints whose step is a multiple of this are kept for good.
        save_every: When `end_step` saves: a number of steps (each time a multiple of it is reached or passed), or a
            `timedelta` since the last save. None: only `save` saves.
        async_save: `save` returns when the state is guarded and copied, and a thread writes it. Takes memory for one
            more copy of the state. A failed write is raised by the next `save`, `wait`, `restore`, `rollback` or
            `close`, and logged at once; an interpreter that exits finishes the write.
        guard: What has to be finite, besides the loss and the parameters.
        grads: Which gradients are part of the state. None: those that a backward pass has touched since their
            optimizer's last step, so that a save between two micro-steps of gradient accumulation is exact. True: all.
            False: none; a restore then begins with none, as after `zero_grad()`.
        max_rollbacks: Rollbacks allowed without a new checkpoint in between.
        on_replay_mismatch: What it is when a loss that is computed again after a restart differs from the recorded
            one: `"warn"` for a `ReplayMismatchWarning`, `"error"` for a `ReplayMismatchError`, `"ignore"`.
        stop_signals: Signals that ask the run to stop, for example `(signal.SIGTERM, signal.SIGUSR1)`: the next
            `end_step` saves, and `stop_requested` is True. Only in the main thread.
        lock_timeout_seconds: How long to wait for another writer of the directory.

    Raises:
        TypeError: An argument or a component is of a kind that is not accepted; the text names those that are.
        ValueError: An argument is out of range.

    Warns:
        UncapturedStateWarning: Training visibly depends on something that is not among the components.

    Example:
        >>> import tempfile, torch, safeckpt
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> components = {"model": model, "optimizer": optimizer}
        >>> with safeckpt.CheckpointManager(tempfile.mkdtemp(), components) as manager:
        ...     checkpoint = manager.save(1, loss=0.5)
        ...     manager.restore().step
        1
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        components: Mapping[str, Any],
        *,
        keep_last: int = 3,
        keep_best: Best | Sequence[Best] | None = None,
        keep_every: int | None = None,
        save_every: int | dt.timedelta | None = None,
        async_save: bool = False,
        guard: Guard = Guard(),  # noqa: B008 - frozen
        grads: bool | None = None,
        max_rollbacks: int = 3,
        on_replay_mismatch: ReplayPolicy = "warn",
        stop_signals: Iterable[int] = (),
        lock_timeout_seconds: float = 10.0,
    ) -> None:
        self._files = CheckpointDirectory(directory)
        self._catalog = Catalog(self._files)
        self._pruning = Pruning(self._files, self._catalog, keep_last, keep_best, keep_every)
        self._due = SaveSchedule(save_every)
        if not isinstance(guard, Guard):
            raise TypeError(f"guard must be a Guard; got {type(guard).__name__}")
        if isinstance(max_rollbacks, bool) or not isinstance(max_rollbacks, int) or max_rollbacks < 1:
            raise ValueError(f"max_rollbacks must be an int, 1 or more; got {max_rollbacks!r}")
        if not isinstance(async_save, bool):
            raise TypeError(f"async_save must be True or False; got {async_save!r}")
        if grads is not None and not isinstance(grads, bool):
            raise TypeError(f"grads must be True, False or None; got {grads!r}")
        self._guard = guard
        self._grads = grads
        self._staging = Staging() if async_save else None
        self._writer = BackgroundWriter()
        self._copied: tuple[int, dict[str, Any]] | None = None  # step and payload that the staging memory holds
        self._max_rollbacks = max_rollbacks
        self._components = register(components)
        self._baseline = Baseline(self._components)
        self._lock = WriterLock(directory, lock_timeout_seconds)
        self._events = EventLog(self._files.path / "events.jsonl")
        self._replay = Replay(self._files.losses, on_replay_mismatch, self._event, lambda: self._lock.held)
        self._run_id: str | None = None
        self._step = 0
        self._saved: int | None = None  # the step of the newest checkpoint on this timeline, as this manager knows it
        self._known: set[int] = set()  # steps in the directory that belong to this run
        self._left: set[int] = set()  # known steps above the restored one: set aside before the next save
        self._begun = False  # a step was ended, saved or restored
        self._half_restored = False  # the objects may be a mixture of two states, or not those of the step noted here
        self._failed: tuple[int, str] | None = None  # the step that was refused last, and why
        self._rollbacks: list[tuple[int, bool]] = []  # (failing step, whether something was changed) since a new save
        self._closed = False
        for line in uncaptured(components):
            warnings.warn(f"Not captured: {line}.", UncapturedStateWarning, stacklevel=2)
        self._signals = StopSignals(stop_signals)
        self._gradients = Gradients(self._components)  # last: a manager that was refused leaves no hook behind

    @property
    def step(self) -> int:
        """The last step that was saved, restored or ended; 0 at first."""
        return self._step

    @property
    def directory(self) -> Path:
        """Where the checkpoints are, as an absolute path."""
        return self._files.path

    @property
    def replay(self) -> ReplayReport | None:
        """How the losses since the last restore compare with those on record; None when nothing was restored."""
        return self._replay.report

    @property
    def stop_requested(self) -> bool:
        """Whether one of `stop_signals` has come: a loop can ask during evaluation or warm-up, and leave."""
        return self._signals.requested

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is pending and give the directory's lock and the signal handlers back. May be called twice.

        Raises:
            BaseException: What a write in the background has raised; the manager is closed all the same.
        """
        try:
            self.wait()
        finally:
            self._closed = True
            try:
                self._replay.close()
            finally:
                self._lock.release()
                self._signals.restore()
                self._gradients.close()

    def wait(self) -> None:
        """Return when every save is committed. Only with `async_save` is there anything to wait for.

        Raises:
            BaseException: What a write in the background has raised, once; earlier checkpoints are untouched.
        """
        self._writer.wait()

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints that pass the cheap check (name, trailer, size, structure), ascending by step.

        Raises:
            FormatVersionError: A file is of a newer format than this version reads.

        Warns:
            SkippedCheckpointWarning: A file with a checkpoint's name is none, or damaged.
        """
        return self._catalog.listed()

    def latest(self) -> Checkpoint | None:
        """Return the newest good checkpoint, every byte of it verified; None when there is none.

        Raises:
            FormatVersionError: The newest file is of a newer format.
        """
        for _, checkpoint in self._catalog.good({}):
            return checkpoint
        return None

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Save everything as the checkpoint of a step: finite, whole and durable when this returns.

        With `async_save` it is guarded and copied when this returns, and durable after `wait`; until then it is in no
        listing. A save that is still being written is waited for first.

        Killed at any moment, the directory holds the earlier checkpoints and this one or not, never a part of it.
        Nothing older is deleted before the new file is safe on disk. The live objects are not changed: a run that
        saves at every step has the same bits as one that never saves.

        Args:
            step: Optimizer steps completed, higher than that of the last save.
            loss: The loss at this step: a number, tensor, NumPy scalar, or a dict or list of them. Has to be finite.
            metrics: Name to number, for `keep_best`; may be NaN, which is never best.

        Returns:
            The checkpoint.

        Raises:
            NonFiniteError: The loss or a guarded tensor is NaN or Inf. Nothing was written, nothing rotated.
            UnsavableStateError: A value could not be loaded again. Nothing was written.
            StepExistsError: The step is the last one that was saved or restored.
            DirectoryInUseError: The directory holds checkpoints that this manager did not restore from.
            DirectoryLockedError: Another writer holds the directory.
            ValueError: The step is lower than one that was saved, restored or ended; or the last restore or rollback
                was interrupted, so that the objects may be a mixture of two states.
            OSError: The system refused, with errno: every earlier file is untouched, no temporary file is left.
            DurabilityUnknownError: The file is in place, but a power loss may still take it back; nothing was pruned.

        Cost:
            One pass over the tensors for the guard, one for checksum and write, an fsync of the file and one of the
            directory. Tensors on a device are copied to the host piece by piece. Files that another process wrote
            are read once before they count as kept.
        """
        if self._writer.busy:
            self._event("waited", step, reason="the save before is still being written")
        self.wait()
        step = self._next_step(step)
        metrics = checked_metrics(metrics)
        bad_loss = nonfinite_loss(loss)
        gradients = self._captured_gradients()
        snapshot = capture(self._components, gradients=gradients)
        verdict = self._baseline.judge(snapshot.parts, self._guard)
        verdict.bad.extend(self._gradients.judge(gradients, self._guard))
        if bad_loss is not None or verdict.bad:
            raise self._refusal(step, loss, bad_loss, verdict)
        payload = encode(snapshot.payload, root="payload")
        checkpoint = Checkpoint(
            step=step,
            path=self._files.path_of(step),
            loss=as_floats(loss),
            metrics=metrics,
            created_at=dt.datetime.now(dt.UTC),
            size_bytes=0,
            run_id=self._run_id or secrets.token_hex(8),  # the system's entropy: no random stream is touched
        )
        header = checkpoint.header(guard=verdict.record(self._guard))
        self._enter_directory()
        if self._staging is None:
            return self._write(checkpoint, prepare(to_cpu(payload), header=header))
        self._copied = None
        self._copied = (step, self._staging.copy(payload))
        prepared = prepare(self._copied[1], header=header)
        self._due.saved(step)  # so that the next steps do not ask for it again while it is written
        self._writer.start(lambda: self._write(checkpoint, prepared), f"the save of step {step}")
        self._step = step
        self._begun = True
        return dataclasses.replace(checkpoint, size_bytes=prepared.size_bytes)

    def _write(self, checkpoint: Checkpoint, prepared: PreparedFile) -> Checkpoint:
        """Commit, and only then forget what is no longer needed."""
        checkpoint = dataclasses.replace(checkpoint, size_bytes=prepared.size_bytes)
        try:
            with self._replay.committing(checkpoint.step):
                self._files.commit_step(checkpoint.step, prepared.write, size_bytes=prepared.size_bytes)
            self._committed(checkpoint)
        except StepExistsError:
            raise
        except BaseException:
            if os.path.lexists(checkpoint.path):  # interrupted after the rename, or not known to be durable: saved
                self._committed(checkpoint)
                self._note_saved(checkpoint)
            raise
        self._note_saved(checkpoint)
        self._pruning.prune(checkpoint.step)
        return checkpoint

    def end_step(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Tell the manager that a step is done: the loss is guarded and recorded, and a checkpoint saved when due.

        One is due by `save_every`, and at once when a stop signal has come.

        After a restart, losses that were recorded before it are computed again. Each is compared with the recorded
        one, with `==`: `replay` has the result, and the log of `safeckpt` says when all were equal.

        Args:
            step: Optimizer steps completed, higher than at the last call.
            loss: As in `save`. A tensor on a device costs a synchronisation: pass it every n steps if that matters.
            metrics: As in `save`.

        Returns:
            The checkpoint that was saved, None when none was due.

        Raises:
            NonFiniteError: The loss is NaN or Inf (or, when a save was due, a guarded tensor). Nothing was written.
            ReplayMismatchError: The loss differs from the recorded one, and the manager was told to raise this. The
                step does not count as ended.
            ValueError: The step is not higher than the last one.
            Exception: What `save` raises, when a save was due.

        Warns:
            ReplayMismatchWarning: The loss differs from the recorded one: the resumed run is another run.
        """
        step = checked_step(step)
        checked_metrics(metrics)
        self._refuse_closed()
        self._refuse_mixture()
        if step <= self._step and self._begun:
            raise ValueError(f"step {step} is not higher than step {self._step}, the last one ended, saved or restored")
        loss = as_numbers(loss)  # read from the device once
        self._refuse_loss(step, loss)
        self._replay.ended(step, loss)
        if self._due.at(step) or self.stop_requested:
            return self.save(step, loss=loss, metrics=metrics)
        self._step = step
        self._begun = True
        self._failed = None  # the caller went on without a rollback
        return None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError("this manager is closed; build a new one and restore() to go on")

    def _refuse_mixture(self) -> None:
        if self._half_restored:
            raise ValueError(
                "the last restore stopped half-way, by an interrupt or an error in a component's load_state_dict: the "
                "objects may be a mixture of two states; call restore() or rollback() again before going on"
            )

    def _next_step(self, step: int) -> int:
        step = checked_step(step)
        self._refuse_closed()
        self._refuse_mixture()
        if step == self._saved:
            raise StepExistsError(step=step, path=self._files.path_of(step))
        if step < self._step or (self._saved is not None and step < self._saved):
            raise ValueError(f"step {step} is lower than step {self._step}; steps count completed optimizer steps")
        return step

    def _refuse_loss(self, step: int, loss: Any) -> None:
        if type(loss) is float and math.isfinite(loss):
            return  # most of the time a step of training takes of ours
        bad_loss = nonfinite_loss(loss)
        if bad_loss is not None:
            raise self._refusal(step, loss, bad_loss, Verdict([], []))

    def _captured_gradients(self) -> Mapping[str, torch.Tensor]:
        if self._grads is None:
            return self._gradients.pending()
        return self._gradients.all() if self._grads else {}

    def _refusal(self, step: int, loss: Any, bad_loss: str | None, verdict: Verdict) -> NonFiniteError:
        """Note a refusal and return the error to raise."""
        names = [tensor.name for tensor in verdict.bad]
        found = ([] if bad_loss is None else [f"loss = {bad_loss}"]) + [str(tensor) for tensor in verdict.bad[:1]]
        self._failed = (step, "; ".join(found))
        self._event("refused", step, loss=bad_loss, tensors=names[:20], tensors_total=len(names))
        good, next_step = self._way_out()
        return NonFiniteError(
            step=step,
            loss=None if bad_loss is None else as_numbers(loss),
            loss_text=bad_loss,
            tensors=verdict.bad,
            good=good,
            next_step=next_step,
            path=self._files.path,
        )

    def _way_out(self) -> tuple[str, str]:
        """Return what is still safe after a refusal, and what to call."""
        if self._saved is None:
            return (
                "nothing was written; this run has no checkpoint yet.",
                "stop, and start again from a lower learning rate or cleaner data.",
            )
        if any(hasattr(component.obj, "leave_out") for component in self._components.values()):
            call = f"manager.rollback(skip_batches=1) goes back to step {self._saved} without the last batch."
        else:
            call = (
                f"manager.rollback(changed=True) goes back to step {self._saved}; change what led here (the batch, the "
                "learning rate) before you go on, since an exact replay fails again."
            )
        return f"nothing was written or rotated; step {self._saved} is in {self._files.path_of(self._saved)}.", call

    def _enter_directory(self) -> None:
        """Take the directory for writing: create it, hold its lock, find only this run's files in it."""
        if not self._lock.held:
            self._refuse_strangers()  # before the lock, so that a wrong directory is left without a trace
            self._files.create()
            self._lock.acquire()
            try:
                self._refuse_strangers()  # another writer may have had it meanwhile
                self._files.sweep()
            except BaseException:
                self._lock.release()
                raise
        try:
            self._lock.check()
        except DirectoryLockedError:
            self._lock.release()  # it protects nothing any more; the next save takes the lock that others see
            raise
        self._refuse_strangers()
        if self._left:
            paths = self._files.set_aside(self._left)
            self._event("set_aside", self._saved, files=[path.name for path in paths])
            self._known -= self._left
            self._left = set()

    def _strangers(self) -> list[int]:
        return [step for step in self._files.steps() if step not in self._known]

    def _refuse_strangers(self) -> None:
        strangers = self._strangers()
        if strangers:
            raise DirectoryInUseError(directory=self._files.path, steps=strangers)

    def _committed(self, checkpoint: Checkpoint) -> None:
        """Note a new checkpoint; memory is updated after the disk. Interrupted, it can be called again."""
        self._run_id = checkpoint.run_id
        self._saved = checkpoint.step
        self._step = max(self._step, checkpoint.step)  # written in the background, training may be further
        self._begun = True
        self._known.add(checkpoint.step)
        self._catalog.wrote(checkpoint.step)
        if self._failed is not None and self._failed[0] <= checkpoint.step:
            self._failed = None
        self._rollbacks.clear()
        self._due.saved(checkpoint.step)

    def _note_saved(self, checkpoint: Checkpoint) -> None:
        self._event("saved", checkpoint.step, loss=checkpoint.loss, size_bytes=checkpoint.size_bytes)

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self, step: int | None = None, *, only: Collection[str] | None = None, keep_live: Collection[str] = ()
    ) -> Checkpoint | None:
        """Put a checkpoint into the live objects, all of it or nothing: the run goes on as the same run.

        Everything is checked first (names, shapes, dtypes, classes, ties, parameter names of the optimizers, groups,
        loader, devices); only when all of it fits is the first object changed. The random streams come last.
        Afterwards every parameter's `.grad` is None, as at process start, or as saved where it was part of the state.

        Args:
            step: Which checkpoint; None for the newest good one. After an older one, the checkpoints with a higher
                step are renamed at the next save, never picked as latest.
            only: Names of the components to restore, and `"rng"` for the random streams; None for everything. A
                manager that restored only some components does not write into the directory.
            keep_live: Hyper-parameters as `component.name`, such as `"optimizer.weight_decay"`, whose live value
                stays; all others come from the file.

        Returns:
            The checkpoint; None when the directory is missing or holds no checkpoint, and nothing was changed.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
            NoGoodCheckpointError: There are checkpoints and none is good: a fresh start must not look like a resume.
            LoadError: The file of the step that was named is not good, or asks for a type that is not registered.
            FormatVersionError: The newest file is of a newer format.
            ComponentMismatchError: A component is on one side only.
            StateMismatchError: Something does not fit; `mismatches` lists all of it.
            ValueError: A name in `keep_live` is no hyper-parameter.

        Warns:
            SkippedCheckpointWarning: A newer file was passed over, with the reason.
            HyperparameterReplacedWarning: The file's hyper-parameters replaced others in the script.
            EnvironmentChangedWarning: The run computes in another environment than before, so bits may differ.

        Cost:
            The file is read once to verify it and mapped to copy from it; no second copy of the state is kept.
        """
        self._refuse_closed()
        only, keep_live = checked_names(only, "only"), checked_names(keep_live, "keep_live")
        if step is not None:
            step = checked_step(step)
        self.wait()
        there = self._files.steps()
        if step is not None and step not in there:
            raise CheckpointNotFoundError(directory=self._files.path, step=step, available_steps=there)
        rejected: dict[Path, str] = {}
        found = self._restored(step, only, keep_live, rejected)
        if found is None:
            return None
        checkpoint, ready = found
        whole = only is None or set(self._components) <= set(only)
        if whole:
            self._adopt(checkpoint, there)
            same = not keep_live and (step is None or not self._left) and (only is None or "rng" in only)
            self._replay.restored(checkpoint.step, same=same, changed=ready.environment)
        else:
            self._replay.left(self._saved)
        self._half_restored = False
        self._report(checkpoint, ready, rejected, "restored", only=None if only is None else list(only))
        return checkpoint

    def _report(
        self, checkpoint: Checkpoint, ready: Plan, rejected: Mapping[Path, str], kind: str, **data: Any
    ) -> None:
        """Tell history and caller what a restore passed over and replaced."""
        for path, reason in rejected.items():
            self._event("passed_over", None, file=path.name, reason=reason)
        self._event(kind, checkpoint.step, replaced=ready.replaced, **data)
        if ready.replaced:
            text = "\n  ".join(ready.replaced)
            warnings.warn(
                f"The checkpoint's hyper-parameters replaced those of the script (live -> saved):\n  {text}\n"
                + (
                    "Set them again before you go on, if that is what you changed."
                    if kind == "rolled_back"
                    else "Keep the live ones with restore(keep_live=('component.name', ...))."
                ),
                HyperparameterReplacedWarning,
                stacklevel=3,
            )
        if ready.environment:
            text = "\n  ".join(ready.environment)
            warnings.warn(
                f"The environment differs from the one that saved {checkpoint.path.name} (saved -> now), so the next "
                f"losses may differ in their last bits:\n  {text}",
                EnvironmentChangedWarning,
                stacklevel=3,
            )

    def _restored(
        self,
        step: int | None,
        only: Collection[str] | None,
        keep_live: Collection[str],
        rejected: dict[Path, str],
    ) -> tuple[Checkpoint, Plan] | None:
        """Restore a step, or the newest good one; what was passed over on the way is added to `rejected`."""
        candidates = self._catalog.good(rejected) if step is None else self._catalog.one(step)
        for file, checkpoint in candidates:
            try:
                ready = self._plan(file, only, keep_live)
            except LoadError as error:
                if step is not None:
                    raise
                reason = reason_of(error)
            else:
                self._half_restored = True  # until the caller has noted where the run is now
                ready.apply()
                return checkpoint, ready
            rejected[checkpoint.path] = reason
            skipped(checkpoint.path, reason)
        if rejected:
            raise NoGoodCheckpointError(
                directory=self._files.path, rejected=[(str(path), reason) for path, reason in rejected.items()]
            )
        return None

    def _plan(self, file: CheckpointFile, only: Collection[str] | None, keep_live: Collection[str]) -> Plan:
        """Check everything about a restore.

        Raises:
            LoadError: What is in the file is not what a manager saves, or not finite.
            RestoreError: It does not fit the live objects.
        """
        payload = file.load(map_location="cpu", mmap=True)
        if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
            raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
        try:
            guard = guard_from_record((file.header() or {})["guard"])
        except (KeyError, TypeError) as error:
            raise DamagedCheckpointError(path=file.path, reason="its header does not say what was guarded") from error
        ready = plan(self._components, payload, only=only, keep_live=keep_live, path=file.path)
        # The guard that it passed when it was saved judges it again.
        bad = Baseline({}).judge(ready.parts, guard).bad
        if bad:
            raise DamagedCheckpointError(path=file.path, reason=f"it is not finite ({bad[0]})")
        return ready

    def _adopt(self, checkpoint: Checkpoint, there: Collection[int]) -> None:
        """Go on from a checkpoint: the directory's files are this run's, those above the checkpoint will make way.

        Args:
            checkpoint: The one that was restored.
            there: The steps before it was looked for. A higher one that came meanwhile is another writer's newest.
        """
        self._run_id = checkpoint.run_id
        self._step = self._saved = checkpoint.step
        self._begun = True
        self._known = {step for step in self._files.steps() if step <= checkpoint.step or step in there}
        self._left = {step for step in self._known if step > checkpoint.step}
        self._failed = None
        self._due.saved(checkpoint.step)

    # -- rolling back ------------------------------------------------------------------------------------------------

    def rollback(self, *, skip_batches: int = 0, changed: bool = False) -> Checkpoint:
        """Go back to the last finite checkpoint inside the running process.

        Restores everything as `restore` does, clears the gradients, and sets aside checkpoints that are newer than
        the one returned to. With `async_save` the state usually comes from the copy in memory, without reading the
        disk. A loop over a `ResumableLoader` goes on from the rewound position.

        An exact replay fails at the same place again. So say what is different this time: `skip_batches`, or
        `changed` when you lower the learning rate or repair the data yourself.

        Args:
            skip_batches: Leave out this many of the batches handed out last, 1 for the one that failed. The earlier
                ones since the checkpoint are replayed as they were.
            changed: Something that the manager cannot see is changed before training goes on.

        Returns:
            The checkpoint that the run is at now.

        Raises:
            RollbackLoopError: The same step failed again after a rollback that changed nothing, or there were
                `max_rollbacks` of them without a new checkpoint. Nothing was changed.
            CheckpointNotFoundError: There is no good checkpoint to go back to. Nothing was changed.
            ValueError: `skip_batches` is negative, or no component is a loader that can leave out batches.
            DirectoryLockedError: Another writer holds the directory. Nothing was changed.

        Warns:
            SkippedCheckpointWarning: A newer file was passed over, with the reason.
            HyperparameterReplacedWarning: What was changed by hand before this call, such as a learning rate, is the
                file's again.
        """
        self._refuse_closed()
        self.wait()
        left_out = self._batches_to_leave_out(skip_batches)
        failing, why = self._failed or (self._step + 1, "no save or step was refused")
        changes = changed or skip_batches > 0
        self._refuse_loop(failing, changes=changes)
        if self._saved is None:
            raise CheckpointNotFoundError(directory=self._files.path)
        self._enter_directory()
        there = self._files.steps()
        rejected: dict[Path, str] = {}
        source = "memory"
        found = self._restored_from_memory()
        if found is None:
            source = "disk"
            found = self._restored(None, None, (), rejected)
        if found is None:
            raise CheckpointNotFoundError(directory=self._files.path)
        checkpoint, ready = found
        for component, positions in left_out.items():
            self._components[component].obj.leave_out(positions)
        self._adopt(checkpoint, there)
        self._replay.restored(checkpoint.step, same=not changes)
        self._rollbacks.append((failing, changes))
        self._half_restored = False
        if self._left:
            self._enter_directory()
        data = {"failed_step": failing, "why": why, "left_out": left_out, "changed": changed, "source": source}
        self._report(checkpoint, ready, rejected, "rolled_back", **data)
        _log.info("rolled back from step %d to step %d", failing, checkpoint.step)
        return checkpoint

    def _restored_from_memory(self) -> tuple[Checkpoint, Plan] | None:
        """Restore the copy that an asynchronous save left, when it is of the newest checkpoint and that is on disk."""
        if self._copied is None or self._copied[0] != self._saved or not self._catalog.is_good(self._saved):
            return None
        checkpoint = self._catalog.peek(self._saved)
        ready = plan(self._components, self._copied[1], path=checkpoint.path)
        self._half_restored = True
        ready.apply()
        return checkpoint, ready

    def _refuse_loop(self, failing: int, *, changes: bool) -> None:
        attempts = len(self._rollbacks)
        if attempts >= self._max_rollbacks:
            reason = f"max_rollbacks={self._max_rollbacks} without a new checkpoint in between"
        elif not changes and (failing, False) in self._rollbacks:
            reason = "the last rollback changed nothing, and neither would this one"
        else:
            return
        raise RollbackLoopError(step=failing, attempts=attempts, reason=reason, path=self._files.path)

    def _batches_to_leave_out(self, count: int) -> dict[str, Any]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"skip_batches must be an int, 0 or more; got {count!r}")
        able = {name: c.obj for name, c in self._components.items() if hasattr(c.obj, "leave_out")}
        if count and not able:
            raise ValueError(
                "skip_batches needs a loader that can leave out batches among the components: wrap the DataLoader in "
                "safeckpt.ResumableLoader and register it"
            )
        # What was left out before stays out: the checkpoint may be older than that decision.
        left_out = {
            name: sorted({*getattr(loader, "left_out", ()), *(loader.last_batches(count) if count else ())})
            for name, loader in able.items()
        }
        return {name: positions for name, positions in left_out.items() if positions}

    def _event(self, kind: str, step: int | None, **data: Any) -> None:
        """Append to the history of this run; a directory that is not there yet, or not writable, has none."""
        mine = self._saved is not None or not self._strangers()
        if mine and os.access(self._files.path, os.W_OK):
            self._events.append(kind, step=step, **data)
