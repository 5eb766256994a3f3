"""`import_checkpoint`: half-finished runs of other tools go on under a manager, and what they lack is named."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt
from tests.comparing import bits
from tests.faults import Operation, contents, intercept, names_in
from tests.training import state_of

USUAL = {"model": "net", "optimizer": "opt", "scheduler": "schedule"}


class Parts:
    """What a script builds at its start."""

    def __init__(self, width: int = 8, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        x = torch.randn(40, 4)
        self.data = DataLoader(TensorDataset(x, x.sum(dim=1)), batch_size=8)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.loader = safeckpt.ResumableLoader(self.data)

    @property
    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    @property
    def states(self) -> dict[str, Any]:
        parts = {"net": self.model, "opt": self.optimizer, "schedule": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def learn(self, batch: Any) -> float:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x).squeeze(1), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def trained(self, steps: int) -> Parts:
        for _, batch in zip(range(steps), self.data, strict=False):
            self.learn(batch)
        return self


def old_file(folder: Path, steps: int = 3, **more: Any) -> Path:
    """Return a file as a script writes it with torch.save."""
    path = folder / "old.pt"
    torch.save({**Parts().trained(steps).states, "global_step": steps, **more}, path)
    return path


def restored(parts: Parts, run: Path, **options: Any) -> str:
    """Restore an imported checkpoint; return what the warning says."""
    with (
        safeckpt.CheckpointManager(run, parts.components, save_on_exit=False) as manager,
        pytest.warns(safeckpt.ImportedStateWarning) as caught,
    ):
        assert manager.restore(**options) is not None
    (warning,) = [one for one in caught if one.category is safeckpt.ImportedStateWarning]
    return str(warning.message)


def test_run_of_torch_save_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Without random numbers and with the position given, the losses are those of the run that nothing stopped."""
    straight = Parts()
    losses = [straight.learn(batch) for batch in straight.data]
    report = safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=USUAL)
    assert report.checkpoint.step == 3
    again = Parts()
    with safeckpt.CheckpointManager(tmp_path / "run", again.components, save_every=1) as manager:
        with pytest.warns(safeckpt.ImportedStateWarning):
            manager.restore()
        again.loader.seek(0, 3)
        resumed = []
        for batch in again.loader:
            resumed.append(again.learn(batch))
            manager.end_step(manager.step + 1, loss=resumed[-1])
    assert resumed == losses[3:]
    assert state_of({"model": again.model, "optimizer": again.optimizer, "scheduler": again.scheduler}) == state_of(
        {"model": straight.model, "optimizer": straight.optimizer, "scheduler": straight.scheduler}
    )


