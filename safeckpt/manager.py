"""CheckpointManager: the public surface of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

# Three that are needed first by a save or a rollback are imported here: Python loses an interrupt that hits an import.
import filelock  # noqa: F401

import safeckpt.file.reading.loading
import safeckpt.file.writing.readback  # noqa: F401
from safeckpt.distributed.ranks import Ranks
from safeckpt.errors import UncapturedStateWarning
from safeckpt.run.arguments import checked_names, checked_notes, checked_step
from safeckpt.run.capturing import Capturer
from safeckpt.run.catalog import Catalog, Checkpoint
from safeckpt.run.checking import Wanted
from safeckpt.run.first_draws import FirstDraws
from safeckpt.run.membership import Membership
from safeckpt.run.pruning import Pruning
from safeckpt.run.replay import Replay, ReplayPolicy, ReplayReport
from safeckpt.run.restoring import Restorer
from safeckpt.run.rollback import Rollback
from safeckpt.run.run import Run
from safeckpt.run.run_directory import RunDirectory
from safeckpt.run.saved_hook import SavedHook
from safeckpt.run.saving import AsyncSave, Saver
from safeckpt.run.schedule import SaveSchedule
from safeckpt.run.steps import Steps
from safeckpt.run.stop_request import StopRequest
from safeckpt.run.timeline import Timeline
from safeckpt.state import Guard, LossLimit, register, uncaptured
from safeckpt.store import Best, CheckpointDirectory, WriterLock
from safeckpt.system.arguments import checked_bool
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from safeckpt.remote import Mirror
    from safeckpt.run.mirroring import RunMirror

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves, restores and rolls back everything that a training run depends on, in one directory.

    The directory is made at the first write. A writing manager holds the directory's writer lock until `close`.

    Args:
        directory: Where the checkpoints are: `step-00001200.pt` and so on, each an ordinary torch file.
        components: Name to object: modules, optimizers, schedulers, gradient scalers, loaders, generators, objects
            with `state_dict` and `load_state_dict`, plain dicts of plain values. The random streams of the process
            (Python, NumPy, torch on every device) are always captured.
        keep_last: Newest good checkpoints to keep, 1 or more.
        keep_best: Which checkpoints to keep for their metrics, one `Best` or several. None: as the run that is restored
            did; `()`: none.
        keep_every: Checkpoints whose step is a multiple of this are kept for good; with a `timedelta`, the newest good
            one of each such period (UTC, by the time in the file).
        save_every: When `end_step` saves: a number of steps (each time a multiple of it is reached or passed), or a
            `timedelta` since the last save. None: only `save` saves.
        async_save: `save` returns when the state is guarded and copied, and a thread writes it. Takes memory for one
            more copy of the state. A failed write is raised by the next `save`, `wait`, `restore`, `rollback` or
            `close`, and logged at once; an interpreter that exits finishes the write. `"process"`: the same, and what
            the write computes takes no turns of this interpreter, since a process of its own does it, with memory that
            both share. For where cores are to spare; on Linux only. It imports neither the script nor torch, and
            ends with this process. Where it is killed, the save fails with a `WritingProcessError`, and the next one
            starts another.
        guard: What has to be finite, besides the loss and the parameters, and how large the loss may be.
        on_replay_mismatch: What to do when a loss that is computed again after a restart differs from the recorded
            one: `"warn"` for a `ReplayMismatchWarning`, `"error"` for a `ReplayMismatchError`, `"ignore"`.
        stop_signals: Signals that ask the run to stop, for example `(signal.SIGTERM, signal.SIGUSR1)`: the next
            `end_step` saves, and `stop_requested` is True. Only in the main thread.
        stop_before: When to stop as by a signal: a `datetime` with a time zone, before which the last save is whole, or
            a `timedelta`, which is how long before the end of the allocation that is (Slurm and GitLab CI tell the
            end). The longest save so far and the last step are taken off besides.
        lock_timeout_seconds: How long to wait for another writer of the directory.
        ranks: With an initialised process group: how to wait for the other processes and what they compare.
        progress: Called as `progress(what, done_bytes, total_bytes)` every few megabytes while a checkpoint is written
            (`"save"`; with `async_save` in the writing thread), while it is fetched from a mirror (`"fetch"`) and
            while it is checked before it is restored (`"verify"`). What it raises stops the save or restore as any
            other error does.
        save_on_exit: Whether leaving the `with` block without an error saves the last step that ended, when it is not
            saved yet. One that `end_step(save=False)` owes is saved in any case.
        notes: Plain values that are kept with each checkpoint and never restored, such as `vars(args)`. `safeckpt show`
            prints them; those that differ at a restore are an `EnvironmentChangedWarning`.
        on_saved: Called as `on_saved(checkpoint)` after each commit, in the order of the commits: to log it elsewhere,
            to copy it, to point a link at it. It is called in a thread of its own, in a process group on rank 0, and
            `close` waits for it. What it raises is a warning.
        mirror: A prefix in an object store, such as `"s3://bucket/runs/x"`, or a `Mirror`: checkpoints are copied there
            behind training, and `restore` takes the newer of what is here and there. Needs `safeckpt[cloud]`.

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
        keep_every: int | dt.timedelta | None = None,
        save_every: int | dt.timedelta | None = None,
        async_save: AsyncSave = False,
        guard: Guard = Guard(),  # noqa: B008 - frozen
        on_replay_mismatch: ReplayPolicy = "warn",
        stop_signals: Iterable[int] = (),
        stop_before: dt.timedelta | dt.datetime | None = None,
        lock_timeout_seconds: float = 10.0,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
        progress: Callable[[str, int, int], object] | None = None,
        save_on_exit: bool = True,
        notes: Mapping[str, Any] | None = None,
        on_saved: Callable[[Checkpoint], object] | None = None,
        mirror: str | Mirror | None = None,
    ) -> None:
        _check_options(
            guard=guard,
            async_save=async_save,
            ranks=ranks,
            progress=progress,
            save_on_exit=save_on_exit,
        )
        files = CheckpointDirectory(directory)
        lock = WriterLock(directory, lock_timeout_seconds)
        timeline = Timeline(SaveSchedule(save_every))
        settings: dict[str, Any] = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "save_every": save_every,
            "async_save": async_save,
            "ranks": dataclasses.replace(ranks, process_group=None),  # each process has another object for it
            "notes": checked_notes(notes),
        }
        membership = Membership(ranks, settings, files.path)
        catalog = Catalog(files, None if progress is None else functools.partial(progress, "verify"))
        run_directory = RunDirectory(catalog, lock, timeline, membership)
        self._pruning = pruning = Pruning(catalog, keep_last, keep_best, keep_every)
        self._hook = None if on_saved is None else SavedHook(on_saved)
        if mirror is not None:
            from safeckpt.run.mirroring import RunMirror, mirror_of  # noqa: PLC0415 - a client of the store, and more

            wanted = mirror_of(mirror)
            settings["mirror"] = dataclasses.replace(wanted, options={}, client_options={})  # what may be secret stays
            run_directory.mirror = RunMirror(
                wanted,
                files,
                lock,
                policies=pruning.policies_for,
                event=run_directory.add_event,
                progress=None if progress is None else functools.partial(progress, "fetch"),
            )
        registered = register(components)
        settings["components"] = {name: component.kind for name, component in registered.items()}
        replay = Replay(files.losses, on_replay_mismatch, run_directory.add_event, lambda: lock.held)
        for line in uncaptured(components, registered):
            warn_caller(f"Not captured: {line}.", UncapturedStateWarning)
        self._stop_request = StopRequest(stop_signals, stop_before, run_directory.mirror)
        membership.on_lost = self._stop_request.give_up
        self._save_on_exit = save_on_exit
        self._mutex = threading.RLock()  # threads that call one manager take turns
        self._run = run = Run(
            registered,
            timeline,
            run_directory,
            membership,
            replay,
            settings["notes"],
            LossLimit(guard.loss_above),
            FirstDraws(),
        )
        # Last: a manager that was refused leaves no hook on an optimizer behind.
        self._capturer = Capturer(run, guard, components, is_staged=bool(async_save))
        self._saver = Saver(
            run,
            self._capturer,
            pruning,
            async_save=async_save,
            progress=None if progress is None else functools.partial(progress, "save"),
            on_commit=None if self._hook is None else self._hook.committed,
        )
        self._steps = Steps(run, self._capturer, self._saver, self._stop_request)
        self._restorer = Restorer(run, on_restored=self._steps.on_restored)
        self._rollback = Rollback(run, self._restorer, self._saver, self._steps)

    @property
    def step(self) -> int:
        """The last step that was saved, restored or ended; 0 at first."""
        return self._run.timeline.step

    @property
    def directory(self) -> Path:
        """Where the checkpoints are, as an absolute path."""
        return self._run.directory.path

    @property
    def replay(self) -> ReplayReport | None:
        """How the losses since the last restore compare with those on record; None when nothing was restored."""
        return self._run.replay.report

    @property
    def mirror(self) -> RunMirror | None:
        """The copy in a store: `mirror.durable_step`, `mirror.wait()`; None without one."""
        return self._run.directory.mirror

    @property
    def stop_requested(self) -> bool:
        """Whether one of `stop_signals` has come, or the time of `stop_before`: also for a loop to ask in between.

        With a process group: whether all ranks know that one of them got it, which is at the next step at which they
        agree.
        """
        return self._steps.stop_requested

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._close(failed=True)
            return
        try:
            if (self._save_on_exit or self._steps.is_owed) and not self._run.timeline.is_closed:
                self._steps.finish()
        except BaseException:
            self._close(failed=True)
            raise
        self.close()

    def close(self) -> None:
        """Finish what is pending and give the directory's lock and the signal handlers back. May be called twice.

        Raises:
            BaseException: What a write in the background has raised, or what this rank has refused since the ranks met
                last; the manager is closed all the same.
        """
        pending = self._steps.take_pending_refusal()
        self._close()
        if pending is not None:
            raise pending

    def _close(self, *, failed: bool = False) -> None:
        with contextlib.ExitStack() as closing:  # from the last to the first, each of them whatever another one raises
            closing.callback(self._run.close)
            if self.mirror is not None:
                closing.callback(self.mirror.close, hurried=failed or self._stop_request.is_heeded)
            if self._hook is not None:
                closing.callback(self._hook.close)
            closing.callback(self._steps.close)
            closing.callback(self._saver.close)
            closing.callback(self._capturer.close)
            closing.callback(self._stop_request.close)
            if self._run.membership.was_rank_zero:
                closing.callback(self._run.replay.close)
            closing.callback(self.wait)

    def wait(self) -> None:
        """Return when every save is committed. Only with `async_save` is there anything to wait for.

        Raises:
            BaseException: What a write in the background has raised, once; earlier checkpoints are untouched.
        """
        with self._mutex:
            self._saver.wait()

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the checkpoints that pass the cheap check (name, trailer, size, structure), ascending by step.

        Raises:
            FormatVersionError: A file is of a newer format than this version reads.

        Warns:
            SkippedCheckpointWarning: A file with a checkpoint's name is none, or damaged.
        """
        return self._run.directory.catalog.list_all()

    def latest(self) -> Checkpoint | None:
        """Return the newest good checkpoint, every byte of it verified; None when there is none.

        Raises:
            FormatVersionError: The newest file is of a newer format.
        """
        return self._run.directory.catalog.find_latest()

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Save everything as the checkpoint of a step: finite, whole and durable when this returns.

        With `async_save` it is guarded and copied when this returns, and durable after `wait`; until then it is in no
        listing. A save that is still being written is waited for first.

        Killed at any moment, the directory holds the earlier checkpoints and this one or not, never a part of it.
        Nothing older is deleted before the new file is safe on disk. The live objects are not changed: a run that
        saves at every step has the same bits as one that never saves.

        Args:
            step: Optimizer steps completed; not lower than at the last call.
            loss: The loss at this step: a number, tensor, NumPy scalar, or a dict or list of them. Has to be finite.
                None: the one that `end_step` was given for this step.
            metrics: Name to number, for `keep_best`; may be NaN, which is never best.

        Returns:
            The checkpoint.

        Raises:
            NonFiniteError: The loss or a guarded tensor is NaN or Inf. Nothing was written, nothing rotated.
            LossSpikeError: The loss is above the limit of the guard. Nothing was written, nothing rotated.
            UnsavableStateError: A value could not be loaded again. Nothing was written.
            StepExistsError: The step is the last one that was saved or restored, and the state is different now. With
                the same state that checkpoint is returned, with a new loss or new metrics in it; one that was deleted
                is saved anew.
            LoadError: The step is the last one that was saved or restored, and its checkpoint is damaged. Nothing was
                written: move it away, and this step can be saved anew.
            DirectoryInUseError: The directory holds checkpoints that this manager did not restore from.
            DirectoryLockedError: Another writer holds the directory.
            ValueError: The step is lower than one that was saved, restored or ended; or the last restore or rollback
                was interrupted, so that the objects may be a mixture of two states.
            OSError: The system refused, with errno: every earlier file is untouched, no temporary file is left.
            DurabilityUnknownError: The file is in place, but a power loss may still take it back; nothing was pruned.
            ReplicaDriftError: Ranks of a process group hold different copies of what should be alike. Nothing was
                written.
            GroupError: A rank of a process group failed, is lost, sees another directory, or does something else. The
                same error on every rank; nothing was committed, unless it says so.
            WritingProcessError: The process of `async_save="process"` was ended. Nothing was committed.

        Cost:
            One pass over the tensors for the guard, one for checksum and write, an fsync of the file and one of the
            directory; in a process group one more pass, to compare what should be alike. Tensors on a device are copied
            to the host piece by piece. Files that another process wrote are read once before they count as kept.
        """
        with self._mutex:
            return self._steps.save(step, loss, metrics)

    def end_step(
        self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None, save: bool = True
    ) -> Checkpoint | None:
        """Tell the manager that a step is done: the loss is guarded and recorded, and a checkpoint saved when due.

        One is due by `save_every`, and at once when a stop signal has come or the time of `stop_before`.

        After a restart, losses that were recorded before it are computed again. Each is compared with the recorded
        one, with `==`: `replay` has the result, and the log of `safeckpt` says when all were equal.

        Where things that belong to the step are still to come (validation, schedulers, the end of an epoch), say
        `save=False`: all of the above happens now, and a checkpoint that is due is owed until `save_due` behind them.

        Args:
            step: Optimizer steps completed, higher than at the last call.
            loss: As in `save`. A tensor on a device costs a synchronisation: pass it every n steps if that matters.
            metrics: As in `save`.
            save: Whether a checkpoint that is due is saved now. False: it is owed, and `save_due` saves it.

        Returns:
            The checkpoint that was saved, None when none was.

        Raises:
            RuntimeError: The checkpoint of the step before is owed, and nobody has tried to save it.
            NonFiniteError: The loss is NaN or Inf (or, when a save was due, a guarded tensor). Nothing was written.
            LossSpikeError: The loss is above the limit of the guard. Nothing was written.
            OSError: The system refused the save that was due. The step has ended, and the next one tries to save again.
            ReplayMismatchError: The loss differs from the recorded one, and the manager was told to raise this. The
                step does not count as ended.
            ValueError: The step is not higher than the last one.
            Exception: What `save` raises, when a save was due.

        Warns:
            ReplayMismatchWarning: The loss differs from the recorded one: the resumed run is another run.
        """
        with self._mutex:
            return self._steps.end(step, loss, metrics, save=checked_bool("save", save))

    @property
    def is_due(self) -> bool:
        """Whether `save_due` has something to save: a checkpoint is owed, or a stop was requested since.

        The same on all ranks of a process group.
        """
        return self._steps.is_due

    def save_due(self, *, metrics: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Save the last step that ended, if `end_step(save=False)` owes its checkpoint or a stop was requested.

        Objects, random streams and gradients are saved as they are now, the loader's position as it was when the step
        ended, or at the start of the next epoch when the epoch has ended since. Guarded as in `save`. `save` of that
        step pays the debt as well, and so does leaving the `with` block; `close` does not.

        Args:
            metrics: As in `save`; added to those given to `end_step`.

        Returns:
            The checkpoint, None when nothing was owed.

        Raises:
            RuntimeError: An optimizer step was made since the step ended: the weights are no longer its own.
            Exception: What `save` raises. The step has ended all the same; it is still owed, a second call tries
                again, and the next `end_step` may come, where a checkpoint is due again.
        """
        with self._mutex:
            return self._steps.save_due(metrics)

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        only: Collection[str] | None = None,
        keep_live: Collection[str] = (),
        fresh: Collection[str] = (),
        streams: bool = True,
    ) -> Checkpoint | None:
        """Put a checkpoint into the live objects, all of it or nothing: the run goes on as the same run.

        Everything is checked first (names, shapes, dtypes, classes, ties, parameter names of the optimizers, groups,
        loader, devices); only when all of it fits is the first object changed. The random streams come last.
        Afterwards every parameter's `.grad` is None, as at process start, or as saved where it was part of the state.

        Args:
            step: Which checkpoint; None for the newest good one. After an older one, the checkpoints with a higher
                step are renamed at the next save, never picked as latest.
            only: Names of the components to restore, and `"rng"` for the random streams; None for everything. Train and
                eval modes stay as they are then, and a manager that restored only some components of a checkpoint does
                not save.
            keep_live: Hyper-parameters as `component.name`, such as `"optimizer.weight_decay"`, whose live value
                stays; all others come from the file.
            fresh: Components that keep their live state, because they are new in this run, such as `"scheduler"`; and
                entries of plain dicts, such as `"counters.best"`. Everything else is restored, and the manager saves.
            streams: Whether the random streams are set now. False: they are checked, `restore_streams` sets them, and
                no step ends and nothing is saved before. For a trainer that draws between its set-up and the first
                batch.

        Returns:
            The checkpoint; None when the directory is missing or holds no checkpoint, and nothing was changed.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
            NoGoodCheckpointError: There are checkpoints and none is good: a fresh start must not look like a resume.
            LoadError: The file of the step that was named is not good, or asks for a type that is not registered.
            FormatVersionError: The newest file is of a newer format.
            ComponentMismatchError: A component is on one side only.
            StateMismatchError: Something does not fit; `mismatches` lists all of it.
            ValueError: A name in `keep_live` is no hyper-parameter, or one in `fresh` is neither component nor entry.
            GroupError: As in `save`.

        Warns:
            SkippedCheckpointWarning: A newer file was passed over, with the reason.
            SafeckptWarning: There is no checkpoint, and the history of the directory says that there were.
            HyperparameterReplacedWarning: The file's hyper-parameters replaced others in the script.
            EnvironmentChangedWarning: The run computes in another environment than before, so bits may differ.
            UncapturedStateWarning: Random numbers were drawn before this manager was built, from another seed, or
                another number of them, than at the first start of the run; or objects that shared a tensor do not any
                more.

        Cost:
            The file is read once to verify it and mapped to copy from it; no second copy of the state is kept. Of a
            sharded checkpoint each rank's part is read into host memory first.
        """
        wanted = Wanted(
            None if step is None else checked_step(step),
            checked_names(only, "only"),
            checked_names(keep_live, "keep_live"),
            checked_names(fresh, "fresh"),
            checked_bool("streams", streams),
        )
        with self._mutex:
            self._run.timeline.refuse_closed()
            self.wait()
            restored = self._restorer.restore(wanted)
            if restored is None:
                return None
            if restored.is_whole:
                self._pruning.adopt(restored.header)
            return restored.checkpoint

    def restore_streams(self) -> None:
        """Set the random streams of the checkpoint that `restore(streams=False)` has put into the objects.

        The next random number drawn, on every device, is then that of the run which saved. On every rank of a process
        group for itself.

        Raises:
            RuntimeError: Nothing was restored, or the streams are set already. Nothing was changed.
        """
        with self._mutex:
            self._run.timeline.refuse_closed()
            self._restorer.restore_streams()

    # -- rolling back ------------------------------------------------------------------------------------------------

    def rollback(self, *, skip_batches: int = 0, changed: bool = False, max_rollbacks: int = 3) -> Checkpoint:
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
            max_rollbacks: How many are allowed without a new checkpoint in between.

        Returns:
            The checkpoint that the run is at now.

        Raises:
            RollbackLoopError: The same step failed again after a rollback that changed nothing, or there were
                `max_rollbacks` of them without a new checkpoint. Nothing was changed.
            CheckpointNotFoundError: The run has no checkpoint yet. Nothing was changed.
            RollbackError: The only checkpoint was imported, and has not all of the state. Nothing was changed.
            NoGoodCheckpointError: There are checkpoints, and none is good. Nothing was changed.
            RestoreError: The checkpoint does not fit the objects, which were changed since. Nothing was changed.
            GroupError: As in `save`.
            ValueError: `skip_batches` is negative, `max_rollbacks` is below 1, or no component is a loader that can
                leave out batches.
            DirectoryLockedError: Another writer holds the directory. Nothing was changed.

        Warns:
            SkippedCheckpointWarning: A newer file was passed over, with the reason.
            HyperparameterReplacedWarning: What was changed by hand before this call, such as a learning rate, is the
                file's again.
        """
        with self._mutex:
            self._run.timeline.refuse_closed()
            self.wait()
            return self._rollback.roll_back(skip_batches=skip_batches, changed=changed, most=max_rollbacks)


def _check_options(*, guard: Any, async_save: Any, ranks: Any, progress: Any, save_on_exit: Any) -> None:
    """Refuse options of a wrong kind.

    Raises:
        TypeError: The kind is wrong.
        ValueError: It is out of range.
    """
    if not isinstance(guard, Guard):
        raise TypeError(f"guard must be a Guard; got {type(guard).__name__}")
    if not isinstance(ranks, Ranks):
        raise TypeError(f"ranks must be a Ranks; got {type(ranks).__name__}")
    if not isinstance(async_save, bool) and async_save != "process":
        raise TypeError(f'async_save must be True, False or "process"; got {async_save!r}')
    if async_save == "process":
        from safeckpt.run.writing_process import why_impossible  # noqa: PLC0415 - few write by a process

        if (reason := why_impossible()) is not None:
            raise ValueError(f'async_save="process" cannot be had here: {reason}. Use async_save=True')
    checked_bool("save_on_exit", save_on_exit)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable as progress(what, done_bytes, total_bytes); got {progress!r}")
