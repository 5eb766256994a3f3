"""What `attach` promises besides an exact resume: the guard, rollbacks, stops, the best checkpoint, and refusals."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt
from tests.integrations import harness

pytest.importorskip("ignite", reason='needs the extra: pip install "safeckpt[ignite]"')

from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_trainer
from ignite.handlers import EarlyStopping
from ignite.metrics import Average, RunningAverage

from safeckpt.integrations import ignite as integration
from safeckpt.integrations.ignite import attach

ROWS = 12


class Run:
    """A trainer of a linear model over 12 rows in batches of 2, with what it has trained.

    Args:
        path: Of the checkpoints.
        poison: Numbers of rows whose loss is NaN.
        attached: Whether `attach` is called here, with the options.
        options: Of `attach`.
    """

    def __init__(self, path, *, poison=(), attached=True, engine=Engine, **options):
        torch.manual_seed(0)
        self.losses = {}
        self.batches = []
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(torch.arange(ROWS), batch_size=2, shuffle=True)

        def update(engine, batch):
            self.batches.append(batch.tolist())
            loss = (self.model(batch[:, None].float()) ** 2).mean()
            if set(batch.tolist()) & set(poison):
                loss = loss * float("nan")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses[engine.state.iteration] = loss.item()
            return loss.item()

        self.trainer = engine(update)
        self.components = {"model": self.model, "optimizer": self.optimizer}
        if attached:
            self.attachment = attach(self.trainer, path, self.components, **{"seed": 3, "save_every": 1} | options)

    def train(self, max_epochs=2, **limits):
        limits = limits or {"max_epochs": max_epochs}
        return self.trainer.run(self.loader, **limits)


def batches_of(path):
    """Return the batches of a run that nothing happens to."""
    straight = Run(path)
    straight.train()
    return straight.batches


def steps_of(path):
    return [checkpoint.step for checkpoint in safeckpt.CheckpointManager(path, {"x": {}}).checkpoints()]


# -- a run ---------------------------------------------------------------------------------------------------------


def test_run_goes_on_in_a_new_trainer_with_more_epochs(tmp_path):
    """The limits are those of the call, not those of the file; the trained epochs are not trained again."""
    straight = Run(tmp_path / "straight")
    straight.train(3)
    Run(tmp_path / "x").train(2)
    rest = Run(tmp_path / "x")
    state = rest.train(3)
    assert (state.epoch, state.iteration) == (3, 18)
    assert rest.losses == {step: straight.losses[step] for step in range(13, 19)}


def test_run_that_is_complete_trains_nothing(tmp_path):
    """`COMPLETED` is fired again, since a run that was killed in its handlers needs it."""
    Run(tmp_path).train()
    again = Run(tmp_path)
    completed = []
    again.trainer.add_event_handler(Events.COMPLETED, lambda: completed.append(1))
    assert again.train().iteration == 12
    assert not again.losses
    assert completed == [1]


def test_last_step_is_saved_unless_that_is_not_wanted(tmp_path):
    """A run ends with a checkpoint of its end, also between two that are due."""
    Run(tmp_path / "x", save_every=5).train()
    assert steps_of(tmp_path / "x") == [5, 10, 12]
    Run(tmp_path / "y", save_every=5, save_on_exit=False).train()
    assert steps_of(tmp_path / "y") == [5, 10]


def test_lock_is_free_when_run_returns_and_when_it_raises(tmp_path):
    """Another manager may take the directory at once; and `run` of the same trainer goes on."""
    run = Run(tmp_path)

    @run.trainer.on(Events.ITERATION_COMPLETED(once=3))
    def fail(engine):
        if len(run.batches) == 3:
            raise KeyError("of a handler")

    with pytest.raises(KeyError):
        run.train()
    assert run.attachment.manager is None
    assert run.train().iteration == 12
    assert run.batches[:2] + run.batches[3:] == batches_of(tmp_path / "straight")


def test_interrupted_run_goes_on_in_the_same_process(tmp_path):
    """`interrupt` returns from `run` in the middle of an epoch; the next `run` goes on, and the manager with it."""
    run = Run(tmp_path / "x")
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda engine: engine.interrupt())
    assert run.train().iteration == 4
    assert run.attachment.manager is not None
    assert run.train().iteration == 12
    assert run.attachment.manager is None
    assert run.batches == batches_of(tmp_path / "straight")


def test_run_without_data_takes_the_loader_of_the_components(tmp_path):
    """A process function that reads its batches itself: the loader is a component."""
    model = torch.nn.Linear(1, 1)
    loader = safeckpt.ResumableLoader(DataLoader(torch.arange(6), batch_size=2, shuffle=True), seed=1)
    batches = []

    def endless():
        while True:
            yield from loader

    source = endless()
    trainer = Engine(lambda _engine, _batch: batches.append(next(source)))
    attach(trainer, tmp_path, {"model": model, "loader": loader}, loss=None, save_every=2)
    trainer.run(epoch_length=3, max_epochs=2)
    assert steps_of(tmp_path) == [2, 4, 6]
    assert len(batches) == 6


def test_position_of_ignites_own_checkpoint_is_taken_over(tmp_path):
    """A trainer that was loaded from elsewhere goes on at its iteration, at the same place of the loader."""
    run = Run(tmp_path / "x")
    run.trainer.load_state_dict({"iteration": 8, "max_epochs": 2, "epoch_length": 6})
    assert run.train().iteration == 12
    assert run.batches == batches_of(tmp_path / "straight")[8:]


# -- the guard -----------------------------------------------------------------------------------------------------


def test_nonfinite_loss_is_raised_before_any_handler_sees_it(tmp_path):
    """Handlers of `ITERATION_COMPLETED` are not called with it, and nothing is saved."""
    run = Run(tmp_path, poison=[5])
    seen = []
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    with pytest.raises(safeckpt.NonFiniteError, match="loss"):
        run.train()
    assert len(seen) == len(run.batches) - 1
    assert steps_of(tmp_path)[-1:] == [len(seen)][: len(seen)]


def test_handlers_of_exceptions_do_not_hide_it(tmp_path):
    """Ignite trains on where a handler of `EXCEPTION_RAISED` returns."""
    run = Run(tmp_path, poison=[5])
    caught = []
    run.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _engine, error: caught.append(error))
    with pytest.raises(safeckpt.NonFiniteError) as raised:
        run.train()
    assert caught == [raised.value]


def test_other_exceptions_are_the_handlers_affair(tmp_path):
    """What is not of safeckpt is handled as Ignite does it."""
    run = Run(tmp_path)
    caught = []
    run.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _engine, error: caught.append(str(error)))

    @run.trainer.on(Events.EPOCH_STARTED(once=2))
    def fail():
        raise ValueError("mine")

    run.train()
    assert caught == ["mine"]


def test_rollback_leaves_the_batch_out_and_goes_on(tmp_path, caplog):
    """The run has all of its iterations, without the batch of the row that fails."""
    bad = batches_of(tmp_path / "straight")[3]
    run = Run(tmp_path / "x", poison=bad[:1], on_nonfinite="rollback", save_every=2)
    started = []
    run.trainer.add_event_handler(Events.STARTED, lambda: started.append(1))
    run.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _error: pytest.fail("it was rolled back"))
    with caplog.at_level("WARNING", "safeckpt"):
        state = run.train()
    assert state.iteration == 12
    assert started == [1]
    assert run.attachment.rollbacks == len([batch for batch in run.batches if bad[0] in batch]) > 0
    assert all(math.isfinite(loss) for loss in run.losses.values())
    assert "its batch is left out" in caplog.text
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())


def test_rolled_back_run_is_the_one_that_is_resumed(tmp_path):
    """Killed after a rollback, the rest is that of the run which was not killed."""
    options = {"poison": batches_of(tmp_path / "finite")[3][:1], "on_nonfinite": "rollback", "save_every": 2}
    straight = Run(tmp_path / "straight", **options)
    straight.train()
    run = Run(tmp_path / "x", **options)
    run.train(max_epochs=1)
    rest = Run(tmp_path / "x", **options)
    rest.train()
    assert rest.losses == {step: straight.losses[step] for step in range(7, 13)}


def test_rollbacks_are_bounded(tmp_path):
    """Where every batch fails the error surfaces, with what failed."""
    run = Run(tmp_path, poison=[], on_nonfinite="rollback", max_rollbacks=2, save_every=1)
    with torch.no_grad():
        run.trainer.add_event_handler(
            Events.ITERATION_STARTED(event_filter=lambda _engine, iteration: iteration > 2),
            lambda: run.model.bias.data.fill_(float("nan")),
        )
    with pytest.raises(safeckpt.RollbackLoopError) as raised:
        run.train()
    assert isinstance(raised.value.__cause__, safeckpt.NonFiniteError)
    assert run.attachment.rollbacks == 2
    assert steps_of(tmp_path) == [1, 2]


def test_rollback_without_a_checkpoint_is_the_error(tmp_path):
    """There is nothing to go back to in the first steps."""
    run = Run(tmp_path, poison=range(ROWS), on_nonfinite="rollback")
    with pytest.raises(safeckpt.CheckpointNotFoundError):
        run.train()


@pytest.mark.parametrize("output", [{"loss": 1.0, "pred": torch.zeros(3)}, (1.0, 2.0), None, "1.0"])
def test_output_that_is_no_loss_is_refused_with_the_line_to_write(tmp_path, output):
    """A loss is not guessed."""
    trainer = Engine(lambda _engine, _batch: output)
    attach(trainer, tmp_path, {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError, match="loss=lambda output"):
        trainer.run(DataLoader(range(4)))


def test_supervised_trainer_of_ignite_needs_no_option(tmp_path):
    """`create_supervised_trainer` returns the loss."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(
        model, optimizer, torch.nn.functional.mse_loss, prepare_batch=lambda b, **_: b[:2]
    )
    attach(trainer, tmp_path, {"model": model, "optimizer": optimizer}, save_every=4)
    trainer.run(DataLoader(harness.Samples(16), batch_size=4))
    assert steps_of(tmp_path) == [4]


