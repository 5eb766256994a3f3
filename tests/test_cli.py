"""The command line: what each command prints, its exit code, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
import safeckpt.run.catalog
from safeckpt.cli import main
from safeckpt.cli.changes import _distance
from safeckpt.cli.commands import group
from safeckpt.cli.screen import Screen
from tests.faults import contents, names_in
from tests.training import Run

pytest.importorskip("click")
pytest.importorskip("rich")

NAMES = [f"step-0000000{step}.pt" for step in (2, 4, 6)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a run: three checkpoints, a history, one refused step."""
    path = tmp_path_factory.mktemp("runs") / "run"
    torch.set_num_threads(1)  # as in every test: a fixture of the module is made before theirs
    run = Run()
    with safeckpt.CheckpointManager(path, run.components, keep_last=9, save_every=2) as manager:
        for step in range(1, 7):
            manager.end_step(step, loss=run.step(), metrics={"accuracy": (7 - step) / 10})
        with pytest.raises(safeckpt.NonFiniteError):
            manager.end_step(7, loss=float("nan"))
    return path


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


Said = tuple[int, str, str]


class Command:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: Any) -> Said:
        """Run a command; return its exit code, its standard output and its standard error."""
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    def json(self, *arguments: Any, code: int = 0) -> Any:
        """Run a command with --json, and return what it prints."""
        got, out, _ = self(*arguments, "--json")
        assert got == code
        return json.loads(out, parse_constant=pytest.fail)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def flip(path: Path, tensor: torch.Tensor | None = None) -> None:
    """Flip a bit of a file, of a tensor in it where one is given."""
    data = bytearray(path.read_bytes())
    data[3000 if tensor is None else data.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(data)


# -- list, show, log ---------------------------------------------------------------------------------------------------


def test_list_shows_every_checkpoint(command: Command, directory: Path) -> None:
    """Steps, losses, metrics and sizes, ascending; a file that is cut is there with the reason."""
    newest = directory / NAMES[2]
    newest.write_bytes(newest.read_bytes()[:-1])
    code, out, _ = command("list", directory)
    assert code == 0
    assert "3 checkpoint(s)" in out
    assert "accuracy 0.5" in out
    assert "not good" in out
    found = command.json("list", directory)
    assert [one["step"] for one in found["checkpoints"]] == [2, 4, 6]
    assert [one["good"] for one in found["checkpoints"]] == [None, None, False]
    assert found["checkpoints"][0]["metrics"] == {"accuracy": 0.5}
    assert found["checkpoints"][0]["loss"] == safeckpt.verify(directory / NAMES[0]).header["loss"]  # type: ignore[index]


def test_list_of_an_empty_directory_is_empty(command: Command, tmp_path: Path) -> None:
    """Nothing there is no error."""
    assert command("list", tmp_path)[0] == 0
    assert command.json("list", tmp_path)["checkpoints"] == []


def test_list_tells_of_checkpoints_set_aside(command: Command, directory: Path) -> None:
    """A timeline that was left is mentioned, not mixed in."""
    run = Run()
    with safeckpt.CheckpointManager(directory, run.components) as manager:
        manager.restore(step=4)
        manager.save(5)
    code, out, _ = command("list", directory)
    assert code == 0
    assert "1 more set aside" in out
    assert "1 set aside stay" in " ".join(command("prune", directory, "--keep-last", 1, "--dry-run")[1].split())
    assert command.json("list", directory)["set_aside"] == [str(directory / "aside-00000006.1.pt")]


def test_show_has_components_tensors_and_environment(command: Command, directory: Path) -> None:
    """Names, kinds, shapes, dtypes, sizes, loss, metrics and the environment are there."""
    code, out, _ = command("show", directory / NAMES[2])
    assert code == 0
    for part in ("step 6, saved", "accuracy 0.1", "optimizer.model.0.weight.exp_avg", "[16, 8]", "float32", "torch 2."):
        assert part in out
    assert "note" not in out
    found = command.json("show", directory / NAMES[2])
    assert [(one["name"], one["kind"]) for one in found["components"]] == [
        ("model", "module"), ("optimizer", "optimizer"), ("scheduler", "scheduler"), ("counters", "counters"),
    ]  # fmt: skip
    values = {one["name"]: one for one in found["values"]}
    assert values["model.0.weight"]["shape"] == [16, 8]
    assert values["model.0.weight"]["size_bytes"] == 512
    assert values["counters.steps"]["value"] == "6"
    assert found["environment"]["torch"] == str(torch.__version__)


def test_show_counts_what_is_not_finite(command: Command, tmp_path: Path) -> None:
    """NaN and Inf that were allowed into a file are counted, by tensor and by component."""
    mask = torch.tensor([float("-inf"), 0.0, float("nan")])
    safeckpt.save(
        {"model": {"mask": mask, "weight": torch.ones(2)}}, tmp_path / "a.pt", allow_nonfinite=("model.mask",)
    )
    found = command.json("show", tmp_path / "a.pt")
    assert found["components"][0]["nonfinite_tensors"] == 1
    values = {one["name"]: one for one in found["values"]}
    assert (values["model.mask"]["nan_count"], values["model.mask"]["inf_count"]) == (1, 1)
    assert (values["model.weight"]["nan_count"], values["model.weight"]["inf_count"]) == (0, 0)


@pytest.mark.parametrize("obj", [{"epoch": 3, "weight": torch.ones(2, 2)}, torch.ones(3), [1, torch.ones(1)], 7])
def test_show_knows_files_of_plain_torch(command: Command, tmp_path: Path, obj: Any) -> None:
    """A file that plain torch wrote is shown, and said to be checked less."""
    torch.save(obj, tmp_path / "plain.pt")
    code, out, _ = command("show", tmp_path / "plain.pt", "--all")
    assert code == 0
    assert "only record CRCs checked" in " ".join(out.split())
    assert command.json("show", tmp_path / "plain.pt")["self_proving"] is False


def test_show_folds_a_long_list_of_tensors(command: Command, tmp_path: Path) -> None:
    """Forty tensors are shown, and how to see the rest."""
    safeckpt.save({f"layer{index}": torch.ones(1) for index in range(60)}, tmp_path / "many.pt")
    assert "20 more tensors; --all" in command("show", tmp_path / "many.pt")[1]
    assert "layer59" in command("show", tmp_path / "many.pt", "--all")[1]


def test_damaged_file_is_shown_as_the_error_it_is(command: Command, directory: Path) -> None:
    """The three parts of the message come out, no traceback, exit code 2: its contents are not known."""
    flip(directory / NAMES[2])
    code, out, err = command("show", directory / NAMES[2])
    assert (code, out) == (2, "")
    assert "is damaged" in err
    assert "Still safe:" in err
    assert "Next:" in err


def test_log_prints_the_history(command: Command, directory: Path) -> None:
    """Saves and refusals in order, with what the events say."""
    code, out, _ = command("log", directory)
    assert code == 0
    assert out.index("saved") < out.index("refused")
    assert "loss nan" in out
    assert [event["kind"] for event in command.json("log", directory)] == ["saved", "saved", "saved", "refused"]
    assert [event["kind"] for event in command.json("log", directory, "--last", 1)] == ["refused"]
    assert command.json("log", directory, "--last", 0) == []


def test_log_without_a_history_says_so(command: Command, tmp_path: Path) -> None:
    """No history is no error."""
    code, out, _ = command("log", tmp_path)
    assert code == 0
    assert "has no history" in " ".join(out.split())


def test_list_says_how_much_it_checked(command: Command, directory: Path) -> None:
    """What passed the cheap check alone is not called good: a flipped bit is not found by it."""
    flip(directory / NAMES[1])
    out = command("list", directory)[1]
    assert out.count("structure ok") == 3
    assert "reads every byte" in " ".join(out.split())
    assert {(one["good"], one["checked"]) for one in command.json("list", directory)["checkpoints"]} == {
        (None, "structure")
    }  # a script that takes what is good takes none of them
    assert "`safeckpt verify DIRECTORY...` reads" in " ".join(command("list", directory, directory)[1].split())


def test_latest_prints_the_path_of_the_newest_good_file(command: Command, directory: Path, tmp_path: Path) -> None:
    """One line for a script; a damaged newer file is passed over with a warning; without any the exit code is 1."""
    assert command("latest", directory) == (0, f"{directory / NAMES[2]}\n", "")
    flip(directory / NAMES[2])
    code, out, err = command("latest", directory)
    assert (code, out) == (0, f"{directory / NAMES[1]}\n")
    assert "passed over" in " ".join(err.split())
    assert command.json("latest", directory)["step"] == 4
    (tmp_path / "empty").mkdir()
    code, out, err = command("latest", tmp_path / "empty")
    assert (code, out) == (1, "")
    assert "has no good checkpoint" in err
    assert command.json("latest", tmp_path / "empty", code=1) is None


def test_best_prints_the_path_of_the_best_good_file(command: Command, directory: Path) -> None:
    """By a metric or the loss, lowest or highest; a damaged one is passed over; an unknown metric is a 1."""
    assert command("best", directory, "accuracy:max") == (0, f"{directory / NAMES[0]}\n", "")
    assert command("best", directory, "accuracy")[1] == f"{directory / NAMES[2]}\n"
    losses = {one["loss"]: one["path"] for one in command.json("list", directory)["checkpoints"]}
    assert command.json("best", directory, "loss")["path"] == losses[min(losses)]
    flip(directory / NAMES[0])
    code, out, err = command("best", directory, "accuracy:max")
    assert (code, out) == (0, f"{directory / NAMES[1]}\n")
    assert "passed over" in " ".join(err.split())
    code, out, err = command("best", directory, "bleu")
    assert (code, out) == (1, "")
    assert "finite metric 'bleu'" in err
    assert command("best", directory, "accuracy:most")[0] == 2


def test_best_says_what_is_missing(command: Command, directory: Path) -> None:
    """A metric that damaged checkpoints alone have is there, and they are named; one that nobody has is not."""
    for name in NAMES:
        flip(directory / name)
    code, out, err = command("best", directory, "accuracy")
    assert (code, out) == (1, "")
    assert "of those that have one, step 2, 4, 6, none is good" in " ".join(err.split())
    assert "there is:" not in err


@pytest.fixture
def keeper(tmp_path: Path) -> Path:
    """A run that keeps its best checkpoint by `val`, which is step 2, and ends at step 5."""
    with safeckpt.CheckpointManager(
        tmp_path / "keeper", {"counters": {"n": 0}}, keep_last=9, keep_best=safeckpt.Best("val")
    ) as manager:
        for step, value in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan")), (5, 0.5)):
            manager.save(step, loss=1.0 / step, metrics={"val": value})
    return tmp_path / "keeper"


def test_best_of_a_run_is_what_the_run_keeps(command: Command, keeper: Path, directory: Path) -> None:
    """Without a metric it is that of keep_best, which `list` marks; where there is none, the metrics are named."""
    assert command("best", keeper) == (0, f"{keeper / 'step-00000002.pt'}\n", "")
    assert command("list", keeper)[1].count("best val") == 1
    assert [one["best_if_good"] for one in command.json("list", keeper)["checkpoints"]] == [[], ["val"], [], [], []]
    code, _, err = command("best", directory)
    assert code == 2
    assert "which METRIC? the run keeps no best checkpoint; its checkpoints have accuracy, loss" in " ".join(
        err.split()
    )
    code, _, err = command("best", directory, "bleu")
    assert code == 1
    assert "there is: accuracy, loss" in " ".join(err.split())


def test_prune_keeps_what_the_run_keeps(command: Command, keeper: Path) -> None:
    """The best one of a run is not deleted by somebody who did not think of it; it goes when one says so."""
    rules = ("--keep-last", 1, "--dry-run")
    assert command.json("prune", keeper, *rules)["stays"] == [2, 5]
    assert "The best by val stays" in command("prune", keeper, *rules)[1]
    assert command.json("prune", keeper, *rules, "--no-keep-best")["stays"] == [5]
    assert command.json("prune", keeper, *rules, "--keep-best", "val:max")["stays"] == [3, 5]
    assert command("prune", keeper, *rules, "--keep-best", "val", "--no-keep-best")[0] == 2
    assert command("prune", keeper, "--keep-last", 1, "--yes")[0] == 0
    assert [name for name in names_in(keeper) if name.endswith(".pt")] == ["step-00000002.pt", "step-00000005.pt"]


def test_rules_that_are_none_are_passed_over(command: Command, keeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of another hand is no traceback: the next older checkpoint says what the run keeps."""
    newest = safeckpt.run.catalog.Catalog.bests

    def bests(catalog: Any, step: int) -> Any:
        return safeckpt.run.catalog.bests_in({"keep_best": [[7]]}, keeper) if step == 5 else newest(catalog, step)

    monkeypatch.setattr(safeckpt.run.catalog.Catalog, "bests", bests)
    assert command("best", keeper)[1] == f"{keeper / 'step-00000002.pt'}\n"


def test_log_says_in_words_why_and_what(command: Command, directory: Path) -> None:
    """Lists and numbers are words, and what is zero is left out."""
    with (directory / "events.jsonl").open("a") as file:
        file.write(
            '{"kind": "refused", "step": 8, "loss": null, "tensors": ["model.0.weight", "model.1.bias"], '
            '"tensors_total": 2}\n'
            '{"kind": "rolled_back", "step": 6, "why": "loss = nan", "left_out": {"loader": [[3, 20]]}, '
            '"changed": false, "source": "disk"}\n'
        )
    out = " ".join(command("log", directory)[1].split())
    assert "refused 8 not saved: tensors model.0.weight, model.1.bias" in out
    assert "rolled back 6 loss = nan; left out (epoch, batch): loader (3, 20); taken from disk" in out
    assert "tensors in all" not in out
    assert "changed" not in out


def test_version_is_printed(command: Command) -> None:
    """By the option that everybody tries."""
    assert command("--version") == (0, f"safeckpt {safeckpt.__version__}\n", "")


def test_long_paths_are_printed_on_one_line(capsys: pytest.CaptureFixture[str], written: Path, tmp_path: Path) -> None:
    """A path for a script is not wrapped at the width of a terminal."""
    long = tmp_path / ("x" * 100) / "run"
    shutil.copytree(written, long)
    assert main(["latest", str(long)]) == 0
    assert capsys.readouterr().out == f"{long / NAMES[2]}\n"


def test_program_gets_a_line_for_each_row(command: Command, tmp_path: Path) -> None:
    """Without a terminal nothing is folded and no line ends with spaces, however wide a row is."""
    name = "metric " * 20
    with safeckpt.CheckpointManager(tmp_path / "run", {"counters": {"n": 0}}) as manager:
        manager.save(1, loss=1.0, metrics={name: 1.0, "größe": 2.0})
        manager.save(2, loss=1.0, metrics={"b": 1.0})
    out = command("list", tmp_path / "run")[1]
    head, first, second = out.splitlines()[2:5]
    assert re.fullmatch(rf" +1  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d +\S+ kB +1  {name} 1, größe 2  structure ok", first)
    assert first.index("structure") == second.index("structure") == head.index("check")
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert command("log", long)[1] == f"{long} has no history.\n"


def test_terminal_gets_lines_that_fit(
    command: Command, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wide is folded; a date is not, as long as there is room for it."""
    flip(directory / NAMES[1])
    monkeypatch.chdir(tmp_path)
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    run, first, last = directory.name, f"{directory.name}/{NAMES[0]}", f"{directory.name}/{NAMES[2]}"
    for arguments in (
        ("list", run), ("list", run, run), ("log", run), ("verify", run), ("show", first, "--all"),
        ("diff", first, last), ("prune", run, "--keep-last", 1, "--dry-run"), ("best", run, "accuracy"),
    ):  # fmt: skip
        out = command(*arguments)[1]
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
        assert [line for line in plain.splitlines() if len(line) > 80 and not Path(line).exists()] == [], arguments
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", command("list", run, run)[1])
    monkeypatch.setenv("COLUMNS", "30")
    out = command("list", run)[1]
    assert all(len(line) <= 30 for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out).splitlines())


def _in_terminal(arguments: list[str], **environment: str) -> str:
    """Run a command and return all that it prints, with these variables set."""
    done = subprocess.run(
        [sys.executable, "-m", "safeckpt", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "TERM"}}
        | environment,
    )
    return done.stdout + done.stderr


