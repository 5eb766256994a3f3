"""Which checkpoints may be deleted."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from safeckpt.store import Aside, Best, KeepBest, KeepEvery, KeepLast, KeepPeriod, asides_to_prune, to_prune

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safeckpt.store import Policy


class Files:
    """Files of which some are damaged; remembers which were looked at."""

    def __init__(self, damaged: Sequence[int] = ()) -> None:
        self.damaged = damaged
        self.asked: list[int] = []

    def is_good(self, step: int) -> bool:
        self.asked.append(step)
        return step not in self.damaged


def plan(
    steps: Sequence[int], *policies: Policy, damaged: Sequence[int] = (), protected: Sequence[int] = ()
) -> list[int]:
    return to_prune(steps, policies, is_good=Files(damaged).is_good, protected=protected)


def keep_best(scores: dict[int, float | None], mode: str = "min", count: int = 1) -> KeepBest:
    return KeepBest(Best("loss", mode, count), scores.get)  # type: ignore[arg-type]


def test_keep_last_prunes_the_oldest_first() -> None:
    """Of five steps with two kept the three oldest go, oldest first."""
    assert plan([1, 2, 3, 10, 200], KeepLast(2)) == [1, 2, 3]


@pytest.mark.parametrize("steps", [[], [5], [5, 6], [5, 6, 7]])
def test_keep_last_of_few_prunes_nothing(steps: list[int]) -> None:
    """As long as there are no more files than are kept, none is looked at and none goes."""
    files = Files()
    assert to_prune(steps, [KeepLast(3)], is_good=files.is_good) == []
    assert files.asked == []


def test_damaged_files_do_not_count_and_stay() -> None:
    """Damaged files take no place among the kept ones and are never pruned."""
    assert plan([1, 2, 3, 4, 5, 6], KeepLast(2), damaged=[2, 5, 6]) == [1]


def test_all_damaged_prunes_nothing() -> None:
    """Where no file is good nothing goes."""
    assert plan([1, 2, 3, 4], KeepLast(1), damaged=[1, 2, 3, 4]) == []


def test_newest_is_kept_without_a_policy() -> None:
    """The newest step is no candidate, whatever the policies say, and a damaged newest does not replace a good one."""
    assert plan([1, 2, 3]) == [1, 2]
    assert plan([1, 2, 3], damaged=[3]) == [1]


def test_protected_steps_stay() -> None:
    """A step that the caller needs is not pruned."""
    assert plan([1, 2, 3, 4], KeepLast(1), protected=[2]) == [1, 3]


def test_keep_every_keeps_multiples_for_good() -> None:
    """Multiples of the interval stay and take no place among the last ones."""
    assert plan([0, 5, 10, 15, 20, 25, 30, 35], KeepLast(2), KeepEvery(10)) == [5, 15, 25]


def test_keep_best_keeps_the_best() -> None:
    """The best of all steps stays however old it is."""
    scores = {1: 0.5, 2: 0.1, 3: 0.3, 4: 0.4, 5: 0.9}
    assert plan([1, 2, 3, 4, 5], KeepLast(1), keep_best(scores)) == [1, 3, 4]
    assert plan([1, 2, 3, 4, 5], KeepLast(1), keep_best(scores, "max")) == [1, 2, 3, 4]
    assert plan([1, 2, 3, 4, 5], KeepLast(1), keep_best(scores, count=2)) == [1, 4]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_metric_that_is_not_finite_is_never_best(bad: float | None, mode: str) -> None:
    """A step without a finite value is never kept as best, in either direction."""
    assert plan([1, 2, 3], KeepLast(1), keep_best({1: bad, 2: 7.0, 3: bad}, mode)) == [1]


def test_equal_metric_keeps_the_earlier() -> None:
    """A value that was only reached again does not replace the first checkpoint that reached it."""
    assert plan([1, 2, 3, 4], KeepLast(1), keep_best({1: 1.0, 2: 0.0, 3: 0.0, 4: 0.0})) == [1, 3]


def test_damaged_best_gives_way_to_the_next() -> None:
    """A damaged file with the best value takes no place among the best and stays."""
    assert plan([1, 2, 3, 4], KeepLast(1), keep_best({1: 0.2, 2: 0.1, 3: 0.3, 4: 0.4}), damaged=[2]) == [3]


def test_only_files_that_decide_are_looked_at() -> None:
    """In the steady state of K+1 files each is asked at most once, and what a policy keeps by number never."""
    files = Files()
    steps = [*range(0, 100_000, 10), 100_001, 100_002, 100_003]
    assert to_prune(steps, [KeepEvery(10), KeepLast(2)], is_good=files.is_good) == [100_001]
    assert sorted(files.asked) == [100_001, 100_002, 100_003]


def test_files_are_looked_at_newest_first() -> None:
    """The newest files are looked at before the older ones."""
    files = Files()
    assert to_prune([1, 2, 3, 4, 5], [KeepLast(2)], is_good=files.is_good) == [1, 2, 3]
    assert files.asked == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: KeepLast(0), ValueError),
        (lambda: KeepLast(-1), ValueError),
        (lambda: KeepLast(True), TypeError),
        (lambda: KeepLast(1.0), TypeError),
        (lambda: KeepEvery(0), ValueError),
        (lambda: KeepEvery("1"), TypeError),
        (lambda: Best("loss", count=0), ValueError),
        (lambda: Best("loss", count=1.5), TypeError),
        (lambda: Best("loss", mode="mini"), ValueError),
        (lambda: Best(""), ValueError),
        (lambda: Best(3), TypeError),
    ],
)
def test_nonsense_is_refused_at_once(make: object, error: type[Exception]) -> None:
    """A policy that makes no sense cannot be built."""
    with pytest.raises(error, match="must be"):
        make()  # type: ignore[operator]


def test_best_cannot_be_changed() -> None:
    """A description of the best is fixed once it is made."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Best("loss").mode = "max"  # type: ignore[misc]


