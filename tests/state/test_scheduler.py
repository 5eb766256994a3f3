"""Schedulers: what has to fit, what a script and a file disagree about, and what can be kept."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as s

from safeckpt import CheckpointManager, HyperparameterReplacedWarning, UnsavableStateError
from safeckpt.state import Mixture, capture, plan, register
from tests.comparing import bits, changes, photograph
from tests.state.runs import Net, give, payload_of, refusal, run, seed_all, straight, train_step


def build(make=lambda optimizer: s.StepLR(optimizer, 2), lr=0.1):
    model = Net()
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}


def replaced(saved, live, *, steps=3, keep_live=()):
    """Return the report of giving a run's state to other objects, and those objects."""
    seed_all(1)
    components = build(saved)
    registered = register(components)
    run(components, steps)
    payload = capture(registered).payload
    seed_all(2)
    components = build(live)
    ready = plan(register(components), payload, keep_live=keep_live)
    ready.apply(Mixture())
    return ready.replaced, components


# -- what does not fit ----------------------------------------------------------------------------------------------


def test_another_scheduler_is_refused_by_class_at_any_depth():
    """A schedule of another kind, also one inside a composed one, is refused and nothing changes."""

    def warmup(second):
        return lambda o: s.SequentialLR(o, [s.LinearLR(o), second(o)], milestones=[2])

    payload = payload_of(build(warmup(lambda o: s.ExponentialLR(o, 0.9))))
    (mismatch,) = refusal(payload, build(warmup(lambda o: s.StepLR(o, 2))))
    assert mismatch == (
        "scheduler: saved class SequentialLR(LinearLR, ExponentialLR), live class SequentialLR(LinearLR, StepLR)"
    )
    assert refusal(payload, build())[0].endswith("live class StepLR")


def test_other_number_of_groups_is_refused():
    """A schedule over two groups does not fit an optimizer with one."""
    model = Net()
    optimizer = SGD([{"params": model.first.parameters()}, {"params": model.last.parameters()}], lr=0.1)
    two = {"model": model, "optimizer": optimizer, "scheduler": s.StepLR(optimizer, 2)}
    mismatches = refusal(payload_of(two), build(), only=("scheduler",))
    assert "scheduler: saved for 2 parameter group(s), the live optimizer has 1" in mismatches


def test_scheduler_that_carries_its_optimizer_is_refused_at_save_by_name(memory_path):
    """A home-made warmup that keeps another scheduler as an attribute cannot be read back: found before the disk."""

    class Gradual(s.LRScheduler):
        def __init__(self, optimizer, after_scheduler):
            self.after_scheduler = after_scheduler
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1 for _ in self.optimizer.param_groups]

    components = build(lambda o: Gradual(o, s.StepLR(o, 3)))
    with CheckpointManager(memory_path, components) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['scheduler']['after_scheduler']"
        assert not list(memory_path.glob("*.pt"))


def test_scheduler_over_lambdas_saves_what_they_are_not(memory_path):
    """Functions are not written, as in torch: the script brings them."""

    def schedule(epoch):
        return 0.5**epoch

    components = build(lambda o: s.LambdaLR(o, schedule))
    with CheckpointManager(memory_path, components) as manager:
        manager.save(1)
        manager.restore()
    assert components["scheduler"].lr_lambdas == [schedule]


# -- order of construction and loading ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda o: s.LinearLR(o, 0.1, total_iters=6), lambda o: s.CosineAnnealingLR(o, 9)])
def test_scheduler_constructed_after_the_optimizer_was_restored_does_not_move_the_rate(make, memory_path):
    """A constructor sets the learning rate at once; the restore that follows puts back the saved one."""
    expected, _ = straight(lambda: build(make), 7)
    seed_all(1)
    components = build(make)
    with CheckpointManager(memory_path, components) as manager:
        losses = run(components, 4)
        manager.save(4)
    seed_all(2)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}
    with CheckpointManager(memory_path, parts) as manager:
        manager.restore(only=("model", "optimizer"))
    parts["scheduler"] = make(optimizer)
    with CheckpointManager(memory_path, parts) as manager:
        manager.restore()
    assert optimizer.param_groups[0]["lr"] == components["optimizer"].param_groups[0]["lr"]
    assert losses + run(parts, 3) == expected


def test_restore_makes_no_step():
    """Counters and rates afterwards are those saved; the first step comes from the loop."""
    payload = payload_of(build())
    components = build()
    calls = []
    components["scheduler"].step = lambda *args: calls.append(args)
    components["optimizer"].register_step_post_hook(lambda *args: calls.append(args))
    give(payload, components)
    assert calls == []
    assert components["scheduler"].last_epoch == 0


