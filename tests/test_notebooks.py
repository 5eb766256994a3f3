"""What a notebook shows of a checkpoint, of a proof and of a replay."""

from __future__ import annotations

import datetime as dt
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt.proof.compare import Findings
from safeckpt.proof.report import KillReport
from safeckpt.run.replay import ReplayMismatch

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e"


class Reader(HTMLParser):
    """Checks that tags are closed in their order, and keeps tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.styles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.styles += [value for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def checkpoint_of(text: str = "wide", notes: int = 1) -> safeckpt.Checkpoint:
    return safeckpt.Checkpoint(
        step=1200, path=Path(f"runs/{text}/step-00001200.pt"), loss={"recon": 0.25, "kl": 0.125}, metrics={text: 0.5},
        created_at=dt.datetime(2026, 12, 1, 9, 30, tzinfo=dt.UTC), size_bytes=1_234_000, run_id="r1",
        notes={f"{text}{index}": text for index in range(notes)},
    )  # fmt: skip


def proof_of(*, exact: bool, text: str = "model") -> safeckpt.ResumeReport:
    straight = [1.0, 0.5, 0.25, 0.125]
    kill = KillReport(
        2, straight[2:], straight[2:] if exact else [0.25, 0.126], Findings(2, None if exact else 1, [], [], None)
    )
    return safeckpt.ResumeReport(steps=4, straight=straight, kills=[kill], components=[text])


def replay_of(*, exact: bool, text: str = "torch: 2.13 -> 2.14") -> safeckpt.ReplayReport:
    differs = None if exact else ReplayMismatch(7, (1.5).hex(), (1.25).hex(), (text,))
    return safeckpt.ReplayReport(5, 3, 3 if exact else 2, finished=True, mismatch=differs)


SHOWN = {
    "checkpoint": checkpoint_of(), "many notes": checkpoint_of(notes=200), "hostile checkpoint": checkpoint_of(HOSTILE),
    "exact proof": proof_of(exact=True), "wrong proof": proof_of(exact=False),
    "hostile proof": proof_of(exact=False, text=HOSTILE), "exact replay": replay_of(exact=True),
    "wrong replay": replay_of(exact=False), "hostile replay": replay_of(exact=False, text=HOSTILE),
    "empty replay": safeckpt.ReplayReport(5, 0, 0, finished=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_html_is_small_escaped_and_without_scripts(name: str) -> None:
    """Tables alone, nothing that runs or loads; what others have written is text; colours only on marks."""
    html = SHOWN[name]._repr_html_()
    found = Reader(html)
    assert len(html) < 8000
    assert found.tags <= {"div", "b", "span", "table", "tr", "th", "td", "details", "summary", "pre"}
    assert found.attributes <= {"style"}
    assert not re.search("background|url", " ".join(found.styles))
    assert "\x1b" not in html
    assert "\u202e" not in html
    if name.startswith("hostile"):
        assert "<script>alert(1)</script>" in found.text


def test_checkpoint_is_shown_with_what_one_asks_first() -> None:
    """Step, path, time, size, loss, metrics, notes; of very many notes how many there are."""
    text = Reader(checkpoint_of()._repr_html_()).text
    for part in ("Checkpoint of step 1200", "runs/wide/step-00001200.pt", "2026-12-01 09:30:00 UTC", "1.23 MB",
                 "recon 0.25, kl 0.125", "metric wide\n0.5", "note wide0\nwide", "r1"):  # fmt: skip
        assert part in text
    assert "more" in Reader(checkpoint_of(notes=200)._repr_html_()).text
    pending = safeckpt.Checkpoint(
        step=1, path=Path("a.pt"), loss=None, metrics={}, created_at=dt.datetime.now(dt.UTC), size_bytes=0, run_id="r"
    )
    assert not {"size", "loss"} & set(Reader(pending._repr_html_()).text.split())


def test_reports_say_first_whether_it_is_the_same_run() -> None:
    """The sentence of the text, a mark for good or bad, and the numbers that differ."""
    assert Reader(proof_of(exact=True)._repr_html_()).text.startswith("✔\n \nResume: EXACT. 2 of 2 resumed losses")
    wrong = Reader(proof_of(exact=False)._repr_html_()).text
    assert wrong.startswith("✘\n \nResume: NOT EXACT. First disagreement at index 1 of 2")
    assert str(proof_of(exact=False)) in wrong
    assert Reader(replay_of(exact=True)._repr_html_()).text.startswith("✔\n \nresume verified: 3 of 3")
    differs = Reader(replay_of(exact=False)._repr_html_()).text
    assert differs.startswith("✘\n \nresume differs: 1 of 3")
    for part in ("step 7", "1.5 (0x1.8000000000000p+0)", "1.25 (0x1.4000000000000p+0)", "torch: 2.13 -> 2.14"):
        assert part in differs
    assert not set("✔✘") & set(Reader(SHOWN["empty replay"]._repr_html_()).text)
