"""The public calls as a typed program uses them; mypy in strict mode has to accept every line."""

import datetime as dt
import signal
from io import BytesIO
from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import safeckpt

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

safeckpt.save({"weight": torch.ones(2)}, "file.pt", loss=0.5)
safeckpt.save([1, 2.0], Path("file.pt"), loss=torch.tensor(0.5), allow_nonfinite=("mask",))
safeckpt.save(model.state_dict(), BytesIO(), loss={"a": np.float32(0.5)})
value = safeckpt.load("file.pt", map_location="cpu", mmap=True)
safeckpt.load(BytesIO(), torch.device("cpu"), verify=False)
assert_type(safeckpt.verify("file.pt"), safeckpt.FileReport)
assert_type(safeckpt.find_nonfinite(model, allow=["*.bias"]), list[safeckpt.NonFiniteTensor])
safeckpt.check_gradients(model)
assert_type(safeckpt.latest("runs"), safeckpt.Checkpoint | None)
assert_type(safeckpt.import_checkpoint("old.pt", "runs", mapping={"model": "net"}, step=3), safeckpt.ImportReport)
assert_type(safeckpt.latest("runs", verify=False), safeckpt.Checkpoint | None)

loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.ones(3)), batch_size=2))
for epoch in loader.epochs(2):
    assert_type(epoch, int)

with safeckpt.CheckpointManager(
    "runs",
    {"model": model, "optimizer": optimizer, "loader": loader, "counters": {"best": 0.0}},
    keep_last=2,
    keep_best=safeckpt.Best("accuracy", mode="max", count=2),
    keep_every=1000,
    save_every=dt.timedelta(minutes=10),
    async_save=True,
    guard=safeckpt.Guard(buffers=False, allow_nonfinite=("model.mask",), loss_above=safeckpt.TimesMedian(3, steps=50)),
    stop_signals=(signal.SIGTERM,),
    stop_before=dt.datetime.now(dt.UTC) + dt.timedelta(hours=8),
) as manager:
    assert_type(manager.restore(only=("model", "rng"), keep_live=["optimizer.lr"]), safeckpt.Checkpoint | None)
    assert_type(manager.restore(streams=False), safeckpt.Checkpoint | None)
    manager.restore_streams()
    assert_type(manager.save(1, loss=0.5, metrics={"accuracy": 0.9}), safeckpt.Checkpoint)
    assert_type(manager.end_step(2, loss=torch.tensor(0.5)), safeckpt.Checkpoint | None)
    assert_type(manager.end_step(3, save=False), safeckpt.Checkpoint | None)
    assert_type(manager.save_due(metrics={"accuracy": 0.9}), safeckpt.Checkpoint | None)
    assert_type(manager.is_due, bool)
    assert_type(manager.rollback(skip_batches=1), safeckpt.Checkpoint)
    assert_type(manager.checkpoints(), tuple[safeckpt.Checkpoint, ...])
    assert_type(manager.latest(), safeckpt.Checkpoint | None)
    assert_type(manager.step, int)
    assert_type(manager.stop_requested, bool)
    manager.wait()


def train(directory: Path) -> None: ...


assert_type(safeckpt.prove_resume(train, steps=4, kill_at=[2]), safeckpt.ResumeReport)

try:
    manager.save(3)
except safeckpt.NonFiniteError as error:
    assert_type(error.tensors, tuple[safeckpt.NonFiniteTensor, ...])
except safeckpt.LossSpikeError as spike:
    assert_type(spike.median, float | None)
except safeckpt.DirectoryLockedError as locked:
    assert_type(locked.pid, int | None)
