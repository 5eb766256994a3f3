"""A trainer of Ignite that is killed anywhere is, resumed, the same run: every loss, batch and call of a handler."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests import children
from tests.integrations import harness

pytest.importorskip("ignite", reason='needs the extra: pip install "safeckpt[ignite]"')

import ignite.distributed as idist
from ignite.engine import DeterministicEngine, Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler, PiecewiseLinear
from ignite.metrics import Average, Loss, RunningAverage

from safeckpt.integrations.ignite import attach

children.preload(__name__)


class Stream(IterableDataset):
    """The samples of the harness, one after the other, of a length that nobody knows."""

    def __init__(self):
        self.samples = harness.Samples()

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def train(
    path,
    record,
    *,
    accumulation=1,
    workers=0,
    validates_every=None,
    iterable=False,
    epoch_length=None,
    by_iterations=False,
    leaves_epochs=False,
    attaches_first=False,
    stock=None,
    **options,
):
    """Train as a user of Ignite does."""
    data = Stream() if iterable else harness.Samples(harness.LENGTH * harness.BATCH_SIZE * idist.get_world_size())
    loader = idist.auto_dataloader(
        data, batch_size=harness.BATCH_SIZE * idist.get_world_size(), shuffle=not iterable, num_workers=workers
    )
    model = idist.auto_model(harness.net())
    optimizer, schedule = harness.optimizer_and_schedule(model)
    offset = idist.auto_model(torch.nn.Linear(1, 1))
    second = torch.optim.SGD(offset.parameters(), lr=0.1)

    def update(engine, batch):
        model.train()
        x, y, index = batch
        loss = torch.nn.functional.mse_loss(model(x) + offset(torch.ones(1)), y)
        (loss / accumulation).backward()
        if engine.state.iteration % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            second.step()
            second.zero_grad()
        schedule.step()
        record(
            "step", step=engine.state.iteration, loss=loss, batch=index, epoch=engine.state.epoch,
            lr=second.param_groups[0]["lr"],
        )  # fmt: skip
        return {"loss": loss.item(), "pred": model(x).detach(), "y": y}

    def validate(engine, batch):
        model.eval()
        x, y, index = batch
        record("validation", batch=index)
        with torch.no_grad():
            return model(x) + 0.01 * torch.randn(()), y

    trainer, evaluator = (DeterministicEngine if stock == "deterministic" else Engine)(update), Engine(validate)
    validation = DataLoader(harness.Samples(8), batch_size=4)
    Loss(torch.nn.functional.mse_loss).attach(evaluator, "error")
    ema = EMAHandler(harness.net(), momentum=0.1, momentum_warmup=0.5, warmup_iters=7)
    ema.model = getattr(model, "module", model)
    piecewise = PiecewiseLinear(second, "lr", [(0, 1.0), (harness.STEPS, 0.0)])
    steps = PiecewiseLinear(torch.optim.SGD([torch.zeros(1)], lr=1.0), "lr", [(0, 1.0), (harness.EPOCHS, 0.0)])
    average = Average(output_transform=lambda output: output["loss"])
    running = RunningAverage(output_transform=lambda output: output["loss"])
    stopping = EarlyStopping(patience=1, score_function=lambda engine: -engine.state.iteration, trainer=trainer)
    stopping.counter = -100
    trainer.state.seen = 0
    trainer.state_dict_user_keys.append("seen")
    components = {
        "model": model, "optimizer": optimizer, "schedule": schedule, "offset": offset, "second": second,
        "piecewise": piecewise, "steps": steps, "ema": ema, "average": average, "running": running,
        "stopping": stopping,
    }  # fmt: skip

    def attach_safe():
        attach(
            trainer,
            path / "checkpoints",
            components,
            loss=lambda output: output["loss"],
            **{"save_every": 2, "on_replay_mismatch": "error"} | options,
        )

    if attaches_first and not stock:
        attach_safe()
    trainer.add_event_handler(Events.ITERATION_STARTED, piecewise)
    trainer.add_event_handler(Events.EPOCH_STARTED, steps)
    ema.attach(trainer)
    average.attach(trainer, "average")
    running.attach(trainer, "running")
    evaluator.add_event_handler(Events.COMPLETED, stopping)

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine):
        engine.state.seen += 1
        if leaves_epochs and engine.state.iteration % harness.LENGTH == harness.LENGTH - 2:
            engine.terminate_epoch(skip_epoch_completed=leaves_epochs == "skip")

    every = Events.ITERATION_COMPLETED(every=validates_every or 1)

    @trainer.on(Events.EPOCH_COMPLETED if validates_every is None else every)
    def run_validation(engine):
        evaluator.run(validation)
        weights = float(sum(parameter.sum() for parameter in ema.ema_model.parameters()))
        record("validated", error=evaluator.state.metrics["error"], weights=weights, counter=stopping.counter)

    names = "EPOCH_STARTED GET_BATCH_STARTED ITERATION_STARTED ITERATION_COMPLETED EPOCH_COMPLETED COMPLETED"
    for event in [Events[name] for name in names.split()]:

        @trainer.on(event)
        def called(engine, name=event.name):
            numbers = {key: engine.state.metrics.get(key) for key in ("average", "running")}
            values = [engine.state.iteration, engine.state.epoch, engine.state.seen, engine.state.ema_momentum]
            record(name, values=values, numbers=numbers, lr=steps.get_param())

    if stock:
        components |= {"trainer": trainer, "ema": ema.ema_model}
        (path / "checkpoints").mkdir(exist_ok=True)
        saver = DiskSaver(path / "checkpoints", require_empty=False)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), Checkpoint(components, saver, n_saved=None))
        saved = sorted((path / "checkpoints").glob("*.pt"), key=lambda one: int(one.stem.split("_")[-1]))
        if saved:
            Checkpoint.load_objects(components, torch.load(saved[-1], weights_only=False))
    elif not attaches_first:
        attach_safe()
    length = {} if epoch_length is None else {"epoch_length": epoch_length}
    limit = {"max_iters": harness.STEPS - 2} if by_iterations else {"max_epochs": harness.EPOCHS}
    trainer.run(loader, **limit, **length)


WAYS = {
    "plain": {},
    "async": {"async_save": True, "save_every": 1},
    "accumulation": {"accumulation": 4, "save_every": 1},
    "validation every 4 steps": {"validates_every": 4, "save_every": 1},
    "workers": {"workers": 2},
    "iterable": {"iterable": True, "save_every": 1},
    "shorter epochs": {"epoch_length": 4, "save_every": 1},
    "longer epochs": {"epoch_length": 8, "by_iterations": True, "save_every": 3},
    "max_iters": {"by_iterations": True, "save_every": 3},
    "terminate_epoch": {"leaves_epochs": True, "save_every": 1},
    "terminate_epoch, skipping": {"leaves_epochs": "skip", "save_every": 1},
    "attached first": {"attaches_first": True, "save_every": 1},
}


def places_of(way):
    """Return where the run is killed; of epochs of another length the borders are elsewhere."""
    if way == "terminate_epoch, skipping":  # no EPOCH_COMPLETED, so no validation
        return {name: place for name, place in harness.PLACES.items() if place.event != "validation"}
    length = WAYS[way].get("epoch_length", harness.LENGTH)
    if length == harness.LENGTH:
        return harness.PLACES
    steps = [harness.Place("step", step) for step in (2, length + 2, length, length + 1)]
    places = [*steps, harness.Place("validation", 2), harness.PLACES["during a save"]]
    return dict(zip(harness.PLACES, places, strict=True))


@pytest.mark.parametrize(("way", "place"), [("plain", "last batch"), ("validation every 4 steps", "during validation")])
def test_resume_is_exact(tmp_path, way, place):
    """Killed at a border and in the midst of a validation, the rest is the straight run's."""
    harness.assert_exact(train, tmp_path, harness.PLACES[place], **WAYS[way])


