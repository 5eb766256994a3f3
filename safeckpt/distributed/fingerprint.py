"""Whether two ranks hold the same: a few bytes a rank instead of the state itself.

What a rank has of its own is compared exactly: where it is taken for equal to rank 0's, it is not saved. Large copies
that are only to be checked for drift are compared by sums at the speed of memory, on the device where they are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
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
    "layouts_of",
]

SHARDED = "sharded "  # with what the layout of such a tensor begins

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_SMALL_BYTES = 16 << 10  # hashed as it is
_FACTORS = 1 << 17  # integers that are summed up at a time: they and their products stay in the cache


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


def layouts_of(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, layout) of every tensor."""
    for name, leaf in named_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield name, layout_of(leaf)


def fingerprints(tree: Any) -> dict[str, str]:
    """Return, for every value by its dotted name, a text that is equal for equal bits and differs for others.

    Of a sharded tensor only shape and dtype are looked at: each rank has another part of it.

    Cost:
        Two to five passes over the tensors at the speed of memory, on their device, and one synchronisation per device.
    """
    found: dict[str, str] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
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
        elif leaf.is_cpu and leaf.nbytes <= _SMALL_BYTES:
            found[name] += " " + hashlib.sha256(memoryview(_flat(leaf).view(torch.uint8).numpy())).hexdigest()  # type: ignore[arg-type]  # NumPy's stubs
        else:
            sums.setdefault(leaf.device, []).append((name, _two_sums(_words(_flat(leaf)))))
    for entries in sums.values():
        values = torch.stack([value for _, value in entries]).tolist()  # the device is waited for once
        for (name, _), value in zip(entries, values, strict=True):
            found[name] += f" {value}"
    return found


def layout_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor; of a sharded one that, and the shape of the whole."""
    return f"{SHARDED if hasattr(tensor, 'to_local') else ''}{tensor.dtype} {list(tensor.size())}"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's elements in order, as real numbers."""
    t = tensor.detach().contiguous()
    return (torch.view_as_real(t) if t.is_complex() else t).reshape(-1)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as the widest integers that it can be read as."""
    width = flat.element_size()
    whole = flat.numel() * width % 8 == 0 and flat.storage_offset() * width % 8 == 0
    return flat.view(_INTEGERS[8 if whole else width])


def _two_sums(words: torch.Tensor) -> torch.Tensor:
    """Return two sums over integers that wrap, each times a factor of its place.

    Without the factors a permutation would have the same sum. A difference in the upper half of an integer survives
    only in the upper bits of a product, where two of them may cancel out: so the upper halves have a sum of their own.
    """
    pieces = words.split(_FACTORS)
    halves = 4 * words.element_size()
    sums = [
        torch.stack([(piece * factors).sum(), ((piece >> halves) * factors).sum()])
        for piece in pieces
        for factors in (_factors(words.device, 1)[: piece.numel()],)
    ]
    return (torch.stack(sums, dim=1) * _factors(words.device, 2)[: len(sums)]).sum(dim=1)


@functools.cache
def _factors(device: torch.device, seed: int) -> torch.Tensor:
    """Return an odd number for each place, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(seed)  # a default device may be set
    numbers = torch.randint(-(1 << 62), 1 << 62, (_FACTORS,), generator=generator, device="cpu")
    return (numbers * 2 + 1).to(device)


class _Hash:
    """A file that keeps nothing but the hash of what is written to it."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha.update(data)
        return memoryview(data).nbytes
