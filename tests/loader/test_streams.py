"""The global random streams: saved, seeded and put back bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from safeckpt.loader import streams
from safeckpt.loader.streams import PrivateStreams, mix, restore_streams, save_streams, seed_streams


def positions():
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()


def draw():
    """Use every kind of memory that the streams have: half pairs of normal numbers, blocks of words."""
    return (
        [random.random() for _ in range(700)], random.gauss(0, 1), np.random.rand(700).tolist(), np.random.randn(),
        torch.rand(700).tolist(), torch.randn(3).tolist(),
    )  # fmt: skip


def spend(kind):
    seed_streams(3)
    if kind == "half a pair kept":
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(1)
    elif kind == "end of a block":
        np.random.bytes(4 * 623)
        for _ in range(623):
            random.getrandbits(32)


@pytest.mark.parametrize("fast", [True, False], ids=["bytes", "getstate"])
@pytest.mark.parametrize("before", ["fresh", "half a pair kept", "end of a block"])
def test_streams_saved_and_restored_are_where_they_were(before, fast, monkeypatch):
    """Saving moves nothing, and restoring undoes any draws, a kept half of a pair of normals included."""
    assert streams._PYTHON_MEMORY is not None
    if not fast:
        monkeypatch.setattr(streams, "_PYTHON_MEMORY", None)
    spend(before)
    here = positions()
    saved = save_streams()
    seed_streams(99)
    draw()
    restore_streams(saved)
    assert positions() == here
    restore_streams(save_streams())
    assert positions() == here


def test_numpy_with_another_bit_generator_is_restored_as_well():
    """A process-wide stream that is no Mersenne Twister takes the long way and comes back too."""
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        np.random.randn()
        saved = save_streams()
        here = np.random.get_state(legacy=False)
        seed_streams(1)
        np.random.rand(5)
        restore_streams(saved)
        after = np.random.get_state(legacy=False)
        assert {key: after[key] for key in here} == here
    finally:
        np.random.set_bit_generator(usual)


def test_seeding_forgets_the_kept_half_of_a_pair():
    """After seeding, the same numbers come whatever was drawn before, normal ones included."""
    spend("half a pair kept")
    seed_streams(11)
    first = draw()
    spend("fresh")
    seed_streams(11)
    assert draw() == first


def test_seeding_leaves_accelerator_streams_alone(monkeypatch):
    """Only the CPU stream is seeded, since `torch.manual_seed` would reach every device of the training."""

    def fail(*args):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    seed_streams(1)


def test_streams_of_one_seed_are_unrelated():
    """The three streams of a seed do not repeat each other's numbers, nor those of the next seed."""
    numbers = []
    for seed in (mix(4, 0), mix(4, 1), mix(5, 0)):
        seed_streams(seed)
        numbers += [random.random(), np.random.rand(), torch.rand(()).item()]
    assert len({round(number, 5) for number in numbers}) == 9


def test_mix_of_neighbouring_numbers_never_meets():
    """Derived seeds of many epochs and batches are all different and fit torch's range."""
    seeds = {mix(mix(mix(0, 2), epoch), batch) for epoch in range(100) for batch in range(1000)}
    assert len(seeds) == 100_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_private_streams_go_on_between_visits_and_move_nothing_outside():
    """Work done in two visits draws what it would draw in one, and the process's streams never notice."""
    spend("half a pair kept")
    here = positions()
    whole = PrivateStreams(8).run(lambda: (draw(), draw()))
    streams = PrivateStreams(8)
    first = streams.run(draw)
    assert positions() == here
    draw()
    assert (first, streams.run(draw)) == whole


def test_private_streams_are_left_when_the_work_fails():
    """An exception inside leaves the process's streams where they were."""
    here = positions()

    def fail():
        draw()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PrivateStreams(8).run(fail)
    assert positions() == here
