"""Optimizers: state follows the names of parameters, keeps its dtype and types, and fits or is refused."""

from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

from safeckpt import CheckpointManager, HyperparameterReplacedWarning, UnsavableStateError, load
from safeckpt.state import capture, plan, register
from tests.comparing import bits, changes, photograph
from tests.state.runs import (
    Net,
    assert_resumes,
    give,
    payload_of,
    refusal,
    resumed,
    run,
    seed_all,
    straight,
    through_file,
    train_step,
)


def layers(order="abc", size=3):
    """Return a model of equal layers, registered in an order; called in the order of their names."""

    class Layers(nn.Module):
        def forward(self, x):
            for name in sorted(order):
                x = torch.tanh(getattr(self, name)(x))
            return x

    model = Layers()
    for name in order:
        setattr(model, name, nn.Linear(size, size))
    return model


def layered_step(components):
    model, optimizer = components["model"], components["optimizer"]

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(4, 3)
    return optimizer.step(closure).item()


def by_name(components):
    """Return (name, key) -> bits of every tensor of optimizer state."""
    optimizer, names = components["optimizer"], {p: name for name, p in components["model"].named_parameters()}
    return {
        (names[p], key): bits(value) for p, entry in optimizer.state.items() for key, value in sorted(entry.items())
    }


# -- names ----------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": lambda parameters: Adam(parameters, lr=0.05),
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "named": lambda parameters: AdamW(parameters, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("again", ["cba", "bac"])
def test_reordered_layers_get_their_own_moments(kind, again, memory_path):
    """Layers of one shape registered in another order: each moment finds its parameter, and the run goes on."""

    def build(order="abc"):
        model = layers(order)
        parameters = model.named_parameters() if kind == "named" else model.parameters()
        return {"model": model, "optimizer": OPTIMIZERS[kind](parameters)}

    components = assert_resumes(build, memory_path, step=layered_step, build_again=lambda: build(again))
    _, never_stopped = straight(build, 9, layered_step)
    assert by_name(components) == by_name(never_stopped)


def grouped(order=(0, 1, 2), order_in=(0, 1)):
    """Return components with three groups: two weights, all biases, and an empty one."""
    model = layers()
    weights = [model.a.weight, model.b.weight, model.c.weight]
    groups = [
        {"params": [weights[index] for index in order_in] + weights[2:], "lr": 0.01, "name": "weights"},
        {"params": [model.a.bias, model.b.bias, model.c.bias], "lr": 0.02, "weight_decay": 0.5, "name": "biases"},
        {"params": [], "lr": 0.03, "name": "nothing yet"},
    ]
    return {"model": model, "optimizer": AdamW([groups[index] for index in order])}


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_reordered_groups_keep_their_options(order, memory_path):
    """Groups in another order, an empty one among them, are found by their parameters, with options and state."""

    def again():
        return grouped(order, (1, 0))

    components = assert_resumes(grouped, memory_path, step=layered_step, build_again=again)
    options = {group["name"]: group["lr"] for group in components["optimizer"].param_groups}
    assert options == {"weights": 0.01, "biases": 0.02, "nothing yet": 0.03}
    assert [group["name"] for group in components["optimizer"].param_groups] == [
        ["weights", "biases", "nothing yet"][index] for index in order
    ]


def test_names_given_to_the_optimizer_follow_the_live_order():
    """`param_names` of a reordered optimizer name the parameters beside them."""
    saved, live = layers("abc"), layers("cab")
    components = {"model": saved, "optimizer": SGD(saved.named_parameters(), lr=0.1)}
    optimizer = SGD(live.named_parameters(), lr=0.1)
    give(payload_of(components), {"model": live, "optimizer": optimizer})
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in live.named_parameters()]
    plain = SGD(live.parameters(), lr=0.1)
    give(payload_of(components), {"model": live, "optimizer": plain})
    assert plain.param_groups[0]["param_names"] == [name for name, _ in live.named_parameters()]


