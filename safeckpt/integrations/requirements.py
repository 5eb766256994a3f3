"""What an integration needs: its trainer in a version that was tested, and the attributes that it relies on."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

__all__ = ["check_code", "check_hooks", "requires"]

_versions: dict[str, str] = {}  # of the packages that were required, by the name they are imported by


def requires(
    package: str, minimum: str, below: str | None, extra: str, *, distribution: str | None = None
) -> ModuleType:
    """Import a package and check that its version is one that was tested.

    Args:
        package: The name it is imported by.
        minimum: The oldest version that is accepted, such as `"2.6"`.
        below: The first version that is refused; a pre-release of it is refused as well. None: no newer one is.
        extra: The extra of safeckpt that installs it.
        distribution: The name it is installed by, where that is another one.

    Returns:
        The package.

    Raises:
        ImportError: It is not installed, or in another version; the text says what to install.

    Example:
        >>> requires("torch", "2.10", None, "test").__name__
        'torch'
    """
    installed_as = distribution or package
    span = f"{installed_as}>={minimum}" + ("" if below is None else f",<{below}")
    cure = f'Next: pip install "safeckpt[{extra}]"'
    try:
        module = importlib.import_module(package)
        version = metadata.version(installed_as)
    except ModuleNotFoundError as error:  # of which PackageNotFoundError is one
        if not isinstance(error, metadata.PackageNotFoundError) and error.name != package:
            raise  # it is there, and a package that it needs is not
        raise ImportError(
            f"safeckpt's integration needs {span}, which is not installed. {cure}", name=package
        ) from error
    release = _release(version)
    if release < _release(minimum) or (below is not None and release >= _release(below)):
        raise ImportError(
            f"safeckpt's integration was tested with {span}; {version} is installed. It relies on the inside of the "
            f"trainer, which another version may have changed, so it is not used. {cure}",
            name=package,
        )
    _versions[package] = version
    return module


def check_hooks(owner: Any, hooks: Mapping[str, str]) -> None:
    """Check that an object, a class or a module of a trainer has what an integration relies on.

    Args:
        owner: The object, class or module; of a package that was `requires`d.
        hooks: Name of each attribute to what it is relied on for, `{"_run_epoch": "the end of an epoch"}`. A dotted
            name leads through objects, `"fit_loop.epoch_loop"`.

    Raises:
        RuntimeError: An attribute is gone; the text names the package, its version, and all of them. Nothing was
            changed.
    """
    kind = owner if isinstance(owner, ModuleType | type) else type(owner)
    gone = {name: purpose for name, purpose in hooks.items() if not _has(owner, name)}
    _refuse_gone(gone, kind.__name__, _packages_of(kind))


def check_code(function: Callable[..., Any], hooks: Mapping[str, str]) -> None:
    """Check that a function of a trainer names attributes that are there only when it runs, so that it sets them.

    Args:
        function: The function, of a package that was `requires`d.
        hooks: As in `check_hooks`.

    Raises:
        RuntimeError: As in `check_hooks`.
    """
    plain = inspect.unwrap(function)
    gone = {name: purpose for name, purpose in hooks.items() if name not in plain.__code__.co_names}
    _refuse_gone(gone, plain.__qualname__, [plain.__module__.partition(".")[0]])


def _refuse_gone(gone: Mapping[str, str], owner: str, packages: list[str]) -> None:
    if not gone:
        return
    package = next((name for name in packages if name in _versions), None)
    what = "the package" if package is None else f"{package} {_versions[package]}"
    listed = "".join(f"\n  {name}: {purpose}" for name, purpose in gone.items())
    raise RuntimeError(
        f"{owner} of {what} has no longer what safeckpt relies on:{listed}\n"
        "Nothing was changed and nothing is trained. Next: install a version of it that safeckpt was tested with."
    )


def _has(owner: Any, dotted: str) -> bool:
    """Return whether there is an attribute; a property whose value depends on a started trainer is not asked for."""
    name, _, rest = dotted.partition(".")
    if not rest:
        missing = object()
        return inspect.getattr_static(owner, name, missing) is not missing or hasattr(owner, name)
    return hasattr(owner, name) and _has(getattr(owner, name), rest)


def _packages_of(kind: type | ModuleType) -> list[str]:
    """Return the packages that a class and its bases are from, a user's subclass first."""
    modules = [kind.__name__] if isinstance(kind, ModuleType) else [one.__module__ for one in kind.__mro__]
    return [module.partition(".")[0] for module in modules]


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, without zeros at the end: "2.6.0rc1" is (2, 6)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
