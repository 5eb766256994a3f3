"""Hugging Face's `Trainer`, Seq2Seq and TRL's included: one line, and a run that stops comes back as the same run.

    trainer = safe(Trainer(...), "runs/x", save_every=100)
    trainer.train()

No callback of transformers can do this: where training goes on is decided in methods, before any callback is called.
So the trainer is given a class derived from its own, which overrides those in `_HOOKS`:

- the loader is read by position (`get_train_dataloader`), and what was prepared is restored before the epoch and batch
  are asked for (`_init_training_state`, `_prepare_for_training`);
- a step ends, and its loss is guarded, before it is logged or evaluated; it is saved behind that. The last step of an
  epoch is saved behind what belongs to the epoch's end (`training_step`, `_maybe_log_save_evaluate`, `_evaluate`);
- the random streams are set where the first batch is there (`_run_epoch`, `_load_rng_state`), or, at the border of two
  epochs, before `on_epoch_begin`;
- what the trainer sets to zero in between, such as the loss since the last log, is set in `on_train_begin`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from safeckpt import Checkpoint, CheckpointManager
from safeckpt.integrations.accelerate import check_accelerator, named
from safeckpt.integrations.accelerate.loader import PreparedLoader
from safeckpt.integrations.arguments import (
    REFUSALS,
    OnNonfinite,
    check_on_nonfinite,
    stop_signals_or_default,
    with_components,
)
from safeckpt.integrations.requirements import check_code, check_hooks, requires

requires("transformers", "5.2", "6", "transformers")

import torch  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainerState  # noqa: E402
from transformers import trainer as trainer_module  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402
from transformers.trainer_utils import TrainOutput  # noqa: E402

__all__ = ["OnNonfinite", "safe"]

_log = logging.getLogger("safeckpt")
_T = TypeVar("_T", bound=Trainer)

_RESUMED = "safeckpt"  # what stands for the folder of a checkpoint in the methods of the trainer

_HOOKS = {
    "_inner_training_loop": "the loop, which begins again after a rollback",
    "_init_training_state": "the epoch and the batch that training goes on from",
    "_prepare_for_training": "the moment at which model, optimizer and scheduler are there",
    "_run_epoch": "the batches of an epoch",
    "_load_rng_state": "the moment at which the first batch is there",
    "_maybe_log_save_evaluate": "the end of a step, and of an epoch",
    "_evaluate": "the metrics",
    "_finalize_training": "the end of training",
    "get_train_dataloader": "the loader",
    "training_step": "the loss",
    "callback_handler.callbacks": "the callbacks",
    "accelerator._models": "the models that were prepared",
    "accelerator._optimizers": "the optimizers that were prepared",
    "accelerator._custom_objects": "what was registered for checkpointing",
    "current_flos": "a counter",
}
# What the loop sets itself when it begins, so that it is looked for in its code.
_SET_BY_LOOP = {
    "_tr_loss": "the loss since the last log",
    "_total_loss_scalar": "the loss until the last log",
    "_globalstep_last_logged": "the step of the last log",
    "_initial_global_step": "the step that speed is counted from",
    "_initial_num_input_tokens_seen": "the tokens that speed is counted from",
}
_HOOKS_OF_MODULE = {"skip_first_batches": "how the trainer goes to a batch, which the loader does by itself here"}
# What TrainerState knows of the run so far; everything else in it follows from the arguments.
_PROGRESS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
# Of TRL: what its trainers average until the next log, and a counter.
_ACCUMULATORS = ("_metrics", "_total_train_tokens")
_NOT_OVERRIDDEN = ("train", "_inner_training_loop", "_run_epoch", "_init_training_state")


class _Stopped(Exception):  # noqa: N818 - no error
    """Leaves the loop of the trainer after a stop signal, without what belongs to the end of an epoch."""


class _Progress:
    """The component `trainer`: its counters and logs, what is summed up until the next log, callbacks with a state."""

    counts_steps = True

    def __init__(self, session: _Session) -> None:
        self._session = session
        self.restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer, session = self._session.trainer, self._session
        return {
            "progress": _text({name: getattr(trainer.state, name) for name in _PROGRESS}),
            "callbacks": _text([callback.state()["attributes"] for callback in self._exportable()]),
            "accumulators": _text({name: getattr(trainer, name) for name in _ACCUMULATORS if hasattr(trainer, name)}),
            "loss_since_log": trainer._tr_loss.detach().cpu().clone(),
            "loss_until_log": float(trainer._total_loss_scalar),
            "last_logged": trainer._globalstep_last_logged,
            "flos": float(trainer.current_flos),
            "stopped": session.is_stopped_by_a_callback(),
            "seconds": session.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state

    def check_state(self, state: dict[str, Any]) -> list[str]:
        """Return what does not fit: callbacks with a state are told apart by their order."""
        saved, live = len(json.loads(state["callbacks"])), len(list(self._exportable()))
        return [] if saved == live else [f"callbacks with a state: {saved} in the checkpoint, {live} now"]

    def apply(self) -> None:
        """Give the trainer's new state the progress of the checkpoint, and the callbacks theirs."""
        if self.restored is None:
            return
        trainer = self._session.trainer
        for name, value in json.loads(self.restored["progress"]).items():
            setattr(trainer.state, name, value)
        for callback, attributes in zip(self._exportable(), json.loads(self.restored["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        for name, value in json.loads(self.restored["accumulators"]).items():
            _refill(trainer, name, value)
        trainer.current_flos = self.restored["flos"]

    def apply_loss(self) -> None:
        """Give the trainer the loss since its last log, which it sets to zero when it begins."""
        if self.restored is None:
            return
        trainer = self._session.trainer
        trainer._tr_loss = self.restored["loss_since_log"].to(trainer.args.device)
        trainer._total_loss_scalar = self.restored["loss_until_log"]
        trainer._globalstep_last_logged = self.restored["last_logged"]
        trainer._initial_global_step = trainer._initial_num_input_tokens_seen = 0

    def _exportable(self) -> Iterator[Any]:
        callbacks = self._session.trainer.callback_handler.callbacks
        return (one for one in callbacks if isinstance(one, ExportableState))


class _First(TrainerCallback):
    """Stands before all other callbacks: what they see is restored already."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._session.on_train_begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._session.on_epoch_begin()


class _Session:
    """What a trainer needs to save and resume, between the begin and the end of `train()`.

    Attributes:
        trainer: The trainer.
        manager: The manager; after training it stays readable.
        loader: The training loader.
        prepared: What `_prepare_for_training` has returned.
        is_running: Whether the loop of the trainer runs.
    """

    def __init__(
        self,
        trainer: Any,
        directory: str | os.PathLike[str],
        components: Mapping[str, Any],
        *,
        on_nonfinite: OnNonfinite,
        max_rollbacks: int,
        saves_last: bool,
        options: dict[str, Any],
    ) -> None:
        self.trainer = trainer
        self.on_nonfinite = on_nonfinite
        self.manager: CheckpointManager | None = None
        self._directory = directory
        self._components = components
        self._max_rollbacks = max_rollbacks
        self._saves_last = saves_last
        self._options = options
        self._first = _First(self)
        self._progress = _Progress(self)
        self._forget()

    def _forget(self) -> None:
        self.is_running = False
        self.loader: PreparedLoader | None = None
        self.prepared: tuple[Any, Any] | None = None
        self._progress.restored = None
        self._prepared_objects: dict[str, list[Any]] = {}
        self._muted: list[Any] | None = None
        self._awaits_streams = False
        self._resumed_epoch: int | None = None
        self._epoch = 0
        self._loss: Any = None
        self._ended_loss: Any = None
        self._batches = 0
        self._metrics: dict[str, float] = {}
        self._saved_step = 0
        self._is_step = False
        self._began = time.monotonic()

    @property
    def is_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint, of another process or of this one."""
        return self._progress.restored is not None

    def opened(self) -> CheckpointManager:
        """Return the manager of the run in progress."""
        assert self.manager is not None
        return self.manager

    def loads(self) -> PreparedLoader:
        """Return the loader of the run in progress."""
        assert self.loader is not None
        return self.loader

    def seconds(self) -> float:
        """Return how long the run has been training, in all its processes."""
        before = 0.0 if self._progress.restored is None else self._progress.restored["seconds"]
        return float(before + time.monotonic() - self._began)

    def seconds_before(self) -> float:
        """Return how long it had been training when the checkpoint was saved that it began from."""
        return self.seconds() - (time.monotonic() - self._began)

    def is_stopped_by_a_callback(self) -> bool:
        """Return whether a callback has ended training before its last step, as early stopping does."""
        trainer = self.trainer
        return bool(trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps)

    # -- the beginning -----------------------------------------------------------------------------------------------

    def wrap(self, prepared: Any) -> PreparedLoader:
        """Return the loader that the run reads from beginning to end."""
        args = self.trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        self.loader = PreparedLoader(prepared, seed=seed, finds_last=False)
        return self.loader

    def open(self, prepared: tuple[Any, Any]) -> None:
        """Make the manager of what was prepared, and restore the newest checkpoint but for its streams."""
        trainer = self.trainer
        self.prepared = prepared
        accelerator = trainer.accelerator
        self._prepared_objects = {name: list(getattr(accelerator, name)) for name in ("_models", "_optimizers")}
        callbacks = [one for one in trainer.callback_handler.callbacks if _has_state(one)]
        parts = {
            "model": prepared[0],
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "loader": self.loads().resumable,
            "trainer": self._progress,
            **named("callback", callbacks),
            **named("registered", accelerator._custom_objects),
        }
        if accelerator.scaler is not None:
            parts["scaler"] = accelerator.scaler
        if getattr(trainer.args, "sync_ref_model", False):  # of TRL: elsewhere the reference stays as it was made
            parts["reference"] = trainer.ref_model
        parts = with_components(parts, self._components)
        self._begin_sums()
        self.manager = CheckpointManager(self._directory, parts, **self._options)
        restored = self.manager.restore(streams=False)
        self._awaits_streams = restored is not None
        self._saved_step = self.manager.step
        if restored is None and self.on_nonfinite == "rollback":
            self.manager.save(0)
        trainer.callback_handler.callbacks.insert(0, self._first)
        self._began = time.monotonic()

    def _begin_sums(self) -> None:
        """Give the trainer what it begins with, so that it has a state before it begins."""
        trainer = self.trainer
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = 0.0, 0

    def reopen(self) -> None:
        """Give the accelerator back what the trainer has made it forget; callbacks do not learn of a rollback."""
        for name, objects in self._prepared_objects.items():
            setattr(self.trainer.accelerator, name, objects)
        handler = self.trainer.callback_handler
        self._muted, handler.callbacks = handler.callbacks, [self._first]

    def position(self, epochs: int, max_steps: int) -> tuple[int, int]:
        """Return the epoch and the batch that training goes on from; behind the last epoch when it is over."""
        self._progress.apply()
        if self._progress.restored is None:
            return 0, 0
        if self.trainer.state.global_step >= max_steps or self._progress.restored["stopped"]:
            self._resumed_epoch = None
            return epochs, 0
        loader = self.loads()
        self._resumed_epoch = loader.resumable.epoch
        return self._resumed_epoch, loader.resumable.batch

    def on_train_begin(self) -> None:
        """Set what the trainer has set to zero."""
        self._progress.apply_loss()
        if self._resumed_epoch is None or self.loads().resumable.batch == 0:
            self.unmute()

    def on_epoch_begin(self) -> None:
        """Set the streams where the checkpoint is of the border before this epoch."""
        if self.loads().resumable.batch == 0:
            self.restore_streams()

    def restore_streams(self) -> None:
        """Set the streams of the checkpoint, unless that was done."""
        if self._awaits_streams:
            self._awaits_streams = False
            self.opened().restore_streams()

    def unmute(self) -> None:
        """Have callbacks called again."""
        if self._muted is not None:
            self.trainer.callback_handler.callbacks, self._muted = self._muted, None

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[bool]:
        """Yield whether this epoch is the one that training goes on in; the loader is at its batch already."""
        self._epoch = number
        self.unmute()
        is_resumed, self._resumed_epoch = number == self._resumed_epoch, None
        original = trainer_module.skip_first_batches
        if is_resumed:
            trainer_module.skip_first_batches = _already_there
        try:
            yield is_resumed
        finally:
            trainer_module.skip_first_batches = original

    # -- steps -------------------------------------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a batch, which the trainer has divided by the batches of its step."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of an evaluation, without times, which differ on every rank."""
        self._metrics |= {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and not name.endswith(("_runtime", "_per_second"))
        }

    def end_step(self) -> None:
        """End the step at hand before it is logged and evaluated; nothing at the end of an epoch."""
        manager, step = self.opened(), self.trainer.state.global_step
        self._is_step = step > manager.step
        if not self._is_step:
            return
        self._batches = self.loads().resumable.since_step
        self._ended_loss, self._loss, self._metrics = self._loss, None, {}
        manager.end_step(step, loss=self._ended_loss, save=False)

    def save_due(self) -> None:
        """Save the step that ended if it is due, behind what belongs to it.

        Raises:
            _Stopped: A stop signal has come, and everything is saved.
        """
        control, loader = self.trainer.control, self.loads()
        ends = loader.is_last or control.should_epoch_stop
        if self._is_step and (ends or control.should_training_stop):
            return  # the end of the epoch comes next
        if not self._is_step and ends and loader.resumable.epoch == self._epoch:
            loader.resumable.end_epoch()
        manager = self.opened()
        self._note_saved(manager.save_due(metrics=self._metrics))
        if manager.stop_requested and self._saved_step == manager.step:
            raise _Stopped

    def save_last(self) -> None:
        """Save the last step, unless it is saved, before the trainer loads the best model or ends."""
        self.restore_streams()
        self.unmute()
        manager = self.opened()
        if self._saves_last and manager.step > self._saved_step:
            self._note_saved(manager.save(manager.step, loss=self._ended_loss, metrics=self._metrics))

    def _note_saved(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            self._saved_step = checkpoint.step

    # -- the end -----------------------------------------------------------------------------------------------------

    def go_back(self, why: str) -> None:
        """Roll back to the last checkpoint, and leave out the batches of the step that failed."""
        manager = self.opened()
        self.unmute()
        self._loss = None
        checkpoint = manager.rollback(skip_batches=self._batches, max_rollbacks=self._max_rollbacks)
        self._awaits_streams = False
        self._saved_step = checkpoint.step
        self._began = time.monotonic()
        _log.warning(
            "%s; the run is at step %d again, without the %d batches of that step", why, checkpoint.step, self._batches
        )

    def stop(self) -> TrainOutput:
        """End training after a stop signal, which is no end of an epoch: a resume goes on there."""
        trainer = self.trainer
        _log.warning("stopped by a signal: step %d is saved, and train() goes on from it", self.opened().step)
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer.is_in_train = False
        total = trainer._total_loss_scalar + trainer._tr_loss.item()
        return TrainOutput(trainer.state.global_step, total / trainer.state.global_step, {})

    def close(self) -> None:
        """Give the directory back, and the trainer its callbacks."""
        self.unmute()
        callbacks = self.trainer.callback_handler.callbacks
        if self._first in callbacks:
            callbacks.remove(self._first)
        self._forget()
        if self.manager is not None:
            self.manager.close()


class _Safe:
    """Goes before the class of a trainer; every method does what the trainer does, and tells the session."""

    _safeckpt: _Session

    def __init_subclass__(cls, **_: Any) -> None:
        """Accept that a trainer's class wants arguments."""

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """The `CheckpointManager` of the last `train()`; None before."""
        return self._safeckpt.manager

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **options: Any) -> Any:
        """Train, from the newest checkpoint of the run's directory if there is one.

        Returns:
            What the trainer returns. After a stop signal `checkpoint_manager.stop_requested` is True, and the step in
            it is lower than `state.max_steps`.

        Raises:
            ValueError: `resume_from_checkpoint` or `trial` is given.
            Exception: What `CheckpointManager.restore` and `end_step` raise, and the trainer.
        """
        _refuse_call(resume_from_checkpoint, trial)
        return super().train(None, trial, **options)  # type: ignore[misc]

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        session = self._safeckpt
        session.is_running = True
        try:
            while True:
                try:
                    return super()._inner_training_loop(*args, **options)  # type: ignore[misc]
                except _Stopped:
                    return session.stop()
                except REFUSALS as error:
                    if session.on_nonfinite == "raise" or session.prepared is None:
                        raise
                    why = str(error)
                session.go_back(why)  # here, where the error no longer holds the loop and its iterator
        finally:
            session.close()

    def get_train_dataloader(self) -> Any:
        session = self._safeckpt
        if not session.is_running:
            return super().get_train_dataloader()  # type: ignore[misc]
        return session.loader or session.wrap(super().get_train_dataloader())  # type: ignore[misc]

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, epochs: int, *rest: Any) -> tuple[int, int]:
        session = self._safeckpt
        super()._init_training_state(max_steps, steps_per_epoch, epochs, *rest)  # type: ignore[misc]
        if session.prepared is None:
            prepared = super()._prepare_for_training(max_steps, session.loads(), None)  # type: ignore[misc]
            session.open(prepared)
        else:
            session.reopen()
        return session.position(epochs, max_steps)

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._safeckpt.prepared

    def _run_epoch(self, *, epoch: int, resume_from_checkpoint: Any = None, **options: Any) -> None:
        with self._safeckpt.epoch(epoch) as is_resumed:
            resumed = _RESUMED if is_resumed else None
            super()._run_epoch(epoch=epoch, resume_from_checkpoint=resumed, **options)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: Any) -> None:
        self._safeckpt.restore_streams()

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **options)  # type: ignore[misc]
        self._safeckpt.add_loss(loss)
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        self._safeckpt.end_step()
        super()._maybe_log_save_evaluate(*args, **options)  # type: ignore[misc]
        self._safeckpt.save_due()

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **options: Any) -> Any:
        if skip_scheduler and self._safeckpt.is_resumed:
            return {}  # `eval_on_start` came before the first step of the run
        metrics = super()._evaluate(*args, skip_scheduler=skip_scheduler, **options)  # type: ignore[misc]
        self._safeckpt.add_metrics(metrics)
        return metrics

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        session = self._safeckpt
        session.save_last()
        start_time -= session.seconds_before()  # the time of the whole run, as its loss is that of the whole run
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]


