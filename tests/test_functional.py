"""`safeckpt.save` and `safeckpt.load` where `torch.save` and `torch.load` stood."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import math
import os
import pickle
import resource
import stat
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import safeckpt
from safeckpt.store import names
from tests import children
from tests.comparing import bits
from tests.faults import Fault, LineInterrupt, as_nobody, contents, descriptor_count, intercept, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(safeckpt.__file__).parent


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 2), value), "bias": torch.arange(2.0)}, "epoch": 3, "names": ["a", None]}


OLD, NEW, NEXT = state(1.0), state(2.0), state(3.0)


def check_next_save_works(path: Path) -> None:
    safeckpt.save(NEXT, path)
    assert bits(torch.load(path)) == bits(NEXT)
    assert not [name for name in names_in(path.parent) if names.temp_final(name)]


# -- the place of torch's functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs"), [(safeckpt.save, torch.save), (safeckpt.load, torch.load)])
def test_arguments_stand_where_torch_has_them(ours: Any, torchs: Any) -> None:
    """Whatever is accepted by position is the same, in the same order and with the same defaults, as in torch."""
    mine, theirs = inspect.signature(ours).parameters, inspect.signature(torchs).parameters
    positional = [p for p in mine.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD and not p.name.startswith("_")]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in expected]
    public = {name for name, p in theirs.items() if not name.startswith("_") and p.kind is not p.VAR_KEYWORD}
    assert public <= mine.keys()


@pytest.mark.parametrize("kind", [str, Path, os.fsencode], ids=["str", "Path", "bytes"])
def test_path_of_any_kind_is_written_and_read(tmp_path: Path, kind: Any) -> None:
    """A path may be a str or PathLike; bytes, which torch refuses too, are a TypeError and write nothing."""
    path = kind(tmp_path / "model.pt")
    if isinstance(path, bytes):
        with pytest.raises(TypeError, match="path or an object with write"):
            safeckpt.save(NEW, path)  # type: ignore[arg-type]
        assert contents(tmp_path) == {}
        return
    safeckpt.save(NEW, path)
    assert names_in(tmp_path) == ["model.pt"]
    assert bits(safeckpt.load(path)) == bits(torch.load(path)) == bits(NEW)


def test_bare_name_is_written_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file name without a directory means the working directory."""
    monkeypatch.chdir(tmp_path)
    safeckpt.save(NEW, "model.pt")
    assert bits(safeckpt.load("model.pt")) == bits(NEW)


def test_buffer_is_written_and_read() -> None:
    """A BytesIO takes a whole file, which torch reads from it."""
    buffer = io.BytesIO()
    safeckpt.save(NEW, buffer)
    for load in (safeckpt.load, torch.load):
        buffer.seek(0)
        assert bits(load(buffer)) == bits(NEW)


@pytest.mark.parametrize("buffering", [0, -1])
def test_open_file_is_written_and_read(tmp_path: Path, buffering: int) -> None:
    """An open file takes the bytes that a path would have got, and stays open."""
    path = tmp_path / "model.pt"
    with path.open("wb", buffering=buffering) as file:
        safeckpt.save(NEW, file)
        assert not file.closed
    safeckpt.save(NEW, tmp_path / "other.pt")
    assert path.read_bytes() == (tmp_path / "other.pt").read_bytes()
    with path.open("rb", buffering=buffering) as file:
        assert bits(safeckpt.load(file)) == bits(NEW)
        assert not file.closed


class Sink:
    """The least that `torch.save` accepts."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def test_object_with_write_is_enough() -> None:
    """Whatever has `write` can be saved to."""
    sink = Sink()
    safeckpt.save(NEW, sink)  # type: ignore[arg-type]
    assert bits(torch.load(io.BytesIO(bytes(sink.data)))) == bits(NEW)


@pytest.mark.parametrize("f", [None, 3, object(), ["model.pt"]])
def test_target_that_is_none_is_a_type_error(f: Any) -> None:
    """What is neither a path nor has `write` is refused with the kinds that are accepted."""
    with pytest.raises(TypeError, match="path or an object with write"):
        safeckpt.save(NEW, f)


def test_positional_call_is_that_of_torch(tmp_path: Path) -> None:
    """A call that gives torch's arguments by position works unchanged."""
    path = tmp_path / "model.pt"
    safeckpt.save(NEW, path, pickle, 3)
    assert bits(safeckpt.load(path, "cpu", None)) == bits(NEW)
    with pytest.warns(UserWarning, match="pickle protocol 3"):  # torch wonders about it, and reads it
        assert bits(torch.load(path, "cpu", None)) == bits(NEW)


