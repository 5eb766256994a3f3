"""The state that each rank has for itself: random streams, positions, and whatever else differs from rank 0's.

The payload that rank 0 captured is the checkpoint: what ranks share is in it once. What rank n has otherwise is::

    {"rng": {...}, "states": {component: state}, "buffers": {module: {key: tensor}},
     "losses": {optimizer: {number: loss}}, "records": {component: record}, "environment": {...}, "gradients": {...},
     "recent_losses": {...}}

Random streams, and the losses by which the next one is judged, are always there; anything else only where it differs
from rank 0's. In a file, which rank 0 writes, the payload holds them all, `"safeckpt": {..., "world_size": n, "ranks":
[state of rank 1, state of rank 2, ...]}`. In a directory each is a tensor of bytes under the key `safeckpt.rank.<n>`,
which rank n writes into its own file and reads by itself: the index does not grow with the ranks. One process alone
writes neither; its file is what it always was.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from safeckpt.distributed.comparison import STAGE
from safeckpt.distributed.fingerprint import SHARDED, exact_digest_of, fingerprints, joined, layout_of
from safeckpt.distributed.stages import Names, stage_of, without_others
from safeckpt.errors import DamagedCheckpointError, StateMismatchError
from safeckpt.file import encode, iter_placeholders, open_file, write_file
from safeckpt.state import RESERVED_KEY, Component, capture
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.tree import join, map_tensors, named_tensors

__all__ = [
    "digests_of",
    "layout_digests_of",
    "pack_rank_state",
    "payload_of_rank",
    "rank_key",
    "rank_state_of",
    "replica_fingerprints",
    "replica_layouts",
    "with_world",
]

_PACKED_BYTES = 4096  # a multiple of it: numbers that grow must not give the tensor another shape at each save
_LENGTH_BYTES = 8
_OF_A_FILE = b"PK\x03\x04"  # a length of that many bytes there cannot be

_OF_THE_WORLD = frozenset({"world_size", "own_gradients", "ranks", STAGE})
# Ranks that train one model hold equal states of these; of everything else each may have its own.
_REPLICATED = frozenset({"module", "optimizer", "scheduler", "scaler"})
_OF_EACH_RANK = ("rng", "recent_losses")  # never the same
_LOSS = "prev_loss"  # of L-BFGS, in the state of its first parameter


def _is_buffer(record: Mapping[str, Any], key: str, value: Any) -> bool:
    """Tell whether a module's entry is a buffer: DDP gives those of rank 0 to all at the next forward, FSDP never."""
    return key not in record["requires_grad"] and not hasattr(value, "to_local")


def _split(payload: Mapping[str, Any], name: str) -> tuple[Any, dict[Any, Any]]:
    """Return (what replicas share of a component's state, what each may have of its own all the same).

    The latter are a module's buffers by key, and by number of the parameter the loss that L-BFGS keeps of this rank.
    """
    record = payload[RESERVED_KEY]["components"][name]
    state = payload[name]
    if record["kind"] == "module":
        buffers = {key: value for key, value in state.items() if _is_buffer(record, key, value)}
        return {key: value for key, value in state.items() if key not in buffers}, buffers
    if record["kind"] == "optimizer" and isinstance(state, dict) and isinstance(state.get("state"), dict):
        entries = state["state"]
        losses = {
            n: one[_LOSS] for n, one in entries.items() if isinstance(one, dict) and type(one.get(_LOSS)) is float
        }
        if losses:
            without = {n: {k: v for k, v in one.items() if k != _LOSS} for n, one in entries.items() if n in losses}
            return {**state, "state": {**entries, **without}}, losses
    return state, {}


