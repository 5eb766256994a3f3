"""Kinds of training by several processes: each a function that builds what a user's script would.

Every one has names for its parts and a step; two of the same kind on the same ranks do the same, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

import safeckpt
from safeckpt.state.tree import local_part, named_tensors

Step = Callable[[int], float]
PAIR: dict[str, Callable[[], Trained]] = {}  # for two ranks
FOUR: dict[str, Callable[[], Trained]] = {}  # for four


@dataclass
class Trained:
    """One run.

    Attributes:
        components: What a manager has to know.
        step: Trains one step and returns the loss.
        options: Of the manager.
    """

    components: dict[str, Any]
    step: Step


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def pair(function: Callable[[], Trained]) -> Callable[[], Trained]:
    PAIR[function.__name__] = function
    return function


def four(function: Callable[[], Trained]) -> Callable[[], Trained]:
    FOUR[function.__name__] = function
    return function


def rank() -> int:
    return torch.distributed.get_rank()


def manager_of(components: dict[str, Any], path: Path, **options: Any) -> safeckpt.CheckpointManager:
    options = {"ranks": safeckpt.Ranks(60.0, on_drift="error"), **options}
    return safeckpt.CheckpointManager(path, components, lock_timeout_seconds=5.0, **options)


def _state(components: dict[str, Any]) -> dict[str, torch.Tensor]:
    states = {
        name: one if isinstance(one, dict) else one.state_dict() for name, one in components.items() if name != "loader"
    }
    return {name: local_part(tensor.detach()) for name, tensor in named_tensors(states)}


def resumes(build: Callable[[], Trained], background: Any, path: Path) -> Any:
    """Train, save after step 3 and go on; build again, restore and go on from there; say what is not the same."""
    first = build()
    with manager_of(first.components, path, async_save=background, save_on_exit=False) as manager:
        for number in (1, 2, 3):
            first.step(number)
        manager.save(3)
        losses = [first.step(number) for number in (4, 5, 6)]
    again = build()
    with manager_of(again.components, path, save_on_exit=False) as manager:
        restored = manager.restore()
        assert restored is not None
        found = [again.step(number) for number in (4, 5, 6)]
    wanted, state = _state(first.components), _state(again.components)
    different = [name for name in wanted if not torch.equal(wanted[name], state[name])]
    return found == losses, tuple(wanted.keys() ^ state.keys()), tuple(different)


class Block(nn.Module):
    """Odd dimensions, a parameter of one element, a dropout."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, 9)
        self.down = nn.Linear(9, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(self.down(torch.tanh(self.up(x))))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block, *, tied: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([block(), block()])
        self.norm = nn.BatchNorm1d(7) if norm else nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(**options: Any) -> Any:
    torch.manual_seed(0)
    made = Net(**options)
    torch.manual_seed(100 + rank())  # dropout of its own on every rank
    return made


def ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model)


def fsdp(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(number: int, *, who: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + (rank() if who is None else who))
    tokens = torch.randint(0, 11, (2, 6), generator=generator)
    return tokens[0], tokens[1]


def loss_of(model: Any, number: int, **options: Any) -> torch.Tensor:
    x, y = batch(number, **options)
    return nn.functional.cross_entropy(model(x).float(), y)


def trained(model: Any, *optimizers: Any, after: Callable[[], object] = lambda: None, **more: Any) -> Trained:
    """Return a run whose step is the usual one."""

    def step(number: int) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for one in more.values():
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
                one.step()
        after()
        return loss.item()

    named = {f"optimizer{number or ''}": optimizer for number, optimizer in enumerate(optimizers)}
    return Trained({"model": model, **named, **more}, step)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, **options)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=9)


def frozen(model: Any) -> Any:
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


# -- DDP ---------------------------------------------------------------------------------------------------------------


@pair
def ddp_adamw() -> Trained:
    model = ddp(net())
    return trained(model, adamw(model))


@pair
def ddp_fused() -> Trained:
    model = ddp(net())
    return trained(model, adamw(model, fused=True))


