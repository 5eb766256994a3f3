"""Sharded state on the engine of torch.distributed.checkpoint: the tensors go through it, the rest into the index.

In the index each of these tensors is a place holder, a dict with the key under which the engine has it. A module's
tensor has the key `component.qualified.name`, so that plain `torch.distributed.checkpoint.load` finds it as well; an
optimizer's is `optimizer.component.qualified.name.exp_avg`: by name, never by position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from safeckpt.distributed.group import Group
from safeckpt.errors import DamagedCheckpointError, UnsavableStateError
from safeckpt.file import ShardFile, shard_of
from safeckpt.state import RESERVED_KEY, Component
from safeckpt.state.tree import join, map_tensors, named_tensors

__all__ = [
    "Held",
    "holds_shards",
    "is_sharded",
    "local_parts",
    "read_shards",
    "rejoined",
    "split",
    "with_places",
    "write_shards",
]

_KEY = "safeckpt.shard"
_METADATA = ".metadata"  # of the engine

Held = dict[str, torch.Tensor]  # key to tensor


def is_sharded(payload: Mapping[str, Any]) -> bool:
    """Tell whether a captured payload holds a tensor of which each rank has a part."""
    return any(hasattr(tensor, "to_local") for _, tensor in named_tensors(payload))


def holds_shards(payload: Mapping[str, Any]) -> bool:
    """Tell whether a payload that was read is an index of shards."""
    return "files" in payload[RESERVED_KEY]


def split(payload: Mapping[str, Any]) -> tuple[dict[str, Any], Held]:
    """Return the payload with place holders, and the tensors they stand for.

    Every sharded tensor goes to the engine, and of rank 0 every other tensor of a module. Other small things, such as
    an optimizer's step counts, stay.

    Raises:
        UnsavableStateError: A sharded tensor is where no name could find it again.
    """
    held: Held = {}
    records = payload[RESERVED_KEY]["components"]
    skeleton = {
        name: _without(state, _namer(name, state, records[name]), held) for name, state in payload.items()
        if name != RESERVED_KEY
    }  # fmt: skip
    own = dict(payload[RESERVED_KEY])
    gradients = own["gradients"]
    own["gradients"] = _without(gradients, {id(t): join("safeckpt.grad", name) for name, t in gradients.items()}, held)
    skeleton[RESERVED_KEY] = own
    for name, tensor in named_tensors(skeleton):
        if hasattr(tensor, "to_local"):
            raise UnsavableStateError(
                location=name,
                type_name="DTensor",
                reason="sharded tensors are saved as parameters and buffers of modules and in the state of optimizers",
                cure="keep it in a registered module, or save full_tensor().",
            )
    return skeleton, held


def _namer(name: str, state: Any, record: Mapping[str, Any]) -> dict[int, str]:
    """Return the key of every tensor of a component that goes to the engine, by id."""
    if record["kind"] == "module":
        return {id(value): join(name, key) for key, value in state.items() if isinstance(value, torch.Tensor)}
    if record["kind"] != "optimizer" or not isinstance(state, dict) or "param_groups" not in state:
        return {}
    found: dict[int, str] = {}
    for number, slot in _numbered(state, record):
        for key, value in named_tensors(state.get("state", {}).get(number, {})):
            if hasattr(value, "to_local") or value.numel() > 1:
                found[id(value)] = join(join(name, slot), key)
    return found


def _numbered(state: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield (number under which an optimizer's state is saved, name of the parameter)."""
    for group, slots in zip(state["param_groups"], record["slots"], strict=True):
        for number, slot in zip(group["params"], slots, strict=True):
            yield number, slot["name"]


def _without(tree: Any, keys: Mapping[int, str], held: Held) -> Any:
    if not keys:
        return tree

    def place_holder(tensor: torch.Tensor) -> Any:
        key = keys.get(id(tensor))
        if key is None or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            return tensor
        held[key] = tensor
        return {_KEY: key, "shape": list(tensor.size()), "dtype": tensor.dtype}

    return map_tensors(tree, place_holder)