def prune_asides(asides: Sequence[int], steps: Sequence[int], keep_last: int, damaged: Sequence[int] = ()) -> list[int]:
    files = [Aside(step, Path(f"aside-{step:08d}.1.pt")) for step in asides]
    good = Files(damaged).is_good
    gone = asides_to_prune(
        files, steps, keep_last=keep_last, is_good=good, is_good_aside=lambda aside: aside.step != 13
    )
    return [aside.step for aside in gone]


def test_aside_goes_once_the_timeline_has_outrun_it() -> None:
    """A set-aside checkpoint goes when keep_last good ones have a higher step, and not one earlier."""
    assert prune_asides([12, 14], [10, 11, 12], 2) == []
    assert prune_asides([12, 14], [10, 12, 14], 2) == []
    assert prune_asides([12, 14], [12, 13, 14], 2) == [12]
    assert prune_asides([12, 14], [14, 15, 16], 2) == [12, 14]
    assert prune_asides([11, 12], [12, 13], 2) == [11]


def test_damaged_files_do_not_outrun_an_aside() -> None:
    """Damaged checkpoints of the new timeline do not count, and a damaged set-aside one stays."""
    assert prune_asides([12], [13, 14, 15], 2, damaged=[15]) == [12]
    assert prune_asides([12], [13, 14, 15], 2, damaged=[14, 15]) == []
    assert prune_asides([12], [13, 14, 15], 2, damaged=[13, 14, 15]) == []
    assert prune_asides([12, 13], [20, 21], 2) == [12]


def test_no_asides_looks_at_no_file() -> None:
    """Without set-aside files, or before the timeline can have outrun them, no file is looked at."""

    def never(_: object) -> bool:
        raise AssertionError

    aside = Aside(12, Path("aside-00000012.1.pt"))
    assert asides_to_prune([], [1, 2, 3], keep_last=1, is_good=never, is_good_aside=never) == []
    assert asides_to_prune([aside], [10, 11, 12, 13], keep_last=2, is_good=never, is_good_aside=never) == []


HOUR = dt.timedelta(hours=1)


def at(hours: float) -> dt.datetime:
    return dt.datetime(2026, 5, 1, tzinfo=dt.UTC) + hours * HOUR


@pytest.mark.parametrize(
    ("hours", "bad", "kept"),
    [
        ({}, (), []),
        ({1: 0.0, 2: 0.5, 3: 0.999, 4: 1.0, 5: 1.2, 6: 3.0}, (), [3, 5, 6]),
        ({1: 0.0, 2: 0.5, 3: 0.9, 4: 1.5}, (3,), [2, 4]),
        ({1: 0.0, 2: 0.5}, (1, 2), []),
        ({1: 0.0, 2: None, 3: 5.0}, (), [1, 3]),
        ({1: -3.0, 2: 2.0, 3: 0.1}, (), [1, 2, 3]),  # clocks that went back decide nothing but the period
    ],
)
def test_newest_good_step_of_each_period_is_kept(
    hours: dict[int, float | None], bad: tuple[int, ...], kept: list[int]
) -> None:
    """Of each hour the newest good checkpoint stays, by the time in its file; one without a time is not chosen."""
    times = {step: None if hour is None else at(hour) for step, hour in hours.items()}
    policy = KeepPeriod(HOUR, times.__getitem__)
    assert sorted(policy.keeps(sorted(hours), lambda step: step not in bad)) == kept


def test_lone_step_of_a_period_is_not_read() -> None:
    """A thousand hours of history cost no reading at each save: only steps that share a period are looked at."""
    asked: list[int] = []

    def is_good(step: int) -> bool:
        asked.append(step)
        return True

    steps = range(1002)
    KeepPeriod(HOUR, lambda step: at(min(step, 1000))).keeps(steps, is_good)
    assert asked == [1001]


@pytest.mark.parametrize("period", [dt.timedelta(0), dt.timedelta(seconds=-1)])
def test_period_has_to_be_positive(period: dt.timedelta) -> None:
    """Nothing is the newest of no time."""
    with pytest.raises(ValueError, match="keep_every must be positive"):
        KeepPeriod(period, lambda _: None)
