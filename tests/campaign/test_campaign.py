"""The fast part of the campaign: each class of faults, tried a little on every change."""

import pytest

from tests.campaign.outcome import CLASSES, run

SEED = 20


QUICK = ("machine",)  # enough for a plain run to see that a class is red when it has to be


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]
)
def test_nothing_is_lost_and_nothing_wrong_is_let_in(name):
    """Every fault of the class leaves the old or the new checkpoint, or is named."""
    outcome = run(name, "fast", SEED)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.tried > 0
    assert not outcome.lost, outcome.lost[:5]
    assert not outcome.undetected, outcome.undetected[:5]