def test_checkpoint_after_the_import_is_an_ordinary_one(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The next save holds everything, and its restore says nothing."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=USUAL)
    parts = Parts()
    with safeckpt.CheckpointManager(tmp_path / "run", parts.components) as manager:
        manager.restore()
        batch = next(iter(parts.loader))
        manager.save(4, loss=parts.learn(batch))
    recwarn.clear()
    again = Parts()
    with safeckpt.CheckpointManager(tmp_path / "run", again.components) as manager:
        checkpoint = manager.restore()
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert again.loader.batch == 1
    assert not [one for one in recwarn if issubclass(one.category, safeckpt.SafeckptWarning)]


def test_rollback_before_the_first_save_is_refused_by_name(tmp_path: Path) -> None:
    """The model would go back, and the data would not; from the first save on all of it does."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=USUAL)
    parts = Parts()
    with safeckpt.CheckpointManager(tmp_path / "run", parts.components) as manager:
        with pytest.warns(safeckpt.ImportedStateWarning):
            manager.restore()
        batches = iter(parts.loader)
        manager.end_step(4, loss=parts.learn(next(batches)))
        with pytest.raises(safeckpt.NonFiniteError, match=r"Next: start the script again.*goes on from that step"):
            manager.end_step(5, loss=float("nan"))
        before = state_of(parts.components), names_in(tmp_path / "run")
        with pytest.raises(safeckpt.RollbackError, match=r"no checkpoint of its own yet: step 3 in .* was imported"):
            manager.rollback(skip_batches=1)
        assert (state_of(parts.components), names_in(tmp_path / "run")) == before
        manager.save(5, loss=parts.learn(next(batches)))
        before = state_of(parts.components)
        manager.end_step(6, loss=parts.learn(next(batches)))
        assert manager.rollback(changed=True).step == 5
        assert state_of(parts.components) == before | {"model grad": dict.fromkeys(before["model grad"])}


def test_what_was_not_saved_is_named_and_stays(tmp_path: Path) -> None:
    """Streams, loader and an optimizer that is not in the file are as the script has made them."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping={"model": "net"})
    parts = Parts(optimizer=torch.optim.SGD)
    parts.loader.seek(2, 1)
    before = state_of({"optimizer": parts.optimizer, "scheduler": parts.scheduler, "loader": parts.loader})
    text = restored(parts, tmp_path / "run")
    assert state_of({"optimizer": parts.optimizer, "scheduler": parts.scheduler, "loader": parts.loader}) == before
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1:-1] == [
        "the random streams of the process",
        "optimizer",
        "scheduler",
        "loader: the source does not tell; see loader.seek(epoch, batch)",
    ]
    assert "imported from torch.save (old.pt)" in lines[0]


@pytest.mark.parametrize(
    ("change", "mapping", "mismatch"),
    [
        (lambda: Parts(width=9), USUAL, r"model\.0\.weight: .*\[8, 4\].*\[9, 4\]"),
        (lambda: Parts(width=9), USUAL, r"optimizer: model\.0\.weight: exp_avg has shape \[8, 4\]"),
        (lambda: Parts(optimizer=torch.optim.SGD), USUAL, r"optimizer: group 0: .*betas.*no options of the live SGD"),
        (Parts, {**USUAL, "loader": "opt"}, "loader: this is not a state of a ResumableLoader"),
    ],
)
def test_wrong_mapping_is_refused_at_the_restore(
    tmp_path: Path, change: Any, mapping: dict[str, str], mismatch: str
) -> None:
    """By name, before anything has changed; with the right one the same directory can be made again."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=mapping)
    parts = change()
    before = state_of(parts.components)
    with (
        safeckpt.CheckpointManager(tmp_path / "run", parts.components) as manager,
        pytest.raises(safeckpt.StateMismatchError, match=mismatch),
    ):
        manager.restore()
    assert state_of(parts.components) == before


@pytest.mark.parametrize("is_named", [True, False], ids=["named live", "named source"])
def test_names_of_parameters_are_no_option_of_an_optimizer(is_named: bool, tmp_path: Path) -> None:
    """An optimizer that was given names takes the state of one that was not, and the other way round."""
    source, live = Parts(), Parts()
    named = live if is_named else source
    named.optimizer = torch.optim.AdamW(named.model.named_parameters(), lr=0.01)
    named.scheduler = torch.optim.lr_scheduler.StepLR(named.optimizer, 3, 0.5)
    torch.save(source.trained(3).states, tmp_path / "old.pt")
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping=USUAL, step=3)
    restored(live, tmp_path / "run")
    assert bits(live.optimizer.state_dict()["state"]) == bits(source.optimizer.state_dict()["state"])


def test_component_that_does_not_fit_can_stay_as_it_is_made(tmp_path: Path) -> None:
    """The refusal names the way on: `fresh=`, with which the run saves; the warning says that it was not restored."""
    run = tmp_path / "run"
    safeckpt.import_checkpoint(old_file(tmp_path), run, mapping=USUAL)
    parts = Parts(optimizer=torch.optim.SGD)
    with safeckpt.CheckpointManager(run, parts.components, save_on_exit=False) as manager:
        with pytest.raises(safeckpt.StateMismatchError, match=r"fresh=\(\.\.\.,\)"):
            manager.restore()
        with pytest.raises(safeckpt.StateMismatchError, match="optimizer: group 0"):
            manager.restore(fresh=("scheduler",))
    with safeckpt.CheckpointManager(run, parts.components) as manager:
        with pytest.warns(safeckpt.ImportedStateWarning, match="(?s)stays what was not saved.*\n  optimizer\n"):
            manager.restore(fresh=("optimizer", "scheduler"))
        manager.save(4)
    saved = torch.load(tmp_path / "old.pt")
    assert bits(parts.model.state_dict()) == bits(saved["net"])
    assert safeckpt.latest(run).step == 4


def test_component_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A name in the mapping that the manager does not know is an error as in any restore."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping={**USUAL, "ema": "net"})
    with (
        safeckpt.CheckpointManager(tmp_path / "run", Parts().components) as manager,
        pytest.raises(safeckpt.ComponentMismatchError) as caught,
    ):
        manager.restore()
    assert caught.value.unexpected == ("ema",)


def test_other_number_of_parameters_is_refused(tmp_path: Path) -> None:
    """An optimizer of another model has other groups."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping={"optimizer": "opt"})
    model = nn.Linear(4, 1)
    components = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with (
        safeckpt.CheckpointManager(tmp_path / "run", components) as manager,
        pytest.raises(safeckpt.StateMismatchError, match=r"groups of \[6\] parameters, the live optimizer of \[2\]"),
    ):
        manager.restore()


