"""Ignite's `Engine`: one line saves and resumes a trainer, exact in the middle of an epoch.

    attach(trainer, "runs/x", {"model": model, "optimizer": optimizer}, save_every=100)
    trainer.run(loader, max_epochs=10)

A step is an iteration. Its loss is guarded before the handlers of `ITERATION_COMPLETED`, and a checkpoint that is due
is saved behind all of them; at the last iteration of an epoch, behind the handlers of `EPOCH_COMPLETED`. So nothing
that belongs to a step is left out or done twice at a resume, in whatever order handlers were attached.

A resumed run restores behind the handlers of `STARTED`. In an epoch that goes on, `EPOCH_STARTED` is not fired a second
time: what its handlers set up has to be a component or one of `trainer.state_dict_user_keys`.

What Ignite has that is not documented, and is relied on, is in `_HOOKS`, and the order of its events is tried out on a
small engine by `attach`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch

import safeckpt
from safeckpt.integrations.arguments import REFUSALS, OnNonfinite, Refusal, check_on_nonfinite, stop_signals_or_default
from safeckpt.integrations.engine_state import EngineState
from safeckpt.integrations.requirements import check_hooks, requires

requires("ignite", "0.5", "0.6", "ignite", distribution="pytorch-ignite")

import ignite.distributed as idist  # noqa: E402
from ignite.engine import DeterministicEngine, Engine, Events  # noqa: E402
from ignite.handlers import Checkpoint as IgniteCheckpoint  # noqa: E402
from ignite.handlers import EMAHandler  # noqa: E402
from ignite.handlers.state_param_scheduler import StateParamScheduler  # noqa: E402

__all__ = ["Attachment", "OnNonfinite", "attach"]

_log = logging.getLogger("safeckpt")

_HOOKS = {
    "_fire_event": "the moment at which all handlers of an event have run",
    "_event_handlers": "handlers that have a state and are no component",
    "_init_iter": "the iteration within its epoch at which a run goes on",
    "_internal_run_generator": "a run that was interrupted, or ended with an error",
    "run": "the loader, and what comes before and behind a run",
    "set_data": "a loader that is replaced within a run",
    "terminate": "a stop",
    "should_terminate": "whether a run ends here",
    "should_terminate_single_epoch": "whether an epoch ends here",
    "state_dict_user_keys": "the values of the user that belong to the run",
}
# Of a run over one batch, twice.
_ITERATION = [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED]
_ORDER = [Events.STARTED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, *_ITERATION]
_ORDER += [Events.EPOCH_STARTED, Events.GET_BATCH_STARTED, Events.DATALOADER_STOP_ITERATION, *_ITERATION]
_ORDER += [Events.COMPLETED]


def scalar_output(output: Any) -> Any:
    """Return what a process function returns where that is the loss: a number, or a dict of numbers.

    Raises:
        TypeError: It is anything else, so that the loss has to be named.
    """
    values = list(output.values()) if isinstance(output, Mapping) else [output]
    for value in values:
        if not _is_number(value):
            raise TypeError(
                f"the process function returns a {type(output).__name__}, which is not a loss by itself. Say which "
                'part is the loss: attach(..., loss=lambda output: output["loss"]); or loss=None for no guard on it'
            )
    return output


def _is_number(value: Any) -> bool:
    """Return whether a value is one number: of Python, of NumPy, or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return hasattr(value, "__float__") and not isinstance(value, bool) and getattr(value, "size", 1) == 1


