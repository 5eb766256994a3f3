"""`restore` gives back the newest good checkpoint, or says why not before anything is touched."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.store import names
from tests.faults import contents, names_in
from tests.manager.helpers import (
    DAMAGES,
    asides_in,
    checkpoint_files,
    each_damage,
    events_in,
    flip,
    manager_of,
    newer_format,
    reason_pattern,
    save_steps,
    skipping,
    spoil,
    step_path,
    steps_in,
    truncate,
)
from tests.training import Marked, Run, state_of


def check_next_save_works(path: Path, *, step: int = 90) -> None:
    """Restore what can be restored, save on top of it, and read that back."""
    run = Marked()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
        with manager_of(path, run) as manager:
            manager.restore()
            run.step = step
            manager.save(step)
        run = Marked()
        with manager_of(path, run) as manager:
            restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == step


# -- nothing there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(), ("runs", "one")])
def test_restore_without_checkpoints_is_none(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """A missing or empty directory gives None, changes no object and makes no directory."""
    path = tmp_path.joinpath(*parts)
    run = Run()
    before = run.state
    with manager_of(path, run) as manager:
        assert manager.restore() is None
        assert manager.latest() is None
        assert manager.checkpoints() == ()
        assert manager.step == 0
    assert safeckpt.latest(path) is None
    assert run.state == before
    assert contents(tmp_path) == {}
    assert not parts or not path.exists()
    check_next_save_works(path)


def test_files_of_others_are_no_checkpoints(tmp_path: Path) -> None:
    """Names outside our grammar are not looked at: neither restored, nor warned about, nor in the way of a save."""
    save_steps(tmp_path / "donor", 5)
    for name in ("best.pt", "step-5.pt", "step-00000005.pt.bak", "Step-00000005.pt", ".step-00000005.pt.swp"):
        shutil.copy(step_path(tmp_path / "donor", 5), tmp_path / name)
    shutil.rmtree(tmp_path / "donor")
    before = contents(tmp_path)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        assert manager.restore() is None
        manager.save(1)
    assert before.items() <= contents(tmp_path).items()


def test_path_that_is_a_file_is_the_systems_error(tmp_path: Path) -> None:
    """A file where the directory should be is an OSError, not an empty directory."""
    (tmp_path / "file").write_text("x")
    with manager_of(tmp_path / "file", Marked()) as manager:
        with pytest.raises(NotADirectoryError):
            manager.restore()
        with pytest.raises(OSError, match="file"):
            manager.save(1)
    assert contents(tmp_path) == {"file": b"x"}


# -- the newest good one ---------------------------------------------------------------------------------------------


def test_newest_is_restored_whole(tmp_path: Path) -> None:
    """Everything comes back bit for bit in fresh objects, gradients are None, and the run goes on as before."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(3)
        manager.save(3, loss=0.5)
        run.steps(2)
        saved = manager.save(5, loss=torch.tensor(0.25), metrics={"accuracy": 0.5})
        expected, rest = run.state, run.steps(5)
    fresh = Run(seed=9)
    fresh.steps(1)
    with manager_of(tmp_path, fresh) as manager:
        checkpoint = manager.restore()
        assert checkpoint == saved
        assert manager.step == 5
    assert all(parameter.grad is None for parameter in fresh.model.parameters())
    assert fresh.state == {**expected, "model grad": fresh.state["model grad"]}
    assert fresh.steps(5) == rest


def test_checkpoint_says_what_was_saved(tmp_path: Path) -> None:
    """What `save`, `checkpoints` and `latest` give carries step, path, loss, metrics, time, size and run."""
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        first = manager.save(1, loss={"total": 1.5, "parts": [torch.tensor(1.0), 0.5]}, metrics={"a": 1})
        second = manager.save(2)
        assert manager.checkpoints() == (first, second)
        assert manager.latest() == safeckpt.latest(tmp_path) == second
    assert (first.step, first.path) == (1, tmp_path / "step-00000001.pt")
    assert first.loss == {"total": 1.5, "parts": [1.0, 0.5]}
    assert first.metrics == {"a": 1.0}
    assert first.size_bytes == first.path.stat().st_size
    assert first.created_at.utcoffset() is not None
    assert first.created_at <= second.created_at
    assert first.run_id == second.run_id
    assert second.loss is None
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(AttributeError):
        first.step = 3  # type: ignore[misc]


