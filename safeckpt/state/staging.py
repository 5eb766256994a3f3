"""Copies of a state that outlive the call, in memory that is allocated once and used again.

Touching fresh memory costs several times the copy itself. So the buffers of the last copy are kept and filled again
as long as the state keeps its shape, and the first ones can be made ready in the background.

Where another process is to read a copy, its buffers are in memory that is shared with it.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from safeckpt.state.transfer import Transfer, fresh
from safeckpt.state.tree import Cluster, cloned, clusters_of, local_part, map_tensors, tensors_in
from safeckpt.system.shared_memory import SharedMemory
from safeckpt.system.threads import start
from safeckpt.system.torch_private import with_local_part

__all__ = ["Staging"]

_ALIGNMENT_BYTES = 64
_MOST_SHARED = 8  # pieces of shared memory, each of which takes descriptors
_TOUCHED_BYTES = 4 << 20  # at a time, so that the thread that touches gives the others their turn

# What a buffer is good for: its length in elements, their type, and whether a device copies into it.
_Kind = tuple[int, torch.dtype, bool]
# Where a tensor is in its cluster: offset, size and stride.
_Position = tuple[int, torch.Size, tuple[int, ...]]


class Staging:
    """Host memory for one copy of a state.

    Args:
        shared: Whether it is memory that another process can map.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._make = _shared_buffers if shared else _own_buffers
        self._made = 0  # how often
        self._pid = os.getpid()
        self._layout: list[tuple[_Kind, list[_Position]]] = []
        self._places: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # by cluster: the buffer, and views of it
        self._spare: dict[_Kind, list[torch.Tensor]] = {}
        self._warming: threading.Thread | None = None

    def warm(self, tree: Any) -> None:
        """Make memory for the tensors of `tree` ready in a thread, so that the first copy does not wait for it."""
        if self._places or self._warming is not None:
            return
        kinds = [_kind_of(cluster) for cluster in clusters_of(tensors_in(tree))]

        def work() -> None:
            buffers = self._make(kinds)
            for kind in kinds:
                if self._warming is None:  # a copy was made meanwhile
                    return
                try:
                    buffer = next(buffers)
                except (RuntimeError, OSError):  # out of memory: the first copy says so
                    return
                memory = buffer.view(torch.uint8).numpy()
                for low in range(0, len(memory), _TOUCHED_BYTES):
                    memory[low : low + _TOUCHED_BYTES] = 0
                self._spare.setdefault(kind, []).append(buffer)

        self._made += 1
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
        clusters = clusters_of(map(local_part, tensors_in(tree)))
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
        for device in {cluster.device for cluster in clusters if not cluster.members[0].is_cpu}:
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
        if self._pid != os.getpid():  # a forked child, whose parent may be using what both share
            self._layout, self._places, self._spare, self._pid = [], [], {}, os.getpid()
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
            del buffer  # with others it may keep all of their memory
        self._layout, self._places, self._spare = [], [], {}  # should this be interrupted, it starts from nothing
        if self._made >= _MOST_SHARED:
            spare, self._made = {}, 0
        taken = [spare[kind].pop() if spare.get(kind) else None for kind, _ in layout]
        spare.clear()  # what does not fit is freed before more is made: two copies may not fit
        made = self._make([kind for (kind, _), reused in zip(layout, taken, strict=True) if reused is None])
        self._made += 1
        places = []
        for (_, positions), reused in zip(layout, taken, strict=True):
            buffer = next(made) if reused is None else reused
            places.append((buffer, [buffer.as_strided(size, stride, offset) for offset, size, stride in positions]))
        self._places = places
        self._layout = layout


def _kind_of(cluster: Cluster) -> _Kind:
    return cluster.numel, cluster.dtype, cluster.members[0].is_cuda


def _own_buffers(kinds: Sequence[_Kind]) -> Iterator[torch.Tensor]:
    """Yield a buffer of this process for each kind."""
    for numel, dtype, pinned in kinds:
        if pinned:
            yield torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
        else:
            yield fresh((numel,), (1,), dtype)


def _shared_buffers(kinds: Sequence[_Kind]) -> Iterator[torch.Tensor]:
    """Yield a buffer for each kind, all in one piece of shared memory, or in two where a device copies into some."""
    sizes = [numel * dtype.itemsize for numel, dtype, _ in kinds]
    ends = {False: 0, True: 0}
    starts = []
    for (_, _, pinned), size in zip(kinds, sizes, strict=True):
        starts.append(ends[pinned])
        ends[pinned] += size + -size % _ALIGNMENT_BYTES
    memories = {pinned: _shared_memory(end, pinned=pinned) for pinned, end in ends.items() if end}
    for (_, dtype, pinned), size, low in zip(kinds, sizes, starts, strict=True):
        if size:
            yield torch.frombuffer(memories[pinned], dtype=torch.uint8, count=size, offset=low).view(dtype)
        else:
            yield torch.empty(0, dtype=dtype, device="cpu")


def _shared_memory(nbytes: int, *, pinned: bool) -> SharedMemory:
    memory = SharedMemory(nbytes)
    if pinned:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.address, nbytes, 0)))
        memory.before_release = runtime.cudaHostUnregister
    return memory
