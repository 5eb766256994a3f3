"""Every exception and warning that safeckpt raises of its own accord.

::

    SafeckptError(Exception)                                .path .rank
    |- SaveError                                            nothing was committed; earlier files untouched
    |  |- NonFiniteError            (+ ValueError)           .step .loss .tensors
    |  |- UnsavableStateError       (+ TypeError)            .location .type_name
    |  |- StepExistsError           (+ FileExistsError)      .step
    |  |- DirectoryInUseError       (+ FileExistsError)      .directory .steps
    |  `- ReplicaDriftError         (+ ArithmeticError)      .ranks .names
    |- LoadError                                            no object was changed
    |  |- CheckpointNotFoundError   (+ FileNotFoundError)    .directory .step .available_steps
    |  |- DamagedCheckpointError    (+ RuntimeError)         .reason .record
    |  |- FormatVersionError        (+ RuntimeError)         .found .supported
    |  |- UntrustedTypeError        (+ pickle.UnpicklingError) .type_name
    |  `- NoGoodCheckpointError                             .rejected: ((path, reason), ...)
    |- RestoreError                                         raised before the first change
    |  |- ComponentMismatchError    (+ ValueError)           .missing .unexpected
    |  `- StateMismatchError        (+ ValueError)           .mismatches
    |- RollbackError
    |  `- RollbackLoopError                                 .step .attempts
    |- DirectoryLockedError         (+ TimeoutError)         .pid .host
    |- ReplayMismatchError          (+ ArithmeticError)      .step .recorded .recomputed .changed
    |- ProofError                   (+ RuntimeError)         .run .exit_code
    |- GroupError                                           several processes could not act as one
    |  |- RankLostError             (+ RuntimeError)         .lost .timeout_seconds
    |  |- RankFailedError           (+ RuntimeError)         .type_name
    |  `- DirectoryNotSharedError   (+ FileNotFoundError)    .directory
    `- DurabilityUnknownError       (+ OSError)              .step; committed, but maybe not yet on the disk
    SafeckptWarning(UserWarning)
    |- SkippedCheckpointWarning         a file that is not good was passed over
    |- EnvironmentChangedWarning        bits may differ from the run that saved
    |- UncapturedStateWarning           something that training depends on is not in the checkpoint
    |- HyperparameterReplacedWarning    the file's value replaced the script's
    |- ReplayMismatchWarning            a recomputed loss differs from the recorded one
    `- ReplicaDriftWarning              the ranks' copies of one model are no longer equal

Every error takes its data as keywords, keeps it in attributes, builds its text from it and survives
pickling. Its text has three parts: what happened, what is still safe, what to call next. The second base
is the builtin that a caller of torch already catches. An ``OSError`` from the system is never wrapped.
"""

from __future__ import annotations

import errno
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safeckpt.state.guard import NonFiniteTensor

__all__ = [
    "CheckpointNotFoundError",
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
    "LoadError",
    "NoGoodCheckpointError",
    "NonFiniteError",
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
]

_SHOWN = 5  # of a long list, how many entries the text carries; the attribute has them all


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


def _some(items: Sequence[object], separator: str = "\n  ") -> str:
    shown = separator.join(str(item) for item in items[:_SHOWN])
    more = len(items) - _SHOWN
    return shown if more <= 0 else f"{shown}{separator}... and {more} more"


class SaveError(SafeckptError):
    """A save was refused: nothing was committed, earlier files are untouched."""


