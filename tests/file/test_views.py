"""A view takes its own stretch of a storage into the file and no more; what shared memory still shares it."""

import io
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safeckpt.errors import UnsavableStateError
from safeckpt.file import encode
from safeckpt.file.writing.pickling import pickle_payload
from tests.comparing import assert_same
from tests.file.states import loaded, torch_pickle, written


def record_sizes(payload):
    return [span.nbytes for span in pickle_payload(payload).spans]


def base(elements=1000):
    return torch.arange(float(elements))


def views():
    """Return views of larger storages, each with the bytes from its first element to its last."""
    square = base(10_000).view(100, 100)
    return {
        "slice": (base()[10:20], 40),
        "first": (base()[:1], 4),
        "scalar": (base()[7], 4),
        "empty": (base()[:0], 0),
        "empty in the middle": (base()[5:5], 0),
        "row": (square[3], 400),
        "rows": (square[3:5], 800),
        "column": (square[:, 3], 39_604),
        "block": (square[10:12, 20:23], 412),
        "steps": (base()[::10], 3964),
        "steps of a slice": (base()[3:100:7], 368),
        "transposed block": (square[10:12, 20:23].t(), 412),
        "diagonal": (square.diagonal(), 40_000),
        "broadcast": (base()[3].expand(5, 6), 4),
        "broadcast column": (square[:, 3:4].expand(100, 50), 39_604),
        "windows": (base()[:10].unfold(0, 3, 1), 40),
        "channels last": (torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)[:1, :], 800),
        "conjugate": (torch.randn(50, dtype=torch.complex64)[5:7].conj(), 16),
        "imaginary part": (torch.randn(50, dtype=torch.complex64).imag, 396),
        "bfloat16": (base().bfloat16()[5:9], 8),
        "uint16": (torch.arange(100, dtype=torch.uint8).view(torch.uint16)[3:5], 4),
        "float8": (base().to(torch.float8_e4m3fn)[3:6], 3),
        "bool": ((base() > 5)[::100], 901),
        "complex": (torch.randn(50, dtype=torch.complex128)[::10], 656),
        "half": (base().half()[1::2], 1998),
        "parameter": (torch.nn.Parameter(base()[10:20]), 40),
        "unpacked unevenly": (torch.arange(7, dtype=torch.uint8)[:4].view(torch.int32), 4),
    }


@pytest.mark.parametrize("name", views())
def test_view_takes_only_its_stretch_into_the_file_and_comes_back(name):
    """The file holds the stretch from the first to the last element, and the elements come back bit for bit."""
    view, needed = views()[name]
    assert sum(record_sizes([view])) == needed
    (got,) = loaded(written(encode([view])))
    assert_same(got, view)
    assert got.untyped_storage().nbytes() == needed
    (plain,) = torch.load(io.BytesIO(written([view])))
    assert_same(plain, view)


def test_saving_a_view_leaves_it_a_view():
    """The live tensor still shares its storage, and its neighbours are untouched."""
    whole = base()
    view = whole[::7]
    before = whole.clone()
    written(encode([view]))
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(whole, before)


def test_views_that_need_all_of_a_storage_are_written_as_torch_does():
    """Parts that touch and cover their storage stay one record, as in a flat parameter buffer."""
    flat = base(12)
    for tree in ([flat[:5], flat[5:]], [flat[::2], flat[1::2]], [flat.view(3, 4)[:, :2], flat.view(3, 4)[:, 2:]]):
        assert record_sizes(tree) == [48]
        assert pickle_payload(tree).data == torch_pickle(tree)


def test_overlapping_views_share_memory_after_the_load():
    """Slices of one storage become one record, and a write through one is seen through another."""
    whole = base()
    tree = {"a": whole[10:20], "b": whole[15:30], "far": whole[500:510]}
    assert record_sizes(tree) == [2000]
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    got["a"][5] = -1
    assert got["b"][0] == -1
    got["far"].zero_()
    assert got["a"][0] == 10


