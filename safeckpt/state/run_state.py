"""The whole state of a run: capture it as one payload, plan a restore that checks everything, then apply it.

::

    {"<component>": its state as plain torch has it, ...,
     "safeckpt": {"components": {"<component>": {"kind": ..., record}}, "ties": [[name, ...], ...],
                  "rng": {...}, "environment": {...}, "gradients": {name: tensor}, "recent_losses": {...}}}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch

from safeckpt.errors import ComponentMismatchError, StateMismatchError
from safeckpt.state.aliases import ALIASES, Aliases, find_aliases
from safeckpt.state.component import Captured, Component, Order, has_attribute
from safeckpt.state.environment import differences, environment
from safeckpt.state.fsdp import drop_unreduced, reshard
from safeckpt.state.mixture import Mixture
from safeckpt.state.module import ModuleComponent
from safeckpt.state.optimizer import OptimizerComponent
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.staging import Staging
from safeckpt.state.transfer import Reader, Transfer
from safeckpt.state.tree import join

__all__ = ["RESERVED_KEY", "Plan", "RunState", "capture", "plan"]

RESERVED_KEY = "safeckpt"
_RNG = "rng"
_IMPORT_AGAIN = (
    "build the objects as in the run that saved the source; or import it again, with another mapping and into a "
    "directory of its own; or let what does not fit stay as this script has made it: restore(fresh=(...,)), once. "
    "To evaluate, restore what fits: restore(only=(...,)), which does not save."
)


class RunState(NamedTuple):
    """State of all components at one moment. Tensors alias the live ones until the payload is written or copied.

    Attributes:
        payload: What goes into the file.
        pairs: The same, by component.
    """

    payload: dict[str, Any]
    pairs: list[tuple[Component, Captured]]


def capture(
    components: Mapping[str, Component],
    *,
    gradients: Mapping[str, torch.Tensor] | None = None,
    recent_losses: Mapping[str, torch.Tensor] | None = None,
) -> RunState:
    """Capture every component and the process's random streams. Changes nothing, draws nothing.

    Args:
        components: What to capture.
        gradients: Gradients that are part of the state, by parameter name.
        recent_losses: The losses by which the next one is judged; None where it is not judged by any.

    Raises:
        UnsavableStateError: A component has something that no restore could give back.
    """
    reshard(components)  # first of all: optimizers find the names of their parameters in the modules
    with RngStreams.untouched() as rng:
        captured = {name: component.capture().savable() for name, component in components.items()}
    _note_aliases(components, captured)
    reserved = {
        "components": {name: {"kind": components[name].kind, **one.record} for name, one in captured.items()},
        "ties": _ties({name: one.state for name, one in captured.items() if components[name].kind == "module"}),
        _RNG: rng,
        "environment": environment(),
        "gradients": dict(gradients or {}),
    }
    if recent_losses is not None:
        reserved["recent_losses"] = dict(recent_losses)
    payload = {name: one.state for name, one in captured.items()}
    payload[RESERVED_KEY] = reserved
    return RunState(payload, [(components[name], one) for name, one in captured.items()])


def _note_aliases(components: Mapping[str, Component], captured: dict[str, Captured]) -> None:
    """Put into the record of each component which of its places hold an object that is in another place as well."""
    kinds = ("counters", "stateful")  # where there are none, that is said
    by_component: dict[str, list[list[Any]]] = {name: [] for name, one in components.items() if one.kind in kinds}
    for alias in find_aliases(components, lambda name: captured[name].state):
        by_component.setdefault(alias.place[0], []).append(alias.as_record())
    for name, aliases in by_component.items():
        captured[name] = replace(captured[name], record={**captured[name].record, ALIASES: aliases})


def _ties(states: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of tensors that are one tensor in memory, in groups of two and more.

    Args:
        states: The state of each module, by name.
    """
    by_address: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for component, state in states.items():
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and _has_memory(tensor):
                by_address.setdefault(_memory_of(tensor).data_ptr(), []).append((join(component, key), tensor))
    groups: dict[tuple[Any, ...], list[str]] = {}
    for address, found in by_address.items():
        for name, tensor in found if len(found) > 1 else ():
            where = (address, tensor.device, tensor.dtype, tuple(tensor.size()), tensor.stride())
            groups.setdefault(where, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _has_memory(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    return _memory_of(tensor).numel() > 0


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is in this process's memory: of a sharded tensor the local part, which may be empty."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _parameters(components: Mapping[str, Component]) -> dict[str, torch.Tensor]:
    return {name: p for component in components.values() for name, p in component.parameter_names().items()}


@dataclass
class Plan:
    """A restore that has passed every check and changed nothing yet.

    Attributes:
        pairs: What will be applied, by component.
        aliases: What is one object in several places.
        replaced: Hyper-parameters in which the file overrules the script, `name: live -> saved`.
        environment: Fields of the environment that differ, `field: saved -> now`.
        notices: Other differences that do not keep the state from being applied.
        recent_losses: The losses by which the next one is judged, as `LossLimit.capture` has them; None where none are.
        imported: What a checkpoint that was imported has not; empty for any other.
        parted: What components share since it was applied, or do not share any more, unlike in the run that saved.
    """

    pairs: list[tuple[Component, Captured]]
    rng: dict[str, Any] | None
    gradients: dict[str, torch.Tensor]
    aliases: Aliases
    replaced: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    recent_losses: Mapping[str, torch.Tensor] | None = None
    imported: str = ""
    parted: list[str] = field(default_factory=list)

    def apply(self, mixture: Mixture, *, streams: bool = True) -> None:
        """Put the state into the live objects, in the order that survives each other's side effects, RNG last.

        Code of the user's own can raise an exception in the middle (a `load_state_dict`, a hook). It is passed on with
        a note; every object has then its state from before, but for those in the mixture.

        Args:
            mixture: Is told which objects are being changed. They stay in it until the caller has noted their state.
            streams: Whether the random streams are set as well.

        Cost:
            With such code among the components, a copy of the whole live state in host memory beforehand.
        """
        pairs = sorted(self.pairs, key=lambda pair: pair[0].order)
        with RngStreams.untouched():  # a user's load_state_dict may draw, and the streams may not be restored
            before = _copy_of(pairs) if any(component.loads_by_own_code for component, _ in pairs) else None
            mixed_before, begun = mixture.names, []
            try:
                self.aliases.let_go()
                for component, captured in pairs:
                    begun.append(component.name)
                    mixture.add([component.name])
                    component.apply(captured)
                own, self.parted = self.aliases.unite()
                self.notices += own
            except BaseException as error:
                self.aliases.take_back()
                changed = begun if before is None else _put_back(before, begun)
                mixture.back_to({*mixed_before, *changed})
                error.add_note(_describe_failure((begun or ["plain dicts"])[-1], changed))
                raise
        self._set_gradients()
        if self.rng is not None and streams:
            RngStreams.apply(self.rng)

    def _set_gradients(self) -> None:
        """Clear every gradient, as at process start, and put back those that were part of the state."""
        parameters = _parameters({component.name: component for component, _ in self.pairs})
        objects = [component.obj for component, _ in self.pairs if has_attribute(component.obj, "param_groups")]
        optimized = [group["params"] for obj in objects for group in obj.param_groups]
        for parameter in (*parameters.values(), *chain.from_iterable(optimized)):
            parameter.grad = None
        drop_unreduced({component.name: component for component, _ in self.pairs})
        for name, saved in self.gradients.items():
            if name in parameters:
                parameters[name].grad = saved.to(parameters[name].device, copy=True)


def _copy_of(pairs: Iterable[tuple[Component, Captured]]) -> list[tuple[Component, Captured]]:
    """Return the live state of components, in host memory that nothing else uses."""
    live = [(component, component.capture()) for component, _ in pairs]
    copies = Staging().copy([captured.state for _, captured in live])
    return [
        (component, replace(captured, state=state)) for (component, captured), state in zip(live, copies, strict=True)
    ]


def _put_back(before: list[tuple[Component, Captured]], begun: Collection[str]) -> list[str]:
    """Give back the state from before, and return the names of the components that did not take it."""
    failed = []
    for component, captured in before:
        # A scheduler that was begun may have changed its optimizer.
        if component.name in begun or component.order == Order.OPTIMIZER:
            try:
                component.apply(captured)
            except BaseException:  # noqa: BLE001 - the first error is raised, and this component is named with it
                failed.append(component.name)
    return failed


def _describe_failure(failed: str, changed: Collection[str]) -> str:
    if not changed:
        return f"safeckpt: loading {failed} failed; every object has its state from before the restore."
    return (
        f"safeckpt: loading {failed} failed and the restore stopped half-way: {', '.join(changed)} may be changed, "
        "every other object has its state from before. Do not train on with these objects: build them again and call "
        "restore()."
    )


def plan(
    components: Mapping[str, Component],
    payload: Mapping[str, Any],
    *,
    only: Collection[str] | None = None,
    keep_live: Collection[str] = (),
    fresh: Collection[str] = (),
    faults: Collection[str] = (),
    path: object = None,
    read: Reader | None = None,
) -> Plan:
    """Check `payload` against the live objects, all of it, and return what to apply.

    Args:
        components: The live side.
        payload: The saved side.
        only: Names to restore, `"rng"` among them for the process's streams; None for everything.
        keep_live: Hyper-parameters, as `component.name`, whose live value stays.
        fresh: Components, and entries of plain dicts as `component.entry`, that keep their live state: they may be new.
        faults: What is known not to fit: these components are not looked at again.
        path: For the error text.
        read: Reads values straight from the file that `payload` is mapped from; None when it is in memory.

    Raises:
        ComponentMismatchError: A name is on one side only.
        StateMismatchError: Something does not fit; `mismatches` has every difference. No object was changed.
        ValueError: A name in `keep_live` is no hyper-parameter, or one in `fresh` is neither component nor entry.
    """
    reshard(components)
    reserved = payload[RESERVED_KEY]
    fresh_entries = _entries_by_component(fresh)
    _refuse_unknown_fresh(fresh_entries, components)
    wanted = [name for name in _wanted(components, reserved["components"], only, fresh, path) if name not in fresh]
    is_partial = only is not None and not set(reserved["components"]) <= set(only)
    rng = reserved[_RNG] if only is None or _RNG in only else None
    found = [one for one in faults if only is None or one.partition(": ")[0] in only]
    pairs: list[tuple[Component, Captured]] = []
    transfer = Transfer(read)
    with RngStreams.untouched():
        unfit = {one.partition(": ")[0] for one in faults}
        for name in wanted:
            if name in unfit:
                continue
            record = reserved["components"][name]
            component = components[name]
            if record["kind"] != component.kind:
                found.append(f"{name}: saved as a {record['kind']}, the live object is a {component.kind}")
                continue
            kept = {key: value for key, value in record.items() if key != "kind"}
            captured = Captured(payload[name], kept, transfer)
            if name in fresh_entries:
                captured = _keep_entries(component, captured, fresh_entries[name])
            if is_partial and isinstance(component, ModuleComponent):
                captured = component.keep_modes(captured)  # to evaluate in eval mode, for one
            found += component.check(captured)
            pairs.append((component, captured))
        if rng is not None:
            found += RngStreams.check(rng)
        found += _check_ties(reserved["ties"], pairs)
        found += _check_gradients(reserved["gradients"], pairs)
        if is_partial:
            found += _check_drivers([component for component, _ in pairs], components)
        aliases = Aliases(pairs, fresh_entries)
        found += aliases.check()
        if found:
            raise StateMismatchError(mismatches=found, path=path, cure=_IMPORT_AGAIN if faults else "")
        pairs = _keep_live(pairs, keep_live)
        replaced = [line for component, captured in pairs for line in component.replaced(captured)]
        notices = [line for component, captured in pairs for line in component.notices(captured)] + aliases.notices()
    changed = differences(reserved["environment"]) if rng is not None else []
    return Plan(
        pairs,
        rng,
        reserved["gradients"],
        aliases,
        replaced,
        changed,
        notices,
        recent_losses=reserved.get("recent_losses"),
    )


def _wanted(
    components: Mapping[str, Component],
    saved: Mapping[str, Any],
    only: Collection[str] | None,
    fresh: Collection[str],
    path: object,
) -> list[str]:
    """Return the components to restore, with those that are fresh.

    Raises:
        ComponentMismatchError: A name is on one side only.
    """
    if isinstance(only, str):
        raise TypeError(f"only takes a sequence of component names, for example ({only!r},)")
    if only is not None and not only:
        raise ValueError("only is empty, so nothing would be restored; name the components, or leave it out for all")
    wanted = list(components) if only is None else [name for name in dict.fromkeys(only) if name != _RNG]
    missing = [name for name in wanted if name not in saved and name not in fresh]
    unexpected = [name for name in (saved if only is None else wanted) if name not in components and name in saved]
    if missing or unexpected:
        available = list(saved) if only is None else [*saved, _RNG]
        raise ComponentMismatchError(missing=missing, unexpected=unexpected, available=available, path=path)
    return wanted


def _entries_by_component(dotted_names: Collection[str]) -> dict[str, list[str]]:
    """Return the part behind the first dot of each name, by the part before it."""
    by_component: dict[str, list[str]] = {}
    for dotted in dotted_names:
        owner, dot, entry = dotted.partition(".")
        by_component.setdefault(owner, []).extend([entry] if dot else ())
    return by_component


def _refuse_unknown_fresh(fresh: Mapping[str, list[str]], components: Mapping[str, Component]) -> None:
    unknown = sorted(fresh.keys() - components.keys())
    if unknown:
        raise ValueError(f"fresh names no component: {', '.join(unknown)}; there are {', '.join(components)}")


def _keep_entries(component: Component, captured: Captured, entries: Collection[str]) -> Captured:
    try:
        return component.keep_entries(captured, entries)
    except KeyError as error:
        raise ValueError(
            f"fresh: {component.name} has no entry {error.args[0]!r} that can stay by itself; entries of plain "
            f"dicts can, and whole components: fresh=({component.name!r},)"
        ) from None


def _check_drivers(driving: list[Component], components: Mapping[str, Component]) -> list[str]:
    """Refuse a scheduler without its optimizer: it would go on from a rate that the optimizer does not have."""
    restored = {id(component.obj) for component in driving}
    owners = {id(component.obj): name for name, component in components.items()}
    found = []
    for component in driving:
        driven = getattr(component.obj, "optimizer", None)
        if component.kind == "scheduler" and id(driven) in owners and id(driven) not in restored:
            name = owners[id(driven)]
            found.append(f"{component.name}: its learning rate is in {name}, which is not in only=; add {name!r}")
    return found


def _check_ties(saved: list[list[str]], pairs: list[tuple[Component, Captured]]) -> list[str]:
    """Compare which tensors are one, among those that are on both sides."""
    modules = {component.name: captured for component, captured in pairs if isinstance(component, ModuleComponent)}
    now = {component.name: component.state() for component, _ in pairs if isinstance(component, ModuleComponent)}
    both = {
        join(name, key)
        for name, state in now.items()
        for key, tensor in state.items()
        # Where this process has nothing of a sharded tensor it cannot tell.
        if key in modules[name].state and not (hasattr(tensor, "to_local") and not _has_memory(tensor))
    }

    def visible(groups: list[list[str]]) -> set[frozenset[str]]:
        cut = (both.intersection(names) for names in groups)
        return {frozenset(names) for names in cut if len(names) > 1}

    before, live = visible(saved), visible(_ties(now))
    untied = [f"{_and(names)}: one tensor in the checkpoint, separate tensors now" for names in before - live]
    tied = [f"{_and(names)}: separate tensors in the checkpoint, one tensor now" for names in live - before]
    return sorted(untied) + sorted(tied)


def _check_gradients(saved: Mapping[str, torch.Tensor], pairs: list[tuple[Component, Captured]]) -> list[str]:
    """Compare saved gradients with the parameters that they will be given to."""
    live = _parameters({component.name: component for component, _ in pairs})
    owners = {component.name for component, _ in pairs}
    found = []
    for name, gradient in saved.items():
        if name.partition(".")[0] not in owners:
            continue
        if name not in live:
            found.append(f"{name}: the checkpoint has a gradient for it, and there is no such parameter now")
        elif gradient.size() != live[name].size():
            found.append(
                f"{name}: saved gradient of shape {list(gradient.size())}, live shape {list(live[name].size())}"
            )
    return found


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _keep_live(pairs: list[tuple[Component, Captured]], keep_live: Collection[str]) -> list[tuple[Component, Captured]]:
    if isinstance(keep_live, str):
        raise TypeError(f"keep_live takes a sequence of names, for example ({keep_live!r},)")
    for name in keep_live:
        if "." not in name:
            raise ValueError(f"keep_live takes hyper-parameters, such as 'optimizer.weight_decay'; got {name!r}")
    by_component = _entries_by_component(keep_live)
    names = [component.name for component, _ in pairs]
    unknown = by_component.keys() - set(names)
    if unknown:
        raise ValueError(
            f"keep_live names no restored component: {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    kept = []
    for component, captured in pairs:
        try:
            kept.append((component, component.keep(captured, by_component.get(component.name, ()))))
        except KeyError as error:
            there = ", ".join(component.hyperparameters(captured)) or "none"
            raise ValueError(
                f"keep_live: {component.name} has no hyper-parameter {error.args[0]!r}; it has: {there}"
            ) from None
    return _follow_schedules(kept)


def _follow_schedules(pairs: list[tuple[Component, Captured]]) -> list[tuple[Component, Captured]]:
    """Give the optimizers the rates that schedules with kept arguments have at this step."""
    rates = {
        id(component.obj.optimizer): captured.record["rates"]
        for component, captured in pairs
        if captured.record.get("rates") is not None
    }
    return [
        (component, component.with_rates(captured, rates[id(component.obj)]))
        if isinstance(component, OptimizerComponent) and id(component.obj) in rates
        else (component, captured)
        for component, captured in pairs
    ]
