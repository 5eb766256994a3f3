"""Containers and arrays that a file has no word for come back as what they were; trained tensors stay the same ones."""

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from safeckpt import CheckpointManager, StateMismatchError, UnsavableStateError
from safeckpt.state import register
from safeckpt.state.containers import from_plain, to_plain
from tests.comparing import bits
from tests.state.runs import give, payload_of, refusal


class Holder:
    """Any object with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def contents():
    return {
        "obs": np.arange(6, dtype=np.float32).reshape(3, 2),
        "flags": np.array([True, False]),
        "words": np.arange(3, dtype=np.uint16),
        "big": np.arange(3, dtype=">i4"),
        "recent": deque([1.5, np.zeros(2), deque([1])], maxlen=5),
        "counts": defaultdict(int, {"a": 1}),
        "lists": defaultdict(list, {3: [1, np.ones(1)]}),
        "tuple": (1, np.full((), 7.0), {"x": deque()}),
        "plain": [1, "two", None, {"three": 3}],
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "tensor": torch.ones(2),
    }


def test_state_of_an_object_comes_back_in_its_containers_and_arrays(memory_path):
    """Through a file, every deque, defaultdict and array has its type, dtype, length limit and factory."""
    with CheckpointManager(memory_path, {"object": Holder(contents()), "c": {}}) as manager:
        path = manager.save(1).path
    loaded = torch.load(path)["object"]
    assert (type(loaded["obs"]), type(loaded["recent"]), type(loaded["counts"])) == (torch.Tensor, list, dict)
    restored = Holder({})
    with CheckpointManager(memory_path, {"object": restored, "c": {}}) as manager:
        manager.restore()
        assert bits(restored.state) == bits(contents())
        restored.state["obs"][0] = 9
        restored.state["recent"].append(2)
        manager.rollback(changed=True)
        assert bits(restored.state) == bits(contents())


def test_state_without_such_containers_is_handed_on_as_it_is():
    """Nothing is copied for the many states that need no note."""
    tree = {"a": [1, (2, {"b": torch.ones(1)})], 3: OrderedDict(c=[4])}
    plain = to_plain(tree, "x")
    assert plain.tree is tree
    assert plain.notes == []
    assert from_plain(tree, plain.notes, {}) is tree


def test_factory_that_no_file_can_hold_is_refused_by_name(memory_path):
    """A defaultdict that makes values with a function is refused when the manager is built, with the way out."""
    holder = Holder({"a": [defaultdict(lambda: 1)]})
    with pytest.raises(UnsavableStateError, match=r"object\.a\.0 is a defaultdict with a factory of its") as caught:
        CheckpointManager(memory_path, {"object": holder})
    assert "dict(object.a.0)" in str(caught.value)


def test_dict_is_filled_in_place_all_the_way_down(memory_path):
    """Whoever holds a container, an array or a tensor of a plain dict sees the restored values in it."""
    first = {
        "deque": deque([torch.ones(2), 3], maxlen=4), "default": defaultdict(list, {"a": [1]}),
        "array": np.arange(4.0), "tuple": (torch.zeros(2), [1, 2]), "list": [torch.zeros(3), {"x": np.zeros(2)}],
    }  # fmt: skip
    with CheckpointManager(memory_path, {"c": first, "d": {}}) as manager:
        manager.save(1)
    held = [
        first["deque"], first["deque"][0], first["default"], first["default"]["a"], first["array"], first["tuple"][0],
        first["tuple"][1], first["list"][0], first["list"][1]["x"],
    ]  # fmt: skip
    before = [bits(item) for item in held]
    for item in (first["deque"][0], first["tuple"][0], first["list"][0]):
        item.fill_(7)
    first["array"][:] = first["list"][1]["x"][:] = 7
    first["deque"].append(1)
    first["default"]["b"].append(2)
    first["default"]["a"].append(2)
    first["tuple"][1].clear()
    tuple_before = first["tuple"]
    with CheckpointManager(memory_path, {"c": first, "d": {}}) as manager:
        manager.restore()
    assert [bits(item) for item in held] == before
    assert first["deque"] is held[0]
    assert first["default"]["a"] is held[3]
    assert first["tuple"] is tuple_before


def places():
    def tensor():
        return torch.ones(3, requires_grad=True)

    return {
        "list": ({"layers": [tensor(), tensor()]}, lambda d: d["layers"][1], "layers.1"),
        "tuple": ({"layers": (tensor(), 1)}, lambda d: d["layers"][0], "layers.0"),
        "dict in a list": ({"layers": [{"w": tensor()}]}, lambda d: d["layers"][0]["w"], "layers.0.w"),
        "deque": ({"layers": deque([tensor()])}, lambda d: d["layers"][0], "layers.0"),
        "entry": ({"w": tensor()}, lambda d: d["w"], "w"),
    }


@pytest.mark.parametrize("place", places())
def test_trained_tensor_in_a_dict_stays_the_one_that_the_optimizer_holds(place, memory_path):
    """Restored in place, at any depth, and still trained: the next step moves what the dict holds."""
    values, get, _ = places()[place]
    weight = get(values)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with CheckpointManager(memory_path, {"params": values, "optimizer": optimizer}) as manager:
        manager.save(1)
        (weight.sum() * 5).backward()
        optimizer.step()
        assert weight.tolist() == [0.5] * 3
        manager.restore(1)
    assert get(values) is weight
    assert weight.requires_grad
    assert weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("place", places())
def test_trained_tensor_of_another_form_is_refused_by_its_key_path(place):
    """What the optimizer holds cannot be exchanged for another tensor."""
    values, get, path = places()[place]
    payload = payload_of({"params": values})
    with torch.no_grad():
        get(values).set_(torch.ones(4))
    (mismatch,) = refusal(payload, {"params": values})
    assert mismatch == (f"params: entry {path!r}, which is trained, was torch.float32 [3], now it is torch.float32 [4]")


def test_list_with_fewer_trained_tensors_is_refused():
    """A trained tensor without a saved value would keep its own, silently."""
    payload = payload_of({"params": {"layers": [torch.ones(1, requires_grad=True)]}})
    live = {"params": {"layers": [torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)]}}
    assert refusal(payload, live) == [
        "params: entry 'layers.1', which is trained, was a NoneType, now it is torch.float32 [1]"
    ]


HIDDEN = {
    "dict of optimizers": (lambda m: {"a": torch.optim.SGD(m.parameters(), lr=1)}, "holds a SGD at 'a'"),
    "list of optimizers": (lambda m: [torch.optim.SGD(m.parameters(), lr=1)], "holds a SGD at 0"),
    "tuple of modules": (lambda m: (m, m), "holds a Linear at 0"),
    "dict with a scaler": (lambda _: {"n": 1, "s": torch.amp.GradScaler("cpu")}, "holds a GradScaler at 's'"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_components_inside_a_container_are_refused_when_the_manager_is_built(kind):
    """As plain values they could not be saved; the text has the line to write instead."""
    make, text = HIDDEN[kind]
    with pytest.raises(TypeError, match=text) as caught:
        register({"things": make(torch.nn.Linear(1, 1))})
    assert "{..., **{f'things_{key}': value for key, value in" in str(caught.value)


def test_random_contents_come_back(memory_path):
    """Containers nested at random, each through a save and a restore."""
    drawn = random.Random(5)

    def make(depth):
        kind = drawn.choice(["list", "tuple", "dict", "deque", "default", "array", "number"] if depth else ["number"])
        few = [make(depth - 1) for _ in range(drawn.randrange(3))] if depth else []
        return {
            "list": few, "tuple": tuple(few), "dict": dict(enumerate(few)),
            "deque": deque(few, drawn.choice([None, 4])),
            "default": defaultdict(drawn.choice([int, list, None]), enumerate(few)), "array": np.arange(float(depth)),
            "number": depth,
        }[kind]  # fmt: skip

    states = {f"o{index}": make(5) for index in range(40)}
    payload = payload_of({name: Holder({"s": state}) for name, state in states.items()})
    live = {name: Holder({}) for name in states}
    give(payload, live)
    for name, state in states.items():
        assert bits(live[name].state["s"]) == bits(state)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: defaultdict(list), lambda found: found["a"].append(3)),
        (Counter, lambda found: found.update("aab")),
    ],
    ids=["defaultdict", "Counter"],
)
def test_dict_of_another_class_is_a_component(tmp_path, make, change):
    """It is restored in place, and stays what it was."""
    component = make()
    change(component)
    with CheckpointManager(tmp_path, {"found": component}) as manager:
        manager.save(1)
    fresh = make()
    with CheckpointManager(tmp_path, {"found": fresh}) as manager:
        manager.restore()
    assert type(fresh) is type(component)
    assert repr(fresh) == repr(component)


@pytest.mark.parametrize("component", [[1], {1}, deque([1])], ids=["list", "set", "deque"])
def test_container_without_names_is_refused_with_the_line_to_write(tmp_path, component):
    """A list or a deque is restored in place inside a dict."""
    with pytest.raises(TypeError, match=r"\{'memory': \{'items': memory\}\}"):
        CheckpointManager(tmp_path, {"memory": component})
    with CheckpointManager(tmp_path, {"memory": {"items": component}}) as manager:
        manager.save(1)
        manager.restore()


class Mode(enum.Enum):
    """What is watched, and in which direction."""

    MIN = "min"
    MAX = "max"


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


class Access(enum.Flag):
    """Nothing, and both together, have names of their own."""

    NONE = 0
    READ = 1
    WRITE = 2
    BOTH = 3


@pytest.mark.parametrize("member", list(Access.__members__.values()))
def test_named_combination_of_flags_is_kept(member, memory_path):
    """Its name says what it is."""
    with CheckpointManager(memory_path, {"x": {"access": member}}) as manager:
        manager.save(1)
    live = {"access": Access.READ}
    with CheckpointManager(memory_path, {"x": live}) as manager:
        manager.restore()
    assert live["access"] is member


@pytest.mark.parametrize("live", [None, "member"])
@pytest.mark.parametrize("saved", ["member", "deque"])
def test_entry_that_keeps_its_live_value_needs_nothing_of_the_saved_one(saved, live, memory_path):
    """What the checkpoint notes of it is of the value that is not taken."""
    values = {None: None, "member": Mode.MIN, "deque": deque([1])}
    before = {"p": Mode.MAX if saved == "member" else values[saved], "n": 1}
    with CheckpointManager(memory_path, {"x": before}) as manager:
        manager.save(1)
    now = {"p": values[live], "n": 0}
    with CheckpointManager(memory_path, {"x": now}) as manager:
        manager.restore(fresh=("x.p",))
    assert now == {"p": values[live], "n": 1}


def test_members_in_what_is_one_dict_now_and_was_two(memory_path):
    """Where the live one is let go for it, its members are still known."""
    with CheckpointManager(memory_path, {"x": {"c": {"mode": Mode.MAX}}, "y": {"c": {"mode": Mode.MIN}}}) as manager:
        manager.save(1)
    one = {"mode": Mode.MIN}
    x, y = {"c": one}, {"c": one}
    with CheckpointManager(memory_path, {"x": x, "y": y}) as manager:
        manager.restore()
    assert (x, y) == ({"c": {"mode": Mode.MAX}}, {"c": {"mode": Mode.MIN}})


class Switch(enum.Flag):
    """Of these there are combinations, which have no name of their own."""

    A = 1
    B = 2


class Meter:
    """An object that is given as `vars(meter)`."""

    def __init__(self, mode):
        self.mode, self.history, self.level, self.switch = mode, deque([Mode.MIN, (Mode.MAX,)]), Level.LOW, Switch.B


@pytest.mark.parametrize("of", [vars, Holder])
def test_member_of_an_enum_is_kept_by_its_name(of, memory_path):
    """In `vars(obj)` and in an object's state: a text in the file, the same member afterwards."""
    with CheckpointManager(
        memory_path, {"meter": of(Meter(Mode.MAX)) if of is vars else Holder(vars(Meter(Mode.MAX)))}
    ) as manager:
        path = manager.save(1).path
    assert torch.load(path)["meter"] == {
        "mode": "Mode.MAX", "history": ["Mode.MIN", ("Mode.MAX",)], "level": "Level.LOW", "switch": "Switch.B",
    }  # fmt: skip
    meter = Meter(Mode.MIN)
    meter.history = deque()
    live = vars(meter) if of is vars else Holder(vars(meter))
    with CheckpointManager(memory_path, {"meter": live}) as manager:
        manager.restore()
    state = live if of is vars else live.state
    assert bits(state) == bits(vars(Meter(Mode.MAX)))
    assert state["mode"] is Mode.MAX
    assert state["level"] is Level.LOW


