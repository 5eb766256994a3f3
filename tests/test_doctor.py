"""`safeckpt doctor`: what holds in a place, what not, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from safeckpt.cli.commands import run
from safeckpt.store import disk, trials
from tests.remote.conftest import URL, store  # noqa: F401 - a fixture
from tests.remote.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def mounts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk is mounted everywhere: what there is on this machine is for one test alone."""
    table = tmp_path_factory.mktemp("mounts") / "mountinfo"
    table.write_text("1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(trials, "_MOUNTS", table)
    return table


def verdicts(capsys: pytest.CaptureFixture[str], place: object, expected: int) -> dict[str, str]:
    assert run(["doctor", str(place), "--json"]) == expected
    return {one["name"]: one["verdict"] for one in json.loads(capsys.readouterr().out)["trials"]}


def test_ordinary_directory_is_safe_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every trial is made, and none leaves a file."""
    found = verdicts(capsys, tmp_path, 0)
    assert {found[name] for name in ("fsync, reading back", "exclusive creation", "rename", "lock")} == {"holds"}
    assert found.keys() >= {"directory sync", "case", "clock", "free space"}
    assert not list(tmp_path.iterdir())
    assert run(["doctor", str(tmp_path)]) == 0
    assert "checkpoints are safe here" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("kind", "code", "verdict"),
    [("tmpfs", 1, "fails"), ("ramfs", 1, "fails"), ("overlay", 0, "weaker"), ("xfs", 0, "holds")],
)
def test_file_system_in_memory_is_not_safe(  # noqa: PLR0917 - fixtures
    kind: str,
    code: int,
    verdict: str,
    tmp_path: Path,
    mounts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its syncs succeed and are worth nothing; the last mount at the deepest place above a directory counts."""
    monkeypatch.setattr(trials, "_TRIALS", {})
    place = tmp_path / "with space"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    with mounts.open("a") as table:
        table.write(f"2 1 0:7 / {escaped} rw - nfs4 host:/ rw\n3 1 0:8 / {escaped} rw shared:2 - {kind} {kind} rw\n")
        table.write(f"4 1 0:9 / {escaped}2 rw - squashfs none ro\n")
    assert verdicts(capsys, place, code)["file system"] == verdict
    assert run(["doctor", str(place)]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert ("checkpoints are safe here" in text) is (code == 0)
    assert ("good to know: file system" in text) is (verdict == "weaker")


def test_mounts_of_this_machine_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux names a kind for every directory, of its shared memory one that is lost; other systems name none."""
    monkeypatch.undo()
    assert bool(trials._file_system_of(tmp_path)) is sys.platform.startswith("linux")
    if (memory := Path("/dev/shm")).is_dir():
        assert trials._judged(trials._file_system_of(memory) or "")[0] == "fails"
    monkeypatch.setattr(trials, "_MOUNTS", tmp_path / "none")
    assert trials._file_system_of(tmp_path) is None


def broken_write(file: object, data: memoryview) -> int:
    raise OSError(28, "No space left on device")


def create_anyway(path: Path) -> BinaryIO:
    return path.open("w+b", buffering=0)


def do_nothing(*_: Path) -> None:
    pass


FAULTS = {
    "write": (broken_write, "fsync, reading back"),
    "create": (create_anyway, "exclusive creation"),
    "replace": (do_nothing, "rename"),
}


@pytest.mark.parametrize("operation", FAULTS)
def test_what_does_not_hold_is_named(
    operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, overwrites what is there or does not rename: exit code 1, and the folder is gone."""
    fault, name = FAULTS[operation]
    monkeypatch.setattr(disk, operation, fault)
    assert verdicts(capsys, tmp_path, 1)[name] == "fails"
    assert not list(tmp_path.iterdir())


def test_lock_that_lets_everyone_in_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process is a real one."""
    monkeypatch.setattr(trials, "_OTHER_PROCESS", "")
    assert verdicts(capsys, tmp_path, 1)["lock"] == "fails"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be created, and that is said."""
    tmp_path.chmod(0o500)
    try:
        assert verdicts(capsys, tmp_path, 1)["write"] == "fails"
    finally:
        tmp_path.chmod(0o700)


def test_limit_of_file_size_is_told(tmp_path: Path) -> None:
    """In a process of its own, whose limit is lower than what is tried."""
    program = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from safeckpt.cli.commands import run; sys.exit(run(['doctor', sys.argv[1], '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {one["name"]: one["verdict"] for one in json.loads(done.stdout)["trials"]}
    assert found["file size"] == "weaker"
    assert found["fsync, reading back"] == "fails"
    assert not list(tmp_path.iterdir())


def test_store_is_tried_as_well(
    store: MemoryStore,  # noqa: F811 - the fixture
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its conditional writes are tried, and nothing stays."""
    from safeckpt.cli import diagnosis

    monkeypatch.setattr(diagnosis, "open_client", lambda mirror: store.client(store.hook, mirror.url))
    found = verdicts(capsys, URL, 0)
    assert set(found.values()) == {"holds"}
    assert not store.client(store.hook, URL).listing()


def test_store_that_ignores_conditions_fails(
    store: MemoryStore,  # noqa: F811 - the fixture
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An object that is there was created again: two writers could not be told apart."""
    from safeckpt.cli import diagnosis

    client = store.client(store.hook, URL)

    def overwrite(key: str, data: bytes) -> bool:
        client.put(key, data)
        return True

    monkeypatch.setattr(client, "create", overwrite)
    monkeypatch.setattr(diagnosis, "open_client", lambda _: client)
    assert verdicts(capsys, URL, 1)["conditional writes"] == "fails"
    assert not client.listing()