class NonFiniteError(SaveError, ValueError):
    """The loss or a guarded tensor holds NaN or Inf.

    Attributes:
        step: The step that was being saved or ended, None outside a manager.
        loss: The loss as given, in Python numbers; None when it was finite or not given.
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
        next_step: str = "find where the first NaN or Inf came from before you save this state",
        path: object = None,
    ) -> None:
        what = "This state" if step is None else f"Step {step}"
        found = []
        if loss is not None:
            found.append(f"loss = {loss if loss_text is None else loss_text}")
        if tensors:
            found.append(_some(tensors))
        happened = f"{what} was refused, it is not finite:\n  " + "\n  ".join(found)
        super().__init__(happened, good or "nothing was written, no file was changed.", next_step, path=path)
        self.step = step
        self.loss = loss
        self.tensors = tuple(tensors)


class UnsavableStateError(SaveError, TypeError):
    """A value in the state could be written but never read back, or cannot be written at all.

    Attributes:
        location: Key path of the value, as Python would index it.
        type_name: Qualified name of its type.
    """

    def __init__(self, *, location: str, type_name: str, reason: str = "", cure: str = "", path: object = None) -> None:
        why = reason or "a file with it in could not be loaded again with weights_only=True"
        super().__init__(
            f"{location or 'The object'} is a {type_name}, which cannot be saved: {why}.",
            "nothing was written, no file was changed.",
            cure
            or "store plain values and tensors (numbers, strings, lists, dicts), or register the type with "
            "torch.serialization.add_safe_globals.",
            path=path,
        )
        self.location = location
        self.type_name = type_name


class StepExistsError(SaveError, FileExistsError):
    """The step that was last saved or restored is saved again.

    Attributes:
        step: That step.
    """

    def __init__(self, *, step: int, path: object = None) -> None:
        super().__init__(
            f"Step {step} is already saved.",
            f"the checkpoint of step {step} is untouched.",
            "save a higher step; step counts completed optimizer steps, so it has to rise between two saves.",
            path=path,
        )
        self.errno = errno.EEXIST
        self.step = step


class DirectoryInUseError(SaveError, FileExistsError):
    """The directory holds checkpoints that this manager did not restore from.

    Attributes:
        directory: The directory.
        steps: Steps of the checkpoints in it, ascending.
    """

    def __init__(self, *, directory: object, steps: Sequence[int]) -> None:
        shown = ", ".join(str(step) for step in steps[-_SHOWN:])
        super().__init__(
            f"{directory} already holds {len(steps)} checkpoint(s) of another run (newest steps: {shown}).",
            "they are untouched.",
            "call manager.restore() before the first save to go on with that run (once more, if another job has saved "
            "meanwhile), or choose an empty directory.",
            path=directory,
        )
        self.errno = errno.EEXIST
        self.directory = str(directory)
        self.steps = tuple(steps)


class ReplicaDriftError(SaveError, ArithmeticError):
    """The ranks hold copies of one model, and they are no longer equal.

    Attributes:
        ranks: Ranks whose copy differs from that of rank 0.
        names: Tensors and values that differ, sorted.
    """

    def __init__(
        self, *, step: int, ranks: Sequence[int], names: Sequence[str], first: bool = False, path: object = None
    ) -> None:
        super().__init__(
            drift_text(step, ranks, names),
            "nothing was written, no file was changed.",
            "make them equal before the first step (DistributedDataParallel does, or one seed for all). If they are no "
            "copies, such as the stages of a pipeline, wrap each rank's part in an object with state_dict and "
            "load_state_dict, which is saved for every rank. on_replica_drift='ignore' keeps rank 0's alone."
            if first
            else "find what the ranks do differently (an update outside of the wrapper, a seed, a skipped step); "
            "manager.rollback(changed=True) makes them equal again.",
            path=path,
        )
        self.ranks = tuple(ranks)
        self.names = tuple(names)


def drift_text(step: int, ranks: Sequence[int], names: Sequence[str]) -> str:
    """Return what a drift of replicas is, for the error and the warning."""
    listed = ", ".join(str(rank) for rank in ranks[:_SHOWN]) + (", ..." if len(ranks) > _SHOWN else "")
    return (
        f"At step {step} the copies of rank(s) {listed} are not equal to that of rank 0, in {len(names)} "
        f"place(s):\n  {_some(names)}"
    )


class DurabilityUnknownError(SafeckptError, OSError):
    """The file has its final name, but the directory could not be synced: it may be gone after a power loss.

    Attributes:
        step: The step that was saved, None outside a manager.
        errno: The system's error number.
    """

    def __init__(self, *, path: object, number: int | None, reason: str, step: int | None = None) -> None:
        super().__init__(
            f"{path} is saved, durability unknown: the directory could not be synced ({reason}).",
            "the new file is whole and readable now; every earlier file is untouched, nothing was pruned.",
            "check the file system, then save the next step.",
            path=path,
        )
        self.errno = number
        self.step = step


class LoadError(SafeckptError):
    """A file could not be used: no object was changed."""


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """The checkpoint that was asked for does not exist.

    Attributes:
        directory: Where it was looked for.
        step: The step asked for, None when any would have done.
        available_steps: Steps that are there, ascending.
    """

    def __init__(self, *, directory: object, step: int | None = None, available_steps: Sequence[int] = ()) -> None:
        what = "No checkpoint" if step is None else f"No checkpoint of step {step}"
        there = ", ".join(str(step) for step in available_steps[-_SHOWN:])
        super().__init__(
            f"{what} in {directory}.",
            "no object was changed.",
            f"choose one of the steps that are there (newest: {there})." if there else "save a checkpoint first.",
            path=directory,
        )
        self.errno = errno.ENOENT
        self.directory = str(directory)
        self.step = step
        self.available_steps = tuple(available_steps)


class DamagedCheckpointError(LoadError, RuntimeError):
    """The bytes of a file are not the bytes that were written.

    Attributes:
        reason: What does not agree, in one sentence.
        record: Name of the damaged record, or the region of the file; None when it is not known.
    """

    def __init__(self, *, path: object, reason: str, record: str | None = None) -> None:
        where = f" (in {record})" if record else ""
        super().__init__(
            f"{path} is damaged: {reason}{where}.",
            "nothing was loaded, no object was changed, the file was left as it is.",
            "load another checkpoint; CheckpointManager.restore() walks back to the newest good one by itself.",
            path=path,
        )
        self.reason = reason
        self.record = record


class FormatVersionError(LoadError, RuntimeError):
    """The file was written in a newer format than this version of safeckpt reads.

    Attributes:
        found: Format version of the file.
        supported: Versions that can be read.
    """

    def __init__(self, *, path: object, found: int, supported: Sequence[int]) -> None:
        super().__init__(
            f"{path} has format version {found}; this safeckpt reads {', '.join(str(v) for v in supported)}.",
            "nothing was loaded, no object was changed, the file was left as it is.",
            "install a newer safeckpt; going back to an older checkpoint would throw progress away.",
            path=path,
        )
        self.found = found
        self.supported = tuple(supported)


class UntrustedTypeError(LoadError, pickle.UnpicklingError):
    """The file asks for a class or function that a safe load does not allow.

    Attributes:
        type_name: Qualified name of the class or function.
    """

    def __init__(self, *, path: object, type_name: str) -> None:
        super().__init__(
            f"{path} asks for {type_name}, which is not allowed when loading with weights_only=True.",
            "nothing of it was executed, no object was changed.",
            f"if you trust the file and the type, torch.serialization.add_safe_globals([{type_name}]) and load again.",
            path=path,
        )
        self.type_name = type_name


class NoGoodCheckpointError(LoadError):
    """A directory holds checkpoints and none of them is good.

    Attributes:
        rejected: (path, reason) of each, newest first.
    """

    def __init__(self, *, directory: object, rejected: Sequence[tuple[str, str]]) -> None:
        rows = _some([f"{path}: {reason}" for path, reason in rejected])
        super().__init__(
            f"{directory} holds {len(rejected)} checkpoint(s) and none is good:\n  {rows}",
            "no object was changed, every file was left as it is.",
            "copy a good checkpoint back into the directory, or start a new run in an empty one.",
            path=directory,
        )
        self.rejected = tuple((str(path), str(reason)) for path, reason in rejected)


class RestoreError(SafeckptError):
    """What is in the file does not fit the live objects: raised before the first change."""


class ComponentMismatchError(RestoreError, ValueError):
    """The names in the file and the names given to the manager differ.

    Attributes:
        missing: Names the manager has (or was asked for) and the file does not.
        unexpected: Names in the file that the manager does not have.
    """

    def __init__(self, *, missing: Sequence[str] = (), unexpected: Sequence[str] = (), path: object = None) -> None:
        parts = []
        if missing:
            parts.append(f"not in the checkpoint: {', '.join(missing)}")
        if unexpected:
            parts.append(f"only in the checkpoint: {', '.join(unexpected)}")
        super().__init__(
            f"The components do not match {path or 'the checkpoint'}: {'; '.join(parts)}.",
            "no object was changed.",
            "give the manager the same components as the run that saved, or name the ones you want: "
            "restore(only=(...,)).",
            path=path,
        )
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class StateMismatchError(RestoreError, ValueError):
    """A component exists on both sides and its state does not fit.

    Attributes:
        mismatches: One sentence for each difference, all of them.
    """

    def __init__(self, *, mismatches: Sequence[str], path: object = None) -> None:
        super().__init__(
            f"{path or 'The checkpoint'} does not fit the live objects, {len(mismatches)} difference(s):\n  "
            + _some(mismatches),
            "no object was changed.",
            "build the objects as the run that saved did, or take only what fits: restore(only=(...,)).",
            path=path,
        )
        self.mismatches = tuple(mismatches)


class RollbackError(SafeckptError):
    """A rollback is not possible, or would not help: no live object was changed."""


class RollbackLoopError(RollbackError):
    """The run keeps failing after rollbacks.

    Attributes:
        step: The step that fails.
        attempts: Rollbacks tried since the last new checkpoint.
    """

    def __init__(self, *, step: int, attempts: int, reason: str, path: object = None) -> None:
        super().__init__(
            f"Step {step} failed again after {attempts} rollback(s): {reason}.",
            "every checkpoint is untouched; the live objects were not changed by this call.",
            "change something before you go on: rollback(skip_batches=1), a lower learning rate, or clean data.",
            path=path,
        )
        self.step = step
        self.attempts = attempts


class DirectoryLockedError(SafeckptError, TimeoutError):
    """Another writer holds the directory.

    Attributes:
        pid: Process id of the holder, None when it is not known.
        host: Host of the holder, None when it is not known.
    """

    def __init__(
        self, *, directory: object, pid: int | None = None, host: str | None = None, since: str | None = None,
        reason: str = "another process is saving checkpoints into it",
    ) -> None:  # fmt: skip
        who = f" (pid {pid} on {host}, since {since})" if pid is not None else ""
        super().__init__(
            f"{directory} is locked: {reason}{who}.",
            "nothing was written, no file was changed.",
            "wait for the other process or stop it, or give this run a directory of its own; reading needs no lock.",
            path=directory,
        )
        self.errno = errno.ETIMEDOUT
        self.pid = pid
        self.host = host


class ReplayMismatchError(SafeckptError, ArithmeticError):
    """A loss computed again after a restart differs from the one on record: this is another run.

    Attributes:
        step: Its step.
        recorded: The loss on record, exactly, in Python's hexadecimal notation.
        recomputed: The loss now.
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
            "find what differs with safeckpt.prove_resume(build, train_step), or go on with "
            "CheckpointManager(..., on_replay_mismatch='warn').",
            path=path,
        )  # fmt: skip
        self.step = step
        self.recorded = recorded
        self.recomputed = recomputed
        self.changed = tuple(changed)


