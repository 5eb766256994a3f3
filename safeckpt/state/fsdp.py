"""What FSDP2 (`fully_shard`) keeps out of sight: gathered parameters, and gradients that are not reduced yet.

A forward pass puts whole parameters into the modules in the place of the sharded ones, and leaves them there until the
next backward pass or `state_dict`. Under `set_requires_gradient_sync(False)` a backward pass leaves whole gradients,
another one on each rank, where no parameter's `.grad` shows them. Nothing of torch.distributed is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from safeckpt.errors import UnsavableStateError
from safeckpt.state.component import Component
from safeckpt.state.tree import join
from safeckpt.system.torch_private import drop_unreduced_by_fsdp, unreduced_by_fsdp

__all__ = ["drop_unreduced", "refuse_unreduced", "reshard"]


def _sharded_modules(components: Mapping[str, Component]) -> Iterator[tuple[str, Any]]:
    for name, component in components.items():
        if isinstance(component.obj, nn.Module):
            for module in component.obj.modules():
                if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
                    yield name, module


def reshard(components: Mapping[str, Component]) -> None:
    """Put the sharded parameters back into the modules: those that the optimizers hold, and whose names are known."""
    for _, module in _sharded_modules(components):
        module.reshard()


def _unreduced(components: Mapping[str, Component]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, group, what FSDP2 knows of a parameter) of those that wait for their gradient to be reduced."""
    for name, module in _sharded_modules(components):
        for inner, group, parameter in unreduced_by_fsdp(module):
            yield join(name, inner), group, parameter


def refuse_unreduced(components: Mapping[str, Component]) -> None:
    """Refuse to save in the middle of an accumulation whose gradients no checkpoint could give back.

    Raises:
        UnsavableStateError: Naming the first parameter.
    """
    found = [name for name, _, _ in _unreduced(components)]
    if found:
        raise UnsavableStateError(
            location=f"{found[0]}.grad",
            type_name=f"gradient, one of {len(found)}",
            reason="it is not reduced over all ranks yet, since set_requires_gradient_sync(False) or "
            "set_requires_all_reduce(False) was called, and without it the run would go on as another one",
            cure="save after the last micro-step of an accumulation.",
        )


def drop_unreduced(components: Mapping[str, Component]) -> None:
    """Clear these gradients, as `zero_grad` clears the others."""
    for _, group, parameter in list(_unreduced(components)):
        drop_unreduced_by_fsdp(group, parameter)
