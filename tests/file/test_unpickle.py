"""The reader in C gives what torch's own reader gives."""

import pickle
from collections import Counter, OrderedDict

import pytest
import torch

from safeckpt.errors import UntrustedTypeError
from safeckpt.file import encode, open_file
from safeckpt.file.pickle_scan import Scan
from safeckpt.file.reading.unpickle import unpickle
from safeckpt.file.writing.pickling import pickle_payload
from tests.comparing import assert_same
from tests.file import states
from tests.file import test_hostile as hostile
from tests.file import test_pickle_scan as op
from tests.file.states import loaded

MANY = 150


def written(state):
    return states.written(encode(state))


def many(count=MANY):
    """Return many small tensors of several types and shapes, some of them parameters, and one large one."""
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]
    state = {}
    for index in range(count):
        tensor = torch.randn(1 + index % 3, 1 + index % 5).mul(9).to(dtypes[index % len(dtypes)])
        state[f"layer.{index}"] = tensor
    state["scalar"] = torch.tensor(3.0)
    state["parameter"] = torch.nn.Parameter(torch.ones(3))
    state["leaf"] = torch.ones(3, requires_grad=True)
    state["large"] = torch.randn(10_000)
    state["empty"] = torch.zeros(0, 4)
    state["plain"] = [
        {1},
        b"x",
        b"",
        bytearray(b"y"),
        1j,
        "é",
        2**100,
        OrderedDict(a=Counter("b")),
        torch.float32,
        (1, None),
    ]
    state["newer"] = [torch.ones(2).to(torch.float8_e5m2), torch.tensor([7], dtype=torch.uint16)]
    return state


def test_simple_state_is_read_without_torchs_reader_and_any_other_with_it(monkeypatch):
    """Both ways of reading give the same, and a state with more than plain tensors in it goes through torch.load."""
    plain, tagged = many(), many()
    tagged["tagged"] = torch.ones(2)
    tagged["tagged"].note = "x"
    tagged["sparse"] = torch.eye(3).to_sparse()
    used = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: used.append(kwargs) or real(*args, **kwargs))
    assert_same(loaded(written(plain)), plain)
    assert not used
    assert_same(loaded(written(tagged)), tagged)
    assert used == [{"weights_only": True, "mmap": False}]


def test_fast_reader_itself_looks_up_nothing_but_its_few_names():
    """Even given a pickle that was not scanned, it makes nothing but plain containers and tensors."""
    for module, name in (("os", "system"), ("builtins", "eval"), ("torch._utils", "_rebuild_wrapper_subclass")):
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            unpickle(f"\x80\x02c{module}\n{name}\n.".encode("latin1"), Scan(), torch.UntypedStorage)


def test_foreign_name_in_a_plain_state_is_refused():
    """The fast way is no way around the list of allowed names."""
    pickled = pickle_payload(encode(many()))
    for forged in (b"cos\nsystem\n", b"c__builtin__\neval\n", b"cfunctools\npartial\n"):
        data = pickled.data.replace(b"ccollections\nCounter\n", forged)
        assert data != pickled.data
        with pytest.raises(UntrustedTypeError):
            loaded(states.assembled(data, [bytes(span.nbytes) for span in pickled.spans]))


@pytest.mark.parametrize("mmap", [False, True])
def test_loaded_tensors_own_their_memory(tmp_path, mmap):
    """No small tensor shares its storage with another one, so that it can be resized and saved alone."""
    path = tmp_path / "many.pt"
    path.write_bytes(written(many()))
    with open_file(path) as file:
        file.verify()
        got = file.load(mmap=mmap)
    small = [tensor for name, tensor in got.items() if name not in ("large", "empty", "plain", "newer")]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in small)
    assert len({tensor.untyped_storage().data_ptr() for tensor in small}) == len(small)
    assert_same(got, many())


def test_mapping_onto_devices_keeps_working():
    """A device, a mapping or a function for map_location changes nothing about it."""
    data = written(many())
    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage, lambda *_: None):
        got = loaded(data, map_location=location)
        assert_same(got, many())
        assert got["layer.1"].untyped_storage().nbytes() == got["layer.1"].nbytes
    meta = loaded(data, map_location="meta")
    assert meta["layer.7"].shape == many()["layer.7"].shape


def test_tied_small_tensors_stay_tied():
    """Tensors that share a storage share it afterwards."""
    state = many()
    shared = torch.arange(3.0)
    state |= {"a": shared, "b": shared.view(3, 1), "c": shared[:2]}
    got = loaded(written(state))
    got["a"][0] = 9
    assert got["b"][0, 0] == got["c"][0] == 9


def test_same_tensor_under_two_names_stays_one_object():
    """Identity of small tensors is kept."""
    state = many()
    state["again"] = state["layer.0"]
    got = loaded(written(state))
    assert got["again"] is got["layer.0"]


def test_tensors_inside_containers_and_attributes_are_found():
    """Tensors are found wherever they are in the tree."""
    state = {"list": list(many().values()), "tuple": ({"x": [torch.ones(2)]},), 1: {torch.Size([1]): torch.ones(3)}}
    state["tagged"] = torch.ones(4)
    state["tagged"].tag = torch.zeros(5)
    got = loaded(written(state))
    assert_same(got, state)
    found = [*got["list"][:MANY], got["tuple"][0]["x"][0], got[1][torch.Size([1])], got["tagged"], got["tagged"].tag]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found)


def test_bytes_are_deterministic():
    """Two saves of the same state are equal, and a loaded state saves to the same bytes again."""
    data = written(many())
    assert written(many()) == data
    assert written(loaded(data)) == data


def test_storage_among_the_values_comes_back_as_torch_gives_it():
    """A pickle that refers to a record itself gets a storage, not a part of the reader."""
    got = loaded(hostile.own_file(hostile.pickled(b"(" + op.storage() + op.storage() + b"t")))
    assert [type(item) for item in got] == [torch.storage.TypedStorage] * 2
    assert got[0]._untyped_storage.tolist() == [0] * 16


def test_ordinary_state_is_read_by_the_fast_reader_alone(monkeypatch):
    """Nothing of a plain state makes the reader leave it to torch."""
    monkeypatch.setattr(torch, "load", None)
    assert_same(loaded(written(many())), many())
