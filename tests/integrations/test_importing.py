"""Half-finished runs that the trainers themselves have saved go on: under their integrations, and in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import safeckpt
from tests.integrations import harness
from tests.manager.helpers import steps_in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of trainers; ours are looked at


class Samples(harness.Samples):
    """Without the index that the harness looks at."""

    def __getitem__(self, index):
        x, y, _ = super().__getitem__(index)
        return x, y


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def same(one, other):
    """Whether two optimizers hold the same moments."""
    states = [[value for entry in opt.state.values() for value in entry.values()] for opt in (one, other)]
    return len(states[0]) == len(states[1]) > 0 and all(map(torch.equal, *states))


def test_run_of_lightning_goes_on_under_its_integration_and_without(tmp_path):
    """The counters of the trainer, its optimizer and its schedule come along; the plain loop takes the same file."""
    pl = pytest.importorskip("lightning.pytorch", reason='needs the extra: pip install "safeckpt[lightning]"')
    from safeckpt.integrations.lightning import SafeCheckpoint

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.steps = harness.net(), []

        def training_step(self, batch, number):
            self.steps.append(self.global_step)
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def trained(*callbacks, epochs):
        model = Model()
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=list(callbacks), logger=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, DataLoader(Samples(), harness.BATCH_SIZE, shuffle=True))
        return model, trainer

    stock = pl.callbacks.ModelCheckpoint(tmp_path / "stock", every_n_train_steps=harness.LENGTH + 2, save_top_k=-1)
    trained(stock, epochs=2)
    (source,) = (tmp_path / "stock").glob("*.ckpt")
    report = safeckpt.import_checkpoint(source, tmp_path / "run")
    assert report.checkpoint.step == harness.LENGTH + 2
    assert report.position == "batch 2 of epoch 1: loader.seek(1, 2) goes there"
    with pytest.warns(safeckpt.ImportedStateWarning, match="the source stood at batch 2 of epoch 1"):
        model, trainer = trained(SafeCheckpoint(tmp_path / "run", save_every=2), epochs=3)
    assert model.steps[0] == harness.LENGTH + 2
    assert trainer.global_step >= 2 * harness.LENGTH
    assert max(steps_in(tmp_path / "run")) == trainer.global_step

    safeckpt.import_checkpoint(source, tmp_path / "part", mapping={"model": "state_dict"})
    with pytest.raises(safeckpt.StateMismatchError, match="trainer: it counts the steps"):
        trained(SafeCheckpoint(tmp_path / "part"), epochs=3)

    safeckpt.import_checkpoint(source, tmp_path / "plain")
    model = Model()
    (optimizer,), (schedule,) = model.configure_optimizers()
    parts = {"model": model, "optimizer": optimizer, "scheduler": schedule["scheduler"]}
    with safeckpt.CheckpointManager(tmp_path / "plain", parts) as manager:
        with pytest.warns(safeckpt.ImportedStateWarning):
            manager.restore()
        saved = torch.load(source, weights_only=True)
        assert schedule["scheduler"].last_epoch == harness.LENGTH + 2
        assert all(torch.equal(value, saved["state_dict"][name]) for name, value in model.state_dict().items())
        moments = [entry["exp_avg"] for entry in saved["optimizer_states"][0]["state"].values()]
        assert all(map(torch.equal, moments, (entry["exp_avg"] for entry in optimizer.state.values())))


def test_run_of_hugging_face_goes_on_under_its_integration(tmp_path):
    """Its step, its logs and its schedule come along, and training ends where it was to end."""
    transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "safeckpt[transformers]"')
    from safeckpt.integrations.transformers import safe

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = harness.net()

        def forward(self, x, labels=None):
            output = self.net(x)
            return {"loss": nn.functional.mse_loss(output, labels), "logits": output}

    data = [{"x": x, "labels": y} for x, y in (Samples()[number] for number in range(len(Samples())))]

    def trainer_of(**options):
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "stock"), per_device_train_batch_size=harness.BATCH_SIZE, num_train_epochs=2,
            logging_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **options,
        )  # fmt: skip
        return transformers.Trainer(Net(), arguments, train_dataset=data)

    trainer_of(save_strategy="steps", save_steps=4, save_total_limit=99).train()
    report = safeckpt.import_checkpoint(tmp_path / "stock" / "checkpoint-4", tmp_path / "run")
    assert report.checkpoint.step == 4
    assert report.taken == {"model": "model", "optimizer": "optimizer", "scheduler": "scheduler"}
    trainer = safe(trainer_of(save_strategy="no"), tmp_path / "run", save_every=3)
    with pytest.warns(safeckpt.ImportedStateWarning, match=r"loader\.seek"):
        trainer.train()
    assert trainer.state.global_step == 2 * harness.LENGTH
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry][:3] == [2, 4, 6]
    assert max(steps_in(tmp_path / "run")) == 2 * harness.LENGTH


@pytest.mark.parametrize("safetensors", [False, True])
def test_run_of_accelerate_goes_on_under_its_integration(tmp_path, *, safetensors):
    """Every file that `save_state` writes is read; the position of the loader is for the caller to say."""
    accelerate = pytest.importorskip("accelerate", reason='needs the extra: pip install "safeckpt[accelerate]"')
    from safeckpt.integrations.accelerate import safe

    def prepared():
        torch.manual_seed(0)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerator, model = accelerate.Accelerator(cpu=True), harness.net()
        optimizer, schedule = harness.optimizer_and_schedule(model)
        loader = DataLoader(Samples(), harness.BATCH_SIZE, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)

    def learn(accelerator, model, optimizer, schedule, batch):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    stock = prepared()
    for _, batch in zip(range(3), stock[-1], strict=False):
        learn(*stock[:-1], batch)
    stock[0].save_state(str(tmp_path / "stock"), safe_serialization=safetensors)
    report = safeckpt.import_checkpoint(tmp_path / "stock", tmp_path / "run", step=3)
    assert report.taken == {"model": "model", "optimizer": "optimizer", "scheduler": "scheduler"}
    accelerator, model, optimizer, schedule, loader = prepared()
    with pytest.warns(safeckpt.ImportedStateWarning, match=r"seek\(epoch, batch\)"):
        manager, loader = safe(accelerator, tmp_path / "run", loader, save_every=2)
    with manager:
        assert same(optimizer.optimizer, stock[2].optimizer)
        assert all(map(torch.equal, model.state_dict().values(), stock[1].state_dict().values()))
        for _ in loader.epochs(1):
            for batch in loader:
                manager.end_step(manager.step + 1, loss=learn(accelerator, model, optimizer, schedule, batch))
        assert manager.step == 3 + harness.LENGTH
    assert max(steps_in(tmp_path / "run")) == 3 + harness.LENGTH
