"""Hugging Face's Trainer that is killed anywhere is, resumed, the same run: every loss, batch, log and call."""

from __future__ import annotations

import pytest

from tests import children
from tests.integrations import harness

pytest.importorskip("transformers", reason='needs the extra: pip install "safeckpt[transformers]"')

from tests.integrations.transformers_runs import train

children.preload("tests.integrations.transformers_runs")

PLACES = harness.PLACES_OF_SHORT_VALIDATIONS
BORDER = ["last batch", "first batch of the next epoch"]
MODES = {
    "accumulation": {"arguments": {"gradient_accumulation_steps": 4}},  # the last step of an epoch has two batches
    "workers": {"arguments": {"dataloader_num_workers": 2}},
    "evaluated and saved at one step": {
        "arguments": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    },
    "max_steps, with folders": {"arguments": {"max_steps": 16, "save_strategy": "steps", "save_total_limit": 2}},
    "grouped by length": {
        "data": "tokens",
        "arguments": {"train_sampling_strategy": "group_by_length", "label_names": ["labels"]},
    },
    "iterable": {"data": "stream", "arguments": {"max_steps": harness.STEPS}},
    "sequence to sequence": {
        "data": "translations",
        "arguments": {"predict_with_generate": True, "label_names": ["labels"]},
    },
    "early stopping": {
        "early": True,
        "arguments": {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "eval_loss"},
    },
    "best model at the end": {
        "arguments": {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    },
}


@pytest.mark.parametrize("name", harness.mostly_slow(PLACES))
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_is_the_same_run(tmp_path, straights, name, async_save):
    """Killed at any place, saved at every second step."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(), async_save=async_save)


@pytest.mark.slow
@pytest.mark.parametrize("name", BORDER)
@pytest.mark.parametrize("mode", MODES)
def test_resume_in_every_mode_is_the_same_run(tmp_path, straights, name, mode):
    """In every mode of a trainer, killed around the border of two epochs."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(mode=mode), **MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["middle of an epoch", "last batch"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_resume_of_two_ranks_is_the_same_run(tmp_path, straights, name, fsdp):
    """Each rank has its own samples, its own random numbers, and with `fsdp_version=2` its part of every tensor."""
    base = straights(ranks=2, fsdp=fsdp)
    comparisons = harness.assert_exact(train, tmp_path, PLACES[name], ranks=2, straight=base, fsdp=fsdp)
    first = [
        index
        for comparison in comparisons
        for event in [one for one in comparison.straight if one["event"] == "step"][: harness.LENGTH]
        for index in event["batch"]
    ]
    assert sorted(first) == list(range(2 * harness.LENGTH * harness.BATCH_SIZE))
    assert fsdp == any(file.is_dir() for file in (tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_checkpoints_of_the_trainer_are_another_run(tmp_path):
    """The figures in `.readme/transformers.md`, after a kill in the middle of an epoch."""
    place = PLACES["middle of an epoch"]
    (comparison,) = harness.compare(train, tmp_path, place, stock=True, arguments={"save_strategy": "steps"})
    print("baseline", comparison.wrong, comparison.compared)
    assert (comparison.wrong, comparison.compared) == (10, 10)
