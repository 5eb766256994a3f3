"""Scalers, averages, objects with a state_dict of their own, loaders and dicts of counters."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, swa_utils

from safeckpt import CheckpointManager, HyperparameterReplacedWarning, UnsavableStateError
from safeckpt.state import capture, plan, register
from tests.comparing import bits, changes, photograph
from tests.state.runs import Net, assert_resumes, give, payload_of, refusal, run, seed_all, train_step
from tests.state.test_guard import judge, names

# -- gradient scalers -----------------------------------------------------------------------------------------------


def scaled_step(components):
    """Do one step under a gradient scaler; now and then an overflow makes it skip the step and halve the scale."""
    model, optimizer, scaler = components["model"], components["optimizer"], components["scaler"]
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    scaler.scale(loss).backward()
    if torch.rand(()) < 0.3:
        model.first.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return loss.item() + scaler.get_scale()


def scaled(enabled=True, **options):
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled, **options)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "scaler": scaler}


@pytest.mark.parametrize("kill", [0, 1, 5])
@pytest.mark.parametrize("enabled", [True, False])
def test_scaler_goes_on_with_its_scale_and_its_count(enabled, kill, memory_path):
    """Scale and growth counter resume exactly, a disabled scaler stays one."""

    def step(components):
        return scaled_step(components) if enabled else train_step(components)

    assert_resumes(lambda: scaled(enabled), memory_path, kill=kill, more=7, step=step)


@pytest.mark.parametrize("saved", [True, False])
def test_scaler_that_is_enabled_on_one_side_only_is_refused(saved):
    """Its scale would be lost, or made up."""
    words = {True: "enabled", False: "disabled"}
    assert refusal(payload_of(scaled(saved)), scaled(not saved)) == [
        f"scaler: the saved scaler is {words[saved]}, the live one is {words[not saved]}"
    ]


def test_growth_of_a_scaler_that_the_file_overrules_is_reported_and_can_be_kept():
    """How fast a scale grows is a hyper-parameter; the scale itself is none."""
    components = scaled()
    run(components, 3, scaled_step)
    payload = payload_of(components)
    live = scaled(growth_factor=4.0)
    assert give(payload, live).replaced == ["scaler.growth_factor: 4.0 -> 2.0"]
    assert live["scaler"].get_growth_factor() == 2.0
    live = scaled(growth_factor=4.0)
    assert give(payload, live, keep_live=["scaler.growth_factor"]).replaced == []
    assert live["scaler"].get_growth_factor() == 4.0
    assert live["scaler"].get_scale() == components["scaler"].get_scale()
    with pytest.raises(ValueError, match="has no hyper-parameter 'scale'; it has: growth_factor, backoff"):
        plan(register(live), payload, keep_live=["scaler.scale"])


# -- averages -------------------------------------------------------------------------------------------------------


def averaged_step(components):
    loss = train_step({"model": components["model"], "optimizer": components["optimizer"]})
    components["ema"].update_parameters(components["model"])
    if "swa" in components:
        components["swa"].step()
    return loss + components["ema"](torch.ones(8, 4)).sum().item()


@pytest.mark.parametrize("kind", ["mean", "ema", "swa with buffers"])
def test_averaged_model_goes_on_beside_the_live_one(kind, memory_path):
    """The average and its count resume exactly; the live model does not take its weights."""

    def build():
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        function = swa_utils.get_ema_multi_avg_fn(0.9) if kind == "ema" else None
        average = swa_utils.AveragedModel(model, multi_avg_fn=function, use_buffers="buffers" in kind)
        components = {"model": model, "optimizer": optimizer, "ema": average}
        if "swa" in kind:
            components["swa"] = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)
        return components

    components = assert_resumes(build, memory_path, step=averaged_step)
    assert components["ema"].n_averaged == 9
    assert not torch.equal(components["ema"].module.last.weight, components["model"].last.weight)


class Ema:
    """An average as people write it: a dict of tensors, updated by hand; some hand out the parameters themselves."""

    def __init__(self, model):
        self.model = model
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self):
        self.updates += 1
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates, "last": next(self.model.parameters())}

    def load_state_dict(self, state):
        self.shadow, self.updates = state["shadow"], state["updates"]


def test_object_with_a_state_dict_goes_on_and_shares_nothing(memory_path):
    """Any object with the two methods resumes; what it keeps of the state is its own."""

    def build():
        model = Net()
        return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "ema": Ema(model)}

    def step(components):
        loss = train_step(components)
        components["ema"].update()
        return loss + sum(tensor.sum().item() for tensor in components["ema"].shadow.values())

    components = assert_resumes(build, memory_path, step=step)
    payload = payload_of(components)
    kept = bits(payload)
    assert not payload["ema"]["last"].requires_grad
    for _ in range(2):
        give(payload, components)
        seed_all(1)
        run(components, 2, step)
    assert bits(payload) == kept


class Box:
    """Holds a value as its state."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


