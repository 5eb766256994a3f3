"""Fuzzing of the reader: files changed at random are refused by name, or load exactly as plain ``torch.load`` does.

An input is a few bytes that say which file is changed and how (:func:`file_of`), so that the same inputs serve
hypothesis, which makes them at random, atheris, which looks for those that reach new code of the reader, and the
folder ``corpus`` beside this file, where the small inputs that reached something are kept. Changes are made to the
bytes of a file, with its digest left wrong or made right again, and to the opcodes of its pickle.

``python -m tests.campaign.fuzz FOLDER [options of libFuzzer]`` runs atheris alone.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import pickle
import pickletools
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

import safeckpt
from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from tests.campaign.outcome import Outcome, Scale
from tests.comparing import assert_same
from tests.file import test_hostile as known
from tests.file import test_pickle_scan as op
from tests.file.states import corpus as states
from tests.file.states import sealed, torch_pickle, written

CORPUS = Path(__file__).parent / "corpus"
MOST_SECONDS = 5.0
MOST_BYTES = 512 << 20
MOST_INPUT = 256
_MOST_RECORD = 1 << 16


@functools.cache
def seeds() -> list[tuple[bytes, tuple[bytes, ...]]]:
    """Return pickles with the contents of the records that they refer to."""
    packed = torch.arange(16.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about layouts that are still new
        made = states()
    found = [
        torch_pickle(made[name])
        for name in ("containers", "keys", "ties", "parameters", "bytes", "torch", "plain", "attributes",
                     "bits", "new_dtypes", "storage", "cyclic")
    ]  # fmt: skip
    found.append(known.pickled(b"(" + op.tensor(function="_rebuild_tensor", tail=b"") + op.text("x") * 2 + b"t"))
    found.append(torch_pickle({"a": packed, "b": {1: (2.5, 1j), (3, "k"): {4}}, "c": [b"x", None, True]}))
    return [(data, contents_for(data)) for data in found]


def contents_for(data: bytes) -> tuple[bytes, ...]:
    """Return a record for every storage that a pickle refers to, as large as it says."""
    try:
        claims = scan_pickle(data).claims
    except (PickleError, UntrustedGlobalError):
        return (bytes(range(64)),)
    most = max((int(key) for key in claims if key.isascii() and key.isdecimal() and len(key) < 3), default=0)
    sizes = [claims[str(key)].nbytes if str(key) in claims else 0 for key in range(most + 1)]
    return tuple(bytes(min(size, _MOST_RECORD)) for size in sizes)


SNIPPETS = [
    b"N", b"K\x01", b"}", b"]", b"\x8f", b"(", b"t", b"u", b"s", b"e", b"a", b"R", b"b", b"\x81", b"Q", b"q\x00",
    b"h\x00",
    b"q\x01", b"h\x01", b"h\x02", b"h\x05", b"\x85", b"\x86", b"\x87", b")", b"G\x7f\xf0" + bytes(6), b"M\xff\xff",
    b"\x8a\x09" + b"\xff" * 9, b"X\x01\x00\x00\x00a", b"U\x01a", b"\x80\x03", b"ccollections\nOrderedDict\n",
    b"ccollections\nCounter\n", b"c__builtin__\nset\n", b"c__builtin__\nbytearray\n", b"c__builtin__\ncomplex\n",
    b"c_codecs\nencode\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"ctorch\nTensor\n",
    b"ctorch.nn.parameter\nParameter\n",
    b"ctorch._utils\n_rebuild_parameter\n", b"ctorch._utils\n_rebuild_tensor\n", b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch.serialization\n_get_layout\n", b"ctorch\ndevice\n",
    op.storage(), op.tensor(), op.tensor(function="_rebuild_tensor", tail=b""), op.tensor(size=(2, 2), stride=(0, 1)),
]  # fmt: skip


def changed(data: bytes, edits: bytes) -> bytes:
    """Change bytes, four bytes of ``edits`` at a time: what to do, where, and how much or with what."""
    out = bytearray(data)
    for start in range(0, len(edits) - 3, 4):
        kind, high, low, value = edits[start : start + 4]
        if not out:
            return bytes(out)
        at = (high << 8 | low) % len(out)
        kind %= 6
        if kind == 0:
            out[at] ^= 1 << value % 8
        elif kind == 1:
            out[at] = value
        elif kind == 2:
            del out[at : at + 1 + value]
        elif kind == 3:
            out[at:at] = SNIPPETS[value % len(SNIPPETS)]
        elif kind == 4:
            out[at:at] = out[at : at + 1 + value]
        else:
            out[at : at + 4] = (value * 0x01010101 if value % 2 else value).to_bytes(4, "little")
    return bytes(out)


def reordered(data: bytes, edits: bytes) -> bytes:
    """Change a pickle by whole opcodes, three bytes of ``edits`` at a time."""
    starts = [position for _, _, position in pickletools.genops(data)]
    parts = [data[low:high] for low, high in zip(starts, [*starts[1:], len(data)], strict=True)]
    for start in range(0, len(edits) - 2, 3):
        kind, at, value = edits[start : start + 3]
        at = 1 + at * 7 % max(1, len(parts) - 1)
        kind %= 5
        if kind == 0:
            parts[at : at + 1] = []
        elif kind == 1:
            parts[at:at] = parts[value % len(parts) : value % len(parts) + 3]
        elif kind in (2, 3):
            parts[at:at] = [SNIPPETS[value % len(SNIPPETS)]]
        else:
            other = value % len(parts)
            if max(at, other) < len(parts):
                parts[at], parts[other] = parts[other], parts[at]
    return b"".join(parts)


@functools.cache
def whole_files() -> list[bytes]:
    tree = {"model": {"weight": torch.ones(3, 2)}, "step": 3}
    plain = io.BytesIO()
    torch.save(tree, plain)
    return [
        written(tree), written(tree, header={"step": 3}), plain.getvalue(),
        known.own_file(known.pickled(op.tensor(function="_rebuild_tensor", tail=b""))),
    ]  # fmt: skip


def file_of(given: bytes) -> bytes:
    """Return the file that an input stands for."""
    which, how, edits = (given + b"\0\0")[0], (given + b"\0\0")[1] % 4, given[2:MOST_INPUT]
    if how < 2:
        files = whole_files()
        data = changed(files[which % len(files)], edits)
        return sealed(data) if how == 1 and len(data) > 150 else data
    data, _ = seeds()[which % len(seeds())]
    data = reordered(data, edits) if which & 0x80 else changed(data, edits)
    contents = contents_for(data)
    if how == 2:
        return known.plain_file(data, [(f"data/{key}", content) for key, content in enumerate(contents)])
    return known.own_file(data, contents)


def judge(data: bytes) -> bool:
    """Read a file; return whether it was loaded.

    Raises:
        AssertionError: It was loaded otherwise than by torch, took too long or too much, or ended in another error.
    """
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", safeckpt.SafeckptWarning)
            try:
                got = safeckpt.load(io.BytesIO(data))
            except safeckpt.SafeckptError:
                return False
            except RuntimeError as error:
                if "device" not in str(error) and "data location" not in str(
                    error
                ):  # torch's own words for a missing one
                    raise
                return False
    except (Exception, RecursionError) as error:
        raise AssertionError(f"it ended in {type(error).__name__}: {error}") from error
    finally:
        seconds = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert seconds < MOST_SECONDS, f"it took {seconds:.1f} s"
        assert grown < MOST_BYTES, f"it took {grown} bytes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = torch.load(io.BytesIO(data), weights_only=True)
        except (RuntimeError, ValueError, TypeError, LookupError, OSError, pickle.UnpicklingError) as error:
            raise AssertionError(f"it was loaded, and torch refuses it: {error}") from error
    assert_same(got, want)
    return True


def by_hypothesis(examples: int, seed: int, outcome: Outcome) -> None:
    import hypothesis
    from hypothesis import strategies

    outcome.figures["loaded"] = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.binary(min_size=6, max_size=60))
    def look(given: bytes) -> None:
        outcome.tried += 1
        outcome.figures["loaded"] += judge(file_of(given))

    try:
        look()
    except AssertionError as error:
        outcome.undetected.append(f"hypothesis: {error} {getattr(error, '__notes__', '')}")


def by_atheris(runs: int, seed: int, outcome: Outcome) -> None:
    """Fuzz in a child, in a copy of the corpus: libFuzzer ends its process."""
    if importlib.util.find_spec("atheris") is None:
        outcome.figures["atheris"] = "not installed (pip install atheris)"
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CORPUS, folder, dirs_exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaign.fuzz", folder, f"-atheris_runs={runs}", f"-seed={seed % 2**31 or 1}",
             f"-max_len={MOST_INPUT}", f"-artifact_prefix={folder}/", "-timeout=300", "-rss_limit_mb=4096"],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip
        counted = re.findall(r"^#(\d+).* cov: (\d+)", done.stderr, re.MULTILINE)
        tried, reached = counted[-1] if counted else (0, 0)
        outcome.tried += int(tried)
        outcome.figures |= {"atheris": int(tried), "branches": int(reached)}
        if done.returncode:
            kept = [path.read_bytes().hex() for path in Path(folder).glob("crash-*")]
            outcome.undetected.append(f"atheris ended with {done.returncode}: {kept} {done.stdout[-600:]}")


def run(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("files changed at random, opcodes and digests too")
    for path in sorted(CORPUS.iterdir()):
        outcome.tried += 1
        try:
            judge(file_of(path.read_bytes()))
        except AssertionError as error:
            outcome.undetected.append(f"corpus/{path.name}: {error}")
    outcome.figures["corpus"] = outcome.tried
    by_hypothesis(10_000 if scale == "full" else 1500, seed, outcome)
    if scale == "full":
        by_atheris(50_000, seed, outcome)
    return outcome


def fuzz_one(given: bytes) -> None:
    """What atheris calls."""
    judge(file_of(given))


def main() -> None:
    """Run atheris over the reader; the arguments are those of libFuzzer."""
    import atheris

    with atheris.instrument_imports(include=["safeckpt.file"], enable_loader_override=False):
        for name in [name for name in sys.modules if name.startswith("safeckpt.file.")]:
            del sys.modules[name]
        importlib.reload(importlib.import_module("safeckpt.file"))

    torch.set_num_threads(1)
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