@pytest.mark.timeout(900)  # up to nine processes
@pytest.mark.parametrize("names", harness.few_or_all(harness.PLACES))
@pytest.mark.parametrize("way", WAYS)
def test_resume_is_exact_from_every_place(tmp_path, way, names):
    """Killed at six places, in each way to run a trainer."""
    places = places_of(way)
    for name in [one for one in names if one in places]:
        harness.assert_exact(train, tmp_path / name, places[name], straight=tmp_path / "straight", **WAYS[way])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", harness.few_or_all(harness.PLACES))
def test_resume_of_two_ranks_is_exact(tmp_path, names):
    """DDP over gloo, each rank with its own share of the samples, and metrics over both."""
    for name in names:
        place = harness.PLACES[name]
        harness.assert_exact(train, tmp_path / name, place, ranks=2, straight=tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("stock", ["engine", "deterministic"])
def test_checkpoints_of_ignite_are_not_exact(tmp_path, stock):
    """The baseline of the page: Ignite's own `Checkpoint` of the same objects, resumed in the middle of an epoch."""
    (comparison,) = harness.compare(train, tmp_path, harness.PLACES["middle of an epoch"], stock=stock)
    print(stock, comparison.compared, comparison.wrong, comparison.never_trained)
    assert comparison.wrong == comparison.compared == 10
