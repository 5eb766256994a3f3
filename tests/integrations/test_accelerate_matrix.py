"""A loop with Accelerate that is killed anywhere is, resumed, the same run: every loss, batch and call."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader

from tests import children
from tests.integrations import harness

accelerate = pytest.importorskip("accelerate", reason='needs the extra: pip install "safeckpt[accelerate]"')

from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from safeckpt.integrations.accelerate import safe  # noqa: E402

children.preload(__name__)


def train(
    path,
    record,
    *,
    accumulation=1,
    workers=0,
    seedable=False,
    validates_every=None,
    fsdp=False,
    **options,
):
    """Train as a user of Accelerate does; validation comes before the save of its step."""
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    if fsdp:
        _shard(accelerator)
    ranks = accelerator.num_processes
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model, harness.STEPS * ranks)
    data = harness.Samples(harness.LENGTH * harness.BATCH_SIZE * ranks)
    loader = DataLoader(data, harness.BATCH_SIZE, shuffle=True, num_workers=workers)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    options = {"save_every": 2, "on_replay_mismatch": "error"} | options
    manager, loader = safe(accelerator, path / "checkpoints", loader, **options)

    def validate():
        record("validation", drawn=float(torch.rand(())))

    with manager:
        for _ in loader.epochs(harness.EPOCHS):
            for number, (x, y, index) in loader.enumerate():
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                record("step", step=manager.step + 1, loss=loss, batch=index, group=number, lr=schedule.get_last_lr())
                if not accelerator.sync_gradients:
                    continue
                manager.end_step(manager.step + 1, loss=loss, save=False)
                if validates_every and manager.step % validates_every == 0:
                    validate()
                if loader.batch < len(loader):
                    manager.save_due()
            validate()
            manager.save_due()


def _shard(accelerator):
    """Have an accelerator on CPU shard with FSDP2, which Accelerate offers on devices alone."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator.state.distributed_type = DistributedType.FSDP


# With a validation at the end of each epoch, all of them in an epoch that is not the first.
PLACES = harness.PLACES_OF_SHORT_VALIDATIONS


@pytest.mark.parametrize("name", harness.mostly_slow(PLACES))
@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resume_is_the_same_run(tmp_path, straights, name, async_save):
    """Killed at any place, saved at every second step."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(), async_save=async_save)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["middle of an epoch", "last batch", "first batch of the next epoch"])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 2},
        {"accumulation": 4},  # the last group of an epoch has two batches
        {"workers": 2},
        {"seedable": True},
        {"validates_every": 3, "save_every": 3},
    ],
    ids=str,
)
def test_resume_with_options_is_the_same_run(tmp_path, straights, name, options):
    """Gradient accumulation, workers, a sampler of Accelerate's own, and a validation that falls on a save."""
    harness.assert_exact(train, tmp_path, PLACES[name], straight=straights(**options), **options)


@pytest.mark.parametrize("name", harness.mostly_slow(PLACES, plain=["middle of an epoch"]))
def test_resume_of_two_ranks_is_the_same_run(tmp_path, straights, name):
    """Under DDP each rank has its own samples, and its own random numbers; all of them come back."""
    comparisons = harness.assert_exact(train, tmp_path, PLACES[name], ranks=2, straight=straights(ranks=2))
    batches = [
        {index for event in comparison.straight if event["event"] == "step" for index in event["batch"]}
        for comparison in comparisons
    ]
    first = [
        [index for event in comparison.straight[: harness.LENGTH] for index in event["batch"]]
        for comparison in comparisons
    ]
    assert sorted(first[0] + first[1]) == list(range(2 * harness.LENGTH * harness.BATCH_SIZE)), batches


@pytest.mark.slow
@pytest.mark.parametrize("name", ["middle of an epoch", "last batch", "during a save"])
def test_resume_under_fsdp2_is_the_same_run(tmp_path, straights, name):
    """With `fsdp_version=2` each rank has a part of every tensor; a checkpoint is a directory."""
    harness.assert_exact(train, tmp_path, PLACES[name], ranks=2, straight=straights(fsdp=True), fsdp=True)
    assert any(file.is_dir() for file in (tmp_path / "run" / "checkpoints").glob("step-*"))


# -- the baseline ----------------------------------------------------------------------------------------------------


def train_without(path, record, *, seedable=False, noisy=True):
    """Train with the checkpoints of Accelerate itself, at every second step."""
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model)
    data = harness.Samples() if noisy else _Plain()
    loader = DataLoader(data, harness.BATCH_SIZE, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    saved = [int(re.sub(r"\D", "", folder.name)) for folder in path.glob("state-*")]
    step = max(saved, default=0)
    if step:
        accelerator.load_state(path / f"state-{step}")
    first, done = divmod(step, harness.LENGTH)
    for epoch in range(first, harness.EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerate.skip_first_batches(loader, done) if done else loader
        done = 0
        for x, y, index in batches:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            record("step", step=step, loss=loss, batch=index)
            if step % 2 == 0:
                accelerator.save_state(path / f"state-{step}")
        record("validation", drawn=float(torch.rand(())))


class _Plain(harness.Samples):
    """The same samples without augmentation."""

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True), index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wrong"),
    [({"noisy": False}, 10), ({"noisy": False, "seedable": True}, 10), ({"noisy": True}, 10)],
    ids=str,
)
def test_checkpoints_of_accelerate_are_another_run(tmp_path, options, wrong):
    """The figures of the table in `.readme/accelerate.md`, after a kill in the middle of an epoch."""
    (comparison,) = harness.compare(train_without, tmp_path, PLACES["middle of an epoch"], **options)
    assert (comparison.wrong, comparison.compared) == (wrong, 10)
