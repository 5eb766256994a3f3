"""The guard: what it looks at, what it lets pass, and what it says."""

import math
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from safeckpt import CheckpointManager, Guard, NonFiniteError, check_gradients, find_nonfinite
from safeckpt.state import Baseline, capture, guard_from_record, register
from tests.comparing import changes, photograph
from tests.state.runs import Net, run

NAN, INF = math.nan, math.inf


def names(reports):
    return [report.name for report in reports]


# -- find_nonfinite -------------------------------------------------------------------------------------------------


def test_nested_containers_are_searched_and_named_in_order():
    """Every kind of container is entered; names are keys and positions joined by dots, in the order of the tree."""
    bad = torch.tensor([NAN])
    tree = OrderedDict(b=[bad.clone(), (torch.ones(1), {"x": bad.clone()})], a={1: bad.clone()}, s={bad.clone()}, n=NAN)
    assert names(find_nonfinite(tree)) == ["b.0", "b.1.1.x", "a.1", "s.0"]
    assert names(find_nonfinite(bad)) == ["tensor"]
    assert find_nonfinite(None) == find_nonfinite({}) == find_nonfinite([NAN, "nan", {}]) == []


def test_tensor_reached_twice_is_reported_once():
    """A shared tensor has one report, under its first name; two tensors of the same name have one each."""
    bad = torch.tensor([NAN])
    assert names(find_nonfinite({"a": bad, "b": [bad]})) == ["a"]
    assert names(find_nonfinite({"a.b": bad, "a": {"b": torch.tensor([INF])}})) == ["a.b", "a.b"]


def test_modules_are_searched_wherever_they_are():
    """Parameters and buffers of a module count, those that are not persistent too, also inside a dict."""
    model = Net()
    model.norm.running_var[2] = INF
    model.register_buffer("mask", torch.tensor([NAN]), persistent=False)
    assert names(find_nonfinite(model)) == ["mask", "norm.running_var"]
    assert names(find_nonfinite({"model": model})) == ["model.mask", "model.norm.running_var"]


def test_numpy_arrays_are_searched():
    """An array would come back from a file as a tensor, so it is looked at as one, whatever its memory is like."""
    array = np.array([[1.0, NAN], [INF, 2.0]], dtype=np.float32)
    frozen = array[::-1, ::-1].astype(">f8")
    frozen.setflags(write=False)
    found = find_nonfinite({"a": array, "f": frozen, "h": np.float16([INF]), "i": np.arange(3), "o": np.array(["x"])})
    assert [(one.name, one.nan_count, one.inf_count, one.first_index) for one in found] == [
        ("a", 1, 1, (0, 1)),
        ("f", 1, 1, (0, 1)),
        ("h", 0, 1, (0,)),
    ]


def test_deep_and_shared_containers_are_walked_once():
    """Neither thirty thousand levels nor 2**60 paths to one tuple stop the walk."""
    deep = torch.tensor([NAN])
    for _ in range(30_000):
        deep = [deep]
    assert len(find_nonfinite(deep)) == 1
    shared = (torch.tensor([NAN]),)
    for _ in range(60):
        shared = (shared, shared)
    assert len(find_nonfinite(shared)) == 1
    circle = [torch.tensor([NAN])]
    circle.append(circle)
    assert names(find_nonfinite(circle)) == ["0"]
    while isinstance(deep, list):  # taken apart by hand: freeing it would recurse
        deep = deep.pop()


def test_allowed_patterns_are_passed_over():
    """A glob over the whole dotted name lets a tensor pass; what is not a sequence of patterns is refused."""
    tree = {"layer": {"mask": torch.tensor([INF]), "weight": torch.tensor([NAN])}, "mask": torch.tensor([INF])}
    assert names(find_nonfinite(tree, allow=["*mask"])) == ["layer.weight"]
    assert names(find_nonfinite(tree, allow=["mask"])) == ["layer.mask", "layer.weight"]
    assert names(find_nonfinite(tree, allow=["layer.[mw]*"])) == ["mask"]
    with pytest.raises(TypeError, match="sequence of glob patterns"):
        find_nonfinite(tree, allow="mask")
    with pytest.raises(TypeError, match="sequence of glob patterns"):
        Guard(allow_nonfinite=[1])


