"""Every exception and warning of safeckpt.

::

    SafeckptError(Exception)                                .path .rank
    |- SaveError                                            nothing was committed; earlier files are untouched
    |  |- NonFiniteError            (+ ValueError)           .step .loss .tensors
    |  |- LossSpikeError            (+ ValueError)           .step .loss .limit .median
    |  |- UnsavableStateError       (+ TypeError)            .location .type_name
    |  |- StepExistsError           (+ FileExistsError)      .step
    |  |- DirectoryInUseError       (+ FileExistsError)      .directory .steps
    |  |- ReplicaDriftError         (+ ArithmeticError)      .ranks .names
    |  `- WritingProcessError       (+ RuntimeError)         .exit_code
    |- LoadError                                            no object was changed
    |  |- CheckpointNotFoundError   (+ FileNotFoundError)    .directory .step .available_steps
    |  |- DamagedCheckpointError    (+ RuntimeError)         .reason .record .tensors
    |  |- FormatVersionError        (+ RuntimeError)         .found .supported
    |  |- UntrustedTypeError        (+ pickle.UnpicklingError) .type_name
    |  `- NoGoodCheckpointError                             .rejected: ((path, reason), ...)
    |- RestoreError                                         raised before the first change
    |  |- ComponentMismatchError    (+ ValueError)           .missing .unexpected
    |  `- StateMismatchError        (+ ValueError)           .mismatches
    |- RollbackError
    |  `- RollbackLoopError                                 .step .attempts
    |- DirectoryLockedError         (+ TimeoutError)         .pid .host
    |- MirrorError                                          .url; every checkpoint in the directory is untouched
    |  |- MirrorUnreachableError    (+ ConnectionError)      .reason
    |  |- MirrorTakenError          (+ RuntimeError)         .epoch .pid .host
    |  |- MirrorUnsafeError         (+ RuntimeError)
    |  `- MirrorBehindError         (+ TimeoutError)         .saved_step .durable_step
    |- ReplayMismatchError          (+ ArithmeticError)      .step .recorded .recomputed .changed
    |- ProofError                   (+ RuntimeError)         .run .exit_code
    |- GroupError                                           the processes of a group could not act together
    |  |- RankLostError             (+ RuntimeError)         .lost .timeout_seconds
    |  |- RankFailedError           (+ RuntimeError)         .type_name
    |  |- RanksDisagreeError        (+ ValueError)
    |  |- GroupDestroyedError       (+ RuntimeError)
    |  `- DirectoryNotSharedError   (+ FileNotFoundError)    .directory
    `- DurabilityUnknownError       (+ OSError)              .step; committed, but a power loss may undo it
    SafeckptWarning(UserWarning)
    |- SkippedCheckpointWarning         a file that is not good was skipped
    |- ComponentChangedWarning          a component is built differently than in the run that saved
    |- EnvironmentChangedWarning        bits may differ from those of the run that saved
    |- UncapturedStateWarning           the checkpoint lacks state that training depends on
    |- HyperparameterReplacedWarning    the value in the file replaced that of the script
    |- ReplayMismatchWarning            a recomputed loss differs from the recorded one
    |- ImportedStateWarning             what another tool had not saved is as the script has made it
    `- ReplicaDriftWarning              the ranks' copies of one model are no longer equal

Every error takes its data as keywords, keeps it in attributes, builds its text from it and can be pickled. The text
has three parts: what happened, what is still safe, what to call next. The second base is the built-in exception that
callers of torch catch already. An ``OSError`` from the system is never wrapped. `NonFiniteTensor` is here since
`NonFiniteError` holds it.
"""

from __future__ import annotations

