"""The scan knows what is in a pickle, and stops what a safe load would not survive."""

import collections
import io
import pickle
import pickletools
import struct

import pytest
import torch

from safeckpt.file.pickle_calls import MOST_DEPTH
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle

PROTO = b"\x80\x02"
STOP = b"."


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return b"J" + struct.pack("<i", value)


def storage(numel=4, key="0", location="cpu"):
    """Return opcodes for a reference to a storage of floats."""
    kind = b"ctorch\nFloatStorage\n"
    return b"(" + text("storage") + kind + text(key) + text(location) + number(numel) + b"tQ"


NO_HOOKS = b"\x89ccollections\nOrderedDict\n)R"


def tensor(*, offset=0, size=(4,), stride=(1,), numel=4, function="_rebuild_tensor_v2", tail=NO_HOOKS):
    """Return opcodes for a tensor."""
    numbers = b"(" + b"".join(map(number, size)) + b"t" + b"(" + b"".join(map(number, stride)) + b"t"
    name = b"ctorch._utils\n" + function.encode() + b"\n"
    return name + b"(" + storage(numel) + number(offset) + numbers + tail + b"tR"


def scan(body):
    return scan_pickle(PROTO + body + STOP)


def test_tensor_is_found_with_what_it_claims():
    """Key, dtype, size and device of a storage are read without unpickling."""
    (claim,) = scan(tensor()).claims.values()
    assert (claim.key, claim.dtype, claim.numel, claim.nbytes, claim.location) == ("0", torch.float32, 4, 16, "cpu")


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("os.system", b"cos\nsystem\n(" + text("true") + b"tR"),
        ("posix.system", b"cposix\nsystem\n(" + text("true") + b"tR"),
        ("builtins.eval", b"c__builtin__\neval\n(" + text("1") + b"tR"),
        ("builtins.getattr", b"c__builtin__\ngetattr\n"),
        ("torch.load", b"ctorch\nload\n"),
        ("torch.serialization.load", b"ctorch.serialization\nload\n"),
        ("sys.modules", b"csys\nmodules\n"),
        ("collections.defaultdict", b"ccollections\ndefaultdict\n)R"),
        ("numpy._core.multiarray.scalar", b"cnumpy._core.multiarray\nscalar\n"),
    ],
)
def test_class_or_function_that_is_not_listed_is_named(name, body):
    """Whatever is asked for beyond torch's list is refused by its full name, in Python 3's spelling."""
    with pytest.raises(UntrustedGlobalError) as caught:
        scan(body)
    assert caught.value.name == name


def test_module_that_torch_blocks_stays_blocked_even_if_registered():
    """What torch never allows is not allowed here either."""
    import os

    with torch.serialization.safe_globals([(os.system, "os.system")]), pytest.raises(UntrustedGlobalError):
        scan(b"cos\nsystem\n")


@pytest.mark.parametrize(
    "body",
    [
        tensor(offset=1),
        tensor(offset=-1),
        tensor(size=(5,)),
        tensor(size=(-1,)),
        tensor(stride=(2,)),
        tensor(stride=(-1,)),
        tensor(size=(2**30, 2**30), stride=(2**30, 1)),
        tensor(size=(2, 2), stride=(1,)),
        tensor(numel=-1),
        tensor(function="_rebuild_tensor", tail=b"", size=(5,)),
        tensor(function="_rebuild_qtensor", size=(2**20, 2**10), stride=(0, 0)),
        tensor(function="_rebuild_tensor_v3", tail=NO_HOOKS),
        tensor(function="_rebuild_tensor_v3", tail=NO_HOOKS + b"N"),
        tensor(function="_rebuild_tensor_v3", tail=NO_HOOKS + b"ctorch\nfloat64\n"),
        b"ctorch._utils\n_rebuild_tensor_v2\n(tR",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N" + number(0) + b"))\x89Nt" + b"R",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nctorch\nTensor\n(" + number(2**30) + b"t}tR",
        b"c__builtin__\nbytearray\n(" + number(2**31 - 1) + b"tR",
        b"ctorch\nFloatTensor\n(" + number(2**31 - 1) + b"tR",
        b"ctorch\nTensor\n(" + number(2**31 - 1) + b"t\x81",
        b"ctorch.storage\nUntypedStorage\n(" + number(2**31 - 1) + b"tR",
        b"ctorch\nFloatStorage\n(" + number(2**31 - 1) + b"tR",
        b"c_codecs\nencode\n(" + text("a") + text("zip") + b"tR",
        b"ctorch\nfloat32\n)R",
    ],
)
def test_call_with_arguments_that_lie_is_refused(body):
    """Tensors outside their storage, memory out of nothing and calls of what is no function are refused."""
    with pytest.raises((PickleError, UntrustedGlobalError)):
        scan(body)


