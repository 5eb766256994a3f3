"""The whole state: saving changes nothing, and a restore takes all of it or nothing."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

from safeckpt import CheckpointManager, ComponentMismatchError, EnvironmentChangedWarning, StateMismatchError
from safeckpt.state import Mixture, capture, copy_tree, plan, register
from safeckpt.state.environment import environment
from safeckpt.state.tree import named_tensors
from tests.comparing import bits, changes, photograph
from tests.state.runs import Net, give, payload_of, refusal, run, seed_all, state_of, straight, train_step
from tests.state.test_stateful import Box, Ema, Loader, PickyLoader


def whole(lr=0.1):
    """Return a component of every kind, tied, frozen, averaged and scaled."""
    model = Net()
    model.norm.eval()
    model.first.bias.requires_grad_(False)
    decoder = nn.Sequential(OrderedDict(out=nn.Linear(4, 6)))
    decoder.out.weight = model.first.weight
    learned = {"alpha": torch.tensor([0.5], requires_grad=True)}
    parameters = list(dict.fromkeys([*model.parameters(), *decoder.parameters()]))
    optimizer = AdamW([{"params": parameters}, {"params": [learned["alpha"]], "lr": 0.01}], lr=lr)
    return {
        "model": model, "decoder": decoder, "learned": learned, "optimizer": optimizer,
        "scheduler": lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2]
        ),
        "scaler": torch.amp.GradScaler("cpu"), "ema": swa_utils.AveragedModel(model), "mine": Ema(model),
        "loader": PickyLoader(3), "box": Box({"a": [1, torch.ones(2)]}),
        "counters": {"step": 0, "best": float("inf"), "inner": {"seen": []}},
        "torch_generator": torch.Generator().manual_seed(1), "numpy_generator": np.random.default_rng(1),
        "old_generator": np.random.RandomState(1), "python_generator": random.Random(1),
    }  # fmt: skip


def step(components):
    """Use every component once."""
    loss = train_step({name: components[name] for name in ("model", "optimizer", "scheduler")})
    components["ema"].update_parameters(components["model"])
    components["mine"].update()
    components["counters"]["step"] += 1
    components["counters"]["best"] = min(components["counters"]["best"], loss)
    components["counters"]["inner"]["seen"].append(loss)
    drawn = [
        torch.rand((), generator=components["torch_generator"]).item(), components["numpy_generator"].random(),
        components["old_generator"].rand(), components["python_generator"].random(),
    ]  # fmt: skip
    return [loss, *drawn, components["optimizer"].param_groups[0]["lr"]]


# -- saving changes nothing -----------------------------------------------------------------------------------------


def test_capture_changes_nothing_at_all():
    """Not a bit, a version, an identity, a gradient or a stream differs after a capture of everything."""
    components = whole()
    run(components, 3, step)
    registered = register(components)
    before = photograph(**components)
    capture(registered)
    assert changes(before, photograph(**components)) == []


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_save_changes_nothing_at_all(options, memory_path):
    """Building a manager, saving, waiting and closing leave every object as it was, gradients included."""
    components = whole()
    run(components, 3, step)
    for parameter in components["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    hooks = components["optimizer"]._optimizer_step_post_hooks
    before = photograph(**components)
    with CheckpointManager(memory_path, components, **options) as manager:
        manager.save(3)
        manager.wait()
    assert not hooks
    assert changes(before, photograph(**components)) == []


def test_run_that_saves_at_every_step_is_the_run_that_never_saves(memory_path):
    """Losses, draws, rates and the whole state are equal bit for bit."""
    expected, never_saved = straight(whole, 6, step)
    final = state_of(never_saved)
    seed_all(1)
    components = whole()
    losses = []
    with CheckpointManager(memory_path, components) as manager:
        for count in range(1, 7):
            losses.append(step(components))
            manager.save(count, loss=losses[-1][0])
    assert losses == expected
    assert state_of(components) == final


@pytest.mark.parametrize("kill", [0, 1, 4])
def test_everything_at_once_goes_on_bit_for_bit(kill, memory_path):
    """A run with a component of every kind resumes in all of them."""
    expected, never_stopped = straight(whole, kill + 4, step)
    final = state_of(never_stopped)
    seed_all(1)
    components = whole()
    with CheckpointManager(memory_path, components) as manager:
        losses = run(components, kill, step)
        manager.save(kill)
    seed_all(2)
    components = whole()
    components["model"].train()
    with CheckpointManager(memory_path, components) as manager:
        manager.restore()
    assert losses + run(components, 4, step) == expected
    assert state_of(components) == final


# -- all or nothing -------------------------------------------------------------------------------------------------

SAVED = {}


def saved_payload():
    """Return a payload of `whole` after some steps, made once, copied for each use."""
    if not SAVED:
        seed_all(1)
        components = whole()
        run(components, 3, step)
        SAVED["payload"] = payload_of(components)
    return copy_tree(SAVED["payload"])


def swap(name, make):
    def change(components):
        components[name] = make(components)

    return change


def shrink_optimizer(components):
    groups = components["optimizer"].param_groups
    return AdamW([{"params": groups[0]["params"][:-1]}, {"params": groups[1]["params"]}], lr=0.1)


def with_other_last(components):
    components["model"].last = nn.Linear(6, 4)


def untie(components):
    components["decoder"].out.weight = nn.Parameter(torch.zeros(6, 4))


MISMATCHES = {
    "kind": (swap("box", lambda _: {"a": 1}), "box: saved as a stateful, the live object is a counters"),
    "shape": (with_other_last, "model.last.weight: saved shape [3, 6], live shape [4, 6]"),
    "submodule": (swap("model", lambda c: nn.Sequential(c["model"])), "model.first.weight: only in the checkpoint"),
    "tie": (untie, "decoder.out.weight and model.first.weight: one tensor in the checkpoint, separate tensors now"),
    "optimizer": (swap("optimizer", shrink_optimizer), "which the optimizer no longer holds"),
    "optimizer class": (
        swap("optimizer", lambda c: SGD(c["optimizer"].param_groups[0]["params"], lr=1)),
        "optimizer: saved class AdamW, live class SGD",
    ),
    "scheduler": (
        swap("scheduler", lambda c: lr_scheduler.StepLR(c["optimizer"], 1)), "scheduler: saved class SequentialLR(",
    ),
    "scaler": (swap("scaler", lambda _: torch.amp.GradScaler(enabled=False)), "scaler: the saved scaler is enabled"),
    "average": (
        swap("ema", lambda c: swa_utils.AveragedModel(c["model"].last)),
        "ema.module.first.weight: only in the checkpoint",
    ),
    "object": (swap("mine", lambda _: Box(1)), "mine: saved class Ema, live class Box"),
    "loader": (swap("loader", lambda _: PickyLoader(4)), "loader: wanted 4"),
    "loader class": (swap("loader", lambda _: Loader(3)), "loader: saved class PickyLoader"),
    "counters": (lambda c: c["counters"].update(more=1), "counters: entry 'more' is not in the checkpoint"),
    "trained tensor": (
        swap("learned", lambda _: {"alpha": torch.zeros(2, requires_grad=True)}), "learned: entry 'alpha', which is",
    ),
    "torch generator": (swap("torch_generator", lambda _: random.Random()), "torch_generator: saved class Generator"),
    "numpy generator": (
        swap("numpy_generator", lambda _: np.random.Generator(np.random.Philox(1))), "saved algorithm PCG64",
    ),
    "old generator": (
        swap("old_generator", lambda _: np.random.RandomState(np.random.PCG64(1))), "saved algorithm MT19937",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISMATCHES)
def test_one_mismatch_of_any_kind_leaves_everything_untouched(kind):
    """Whatever does not fit, no bit of any object or stream has changed when the error is raised."""
    change, expected = MISMATCHES[kind]
    components = whole()
    change(components)
    mismatches = refusal(saved_payload(), components)
    assert any(expected in mismatch for mismatch in mismatches), mismatches


@settings(max_examples=15, deadline=None)
@given(st.sets(st.sampled_from(sorted(MISMATCHES.keys() - {"loader class", "optimizer class"})), min_size=2))
def test_all_mismatches_are_listed_at_once(kinds):
    """Any combination of differences is reported whole, in one error, with everything untouched."""
    components = whole()
    # Those that wrap or take from the others come after what changes these.
    for kind in sorted(kinds, key=lambda kind: (kind in ("submodule", "optimizer", "scheduler", "average"), kind)):
        MISMATCHES[kind][0](components)
    mismatches = refusal(saved_payload(), components)
    for kind in kinds - {"tie", "shape"} if "submodule" in kinds else kinds:
        assert any(MISMATCHES[kind][1] in mismatch for mismatch in mismatches), (kind, mismatches)


def test_names_on_one_side_only_are_refused_before_anything_is_looked_at():
    """Missing and surplus components are both named."""
    components = whole()
    del components["ema"]
    components["new"] = {}
    before = photograph(**components)
    with pytest.raises(ComponentMismatchError) as caught:
        plan(register(components), saved_payload())
    assert (caught.value.missing, caught.value.unexpected) == (("new",), ("ema",))
    assert changes(before, photograph(**components)) == []


def test_error_text_shows_the_first_mismatches_and_counts_the_rest():
    """Five in the text, all in the attribute, the file by name, and the way out."""
    payload = payload_of({"model": nn.ModuleList(nn.Linear(1, 1) for _ in range(4))})
    with pytest.raises(StateMismatchError) as caught:
        plan(register({"model": nn.ModuleList(nn.Linear(2, 1) for _ in range(8))}), payload, path="there/step-1.pt")
    text = str(caught.value)
    assert text.startswith(f"there/step-1.pt does not fit the live objects, {len(caught.value.mismatches)} difference")
    assert len(caught.value.mismatches) == 12
    assert "and 7 more" in text
    assert "no object was changed" in text


def test_plan_changes_nothing_until_it_is_applied():
    """A restore that fits has touched nothing when its plan is made."""
    components = whole()
    payload = saved_payload()
    registered = register(components)
    before = photograph(**components)
    ready = plan(registered, payload)
    assert changes(before, photograph(**components)) == []
    ready.apply(Mixture())
    assert changes(before, photograph(**components))


# -- in memory ------------------------------------------------------------------------------------------------------


def test_payload_restored_twice_gives_the_same_and_stays_as_it_is():
    """Training on after a restore changes neither the payload nor what the next restore gives."""
    payload = saved_payload()
    kept = bits(payload)
    components = whole()
    results = []
    for _ in range(3):
        give(payload, components)
        results.append((run(components, 3, step), state_of(components)))
    assert results[0] == results[1] == results[2]
    assert bits(payload) == kept


def test_restored_objects_share_no_memory_with_the_payload():
    """Every tensor of the payload can be overwritten without a trace in the live objects."""
    payload = saved_payload()
    components = whole()
    give(payload, components)
    before = photograph(**components)
    for _, tensor in named_tensors(payload):
        tensor.fill_(1)
    assert changes(before, photograph(**components)) == []


# -- parts of it ----------------------------------------------------------------------------------------------------


def test_only_what_is_named_is_restored():
    """A warm start takes the weights, and leaves optimizer, streams and everything else as they are."""
    payload = saved_payload()
    components = whole()
    others = {name: obj for name, obj in components.items() if name not in ("model", "decoder", "ema", "mine")}
    before = state_of({name: obj for name, obj in others.items() if name not in ("learned", "optimizer")})
    streams_before = photograph()
    give(payload, components, only=("model",))
    assert photograph() == streams_before
    assert state_of({name: others[name] for name in before}) == before
    assert not components["optimizer"].state
    assert bits(components["model"].state_dict()) == bits(payload["model"])


def test_nonsense_in_only_is_refused():
    """A lone string, nothing at all and an unknown name are errors before anything is touched."""
    components = {"box": Box(1)}
    registered, payload = register(components), payload_of(components)
    with pytest.raises(TypeError, match="sequence of component names"):
        plan(registered, payload, only="box")
    with pytest.raises(ValueError, match="only is empty"):
        plan(registered, payload, only=())
    with pytest.raises(ComponentMismatchError) as caught:
        plan(registered, payload, only=("box", "nobody"))
    assert caught.value.missing == ("nobody",)
    with pytest.raises(ComponentMismatchError):
        plan(register({"box": Box(1), "other": Box(2)}), payload, only=("other",))


def test_component_that_the_manager_lacks_cannot_be_asked_for():
    """A name in the file alone has no live object, and says so."""
    payload = payload_of({"box": Box(1), "other": Box(2)})
    with pytest.raises(ComponentMismatchError) as caught:
        plan(register({"box": Box(1)}), payload, only=("other",))
    assert (caught.value.missing, caught.value.unexpected) == ((), ("other",))


# -- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_are_cleared_by_a_restore():
    """As at process start: of every parameter of a module, and of those that only an optimizer knows."""
    loose = torch.ones(2, requires_grad=True)
    model = nn.Linear(1, 1)
    components = {"model": model, "optimizer": SGD([*model.parameters(), loose], lr=0.1)}
    payload = payload_of(components)
    for parameter in (*model.parameters(), loose):
        parameter.grad = torch.full_like(parameter, float("nan"))
    give(payload, components)
    assert [p.grad for p in (*model.parameters(), loose)] == [None, None, None]


def test_gradients_between_micro_steps_go_on_bit_for_bit(memory_path):
    """A save between two backward passes keeps what was accumulated, under its parameter's name."""

    def build():
        model = Net()
        return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "counters": {"micro": 0}}

    def micro_step(components):
        model, optimizer = components["model"], components["optimizer"]
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        components["counters"]["micro"] += 1
        if components["counters"]["micro"] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    expected, _ = straight(build, 10, micro_step)
    for kill in (2, 3, 4):
        seed_all(1)
        components = build()
        with CheckpointManager(memory_path / str(kill), components) as manager:
            losses = run(components, kill, micro_step)
            manager.save(kill)
        seed_all(2)
        components = build()
        with CheckpointManager(memory_path / str(kill), components) as manager:
            manager.restore()
        assert losses + run(components, 10 - kill, micro_step) == expected


