"""What is one object in several places of plain dicts is one object after a restore, and what is not is not."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from safeckpt import CheckpointManager, ComponentChangedWarning, UncapturedStateWarning
from safeckpt.state import Mixture, plan, register
from tests.state.runs import give, payload_of, refusal


def through_file(path, saved, live, **options):
    """Save the first components, restore them into the second, and return these."""
    with CheckpointManager(path, saved) as manager:
        manager.save(1)
    with CheckpointManager(path, live) as manager:
        manager.restore(**options)
    return live


def make_tensor():
    return torch.arange(4.0)


MAKERS = {
    "tensor": make_tensor,
    "array": lambda: np.arange(4.0),
    "list": lambda: [1, 2],
    "empty list": list,
    "deque": lambda: deque([1, 2], maxlen=3),
    "dict": lambda: {"x": torch.ones(2)},
    "set": lambda: {1, 2},
    "tuple": lambda: ([1], 2),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("live", ["empty", "separate", "the same"])
def test_one_object_in_two_dicts_is_one_again(kind, live, memory_path):
    """In a dict, and across two components, whatever the script begins with."""
    one = MAKERS[kind]()
    saved = {"a": {"x": one, "y": [{"z": one}]}, "b": {"w": one}}
    other = MAKERS[kind]()
    begins = {
        "empty": lambda: {"a": {}, "b": {}},
        "separate": lambda: {"a": {"x": MAKERS[kind](), "y": [{"z": MAKERS[kind]()}]}, "b": {"w": MAKERS[kind]()}},
        "the same": lambda: {"a": {"x": other, "y": [{"z": other}]}, "b": {"w": other}},
    }
    restored = through_file(memory_path, saved, begins[live]())
    first = restored["a"]["x"]
    assert first is restored["a"]["y"][0]["z"]
    assert first is restored["b"]["w"]
    assert type(first) is type(one)
    assert first is other or live != "the same" or kind == "tuple"


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "deque", "dict"])
def test_separate_objects_are_not_written_over_by_a_place_that_shares_one_now(kind, memory_path):
    """What the script has as one object, and the checkpoint as two, becomes two."""

    def fill(value, number):
        if isinstance(value, dict):
            value["x"].fill_(number)
        else:
            value[0] = number
        return value

    def read(value):
        return float(value["x"][0] if isinstance(value, dict) else value[0])

    saved = {"a": {"x": fill(MAKERS[kind](), 5), "y": fill(MAKERS[kind](), 6)}, "b": {"w": fill(MAKERS[kind](), 7)}}
    one = MAKERS[kind]()
    restored = through_file(memory_path, saved, {"a": {"x": one, "y": one}, "b": {"w": one}})
    assert [read(value) for value in (*restored["a"].values(), *restored["b"].values())] == [5, 6, 7]
    assert restored["a"]["x"] is one  # other names for it stay valid


@pytest.mark.parametrize("live", ["empty", "separate"])
def test_parameter_in_a_dict_is_that_of_the_model_again(live, memory_path):
    """A dict that holds a parameter, a buffer or a view of one sees what training does to them."""

    def build():
        torch.manual_seed(0)
        return nn.BatchNorm1d(3)

    def held(model):
        return {
            "scale": model.weight, "detached": model.bias.detach(), "mean": model.running_mean,
            "first": model.running_var[:2], "last": model.running_var[2],
        }  # fmt: skip

    model = build()
    extra = held(model)
    again = build()
    begin = {} if live == "empty" else {"mean": torch.zeros(3), "first": torch.zeros(2), "last": None}
    restored = through_file(memory_path, {"model": model, "extra": extra}, {"model": again, "extra": begin})["extra"]
    assert restored["scale"] is again.weight
    assert not restored["detached"].requires_grad
    with torch.no_grad():
        for tensor in (again.weight, again.bias, again.running_mean, again.running_var):
            tensor.copy_(torch.tensor([7.0, 8.0, 9.0]))
    assert restored["detached"].tolist() == restored["mean"].tolist() == [7, 8, 9]
    assert (restored["first"].tolist(), restored["last"].item()) == ([7, 8], 9)


def test_component_that_is_inside_another_one_stays_it(memory_path):
    """A dict that is a component and an entry of another component."""
    inner = {"n": 1}
    live = {"n": 0}
    restored = through_file(memory_path, {"outer": {"in": inner}, "inner": inner}, {"outer": {"in": {}}, "inner": live})
    assert restored["outer"]["in"] is live
    assert live == {"n": 1}


def test_latest_row_of_a_buffer_is_a_view_of_the_buffer(memory_path):
    """A view into a tensor that is filled in place looks at that tensor, not at a copy of the file's."""
    rows = torch.arange(6.0).reshape(3, 2)
    live = torch.zeros(3, 2)
    replay = through_file(memory_path, {"r": {"rows": rows, "row": rows[1]}}, {"r": {"rows": live, "row": None}})["r"]
    assert replay["rows"] is live
    live[1] = 9
    assert replay["row"].tolist() == [9, 9]


