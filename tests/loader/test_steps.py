"""The step that ended is what counts: interrupts, prefetchers, accumulation, loops over two loaders."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils.data import DataLoader

import safeckpt
from safeckpt.errors import UncapturedStateWarning
from safeckpt.loader import ResumableLoader


def build(length=8, **options):
    return ResumableLoader(DataLoader(range(length), batch_size=1), **{"seed": 0} | options)


def prefetched(loader, depth=1):
    """Iterate as a CUDA prefetcher does: the next batches are fetched before the one at hand is trained."""
    it = iter(loader)
    queue = list(itertools.islice(it, depth))
    while queue:
        batch = queue.pop(0)
        queue += itertools.islice(it, 1)
        yield batch


def train(folder, *, until=None, strike=None, ahead=None, wrap=iter, per_step=1, epochs=1):
    """Train and return the numbers seen; stop behind step `until`, or by Ctrl-C at the first batch after `strike`."""
    seen = []
    loader = build(ahead=ahead)
    with safeckpt.CheckpointManager(folder, {"loader": loader}) as manager:
        manager.restore()
        try:
            for _ in loader.epochs(epochs):
                window = []
                for batch in wrap(loader):
                    if manager.step == strike:
                        raise KeyboardInterrupt
                    window.append(int(batch))
                    if len(window) == per_step:
                        seen.append(tuple(window) if per_step > 1 else window[0])
                        window = []
                        manager.end_step(manager.step + 1, loss=1.0)
                        if manager.step == until:
                            manager.save(manager.step)
                            return seen
        except KeyboardInterrupt:
            manager.save(manager.step)
    return seen


@pytest.mark.parametrize("strike", [0, 1, 3, 7])
def test_save_in_an_interrupted_step_loses_no_batch(tmp_path, strike):
    """A batch that was fetched and not trained when Ctrl-C came is the first of the resumed run."""
    first = train(tmp_path, strike=strike)
    assert first == list(range(strike))
    assert first + train(tmp_path) == list(range(8))


@pytest.mark.parametrize("strike", [1, 2])
def test_save_in_an_interrupted_accumulation_repeats_its_batches(tmp_path, strike):
    """A window of micro-batches that was cut is begun again, whole."""
    seen = []
    loader = build()
    model = torch.nn.Linear(1, 1)
    components = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}
    with safeckpt.CheckpointManager(tmp_path, components) as manager:
        try:
            for number, batch in loader.enumerate():
                if manager.step == strike and number % 2:
                    raise KeyboardInterrupt
                model(batch.float().reshape(1, 1)).sum().backward()
                seen.append(int(batch))
                if number % 2:
                    components["optimizer"].step()
                    manager.end_step(manager.step + 1, loss=1.0)
        except KeyboardInterrupt:
            path = manager.save(manager.step).path
    assert seen == list(range(2 * strike + 1))
    saved = torch.load(path, weights_only=True)
    assert (saved["loader"]["epoch"], saved["loader"]["batch"]) == (0, 2 * strike)
    again = build()
    again.load_state_dict(saved["loader"])
    assert [int(batch) for batch in again] == list(range(2 * strike, 8))
    assert "grad" not in str(saved["safeckpt"].get("gradients", ""))


def test_save_between_micro_steps_keeps_what_has_run(tmp_path):
    """A save in the body, with gradients under way, goes on behind the micro-batch that gave them."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = build()
    with safeckpt.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer, "loader": loader}) as manager:
        for number, batch in loader.enumerate():
            model(batch.float().reshape(1, 1)).sum().backward()
            if number == 1:
                optimizer.step()
                manager.end_step(1, loss=1.0)
            if number == 2:
                path = manager.save(1).path
                break
    saved = torch.load(path, weights_only=True)["loader"]
    assert (saved["epoch"], saved["batch"]) == (0, 3)


@pytest.mark.parametrize("until", range(1, 9))
@pytest.mark.parametrize("depth", [1, 3])
def test_declared_prefetcher_resumes_at_the_first_batch_that_was_not_trained(tmp_path, depth, until):
    """With `ahead`, saved behind any step up to the last of an epoch, nothing is lost and nothing comes twice."""
    options = {"ahead": depth, "wrap": lambda loader: prefetched(loader, depth), "epochs": 2}
    first = train(tmp_path, until=until, **options)
    assert first == list(range(until))
    assert first + train(tmp_path, **options) == 2 * list(range(8))


@pytest.mark.parametrize("until", [1, 2, 3, 4])
def test_declared_prefetcher_with_accumulation(tmp_path, until):
    """Two batches a step and one ahead: the position is behind the window that ended."""
    options = {"ahead": 1, "wrap": prefetched, "per_step": 2}
    first = train(tmp_path, until=until, **options)
    assert first + train(tmp_path, **options) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_interrupt_under_a_prefetcher_repeats_what_was_not_trained(tmp_path):
    """Both the batch at hand and the one ahead come again."""
    options = {"ahead": 1, "wrap": prefetched}
    first = train(tmp_path, strike=3, **options)
    assert first + train(tmp_path, **options) == list(range(8))


