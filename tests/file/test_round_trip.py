"""Every dtype and layout of torch comes back bit for bit, or is refused by name before anything is written."""

import io
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safeckpt.errors import UnsavableStateError
from safeckpt.file import encode
from tests.comparing import assert_same
from tests.file.states import loaded, round_trip, written

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

DTYPES = sorted({value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}, key=str)
LAYOUTS = sorted({value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.layout)}, key=str)
REFUSED = {
    dtype for dtype in DTYPES if str(dtype).removeprefix("torch.").removeprefix("u") in {f"int{n}" for n in range(1, 8)}
}


def filled(dtype, *size):
    """Return a strided tensor of any dtype whose bytes count up; NaNs, signalling ones included, come as they fall."""
    elements = math.prod(size)
    raw = torch.arange(elements * torch.empty(0, dtype=dtype).element_size()).to(torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    tensor = torch.empty(0, dtype=dtype)
    strides = torch.empty(size, dtype=torch.uint8).stride()
    return tensor.set_(raw.untyped_storage(), 0, size, strides)


def variants(dtype):
    """Return a tensor in many forms."""
    block = filled(dtype, 4, 6)
    forms = {
        "whole": block,
        "scalar": filled(dtype),
        "empty": filled(dtype, 0),
        "empty matrix": filled(dtype, 3, 0, 2),
        "one": filled(dtype, 1),
        "transposed": block.t(),
        "slice": block[1:3],
        "column": block[:, 2],
        "steps": block[::2, ::3],
        "broadcast": filled(dtype, 1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(block, requires_grad=False),
    }
    if dtype.is_floating_point or dtype.is_complex:
        forms["trainable"] = torch.nn.Parameter(block)
        forms["requires grad"] = filled(dtype, 3).requires_grad_()
    if dtype.is_complex:
        forms["conjugate"] = block.conj()
    forms["negative"] = torch._neg_view(block) if dtype in (torch.float32, torch.float64, torch.int32) else block
    return forms


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if "q" not in str(dtype)], ids=str)
def test_every_dtype_comes_back_in_every_form_or_is_refused_by_name(dtype):
    """For each dtype that torch has, each form is equal bit for bit after the load, by torch as well."""
    if dtype in REFUSED:
        with pytest.raises(UnsavableStateError, match=str(dtype)):
            encode([filled(dtype, 3)])
        return
    forms = variants(dtype)
    data = written(encode(forms))
    assert_same(loaded(data), forms)
    assert_same(torch.load(io.BytesIO(data)), forms)
    for name, form in forms.items():
        assert_same(round_trip({name: form}), {name: form})


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_quantized_tensors_come_back_in_each_scheme(dtype):
    """Per-tensor and per-channel quantization keep scales, zero points and elements."""
    values = torch.linspace(-1, 1, 12).view(3, 4)
    tree = {
        "tensor": torch.quantize_per_tensor(values, 0.1, 3, dtype),
        "channel": torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, dtype),
        "transposed": torch.quantize_per_tensor(values, 0.1, 3, dtype).t(),
    }
    got = round_trip(tree)
    assert_same(got, tree)
    assert got["channel"].q_per_channel_axis() == 0
    assert torch.equal(got["channel"].q_per_channel_scales(), tree["channel"].q_per_channel_scales())


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
def test_packed_quantized_tensors_come_back_or_are_refused(dtype):
    """The dtypes of which several elements share a byte keep their bytes, or are refused by name."""
    values = torch.linspace(-1, 1, 16).view(4, 4)
    try:
        tensor = torch.quantize_per_channel(values, torch.ones(4), torch.zeros(4), 0, dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip(f"this torch makes no {dtype} tensor")
    try:
        data = written(encode([tensor]))
    except UnsavableStateError:
        return
    (got,) = loaded(data)
    assert got.dtype is dtype
    assert got.untyped_storage().tolist() == tensor.untyped_storage().tolist()


def sparse(layout, dtype):
    dense = torch.eye(4, dtype=torch.float64)
    dense[1, 3] = 3
    dense = dense.to(dtype)
    options = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return dense.to_sparse(layout=layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16], ids=str
)
def test_every_layout_comes_back_or_is_refused_by_name(layout, dtype):
    """For each layout that torch has, indices and values come back, or the layout is named in the refusal."""
    if layout is torch.strided:
        return
    if str(layout) == "torch._mkldnn":
        with pytest.raises(UnsavableStateError, match="_mkldnn"):
            encode([torch.ones(2).to_mkldnn()])
        return
    if layout is torch.jagged:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        (got,) = round_trip([nested])
        assert [part.tolist() for part in got.unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
        return
    tensor = sparse(layout, dtype)
    assert_same(round_trip({"s": tensor}), {"s": tensor})


def test_uncoalesced_sparse_tensor_stays_uncoalesced():
    """Duplicate indices are kept as they are."""
    tensor = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (3,), check_invariants=True)
    (got,) = round_trip([tensor])
    assert not got.is_coalesced()
    assert got._indices().tolist() == [[1, 1, 0]]


