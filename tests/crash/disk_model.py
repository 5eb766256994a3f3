"""A disk that loses power: what may be on it after any beginning of a recorded list of the store's operations.

POSIX promises little. The content of a file is safe when the file was synced, a name when its directory was. Until
then, independently of each other:

- each write of a file may have reached the disk, or not, or a part of its pages, and the length before the data, which
  then reads as zeros;
- each name may still lead to what it led to at any moment since the directory was synced. A rename gives the new name
  before it takes the old one away, so that a crash can leave both, never none.

Nothing is forgotten in the order of time: a name made later may survive one made earlier. The method is that of
LevelDB's FaultInjectionTestEnv and of ALICE (Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import Operation

PAGE_BYTES = 4096
_EVERY_NAME = 1 << 20

Content = Mapping[str, bytes]  # path below the root to bytes


@dataclass(eq=False)
class _File:
    durable: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def content(self) -> bytes:
        return _written(self.durable, self.writes)


_FOLDER = _File()


@dataclass
class _Change:
    """What a name leads to from here on, until its directory is synced perhaps not on the disk.

    Attributes:
        after: The change of another name that is on the disk whenever this one is.
    """

    name: str
    file: _File | None
    after: _Change | None = None


class Disk:
    """The disk below one folder.

    Args:
        root: The folder in which the operations were recorded; others are left out.
        before: What was there and safe when the recording began; None when not even the folder was there.
    """

    def __init__(self, root: Path, before: Content | None) -> None:
        self._root = root
        self._durable: dict[str, _File] = {}
        if before is not None:
            self._durable = {".": _FOLDER, **{name: _File(data) for name, data in before.items()}}
        self._now = dict(self._durable)
        self._open: dict[str, _File] = {}
        self._pending: list[_Change] = []

    def apply(self, operation: Operation) -> None:
        """Do what an operation did, which succeeded when it was recorded."""
        path = Path(operation.path)
        if operation.kind == "sync_directory":
            self._sync_directory(path)
            return
        if not path.is_relative_to(self._root):
            return
        name = str(path.relative_to(self._root))
        match operation.kind:
            case "create":
                self._open[name] = _File()
                self._change(name, self._open[name])
            case "make_directory":
                self._change(name, _FOLDER)
            case "open_append" | "append":
                if name not in self._now:
                    self._change(name, _File())
                self._open[name] = self._now[name]
                if operation.data:
                    file = self._open[name]
                    file.writes.append((len(file.content), operation.data))
            case "write":
                assert operation.offset is not None
                assert operation.data is not None
                self._open[name].writes.append((operation.offset, operation.data))
            case "sync":
                file = self._open[name] if name in self._open else self._now[name]
                file.durable, file.writes = file.content, []
            case "replace":
                assert operation.target is not None
                target = str(Path(operation.target).relative_to(self._root))
                made = self._change(target, self._now[name])
                self._change(name, None, after=made)
            case "unlink" | "unlink_unclaimed":
                self._change(name, None)
            case other:
                assert other in {"claim", "close", "listing", "open_directory"}, other

    def _change(self, name: str, file: _File | None, after: _Change | None = None) -> _Change:
        change = _Change(name, file, after)
        self._pending.append(change)
        if file is None:
            self._now.pop(name, None)
        else:
            self._now[name] = file
        return change

    def _sync_directory(self, path: Path) -> None:
        for change in self._pending:
            if (self._root / change.name).parent == path or (change.name == "." and self._root.parent == path):
                _lead(self._durable, change)
        self._pending = [
            change
            for change in self._pending
            if not ((self._root / change.name).parent == path or (change.name == "." and self._root.parent == path))
        ]

    def contents(self) -> Content | None:
        """Return what a running system sees."""
        return _files(self._now, {file: file.content for file in self._now.values()})

    def crashes(self, choose: random.Random, most: int) -> Iterator[Content | None]:
        """Yield what a crash now may leave, None for no folder at all: the plainest ones, then `most` random ones."""
        for done in self._name_choices(choose, most):
            names = dict(self._durable)
            for change in done:
                _lead(names, change)
            unsafe = [file for file in dict.fromkeys(names.values()) if file.writes]
            shapes = [_everything, _nothing, _zeros]
            shapes += [_torn, _torn_at_a_border, _zero_tail, _pages, _writes] * (1 + most // 16)
            for shape in shapes if unsafe else [_everything]:
                # Each file for itself: the history may be whole where the checkpoint is torn.
                yield _files(
                    names,
                    {
                        file: shape(file, choose) if choose.random() < 0.8 else _everything(file, choose)
                        for file in names.values()
                    },
                )

    def every_crash(self) -> Iterator[Content | None]:
        """Yield what a crash now may leave: each pending name there or not, each unsafe file whole, lost, zeros or cut.

        All of them, in one order: for a look at the moments around one operation, after which little is pending.
        """
        choose = random.Random(0)  # of the cut alone
        for done in self._name_choices(choose, _EVERY_NAME):
            names = dict(self._durable)
            for change in done:
                _lead(names, change)
            files = list(dict.fromkeys(names.values()))
            shapes = [(_everything, _nothing, _zeros, _torn) if file.writes else (_everything,) for file in files]
            for chosen in itertools.product(*shapes):
                yield _files(names, {file: shape(file, choose) for file, shape in zip(files, chosen, strict=True)})

    def _name_choices(self, choose: random.Random, most: int) -> Iterator[list[_Change]]:
        """Yield which pending changes are on the disk: all combinations when they are few."""
        by_name: dict[str, list[_Change]] = {}
        for change in self._pending:
            by_name.setdefault(change.name, []).append(change)
        counts = [range(len(changes) + 1) for changes in by_name.values()]
        total = 1
        for count in counts:
            total *= len(count)
        combinations: Iterator[tuple[int, ...]] = itertools.product(*counts)
        if total > most:
            some = [tuple(choose.choice(count) for count in counts) for _ in range(most)]
            one_missing = [tuple(len(c) - 1 - (i == j) for i, c in enumerate(counts)) for j in range(len(counts))]
            none, every = tuple(0 for _ in counts), tuple(len(count) - 1 for count in counts)
            combinations = iter([none, every, *one_missing, *some])
        for combination in combinations:
            # The last change of a name is the one that counts.
            done = [
                changes[number - 1] for changes, number in zip(by_name.values(), combination, strict=True) if number
            ]
            reached = {
                id(change)
                for changes, number in zip(by_name.values(), combination, strict=True)
                for change in changes[:number]
            }
            if all(change.after is None or id(change.after) in reached for change in done):
                yield done


def _lead(names: dict[str, _File], change: _Change) -> None:
    if change.file is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.file


def _files(names: Mapping[str, _File], contents: Mapping[_File, bytes]) -> Content | None:
    if "." not in names:
        return None
    return {name: contents[file] for name, file in names.items() if file is not _FOLDER}


def _written(content: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(content)
    for offset, piece in writes:
        data.extend(bytes(max(0, offset + len(piece) - len(data))))
        data[offset : offset + len(piece)] = piece
    return bytes(data)


# -- what may be in a file that was not synced -----------------------------------------------------------------------


def _everything(file: _File, choose: random.Random) -> bytes:
    return file.content


def _nothing(file: _File, choose: random.Random) -> bytes:
    return file.durable


def _zeros(file: _File, choose: random.Random) -> bytes:
    """The length and none of the data: ext4 with delayed allocation, XFS."""
    return file.durable + bytes(max(0, len(file.content) - len(file.durable)))


def _cut(file: _File, choose: random.Random, *, border: bool) -> int:
    low, high = len(file.durable), len(file.content)
    borders = {low, low + 1, high - 1, *(end for at, data in file.writes for end in (at, at + len(data)))}
    borders |= set(range(0, high, PAGE_BYTES))
    places = sorted(place for place in borders if low <= place <= high) if border else []
    return choose.choice(places) if places else choose.randint(low, max(low, high))


def _torn(file: _File, choose: random.Random) -> bytes:
    return file.content[: _cut(file, choose, border=False)]


def _torn_at_a_border(file: _File, choose: random.Random) -> bytes:
    return file.content[: _cut(file, choose, border=True)]


def _zero_tail(file: _File, choose: random.Random) -> bytes:
    kept = file.content[: _cut(file, choose, border=choose.random() < 0.5)]
    return kept + bytes(max(0, len(file.content) - len(kept)))


def _pages(file: _File, choose: random.Random) -> bytes:
    """Some pages of the new data: the kernel writes them back in any order."""
    old, new = _zeros(file, choose), file.content
    picked = [new if choose.random() < 0.5 else old for _ in range(0, len(new), PAGE_BYTES)]
    return b"".join(data[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at, data in enumerate(picked))


def _writes(file: _File, choose: random.Random) -> bytes:
    return _written(file.durable, [write for write in file.writes if choose.random() < 0.5])
