"""How ranks share a state: what each has of its own, what they hold together, and what is a part of something."""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import safeckpt
from safeckpt.run import saving
from tests.comparing import bits
from tests.distributed import groups, settings
from tests.distributed.scenarios import caught, local, outcome, rank
from tests.distributed.training import whole
from tests.faults import Fault, intercept

CASES: dict[str, Callable[[Path], Any]] = {}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Have a function run on both ranks of one group."""
    CASES[function.__name__] = function
    return function


def _run_all(path: Path) -> dict[str, Any]:
    def run(function: Callable[[Path], Any], path: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", safeckpt.UncapturedStateWarning)
            return function(path)

    return groups.run_cases({name: functools.partial(run, function) for name, function in CASES.items()}, path)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw in each case."""
    return groups.once(tmp_path_factory, "layouts", lambda path: groups.results(2, _run_all, path))


def manager(path: Path, components: dict[str, Any], **options: Any) -> safeckpt.CheckpointManager:
    return safeckpt.CheckpointManager(
        path, components, lock_timeout_seconds=5.0, **{"ranks": safeckpt.Ranks(20.0), **options}
    )


def net(kind: str = "fsdp", mesh: Any = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model, **({} if mesh is None else {"mesh": mesh}))
    return model


def micro(model: nn.Module, number: int, *, rank_matters: bool = True) -> None:
    """Add the gradients of one batch."""
    generator = torch.Generator().manual_seed(10 * number + (rank() if rank_matters else 0))
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()


def full(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p) for p in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return bits([a.detach() for a in one]) == bits([b.detach() for b in other])


class Keeps:
    """An object with a state of its own on each rank."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


# -- what each rank has of its own -------------------------------------------------------------------------------------


def _own(number: int) -> dict[str, Any]:
    """Return components of which rank 1's differ from rank 0's so that sums over them are equal, or texts of them."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]][number]))
    signs = torch.ones(4, dtype=torch.float64)
    signs[: 2 * number] = -1
    array = np.zeros(2000)
    array[1000] = number
    noise = torch.Generator().manual_seed(7)
    for _ in range(3 + 2 * number):
        torch.rand(1, generator=noise)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "order": Keeps(torch.randperm(100, generator=torch.Generator().manual_seed(number))),
        "signs": Keeps(signs),
        "array": Keeps(array),
        "close": Keeps(np.array([1.0 + number * 1e-10])),
        "empty": Keeps([[], {}][number]),
        "view": Keeps(torch.arange(3_000_000)[number : number + 2]),
        "counts": {"seen": torch.tensor([[5, 0, 0], [0, 5, 0]][number])},
        "noise": noise,
    }


@case
def own_state_with_equal_sums(path: Path) -> Any:
    with manager(path, _own(rank())) as one:
        size = one.save(1).size_bytes
    wanted, parts = _own(rank()), _own(1 - rank())
    with manager(path, parts) as one:
        one.restore()
    kept = {
        name: np.array_equal(np.asarray(parts[name].value), np.asarray(wanted[name].value))
        for name in ("order", "signs", "array", "close", "view")
    }
    kept["empty"] = parts["empty"].value == wanted["empty"].value
    kept["counts"] = torch.equal(parts["counts"]["seen"], wanted["counts"]["seen"])
    kept["buffer"] = torch.equal(parts["model"].mask, wanted["model"].mask)
    kept["noise"] = torch.equal(torch.rand(1, generator=parts["noise"]), torch.rand(1, generator=wanted["noise"]))
    return kept, size


def test_own_state_is_never_taken_for_that_of_rank_0(seen: list[dict[str, Any]]) -> None:
    """Permutations, sign flips, long arrays, empty containers, generators: each rank has its own back."""
    for kept, size in groups.of(seen, "own_state_with_equal_sums"):
        assert [name for name, same in kept.items() if not same] == []
        assert size < 200_000, "a view was sent with the memory around it"


# -- copies ------------------------------------------------------------------------------------------------------------


