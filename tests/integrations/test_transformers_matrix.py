"""Hugging Face's Trainer that is killed anywhere is, resumed, the same run: every loss, batch, log and call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import children
from tests.integrations import harness

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "safeckpt[transformers]"')

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from safeckpt.integrations.transformers import safe  # noqa: E402

children.preload(__name__)

KEYS = ("x", "labels", "index")
# What is called in each process: callbacks set themselves up there.
OF_EACH_PROCESS = ("on_train_begin", "on_epoch_begin")


class Net(torch.nn.Module):
    """A small model with dropout, in the way that the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.net = harness.net()

    def forward(self, x, labels=None, index=None):
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


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


def transformer():
    """Return a tiny transformer that is made, not downloaded."""
    configuration = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )

    class Model(transformers.GPT2LMHeadModel):
        def forward(self, *args, index=None, **options):
            return super().forward(*args, **options)

    return Model(configuration)


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


for _name in ("on_step_begin", "on_substep_end", "on_step_end", "on_epoch_end", "on_train_end"):
    setattr(Calls, _name, _recorded(_name))


def train(path, record, *, arguments=None, tokens=False, stock=False, **options):
    """Train as a user of the Trainer does."""
    arguments = {
        "num_train_epochs": harness.EPOCHS,
        "per_device_train_batch_size": harness.BATCH_SIZE,
        "logging_steps": 4,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "save_steps": 2,
        "learning_rate": 1e-2,
    } | (arguments or {})
    arguments = TrainingArguments(
        str(path / "out"), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False, **arguments
    )

    class Recorded(Trainer):
        def training_step(self, model, inputs, *rest):
            loss = super().training_step(model, inputs, *rest)
            record("step", step=self.state.global_step + 1, loss=loss, batch=inputs["index"])
            return loss

        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_training_steps)
                self._created_lr_scheduler = True
            return self.lr_scheduler

    count = harness.LENGTH * harness.BATCH_SIZE * arguments.world_size
    data = Tokens(count) if tokens else harness.Samples(count, KEYS)
    torch.manual_seed(0)
    trainer = Recorded(
        transformer() if tokens else Net(),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=pad if tokens else None,
        callbacks=[Calls(record)],
    )
    np.random.seed(0)
    if stock:
        found = any((path / "out").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=found or None)
        return
    options = {"save_every": 2, "on_replay_mismatch": "error"} | options
    safe(trainer, path / "checkpoints", **options).train()


PLACES = harness.PLACES_OF_SHORT_VALIDATIONS


@pytest.mark.parametrize("name", harness.mostly_slow(PLACES))
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_is_the_same_run(tmp_path, straights, name, async_save):
    """Killed at any place, saved at every second step."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(), async_save=async_save)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last batch", "first batch of the next epoch"])
@pytest.mark.parametrize(
    "options",
    [
        {"arguments": {"gradient_accumulation_steps": 4}},  # the last step of an epoch has two batches
        {"arguments": {"dataloader_num_workers": 2}},
        {"arguments": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}},
        {"arguments": {"max_steps": 16, "save_strategy": "steps"}},
        {"tokens": True, "arguments": {"train_sampling_strategy": "group_by_length", "label_names": ["labels"]}},
    ],
    ids=str,
)
def test_resume_with_options_is_the_same_run(tmp_path, straights, name, options):
    """Accumulation, workers, evaluation at steps that are saved, `max_steps`, and a transformer grouped by length."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(**options), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["middle of an epoch", "last batch"])
def test_resume_of_two_ranks_is_the_same_run(tmp_path, straights, name):
    """Under DDP each rank has its own samples, and its own random numbers."""
    comparisons = harness.assert_exact(train, tmp_path, PLACES[name], ranks=2, straight=straights(ranks=2))
    first = [
        index
        for comparison in comparisons
        for event in [one for one in comparison.straight if one["event"] == "step"][: harness.LENGTH]
        for index in event["batch"]
    ]
    assert sorted(first) == list(range(2 * harness.LENGTH * harness.BATCH_SIZE))


@pytest.mark.slow
def test_checkpoints_of_the_trainer_are_another_run(tmp_path):
    """The figures in `.readme/transformers.md`, after a kill in the middle of an epoch."""
    place = PLACES["middle of an epoch"]
    (comparison,) = harness.compare(train, tmp_path, place, stock=True, arguments={"save_strategy": "steps"})
    print("baseline", comparison.wrong, comparison.compared)
    assert (comparison.wrong, comparison.compared) == (10, 10)
