"""The campaign of the reader can fail: with any one of its checks left out, something wrong is let in."""

import __future__

import inspect
import io
import resource
import textwrap
import warnings
import zipfile
from pathlib import Path

import pytest

import safeckpt
from safeckpt.file import pickle_calls, pickle_scan
from safeckpt.file.reading import central_directory, checkpoint_file, damage, loading
from safeckpt.run import catalog
from tests import faults
from tests.campaign import damage as damage_class
from tests.campaign.outcome import Outcome
from tests.file import test_hostile as hostile
from tests.file import test_pickle_scan as op

CHANGED = {}  # source of what was changed before, by its code


def change(monkeypatch, function, old, new):
    """Change the source of a function in place: every module that has imported it runs the other one."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    source = CHANGED.get(function.__code__) or textwrap.dedent(inspect.getsource(function))
    source_after = source.replace(old, new)
    assert source.count(old) == 1, f"{function.__qualname__} has no longer one {old!r}"
    flags = __future__.annotations.compiler_flag
    namespace = dict(function.__globals__)
    exec(compile(source_after, function.__qualname__, "exec", flags), namespace)
    code = inspect.unwrap(namespace[function.__name__]).__code__
    CHANGED[code] = source_after
    monkeypatch.setattr(function, "__code__", code)


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


def packed(name):
    return hostile.own_file(hostile.pickled(hostile.PACKED[name]), packs=b"[0]\n")


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


_SCANNER = pickle_scan._Scanner
HOSTILE = {
    "accept compressed records": (
        deflated,
        (central_directory._entries, "if method or flags", "if flags"),
        (central_directory._entries, "if size != packed", "if False"),
        (central_directory._check_foreign_layout, "or method or flags & ~0x808", ""),
        (central_directory._check_foreign_layout, "entry.data_offset + entry.size", "entry.data_offset"),
        (damage.check_records, "[entry for entry in directory.entries if entry.size]", "[]"),
    ),
    "accept two records of one name": (
        lambda: zipped(first=[("archive/DATA.PKL", hostile.pickled(b"N"))]),
        (central_directory._check_names, "if name.lower() in seen:", "if False:"),
    ),
    "accept names that lead outside": (
        lambda: zipped(("archive/../../x", b"")),
        (central_directory._check_names, '{".", ".."} & set(parts)', "False"),
    ),
    "accept the attribute of a folder": (
        flagged,
        (central_directory._entries, "if attributes & _DOS_ATTRIBUTES or disk:", "if False:"),
    ),
    "skip the local headers": (
        hostile.with_header_elsewhere,
        (central_directory.check_local_headers, "if header != archive.local_header(entry):", "if False:"),
    ),
    "skip what a shared record pays for": (
        lambda: packed("broadcast"),
        (loading._check_packed, "if claim.taken_bytes > claim.nbytes:", "if False:"),
    ),
    "skip the depth": (
        lambda: own("deep key"),
        (pickle_scan._deeper, "if depth >= MOST_DEPTH:", "if False:"),
        (_SCANNER._count_hashed, "if self._hash_steps", "if False and self._hash_steps"),
    ),
    "skip the cost of keys": (
        lambda: own("shared key"),
        (_SCANNER._count_hashed, "if self._hash_steps", "if False and self._hash_steps"),
    ),
    "skip keys that collide": (
        lambda: own("colliding tuples"),
        (_SCANNER._hash, "if len(others) >= _MOST_COLLISIONS:", "if False:"),
    ),
    "skip what is copied": (
        lambda: own("text copied again"),
        (_SCANNER._count_copied, "if self._copied > _MOST_COPIED + len(self._data):", "if False:"),
    ),
    "let bytearray take a number": (
        lambda: own("memory"),
        (pickle_calls._check_bytearray, "if not args:", "if True:"),
    ),
    "let a set take a tensor": (
        lambda: hostile.own_file(
            hostile.pickled(b"c__builtin__\nset\n(" + op.tensor(size=(1000,), stride=(0,)) + b"tR")
        ),
        (pickle_calls.result_of, "if args and name in _CONTAINERS and", "if False and"),
    ),
    "skip the check of sparse indices": (
        lambda: own("bad sparse indices"),
        (loading._modes, 'if any("sparse" in name for name in scan.globals):', "if False:"),
    ),
    "let slots set attributes": (
        lambda: hostile.own_file(
            hostile.pickled(
                op.tensor(function="_rebuild_tensor", tail=b"") + b"ccollections\nOrderedDict\n)R}}" + op.text("keys")
                + b"Ns\x86b\x86"
            ),
            packs=b"[0]\n",
        ),
        (_SCANNER._build, 'if target.kind == "collections.OrderedDict" and', "if False and"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_gets_in_where_its_check_is_left_out(name, monkeypatch):
    """With the check the file is refused; without it, it is loaded, or takes the process down, or all its memory."""
    make, *changes = HOSTILE[name]
    data = make()
    assert ended(data) is None
    for function, old, new in changes:
        change(monkeypatch, function, old, new)
    assert ended(data) is not None


def victims(tmp_path, outcome):
    chance = damage_class.random.Random(5)
    own_victim = damage_class.Victim(tmp_path / "small.pt", damage_class.small_tree(), outcome)
    torch_victim = damage_class.Victim(tmp_path / "torch.pt", damage_class.small_tree(), outcome, by_torch=True)
    for victim in (own_victim, torch_victim):
        for made in damage_class.random_bits(victim, 400, chance):
            victim.change(*made)


DAMAGE = {
    "skip the digest": [(checkpoint_file.CheckpointFile.verify, "!= self.trailer.root:", "is None:")],
    "ignore the CRC-32s of a file by torch": [(damage.check_records, "if crc != entry.crc", "if False")],
    "verify nothing before a load": [
        (checkpoint_file.CheckpointFile.verify, "directory = self.check_structure()", "return")
    ],
}


@pytest.mark.parametrize("name", [None, *DAMAGE])
def test_damage_gets_in_where_its_check_is_left_out(name, monkeypatch, tmp_path):
    """A few hundred flipped bits are enough to see it."""
    outcome = Outcome("", figures={"harmless": 0})
    for function, old, new in DAMAGE.get(name, ()):
        change(monkeypatch, function, old, new)
    victims(tmp_path, outcome)
    assert bool(outcome.undetected) == (name is not None)


@pytest.mark.parametrize("left_out", [False, True])
def test_renamed_checkpoint_gets_in_where_its_step_is_not_compared(left_out, monkeypatch, tmp_path):
    """A file under the name of another step is a good one by every byte of it."""
    outcome = Outcome("", figures={"harmless": 0})
    if left_out:
        change(monkeypatch, catalog._described, "if checkpoint.step != step:", "if False:")
    damage_class.by_manager(tmp_path / "run", 0, damage_class.random.Random(0), outcome)
    assert outcome.clean == (not left_out)