@case
def copies_that_only_a_place_tells_apart(path: Path) -> Any:
    found = {}
    torch.manual_seed(0)
    model = nn.Linear(4096, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with manager(path, {"model": model, "optimizer": optimizer}, ranks=safeckpt.Ranks(20.0, on_drift="error")) as one:
        one.save(1)
        for step, (name, harm) in enumerate(DRIFTS.items(), 2):
            before = model.weight.detach().clone()
            if rank() == 1:
                with torch.no_grad():
                    harm(model.weight)
            found[name] = outcome(lambda step=step: one.save(step))["error"]
            with torch.no_grad():
                model.weight.copy_(before)
    return found


def _swap_rows(weight: torch.Tensor) -> None:
    weight[[3, 40]] = weight[[40, 3]]


def _swap_two(weight: torch.Tensor) -> None:
    weight[0, [0, 2]] = weight[0, [2, 0]]


def _flip_signs(weight: torch.Tensor) -> None:
    weight[5, [1, 3]] *= -1  # the upper halves of two integers


def _flip_columns(weight: torch.Tensor) -> None:
    weight[:, 7] *= -1


def _next_numbers(weight: torch.Tensor) -> None:
    bits = weight.view(torch.int32)
    bits[0, 0] += 1
    bits[0, 2] -= 1


DRIFTS = {one.__name__: one for one in (_swap_rows, _swap_two, _flip_signs, _flip_columns, _next_numbers)}


def test_copies_in_another_order_have_drifted(seen: list[dict[str, Any]]) -> None:
    """Swapped rows or elements, flipped signs, changes that a sum does not see."""
    for found in groups.of(seen, "copies_that_only_a_place_tells_apart"):
        assert found == dict.fromkeys(DRIFTS, "ReplicaDriftError")


@case
def loss_that_an_optimizer_keeps(path: Path) -> Any:
    def step(parts: dict[str, Any], number: int) -> float:
        def closure() -> torch.Tensor:
            parts["optimizer"].zero_grad()
            generator = torch.Generator().manual_seed(10 * number + rank())
            loss = parts["model"](torch.randn(5, 6, generator=generator)).square().sum()
            loss.backward()
            return loss.detach()

        return float(parts["optimizer"].step(closure))

    def built(seed: int) -> dict[str, Any]:
        model = net("ddp", seed=seed)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)}

    def kept(parts: dict[str, Any]) -> float:
        return next(iter(parts["optimizer"].state.values()))["prev_loss"]

    first, again = built(0), built(1)
    with manager(path, first, ranks=safeckpt.Ranks(20.0, on_drift="error")) as one:
        step(first, 1)
        one.save(1)
        saved, losses = kept(first), [step(first, number) for number in (2, 3)]
    with manager(path, again) as one:
        one.restore()
        restored = kept(again)
        found = [step(again, number) for number in (2, 3)]
    return saved, restored, losses, found, equal(full(first["model"]), full(again["model"]))


def test_loss_that_an_optimizer_keeps_is_each_ranks_own(seen: list[dict[str, Any]]) -> None:
    """L-BFGS under DDP: the loss before this one is no copy that has drifted, and every rank has its own back."""
    found = groups.of(seen, "loss_that_an_optimizer_keeps")
    assert found[0][0] != found[1][0]
    for saved, restored, losses, again, same in found:
        assert restored == saved
        assert again == losses
        assert same


@case
def copies_never_equal(path: Path) -> Any:
    model = net("none", seed=rank())
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with manager(path / "warn", parts) as one:
        found = outcome(lambda: one.save(1))
    with manager(path / "ignore", parts, ranks=safeckpt.Ranks(20.0, on_drift="ignore")) as one:
        return found, outcome(lambda: one.save(1))


def test_copies_that_differ_at_the_first_save_are_an_error(seen: list[dict[str, Any]]) -> None:
    """Nothing is lost yet, and what was never equal is no copy."""
    for found, ignored in groups.of(seen, "copies_never_equal"):
        assert found["error"] == "ReplicaDriftError"
        assert "If each rank holds a different part" in found["text"]
        assert ignored["error"] is None


@case
def copies_that_differ_in_the_background(path: Path) -> Any:
    def drift(model: Any, amount: float) -> None:
        if rank() == 1:
            with torch.no_grad():
                model.module[0].bias[0] += amount

    found: dict[str, Any] = {}
    threads = set()
    real = saving.digests_of

    def digests_of(payload: Any) -> dict[str, str]:
        threads.add(threading.current_thread().name)
        return real(payload)

    saving.digests_of = digests_of  # type: ignore[assignment]
    for policy in ("error", "warn"):
        model = net("ddp")
        parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
        ranks = safeckpt.Ranks(20.0, on_drift=policy)  # type: ignore[arg-type]
        with manager(path / policy, parts, async_save=True, ranks=ranks) as one:
            one.save(1)
            drift(model, 1.0)
            calls = [caught(lambda step=step: one.save(step)) for step in (2, 3)]
            drift(model, -1.0)
            model.module[0].bias.data.fill_(0.0)
            calls += [caught(lambda: one.save(4)), caught(one.wait)]
            found[policy] = calls, [each.step for each in one.checkpoints()]
    saving.digests_of = real
    with manager(path / "first", parts, async_save=True) as one:
        drift(model, 1.0)
        calls = [caught(lambda: one.save(1)), caught(one.wait)]
        found["first"] = calls, [each.step for each in one.checkpoints()]
    return found, threads


