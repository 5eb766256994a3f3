"""Names of a package that are imported when they are first asked for, PEP 562."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["module_getattr"]


def module_getattr(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are looked up in other modules.

    Args:
        package: The package's own name.
        modules: Name to the module that has it.
    """

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next time this is not called
        return value

    return getattribute
