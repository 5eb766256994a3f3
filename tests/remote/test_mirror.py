"""A manager with a mirror: what gets there, what comes back, who may write, and who is told."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import safeckpt
from safeckpt import CheckpointManager, Mirror
from safeckpt.remote import Epochs, worker
from safeckpt.run import mirroring
from safeckpt.store import names
from tests.manager.helpers import asides_in, events_in, flip, manager_of, skipping, step_path, steps_in
from tests.remote.conftest import URL
from tests.remote.memory_store import MemoryStore
from tests.training import Marked, Run


def open_run(path: Path, run: Any, **options: Any) -> CheckpointManager:
    return manager_of(path, run, **{"mirror": URL, **options})


def save_all(path: Path, *steps: int, run: Marked | None = None, **options: Any) -> Marked:
    """Save steps into a directory and the store, each of them durable before the next."""
    run = run or Marked()
    with open_run(path, run, **{"mirror": Mirror(URL, wait="save"), **options}) as manager:
        manager.restore()
        for step in steps:
            run.step = step
            manager.save(step, loss=1 / (1 + step), metrics={"accuracy": step / 100})
    return run


def restored(path: Path, **options: Any) -> int:
    """Return the step that a new process restores into this directory; 0 for none."""
    run = Marked()
    with open_run(path, run, save_on_exit=False, **options) as manager:
        found = manager.restore()
        assert run.step == (0 if found is None else found.step)
        return run.step


def listed(store: MemoryStore) -> list[str]:
    """Return the keys of the checkpoints in the store."""
    return [key for key in store.keys("/step-") if key.endswith(".pt")]


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_in_the_store_when_the_manager_is_closed(
    tmp_path: Path, store: MemoryStore, *, asynchronous: bool
) -> None:
    """The newest is there, byte for byte, and no more than the rules keep."""
    run = Marked()
    with open_run(tmp_path / "a", run, keep_last=2, async_save=asynchronous) as manager:
        assert manager.mirror is not None
        assert manager.mirror.durable_step is None
        for step in (1, 2, 3, 4):
            run.step = step
            manager.save(step)
    assert manager.mirror.durable_step == 4
    found = {key.rpartition("/")[2]: store.objects[key] for key in listed(store)}
    assert set(found) == {path.name for path in (tmp_path / "a").glob("step-*")}
    assert all(data == (tmp_path / "a" / name).read_bytes() for name, data in found.items())


def test_run_goes_on_bit_for_bit_on_an_empty_disk_and_its_losses_are_compared(
    tmp_path: Path, store: MemoryStore
) -> None:
    """A machine that vanished loses nothing: state, history and the record of losses come back from the store."""
    straight = Run()
    expected = straight.steps(12)
    first = Run()
    with open_run(tmp_path / "a", first, save_every=5, save_on_exit=False) as manager:
        for step in range(1, 9):
            manager.end_step(step, loss=first.step())
    second = Run(seed=7)
    with open_run(tmp_path / "b", second, save_every=5, save_on_exit=False) as manager:
        checkpoint = manager.restore()
        assert checkpoint is not None
        assert checkpoint.step == 5
        assert checkpoint.path.parent == tmp_path / "b"
        losses = [0.0] * 5
        for step in range(6, 13):
            losses.append(second.step())
            manager.end_step(step, loss=losses[-1])
        assert manager.replay is not None
        assert str(manager.replay) == "resume verified: 3 of 3 replayed losses equal"
    assert losses[5:] == expected[5:]
    assert second.state == straight.state
    assert [event["step"] for event in events_in(tmp_path / "b", "saved")] == [5, 10]


def test_higher_of_the_two_places_is_restored(tmp_path: Path, store: MemoryStore) -> None:
    """A directory that is behind the store is brought up to date; one that is ahead is used as it is."""
    save_all(tmp_path / "a", 1, 2)
    save_all(tmp_path / "b", 3, 4)
    assert restored(tmp_path / "a") == 4
    assert steps_in(tmp_path / "a") == [1, 2, 4]
    store.objects = {key: data for key, data in store.objects.items() if "00000004" not in key}
    assert restored(tmp_path / "a") == 4
    assert restored(tmp_path / "c") == 3


def test_named_step_is_fetched(tmp_path: Path, store: MemoryStore) -> None:
    """`restore(step=...)` finds what only the store has; what neither has is an error that lists both."""
    save_all(tmp_path / "a", 1, 2, 3)
    run = Marked()
    with open_run(tmp_path / "b", run, save_on_exit=False) as manager:
        manager.restore(2)
        assert run.step == 2
        with pytest.raises(safeckpt.CheckpointNotFoundError) as caught:
            manager.restore(9)
        assert caught.value.available_steps == (1, 2, 3)


def test_metrics_that_come_later_are_sent_as_well(tmp_path: Path, store: MemoryStore) -> None:
    """A checkpoint that is described anew is copied anew, and its metric keeps it."""
    run = Marked()
    with open_run(tmp_path / "a", run, keep_last=1, keep_best=safeckpt.Best("val")) as manager:
        for step, val in ((1, 0.1), (2, 0.9), (3, 0.5)):
            run.step = step
            manager.save(step)
            manager.save(step, metrics={"val": val})
            assert manager.mirror is not None
            manager.mirror.wait()
    assert [key[-11:-3] for key in listed(store)] == ["00000001", "00000003"]
    run = Marked()
    with open_run(tmp_path / "b", run, save_on_exit=False) as manager:
        found = manager.restore(1)
        assert found is not None
        assert found.metrics == {"val": 0.1}


# -- damage and absence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "foreign"])
def test_damaged_object_is_passed_over_and_named(tmp_path: Path, store: MemoryStore, damage: str) -> None:
    """The next older one is taken, nothing of the damaged one stays, and the warning names its place."""
    save_all(tmp_path / "a", 1, 2, 3)
    key = next(key for key in listed(store) if "00000003" in key)
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    broken = {"flipped": bytes(data), "cut": bytes(data[:-100]), "empty": b"", "foreign": b"not a checkpoint\n" * 999}
    store.objects[key] = broken[damage]
    with pytest.warns(safeckpt.SkippedCheckpointWarning, match=f"^{URL}/{key} was passed over: "):
        assert restored(tmp_path / "b") == 2
    assert steps_in(tmp_path / "b") == [2]
    assert not [path for path in (tmp_path / "b").iterdir() if names.temp_final(path.name)]


def test_damaged_file_is_replaced_from_the_store(tmp_path: Path, store: MemoryStore) -> None:
    """The disk rots, the store has the same step: that one is restored, and the damaged file is kept aside."""
    save_all(tmp_path / "a", 1, 2, 3)
    flip(step_path(tmp_path / "a", 3))
    with skipping(step_path(tmp_path / "a", 3)):
        assert restored(tmp_path / "a") == 3
    assert steps_in(tmp_path / "a") == [1, 2, 3]
    assert asides_in(tmp_path / "a") == [(3, 1)]


def test_damaged_file_is_not_sent(tmp_path: Path, store: MemoryStore) -> None:
    """What the disk has damaged before it was sent does not become an object, and `close` says so."""
    manager = open_run(tmp_path / "a", Marked(), mirror=Mirror(URL, timeout_seconds=0.5), lock_timeout_seconds=1)
    with manager.mirror._worker._changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(1)
        flip(step_path(tmp_path / "a", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(safeckpt.MirrorBehindError, match="not those that were written"):
            manager.close()
    assert listed(store) == []


def _written(path: Path, data: bytes) -> Path:
    (path / "copy.pt").write_bytes(data)
    return path / "copy.pt"


def test_empty_disk_and_no_answer_is_an_error_and_no_fresh_start(tmp_path: Path, store: MemoryStore) -> None:
    """Nothing is restored, nothing is made, and the error says what to look at."""
    save_all(tmp_path / "a", 1)
    store.is_down = True
    run = Marked()
    with open_run(tmp_path / "b", run, save_on_exit=False) as manager:
        with pytest.raises(safeckpt.MirrorUnreachableError, match="it is down"):
            manager.restore()
        assert not (tmp_path / "b").exists()
        store.is_down = False
        assert manager.restore() is not None
    assert run.step == 1


def test_training_goes_on_without_the_store_and_catches_up(tmp_path: Path, store: MemoryStore) -> None:
    """A warning at once; when the store answers again, the newest checkpoint is sent."""
    run = save_all(tmp_path / "a", 1)
    store.is_down = True
    with open_run(tmp_path / "a", run) as manager:
        with pytest.warns(safeckpt.SafeckptWarning, match="Going on with the directory"):
            assert manager.restore() is not None
        with pytest.warns(safeckpt.SafeckptWarning, match="training goes on"):
            manager.save(2)
        store.is_down = False
        run.step = 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the thread, once more
            manager.save(3)
            assert manager.mirror is not None
            manager.mirror.wait(30)
        assert manager.mirror.durable_step == 3
        manager._run.directory.mirror._worker._refused = None  # type: ignore[union-attr]  # that warning, as an error
    assert restored(tmp_path / "b") == 3


class FailsOnce:
    """A client whose n-th request fails, before it is done or after it was done and its answer lost."""

    def __init__(self, client: Any, number: int, when: str) -> None:
        self._client = client
        self._left = number
        self._when = when
        self.url = client.url
        self.is_conditional = client.is_conditional

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def request(*arguments: Any) -> Any:
            self._left -= 1
            failure = safeckpt.MirrorUnreachableError(url=self.url, what=name, reason="no answer")
            if self._left == 0 and self._when == "before":
                raise failure
            result = method(*arguments)
            if self._left == 0:
                raise failure
            return result

        return request


@pytest.mark.parametrize(
    ("when", "every"),
    [("after", 5), pytest.param("before", 1, marks=pytest.mark.slow), pytest.param("after", 1, marks=pytest.mark.slow)],
)
def test_any_request_may_fail_once(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, when: str, every: int
) -> None:
    """Wherever a take-over, a rewind, an upload or a prune is interrupted, it is done in the end; the past counts."""
    monkeypatch.setattr(worker, "_FIRST_WAIT_SECONDS", 0.01)
    for number in range(1, 100, every):
        store.objects.clear()
        save_all(tmp_path / f"{number} a", 1, 2, 3)
        failing = FailsOnce(store.client(store.hook, URL), number, when)
        with monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patched.setattr(mirroring, "open_client", lambda _, failing=failing: failing)
            run = Marked()
            with open_run(tmp_path / f"{number} b", run, keep_last=4) as manager:
                try:
                    manager.restore()
                except safeckpt.MirrorUnreachableError:  # on an empty disk
                    manager.restore()
                assert run.step == 3, number
                for step in (4, 5):
                    run.step = step
                    manager.save(step)
                manager.restore(4)
                run.step = 5
                manager.save(5)
            assert manager.mirror is not None
            assert manager.mirror.durable_step == 5, number
        view = Epochs(store.client()).look()
        # Only the store had step 2. Step 1 stays where the last prune was cut off: the next save tries it again.
        assert [step for step in view.checkpoints if step > 1] == [2, 3, 4, 5], number
        assert not view.lost, number
        if not failing.has_failed:
            break
    else:
        raise AssertionError("there were more requests")


# -- who may write ---------------------------------------------------------------------------------------------------


def test_same_directory_takes_its_prefix_again(tmp_path: Path, store: MemoryStore) -> None:
    """A restart on the same machine needs no permission."""
    save_all(tmp_path / "a", 1)
    save_all(tmp_path / "a", 2)
    assert restored(tmp_path / "b") == 2


def test_directory_that_was_left_behind_is_refused_until_it_is_told_to_take_over(
    tmp_path: Path, store: MemoryStore
) -> None:
    """A live holder is not robbed by a directory with checkpoints of its own; `take_over=True` does it."""
    save_all(tmp_path / "a", 1)
    save_all(tmp_path / "b", 2)
    run = Marked()
    with open_run(tmp_path / "a", run, save_on_exit=False) as manager:
        manager.restore()
        before = dict(store.objects)
        with pytest.raises(safeckpt.MirrorTakenError, match="take_over=True") as caught:
            manager.save(5)
        assert caught.value.epoch == 2
        assert store.objects == before
    run = save_all(tmp_path / "a", 3, mirror=Mirror(URL, take_over=True, wait="save"))
    save_all(tmp_path / "a", 4, run=run)
    assert restored(tmp_path / "c") == 4


def test_zombie_is_told_and_what_it_sends_is_in_no_listing(tmp_path: Path, store: MemoryStore) -> None:
    """A taker on an empty disk wins; the one before hears of it at its next save and has harmed nothing."""
    zombie_run = Marked()
    zombie = open_run(tmp_path / "a", zombie_run, mirror=Mirror(URL, wait="save"))
    zombie_run.step = 1
    zombie.save(1)
    taker_run = Marked()
    taker = open_run(tmp_path / "b", taker_run, mirror=Mirror(URL, wait="save"))
    assert taker.restore() is not None
    taker_run.step = 2
    taker.save(2)
    zombie_run.step = 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(safeckpt.MirrorTakenError, match="no longer counts"):
            zombie.save(3)
    assert steps_in(tmp_path / "a") == [1, 3]
    zombie_run.step = 4
    with pytest.raises(safeckpt.MirrorTakenError):
        zombie.save(4)
    with pytest.raises(safeckpt.MirrorTakenError):
        zombie.close()
    assert restored(tmp_path / "c") == 2
    taker_run.step = 3
    taker.save(3)
    taker.close()
    assert restored(tmp_path / "d") == 3


def test_prefix_of_another_run_is_not_written_into(tmp_path: Path, store: MemoryStore) -> None:
    """A new run that forgets `restore()`, or has the wrong URL, is refused before it claims anything."""
    save_all(tmp_path / "a", 1)
    before = dict(store.objects)
    with open_run(tmp_path / "b", Marked(), save_on_exit=False) as manager:
        with pytest.raises(safeckpt.DirectoryInUseError, match="holds 1 checkpoint"):
            manager.save(2)
    assert store.objects == before
    with manager_of(tmp_path / "c", Marked()) as manager:
        manager.save(0)
    with open_run(tmp_path / "c", Marked(), save_on_exit=False) as manager:
        with pytest.raises(safeckpt.DirectoryInUseError):
            manager.restore()
    assert steps_in(tmp_path / "c") == [0]


def test_store_that_ignores_conditions_is_refused_by_name(tmp_path: Path, store: MemoryStore) -> None:
    """It could not keep two writers apart. `lock=False` is for one who knows that there is only one."""
    store.is_conditional = False
    with open_run(tmp_path / "a", Marked(), save_on_exit=False) as manager:
        with pytest.raises(safeckpt.MirrorUnsafeError, match="lock=False"):
            manager.save(1)
    assert store.keys("epoch") == []
    save_all(tmp_path / "b", 1, mirror=Mirror(URL, lock=False, wait="save"))
    assert restored(tmp_path / "c", mirror=Mirror(URL, lock=False)) == 1


# -- timelines -------------------------------------------------------------------------------------------------------


def test_what_a_rollback_leaves_behind_does_not_count_in_the_store(tmp_path: Path, store: MemoryStore) -> None:
    """After going back to step 1, a new machine restores what came after it, never the timeline that was left."""
    run = save_all(tmp_path / "a", 1, 2, 3)
    with open_run(tmp_path / "a", run, save_on_exit=False) as manager:
        manager.restore(1)
        run.step = 2
        manager.save(2)
    assert restored(tmp_path / "b") == 2
    run = Marked()
    with open_run(tmp_path / "b", run, save_on_exit=False) as manager:
        with pytest.raises(safeckpt.CheckpointNotFoundError):
            manager.restore(3)


def test_rewind_in_a_running_process_begins_an_epoch(tmp_path: Path, store: MemoryStore) -> None:
    """The step that was sent before and is made again on another timeline is the new one in the store."""
    run = Run()
    with open_run(tmp_path / "a", run, mirror=Mirror(URL, wait="save")) as manager:
        for step in (1, 2, 3):
            run.step()
            manager.save(step)
        manager.restore(1)
        run.steps(5)
        manager.save(2)
        expected = run.state
    fresh = Run(seed=3)
    with open_run(tmp_path / "b", fresh, save_on_exit=False) as manager:
        found = manager.restore()
        assert found is not None
        assert found.step == 2
        without = {key: value for key, value in expected.items() if "grad" not in key}
        assert {key: value for key, value in fresh.state.items() if "grad" not in key} == without


def test_foreign_objects_are_left_alone(tmp_path: Path, store: MemoryStore) -> None:
    """Names that are not ours are neither listed nor deleted, however much they look like ours."""
    foreign = {
        "notes.txt": b"1",
        "epoch-1/step-00000009.pt": b"2",
        "epoch-00000001/step-9.pt": b"3",
        "epoch-00000001/step-00000009.pt.bak": b"4",
        "epoch-00000001/step-00000009/../../x": b"5",
        "epoch-00000001/weights/model.bin": b"6",
        "Epoch-00000001.json": b"7",
        "epoch-00000000.json": b"8",
    }
    store.objects.update(foreign)
    save_all(tmp_path / "a", *range(1, 9), keep_last=1)
    assert {key: store.objects.get(key) for key in foreign} == foreign
    assert restored(tmp_path / "b") == 8


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_training_does_not_wait_and_overtaken_checkpoints_are_skipped(tmp_path: Path, store: MemoryStore) -> None:
    """While the first is held up, nine more are saved; then the newest goes first, and pruned ones never."""
    run = Marked()
    store.gate.clear()
    with open_run(tmp_path / "a", run, keep_last=1) as manager:
        for step in range(1, 11):
            run.step = step
            manager.save(step)
        store.gate.set()
        assert manager.mirror is not None
        manager.mirror.wait()
    sent = [key for kind, key in store.log if kind == "put" and "/step-" in key]
    assert len(sent) <= 3
    assert sent[-1].endswith("step-00000010.pt")


def test_store_that_is_ahead_of_the_directory_is_left_as_it_is(tmp_path: Path, store: MemoryStore) -> None:
    """Somebody deletes the newest file here: an older one that no rule keeps there is not sent to and fro."""
    run = Marked()
    with open_run(tmp_path / "a", run, keep_last=2, save_on_exit=False) as manager:
        assert manager.mirror is not None
        for step in (1, 2, 3):
            run.step = step
            manager.save(step)
            manager.mirror.wait()
        (tmp_path / "a" / "step-00000003.pt").unlink()
        store.log.clear()
        store.objects = {key: data for key, data in store.objects.items() if "step-00000002" not in key}
        store.objects["epoch-00000001/step-00000004.pt"] = store.objects["epoch-00000001/step-00000003.pt"]
        manager.mirror._worker.ask()
    assert [key for kind, key in store.log if kind == "put" and "/step-" in key] == []


def test_first_one_is_sent_whole_though_it_is_pruned_meanwhile(tmp_path: Path, store: MemoryStore) -> None:
    """A file that is being sent is held open: what arrives is a whole checkpoint."""
    run = Marked()
    store.gate.clear()
    with open_run(tmp_path / "a", run, keep_last=1, save_on_exit=False) as manager:
        manager.save(0)
        while not any(kind == "listing" for kind, _ in store.log[3:]):
            pass
        run.step = 1
        manager.save(1)
        assert steps_in(tmp_path / "a") == [1]
        store.gate.set()
    for key in listed(store):
        safeckpt.verify(_written(tmp_path, store.objects[key]))


def test_close_says_that_the_newest_is_not_there(tmp_path: Path, store: MemoryStore) -> None:
    """After the bound it is an error with both steps; the checkpoint is safe here."""
    manager = open_run(tmp_path / "a", Marked(), mirror=Mirror(URL, timeout_seconds=0.2))
    store.gate.clear()
    manager.save(1)
    with pytest.raises(safeckpt.MirrorBehindError, match=r"which has no checkpoint: waited 0\.2 s") as caught:
        manager.close()
    assert (caught.value.saved_step, caught.value.durable_step) == (1, None)
    assert steps_in(tmp_path / "a") == [1]


def test_stop_signal_waits_less_and_what_is_missing_is_a_warning(tmp_path: Path, store: MemoryStore) -> None:
    """A machine that is about to go away is told what is durable, and the script ends as it would have."""
    run = Marked()
    mirror = Mirror(URL, stop_seconds=0.2)
    with pytest.warns(safeckpt.SafeckptWarning, match="Step 2 is not in s3://bucket/run, which has step 1"):  # noqa: PT031
        with open_run(tmp_path / "a", run, mirror=mirror, stop_signals=(signal.SIGUSR1,), save_every=9) as manager:
            run.step = 1
            manager.save(1)
            assert manager.mirror is not None
            manager.mirror.wait()
            store.gate.clear()
            signal.raise_signal(signal.SIGUSR1)
            run.step = 2
            assert manager.end_step(2) is not None


def test_run_that_is_too_far_ahead_of_the_store_is_stopped(tmp_path: Path, store: MemoryStore) -> None:
    """`max_lag_steps` bounds what the loss of this machine would cost."""
    run = Marked()
    store.gate.clear()
    with open_run(tmp_path / "a", run, mirror=Mirror(URL, max_lag_steps=2), save_on_exit=False) as manager:
        for step in (1, 2, 3, 4):
            run.step = step
            manager.save(step)
        run.step = 5
        with pytest.raises(safeckpt.MirrorBehindError, match="max_lag_steps=2"):
            manager.save(5)
        assert steps_in(tmp_path / "a") == [2, 3, 4]
        store.gate.set()
        assert manager.mirror is not None
        manager.mirror.wait()
        manager.save(5)


def test_error_of_the_loop_is_not_hidden_by_the_store(tmp_path: Path, store: MemoryStore) -> None:
    """An exception leaves the block as it is, after a short wait; that the store is behind is a warning."""
    mirror = Mirror(URL, stop_seconds=0.2)
    with pytest.warns(safeckpt.SafeckptWarning, match="Step 1 is not in"), pytest.raises(ZeroDivisionError):  # noqa: PT012, PT031
        with open_run(tmp_path / "a", Marked(), mirror=mirror) as manager:
            store.gate.clear()
            manager.save(1)
            raise ZeroDivisionError
    assert steps_in(tmp_path / "a") == [1]


def test_never_does_not_wait(tmp_path: Path, store: MemoryStore) -> None:
    """`wait="never"`: `close` returns while nothing has got there."""
    store.gate.clear()
    with open_run(tmp_path / "a", Marked(), mirror=Mirror(URL, wait="never")) as manager:
        manager.save(1)
    assert listed(store) == []


# -- arguments -------------------------------------------------------------------------------------------------------

SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    "url", [f"s3://AKIA:{SECRET}@bucket/run", f"az://box/run?sig={SECRET}", f"https://h/run#{SECRET}"]
)
def test_url_with_credentials_is_refused_without_showing_them(url: str) -> None:
    """They would be in every log line; the text says where they belong."""
    with pytest.raises(ValueError, match="environment") as caught:
        Mirror(url)
    assert SECRET not in str(caught.value)


def test_options_are_not_shown() -> None:
    """A repr is logged sooner or later."""
    mirror = Mirror(URL, options={"secret_access_key": SECRET}, client_options={"proxy_url": f"http://u:{SECRET}@p"})
    assert SECRET not in repr(mirror)
    assert repr(mirror).startswith("Mirror(url='s3://bucket/run', wait='close'")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"url": "runs/x"}, ValueError, "url must be of the form s3://bucket/runs/x"),
        ({"url": URL, "wait": "always"}, ValueError, "wait must be one of 'close', 'save', 'never'"),
        ({"url": URL, "lock": 1}, TypeError, "lock must be True or False"),
        ({"url": URL, "max_lag_steps": 0}, ValueError, "max_lag_steps must be an int, 1 or more"),
        ({"url": URL, "timeout_seconds": 0}, ValueError, "timeout_seconds must be a number, more than 0"),
        ({"url": URL, "options": SECRET}, TypeError, "options must be a mapping"),
    ],
)
def test_wrong_argument_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Each by name, before anything happens."""
    with pytest.raises(error, match=text):
        Mirror(**options)


def test_mirror_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Neither a URL nor a `Mirror`."""
    with pytest.raises(TypeError, match="mirror must be a URL"):
        manager_of(tmp_path, Marked(), mirror=Path("runs"))
