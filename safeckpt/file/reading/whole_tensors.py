"""Put the tensors of a sharded checkpoint together, in one process and one at a time.

Where the state as a payload refers to a tensor in the shards, it holds a placeholder: a dict with the key under which
`torch.distributed.checkpoint` has the tensor, its shape and its dtype.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file.reading.checkpoint_file import open_file
from safeckpt.file.reading.shard_metadata import METADATA, stored_tensors
from safeckpt.file.reading.source import Part, source_of
from safeckpt.file.tree_rebuild import CONTAINERS, Rebuild

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from safeckpt.file.reading.shard_metadata import Chunk, StoredTensor

__all__ = [
    "SHARD_KEY",
    "Placeholder",
    "ShardTensorReader",
    "iter_placeholders",
    "placeholder_of",
    "with_whole_tensors",
]

SHARD_KEY: Final = "safeckpt.shard"

_HOST: Final = torch.device("cpu")


class Placeholder(NamedTuple):
    """A tensor that is in the shards, by name.

    Attributes:
        key: Its name there.
        shape: Of the whole tensor.
        dtype: Its dtype.
        placements: For each dimension of the mesh that it lay on, the dimension of the tensor that was cut there, or
            None where every rank had all; None where it lay on none, or was saved before this was noted.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    placements: tuple[int | None, ...] | None = None


def placeholder_of(value: Any, path: object) -> Placeholder | None:
    """Return a value of a payload as a placeholder, None when it is none.

    Raises:
        DamagedCheckpointError: It says that it is one, and is not.
    """
    if not isinstance(value, dict) or SHARD_KEY not in value:
        return None
    try:
        placements = value.get("placements")
        found = Placeholder(
            str(value[SHARD_KEY]),
            torch.Size(value["shape"]),
            value["dtype"],
            None if placements is None else tuple(placements),
        )
        if not isinstance(found.dtype, torch.dtype) or any(extent < 0 for extent in found.shape):
            raise TypeError(f"{list(found.shape)} {found.dtype}")  # noqa: TRY301
        cut = [dimension for dimension in found.placements or () if dimension is not None]
        if any(dimension not in range(len(found.shape)) for dimension in cut):
            raise ValueError(f"{list(found.shape)} cut along {cut}")  # noqa: TRY301
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(
            path=path, reason=f"a placeholder in its index describes no tensor ({error})", record="safeckpt.pt"
        ) from error
    return found


class ShardTensorReader:
    """Reads the tensors of a sharded checkpoint, each whole; what the engine says about them is read once.

    Args:
        path: The directory.
        names: The files that belong to it; a reference to any other is refused.

    Raises:
        DamagedCheckpointError: What the engine says cannot be read, or contradicts itself.
        OSError: From the system, as it is.
    """

    def __init__(self, path: Path, names: Collection[str]) -> None:
        if METADATA not in names:
            raise DamagedCheckpointError(path=path, reason=f"its {METADATA} does not belong to it", record=METADATA)
        self.path = path
        self._names = frozenset(names)
        self._stored = stored_tensors(path)

    def read(self, holder: Placeholder, device: torch.device = _HOST) -> torch.Tensor:
        """Return a tensor.

        Args:
            holder: Which one.
            device: Where it goes; on `meta` nothing is read.

        Raises:
            DamagedCheckpointError: It is not there, or is not what the index says.
            OSError: From the system, as it is.
        """
        stored = self._stored.get(holder.key)
        if stored is None or stored.size != tuple(holder.shape):
            has = "is not in its shards" if stored is None else f"has shape {list(stored.size)} there"
            raise self._damaged(f"{holder.key} of shape {list(holder.shape)} {has}")
        if device.type == "meta":
            return torch.empty(holder.shape, dtype=holder.dtype, device=device)
        return self._read(holder, stored).to(device)

    def _read(self, holder: Placeholder, stored: StoredTensor) -> torch.Tensor:
        for chunk in stored.chunks:
            if chunk.file not in self._names:
                raise self._damaged(f"its {METADATA} refers to {chunk.file!r}, which does not belong to it")
            if math.prod(chunk.sizes) * holder.dtype.itemsize > chunk.length:
                raise self._damaged(f"its {METADATA} claims more of {holder.key} than {chunk.length} bytes hold")
        whole = torch.empty(holder.shape, dtype=holder.dtype, device="cpu")
        filled = torch.zeros(holder.shape, dtype=torch.bool, device="cpu") if len(stored.chunks) > 1 else None
        for chunk in stored.chunks:
            area = tuple(slice(low, low + length) for low, length in zip(chunk.offsets, chunk.sizes, strict=True))
            if filled is not None:  # as many elements as there are, and none twice: then every one is there
                if bool(filled[area].any()):
                    raise self._damaged(f"parts of {holder.key} overlap")
                filled[area] = True
            whole[area] = _part(self.path, holder.key, chunk)
        return whole

    def _damaged(self, reason: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(path=self.path, reason=reason, record=METADATA)


def _part(folder: Path, key: str, chunk: Chunk) -> torch.Tensor:
    source = source_of(folder / chunk.file)
    with contextlib.closing(source), open_file(Part(source, chunk.start, chunk.length)) as file:  # type: ignore[arg-type]
        value = file.load("cpu", checked=True)
    if not isinstance(value, torch.Tensor) or tuple(value.size()) != chunk.sizes:
        raise DamagedCheckpointError(
            path=folder, reason=f"a part of {key} is not what is written there", record=chunk.file
        )
    return value


def with_whole_tensors(
    payload: Mapping[str, Any], shards: ShardTensorReader, most_bytes: int, device: torch.device
) -> Any:
    """Return a payload with a whole tensor for each placeholder.

    Args:
        payload: What the index holds.
        shards: Reads the tensors.
        most_bytes: What all tensors together can need.
        device: Where they go.

    Raises:
        DamagedCheckpointError: A tensor is not in it, or the index claims more than is there.
    """
    holders = dict(_placeholders(payload, shards.path))
    wanted = sorted(set(holders.values()), key=lambda holder: holder.key)
    if sum(holder.shape.numel() * holder.dtype.itemsize for holder in wanted) > most_bytes:
        raise DamagedCheckpointError(
            path=shards.path, reason="its index claims more than its files hold", record="safeckpt.pt"
        )
    by_key = {holder.key: shards.read(holder, device) for holder in wanted}
    return Rebuild({identity: by_key[holder.key] for identity, holder in holders.items()}).of(payload)


def iter_placeholders(payload: Mapping[str, Any], path: object) -> Iterator[Placeholder]:
    """Yield what stands for a tensor in a payload, each once and in the order of their keys.

    Raises:
        DamagedCheckpointError: One of them describes no tensor.
    """
    yield from sorted({holder for _, holder in _placeholders(payload, path)}, key=lambda holder: holder.key)


def _placeholders(tree: Any, path: object) -> Iterator[tuple[int, Placeholder]]:
    """Yield (identity, placeholder) of each one in nested containers."""
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        if type(value) not in CONTAINERS or id(value) in seen:
            continue
        seen.add(id(value))
        holder = placeholder_of(value, path)
        if holder is not None:
            yield id(value), holder
        else:
            todo.extend(value.values() if isinstance(value, dict) else value)
