"""What the manager promises holds in every trainer: the replayed losses, the best, the mirror, and the proof."""

from __future__ import annotations

import shutil

import pytest

import safeckpt
from tests.integrations import small_runs
from tests.integrations.small_runs import LENGTH, METRIC, PACKAGES, RUNS, STEPS, Losses
from tests.remote.conftest import URL, store  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore")  # of trainers there are many


@pytest.fixture(params=RUNS)
def name(request):
    """Each trainer that is installed."""
    pytest.importorskip(PACKAGES[request.param], reason=f'needs the extra: pip install "safeckpt[{request.param}]"')
    return request.param


def test_replayed_losses_are_compared(name, tmp_path, caplog):
    """Steps behind the last checkpoint are trained again: the same losses are said to be, another one is an error."""
    train = RUNS[name]
    for directory in (tmp_path / "same", tmp_path / "other"):
        with pytest.raises(small_runs.Failure):
            train(directory, Losses(fails_at=8), save_every=5)
    with caplog.at_level("INFO", "safeckpt"):
        rest = train(tmp_path / "same", save_every=5, on_replay_mismatch="error")
    assert list(rest) == list(range(6, STEPS + 1))
    assert "2 of 2 replayed losses equal" in caplog.text
    with pytest.raises(safeckpt.ReplayMismatchError):
        train(tmp_path / "other", Losses(scale=1.5), save_every=5, on_replay_mismatch="error")


def test_loss_that_jumps_is_rolled_back(name, tmp_path, caplog):
    """As one that is not finite: the batch is left out, the run goes on, and the log says so."""
    guard = safeckpt.Guard(loss_above=1e5)
    with caplog.at_level("WARNING", "safeckpt"):
        losses = RUNS[name](tmp_path, Losses(jumps_at=6), save_every=5, on_nonfinite="rollback", guard=guard)
    assert "step 5" in caplog.text or "iteration 5" in caplog.text
    assert len(losses) >= STEPS - 1
    assert max(losses.values()) < 1e5
    with pytest.raises(safeckpt.LossSpikeError):
        RUNS[name](tmp_path / "raised", Losses(jumps_at=6), save_every=5, guard=guard)


def test_best_checkpoint_by_the_metric_of_an_evaluation_is_kept(name, tmp_path):
    """Its metric is in it, and it stays where only the newest one does."""
    best = safeckpt.Best(METRIC[name], "max")
    RUNS[name](tmp_path / "all", save_every=LENGTH, keep_last=9)
    values = {one.step: one.metrics[METRIC[name]] for one in kept(tmp_path / "all")}
    assert list(values) == [LENGTH, 2 * LENGTH, STEPS]
    RUNS[name](tmp_path / "best", save_every=LENGTH, keep_last=1, keep_best=best)
    assert {one.step for one in kept(tmp_path / "best")} == {STEPS, max(values, key=values.get)}


def kept(directory):
    return safeckpt.CheckpointManager(directory, {"x": {}}).checkpoints()


def test_empty_disk_is_restored_from_the_mirror(name, tmp_path, store):  # noqa: F811 - the fixture
    """The run goes on where its copy in the store ends."""
    train = RUNS[name]
    straight = train(tmp_path / "straight", save_every=5)
    with pytest.raises(small_runs.Failure):
        train(tmp_path / "run", Losses(fails_at=8), save_every=5, mirror=URL)
    shutil.rmtree(tmp_path / "run")
    rest = train(tmp_path / "run", save_every=5, mirror=URL)
    assert rest == {step: loss for step, loss in straight.items() if step > 5}


@pytest.mark.slow
@pytest.mark.timeout(900)  # three processes that import a trainer
def test_whole_run_of_a_trainer_is_proven(name):
    """`prove_resume` of a function that trains in a directory, within its second epoch."""
    report = safeckpt.prove_resume(RUNS[name], steps=STEPS - 2, kill_at=LENGTH + 2, repeats=1)
    report.assert_exact()
    assert report.steps_compared == 4


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_whole_run_of_a_trainer_is_proven_at_a_border(name):
    """Behind the last batch of an epoch as well, and twice straight through."""
    safeckpt.prove_resume(RUNS[name], steps=STEPS - 2, kill_at=[LENGTH, 2 * LENGTH]).assert_exact()


@pytest.mark.slow
def test_single_steps_with_prepared_objects_are_proven():
    """`build` may return what an accelerator has prepared."""
    pytest.importorskip("accelerate")
    proof = safeckpt.prove_resume(
        small_runs.build_accelerate, small_runs.step_accelerate, steps=6, kill_at=3, repeats=1
    )
    proof.assert_exact()
