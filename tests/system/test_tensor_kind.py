"""The kind of a tensor."""

import pytest
import torch

from safeckpt.system.tensor_kind import TensorKind, describe_missing_memory, has_own_copies, is_plain, kind_of, span_of


class Labelled(torch.Tensor):
    """A user's subclass without a meaning of its own."""


def emptied():
    tensor = torch.ones(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_behind_an_offset():
    """A view whose storage shrank to exactly its own length."""
    tensor = torch.ones(8)[4:]
    tensor.untyped_storage().resize_(16)
    return tensor


def overlapping_beyond_the_end():
    """As many bytes as its storage, and one element outside of it."""
    tensor = torch.ones(5).as_strided((2, 2), (3, 1))
    tensor.untyped_storage().resize_(16)
    return tensor


KINDS = {
    "tensor": (lambda: torch.ones(2, 3), TensorKind.PLAIN),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2)), TensorKind.PLAIN),
    "frozen parameter": (lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False), TensorKind.PLAIN),
    "buffer": (lambda: torch.nn.Buffer(torch.ones(2)), TensorKind.PLAIN),
    "scalar": (lambda: torch.tensor(1), TensorKind.PLAIN),
    "empty": (lambda: torch.empty(0, 3), TensorKind.PLAIN),
    "empty slice at the end": (lambda: torch.ones(4)[4:], TensorKind.PLAIN),
    "transposed": (lambda: torch.ones(2, 3).T, TensorKind.PLAIN),
    "slice with gaps": (lambda: torch.ones(4, 4)[:, ::2], TensorKind.PLAIN),
    "last column": (lambda: torch.ones(4, 4)[:, 3], TensorKind.PLAIN),
    "expanded": (lambda: torch.ones(1).expand(1000), TensorKind.PLAIN),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), TensorKind.PLAIN),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), TensorKind.PLAIN),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), TensorKind.FLAGGED),
    "negative": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, TensorKind.FLAGGED),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), TensorKind.QUANTIZED),
    "coo": (lambda: torch.eye(2).to_sparse(), TensorKind.SPARSE),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), TensorKind.SPARSE),
    "bsc": (lambda: torch.eye(2).to_sparse_bsc((1, 1)), TensorKind.SPARSE),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), TensorKind.NESTED),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        TensorKind.NESTED,
    ),
    "meta": (lambda: torch.empty(2, device="meta"), TensorKind.META),
    "meta parameter": (lambda: torch.nn.Parameter(torch.empty(2, device="meta")), TensorKind.META),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, TensorKind.UNINITIALIZED),
    "subclass": (lambda: torch.ones(2).as_subclass(Labelled), TensorKind.SUBCLASS),
    "zeros": (lambda: torch._efficientzerotensor(2), TensorKind.ZEROS),
    "emptied": (emptied, TensorKind.EMPTIED),
    "emptied parameter": (lambda: torch.nn.Parameter(emptied()), TensorKind.EMPTIED),
    "cut behind an offset": (cut_behind_an_offset, TensorKind.EMPTIED),
    "overlapping beyond the end": (overlapping_beyond_the_end, TensorKind.EMPTIED),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSC) tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_tensor_is_told_apart(name):
    """Every way in which a tensor can be more or less than memory with a shape has a kind of its own."""
    make, kind = KINDS[name]
    tensor = make()
    assert kind_of(tensor) is kind
    assert is_plain(tensor) is (kind is TensorKind.PLAIN)


def test_inside_a_transform_a_tensor_is_transformed():
    """What exists only inside a transform of torch.func is no plain tensor there, and its storage is not asked for."""
    seen = []

    def function(value):
        seen.append(kind_of(value))
        return value

    torch.func.vmap(function)(torch.ones(2, 3))
    assert seen == [TensorKind.TRANSFORMED]


def test_a_tensor_sharded_by_name_is_sharded():
    """Whatever can give a part of itself is sharded, before it is any other subclass."""

    class Part(torch.Tensor):
        def to_local(self):
            return torch.ones(1)

    assert kind_of(torch.ones(2).as_subclass(Part)) is TensorKind.SHARDED


def test_an_emptied_tensor_is_described_by_both_sizes():
    """The description names what the storage holds and what the shape needs."""
    assert describe_missing_memory(emptied()) == "its storage holds 0 bytes, its shape needs 48"
    assert describe_missing_memory(cut_behind_an_offset()) == "its storage holds 16 bytes, its shape needs 32"


@pytest.mark.parametrize(
    ("make", "span"),
    [
        (lambda t: t, (0, 12)),
        (lambda t: t.T, (0, 12)),
        (lambda t: t[1], (4, 8)),
        (lambda t: t[:, 1], (1, 10)),
        (lambda t: t[3:], (12, 12)),
        (lambda t: t[0, :1].expand(5, 1), (0, 1)),
    ],
)
def test_a_span_reaches_from_the_first_to_the_last_element(make, span):
    """The span of a view is the smallest stretch of its storage that holds every element."""
    assert span_of(make(torch.ones(3, 4))) == span


def test_only_an_expanded_tensor_has_elements_without_copies_of_their_own():
    """Elements share memory in an expanded tensor and nowhere else, one of a single element excepted."""
    assert has_own_copies(torch.ones(3, 4)[:, ::2])
    assert has_own_copies(torch.ones(1).expand(1))
    assert not has_own_copies(torch.ones(1).expand(2))