class Picky(Box):
    """Can tell whether a state fits."""

    def check_state(self, state):
        return [] if state == self.value else [f"wanted {self.value}", "and nothing else"]


class Other(Box):
    """The same under another name."""


@pytest.mark.parametrize("value", [None, 3, [], {"a": (1, 2)}, torch.ones(2), "text", [torch.ones(1), {"b": None}]])
def test_state_of_any_form_comes_back(value, memory_path):
    """A state_dict need not be a dict."""
    with CheckpointManager(memory_path, {"box": Box(value)}) as manager:
        manager.save(1)
    live = Box()
    with CheckpointManager(memory_path, {"box": live}) as manager:
        manager.restore()
    assert bits(live.value) == bits(value)


def test_object_of_another_class_is_refused():
    """A state is given to the class it came from."""
    assert refusal(payload_of({"box": Box(1)}), {"box": Other(1)}) == ["box: saved class Box, live class Other"]


def test_object_that_can_check_a_state_is_asked_before_anything_changes():
    """What `check_state` says is in the list with all other differences, under the component's name."""
    components = {"picky": Picky(1), "box": Box(2)}
    assert refusal(payload_of({"picky": Picky(2), "box": Other(1)}), components) == [
        "box: saved class Other, live class Box",
        "picky: and nothing else",
        "picky: wanted 1",
    ]
    give(payload_of({"picky": Picky(1), "box": Box(5)}), components)
    assert components["box"].value == 5


def test_state_that_cannot_be_read_back_is_refused_with_the_way_to_it(memory_path):
    """An object deep in a state is found at save; the next save works."""
    box = Box({"a": [0, {"b": nn.Linear(1, 1)}]})
    with CheckpointManager(memory_path, {"box": box}) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['box']['a'][1]['b']"
        box.value = 1
        assert manager.save(1).step == 1


def test_tensors_of_an_object_are_guarded():
    """NaN in an average is refused as it is in a model."""
    assert names(judge({"ema": Box({"shadow": {"w": torch.tensor([float("nan")])}})}).bad) == ["ema.shadow.w"]


# -- loaders --------------------------------------------------------------------------------------------------------


class Loader(Box):
    """A loader with a position, of somebody else's make."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class PickyLoader(Picky, Loader):
    """One that can tell whether a position fits its data."""


def test_loader_with_a_position_is_restored_after_everything_else():
    """A loader is a component like others, applied last but for the random streams."""
    order = []

    class Noting(Loader):
        def load_state_dict(self, state):
            order.append("loader")

    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_load_state_dict_post_hook(lambda _: order.append("optimizer"))
    components = {"loader": Noting(3), "model": model, "optimizer": optimizer}
    assert register(components)["loader"].kind == "loader"
    give(payload_of(components), components)
    assert order == ["optimizer", "loader"]


def test_loader_refuses_a_position_that_does_not_fit():
    """The loader's own words are in the list."""
    mismatches = refusal(payload_of({"loader": PickyLoader(1)}), {"loader": PickyLoader(2)})
    assert mismatches == ["loader: and nothing else", "loader: wanted 2"]


# -- dicts of counters ----------------------------------------------------------------------------------------------


def test_counters_are_restored_in_place(memory_path):
    """Whoever holds the dict, a dict or list inside it, a set or a tensor in it, sees the restored values."""
    live = {
        "step": 0, "best": float("inf"), "inner": {"a": 1, "old": 2}, "seen": [0], "tags": {"x"},
        "temperature": torch.tensor([1.0], requires_grad=True), "grows": None,
    }  # fmt: skip
    saved = copy.deepcopy(live) | {
        "step": 7, "best": 0.25, "inner": {"a": 5, "new": [1, {"b": 2}]}, "seen": [1, 2, 3], "tags": {"y", "z"},
        "grows": [1], "added while training": True,
    }  # fmt: skip
    with torch.no_grad():
        saved["temperature"].fill_(0.5)
    with CheckpointManager(memory_path, {"counters": saved, "o": SGD([saved["temperature"]], lr=1)}) as manager:
        manager.save(1)
    parts = {key: live[key] for key in ("inner", "seen", "tags", "temperature")}
    with CheckpointManager(memory_path, {"counters": live, "o": SGD([live["temperature"]], lr=1)}) as manager:
        manager.restore()
    assert bits(live) == bits(saved)
    assert all(live[key] is part for key, part in parts.items())
    assert live["temperature"].requires_grad


def test_counters_share_nothing_with_the_payload():
    """Counting on leaves the payload as it was."""
    counters = {"a": [1, {"b": [2]}], "c": {"d": [3]}, "t": torch.ones(1)}
    payload = payload_of({"counters": counters})
    kept = bits(payload)
    for _ in range(2):
        give(payload, {"counters": counters})
        counters["a"][1]["b"].append(5)
        counters["c"]["d"].append(6)
        counters["t"].add_(1)
    assert bits(payload) == kept