@pytest.mark.parametrize("protocol", [0, 1, 4, 5, -1, None, "2"])
def test_protocol_that_cannot_be_read_is_refused(tmp_path: Path, protocol: Any) -> None:
    """A protocol that `weights_only` cannot read is a ValueError with the ones it can, and the old file stays."""
    path = tmp_path / "model.pt"
    safeckpt.save(OLD, path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"pickle_protocol=.*protocols 2 and 3"):
        safeckpt.save(NEW, path, pickle_protocol=protocol)
    assert contents(tmp_path) == before
    check_next_save_works(path)


@pytest.mark.parametrize("module", [None, io, "pickle"])
def test_other_pickle_module_is_refused(tmp_path: Path, module: Any) -> None:
    """Another pickle module is a ValueError that says why, on both sides."""
    path = tmp_path / "model.pt"
    with pytest.raises(ValueError, match="only the standard pickle module"):
        safeckpt.save(NEW, path, module)
    assert contents(tmp_path) == {}
    safeckpt.save(NEW, path)
    if module is not None:
        with pytest.raises(ValueError, match="weights_only reader alone"):
            safeckpt.load(path, pickle_module=module)
    assert bits(safeckpt.load(path)) == bits(NEW)


@pytest.mark.parametrize("flag", [False, None, 0])
def test_load_that_could_run_code_is_refused(tmp_path: Path, flag: Any) -> None:
    """`weights_only=False` is a ValueError that names the safe way."""
    safeckpt.save(NEW, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="add_safe_globals"):
        safeckpt.load(tmp_path / "model.pt", weights_only=flag)


# -- files of either side --------------------------------------------------------------------------------------------


def test_plain_torch_reads_what_save_wrote(tmp_path: Path) -> None:
    """The file is an ordinary torch file: plain, mapped and meta loads read it, and its zip CRCs are valid."""
    path = tmp_path / "model.pt"
    safeckpt.save(NEW, path)
    assert bits(torch.load(path)) == bits(NEW)
    assert bits(torch.load(path, mmap=True)) == bits(NEW)
    assert torch.load(path, map_location="meta")["model"]["weight"].size() == (3, 2)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_load_reads_what_plain_torch_wrote(tmp_path: Path) -> None:
    """A file of plain torch is read with its record CRCs checked, and the report says that this is all."""
    path = tmp_path / "model.pt"
    torch.save(NEW, path)
    assert bits(safeckpt.load(path)) == bits(NEW)
    report = safeckpt.verify(path)
    assert not report.self_proving
    assert report.format_version is None
    safeckpt.save(NEW, path)
    report = safeckpt.verify(path)
    assert report.self_proving
    assert report.size_bytes == path.stat().st_size


@pytest.mark.parametrize("mmap", [None, False, True])
def test_load_maps_when_asked(tmp_path: Path, mmap: bool | None) -> None:
    """Mapped or read, the values are the same, also after the file was replaced."""
    path = tmp_path / "model.pt"
    safeckpt.save(NEW, path)
    loaded = safeckpt.load(path, mmap=mmap)
    safeckpt.save(OLD, path)
    assert bits(loaded) == bits(NEW)


def test_map_location_is_that_of_torch(tmp_path: Path) -> None:
    """A device, a string, a dict and a function say where tensors go, as in torch."""
    safeckpt.save(NEW, tmp_path / "model.pt")
    for where in ("meta", torch.device("meta"), {"cpu": "meta"}):
        assert safeckpt.load(tmp_path / "model.pt", map_location=where)["model"]["weight"].is_meta
    asked = []

    def keep(storage: Any, location: str) -> Any:
        asked.append(location)
        return storage

    assert bits(safeckpt.load(tmp_path / "model.pt", map_location=keep)) == bits(NEW)
    assert set(asked) == {"cpu"}


def test_gradient_flag_is_kept_as_torch_keeps_it(tmp_path: Path) -> None:
    """A parameter comes back as a parameter that requires gradients."""
    parameter = torch.nn.Parameter(torch.ones(2))
    safeckpt.save({"p": parameter}, tmp_path / "model.pt")
    loaded = safeckpt.load(tmp_path / "model.pt")["p"]
    assert isinstance(loaded, torch.nn.Parameter)
    assert loaded.requires_grad