# -- stops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 6, 12])
def test_stop_signal_saves_and_ends_the_run(tmp_path, at):
    """In the middle of an epoch, at its end and at the end of the run; `COMPLETED` is left to the run that goes on."""
    run = Run(tmp_path / "x", save_every=100)
    completed = []
    run.trainer.add_event_handler(Events.ITERATION_STARTED(once=at), lambda: os.kill(os.getpid(), signal.SIGTERM))
    run.trainer.add_event_handler(Events.COMPLETED, lambda: completed.append("first"))
    assert run.train().iteration == at
    assert run.attachment.stopped
    assert steps_of(tmp_path / "x") == [at]
    rest = Run(tmp_path / "x", save_every=100)
    rest.trainer.add_event_handler(Events.COMPLETED, lambda: completed.append("second"))
    rest.train()
    assert not rest.attachment.stopped
    assert completed == ["second"]
    assert run.batches + rest.batches == batches_of(tmp_path / "straight")


def test_run_that_stopped_early_stays_so(tmp_path, caplog):
    """`terminate()` ends a run for good: a restart trains nothing, unless it is called with other limits."""

    def make():
        run = Run(tmp_path)
        stopping = EarlyStopping(patience=1, score_function=lambda engine: -engine.state.epoch, trainer=run.trainer)
        run.trainer.add_event_handler(Events.EPOCH_COMPLETED, stopping)
        run.components["stopping"] = stopping
        return run

    with caplog.at_level("WARNING", "safeckpt"):
        assert make().train(5).iteration == 12
        assert "Not captured: the handler EarlyStopping" in caplog.text
        assert "was ended by terminate()" not in caplog.text
        assert make().train(5).iteration == 12
        assert "was ended by terminate()" in caplog.text
    assert make().train(6).iteration > 12