def safe(
    trainer: _T,
    directory: str | os.PathLike[str],
    *,
    components: Mapping[str, Any] | None = None,
    on_nonfinite: OnNonfinite = "raise",
    max_rollbacks: int = 3,
    stop_signals: Iterable[int] | None = None,
    save_on_exit: bool = True,
    **options: Any,
) -> _T:
    """Have a trainer save its whole run, and go on from the newest checkpoint when `train()` is called again.

    Captured are model, optimizer, scheduler, gradient scaler, the loader's position, the trainer's counters, its log
    and the loss since the last one, callbacks with a state (`ExportableState`, or `state_dict` and `load_state_dict`),
    what was registered with `trainer.accelerator.register_for_checkpointing`, and the random streams.

    In a process that resumes, `on_train_begin` is called, and `on_epoch_begin` of an epoch that is gone on with; every
    other hook is called as often as in a run that was never stopped. The folders `checkpoint-N` that `save_strategy`
    asks for hold the weights alone, for `from_pretrained`: `save_only_model` is set.

    Args:
        trainer: A `Trainer`, or one derived from it whose `train` is that of `Trainer`. It is changed and returned.
        directory: Where the checkpoints are; not the trainer's `output_dir`.
        components: More of what the run depends on, by name.
        on_nonfinite: What to do about a loss or a weight that is NaN or Inf, and a loss above what `guard` allows:
            "raise" the error, or "rollback" to the last checkpoint and go on without the batches of that step. A run
            that begins saves step 0 then.
        max_rollbacks: How often to go back without a new checkpoint in between.
        stop_signals: As in `CheckpointManager`; None: SIGTERM, in the main thread. `train()` saves and returns.
        save_on_exit: Whether the last step is saved when training is over.
        options: Those of `CheckpointManager`, such as `save_every`; `keep_best=Best("eval_loss")` goes by the metrics
            of the evaluation that belongs to a step.

    Returns:
        The trainer.

    Raises:
        TypeError: The trainer is of a kind that is not supported; the text names it.
        ValueError: An argument is out of range, or one of the trainer's contradicts an exact resume.
        RuntimeError: transformers has lost what this relies on.

    Example:
        >>> trainer = safe(Trainer(model, args, train_dataset=data), "runs/x", save_every=100)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    check_on_nonfinite(on_nonfinite)
    _refuse_kind(trainer)
    check_hooks(trainer, _HOOKS)
    check_code(Trainer._inner_training_loop, _SET_BY_LOOP)
    check_hooks(trainer_module, _HOOKS_OF_MODULE)
    check_hooks(TrainerState(), dict.fromkeys(_PROGRESS, "how far the run has got"))
    _refuse_arguments(trainer.args)
    check_accelerator(trainer.accelerator)
    session = _Session(
        trainer,
        directory,
        components or {},
        on_nonfinite=on_nonfinite,
        max_rollbacks=max_rollbacks,
        saves_last=save_on_exit,
        options={"stop_signals": stop_signals_or_default(stop_signals), **options},
    )
    trainer.args.save_only_model = True
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Safe, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    trainer._safeckpt = session
    return trainer


def _refuse_call(resume_from_checkpoint: Any, trial: Any) -> None:
    if resume_from_checkpoint not in (None, False):
        raise ValueError(
            f"resume_from_checkpoint={resume_from_checkpoint!r}: train() goes on from the newest checkpoint of the "
            "directory that safe() was given, by itself. Next: leave it out. To begin from the weights of a folder of "
            "the trainer, load them with from_pretrained and give safe() a new directory"
        )
    if trial is not None:
        raise ValueError(
            "a hyperparameter search runs many trainings with one trainer, which cannot share a directory. Next: "
            "search with a trainer that is not given to safe()"
        )


def _refuse_kind(trainer: Any) -> None:
    """Refuse what is no Trainer, or one that has a loop, or a state, of its own.

    Raises:
        TypeError: It is; the text names it.
    """
    kind = type(trainer).__name__
    if not isinstance(trainer, Trainer):
        raise TypeError(f"safe() takes a transformers.Trainer; got {kind}")
    if isinstance(trainer, _Safe):
        raise TypeError("this trainer was given to safe() before: use it as it is")
    own = [name for name in _NOT_OVERRIDDEN if getattr(type(trainer), name, None) is not getattr(Trainer, name, None)]
    if own:
        raise TypeError(
            f"{kind} has its own {' and '.join(own)}, so safeckpt does not know what a resume has to restore. Next: "
            "write its loop with a CheckpointManager"
        )
    if hasattr(trainer, "_buffered_inputs"):
        raise TypeError(
            f"{kind} generates samples for several steps at once and keeps them, which no checkpoint would hold. Next: "
            "use the trainer's own checkpoints; SFTTrainer, DPOTrainer and RewardTrainer are supported"
        )


def _refuse_arguments(args: Any) -> None:
    """Refuse arguments that contradict an exact resume.

    Raises:
        ValueError: One of them is set.
    """
    refused = {
        "auto_find_batch_size": "another batch size after a resume would be another run",
        "ignore_data_skip": "the resumed run would see batches a second time",
        "enable_jit_checkpoint": "safeckpt saves at SIGTERM itself",
    }
    for name, why in refused.items():
        if getattr(args, name, False):
            raise ValueError(f"TrainingArguments.{name} is set, and {why}. Next: leave it out")


def _already_there(loader: Any, num_batches: int = 0) -> Any:
    """Stand in for `skip_first_batches`: the loader is at its batch."""
    return loader


def _has_state(callback: Any) -> bool:
    """Return whether a callback keeps its state as components do."""
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _text(values: Any) -> str:
    """Return plain values as text: logs are long, and a NaN that was logged is nothing to refuse."""
    return json.dumps(values, default=_number)


def _number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"the trainer keeps a {type(value).__name__}, which is no plain value")


def _refill(owner: Any, name: str, value: Any) -> None:
    """Give an accumulator its values back, in the containers that are there."""
    live = getattr(owner, name)
    if not isinstance(live, dict):
        setattr(owner, name, value)
        return
    for key, inner in value.items():
        if isinstance(live.get(key), dict):
            live[key].clear()
            live[key].update(inner)
        else:
            live[key] = inner