def test_tied_views_stay_tied():
    """The same slice twice, and a parameter beside its data, are one memory after the load."""
    part = base()[10:20]
    parameter = torch.nn.Parameter(base()[3:6])
    tree = [part, base()[0:1], part.view(2, 5), part, parameter, parameter.data, parameter.detach()]
    assert record_sizes(tree) == [40, 4, 12]
    got = loaded(written(encode(tree)))
    assert got[0] is got[3]
    got[0][0] = 99
    assert got[2][0, 0] == 99
    with torch.no_grad():
        got[4][0] = 77
    assert got[5][0] == got[6][0] == 77


def test_strided_view_that_occurs_twice_is_one_record():
    """Two tensors over the same scattered elements are one memory after the load."""
    whole = base(10_000).view(100, 100)
    tree = [whole[:, 3], whole[:, 3]]
    assert record_sizes(tree) == [39_604]
    got = loaded(written(encode(tree)))
    got[0][0] = 5.5
    assert got[1][0] == 5.5


def test_scattered_views_of_one_storage_are_one_record():
    """Two columns of a matrix take what lies between them into the file, and no more."""
    whole = base(10_000).view(100, 100)
    tree = [whole[:, 3], whole[:, 7], whole[50, 50:52]]
    assert record_sizes(tree) == [39_620]
    assert_same(loaded(written(encode(tree))), tree)


def test_scattered_views_that_share_elements_keep_sharing_them():
    """A row and a column that cross stay in one record with what lies between."""
    whole = base(100).view(10, 10)
    tree = [whole[:, 3], whole[4]]
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    got[0][4] = -5
    assert got[1][3] == -5


def test_empty_views_beside_others_do_not_keep_the_storage():
    """A view without elements costs nothing, wherever it starts."""
    whole = base()
    tree = [whole[:0], whole[900:900], whole[3:5]]
    assert sum(record_sizes(tree)) == 8
    assert_same(loaded(written(encode(tree))), tree)
    tree = [whole.view(10, 100)[:, 3], whole[900:900]]
    assert sum(record_sizes(tree)) == 3604
    assert_same(loaded(written(encode(tree))), tree)


def test_views_of_different_width_over_one_buffer_of_bytes_keep_sharing():
    """Newer dtypes are stored as bytes, so views of different width may overlap; offsets stay whole numbers."""
    whole = torch.arange(64, dtype=torch.uint8)
    tree = [whole.view(torch.uint16)[5:9], whole.view(torch.uint32)[4:6]]
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    got[1].fill_(0)
    assert not any(got[0].view(torch.uint8)[6:].tolist())


def empty_pairs():
    whole, short = torch.ones(4), torch.empty(0)
    complex_ = torch.empty(0, dtype=torch.complex64)
    return {
        "an empty tensor and itself as integers": [short, short.view(torch.int32)],
        "an empty complex tensor and its parts": [complex_, torch.view_as_real(complex_)],
        "an empty slice and the whole as integers": [whole[:0], whole.view(torch.int32)],
        "two empty slices": [whole[:0], whole.view(torch.int32)[:0]],
        "the whole and an empty slice of bytes": [whole, whole.view(torch.uint8)[5:5]],
    }


@pytest.mark.parametrize("name", empty_pairs())
def test_empty_tensor_of_another_type_in_the_same_storage_comes_back(name):
    """A tensor without elements shares no bytes, so its type does not matter to the others in its storage."""
    tree = empty_pairs()[name]
    data = written(encode(tree))
    assert_same(loaded(data), tree)
    assert_same(torch.load(io.BytesIO(data)), tree)