def test_scheduler_restored_without_its_optimizer_is_refused():
    """The rate that the schedule has reached is in the optimizer: alone, it would go on from another one."""
    components = build()
    run(components, 3)
    assert refusal(payload_of(components), build(), only=("scheduler",)) == [
        "scheduler: its learning rate is in optimizer, which is not in only=; add 'optimizer'"
    ]


def test_restored_scheduler_shares_nothing_with_the_payload():
    """Stepping on after a restore leaves the payload, and a second restore gives the same."""
    components = build(lambda o: s.ReduceLROnPlateau(o, patience=0))
    run(components, 3)
    payload = payload_of(components)
    kept = bits(payload)
    results = []
    for _ in range(2):
        give(payload, components)
        seed_all(4)
        results.append((run(components, 3), bits(components["scheduler"].state_dict())))
    assert results[0] == results[1]
    assert bits(payload) == kept


# -- what a script says otherwise -----------------------------------------------------------------------------------

CHANGED = {
    "a longer cosine": (
        lambda o: s.CosineAnnealingLR(o, T_max=10),
        lambda o: s.CosineAnnealingLR(o, T_max=20),
        ["scheduler.T_max: 20 -> 10"],
    ),
    "milestones": (
        lambda o: s.MultiStepLR(o, [2, 4]),
        lambda o: s.MultiStepLR(o, [2, 8]),
        ["scheduler.milestones: Counter({2: 1, 8: 1}) -> Counter({2: 1, 4: 1})"],
    ),
    "total steps": (
        lambda o: s.OneCycleLR(o, 0.2, total_steps=10),
        lambda o: s.OneCycleLR(o, 0.2, total_steps=20),
        ["scheduler._schedule_phases: [{'end_step': 5.0, ", "scheduler.total_steps: 20 -> 10"],
    ),
    "shape of the cycle": (
        lambda o: s.OneCycleLR(o, 0.2, total_steps=10, pct_start=0.3),
        lambda o: s.OneCycleLR(o, 0.2, total_steps=10, pct_start=0.5),
        ["scheduler._schedule_phases: [{'end_step': 4.0, "],
    ),
    "length of a cycle": (
        lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=4),
        lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=6, step_size_down=2),
        ["scheduler.step_ratio: 0.75 -> 0.5"],
    ),
    "two options of a plateau": (
        lambda o: s.ReduceLROnPlateau(o, patience=3, min_lr=1e-4),
        lambda o: s.ReduceLROnPlateau(o, patience=5, min_lr=1e-5),
        ["scheduler.min_lrs: [1e-05] -> [0.0001]", "scheduler.patience: 5 -> 3"],
    ),
    "inside a composed one": (
        lambda o: s.SequentialLR(o, [s.LinearLR(o, total_iters=2), s.CosineAnnealingLR(o, 9)], milestones=[2]),
        lambda o: s.SequentialLR(o, [s.LinearLR(o, total_iters=3), s.CosineAnnealingLR(o, 9)], milestones=[3]),
        ["scheduler._milestones: [3] -> [2]", "scheduler._schedulers.0.total_iters: 3 -> 2"],
    ),
    "inside a chain": (
        lambda o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)], optimizer=o),
        lambda o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.8)], optimizer=o),
        ["scheduler._schedulers.1.gamma: 0.8 -> 0.9"],
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_arguments_that_the_file_overrules_are_reported(kind):
    """Constructor arguments in which script and file disagree are named, at any depth, or by what came of them."""
    saved, live, expected = CHANGED[kind]
    report, components = replaced(saved, live)
    assert len(report) == len(expected)
    assert all(line.startswith(start) for line, start in zip(report, expected, strict=True))
    again, _ = replaced(live, live)
    assert again == []
    assert components["scheduler"].state_dict().get("last_epoch", 3) == 3


def test_base_rate_that_the_file_overrules_is_reported():
    """A new learning rate in a script with a schedule is in the schedule's base rates and the optimizer's first."""
    seed_all(1)
    payload = payload_of(build())
    components = build(lr=0.5)
    with_warning = plan(register(components), payload).replaced
    assert with_warning == ["optimizer.initial_lr: 0.5 -> 0.1", "scheduler.base_lrs: [0.5] -> [0.1]"]


