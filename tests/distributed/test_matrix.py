"""Every kind of training by several processes resumes as the same run: losses and state equal, with `==`."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import safeckpt
from tests.distributed import groups, settings
from tests.distributed.scenarios import outcome
from tests.faults import Operation, intercept

pytestmark = pytest.mark.slow


def _all(path: Path, kinds: str, names: tuple[str, ...]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    built = getattr(settings, kinds)
    cases = {
        f"{name} {'async' if background else 'sync'}": functools.partial(settings.resumes, built[name], background)
        for name in names
        for background in (False, True)
    }
    return groups.run_cases(cases, path)


def _chunks(kinds: str, count: int) -> list[Any]:
    """Return the settings in a few parts, each of which one process group runs through."""
    names = list(getattr(settings, kinds))
    return [pytest.param(tuple(names[first::count]), id=str(first)) for first in range(count)]


def _check(seen: list[dict[str, Any]]) -> None:
    wrong = {}
    for name in seen[0]:
        for rank, found in enumerate(seen):
            one = found[name]
            if isinstance(one, groups.Failed):
                wrong[name] = f"rank {rank}: {one.text}"
            elif one != (True, (), ()):
                wrong[name] = f"rank {rank}: {one}"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def _by_process(path: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    names = (
        "ddp_adamw",
        "ddp_own_buffers",
        "fsdp_tied",
        "fsdp_bf16_model",
        "fsdp_row_statistics",
        "loader_with_workers",
    )
    cases = {name: functools.partial(settings.resumes, settings.PAIR[name], "process") for name in names}
    return groups.run_cases(cases, path)


def test_setting_whose_ranks_have_processes_that_write_resumes_exactly(tmp_path: Path) -> None:
    """One file and shards, states of each rank's own, loader workers that are forked meanwhile: the same."""
    _check(groups.results(2, _by_process, tmp_path))


@pytest.mark.parametrize("names", _chunks("PAIR", 2))
def test_setting_of_two_ranks_resumes_exactly(tmp_path: Path, names: tuple[str, ...]) -> None:
    """DDP and FSDP2 in every kind: the losses after the resume and the whole state are those of the run."""
    _check(groups.results(2, _all, tmp_path, "PAIR", names))


def test_setting_of_four_ranks_resumes_exactly(tmp_path: Path) -> None:
    """Meshes of two dimensions, tensor parallel, experts: the same."""
    _check(groups.results(4, _all, tmp_path, "FOUR", tuple(settings.FOUR)))


# -- one rank that is not like the others ------------------------------------------------------------------------------


