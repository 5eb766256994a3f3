"""Damage: whatever happens to the bytes or to the name of a file is found, or changes not one loaded bit."""

from __future__ import annotations

import io
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import safeckpt
from safeckpt.errors import DamagedCheckpointError, LoadError, NoGoodCheckpointError, SkippedCheckpointWarning
from safeckpt.file import encode, open_file
from safeckpt.file.trailer import TRAILER_BYTES
from safeckpt.store.names import step_name
from tests.campaign.outcome import Outcome, Scale
from tests.comparing import assert_same
from tests.file.states import trained, written

PAGE = 4096
SHARDED = Path(__file__).parents[1] / "golden" / "format-1-torch-2.13.0-fsdp" / "step-00000003"
Change = tuple[str, int, bytes]  # what it is called, where, and the bytes that are there afterwards


class Victim:
    """One file that is damaged and repaired again and again, in place.

    Attributes:
        data: Its bytes.
        regions: Name and range of every part of it.
    """

    def __init__(self, path: Path, tree: Any, outcome: Outcome, *, by_torch: bool = False) -> None:
        self.path = path
        self.by_torch = by_torch  # such a file has no digest, and a load finds what its CRC-32s do not cover
        self.data = saved_by_torch(tree) if by_torch else written(encode(tree), header={"step": 7})
        path.write_bytes(self.data)
        self._outcome = outcome
        self._want = safeckpt.load(path)
        assert_same(self._want, tree)
        self.regions = {"file": [(0, len(self.data))]} if by_torch else regions_of(self.data)

    def judge(self, what: str, file: Any = None) -> None:
        """Load the file as it is now, and note what got through: loaded bits that are not those that were saved."""
        self._outcome.tried += 1
        file = self.path if file is None else file
        # A large file is read once for each fault: verified, or loaded, in turn.
        once = len(self.data) > 1 << 20
        verified = None
        if not once or self._outcome.tried % 2:
            try:
                safeckpt.verify(file)
            except LoadError:
                verified = False
                if once:
                    return
            else:
                verified = True
        try:
            got = safeckpt.load(file)
        except LoadError:
            if verified and not self.by_torch:
                self._outcome.undetected.append(f"{self.path.name}: {what}: verify() said that it is whole")
            return
        if verified is False:
            self._outcome.undetected.append(f"{self.path.name}: {what}: load() did not find what verify() found")
            return
        try:
            assert_same(got, self._want)
        except AssertionError:
            self._outcome.undetected.append(f"{self.path.name}: {what}: loaded other values")
        else:
            self._outcome.figures["harmless"] += 1

    def change(self, what: str, at: int, new: bytes) -> None:
        """Overwrite a range, judge, and put back what was there."""
        old = self.data[at : at + len(new)]
        if old == new:
            return
        with self.path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), new, at)
            self.judge(what)
            os.pwrite(file.fileno(), old, at)

    def whole(self, what: str, data: bytes) -> None:
        """Judge other bytes in the file's place."""
        self.judge(what, io.BytesIO(data))