def test_order_dependent_state_is_refused_in_another_order_by_name(memory_path):
    """LBFGS keeps vectors over all parameters, which cannot be mapped; in the same order it goes on."""

    def build(order="abc"):
        model = layers(order)
        return {"model": model, "optimizer": LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)}

    assert_resumes(build, memory_path, step=layered_step)
    components = build()
    run(components, 2, layered_step)
    (mismatch,) = refusal(payload_of(components), build("acb"))
    assert mismatch.startswith("optimizer: the parameters are in another order, and ")
    assert mismatch.endswith("of model.a.weight depends on the order")
    give(payload_of(build()), build("cba"))  # without any state there is nothing that could be mixed up


def test_added_removed_and_changed_parameters_are_all_named():
    """What came, what went, and what has another shape or dtype is listed at once; nothing changes."""
    saved = layers("abcd")
    components = {"model": saved, "optimizer": AdamW([*saved.a.parameters(), *saved.b.parameters(), saved.c.weight])}
    live = layers("abcd")
    live.a, live.b = nn.Linear(3, 4), nn.Linear(3, 3).double()
    others = {"model": live, "optimizer": AdamW([live.a.weight, *live.b.parameters(), *live.c.parameters()])}
    assert refusal(payload_of(components), others, only=("optimizer",)) == sorted(
        [
            "optimizer: model.a.weight had shape [3, 3], now [4, 3]",
            "optimizer: model.b.weight had dtype torch.float32, now torch.float64",
            "optimizer: model.b.bias had dtype torch.float32, now torch.float64",
            "optimizer: no saved state for parameter model.c.bias, which the optimizer now holds",
            "optimizer: saved with parameter model.a.bias, which the optimizer no longer holds",
        ]
    )


def test_another_optimizer_is_refused_besides_other_differences():
    """Adam's state under AdamW is refused by class, and a parameter that is missing is named as well."""
    model = layers()
    payload = payload_of({"model": model, "optimizer": Adam(model.parameters())})
    mismatches = refusal(payload, {"model": model, "optimizer": AdamW(list(model.parameters())[1:])})
    assert mismatches == [
        "optimizer: saved class Adam, live class AdamW",
        "optimizer: saved with parameter model.a.weight, which the optimizer no longer holds",
    ]


def test_parameters_grouped_otherwise_are_refused():
    """One group that became two cannot take its options along."""
    model = layers("ab")
    one = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}
    two = {"model": model, "optimizer": SGD([{"params": model.a.parameters()}, {"params": model.b.parameters()}], lr=1)}
    both = [one, two, {"model": model, "optimizer": SGD([{"params": model.parameters()}, {"params": []}], lr=1)}]
    for saved in both:
        for live in both:
            if saved is not live:
                (mismatch,) = refusal(payload_of(saved), live)
                assert mismatch.startswith("optimizer: the parameters were grouped as [['model.a.weight'")


def test_optimizer_over_several_modules_goes_on_bit_for_bit(memory_path):
    """One optimizer that trains two modules finds its parameters under either name, whatever their order."""

    def build(flip=False):
        encoder, model = layers("ab"), layers("xy")
        modules = [model, encoder] if flip else [encoder, model]
        optimizer = AdamW([p for module in modules for p in module.parameters()], lr=0.05)
        return {"encoder": encoder, "model": model, "optimizer": optimizer}

    def step(components):
        components["optimizer"].zero_grad()
        loss = components["model"](components["encoder"](torch.randn(4, 3))).square().mean()
        loss.backward()
        components["optimizer"].step()
        return loss.item()

    assert_resumes(build, memory_path / "same", step=step)
    assert_resumes(build, memory_path / "flipped", step=step, build_again=lambda: build(flip=True))


def test_parameter_shared_between_modules_is_found_under_any_of_its_names(memory_path):
    """A parameter with several names is matched by each: the modules may be registered in another order."""

    def build(flip=False):
        one, two = layers("ab"), layers("cd")
        two.c.weight = one.a.weight
        optimizer = AdamW(list(dict.fromkeys([*one.parameters(), *two.parameters()])), lr=0.05)
        parts = {"model": one, "other": two}
        return (dict(reversed(parts.items())) if flip else parts) | {"optimizer": optimizer}

    def step(components):
        components["optimizer"].zero_grad()
        loss = components["other"](components["model"](torch.randn(4, 3))).square().mean()
        loss.backward()
        components["optimizer"].step()
        return loss.item()

    assert_resumes(build, memory_path / "same", step=step)
    assert_resumes(build, memory_path / "flipped", step=step, build_again=lambda: build(flip=True))