def test_rollback_from_memory_makes_one_again(memory_path):
    """The copy of an asynchronous save is no other state than a file."""
    shared = make_tensor()
    a, b = {"x": shared}, {"y": shared}
    with CheckpointManager(memory_path, {"a": a, "b": b}, async_save=True) as manager:
        manager.save(1)
        manager.wait()
        b["y"] = torch.zeros(4)
        manager.rollback(changed=True)
    assert a["x"] is b["y"] is shared
    assert shared.tolist() == [0, 1, 2, 3]


def test_trained_tensors_that_are_separate_now_are_refused():
    """An optimizer holds them: they cannot be exchanged."""
    one = torch.ones(2, requires_grad=True)
    payload = payload_of({"a": {"x": one}, "b": {"y": one}})
    live = {"a": {"x": torch.ones(2, requires_grad=True)}, "b": {"y": torch.ones(2, requires_grad=True)}}
    assert refusal(payload, live) == ["a.x and b.y: one tensor in the checkpoint, separate tensors now"]
    assert refusal(payload_of(live), {"a": {"x": one}, "b": {"y": one}}) == [
        "a.x and b.y: separate tensors in the checkpoint, one tensor now"
    ]


def test_origin_that_is_not_restored_is_named(memory_path):
    """A component that keeps its live state is not what a place held when the run was saved."""
    shared = make_tensor()
    live = {"a": {"x": torch.zeros(4)}, "b": {}}
    with pytest.warns(ComponentChangedWarning, match=r"b\.y: it was a\.x in the run that saved, which is not restored"):
        through_file(memory_path, {"a": {"x": shared}, "b": {"y": shared}}, live, fresh=("a",))
    assert live["b"]["y"].tolist() == [0, 1, 2, 3]
    assert live["a"]["x"].tolist() == [0, 0, 0, 0]


def test_entry_that_keeps_its_live_state_is_not_made_another():
    """`fresh=` is stronger than what was one object."""
    shared = make_tensor()
    live = {"a": {"x": torch.zeros(4), "y": torch.full((4,), 5.0)}}
    give(payload_of({"a": {"x": shared, "y": shared}}), live, fresh=("a.y",))
    assert live["a"]["x"].tolist() == [0, 1, 2, 3]
    assert live["a"]["y"].tolist() == [5, 5, 5, 5]


