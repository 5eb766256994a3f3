"""Finding the checkpoint to restore: the newest one that every rank can read, or the one that was asked for.

Each rank looks into the directory by itself, reads, and says what it has found. The answers of all are combined, so the
outcome is the same for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import NamedTuple

from safeckpt.distributed.stages import Names, refuse_left_over
from safeckpt.errors import CheckpointNotFoundError, DirectoryNotSharedError, LoadError, NoGoodCheckpointError
from safeckpt.remote.urls import RemotePath
from safeckpt.run.catalog import Bad, Gone, fault_of, warn_skipped
from safeckpt.run.checking import Good, Wanted, check_step
from safeckpt.run.run import Run

__all__ = ["Search"]


class _Answer(NamedTuple):
    """What ranks have found.

    Attributes:
        rank: The lowest of them.
        step: The step that it has read; None where there is none.
        digest: Of the file, as the lowest rank has read it that could.
        other: A rank that has read another file of this name.
        left_out: What all that could read it have left out.
        fault: What is wrong, on the lowest rank that has found something.
        is_remote: Whether it has to be fetched first, and is not read yet.
        is_apart: Whether they have read different steps.
    """

    rank: int
    step: int | None
    digest: str | None = None
    other: int | None = None
    left_out: Names | None = None
    fault: Gone | Bad | None = None
    is_remote: bool = False
    is_apart: bool = False


def _combine(one: _Answer, other: _Answer) -> _Answer:
    differs = None not in (one.digest, other.digest) and one.digest != other.digest
    return _Answer(
        one.rank,
        one.step,
        digest=one.digest or other.digest,
        other=one.other or (other.rank if differs else other.other),
        left_out=_in_both(one.left_out, other.left_out),
        fault=one.fault or other.fault,
        is_remote=one.is_remote,
        is_apart=one.is_apart or other.is_apart or (one.step, one.is_remote) != (other.step, other.is_remote),
    )


def _in_both(one: Names | None, other: Names | None) -> Names | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


class Search:
    """A search for one checkpoint. All ranks make it at once.

    Args:
        run: The run.
        wanted: What to restore.
        look_further: Whether to look into the store behind the directory as well, where there is one.

    Attributes:
        rejected: Checkpoints that were passed over, path to reason.
        steps_before: Steps in the directory before the search.
    """

    def __init__(self, run: Run, wanted: Wanted, *, look_further: bool = False) -> None:
        self.rejected: dict[PurePath, str] = {}
        self.steps_before: Collection[int] = ()
        self._run = run
        self._wanted = wanted
        self._tried: set[int] = set()  # steps that are not good
        self._remote = self._look_further() if look_further else set()

    def _look_further(self) -> set[int]:
        """Return the steps in the store behind the directory. Rank 0 looks."""
        mirror = self._run.directory.mirror
        if mirror is None:
            return set()
        with self._run.group.section("looking into the store") as section:
            if self._run.is_rank_zero:
                section.answer = sorted(mirror.look())
        return set(section.result)

    @contextlib.contextmanager
    def find(self) -> Iterator[Good | None]:
        """Return the checkpoint, None where there is none. Its files are open within the `with` statement.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the wanted step.
            NoGoodCheckpointError: There are checkpoints, and none is good.
            LoadError: The wanted step is not good.
            RestoreError: It does not fit the live objects.
        """
        files = self._run.directory.files
        is_first = True
        while True:
            with contextlib.ExitStack() as opened:
                answer, good, listed = self._read(opened)
                if is_first:
                    self.steps_before, is_first = listed, False
                if good is not None:
                    yield good
                    return
            if answer.step is None:
                break
            if answer.is_remote:
                self._fetch(answer.step)
                continue
            self._tried.add(answer.step)
            if isinstance(answer.fault, Bad):
                self._pass_over(answer.step, files.path_of(answer.step), answer.fault.reason)
        if self.rejected:
            raise NoGoodCheckpointError(
                directory=self._run.directory.path,
                rejected=[(str(path), reason) for path, reason in self.rejected.items()],
            )
        yield None

    def _pass_over(self, step: int, path: PurePath, reason: str) -> None:
        self.rejected[path] = reason
        with self._run.group.section(f"passing over step {step}"):  # where warnings are errors, on all ranks
            if self._run.is_rank_zero:
                warn_skipped(path, reason)

    def _fetch(self, step: int) -> None:
        """Bring a checkpoint from the store into the directory, on rank 0, or pass over it."""
        mirror = self._run.directory.mirror
        assert mirror is not None
        with self._run.group.section(f"fetching step {step}") as section:
            if self._run.is_rank_zero:
                fault: Bad | Gone | None = None
                try:
                    mirror.fetch(step)
                except (LoadError, FileNotFoundError) as error:
                    fault = fault_of(error, is_named=self._wanted.step is not None)
                section.answer = fault, mirror.name_of(step)
        found, url = section.result
        self._remote.discard(step)
        if isinstance(found, Bad):
            self._pass_over(step, RemotePath(url), found.reason)
        elif found is None:
            self._tried.discard(step)  # what was bad under this name has made way

    def _read(self, opened: contextlib.ExitStack) -> tuple[_Answer, Good | None, Collection[int]]:
        """Read and check the next checkpoint on every rank: it is good for all of them, or for none.

        Nearly always all ranks see the same. Where one does not, all read what rank 0 has seen, and wait until they see
        it, too.

        Returns:
            What all have found, the same on every rank; what this rank has read, where it is good; and the steps that
            this rank has seen.
        """
        found = self._read_together(opened)
        answer = found[0]
        if answer.is_apart and not answer.is_remote:
            return self._read_together(opened, told=answer)
        return found

    def _read_together(
        self, opened: contextlib.ExitStack, told: _Answer | None = None
    ) -> tuple[_Answer, Good | None, Collection[int]]:
        """See `_read`.

        Args:
            opened: Keeps the files open.
            told: What rank 0 has seen, which all read then; None where each rank looks for itself.
        """
        run, group, wanted = self._run, self._run.group, self._wanted
        good: Good | None = None
        listed: Collection[int] = ()
        what = "reading a checkpoint" if told is None else "reading what rank 0 sees"
        with group.section(what, _combine, self._decide) as section:
            section.same = {
                "step": wanted.step,
                "only": None if wanted.only is None else sorted(wanted.only),
                "keep_live": sorted(wanted.keep_live),
                "fresh": sorted(wanted.fresh),
                "streams": wanted.streams,
            }
            if group.is_rank_zero and wanted.only is None:
                run.directory.warn_of_other_writer()
            listed = run.directory.files.steps()
            here = [step for step in listed if step not in self._tried]
            step = self._candidate({*here, *self._remote}) if told is None else told.step
            if step is None:
                section.answer = _Answer(group.rank, None)
            elif told is None and step not in here:
                section.answer = _Answer(group.rank, step, is_remote=True)
            else:
                if told is not None:
                    run.directory.wait_for(run.directory.files.path_of(step))
                section.answer, good = self._read_here(step, opened)
        answer: _Answer = section.result
        if answer.fault is not None or answer.is_apart:
            good = None
        if good is not None and answer.step is not None:
            run.directory.catalog.remember_verdict(answer.step)  # every share of it was read by some rank
        return answer, good, listed

    def _candidate(self, steps: Collection[int]) -> int | None:
        """Return the step that this rank would read.

        Raises:
            CheckpointNotFoundError: On rank 0: there is no checkpoint of the wanted step.
        """
        if self._wanted.step is None:
            return max(steps, default=None)
        if self._wanted.step in steps:
            return self._wanted.step
        if self._run.group.is_rank_zero:
            path = self._run.directory.files.path
            raise CheckpointNotFoundError(directory=path, step=self._wanted.step, available_steps=sorted(steps))
        return None

    def _read_here(self, step: int, opened: contextlib.ExitStack) -> tuple[_Answer, Good | None]:
        """Read and check a checkpoint on this rank, shards included."""
        group = self._run.group
        found = check_step(self._run, step, self._wanted, opened)
        if isinstance(found, Good):
            return _Answer(group.rank, step, found.digest, left_out=found.left_out), found
        if isinstance(found, Bad) and group.size > 1:
            found = Bad(f"rank {group.rank}: {found.reason}")
        return _Answer(group.rank, step, fault=found), None

    def _decide(self, answer: _Answer) -> _Answer:
        """Refuse what is not the same file for every rank, and what has more in it than all ranks together.

        Raises:
            DirectoryNotSharedError: Two ranks have read different files.
            StateMismatchError: No rank has a place for something in it.
        """
        if answer.step is None or answer.is_apart or answer.is_remote:
            return answer
        path = self._run.directory.files.path_of(answer.step)
        if answer.other is not None:
            raise DirectoryNotSharedError(directory=path.parent, rank=answer.other, name=path.name, differs=True)
        if answer.fault is None:
            refuse_left_over(answer.left_out or frozenset(), path)
        return answer
