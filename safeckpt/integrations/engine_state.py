"""Where the run of an Ignite `Engine` is: a component, without which the loop would begin anew."""

from __future__ import annotations

from typing import Any

__all__ = ["EngineState"]


class EngineState:
    """The counters, metrics and user keys of an engine, and how far it is within its epoch.

    Ignite's own `Engine.state_dict` derives the epoch from the iteration, which is another one after `terminate_epoch`,
    refuses a first epoch of unknown length, and brings the limits of the earlier run. Here the limits are those that
    `run` was called with: a run that is to be longer is called with more.

    Args:
        engine: The trainer.

    Attributes:
        epochs: How many epochs have ended.
        in_epoch: Iterations of the epoch since.
        is_stopping: Whether a stop signal ends this run: it goes on later, while `terminate()` ends it for good.
        was_terminated: Whether the restored run was ended by `terminate()`, and the limits are still the same.
    """

    counts_steps = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.epochs = 0
        self.in_epoch = 0
        self.is_stopping = False
        self.was_terminated = False

    def begin(self) -> None:
        """Take the position that the engine has, as Ignite reads it."""
        state = self._engine.state
        self.epochs = state.epoch
        self.in_epoch = state.iteration % state.epoch_length if state.epoch_length else state.iteration

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether this iteration is the last one of its epoch; of an epoch of unknown length nobody knows."""
        return bool(self.in_epoch == self._engine.state.epoch_length)

    @property
    def is_at_limit(self) -> bool:
        """Whether this iteration is the last one that `max_iters` allows."""
        state = self._engine.state
        return state.max_iters is not None and state.iteration >= state.max_iters

    def end_epoch(self) -> None:
        """Count an epoch as ended."""
        self.epochs += 1
        self.in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain values."""
        engine, state = self._engine, self._engine.state
        is_terminated = bool(engine.should_terminate) and not self.is_stopping and not self.is_at_limit
        return {
            "iteration": state.iteration,
            "epochs": self.epochs,
            "in_epoch": self.in_epoch,
            "epoch_length": state.epoch_length,
            "limits": [state.max_epochs, state.max_iters],
            "is_terminated": is_terminated or self.was_terminated,
            "metrics": dict(state.metrics),
            "user": {key: getattr(state, key, None) for key in engine.state_dict_user_keys},
        }

    def check_state(self, saved: dict[str, Any]) -> list[str]:
        """Return what keeps a state from being loaded, one sentence for each difference."""
        live = self._engine.state.epoch_length
        found = []
        if None not in (live, saved["epoch_length"]) and live != saved["epoch_length"]:
            found.append(f"epoch_length: {saved['epoch_length']} in the checkpoint, {live} in this run")
        keys, saved_keys = set(self._engine.state_dict_user_keys), set(saved["user"])
        found += [f"state_dict_user_keys has no {key!r} now" for key in sorted(saved_keys - keys)]
        found += [f"state_dict_user_keys has {key!r}, the checkpoint not" for key in sorted(keys - saved_keys)]
        return found

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go to a position; the limits of the engine stay."""
        state = self._engine.state
        self.epochs = state.epoch = saved["epochs"]
        self.in_epoch = saved["in_epoch"]
        state.iteration = saved["iteration"]
        state.epoch_length = saved["epoch_length"] or state.epoch_length
        state.metrics.clear()
        state.metrics.update(saved["metrics"])
        for key, value in saved["user"].items():
            setattr(state, key, value)
        limits = [state.max_epochs, state.max_iters]
        self.was_terminated = saved["is_terminated"] and limits == saved["limits"]