class ProofError(SafeckptError, RuntimeError):
    """A process of a proof ended before its run was done: nothing is proven, and nothing is disproven.

    Attributes:
        run: Which run it was.
        exit_code: Exit code of the process; a negative one is the number of the signal that ended it.
    """

    def __init__(self, *, run: str, exit_code: int, output: str = "") -> None:
        tail = f"; the end of its output:\n{output.strip()}" if output.strip() else " without output"
        super().__init__(
            f"The process of the {run} ended with exit code {exit_code} before the run was done{tail}",
            "no checkpoint directory of yours was used.",
            "call build() and train_step() in a plain script, or prove_resume(..., in_process=True), to see why.",
        )
        self.run = run
        self.exit_code = exit_code


class GroupError(SafeckptError):
    """The processes of a group could not act as one: nothing was committed by this call."""


class RankLostError(GroupError, RuntimeError):
    """A process of the group is gone, or did not answer in time.

    Attributes:
        lost: The rank that is missing, as far as this process knows.
        timeout_seconds: How long it was waited for at most.
    """

    def __init__(
        self, *, what: str, lost: int | None, timeout_seconds: float, reason: str, path: object = None
    ) -> None:
        who = "a rank" if lost is None else f"rank {lost}"
        late = "imed out waiting" in reason or "ait timeout" in reason
        how = f"did not come within {timeout_seconds:g} seconds" if late else "was lost"
        super().__init__(
            f"While {what}, {who} {how}: {reason}.",
            "every checkpoint that was committed before; what was being written is whole, or in no listing.",
            "end this process and start the group again (torchrun does), then restore(). If no process has died: every "
            "rank has to call save, restore, rollback and end_step, not rank 0 alone; and a save that takes longer "
            "needs a larger rank_timeout_seconds.",
            path=path,
        )
        self.lost = lost
        self.timeout_seconds = timeout_seconds


