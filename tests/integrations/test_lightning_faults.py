"""Lightning: what is not finite, signals, several processes, and what is refused by name."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import warnings

import pytest

pytest.importorskip("lightning", reason='needs the extra: pip install "safeckpt[lightning]"')

import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import strategies

import safeckpt
from safeckpt.integrations.lightning import SafeCheckpoint
from tests import children
from tests.integrations import harness
from tests.integrations.harness import BATCH_SIZE, EPOCHS, LENGTH, STEPS, Place
from tests.integrations.lightning_runs import Model, Several, Sharded, loader, quiet, train, train_stock

children.preload("tests.integrations.lightning_runs")


def steps_of(events):
    return [event for event in events if event["event"] == "step"]


def names_of(events, name):
    return [event for event in events if event["event"] == name]


def whole(path, **options):
    """Return the events of a run that ends by itself."""
    (ended,), (events,) = harness.run(train, path, name="whole", **options)
    assert ended.signal is None
    if ended.error is not None:
        raise ended.error
    return events


def history_of(path):
    lines = (path / "checkpoints" / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["kind"] for line in lines]


# -- what is not finite ----------------------------------------------------------------------------------------------


def test_nan_loss_ends_the_run_before_it_is_saved(tmp_path):
    """Without anything else said, the error comes out of `fit`, and the checkpoints are those from before."""
    with pytest.raises(safeckpt.NonFiniteError, match="loss"):
        whole(tmp_path, model={"bad": 5}, save_every=1)
    for one in (tmp_path / "checkpoints").glob("*.pt"):
        assert not safeckpt.find_nonfinite(safeckpt.load(one)["model"])


@pytest.mark.parametrize("options", [{}, {"save_every": 5}, {"accumulate_grad_batches": 2}], ids=str)
def test_rollback_leaves_the_batch_out_and_goes_on(tmp_path, options):
    """Of each epoch the bad batch is left out: the rest is trained, every epoch has its hooks, no weight is NaN."""
    accumulate = options.get("accumulate_grad_batches", 1)
    events = whole(tmp_path, model={"bad": 5}, safe={"on_nonfinite": "rollback"}, **{"save_every": 1, **options})
    assert len(names_of(events, "on_train_end")) == 1
    assert len(names_of(events, "on_train_epoch_end")) >= EPOCHS
    assert [one["epoch"] for one in names_of(events, "on_validation_end")][-1] == EPOCHS - 1
    assert "nan" not in events[-1]["weights"]
    last = {}  # of each epoch, the last time that a batch number was trained
    epoch = 0
    for event in events:
        if event["event"] == "on_train_epoch_start":
            epoch = event["epoch"]
        if event["event"] == "step":
            last[epoch, event["number"]] = event
    bad = {place: event for place, event in last.items() if 5 in event["batch"]}
    assert len(bad) == EPOCHS
    assert len(last) == STEPS
    assert history_of(tmp_path).count("rolled_back") == EPOCHS
    assert accumulate in {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("place", [Place("step", 9), Place("on_train_epoch_end", 1), Place("validation", 4)])
def test_run_that_has_rolled_back_resumes_exactly(tmp_path, straights, place):
    """What was left out before the kill is left out behind it, and nothing else."""
    options = {"model": {"bad": 5}, "safe": {"on_nonfinite": "rollback"}, "save_every": 1}
    harness.assert_exact(train, tmp_path, place, straight=straights(**options), **options)


def test_run_that_is_bad_everywhere_ends(tmp_path):
    """Rolling back is bounded."""
    with pytest.raises(safeckpt.RollbackLoopError):
        whole(tmp_path, model={"bad": "all"}, safe={"on_nonfinite": "rollback", "max_rollbacks": 2}, save_every=1)


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at", [Place("step", 8), Place("validation", 2), Place("on_train_epoch_end", 1)], ids=lambda place: place.event
)
def test_signal_saves_and_stops_and_the_rest_follows(tmp_path, at):
    """The step is finished with all that belongs to it, saved, and `fit` ends; the next start does the rest."""
    straight = whole(tmp_path / "straight", save_every=100)
    (stopped,), (first,) = harness.run(stop, tmp_path / "run", name="stopped", at=at)
    assert isinstance(stopped.error, SystemExit)
    (ended,), (rest,) = harness.run(train, tmp_path / "run", name="resumed", save_every=100)
    assert ended.error is None
    assert first + rest == straight


@pytest.mark.slow
def test_time_limit_saves_and_stops_and_the_rest_follows(tmp_path):
    """As a signal does."""
    straight = whole(tmp_path / "straight", save_every=100)
    options = {"safe": {"stop_before": dt.datetime.now(dt.UTC)}, "save_every": 100}
    (stopped,), (first,) = harness.run(train, tmp_path / "run", name="stopped", **options)
    assert isinstance(stopped.error, SystemExit)
    assert len(steps_of(first)) == 1
    (ended,), (rest,) = harness.run(train, tmp_path / "run", name="resumed", save_every=100)
    assert ended.error is None
    assert first + rest == straight


def stop(path, record, at):
    """Train, and send SIGTERM at a place."""
    seen = 0

    def tell(event, **values):
        nonlocal seen
        record(event, **values)
        seen += event == at.event
        if event == at.event and seen == at.number:
            os.kill(os.getpid(), signal.SIGTERM)

    train(path, tell, save_every=100)


# -- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", [Place("step", 5), Place("step", 6), Place("validation", 3), Place("write", 12)])
def test_two_ranks_resume_exactly(tmp_path, straights, place):
    """With DDP over gloo both ranks go on with their own batches, which together are all of them, once."""
    options = {"strategy": "ddp", "devices": 2, "save_every": 1}
    one, other = harness.assert_exact(train, tmp_path, place, ranks=2, straight=straights(**options), **options)
    epochs = [
        sorted(index for step in steps_of(events)[: LENGTH // 2] for index in step["batch"])
        for events in (one.straight, other.straight)
    ]
    assert sorted(epochs[0] + epochs[1]) == list(range(LENGTH * BATCH_SIZE))


@pytest.mark.slow
@pytest.mark.parametrize("place", [Place("step", 5), Place("validation", 3)])
def test_sharded_model_resumes_exactly(tmp_path, straights, place):
    """With FSDP2 each rank writes its shards, and the resumed run is the same run."""
    base = straights(kind="sharded")
    harness.assert_exact(train, tmp_path, place, ranks=2, straight=base, kind=Sharded, devices=2)


def test_two_ranks_see_each_sample_once(tmp_path):
    """The sampler that Lightning puts in is kept."""
    ended, events = harness.run(train, tmp_path, name="ranks", ranks=2, strategy="ddp", devices=2, max_epochs=1)
    assert [one.error for one in ended] == [None, None]
    seen = [index for one in events for step in steps_of(one) for index in step["batch"]]
    assert sorted(seen) == list(range(LENGTH * BATCH_SIZE))


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_best_by_the_metric_of_validation_is_kept(tmp_path):
    """Behind each validation there is a checkpoint with its metric, and the best one stays."""
    best = safeckpt.Best("val", mode="min")
    events = whole(tmp_path, save_every=100, safe={"keep_best": best, "keep_last": 1})
    values = [float.fromhex(one["metrics"]["val"]) for one in names_of(events, "on_train_epoch_end")]
    kept = {int(path.stem.split("-")[1]) for path in (tmp_path / "checkpoints").glob("*.pt")}
    assert kept == {STEPS, (values.index(min(values)) + 1) * LENGTH}


def test_model_checkpoint_beside_it_works(tmp_path):
    """Its files are there, also after a kill, and `best` is found."""
    harness.assert_exact(train, tmp_path, Place("step", 14), callbacks=("model",))
    assert (tmp_path / "run" / "models" / "last.ckpt").exists()
    assert len(list((tmp_path / "run" / "models").glob("epoch*.ckpt"))) == 2


# -- the stock trainer -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", [Place("step", 9), Place("step", 13)])
def test_own_checkpoints_of_lightning_resume_another_run(tmp_path, place):
    """Why this integration is there: the same run with `ModelCheckpoint` and `ckpt_path="last"` is not exact."""
    (comparison,) = harness.compare(train_stock, tmp_path, place)
    assert comparison.wrong > 0 or comparison.never_trained > 0


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def fit(tmp_path):
    """Fit in this process, where no error leaves anything behind."""

    def run(training=None, *, kind=Model, safe=None, **options):
        module = kind(lambda *_, **__: None, STEPS)
        fit_options = options.pop("fit", {})
        callbacks = [SafeCheckpoint(tmp_path / "checkpoints", **(safe or {})), *options.pop("more", ())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = quiet(callbacks, enable_checkpointing=False, **options)
            trainer.fit(module, training or loader(), loader(shuffle=False), **fit_options)
        return trainer

    return run


def test_ckpt_path_is_refused(tmp_path, fit):
    """Two states would be mixed; the error says what to do."""
    trainer = fit(max_epochs=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match="Next: call fit without ckpt_path"):
        fit(fit={"ckpt_path": tmp_path / "own.ckpt", "weights_only": False}, safe={"save_every": 1})


def test_loaders_that_are_made_anew_are_refused(fit):
    """A new loader has no position."""
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs"):
        fit(reload_dataloaders_every_n_epochs=1)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_with_pieces_of_their_own_are_refused(tmp_path, name):
    """FSDP1 and DeepSpeed are named."""
    trainer = quiet([SafeCheckpoint(tmp_path)], enable_checkpointing=False)
    kind = getattr(strategies, name)
    trainer._accelerator_connector.strategy = kind.__new__(kind)
    with pytest.raises(TypeError, match=f"does not support {name}"):
        trainer.callbacks[0].setup(trainer, None, "fit")


def test_tuners_are_refused(fit):
    """They train before the run begins."""
    with pytest.raises(TypeError, match="does not support LearningRateFinder"):
        fit(more=[lightning_callbacks.LearningRateFinder()])


def test_data_without_a_position_is_refused(fit):
    """A list of batches cannot be restored."""
    with pytest.raises(TypeError, match="which has no position that could be restored"):
        fit(list(loader()))


def test_several_loaders_and_rollback_are_refused(fit):
    """Whose batch was bad is not known."""
    with pytest.raises(ValueError, match="does not support several training loaders"):
        fit({"a": loader(), "b": loader()}, kind=Several, safe={"on_nonfinite": "rollback"})


def test_loader_that_is_wrapped_already_is_kept_by_one_process_and_refused_by_two(tmp_path, fit):
    """Lightning puts no sampler in one, so each rank would see all data."""
    trainer = fit(safeckpt.ResumableLoader(loader(), seed=5), max_epochs=1)
    assert trainer.global_step == LENGTH
    ended, _ = harness.run(train, tmp_path / "two", name="ranks", ranks=2, strategy="ddp", devices=2, data="wrapped")
    for one in ended:
        assert isinstance(one.error, TypeError)
        assert "give Lightning the plain DataLoader" in str(one.error)


def test_unknown_options_are_refused(tmp_path):
    """At construction, with a list of those that there are."""
    with pytest.raises(TypeError, match=r"save_evry: no option of CheckpointManager; those are .*save_every"):
        SafeCheckpoint(tmp_path, save_evry=3)
    with pytest.raises(ValueError, match="on_nonfinite"):
        SafeCheckpoint(tmp_path, on_nonfinite="ignore")
    with pytest.raises(ValueError, match="model is a name"):
        SafeCheckpoint(tmp_path, components={"model": torch.nn.Linear(1, 1)})


def test_fast_dev_run_saves_nothing(tmp_path, fit):
    """It is a check of the code, not a run."""
    fit(fast_dev_run=True)
    assert not (tmp_path / "checkpoints").exists()


def test_finished_run_is_not_trained_again(fit):
    """A second start finds nothing to do."""
    fit(max_epochs=2)
    trainer = fit(max_epochs=2)
    assert trainer.global_step == 2 * LENGTH
    assert trainer.callbacks[0].manager.step == 2 * LENGTH


def test_finished_run_goes_on_with_more_epochs(fit):
    """With a higher `max_epochs` it goes on behind the last epoch."""
    fit(max_epochs=1)
    trainer = fit(max_epochs=2)
    assert trainer.global_step == 2 * LENGTH


def test_trainer_is_left_as_it_was(fit):
    """After `fit`, also one that failed, loops and strategy have their own methods again, and SIGTERM its handler."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = fit(max_epochs=1)
    assert not {"advance", "on_advance_end"} & {*vars(trainer.fit_loop), *vars(trainer.fit_loop.epoch_loop)}
    assert "process_dataloader" not in vars(trainer.strategy)
    assert signal.getsignal(signal.SIGTERM) == before
