"""What a trainer carries from step to step besides model, optimizers, schedules and loaders."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.connectors.logger_connector import result

from safeckpt.integrations.lightning.safe_points import SafePoints

__all__ = ["HookState", "TrainerState"]

_log = logging.getLogger("safeckpt")
_METRICS = {"callback": "_callback_metrics", "logged": "_logged_metrics", "bar": "_progress_bar_metrics"}
# Callbacks that may come and go: none of them changes what is trained.
_WITHOUT_INFLUENCE = ("ModelCheckpoint", "OnExceptionCheckpoint", "Timer")
_OPTIONS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


class TrainerState:
    """Counters, callbacks, data module, logged values and metrics of a trainer, as one component.

    Args:
        trainer: The trainer.
        points: Knows whether the trainer is between two epochs.
        own: The callback of this integration, which has no state of its own.
    """

    counts_steps = True

    def __init__(self, trainer: Any, points: SafePoints, own: Callback) -> None:
        self._trainer = trainer
        self._points = points
        self._callbacks = [one for one in trainer.callbacks if one is not own]

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain values and tensors."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # positions of loaders, which are components of their own
        return {
            "between_epochs": self._points.between_epochs,
            "should_stop": trainer.should_stop,
            "loops": loops,
            "callbacks": {one.state_key: state for one in self._callbacks if (state := one.state_dict())},
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "precision": {} if _scaler(trainer) is not None else trainer.precision_plugin.state_dict(),
            "logged": _logged(trainer),
            "metrics": {
                name: {"updates": metric._update_count, "values": metric.metric_state}
                for name, metric in _metrics(trainer.lightning_module)
                if metric._update_count
            },
        }

    def check_state(self, state: dict[str, Any]) -> list[str]:
        """Return what keeps a state from being loaded. Changes nothing."""
        live = {one.state_key: one for one in self._callbacks}
        found = [
            f"callback {key} is in the checkpoint, and not among the trainer's callbacks"
            for key in state["callbacks"]
            if key not in live and not key.startswith(_WITHOUT_INFLUENCE)
        ]
        found += [
            f"callback {key} has a state, and is not in the checkpoint"
            for key, one in live.items()
            if key not in state["callbacks"] and not key.startswith(_WITHOUT_INFLUENCE) and one.state_dict()
        ]
        if bool(state["datamodule"]) and self._trainer.datamodule is None:
            found.append("the checkpoint has the state of a data module, and the trainer has none")
        names = dict(self._trainer.lightning_module.named_modules())
        found += [
            f"metric {name} is in the checkpoint, not in the module" for name in state["metrics"] if name not in names
        ]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it into the trainer, whose loops then go on there."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        self._points.enter(between_epochs=state["between_epochs"])
        for one in self._callbacks:
            if one.state_key in state["callbacks"]:
                one.load_state_dict(state["callbacks"][one.state_key])
        if state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        _load_metrics(trainer.lightning_module, state["metrics"])
        _load_logged(trainer, state["logged"])
        if state["should_stop"] and not any(isinstance(one, Timer) for one in self._callbacks):
            trainer.should_stop = True
            _log.info("the run was stopped at step %d, by a callback such as EarlyStopping: it is over", _step(state))


def _step(state: dict[str, Any]) -> int:
    """Return the optimizer steps that a state is behind."""
    loops = state["loops"]
    automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    return int(automatic or loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"])


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics of a module, whose values no `state_dict` has."""
    return ((name, one) for name, one in module.named_modules() if isinstance(one, result.Metric))


def _load_metrics(module: Any, saved: dict[str, Any]) -> None:
    for name, metric in _metrics(module):
        metric.reset()
        if name in saved:
            for key, value in saved[name]["values"].items():
                setattr(metric, key, _to(value, metric.device))
            metric._update_count = saved[name]["updates"]


def _to(value: Any, device: Any) -> Any:
    return [one.to(device) for one in value] if isinstance(value, list) else value.to(device)