def test_colours_are_for_terminals_and_for_those_who_want_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets none, NO_COLOR is obeyed, and on a terminal bad is red and good is green."""

    def printed(*arguments: str, **environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        main([*arguments])
        return "".join(capsys.readouterr())

    flip(directory / NAMES[1])
    red, green = "\x1b[31m", "\x1b[32m"
    coloured = printed("verify", str(directory), FORCE_COLOR="1")
    assert red in coloured
    assert green in coloured
    without = printed("verify", str(directory), FORCE_COLOR="1", NO_COLOR="1")
    assert red not in without
    assert green not in without
    assert "\x1b" not in printed("verify", str(directory))
    assert green in printed("list", str(directory), "--sort", "loss", FORCE_COLOR="1")
    assert red in printed("log", str(directory), FORCE_COLOR="1")
    assert "\x1b" not in printed("show", str(directory / NAMES[1]))  # an error


def test_first_line_of_a_proof_has_the_colour_of_its_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Green or red on a terminal, the rest as it is; the text itself without one."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "Resume: EXACT.\n  " + "long " * 40
    Screen(as_json=False).verdict(text, good=True)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    for good, colour in ((True, 32), (False, 31)):
        Screen(as_json=False).verdict(text, good=good)
        first, _, rest = text.partition("\n")
        assert capsys.readouterr().out == f"\x1b[{colour}m{first}\x1b[0m\n{rest}\n"


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zsh", "fish"))])
def test_shells_get_their_completion(shell: str) -> None:
    """The line that the help names gives a script for the shell."""
    assert "_SAFECKPT_COMPLETE" in _in_terminal([], _SAFECKPT_COMPLETE=f"{shell}_source")
    assert "_SAFECKPT_COMPLETE=bash_source" in _in_terminal(["--help"])


# -- verify, diff ------------------------------------------------------------------------------------------------------


def test_verify_finds_a_flipped_bit(command: Command, directory: Path) -> None:
    """One bad file of a directory makes exit code 1, and is named with the record."""
    assert command("verify", directory)[0] == 0
    flip(directory / NAMES[1])
    code, out, _ = command("verify", directory)
    assert code == 1
    assert "2 of 3 good" in out
    found = command.json("verify", directory, code=1)
    assert [one["good"] for one in found] == [True, False, True]
    assert command("verify", directory / NAMES[0], directory / NAMES[2])[0] == 0
    assert command("verify", directory / NAMES[0], directory / NAMES[1])[0] == 1


def test_damaged_tensor_is_named_by_every_command(command: Command, directory: Path) -> None:
    """By the way to it in the file, as torch.load has it, beside the record."""
    path = directory / NAMES[2]
    flip(path, torch.load(path)["optimizer"]["state"][0]["exp_avg"])
    name = "optimizer.state.0.exp_avg"
    text = f"the bytes of {name} are not those that were written (in data/"
    assert f"damaged: {text}" in command("verify", directory)[1]
    (found,) = command.json("verify", path, code=1)
    assert (found["tensors"], found["record"].partition("/")[0]) == ([name], "data")
    for arguments in (
        ("show", path), ("diff", path, path), ("extract", path, "model", "-o", "m.pt"), ("latest", directory),
        ("best", directory, "accuracy"),
    ):  # fmt: skip
        err = command(*arguments)[2]
        assert text.partition(" (")[0] in err


def test_picture_is_called_what_it_is(command: Command, tmp_path: Path) -> None:
    """A slip of the hand gets no advice about damage, in any command that takes a file."""
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n" + bytes(60))
    assert "no checkpoint: it is a picture (PNG)" in command("verify", path)[1]
    for arguments in (
        ("show", path), ("diff", path, path), ("extract", path, "model", "-o", tmp_path / "m.pt"),
        ("import", path, tmp_path / "run", "--map", "model=m"),
    ):  # fmt: skip
        code, _, err = command(*arguments)
        assert code == 2
        assert "is no checkpoint: it is a picture (PNG)" in err
        assert "Next: name another file" in err
    assert names_in(tmp_path) == ["a.png"]


def test_every_entry_of_verify_has_every_key(command: Command, directory: Path, tmp_path: Path) -> None:
    """A script reads one key of them all; null is what nobody can know."""
    flip(directory / NAMES[1])
    plain, empty = tmp_path / "plain.pt", tmp_path / "empty"
    torch.save({"w": torch.ones(1)}, plain)
    empty.mkdir()
    found = command.json("verify", directory, plain, empty, code=1)
    keys = {"path", "good", "size_bytes", "self_proving", "text", "reason", "record", "tensors"}
    assert all(one.keys() == keys for one in found)
    known = {Path(one["path"]).name: (one["self_proving"], one["record"] is None, one["tensors"]) for one in found}
    assert known["empty"] == (None, True, [])
    assert known["plain.pt"] == (False, True, [])
    assert known[NAMES[0]] == (True, True, [])
    assert known[NAMES[1]][:2] == (None, False)


def test_verify_of_nothing_is_no_success(command: Command, directory: Path, tmp_path: Path) -> None:
    """A check that checked nothing must not look good, and does not keep the others from being checked."""
    assert command.json("verify", tmp_path, code=1)[0]["good"] is False
    empty = tmp_path / "empty"
    empty.mkdir()
    code, out, _ = command("verify", empty, directory)
    assert code == 1
    assert "holds no checkpoint" in out
    assert "3 of 3 good" in out


def test_verify_of_the_newest_alone(command: Command, directory: Path) -> None:
    """Whether the newest one is damaged is a question of its own: an older one that is does not answer it."""
    flip(directory / NAMES[1])
    assert command("verify", directory, "--last", 1)[0] == 0
    assert [one["good"] for one in command.json("verify", directory, "--last", 2, code=1)] == [False, True]
    flip(directory / NAMES[2])
    assert command("verify", directory, "--last", 1)[0] == 1
    assert command("latest", directory)[0] == 0
    assert command("verify", directory, "--last", 0)[0] == 2


# What a command says of: a directory without a checkpoint, one whose checkpoints are all damaged, a path that is not
# there. The first two of `diff` and `show` are a damaged file.
CODES = {
    "list": (0, 0, 2),
    "log": (0, 0, 2),
    "latest": (1, 1, 2),
    "best": (1, 1, 2),
    "plot": (1, 0, 2),
    "verify": (1, 1, 2),
    "prune": (0, 0, 2),
    "show": (2, 2, 2),
    "diff": (2, 2, 2),
    "extract": (2, 2, 2),
    "import": (2, 2, 2),
}
MORE = {
    "best": ("accuracy",), "prune": ("--keep-last", 1, "--dry-run"), "extract": ("model", "-o", "x.pt"),
    "import": ("run", "--map", "model=model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_exit_codes_are_those_of_the_table(
    command: Command, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """0: yes. 1: the answer is no. 2: there is no answer, since what was asked for cannot be read or is not there."""
    if name == "plot":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for file in NAMES:
        flip(directory / file)
    file = directory / NAMES[0]
    found = []
    for place in (empty, directory, tmp_path / "nowhere"):
        of_files = {"show": (file,), "extract": (file,), "import": (file,), "diff": (file, file)}
        paths = of_files.get(name, (place,)) if place.exists() else (place,) * (2 if name == "diff" else 1)
        for as_json in ((), ("--json",)):
            code, out, err = command(name, *paths, *MORE.get(name, ()), *as_json)
            assert out if code == 0 or (as_json and code == 1) else out + err, (name, place)
            if as_json and code < 2:
                json.loads(out)
            found.append(code)
    assert found == [code for code in CODES[name] for _ in range(2)]
    assert "Exit code 1" in command(name, "--help")[1] or 1 not in CODES[name]
    assert not (tmp_path / "x.pt").exists()


def test_url_that_cannot_be_used_is_no_answer(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheme that nobody knows, or a package that is missing, in every command that takes a URL."""

    def refuse(url: str) -> None:
        raise ValueError(f"{url}: the store cannot be used with these options")

    monkeypatch.setattr("safeckpt.remote.open_prefix", refuse)
    for name in ("list", "latest", "best", "verify", "show", "log", "plot", "prune", "diff", "extract", "doctor"):
        urls = ("s3x://bucket/run",) * (2 if name == "diff" else 1)
        code, _, err = command(name, *urls, *MORE.get(name, ()))
        assert code == 2
        assert "the store cannot be used" in err
    assert command("fetch", "s3x://bucket/run", tmp_path / "run")[0] == 2


