"""A file is opened once, what is wrong with it is said, and what is loaded is what was verified."""

import io
import os
import pickle
import stat
import struct
import tarfile
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from safeckpt.errors import DamagedCheckpointError, FormatVersionError
from safeckpt.file import FORMAT_VERSION, encode, open_file, verify, write_file
from safeckpt.file.checksum import CHUNK_BYTES
from safeckpt.file.trailer import TRAILER_BYTES
from safeckpt.system import threads
from tests import children
from tests.comparing import assert_same
from tests.file.states import assembled, corpus, loaded, trained, written

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|BSR) tensor support:UserWarning", "ignore:Sparse invariant checks:UserWarning"
)


@pytest.fixture
def path(tmp_path):
    """Return the path of a good file."""
    path = tmp_path / "good.pt"
    path.write_bytes(written({"w": torch.arange(10.0), "step": 3}, header={"step": 3}))
    return path


def reason_of(data):
    with pytest.raises(DamagedCheckpointError) as caught:
        verify(io.BytesIO(data))
    assert not isinstance(caught.value, FormatVersionError)
    return caught.value.reason


# --- what a good file says -------------------------------------------------------------------------------------------


def test_report_of_a_good_file_says_that_every_byte_was_checked(path):
    """The report has the size, the digest and the header, and one line for people."""
    report = verify(path)
    assert (report.path, report.size_bytes, report.self_proving) == (str(path), path.stat().st_size, True)
    assert (report.format_version, report.header) == (FORMAT_VERSION, {"step": 3})
    assert report.digest in path.read_bytes()[-TRAILER_BYTES:].decode()
    assert report.records == 8
    assert "every byte checked" in str(report)


@pytest.mark.parametrize("form", ["str", "path", "bytesio", "raw", "buffered", "temporary", "random"])
def test_file_is_read_from_whatever_torch_reads_from(path, form):
    """Paths and open binary files of any kind give the same object."""
    data = path.read_bytes()
    temporary = tempfile.NamedTemporaryFile()  # noqa: SIM115
    temporary.write(data)
    random = tempfile.TemporaryFile()  # noqa: SIM115
    random.write(data)
    given = {
        "str": str(path),
        "path": path,
        "bytesio": io.BytesIO(data),
        "raw": path.open("rb", buffering=0),
        "buffered": path.open("rb"),
        "temporary": temporary,
        "random": random,
    }
    with open_file(given[form]) as file:
        assert file.verify().self_proving
        assert file.header() == {"step": 3}
        assert file.load()["w"].tolist() == list(range(10))
    for other in given.values():
        if hasattr(other, "close"):
            assert not other.closed  # what the caller opened stays open
            other.close()


@pytest.mark.parametrize("mmap", [False, True])
def test_load_gives_back_the_state(tmp_path, mmap):
    """The whole corpus comes back, read or mapped."""
    path = tmp_path / "x.pt"
    path.write_bytes(written(corpus()))
    with open_file(path) as file:
        file.verify()
        assert_same(file.load(mmap=mmap), corpus())


def test_mapped_tensors_outlive_the_file_and_never_reach_the_disk(path):
    """A mapping outlives close and replacement of the file, and writes to it are private, whatever torch's option."""
    import mmap as mmap_module

    before = path.read_bytes()
    with torch.serialization.set_default_mmap_options(mmap_module.MAP_SHARED), open_file(path) as file:
        tensor = file.load(mmap=True)["w"]
        assert torch.serialization.get_default_mmap_options() == mmap_module.MAP_SHARED
    tensor += 1
    assert path.read_bytes() == before
    path.unlink()
    path.write_bytes(b"other")
    assert tensor.tolist() == [float(value + 1) for value in range(10)]


@pytest.mark.parametrize("mmap", [False, True])
def test_what_is_loaded_is_what_was_opened_whatever_the_name_means_by_then(path, mmap):
    """A file that was replaced or removed after it was opened is still the one that is verified and loaded."""
    with open_file(path) as file:
        other = path.with_name("other.pt")
        other.write_bytes(written({"w": torch.zeros(10), "step": 9}))
        other.replace(path)
        file.verify()
        path.unlink()
        assert file.load(mmap=mmap)["step"] == 3