@pair
def ddp_sgd_nesterov_cosine() -> Trained:
    model = ddp(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return trained(model, optimizer, scheduler=cosine(optimizer))


@pair
def ddp_adafactor() -> Trained:
    model = ddp(net())
    return trained(model, torch.optim.Adafactor(model.parameters()))


@pair
def ddp_muon_and_adamw() -> Trained:
    model = ddp(net())
    return trained(model, *muon_and_adamw(model))


@pair
def ddp_frozen() -> Trained:
    model = ddp(frozen(net()))
    return trained(model, adamw(model))


@pair
def ddp_around_compiled() -> Trained:
    model = ddp(torch.compile(net(), backend="eager"))
    return trained(model, adamw(model))


@pair
def ddp_compiled() -> Trained:
    model = torch.compile(ddp(net()), backend="eager")
    return trained(model, adamw(model))


@pair
def ddp_averaged() -> Trained:
    model = ddp(net())
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return trained(model, adamw(model), after=lambda: averaged.update_parameters(model.module), averaged=averaged)


def accumulated(model: Any, first: Callable[[], AbstractContextManager[Any]]) -> Trained:
    """Return a training of which every second number ends a step; the micro-steps before are in a context."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> float:
        with first() if number % 2 else contextlib.nullcontext():
            loss = loss_of(model, number)
            loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Trained({"model": model, "optimizer": optimizer}, step)


@pair
def ddp_between_micro_steps() -> Trained:
    model = ddp(net())
    return accumulated(model, model.no_sync)


@pair
def ddp_own_buffers() -> Trained:
    model = DistributedDataParallel(net(norm=True), broadcast_buffers=False)
    return trained(model, adamw(model))


# -- FSDP2 -------------------------------------------------------------------------------------------------------------

_FSDP_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": adamw,
    "fused": lambda model: adamw(model, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5, centered=True),
}


def _with(optimizer: Callable[[Any], Any]) -> Trained:
    model = fsdp(net())
    return trained(model, optimizer(model))


for _name, _optimizer in _FSDP_OPTIMIZERS.items():
    PAIR[f"fsdp_{_name}"] = lambda optimizer=_optimizer: _with(optimizer)  # type: ignore[misc]


@pair
def fsdp_amsgrad_cosine() -> Trained:
    model = fsdp(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, foreach=True)
    return trained(model, optimizer, scheduler=cosine(optimizer))


@pair
def fsdp_muon_and_adamw() -> Trained:
    model = fsdp(net())
    return trained(model, *muon_and_adamw(model))


@pair
def fsdp_tied() -> Trained:
    model = fsdp(net(tied=True))
    return trained(model, adamw(model))


@pair
def fsdp_bf16_policy() -> Trained:
    model = fsdp(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return trained(model, adamw(model))


@pair
def fsdp_bf16_model() -> Trained:
    model = fsdp(net().bfloat16())
    return trained(model, adamw(model))


@pair
def fsdp_offloaded() -> Trained:
    model = fsdp(net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return trained(model, adamw(model))


@pair
def fsdp_checkpointed_by_call() -> Trained:
    model = fsdp(net(block=Checkpointed))
    return trained(model, adamw(model))


@pair
def fsdp_checkpointed_by_wrapper() -> Trained:
    model = net()
    apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, Block))
    model = fsdp(model)
    return trained(model, adamw(model))


@pair
def fsdp_compiled() -> Trained:
    model = torch.compile(fsdp(net()), backend="eager")
    return trained(model, adamw(model))


@pair
def fsdp_compiled_blocks() -> Trained:
    model = net()
    for block in model.blocks:
        block.compile(backend="eager")
    model = fsdp(model)
    return trained(model, adamw(model))


@pair
def fsdp_frozen() -> Trained:
    model = fsdp(frozen(net()))
    return trained(model, adamw(model))


def _average(into: Any, model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            into[name].lerp_(parameter, 0.1)


@pair
def fsdp_average_as_module() -> Trained:
    model, average = fsdp(net()), fsdp(net())
    average.requires_grad_(False)

    def after() -> None:
        _average(dict(average.named_parameters()), model)

    return trained(model, adamw(model), after=after, average=average)


@pair
def fsdp_average_as_dict() -> Trained:
    model = fsdp(net())
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trained(model, adamw(model), after=lambda: _average(average, model), average=average)


class Average:
    """An average as an object, which makes its tensors at the first step."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow.setdefault(name, p.detach().clone())
        _average(self.shadow, model)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = dict(state["shadow"]), state["updates"]


@pair
def fsdp_average_as_object() -> Trained:
    model, average = fsdp(net()), Average()
    return trained(model, adamw(model), after=lambda: average.update(model), average=average)


class RowStatistics(torch.optim.Optimizer):
    """Divides by means over rows and columns, as Adafactor does, with out-of-place operations that shards allow."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, square = self.state[p], p.grad.square()
                if p.ndim != 2:
                    state["mean"] = state["mean"].lerp(square, 0.1) if "mean" in state else square
                    p.sub_(p.grad / (state["mean"].sqrt() + 1e-3) * group["lr"])
                    continue
                row, column = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
                if isinstance(column, DTensor):
                    column = column.redistribute(placements=[Replicate()] * column.device_mesh.ndim)
                state["row"] = state["row"].lerp(row, 0.1) if "row" in state else row
                state["column"] = state["column"].lerp(column, 0.1) if "column" in state else column
                scale = state["row"].sqrt() * state["column"].sqrt() + 1e-3
                p.sub_(p.grad / scale * group["lr"])


@pair
def fsdp_row_statistics() -> Trained:
    model = fsdp(net())
    return trained(model, RowStatistics(model.parameters()))


@pair
def fsdp_accumulated() -> Trained:
    return accumulated(fsdp(net()), contextlib.nullcontext)


@pair
def fsdp_accumulated_without_sync() -> Trained:
    model = fsdp(net())
    optimizer = adamw(model)

    def step(number: int) -> float:
        total = 0.0
        for micro in (0, 1):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, 10 * number + micro)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Trained({"model": model, "optimizer": optimizer}, step)


@pair
def fsdp_kept_whole_after_forward() -> Trained:
    model = fsdp(net(), reshard_after_forward=False)
    return trained(model, adamw(model))


@pair
def fsdp_ignored_parameters() -> Trained:
    model = net()
    ignored = {model.embed.weight}
    model = fsdp(model, ignored_params=ignored)

    def alike() -> None:
        torch.distributed.broadcast(model.embed.weight.data, 0)

    model.embed.weight.requires_grad_(False)
    return trained(model, adamw(model), after=alike)


@pair
def replicated() -> Trained:
    from torch.distributed._composable.replicate import replicate

    model = replicate(net())
    return trained(model, adamw(model))


class Adapted(nn.Module):
    """A linear layer that is frozen, and two small ones that are trained."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Linear(inner.in_features, 2, bias=False)
        self.b = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.b(self.a(x))


@pair
def fsdp_adapters() -> Trained:
    model = net()
    torch.manual_seed(1)
    for block in model.blocks:
        block.up = Adapted(block.up)
    torch.manual_seed(100 + rank())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".a." in name or ".b." in name)
    model = fsdp(model)
    return trained(model, adamw(model))


