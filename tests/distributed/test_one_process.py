"""A sharded checkpoint without its group: one process alone loads, shows and refuses it."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.cli import main
from safeckpt.file import INDEX, encode, open_file, shard_of_bytes, write_file

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1-torch-2.13.0-fsdp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint of two ranks, to do things to."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "run")) / "step-00000003"


def test_every_tensor_comes_back_whole(folder: Path) -> None:
    """The state is what a file would hold: full tensors, moments by position, everything else."""
    expected = torch.load(folder.parent / "expected.pt")
    state = safeckpt.load(folder)
    assert list(state) == ["model", "optimizer", "scheduler", "generator", "counters", "safeckpt"]
    assert torch.equal(state["model"]["2.weight"], expected["weight"])
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (6, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    model.load_state_dict(state["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(state["optimizer"])


def test_places_other_than_host_memory(folder: Path) -> None:
    """A device is taken; what needs a look at each storage, or a mapping, is refused."""
    state = safeckpt.load(folder, map_location="meta")
    assert {tensor.device.type for tensor in state["model"].values()} == {"meta"}
    for options in ({"mmap": True}, {"map_location": {"cpu": "cpu"}}, {"map_location": lambda one, _: one}):
        with pytest.raises(ValueError, match="put together in memory"):
            safeckpt.load(folder, **options)  # type: ignore[arg-type]


def test_commands_know_directories(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """show, diff and extract take a sharded checkpoint as they take a file; a directory of them is no checkpoint."""
    assert main(["show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["size_bytes"] == sum(one.stat().st_size for one in folder.iterdir())
    assert {"name": "model.0.weight", "shape": [6, 4]}.items() <= next(
        one for one in shown["values"] if one["name"] == "model.0.weight"
    ).items()
    copy = shutil.copytree(folder, tmp_path / "copy" / folder.name)
    assert main(["diff", str(folder), str(copy)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["extract", str(folder), "model", "-o", str(tmp_path / "weights.pt")]) == 0
    assert torch.load(tmp_path / "weights.pt")["0.weight"].shape == (6, 4)
    capsys.readouterr()
    assert main(["show", str(folder.parent)]) == 2
    assert "safeckpt list" in capsys.readouterr().err


def test_progress_counts_every_byte(folder: Path) -> None:
    """The callback begins with the index, and ends with the size of all files."""
    calls: list[tuple[int, int]] = []
    report = safeckpt.verify(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (report.size_bytes, report.size_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {report.size_bytes}


# -- files made to do harm: with right digests, as whoever can write a file can make them ------------------------------


def proven(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Write the index anew, so that every digest in it is right again."""
    with open_file(folder / INDEX) as file:
        header, payload = file.header(), file.load("cpu")
    files = [shard_of_bytes(one.name, one.read_bytes()) for one in sorted(folder.iterdir()) if one.name != INDEX]
    payload["safeckpt"]["files"] = [list(one) for one in files]
    assert header is not None
    header["shards"], header["shards_bytes"] = len(files), sum(size for _, size, _ in files)
    change(payload)
    with (folder / INDEX).open("wb") as f:
        write_file(encode(payload), f, header=header)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def with_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the engine's metadata, and prove it."""
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    proven(folder)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return subprocess.call, ([sys.executable, "-c", f"open({str(self.mark)!r}, 'w')"],)


def test_metadata_executes_nothing(folder: Path, tmp_path: Path) -> None:
    """The engine's own reader unpickles whatever is in it."""
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "mark")))
    proven(folder)
    assert safeckpt.verify(folder).self_proving
    with pytest.raises(safeckpt.DamagedCheckpointError, match=r"subprocess\.call"):
        safeckpt.load(folder)
    assert not (tmp_path / "mark").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "mark").exists(), "the pickle of this test does nothing"


def _elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret.pt"


def _outside(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = 10**9


def _negative(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -64


def _half(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks.pop()


def _twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["model.0.weight"].chunks
    chunks.append(chunks[0])


def _large(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].size = torch.Size([1 << 40, 4])


def _nothing(metadata: Any) -> None:
    metadata.storage_data = {}


def _no_tensors(metadata: Any) -> None:
    metadata.state_dict_metadata = dict.fromkeys(metadata.state_dict_metadata, 7)


@pytest.mark.parametrize(
    "change",
    [_elsewhere, _outside, _negative, _half, _twice, _large, _nothing, _no_tensors],
    ids=lambda one: one.__name__,
)
def test_metadata_that_lies_is_refused(folder: Path, change: Callable[[Any], object]) -> None:
    """Files elsewhere, bytes that are not there, parts that leave memory unfilled."""
    torch.save(torch.ones(3, 4), folder.parents[1] / "secret.pt")
    with_metadata(folder, lambda _: None)
    safeckpt.load(folder)  # what is proven anew and not changed is good
    with_metadata(folder, change)
    assert safeckpt.verify(folder).self_proving
    with pytest.raises(safeckpt.DamagedCheckpointError):
        safeckpt.load(folder)


def _bomb(payload: Any) -> None:
    payload["model"]["0.weight"]["shape"] = [1 << 40, 1 << 10]


def _too_large(payload: Any) -> None:
    payload["model"]["0.weight"]["shape"] = [1 << 20, 4]


def _no_shape(payload: Any) -> None:
    del payload["model"]["0.weight"]["shape"]


def _wrong_shape(payload: Any) -> None:
    payload["model"]["0.weight"]["shape"] = [4, 6]


def _text_shape(payload: Any) -> None:
    payload["model"]["0.weight"]["shape"] = "many"


def _wrong_dtype(payload: Any) -> None:
    payload["model"]["0.weight"]["dtype"] = torch.strided


def _other_key(payload: Any) -> None:
    payload["model"]["0.weight"]["safeckpt.shard"] = "model.nowhere"


def _path_in_files(payload: Any) -> None:
    payload["safeckpt"]["files"][0][0] = "../step-00000003/.metadata"


def _metadata_unproven(payload: Any) -> None:
    payload["safeckpt"]["files"] = [one for one in payload["safeckpt"]["files"] if one[0] != ".metadata"]


@pytest.mark.parametrize(
    "change",
    [
        _bomb, _too_large, _no_shape, _wrong_shape, _text_shape, _wrong_dtype, _other_key, _path_in_files,
        _metadata_unproven,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_index_that_lies_is_refused(folder: Path, change: Callable[[Any], object]) -> None:
    """Place holders of any size and kind, names of files elsewhere, metadata that nothing proves."""
    proven(folder, change)
    with pytest.raises(safeckpt.DamagedCheckpointError):
        safeckpt.load(folder)


def test_metadata_with_random_bytes_is_refused_or_read_as_it_was(folder: Path) -> None:
    """Digests put right after each change: whatever is loaded is as it was, or nothing is."""
    good = (folder / ".metadata").read_bytes()
    expected = safeckpt.load(folder)["model"]
    chance = random.Random(7)
    refused = 0
    for _ in range(60):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        (folder / ".metadata").write_bytes(data)
        proven(folder)
        try:
            loaded = safeckpt.load(folder)["model"]
        except safeckpt.DamagedCheckpointError:
            refused += 1
        else:
            assert {name: tensor.shape for name, tensor in loaded.items()} == {
                name: tensor.shape for name, tensor in expected.items()
            }
    assert refused > 20