def test_run_keeps_its_name_over_restarts(tmp_path: Path) -> None:
    """All checkpoints that were resumed from each other have one run id; another run has another."""
    ids = []
    for step in (1, 2):
        run = Marked()
        with manager_of(tmp_path / "a", run) as manager:
            manager.restore()
            ids.append(manager.save(step).run_id)
    with manager_of(tmp_path / "b", Marked()) as manager:
        other = manager.save(1).run_id
    assert len(set(ids)) == 1
    assert other not in ids


def test_order_is_that_of_steps_not_of_time_or_text(tmp_path: Path) -> None:
    """Neither modification times nor the text of names decide which is newest."""
    save_steps(tmp_path, 9, 10, 99_999_999, 100_000_000)
    for age, step in enumerate([9, 10, 99_999_999, 100_000_000]):
        os.utime(step_path(tmp_path, step), (2_000_000_000 - age, 2_000_000_000 - age))
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        assert [checkpoint.step for checkpoint in manager.checkpoints()] == [9, 10, 99_999_999, 100_000_000]
        restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == 100_000_000


# -- walking back ----------------------------------------------------------------------------------------------------


@each_damage
def test_bad_newest_file_is_passed_over_with_one_warning(tmp_path: Path, damage: str) -> None:
    """A newest file that is not good is named with its reason, left as it is, and the one before it restored."""
    save_steps(tmp_path, 1, 2, 3)
    spoil(tmp_path, 3, damage)
    before = checkpoint_files(tmp_path)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        with skipping(step_path(tmp_path, 3), reason=reason_pattern(damage)):
            restored = manager.restore()
        assert restored is not None
        assert restored.step == run.step == manager.step == 2
        with skipping(step_path(tmp_path, 3)):
            assert manager.latest() == restored
        with skipping(step_path(tmp_path, 3)):
            assert safeckpt.latest(tmp_path) == restored
        if damage not in ("flipped", "zeroed page"):  # those show only when every byte is read
            with skipping(step_path(tmp_path, 3)):
                assert [checkpoint.step for checkpoint in manager.checkpoints()] == [1, 2]
        assert checkpoint_files(tmp_path) == before
        passed = events_in(tmp_path, "passed_over")
        assert [event["file"] for event in passed] == ["step-00000003.pt"]
        run.step = 3
        manager.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert asides_in(tmp_path) == [(3, 1)]
    check_next_save_works(tmp_path)


def test_walk_back_goes_over_all_that_are_bad(tmp_path: Path) -> None:
    """However many newer files are bad, each in another way, each has its own warning, newest first."""
    damages = [name for name in DAMAGES if name != "renamed"]
    steps = list(range(1, len(damages) + 2))
    save_steps(tmp_path, *steps)
    for step, damage in zip(steps[1:], damages, strict=True):
        spoil(tmp_path, step, damage)
    run = Marked()
    with manager_of(tmp_path, run) as manager, skipping(*(step_path(tmp_path, step) for step in reversed(steps[1:]))):
        restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == 1
    check_next_save_works(tmp_path)


@pytest.mark.parametrize("damages", [("empty",), ("flipped", "truncated", "plain torch"), ("dangling link",)])
def test_no_good_checkpoint_is_an_error_that_lists_each(tmp_path: Path, damages: tuple[str, ...]) -> None:
    """Where there are checkpoints and none is good nothing is restored, and the error has each file with its reason."""
    save_steps(tmp_path, *range(1, len(damages) + 1))
    for step, damage in enumerate(damages, 1):
        spoil(tmp_path, step, damage)
    before = checkpoint_files(tmp_path)
    run = Run()
    state = run.state
    newest_first = [step_path(tmp_path, step) for step in range(len(damages), 0, -1)]
    with manager_of(tmp_path, run) as manager:
        with pytest.raises(safeckpt.NoGoodCheckpointError) as caught, skipping(*newest_first):
            manager.restore()
        assert [path for path, _ in caught.value.rejected] == [str(path) for path in newest_first]
        assert all(reason for _, reason in caught.value.rejected)
        assert caught.value.path == str(tmp_path)
        for path in newest_first:
            assert str(path) in str(caught.value)
        assert manager.step == 0
        with pytest.raises(safeckpt.DirectoryInUseError):
            manager.save(1)
    assert run.state == state
    assert checkpoint_files(tmp_path) == before
    check_next_save_works(tmp_path / "elsewhere")


