"""Where the tensors of a checkpoint are: in a file that is mapped, or in the shards that its index stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from safeckpt.file.reading.checkpoint_file import CheckpointFile
from safeckpt.file.reading.whole_tensors import ShardTensorReader, placeholder_of

if TYPE_CHECKING:
    import torch

    from safeckpt.file.reading.mapping import Mapped
    from safeckpt.file.reading.sharded import CheckpointFolder

__all__ = ["TensorSource", "load_lazily"]


class TensorSource(NamedTuple):
    """What the values of a checkpoint are read from.

    Attributes:
        mapped: The file.
        shards: The shards of a directory, in whose index a dict stands for each tensor.
    """

    mapped: Mapped | None
    shards: ShardTensorReader | None

    def holder_of(self, value: Any) -> Any:
        """Return what a value says about a tensor in the shards; None when it is something else."""
        return None if self.shards is None else placeholder_of(value, self.shards.path)

    def read(self, value: Any) -> torch.Tensor:
        """Return a tensor, or the one in the shards that a value stands for."""
        tensor: torch.Tensor = value
        if self.shards is not None and (holder := self.holder_of(value)) is not None:
            tensor = self.shards.read(holder)
        return tensor.detach()

    def check_unchanged(self) -> None:
        """Check that what was read is what was verified; of shards each part is checked as it is read.

        Raises:
            DamagedCheckpointError: Somebody has written into the file.
        """
        if self.mapped is not None:
            self.mapped.check_unchanged()

    def forget(self, value: Any) -> None:
        """Give back the memory of a tensor that was read."""
        if self.mapped is not None:
            self.mapped.forget(value)


def load_lazily(file: CheckpointFile | CheckpointFolder) -> tuple[Any, TensorSource]:
    """Return what an open checkpoint holds, no tensor read yet, and what its tensors are read from.

    Raises:
        LoadError: As `CheckpointFile.load`.
    """
    if isinstance(file, CheckpointFile):
        payload, mapped = file.load_mapped()
        return payload, TensorSource(mapped, None)
    return file.load("cpu"), TensorSource(None, file.shard_tensors())
