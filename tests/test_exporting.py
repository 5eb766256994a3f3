"""`export`: one component as safetensors, in one file or several, or as a file of torch."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safeckpt
from safeckpt.store import disk
from tests import children

library = pytest.importorskip("safetensors.torch")


def read(files: tuple[Path, ...]) -> dict[str, torch.Tensor]:
    """Return what the package safetensors reads."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            part = library.load_file(file)
            assert not found.keys() & part.keys()
            found.update(part)
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with a model of tied weights, views and many dtypes."""
    weight = torch.arange(12.0).reshape(3, 4)
    state = {
        "embed.weight": weight, "head.weight": weight,  # tied
        "transposed": weight.t(), "columns": weight[:, 1:3], "expanded": torch.ones(1, 3).expand(4, 3),
        "scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "conjugate": torch.tensor([1 + 2j]).conj(),
        "flags": torch.tensor([True, False, True]), "big": torch.tensor([2**63], dtype=torch.uint64),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "bytes": torch.tensor([1, 255], dtype=torch.uint8), "double": torch.tensor([1 / 3], dtype=torch.float64),
        "numé": torch.tensor([1], dtype=torch.int16),
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    safeckpt.save({"model": state, "counters": {"step": 3}}, tmp_path / "in" / "a.pt")
    return tmp_path / "in" / "a.pt"


@pytest.mark.parametrize("most", [None, 1, 50, "64", "0.1KB", "1GiB"])
def test_whatever_the_number_of_files_all_tensors_come_back(source: Path, tmp_path: Path, most: Any) -> None:
    """Ties, views, scalars, empty tensors and every dtype that the format has: equal, also their dtypes and shapes."""
    files = safeckpt.export(source, "model", tmp_path / "model.safetensors", max_shard_size=most)
    found, expected = read(files), torch.load(source)["model"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].tolist() == tensor.tolist(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", *(file.name for file in files)])


def test_layout_of_several_files_is_that_of_hugging_face(source: Path, tmp_path: Path) -> None:
    """Numbered files in the order of the tensors, an index last, no file larger than asked but by one tensor."""
    files = safeckpt.export(source, "model", tmp_path / "model.safetensors", max_shard_size=100)
    count = len(files) - 1
    assert count > 2
    assert [file.name for file in files] == [
        *(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)),
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    sizes = [{name: one.nbytes for name, one in library.load_file(file).items()} for file in files[:-1]]
    assert index["metadata"]["total_size"] == sum(sum(one.values()) for one in sizes)
    assert index["weight_map"] == {name: file.name for file, one in zip(files, sizes, strict=False) for name in one}
    assert all(sum(one.values()) <= 100 or len(one) == 1 for one in sizes)
    with library.safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_torch_file_holds_the_component_as_it_is(source: Path, tmp_path: Path) -> None:
    """Ties stay ties, in a file that plain torch reads."""
    (file,) = safeckpt.export(source, "model", tmp_path / "model.pt")
    found, expected = torch.load(file), torch.load(source)["model"]
    assert list(found) == list(expected)
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert safeckpt.verify(file).self_proving


def test_dtype_converts_floating_tensors_alone(tmp_path: Path) -> None:
    """Integers, flags and complex numbers stay."""
    state = {"w": torch.tensor([1 / 3]), "n": torch.tensor([3]), "z": torch.tensor([1j])}
    safeckpt.save({"model": state}, tmp_path / "a.pt")
    for name in ("b.safetensors", "b.pt"):
        files = safeckpt.export(tmp_path / "a.pt", "model", tmp_path / name, dtype="bfloat16")
        found = read(files) or torch.load(files[0])
        assert torch.equal(found["w"], state["w"].bfloat16())
        assert found["n"].dtype is torch.int64
        assert found["z"].dtype is torch.complex64


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bf16", "torch.bfloat16"])
def test_each_spelling_of_a_dtype_means_the_same(dtype: str, tmp_path: Path) -> None:
    """The short name also after `torch.`, as the long one."""
    safeckpt.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    (file,) = safeckpt.export(tmp_path / "a.pt", "model", tmp_path / "b.pt", dtype=dtype)
    assert torch.load(file)["w"].dtype is torch.bfloat16


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no tensor": ({"w": torch.ones(1), "n": 3}, {}, "no tensors (n)"),
    "no dict": ([torch.ones(1)], {}, "list"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, {}, "model.w"),
    "dtype": ({"w": torch.ones(1, dtype=torch.complex128)}, {}, "complex128"),
    "too large": ({"ok": torch.ones(1), "w": torch.tensor([1.0, 1e6])}, {"dtype": torch.float16}, "1 of its 2 numbers"),
    "too large for eight bits": ({"w": torch.tensor([1e4])}, {"dtype": torch.float8_e4m3fn}, "1 of its 1 numbers"),
    "names": ({1: torch.ones(1), "1": torch.ones(1)}, {}, "names that safetensors cannot have (1)"),
    "metadata": ({"__metadata__": torch.ones(1)}, {}, "__metadata__"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("most", [None, 1])
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, what: str, most: int | None) -> None:
    """Nothing is left, also of files that were already written."""
    state, options, text = REFUSED[what]
    safeckpt.save({"model": state}, tmp_path / "a.pt")
    before = contents(tmp_path)
    with pytest.raises(safeckpt.UnsavableStateError) as raised:
        safeckpt.export(tmp_path / "a.pt", "model", tmp_path / "b.safetensors", max_shard_size=most, **options)
    assert text in str(raised.value)
    assert contents(tmp_path) == before


def test_wrong_arguments_are_named(source: Path, tmp_path: Path) -> None:
    """Endings, dtypes, sizes and names of components; nothing is written."""
    before = contents(tmp_path / "in")
    for options, text in (
        ({"target": "b.bin"}, "has to end in"),
        ({"dtype": "int8"}, "no floating dtype"),
        ({"dtype": "load"}, "no floating dtype"),
        ({"max_shard_size": "5 apples"}, "no number of bytes"),
        ({"max_shard_size": 0}, "no number of bytes"),
        ({"target": "b.pt", "max_shard_size": 5}, "one file"),
    ):
        arguments: dict[str, Any] = {"target": "b.safetensors", **options}
        target = tmp_path / "in" / arguments.pop("target")
        with pytest.raises(ValueError, match=text):
            safeckpt.export(source, "model", target, **arguments)
    with pytest.raises(safeckpt.ComponentMismatchError, match="It holds model, counters") as raised:
        safeckpt.export(source, "modell", tmp_path / "in" / "b.pt")
    assert raised.value.available == ("model", "counters")
    assert contents(tmp_path / "in") == before


def test_old_and_new_files_are_never_read_together(source: Path, tmp_path: Path) -> None:
    """One file is replaced when asked; one beside several, or several beside one, is refused in any case."""
    target = tmp_path / "out" / "model.safetensors"
    target.parent.mkdir()
    safeckpt.export(source, "model", target)
    with pytest.raises(FileExistsError):
        safeckpt.export(source, "model", target)
    safeckpt.export(source, "model", target, dtype="float64", overwrite=True)
    before = contents(target.parent)
    with pytest.raises(FileExistsError, match="delete it first"):
        safeckpt.export(source, "model", target, max_shard_size=50, overwrite=True)
    assert contents(target.parent) == before
    target.unlink()
    files = safeckpt.export(source, "model", target, max_shard_size=50)
    before = contents(target.parent)
    for most in (None, 50, 90):
        with pytest.raises(FileExistsError, match="its index first"):
            safeckpt.export(source, "model", target, max_shard_size=most, overwrite=True)
    assert contents(target.parent) == before
    files[-1].unlink()  # as a killed export leaves it
    with pytest.raises(FileExistsError, match="delete it first"):
        safeckpt.export(source, "model", target, max_shard_size=50)
    safeckpt.export(source, "model", target, max_shard_size=50, overwrite=True)
    assert contents(target.parent) == before


def test_damaged_checkpoint_is_not_exported(source: Path, tmp_path: Path) -> None:
    """Every byte is verified first."""
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    source.write_bytes(data)
    with pytest.raises(safeckpt.DamagedCheckpointError):
        safeckpt.export(source, "model", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_file_that_changes_while_it_is_exported_is_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was verified is what is written, or nothing is."""
    create = disk.create

    def changing(path: Path) -> Any:
        with source.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        return create(path)

    monkeypatch.setattr(disk, "create", changing)
    with pytest.raises(safeckpt.DamagedCheckpointError, match="written to while"):
        safeckpt.export(source, "model", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def _export_to_small_files(source: Path, target: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
    safeckpt.export(source, "model", target, max_shard_size="60")


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """Of several files the first ones are removed when a later one does not fit."""
    (tmp_path / "out").mkdir()
    error = children.run(_export_to_small_files, source, tmp_path / "out" / "m.safetensors").error
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """A checkpoint of 400 MB becomes safetensors with far less memory above what the process has."""
    state = {f"w{number}": torch.full((5_000_000,), float(number)) for number in range(20)}
    safeckpt.save({"model": state}, tmp_path / "a.pt")
    code = (
        "import resource, safeckpt, sys, torch\n"
        "safeckpt.export(sys.argv[1], 'model', sys.argv[2])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "safeckpt.export(sys.argv[3], 'model', sys.argv[4], dtype='bfloat16', max_shard_size='100MB')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    safeckpt.save({"model": {"w": torch.ones(3)}}, tmp_path / "small.pt")
    arguments = [tmp_path / name for name in ("small.pt", "small.safetensors", "a.pt", "m.safetensors")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert resource.getpagesize()  # kibibytes below: of Linux
    assert int(done.stdout) * 1024 < 150e6  # 20 MB as they are, 10 MB converted, and what compares them
    found = read(tuple(sorted(tmp_path.glob("m-*.safetensors"))))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in state.items())


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    """`from_pretrained` reads one file and several, tied weights included, and the model is the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16, tie_word_embeddings=True
    )
    model = transformers.GPT2LMHeadModel(config)
    with safeckpt.CheckpointManager(tmp_path / "run", {"model": model}) as manager:
        path = manager.save(1).path
    for name, most in (("one", None), ("several", "5KB")):
        place = tmp_path / name
        config.save_pretrained(place)
        files = safeckpt.export(path, "model", place / "model.safetensors", max_shard_size=most)
        assert (len(files) > 3) == (most is not None)
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key


def test_module_with_a_plain_state_loads_strictly(tmp_path: Path) -> None:
    """What a manager saved of a module goes into a fresh one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with safeckpt.CheckpointManager(tmp_path / "run", {"model": model}) as manager:
        path = manager.save(1).path
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fresh.load_state_dict(read(safeckpt.export(path, "model", tmp_path / "m.safetensors")))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
