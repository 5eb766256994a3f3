"""Hold Python's garbage collector while millions of objects are made that are no garbage."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold the collector inside the block, unless it is held already.

    Every few hundred new containers it looks at all containers there are, which takes as long as making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