import errno
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CheckpointNotFoundError",
    "ComponentChangedWarning",
    "ComponentMismatchError",
    "DamagedCheckpointError",
    "DirectoryInUseError",
    "DirectoryLockedError",
    "DirectoryNotSharedError",
    "DurabilityUnknownError",
    "EnvironmentChangedWarning",
    "FormatVersionError",
    "GroupDestroyedError",
    "GroupError",
    "HyperparameterReplacedWarning",
    "ImportedStateWarning",
    "LoadError",
    "LossSpikeError",
    "MirrorBehindError",
    "MirrorError",
    "MirrorTakenError",
    "MirrorUnreachableError",
    "MirrorUnsafeError",
    "NoGoodCheckpointError",
    "NonFiniteError",
    "NonFiniteTensor",
    "ProofError",
    "RankFailedError",
    "RankLostError",
    "RanksDisagreeError",
    "ReplayMismatchError",
    "ReplayMismatchWarning",
    "ReplicaDriftError",
    "ReplicaDriftWarning",
    "RestoreError",
    "RollbackError",
    "RollbackLoopError",
    "SafeckptError",
    "SafeckptWarning",
    "SaveError",
    "SkippedCheckpointWarning",
    "StateMismatchError",
    "StepExistsError",
    "UncapturedStateWarning",
    "UnsavableStateError",
    "UntrustedTypeError",
    "WritingProcessError",
]

_UNTOUCHED = "nothing was written, and no file was changed."
_UNREAD = "nothing was loaded, no object was changed, and the file is as it was."
_MOST_LISTED = 5  # entries of a long list in a text; the attribute has all of them


class SafeckptError(Exception):
    """Base of every error that safeckpt raises.

    Attributes:
        path: The file or directory the error is about, None when it is about neither.
        rank: The process of a group in which it happened, None when there is no group.
    """

    path: str | None = None
    rank: int | None = None

    def __init__(self, happened: str, safe: str = "", next_step: str = "", *, path: object = None) -> None:
        parts = [happened]
        if safe:
            parts.append(f"Still safe: {safe}")
        if next_step:
            parts.append(f"Next: {next_step}")
        super().__init__("\n".join(parts))
        self.path = None if path is None else str(path)

    def __str__(self) -> str:
        # OSError, a base of some subclasses, would print "[Errno ...]" instead of the text.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Callable[..., SafeckptError], tuple[object, ...]]:
        # Exceptions pickle as cls(*args), which cannot pass keyword-only arguments.
        return _rebuild, (type(self), self.args, self.__dict__, getattr(self, "errno", None))


def _rebuild(
    cls: type[SafeckptError], args: tuple[object, ...], attributes: dict[str, Any], number: int | None
) -> SafeckptError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    if isinstance(error, OSError):
        error.errno = number
    return error


def listed(items: Sequence[object], separator: str = ", ", most: int = _MOST_LISTED) -> str:
    """Return the first items of a list as text, and how many more there are."""
    shown = [str(item) for item in items[:most]]
    if len(items) > most:
        shown.append(f"and {len(items) - most} more")
    return separator.join(shown)


