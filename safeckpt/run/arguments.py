"""Checks of what callers pass in, shared by the methods of the manager."""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from safeckpt.state.loss import refuse_long

__all__ = ["checked_metrics", "checked_names", "checked_notes", "checked_step", "note_changes"]

_MOST_NOTES = 16_000  # bytes as JSON, in the header of every checkpoint
_FEW = 100  # names, and characters of each, that are not counted in every step


def checked_step(step: Any) -> int:
    """Return a step as an int; a bool or a tensor is a mistake, a NumPy integer is fine."""
    if isinstance(step, bool | np.bool_ | torch.Tensor):
        raise TypeError(f"step must be an int, 0 or more; got {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an int, 0 or more; got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be an int, 0 or more; got {number}")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats.

    Raises:
        TypeError: They are no mapping from name to number.
        ValueError: They do not fit into the header of a checkpoint, or one is larger than a float.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics must be a mapping from name to number; got {metrics!r}")
    found = {name: _as_metric(name, value) for name, value in metrics.items()}
    if len(found) > _FEW or any(len(name) > _FEW for name in found):
        refuse_long("metrics", len(json.dumps(found)))
    return found


def _as_metric(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes | complex):  # float() would read a string
            return float(value)
    except OverflowError:
        raise ValueError(
            f"metrics[{name!r}] is an integer of {value.bit_length():,} bits, which no float can hold"
        ) from None
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        pass
    raise TypeError(f"metrics[{name!r}] must be a number or a one-element tensor; got {value!r}")


def checked_notes(notes: Any) -> dict[str, Any]:
    """Return a copy of notes as JSON has them.

    Raises:
        TypeError: They are no mapping from name to plain values.
        ValueError: They are too long, or nested in themselves.
    """
    if notes is None:
        return {}
    if not isinstance(notes, Mapping) or not all(isinstance(name, str) for name in notes):
        raise TypeError(f"notes must be a mapping from name to plain value, such as vars(args); got {notes!r}")
    for name, value in notes.items():
        try:
            json.dumps(value, allow_nan=False)
        except TypeError:
            raise TypeError(
                f"notes[{name!r}] is a {type(value).__name__}; notes hold text, numbers, booleans, None, and lists and "
                f"dicts of them: write str(...) of it"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"notes[{name!r}] cannot be written as JSON: {error}") from None
    text = json.dumps(dict(notes))
    if len(text) > _MOST_NOTES:
        raise ValueError(
            f"notes take {len(text):,} bytes as JSON, and {_MOST_NOTES:,} fit; put the rest into a file or a component"
        )
    copied: dict[str, Any] = json.loads(text)
    return copied


def note_changes(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Return `notes.name: saved -> live` for every note that differs; none where one side has no notes at all."""
    if not saved or not live:
        return []
    names = [name for name in dict.fromkeys((*saved, *live)) if _shown(saved, name) != _shown(live, name)]
    return [f"notes.{name}: {_shown(saved, name)} -> {_shown(live, name)}" for name in names]


def _shown(notes: Mapping[str, Any], name: str) -> str:
    return repr(notes[name]) if name in notes else "not given"


def checked_names(names: Any, argument: str) -> Any:
    """Return names as they are; a lone string would be read as one name per letter."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} takes a sequence of names, for example ('model',); got {names!r}")
    if argument == "only" and not names:
        raise ValueError("only is empty, so nothing would be restored; name the components, or leave it out for all")
    return names
