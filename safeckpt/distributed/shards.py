"""Sharded state on the engine of torch.distributed.checkpoint: the tensors go through it, the rest into the index.

In the index each of these tensors is a placeholder, a dict with the key under which the engine has it. A module's
tensor has the key `component.qualified.name`, so that plain `torch.distributed.checkpoint.load` finds it as well; an
optimizer's is `optimizer.component.qualified.name.exp_avg`: by name, never by position. In any other state it is the
component and the path in its state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from safeckpt.distributed.group import in_group
from safeckpt.errors import StateMismatchError, UnsavableStateError
from safeckpt.file import SHARD_KEY, Placeholder, placeholder_of
from safeckpt.state import RESERVED_KEY, Component
from safeckpt.state.fsdp import reshard
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.tree import ENTER, join, local_part, map_tensors, map_tree, named_tensors
from safeckpt.system.torch_private import part_bounds, sharded_like, with_local_part

if TYPE_CHECKING:
    from safeckpt.distributed.storage import ShardReader

__all__ = [
    "ShardTensors",
    "as_local_shards",
    "extract_shards",
    "is_sharded",
    "place_shards",
    "with_placeholders",
]

ShardTensors = dict[str, torch.Tensor]  # key to tensor


def is_sharded(payload: Mapping[str, Any]) -> bool:
    """Return whether a captured payload holds a tensor of which each rank has a part.

    Where there is no process group there is no mesh that such a tensor could lie on.
    """
    return in_group() and any(hasattr(tensor, "to_local") for _, tensor in named_tensors(payload))


def extract_shards(payload: Mapping[str, Any], *, is_rank_zero: bool) -> tuple[dict[str, Any], ShardTensors]:
    """Return the payload with placeholders, and the tensors they stand for that this rank has to write.

    Every sharded tensor goes to the engine, and of rank 0 every other tensor of a module: of what is not sharded the
    engine would take any rank's copy, and it is rank 0's that counts. Other small things, such as an optimizer's step
    counts, stay.

    Raises:
        UnsavableStateError: Two tensors have one name, or a tensor is the summand of a sum that is not made yet.
    """
    shards: ShardTensors = {}
    skeleton = _with_each(payload, functools.partial(_as_placeholder, shards))
    for key, tensor in shards.items():
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            raise UnsavableStateError(
                location=key,
                type_name="DTensor",
                reason="each rank has a summand of it, and the sum is not made yet",
                cure="redistribute() it before the save.",
            )
    return skeleton, shards if is_rank_zero else {key: one for key, one in shards.items() if hasattr(one, "to_local")}


def _namer(name: str, state: Any, record: Mapping[str, Any], *, everything: bool = False) -> dict[int, str]:
    """Return by id the key of each tensor of a component that goes to the engine; with `everything`, of each tensor."""
    found = {
        id(tensor): join(name, key) for key, tensor in named_tensors(state) if everything or hasattr(tensor, "to_local")
    }
    if record["kind"] == "module":
        # One that is expanded stays: its memory is smaller than what it claims.
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        found |= {id(value): join(name, key) for key, value in tensors.items() if everything or not _is_expanded(value)}
    elif record["kind"] == "optimizer" and isinstance(state, dict) and "param_groups" in state:
        for number, slot in _numbered(state, record):
            for key, value in named_tensors(state.get("state", {}).get(number, {})):
                if everything or hasattr(value, "to_local") or value.numel() > 1:
                    found[id(value)] = join(join(name, slot), key)
    return found


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or hasattr(tensor, "to_local") or torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.numel() > 1 and 0 in tensor.stride()


def _numbered(state: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield (number under which an optimizer's state is saved, name of the parameter)."""
    for group, slots in zip(state["param_groups"], record["slots"], strict=True):
        for number, slot in zip(group["params"], slots, strict=True):
            yield number, slot["name"]


def _with_each(
    payload: Mapping[str, Any], change: Callable[[str, torch.Tensor], Any], *, everything: bool = False
) -> dict[str, Any]:
    """Return a payload with something else in the place of each tensor that has a key. See `_namer`."""
    own = payload[RESERVED_KEY]
    result = {
        name: _changed(state, _namer(name, state, own["components"][name], everything=everything), change)
        for name, state in payload.items()
        if name != RESERVED_KEY
    }
    gradients = {id(tensor): join("safeckpt.grad", name) for name, tensor in own["gradients"].items()}
    result[RESERVED_KEY] = {**own, "gradients": _changed(own["gradients"], gradients, change)}
    return result


