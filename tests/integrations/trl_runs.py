"""Runs of the trainers of TRL for the matrix: a tiny transformer, a few words, with and without adapters."""

from __future__ import annotations

import copy

import numpy as np
import peft
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.integrations import harness
from tests.integrations.transformers_runs import Calls, arguments_of, finish, recorded, transformer


def vocabulary():
    """Return a tokenizer of a few words that is made, not downloaded."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words_of(index, count):
    return " ".join(f"w{(index * 7 + number * 3) % 40}" for number in range(count))


def train(path, record, *, kind="sft", arguments=None, lora=False, **options):
    """Train as a user of TRL does."""
    kinds = {
        "sft": (SFTTrainer, SFTConfig, {"max_length": 16}),
        "dpo": (DPOTrainer, DPOConfig, {"max_length": 16, "disable_dropout": False}),
    }
    trainer_kind, kind_of_arguments, own = kinds[kind]
    arguments = arguments_of(kind_of_arguments, path, record, own | {"bf16": False} | (arguments or {}))
    arguments.remove_unused_columns = True
    count = harness.LENGTH * harness.BATCH_SIZE
    if kind == "sft":
        rows = [{"text": words_of(index, 5 + index % 4)} for index in range(count)]
    else:
        rows = [
            {"prompt": words_of(index, 3), "chosen": words_of(index + 1, 4), "rejected": words_of(index + 2, 5)}
            for index in range(count)
        ]
    data = Dataset.from_list(rows)
    torch.manual_seed(0)
    model = transformer()
    more = {"ref_model": copy.deepcopy(model)} if kind == "dpo" and not lora else {}
    if lora:
        more["peft_config"] = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"])
    trainer = recorded(trainer_kind, record)(
        model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        processing_class=vocabulary(),
        callbacks=[Calls(record)],
        **more,
    )
    np.random.seed(0)
    finish(trainer, path, record, **options)
