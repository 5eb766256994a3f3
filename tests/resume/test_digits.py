"""A real run, really killed, again and again: it comes out as if nothing had happened."""

import os
import random
import signal
import time

import pytest

from tests.children import Child, run
from tests.digits import Digits
from tests.resume.digits import STEPS, recorded, train

KILLS = 20


@pytest.mark.parametrize(
    ("workers", "async_save", "kills"),
    [
        pytest.param(0, False, 4, id="0 workers, a few kills"),
        pytest.param(0, False, KILLS, id="0 workers", marks=pytest.mark.slow),
        pytest.param(2, False, KILLS, id="2 workers", marks=pytest.mark.slow),
        pytest.param(0, True, KILLS, id="async", marks=pytest.mark.slow),
    ],
)
def test_digits_killed_again_and_again_end_bit_equal(tmp_path, workers, async_save, kills):
    """Every loss and the final state of a run killed at random moments equal those of the run never killed."""
    digits = tmp_path / "digits.pt"
    Digits.download(digits)
    straight = run(train, digits, None, tmp_path / "straight.jsonl", 0)
    expected = [loss for _, loss in recorded(tmp_path / "straight.jsonl")]
    assert len(expected) == STEPS
    losses = tmp_path / "killed.jsonl"
    moments = random.Random(workers)
    for _ in range(kills):
        enough = len(recorded(losses)) + moments.randint(1, 8)
        with Child(train, digits, tmp_path / "run", losses, workers, async_save=async_save, talks=False) as child:
            while not losses.exists() or losses.read_bytes().count(b"\n") < enough:
                assert not child.connection.poll(0.005), child.ended()
            time.sleep(moments.random() * 0.02)  # anywhere in the step, the save or the prune that follows
            os.killpg(child.pid, signal.SIGKILL)
    final = run(train, digits, tmp_path / "run", losses, workers, async_save=async_save)

    assert final.error is None
    computed = recorded(losses)
    assert len(computed) >= STEPS + kills // 2, "hardly any step was computed twice: the kills came too late"
    assert [(step, loss) for step, loss in computed if loss != expected[step - 1]] == []
    assert {step for step, _ in computed} == set(range(1, STEPS + 1))
    assert final.value == straight.value