class Fails:
    """A component that cannot be loaded."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise RuntimeError("no")


def test_failing_component_leaves_shared_objects_as_they_were():
    """What was let go is put back, values and identity."""
    payload = payload_of({"a": {"x": torch.ones(2), "y": torch.zeros(2)}, "z": Fails()})
    one = torch.full((2,), 3.0)
    live = {"a": {"x": one, "y": one}, "z": Fails()}
    ready = plan(register(live), payload)
    with pytest.raises(RuntimeError, match="no"):
        ready.apply(Mixture())
    assert live["a"]["x"] is live["a"]["y"] is one
    assert one.tolist() == [3, 3]


def test_record_that_names_no_place_is_refused():
    """A file made by hand is refused before anything changes."""
    payload = payload_of({"a": {"x": 1}})
    payload["safeckpt"]["components"]["a"]["aliases"] = [[["a", "y"], ["a", "x"], None]]
    assert refusal(payload, {"a": {"x": 0}}) == [
        "a.y: the checkpoint says that it is in two places, and does not hold it"
    ]


def test_constants_are_no_aliases():
    """Equal numbers, texts and tuples of numbers are not noted."""
    pair = (0.9, 0.999)
    payload = payload_of({"a": {"x": pair, "y": pair, "n": "text", "m": "text"}, "b": {"x": pair}})
    assert payload["safeckpt"]["components"]["a"]["aliases"] == []


@pytest.mark.parametrize("trained", [False, True])
def test_order_of_the_components_does_not_matter(trained, memory_path):
    """Which place is the first one is a matter of their order, and says nothing of what is shared."""
    shared = torch.ones(2, requires_grad=trained)
    with CheckpointManager(memory_path, {"a": {"t": shared}, "b": {"t": shared}}) as manager:
        manager.save(1)
    live = torch.zeros(2, requires_grad=trained)
    components = {"b": {"t": live}, "a": {"t": live}}
    with CheckpointManager(memory_path, components) as manager:
        manager.restore()
    assert components["a"]["t"] is components["b"]["t"] is live
    assert live.tolist() == [1, 1]


def test_file_that_says_nothing_of_aliases_leaves_what_is_shared():
    """As those of release 0.1.0, which did not know."""
    payload = payload_of({"a": {"x": torch.ones(2)}, "b": {"y": torch.ones(2)}})
    for name in ("a", "b"):
        del payload["safeckpt"]["components"][name]["aliases"]
    one = torch.zeros(2)
    live = {"a": {"x": one}, "b": {"y": one}}
    give(payload, live)
    assert live["a"]["x"] is live["b"]["y"] is one
    assert one.tolist() == [1, 1]


class Holder:
    """An object with a state of its own, which a load replaces or fills."""

    def __init__(self, value, *, fills=False):
        self.value = value
        self.fills = fills

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.fills and isinstance(self.value, torch.Tensor):
            self.value.copy_(state["value"])
        elif self.fills:
            self.value[:] = state["value"]
        else:
            self.value = state["value"]


ORIGINS = {"tensor": make_tensor, "array": lambda: np.arange(4.0), "list": lambda: [0.0, 1.0, 2.0, 3.0]}


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize("holder_first", [True, False])
def test_dict_that_shares_with_an_object_shares_again(kind, fills, holder_first, memory_path):
    """Whatever its `load_state_dict` has made of it, where the script began with two."""
    make = ORIGINS[kind]
    shared = make()
    shared[0] = 7.0
    components = {"meter": Holder(shared, fills=fills), "best": {"value": shared}}
    live = {"meter": Holder(make(), fills=fills), "best": {"value": make()}}
    if not holder_first:
        components, live = (dict(reversed(one.items())) for one in (components, live))
    through_file(memory_path, components, live)
    live["meter"].value[1] = 9.0
    assert [float(one) for one in live["best"]["value"]] == [float(one) for one in live["meter"].value] == [7, 9, 2, 3]


@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize("holder_first", [True, False])
def test_dict_keeps_what_the_script_holds_when_an_object_parts_from_it(kind, holder_first, memory_path):
    """Its entry is filled in place as ever: the script goes on with that, and is told that the object does not."""
    shared, own = ORIGINS[kind](), ORIGINS[kind]()
    shared[0] = 7.0
    components = {"meter": Holder(shared), "best": {"value": shared}}
    live = {"meter": Holder(own), "best": {"value": own}}
    if not holder_first:
        components, live = (dict(reversed(one.items())) for one in (components, live))
    with pytest.warns(UncapturedStateWarning, match=r"best\.value and meter\.value: one object in the run that saved"):
        through_file(memory_path, components, live)
    assert live["best"]["value"] is own
    assert [float(one) for one in own] == [7, 1, 2, 3]

    filled = ORIGINS[kind]()
    live = {"meter": Holder(filled, fills=True), "best": {"value": filled}}
    through_file(memory_path / "filled", components, live)  # no warning, which would be an error
    assert live["best"]["value"] is live["meter"].value is filled


def test_container_that_two_objects_share_is_not_named(memory_path):
    """A configuration that both were given is hardly ever changed."""

    def build():
        config = {"rate": 0.1, "milestones": [1, 2]}
        return {"a": Holder(config), "b": Holder(config)}

    through_file(memory_path, build(), build())  # no warning, which would be an error


@pytest.mark.parametrize("partner", ["buffer", "object", "flat"])
def test_objects_that_share_no_longer_are_named(partner, memory_path):
    """A module's tensor and an object's, two objects', or a flat tensor that the module has views of."""

    def build(fills):
        module = nn.BatchNorm1d(4)
        if partner == "object":
            shared = make_tensor()
            return {"a": Holder(shared, fills=fills), "b": Holder(shared, fills=fills)}
        flat = torch.zeros(8)
        module.running_mean, module.running_var = flat[:4], flat[4:]
        held = flat if partner == "flat" else module.running_mean
        return {"model": module, "meter": Holder(held, fills=fills)}

    names = {
        "buffer": r"meter\.value and model\.running_mean",
        "object": r"a\.value and b\.value",
        "flat": "meter.value",
    }
    with pytest.warns(
        UncapturedStateWarning, match=rf"{names[partner]}.*one object in the run that saved, and two now"
    ):
        through_file(memory_path, build(fills=False), build(fills=False))
    through_file(memory_path / "filled", build(fills=True), build(fills=True))  # no warning, which would be an error