def test_types_that_lie_side_by_side_in_one_storage_come_back():
    """A buffer that holds numbers of several types becomes a record for each, and ties within a type are kept."""
    buffer = torch.zeros(64, dtype=torch.uint8)
    tree = [buffer[:16].view(torch.float32), buffer[16:32].view(torch.int32), buffer[32:48].view(torch.float32)]
    tree.append(tree[0][1:3])
    tree[0].fill_(1.5), tree[1].fill_(7), tree[2].fill_(2.5)
    assert record_sizes(tree) == [48, 16]
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    got[0][1] = 9
    assert got[3][0] == 9


def test_types_that_share_bytes_are_refused_and_both_are_named():
    """The format gives bytes one type: interleaved types are told from types that share bytes."""
    buffer = torch.zeros(32, dtype=torch.uint8)
    apart = [buffer[:4].view(torch.float32), buffer[4:8].view(torch.int32), buffer[8:12].view(torch.float32)]
    assert_same(loaded(written(encode(apart))), apart)
    with pytest.raises(UnsavableStateError, match=r"obj\[3\].*shares memory with obj\[0\]"):
        encode([*apart, buffer[2:6]])


def test_sparse_and_quantized_tensors_do_not_drag_their_storage():
    """The parts of tensors of other layouts are views too."""
    indices = torch.arange(1000).view(2, 500)[:, :3]
    sparse = torch.sparse_coo_tensor(indices, base()[5:8], (1000, 1000), is_coalesced=True, check_invariants=True)
    assert sum(record_sizes([sparse])) == 503 * 8 + 3 * 4
    assert_same(loaded(written(encode([sparse]))), [sparse])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz.*:UserWarning")
def test_quantized_view_does_not_drag_its_storage():
    """A slice of a quantized tensor takes its own elements into the file."""
    whole = torch.quantize_per_tensor(base(), 0.1, 0, torch.qint8)
    assert record_sizes([whole[5:8]]) == [3]
    assert_same(loaded(written(encode([whole[5:8]]))), [whole[5:8]])


def test_large_storage_of_a_single_element_makes_a_small_file():
    """One number of a 40 MB tensor is a file of a few kilobytes."""
    data = written({"loss": torch.zeros(10_000_000)[-1]})
    assert len(data) < 4096
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


@st.composite
def families(draw):
    """Draw a storage and some views of it."""
    elements = draw(st.integers(1, 60))
    whole = torch.arange(float(elements))
    made = []
    for _ in range(draw(st.integers(1, 5))):
        dimensions = draw(st.integers(0, 3))
        size = tuple(draw(st.integers(0, 4)) for _ in range(dimensions))
        stride = tuple(draw(st.integers(0, 9)) for _ in range(dimensions))
        reach = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) if 0 not in size else 0
        if reach < elements:
            offset = draw(st.integers(0, elements - 1 - reach))
            made.append(whole.as_strided(size, stride, offset))
    return whole, made, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(families())
def test_any_family_of_views_comes_back_with_the_memory_it_shared(family):
    """Values are equal, the file is never larger than the storage, and elements are shared exactly as before."""
    whole, made, with_whole = family
    tree = [*made, whole] if with_whole else made
    assert sum(record_sizes(tree)) <= whole.nbytes
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    plain = torch.load(io.BytesIO(written(tree)))
    for result in (got, plain):
        for first in range(len(tree)):
            for second in range(first):
                assert _pairs(result[first], result[second]) == _pairs(tree[first], tree[second])


def _pairs(first, second):
    """Return which elements of two views are at the same address, as pairs of positions."""
    where = {}
    for index, address in enumerate(_addresses(first)):
        where.setdefault(address, set()).add(index)
    return {(mine, index) for index, address in enumerate(_addresses(second)) for mine in where.get(address, ())}


def _addresses(view):
    start = view.untyped_storage().data_ptr()
    indices = torch.arange(view.untyped_storage().nbytes() // 4)
    if not view.numel():
        return []
    return [
        start + 4 * i
        for i in indices.as_strided(view.size(), view.stride(), view.storage_offset()).reshape(-1).tolist()
    ]
