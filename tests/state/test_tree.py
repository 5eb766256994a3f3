"""Copies of nested state: equal bit for bit, sharing nothing with what they are copies of."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safeckpt.state import Staging, copy_tree, to_cpu
from safeckpt.state.tree import ENTER, detached, map_tensors, map_tree, named_leaves, named_tensors, tensors_in
from tests.comparing import bits, photograph
from tests.state.tensors import SPECIAL, TORCH_WARNINGS

pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS)
COPIES = {"copy_tree": copy_tree, "staging": lambda tree: Staging().copy(tree)}
each_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def memory_of(tensor):
    """Return the addresses of a tensor's dense memory."""
    if tensor.layout is torch.sparse_coo:
        return memory_of(tensor._indices()) | memory_of(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return memory_of(tensor.crow_indices()) | memory_of(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return memory_of(tensor.ccol_indices()) | memory_of(tensor.values())
    if tensor.is_nested:
        return memory_of(tensor.values())
    if tensor.layout is not torch.strided or not tensor.numel():
        return set()
    return {tensor.untyped_storage().data_ptr()}


@each_copy
@pytest.mark.parametrize("kind", SPECIAL)
def test_copy_of_any_tensor_is_equal_and_its_own(kind, copied):
    """A tensor of any dtype, layout and form is copied bit for bit into memory of its own, as elements alone."""
    tree = {"t": SPECIAL[kind]()}
    before = bits({"t": tree["t"].detach().resolve_conj().resolve_neg()})
    copy = copied(tree)
    assert bits(copy) == before
    assert not memory_of(copy["t"]) & memory_of(tree["t"])
    assert not copy["t"].requires_grad
    if tree["t"].layout is torch.strided and not tree["t"].is_nested and kind not in ("subclass", "conj", "neg"):
        assert copy["t"].stride() == tree["t"].stride()


def test_meta_tensor_stays_what_it_is():
    """A tensor without memory has nothing to copy; to refuse it is the encoder's part."""
    copy = copy_tree({"t": torch.zeros(3, device="meta")})
    assert copy["t"].is_meta


@st.composite
def trees(draw):
    """Draw nested containers over views of a few shared memories."""
    memories = [torch.arange(float(8 * n), 8.0 * n + 8) for n in range(draw(st.integers(1, 2)))]

    def view(draw):
        memory = draw(st.sampled_from(memories))
        start = draw(st.integers(0, 5))
        return memory[start : start + draw(st.integers(1, 3))]

    views = [view(draw) for _ in range(draw(st.integers(1, 5)))]
    leaves = st.one_of(
        st.sampled_from(views), st.integers(), st.floats(allow_nan=False), st.text(max_size=2), st.none()
    )
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.lists(inner, max_size=3).map(tuple),
                st.dictionaries(st.integers(0, 9), inner, max_size=3),
                st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
            ),
            max_leaves=8,
        )
    )


@settings(max_examples=80, deadline=None)
@given(trees(), st.sampled_from(sorted(COPIES)))
def test_copied_tree_behaves_like_its_original_and_apart_from_it(tree, which):
    """What overlaps still overlaps: the same writes have the same effect in the copy, and none in the original."""
    original = bits(tree)
    copy = COPIES[which](tree)
    assert bits(copy) == original
    for number, (_, tensor) in enumerate(named_tensors(copy)):
        tensor.add_(number + 1)
    assert bits(tree) == original
    for number, (_, tensor) in enumerate(named_tensors(tree)):
        tensor.add_(number + 1)
    assert bits(copy) == bits(tree)


@each_copy
def test_views_take_along_only_what_they_show(copied):
    """Four elements of a large storage are copied as four elements."""
    storage = torch.zeros(10_000)
    copy = copied({"a": storage[10:12], "b": storage[12:14], "c": storage[11:13], "d": storage[9_000:]})
    assert copy["a"].untyped_storage().nbytes() == 16
    assert copy["a"].untyped_storage().data_ptr() == copy["b"].untyped_storage().data_ptr()
    assert copy["d"].untyped_storage().nbytes() == 4_000


@each_copy
def test_shared_and_circular_containers_stay_so(copied):
    """One list under two keys is one list in the copy, and a list in itself is itself."""
    inner = [torch.ones(1)]
    inner.append(inner)
    copy = copied({"a": inner, "b": inner})
    assert copy["a"] is copy["b"] is copy["a"][1]
    assert copy["a"] is not inner


@each_copy
def test_types_and_attributes_of_containers_are_kept(copied):
    """OrderedDict with its versions, Counter, tuple, set and frozenset come out as what they went in."""
    state = OrderedDict(a=torch.ones(1))
    state._metadata = {"": {"version": 2}}
    tree = {"o": state, "c": Counter("aab"), "t": (torch.ones(1), [1]), "s": {torch.ones(1)}, "f": frozenset([1, "x"])}
    copy = copied(tree)
    assert [type(value) for value in copy.values()] == [OrderedDict, Counter, tuple, set, frozenset]
    assert copy["o"]._metadata == {"": {"version": 2}}
    assert copy["c"] == tree["c"]
    assert not memory_of(next(iter(copy["s"]))) & memory_of(next(iter(tree["s"])))
    copy["c"]["a"] = copy["o"]["b"] = 0
    assert tree["c"]["a"] == 2
    assert "b" not in state


