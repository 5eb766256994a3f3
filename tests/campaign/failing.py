"""Code of the user's own raises, at every position of a save and of a restore, in every kind of component.

A `state_dict` or a `load_state_dict` may raise whatever it likes. After a failed save the checkpoint before it is
there; after a failed restore every live object is what it was, bit for bit. Either way the same manager restores and
saves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from safeckpt import CheckpointManager
from tests.campaign.outcome import Outcome, Scale, WrongBitsError, quiet, scratch
from tests.comparing import Bits, bits, changes, streams
from tests.every_kind import CODE, built, train
from tests.manager.helpers import checkpoint_files, temps_in

_ORDERS = {"fast": 2, "full": 4}  # in which the components are given
_ERRORS = (RuntimeError, KeyError, KeyboardInterrupt)


def _photo(components: dict[str, Any]) -> Bits:
    """Return everything that is live, in comparable form: without code that may raise."""
    model, optimizer, scheduler, scaler = (components[key] for key in ("model", "optimizer", "scheduler", "scaler"))
    return bits(
        {
            "model": {**dict(model.named_parameters()), **dict(model.named_buffers())},
            "extra": model.extra,
            "tied": model.first.weight is model.last.weight,
            "modes": [one.training for one in model.modules()],
            "flags": [one.requires_grad for one in model.parameters()],
            "gradients": [one.grad for one in model.parameters()],
            "moments": [optimizer.state.get(one) for one in model.parameters()],
            "groups": [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups],
            "trained": [id(one) for group in optimizer.param_groups for one in group["params"]],
            "scheduler": {
                key: value for key, value in vars(scheduler).items() if isinstance(value, int | float | list)
            },
            "scaler": [scaler.get_scale(), scaler._get_growth_tracker()],
            "objects": [components["loader"].value, components["object"].value],
            "generators": [
                components["generator"].get_state(),
                str(components["numbers"].bit_generator.state),
                components["python"].getstate(),
            ],
            "dict": components["dict"],
            "streams": streams(),
        }
    )


class _Raising:
    """Makes one method of a component raise, in its class: before it has done anything, or when it has done it all."""

    def __init__(self, component: str, when: str, error: type[BaseException]) -> None:
        self.component = component
        self.when = when
        self.error = error

    def __str__(self) -> str:
        return f"{self.component} raises {self.error.__name__} {self.when} its own work"

    def at_save(self) -> contextlib.AbstractContextManager[None]:
        """Raise in the first call of the method that gives the state."""
        kind, method, _ = CODE[self.component]
        return self._raising(kind, method)

    def at_restore(self) -> contextlib.AbstractContextManager[None]:
        """Raise in the first call of the method that takes a state; the second one puts back what was there."""
        kind, _, method = CODE[self.component]
        return self._raising(kind, method)

    @contextlib.contextmanager
    def _raising(self, kind: type, name: str) -> Iterator[None]:
        own, original = vars(kind).get(name), getattr(kind, name)
        calls = itertools.count()

        @functools.wraps(original)
        def method(obj: Any, *arguments: Any, **options: Any) -> Any:
            is_first = next(calls) == 0
            found = original(obj, *arguments, **options) if not is_first or self.when == "after" else None
            if is_first:
                raise self.error("made on purpose")
            return found

        setattr(kind, name, method)
        try:
            yield
        finally:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


_Fail = Callable[[CheckpointManager, dict[str, Any], _Raising], None]


def run(scale: Scale, seed: int) -> Outcome:
    """Let every piece of code raise, with the components in many orders."""
    outcome = Outcome("a state_dict or load_state_dict that raises, in every kind and position, at saves and restores")
    choose = random.Random(seed)
    orders = [list(built()), list(reversed(built()))]
    orders += [choose.sample(orders[0], len(orders[0])) for _ in range(_ORDERS[scale] - 2)]
    for order, component in itertools.product(orders, CODE):
        errors = _ERRORS if scale == "full" else (choose.choice(_ERRORS),)
        for when, error in itertools.product(("before", "after"), errors):
            for fail in (_fail_a_save, _fail_a_restore):
                _try(fail, order, _Raising(component, when, error), outcome)
    return outcome


def around(component: str) -> Outcome:
    """Fail the restore of one kind."""
    outcome = Outcome(f"a restore of {component} that raises")
    _try(_fail_a_restore, list(built()), _Raising(component, "after", RuntimeError), outcome)
    return outcome


def _try(fail: _Fail, order: list[str], raising: _Raising, outcome: Outcome) -> None:
    outcome.tried += 1
    given = built()
    components = {name: given[name] for name in order}
    where = f"{fail.__name__[1:]}: {raising}, in {order}"
    with scratch() as folder, quiet(), warnings.catch_warnings(), outcome.judging(where):
        warnings.simplefilter("error")
        with CheckpointManager(folder, components, keep_last=2, save_on_exit=False) as manager:
            train(components, 1)
            manager.save(1)
            first = _photo(components)
            train(components, 2)
            fail(manager, components, raising)
            if manager.restore(1) is None or _photo(components) != first:
                raise WrongBitsError("afterwards, step 1 does not come back as it was")
            train(components, 3)
            manager.save(3)
            third = _photo(components)
            train(components, 4)
            manager.restore()
            if _photo(components) != third:
                raise WrongBitsError("afterwards, a new step does not come back as it was")


def _fail_a_save(manager: CheckpointManager, components: dict[str, Any], raising: _Raising) -> None:
    before, files = _photo(components), checkpoint_files(manager.directory)
    with raising.at_save():
        try:
            manager.save(2)
        except raising.error:
            pass
        else:
            raise WrongBitsError("the save has swallowed it")
    _compare(before, _photo(components))
    assert checkpoint_files(manager.directory) == files
    assert temps_in(manager.directory) == []


def _fail_a_restore(manager: CheckpointManager, components: dict[str, Any], raising: _Raising) -> None:
    manager.save(2)
    train(components, 5)
    before, files = _photo(components), checkpoint_files(manager.directory)
    with raising.at_restore():
        try:
            manager.restore()
        except raising.error:
            pass
        else:
            raise WrongBitsError("the restore has swallowed it")
    _compare(before, _photo(components))
    assert checkpoint_files(manager.directory) == files


def _compare(before: Bits, after: Bits) -> None:
    changed = changes(before, after)
    if changed:
        raise WrongBitsError(f"it has changed {', '.join(changed)}")