@pytest.mark.filterwarnings("ignore::safeckpt.UncapturedStateWarning")
def test_parameters_of_no_module_are_matched_by_place_shape_and_dtype(memory_path):
    """A trained tensor that no module owns has only its position, which its shape and dtype have to confirm."""

    def build(*shapes):
        tensors = [torch.ones(shape, requires_grad=True) for shape in shapes or ((2,), (3, 2))]
        return {"optimizer": SGD(tensors, lr=0.1, momentum=0.9)}

    components = build()
    for tensor in components["optimizer"].param_groups[0]["params"]:
        tensor.grad = torch.randn_like(tensor)
    components["optimizer"].step()
    payload = through_file(components, memory_path)
    live = build()
    give(payload, live)
    assert bits(live["optimizer"].state_dict()) == bits(components["optimizer"].state_dict())
    assert refusal(payload, build((3, 2), (2,))) == [
        "optimizer: group 0 position 0 had shape [2], now [3, 2]",
        "optimizer: group 0 position 1 had shape [3, 2], now [2]",
    ]


def test_parameter_replaced_by_another_is_not_mistaken_for_it():
    """Names belong to the parameters that the modules own now, not to those they had when registered."""
    model = layers("ab")
    optimizer = SGD(model.parameters(), lr=0.1)
    registered = register({"model": model, "optimizer": optimizer})
    old = model.a.weight
    model.a.weight = nn.Parameter(torch.zeros(3, 3))
    optimizer.param_groups[0]["params"][0] = model.a.weight
    slots = capture(registered).payload["safeckpt"]["components"]["optimizer"]["slots"]
    assert [slot["name"] for slot in slots[0]] == [f"model.{name}" for name, _ in model.named_parameters()]
    optimizer.param_groups[0]["params"][0] = old
    slots = capture(registered).payload["safeckpt"]["components"]["optimizer"]["slots"]
    assert slots[0][0]["name"] == "group 0 position 0"


def test_parameters_added_while_training_are_found_when_the_script_adds_them_too(memory_path):
    """A group added half-way is part of the state; a script without it is refused by name."""

    def build(whole=False):
        model = layers("ab")
        optimizer = SGD(model.a.parameters(), lr=0.1, momentum=0.9)
        if whole:
            optimizer.add_param_group({"params": model.b.parameters(), "lr": 0.01})
        return {"model": model, "optimizer": optimizer}

    def step(components):
        groups = components["optimizer"].param_groups
        count = components["optimizer"].state.get("count", 0)
        components["optimizer"].state["count"] = count + 1
        if count == 2 and len(groups) == 1:
            components["optimizer"].add_param_group({"params": components["model"].b.parameters(), "lr": 0.01})
        return layered_step(components)

    expected, _ = straight(build, 7, step)
    losses, components = resumed(build, memory_path, 4, 3, step=step, build_again=lambda: build(whole=True))
    assert losses == expected
    mismatches = refusal(payload_of(components), build())
    assert [line for line in mismatches if "no longer holds" in line] == mismatches
    assert len(mismatches) == 2


# -- what is in the state -------------------------------------------------------------------------------------------


