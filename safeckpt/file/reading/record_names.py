"""Which tensors are in a record: the names under which the pickle of a file refers to it. Nothing of it is built."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from safeckpt.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Self

    from safeckpt.file.reading.central_directory import Archive

__all__ = ["tensors_in"]

_FAILURES = (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError)


def tensors_in(file: Archive, records: Collection[str]) -> list[str]:
    """Return the dotted names of the tensors in some records, in their order; none where the pickle is not whole."""
    from safeckpt.file.reading.loading import read_pickle  # noqa: PLC0415 - torch, which a check does without

    try:
        data, _ = read_pickle(file, checked=True)
        tree = _Unpickler(io.BytesIO(data), encoding="utf-8").load()
        return [name for name, key in _keys_in(tree) if f"data/{key}" in records]
    except (LoadError, *_FAILURES):
        return []


class _Key(str):
    """The key of a storage."""

    __slots__ = ()


class _Made:
    """Stands for whatever a pickle makes: a tensor, a dtype, an object. It has what that would be made of."""

    parts: list[Any]

    def __new__(cls, *parts: Any) -> Self:  # a pickle may make an object without `__init__`
        made = super().__new__(cls)
        made.parts = list(parts)
        return made

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append(value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Made

    def persistent_load(self, persistent_id: Any) -> Any:
        return _Key(persistent_id[2])


def _keys_in(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, key) of each storage that is referred to."""
    seen: dict[int, Any] = {}  # with the value, so that its id stays its own
    todo = [("", tree)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, _Key):
            yield name, value
        elif isinstance(value, dict | list | tuple | set | _Made) and id(value) not in seen:
            seen[id(value)] = value
            todo.extend(reversed([*_inside(name, value)]))


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Made):
        yield from ((name, part) for part in value.parts)
    else:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield f"{name}.{key}" if name else str(key), part