def test_newer_format_stops_the_walk(tmp_path: Path) -> None:
    """A file of a newer format raises, from every way of asking, instead of throwing progress away."""
    save_steps(tmp_path, 1, 2, 3)
    newer_format(step_path(tmp_path, 3))
    before = checkpoint_files(tmp_path)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        for ask in (manager.restore, manager.latest, manager.checkpoints, lambda: safeckpt.latest(tmp_path)):
            with pytest.raises(safeckpt.FormatVersionError) as caught:
                ask()
            assert (caught.value.found, caught.value.supported) == (2, (1,))
            assert caught.value.path == str(step_path(tmp_path, 3))
        assert run.step == 0
        assert checkpoint_files(tmp_path) == before
        restored = manager.restore(2)  # by name it can be gone back to
        assert restored is not None
        run.step = 4
        manager.save(4)
    assert steps_in(tmp_path) == [1, 2, 4]
    assert asides_in(tmp_path) == [(3, 1)]


def test_newer_format_below_a_good_file_is_not_looked_at(tmp_path: Path) -> None:
    """Only what is newer than the newest good file can stop a restore."""
    save_steps(tmp_path, 1, 2, 3)
    newer_format(step_path(tmp_path, 1))
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 3
        run.step = 4
        manager.save(4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]  # what a newer version wrote is never deleted


