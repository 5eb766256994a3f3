"""A loader that Accelerate has prepared, read so that its position is known; `accelerate` and `transformers` use it.

A prepared loader fetches a batch ahead to know which one is the last, and sets the process's random streams. Here the
plain loader inside, whose batches are shared out among the ranks already, is read through a `ResumableLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from safeckpt import ResumableLoader
from safeckpt.integrations.requirements import check_hooks, requires

requires("accelerate", "1.10", "2", "accelerate")

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin, SkipBatchSampler  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from accelerate.utils import send_to_device, synchronize_rng_states  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402

__all__ = ["PreparedLoader"]

_HOOKS_OF_LOADERS = {
    "base_dataloader": "the plain loader, whose batches are shared out among the ranks",
    "_drop_last": "whether the last batch may be smaller",
    "skip_batches": "whether batches are left out at the beginning",
}
_HOOKS_OF_SHARDS = {
    "device": "where batches go",
    "rng_types": "which random streams the ranks have in common",
    "synchronized_generator": "the generator that gives all ranks one order",
}


class PreparedLoader(DataLoaderStateMixin):
    """Iterates what `accelerator.prepare` has made of a DataLoader, so that a resumed run sees the same batches.

    Each rank has its share, and batches are on the accelerator's device, as before. `epochs`, `epoch`, `batch`,
    `seek` and `end_epoch` are those of the `ResumableLoader` inside.

    Args:
        prepared: What `accelerator.prepare` returned.
        seed: What order and augmentation derive from, the same on all ranks.
        finds_last: Whether Accelerate asks which batch is the last, to end a group of accumulated gradients there.

    Attributes:
        resumable: The `ResumableLoader` inside, which is the component.
        end_of_dataloader: Whether the batch at hand is the last of its epoch.
        remainder: How many samples of the last batch are no repetition, for `gather_for_metrics`; -1: not known.

    Raises:
        TypeError: It is no loader that Accelerate has prepared, or of a kind whose position cannot be kept.
        ValueError: Nobody can say which batch is the last.
    """

    def __init__(self, prepared: Any, *, seed: int, finds_last: bool) -> None:
        _refuse(prepared)
        self.gradient_state = GradientState()
        plain = prepared.base_dataloader
        self._has_length = not isinstance(plain.dataset, IterableDataset)
        accumulates = self.gradient_state.num_steps > 1 and self.gradient_state.sync_with_dataloader
        if finds_last and accumulates and not self._has_length:
            raise ValueError(
                "gradients are accumulated over batches of an iterable dataset, and Accelerate would look a batch "
                "ahead to end the last group at the last batch, which no position allows for. Next: "
                "GradientAccumulationPlugin(sync_with_dataloader=False), with which a group goes on in the next epoch, "
                "or a dataset with __getitem__ and __len__"
            )
        self._prepared = prepared
        self._drop_last = prepared._drop_last  # DataLoaderStateMixin reads it here
        self._device = prepared.device if isinstance(prepared, DataLoaderShard) else prepared.state.device
        self._shared_streams: list[Any] = []
        if isinstance(prepared, DataLoaderShard) and prepared.rng_types:
            # Once is enough for the generator: all ranks draw the same from it, and its place is in the position.
            synchronize_rng_states(prepared.rng_types, prepared.synchronized_generator)
            self._shared_streams = [kind for kind in prepared.rng_types if kind != "generator"]
        self.resumable = ResumableLoader(plain, seed=seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "resumable":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.resumable, name)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return len(self.resumable)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch after a restore, else the next whole one."""
        if self._shared_streams and self.resumable.batch == 0:
            synchronize_rng_states(self._shared_streams)
        self.begin()
        try:
            for batch in self.resumable:
                self.end_of_dataloader = self.is_last
                yield batch if self._device is None else send_to_device(batch, self._device)
        finally:
            self.end()

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Iterate and yield (number, batch), where the number counts on in a resumed epoch."""
        for batch in self:
            yield self.resumable.batch - 1, batch

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch on all ranks together."""
        return int(self._prepared.total_batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts its epochs itself, and tells the sampler.

        Raises:
            ValueError: It is not the epoch that comes.
        """
        if epoch != self.resumable.epoch:
            raise ValueError(
                f"set_epoch({epoch}), and the loader is in epoch {self.resumable.epoch}: it counts its epochs itself, "
                "across restarts as well. Write for epoch in loader.epochs(n), with n for the whole run"
            )

    @property
    def is_last(self) -> bool:
        """Whether no batch of this epoch comes behind the one at hand; False where nobody can say."""
        if not self._has_length:
            return False
        loader = self.resumable
        left_out = set(loader.left_out)
        return all((loader.epoch, number) in left_out for number in range(loader.batch, len(loader)))


def _refuse(prepared: Any) -> None:
    """Refuse what is no prepared loader, and what keeps its position elsewhere.

    Raises:
        TypeError: It is one of these; the text says what to do.
    """
    kind = type(prepared).__name__
    if isinstance(prepared, ResumableLoader):
        raise TypeError(
            "accelerator.prepare does not know a ResumableLoader and gives it back as it was: every rank would train "
            "on all samples. Next: loader = accelerator.prepare(dataloader) with the DataLoader itself, then "
            "manager, loader = safe(accelerator, directory, loader)"
        )
    if isinstance(prepared, PreparedLoader):
        raise TypeError("this loader was given to safe() before: use it as it is")
    if not issubclass(type(prepared), DataLoaderShard | DataLoaderDispatcher):
        raise TypeError(
            f"a {kind} is no loader that Accelerate has prepared on CPU or GPU. Next: loader = "
            "accelerator.prepare(dataloader), then manager, loader = safe(accelerator, directory, loader); for one "
            "that is not to be shared out among ranks, components={'name': ResumableLoader(dataloader)}"
        )
    check_hooks(prepared, _HOOKS_OF_LOADERS)
    if isinstance(prepared, DataLoaderShard):
        check_hooks(prepared, _HOOKS_OF_SHARDS)
    elif prepared.state.num_processes > 1:
        raise TypeError(
            "this loader is a DataLoaderDispatcher: rank 0 alone reads the data and sends the others their parts, a "
            "batch ahead, so no rank has a position. Next: Accelerator(dataloader_config=DataLoaderConfiguration("
            "dispatch_batches=False)), in transformers accelerator_config={'dispatch_batches': False}, so that each "
            "rank reads its own share"
        )
    if hasattr(prepared.base_dataloader, "state_dict"):
        raise TypeError(
            "this loader was prepared with use_stateful_dataloader=True: it saves where it is in the order, and not "
            "the order, nor the random numbers of augmentation. Next: leave use_stateful_dataloader out; safeckpt "
            "keeps the position"
        )
    if prepared.skip_batches or isinstance(prepared.base_dataloader.batch_sampler, SkipBatchSampler):
        raise TypeError(
            "this loader comes from skip_first_batches: safe() goes to the position by itself. Next: leave "
            "skip_first_batches out"
        )