def test_counters_that_do_not_fit_are_refused_by_name():
    """An entry that the file lacks, and a trained tensor of another form, are named; what the file has more is not."""
    saved = {"a": 1, "t": torch.ones(2), "u": torch.ones(1), "v": 3, "more": 4}
    live = {"a": 2, "b": 3, "t": torch.ones(3), "u": torch.ones(1, dtype=torch.float64), "v": torch.ones(1)}
    for key in "tuv":
        live[key].requires_grad_()
    assert refusal(payload_of({"counters": saved}), {"counters": live}) == [
        "counters: entry 'b' is not in the checkpoint",
        "counters: entry 't', which is trained, was torch.float32 [2], now it is torch.float32 [3]",
        "counters: entry 'u', which is trained, was torch.float32 [1], now it is torch.float64 [1]",
        "counters: entry 'v', which is trained, was a int, now it is torch.float32 [1]",
    ]


def test_entries_and_tensors_that_grow_while_training_come_back_and_go(memory_path):
    """A longer history and an entry made half-way are restored by a fresh script, and undone by going back."""
    counters = {"history": torch.zeros(0), "best": None}
    with CheckpointManager(memory_path, {"counters": counters}) as manager:
        manager.save(1)
        counters["history"] = torch.ones(3)
        counters["epoch"] = 1
        manager.save(2)
        counters["later"] = 1
        manager.restore()
        assert bits(counters) == bits({"history": torch.ones(3), "best": None, "epoch": 1})
        manager.restore(1)
        assert bits(counters) == bits({"history": torch.zeros(0), "best": None})
    fresh = {"history": torch.zeros(0), "best": None}
    with CheckpointManager(memory_path, {"counters": fresh}) as manager:
        manager.restore(2)
    assert bits(fresh) == bits({"history": torch.ones(3), "best": None, "epoch": 1})


def test_trained_tensor_in_a_dict_goes_on_bit_for_bit(memory_path):
    """A learned temperature that no module owns is named, trained and resumed like any parameter."""

    def build():
        model = Net()
        learned = {"temperature": torch.tensor([1.0], requires_grad=True), "inner": {"b": torch.ones(2)}}
        optimizer = torch.optim.AdamW([*model.parameters(), learned["temperature"]], lr=0.05)
        return {"learned": learned, "model": model, "optimizer": optimizer}

    def step(components):
        optimizer = components["optimizer"]
        optimizer.zero_grad()
        loss = (components["model"](torch.randn(8, 4)) / components["learned"]["temperature"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    components = assert_resumes(build, memory_path, step=step)
    slots = payload_of(components)["safeckpt"]["components"]["optimizer"]["slots"][0]
    assert slots[-1]["name"] == "learned.temperature"


def test_hidden_state_with_a_graph_is_no_trained_tensor(tmp_path):
    """A computed tensor in a dict comes back without its graph, whatever shape the next step left there."""
    network = torch.nn.RNN(2, 3)
    carried = {"hidden": None}
    with CheckpointManager(tmp_path, {"network": network, "carried": carried}) as manager:
        _, carried["hidden"] = network(torch.ones(4, 5, 2))
        saved = carried["hidden"].detach().clone()
        manager.save(1)
        _, carried["hidden"] = network(torch.ones(4, 2, 2))
        manager.rollback()
    assert torch.equal(carried["hidden"], saved)
    assert not carried["hidden"].requires_grad


def test_capturing_changes_none_of_them():
    """A capture is a look at scalers, averages, objects and dicts alike."""
    model = Net()
    components = {
        **scaled(), "ema": swa_utils.AveragedModel(model), "mine": Ema(model), "counters": {"a": [1, torch.ones(1)]},
    }  # fmt: skip
    registered = register(components)
    before = photograph(**components)
    capture(registered)
    assert not changes(before, photograph(**components))


def test_report_of_replaced_options_covers_every_kind(memory_path):
    """One warning lists what was replaced in optimizer, scheduler and scaler."""

    def build(lr, gamma, growth):
        model = Net()
        optimizer = SGD(model.parameters(), lr=lr)
        scaler = torch.amp.GradScaler("cpu", growth_factor=growth)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=gamma)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    with CheckpointManager(memory_path, build(0.1, 0.5, 2.0)) as manager:
        manager.save(1)
    manager = CheckpointManager(memory_path, build(0.2, 0.9, 3.0))
    with manager, pytest.warns(HyperparameterReplacedWarning) as caught:
        manager.restore()
    lines = str(caught[0].message).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == [
        "optimizer.initial_lr", "scheduler.base_lrs", "scheduler.gamma", "scaler.growth_factor",
    ]  # fmt: skip


class AnswersToAnyName:
    """As a metric of Ignite: what is asked of it becomes another object of its kind."""

    def __init__(self):
        self.total = 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: AnswersToAnyName()

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_object_that_answers_to_any_name_is_taken_for_what_its_class_has(tmp_path):
    metric = AnswersToAnyName()
    with CheckpointManager(tmp_path, {"metric": metric}) as manager:
        metric.total = 3
        manager.save(1)
        metric.total = 0
        manager.restore()
    assert metric.total == 3
