"""The guard's engine: every dtype and layout against a naive look at each element."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safeckpt import NonFiniteTensor, UnsavableStateError, find_nonfinite
from safeckpt.state import nonfinite
from tests.state.tensors import COMPLEX, DTYPES, FLOATING, TORCH_WARNINGS, Named

NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)


def is_nan(value):
    return math.isnan(value.real) or math.isnan(value.imag)


def is_inf(value):
    return not is_nan(value) and (math.isinf(value.real) or math.isinf(value.imag))


def wide(tensor):
    """Return the tensor in a dtype of which every element can be read."""
    if tensor.is_complex():
        return tensor.resolve_conj().to(torch.complex128)
    return tensor.to(torch.float32) if tensor.dtype.itemsize < 4 else tensor


def naive(name, tensor):
    """Look at each element by itself; return what `find_nonfinite` has to."""
    values = wide(tensor)
    nan = inf = 0
    first = None
    for index in itertools.product(*map(range, values.shape)):
        value = values[index].item()
        nan += is_nan(value)
        inf += is_inf(value)
        if first is None and (is_nan(value) or is_inf(value)):
            first = index
    return [] if first is None else [NonFiniteTensor(name, nan, inf, tensor.numel(), first)]


def found(tensor):
    return find_nonfinite({"t": tensor})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_zero_bytes_is_finite_in_every_dtype(dtype):
    """Every dtype that torch has is looked at, or known to hold no NaN; none makes the guard fail."""
    if "q" in str(dtype):
        flat = torch._empty_affine_quantized([4], scale=1.0, zero_point=0, dtype=dtype)
        flat = flat if dtype in (torch.quint4x2, torch.quint2x4) else flat.fill_(0)
    else:
        flat = torch.zeros(4 * max(dtype.itemsize, 1), dtype=torch.uint8).view(dtype)
    assert found(flat) == []
    assert found(flat[:0]) == []


@pytest.mark.parametrize("dtype", FLOATING + COMPLEX, ids=str)
def test_nonfinite_elements_are_counted_in_every_dtype(dtype):
    """Counts and first index of each floating and complex dtype are those of a look at every element."""
    values = torch.tensor([1.0, 0.0, NAN, INF, -INF, NAN, 2.0])
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    tensor = values.to(dtype)
    expected = naive("t", tensor)
    assert expected
    assert found(tensor) == expected
    assert found(tensor.reshape(7, 1).expand(7, 3)) == naive("t", tensor.reshape(7, 1).expand(7, 3))
    assert found(torch.zeros(3).to(dtype)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 2**12 - 1, 2**12, 2**12 + 1, 2**18 + 3, 2**22 + 5])
def test_one_bad_element_is_found_at_the_edges_of_every_batch(dtype, size):
    """A single NaN is found wherever it stands, in tensors just below and above the sizes that are treated alike."""
    for position in sorted({0, size // 2, size - 1}):
        tensor = torch.zeros(size)
        tensor[position] = NAN
        assert found(tensor.to(dtype)) == [NonFiniteTensor("t", 1, 0, size, (position,))]


# -- dense tensors of any form --------------------------------------------------------------------------------------

SPECIAL = st.sampled_from([0.0, 1.0, -2.0, NAN, INF, -INF])


@st.composite
def dense(draw):
    """Draw a tensor with values anywhere, seen through views of every kind."""
    dtype = draw(st.sampled_from([*FLOATING, torch.complex64, torch.complex128]))
    size = draw(st.lists(st.integers(1, 4), max_size=4))
    numel = math.prod(size)
    values = torch.tensor(draw(st.lists(SPECIAL, min_size=numel, max_size=numel)))
    if dtype.is_complex:
        imaginary = torch.tensor(draw(st.lists(SPECIAL, min_size=numel, max_size=numel)))
        values = torch.complex(values, imaginary)
    tensor = values.reshape(size).to(dtype)
    for view in draw(st.lists(st.sampled_from(sorted(VIEWS)), max_size=3)):
        tensor = VIEWS[view](tensor)
    return tensor


def _overlapping(t):
    """Windows over the memory of a flat tensor: elements share memory."""
    return t if t.dim() != 1 or t.numel() < 3 else t.unfold(0, 2, 1)


def _with_holes(t):
    return t.as_strided((t.size(0) // 2 or 1,), (2,)) if t.dim() == 1 and t.is_contiguous() and t.numel() else t


VIEWS = {
    "conj": lambda t: t.conj() if t.is_complex() else t,
    "every other": lambda t: t[::2] if t.dim() else t,
    "expand": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "holes": _with_holes,
    "inner expand": lambda t: t.unsqueeze(-1).expand(*t.shape, 2),
    "neg": lambda t: torch._neg_view(t) if t.dtype.itemsize >= 4 else t,
    "overlap": _overlapping,
    "overlap both": lambda t: t.as_strided((2, 2), (1, 1)) if t.is_contiguous() and t.numel() > 2 else t,
    "permute": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "tail": lambda t: t[1:] if t.dim() else t,
}


@settings(max_examples=200, deadline=None)
@given(dense())
@example(torch.tensor(NAN))
@example(torch.tensor([]))
@example(torch.tensor([1.0, NAN, 1.0, NAN])[::2])
def test_dense_tensor_of_any_form_is_counted_exactly(tensor):
    """For views of every kind, counts and first index are those of a look at every element."""
    assert found(tensor) == naive("t", tensor)


@settings(max_examples=40, deadline=None)
@given(st.lists(dense(), max_size=6))
def test_several_tensors_are_reported_in_their_order(tensors):
    """Tensors of different dtypes, looked at in batches, are reported by name in the order given."""
    expected = [report for index, tensor in enumerate(tensors) for report in naive(str(index), tensor)]
    assert find_nonfinite(list(tensors)) == expected


def test_nan_in_the_memory_between_elements_is_not_reported():
    """Memory that no element reads is nobody's business, whatever holes the strides have."""
    base = torch.tensor([1.0, NAN, 2.0, NAN, 3.0, NAN, 4.0, INF, 5.0])
    assert found(base[::2]) == []
    assert found(base.as_strided((3, 3), (2, 2))) == []  # overlaps as well, and spans as many elements as it has
    assert found(base.as_strided((2, 2), (2, 4))) == []
    assert found(base.as_strided((4,), (1,), 1)) == [NonFiniteTensor("t", 2, 0, 4, (0,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.complex64], ids=str)
def test_huge_expanded_tensor_is_examined_in_the_time_of_its_memory(dtype):
    """A tensor that claims 10**12 elements over a few bytes is counted exactly without touching each."""
    bad = torch.tensor([[0.0], [INF], [NAN]]).to(dtype)
    assert found(torch.zeros(1).to(dtype).expand(10**6, 10**6)) == []
    assert found(bad[:2].reshape(2, 1, 1).expand(2, 10**6, 10**6)) == [
        NonFiniteTensor("t", 0, 10**12, 2 * 10**12, (1, 0, 0))
    ]
    assert found(bad[1:].reshape(1, 2, 1).expand(10**6, 2, 10**6)) == [
        NonFiniteTensor("t", 10**12, 10**12, 2 * 10**12, (0, 0, 0))
    ]


def test_huge_tensor_whose_rows_overlap_is_examined_in_the_time_of_its_memory():
    """Windows over one stretch of memory, 10**12 elements in all, are counted exactly."""
    memory = torch.zeros(2 * 10**6)
    memory[10**6 + 2] = NAN
    windows = memory.as_strided((10**6, 10**6), (1, 1))
    assert found(windows) == [NonFiniteTensor("t", 10**6 - 3, 0, 10**12, (3, 10**6 - 1))]


# -- other layouts --------------------------------------------------------------------------------------------------


def stored(tensor):
    """Return index -> value of every stored element of a sparse tensor, by looking at each."""
    coo = tensor.layout is torch.sparse_coo
    dense_dims = tensor.dense_dim()
    entries = []
    if coo:
        for number, index in enumerate(tensor._indices().T.tolist()):
            entries.append((tuple(index), tensor._values()[number]))
    else:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        pointers = tensor.crow_indices() if by_row else tensor.ccol_indices()
        plain = tensor.col_indices() if by_row else tensor.row_indices()
        values = tensor.values()
        blocked = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
        for batch in itertools.product(*map(range, pointers.shape[:-1])):
            bounds = pointers[batch].tolist()
            for line in range(len(bounds) - 1):
                for number in range(bounds[line], bounds[line + 1]):
                    other = plain[batch][number].item()
                    row, column = (line, other) if by_row else (other, line)
                    value = values[batch][number]
                    if not blocked:
                        entries.append(((*batch, row, column), value))
                        continue
                    height, width = value.shape[:2]
                    for i, j in itertools.product(range(height), range(width)):
                        entries.append(((*batch, row * height + i, column * width + j), value[i, j]))
    return [
        ((*index, *inner), wide(value)[inner].item())
        for index, value in entries
        for inner in itertools.product(*map(range, value.shape[value.dim() - dense_dims :]))
    ]


def naive_sparse(tensor):
    entries = stored(tensor)
    bad = sorted(index for index, value in entries if is_nan(value) or is_inf(value))
    counts = [sum(map(kind, (value for _, value in entries))) for kind in (is_nan, is_inf)]
    return [NonFiniteTensor("t", *counts, len(entries), bad[0])] if bad else []


@st.composite
def sparse(draw):
    """Draw a sparse tensor of any layout, with batches and dense dimensions where the layout has them."""
    layout = draw(st.sampled_from(["coo", "csr", "csc", "bsr", "bsc"]))
    dense_dims = draw(st.integers(0, 1))
    # Compressed layouts want as many stored elements in each batch, and have batches only without dense dimensions.
    batches = draw(st.integers(0, 1)) if layout != "coo" and not dense_dims else 0
    values = torch.zeros([2] * batches + [4, 6] + [2] * dense_dims)
    cells = draw(st.lists(st.sampled_from([(i, j) for i in (0, 2) for j in (0, 3)]), min_size=1, unique=True))
    for i, j in cells:
        for inner in itertools.product(range(2), repeat=batches + dense_dims):
            values[(*inner[:batches], i, j, *inner[batches:])] = draw(SPECIAL.filter(bool))
    if draw(st.booleans()):
        values = torch.complex(values, torch.ones_like(values) * (values != 0))
    if layout == "coo":
        coo = values.to_sparse(2)
        return draw(st.sampled_from([coo, torch.cat([coo, coo]), torch.cat([coo, coo], dim=1)]))
    if layout in ("csr", "csc"):
        return getattr(values, f"to_sparse_{layout}")(dense_dim=dense_dims)
    return getattr(values, f"to_sparse_{layout}")((2, 3), dense_dim=dense_dims)


@settings(max_examples=100, deadline=None)
@given(sparse())
def test_sparse_tensor_of_any_layout_is_counted_over_its_stored_elements(tensor):
    """Counts are those of the stored elements, the index is where in the tensor the first of them stands."""
    assert found(tensor) == naive_sparse(tensor)


def test_uncoalesced_sparse_tensor_is_examined_as_it_is_stored():
    """Infinities that cancel to NaN only in a sum are reported as the infinities that are stored."""
    tensor = torch.sparse_coo_tensor([[2, 0, 2]], [INF, 1.0, -INF], (3,), check_invariants=True)
    assert not tensor.is_coalesced()
    assert found(tensor) == [NonFiniteTensor("t", 0, 2, 3, (2,))]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_examined_part_by_part(layout):
    """The first entry of the index says which part."""
    parts = [torch.zeros(2, 3), torch.tensor([[0.0, 1.0, NAN]]), torch.tensor([[INF, 0.0, 0.0]])]
    assert found(torch.nested.nested_tensor(parts, layout=layout)) == [NonFiniteTensor("t", 1, 1, 12, (1, 0, 2))]
    assert found(torch.nested.nested_tensor(parts[:1], layout=layout)) == []


def test_other_layouts_are_examined():
    """MKL-DNN, quantised, meta and lazy tensors are looked at, or have nothing to look at; none fails."""
    assert found(torch.tensor([0.0, NAN]).to_mkldnn()) == [NonFiniteTensor("t", 1, 0, 2, (1,))]
    assert found(torch.tensor([0.0, 1.0]).to_mkldnn()) == []
    assert found(torch.full((2,), NAN, device="meta")) == []
    assert find_nonfinite(torch.nn.LazyLinear(3)) == []


def test_quantised_tensor_with_a_bad_scale_is_reported():
    """The integers are finite by nature; a scale that is not makes every element NaN."""
    good = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    assert found(good) == []
    bad = torch.quantize_per_tensor(torch.ones(3), NAN, 0, torch.qint8)
    assert found(bad) == [NonFiniteTensor("t", 3, 0, 3, (0,))]
    for dtype in (torch.quint8, torch.quint4x2):
        scales = torch.tensor([1.0, NAN])
        channels = torch.quantize_per_channel(torch.ones(2, 4), scales, torch.zeros(2), 0, dtype)
        assert found(channels) == [NonFiniteTensor("t", 4, 0, 8, (1, 0))]


class Pair(torch.Tensor):
    """A wrapper subclass with two tensors inside, as low-precision libraries have them."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} is not for wrappers")


class Closed(torch.Tensor):
    """A wrapper subclass that does not say what is in it."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} is not for wrappers")