def _slow(path: Path, async_save: Any) -> Any:
    """Save while one rank takes longer for its part than a rank is waited for that does not come."""
    made = settings.PAIR["fsdp_tied"]()

    def late(operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == "sync" and settings.rank() == 1:
            time.sleep(3)
        return call()

    options: Any = {"async_save": async_save, "save_on_exit": False, "ranks": safeckpt.Ranks(1.0)}
    with intercept(late), settings.manager_of(made.components, path, **options) as manager:
        for number in (1, 2):
            made.step(number)
            if settings.rank() == 1:
                time.sleep(0.5)
            manager.save(number)
        manager.wait()
        return [one.step for one in manager.checkpoints()]


@pytest.mark.parametrize("async_save", [False, True, "process"])
def test_rank_that_is_slow_is_waited_for(tmp_path: Path, async_save: Any) -> None:
    """It comes late to the call and takes long for its write; both saves are committed on all ranks."""
    assert groups.results(2, _slow, tmp_path, async_save) == [[1, 2], [1, 2]]


def _drawing(path: Path) -> Any:
    """Draw behind `end_step` on one rank, and return what was said and the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    data = torch.utils.data.TensorDataset(torch.zeros(12, 4))
    loader = safeckpt.ResumableLoader(torch.utils.data.DataLoader(data, batch_size=2), seed=0)
    parts = {"model": model, "loader": loader}
    with settings.manager_of(parts, path, save_every=2) as manager, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in loader.epochs(2):
            for _ in loader:
                manager.end_step(manager.step + 1)
                if settings.rank() == 1:
                    torch.rand(1)
    return [str(one.message).partition(":")[0] for one in told], manager.step


def test_draw_behind_the_end_of_a_step_is_told_by_the_rank_that_draws(tmp_path: Path) -> None:
    """It is that rank's script that is wrong; the others are told nothing, and wait for nothing."""
    assert groups.results(2, _drawing, tmp_path) == [
        ([], 12),
        (["end_step was not the last statement of the body"], 12),
    ]


# -- stages in other layouts -------------------------------------------------------------------------------------------


def _stage(path: Path, stages: int, seed: int, step: int) -> Any:
    """Restore on so many stages, and return what this rank has of the whole, by name; train if there is nothing yet."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (stages, size // stages), mesh_dim_names=("stage", "data"))
    first = torch.distributed.get_rank() // (size // stages) * (4 // stages)
    model = settings.stack(first, first + 4 // stages, mesh["data"], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = {"model": model, "optimizer": optimizer}
    with warnings.catch_warnings(), settings.manager_of(parts, path, save_on_exit=False) as manager:
        warnings.simplefilter("ignore")
        if manager.restore() is None:
            for number in (1, 2):
                x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
                model(x).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        manager.save(step)
        again = manager.save(step).step == step  # compared with what was written
    found = {name: settings.whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": settings.whole(value) for key, value in optimizer.state[p].items()}
    return found, again


def _alone(path: Path) -> Any:
    model = settings.Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(), settings.manager_of({"model": model, "optimizer": optimizer}, path) as manager:
        warnings.simplefilter("ignore")
        manager.restore()
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return found


def test_stages_move_to_other_numbers_of_stages_and_ranks(tmp_path: Path) -> None:
    """2 stages x 2 ranks -> 1 x 4 -> 4 x 1 -> 1 x 2 -> 2 x 1 -> one process: every tensor and moment, by name."""
    wanted: dict[str, torch.Tensor] = {}
    for step, (size, stages) in enumerate([(4, 2), (4, 1), (4, 4), (2, 1), (2, 2)], 1):
        for found, again in groups.results(size, _stage, tmp_path, stages, step, step):
            assert again
            for name, tensor in found.items():
                assert torch.equal(wanted.setdefault(name, tensor), tensor), (size, stages, name)
        assert len(wanted) == 4 * 4 * 4
    (found,) = groups.results(1, _alone, tmp_path)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    loaded = safeckpt.load(tmp_path / "step-00000005")
    assert all(torch.equal(wanted[name], tensor) for name, tensor in loaded["model"].items())


def _surplus(path: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
    rank = torch.distributed.get_rank()
    parts = {"model": settings.stack(rank, rank + 1, mesh["data"])}
    with settings.manager_of(parts, path) as manager:
        return outcome(manager.restore)


def test_stages_without_a_layer_are_refused(tmp_path: Path) -> None:
    """What no rank has is not left out in silence; the error names it."""
    groups.results(2, _stage, tmp_path, 2, 0, 1)
    for found in groups.results(2, _surplus, tmp_path):
        assert found["error"] in ("StateMismatchError", "ComponentMismatchError"), found


def _averaged(path: Path) -> Any:
    def built(stages: int, seed: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (stages, 2 // stages), mesh_dim_names=("stage", "data"))
        first = torch.distributed.get_rank() * (stages - 1) * 2
        model = settings.stack(first, first + 4 // stages, mesh["data"], seed)
        return {"model": model, "average": {name: p.detach().clone() for name, p in model.named_parameters()}}

    saved, same, other = built(2, 1), built(2, 2), built(1, 3)
    with settings.manager_of(saved, path) as manager:
        manager.save(1)
    with settings.manager_of(same, path) as manager:
        restored = outcome(manager.restore)
    with settings.manager_of(other, path) as manager:
        refused = outcome(manager.restore)
    wanted = saved["average"].items()
    return restored, all(torch.equal(settings.whole(same["average"][k]), settings.whole(p)) for k, p in wanted), refused


def test_shards_in_a_dict_of_a_stage_are_for_that_stage(tmp_path: Path) -> None:
    """An average of each stage comes back to it; in other stages it is refused, and never half of it taken."""
    for restored, equal, refused in groups.results(2, _averaged, tmp_path):
        assert restored["error"] is None, restored
        assert equal
        assert refused["error"] == "StateMismatchError", refused
        assert "average: it holds shards of another stage" in refused["text"]


# -- one layout after the other ----------------------------------------------------------------------------------------


def _link(path: Path, kind: str, step: int) -> Any:
    """Restore in a layout, save there, and return the whole state by name; train if there is nothing yet."""
    model = settings.laid_out(kind, seed=step)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    parts = {"model": model, "optimizer": optimizer, "average": {"shadow": list(average.values())}}
    with warnings.catch_warnings(), settings.manager_of(parts, path, save_on_exit=False) as manager:
        warnings.simplefilter("ignore")
        if manager.restore() is None:
            model(torch.ones(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.save(step)
    names = [name.removeprefix("module.") for name in average]
    found = {f"average {name}": settings.whole(one) for name, one in zip(names, average.values(), strict=True)}
    for name, p in zip(names, model.parameters(), strict=True):
        found[name] = settings.whole(p)
        found |= {f"{name}.{key}": settings.whole(value) for key, value in optimizer.state[p].items()}
    return found


def test_state_goes_through_a_chain_of_layouts(tmp_path: Path) -> None:
    """FSDP2, one process, DDP, HSDP, FSDP2 with tensor parallel, other numbers of ranks: never a bit less."""
    chain = [(4, "fsdp"), (1, "alone"), (2, "ddp"), (4, "hsdp"), (3, "fsdp"), (3, "ddp"), (4, "2d"), (2, "fsdp")]
    wanted: dict[str, torch.Tensor] = {}
    for step, (size, kind) in enumerate(chain, 1):
        for found in groups.results(size, _link, tmp_path, kind, step):
            assert found.keys() == (wanted or found).keys()
            for name, tensor in found.items():
                assert torch.equal(wanted.setdefault(name, tensor), tensor), (size, kind, name)


def _statistics_of_one_process(path: Path) -> Any:
    """Restore the statistics of a run that was whole, without them and with them in the live optimizer."""
    torch.manual_seed(3)
    model = settings.fsdp(settings.net())
    made = settings.trained(model, settings.RowStatistics(model.parameters()))
    with warnings.catch_warnings(), settings.manager_of(made.components, path, save_on_exit=False) as manager:
        warnings.simplefilter("ignore")
        before = [settings.whole(p) for p in model.parameters()]
        refused = outcome(manager.restore)
        same = all(torch.equal(one, settings.whole(p)) for one, p in zip(before, model.parameters(), strict=True))
        made.step(9)
        restored = outcome(manager.restore)
        state = made.components["optimizer"].state[model.head.weight]
        return refused, same, restored["error"], settings.whole(state["row"]), settings.whole(state["column"])


def _save_whole(path: Path) -> Any:
    model = settings.net()
    made = settings.trained(model, settings.RowStatistics(model.parameters()))
    with settings.manager_of(made.components, path) as manager:
        made.step(1)
        manager.save(1)
    state = made.components["optimizer"].state[model.head.weight]
    return state["row"], state["column"]


def test_statistics_of_a_run_without_shards_are_never_taken_for_parts(tmp_path: Path) -> None:
    """A fresh optimizer does not say how they lie: an early error; one that has them gets its parts, exactly."""
    ((row, column),) = groups.results(1, _save_whole, tmp_path)
    for refused, same, error, found_row, found_column in groups.results(2, _statistics_of_one_process, tmp_path):
        assert refused["error"] == "StateMismatchError"
        assert "optimizer.model.embed.weight.row: it is whole in the checkpoint, [11, 1]" in refused["text"]
        assert "Make one optimizer step before restore()" in refused["text"]
        assert same
        assert error is None
        assert torch.equal(found_row, row)
        assert torch.equal(found_column, column)


# -- faults on one rank that only this kind of state can have ----------------------------------------------------------


def _moment_of_one_rank(path: Path) -> Any:
    made = settings.PAIR["fsdp_row_statistics"]()
    with settings.manager_of(made.components, path, save_on_exit=False) as manager:
        made.step(1)
        manager.save(1)
        made.step(2)
        if torch.distributed.get_rank() == 1:
            state = made.components["optimizer"].state[made.components["model"].head.weight]
            state["row"].to_local()[0] = float("nan")
        refused = outcome(lambda: manager.save(2))
        manager.rollback(changed=True)
        return refused, made.step(2), outcome(lambda: manager.save(2))


def test_nan_in_a_statistic_of_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    """The error names rank and tensor, and after the rollback the run goes on."""
    for refused, loss, saved in groups.results(2, _moment_of_one_rank, tmp_path):
        assert refused["error"] == "NonFiniteError"
        assert refused["rank"] == 1
        assert refused["tensors"] == ["optimizer.model.head.weight.row"]
        assert math.isfinite(loss)
        assert saved["error"] is None
