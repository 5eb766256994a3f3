"""A file of another kind is called what it is, with what to do about it."""

import json
import os

import pytest
import torch

import safeckpt
from safeckpt.errors import DamagedCheckpointError


def safetensors():
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
KINDS = {
    "Git LFS": (POINTER, "git lfs pull"),
    "web page": (b"\n<!DOCTYPE html><html>Quota exceeded</html>", "download the file again"),
    "safetensors": (safetensors(), "safetensors.torch.load_file"),
    "NumPy": (b"\x93NUMPY" + bytes(100), "numpy.load"),
    "a pickle": (b"\x80\x04N.", "state_dict()"),
}


def refused(path):
    with pytest.raises(DamagedCheckpointError) as caught:
        safeckpt.load(path)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_other_kind_of_file_is_named_with_what_to_do(kind, tmp_path):
    """Nothing is said of damage, and the next step is one that helps."""
    data, next_step = KINDS[kind]
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    text = refused(path)
    assert text.startswith(f"{path} is no checkpoint: ")
    assert kind in text
    assert next_step in text
    assert "damaged" not in text


def test_file_in_the_format_before_zip_is_named(tmp_path):
    """The oldest weights of torchvision are in it; torch.load reads them."""
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert "no checkpoint: it is in the format of torch before 1.6" in refused(tmp_path / "old.pth")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")  # of whichever class: torch has changed it
def test_torchscript_archive_is_named(tmp_path):
    """Its records are compressed, which would be damage in a checkpoint."""
    torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2)).save(tmp_path / "script.pt")
    text = refused(tmp_path / "script.pt")
    assert "TorchScript" in text
    assert "torch.jit.load" in text


def test_empty_path_is_no_file():
    """The current directory is not meant by a path that was never filled in."""
    with pytest.raises(FileNotFoundError):
        safeckpt.load("")
    with pytest.raises(FileNotFoundError):
        safeckpt.verify("")


def test_pipe_is_refused_at_once(tmp_path):
    """Opening a pipe by its name would wait for somebody to write into it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        safeckpt.load(tmp_path / "pipe")
