"""Hostile files: made to do harm, with digests that are right. Refused in bounded time and memory, nothing executed.

Every file is read in a child process that may use ``MOST_BYTES`` more memory than torch itself and is given
``MOST_SECONDS`` for it, in each way there is: verified, loaded, loaded mapped, and as a checkpoint of a manager.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from safeckpt.file.trailer import TRAILER_BYTES
from tests.campaign.outcome import Outcome, Scale
from tests.file import test_hostile as known
from tests.file import test_pickle_scan as op
from tests.file.states import sealed, written

MOST_SECONDS = 5.0  # of processor time for one file of up to 20 MB
MOST_BYTES = 1 << 30
MARKER = "SAFECKPT_WAS_OWNED"
CRC_BYTES = "CRC-32 in the directory"

CHILD = """
import json, os, resource, sys, time, warnings
import torch
import safeckpt
from safeckpt.file import open_file
from tests.campaign.hostile import MARKER
from tests.comparing import assert_same

def mapped(path):
    return safeckpt.load(path, mmap=True)

def restored(path):
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.SafeckptWarning)
        manager = safeckpt.CheckpointManager(os.path.dirname(path), {"model": model})
        return manager.restore(step=1)

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
for path in sys.stdin.read().split("\\0"):
    for how in (safeckpt.verify, safeckpt.load, mapped, restored):
        began = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                got = how(path)
                ended = "accepted"
                if how in (safeckpt.load, mapped):
                    assert_same(got, torch.load(path))
                    ended = "loaded as torch does"
        except safeckpt.SafeckptError as error:
            ended = "refused"
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"[:200]
        owned = MARKER in os.environ
        print(json.dumps([path, how.__name__, ended, time.process_time() - began, owned]), flush=True)
"""


def pickles() -> Iterator[tuple[str, bytes]]:
    """Give pickles that a safe load must not follow, beyond those of the tests, by every opcode there is."""
    for opcode in set(range(256)) - set(b"qhrjK(t\x85\x86\x87)XQR\x89\x88NMJG.}]\x8fuseab\x81c\x8aU\x80"):
        yield f"opcode {opcode}", b"N" + bytes([opcode]) + b"\x01\x01\x01\x01os\nsystem\n"
    for module, name in (
        ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("builtins", "exec"),
        ("__builtin__", "eval"), ("__builtin__", "__import__"), ("torch", "load"), ("torch.hub", "load"),
        ("torch._utils", "_rebuild_tensor.__globals__"), ("torch.Tensor", "__reduce_ex__"), ("operator", "attrgetter"),
        ("torch._utils\r", "_rebuild_tensor"), ("torch", "os.system"), ("collections", "OrderedDict.fromkeys"),
        ("functools", "partial"), ("copyreg", "_reconstructor"), ("pickle", "loads"),
        ("torch.storage", "_load_from_bytes"),
    ):  # fmt: skip
        yield f"calls {module}.{name}", f"c{module}\n{name}\n(".encode() + op.text(MARKER) + op.text("1") + b"tR"
    putenv = b"cos\nputenv\n"
    yield "call from the memo", putenv + b"q\x00" + b"h\x00(" + op.text(MARKER) + op.text("1") + b"tR"
    yield "object of a function", putenv + b")\x81"
    yield "state of a class", b"ccollections\nOrderedDict\n}" + op.text("__setstate__") + b"Nsb"
    yield "state of a list", b"]}b"
    yield "class as a persistent id", b"ccollections\nOrderedDict\nQ"
    yield "text as a persistent id", op.text("0") + b"Q"
    yield "call of what was built", op.tensor() + b")R"
    yield "call of an OrderedDict", b"ccollections\nOrderedDict\n)R)R"
    yield "items in a tensor", op.tensor() + b"NNs"
    yield "call of a dtype", b"ctorch\nfloat32\n)R"
    yield "number of a million objects", b"N" + b"r\xff\xff\xff\x7f"
    yield "a long string that is not there", b"X\xff\xff\xff\xff"
    yield "a million marks", b"(" * 1_000_000
    yield "a million numbers in the memo", b"N" + b"".join(b"r" + struct.pack("<I", n) for n in range(1_000_000)) + b"("
    yield "layout that there is not", b"ctorch.serialization\n_get_layout\n(" + op.text("x" * 1000) + b"tR"
    yield "bytes in another encoding", b"c_codecs\nencode\n(" + op.text("a" * 100_000) + op.text("idna") + b"tR"
    yield (
        "bytearray by punycode",
        b"c__builtin__\nbytearray\n(" + op.text("\xe9" * 90_000) + op.text("punycode") + b"tR",
    )
    for function in ("_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass", "_rebuild_parameter_with_state"):
        yield f"{function} of nothing", b"ctorch._utils\n" + function.encode() + b"\n(NNNNNNNNtR"


def shapes(chance: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Give tensors whose shape, stride or offset leaves their storage of four floats."""
    edge = (0, 1, 2, 3, 4, 5, 127, 2**15, 2**30, 2**31 - 1, -1, -2, -(2**31))
    while count:
        axes = chance.randrange(1, 4)
        size = tuple(chance.choice(edge) for _ in range(axes))
        stride = tuple(chance.choice(edge) for _ in range(axes))
        offset = chance.choice(edge)
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if min(*size, *stride, offset) >= 0 and (0 in size or last < 4):
            continue  # it lies inside
        count -= 1
        kind = chance.choice(("_rebuild_tensor_v2", "_rebuild_tensor"))
        tail = op.NO_HOOKS if kind == "_rebuild_tensor_v2" else b""
        yield (
            f"{kind} {offset} {size} {stride}",
            op.tensor(offset=offset, size=size, stride=stride, function=kind, tail=tail),
        )