def test_numpy_values_come_back_as_plain_ones(tmp_path: Path) -> None:
    """NumPy scalars come back as numbers and arrays as tensors, with the same values, and the input is not changed."""
    value = {"lr": np.float32(0.1), "n": np.int64(7), "grid": np.arange(6, dtype=np.int16).reshape(2, 3)}
    safeckpt.save(value, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["lr"] == float(np.float32(0.1))
    assert type(loaded["n"]) is int
    assert torch.equal(loaded["grid"], torch.arange(6, dtype=torch.int16).view(2, 3))
    assert type(value["lr"]) is np.float32


def test_flipped_bit_is_found_by_load_and_named(tmp_path: Path) -> None:
    """One flipped bit of a tensor is an error that names the record, where plain torch loads it in silence."""
    path = tmp_path / "model.pt"
    safeckpt.save(NEW, path)
    data = bytearray(path.read_bytes())
    data[data.find(torch.full((3, 2), 2.0).numpy().tobytes()) + 3] ^= 4
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["model"]["weight"], NEW["model"]["weight"])
    for check in (safeckpt.load, safeckpt.verify):
        with pytest.raises(safeckpt.DamagedCheckpointError, match="data/0") as caught:
            check(path)
        assert caught.value.path == str(path)
        assert caught.value.record is not None
        assert "data/0" in caught.value.record
    assert path.read_bytes() == data
    assert safeckpt.load(path, verify=False)["epoch"] == 3
    check_next_save_works(path)


@pytest.mark.parametrize("load", [safeckpt.load, safeckpt.verify])
def test_missing_file_is_the_systems_error(tmp_path: Path, load: Any) -> None:
    """A path that is not there is a FileNotFoundError, a directory an IsADirectoryError, with errno and path."""
    with pytest.raises(FileNotFoundError) as caught:
        load(tmp_path / "none.pt")
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


# -- the guard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_tensor_is_refused_and_the_old_file_kept(tmp_path: Path, bad: float) -> None:
    """One NaN or Inf anywhere in the object is an error that names the tensor; the old file keeps every byte."""
    path = tmp_path / "model.pt"
    safeckpt.save(OLD, path)
    before, inode = contents(tmp_path), path.stat().st_ino
    broken = state(2.0)
    broken["model"]["weight"][1, 1] = bad
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        safeckpt.save(broken, path)
    error = caught.value
    assert [tensor.name for tensor in error.tensors] == ["model.weight"]
    assert (error.tensors[0].nan_count + error.tensors[0].inf_count, error.tensors[0].first_index) == (1, (1, 1))
    assert error.path == str(path)
    assert error.loss is None
    assert isinstance(error, ValueError)
    assert "still holds what it held before" in str(error)
    assert contents(tmp_path) == before
    assert path.stat().st_ino == inode
    check_next_save_works(path)


def test_refusal_without_an_old_file_makes_none(tmp_path: Path) -> None:
    """A refused first save leaves an empty directory and does not speak of an old file."""
    with pytest.raises(safeckpt.NonFiniteError, match="nothing was written") as caught:
        safeckpt.save({"x": torch.tensor([math.nan])}, tmp_path / "model.pt")
    assert "held before" not in str(caught.value)
    assert contents(tmp_path) == {}