def _lines(items: Sequence[object]) -> str:
    return listed(items, "\n  ")


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that is not finite.

    Attributes:
        name: Dotted name, `component.qualified.name`.
        nan_count: Elements that are NaN; a complex element is one when either part is.
        inf_count: Elements that are +Inf or -Inf.
        numel: Elements of the tensor (stored ones, when it is sparse).
        first_index: Index of the first element that is not finite, one entry per dimension.
    """

    name: str
    nan_count: int
    inf_count: int
    numel: int
    first_index: tuple[int, ...]

    def __str__(self) -> str:
        where = list(self.first_index)
        return f"{self.name}: {self.nan_count} NaN, {self.inf_count} Inf of {self.numel} elements, first at {where}"


class SaveError(SafeckptError):
    """A save was refused: nothing was committed, and earlier files are untouched."""


class NonFiniteError(SaveError, ValueError):
    """The loss or a guarded tensor contains NaN or Inf.

    Attributes:
        step: The step to be saved or ended, None outside a manager.
        loss: The loss in Python numbers; None when it was finite or not given.
        tensors: Every tensor that is not finite, in the order of the state.
    """

    def __init__(
        self,
        *,
        step: int | None = None,
        loss: object = None,
        loss_text: str | None = None,
        tensors: Sequence[NonFiniteTensor] = (),
        good: str | None = None,
        next_step: str = "find the origin of the first NaN or Inf before you save this state.",
        path: object = None,
    ) -> None:
        refused = "The" if step is None else f"Step {step} was not saved: the"
        found = []
        if loss is not None:
            found.append(f"loss = {loss if loss_text is None else loss_text}")
        if tensors:
            found.append(_lines(tensors))
        happened = f"{refused} state contains NaN or Inf:\n  " + "\n  ".join(found)
        super().__init__(happened, good or _UNTOUCHED, next_step, path=path)
        self.step = step
        self.loss = loss
        self.tensors = tuple(tensors)


class LossSpikeError(SaveError, ValueError):
    """The loss is finite, and above what `Guard(loss_above=...)` allows.

    Attributes:
        step: The step to be saved or ended.
        loss: The loss; of several numbers the largest.
        limit: What it may be at most.
        median: That of the losses before, where the limit is a multiple of it; else None.
    """

    def __init__(
        self,
        *,
        step: int,
        loss: float,
        limit: float,
        median: float | None = None,
        good: str | None = None,
        next_step: str = "look at the batch, or raise loss_above.",
        path: object = None,
    ) -> None:
        before = "" if median is None else f", {limit / median:.6g} times the median {median:.6g} of the losses before"
        super().__init__(
            f"Step {step} was not saved: its loss {loss:.6g} is above {limit:.6g}{before}.",
            good or _UNTOUCHED,
            next_step,
            path=path,
        )
        self.step = step
        self.loss = loss
        self.limit = limit
        self.median = median


REFUSALS = (NonFiniteError, LossSpikeError)  # of a step, after which a rollback goes on


class UnsavableStateError(SaveError, TypeError):
    """A value in the state cannot be written, or could not be read back.

    Attributes:
        location: Key path of the value, written as Python indexes it.
        type_name: Qualified name of its type.
    """

    def __init__(self, *, location: str, type_name: str, reason: str = "", cure: str = "", path: object = None) -> None:
        why = reason or "torch.load(weights_only=True) could not read it back"
        super().__init__(
            f"{location or 'The object'} is a {type_name}, which cannot be saved: {why}.",
            _UNTOUCHED,
            cure
            or "store plain values and tensors (numbers, strings, lists, dicts), or register the type with "
            "torch.serialization.add_safe_globals.",
            path=path,
        )
        self.location = location
        self.type_name = type_name


class StepExistsError(SaveError, FileExistsError):
    """The last saved or restored step was saved again, with a different state.

    Attributes:
        step: That step.
    """

    def __init__(self, *, step: int, path: object = None) -> None:
        super().__init__(
            f"Step {step} is already saved, and the state is different now.",
            f"the checkpoint of step {step} is untouched.",
            "save a higher step: the number of completed optimizer steps rises between two saves. Where schedulers, "
            "counters or random numbers of validation come behind the loop over the loader, let the last step of the "
            "epoch end without a save, manager.end_step(manager.step + 1, loss=loss, save=loader.batch < len(loader)), "
            "and call manager.save(manager.step, metrics=metrics) behind all of them.",
            path=path,
        )
        self.errno = errno.EEXIST
        self.step = step


class DirectoryInUseError(SaveError, FileExistsError):
    """The directory holds checkpoints that this manager did not restore from.

    Attributes:
        directory: The directory.
        steps: Steps of the checkpoints in it, ascending.
        restored_only: The components that were restored, when it was a part of a checkpoint; else None.
    """

    def __init__(self, *, directory: object, steps: Sequence[int], restored_only: Sequence[str] | None = None) -> None:
        newest = ", ".join(map(str, steps[-_MOST_LISTED:]))
        if restored_only is None:
            happened = f"{directory} already holds {len(steps)} checkpoint(s) of another run (newest steps: {newest})."
            advice = (
                "to continue that run, call manager.restore() before the first save (again, if another job has saved "
                "since); to start a new run, choose an empty directory."
            )
        else:
            happened = (
                f"This manager restored only {listed(restored_only)} from {directory}, so its state is a mixture that "
                "no run ever had, and it does not save."
            )
            advice = (
                "to continue the run, call manager.restore() without only=; where a component is new, "
                "restore(fresh=(...,)); to start a new run from these weights, choose an empty directory."
            )
        super().__init__(happened, "every checkpoint is untouched.", advice, path=directory)
        self.errno = errno.EEXIST
        self.directory = str(directory)
        self.steps = tuple(steps)
        self.restored_only = None if restored_only is None else tuple(restored_only)


class ReplicaDriftError(SaveError, ArithmeticError):
    """The ranks' copies of one model are no longer equal.

    Attributes:
        ranks: Ranks whose copy differs from that of rank 0.
        names: Tensors and values that differ, sorted.
    """

    def __init__(
        self, *, step: int, ranks: Sequence[int], names: Sequence[str], first: bool = False, path: object = None
    ) -> None:
        super().__init__(
            drift_text(step, ranks, names),
            _UNTOUCHED,
            "make the copies equal before the first step: use DistributedDataParallel, or one seed on every rank. If "
            "each rank holds a different part, such as a stage of a pipeline, wrap it in an object with state_dict and "
            "load_state_dict, which is saved for every rank. Ranks(on_drift='ignore') saves only rank 0's copy."
            if first
            else "find what the ranks do differently (an update outside the wrapper, a seed, a skipped step); "
            "manager.rollback(changed=True) makes the copies equal again.",
            path=path,
        )
        self.ranks = tuple(ranks)
        self.names = tuple(names)


def drift_text(step: int, ranks: Sequence[int], names: Sequence[str]) -> str:
    """Return the description of a drift, for the error and the warning."""
    return (
        f"At step {step} the copies on rank(s) {listed(ranks)} differ from the copy on rank 0, in {len(names)} "
        f"place(s):\n  {_lines(names)}"
    )


class WritingProcessError(SaveError, RuntimeError):
    """The process that writes for `async_save="process"` ended in the middle of a save.

    Attributes:
        exit_code: What it ended with; the negative number of a signal.
    """

    def __init__(self, *, pid: int, exit_code: int, path: object = None) -> None:
        how = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was killed by signal {-exit_code}"
        super().__init__(
            f"The process that writes the checkpoint (pid {pid}) {how} before it was done.",
            "nothing was committed, and every earlier checkpoint is untouched.",
            "save again: another process is started for it. Signal 9 often means that memory ran out: the log of the "
            "system says so. If it comes again, write in a thread, with async_save=True.",
            path=path,
        )
        self.exit_code = exit_code


class DurabilityUnknownError(SafeckptError, OSError):
    """The file has its final name, but the directory could not be synced: a power loss may undo the save.

    Attributes:
        step: The step that was saved, None outside a manager.
        errno: The system's error number.
    """

    def __init__(self, *, path: object, number: int | None, reason: str, step: int | None = None) -> None:
        super().__init__(
            f"{path} is saved, but its durability is unknown: the directory could not be synced ({reason}).",
            "the new file is complete and readable now; every earlier file is untouched, and nothing was pruned.",
            "check the file system, then save the next step.",
            path=path,
        )
        self.errno = number
        self.step = step


class LoadError(SafeckptError):
    """A checkpoint could not be used: no object was changed."""


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """The requested checkpoint does not exist.

    Attributes:
        directory: The directory that was searched.
        step: The requested step, None for the newest.
        available_steps: Steps in the directory, ascending.
    """

    def __init__(self, *, directory: object, step: int | None = None, available_steps: Sequence[int] = ()) -> None:
        what = "No checkpoint" if step is None else f"No checkpoint of step {step}"
        newest = ", ".join(map(str, available_steps[-_MOST_LISTED:]))
        super().__init__(
            f"{what} in {directory}.",
            "no object was changed.",
            f"choose an existing step (newest: {newest})." if newest else "save a checkpoint first.",
            path=directory,
        )
        self.errno = errno.ENOENT
        self.directory = str(directory)
        self.step = step
        self.available_steps = tuple(available_steps)


class DamagedCheckpointError(LoadError, RuntimeError):
    """A file does not hold the bytes that were written, or is another kind of file.

    Attributes:
        reason: The contradiction that was found, as one clause.
        record: Name of the damaged record, or region of the file; None when unknown.
        tensors: Dotted names of the tensors in the damaged records, such as `optimizer.state.0.exp_avg`; empty when
            unknown, or when it is something else.
    """

    def __init__(
        self,
        *,
        path: object,
        reason: str,
        record: str | None = None,
        tensors: Sequence[str] = (),
        next_step: str | None = None,
    ) -> None:
        where = f" (in {record})" if record and record not in reason else ""
        earlier = (
            "take an earlier checkpoint of that run; CheckpointManager.restore() finds the newest good one by itself."
        )
        super().__init__(
            f"{path} is {'damaged' if next_step is None else 'no checkpoint'}: {reason}{where}.",
            _UNREAD,
            earlier if next_step is None else f"{next_step}.",
            path=path,
        )
        self.reason = reason
        self.record = record
        self.tensors = tuple(tensors)


class FormatVersionError(LoadError, RuntimeError):
    """The file has a newer format than this version of safeckpt can read.

    Attributes:
        found: Format version of the file.
        supported: Format versions that can be read.
    """

    def __init__(self, *, path: object, found: int, supported: Sequence[int]) -> None:
        super().__init__(
            f"{path} has format version {found}; this safeckpt reads {', '.join(str(v) for v in supported)}.",
            _UNREAD,
            "install a newer safeckpt. An older checkpoint was not used instead, since that would lose progress.",
            path=path,
        )
        self.found = found
        self.supported = tuple(supported)


class UntrustedTypeError(LoadError, pickle.UnpicklingError):
    """The file needs a class or function that a safe load does not allow.

    Attributes:
        type_name: Qualified name of the class or function.
    """

    def __init__(self, *, path: object, type_name: str) -> None:
        super().__init__(
            f"{path} needs {type_name}, which weights_only=True does not allow.",
            "none of its code was executed, and no object was changed.",
            f"if you trust the file and the type, call torch.serialization.add_safe_globals([{type_name}]), then load "
            "again.",
            path=path,
        )
        self.type_name = type_name


class NoGoodCheckpointError(LoadError):
    """A directory holds checkpoints, but no good one.

    Attributes:
        rejected: (path, reason) of each, newest first.
    """

    def __init__(self, *, directory: object, rejected: Sequence[tuple[str, str]]) -> None:
        rows = _lines([f"{path}: {reason}" for path, reason in rejected])
        super().__init__(
            f"{directory} holds {len(rejected)} checkpoint(s), but no good one:\n  {rows}",
            "no object and no file was changed.",
            "copy a good checkpoint back into the directory, or start a new run in an empty one.",
            path=directory,
        )
        self.rejected = tuple((str(path), str(reason)) for path, reason in rejected)


class RestoreError(SafeckptError):
    """The checkpoint does not fit the live objects: no object was changed."""


class ComponentMismatchError(RestoreError, ValueError):
    """The names in the file and the names given to the manager differ.

    Attributes:
        missing: Names that the manager has (or was asked for) and the file lacks.
        unexpected: Names in the file that the manager lacks.
        available: All names in the file.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        available: Sequence[str] = (),
        path: object = None,
        cure: str = "",
    ) -> None:
        parts = []
        if missing:
            parts.append(f"not in the checkpoint: {', '.join(missing)}")
        if unexpected:
            parts.append(f"only in the checkpoint: {', '.join(unexpected)}")
        there = f" It holds {', '.join(available)}." if available else ""
        super().__init__(
            f"The components do not match {path or 'the checkpoint'}: {'; '.join(parts)}.{there}",
            "no object was changed.",
            cure
            or "give the manager the components of the run that saved, or restore some of them by name: "
            "restore(only=(...,)).",
            path=path,
        )
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.available = tuple(available)