def test_tensor_subclasses_are_examined_by_what_is_in_them():
    """The tensors inside a wrapper are looked at under its name; one over plain memory is looked at as such."""
    assert found(Pair(torch.zeros(2), torch.tensor([1.0, INF]))) == [NonFiniteTensor("t.b", 0, 1, 2, (1,))]
    with pytest.raises(UnsavableStateError, match="the guard cannot examine it") as caught:
        found(Closed())
    assert (caught.value.location, caught.value.type_name) == ("t", "tensor of type Closed")
    assert found(torch.tensor([NAN]).as_subclass(Named)) == [NonFiniteTensor("t", 1, 0, 1, (0,))]
    assert found(torch.nn.Parameter(torch.tensor([NAN]))) == [NonFiniteTensor("t", 1, 0, 1, (0,))]


def test_dtype_that_cannot_be_examined_is_refused_by_name(monkeypatch):
    """A floating dtype that this torch cannot convert is an error that names the tensor, not a pass."""
    monkeypatch.setattr(nonfinite, "_ALWAYS_FINITE", frozenset())
    nonfinite._why_not_widened.cache_clear()
    unknown = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(UnsavableStateError, match="the guard cannot examine it") as caught:
        find_nonfinite({"layer": {"w": unknown}})
    assert caught.value.location == "layer.w"
    assert find_nonfinite({"layer": {"w": torch.zeros(2)}}) == []