def _changed(tree: Any, keys: Mapping[int, str], change: Callable[[str, torch.Tensor], Any]) -> Any:
    if not keys:
        return tree
    return map_tensors(tree, lambda tensor: change(keys[id(tensor)], tensor) if id(tensor) in keys else tensor)


def _as_placeholder(shards: ShardTensors, key: str, tensor: torch.Tensor) -> Any:
    """Return what stands for a tensor, and note that; one that has no content is returned as it is."""
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return tensor
    if shards.setdefault(key, tensor) is not tensor:
        raise UnsavableStateError(
            location=key,
            type_name="torch.Tensor",
            reason="two different tensors would have this name",
            cure="give one of the components another name.",
        )
    holder = {SHARD_KEY: key, "shape": list(tensor.size()), "dtype": tensor.dtype}
    if hasattr(tensor, "to_local"):
        placements: Any = tensor.placements  # type: ignore[attr-defined]
        holder["placements"] = [getattr(placement, "dim", None) for placement in placements]
    return holder


def with_placeholders(tree: Any, shards: ShardTensors) -> Any:
    """Return containers with placeholders for those of their tensors that are among the shards."""
    keys = {id(tensor): key for key, tensor in shards.items()}
    return _changed(tree, keys, functools.partial(_as_placeholder, dict(shards)))


def place_shards(
    payload: Mapping[str, Any], components: Mapping[str, Component], reader: ShardReader, only: Collection[str] | None
) -> dict[str, Any]:
    """Return a payload whose placeholders have become tensors of the live layout.

    A tensor takes the layout of the live one: its mesh and placements, whatever those of the run that saved were. Where
    this rank then holds what is one part in the directory, its memory is the file; otherwise it is put together.

    Args:
        payload: What was read of the index.
        components: The live objects.
        reader: Reads the shards.
        only: The components that are wanted; of others the tensors are left unfilled. None for all.

    Raises:
        DamagedCheckpointError: A placeholder is none, or its tensor is not in the directory.
        StateMismatchError: Nothing says how a tensor has to lie.
        OSError: From the system, as it is.
    """
    layouts = _live_layouts(payload, components)
    tensors: ShardTensors = {}

    def with_tensors(tree: Any, tensor_of: Callable[[Placeholder], torch.Tensor]) -> Any:
        def place(value: Any) -> Any:
            holder = placeholder_of(value, reader.path)
            return ENTER if holder is None else tensor_of(holder)

        return map_tree(tree, place)

    def allocated(holder: Placeholder) -> torch.Tensor:
        if holder.key not in tensors:
            tensors[holder.key] = _empty_like(_layout_of(holder, layouts), holder.shape, holder.dtype)
        return tensors[holder.key]

    with_tensors(dict(payload), allocated)
    kept = None if only is None else {*only, RESERVED_KEY}
    wanted = {
        key: tensor
        for key, tensor in tensors.items()
        if not tensor.is_meta and (kept is None or key.partition(".")[0] in kept)
    }
    for key, part in reader.read(wanted).items():
        tensors[key] = with_local_part(wanted[key], part) if hasattr(wanted[key], "to_local") else part
    return {name: with_tensors(value, lambda holder: tensors[holder.key]) for name, value in payload.items()}


def as_local_shards(payload: Mapping[str, Any], components: Mapping[str, Component]) -> dict[str, Any]:
    """Return a payload of whole tensors, as a file holds them, with this rank's parts where the live ones are sharded.

    Nothing is copied: a part is a view.

    Raises:
        StateMismatchError: Nothing says how a tensor of an optimizer lies beside its sharded parameter.
    """
    layouts = _live_layouts(payload, components)
    if not any(hasattr(live, "to_local") for live in layouts.values()):
        return dict(payload)
    unknown: list[str] = []

    def part(key: str, tensor: torch.Tensor) -> torch.Tensor:
        live = _layout_of(Placeholder(key, tensor.size(), tensor.dtype), layouts)
        parameter = None if live is not None else _sharded_owner(key, layouts)
        if parameter is not None and _is_of_some_dimensions(tensor, parameter):
            unknown.append(
                f"{key}: it is whole in the checkpoint, {list(tensor.size())}, and nothing says which part of it "
                f"belongs to a shard of its parameter, {list(parameter.size())}. Make one optimizer step before "
                "restore(): then the live optimizer has it"
            )
        return tensor if live is None or not hasattr(live, "to_local") else _part_of(tensor, live)

    result = _with_each(payload, part, everything=True)
    if unknown:
        raise StateMismatchError(mismatches=unknown)
    return result


