"""What a position in an epoch is relative to: described for the state dict, compared, and converted where exact."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from safeckpt.state.component import class_name

__all__ = ["CONVERTIBLE", "compare", "convert", "describe_dataloader", "describe_loader", "length_of", "rank_of"]

CONVERTIBLE = ("batch_size", "world_size")

# Options of torch's samplers that choose another order, or another number of samples, without another class.
_SAMPLER_OPTIONS = ("replacement", "shuffle", "seed", "initial_seed")

_WORDS = {
    "dataset_length": "dataset length",
    "batch_size": "batch size",
    "drop_last": "drop_last",
    "sampler": "sampler class",
    "sampler_options": "sampler options",
    "epoch_samples": "samples per epoch",
    "world_size": "world size",
    "workers": "number of workers of an iterable dataset",
    "loader": "loader class",
    "batches": "batches per epoch",
}

# What changes along with another input and says nothing more.
_IMPLIES = {
    "sampler": ("sampler_options",),
    "dataset_length": ("epoch_samples",),
    "world_size": ("epoch_samples",),
}


def length_of(obj: Any) -> int | None:
    """Return `len(obj)`, None where there is none."""
    try:
        return len(obj)
    except (TypeError, NotImplementedError):  # no __len__, or one that says it does not know
        return None


def _distributed() -> tuple[int, int]:
    """Return (world size, rank)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def rank_of(chain: list[Any]) -> int:
    """Return which rank's share this is, so that augmentation differs between ranks that share a seed."""
    return _first_int(chain, ("rank", "process_index"), _distributed()[1])


def _first_int(chain: list[Any], names: tuple[str, ...], otherwise: int) -> int:
    """Return what a sampler says of its share, under torch's name or Accelerate's."""
    values = (getattr(sampler, name, None) for sampler in chain for name in names)
    return next((value for value in values if type(value) is int), otherwise)


def describe_dataloader(dataloader: DataLoader[Any], chain: list[Any]) -> dict[str, Any]:
    """Return the inputs of a DataLoader as plain values; `chain` are its samplers, outermost first."""
    outer = chain[0] if chain else None
    options = {
        f"{class_name(sampler)}.{name}": getattr(sampler, name)
        for sampler in chain
        for name in _SAMPLER_OPTIONS
        if type(getattr(sampler, name, None)) in (bool, int)
    }
    world = _first_int(chain, ("num_replicas", "num_processes"), _distributed()[0])
    return {
        "dataset_length": length_of(dataloader.dataset),
        "batch_size": getattr(outer, "batch_size", dataloader.batch_size),
        "drop_last": getattr(outer, "drop_last", dataloader.drop_last),
        "sampler": " of ".join(class_name(sampler) for sampler in chain),
        "sampler_options": options,
        "epoch_samples": length_of(chain[-1]) if chain else None,
        "world_size": world,
    }


def describe_loader(loader: Any) -> dict[str, Any]:
    """Return the inputs of a loader that keeps its own position."""
    return {"loader": class_name(loader), "batches": length_of(loader)}


def compare(saved: dict[str, Any], live: dict[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Return one sentence for each input that differs and is not in `allowed`."""
    changed = [key for key in live if saved.get(key) != live[key]]
    implied = {consequence for key in changed for consequence in _IMPLIES.get(key, ())}
    how = " (ResumableLoader(..., convert=({!r},)) goes on at the same sample)"
    return [
        f"{_WORDS[key]}: {saved.get(key)!r} in the saved state, {live[key]!r} now"
        + (how.format(key) if key in CONVERTIBLE and live[key] else "")
        for key in changed
        if key not in implied and key not in allowed
    ]


def convert(
    saved: dict[str, Any], live: dict[str, Any], chain: list[Any], batch: int, offset: tuple[int, int]
) -> tuple[int, int] | str:
    """Return (batch number, sample) at which this rank goes on under the new inputs, or why that is not exact.

    Ranks take every n-th sample of one permutation, so `batch` batches on each of the old ranks are the first
    `samples * old ranks` of it, and the new ranks' shares line up with the rest when their number divides that.

    Args:
        saved: The inputs of the run that saved.
        live: The inputs now.
        chain: The samplers now, outermost first.
        batch: The saved position.
        offset: (batch, sample) from which the saved run counted, when it had been converted itself.
    """
    if len(chain) != 2 or type(chain[0]) is not BatchSampler or not isinstance(saved["batch_size"], int):
        return "batch size or world size changed, and only batches that the DataLoader itself makes can be converted"
    if saved["world_size"] != live["world_size"] and type(chain[1]) is not DistributedSampler:
        return "world size changed, and only the shares of a DistributedSampler can be converted"
    samples = offset[1] + (batch - offset[0]) * saved["batch_size"]
    if saved["epoch_samples"] is not None and samples >= saved["epoch_samples"]:
        samples, rest = live["epoch_samples"], 0
    else:
        samples, rest = divmod(samples * saved["world_size"], live["world_size"])
    if rest:
        return (
            f"world size: the position is after sample {samples * live['world_size'] + rest} of the epoch, which "
            f"{live['world_size']} ranks cannot share evenly"
        )
    return samples // live["batch_size"], samples