def test_load_onto_another_device_is_left_to_torch(path):
    """map_location is what torch.load takes: a device, a text, a mapping, a function."""
    with open_file(path) as file:
        for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage, lambda *_: None):
            assert file.load(location)["w"].sum() == 45
        assert file.load("meta")["w"].device.type == "meta"
        assert file.load(torch.device("meta"))["w"].shape == (10,)


def test_missing_device_is_torchs_error_and_no_damage(path):
    """A file for a device that is not there is not called damaged; torch says what to do."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with open_file(path) as file:
        with pytest.raises(RuntimeError, match="cuda") as caught:
            file.load("cuda")
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert file.load()["step"] == 3


def test_error_of_the_callers_own_function_surfaces_unchanged(path):
    """What map_location raises is no damage."""
    error = KeyError("mine")

    def fail(storage, location):
        raise error

    with open_file(path) as file:
        with pytest.raises(KeyError) as caught:
            file.load(fail)
        assert caught.value is error
        assert file.load()["step"] == 3


def test_load_inside_skip_data_is_refused(path):
    """torch.load would return memory that was never filled."""
    with open_file(path) as file:
        with torch.serialization.skip_data(), pytest.raises(RuntimeError, match="never filled"):
            file.load()
        assert file.load()["step"] == 3


def test_registered_constructor_that_fails_is_not_called_damage():
    """An error in a class that the user registered is the user's to see."""
    with torch.serialization.safe_globals([Picky]):
        data = written(encode([Picky(1)]))
        Picky.works = False
        try:
            with pytest.raises(ZeroDivisionError):
                loaded(data)
        finally:
            Picky.works = True
        assert loaded(data)[0].value == 1


class Picky:
    works = True

    def __init__(self, value):
        self.value = value if self.works else value // 0

    def __reduce__(self):
        return Picky, (self.value,)


def test_mapping_an_object_without_a_file_is_refused(path):
    """There is nothing to map in memory; the error says so before anything is read."""
    with open_file(io.BytesIO(path.read_bytes())) as file, pytest.raises(ValueError, match="mapped"):
        file.load(mmap=True)


def test_verify_in_threads_and_alone_agree(tmp_path, monkeypatch):
    """The number of threads changes nothing, nor does a system that has none left."""
    path = tmp_path / "big.pt"
    with path.open("wb", buffering=0) as f:
        write_file({"a": torch.randn((11 << 20) // 4)}, f)
    assert path.stat().st_size > 2 * CHUNK_BYTES
    root = verify(path).digest
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "worker_count", lambda count=count: count)
        assert verify(path).digest == root

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert verify(path).digest == root


def test_error_in_a_verifying_thread_reaches_the_caller(tmp_path, monkeypatch):
    """A disk error in a helper thread is raised as it is, and no thread is left behind."""
    path = tmp_path / "big.pt"
    with path.open("wb", buffering=0) as f:
        write_file({"a": torch.randn((40 << 20) // 4)}, f)
    main = threading.current_thread()
    error = OSError(5, "Input/output error")
    real = os.preadv

    def fail(*args):
        if threading.current_thread() is not main:
            raise error
        return real(*args)

    monkeypatch.setattr(threads, "worker_count", lambda: 4)
    with open_file(path) as file:
        file.check_structure()
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="Input") as caught:
            file.verify()
        assert caught.value is error
    assert not [thread for thread in threading.enumerate() if thread.name == "safeckpt-verify"]


# --- errors of the system --------------------------------------------------------------------------------------------


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    """A missing file, a directory and a file without permission are OSErrors with their numbers."""
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "missing.pt")
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    secret = tmp_path / "secret.pt"
    secret.write_bytes(b"")
    secret.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            open_file(secret)


def test_closed_after_a_refusal(tmp_path):
    """A file that is refused leaves no open descriptor."""
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"bad")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(DamagedCheckpointError):
            open_file(bad)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- files of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "v1.2.bin", "é.pt", "a b.pt", "back\\slash.pt", "noextension"])
