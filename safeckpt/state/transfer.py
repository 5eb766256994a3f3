"""Fill memory with the values of a state: in a few threads, straight from where the values are.

Not torch's own threads: they meet at a barrier after every tensor, where a process that shares its cores (with data
loader workers, with the write of the checkpoint before) waits for whoever was put aside last. And not torch's own
allocation: touching fresh memory for the first time costs a page fault for every 4 KiB, several times the copy itself,
unless the system is told that large pages will do.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from safeckpt.system.libc import linux_call
from safeckpt.system.tensor_kind import is_plain
from safeckpt.system.threads import in_threads
from safeckpt.system.torch_private import copy_all

__all__ = ["Reader", "Transfer", "fresh", "has_no_copy"]

# Bytes from an address on, read into a buffer from the file that is mapped there; False when no file is.
Reader = Callable[[int, memoryview], bool]

_LARGE_BYTES = 256 << 10  # smaller tensors are copied all at once: a piece in a thread has its price as well
_PIECE_BYTES = 4 << 20
_HUGE_PAGE_BYTES = 2 << 20
# For which torch has no copy_. Named by string, since an older torch may lack one.
_COPIED_AS_BYTES = frozenset({"torch.float4_e2m1fn_x2"})


class Transfer:
    """Copies tensors.

    Args:
        read: Reads what is mapped from a file; None when all values are in memory.
    """

    def __init__(self, read: Reader | None = None) -> None:
        self._read = read

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy into the first tensor of each pair the values of the second, which has the same shape.

        Copies to or from a device may still be under way on the current stream when this returns.

        Raises:
            BaseException: From the reader, or an interrupt; some tensors are filled, others not.
        """
        small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        pieces: deque[tuple[np.ndarray, np.ndarray]] = deque()
        for target, source in pairs:
            if has_no_copy(target.dtype) and target.dtype == source.dtype:
                target, source = target.view(torch.uint8), source.view(torch.uint8)  # noqa: PLW2901 - the same memory
            if target.nbytes >= _LARGE_BYTES and _are_same_bytes(target, source):
                into, origin = _bytes_of(target), _bytes_of(source)
                starts = range(0, len(into), _PIECE_BYTES)
                pieces.extend((into[low : low + _PIECE_BYTES], origin[low : low + _PIECE_BYTES]) for low in starts)
            else:
                small[0].append(target)
                small[1].append(source)
        if small[0]:
            with torch.no_grad():
                copy_all(*small)

        def work() -> None:
            while pieces:
                try:
                    into, origin = pieces.popleft()
                except IndexError:  # another thread took the last one
                    return
                # A read from the page cache goes into the target at once; through the mapping it would also cost
                # this process the memory of the mapped pages.
                if self._read is None or not self._read(origin.ctypes.data, into.data):
                    np.copyto(into, origin)

        if pieces:
            in_threads(work, pieces.clear, name="safeckpt-copy")


@lru_cache
def has_no_copy(dtype: torch.dtype) -> bool:
    """Return whether torch cannot copy elements of a dtype, so that their bytes have to be."""
    return str(dtype) in _COPIED_AS_BYTES


def _are_same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Tell whether copying the memory copies the values."""
    return (
        is_plain(target)
        and is_plain(source)
        and target.is_cpu
        and source.is_cpu
        and target.dtype == source.dtype
        and target.stride() == source.stride()
        and _is_dense(target)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements lie side by side, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, extent in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if extent > 1 and step != expected:
            return False
        expected *= extent
    return True


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a dense tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,)).numpy()


def fresh(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory for a tensor, unfilled, that is cheap to touch for the first time."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    nbytes = tensor.untyped_storage().nbytes()
    if _madvise is not None and hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _HUGE_PAGE_BYTES:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        # Only a hint: a system that has no large pages, or none left, says no and all is as before.
        _madvise(start, tensor.data_ptr() + nbytes - start, mmap.MADV_HUGEPAGE)
    return tensor


_madvise = linux_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
