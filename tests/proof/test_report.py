"""The report: text, JSON, picture, numbers."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path

import pytest

import safeckpt
from safeckpt.proof.compare import first_index, relative_difference
from tests.proof import loops

prove = functools.partial(safeckpt.prove_resume, loops.build, loops.train_step, in_process=True, repeats=1)


@pytest.fixture(scope="module")
def wrong() -> safeckpt.ResumeReport:
    return prove(restore=functools.partial(loops.restore_without, name="optimizer"))


@pytest.fixture(scope="module")
def right() -> safeckpt.ResumeReport:
    return prove(ablations=True)


def test_text_fits_on_a_screen(wrong: safeckpt.ResumeReport, right: safeckpt.ResumeReport) -> None:
    """A report is at most 24 lines of 80 characters."""
    for report in (wrong, right):
        lines = str(report).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80


def test_text_says_step_and_both_values(wrong: safeckpt.ResumeReport) -> None:
    """The first disagreement is there with both losses, in decimal and exactly."""
    text = str(wrong)
    assert "First disagreement at index 1 of 10 (steps 11 to 20)" in text
    for loss in (wrong.straight[11], wrong.resumed[1]):
        assert repr(loss) in text
        assert loss.hex() in text


def test_text_of_an_exact_report_says_what_was_compared(right: safeckpt.ResumeReport) -> None:
    """The number of losses, the components, and what the window can see are there."""
    text = " ".join(str(right).split())
    assert text.startswith("Resume: EXACT. 10 of 10 resumed losses equal (steps 11 to 20).")
    assert "model, optimizer, scheduler, scaler, average, loader, noise, counters, rng" in text
    assert "optimizer at index 1" in text


def test_ladder_says_which_tolerances_would_have_passed(wrong: safeckpt.ResumeReport) -> None:
    """A tolerance passes when every loss is within it, as in allclose."""
    largest = wrong.largest_relative_difference
    assert largest == max(abs(a - b) / abs(a) for a, b in zip(wrong.straight[10:], wrong.resumed, strict=True))
    assert wrong.tolerances_passed == [one for one in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) if largest <= one]
    assert f"{largest:.3g}" in str(wrong)
    below = [one for one in wrong.tolerances_passed if one < 1]  # one that is as large as the losses proves nothing
    told = f"a tolerance of {below[0]:g} would have let it pass" if below else "no tolerance below 1 lets it pass"
    assert told in " ".join(str(wrong).split())


def test_exact_report_passes_every_tolerance(right: safeckpt.ResumeReport) -> None:
    """No difference is within all of them."""
    assert right.largest_relative_difference == 0
    assert len(right.tolerances_passed) == 7
    assert right.differences == []


@pytest.mark.parametrize(
    ("straight", "resumed", "expected"),
    [
        (2.0, 3.0, 0.5),
        (-2.0, 2.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, 1.0, math.inf),
        (0.0, 1e-30, math.inf),
        (0.0, -0.0, 0.0),
        ({"a": 1.0, "b": [2.0, 4.0]}, {"a": 1.0, "b": [2.0, 5.0]}, 0.25),
        ([1.0], [1.0, 2.0], math.inf),
    ],
)
def test_relative_difference_has_a_value_for_everything(straight: object, resumed: object, expected: float) -> None:
    """Zeros, NaN, infinities and losses with several values are compared too."""
    assert relative_difference(straight, resumed) == expected


def test_negative_zero_is_another_loss() -> None:
    """Equal as numbers is not enough: the bits have to be the same."""
    assert first_index([1.0, 0.0], [1.0, -0.0]) == 1
    assert first_index([math.nan, 1.0], [math.nan, 1.0]) is None
    assert first_index([0.1 + 0.2], [0.3]) == 0


def test_json_has_every_bit(wrong: safeckpt.ResumeReport) -> None:
    """JSON readers of any kind get the losses back, and what is to blame."""
    found = json.loads(wrong.to_json(), parse_constant=pytest.fail)
    assert [float.fromhex(one) for (one,) in found["resumed_hex"]] == wrong.resumed
    assert found["first_divergence"] == 1
    assert found["diverged_component"] == "optimizer"
    assert found["culprit"]["name"].startswith("optimizer.")
    assert found["steps_compared"] == 10
    assert found["environment"]["torch"]


def test_plot_is_a_picture(tmp_path: Path, wrong: safeckpt.ResumeReport, right: safeckpt.ResumeReport) -> None:
    """Both kinds of report can be drawn, in the format that the name asks for."""
    pytest.importorskip("matplotlib")
    wrong.plot(tmp_path / "wrong.png")
    right.plot(tmp_path / "right.svg")
    assert (tmp_path / "wrong.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "right.svg").read_bytes()


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, wrong: safeckpt.ResumeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the extra, and no file is made."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "safeckpt\[plot\]"'):
        wrong.plot(tmp_path / "wrong.png")
    assert list(tmp_path.iterdir()) == []