def test_strided_nested_tensor_comes_back():
    """A nested tensor of the strided kind keeps its components."""
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    (got,) = round_trip([tensor])
    assert [part.tolist() for part in got.unbind()] == [[1.0, 1.0], [0.0, 1.0, 2.0]]


def test_state_dicts_of_every_optimizer_come_back():
    """Each optimizer of torch.optim that takes plain gradients has a state that comes back."""
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]
    done = 0
    for kind in kinds:
        if kind.__name__ in ("Optimizer", "SparseAdam", "LBFGS", "Muon"):
            continue
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.ones(3)
        optimizer.step()
        state = optimizer.state_dict()
        assert_same(round_trip(state), state)
        done += 1
    assert done > 8


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**2030), 2**2030),
    st.floats(allow_nan=True, allow_infinity=True),
    st.complex_numbers(allow_nan=False, allow_infinity=True),
    st.text(st.characters(), max_size=20),
    st.binary(max_size=20),
    st.sampled_from([torch.float32, torch.uint16, torch.device("cpu"), torch.strided, torch.Size((2, 3))]),
)
keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=4),
    st.tuples(st.integers(), st.text(max_size=3)),
)  # fmt: skip
tensors = st.builds(
    lambda dtype, size, step: filled(dtype, *size)[::step] if size else filled(dtype),
    st.sampled_from([dtype for dtype in DTYPES if "q" not in str(dtype) and dtype not in REFUSED]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 2),
)
trees = st.recursive(
    scalars | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(0, 5), max_size=3).map(Counter),
        st.sets(keys, max_size=3),
        st.binary(max_size=5).map(bytearray),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_of_plain_values_and_tensors_comes_back(tree):
    """What goes in comes out, in types, values, order and bits, by torch as well."""
    data = written(encode(tree))
    got = loaded(data)
    assert_same(got, tree)
    assert_same(torch.load(io.BytesIO(data)), tree)


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.floats(width=32).map(np.float32) | st.integers(0, 255).map(np.uint8) | st.booleans().map(np.bool_) | scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9).map(np.int64), inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
))  # fmt: skip
def test_any_tree_with_numpy_scalars_becomes_equal_and_plain(tree):
    """After encode() no NumPy type is left, the values are equal, and encoding again changes nothing."""
    plain = encode(tree)
    assert encode(plain) is plain
    _assert_plain(round_trip(tree), tree)


def _assert_plain(got, want):
    assert not isinstance(got, np.generic)
    if isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        for mine, theirs in zip(got, want, strict=True):
            _assert_plain(mine, theirs)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            _assert_plain(got[key], want[key])
    else:
        assert got == want or (got != got and want != want)  # noqa: PLR0124  NaN