class StateMismatchError(RestoreError, ValueError):
    """The saved state of a component does not fit the live one.

    Attributes:
        mismatches: Every difference, one sentence each.
    """

    def __init__(self, *, mismatches: Sequence[str], path: object = None, cure: str = "") -> None:
        super().__init__(
            f"{path or 'The checkpoint'} does not fit the live objects, {len(mismatches)} difference(s):\n  "
            + _lines(mismatches),
            "no object was changed.",
            cure
            or "build the objects as in the run that saved, or restore only the components that fit: "
            "restore(only=(...,)).",
            path=path,
        )
        self.mismatches = tuple(mismatches)


class RollbackError(SafeckptError):
    """A rollback is impossible or would not help: no live object was changed."""


class RollbackLoopError(RollbackError):
    """The run keeps failing after rollbacks.

    Attributes:
        step: The failing step.
        attempts: Rollbacks since the last new checkpoint.
    """

    def __init__(self, *, step: int, attempts: int, reason: str, path: object = None) -> None:
        super().__init__(
            f"Step {step} failed again after {attempts} rollback(s): {reason}.",
            "every checkpoint is untouched, and this call changed no live object.",
            "change something before you continue: rollback(skip_batches=1), a lower learning rate, or cleaner data.",
            path=path,
        )
        self.step = step
        self.attempts = attempts


