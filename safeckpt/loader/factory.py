"""What may be wrapped, and which source it becomes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from safeckpt.loader.iterable_source import IterableSource
from safeckpt.loader.map_source import MapSource
from safeckpt.loader.source import Source
from safeckpt.loader.stateful_source import StatefulSource
from safeckpt.state.component import class_name
from safeckpt.system.torch_private import iterates_as_torch_does

__all__ = ["make_source"]


def make_source(loader: Any) -> Source:
    """Return the source for what the user gave.

    Raises:
        TypeError: It is neither a DataLoader nor a loader with state_dict and load_state_dict.
        ValueError: Its batches come in no defined order.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and hasattr(loader, "__iter__"):
        if hasattr(loader, "base_dataloader"):
            raise TypeError(_of_accelerate(loader))
        return StatefulSource(loader)
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "ResumableLoader takes a torch.utils.data.DataLoader, or a loader with state_dict and load_state_dict; "
            f"got {class_name(loader)}. Of a loader that only moves or changes batches (of Fabric, a prefetcher): wrap "
            "the DataLoader that is inside it, and put the rest around the ResumableLoader"
        )
    if hasattr(loader, "base_dataloader"):
        raise TypeError(_of_accelerate(loader))
    cls = type(loader)
    if not iterates_as_torch_does(cls):
        raise TypeError(
            f"{cls.__qualname__} iterates in its own way, which ResumableLoader would bypass: wrap a plain DataLoader, "
            "then put the rest around the ResumableLoader"
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise TypeError(
            "the dataset is a DataPipe, which keeps shuffle state that no loader can reach: use a plain Dataset or "
            "IterableDataset, or a loader with state_dict"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError("in_order=False gives batches in the order of arrival, which no resume can repeat")
    return IterableSource(loader) if isinstance(loader.dataset, IterableDataset) else MapSource(loader)


def _of_accelerate(loader: Any) -> str:
    return (
        f"{class_name(loader)} is a loader that Accelerate has prepared: it fetches a batch ahead and moves the "
        "process's random streams, so its position cannot be kept. Wrap what it was made of, whose batches are shared "
        "out among the ranks already, ResumableLoader(loader.base_dataloader), and move each batch to the device "
        "yourself"
    )
