"""prove_resume: right loops are exact, wrong ones are not, and the part to blame is named."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import safeckpt
from tests.proof import loops

prove = functools.partial(safeckpt.prove_resume, in_process=True)


@pytest.mark.parametrize("scheduler", loops.SCHEDULER_KINDS)
def test_right_loop_with_any_scheduler_is_exact(scheduler: str) -> None:
    """A loop whose state is all in its components is the same run after a resume, whatever its schedule."""
    report = prove(functools.partial(loops.build_kind, "norms", "adamw amsgrad", scheduler), loops.kind_step, repeats=1)
    report.assert_exact()
    assert report.first_divergence is None
    assert report.steps_compared == 10
    assert report.resumed == report.straight[10:]


@pytest.mark.parametrize("optimizer", loops.OPTIMIZER_KINDS)
def test_right_loop_with_any_optimizer_is_exact(optimizer: str) -> None:
    """The same for optimizers with all kinds of state."""
    prove(functools.partial(loops.build_kind, "tied", optimizer, "step"), loops.kind_step, repeats=1).assert_exact()


@pytest.mark.parametrize("model", loops.MODEL_KINDS)
def test_right_loop_with_any_model_is_exact(model: str) -> None:
    """The same for models with dropout, batch norm, ties, recurrence and attention."""
    prove(functools.partial(loops.build_kind, model, "sgd", "cyclic"), loops.kind_step, repeats=1).assert_exact()


@pytest.mark.parametrize("kill_at", [0, 1, 5, 6, 7, 19])
def test_right_loop_with_everything_is_exact_wherever_it_is_killed(kill_at: int) -> None:
    """Scaler, average, loader, generators and counters come back too: at the start, inside and between epochs."""
    report = prove(loops.build, loops.train_step, kill_at=kill_at, repeats=1)
    report.assert_exact()
    assert report.steps_compared == 20 - kill_at


@pytest.mark.parametrize("repeats", [1, 2])
def test_gradients_in_accumulation_are_part_of_an_exact_resume(repeats: int) -> None:
    """A kill between two micro-steps is exact, since the manager saves gradients that are under way."""
    report = prove(loops.build_accumulating, loops.accumulating_step, kill_at=[9, 10, 11, 12], repeats=repeats)
    report.assert_exact()


def test_gradients_in_accumulation_that_are_cleared_are_named() -> None:
    """A script that clears the restored gradients loses a part of the sum, and the report says so."""
    report = prove(
        loops.build_accumulating,
        loops.accumulating_step,
        kill_at=10,
        repeats=1,
        restore=loops.restore_then_clear_gradients,
    )
    assert report.first_divergence == 2  # the optimizer steps after the twelfth micro-step
    assert report.diverged_component == "gradients"


# component left out of the restore: index of the first loss that differs
LEFT_OUT = {
    "rng": 0,
    "model": 0,
    "optimizer": 1,
    "scheduler": 2,
    "scaler": 0,
    "average": 0,
    "loader": 0,
    "noise": 0,
    "counters": 0,
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_missing_component_is_found_and_named(name: str) -> None:
    """A restore that leaves out one part is not exact, from the right index on, and that part is named."""
    report = prove(
        loops.build, loops.train_step, repeats=1, restore=functools.partial(loops.restore_without, name=name)
    )
    assert not report.exact
    assert report.first_divergence == LEFT_OUT[name]
    assert report.diverged_component == name
    assert report.culprit is not None
    assert report.culprit.step == 10
    assert report.straight[10:][: LEFT_OUT[name]] == report.resumed[: LEFT_OUT[name]]
    assert report.resumed != report.straight[10:]
    with pytest.raises(AssertionError, match=rf"NOT EXACT[\s\S]*index {LEFT_OUT[name]} of 10[\s\S]*\n  {name}: "):
        report.assert_exact()


WRONG_RESTORES = {
    loops.restore_then_evaluate: (0, "model", "model.training", "mode"),
    loops.restore_then_train: (0, "model", "model.frozen.training", "mode"),
    loops.restore_then_draw: (0, "rng", "rng.torch", "random stream"),
}


@pytest.mark.parametrize("restore", WRONG_RESTORES, ids=lambda restore: restore.__name__)
def test_wrong_restore_is_found_and_named(restore: Any) -> None:
    """What a script does wrong between restore and first step is named down to the value."""
    index, component, name, kind = WRONG_RESTORES[restore]
    report = prove(loops.build, loops.train_step, repeats=1, restore=restore)
    assert not report.exact
    assert report.first_divergence == index
    assert report.diverged_component == component
    assert report.culprit is not None
    assert (report.culprit.name, report.culprit.kind) == (name, kind)


def test_one_unit_in_the_last_place_of_one_weight_is_found_and_located() -> None:
    """The smallest difference that a weight can have is caught, with its place and its size."""
    report = prove(loops.build, loops.train_step, repeats=1, restore=loops.restore_then_nudge)
    assert not report.exact
    assert report.diverged_component == "model"
    assert report.culprit is not None
    assert report.culprit.name == "model.first.weight"
    assert report.culprit.detail.startswith("1 of 72 elements, first at [3, 2]: ")
    assert report.culprit.detail.endswith("(1 ulp)")
    assert len(report.differences) == 1


def test_uncaptured_attribute_is_found_and_named() -> None:
    """A counter in a plain attribute, which no checkpoint holds, is named with both values."""
    report = prove(loops.around_counting, counting_step, repeats=1)
    assert report.first_divergence == 0
    assert report.diverged_component == "model.calls"
    assert str(report.culprit) == "model.calls: 10 != 0"
    assert "not captured by any component (attribute)" in str(report)


def counting_step(c: Any) -> Any:
    return loops.small_step({**c, "model": c["model"]})


def reset() -> Any:
    """Build as a new process does, in which the globals of the module are as it is written."""
    loops.COUNT = loops.Settings.calls = loops.default_argument_step.__defaults__[0]["calls"] = 0
    loops.NOISE.manual_seed(5)
    return loops.build_small()


HIDDEN = {
    loops.global_counter_step: (reset, 0, "tests.proof.loops.COUNT", "tests.proof.loops.COUNT: 10 != 0"),
    loops.hidden_generator_step: (reset, 0, "tests.proof.loops.NOISE", "tests.proof.loops.NOISE differs"),
    loops.class_attribute_step: (reset, 0, "tests.proof.loops.Settings.calls", "10 != 0"),
    loops.default_argument_step: (reset, 0, "default_argument_step.defaults.0.calls", "10 != 0"),
    loops.hidden_optimizer_step: (
        loops.build_hidden_optimizer,
        1,
        "tests.proof.loops.OPTIMIZERS.adam",
        "10.0 != absent",
    ),
}


@pytest.mark.parametrize("step", HIDDEN, ids=lambda step: step.__name__)
def test_what_is_kept_outside_of_the_components_is_found_and_named(step: Any) -> None:
    """Globals, class attributes, mutable defaults: whatever the step reads and no component holds."""
    build, index, name, text = HIDDEN[step]
    report = prove(build, step, repeats=1)
    assert report.deterministic
    assert report.first_divergence == index
    assert report.diverged_component is not None
    assert report.diverged_component.startswith(name)
    assert text in str(report.culprit)


def test_non_persistent_buffer_is_found_and_named() -> None:
    """A buffer that is not in the state dict is named before any attribute."""
    report = prove(loops.around_buffered, loops.small_step, repeats=1)
    assert report.first_divergence == 0
    assert report.diverged_component == "model.mean"
    assert report.culprit is not None
    assert report.culprit.kind == "non-persistent buffer"


def test_state_that_no_loss_shows_is_not_exact() -> None:
    """An average that the loss does not depend on is compared as well: the losses are equal, the runs are not."""

    def step(c: Any) -> Any:
        loss = loops.small_step(c)
        c["average"].update_parameters(c["model"])
        return loss

    def build() -> Any:
        components = loops.build_small()
        return {**components, "average": loops.AveragedModel(components["model"])}

    report = prove(build, step, restore=functools.partial(loops.restore_without, name="average"))
    assert report.resumed == report.straight[10:]
    assert not report.exact
    assert report.first_divergence == 0
    assert report.diverged_component == "average"
    assert "The losses of this window are equal" in str(report)


def test_nothing_visible_to_blame_names_the_usual_suspects(tmp_path: Any) -> None:
    """When a file outside of the process makes the difference, the report says what it has ruled out."""

    def step(c: Any) -> Any:
        with (tmp_path / "steps").open("a") as file:
            file.write(".")
        return loops.small_step(c, scale=1.0 if (tmp_path / "steps").stat().st_size <= 50 else 1.1)

    report = prove(loops.build_small, step)  # 20 + 20 + 10 steps, and the resume is the 51st
    assert not report.exact
    assert report.first_divergence == 0
    assert report.diverged_component is None
    assert "nothing else that can be seen" in str(report)


def test_run_that_is_not_deterministic_is_not_blamed_on_the_resume() -> None:
    """Two straight runs that differ are reported first, with what to set."""
    report = prove(loops.build_small, loops.unseeded_step)
    assert not report.deterministic
    assert not report.exact
    assert report.straight_differences[0] > 0
    text = str(report)
    assert text.startswith("Resume: CANNOT BE JUDGED, the run itself is not deterministic.")
    assert "use_deterministic_algorithms" in text
    with pytest.raises(AssertionError, match="not deterministic"):
        report.assert_exact()


def test_state_left_over_in_this_process_is_named() -> None:
    """In one process, what one run leaves for the next is named as the cause."""
    calls = 0

    def step(c: Any) -> Any:
        nonlocal calls
        calls += 1
        return loops.small_step(c, scale=1.0 + 1.0 / calls)

    report = prove(loops.build_small, step)
    assert not report.deterministic
    assert any(one.name.endswith("step.calls") and one.step == 0 for one in report.undetermined)
    assert "What a run leaves in this process" in str(report)


def test_run_in_this_process_begins_with_the_random_streams_of_a_new_one() -> None:
    """torch's default seed is the same in every process; Python and NumPy are seeded from the system's entropy."""

    def build() -> Any:
        model = loops.torch.nn.Linear(loops.WIDTH, 1)
        return {"model": model, "optimizer": loops.torch.optim.SGD(model.parameters(), lr=0.01)}

    loops.torch.rand(7)
    prove(build, loops.small_step).assert_exact()
    for draw in (loops.random.random, loops.np.random.rand):
        report = prove(build, lambda c, draw=draw: loops.small_step(c, scale=1.0 + draw()), steps=3, kill_at=1)
        assert not report.deterministic
        assert {one.name for one in report.undetermined} == {"rng.python", "rng.numpy"}


def test_timer_among_the_counters_is_not_compared() -> None:
    """A value that differs between straight runs and plays no part in the loss is left out, and named."""
    import time

    def build() -> Any:
        return {**loops.build_small(), "counters": {"began": time.perf_counter()}}

    report = prove(build, loops.small_step)
    report.assert_exact()
    assert report.not_compared == ["counters.began"]


def test_ablations_tell_what_the_window_can_see() -> None:
    """Each component left out shows at its index, and one that the losses never show is named as unseen."""
    report = prove(loops.build, loops.train_step, repeats=1, ablations=True)
    report.assert_exact()
    assert report.ablations == LEFT_OUT
    assert report.unseen == []

    def build() -> Any:
        components = loops.build_small()
        return {**components, "average": loops.AveragedModel(components["model"])}

    report = prove(build, loops.small_step, repeats=1, ablations=True)
    assert report.ablations == {"model": 0, "optimizer": 1, "average": None, "rng": 0}
    assert report.unseen == ["average"]
    assert "never shows in 10 steps: average" in str(report)


def test_ablation_of_a_short_window_sees_less() -> None:
    """A missing optimizer is exact for one step, a missing scheduler for two."""
    build = functools.partial(loops.build_kind, "norms", "adamw amsgrad", "one cycle")
    for steps, unseen in ((11, ["optimizer", "scheduler"]), (12, ["scheduler"]), (13, [])):
        report = prove(build, loops.kind_step, steps=steps, repeats=1, ablations=True)
        assert report.unseen == unseen


def test_omission_that_makes_the_run_fail_shows_where_it_does() -> None:
    """An ablation whose run raises is no error of the proof: it shows at the step that raises."""
    report = prove(loops.build_accumulating, loops.checked_step, repeats=1, ablations=True)
    report.assert_exact()
    assert report.ablations["counters"] == 2
    assert "without counters the run ends in KeyError: 'no such batch'" in str(report)


def test_several_kills_are_reported_one_by_one() -> None:
    """Of several kills the first wrong one is shown, and each has its own report."""
    report = prove(loops.build, loops.train_step, kill_at=[4, 9], repeats=1)
    report.assert_exact()
    assert [kill.kill_at for kill in report.kills] == [4, 9]
    assert [kill.steps_compared for kill in report.kills] == [16, 11]
    assert "EXACT after each of 2 kills (at steps 4, 9), 27 losses equal" in str(report)
    report = prove(loops.build, loops.train_step, kill_at=[4, 9], repeats=1, restore=loops.restore_then_train)
    assert [kill.exact for kill in report.kills] == [False, False]
    assert report.kill_at == 4


def test_caller_s_random_streams_are_left_alone() -> None:
    """A proof in this process moves no random stream of it."""
    from tests.comparing import streams

    before = streams()
    prove(loops.build, loops.train_step, steps=3, kill_at=1)
    assert streams() == before


def test_manager_s_arguments_are_passed_on() -> None:
    """What the run's own manager is given can be given to the proof's."""
    with pytest.raises(safeckpt.NonFiniteError):
        prove(build_infinite, loops.small_step, steps=3, kill_at=1)
    options = {"guard": safeckpt.Guard(allow_nonfinite=("model.mask",))}
    prove(build_infinite, loops.small_step, steps=3, kill_at=1, manager_options=options).assert_exact()


def build_infinite() -> Any:
    components = loops.build_small()
    components["model"].register_buffer("mask", loops.torch.tensor([float("nan")]))
    return components


def test_error_of_the_user_s_code_says_in_which_run_it_came() -> None:
    """What train_step raises is raised, with a note that names the run."""
    with pytest.raises(KeyError) as caught:
        prove(loops.build_accumulating, functools.partial(loops.failing_step, at=3))
    assert caught.value.__notes__ == ["In the proof's straight run."]


def test_nan_losses_equal_themselves_and_dicts_are_compared_whole() -> None:
    """A loss may have several values; NaN on both sides is equal, and not on one side."""
    report = prove(loops.build_small, loops.nan_step, repeats=1)
    report.assert_exact()
    assert report.straight[0].keys() == {"main", "empty", "parts"}
    assert '"empty": "nan"' in report.to_json()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"steps": 0}, "steps must be an int, 1 or more; got 0"),
        ({"steps": True}, "steps must be an int"),
        ({"repeats": 0}, "repeats"),
        ({"kill_at": 20}, "from 0 to steps - 1 = 19"),
        ({"kill_at": -1}, "kill_at"),
        ({"kill_at": 1.5}, "kill_at"),
        ({"kill_at": []}, "kill_at is empty"),
        ({"kill_at": [3, 20]}, "got 20"),
    ],
)
def test_argument_out_of_range_is_refused(arguments: dict[str, Any], match: str) -> None:
    """The error names the argument, what is allowed and what was given, before anything runs."""

    def build() -> Any:
        raise AssertionError("nothing may run")

    with pytest.raises((TypeError, ValueError), match=match):
        prove(build, loops.small_step, **arguments)


def test_constant_loss_is_noted() -> None:
    """Losses that are all the same are equal after any resume, and the report says that they prove nothing."""

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(3, 1)
        return {"model": model}

    report = safeckpt.prove_resume(build, lambda _: 1.0, steps=4, kill_at=2, in_process=True)
    note = (
        "the loss is the same at every step, so equal losses prove nothing: return the loss of the step, or give it to "
    )
    note += "end_step"
    assert report.notes == [note]
    assert "prove nothing" in str(report)
    report = safeckpt.prove_resume(build, lambda _: torch.rand(1), steps=4, kill_at=2, in_process=True)
    assert report.notes == []
