"""What `safe(Trainer(...))` refuses, and what it does about NaN, a stop signal and a callback that ends training."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import safeckpt
from tests.integrations import harness

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "safeckpt[transformers]"')

from accelerate.utils import DistributedType  # noqa: E402
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from safeckpt.integrations.transformers import safe  # noqa: E402
from tests.integrations.transformers_runs import Net  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Poisoned(Trainer):
    """Records its batches, and makes the losses of some of them NaN."""

    poison = ()

    def training_step(self, model, inputs, *rest):
        self.__dict__.setdefault("seen", []).append(inputs["index"].tolist())
        loss = super().training_step(model, inputs, *rest)
        return loss * float("nan") if len(self.seen) - 1 in self.poison else loss


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            return self.action(control)
        return None


def trainer_of(path, *callbacks, kind=Poisoned, **arguments):
    torch.manual_seed(0)
    data = harness.Samples(keys=("x", "labels", "index"))
    arguments = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "save_strategy": "no"} | arguments
    arguments = TrainingArguments(
        str(path / "out"), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False, **arguments
    )
    return kind(Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def test_loss_that_is_not_finite_is_an_error(tmp_path):
    """Also where the trainer leaves NaN out of its log."""
    trainer = safe(trainer_of(tmp_path), tmp_path / "run", save_every=4)
    trainer.poison = {6}
    with pytest.raises(safeckpt.NonFiniteError):
        trainer.train()
    assert safeckpt.latest(tmp_path / "run").step == 4


def test_rollback_leaves_the_batch_out_and_goes_on(tmp_path, caplog):
    """The batch that failed is not seen again, those since the checkpoint are, and it is said in the log."""
    straight = safe(trainer_of(tmp_path), tmp_path / "straight")
    straight.train()
    trainer = safe(trainer_of(tmp_path), tmp_path / "run", save_every=4, on_nonfinite="rollback")
    trainer.poison = {6}
    with caplog.at_level(logging.WARNING, "safeckpt"):
        trainer.train()
    assert [*trainer.seen[:6], *trainer.seen[9:]] == [
        batch for number, batch in enumerate(straight.seen) if number != 6
    ]
    assert trainer.seen[7:9] == trainer.seen[4:6]
    assert "without the 1 batches of that step" in caplog.text
    assert trainer.state.global_step == harness.STEPS - 1


def test_rollback_leaves_out_all_batches_of_an_accumulated_step(tmp_path):
    """Which of them was bad is not asked."""
    options = {"gradient_accumulation_steps": 2}
    straight = safe(trainer_of(tmp_path, **options), tmp_path / "straight")
    straight.train()
    trainer = safe(trainer_of(tmp_path, **options), tmp_path / "run", save_every=2, on_nonfinite="rollback")
    trainer.poison = {9}
    trainer.train()
    assert [*trainer.seen[:8], *trainer.seen[10:]] == straight.seen[:8] + straight.seen[10:]


def test_time_limit_saves_and_train_returns(tmp_path):
    """As after a signal; the next start goes on from there."""
    stopped = safe(trainer_of(tmp_path), tmp_path / "run", stop_before=dt.datetime.now(dt.UTC))
    stopped.train()
    assert stopped.checkpoint_manager.stop_requested
    assert stopped.state.global_step == safeckpt.latest(tmp_path / "run").step == 1
    rest = safe(trainer_of(tmp_path), tmp_path / "run")
    rest.train()
    straight = safe(trainer_of(tmp_path), tmp_path / "straight")
    straight.train()
    assert stopped.seen + rest.seen == straight.seen


def test_rollbacks_are_bounded(tmp_path):
    """A loss that stays NaN ends in an error, soon."""
    trainer = safe(trainer_of(tmp_path), tmp_path / "run", save_every=4, on_nonfinite="rollback")
    trainer.poison = range(1, 100)
    with pytest.raises(safeckpt.RollbackLoopError):
        trainer.train()
    assert len(trainer.seen) < 12


def test_stop_signal_saves_and_train_goes_on_from_there(tmp_path):
    """SIGTERM is listened to without being asked for; nothing of the epoch's end is run."""
    ends = []

    class Ends(TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            ends.append(state.global_step)

    stop = At(8, lambda _control: os.kill(os.getpid(), signal.SIGTERM))
    stopped = safe(trainer_of(tmp_path, stop, Ends()), tmp_path / "run")
    stopped.train()
    assert stopped.checkpoint_manager.stop_requested
    assert stopped.state.global_step == safeckpt.latest(tmp_path / "run").step == 8
    resumed = safe(trainer_of(tmp_path, Ends()), tmp_path / "run")
    resumed.train()
    straight = safe(trainer_of(tmp_path), tmp_path / "straight")
    straight.train()
    assert stopped.seen + resumed.seen == straight.seen
    assert ends == [6, 12, 18]


def test_early_stopping_is_captured_and_its_end_is_final(tmp_path):
    """The patience that is used up comes back, and a run that a callback has ended trains no more."""

    def trainer(*callbacks):
        options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
        early = EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=1e9)
        return safe(trainer_of(tmp_path, early, *callbacks, **options), tmp_path / "run", save_every=2), early

    stop = At(4, lambda _control: os.kill(os.getpid(), signal.SIGTERM))
    stopped, before = trainer(stop)
    stopped.train()
    resumed, after = trainer()
    resumed.train()
    assert (before.early_stopping_patience_counter, after.early_stopping_patience_counter) == (1, 3)
    assert resumed.state.global_step == 8
    again, _ = trainer()
    again.train()
    assert (again.state.global_step, hasattr(again, "seen")) == (8, False)