def test_fault_of_ours_is_no_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    """Python ends with 1 when nobody catches an error; a script would take it for a no."""

    def fail(*_: Any) -> None:
        raise KeyError("forgotten")

    monkeypatch.setattr("safeckpt.cli.listing.latest", fail)
    assert main(["latest", str(directory)]) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[-1] == "KeyError: 'forgotten'"
    assert last == "Error: that is a fault of safeckpt; nothing is known about the file."


def test_path_that_is_not_there_is_told_from_those_that_are(command: Command, directory: Path) -> None:
    """The steps of a directory, or a name that is nearly the same; nothing where nothing is near."""
    code, _, err = command("show", directory / "step-00000005.pt")
    assert code == 2
    assert f"{directory} has step 6, 4, 2; `safeckpt list {directory}`" in " ".join(err.split())
    assert f"There is {directory}." in " ".join(command("list", directory.with_name("rum"))[2].split())
    assert "There is" not in command("list", directory.with_name("entirely else"))[2]


@pytest.mark.parametrize("words", [["verify"], ["show"], ["extract", "-o", "x.pt"]], ids=lambda words: words[0])
def test_one_shard_is_called_what_it_is(command: Command, tmp_path: Path, words: list[str]) -> None:
    """A file of a sharded checkpoint is not damaged: the error says which directory to name."""
    shard = tmp_path / "step-00000001" / "__0_0.distcp"
    shard.parent.mkdir()
    shard.write_bytes(b"shard")
    code, _, err = command(words[0], shard, *(["model", *words[1:]] if words[1:] else []))
    assert code == 2
    assert "one shard of a sharded checkpoint" in " ".join(err.split())
    assert str(shard.parent) in "".join(err.split())


