"""SafeCheckpoint: the callback with which a Lightning run saves, resumes, guards and rolls back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import inspect
import logging
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

import safeckpt
from safeckpt.integrations.arguments import REFUSALS, OnNonfinite, Refusal, check_on_nonfinite
from safeckpt.integrations.lightning.safe_points import RolledBack, SafePoints
from safeckpt.integrations.lightning.support import refuse_loaders, refuse_restored, refuse_unsupported
from safeckpt.integrations.lightning.trainer_state import HookState, TrainerState

__all__ = ["SafeCheckpoint"]

_log = logging.getLogger("safeckpt")
_NAMES = ("model", "optimizer", "scheduler", "loader", "scaler", "trainer", "hooks")  # of components


class SafeCheckpoint(Callback):
    """Saves a Lightning run with safeckpt, and resumes it at the start of `fit`, exactly, also within an epoch.

    Model, optimizers, schedulers, scaler, training loaders, counters of the loops, callbacks, data module, metrics,
    logged values and random streams are saved. Training loaders become `ResumableLoader`s, behind the samplers that
    Lightning puts in. A save falls behind everything that belongs to its step: validation, schedules, the hooks of an
    epoch's end. The loss that `training_step` returns is guarded in every step, before that.

    `fit` is called without `ckpt_path`. A stop signal saves and ends `fit` with Lightning's `SIGTERMException`.
    `ModelCheckpoint` works beside it. With `fast_dev_run` nothing is saved.

    Args:
        directory: As for `CheckpointManager`.
        save_every: When to save: a number of optimizer steps, or a `timedelta`. None: at the end of each epoch.
        components: Further objects by name that are part of the run, as for `CheckpointManager`.
        on_nonfinite: What to do when a loss or a weight is NaN or Inf, or a loss above what `guard` allows: `"raise"`
            the error out of `fit`, or `"rollback"`: go back to the newest checkpoint, leave out the batches of that
            step, and go on.
        max_rollbacks: How many are allowed without a new checkpoint in between; then `RollbackLoopError` ends `fit`.
        stop_signals: Signals that ask the run to save and to stop.
        options: Further arguments of `CheckpointManager`, such as `async_save`, `keep_last`, `keep_best`, `guard`,
            `on_replay_mismatch`. With `keep_best` the metrics are those that callbacks see, and a checkpoint is saved
            whenever one of them was logged anew behind a validation or an epoch.

    Attributes:
        manager: The `CheckpointManager` of the last `fit`; None before.

    Raises:
        TypeError: An option is none of `CheckpointManager`.
        ValueError: An argument is out of range.

    Example:
        >>> callback = SafeCheckpoint("runs/x", save_every=100, keep_best=safeckpt.Best("val_loss"))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int | dt.timedelta | None = None,
        components: Mapping[str, Any] | None = None,
        on_nonfinite: OnNonfinite = "raise",
        max_rollbacks: int = 3,
        stop_signals: Iterable[int] = (signal.SIGTERM,),
        **options: Any,
    ) -> None:
        known = set(inspect.signature(safeckpt.CheckpointManager).parameters) - {"directory", "components"}
        if unknown := sorted(set(options) - known):
            raise TypeError(
                f"{', '.join(unknown)}: no option of CheckpointManager; those are {', '.join(sorted(known))}"
            )
        check_on_nonfinite(on_nonfinite)
        if taken := sorted(name for name in components or () if name.rstrip("0123456789") in _NAMES):
            raise ValueError(f"components: {', '.join(taken)} is a name of what SafeCheckpoint registers itself")
        guard = options.pop("guard", safeckpt.Guard())
        allowed = (*guard.allow_nonfinite, "trainer.*")  # best values so far, logged values: no part of the weights
        self.directory = directory
        self.manager: safeckpt.CheckpointManager | None = None
        self._save_every = save_every
        self._components = dict(components or {})
        self._rolls_back = on_nonfinite == "rollback"
        self._max_rollbacks = max_rollbacks
        self._stop_signals = tuple(stop_signals)
        self._options = {**options, "guard": dataclasses.replace(guard, allow_nonfinite=allowed)}
        self._fit: _Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what is not supported, and have the training loaders wrapped."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        refuse_unsupported(trainer)
        strategy = trainer.strategy
        strategy.process_dataloader = functools.partial(_wrapped, trainer, strategy.process_dataloader)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the manager, and restore the newest checkpoint."""
        if trainer.fast_dev_run:
            return
        refuse_restored(trainer)
        trainer.fit_loop.setup_data()
        loaders = trainer.fit_loop._combined_loader.flattened
        refuse_loaders(trainer, loaders, rolls_back=self._rolls_back)
        points = SafePoints(trainer, self)
        components = {**self._own_components(trainer, loaders, points), **self._components}
        self.manager = safeckpt.CheckpointManager(
            self.directory, components, save_every=self._save_every, stop_signals=self._stop_signals, **self._options
        )
        self._fit = _Fit(trainer, self.manager, points, {one: signal.getsignal(one) for one in self._stop_signals})
        points.install(loaders)
        self._fit.is_resumed = self.manager.restore(streams=False) is not None
        if self._fit.is_resumed:
            points.iterate_again()
            self._fit.keep_gradients()

    def _own_components(self, trainer: Any, loaders: list[Any], points: SafePoints) -> dict[str, Any]:
        """Return what the trainer consists of, by name."""
        components: dict[str, Any] = {"model": trainer.lightning_module}
        components |= _numbered("optimizer", trainer.optimizers)
        components |= _numbered("scheduler", [one.scheduler for one in trainer.lr_scheduler_configs])
        components |= _numbered("loader", loaders)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            components["scaler"] = scaler
        components["trainer"] = TrainerState(trainer, points, self)
        if hooks := HookState(trainer, self):
            components["hooks"] = hooks
        return components

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Listen to stop signals again: Lightning has put a handler on top that ends the run at once."""
        refuse_restored(trainer)
        if self._fit is not None:
            self._fit.listen()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Guard, record and compare the loss of a step; whether it is saved turns out at the next safe point."""
        fit = self._fit
        if fit is None:
            return
        fit.losses.append(_loss_of(outputs))
        step = trainer.global_step
        if step <= fit.manager.step:
            return  # a micro-step of an accumulation
        losses = [loss for loss in fit.losses if loss is not None]
        try:
            fit.manager.end_step(step, loss=losses[0] if len(losses) == 1 else losses or None, save=False)
        except REFUSALS as error:
            self._recover(fit, error)
        fit.end_step()

    # -- safe points -------------------------------------------------------------------------------------------------

    def on_start(self) -> None:
        """Set the random streams where the run goes on; a run that may roll back saves where it begins."""
        fit = self._running
        if fit.is_resumed:
            fit.put_gradients_back()
            fit.manager.restore_streams()
        elif self._rolls_back:
            fit.manager.save(0)

    def on_step_over(self) -> None:
        """Save what is due behind a batch."""
        if self._running.has_ended_step:
            self._save(self._running)

    def on_epoch_over(self) -> None:
        """Save what is due behind an epoch."""
        self._save(self._running, is_due=self._save_every is None)

    def on_run_over(self) -> None:
        """Save the last step, unless it is saved, and close the manager."""
        self._running.manager.__exit__(None, None, None)

    @property
    def _running(self) -> _Fit:
        assert self._fit is not None
        return self._fit

    def _save(self, fit: _Fit, *, is_due: bool = False) -> None:
        manager = fit.manager
        is_to_stop = manager.stop_requested
        try:
            metrics = fit.new_metrics()
            if manager.step > fit.saved_step and (is_due or self._has_best(metrics)):
                checkpoint: safeckpt.Checkpoint | None = manager.save(manager.step, metrics=metrics)
            else:
                checkpoint = manager.save_due(metrics=metrics)
        except REFUSALS as error:
            self._recover(fit, error)
        fit.has_ended_step = False
        if checkpoint is not None:
            fit.saved_step = checkpoint.step
        if is_to_stop:
            _log.info("stopped by a signal behind step %d", manager.step)
            raise SIGTERMException

    def _has_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a metric is new by which checkpoints are kept."""
        best = self._options.get("keep_best") or ()
        return any(one.metric in metrics for one in ((best,) if isinstance(best, safeckpt.Best) else best))

    def _recover(self, fit: _Fit, error: Refusal) -> NoReturn:
        """Go back to the newest checkpoint without the batches of this step, or raise the error."""
        if not self._rolls_back:
            raise error
        checkpoint = fit.manager.rollback(
            skip_batches=len(fit.losses) or fit.batches_of_step, max_rollbacks=self._max_rollbacks
        )
        _log.warning("step %d is refused (%s): back at step %d", error.step, error, checkpoint.step)
        fit.on_rolled_back()
        raise RolledBack from error

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish what is being written, and give the directory back."""
        if self._fit is not None:
            fit, self._fit = self._fit, None
            fit.close()
            fit.manager.__exit__(type(exception), exception, exception.__traceback__)
        _unwrap(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the manager."""
        if self._fit is not None:
            fit, self._fit = self._fit, None
            fit.close()
            fit.manager.close()
        _unwrap(trainer)


