"""A checkpoint that was made of another tool's files: completed from the live objects when it is restored.

What that tool has saved of a component is its state alone. What else a checkpoint of ours says about it (names, flags,
classes) is taken from the live object, so that the checks of a restore compare the two, by position where the source
knows no names. What it has not saved stays as the script has made it, and is named::

    {"<component>": its state, ...,
     "safeckpt": {"components": {"<component>": {"entries": [...] or None, "optional": bool, "containers": [...]}},
                  "imported": {"kind": "Lightning", "name": "last.ckpt", "position": "..."}}}
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from safeckpt.errors import listed
from safeckpt.state.component import Captured, Component, has_attribute
from safeckpt.state.containers import to_plain
from safeckpt.state.environment import environment
from safeckpt.state.optimizer import NOT_OPTIONS
from safeckpt.state.random_streams import RngStreams
from safeckpt.state.run_state import RESERVED_KEY, capture
from safeckpt.state.source_state import is_optimizer_state

__all__ = ["IMPORTED", "Completed", "complete", "imported_payload"]

IMPORTED = "imported"

_PREFIXES = ("module.", "_orig_mod.")  # of DDP and torch.compile, where they were not taken off
_SET_BY_SCHEDULERS = frozenset({
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",
})  # fmt: skip
_WHOLE = ("optimizer", "loader", "generator")  # kinds whose state is all or nothing
# Options that are newer than some files: the optimizer sets them by itself.
_SET_BY_TORCH = frozenset({
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov",
    *_SET_BY_SCHEDULERS,
})  # fmt: skip


class Completed(NamedTuple):
    """An imported payload as a checkpoint has it.

    Attributes:
        payload: The payload.
        live: Components that stay as they are, since it has nothing of them.
        faults: What of the form of a state does not fit, one sentence each.
        text: What the run has to know about itself.
        partial: Components of which it has some entries: the others are live, and were judged by no guard.
    """

    payload: dict[str, Any]
    live: list[str]
    faults: list[str]
    text: str
    partial: list[str]


def imported_payload(
    states: Mapping[str, Any],
    entries: Mapping[str, list[str]],
    *,
    optional: Collection[str],
    kind: str,
    name: str,
    position: str,
) -> dict[str, Any]:
    """Return the payload of a checkpoint that is to be completed.

    Args:
        states: The state of each component; of one in `entries` a dict with some entries of it.
        entries: The names of those entries.
        optional: Components that are left out where there is no such object.
        kind: What has saved the source.
        name: Of its file or folder.
        position: Where its data stood, in words; empty where it does not tell.
    """
    components = {
        one: {"entries": entries.get(one), "optional": one in optional, "containers": to_plain(state, one).notes}
        for one, state in states.items()
    }
    imported = {"kind": kind, "name": name, "position": position}
    return {**states, RESERVED_KEY: {"components": components, IMPORTED: imported}}


def complete(
    payload: Mapping[str, Any], components: Mapping[str, Component], name: str, fresh: Collection[str] = ()
) -> Completed | None:
    """Return an imported payload with what it lacks, from the live objects; None where it is a checkpoint of ours.

    Args:
        payload: What was read.
        components: The live objects.
        name: Of the file.
        fresh: Components that keep their live state, whatever it has of them.
    """
    own = payload[RESERVED_KEY]
    if IMPORTED not in own:
        return None
    live = capture(components)
    reserved = live.payload[RESERVED_KEY]
    records: dict[str, Any] = {}
    result: dict[str, Any] = {}
    faults: list[str] = []
    for one, given in own["components"].items():
        if one in fresh or (given["optional"] and one not in components):
            continue
        result[one], records[one] = payload[one], dict(given)
        if one in components:  # else the restore says so
            record = reserved["components"][one]
            records[one] = {key: value for key, value in record.items() if key != "aliases"}
            records[one]["containers"] = _containers(given, record)
            state = _with_live_entries(payload[one], live.payload[one], given["entries"])
            convert, compare = _KINDS.get(components[one].kind, (_as_it_is, _nothing))
            result[one] = convert(state, Captured(live.payload[one], record), _tied(one, reserved["ties"]))
            found = list(_check_entries(components[one], live.payload[one], given["entries"]))
            found = found or list(compare(result[one], Captured(live.payload[one], record)))
            if components[one].kind == "optimizer" and not found:
                records[one]["stepped"] = bool(result[one]["state"])
            faults += [f"{one}: {text}" for text in found]
    kept = [one for one in components if one not in records]
    faults += [
        f"{one}: it counts the steps, and the import has none for it; import without a mapping, or go on in a loop of "
        "your own"
        for one in kept
        if has_attribute(components[one].obj, "counts_steps")
    ]
    result[RESERVED_KEY] = {
        "components": records,
        "ties": reserved["ties"],
        "rng": RngStreams.capture(),
        "environment": environment(),
        "gradients": {},
    }
    partial = [one for one, given in own["components"].items() if given["entries"] and one in records]
    return Completed(result, kept, faults, _text(own[IMPORTED], kept, components, name), partial)


def _text(imported: Mapping[str, str], kept: list[str], components: Mapping[str, Component], name: str) -> str:
    lines = ["the random streams of the process"]
    for one in kept:
        is_loader = has_attribute(components[one].obj, "seek")
        told = imported["position"]
        where = f"the source stood at {told}" if told else "the source does not tell; see loader.seek(epoch, batch)"
        lines.append(f"{one}: {where}" if is_loader else one)
    text = "\n  ".join(lines)
    return (
        f"{name} was imported from {imported['kind']} ({imported['name']}): the run goes on with what was saved there, "
        f"and not bit for bit. As this script has made it stays what was not saved:\n  {text}\n"
        "Everything is part of the next save."
    )


def _with_live_entries(state: Any, live: Any, entries: list[str] | None) -> Any:
    """Return a state of which only some entries were imported, with the others as they are."""
    return state if entries is None or not isinstance(live, Mapping) else {**live, **state}


def _containers(given: Mapping[str, Any], live: Mapping[str, Any]) -> list[Any]:
    """Return the notes of what was imported, and of the entries that stay as they are."""
    stays = given["entries"] is not None
    kept = [note for note in live.get("containers", ()) if stays and note[0] and note[0][0] not in given["entries"]]
    return [*kept, *given.get("containers", ())]


def _tied(name: str, ties: list[list[str]]) -> dict[str, list[str]]:
    """Return, for each tensor of a module that has several names, the others."""
    found = {}
    for group in ties:
        own = [one.removeprefix(f"{name}.") for one in group if one.startswith(f"{name}.")]
        found.update({one: [other for other in own if other != one] for one in own})
    return found


def _check_entries(component: Component, live: Any, entries: list[str] | None) -> Iterator[str]:
    """Refuse entries of what has none that stand for themselves."""
    if entries and (component.kind in _WHOLE or not isinstance(live, Mapping)):
        yield f"{listed(entries)} cannot be imported alone into a {component.kind}; import all of its state"


# -- what each kind needs ---------------------------------------------------------------------------------------------


def _as_it_is(state: Any, live: Captured, tied: Mapping[str, list[str]]) -> Any:
    return state


def _nothing(state: Any, live: Captured) -> Iterator[str]:
    yield from ()


def _module_state(state: Any, live: Captured, tied: Mapping[str, list[str]]) -> Any:
    """Return the tensors under the live names: without prefixes of wrappers, and tied ones under each of their names.

    A safetensors file has a tied tensor once.
    """
    if not isinstance(state, Mapping):
        return state
    found = OrderedDict(state)
    for prefix in _PREFIXES:
        if found and all(str(key).startswith(prefix) for key in found) and not any(key in live.state for key in found):
            found = OrderedDict((str(key).removeprefix(prefix), value) for key, value in found.items())
    for key in live.state:
        twin = next((one for one in tied.get(key, ()) if one in found), None)
        if key not in found and twin is not None:
            found[key] = found[twin]
    return found


def _check_dict(state: Any, live: Captured) -> Iterator[str]:
    if not isinstance(state, Mapping):
        yield f"the source has a {type(state).__name__} for it, not a dict"


def _generator_state(state: Any, live: Captured, tied: Mapping[str, list[str]]) -> Any:
    """Return the state as it is kept here: torch gives away the bytes alone."""
    return {"state": state} if isinstance(state, torch.Tensor) else state


def _check_generator(state: Any, live: Captured) -> Iterator[str]:
    saved = state.get("state") if isinstance(state, Mapping) else None
    if not _is_alike(saved, live.state["state"]):
        yield f"what the source has for it is no state of a {live.record['class']}"


def _is_alike(saved: Any, live: Any) -> bool:
    """Return whether two states of generators have one form."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.dtype == live.dtype and saved.size() == live.size()
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        return saved.keys() == live.keys() and all(_is_alike(saved[key], live[key]) for key in live)
    return type(saved) is type(live) or None in (saved, live)