def test_diff_of_a_file_with_itself_is_empty(command: Command, directory: Path) -> None:
    """Every value is equal, exit code 0."""
    code, out, _ = command("diff", directory / NAMES[0], directory / NAMES[0])
    assert code == 0
    assert "equal, bit for bit" in out
    assert command.json("diff", directory / NAMES[0], directory / NAMES[0])["equal"] is True


def test_diff_says_what_changed_and_by_how_much(command: Command, directory: Path) -> None:
    """Per component and per value, with the largest absolute and relative change; exit code 1."""
    code, out, _ = command("diff", directory / NAMES[0], directory / NAMES[1])
    assert code == 1
    assert "counters.steps" not in out.split("value")[0]
    found = command.json("diff", directory / NAMES[0], directory / NAMES[1], code=1)
    changes = {one["name"]: one for one in found["changes"]}
    assert (changes["counters.steps"]["first"], changes["counters.steps"]["second"]) == ("2", "4")
    a, b = (torch.load(directory / name)["model"]["0.weight"].double() for name in NAMES[:2])
    assert changes["model.0.weight"]["largest_change"] == float((b - a).abs().max())
    assert changes["model.0.weight"]["largest_relative_change"] == float((b - a).abs().max() / a.abs().max())
    components = {one["name"]: one for one in found["components"]}
    assert components["model"]["bit_equal"] is False
    assert components["model"]["changed"] + components["model"]["equal"] == components["model"]["values"]


