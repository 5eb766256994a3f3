"""A file made to do harm is refused in bounded time and memory, and nothing of it is executed."""

import io
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from safeckpt.errors import DamagedCheckpointError, LoadError, UntrustedTypeError
from safeckpt.file import open_file
from tests.file import test_pickle_scan as op
from tests.file.states import assembled, sealed

PROTO, STOP = op.PROTO, op.STOP


def plain_file(pickle_bytes, records=(("data/0", bytes(16)),), **options):
    """Return a file as plain torch would write it, with any pickle and records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", options.get("method", zipfile.ZIP_STORED)) as out:
        out.writestr("archive/data.pkl", pickle_bytes)
        for name, data in (*records, ("version", b"3\n"), ("byteorder", b"little")):
            out.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def own_file(pickle_bytes, contents=(bytes(16),), header=None):
    """Return a file with a trailer that is right, as anyone who can run this library can make one."""
    return assembled(pickle_bytes, contents, header)


def load(data, *, mmap=False, tmp_path=None):
    """Verify and load, as the drop-in does."""
    source = io.BytesIO(data)
    if mmap:
        source = tmp_path / "hostile.pt"
        source.write_bytes(data)
    with open_file(source) as file:
        file.verify()
        return file.load(mmap=mmap)


def pickled(body):
    return PROTO + body + STOP


COLLIDING = [(7 + index * ((1 << 61) - 1)).to_bytes(10, "little", signed=True) for index in range(20_000)]
INDICES = op.tensor(size=(1, 2), stride=(2, 1), numel=2).replace(b"FloatStorage", b"LongStorage")
VALUES = op.tensor(size=(2,)).replace(op.text("0"), op.text("1"))
LAYOUT = b"ctorch.serialization\n_get_layout\n(" + op.text("torch.sparse_coo") + b"tR"
SIZE = b"(" + op.number(3) + b"t"
SPARSE = b"ctorch._utils\n_rebuild_sparse_tensor\n(" + LAYOUT + b"(" + INDICES + VALUES + SIZE + b"ttR"
DOUBLED = b"N" + b"q\x00h\x00\x86" * 60


def colliding_pairs(count):
    """Return pairs of integers whose tuples have one hash: CPython's is xxHash without a secret."""
    modulus, prime1, prime2, prime5 = 1 << 64, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(prime2, -1, modulus)
    pairs = []
    first = 0
    while len(pairs) < count:
        first += 1
        mixed = (prime5 + first * prime2) % modulus
        mixed = ((mixed << 31 | mixed >> 33) % modulus) * prime1 % modulus
        second = (12345 - mixed) * inverse % modulus
        if second < (1 << 61) - 1:  # an integer below that is its own hash
            pairs.append((first, second))
    assert len({hash(pair) for pair in pairs}) == 1
    return pairs