class RankFailedError(GroupError, RuntimeError):
    """Another process of the group failed with an error that is not the library's own.

    Attributes:
        type_name: Class of that error.
    """

    def __init__(self, *, what: str, rank: int, type_name: str, reason: str, path: object = None) -> None:
        super().__init__(
            f"While {what}, rank {rank} failed with {type_name}: {reason}.",
            "every checkpoint that was committed before.",
            f"see the error of rank {rank}.",
            path=path,
        )
        self.rank = rank
        self.type_name = type_name


class RanksDisagreeError(GroupError, ValueError):
    """The ranks were asked for different things.

    Attributes:
        rank: The first rank that differs from rank 0.
    """

    def __init__(self, *, rank: int, first: str, other: str, path: object = None) -> None:
        super().__init__(
            f"The ranks were asked for different things: rank 0 for {first}, rank {rank} for {other}.",
            "nothing was written by this call, no object was changed.",
            "make the same calls on every rank, at the same steps and with the same arguments.",
            path=path,
        )
        self.rank = rank


class GroupDestroyedError(GroupError, RuntimeError):
    """The process group was destroyed in this process while a manager still needed it."""

    def __init__(self, *, what: str, path: object = None) -> None:
        super().__init__(
            f"While {what}, the process group was gone: this process has destroyed it.",
            "every checkpoint that was committed before; what was still being written may be lost.",
            "close the manager, or leave its with block, before torch.distributed.destroy_process_group().",
            path=path,
        )