def test_diff_of_one_component_leaves_out_the_others(command: Command, directory: Path) -> None:
    """Its exit code is about what was named; a name that is in neither file is an error."""
    a, b = directory / NAMES[0], directory / NAMES[1]
    found = command.json("diff", a, b, "model", "counters", code=1)
    assert [one["name"] for one in found["components"]] == ["model", "counters"]
    assert {one["component"] for one in found["changes"]} == {"model", "counters"}
    torch.save({**torch.load(a), "counters": {"steps": 7}}, directory / "other.pt")
    torch.save(torch.load(a), directory / "same.pt")
    other, same = directory / "other.pt", directory / "same.pt"
    assert command("diff", same, other)[0] == 1
    assert command("diff", same, other, "model")[0] == 0
    code, _, err = command("diff", a, b, "modell")
    assert code == 2
    assert "neither file has modell; there is model, optimizer, scheduler, counters" in " ".join(err.split())


def test_count_of_steps_is_not_the_largest_change(command: Command, directory: Path) -> None:
    """The summary of an optimizer is about its moments; of what has nothing larger it is the count."""
    found = command.json("diff", directory / NAMES[0], directory / NAMES[2], code=1)
    summaries = {one["name"]: one for one in found["components"]}
    moments = [one for one in found["changes"] if one["component"] == "optimizer" and one["elements"] > 1]
    assert summaries["optimizer"]["largest_change"] == max(one["largest_change"] for one in moments) < 4
    assert max(one["largest_change"] for one in found["changes"] if one["name"].endswith(".step")) == 4
    assert summaries["counters"]["largest_change"] == 4


def test_all_differences_are_printed_on_demand(command: Command, tmp_path: Path) -> None:
    """Thirty are shown, and how to see the rest."""
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        safeckpt.save({"model": {f"w{index}": torch.full((2,), value) for index in range(40)}}, tmp_path / name)
    out = command("diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]
    assert "... and 10 more; --all shows them" in out
    assert "model.w39" not in out
    assert "model.w39" in command("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--all")[1]


def test_diff_names_what_is_on_one_side_only(command: Command, tmp_path: Path) -> None:
    """Values and components that came, went, or changed their shape or dtype are told apart."""
    safeckpt.save({"m": {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, "x": {"n": 1}}, tmp_path / "a.pt")
    safeckpt.save({"m": {"a": torch.ones(3), "b": torch.ones(2).half(), "d": torch.ones(2)}}, tmp_path / "b.pt")
    code, out, _ = command("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    for text in (
        "float32[2] -> float32[3]",
        "float32[2] -> float16[2]",
        "only in A: float32[2]",
        "only in B: float32[2]",
    ):
        assert text in out
    components = command.json("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=1)["components"]
    assert [(one["name"], one["only_in_first"], one["only_in_second"]) for one in components] == [
        ("m", 1, 1),
        ("x", 1, 0),
    ]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0]), (1.0, 0.25)),
        (torch.tensor([3], dtype=torch.int8), torch.tensor([5], dtype=torch.int8), (2.0, 2 / 3)),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1.0, 1.0)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), (2.0, 2 / abs(1 + 1j))),
        (torch.tensor([0.0]), torch.tensor([2.0]), (2.0, float("inf"))),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 2.0]), (1.0, 1.0)),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), (0.0, 0.0)),
        (torch.zeros(0), torch.zeros(0), (0.0, 0.0)),
        (torch.ones(2), torch.ones(3), (None, None)),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), (None, None)),
        ("a", "b", (None, None)),
        (2, 4.0, (2.0, 1.0)),
    ],
)
def test_largest_change_has_a_value_for_everything(a: Any, b: Any, expected: Any) -> None:
    """Integers, booleans, complex numbers, infinities and what has no difference are all covered."""
    assert _distance(a, b) == pytest.approx(expected, abs=0, rel=1e-7) if expected[0] is not None else (None, None)