def test_objects_that_share_only_now_are_named(memory_path):
    """The state of one overwrites that of the other."""
    saved = {"a": Holder(torch.zeros(2), fills=True), "b": Holder(torch.ones(2), fills=True)}
    one = torch.zeros(2)
    live = {"a": Holder(one, fills=True), "b": Holder(one, fills=True)}
    with pytest.warns(
        UncapturedStateWarning, match=r"a\.value and b\.value: separate in the run that saved, and one now"
    ):
        through_file(memory_path, saved, live)


def test_rate_that_two_optimizers_share_is_named(memory_path):
    """The options of an optimizer are replaced by torch: a rate given as a tensor is then two."""

    def build():
        rate = torch.tensor(0.1)
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        return {
            "model": model, "other": other,
            "first": torch.optim.SGD(model.parameters(), lr=rate),
            "second": torch.optim.SGD(other.parameters(), lr=rate),
        }  # fmt: skip

    with pytest.warns(UncapturedStateWarning, match=r"first\.param_groups\.0\.lr and second\.param_groups\.0\.lr"):
        through_file(memory_path, build(), build())


def test_rate_and_moment_in_a_dict_are_those_of_the_optimizer_again(memory_path):
    """At its start a script has others there, since torch makes them anew."""

    def build():
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    model, optimizer = build()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen = {"lr": optimizer.param_groups[0]["lr"], "moment": optimizer.state[model.weight]["momentum_buffer"]}
    started = dict(zip(("model", "optimizer"), build(), strict=True))
    live = through_file(
        memory_path,
        {"model": model, "optimizer": optimizer, "seen": seen},
        {**started, "seen": {"lr": torch.tensor(0.2), "moment": torch.zeros(1, 2)}},
    )
    optimizer, model = live["optimizer"], live["model"]
    assert live["seen"]["lr"] is optimizer.param_groups[0]["lr"]
    moment = optimizer.state[model.weight]["momentum_buffer"]
    assert live["seen"]["moment"].data_ptr() == moment.data_ptr()
