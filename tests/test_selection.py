"""`safeckpt list --where --sort`: conditions on checkpoints, of one run or several."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import safeckpt

pytest.importorskip("click")
pytest.importorskip("rich")

from safeckpt.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `a` with a loss and metrics, `b` with other ones; the newest of `b` is cut."""
    path = tmp_path_factory.mktemp("runs")
    notes = {"lr": 0.1, "name": "wide", "amp": True, "data": {"seed": 3}}
    with safeckpt.CheckpointManager(path / "a", {"counters": {"n": 0}}, keep_last=9, notes=notes) as manager:
        for step, loss, acc in ((1, 0.5, 0.5), (2, 0.25, math.nan), (3, 0.75, 0.9)):
            manager.save(step, loss=loss, metrics={"acc": acc})
        manager.save(4)
    with safeckpt.CheckpointManager(path / "b", {"counters": {"n": 0}}, keep_last=9) as manager:
        for step in (1, 10, 20):
            manager.save(step, loss={"recon": 1.0 / step, "kl": 0.0}, metrics={"step": -step})
    (path / "b" / "step-00000020.pt").write_bytes(b"cut")
    return path


@pytest.fixture
def chosen(runs: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def choose(*arguments: str, of: str = "a", code: int = 0) -> Any:
        """List some runs with these options; return directory and step of each, or the error."""
        capsys.readouterr()
        assert main(["list", *(str(runs / one) for one in of), *arguments, "--json"]) == code
        out, err = capsys.readouterr()
        if code:
            return " ".join(err.split())
        found = json.loads(out)
        assert {Path(one["path"]).parent for one in found["checkpoints"]} <= {runs / one for one in of}
        return [Path(one["directory"]).name + str(one["step"]) for one in found["checkpoints"]]

    return choose


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("loss<0.5", ["a2"]),
        ("loss<=0.5", ["a1", "a2"]),
        ("loss > .5", ["a3"]),
        ("loss>=5e-1", ["a1", "a3"]),
        ("loss=0.5", ["a1"]),
        ("loss==0.5", ["a1"]),
        ("loss!=0.5", ["a2", "a3"]),
        ("loss<inf", ["a1", "a2", "a3"]),
        ("metric.acc>0.1", ["a1", "a3"]),
        ("acc>0.1", ["a1", "a3"]),
        ("acc!=0.9", ["a1"]),
        ("step>=3", ["a3", "a4"]),
        ("note.lr<1", ["a1", "a2", "a3", "a4"]),
        ("note.lr<-1", []),
        ("note.name=wide", ["a1", "a2", "a3", "a4"]),
        ("note.name!=wide", []),
        ("note.amp=True", ["a1", "a2", "a3", "a4"]),
        ("note.amp=true", ["a1", "a2", "a3", "a4"]),
        ("note.amp!=TRUE", []),
        ("note.data.seed=3", ["a1", "a2", "a3", "a4"]),
        ("size<1MB", ["a1", "a2", "a3", "a4"]),
        ("size>1.5 kB", ["a1", "a2", "a3", "a4"]),
        ("size>1TB", []),
        ("saved>2020-01-01", ["a1", "a2", "a3", "a4"]),
        ("saved<2020-01-01T12:30+02:00", []),
    ],
)
def test_condition_chooses_those_for_which_it_holds(chosen: Any, condition: str, expected: list[str]) -> None:
    """Numbers, sizes, times and texts; what has no such value, and NaN, is left out."""
    assert chosen("--where", condition) == expected