def test_prefixes_of_wrappers_and_tied_weights_are_no_difference(tmp_path: Path) -> None:
    """A file of DDP has `module.` before every name, one of safetensors a tied tensor only once."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
            self.head.weight = self.embed.weight

    saved = Tied()
    torch.save({"m": {"module.embed.weight": saved.embed.weight.detach()}}, tmp_path / "old.pt")
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping={"model": "m"}, step=1)
    live = Tied()
    with (
        safeckpt.CheckpointManager(tmp_path / "run", {"model": live}) as manager,
        pytest.warns(safeckpt.ImportedStateWarning),
    ):
        manager.restore()
    assert torch.equal(live.head.weight, saved.embed.weight)
    assert live.head.weight is live.embed.weight


def test_counters_generators_and_scalers_come_along(tmp_path: Path) -> None:
    """A dict of counters is filled in place, a generator's state is set."""
    generator = torch.Generator().manual_seed(5)
    torch.save(
        {"step": 2, "meters": {"best": 0.25, "seen": np.float64(3.0)}, "g": {"state": generator.get_state()}},
        tmp_path / "old.pt",
    )
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping={"counters": "meters", "noise": "g"})
    counters, noise = {"best": 0.0, "seen": 0.0}, torch.Generator()
    with (
        safeckpt.CheckpointManager(tmp_path / "run", {"counters": counters, "noise": noise}) as manager,
        pytest.warns(safeckpt.ImportedStateWarning),
    ):
        checkpoint = manager.restore()
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert counters == {"best": 0.25, "seen": 3.0}
    assert torch.equal(noise.get_state(), generator.get_state())


# -- what is refused at the import ------------------------------------------------------------------------------------


def refused(source: Path, run: Path, error: type[BaseException], text: str, **options: Any) -> None:
    before = contents(run) if run.is_dir() else {}
    with pytest.raises(error, match=text):
        safeckpt.import_checkpoint(source, run, **options)
    assert (contents(run) if run.is_dir() else {}) == before


