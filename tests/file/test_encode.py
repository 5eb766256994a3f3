"""What encode() converts loses nothing, and what it refuses is named with a cure."""

import argparse
import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import sys
import types
import uuid

import numpy as np
import pytest
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.file import encode
from safeckpt.file.writing.encoding import MOST_LEVELS
from tests.comparing import assert_same
from tests.file.states import NAMES, corpus, loaded, round_trip, torch_pickle, written

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support:UserWarning")

# --- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_state_without_foreign_types_is_returned_as_it_is_and_comes_back(name):
    """Nothing is copied where nothing has to be converted, and the file gives back an equal state."""
    state = corpus()[name]
    assert encode(state) is state
    assert_same(loaded(written(state)), state)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.bool_(True), True),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float16(0.1), float(np.float16(0.1))),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.1), 0.1),
        (np.float64("nan"), float("nan")),
        (np.float64(-0.0), -0.0),
        (np.complex64(1 - 2j), 1 - 2j),
        (np.complex128(0.1j), 0.1j),
        (np.str_("é"), "é"),
        (np.bytes_(b"a\0b"), b"a\0b"),
        (np.bytes_(b""), b""),
        (b"", b""),
    ],
    ids=repr,
)
def test_scalar_of_numpy_becomes_the_equal_python_value(value, plain):
    """A scalar comes back as the plain value that is equal to it, as a value, in a list and as a key."""
    got = round_trip({"value": value, "list": [value, (value,)], "key": {value: 1}})
    assert_same(got, {"value": plain, "list": [plain, (plain,)], "key": {plain: 1}})


def numpy_dtypes():
    return [
        np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + np.typecodes["Complex"] + "?"
    ]


@pytest.mark.parametrize("dtype", numpy_dtypes(), ids=lambda dtype: f"{dtype.char}-{dtype.name}")
@pytest.mark.parametrize("order", ["<", ">"])
def test_array_of_numbers_becomes_a_tensor_of_the_same_values_or_is_refused(dtype, order):
    """Every numeric dtype of NumPy in both byte orders is kept bit for bit, or refused where torch has no such type."""
    array_of_it = np.arange(6).reshape(2, 3).astype(dtype.newbyteorder(order))
    if dtype.char in "gG":
        with pytest.raises(UnsavableStateError):
            encode([array_of_it])
        return
    (got,) = round_trip([array_of_it])
    native = array_of_it.astype(dtype.newbyteorder("="))
    assert got.numpy().dtype == native.dtype
    assert got.numpy().tobytes() == native.tobytes()
    assert got.shape == array_of_it.shape


def odd_arrays():
    base = np.arange(24.0).reshape(4, 6)
    read_only = base.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + base.tobytes(), dtype=np.uint8)[1:].view(np.float64)
    record = np.zeros(3, dtype=[("a", np.int8), ("b", np.float64)])
    return {
        "zero-dimensional": np.array(3.5),
        "empty": np.zeros((0, 3)),
        "reversed": base[::-1, ::-1],
        "slice": base[1:3, ::2],
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "read-only": read_only,
        "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
        "unaligned": unaligned,
        "field": record["b"],
    }


@pytest.mark.parametrize("name", odd_arrays())
def test_array_of_any_memory_layout_becomes_a_tensor_of_the_same_values(name):
    """Views, read-only, unaligned and reversed arrays are converted without a warning and without being changed."""
    source = odd_arrays()[name]
    before = source.copy()
    (got,) = round_trip([source])
    assert got.shape == source.shape
    assert np.array_equal(got.numpy(), before)
    assert np.array_equal(source, before)


