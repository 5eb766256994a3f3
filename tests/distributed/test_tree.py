"""The tree of ranks: how many agreements a call takes, who is named when a rank in its middle is gone, sub-groups."""

from __future__ import annotations

import collections
import operator
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import safeckpt
from safeckpt.distributed.agreement import Agreements
from safeckpt.distributed.links import children_of, parent_of, ranks_below
from safeckpt.distributed.rank_group import RankGroup
from safeckpt.run import writers
from tests.distributed import groups
from tests.distributed.scenarios import outcome
from tests.distributed.training import Kind, Run, manager_of

SECONDS = 1.0  # how long a rank that hangs is waited for


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64, 1000])
def test_tree_reaches_every_rank_over_few_steps(size: int) -> None:
    """Each rank has one parent, at most log2(size) children, and what is below it follows it."""
    for rank in range(size):
        children = children_of(rank, size)
        assert len(children) <= size.bit_length()
        assert all(parent_of(child) == rank for child in children)
        below = [rank, *(one for child in children for one in ranks_below(child, size))]
        assert below == list(ranks_below(rank, size))


def _counted(path: Path, kind: Kind, options: dict[str, Any]) -> Any:
    """Count the agreements of each call, after what happens once."""
    run = Run(kind)
    counts: collections.Counter[str] = collections.Counter()
    real = RankGroup.section
    at = ""

    def section(self: RankGroup, *args: Any, **kwargs: Any) -> Any:
        in_background = threading.current_thread() is not threading.main_thread()
        counts[f"{at} in the background" if in_background else at] += 1
        return real(self, *args, **kwargs)

    with manager_of(run, path / "run", **options) as manager:
        run.train(manager, 1)
        manager.save(1)
        manager.wait()
        RankGroup.section = section  # type: ignore[method-assign]
        at = "save"
        manager.save(2)
        manager.wait()
        at = "again"
        manager.save(2)
        at = "restore"
        manager.restore()
        at = "named"
        manager.restore(step=1)
        RankGroup.section = real  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize(
    ("kind", "options", "of_a_save"),
    [
        ("ddp", {}, {"save": 2}),
        pytest.param("ddp", {"async_save": True}, {"save": 1, "save in the background": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp", {}, {"save": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp", {"async_save": True}, {"save": 1, "save in the background": 2}, marks=pytest.mark.slow),
    ],
)
def test_few_agreements_are_made(
    tmp_path: Path, kind: Kind, options: dict[str, Any], of_a_save: dict[str, int]
) -> None:
    """Three in a save and two in a restore, or fewer; behind training where it goes on: a way up and down the tree."""
    for counts in groups.results(2, _counted, tmp_path, kind, options):
        assert counts == {**of_a_save, "again": 3, "restore": 2, "named": 2}


def _gone_in_the_middle(path: Path, how: str) -> Any:
    """Rank 2, over which rank 3 talks to rank 0, ends, stops, or does not come."""
    group = RankGroup(60.0)
    with group.section("counting", operator.add) as section:
        section.answer = 1
    assert section.result == 4
    torch.distributed.barrier()
    group._agreements.timeout_seconds = SECONDS
    if group.rank == 2:
        if how == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        while len(list(path.glob("ended-*"))) < 3:
            time.sleep(0.01)
        return None

    def agree() -> None:
        with group.section("something"):
            pass

    found = outcome(agree), outcome(agree)
    (path / f"ended-{group.rank}").touch()
    if group.rank == 0:
        while len(list(path.glob("ended-*"))) < 3:
            time.sleep(0.01)
        (path / "all").touch()
    return found


@pytest.mark.parametrize("how", ["ends", "does not come"])
def test_rank_in_the_middle_of_the_tree_is_named_everywhere(tmp_path: Path, how: str) -> None:
    """Above it and below it: the same class, the same rank, in bounded time; and again at the next call."""
    ended = groups.run_all(4, _gone_in_the_middle, tmp_path, how)
    for rank in (0, 1, 3):
        for found in groups.answer(ended[rank]):
            assert found["error"] == "RankLostError"
            assert ("rank 2 was lost" if how == "ends" else "rank 2 did not answer within 1 seconds") in found["text"]
            assert found["seconds"] < 15


def _busy(path: Path) -> Any:
    group = RankGroup(SECONDS)
    with group.section("writing", operator.add) as section:
        if group.rank == 1:
            time.sleep(3 * SECONDS)  # longer than a rank is waited for that does not come
        section.answer = 1
    group.close()
    return section.result


def test_rank_that_is_at_its_part_is_waited_for(tmp_path: Path) -> None:
    """A write that takes longer than the timeout is no lost rank."""
    assert groups.results(3, _busy, tmp_path) == [3, 3, 3]


def _in_halves(path: Path) -> Any:
    """Two managers on two groups, and one on the first group alone."""
    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    rank = torch.distributed.get_rank()
    half = rank // 2
    torch.manual_seed(half)
    model = torch.nn.Linear(3, 3)
    ranks = safeckpt.Ranks(20.0, process_group=halves[half])
    with safeckpt.CheckpointManager(path / f"half-{half}", {"model": model}, ranks=ranks) as manager:
        manager.save(1 + half)
        before = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        restored = manager.restore()
        assert restored is not None
        same = torch.equal(before, model.weight)
    if half == 0:
        with safeckpt.CheckpointManager(path / "alone", {"model": model}, ranks=ranks) as manager:
            manager.save(7)
    wrong = safeckpt.CheckpointManager(
        path / "wrong", {"model": model}, ranks=safeckpt.Ranks(20.0, process_group=halves[1 - half])
    )
    return restored.step, same, outcome(lambda: wrong.save(1))["error"]


def test_groups_that_are_not_the_world_save_by_themselves(tmp_path: Path) -> None:
    """Two disjoint groups with two directories; one group while the others train on; a foreign group is refused."""
    seen = groups.results(4, _in_halves, tmp_path)
    assert seen == [(1, True, "ValueError")] * 2 + [(2, True, "ValueError")] * 2
    newest = safeckpt.latest(tmp_path / "alone")
    assert newest is not None
    assert newest.step == 7


def _told_to_end(path: Path) -> Any:
    run = Run("ddp")
    manager = manager_of(run, path / "run", stop_signals=(signal.SIGTERM,))
    manager.save(1)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while manager._run.group._agreements.lost is None:  # type: ignore[attr-defined]
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    return "lives"


def test_survivor_of_a_lost_rank_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """A stop signal asks for a checkpoint only as long as one can be written."""
    survivor, _ = groups.run_all(2, _told_to_end, tmp_path)
    assert survivor.signal == signal.SIGTERM


def _refusal_between(path: Path) -> Any:
    """A write in the background finds NaN; steps end before anybody asks how it went."""
    run = Run("ddp")
    with manager_of(run, path / "run", async_save=True, ranks=safeckpt.Ranks(20.0, agree_every=50)) as manager:
        for step in range(1, 5):  # until the ranks agree every 50 steps
            manager.end_step(step, loss=0.5)
        manager.save(4)
        manager.wait()
        real = manager._saver._commit
        error = safeckpt.NonFiniteError(step=5, tensors=[])

        def refuse(*_: Any) -> Any:
            raise error

        manager._saver._commit = refuse  # type: ignore[method-assign]
        manager.save(5)
        while manager._saver._background.busy:
            time.sleep(0.01)
        manager._saver._commit = real  # type: ignore[method-assign]
        manager.end_step(6, loss=0.5)
        refused = outcome(manager.wait)
        noted = manager._run.timeline.refusal
        assert noted is not None
        return refused["error"], refused["step"], noted.step, manager.rollback(changed=True).step


def test_refusal_of_a_background_write_is_not_forgotten(tmp_path: Path) -> None:
    """On every rank it counts until the caller has got it, whatever steps end meanwhile."""
    assert groups.results(2, _refusal_between, tmp_path) == [("NonFiniteError", 5, 5, 4)] * 2


def _copy_that_fails(path: Path, kind: Kind) -> Any:
    """One rank has no memory for its copy."""
    run = Run(kind)

    def copy(*_: Any) -> Any:
        raise MemoryError("no room for it")

    with manager_of(run, path / "run", async_save=True) as manager:
        run.train(manager, 1)
        manager.save(1)
        manager.wait()
        staging = manager._saver._staging
        assert staging is not None
        if run.rank == 1:
            staging.copy = copy  # type: ignore[method-assign]
        run.step(2)
        pending = outcome(lambda: manager.save(2))
        failed = outcome(manager.wait)
        torch.distributed.barrier()
        left = sorted(one.name for one in (path / "run").glob(".step-*"))
        if run.rank == 1:
            del staging.copy
        again = outcome(lambda: manager.save(2)), outcome(manager.wait)
        return pending["error"], failed, left, [one["error"] for one in again], manager.rollback(changed=True).step


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_copy_that_fails_on_one_rank_is_told_on_all_at_the_same_call(tmp_path: Path, kind: Kind) -> None:
    """Nothing is written, no rank is ahead of the others, and the next save works."""
    for pending, failed, left, again, step in groups.results(2, _copy_that_fails, tmp_path, kind):
        assert pending is None
        assert failed["error"] in ("MemoryError", "RankFailedError")
        assert "no room for it" in failed["text"]
        assert left == []
        assert again == [None, None]
        assert step == 2


def _packing_that_fails(path: Path, options: dict[str, Any]) -> Any:
    """One rank has no memory for what it writes of its own, while the other one is writing."""
    run = Run("fsdp")
    real = writers.pack_rank_state

    def pack(_: Any) -> Any:
        raise MemoryError("no room for it")

    with manager_of(run, path / "run", ranks=safeckpt.Ranks(60.0), **options) as manager:
        run.train(manager, 1)
        manager.save(1)
        manager.wait()
        if run.rank == 1:
            writers.pack_rank_state = pack
        failed = outcome(lambda: (manager.save(2), manager.wait()))
        torch.distributed.barrier()
        left = sorted(one.name for one in (path / "run").glob(".step-*"))
        writers.pack_rank_state = real
        again = outcome(lambda: (manager.save(3), manager.wait()))
        return failed, left, again["error"], manager.latest().step


@pytest.mark.parametrize("options", [{"async_save": True}, pytest.param({}, marks=pytest.mark.slow)])
def test_rank_that_cannot_begin_to_write_is_named_on_all(tmp_path: Path, options: dict[str, Any]) -> None:
    """Nobody waits for it in a collective; nothing is committed or left behind, and the next save works."""
    seen = groups.results(2, _packing_that_fails, tmp_path, options)
    assert [failed["error"] for failed, *_ in seen] == ["RankFailedError", "MemoryError"]
    assert seen[0][0]["rank"] == 1
    for failed, *rest in seen:
        assert "no room for it" in failed["text"]
        assert rest == [[], None, 3]


def _interrupted(path: Path, victim: int, at: str) -> Any:
    """Ctrl-C comes to one rank between the parts of a section; it handles that and closes."""
    group = RankGroup(SECONDS)
    interrupted = threading.Event()

    def section() -> None:
        with group.section("counting"):
            pass

    def interrupt(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    section()
    if group.rank == victim:
        owner = Agreements if at == "end" else RankGroup
        with mock.patch.object(owner, at, interrupt):
            found = outcome(section)
        closing = threading.Thread(target=group.close, daemon=True)
        closing.start()
        closing.join(30)
        return found["error"], interrupted.is_set(), closing.is_alive()
    return outcome(section)["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "at"), [(0, "end"), (1, "end"), (0, "_outcome")])
def test_interrupt_between_the_parts_of_a_section_leaves_nobody_waiting(tmp_path: Path, victim: int, at: str) -> None:
    """The rank itself closes, and the other is told that it is lost."""
    seen = groups.results(2, _interrupted, tmp_path, victim, at)
    assert seen[victim] == ("KeyboardInterrupt", True, False)
    assert seen[1 - victim] == "RankLostError"


def _mirror_on_one_rank(path: Path, rank: int) -> Any:
    run = Run("fsdp")
    options = {"mirror": f"file://{path / 'store'}"} if torch.distributed.get_rank() == rank else {}

    def begin() -> None:
        with manager_of(run, path / "run", **options) as manager:
            manager.save(1)

    return outcome(begin)["error"], (path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_mirror_on_one_rank_alone_is_refused(tmp_path: Path, rank: int) -> None:
    """The parts of the others would never come to the store; nothing is written."""
    pytest.importorskip("obstore")
    assert groups.results(2, _mirror_on_one_rank, tmp_path, rank) == [("RanksDisagreeError", False)] * 2


def _wrong_loss(path: Path) -> Any:
    run = Run("ddp")
    with manager_of(run, path / "run") as manager:

        def steps() -> None:
            for step in range(1, 60):
                loss = run.step(step)
                manager.end_step(step, loss="none" if (torch.distributed.get_rank(), step) == (1, 5) else loss)

        in_steps = outcome(steps)
        in_save = outcome(lambda: manager.save(90, loss="none" if torch.distributed.get_rank() == 1 else 0.5))
        return in_steps["error"], in_save["error"], outcome(lambda: manager.save(91))["step"]


def test_argument_that_one_rank_gets_wrong_is_raised_on_all(tmp_path: Path) -> None:
    """In a save at once, in a step at the next agreement; nobody waits, and the next save works."""
    assert groups.results(2, _wrong_loss, tmp_path) == [("TypeError", "TypeError", 91)] * 2


def _wrong_in_a_save(path: Path) -> Any:
    """Each of them alone gets an argument wrong, after a batch that no step has ended."""
    run = Run("ddp")
    found = []
    with manager_of(run, path / "run") as manager:
        for step, wrong in enumerate(({"loss": "none"}, {"metrics": {"accuracy": "high"}}, {"metrics": 3}), start=1):
            run.step(step)
            given: dict[str, Any] = wrong if torch.distributed.get_rank() == 1 else {}
            refused = outcome(lambda step=step, given=given: manager.save(step, **given))
            found.append((refused["error"] is not None, run.loader.since_step))
        return found, manager.save(9).step


def test_save_that_one_rank_gets_wrong_counts_the_same_batches_on_all(tmp_path: Path) -> None:
    """The loaders of the ranks stay at one position."""
    assert groups.results(2, _wrong_in_a_save, tmp_path) == [([(True, 0)] * 3, 9)] * 2
