"""The campaign of the reader can fail: with any one of its checks left out, something wrong is let in."""

import __future__

import inspect
import io
import resource
import textwrap
import warnings
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

import safeckpt
from safeckpt.file import pickle_budget, pickle_calls, pickle_scan
from safeckpt.file.reading import central_directory, checkpoint_file, loading
from safeckpt.run import catalog
from tests import faults
from tests.campaign import damage as damage_class
from tests.campaign.outcome import Outcome
from tests.file import test_hostile as hostile
from tests.file import test_pickle_scan as op


def change(monkeypatch, function, old, new):
    """Change the source of a function in place: every module that has imported it runs the other one."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has no longer one {old!r}"
    flags = __future__.annotations.compiler_flag
    namespace = dict(function.__globals__)
    exec(compile(source.replace(old, new), function.__qualname__, "exec", flags), namespace)
    monkeypatch.setattr(function, "__code__", namespace[function.__name__].__code__)


def ended(data):
    """Load hostile bytes in a child with little memory and time; return None when they are refused."""

    def read_it():
        resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
        used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
        warnings.simplefilter("ignore")
        try:
            hostile.load(data)
        except safeckpt.SafeckptError:
            return None
        except BaseException as error:
            return type(error).__name__
        return "loaded"

    child = faults.in_child(read_it)
    return f"signal {child.signal}" if child.signal else child.value


def own(name):
    body, _ = hostile.PICKLES[name]
    return hostile.own_file(hostile.pickled(body), hostile.CONTENTS.get(name, (bytes(16),)))


def zipped(*more, first=()):
    return hostile.zip_of([*first, *hostile.GOOD, *more])


def deflated():
    """A record of a megabyte that unpacks from a thousand bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr("archive/data.pkl", hostile.pickled(op.tensor(size=(1 << 18,), numel=1 << 18)))
        out.writestr("archive/data/0", bytes(1 << 20), zipfile.ZIP_DEFLATED)
        out.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def flagged():
    data = hostile.zip_of(hostile.GOOD, tweak=lambda info: setattr(info, "external_attr", 0))
    return hostile.patched(data, 38, 0x10)


def anything(*_args, **_options):
    return True


def nothing(*_args, **_options):
    return None


NO_LIMIT = 1 << 62
HOSTILE = {
    "accept compressed records": (
        deflated,
        (central_directory, "_is_stored", anything),
        (central_directory, "_is_whole", anything),
        (central_directory, "_end_of", lambda entry: entry.data_offset),
        (checkpoint_file, "check_records", nothing),
    ),
    "accept two records of one name": (
        lambda: zipped(first=[("archive/DATA.PKL", hostile.pickled(b"N"))]),
        (central_directory, "_folded", lambda name: name),
    ),
    "accept names that lead outside": (
        lambda: zipped(("archive/../../x", b"")),
        (central_directory, "_is_inside", anything),
    ),
    "accept the attribute of a folder": (flagged, (central_directory, "_DOS_ATTRIBUTES", 0)),
    "skip the local headers": (hostile.with_header_elsewhere, (loading, "check_local_headers", nothing)),
    "skip the depth": (
        lambda: own("deep key"),
        (pickle_scan, "MOST_DEPTH", NO_LIMIT),
        (pickle_budget, "MOST_HASH_STEPS", NO_LIMIT),
    ),
    "skip the cost of keys": (lambda: own("shared key"), (pickle_budget, "MOST_HASH_STEPS", NO_LIMIT)),
    "skip keys that collide": (lambda: own("colliding tuples"), (pickle_budget, "MOST_COLLISIONS", NO_LIMIT)),
    "skip what is copied": (lambda: own("text copied again"), (pickle_budget, "MOST_COPIED", NO_LIMIT)),
    "let bytearray take a number": (
        lambda: own("memory"),
        (pickle_calls, "CHECKS", {**pickle_calls.CHECKS, "builtins.bytearray": nothing}),
    ),
    "let a set take a tensor": (
        lambda: hostile.own_file(
            hostile.pickled(b"c__builtin__\nset\n(" + op.tensor(size=(1000,), stride=(0,)) + b"tR")
        ),
        (pickle_calls, "CONTAINERS", frozenset()),
    ),
    "skip the check of sparse indices": (
        lambda: own("bad sparse indices"),
        (loading, "_modes", lambda *_args, **_options: nullcontext()),
    ),
    "let slots set attributes": (
        lambda: hostile.own_file(
            hostile.pickled(
                op.tensor(function="_rebuild_tensor", tail=b"") + b"ccollections\nOrderedDict\n)R}}" + op.text("keys")
                + b"Ns\x86b\x86"
            ),
        ),
        (pickle_scan, "_is_attributes", anything),
    ),
}  # fmt: skip


LONG = ("skip the depth", "skip the cost of keys")  # end at a limit of four seconds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in HOSTILE]
)
def test_hostile_file_gets_in_where_its_check_is_left_out(name, monkeypatch):
    """With the check the file is refused; without it, it is loaded, or takes the process down, or all its memory."""
    make, *changes = HOSTILE[name]
    data = make()
    assert ended(data) is None
    for module, check, without in changes:
        monkeypatch.setattr(module, check, without)
    assert ended(data) is not None


def victims(tmp_path, outcome):
    chance = damage_class.random.Random(5)
    own_victim = damage_class.Victim(tmp_path / "small.pt", damage_class.small_tree(), outcome)
    torch_victim = damage_class.Victim(tmp_path / "torch.pt", damage_class.small_tree(), outcome, by_torch=True)
    for victim in (own_victim, torch_victim):
        for made in damage_class.random_bits(victim, 400, chance):
            victim.change(*made)


def load_unchecked(*args, load=loading.load_archive, checked, **options):
    """Load without a second look at the CRC-32 of what is read."""
    return load(*args, checked=False, **options)


DAMAGE = {
    "skip the digest": [(checkpoint_file.CheckpointFile, "_has_digest", anything)],
    "ignore the CRC-32s of a file by torch": [
        (checkpoint_file, "check_records", nothing),
        (loading, "load_archive", load_unchecked),
    ],
    "verify nothing before a load": [(checkpoint_file.CheckpointFile, "verify", nothing)],
}


@pytest.mark.parametrize(
    "name",
    [
        "skip the digest",
        *(pytest.param(one, marks=pytest.mark.slow) for one in (None, *DAMAGE) if one != "skip the digest"),
    ],
)
def test_damage_gets_in_where_its_check_is_left_out(name, monkeypatch, tmp_path):
    """A few hundred flipped bits are enough to see it."""
    outcome = Outcome("", figures={"harmless": 0})
    for check in DAMAGE.get(name, ()):
        monkeypatch.setattr(*check)
    victims(tmp_path, outcome)
    assert bool(outcome.undetected) == (name is not None)


@pytest.mark.parametrize("left_out", [False, True])
def test_renamed_checkpoint_gets_in_where_its_step_is_not_compared(left_out, monkeypatch, tmp_path):
    """A file under the name of another step is a good one by every byte of it."""
    outcome = Outcome("", figures={"harmless": 0})
    if left_out:
        change(monkeypatch, catalog._checkpoint_in, "if checkpoint.step != step:", "if False:")
    damage_class.by_manager(tmp_path / "run", 0, damage_class.random.Random(0), outcome)
    assert outcome.clean == (not left_out)