def test_memory_map_becomes_a_tensor(tmp_path):
    """A numpy.memmap is an array like others."""
    mapped = np.memmap(tmp_path / "map", dtype=np.int32, mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    assert round_trip([mapped])[0].tolist() == [1, 2, 3]


def test_conversion_leaves_the_input_alone_and_tensors_are_not_copied():
    """The tree that was given still holds NumPy values; the new one holds the same tensors."""
    tensor = torch.arange(3)
    tree = {"lr": np.float64(0.1), "t": tensor, "list": [tensor, np.int64(1)]}
    new = encode(tree)
    assert type(tree["lr"]) is np.float64
    assert type(tree["list"][1]) is np.int64
    assert new["t"] is tensor
    assert new["list"] == [tensor, 1]


def test_shared_containers_and_cycles_survive_a_conversion():
    """Where something is converted, what was one object stays one object, and cycles close."""
    shared = [np.int64(1)]
    tree = {
        "a": shared,
        "b": (shared, shared),
        "o": collections.OrderedDict(x=shared),
        "c": collections.Counter(a=np.int64(2)),
    }
    tree["self"] = tree
    holder = ([],)
    holder[0].append(np.float32(0.5))
    tree["holder"] = [holder, holder]
    got = round_trip(tree)
    assert got["self"] is got
    assert got["a"] is got["b"][0] is got["b"][1] is got["o"]["x"]
    assert got["holder"][0] is got["holder"][1]
    assert (got["a"], got["c"], got["holder"][0]) == ([1], collections.Counter(a=2), ([0.5],))


def test_tuple_in_a_cycle_through_a_list_is_rebuilt_as_one_object():
    """A cycle that runs through a list and a tuple closes on the converted objects."""
    outer = [np.int64(1)]
    outer.append((outer, "x"))
    new = encode(outer)
    assert new[0] == 1
    assert new[1][0] is new
    got = loaded(written(new))
    assert got[1][0] is got


def test_state_dict_metadata_is_kept_and_converted():
    """OrderedDict._metadata, by which modules keep their version, is kept with NumPy values in it converted."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    state._metadata["extra"] = {"n": np.int64(3)}
    got = round_trip(state)
    assert got._metadata[""] == {"version": 2}
    assert got._metadata["extra"] == {"n": 3}
    assert type(state._metadata["extra"]["n"]) is np.int64


def test_empty_bytes_come_back_as_exactly_bytes_everywhere():
    """b'' as a value, an element and a key is read by a safe load as the builtin bytes."""
    data = written(encode({"v": b"", "l": [b"", b"x"], "k": {b"": b""}, "t": (b"",), "s": {b""}}))
    for got in (loaded(data), torch.load(io.BytesIO(data)), torch.load(io.BytesIO(data), weights_only=False)):
        assert_same(got, {"v": b"", "l": [b"", b"x"], "k": {b"": b""}, "t": (b"",), "s": {b""}})


@pytest.mark.parametrize("exponent", [0, 8, 63, 64, 255 * 8 - 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_of_up_to_255_bytes_comes_back(exponent, sign):
    """The largest integers that a safe load reads are saved."""
    value = sign * (2**exponent - 1)
    assert round_trip([value, -value]) == [value, -value]


def test_depth_of_the_limit_is_saved_and_one_more_is_refused():
    """MOST_LEVELS levels load again; one more is a clear error and no RecursionError."""

    def nested(levels, kind):
        tree = 1
        for _ in range(levels):
            tree = kind(tree)
        return tree

    for kind in (lambda x: (x,), lambda x: {"k": x}, lambda x: collections.OrderedDict(k=x)):
        deep = nested(MOST_LEVELS, kind)
        assert torch_pickle(loaded(written(encode(deep)))) == torch_pickle(deep)
        with pytest.raises(UnsavableStateError, match=f"more than {MOST_LEVELS} levels"):
            encode(nested(MOST_LEVELS + 1, kind))
        with pytest.raises(UnsavableStateError, match=f"more than {MOST_LEVELS} levels"):
            encode(nested(20_000, kind))


def test_tuple_shared_a_thousandfold_is_walked_once():
    """Sixty doublings of a shared tuple take no time, since every object is looked at once."""
    tree = (np.int64(1),)
    for _ in range(60):
        tree = (tree, tree)
    got = encode(tree)
    for _ in range(60):
        assert got[0] is got[1]
        got = got[0]
    assert got == (1,)


# --- what is refused -------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024  what people have in their states


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyDict(dict):
    pass


class MyInt(int):
    pass


class MyStr(str):
    __slots__ = ()


class Plain:
    def __init__(self):
        self.a = 1


class Stateful:
    def state_dict(self):
        return {}


class MyTensor(torch.Tensor):
    pass


def refused():
    """Return values that a safe load refuses, each with what the error has to propose."""
    return {
        "path": (pathlib.Path("a"), "save str({x})."),
        "enum": (Color.RED, "save {x}.value"),
        "int enum": (Level.LOW, "save {x}.value"),
        "namespace": (argparse.Namespace(a=1), "save vars({x})."),
        "simple namespace": (types.SimpleNamespace(a=1), "save vars({x})."),
        "dataclass": (Config(), "save dataclasses.asdict({x})."),
        "named tuple": (Pair(1, 2), "save tuple({x})"),
        "struct sequence": (sys.version_info, "save tuple({x})"),
        "torch return type": (torch.ones(2, 2).max(dim=0), "save tuple({x})"),
        "default dictionary": (collections.defaultdict(list), "save dict({x})."),
        "deque": (collections.deque([1]), "save list({x})."),
        "chain map": (collections.ChainMap({}), "save dict({x})."),
        "mapping proxy": (types.MappingProxyType({}), "save dict({x})."),
        "dictionary subclass": (MyDict(), "save dict({x})."),
        "keys": ({}.keys(), "save list({x})."),
        "values": ({}.values(), "save list({x})."),
        "frozen set": (frozenset([1]), "save set({x}), or sorted({x})."),
        "integer subclass": (MyInt(1), "save int({x})."),
        "text subclass": (MyStr("a"), "save str({x})."),
        "range": (range(3), "save list({x})."),
        "slice": (slice(1, 2), "save ({x}.start, {x}.stop, {x}.step)."),
        "ellipsis": (..., "save None, or the string '...'."),
        "datetime": (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "save {x}.isoformat()."),
        "date": (dt.date(2024, 1, 1), "save {x}.isoformat()."),
        "duration": (dt.timedelta(seconds=1), "save {x}.total_seconds()."),
        "decimal": (decimal.Decimal("0.1"), "save str({x})."),
        "fraction": (fractions.Fraction(1, 3), "save str({x})."),
        "uuid": (uuid.UUID(int=1), "save str({x})."),
        "memory view": (memoryview(b"a"), "save bytes({x})."),
        "array": (array.array("d", [1.0]), "save torch.tensor({x})"),
        "function": (len, "leave it out"),
        "lambda": (lambda: 1, "leave it out"),
        "method": ([].append, "leave it out"),
        "partial": (functools.partial(int), "leave it out"),
        "class": (Config, "save {x}.__qualname__"),
        "module of Python": (types, "save {x}.__name__."),
        "generator": ((i for i in ()), "save list({x})"),
        "file": (sys.stderr, "its name and position"),
        "object with attributes": (Plain(), "save vars({x})"),
        "object with state": (Stateful(), "save {x}.state_dict()."),
        "bare object": (object(), "plain values and tensors"),
        "large integer": (2 ** (255 * 8), "save str({x})."),
        "Python generator of random numbers": (random.Random(1), "save {x}.getstate()."),
        "NumPy generator": (np.random.default_rng(1), "save {x}.bit_generator.state"),
        "NumPy bit generator": (np.random.PCG64(1), "save {x}.state"),
        "old NumPy generator": (np.random.RandomState(1), "save {x}.get_state(legacy=False)"),
        "NumPy dtype": (np.dtype("f4"), "save str({x})."),
        "NumPy ufunc": (np.add, "leave it out"),
        "NumPy class": (np.float32, "save {x}.__qualname__"),
        "long double": (np.longdouble(1), "save float({x})"),
        "long complex": (np.clongdouble(1), "save complex({x})"),
        "NumPy time": (np.datetime64("2024-01-01"), "save str({x})."),
        "NumPy duration": (np.timedelta64(1, "s"), "save str({x})."),
        "NumPy record": (np.zeros(1, dtype=[("a", "i4")])[0], "save {x}.item()."),
        "array of objects": (np.array([None]), "save {x}.tolist()"),
        "array of texts": (np.array(["a"]), "save {x}.tolist()"),
        "array of times": (np.array(["2024"], dtype="datetime64[s]"), "save {x}.tolist()"),
        "masked array": (np.ma.masked_array([1.0]), "save {x}.data and {x}.mask."),
        "record array": (np.rec.array([(1,)], dtype=[("a", "i4")]), "save {x}.tolist()"),
        "torch generator": (torch.Generator(), "save {x}.get_state()."),
        "module": (torch.nn.Linear(1, 1), "save {x}.state_dict()."),
        "optimizer": (torch.optim.SGD([torch.zeros(1)], lr=1.0), "save {x}.state_dict()."),
        "memory format": (torch.channels_last, "save str({x})."),
        "torch function": (torch.relu, "leave it out"),
        "type information": (torch.finfo(torch.float32), "save {x}.dtype."),
        "untyped storage": (torch.zeros(1).untyped_storage(), "save torch.empty(0, dtype=torch.uint8).set_({x})"),
        "tensor subclass": (torch.ones(1).as_subclass(MyTensor), "as_subclass(torch.Tensor), or register"),
        "lazy parameter": (torch.nn.LazyLinear(1).weight, "run one forward pass"),
        "lazy buffer": (torch.nn.parameter.UninitializedBuffer(), "run one forward pass"),
        "meta tensor": (torch.empty(2, device="meta"), "give it data first"),
        "meta parameter": (torch.nn.Linear(1, 1, device="meta").weight, "give it data first"),
        "oneDNN tensor": (torch.ones(2).to_mkldnn(), "save {x}.to_dense()."),
        "zero tensor": (torch._efficientzerotensor((2,)), "save {x}.clone()."),
        "sub-byte tensor": (torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "save {x}.view(torch.uint8)"),
    }


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", refused())
def test_value_that_cannot_come_back_is_refused_with_its_path_and_a_cure(name):
    """The error gives the key path, the type and one line to write instead; nothing is written."""
    value, cure = refused()[name]
    tree = {"args": [1, (2, {"x": value})], "model": {"w": torch.ones(1)}}
    with pytest.raises(UnsavableStateError) as caught:
        encode(tree)
    error = caught.value
    assert error.location == "obj['args'][1][1]['x']"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    assert error.type_name == name
    assert cure.format(x=error.location) in str(error)
    assert "Next: " in str(error)
    assert encode({"fine": 1}) == {"fine": 1}


def test_class_registered_with_a_lambda_inside_names_the_inner_value():
    """Values are named where they are, however they are reached."""
    tagged = torch.ones(1)
    tagged.info = {"path": pathlib.Path("a")}
    ordered = collections.OrderedDict(a=1)
    ordered.extra = [pathlib.Path("b")]
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.tag = Color.RED
    cases = [
        ({"w": tagged}, "obj['w'].info['path']"),
        ({"o": ordered}, "obj['o'].extra[0]"),
        ([parameter], "obj[0].tag"),
        ({pathlib.Path("k"): 1}, "list(obj)[0]"),
        ({"d": {"a": 1, (1, Color.RED): 2}}, "list(obj['d'])[1][1]"),
        ({"s": {frozenset([1])}}, "list(obj['s'])[0]"),
        ({(1, "a"): Color.RED}, "obj[(1, 'a')]"),
        (Color.RED, "obj"),
        ({"k" * 100: Color.RED}, "obj['" + "k" * 56 + "...]"),
    ]
    for tree, location in cases:
        with pytest.raises(UnsavableStateError) as caught:
            encode(tree)
        assert caught.value.location == location


def test_root_name_is_used_in_the_path():
    """A caller can say what the tree is called where its user knows it."""
    with pytest.raises(UnsavableStateError) as caught:
        encode({"a": Color.RED}, root="components['counters']")
    assert caught.value.location == "components['counters']['a']"
    base = torch.zeros(2)
    with pytest.raises(UnsavableStateError, match=r"state\['a'\], which has another dtype") as caught:
        encode({"a": base, "b": base.view(torch.int32), "n": np.float64(1)}, root="state")
    assert caught.value.location == "state['b']"


def test_array_under_two_names_becomes_one_tensor():
    """What was one array is one tensor afterwards, also where it had to be copied."""
    array_of_it = np.arange(3.0)[::-1]
    got = round_trip([array_of_it, {"again": array_of_it}])
    assert got[0] is got[1]["again"]


def test_tuple_or_counter_that_contains_itself_is_refused():
    """Pickle writes such cycles with opcodes that a safe load does not know, or not at all."""
    inner = []
    cyclic = (inner,)
    inner.append(cyclic)
    counter = collections.Counter()
    counter["self"] = counter
    for tree, location in ((cyclic, "obj[0][0]"), (counter, "obj['self']")):
        with pytest.raises(UnsavableStateError, match="contains itself") as caught:
            encode(tree)
        assert caught.value.location == location


def test_cycle_through_a_tuple_that_starts_at_a_list_is_saved():
    """The same cycle is fine where pickle meets the list first."""
    outer = []
    outer.append((outer,))
    got = round_trip(outer)
    assert got[0][0] is got


def test_two_dtypes_over_one_memory_are_refused_naming_both():
    """Tensors of different element types that share bytes cannot be told apart in a file; both paths are given."""
    base = torch.arange(8, dtype=torch.int32)
    with pytest.raises(UnsavableStateError) as caught:
        encode({"a": base, "n": [base.view(torch.float32)]})
    assert caught.value.location == "obj['n'][0]"
    assert "obj['a']" in str(caught.value)
    assert ".clone()" in str(caught.value)


def test_two_dtypes_over_disjoint_parts_of_one_memory_are_saved():
    """A flat buffer with regions of different types is fine, since each region becomes a record of its own."""
    flat = torch.arange(32, dtype=torch.uint8)
    tree = {"f": flat[:16].view(torch.float32), "i": flat[16:].view(torch.int64)}
    assert_same(round_trip(tree), tree)


def test_new_dtypes_over_one_memory_are_saved():
    """Types that the format stores as bytes may share memory, as in torch.save."""
    base = torch.arange(16, dtype=torch.uint8).view(torch.uint16)
    tree = {"a": base, "b": base.view(torch.uint32)}
    got = round_trip(tree)
    assert_same(got, tree)
    got["a"].zero_()
    assert not got["b"].view(torch.int32).any()


def test_tensor_without_its_memory_is_refused():
    """A tensor whose storage was freed, as sharded training does, is refused by its path."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsavableStateError, match="storage holds 0 bytes"):
        encode({"w": tensor})


def test_tensor_inside_a_transform_is_refused():
    """A tensor of torch.func has no memory of its own."""
    seen = []

    def keep(x):
        with pytest.raises(UnsavableStateError, match="transform"):
            encode([x])
        seen.append(1)
        return x.sum()

    torch.func.grad(keep)(torch.ones(2))
    torch.vmap(keep)(torch.ones(2, 2))
    assert seen == [1, 1]


def test_fake_tensor_is_refused():
    """A tensor of a tracer has a shape and no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(UnsavableStateError, match="FakeTensor"):
        encode([fake])


def test_sparse_tensor_with_bad_indices_is_refused():
    """Indices outside the shape would make the file unreadable, so they are found when it is saved."""
    bad = torch.sparse_coo_tensor([[5]], [1.0], (3,), check_invariants=False)
    with pytest.raises(UnsavableStateError, match="indices"):
        encode([bad])


# --- registered types ------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    with torch.serialization.safe_globals([Config, Color, Pair, MyTensor, Plain, MyDict, pathlib.PosixPath]):
        yield


@pytest.mark.usefixtures("registered")
def test_registered_types_pass_and_come_back():
    """What the user registered with torch is saved as it is, and read back by a safe load."""
    tree = {"c": Config(0.5), "e": Color.RED, "n": Pair(1, torch.ones(2)), "class": Config}
    got = round_trip(tree)
    assert (got["c"], got["e"], got["class"]) == (Config(0.5), Color.RED, Config)
    assert type(got["n"]) is Pair
    assert got["n"].b.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("registered")
def test_registered_tensor_subclass_comes_back():
    """A subclass of Tensor that was registered keeps its type and data."""
    (got,) = round_trip([torch.arange(3.0).as_subclass(MyTensor)])
    assert type(got) is MyTensor
    assert got.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("registered")
def test_values_inside_a_registered_object_are_checked_and_named():
    """An object is saved as it is, so what is inside it has to be plain; the path says where it is not."""
    plain = Plain()
    plain.a = {"n": np.float64(1)}
    with pytest.raises(UnsavableStateError, match="plain value") as caught:
        encode([plain])
    assert caught.value.location == "obj[0].a['n']"
    plain.a = Level.LOW
    with pytest.raises(UnsavableStateError) as caught:
        encode([plain])
    assert caught.value.location == "obj[0].a"


@pytest.mark.usefixtures("registered")
def test_registered_dictionary_that_a_safe_load_cannot_fill_is_refused():
    """Registering a subclass of dict does not help, since a safe load fills only torch's own three kinds."""
    with pytest.raises(UnsavableStateError, match="puts items into"):
        encode([MyDict(a=1)])


def test_type_is_refused_again_once_it_is_no_longer_registered():
    """The list is looked at for each save."""
    with torch.serialization.safe_globals([Config]):
        encode([Config()])
    with pytest.raises(UnsavableStateError):
        encode([Config()])
