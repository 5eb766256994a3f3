"""Random sequences of what happens to a directory of checkpoints, against a small model of what must hold.

Saves, refused saves, crashes at any operation of the store, damage, deletions by hand, copies, restores, rollbacks,
reopened managers, a second run in the same directory, other retention. After every step: what the model calls good is
there and is listed, restores to the bits that were saved, nothing foreign was touched, and no more is kept than asked.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import stateful, strategies

import safeckpt
from safeckpt.store import names
from tests import faults
from tests.campaign.outcome import Outcome, Scale
from tests.training import Marked

FOREIGN = {"notes.txt": b"mine", "step-7.pt": b"another tool's", "best.pt": b"mine too"}


class _Gone(BaseException):
    """The process is gone: nothing after this point was executed."""


class Abandon:
    """Lets a number of operations of the store through, then does nothing any more, as a process that is gone."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, operation: faults.Operation, call: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            if operation.kind == "close":
                call()
            raise _Gone
        return call()


class Machine(stateful.RuleBasedStateMachine):
    """One directory, one run at a time."""

    counts: dict[str, int] = {}  # noqa: RUF012  of all machines, for the report

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "run"
        self.folder.mkdir()
        for name, data in FOREIGN.items():
            (self.folder / name).write_bytes(data)
        self.keep_last, self.best = 2, False
        self.saved: dict[int, float] = {}  # every step that was committed on this timeline, with its loss
        self.good: set[int] = set()  # of those, the ones whose file must be there now
        self.damaged: set[int] = set()
        self.maybe: set[int] = set()  # a crash may have left either
        self.open()

    def count(self, what: str) -> None:
        Machine.counts[what] = Machine.counts.get(what, 0) + 1

    def open(self) -> None:
        self.run = Marked()
        retention: dict[str, Any] = {"keep_last": self.keep_last}
        if self.best:
            retention["keep_best"] = safeckpt.Best("loss")
        self.manager = safeckpt.CheckpointManager(
            self.folder, self.run.components, lock_timeout_seconds=0.0, **retention
        )

    def on_disk(self) -> set[int]:
        return {step for path in self.folder.iterdir() if (step := names.parse_step(path.name)) is not None}

    def committed(self, step: int, loss: float) -> None:
        """The model of a save: later steps of an abandoned timeline are set aside, then the retention rule holds."""
        self.saved = {other: value for other, value in self.saved.items() if other < step} | {step: loss}
        self.good = {other for other in self.good if other < step} | {step}
        self.damaged = {other for other in self.damaged if other < step}
        self.settle()

    def settle(self) -> None:
        """Take from the model what the rule prunes."""
        kept = set(sorted(self.good)[-self.keep_last :])
        if self.best and self.good:
            lowest = min(self.saved[step] for step in self.good)
            kept.add(max(step for step in self.good if self.saved[step] == lowest))
        self.good = kept

    def restore(self, step: int | None = None) -> safeckpt.Checkpoint | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", safeckpt.SafeckptWarning)
            return self.manager.restore(step)

    def resume(self) -> None:
        """Come back as a new process would; what a crash left open is settled by what is on the disk."""
        self.manager.close()
        self.open()
        present = self.on_disk()
        for step in self.maybe & present:
            self.good.add(step)
        self.maybe.clear()
        if self.good or self.damaged & present:
            try:
                checkpoint = self.restore()
            except safeckpt.NoGoodCheckpointError:
                assert not self.good
                return
            assert checkpoint is not None
            assert checkpoint.step == max(self.good), (checkpoint.step, self.good)
            assert self.run.step == checkpoint.step

    @property
    def blocked(self) -> bool:
        """Whether nothing but damaged files is left: a manager then refuses to write."""
        return not self.good

    @stateful.rule(more=strategies.integers(1, 3), loss=strategies.floats(0, 1))
    def save(self, more: int, loss: float) -> None:
        step = self.manager.step + more
        self.run.step = step
        if self.blocked and self.on_disk():
            try:
                self.manager.save(step, loss=loss)
            except safeckpt.DirectoryInUseError:
                return
            self.committed(step, loss)
            return
        self.manager.save(step, loss=loss)
        self.committed(step, loss)
        self.count("saves")

    @stateful.rule()
    def refuse(self) -> None:
        before = self.run.step
        files = self.on_disk()
        self.run.poison()
        try:
            self.manager.save(self.manager.step + 1, loss=0.5)
        except (safeckpt.NonFiniteError, safeckpt.DirectoryInUseError):
            pass
        else:
            raise AssertionError("a checkpoint with NaN was saved")
        self.run.step = before
        assert self.on_disk() == files
        self.count("refusals")

    @stateful.rule(after=strategies.integers(0, 30), loss=strategies.floats(0, 1))
    def crash(self, after: int, loss: float) -> None:
        step = self.manager.step + 1
        self.run.step = step
        before = set(self.good)
        path = self.folder / names.step_name(step)
        old = path.read_bytes() if path.exists() else None  # damaged, and in the way
        try:
            with faults.intercept(Abandon(after)):
                self.manager.save(step, loss=loss)
        except _Gone:
            done = path.exists() and path.read_bytes() != old
        except safeckpt.DirectoryInUseError:
            self.resume()
            return
        else:
            done = True
        self.count("crashes")
        if done:
            self.committed(step, loss)
            left = self.on_disk()
            self.good |= {other for other in before if other in left and other < step}  # not pruned yet
        self.resume()

    @stateful.rule(which=strategies.integers(0, 5), at=strategies.integers(0, 1 << 16), cut=strategies.booleans())
    def damage(self, which: int, at: int, cut: bool) -> None:
        present = sorted(self.good & self.on_disk())
        if not present:
            return
        step = present[which % len(present)]
        path = self.folder / names.step_name(step)
        data = bytearray(path.read_bytes())
        if cut:
            del data[at % len(data) :]
        else:
            data[at % len(data)] ^= 1 << at % 8
        path.write_bytes(data)
        self.good.discard(step)
        self.damaged.add(step)
        self.count("damaged")
        self.resume()

    @stateful.rule(which=strategies.integers(0, 5))
    def delete_by_hand(self, which: int) -> None:
        present = sorted(self.on_disk())
        if not present:
            return
        step = present[which % len(present)]
        (self.folder / names.step_name(step)).unlink()
        self.good.discard(step)
        self.damaged.discard(step)
        self.count("deleted")
        self.resume()

    @stateful.rule()
    def copy_the_directory(self) -> None:
        self.manager.close()
        copy = self.root / f"copy {random.Random(len(list(self.root.iterdir()))).random()}"
        shutil.copytree(self.folder, copy)
        shutil.rmtree(self.folder)
        copy.rename(self.folder)
        self.count("copies")
        self.resume()

    @stateful.rule()
    def reopen(self) -> None:
        self.count("reopened")
        self.resume()

    @stateful.rule(keep_last=strategies.integers(1, 4), best=strategies.booleans())
    def other_retention(self, keep_last: int, best: bool) -> None:
        self.keep_last, self.best = keep_last, best
        self.count("retentions")
        self.resume()

    @stateful.rule(which=strategies.integers(0, 5))
    def restore_a_step(self, which: int) -> None:
        present = sorted(self.good)
        if not present:
            return
        step = present[which % len(present)]
        checkpoint = self.restore(step)
        assert checkpoint is not None
        assert (checkpoint.step, self.run.step) == (step, step)
        self.count("restores")
        self.resume()

    @stateful.rule(which=strategies.integers(0, 5), loss=strategies.floats(0, 1))
    def go_back_and_save(self, which: int, loss: float) -> None:
        present = sorted(self.good)
        if not present:
            return
        step = present[which % len(present)]
        self.restore(step)
        self.run.step = step + 1
        self.manager.save(step + 1, loss=loss)
        self.committed(step + 1, loss)
        self.count("branches")

    @stateful.rule()
    def rollback(self) -> None:
        if not self.good or self.manager.step != max(self.good):
            return
        self.run.poison()
        checkpoint = self.manager.rollback(changed=True, max_rollbacks=1000)
        assert (checkpoint.step, self.run.step) == (max(self.good), max(self.good))
        self.count("rollbacks")

    @stateful.rule()
    def second_run(self) -> None:
        """A run that did not restore may not write here, not while the first has the lock and not afterwards."""
        if not self.on_disk():
            return
        self.manager.close()
        other = Marked()
        other.step = 999
        files = faults.contents(self.folder)
        with safeckpt.CheckpointManager(self.folder, other.components, lock_timeout_seconds=0.0) as manager:
            try:
                manager.save(999)
            except safeckpt.DirectoryInUseError:
                pass
            else:
                raise AssertionError("a second run saved into the directory of the first")
        after = faults.contents(self.folder)
        assert {name for name in files if name.endswith(".pt")} <= set(after)
        self.count("second runs")
        self.resume()

    @stateful.invariant()
    def what_must_hold(self) -> None:
        present = self.on_disk()
        assert self.good <= present, f"lost {self.good - present}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", safeckpt.SafeckptWarning)
            newest = safeckpt.latest(self.folder)
        assert (newest.step if newest else None) == max(self.good, default=None)
        for name, data in FOREIGN.items():
            assert (self.folder / name).read_bytes() == data
        assert len(self.good) <= self.keep_last + self.best + 4
        assert not present - self.good - self.damaged - self.maybe - set(self.saved), "a file that nobody saved"

    def teardown(self) -> None:
        self.manager.close()
        shutil.rmtree(self.root)


def run(scale: Scale, seed: int) -> Outcome:
    full = scale == "full"
    outcome = Outcome("random sequences of all of these, against a model")
    Machine.counts = {}
    settings = hypothesis.settings(
        max_examples=400 if full else 25, stateful_step_count=40 if full else 20, database=None, deadline=None,
        report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", safeckpt.SafeckptWarning)
            stateful.run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=settings)
    except (AssertionError, safeckpt.SafeckptError, OSError, ValueError) as error:
        outcome.lost.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
    outcome.figures = dict(Machine.counts)
    outcome.tried = sum(Machine.counts.values())
    return outcome
