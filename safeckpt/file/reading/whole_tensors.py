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
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from safeckpt.file.reading.shard_metadata import Chunk, StoredTensor

__all__ = [
    "SHARD_KEY",
    "Placeholder",
    "iter_placeholders",
    "iter_whole",
    "placeholder_of",
    "read_whole",
    "with_whole_tensors",
]

SHARD_KEY: Final = "safeckpt.shard"

_HOST: Final = torch.device("cpu")


class Placeholder(NamedTuple):
    """A tensor that is in the shards, by name."""

    key: str
    shape: torch.Size
    dtype: torch.dtype


def placeholder_of(value: Any, path: object) -> Placeholder | None:
    """Return a value of a payload as a placeholder, None when it is none.

    Raises:
        DamagedCheckpointError: It says that it is one, and is not.
    """
    if not isinstance(value, dict) or SHARD_KEY not in value:
        return None
    try:
        found = Placeholder(str(value[SHARD_KEY]), torch.Size(value["shape"]), value["dtype"])
        if not isinstance(found.dtype, torch.dtype) or any(extent < 0 for extent in found.shape):
            raise TypeError(f"{list(found.shape)} {found.dtype}")  # noqa: TRY301
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(
            path=path, reason=f"a placeholder in its index describes no tensor ({error})", record="safeckpt.pt"
        ) from error
    return found


def iter_whole(
    folder: Path, wanted: Iterable[Placeholder], names: Collection[str], device: torch.device = _HOST
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) for each of the wanted tensors, whole; no more than one is held here at a time.

    Args:
        folder: The directory.
        wanted: The tensors.
        names: The files that belong to it; a reference to any other is refused.
        device: Where the tensors go; on `meta` nothing is read.

    Raises:
        DamagedCheckpointError: A tensor is not in it, or is not what the index says.
        OSError: From the system, as it is.
    """
    if METADATA not in names:
        raise DamagedCheckpointError(path=folder, reason=f"its {METADATA} does not belong to it", record=METADATA)
    stored = stored_tensors(folder)
    for holder in wanted:
        tensor = stored.get(holder.key)
        if tensor is None or tensor.size != tuple(holder.shape):
            has = "is not in its shards" if tensor is None else f"has shape {list(tensor.size)} there"
            reason = f"{holder.key} of shape {list(holder.shape)} {has}"
            raise DamagedCheckpointError(path=folder, reason=reason, record=METADATA)
        if device.type == "meta":
            yield holder.key, torch.empty(holder.shape, dtype=holder.dtype, device=device)
        else:
            yield holder.key, _read(folder, holder, tensor, names).to(device)


def read_whole(folder: Path, key: str, dtype: torch.dtype, names: Collection[str]) -> torch.Tensor:
    """Return one tensor, whole and in host memory, of whatever shape it has.

    Raises:
        DamagedCheckpointError: It is not there, or not what the metadata says.
        OSError: From the system, as it is.
    """
    stored = stored_tensors(folder).get(key)
    if stored is None:
        raise DamagedCheckpointError(path=folder, reason=f"{key} is not in its shards", record=METADATA)
    return _read(folder, Placeholder(key, torch.Size(stored.size), dtype), stored, names)


def _read(folder: Path, holder: Placeholder, stored: StoredTensor, names: Collection[str]) -> torch.Tensor:
    for chunk in stored.chunks:
        if chunk.file not in names:
            reason = f"its {METADATA} refers to {chunk.file!r}, which does not belong to it"
            raise DamagedCheckpointError(path=folder, reason=reason, record=METADATA)
        if math.prod(chunk.sizes) * holder.dtype.itemsize > chunk.length:
            reason = f"its {METADATA} claims more of {holder.key} than {chunk.length} bytes hold"
            raise DamagedCheckpointError(path=folder, reason=reason, record=METADATA)
    whole = torch.empty(holder.shape, dtype=holder.dtype, device="cpu")
    filled = torch.zeros(holder.shape, dtype=torch.bool, device="cpu") if len(stored.chunks) > 1 else None
    for chunk in stored.chunks:
        area = tuple(slice(low, low + length) for low, length in zip(chunk.offsets, chunk.sizes, strict=True))
        if filled is not None:  # as many elements as there are, and none twice: then every one is there
            if bool(filled[area].any()):
                reason = f"parts of {holder.key} overlap"
                raise DamagedCheckpointError(path=folder, reason=reason, record=METADATA)
            filled[area] = True
        whole[area] = _part(folder, holder.key, chunk)
    return whole


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
    payload: Mapping[str, Any], folder: Path, names: Collection[str], most_bytes: int, device: torch.device
) -> Any:
    """Return a payload with a whole tensor for each placeholder.

    Args:
        payload: What the index holds.
        folder: The directory.
        names: The files that belong to it.
        most_bytes: What all tensors together can need.
        device: Where they go.

    Raises:
        DamagedCheckpointError: A tensor is not in it, or the index claims more than is there.
    """
    holders = dict(_placeholders(payload, folder))
    wanted = sorted(set(holders.values()), key=lambda holder: holder.key)
    if sum(holder.shape.numel() * holder.dtype.itemsize for holder in wanted) > most_bytes:
        raise DamagedCheckpointError(
            path=folder, reason="its index claims more than its files hold", record="safeckpt.pt"
        )
    by_key = dict(iter_whole(folder, wanted, names, device))
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