class _Fit:
    """What one call of `fit` needs between its hooks.

    Attributes:
        manager: Its manager.
        losses: Of the batches since the last step.
        batches_of_step: How many the last step had.
        has_ended_step: Whether a step has ended since the last safe point.
        saved_step: The last step that was saved.
        is_resumed: Whether a checkpoint was restored.
    """

    def __init__(
        self, trainer: Any, manager: safeckpt.CheckpointManager, points: SafePoints, handlers: dict[int, Any]
    ) -> None:
        self.manager = manager
        self.losses: list[Any] = []
        self.batches_of_step = 1
        self.has_ended_step = False
        self.saved_step = 0
        self.is_resumed = False
        self._trainer = trainer
        self._points = points
        self._handlers = handlers
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._metrics: dict[str, Any] = {}

    def end_step(self) -> None:
        """Begin to gather the losses of the next step."""
        self.batches_of_step = len(self.losses)
        self.losses = []
        self.has_ended_step = True

    def listen(self) -> None:
        """Put the manager's signal handlers on top; it takes them away as well."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
                self._trainer._signal_connector._original_handlers.pop(number, None)

    def keep_gradients(self) -> None:
        """Keep the gradients that were restored over the `zero_grad` with which Lightning begins."""
        parameters = self._trainer.lightning_module.parameters()
        self._gradients = [(one, one.grad) for one in parameters if one.grad is not None]
        self._metrics = dict(self._trainer.callback_metrics)
        self.saved_step = self.manager.step

    def put_gradients_back(self) -> None:
        """Give the parameters the gradients that were kept."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []

    def new_metrics(self) -> dict[str, float]:
        """Return the metrics that were logged since this was asked last."""
        before, self._metrics = self._metrics, dict(self._trainer.callback_metrics)
        return {
            name: float(value)
            for name, value in self._metrics.items()
            if value is not before.get(name) and torch.as_tensor(value).numel() == 1
        }

    def on_rolled_back(self) -> None:
        """Have the loops go on where the manager is now."""
        self.losses = []
        self.has_ended_step = False
        self.saved_step = self.manager.step
        self._points.iterate_again()
        self._trainer.lightning_module._current_fx_name = None  # of the hook that is left
        self._metrics = dict(self._trainer.callback_metrics)

    def close(self) -> None:
        """Leave the trainer's loops as they were."""
        self._points.remove()


