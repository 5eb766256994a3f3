"""Optimizers that train registered parameters and are not registered: their moments would be lost.

Which parameters are trained cannot be told from the objects: a target network, a moving average and a model that is
only evaluated require gradients as well. So the steps that optimizers really make are watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from safeckpt.errors import listed
from safeckpt.state.component import Component, class_name
from safeckpt.state.registry import inner_parts

__all__ = ["StrayOptimizers"]


class StrayOptimizers:
    """Watches every optimizer of the process until `close`.

    Args:
        components: The components.

    Cost:
        Below a microsecond at every optimizer step.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._components = components
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        watch = weakref.WeakMethod(self._note)  # torch's table must not keep a manager that is never closed

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (method := watch()) is not None:
                method(optimizer)

        self._hook = register_optimizer_step_post_hook(note)
        weakref.finalize(self, self._hook.remove)

    def _note(self, optimizer: Optimizer) -> None:
        self._stepped.add(optimizer)

    def found(self) -> list[str]:
        """Return what was trained by whom, one sentence for each optimizer; nothing twice."""
        # The state_dict of an object has the optimizers inside it, such as that of a wrapper for mixed precision; the
        # state_dict of a module has not.
        objects = [one.obj for one in self._components.values() if not isinstance(one.obj, nn.Module)]
        known = {id(part) for obj in objects for part in (obj, *inner_parts(obj))}
        lines = []
        for optimizer in [one for one in self._stepped if id(one) not in known and one not in self._named]:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, component in self._components.items():
                trained = [key for key, parameter in component.parameter_names().items() if id(parameter) in held]
                if trained:
                    self._named.add(optimizer)
                    lines.append(
                        f"{name}: the {class_name(optimizer)} that trains {listed(trained)} is not registered; its "
                        "moments and options would be lost"
                    )
        return lines

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()
