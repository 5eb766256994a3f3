"""`safeckpt plot`: what the picture is made of, and that there is one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safeckpt
from safeckpt.cli.history import History, Return, read_history
from safeckpt.store import CheckpointDirectory
from tests.training import Run

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from safeckpt.cli import drawing, main


def train(run: Run, manager: safeckpt.CheckpointManager, stop: int) -> None:
    for step in range(manager.step + 1, stop + 1):
        manager.end_step(step, loss=run.step())


def manager_of(run: Run, path: Path, **options: Any) -> safeckpt.CheckpointManager:
    return safeckpt.CheckpointManager(path, run.components, save_every=5, save_on_exit=False, keep_last=2, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that restarted at 5 after it had come to 8, was refused at 13, went back to 10, and came to 22."""
    path = tmp_path_factory.mktemp("runs") / "run"
    first, second = Run(), Run()
    with manager_of(first, path) as manager:
        train(first, manager, 8)
    with manager_of(second, path) as manager:
        manager.restore()
        train(second, manager, 12)
        with pytest.raises(safeckpt.NonFiniteError):
            manager.end_step(13, loss=float("nan"))
        manager.rollback(changed=True)
        train(second, manager, 22)
    return path


def drawn(directory: Path, *more: str) -> tuple[Any, list[str]]:
    """Draw a directory; return the figure, and the texts of its legend."""
    figure = drawing._figure([read_history(str(one)) for one in (directory, *more)])
    return figure, [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_history_has_what_happened(written: Path) -> None:
    """Saves and what is left of them, refusals, both returns, the replay, and the losses that a rollback left."""
    history = read_history(str(written))
    assert (history.saved, history.present) == ({5, 10, 15, 20}, {15, 20})
    assert history.refused == {13}
    assert history.returns == [Return(5, replayed_to=8), Return(10, failed_step=13)]
    losses = history.losses["loss"]
    # What a rollback makes has no checkpoint below it, so it is on record from the next one on.
    assert list(losses) == [*range(1, 11), *range(16, 23)]
    assert [list(one["loss"]) for one in history.left] == [[11, 12]]
    assert list(history.saved_losses["loss"]) == [15]
    events = json.loads((written / "events.jsonl").read_text().splitlines()[0])
    assert losses[5] == events["loss"]


def test_picture_has_the_losses_and_a_row_for_each_kind_of_event(written: Path) -> None:
    """Every loss is where it belongs, what is not on record is a gap, and the legend says what is what."""
    figure, legend = drawn(written)
    losses, events = figure.axes
    curve = next(line for line in losses.lines if len(line.get_xdata()) > 10)
    steps = curve.get_xdata()
    known = {step: loss for step, loss in zip(steps, curve.get_ydata(), strict=True) if not np.isnan(step)}
    assert known == read_history(str(written)).losses["loss"]
    assert np.isnan(steps[10])
    assert [label.get_text() for label in events.get_yticklabels()] == ["saved", "refused", "rolled back", "restored"]
    assert legend == [
        "loss of a timeline that was left",
        "loss at a save, where no others are on record",
        "saved, and there",
        "saved, and gone since",
        "replayed, all losses equal",
    ]
    assert losses.get_ylabel() == "loss"
    assert events.get_xlabel() == "step (optimizer steps completed)"


def test_nothing_in_the_picture_overlaps_or_is_cut(written: Path, tmp_path: Path) -> None:
    """Title, panels, labels and legend keep apart and inside, also with many runs of long names."""
    places = [written, *(CheckpointDirectory(tmp_path / f"{'x' * 90}-{index}").path for index in range(14))]
    for place in places[1:]:
        place.mkdir()
        (place / "events.jsonl").write_text('{"kind": "saved", "step": 7, "loss": 0.5}\n')
    for count in (1, 3, 15):
        figure, legend = drawn(*places[:count])
        figure.savefig(tmp_path / "a.png")
        boxes = [figure.legends[0].get_window_extent(), *(one.get_tightbbox() for one in figure.axes)]
        boxes.append(figure._suptitle.get_window_extent())
        assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])
        assert all(box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1 for box in boxes)
        assert len(figure.axes) == (2 if count <= drawing._MOST_LANES else 1)
        assert len(set(legend)) == len(legend)


