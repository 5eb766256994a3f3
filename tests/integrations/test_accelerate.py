"""What `safe(accelerator, ...)` captures and refuses, and what it does about NaN and a stop signal."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import safeckpt
from tests.integrations import harness

accelerate = pytest.importorskip("accelerate", reason='needs the extra: pip install "safeckpt[accelerate]"')

from accelerate.data_loader import DataLoaderDispatcher, skip_first_batches  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, DistributedType, GradientAccumulationPlugin  # noqa: E402

from safeckpt.integrations.accelerate import safe  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Forget what an Accelerator keeps in the process."""
    reset()
    yield
    reset()


def reset():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def plain_loader(**options):
    return DataLoader(harness.Samples(), harness.BATCH_SIZE, shuffle=True, **options)


def run_of(path, *, accelerator=None, loader=None, registered=(), **options):
    """Return all parts of a run, as after its set-up in a fresh process."""
    reset() if accelerator is None else None
    torch.manual_seed(0)
    accelerator = accelerator or accelerate.Accelerator(cpu=True)
    model = harness.net()
    optimizer, schedule = harness.optimizer_and_schedule(model)
    loader = plain_loader() if loader is None else loader
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for one in registered:
        accelerator.register_for_checkpointing(one)
    manager, loader = safe(accelerator, path, loader, **options)
    parts = SimpleNamespace(**{name: value for name, value in locals().items() if name not in ("path", "options")})
    parts.seen = []
    return parts


def train(run, *, until=harness.STEPS, poison=(), by=float("nan")):
    """Train to a step; losses of the batches in `poison`, numbered as they come, are multiplied."""
    for _ in run.loader.epochs(harness.EPOCHS):
        for x, y, index in run.loader:
            loss = torch.nn.functional.mse_loss(run.model(x), y)
            if len(run.seen) in poison:
                loss = loss * by
            run.seen.append(index.tolist())
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.schedule.step()
            run.optimizer.zero_grad()
            run.manager.end_step(run.manager.step + 1, loss=loss)
            if run.manager.stop_requested or run.manager.step >= until:
                return


class Counter:
    """Something a user registers for checkpointing."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Endless(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        for number in range(20):
            yield torch.full((8,), float(number)) + torch.rand(8), torch.ones(1), number


# -- captured --------------------------------------------------------------------------------------------------------


def test_everything_prepared_and_registered_is_captured(tmp_path):
    """Model, optimizer, schedule, the user's objects, the position and the count of accumulation come back."""
    run = run_of(tmp_path, registered=[Counter(7)], save_every=1, components={"extra": {"best": 3}})
    with run.manager:
        train(run, until=8)
    resumed = run_of(tmp_path, registered=[counter := Counter()], components={"extra": (extra := {"best": 0})})
    with resumed.manager as manager:
        assert (manager.step, counter.value, extra["best"]) == (8, 7, 3)
        assert (resumed.loader.epoch, resumed.loader.batch) == (1, 2)
        assert resumed.accelerator.step == run.accelerator.step
        for one, other in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert resumed.schedule.get_last_lr() == run.schedule.get_last_lr()


def test_object_registered_after_safe_is_an_error(tmp_path):
    """What no checkpoint would hold is named at the next step."""
    run = run_of(tmp_path)
    run.accelerator.register_for_checkpointing(Counter())
    with run.manager, pytest.raises(RuntimeError, match="more registered objects after safe"):
        train(run)


def test_batches_are_those_of_accelerate(tmp_path):
    """The last batch is announced, and gather_for_metrics gets what it needs to cut a last batch off."""
    run = run_of(tmp_path, loader=DataLoader(harness.Samples(length=10), 4))
    with run.manager:
        last = [
            (run.accelerator.gradient_state.end_of_dataloader, run.accelerator.gradient_state.remainder)
            for _ in run.loader
        ]
    assert last == [(False, 2), (False, 2), (True, 2)]
    assert not run.accelerator.gradient_state.in_dataloader


