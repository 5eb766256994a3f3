"""What a module keeps besides its `state_dict`: arguments of its layers, plain attributes, non-persistent buffers.

None of it is in a checkpoint. What a constructor decides (a dropout's `p`, a norm's `eps`, the heads of an attention)
is noted with the state and compared at a restore. What changes while training is named at the save.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safeckpt.state.component import Component, class_name
from safeckpt.state.module import ModuleComponent, clean_modules
from safeckpt.state.module_options import changed_options, is_of_torch, options_of, plain_attributes
from safeckpt.state.tree import join
from safeckpt.system.tensor_kind import is_plain

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
        self._modules = [component for component in components.values() if isinstance(component, ModuleComponent)]
        self._named: set[str] = set()
        layers = [entry for entry in self._layers() if is_of_torch(entry[1])]
        self._options = {name: (weakref.ref(module), options) for name, module, options in layers}
        self._attributes: dict[str, dict[str, Any]] = {}  # of the save before
        self._buffers = {name: (_mark_of(tensor), _digest_of(tensor)) for name, tensor in self._hidden_buffers()}

    def _layers(self) -> Iterator[tuple[str, nn.Module, str]]:
        for component in self._modules:
            modules = clean_modules(component.obj)
            layers = dict(modules.values())
            for path, options in options_of(modules).items():
                yield join(component.name, path), layers[path], options

    def _hidden_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for component in self._modules:
            for clean, module in clean_modules(component.obj).values():
                for key in getattr(module, "_non_persistent_buffers_set", ()):
                    tensor = module._buffers.get(key)
                    if tensor is not None and is_plain(tensor) and tensor.nbytes <= _MOST_BYTES:
                        yield join(join(component.name, clean), key), tensor

    def changed(self) -> list[str]:
        """Return what has changed, one sentence each; nothing twice."""
        found = [*self._changed_buffers(), *self._changed_options(), *self._changed_attributes()]
        fresh = {name: text for name, text in found if name not in self._named}
        self._named.update(fresh)
        return [f"{name}: {text}" for name, text in fresh.items()]

    def _changed_buffers(self) -> Iterator[tuple[str, str]]:
        for name, tensor in self._hidden_buffers():
            mark, digest = self._buffers.get(name, (None, None))
            if digest is None or mark == _mark_of(tensor):
                continue
            now = _digest_of(tensor)
            self._buffers[name] = (_mark_of(tensor), digest)
            if now != digest and now.partition(" ")[0] == digest.partition(" ")[0]:  # a cache that grows is none
                yield name, f"a non-persistent buffer, which has changed while training. {_PERSISTENT}"

    def _changed_options(self) -> Iterator[tuple[str, str]]:
        for name, module, options in self._layers():
            reference, before = self._options.get(name, (None, options))
            # A layer that was replaced is the script's doing, and its classes and shapes are compared.
            if before != options and reference is not None and reference() is module:
                for text in changed_options(before, options, "was {}", "is now {}"):
                    yield name, f"{class_name(module)} {text}, which no checkpoint holds. Set it again after a restore"

    def _changed_attributes(self) -> Iterator[tuple[str, str]]:
        now = {
            join(component.name, clean): plain_attributes(module, (bool, int, float))
            for component in self._modules
            for clean, module in clean_modules(component.obj).values()
            if not is_of_torch(module)
        }
        before, self._attributes = self._attributes, now
        for name, attributes in now.items():
            for key, value in attributes.items():
                if key in before.get(name, {}) and before[name][key] != value:
                    yield join(name, key), f"a plain attribute, which has changed between two saves. {_EXTRA}"


def _mark_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is replaced or written to."""
    return id(tensor), tensor._version if not tensor.is_inference() else -1


def _digest_of(tensor: torch.Tensor) -> str:
    """Return shape, dtype and a digest of the values."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    with contextlib.suppress(RuntimeError):  # no elements to view
        values = values.view(torch.uint8)
    form = f"{tensor.dtype}{list(tensor.size())}".replace(" ", "")
    return f"{form} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"