def test_plot_prints_its_path_and_what_it_drew(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a display: a picture in the current directory, the kind that the name asks for, and numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    assert main(["plot", str(written)]) == 0
    assert capsys.readouterr().out.startswith("safeckpt-run.png\n")
    assert Path("safeckpt-run.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(written), str(written), "-o", "a.svg", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == "a.svg"
    assert "<svg" in Path("a.svg").read_text()
    assert found["runs"][0] == {
        "directory": str(written), "first_step": 1, "last_step": 22, "losses": 17,
        "saved": 4, "refused": 1, "rolled_back": 1, "restored": 1,
    }  # fmt: skip


def test_plot_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty directory is a sentence and exit code 1; an ending that is no picture, or no directory, is a 2."""
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "a.png")]) == 1
    assert "nothing to draw" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
    for command in (["plot", str(tmp_path), "-o"], ["prove", "nowhere.py:build", "--plot"]):
        assert main([*command, str(tmp_path / "a.txt")]) == 2
        assert "has to end in .png, .svg or .pdf" in " ".join(capsys.readouterr().err.split())
    assert main(["plot", str(tmp_path / "none")]) == 2


def test_plot_without_matplotlib_says_what_to_install(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the extra, exit code 2, and no file is made."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", str(written), "-o", str(tmp_path / "a.png")]) == 2
    assert 'pip install "safeckpt[plot]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("losses", "names"),
    [
        ([{"recon": 1.0, "kl": 0.5}, {"recon": 0.5, "kl": 0.25}], ["recon", "kl"]),
        ([[1.0, 0.5], [0.5, 0.25]], ["0", "1"]),
        ([[float(index) for index in range(20)]] * 2, [str(index) for index in range(20)]),
        ([None, None], []),
    ],
)
def test_loss_of_several_numbers_is_several_curves(tmp_path: Path, losses: list[Any], names: list[str]) -> None:
    """They have the names of the loss; of very many, of which the record has a digest, those at the saves are there."""
    run = Run()
    with safeckpt.CheckpointManager(tmp_path / "a", run.components, save_every=1) as manager:
        for step, loss in enumerate(losses, start=1):
            manager.end_step(step, loss=loss)
    history = read_history(str(tmp_path / "a"))
    assert list({**history.losses, **history.saved_losses}) == names
    _, legend = drawn(tmp_path / "a")
    assert legend[: len(names)] == names[:6] or len(names) > 6
    drawn(tmp_path / "a", str(tmp_path / "a"))[0].savefig(tmp_path / "a.png")


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """A formula, an underscore at the start, an escape sequence: no error, no warning, nothing left out."""
    for name in (r"$\frac{1$", "_hidden", "\x1b[31m", "a_b^c", "x" * 200):
        place = tmp_path / name
        place.mkdir()
        (place / "events.jsonl").write_text('{"kind": "saved", "step": 7, "loss": {"$a_{": 1.5, "_b": 2}}\n')
    figure, legend = drawn(*sorted(tmp_path.iterdir()))
    figure.savefig(tmp_path / "a.png")
    assert len([text for text in legend if "..." in text or str(tmp_path) in text]) == 5
    one, legend = drawn(tmp_path / "_hidden")
    one.savefig(tmp_path / "a.png")
    assert len(legend) == 4


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "saved", "step": "7"}, {"kind": "saved", "step": -1}, {"kind": "saved", "step": 10**400},
        {"kind": "saved", "step": True}, {"kind": "saved", "step": 7, "loss": {"a": [{"b": "x"}]}}, {"step": 7},
        {"kind": "rolled_back", "step": 1, "failed_step": None}, {"kind": "replay_verified", "step": 1, "compared": 2},
        {"kind": ["saved"], "step": 7}, {"kind": "saved", "step": 7, "loss": 10**400},
    ],
    ids=str,
)  # fmt: skip
def test_event_of_another_hand_is_no_error(tmp_path: Path, event: dict[str, Any]) -> None:
    """Whatever stands in a history, there is a picture of the rest."""
    lines = [{"kind": "saved", "step": 2, "loss": "nan"}, event]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    drawn(tmp_path)[0].savefig(tmp_path / "a.png")


def test_picture_of_a_million_steps_has_few_points_and_keeps_what_stands_out(tmp_path: Path) -> None:
    """A few points a pixel are drawn, among them the one loss that is far from the others."""
    files = CheckpointDirectory(tmp_path)
    events = [{"kind": "saved", "step": step, "loss": 2e6 / step} for step in range(100, 10**6 + 1, 100)]
    events += [{"kind": "restored", "step": step} for step in range(0, 10**6, 1000)]
    (files.path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    kept = range(10**6 - 50_000, 10**6 + 1)
    files.losses.append((step, (9.0 if step == 987_654 else 1.0 + step % 2).hex()) for step in kept)
    figure, legend = drawn(tmp_path)
    points = sum(len(line.get_xdata()) for panel in figure.axes for line in panel.lines)
    assert points < 10 * drawing._PIXELS
    bands = [path for collection in figure.axes[0].collections for path in collection.get_paths()]
    high = max(float(path.vertices[:, 1][path.vertices[:, 0] > 960_000].max(initial=0)) for path in bands)
    assert high == 9.0
    assert "smallest to largest loss in 1,111 steps, and the mean" in legend


def test_runs_of_one_picture_look_alike(tmp_path: Path) -> None:
    """Each loss of short runs is a dot, of none where one is long; a loss that stands alone is one in any case."""

    def dots(*lengths: int) -> list[int]:
        figure = drawing._figure(
            [
                History(f"run {length}", losses={"loss": {step: 1.0 / step for step in range(1, length + 1)}})
                for length in lengths
            ]
        )
        lines = [line for line in figure.axes[0].lines if len(line.get_xdata())]
        return sorted(len(line.get_xdata()) for line in lines if line.get_marker() == ".")

    assert dots(70, 80) == [70, 80]
    assert dots(70, 81) == []
    assert dots(1, 81) == [1]