def test_report_says_where_and_how_many():
    """The text of a report has the name, both counts, the size and the first index."""
    tensor = torch.zeros(2, 3)
    tensor[1] = torch.tensor([INF, NAN, NAN])
    assert str(find_nonfinite({"w": tensor})[0]) == "w: 2 NaN, 1 Inf of 6 elements, first at [1, 0]"


class Counting(TorchDispatchMode):
    """Counts the operations torch is asked for."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_fifty_thousand_small_tensors_are_looked_at_in_a_few_passes():
    """Small tensors are joined: two passes over memory for fifty thousand of them, nothing for each."""
    tensors = [torch.zeros(8) for _ in range(50_000)]
    with Counting() as counting:
        assert find_nonfinite(tensors) == []
    assert counting.calls["sum"] == counting.calls["cat"] == 2
    assert sum(counting.calls.values()) < 20


def test_large_tensors_are_read_once_and_copied_never():
    """One sum for each large tensor, one look at all the sums: no mask, no copy."""
    tensors = [torch.zeros(100, 100).t(), torch.zeros(50, 200), torch.zeros(1, 10_000).expand(7, 10_000)]
    with Counting() as counting:
        assert find_nonfinite(tensors) == []
    assert counting.calls["sum"] == 3
    assert not {"aminmax", "clone", "isfinite", "_to_copy", "contiguous"} & counting.calls.keys() - {"isfinite"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_sum_that_overflows_is_no_finding(dtype):
    """Attention masks hold the lowest finite number: their sum is -inf, they are not."""
    lowest = torch.full((100, 100), torch.finfo(dtype).min, dtype=dtype)
    with Counting() as counting:
        assert find_nonfinite([lowest, -lowest, torch.cat([lowest, -lowest])]) == []
    assert "isnan" not in counting.calls, "only sums and extremes were looked at"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("values", [(INF, -INF), (INF, INF), (-INF, -INF), (NAN, 1.0), (INF, NAN)], ids=repr)
def test_values_that_cancel_each_other_are_found(dtype, values):
    """Infinities of both signs, and NaN among them, do not add up to a number."""
    bad = torch.full((100, 100), torch.finfo(dtype).max, dtype=dtype)
    bad[5, 5], bad[90, 7] = values
    found = find_nonfinite([bad])
    assert [(one.nan_count, one.inf_count) for one in found] == [
        (sum(map(math.isnan, values)), sum(map(math.isinf, values)))
    ]


# -- gradients ------------------------------------------------------------------------------------------------------


def poisoned_net():
    model = Net()
    model(torch.randn(8, 4)).sum().backward()
    model.first.weight.grad[1, 2] = INF
    return model


def test_infinite_gradient_is_refused_before_the_step_and_nothing_changes():
    """The error names the gradient and its place; weights, gradients and optimizer are as before."""
    model = poisoned_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = photograph(model, optimizer)
    with pytest.raises(NonFiniteError, match="not been stepped") as caught:
        check_gradients(model)
    assert not changes(before, photograph(model, optimizer))
    (report,) = caught.value.tensors
    assert (report.name, report.inf_count, report.first_index) == ("first.weight.grad", 1, (1, 2))
    model.zero_grad()
    check_gradients(model)


def test_clipping_spreads_what_the_check_would_have_stopped():
    """`clip_grad_norm_` turns one infinity into NaN and every healthy gradient into zero, so check before it."""
    model = poisoned_net()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.isinf()
    assert model.last.weight.grad.eq(0).all()
    assert model.first.weight.grad[1, 2].isnan()
    with pytest.raises(NonFiniteError):
        check_gradients(model)


def test_gradients_are_checked_whatever_their_form():
    """Sparse gradients are looked at, missing ones passed over, allowed ones left alone."""
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2, sparse=True), "unused": nn.Linear(1, 1)})
    model["emb"](torch.tensor([1, 3])).sum().backward()
    check_gradients(model)
    model["emb"].weight.grad._values()[1, 0] = NAN
    with pytest.raises(NonFiniteError) as caught:
        check_gradients(model)
    assert caught.value.tensors[0].first_index == (3, 0)
    check_gradients(model, allow=["emb.*"])


# -- the guard over captured state ----------------------------------------------------------------------------------


def judge(components, guard=Guard(), *, baseline=None):  # noqa: B008 - frozen
    registered = register(components)
    return (baseline or Baseline(registered)).check(capture(registered).pairs, guard)


def trained():
    model = Net()
    components = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    run(components, 2)
    return components


def test_finite_state_passes():
    """A healthy run has nothing to refuse and nothing to excuse."""
    verdict = judge(trained())
    assert (verdict.bad, verdict.excused) == ([], [])


def test_parameters_buffers_and_moments_are_guarded_by_name():
    """Every tensor of a module and of an optimizer is named as component, qualified name and key."""
    components = trained()
    baseline = Baseline(register(components))
    model, optimizer = components.values()
    with torch.no_grad():
        model.first.weight[0, 1] = NAN
        model.norm.running_mean[0] = INF
        optimizer.state[model.last.bias]["exp_avg_sq"][2] = INF
    bad = ["model.first.weight", "model.norm.running_mean", "optimizer.model.last.bias.exp_avg_sq"]
    assert names(judge(components, baseline=baseline).bad) == bad
    assert names(judge(components, Guard(buffers=False), baseline=baseline).bad) == [bad[0], bad[2]]
    assert names(judge(components, Guard(optimizer=False), baseline=baseline).bad) == bad[:2]
    allowed = Guard(allow_nonfinite=["optimizer.*.exp_avg_sq", "model.norm.*"])
    assert names(judge(components, allowed, baseline=baseline).bad) == bad[:1]
    assert names(judge(components, Guard(allow_nonfinite=["*"]), baseline=baseline).bad) == []


def test_parameters_are_guarded_whatever_is_switched_off():
    """A NaN weight is refused with buffers and optimizer unguarded, and even when it was there from the start."""
    model = Net()
    with torch.no_grad():
        model.last.bias[0] = NAN
    assert names(judge({"model": model}, Guard(optimizer=False, buffers=False)).bad) == ["model.last.bias"]


def test_infinities_that_a_parameter_always_had_are_excused():
    """Forbidden transitions of a CRF are made that way; a new infinity is refused."""
    model = nn.Module()
    model.transitions = nn.Parameter(torch.tensor([[0.0, -INF], [1.0, 2.0]]))
    registered = register({"model": model})
    baseline = Baseline(registered)
    assert baseline.check(capture(registered).pairs, Guard()).excused == ["model.transitions"]
    with torch.no_grad():
        model.transitions[1, 1] = INF
    assert names(baseline.check(capture(registered).pairs, Guard()).bad) == ["model.transitions"]


def test_statistics_that_were_infinite_from_the_start_are_refused():
    """A variance that is infinite was ruined before, and makes every output wrong: it is no mask."""
    model = Net()
    model.norm.running_var.fill_(INF)
    assert names(judge({"model": model}).bad) == ["model.norm.running_var"]


@pytest.mark.parametrize(
    "first", [None, torch.zeros(0), torch.tensor([[0.0, -INF], [0.0, 0.0]])], ids=["none", "empty", "small"]
)
def test_mask_that_is_made_or_grows_while_training_passes(first):
    """Nothing but zeros and minus infinity in a buffer is a mask; with any other value in it, it is not."""
    model = nn.Module()
    model.register_buffer("mask", first)
    model.weight = nn.Parameter(torch.zeros(3, 3))
    registered = register({"model": model})
    baseline = Baseline(registered)
    model.mask = torch.full((3, 3), -INF).triu(1)
    result = baseline.check(capture(registered).pairs, Guard())
    assert (names(result.bad), result.excused) == ([], ["model.mask"])
    model.mask[0, 0] = 0.5
    assert names(baseline.check(capture(registered).pairs, Guard()).bad) == ["model.mask"]
    model.mask = torch.full((3, 3), -INF)
    assert names(baseline.check(capture(registered).pairs, Guard()).bad) == ["model.mask"]
    model.mask = torch.zeros(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.full((3, 3), -INF).triu(1))
    assert names(baseline.check(capture(registered).pairs, Guard()).bad) == ["model.weight"]


def test_batch_norm_statistics_alone_are_refused():
    """NaN statistics with finite loss and weights: the buffers are guarded by default."""
    model = Net()
    model.norm.running_var.fill_(NAN)
    (report,) = judge({"model": model}).bad
    assert (report.name, report.nan_count) == ("model.norm.running_var", 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=str)
def test_infinities_that_a_buffer_always_had_are_excused(dtype):
    """A mask made of infinities passes; a new infinity in it, a NaN, or one elsewhere does not."""
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, -INF, -INF]).to(dtype))
    model.register_buffer("other", torch.zeros(3))
    registered = register({"model": model})
    baseline = Baseline(registered)

    def bad():
        return names(baseline.check(capture(registered).pairs, Guard()).bad)

    assert baseline.check(capture(registered).pairs, Guard()).excused == ["model.mask"]
    model.mask[1] = 0.0
    assert bad() == []
    model.mask[1] = INF
    assert bad() == []
    model.mask[0] = INF
    assert bad() == ["model.mask"]
    model.mask[0] = NAN
    assert bad() == ["model.mask"]
    model.mask = torch.tensor([0.5, -INF, -INF, 0.0]).to(dtype)
    assert bad() == ["model.mask"]  # another shape, so other places
    model.mask = torch.zeros(3).to(dtype)
    model.other[1] = INF
    assert bad() == ["model.other"]


def test_nan_that_a_buffer_always_had_is_refused():
    """NaN is always refused: only infinities are made on purpose."""
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, NAN]))
    assert names(judge({"model": model}).bad) == ["model.mask"]


def test_buffer_with_infinities_and_no_dense_layout_is_looked_at_each_time():
    """Places are remembered for dense buffers only; a sparse one with an infinity has to be named."""
    model = nn.Module()
    model.register_buffer("graph", torch.eye(3).mul(INF).nan_to_num(0.0, posinf=INF).to_sparse())
    assert names(judge({"model": model}).bad) == ["model.graph"]
    assert names(judge({"model": model}, Guard(allow_nonfinite=["model.graph"])).bad) == []


def test_what_passed_on_purpose_is_recorded_and_judged_alike_later():
    """The record of a verdict is plain, and the guard made from it lets exactly the same pass."""
    model = nn.Module()
    model.register_buffer("mask[0]", torch.tensor([-INF]))
    model.register_buffer("mask0", torch.tensor([0.0]))
    registered = register({"model": model})
    guard = Guard(optimizer=False, allow_nonfinite=["model.x*"])
    verdict = Baseline(registered).check(capture(registered).pairs, guard)
    record = verdict.record(guard)
    assert record == {
        "optimizer": False, "buffers": True, "allow_nonfinite": ["model.x*"], "infinite": ["model.mask[0]"],
    }  # fmt: skip
    later = guard_from_record(record)
    assert Baseline({}).check(capture(registered).pairs, later).bad == []
    model.mask0[0] = INF  # which the name of the excused one would match as a pattern
    assert names(Baseline({}).check(capture(registered).pairs, later).bad) == ["model.mask0"]


def test_two_entries_of_one_name_are_both_judged():
    """A key with a dot in it cannot hide a NaN behind a healthy tensor of the same dotted name."""

    class Odd:
        def state_dict(self):
            return {"a.b": torch.tensor([NAN]), "a": {"b": torch.zeros(1)}}

        def load_state_dict(self, state):
            raise AssertionError(state)

    assert names(judge({"odd": Odd()}).bad) == ["odd.a.b"]


class Holder:
    """Any object with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Replay(Holder):
    """With the methods of a loader."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 1


class Loader(Replay):
    """A loader whose state holds numbers."""


class Extra(nn.Module):
    """A module with plain values as extra state."""

    scale = NAN

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def typed_storage():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.FloatStorage([NAN])


SPOILED = {
    "lr": (lambda c: c["optimizer"].param_groups[0].update(lr=NAN), "optimizer.param_groups.0.lr"),
    "infinite lr": (lambda c: c["optimizer"].param_groups[0].update(lr=INF), "optimizer.param_groups.0.lr"),
    "NumPy lr": (lambda c: c["optimizer"].param_groups[0].update(lr=np.float64(NAN)), "optimizer.param_groups.0.lr"),
    "betas": (lambda c: c["optimizer"].param_groups[0].update(betas=(0.9, NAN)), "optimizer.param_groups.0.betas.1"),
    "base_lrs": (lambda c: c["scheduler"].base_lrs.__setitem__(0, NAN), "scheduler.base_lrs.0"),
    "infinite base_lrs": (lambda c: c["scheduler"].base_lrs.__setitem__(0, INF), "scheduler.base_lrs.0"),
    "gamma": (lambda c: setattr(c["scheduler"], "gamma", NAN), "scheduler.gamma"),
    "growth": (lambda c: c["scaler"].set_growth_factor(INF), "scaler.growth_factor"),
    "float of an object": (lambda c: c["object"].state.update(a=[1.0, NAN]), "object.a.1"),
    "array of an object": (lambda c: c["object"].state.update(a=np.array([NAN])), "object.a"),
    "tensor of a replay buffer": (lambda c: c["replay"].state.update(obs=torch.tensor([NAN])), "replay.obs"),
    "tensor of a loader": (lambda c: c["loader"].state.update(obs=torch.tensor([NAN])), "loader.obs"),
    "storage": (lambda c: c["object"].state.update(a=typed_storage()), "object.a"),
    "tensor of a dict": (lambda c: c["ema"].update(weight=torch.tensor([NAN])), "ema.weight"),
    "tensor in a list of a dict": (lambda c: c["ema"].update(shadow=[torch.tensor([INF])]), "ema.shadow.0"),
    "extra state": (lambda c: c["model"].add_module("extra", Extra()), "model.extra._extra_state.scale"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", SPOILED)
def test_number_that_ruins_the_run_is_refused_under_its_name(kind):
    """A plain float, an array, or a tensor that no module holds can be NaN as well."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    components = {
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0), "object": Holder({"best": INF}), "replay": Replay({}),
        "loader": Loader({}), "ema": {"weight": torch.ones(1), "best": INF, "first": torch.tensor(INF), "metric": NAN},
    }  # fmt: skip
    baseline = Baseline(register(components))
    assert judge(components, baseline=baseline).bad == []
    spoil, name = SPOILED[kind]
    spoil(components)
    assert names(judge(components, baseline=baseline).bad) == [name]


