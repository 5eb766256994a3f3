"""States to save: a transformer with AdamW of any size, and any number of small tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.harness import MB

_LAYERS = 12
_BYTES_PER_PARAMETER = 12  # the weight and AdamW's two moments, float32


class Training:
    """Twelve transformer layers and AdamW: 144 parameters, 576 tensors with the optimizer's.

    Args:
        size_mb: How large weights and moments are together.
        stepped: Do one optimizer step, so that the moments exist.
    """

    def __init__(self, size_mb: float, *, stepped: bool = True) -> None:
        torch.manual_seed(0)
        width = 4 * max(1, round((size_mb * MB / _BYTES_PER_PARAMETER / (12 * _LAYERS)) ** 0.5 / 4))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.width = width
        if stepped:
            self.step()
            self.optimizer.zero_grad()

    def step(self) -> float:
        """Do one training step and return its loss."""
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(1, 8, self.width)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @property
    def components(self) -> dict[str, Any]:
        """What a CheckpointManager takes."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        """Return what people give to torch.save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the state."""
        return list(tensors_in(self.state()))

    def flat(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the state under one name each, for formats that know no nesting."""
        return {f"tensor.{index}": tensor for index, tensor in enumerate(self.tensors())}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def describe(self) -> str:
        """Return its size in words."""
        return f"{self.nbytes / MB:.0f} MB in {len(self.tensors())} tensors"


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree.detach()
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def tiny(count: int) -> dict[str, torch.Tensor]:
    """Return many tensors of eight numbers each, each with memory of its own."""
    torch.manual_seed(0)
    return {f"layer.{index}.scale": torch.randn(8) for index in range(count)}


class Bag(nn.Module):
    """A module of many tiny buffers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index, value in enumerate(tiny(count).values()):
            self.register_buffer(f"b{index}", value)