@each_copy
def test_objects_and_arrays_are_copied_too(copied):
    """Whatever else is mutable is deep-copied."""
    array = np.ones(3)
    copy = copied({"a": array, "b": bytearray(b"x")})
    array[0] = 5
    assert copy["a"].tolist() == [1.0, 1.0, 1.0]


@each_copy
def test_history_of_a_tensor_is_not_copied(copied):
    """The copy of a tensor with a graph has none, and can be written to."""
    weight = torch.ones(2, requires_grad=True)
    copy = copied([weight * 2, {weight}, (weight,)])
    for _, tensor in named_tensors(copy):
        assert not tensor.requires_grad
        tensor.zero_()
    assert weight.tolist() == [1.0, 1.0]


def test_staging_memory_is_used_again_and_fits_what_it_holds():
    """A second copy of the same form fills the same memory; one of another form gets its own."""
    staging = Staging()
    first = staging.copy({"a": torch.ones(3)})
    second = staging.copy({"a": torch.zeros(3)})
    assert memory_of(first["a"]) == memory_of(second["a"])
    assert first["a"].tolist() == [0.0, 0.0, 0.0]
    third = staging.copy({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(2)})
    assert bits(third) == bits({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(2)})


def test_detaching_changes_nothing_else():
    """A tree without history is returned as it is; in one with it only those tensors are replaced."""
    plain = {"a": [torch.ones(1)]}
    assert detached(plain) is plain
    weight, other = torch.ones(1, requires_grad=True), torch.ones(1)
    tree = {"a": [weight, other], "b": (weight, {weight})}
    result = detached(tree)
    assert not any(tensor.requires_grad for _, tensor in named_tensors(result))
    assert result["a"][0] is result["b"][0]
    assert result["a"][1] is other
    assert memory_of(result["a"][0]) == memory_of(weight)
    assert weight.requires_grad


def test_host_tensors_are_not_copied_to_the_host():
    """A tree that is in host memory already is handed on without a copy."""
    tree = {"a": torch.ones(2), "m": torch.ones(2, device="meta")}
    assert to_cpu(tree) is tree


def test_mapping_leaves_the_original_alone():
    """The tree that is mapped is the same afterwards, in every bit and identity."""
    tree = {"a": [torch.ones(1), {"b": (torch.ones(1), 2)}]}
    before = photograph(tree)
    mapped = map_tensors(tree, lambda tensor: tensor + 1, copy.deepcopy)
    assert photograph(tree) == before
    assert mapped["a"][1]["b"][0].tolist() == [2.0]


def test_number_in_two_places_is_named_in_both():
    """Numbers and strings have no identity of their own: two ranks may share one or not, and hold the same."""
    one = 10.5
    assert list(named_leaves({"a": one, "b": [one, one]})) == [("a", one), ("b.0", one), ("b.1", one)]


def test_tensors_without_names_are_those_with_names():
    """Every tensor in any container is found once, a shared tuple sixty levels deep and a cycle included."""

    class Made(Mapping):
        def __iter__(self):
            return iter(["new"])

        def __len__(self):
            return 1

        def __getitem__(self, key):
            return [shared]

    shared, deep = torch.ones(1), (torch.ones(2),)
    for _ in range(60):
        deep = (deep, deep)
    circle = [torch.ones(3)]
    circle.append(circle)
    tree = {"a": shared, "b": [shared, {torch.ones(4)}], "c": Made(), "d": deep, "e": circle, "f": ({}, 1, "x", None)}
    for one in (tree, shared, [], 5):
        with_names = [tensor for _, tensor in named_tensors(one)]
        assert sorted(map(id, tensors_in(one))) == sorted(map(id, with_names))
    assert len(tensors_in(tree)) == 4


def test_walk_can_keep_containers_whole_and_name_empty_ones():
    """A walk that compares states has to see an empty list; one that guards tensors has not."""
    tree = {"a": [], "b": {1}, "c": {"d": ()}}
    assert list(named_leaves(tree)) == [("b.0", 1)]
    assert list(named_leaves(tree, whole=(set,), empty=True)) == [("a", []), ("b", {1}), ("c.d", ())]


def test_map_replaces_what_its_function_returns_and_enters_the_rest():
    """A dict that stands for a tensor is replaced as a whole; what is shared stays shared."""
    shared = {"key": "x"}
    tree = {"a": shared, "b": [shared, 1], "c": ({"other": shared},)}
    result = map_tree(tree, lambda value: [9] if isinstance(value, dict) and "key" in value else ENTER)
    assert result == {"a": [9], "b": [[9], 1], "c": ({"other": [9]},)}
    assert result["a"] is result["b"][0] is result["c"][0]["other"]
    assert tree["a"] is shared


class Wrapper(torch.Tensor):
    """A tensor around another one that knows none of torch's operations, as 8-bit optimizer state knows few."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_wrapper_without_operations_is_copied_by_what_is_in_it():
    """Its parts are copied, and put together by the class itself."""
    wrapper = Wrapper(torch.arange(3, dtype=torch.uint8))
    copied = copy_tree({"state": wrapper})["state"]
    assert type(copied) is Wrapper
    assert torch.equal(copied.inner, wrapper.inner)
    assert copied.inner.data_ptr() != wrapper.inner.data_ptr()
