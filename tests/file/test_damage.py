"""Whatever happens to the bytes of a file is found, and named."""

import io
import random
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import encode, open_file, verify
from safeckpt.file.checksum import CHUNK_BYTES
from tests.file.states import written

PAGE = 4096


class Point(NamedTuple):
    x: object
    y: object


class Bare:
    """An object, without a state where it has no attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def trained_layer(**options):
    """Return a single layer and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 14)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def small_file():
    """Return the bytes of a training state of about 10 KB."""
    model, optimizer = trained_layer()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    return written(encode(state), header={"step": 7, "loss": 0.5})


SMALL = small_file()


def assert_damaged(data):
    """Verify bytes, and return the error that this raises."""
    with pytest.raises(DamagedCheckpointError) as caught:
        verify(io.BytesIO(data))
    return caught.value


@pytest.mark.slow
def test_every_flipped_bit_of_a_small_file_is_found():
    """All of about 80,000 single-bit flips raise, and the undamaged bytes pass before and after."""
    verify(io.BytesIO(SMALL))
    data = bytearray(SMALL)
    file = io.BytesIO()
    missed = []
    for bit in range(8 * len(data)):
        data[bit >> 3] ^= 1 << (bit & 7)
        file.seek(0)
        file.write(data)
        try:
            verify(file)
        except DamagedCheckpointError:
            pass
        else:
            missed.append(bit)
        data[bit >> 3] ^= 1 << (bit & 7)
    assert not missed
    verify(io.BytesIO(bytes(data)))


def test_every_truncation_of_a_small_file_is_found():
    """A file that lost any number of its last bytes raises when it is opened."""
    for length in range(len(SMALL)):
        with pytest.raises(DamagedCheckpointError), open_file(io.BytesIO(SMALL[:length])):
            pass


def test_appended_bytes_are_found_however_many():
    """A file with bytes after its end raises when it is opened, whether they are zeros, text or a copy of itself."""
    for count in [*range(1, 300), 4096, 65_535, 65_536, 100_000]:
        for filler in (b"\0", b"x"):
            with pytest.raises(DamagedCheckpointError), open_file(io.BytesIO(SMALL + filler * count)):
                pass
    assert assert_damaged(SMALL + SMALL).record == "trailer"
    assert "10 bytes were added" in assert_damaged(SMALL + b"x" * 10).reason


def test_bytes_before_the_start_are_found():
    """A file that begins later than it was written, as a zip may, raises."""
    assert_damaged(b"x" + SMALL)


@pytest.mark.parametrize("size", [128, 512, PAGE])
def test_two_blocks_that_changed_places_are_found(size):
    """Swapped blocks keep every byte and the size; the digest sees that."""
    blocks = [SMALL[at : at + size] for at in range(0, len(SMALL) - size, size)]
    rest = SMALL[len(blocks) * size :]
    for first in range(len(blocks)):
        for second in range(first):
            if blocks[first] != blocks[second]:
                swapped = list(blocks)
                swapped[first], swapped[second] = blocks[second], blocks[first]
                assert_damaged(b"".join(swapped) + rest)


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
@pytest.mark.parametrize("size", [512, PAGE])
def test_block_that_was_never_written_is_found(filler, size):
    """A page of zeros or ones anywhere, as after a power loss, raises."""
    for at in range(0, len(SMALL), size):
        block = filler * len(SMALL[at : at + size])
        if block != SMALL[at : at + size]:
            assert_damaged(SMALL[:at] + block + SMALL[at + size :])


@pytest.mark.parametrize("size", [1, 16, 512])
def test_bytes_cut_out_of_the_middle_are_found(size):
    """A file that lost a block inside, and kept its end, raises."""
    for at in range(0, len(SMALL) - size, 97):
        assert_damaged(SMALL[:at] + SMALL[at + size :])


def test_mix_of_two_files_of_the_same_size_is_found():
    """Pages of an older file in place of new ones, as after an interrupted overwrite, raise."""
    model, optimizer = trained_layer(lr=0.5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 8}
    other = written(encode(state), header={"step": 8, "loss": 0.5})
    assert len(other) == len(SMALL)
    for at in range(PAGE, len(SMALL), PAGE):
        assert_damaged(SMALL[:at] + other[at:])
        assert_damaged(other[:at] + SMALL[at:])


def test_whole_file_inside_a_tensor_does_not_make_its_remains_whole():
    """A checkpoint stored as data inside another one does not let a truncated file pass as the inner one."""
    outer = written({"inner": torch.frombuffer(bytearray(SMALL), dtype=torch.uint8)})
    end = outer.index(SMALL) + len(SMALL)
    assert_damaged(outer[:end])


def test_random_damage_to_a_large_file_is_found_and_its_record_named(tmp_path):
    """Flips in a file of several chunks, on disk and checked by threads, raise and name the record."""
    torch.manual_seed(0)
    state = {"a": torch.randn(3 << 20), "b": torch.randn(1 << 20)}
    path = tmp_path / "big.pt"
    path.write_bytes(written(state))
    with open_file(path) as file:
        places = {name: file.archive().find(name) for name in ("data/0", "data/1")}
    assert places["data/0"].size > 2 * CHUNK_BYTES
    random.seed(1)
    with path.open("r+b", buffering=0) as f:
        for _ in range(10):
            for name, entry in places.items():
                at = entry.data_offset + random.randrange(entry.size)
                f.seek(at)
                old = f.read(1)
                f.seek(at)
                f.write(bytes([old[0] ^ 1 << random.randrange(8)]))
                with pytest.raises(DamagedCheckpointError) as caught:
                    verify(path)
                assert (caught.value.record, caught.value.path) == (name, str(path))
                f.seek(at)
                f.write(old)
    verify(path)


