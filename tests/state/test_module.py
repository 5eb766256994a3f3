"""Modules: every value, flag and tie comes back, under whatever wrapper, or nothing is touched."""

import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from safeckpt import CheckpointManager, ComponentChangedWarning, Guard, UnsavableStateError
from safeckpt.state import capture, register
from safeckpt.state.module import ModuleComponent, clean_modules, unwrap
from tests.comparing import bits, changes, photograph
from tests.state.runs import Net, assert_resumes, give, payload_of, refusal, through_file, train_step
from tests.state.tensors import SPECIAL, TORCH_WARNINGS

# Modules alone, without the optimizer that trains them, are what this file is about.
pytestmark = pytest.mark.filterwarnings(*TORCH_WARNINGS, "ignore::safeckpt.UncapturedStateWarning")


def randomised(model):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor))
    return model


def transferred(saved, live):
    """Save one model, restore the other, and return both states in comparable form."""
    give(payload_of({"model": saved}), {"model": live})
    return bits(unwrap(saved).state_dict()), bits(unwrap(live).state_dict())


# -- values and flags -----------------------------------------------------------------------------------------------


def test_every_value_comes_back_into_the_same_tensors():
    """Weights and buffers are equal bit for bit, and the live tensors are the ones that were there."""
    saved, live = randomised(Net()), Net()
    identities = {name: id(tensor) for name, tensor in live.state_dict(keep_vars=True).items()}
    one, other = transferred(saved, live)
    assert one == other
    assert {name: id(tensor) for name, tensor in live.state_dict(keep_vars=True).items()} == identities


def test_frozen_batch_norm_stays_in_eval_mode_and_the_rest_in_training():
    """The mode of each submodule comes back by itself: one train() would have set them all."""
    saved, live = Net(), Net().eval()
    saved.norm.eval()
    give(payload_of({"model": saved}), {"model": live})
    assert {name: module.training for name, module in live.named_modules()} == {
        "": True, "first": True, "norm": False, "drop": True, "last": True,
    }  # fmt: skip


def test_modes_are_set_without_calling_train():
    """A train() of the user's own, which wakes a frozen layer, is not called by a restore."""

    class Frozen(Net):
        def train(self, mode=True):
            raise AssertionError("train() was called")

    saved, live = Frozen(), Frozen()
    saved.drop.training = False
    give(payload_of({"model": saved}), {"model": live})
    assert (live.training, live.drop.training) == (True, False)


def test_frozen_and_unfrozen_parameters_come_back_as_they_were():
    """requires_grad of each parameter is part of the state, in both directions."""
    saved, live = Net(), Net()
    saved.first.requires_grad_(False)
    live.last.requires_grad_(False)
    give(payload_of({"model": saved}), {"model": live})
    assert {name for name, parameter in live.named_parameters() if not parameter.requires_grad} == {
        "first.weight", "first.bias",
    }  # fmt: skip


def test_run_that_freezes_and_unfreezes_goes_on_bit_for_bit(memory_path):
    """A backbone frozen for some steps, with its batch norm in eval mode, resumes in that state."""

    def step(components):
        count = components["counters"]["steps"] = components["counters"]["steps"] + 1
        model = components["model"]
        if count in (3, 6):
            model.first.requires_grad_(count == 6)
            model.norm.train(count == 6)
        return train_step(components)

    def build():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": model, "optimizer": optimizer, "counters": {"steps": 0}}

    for kill in (3, 4, 6):
        assert_resumes(build, memory_path / str(kill), kill=kill, more=4, step=step)


def test_buffers_that_are_not_persistent_stay_as_they_are():
    """What a module keeps out of its state_dict is not touched."""
    saved, live = Net(), Net()
    for model, value in ((saved, 1.0), (live, 2.0)):
        model.register_buffer("scratch", torch.tensor(value), persistent=False)
    give(payload_of({"model": saved}), {"model": live})
    assert live.scratch.item() == 2.0