def test_scale_of_a_scaler_is_guarded():
    """A gradient scale that has overflowed is refused, though it is a plain float."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INF)
    assert names(judge({"scaler": scaler}).bad) == ["scaler.scale"]
    assert judge({"scaler": torch.amp.GradScaler("cpu", enabled=False)}).bad == []


def test_infinite_numbers_that_are_no_weights_pass():
    """The best loss so far starts at infinity, in a scheduler as in a dict of counters."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    counters = {"best": INF, "least": torch.tensor(INF), "mean": NAN}
    counters["temperature"] = torch.tensor([0.5], requires_grad=True)
    components = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counters": counters}
    assert judge(components).bad == []
    with torch.no_grad():
        counters["temperature"].fill_(NAN)  # trained, so a weight
    assert names(judge(components).bad) == ["counters.temperature"]


@pytest.mark.parametrize("where", ["momentum", "step", "lr"])
def test_every_tensor_of_an_optimizer_is_guarded(where):
    """Moments, step counts and options that are tensors are looked at."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    place = {"momentum": "model.weight.exp_avg", "step": "model.weight.step", "lr": "param_groups.0.lr"}[where]
    tensor = optimizer.param_groups[0]["lr"] if where == "lr" else optimizer.state[model.weight][place.split(".")[-1]]
    tensor.fill_(NAN)
    assert names(judge({"model": model, "optimizer": optimizer}).bad) == [f"optimizer.{place}"]


def test_refused_state_is_left_as_it_was(memory_path):
    """A manager that refuses changes neither the objects nor the random streams, and saves once they are healthy."""
    components = trained()
    model = components["model"]
    with CheckpointManager(memory_path, components) as manager:
        kept = model.first.weight.detach().clone()
        with torch.no_grad():
            model.first.weight[0, 0] = NAN
        before = photograph(**components)
        with pytest.raises(NonFiniteError, match=r"model\.first\.weight: 1 NaN") as caught:
            manager.save(1)
        assert not changes(before, photograph(**components))
        assert names(caught.value.tensors) == ["model.first.weight"]
        assert not list(memory_path.glob("*.pt"))
        with torch.no_grad():
            model.first.weight.copy_(kept)
        assert manager.save(1).step == 1
