"""Copies of a state that outlive the call, in memory that is allocated once and used again.

Touching fresh memory costs several times the copy itself. So the buffers of the last copy are kept and filled again
as long as the state keeps its shape.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from safeckpt.state.transfer import Transfer, fresh
from safeckpt.state.tree import Cluster, cloned, clusters_of, map_tensors, named_tensors, place

__all__ = ["Staging"]


class Staging:
    """Host memory for one copy of a state."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, tree: Any) -> Any:
        """Return a copy of `tree` in host memory that shares nothing with it; the copy before is overwritten.

        Tensors that overlap in memory overlap in the copy. Device tensors go through pinned memory and the device is
        waited for: when this returns, the live tensors may change.

        Cost:
            One read and one write of the state. The first copy, and the first after the state has changed its shape,
            also allocates the memory.
        """
        clusters = clusters_of(tensor for _, tensor in named_tensors(tree))
        self._fit(clusters)
        Transfer().copy((buffer, cluster.memory()) for buffer, cluster in zip(self._buffers, clusters, strict=True))
        buffers = iter(self._buffers)
        moved = place(clusters, lambda _: next(buffers))
        for device in {cluster.device for cluster in clusters if cluster.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            # Sparse, quantised and the like have no place in a buffer: they are rare, and small.
            if id(tensor) in moved:
                return moved[id(tensor)]()
            return cloned(tensor) if tensor.device.type == "cpu" else tensor.detach().cpu()

        return map_tensors(tree, placed, copy.deepcopy)

    def _fit(self, clusters: list[Cluster]) -> None:
        """Make the buffers as many, and each of the size and dtype, as the clusters need."""
        wanted = [(cluster.numel, cluster.dtype) for cluster in clusters]
        if [(buffer.numel(), buffer.dtype) for buffer in self._buffers] != wanted:
            self._buffers = []  # freed before the new ones are made: two copies may not fit
            self._buffers = [
                torch.empty(cluster.numel, dtype=cluster.dtype, device="cpu", pin_memory=True)
                if cluster.device.type == "cuda"
                else fresh((cluster.numel,), (1,), cluster.dtype)
                for cluster in clusters
            ]
