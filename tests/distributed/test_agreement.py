"""What one rank cannot do, none of them does: every scenario runs in one real group, and each rank says what it saw."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import groups, scenarios
from tests.distributed.training import Kind, Run, manager_of

SHARED = (
    "nan_loss_on_one_rank_at_save", "nan_tensor_on_one_rank", "nan_loss_on_one_rank_at_a_step", "disk_full_on_rank_0",
    "interrupt_on_rank_0", "file_that_one_rank_cannot_read", "directory_of_each_rank", "other_shape_on_one_rank",
    "rotation", "rewind", "pending_gradients", "checkpoint_that_is_owed", "nothing_there",
    "refusal_of_one_rank_at_the_end", "note_that_fails_on_one_rank", "spike_on_one_rank",
)  # fmt: skip
ONLY: dict[Kind, tuple[str, ...]] = {
    "ddp": (
        "drifted_replica",
        "signal_to_one_rank",
        "time_limit_of_one_rank",
        "rename_that_is_seen_late",
        "different_calls",
    ),
    "fsdp": ("disk_full_on_rank_1", "nan_between_guard_and_write", "interrupt_when_the_thread_has_begun"),
}


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def seen(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has seen in every scenario."""

    def ask(path: Path) -> list[dict[str, Any]]:
        return groups.results(2, scenarios.all_of, path, kind, (*SHARED, *ONLY[kind]))

    return groups.once(tmp_path_factory, f"agreement-{kind}", ask)


def of(seen: list[dict[str, Any]], name: str) -> list[Any]:
    if name not in seen[0]:
        pytest.skip("is about the other kind of checkpoint")
    return groups.of(seen, name)


def test_nan_loss_on_one_rank_is_refused_by_all(seen: list[dict[str, Any]]) -> None:
    """The error is the same class everywhere and names rank and loss; nothing is written; the next save works."""
    for found, again, steps in of(seen, "nan_loss_on_one_rank_at_save"):
        assert found["error"] == "NonFiniteError"
        assert found["rank"] == 1
        assert found["step"] == 4
        assert again["error"] is None
        assert steps == [3, 5]
    assert "On rank 1: Step 4 was not saved" in of(seen, "nan_loss_on_one_rank_at_save")[0][0]["text"]


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_rollback_that_one_rank_did_not_finish_leaves_a_mixture_on_all(seen: list[dict[str, Any]], source: str) -> None:
    """A rank that came to the end knows that the others may not have; the next rollback makes it good."""
    for found in of(seen, "note_that_fails_on_one_rank"):
        failed, mixed, again, saved = found[source]
        assert (failed["error"], failed["errno"]) == ("OSError", errno.EIO)
        assert {"model", "optimizer"} <= set(mixed)
        assert (again["error"], saved["error"]) == (None, None)


def test_checkpoint_is_owed_and_paid_by_all_ranks(seen: list[dict[str, Any]]) -> None:
    """Whether a count or a signal to one rank made it due, no rank is ahead of the others, and none waits for ever."""
    owed = of(seen, "checkpoint_that_is_owed")
    assert owed[0] == owed[1]
    for due, saved, refused, stopped_at in owed:
        assert due == saved
        assert due[0] == 3
        assert refused == "RuntimeError"
        assert due[-1] == stopped_at <= 8


def test_refusal_of_one_rank_at_the_end_is_raised_on_all(seen: list[dict[str, Any]]) -> None:
    """A rank that has refused its last step does not leave the others waiting in the save at the end."""
    for found, newest in of(seen, "refusal_of_one_rank_at_the_end"):
        assert (found["error"], found["rank"], found["step"]) == ("NonFiniteError", 1, 2)
        assert newest == 1


def test_nan_in_a_tensor_of_one_rank_is_refused_by_all(seen: list[dict[str, Any]], kind: Kind) -> None:
    """Rank and tensor are named, of a sharded one as well."""
    for found, again, newest in of(seen, "nan_tensor_on_one_rank"):
        assert found["error"] == "NonFiniteError"
        assert found["rank"] == 1
        assert found["tensors"] == ["model.embed.weight"]
        assert again["error"] is None
        assert newest == 5


