"""The tensors of a sharded checkpoint, put together in one process by a reader of our own."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from safeckpt.errors import DamagedCheckpointError
from safeckpt.file import (
    INDEX,
    METADATA,
    SHARD_KEY,
    JoinedFile,
    encode,
    open_checkpoint,
    prepare,
    shard_of_bytes,
    write_file,
)
from tests.comparing import assert_same

WEIGHT = torch.arange(24.0).view(4, 6)
BIAS = torch.arange(5)


def sharded(folder, parts, size=(4, 6), dtype=torch.float32):
    """Write a checkpoint whose only sharded tensors are a weight in the given (offsets, part), and a bias."""
    folder.mkdir()
    tensors = [("weight", offsets, part) for offsets, part in parts] + [("bias", (0,), BIAS)]
    prepared = [prepare(encode(part), trailer=False) for _, _, part in tensors]
    with (folder / "__0_0.distcp").open("wb") as f:
        offsets = JoinedFile(prepared).write(f).offsets
    metadata = Metadata(
        {
            "weight": TensorStorageMetadata(
                TensorProperties(torch.float32),
                torch.Size(size),
                [ChunkStorageMetadata(torch.Size(offset), part.size()) for offset, part in parts],
            ),
            "bias": TensorStorageMetadata(
                TensorProperties(torch.int64), BIAS.size(), [ChunkStorageMetadata(torch.Size([0]), BIAS.size())]
            ),
        },
        storage_data={
            MetadataIndex(key, offset): _StorageInfo("__0_0.distcp", start, part.size_bytes)
            for (key, offset, _), part, start in zip(tensors, prepared, offsets, strict=True)
        },
    )
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    index(folder, {"weight": (size, dtype), "bias": ((5,), torch.int64)})


def index(folder, tensors):
    files = [shard_of_bytes(path.name, path.read_bytes()) for path in sorted(folder.iterdir()) if path.name != INDEX]
    holders = {key: {SHARD_KEY: key, "shape": list(size), "dtype": dtype} for key, (size, dtype) in tensors.items()}
    payload = {"model": holders, "again": [holders["weight"]], "safeckpt": {"files": [list(one) for one in files]}}
    header = {"shards": len(files), "shards_bytes": sum(size for _, size, _ in files)}
    with (folder / INDEX).open("wb") as f:
        write_file(encode(payload), f, header=header)


def load(folder, **options):
    with open_checkpoint(folder) as opened:
        opened.verify()
        return opened.load_whole(**options)


LAYOUTS = {
    "one part": [((0, 0), WEIGHT)],
    "by rows": [((0, 0), WEIGHT[:1]), ((1, 0), WEIGHT[1:])],
    "by columns": [((0, 4), WEIGHT[:, 4:]), ((0, 0), WEIGHT[:, :4])],
    "in blocks": [((i, j), WEIGHT[i : i + 2, j : j + 3]) for i in (0, 2) for j in (0, 3)],
    "with an empty part": [((0, 0), WEIGHT), ((4, 0), WEIGHT[4:])],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_any_layout_are_put_together(name, tmp_path):
    """Every element is where it was, and a placeholder that occurs twice is one tensor."""
    sharded(tmp_path / "step", LAYOUTS[name])
    got = load(tmp_path / "step")
    assert_same(got["model"], {"weight": WEIGHT, "bias": BIAS})
    assert got["again"][0] is got["model"]["weight"]


def test_tensors_go_where_they_are_asked_to(tmp_path):
    """A device is taken as in torch.load; on meta nothing is read."""
    sharded(tmp_path / "step", LAYOUTS["by rows"])
    assert load(tmp_path / "step", map_location="meta")["model"]["weight"].is_meta
    assert_same(load(tmp_path / "step", map_location="cpu")["model"]["weight"], WEIGHT)


LIES = {
    "overlap": [((0, 0), WEIGHT[:2]), ((1, 0), WEIGHT[1:3])],
    "a gap": [((0, 0), WEIGHT[:2])],
    "outside": [((0, 0), WEIGHT[:2]), ((3, 0), WEIGHT[2:])],
    "too many dimensions": [((0, 0, 0), WEIGHT[None])],
    "twice the same": [((0, 0), WEIGHT[:2]), ((0, 0), WEIGHT[:2])],
}


@pytest.mark.parametrize("name", LIES)
def test_parts_that_are_not_the_tensor_are_refused(name, tmp_path):
    """Parts that overlap, leave a gap or lie outside would leave memory unfilled."""
    sharded(tmp_path / "step", LIES[name])
    with pytest.raises(DamagedCheckpointError):
        load(tmp_path / "step")


def test_bytes_that_change_after_the_check_are_not_loaded(tmp_path, monkeypatch):
    """A part has the CRC-32 of what it was when it is read."""
    folder = tmp_path / "step"
    sharded(folder, [((0, 0), WEIGHT)])
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(WEIGHT.numpy().tobytes())
    with open_checkpoint(folder) as opened:
        opened.verify()
        data[at] ^= 1
        (folder / "__0_0.distcp").write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match="have changed since"):
            opened.load_whole()


@pytest.mark.slow
def test_the_engine_is_not_imported(tmp_path):
    """A process that only reads a sharded checkpoint does not load torch.distributed.checkpoint."""
    sharded(tmp_path / "step", LAYOUTS["by rows"])
    code = "import sys, safeckpt; safeckpt.load(sys.argv[1]); assert 'torch.distributed.checkpoint' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "step")], check=True)