def with_places(payload: Mapping[str, Any], components: Mapping[str, Component]) -> tuple[dict[str, Any], Held]:
    """Return a payload whose place holders have become tensors of the live layout, not filled yet, and these.

    A tensor takes the layout of the live one: its mesh and placements, whatever those of the run that saved were.
    """
    layouts: dict[str, torch.Tensor] = {}
    for name, component in components.items():
        captured = component.capture()
        record = {"kind": component.kind, **captured.record}
        if record["kind"] == "module":
            layouts.update((join(name, key), one) for key, one in captured.state.items())
        elif record["kind"] == "optimizer" and isinstance(captured.state, dict) and "param_groups" in captured.state:
            for number, slot in _numbered(captured.state, record):
                for key, value in named_tensors(captured.state.get("state", {}).get(number, {})):
                    layouts[join(join(name, slot), key)] = value
    parameters = {name: p for one in components.values() for name, p in one.parameter_names().items()}
    layouts.update((join("safeckpt.grad", name), p) for name, p in parameters.items())
    for name, record in payload[RESERVED_KEY]["components"].items():
        for slot in (slot for slots in record.get("slots", ()) for slot in slots):
            if slot["name"] in parameters:  # where a moment of it lies that the live optimizer does not have yet
                layouts.setdefault(join(name, slot["name"]), parameters[slot["name"]])
    held: Held = {}

    def place(holder: Mapping[str, Any]) -> torch.Tensor:
        key, shape, dtype = holder[_KEY], torch.Size(holder["shape"]), holder["dtype"]
        if key not in held:
            held[key] = _empty_like(_layout_of(key, layouts), shape, dtype)
        return held[key]

    result = {name: _filled(value, place) for name, value in payload.items()}
    return result, {key: tensor for key, tensor in held.items() if not tensor.is_meta}


def _layout_of(key: str, layouts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a live tensor that lies as this one has to: itself, or the parameter that it belongs to."""
    while key not in layouts:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return layouts[key]


def _empty_like(live: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if live is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if live.size() != shape:
        return torch.empty(shape, dtype=dtype, device="meta")  # the check will say so
    if hasattr(live, "to_local"):
        return torch.empty_like(live, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device="cpu")


def _filled(tree: Any, place: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    """Return a tree with every place holder replaced; plain containers only, as they were read from the index."""
    if isinstance(tree, dict):
        if _KEY in tree:
            return place(tree)
        result = tree.copy()
        result.__dict__.update(getattr(tree, "__dict__", {})) if hasattr(tree, "__dict__") else None
        for key, value in tree.items():
            result[key] = _filled(value, place)
        return result
    if type(tree) in (list, tuple):
        return type(tree)(_filled(value, place) for value in tree)
    return tree


def local_parts(held: Held) -> Held:
    """Return what is in this process's memory of every tensor."""
    return {key: getattr(tensor, "_local_tensor", tensor) for key, tensor in held.items()}


def rejoined(held: Held, parts: Held) -> Held:
    """Return tensors that lie as those in `held` do, over copies in host memory of their local parts."""
    found: Held = {}
    for key, tensor in held.items():
        whole: Any = tensor
        if hasattr(tensor, "to_local"):  # not from_local(), which moves the part back to the device of the mesh
            found[key] = type(whole)(parts[key], whole._spec, requires_grad=False)
        else:
            found[key] = parts[key]
    return found


def write_shards(held: Held, place: Path, group: Group) -> list[ShardFile]:
    """Write the tensors of all ranks into a directory, and return what this rank has written, digests included.

    Called by all ranks at once. Every file is on the disk when this returns.

    Cost:
        Bytes of this rank's shards: written once, synced, and read back from the cache for the digest.
    """
    engine = _engine()
    if not group.leads:  # of what is not sharded the engine would take any rank's copy, and it is rank 0's that counts
        held = {key: tensor for key, tensor in held.items() if hasattr(tensor, "to_local")}
    writer = engine.FileSystemWriter(place, single_file_per_rank=True, sync_files=True)
    try:
        _quietly(engine.save, held, storage_writer=writer, group=group)
    except engine.CheckpointException as error:  # a BaseException, the same on every rank
        if group.rank in error.failures:
            raise error.failures[group.rank][0] from None
        return []  # the agreement that follows says which rank failed, and why
    mine = [*place.glob(f"__{group.rank}_*.distcp"), *([place / _METADATA] if group.leads else [])]
    return [shard_of(path) for path in sorted(mine)]


def read_shards(held: Held, place: Path, group: Group) -> None:
    """Fill tensors from a directory, each rank its part; called by all ranks at once.

    Raises:
        DamagedCheckpointError: A tensor is not in it.
    """
    engine = _engine()
    try:
        _quietly(engine.load, held, storage_reader=engine.FileSystemReader(place), group=group)
    except engine.CheckpointException as error:  # a BaseException, the same on every rank
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, OSError):
            raise first from None
        raise DamagedCheckpointError(path=place, reason=f"its shards cannot be read ({first})") from None


def _engine() -> Any:
    """Return torch.distributed.checkpoint, imported only where there are shards."""
    from torch.distributed import checkpoint  # noqa: PLC0415

    return checkpoint


def _quietly(function: Callable[..., Any], held: Held, *, group: Group, **options: Any) -> None:
    alone = group.process_group is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the engine about its own internals
        function(held, process_group=group.process_group, no_dist=alone, **options)
