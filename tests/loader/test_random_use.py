"""Any sequence of uses, against a model of two numbers: the epoch and how many of its batches are behind."""

from __future__ import annotations

import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeckpt.loader import ResumableLoader
from tests.loader.runs import straight, through_a_file
from tests.loader.workloads import dataloader

EPOCHS = 6
USES = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 7)),
    st.tuples(st.just("drop"), st.none()),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("restore"), st.integers(0, 9)),
    st.tuples(st.just("fresh process"), st.integers(0, 9)),
    st.tuples(st.just("leave out"), st.tuples(st.integers(0, EPOCHS - 1), st.integers(0, 5))),
)


@functools.cache
def batches(order):
    return straight(functools.partial(dataloader, order), epochs=EPOCHS).batches


@given(st.sampled_from(["shuffle", "custom", "custom batches", "distributed"]), st.lists(USES, max_size=40))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_sequence_of_uses_hands_out_what_the_position_says(order, uses):
    """Taking, dropping, saving, restoring, leaving out, in one process and in new ones: never another batch."""
    loader = ResumableLoader(dataloader(order), seed=1)
    epoch, batch, left_out = 0, 0, set()
    # The model: where the next pass begins, how many batches of this one were asked for, None when there is none.
    anchor, iterator, asked = (0, 0), None, None
    saved = []
    for use, argument in uses:
        if use == "next":
            for _ in range(argument):
                if iterator is None:
                    iterator = iter(loader)
                    if asked is not None and asked > 1:
                        anchor, asked = (epoch + 1, 0), None
                    elif asked is not None:
                        asked = None  # a glance
                if asked is None:
                    (epoch, batch), asked = anchor, 0
                if epoch == EPOCHS:
                    return
                wanted = [n for n in range(batch, len(batches(order)[epoch])) if (epoch, n) not in left_out]
                got = next(iterator, None)
                asked += 1
                if not wanted:
                    assert got is None
                    epoch, batch, iterator, asked = epoch + 1, 0, None, None
                    anchor = (epoch, batch)
                else:
                    assert got == batches(order)[epoch][wanted[0]]
                    batch = wanted[0] + 1
                if epoch == EPOCHS:
                    return
        elif use == "drop":
            iterator = None
        elif use == "save":
            saved.append((epoch, batch, set(left_out), through_a_file(loader.state_dict())))
        elif use == "leave out":
            left_out.add(argument)
            loader.leave_out([argument])
        elif saved:
            if use == "fresh process":
                iterator, loader = None, ResumableLoader(dataloader(order))
            epoch, batch, left_out, state = saved[argument % len(saved)]
            left_out = {position for position in left_out if position >= (epoch, batch)}
            loader.load_state_dict(state)
            anchor, asked = (epoch, batch), None
        assert (loader.epoch, loader.batch) == (epoch, batch)