class Odd(torch.optim.Optimizer):
    """An optimizer that keeps everything a state may hold: texts, sets, lists, small integers, other dtypes."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, "mode": "fast", "betas": [0.9, 0.99], **options})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(
                        label="momentum", tags={"a", 3}, sizes=torch.Size([1, 2]), none=None, raw=b"\x00\xff", count=0,
                        history=[], pair=(torch.zeros(2), "x"), wide=torch.zeros(p.shape, dtype=torch.float64),
                        low=torch.zeros(p.shape, dtype=torch.int8), narrow=torch.zeros(p.shape, dtype=torch.bfloat16),
                        f8=torch.ones(3).to(torch.float8_e4m3fn), flags=torch.tensor([True, False]),
                        nested={"deep": OrderedDict(x=torch.zeros(2, dtype=torch.int64)), "seen": Counter()},
                        big=torch.tensor([2**40 + 1]), step=torch.tensor(0, dtype=torch.int32),
                    )  # fmt: skip
                state["count"] += 1
                state["step"] += 1
                state["wide"].mul_(0.9).add_(p.grad.double())
                state["low"].add_(1)
                state["narrow"].add_(p.grad.bfloat16())
                state["history"].append(state["count"] * 0.5)
                state["nested"]["deep"]["x"] += 1
                state["nested"]["seen"][state["label"]] += 1
                scale = (1 + state["low"].float().mean()) * (state["label"] == "momentum") * (state["tags"] == {"a", 3})
                p.sub_(scale * group["lr"] * state["wide"].float())
        return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_of_any_type_and_dtype_goes_on_bit_for_bit(dtype, memory_path):
    """Texts, sets, lists, counters and integers come back as what they were; torch's own loader breaks each of them."""

    def build():
        model = nn.Linear(4, 3).to(dtype)
        return {"model": model, "optimizer": Odd(model.parameters())}

    def step(components):
        return train_step(components, dtype)

    components = assert_resumes(build, memory_path, step=step)
    state = next(iter(components["optimizer"].state.values()))
    kinds = {key: type(value) for key, value in state.items() if not isinstance(value, torch.Tensor)}
    assert kinds == {
        "label": str, "tags": set, "sizes": torch.Size, "none": type(None), "raw": bytes, "count": int, "history": list,
        "pair": tuple, "nested": dict,
    }  # fmt: skip
    assert type(state["nested"]["deep"]) is OrderedDict
    assert type(state["nested"]["seen"]) is Counter
    assert state["big"].tolist() == [2**40 + 1]
    dtypes = [state[key].dtype for key in ("wide", "low", "narrow", "f8", "flags", "step")]
    assert dtypes == [
        torch.float64, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int32,
    ]  # fmt: skip


def test_moments_wider_than_their_parameters_keep_their_dtype_bit_for_bit(memory_path):
    """fp32 moments of bf16 parameters, which torch's own loader rounds to bf16, come back whole."""

    class Wide(AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros(p.shape, dtype=torch.float32)
                        state["step"] = torch.tensor(0.0)
                    state["exp_avg"].mul_(0.9).add_(p.grad.float() / 3)
                    state["step"] += 1
                    p.sub_((group["lr"] * state["exp_avg"]).bfloat16())
            return loss

    def build():
        model = nn.Linear(4, 3).bfloat16()
        return {"model": model, "optimizer": Wide(model.parameters(), lr=0.05)}

    components = assert_resumes(build, memory_path, step=lambda components: train_step(components, torch.bfloat16))
    entry = components["optimizer"].state[components["model"].weight]
    assert entry["exp_avg"].dtype is torch.float32
    assert not torch.equal(entry["exp_avg"], entry["exp_avg"].bfloat16().float())  # rounding would have shown


@pytest.mark.parametrize("fused", [None, True])
def test_step_counts_follow_the_rules_of_torch(fused, memory_path):
    """`step` stays a float32 tensor on the CPU, where torch keeps it."""

    def build():
        model = Net()
        return {"model": model, "optimizer": Adam(model.parameters(), fused=fused)}

    components = assert_resumes(build, memory_path)
    steps = [entry["step"] for entry in components["optimizer"].state.values()]
    assert {(step.dtype, step.device.type, step.item()) for step in steps} == {(torch.float32, "cpu", 9.0)}


def test_state_that_cannot_be_read_back_is_refused_before_the_disk_is_touched(memory_path):
    """An object in the state is refused with the way to it; without it the next save works."""
    model = layers("a")
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.a.bias]["function"] = len
    with CheckpointManager(memory_path, {"model": model, "optimizer": optimizer}) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['optimizer']['state'][1]['function']"
        assert not list(memory_path.glob("*.pt"))
        del optimizer.state[model.a.bias]
        assert manager.save(1).step == 1


def test_state_with_a_history_is_saved_detached(memory_path):
    """A moment that still has a graph comes back as plain numbers, and keeps its graph in the live run."""
    model = layers("a")
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.a.bias]["momentum_buffer"] = model.a.bias * 2
    payload = through_file({"model": model, "optimizer": optimizer}, memory_path)
    assert not payload["optimizer"]["state"][1]["momentum_buffer"].requires_grad
    assert optimizer.state[model.a.bias]["momentum_buffer"].requires_grad


