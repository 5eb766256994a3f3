"""Before a file gets its name, all but the data of its tensors is read back from it."""

import io

import pytest
import torch

import safeckpt
from safeckpt.errors import UnsavableStateError
from safeckpt.file import encode, open_file, prepare
from safeckpt.file.writing import prepare as preparing
from safeckpt.store import disk
from tests.file.states import NAMES, corpus

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|CSC|BSC) tensor support:UserWarning")


def written_with(prepared):
    buffer = io.BytesIO()
    return buffer, prepared.write(buffer)


@pytest.mark.parametrize("name", NAMES)
def test_every_state_that_can_be_saved_passes(name):
    """Nothing that a load reads back is refused before the commit."""
    prepared = prepare(encode(corpus()[name]), header={"step": 1})
    prepared.check(*written_with(prepared))


PLACES = {
    "header": lambda file: file.find("safeckpt.json").data_offset,
    "pickle": lambda file: file.find("data.pkl").data_offset + 9,
    "byteorder": lambda file: file.find("byteorder").data_offset,
    "table of contents": lambda file: file.entries[-1].data_offset + 40 + 60,
    "trailer": lambda _: -20,
}


@pytest.mark.parametrize("place", PLACES)
def test_disk_that_returns_other_bytes_is_noticed(place):
    """A flipped bit anywhere but in the data of a tensor is found before the file counts."""
    prepared = prepare(encode({"w": torch.ones(3)}), header={"step": 1})
    buffer, written = written_with(prepared)
    data = bytearray(buffer.getvalue())
    with open_file(io.BytesIO(data)) as file:
        data[PLACES[place](file.archive())] ^= 1
    with pytest.raises(UnsavableStateError, match="cannot be read back"):
        prepared.check(io.BytesIO(data), written)


@pytest.mark.parametrize("kept", [0, 10, 700, -1])
def test_file_that_is_too_short_is_noticed(kept):
    """A file system that drops the end of a file, or all of it, does not get it committed."""
    prepared = prepare(encode({"w": torch.ones(3)}))
    buffer, written = written_with(prepared)
    with pytest.raises(UnsavableStateError, match="cannot be read back"):
        prepared.check(io.BytesIO(buffer.getvalue()[:kept]), written)


def test_tensor_that_does_not_fit_its_record_is_noticed(monkeypatch):
    """A mistake of our own in laying a file out is found before the file replaces a good one."""
    real = preparing.pickle_payload

    def cut(*args):
        pickled = real(*args)
        pickled.spans[0].high -= 4
        return pickled

    monkeypatch.setattr(preparing, "pickle_payload", cut)
    prepared = prepare(encode({"w": torch.ones(3)}))
    with pytest.raises(UnsavableStateError, match=r"a tensor needs 12 bytes of data/0"):
        prepared.check(*written_with(prepared))


def test_save_that_cannot_be_read_back_leaves_the_old_file(tmp_path, monkeypatch):
    """The drop-in checks before the rename: the old file keeps its name, and nothing else is left."""
    path = tmp_path / "state.pt"
    safeckpt.save({"w": torch.zeros(3)}, path)
    real = disk.write

    def flipped(file, data):
        data = bytearray(data)
        at = data.find(b"_rebuild_tensor_v2")
        if at > 0:
            data[at] ^= 1
        return real(file, data)

    monkeypatch.setattr(disk, "write", flipped)
    with pytest.raises(UnsavableStateError, match=r"data\.pkl is not what was written"):
        safeckpt.save({"w": torch.ones(3)}, path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]
    assert safeckpt.load(path)["w"].tolist() == [0, 0, 0]
    safeckpt.save({"w": torch.ones(3)}, path)
    assert safeckpt.load(path)["w"].tolist() == [1, 1, 1]
