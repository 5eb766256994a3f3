"""What the integration relies on in Lightning beyond its documentation, and what it refuses by name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result

from safeckpt.integrations.requirements import check_hooks

__all__ = ["refuse_loaders", "refuse_restored", "refuse_unsupported"]

_HOOKS = {
    "fit_loop.on_advance_start": "the start of an epoch",
    "fit_loop.advance": "the batches of an epoch",
    "fit_loop.on_advance_end": "the end of an epoch",
    "fit_loop.on_run_end": "the end of training",
    "fit_loop.on_iteration_done": "forgetting that the loops were entered in the middle",
    "fit_loop.reset": "entering the loops in the middle of an epoch",
    "fit_loop.setup_data": "making the loader before the restore",
    "fit_loop.state_dict": "the counters of the loops",
    "fit_loop.load_state_dict": "the counters of the loops",
    "fit_loop._combined_loader": "the loaders of the training data",
    "fit_loop._data_fetcher": "the iterator over them",
    "fit_loop._restarting": "entering the loops in the middle of an epoch",
    "fit_loop._resuming_from_checkpoint": "entering the loops without a second iterator",
    "fit_loop.epoch_loop.advance": "a batch",
    "fit_loop.epoch_loop.on_advance_end": "the end of a batch, behind its validation",
    "fit_loop.epoch_loop.on_run_start": "the first batch behind a restore",
    "fit_loop.epoch_loop.done": "whether a batch was the last one",
    "fit_loop.epoch_loop.restarting": "entering the loops in the middle of an epoch",
    "fit_loop.epoch_loop.batch_progress": "counting a batch that is left out",
    "fit_loop.epoch_loop.update_lr_schedulers": "schedules of an epoch whose last batch is left out",
    "fit_loop.epoch_loop._num_ready_batches_reached": "schedules of an epoch whose last batch is left out",
    "fit_loop.epoch_loop._results": "values that are logged for a whole epoch",
    "fit_loop.epoch_loop.val_loop.restarting": "no sanity check behind a restore",
    "strategy.process_dataloader": "the loaders, behind the samplers that Lightning puts in",
    "strategy.reduce": "values that are logged for a whole epoch",
    "_signal_connector._original_handlers": "stop signals, which Lightning would end the run by",
    "_logger_connector._first_loop_iter": "values that are logged for a whole epoch",
    "_logger_connector._current_fx": "values that are logged for a whole epoch",
    "_logger_connector._callback_metrics": "the metrics of callbacks and schedules",
    "_logger_connector._logged_metrics": "the metrics of loggers",
    "_logger_connector._progress_bar_metrics": "the metrics of the progress bar",
}
_RESULT_HOOKS = dict.fromkeys(
    ("_Metadata", "_Sync", "_ResultMetric", "Metric"), "values that are logged for a whole epoch"
)
_METRIC_HOOKS = dict.fromkeys(("_update_count", "_forward_cache", "metric_state"), "the state of metrics")
_MODULE_HOOKS = {"_current_fx_name": "leaving a hook by a rollback"}
_FOREIGN = ("DeepSpeed", "FSDPStrategy", "XLA")


def refuse_unsupported(trainer: Any) -> None:
    """Refuse what would not resume exactly, before anything is set up.

    Raises:
        TypeError: It is no `lightning.pytorch.Trainer`, or its strategy is none of those that are supported.
        ValueError: An option of the trainer is not supported.
        RuntimeError: This Lightning has lost something that is relied on.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"SafeCheckpoint is for lightning.pytorch.Trainer; this one is of {type(trainer).__module__}. Next: import "
            "lightning.pytorch in place of pytorch_lightning"
        )
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    foreign = next((kind for kind in kinds for name in _FOREIGN if name in kind), None)
    supported = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
    if foreign is not None or not supported:
        cure = "ModelParallelStrategy with fully_shard (FSDP2)" if foreign == "FSDPStrategy" else "strategy='ddp'"
        raise TypeError(
            f"SafeCheckpoint does not support {kinds[0]}: it keeps model and moments in pieces of its own, which no "
            f"name tells apart. Supported are one device, DDPStrategy and ModelParallelStrategy. Next: use {cure}"
        )
    check_hooks(trainer, _HOOKS)
    check_hooks(result, _RESULT_HOOKS)
    check_hooks(result._ResultMetric(result._Metadata(fx="", name=""), is_tensor=True), _METRIC_HOOKS)
    check_hooks(trainer.lightning_module, _MODULE_HOOKS)
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "SafeCheckpoint does not support reload_dataloaders_every_n_epochs: a loader that is made anew has no "
            "position that could be restored. Next: leave it at 0, and let the dataset or the sampler depend on the "
            "epoch (set_epoch)"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise TypeError(
                f"SafeCheckpoint does not support {type(callback).__name__} in the same trainer: it trains before the "
                "run begins, at each start anew. Next: find the value once, in a run of its own, and write it down"
            )


def refuse_restored(trainer: Any) -> None:
    """Refuse a checkpoint of Lightning's own beside the directory.

    Raises:
        ValueError: `ckpt_path` was given, or Lightning has chosen one by itself.
    """
    if trainer.ckpt_path:
        raise ValueError(
            f"the run was started from {trainer.ckpt_path} (ckpt_path=, a requeued SLURM job, or "
            "OnExceptionCheckpoint), and SafeCheckpoint resumes from its directory: two states would be mixed. Nothing "
            "was trained. Next: call fit without ckpt_path; under SLURM give SafeCheckpoint "
            "stop_signals=(signal.SIGTERM, signal.SIGUSR1) and Lightning SLURMEnvironment(auto_requeue=False)"
        )


def refuse_loaders(trainer: Any, loaders: list[Any], *, rolls_back: bool) -> None:
    """Refuse training data whose position would not be exact.

    Raises:
        ValueError: Naming what is not supported.
    """
    fetcher = trainer.fit_loop._data_fetcher
    check_hooks(fetcher, dict.fromkeys(("length", "fetched", "done"), "counting a batch that is left out"))
    if type(fetcher).__name__ != "_PrefetchDataFetcher":
        raise ValueError(
            "SafeCheckpoint does not support training_step(dataloader_iter): which batches belong to a step is not "
            "known. Next: write training_step(batch, batch_idx)"
        )
    if len(loaders) < 2:
        return
    combined = trainer.fit_loop._combined_loader
    check_hooks(combined, {"_mode": "how several loaders are read together"})
    if combined._mode not in {"max_size_cycle", "min_size"}:
        raise ValueError(
            f'SafeCheckpoint does not support CombinedLoader(mode="{combined._mode}") for training: which loader is at '
            'its end is not restored. Next: use "max_size_cycle" or "min_size"'
        )
    if fetcher.length is None:
        raise ValueError(
            "SafeCheckpoint does not support several training loaders of which one has no length: where the others "
            "are is not exact then. Next: give the iterable dataset a __len__"
        )
    if rolls_back:
        raise ValueError(
            'SafeCheckpoint(on_nonfinite="rollback") does not support several training loaders: which of their batches '
            'was bad is not known. Next: on_nonfinite="raise"'
        )
