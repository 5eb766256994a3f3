"""Paths as every public function takes them."""

from pathlib import Path

import pytest
import torch

import safeckpt
from tests.manager.helpers import Marked, manager_of


@pytest.mark.parametrize("kind", [str, Path])
def test_tilde_is_the_home_directory_everywhere(tmp_path, monkeypatch, kind):
    """`~` is the home directory in every function that takes a path; none is made in the working directory."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    safeckpt.save({"weight": torch.ones(2)}, kind("~/file.pt"))
    assert safeckpt.load(kind("~/file.pt"))["weight"].tolist() == [1, 1]
    assert safeckpt.verify(kind("~/file.pt")).path == str(home / "file.pt")
    with manager_of(kind("~/runs/first"), Marked()) as manager:
        manager.save(1)
        assert manager.directory == home / "runs" / "first"
    checkpoint = safeckpt.latest(kind("~/runs/first"))
    assert checkpoint is not None
    assert checkpoint.path.parent == home / "runs" / "first"
    assert list(elsewhere.iterdir()) == []