@pair
def fsdp_optimizer_in_backward() -> Trained:
    model = fsdp(net())
    optimizers = {name.replace(".", "_"): torch.optim.AdamW([p], lr=1e-2) for name, p in model.named_parameters()}
    for (_, p), optimizer in zip(model.named_parameters(), optimizers.values(), strict=True):

        def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)

    def step(number: int) -> float:
        loss = loss_of(model, number)
        loss.backward()
        return loss.item()

    return Trained({"model": model, **optimizers}, step)


@pair
def fsdp_scaled() -> Trained:
    model = fsdp(net())
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return Trained({"model": model, "optimizer": optimizer, "scaler": scaler}, step)


@pair
def two_models_of_two_kinds() -> Trained:
    generator = fsdp(net())
    torch.manual_seed(2)
    judge = ddp(nn.Linear(11, 1))
    torch.manual_seed(100 + rank())
    first, second = adamw(generator), adamw(judge)

    def step(number: int) -> float:
        x, _ = batch(number)
        second.zero_grad()
        real = nn.functional.one_hot(x, 11).float()
        loss = judge(generator(x).detach()).mean() - judge(real).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        other = -judge.module(generator(x)).mean()
        other.backward()
        first.step()
        return loss.item() + other.item()

    return Trained({"generator": generator, "judge": judge, "first": first, "second": second}, step)


class Tokens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(index)) + 0 * torch.randint(
            0, 2, ()
        )


class Stream(IterableDataset[torch.Tensor]):
    """Another stream on each rank."""

    def __iter__(self) -> Any:
        for index in range(20):
            yield torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * rank() + index))


def _from_loader(batches: Any) -> Trained:
    model = fsdp(net())
    optimizer, loader = adamw(model), safeckpt.ResumableLoader(batches, seed=rank())
    tokens: list[Any] = [None]

    def step(number: int) -> float:
        tokens[0] = tokens[0] or iter(loader)
        x, y = next(tokens[0])[0]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Trained({"model": model, "optimizer": optimizer, "loader": loader}, step)


@pair
def stream_of_each_rank() -> Trained:
    return _from_loader(DataLoader(Stream(), batch_size=1))


@pair
def loader_with_workers() -> Trained:
    return _from_loader(DataLoader(Tokens(), batch_size=1, shuffle=True, num_workers=1))


# -- meshes of four ----------------------------------------------------------------------------------------------------


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


class Pair(nn.Module):
    """Dimensions that two ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, first: int = 0, last: int = 4) -> None:
        super().__init__()
        layers = {}
        for number in range(4):
            torch.manual_seed(number)
            layers[str(number)] = Pair()
        self.layers = nn.ModuleDict({key: one for key, one in layers.items() if first <= int(key) < last})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def squares(model: Any, *optimizers: Any, group: int | None = None, **more: Any) -> Trained:
    """Return a run on numbers; ranks of one group have the same."""

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(10 * number + (rank() if group is None else group))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(torch.randn(5, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    named = {f"optimizer{number or ''}": optimizer for number, optimizer in enumerate(optimizers)}
    return Trained({"model": model, **named, **more}, step)


@four
def hsdp() -> Trained:
    model = fsdp(net(), _mesh("copies", "shards"))
    return trained(model, adamw(model))


@four
def hsdp_row_statistics() -> Trained:
    model = fsdp(net(), _mesh("copies", "shards"))
    return trained(model, RowStatistics(model.parameters()))


@four
def tensor_parallel() -> Trained:
    model = Stack()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    for layer in model.layers.values():
        parallelize_module(layer, mesh, TENSOR_PARALLEL)
    return squares(model, adamw(model, foreach=False), group=0)


def _two_dimensional() -> nn.Module:
    model, mesh = Stack(), _mesh("data", "tensor")
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], TENSOR_PARALLEL)
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


@four
def fsdp_and_tensor_parallel() -> Trained:
    model = _two_dimensional()
    return squares(model, adamw(model, foreach=False), group=rank() // 2)


@four
def fsdp_and_tensor_parallel_row_statistics() -> Trained:
    model = _two_dimensional()
    return squares(model, RowStatistics(model.parameters()), group=rank() // 2)


class Experts(nn.Module):
    """Experts whose weights lie on a mesh of their own; here each rank adds up what its experts say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.router = nn.Linear(6, 4)
        self.weight = nn.Parameter(torch.randn(4, 6, 6) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        gates = self.router(x).softmax(-1)
        first = 0 if local.size(0) == 4 else weight.device_mesh.get_local_rank() * local.size(0)
        mine = gates[:, first : first + local.size(0)]
        return x + torch.einsum("be,eij,bj->bi", mine, local, x)


@four
def experts_on_their_own_mesh() -> Trained:
    mesh = _mesh("data", "experts")
    model: Any = nn.Sequential(Pair(), Experts())
    torch.manual_seed(100 + rank())
    own = nn.Parameter(distribute_tensor(model[1].weight.data, mesh["experts"], [Shard(0)]))
    model[1].weight = own
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), ignored_params={own})
    first = torch.optim.AdamW([p for p in model.parameters() if p is not own], lr=1e-2)
    second = torch.optim.AdamW([own], lr=1e-2)

    def average(gradient: Any) -> Any:  # experts of the two data ranks are copies
        torch.distributed.all_reduce(gradient.to_local(), group=mesh["data"].get_group())
        return gradient

    own.register_hook(average)
    return squares(model, first, second)


# -- stages and experts by name ----------------------------------------------------------------------------------------


def stack(first: int = 0, last: int = 4, mesh: DeviceMesh | None = None, seed: int = 0) -> Any:
    """Return layers of one model, sharded; under the names that they have in all of it."""
    model: Any = Stack(first, last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@four
def pipeline_stages() -> Trained:
    mesh, stage = _mesh("stage", "data"), rank() // 2
    model = stack(2 * stage, 2 * stage + 2, mesh["data"])
    optimizer = adamw(model)
    scheduler = cosine(optimizer)

    def step(number: int) -> float:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + rank() % 2)
        x, loss = torch.randn(5, 6, generator=generator), torch.zeros(())
        if stage == 0:
            y = model(x)
            torch.distributed.send(y.detach(), rank() + 2)
            gradient = torch.empty_like(y)
            torch.distributed.recv(gradient, rank() + 2)
            y.backward(gradient)
            torch.distributed.recv(loss, rank() + 2)
        else:
            torch.distributed.recv(x, rank() - 2)
            x.requires_grad_()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            torch.distributed.send(x.grad, rank() - 2)
            torch.distributed.send(loss.detach(), rank() - 2)
        optimizer.step()
        scheduler.step()
        return loss.item()

    return Trained({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


class Routed(nn.Module):
    """A part that all ranks share, and one expert of two."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = Pair()
        torch.manual_seed(1 + expert)
        self.experts = nn.ModuleDict({str(expert): Pair()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        for expert in self.experts.values():
            x = expert(x)
        return x


@four
def experts_by_name() -> Trained:
    mesh = _mesh("expert", "data")
    model: Any = Routed(rank() // 2)
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return squares(model, adamw(model, foreach=False))


def laid_out(kind: str, seed: int) -> Any:
    """Return one model in a layout: `alone`, `ddp`, `fsdp`, `hsdp` or `2d`."""
    if kind == "2d":
        return _two_dimensional()
    mesh = _mesh("copies", "shards") if kind == "hsdp" else None
    if kind in ("fsdp", "hsdp"):
        return stack(mesh=mesh, seed=seed)
    model = Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    return ddp(model) if kind == "ddp" else model