def same_name():
    class Mode(enum.Enum):
        MAX = 1

    Mode.__qualname__ = "Mode"
    return Mode


@pytest.mark.parametrize(
    "live",
    [None, "Mode.MAX", Level.LOW, enum.Enum("Mode", "OTHER").OTHER, (Mode.MIN, same_name().MAX)],
    ids=["none", "text", "other class", "other members", "two of the name"],
)
@pytest.mark.parametrize("of", [dict, Holder])
def test_member_that_the_live_object_does_not_know_is_refused(of, live):
    """No class can be in a file, and a text in the place of a member would compare unequal to everything."""
    payload = payload_of({"meter": of({"mode": Mode.MAX})})
    found = refusal(payload, {"meter": of({"mode": live})})
    uses = "two classes of that name" if isinstance(live, tuple) else "no class of which that is a member"
    assert found[0].startswith(f"meter.mode: saved as Mode.MAX, and the live object uses {uses};")
    assert len(found) == 1


UNSAVABLE = {
    "two classes of one name": (
        lambda: {"a": Mode.MIN, "b": [same_name().MAX]},
        r"c\.b\.0 is a member of an Enum called Mode, which cannot be saved: another class of this name is in c",
    ),
    "factory": (lambda: {"b": defaultdict(lambda: 1)}, r"c\.b is a defaultdict with a factory of its own"),
}


