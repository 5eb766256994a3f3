"""`prove_resume(train)`: a function that trains a whole run with a manager of its own, in fresh processes."""

from __future__ import annotations

import contextlib
import random
import signal

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import safeckpt

COUNT = [0]


def train(directory, *, options=None, forgets=False, restores=True, batches=8, save_every=None, drifts=False):
    """Train a small model over three epochs, as a script does."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(4 * batches, 4))
    loader = safeckpt.ResumableLoader(DataLoader(data, 4, shuffle=True))
    components = {"model": model, "loader": loader} | ({} if forgets else {"optimizer": optimizer})
    with safeckpt.CheckpointManager(directory, components, save_every=save_every, **(options or {})) as manager:
        if restores:
            manager.restore()
        for _ in loader.epochs(3):
            for (x,) in loader:
                loss = (model(x) + (random.random() if drifts else 0.0)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.end_step(manager.step + 1, loss=loss)


def train_asynchronously(directory):
    train(directory, options={"async_save": True}, save_every=1)


@pytest.mark.filterwarnings("ignore::safeckpt.UncapturedStateWarning")
def train_without_optimizer(directory):
    train(directory, forgets=True)


def train_with_a_counter(directory):
    """The loss depends on a global that no checkpoint holds."""

    class Counting(torch.nn.Linear):
        def forward(self, x):
            COUNT[0] += 1
            return super().forward(x) * (1 + COUNT[0] / 10)

    torch.manual_seed(0)
    model = Counting(4, 1)
    with safeckpt.CheckpointManager(directory, {"model": model}) as manager:
        manager.restore()
        while manager.step < 8:
            manager.end_step(manager.step + 1, loss=model(torch.randn(2, 4)).square().mean())


def train_elsewhere(directory):
    train(directory / str(random.random()))


def train_without_restore(directory):
    train(directory, restores=False)


def train_without_a_manager(directory):
    torch.manual_seed(0)


def train_at_random(directory):
    train(directory, drifts=True)


def train_every_second(directory):
    with safeckpt.CheckpointManager(directory, {"counter": {"n": 0}}) as manager:
        for step in range(2, 12, 2):
            manager.end_step(step, loss=1.0 / step)


def train_counting_from_zero(directory):
    """Six steps each time it is started, and no loss for the manager."""
    with safeckpt.CheckpointManager(directory, {"counter": {"n": 0}}, save_every=3) as manager:
        manager.restore()
        for _ in range(6):
            manager.end_step(manager.step + 1)


def train_twice(directory):
    """Two managers, one after the other."""
    train(directory / "first", save_every=3)
    train(directory / "second", save_every=3)


def test_whole_run_is_proven():
    """In the middle of an epoch; the run is longer than what is looked at."""
    report = safeckpt.prove_resume(train, steps=11, kill_at=5, repeats=1)
    report.assert_exact()
    assert (report.steps_compared, report.in_process) == (6, None)


@pytest.mark.slow
@pytest.mark.parametrize("function", [train, train_asynchronously])
def test_whole_run_is_proven_at_several_places(function):
    """In the middle of an epoch and at its border, and twice straight through."""
    report = safeckpt.prove_resume(function, steps=11, kill_at=[5, 8])
    report.assert_exact()
    assert [kill.steps_compared for kill in report.kills] == [6, 3]
    assert report.components == ["model", "loader", "optimizer"]
    assert "killed with SIGKILL" in str(report)


@pytest.mark.slow
def test_run_that_is_shorter_than_the_proof_is_compared_to_its_end():
    """Three epochs of eight batches are 24 steps."""
    report = safeckpt.prove_resume(train, steps=30, kill_at=22, repeats=1)
    report.assert_exact()
    assert (report.steps, report.steps_compared) == (24, 2)


@pytest.mark.slow
def test_run_that_does_other_steps_after_the_resume_is_not_exact():
    """Without a loss there is nothing to compare but the steps themselves."""
    report = safeckpt.prove_resume(train_counting_from_zero, steps=20, kill_at=3, repeats=1)
    assert not report.exact
    assert report.first_divergence == 3


@pytest.mark.slow
def test_second_manager_that_is_not_compared_is_noted():
    """What is said of the first one is said of that alone."""
    report = safeckpt.prove_resume(train_twice, steps=30, kill_at=3, repeats=1)
    assert any("more than one CheckpointManager" in note for note in report.notes), report.notes


@pytest.mark.slow
def test_part_that_is_not_saved_is_named():
    """The loss that differs first, and what no checkpoint holds."""
    report = safeckpt.prove_resume(train_without_optimizer, steps=8, kill_at=4, repeats=1)
    assert not report.exact
    assert report.first_divergence == 1
    assert any("AdamW that trains" in note for note in report.notes)
    report = safeckpt.prove_resume(train_with_a_counter, steps=8, kill_at=4, repeats=1)
    assert not report.exact
    assert (report.first_divergence, report.diverged_component) == (0, "tests.proof.test_training.COUNT.0")


@pytest.mark.slow
def test_run_that_is_not_deterministic_cannot_be_judged():
    """As with functions for single steps."""
    report = safeckpt.prove_resume(train_at_random, steps=4, kill_at=2)
    assert not report.deterministic


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        pytest.param(train_elsewhere, ValueError, "the steps of this run are 1, 2, 3, 4", marks=pytest.mark.slow),
        (train_without_a_manager, ValueError, "ended no step of a CheckpointManager"),
        pytest.param(train_without_restore, ValueError, "restore before the first one", marks=pytest.mark.slow),
        pytest.param(train_every_second, ValueError, "number steps by one", marks=pytest.mark.slow),
    ],
)
def test_run_that_cannot_be_proven_is_an_error(function, error, text):
    """Nothing is proven by a run that did not go on."""
    with pytest.raises(error, match=text):
        safeckpt.prove_resume(function, steps=4, kill_at=2, repeats=1)


@pytest.mark.slow
def test_kill_behind_the_end_of_the_run_is_an_error():
    """The run was over before."""
    with pytest.raises(ValueError, match="no checkpoint of step 25 or later"):
        safeckpt.prove_resume(train, steps=30, kill_at=25, repeats=1)


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (train, {"restore": print}, "restore cannot be had"),
        (train, {"ablations": True}, "ablations cannot be had"),
        (train, {"in_process": True}, "in_process cannot be had"),
        (train, {"kill_at": 0}, "from 1 to"),
        (lambda directory: train(directory), {}, "processes of their own"),  # noqa: PLW0108
    ],
)
def test_what_needs_single_steps_is_refused(function, options, text):
    """A whole run makes its manager itself, in a process of its own."""
    with pytest.raises(ValueError, match=text):
        safeckpt.prove_resume(function, **options)


def test_killed_run_died_of_sigkill(tmp_path):
    """And nothing behind the checkpoint was done."""
    from safeckpt.proof.runs import KILLED, Job
    from safeckpt.proof.workers import Functions, Worker

    functions = Functions.of((train, None, None))
    with contextlib.closing(Worker()) as worker:
        record = worker.run(Job(KILLED, 8, 3, str(tmp_path / "run")), functions, tmp_path / "record")
    assert worker._process.returncode == -signal.SIGKILL
    assert len(record.losses) == 3
    assert safeckpt.latest(tmp_path / "run").step == 3
