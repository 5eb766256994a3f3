"""What the history of a run says, by step: its losses, and what happened to it. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from safeckpt.remote.urls import is_url
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import CheckpointDirectory, Timelines

__all__ = ["History", "Losses", "Return", "read_history"]

_LARGEST_STEP = 1 << 53  # what a picture can tell from its neighbours

Losses = dict[int, float]


@dataclass
class Return:
    """A run that went on from a checkpoint.

    Attributes:
        step: Of the checkpoint.
        failed_step: The step that was refused before a rollback; None for a restart.
        replayed_to: The last step whose loss was compared with the recorded one; None when none was.
        is_equal: Whether all of them were equal.
    """

    step: int
    failed_step: int | None = None
    replayed_to: int | None = None
    is_equal: bool = True


@dataclass
class History:
    """One run.

    Attributes:
        place: Its directory or URL.
        losses: Name to the loss of each step; the only name is `"loss"` unless the loss is a dict or a list.
        left: The same of each timeline that was left.
        saved_losses: The losses of checkpoints, where the record has none: it is bounded, and a run that has gone back
            adds to it from its next checkpoint on.
        saved: Steps that were saved.
        present: Those of which there is a checkpoint now.
        refused: Steps that were refused for NaN or Inf, or for a loss above the limit.
        returns: Rollbacks and restarts, in their order.
    """

    place: str
    losses: dict[str, Losses] = field(default_factory=dict)
    left: list[dict[str, Losses]] = field(default_factory=list)
    saved_losses: dict[str, Losses] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    returns: list[Return] = field(default_factory=list)

    @property
    def rollbacks(self) -> list[Return]:
        """Return those returns that happened inside a process."""
        return [one for one in self.returns if one.failed_step is not None]

    @property
    def restarts(self) -> list[Return]:
        """Return those that a new process, or a call of `restore`, began with."""
        return [one for one in self.returns if one.failed_step is None]

    @property
    def curves(self) -> Iterator[Losses]:
        """Yield all that is known of losses."""
        for curves in (self.losses, self.saved_losses, *self.left):
            yield from curves.values()

    @functools.cached_property
    def steps(self) -> set[int]:
        """Return every step that something is known of; none where there is nothing to be seen."""
        returns = (one.step for one in self.returns)
        return set().union(self.saved, self.present, self.refused, returns, *self.curves)


def read_history(place: str) -> History:
    """Return what the history of a directory, or of the copy at a URL, says.

    Raises:
        MirrorUnreachableError: The store did not answer.
        OSError: A file of the history is there and cannot be read.
    """
    if is_url(place):
        remote = RemoteCatalog(place)
        return _history(remote.url, remote.events(), remote.timelines(), remote.checkpoints)
    files = CheckpointDirectory(place)
    return _history(place, files.events.read(), files.losses.timelines(), files.steps())


def _history(place: str, events: list[dict[str, Any]], timelines: Timelines, present: Iterable[int]) -> History:
    history = History(place, present=set(present))
    saved_losses: dict[int, dict[str, float]] = {}
    for event in events:
        _note(history, event, saved_losses)
    names = list(next(reversed(saved_losses.values()), {}))
    history.losses = _curves(timelines.current, names)
    history.left = [_curves(one, names) for one in timelines.left]
    for step, losses in sorted(saved_losses.items()):
        for name, loss in losses.items():
            if step not in history.losses.get(name, {}):
                history.saved_losses.setdefault(name, {})[step] = loss
    return history


def _note(history: History, event: Mapping[str, Any], saved_losses: dict[int, dict[str, float]]) -> None:
    """Add what one event says; an event that is none of ours says nothing."""
    step, kind = event.get("step"), event.get("kind")
    if not _is_step(step):
        return
    if kind in ("saved", "imported"):
        history.saved.add(step)
        saved_losses[step] = dict(_numbers(event.get("loss"), ""))
    elif kind == "set_aside":
        for later in [one for one in saved_losses if one > step]:
            del saved_losses[later]
    elif kind == "refused":
        history.refused.add(step)
    elif kind == "rolled_back" and _is_step(failed := event.get("failed_step")):
        history.returns.append(Return(step, failed))
    elif kind == "restored" and not event.get("only"):  # a part is restored to look at it, the run does not go on
        history.returns.append(Return(step))
    elif kind == "replay_verified" and history.returns and _is_step(compared := event.get("compared")):
        history.returns[-1].replayed_to = step + compared
    elif kind == "replay_differs" and history.returns:
        history.returns[-1].replayed_to, history.returns[-1].is_equal = step, False


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_STEP


def _numbers(loss: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a loss with their names, in the order of the record."""
    if isinstance(loss, Mapping | list):
        for key, one in loss.items() if isinstance(loss, Mapping) else enumerate(loss):
            yield from _numbers(one, f"{path}.{key}" if path else str(key))
    elif loss is not None:
        try:
            yield path or "loss", float(loss)
        except (TypeError, ValueError, OverflowError):
            return


def _curves(losses: Mapping[int, str], names: list[str]) -> dict[str, Losses]:
    """Return each number of the losses as a curve; losses of very many numbers are on record by their digest only."""
    found: dict[str, Losses] = {}
    for step, text in losses.items():
        if text.startswith("sha256:"):
            continue
        numbers = text.split(",")
        for index, number in enumerate(numbers):
            known = names[index] if len(names) == len(numbers) else "loss" if len(numbers) == 1 else f"loss {index + 1}"
            found.setdefault(known, {})[step] = float.fromhex(number)
    return found
