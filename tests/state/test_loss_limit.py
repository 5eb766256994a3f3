"""The limit of a loss: which median, when, and that it comes back from a checkpoint as it was."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt import TimesMedian
from safeckpt.state.loss import Loss
from safeckpt.state.loss_limit import LossLimit


def feed(limit: LossLimit, losses: list[float], first: int = 1) -> list[int]:
    """Give it losses as a run does, and return the steps that it refuses."""
    refused = []
    for step, value in enumerate(losses, start=first):
        loss = Loss.read(value)
        if limit.spike(step, loss) is not None:
            refused.append(step)
        else:
            limit.add(step, loss)
    return refused


@pytest.mark.parametrize("steps", [2, 3, 10, 25])
def test_median_is_that_of_the_last_losses_that_were_not_refused(steps: int) -> None:
    """Compared with one that sorts them all again each time."""
    draw = random.Random(steps)
    losses = [draw.choice([1.0, 2.0, draw.random(), 50 * draw.random()]) for _ in range(400)]
    expected, kept = [], []
    for step, loss in enumerate(losses, start=1):
        if len(kept) >= steps and loss > 3 * statistics.median(kept[-steps:]):
            expected.append(step)
        else:
            kept.append(loss)
    assert feed(LossLimit(TimesMedian(3, steps)), losses) == expected
    assert expected


def test_captured_limit_decides_as_the_one_that_went_on() -> None:
    """Every loss of the window comes back bit for bit, at each point of a run, also before it is full."""
    draw = random.Random(0)
    losses = [draw.expovariate(1) for _ in range(120)]
    for cut in (0, 1, 19, 20, 21, 90):
        one, other = LossLimit(TimesMedian(2, 20)), LossLimit(TimesMedian(2, 20))
        feed(one, losses[:cut])
        other.restore(one.capture())
        assert feed(one, losses[cut:], cut + 1) == feed(other, losses[cut:], cut + 1)


def test_state_is_as_large_as_the_window() -> None:
    """However long the run is."""
    limit = LossLimit(TimesMedian(3, 7))
    feed(limit, [1.0] * 500)
    captured = limit.capture()
    assert captured is not None
    assert captured["steps"].tolist() == list(range(494, 501))
    assert captured["losses"].dtype == torch.float64
    assert len(captured["losses"]) == 7


def test_shorter_window_takes_the_newest_losses() -> None:
    """A limit that was changed begins with what there is."""
    long, short = LossLimit(TimesMedian(3, 10)), LossLimit(TimesMedian(3, 4))
    feed(long, [float(value) for value in range(1, 11)])
    short.restore(long.capture())
    captured = short.capture()
    assert captured is not None
    assert captured["losses"].tolist() == [7.0, 8.0, 9.0, 10.0]


def test_number_needs_no_state() -> None:
    """And refuses from the first step on."""
    limit = LossLimit(5)
    assert limit.capture() is None
    assert feed(limit, [5.0, 5.1, 4.0]) == [2]


@pytest.mark.parametrize("losses", [[0.0] * 5, [-1.0] * 5])
def test_median_that_is_not_positive_limits_nothing(losses: list[float]) -> None:
    """A multiple of it means nothing."""
    assert feed(LossLimit(TimesMedian(2, 5)), [*losses, 100.0]) == []


def test_largest_of_several_numbers_counts() -> None:
    """A spike in one micro-batch is one; a step without a loss is passed over."""
    limit = LossLimit(5)
    assert limit.spike(1, Loss.read({"a": 1.0, "b": [2.0, 3.0]})) is None
    spike = limit.spike(1, Loss.read({"a": 1.0, "b": torch.tensor([2.0, 6.0])}))
    assert spike is not None
    assert spike.loss == 6.0
    for nothing in (None, {}, []):
        assert limit.spike(1, Loss.read(nothing)) is None


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: safeckpt.Guard(loss_above="3"), TypeError, "loss_above must be a number, a TimesMedian or None"),
        (lambda: safeckpt.Guard(loss_above=True), TypeError, "loss_above"),
        (lambda: safeckpt.Guard(loss_above=math.nan), ValueError, "finite"),
        (lambda: safeckpt.Guard(loss_above=math.inf), ValueError, "finite"),
        (lambda: TimesMedian(1), ValueError, "factor must be more than 1"),
        (lambda: TimesMedian(math.inf), ValueError, "factor"),
        (lambda: TimesMedian("3"), TypeError, "factor"),
        (lambda: TimesMedian(3, 1), ValueError, "steps must be an int, 2 or more"),
        (lambda: TimesMedian(3, 100_000), ValueError, "10,000 or less"),
        (lambda: TimesMedian(3, 2.5), TypeError, "steps"),
    ],
)
def test_limit_that_is_none_is_refused(make: Any, error: type[Exception], text: str) -> None:
    """With what is allowed."""
    with pytest.raises(error, match=text):
        make()