def archives(full: bool) -> Iterator[tuple[str, bytes]]:
    """Give zip files that torch would misread, or that are another thing."""
    honest = written({"model": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}})
    directory = honest.index(b"PK\x01\x02")
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", honest)]
    crcs = {entry + 16 + byte for entry in entries for byte in range(4)}
    for at in range(directory, len(honest) - TRAILER_BYTES):
        if full or at % 5 == 0:
            for value in {0, 8, 0x10, 0xFF, honest[at] ^ 1, honest[at] ^ 0x80} - {honest[at]}:
                what = CRC_BYTES if at in crcs else "byte"
                yield f"{what} at {at} is {value}", sealed(honest[:at] + bytes([value]) + honest[at + 1 :])
    for folder in ("../archive", "/archive", "archive/..", "C:\\archive", "archive\0", ""):
        yield f"folder {folder!r}", known.zip_of([(f"{folder}/data.pkl", known.pickled(op.tensor()))])
    for name in ("../../x", "data/../0", "./x", "data//0", "DATA.PKL", "data/0/", "x\\y", "a\nb", "constants.pkl"):
        yield f"record {name!r}", known.zip_of([*known.GOOD, (f"archive/{name}", b"x")])
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", known.pickled(op.tensor()))
        out.writestr("archive/data/0", bytes(400 << 20))
    yield "deflated bomb", bomb.getvalue()
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        yield f"method {method}", known.plain_file(known.pickled(op.tensor()), method=method)
    many = 1_000_000 if full else 30_000
    yield f"{many} records", zip_of_many(many)
    yield f"{many} claimed records", honest[: -TRAILER_BYTES - 12] + struct.pack("<HH", 65535, 65535) + honest[-138:]
    office = io.BytesIO()
    with zipfile.ZipFile(office, "w") as out:
        out.writestr("[Content_Types].xml", "<Types/>")
        out.writestr("word/document.xml", "<x/>")
    yield "a document", office.getvalue()
    yield "an array", b"\x93NUMPY" + bytes(1000)
    for header in (
        b"[" * 1_000_000 + b"\n",
        b"{" + b'"a":{' * 50_000 + b"\n",
        b"9" * 1_000_000 + b"\n",
        b"null\n",
        b"\n",
    ):
        yield f"header {header[:5]!r}", with_header(header)


def zip_of_many(count: int) -> bytes:
    """Return a zip with very many empty records and no state; zipfile would take minutes to write it."""
    local, central = bytearray(), bytearray()
    for number in range(count):
        name = b"a/%d" % number
        central += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, len(local)
        )
        central += name
        local += struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0, 0, 0, 0, count, count, len(central), len(local))
    locator = struct.pack("<IIQI", 0x07064B50, 0, len(local) + len(central), 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return bytes(local + central + end64 + locator + end)


def with_header(header: bytes) -> bytes:
    """Return a file whose header record is not JSON, or not an object, or endless."""
    return known.own_file(known.pickled(op.tensor()), header=header)


def files(scale: Scale, seed: int) -> Iterator[tuple[str, bytes]]:
    full = scale == "full"
    for name, (body, _) in known.PICKLES.items():
        yield name, known.own_file(known.pickled(body), known.CONTENTS.get(name, (bytes(16),)))
        contents = known.CONTENTS.get(name, (bytes(16),))
        records = [(f"data/{key}", content) for key, content in enumerate(contents)]
        yield f"{name}, by torch", known.plain_file(known.pickled(body), records)
    for name, body in (*pickles(), *shapes(random.Random(seed), 2000 if full else 40)):
        yield name, known.own_file(known.pickled(body))
    yield from archives(full)


def run(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("files made to do harm, with right digests", figures={"harmless": 0})
    slowest, bounded = 0.0, Path("/proc/self/status").exists()
    if not bounded:
        outcome.skipped = "the memory of a child can be bounded on Linux only"
        return outcome
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        named = {}
        for number, (name, data) in enumerate(files(scale, seed)):
            place = Path(folder) / str(number)
            place.mkdir()
            (place / "step-00000001.pt").write_bytes(data)
            named[str(place / "step-00000001.pt")] = name
        status = Path("/proc/self/status").read_text("ascii").splitlines()
        virtual = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(max(virtual, 1 << 30) + MOST_BYTES)],
            input="\0".join(named), capture_output=True, text=True, timeout=3000, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        for path, how, ended, seconds, owned in reports:
            outcome.tried += 1
            slowest = max(slowest, seconds)
            what = f"{named[path]}: {how}() {ended} in {seconds:.2f} s"
            # A wrong CRC-32 under a right digest changes nothing: torch reads none of them.
            harmless = ended == "loaded as torch does" and named[path].startswith(CRC_BYTES)
            outcome.figures["harmless"] += harmless
            expected = harmless or ended == "refused" or (ended == "accepted" and how == "verify")
            if owned or not expected or seconds > MOST_SECONDS:
                outcome.undetected.append(what)
        if done.returncode or len(reports) != 4 * len(named):
            last = named.get(reports[-1][0]) if reports else None
            outcome.undetected.append(f"the reader ended after {last!r}: {done.returncode} {done.stderr[-300:]}")
    outcome.figures |= {"files": len(named), "slowest_seconds": round(slowest, 2), "memory_bound_bytes": MOST_BYTES}
    return outcome