def test_restored_module_shares_nothing_with_the_payload():
    """Whatever happens to the payload afterwards, the module keeps its values; and a second restore gives the same."""
    saved, live = randomised(WithExtra()), WithExtra()
    payload = payload_of({"model": saved})
    give(payload, {"model": live})
    before = bits(live.state_dict())
    live.extra["seen"].append(torch.ones(1))
    live.extra["total"].add_(1)
    with torch.no_grad():
        live.weight.fill_(3.0)
    give(payload, {"model": live})
    assert bits(live.state_dict()) == before
    payload["model"]["weight"].fill_(7.0)
    payload["model"]["_extra_state"]["total"].fill_(7.0)
    assert bits(live.state_dict()) == before


class WithExtra(nn.Module):
    """A module with state that is no tensor of its own."""

    def __init__(self, children=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = {"seen": [1, "two"], "total": torch.zeros(2), "name": None}
        if children:
            self.child = WithExtra(children=False)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_comes_back_through_a_file(memory_path):
    """Lists, tensors and None that get_extra_state returns are what set_extra_state is given, at every depth."""
    saved, live = WithExtra(), WithExtra()
    saved.extra["seen"] = [2, {"a": (1.5, None)}]
    saved.child.extra["total"] += 4
    give(through_file({"model": saved}, memory_path), {"model": live})
    assert bits(live.state_dict()) == bits(saved.state_dict())


def test_extra_state_that_cannot_be_read_back_is_refused_at_save_by_name(memory_path):
    """An object in extra state is refused before the disk is touched, with the way to it."""
    model = WithExtra()
    model.child.extra["function"] = print
    with CheckpointManager(memory_path, {"model": model}) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['model']['child._extra_state']['function']"
        assert not list(memory_path.glob("*.pt"))
        del model.child.extra["function"]
        assert manager.save(1).step == 1


def test_versions_of_modules_reach_their_loaders(memory_path):
    """`_metadata` travels along, so that a module can tell in which version its state was written."""
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    give(
        through_file({"model": nn.Sequential(Versioned(1, 1))}, memory_path), {"model": nn.Sequential(Versioned(1, 1))}
    )
    assert seen == [7]


# -- what does not fit ----------------------------------------------------------------------------------------------


def test_all_differences_are_listed_at_once_and_nothing_changes():
    """Names, shapes, dtypes, layouts, classes and submodules that differ are all named, and no bit is changed."""
    saved = nn.Module()
    saved.a, saved.b, saved.c, saved.f = nn.Linear(2, 3), nn.Linear(2, 2), nn.ReLU(), nn.Linear(1, 1)
    saved.d = nn.Dropout(0.5)
    saved.register_buffer("only_saved", torch.zeros(1))
    saved.register_buffer("form", torch.eye(2))
    live = nn.Module()
    live.a, live.b, live.c, live.f = nn.Linear(2, 4), nn.Linear(2, 2).double(), nn.GELU(), nn.Linear(1, 1)
    live.e = nn.Linear(1, 1)
    live.register_buffer("form", torch.eye(2).to_sparse())
    live.register_parameter("only_live", nn.Parameter(torch.zeros(1)))
    mismatches = refusal(payload_of({"model": saved}), {"model": live})
    assert mismatches == sorted(
        [
            "model.a.weight: saved shape [3, 2], live shape [4, 2]",
            "model.a.bias: saved shape [3], live shape [4]",
            "model.b.weight: saved dtype torch.float32, live dtype torch.float64",
            "model.b.bias: saved dtype torch.float32, live dtype torch.float64",
            "model.c: saved class ReLU, live class GELU",
            "model.d: no such Dropout now",
            "model.e.weight: not in the checkpoint",
            "model.e.bias: not in the checkpoint",
            "model.form: saved layout torch.strided, live layout torch.sparse_coo",
            "model.only_saved: only in the checkpoint",
            "model.only_live: not in the checkpoint",
        ]
    )


def test_strict_load_that_would_fail_half_way_changes_nothing():
    """The last layer alone does not fit; the first is not overwritten by finding that out."""
    saved, live = randomised(Net()), Net()
    live.last = nn.Linear(6, 5)
    assert len(refusal(payload_of({"model": saved}), {"model": live})) == 2


def test_submodule_without_weights_is_part_of_what_has_to_match():
    """A dropout that came or went is another run, though every tensor fits."""
    with_it, without = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Sequential(nn.Linear(2, 2))
    assert refusal(payload_of({"m": with_it}), {"m": without}) == ["m.1: no such Dropout now"]
    assert refusal(payload_of({"m": without}), {"m": with_it}) == ["m.1: the checkpoint has no such Dropout"]


class Older(nn.Module):
    """A class that gets a new name."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)


class Newer(Older):
    """The same under its new name."""


class Swish(nn.Module):
    """An activation of the user's own."""


RENAMED = {
    "class of the user's": (Older, Newer, "model: saved class Older, live class Newer"),
    "synchronised norm": (
        lambda: nn.Sequential(nn.BatchNorm2d(2)), lambda: nn.Sequential(nn.SyncBatchNorm(2)),
        "model.0: saved class BatchNorm2d, live class SyncBatchNorm",
    ),
    "and back": (
        lambda: nn.Sequential(nn.SyncBatchNorm(2)), lambda: nn.Sequential(nn.BatchNorm1d(2)),
        "model.0: saved class SyncBatchNorm, live class BatchNorm1d",
    ),
    "identity added": (
        lambda: nn.Sequential(nn.Linear(1, 1)), lambda: nn.Sequential(nn.Linear(1, 1), nn.Identity()),
        "model.1: the checkpoint has no such Identity",
    ),
    "identity dropped": (
        lambda: nn.Sequential(nn.Linear(1, 1), nn.Identity()), lambda: nn.Sequential(nn.Linear(1, 1)),
        "model.1: no such Identity now",
    ),
    "activation of the user's": (
        lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(Swish()), "model.0: saved class ReLU, live class Swish",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RENAMED)
def test_class_that_may_have_a_new_name_is_a_warning_where_every_tensor_fits(kind, memory_path):
    """The warning names module and both classes; the tensors are restored."""
    make_saved, make_live, text = RENAMED[kind]
    saved, live = randomised(make_saved()).requires_grad_(False), make_live().requires_grad_(False)
    with CheckpointManager(memory_path, {"model": saved, "c": {}}) as manager:
        manager.save(1)
    manager = CheckpointManager(memory_path, {"model": live, "c": {}})
    with manager, pytest.warns(ComponentChangedWarning, match=text):
        manager.restore()
    assert bits(dict(live.state_dict())) == bits(dict(saved.state_dict()))


@pytest.mark.parametrize(
    ("saved", "live"),
    [(nn.GroupNorm(1, 2), nn.LayerNorm(2)), (nn.GELU(), nn.ReLU()), (nn.BatchNorm1d(2), nn.BatchNorm2d(2))],
    ids=["norm", "activation", "dimensions"],
)
def test_another_layer_of_torch_at_the_same_place_is_refused(saved, live):
    """Every tensor may fit, and the layer computes something else."""
    (mismatch,) = refusal(payload_of({"m": nn.Sequential(saved)}), {"m": nn.Sequential(live)})
    assert mismatch == f"m.0: saved class {type(saved).__name__}, live class {type(live).__name__}"


class Bank(nn.Module):
    """Sizes its memory by the data, and loads it in any size."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.empty(0))

    def _load_from_state_dict(self, state, prefix, *args):
        self.memory = torch.empty_like(state[f"{prefix}memory"])
        super()._load_from_state_dict(state, prefix, *args)


def test_buffer_that_a_module_sizes_by_the_data_is_left_to_the_module():
    """Its own loading makes room; a module without one still has to fit."""
    saved, live = Bank(), Bank()
    saved.memory = torch.rand(5)
    give(payload_of({"model": nn.Sequential(saved)}), {"model": nn.Sequential(live)})
    assert torch.equal(live.memory, saved.memory)
    plain, other = nn.Module(), nn.Module()
    plain.register_buffer("memory", torch.rand(5))
    other.register_buffer("memory", torch.empty(0))
    assert refusal(payload_of({"m": plain}), {"m": other}) == ["m.memory: saved shape [5], live shape [0]"]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("way", ["script", "trace"])
def test_script_module_is_a_component_like_another(way, memory_path):
    """TorchScript keeps its children in a mapping of its own."""

    def make(module):
        if way == "script":
            return torch.jit.script(module)
        return torch.jit.trace(module, torch.ones(1, 3), check_trace=False)

    saved, live = (make(randomised(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))) for _ in range(2))
    components = ({"model": one, "optimizer": torch.optim.SGD(one.parameters(), lr=1)} for one in (saved, live))
    with CheckpointManager(memory_path, next(components)) as manager:
        manager.save(1)
    live.eval()
    with CheckpointManager(memory_path, next(components)) as manager:
        manager.restore()
    assert bits(dict(live.state_dict())) == bits(dict(saved.state_dict()))
    assert live.training


def test_parameter_that_the_state_dict_leaves_out_has_to_be_on_both_sides():
    """Flags are kept for every parameter, so one that is missing from the state_dict is still missed by name."""

    class Adapter(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.zeros(1)))

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return OrderedDict((key, value) for key, value in state.items() if key == "adapter")

        def load_state_dict(self, state_dict):  # without `strict`, as people write it
            return super().load_state_dict(state_dict, strict=False)

    saved, live = Adapter(["adapter", "base"]), Adapter(["adapter", "other"])
    mismatches = refusal(payload_of({"m": saved}), {"m": live})
    assert mismatches == ["m.base: only in the checkpoint", "m.other: not in the checkpoint"]
    live = Adapter(["adapter", "base"])
    saved.adapter.data.fill_(3.0)
    saved.base.requires_grad_(False)
    give(payload_of({"m": saved}), {"m": live})
    assert (live.adapter.item(), live.base.requires_grad) == (3.0, False)


# -- ties -----------------------------------------------------------------------------------------------------------


def tied(tie=True):
    model = nn.Sequential(OrderedDict(emb=nn.Embedding(5, 3), out=nn.Linear(3, 5, bias=False)))
    if tie:
        model.out.weight = model.emb.weight
    return model


def test_tied_weights_are_one_tensor_in_the_file_and_after_the_restore(memory_path):
    """One storage on disk, one parameter afterwards, and training goes on through both names."""
    payload = through_file({"model": randomised(tied())}, memory_path)
    assert payload["model"]["emb.weight"].data_ptr() == payload["model"]["out.weight"].data_ptr()
    live = tied()
    give(payload, {"model": live})
    assert live.emb.weight is live.out.weight
    assert torch.equal(live.emb.weight, payload["model"]["emb.weight"])


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True)])
def test_ties_that_differ_are_refused_by_name(before, now):
    """A tie that was lost, and one that was made, would each train another model."""
    (mismatch,) = refusal(payload_of({"m": tied(before)}), {"m": tied(now)})
    words = "one tensor in the checkpoint, separate" if before else "separate tensors in the checkpoint, one"
    assert mismatch == f"m.emb.weight and m.out.weight: {words} {'tensors' if before else 'tensor'} now"


def test_ties_across_modules_are_kept_and_compared():
    """A decoder that shares the encoder's weight, as two components, is held to it."""

    def pair(tie):
        encoder, decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        if tie:
            decoder.weight = encoder.weight
        return {"encoder": encoder, "decoder": decoder}

    payload = payload_of(pair(tie=True))
    live = pair(tie=True)
    give(payload, live)
    assert live["encoder"].weight is live["decoder"].weight
    assert len(refusal(payload, pair(tie=False))) == 1
    give(payload, {"encoder": nn.Linear(3, 3)}, only=("encoder",))  # alone it is tied to nothing that is asked for


def test_tie_is_compared_besides_other_differences():
    """A broken tie is listed with the rest, and a name that is missing altogether is not called untied as well."""
    saved, live = tied(), tied(tie=False)
    live.register_buffer("extra", torch.zeros(1))
    assert len(refusal(payload_of({"m": saved}), {"m": live})) == 2
    live = nn.Sequential(OrderedDict(emb=nn.Embedding(5, 3)))
    assert refusal(payload_of({"m": saved}), {"m": live}) == ["m.out.weight: only in the checkpoint"]


# -- wrappers -------------------------------------------------------------------------------------------------------


def compiled(module):
    return torch.compile(module, backend="eager")


class Deep(nn.Module):
    """A module with a child that is really called `module`, and one inside it."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.module = nn.Sequential(OrderedDict(module=wrap(nn.Linear(2, 2)), norm=nn.BatchNorm1d(2)))
        self.head = wrap(nn.Sequential(wrap(nn.Linear(2, 1)), nn.Dropout()))

    def forward(self, x):
        return self.head(self.module(x))


WRAPS = {
    "nothing": lambda module: module,
    "compile": compiled,
    "data parallel": nn.DataParallel,
    "compile in data parallel": lambda module: nn.DataParallel(compiled(module)),
    "data parallel in compile": lambda module: compiled(nn.DataParallel(module)),
    "activation checkpointing": checkpoint_wrapper,
}


@pytest.mark.parametrize("inner", WRAPS)
@pytest.mark.parametrize("outer", WRAPS)
def test_prefixes_of_wrappers_are_taken_off_at_any_depth(inner, outer):
    """A model saved under any wrappers has clean names, and is restored into one under any others."""
    saved = WRAPS[outer](Deep(WRAPS[inner]))
    randomised(saved)
    payload = payload_of({"model": saved})
    assert list(payload["model"]) == list(Deep().state_dict())
    for live in (Deep(), WRAPS[inner](Deep(WRAPS[outer])), nn.DataParallel(Deep(compiled))):
        give(payload, {"model": live})
        assert bits(capture(register({"model": live})).payload["model"]) == bits(payload["model"])


def test_child_that_is_called_module_keeps_its_name():
    """Only wrappers lose theirs: the names of a real child and of AveragedModel's stay."""
    names = set(ModuleComponent("m", Deep()).parameter_names())
    assert {"m.module.module.weight", "m.module.norm.weight", "m.head.0.weight"} <= names
    averaged = AveragedModel(nn.DataParallel(nn.Linear(1, 1)))
    assert set(ModuleComponent("ema", averaged).parameter_names()) == {"ema.module.weight", "ema.module.bias"}
    assert list(capture(register({"ema": averaged})).payload["ema"]) == ["n_averaged", "module.weight", "module.bias"]


def test_child_that_looks_like_a_wrapper_is_none():
    """A module of the user's own that has a child called `_orig_mod` beside others is not taken off."""
    odd = nn.Module()
    odd._orig_mod, odd.other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert unwrap(odd) is odd
    assert "_orig_mod.weight" in payload_of({"odd": odd})["odd"]


def test_wrappers_are_in_the_mode_of_what_they_wrap():
    """The flag of DataParallel and of a compiled module follows the restored one, inside and outside."""
    saved = Deep()
    saved.head.eval()
    live = nn.DataParallel(compiled(Deep(compiled)))
    live.module.eval()
    give(payload_of({"model": saved}), {"model": live})
    assert (live.training, live.module.training, unwrap(live).training) == (True, True, True)
    head = unwrap(live).head
    assert (head.training, unwrap(head).training, unwrap(head)[1].training) == (False, False, False)


def test_compiled_model_trains_on_bit_for_bit(memory_path):
    """A run that compiles only after the resume is the run that never did, and the other way round."""

    def build(wrap=lambda model: model):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {"model": wrap(model), "optimizer": optimizer}

    assert_resumes(build, memory_path / "a", build_again=lambda: build(compiled))
    assert_resumes(lambda: build(compiled), memory_path / "b", build_again=build)


def test_state_dict_key_goes_with_the_longest_module_path():
    """Keys without a module of their own, such as those of a custom state_dict, keep their name."""
    modules = clean_modules(nn.DataParallel(Deep(compiled)))
    assert modules["module.head._orig_mod.0._orig_mod"][0] == "head.0"
    assert {clean for clean, _ in modules.values()} == {name for name, _ in Deep().named_modules()}


DDP = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from safeckpt import CheckpointManager
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other = torch.optim.AdamW(plain.parameters())
    inside = nn.Module()
    inside.net = wrapped
    def step(model, optimizer):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    step(wrapped, optimizer)
    with CheckpointManager(sys.argv[1] + "/a", {"model": wrapped, "optimizer": optimizer}) as manager:
        checkpoint = manager.save(1)
    assert list(torch.load(checkpoint.path)["model"]) == list(plain.state_dict()), "names"
    with CheckpointManager(sys.argv[1] + "/a", {"model": plain, "optimizer": other}) as manager:
        manager.restore()
    for one, two in zip(wrapped.module.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(one, two)
    for number in optimizer.state_dict()["state"]:
        for key, value in optimizer.state_dict()["state"][number].items():
            assert torch.equal(value, other.state_dict()["state"][number][key])
    with CheckpointManager(sys.argv[1] + "/b", {"model": plain, "optimizer": other}) as manager:
        step(plain, other)
        manager.save(2)
    plain.eval()
    with CheckpointManager(sys.argv[1] + "/b", {"model": wrapped, "optimizer": optimizer}) as manager:
        wrapped.eval()
        manager.restore()
    assert wrapped.training and wrapped.module[1].training
    torch.manual_seed(5); step(wrapped, optimizer)
    torch.manual_seed(5); plain.train(); step(plain, other)
    for one, two in zip(wrapped.module.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(one, two)
    with CheckpointManager(sys.argv[1] + "/c", {"model": inside, "optimizer": optimizer}) as manager:
        checkpoint = manager.save(1)
    assert list(torch.load(checkpoint.path)["model"]) == ["net." + key for key in plain.state_dict()]
    dist.destroy_process_group()
    print("all equal")
"""


@pytest.mark.slow
def test_distributed_wrapper_is_taken_off_and_put_on(tmp_path):
    """A model under DistributedDataParallel and a plain one restore each other, and go on with the same bits."""
    script = [sys.executable, "-W", "error::UserWarning:safeckpt", "-c", textwrap.dedent(DDP), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1:] == ["all equal"], done.stderr  # Gloo may say something before


# -- parameters without memory --------------------------------------------------------------------------------------


def test_uninitialised_parameters_are_refused_by_name_on_both_sides(memory_path):
    """A lazy layer cannot be saved before its first batch, nor restored into, and both say which one it is."""

    def lazy():
        return nn.Sequential(OrderedDict(first=nn.LazyLinear(3), norm=nn.LazyBatchNorm1d()))

    live = lazy()
    with CheckpointManager(memory_path, {"model": live}) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['model']['first.weight']"
        assert not list(memory_path.glob("*.pt"))
        live(torch.ones(2, 4))
        manager.save(1)
    saved = lazy()
    saved(torch.ones(2, 4))
    mismatches = refusal(payload_of({"model": saved}), {"model": lazy()})
    assert (
        "model.first.weight: the live parameter is uninitialised; run one forward pass before restoring" in mismatches
    )
    fresh = lazy()
    fresh(torch.zeros(2, 4))
    one, other = transferred(saved, fresh)
    assert one == other


def test_tensors_on_the_meta_device_are_refused_by_name_on_both_sides(memory_path):
    """A tensor without memory has nothing to save and nowhere to restore to."""
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with CheckpointManager(memory_path, {"model": empty}) as manager:
        with pytest.raises(UnsavableStateError) as caught:
            manager.save(1)
        assert caught.value.location == "payload['model']['weight']"
    assert refusal(payload_of({"model": nn.Linear(2, 2)}), {"model": empty}) == [
        "model.bias: the live tensor is on the meta device and has no memory; materialise it first",
        "model.weight: the live tensor is on the meta device and has no memory; materialise it first",
    ]


# -- reparametrised modules, special tensors ------------------------------------------------------------------------


class Double(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.factor


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Double())
    return layer


REPARAMETRISED = {
    "parametrization": parametrized,
    "weight norm": parametrizations.weight_norm,
    "old weight norm": old_weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.parametrize("kind", REPARAMETRISED)
def test_reparametrised_layer_goes_on_bit_for_bit(kind, memory_path):
    """Weights that are computed from others, with their own buffers and power iterations, resume exactly."""

    def build():
        model = Net()
        model.last = REPARAMETRISED[kind](nn.Linear(6, 3))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    assert_resumes(build, memory_path)


SAVED_KINDS = sorted(SPECIAL.keys() - {"subclass", "nested", "jagged", "mkldnn", "neg", "conj", "expanded", "windows"})


@pytest.mark.parametrize("kind", SAVED_KINDS)
def test_buffer_of_any_kind_comes_back_bit_for_bit(kind, memory_path):
    """Quantised, sparse, float8, complex and other buffers are restored from a file into live ones of their kind."""

    def holder(fill):
        model = nn.Module()
        tensor = SPECIAL[kind]()
        model.register_buffer("it", tensor.detach() if fill else like(tensor))
        return model

    def like(tensor):
        if tensor.is_quantized:
            return tensor.clone() if kind == "quantised" else tensor
        return tensor.detach() * 0 if tensor.layout is not torch.strided else torch.zeros_like(tensor)

    saved, live = holder(fill=True), holder(fill=False)
    allowed = {"guard": Guard(allow_nonfinite=["*"])}
    with CheckpointManager(memory_path, {"model": saved}, **allowed) as manager:
        manager.save(1)
    with CheckpointManager(memory_path, {"model": live}, **allowed) as manager:
        manager.restore()
    assert bits(live.state_dict()) == bits(saved.state_dict())


def test_channels_last_network_goes_on_bit_for_bit(memory_path):
    """Weights in another memory format keep it, and so the bits of what is computed from them."""

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            image = torch.cat([x, x, x], dim=1).reshape(8, 3, 2, 2).repeat(1, 1, 2, 2)
            return self.head(self.norm(self.conv(image)).mean(dim=(2, 3)))

    def build():
        model = Conv().to(memory_format=torch.channels_last)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05)}

    components = assert_resumes(build, memory_path)
    assert components["model"].conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_network_of_another_dtype_goes_on_bit_for_bit(dtype, memory_path):
    """bf16, double and complex weights keep their bits and so do their moments."""

    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6, dtype=dtype)
            self.last = nn.Linear(6, 3, dtype=dtype)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    def step(components):
        return train_step(components, dtype)

    def build():
        model = Wave()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    if dtype.is_complex:

        def step(components):
            model, optimizer = components["model"], components["optimizer"]
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4, dtype=dtype)).abs().square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

    assert_resumes(build, memory_path, step=step)


def test_capturing_a_module_changes_nothing_and_aliases_what_is_live():
    """A capture is a look: not a bit, a version or an identity differs afterwards."""
    model = WithExtra()
    registered = register({"model": model})
    before = photograph(model)
    captured = capture(registered)
    assert not changes(before, photograph(model))
    assert captured.payload["model"]["weight"].data_ptr() == model.weight.data_ptr()
    assert not captured.payload["model"]["weight"].requires_grad