class Memory:
    """An object with a state, such as a replay buffer."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_arrays_stay_arrays(tmp_path: Path) -> None:
    """In a dict, in an object's state, and as one entry, beside which a live container stays what it is."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    saved = {"rows": rows, "deep": [{"x": np.array(True)}], "kept": OrderedDict(rows=rows + 1)}
    torch.save({"a": saved, "b": saved, "rows": rows, "step": 1}, tmp_path / "old.pt")
    mapping = {"counters": "a", "memory": "b", "loop.rows": "rows"}
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping=mapping)
    counters: dict[str, Any] = {}
    loop, memory = {"rows": None, "last": deque([1, np.ones(2)], maxlen=4)}, Memory()
    components = {"counters": counters, "memory": memory, "loop": loop}
    with (
        safeckpt.CheckpointManager(tmp_path / "run", components) as manager,
        pytest.warns(safeckpt.ImportedStateWarning),
    ):
        manager.restore()
    assert bits(counters) == bits(memory.state) == bits(saved)
    assert bits(loop) == bits({"rows": rows, "last": deque([1, np.ones(2)], maxlen=4)})


NET = nn.Linear(2, 1).state_dict()
GROUP: dict[str, Any] = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).state_dict()["param_groups"][0]
RATE = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), 1).state_dict()


def group_of(**changes: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{**GROUP, **changes}]}


