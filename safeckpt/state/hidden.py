"""What a module keeps besides its `state_dict`: arguments of its layers, plain attributes, non-persistent buffers.

None of it is in a checkpoint. What a constructor decides (a dropout's `p`, a norm's `eps`, the heads of an attention)
is noted with the state and compared at a restore. What changes while training is named at the save.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safeckpt.state.component import Captured, Component, class_name
from safeckpt.state.module import ModuleComponent, clean_modules
from safeckpt.state.module_options import changed_options, is_of_torch, options_of, plain_attributes
from safeckpt.state.tree import join
from safeckpt.system.tensor_kind import is_plain
from safeckpt.system.torch_private import hidden_buffers, version_of

__all__ = ["HiddenState"]

_PERSISTENT = "Register it with persistent=True if later steps depend on it"
_EXTRA = "Make it a buffer, or return it from get_extra_state, if later steps depend on it"
_MOST_BYTES = 64 << 20  # of a buffer that is compared; a larger one is a table


class HiddenState:
    """Finds what changes while training and is in no checkpoint.

    Args:
        components: The components as the manager was built with them.

    Cost:
        A digest of every non-persistent buffer at the beginning, and of those that were written to at a save.
    """

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._named: set[str] = set()
        self._attributes: dict[str, dict[str, Any]] = {}  # of the save before
        self._options: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self._buffers: dict[str, tuple[tuple[int, int], str]] = {}
        for component in components.values():
            if isinstance(component, ModuleComponent):
                layers = _layers_of(component)
                options = {join(component.name, path): text for path, text in options_of(layers).items()}
                for name, module in layers.items():
                    full = join(component.name, name)
                    if is_of_torch(module) and full in options:
                        self._options[full] = (weakref.ref(module), options[full])
                for name, tensor in _hidden_buffers(component.name, layers):
                    self._buffers[name] = _mark_of(tensor), _digest_of(tensor)

    def changed(self, pairs: Iterable[tuple[Component, Captured]]) -> list[str]:
        """Return what has changed in components that were just captured, one sentence each; nothing twice."""
        found: list[tuple[str, str]] = []
        before, self._attributes = self._attributes, {}
        for component, captured in pairs:
            if isinstance(component, ModuleComponent):
                layers = _layers_of(component)
                found += self._changed_buffers(component.name, layers)
                found += self._changed_options(component.name, layers, captured.record["options"])
                found += self._changed_attributes(component.name, layers, before)
        fresh = {name: text for name, text in found if name not in self._named}
        self._named.update(fresh)
        return [f"{name}: {text}" for name, text in fresh.items()]

    def _changed_buffers(self, owner: str, layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
        for name, tensor in _hidden_buffers(owner, layers):
            mark, digest = self._buffers.get(name, (None, None))
            if digest is None or mark == _mark_of(tensor):
                continue
            now = _digest_of(tensor)
            self._buffers[name] = (_mark_of(tensor), digest)
            if now != digest and now.partition(" ")[0] == digest.partition(" ")[0]:  # a cache that grows is none
                yield name, f"a non-persistent buffer, which has changed while training. {_PERSISTENT}"

    def _changed_options(
        self, owner: str, layers: Mapping[str, nn.Module], options: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        for path, now in options.items():
            name = join(owner, path)
            reference, before = self._options.get(name, (None, now))
            # A layer that was replaced is the script's doing, and its classes and shapes are compared.
            if before != now and reference is not None and reference() is layers[path]:
                for text in changed_options(before, now, "was {}", "is now {}"):
                    kind = class_name(layers[path])
                    yield name, f"{kind} {text}, which no checkpoint holds. Set it again after a restore"

    def _changed_attributes(
        self, owner: str, layers: Mapping[str, nn.Module], before: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, str]]:
        for path, module in layers.items():
            if is_of_torch(module) or type(module).get_extra_state is not nn.Module.get_extra_state:
                continue  # which of its attributes are in the state of its own, only it knows
            name = join(owner, path)
            now = self._attributes[name] = plain_attributes(module, (bool, int, float))
            for key, value in now.items():
                if key in before.get(name, {}) and before[name][key] != value:
                    yield join(name, key), f"a plain attribute, which has changed between two saves. {_EXTRA}"


def _layers_of(component: ModuleComponent) -> dict[str, nn.Module]:
    return dict(clean_modules(component.obj).values())


def _hidden_buffers(owner: str, layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in layers.items():
        for key, tensor in hidden_buffers(module):
            if is_plain(tensor) and tensor.nbytes <= _MOST_BYTES:
                yield join(join(owner, path), key), tensor


def _mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is replaced or written to."""
    return id(tensor), version_of(tensor) if not tensor.is_inference() else -1


def _digest_of(tensor: torch.Tensor) -> str:
    """Return shape, dtype and a digest of the values."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    with contextlib.suppress(RuntimeError):  # no elements to view
        values = values.view(torch.uint8)
    form = f"{tensor.dtype}{list(tensor.size())}".replace(" ", "")
    return f"{form} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"
