"""Every scheduler of torch, found by introspection, resumes bit for bit at every point and reports nothing."""

import inspect

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

from safeckpt import CheckpointManager
from tests.state.runs import Net, assert_resumes, resumed, run, seed_all, straight

STEPS = 12
S = lr_scheduler
# How each is made; a new scheduler in torch fails the test below by name until it is here.
RECIPES = {
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)], optimizer=o),
    "ConstantLR": lambda o: S.ConstantLR(o, factor=0.25, total_iters=4),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, T_max=5, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.001, 0.1, step_size_up=2, mode="exp_range", gamma=0.9, cycle_momentum=True),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: S.LinearLR(o, start_factor=0.25, total_iters=4),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 2, 6], gamma=0.3),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.9 + epoch / 100),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=STEPS),
    "PolynomialLR": lambda o: S.PolynomialLR(o, total_iters=6, power=2.0),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0, cooldown=1, factor=0.5, threshold=0.5),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.002, anneal_epochs=4),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=3), S.CosineAnnealingLR(o, 6), S.ExponentialLR(o, 0.5)], milestones=[3, 7]
    ),
    "StepLR": lambda o: S.StepLR(o, 3, gamma=0.5),
}


class Doubling:
    """A schedule as an object: its attributes are state, and it changes them."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 1.0 / (1 + self.calls)


class ByHand(S.LRScheduler):
    """A scheduler of somebody's own, which keeps an argument under its name and moves it, and moves weight decay."""

    def __init__(self, optimizer, rate):
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self):
        self.rate *= 0.9
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.rate / 10
        return [self.rate for _ in self.optimizer.param_groups]


COMPOSED = {
    "lambdas that are objects": lambda o: S.LambdaLR(o, Doubling()),
    "a chain with a cycle in it": lambda o: S.ChainedScheduler(
        [S.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=False), S.StepLR(o, 2, 0.5)], optimizer=o
    ),
    "warmup before restarts": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=2), S.CosineAnnealingWarmRestarts(o, 3)], milestones=[2]
    ),
    "one of somebody's own": lambda o: ByHand(o, 0.05),
}


def found_schedulers():
    classes = [*vars(lr_scheduler).values(), *vars(swa_utils).values()]
    names = {c.__name__ for c in classes if inspect.isclass(c) and issubclass(c, S.LRScheduler)}
    return names - {"LRScheduler", "_LRScheduler"}


def test_list_of_schedulers_is_the_one_torch_has():
    """Each scheduler that torch exports is in the list of those that are resumed here."""
    assert found_schedulers() == RECIPES.keys()


def with_scheduler(make, make_optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9)):
    def build():
        model = Net()
        optimizer = make_optimizer(model)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    return build


@pytest.mark.parametrize("kill", [0, 3, 7])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_scheduler_stopped_and_restored_goes_on_bit_for_bit(name, kill, memory_path):
    """Losses, learning rates and state after a restore at any point equal those of the run that never stopped."""
    assert_resumes(with_scheduler(RECIPES[name]), memory_path, kill=kill, more=min(5, STEPS - 1 - kill))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_scheduler_of_two_groups_under_adam_goes_on_bit_for_bit(name, memory_path):
    """The learning rates of several groups, and the betas that a cyclic schedule moves, are those of the run."""

    def make_optimizer(model):
        groups = [{"params": model.first.parameters(), "lr": 0.01}, {"params": model.last.parameters()}]
        return AdamW([*groups, {"params": model.norm.parameters(), "weight_decay": 0.0}], lr=0.02)

    assert_resumes(with_scheduler(RECIPES[name], make_optimizer), memory_path, kill=3, more=3)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"CyclicLR", "OneCycleLR"}))
def test_scheduler_over_a_tensor_learning_rate_goes_on_bit_for_bit(name, memory_path):
    """A learning rate that is a tensor, filled in place by its schedule, goes on with the same bits."""

    def make_optimizer(model):
        return SGD(model.parameters(), lr=torch.tensor(0.05), momentum=0.9, foreach=False)

    assert_resumes(with_scheduler(RECIPES[name], make_optimizer), memory_path, kill=3, more=4)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_manager_made_in_the_middle_of_a_run_reports_nothing(name, memory_path):
    """A manager that never saw the beginning of the run still tells what a schedule moves from what a script says."""
    assert_resumes(with_scheduler(RECIPES[name]), memory_path, kill=3, more=1, late=True)


@pytest.mark.parametrize("name", sorted(COMPOSED))
@pytest.mark.parametrize("kill", [1, 4])
def test_composed_scheduler_goes_on_bit_for_bit(name, kill, memory_path):
    """Schedulers inside schedulers, schedules with a state, and somebody's own scheduler go on where they were."""
    assert_resumes(with_scheduler(COMPOSED[name]), memory_path, kill=kill)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_run_resumed_twice_reports_nothing_and_goes_on(name, memory_path):
    """A second resume finds the script in agreement as well: the values at the beginning of the run are handed on."""
    build = with_scheduler(RECIPES[name])
    expected, _ = straight(build, 8)
    losses, components = resumed(build, memory_path, 2, 3)
    with CheckpointManager(memory_path / "again", components) as manager:
        manager.save(5)
    seed_all(3)
    components = build()
    with CheckpointManager(memory_path / "again", components) as manager:
        manager.restore()
    assert losses + run(components, 3) == expected
