"""What is written is an ordinary torch file, and errors of the sink surface as they are."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.file import encode, open_file, verify, write_file
from safeckpt.file.archive import HEADER_RECORD, MOST_HEADER_BYTES
from safeckpt.file.checksum import CHUNK_BYTES
from safeckpt.file.trailer import TRAILER_BYTES
from safeckpt.file.writing.stable_copies import SMALL_BYTES
from tests.comparing import assert_same
from tests.file.states import corpus, loaded, torch_pickle, trained, written

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|BSR) tensor support:UserWarning", "ignore:Sparse invariant checks:UserWarning"
)


def big_state(megabytes=11):
    """Return a state whose records cross the borders of chunks."""
    torch.manual_seed(2)
    elements = (megabytes << 20) // 4
    return {"w": torch.randn(elements), "b": torch.randn(3), "v": torch.randn((5 << 20) // 4), "s": torch.tensor(3)}


@pytest.fixture
def state_file(tmp_path):
    path = tmp_path / "state.pt"
    with path.open("wb", buffering=0) as f:
        write_file(corpus(), f, header={"step": 3})
    return path


def test_records_are_those_of_torch_save_in_the_same_order(tmp_path):
    """A file without a header has exactly the records that torch.save writes, with the same data."""
    state = corpus()
    torch.save(state, tmp_path / "archive.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt") as theirs, zipfile.ZipFile(io.BytesIO(written(state))) as ours:
        assert ours.namelist() == theirs.namelist()
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name) or name.endswith("serialization_id")
            mine, other = ours.getinfo(name), theirs.getinfo(name)
            assert (mine.flag_bits, mine.compress_type, mine.header_offset) == (
                other.flag_bits,
                other.compress_type,
                other.header_offset,
            )


def test_everything_before_the_trailer_is_what_torch_would_have_written_but_for_the_id():
    """Headers, padding, descriptors and table of contents are byte for byte torch's own."""
    state = {"a": torch.arange(5), "b": torch.zeros(0), "c": torch.randn(3)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    theirs = buffer.getvalue()
    ours = written(state)[:-TRAILER_BYTES]
    assert len(ours) == len(theirs)
    different = [index for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
    with zipfile.ZipFile(buffer) as archive:
        info = archive.getinfo("archive/.data/serialization_id")
    identifier = range(info.header_offset + 30, info.header_offset + 30 + 200)
    directory_crc = range(len(theirs) - 22 - 20 - 56 - 46 - 30, len(theirs) - 22)
    comment_length = range(len(theirs) - 2, len(theirs))
    assert all(index in identifier or index in directory_crc or index in comment_length for index in different)


@pytest.mark.parametrize(
    "options",
    [{}, {"weights_only": True}, {"weights_only": False}, {"mmap": True}, {"map_location": "cpu"}],
    ids=str,
)
def test_torch_load_reads_the_file_in_each_of_its_ways(state_file, options):
    """torch.load gives back the state, mapped or not, with and without weights_only."""
    assert_same(torch.load(state_file, **options), corpus())


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_computes_the_offsets_that_the_file_has(state_file, monkeypatch, mmap):
    """With calculate_storage_offsets and torch's own debug assertions on, every offset agrees."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with torch.utils.serialization.config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(state_file, mmap=mmap), corpus())


def test_torch_load_onto_meta_gives_shapes(tmp_path):
    """The meta device works, and finds offsets of storages by calculation."""
    state = {name: value for name, value in corpus().items() if name != "sparse"}  # torch 2.14 checks its indices
    with (tmp_path / "state.pt").open("wb", buffering=0) as f:
        write_file(state, f, header={"step": 3})
    model = torch.load(tmp_path / "state.pt", map_location="meta")["model"]
    assert {name: tensor.shape for name, tensor in model.items()} == {
        name: tensor.shape for name, tensor in corpus()["model"].items()
    }
    assert all(tensor.device.type == "meta" for tensor in model.values())


def test_zip_tools_find_nothing_wrong(state_file):
    """Python's zipfile and, where it is installed, Info-ZIP agree with every CRC."""
    with zipfile.ZipFile(state_file) as archive:
        assert archive.testzip() is None
        assert len(archive.comment) == TRAILER_BYTES
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-tqq", state_file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_data_across_chunk_borders_comes_back(tmp_path):
    """Records of several chunks have the right CRC-32 and the file the right digest."""
    path = tmp_path / "big.pt"
    state = big_state()
    with path.open("wb", buffering=0) as f:
        report = write_file(state, f)
    assert report.size_bytes == path.stat().st_size > 4 * CHUNK_BYTES
    assert verify(path).digest == report.digest
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with open_file(path) as file:
        assert_same(file.load(), state)


def test_small_records_of_every_size_come_back_beside_large_ones():
    """Records around the size from which one is written by itself, empty ones and bytes of odd number among them."""
    sizes = [SMALL_BYTES + more for more in (-1, 0, 1, -64, 64)] + [0, 1, 3, SMALL_BYTES // 2] * 5
    state = [torch.arange(size).to(torch.uint8) for size in [*sizes, *reversed(sizes)]]
    data = written(state)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    assert verify(io.BytesIO(data)).self_proving
    assert_same(loaded(data), state)


def test_same_state_gives_the_same_bytes_in_any_file_and_process(tmp_path):
    """Bytes depend on the state and the header alone: not on path, time, process or hash seed."""
    first = written(big_state(), header={"step": 1})
    assert written(big_state(), header={"step": 1}) == first
    code = (
        "import sys, tests.file.test_write as t; from safeckpt.file import write_file\n"
        "with open(sys.argv[1], 'wb') as f: write_file(t.big_state(), f, header={'step': 1})"
    )
    path = tmp_path / "elsewhere.bin"
    subprocess.run([sys.executable, "-c", code, path], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert path.read_bytes() == first


def test_other_data_gives_another_digest_and_serialization_id():
    """The id that torch logs tells two states apart."""
    files = [written({"a": torch.tensor([value])}) for value in (1.0, 2.0)]
    ids = []
    for data in files:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            ids.append(archive.read("archive/.data/serialization_id"))
    assert ids[0] != ids[1]
    assert all(len(identifier) == 40 and identifier.isdigit() for identifier in ids)


def test_saving_changes_nothing():
    """Tensors, their version counters, and the state's containers are as before."""
    state = corpus()
    versions = [tensor._version for tensor in state["model"].values()]
    before = torch_pickle(state)
    written(encode(state))
    assert torch_pickle(state) == before
    assert [tensor._version for tensor in state["model"].values()] == versions


def test_header_is_the_first_record_and_is_read_without_unpickling(state_file):
    """The header is JSON at the start of the file, found by zipfile too."""
    with zipfile.ZipFile(state_file) as archive:
        assert archive.namelist()[0] == f"archive/{HEADER_RECORD}"
        assert json.loads(archive.read(f"archive/{HEADER_RECORD}")) == {"step": 3}


@pytest.mark.parametrize("header", [{}, {"a": "é\n", "nested": {"x": [1, None]}, "big": "x" * 100_000}])
def test_header_of_any_size_comes_back(header):
    """A header comes back as it was given, an empty one and one larger than the first read as well."""
    with open_file(io.BytesIO(written({}, header=header))) as file:
        assert file.header() == header


def test_header_that_is_too_large_is_refused():
    """A header beyond the limit is an error before anything is written."""
    sink = io.BytesIO()
    with pytest.raises(ValueError, match="header"):
        write_file({}, sink, header={"x": "y" * MOST_HEADER_BYTES})
    assert not sink.getvalue()


def test_file_without_a_header_has_none():
    """The drop-in writes no header record, and reading says None."""
    with open_file(io.BytesIO(written({}))) as file:
        assert file.header() is None


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3:UserWarning")
def test_protocol_3_is_read_by_torch_and_without_a_warning_by_safeckpt():
    """A file of protocol 3 loads everywhere, bytes included."""
    data = written(encode({"b": b"x", "e": b"", "t": torch.arange(2)}), pickle_protocol=3)
    for weights_only in (True, False):
        got = torch.load(io.BytesIO(data), weights_only=weights_only)
        assert (got["b"], got["e"], got["t"].tolist()) == (b"x", b"", [0, 1])
    assert loaded(data)["e"] == b""


class ShortWriter(io.RawIOBase):
    """Takes at most a few bytes of each write, as a raw file may."""

    def __init__(self, most):
        self.data = bytearray()
        self.most = most

    def writable(self):
        return True

    def write(self, data):
        taken = bytes(data[: self.most])
        self.data += taken
        return len(taken)


class Uncounting:
    """A sink whose write() returns None."""

    def __init__(self):
        self.data = bytearray()

    def write(self, data):
        self.data += data


@pytest.mark.parametrize("most", [1000, 3 << 20])
def test_sink_that_writes_short_gets_everything(most):
    """A raw file may take less than it is given; the rest is written again."""
    sink = ShortWriter(most)
    write_file(big_state(2), sink)
    assert bytes(sink.data) == written(big_state(2))


def test_sink_that_does_not_count_gets_everything_once():
    """An object whose write() returns None is taken at its word."""
    sink = Uncounting()
    write_file(big_state(2), sink)
    assert bytes(sink.data) == written(big_state(2))


def test_raw_sink_that_would_block_is_an_error():
    """A raw file in non-blocking mode that takes nothing is no silent success."""

    class Full(ShortWriter):
        def write(self, data):
            return None

    with pytest.raises(BlockingIOError):
        write_file({"a": 1}, Full(1))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("own")], ids=repr
)
@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_error_of_the_sink_surfaces_unchanged_and_no_thread_is_left(error, after):
    """Whatever write() raises reaches the caller as the same object, and the next write works."""

    class Failing:
        calls = 0

        def write(self, data):
            if self.calls == after:
                raise error
            self.calls += 1
            return len(data)

    sink = Failing()
    before = set(threading.enumerate())
    with pytest.raises(type(error)) as caught:
        write_file(big_state(), sink)
    assert caught.value is error
    assert sink.calls == after
    assert not set(threading.enumerate()) - before
    assert loaded(written({"a": 1})) == {"a": 1}


def test_write_when_no_thread_can_be_started_is_the_same(monkeypatch):
    """At interpreter exit no thread starts any more; a pending save is finished all the same."""
    want = written(big_state(6))

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert written(big_state(6)) == want


def test_payload_that_did_not_go_through_encode_is_refused_before_a_byte_is_written():
    """The writer reads a pickle with unknown types once more, as a load will."""
    sink = io.BytesIO()
    with pytest.raises(UnsavableStateError, match="slice") as caught:
        write_file({"a": slice(1, 2)}, sink)
    assert caught.value.type_name == "builtins.slice"
    assert not sink.getvalue()


def test_tensors_of_two_dtypes_over_the_same_bytes_are_refused_before_a_byte_is_written():
    """What torch.save refuses with a RuntimeError is an UnsavableStateError, also without encode()."""
    sink = io.BytesIO()
    shared = torch.arange(4, dtype=torch.int32)
    with pytest.raises(UnsavableStateError, match="share memory"):
        write_file([shared, shared.view(torch.float32)], sink)
    assert not sink.getvalue()


def test_memory_beyond_the_state_stays_small():
    """A save of 48 MB of CPU tensors allocates no copy of them."""
    import tracemalloc

    state = {str(index): torch.zeros(3 << 20) for index in range(4)}

    class Null:
        def write(self, data):
            return len(data)

    write_file(state, Null())
    tracemalloc.start()
    write_file(state, Null())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_optimizer_state_loads_into_a_new_optimizer(tmp_path):
    """The whole way of a training state: written, verified, loaded, taken over."""
    model, optimizer = trained()
    got = loaded(written(encode({"model": model.state_dict(), "optimizer": optimizer.state_dict()})))
    other_model, other = trained()
    other_model.load_state_dict(got["model"])
    other.load_state_dict(got["optimizer"])
    assert_same(other.state_dict(), optimizer.state_dict())
