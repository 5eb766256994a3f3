"""Where a loader is: the place at which its next pass begins, and the pass that is under way.

A batch is behind when its step has ended (`end_step`); as long as nobody speaks of steps, when it was handed out.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from safeckpt.errors import UncapturedStateWarning
from safeckpt.loader.history import History
from safeckpt.loader.passes import BeforeNext, Iteration, Mark, Pass
from safeckpt.loader.source import Snapshot, Source
from safeckpt.system.for_loops import enclosing_range_loop, is_asked_by_for_loop
from safeckpt.system.warn import warn_caller

__all__ = ["Position"]

_STEPS_WITHOUT_A_BATCH = 20  # in a row, before a loader that stands still is named
_ENOUGH = 4  # times as many batches as steps lately took, and no step among them: that is no training

_positions: weakref.WeakSet[Position] = weakref.WeakSet()


class Position:
    """The position of one loader.

    Args:
        source: Where the batches come from.
        seed: What order and augmentation derive from.
        ahead: How many batches are fetched before the one that is trained; None when nobody has said.
        length: The number of batches of an epoch, None where it is not known.
        name: What the loader is called in messages.

    Attributes:
        epoch: Of the next pass.
        batch: Number of its first batch.
        restores: How often the position was set.
        expects_steps: Whether a batch counts as trained only when its step has ended.
        ahead_known: Whether nothing needs to be found out about `ahead` any more.
        batches_per_step: What the last two steps took.
        left_out: Batches that are not handed out.
        history: Those that were.
        running: The pass that the source works for.
        before_next: Called when the next batch is asked for.
    """

    def __init__(self, source: Source, *, seed: int, ahead: int | None, length: int | None, name: str) -> None:
        self._source = source
        self._ahead = ahead or 0
        self._length = length
        self._name = name
        self.seed = seed
        self.epoch = 0
        self.batch = 0
        self.restores = 0
        self.expects_steps = bool(ahead)
        self.ahead_known = ahead is not None
        self.batches_per_step: deque[int] = deque(maxlen=2)
        self.left_out: set[tuple[int, int]] = set()
        self.history = History()
        self.running: Pass | None = None
        self.before_next: BeforeNext | None = None
        # What the next pass begins from; None when that is the next epoch, and the samplers are at its start already.
        self._snapshot: Snapshot | None = None
        self._pass: Pass | None = None  # begun from there
        self._last: Pass | None = None  # the one before, whose epoch has ended
        self._iteration: weakref.ref[Iteration] | None = None  # of that pass; before it begins, the newest
        self._running_iteration: weakref.ref[Iteration] | None = None
        self._was_set = False  # and nothing was iterated since
        self._cut = False  # the iteration that waits to go on was zipped with another loader, which is at its end
        self._body: int | None = None  # the epoch that a body of `epochs` is for
        self._body_trained = False  # whether that body has left its training pass behind
        # Where passes outside of any body began to move the position, though no step had ended in them.
        self._before_looks: tuple[int, int, Snapshot] | None = None
        self._batches_before = 0  # since the last step, in passes that are over
        self._has_stepped = False  # in this process
        # The iterator that had handed out batches of no step when the position was restored: they are of another place.
        self._stale: weakref.ref[Iteration] | None = None
        self._first_step: tuple[Pass, int, int] | None = None
        self._last_step: int | None = None
        self._idle_steps = 0
        _positions.add(self)

    # -- where it is -------------------------------------------------------------------------------------------------

    def reached(self) -> tuple[int, int]:
        """Return (epoch, number of the next batch) behind what was handed out, whether or not it was trained."""
        self._settle()
        progress = self._pass
        if progress is None:
            return self.epoch, self.batch
        if progress.finished and not self._ahead:
            return progress.epoch + 1, 0
        if not self.expects_steps or self._is_alive() or self._counts(progress):
            return progress.epoch, progress.next_number
        return self.epoch, self.batch

    def saved(self) -> tuple[int, int, Snapshot]:
        """Return (epoch, number of the next batch, snapshot) behind what was trained. Changes nothing."""
        self._settle()
        progress = self._pass
        mark = None
        if progress is not None:
            mark = progress.trained if self.expects_steps else progress.marks[-1]
        if progress is None or mark is None or mark.number == progress.first:
            return self.epoch, self.batch, self._source.between() if self._snapshot is None else self._snapshot
        within = self._source.within(progress.start, mark.place, self.seed, progress.epoch, mark.number)
        return progress.epoch, mark.number, within

    def ended(self) -> tuple[int, int] | None:
        """Return (epoch, number behind its last batch) of the epoch whose end is this position; None within one."""
        last = self._last
        if last is None or last.trained is None or not last.finished or self.saved()[:2] != (last.epoch + 1, 0):
            return None
        return last.epoch, last.trained.number

    def set(self, epoch: int, batch: int, snapshot: Snapshot) -> None:
        """Go to a position: the next iteration, or the one in progress, goes on from there."""
        taken = self._pass is not None and self._pass.count > 0 and self._is_alive()
        self._stale = self._iteration if taken and self.expects_steps and not self._has_stepped else None
        self._move(epoch, batch, snapshot)
        self._was_set = True
        self.restores += 1
        self.running = None
        self._last = None
        self._body_trained = False
        self._before_looks = None
        self._batches_before = 0
        self._first_step = None
        self._last_step = None

    def go_on_in_the_loop(self) -> None:
        """Note that the position was set within a step, by a rollback: the batch at hand is thrown away there."""
        self._stale = None

    def between(self) -> Snapshot:
        """Return what an epoch that began now would begin from."""
        return self._source.between()

    def fetched_ahead(self) -> int:
        """Return how many of the batches handed out last are not being trained yet."""
        return 0 if self._pass is None else self._pass.fetched_ahead

    def _move(self, epoch: int, batch: int, snapshot: Snapshot | None) -> None:
        self.epoch, self.batch, self._snapshot = epoch, batch, snapshot
        self._last, self._pass = self._pass, None
        self._cut = False

    # -- iterations --------------------------------------------------------------------------------------------------

    def new_iteration(self) -> Iteration:
        """Return an iterator, whose pass begins when it is asked for a batch."""
        self._settle()
        iteration = Iteration(self)
        if self._pass is None:
            self._iteration = weakref.ref(iteration)
        return iteration

    def enter(self, iteration: Iteration) -> tuple[Pass, Iterator[tuple[int, Any]]]:
        """Begin the pass of an iteration, or go on with it after another pass or a restore."""
        progress = iteration.progress
        snapshot: Snapshot | None
        if progress is not None and not self._was_set:
            self._refuse_two(iteration, mine=progress is self._pass or progress.is_look)
            last = progress.marks[-1]
            snapshot = progress.start
            if progress.count:
                snapshot = self._source.within(snapshot, last.place, self.seed, progress.epoch, last.number)
        else:
            if progress is not None:
                self._refuse_two(iteration, mine=self._iteration is not None and self._iteration() is iteration)
                if self._ahead:
                    raise RuntimeError(
                        f"the position was set back within the loop, and up to {self._ahead} batches from before are "
                        "still in the iterator that fetches ahead: leave the loop and iterate the loader again"
                    )
                self._refuse_stale(iteration)
            was_set = self._was_set and progress is None
            progress, snapshot = self._begun()
            if was_set and self._body is None and progress.epoch and not progress.is_look:
                self._warn_of_range(progress.epoch)
        if not progress.is_look:
            self._pass, self._iteration = progress, weakref.ref(iteration)
            self._was_set = self._cut = False
            self._stale = None
        self.running, self._running_iteration = progress, weakref.ref(iteration)
        batches = self._source.begin(self.seed, progress.epoch, progress.next_number, snapshot, self.left_out)
        return progress, batches

    def _warn_of_range(self, epoch: int) -> None:
        """Warn where epochs are counted by a loop that begins anew though the position was restored."""
        loop = enclosing_range_loop() if is_asked_by_for_loop() else None
        if loop is not None and loop.passed != epoch:
            warn_caller(
                f"{loop.text.strip()} has {loop.passed} epochs behind it, and {self._name} was restored to epoch "
                f"{epoch}: after a resume such a loop begins anew, and the run has more epochs than without. Write "
                "for epoch in loader.epochs(n), with n for the whole run.",
                UncapturedStateWarning,
            )

    def _refuse_stale(self, iteration: Iteration | None) -> None:
        """Refuse to go on with batches that were taken before the position was restored, as a trainer that looks ahead.

        Raises:
            RuntimeError: An iterator has them, this one if one is given.
        """
        stale = None if self._stale is None else self._stale()
        if stale is not None and iteration in {None, stale}:
            raise RuntimeError(
                f"a batch of {self._name} was taken before its position was restored, and the loop goes on with it or "
                "behind it: it is not the batch that comes at the restored position. Nothing was saved. Restore "
                "before the first batch is taken, or call iter(loader) again after the restore and throw away what "
                "was taken"
            )

    def _refuse_two(self, iteration: Iteration, *, mine: bool) -> None:
        running = None if self._running_iteration is None else self._running_iteration()
        if mine and (running is None or running is iteration or running.ended):
            return
        raise RuntimeError(
            "a newer iteration over this ResumableLoader has taken its position over. To read the data a second time "
            "within the loop, drop that iterator or read it to its end before the loop goes on; for two that take "
            "turns make a second ResumableLoader"
        )

    def _begun(self) -> tuple[Pass, Snapshot | None]:
        """Return a new pass, and what it begins from."""
        self._settle()
        progress, last = self._pass, self._last
        if progress is not None:
            if self._is_alive() and self._counts(progress):
                return self._look(progress)
            if not self._counts(progress):
                self._drop()
            elif self._body is None:
                self._leave(progress)
            else:
                return self._look(progress)
        elif self._body_trained and last is not None and not self._was_set:
            return self._look(last)
        snapshot = self._snapshot
        if snapshot is None:
            # A pass that counts for nothing leaves no trace: the next one begins from here again.
            self._snapshot = self._source.between()
        return Pass(self.epoch, self.batch, self._snapshot, ahead=self._ahead), snapshot

    def _look(self, progress: Pass) -> tuple[Pass, Snapshot]:
        """Return a pass that reads the epoch of another one again, from its beginning."""
        start = self._source.beginning(progress.start)
        if self._snapshot is None:
            self._snapshot = self._source.between()
        return Pass(progress.epoch, 0, start, ahead=0, is_look=True), start

    def hands_out(self, progress: Pass, number: int) -> bool:
        """Note that a batch has come, and return whether it is to be handed out."""
        if self.left_out and (progress.epoch, number) in self.left_out:
            return False
        progress.hand_out(number, self._source.place())
        if not progress.is_look:
            self.history.add(progress.epoch, number)
        return True

    def finish(self, progress: Pass) -> None:
        """Note that a pass has come to the end of its epoch."""
        self._source.finish()
        progress.finished = True
        progress.marks[-1] = Mark(progress.next_number, self._source.place())
        if progress.is_look:
            return
        for other in _positions:
            if other is not self:
                other._note_end(progress)
        if not self._ahead and self._counts(progress):
            self._leave(progress)

    def _note_end(self, ended: Pass) -> None:
        """Note that another loader's pass is at its end: a `zip` of both is left now, and this epoch with it."""
        progress = self._pass
        if progress is not None and ended.takes_turns_with(progress):
            progress.interrupted_at = progress.count
        elif progress is None:
            self._cut = self.batch > 0 and self._is_alive() and not ended.count

    # -- what has become of a pass -----------------------------------------------------------------------------------

    def _is_alive(self) -> bool:
        """Return whether the iterator is there, and not at its end."""
        iteration = None if self._iteration is None else self._iteration()
        return iteration is not None and not iteration.ended

    def _counts(self, progress: Pass) -> bool:
        """Return whether a pass is training, and not only a look.

        It is when a step has ended in it. Where steps end only now and then, between epochs for example, it is when
        more than one batch was asked for.
        """
        if progress.trained is not None:
            return True
        if self.expects_steps and self._body is not None:
            return False  # leaving the body ends the epoch
        if progress.asked < 2:
            return progress.finished
        lately = self.batches_per_step
        return len(lately) < 2 or progress.count <= _ENOUGH * max(lately)

    def _settle(self) -> None:
        """Take notice of an iterator that is gone, where that says more than that it was left."""
        if self._iteration is not None and self._iteration() is not None:
            return
        progress = self._pass
        if progress is None:
            if self._cut:
                self.end_epoch()
            return
        trained_all = progress.finished and progress.trained is not None and not progress.fetched_ahead
        if trained_all or (progress.interrupted_at == progress.count and not progress.finished):
            self._leave(progress)

    def _drop(self) -> None:
        """Forget a pass that was a look."""
        self.history.forget(self.epoch, self.batch)
        self._pass = None

    def _leave(self, progress: Pass) -> None:
        """End the epoch of a pass, wherever in it that is."""
        if self._body is None and not progress.steps and self._before_looks is None:
            self._before_looks = (self.epoch, self.batch, progress.start)
        snapshot = None
        if not progress.finished or self.running is not progress:
            number, place = progress.marks[-1]
            snapshot = self._source.after(progress.start, place, self.seed, progress.epoch, number)
        self._batches_before += progress.since_step
        self._body_trained = self._body is not None
        self._move(progress.epoch + 1, 0, snapshot)

    def end_epoch(self) -> None:
        """End this epoch where it is: the position is the beginning of the next one."""
        if self._pass is not None:
            self._leave(self._pass)
            return
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot = self._source.after(snapshot, None, self.seed, self.epoch, self.batch)
        self._move(self.epoch + 1, 0, snapshot)

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs up to `n`; leaving the body ends one."""
        self._forget_looks()
        while (epoch := self.reached()[0]) < n:
            restores = self.restores
            self._body, self._body_trained = epoch, False
            try:
                yield epoch
                if self._pass is not None or (self.restores == restores and self.epoch == epoch):
                    self.end_epoch()
            finally:
                self._body, self._body_trained = None, False
            self._before_looks = None

    def _forget_looks(self) -> None:
        """Go back to where the position was before passes in which no step ended."""
        self._settle()
        if self._pass is not None and not self._pass.steps:
            self._drop()
        elif self._pass is not None:
            self._leave(self._pass)
        if self._before_looks is not None:
            self._move(*self._before_looks)
            self._before_looks = None
            self.history.forget(self.epoch, self.batch)

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def since_step(self) -> int:
        """How many batches were handed out since the last step ended."""
        return self._batches_before + (0 if self._pass is None else self._pass.since_step)

    def end_step(self, step: int | None) -> None:
        """Note that a step has ended: what was handed out until now is trained, less what is fetched ahead."""
        self.expects_steps = True
        if step is not None:
            if step in {0, self._last_step}:
                return
            self._last_step = step
        self._refuse_stale(None)
        self._has_stepped = True
        progress = self._pass
        if progress is None or not (progress.since_step or (progress.finished and progress.fetched_ahead)):
            self._end_step_without_batch()
            return
        taken = self._batches_before + progress.since_step
        if not self.ahead_known:
            self._look_for_prefetcher(progress)
        progress.end_step()
        self._note_step(taken)
        if progress.finished and not self._ahead:
            self._leave(progress)

    def end_micro_step(self) -> None:
        """Note that what was handed out until now is trained, in the middle of a step."""
        if self._pass is not None and self._pass.since_step:
            self._pass.end_micro_step()

    def _note_step(self, batches: int) -> None:
        self.batches_per_step.append(batches)
        self._batches_before = self._idle_steps = 0
        self._before_looks = None

    def _end_step_without_batch(self) -> None:
        if self._batches_before:
            self._note_step(self._batches_before)  # the position is behind them already
            return
        running = None if self._running_iteration is None else self._running_iteration()
        look = self.running
        if running is not None and not running.ended and look is not None and look.is_look and look.since_step:
            raise RuntimeError(
                f"a step has ended in a second pass over epoch {look.epoch} of this ResumableLoader, which has one "
                "position only. To train on the data several times, let each pass be an epoch: "
                "for epoch in loader.epochs(passes * n): for batch in loader: ... Where batches are counted and the "
                "iterator is never read to its end, call loader.end_epoch() before the next iter(loader)"
            )
        self._idle_steps += 1
        if self._idle_steps == _STEPS_WITHOUT_A_BATCH:
            warn_caller(
                f"{self._idle_steps} steps have ended since {self._name} handed out a batch: its position stands "
                "still, and a resumed run goes on from there. Iterate the ResumableLoader itself, not the DataLoader "
                "inside it, and not itertools.cycle(loader), which repeats batches that it keeps: write "
                "for epoch in loader.epochs(n).",
                UncapturedStateWarning,
            )

    def _look_for_prefetcher(self, progress: Pass) -> None:
        """Raise when something fetches ahead: more batches came before the first step than before the second."""
        if progress.thread != threading.get_ident():
            raise RuntimeError(
                f"the batches of {self._name} are fetched by another thread than the one that trains, so nobody knows "
                "how many of them are trained when a checkpoint is saved. Fetch them in the training thread "
                "(num_workers of the DataLoader are ahead as well, and exact); ahead=0 says that it is meant to be"
            )
        taken = progress.since_step
        if progress.steps == 0:
            self._first_step = (progress, taken, 0)
            self.ahead_known = taken == 1
        elif self._first_step is not None and self._first_step[0] is progress:
            _, first, second = self._first_step
            if progress.steps == 1:
                self.ahead_known = taken >= first
                self._first_step = (progress, first, taken)
                if self._length is None or progress.next_number >= self._length:
                    return  # it may be what remains of the epoch: the third step says
                second = taken
            if not self.ahead_known and progress.since_step and second < first:
                raise RuntimeError(
                    f"{first} batches of {self._name} were fetched before the first step ended and {second} before "
                    f"the second: something fetches {first - second} ahead, and a checkpoint would count as trained "
                    f"what was only fetched. Say so with ResumableLoader(..., ahead={first - second}); or ahead=0 if "
                    "the batches before the first step were left out on purpose"
                )