# -- metrics -------------------------------------------------------------------------------------------------------


def test_best_checkpoint_goes_by_the_evaluator(tmp_path):
    """Each validation makes a checkpoint, and the best one is kept."""
    scores = iter([3.0, 1.0, 2.0, 4.0])
    evaluator = Engine(lambda _engine, _batch: next(scores))
    Average().attach(evaluator, "error")
    run = Run(tmp_path, evaluator=evaluator, keep_best=safeckpt.Best("error", "min"), keep_last=1, save_every=100)
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    run.train(4)
    kept = safeckpt.CheckpointManager(tmp_path, {"x": {}}).checkpoints()
    assert [(one.step, one.metrics["error"]) for one in kept] == [(12, 1.0), (24, 4.0)]


def test_old_metrics_are_not_those_of_a_later_step(tmp_path):
    """A checkpoint between two validations has no metrics."""
    evaluator = Engine(lambda _engine, _batch: 1.0)
    Average().attach(evaluator, "error")
    run = Run(tmp_path, evaluator=evaluator, save_every=4, keep_last=9)
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    run.train()
    kept = safeckpt.CheckpointManager(tmp_path, {"x": {}}).checkpoints()
    assert {one.step: "error" in one.metrics for one in kept} == {4: False, 8: False, 12: True}


