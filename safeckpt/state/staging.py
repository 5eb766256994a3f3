"""Copies of a state that outlive the call, in memory that is allocated once and used again.

Touching fresh memory costs several times the copy itself. So the buffers of the last copy are kept and filled again
as long as the state keeps its shape, and the first ones can be made ready in the background.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

from safeckpt.state.transfer import Transfer, fresh
from safeckpt.state.tree import Cluster, cloned, clusters_of, local_part, map_tensors, named_tensors
from safeckpt.system.threads import start
from safeckpt.system.torch_private import with_local_part

__all__ = ["Staging"]

_TOUCHED_BYTES = 4 << 20  # at a time, so that the thread that touches gives the others their turn

# What a buffer is good for: its length in elements, their type, and whether a device copies into it.
_Kind = tuple[int, torch.dtype, bool]
# Where a tensor is in its cluster: offset, size and stride.
_Position = tuple[int, torch.Size, tuple[int, ...]]


class Staging:
    """Host memory for one copy of a state."""

    def __init__(self) -> None:
        self._layout: list[tuple[_Kind, list[_Position]]] = []
        self._places: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # by cluster: the buffer, and views of it
        self._spare: dict[_Kind, list[torch.Tensor]] = {}
        self._warming: threading.Thread | None = None

    def warm(self, tree: Any) -> None:
        """Make memory for the tensors of `tree` ready in a thread, so that the first copy does not wait for it."""
        if self._places or self._warming is not None:
            return
        kinds = [_kind_of(cluster) for cluster in clusters_of(tensor for _, tensor in named_tensors(tree))]

        def work() -> None:
            for kind in kinds:
                if self._warming is None:  # a copy was made meanwhile
                    return
                try:
                    buffer = _new(kind)
                except RuntimeError:  # out of memory: the first copy says so
                    return
                memory = buffer.view(torch.uint8).numpy()
                for low in range(0, len(memory), _TOUCHED_BYTES):
                    memory[low : low + _TOUCHED_BYTES] = 0
                self._spare.setdefault(kind, []).append(buffer)

        self._warming = threading.Thread(target=work, name="safeckpt-warm", daemon=True)
        start(self._warming)  # without a thread the first copy makes its own memory

    def copy(self, tree: Any) -> Any:
        """Return a copy of `tree` in host memory that shares nothing with it; the copy before is overwritten.

        Tensors that overlap in memory overlap in the copy. Device tensors go through pinned memory and the device is
        waited for: when this returns, the live tensors may change.

        Cost:
            One read and one write of the state. The first copy, and the first after the state has changed its shape,
            also allocates the memory that `warm` has not made ready.
        """
        with torch.inference_mode(mode=False):  # the buffers are filled again outside of it
            return self._copy(tree)

    def _copy(self, tree: Any) -> Any:
        clusters = clusters_of(local_part(tensor) for _, tensor in named_tensors(tree))
        self._fit(clusters)
        staged: dict[int, torch.Tensor] = {}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cluster, (buffer, views) in zip(clusters, self._places, strict=True):
            members = cluster.members
            if len(members) == 1 and members[0].is_contiguous():
                pairs.append((views[0], members[0]))
            else:
                pairs.append((buffer, cluster.memory()))
            staged.update(zip(map(id, members), views, strict=True))
        Transfer().copy(pairs)
        for device in {cluster.device for cluster in clusters if cluster.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            part = local_part(tensor)
            found = staged.get(id(part))
            if found is None:  # sparse, quantised and the like have no place in a buffer: they are rare, and small
                found = cloned(part) if part.device.type == "cpu" else part.detach().cpu()
            return found if part is tensor else with_local_part(tensor, found)

        return map_tensors(tree, placed, copy.deepcopy)

    def _fit(self, clusters: list[Cluster]) -> None:
        """Have a buffer for each cluster, and a view of it for each of its tensors."""
        if self._warming is not None:
            if self._warming.is_alive():
                self._warming.join()
            self._warming = None
        layout = [
            (
                _kind_of(cluster),
                [(int(one.storage_offset()) - cluster.start, one.size(), one.stride()) for one in cluster.members],
            )
            for cluster in clusters
        ]
        if layout == self._layout:
            return
        spare = self._spare
        for (kind, _), (buffer, _) in zip(self._layout, self._places, strict=True):
            spare.setdefault(kind, []).append(buffer)
        self._layout, self._places, self._spare = [], [], {}  # should this be interrupted, it starts from nothing
        taken = [spare[kind].pop() if spare.get(kind) else None for kind, _ in layout]
        spare.clear()  # what does not fit is freed before more is made: two copies may not fit
        places = []
        for (kind, positions), reused in zip(layout, taken, strict=True):
            buffer = _new(kind) if reused is None else reused
            places.append((buffer, [buffer.as_strided(size, stride, offset) for offset, size, stride in positions]))
        self._places = places
        self._layout = layout


def _kind_of(cluster: Cluster) -> _Kind:
    return cluster.numel, cluster.dtype, cluster.device.type == "cuda"


def _new(kind: _Kind) -> torch.Tensor:
    numel, dtype, pinned = kind
    if pinned:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    return fresh((numel,), (1,), dtype)
