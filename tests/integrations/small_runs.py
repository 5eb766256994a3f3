"""The same small run in every trainer: three epochs of four steps, with dropout, shuffle and augmentation.

Each is called as `run(directory, losses=None, **options)` with options of `CheckpointManager`, and returns the losses
of the steps that it has trained.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.integrations import harness
from tests.integrations.harness import BATCH_SIZE

LENGTH, EPOCHS = 4, 3
STEPS = LENGTH * EPOCHS
PACKAGES = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "ignite": "ignite"}


class Failure(Exception):  # noqa: N818 - it is none of the trainer
    """What ends a run in the middle."""


class Losses(dict):
    """The losses by step.

    Args:
        fails_at: The step before whose end `Failure` is raised.
        jumps_at: The step whose loss is a million times as large, the first time.
        scale: What each loss is multiplied by.
    """

    def __init__(self, *, fails_at=None, jumps_at=None, scale=1.0):
        super().__init__()
        self.fails_at, self.jumps_at, self.scale = fails_at, jumps_at, scale

    def of(self, step, output, target):
        """Return the loss of a step, and note it."""
        if step == self.fails_at:
            raise Failure
        loss = self.scale * torch.nn.functional.mse_loss(output, target)
        if step == self.jumps_at:
            self.jumps_at, loss = None, 1e6 * loss
        self[step] = loss.item()
        return loss


def seed():
    torch.manual_seed(0)
    np.random.seed(0)


def loader(keys=None):
    return DataLoader(harness.Samples(LENGTH * BATCH_SIZE, keys), BATCH_SIZE, shuffle=True)


def run_lightning(directory, losses=None, **options):
    """Train with Lightning."""
    import lightning.pytorch as pl

    from safeckpt.integrations.lightning import SafeCheckpoint

    losses = Losses() if losses is None else losses

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = harness.net()

        def training_step(self, batch, batch_idx):
            x, y, _ = batch
            return losses.of(self.trainer.global_step + 1, self.net(x), y)

        def validation_step(self, batch, batch_idx):
            self.log("error", self.net(batch[0]).square().mean())

        def configure_optimizers(self):
            optimizer, schedule = harness.optimizer_and_schedule(self, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    seed()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, enable_checkpointing=False, **quiet,
        callbacks=[SafeCheckpoint(directory, **options)],
    )  # fmt: skip
    trainer.fit(Model(), loader(), DataLoader(harness.Samples(BATCH_SIZE), BATCH_SIZE))
    return losses


def run_transformers(directory, losses=None, **options):
    """Train with Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from safeckpt.integrations.transformers import safe

    losses = Losses() if losses is None else losses

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = harness.net()

        def forward(self, x, labels=None, index=None):
            output = self.net(x)
            if not self.training:
                return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}
            return {"loss": losses.of(trainer.state.global_step + 1, output, labels), "logits": output}

    seed()
    arguments = TrainingArguments(
        str(directory) + "-out", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH_SIZE, save_strategy="no",
        eval_strategy="epoch", use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    keys = ("x", "labels", "index")
    data = harness.Samples(LENGTH * BATCH_SIZE, keys)
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=harness.Samples(BATCH_SIZE, keys))
    safe(trainer, directory, **options).train()
    return losses


def run_accelerate(directory, losses=None, **options):
    """Train with Accelerate."""
    from accelerate import Accelerator, state

    from safeckpt.integrations.accelerate import safe

    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
    losses = Losses() if losses is None else losses
    seed()
    accelerator = Accelerator(cpu=True)
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model, STEPS)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, loader())
    manager, batches = safe(accelerator, directory, batches, **options)
    with manager:
        for _ in batches.epochs(EPOCHS):
            for x, y, _ in batches:
                step = manager.step + 1
                loss = losses.of(step, model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                manager.end_step(step, loss=loss, save=False)
                metrics = {}
                if step % LENGTH == 0:
                    with torch.no_grad():
                        metrics["error"] = model(x).square().mean().item()
                manager.save_due(metrics=metrics)
    return losses


def run_ignite(directory, losses=None, **options):
    """Train with Ignite."""
    from ignite.engine import Engine, Events
    from ignite.metrics import Average

    from safeckpt.integrations.ignite import attach

    losses = Losses() if losses is None else losses
    seed()
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model, STEPS)

    def update(engine, batch):
        x, y, _ = batch
        loss = losses.of(engine.state.iteration, model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    trainer = Engine(update)
    evaluator = Engine(lambda _engine, batch: model(batch[0]).square().mean().item())
    Average().attach(evaluator, "error")
    validation = DataLoader(harness.Samples(BATCH_SIZE), BATCH_SIZE)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(validation))
    components = {"model": model, "optimizer": optimizer, "schedule": schedule}
    attach(trainer, directory, components, evaluator=evaluator, **options)
    trainer.run(loader(), max_epochs=EPOCHS)
    return losses


RUNS = {
    "lightning": run_lightning,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "ignite": run_ignite,
}
METRIC = {"lightning": "error", "transformers": "eval_loss", "accelerate": "error", "ignite": "error"}


def build_accelerate():
    """Return what an accelerator has prepared, as components."""
    from accelerate import Accelerator

    import safeckpt.integrations.accelerate  # noqa: F401 - registers the wrappers

    seed()
    accelerator = Accelerator(cpu=True)
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model, STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def step_accelerate(components):
    """Do one step with them."""
    loss = components["model"](torch.randn(4, 8)).square().mean()
    components["optimizer"].zero_grad()
    loss.backward()
    components["optimizer"].step()
    components["schedule"].step()
    return loss