class DirectoryLockedError(SafeckptError, TimeoutError):
    """Another writer has locked the directory.

    Attributes:
        pid: Process id of the holder, None when unknown.
        host: Host of the holder, None when unknown.
    """

    def __init__(
        self, *, directory: object, pid: int | None = None, host: str | None = None, since: str | None = None,
        reason: str = "another process is saving checkpoints into it", next_step: str | None = None,
        lost: bool = False,
    ) -> None:  # fmt: skip
        when = "" if since is None else f", since {since}"
        who = f" (pid {pid} on {host}{when})" if pid is not None else ""
        super().__init__(
            f"{directory} is {'not held by this process any more' if lost else 'locked'}: {reason}{who}.",
            _UNTOUCHED,
            next_step
            or "wait for the other process, stop it, or give this run its own directory. Reading needs no lock.",
            path=directory,
        )
        self.errno = errno.ETIMEDOUT
        self.pid = pid
        self.host = host


class MirrorError(SafeckptError):
    """A copy of the checkpoints in an object store could not be made, kept or used.

    Attributes:
        url: The prefix in the store, without anything secret.
    """

    def __init__(self, happened: str, safe: str, next_step: str, *, url: str) -> None:
        super().__init__(happened, safe, next_step, path=url)
        self.url = url


class MirrorUnreachableError(MirrorError, ConnectionError):
    """The store did not answer, or refused.

    Attributes:
        reason: What it or the way to it said.
    """

    def __init__(self, *, url: str, what: str, reason: str, safe: str = "every checkpoint on this machine.") -> None:
        super().__init__(
            f"{url} failed at {what.strip()}: {reason}",
            safe,
            "look at the network, the credentials and the name of the bucket, and try them with `safeckpt doctor URL`; "
            "the settings of each store are on the page .readme/stores.md.",
            url=url,
        )
        self.errno = errno.EHOSTUNREACH
        self.reason = reason