def test_metric_that_is_not_captured_is_named(tmp_path, caplog):
    """A running average that begins anew would be another one after a resume."""
    run = Run(tmp_path)
    RunningAverage(output_transform=lambda output: output).attach(run.trainer, "loss")
    with caplog.at_level("WARNING", "safeckpt"):
        run.train(1)
    assert "Not captured: the handler RunningAverage" in caplog.text


# -- refusals ------------------------------------------------------------------------------------------------------


def test_deterministic_engine_is_refused(tmp_path):
    """It sets streams and position by itself."""
    with pytest.raises(TypeError, match="Make it Engine"):
        Run(tmp_path, engine=DeterministicEngine)


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine", "MegatronModule"])
def test_model_in_pieces_of_its_own_is_refused(tmp_path, name):
    """FSDP1, DeepSpeed and Megatron-LM are named, before anything is trained."""
    run = Run(tmp_path, attached=False)
    run.components["model"] = type(name, (torch.nn.Linear,), {})(1, 1)
    attach(run.trainer, tmp_path, run.components, save_every=1)
    with pytest.raises(TypeError, match=f"'model' holds a {name}"):
        run.train()
    assert not run.batches


def test_second_attachment_is_refused(tmp_path):
    """A step would be saved twice."""
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match="attached already"):
        attach(run.trainer, tmp_path, run.components)


def test_batches_that_have_no_position_are_refused_with_the_line_to_write(tmp_path):
    """And the line works."""
    batches = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    run = Run(tmp_path)
    with pytest.raises(TypeError, match="batch_size=None, collate_fn"):
        run.trainer.run(batches, max_epochs=1)
    run.trainer.run(DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch), max_epochs=1)
    assert run.batches == [[0, 1], [2, 3]]


def test_other_data_within_a_run_is_refused(tmp_path):
    """`set_data` would leave the position behind."""
    run = Run(tmp_path)
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.set_data([1]))
    with pytest.raises(RuntimeError, match="one loader's position"):
        run.train()


def test_run_within_a_run_is_refused(tmp_path):
    """A trainer that evaluates with itself counts those batches as trained."""
    run = Run(tmp_path)
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.run(run.loader))
    with pytest.raises(RuntimeError, match="another Engine"):
        run.train()


def test_other_epoch_length_and_other_user_keys_are_refused(tmp_path):
    """The iteration would be in another epoch."""
    Run(tmp_path).train(1)
    other = Run(tmp_path)
    other.trainer.state_dict_user_keys.append("alpha")
    other.trainer.state.alpha = 1
    with pytest.raises(safeckpt.StateMismatchError) as raised:
        other.train(max_epochs=3, epoch_length=4)
    assert "epoch_length: 6 in the checkpoint, 4" in str(raised.value)
    assert "'alpha', the checkpoint not" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite"),
        ({"loss": 1.0}, TypeError, "loss takes"),
        ({"keep_best": safeckpt.Best("x", "min")}, ValueError, "evaluator"),
    ],
)
def test_wrong_options_are_refused_at_once(tmp_path, options, error, text):
    """Nothing is attached."""
    with pytest.raises(error, match=text):
        Run(tmp_path, **options)


def test_hook_that_is_gone_is_named(tmp_path, monkeypatch):
    """Another Ignite is refused before anything is trained."""
    monkeypatch.delattr(Engine, "set_data")
    with pytest.raises(RuntimeError, match="set_data: a loader that is replaced"):
        Run(tmp_path)


def test_other_order_of_events_is_refused(tmp_path, monkeypatch):
    """The order is tried out."""
    monkeypatch.setattr(integration, "_ORDER", integration._ORDER[1:])
    with pytest.raises(RuntimeError, match="in another order"):
        Run(tmp_path)
