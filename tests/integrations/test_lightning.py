"""Lightning: killed anywhere, the run that resumes is the same run."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason='needs the extra: pip install "safeckpt[lightning]"')

from tests import children
from tests.integrations import harness
from tests.integrations.harness import PLACES, Place
from tests.integrations.lightning_runs import Carrying, Manual, Several, train

children.preload("tests.integrations.lightning_runs")

# What a trainer can be told, each with a save at every second step.
MODES = {
    "asynchronous": {"safe": {"async_save": True}},
    "accumulation": {"accumulate_grad_batches": 2, "save_every": 1},
    "accumulation over a border": {"accumulate_grad_batches": 4, "save_every": 1, "gradient_clip_val": 0.5},
    "validation every 2 batches": {"val_check_interval": 2, "save_every": 1},
    "validation every 4 batches": {"val_check_interval": 4, "check_val_every_n_epoch": None, "save_every": 1},
    "validation every 2 epochs": {"check_val_every_n_epoch": 2},
    "plateau by epoch": {"model": {"plateau": "epoch"}},
    "plateau by step": {"model": {"plateau": "step"}, "val_check_interval": 3, "save_every": 1},
    "by hand": {"kind": Manual},
    "max_steps": {"max_epochs": -1, "max_steps": 16},
    "limited": {"limit_train_batches": 5, "save_every": 1},
    "workers": {"data": "workers"},
    "stream": {"data": "stream", "save_every": 1},
    "two loaders": {"kind": Several, "data": "cycle"},
    "two loaders, the shorter one": {"kind": Several, "data": "shortest", "save_every": 1},
    "data module": {"data": "module"},
    "hooks of the module": {"kind": Carrying},
    "callbacks": {"callbacks": ("early", "average", "model"), "max_epochs": 5},
    "each epoch": {"save_every": None},
}
SOME = {
    "first steps": Place("step", 3),
    "middle of an epoch": Place("on_train_batch_end", 9),
    "last batch": Place("step", 12),
    "validation": Place("validation", 2),
    "end of an epoch": Place("on_train_epoch_end", 2),
    "first batch of the next epoch": Place("step", 13),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_killed_run_is_the_same_run(tmp_path, straights, place):
    """At six places: every loss, batch, hook and logged value of the resumed run is the straight run's."""
    harness.assert_exact(train, tmp_path, place, straight=straights())


@pytest.mark.timeout(900)  # up to nine processes
@pytest.mark.parametrize("names", harness.few_or_all(SOME))
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_killed_run_in_every_mode_is_the_same_run(tmp_path, mode, names):
    """In every mode of a trainer, killed at six places."""
    found = {}
    for name in names:
        try:
            harness.assert_exact(train, tmp_path / name, SOME[name], straight=tmp_path / "straight", **mode)
        except AssertionError as error:
            found[name] = str(error)
    assert not found, "\n\n".join(f"{name}: {text[:2500]}" for name, text in found.items())