def test_file_of_plain_torch_is_read_and_the_report_says_what_was_checked(tmp_path, name):
    """Record CRCs are all that such a file has."""
    path = tmp_path / name
    torch.save(corpus(), path)
    report = verify(path)
    assert (report.self_proving, report.format_version, report.digest, report.header) == (False, None, None, None)
    assert "only record CRCs" in str(report)
    with open_file(path) as file:
        assert file.trailer is None
        assert file.header() is None
        assert_same(file.load(), corpus())
        assert_same(file.load(mmap=True), corpus())


def test_bit_flips_in_the_data_of_a_plain_file_are_found(tmp_path):
    """What torch.load loads in silence is refused, and the record is named."""
    path = tmp_path / "plain.pt"
    torch.save({"w": torch.randn(50)}, path)
    data = bytearray(path.read_bytes())
    with open_file(path) as file:
        entry = file.archive().find("data/0")
    for bit in range(8 * entry.data_offset, 8 * (entry.data_offset + entry.size), 7):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedCheckpointError) as caught:
            verify(io.BytesIO(data))
        assert caught.value.record == "data/0"
        data[bit // 8] ^= 1 << bit % 8
    assert not verify(io.BytesIO(data)).self_proving


def test_no_flip_in_a_plain_file_loads_something_else(tmp_path):
    """Of all flips in the directory of a plain file, each is refused or changes nothing of what is loaded."""
    path = tmp_path / "plain.pt"
    torch.save({"w": torch.arange(4.0)}, path)
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    for bit in range(8 * start, 8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        try:
            got = loaded(bytes(data))
        except (DamagedCheckpointError, FormatVersionError):
            got = None
        assert got is None or got["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        data[bit // 8] ^= 1 << bit % 8


def test_plain_file_without_checksums_is_refused_unless_it_is_not_to_be_verified(tmp_path):
    """A file in which nothing can be verified does not pass as verified."""
    path = tmp_path / "unchecked.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    with open_file(path) as file:
        with pytest.raises(DamagedCheckpointError, match="without checksums"):
            file.verify()
        assert file.load()["w"].tolist() == [1.0] * 3


def test_interrupted_save_of_plain_torch_is_refused(tmp_path):
    """A well-formed archive whose records are missing, as an interrupted torch.save leaves it, is no checkpoint."""
    path = tmp_path / "cut.pt"
    with pytest.raises(AttributeError):
        torch.save({"w": torch.ones(3), "f": lambda: 1}, path)
    with pytest.raises(DamagedCheckpointError, match=r"no data\.pkl"):
        verify(path)


def tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        info = tarfile.TarInfo("sys_info")
        info.size = 3
        out.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


def legacy():
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def archive_of(name):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr(name, b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("empty", lambda: b""),
        ("zeros", lambda: bytes(10_000)),
        ("a text, no torch file", lambda: b"hello, world\n" * 10),
        ("picture", lambda: b"\x89PNG\r\n\x1a\n" + bytes(100)),
        ("picture", lambda: b"\xff\xd8\xff\xe0" + bytes(100)),
        ("PDF", lambda: b"%PDF-1.7\n" + bytes(100)),
        ("no torch file", lambda: b"\x00\x01\x02"),
        ("before 1.6", legacy),
        ("tar archive", tar),
        ("a pickle", lambda: pickle.dumps({"a": 1})),
        ("gzip", lambda: b"\x1f\x8b\x08" + bytes(100)),
        ("HDF5", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100)),
        ("NumPy", lambda: b"\x93NUMPY" + bytes(100)),
        ("no torch file", lambda: b"PK\x05\x06" + bytes(18)),
        ("no torch file", lambda: archive_of("word/document.xml")),
        ("no torch file", lambda: archive_of("a.txt")),
        ("cut off", lambda: written({"w": torch.ones(9)})[:-300]),
        ("cut off", lambda: written({"w": torch.ones(9)})[:-100]),
    ],
)
def test_what_is_no_checkpoint_is_named_for_what_it_is(reason, make):
    """The reason says what the file is, or what has become of it."""
    assert reason in reason_of(make())


@pytest.mark.parametrize("data", [b"\x89PNG" + bytes(99), b"hello\n" * 30, b"\x00\x01\x02", archive_of("a.txt")])
def test_file_that_never_was_a_checkpoint_is_not_called_damaged(data):
    """What to do fits both a slip of the hand and a file whose ends are overwritten."""
    with pytest.raises(DamagedCheckpointError, match="is no checkpoint: it is") as caught:
        verify(io.BytesIO(data))
    assert "Next: name another file; if this one was a checkpoint, take an earlier one." in str(caught.value)


def test_torchscript_archive_is_named(tmp_path):
    """An archive of torch.jit is no checkpoint."""
    path = tmp_path / "script.pt"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        for name in ("data.pkl", "constants.pkl", "version"):
            out.writestr(f"script/{name}", b"x")
    path.write_bytes(data.getvalue())
    with pytest.raises(DamagedCheckpointError, match=r"torch\.jit\.load"):
        verify(path)


def test_newer_format_is_not_called_damaged():
    """A whole trailer of a later version says that a newer safeckpt is needed."""
    import zlib

    data = written({"w": torch.ones(2)})
    text = b"SAFECKPT 0002 " + b"?" * 104
    newer = data[:-TRAILER_BYTES] + b"%s %08x\n" % (text, zlib.crc32(text))
    with pytest.raises(FormatVersionError) as caught:
        open_file(io.BytesIO(newer))
    assert (caught.value.found, caught.value.supported) == (2, (1,))


def test_foreign_comment_is_not_taken_for_a_trailer(tmp_path):
    """A zip comment that is not ours makes the file none that torch or safeckpt wrote."""
    path = tmp_path / "commented.pt"
    torch.save({"w": torch.ones(2)}, path)
    data = path.read_bytes()
    for length in (5, TRAILER_BYTES):
        reason_of(data[:-2] + struct.pack("<H", length) + b"c" * length)


def test_damaged_header_is_found_by_the_header_alone():
    """A listing that reads only headers does not show values that were not written."""
    data = written({"w": torch.ones(2)}, header={"loss": 0.25})
    at = data.index(b"0.25")
    with open_file(io.BytesIO(data[:at] + b"9" + data[at + 1 :])) as file:
        with pytest.raises(DamagedCheckpointError) as caught:
            file.header()
        assert caught.value.record == "safeckpt.json"


@pytest.mark.parametrize("header", [b"[1]\n", b"{\n", b"\xff\n", b"[" * 100_000 + b"\n", b"null\n", b'{"a": 1}'])
def test_header_that_was_never_a_header_is_damage(header):
    """A record of that name with something else in it, however deeply nested, is refused."""
    buffer = io.BytesIO(assembled(b"\x80\x02N.", header=header))
    with open_file(buffer) as file:
        assert file.load() is None
        with pytest.raises(DamagedCheckpointError) as caught:
            file.header()
        assert caught.value.record == "safeckpt.json"


def test_check_before_a_commit_reads_no_data(path):
    """The structure is checked from the ends of a file alone: damage in the middle is left to verify()."""
    data = bytearray(path.read_bytes())
    with open_file(path) as file:
        at = file.archive().find("data/0").data_offset
    data[at] ^= 1
    with open_file(io.BytesIO(data)) as file:
        assert len(file.archive().entries) == 8
        with pytest.raises(DamagedCheckpointError):
            file.verify()


def _sum_of_a_file(path):
    with open_file(path) as file:
        file.verify()
        return sum(tensor.double().sum().item() for tensor in file.load(mmap=True)["model"].values())


def test_resume_reads_in_a_fresh_process_what_was_written_here(tmp_path):
    """Nothing in this process is needed to read the file."""
    model, optimizer = trained()
    path = tmp_path / "state.pt"
    path.write_bytes(written(encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()})))
    read = children.run(_sum_of_a_file, path).value
    assert read == sum(tensor.double().sum().item() for tensor in model.state_dict().values())


def test_reading_changes_no_file_and_leaves_its_mode(path):
    """A file without write permission is read, and is as before afterwards."""
    path.chmod(0o444)
    before = path.read_bytes()
    with open_file(path) as file:
        file.verify()
        file.load()
        file.load(mmap=True)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