def long1(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def double(value):
    return b"G" + struct.pack(">d", value)


PAIRS = b"".join(long1(first) + long1(second) + b"\x86N" for first, second in colliding_pairs(3000))
ROTATED = b"".join(b"h\x01" + double(-1000003.0 * k) + double(k) + b"\x86RN" for k in range(1, 3000))
SHAPE = b"ctorch\nSize\n((" + b"K\x01" * 20_000 + b"ttR"
LATIN = b"c_codecs\nencode\nq\x01X" + struct.pack("<I", 100_000) + b"a" * 100_000 + op.text("latin1") + b"\x86q\x02R"
ITEMS = b"ccollections\nOrderedDict\nq\x01}(" + b"".join(op.number(k) + b"N" for k in range(5000)) + b"uq\x02"
ONES = b"(" + b"K\x01" * 5000 + b"tq\x01"
WIDE = b"ctorch._utils\n_rebuild_tensor\nq\x02("
WIDE += op.storage(1) + b"q\x03K\x00h\x01h\x01tq\x04R" + b"h\x02h\x04R" * 5000
MANY_VALUES = op.tensor(size=(1 << 30,), stride=(0,))
PICKLES = {
    "putenv": (b"cos\nputenv\n(" + op.text("SAFECKPT_WAS_OWNED") + op.text("1") + b"tR", UntrustedTypeError),
    "eval": (b"c__builtin__\neval\n(" + op.text("1") + b"tR", UntrustedTypeError),
    "getattr": (b"c__builtin__\ngetattr\n(" + op.text("x") + b"tR", UntrustedTypeError),
    "torch.load": (b"ctorch\nload\n(" + op.text("/etc/passwd") + b"tR", UntrustedTypeError),
    "deep key": (b"}" + b"N" + b"\x85" * 1_000_000 + b"Ns", DamagedCheckpointError),
    "deep value": (b"N" + b"\x85" * 1_000_000, DamagedCheckpointError),
    "shared key": (b"}" + DOUBLED + b"Ns", DamagedCheckpointError),
    "memory": (b"c__builtin__\nbytearray\n(" + op.number(2**31 - 1) + b"tR", DamagedCheckpointError),
    "memory by tensor": (b"ctorch\nFloatTensor\n(" + op.number(2**31 - 1) + b"tR", DamagedCheckpointError),
    "collisions": (b"}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in COLLIDING) + b"u", DamagedCheckpointError),
    "storage too small": (op.tensor(size=(1 << 20,), numel=1 << 20), DamagedCheckpointError),
    "outside the storage": (op.tensor(offset=100), DamagedCheckpointError),
    "negative offset": (op.tensor(offset=-4), DamagedCheckpointError),
    "negative stride": (op.tensor(stride=(-1,)), DamagedCheckpointError),
    "overflow": (op.tensor(size=(2**30, 2**30, 2**30), stride=(2**30, 2**30, 1)), DamagedCheckpointError),
    "missing record": (op.tensor().replace(op.text("0"), op.text("7")), DamagedCheckpointError),
    "record outside": (op.tensor().replace(op.text("0"), op.text("../../x")), DamagedCheckpointError),
    "unknown device": (op.tensor().replace(op.text("cpu"), op.text("moon")), DamagedCheckpointError),
    "no storage": (op.text("0") + b"Q", DamagedCheckpointError),
    "unknown opcode": (b"\x95" + bytes(8) + b"N", DamagedCheckpointError),
    "empty": (b"", DamagedCheckpointError),
    "bad sparse indices": (SPARSE, DamagedCheckpointError),
    "colliding tuples": (b"}(" + PAIRS + b"u", DamagedCheckpointError),
    "colliding complex numbers": (
        b"(c__builtin__\ncomplex\nq\x01" + double(0) + b"\x85R}(" + ROTATED + b"ut",
        DamagedCheckpointError,
    ),
    "shape as a key": (b"}(" + SHAPE + b"q\x01N" + b"h\x01N" * 5000 + b"u", DamagedCheckpointError),
    "memory by a tensor": (
        b"c__builtin__\nbytearray\n(" + op.tensor(size=(), stride=()).replace(b"FloatStorage", b"IntStorage") + b"tR",
        DamagedCheckpointError,
    ),
    "set of a tensor": (b"c__builtin__\nset\n(" + MANY_VALUES + b"tR", DamagedCheckpointError),
    "Counter of a tensor": (b"ccollections\nCounter\n(" + MANY_VALUES + b"tR", DamagedCheckpointError),
    "shape of a tensor": (b"ctorch\nSize\n(" + MANY_VALUES + b"tR", DamagedCheckpointError),
    "text copied again": (b"(" + LATIN + b"h\x01h\x02R" * 5000 + b"t", DamagedCheckpointError),
    "dictionary copied again": (b"(" + ITEMS + b"h\x01h\x02\x85R" * 5000 + b"t", DamagedCheckpointError),
    "dimensions again": (b"(" + WIDE + b"t", DamagedCheckpointError),
    "shared tuple in an inner call": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nset\nctorch\nTensor\n(](" + DOUBLED + b"et}tR",
        DamagedCheckpointError,
    ),
    "shared tuple of parts": (
        b"ctorch._utils\n_rebuild_sparse_tensor\n(" + LAYOUT + DOUBLED + b"tR",
        DamagedCheckpointError,
    ),
    "two types of one storage": (
        b"(" + op.storage(2).replace(b"FloatStorage", b"DoubleStorage") + op.tensor(size=(4,)) + b"t",
        DamagedCheckpointError,
    ),
    "state of a tensor": (
        op.tensor() + b"(" + op.storage() + op.number(0) + b"(" + op.number(1 << 26) + b"t(K\x01ttb",
        DamagedCheckpointError,
    ),
    "attributes by slots": (
        b"ccollections\nOrderedDict\n)R}}" + op.text("keys") + b"Ns\x86b",
        DamagedCheckpointError,
    ),
}
CONTENTS = {
    "bad sparse indices": (struct.pack("<qq", 0, 1 << 40), bytes(16)),
    "memory by a tensor": (struct.pack("<4i", 1 << 30, 0, 0, 0),),
    "dimensions again": (bytes(4),),
}


@pytest.mark.parametrize("kind", ["plain", "own", "mapped"])
@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickle_is_refused(name, kind, tmp_path):
    """Each is refused by its kind of error, whether the file has a right digest or none, mapped or read."""
    body, error = PICKLES[name]
    contents = CONTENTS.get(name, (bytes(16),))
    if kind == "plain":
        data = plain_file(pickled(body), [(f"data/{key}", content) for key, content in enumerate(contents)])
    else:
        data = own_file(pickled(body), contents)
    start = time.process_time()
    with pytest.raises(error) as caught:
        load(data, mmap=kind == "mapped", tmp_path=tmp_path)
    assert isinstance(caught.value, LoadError)
    assert time.process_time() - start < 20
    assert "SAFECKPT_WAS_OWNED" not in os.environ


def test_the_files_of_these_tests_load_when_they_are_honest(tmp_path):
    """What the tests above change is otherwise a file that loads."""
    for data in (plain_file(pickled(op.tensor())), own_file(pickled(op.tensor()))):
        assert load(data).tolist() == [0.0] * 4
        assert load(data, mmap=True, tmp_path=tmp_path).tolist() == [0.0] * 4


def test_untrusted_type_is_named_with_what_to_do():
    """The error says which type, that nothing ran, and how to allow it."""
    with pytest.raises(UntrustedTypeError) as caught:
        load(own_file(pickled(b"cmy.module\nConfig\n)R")))
    assert caught.value.type_name == "my.module.Config"
    assert "none of its code was executed" in str(caught.value)
    assert "add_safe_globals([my.module.Config])" in str(caught.value)


def zip_of(records, *, tweak=lambda _: None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for name, data in records:
            info = zipfile.ZipInfo(name)
            tweak(info)
            out.writestr(info, data)
    return buffer.getvalue()


GOOD = [("archive/data.pkl", pickled(op.tensor())), ("archive/data/0", bytes(16)), ("archive/version", b"3\n")]


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("why", "records"),
    [
        ("name", [*GOOD, ("archive/../../etc/passwd", b"x")]),
        ("name", [*GOOD, ("archive/data\\0", b"x")]),
        ("name", [*GOOD, ("loose", b"x")]),
        ("name", [*GOOD, ("archive//x", b"x")]),
        ("name", [*GOOD, ("archive/dir/", b"")]),
        ("two records", [*GOOD, ("archive/data/0", bytes(16))]),
        ("two records", [("archive/DATA.PKL", pickled(b"N")), *GOOD]),
        ("two records", [*GOOD, ("archive/Data/0", bytes(16))]),
        ("no torch file", [*GOOD, ("other/data/0", bytes(16))]),
        (r"no data\.pkl", [("archive/data/0", bytes(16))]),
        ("TorchScript", [*GOOD, ("archive/constants.pkl", b"x")]),
        ("data/0", [("archive/data.pkl", pickled(op.tensor()))]),
        ("has 12 bytes", [GOOD[0], ("archive/data/0", bytes(12))]),
    ],
)
def test_archive_that_torch_would_misread_is_refused(why, records):
    """Names that lead outside, duplicates, other folders, missing records and other archives are refused."""
    with pytest.raises(DamagedCheckpointError, match=why):
        load(zip_of(records))


def test_compressed_record_is_refused():
    """A record that unpacks to a thousand times its size is not unpacked."""
    data = plain_file(pickled(op.tensor()), [("data/0", bytes(100 << 20))], method=zipfile.ZIP_DEFLATED)
    assert len(data) < 1 << 20
    with pytest.raises(DamagedCheckpointError, match="compressed"):
        load(data)


def patched(data, offset_in_entry, value, name=b"archive/data/0"):
    """Change a byte of the entry of a record in the table of contents."""
    at = data.rindex(name) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    changed = bytearray(data)
    changed[at + offset_in_entry] = value
    return bytes(changed)


@pytest.mark.parametrize(
    ("why", "offset", "value"),
    [
        ("attributes", 38, 0x10),
        ("encrypted", 8, 1),
        ("not use", 8, 0x20),
        ("compressed", 10, 8),
        ("stored in", 24, 17),
        ("overlap|table of contents", 42, 0),
        ("attributes", 34, 1),
    ],
)
def test_entry_that_torch_does_not_write_is_refused(why, offset, value):
    """The bit that makes torch return unfilled memory, encryption, compression and wrong sizes are refused."""
    data = zip_of(GOOD, tweak=lambda info: setattr(info, "external_attr", 0))
    load(data)
    with pytest.raises(DamagedCheckpointError, match=why):
        load(patched(data, offset, value))


def test_records_that_overlap_are_refused():
    """Two names for one range of bytes would let a small file claim a large state."""
    data = zip_of([*GOOD, ("archive/data/1", bytes(16))], tweak=lambda info: setattr(info, "external_attr", 0))
    first = data.index(b"archive/data/0") - 30
    at = data.rindex(b"archive/data/1") - 46 + 42
    with pytest.raises(DamagedCheckpointError, match="overlap"):
        load(data[:at] + struct.pack("<I", first) + data[at + 4 :])


def with_header_elsewhere():
    """Return a file in which the header of the pickle leads to other bytes, under a digest that is right."""
    honest = pickled(op.tensor().replace(op.text("0"), op.text("1")))
    other = pickled(b"N" + b"\x85" * (len(honest) - 4))
    data = bytearray(own_file(honest, (other.ljust(16 + len(other), b"\0"), bytes(16))))
    with open_file(io.BytesIO(bytes(data))) as file:
        pickle_entry, hidden = (file.archive().find(name) for name in ("data.pkl", "data/0"))
    at = pickle_entry.header_offset + 28
    moved = struct.unpack_from("<H", data, at)[0] + hidden.data_offset - pickle_entry.data_offset
    struct.pack_into("<H", data, at, moved)
    return sealed(data)


def test_record_whose_header_points_elsewhere_is_refused(tmp_path):
    """The pickle that torch finds by a header is the one that was scanned, also under a digest that is right."""
    for mmap in (False, True):
        with pytest.raises(DamagedCheckpointError, match=r"header of data\.pkl"):
            load(with_header_elsewhere(), mmap=mmap, tmp_path=tmp_path)


def test_directory_that_claims_more_entries_than_it_has_is_refused():
    """The number of records is bounded by the bytes there are for them."""
    data = zip_of(GOOD)
    at = len(data) - 22
    with pytest.raises(DamagedCheckpointError):
        load(data[: at + 8] + b"\xfe\xff\xfe\xff" + data[at + 12 :])


LIMITED = """
import resource, sys
from safeckpt.errors import LoadError
from safeckpt.file import open_file
import torch
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    for mmap in (False, True):
        try:
            with open_file(path) as file:
                file.verify()
                file.load(mmap=mmap)
        except LoadError as error:
            print(type(error).__name__)
        else:
            print("loaded", path)
"""


@pytest.mark.slow
def test_hostile_files_are_refused_within_a_limit_of_memory(tmp_path):
    """In a process that may use little more memory than torch itself, every file is refused and none kills it."""
    paths = []
    for name, (body, _) in PICKLES.items():
        for kind, make in (("plain", plain_file), ("own", own_file)):
            contents = CONTENTS.get(name, (bytes(16),))
            given = [(f"data/{key}", content) for key, content in enumerate(contents)] if kind == "plain" else contents
            path = tmp_path / f"{name}-{kind}.pt".replace(" ", "-")
            path.write_bytes(make(pickled(body), given))
            paths.append(path)
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    virtual = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(virtual + (1 << 30)), *paths],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2 * len(paths), done.stdout
    assert "loaded" not in done.stdout


def test_bomb_of_many_references_to_one_storage_loads_in_time():
    """A tensor of 10**12 elements over 16 bytes is a view; loading it touches nothing."""
    got = load(own_file(pickled(op.tensor(size=(2**30, 2**10), stride=(0, 0)))))
    assert got.shape == (2**30, 2**10)
    assert got.untyped_storage().nbytes() == 16