def test_two_loaders_are_two_components(tmp_path):
    """Each has its position."""
    accelerator = accelerate.Accelerator(cpu=True)
    _model, one, other = accelerator.prepare(harness.net(), plain_loader(), plain_loader())
    manager, one, other = safe(accelerator, tmp_path, one, other)
    with manager:
        pairs = zip(one, other, strict=True)
        next(pairs)
        manager.end_step(1)
        next(pairs)
        manager.save(2)
    del pairs
    reset()
    accelerator = accelerate.Accelerator(cpu=True)
    _model, one, other = accelerator.prepare(harness.net(), plain_loader(), plain_loader())
    manager, one, other = safe(accelerator, tmp_path, one, other)
    with manager:
        assert (one.batch, other.batch) == (2, 2)


# -- not finite, and stopped -----------------------------------------------------------------------------------------


def test_loss_that_is_not_finite_is_an_error(tmp_path):
    """Without a policy the error surfaces, and nothing was written."""
    run = run_of(tmp_path, save_every=4)
    with pytest.raises(safeckpt.NonFiniteError), run.manager:
        train(run, poison={6})
    assert safeckpt.latest(tmp_path).step == 4


def test_rollback_leaves_the_batch_out_and_goes_on(tmp_path, caplog):
    """The batch that failed is not seen again, those since the checkpoint are, and it is said in the log."""
    run = run_of(tmp_path, save_every=4, on_nonfinite="rollback")
    with run.manager, caplog.at_level(logging.WARNING, "safeckpt"):
        train(run, poison={6})
    seen = run.seen
    assert seen[7:9] == seen[4:6]
    assert seen[6] not in seen[7:12]
    assert run.manager.step == harness.STEPS - 1
    assert "without the 1 batches of that step" in caplog.text
    straight = run_of(tmp_path / "straight")
    with straight.manager:
        train(straight)
    assert [*seen[:6], *seen[9:]] == [batch for number, batch in enumerate(straight.seen) if number != 6]


def test_loss_that_jumps_is_rolled_back_as_one_that_is_nan(tmp_path, caplog):
    """By the limit of the guard; without a rollback it is an error of its own."""
    guard = safeckpt.Guard(loss_above=safeckpt.TimesMedian(1000, steps=4))
    run = run_of(tmp_path, save_every=4, guard=guard, on_nonfinite="rollback")
    with run.manager, caplog.at_level(logging.WARNING, "safeckpt"):
        train(run, poison={6}, by=1e6)
    assert run.seen[7:9] == run.seen[4:6]
    assert run.seen[6] not in run.seen[7:12]
    assert "times the median" in caplog.text
    run = run_of(tmp_path / "raises", guard=guard)
    with pytest.raises(safeckpt.LossSpikeError), run.manager:
        train(run, poison={6}, by=1e6)


def test_time_limit_saves_and_stops(tmp_path):
    """The options are those of the manager."""
    run = run_of(tmp_path, stop_before=dt.datetime.now(dt.UTC))
    with run.manager:
        train(run)
    assert len(run.seen) == safeckpt.latest(tmp_path).step == 1


def test_rollbacks_are_bounded(tmp_path):
    """A loss that stays NaN ends in an error, soon."""
    run = run_of(tmp_path, save_every=4, on_nonfinite="rollback")
    with pytest.raises(safeckpt.RollbackLoopError), run.manager:
        train(run, poison=range(1, 100))
    assert len(run.seen) < 12


def test_stop_signal_saves_and_stops(tmp_path):
    """SIGTERM is listened to without being asked for."""
    run = run_of(tmp_path)
    with run.manager:
        os.kill(os.getpid(), signal.SIGTERM)
        train(run)
    assert len(run.seen) == safeckpt.latest(tmp_path).step == 1


# -- iterable datasets -----------------------------------------------------------------------------------------------


