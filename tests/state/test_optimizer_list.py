"""Every optimizer of torch.optim, found by introspection, resumes bit for bit in every mode it has."""

import inspect

import pytest
import torch
from torch import nn

from tests.state.runs import Net, SparseNet, assert_resumes

DENSE = {"lr": 0.05}
# What each needs to be built, and which model; a new optimizer in torch fails the test below by name until it is here.
RECIPES = {
    "ASGD": (Net, DENSE | {"t0": 2}),
    "Adadelta": (Net, {"lr": 0.5}),
    "Adafactor": (Net, DENSE),
    "Adagrad": (Net, DENSE),
    "Adam": (Net, DENSE),
    "AdamW": (Net, DENSE),
    "Adamax": (Net, DENSE),
    "LBFGS": (Net, {"lr": 0.1, "history_size": 3, "max_iter": 4}),
    "Muon": (lambda: Net(bias=False), DENSE),
    "NAdam": (Net, DENSE),
    "RAdam": (Net, DENSE),
    "RMSprop": (Net, DENSE | {"momentum": 0.5}),
    "Rprop": (Net, DENSE),
    "SGD": (Net, DENSE | {"momentum": 0.9, "dampening": 0.0}),
    "SparseAdam": (SparseNet, DENSE),
}
# Modes that a CPU cannot run, or that train through the optimizer: they are options in the file like any other.
NOT_RUN = {"capturable", "differentiable"}


def found_optimizers():
    classes = vars(torch.optim).values()
    return {c.__name__ for c in classes if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)} - {"Optimizer"}


def variants():
    """Yield (optimizer, option, value) for each optimizer as it is and with each of its switches turned."""
    for name in sorted(found_optimizers() & RECIPES.keys()):
        yield name, None, None
        for option, parameter in inspect.signature(getattr(torch.optim, name)).parameters.items():
            if option in NOT_RUN or option in RECIPES[name][1]:
                continue
            if option in ("foreach", "fused"):
                yield name, option, True
                yield name, option, False
            elif isinstance(parameter.default, bool):
                yield name, option, not parameter.default
            elif option == "weight_decay":
                yield name, option, 0.125
            elif option == "line_search_fn":
                yield name, option, "strong_wolfe"
            elif option == "lr_decay":
                yield name, option, 0.25


def test_list_of_optimizers_is_the_one_torch_has():
    """Each optimizer that torch.optim exports is in the list of those that are resumed here."""
    assert found_optimizers() == RECIPES.keys()


@pytest.mark.parametrize(("name", "option", "value"), list(variants()))
def test_optimizer_stopped_and_restored_goes_on_bit_for_bit(name, option, value, memory_path):
    """Losses, state and random streams after a restore equal those of the run that never stopped."""
    make_model, options = RECIPES[name]
    options = options | ({} if option is None else {option: value})

    def build():
        model = make_model()
        return {"model": model, "optimizer": getattr(torch.optim, name)(model.parameters(), **options)}

    assert_resumes(build, memory_path)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("kill", [0, 1])
def test_optimizer_stopped_at_the_start_goes_on_bit_for_bit(name, kill, memory_path):
    """A save before the first step, without any state, and after the first are as good as later ones."""
    make_model, options = RECIPES[name]

    def build():
        model = make_model()
        return {"model": model, "optimizer": getattr(torch.optim, name)(model.parameters(), **options)}

    assert_resumes(build, memory_path, kill=kill, more=3)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"LBFGS"}))
def test_groups_with_different_options_go_on_bit_for_bit(name, memory_path):
    """Each group keeps its own learning rate and weight decay, beside a parameter that never gets a gradient."""
    make_model, options = RECIPES[name]

    def build():
        model = make_model()
        parameters = list(model.parameters())
        unused = nn.Parameter(torch.ones(2, 2))
        model.register_parameter("unused", unused)
        first, rest = parameters[:1], [*parameters[1:], unused]
        groups = [{"params": first, "lr": 0.01}, {"params": rest, "lr": 0.02}]
        if name != "SparseAdam":
            groups[1]["weight_decay"] = 0.25
        return {"model": model, "optimizer": getattr(torch.optim, name)(groups, **options)}

    components = assert_resumes(build, memory_path)
    optimizer = components["optimizer"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert bool(optimizer.state.get(components["model"].unused)) == (name == "Adagrad")  # it has state from the start


TENSOR_LR = [name for name in sorted(RECIPES) if name not in ("ASGD", "Adafactor", "Muon", "SparseAdam")]


@pytest.mark.parametrize("name", TENSOR_LR)
def test_learning_rate_that_is_a_tensor_goes_on_bit_for_bit(name, memory_path):
    """A tensor lr comes back as a tensor of the same bits, not shared with anything."""
    make_model, options = RECIPES[name]

    def build():
        model = make_model()
        foreach = {"foreach": False} if "foreach" in inspect.signature(getattr(torch.optim, name)).parameters else {}
        lr = torch.tensor(options["lr"])
        optimizer = getattr(torch.optim, name)(model.parameters(), **(options | {"lr": lr} | foreach))
        return {"model": model, "optimizer": optimizer}

    components = assert_resumes(build, memory_path)
    assert isinstance(components["optimizer"].param_groups[0]["lr"], torch.Tensor)


CAPTURABLE = [
    name for name in sorted(RECIPES) if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
]


@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_optimizer_comes_back_with_its_state_as_it_was(name, memory_path):
    """The state of a capturable optimizer, whose step counts live beside the parameters, comes back bit for bit."""
    make_model, options = RECIPES[name]

    def build():
        model = make_model()
        return {"model": model, "optimizer": getattr(torch.optim, name)(model.parameters(), capturable=True, **options)}

    def step(components):  # a CPU cannot run one, so the state is made by an optimizer that is not capturable
        parameters = list(components["model"].parameters())
        usual = getattr(torch.optim, name)(parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        usual.step()
        for parameter in parameters:
            components["optimizer"].state[parameter] = dict(usual.state[parameter])
            parameter.grad = None
        return 0.0

    assert_resumes(build, memory_path, kill=1, more=0, step=step)