class DirectoryNotSharedError(GroupError, FileNotFoundError):
    """A rank does not see what rank 0 wrote, or something else: the directory is not one directory for all of them.

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
            f"{name} of rank {rank} is another one than that of rank 0, in {directory}."
            if differs
            else f"Rank {rank} does not see {name}, which rank 0 has made in {of_rank_0 or directory}, in its own "
            f"directory {directory}, for {waited_seconds:g} seconds.",
            "every checkpoint that was committed before.",
            "give all ranks one directory on a file system that their nodes share (a local disk in each node is none), "
            "and use several managers in the same order on every rank: each is for all ranks of the process group.",
            path=directory,
        )
        self.errno = errno.ENOENT
        self.rank = rank
        self.directory = str(directory)


class SafeckptWarning(UserWarning):
    """Base of every warning that safeckpt gives."""


class SkippedCheckpointWarning(SafeckptWarning):
    """A file that is not good was passed over."""


class EnvironmentChangedWarning(SafeckptWarning):
    """The run goes on in another environment than it was saved in, so bits may differ."""


class UncapturedStateWarning(SafeckptWarning):
    """Something that training depends on is not among the components."""


class HyperparameterReplacedWarning(SafeckptWarning):
    """The checkpoint's hyper-parameters replaced the live ones."""


class ReplayMismatchWarning(SafeckptWarning):
    """A loss computed again after a restart differs from the one on record."""


class ReplicaDriftWarning(SafeckptWarning):
    """The ranks hold copies of one model, and they are no longer equal."""