def test_warning_and_text_name_each_argument(memory_path):
    """The manager's warning lists the lines and says how to keep the live values."""
    with CheckpointManager(memory_path, build(lambda o: s.CosineAnnealingLR(o, T_max=10))) as manager:
        manager.save(1)
    components = build(lambda o: s.CosineAnnealingLR(o, T_max=20))
    with CheckpointManager(memory_path, components) as manager:
        with pytest.warns(HyperparameterReplacedWarning, match=r"scheduler\.T_max: 20 -> 10") as caught:
            manager.restore()
        assert "keep_live=" in str(caught[0].message)
        manager.restore(keep_live=["scheduler.T_max"])


def test_longer_schedule_that_is_kept_goes_on_to_its_new_end():
    """keep_live=total_steps keeps what was computed from it too, so the run can be longer than was planned."""

    def make(total):
        return lambda o: s.OneCycleLR(o, 0.2, total_steps=total)

    report, components = replaced(make(6), make(12), keep_live=["scheduler.total_steps"])
    assert report == []
    rates = []
    for _ in range(8):
        train_step(components)
        rates.append(components["optimizer"].param_groups[0]["lr"])
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    longer = {"model": model, "optimizer": optimizer, "scheduler": make(12)(optimizer)}
    expected = []
    for _ in range(11):
        train_step(longer)
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates == expected[3:]