def test_state_is_emptied_when_the_file_has_none():
    """Going back to before the first step takes the moments away, as at the start of the run."""
    components = {"model": layers("a")}
    components["optimizer"] = AdamW(components["model"].parameters())
    payload = payload_of(components)
    run(components, 2, layered_step)
    assert components["optimizer"].state
    give(payload, components)
    assert not components["optimizer"].state


def test_restored_state_shares_nothing_with_the_payload_and_can_be_restored_again():
    """Training on after a restore does not change what is restored next from the same payload."""
    components = {"model": layers("ab")}
    components["optimizer"] = AdamW(components["model"].parameters(), lr=torch.tensor(0.1), foreach=False)
    run(components, 2, layered_step)
    payload = payload_of(components)
    kept = bits(payload)
    seed_all(3)
    first = run(components, 3, layered_step)
    for _ in range(2):
        give(payload, components)
        components["optimizer"].param_groups[0]["lr"].add_(0)
        seed_all(3)
        assert run(components, 3, layered_step) == first
        assert bits(payload) == kept


def test_tensors_that_overlap_in_the_state_still_do(memory_path):
    """Two views of one buffer in an optimizer's state stay two views of one buffer."""
    model = layers("a")
    optimizer = SGD(model.parameters(), lr=0.1)
    flat = torch.arange(6.0)
    optimizer.state[model.a.bias].update(low=flat[:4], high=flat[2:])
    payload = through_file({"model": model, "optimizer": optimizer}, memory_path)
    live = layers("a")
    other = SGD(live.parameters(), lr=0.1)
    give(payload, {"model": live, "optimizer": other})
    entry = other.state[live.a.bias]
    entry["low"][2] = 50.0
    assert entry["high"].tolist() == [50.0, 3.0, 4.0, 5.0]


# -- optimizers of another make -------------------------------------------------------------------------------------


class Packing(SGD):
    """Writes its state in a form of its own, and unpacks it: what it made is not to be overwritten."""

    def state_dict(self):
        state = super().state_dict()
        packed = {
            number: {"momentum_buffer": {"values": entry["momentum_buffer"] * 2}}
            for number, entry in state["state"].items()
        }
        return {**state, "state": packed, "version": 3}

    def load_state_dict(self, state_dict):
        assert state_dict["version"] == 3
        unpacked = {
            number: {"momentum_buffer": entry["momentum_buffer"]["values"] / 2}
            for number, entry in state_dict["state"].items()
        }
        super().load_state_dict({"state": unpacked, "param_groups": state_dict["param_groups"]})


class Foreign(SGD):
    """Has a state_dict that is nothing like torch's."""

    def state_dict(self):
        return {
            "lr": self.param_groups[0]["lr"],
            "momenta": [dict(self.state[p]) for p in self.param_groups[0]["params"]],
        }

    def load_state_dict(self, state_dict):
        self.param_groups[0]["lr"] = state_dict["lr"]
        for parameter, entry in zip(self.param_groups[0]["params"], state_dict["momenta"], strict=True):
            self.state[parameter] = entry


@pytest.mark.parametrize("kind", [Packing, Foreign])
def test_optimizer_with_a_state_dict_of_its_own_goes_on_bit_for_bit(kind, memory_path):
    """What an optimizer's own load_state_dict makes of the state is left as it is."""

    def build():
        model = layers()
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.05, momentum=0.9)}

    assert_resumes(build, memory_path, step=layered_step)


