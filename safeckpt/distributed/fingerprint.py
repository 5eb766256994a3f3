"""Whether two ranks hold the same: a few bytes a rank instead of the state itself.

What a rank has of its own is compared exactly: where it is taken for equal to rank 0's, it is not saved. Large copies
that are only to be checked for drift are compared by sums, on the device where they are.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from safeckpt.file import encode, write_file
from safeckpt.state.tree import local_part, map_tensors, named_leaves
from safeckpt.system.tensor_kind import is_plain
from safeckpt.system.threads import in_threads

__all__ = [
    "SHARDED",
    "exact_digest_of",
    "fingerprints",
    "holds_same",
    "joined",
    "layout_of",
]

SHARDED = "sharded "  # with what the layout of such a tensor begins

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_SMALL_BYTES = 16 << 10  # hashed as it is
_STRETCH = 1 << 15  # integers that are summed up at a time: they, their factors and their products stay in the cache
_SHIFT = 29  # no distance between two signs: flipped together, they would cancel out in what is mixed
_AT_ONCE = 32  # stretches that a thread takes
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, and no power of anything


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
        One pass over the tensors at about a third of the speed of memory, in a few threads; on a device several passes
        there, and one synchronisation.
    """
    found: dict[str, str] = {}
    words: dict[str, np.ndarray[Any, Any]] = {}
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
        elif not leaf.is_cpu:
            sums.setdefault(leaf.device, {})[name] = _sums_on_device(_flat(leaf))
        else:
            data = _flat(leaf).view(torch.uint8).numpy()
            whole = 0 if len(data) <= _SMALL_BYTES else len(data) // 8 * 8
            found[name] += " " + hashlib.sha256(data[whole:].tobytes()).hexdigest()
            if whole:
                words[name] = data[:whole].view(np.uint64)
    texts = {name: _text_of(one) for name, one in zip(words, _sums_on_host(list(words.values())), strict=True)}
    for entries in sums.values():
        values = torch.cat(list(entries.values())).tolist()  # the device is waited for once
        for name, one in entries.items():
            texts[name] = _text_of(values[: one.numel()])
            del values[: one.numel()]
    for name, text in texts.items():
        found[name] += f" {text}"
    return found


def layout_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor; of a sharded one that, and the shape of the whole."""
    return f"{SHARDED if hasattr(tensor, 'to_local') else ''}{tensor.dtype} {list(tensor.size())}"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's elements in order, as real numbers."""
    t = tensor.detach().contiguous()
    return (torch.view_as_real(t) if t.is_complex() else t).reshape(-1)


def _sums_on_host(tensors: list[np.ndarray[Any, Any]]) -> list[list[int]]:
    """Return, for each tensor, a sum for each stretch of it: of its integers, mixed, times a factor of their place.

    Without the factors a permutation would have the same sum. The sums wrap, so that a difference in the upper half of
    an integer, such as a sign, survives only in the upper bits of a product, where two may cancel out: mixed, it is a
    difference in the lower half as well.
    """
    found = [[0] * -(-len(one) // _STRETCH) for one in tensors]
    jobs = deque((number, first) for number, sums in enumerate(found) for first in range(0, len(sums), _AT_ONCE))
    factors = _factors(torch.device("cpu")).numpy().view(np.uint64)

    def work() -> None:
        buffer = np.empty(_STRETCH, np.uint64)  # stays in the cache
        while jobs:
            try:
                number, first = jobs.popleft()
            except IndexError:
                return
            sums, words = found[number], tensors[number]
            for index in range(first, min(first + _AT_ONCE, len(sums))):
                stretch = words[index * _STRETCH : (index + 1) * _STRETCH]
                mixed = buffer[: len(stretch)]
                np.right_shift(stretch, np.uint64(_SHIFT), out=mixed)
                np.bitwise_xor(mixed, stretch, out=mixed)
                sums[index] = int(np.dot(mixed, factors[: len(stretch)]))

    in_threads(work, jobs.clear, name="safeckpt-compare")
    return found


def _sums_on_device(flat: torch.Tensor) -> torch.Tensor:
    """Return the same sums of what lies on a device; int64."""
    width = flat.element_size()
    whole = flat.numel() * width % 8 == 0 and flat.storage_offset() * width % 8 == 0
    words = flat.view(_INTEGERS[8 if whole else width])
    factors = _factors(words.device)
    sums = []
    for stretch in words.split(_STRETCH):
        wide = stretch.to(torch.int64)
        mixed = wide ^ ((wide >> _SHIFT) & ((1 << (64 - _SHIFT)) - 1))
        sums.append((mixed * factors[: wide.numel()]).sum())
    return torch.stack(sums)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return an odd number for each place, the same on every rank; int64."""
    generator = torch.Generator("cpu").manual_seed(1)  # a default device may be set
    numbers = torch.randint(-(1 << 62), 1 << 62, (_STRETCH,), generator=generator, device="cpu")
    return (numbers * 2 + 1).to(device)


def _text_of(sums: Iterable[int]) -> str:
    """Return one number for the sums of all stretches, which depends on their order."""
    total = 0
    for one in sums:
        total = (total * _MULTIPLIER + one) % (1 << 64)
    return f"{total:016x}"


class _Hash:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes
