"""From objects to components: what is accepted as what, what is refused, and what is missed."""

import random
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

from safeckpt import CheckpointManager, UncapturedStateWarning
from safeckpt.state import register, uncaptured
from tests.comparing import changes, photograph
from tests.state.runs import Net, run
from tests.state.test_scheduler_list import COMPOSED, RECIPES


class Stateful:
    """Any object with the two methods."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Loader(Stateful, DataLoader):
    """A DataLoader that has a position."""


class Half:
    """Can give its state and not take it."""

    def state_dict(self):
        return {}


class Sized(Stateful):
    """A loader of another make."""

    dataset = ()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Replay(Stateful):
    """A replay buffer has the methods of a loader, and holds data."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def found_missing(components):
    """Return what a manager of these components says is not captured."""
    return uncaptured(components, register(components))


def optimizer_of(model, kind=SGD, **options):
    return kind(model.parameters(), lr=0.1, **options)


LAYER = nn.Linear(1, 1)
OPTIMIZER = optimizer_of(LAYER)
KINDS = {
    "module": [LAYER, nn.DataParallel(nn.Linear(1, 1)), swa_utils.AveragedModel(nn.Linear(1, 1)), nn.ReLU()],
    "optimizer": [OPTIMIZER],
    "scheduler": [
        lr_scheduler.StepLR(OPTIMIZER, 1), lr_scheduler.ReduceLROnPlateau(OPTIMIZER), swa_utils.SWALR(OPTIMIZER, 0.1),
    ],
    "scaler": [torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)],
    "generator": [
        torch.Generator(), np.random.default_rng(1), np.random.RandomState(1), np.random.PCG64(1), random.Random(1),
    ],
    "loader": [Loader(TensorDataset(torch.zeros(2))), Sized()],
    "stateful": [Stateful(), Replay()],
    "counters": [{}, {"a": 1}],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_taken_for_what_they_are(kind):
    """What an object is decides how it is captured."""
    for obj in KINDS[kind]:
        assert register({"it": obj})["it"].kind == kind


def test_components_keep_the_order_they_were_given_in():
    """The mapping's order is the order of the file's keys."""
    objects = {"z": {}, "a": nn.ReLU(), "m": Stateful()}
    assert list(register(MappingProxyType(objects))) == ["z", "a", "m"]


REFUSED = {
    "a plain DataLoader": (DataLoader(TensorDataset(torch.zeros(2))), "safeckpt.ResumableLoader"),
    "an OrderedDict": (OrderedDict(a=1), "is a OrderedDict, which has no state that can be captured"),
    "a list": ([1], "is a list"),
    "a number": (3, "is a int"),
    "None": (None, "is a NoneType"),
    "a tensor": (torch.ones(1), "is a Tensor"),
    "a function": (print, "is a builtin_function_or_method"),
    "the module of random streams": (random, "the module-wide streams are always captured"),
    "NumPy's module of streams": (np.random, "the module-wide streams are always captured"),
    "the system's randomness": (random.SystemRandom(), "cannot be made to repeat"),
    "half a protocol": (Half(), "is a Half"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_objects_without_a_state_are_refused_with_what_is_accepted(kind):
    """A TypeError at once, with the name, the type and what to give instead."""
    obj, words = REFUSED[kind]
    with pytest.raises(TypeError) as caught:
        register({"it": obj})
    assert str(caught.value).startswith("'it'")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", "rng", "safeckpt", "a.b", "."])
def test_names_that_are_reserved_or_have_a_dot_are_refused(name):
    """Tensor names are built from component names, and two keys are the library's own."""
    with pytest.raises(ValueError, match="cannot name a component"):
        register({name: nn.ReLU()})


def test_nonsense_mappings_are_refused():
    """No mapping, no names, no components: each says what to give."""
    with pytest.raises(TypeError, match="components must be a mapping"):
        register([nn.ReLU()])
    with pytest.raises(TypeError, match="names must be strings"):
        register({1: nn.ReLU()})
    with pytest.raises(ValueError, match="components is empty"):
        register({})


def test_one_object_under_two_names_is_refused():
    """Also when one of the two is a wrapper around the other: its state would be saved twice and restored twice."""
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'b' and 'a' are the same object"):
        register({"a": model, "b": model})
    with pytest.raises(ValueError, match="'ddp' and 'model' are the same object"):
        register({"model": model, "ddp": nn.DataParallel(model)})


# -- the audit: what is missed --------------------------------------------------------------------------------------


def test_long_lists_of_names_are_cut():
    """Five names and the number of the rest."""
    model, loose = nn.Linear(1, 1), [torch.ones(1, requires_grad=True) for _ in range(8)]
    (sentence,) = found_missing({"model": model, "optimizer": SGD([*model.parameters(), *loose], lr=1)})
    assert sentence.endswith("position 6 [1], and 3 more")


def test_parameters_of_no_module_are_named_by_their_place():
    """An optimizer that trains a tensor nobody saves: its moments would come back, its value would not."""
    model, loose = nn.Linear(1, 1), torch.ones(3, requires_grad=True)
    optimizer = SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    assert found_missing({"model": model, "optimizer": optimizer}) == [
        "optimizer: it trains parameters of no registered module: group 1 position 0 [3]"
    ]
    assert found_missing({"model": model, "optimizer": optimizer, "learned": {"alpha": loose}}) == []


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"ReduceLROnPlateau"}))
def test_optimizer_driven_by_a_scheduler_that_is_not_registered_is_named(name):
    """Torch marks an optimizer that a scheduler is attached to; the mark gives a forgotten schedule away."""
    model = Net()
    optimizer = optimizer_of(model, momentum=0.9)
    scheduler = RECIPES[name](optimizer)
    assert found_missing({"model": model, "optimizer": optimizer}) == [
        "optimizer: a scheduler drives it and no registered scheduler does; its schedule would start over"
    ]
    assert found_missing({"model": model, "optimizer": optimizer, "scheduler": scheduler}) == []


def test_scheduler_whose_optimizer_is_not_registered_is_named():
    """A schedule without the moments of what it drives."""
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    assert found_missing({"model": model, "scheduler": scheduler}) == [
        "scheduler: the optimizer it drives is not registered; its moments and lr would be lost"
    ]


def test_optimizer_inside_another_whose_state_nobody_saves_is_named():
    """A sharpness-aware wrapper hands on its own state, and the momentum of the one inside is lost."""

    class Sharp(torch.optim.Optimizer):
        def __init__(self, params, base):
            super().__init__(params, {"rho": 0.1})
            self.base_optimizer = base

        def step(self, closure=None):
            return self.base_optimizer.step(closure)

    class Handing(Sharp):
        def state_dict(self):
            return {**super().state_dict(), "base": self.base_optimizer.state_dict()}

    model = Net()
    base = optimizer_of(model, momentum=0.9)
    sharp = Sharp(model.parameters(), base)
    (sentence,) = found_missing({"model": model, "optimizer": sharp})
    assert sentence.startswith("optimizer: it holds a SGD whose state is not in its state_dict; register that")
    assert found_missing({"model": model, "optimizer": sharp, "base": base}) == []
    assert found_missing({"model": model, "optimizer": Handing(model.parameters(), base)}) == []


def test_trainable_parameters_that_a_state_dict_leaves_out_are_named():
    """A model that saves only some of what it trains."""

    class Some(nn.Linear):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            state.pop("bias")
            return state

    model = Some(2, 2)
    optimizer = optimizer_of(model)
    assert found_missing({"model": model, "optimizer": optimizer}) == [
        "model: its state_dict leaves out model.bias (trainable: requires_grad is True)"
    ]
    model.bias.requires_grad_(False)
    assert found_missing({"model": model, "optimizer": optimizer}) == []


def test_audit_is_a_warning_when_the_manager_is_built(memory_path):
    """Each sentence is an UncapturedStateWarning, and nothing is written."""
    model = nn.Linear(1, 1)
    optimizer = optimizer_of(model)
    lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UncapturedStateWarning, match="its schedule would start over") as caught:
        CheckpointManager(memory_path / "new", {"model": model, "optimizer": optimizer})
    assert len(caught) == 1
    assert not (memory_path / "new").exists()


def test_audit_changes_nothing():
    """Looking for what is missed touches no object and no stream."""
    model = Net()
    optimizer = optimizer_of(model)
    components = {"model": model, "optimizer": optimizer, "scheduler": RECIPES["SequentialLR"](optimizer)}
    before = photograph(**components)
    found_missing(components)
    assert not changes(before, photograph(**components))


# -- no false alarm -------------------------------------------------------------------------------------------------


def usual():
    model = Net()
    return {"model": model, "optimizer": optimizer_of(model, AdamW)}


def gan():
    generator, critic = Net(), Net()
    parts = {"generator": generator, "critic": critic}
    return parts | {"opt_g": optimizer_of(generator, Adam), "opt_c": optimizer_of(critic, Adam)}


