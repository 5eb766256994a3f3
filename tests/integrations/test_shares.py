"""Shares of a DataLoader as Accelerate makes them: each rank has its own samples and its own random numbers."""

from __future__ import annotations

import random

import pytest
from torch.utils.data import DataLoader

import safeckpt

accelerate = pytest.importorskip("accelerate", reason='needs the extra: pip install "safeckpt[accelerate]"')


class Noisy:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return index, random.random()


def loader_of(rank, *, world=2, split=False, seed=5):
    """Return the loader of one rank, as `accelerator.prepare` makes it, around the plain loader inside."""
    plain = DataLoader(Noisy(), batch_size=4, collate_fn=list)
    prepared = accelerate.data_loader.prepare_data_loader(
        plain, num_processes=world, process_index=rank, put_on_device=False, split_batches=split, dispatch_batches=False
    )
    return safeckpt.ResumableLoader(prepared.base_dataloader, seed=seed)


@pytest.mark.parametrize("split", [False, True])
def test_ranks_have_their_own_samples_and_their_own_noise(split):
    """No sample on two ranks, no random number on two ranks, and each of them the same again."""
    one, other = ([item for batch in loader_of(rank, split=split) for item in batch] for rank in (0, 1))
    assert sorted(index for index, _ in one + other) == list(range(32))
    assert not {noise for _, noise in one} & {noise for _, noise in other}
    assert one == [item for batch in loader_of(0, split=split) for item in batch]


def test_another_number_of_processes_is_refused():
    """The number of processes is an input of the position."""
    loader = loader_of(1)
    next(iter(loader))
    state = loader.state_dict()
    assert state["inputs"]["world_size"] == 2
    with pytest.raises(safeckpt.StateMismatchError, match="world size: 2 in the saved state, 4 now"):
        loader_of(1, world=4).load_state_dict(state)
