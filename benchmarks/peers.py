"""How others save and restore the same state. Every one of them is optional."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import NOTHING, Contestant, Options
from benchmarks.workloads import Training

PEERS = ("torch", "safetensors", "dcp", "lightning", "accelerate", "torch_checkpointing")
FSYNCED = "content durable, name not"
ATOMIC = "atomic, not durable"


@dataclass
class Background:
    """A save that goes on after `start` has returned.

    Attributes:
        name: Of the peer.
        start: Begins a save; returns when training may go on.
        wait: Returns when the save is done.
        promises: What is true when `wait` has returned.
        close: Done once at the end.
    """

    name: str
    start: Callable[[], object]
    wait: Callable[[], object]
    promises: str = NOTHING
    close: Callable[[], object] = lambda: None


def chosen(peers: dict[str, Callable[..., Any]], options: Options, notes: list[str], *arguments: Any) -> list[Any]:
    """Build the peers that were chosen and that are installed; note the others."""
    found = []
    for name, build in peers.items():
        if options.peers is not None and name.partition("-")[0].partition("+")[0] not in options.peers:
            continue
        try:
            found.append(build(*arguments))
        except ImportError as error:
            notes.append(f"skipped: {name} ({error.name or error} is not installed)")
    return found


def fsync(path: Path) -> None:
    """Sync a file that somebody else has written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what peers say about single processes, workers and their own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- synchronous saves -----------------------------------------------------------------------------------------------


def torch_save(training: Training, directory: Path) -> Contestant:
    """torch.save as people call it."""
    path = directory / "torch.pt"
    return Contestant("torch.save", lambda: torch.save(training.state(), path), NOTHING, after=lambda: remove(path))


def torch_save_synced(training: Training, directory: Path) -> Contestant:
    """torch.save, and the fsync that people leave out."""
    path = directory / "torch-synced.pt"

    def run() -> None:
        torch.save(training.state(), path)
        fsync(path)

    return Contestant("torch.save + fsync", run, FSYNCED, after=lambda: remove(path))


def safetensors_save(training: Training, directory: Path) -> Contestant:
    """safetensors: tensors only, under flat names."""
    from safetensors.torch import save_file

    path = directory / "flat.safetensors"

    def run() -> None:
        save_file(training.flat(), path)
        fsync(path)

    return Contestant("safetensors + fsync", run, FSYNCED, after=lambda: remove(path))


def dcp_save(training: Training, directory: Path) -> Contestant:
    """torch.distributed.checkpoint in one process; it syncs its files."""
    import torch.distributed.checkpoint as dcp

    path = directory / "dcp"

    def run() -> None:
        with quiet():
            dcp.save(training.state(), checkpoint_id=path, no_dist=True)

    return Contestant("DCP save", run, FSYNCED, after=lambda: remove(path))


def lightning_save(training: Training, directory: Path) -> Contestant:
    """What Lightning's ModelCheckpoint calls."""
    trainer = _trainer(training, directory, ())
    path = directory / "lightning.ckpt"
    return Contestant("Lightning save_checkpoint", lambda: trainer.save_checkpoint(path), ATOMIC,
                      after=lambda: remove(path))  # fmt: skip


def accelerate_save(training: Training, directory: Path) -> Contestant:
    """Accelerate's save_state."""
    from accelerate import Accelerator

    path = directory / "accelerate"
    with quiet():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(training.model, training.optimizer)
    return Contestant(
        "Accelerate save_state", lambda: accelerator.save_state(str(path)), NOTHING, after=lambda: remove(path)
    )


def torch_checkpointing_save(training: Training, directory: Path) -> Contestant:
    """torch_checkpointing's synchronous manager."""
    manager_module = importlib.import_module("torch_checkpointing.checkpoint_manager")
    path = directory / "torch-checkpointing"
    saving = importlib.import_module("torch_checkpointing.config").SyncCheckpointSaverConfig()
    manager = manager_module.CheckpointManager(
        manager_module.CheckpointManager.Config(save=saving, storage_config=_buffered())
    )
    return Contestant(
        "torch_checkpointing save",
        lambda: manager.save(str(path), training.state()),
        ATOMIC,
        after=lambda: remove(path),
        close=manager.close,
    )