def test_copies_of_an_asynchronous_save_are_compared_in_the_background(seen: list[dict[str, Any]]) -> None:
    """The call copies and compares nothing; a drift is told at the next call, and refused it is not committed."""
    for number, (found, threads) in enumerate(groups.of(seen, "copies_that_differ_in_the_background")):
        assert threads == {"safeckpt-writer"}
        calls, steps = found["error"]
        assert [one["error"] for one, _ in calls] == [None, "ReplicaDriftError", None, None]
        assert "0.bias" in calls[1][0]["text"]
        assert steps == [1, 4]
        calls, steps = found["warn"]
        assert [one["error"] for one, _ in calls] == [None, None, None, None]
        assert [len(given) for _, given in calls] == ([0, 1, 1, 0] if number == 0 else [0, 0, 0, 0])
        assert steps == [2, 3, 4]
        calls, steps = found["first"]
        assert [one["error"] for one, _ in calls] == [None, "ReplicaDriftError"]
        assert steps == []


@case
def rollback_without_a_file(path: Path) -> Any:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file is read")

    found = {}
    for name in ("ddp_adamw", "fsdp_average_as_object"):
        made = settings.PAIR[name]()
        with settings.manager_of(made.components, path / name, async_save=True, save_on_exit=False) as one:
            made.step(1)
            one.save(1)
            one.wait()
            losses = [made.step(number) for number in (2, 3)]
            one._run.directory.catalog.open_step = read  # type: ignore[method-assign]
            one.rollback(changed=True)
            found[name] = losses == [made.step(number) for number in (2, 3)]
    return found


def test_group_rolls_back_from_memory(seen: list[dict[str, Any]]) -> None:
    """Each rank has its part of the newest state still: no file is read, and the run goes on as it did."""
    for found in groups.of(seen, "rollback_without_a_file"):
        assert set(found.values()) == {True}, found


@case
def parts_of_a_pipeline(path: Path) -> Any:
    found = {}
    sharded = net()
    if rank() == 1:
        sharded.register_buffer("table", torch.zeros(3))
    stages = (nn.Sequential(nn.Linear(4, 4)), nn.ModuleDict({"head": nn.Linear(4, 2)}))
    mine = stages[rank()]
    kinds = {
        "other tensors": {"stage": mine},
        "other names": {f"stage{rank()}": mine},
        "one sharded": {"stage": net("fsdp" if rank() else "none")},
        "one plain": {"stage": sharded},
    }
    for name, parts in kinds.items():
        with manager(path / name, parts) as one:
            found[name] = outcome(lambda one=one: one.save(1))
    mine[0 if rank() == 0 else "head"].weight.data.fill_(rank() + 5)  # type: ignore[index, operator, union-attr]
    wrapped = Keeps({key: tensor.clone() for key, tensor in mine.state_dict().items()})
    with manager(path / "wrapped", {"stage": wrapped}) as one:
        one.save(1)
        wrapped.value = None
        one.restore(step=1)
    return found, {key: float(tensor.max()) for key, tensor in wrapped.value.items() if key.endswith("weight")}


def test_parts_of_a_model_are_refused_and_wrapped_ones_saved(seen: list[dict[str, Any]]) -> None:
    """A stage of a pipeline that only rank 0's would be kept of; the cure in the message works."""
    for number, (found, wrapped) in enumerate(groups.of(seen, "parts_of_a_pipeline")):
        assert found["other names"]["error"] == "RanksDisagreeError"
        assert "'stage0': 'module'" in found.pop("other names")["text"]
        for name, refused in found.items():
            assert refused["error"] == "UnsavableStateError", name
            assert "state_dict and load_state_dict" in refused["text"]
        assert "stage.table" in found["one plain"]["text"]
        assert wrapped == {("0.weight", "head.weight")[number]: number + 5.0}


@case
def sharded_state_of_other_forms(path: Path) -> Any:
    names = ("fsdp_row_statistics", "fsdp_average_as_dict", "fsdp_average_as_object")
    return {name: settings.resumes(settings.PAIR[name], False, path / name) for name in names}


