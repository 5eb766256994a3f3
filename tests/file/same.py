"""Compare what was saved with what was loaded, bit for bit."""

import math
from collections import Counter, OrderedDict

import torch


def raw_bytes(tensor):
    """Return the elements of a strided tensor as they lie in memory, in logical order."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    view = torch.empty(0, dtype=bits[tensor.element_size()])
    view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return view.contiguous().view(-1).numpy().tobytes()


def assert_same_tensor(got, want):
    assert type(got) is type(want)
    assert (got.dtype, got.layout, got.shape, got.requires_grad) == (
        want.dtype,
        want.layout,
        want.shape,
        want.requires_grad,
    )
    if want.layout is not torch.strided:
        parts = {
            torch.sparse_coo: ("_indices", "_values"),
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
            torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
            torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
            torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
        }[want.layout]
        for part in parts:
            assert_same_tensor(getattr(got.detach(), part)(), getattr(want.detach(), part)())
        return
    if want.is_quantized:
        assert got.qscheme() == want.qscheme()
        assert torch.equal(got.dequantize(), want.dequantize())
        return
    assert (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg())
    assert raw_bytes(got) == raw_bytes(want)


def assert_same(got, want, seen=None):
    """Assert that two trees are equal in types, values and bits; NaN equals NaN, -0.0 is not 0.0."""
    seen = {} if seen is None else seen
    if id(want) in seen:
        assert seen[id(want)] is got or isinstance(want, (int, float, str, bytes, complex, tuple, type(None)))
        return
    seen[id(want)] = got
    if isinstance(want, torch.Tensor):
        assert_same_tensor(got, want)
        for name, value in want.__dict__.items():
            assert_same(got.__dict__[name], value, seen)
        return
    assert type(got) is type(want), (got, want)
    if isinstance(want, (dict, OrderedDict, Counter)):
        assert len(got) == len(want)
        for (got_key, got_value), (key, value) in zip(got.items(), want.items(), strict=True):
            assert_same(got_key, key, {})
            assert_same(got_value, value, seen)
        if isinstance(want, OrderedDict):
            assert got.__dict__.keys() == want.__dict__.keys()
            for name, value in want.__dict__.items():
                assert_same(got.__dict__[name], value, seen)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs, seen)
    elif isinstance(want, set):  # elements may be tensors, which are equal to themselves alone
        assert sorted(map(repr, got)) == sorted(map(repr, want))
    elif isinstance(want, torch.TypedStorage):
        assert got.dtype == want.dtype
        assert got._untyped_storage.tolist() == want._untyped_storage.tolist()
    elif isinstance(want, float):
        assert math.isnan(got) if math.isnan(want) else (got, math.copysign(1, got)) == (want, math.copysign(1, want))
    elif isinstance(want, complex):
        assert_same([got.real, got.imag], [want.real, want.imag])
    else:
        assert got == want