class MirrorTakenError(MirrorError, RuntimeError):
    """Another writer has claimed the prefix.

    Attributes:
        epoch: The number of its claim.
        pid: Its process id, None when unknown.
        host: Its host, None when unknown.
    """

    def __init__(
        self, *, url: str, epoch: int, host: str | None = None, pid: int | None = None, since: str | None = None,
        lost: bool = False,
    ) -> None:  # fmt: skip
        when = "" if since is None else f", since {since}"
        who = "" if pid is None else f" (pid {pid} on {host}{when})"
        super().__init__(
            f"{url} was taken over from this run by another one{who}: what this one uploads no longer counts."
            if lost
            else f"{url} was written to by another run last{who}, and not by one in this directory.",
            "every checkpoint in the directory, and in the store those of the other run.",
            "stop this job; the other one goes on. If it should be this one, stop the other and start again with "
            "mirror=Mirror(url, take_over=True)."
            if lost
            else "if that run has stopped and this is the same one, start with mirror=Mirror(url, take_over=True) "
            "once; else give this run a prefix of its own.",
            url=url,
        )
        self.epoch = epoch
        self.pid = pid
        self.host = host


class MirrorUnsafeError(MirrorError, RuntimeError):
    """The store lets two writers create the same object, so that it cannot keep them apart."""

    def __init__(self, *, url: str) -> None:
        super().__init__(
            f"{url} does not honour conditional writes (If-None-Match): two jobs could write to it at once.",
            "nothing was uploaded, and every checkpoint in the directory is untouched.",
            "use a store that honours them, or pass mirror=Mirror(url, lock=False) if only one job can write.",
            url=url,
        )


