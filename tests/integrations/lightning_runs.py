"""Runs of Lightning for the matrix: one small real model in every mode that a trainer has."""

from __future__ import annotations

import logging
import types

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanSquaredError

import safeckpt
from safeckpt.integrations.lightning import SafeCheckpoint
from tests.integrations import harness
from tests.integrations.harness import BATCH_SIZE, EPOCHS, LENGTH

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Hooks of a callback whose order and number are compared, from the first epoch on.
HOOKS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class Model(pl.LightningModule):
    """A small model that tells the record of its steps, logs, and has a metric.

    Args:
        record: Is told.
        steps: Of the optimizer, for the schedule.
        bad: Number of the sample whose batch has a loss that is NaN, or `"all"`.
        plateau: Also lower the rate when the validation stands still: `"epoch"` or `"step"`.
    """

    def __init__(self, record, steps, *, bad=None, plateau=None):
        super().__init__()
        self.net = harness.net()
        self.metric = MeanSquaredError()
        self.record, self.steps, self.bad, self.plateau = record, steps, bad, plateau

    def loss(self, batch, number):
        x, y, index = batch
        output = self.net(x)
        loss = torch.nn.functional.mse_loss(output, y)
        if self.bad == "all" or (self.bad is not None and self.bad in index.tolist()):
            loss = loss * float("nan")
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.record("step", step=ready, loss=loss, batch=index, number=number)
        self.metric(output, y)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        if not self.trainer.sanity_checking:
            self.record("validation", loss=loss)
        self.log("val", loss + torch.rand(()), sync_dist=True)  # draws, as a validation with sampling does

    def configure_optimizers(self):
        optimizer, schedule = harness.optimizer_and_schedule(self, self.steps)
        if self.plateau is None:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        monitored = "val" if self.plateau == "epoch" else "train"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "interval": self.plateau, "monitor": monitored},
        }


class Manual(Model):
    """Two optimizers by hand, one of which steps at every second batch only, and gradients that wait for it."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        loss = self.loss(batch, batch_idx)
        self.manual_backward(loss)
        one.step()
        one.zero_grad()
        if batch_idx % 2:
            other.step()
            other.zero_grad()
            self.lr_schedulers().step()
        return {"main_loss": loss}

    def configure_optimizers(self):
        one = torch.optim.AdamW(self.net[0].parameters(), lr=1e-2)
        other, schedule = harness.optimizer_and_schedule(self.net[3])
        return [one, other], [schedule]


class Carrying(Model):
    """Keeps something in a hook, as modules do with what is in no `state_dict`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = types.SimpleNamespace(batches=0)

    def training_step(self, batch, batch_idx):
        self.seen.batches += 1
        return super().training_step(batch, batch_idx) * (1 + self.seen.batches / 100)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen.batches

    def on_load_checkpoint(self, checkpoint):
        self.seen.batches = checkpoint["seen"]


class Several(Model):
    """Reads two loaders in each step."""

    def training_step(self, batch, batch_idx):
        (x, y, one), (x2, y2, other) = batch["a"], batch["b"]
        return self.loss((torch.cat([x, x2]), torch.cat([y, y2]), torch.cat([one, other])), batch_idx)


class Sharded(Model):
    """Shards its layers (FSDP2), as `ModelParallelStrategy` has it."""

    def configure_model(self):
        for layer in self.net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Stream(IterableDataset):
    """The samples one after the other; without a length."""

    def __init__(self):
        self.samples = harness.Samples()

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


class Data(pl.LightningDataModule):
    """A data module with a state, which decides what the batches are scaled by."""

    def __init__(self):
        super().__init__()
        self.transferred = 0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y, index = batch
        if self.trainer.training:
            self.transferred += 1
            x = x * (1 + self.transferred / 100) + 0.01 * torch.randn_like(x)
        return x, y, index

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(shuffle=False)

    def state_dict(self):
        return {"transferred": self.transferred}

    def load_state_dict(self, state_dict):
        self.transferred = state_dict["transferred"]


class Spy(pl.Callback):
    """Tells the record of every hook, and of what was logged until then."""

    def __init__(self, record):
        for name in HOOKS:
            setattr(self, name, self._telling(record, name))

    @staticmethod
    def _telling(record, name):
        def tell(trainer, *_):
            if not trainer.sanity_checking:
                values = {key: float(value).hex() for key, value in trainer.callback_metrics.items()}
                record(name, epoch=trainer.current_epoch, step=trainer.global_step, metrics=values)

        return tell


def loader(shuffle=True, samples=LENGTH * BATCH_SIZE, **options):
    return DataLoader(harness.Samples(samples), BATCH_SIZE if shuffle else 2 * BATCH_SIZE, shuffle=shuffle, **options)


DATA = {
    "plain": loader,
    "wrapped": lambda: safeckpt.ResumableLoader(loader()),
    "workers": lambda: loader(num_workers=2),
    "stream": lambda: DataLoader(Stream(), BATCH_SIZE),
    "cycle": lambda: CombinedLoader({"a": loader(), "b": loader(samples=4 * BATCH_SIZE)}, "max_size_cycle"),
    "shortest": lambda: CombinedLoader({"a": loader(), "b": loader(samples=8 * BATCH_SIZE)}, "min_size"),
}
CALLBACKS = {
    "early": lambda _: EarlyStopping("val", patience=2, min_delta=10.0),
    "average": lambda _: EMAWeightAveraging(decay=0.9),
    "model": lambda path: ModelCheckpoint(path / "models", monitor="val", save_top_k=2, save_last=True),
}


def quiet(callbacks, **options):
    """Return a trainer that prints nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", callbacks=callbacks, **{**quiet, "max_epochs": EPOCHS, "devices": 1, **options}
    )


def train(path, record, *, kind=Model, model=None, data="plain", callbacks=(), save_every=2, safe=None, **options):
    """Train one case."""
    safe = SafeCheckpoint(path / "checkpoints", save_every=save_every, on_replay_mismatch="error", **(safe or {}))
    steps = EPOCHS * -(-LENGTH // options.get("accumulate_grad_batches", 1))
    module = kind(record, steps, **(model or {}))
    options.setdefault("enable_checkpointing", "model" in callbacks)
    if kind is Sharded:
        options["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = quiet([safe, *(CALLBACKS[name](path) for name in callbacks), Spy(record)], **options)
    if data == "module":
        trainer.fit(module, datamodule=Data())
    else:
        trainer.fit(module, DATA[data](), loader(shuffle=False))
    local = [one.to_local() if hasattr(one, "to_local") else one for one in module.parameters()]
    record("end", weights=[float(value).hex() for one in local for value in one.flatten()])


def train_stock(path, record):
    """Train with Lightning's own checkpoints, as its documentation says: `save_last`, and `ckpt_path="last"`."""
    own = ModelCheckpoint(path / "own", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = quiet([own, Spy(record)])
    trainer.fit(Model(record, EPOCHS * LENGTH), loader(), loader(shuffle=False), ckpt_path="last", weights_only=False)
