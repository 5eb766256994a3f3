"""A trainer that is missing, of an untested version or changed inside is refused by name before anything begins."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from safeckpt.integrations.requirements import check_code, check_hooks, requires

TORCH = metadata.version("torch")


def install(path: Path, monkeypatch: pytest.MonkeyPatch, version: str, code: str = "") -> None:
    """Install a package `trainer_of_test` as the distribution `trainer-of-test`, as pip lays it out."""
    (path / "trainer_of_test.py").write_text(code)
    folder = path / f"trainer_of_test-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trainer-of-test\nVersion: {version}\n")
    monkeypatch.syspath_prepend(path)
    monkeypatch.delitem(sys.modules, "trainer_of_test", raising=False)


def require(below: str | None = "2.7") -> types.ModuleType:
    return requires("trainer_of_test", "2.6", below, "lightning", distribution="trainer-of-test")


def test_missing_package_is_named_with_the_extra() -> None:
    """Without the trainer the import says what to install, in the words of pip."""
    with pytest.raises(ImportError, match=r"needs trainer-of-test>=2.6,<2.7, which is not installed") as caught:
        require()
    assert 'pip install "safeckpt[lightning]"' in str(caught.value)
    assert caught.value.name == "trainer_of_test"


def test_package_that_lacks_one_of_its_own_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainer itself cannot import something, that error is the one to read."""
    install(tmp_path, monkeypatch, "2.6.1", "import nothing_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        require()


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.0rc1", "2.6.13", "2.6.1+cpu", "2.6.1.post1"])
def test_version_that_was_tested_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Every release of the range is taken."""
    install(tmp_path, monkeypatch, version, "answer = 42")
    assert require().answer == 42


@pytest.mark.parametrize("version", ["2.5.9", "2.7", "2.7.0", "2.7.0.dev3", "2.10.0", "3.0", "1.60"])
def test_other_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """An older or newer one, and a preview of the next, is an ImportError with both versions."""
    install(tmp_path, monkeypatch, version)
    with pytest.raises(ImportError, match=r"tested with trainer-of-test>=2.6,<2.7; ") as caught:
        require()
    assert f"; {version} is installed" in str(caught.value)


def test_version_without_an_upper_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `below=None` every newer version is taken."""
    install(tmp_path, monkeypatch, "11.0")
    assert require(None).__name__ == "trainer_of_test"


class Loop:
    batch = 0

    @property
    def trainer(self) -> object:
        raise RuntimeError("not attached to a trainer")


class Trainer:
    def __init__(self) -> None:
        self.fit_loop = Loop()

    def _run_epoch(self) -> None: ...


def test_what_is_there_passes() -> None:
    """Methods, attributes of an instance, attributes of attributes; and a property is not asked for its value."""
    check_hooks(Trainer, {"_run_epoch": "an epoch"})
    check_hooks(Trainer(), {"_run_epoch": "an epoch", "fit_loop.batch": "the position", "fit_loop.trainer": "it"})
    check_hooks(torch, {"nn.Module.forward": "a module"})


@pytest.mark.parametrize("owner", [torch.optim.SGD, type("Mine", (torch.optim.SGD,), {"__module__": "__main__"})])
def test_what_is_gone_is_named_with_package_and_version(owner: Any) -> None:
    """All that is gone is listed with its purpose; of a user's subclass the trainer's package is named."""
    requires("torch", "2.10", None, "test")
    hooks = {"step": "a step", "_leap": "a leap", "_run.inner": "the inside"}
    with pytest.raises(RuntimeError, match=f"{owner.__name__} of torch {TORCH.partition('+')[0]}") as caught:
        check_hooks(owner, hooks)
    lines = str(caught.value).splitlines()
    assert lines[1:3] == ["  _leap: a leap", "  _run.inner: the inside"]
    assert "Next: install a version" in lines[3]


def test_what_a_function_no_longer_sets_is_named() -> None:
    """Of what is there only while a loop runs, the code of the loop is asked."""
    requires("torch", "2.10", None, "test")
    check_code(torch.nn.Linear.__init__, {"in_features": "a size"})
    with pytest.raises(RuntimeError, match=r"Linear\.__init__ of torch") as caught:
        check_code(torch.nn.Linear.__init__, {"in_features": "a size", "_leap": "a leap"})
    assert str(caught.value).splitlines()[1:2] == ["  _leap: a leap"]


def test_room_itself_imports_no_trainer() -> None:
    """`import safeckpt.integrations` costs nothing: a trainer is imported with its own module."""
    code = "import sys, safeckpt.integrations as one; print(one.__doc__ is not None, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