def test_memo_of_a_size_that_the_pickle_chooses_is_refused():
    """An index far beyond the number of objects would make Python's own reader allocate gigabytes."""
    with pytest.raises(PickleError, match="numbers an object"):
        scan(b"Nr\xff\xff\xff\xff")


REPEATED = tensor(size=(2**30, 2**10), stride=(0, 0))
LAYOUT = b"ctorch.serialization\n_get_layout\n(" + text("torch.sparse_coo") + b"tR"


@pytest.mark.parametrize(
    "body",
    [
        b"ctorch._utils\n_rebuild_sparse_tensor\n(" + LAYOUT + b"(" + REPEATED + tensor() + b"(tttR",
        b"ctorch._utils\n_rebuild_nested_tensor\n(" + tensor() + REPEATED + REPEATED + REPEATED + b"tR",
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + REPEATED + b"NNNtR",
    ],
)
def test_tensor_made_from_a_broadcast_of_a_trillion_elements_is_refused(body):
    """Torch would go through all of the elements to make it; the broadcast itself is a view and costs nothing."""
    scan(REPEATED)
    with pytest.raises(PickleError, match="elements in a small storage"):
        scan(body)


@pytest.mark.parametrize(
    "body",
    [
        b"(" + text("module") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(1) + b"tQ",
        b"(" + text("storage") + b"tQ",
        b"(" + text("storage") + text("x") + text("0") + text("cpu") + number(1) + b"tQ",
        b"(" + text("storage") + b"ctorch\nTensor\n" + text("0") + text("cpu") + number(1) + b"tQ",
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + text("1") + b"tQ",
        text("0") + b"Q",
        b"(" + storage(4) + storage(5) + b"t",
    ],
)
def test_reference_to_something_that_is_no_storage_is_refused(body):
    """Persistent ids are storages of one size, and nothing else."""
    with pytest.raises(PickleError):
        scan(body)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_nesting_beyond_the_limit_is_refused_and_up_to_it_is_not(kind):
    """Depth is bounded, for any number of levels and without recursion."""
    wrap = {"tuple": (b"", b"\x85"), "list": (b"]", b"a"), "dict": (b"}" + text("k"), b"s")}[kind]
    scan(wrap[0] * MOST_DEPTH + b"N" + wrap[1] * (MOST_DEPTH - 1) + wrap[1])
    for levels in (MOST_DEPTH + 1, 100_000):
        with pytest.raises(PickleError, match="levels"):
            scan(wrap[0] * levels + b"N" + wrap[1] * levels)


def test_nesting_through_the_memo_is_counted():
    """Depth that is built by naming the last tuple again is depth all the same."""
    body = b"N" + b"".join(b"\x85q\x00" for _ in range(MOST_DEPTH)) + b"0"
    with pytest.raises(PickleError):
        scan(body[:-1] + b"\x85")


def test_tuple_that_shares_itself_is_fine_unless_it_is_hashed():
    """Sixty doublings are 60 objects to read, and 2**60 steps to hash."""
    doubled = b"N" + b"q\x00h\x00\x86" * 60
    scan(doubled)
    with pytest.raises(PickleError, match="hash"):
        scan(b"}" + doubled + b"Ns")
    with pytest.raises(PickleError, match="hash"):
        scan(b"c__builtin__\nset\n(](" + doubled + b"etR")
    with pytest.raises(PickleError, match="hash"):
        scan(b"ccollections\nOrderedDict\n(](" + doubled + b"N\x86etR")


def test_moderate_keys_that_are_hashed_often_add_up():
    """Many uses of one costly key are refused as one key of that cost is."""
    costly = b"N" + b"q\x00h\x00\x86" * 14
    with pytest.raises(PickleError, match="hash"):
        scan(b"}(" + costly + b"q\x01N" + b"h\x01N" * 200 + b"u")