def test_folders_of_the_trainer_are_exports(tmp_path):
    """`checkpoint-N` has weights alone."""
    trainer = trainer_of(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    safe(trainer, tmp_path / "run", save_every=3).train()
    names = {file.name for file in (tmp_path / "out" / "checkpoint-6").iterdir()}
    assert "model.safetensors" in names
    assert not names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    with pytest.raises(ValueError, match=r"goes on from the newest checkpoint.*by itself"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["auto_find_batch_size", "ignore_data_skip"])
def test_argument_that_contradicts_an_exact_resume_is_refused(tmp_path, name):
    """It is named."""
    with pytest.raises(ValueError, match=f"TrainingArguments.{name} is set"):
        safe(trainer_of(tmp_path, **{name: True}), tmp_path / "run")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_kind_that_is_not_supported_is_refused(tmp_path, monkeypatch, kind):
    """A checkpoint with parts missing is never begun, and the trainer is left as it was."""
    trainer = trainer_of(tmp_path)
    state = trainer.accelerator.state
    monkeypatch.setattr(state, "distributed_type", DistributedType[kind])
    monkeypatch.setattr(state, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False)
    with pytest.raises(TypeError, match="FSDP1" if kind == "FSDP" else kind):
        safe(trainer, tmp_path / "run")
    assert type(trainer) is Poisoned


def test_trainer_with_a_loop_of_its_own_is_refused(tmp_path):
    """As is one that was given already, and what is no trainer."""

    class Own(Trainer):
        def _inner_training_loop(self, *args, **options):
            return None

    with pytest.raises(TypeError, match="Own has its own _inner_training_loop"):
        safe(trainer_of(tmp_path, kind=Own), tmp_path / "run")
    trainer = safe(trainer_of(tmp_path), tmp_path / "run")
    with pytest.raises(TypeError, match="before"):
        safe(trainer, tmp_path / "run")
    with pytest.raises(TypeError, match=r"transformers\.Trainer"):
        safe(object(), tmp_path / "run")
    with pytest.raises(ValueError, match='"raise" or "rollback"'):
        safe(trainer_of(tmp_path), tmp_path / "run", on_nonfinite="skip")
