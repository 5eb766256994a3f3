"""Ranks that hold different tensors of one model, such as the stages of a pipeline or the experts of a mesh.

Names are the same wherever a tensor is. So a checkpoint holds one model, put together by name from what the ranks have,
and a rank takes back what has a name in its live objects: whatever stages there were, and whatever there are now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from safeckpt.distributed.fingerprint import exact_digest_of, joined
from safeckpt.errors import StateMismatchError, UnsavableStateError
from safeckpt.state import RESERVED_KEY
from safeckpt.state.tree import join
from safeckpt.system.torch_private import set_versions, versions_of

__all__ = ["Names", "names_in", "refuse_left_over", "stage_of", "united", "without_others"]

Names = frozenset[tuple[str, str]]  # component, and what is named in it

_OF_MODULES = ("classes", "training", "options")  # of a module's record: what is named by the path of a submodule
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
        reserved["gradients"] = {**other["gradients"], **reserved["gradients"]}
        reserved["ties"] = [*reserved["ties"], *(names for names in other["ties"] if names not in reserved["ties"])]
        for name, record in other["components"].items():
            if record["kind"] == "module":
                result[name] = _united_modules(result[name], payload[name])
                both = {key: {**record[key], **records[name][key]} for key in ("requires_grad", *_OF_MODULES)}
                records[name] = {**records[name], **both}
            elif _is_usual(payload[name], record):
                _refuse_other_options(name, result[name], payload[name])
                known = set(_keys_of(result[name], records[name]))
                more = (
                    [one for one in members if one.slot["name"] not in known]
                    for members in _members(payload[name], record)
                )
                members = [one + two for one, two in zip(_members(result[name], records[name]), more, strict=True)]
                stepped = records[name].get("stepped") or record.get("stepped")
                result[name], records[name] = _of_members(result[name], {**records[name], "stepped": stepped}, members)
    return result


def _united_modules(one: Any, other: Any) -> Any:
    state = one.copy()
    state.update(_without(other, one))
    return _with_versions(state, {**(versions_of(other) or {}), **(versions_of(one) or {})})


def _with_versions(state: Any, versions: Mapping[str, Any]) -> Any:
    if versions:
        set_versions(state, OrderedDict(versions))
    return state


def _refuse_other_options(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if [_options(group) for group in one["param_groups"]] != [_options(group) for group in other["param_groups"]]:
        raise UnsavableStateError(
            location=name,
            type_name="optimizer of another stage",
            reason="its groups of parameters, or their options, are others than those of the first stage",
            cure="give the optimizers of all stages the same groups, empty ones too, and the same options.",
        )


def _options(group: Mapping[str, Any]) -> str:
    return exact_digest_of(_without(group, _OF_GROUPS))


class _Member(NamedTuple):
    """What an optimizer has of one parameter."""

    slot: Mapping[str, Any]
    entries: list[Any]  # its state, if it has any
    names: list[Any]  # the one that its group has for it, if it has names


def _members(state: Mapping[str, Any], record: Mapping[str, Any]) -> list[list[_Member]]:
    """Return what an optimizer has of each parameter, by group."""
    entries = state["state"]
    return [
        [
            _Member(slot, [entries[number]] if number in entries else [], group.get("param_names", [])[place:][:1])
            for place, (number, slot) in enumerate(zip(group["params"], slots, strict=True))
        ]
        for group, slots in zip(state["param_groups"], record["slots"], strict=True)
    ]


def _of_members(
    state: Mapping[str, Any], record: Mapping[str, Any], members: list[list[_Member]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer with these parameters in its groups, numbered as one that was made of them."""
    entries = _without(state["state"], {number for group in state["param_groups"] for number in group["params"]})
    groups, count = [], 0
    for group, some in zip(state["param_groups"], members, strict=True):
        numbers = range(count, count + len(some))
        count += len(some)
        groups.append({**group, "params": list(numbers)})
        if "param_names" in group:
            groups[-1]["param_names"] = [name for one in some for name in one.names]
        entries.update((number, entry) for number, one in zip(numbers, some, strict=True) for entry in one.entries)
    slots = [[one.slot for one in some] for some in members]
    return {**state, "state": entries, "param_groups": groups}, {**record, "slots": slots}


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
            kept = state.copy()
            for key in state.keys() & others:
                del kept[key]
            result[name] = _with_versions(kept, _without(versions_of(state) or {}, paths))
            cut = {key: _without(record[key], paths) for key in _OF_MODULES}
            records[name] = {**record, **cut, "requires_grad": _without(record["requires_grad"], others)}
        else:
            members = [[one for one in some if one.slot["name"] not in others] for some in _members(state, record)]
            result[name], records[name] = _of_members(state, record, members)
    reserved["gradients"] = _without(reserved["gradients"], {join(component, key) for component, key in gone})
    return result, gone


def _paths_of(others: Collection[str], saved: Collection[str], live: Collection[str]) -> set[str]:
    """Return the submodules that only other ranks have: those around their tensors, and whatever is inside these."""
    around = {path for path in saved if path not in live and any(key.startswith(f"{path}.") for key in others)}
    return around | {path for path in saved if any(path.startswith(f"{one}.") for one in around)}


def _without(entries: Mapping[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    return {key: value for key, value in entries.items() if key not in keys}


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
