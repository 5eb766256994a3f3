"""Tensors on an accelerator are written as torch writes them, staged through host memory."""

import io
import zipfile

import pytest
import torch

from safeckpt.file import encode
from safeckpt.file.writing.pickling import pickle_payload
from tests.comparing import assert_same
from tests.file.states import loaded, torch_pickle, written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def state():
    torch.manual_seed(0)
    model = torch.nn.Linear(700, 1500, device="cuda")  # several chunks of the file
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 700, device="cuda")).square().sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cpu": torch.arange(3)}


def on_cpu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), tree)


def test_state_on_a_device_is_written_as_torch_writes_it():
    """Pickle, locations and data are torch's own."""
    tree = state()
    assert pickle_payload(tree).data == torch_pickle(tree)
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with zipfile.ZipFile(buffer) as theirs, zipfile.ZipFile(io.BytesIO(written(tree))) as ours:
        assert ours.testzip() is None
        for name in ours.namelist():
            assert ours.read(name) == theirs.read(name) or name.endswith("serialization_id")


@pytest.mark.parametrize("location", [None, "cpu", "cuda:0"])
def test_state_comes_back_on_its_device_or_another(location):
    """Without map_location tensors go where they were."""
    tree = state()
    got = loaded(written(encode(tree)), map_location=location)
    assert got["model"]["weight"].device.type == ("cpu" if location == "cpu" else "cuda")
    assert got["cpu"].device.type == ("cuda" if location == "cuda:0" else "cpu")
    assert_same(on_cpu(got), on_cpu(tree))


def test_views_on_a_device_take_only_their_elements():
    """Slices, columns and ties are cut on the device, before anything is copied to the host."""
    whole = torch.arange(10_000.0, device="cuda").view(100, 100)
    tree = {"row": whole[3], "column": whole[:, 3].clone()[::2], "tied": whole[3]}
    assert sum(span.nbytes for span in pickle_payload(tree).spans) == 400 + 200
    assert_same(on_cpu(loaded(written(encode(tree)))), on_cpu(tree))


def test_many_small_tensors_on_a_device_come_back():
    """They are joined on the device, one copy for each record."""
    tree = {str(index): torch.full((index % 7,), float(index), device="cuda") for index in range(3000)}
    data = written(encode(tree))
    assert_same(on_cpu(loaded(data)), on_cpu(tree))
    assert_same(on_cpu(torch.load(io.BytesIO(data))), on_cpu(tree))