# -- prune, extract ----------------------------------------------------------------------------------------------------


def test_dry_run_of_prune_deletes_nothing(command: Command, directory: Path) -> None:
    """It says what would go and what stays, also while a run holds the directory."""
    before = contents(directory)
    with safeckpt.CheckpointManager(directory, Run().components) as manager:
        manager.restore()
        manager._run.directory.enter()
        held = contents(directory)
        code, out, _ = command("prune", directory, "--keep-last", 1, "--dry-run")
        assert contents(directory) == held
    assert code == 0
    assert "To delete: step 2, 4" in out
    assert "Stays: step 6" in out
    assert {name: data for name, data in contents(directory).items() if name in before} == {
        **before,
        "events.jsonl": contents(directory)["events.jsonl"],
    }


def test_prune_keeps_what_its_rules_say(command: Command, directory: Path) -> None:
    """The newest, the multiples and the best stay; the rest is gone, and the history says so."""
    code, out, _ = command("prune", directory, "--keep-last", 1, "--yes")
    assert code == 0
    assert "Deleted 2 checkpoint(s)" in out
    assert [name for name in names_in(directory) if name.endswith(".pt")] == NAMES[2:]
    assert command.json("log", directory, "--last", 1)[0]["steps"] == [2, 4]
    assert "Nothing to delete" in command("prune", directory, "--keep-last", 1, "--yes")[1]


def test_prune_keeps_multiples_and_the_best(command: Command, directory: Path) -> None:
    """Each rule saves its own."""
    for arguments, stays in (
        (("--keep-every", 4), [4, 6]),
        (("--keep-best", "accuracy:max"), [2, 6]),
        (("--keep-best", "accuracy"), [6]),
        (("--keep-every", "6h"), [6]),
        (("--keep-every", "99999d"), [6]),
    ):
        found = command.json("prune", directory, "--keep-last", 1, "--dry-run", *arguments)
        assert found["stays"] == stays
    assert command("prune", directory, "--keep-last", 1, "--keep-best", "accuracy:most")[0] == 2
    for interval in ("0", "-1", "6x", "h", "1.5h", ""):
        assert command("prune", directory, "--keep-last", 1, "--keep-every", interval)[0] == 2


def test_prune_never_trades_a_good_checkpoint_for_a_damaged_one(command: Command, directory: Path) -> None:
    """A damaged newest file does not count as kept, so the newest good one stays, and it is not deleted either."""
    flip(directory / NAMES[2])
    out = command("prune", directory, "--keep-last", 1, "--dry-run")[1]
    assert "To delete: step 2 (" in out
    assert "Stays: step 4. Damaged, so that it stays and does not count: step 6." in out
    found = command.json("prune", directory, "--keep-last", 1, "--dry-run")
    assert (found["would_delete"], found["stays"], found["damaged"]) == ([2], [4, 6], [6])
    out = command("prune", directory, "--keep-last", 1, "--yes")[1]
    assert re.search(r"Deleted 1 checkpoint\(s\), .*\. Damaged, so that it stays and does not count: step 6\.", out)
    assert [name for name in names_in(directory) if name.endswith(".pt")] == NAMES[1:]