ODD: dict[str, tuple[str, Any, str]] = {
    "list for a dict": ("counters", [1, 2], "counters: the source has a list for it, not a dict"),
    "tensor for a dict": ("counters", torch.ones(2), "counters: the source has a Tensor for it, not a dict"),
    "text in a schedule": ("scheduler", {**RATE, "gamma": "x"}, "gamma is a str in the source, not a number"),
    "group of nothing": ("optimizer", {"state": {}, "param_groups": [{}]}, "the source has a group without"),
    "group that is a number": ("optimizer", {"state": {}, "param_groups": [3]}, "the source has a group without"),
    "parameters as a number": ("optimizer", group_of(params=3), "a group without a list"),
    "parameters as lists": ("optimizer", group_of(params=[[0], [1]]), "a group without a list"),
    "group without a rate": ("optimizer", {"state": {}, "param_groups": [{"params": [0, 1]}]}, "group 0: .* has no"),
    "state that is a number": ("optimizer", {**group_of(), "state": {0: 3}}, r"model\.weight: its state .* int"),
    "bytes of another size": ("noise", torch.zeros(3, dtype=torch.uint8), "noise: .* is no state of a Generator"),
    "number for bytes": ("noise", {"state": 5}, "noise: .* is no state of a Generator"),
    "entry of an optimizer": ("optimizer.lr", 0.5, r"optimizer: lr cannot be imported alone into a optimizer"),
    "rate that is NaN": ("optimizer", group_of(lr=float("nan")), r"param_groups\.0\.lr: 1 NaN.*, in the source"),
    "NaN of an object": ("memory", {"best": float("nan")}, r"memory\.best: 1 NaN.*, in the source"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_state_is_refused_at_the_restore_and_nothing_has_changed(case: str, tmp_path: Path) -> None:
    """Each in one error that says how to go on; what fits can be restored by name."""
    name, state, text = ODD[case]
    torch.save({"net": NET, "odd": state}, tmp_path / "old.pt")
    run = tmp_path / "run"
    safeckpt.import_checkpoint(tmp_path / "old.pt", run, mapping={"model": "net", name: "odd"}, step=1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    components = {
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "counters": {"n": 0}, "memory": Memory(), "noise": torch.Generator(),
    }  # fmt: skip
    before, there = state_of(components), contents(run)
    manager = safeckpt.CheckpointManager(run, components)
    with pytest.raises(safeckpt.StateMismatchError, match=text) as caught:
        manager.restore()
    assert "into a directory of its own" in str(caught.value)
    assert (state_of(components), contents(run)) == (before, there)
    with pytest.warns(safeckpt.ImportedStateWarning):
        manager.restore(only=("model",))
    assert torch.equal(model.weight, NET["weight"])


def test_states_of_generators_as_torch_gives_them_come_along(tmp_path: Path) -> None:
    """The bytes alone, as `torch.get_rng_state` returns them."""
    saved, live = torch.Generator().manual_seed(3), torch.Generator()
    torch.save({"noise": saved.get_state()}, tmp_path / "old.pt")
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping={"noise": "noise"}, step=1)
    manager = safeckpt.CheckpointManager(tmp_path / "run", {"noise": live})
    with pytest.warns(safeckpt.ImportedStateWarning):
        manager.restore()
    assert torch.equal(live.get_state(), saved.get_state())


def test_component_beside_its_own_entries_is_refused(tmp_path: Path) -> None:
    """Which of the two was meant depended on their order."""
    torch.save({"c": {"n": 1}, "z": 2}, tmp_path / "old.pt")
    for mapping in ({"c": "c", "c.z": "z"}, {"c.z": "z", "c": "c"}):
        refused(tmp_path / "old.pt", tmp_path / "run", ValueError, "'c' is all of a component and", mapping=mapping)
    refused(tmp_path / "old.pt", tmp_path / "run", ValueError, "no name of a component", mapping={"c.": "z"})


def test_import_that_cannot_be_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    """Each with what to do."""
    path, run = old_file(tmp_path), tmp_path / "run"
    text = r"\(--map model=key, in Python mapping=\{'model': 'key'\}\)\. Its keys: "
    refused(path, run, ValueError, text + "net, opt, schedule, global_step")
    refused(path, run, safeckpt.ComponentMismatchError, "nett", mapping={"model": "nett"})
    refused(path, run, ValueError, "mapping is empty", mapping={})
    refused(path, run, TypeError, "mapping must be", mapping={"model": 3})
    refused(path, run, ValueError, "'rng' is no name", mapping={"rng": "net"})
    refused(path, run, ValueError, "step must be an int", mapping=USUAL, step=-1)
    refused(tmp_path / "none.pt", run, FileNotFoundError, "none", mapping=USUAL)
    with pytest.raises(ValueError, match="a file or a folder here"):
        safeckpt.import_checkpoint("s3://bucket/x", run, mapping=USUAL)
    torch.save({"net": Parts().model.state_dict()}, tmp_path / "bare.pt")
    refused(
        tmp_path / "bare.pt",
        run,
        ValueError,
        r"not tell its step: .*\(--step N, in Python step=N\)",
        mapping={"model": "net"},
    )
    torch.save([1, 2], tmp_path / "list.pt")
    refused(tmp_path / "list.pt", run, ValueError, "holds a list", mapping=USUAL)
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", run, ValueError, "neither a folder of Hugging Face's Trainer")


def test_what_cannot_be_the_state_of_a_component_is_refused(tmp_path: Path) -> None:
    """A number is no state, and the usual names stand for what they say; all faults are named at once."""
    path, run = old_file(tmp_path, scaler=torch.amp.GradScaler("cpu").state_dict(), note="text"), tmp_path / "run"
    swapped = r"model: 'opt' is the state of an optimizer; .*\n  optimizer: 'net' is tensors by name"
    refused(path, run, ValueError, swapped, mapping={"model": "opt", "optimizer": "net"})
    for name, key, text in (
        ("model", "global_step", r"is int 3, which is no state; .*counters\.global_step=global_step"),
        ("anything", "note", "is str 'text', which is no state"),
        ("anything", "opt.param_groups.0.lr", r"is float 0\.005, .*counters\.lr=opt\.param_groups\.0\.lr"),
        ("model_2", "schedule", "is the state of a scheduler"),
        ("optimizer0", "scaler", "is the state of a scaler"),
        ("optimizer_1", "net", "is tensors by name"),
        ("scheduler", "opt", "is the state of an optimizer"),
    ):
        refused(path, run, ValueError, text, mapping={name: key})
    report = safeckpt.import_checkpoint(path, run, mapping={"counters.step": "global_step", "teacher": "net"})
    assert report.contents == {"counters.step": "int 3", "teacher": "9 tensors, 332 B"}


@pytest.mark.parametrize("name", ["scaler", "scheduler", "scheduler_2"])
def test_tensors_by_name_may_be_the_state_of_a_part_of_ones_own(name: str, tmp_path: Path) -> None:
    """A scheduler or scaler may keep its values in tensors; only an optimizer has groups beside them."""
    torch.save({"part": {"scale": torch.ones(1), "count": torch.tensor(3)}}, tmp_path / "old.pt")
    report = safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping={name: "part"}, step=3)
    assert report.contents == {name: "2 tensors, 12 B"}


def test_report_says_what_was_taken(tmp_path: Path) -> None:
    """The path as it can be opened, and of each component what a person can check."""
    text = str(safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=USUAL))
    first, *lines = text.splitlines()
    assert Path(first.partition(": step 3 of old.pt")[0]).is_file()
    assert re.fullmatch(r"  model <- net: 9 tensors, \S+ B", lines[0])
    assert re.fullmatch(r"  optimizer <- opt: the state of an optimizer, 18 tensors, \S+ B, at step 3", lines[1])
    assert re.fullmatch(r"  scheduler <- schedule: the state of a scheduler, \d+ plain values", lines[2])


