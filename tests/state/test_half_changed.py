"""A restore that fails in the middle leaves every object as it was: whichever kind fails, wherever it stands."""

import random

import pytest
import torch
from torch import nn

from safeckpt import CheckpointManager, UnsavableStateError
from safeckpt.state import Mixture, plan, register
from tests.comparing import bits
from tests.every_kind import CODE, trained
from tests.state.runs import give, payload_of, refusal


class RefusedError(Exception):
    """What a component of the user's raises."""


def photo(components):
    """Return everything in the components, and the process's streams."""
    payload = payload_of(components)
    grads = {name: p.grad for name, p in components["model"].named_parameters()}
    found = {**payload, "grads": grads, "python": random.getstate()}
    return {name: bits(value) for name, value in found.items()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("failing", CODE)
def test_component_that_fails_in_a_restore_leaves_every_object_as_it_was(failing, when, monkeypatch):
    """Before its own change or after it: all kinds have their state from before, and the note says so."""
    payload = payload_of(trained(3))
    components = trained(2)
    kind, _, method = CODE[failing]
    original, calls = getattr(kind, method), []

    def fails_once(self, state):
        calls.append(state)
        if when == "after" or len(calls) > 1:
            original(self, state)
        if len(calls) == 1:
            raise RefusedError

    before = photo(components)
    monkeypatch.setattr(kind, method, fails_once)
    ready = plan(register(components), payload)
    with pytest.raises(RefusedError) as caught:
        ready.apply(mixture := Mixture())
    assert photo(components) == before
    assert not mixture.names
    (note,) = caught.value.__notes__
    assert note == f"safeckpt: loading {failing} failed; every object has its state from before the restore."
    give(payload, components)
    assert photo(components)["model"] == photo(trained(3))["model"]


@pytest.mark.parametrize("failing", CODE)
def test_component_that_never_loads_is_named_and_the_others_are_as_they_were(failing, monkeypatch):
    """It cannot be put back either: it is the one that has to be built again."""
    payload = payload_of(trained(3))
    components = trained(2)

    def fails(self, state):
        raise RefusedError

    before = photo(components)
    kind, _, method = CODE[failing]
    monkeypatch.setattr(kind, method, fails)
    ready = plan(register(components), payload)
    with pytest.raises(RefusedError) as caught:
        ready.apply(mixture := Mixture())
    assert set(mixture.names) == {failing}
    assert f"stopped half-way: {failing} may be changed, every other object" in caught.value.__notes__[0]
    after = photo(components)
    for name in components:
        assert name == failing or after[name] == before[name], name


@pytest.mark.parametrize(
    "register_hook",
    [
        lambda c, hook: c["model"].register_load_state_dict_pre_hook(hook),
        lambda c, hook: c["model"].register_load_state_dict_post_hook(hook),
        lambda c, hook: c["optimizer"].register_load_state_dict_pre_hook(hook),
        lambda c, hook: c["optimizer"].register_load_state_dict_post_hook(hook),
    ],
    ids=["module pre", "module post", "optimizer pre", "optimizer post"],
)
def test_hook_that_fails_leaves_every_object_as_it_was(register_hook):
    """Hooks on loading are code of the user's as well."""
    model = nn.Linear(2, 2)
    components = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    payload = payload_of(components)
    with torch.no_grad():
        model.weight.add_(1)
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RefusedError

    register_hook(components, hook)
    before = model.weight.clone()
    with pytest.raises(RefusedError, match=r"^") as caught:
        plan(register(components), payload).apply(Mixture())
    assert "every object has its state from before" in caught.value.__notes__[0]
    assert torch.equal(model.weight, before)


# -- tensors that torch cannot copy into ------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module with a buffer between two parameters."""

    def __init__(self, buffer):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", buffer)
        self.last = nn.Linear(2, 2)
        self.requires_grad_(False)


def inference(values):
    with torch.inference_mode():
        return values.clone()


def quantized(channels):
    if channels:
        return torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8)
    return torch.quantize_per_tensor(torch.ones(3, 2), 0.5, 0, torch.qint8)