@pytest.mark.parametrize(("depth", "per_step"), [(1, 1), (2, 1), (1, 2)])
def test_undeclared_prefetcher_is_named_at_the_second_step(tmp_path, depth, per_step):
    """More batches came before the first step than before the second, and the message says what to write."""
    with pytest.raises(RuntimeError, match=rf"fetches {depth} ahead.* ResumableLoader\(\.\.\., ahead={depth}\)"):
        train(tmp_path, wrap=lambda loader: prefetched(loader, depth), per_step=per_step)
    assert list(tmp_path.glob("step-*")) == []


@pytest.mark.parametrize("sized", [True, False])
def test_undeclared_prefetcher_over_a_stream_is_named_too(sized):
    """Where the length is not known the third step says it."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    loader = ResumableLoader(DataLoader(range(8) if sized else Stream(), batch_size=1), seed=0)
    steps = []

    def train():
        for batch in prefetched(loader):
            steps.append(int(batch))
            loader.end_step(len(steps))

    with pytest.raises(RuntimeError, match="fetches 1 ahead"):
        train()
    assert steps == ([0, 1] if sized else [0, 1, 2])


@pytest.mark.parametrize(("length", "per_step"), [(3, 2), (7, 4), (8, 2), (5, 5), (2, 3)])
def test_accumulation_with_a_remainder_is_no_prefetcher(length, per_step):
    """Windows that are cut by the end of the epoch, and whole ones, are told from a look-ahead."""
    loader = build(length)
    step = 0
    for _ in loader.epochs(4):
        for number, _ in loader.enumerate():
            if (number + 1) % per_step == 0 or number + 1 == length:
                loader.end_step(step := step + 1)


def test_first_batch_left_out_is_said_with_ahead_0():
    """A loop that passes over its first batch looks like a prefetcher until it says otherwise."""

    def train(loader):
        for number, _ in loader.enumerate():
            if number:
                loader.end_step(number)

    with pytest.raises(RuntimeError, match="ahead=0 if the batches before the first step were left out on purpose"):
        train(build())
    train(build(ahead=0))


def test_run_that_was_looked_at_once_is_not_looked_at_again():
    """A resume that passes over its first batch does not stop a run in which no prefetcher was found."""
    loader = build()
    it = iter(loader)
    next(it)
    loader.end_step(1)
    again = build()
    again.load_state_dict(loader.state_dict())
    for number, _ in again.enumerate():
        if number > 1:
            again.end_step(number)


def test_batches_fetched_by_another_thread_are_refused():
    """How far a thread is ahead is not known at a step, so it is an error at the first one."""
    loader = build()
    batches = []
    thread = threading.Thread(target=lambda: batches.extend(itertools.islice(loader, 3)))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="fetched by another thread"):
        loader.end_step(1)


def test_rollback_under_a_prefetcher_is_refused_where_stale_batches_would_come():
    """The batch that a prefetcher still holds is not of the rewound position, so the loop has to be left."""
    loader = build(ahead=1)
    state = loader.state_dict()
    batches = prefetched(loader)
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="leave the loop and iterate the loader again"):
        next(batches)
    assert [int(batch) for batch in loader] == list(range(8))


def test_last_batches_are_those_given_to_the_training():
    """What is only fetched ahead is not to blame for a step that failed."""
    loader = build(ahead=1)
    batches = prefetched(loader)
    next(batches), next(batches)
    assert loader.last_batches(1) == [(0, 1)]
    assert loader.last_batches(5) == [(0, 0), (0, 1)]


def test_same_step_twice_counts_once():
    """A manager says so at the end of a step and again when it saves it."""
    loader = build()
    it = iter(loader)
    next(it)
    loader.end_step(1)
    next(it)
    loader.end_step(1)
    assert loader.state_dict()["batch"] == 1
    assert loader.since_step == 1
    loader.end_step(2)
    assert loader.state_dict()["batch"] == 2


def test_position_after_the_loop_is_the_next_epoch():
    """A save between epochs begins with the next one, under steps as without."""
    loader = build(3)
    for number, _ in loader.enumerate():
        loader.end_step(number + 1)
        assert loader.state_dict()["batch"] == number + 1
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)


@pytest.mark.parametrize("evaluates", [False, True])
def test_save_at_the_end_of_an_epoch_without_steps_inside_is_the_next_epoch(evaluates):
    """A script that saves once an epoch, after an evaluation on the training set or not, resumes with the next one."""
    loader = build(3)
    loader.expect_end_step()
    for epoch in loader.epochs(3):
        list(loader)
        if evaluates:
            list(loader)
        loader.end_step(epoch + 1)
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (epoch + 1, 0)


def test_epochs_without_a_save_are_epochs_all_the_same():
    """Plain loops that save every second epoch see a new order in each."""
    loader = ResumableLoader(DataLoader(range(50), batch_size=10, shuffle=True), seed=0)
    loader.expect_end_step()
    orders = []
    for epoch in range(6):
        orders.append(str(list(loader)))
        if epoch % 2:
            loader.end_step(epoch)
    assert len(set(orders)) == 6
    assert loader.epoch == 6


@pytest.mark.parametrize("loop", ["cycle", "bare dataloader"])
def test_loader_that_stands_still_while_steps_end_is_named(loop):
    """Steps without a batch of the registered loader: a warning that says what to iterate."""
    loader = build(4)
    batches = itertools.cycle(loader) if loop == "cycle" else itertools.cycle(loader.dataloader)

    def train():
        for step, _ in enumerate(itertools.islice(batches, 60), start=1):
            loader.end_step(step)

    with pytest.warns(UncapturedStateWarning, match="20 steps have ended since ResumableLoader over range") as caught:
        train()
    assert len(caught) == 1


@pytest.mark.parametrize("order", ["short first", "long first"])
@pytest.mark.parametrize("where", ["in the body", "after the loop"])
@pytest.mark.parametrize("at", [2, 3, 5, 6])
def test_zipped_loaders_resume_side_by_side(order, where, at):
    """Cut at the end of the shorter one, the longer begins its next epoch, in the resumed run as in the first."""

    def pair():
        return build(3, seed=1), ResumableLoader(DataLoader(range(10, 18), batch_size=1, shuffle=True), seed=2)

    def train(short, long, state=None):
        pairs, saved = [], None
        while short.epoch < 3:
            both = (short, long) if order == "short first" else (long, short)
            for one, other in zip(*both, strict=False):
                pairs.append((int(one), int(other)))
                for loader in (short, long):
                    loader.end_step(len(pairs))
                if len(pairs) == at and where == "in the body":
                    saved = [loader.state_dict() for loader in (short, long)]
            if len(pairs) == at and where == "after the loop":
                saved = [loader.state_dict() for loader in (short, long)]
        return pairs, saved

    pairs, saved = train(*pair())
    assert len(pairs) == 9
    if saved is None:
        pytest.skip("no epoch ends there")
    loaders = pair()
    for loader, state in zip(loaders, saved, strict=True):
        loader.load_state_dict(state)
    assert train(*loaders)[0] == pairs[at:]


def test_alternating_loaders_each_have_their_own_position():
    """Two iterators asked in turn, the shorter begun anew at its end."""

    def run(loaders, steps):
        iterators = [iter(loader) for loader in loaders]
        for step in steps:
            which = step % 2
            try:
                batch = next(iterators[which])
            except StopIteration:
                iterators[which] = iter(loaders[which])
                batch = next(iterators[which])
            seen.append(int(batch))
            for loader in loaders:
                loader.end_step(step + 1)
            states.append([loader.state_dict() for loader in loaders])

    def pair():
        return [ResumableLoader(DataLoader(range(n), batch_size=1, shuffle=True), seed=n) for n in (3, 5)]

    seen, states = [], []
    run(pair(), range(20))
    straight, saved = seen, states
    for at in (5, 6, 7, 10, 13):
        loaders = pair()
        for loader, state in zip(loaders, saved[at - 1], strict=True):
            loader.load_state_dict(state)
        seen, states = [], []
        run(loaders, range(at, 20))
        assert seen == straight[at:], at


def test_batch_held_across_steps_is_exact_as_a_component(tmp_path):
    """A loop that fetches the next batch at the end of its step hands that batch over, and the losses are equal."""

    def run(folder, until=None):
        torch.manual_seed(0)
        data = torch.randn(12, 4)
        loader = ResumableLoader(DataLoader(data, batch_size=2, shuffle=True), seed=0, ahead=0)
        model = torch.nn.Linear(4, 1)
        held = {"X": torch.zeros(2, 4)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        components = {"model": model, "optimizer": optimizer, "loader": loader, "batch": held}
        losses = []

        def batches():
            for _ in loader.epochs(3):
                yield from loader

        with safeckpt.CheckpointManager(folder, components, save_every=1) as manager:
            it = batches()
            if manager.restore() is None:
                held["X"] = next(it)
            while manager.step < 15:
                loss = model(held["X"]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                held["X"] = next(it)
                losses.append(loss.item())
                manager.end_step(manager.step + 1, loss=loss)
                if manager.step == until:
                    break
        return losses

    straight = run(tmp_path / "straight")
    for until in (3, 6, 11):
        folder = tmp_path / str(until)
        assert run(folder, until) + run(folder) == straight