def test_other_step_than_the_optimizer_has_counted_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A person may be right, so it is a warning; where both say the same there is none."""
    path = old_file(tmp_path)
    safeckpt.import_checkpoint(path, tmp_path / "run", mapping=USUAL)
    safeckpt.import_checkpoint(path, tmp_path / "net", mapping={"model": "net"}, step=9)
    assert not recwarn
    with pytest.warns(safeckpt.ImportedStateWarning, match="as step 9, and optimizer has counted 3"):
        safeckpt.import_checkpoint(path, tmp_path / "nine", mapping=USUAL, step=9)
    torch.save({**Parts().trained(3).states, "step": 1}, path)
    with pytest.warns(safeckpt.ImportedStateWarning, match="as step 1, and optimizer has counted 3"):
        safeckpt.import_checkpoint(path, tmp_path / "one", mapping=USUAL)


def test_state_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """No run begins with NaN; a mask is infinite by nature."""
    states = Parts().trained(2).states
    states["net"]["0.weight"][1, 2] = float("nan")
    torch.save({**states, "step": 2}, tmp_path / "old.pt")
    with pytest.raises(safeckpt.NonFiniteError) as caught:
        safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping=USUAL)
    assert [one.name for one in caught.value.tensors] == ["model.0.weight"]
    assert not (tmp_path / "run").exists()
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", mask.clone())

    torch.save({"net": {"mask": mask}}, tmp_path / "masked.pt")
    safeckpt.import_checkpoint(tmp_path / "masked.pt", tmp_path / "run", mapping={"model": "net"}, step=0)
    with (
        safeckpt.CheckpointManager(tmp_path / "run", {"model": Masked()}) as manager,
        pytest.warns(safeckpt.ImportedStateWarning),
    ):
        manager.restore()


def test_directory_in_use_is_not_written_into(tmp_path: Path) -> None:
    """Neither one with checkpoints nor one that a run holds; our own files are no import."""
    path, run = old_file(tmp_path), tmp_path / "run"
    safeckpt.import_checkpoint(path, run, mapping=USUAL)
    refused(path, run, safeckpt.DirectoryInUseError, "already holds", mapping=USUAL)
    refused(run / "step-00000003.pt", tmp_path / "other", ValueError, "is a checkpoint of safeckpt", mapping=USUAL)
    refused(run, tmp_path / "other", ValueError, "is of safeckpt", mapping=USUAL)
    held = tmp_path / "held"
    with safeckpt.CheckpointManager(held, Parts().components, save_every=5) as manager:
        manager.end_step(1)
        with pytest.raises(safeckpt.DirectoryLockedError):
            safeckpt.import_checkpoint(path, held, mapping=USUAL)


class Config:
    """Something that a script has put into its file."""


def test_file_that_holds_a_class_is_refused_with_the_cure(tmp_path: Path) -> None:
    """Nothing in it is built; NumPy numbers and arrays are harmless."""
    path = old_file(tmp_path, config=Config())
    with pytest.raises(safeckpt.UntrustedTypeError) as caught:
        safeckpt.import_checkpoint(path, tmp_path / "run", mapping=USUAL)
    assert "Config" in str(caught.value)
    assert "torch.save({'model': old['model']" in "".join(caught.value.__notes__)
    path = old_file(tmp_path, rng=np.random.RandomState(0).get_state(), best=np.float32(0.5), lr=np.ones(3))
    safeckpt.import_checkpoint(path, tmp_path / "run", mapping=USUAL)
    assert "step-00000003.pt" in names_in(tmp_path / "run")


def test_damaged_source_is_refused(tmp_path: Path) -> None:
    """A flipped bit is found by the checksum of its record."""
    path = old_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.find(Parts().trained(3).states["net"]["0.weight"].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)
    refused(path, tmp_path / "run", safeckpt.DamagedCheckpointError, "old.pt", mapping=USUAL)


# -- folders of trainers, as they write them --------------------------------------------------------------------------


def hugging_face(folder: Path) -> Path:
    states = Parts().trained(3).states
    folder.mkdir()
    for name, key in (("pytorch_model.bin", "net"), ("optimizer.pt", "opt"), ("scheduler.pt", "schedule")):
        torch.save(states[key], folder / name)
    torch.save({"python": None}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 0.6, "log_history": []}))
    return folder


def test_folder_of_hugging_face_needs_no_mapping(tmp_path: Path) -> None:
    """Step and position are in its trainer_state.json."""
    report = safeckpt.import_checkpoint(hugging_face(tmp_path / "checkpoint-3"), tmp_path / "run")
    assert report.checkpoint.step == 3
    assert report.unused == ("rng_state.pth",)
    text = restored(Parts(), tmp_path / "run")
    assert "loader: the source stood at epoch 0.6: loader.seek(0, round(0.6 * len(loader))) goes there" in text


def test_folder_of_hugging_face_that_is_not_whole_is_told(tmp_path: Path) -> None:
    """What stock does without a word: a missing optimizer begins anew, and is named; broken JSON is an error."""
    folder = hugging_face(tmp_path / "checkpoint-3")
    (folder / "optimizer.pt").unlink()
    safeckpt.import_checkpoint(folder, tmp_path / "run")
    assert "\n  optimizer\n" in restored(Parts(), tmp_path / "run")
    (folder / "trainer_state.json").write_text("{")
    refused(folder, tmp_path / "other", safeckpt.DamagedCheckpointError, "no state of a trainer")


def test_folder_of_accelerate_needs_a_step(tmp_path: Path) -> None:
    """It does not hold one."""
    states, folder = Parts().trained(3).states, tmp_path / "state"
    folder.mkdir()
    for name, key in (("pytorch_model.bin", "net"), ("optimizer.bin", "opt"), ("scheduler.bin", "schedule")):
        torch.save(states[key], folder / name)
    torch.save({"n": 4}, folder / "custom_checkpoint_0.pkl")
    (folder / "random_states_0.pkl").write_bytes(b"not read")
    refused(folder, tmp_path / "run", ValueError, r"its optimizer has counted 3 \(--step 3, in Python step=3\)")
    report = safeckpt.import_checkpoint(folder, tmp_path / "run", step=3)
    assert report.taken == {
        "registered": "custom_checkpoint_0", "model": "model", "optimizer": "optimizer", "scheduler": "scheduler",
    }  # fmt: skip
    assert report.unused == ("random_states_0.pkl",)


def test_file_of_lightning_needs_no_mapping(tmp_path: Path) -> None:
    """Its loops say where it was: in the middle of an epoch, or at its end."""
    states = Parts().trained(3).states
    for is_last, position in ((False, "batch 3 of epoch 1: loader.seek(1, 3)"), (True, "batch 0 of epoch 2")):
        batches = {"current": {"processed": 3}, "is_last_batch": is_last}
        loops = {
            "epoch_progress": {"current": {"ready": 2, "processed": 1 + is_last}},
            "epoch_loop.batch_progress": batches,
        }
        torch.save(
            {
                "pytorch-lightning_version": "2.6.6", "global_step": 8, "state_dict": states["net"],
                "optimizer_states": [states["opt"]], "lr_schedulers": [states["schedule"]],
                "loops": {"fit_loop": loops},
            },
            tmp_path / "last.ckpt",
        )  # fmt: skip
        report = safeckpt.import_checkpoint(tmp_path / "last.ckpt", tmp_path / f"run {is_last}")
        assert report.taken == {
            "model": "state_dict", "optimizer": "optimizer_states.0", "scheduler": "lr_schedulers.0",
        }  # fmt: skip
        assert report.position.startswith(position)
    assert position in restored(Parts(), tmp_path / "run True")


def test_other_readers_know_an_imported_file(tmp_path: Path) -> None:
    """It is an ordinary file: verified, listed, loaded, exported; a warm start takes its weights."""
    safeckpt.import_checkpoint(old_file(tmp_path), tmp_path / "run", mapping=USUAL)
    path = tmp_path / "run" / "step-00000003.pt"
    weights = Parts().trained(3).model.state_dict()
    assert safeckpt.verify(path).self_proving
    assert list(torch.load(path)) == ["model", "optimizer", "scheduler", "safeckpt"]
    assert torch.equal(safeckpt.load(path)["model"]["0.weight"], weights["0.weight"])
    safeckpt.export(path, "model", tmp_path / "model.pt")
    model = Parts().model
    safeckpt.warm_start(model, tmp_path / "run")
    assert torch.equal(model[0].weight, weights["0.weight"])
    with (
        safeckpt.CheckpointManager(tmp_path / "run", {"model": model}) as manager,
        pytest.warns(safeckpt.ImportedStateWarning),
    ):
        manager.restore(only=("model",))


def test_source_that_changes_while_it_is_read_is_found(tmp_path: Path) -> None:
    """Nothing gets its name that was not verified."""
    path, run = old_file(tmp_path), tmp_path / "run"
    at = path.read_bytes().find(Parts().trained(3).states["net"]["0.weight"].numpy().tobytes())

    def change(operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == "write":
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"changed")
        return call()

    with intercept(change), pytest.raises(safeckpt.DamagedCheckpointError, match=r"old\.pt"):
        safeckpt.import_checkpoint(path, run, mapping=USUAL)
    assert not [name for name in names_in(run) if name.startswith(("step", ".step"))]
    safeckpt.import_checkpoint(old_file(tmp_path), run, mapping=USUAL)


@pytest.mark.parametrize("saved", [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.ExponentialLR])
def test_state_of_another_scheduler_is_refused(tmp_path: Path, saved: Any) -> None:
    """Also when it has all that the live one has, and more: the class is not in such a file."""

    def made(kind: Any) -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"step_size": 30} if kind is torch.optim.lr_scheduler.StepLR else {"gamma": 0.1}
        return {"model": model, "optimizer": optimizer, "scheduler": kind(optimizer, **options)}

    states = {name: one.state_dict() for name, one in made(saved).items()}
    torch.save(states, tmp_path / "old.pt")
    mapping = {name: name for name in states}
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping=mapping, step=3)
    with safeckpt.CheckpointManager(tmp_path / "run", made(torch.optim.lr_scheduler.ExponentialLR)) as manager:
        if saved is torch.optim.lr_scheduler.ExponentialLR:
            with pytest.warns(safeckpt.ImportedStateWarning):
                assert manager.restore() is not None
        else:
            with pytest.raises(safeckpt.StateMismatchError, match="scheduler: the live ExponentialLR has no step_size"):
                manager.restore()
