"""Whether two ranks hold the same: a few bytes a rank instead of the state itself.

What a rank has of its own is compared exactly: where it is taken for equal to rank 0's, it is not saved. Large copies
that are only to be checked for drift are compared by sums, on the device where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from safeckpt.file import encode, write_file
from safeckpt.state.tree import local_part, map_tensors, named_leaves
from safeckpt.system.tensor_kind import is_plain

__all__ = [
    "SHARDED",
    "exact_digest_of",
    "fingerprints",
    "holds_same",
    "joined",
    "layout_of",
]

SHARDED = "sharded "  # with what the layout of such a tensor begins

_EXACT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_WORD = 8  # bytes
_ROWS = 63  # are summed up: an odd number, so that all signs turned are no multiple of 2**64
_STRIDES = (8191, 4093, 2039, 1021, 509, 503, 499)  # words from one row to the next: primes


def exact_digest_of(tree: Any) -> str:
    """Return a digest that is equal when, and only when, two states would be the same file.

    Cost:
        One pass over the tensors at the speed of SHA-256.
    """
    sink = _Hash()
    write_file(encode(tree), sink)
    return sink.sha.hexdigest()


def holds_same(one: Any, other: Any) -> bool:
    """Return whether two states hold the same values, bit for bit; of a sharded tensor this process's part.

    By leaf, since two equal trees may share their strings and containers differently.

    Cost:
        One pass of SHA-256 over each.
    """
    return _exact_leaves(one) == _exact_leaves(other)


def _exact_leaves(tree: Any) -> dict[str, str]:
    leaves = named_leaves(encode(map_tensors(tree, local_part)))
    return {name: f"{type(leaf).__qualname__} {exact_digest_of(leaf)}" for name, leaf in leaves}


def joined(items: Iterable[tuple[str, str]]) -> str:
    """Return one digest of named texts, whatever their order: ranks may have made the same dict in another order."""
    digest = hashlib.sha256()
    for name, text in sorted(items):
        digest.update(f"{name}\0{text}\0".encode(errors="backslashreplace"))
    return digest.hexdigest()


def fingerprints(tree: Any) -> dict[str, str]:
    """Return, for every value by its dotted name, a text that is equal for equal bits and differs for others.

    Of a sharded tensor only shape and dtype are looked at: each rank has another part of it.

    Cost:
        One pass over the tensors at the speed of memory, on the device where they are, and one synchronisation.
    """
    found: dict[str, str] = {}
    sums: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, leaf in named_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            exact = type(leaf) in _EXACT
            found[name] = f"{type(leaf).__qualname__} {leaf!r}" if exact else exact_digest_of(leaf)
            continue
        found[name] = layout_of(leaf)
        if hasattr(leaf, "to_local") or not leaf.numel():
            continue
        if not is_plain(leaf):
            found[name] += " " + exact_digest_of(leaf)
            continue
        sums.setdefault(leaf.device, {})[name] = _sums(_bytes_of(leaf), _stride_of(leaf))
    for entries in sums.values():
        data = torch.cat(list(entries.values())).cpu().numpy().data  # a device is waited for once
        for name, one in entries.items():
            found[name] += " " + hashlib.sha256(data[: len(one)]).hexdigest()
            data = data[len(one) :]
    return found


def layout_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor; of a sharded one that, and the shape of the whole."""
    return f"{SHARDED if hasattr(tensor, 'to_local') else ''}{tensor.dtype} {list(tensor.size())}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's bytes in order, beginning where a word may."""
    t = tensor.detach().contiguous()
    flat = (torch.view_as_real(t) if t.is_complex() else t).reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    return flat.view(torch.uint8)


def _stride_of(tensor: torch.Tensor) -> int:
    """Return how many words of 8 bytes apart those stand that are summed up: a prime that divides no size of a tensor.

    A step along any of its dimensions is then no multiple of it. The longer it is, the less it has to do with how a
    flat tensor is laid out; but what it leaves over is not summed up, and must be little.
    """
    most = max(509, tensor.numel() * tensor.element_size() // (4 * _ROWS * _WORD))
    return next(stride for stride in _STRIDES if stride <= most and all(size % stride for size in tensor.shape))


def _sums(data: torch.Tensor, stride: int) -> torch.Tensor:
    """Return sums of bytes, many fewer, that differ when any word of 8 bytes differs; int64, where the bytes are.

    Words are summed up that stand `stride` words apart, 63 at a time. One that differs is always seen. Several escape
    only when they are multiples of that apart, within 63 times it, and their sum is the same modulo 2**64. Rows of a
    matrix that have changed places do so only where each has moved by a multiple of `stride` rows; stretches of a flat
    tensor do where they are that many words long. Nothing here defends against who wants to deceive.
    """
    words = data[: len(data) // _WORD * _WORD].view(torch.int64)
    stretches = len(words) // (_ROWS * stride)
    full = stretches * _ROWS * stride
    rows = (len(words) - full) // stride
    rows -= rows > 0 and rows % 2 == 0
    rest = full + rows * stride
    sums = [words[rest:], data[len(words) * _WORD :].to(torch.int64)]
    if rows:
        sums.append(words[full:rest].view(rows, stride).sum(0))
    if stretches:
        sums.append(words[:full].view(stretches, _ROWS, stride).sum(1).reshape(-1))
    return torch.cat(sums)


class _Hash:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes
