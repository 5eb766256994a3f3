"""A tensor that changes while it is saved: the file verifies, and NaN that arrives after the guard is not committed."""

import io

import pytest
import torch

import safeckpt
from safeckpt.errors import NonFiniteError
from safeckpt.file import encode, open_file, prepare
from safeckpt.store import disk
from tests.comparing import assert_same
from tests.file.states import NAMES, corpus, loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|CSC|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

NAN, INF = float("nan"), float("inf")
FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


class Changing(io.BytesIO):
    """A file whose every write changes the tensors that are being written."""

    def __init__(self, *tensors):
        super().__init__()
        self.tensors = tensors

    def write(self, data):
        for tensor in self.tensors:
            tensor.add_(1)
        return super().write(data)


def test_file_of_a_tensor_that_changes_at_every_write_verifies():
    """The digest and the CRC-32s are of the bytes that were written, large tensors and small ones."""
    large, small = torch.zeros(3_000_000), [torch.zeros(1000) for _ in range(2000)]
    file = Changing(large, *small)
    prepare(encode({"large": large, "small": small, "again": torch.zeros(200_000)})).write(file)
    got = loaded(file.getvalue())
    assert got["large"].min() < got["large"].max()  # it was really changed on the way
    assert torch.load(io.BytesIO(file.getvalue()))["again"].sum() == 0


@pytest.mark.parametrize("name", NAMES)
def test_state_that_the_guard_lets_pass_passes_the_second_look(name, tmp_path):
    """Nothing of an ordinary state is taken for NaN."""
    state = corpus()[name]
    allowed = [found.name for found in safeckpt.find_nonfinite(state)]
    safeckpt.save(state, tmp_path / "state.pt", allow_nonfinite=allowed)
    assert_same(safeckpt.load(tmp_path / "state.pt"), state)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", [7, 500_000])
def test_nan_that_arrives_after_the_guard_is_refused(dtype, value, numel):
    """Whatever the width, the last element of a small or a large tensor is looked at in what is written."""
    tensor = torch.ones(numel // 4 + 3, 4).to(dtype)
    prepared = prepare(encode({"a": torch.zeros(5), "w": tensor}), finite=[("w", tensor)])
    tensor[-1, 2] = value
    with pytest.raises(NonFiniteError) as caught:
        prepared.write(io.BytesIO())
    (found,) = caught.value.tensors
    assert (found.name, found.numel, found.first_index) == ("w", tensor.numel(), (len(tensor) - 1, 2))
    assert (found.nan_count, found.inf_count) == ((1, 0) if value is NAN else (0, 1))
    assert "was finite when the save began" in str(caught.value)


def test_large_numbers_are_no_infinity():
    """The largest numbers of each dtype, zeros of either sign and the smallest numbers pass."""
    tensors = [
        torch.tensor([torch.finfo(t).max, torch.finfo(t).min, torch.finfo(t).tiny, -0.0], dtype=t) for t in FLOATS[:4]
    ]
    prepare(encode(tensors), finite=[(str(n), t) for n, t in enumerate(tensors)]).write(io.BytesIO())


def test_tensor_that_nobody_guards_may_hold_nan():
    """What was not found finite, and a view of a part of a record, is written as it is."""
    base = torch.tensor([NAN, 1.0, 2.0, NAN])
    buffer = io.BytesIO()
    prepare(encode([base, base[1:3]]), finite=[("part", base[1:3])]).write(buffer)
    assert_same(loaded(buffer.getvalue()), [base, base[1:3]])


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (lambda base: {"views": [base[:400], base[300:]]}, "views.0, views.1"),
        (lambda base: {"array": base.numpy()}, "array"),
        (lambda base: {"tied": [base, base.view(-1)]}, "tied.0"),
    ],
    ids=["views", "array", "tied"],
)
def test_nan_that_arrives_in_shared_memory_is_refused(state, name, tmp_path, monkeypatch):
    """Views that together are all of a record, and the memory of a NumPy array, are looked at as well."""
    base = torch.ones(1000)
    real = disk.create

    def poisoned(target):
        base[350] = NAN
        return real(target)

    monkeypatch.setattr(disk, "create", poisoned)
    with pytest.raises(NonFiniteError) as caught:
        safeckpt.save(state(base), tmp_path / "state.pt")
    (found,) = caught.value.tensors
    assert (found.name, found.first_index) == (name, (350,))
    assert list(tmp_path.iterdir()) == []


def test_drop_in_keeps_the_old_file_when_nan_arrives_during_the_save(tmp_path, monkeypatch):
    """A NaN between guard and write leaves the last finite file under its name, and no other file."""
    path = tmp_path / "state.pt"
    weight = torch.ones(400, 400)
    safeckpt.save({"w": weight}, path)
    real = disk.create

    def poisoned(target):
        weight[3, 4] = NAN
        return real(target)

    monkeypatch.setattr(disk, "create", poisoned)
    with pytest.raises(NonFiniteError) as caught:
        safeckpt.save({"w": weight}, path)
    monkeypatch.undo()
    assert caught.value.tensors[0].first_index == (3, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]
    assert safeckpt.load(path)["w"].sum() == 160_000
    safeckpt.save({"w": torch.ones(2)}, path)


def test_what_is_loaded_is_what_was_verified(tmp_path):
    """A byte that changes between the check and the read is found, in a tensor and in the pickle."""
    path = tmp_path / "state.pt"
    safeckpt.save({"w": torch.ones(3_000_000), "small": torch.arange(5)}, path)
    for record in ("data/0", "data/1", "data.pkl"):
        data = bytearray(path.read_bytes())
        with open_file(path) as file:
            file.verify()
            at = file.archive().find(record).data_offset + 20
            data[at] ^= 1
            with path.open("r+b") as other:
                other.write(data)
            with pytest.raises(safeckpt.DamagedCheckpointError, match="changed since they were verified") as caught:
                file.load()
            assert caught.value.record == record
        data[at] ^= 1
        path.write_bytes(data)
    assert safeckpt.load(path)["small"].tolist() == [0, 1, 2, 3, 4]
