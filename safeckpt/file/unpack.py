"""Give tensors that were stored together in one record memory of their own again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["own_storages"]


def own_storages(tree: Any, packed: Collection[int]) -> None:
    """Move every tensor whose storage is packed, by address, into a storage of its own.

    A tensor that shares memory with unrelated ones would keep all of them alive, drag them into the file of the next
    plain ``torch.save``, and could be grown into its neighbour by ``resize_``.
    """
    if not packed:
        return
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.untyped_storage()._cdata in packed:
                value.data = value.data.clone()
        elif isinstance(value, dict):
            todo.extend(value.keys())
            todo.extend(value.values())
        elif kind in (list, tuple, set):
            todo.extend(value)
            continue
        if getattr(value, "__dict__", None):
            todo.extend(value.__dict__.values())


_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
