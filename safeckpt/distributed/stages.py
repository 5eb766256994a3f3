"""Ranks that hold different tensors of one model, such as the stages of a pipeline or the experts of a mesh.

Names are the same wherever a tensor is. So a checkpoint holds one model, put together by name from what the ranks have,
and a rank takes back what has a name in its live objects: whatever stages there were, and whatever there are now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from safeckpt.distributed.fingerprint import exact_digest_of, joined
from safeckpt.errors import StateMismatchError, UnsavableStateError
from safeckpt.state import RESERVED_KEY
from safeckpt.state.tree import join

__all__ = ["Names", "names_in", "refuse_left_over", "stage_of", "united", "without_others"]

Names = frozenset[tuple[str, str]]  # component, and what is named in it

_OF_MODULES = ("classes", "training", "options")  # of a module's record: what is named by the path of a submodule
_VERSIONS = "_metadata"  # of a module's state
_OF_GROUPS = frozenset({"params", "param_names"})  # of a group of parameters; the rest are its options


def names_in(payload: Mapping[str, Any]) -> Names:
    """Return the names of what one rank may have and another has not: entries of modules, parameters of optimizers."""
    return frozenset(
        (name, key)
        for name, record in payload[RESERVED_KEY]["components"].items()
        for key in _keys_of(payload[name], record)
    )


def _keys_of(state: Any, record: Mapping[str, Any]) -> Iterator[str]:
    if record["kind"] == "module":
        yield from state
        yield from record["requires_grad"]
    elif _is_usual(state, record):
        yield from (slot["name"] for slots in record["slots"] for slot in slots)


def _is_usual(state: Any, record: Mapping[str, Any]) -> bool:
    return record["kind"] == "optimizer" and isinstance(state, dict) and "param_groups" in state


def stage_of(payload: Mapping[str, Any]) -> str:
    """Return a digest of these names: ranks with the same one hold the same stage."""
    return joined((f"{component}\0{key}", "") for component, key in names_in(payload))


def united(payloads: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the payload that one rank would save which has all of these stages; the first has the last word.

    Raises:
        UnsavableStateError: Optimizers of two stages have other groups, or other options in them.
    """
    result = dict(payloads[0])
    reserved = result[RESERVED_KEY] = dict(result[RESERVED_KEY])
    records = reserved["components"] = dict(reserved["components"])
    for payload in payloads[1:]:
        other = payload[RESERVED_KEY]
        reserved["gradients"] = {**reserved["gradients"], **_missing(other["gradients"], reserved["gradients"])}
        reserved["ties"] = [*reserved["ties"], *(names for names in other["ties"] if names not in reserved["ties"])]
        for name, record in other["components"].items():
            if record["kind"] == "module":
                result[name] = _united_state(result[name], payload[name])
                both = {key: {**record[key], **records[name][key]} for key in ("requires_grad", *_OF_MODULES)}
                records[name] = {**records[name], **both}
            elif _is_usual(payload[name], record):
                result[name], records[name] = _united_optimizers(
                    name, (result[name], records[name]), (payload[name], record)
                )
    return result


def _missing(entries: Mapping[Any, Any], there: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in entries.items() if key not in there}


def _united_state(one: Any, other: Any) -> Any:
    state = one.copy()
    state.update(_missing(other, one))
    _set_versions(state, {**_versions(other), **_versions(one)})
    return state


def _versions(state: Any) -> Mapping[str, Any]:
    """Return what torch keeps beside the entries of a module: versions, by the path of the submodule."""
    found: Mapping[str, Any] = getattr(state, _VERSIONS, {})
    return found


def _set_versions(state: Any, versions: Mapping[str, Any]) -> None:
    if versions:
        setattr(state, _VERSIONS, OrderedDict(versions))


