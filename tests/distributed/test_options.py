"""Options of a manager that say what is kept, and with what, on every rank of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safeckpt
from tests.distributed import groups
from tests.distributed.scenarios import outcome
from tests.distributed.training import Run, manager_of


def _noted_and_best(path: Path) -> Any:
    run = Run("ddp")
    best = safeckpt.Best("accuracy", "max")
    with manager_of(run, path / "run", keep_last=1, keep_best=best, notes={"git": "abc"}) as manager:
        notes = [
            dict(manager.save(step, metrics={"accuracy": accuracy + run.rank}).notes)
            for step, accuracy in enumerate((0.5, 0.9, 0.7, 0.6), start=1)
        ]
        steps = [one.step for one in manager.checkpoints()]
        metrics = manager.checkpoints()[0].metrics
    other = manager_of(run, path / "other", notes={"git": f"commit-{run.rank}"})
    return notes, steps, dict(metrics), outcome(lambda: other.save(1))["error"]


def test_notes_and_the_best_are_those_of_rank_0_on_every_rank(tmp_path: Path) -> None:
    """All ranks keep the same checkpoints, whatever each has measured; other notes are refused."""
    seen = groups.results(2, _noted_and_best, tmp_path)
    assert seen[0] == seen[1]
    notes, steps, metrics, _ = seen[0]
    assert notes == [{"git": "abc"}] * 4
    assert steps == [2, 4]
    assert metrics == {"accuracy": 0.9}
    assert seen[0][3] == "RanksDisagreeError"


def _owed(path: Path) -> Any:
    """End two steps, and pay afterwards what the second owes."""
    run = Run("ddp")
    with manager_of(run, path / "run", save_every=2) as manager:
        for step in (1, 2):
            manager.end_step(step, loss=run.step(step), save=False)
        nothing_yet = manager.checkpoints()
        saved = manager.save_due(metrics={"accuracy": 0.5})
        again = manager.save_due()
        assert saved is not None
        return nothing_yet, saved.step, dict(saved.metrics), again, manager.is_due


def test_owed_checkpoint_is_saved_by_all_ranks_once(tmp_path: Path) -> None:
    """With the metrics that came later; afterwards no rank owes anything."""
    assert groups.results(2, _owed, tmp_path) == [((), 2, {"accuracy": 0.5}, None, False)] * 2