def _buffered() -> Any:
    """Return torch_checkpointing's storage without direct I/O, whose unaligned writes ext4 refuses."""
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    return storage.LocalFileSystemStorageConfig(use_direct_io=False)


SYNC: dict[str, Callable[[Training, Path], Contestant]] = {
    "torch": torch_save,
    "torch+fsync": torch_save_synced,
    "safetensors": safetensors_save,
    "dcp": dcp_save,
    "lightning": lightning_save,
    "accelerate": accelerate_save,
    "torch_checkpointing": torch_checkpointing_save,
}


def _trainer(training: Training, directory: Path, plugins: Any) -> Any:
    """Return a trainer that has been connected to the model by one step."""
    import logging

    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

    with quiet():
        trainer = lightning.Trainer(
            max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=directory, plugins=list(plugins),
        )  # fmt: skip
        data = torch.utils.data.DataLoader([torch.randn(8, training.width)], batch_size=1)
        trainer.fit(Module(), data)
    training.optimizer.zero_grad()
    return trainer


# -- asynchronous saves ----------------------------------------------------------------------------------------------


def _process_group() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def dcp_async(training: Training, directory: Path) -> Background:
    """DCP's async_save as it comes: new staging memory for each save."""
    return _dcp_async("DCP async_save", training, directory, None)


def dcp_async_warm(training: Training, directory: Path) -> Background:
    """DCP's async_save with a stager that is kept, so that its memory is warm."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return _dcp_async("DCP async_save, warm DefaultStager", training, directory, DefaultStager(options))


def _dcp_async(name: str, training: Training, directory: Path, stager: Any) -> Background:
    import torch.distributed.checkpoint as dcp

    _process_group()
    path = directory / name.replace(" ", "-")
    pending: list[Any] = []

    def start() -> None:
        with quiet():
            pending.append(dcp.async_save(training.state(), checkpoint_id=path, async_stager=stager))

    def wait() -> None:
        with quiet():
            pending.pop().result()
        remove(path)

    return Background(name, start, wait, FSYNCED, close=stager.close if stager is not None else lambda: None)


def lightning_async(training: Training, directory: Path) -> Background:
    """Lightning's AsyncCheckpointIO."""
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    io = AsyncCheckpointIO()
    trainer = _trainer(training, directory, [io])
    path = directory / "lightning-async.ckpt"

    def wait() -> None:
        io._executor.submit(lambda: None).result()  # its one thread does one thing after the other
        remove(path)

    return Background("Lightning AsyncCheckpointIO", lambda: trainer.save_checkpoint(path), wait, ATOMIC, io.teardown)


def torch_checkpointing_async(training: Training, directory: Path) -> Background:
    """torch_checkpointing with a process of its own for the write; training may go on once staging is done."""
    module = importlib.import_module("torch_checkpointing.checkpoint_manager")
    config = importlib.import_module("torch_checkpointing.config")
    staging = importlib.import_module("torch_checkpointing.staging")
    saving = config.AsyncCheckpointSaverConfig(
        staging_config=staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    )
    manager = module.CheckpointManager(module.CheckpointManager.Config(save=saving, storage_config=_buffered()))
    path = directory / "torch-checkpointing-async"
    pending: list[Any] = []

    def start() -> None:
        pending.append(manager.save(str(path), training.state()))
        manager._staging_future.result()  # before this the live tensors must not change

    def wait() -> None:
        pending.pop().result()
        remove(path)

    return Background("torch_checkpointing async", start, wait, ATOMIC, manager.close)


ASYNC: dict[str, Callable[[Training, Path], Background]] = {
    "dcp": dcp_async,
    "dcp-warm": dcp_async_warm,
    "lightning": lightning_async,
    "torch_checkpointing": torch_checkpointing_async,
}
