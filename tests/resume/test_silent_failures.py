"""The four experiments behind the library: a whole resume, two that are silently wrong, and one poisoned batch."""

import copy
import warnings

import pytest
import torch

import safeckpt
from safeckpt.state.random_streams import RngStreams
from tests.children import run
from tests.training import Run


def first_disagreement(losses, expected):
    """Return the index at which two equally long lists of losses differ first, None when they are equal."""
    assert len(losses) == len(expected)
    return next((i for i, (a, b) in enumerate(zip(losses, expected, strict=True)) if a != b), None)


def start(directory, steps):
    """Train and save at the end: the process that is gone afterwards."""
    training = Run()
    with safeckpt.CheckpointManager(directory, training.components) as manager:
        losses = training.steps(steps)
        manager.save(steps, loss=losses[-1])
    return losses


def resume(directory, steps):
    """Restore and train on: the process that comes after it."""
    training = Run(seed=5)  # whatever the script does before the restore must not matter
    training.model.eval()  # nor a validation pass that nobody ended
    with safeckpt.CheckpointManager(directory, training.components) as manager, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Drawn before the manager")  # as the warning says
        manager.restore()
    return training.steps(steps)


def by_hand(state, steps, *, eval_mode=False, with_optimizer=True):
    """Resume as a script does that keeps state_dicts and the torch stream in a file of its own."""
    training = Run()
    state = copy.deepcopy(state)
    training.model.load_state_dict(state["model"])
    training.scheduler.load_state_dict(state["scheduler"])
    if with_optimizer:
        training.optimizer.load_state_dict(state["optimizer"])
    RngStreams.apply(state["rng"])
    if eval_mode:
        training.model.eval()
    return training.steps(steps)


@pytest.mark.parametrize("steps", [20, 200])
def test_whole_state_resumes_equal_as_a_list_in_one_process(tmp_path, steps):
    """The losses after a restore into fresh objects equal the uninterrupted ones, ==."""
    expected = Run().steps(steps)
    half = steps // 2
    assert start(tmp_path, half) == expected[:half]
    assert resume(tmp_path, steps - half) == expected[half:]


@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_whole_state_resumes_equal_as_a_list_across_processes(tmp_path, steps):
    """The same when the run that saves and the run that resumes are two processes, and the straight one a third."""
    half = steps // 2
    straight = run(start, tmp_path / "straight", steps).value
    first = run(start, tmp_path / "halved", half).value
    second = run(resume, tmp_path / "halved", steps - half).value
    assert first + second == straight


@pytest.mark.parametrize("steps", [20, 200])
@pytest.mark.parametrize(
    ("fault", "index"), [({}, None), ({"eval_mode": True}, 0), ({"with_optimizer": False}, 1)],
    ids=["whole state", "eval mode", "no optimizer"],
)  # fmt: skip
def test_partial_resume_disagrees_first_where_it_must(steps, fault, index):
    """Eval mode shows in the first resumed loss, missing moments in the second, since a loss precedes its update."""
    expected = Run().steps(steps)
    half = steps // 2
    training = Run()
    training.steps(half)
    state = copy.deepcopy({name: obj.state_dict() for name, obj in training.components.items() if name != "counters"})
    state["rng"] = RngStreams.capture()
    got = by_hand(state, steps - half, **fault)
    assert first_disagreement(got, expected[half:]) == index
    assert all(torch.isfinite(torch.tensor(got))), "a broken resume converges like a right one"


def test_poisoned_batch_is_refused_and_the_run_recovers(tmp_path):
    """One infinite target makes every weight NaN; the save is refused, and a rollback gives the clean run's losses."""
    expected = Run().steps(10)
    training = Run()
    with safeckpt.CheckpointManager(tmp_path, training.components, keep_last=2) as manager:
        for step in range(1, 6):
            manager.save(step, loss=training.step())
        before = {path.name: path.read_bytes() for path in tmp_path.glob("step-*")}
        assert training.step(poison=True) == float("inf")
        assert all(parameter.isnan().any() for parameter in training.model.parameters())
        with pytest.raises(safeckpt.NonFiniteError) as refusal:
            manager.save(6)
        assert len(refusal.value.tensors) >= len(list(training.model.parameters()))
        assert {path.name: path.read_bytes() for path in tmp_path.glob("step-*")} == before
        assert manager.rollback(changed=True).step == 5
        losses = training.steps(5)
        assert losses == expected[5:]
        assert manager.save(10, loss=losses[-1]).step == 10