SAME = {
    "expanded": lambda value: torch.full((1, 3), value).expand(5, 3),
    "expanded scalar": lambda value: torch.tensor(value).expand(2, 2),
    "inference": lambda value: inference(torch.full((4,), value)),
    "float4": lambda value: torch.full((4,), int(value), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "conjugate": lambda value: torch.tensor([1 + value * 1j]).conj(),
    "negative": lambda value: torch.tensor([1 + value * 1j]).conj().imag,
    "sliding windows": lambda value: torch.arange(value, value + 6.0).unfold(0, 3, 1),
}


def comparable(tensor):
    return tensor.view(torch.uint8) if tensor.dtype is torch.float4_e2m1fn_x2 else tensor


@pytest.mark.parametrize("kind", SAME)
def test_buffer_that_torch_cannot_copy_into_is_restored(kind, memory_path):
    """The values come back through a file, into the same tensor."""
    make = SAME[kind]
    with CheckpointManager(memory_path, {"model": Holder(make(2.0)), "c": {}}) as manager:
        manager.save(1)
    model = Holder(make(3.0))
    buffer = model.buffer
    with CheckpointManager(memory_path, {"model": model, "c": {}}) as manager:
        manager.restore()
    assert model.buffer is buffer
    assert torch.equal(comparable(model.buffer), comparable(make(2.0)))


def test_values_that_an_expanded_buffer_cannot_hold_are_refused():
    """Elements that share memory cannot take different values; nothing is changed."""
    payload = payload_of({"model": Holder(torch.arange(4.0))})
    (mismatch,) = refusal(payload, {"model": Holder(torch.zeros(1).expand(4))})
    assert mismatch.startswith("model.buffer: the live tensor is expanded (strides [0]), so that elements share memory")


OTHER = {
    "number of elements": (
        lambda: torch.tensor([[1.0, 0], [0, 2]]).to_sparse_csr(),
        lambda: torch.tensor([[1.0, 0], [5, 6]]).to_sparse_csr(),
        "model.buffer: saved number of stored elements 2, live number of stored elements 3",
    ),
    "scheme": (lambda: quantized(False), lambda: quantized(True), "model.buffer: saved quantization torch.per_tensor"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize")
@pytest.mark.parametrize("what", OTHER)
def test_buffer_of_another_form_is_refused_before_anything_is_changed(what):
    """What torch would refuse in the middle of a load is found before it."""
    saved, live, text = OTHER[what]
    (mismatch,) = refusal(payload_of({"model": Holder(saved())}), {"model": Holder(live())})
    assert mismatch.startswith(text)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_buffer_is_refused_before_the_first_save(layout, memory_path):
    """Torch can save one and never load it: the manager says so when it is built."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(UnsavableStateError, match=r"model\.buffer is a nested tensor in a module"):
        CheckpointManager(memory_path, {"model": Holder(nested)})


# -- state dicts that are not the whole module ----------------------------------------------------------------------


class HeadOnly(nn.Module):
    """Leaves its frozen part out of the state, as adapters do."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def state_dict(self, *args, **kwargs):
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if not name.startswith("encoder.")}


def without_encoder():
    model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 1))

    def hook(_, state, prefix, __):
        for name in ("weight", "bias"):
            del state[f"{prefix}0.{name}"]

    model.register_state_dict_post_hook(hook)
    return model


@pytest.mark.parametrize("make", [HeadOnly, without_encoder])
def test_state_that_leaves_frozen_parts_out_is_restored_around_them(make, memory_path):
    """What the state has comes from the file, what it leaves out stays as the script built it."""
    first, second = make(), make()
    head = list(first.children())[1]
    with CheckpointManager(memory_path, {"model": first, "o": torch.optim.SGD(head.parameters(), lr=1)}) as manager:
        manager.save(1)
    encoder, live_head = list(second.children())
    kept = encoder.weight.clone()
    with CheckpointManager(
        memory_path, {"model": second, "o": torch.optim.SGD(live_head.parameters(), lr=1)}
    ) as manager:
        manager.restore()
    assert torch.equal(live_head.weight, head.weight)
    assert torch.equal(encoder.weight, kept)


class Renames(nn.Sequential):
    """Saves under a name that it does not load."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {"0.weight": state["0.weight"], "kernel": state["1.weight"]}


def test_names_that_the_module_does_not_load_are_refused_before_anything_is_changed():
    """Torch finds them in the middle of the load."""
    payload = payload_of({"model": Renames(nn.Linear(2, 2), nn.Linear(2, 2))})
    assert refusal(payload, {"model": Renames(nn.Linear(2, 2), nn.Linear(2, 2))}) == [
        "model.kernel: in its state_dict, and load_state_dict does not know it"
    ]
