"""Find out if a safe load would read back an object of a type that is not plain."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

from safeckpt.file.pickle_scan import PickleError, UntrustedGlobalError, scan_pickle
from safeckpt.file.writing.pickling import pickle_payload
from safeckpt.system.torch_private import allowed_globals, rebuild_from_type_v2, registered_globals

__all__ = ["is_allowed", "parts_of", "why_unreadable"]


def is_allowed(kind: Any) -> bool:
    """Return whether a class or function is on torch's list, or was registered by the user."""
    try:
        return any(kind is other for known in (registered_globals(), allowed_globals()) for other in known.values())
    except (TypeError, ValueError):  # what the user registered cannot be listed; torch.load will say so
        return False


def why_unreadable(value: Any) -> str | None:
    """Return why a safe load would refuse an object, None when it would read it."""
    try:
        scan_pickle(pickle_payload(value).data)
    except UntrustedGlobalError as error:
        return f"it is pickled by way of {error.name}, which a safe load does not allow"
    except PickleError as error:
        return f"a safe load would refuse it: {error}"
    except (
        pickle.PicklingError,
        TypeError,
        AttributeError,
        RecursionError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        return f"pickling it fails: {error}"
    return None


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """Return the values inside an object of a registered type, each with how it is reached."""
    reducer = copyreg.dispatch_table.get(type(value))
    reduced = reducer(value) if reducer else value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return []
    function, args, *rest = reduced
    if function is rebuild_from_type_v2:  # a tensor: what it is made of was looked at, its attributes were not
        rest, args = list(args[3:]), ()
    parts = [(f".__reduce_ex__(2)[1][{index}]", arg) for index, arg in enumerate(args) if not isinstance(arg, type)]
    state = rest[0] if rest else None
    if isinstance(state, dict):
        parts += [(f".{name}", part) for name, part in state.items()]
    elif state is not None:
        parts.append((".__reduce_ex__(2)[2]", state))
    return parts
