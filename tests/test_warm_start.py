"""`warm_start`: weights from every kind of file, all of them or none, with a report of what was taken."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import safeckpt
from tests.remote.conftest import URL, store  # noqa: F401 - a fixture
from tests.remote.memory_store import MemoryStore


def network(classes: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(6, classes)))


def bits(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight


def run_directory(model: nn.Module, folder: Path) -> Path:
    with safeckpt.CheckpointManager(folder, {"model": model}) as manager:
        manager.save(7)
    return folder


def one_checkpoint(model: nn.Module, folder: Path) -> Path:
    return next(run_directory(model, folder).glob("step-*"))


def plain_file(model: nn.Module, folder: Path) -> Path:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def lightning_file(model: nn.Module, folder: Path) -> Path:
    """As Lightning writes it: one dict of tensors beside much else."""
    folder.mkdir()
    optimizer = torch.optim.Adam(model.parameters())
    others = {"epoch": 1, "global_step": 9, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
    torch.save({"state_dict": model.state_dict(), **others}, folder / "last.ckpt")
    return folder / "last.ckpt"


def safetensors_file(model: nn.Module, folder: Path) -> Path:
    return safeckpt.export(one_checkpoint(model, folder), "model", folder.parent / "m.safetensors")[0]


def hub_folder(model: nn.Module, folder: Path) -> Path:
    safeckpt.export(one_checkpoint(model, folder.with_name("run")), "model", _made(folder) / "model.safetensors")
    return folder


def hub_folder_of_several(model: nn.Module, folder: Path) -> Path:
    target = _made(folder) / "model.safetensors"
    files = safeckpt.export(one_checkpoint(model, folder.with_name("run")), "model", target, max_shard_size=60)
    assert len(files) > 3
    return folder


def hub_folder_of_torch(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), _made(folder) / "pytorch_model.bin")
    return folder


def hub_folder_of_several_torch(model: nn.Module, folder: Path) -> Path:
    state = list(model.state_dict().items())
    parts = {"pytorch_model-00001-of-00002.bin": dict(state[:3]), "pytorch_model-00002-of-00002.bin": dict(state[3:])}
    for name, part in parts.items():
        torch.save(part, _made(folder) / name)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


SOURCES = [
    run_directory, one_checkpoint, plain_file, lightning_file, safetensors_file, hub_folder, hub_folder_of_several,
    hub_folder_of_torch, hub_folder_of_several_torch,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_kind_of_file_gives_the_same_weights(source: Callable[..., Path], tmp_path: Path) -> None:
    """Each tensor arrives bit for bit, in the tensors that the model had; modes and streams stay."""
    old, new = network(seed=1), network(seed=2).eval()
    path = source(old, tmp_path / "there")
    before, stream = list(new.parameters()), torch.get_rng_state()
    report = safeckpt.warm_start(new, path)
    assert bits(new) == bits(old)
    assert [one.name for one in report.taken] == list(new.state_dict())
    assert not report.kept
    assert all(one is other for one, other in zip(before, new.parameters(), strict=True))
    assert not new.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert ("every byte verified" in str(report)) == (source in {run_directory, one_checkpoint})


def test_a_sharded_checkpoint_is_read_whole() -> None:
    """In one process, what several ranks have saved: each tensor as `load` gives it."""
    path = Path(__file__).parent / "golden" / "format-1-torch-2.13.0-fsdp" / "step-00000003"
    state = safeckpt.load(path)["model"]
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    report = safeckpt.warm_start(model, path)
    assert "every byte verified" in str(report)
    assert bits(model) == {name: tensor.tolist() for name, tensor in state.items()}


def test_a_checkpoint_in_a_store_is_taken_by_its_url(
    tmp_path: Path,
    store: MemoryStore,  # noqa: F811 - the fixture
) -> None:
    """It is fetched into a temporary directory, and the report has the URL."""
    old, new = network(seed=1), network(seed=2)
    with safeckpt.CheckpointManager(tmp_path / "run", {"model": old}, mirror=URL) as manager:
        manager.save(3)
    key = next(one.key for one in store.client(store.hook, URL).listing() if one.key.endswith(".pt"))
    report = safeckpt.warm_start(new, f"{URL}/{key}")
    assert report.path == f"{URL}/{key}"
    assert bits(new) == bits(old)


def test_it_is_no_resume(tmp_path: Path) -> None:
    """A manager of the new run begins at 0, and a manager of the old directory is not allowed to write."""
    old = run_directory(network(seed=1), tmp_path / "old")
    new = network(seed=2)
    safeckpt.warm_start(new, old)
    with safeckpt.CheckpointManager(tmp_path / "new", {"model": new}) as manager:
        assert manager.step == 0
        assert manager.restore() is None
    with (
        safeckpt.CheckpointManager(old, {"model": new}, save_on_exit=False) as manager,
        pytest.raises(safeckpt.DirectoryInUseError),
    ):
        manager.save(8)


def test_head_of_another_shape_and_missing_tensors_need_leave(tmp_path: Path) -> None:
    """Without it everything is listed and nothing changed; with it the report says what stayed and why."""
    path = plain_file(network(5, seed=1), tmp_path / "there")
    new = network(10, seed=2)
    new.register_buffer("scale", torch.ones(1))
    before = bits(new)
    with pytest.raises(safeckpt.StateMismatchError) as caught:
        safeckpt.warm_start(new, path)
    assert caught.value.mismatches == (
        "scale: not in the file",
        "head.weight: shape [5, 6] in the file, [10, 6] here",
        "head.bias: shape [5] in the file, [10] here",
    )
    assert bits(new) == before
    report = safeckpt.warm_start(new, path, allow_missing=["scale"], allow_shape=["head.*"])
    assert {one.name: one.reason for one in report.kept} == {
        "scale": "not in the file",
        "head.weight": "shape [5, 6] in the file, [10, 6] here",
        "head.bias": "shape [5] in the file, [10] here",
    }
    assert [one.source for one in report.unused] == ["head.weight", "head.bias"]
    after = bits(new)
    assert after["head.weight"] == before["head.weight"]
    assert after["body.0.weight"] != before["body.0.weight"]
    for pattern in ({"allow_missing": ["scalle"]}, {"allow_shape": ["haed.*"]}):
        with pytest.raises(ValueError, match="the model has no tensor"):
            safeckpt.warm_start(new, path, **pattern)


RENAMES = {
    "prefixes in their order": {"module.": "", "encoder.": "body."},
    "wildcards": {"module.*.weight": "*.weight", "module.*": "*", "encoder.*": "body.*"},
    "a function": lambda name: name.removeprefix("module.").replace("encoder.", "body."),
}


@pytest.mark.parametrize("rename", RENAMES)
def test_names_are_renamed(rename: str, tmp_path: Path) -> None:
    """The report has both names, and lists what is left over."""
    old, new = network(seed=1), network(seed=2)
    state = {f"module.{name.replace('body.', 'encoder.')}": tensor for name, tensor in old.state_dict().items()}
    torch.save({**state, "module.decoder.weight": torch.ones(2)}, tmp_path / "old.pt")
    report = safeckpt.warm_start(new, tmp_path / "old.pt", rename=RENAMES[rename])
    assert bits(new) == bits(old)
    assert str(report.taken[0]) == "body.0.weight <- module.encoder.0.weight [6, 4] float32"
    assert [str(one) for one in report.unused] == ["module.decoder.weight: the model has no decoder.weight"]
    report = safeckpt.warm_start(
        new, tmp_path / "old.pt", rename={"module.head.": None, "module.": "", "encoder.": "body."},
        allow_missing=["head.*"],
    )  # fmt: skip
    assert {one.source: one.reason for one in report.unused}["module.head.weight"] == "left out by rename"


def test_wrappers_have_no_names_here_and_those_of_the_file_are_told(tmp_path: Path) -> None:
    """A wrapped model takes what a plain one does; a prefix that the whole file has is in the error."""
    old, new = network(seed=1), network(seed=2)
    safeckpt.warm_start(nn.DataParallel(new), plain_file(old, tmp_path / "there"))
    assert bits(new) == bits(old)
    torch.save({f"module.{name}": tensor for name, tensor in old.state_dict().items()}, tmp_path / "ddp.pt")
    with pytest.raises(safeckpt.StateMismatchError, match=r"rename=\{'module\.': ''\}"):
        safeckpt.warm_start(new, tmp_path / "ddp.pt")
    with pytest.raises(safeckpt.StateMismatchError, match="nothing in the file would be taken"):
        safeckpt.warm_start(new, tmp_path / "ddp.pt", allow_missing=["*"])
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "two.pt")
    with pytest.raises(safeckpt.StateMismatchError, match="both a and b of the file would go there"):
        safeckpt.warm_start(new, tmp_path / "two.pt", rename=lambda _: "head.bias", allow_missing=["*"])


def test_dtypes_are_converted_and_said(tmp_path: Path) -> None:
    """Rounding is allowed, a number that becomes infinite is not, and neither is another kind of number."""
    old, new = network(seed=1), network(seed=2).half()
    torch.save(old.state_dict(), tmp_path / "a.pt")
    report = safeckpt.warm_start(new, tmp_path / "a.pt")
    assert torch.equal(new.head.weight, old.head.weight.half())
    assert "head.weight [3, 6] float16, float32 in the file" in str(report)
    before = bits(new)
    for value, text in ((1e6, "1 of 3 numbers are too large"), (1j, "another kind of numbers")):
        bad = {**old.state_dict(), "head.bias": torch.tensor([value, 0, 0])}
        torch.save(bad, tmp_path / "b.pt")
        with pytest.raises(safeckpt.StateMismatchError, match=text):
            safeckpt.warm_start(new, tmp_path / "b.pt")
    assert bits(new) == before


def test_nan_is_refused_and_a_known_mask_is_not(tmp_path: Path) -> None:
    """NaN anywhere that would be taken changes nothing; what is left out may hold it."""
    old, new = network(seed=1), network(seed=2)
    for model in (old, new):
        model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    safeckpt.warm_start(new, plain_file(old, tmp_path / "good"))
    with torch.no_grad():
        old.head.bias[1] = torch.nan
    path, before = plain_file(old, tmp_path / "bad"), bits(new)
    with pytest.raises(safeckpt.NonFiniteError, match=r"head\.bias: 1 NaN") as caught:
        safeckpt.warm_start(new, path)
    assert [one.name for one in caught.value.tensors] == ["head.bias"]
    assert bits(new) == before
    safeckpt.warm_start(new, path, rename={"head.": None}, allow_missing=["head.*"])


def test_tied_tensors_are_one(tmp_path: Path) -> None:
    """One name in the file is enough; two that differ are an error."""
    model = Tied()
    torch.save({"embed.weight": torch.ones(5, 2)}, tmp_path / "one.pt")
    report = safeckpt.warm_start(model, tmp_path / "one.pt")
    assert [(one.name, one.source) for one in report.taken] == [
        ("embed.weight", "embed.weight"), ("head.weight", "embed.weight"),
    ]  # fmt: skip
    torch.save({"embed.weight": torch.ones(5, 2), "head.weight": torch.zeros(5, 2)}, tmp_path / "two.pt")
    with pytest.raises(
        safeckpt.StateMismatchError, match=r"one tensor with embed\.weight here, another one in the file"
    ):
        safeckpt.warm_start(model, tmp_path / "two.pt")
    assert model.head.weight.eq(1).all()


def test_component_is_named_where_there_are_several(tmp_path: Path) -> None:
    """The one called model is taken; without such a name the error lists those that there are."""
    one, other, new = network(seed=1), network(seed=2), network(seed=3)
    torch.save({"model": one.state_dict(), "ema": other.state_dict()}, tmp_path / "a.pt")
    assert safeckpt.warm_start(new, tmp_path / "a.pt").component == "model"
    assert bits(new) == bits(one)
    safeckpt.warm_start(new, tmp_path / "a.pt", component="ema")
    assert bits(new) == bits(other)
    torch.save({"teacher": one.state_dict(), "nested": {"ema": other.state_dict()}}, tmp_path / "b.pt")
    assert safeckpt.warm_start(new, tmp_path / "b.pt").component == "teacher"
    safeckpt.warm_start(new, tmp_path / "b.pt", component="nested.ema")
    torch.save({"teacher": one.state_dict(), "student": other.state_dict()}, tmp_path / "c.pt")
    for component in (None, "model"):
        with pytest.raises(safeckpt.ComponentMismatchError, match="It holds teacher, student"):
            safeckpt.warm_start(new, tmp_path / "c.pt", component=component)


def test_places_that_cannot_be_filled_are_named(tmp_path: Path) -> None:
    """Lazy and meta tensors are found before the first copy."""
    path = plain_file(network(seed=1), tmp_path / "there")
    for model, text in (
        (nn.Sequential(OrderedDict(head=nn.LazyLinear(3))), "run one forward pass first"),
        (nn.Sequential(OrderedDict(head=nn.Linear(6, 3, device="meta"))), "to_empty"),
    ):
        with pytest.raises(safeckpt.StateMismatchError, match=text):
            safeckpt.warm_start(model, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def overlap(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["body.0.bias"]["data_offsets"] = header["body.1.bias"]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("damage", [cut, append, overlap, no_header], ids=lambda damage: damage.__name__)
def test_damaged_safetensors_are_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Nothing is taken from a file that is not as long as its header says, or whose tensors overlap."""
    path, new = safetensors_file(network(seed=1), tmp_path / "there"), network(seed=2)
    before = bits(new)
    damage(path)
    with pytest.raises(safeckpt.DamagedCheckpointError):
        safeckpt.warm_start(new, path)
    assert bits(new) == before


def test_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """A missing part, an index that lies or leads elsewhere, two kinds of weights, nothing at all."""
    new = network(seed=2)
    folder = hub_folder_of_several(network(seed=1), tmp_path / "hub")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for name in ("../x.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "head.bias": name}}))
        with pytest.raises(safeckpt.DamagedCheckpointError, match="no index"):
            safeckpt.warm_start(new, folder)
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "more": good["weight_map"]["head.bias"]}}))
    with pytest.raises(safeckpt.DamagedCheckpointError, match="about more"):
        safeckpt.warm_start(new, folder)
    index.write_text(json.dumps(good))
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError):
        safeckpt.warm_start(new, folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="several kinds of weights"):
        safeckpt.warm_start(new, folder)
    with pytest.raises(safeckpt.CheckpointNotFoundError):
        safeckpt.warm_start(new, tmp_path)


def test_a_pickled_model_is_refused(tmp_path: Path) -> None:
    """Nothing in a file is executed."""
    torch.save(network(), tmp_path / "whole.pt")
    with pytest.raises(safeckpt.UntrustedTypeError):
        safeckpt.warm_start(network(), tmp_path / "whole.pt")
