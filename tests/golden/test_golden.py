"""Every released format version is read for ever: files that older versions wrote come back bit for bit."""

import shutil
import subprocess
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import safeckpt
from tests.comparing import assert_same, bits
from tests.distributed import groups
from tests.golden.make import components, group_components, train, values, weight_of

HERE = Path(__file__).parent
DROP_INS = sorted(HERE.glob("format-*-save.pt"))
FOLDERS = sorted(path for path in HERE.glob("format-*-manager") if path.is_dir())
GROUPS = sorted(path for kind in ("ddp", "fsdp*") for path in HERE.glob(f"format-*-{kind}") if path.is_dir())


def test_there_are_golden_files_of_the_current_format():
    """The version that this code writes has its golden files."""
    current = f"format-{safeckpt.file.FORMAT_VERSION}-"
    assert any(path.name.startswith(current) for path in DROP_INS)
    assert any(path.name.startswith(current) for path in FOLDERS)
    assert {path.name.rpartition("-")[2] for path in GROUPS if path.name.startswith(current)} >= {"ddp", "fsdp"}


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.name)
def test_golden_file_of_the_drop_in_comes_back(path):
    """safeckpt and plain torch read the same values from it as were saved, and other readers find it whole."""
    assert safeckpt.verify(path).self_proving
    assert_same(safeckpt.load(path), values())
    assert_same(torch.load(path), values())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tq", path], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_golden_checkpoint_is_restored(folder, tmp_path, recwarn):
    """A manager restores it into fresh objects, and the run goes on as it did when it was written."""
    expected = torch.load(folder / "expected.pt")
    folder = shutil.copytree(folder, tmp_path / "run")  # a restore is noted in the history
    parts = components()
    checkpoint = safeckpt.CheckpointManager(folder, parts).restore()
    assert (checkpoint.step, checkpoint.metrics["accuracy"]) == (3, 0.5)
    assert checkpoint.metrics["bleu"] != checkpoint.metrics["bleu"]
    assert bits(parts["model"][0].weight.detach()) == bits(expected["weight"])
    assert parts["counters"] == {"epoch": 3}
    # Another processor or torch may add in another order; the state is exact, the arithmetic is not promised.
    assert train(parts, 2) == pytest.approx(expected["next"], rel=1e-5)
    assert {warning.category for warning in recwarn} <= {safeckpt.EnvironmentChangedWarning}


def _restored(path, kind):
    parts = group_components(kind)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        checkpoint = safeckpt.CheckpointManager(path, parts).restore()
    kinds = {one.category for one in given} - {safeckpt.EnvironmentChangedWarning}
    return checkpoint.step, checkpoint.metrics, weight_of(parts), train(parts, 2), parts["counters"], kinds


@pytest.mark.parametrize("folder", GROUPS, ids=lambda path: path.name)
def test_golden_checkpoint_of_a_group_is_restored(folder, tmp_path):
    """Two ranks go on as they did, each with its own generator; one process alone reads the state whole."""
    expected = torch.load(folder / "expected.pt")
    run = shutil.copytree(folder, tmp_path / "run")
    kind = "ddp" if folder.name.endswith("ddp") else "fsdp"
    for rank, (step, metrics, weight, following, counters, kinds) in enumerate(groups.results(2, _restored, run, kind)):
        assert (step, metrics, counters, kinds) == (3, {"accuracy": 0.5}, {"epoch": 5}, set())
        assert bits(weight) == bits(expected["weight"])
        assert following == pytest.approx(expected["next"][rank], rel=1e-5)
    alone = safeckpt.load(safeckpt.latest(run).path)
    assert bits(alone["model"]["2.weight"]) == bits(expected["weight"])
    assert alone["counters"] == {"epoch": 3}
