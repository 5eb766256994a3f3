"""Copy the containers of a tree with some of the values in it replaced."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

__all__ = ["CONTAINERS", "Rebuild"]

CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple, set})


class Rebuild:
    """A copy of a tree's containers with some values replaced; shared containers stay shared, cycles stay cycles."""

    def __init__(self, replaced: dict[int, Any]) -> None:
        self._done: dict[int, Any] = dict(replaced)

    def of(self, value: Any) -> Any:
        """Return the new value in the place of an old one."""
        done = self._done.get(id(value), self)
        if done is not self:
            return done
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            new = self._done[id(value)] = kind()
            for key, item in value.items():
                new[self.of(key)] = self.of(item)
            if kind is OrderedDict:
                new.__dict__.update((name, self.of(item)) for name, item in value.__dict__.items())
            return new
        if kind is list:
            items: list[Any] = []
            self._done[id(value)] = items
            items.extend(self.of(item) for item in value)
            return items
        if kind in CONTAINERS:  # tuple, set, Counter: complete when they are made
            if kind is Counter:
                new = Counter({self.of(key): self.of(item) for key, item in value.items()})
            else:
                new = kind(self.of(item) for item in value)
            # A cycle through a list may have led here and made it already.
            return self._done.setdefault(id(value), new)
        return value