def _united_optimizers(
    name: str, one: tuple[Mapping[str, Any], Mapping[str, Any]], other: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    (state, record), (more, their_record) = one, other
    if [_options(group) for group in state["param_groups"]] != [_options(group) for group in more["param_groups"]]:
        raise UnsavableStateError(
            location=name,
            type_name="optimizer of another stage",
            reason="its groups of parameters, or their options, are others than those of the first stage",
            cure="give the optimizers of all stages the same groups, empty ones too, and the same options.",
        )
    entries = dict(state["state"])
    known = {slot["name"] for slots in record["slots"] for slot in slots}
    number = 1 + max((n for group in state["param_groups"] for n in group["params"]), default=-1)
    groups, all_slots = [], []
    for group, slots, theirs, their_slots in zip(
        state["param_groups"], record["slots"], more["param_groups"], their_record["slots"], strict=True
    ):
        added = [position for position, slot in enumerate(their_slots) if slot["name"] not in known]
        numbers = {theirs["params"][position]: number + index for index, position in enumerate(added)}
        number += len(added)
        entries.update((numbers[old], more["state"][old]) for old in numbers if old in more["state"])
        groups.append({**group, "params": [*group["params"], *numbers.values()]})
        if "param_names" in group:
            groups[-1]["param_names"] = [*group["param_names"], *(theirs["param_names"][n] for n in added)]
        all_slots.append([*slots, *(their_slots[position] for position in added)])
    stepped = record.get("stepped") or their_record.get("stepped")
    return {**state, "state": entries, "param_groups": groups}, {**record, "slots": all_slots, "stepped": stepped}


def _options(group: Mapping[str, Any]) -> str:
    return exact_digest_of({key: value for key, value in group.items() if key not in _OF_GROUPS})


def without_others(payload: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[dict[str, Any], Names]:
    """Return a payload without what only other ranks have, and the names that were left out.

    It is left as it is where this rank has something that is not in it: then it is of another model.

    Args:
        payload: What was saved.
        live: What this rank would save now.
    """
    saved = names_in(payload)
    mine = frozenset(one for one in names_in(live) if one[0] in payload[RESERVED_KEY]["components"])
    components = {name for name, _ in mine}
    gone = frozenset(one for one in saved - mine if one[0] in components)
    if not gone or mine - saved:
        return dict(payload), frozenset()
    result = dict(payload)
    reserved = result[RESERVED_KEY] = dict(result[RESERVED_KEY])
    records = reserved["components"] = dict(reserved["components"])
    for name in components:
        others = {key for component, key in gone if component == name}
        state, record = result[name], records[name]
        if record["kind"] == "module":
            paths = _paths_of(others, record["classes"], live[RESERVED_KEY]["components"][name]["classes"])
            result[name] = _cut_state(state, others, paths)
            cut = {key: _without(record[key], paths) for key in _OF_MODULES}
            records[name] = {**record, **cut, "requires_grad": _without(record["requires_grad"], others)}
        else:
            result[name], records[name] = _cut_optimizer(state, record, others)
    reserved["gradients"] = _without(reserved["gradients"], {join(component, key) for component, key in gone})
    return result, gone


def _paths_of(others: Collection[str], saved: Collection[str], live: Collection[str]) -> set[str]:
    """Return the submodules that only other ranks have: those around their tensors, and whatever is inside these."""
    around = {path for path in saved if path not in live and any(key.startswith(f"{path}.") for key in others)}
    return around | {path for path in saved if any(path.startswith(f"{one}.") for one in around)}


def _without(entries: Mapping[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    return {key: value for key, value in entries.items() if key not in keys}


def _cut_state(state: Any, others: Collection[str], paths: Collection[str]) -> Any:
    cut = state.copy()
    for key in state.keys() & others:
        del cut[key]
    _set_versions(cut, _without(_versions(state), paths))
    return cut


def _cut_optimizer(
    state: Mapping[str, Any], record: Mapping[str, Any], others: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Number the parameters that are left anew, as an optimizer of them alone does."""
    groups, all_slots = [], []
    numbers: dict[Any, int] = {}
    for group, slots in zip(state["param_groups"], record["slots"], strict=True):
        kept = [position for position, slot in enumerate(slots) if slot["name"] not in others]
        for position in kept:
            numbers[group["params"][position]] = len(numbers)
        groups.append({**group, "params": [numbers[group["params"][position]] for position in kept]})
        if "param_names" in group:
            groups[-1]["param_names"] = [group["param_names"][position] for position in kept]
        all_slots.append([slots[position] for position in kept])
    entries = {numbers[old]: entry for old, entry in state["state"].items() if old in numbers}
    return {**state, "state": entries, "param_groups": groups}, {**record, "slots": all_slots}


def refuse_left_over(names: Names, path: object) -> None:
    """Refuse to restore a checkpoint that has more than all ranks together.

    Args:
        names: What every rank has left out.
        path: The checkpoint.

    Raises:
        StateMismatchError: There are such names.
    """
    if names:
        found = [f"{join(component, key)}: only in the checkpoint" for component, key in sorted(names)]
        raise StateMismatchError(mismatches=found, path=path)