def test_nan_between_guard_and_write_is_refused_by_all(seen: list[dict[str, Any]]) -> None:
    """Whichever rank writes it, nothing is committed, what was written is removed, and the next save works."""
    for shard, index, left, again, newest in of(seen, "nan_between_guard_and_write"):
        assert (shard["error"], shard["rank"], shard["step"]) == ("NonFiniteError", 1, 4)
        assert shard["tensors"] == ["optimizer.model.embed.weight.exp_avg"]
        assert (index["error"], index["rank"], index["step"]) == ("NonFiniteError", 0, 5)
        assert index["tensors"] == ["optimizer.model.embed.weight.step"]
        assert left == []
        assert again["error"] is None
        assert newest == 6


def test_nan_loss_on_one_rank_between_saves_is_refused_by_all_when_they_meet(seen: list[dict[str, Any]]) -> None:
    """No rank waits for one that has raised: they go on to the save of step 8, and refuse step 5."""
    for found, at, batches, left_out, step, count in of(seen, "nan_loss_on_one_rank_at_a_step"):
        assert found["error"] == "NonFiniteError"
        assert found["rank"] == 1
        assert found["step"] == 5
        assert at == 8
        assert batches == [(0, number) for number in range(8)]
        assert left_out == [(0, 4)]
        assert (step, count) == (10, 6)


def test_full_disk_on_the_writing_rank_raises_on_all(seen: list[dict[str, Any]]) -> None:
    """With its errno; the checkpoint before is the latest, nothing is left behind, the next save works."""
    rows = of(seen, "disk_full_on_rank_0")
    assert rows[0][1]
    for found, _, left, again, newest in rows:
        assert found["error"] == "OSError"
        assert found["errno"] == 28
        assert left == []
        assert again["error"] is None
        assert newest == 5
    assert "On rank 0" in rows[1][0]["text"]


def test_full_disk_on_another_rank_raises_on_all(seen: list[dict[str, Any]]) -> None:
    """A shard that does not fit: nobody commits, and what the others have written is removed."""
    for found, left, again, newest in of(seen, "disk_full_on_rank_1"):
        assert found["error"] in ("OSError", "RankFailedError", "RuntimeError")
        assert left == []
        assert again["error"] is None
        assert newest == 5


def test_interrupt_of_a_save_whose_thread_has_begun_spares_what_it_writes(seen: list[dict[str, Any]]) -> None:
    """Rank 0 gets its KeyboardInterrupt, and the checkpoint is written all the same."""
    rows = of(seen, "interrupt_when_the_thread_has_begun")
    assert [row[0]["error"] for row in rows] == ["KeyboardInterrupt", None]
    assert [(row[1]["error"], row[2]) for row in rows] == [(None, 3), (None, 3)]


def test_interrupt_of_one_rank_ends_the_save_on_all(seen: list[dict[str, Any]]) -> None:
    """The rank itself gets its KeyboardInterrupt, the others an error that says so."""
    rows = of(seen, "interrupt_on_rank_0")
    assert [row[0]["error"] for row in rows] == ["KeyboardInterrupt", "RankFailedError"]
    assert rows[1][0]["rank"] == 0
    for _, again, newest in rows:
        assert again["error"] is None
        assert newest == 5


def test_drifted_replica_is_named(seen: list[dict[str, Any]]) -> None:
    """As a warning on rank 0 or an error on all, with rank and tensor; a restore makes the replicas equal again."""
    for rank, (found, clean, refused, newest) in enumerate(of(seen, "drifted_replica")):
        assert found[0]["error"] is None
        assert len(found[1]) == (1 if rank == 0 else 0)
        if rank == 0:
            assert "ReplicaDriftWarning: At step 4 the copies on rank(s) 1" in found[1][0]
            assert "model.head.bias" in found[1][0]
        assert clean == ({**clean[0], "error": None}, [])
        assert refused[0]["error"] == "ReplicaDriftError"
        assert "model.head.bias" in refused[0]["text"]
        assert newest == 5


def test_ranks_that_call_different_things_are_told(seen: list[dict[str, Any]]) -> None:
    """Nobody hangs, nothing is written, and the next call that is the same for all works."""
    for found, again, newest in of(seen, "different_calls"):
        assert found["error"] == "RanksDisagreeError"
        assert "saving step 2 on rank 0, saving step 3 on rank 1" in found["text"]
        assert again["error"] is None
        assert newest == 4


def test_all_ranks_restore_what_every_rank_can_read(seen: list[dict[str, Any]]) -> None:
    """One rank cannot read the newest: all take the one before; asked for by its step it is an error for all."""
    for rank, (found, named, step) in enumerate(of(seen, "file_that_one_rank_cannot_read")):
        assert found[0]["error"] is None
        assert found[0]["step"] == 1
        assert len(found[1]) == (1 if rank == 0 else 0)
        assert named["error"] == "DamagedCheckpointError"
        assert step == 1


