"""A module without a train_step: its functions return what is to be proven."""

from __future__ import annotations

from typing import Any

from tests.proof.loops import build_small, small_step


def both() -> tuple[Any, Any]:
    scale = 0.5
    return build_small, lambda c: small_step(c, scale=scale)


def neither() -> Any:
    return build_small
