"""What two copies are compared by: any number that differs is seen, and rows in another order.

What is not seen stands in the last test.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from safeckpt.distributed import fingerprint
from safeckpt.distributed.fingerprint import fingerprints

STRETCH = fingerprint._ROWS * 509


def _tensor(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _swap(one: int, other: int) -> Callable[[torch.Tensor], object]:
    def harm(tensor: torch.Tensor) -> None:
        tensor[[one, other]] = tensor[[other, one]]

    return harm


def _flip_signs(*places: int) -> Callable[[torch.Tensor], object]:
    def harm(tensor: torch.Tensor) -> None:
        tensor[list(places)] *= -1

    return harm


def _shift_value(tensor: torch.Tensor) -> None:
    _bits(tensor)[0] += 1
    _bits(tensor)[2] -= 1


HARMS: dict[str, Callable[[torch.Tensor], object]] = {
    "swapped neighbours": _swap(0, 1),
    "swapped in a word": _swap(6, 7),
    "swapped stretches": lambda tensor: tensor.copy_(tensor.roll(2 * STRETCH)),
    "swapped far apart": _swap(3, -5),
    "signs in lower halves": _flip_signs(0, 2),
    "signs in upper halves": _flip_signs(1, 3),
    "signs in upper halves far apart": _flip_signs(1, 8 * STRETCH + 1),
    "a square of signs": _flip_signs(1, 3, 2 * STRETCH + 1, 2 * STRETCH + 3),
    "all signs": lambda tensor: tensor.neg_(),
    "one more, one less": _shift_value,
    "last bit of all": lambda tensor: _bits(tensor)[-1:].bitwise_xor_(1),
    "swapped rows of a matrix": lambda tensor: tensor[: 4 * 4096].copy_(
        tensor[: 4 * 4096].view(4, -1).flip(0).view(-1)
    ),
    "reversed": lambda tensor: tensor.copy_(tensor.flip(0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [9 * STRETCH, 9 * STRETCH + 3])
def test_difference_that_leaves_a_sum_the_same_is_seen(dtype: torch.dtype, numel: int) -> None:
    """Permutations, sign flips in pairs and squares, changes that cancel out, the last bit of an odd length."""
    before = fingerprints({"x": _tensor(dtype, numel)})
    assert fingerprints({"x": _tensor(dtype, numel)}) == before
    for name, harm in HARMS.items():
        tensor = _tensor(dtype, numel)
        harm(tensor)
        assert fingerprints({"x": tensor}) != before, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
@pytest.mark.parametrize("stride", fingerprint._STRIDES)
def test_rows_that_changed_places_are_seen(dtype: torch.dtype, stride: int) -> None:
    """Also where a row is as many words long as stand between those that are summed up, or a multiple of that."""
    for multiple, rows in ((1, 3), (2, 31), (4, 7), (63, 2)):
        before = torch.zeros(rows, multiple * stride * 8 // dtype.itemsize, dtype=dtype)
        before[0], before[1] = 1, 2
        seen = fingerprints({"x": before})
        for after in (before.flip(0), before.roll(1, 0)):
            assert fingerprints({"x": after}) != seen, (multiple, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 3, 3054), (40, 2036), (3, 1018, 50), (509, 521), (4, 499 * 503), (2, 8191 * 8)])
def test_roll_along_any_dimension_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """By one, and by as many as stand between those that are summed up."""
    before = _tensor(dtype, math.prod(shape)).view(shape)
    seen = fingerprints({"x": before})
    for dim, size in enumerate(shape):
        for shift in {1, 2, 509, 1018, 2036, 4072, 8191 * 2}:
            if shift % size:
                assert fingerprints({"x": before.roll(shift, dim)}) != seen, (dim, shift)


@pytest.mark.parametrize("numel", [1, 7, 510, 1018, 1530, 2545, 20_000, 2 * STRETCH, 2 * STRETCH + 1020])
def test_any_word_that_differs_is_seen(numel: int) -> None:
    """Also the last one, and where not all rows or columns are full; all signs turned, too."""
    before = fingerprints({"x": _tensor(torch.float64, numel)})
    for place in {0, numel // 2, max(0, numel - 510), numel - 1}:
        tensor = _tensor(torch.float64, numel)
        _bits(tensor)[place] ^= 1 << 40
        assert fingerprints({"x": tensor}) != before, place
    assert fingerprints({"x": -_tensor(torch.float64, numel)}) != before


def test_memory_that_starts_anywhere_is_compared() -> None:
    """A view whose first byte stands at no multiple of eight has the fingerprint of its values."""
    tensor = _tensor(torch.float32, 2 * STRETCH + 1)
    assert fingerprints({"x": tensor[1:]}) == fingerprints({"x": tensor[1:].clone()})


def test_stretches_of_a_flat_tensor_that_changed_places_are_not_seen() -> None:
    """What the comparison does not see: only a move by the very prime that the size has led to."""
    before = _tensor(torch.float64, 4 * fingerprint._ROWS * 1021 + 1)
    seen = fingerprints({"x": before})
    for length, is_seen in ((1021, False), (1018, True), (509, True)):
        moved = torch.cat([before[length : 2 * length], before[:length], before[2 * length :]])
        assert (fingerprints({"x": moved}) != seen) == is_seen, length