def test_directory_that_is_not_shared_is_refused(seen: list[dict[str, Any]]) -> None:
    """A local disk for each node: an error on all ranks that says so, in bounded time."""
    for found, names in of(seen, "directory_of_each_rank"):
        assert found["error"] == "DirectoryNotSharedError"
        assert found["rank"] == 1
        assert found["seconds"] < 6
        assert names == []


def test_checkpoint_that_a_rank_sees_late_is_waited_for(seen: list[dict[str, Any]]) -> None:
    """A network file system may show a new name late."""
    for restored, saved in of(seen, "rename_that_is_seen_late"):
        assert restored["error"] is None
        assert restored["step"] == 1
        assert restored["seconds"] > 0.5
        assert saved["error"] is None


def test_signal_to_one_rank_stops_all_at_one_step(seen: list[dict[str, Any]]) -> None:
    """All save the same step, when they have met twice at the latest, and all know."""
    (saved, last), other = of(seen, "signal_to_one_rank")
    assert other == (saved, last)
    assert saved == [last]
    assert 4 <= last <= 4 + 2 * 3


def test_time_limit_of_one_rank_stops_all_at_one_step(seen: list[dict[str, Any]]) -> None:
    """The clock of one node is enough, and the steps need not be the first: all save the same one, once."""
    (saved, last), other = of(seen, "time_limit_of_one_rank")
    assert other == (saved, last)
    assert saved == [last]
    assert 1 <= last <= 1 + 2 * 3


def test_spike_on_one_rank_is_raised_on_all(seen: list[dict[str, Any]]) -> None:
    """By that rank's own median, which it has from the checkpoint; all go back and on together."""
    for found, back, good in of(seen, "spike_on_one_rank"):
        refused = [one for one in found if one["error"] is not None]
        assert [one["error"] for one in refused] == ["LossSpikeError"]
        assert "loss 25 is above 20, 2 times the median 10" in refused[0]["text"]
        assert back["step"] == 4
        assert good["error"] is None


def test_state_that_does_not_fit_on_one_rank_changes_no_rank(seen: list[dict[str, Any]]) -> None:
    """A mismatch on one rank is raised on all before the first object has changed."""
    for found, changed in of(seen, "other_shape_on_one_rank"):
        assert found["error"] == "StateMismatchError"
        assert found["rank"] == 1
        assert changed == []


def test_old_checkpoints_go_and_those_to_keep_stay(seen: list[dict[str, Any]]) -> None:
    """Directories are rotated as files are."""
    for steps in of(seen, "rotation"):
        assert steps == [10, 12, 13]


def test_checkpoints_of_a_left_timeline_are_set_aside(seen: list[dict[str, Any]], kind: Kind) -> None:
    """Going on from an older step renames the newer ones."""
    rows = of(seen, "rewind")
    assert rows[0][0] == ["aside-00000004.1" + (".pt" if kind == "ddp" else "")]
    for _, steps, step in rows:
        assert steps == [2, 3]
        assert step == 3


def test_gradients_between_micro_steps_come_back_on_every_rank(seen: list[dict[str, Any]]) -> None:
    """Each rank has its own again."""
    for count, wrong in of(seen, "pending_gradients"):
        assert count > 20
        assert wrong == []


def test_empty_directory_is_none_on_all(seen: list[dict[str, Any]]) -> None:
    """As for one process: None, and an error for a step or a rollback that needs a checkpoint."""
    for none, missing, rollback in of(seen, "nothing_there"):
        assert none["error"] is None
        assert none["step"] is None
        assert missing["error"] == "CheckpointNotFoundError"
        assert rollback["error"] == "CheckpointNotFoundError"


def _stop_in_a_group_of_one(path: Path) -> bool:
    with manager_of(Run(), path, stop_signals=(signal.SIGUSR1,)) as manager:
        signal.raise_signal(signal.SIGUSR1)
        manager.end_step(1, loss=0.5)
        return manager.stop_requested


def test_process_that_is_a_group_by_itself_is_asked_to_stop(tmp_path: Path) -> None:
    """Under `torchrun --nproc-per-node 1` a signal is a request at the end of the step, as without a group."""
    assert groups.results(1, _stop_in_a_group_of_one, tmp_path) == [True]
