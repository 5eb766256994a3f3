"""States that people save, and helpers to write and read them in memory."""

import io
import random
import zipfile
from collections import Counter, OrderedDict

import torch

from safeckpt.file import archive, encode, open_file, write_file
from safeckpt.file.checksum import ChunkDigest
from safeckpt.file.trailer import TRAILER_BYTES, Trailer
from safeckpt.file.writing.write import PreparedFile


def written(payload, **options):
    """Return the bytes of a file."""
    buffer = io.BytesIO()
    write_file(payload, buffer, **options)
    return buffer.getvalue()


def assembled(pickle_bytes, contents=(), header=None):
    """Return a file with a right digest, of any pickle, any data of storages, and any header."""
    names = archive.record_names(len(contents), header=header is not None)
    parts = [pickle_bytes, b"1", b"64", b"little", *contents, b"3\n"]
    if header is not None:
        parts.insert(0, header)
    entries, _ = archive.layout(list(zip(names, [*map(len, parts), 40], strict=True)))
    buffer = io.BytesIO()
    PreparedFile(0, entries, parts, _is_plain=True, _has_trailer=True).write(buffer)
    return buffer.getvalue()


def sealed(data):
    """Return changed bytes of a file with a trailer that is right for them, as an attacker can make one."""
    body = bytes(data[:-TRAILER_BYTES])
    digest = ChunkDigest()
    digest.add(body)
    return body + Trailer(digest=digest.hexdigest(), size_bytes=len(body)).to_bytes()


def loaded(data, **options):
    """Verify and load a file from its bytes."""
    with open_file(io.BytesIO(data)) as file:
        file.verify()
        return file.load(**options)


def round_trip(tree, **options):
    return loaded(written(encode(tree), **options))


def torch_pickle(payload, protocol=2):
    """Return data.pkl as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(payload, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


def trained(optimizer_type=torch.optim.AdamW, **options):
    """Return a small model and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = optimizer_type(model.parameters(), **options)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


# Of the states below, so that a test can be named after one without building all of them.
NAMES = tuple(
    "attributes bits broadcast bytes containers cyclic float8 graph keys leaf lstm model new_dtypes optimizer "  # noqa: SIM905
    "parameters plain rng scheduler sgd small sparse storage strides ties torch".split()
)


def corpus():
    """Return states, by name, that need nothing that torch.save does not do: no view of a larger storage."""
    torch.manual_seed(1)
    model, optimizer = trained()
    shared = torch.arange(6.0)
    parameter = torch.nn.Parameter(torch.randn(3))
    tagged = torch.arange(3)
    tagged.note = {"of": [1, 2]}
    tagged_parameter = torch.nn.Parameter(torch.ones(2))
    tagged_parameter.group = "a"
    cyclic = {"list": [1]}
    cyclic["list"].append(cyclic)
    lstm = torch.nn.LSTM(3, 4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    return {
        "model": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "sgd": trained(torch.optim.SGD, lr=0.1, momentum=0.9)[1].state_dict(),
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "anneal_func"},
        "lstm": lstm.state_dict(),
        "rng": {"python": random.Random(3).getstate(), "torch": torch.get_rng_state()},
        "plain": [
            None,
            True,
            0,
            -1,
            255,
            256,
            65536,
            2**31,
            2**63,
            -(2**2000),
            0.5,
            float("inf"),
            1j,
            "é\ud800",
            "cpu",
        ],
        "bytes": [b"a", bytes(range(256)), bytearray(), bytearray(b"xy")],
        "containers": {"t": (), "l": [], "d": {}, "s": {1, 2}, "c": Counter("aab"), "o": OrderedDict(a=(1, (2,)))},
        "keys": {1: 1, (1, "a"): 2, None: 3, 1.5: 4, b"k": 5, False: 6},
        "torch": [
            torch.float32,
            torch.bfloat16,
            torch.device("cpu"),
            torch.strided,
            torch.Size((1, 2)),
            torch.sparse_coo,
        ],
        "ties": [shared, shared, shared.view(2, 3), shared[:3], parameter, parameter.detach(), parameter.data],
        "cyclic": cyclic,
        "attributes": [tagged, tagged_parameter, torch.nn.Buffer(torch.ones(2))],
        "strides": [torch.arange(6.0).view(2, 3).t(), torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last)],
        "broadcast": torch.tensor([2.0]).expand(4),
        "bits": [torch.randn(2, dtype=torch.complex64).conj(), torch._neg_view(torch.randn(3))],
        "small": [torch.tensor(1.5), torch.zeros(0), torch.zeros(0, 3), torch.tensor([], dtype=torch.int64)],
        "new_dtypes": [torch.tensor([1, 2, 3], dtype=d) for d in (torch.uint16, torch.uint32, torch.uint64)],
        "float8": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e5m2)],
        "sparse": [
            torch.eye(3).to_sparse().clone(),
            torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], size=(2, 2), check_invariants=True),
        ],
        "leaf": torch.randn(3, requires_grad=True),
        "graph": torch.randn(3, requires_grad=True) * 2,
        "storage": torch.arange(4.0)._typed_storage(),
    }