def two_optimizers_for_one_model():
    model = Net()
    one, two = SGD(model.first.parameters(), lr=0.1), SGD([*model.norm.parameters(), *model.last.parameters()], lr=1)
    return {"model": model, "one": one, "two": two}


def frozen_backbone():
    components = usual()
    components["model"].first.requires_grad_(False)
    return components


def averages():
    components = usual()
    components["ema"] = swa_utils.AveragedModel(components["model"])
    components["teacher"] = Net().requires_grad_(False)
    components["swa"] = swa_utils.SWALR(components["optimizer"], 0.1)
    return components


def tied():
    model = nn.Sequential(OrderedDict(emb=nn.Embedding(4, 2), out=nn.Linear(2, 4, bias=False)))
    model.out.weight = model.emb.weight
    return {"model": model, "optimizer": optimizer_of(model)}


def wrapped():
    model = torch.compile(nn.DataParallel(Net()), backend="eager")
    return {"model": model, "optimizer": optimizer_of(model)}


def several_schedulers():
    components = usual()
    optimizer = components["optimizer"]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    return components | {"warmup": lr_scheduler.LinearLR(optimizer), "plateau": plateau}


class Holding(Stateful):
    """Somebody's own class that holds optimizers or schedulers and saves them itself."""

    def __init__(self, *held):
        self.held = list(held)


def own_scheduler_class():
    components = usual()
    scheduler = lr_scheduler.StepLR(components["optimizer"], 1)
    return components | {"mine": Holding(scheduler)}


def own_optimizer_wrapper():
    model = Net()
    optimizer = optimizer_of(model)
    return {"model": model, "optimizer": Holding(optimizer), "scheduler": lr_scheduler.StepLR(optimizer, 1)}


def scheduler_around_a_scheduler():
    class Gradual(lr_scheduler.LRScheduler):
        def __init__(self, optimizer, after):
            self.after = after
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1]

    components = usual()
    return components | {"scheduler": Gradual(components["optimizer"], lr_scheduler.StepLR(components["optimizer"], 1))}


def everything():
    components = usual() | {"scaler": torch.amp.GradScaler("cpu"), "counters": {"a": 1}, "loader": Sized()}
    return components | {"gen": torch.Generator(), "rs": np.random.RandomState(1), "mine": Stateful()}


def trained_before():
    components = usual()
    components["scheduler"] = lr_scheduler.StepLR(components["optimizer"], 1)
    run(components, 3)
    return components


def without_weights():
    return {"model": nn.Sequential(nn.ReLU(), nn.Dropout()), "counters": {}}


def lazy():
    model = nn.Sequential(nn.LazyLinear(3))
    return {"model": model, "optimizer": optimizer_of(model)}


SETUPS = [
    usual, gan, two_optimizers_for_one_model, frozen_backbone, averages, tied, wrapped, several_schedulers,
    own_scheduler_class, own_optimizer_wrapper, scheduler_around_a_scheduler, everything, trained_before,
    without_weights, lazy,
]  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.__name__)
def test_ordinary_setup_raises_no_alarm(setup):
    """What is set up correctly is told nothing."""
    assert found_missing(setup()) == []


@pytest.mark.parametrize("name", sorted(COMPOSED))
def test_composed_scheduler_raises_no_alarm(name):
    """Schedulers inside schedulers are found."""
    components = usual()
    components["optimizer"] = optimizer_of(components["model"], momentum=0.9)
    components["scheduler"] = COMPOSED[name](components["optimizer"])
    assert found_missing(components) == []


class SavesTheInner(nn.Module):
    """As the wrapper of Fabric: it holds the module twice, and its state has the names of the inner one."""

    def __init__(self, inner):
        super().__init__()
        self.forward_module, self.original = inner, inner

    def state_dict(self, *arguments, **options):
        return self.original.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments, **options):
        return self.original.load_state_dict(*arguments, **options)


def test_parameters_that_are_saved_under_the_names_of_the_inner_module_are_not_left_out():
    assert found_missing({"model": SavesTheInner(nn.Linear(2, 2))}) == []


def test_parameter_that_a_wrapper_leaves_out_is_named():
    wrapper = SavesTheInner(nn.Linear(2, 2))
    wrapper.scale = nn.Parameter(torch.ones(1))
    assert found_missing({"model": wrapper}) == [
        "model: its state_dict leaves out model.scale (trainable: requires_grad is True)"
    ]