def _logged(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks and loggers see, and what was logged since the start of the epoch."""
    connector = trainer._logger_connector
    return {
        **{key: dict(getattr(connector, name)) for key, name in _METRICS.items()},
        "is_first": connector._first_loop_iter,
        "hook": connector._current_fx,
        "results": {
            key: _result(key, one) for key, one in trainer.fit_loop.epoch_loop._results.items() if not one.has_reset
        },
    }


def _result(key: str, one: Any) -> dict[str, Any]:
    """Return what one call of `self.log` has gathered."""
    sync = one.meta.sync
    if sync._group is not None:
        raise RuntimeError(
            f"{key} is logged with sync_dist_group, which cannot be put back in the middle of an epoch. Nothing was "
            "written. Next: log it without, over all ranks"
        )
    state = {"value": one.value, "last": one._forward_cache, "updates": one._update_count}
    if hasattr(one, "cumulated_batch_size"):
        state["weight"] = one.cumulated_batch_size
    if not one.is_tensor:
        del state["value"]  # the metric itself, which is a part of the module
    return {
        "options": {name: getattr(one.meta, name) for name in _OPTIONS},
        "reduce": one.meta.reduce_fx.__name__,
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": one.is_tensor,
        "state": state,
    }


def _load_logged(trainer: Any, saved: dict[str, Any]) -> None:
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    for key, name in _METRICS.items():
        values = {label: one.to(device) if isinstance(one, torch.Tensor) else one for label, one in saved[key].items()}
        setattr(connector, name, values)
    connector._first_loop_iter, connector._current_fx = saved["is_first"], saved["hook"]
    results = trainer.fit_loop.epoch_loop._results
    results.reset()
    modules = dict(trainer.lightning_module.named_modules())
    for key, one in saved["results"].items():
        meta = result._Metadata(**one["options"], reduce_fx=getattr(torch, one["reduce"]))
        meta.sync = result._Sync(
            _should=one["sync"]["should"], fn=trainer.strategy.reduce, rank_zero_only=one["sync"]["rank_zero_only"]
        )
        metric = result._ResultMetric(meta, one["is_tensor"]).to(device)
        state = one["state"]
        metric.value = state["value"].to(device) if one["is_tensor"] else modules[meta.metric_attribute]
        if "weight" in state:
            metric.cumulated_batch_size = state["weight"].to(device)
        metric._forward_cache = None if state["last"] is None else state["last"].to(device)
        metric._update_count = state["updates"]
        results[key] = metric


class HookState:
    """What `on_save_checkpoint` of callbacks and of the module puts into a checkpoint of Lightning, as one component.

    `WeightAveraging` keeps its average there, and many a module what is in no `state_dict`.

    Args:
        trainer: The trainer.
        own: The callback of this integration.
    """

    def __init__(self, trainer: Any, own: Callback) -> None:
        self._trainer = trainer
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that the hooks have added or replaced."""
        before = self._checkpoint()
        checkpoint = dict(before)
        for hook in self._hooks("on_save_checkpoint"):
            hook(checkpoint)
        return {key: value for key, value in checkpoint.items() if value is not before.get(key)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the entries to `on_load_checkpoint`, with the rest as it is now."""
        checkpoint = {**self._checkpoint(), **state}
        if "current_model_state" in state:  # of WeightAveraging: the weights that are trained are a component
            checkpoint["current_model_state"] = self._trainer.lightning_module.state_dict()
        for hook in self._hooks("on_load_checkpoint"):
            hook(checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
        }

    def _hooks(self, name: str) -> Iterator[Callable[[dict[str, Any]], object]]:
        """Yield the hooks in Lightning's order."""
        trainer, module = self._trainer, self._trainer.lightning_module
        for one in trainer.callbacks:
            if one is not self._own and getattr(type(one), name) is not getattr(Callback, name):
                yield functools.partial(getattr(one, name), trainer, module)
        if getattr(type(module), name) is not getattr(LightningModule, name):
            yield getattr(module, name)

    def __bool__(self) -> bool:
        return any(True for _ in self._hooks("on_save_checkpoint"))
