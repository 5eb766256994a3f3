"""The walks over nested plain containers: one to look, `named_leaves`, and one to copy, `map_tree`.

On them stand `named_tensors` and `map_tensors`; `copy_tree` and `to_cpu`, which keep what overlaps in memory
overlapping; and the walks of `proof` and `distributed`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch

from safeckpt.state.transfer import Transfer, fresh
from safeckpt.system.tensor_kind import is_plain, span_of
from safeckpt.system.torch_private import empty_per_channel, local_tensor_of

__all__ = [
    "ENTER",
    "Cluster",
    "cloned",
    "clusters_of",
    "copy_tree",
    "detached",
    "join",
    "map_tensors",
    "map_tree",
    "named_leaves",
    "named_tensors",
    "place",
    "tensors_in",
    "to_cpu",
]


# What holds no tensor and needs no copy: a walk should not stop at thousands of integers.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_COPIED = (list, tuple, set, frozenset)
_CONTAINERS = (dict, *_COPIED, Mapping)


def join(prefix: str, name: object) -> str:
    """Return `prefix.name`, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name != "" else f"{prefix}{name}"


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, tensor) for every tensor in nested mappings, lists, tuples, deques and sets, in order."""
    leaves = named_leaves(tree, prefix, skipped=_ATOMS)
    return ((name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return every tensor in nested mappings, lists, tuples and sets once, in no order.

    Cost: a third of that of `named_tensors`, which makes the names.
    """
    found: dict[int, torch.Tensor] = {}
    containers: list[Any] = [(tree,)]
    seen: set[int] = set()
    for container in containers:  # which grows, and holds what is in `seen`
        for value in container.values() if isinstance(container, Mapping) else container:
            if type(value) in _ATOMS:
                continue
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
            elif isinstance(value, _CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                containers.append(value)
    return list(found.values())


def named_leaves(
    tree: Any,
    prefix: str = "",
    *,
    skipped: Collection[type] = (),
    whole: tuple[type, ...] = (),
    empty: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of what is in nested mappings, lists, tuples, deques and sets and is none of them.

    A container or an object that is reachable twice is visited once, under its first name: a shared tuple sixty
    levels deep has 2**60 paths. Plain numbers and strings have no identity, and are yielded wherever they are. An
    explicit stack, since nesting may exceed Python's recursion limit.

    Args:
        tree: The containers.
        prefix: What the names begin with.
        skipped: Types of values that are not yielded.
        whole: Types of containers that are yielded instead of entered.
        empty: Whether containers without an entry are yielded.
    """
    seen: dict[int, Any] = {}  # with the value, so that its id stays its own
    # The iterator of each level that is open, and the keys on the way there: a name is only made for what is yielded.
    levels: list[Iterator[tuple[Any, Any]]] = [iter([(prefix, tree)])]
    path: list[str] = []
    while levels:
        for key, value in levels[-1]:
            kind = type(value)
            if kind in skipped:
                continue
            if kind not in _ATOMS:
                if id(value) in seen:
                    continue
                seen[id(value)] = value
            items = None if kind in _ATOMS or (whole and isinstance(value, whole)) else _items_of(value)
            if items is None or (empty and not value):
                yield (f"{'.'.join(path)}.{key}" if path else str(key)), value
            else:
                levels.append(items)
                if key != "" or path:
                    path.append(str(key))
                break
        else:
            levels.pop()
            if path:
                path.pop()


def _items_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(value, torch.Tensor):
        return None  # first, since nearly everything is one
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return enumerate(value)
    return None


ENTER: Final = object()
"""Returned by the function of `map_tree` for a value that stays, or whose contents are to be mapped."""


def map_tree(tree: Any, function: Callable[[Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """Return a copy of nested dicts, lists, tuples and sets with the values that `function` returns.

    The copies keep type, attributes and sharing. Plain numbers and strings are not handed to `function`.

    Args:
        tree: The containers.
        function: Returns what takes a value's place, or `ENTER`: a container is then copied with its contents mapped,
            and anything else stays.
        memo: The results so far by the id of the value, with the value so that the id stays its own.
    """
    if type(tree) in _ATOMS:
        return tree
    memo = {} if memo is None else memo
    if id(tree) in memo:
        return memo[id(tree)][0]
    result = function(tree)
    if result is not ENTER:
        pass
    elif isinstance(tree, dict):
        result = tree.copy()  # keeps the subclass
        memo[id(tree)] = (result, tree)
        for key, value in tree.items():
            if type(value) not in _ATOMS:
                result[key] = map_tree(value, function, memo)
        if hasattr(tree, "__dict__"):
            result.__dict__.update(tree.__dict__)  # an OrderedDict's _metadata
    elif type(tree) is list:
        result = []
        memo[id(tree)] = (result, tree)
        result.extend(value if type(value) in _ATOMS else map_tree(value, function, memo) for value in tree)
    elif type(tree) in (tuple, set, frozenset):
        result = type(tree)([value if type(value) in _ATOMS else map_tree(value, function, memo) for value in tree])
    else:
        result = tree
    memo[id(tree)] = (result, tree)
    return result


def map_tensors(
    tree: Any, function: Callable[[torch.Tensor], Any], leaf: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a copy of `tree` with `function` applied to every tensor and `leaf` to whatever else is no plain number.

    Dicts, lists, tuples and sets are copied; they keep their type, their attributes and their sharing.
    """

    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        return ENTER if isinstance(value, dict) or type(value) in _COPIED else leaf(value)

    return map_tree(tree, mapped)


@dataclass(slots=True)
class Cluster:
    """A stretch of one storage, and the tensors that read it: all that overlap, directly or through each other.

    Attributes:
        start: First element of the storage that is read.
        numel: Elements from there to the last one that is read.
        members: The tensors.
    """

    start: int
    numel: int
    members: list[torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all members."""
        return self.members[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.members[0].device

    def memory(self) -> torch.Tensor:
        """Return the stretch as a flat tensor that aliases it."""
        return self.members[0].detach().as_strided((self.numel,), (1,), self.start)


def clusters_of(tensors: Iterable[torch.Tensor]) -> list[Cluster]:
    """Return the memory that the tensors read: not the storage around it, and what overlaps only once.

    Tensors of other kinds than `TensorKind.PLAIN`, and empty ones, are left out.
    """
    by_storage: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if is_plain(tensor) and tensor.numel():
            where = (tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device)
            by_storage.setdefault(where, []).append(tensor)
    found: list[Cluster] = []
    for users in by_storage.values():
        if len(users) == 1:  # nearly always
            start, stop = span_of(users[0])
            found.append(Cluster(start, stop - start, users))
            continue
        spans = sorted(((*span_of(tensor), tensor) for tensor in users), key=itemgetter(0, 1))
        start, stop, first = spans[0]
        members = [first]
        for low, high, tensor in spans[1:]:
            if low < stop:
                stop = max(stop, high)
                members.append(tensor)
            else:
                found.append(Cluster(start, stop - start, members))
                start, stop, members = low, high, [tensor]
        found.append(Cluster(start, stop - start, members))
    return found


def detached(tree: Any) -> Any:
    """Return the tree with every tensor detached: one with a history comes back from a file requiring gradients."""
    if not any(tensor.requires_grad for tensor in tensors_in(tree)):
        return tree
    return map_tensors(tree, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)


def copy_tree(tree: Any, transfer: Transfer | None = None, targets: Mapping[int, torch.Tensor] | None = None) -> Any:
    """Return a copy that shares nothing mutable with `tree`; tensors that overlap in memory still do so in the copy.

    Args:
        tree: What to copy.
        transfer: How the values of its tensors are read.
        targets: Tensors that are to become the copies of others, by the id of the other; of the same shape each. They
            are not used for what overlaps.
    """
    targets = targets or {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    moved: dict[int, Callable[[], torch.Tensor]] = {}

    def copied(memory: torch.Tensor) -> torch.Tensor:
        own = fresh(memory.size(), (1,), memory.dtype) if memory.is_cpu else torch.empty_like(memory)
        copies.append((own, memory))
        return own

    tensors = tensors_in(tree)
    clusters = clusters_of(tensors)
    for cluster in clusters:
        target = targets.get(id(cluster.members[0])) if len(cluster.members) == 1 else None
        if target is None:
            moved.update(place([cluster], copied))
        else:
            copies.append((target, cluster.members[0]))
            moved[id(cluster.members[0])] = partial(_itself, target)
    for tensor in tensors:
        if id(tensor) in targets and hasattr(tensor, "to_local"):
            target = targets[id(tensor)]
            copies.append((local_part(target), local_part(tensor)))
            moved[id(tensor)] = partial(_itself, target)
    (transfer or Transfer()).copy(copies)
    return map_tensors(tree, lambda tensor: moved.get(id(tensor), partial(cloned, tensor))(), copy.deepcopy)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process has in memory: of a sharded tensor its part, of any other all of it."""
    return local_tensor_of(tensor)


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of any one tensor on its device, detached."""
    if hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local"):
        # A wrapper around other tensors, such as 8-bit optimizer state, may have no clone() of its own.
        names, context = tensor.__tensor_flatten__()
        inner = {name: cloned(getattr(tensor, name)) for name in names}
        made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]  # of torch's protocol
        return made
    t = tensor.detach()
    if not t.is_quantized or t.qscheme() is not torch.per_channel_affine_float_qparams:
        return t.clone()
    # That scheme has no clone().
    copied = empty_per_channel(
        t.size(),
        scales=t.q_per_channel_scales().clone(),
        zero_points=t.q_per_channel_zero_points().clone(),
        axis=t.q_per_channel_axis(),
        dtype=t.dtype,
        device=t.device,
    )
    copied.untyped_storage().copy_(t.contiguous().untyped_storage())
    return copied


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def to_cpu(tree: Any) -> Any:
    """Return the tree with every tensor in host memory: those that are there already as they are, others copied.

    What overlaps on the device overlaps in the copy, so ties survive the transfer.
    """
    away = [tensor for tensor in tensors_in(tree) if not tensor.is_cpu and not tensor.is_meta]
    if not away:
        return tree
    moved = place(clusters_of(away), lambda memory: memory.cpu())
    ids = {id(tensor) for tensor in away}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in ids:
            return tensor
        return moved[id(tensor)]() if id(tensor) in moved else tensor.detach().cpu()

    return map_tensors(tree, move)


def place(
    clusters: Iterable[Cluster], copied: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, Callable[[], torch.Tensor]]:
    """Copy the memory of each cluster, and return for each tensor's id how to make its counterpart in the copy."""
    found: dict[int, Callable[[], torch.Tensor]] = {}
    for cluster in clusters:
        memory = copied(cluster.memory())
        for tensor in cluster.members:
            offset = tensor.storage_offset() - cluster.start
            found[id(tensor)] = partial(memory.as_strided, tensor.size(), tensor.stride(), offset)
    return found