def attach(
    trainer: Engine,
    directory: str | os.PathLike[str],
    components: Mapping[str, Any],
    *,
    loss: Callable[[Any], Any] | None = scalar_output,
    evaluator: Engine | None = None,
    on_nonfinite: OnNonfinite = "raise",
    max_rollbacks: int = 3,
    stop_signals: Iterable[int] | None = None,
    seed: int | None = None,
    fresh: Collection[str] = (),
    keep_live: Collection[str] = (),
    **options: Any,
) -> Attachment:
    """Have a trainer save and resume: its next `run` restores what is in the directory and goes on there.

    `trainer.run(loader)` stays as it is. The `DataLoader` that it is given becomes a `safeckpt.ResumableLoader`, and
    its position is saved. When `run` returns, the last step is saved and the directory's lock is free.

    Args:
        trainer: The engine that trains.
        directory: Where the checkpoints are.
        components: Name to object, as in `CheckpointManager`; also handlers with a state: `EarlyStopping`,
            `EMAHandler`, schedulers of `ignite.handlers`, metrics that are attached to the trainer. The engine is one
            by itself, as "engine".
        loss: What takes the process function's output to the loss that is guarded, recorded and compared. By default
            the output itself, a number or a dict of numbers. None: there is none.
        evaluator: An engine whose metrics are recorded with a checkpoint of the same iteration. With `keep_best` each
            of its runs makes a checkpoint.
        on_nonfinite: What to do about a loss, or a weight, that is NaN or Inf, and a loss above what
            `guard` allows. `"raise"`: `run` raises the error, also where handlers of `EXCEPTION_RAISED` would hide it.
            `"rollback"`: back to the last checkpoint, the batch that failed is left out, and the run goes on.
        max_rollbacks: How often to go back without a new checkpoint in between.
        stop_signals: Signals that save and end `run`, without `COMPLETED`; None: SIGTERM, in the main thread.
        seed: What order and augmentation derive from, as in `ResumableLoader`; None: one that is drawn.
        fresh: As in `CheckpointManager.restore`.
        keep_live: As in `CheckpointManager.restore`.
        options: As in `CheckpointManager`: `save_every`, `keep_last`, `keep_best`, `async_save`, `guard` and so on.

    Returns:
        What was attached: `attachment.stopped`, and `attachment.manager` during a run.

    Raises:
        TypeError: The trainer is a `DeterministicEngine`, or an option is of a wrong kind.
        ValueError: An option is out of range, or there is `keep_best` and no evaluator.
        RuntimeError: The trainer has an attachment already, or this Ignite works in another way than the tested one.
    """
    check_on_nonfinite(on_nonfinite)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss takes the output of the process function to the loss; got {type(loss).__name__}")
    if options.get("keep_best") and evaluator is None:
        raise ValueError("keep_best goes by the metrics of an evaluator: attach(..., evaluator=evaluator)")
    _check_trainer(trainer)
    guard = options.get("guard", safeckpt.Guard())
    allowed = (*guard.allow_nonfinite, "engine.metrics.*")  # they were computed, and decide nothing
    options["guard"] = dataclasses.replace(guard, allow_nonfinite=allowed)
    attachment = Attachment(
        trainer,
        directory,
        components,
        loss=loss,
        max_rollbacks=max_rollbacks if on_nonfinite == "rollback" else 0,
        seed=seed,
        restore={"fresh": fresh, "keep_live": keep_live},
        options={**options, "stop_signals": stop_signals_or_default(stop_signals)},
    )
    if evaluator is not None:
        attachment.watch(evaluator)
    return attachment


