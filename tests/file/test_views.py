"""A view takes its own elements into the file and no others; what shared memory still shares it."""

import io
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safeckpt.file import encode
from safeckpt.file.writing.pickling import pickle_payload
from tests.file.same import assert_same, raw_bytes
from tests.file.states import loaded, torch_pickle, written


def record_sizes(payload):
    return [content.nbytes for content in pickle_payload(payload).contents]


def base(elements=1000):
    return torch.arange(float(elements))


def views():
    """Return views of larger storages, each with the bytes that its elements need."""
    square = base(10_000).view(100, 100)
    return {
        "slice": (base()[10:20], 40),
        "first": (base()[:1], 4),
        "scalar": (base()[7], 4),
        "empty": (base()[:0], 0),
        "empty in the middle": (base()[5:5], 0),
        "row": (square[3], 400),
        "rows": (square[3:5], 800),
        "column": (square[:, 3], 400),
        "block": (square[10:12, 20:23], 24),
        "steps": (base()[::10], 400),
        "steps of a slice": (base()[3:100:7], 56),
        "transposed block": (square[10:12, 20:23].t(), 24),
        "diagonal": (square.diagonal(), 400),
        "broadcast": (base()[3].expand(5, 6), 4),
        "broadcast column": (square[:, 3:4].expand(100, 50), 400),
        "windows": (base()[:10].unfold(0, 3, 1), 40),
        "channels last": (torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)[:1, :], 800),
        "conjugate": (torch.randn(50, dtype=torch.complex64)[5:7].conj(), 16),
        "imaginary part": (torch.randn(50, dtype=torch.complex64).imag, 200),
        "bfloat16": (base().bfloat16()[5:9], 8),
        "uint16": (torch.arange(100, dtype=torch.uint8).view(torch.uint16)[3:5], 4),
        "float8": (base().to(torch.float8_e4m3fn)[3:6], 3),
        "bool": ((base() > 5)[::100], 10),
        "complex": (torch.randn(50, dtype=torch.complex128)[::10], 80),
        "half": (base().half()[1::2], 1000),
        "parameter": (torch.nn.Parameter(base()[10:20]), 40),
        "unpacked unevenly": (torch.arange(7, dtype=torch.uint8)[:4].view(torch.int32), 4),
    }


@pytest.mark.parametrize("name", views())
def test_view_takes_only_its_elements_into_the_file_and_comes_back(name):
    """The file holds the elements of the view and nothing else of its storage, and they come back bit for bit."""
    view, needed = views()[name]
    assert sum(record_sizes([view])) == needed
    (got,) = loaded(written(encode([view])))
    assert_same(got, view)
    if name not in ("broadcast", "broadcast column", "windows"):
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
    """Two slices that overlap become one record, and a write through one is seen through the other."""
    whole = base()
    tree = {"a": whole[10:20], "b": whole[15:30], "far": whole[500:510]}
    assert record_sizes(tree) == [80, 40]
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
    assert record_sizes(tree) == [400]
    got = loaded(written(encode(tree)))
    got[0][0] = 5.5
    assert got[1][0] == 5.5


def test_scattered_views_that_share_no_element_are_written_apart():
    """Two columns of a matrix take two columns into the file, though the bytes between them interleave."""
    whole = base(10_000).view(100, 100)
    assert record_sizes([whole[:, 3], whole[:, 7]]) == [400, 400]
    tree = [whole[:, 3], whole[:, 7], whole[50, 50:52]]
    assert record_sizes(tree) == [400, 400, 8]
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
    assert sum(record_sizes(tree)) == 40
    assert_same(loaded(written(encode(tree))), tree)


def test_views_of_different_width_over_one_buffer_of_bytes_keep_sharing():
    """Newer dtypes are stored as bytes, so views of different width may overlap; offsets stay whole numbers."""
    whole = torch.arange(64, dtype=torch.uint8)
    tree = [whole.view(torch.uint16)[5:9], whole.view(torch.uint32)[4:6]]
    got = loaded(written(encode(tree)))
    assert_same(got, tree)
    got[1].fill_(0)
    assert not any(raw_bytes(got[0])[6:])


def test_sparse_and_quantized_tensors_do_not_drag_their_storage():
    """The parts of tensors of other layouts are views too."""
    indices = torch.arange(1000).view(2, 500)[:, :3]
    sparse = torch.sparse_coo_tensor(indices, base()[5:8], (1000, 1000), is_coalesced=True, check_invariants=True)
    assert sum(record_sizes([sparse])) == 2 * 3 * 8 + 3 * 4
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