REGIONS = {
    "data.pkl": lambda d: d.find("data.pkl").data_offset + 5,
    "data/0": lambda d: d.find("data/0").data_offset,
    "version": lambda d: d.find("version").data_offset,
    "safeckpt.json": lambda d: d.find("safeckpt.json").data_offset + 1,
    "header of data/0": lambda d: d.find("data/0").header_offset + 31,
    "header of safeckpt.json": lambda _: 9,
    "header of data/1": lambda d: d.find("data/1").data_offset - 1,
    "descriptor of data/1": lambda d: d.find("data/1").data_offset + d.find("data/1").size + 5,
    "central directory": lambda _: len(SMALL) - 128 - 22 - 20 - 56 - 40,
    "end record": lambda _: len(SMALL) - 128 - 12,
    "trailer": lambda _: len(SMALL) - 70,
}


@pytest.mark.parametrize("region", REGIONS)
def test_damaged_record_or_region_is_named(region):
    """The error says where the damage is: a record, what stands around it, or a part of the file's end."""
    with open_file(io.BytesIO(SMALL)) as file:
        at = REGIONS[region](file.archive())
    data = bytearray(SMALL)
    data[at] ^= 1
    error = assert_damaged(bytes(data))
    assert error.record == region
    assert region in str(error)


def test_crc_in_the_table_of_contents_alone_is_named_as_such():
    """Where a record agrees with its own descriptor, it is the table of contents that is damaged."""
    data = bytearray(SMALL)
    at = data.index(b"PK\x01\x02") + 16
    data[at] ^= 1
    assert assert_damaged(bytes(data)).record == "central directory"


def test_several_damaged_records_are_named():
    """Each of a few damaged records is named, the first one as the record of the error."""
    with open_file(io.BytesIO(SMALL)) as file:
        entries = [file.archive().find(f"data/{key}") for key in (0, 2, 5)]
    data = bytearray(SMALL)
    for entry in entries:
        data[entry.data_offset] ^= 1
    error = assert_damaged(bytes(data))
    assert error.record == "data/0"
    assert error.tensors == ("model.weight", "optimizer.state.0.step", "optimizer.state.1.step")
    assert "the bytes of model.weight, optimizer.state.0.step, optimizer.state.1.step are not" in error.reason


def test_damaged_tensor_is_named_by_where_it_is_used():
    """Each name of a storage: in lists, in a class of parameters, as a view, and in files of plain torch."""
    whole = torch.arange(6.0)
    state = {
        "a": {"list": [torch.ones(3), torch.nn.Parameter(whole)]},
        "view": whole[2:4], 3: OrderedDict(w=whole), "other": torch.zeros(2), "again": None,
    }  # fmt: skip
    state["again"] = state["a"]
    names = ("a.list.1", "view", "3.w")
    plain = io.BytesIO()
    torch.save(state, plain)
    for data in (written(state), plain.getvalue()):
        damaged = bytearray(data)
        damaged[data.index(whole.numpy().tobytes())] ^= 1
        error = assert_damaged(bytes(damaged))
        assert error.tensors == names
        assert error.record is not None
        assert error.record.startswith("data/")
        assert str(error).startswith("<BytesIO> is damaged: the bytes of a.list.1, view, 3.w are not those")
        assert str(error).splitlines()[0].endswith(f"(in {error.record}).")


REGISTERED = {
    "named tuple": (lambda tensor: Point(tensor, 2), ("object", "w")),
    "with state": (lambda tensor: Bare(inside=tensor), ("object.inside", "w")),
    "without state": (lambda _: Bare(), ("w",)),
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_damaged_tensor_is_named_beside_registered_objects(kind):
    """Also where the pickle makes the object without a call, and where the tensor is in it."""
    make, names = REGISTERED[kind]
    tensor = torch.arange(6.0)
    state = {"object": make(tensor), "w": tensor[:]}
    plain = io.BytesIO()
    with torch.serialization.safe_globals([Point, Bare]):
        torch.save(state, plain)
        for data in (written(encode(state)), plain.getvalue()):
            damaged = bytearray(data)
            damaged[data.index(tensor.numpy().tobytes())] ^= 1
            assert assert_damaged(bytes(damaged)).tensors == names


def test_records_are_named_where_the_pickle_is_damaged_too():
    """Then nobody knows which tensors they are, and no name stands twice in the text."""
    with open_file(io.BytesIO(SMALL)) as file:
        places = [file.archive().find(name).data_offset for name in ("data.pkl", "data/2")]
    data = bytearray(SMALL)
    for at in places:
        data[at + 3] ^= 1
    error = assert_damaged(bytes(data))
    assert (error.tensors, error.record) == ((), "data.pkl")
    assert str(error).splitlines()[0].endswith("the bytes of data.pkl, data/2 are not those that were written.")


def test_damage_is_no_hindrance_for_the_next_file():
    """After a refusal the undamaged bytes load as before."""
    assert_damaged(SMALL[:-1] + b"x")
    with open_file(io.BytesIO(SMALL)) as file:
        file.verify()
        assert file.load()["step"] == 7


def test_file_that_shrinks_while_it_is_read_is_damaged(tmp_path):
    """A file cut after it was opened raises the same error as one that was cut before."""
    path = tmp_path / "x.pt"
    path.write_bytes(SMALL)
    with open_file(path) as file:
        file.archive()
        with path.open("r+b") as f:
            f.truncate(len(SMALL) // 2)
        with pytest.raises(DamagedCheckpointError, match="ends at byte"):
            file.verify()