@pytest.mark.parametrize("of", [dict, Holder])
@pytest.mark.parametrize("case", UNSAVABLE)
def test_state_that_no_restore_could_make_again_is_refused_by_name(case, of, memory_path):
    """At the start, and where it comes while training: at the next save, from which a rollback leads back."""
    make, text = UNSAVABLE[case]
    with pytest.raises(UnsavableStateError, match=text):
        CheckpointManager(memory_path, {"c": of(make())})
    state = {"a": Mode.MAX, "b": 1}
    component = of(state)
    live = component if of is dict else component.state
    with CheckpointManager(memory_path, {"c": component}) as manager:
        manager.save(1)
        live.update(make())
        with pytest.raises(UnsavableStateError, match=text):
            manager.save(2)
        assert [one.step for one in manager.checkpoints()] == [1]
        if case != "factory":  # nobody could tell which class a saved member is of
            with pytest.raises(StateMismatchError, match=r"c\.a: saved as Mode\.MAX, .* two classes of that name"):
                manager.rollback(changed=True)
            live["b"] = 2
        manager.rollback(changed=True)
        assert (component if of is dict else component.state) == {"a": Mode.MAX, "b": 1}
        manager.save(2)


def test_combination_of_flags_is_refused_when_it_is_saved(memory_path):
    """It has no name of its own that could be looked up."""
    manager = CheckpointManager(memory_path, {"meter": {"switch": Switch.A | Switch.B}})
    with manager, pytest.raises(UnsavableStateError, match=r"save .*\.value"):
        manager.save(1)


def test_text_that_looks_like_a_member_stays_a_text():
    """What is a member is said beside the state."""
    live = {"mode": Mode.MIN, "text": ""}
    give(payload_of({"c": {"mode": Mode.MAX, "text": "Mode.MAX"}}), {"c": live})
    assert live == {"mode": Mode.MAX, "text": "Mode.MAX"}