def test_sharded_state_of_other_forms_resumes_exactly(seen: list[dict[str, Any]]) -> None:
    """Statistics of rows and columns, an average in a dict, and one that an object makes at the first step."""
    for found in groups.of(seen, "sharded_state_of_other_forms"):
        assert set(found.values()) == {(True, (), ())}, found


@case
def hidden_parts(_: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its package
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    plain = nn.Linear(2, 2)
    old = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    post = PostLocalSGDOptimizer(torch.optim.SGD(plain.parameters()), None)  # type: ignore[arg-type]
    return [
        outcome(lambda parts=parts: manager(Path("nowhere"), parts))
        for parts in ({"model": old}, {"model": plain, "optimizer": zero}, {"model": plain, "optimizer": post})
    ]


def test_what_hides_its_parts_is_refused_by_name(seen: list[dict[str, Any]]) -> None:
    """FSDP1, ZeroRedundancyOptimizer and optimizers that are none inside: at construction, with what to use instead."""
    for found in groups.of(seen, "hidden_parts"):
        assert [one["error"] for one in found] == ["TypeError"] * 3
        assert "fully_shard" in found[0]["text"]
        assert "fully_shard(model) with a plain optimizer" in found[1]["text"]
        assert "register the optimizer inside it" in found[2]["text"]


# -- gradients of FSDP2 ------------------------------------------------------------------------------------------------


@case
def gradients_not_reduced(path: Path) -> Any:
    def accumulate(model: Any, number: int) -> None:
        model.set_requires_gradient_sync(number % 2 == 0)
        micro(model, number)

    def run(where: Path, between: str) -> tuple[Any, list[torch.Tensor]]:
        model: Any = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        refused = None
        with manager(where, {"model": model, "optimizer": optimizer}) as one:
            accumulate(model, 1)
            accumulate(model, 2)
            optimizer.step()
            optimizer.zero_grad()
            one.save(1)
            if between != "nothing":
                accumulate(model, 3)
                refused = outcome(lambda: one.save(2))
                one.rollback(changed=True) if between == "rollback" else one.restore()
            accumulate(model, 5)
            accumulate(model, 6)
            optimizer.step()
        return refused, full(model)

    _, wanted = run(path / "nothing", "nothing")
    found = [run(path / between, between) for between in ("rollback", "restore")]
    return [refused for refused, _ in found], [equal(wanted, after) for _, after in found]


def test_gradients_that_are_not_reduced_are_refused_and_cleared(seen: list[dict[str, Any]]) -> None:
    """No `.grad` shows them: a save would lose them, and a rollback leave them behind."""
    for refused, equal_again in groups.of(seen, "gradients_not_reduced"):
        for one in refused:
            assert one["error"] == "UnsavableStateError"
            assert "model.0.weight.grad" in one["text"]
        assert equal_again == [True, True]


@case
def gradients_between_micro_steps(path: Path) -> Any:
    found = {}
    for foreach in (False, True):
        for clears in ("zero", "none", "not"):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
            parts = {"model": model, "optimizer": optimizer}
            where = path / f"{foreach} {clears}"
            with manager(where, parts) as one:
                micro(model, 1)
                optimizer.step()
                if clears != "not":
                    optimizer.zero_grad(set_to_none=clears == "none")
                micro(model, 2)
                one.save(1)
                micro(model, 3)
                optimizer.step()
            again = net()
            other = torch.optim.SGD(again.parameters(), lr=0.1, foreach=foreach)
            with manager(where, {"model": again, "optimizer": other}) as one:
                one.restore()
            micro(again, 3)
            other.step()
            found[where.name] = equal(full(model), full(again))
    return found


def test_gradients_added_in_place_are_part_of_the_state(seen: list[dict[str, Any]]) -> None:
    """FSDP2 adds to the local part of a gradient, so that the version of the DTensor stays what it was."""
    for found in groups.of(seen, "gradients_between_micro_steps"):
        assert [name for name, same in found.items() if not same] == []


@case
def gradient_that_is_zero_on_one_rank(path: Path) -> Any:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        fully_shard(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def embed(model: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(number + rank())
        model(torch.randint(0, 4, (6,), generator=generator)).square().mean().backward()

    found = []
    for background in (False, True):
        model, optimizer = built()
        where = path / str(background)
        with manager(where, {"model": model, "optimizer": optimizer}, async_save=background) as one:
            embed(model, 1)
            one.save(1)
            one.wait()
            embed(model, 2)
            optimizer.step()
        again, other = built()
        with manager(where, {"model": again, "optimizer": other}) as one:
            one.restore()
        embed(again, 2)
        other.step()
        found.append(equal(full(model), full(again)))
    return found


def test_gradient_of_which_one_rank_has_nothing_is_saved(seen: list[dict[str, Any]]) -> None:
    """Rows of an embedding that were in no batch: what is pending is not decided by a rank's own part."""
    assert groups.of(seen, "gradient_that_is_zero_on_one_rank") == [[True, True]] * 2


@case
def save_after_evaluation(path: Path) -> Any:
    """A forward pass leaves whole parameters in the modules; the optimizer is registered first."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    micro(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 6))
    with manager(path, {"optimizer": optimizer, "model": model}) as one:
        with torch.no_grad():
            model(torch.ones(2, 6))
        one.save(1)
    again = net()
    other = torch.optim.Adam(again.parameters(), lr=0.1)
    with torch.no_grad():
        again(torch.ones(2, 6))
    with manager(path, {"optimizer": other, "model": again}) as one:
        restored = outcome(one.restore)
    return restored, equal(full(model), full(again))


def test_save_after_evaluation_knows_the_names(seen: list[dict[str, Any]]) -> None:
    """Moments are saved under the names of their parameters, whatever stands in the modules."""
    for restored, same in groups.of(seen, "save_after_evaluation"):
        assert restored["error"] is None, restored["text"]
        assert same


# -- the same calls with other arguments -------------------------------------------------------------------------------


@case
def other_arguments(path: Path) -> Any:
    def parts() -> dict[str, Any]:
        model = net("ddp")
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    found: dict[str, Any] = {}
    for name, options in {
        "async_save": {"async_save": rank() == 0},
        "save_every": {"save_every": 2 + rank()},
    }.items():
        with manager(path / name, parts(), **options) as one:  # type: ignore[arg-type]
            found[name] = [outcome(lambda one=one: one.save(1)) for _ in range(2)]
    with manager(path / "run", parts()) as one:
        one.save(1)
        one.save(2)
        found["step"] = [outcome(lambda: one.restore(step=1 + rank()))]
        found["only"] = [outcome(lambda: one.restore(only=("model",) if rank() else None))]
        found["keep_live"] = [outcome(lambda: one.restore(keep_live=() if rank() else ("optimizer.lr",)))]
        found["changed"] = [outcome(lambda: one.rollback(changed=rank() == 0))]
        good = outcome(lambda: one.save(3))
    return found, good


def test_other_arguments_on_one_rank_are_told(seen: list[dict[str, Any]]) -> None:
    """Each time, not only the first; the error names the argument, and the next call that is right works."""
    for found, good in groups.of(seen, "other_arguments"):
        for name, outcomes in found.items():
            for one in outcomes:
                assert one["error"] == "RanksDisagreeError", (name, one)
                assert f"{name}=" in one["text"]
        assert good["error"] is None


@case
def modes_of_torch(path: Path) -> Any:
    model = net()
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    torch.set_default_device("meta")  # stands for "cuda": messages between ranks are made in host memory
    try:
        with manager(path / "device", parts) as one:
            device = outcome(lambda: one.save(1))
    finally:
        torch.set_default_device(None)
    with manager(path / "inference", parts) as one, torch.inference_mode():
        inference = outcome(lambda: one.save(1))
    return device, inference


def test_default_device_and_inference_mode_do_not_matter(seen: list[dict[str, Any]]) -> None:
    """A default device, and a save inside inference_mode."""
    for found in groups.of(seen, "modes_of_torch"):
        assert [one["error"] for one in found] == [None, None], found


@case
def warnings_during_a_write(path: Path) -> Any:
    """The writing thread must not touch the filters, which are those of all threads."""
    from safeckpt.distributed import storage

    model = net()
    real = storage.write_shards

    def slow(*arguments: Any, **options: Any) -> Any:
        inside.append(time.monotonic())
        while not go:
            time.sleep(0.01)
        return real(*arguments, **options)

    inside: list[float] = []
    go: list[bool] = []
    storage.write_shards = slow
    try:
        with manager(path, {"model": model}, async_save=True) as one:
            one.save(1)
            while not inside:
                time.sleep(0.01)
            filters = list(warnings.filters)
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                warnings.warn("of the loop", UserWarning, stacklevel=1)
                go.append(True)
                one.wait()
            return [str(warning.message) for warning in given], warnings.filters == filters
    finally:
        storage.write_shards = real


def test_write_in_the_background_leaves_warnings_alone(seen: list[dict[str, Any]]) -> None:
    """A warning of the loop while a checkpoint is written is heard, and no filter is left behind."""
    for given, same in groups.of(seen, "warnings_during_a_write"):
        assert given == ["of the loop"]
        assert same


@case
def communication_hook(path: Path) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = net("ddp")
    model.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)  # type: ignore[operator]
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return caught(lambda: manager(path, parts))[1]


def test_state_of_a_communication_hook_is_not_captured_and_told(seen: list[dict[str, Any]]) -> None:
    """The error feedback of PowerSGD is another tensor on each rank, in no state_dict."""
    for given in groups.of(seen, "communication_hook"):
        assert any("PowerSGDState of its communication hook" in text for text in given)


# -- other kinds and numbers of ranks ----------------------------------------------------------------------------------


class RowScales(torch.optim.SGD):
    """Keeps plain state of another shape than the parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("scale", torch.zeros(5)).add_(1)
        return super().step(closure)


def _save(path: Path, kind: str, pending: bool) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")) if kind == "hsdp" else None
    model = net("fsdp" if kind == "hsdp" else kind, mesh)
    optimizer = RowScales(model.parameters(), lr=0.1, momentum=0.9)
    with manager(path, {"model": model, "optimizer": optimizer}) as one:
        micro(model, 1, rank_matters=False)
        optimizer.step()
        optimizer.zero_grad()
        if pending:
            micro(model, 2, rank_matters=False)
        one.save(1)
    return _after(model, optimizer)


def _after(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Take a step whose data is the same on every rank, so that the number of ranks does not matter."""
    before = full(model)
    micro(model, 3, rank_matters=False)
    optimizer.step()
    return [*before, *full(model), *(whole(one["momentum_buffer"]) for one in optimizer.state.values())]


def _restore(path: Path, kind: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")) if kind == "hsdp" else None
    model = net("fsdp" if kind == "hsdp" else kind, mesh, seed=5)
    optimizer = RowScales(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}
    with warnings.catch_warnings(), manager(path, parts, keep_last=9) as one:
        warnings.simplefilter("ignore")
        one.restore()
        found = _after(model, optimizer)
        optimizer.zero_grad()
        one.save(2)
    return found


@pytest.mark.parametrize("pending", [pytest.param(False, marks=pytest.mark.campaign), True], ids=["spent", "pending"])
@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (("ddp", 2), ("fsdp", 2)),
        pytest.param(("fsdp", 2), ("fsdp", 3), marks=pytest.mark.slow),
        pytest.param(("fsdp", 2), ("ddp", 3), marks=pytest.mark.slow),
        pytest.param(("ddp", 2), ("fsdp", 3), marks=pytest.mark.campaign),
        pytest.param(("none", 1), ("fsdp", 1), marks=pytest.mark.campaign),
        pytest.param(("none", 1), ("hsdp", 4), marks=pytest.mark.campaign),
        pytest.param(("fsdp", 2), ("hsdp", 4), marks=pytest.mark.campaign),
        pytest.param(("hsdp", 4), ("none", 1), marks=pytest.mark.campaign),
        pytest.param(("ddp", 2), ("ddp", 3), marks=pytest.mark.campaign),
    ],
    ids=lambda one: f"{one[0]}{one[1]}",
)
def test_state_moves_between_kinds_and_numbers_of_ranks(
    tmp_path: Path, saved: tuple[str, int], restored: tuple[str, int], pending: bool
) -> None:
    """Weights, moments, plain state of other shapes, pending gradients: the next step is that of the saved run."""
    wanted = groups.results(saved[1], _save, tmp_path, saved[0], pending)[0]
    for found in groups.results(restored[1], _restore, tmp_path, restored[0]):
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            if number < 4:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums over ranks in another order


def _no_sync(path: Path, saves: bool) -> Any:
    model: Any = net("ddp")
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with manager(path, parts) as one:
        if not saves:
            return outcome(one.restore), [p.grad is None for p in model.parameters()]
        with model.no_sync():
            micro(model, 1)
        return outcome(lambda: one.save(1)), None


@pytest.mark.slow
def test_gradients_of_each_rank_are_for_that_number_of_ranks(tmp_path: Path) -> None:
    """Of an accumulation under no_sync nothing exact can be made for other ranks: refused, and nothing changed."""
    groups.results(2, _no_sync, tmp_path, True)
    same = groups.results(2, _no_sync, tmp_path, False)
    assert [found["error"] for found, _ in same] == [None, None]
    assert not any(none for _, without in same for none in without)
    for found, without in groups.results(3, _no_sync, tmp_path, False):
        assert found["error"] == "StateMismatchError"
        assert "different ones on each of 2 ranks" in found["text"]
        assert all(without)


def _drifted_hsdp(path: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    model = net("fsdp", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager(path, {"model": model, "optimizer": optimizer}) as one:
        one.save(1)
        if rank() >= 2:
            with torch.no_grad():
                for p in model.parameters():
                    local(p).add_(1.0)
        mine = full(model)
        given = caught(lambda: one.save(2))[1]
    return mine, given


def test_copies_of_shards_that_drifted_are_not_mixed(tmp_path: Path) -> None:
    """The ranks share the work of writing copies; when these differ, the checkpoint is the first copy, all of it."""
    (mine, given), *_ = groups.results(4, _drifted_hsdp, tmp_path)
    assert any("ReplicaDriftWarning" in text for text in given)
    state = safeckpt.load(tmp_path / "step-00000002")["model"]
    assert equal(list(state.values()), mine)


def _on_two_meshes(path: Path) -> Any:
    """Shards of one model over two dimensions of a mesh that are as long as each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = nn.Module()
    for name in mesh.mesh_dim_names or ():
        whole = torch.arange(16.0).view(4, 4)
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh[name], [Shard(0)])))
    with manager(path, {"model": model}) as one:
        one.save(1)
        before = [local(p).detach().clone() for p in model.parameters()]
        for p in model.parameters():
            torch.nn.init.zeros_(local(p))
        one.restore()
    return equal(before, [local(p) for p in model.parameters()])


@pytest.mark.slow
def test_shards_on_two_meshes_are_no_copies_of_each_other(tmp_path: Path) -> None:
    """As those of experts beside the rest: what stands at the same place of another mesh is another part."""
    assert groups.results(4, _on_two_meshes, tmp_path) == [True] * 4


# -- groups that go ----------------------------------------------------------------------------------------------------


def _destroyed(path: Path) -> Any:
    model = net()
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    one = manager(path, parts)
    one.save(1)
    store = torch.distributed.distributed_c10d._get_default_store()
    number, size = rank(), torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    gone = outcome(lambda: one.save(2))
    again = torch.distributed.PrefixStore("again", store)
    torch.distributed.init_process_group("gloo", store=again, rank=number, world_size=size)
    ddp = net("ddp")  # sharded objects belong to the group that is gone
    other = manager(path / "other", {"model": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.1)})
    with contextlib.closing(other):
        fresh = outcome(lambda: other.save(1))
    return gone, fresh, outcome(one.close)