def test_bad_sector_is_walked_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot read the newest file any more (EIO) is a reason to walk back; a missing right is not."""
    save_steps(tmp_path, 1, 2)
    real = safeckpt.run.catalog.open_checkpoint

    def failing(number: int) -> Callable[[Any], Any]:
        def open_file(f: Any) -> Any:
            if Path(f) == step_path(tmp_path, 2):
                raise OSError(number, os.strerror(number), str(f))
            return real(f)

        return open_file

    run = Marked()
    with manager_of(tmp_path, run) as manager:
        monkeypatch.setattr(safeckpt.run.catalog, "open_checkpoint", failing(13))
        with pytest.raises(PermissionError):
            manager.restore()
        assert run.step == 0
        monkeypatch.setattr(safeckpt.run.catalog, "open_checkpoint", failing(5))
        with skipping(step_path(tmp_path, 2), reason="Input/output error"):
            restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == 1


def test_state_that_is_not_finite_is_walked_over(tmp_path: Path) -> None:
    """A file with a NaN in it, however it got there, is not restored while there is an older finite one."""
    save_steps(tmp_path, 1)
    run = Marked()
    with manager_of(tmp_path, run, guard=safeckpt.Guard(buffers=False)) as manager:
        manager.restore()
        run.step = 2
        run.poison()
        manager.save(2)
    # The guard that let it pass is on record, and judges the same way again.
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 2
    assert run.weight.value.isnan().any()
    path = step_path(tmp_path, 2)
    data = path.read_bytes()
    payload = safeckpt.load(path)
    with safeckpt.file.open_file(path) as file:
        header = file.header()
    assert header is not None
    header["guard"]["buffers"] = True
    with path.open("wb") as file:
        safeckpt.file.write_file(safeckpt.file.encode(payload), file, header=header)
    assert path.read_bytes() != data
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        with skipping(path, reason=r"not finite \(model\.value: 1 NaN"):
            restored = manager.restore()
        assert restored is not None
        assert restored.step == run.step == 1
        with pytest.raises(safeckpt.DamagedCheckpointError, match="not finite"):
            manager.restore(2)
        assert run.step == 1


@pytest.mark.parametrize("content", ["no state", "list", "no record"])
def test_crafted_file_is_walked_over(tmp_path: Path, content: str) -> None:
    """A file with a valid digest that no manager would write is damage like any other."""
    save_steps(tmp_path, 1, 2)
    path = step_path(tmp_path, 2)
    payload = safeckpt.load(path)
    with safeckpt.file.open_file(path) as file:
        header = file.header()
    assert header is not None
    if content == "no state":
        del payload["safeckpt"]
    elif content == "list":
        payload = [payload]
    else:
        header["guard"] = {"buffers": True}
    with path.open("wb") as file:
        safeckpt.file.write_file(safeckpt.file.encode(payload), file, header=header)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        with pytest.raises(safeckpt.DamagedCheckpointError):
            manager.restore(2)
        with skipping(path):
            restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == 1


class Custom:
    """A class that a user registered with torch in the run that saved."""


def test_type_that_is_not_registered_any_more_is_named(tmp_path: Path) -> None:
    """Where every file asks for an unregistered type the error names it; with the type registered it is restored."""
    run = Marked()
    run.components["counters"]["extra"] = Custom()
    with torch.serialization.safe_globals([Custom]), manager_of(tmp_path, run) as manager:
        manager.save(1)
    fresh = Marked()
    fresh.components["counters"]["extra"] = None
    with manager_of(tmp_path, fresh) as manager:
        with (
            pytest.raises(safeckpt.NoGoodCheckpointError, match="Custom"),
            skipping(step_path(tmp_path, 1), reason="Custom, which is not allowed"),
        ):
            manager.restore()
        with pytest.raises(safeckpt.UntrustedTypeError, match="Custom"):
            manager.restore(1)
        with torch.serialization.safe_globals([Custom]):
            assert manager.restore() is not None
    assert type(fresh.counters["extra"]) is Custom


# -- a step by name --------------------------------------------------------------------------------------------------


@each_damage
def test_named_step_never_becomes_another(tmp_path: Path, damage: str) -> None:
    """A bad file that was asked for by step is an error, changes nothing, and no other step is restored instead."""
    save_steps(tmp_path, 1, 2, 3)
    spoil(tmp_path, 2, damage)
    before = checkpoint_files(tmp_path)
    run = Run()
    state = run.state
    with manager_of(tmp_path, run) as manager:
        with pytest.raises((safeckpt.LoadError, OSError)) as caught:
            manager.restore(2)
        assert str(step_path(tmp_path, 2)) in str(caught.value)
        assert manager.step == 0
    assert isinstance(caught.value, safeckpt.DamagedCheckpointError | safeckpt.CheckpointNotFoundError)
    assert run.state == state
    assert checkpoint_files(tmp_path) == before


def test_missing_step_lists_those_that_are_there(tmp_path: Path) -> None:
    """A step without a file is an error that names the steps there are; so is one in a missing directory."""
    save_steps(tmp_path, 1, 2, 3)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        with pytest.raises(safeckpt.CheckpointNotFoundError, match="newest: 1, 2, 3") as caught:
            manager.restore(4)
        assert (caught.value.step, caught.value.available_steps) == (4, (1, 2, 3))
        assert caught.value.directory == str(tmp_path)
        assert isinstance(caught.value, FileNotFoundError)
        assert run.step == 0
    with manager_of(tmp_path / "none", run) as manager, pytest.raises(safeckpt.CheckpointNotFoundError):
        manager.restore(1)


# -- rewinding -------------------------------------------------------------------------------------------------------


def test_rewind_sets_newer_checkpoints_aside_at_the_next_save(tmp_path: Path) -> None:
    """After a restore of an older step the newer files keep their names until the save, then get others, and stay."""
    save_steps(tmp_path, 1, 2, 3)
    before = checkpoint_files(tmp_path)
    run = Marked()
    with manager_of(tmp_path, run, keep_last=5) as manager:
        restored = manager.restore(1)
        assert restored is not None
        assert restored.step == run.step == manager.step == 1
        assert checkpoint_files(tmp_path) == before
        run.step = 2
        new = manager.save(2)
        assert manager.latest() == new
        assert [checkpoint.step for checkpoint in manager.checkpoints()] == [1, 2]
        after = checkpoint_files(tmp_path)
        assert after["aside-00000002.1.pt"] == before["step-00000002.pt"]
        assert after["aside-00000003.1.pt"] == before["step-00000003.pt"]
        assert after["step-00000001.pt"] == before["step-00000001.pt"]
        aside = events_in(tmp_path, "set_aside")
        assert [sorted(event["files"]) for event in aside] == [["aside-00000002.1.pt", "aside-00000003.1.pt"]]
    check_next_save_works(tmp_path)


def test_rewind_that_never_saves_changes_nothing(tmp_path: Path) -> None:
    """A restore of an older step alone is no rewind: the next process finds the newest one."""
    save_steps(tmp_path, 1, 2)
    with manager_of(tmp_path, Marked()) as manager:
        manager.restore(1)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == run.step == 2
    assert asides_in(tmp_path) == []


def test_rewind_that_is_taken_back_sets_nothing_aside(tmp_path: Path) -> None:
    """Restoring the newest after an older one goes on from the newest."""
    save_steps(tmp_path, 1, 2)
    run = Marked()
    with manager_of(tmp_path, run) as manager:
        manager.restore(1)
        manager.restore()
        run.step = 3
        manager.save(3)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert asides_in(tmp_path) == []


def test_second_rewind_keeps_the_first_ones_files(tmp_path: Path) -> None:
    """A step that was set aside before gets a second name; nothing that was set aside is overwritten."""
    save_steps(tmp_path, 1, 2)
    run = Marked()
    files = [step_path(tmp_path, 2).read_bytes()]
    for _ in range(2):
        with manager_of(tmp_path, run, keep_last=5) as manager:
            manager.restore(1)
            run.step = 2
            files.append(manager.save(2).path.read_bytes())
    assert asides_in(tmp_path) == [(2, 1), (2, 2)]
    assert [(tmp_path / f"aside-00000002.{number}.pt").read_bytes() for number in (1, 2)] == files[:2]


def test_aside_goes_when_the_new_timeline_has_outrun_it(tmp_path: Path) -> None:
    """What was set aside is deleted only when `keep_last` good checkpoints have a higher step."""
    save_steps(tmp_path, 1, 4)
    run = Marked()
    with manager_of(tmp_path, run, keep_last=2) as manager:
        manager.restore(1)
        for step in (3, 5):
            run.step = step
            manager.save(step)
            assert asides_in(tmp_path) == [(4, 1)]
        run.step = 6
        manager.save(6)
    assert asides_in(tmp_path) == []
    assert steps_in(tmp_path) == [5, 6]


# -- every state of a directory --------------------------------------------------------------------------------------


def test_every_state_of_four_files_gives_the_right_one(memory_path: Path) -> None:
    """Of four files, each good, cut, flipped, empty or missing (625 directories), always the newest good one is latest.

    Where there is a file and none is good the restore is an error, where there is none it is None.
    """
    save_steps(memory_path / "good", 1, 2, 3, 4)
    variants: dict[str, dict[int, bytes | None]] = {"good": {}, "cut": {}, "flipped": {}, "empty": {}, "absent": {}}
    for step in (1, 2, 3, 4):
        path = step_path(memory_path / "good", step)
        variants["good"][step] = data = path.read_bytes()
        for name, damage in (("cut", truncate), ("flipped", flip)):
            path.write_bytes(data)
            damage(path)
            variants[name][step] = path.read_bytes()
        variants["empty"][step], variants["absent"][step] = b"", None
    warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
    directory = memory_path / "state"
    directory.mkdir()
    count = 0
    for states in itertools.product(variants, repeat=4):
        count += 1
        for step, state in enumerate(states, 1):
            data = variants[state][step]
            path = step_path(directory, step)
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
        good = [step for step, state in enumerate(states, 1) if state == "good"]
        found = safeckpt.latest(directory)
        assert (found.step if found else None) == (good[-1] if good else None), states
        if count % 9:  # a restore of each would take a minute
            continue
        run = Marked()
        with manager_of(directory, run) as manager:
            if good:
                restored = manager.restore()
                assert restored is not None
                assert restored.step == run.step == good[-1], states
            elif set(states) == {"absent"}:
                assert manager.restore() is None
            else:
                with pytest.raises(safeckpt.NoGoodCheckpointError):
                    manager.restore()
    assert count == 625
    assert {name for name in names_in(directory) if names.parse_step(name) is None} <= {"events.jsonl"}


# -- less than everything --------------------------------------------------------------------------------------------


def test_only_restores_what_it_names(tmp_path: Path) -> None:
    """`only` takes the named components and nothing else: no optimizer, no random stream, no position."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(3)
        manager.save(3)
        weights = state_of({"model": run.model})["model"]
    fresh = Run(seed=5)
    before = fresh.state
    with manager_of(tmp_path, fresh) as manager:
        restored = manager.restore(only=("model",))
        assert restored is not None
        assert restored.step == 3
        assert manager.step == 0
    after = fresh.state
    assert after["model"] == weights
    for name in ("optimizer", "scheduler", "counters", "rng"):
        assert after[name] == before[name]
    with manager_of(tmp_path, fresh) as manager:
        manager.restore(only=["counters", "rng"])
    assert fresh.counters == {"steps": 3}
    assert fresh.state["rng"] == run.state["rng"]