def _check_module(state: Any, live: Captured) -> Iterator[str]:
    if not isinstance(state, Mapping):
        yield f"the source has a {type(state).__name__} for it, not a state_dict"


def _check_optimizer(state: Any, live: Captured) -> Iterator[str]:
    """Compare what positions alone can tell: groups, numbers of parameters, shapes of their moments, options."""
    if not is_optimizer_state(state):
        yield "the source has no state of an optimizer for it"
        return
    groups, slots = state["param_groups"], live.record["slots"]
    if not all(_is_group(group) for group in groups):
        yield "the source has a group without a list of the numbers of its parameters"
        return
    counts = [len(group["params"]) for group in groups]
    if counts != [len(row) for row in slots]:
        yield f"the source has groups of {counts} parameters, the live optimizer of {[len(row) for row in slots]}"
        return
    for number, (group, now) in enumerate(zip(groups, live.state["param_groups"], strict=True)):
        unknown = sorted(group.keys() - now.keys() - _SET_BY_SCHEDULERS - NOT_OPTIONS)
        if unknown:
            yield f"group {number}: {listed(unknown)} in the source are no options of the live {live.record['class']}"
        missing = sorted(now.keys() - group.keys() - _SET_BY_TORCH - NOT_OPTIONS)
        if missing:
            yield f"group {number}: the source has no {listed(missing)}"
        for slot, index in zip(slots[number], group["params"], strict=True):
            yield from _check_moments(state["state"].get(index), slot)