def test_group_that_was_destroyed_is_told(tmp_path: Path) -> None:
    """What to call first is in the message; a group that is made again is used."""
    for gone, fresh, closed in groups.results(2, _destroyed, tmp_path):
        assert gone["error"] == "GroupDestroyedError"
        assert "before you call torch.distributed.destroy_process_group()" in gone["text"]
        assert fresh["error"] is None
        assert closed["error"] is None


# -- ranks that stay in step -------------------------------------------------------------------------------------------


@case
def gradient_that_one_rank_has_not(path: Path) -> Any:
    def parts() -> dict[str, Any]:
        model = net("ddp")
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    first = parts()
    with first["model"].no_sync():
        (first["model"](torch.ones(2, 6)).sum() * (1.0 if rank() == 0 else 0.0)).backward()
    with manager(path, first) as one:
        one.save(1)
    again = parts()
    with manager(path, again) as one:
        one.restore()
    return [0.0 if p.grad is None else float(p.grad.abs().sum()) for p in again["model"].parameters()]


def test_gradient_that_one_rank_has_not_is_not_that_of_rank_0(seen: list[dict[str, Any]]) -> None:
    """An unused branch under no_sync: what is missing on a rank stays missing."""
    first, second = groups.of(seen, "gradient_that_one_rank_has_not")
    assert all(first)
    assert not any(second)


