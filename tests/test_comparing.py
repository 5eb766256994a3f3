"""The comparer that the other tests rely on tells apart whatever differs, and nothing else."""

from __future__ import annotations

import copy
import pickle
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.comparing import assert_same, bits, changes, photograph, streams
from tests.state.tensors import SPECIAL, TORCH_WARNINGS

NAN = float("nan")


def nan(payload: int) -> float:
    """Return a NaN of these lowest bits."""
    return struct.unpack(">d", struct.pack(">Q", 0x7FF8 << 48 | payload))[0]


def tensor_of_bits(pattern: int) -> torch.Tensor:
    return torch.tensor([pattern], dtype=torch.int32).view(torch.float32)


def marked(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


class Text(str):
    """A str that is not one."""

    __slots__ = ()


class Point:
    """An object with parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


SHARED = torch.ones(2)
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "sign of zero": (0.0, -0.0),
    "sign of an imaginary zero": (complex(1, 0.0), complex(1, -0.0)),
    "payload of a NaN": (nan(1), nan(2)),
    "sign of a NaN": (NAN, -NAN),
    "last bit": (1.0, 1.0000000000000002),
    "bool and int": (True, 1),
    "int and float": (1, 1.0),
    "float and float of NumPy": (1.0, np.float64(1.0)),
    "float32 and float64": (np.float32(1), np.float64(1)),
    "sign of a zero of NumPy": (np.float32(0.0), np.float32(-0.0)),
    "str and its subclass": ("a", Text("a")),
    "bytes and bytearray": (b"a", bytearray(b"a")),
    "content of a bytearray": (bytearray(b"a"), bytearray(b"b")),
    "None and nothing": ({"a": None}, {}),
    "list and tuple": ([1], (1,)),
    "tuple and size": ((1, 2), torch.Size((1, 2))),
    "length": ([1], [1, 1]),
    "order of a list": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [[1, 2]]),
    "dict and OrderedDict": ({"a": 1}, OrderedDict(a=1)),
    "dict and Counter": ({"a": 1}, Counter("a")),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "type of a key": ({1: 0}, {True: 0}),
    "int and float as keys": ({1: 0}, {1.0: 0}),
    "type of a key in a key": ({(1, 2): 0}, {(1, 2.0): 0}),
    "tensor as a key": ({torch.ones(1): 0}, {torch.zeros(1): 0}),
    "attribute of a dict": (OrderedDict(a=1), marked(OrderedDict(a=1), version=1)),
    "factory": (defaultdict(int), defaultdict(list)),
    "longest length": (deque([1]), deque([1], maxlen=2)),
    "set and frozenset": ({1}, frozenset({1})),
    "type in a set": ({1}, {True}),
    "tensor in a set": ({torch.ones(3)}, {torch.nextafter(torch.ones(3), torch.zeros(3))}),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "dtype of the same width and bits": (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "scalar and vector": (torch.zeros(()), torch.zeros(1)),
    "shape of no element": (torch.zeros(0, 2), torch.zeros(0, 3)),
    "device": (torch.zeros(2), torch.zeros(2, device="meta")),
    "layout": (torch.eye(2), torch.eye(2).to_sparse()),
    "sign of a zero in a tensor": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "payload of a NaN in a tensor": (tensor_of_bits(0x7FC00001), tensor_of_bits(0x7FC00002)),
    "signalling NaN in a tensor": (tensor_of_bits(0x7FC00001), tensor_of_bits(0x7F800001)),
    "NaN of bfloat16": (
        torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16),
        torch.tensor([0x7FC2], dtype=torch.int16).view(torch.bfloat16),
    ),
    "stored zero of sparse": (
        torch.sparse_coo_tensor([[0]], [0.0], (2,), check_invariants=True),
        torch.sparse_coo_tensor([[1]], [0.0], (2,), check_invariants=True),
    ),
    "sign of a zero in a sparse tensor": (
        torch.sparse_coo_tensor([[0]], [0.0], (2,), check_invariants=True),
        torch.sparse_coo_tensor([[0]], [-0.0], (2,), check_invariants=True),
    ),
    "transposed": (torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2).t()),
    "conjugate": (torch.tensor([1j]), torch.tensor([1j]).conj()),
    "conjugate and its elements": (torch.tensor([1j]).conj(), torch.tensor([1j]).conj().resolve_conj()),
    "negative and its elements": (torch._neg_view(torch.ones(2)), -torch.ones(2)),
    "requires_grad": (torch.zeros(2), torch.zeros(2, requires_grad=True)),
    "parameter": (torch.zeros(2, requires_grad=True), nn.Parameter(torch.zeros(2))),
    "attribute of a tensor": (marked(torch.zeros(2), note=0.0), marked(torch.zeros(2), note=-0.0)),
    "element of a view": (torch.arange(9.0)[::3], torch.arange(9.0)[::4]),
    "array and tensor": (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "dtype of an array": (np.zeros(2, "<i4"), np.zeros(2, ">i4")),
    "shape of an array": (np.zeros((1, 2)), np.zeros((2, 1))),
    "sign of a zero in an array": (np.array([0.0]), np.array([-0.0])),
    "object in an array": (np.array([1, "a"], object), np.array([True, "a"], object)),
    "generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "generator of NumPy": (np.random.default_rng(1), np.random.default_rng(2)),
    "generator of Python": (random.Random(1), random.Random(2)),
    "storage": (torch.arange(2.0)._typed_storage(), torch.zeros(2)._typed_storage()),
    "dtype of a storage": (torch.zeros(2)._typed_storage(), torch.zeros(2, dtype=torch.int32)._typed_storage()),
    "bytes of a storage": (torch.arange(2.0).untyped_storage(), torch.zeros(2).untyped_storage()),
    "part of an object": (Point(1, 0.0), Point(1, -0.0)),
    "parameter of a module": (nn.Linear(2, 2), nn.Linear(2, 2)),
    "kind of torch": (torch.float32, torch.float64),
    "function": (len, max),
    "tie": ([SHARED, SHARED], [SHARED, SHARED.clone()]),
    "tie to another place": ([[1], SHARED, SHARED, [1]], [SHARED, [1], SHARED, [1]]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_told_apart(what: str) -> None:
    """At the top and deep inside, from either side."""
    one, other = DIFFERENT[what]
    for left, right in ((one, other), (other, one), ([{"a": (one,)}], [{"a": (other,)}])):
        assert bits(left) != bits(right)
        with pytest.raises(AssertionError, match="differ"):
            assert_same(left, right)
        assert_same(left, left)


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.filterwarnings(*TORCH_WARNINGS)
def test_every_kind_of_tensor_is_itself_and_no_other(what: str) -> None:
    """Made twice it is the same; with another number in it, it is another."""
    assert_same(SPECIAL[what](), SPECIAL[what]())
    kinds = {name: repr(bits(make())) for name, make in SPECIAL.items()}
    assert [name for name, found in kinds.items() if found == kinds[what]] == [what]


def test_copies_are_the_same() -> None:
    """Equal NaNs, equal memory elsewhere, other strides, cycles: no difference."""
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    cases = (
        NAN,
        nan(7),
        complex(NAN, -0.0),
        b"",
        {"a": [(), {}]},
        {1, 2},
        deque([1], 3),
        np.arange(3.0),
        cycle,
        SHARED,
    )
    for value in cases:
        assert_same(copy.deepcopy(value), value)
        assert_same(pickle.loads(pickle.dumps(value)), value)
    assert_same(torch.arange(9.0)[::3], torch.tensor([0.0, 3.0, 6.0]))
    assert_same(torch.arange(4.0).view(2, 2).t(), torch.tensor([[0.0, 2.0], [1.0, 3.0]]))
    assert_same(((), ()), ((), tuple([])))  # noqa: C409


def test_ties_count_unless_told_otherwise() -> None:
    """One object at two places, or two equal ones."""
    tied, apart = [SHARED, SHARED], [SHARED, SHARED.clone()]
    assert bits(tied) != bits(apart)
    assert_same(tied, apart, ties=False)


def test_difference_is_named_by_its_path() -> None:
    """The message says where, what was found and what was wanted."""
    with pytest.raises(AssertionError, match=r"(?s)^1 of \d+ differ\n\['a'\]\[1\]: .*-0x0.*, not .*0x0"):
        assert_same({"a": [1, -0.0]}, {"a": [1, 0.0]})


def test_photograph_shows_what_values_do_not() -> None:
    """A value written over itself, another object in its place, a gradient, a draw, an attribute."""
    model, kept = nn.Linear(2, 2), {"list": [torch.ones(2)]}

    def seen(change: Any) -> list[str]:
        before = photograph(kept, model=model)
        assert changes(before, photograph(kept, model=model)) == []
        change()
        return changes(before, photograph(kept, model=model))

    weight = "model._parameters['weight']"
    assert seen(lambda: model.weight.data.fill_(1))[0].startswith(weight)
    assert seen(lambda: model.weight.detach().copy_(model.weight.detach())) == [weight]
    assert seen(lambda: kept["list"].__setitem__(0, torch.ones(2))) == ["0['list'][0]"]
    assert seen(lambda: model.weight.sum().backward()) == [f"{weight}.grad"]
    assert seen(model.eval) == ["model.training"]
    assert seen(lambda: torch.rand(1)) == ["process"]
    assert seen(random.random) == ["process"]
    assert seen(np.random.rand) == ["process"]


def test_streams_show_every_draw() -> None:
    """Of each of the three streams."""
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = streams()
        assert streams() == before
        draw()
        assert streams() != before