def test_iterable_dataset_is_exact(tmp_path):
    """On one process its batches come from the plain loader, also where Accelerate dispatches them by default."""
    run = run_of(tmp_path / "straight", loader=DataLoader(Endless(), 4))
    assert issubclass(type(run.loader._prepared), DataLoaderDispatcher)
    with run.manager:
        train(run)
    killed = run_of(tmp_path / "run", loader=DataLoader(Endless(), 4))
    with killed.manager:
        train(killed, until=7)
    resumed = run_of(tmp_path / "run", loader=DataLoader(Endless(), 4))
    with resumed.manager:
        train(resumed)
    assert killed.seen + resumed.seen == run.seen
    for one, other in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_accumulation_over_an_iterable_dataset_is_refused_or_goes_on(tmp_path):
    """Nobody knows which batch is the last; where that ends no group it need not be known."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="sync_with_dataloader=False"):
        run_of(tmp_path, accelerator=accelerator, loader=DataLoader(Endless(), 4))
    reset()
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    run_of(tmp_path, accelerator=accelerator, loader=DataLoader(Endless(), 4)).manager.close()


# -- refused by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda accelerator: accelerator.prepare(safeckpt.ResumableLoader(plain_loader())), "ResumableLoader"),
        (lambda _accelerator: plain_loader(), "is no loader that Accelerate has prepared"),
        (lambda accelerator: skip_first_batches(accelerator.prepare(plain_loader()), 2), "skip_first_batches"),
    ],
)
def test_loader_of_another_kind_is_refused(tmp_path, make, text):
    """Each is named, with what to write instead."""
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match=text):
        safe(accelerator, tmp_path, make(accelerator))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_dataloader_is_refused(tmp_path):
    """The position of torchdata is not exact."""
    pytest.importorskip("torchdata")
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    with pytest.raises(TypeError, match="use_stateful_dataloader"):
        safe(accelerator, tmp_path, accelerator.prepare(plain_loader()))


def test_prepared_loader_is_refused_as_a_component():
    """Without `safe` it would be saved without a position."""
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match="prepared"):
        safeckpt.CheckpointManager("unused", {"loader": accelerator.prepare(plain_loader())})


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
def test_kind_that_is_not_supported_is_refused(tmp_path, monkeypatch, kind):
    """A checkpoint with parts missing is never begun."""
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType[kind])
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1), raising=False)
    with pytest.raises(TypeError, match="FSDP1" if kind == "FSDP" else kind):
        safe(accelerator, tmp_path)


def test_wrong_arguments_are_refused(tmp_path):
    """The policy, a rollback without one loader, names that are taken, and what is no Accelerator."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(harness.net())
    with pytest.raises(ValueError, match='"raise" or "rollback"'):
        safe(accelerator, tmp_path, on_nonfinite="skip")
    with pytest.raises(ValueError, match="needs one loader"):
        safe(accelerator, tmp_path, on_nonfinite="rollback")
    with pytest.raises(ValueError, match="taken: model"):
        safe(accelerator, tmp_path, components={"model": {}})
    with pytest.raises(TypeError, match=r"accelerate\.Accelerator"):
        safe(object(), tmp_path)


def test_epoch_of_the_users_own_count_is_an_error(tmp_path):
    """A loop that counts from 0 again after a resume would train another order, or too many epochs."""
    run = run_of(tmp_path)
    run.loader.set_epoch(0)
    with run.manager, pytest.raises(ValueError, match=r"loader\.epochs\(n\)"):
        run.loader.set_epoch(1)


def test_accelerate_that_lost_an_attribute_is_refused(tmp_path, monkeypatch):
    """It is said before training, with the version."""
    accelerator = accelerate.Accelerator(cpu=True)
    del accelerator._custom_objects
    with pytest.raises(RuntimeError, match=r"accelerate 1\.\d+.*\n.*_custom_objects"):
        safe(accelerator, tmp_path)