@case
def evaluation_before_a_step_that_saves_nothing(path: Path) -> Any:
    """Memory for the copy is made ready after the first step; no rank may capture by itself."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager(path, {"model": model, "optimizer": optimizer}, async_save=True, save_every=100) as one:
        for step in (1, 2):
            micro(model, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 6))
            one.end_step(step, loss=1.0)
    return True


def test_no_rank_captures_by_itself(seen: list[dict[str, Any]]) -> None:
    """A capture reshards: done on one rank, the next forward pass would be waiting for the others."""
    assert groups.of(seen, "evaluation_before_a_step_that_saves_nothing") == [True, True]


@case
def error_after_the_commit(path: Path) -> Any:
    model = net("ddp")
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with manager(path, parts, save_every=2, ranks=safeckpt.Ranks(20.0, agree_every=100)) as one:
        for step in (1, 2, 3):
            one.end_step(step, loss=1.0)
        pruning = one._saver._pruning
        real = pruning.prune

        def harmed(saved: int) -> Any:
            raise safeckpt.SafeckptWarning("could not be deleted")

        if rank() == 0:
            pruning.prune = harmed  # type: ignore[method-assign]
        found = outcome(lambda: one.end_step(4, loss=1.0))
        pruning.prune = real  # type: ignore[method-assign]
        state = one._run.timeline.saved_step, one.step
        rest = [outcome(lambda step=step: one.end_step(step, loss=1.0)) for step in (5, 6)]
    return found, state, rest


def test_ranks_stay_in_step_after_an_error_behind_the_commit(seen: list[dict[str, Any]]) -> None:
    """All know that the checkpoint is there, and agree on when the next one is due."""
    for found, state, rest in groups.of(seen, "error_after_the_commit"):
        assert found["error"] == "SafeckptWarning"
        assert state == (4, 4)
        assert [(one["error"], one["step"]) for one in rest] == [(None, None), (None, 6)]


@case
def refusals_and_what_comes_after(path: Path) -> Any:
    model = net("ddp")
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    one = manager(path, parts, ranks=safeckpt.Ranks(20.0, agree_every=10))
    one.save(1)
    for step in range(2, 8):
        one.end_step(step, loss=float("nan") if rank() == 1 and step == 5 else 1.0)
    one.restore()
    forgotten = [outcome(lambda step=step: one.end_step(step, loss=1.0)) for step in range(2, 12)]
    one.rollback(changed=True)
    for step in range(2, 8):
        one.end_step(step, loss=float("nan") if rank() == 1 and step == 5 else 1.0)
    return [each["error"] for each in forgotten], outcome(one.close)


def test_refusal_goes_with_a_restore_and_is_raised_at_the_end(seen: list[dict[str, Any]]) -> None:
    """A step that was gone back over accuses nobody; one since the last meeting is told by close."""
    for number, (forgotten, closed) in enumerate(groups.of(seen, "refusals_and_what_comes_after")):
        assert forgotten == [None] * 10
        assert closed["error"] == ("NonFiniteError" if number == 1 else None)


@case
def caught_disk_error(path: Path) -> Any:
    model = net()
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with manager(path, parts, save_every=2) as one:
        one.save(1, loss=1.0)
        fault = Fault(1, errno.ENOSPC, {"write"})
        with intercept(fault) if rank() == 0 else contextlib.nullcontext():
            found = outcome(lambda: one.end_step(2, loss=1.0))
        at = one.step
        again = outcome(lambda: one.end_step(one.step + 1, loss=1.0))
    return found["error"], at, again


def test_step_has_ended_though_its_save_was_refused_by_the_disk(seen: list[dict[str, Any]]) -> None:
    """A loop that goes on after the error counts on, and the next step saves."""
    for error, at, again in groups.of(seen, "caught_disk_error"):
        assert (error, at, again["error"], again["step"]) == ("OSError", 2, None, 3)


def _partial(path: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    model: Any = net("fsdp", mesh)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with manager(path, parts) as one:
        one.save(1)
        model.set_requires_all_reduce(False)
        micro(model, 1)
        refused = outcome(lambda: one.save(2))
        one.rollback(changed=True)
        return refused, outcome(lambda: one.save(2))


def test_gradients_reduced_over_shards_alone_are_refused_and_cleared(tmp_path: Path) -> None:
    """HSDP under set_requires_all_reduce(False): the sum over one dimension of the mesh waits for the other."""
    for refused, after in groups.results(4, _partial, tmp_path):
        assert refused["error"] == "UnsavableStateError"
        assert after["error"] is None


def _alone(path: Path) -> Any:
    torch.manual_seed(len(path.name) + ord(path.name[-1]))
    model = nn.Linear(3, 3)
    with manager(path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}) as one:
        one.save(5)


def _both(path: Path, places: list[Path]) -> Any:
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with manager(places[rank()], parts) as one:
        return outcome(one.restore), torch.equal(before, model.weight)


def test_checkpoints_of_one_name_in_two_directories_are_told_apart(tmp_path: Path) -> None:
    """Two local disks with a step 5 each: not one run."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        groups.results(1, _alone, place)
    for found, unchanged in groups.results(2, _both, tmp_path, places):
        assert found["error"] == "DirectoryNotSharedError"
        assert "the directory is not shared" in found["text"]
        assert unchanged
