"""Hyper-parameters: which of the script's the checkpoint overrules.

The file's values win, since that is what the same run means. People have to hear of it when their script says
otherwise, and must not hear of it when it does not: a schedule that the training loop drives by hand, a train flag
or a counter that an optimizer keeps among its options, has moved since the run began, while the script is the same.
So the values at the beginning of the run are kept with the state, and a script that still begins with them is in
agreement, wherever the values have gone since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from safeckpt.state.tree import copy_tree

__all__ = ["overruled", "plain", "same"]

_SHOWN = 80  # characters of a value in a report


def overruled(
    live: Mapping[str, Any], saved: Mapping[str, Any], first: Mapping[str, Any], moving: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield (option, `live value -> saved value`) of those in which a script disagrees with a file.

    Args:
        live: Values of the live object.
        saved: Values in the file.
        first: Values at the beginning of the run that saved, as far as they are known.
        moving: Options that a registered scheduler drives.
    """
    for key in sorted(live.keys() & saved.keys() - set(moving)):
        if not same(live[key], saved[key]) and not (key in first and same(live[key], first[key])):
            yield key, f"{_shown(live[key])} -> {_shown(saved[key])}"


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options that are plain values or tensors: no functions, no objects."""
    return {key: copy_tree(value) for key, value in options.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor)


def same(one: Any, other: Any) -> bool:
    """Compare plain values and tensors; a list equals a tuple, and NaN itself."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if one is None or other is None or isinstance(one, str) or isinstance(other, str):
            return False
        one, other = torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu()
        return one.size() == other.size() and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - only NaN is not itself


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