def test_foreign_state_dict_in_another_order_is_refused():
    """A form that nobody else understands cannot be mapped by name, and has no options that could be kept."""

    def build(order):
        model = layers(order)
        return {"model": model, "optimizer": Foreign(model.parameters(), lr=0.05, momentum=0.9)}

    components = build("abc")
    run(components, 1, layered_step)
    assert refusal(payload_of(components), build("cba")) == [
        "optimizer: the parameters are in another order, and a state_dict of its own form depends on the order"
    ]
    with pytest.raises(ValueError, match="optimizer has no hyper-parameter 'lr'"):
        plan(register(build("abc")), payload_of(components), keep_live=["optimizer.lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Keeps a mode, counters and sums among its options, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False, "weight_sum": 0.0})

    @torch.no_grad()
    def _swap(self, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.5 if mode else -1.0)
                group["train_mode"] = mode

    def train(self):
        self._swap(mode=True)

    def eval(self):
        self._swap(mode=False)

    @torch.no_grad()
    def step(self, closure=None):
        self.train()
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(group["lr"] * p.grad)
                p.lerp_(z, 1 / group["k"])
        return loss


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_optimizer_with_modes_is_left_in_the_mode_it_is_in(mode, memory_path):
    """Neither a save nor a restore changes the mode, and the counters among the options are reported by nobody."""

    def step(components):
        loss = layered_step(components)
        getattr(components["optimizer"], mode)()
        return loss

    def build():
        model = layers()
        return {"model": model, "optimizer": ScheduleFree(model.parameters())}

    components = assert_resumes(build, memory_path, step=step)
    assert components["optimizer"].param_groups[0]["train_mode"] == (mode == "train")


def test_hooks_of_the_user_see_the_state_as_usual():
    """Hooks before and after load_state_dict are called once."""
    components = {"model": layers("a")}
    components["optimizer"] = optimizer = SGD(components["model"].parameters(), lr=0.1)
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(sorted(state)))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    give(payload_of(components), components)
    assert calls == [["param_groups", "state"], "after"]


def test_capturing_an_optimizer_changes_nothing():
    """Asking for the state makes no entry in it and touches no tensor."""
    components = {"model": layers("ab")}
    components["optimizer"] = AdamW(components["model"].parameters())
    registered = register(components)
    for _ in range(2):
        before = photograph(**components)
        capture(registered)
        assert not changes(before, photograph(**components))
        run(components, 1, layered_step)


# -- options --------------------------------------------------------------------------------------------------------


def stopped(path, make=lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.2)):
    """Save a short run; return what is needed to build another."""
    model = layers("ab")
    components = {"model": model, "optimizer": make(model)}
    with CheckpointManager(path, components) as manager:
        run(components, 2, layered_step)
        manager.save(2)


def again(path, make, expected, **options):
    """Restore with another optimizer, and return it; the warning has to list exactly these lines."""
    model = layers("ab")
    optimizer = make(model)
    with CheckpointManager(path, {"model": model, "optimizer": optimizer}) as manager:
        if not expected:
            manager.restore(**options)
            return optimizer
        with pytest.warns(HyperparameterReplacedWarning) as caught:
            manager.restore(**options)
    lines = [line.strip() for line in str(caught[0].message).splitlines()]
    assert [line for line in lines if line.startswith("optimizer.")] == expected
    return optimizer


def test_options_of_the_script_that_the_file_overrules_are_reported(memory_path):
    """The file's values win, and each one that the script has otherwise is named with both values."""
    stopped(memory_path)

    def make(model):
        return AdamW(model.parameters(), lr=0.01, weight_decay=0.2, betas=(0.8, 0.99), eps=1e-6, amsgrad=False)

    optimizer = again(
        memory_path,
        make,
        [
            "optimizer.betas: (0.8, 0.99) -> (0.9, 0.999)",
            "optimizer.eps: 1e-06 -> 1e-08",
            "optimizer.lr: 0.01 -> 0.1",
        ],
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_options_that_are_kept_stay_live_and_are_not_reported(memory_path):
    """keep_live takes the named options from the script, the others from the file, and the state all the same."""
    stopped(memory_path)

    def make(model):
        return AdamW(model.parameters(), lr=0.01, weight_decay=0.5, eps=1e-6)

    kept = ["optimizer.lr", "optimizer.weight_decay"]
    optimizer = again(memory_path, make, ["optimizer.eps: 1e-06 -> 1e-08"], keep_live=kept)
    assert [optimizer.param_groups[0][key] for key in ("lr", "weight_decay", "eps")] == [0.01, 0.5, 1e-08]
    assert len(optimizer.state) == 4
    optimizer = again(memory_path, make, [], keep_live=[*kept, "optimizer.eps"])
    assert [optimizer.param_groups[0][key] for key in ("lr", "weight_decay", "eps")] == [0.01, 0.5, 1e-6]


def test_kept_options_belong_to_the_run_from_then_on(memory_path):
    """After a save with the kept value, a script that has it is in agreement, and one with the old value is not."""
    stopped(memory_path)

    def make(rate):
        return lambda model: AdamW(model.parameters(), lr=rate, weight_decay=0.2)

    model = layers("ab")
    components = {"model": model, "optimizer": make(0.01)(model)}
    with CheckpointManager(memory_path, components) as manager:
        manager.restore(keep_live=["optimizer.lr"])
        run(components, 1, layered_step)
        manager.save(3)
    again(memory_path, make(0.01), [])
    again(memory_path, make(0.1), ["optimizer.lr: 0.1 -> 0.01"])


def test_learning_rate_moved_by_the_loop_is_no_news(memory_path):
    """A schedule by hand leaves the script's value behind; a script that still begins with it is in agreement."""

    def step(components):
        for group in components["optimizer"].param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] += 0.01
        return layered_step(components)

    def build(rate=0.1):
        model = layers("ab")
        return {"model": model, "optimizer": AdamW(model.parameters(), lr=rate)}

    assert_resumes(build, memory_path / "same", step=step)
    with pytest.warns(HyperparameterReplacedWarning, match=r"optimizer\.lr: 0\.2 -> 0\.06"):
        resumed(build, memory_path / "other", 4, 1, step=step, build_again=lambda: build(0.2))