def test_prune_asks_before_it_deletes(command: Command, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer nothing is deleted."""
    before = names_in(directory)
    monkeypatch.setattr("click.confirm", lambda *_, **__: (_ for _ in ()).throw(__import__("click").Abort()))
    code, out, err = command("prune", directory, "--keep-last", 1)
    assert code == 2
    assert "To delete: step 2, 4" in out
    assert "nothing was changed" in err
    assert [name for name in names_in(directory) if name.endswith(".pt")] == [n for n in before if n.endswith(".pt")]


def test_prune_is_refused_while_a_run_holds_the_directory(command: Command, directory: Path) -> None:
    """The lock protects a running job; the error names the holder and everything stays."""
    with safeckpt.CheckpointManager(directory, Run().components) as manager:
        manager.restore()
        manager._run.directory.enter()
        before = contents(directory)
        code, _, err = command("prune", directory, "--keep-last", 1, "--yes")
        assert contents(directory) == before
    assert code == 2
    assert "is locked" in err
    assert str(os.getpid()) in err


def test_readers_work_while_a_run_holds_the_directory(command: Command, directory: Path) -> None:
    """Listing, showing, checking and comparing need no lock and change nothing."""
    run = Run()
    with safeckpt.CheckpointManager(directory, run.components) as manager:
        manager.restore()
        manager.save(7)
        before = contents(directory)
        newest = directory / "step-00000007.pt"
        assert command("list", directory)[0] == 0
        assert command("show", newest)[0] == 0
        assert command("verify", directory)[0] == 0
        assert command("diff", newest, newest)[0] == 0
        assert command("log", directory)[0] == 0
        assert contents(directory) == before


def test_import_says_what_it_took_and_what_not(command: Command, tmp_path: Path) -> None:
    """Without a mapping it lists the keys; with one it writes a checkpoint that a manager restores."""
    model = torch.nn.Linear(2, 1)
    torch.save({"net": model.state_dict(), "epoch": 3, "global_step": 40}, tmp_path / "old.pt")
    code, _, err = command("import", tmp_path / "old.pt", tmp_path / "run")
    assert code == 2
    assert "Its keys: net, epoch, global_step" in " ".join(err.split())
    for wrong in ("model", "=net"):
        assert command("import", tmp_path / "old.pt", tmp_path / "run", "--map", wrong)[0] == 2
    code, _, err = command("import", tmp_path / "old.pt", tmp_path / "run", "--map", "model=nett")
    assert code == 2
    assert "nett" in err
    code, _, err = command("import", tmp_path / "old.pt", tmp_path / "run", "--map", "model=epoch")
    assert code == 2
    assert "counters.epoch=epoch" in " ".join(err.split())
    assert not (tmp_path / "run").exists()
    code, out, _ = command("import", tmp_path / "old.pt", tmp_path / "run", "--map", "model=net")
    assert code == 0
    assert Path(out.partition(": step 40")[0]).is_file()
    assert "model <- net: 2 tensors, 12 B" in out
    assert "not taken:\n  epoch\n  global_step" in out
    code, out, _ = command("import", tmp_path / "old.pt", tmp_path / "two", "--map", "model=net", "--step", 7, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["step"], found["taken"], found["position"]) == (7, {"model": "net"}, None)
    assert "imported" in command("show", found["path"])[1]
    assert command("verify", found["path"])[0] == 0
    assert command("diff", found["path"], tmp_path / "run" / "step-00000040.pt")[0] == 0
    with (
        pytest.warns(safeckpt.ImportedStateWarning),
        safeckpt.CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(2, 1)}) as manager,
    ):
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 40


def test_extract_writes_a_file_that_plain_torch_reads(command: Command, directory: Path, tmp_path: Path) -> None:
    """The model's state dict comes out as it is in the checkpoint."""
    output = tmp_path / "weights.pt"
    assert command("extract", directory / NAMES[2], "model", "-o", output)[0] == 0
    state = torch.load(output)
    expected = torch.load(directory / NAMES[2])["model"]
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    Run().model.load_state_dict(state)


def test_extract_writes_safetensors(command: Command, directory: Path, tmp_path: Path) -> None:
    """With its package there, the other format works too."""
    safetensors = pytest.importorskip("safetensors.torch")
    output = tmp_path / "weights.safetensors"
    assert command.json("extract", directory / NAMES[2], "model", "-o", output)["size_bytes"] == output.stat().st_size
    state = safetensors.load_file(output)
    expected = torch.load(directory / NAMES[2])["model"]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_extract_refuses_what_it_cannot_do(command: Command, directory: Path, tmp_path: Path) -> None:
    """Unknown component, unknown ending, a file that is there, values that are no tensors: nothing is written."""
    source = directory / NAMES[2]
    there = tmp_path / "there.pt"
    there.write_bytes(b"precious")
    before = names_in(tmp_path)
    for arguments, text in (
        (("modell", "-o", tmp_path / "a.pt"), "It holds model, optimizer, scheduler, counters"),
        (("model", "-o", tmp_path / "a.bin"), "has to end in"),
        (("model", "-o", there), "is there already, and was left alone; --force replaces it"),
        (("model", "-o", tmp_path / "a.pt", "--dtype", "int7"), "no floating dtype"),
        (("model", "-o", tmp_path / "a.safetensors", "--max-shard-size", "5 apples"), "no number of bytes"),
        (("counters", "-o", tmp_path / "a.safetensors"), "no tensors (steps)"),
    ):
        code, _, err = command("extract", source, *arguments)
        assert code == 2
        assert text in " ".join(err.split())
    assert names_in(tmp_path) == before
    assert there.read_bytes() == b"precious"
    assert command("extract", source, "model", "-o", there, "--force", "--dtype", "bf16")[0] == 0
    assert torch.load(there).keys() == torch.load(source)["model"].keys()
    assert torch.load(there)["0.weight"].dtype is torch.bfloat16


def test_extract_writes_several_files_and_an_index(command: Command, directory: Path, tmp_path: Path) -> None:
    """Beyond a size, in the layout of Hugging Face, and in another dtype; what it prints names the index."""
    safetensors = pytest.importorskip("safetensors.torch")
    output = tmp_path / "model.safetensors"
    found = command.json(
        "extract", directory / NAMES[2], "model", "-o", output, "--max-shard-size", "40", "--dtype", "bfloat16"
    )
    assert found["path"] == str(tmp_path / "model.safetensors.index.json")
    assert found["size_bytes"] == sum(Path(file).stat().st_size for file in found["files"])
    state = {}
    for file in found["files"][:-1]:
        state.update(safetensors.load_file(file))
    expected = torch.load(directory / NAMES[2])["model"]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name].bfloat16()) for name in state)


# -- prove -------------------------------------------------------------------------------------------------------------


MODULE = """
import torch
from tests.proof.loops import build_small as build, small_step

CALLS = []

def train_step(c):
    return small_step(c)

def drifting_step(c):
    CALLS.append(1)
    return small_step(c, scale=len(CALLS) + 1.0)

def failing_step(c):
    raise KeyError("no such batch")
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "a_training_script.py"
    path.write_text(MODULE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop(path.stem, None)


def test_prove_of_a_right_loop_is_exit_code_0(command: Command, module: Path, tmp_path: Path) -> None:
    """The one-screen text, JSON and a picture come out of one command."""
    target = f"{module}:build"
    code, out, _ = command("prove", target, "--steps", 4, "--kill-at", 2, "--in-process", "--repeats", 1)
    assert code == 0
    assert out.startswith("Resume: EXACT. 2 of 2 resumed losses equal")
    pytest.importorskip("matplotlib")
    arguments = ("--steps", 4, "--kill-at", 1, "--kill-at", 2, "--in-process", "--ablate", "--plot", tmp_path / "a.png")
    found = command.json("prove", target, *arguments)
    assert [kill["kill_at"] for kill in found["kills"]] == [1, 2]
    assert found["ablations"]["model"] == 0
    assert (tmp_path / "a.png").exists()


def test_prove_of_a_wrong_loop_is_exit_code_1(command: Command, module: Path) -> None:
    """A loop that is not the same again is told apart from one that could not be run."""
    arguments = ("--steps", 4, "--kill-at", 2, "--in-process", "--train-step")
    code, out, _ = command("prove", f"{module}:build", *arguments, "drifting_step")
    assert code == 1
    assert "NOT" in out


def test_prove_of_a_loop_that_raises_is_exit_code_2(capsys: pytest.CaptureFixture[str], module: Path) -> None:
    """The user's own error comes out with its traceback, since it is his to find."""
    code = main(["prove", f"{module}:build", "--train-step", "failing_step", "--in-process"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "KeyError: 'no such batch'" in err
    assert "failing_step" in err


def test_prove_takes_a_function_that_returns_both(command: Command) -> None:
    """Closures are proven through the function that makes them."""
    code, out, _ = command("prove", "tests.proof.pair:both", "--steps", 4, "--kill-at", 2, "--in-process")
    assert code == 0, out


@pytest.mark.slow
def test_prove_takes_a_function_that_trains_a_whole_run(command: Command) -> None:
    """It needs an argument, the directory."""
    target = "tests.proof.test_training:train"
    code, out, _ = command("prove", target, "--steps", 4, "--kill-at", 2, "--repeats", 1)
    assert code == 0, out
    assert out.startswith("Resume: EXACT. 2 of 2 resumed losses equal")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("tests.proof.test_training:train", "--ablate"), "need build and train_step"),
        (("nowhere.py:build",), "there is no file nowhere.py"),
        (("build",), "is not of the form MODULE:FUNCTION"),
        (("tests.proof.loops:nothing",), "has no function nothing"),
        (("tests.proof.loops:build", "--train-step", "nothing"), "has no function nothing"),
        (("tests.proof.pair:neither", "--in-process"), "has to return (build, train_step)"),
        (("tests.proof.loops:build", "--steps", "5", "--kill-at", "5"), "has to be below --steps"),
    ],
)
def test_prove_of_something_else_says_what_is_wrong(command: Command, arguments: Any, text: str) -> None:
    """The error says what was expected, exit code 2."""
    code, _, err = command("prove", *arguments)
    assert code == 2
    assert text in " ".join(err.split())


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_help_fits_and_lists_every_command(command: Command) -> None:
    """Each command has a line, the exit codes are there."""
    code, out, _ = command("--help")
    assert code == 0
    for name in group.commands:
        assert f"\n  {name} " in out
        code, text, _ = (0, "", "") if name == "demo" else command(name, "--help")
        assert code == 0
        assert "\\b" not in text  # what keeps lines apart is no text
    assert "Exit codes" in out
    assert "..." not in out.split("Commands:")[1].split("Exit codes")[0]