def _replicas(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ranks that train one model hold equal copies of, by component."""
    records = payload[RESERVED_KEY]["components"]
    return {name: _split(payload, name)[0] for name, record in records.items() if record["kind"] in _REPLICATED}


def _pieces(payload: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return what each rank may have of its own, by (part of a rank's state, component in it)."""
    reserved = payload[RESERVED_KEY]
    local = {name: grad for name, grad in reserved["gradients"].items() if not hasattr(grad, "to_local")}
    found: dict[tuple[str, str], Any] = {("environment", ""): reserved["environment"], ("gradients", ""): local}
    for name, record in reserved["components"].items():
        state, other = _split(payload, name)
        found["records", name] = record
        if record["kind"] not in _REPLICATED:
            found["states", name] = state
        if other:
            found["buffers" if record["kind"] == "module" else "losses", name] = other
    return found


def digests_of(payload: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for every piece of a captured payload that may differ between ranks.

    Beside the pieces: which tensors there are in what is replicated, under `#` the plain ones and under `#` with the
    stage the sharded ones; and the stage itself.

    Cost:
        One pass or two over the tensors that more than one rank has, and one of SHA-256 over what ranks may have of
        their own.
    """
    stage = stage_of(payload)
    found = layout_digests_of(payload)
    for name, replica in _replicas(payload).items():  # ranks of another stage have no copies of it
        found[f"={name} {stage}"] = joined(fingerprints(replica).items())
    for (part, component), piece in _pieces(payload).items():
        found[f"{part} {component}".strip()] = exact_digest_of(_without_shards(piece))
    for place, shards in _copies_of_shards(payload).items():
        found[f"{place} {stage}"] = joined(fingerprints(shards).items())
    return found


def layout_digests_of(payload: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the digests that say which tensors there are: no values are looked at."""
    stage = stage_of(payload)
    layouts = replica_layouts(payload, stage)
    found = {STAGE: stage}
    found["#"] = joined((name, layout) for name, layout in layouts.items() if not layout.startswith(SHARDED))
    found[f"# {stage}"] = joined((name, layout) for name, layout in layouts.items() if layout.startswith(SHARDED))
    return found


def _without_shards(piece: Any) -> Any:
    """Return a piece with a text in the place of each sharded tensor, of which each rank has another part."""
    return map_tensors(piece, lambda tensor: layout_of(tensor) if hasattr(tensor, "to_local") else tensor)


def replica_layouts(payload: Mapping[str, Any], stage: str) -> dict[str, str]:
    """Return dtype and shape of every tensor in what is replicated, by name: the same on every rank.

    Sharded ones are the same on every rank of a stage. An optimizer's small values are left out: they are compared by
    value, and go where the parameter's name goes.
    """
    reserved = payload[RESERVED_KEY]
    found: dict[str, str] = {}
    tensors = [(join("gradient", name), one) for name, one in reserved["gradients"].items() if hasattr(one, "to_local")]
    for name, record in reserved["components"].items():
        if record["kind"] in _REPLICATED:
            found[name] = record["kind"]
            tensors += [
                (key, one)
                for key, one in named_tensors(payload[name], name)
                if record["kind"] != "optimizer" or hasattr(one, "to_local") or one.numel() > 1
            ]
    for name, tensor in tensors:
        found[f"{name} @{stage[:8]}" if hasattr(tensor, "to_local") else name] = layout_of(tensor)
    return found


def _copies_of_shards(payload: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the local parts that other ranks have as well, by what they are a part of: `~` and where in the mesh.

    Ranks that stand at the same place of the dimensions that shard hold the same part (HSDP, and whatever tensor
    parallelism leaves whole). How far apart ranks are along a dimension tells meshes of one model from each other.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named_tensors({key: value for key, value in payload.items() if key != RESERVED_KEY}):
        if not hasattr(tensor, "to_local"):
            continue
        sharded: Any = tensor
        mesh = sharded.device_mesh
        place, parts = [], 1
        for dimension, placement in enumerate(sharded.placements):
            if placement.is_replicate():
                place.append("R")
            else:
                line = [slice(None) if other == dimension else 0 for other in range(mesh.ndim)]
                ranks = mesh.mesh[tuple(line)].tolist()
                apart = ranks[1] - ranks[0] if len(ranks) > 1 else 0
                place.append(f"{placement}@{mesh.get_local_rank(dimension)}/{len(ranks)}*{apart}")
                parts *= len(ranks)
        if parts < torch.distributed.get_world_size():
            found.setdefault("~" + " ".join(place), {})[name] = sharded.to_local()
    return found


def replica_fingerprints(payload: Mapping[str, Any]) -> dict[str, str]:
    """Return one fingerprint for each value that replicas share, to find out which of them differ."""
    found = fingerprints(_replicas(payload))
    for place, shards in _copies_of_shards(payload).items():
        found.update((f"{name} {place[1:]}", text) for name, text in fingerprints(shards).items())
    return found


def rank_state_of(payload: Mapping[str, Any], digests: Mapping[str, str], first: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank has otherwise than rank 0.

    Args:
        payload: What this rank captured.
        digests: Its digests.
        first: Those of rank 0.
    """
    mine = payload[RESERVED_KEY]
    own: dict[str, Any] = {name: mine[name] for name in _OF_EACH_RANK if name in mine}
    if digests[STAGE] != first[STAGE]:
        own[STAGE] = digests[STAGE]
    for (part, component), piece in _pieces(payload).items():
        name = f"{part} {component}".strip()
        if digests[name] == first.get(name):
            continue
        if component:
            own.setdefault(part, {})[component] = piece
        else:
            own[part] = piece
    return own


def rank_key(rank: int) -> str:
    """Return the key under which a directory holds the state of a rank."""
    return f"{RESERVED_KEY}.rank.{rank}"


def pack_rank_state(state: dict[str, Any]) -> torch.Tensor:
    """Return the state of a rank as a tensor of bytes: how many, then those of a file of ours, then zeros.

    Returns:
        uint8, on the CPU, a multiple of 4 KiB.
    """
    buffer = io.BytesIO()
    buffer.seek(_LENGTH_BYTES)
    size = write_file(encode(state, root="payload"), buffer).size_bytes
    data = bytearray(buffer.getbuffer())
    data[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "little")
    data.extend(bytes(-len(data) % _PACKED_BYTES))
    return torch.frombuffer(data, dtype=torch.uint8)


def unpack_rank_state(packed: torch.Tensor, rank: int, path: object) -> dict[str, Any]:
    """Return the state of a rank that `pack_rank_state` packed.

    Raises:
        DamagedCheckpointError: It is something else.
    """
    data = packed.numpy().tobytes()
    if not data.startswith(_OF_A_FILE):  # else it is of a release that wrote no length
        data = data[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")]
    with open_file(io.BytesIO(data)) as file:
        file.verify()
        state = file.load("cpu")
    if not isinstance(state, dict) or not isinstance(state.get("rng"), dict):
        raise DamagedCheckpointError(path=path, reason=f"its state of rank {rank} is not one", record=rank_key(rank))
    return state


def with_world(
    payload: Mapping[str, Any],
    size: int,
    *,
    own_gradients: bool,
    stage: str,
    rank_states: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the payload of a checkpoint of several ranks.

    Args:
        payload: That of rank 0.
        size: How many ranks there are.
        own_gradients: Whether the ranks have different gradients.
        stage: That of rank 0.
        rank_states: What each rank but rank 0 has otherwise, in their order; None where each writes its own.
    """
    world: dict[str, Any] = {"world_size": size, "own_gradients": own_gradients}
    if rank_states is None:
        world[STAGE] = stage
    else:
        world["ranks"] = rank_states
    return {**payload, RESERVED_KEY: {**payload[RESERVED_KEY], **world}}


def payload_of_rank(
    payload: Mapping[str, Any],
    components: Mapping[str, Component],
    rank: int,
    size: int,
    *,
    path: object,
    read: Callable[[str], torch.Tensor] | None = None,
) -> tuple[dict[str, Any], list[str], Names]:
    """Return the payload as one rank restores it, what is not as it was because of another number of ranks, and names.

    The names are those of what this rank has not and others have, unless none does: see `refuse_left_over`.

    A rank that was there when it was saved has its own streams, positions and records back. One that was not takes
    rank 0's, but keeps the random streams and private generators that its script has made: with those of rank 0 two
    ranks would draw the same numbers.

    Args:
        payload: What was read.
        components: The live objects.
        rank: This rank.
        size: How many there are now.
        path: The checkpoint, for errors.
        read: Returns the tensor under a key of a directory; None for a file.

    Raises:
        StateMismatchError: Each rank had gradients of its own, which are for that number of ranks only; or shards in
            an object of its own, which are for that stage only.
        DamagedCheckpointError: The state of this rank cannot be read.
    """
    saved = payload[RESERVED_KEY]
    world = saved.get("world_size", 1)
    if world != size and saved.get("own_gradients", False):
        reason = (
            f"gradients: saved within an accumulation, with different ones on each of {world} ranks, and now there are "
            f"{size}; restore a step after which nothing was accumulated, or with {world} ranks"
        )
        raise StateMismatchError(mismatches=[reason], path=path)
    result, left_out = dict(payload), Names()
    reserved = result[RESERVED_KEY] = {key: value for key, value in saved.items() if key not in _OF_THE_WORLD}
    mine: dict[str, Any] = {}
    if 0 < rank < world:
        mine = saved["ranks"][rank - 1] if read is None else unpack_rank_state(read(rank_key(rank)), rank, path)
    if size > 1:
        live = capture(components).payload
        result, left_out = without_others(result, live)
        reserved = result[RESERVED_KEY]
        stage = mine.get(STAGE, saved.get(STAGE))
        if stage is not None and stage != stage_of(live):
            mine = mine and {**mine, "records": _records_but(mine, reserved["components"], {"module", "optimizer"})}
            _refuse_sharded({**result, **mine.get("states", {})}, reserved["components"], path)
        elif STAGE in mine:  # the state is numbered as the whole one is
            mine = {**mine, "records": _records_but(mine, reserved["components"], {"optimizer"})}
    if mine:
        _overlay(result, reserved, mine)
    if rank >= world:
        reserved["rng"] = RngStreams.capture()
        records = reserved["components"] = dict(reserved["components"])
        for name, component in components.items():
            if name in records and records[name]["kind"] == "generator" == component.kind:
                captured = component.capture()
                result[name], records[name] = captured.state, {"kind": component.kind, **captured.record}
    return result, [] if world == size else [_changed(world, size)], left_out


def _records_but(mine: Mapping[str, Any], records: Mapping[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    return {name: one for name, one in mine.get("records", {}).items() if records[name]["kind"] not in kinds}


def _refuse_sharded(states: Mapping[str, Any], records: Mapping[str, Any], path: object) -> None:
    """Refuse shards in objects of which nobody but the rank that saved them knows the parts."""
    found = [
        f"{name}: it holds shards of another stage than this rank has now"
        for name, record in records.items()
        if record["kind"] not in _REPLICATED and any(iter_placeholders({name: states[name]}, path))
    ]
    if found:
        raise StateMismatchError(mismatches=found, path=path)


def _overlay(result: dict[str, Any], reserved: dict[str, Any], mine: Mapping[str, Any]) -> None:
    reserved.update({name: mine[name] for name in _OF_EACH_RANK if name in mine})
    reserved["environment"] = mine.get("environment", reserved["environment"])
    if "gradients" in mine:  # also where it has none and rank 0 has one; the parts of sharded ones are placeholders
        sharded = {name: grad for name, grad in reserved["gradients"].items() if not isinstance(grad, torch.Tensor)}
        reserved["gradients"] = {**sharded, **mine["gradients"]}
    reserved["components"] = {**reserved["components"], **mine.get("records", {})}
    result.update(mine.get("states", {}))
    for name, buffers in mine.get("buffers", {}).items():
        state = result[name].copy()
        state.__dict__.update(getattr(result[name], "__dict__", {}))  # an OrderedDict's _metadata
        state.update(buffers)
        result[name] = state
    for name, losses in mine.get("losses", {}).items():
        entries = result[name]["state"]
        kept = {number: {**entries[number], _LOSS: loss} for number, loss in losses.items()}
        result[name] = {**result[name], "state": {**entries, **kept}}


def _changed(world: int, size: int) -> str:
    if size > world:
        who = f"rank {world}" if size == world + 1 else f"ranks {world} to {size - 1}"
        what = f"{who} keep the random streams of their script and take over what else rank 0 has of its own"
    else:
        what = f"the random streams of {world - size} rank(s) are left out"
    return f"world_size: {world} -> {size} ({what}, and sums over ranks are made in another order)"