def test_keys_made_to_collide_are_refused():
    """Thousands of integers with one hash would make a dictionary quadratic."""
    keys = [7 + index * ((1 << 61) - 1) for index in range(1000)]
    with pytest.raises(PickleError, match="collide"):
        scan_pickle(pickle.dumps(dict.fromkeys(keys), 2))
    with pytest.raises(PickleError, match="collide"):
        scan_pickle(pickle.dumps({(key, "x"): 1 for key in keys}, 2))
    scan_pickle(pickle.dumps({key * 3 + index: 1 for index, key in enumerate(keys)}, 2))
    scan_pickle(pickle.dumps(dict.fromkeys(range(100_000)), 2))


def test_keys_that_are_the_same_in_many_dictionaries_are_fine():
    """What repeats does not collide: thousands of dictionaries may have the same unusual keys."""
    for key in (float("inf"), 2**70, (1, 2**70), (0.5, "x"), 1e300, 1j):
        scan_pickle(pickle.dumps([{key: index} for index in range(1000)], 2))
        many = [{pickle.loads(pickle.dumps(key)): index} for index in range(1000)]
        scan_pickle(pickle.dumps(many, 2))


def test_tuples_of_tensors_as_keys_are_fine():
    """Objects that are hashed by their address are all different."""
    scan(b"}(" + b"".join(tensor() + number(1) + b"\x86N" for _ in range(600)) + b"u")


@pytest.mark.parametrize("levels", [400, MOST_DEPTH - 3])
def test_key_that_is_nested_as_deeply_as_is_allowed_is_read(levels):
    """Nothing in the scan of a key goes by Python's recursion."""
    scan(b"}N" + b"\x85" * levels + b"Ns")
    scan(b"}" + b"\x8a\x09" + (2**65).to_bytes(9, "little") + b"\x85" * levels + b"Ns")


@pytest.mark.parametrize(
    "body",
    [b"}" + b"]Ns", b"}}Ns", b"}c__builtin__\nbytearray\n)RNs", b"}c__builtin__\nset\n(]tRNs"],
)
def test_keys_that_cannot_be_hashed_are_refused(body):
    """A list, a dictionary, a bytearray and a set are no keys."""
    with pytest.raises(PickleError, match="key"):
        scan(body)


@pytest.mark.parametrize(
    "body",
    [
        b"]Na" + b"0",
        b"(i__main__\nf\n",
        b"\x95" + bytes(8),
        b"\x94",
        b"\x8c\x01a",
        b"B" + struct.pack("<I", 1) + b"a",
        b"I1\n",
        b"(lp0\n",
    ],
)
def test_opcodes_that_a_safe_load_does_not_know_are_refused(body):
    """What torch's reader would refuse is refused before it is tried."""
    with pytest.raises(PickleError, match="opcode"):
        scan(body)


@pytest.mark.parametrize(
    "body",
    [
        b"Na",
        b"]NNs",
        b"NNs",
        b"N)R",
        b"NN\x81",
        b")N)b",
        b"(NN",
        b"NN",
        b"h\x05",
        b"t",
        b"u",
        b"e",
        b"X\xff\xff\xff\xffab",
    ],
)
def test_inconsistent_pickle_is_refused(body):
    """Items for what is no container, calls of nothing, missing marks and missing memos are refused."""
    with pytest.raises(PickleError):
        scan(body)


def test_every_truncation_and_every_changed_byte_ends_in_one_of_two_errors_or_a_scan():
    """Whatever the bytes are, the scan ends, with its own errors only."""
    buffer = io.BytesIO()
    torch.save({"a": [torch.ones(3), (1, 2.5, "x", b"y")], "o": collections.OrderedDict(k=None)}, buffer)
    buffer.seek(0)
    import zipfile

    with zipfile.ZipFile(buffer) as archive:
        data = archive.read("archive/data.pkl")
    for length in range(len(data)):
        with pytest.raises((PickleError, UntrustedGlobalError)):
            scan_pickle(data[:length])
    for at in range(len(data)):
        for value in {0, 1, 40, 82, 99, 255, data[at] ^ 1}:
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                scan_pickle(changed)
            except (PickleError, UntrustedGlobalError):
                continue


def test_helpers_of_this_file_make_valid_pickles():
    """The opcodes that the tests above change are those that pickle itself reads."""
    list(pickletools.genops(PROTO + tensor() + STOP))