LOSSES = [
    math.nan,
    math.inf,
    torch.tensor(math.inf),
    torch.tensor([1.0, math.nan]),
    np.float32("nan"),
    np.array([1.0, np.inf]),
    {"total": 1.0, "aux": torch.tensor(math.nan)},
    [0.5, (1.0, -math.inf)],
    complex(0, math.inf),
    torch.tensor(math.inf, dtype=torch.bfloat16, requires_grad=True),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_nonfinite_loss_of_any_kind_is_refused(tmp_path: Path, loss: Any) -> None:
    """A loss that is not finite, however it is given, refuses the save, and the error keeps it as plain numbers."""
    path = tmp_path / "model.pt"
    safeckpt.save(OLD, path)
    before = contents(tmp_path)
    with pytest.raises(safeckpt.NonFiniteError, match="loss = ") as caught:
        safeckpt.save(NEW, path, loss=loss)
    assert caught.value.tensors == ()
    flat = [caught.value.loss]
    numbers = []
    while flat:
        value = flat.pop()
        if isinstance(value, dict | list):
            flat += value.values() if isinstance(value, dict) else value
        else:
            numbers.append(value)
    assert all(type(number) in (float, complex) for number in numbers)
    assert not all(math.isfinite(abs(number)) for number in numbers)
    assert contents(tmp_path) == before
    check_next_save_works(path)


@pytest.mark.parametrize(
    "loss", [0.5, 3, torch.tensor(1.0), np.float64(2), {"a": 1, "b": [torch.tensor(2.0)]}, np.ones(2), True, None]
)
def test_finite_loss_of_any_kind_passes(tmp_path: Path, loss: Any) -> None:
    """A finite loss, however it is given, lets the save pass."""
    safeckpt.save(NEW, tmp_path / "model.pt", loss=loss)
    assert names_in(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("loss", ["0.5", object(), {1, 2}, b"1"])
def test_loss_that_is_none_is_a_type_error(tmp_path: Path, loss: Any) -> None:
    """A loss that is no number is a TypeError with the kinds that are accepted, and nothing is written."""
    with pytest.raises(TypeError, match="loss must be a number, a tensor"):
        safeckpt.save(NEW, tmp_path / "model.pt", loss=loss)
    assert contents(tmp_path) == {}


def test_loss_and_tensor_that_are_bad_are_both_reported(tmp_path: Path) -> None:
    """A bad loss does not hide the tensors that are bad as well."""
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        safeckpt.save({"w": torch.tensor(math.nan)}, tmp_path / "model.pt", loss=math.inf)
    assert caught.value.loss == math.inf
    assert [tensor.name for tensor in caught.value.tensors] == ["w"]
    assert pickle.loads(pickle.dumps(caught.value)).tensors == caught.value.tensors


def test_named_tensor_may_be_infinite(tmp_path: Path) -> None:
    """`allow_nonfinite` lets the tensors through that its patterns name, and no other."""
    value = {"mask": torch.tensor([0.0, -math.inf]), "deep": {"mask": torch.tensor(math.inf)}, "w": torch.ones(2)}
    safeckpt.save(value, tmp_path / "model.pt", allow_nonfinite=["mask", "*.mask"])
    assert bits(safeckpt.load(tmp_path / "model.pt")) == bits(value)
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        safeckpt.save(value, tmp_path / "model.pt", allow_nonfinite=("mask",))
    assert [tensor.name for tensor in caught.value.tensors] == ["deep.mask"]
    with pytest.raises(TypeError, match="sequence of glob patterns"):
        safeckpt.save(value, tmp_path / "model.pt", allow_nonfinite="mask")


def test_plain_float_is_the_callers_business(tmp_path: Path) -> None:
    """A plain float in the object may be infinite: the best loss so far starts that way."""
    safeckpt.save({"best": math.inf}, tmp_path / "model.pt")
    assert safeckpt.load(tmp_path / "model.pt") == {"best": math.inf}


# -- what cannot be saved --------------------------------------------------------------------------------------------


class Local:
    """A class that no other program has."""


UNSAVABLE = [
    ({"args": [1, lambda x: x]}, "obj['args'][1]", "function"),
    ({"sampler": Local()}, "obj['sampler']", "Local"),
    ([{"path": Path("x")}], "obj[0]['path']", "Path"),
    ({"model": torch.nn.Linear(1, 1)}, "obj['model']", "Linear"),
]


@pytest.mark.parametrize(("value", "location", "type_name"), UNSAVABLE, ids=[row[1] for row in UNSAVABLE])
def test_value_that_could_not_be_read_back_is_refused(
    tmp_path: Path, value: Any, location: str, type_name: str
) -> None:
    """A lambda or a class is found before the disk is touched, with its key path, its type and a cure."""
    path = tmp_path / "model.pt"
    safeckpt.save(OLD, path)
    before, inode = contents(tmp_path), path.stat().st_ino
    with pytest.raises(safeckpt.UnsavableStateError) as caught:
        safeckpt.save(value, path)
    assert caught.value.location == location
    assert type_name in caught.value.type_name
    assert isinstance(caught.value, TypeError)
    assert "Next: " in str(caught.value)
    assert contents(tmp_path) == before
    assert path.stat().st_ino == inode
    check_next_save_works(path)


# -- the target ------------------------------------------------------------------------------------------------------


def test_symlink_is_replaced_and_what_it_named_kept(tmp_path: Path) -> None:
    """A symlink as a target becomes a regular file; the file that it named keeps every byte."""
    real, link = tmp_path / "real.pt", tmp_path / "link.pt"
    safeckpt.save(OLD, real)
    before = real.read_bytes()
    link.symlink_to(real)
    safeckpt.save(NEW, link)
    assert not link.is_symlink()
    assert bits(safeckpt.load(link)) == bits(NEW)
    assert real.read_bytes() == before


def test_hard_link_is_replaced_and_its_other_name_kept(tmp_path: Path) -> None:
    """One of two hard links becomes a file of its own; the other keeps every byte."""
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    safeckpt.save(OLD, one)
    before = one.read_bytes()
    other.hardlink_to(one)
    safeckpt.save(NEW, one)
    assert bits(safeckpt.load(one)) == bits(NEW)
    assert other.read_bytes() == before
    assert other.stat().st_nlink == 1


def test_dangling_symlink_is_replaced(tmp_path: Path) -> None:
    """A link that leads nowhere becomes the file, and nothing appears where it led."""
    link = tmp_path / "link.pt"
    link.symlink_to(tmp_path / "nowhere.pt")
    safeckpt.save(NEW, link)
    assert names_in(tmp_path) == ["link.pt"]
    assert not link.is_symlink()


def test_missing_parent_is_not_made(tmp_path: Path) -> None:
    """A missing directory is a FileNotFoundError with errno and path; no directory is made."""
    with pytest.raises(FileNotFoundError) as caught:
        safeckpt.save(NEW, tmp_path / "runs" / "model.pt")
    assert caught.value.errno == errno.ENOENT
    assert "runs" in str(caught.value)
    assert names_in(tmp_path) == []
    (tmp_path / "runs").mkdir()
    check_next_save_works(tmp_path / "runs" / "model.pt")


@pytest.mark.parametrize("name", ["", ".", "folder", "folder/"])
def test_directory_as_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A directory, or no name at all, is the system's error and nothing is written."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError if name == "" else IsADirectoryError) as caught:
        safeckpt.save(NEW, name)
    assert caught.value.errno == (errno.ENOENT if name == "" else errno.EISDIR)
    assert contents(tmp_path) == {}


def test_device_as_target_is_refused(tmp_path: Path) -> None:
    """A device or a pipe is not replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(OSError, match="Not a regular file") as caught:
            safeckpt.save(NEW, path)
        assert caught.value.errno == errno.EINVAL
    assert names_in(tmp_path) == ["pipe"]


@pytest.fixture
def public_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's own."""
    path = Path("/tmp") / f"safeckpt-{os.getpid()}-{tmp_path_factory.getbasetemp().name}"
    path.mkdir(mode=0o755)
    yield path
    path.chmod(0o700)
    for child in path.iterdir():
        child.unlink()
    path.rmdir()


def _save_as_nobody(path: str) -> None:
    as_nobody(lambda: safeckpt.save(NEW, path))


def test_read_only_directory_keeps_its_file(public_path: Path) -> None:
    """Where nothing may be written the error is a PermissionError with errno, and the old file keeps every byte."""
    path = public_path / "model.pt"
    safeckpt.save(OLD, path)
    path.chmod(0o644)
    public_path.chmod(0o555)
    before = contents(public_path)
    ended = children.run(_save_as_nobody, str(path))
    assert isinstance(ended.error, PermissionError)
    assert ended.error.errno == errno.EACCES
    assert contents(public_path) == before
    public_path.chmod(0o755)
    check_next_save_works(path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_mode_is_that_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    """The file has the mode that a plain open would have given it, also where an older file had another."""
    path = tmp_path / "model.pt"
    before = os.umask(mask)
    try:
        safeckpt.save(OLD, path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.chmod(0o600)
        safeckpt.save(NEW, path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


# -- the disk --------------------------------------------------------------------------------------------------------


def large(value: float) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), value), "small": torch.ones(3)}


def _save_with_limits(path: str, limits: list[int]) -> list[BaseException | None]:
    found: list[BaseException | None] = []
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            safeckpt.save(large(2.0), path)
        except OSError as error:
            found.append(error)
        else:
            found.append(None)
    return found


def test_file_size_limit_of_any_size_keeps_the_old_file(tmp_path: Path) -> None:
    """A full disk, as a real file-size limit at sixty sizes, is an EFBIG, keeps the old file and leaves no other."""
    path = tmp_path / "model.pt"
    safeckpt.save(large(2.0), path)
    size = path.stat().st_size
    safeckpt.save(large(1.0), path)
    before = contents(tmp_path)
    limits = [0, 1, 63, 64, *range(100, size, size // 54), size - 129, size - 128, size - 127, size - 1]
    ended = children.run(_save_with_limits, str(path), limits)
    assert ended.error is None
    for error in ended.value:
        assert isinstance(error, OSError)
        assert error.errno == errno.EFBIG
        assert str(path) in str(error)
    assert len(ended.value) >= 60
    assert contents(tmp_path) == before
    assert children.run(_save_with_limits, str(path), [size]).value == [None]
    assert bits(torch.load(path)) == bits(large(2.0))
    check_next_save_works(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("buffering", [0, -1])
def test_full_device_is_an_enospc_with_its_errno(buffering: int) -> None:
    """A file object on a full device gives the system's error, not one of torch's without an errno."""
    with (
        pytest.raises(OSError, match="No space left") as caught,
        Path("/dev/full").open("wb", buffering=buffering) as file,
    ):
        safeckpt.save(large(1.0), file)
    assert caught.value.errno == errno.ENOSPC


def test_full_disk_says_needed_and_free_bytes(tmp_path: Path) -> None:
    """The text of a full disk carries what the file needs and what is free."""
    path = tmp_path / "model.pt"
    safeckpt.save(OLD, path)
    before = contents(tmp_path)
    fault = Fault(1, errno.ENOSPC, {"write"})
    with intercept(fault), pytest.raises(OSError, match=r"needs .*\d+ bytes, \d+ are free") as caught:
        safeckpt.save(large(2.0), path)
    assert fault.fired is not None
    assert caught.value.errno == errno.ENOSPC
    assert contents(tmp_path) == before
    check_next_save_works(path)


def test_write_that_raises_surfaces_as_it_is() -> None:
    """What a file object's `write` raises comes out unchanged, where torch aborts or hides it."""

    class Stubborn(Sink):
        def write(self, data: Any) -> int:
            if len(self.data) > 500:
                raise LookupError("enough")
            return super().write(data)

    with pytest.raises(LookupError, match="enough"):
        safeckpt.save(large(1.0), Stubborn())  # type: ignore[arg-type]


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def _interrupt_everywhere(folder: str, *, to_path: bool, every: int) -> tuple[int, list[str]]:
    """Interrupt a save at one line event in `every`; return how many there were and what went wrong."""
    path = Path(folder) / "model.pt"
    allowed = {}
    for name, value in (("new", large(2.0)), ("old", large(1.0))):
        safeckpt.save(value, path)
        allowed[name] = path.read_bytes()
    number, wrong, fired = 1 - every, [], True
    descriptors = descriptor_count()
    while fired:
        number += every
        target: Any = path if to_path else io.BytesIO()
        interrupt = LineInterrupt(number, PACKAGE)
        outcome = "lost"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                with interrupt:
                    safeckpt.save(large(2.0), target)
            except KeyboardInterrupt:
                outcome = "surfaced"
            except BaseException as error:
                outcome = f"came out as {error!r}"
        fired = interrupt.fired
        if outcome != ("surfaced" if fired else "lost"):
            wrong.append(f"event {number}: {outcome}")
        found = contents(Path(folder))
        if found not in ({"model.pt": allowed["new"]}, {"model.pt": allowed["old"]}):
            wrong.append(f"event {number}: {sorted(found)}")
        if descriptor_count() != descriptors:
            wrong.append(f"event {number}: {descriptor_count() - descriptors} descriptor(s) more")
            descriptors = descriptor_count()
        if found.get("model.pt") != allowed["old"]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            path.write_bytes(allowed["old"])
    return interrupt.seen, wrong


@pytest.mark.parametrize(
    ("to_path", "every"),
    [(True, 10), pytest.param(True, 1, marks=pytest.mark.slow), pytest.param(False, 1, marks=pytest.mark.slow)],
)
def test_interrupt_at_any_line_surfaces_and_loses_nothing(memory_path: Path, to_path: bool, every: int) -> None:
    """Ctrl-C at any executed line is a KeyboardInterrupt, never an abort; the file is the old or the new one."""
    ended = children.run(_interrupt_everywhere, str(memory_path), to_path=to_path, every=every)
    assert ended.signal is None
    assert ended.error is None
    count, wrong = ended.value
    assert wrong == []
    assert count > 300