def test_many_small_tensors_with_a_few_bad_ones_are_all_found():
    """Each of three bad tensors among twenty thousand small ones is found, and no other is named."""
    tensors = list(torch.zeros(20_000, 40))
    for index in (0, 9_999, 19_999):
        tensors[index] = torch.tensor([1.0] * (index % 40) + [NAN])
    reports = find_nonfinite(tensors)
    assert [report.name for report in reports] == ["0", "9999", "19999"]
    assert all(report.nan_count == 1 and report.first_index == (report.numel - 1,) for report in reports)


def test_tensor_that_requires_grad_is_examined_without_history():
    """Looking changes nothing: neither the tensor nor its graph nor its version."""
    weight = torch.ones(3, requires_grad=True)
    product = weight * 2
    version = product._version
    assert found(product) == []
    assert (product._version, product.grad_fn is not None, weight.grad) == (version, True, None)
    product.sum().backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_tensor_whose_storage_was_freed_is_refused_by_name():
    """Reading it would end the process; a plain save of torch would not notice."""
    emptied = torch.zeros(1 << 20)
    emptied.untyped_storage().resize_(0)
    shrunk = torch.zeros(1 << 20)
    shrunk.untyped_storage().resize_(64)
    for tensor in (emptied, shrunk):
        with pytest.raises(UnsavableStateError, match=r"model.weight is a tensor of emptied storage.*needs 4194304"):
            find_nonfinite({"model": {"weight": tensor}})