def saved_by_torch(tree: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def regions_of(data: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges of a file by kind: everything in it belongs to one."""
    with open_file(io.BytesIO(data)) as file:
        entries = file.archive().entries
    found: dict[str, list[tuple[int, int]]] = {}

    def add(kind: str, low: int, high: int) -> None:
        if low < high:
            found.setdefault(kind, []).append((low, high))

    end = len(data) - TRAILER_BYTES
    directory = data.rindex(b"PK\x01\x02", 0, end)
    for entry in entries:
        name = entry.header_offset + 30
        add("local header", entry.header_offset, name)
        add("name", name, name + len(entry.name))
        add("padding", name + len(entry.name), entry.data_offset)
        add("pickle" if entry.name.endswith(b".pkl") else "data", entry.data_offset, entry.data_offset + entry.size)
        directory = min(directory, data.index(b"PK\x01\x02", entry.data_offset + entry.size))
    ends = [entry.header_offset for entry in entries[1:]] + [directory]
    for entry, following in zip(entries, ends, strict=True):
        add("descriptor", entry.data_offset + entry.size, following)
    end_record = data.rindex(b"PK\x06\x06", 0, end)
    add("central directory", directory, end_record)
    add("end record", end_record, end)
    add("trailer", end, len(data))
    assert sum(high - low for ranges in found.values() for low, high in ranges) == len(data)
    return found


def random_bits(victim: Victim, count: int, chance: random.Random) -> Iterator[Change]:
    """Give single-bit flips, as many in each kind of region."""
    kinds = list(victim.regions)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        low, high = chance.choice(victim.regions[kind])
        at = chance.randrange(low, high)
        bit = chance.randrange(8)
        yield f"bit {bit} of byte {at} ({kind})", at, bytes([victim.data[at] ^ 1 << bit])


def every_bit(victim: Victim) -> Iterator[Change]:
    for at, byte in enumerate(victim.data):
        for bit in range(8):
            yield f"bit {bit} of byte {at}", at, bytes([byte ^ 1 << bit])


def blocks(victim: Victim, most: int, chance: random.Random) -> Iterator[Change]:
    """Give pages that were never written, were written twice, or hold what belongs to another place."""
    data = victim.data
    starts = list(range(0, len(data), PAGE))
    if len(starts) > most:
        starts = [starts[0], starts[-1], *chance.sample(starts, most)]
    for at in starts:
        length = len(data[at : at + PAGE])
        for filler in (b"\0", b"\xff"):
            yield f"page at {at} is all {filler!r}", at, filler * length
        other = chance.randrange(0, len(data) - length + 1)
        yield f"page at {at} is that from {other}", at, data[other : other + length]


def edges(victim: Victim, every: int) -> list[int]:
    """Return offsets at which a file can be cut: around every border of a region, and evenly in between."""
    size = len(victim.data)
    near = {
        border + more
        for ranges in victim.regions.values()
        for low, high in ranges[:40] + ranges[-40:]
        for border in (low, high)
        for more in (-1, 0, 1)
    }
    return sorted(at for at in near | set(range(0, size, every)) if 0 <= at < size)


def moved_bytes(victim: Victim, step: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Give whole files with bytes added, left out, or in another order."""
    data = victim.data
    for count in (1, 2, 22, 127, 128, 129, PAGE, 65_535, 65_536, 100_000):
        for filler in (b"\0", b"x"):
            yield f"{count} times {filler!r} appended", data + filler * count
            yield f"{count} times {filler!r} before the start", filler * count + data
    yield "appended to itself", data + data
    yield "its trailer twice", data + data[-TRAILER_BYTES:]
    for at in range(0, len(data) - PAGE, step):
        yield f"a page left out at {at}", data[:at] + data[at + PAGE :]
        other = chance.randrange(0, len(data) - PAGE)
        low, high = sorted((at, other))
        if low + PAGE <= high and data[low : low + PAGE] != data[high : high + PAGE]:
            swapped = data[:low] + data[high : high + PAGE] + data[low + PAGE : high] + data[low : low + PAGE]
            yield f"pages at {low} and {high} swapped", swapped + data[high + PAGE :]


def small_tree() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def large_tree() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"weight": torch.randn(1_100_000), "bias": torch.randn(100), "step": 7}  # over the border of a chunk


def packed_tree() -> dict[str, Any]:
    torch.manual_seed(2)
    return {f"p{index}": torch.randn(1 + index % 700) for index in range(1500)} | {"whole": torch.randn(9000)}


def run(scale: Scale, seed: int) -> Outcome:
    full = scale == "full"
    chance = random.Random(seed)
    outcome = Outcome("bytes of a file flipped, cut, zeroed, swapped, added; files renamed", figures={"harmless": 0})
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        small = Victim(Path(folder) / "small.pt", small_tree(), outcome)
        large = Victim(Path(folder) / "large.pt", large_tree(), outcome)
        packed = Victim(Path(folder) / "packed.pt", packed_tree(), outcome)
        torchs = Victim(Path(folder) / "torch.pt", small_tree(), outcome, by_torch=True)
        flips = {small: 4_000, large: 500, packed: 700, torchs: 2_000}
        for victim, count in flips.items():
            bits = every_bit(victim) if full and victim in (small, torchs) else random_bits(victim, count, chance)
            if full and victim in (large, packed):
                bits = random_bits(victim, 10_000, chance)
            for change in bits:
                victim.change(*change)
            for change in blocks(victim, 400 if full else 20, chance):
                victim.change(*change)
            cuts = (
                1 if victim is small and full else 7 if victim is small else len(victim.data) // (500 if full else 20)
            )
            for length in edges(victim, cuts):
                victim.whole(f"cut to {length} bytes", victim.data[:length])
            for what, data in moved_bytes(victim, max(64, len(victim.data) // (200 if full else 20)), chance):
                victim.whole(what, data)
            for other in flips:
                for at in range(PAGE, len(victim.data), max(PAGE, len(victim.data) // 50)):
                    if other is not victim:
                        victim.whole(f"goes on as {other.path.name} at {at}", victim.data[:at] + other.data[at:])
            victim.path.write_bytes(victim.data)
            tried = outcome.tried
            victim.judge("nothing at all")
            outcome.tried = tried
            outcome.figures["harmless"] -= 1  # the file as it was: it loads, and is no fault
        by_manager(Path(folder) / "run", 1500 if full else 100, chance, outcome)
        by_directory(Path(folder) / "sharded", scale, chance, outcome)
    return outcome


def by_directory(folder: Path, scale: Scale, chance: random.Random, outcome: Outcome) -> None:
    """Damage each file of a sharded checkpoint: verify and load refuse the whole of it, whichever file it is."""
    shutil.copytree(SHARDED, folder)
    want = safeckpt.load(folder)
    names = sorted(path.name for path in folder.iterdir())
    data = {name: (folder / name).read_bytes() for name in names}

    def judge(what: str) -> None:
        outcome.tried += 1
        read = (safeckpt.verify, safeckpt.load)[outcome.tried % 2]
        try:
            got = read(folder)
        except LoadError:
            return
        try:
            assert_same(got if read is safeckpt.load else safeckpt.load(folder), want)
        except (AssertionError, LoadError):
            outcome.undetected.append(f"sharded: {what}: passed for good")
        else:
            outcome.figures["harmless"] += 1

    for name, content in data.items():
        path = folder / name
        for at in (
            range(chance.randrange(3), len(content), 3) if scale == "full" else chance.sample(range(len(content)), 12)
        ):
            changed = bytearray(content)
            changed[at] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            judge(f"byte {at} of {name}")
        for length in range(0, len(content), len(content) // (500 if scale == "full" else 10)):
            path.write_bytes(content[:length])
            judge(f"{name} cut to {length} bytes")
        for other in names:
            if data[other] != content:
                path.write_bytes(data[other])
                judge(f"{other} in the place of {name}")
        for extra in (b"\0", b"x" * PAGE, content):
            path.write_bytes(content + extra)
            judge(f"{name} with {len(extra)} bytes more")
        path.unlink()
        judge(f"{name} missing")
        path.write_bytes(content)
    (folder / "__7_0.distcp").write_bytes(data[names[1]])  # nobody's: nothing refers to it
    assert_same(safeckpt.load(folder), want)


def by_manager(folder: Path, count: int, chance: random.Random, outcome: Outcome) -> None:
    """Damage the newest checkpoint of a run: the one before it is restored, bit for bit, and never anything else."""
    model = torch.nn.Linear(6, 5).requires_grad_(False)  # trained by nothing, which a manager would warn about
    saved = {}
    with safeckpt.CheckpointManager(folder, {"model": model}) as manager:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.normal_()
            manager.save(step)
            saved[step] = model.weight.detach().clone()
    paths = {step: folder / step_name(step) for step in saved}
    data = {step: path.read_bytes() for step, path in paths.items()}
    restored = _Restorer(folder, model, saved, outcome)

    regions = regions_of(data[2])
    for number in range(count):
        kind = list(regions)[number % len(regions)]
        low, high = chance.choice(regions[kind])
        at = chance.randrange(low, high)
        changed = bytearray(data[2])
        if number % 3 == 0:
            del changed[at:]
        elif number % 3 == 1:
            changed[at] ^= 1 << chance.randrange(8)
        else:
            changed[at : at + 512] = bytes(len(changed[at : at + 512]))
        if bytes(changed) == data[2]:
            continue
        paths[2].write_bytes(changed)
        restored.expect(f"newest file changed at {at} ({kind})", {1})
    paths[2].write_bytes(data[2])
    restored.expect("nothing at all", {2})
    outcome.tried -= 1

    def swapped() -> None:
        paths[1].write_bytes(data[2])
        paths[2].write_bytes(data[1])

    def renamed() -> None:
        shutil.copy(paths[1], folder / step_name(9))

    def both() -> None:
        for path in paths.values():
            path.write_bytes(path.read_bytes()[:-1])

    def names() -> None:
        for name in ("step-9.pt", "step-000000009.pt", "step-00000009.pt.bak", "Step-00000009.pt", "step-0000000٩.pt"):
            (folder / name).write_bytes(data[1])
        (folder / "step-00000009.pt").mkdir()

    for what, make, good in (
        ("the two files swapped", swapped, set()),
        ("the older file under a newer name", renamed, {2}),
        ("both files cut", both, set()),
        ("near misses of a name", names, {2}),
    ):
        _emptied(folder)
        for step, path in paths.items():
            path.write_bytes(data[step])
        make()
        restored.expect(what, good)


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
        elif path.suffix != ".jsonl":
            path.unlink()


class _Restorer:
    def __init__(self, folder: Path, model: torch.nn.Linear, saved: dict[int, torch.Tensor], outcome: Outcome) -> None:
        self._folder = folder
        self._model = model
        self._saved = saved
        self._outcome = outcome

    def expect(self, what: str, good: set[int]) -> None:
        """Restore in every way there is: a step in ``good`` with its bits, an error where there is none."""
        self._outcome.tried += 1
        newest = max(good, default=None)
        if self._step(lambda m: m.restore(), what) != newest:
            self._outcome.lost.append(f"{what}: restore() did not come back with step {newest}")
        for step in (2, 9):
            got = self._step(lambda m, step=step: m.restore(step=step), what)
            if got not in ({step} & good or {None}):
                self._outcome.undetected.append(f"{what}: restore(step={step}) came back with {got}")

    def _step(self, restore: Callable[[safeckpt.CheckpointManager], Any], what: str) -> int | None:
        with torch.no_grad():
            self._model.weight.zero_()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedCheckpointWarning)
                with safeckpt.CheckpointManager(self._folder, {"model": self._model}) as manager:
                    checkpoint = restore(manager)
        except (DamagedCheckpointError, NoGoodCheckpointError, safeckpt.CheckpointNotFoundError):
            if self._model.weight.any():
                self._outcome.undetected.append(f"{what}: an error, and the model was changed")
            return None
        if checkpoint is None or not torch.equal(self._model.weight, self._saved[checkpoint.step]):
            self._outcome.undetected.append(f"{what}: {checkpoint} holds the weights of another step")
        return None if checkpoint is None else int(checkpoint.step)
