"""What a script draws before its manager is built is the same at every start, or it is told."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch

import safeckpt
from tests import children

SEEDS = {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}
DRAWS = {
    "torch": lambda: torch.rand(3),
    "numpy": lambda: np.random.permutation(50),
    "python": lambda: random.sample(range(50), 50),
    "many of numpy": lambda: np.random.permutation(1000),
    "many of python": lambda: [random.random() for _ in range(1000)],
    "port": lambda: (random.randint(20000, 40000), np.random.randint(20000, 40000)),
}
TEXT = "Drawn before the manager was built"


def start(directory, seeds, draws, *, again=False, **options):
    """Start the script once: seed, draw, restore, do a step; return what was told."""
    for seed in SEEDS.values():
        seed(random.SystemRandom().getrandbits(32))  # as in a process of its own
    for name, number in seeds.items():
        SEEDS[name](number)
    for name in draws:
        DRAWS[name]()
    manager = safeckpt.CheckpointManager(directory, {"counters": {"n": 0}})
    with manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.restore(**options)
        manager.restore(**options)  # told once
        if not options:
            torch.rand(1)
            manager.save(manager.step + 1)
    found = [str(one.message) for one in caught if one.category is safeckpt.UncapturedStateWarning]
    if again:
        found += start(directory, {}, draws)
    return found


def run_child(*arguments, **options):
    """Return what a process of its own is told."""
    ended = children.run(*arguments, **options)
    assert ended.error is None
    return ended.value


@pytest.mark.parametrize("stream", SEEDS)
def test_stream_without_a_seed_is_named_at_every_later_start(stream, memory_path):
    """Another process draws other numbers; the one stream alone is named, with the way to silence it."""
    seeded = {name: 0 for name in SEEDS if name != stream}
    assert run_child(start, memory_path, seeded, list(SEEDS)) == []
    for _ in range(2):
        (text,) = run_child(start, memory_path, seeded, list(SEEDS))
        assert text.startswith(f"{TEXT}: random numbers of {stream}, from another seed, or another number of them,")
        assert f"warnings.filterwarnings('ignore', '{TEXT[:24]}" in text


def test_seeded_script_is_told_nothing(memory_path):
    """Not where it draws some more at one of its starts, and not where a stream without a seed is not drawn from."""
    assert run_child(start, memory_path, {"torch": 0, "numpy": 0}, ["torch", "numpy"]) == []
    assert run_child(start, memory_path, {"torch": 0, "numpy": 0}, ["torch", "numpy", "torch", "numpy"]) == []
    assert run_child(start, memory_path, {"torch": 0}, []) == []
    assert run_child(start, memory_path, {"torch": 0, "numpy": 1}, ["torch"]) == []
    assert len(run_child(start, memory_path, {"torch": 0, "numpy": 1}, ["numpy"])) == 1


@pytest.mark.parametrize("stream", ["numpy", "python"])
def test_other_number_of_draws_is_called_so(stream, memory_path):
    """A seeded script that draws far more at one start is told, since the state of a stream shows no seed by then."""
    assert run_child(start, memory_path, {stream: 0}, [stream]) == []
    (text,) = run_child(start, memory_path, {stream: 0}, [f"many of {stream}"])
    assert text.startswith(f"{TEXT}: random numbers of {stream}, from another seed, or another number of them,")
    assert "may be another one" in text


def test_port_is_no_split(memory_path):
    """A few numbers of a stream without a seed are told at no start."""
    seeded = {"torch": 0}
    for _ in range(2):
        assert run_child(start, memory_path, seeded, ["torch", "port"]) == []


def test_second_manager_of_a_process_is_told_nothing(memory_path):
    """A cell that is run again: what was drawn before is still there."""
    assert run_child(start, memory_path, {}, ["torch"], again=True) == []


def test_part_of_a_run_is_not_compared(memory_path):
    """An evaluation goes on with no run."""
    assert run_child(start, memory_path, {}, ["torch"]) == []
    assert run_child(start, memory_path, {}, ["torch"], only=("rng",)) == []


def test_file_that_says_nothing_of_it_is_not_compared(memory_path, monkeypatch):
    """As an older one, or one that was imported."""
    torch.save({"n": {"n": 3}}, memory_path / "old.pt")
    safeckpt.import_checkpoint(memory_path / "old.pt", memory_path / "run", mapping={"counters": "n"}, step=1)
    monkeypatch.setattr("safeckpt.run.first_draws._known", [])
    torch.rand(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.ImportedStateWarning)
        assert start(memory_path / "run", {}, ["torch"]) == []