def _owner(key: str, layouts: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    """Return the key of what a tensor is or belongs to, and the live tensor under it; None where there is none."""
    while key not in layouts and "." in key:
        key = key.rpartition(".")[0]
    return key, layouts.get(key)


def _sharded_owner(key: str, layouts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter that a tensor of an optimizer belongs to, if each rank has a part of it."""
    owner, live = _owner(key, layouts)
    sharded = any(placement.is_shard() for placement in getattr(live, "placements", ()))
    return live if owner != key and sharded else None


def _is_of_some_dimensions(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a tensor may be of dimensions of a parameter: a number for each row, a projection, all flat."""
    extents = {extent for extent in parameter.size() if extent != 1}
    return any(extent in extents for extent in tensor.size()) or 1 < tensor.numel() == parameter.numel()


def _part_of(tensor: torch.Tensor, live: Any) -> torch.Tensor:
    """Return what this rank has of a tensor when it lies as a live one does."""
    lengths, offsets = part_bounds(tensor.size(), live.device_mesh, live.placements)
    return with_local_part(live, narrowed(tensor, map(min, offsets, tensor.size()), lengths))


def narrowed(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """Return a view of an area of a tensor."""
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _live_layouts(payload: Mapping[str, Any], components: Mapping[str, Component]) -> dict[str, torch.Tensor]:
    """Return for every key a live tensor that lies as the one under it has to."""
    layouts: dict[str, torch.Tensor] = {}
    reshard(components)
    with RngStreams.untouched():
        all_captured = {name: component.capture() for name, component in components.items()}
    for name, captured in all_captured.items():
        keys = _namer(name, captured.state, {"kind": components[name].kind, **captured.record}, everything=True)
        layouts.update((keys[id(tensor)], tensor) for _, tensor in named_tensors(captured.state) if id(tensor) in keys)
    parameters = {name: p for one in components.values() for name, p in one.parameter_names().items()}
    layouts.update((join("safeckpt.grad", name), p) for name, p in parameters.items())
    for name, record in payload[RESERVED_KEY]["components"].items():
        for slot in (slot for slots in record.get("slots", ()) for slot in slots):
            if slot["name"] in parameters:  # where a moment of it lies that the live optimizer does not have yet
                layouts.setdefault(join(name, slot["name"]), parameters[slot["name"]])
    return layouts


def _layout_of(holder: Placeholder, layouts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a tensor that lies as this one has to; None for one that every rank has whole.

    That is the live one, or the parameter of its shape that it belongs to. State that a fresh object does not have yet
    lies as it was saved, on the mesh that is there now.
    """
    owner, live = _owner(holder.key, layouts)
    if owner == holder.key or (live is not None and live.size() == holder.shape):
        return live
    sharded = [one for one in layouts.values() if hasattr(one, "to_local")] if live is None else [live]
    if holder.placements is None or not any(hasattr(one, "to_local") for one in sharded):
        return None
    return _as_saved(holder, sharded)


def _as_saved(holder: Placeholder, live: list[Any]) -> torch.Tensor:
    """Return an empty tensor that is cut along the dimensions along which it was when it was saved.

    Raises:
        StateMismatchError: There are several meshes that it could lie on.
    """
    placements = holder.placements or ()
    meshes = {id(one.device_mesh): one for one in live}
    fitting = [one for one in meshes.values() if one.device_mesh.ndim == len(placements)] or list(meshes.values())
    if len({one.device_mesh for one in fitting}) > 1:
        reason = f"{holder.key}: the live objects do not have it yet, and it could lie on several meshes"
        raise StateMismatchError(mismatches=[reason])
    return sharded_like(fitting[0], holder.shape, holder.dtype, placements)


def _empty_like(live: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to read into, in host memory: a device may have no room for its state twice."""
    if live is not None and live.size() != shape:
        return torch.empty(shape, dtype=dtype, device="meta")  # the check will say so
    if live is None or not hasattr(live, "to_local"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return with_local_part(live, torch.empty_like(local_part(live), dtype=dtype, device="cpu", requires_grad=False))