def _numbered(name: str, objects: list[Any]) -> dict[str, Any]:
    """Return the objects by a name, which has a number where there are several."""
    return {name if len(objects) == 1 else f"{name}{number}": one for number, one in enumerate(objects)}


def _loss_of(outputs: Any) -> Any:
    """Return the loss that `training_step` has returned: under that name, or in manual optimization similar ones."""
    if not isinstance(outputs, Mapping):
        return outputs
    if outputs.get("loss") is not None:
        return outputs["loss"]
    return {
        name: value.detach()
        for name, value in outputs.items()
        if "loss" in str(name) and isinstance(value, torch.Tensor) and value.numel() == 1
    } or None


def _wrapped(trainer: Any, original: Any, dataloader: Any) -> Any:
    """Return a training loader that keeps its position, behind what the strategy makes of it."""
    if not trainer.training:
        return original(dataloader)
    if isinstance(dataloader, safeckpt.ResumableLoader):
        if trainer.world_size > 1:
            raise TypeError(
                "the training loader is a ResumableLoader, in which Lightning puts no sampler: each of "
                f"{trainer.world_size} ranks would see all data. Nothing was trained. Next: give Lightning the plain "
                "DataLoader; SafeCheckpoint wraps it behind the sampler"
            )
        return dataloader
    dataloader = original(dataloader)
    if not isinstance(dataloader, DataLoader) and not hasattr(dataloader, "load_state_dict"):
        raise TypeError(
            f"the training data is a {type(dataloader).__name__}, which has no position that could be restored. "
            "Nothing was trained. Next: give Lightning a DataLoader, or a loader with state_dict and load_state_dict"
        )
    try:
        length: int | None = len(dataloader)
    except TypeError:
        length = None
    # Of what has no length Lightning fetches one batch ahead, to know which one is the last.
    return safeckpt.ResumableLoader(dataloader, ahead=1 if length is None else None)


def _unwrap(trainer: Any) -> None:
    """Leave the strategy as it was."""
    vars(trainer.strategy).pop("process_dataloader", None)