class MirrorBehindError(MirrorError, TimeoutError):
    """The newest checkpoint is not in the store yet.

    Attributes:
        saved_step: The newest step in the directory.
        durable_step: The newest one in the store, None when there is none.
    """

    def __init__(self, *, url: str, saved_step: int, durable_step: int | None, why: str) -> None:
        kept = "no checkpoint" if durable_step is None else f"step {durable_step}"
        super().__init__(
            f"Step {saved_step} is not in {url}, which has {kept}: {why}.",
            f"step {saved_step} and those before it, in the directory of this machine.",
            "repair the way to the store and start the script again, here: it uploads what is missing.",
            url=url,
        )
        self.errno = errno.ETIMEDOUT
        self.saved_step = saved_step
        self.durable_step = durable_step


class ReplayMismatchError(SafeckptError, ArithmeticError):
    """A loss recomputed after a restart differs from the recorded one: this is a different run.

    Attributes:
        step: Its step.
        recorded: The recorded loss, exactly, in Python's hexadecimal notation.
        recomputed: The loss now, in the same notation.
        changed: Fields of the environment that differ from the run that saved, `field: saved -> now`.
    """

    def __init__(
        self,
        *,
        step: int,
        recorded: str,
        recomputed: str,
        happened: str,
        changed: Sequence[str] = (),
        path: object = None,
    ) -> None:
        super().__init__(
            happened,
            "every checkpoint and the recorded losses are untouched.",
            "find the difference with safeckpt.prove_resume(build, train_step), or continue with "
            "CheckpointManager(..., on_replay_mismatch='warn').",
            path=path,
        )  # fmt: skip
        self.step = step
        self.recorded = recorded
        self.recomputed = recomputed
        self.changed = tuple(changed)


class ProofError(SafeckptError, RuntimeError):
    """A process of a proof ended before its run was complete: the proof has no result.

    Attributes:
        run: Name of the run.
        exit_code: Exit code of the process; a negative one is the number of the signal that ended it.
    """

    def __init__(self, *, run: str, exit_code: int, output: str = "") -> None:
        tail = f"; the end of its output:\n{output.strip()}" if output.strip() else " without output"
        super().__init__(
            f"The process of the {run} ended with exit code {exit_code} before the run was complete{tail}",
            "the proof used none of your checkpoint directories.",
            "call build() and train_step(), or train(directory), in a plain script to see why; with build and "
            "train_step also prove_resume(..., in_process=True).",
        )
        self.run = run
        self.exit_code = exit_code


class GroupError(SafeckptError):
    """The processes of a group could not act together.

    Usually this call committed nothing. A rank may also be lost after the commit: the checkpoint of this call is then
    complete, and `restore` finds it.
    """


class RankLostError(GroupError, RuntimeError):
    """Processes of the group are gone, or did not come in time.

    Attributes:
        lost: The missing ranks; empty when unknown.
        timeout_seconds: How long a process is waited for.
    """

    def __init__(
        self, *, what: str, lost: Sequence[int], timeout_seconds: float, reason: str, late: bool = False,
        path: object = None,
    ) -> None:  # fmt: skip
        several = len(lost) > 1
        who = ("ranks " if several else "rank ") + listed(lost) if lost else "a rank"
        how = f"did not answer within {timeout_seconds:g} seconds" if late else "were lost" if several else "was lost"
        super().__init__(
            f"While {what}, {who} {how}: {reason}.",
            "all earlier checkpoints are intact; the one being written is either complete or absent.",
            "end this process and start the group again (torchrun does so), then call restore(). If every process is "
            "alive: make a manager on every rank and call save, restore, rollback and end_step on all of them, not "
            "under `if rank == 0:`, as one does with torch.save. If only some of the ranks train together, name them "
            "with Ranks(process_group=...).",
            path=path,
        )
        self.lost = tuple(lost)
        self.timeout_seconds = timeout_seconds