class Attachment:
    """What saves and resumes a trainer; `attach` makes it.

    Args:
        trainer: The engine.
        directory: Where the checkpoints are.
        components: Name to object.
        loss: Takes the output of the process function to the loss.
        max_rollbacks: How often to go back without a new checkpoint; 0: never.
        seed: Of the loader.
        restore: Options of `CheckpointManager.restore`.
        options: Options of `CheckpointManager`.

    Attributes:
        manager: The manager of the run that goes on; None outside of `run`.
        stopped: Whether the last `run` was ended by a stop signal: it is not complete, and goes on when called again.
        rollbacks: How often this run went back.
    """

    def __init__(
        self,
        trainer: Engine,
        directory: str | os.PathLike[str],
        components: Mapping[str, Any],
        *,
        loss: Callable[[Any], Any] | None,
        max_rollbacks: int,
        seed: int | None,
        restore: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._trainer = trainer
        self._directory = directory
        self._given = dict(components)
        self._loss = loss
        self._max_rollbacks = max_rollbacks
        self._seed = seed
        self._restore = restore
        self._options = options
        self._metrics: tuple[int, dict[str, float]] | None = None
        self._last_loss: Any = None
        self._saved_step = 0
        self._is_running = False
        self._is_rerun = False
        self._goes_on_in_epoch = False
        self._loader: Any = None
        self._state = EngineState(trainer)
        self.manager: safeckpt.CheckpointManager | None = None
        self.stopped = False
        self.rollbacks = 0
        self._engine_run, self._engine_fire = trainer.run, trainer._fire_event
        trainer.run, trainer.set_data, trainer._fire_event = self._run, _refuse_other_data, self._fire

    def watch(self, evaluator: Engine) -> None:
        """Take the metrics of an evaluator along with the iteration that they are of."""
        evaluator.add_event_handler(Events.COMPLETED, self._evaluated)

    # -- a run -------------------------------------------------------------------------------------------------------

    def _run(self, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer, in place of `Engine.run`: restore, train, save what is left, close."""
        trainer = self._trainer
        if self._is_running:
            raise RuntimeError("trainer.run was called by a handler of the same run: evaluate with another Engine")
        if self.manager is None:
            self._begin(data)
        self._is_running = True
        try:
            state = self._run_again(self._loader, *args, **kwargs)
            if trainer._internal_run_generator is None:  # else it was interrupted, and the next `run` goes on
                self._end()
        except BaseException:
            trainer._internal_run_generator = None  # or the next run would return at once, and train nothing
            manager, self.manager = self.manager, None
            if manager is not None:
                manager.close()
            raise
        finally:
            self._is_running = False
        return state

    def _begin(self, data: Any) -> None:
        self._loader = self._resumable(data)
        components = {**_with_handlers(self._given, self._trainer), "engine": self._state}
        if self._loader is not None and not any(one is self._loader for one in components.values()):
            components["loader"] = self._loader
        for line in _uncaptured(self._trainer, self._given):
            _log.warning(line)
        self.stopped = self._state.is_stopping = self._is_rerun = self._goes_on_in_epoch = False
        self.rollbacks = 0
        self.manager = safeckpt.CheckpointManager(self._directory, components, **self._options)

    def _end(self) -> None:
        assert self.manager is not None
        self._save_last()
        manager, self.manager = self.manager, None
        manager.close()

    def _run_again(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine; after a rollback, run it again from where it is."""
        while True:
            try:
                return self._engine_run(*args, **kwargs)
            except REFUSALS as error:
                if not self._max_rollbacks or self.manager is None:
                    raise
                self._roll_back(error)
            args, kwargs = args[:1], {}  # the limits are in the engine's state

    def _roll_back(self, error: Refusal) -> None:
        assert self.manager is not None
        iteration = self._trainer.state.iteration
        try:
            checkpoint = self.manager.rollback(skip_batches=1, max_rollbacks=self._max_rollbacks)
        except (safeckpt.CheckpointNotFoundError, safeckpt.RollbackLoopError) as refusal:
            raise refusal from error
        _log.warning(
            "iteration %d is refused (%s): back at iteration %d, and its batch is left out",
            iteration, error, checkpoint.step,
        )  # fmt: skip
        self.rollbacks += 1
        self._saved_step = checkpoint.step
        self._trainer._internal_run_generator = None
        self._is_rerun = True

    def _resumable(self, data: Any) -> Any:
        """Return the loader of a run, with a position.

        Raises:
            TypeError: It has none; the text has the line to write.
        """
        if data is None or isinstance(data, safeckpt.ResumableLoader):
            return data
        try:
            return safeckpt.ResumableLoader(data, seed=self._common_seed())
        except TypeError as error:
            raise TypeError(
                f"trainer.run was given a {type(data).__name__}, which has no position that could be saved ({error}). "
                "Give it a DataLoader; batches that are there already become one by trainer.run(torch.utils.data."
                "DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch), ...)"
            ) from error

    def _common_seed(self) -> int | None:
        """Return the seed of the loader, in a group that of rank 0."""
        if self._seed is not None or idist.get_world_size() == 1:
            return self._seed
        drawn = int(torch.empty((), dtype=torch.int64).random_(2**31).item())
        return int(idist.broadcast(torch.tensor(drawn), src=0, safe_mode=True).item())

    # -- events ------------------------------------------------------------------------------------------------------

    def _fire(self, event: Any, *args: Any, **kwargs: Any) -> None:
        """Fire an event, in place of `Engine._fire_event`, with what comes before and behind its handlers."""
        if self.manager is None:
            self._engine_fire(event, *args, **kwargs)
        elif event == Events.EXCEPTION_RAISED:
            self._exception_raised(event, *args)
        elif (around := self._around.get(event)) is not None:
            around(self, lambda: self._engine_fire(event, *args, **kwargs))
        else:
            self._engine_fire(event, *args, **kwargs)

    def _exception_raised(self, event: Any, error: BaseException) -> None:
        """Fire it, and raise an error of ours all the same: Ignite goes on when there are handlers."""
        if not isinstance(error, safeckpt.SafeckptError):
            self._engine_fire(event, error)
            return
        is_rolled_back = self._max_rollbacks and isinstance(error, REFUSALS)
        if not is_rolled_back and not getattr(error, "was_fired", False):
            error.was_fired = True  # type: ignore[attr-defined]  # an epoch and its run raise the same one
            self._engine_fire(event, error)
        raise error

    def _started(self, fire: Callable[[], None]) -> None:
        assert self.manager is not None
        if not self._is_rerun:
            fire()
            restored = self.manager.restore(**self._restore)
            if restored is None:
                self._state.begin()
                self._seek()
            self._saved_step = 0 if restored is None else restored.step
        self._is_rerun = False
        self._trainer._init_iter = self._state.in_epoch
        self._goes_on_in_epoch = self._state.in_epoch > 0
        if self._state.was_terminated:
            _log.warning(
                "the run was ended by terminate() at iteration %d and stays so; call run with another max_epochs or "
                "max_iters to go on",
                self._trainer.state.iteration,
            )
            self._trainer.terminate()

    def _seek(self) -> None:
        """Go where an engine is that was loaded from elsewhere, as from Ignite's own checkpoint."""
        iteration = self._trainer.state.iteration
        if iteration and isinstance(self._loader, safeckpt.ResumableLoader):
            self._loader.seek(*divmod(iteration, len(self._loader)))

    def _epoch_started(self, fire: Callable[[], None]) -> None:
        if self._goes_on_in_epoch:
            self._goes_on_in_epoch = False
            self._trainer.last_event_name = Events.EPOCH_STARTED
            return
        if self._state.in_epoch:  # terminate_epoch(skip_epoch_completed=True)
            self._state.end_epoch()
            self._save_due()
        fire()

    def _iteration_completed(self, fire: Callable[[], None]) -> None:
        assert self.manager is not None
        trainer = self._trainer
        self._state.in_epoch += 1
        self._last_loss = None if self._loss is None else self._loss(trainer.state.output)
        self.manager.end_step(trainer.state.iteration, loss=self._last_loss, save=False)
        fire()
        more = trainer.should_terminate or trainer.should_terminate_single_epoch
        if not (more or self._state.is_at_end_of_epoch or self._state.is_at_limit):
            self._save_due()

    def _epoch_terminated(self, fire: Callable[[], None]) -> None:
        fire()
        if isinstance(self._loader, safeckpt.ResumableLoader):
            self._loader.end_epoch()

    def _epoch_completed(self, fire: Callable[[], None]) -> None:
        fire()
        self._state.end_epoch()
        self._save_due()

    def _run_completed(self, fire: Callable[[], None]) -> None:
        self._save_last()
        fire()

    _around: ClassVar[dict[Any, Callable[[Attachment, Callable[[], None]], None]]] = {
        Events.STARTED: _started,
        Events.EPOCH_STARTED: _epoch_started,
        Events.ITERATION_COMPLETED: _iteration_completed,
        Events.TERMINATE_SINGLE_EPOCH: _epoch_terminated,
        Events.EPOCH_COMPLETED: _epoch_completed,
        Events.TERMINATE: _run_completed,
        Events.COMPLETED: _run_completed,
    }

    # -- saving ------------------------------------------------------------------------------------------------------

    def _save_due(self) -> None:
        """Save what is due, or what was evaluated, and stop when that was asked for."""
        assert self.manager is not None
        metrics = self._fresh_metrics()
        if metrics and self._options.get("keep_best"):
            self._save_step(metrics)
        elif (checkpoint := self.manager.save_due(metrics=metrics)) is not None:
            self._saved_step = checkpoint.step
        # A signal that came since the save is for the next step, or for none.
        if self.manager.stop_requested and self._saved_step == self.manager.step and not self._trainer.should_terminate:
            self.stopped = self._state.is_stopping = True
            self._trainer.terminate(skip_completed=True)

    def _save_step(self, metrics: Mapping[str, float]) -> None:
        assert self.manager is not None
        self._saved_step = self.manager.save(self.manager.step, loss=self._last_loss, metrics=metrics).step

    def _save_last(self) -> None:
        """Save the last step that ended, unless that was done or is not wanted."""
        assert self.manager is not None
        is_wanted = self.manager.is_due or self._options.get("save_on_exit", True)
        if is_wanted and self._saved_step != self.manager.step:
            self._save_step(self._fresh_metrics())

    def _evaluated(self, evaluator: Engine) -> None:
        metrics = {name: float(value) for name, value in evaluator.state.metrics.items() if _is_number(value)}
        self._metrics = (self._trainer.state.iteration, metrics)

    def _fresh_metrics(self) -> dict[str, float]:
        """Return what the evaluator has found at this iteration, and not earlier."""
        if self._metrics is None or self._metrics[0] != self._trainer.state.iteration:
            return {}
        return self._metrics[1]


class _StateSchedule:
    """The state of a scheduler of `trainer.state`, with the value there; a function that it calls is the script's.

    Args:
        scheduler: It.
        trainer: The engine whose state it moves.
    """

    def __init__(self, scheduler: StateParamScheduler, trainer: Engine) -> None:
        self._scheduler = scheduler
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return how often it was called, and what it has set."""
        schedule = {name: value for name, value in self._scheduler.state_dict().items() if name != "lambda_obj"}
        return {"schedule": schedule, "value": getattr(self._trainer.state, self._scheduler.param_name, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; the function stays."""
        function = {"lambda_obj": self._scheduler.lambda_obj} if hasattr(self._scheduler, "lambda_obj") else {}
        self._scheduler.load_state_dict({**state["schedule"], **function})
        setattr(self._trainer.state, self._scheduler.param_name, state["value"])


def _with_handlers(components: Mapping[str, Any], trainer: Engine) -> dict[str, Any]:
    """Return components in which handlers without a state of their own are what they hold."""
    found: dict[str, Any] = {}
    for name, one in components.items():
        if isinstance(one, EMAHandler):
            found[name] = one.ema_model
            if _momentum_of(one) is not None:
                found[f"{name}_momentum"] = _StateSchedule(one.momentum_scheduler, trainer)
        elif isinstance(one, StateParamScheduler):
            found[name] = _StateSchedule(one, trainer)
        else:
            found[name] = one
    return found


def _momentum_of(handler: Any) -> Any:
    """Return the scheduler of an `EMAHandler` that warms up; one that does not has none, once it is attached or not."""
    return getattr(handler, "momentum_scheduler", None) if isinstance(handler, EMAHandler) else None


def _uncaptured(trainer: Engine, components: Mapping[str, Any]) -> list[str]:
    """Return the handlers of a trainer that have a state and are no component, one sentence for each."""
    known = {id(one) for one in components.values()}
    known |= {id(_momentum_of(one)) for one in components.values()}
    found: dict[int, str] = {}
    for event, handlers in trainer._event_handlers.items():
        for handler, _, _ in handlers:
            plain = getattr(handler, "__wrapped__", handler)
            owner = getattr(plain, "__self__", plain)
            stateful = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
            if id(owner) in known or isinstance(owner, Engine | IgniteCheckpoint):
                continue
            if stateful or isinstance(owner, EMAHandler):
                name = type(owner).__name__
                found[id(owner)] = (
                    f"Not captured: the handler {name} of {event} has a state. Give it to attach as a component: "
                    f"{{..., {name.lower()!r}: {name.lower()}}}."
                )
    return list(found.values())


def _refuse_other_data(data: Any) -> None:
    """Stand in for `Engine.set_data`.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "trainer.set_data replaces the loader within a run, and a checkpoint has one loader's position. Switch between "
        "the parts of one dataset in its sampler, or call trainer.run once for each loader, each with its own directory"
    )


def _check_trainer(trainer: Any) -> None:
    """Refuse a trainer that cannot be attached to.

    Raises:
        TypeError: It is no `Engine`, or a `DeterministicEngine`.
        RuntimeError: It has an attachment, or works in another way than the Ignite that was tested.
    """
    if not isinstance(trainer, Engine):
        raise TypeError(f"trainer must be an ignite.engine.Engine; got {type(trainer).__name__}")
    if isinstance(trainer, DeterministicEngine):
        raise TypeError(
            "a DeterministicEngine sets the random streams and goes to its position by itself, which is not the run "
            "that was saved. Make it Engine(process_function): attached, it resumes exactly"
        )
    check_hooks(trainer, _HOOKS)
    if "_fire_event" in vars(trainer):
        raise RuntimeError("this trainer is attached already: one attach for each trainer")
    fired: list[Any] = []
    probe = Engine(lambda _engine, _batch: None)
    probe.logger = logging.getLogger(f"{__name__}.probe")
    probe.logger.setLevel(logging.CRITICAL)
    engine_fire = probe._fire_event

    def fire(event: Any) -> None:
        fired.append(event)
        engine_fire(event)

    probe._fire_event = fire
    probe.run([0], max_epochs=2)
    if fired != _ORDER:
        raise RuntimeError(
            f"this Ignite fires its events in another order than the one that was tested: "
            f"{', '.join(map(str, fired))}. Nothing was changed. Next: install a version of it "
            "that safeckpt was tested with"
        )
