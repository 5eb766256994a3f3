"""MODULE:FUNCTION on the command line to the two functions of a proof, here and in a new process."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["FromPair", "TargetError", "of_single_steps", "resolve"]

_TRAIN_STEP = "train_step"


class TargetError(ValueError):
    """The argument MODULE:FUNCTION does not lead to two functions."""


@dataclass(frozen=True)
class FromPair:
    """One of the two functions that a third one returns; closures travel to a new process that way.

    Attributes:
        factory: Returns `(build, train_step)`.
        position: Which of them this is.
    """

    factory: Callable[[], tuple[Any, Any]]
    position: int

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function itself."""
        return _made(self.factory)[self.position]

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        return self.__wrapped__(*arguments)


@functools.cache
def _made(factory: Callable[[], tuple[Any, Any]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not all(callable(one) for one in made):
        raise TargetError(
            f"{factory.__qualname__}() has to return (build, train_step); or put a function {_TRAIN_STEP}(components) "
            "into its module, then it is taken for build itself"
        )
    return made


def resolve(target: str, train_step: str | None) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return build and train_step; for a function that trains a whole run, that and None.

    Args:
        target: `MODULE:FUNCTION`, where the module is a dotted name or a file. FUNCTION is `build` when the module
            has a `train_step`; one that needs an argument is `train(directory)`; otherwise it is called without
            arguments and returns `(build, train_step)`.
        train_step: Name of the step function in the module, when it is not `train_step`.

    Raises:
        TargetError: The text has another form, or the module has no such function.
        ImportError: There is no such module.
    """
    name, colon, function = target.rpartition(":")
    if not colon or not name or not function:
        raise TargetError(
            f"{target!r} is not of the form MODULE:FUNCTION, such as train.py:build or package.train:build"
        )
    module = _module(name)
    build = _function(module, function)
    step = train_step or _TRAIN_STEP
    if train_step is None and _needs_an_argument(build):
        return build, None
    if train_step is None and not hasattr(module, step):
        if _takes_an_argument(build):
            raise TargetError(
                f"{function}() has a default for its argument, so it is not clear whether it trains. Give "
                f"{function}(directory) without a default, or a function without arguments that returns "
                "(build, train_step)"
            )
        return FromPair(build, 0), FromPair(build, 1)
    return build, _function(module, step)


def of_single_steps(train_step: Callable[..., Any] | None, *, ablate: bool, in_process: bool) -> dict[str, Any]:
    """Return the options of a proof that drives single steps.

    Raises:
        TargetError: One is given, and there is no function for a step.
    """
    if train_step is not None:
        return {"ablations": ablate, "in_process": True if in_process else None}
    if ablate or in_process:
        raise TargetError("--ablate and --in-process need build and train_step")
    return {}


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with one argument."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _needs_an_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function cannot be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:
        return False  # one without a signature
    return False


def _module(name: str) -> ModuleType:
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        return importlib.import_module(name)
    if not path.is_file():
        raise TargetError(f"there is no file {name}")
    sys.path.insert(0, str(path.parent.absolute()))  # as running it does
    loader = SourceFileLoader(path.stem, str(path.absolute()))
    spec = spec_from_loader(path.stem, loader)
    if spec is None:
        raise TargetError(f"{name} cannot be imported")
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        raise TargetError(f"{module.__name__} has no function {name}")
    return found  # type: ignore[no-any-return]