def test_options_are_reported_for_each_group(memory_path):
    """With several groups, each line says which one; groups are compared with their own."""

    def make(rate, order=(0, 1)):
        def groups(model):
            both = [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": rate}]
            return SGD([both[index] for index in order], lr=1.0)

        return groups

    stopped(memory_path, make(0.2))
    again(memory_path, make(0.2), [])
    again(memory_path, make(0.2, (1, 0)), [])
    again(memory_path, make(0.3), ["optimizer.lr (group 1): 0.3 -> 0.2"])
    optimizer = again(memory_path, make(0.3, (1, 0)), [], keep_live=["optimizer.lr"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]


def test_options_that_only_the_script_has_stay(memory_path):
    """An option that came after the file was written keeps its live value, instead of being lost."""
    stopped(memory_path)

    def make(model):
        return AdamW([{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.2, "tag": ["mine"]}])

    assert again(memory_path, make, []).param_groups[0]["tag"] == ["mine"]


def test_tensor_options_are_compared_by_value(memory_path):
    """A learning rate as a tensor of the same value is no difference, one of another value is."""
    stopped(memory_path, lambda model: AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False))

    def make(rate):
        return lambda model: AdamW(model.parameters(), lr=rate, foreach=False)

    again(memory_path, make(torch.tensor(0.5)), [])
    optimizer = again(memory_path, make(0.5), [])
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    again(memory_path, make(0.25), ["optimizer.lr: 0.25 -> 0.5"])
    optimizer = again(memory_path, make(torch.tensor(0.25)), [], keep_live=["optimizer.lr"])
    assert optimizer.param_groups[0]["lr"].item() == 0.25


@pytest.mark.parametrize("name", ["optimizer.nonsense", "optimizer.params", "optimizer", "nobody.lr", "model.a"])
def test_keeping_what_is_no_option_is_an_error_and_changes_nothing(name):
    """A name that is no hyper-parameter is refused before anything is touched."""
    model = layers("ab")
    components = {"model": model, "optimizer": AdamW(model.parameters())}
    payload = payload_of(components)
    before = photograph(**components)
    with pytest.raises(ValueError, match="keep_live"):
        plan(register(components), payload, keep_live=[name])
    with pytest.raises(TypeError, match="sequence of names"):
        plan(register(components), payload, keep_live=name)
    assert not changes(before, photograph(**components))


def test_first_values_are_handed_on_by_a_run_that_was_resumed(memory_path):
    """What the run began with is in every later checkpoint, not what a resumed process began with."""

    def build():
        model = layers("ab")
        return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def step(components):
        components["optimizer"].param_groups[0]["lr"] *= 0.5
        return layered_step(components)

    seed_all(1)
    components = build()
    with CheckpointManager(memory_path / "straight", components) as manager:
        run(components, 3, step)
        expected = load(manager.save(3).path)
    seed_all(1)
    components = build()
    with CheckpointManager(memory_path / "resumed", components) as manager:
        run(components, 2, step)
        manager.save(2)
    components = build()
    with CheckpointManager(memory_path / "resumed", components) as manager:
        manager.restore()
        run(components, 1, step)
        payload = load(manager.save(3).path)
    assert payload["safeckpt"]["components"]["optimizer"]["first"][0]["lr"] == 0.1
    assert bits(payload) == bits(expected)