def _is_group(group: Any) -> bool:
    parameters = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(parameters, list) and all(type(number) is int for number in parameters)


def _check_moments(entry: Any, slot: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(entry, Mapping | None):
        yield f"{slot['name']}: its state in the source is a {type(entry).__name__}, not a dict"
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        shape = list(value.size()) if isinstance(value, torch.Tensor) and value.numel() > 1 else slot["shape"]
        if len(shape) == len(slot["shape"]) and shape != slot["shape"]:
            yield f"{slot['name']}: {key} has shape {shape} in the source, the parameter {slot['shape']}"


def _check_keys(state: Any, live: Captured) -> Iterator[str]:
    """Compare the names of a state that torch takes whatever is in it."""
    if not isinstance(state, Mapping):
        yield f"the source has a {type(state).__name__} for it, not a state_dict"
        return
    if live.state:  # that of a scaler that is turned off has none
        missing = [str(key) for key in live.state if key not in state and not str(key).startswith("_")]
        if missing and state:
            yield f"the source has no {listed(missing)}"
        surplus = [str(key) for key in state if key not in live.state and not str(key).startswith("_")]
        if surplus := sorted(set(surplus) - {"verbose"}):
            yield f"the live {live.record['class']} has no {listed(surplus)}"
        for key in [key for key in live.state if key in state and isinstance(live.state[key], int | float)]:
            if not isinstance(state[key], int | float | torch.Tensor | None):
                yield f"{key} is a {type(state[key]).__name__} in the source, not a number"


_Convert = Callable[[Any, Captured, Mapping[str, list[str]]], Any]
_Compare = Callable[[Any, Captured], Iterator[str]]
_KINDS: dict[str, tuple[_Convert, _Compare]] = {
    "module": (_module_state, _check_module),
    "optimizer": (_as_it_is, _check_optimizer),
    "scheduler": (_as_it_is, _check_keys),
    "scaler": (_as_it_is, _check_keys),
    "counters": (_as_it_is, _check_dict),
    "generator": (_generator_state, _check_generator),
}