def test_restore_without_the_streams_is_not_compared_with_the_old_run(tmp_path: Path) -> None:
    """Whoever leaves the random streams out means another run: other losses than before are no news then."""
    run = Marked()
    with manager_of(tmp_path, run, save_on_exit=False) as manager:
        manager.save(1)
        for step in range(2, 20):
            manager.end_step(step, loss=step / 2)
    with manager_of(tmp_path, run) as manager:
        manager.restore(only=("model", "counters"))
        for step in range(2, 20):
            manager.end_step(step, loss=step / 3)  # a warning would be an error here
        manager.save(20)
    with manager_of(tmp_path, run) as manager:
        manager.restore(20)
        assert manager.save(20).step == 20


@pytest.mark.parametrize("only", [("modle",), ("model", "rgn")])
def test_only_with_an_unknown_name_is_refused(tmp_path: Path, only: tuple[str, ...]) -> None:
    """A name that is no component is an error that says which, before anything is changed."""
    save_steps(tmp_path, 1)
    run = Marked()
    with manager_of(tmp_path, run) as manager, pytest.raises(safeckpt.ComponentMismatchError) as caught:
        manager.restore(only=only)
    assert set(caught.value.missing) == set(only) - {"model"}
    assert caught.value.available == ("model", "counters", "rng")
    assert "It holds model, counters, rng." in str(caught.value)
    assert run.step == 0