# -- the environment ------------------------------------------------------------------------------------------------


def test_environment_is_plain_and_names_no_machine():
    """Versions, threads and switches; no host, no path, no process: equal runs have equal files."""
    facts = environment()
    assert {"python", "torch", "numpy", "threads", "deterministic_algorithms", "fp32_precision"} <= facts.keys()
    assert environment() == facts


def test_precision_set_through_either_of_torchs_ways_is_recorded(memory_path):
    """The new settings make the old getter raise; a save goes on, and a difference is named."""
    components = {"box": Box(1)}
    with CheckpointManager(memory_path, components) as manager:
        manager.save(1)
        before = torch.backends.mkldnn.matmul.fp32_precision
        try:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            with pytest.warns(EnvironmentChangedWarning, match=r"'mkldnn.matmul': 'bf16'"):
                manager.restore()
            manager.save(2)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = before


def test_every_difference_of_the_environment_is_named(memory_path):
    """Fields that differ are listed with both values; a part restored without the streams is not held to them."""
    components = {"box": Box(1)}
    payload = payload_of(components)
    payload["safeckpt"]["environment"] |= {"torch": "1.0", "gone": True}
    assert plan(register(components), payload).environment == [
        "gone: True -> None", f"torch: '1.0' -> '{torch.__version__}'",
    ]  # fmt: skip
    assert plan(register(components), payload, only=("box",)).environment == []