def test_metric_named_loss_is_what_best_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands before the loss that is guarded, in the list as in `best`."""
    with safeckpt.CheckpointManager(tmp_path, {"counters": {"n": 0}}, keep_last=9) as manager:
        for step, loss, metric in ((1, 9.0, 1.0), (2, 5.0, 3.0)):
            manager.save(step, loss=loss, metrics={"loss": metric})
    assert main(["best", str(tmp_path), "loss", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["step"]
    assert main(["list", str(tmp_path), "--sort", "loss", "--where", "loss<4", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [best, 2] == [1, 2]


def test_several_conditions_all_hold(chosen: Any) -> None:
    """Each --where takes some away."""
    assert chosen("--where", "loss<0.7", "--where", "step>1") == ["a2"]
    assert chosen("--where", "loss<0.7", "--where", "step>1", "--where", "acc>0") == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("loss", ["a2", "a1", "a3", "a4"]),
        ("loss:max", ["a3", "a1", "a2", "a4"]),
        ("acc:max", ["a3", "a1", "a2", "a4"]),
        ("metric.acc:min", ["a1", "a3", "a2", "a4"]),
        ("step:max", ["a4", "a3", "a2", "a1"]),
        ("saved:max", ["a4", "a3", "a2", "a1"]),
        ("note.name", ["a1", "a2", "a3", "a4"]),
    ],
)
def test_order_is_that_of_a_key(chosen: Any, key: str, expected: list[str]) -> None:
    """Lowest or highest first; those without a value, and NaN, stand last in either case."""
    assert chosen("--sort", key) == expected


def test_several_runs_are_one_list(chosen: Any) -> None:
    """Sorted over all of them; a metric that is called as a field is reached by its whole name."""
    assert chosen(of="ab") == ["a1", "a2", "a3", "a4", "b1", "b10", "b20"]
    assert chosen("--sort", "step:max", "--where", "step<=3", of="ab") == ["a3", "a2", "a1", "b1"]
    assert chosen("--where", "metric.step<-5", of="ab") == ["b10"]
    assert chosen("--sort", "loss.recon", of="ab")[:2] == ["b10", "b1"]
    assert chosen("--where", "loss.recon=0.1", "--where", "loss.kl=0", of="ab") == ["b10"]


def test_damaged_checkpoint_is_not_left_out_in_silence(
    chosen: Any, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows its loss: it is named. What can be known of it, its step, is judged."""
    assert chosen("--where", "step>10", of="b") == ["b20"]
    assert main(["list", str(runs / "b"), "--where", "loss.kl=0", "--where", "step>5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 checkpoint(s)" in out
    assert "1 not good, so that nobody knows whether --where holds: step 20" in out
    assert main(["list", str(runs / "b"), "--where", "loss.kl=0", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["not_judged"]] == [20]
    assert main(["list", str(runs / "b"), "--where", "loss.kl=0", "--where", "step<5"]) == 0
    assert "not good" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--where", "los<0.5"),
            "no checkpoint here has 'los'; there is step, saved, size, run, loss, metric.acc, note.lr",
        ),
        (("--sort", "los"), "no checkpoint here has 'los'"),
        (("--sort", "loss:most"), "a metric is METRIC, METRIC:min or METRIC:max"),
        (("--where", "loss"), "a condition is KEY<VALUE"),
        (("--where", "<0.5"), "a condition is KEY<VALUE"),
        (("--where", "loss<"), "a condition is KEY<VALUE"),
        (("--where", "loss<0.5 and step>3"), "one --where has one condition"),
        (("--where", "loss<0.5 or step>3"), "one --where has one condition"),
        (("--where", "loss<__import__('os').getcwd()"), "is no number"),
        (("--where", "loss<nan"), "is no number"),
        (("--where", "size<5 apples"), "is no number of bytes"),
        (("--where", "saved>yesterday"), "is no time (UTC), such as"),
        (("--where", "note.name<wide"), "is a text here"),
        (("--where", "note.amp=yes"), "note.amp is true or false here"),
        (("--where", "saved=2026-12-01"), "a time is compared by < <= > or >="),
        (("--where", "note.name=<wide"), "has two signs of comparison"),
        (("--where", "step>1=2"), "'1=2' is no number"),
    ],
)
def test_condition_that_means_nothing_is_an_error(chosen: Any, arguments: tuple[str, ...], text: str) -> None:
    """A slip must not look like a list in which nothing fits."""
    assert text in chosen(*arguments, code=2)


def test_list_for_people_names_the_runs(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """One table with the directory of each, as it is called from here; every directory alone stands above its own."""
    monkeypatch.chdir(runs)
    assert main(["list", "a", "b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("7 checkpoint(s) in 2 directories")
    assert "\na          " in out
    assert main(["list", "a", "--where", "loss>5"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a", "0 of 4 checkpoint(s), 0 B"]


def test_condition_on_an_empty_directory_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No checkpoint is there to say which keys there are."""
    assert main(["list", str(tmp_path), "--where", "val<1", "--sort", "val"]) == 0
    assert "0 of 0 checkpoint(s)" in capsys.readouterr().out
