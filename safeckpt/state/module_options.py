"""What the constructor of a layer decides and no tensor shows, as one short text for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["changed_options", "is_of_torch", "options_of", "plain_attributes"]

_MOST_CHARACTERS = 500  # of an extra_repr: a longer one lists data
_SEPARATOR = "; "
_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, type(None))


def is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch's layers, whose plain attributes are arguments of its constructor."""
    return type(module).__module__.startswith("torch.nn.modules.")


def plain_attributes(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Return the public attributes that hold plain values, but for the training flag."""
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) in kinds and not key.startswith("_") and key != "training"
    }


def options_of(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return for each submodule, by its clean path, what was decided when it was built.

    Args:
        modules: The submodules by that path.
    """
    texts: dict[str, str] = {}  # equal ones are one object, which a file holds once
    found = {}
    for clean, module in modules.items():
        text = _options_of(module)
        if text:
            found[clean] = texts.setdefault(text, text)
    return found


def _options_of(module: nn.Module) -> str:
    if is_of_torch(module):
        attributes = plain_attributes(module, _PLAIN)
        return _SEPARATOR.join(f"{key}={value!r}" for key, value in sorted(attributes.items()))
    if type(module).extra_repr is nn.Module.extra_repr or type(module).__module__.startswith("torch."):
        return ""
    # Code of the user's for print(model): where it fails there is nothing to compare, and a save goes on.
    with contextlib.suppress(AttributeError, TypeError, ValueError, LookupError, RuntimeError):
        text = module.extra_repr()
        if isinstance(text, str) and len(text) <= _MOST_CHARACTERS:
            return text
    return ""


def changed_options(saved: str, live: str, before: str = "saved {}", now: str = "live {}") -> Iterator[str]:
    """Yield the parts in which two of these texts differ, as `saved p=0.1, live p=0.5`."""
    old, new = (text.split(_SEPARATOR) for text in (saved, live))
    if [part.partition("=")[0] for part in old] != [part.partition("=")[0] for part in new]:
        yield f"{before.format(saved)}, {now.format(live)}"
        return
    for one, other in zip(old, new, strict=True):
        if one != other:
            yield f"{before.format(one)}, {now.format(other)}"