class RankFailedError(GroupError, RuntimeError):
    """Another process of the group failed with an error that is not one of safeckpt's.

    Attributes:
        type_name: Class of that error.
    """

    def __init__(self, *, what: str, rank: int, type_name: str, reason: str, path: object = None) -> None:
        super().__init__(
            f"While {what}, rank {rank} failed with {type_name}: {reason}.",
            "all earlier checkpoints are intact.",
            f"read the error of rank {rank}.",
            path=path,
        )
        self.rank = rank
        self.type_name = type_name


class RanksDisagreeError(GroupError, ValueError):
    """The ranks disagree: they were called with different arguments, or at different steps.

    Attributes:
        rank: The first rank that differs from rank 0.
    """

    def __init__(self, *, rank: int, first: str, other: str, path: object = None) -> None:
        super().__init__(
            f"The ranks disagree: {first} on rank 0, {other} on rank {rank}.",
            "this call wrote nothing and changed no object.",
            "make the same calls on every rank, at the same steps and with the same arguments.",
            path=path,
        )
        self.rank = rank


class GroupDestroyedError(GroupError, RuntimeError):
    """The process group was destroyed in this process while a manager still needed it."""

    def __init__(self, *, what: str, path: object = None) -> None:
        super().__init__(
            f"While {what}, the process group was missing: this process has destroyed it.",
            "all earlier checkpoints are intact; the one being written may be lost.",
            "close the manager, or leave its with block, before you call torch.distributed.destroy_process_group().",
            path=path,
        )


class DirectoryNotSharedError(GroupError, FileNotFoundError):
    """A rank does not see the files that rank 0 wrote: the ranks do not share one directory.

    Attributes:
        directory: The directory.
    """

    def __init__(
        self,
        *,
        directory: object,
        rank: int,
        name: str,
        waited_seconds: float = 0.0,
        of_rank_0: object = None,
        differs: bool = False,
    ) -> None:
        super().__init__(
            f"Rank 0 and rank {rank} see different files named {name} in {directory}: the directory is not shared."
            if differs
            else f"Rank {rank} has not seen {name} in its directory {directory} for {waited_seconds:g} seconds; rank 0 "
            f"made it in {of_rank_0 or directory}.",
            "all earlier checkpoints are intact.",
            "give all ranks one directory on a file system that their nodes share (not a local disk of each node), and "
            "use several managers in the same order on every rank: each belongs to all ranks of the process group.",
            path=directory,
        )
        self.errno = errno.ENOENT
        self.rank = rank
        self.directory = str(directory)


class SafeckptWarning(UserWarning):
    """Base of every warning that safeckpt gives."""


class SkippedCheckpointWarning(SafeckptWarning):
    """A file that is not good was skipped."""


class ComponentChangedWarning(SafeckptWarning):
    """A component is built differently than in the run that saved, and every tensor fits: a class has a new name."""


class EnvironmentChangedWarning(SafeckptWarning):
    """The environment differs from that of the run that saved, so bits may differ."""


class UncapturedStateWarning(SafeckptWarning):
    """State that training depends on is not among the components."""


class HyperparameterReplacedWarning(SafeckptWarning):
    """Hyper-parameters of the checkpoint replaced the live ones."""


class ImportedStateWarning(SafeckptWarning):
    """A checkpoint that was made of another tool's files was restored: what that had not saved is not exact."""


class ReplayMismatchWarning(SafeckptWarning):
    """A loss recomputed after a restart differs from the recorded one."""


class ReplicaDriftWarning(SafeckptWarning):
    """The ranks' copies of one model are no longer equal."""