@pytest.mark.parametrize(
    "arguments", [("list",), ("list", "/nowhere"), ("nonsense",), ("show", "/tmp"), ("prune", "/tmp")]
)
def test_wrong_usage_is_exit_code_2(command: Command, arguments: Any) -> None:
    """The error says which argument is wrong."""
    code, _, err = command(*arguments)
    assert code == 2
    assert "Error:" in err


def test_without_the_extra_the_message_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is exit code 2 with the line to type."""
    for name in [name for name in sys.modules if name.startswith("safeckpt.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["list", "."]) == 2
    assert 'pip install "safeckpt[cli]"' in capsys.readouterr().err


def test_demo_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """`safeckpt demo` gets its arguments and gives its exit code without click."""
    seen = []

    def demo(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    monkeypatch.setattr("safeckpt.demo.main", demo)
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["demo", "--fast"]) == 3
    assert seen == [["--fast"]]


def test_command_runs_as_a_module_and_into_a_closed_pipe(directory: Path) -> None:
    """`python -m safeckpt` works, and a reader that goes away makes no traceback."""
    root = str(Path(safeckpt.__file__).parents[1])
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "safeckpt", "list", str(directory), "--json"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    os.close(write_end)
    assert done.returncode != 0
    assert done.stderr == ""


# -- what others have written ------------------------------------------------------------------------------------------

# Copies to the clipboard, clears the screen, colours, sets the title; the C1 form of ESC [, DEL, and a text direction.
EVIL = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x1b[1;32mok\x1b]0;title\x07\x9b31m\x7f\u202e\udcff\r\n\tend"
HARMFUL = set(EVIL) - set("".join(one for one in EVIL if one.isprintable())) - {"\n"}


def _evil_tree(value: float) -> dict[str, Any]:
    return {f"name{EVIL}": {f"key{EVIL}": torch.full((2,), value), f"text{EVIL}": f"value{EVIL}{value}"}}


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory with two files full of escape sequences, a history of the same kind and a file of that name."""
    path = tmp_path / f"dir{EVIL}".replace("/", "")
    path.mkdir()
    # plain torch: what a file holds is not limited by what our own writer accepts.
    torch.save(_evil_tree(1.0), path / "a.pt")
    torch.save(_evil_tree(2.0), path / "b.pt")
    (path / "step-00000007.pt").write_bytes(b"cut")
    events = [{"time": f"t{EVIL}", "kind": f"k{EVIL}", "step": f"s{EVIL}", f"name{EVIL}": [f"v{EVIL}"]}]
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return path


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "."),
        ("list", ".", ".", "--sort", f"x{EVIL}"),
        ("list", ".", "--where", f"x{EVIL}=1"),
        ("log", "."),
        ("plot", ".", "-o", f"x{EVIL}"),
        ("latest", "."),
        ("best", ".", f"x{EVIL}"),
        ("show", "a.pt"),
        ("show", "a.pt", "--all"),
        ("show", "step-00000007.pt"),
        ("show", "."),
        ("verify", "a.pt", "step-00000007.pt"),
        ("verify", "."),
        ("diff", "a.pt", "b.pt", "--all"),
        ("diff", "a.pt", "step-00000007.pt"),
        ("prune", ".", "--keep-last", "1", "--dry-run"),
        ("prune", ".", "--keep-last", "1", "--yes", "--keep-best", f"x:{EVIL}"),
        ("extract", "a.pt", "model", "-o", "out.pt"),
        ("extract", "a.pt", f"name{EVIL}", "-o", "out.safetensors"),
        ("prove", f"train:{EVIL}"),
        ("prove", f"{EVIL}.py:build"),
        ("log", f"{EVIL}"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_escape_sequences_never_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], evil: Path, arguments: tuple[str, ...], as_json: bool
) -> None:
    """Names, keys, values, paths and histories come out escaped: tables, JSON, warnings and errors of every command."""
    files = {".", "a.pt", "b.pt", "step-00000007.pt", "out.pt", "out.safetensors"}
    words = [str(evil / word) if word in files else word for word in arguments]
    main([*words, "--json"] if as_json else words)
    out, err = capsys.readouterr()
    assert out + err
    assert not HARMFUL & set(out + err)
    if as_json and out:
        json.loads(out)


def test_printable_leaves_every_script_alone(command: Command, tmp_path: Path) -> None:
    """Letters, combining marks, spaces and emoji of all scripts are printed as they are."""
    name = "größe 模型 модель نموذج a\u0301\u3000😀"
    safeckpt.save({name: torch.ones(1)}, tmp_path / "a.pt")
    assert name in command.json("show", tmp_path / "a.pt")["components"][0]["name"]
    assert "größe 模型" in command("show", tmp_path / "a.pt")[1]


def test_json_of_escaped_names_reads_back_as_they_are(command: Command, evil: Path) -> None:
    """What is escaped in JSON is escaped as JSON does it: a program gets the name that is in the file."""
    found = command.json("show", evil / "a.pt")
    assert found["components"][0]["name"] == f"name{EVIL}"