EXTENDED = {
    "cosine": (lambda o, n: s.CosineAnnealingLR(o, T_max=n, eta_min=0.01), "T_max"),
    "linear": (lambda o, n: s.LinearLR(o, 1.0, 0.0, n), "total_iters"),
    "polynomial": (lambda o, n: s.PolynomialLR(o, n, power=2.0), "total_iters"),
    "one cycle": (lambda o, n: s.OneCycleLR(o, 0.4, total_steps=n), "total_steps"),
    "step": (lambda o, n: s.StepLR(o, n // 2), "step_size"),
    "milestones": (lambda o, n: s.MultiStepLR(o, [n // 3, n // 2]), "milestones"),
    "exponential": (lambda o, n: s.ExponentialLR(o, 1 - 1 / n), "gamma"),
    "constant": (lambda o, n: s.ConstantLR(o, 0.5, n), "total_iters"),
}


@pytest.mark.parametrize("done", [3, 8, 10], ids=["early", "late", "finished"])
@pytest.mark.parametrize("kind", EXTENDED)
def test_schedule_that_is_made_longer_has_the_rate_of_the_longer_one_from_the_next_step_on(kind, done):
    """Also a schedule whose rate had come down to 0: what is kept counts as if it had been there from the start."""
    make, argument = EXTENDED[kind]

    def two_groups(total):
        model = Net()
        first, *rest = model.parameters()
        optimizer = SGD([{"params": [first], "lr": 0.3}, {"params": rest}], lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer, total)}

    def rates_of(components, steps):
        found = []
        for _ in range(steps):
            found.append([group["lr"] for group in components["optimizer"].param_groups])
            train_step(components)
        return found

    saved = two_groups(10)
    rates_of(saved, done - (kind == "one cycle" and done == 10))
    done = saved["scheduler"].last_epoch
    live = two_groups(20)
    give(payload_of(saved), live, keep_live=[f"scheduler.{argument}"])
    assert live["scheduler"].get_last_lr() == [group["lr"] for group in live["optimizer"].param_groups]
    expected = rates_of(two_groups(20), 20 - 1)[done:]
    assert rates_of(live, len(expected)) == [pytest.approx(rates, rel=1e-12, abs=1e-15) for rates in expected]


def test_argument_that_is_kept_and_the_same_changes_no_rate():
    """Rates that were set by hand stay as they are in the file."""
    saved = build(lambda o: s.CosineAnnealingLR(o, 10))
    run(saved, 3)
    saved["optimizer"].param_groups[0]["lr"] = 0.123
    live = build(lambda o: s.CosineAnnealingLR(o, 10))
    give(payload_of(saved), live, keep_live=["scheduler.T_max"])
    assert live["optimizer"].param_groups[0]["lr"] == 0.123


def test_schedule_without_a_closed_form_says_that_its_rate_is_the_old_one():
    """A composed schedule cannot tell what its rate would be: a notice says what to do."""
    saved, live, _ = CHANGED["inside a composed one"]
    seed_all(1)
    components = build(saved)
    run(components, 3)
    ready = plan(register(build(live)), payload_of(components), keep_live=["scheduler._schedulers.0.total_iters"])
    (notice,) = ready.notices
    assert notice.startswith("scheduler: a SequentialLR(")
    assert "set param_groups[i]['lr'] after the restore" in notice


def test_arguments_inside_composed_schedulers_can_be_kept():
    """A dotted name reaches an argument of an inner scheduler."""
    saved, live, _ = CHANGED["inside a composed one"]
    kept = ["scheduler._milestones", "scheduler._schedulers.0.total_iters"]
    report, components = replaced(saved, live, keep_live=kept)
    assert report == []
    inner = components["scheduler"]._schedulers
    assert (inner[0].total_iters, inner[1].T_max) == (3, 9)
    assert components["scheduler"].last_epoch == 3


def test_new_base_rate_can_be_kept_under_a_schedule():
    """Rate, first rate and base rates kept together make the schedule go on from the script's new rate."""
    seed_all(1)
    components = build(lambda o: s.LambdaLR(o, lambda epoch: 1 / (1 + epoch)))
    registered = register(components)
    run(components, 3)
    payload = capture(registered).payload
    live = build(lambda o: s.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), lr=0.8)
    names = ["optimizer.lr", "optimizer.initial_lr", "scheduler.base_lrs"]
    assert give(payload, live, keep_live=names).replaced == []
    train_step(live)
    assert live["optimizer"].param_groups[0]["lr"] == 0.8 * (1 / 5)


@pytest.mark.parametrize("name", ["scheduler.last_epoch", "scheduler.nonsense", "scheduler._schedulers.0.gamma"])
def test_keeping_what_is_no_argument_is_an_error(name):
    """Where the schedule stands is no argument, and neither is what does not exist."""
    components = build()
    with pytest.raises(ValueError, match=f"has no hyper-parameter '{name.partition('.')[2]}'"):
        plan(register(components), payload_of(components), keep_live=[name])


def test_object_among_the_arguments_is_not_copied():
    """An argument that is an object, the optimizer with all its parameters perhaps, is neither copied nor compared."""

    class Holder:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    class Custom(s.LRScheduler):
        def __init__(self, optimizer, holder, nested):
            self.holder, self.nested = holder, nested
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1 for _ in self.optimizer.param_groups]

    components = build(lambda o: Custom(o, Holder(), [Holder()]))
    assert register(components)["scheduler"]


def test_cyclic_momentum_under_adam_is_no_news():
    """What a cyclic schedule moves besides the rate (betas) is driven, not replaced, also in a manager made late."""

    def make():
        model = Net()
        optimizer = AdamW(model.parameters(), lr=0.1)
        scheduler = s.OneCycleLR(optimizer, 0.2, total_steps=10)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    components = make()
    run(components, 3)
    payload = payload_of(components)
    assert components["optimizer"].param_groups[0]["betas"] != make()["optimizer"].param_groups[0]["betas"]
    assert give(payload, make()).replaced == []


def test_capturing_a_scheduler_changes_nothing():
    """A capture is a look, also of composed schedulers whose state_dict gathers that of others."""
    components = build(CHANGED["inside a composed one"][0])
    registered = register(components)
    before = photograph(**components)
    capture(registered)
    assert not changes(before, photograph(**components))


def test_steps_after_a_restore_give_no_false_warning(memory_path):
    """torch warns that the order of steps is wrong when it cannot see that one was made before the restart."""
    components = build()
    run(components, 1)
    with CheckpointManager(memory_path, components) as manager:
        manager.save(1)
    components = build()
    with CheckpointManager(memory_path, components) as manager:
        manager.restore()
        components["scheduler"].step()  # at the end of an epoch whose steps were all made before
    assert components["scheduler"].last_epoch == 2


def test_kept_rate_of_nested_module_is_untouched_by_other_components():
    """A name belongs to one component: keeping the optimizer's option leaves the scheduler's to the file."""
    report, components = replaced(
        lambda o: s.StepLR(o, 2, gamma=0.5), lambda o: s.StepLR(o, 2, gamma=0.1), keep_live=["optimizer.momentum"]
    )
    assert report == ["scheduler.gamma: 0.1 -> 0.5"]
    assert components["scheduler"].gamma == 0.5


def test_tensor_rates_come_back_as_tensors_of_their_own():
    """`_last_lr` and base rates of a tensor lr are restored without tying them to the payload."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    components = {"model": model, "optimizer": optimizer, "scheduler": s.ExponentialLR(optimizer, 0.5)}
    payload = payload_of(components)
    kept = bits(payload)
    give(payload, components)
    components["optimizer"].step()
    components["scheduler"].step()
    assert bits(payload) == kept
    assert optimizer.param_groups[0]["lr"].item() == 0.25
