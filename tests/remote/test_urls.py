"""The command line, `load`, `latest` and `verify` with URLs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.cli import main
from tests.manager.helpers import steps_in
from tests.remote.conftest import URL
from tests.remote.memory_store import MemoryStore
from tests.remote.test_mirror import listed, save_all
from tests.training import Marked


@pytest.fixture
def saved(tmp_path: Path, store: MemoryStore) -> MemoryStore:
    """A store with the steps 1 to 3 of a run, and no directory with them."""
    pytest.importorskip("click")
    save_all(tmp_path / "a", 1, 2, 3)
    return store


def spoil(store: MemoryStore, step: int) -> None:
    key = next(key for key in listed(store) if f"{step:08d}" in key)
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    store.objects[key] = bytes(data)


def url_of(step: int) -> str:
    return f"{URL}/epoch-00000001/step-{step:08d}.pt"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def test_checkpoint_is_loaded_and_verified_by_its_url(saved: MemoryStore) -> None:
    """The same object as from the file, mapped or not."""
    for mmap in (False, True):
        state = safeckpt.load(url_of(2), mmap=mmap)
        assert torch.equal(state["model"]["value"], torch.full((3,), 2.0))
    report = safeckpt.verify(url_of(2))
    assert (report.path, report.self_proving) == (url_of(2), True)
    spoil(saved, 2)
    for read in (safeckpt.load, safeckpt.verify):
        with pytest.raises(safeckpt.DamagedCheckpointError, match=url_of(2)):
            read(url_of(2))
    with pytest.raises(FileNotFoundError):
        safeckpt.load(url_of(9))


def test_file_of_plain_torch_is_loaded_by_its_url(saved: MemoryStore, tmp_path: Path) -> None:
    """Any object, also one outside of a run."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    saved.objects["model.pt"] = (tmp_path / "model.pt").read_bytes()
    assert torch.equal(safeckpt.load(f"{URL}/model.pt")["weight"], torch.ones(2))


def test_latest_of_a_url_is_the_newest_good_one(saved: MemoryStore) -> None:
    """Its path is a URL that `load` takes; a damaged one is passed over with its URL."""
    newest = safeckpt.latest(URL)
    assert newest is not None
    assert (newest.step, str(newest.path)) == (3, url_of(3))
    assert safeckpt.load(newest.path)["counters"] == {"step": 3}
    spoil(saved, 3)
    with pytest.warns(safeckpt.SkippedCheckpointWarning, match=f"^{url_of(3)} was passed over"):
        older = safeckpt.latest(URL)
    assert older is not None
    assert older.step == 2


def test_listing_reads_ends_only(tmp_path: Path, store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` shows what counts, after the cheap check, and asks for little."""
    run = Marked()
    run.weight.register_buffer("noise", torch.zeros(1 << 20))
    save_all(tmp_path / "a", 1, 2, run=run)
    store.read_bytes = 0
    rows = answer(capsys, "list", URL)["checkpoints"]
    assert [(row["step"], row["good"], row["path"]) for row in rows] == [(n, None, url_of(n)) for n in (1, 2)]
    assert sum(row["size_bytes"] for row in rows) > 8 << 20
    assert store.read_bytes < 1 << 19


def test_latest_best_and_log_of_a_url(saved: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands for directories take the URL of a mirror."""
    assert answer(capsys, "latest", URL)["path"] == url_of(3)
    assert answer(capsys, "best", URL, "loss:max")["path"] == url_of(1)
    kinds = {event["kind"] for event in answer(capsys, "log", URL)}
    assert {"saved", "mirrored"} <= kinds


def test_plot_and_selections_of_a_url(saved: MemoryStore, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The history of the copy is drawn, and the checkpoints there are chosen as those of a directory."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    (run,) = answer(capsys, "plot", URL, "-o", str(picture))["runs"]
    assert (run["directory"], run["saved"], run["last_step"]) == (URL, 3, 3)
    assert picture.exists()
    found = answer(capsys, "list", URL, "--where", "step>1", "--sort", "step:max")
    assert [one["step"] for one in found["checkpoints"]] == [3, 2]
    assert {one["directory"] for one in found["checkpoints"]} == {URL}


def test_show_diff_and_extract_of_a_url(
    saved: MemoryStore, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one file takes, a URL of one is as good for; of its local copy nothing stays."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    shown = answer(capsys, "show", url_of(2))
    assert (shown["path"], shown["step"]) == (url_of(2), 2)
    assert answer(capsys, "diff", url_of(2), url_of(2))["equal"]
    assert not answer(capsys, "diff", url_of(2), url_of(3), code=1)["equal"]
    target = tmp_path / "model.pt"
    assert answer(capsys, "extract", url_of(2), "model", "-o", str(target))["component"] == "model"
    assert torch.equal(safeckpt.load(target)["value"], torch.full((3,), 2.0))
    newest = safeckpt.latest(URL)
    assert newest is not None
    assert safeckpt.export(newest.path, "model", tmp_path / "model.safetensors") == (tmp_path / "model.safetensors",)
    spoil(saved, 2)
    with pytest.raises(safeckpt.DamagedCheckpointError, match=url_of(2)):
        safeckpt.export(url_of(2), "model", target, overwrite=True)
    assert not list((tmp_path / "temporary").iterdir())


def test_verify_of_a_url_finds_damage(saved: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """All below a prefix, or one."""
    assert [row["good"] for row in answer(capsys, "verify", URL)] == [True] * 3
    spoil(saved, 2)
    assert [row["good"] for row in answer(capsys, "verify", URL, code=1)] == [True, False, True]
    assert answer(capsys, "verify", url_of(2), code=1)[0]["path"] == url_of(2)


def test_prune_of_a_url_deletes_what_no_rule_keeps(saved: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """What stays is verified first; the damaged newest does not count and stays."""
    spoil(saved, 3)
    assert answer(capsys, "prune", URL, "--keep-last", "1", "--dry-run")["would_delete"] == [1]
    assert len(listed(saved)) == 3
    assert answer(capsys, "prune", URL, "--keep-last", "1", "--yes")["deleted"] == [1]
    assert [key[-11:-3] for key in listed(saved)] == ["00000002", "00000003"]


def test_fetch_brings_the_newest_good_one(
    saved: MemoryStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Into a directory, under its name; one that is there already is left alone."""
    spoil(saved, 3)
    assert answer(capsys, "fetch", URL, str(tmp_path / "b"))["step"] == 2
    assert steps_in(tmp_path / "b") == [2]
    assert main(["fetch", URL, str(tmp_path / "b"), "--step", "2"]) == 2
    assert main(["fetch", URL, str(tmp_path / "b"), "--step", "3"]) == 2
    assert "damaged" in capsys.readouterr().err
    assert answer(capsys, "fetch", URL, str(tmp_path / "b"), "--step", "1")["step"] == 1
    assert steps_in(tmp_path / "b") == [1, 2]


def test_store_that_does_not_answer_is_an_error_line(saved: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, exit code 2."""
    saved.is_down = True
    assert main(["list", URL]) == 2
    assert "it is down" in capsys.readouterr().err