def test_only_with_a_name_that_the_manager_lacks_is_refused(tmp_path: Path) -> None:
    """A component that only the checkpoint has cannot be restored, and the error says on which side it is."""
    save_steps(tmp_path, 1)
    run = Marked()
    del run.components["counters"]
    with manager_of(tmp_path, run) as manager, pytest.raises(safeckpt.ComponentMismatchError) as caught:
        manager.restore(only=("counters",))
    assert (caught.value.missing, caught.value.unexpected) == ((), ("counters",))


@pytest.mark.parametrize("argument", ["only", "keep_live"])
@pytest.mark.parametrize("value", ["model", 3, [3]])
def test_names_that_are_none_are_refused_at_once(tmp_path: Path, argument: str, value: Any) -> None:
    """A lone string or something else than names is a TypeError, also where there is nothing to restore yet."""
    with manager_of(tmp_path, Marked()) as manager, pytest.raises(TypeError, match=f"{argument} takes"):
        manager.restore(**{argument: value})


def test_only_of_nothing_is_refused_at_once(tmp_path: Path) -> None:
    """An empty `only` is a ValueError: it would restore nothing in silence."""
    with manager_of(tmp_path, Marked()) as manager, pytest.raises(ValueError, match="only is empty"):
        manager.restore(only=())


def test_missing_and_surplus_components_are_both_named(tmp_path: Path) -> None:
    """Components on one side only are an error that names them, and nothing is restored."""
    save_steps(tmp_path, 1)
    run = Marked()
    run.components["ema"] = run.components.pop("counters")
    with manager_of(tmp_path, run) as manager, pytest.raises(safeckpt.ComponentMismatchError) as caught:
        manager.restore()
    assert (caught.value.missing, caught.value.unexpected) == (("ema",), ("counters",))
    assert run.step == 0


def test_mismatch_is_not_walked_over(tmp_path: Path) -> None:
    """A state that does not fit the objects raises at the newest file and changes no object, streams included."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(2)
        manager.save(2)
    other = Run()
    other.model[4] = torch.nn.Linear(16, 2)
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2)
    other.scheduler = torch.optim.lr_scheduler.OneCycleLR(other.optimizer, max_lr=1e-2, total_steps=400)
    other.components |= {"optimizer": other.optimizer, "scheduler": other.scheduler}
    before = other.state
    with manager_of(tmp_path, other) as manager, pytest.raises(safeckpt.StateMismatchError) as caught:
        manager.restore()
    assert any("model.4.weight" in mismatch for mismatch in caught.value.mismatches)
    assert any("model.4.bias" in mismatch for mismatch in caught.value.mismatches)
    assert other.state == before


# -- what the caller has to know -------------------------------------------------------------------------------------


def test_replaced_hyperparameter_is_a_warning_that_names_it(tmp_path: Path) -> None:
    """A weight decay that the script changed is overruled by the file, with a warning and an event that say so."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(1)
        manager.save(1)
    fresh = Run()
    fresh.optimizer.param_groups[0]["weight_decay"] = 0.5
    with manager_of(tmp_path, fresh) as manager:
        with pytest.warns(safeckpt.HyperparameterReplacedWarning, match=r"weight_decay.*0\.5.*0\.01"):
            manager.restore()
        assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.01
        fresh.optimizer.param_groups[0]["weight_decay"] = 0.5
        manager.restore(keep_live=("optimizer.weight_decay",))
        assert fresh.optimizer.param_groups[0]["weight_decay"] == 0.5
    replaced = [event["replaced"] for event in events_in(tmp_path, "restored")]
    assert [len(lines) for lines in replaced] == [1, 0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimizer.nonsense", "it has: lr, betas, eps, weight_decay"),
        ("scheduler.nonsense", "it has: .*total_steps"),
        ("model.lr", "'lr'; it has: none"),
        ("nobody.lr", "there are model, optimizer, scheduler, counters"),
        ("optimizer", "such as 'optimizer.weight_decay'"),
    ],
)
def test_keep_live_that_names_no_hyperparameter_is_refused(tmp_path: Path, name: str, text: str) -> None:
    """A name in `keep_live` that is no hyper-parameter is a ValueError with those there are; nothing is restored."""
    run = Run()
    with manager_of(tmp_path, run) as manager:
        run.steps(1)
        manager.save(1)
    fresh = Run()
    before = fresh.state
    with manager_of(tmp_path, fresh) as manager, pytest.raises(ValueError, match=f"keep_live.*{text}"):
        manager.restore(keep_live=(name,))
    assert fresh.state == before


