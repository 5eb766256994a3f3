"""Walk nested plain containers: every tensor with its dotted name, each container once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["copy_tree", "join", "map_tensors", "named_tensors", "to_cpu"]


def join(prefix: str, name: object) -> str:
    """Return `prefix.name`, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name != "" else f"{prefix}{name}"


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, tensor) for every tensor in nested mappings, lists, tuples and sets, in order.

    A container or tensor that is reachable twice is visited once, under its first name: a shared tuple sixty
    levels deep has 2**60 paths. An explicit stack, since nesting may exceed Python's recursion limit.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(prefix, tree)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value
            continue
        if isinstance(value, Mapping):
            items = [(join(name, key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            items = [(join(name, index), item) for index, item in enumerate(value)]
        else:
            continue
        if id(value) not in seen:
            seen.add(id(value))
            stack.extend(reversed(items))


def map_tensors(
    tree: Any,
    function: Callable[[torch.Tensor], Any],
    leaf: Callable[[Any], Any] = lambda value: value,
    memo: dict[int, Any] | None = None,
) -> Any:
    """Return a copy of `tree` with `function` applied to every tensor and `leaf` to everything else.

    Dicts, lists and tuples are copied; they keep their type, their attributes and their sharing.
    """
    memo = {} if memo is None else memo
    if id(tree) in memo:
        return memo[id(tree)][0]
    result: Any
    if isinstance(tree, torch.Tensor):
        result = function(tree)
    elif isinstance(tree, dict):
        result = tree.copy()  # keeps the subclass
        memo[id(tree)] = (result, tree)
        for key, value in tree.items():
            result[key] = map_tensors(value, function, leaf, memo)
        if hasattr(tree, "__dict__"):
            result.__dict__.update(tree.__dict__)  # an OrderedDict's _metadata
    elif type(tree) is list:
        result = []
        memo[id(tree)] = (result, tree)
        result.extend(map_tensors(value, function, leaf, memo) for value in tree)
    elif type(tree) is tuple:
        result = tuple(map_tensors(value, function, leaf, memo) for value in tree)
    else:
        result = leaf(tree)
    memo[id(tree)] = (result, tree)  # the original is held so that its id stays its own
    return result


def copy_tree(tree: Any) -> Any:
    """Return a copy that shares nothing mutable with `tree`; tensors that overlap in memory still do so in the copy."""
    fresh = _copy_storages([tensor for _, tensor in named_tensors(tree) if _is_plain(tensor)], on_cpu=False)

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        return _placed(tensor, fresh) if id(tensor) in fresh else tensor.detach().clone()

    return map_tensors(tree, clone, copy.deepcopy)


def _placed(tensor: torch.Tensor, fresh: dict[int, tuple[torch.Tensor, int]]) -> torch.Tensor:
    memory, start = fresh[id(tensor)]
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start)


def to_cpu(tree: Any) -> Any:
    """Return the tree with every tensor in host memory: those that are there already as they are, others copied.

    What overlaps on the device overlaps in the copy, so ties survive the transfer.
    """
    away = [tensor for _, tensor in named_tensors(tree) if tensor.device.type not in ("cpu", "meta")]
    if not away:
        return tree
    fresh = _copy_storages([tensor for tensor in away if _is_plain(tensor)])
    ids = {id(tensor) for tensor in away}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in ids:
            return tensor
        return _placed(tensor, fresh) if id(tensor) in fresh else tensor.detach().cpu()

    return map_tensors(tree, move)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is its storage seen through size, stride and offset, and nothing more."""
    usual = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return usual and not (tensor.is_conj() or tensor.is_neg()) and tensor.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first element of the storage that the tensor reads, and the one after the last."""
    start = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + 1 + reach


def _copy_storages(tensors: list[torch.Tensor], *, on_cpu: bool = True) -> dict[int, tuple[torch.Tensor, int]]:
    """Return for each tensor's id a flat copy of the memory it reads and the storage offset at which that begins.

    Only what is read is copied, not the storage around it. Tensors whose memory overlaps get the same copy.
    """
    by_storage: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device), []).append(tensor)
    fresh: dict[int, tuple[torch.Tensor, int]] = {}
    for users in by_storage.values():
        users.sort(key=_span)
        clusters: list[tuple[int, int, list[torch.Tensor]]] = []
        for tensor in users:
            start, stop = _span(tensor)
            if clusters and start < clusters[-1][1]:
                first, last, members = clusters[-1]
                clusters[-1] = (first, max(last, stop), [*members, tensor])
            else:
                clusters.append((start, stop, [tensor]))
        for start, stop, members in clusters:
            memory = members[0].detach().as_strided((stop - start,), (1,), start)
            memory = memory.cpu() if on_cpu else memory.clone()
            fresh.update((id(tensor), (memory, start)) for tensor in members)
    return fresh
