"""Loops with an `Accelerator`: one line saves and resumes what was prepared, exact in the middle of an epoch.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    manager, loader = safe(accelerator, "runs/x", loader, save_every=100)

What Accelerate has that is not documented, and is relied on, is in `_HOOKS` here and in `loader`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from safeckpt import Checkpoint, CheckpointManager, register_wrapper
from safeckpt.integrations.accelerate.loader import PreparedLoader
from safeckpt.integrations.arguments import (
    REFUSALS,
    OnNonfinite,
    Refusal,
    check_on_nonfinite,
    stop_signals_or_default,
    with_components,
)
from safeckpt.integrations.requirements import check_hooks, requires

requires("accelerate", "1.10", "2", "accelerate")

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils import DistributedType, broadcast_object_list  # noqa: E402

__all__ = ["AcceleratorManager", "OnNonfinite", "PreparedLoader", "safe"]

_log = logging.getLogger("safeckpt")

_HOOKS = {
    "_models": "the models that were prepared",
    "_optimizers": "the optimizers that were prepared",
    "_schedulers": "the schedulers that were prepared",
    "_custom_objects": "what register_for_checkpointing was given",
    "scaler": "the gradient scaler",
    "step": "the count of batches that gradient accumulation goes by",
}
_ACCEPTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


def optimizer_of(wrapper: Any) -> Any:
    """Return the optimizer inside an `AcceleratedOptimizer`."""
    return wrapper.optimizer


def scheduler_of(wrapper: Any) -> Any:
    """Return the scheduler inside an `AcceleratedScheduler`."""
    return wrapper.scheduler


def loader_of(wrapper: PreparedLoader) -> Any:
    """Return the `ResumableLoader` inside a loader that `safe` has returned."""
    return wrapper.resumable


register_wrapper(AcceleratedOptimizer, optimizer_of)
register_wrapper(AcceleratedScheduler, scheduler_of)
register_wrapper(PreparedLoader, loader_of)


class AcceleratorManager(CheckpointManager):
    """The manager of a run with an `Accelerator`; `safe` makes it.

    Args:
        accelerator: The run's.
        directory: As in `CheckpointManager`.
        components: As in `CheckpointManager`.
        loader: The loader whose batches `on_nonfinite="rollback"` leaves out.
        on_nonfinite: What to do about a loss, or a weight, that is NaN or Inf, and a loss above what `guard` allows.
        max_rollbacks: How often to go back without a new checkpoint in between.
        options: As in `CheckpointManager`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str | os.PathLike[str],
        components: Mapping[str, Any],
        *,
        loader: PreparedLoader | None = None,
        on_nonfinite: OnNonfinite = "raise",
        max_rollbacks: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(directory, components, **options)
        self._accelerator = accelerator
        self._prepared = _counts(accelerator)
        self._loader = loader
        self._on_nonfinite = on_nonfinite
        self._max_rollbacks = max_rollbacks

    def save(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Save everything, as `CheckpointManager.save` does.

        Raises:
            RuntimeError: Something was prepared or registered with the accelerator since `safe`.
        """
        self._refuse_late_objects()
        return super().save(step, loss=loss, metrics=metrics)

    def end_step(
        self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None, save: bool = True
    ) -> Checkpoint | None:
        """Tell that an optimizer step is done, as `CheckpointManager.end_step` does.

        With `on_nonfinite="rollback"` a step that is not finite is undone: the run is at its last checkpoint, without
        the batches of that step, and the loop over the loader goes on from there. Number steps by `manager.step + 1`.

        Raises:
            RuntimeError: Something was prepared or registered with the accelerator since `safe`.
            NonFiniteError: The loss or a weight is NaN or Inf, and `on_nonfinite` is "raise".
            LossSpikeError: The loss is above what the guard allows, and `on_nonfinite` is "raise".
            RollbackLoopError: There were `max_rollbacks` rollbacks without a new checkpoint.
        """
        self._refuse_late_objects()
        batches = 0 if self._loader is None else self._loader.since_step
        try:
            return super().end_step(step, loss=loss, metrics=metrics, save=save)
        except REFUSALS as error:
            if self._on_nonfinite == "raise":
                raise
            self._go_back(error, batches)
            return None

    def _go_back(self, error: Refusal, batches: int) -> None:
        checkpoint = self.rollback(skip_batches=batches, max_rollbacks=self._max_rollbacks)
        _log.warning(
            "%s; the run is at step %d again, without the %d batches of that step", error, checkpoint.step, batches
        )

    def _refuse_late_objects(self) -> None:
        now = _counts(self._accelerator)
        late = [name for name, count in now.items() if count > self._prepared[name]]
        if late:
            raise RuntimeError(
                f"the accelerator was given more {' and '.join(late)} after safe(), which no checkpoint would hold. "
                "Nothing was written. Next: call safe() after the last prepare and register_for_checkpointing"
            )


class _Accumulation:
    """How far the accelerator's gradient accumulation has got."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def safe(
    accelerator: Accelerator,
    directory: str | os.PathLike[str],
    *loaders: Any,
    components: Mapping[str, Any] | None = None,
    on_nonfinite: OnNonfinite = "raise",
    max_rollbacks: int = 3,
    stop_signals: Iterable[int] | None = None,
    **options: Any,
) -> tuple[AcceleratorManager, *tuple[PreparedLoader, ...]]:
    """Save a run with an `Accelerator` and resume it: everything prepared is captured and, if there is one, restored.

    Call it behind the last `accelerator.prepare` and `register_for_checkpointing`, on every rank. Captured are models,
    optimizers, schedulers, the gradient scaler, what was registered for checkpointing, how far gradient accumulation
    has got, the loaders' positions, and the random streams.

    Args:
        accelerator: The run's; on one process, with DDP or with FSDP2.
        directory: Where the checkpoints are.
        loaders: Training loaders, as `accelerator.prepare` returned them.
        components: More of what the run depends on, by name.
        on_nonfinite: What `end_step` does about a loss or a weight that is NaN or Inf, and a loss above what `guard`
            allows: "raise" the error, or "rollback" to the last checkpoint and go on without the batches of that step,
            which needs one loader. A run that begins saves step 0 then, to have where to go back to.
        max_rollbacks: How often to go back without a new checkpoint in between.
        stop_signals: As in `CheckpointManager`; None: SIGTERM, in the main thread.
        options: Those of `CheckpointManager`, such as `save_every`.

    Returns:
        The manager, and for each loader the one to iterate from now on.

    Raises:
        TypeError: The accelerator runs with what is not supported (FSDP1, DeepSpeed, Megatron-LM, XLA), or a loader is
            of a kind whose position cannot be kept.
        ValueError: An argument is out of range.
        RuntimeError: Accelerate has lost what this relies on.
        Exception: What `CheckpointManager.restore` raises.

    Example:
        >>> manager, loader = safe(accelerator, "runs/x", loader, save_every=100)  # doctest: +SKIP
        >>> for epoch in loader.epochs(3):  # doctest: +SKIP
        ...     for batch in loader:
        ...         with accelerator.accumulate(model):
        ...             loss = model(**batch).loss
        ...             accelerator.backward(loss)
        ...             optimizer.step()
        ...             scheduler.step()
        ...             optimizer.zero_grad()
        ...         if accelerator.sync_gradients:
        ...             manager.end_step(manager.step + 1, loss=loss)
    """
    check_on_nonfinite(on_nonfinite)
    if on_nonfinite == "rollback" and len(loaders) != 1:
        raise ValueError(
            f'on_nonfinite="rollback" leaves out the batches of the step that failed, which needs one loader; got '
            f"{len(loaders)}"
        )
    check_accelerator(accelerator)
    seed = shared_seed()
    prepared = tuple(PreparedLoader(loader, seed=seed, finds_last=True) for loader in loaders)
    found = prepared_objects(accelerator) | named("loader", [loader.resumable for loader in prepared])
    manager = AcceleratorManager(
        accelerator,
        directory,
        with_components(found, components or {}),
        loader=prepared[0] if prepared else None,
        on_nonfinite=on_nonfinite,
        max_rollbacks=max_rollbacks,
        stop_signals=stop_signals_or_default(stop_signals),
        **options,
    )
    try:
        if manager.restore() is None and on_nonfinite == "rollback":
            manager.save(0)
    except BaseException:
        manager.close()
        raise
    return manager, *prepared


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse an accelerator of a kind that is not supported, or that has lost what is relied on.

    Raises:
        TypeError: It runs with FSDP1, DeepSpeed, Megatron-LM or another kind that was not tested.
        RuntimeError: An attribute is gone.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"safe() takes an accelerate.Accelerator; got {type(accelerator).__name__}")
    check_hooks(accelerator, _HOOKS)
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise TypeError(
            "the accelerator runs with FSDP1, which cuts parameters and moments into flat pieces that have no names. "
            "Next: FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in the configuration"
        )
    if kind.name not in _ACCEPTED:
        raise TypeError(
            f"the accelerator runs with {kind.value}, whose state safeckpt does not capture: it would be a checkpoint "
            "with parts of the run missing. Next: use DDP or FSDP2 (fsdp_version=2), or the trainer's own checkpoints"
        )


def prepared_objects(accelerator: Accelerator) -> dict[str, Any]:
    """Return the components that an accelerator knows, by name."""
    found = {
        **named("model", accelerator._models),
        **named("optimizer", accelerator._optimizers),
        **named("scheduler", accelerator._schedulers),
        **named("registered", accelerator._custom_objects),
        "accumulation": _Accumulation(accelerator),
    }
    return found if accelerator.scaler is None else found | {"scaler": accelerator.scaler}


def named(kind: str, objects: Iterable[Any]) -> dict[str, Any]:
    """Return objects under `kind`, `kind_2`, `kind_3` and so on."""
    return {kind if number == 1 else f"{kind}_{number}": obj for number, obj in enumerate(objects, 1)}


def shared_seed() -> int:
    """Draw a seed from torch's global stream; every rank gets that of rank 0."""
    drawn = [int(torch.empty((), dtype=torch.int64).random_().item())]
    broadcast_object_list(drawn)
    return drawn[0]


def _counts(accelerator: Accelerator) -> dict[str, int]:
    return {
        "optimizers": len(accelerator._optimizers),
        "schedulers": len(accelerator._schedulers),
        "registered objects": len(accelerator._custom_objects),
    }