def test_other_environment_is_a_warning_that_names_the_field(tmp_path: Path) -> None:
    """A run that goes on with another number of threads is told so, and restored."""
    save_steps(tmp_path, 1)
    torch.set_num_threads(2)
    run = Marked()
    with (
        manager_of(tmp_path, run) as manager,
        pytest.warns(safeckpt.EnvironmentChangedWarning, match=r"threads: 1 -> 2") as caught,
    ):
        manager.restore()
    assert len(caught) == 1
    assert run.step == 1


# -- interrupted -----------------------------------------------------------------------------------------------------


class _PressesCtrlC:
    """A component in whose `load_state_dict` Ctrl-C is pressed, as often as it is told."""

    def __init__(self) -> None:
        self.times = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.times:
            self.times -= 1
            raise KeyboardInterrupt


def test_restore_that_fails_leaves_a_run_that_can_go_on(tmp_path: Path) -> None:
    """After Ctrl-C in a load_state_dict every object is as it was, and the run saves its next step."""
    run, button = Marked(), _PressesCtrlC()
    run.components["button"] = button
    with manager_of(tmp_path, run) as manager:
        run.step = 1
        manager.save(1)
        run.step = 2
        button.times = 1
        with pytest.raises(KeyboardInterrupt) as caught:
            manager.restore()
        assert "every object has its state from before" in caught.value.__notes__[0]
        assert run.step == 2
        manager.save(2)
    run.step = 0
    with manager_of(tmp_path, run) as manager:
        manager.restore()
    assert run.step == 2


@pytest.mark.parametrize("async_save", [False, True], ids=["from disk", "from memory"])
@pytest.mark.parametrize("way", ["restore", "restore one", "rollback"])
def test_mixture_that_an_interrupted_restore_leaves_is_not_saved(tmp_path: Path, way: str, async_save: bool) -> None:
    """After Ctrl-C in the middle of a restore nothing is saved or ended until a restore has come to its end."""
    run, button = Marked(), _PressesCtrlC()
    run.components["button"] = button
    with manager_of(tmp_path, run, async_save=async_save) as manager:
        for step in (1, 2):
            run.step = step
            manager.save(step)
        manager.wait()
        run.step = 3
        ways: dict[str, Callable[[], Any]] = {
            "restore": manager.restore,
            "restore one": lambda: manager.restore(1),
            "rollback": lambda: manager.rollback(changed=True),
        }
        button.times = 2  # also while the state from before is put back
        with pytest.raises(KeyboardInterrupt):
            ways[way]()
        before = checkpoint_files(tmp_path)
        for go_on in (manager.save, manager.end_step):
            with pytest.raises(ValueError, match=r"stopped half-way.*call restore\(\) or rollback\(\) again"):
                go_on(3)
        manager.wait()
        assert checkpoint_files(tmp_path) == before
        ways[way]()
        assert run.step == (1 if way == "restore one" else 2)
        run.step = 3
        manager.save(3)
        manager.wait()
    run = Marked()
    run.components["button"] = button
    with manager_of(tmp_path, run) as manager:
        manager.restore()
    assert run.step == 3
