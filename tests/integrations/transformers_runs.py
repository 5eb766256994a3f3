"""Runs of Hugging Face's Trainer for the matrix: one small real model in every mode that a trainer has."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from safeckpt.integrations.transformers import safe
from tests.integrations import harness

KEYS = ("x", "labels", "index")


class Net(torch.nn.Module):
    """A small model with dropout, in the way that the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = harness.net()

    def forward(self, x, labels=None, index=None):
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Stream(torch.utils.data.IterableDataset):
    """The samples one after the other; without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


class Tokens(torch.utils.data.Dataset):
    """Sequences of several lengths, with noise in the labels."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)  # the trainer iterates the dataset for its lengths
        noise = int(torch.randint(0, 50, ()))
        ids = torch.arange(8) * 3 % 50
        ids[index % 8] = noise
        return {"input_ids": ids[: 5 + index % 3], "labels": ids[: 5 + index % 3], "index": torch.tensor(index)}


def pad(items):
    """Pad to the longest of the batch."""
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True),
        "labels": torch.nn.utils.rnn.pad_sequence([item["labels"] for item in items], True, -100),
        "index": torch.stack([item["index"] for item in items]),
    }


def without_index(kind):
    """Return a class of model that does not mind the numbers of the samples."""

    class Model(kind):
        def forward(self, *args, index=None, **options):
            return super().forward(*args, **options)

    return Model


def transformer():
    """Return a tiny transformer that is made, not downloaded."""
    configuration = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return without_index(GPT2LMHeadModel)(configuration)


def translator():
    """Return a tiny encoder and decoder, which samples when it is evaluated."""
    configuration = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = without_index(T5ForConditionalGeneration)(configuration)
    model.generation_config.update(do_sample=True, max_length=8)
    return model


class Calls(TrainerCallback):
    """Records the calls of a training run."""

    def __init__(self, record):
        self.record = record

    def on_log(self, args, state, control, logs=None, **_):
        kept = {name: value for name, value in logs.items() if not name.endswith(("_runtime", "_per_second"))}
        self.record("on_log", step=state.global_step, logs=kept)

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.record("validation", step=state.global_step, metrics=metrics["eval_loss"], drawn=float(torch.rand(())))


def _recorded(name):
    def call(self, args, state, control, **_):
        if name == "on_epoch_end":
            torch.rand(())  # what a callback draws at the end of an epoch
        self.record(name, step=state.global_step, epoch=state.epoch)

    return call


# Not those that are called in each process, where callbacks set themselves up: on_train_begin, on_epoch_begin.
for _name in ("on_step_begin", "on_substep_end", "on_step_end", "on_save", "on_epoch_end", "on_train_end"):
    setattr(Calls, _name, _recorded(_name))


def recorded(kind, record, *, shards=False):
    """Return a class of trainer that tells the record of its steps; it shards its model on CPU where that is asked."""

    class Recorded(kind):
        def training_step(self, model, inputs, *rest):
            batch = inputs["index"] if "index" in inputs else inputs["input_ids"].flatten()
            loss = super().training_step(model, inputs, *rest)
            record("step", step=self.state.global_step + 1, loss=loss, batch=batch)
            return loss

        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_training_steps)
                self._created_lr_scheduler = True
            return self.lr_scheduler

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if shards:  # FSDP2, which Accelerate offers on devices alone
                plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
                self.accelerator.state.fsdp_plugin = plugin
                self.accelerator.state.distributed_type = DistributedType.FSDP
                self.is_fsdp_enabled = True

    return Recorded


def arguments_of(kind, path, record, arguments):
    """Return training arguments that print nothing."""
    arguments = {
        "num_train_epochs": harness.EPOCHS,
        "per_device_train_batch_size": harness.BATCH_SIZE,
        "logging_steps": 4,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "save_steps": 2,
        "learning_rate": 1e-2,
    } | (arguments or {})
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    return kind(str(path / "out"), **quiet, **arguments)


def train(path, record, *, arguments=None, data="samples", early=False, fsdp=False, stock=False, **options):
    """Train as a user of the Trainer does."""
    kind, kind_of_arguments = Trainer, TrainingArguments
    if data == "translations":
        kind, kind_of_arguments = Seq2SeqTrainer, Seq2SeqTrainingArguments
    arguments = arguments_of(kind_of_arguments, path, record, arguments)
    count = harness.LENGTH * harness.BATCH_SIZE * arguments.world_size
    samples = harness.Samples(count, KEYS) if data in ("samples", "stream") else Tokens(count)
    torch.manual_seed(0)
    model = {"tokens": transformer, "translations": translator}.get(data, Net)()
    callbacks = [Calls(record)]
    if early:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=1e9))
    trainer = recorded(kind, record, shards=fsdp)(
        model,
        arguments,
        train_dataset=Stream(samples) if data == "stream" else samples,
        eval_dataset=samples,
        data_collator=pad if data in ("tokens", "translations") else None,
        callbacks=callbacks,
    )
    np.random.seed(0)
    if stock:
        found = any((path / "out").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=found or None)
        return
    finish(trainer, path, record, **options)


def finish(trainer, path, record, **options):
    """Train with safeckpt, and record what is left at the end: weights, and the folders of the trainer."""
    safe(trainer, path / "checkpoints", **{"save_every": 2, "on_replay_mismatch": "error"} | options).train()
    record("end", weights=digest_of(trainer.model), folders=folders_in(path / "out"))


def digest_of(model):
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(local.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def folders_in(path):
    """Return the weights in each folder of the trainer's own."""
    files = sorted(path.glob("checkpoint-*/*.safetensors"))
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
